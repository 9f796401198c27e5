"""BERT4Rec (Sun et al. 2019): a masked language model whose words are items, trained on one device and ranked by leave-one-out.

Token 0 is padding, 1 to n are items, n + 1 is the mask. Windows overlap by half; each row hides a fifth of its items at random, one row in
ten its last item alone, as when asked for the next one; three windows in ten are cut to a random length, so that short histories
are no surprise. Of every user the last item is for the test, the one before it for choosing the epoch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from experiments.movielens import PAD, Ratings


@dataclass(frozen=True)
class Training:
    """How to train: a light public recipe."""

    width: int = 256
    layers: int = 2
    heads: int = 4
    length: int = 100
    dropout: float = 0.2
    hidden: float = 0.2
    rate: float = 1e-3
    batch: int = 512
    epochs: int = 200
    check: int = 10


def build(ratings: Ratings, recipe: Training, seed: int) -> Any:
    """A BertForMaskedLM over items, with random weights."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=ratings.count + 2, hidden_size=recipe.width, num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads, intermediate_size=4 * recipe.width, hidden_act="gelu",
        hidden_dropout_prob=recipe.dropout, attention_probs_dropout_prob=recipe.dropout,
        max_position_embeddings=recipe.length, type_vocab_size=1, pad_token_id=PAD,
        mask_token_id=ratings.count + 1,
    )  # fmt: skip
    return BertForMaskedLM(config)


def windows(ratings: Ratings, length: int) -> np.ndarray:
    """`[windows, 2]`: begin and end in the flat list of items, of training items alone (all but each user's last two)."""
    spans = []
    for begin, end in zip(ratings.starts[:-1], ratings.starts[1:] - 2, strict=True):
        last = int(end)
        while True:
            spans.append((max(int(begin), last - length), last))
            if last - length <= begin:
                break
            last -= length // 2
    return np.asarray(spans)


@dataclass
class Batches:
    """Draws batches on the device: nothing crosses to it after the start."""

    ratings: Ratings
    recipe: Training
    device: str
    seed: int

    def __post_init__(self) -> None:
        self.items = torch.as_tensor(self.ratings.items, dtype=torch.long, device=self.device)
        self.windows = torch.as_tensor(windows(self.ratings, self.recipe.length), device=self.device)
        self.random = torch.Generator(self.device).manual_seed(self.seed)

    def __len__(self) -> int:
        return -(-len(self.windows) // self.recipe.batch)

    def epoch(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Tokens with the mask in place `[B, L]`, the hidden places `[B, K]`, their items `[B, K]` and weights `[B, K]`."""
        order = torch.randperm(len(self.windows), generator=self.random, device=self.device)
        for chosen in order.split(self.recipe.batch):
            yield self.hide(self.windows[chosen])

    def hide(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        length, rows = self.recipe.length, len(chosen)
        begin, end = chosen.unbind(1)
        size = end - begin
        cut = self._uniform(rows) < 0.3
        short = (self._uniform(rows) * size).long().clamp_min(5).minimum(size)
        size = torch.where(cut, short, size)
        shift = (self._uniform(rows) * (end - begin - size + 1)).long()
        places = torch.arange(length, device=self.device)
        inside = places < size[:, None]
        at = (begin + shift)[:, None] + places
        tokens = torch.where(inside, self.items[at.clamp_max(len(self.items) - 1)], PAD)
        count = max(1, round(self.recipe.hidden * length))
        score = self._uniform(rows, length).masked_fill(~inside, 2.0)
        hidden = score.argsort(dim=1)[:, :count]
        wanted = (self.recipe.hidden * size).ceil()
        last = self._uniform(rows) < 0.1
        hidden[:, 0] = torch.where(last, size - 1, hidden[:, 0])
        wanted = torch.where(last, torch.ones_like(wanted), wanted)
        weight = (torch.arange(count, device=self.device) < wanted[:, None]).float()
        items = tokens.gather(1, hidden)
        # The last place may be among the others too, with no weight there.
        masked = torch.zeros_like(tokens, dtype=weight.dtype).scatter_add(1, hidden, weight) > 0
        return tokens.masked_fill(masked, self.ratings.count + 1), hidden, items, weight

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.random, device=self.device)


def histories(ratings: Ratings, users: np.ndarray, length: int, leave: int) -> tuple[np.ndarray, np.ndarray]:
    """`[users, length]` with the mask behind the history, and the item that comes there; `leave` 1 for the test, 2 before it."""
    rows, truth = np.full((len(users), length), PAD, np.int64), np.empty(len(users), np.int64)
    for at, user in enumerate(users):
        own = ratings.of(int(user))
        past = own[: len(own) - leave][-(length - 1) :]
        rows[at, : len(past)] = past
        rows[at, len(past)] = ratings.count + 1
        truth[at] = own[len(own) - leave]
    return rows, truth


def scores(model: Any, rows: np.ndarray, batch: int = 1024) -> Tensor:
    """Logits of every item at the mask, `[users, items + 1]`; padding never wins."""
    device, batches = model.device, []
    mask = model.config.vocab_size - 1
    with torch.inference_mode():
        for begin in range(0, len(rows), batch):
            tokens = torch.as_tensor(rows[begin : begin + batch], device=device)
            states = model.bert(input_ids=tokens, attention_mask=(tokens != PAD).long()).last_hidden_state
            at = (tokens == mask).float().argmax(1)
            logits = model.cls(states[torch.arange(len(tokens), device=device), at]).float()[:, :mask]
            batches.append(logits.index_fill(1, torch.tensor([PAD], device=device), -torch.inf))
    return torch.cat(batches)


def ranking(logits: Tensor, truth: np.ndarray, ratings: Ratings, users: np.ndarray, seed: int) -> dict[str, float]:
    """HR@10 and NDCG@10 among all items not seen, among 100 random ones, and among 100 drawn by popularity."""
    random = np.random.default_rng(seed)
    table = logits.cpu().numpy()
    popularity = np.bincount(ratings.items, minlength=ratings.count + 1).astype(float)
    places: dict[str, list[int]] = {"all items": [], "100 random": [], "100 popular": []}
    for at, user in enumerate(users):
        own = np.unique(ratings.of(int(user)))
        mine = table[at, truth[at]]
        unseen = np.ones(ratings.count + 1, bool)
        unseen[own] = unseen[PAD] = False
        other = np.flatnonzero(unseen)
        places["all items"].append(int((table[at, other] > mine).sum()))
        for name, weights in (("100 random", None), ("100 popular", popularity[other] / popularity[other].sum())):
            drawn = random.choice(other, min(100, len(other)), replace=False, p=weights)
            places[name].append(int((table[at, drawn] > mine).sum()))
    figures = {}
    for name, ranks in places.items():
        rank = np.asarray(ranks)
        figures[f"HR@10, {name}"] = float((rank < 10).mean())
        figures[f"NDCG@10, {name}"] = float(np.where(rank < 10, 1 / np.log2(rank + 2), 0).mean())
    return figures


def train(
    ratings: Ratings, recipe: Training, folder: Path, device: str, seed: int, say: Callable[[str], None]
) -> tuple[Any, dict[str, Any]]:
    """The model of the best epoch and how it was found; a folder that holds one already is read."""
    from transformers import BertForMaskedLM

    if (folder / "training.json").is_file():
        return BertForMaskedLM.from_pretrained(folder).to(device).eval(), json.loads(
            (folder / "training.json").read_text()
        )
    model = build(ratings, recipe, seed).to(device)
    batches = Batches(ratings, recipe, device, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.rate, fused=device.startswith("cuda"))
    steps = recipe.epochs * len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 100, 1 - 0.9 * step / steps))
    everyone = np.arange(ratings.users)
    rows, truth = histories(ratings, everyone, recipe.length, leave=2)
    narrow = torch.autocast("cuda", torch.bfloat16) if device.startswith("cuda") else nullcontext()
    best: tuple[float, int, dict[str, Tensor]] = (-1.0, 0, {})
    curve, began = [], time.perf_counter()
    for epoch in range(1, recipe.epochs + 1):
        model.train()
        total = torch.zeros((), device=device)
        for tokens, hidden, items, weight in batches.epoch():
            with narrow:
                states = model.bert(input_ids=tokens, attention_mask=(tokens != PAD).long()).last_hidden_state
                logits = model.cls(states.gather(1, hidden[..., None].expand(-1, -1, states.shape[-1])))
            losses = cross_entropy(logits.float().flatten(0, 1), items.flatten(), reduction="none")
            loss = (losses * weight.flatten()).sum() / weight.sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            schedule.step()
            total += loss.detach()
        if epoch % recipe.check == 0 or epoch == recipe.epochs:
            model.eval()
            with narrow:
                logits = scores(model, rows)
            mine = logits.gather(1, torch.as_tensor(truth, device=device)[:, None])
            rank = (logits > mine).sum(1)
            value = float(torch.where(rank < 10, 1 / torch.log2(rank + 2.0), 0.0).mean())
            curve.append({"epoch": epoch, "loss": float(total) / len(batches), "validation NDCG@10": value})
            say(
                f"seed {seed}, epoch {epoch}: loss {curve[-1]['loss']:.3f}, validation NDCG@10 {value:.4f}, {time.perf_counter() - began:.0f} s"
            )
            if value > best[0]:
                best = value, epoch, {name: part.detach().cpu().clone() for name, part in model.state_dict().items()}
    model.load_state_dict(best[2])
    record = {
        "recipe": asdict(recipe),
        "seed": seed,
        "epoch": best[1],
        "curve": curve,
        "seconds": time.perf_counter() - began,
    }
    model.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(record))
    return model.eval(), record

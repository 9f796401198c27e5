"""Questions about pictures: six kinds, fine-tuned from the pre-trained model and from nothing (Xue et al. 2021, the table of VQA2).

`VisualParsingClassifier` answers from a list of 24 by two layers on the state of `[CLS]`. It starts from the model that
`vision-pretrain` trained (which is trained first where it is not there), or from nothing, and learns from new pictures
with questions of all kinds, "what color is the ring", "what shape is the red one", "how many large thing", "is there a
blue cross", "is the red ring left of the blue cross", "where is the red ring": batches of 256, for 300 steps and for
2,000. Answers yes and no are balanced.

Measured is the share of right answers to the questions of numpy's world about 1,000 pictures of the test's seed, by
kind. From nothing is the control, and the most frequent answer of each kind what can be had without looking. The
published figure is of photographs: 74.0 on VQA2 (as later papers quote it).
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from experiments import pictures
from experiments.pictures import percent
from experiments.recipe import Bar, Block, Setting, Table
from heedful.bridges.record import Hyperparameters
from heedful.bridges.training import train
from heedful.multimodal import SceneCaptions, Shapes, VisualParsingClassifier, VisualParsingConfig, pixel_values
from heedful.multimodal.pretraining import SceneStream
from heedful.multimodal.questions import questions
from heedful.multimodal.worlds import ANSWERS, QUESTIONS, encode

FEW, MANY = 300, 2000
STARTS = ("pre-trained", "from nothing")
MOST = "most frequent answer"


class Asked(SceneCaptions):
    """Scenes with questions: pictures, texts, answers."""

    def batch(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        scenes = self.draw(count, generator)
        found = questions(scenes, generator)
        return pixel_values(scenes.render(generator)), found.input_ids, found.answers


def asked(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Questions of numpy's world: the picture's number, text, answer and kind."""
    world = Shapes(seed=1)
    rows = []
    for i in range(count):
        for at, kind in enumerate(QUESTIONS):
            found = world.question(i, kind)
            if found is not None:
                rows.append((i, encode(found[0]), ANSWERS.index(found[1]), at))
    image, ids, answer, kind = zip(*rows, strict=True)
    return torch.tensor(image), torch.tensor(ids), torch.tensor(answer), torch.tensor(kind)


def _run(start: str, steps: int, device: str, quick: bool, folder: Any) -> dict[str, Any]:
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    answers: dict[str, Any] = {"num_labels": len(ANSWERS)}
    if start == STARTS[0]:
        model = VisualParsingClassifier.from_pretrained(folder, **answers)
    else:
        model = VisualParsingClassifier(VisualParsingConfig.from_pretrained(folder, **answers))
    batch = 8 if quick else 256
    stream = SceneStream(Asked(), steps * batch, 0, torch.device(device))
    how = Hyperparameters(
        epochs=1, batch_size=batch, lr=5e-4 if start == STARTS[0] else 1e-3, optimizer="AdamW", weight_decay=0.01, clip=1.0,
        schedule="cosine", warmup=0.07, precision="auto", seed=0,
    )  # fmt: skip
    began = time.perf_counter()
    train(
        model, stream, loss=lambda net, images, ids, labels: net(images, ids, labels=labels).loss,
        measure=lambda net, images, ids, labels: {"loss": net(images, ids, labels=labels).loss[None]},
        hyperparameters=how, device=torch.device(device), collate=stream.collate,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    count = 20 if quick else 1000
    images, _ = pictures.pictures_asked(count, device)
    image, ids, answer, kind = (part.to(device) for part in asked(count))
    model.to(device).eval()
    with torch.no_grad():
        parts = torch.arange(len(ids), device=device).split(500)
        logits = torch.cat([model(images[image[part]], ids[part]).itm_logits for part in parts])
    right = (logits.argmax(-1) == answer).double()
    figures = {name: round(float(right[kind == at].mean()), 4) for at, name in enumerate(QUESTIONS)}
    return {"seconds": round(seconds, 1), "all": round(float(right.mean()), 4), **figures}


def _most(quick: bool) -> dict[str, float]:
    _, _, answer, kind = asked(20 if quick else 1000)
    counts = [Counter(answer[kind == at].tolist()) for at in range(len(QUESTIONS))]
    right = [count.most_common(1)[0][1] for count in counts]
    figures = {name: round(best / count.total(), 4) for name, best, count in zip(QUESTIONS, right, counts, strict=True)}
    return {"all": round(sum(right) / len(answer), 4), **figures}


def run(setting: Setting) -> dict[str, Any]:
    folder = pictures.pretrained(setting)
    few, many = (2, 3) if setting.quick else (FEW, MANY)
    parts = {
        f"{start}, {steps} steps": (start, steps, setting.device, setting.quick, folder)
        for steps in (few, many)
        for start in STARTS
    }
    store = setting.store()
    found = store.run(_run, parts, pictures.jobs(setting))
    return {"quick": setting.quick, "steps": [few, many], "parts": found, "most": _most(setting.quick)}


def tables(result: dict[str, Any]) -> list[Block]:
    parts, (few, many) = result["parts"], result["steps"]
    columns = ("percent right", "all", *QUESTIONS)
    rows = [(name, *(percent(part[kind]) for kind in columns[1:])) for name, part in parts.items()]
    rows.append((MOST, *(percent(result["most"][kind]) for kind in columns[1:])))
    blocks: list[Block] = [Table(columns, rows, control=MOST)]
    if not result["quick"]:
        ours = parts.get(f"{STARTS[0]}, {many} steps", {})
        blocks += [Bar(f"pre-trained, {many:,} steps: {kind}", ours.get(kind), 0.95, shown=".3f") for kind in QUESTIONS]
        pair = [parts.get(f"{start}, {few} steps", {}).get("all") for start in STARTS]
        gain = None if None in pair else pair[0] - pair[1]
        blocks += [Bar(f"pre-trained less from nothing, {few} steps, all kinds", gain, 0.1, shown=".3f")]
    return blocks

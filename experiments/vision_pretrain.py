"""A small model of pictures and texts, pre-trained from nothing: does it see colours, shapes, sizes and places, and find the picture of a text (Xue et al. 2021).

`VisualParsingModel` as it comes (1.5 million parameters) learns from the world `shapes` by MLM, ITM and masked feature
regression, whose hidden image tokens are chosen by attention: 3,000 steps of 512 new pictures on one GPU, one seed. It
begins after two fifths of the steps: a word of an object that is hidden cannot be guessed, and in a small model on a CPU
shapes were seen later where tokens were hidden from the start. The model is kept in the work folder, where
`vision-vqa`, `vision-retrieval` and `vision-flow` find it.

Measured are, on 2,000 pictures of the test's seed as numpy draws them: how often a true caption scores above its foil,
ties one half; how often a hidden word is guessed; and recall at the first place among 200 pictures and 200 texts, both
ways, where whatever the caption is true of counts as right. The spread of image tokens is the smallest over all steps:
where it falls to 0 the model has stopped seeing. The paper trains on photographs that cannot be had here; the column
"prototype" is that of an earlier program of the same size on this world, in 4,500 steps of 1,024 pictures. Guessing is
the control.
"""

from __future__ import annotations

from typing import Any

import torch

from experiments import pictures
from experiments.pictures import base, foils, percent
from experiments.recipe import Bar, Block, Setting, Table
from experiments.retrieving import recalls
from heedful.multimodal import SceneCaptions, Scenes, VisualParsingModel, mask_words
from heedful.multimodal.worlds import FOILS

PROTOTYPE = {
    "colour": 0.998,
    "shape": 0.995,
    "size": 0.997,
    "relation": 0.50,
    "words": 0.927,
    "text to image R@1": 0.93,
    "image to text R@1": 0.92,
}
SIZES = {True: (4, 8, 2, pictures.SMALL, 24), False: (3000, 512, 15, {}, 2000)}
WANTED = {"colour": 0.97, "shape": 0.95, "size": 0.97, "relation": 0.97, "swap": 0.97, "location": 0.97}
MFR_AFTER = 0.4
RECALLS = ("text to image R@1", "image to text R@1")


@torch.no_grad()
def words_accuracy(model: VisualParsingModel, images: torch.Tensor, scenes: Scenes) -> float:
    """How often a hidden word is the most likely one."""
    generator = torch.Generator(images.device).manual_seed(2)
    ids = scenes.captions(generator).tokens()
    hidden, labels = mask_words(
        ids, mask_id=3, vocab_size=model.config.vocab_size, special=range(5), probability=0.15, generator=generator
    )
    model.eval()
    right = []
    for part in torch.arange(len(ids), device=ids.device).split(500):
        logits = model(images[part], hidden[part]).mlm_logits
        chosen = labels[part] != -100
        right.append((logits.argmax(-1) == labels[part])[chosen])
    return float(torch.cat(right).double().mean())


def _run(device: str, quick: bool, kept: Any) -> dict[str, Any]:
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    steps, batch, rounds, config, count = SIZES[quick]
    images, scenes = pictures.pictures_asked(count, device)
    part = slice(512)
    model, record = pictures.trained(
        SceneCaptions(), lambda model: foils(model, images[part], scenes[part]), device=device, seed=0, steps=steps, batch=batch,
        rounds=rounds, config=config, kept=kept, mfr_after=MFR_AFTER,
    )  # fmt: skip
    record["foils"] = foils(model, images, scenes)
    record["words"] = round(words_accuracy(model, images, scenes), 4)
    found = recalls(model, images, scenes, 12 if quick else 200, 1)
    record["retrieval"] = {name: found["model"][name] for name in RECALLS} | {
        "chance": found["chance"]["text to image R@1"]
    }
    return record


def run(setting: Setting) -> dict[str, Any]:
    folder = base(setting)
    found = setting.store().run(_run, {"model": (setting.device, setting.quick, folder)})
    return {"quick": setting.quick, **found}


def tables(result: dict[str, Any]) -> list[Block]:
    record = result["model"]
    kinds = [*FOILS, "words", *RECALLS]
    ours = record["foils"] | {"words": record["words"]} | record["retrieval"]
    guess = dict.fromkeys(FOILS, 0.5) | {"words": 1 / 44} | dict.fromkeys(RECALLS, record["retrieval"]["chance"])
    rows = [(kind, percent(ours[kind]), percent(guess[kind]), percent(PROTOTYPE.get(kind))) for kind in kinds]
    curve = [
        (f"{row['step']:,}", f"{row['seconds']:.0f}", *(percent(row[kind]) for kind in FOILS))
        for row in record["curve"]
    ]
    blocks: list[Block] = [
        Table(("percent", "ours", "guessing", "prototype"), rows, control="guessing"),
        f"{record['parameters']:,} parameters, {record['seconds']:.0f} s of training; spread of image tokens at least {record['spread']:.3f}. "
        f"Losses at the end: {', '.join(f'{name} {value:.3f}' for name, value in record['losses'].items())}. By steps:",
        Table(("step", "seconds", *FOILS), curve[:: max(1, len(curve) // 10)]),
    ]
    if not result["quick"]:
        blocks += [Bar(f"foils of {kind}", ours[kind], bar, shown=".3f") for kind, bar in WANTED.items()]
        blocks += [Bar(name, ours[name], 0.85, shown=".3f") for name in RECALLS]
        blocks += [Bar("seconds of training", record["seconds"], 600, at_least=False)]
    return blocks

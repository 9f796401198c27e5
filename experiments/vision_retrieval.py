"""Which picture a text is about, and which text is about a picture: retrieval by whether both belong together (Xue et al. 2021, tables of Flickr30K).

The model that `vision-pretrain` trained (it is trained first where it is not there) scores every pair of 200 pictures
and 200 captions, half of relations and half of places, by the difference of its two logits of ITM, without further
training; five such sets of the test's seed, the mean of their recalls. Right is every picture of which the caption is
true, and every caption that is true of the picture.

Beside it stands somebody who knows every object of every picture but not where it is: what can be had without places
and relations, equal pictures in random order. It is the control. The published figures are of photographs with five
captions each, among 1,000 pictures: text to image 73.5, 93.1 and 96.4, image to text 87.0, 98.4 and 99.5 (as later
papers quote them).
"""

from __future__ import annotations

from typing import Any

import torch

from experiments import pictures
from experiments.pictures import base, percent
from experiments.recipe import Bar, Block, Setting, Table
from experiments.retrieving import AT, WORDS, recalls
from heedful.multimodal import VisualParsingModel

WAYS = ("text to image", "image to text")


def _run(device: str, quick: bool, folder: Any) -> dict[str, Any]:
    count, draws = (12, 2) if quick else (200, 5)
    images, scenes = pictures.pictures_asked(count * draws, device)
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    model = VisualParsingModel.from_pretrained(folder).to(device)
    return recalls(model, images, scenes, count, draws)


def run(setting: Setting) -> dict[str, Any]:
    pictures.pretrained(setting)
    found = setting.store().run(_run, {"recall": (setting.device, setting.quick, base(setting))})
    return {"quick": setting.quick, "recall": found["recall"]}


def tables(result: dict[str, Any]) -> list[Block]:
    recall = result["recall"]
    names = [f"{way} R@{k}" for way in WAYS for k in AT]
    labels = {"model": "ours", WORDS: WORDS, "chance": "chance"}
    rows = [(label, *(percent(recall[kind][name]) for name in names)) for kind, label in labels.items()]
    blocks: list[Block] = [Table(("percent", *names), rows, control=WORDS)]
    if not result["quick"]:
        blocks += [Bar(f"{way} R@1 of 200", recall["model"][f"{way} R@1"], 0.85, shown=".3f") for way in WAYS]
    return blocks

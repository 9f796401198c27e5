"""Retrieval in the world `shapes`: which of many pictures a text is of, and the other way, beside what can be had without relations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heedful.multimodal import Captions, Scenes, VisualParsingModel, retrieval
from heedful.multimodal.scenes import FIRST, SECOND

WORDS = "all objects known, no places"
AT = (1, 5, 10)


def relevant(captions: Captions, scenes: Scenes) -> Tensor:
    """`(pictures, texts)`: whether a caption is true of a picture."""
    pictures, texts = len(scenes), len(captions)
    pairs = torch.arange(pictures * texts, device=captions.numbers.device)
    return captions[pairs % texts].true(scenes[pairs // texts]).view(pictures, texts)


def named(captions: Captions, scenes: Scenes) -> Tensor:
    """`(pictures, texts)`: how many of the objects that a caption names, a picture has; whoever sees all but no places knows this."""
    things, there = scenes.things[:, None, :, :3], scenes.there[:, None]

    def has(at: int) -> Tensor:
        return ((things == captions.numbers[None, :, None, at : at + 3]).all(-1) & there).any(-1).float()

    both = (captions.kind > 0).float()
    return has(FIRST) + both * has(SECOND) + (1 - both)


def recalls(
    model: VisualParsingModel, images: Tensor, scenes: Scenes, count: int, draws: int, seed: int = 3
) -> dict[str, Any]:
    """Recall both ways among so many pictures and texts, the mean over draws: of the model, of who knows objects but no places, and of chance."""
    generator = torch.Generator(images.device).manual_seed(seed)
    found: dict[str, dict[str, float]] = {}
    model.eval()
    for draw in range(draws):
        part = slice(draw * count, (draw + 1) * count)
        captions = scenes[part].captions(generator)
        right = relevant(captions, scenes[part])
        noise = torch.rand(right.shape, generator=generator, device=images.device)
        scores = {
            "model": model.similarities(images[part], captions.tokens()),
            WORDS: named(captions, scenes[part]) + 0.5 * noise,
            "chance": noise,
        }
        for name, values in scores.items():
            for what, value in retrieval(values, right, AT).items():
                found.setdefault(name, {})[what] = found.get(name, {}).get(what, 0.0) + value / draws
    return {name: {what: round(value, 4) for what, value in figures.items()} for name, figures in found.items()}

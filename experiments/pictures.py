"""What the recipes of pictures and texts share: tests of the world `shapes`, vision models beside ours, a training with its curve, digits as objects."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.recipe import Setting
from heedful.multimodal import (
    SceneCaptions,
    Scenes,
    Shapes,
    VisualParsingConfig,
    VisualParsingModel,
    VLPretrainer,
    Vocabulary,
    foil_accuracy,
    pixel_values,
)
from heedful.multimodal.worlds import COLOURS, SHAPES, SIZES

SPATIAL = ("relation", "swap", "location")
ATTRIBUTES = ("colour", "shape", "size")
# One pair of each colour: never seen in training where pairs are held out.
HELD_OUT = tuple((colour, (colour * 5 + 2) % len(SHAPES)) for colour in range(len(COLOURS)))
DIGITS = tuple("0123456789")
# Trainings that share a GPU, of which each takes part.
BESIDE = 3
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vision_layers": 1,
    "patch_size": 16,
}


def pictures_asked(count: int, device: str, preset: str = "full") -> tuple[Tensor, Scenes]:
    """Pictures of the test's seed as numpy's world draws them, for the model, and what is in them."""
    world = Shapes(preset, seed=1)
    pictures = np.stack([world.scene(i).pixels for i in range(count)])
    scenes = Scenes.of([world.things(i) for i in range(count)], device)
    return pixel_values(torch.from_numpy(pictures).permute(0, 3, 1, 2)).contiguous().to(device), scenes


class ConvolutionalEncoder(nn.Module):
    """Image tokens by convolutions alone, as many as a transformer on patches of 8 gives and of about as many parameters: the control."""

    def __init__(self, width: int = 128, layers: int = 4, patch: int = 8) -> None:
        super().__init__()
        widths = [3, width * 3 // 8, width * 3 // 4, width, width][: patch.bit_length()]
        stem = [
            part
            for a, b in zip(widths, [*widths[1:-1], width], strict=False)
            for part in (nn.Conv2d(a, b, 3, 2, 1), nn.GELU())
        ]
        self.stem = nn.Sequential(*stem)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, width), nn.Conv2d(width, width, 3, padding=1), nn.GELU())
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.stem(pixel_values)
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x.flatten(2).mT)


class ObjectTokens(nn.Module):
    """Objects as vectors of zeros and ones in place of pictures: what is left to learn where seeing is no question."""

    sizes = (len(SIZES), len(COLOURS), len(SHAPES), 4, 4)

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(sum(self.sizes), width), nn.LayerNorm(width)

    @classmethod
    def see(cls, scenes: Scenes, generator: Any = None) -> Tensor:
        """`(n, 3, 24)`, zeros where there is no object."""
        parts = [nn.functional.one_hot(scenes.things[..., at], size) for at, size in enumerate(cls.sizes)]
        seen = torch.cat(parts, -1).float() * scenes.there[..., None]
        return nn.functional.pad(seen, (0, 0, 0, 3 - seen.shape[1]))

    def forward(self, objects: Tensor) -> Tensor:
        return self.norm(self.map(objects))


def new_model(config: Mapping[str, Any], vision: str, seed: int) -> VisualParsingModel:
    """A model that knows nothing, with image tokens by a `"transformer"`, `"convolution"`, or of `"objects"`."""
    torch.manual_seed(seed)
    config = dict(config)
    if vision == "objects":
        config |= {"image_tokens": 3, "image_positions": "none"}
    made = VisualParsingConfig(**config)
    if vision == "objects":
        return VisualParsingModel(made, ObjectTokens(made.hidden_size))
    if vision == "convolution":
        return VisualParsingModel(made, ConvolutionalEncoder(made.hidden_size, patch=made.patch_size))
    return VisualParsingModel(made)


def trained(
    data: SceneCaptions,
    measure: Callable[[VisualParsingModel], Mapping[str, float]],
    *,
    device: str,
    seed: int,
    steps: int,
    batch: int,
    rounds: int,
    config: Mapping[str, Any],
    vision: str = "transformer",
    kept: Path | None = None,
    **options: Any,
) -> tuple[VisualParsingModel, dict[str, Any]]:
    """A new model, trained, with its curve: what `measure` gives after each round, by steps and by seconds of training."""
    model = new_model(config, vision, seed)
    curve: list[dict[str, Any]] = []
    measuring = 0.0
    began = time.perf_counter()

    def after(done: int) -> None:
        nonlocal measuring
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        start = time.perf_counter()
        figures = {name: round(value, 4) for name, value in measure(model).items()}
        curve.append({"step": -(-steps // rounds) * done, "seconds": round(start - began - measuring, 1), **figures})
        measuring += time.perf_counter() - start

    trainer = VLPretrainer(model, steps=steps, batch_size=batch, seed=seed, device=device, progress=False, **options)
    trainer.fit(data, rounds=rounds, after=after)
    if kept is not None:
        model.save_pretrained(kept)
    record = {
        "parameters": sum(part.numel() for part in model.parameters()),
        "vision parameters": sum(part.numel() for part in model.vision.parameters()),
        "losses": {name: round(value, 4) for name, value in trainer.losses_.items()},
        "spread": round(trainer.spread_, 4),
        "seconds": curve[-1]["seconds"],
        "curve": curve,
    }
    return model.to(device), record


def reached(
    curve: Sequence[Mapping[str, float]], names: Sequence[str], bar: float = 0.9, what: str = "step"
) -> float | None:
    """The first measured step, or its seconds, from which on all of these stay at the bar or above."""
    for at, row in enumerate(curve):
        if all(later[name] >= bar for later in curve[at:] for name in names):
            return row[what]
    return None


def foils(model: VisualParsingModel, pictures: Tensor, scenes: Scenes, **options: Any) -> dict[str, float]:
    """Accuracies of all kinds of foils, rounded."""
    return {name: round(value, 4) for name, value in foil_accuracy(model, pictures, scenes, **options).items()}


def digits(work: Path) -> tuple[Tensor, Tensor]:
    """Scikit-learn's written digits as small pictures `(10, m, 8, 8)` of 0..1: those to learn from, and others by other writers for the test.

    Kept as a file in the work folder, for a machine without scikit-learn.
    """
    file = work / "digits.npz"
    if not file.is_file():
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        work.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(file, images=images.reshape(-1, 8, 8).astype(np.uint8), labels=labels.astype(np.uint8))
    with np.load(file) as data:
        images, labels = data["images"], data["labels"]
    # The data are in order of their writers: the last ones wrote nothing that is learned from.
    parts = (slice(0, 1300), slice(1300, None))
    sets = []
    for part in parts:
        by = [images[part][labels[part] == digit] for digit in range(10)]
        least = min(map(len, by))
        sets.append(torch.from_numpy(np.stack([each[:least] for each in by]).astype(np.float32) / 16))
    return sets[0], sets[1]


def digit_words() -> Vocabulary:
    """The world's words with ten digits as what objects are."""
    return Vocabulary(DIGITS)


def base(setting: Setting) -> Path:
    """The folder of the model that `vision-pretrain` trains, where other recipes find it."""
    return setting.work.parent / "vision-pretrain" / ("model-quick" if setting.quick else "model")


def jobs(setting: Setting) -> int:
    """Trainings at a time."""
    return BESIDE if setting.device.startswith("cuda") and not setting.quick else 1


def percent(value: float | None, figures: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{figures}f}"


def spread(values: Sequence[float]) -> str:
    """Mean and range, in percent."""
    return f"{percent(sum(values) / len(values))} ({percent(min(values))} to {percent(max(values))})" if values else ""


def pretrained(setting: Setting) -> Path:
    """The model of `vision-pretrain`, which is trained where it is not there."""
    from experiments.recipe import recipe

    folder = base(setting)
    if not (folder / "model.safetensors").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        setting.say(f"training the model of vision-pretrain for {folder}")
        with_own = Setting(setting.quick, setting.device, folder.parent, setting.say, setting.seconds)
        store = with_own.store()
        store.file("model").unlink(missing_ok=True)
        recipe("vision-pretrain").run(with_own)
    return folder

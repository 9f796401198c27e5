"""How a network is trained, and what a training did: data that need no framework."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import numpy as np

from heedful._checks import check_choice, check_number, check_whole
from heedful._plot import Axes, axes, whole_ticks
from heedful._savable import coded
from heedful._text import quantity
from heedful.bridges.optimizers import check_optimizer

__all__ = ["Epoch", "Hyperparameters", "Training"]

Schedule = Literal["flat", "cosine", "flat-cosine"]
Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class Hyperparameters:
    r"""How a network is trained: everything beside network and data that decides the result.

    Args:
        epochs, patience: training ends after `epochs`, or when the held-out loss has not fallen for `patience` of them.
        batch_size: cases in a batch, of all processes together; `accumulate` batches make one step.
        lr, optimizer, weight_decay: of a class of `torch.optim` by its name, of `"Lamb"`, or of `"LookaheadLamb"`
            (`bridges/optimizers.py`).
        schedule, warmup, flat: the learning rate rises from 0 over the share `warmup` of all steps; then it stays (`"flat"`), falls to
            0 as half a cosine (`"cosine"`), or stays until the share `flat` of all steps is over and then falls (`"flat-cosine"`).
        clip, clip_value: each entry of a gradient is clamped to +- `clip_value`, then all gradients together are clipped to the
            norm `clip`; None for neither.
        precision: `"bfloat16"` computes in it where that is safe, weights stay float32; `"auto"` does so on a GPU.
        seed: decides order and dropout.
        average: what is measured and kept is a running mean of the weights over steps, $\bar w \leftarrow a \bar w + (1 - a) w$ with this a; None for
            the weights themselves.

    >>> Hyperparameters(epochs=3).lr
    0.001
    >>> [round(Hyperparameters(schedule="cosine", warmup=0.1).factor(step, 100), 3) for step in (0, 9, 10, 55, 99)]
    [0.1, 1.0, 1.0, 0.5, 0.0]
    """

    epochs: int = 100
    batch_size: int = 16
    lr: float = 1e-3
    optimizer: str = "RAdam"
    weight_decay: float = 0.0
    clip: float | None = 4.0
    patience: int | None = None
    seed: int = 0
    schedule: Schedule = "flat"
    warmup: float = 0.0
    accumulate: int = 1
    precision: Precision = "float32"
    flat: float = 0.5
    clip_value: float | None = None
    average: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            # Searches over arrays of settings give numpy's numbers, which Lightning refuses.
            object.__setattr__(self, name, value.item() if isinstance(value, np.generic) else value)
        check_whole(epochs=self.epochs, batch_size=self.batch_size, accumulate=self.accumulate)
        check_whole(optional=True, patience=self.patience)
        check_number(0, lr=self.lr)
        check_number(0, optional=True, clip=self.clip, clip_value=self.clip_value)
        check_number(least=0, weight_decay=self.weight_decay)
        check_number(least=0, high=1, warmup=self.warmup)
        check_number(least=0, high=1, optional=True, average=self.average)
        check_number(least=0, most=1, flat=self.flat)
        check_choice(Schedule, schedule=self.schedule)
        check_choice(Precision, precision=self.precision)
        check_optimizer(self.optimizer)

    @property
    def scheduled(self) -> bool:
        """Whether the learning rate changes."""
        return self.schedule != "flat" or self.warmup > 0

    def factor(self, step: int, steps: int) -> float:
        """What the learning rate is multiplied by at a step, counted from 0."""
        rising = round(self.warmup * steps)
        if step < rising:
            return (step + 1) / rising
        start = rising if self.schedule == "cosine" else max(rising, self.flat * steps)
        if self.schedule == "flat" or step < start:
            return 1.0
        return (1 + math.cos(math.pi * min(1.0, (step - start) / ((steps - start) or 1)))) / 2


@dataclass(frozen=True)
class Epoch:
    """One pass over the training part: its mean loss, and what was measured on the held-out part after it."""

    loss: float
    held_out: Mapping[str, float]

    def __str__(self) -> str:
        measured = ", ".join(f"{name} {value:.3f}" for name, value in self.held_out.items())
        return f"loss {self.loss:.3f}" + (f", held-out {measured}" if measured else "")


@coded("training")
@dataclass(frozen=True)
class Training:
    """What a training did: every epoch, the one whose weights were kept, and how many came from a checkpoint.

    `best` counts from 1. Without a held-out part it is the last epoch.

    >>> print(Training((Epoch(0.9, {"loss": 0.8, "accuracy": 0.5}), Epoch(0.4, {"loss": 0.6, "accuracy": 0.75})), best=2))
    2 epochs, the best is 2: held-out loss 0.6, accuracy 0.75
    """

    epochs: tuple[Epoch, ...]
    best: int
    resumed: int = 0

    @property
    def measured(self) -> Mapping[str, float]:
        """What was measured on the held-out part with the weights that were kept."""
        return self.epochs[self.best - 1].held_out

    def to_dict(self) -> dict[str, Any]:
        epochs = [{"loss": epoch.loss, "held_out": dict(epoch.held_out)} for epoch in self.epochs]
        return {"epochs": epochs, "best": self.best, "resumed": self.resumed}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        epochs = tuple(Epoch(epoch["loss"], epoch["held_out"]) for epoch in data["epochs"])
        return cls(epochs, data["best"], data["resumed"])

    def __str__(self) -> str:
        measured = ", ".join(f"{name} {value:.3g}" for name, value in self.measured.items())
        kept = f"the best is {self.best}: held-out {measured}" if measured else f"last loss {self.epochs[-1].loss:.3g}"
        again = f" ({self.resumed} from a checkpoint)" if self.resumed else ""
        return f"{quantity(len(self.epochs), 'epoch')}{again}, {kept}"

    def plot(self, ax: Axes | None = None) -> Axes:
        """Losses by epoch; a dotted line marks the epoch whose weights were kept."""
        ax = axes(ax)
        count = range(1, len(self.epochs) + 1)
        ax.plot(count, [epoch.loss for epoch in self.epochs], label="training")
        if self.measured:
            ax.plot(count, [epoch.held_out["loss"] for epoch in self.epochs], label="held out")
            ax.axvline(self.best, color="gray", linestyle=":", label="kept")
        ax.set(xlabel="epoch", ylabel="loss")
        whole_ticks(ax, "x")
        ax.legend(frameon=False)
        return ax

"""What both symmetry recipes share: rotations by the batch, one way to train, mean and spread."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

Data = tuple[Tensor, Tensor, Tensor]  # X [S, n, d], Z [S, k, d], target [S, m, d]


class Training(NamedTuple):
    """How a model is trained; `augment` turns every sample of every batch by its own random orthogonal matrix."""

    rate: float
    decay: float = 0.0
    augment: bool = False
    steps: int = 1500
    batch: int = 128

    def __str__(self) -> str:
        return f"rate {self.rate:g}, decay {self.decay:g}{', augmented' if self.augment else ''}, {self.steps} steps"


def rotations(count: int, d: int, generator: torch.Generator) -> Tensor:
    """Haar orthogonal matrices `[count, d, d]`."""
    q, r = torch.linalg.qr(torch.randn(count, d, d, generator=generator))
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]


def train(
    model: nn.Module,
    data: Data,
    training: Training,
    generator: torch.Generator,
    validate: Callable[[nn.Module], float] | None = None,
) -> nn.Module:
    """AdamW on the mean squared error; with `validate`, the best of the checkpoints taken every 50 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), training.rate, weight_decay=training.decay)
    pool = rotations(1024, data[0].shape[-1], generator).to(data[0]) if training.augment else None
    best, kept = -float("inf"), None
    for step in range(training.steps):
        rows = torch.randint(len(data[0]), (training.batch,), generator=generator)
        x, z, target = (part[rows] for part in data)
        if pool is not None:
            turn = pool[torch.randint(len(pool), (training.batch,), generator=generator)].mT
            x, z, target = x @ turn, z @ turn, target @ turn
        loss = nn.functional.mse_loss(model(x, z), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if validate is not None and (step % 50 == 49 or step == training.steps - 1):
            score = validate(model)
            if score > best:
                best, kept = score, copy.deepcopy(model.state_dict())
    if kept is not None:
        model.load_state_dict(kept)
    return model.eval()


def perceptron(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Two hidden layers of ReLU."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


class Plain(nn.Module):
    """An MLP on the flattened X and Z, which has to learn the symmetry from data."""

    def __init__(self, rows: int, d: int, hidden: int, out: int) -> None:
        super().__init__()
        self.d, self.layers = d, perceptron(rows * d, hidden, out * d)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.layers(torch.cat((x, z), 1).flatten(1)).unflatten(1, (-1, self.d))


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def shown(values: Sequence[float], digits: int = 3) -> str:
    """Mean and range over seeds."""
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"

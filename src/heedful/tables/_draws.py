"""Random numbers of synthetic tables, and what is done to columns of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Draws:
    """Random numbers: of tables (tensors, on `device`) and of what all tables of a part have in common (Python's)."""

    seed: int
    device: torch.device | str = "cpu"
    common: random.Random = field(init=False)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.common = random.Random(self.seed)
        self.generator = torch.Generator(self.device).manual_seed(self.seed)

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(*size, device=self.device, generator=self.generator)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self.device, generator=self.generator)

    def whole(self, high: int, *size: int) -> Tensor:
        return torch.randint(high, size, device=self.device, generator=self.generator)

    def order(self, *size: int) -> Tensor:
        """Permutations along the last axis."""
        return self.uniform(*size).argsort(-1)

    def chance(self, share: float) -> bool:
        return self.common.random() < share


def standardised(x: Tensor) -> Tensor:
    """Mean 0 and deviation 1 of each column over the rows; a constant is 0."""
    return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5)


def ranks_of(x: Tensor) -> Tensor:
    """Ranks among the rows, in [0, 1).

    >>> ranks_of(torch.tensor([[[3.0], [1.0], [2.0], [9.0]]])).flatten().tolist()
    [0.5, 0.0, 0.25, 0.75]
    """
    return x.argsort(1).argsort(1).to(x.dtype) / x.shape[1]


def gumbel(draws: Draws, *size: int) -> Tensor:
    """Noise whose largest entry beside scores is drawn by their softmax."""
    return -torch.log(-torch.log(draws.uniform(*size).clamp(1e-6, 1 - 1e-6)))

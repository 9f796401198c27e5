"""The simulation study of Quadrio & Candelieri (2025): Gaussian clouds of tokens, and a Transformer block that carries them apart.

Ninety instances of twenty tokens, each token drawn from the Gaussian of its instance's class with covariance 2 I: two classes at (-i, 0) and
(i, 0), or three at (-x, 0), (x, 0) and (0, x) with x = 6 i / (2 (1 + √2)). Every other instance is learned from, the rest is the test. The
block has its LayerNorms inside of the residual branches, `res = x + LN(Dropout(MHA(x)))`, `out = res + LN(FF(res))`, ten heads of width 16,
and a head that classifies each token by itself.

Where the published code departs from its own description (its validation and snapshots are standardised, its training data are not), the
description is followed: features are standardised by the training instances, for all uses.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

import heedful

INSTANCES, TOKENS, VARIANCE = 90, 20, 2.0


class Clouds(NamedTuple):
    """Standardised tokens `[n, T, r]` and the class of each instance `[n]`, to learn from and to test on."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def centres(classes: int, apart: float, features: int) -> Tensor:
    """The means of two or three classes, `[classes, features]`."""
    means = torch.zeros(classes, features)
    if classes == 2:
        means[:, 0] = torch.tensor([-apart, apart])
    else:
        x = 6 * apart / (2 * (1 + math.sqrt(2)))
        means[:, :2] = torch.tensor([[-x, 0.0], [x, 0.0], [0.0, x]])
    return means


def drawn(
    classes: int, apart: float, features: int, seed: int, instances: int = INSTANCES, tokens: int = TOKENS
) -> Clouds:
    """One data set; classes are contiguous, so that both halves have equal shares of them."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(instances) * classes // instances
    noise = torch.randn(instances, tokens, features, generator=generator)
    x = centres(classes, apart, features)[y][:, None] + math.sqrt(VARIANCE) * noise
    learned = x[::2]
    mean, deviation = learned.mean((0, 1)), learned.std((0, 1))
    x = (x - mean) / deviation
    return Clouds(x[::2], y[::2], x[1::2], y[1::2])


class Branches(nn.Module):
    """The study's block; without `normed` its residual branches end in their linear maps."""

    def __init__(self, features: int, normed: bool, heads: int = 10, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(features, heads * width) for _ in range(3))
        self.out = nn.Linear(heads * width, features)
        self.network = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, features))
        self.dropout = nn.Dropout(0.1)
        self.norm1, self.norm2 = (nn.LayerNorm(features, eps=1e-6) if normed else nn.Identity() for _ in range(2))

    def attended(self, x: Tensor) -> Tensor:
        """Tokens behind attention and its residual sum."""
        query, key, value = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = heedful.attend(query, key, value).transpose(1, 2).flatten(2)
        return x + self.norm1(self.dropout(self.out(mixed)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attended(x)
        return x + self.norm2(self.network(x))


class Study(nn.Module):
    """The block and the classifier of tokens, Glorot's weights in both."""

    def __init__(self, features: int, classes: int, normed: bool) -> None:
        super().__init__()
        self.block = Branches(features, normed)
        self.head = nn.Sequential(nn.Linear(features, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, classes))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean over tokens, which have the class of their instance."""
        return nn.functional.cross_entropy(self(x).flatten(0, 1), y.repeat_interleave(x.shape[1]))

    @torch.no_grad()
    def accuracies(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Of tokens, and of instances by the mean of their tokens' probabilities."""
        self.eval()
        probabilities = self(x).softmax(-1)
        tokens = (probabilities.argmax(-1) == y[:, None]).double().mean()
        instances = (probabilities.mean(1).argmax(-1) == y).double().mean()
        self.train()
        return float(tokens), float(instances)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """RMSprop with the constants of Keras, as in the study."""
    return torch.optim.RMSprop(model.parameters(), lr=1e-2, alpha=0.9, eps=1e-7)

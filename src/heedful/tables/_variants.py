"""A table said in other words: columns under other identities, levels under other codes, classes under other names. Answers to all of them are averaged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from heedful.tables.in_context import Context, InContextNetwork

ASKED = 2**20
"""Cells that are asked for at once, over all variants."""


class Variants(NamedTuple):
    """`identity (M, d, k)`, `codes (M, d, levels)`: the new code of each level, `names (M, classes)`: the new name of each class."""

    identity: Tensor
    codes: Tensor
    names: Tensor
    is_category: Tensor

    @classmethod
    def draw(cls, count: int, levels: Sequence[int], classes: int, identity: int, seed: int) -> Variants:
        """`levels` of each column, 0 for numbers.

        >>> Variants.draw(2, [0, 3], 2, 4, seed=0).codes.shape
        torch.Size([2, 2, 3])
        """
        generator = torch.Generator().manual_seed(seed)
        columns, most = len(levels), max(1, *levels)
        identities = torch.randn(count, columns, identity, generator=generator)
        codes = torch.zeros(count, columns, most)
        for place, size in enumerate(levels):
            if size:
                codes[:, place, :size] = torch.rand(count, size, generator=generator).argsort(-1).float()
        names = torch.rand(count, classes, generator=generator).argsort(-1)
        return cls(identities, codes, names, torch.tensor([size > 0 for size in levels]))

    def to(self, device: torch.device, dtype: torch.dtype) -> Variants:
        return Variants(
            self.identity.to(device, dtype),
            self.codes.to(device, dtype),
            self.names.to(device),
            self.is_category.to(device),
        )

    def cells(self, values: Tensor) -> Tensor:
        """`(n, d)`, codes of levels in columns of categories and NaN where a cell is missing -> `(M, n, d)`."""
        level = torch.where(self.is_category, values, 0.0).nan_to_num(0.0).long().clamp(0, self.codes.shape[2] - 1)
        renamed = self.codes.gather(2, level.mT.expand(len(self.codes), -1, -1)).mT
        return torch.where(self.is_category & ~values.isnan(), renamed, values)

    def remember(self, network: InContextNetwork, values: Tensor, target: Tensor) -> Context:
        """What answers need of rows `(n, d)` with their classes `(n,)`."""
        count = len(self.codes)
        return network.remember(
            self.cells(values),
            self.names[:, target],
            torch.full((count,), self.names.shape[1], device=values.device),
            self.is_category.expand(count, -1),
            self.identity,
        )

    def answer(self, network: InContextNetwork, values: Tensor, context: Context) -> Tensor:
        """The logarithm of the mean probability `(asked, classes)` over all variants."""
        count, classes = self.names.shape
        step = max(1, ASKED // (count * (1 + values.shape[1])))
        parts = []
        for part in values.split(step):
            logs = network.answer(self.cells(part), context)[..., :classes]
            parts.append(logs.gather(2, self.names[:, None].expand(-1, logs.shape[1], -1)).logsumexp(0))
        return torch.cat(parts) - math.log(count)

"""A table said in other words: columns under other identities, levels under other codes, classes under other names. Answers to all of them are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from heedful.tables.in_context import Context, InContextNetwork

AT_ONCE = 2**19
"""Cells that go through a network at once."""


class Variants(NamedTuple):
    """`identity (M, c, k)` of the columns at the places `columns (M, c)`, `codes (M, c, levels)`: the new code of each level, `names (M, classes)`: the new name of each
    class, none where targets are numbers."""

    identity: Tensor
    codes: Tensor
    names: Tensor
    is_category: Tensor
    columns: Tensor

    @classmethod
    def draw(
        cls, count: int, levels: Sequence[int], classes: int, identity: int, seed: int, most: int | None = None
    ) -> Variants:
        """`levels` of each column, 0 for numbers; where there are more than `most` columns, each variant has so many drawn ones.

        >>> Variants.draw(2, [0, 3], 2, 4, seed=0).codes.shape
        torch.Size([2, 2, 3])
        """
        generator = torch.Generator().manual_seed(seed)
        sizes, longest = torch.tensor(levels), max(1, *levels)
        identities = torch.randn(count, len(levels), identity, generator=generator)
        # Levels in a random order; places that a column does not have come last.
        order = torch.rand(count, len(levels), longest, generator=generator)
        codes = (order + (torch.arange(longest) >= sizes[:, None])).argsort(-1).argsort(-1).float()
        names = torch.rand(count, classes, generator=generator).argsort(-1)
        # Neighbours may share a vector: each variant has others.
        columns = torch.rand(count, len(levels), generator=generator).argsort(-1)[:, :most]
        at = columns[..., None]
        return cls(
            identities.gather(1, at.expand(-1, -1, identity)), codes.gather(1, at.expand(-1, -1, longest)), names, sizes[columns] > 0, columns,
        )  # fmt: skip

    def to(self, device: torch.device, dtype: torch.dtype) -> Variants:
        return Variants(*(part.to(device, dtype if part.is_floating_point() else None) for part in self))

    def split(self, size: int) -> Iterator[Variants]:
        """So many variants at a time."""
        return (Variants(*parts) for parts in zip(*(part.split(size) for part in self), strict=True))

    def cells(self, values: Tensor) -> Tensor:
        """`(n, d)` or one table for each variant, codes of levels in columns of categories and NaN where a cell is missing -> `(M, n, c)`."""
        at = self.columns[:, None].expand(-1, values.shape[-2], -1)
        chosen = values.expand(len(self.columns), -1, -1).gather(2, at)
        is_level = self.is_category[:, None] & ~chosen.isnan()
        level = torch.where(is_level, chosen, 0.0).long().clamp(0, self.codes.shape[2] - 1)
        return torch.where(is_level, self.codes.gather(2, level.mT).mT, chosen)

    def remember(self, network: InContextNetwork, values: Tensor, target: Tensor) -> Context:
        """What answers need of rows `(n, d)` with their targets `(n,)`, or of one table for each variant."""
        count = len(self.columns)
        target = target.expand(count, -1)
        named = target if network.numbers else self.names.gather(1, target)
        classes = torch.full((count,), self.names.shape[1], device=values.device)
        return network.remember(self.cells(values), named, classes, self.is_category, self.identity)

    def answer(self, network: InContextNetwork, values: Tensor, context: Context) -> Tensor:
        """Log-probabilities `(M, asked, classes)` of rows `(asked, d)` by each variant."""
        return self._asked(network.answer, values, context, self._said)

    def attention(self, network: InContextNetwork, values: Tensor, context: Context) -> Tensor:
        """How much of the votes each asked row takes of each row of the context, `(M, asked, n)`."""
        return self._asked(network.attention, values, context, lambda shares: shares)

    def _asked(
        self,
        ask: Callable[[Tensor, Context], Tensor],
        values: Tensor,
        context: Context,
        said: Callable[[Tensor], Tensor],
    ) -> Tensor:
        step = max(1, AT_ONCE // self.columns.numel())
        return torch.cat([said(ask(self.cells(part), context)) for part in values.split(step)], dim=1)

    def _said(self, logs: Tensor) -> Tensor:
        """Classes by their own names."""
        if not self.names.shape[1]:
            return logs
        return logs.gather(2, self.names[:, None].expand(-1, logs.shape[1], -1))

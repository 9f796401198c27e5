"""What an implementation is asked to do, and what it answers before doing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from heedful.kernels import Kernel
from heedful.masks import Mask, Region, cut
from heedful.masks.algebra import cut_along
from heedful.masks.factors import Factors


class Request(NamedTuple):
    """A checked call of `attend`: kernels of pairs only, one mask, one bias, one bias of low rank."""

    query: Tensor  # [..., H, Q, D]
    key: Tensor  # [..., G, K, D], G = H or a divisor of it
    value: Tensor  # [..., G, K, E]
    kernel: Kernel
    mask: Mask | None = None  # what hides; what only adds to scores is in the two below
    bias: Tensor | None = None
    factors: Factors | None = None  # [..., Q, R], [..., K, R]
    dropout_p: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The grid of pairs: (*leading, queries, keys)."""
        lead, *others = (x.shape[:-3] for x in (self.query, self.key, self.value))
        if any(other != lead for other in others):
            lead = torch.broadcast_shapes(lead, *others)
        return (*lead, *self.query.shape[-3:-1], self.key.shape[-2])

    def expanded(self) -> Request:
        """Keys and values written out once per query head."""
        return self._replace(key=self.per_head(self.key), value=self.per_head(self.value))

    def per_head(self, x: Tensor, axis: int = -3) -> Tensor:
        """A tensor of key heads written out once per query head."""
        if self.query.dim() < 3 or x.shape[axis] == self.query.shape[-3]:
            return x
        return x.repeat_interleave(self.query.shape[-3] // x.shape[axis], dim=axis)

    def visible(self, at: Region | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Where a block's rows may attend, and what is added to their scores; of the whole grid by default."""
        if self.mask is None and self.factors is None:
            return None, None
        keep, bias, factors = self.cut(Region.whole(self.shape, self.query.device) if at is None else at)
        return keep, added(bias, factors, wide(self.query.dtype))

    def cut(self, at: Region) -> tuple[Tensor | None, Tensor | None, Factors | None]:
        """A block of the mask, of the bias, and of the factors."""
        keep = None if self.mask is None else self.mask.block(at)
        bias = None if self.bias is None else cut(self.bias, at)
        if self.factors is None:
            return keep, bias, None
        left, right = self.factors
        return keep, bias, (cut_along(left, at, at.rows), cut_along(right, at, at.cols))


class Cost(NamedTuple):
    """Arithmetic of the forward pass, and memory beyond inputs and outputs, both estimated."""

    flops: float
    bytes: float


class Implementation(NamedTuple):
    """One way to compute `attend`. `refuse` gives the reason why a request cannot be served exactly, or None."""

    name: str
    summary: str
    refuse: Callable[[Request], str | None]
    cost: Callable[[Request], Cost]
    run: Callable[[Request], Tensor]
    guards: Callable[[Request], bool] = lambda request: False  # whether nothing hidden leaks from it, not even NaN
    detail: Callable[[Request], str] = lambda request: (
        ""
    )  # where it has several ways: which one it takes, and why no other


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def added(bias: Tensor | None, factors: Factors | None, dtype: torch.dtype) -> Tensor | None:
    """What a block's bias and factors add to its scores."""
    if factors is None:
        return bias
    left, right = (x.to(dtype) for x in factors)
    return left @ right.mT if bias is None else bias.to(dtype) + left @ right.mT


def pairs(request: Request) -> int:
    """The number of (query, key) pairs over all heads."""
    return torch.Size(request.shape).numel()

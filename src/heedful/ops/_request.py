"""What an implementation is asked to do, and what it answers before doing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from heedful.kernels import Kernel
from heedful.masks import Mask


class Request(NamedTuple):
    """A checked call of `attend`: kernels of pairs only, one mask, one bias."""

    query: Tensor  # [..., H, Q, D]
    key: Tensor  # [..., G, K, D], G = H or a divisor of it
    value: Tensor  # [..., G, K, E]
    kernel: Kernel
    mask: Mask | None = None
    bias: Tensor | None = None
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
        if self.query.dim() < 3 or self.query.shape[-3] == self.key.shape[-3] == self.value.shape[-3]:
            return self
        heads = self.query.shape[-3]
        key, value = (x.repeat_interleave(heads // x.shape[-3], dim=-3) for x in (self.key, self.value))
        return self._replace(key=key, value=value)


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


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pairs(request: Request) -> int:
    """The number of (query, key) pairs over all heads."""
    return torch.Size(request.shape).numel()

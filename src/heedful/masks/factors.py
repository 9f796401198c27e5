"""A bias of low rank, as the two factors whose product it is."""

from __future__ import annotations

import torch
from torch import Tensor

Factors = tuple[Tensor, Tensor]
"""`left_i . right_j` is added to the score of (i, j): `[..., Q, R]` and `[..., K, R]`."""


def joined(*pairs: Factors | None) -> Factors | None:
    """The sum of biases of low rank is one of low rank, with all their factors side by side."""
    given = [pair for pair in pairs if pair is not None]
    if len(given) < 2:
        return given[0] if given else None
    left, right = (side_by_side(*parts) for parts in zip(*given, strict=True))
    return left, right


def side_by_side(*parts: Tensor) -> Tensor:
    """`[..., n, R]` joined along their last axis, the first ones broadcast."""
    lead = torch.broadcast_shapes(*(part.shape[:-2] for part in parts))
    return torch.cat([part.expand(*lead, *part.shape[-2:]) for part in parts], dim=-1)

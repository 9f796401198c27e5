"""A bias of low rank: what time, position or a graph adds to scores, without queries x keys numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful.masks._checks import broadcasts
from heedful.masks.algebra import Mask, Region
from heedful.masks.factors import Factors


@dataclass(frozen=True, eq=False)
class _LowRank(Mask):
    left: Tensor  # [..., Q, R]
    right: Tensor  # [..., K, R]
    same_for_every_query = True

    @property
    def factors(self) -> Factors | None:
        return self.left, self.right

    @property
    def hiding(self) -> Mask | None:
        return None

    def check(self, shape: tuple[int, ...]) -> None:
        for name, tensor, count in (("left", self.left, shape[-2]), ("right", self.right, shape[-1])):
            if tensor.shape[-2] != count or not broadcasts(tensor.shape[:-2], shape[:-2]):
                raise InvalidArgument(
                    f"low_rank: {name} has shape {tuple(tensor.shape)}, expected (..., {count}, {tensor.shape[-1]}) whose "
                    f"first axes broadcast to {shape[:-2]}, for (*leading, queries, keys) = {shape}"
                )

    def block(self, at: Region) -> Tensor:
        return torch.ones(1, 1, dtype=torch.bool, device=at.device)

    def seen_keys(self, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
        return None


def low_rank(left: Tensor, right: Tensor) -> Mask:
    r"""Adds $\ell_i \cdot r_j$ to the score of query i and key j, and hides nothing.

    `left` is `[..., queries, R]` and `right` `[..., keys, R]`, floating, their first axes broadcastable to batch and heads.
    Both receive gradients. The sum of two such biases (`&`) holds the factors of both, and only an implementation that
    writes coefficients out anyway (`reference`) forms the product for all pairs. A kernel without a single score multiplies
    its coefficient by $e^{\ell_i \cdot r_j}$, as with a float mask. `|` and `~` take boolean masks.

    >>> import torch
    >>> from heedful import attend, masks
    >>> x, time = torch.randn(1, 2, 5, 4), torch.randn(5, 3)
    >>> biased = attend(x, x, x, masks.low_rank(time, time) & masks.causal)
    >>> biased.allclose(attend(x, x, x, time @ time.mT, is_causal=True), atol=1e-5)
    True
    """
    for name, tensor in (("left", left), ("right", right)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dim() < 2:
            got = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidArgument(f"low_rank: {name} must be a floating tensor of shape (..., seq, R); got {got}")
    if left.shape[-1] != right.shape[-1] or left.shape[-1] == 0:
        raise InvalidArgument(
            "low_rank: left and right must share their last axis, of at least 1; "
            f"got {tuple(left.shape)} and {tuple(right.shape)}"
        )
    if left.device != right.device:
        raise InvalidArgument(f"low_rank: left is on {left.device} and right on {right.device}; move one of them")
    return _LowRank(left, right)

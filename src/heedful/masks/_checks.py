"""What masks check of what they are given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heedful._errors import InvalidArgument


def check_boolean(name: str, keep: object) -> None:
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.dim() == 0:
        got = f"{keep.dtype} {tuple(keep.shape)}" if isinstance(keep, Tensor) else type(keep).__name__
        raise InvalidArgument(f"{name}: keep must be a boolean tensor, True = may attend; got {got}")


def to_tensor(name: str, argument: str, value: object) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidArgument(f"{name}: {argument} must be a tensor or a list of numbers; got {value!r:.60}") from None


def broadcasts(have: Sequence[int], want: Sequence[int]) -> bool:
    """Whether a tensor of the first shape stretches to the second."""
    return len(have) <= len(want) and all(one in (1, other) for one, other in zip(have[::-1], want[::-1], strict=False))


def check_fit(name: str, tensor: Tensor, shape: tuple[int, ...], last: tuple[int, ...], meaning: str) -> None:
    """Refuses a tensor that is not `(*batch, *last)` with a batch of the grid's first axes."""
    batch = tensor.dim() - len(last)
    wanted = (*shape[:-2][: max(batch, 0)], *last)
    if tensor.dim() != len(wanted) or any(
        have not in (1, want) for have, want in zip(tensor.shape, wanted, strict=True)
    ):
        raise InvalidArgument(
            f"{name}: got shape {tuple(tensor.shape)}, expected {meaning} = {wanted} for queries and keys "
            f"of (*leading, queries, keys) = {shape}"
        )

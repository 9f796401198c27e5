"""A boolean per block of pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heedful._checks import is_whole
from heedful._errors import InvalidArgument
from heedful.masks._checks import broadcasts, check_boolean
from heedful.masks.algebra import Mask, Region, _slice


@dataclass(frozen=True, eq=False)
class _Blocks(Mask):
    keep: Tensor  # [..., ceil(Q / rows), ceil(K / cols)]
    size: tuple[int, int]

    def check(self, shape: tuple[int, ...]) -> None:
        count = tuple(-(-length // step) for length, step in zip(shape[-2:], self.size, strict=True))
        if self.keep.shape[-2:] != count or not broadcasts(self.keep.shape[:-2], shape[:-2]):
            raise InvalidArgument(
                f"blocks: keep has shape {tuple(self.keep.shape)}; for blocks of {self.size} on (*leading, queries, keys) "
                f"= {shape} it must broadcast to {(*shape[:-2], *count)}, the last two axes as they are"
            )

    def block(self, at: Region) -> Tensor:
        batch = self.keep.dim() - 2
        keep = _slice(self.keep.to(at.device), at.lead[len(at.lead) - batch :])
        rows, cols = self.size
        rows_of, cols_of = (
            torch.arange(*along, device=at.device) // step for along, step in ((at.rows, rows), (at.cols, cols))
        )
        return keep.index_select(-2, rows_of).index_select(-1, cols_of)


def blocks(keep: Tensor, size: int | tuple[int, int]) -> Mask:
    """Whole blocks of pairs: (i, j) is visible where `keep[..., i // rows, j // cols]`; `size` is (rows, cols) or both.

    `keep` is boolean, `[..., ceil(queries / rows), ceil(keys / cols)]`, its leading axes those of batch and heads.

    >>> import torch
    >>> from heedful import masks
    >>> masks.blocks(torch.eye(2, dtype=torch.bool), (1, 2)).dense((2, 3)).int()
    tensor([[1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    check_boolean("blocks", keep)
    if keep.dim() < 2:
        raise InvalidArgument(f"blocks: keep must have an axis of rows and one of columns; got {tuple(keep.shape)}")
    both = size if isinstance(size, tuple) else (size, size)
    if len(both) != 2 or any(not is_whole(one) or one < 1 for one in both):
        raise InvalidArgument(f"blocks: size must be a positive integer or a pair of them; got {size!r}")
    return _Blocks(keep, both)

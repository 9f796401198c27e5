"""What a mask leaves of a grid of pairs, as kernels read it: its tensors, and lists of blocks that they walk through."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from heedful.ops.fused.launch import Problem

MASKING = ("lengths", "query_ids", "key_ids", "keep", "blocks")
# A tensor of a mask by its name; of a list of blocks by the size of a block, whether it is one of columns, and its place below.
Name = str | tuple[int, int, bool, int]
ORDER, COUNT, FULL = range(3)


class Sight:
    """The masking arguments of a `Problem` and what kernels read in their place, each tensor made when it is first asked for."""

    def __init__(
        self, sizes: tuple[int, int, int, int], device: torch.device, given: Sequence[Tensor | None], block_size: Sequence[int], low: int | None, high: int | None
    ) -> None:  # fmt: skip
        self.sizes, self.device = sizes, device  # B, H, Q, K
        self.given = tuple(given)
        self.lengths, self.query_ids, self.key_ids, self.keep, self.blocks = self.given
        self.block_size, self.low, self.high = block_size, low, high
        self._made: dict[Name, Tensor] = {}

    @cached_property
    def strides(self) -> tuple[Any, ...]:
        return tuple([None if x is None else x.stride() for x in self.given])

    @cached_property
    def places(self) -> int:
        """Where tensors that kernels read begin, as one number that is a multiple of what they all are."""
        places = 0
        for name, x in zip(MASKING, self.given, strict=True):
            places |= 0 if x is None else self.tensor(name).data_ptr()
        return places

    @classmethod
    def of(cls, problem: Problem) -> Sight:
        B, H, _, Q, K = problem.sizes
        given, settings = problem[8:13], (problem.block_size, problem.low, problem.high)
        return cls((B, H, Q, K), problem.query.device, given, *settings)

    def tensor(self, name: Name) -> Tensor:
        if name not in self._made:
            if isinstance(name, tuple):
                rows, cols, transposed, _ = name
                found = self._listed(rows, cols, transposed)
                self._made |= {(rows, cols, transposed, at): x for at, x in enumerate(found)}
            else:
                self._made[name] = self._read(name)
        return self._made[name]

    def _read(self, name: str) -> Tensor:
        B, H, _, K = self.sizes
        x: Tensor = getattr(self, name)
        if name == "keep":
            return x.view(torch.uint8)
        if name == "blocks":
            return x.contiguous().view(torch.uint8)
        # One entry, or row, for each batch and head.
        x = x.clamp(0, K) if name == "lengths" else x
        return x.expand(B, H, *x.shape[2:]).contiguous()

    def _listed(self, rows: int, cols: int, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
        some, every = self._blocks_in_sight(rows, cols)
        return listed(some.mT, every.mT) if transposed else listed(some, every)

    def _blocks_in_sight(self, rows: int, cols: int) -> tuple[Tensor, Tensor]:
        """Which blocks of pairs hold a pair in sight (or may), and in which all pairs are: [B | 1, H | 1, row blocks, column blocks]."""
        _, _, Q, K = self.sizes
        top = torch.arange(0, Q, rows, device=self.device)[:, None]
        first = torch.arange(0, K, cols, device=self.device)
        bottom, last = (top + rows).clamp_max(Q) - 1, (first + cols).clamp_max(K) - 1
        some = torch.ones(1, 1, top.shape[0], first.shape[0], dtype=torch.bool, device=self.device)
        whole = some & (first + cols <= K)
        if self.high is not None:
            some, whole = some & (first <= bottom + self.high), whole & (last <= top + self.high)
        if self.low is not None:
            some, whole = some & (last >= top + self.low), whole & (first >= bottom + self.low)
        if self.lengths is not None:
            lengths = self.lengths[..., None, None]
            some, whole = some & (first < lengths), whole & (last < lengths)
        if self.query_ids is not None and self.key_ids is not None:
            least, most = (x[..., :, None] for x in _extent(self.query_ids, rows))
            low, high = (x[..., None, :] for x in _extent(self.key_ids, cols))
            some, whole = some & (least <= high) & (low <= most), whole & (least == high) & (low == most)
        if self.keep is not None:
            some = some & _any(_any(self.keep, cols).mT, rows).mT
            whole = whole & ~_any(_any(~self.keep, cols).mT, rows).mT
        if self.blocks is not None:
            height, width = self.block_size
            seen = pad(self.blocks.long().cumsum(-1).cumsum(-2), (1, 0, 1, 0))
            begin, end = top[:, 0] // height, bottom[:, 0] // height + 1
            left, right = first // width, last // width + 1
            lines = seen[..., end, :] - seen[..., begin, :]
            count = lines[..., right] - lines[..., left]
            some, whole = some & (count > 0), whole & (count == (end - begin)[:, None] * (right - left))
        return some, whole


def _any(keep: Tensor, size: int) -> Tensor:
    """Whether a stretch of the last axis holds a True; an axis of one stands for all."""
    length = keep.shape[-1]
    if length == 1:
        return keep
    return pad(keep, (0, -length % size)).unflatten(-1, (-1, size)).any(dim=-1)


def _extent(ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The least and the largest id of every stretch."""
    fill = -ids.shape[-1] % size
    last = ids[..., -1:].expand(*ids.shape[:-1], fill)
    return torch.cat((ids, last), dim=-1).unflatten(-1, (-1, size)).aminmax(dim=-1)


def listed(some: Tensor, whole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The blocks of every row that hold pairs in sight, one behind the other, how many there are, and in how many of these, the first, all are."""
    some, whole = torch.broadcast_tensors(some, whole & some)
    order = torch.argsort(2 - some.to(torch.uint8) - whole.to(torch.uint8), dim=-1, stable=True).to(torch.int32)
    count, full = (x.sum(dim=-1, dtype=torch.int32).contiguous() for x in (some, whole))
    return order.contiguous(), count, full

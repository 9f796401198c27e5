"""Which blocks of pairs a mask leaves something of, as lists that kernels walk through."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from heedful.ops.fused.launch import Problem


def sight(problem: Problem, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Which blocks of pairs hold a pair in sight (or may), and in which all pairs are: [B | 1, H | 1, row blocks, column blocks]."""
    _, _, _, Q, K = problem.sizes
    device = problem.query.device
    top = torch.arange(0, Q, rows, device=device)[:, None]
    first = torch.arange(0, K, cols, device=device)
    bottom, last = (top + rows).clamp_max(Q) - 1, (first + cols).clamp_max(K) - 1
    some = torch.ones(1, 1, top.shape[0], first.shape[0], dtype=torch.bool, device=device)
    whole = some & (first + cols <= K)
    if problem.high is not None:
        some, whole = some & (first <= bottom + problem.high), whole & (last <= top + problem.high)
    if problem.low is not None:
        some, whole = some & (last >= top + problem.low), whole & (first >= bottom + problem.low)
    if problem.lengths is not None:
        lengths = problem.lengths[..., None, None]
        some, whole = some & (first < lengths), whole & (last < lengths)
    if problem.query_ids is not None and problem.key_ids is not None:
        least, most = (x[..., :, None] for x in _extent(problem.query_ids, rows))
        low, high = (x[..., None, :] for x in _extent(problem.key_ids, cols))
        some, whole = some & (least <= high) & (low <= most), whole & (least == high) & (low == most)
    if problem.keep is not None:
        some = some & _any(_any(problem.keep, cols).mT, rows).mT
        whole = whole & ~_any(_any(~problem.keep, cols).mT, rows).mT
    if problem.blocks is not None:
        height, width = problem.block_size
        seen = pad(problem.blocks.long().cumsum(-1).cumsum(-2), (1, 0, 1, 0))
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

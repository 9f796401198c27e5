"""A mask taken apart: into what a fused kernel can work out from positions, and the rest."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heedful.masks._blocks import _Blocks
from heedful.masks._packed import _Packed
from heedful.masks.algebra import Mask, Region, _And, _Causal, _Document, _offset, _Padding, _Window

PLAIN = (Tensor, nn.Parameter)


class Parts(NamedTuple):
    """Conditions that all must hold for query i to see key j of a grid (*leading, Q, K); None where there is none.

    `batch...` are the first of the leading axes, perhaps not all; an axis of one entry stands for all.
    """

    low: int | None = None  # j - i >= low
    high: int | None = None  # j - i <= high
    lengths: Tensor | None = None  # [batch...], integers: j < lengths
    ids: tuple[Tensor, Tensor] | None = None  # [batch..., Q] and [batch..., K], integers: equal
    keep: Tensor | None = None  # boolean, broadcastable to (*leading, Q, K)
    blocks: tuple[Tensor, tuple[int, int]] | None = None  # keep [..., rows, cols] and the size of a block: see `blocks`


def parts(mask: Mask | None, shape: Sequence[int], device: torch.device | str = "cpu") -> Parts:
    """The mask as bounds of j - i, lengths, ids, blocks, and a boolean tensor for all that is nothing of these.

    What a mask adds to scores is not part of it (`bias`, `factors`). Nothing is read from a tensor, so this waits for no
    device and may be traced. Or, not and `beside` are written out, and so is the second pair of ids or size of blocks.

    >>> from heedful import masks
    >>> masks.parts(masks.causal & masks.window(3), (5, 7))[:2]
    (-3, 0)
    """
    if mask is None:
        return Parts()
    grid = tuple(shape)
    mask.check(grid)
    at = Region.whole(grid, torch.device(device))
    limits = Parts()
    for one in _joined_by_and(mask.hiding):
        limits = _tightened(limits, one, at)
    return limits


def _joined_by_and(mask: Mask | None) -> list[Mask]:
    if mask is None:
        return []
    return [*_joined_by_and(mask.left), *_joined_by_and(mask.right)] if type(mask) is _And else [mask]


def _tightened(limits: Parts, mask: Mask, at: Region) -> Parts:
    """The parts with one more mask that is no `&`."""
    if isinstance(mask, _Causal):
        return _between(limits, None, _offset(mask.align, at.shape))
    if isinstance(mask, _Window):
        offset = _offset(mask.align, at.shape)
        return _between(limits, offset - mask.before, offset + mask.after)
    if isinstance(mask, _Padding):
        lengths = mask.lengths.to(at.device)
        return limits._replace(lengths=lengths if limits.lengths is None else _shorter(limits.lengths, lengths))
    ids = _ids(mask, at)
    if ids is not None and limits.ids is None:
        return limits._replace(ids=ids)
    if isinstance(mask, _Blocks):
        keep = mask.keep.to(at.device)
        if limits.blocks is None or limits.blocks[1] == mask.size:
            return limits._replace(blocks=(keep if limits.blocks is None else keep & limits.blocks[0], mask.size))
    kept = mask.block(at)
    return limits._replace(keep=kept if limits.keep is None else limits.keep & kept)


def _between(limits: Parts, low: int | None, high: int | None) -> Parts:
    lows = [one for one in (limits.low, low) if one is not None]
    highs = [one for one in (limits.high, high) if one is not None]
    # torch's own, so that sizes a compiled graph leaves open stay open.
    return limits._replace(
        low=torch.sym_max(*lows) if len(lows) > 1 else lows[0] if lows else None,
        high=torch.sym_min(*highs) if len(highs) > 1 else highs[0] if highs else None,
    )


def _shorter(one: Tensor, other: Tensor) -> Tensor:
    """The smaller of lengths `[batch...]`, whose axes start alike."""
    axes = max(one.dim(), other.dim())
    one, other = (x.reshape(*x.shape, *(1,) * (axes - x.dim())) for x in (one, other))
    return torch.minimum(one, other)


def _ids(mask: Mask, at: Region) -> tuple[Tensor, Tensor] | None:
    """What says by being equal who sees whom, as integers."""
    if isinstance(mask, _Packed):
        return mask.ids(at)
    if not isinstance(mask, _Document) or any(x.is_floating_point() for x in (mask.query_ids, mask.key_ids)):
        return None
    queries, keys = mask.query_ids.to(at.device), mask.key_ids.to(at.device)
    return queries.expand(*queries.shape[:-1], at.shape[-2]), keys.expand(*keys.shape[:-1], at.shape[-1])


def kind(mask: Mask) -> Hashable | None:
    """All that masks share which are taken apart alike, whatever their tensors hold; None of a mask from elsewhere.

    >>> import torch
    >>> from heedful import masks
    >>> one, other = (masks.causal & masks.keys(keep) for keep in torch.eye(2, dtype=torch.bool))
    >>> masks.kind(one) == masks.kind(other), masks.kind(one) == masks.kind(masks.causal)
    (True, False)
    """
    names = _held(mask)
    if names is None:
        return None
    found: list[Any] = [type(mask)]
    for name in names:
        one = getattr(mask, name)
        if isinstance(one, Mask):
            one = kind(one)
            if one is None:
                return None
        elif isinstance(one, Tensor):
            if type(one) not in PLAIN:
                return None
            one = one.shape, one.stride(), one.dtype, one.device
        found.append(one)
    if isinstance(mask, _Packed):
        return type(mask), mask.query_bounds.device  # however many sequences there are
    return tuple(found)


def versions(mask: Mask) -> tuple[int, ...] | None:
    """Where each tensor of a mask lies and how often it was written to; None where torch does not count it, and of a mask from elsewhere."""
    names = _held(mask)
    if names is None:
        return None
    found: list[int] = []
    for name in names:
        one = getattr(mask, name)
        if isinstance(one, Mask):
            inner = versions(one)
            if inner is None:
                return None
            found += inner
        elif isinstance(one, Tensor):
            if type(one) not in PLAIN or one.is_inference():
                return None
            found += one.data_ptr(), one._version
    return tuple(found)


def _held(mask: Mask) -> tuple[str, ...] | None:
    """What one of these masks consists of, by name, without what follows from it; None of masks from elsewhere."""
    kind: Any = type(mask)
    return _names(kind) if kind.__module__.rpartition(".")[0] == __package__ else None


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind) if one.compare)


def split_causal(mask: Mask | None, shape: tuple[int, ...]) -> tuple[bool, Mask | None] | None:
    """A mask as "causal or not" and a part that is the same for every query; None where it is not of that form."""
    if mask is None or mask.same_for_every_query:
        return False, mask
    if isinstance(mask, _Causal):
        return (True, None) if _offset(mask.align, shape) == 0 else None
    if type(mask) is _And:
        left, right = split_causal(mask.left, shape), split_causal(mask.right, shape)
        if left is not None and right is not None:
            rest = left[1] if right[1] is None else right[1] if left[1] is None else left[1] & right[1]
            return left[0] or right[0], rest
    return None

"""The algebra: boolean functions of (query, key) pairs, evaluated block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument
from heedful._runtime import readable
from heedful.masks._checks import broadcasts, check_boolean, check_fit, to_tensor
from heedful.masks.factors import Factors, joined

Align = Literal["start", "end"]

# A float mask hides where it is as low as floats go; the lowest bfloat16, written in any wider type, counts.
LOWEST = -3.38e38


Range = tuple[int, int]
"""From the first to behind the last; plain numbers, so that a compiled graph may leave them open."""


class Region(NamedTuple):
    """A piece of the grid of pairs: ranges of the leading axes, of the queries and of the keys, out of `shape`."""

    lead: tuple[Range, ...]
    rows: Range
    cols: Range
    shape: tuple[int, ...]  # (*leading, queries, keys)
    device: torch.device

    @staticmethod
    def whole(shape: Sequence[int], device: torch.device) -> Region:
        *lead, queries, keys = shape
        return Region(tuple((0, size) for size in lead), (0, queries), (0, keys), tuple(shape), device)

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in (*self.lead, self.rows, self.cols))

    def row_index(self) -> Tensor:
        return torch.arange(*self.rows, device=self.device)[:, None]

    def col_index(self) -> Tensor:
        return torch.arange(*self.cols, device=self.device)


class Mask:
    """A boolean function of (query, key) pairs. A subclass says what it keeps of a block."""

    same_for_every_query = False

    @property
    def bias(self) -> Tensor | None:
        """What the mask adds to scores, broadcastable to (*leading, queries, keys)."""
        return None

    @property
    def factors(self) -> Factors | None:
        """What the mask adds to scores besides, as factors of low rank (`low_rank`)."""
        return None

    @property
    def hiding(self) -> Mask | None:
        """The mask without what only adds to scores; None where it hides nothing."""
        return self

    def block(self, at: Region) -> Tensor:
        """True where the query may attend to the key; broadcastable to the block's shape."""
        raise NotImplementedError

    def span(self, rows: Range, shape: tuple[int, ...]) -> Range:
        """Keys outside this range are hidden from all of these rows."""
        return 0, shape[-1]

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuses a grid that this mask does not fit."""

    def dense(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """The mask written out, broadcastable to `shape` = (*leading, queries, keys)."""
        self.check(tuple(shape))
        return self.block(Region.whole(shape, torch.device(device)))

    def reach(self, marked: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Which queries may attend to a marked key: `[..., K]` booleans to `[..., Q]`, or `[..., 1]` for all alike."""
        whole = Region.whole(shape, marked.device)
        if self.same_for_every_query:
            return (self.block(whole)[..., 0, :] & marked).any(dim=-1, keepdim=True)
        blocks = []
        for at in some_rows(whole):
            seen = self.block(at) & marked[..., None, :]
            blocks.append(seen.any(dim=-1).expand(*seen.shape[:-2], at.rows[1] - at.rows[0]))
        return torch.cat(blocks, dim=-1)

    def seen_keys(self, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
        """Keys `[..., K]` that some query may attend to; None where that is all of them."""
        whole = Region.whole(shape, device)
        if self.same_for_every_query:
            seen = self.block(whole)[..., 0, :]
            return seen.expand(*seen.shape[:-1], shape[-1])
        seen = torch.zeros(shape[-1], dtype=torch.bool, device=device)
        for at in some_rows(whole):
            seen = seen | self.block(at).any(dim=-2)
        return seen

    def __and__(self, other: Mask) -> Mask:
        return _And(self, _known(other))

    def __or__(self, other: Mask) -> Mask:
        return _Or(self, _known(other))

    def __invert__(self) -> Mask:
        return _Not(self)


@dataclass(frozen=True)
class _Causal(Mask):
    """Query i sees keys 0..i (`causal`), or so that the last query sees the last key (`lower_right`)."""

    align: Align = "start"

    def block(self, at: Region) -> Tensor:
        return at.col_index() <= at.row_index() + _offset(self.align, at.shape)

    def span(self, rows: Range, shape: tuple[int, ...]) -> Range:
        return 0, min(max(rows[1] + _offset(self.align, shape), 0), shape[-1])

    def seen_keys(self, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
        return torch.arange(shape[-1], device=device) < shape[-2] + _offset(self.align, shape)

    def reach(self, marked: Tensor, shape: tuple[int, ...]) -> Tensor:
        last = torch.arange(shape[-2], device=marked.device) + _offset(self.align, shape)
        seen = marked.cumsum(dim=-1)[..., last.clamp(0, shape[-1] - 1)] > 0
        return seen & (last >= 0)


@dataclass(frozen=True)
class _Window(Mask):
    before: int
    after: int
    align: Align = "start"

    def block(self, at: Region) -> Tensor:
        ahead = at.col_index() - at.row_index() - _offset(self.align, at.shape)
        return (ahead >= -self.before) & (ahead <= self.after)

    def span(self, rows: Range, shape: tuple[int, ...]) -> Range:
        offset = _offset(self.align, shape)
        start = min(max(rows[0] + offset - self.before, 0), shape[-1])
        return start, min(max(rows[1] + offset + self.after, start), shape[-1])

    def seen_keys(self, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
        place = torch.arange(shape[-1], device=device) - _offset(self.align, shape)
        return (place + self.before >= 0) & (place - self.after < shape[-2])


@dataclass(frozen=True, eq=False)
class _Keys(Mask):
    keep: Tensor  # [batch..., K]
    same_for_every_query = True

    def check(self, shape: tuple[int, ...]) -> None:
        check_fit("keys", self.keep, shape, (shape[-1],), "(batch, keys)")

    def block(self, at: Region) -> Tensor:
        return _along_batch(self.keep, at, at.cols)[..., None, :]


@dataclass(frozen=True, eq=False)
class _Padding(Mask):
    lengths: Tensor  # [batch...]
    longest: int | None = field(compare=False)  # None where it could only be had by waiting for a device
    same_for_every_query = True

    def check(self, shape: tuple[int, ...]) -> None:
        check_fit("padding", self.lengths, shape, (), "(batch,)")

    def block(self, at: Region) -> Tensor:
        return at.col_index() < _along_batch(self.lengths[..., None], at, (0, 1))[..., None, :]

    def span(self, rows: Range, shape: tuple[int, ...]) -> Range:
        return 0, shape[-1] if self.longest is None else min(self.longest, shape[-1])


@dataclass(frozen=True, eq=False)
class _Document(Mask):
    query_ids: Tensor  # [batch..., Q]
    key_ids: Tensor  # [batch..., K]

    def check(self, shape: tuple[int, ...]) -> None:
        check_fit("document", self.query_ids, shape, (shape[-2],), "(batch, queries)")
        check_fit("document", self.key_ids, shape, (shape[-1],), "(batch, keys)")

    def block(self, at: Region) -> Tensor:
        queries = _along_batch(self.query_ids, at, at.rows)[..., :, None]
        return queries == _along_batch(self.key_ids, at, at.cols)[..., None, :]


@dataclass(frozen=True, eq=False)
class _Dense(Mask):
    keep: Tensor  # broadcastable to (*leading, Q, K); bool, or float, which is added and hides where it is lowest

    @property
    def bias(self) -> Tensor | None:
        return self.keep if self.keep.is_floating_point() else None

    @property
    def same_for_every_query(self) -> bool:  # type: ignore[override]
        return self.keep.shape[-2] == 1

    def check(self, shape: tuple[int, ...]) -> None:
        if not broadcasts(self.keep.shape, shape):
            raise InvalidArgument(
                f"attn_mask has shape {tuple(self.keep.shape)}, which does not broadcast to "
                f"(*leading, queries, keys) = {shape}"
            )

    def block(self, at: Region) -> Tensor:
        keep = cut(self.keep, at)
        # NaN hides nothing: it is part of a score that is not a number.
        return keep if keep.dtype == torch.bool else ~(keep <= max(LOWEST, torch.finfo(keep.dtype).min))


@dataclass(frozen=True)
class _And(Mask):
    left: Mask
    right: Mask

    @property
    def bias(self) -> Tensor | None:
        left, right = self.left.bias, self.right.bias
        return right if left is None else left if right is None else left + right

    @property
    def factors(self) -> Factors | None:
        return joined(self.left.factors, self.right.factors)

    @property
    def hiding(self) -> Mask | None:
        left, right = self.left.hiding, self.right.hiding
        if left is self.left and right is self.right:
            return self
        return right if left is None else left if right is None else left & right

    @property
    def same_for_every_query(self) -> bool:  # type: ignore[override]
        return self.left.same_for_every_query and self.right.same_for_every_query

    def block(self, at: Region) -> Tensor:
        return self.left.block(at) & self.right.block(at)

    def span(self, rows: Range, shape: tuple[int, ...]) -> Range:
        left, right = self.left.span(rows, shape), self.right.span(rows, shape)
        start = max(left[0], right[0])
        return start, max(start, min(left[1], right[1]))

    def reach(self, marked: Tensor, shape: tuple[int, ...]) -> Tensor:
        for one, other in ((self.left, self.right), (self.right, self.left)):
            if one.same_for_every_query:
                return other.reach(marked & one.block(Region.whole(shape, marked.device))[..., 0, :], shape)
        return super().reach(marked, shape)

    def seen_keys(self, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
        if not (self.left.same_for_every_query or self.right.same_for_every_query):
            return super().seen_keys(shape, device)
        left, right = self.left.seen_keys(shape, device), self.right.seen_keys(shape, device)
        return right if left is None else left if right is None else left & right

    def check(self, shape: tuple[int, ...]) -> None:
        self.left.check(shape)
        self.right.check(shape)


@dataclass(frozen=True)
class _Or(Mask):
    left: Mask
    right: Mask

    def __post_init__(self) -> None:
        _without_bias(self.left, self.right)

    @property
    def same_for_every_query(self) -> bool:  # type: ignore[override]
        return self.left.same_for_every_query and self.right.same_for_every_query

    def block(self, at: Region) -> Tensor:
        return self.left.block(at) | self.right.block(at)

    def span(self, rows: Range, shape: tuple[int, ...]) -> Range:
        left, right = self.left.span(rows, shape), self.right.span(rows, shape)
        return min(left[0], right[0]), max(left[1], right[1])

    def check(self, shape: tuple[int, ...]) -> None:
        self.left.check(shape)
        self.right.check(shape)


@dataclass(frozen=True)
class _Not(Mask):
    inner: Mask

    def __post_init__(self) -> None:
        _without_bias(self.inner)

    @property
    def same_for_every_query(self) -> bool:  # type: ignore[override]
        return self.inner.same_for_every_query

    def block(self, at: Region) -> Tensor:
        return ~self.inner.block(at)

    def check(self, shape: tuple[int, ...]) -> None:
        self.inner.check(shape)


@dataclass(frozen=True)
class _Beside(Mask):
    left: Mask | None
    keys: int
    right: Mask | None
    extra: int

    @property
    def bias(self) -> Tensor | None:
        left, right = (None if part is None else part.bias for part in (self.left, self.right))
        parts = []
        if left is not None:
            parts.append(pad(left.expand(*left.shape[:-1], self.keys), (0, self.extra)))
        if right is not None:
            parts.append(pad(right.expand(*right.shape[:-1], self.extra), (self.keys, 0)))
        return sum(parts[1:], parts[0]) if parts else None

    @property
    def factors(self) -> Factors | None:
        left, right = (None if part is None else part.factors for part in (self.left, self.right))
        # Keys of the other part have factors of zero, which add nothing.
        return joined(
            left and (left[0], pad(left[1], (0, 0, 0, self.extra))),
            right and (right[0], pad(right[1], (0, 0, self.keys, 0))),
        )

    @property
    def hiding(self) -> Mask | None:
        left, right = (part and part.hiding for part in (self.left, self.right))
        return self if left is self.left and right is self.right else beside(left, self.keys, right, self.extra)

    def check(self, shape: tuple[int, ...]) -> None:
        if self.keys + self.extra != shape[-1]:
            raise InvalidArgument(f"beside: {self.keys} + {self.extra} keys given, {shape[-1]} expected")
        for part, count in ((self.left, self.keys), (self.right, self.extra)):
            if part is not None:
                part.check((*shape[:-1], count))

    def block(self, at: Region) -> Tensor:
        parts = []
        for part, start, count in ((self.left, 0, self.keys), (self.right, self.keys, self.extra)):
            first, last = (min(max(edge - start, 0), count) for edge in at.cols)
            inner = at._replace(cols=(first, last), shape=(*at.shape[:-1], count))
            kept = torch.ones((), dtype=torch.bool, device=at.device) if part is None else part.block(inner)
            parts.append(kept.expand(inner.size))
        return torch.cat(parts, dim=-1)


causal: Mask = _Causal("start")
"""Query i sees keys 0..i, as `is_causal` of `scaled_dot_product_attention`."""

lower_right: Mask = _Causal("end")
"""The last query sees every key, and each one before it one key less: causal attention behind a cache."""


def window(before: int, after: int | None = None, *, align: Align = "start") -> Mask:
    """Query i sees keys i - before .. i + after; `after` defaults to `before`. `align="end"` counts from the last query and key."""
    after = before if after is None else after
    check_whole(0, before=before, after=after)
    check_choice(Align, align=align)
    return _Window(before, after, align)


def padding(lengths: Tensor | Sequence[int]) -> Mask:
    """Keys at and behind each sequence's length are hidden; `lengths` has the batch's shape."""
    tensor = to_tensor("padding", "lengths", lengths)
    if tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.dim() == 0:
        raise InvalidArgument(
            f"padding: lengths must be integers of shape (batch,); got {tensor.dtype} {tuple(tensor.shape)}"
        )
    if not readable(tensor):
        return _Padding(tensor, None)
    if tensor.numel() and int(tensor.min()) < 0:
        raise InvalidArgument(f"padding: lengths must not be negative; got {int(tensor.min())}")
    return _Padding(tensor, int(tensor.max()) if tensor.numel() else 0)


def keys(keep: Tensor) -> Mask:
    """Keys where `keep` (batch, keys) is False are hidden from every query."""
    check_boolean("keys", keep)
    return _Keys(keep)


def document(ids: Tensor, key_ids: Tensor | None = None) -> Mask:
    """Queries see keys of the same document; `ids` is (batch, queries) or (queries,)."""
    queries = to_tensor("document", "ids", ids)
    return _Document(queries, queries if key_ids is None else to_tensor("document", "key_ids", key_ids))


def dense(keep: Tensor) -> Mask:
    """A boolean tensor that broadcasts to (*leading, queries, keys); True may attend."""
    check_boolean("dense", keep)
    return _Dense(keep if keep.dim() > 1 else keep[None])


def beside(left: Mask | None, keys: int, right: Mask | None, extra: int) -> Mask | None:
    """The mask over `keys` keys followed by `extra` others, each part with its own mask (None hides nothing)."""
    return None if left is None and right is None else _Beside(left, keys, right, extra)


def cut(tensor: Tensor, at: Region) -> Tensor:
    """The block of a tensor that broadcasts to (*leading, queries, keys)."""
    return _slice(tensor, (*at.lead, at.rows, at.cols)[len(at.lead) + 2 - tensor.dim() :])


def cut_along(tensor: Tensor, at: Region, along: Range) -> Tensor:
    """The block of a tensor `[..., n, R]` of queries or of keys, whose first axes broadcast to the leading ones."""
    return _slice(tensor, (*at.lead[len(at.lead) + 2 - tensor.dim() :], along))


def _along_batch(tensor: Tensor, at: Region, last: Range) -> Tensor:
    """`[batch..., n]` cut and given the leading axes it lacks, so that `[..., None, :]` broadcasts to the block."""
    batch = tensor.dim() - 1
    tensor = _slice(tensor.to(at.device), (*at.lead[:batch], last))
    return tensor.reshape(*tensor.shape[:-1], *(1,) * (len(at.lead) - batch), tensor.shape[-1])


def _slice(tensor: Tensor, ranges: Sequence[Range]) -> Tensor:
    """These ranges of a tensor's axes; an axis of one entry stands for all."""
    for axis, (start, stop) in enumerate(ranges):
        if tensor.shape[axis] != 1:
            tensor = tensor.narrow(axis, start, stop - start)
    return tensor


def _offset(align: Align, shape: tuple[int, ...]) -> int:
    return shape[-1] - shape[-2] if align == "end" else 0


def some_rows(whole: Region) -> Iterator[Region]:
    """The grid by blocks of rows, each of a size that can be written out."""
    queries, keys = whole.shape[-2:]
    count = max(1, 2**22 // max(1, torch.Size(whole.shape[:-2]).numel() * keys))
    for start in range(0, queries, count):
        yield whole._replace(rows=(start, min(start + count, queries)))


def _known(mask: object) -> Mask:
    if not isinstance(mask, Mask):
        raise InvalidArgument(f"a mask combines with a mask; got {type(mask).__name__} (wrap a tensor in masks.dense)")
    return mask


def _without_bias(*parts: Mask) -> None:
    if any(part.bias is not None or part.factors is not None for part in parts):
        raise InvalidArgument("a mask that adds to scores combines with & alone; | and ~ take boolean masks")

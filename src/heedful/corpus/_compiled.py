"""The counting of pairs compiled by numba: word by word, into one array that stays in the processor's cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from heedful._errors import MissingExtra
from heedful.corpus._pairs import sparse

# Between two documents.
EDGE = -2


def is_there() -> bool:
    """Whether numba can be imported."""
    return find_spec("numba") is not None


@cache
def _compiled() -> tuple[Any, ...]:
    try:
        from numba import njit
    except ImportError:
        raise MissingExtra("numba", "numba") from None
    compile_ = njit(cache=True)
    return compile_(places), compile_(fill), compile_(lengths), compile_(turn)


def places(ids: Any, starts: Any, order: Any) -> None:
    """Where each token occurs: its places in the order of the text, from `starts[token]` on."""
    free = starts.copy()
    for t in range(len(ids)):
        if ids[t] >= 0:
            order[free[ids[t]]] = t
            free[ids[t]] += 1


def fill(ids: Any, order: Any, starts: Any, slots: Any, parts: Any, ends: Any, rows: Any, data: Any) -> None:
    """The earlier tokens of each later token b, as they come, and the sums of their weights, from `ends[slot, b]` on, which is moved behind them."""
    sums = np.zeros((len(ends), len(starts)), np.int64)
    begins = np.zeros(len(ends), np.int64)
    for b in range(len(starts) - 1):
        for slot in range(len(ends)):
            begins[slot] = ends[slot, b]
        for place in range(starts[b], starts[b + 1]):
            t = order[place]
            for distance in range(1, min(len(slots), t) + 1):
                a = ids[t - distance]
                if a == EDGE:
                    break
                slot = slots[distance - 1]
                if a >= 0:
                    if sums[slot, a] == 0:
                        rows[ends[slot, b]] = a
                        ends[slot, b] += 1
                    sums[slot, a] += parts[distance - 1]
        for slot in range(len(ends)):
            for place in range(begins[slot], ends[slot, b]):
                data[place] = sums[slot, rows[place]]
                sums[slot, rows[place]] = 0


def lengths(begins: Any, ends: Any, rows: Any, sizes: Any) -> None:
    """How many columns have each row, added to `sizes`."""
    for b in range(len(ends)):
        for place in range(begins[b], ends[b]):
            sizes[rows[place]] += 1


def turn(begins: Any, ends: Any, rows: Any, data: Any, indptr: Any, columns: Any, values: Any) -> None:
    """Columns, from `begins[b]` to `ends[b]`, as rows: where each begins, which columns it has, in their order, and the values."""
    free = indptr[:-1].copy()
    for b in range(len(ends)):
        for place in range(begins[b], ends[b]):
            a = rows[place]
            columns[free[a]] = b
            values[free[a]] = data[place]
            free[a] += 1


def count_pairs(ids: np.ndarray, lengths: np.ndarray, size: int, window: int, parts: Sequence[int] | None) -> list[Any]:
    """What `_pairs.count_pairs` gives, to the bit; weights are above zero."""
    places, fill, *turning = _compiled()
    ids = np.insert(ids.astype(np.int32), np.cumsum(lengths)[:-1], EDGE)
    starts = np.zeros(size + 1, np.int64)
    np.cumsum(np.bincount(ids[ids >= 0], minlength=size), out=starts[1:])
    order = np.empty(starts[-1], np.int32 if len(ids) < 2**31 else np.int64)
    places(ids, starts, order)
    slots = np.arange(window) if parts is None else np.zeros(window, np.int64)
    weights = np.ones(window, np.int64) if parts is None else np.array(parts, dtype=np.int64)
    # Room for as many pairs as a token can have; pages of memory that are never written to are never there.
    room = np.minimum(np.diff(starts) * (1 if parts is None else window), size)
    bounds = np.concatenate([[0], np.cumsum(np.tile(room, slots[-1] + 1))])
    begins = bounds[:-1].reshape(-1, size)
    ends = begins.copy()
    rows, data = np.empty(bounds[-1], np.int32), np.empty(bounds[-1], np.int64)
    fill(ids, order, starts, slots, weights, ends, rows, data)
    return [_turned(turning, first, last, rows, data, size) for first, last in zip(begins, ends, strict=True)]


def _turned(turning: Any, begins: np.ndarray, ends: np.ndarray, rows: np.ndarray, data: np.ndarray, size: int) -> Any:
    """A matrix with earlier tokens in rows."""
    lengths, turn = turning
    indptr = np.zeros(size + 1, np.int64)
    lengths(begins, ends, rows, indptr[1:])
    np.cumsum(indptr, out=indptr)
    columns, values = np.empty(indptr[-1], np.int32), np.empty(indptr[-1], np.int64)
    turn(begins, ends, rows, data, indptr, columns, values)
    return sparse().csr_array((values, columns, indptr), shape=(size, size))

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
def _compiled() -> tuple[Any, Any, Any]:
    try:
        from numba import njit
    except ImportError:
        raise MissingExtra("numba", "numba") from None
    compile_ = njit(cache=True)
    return compile_(places), compile_(distinct), compile_(fill)


def places(ids: Any, starts: Any, order: Any) -> None:
    """Where each token occurs: its places in the order of the text, from `starts[token]` on."""
    free = starts.copy()
    for t in range(len(ids)):
        if ids[t] >= 0:
            order[free[ids[t]]] = t
            free[ids[t]] += 1


def distinct(ids: Any, order: Any, starts: Any, low: int, high: int, sizes: Any) -> None:
    """How many different earlier tokens each later token b has at distances low..high, into `sizes[b + 1]`."""
    seen = np.full(len(starts), -1, np.int32)
    for b in range(len(starts) - 1):
        count = 0
        for place in range(starts[b], starts[b + 1]):
            t = order[place]
            for distance in range(1, min(high, t) + 1):
                a = ids[t - distance]
                if a == EDGE:
                    break
                if distance >= low and a >= 0 and seen[a] != b:
                    seen[a] = b
                    count += 1
        sizes[b + 1] = count


def fill(ids: Any, order: Any, starts: Any, low: int, high: int, parts: Any, into: Any, rows: Any, data: Any) -> None:
    """The earlier tokens of each later token b, as they come, and the sums of their weights, from `into[b]` on."""
    sums = np.zeros(len(starts), np.int64)
    for b in range(len(starts) - 1):
        end = into[b]
        for place in range(starts[b], starts[b + 1]):
            t = order[place]
            for distance in range(1, min(high, t) + 1):
                a = ids[t - distance]
                if a == EDGE:
                    break
                if distance >= low and a >= 0:
                    if sums[a] == 0:
                        rows[end] = a
                        end += 1
                    sums[a] += parts[distance - 1]
        for place in range(into[b], end):
            data[place] = sums[rows[place]]
            sums[rows[place]] = 0


def count_pairs(ids: np.ndarray, lengths: np.ndarray, size: int, window: int, parts: Sequence[int] | None) -> list[Any]:
    """What `_pairs.count_pairs` gives, to the bit; weights are above zero."""
    places, distinct, fill = _compiled()
    ids = np.insert(ids.astype(np.int32), np.cumsum(lengths)[:-1], EDGE)
    starts = np.zeros(size + 1, np.int64)
    np.cumsum(np.bincount(ids[ids >= 0], minlength=size), out=starts[1:])
    order = np.empty(starts[-1], np.int32 if len(ids) < 2**31 else np.int64)
    places(ids, starts, order)
    ranges = [(distance, distance) for distance in range(1, window + 1)] if parts is None else [(1, window)]
    weights = np.ones(window, np.int64) if parts is None else np.array(parts, dtype=np.int64)
    results = []
    for low, high in ranges:
        sizes = np.zeros(size + 1, np.int64)
        distinct(ids, order, starts, low, high, sizes)
        into = np.cumsum(sizes)
        rows, data = np.empty(into[-1], np.int32), np.empty(into[-1], np.int64)
        fill(ids, order, starts, low, high, weights, into, rows, data)
        # Columns of later tokens; turning them into rows also sorts.
        results.append(sparse().csc_array((data, rows, into), shape=(size, size)).tocsr())
    return results

"""Exact search by cosine: vectors as they are given, and the nearest rows of a database in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heedful._checks import check_whole, shown
from heedful._errors import InvalidArgument, MissingExtra

Index = Callable[[np.ndarray, int], tuple[Any, Any]]

# Similarities that are held at once.
CELLS = 2**23
# The part of the database that one product covers where few neighbours are wanted.
WIDTH = 2**14
# Products of matrices treat rows beyond a multiple of some number otherwise, and equal rows would differ in their last digits.
TILE = 64


def vectors(X: Any, name: str = "X") -> Tensor:
    """Rows of finite numbers as a tensor `(n, d)`: float64 stays float64, all else becomes float32; a tensor stays on its device.

    >>> vectors([[1, 2], [3, 4]]).dtype
    torch.float32
    """
    if not isinstance(X, Tensor):
        try:
            values = np.asarray(X)
            dtype = np.float64 if values.dtype == np.float64 else np.float32
            # Torch warns of arrays that may not be written to, as those of a data frame.
            X = torch.from_numpy(np.require(values, dtype, ("C", "W")))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{name} cannot be read as numbers: {error}") from None
    X = X.detach() if X.dtype == torch.float64 else X.detach().float()
    if X.ndim != 2 or 0 in X.shape:
        raise InvalidArgument(
            f"{name} must be rows of numbers, (rows, dimensions), none of both 0; got shape {tuple(X.shape)}"
        )
    if not torch.isfinite(X).all():
        raise InvalidArgument(f"{name} holds NaN or infinite numbers; leave those rows out or repair them")
    return X


def pair(queries: Any, database: Any) -> tuple[Tensor, Tensor]:
    """Queries and database of one dimension and one dtype, the wider of the two; the queries go to the database's device."""
    asked, stored = vectors(queries, "queries"), vectors(database, "database")
    if asked.shape[1] != stored.shape[1]:
        raise InvalidArgument(
            f"queries have {asked.shape[1]} dimensions and the database {stored.shape[1]}; both must come from one model"
        )
    dtype = torch.promote_types(asked.dtype, stored.dtype)
    return asked.to(stored.device, dtype), stored.to(dtype)


def normalized(X: Tensor) -> Tensor:
    r"""Rows divided by their length, $x / \max(|x|_2, 10^{-12})$.

    >>> normalized(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    return torch.nn.functional.normalize(X, dim=-1, eps=1e-12)


def nearest(
    queries: Any,
    database: Any,
    k: int,
    *,
    index: str | Index | None = None,
    exclude: Any = None,
    normalize: bool = True,
) -> tuple[Tensor, Tensor]:
    r"""Cosines $q \cdot x_j$ of each query's k nearest rows of the database, and their places, both `(queries, k)`, the best first.

    Exact; of equal cosines the lower place comes first. Products are computed in blocks, so memory is that of a block and of the
    result. A k above the number of rows gives them all.

    Args:
        queries, database: `(nq, d)` and `(n, d)`: arrays, lists or tensors; the search runs on the device of `database`.
        index: None searches by torch; `"faiss"` by a flat index of faiss; or a function `(queries, k) -> (scores, places)` of your own
            index, in numpy, with -1 for missing ones.
        exclude: `(nq,)`, the place in the database that each query may not find, as itself; -1 excludes none.
        normalize: whether rows are divided by their lengths first; False trusts that they have length 1.

    Places are -1, with a score of minus infinity, where fewer were found.

    >>> scores, places = nearest([[1.0, 0.0]], [[0.0, 1.0], [1.0, 1.0], [2.0, 0.0]], 2)
    >>> places.tolist()
    [[2, 1]]
    """
    check_whole(k=k)
    asked, stored = pair(queries, database)
    if normalize:
        asked, stored = normalized(asked), normalized(stored)
    hidden = None if exclude is None else excluded(exclude, asked, stored)
    most = min(k, len(stored) - int(hidden is not None and bool((hidden >= 0).all())))
    if index is None:
        return top(asked, stored, most, hidden)[:2]
    return _by_index(_faiss(stored) if index == "faiss" else index, asked, stored, most, hidden)


def excluded(exclude: Any, queries: Tensor, database: Tensor) -> Tensor:
    """One place per query, checked, on the device of the database."""
    places = torch.as_tensor(exclude, device=database.device)
    if places.shape != (len(queries),) or places.is_floating_point() or places.dtype == torch.bool:
        raise InvalidArgument(
            f"exclude must be one whole number per query, shape ({len(queries)},); got {places.dtype} of shape {tuple(places.shape)}"
        )
    if len(places) and not (int(places.min()) >= -1 and int(places.max()) < len(database)):
        raise InvalidArgument(f"exclude must lie between -1 and {len(database) - 1}; got {shown(places.tolist())}")
    return places.long()


def blocks(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `count`.

    >>> list(blocks(5, 3))
    [slice(0, 3, None), slice(3, 5, None)]
    """
    return (slice(begin, min(begin + size, count)) for begin in range(0, count, size))


def top(queries: Tensor, database: Tensor, k: int, exclude: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The search itself, on rows as they are: scores, places, and each query's least product with any row, `(nq,)`."""
    count, total = len(queries), len(database)
    width = total if 4 * k >= total else min(total, max(WIDTH, 4 * k))
    scores, places = queries.new_empty(count, k), queries.new_empty(count, k, dtype=torch.long)
    least = queries.new_empty(count)
    for rows in blocks(count, max(1, CELLS // width)):
        found: list[tuple[Tensor, Tensor]] = []
        lowest = queries.new_full((rows.stop - rows.start,), torch.inf)
        for part in blocks(total, width):
            here = products(queries[rows], database[part])
            lowest = torch.minimum(lowest, here.amin(1))
            if exclude is not None:
                hide(here, exclude[rows] - part.start)
            values, at = stable_top(here, min(k, here.shape[1]))
            found = [_merged(found, (values, at + part.start), k)]
        scores[rows], places[rows] = found[0]
        least[rows] = lowest
    places[scores == -torch.inf] = -1
    return scores, places, least


def products(queries: Tensor, database: Tensor) -> Tensor:
    """Products of rows `(nq, n)`, the same for equal rows of the database wherever they stand."""
    count = len(database)
    return (queries @ torch.nn.functional.pad(database, (0, 0, 0, -count % TILE)).T)[:, :count]


def hide(scores: Tensor, places: Tensor) -> None:
    """Minus infinity at one place of each row, where that lies among the columns; in place."""
    inside = (places >= 0) & (places < scores.shape[1])
    scores[inside.nonzero()[:, 0], places[inside]] = -torch.inf


def stable_top(scores: Tensor, k: int, second: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k largest of each row with their places, the largest first; of equal ones that with the larger `second`, then the lower place.

    >>> stable_top(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]]), 2)[1].tolist()
    [[1, 2]]
    """
    if k == 0 or 4 * k >= scores.shape[1]:
        values, places = _descending(scores, second)
        return values[:, :k], places[:, :k]
    values, places = scores.topk(k + 1, dim=1)
    # Equal scores on both sides of the border: topk takes any of them.
    split = values[:, k - 1] == values[:, k]
    places = places[:, :k]
    if split.any():
        places[split] = _descending(scores[split], None if second is None else second[split])[1][:, :k]
    places = places.sort(dim=1).values
    values, by = _descending(scores.gather(1, places), None if second is None else second.gather(1, places))
    return values, places.gather(1, by)


def _descending(scores: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows from the largest on, and their places; of equal ones that with the larger `second`, then the lower place."""
    packed = scores.device.type == "cpu" and scores.dtype == torch.float32 and not bool(scores.isnan().any())
    values, order = _packed(scores) if packed else scores.sort(dim=1, descending=True, stable=True)
    if second is None or scores.shape[1] < 2:
        return values, order
    # Runs of equal scores; only their members are sorted again.
    again = values[:, 1:] == values[:, :-1]
    rows = again.any(1).nonzero()[:, 0]
    if len(rows):
        same = again if len(rows) == len(again) else again[rows]
        tied = torch.nn.functional.pad(same, (1, 0)) | torch.nn.functional.pad(same, (0, 1))
        row, column = tied.nonzero(as_tuple=True)
        # The first of a run is not the same as what is before it.
        runs = (~torch.nn.functional.pad(same, (1, 0)))[row, column].cumsum(0)
        row = rows[row]
        places = order[row, column]
        by = second[row, places].argsort(descending=True, stable=True)
        order[row, column] = places[by[runs[by].argsort(stable=True)]]
    return values, order


def _packed(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The same as a stable sort of float32 by one of whole numbers, which numpy does in half of the time or less: score and place in 64 bits."""
    # As whole numbers, floats from 0 on rise with their bits and those below 0 fall; what is sorted shall fall. -0.0 + 0.0 is 0.0.
    bits = (scores.contiguous().numpy() + np.float32(0)).view(np.int32)
    flips = bits >> 31
    np.invert(flips, out=flips)
    flips &= np.int32(2**31 - 1)
    bits ^= flips
    keys = bits.view(np.uint32).astype(np.uint64)
    keys <<= np.uint64(32)
    keys |= np.arange(scores.shape[1], dtype=np.uint64)
    keys.sort(axis=1)
    keys &= np.uint64(2**32 - 1)
    places = torch.from_numpy(keys.view(np.int64))
    return scores.gather(1, places), places


def _merged(before: list[tuple[Tensor, Tensor]], part: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
    if not before:
        return part
    values = torch.cat((before[0][0], part[0]), dim=1)
    places = torch.cat((before[0][1], part[1]), dim=1)
    # What came before has the lower places, and is in front of its equals.
    values, by = values.sort(dim=1, descending=True, stable=True)
    return values[:, :k], places.gather(1, by)[:, :k]


def _faiss(database: Tensor) -> Index:
    try:
        import faiss
    except ImportError:
        raise MissingExtra("faiss", "ranking") from None
    flat = faiss.IndexFlatIP(database.shape[1])
    flat.add(database.float().cpu().numpy())
    return lambda queries, k: flat.search(queries.astype(np.float32), k)


def _by_index(index: Any, queries: Tensor, database: Tensor, k: int, exclude: Tensor | None) -> tuple[Tensor, Tensor]:
    if not callable(index):
        raise InvalidArgument(
            f"index must be None, 'faiss' or a function (queries, k) -> (scores, places); got {shown(index)}"
        )
    wanted = min(k + int(exclude is not None), len(database))
    scores, places = (np.asarray(part) for part in index(queries.cpu().numpy(), wanted))
    whole = np.issubdtype(places.dtype, np.integer)
    if scores.shape != places.shape or places.ndim != 2 or len(places) != len(queries) or not whole:
        raise InvalidArgument(
            f"the index must return scores and whole places of shape ({len(queries)}, {wanted}); got {scores.dtype} of shape {scores.shape} "
            f"and {places.dtype} of shape {places.shape}"
        )
    if places.size and not (places.min() >= -1 and places.max() < len(database)):
        raise InvalidArgument(
            f"the index found places between {places.min()} and {places.max()}, but the database has {len(database)} rows: "
            "it was built for another database"
        )
    at = torch.from_numpy(places.astype(np.int64)).to(queries.device)
    values = torch.from_numpy(scores.astype(np.float64)).to(queries)
    gone = at < 0 if exclude is None else (at < 0) | (at == exclude[:, None])
    values = values.masked_fill(gone, -torch.inf)
    at, by = at.masked_fill(gone, len(database)).sort(dim=1)
    values, by = values.gather(1, by).sort(dim=1, descending=True, stable=True)
    at = at.gather(1, by)
    at[at == len(database)] = -1
    if at.shape[1] < k:
        lack = (0, k - at.shape[1])
        at = torch.nn.functional.pad(at, lack, value=-1)
        values = torch.nn.functional.pad(values, lack, value=-torch.inf)
    return values[:, :k], at[:, :k]

r"""Re-ranking by k-reciprocal neighbours, with neighbourhoods kept sparse."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from heedful._checks import check_number, check_whole
from heedful.ranking._asked import ask
from heedful.ranking.result import Ranking
from heedful.ranking.search import CELLS, blocks, top

# Pairs of sparse entries that are compared at once: as many as lie near the processor.
ENTRIES = 2**20


def k_reciprocal(
    queries: Any,
    database: Any,
    *,
    k1: int = 20,
    k2: int = 6,
    weight: float = 0.3,
    top: int | None = None,
    candidates: Any = None,
    normalize: bool = True,
    device: str | torch.device = "auto",
) -> Ranking:
    r"""Items by how much of their neighbourhoods they share with the query (Zhong et al. 2017, equations 2 to 12).

    Over all items, queries and database, with $D_{ij} = |x_i - x_j|^2 / \max_l |x_i - x_l|^2$ and N(i, k) the item i and its k nearest:

    1. $R(i) = \{j \in N(i, k_1) : i \in N(j, k_1)\}$, the k-reciprocal neighbours, and $R_{1/2}$ the same with half of k1;
    2. $R^*(i) = R(i)$ and every $R_{1/2}(j)$, $j \in R(i)$, of which more than two thirds lie in R(i);
    3. $V_{ij} = e^{-D_{ij}}$ for $j \in R^*(i)$, else 0, rows divided by their sums; then each row replaced by the mean of the rows of the first k2
       items of its ranking, itself the first;
    4. $m_{ij} = \sum_l \min(V_{il}, V_{jl})$, the Jaccard similarity $J_{ij} = m_{ij} / (2 - m_{ij})$, and the score
       $(1 - \lambda) J_{qj} + \lambda (1 - D_{qj})$, which is 1 less the published distance.

    Ours differs in memory: neighbours come from a blocked search and V has about k1 numbers per row, so memory is $O(n k_1)$ where the published
    script holds several $n \times n$ matrices. An item is always the first of its own ranking, also where others equal it. Items of equal score,
    such as all that share nothing with the query at $\lambda = 0$, are in the order of their cosines.

    All queries together belong to the items, as published: an answer may depend on which other queries are asked with it.

    Args:
        queries, database, top, candidates, normalize, device: as those of `cosine`; neighbourhoods are those of the whole database, also where
            `candidates` says which items to order.
        k1: neighbours of an item.
        k2: items whose neighbourhoods are averaged; 1 leaves them as they are.
        weight: $\lambda$, the share of the first distance in the score, 0 to 1.

    >>> X = [[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]]
    >>> k_reciprocal(None, X, k1=1, k2=1, top=1).order.tolist()
    [[1], [0], [3], [2]]
    """
    check_whole(k1=k1, k2=k2)
    check_number(least=0, most=1, weight=weight)
    asked = ask(queries, database, top, candidates, normalize, device)
    count = len(asked.database)
    items = asked.database if asked.among else torch.cat((asked.database, asked.queries))
    near = Neighbourhoods(items, k1, k2)

    def rows(numbers: Tensor, cosines: Tensor) -> Tensor:
        at = numbers if asked.among else numbers + count
        return (1 - weight) * near.jaccard(at)[:, :count] + weight * (1 - near.distances(at, cosines))

    return asked.by_rows(rows)


class Neighbourhoods:
    """The rows V of `k_reciprocal` for items of length 1, `(n, d)`, as compressed sparse rows and columns."""

    def __init__(self, items: Tensor, k1: int = 20, k2: int = 6) -> None:
        own = torch.arange(len(items), device=items.device)
        _, places, least = top(items, items, min(max(k1, k2 - 1), len(items) - 1), own)
        ranks = torch.cat((own[:, None], places), dim=1)
        # The largest distance of each item; where all are one point, any will do.
        self.spread = (2 - 2 * least).clamp(min=torch.finfo(items.dtype).eps)
        self.count = len(items)
        rows = _memberships(items, ranks[:, : k1 + 1], self.spread, round(k1 / 2) + 1)
        self._starts, self._columns, self._values = rows
        if k2 > 1:
            self._average(ranks[:, :k2])
        self._turn()

    def distances(self, numbers: Tensor, cosines: Tensor) -> Tensor:
        """D of items by their numbers, `(b,)`, from their cosines `(b, m)`."""
        return ((2 - 2 * cosines) / self.spread[numbers, None]).clamp(min=0)

    def jaccard(self, numbers: Tensor) -> Tensor:
        """J of items by their numbers, `(b,)`, with all, `(b, n)`."""
        shared = self.shared(numbers)
        return shared / (2 - shared)

    def shared(self, numbers: Tensor) -> Tensor:
        """m of items by their numbers, `(b,)`, with all, `(b, n)`."""
        total = self._values.new_zeros(len(numbers) * self.count)
        at, entries = _entries(self._starts, numbers)
        columns, values, base = self._columns[entries], self._values[entries], at * self.count
        lengths = self._ends[columns + 1] - self._ends[columns]
        for part in _even(lengths):
            which, others = _entries(self._ends, columns[part])
            theirs = self._turned_values.index_select(0, others)
            least = torch.minimum(values[part].index_select(0, which), theirs)
            places = base[part].index_select(0, which) + self._rows.index_select(0, others)
            total.index_add_(0, places, least)
        return total.view(len(numbers), self.count)

    def _average(self, ranks: Tensor) -> None:
        counts, columns, values = [], [], []
        for part in blocks(self.count, max(1, CELLS // self.count)):
            members = ranks[part]
            at, entries = _entries(self._starts, members.flatten())
            board = self._values.new_zeros(len(members), self.count)
            at = at // members.shape[1] * self.count + self._columns[entries]
            board.view(-1).index_add_(0, at, self._values[entries] / members.shape[1])
            row, column = board.nonzero(as_tuple=True)
            counts.append(row.bincount(minlength=len(members)))
            columns.append(column)
            values.append(board[row, column])
        self._starts, self._columns, self._values = _compressed(counts, columns, values)

    def _turn(self) -> None:
        """The same entries by columns."""
        by = self._columns.argsort(stable=True)
        lengths = self._starts.diff()
        numbers = torch.arange(self.count, device=lengths.device).repeat_interleave(lengths)
        self._rows, self._turned_values = numbers[by], self._values[by]
        self._ends = _offsets(self._columns.bincount(minlength=self.count))


def _memberships(items: Tensor, ranks: Tensor, spread: Tensor, half: int) -> tuple[Tensor, Tensor, Tensor]:
    """Steps 1 to 3, before averaging."""
    near, mutual = ranks[:, :half], reciprocal(ranks)
    close = reciprocal(near)
    counts, columns, values = [], [], []
    # Per item: a row of the board, and the neighbours of its neighbours.
    size = max(1, CELLS // (len(items) + 16 * ranks.shape[1] * half))
    for part in blocks(len(items), size):
        own = ranks[part, :1]
        # Who is no reciprocal neighbour is replaced by the item itself, which is one.
        members = torch.where(mutual[part], ranks[part], own)
        board = torch.zeros(len(own), len(items), dtype=torch.bool, device=items.device)
        board.scatter_(1, members, True)
        theirs = near[members]
        real = close[members] & mutual[part][:, :, None]
        inside = real & board.gather(1, theirs.flatten(1)).view_as(theirs)
        joined = real & (3 * inside.sum(-1) > 2 * real.sum(-1))[:, :, None]
        board.scatter_(1, torch.where(joined, theirs, own[:, :, None]).flatten(1), True)
        row, column = board.nonzero(as_tuple=True)
        weights = torch.exp(-(2 - 2 * _products(items, row + part.start, column)).clamp(min=0) / spread[part][row])
        sums = weights.new_zeros(len(own)).index_add_(0, row, weights)
        counts.append(row.bincount(minlength=len(own)))
        columns.append(column)
        values.append(weights / sums[row])
    return _compressed(counts, columns, values)


def reciprocal(places: Tensor) -> Tensor:
    """Whether each of the places `(n, k)` of a row has that row among its own; -1 is no place."""
    size = max(1, CELLS // places.shape[1] ** 2) if places.shape[1] else len(places)
    own = torch.arange(len(places), device=places.device)[:, None, None]
    parts = [
        (places[places[part].clamp(min=0)] == own[part]).any(-1) & (places[part] >= 0)
        for part in blocks(len(places), size)
    ]
    return torch.cat(parts)


def _products(items: Tensor, first: Tensor, second: Tensor) -> Tensor:
    size = max(1, CELLS // items.shape[1])
    return torch.cat([
        torch.linalg.vecdot(items[first[part]], items[second[part]]) for part in blocks(len(first), size)
    ])  # fmt: skip


def _offsets(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _compressed(counts: list[Tensor], columns: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return _offsets(torch.cat(counts)), torch.cat(columns), torch.cat(values)


def _entries(starts: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """For rows by their numbers: which of them each entry belongs to, and where the entry stands."""
    lengths = starts[numbers + 1] - starts[numbers]
    which = torch.repeat_interleave(lengths)
    shift = starts[numbers] - (lengths.cumsum(0) - lengths)
    return which, torch.arange(len(which), device=starts.device) + shift.index_select(0, which)


def _even(lengths: Tensor) -> Iterator[slice]:
    """Parts of a list with about as many entries each as are held at once."""
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    marks = torch.arange(ENTRIES, total + ENTRIES, ENTRIES, device=ends.device)
    borders = [0, *torch.searchsorted(ends, marks, right=True).clamp(max=len(lengths)).tolist(), len(lengths)]
    for begin, end in pairwise(borders):
        if begin < end:
            yield slice(begin, end)

"""What every method of re-ranking is asked: queries, a database, which items to order, and how many to return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heedful._checks import check_whole, shown
from heedful._errors import InvalidArgument
from heedful._runtime import device_of
from heedful.ranking.result import Ranking
from heedful.ranking.search import CELLS, blocks, hide, normalized, pair, products, stable_top, top, vectors

Rows = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Asked:
    """Checked tensors on one device.

    Attributes:
        queries, database: `(nq, d)` and `(n, d)`; the same rows where the database asks itself.
        among: whether every row of the database asks the others.
        limit: how many items to return of each list; None for all.
        candidates: `(nq, m)`, places to order, rising, -1 last; None orders the whole database.
    """

    queries: Tensor
    database: Tensor
    among: bool
    limit: int | None
    candidates: Tensor | None

    @property
    def own(self) -> Tensor | None:
        """The place of each query in the database, where it has one."""
        return torch.arange(len(self.database), device=self.database.device) if self.among else None

    @property
    def most(self) -> int:
        """How many items a query may have in its list."""
        return len(self.database) - int(self.among)

    @property
    def length(self) -> int:
        """How many are returned of each list."""
        there = self.most if self.candidates is None else self.candidates.shape[1]
        return there if self.limit is None else min(self.limit, there)

    def neighbours(
        self, k: int, queries: Tensor | None = None, database: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scores and places of the k nearest, itself never among them; of these rows or of others in their stead."""
        asked = self.queries if queries is None else queries
        stored = self.database if database is None else database
        return top(asked, stored, min(k, self.most), self.own)[:2]

    def listed(self, k: int | None = None) -> tuple[Tensor, Tensor]:
        """The first k of the first list, by cosine, of the candidates or the whole database; all by default."""
        if self.candidates is None:
            return self.neighbours(self.most if k is None else k)
        length = self.candidates.shape[1] if k is None else min(k, self.candidates.shape[1])
        return self._chosen(self._pairs(self.queries, self.database), length)

    def by_vectors(self, queries: Tensor, database: Tensor) -> Ranking:
        """The order by the products of these rows, which stand for the queries and the database."""
        if self.candidates is None:
            return ranking(*self.neighbours(self.length, queries, database))
        return ranking(*self._chosen(self._pairs(queries, database), self.length))

    def by_rows(self, rows: Rows, size: int | None = None) -> Ranking:
        """The order by `rows(numbers, cosines)`: scores `(b, n)` of queries, by their numbers, with the whole database, whose cosines are given.

        Items of equal score are in the order of their cosines.
        """
        return ranking(*self.top_rows(rows, self.length, size))

    def top_rows(self, rows: Rows, k: int, size: int | None = None) -> tuple[Tensor, Tensor]:
        """As `by_rows`, the k best as tensors."""
        found: tuple[Tensor, Tensor] | None = None
        for part in blocks(len(self.queries), size or max(1, self._cells // len(self.database))):
            numbers = torch.arange(part.start, part.stop, device=self.database.device)
            cosines = products(self.queries[part], self.database)
            scores = rows(numbers, cosines)
            if self.among:
                hide(scores, numbers)
                hide(cosines, numbers)
            places = None
            if self.candidates is not None:
                places = self.candidates[part]
                missing = places < 0
                scores, cosines = (
                    each.gather(1, places.clamp(min=0)).masked_fill(missing, -torch.inf) for each in (scores, cosines)
                )
            values, by = stable_top(scores, min(k, scores.shape[1]), cosines)
            by = by if places is None else places.gather(1, by)
            if found is None:
                size_of = (len(self.queries), values.shape[1])
                found = values.new_empty(size_of), by.new_empty(size_of)
            found[0][part], found[1][part] = values, by
        assert found is not None
        # Scores fall along a row: where the last is there, all are.
        if found[1].shape[1] and bool((found[0][:, -1] == -torch.inf).any()):
            found[1].masked_fill_(found[0] == -torch.inf, -1)
        return found

    @property
    def _cells(self) -> int:
        """Scores that are held at once: fewer on a CPU, so that what was written is still near when it is read."""
        return CELLS // 8 if self.database.device.type == "cpu" else CELLS

    def _pairs(self, queries: Tensor, database: Tensor) -> Tensor:
        """Products of each query with its candidates, `(nq, m)`."""
        assert self.candidates is not None
        size = max(1, CELLS // (self.candidates.shape[1] * database.shape[1]))
        parts = [
            (database[self.candidates[part].clamp(min=0)] * queries[part, None]).sum(-1)
            for part in blocks(len(queries), size)
        ]
        return torch.cat(parts)

    def _chosen(self, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best of the candidates, by their scores `(nq, m)`."""
        assert self.candidates is not None
        values, by = stable_top(scores.masked_fill(self.candidates < 0, -torch.inf), k)
        return values, self.candidates.gather(1, by)


def ask(
    queries: Any,
    database: Any,
    top: int | None = None,
    candidates: Any = None,
    normalize: bool = True,
    device: str | torch.device = "auto",
) -> Asked:
    """The question that all methods are given, checked; without queries every row of the database asks the others."""
    check_whole(optional=True, top=top)
    place = device_of(device)
    among = queries is None
    if among:
        stored = asked = vectors(database, "database").to(place)
    else:
        asked, stored = (part.to(place) for part in pair(queries, database))
    if normalize:
        stored = normalized(stored)
        asked = stored if among else normalized(asked)
    chosen = None if candidates is None else _candidates(candidates, len(asked), len(stored), among).to(place)
    return Asked(asked, stored, among, top, chosen)


def _candidates(candidates: Any, count: int, stored: int, among: bool) -> Tensor:
    given = candidates.detach().cpu().numpy() if isinstance(candidates, Tensor) else np.asarray(candidates)
    if given.ndim != 2 or len(given) != count or given.shape[1] == 0 or not np.issubdtype(given.dtype, np.integer):
        raise InvalidArgument(
            f"candidates must be whole numbers of shape ({count} queries, m), as the places that faiss returns; got {given.dtype} of shape "
            f"{given.shape}"
        )
    if given.min() < -1 or given.max() >= stored:
        raise InvalidArgument(
            f"candidates must be places from 0 to {stored - 1}, or -1 for none; got {given.min()} to {given.max()}"
        )
    places = given.astype(np.int64)
    if among:
        places = np.where(places == np.arange(count)[:, None], -1, places)
    # Missing ones last; rising places, so that a stable order puts the lower one first.
    places = np.sort(np.where(places < 0, stored, places), axis=1)
    twice = (places[:, 1:] == places[:, :-1]) & (places[:, 1:] < stored)
    if twice.any():
        row, at = np.argwhere(twice)[0]
        raise InvalidArgument(f"candidates of a query must differ; query {row} has {shown(int(places[row, at]))} twice")
    return torch.from_numpy(np.where(places == stored, -1, places))


def ranking(scores: Tensor, places: Tensor) -> Ranking:
    """Tensors as the result that people get."""
    return Ranking(places.cpu().numpy(), scores.cpu().numpy())

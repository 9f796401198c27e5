"""What attention reads off counts: associations, at every distance, whole or in factors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from heedful._errors import InvalidArgument, Unsupported
from heedful.corpus.associations import Kind, association
from heedful.corpus.factors import Factors, directional, svd
from heedful.corpus.positions import PositionEnergy, biases, cores, explained, rotations
from heedful.corpus.projection import Table

Form = Literal["distance", "tucker", "additive", "rotary"]


@dataclass(eq=False)
class Statistics:
    """Scores of pairs of words from a fitted `Cooccurrence`, or from one matrix that is taken as it is.

    Everything is computed when it is first asked for. Rows of directed tables are the earlier words.
    """

    counter: Any
    matrix: Any
    kind: Kind
    smoothing: float
    shift: float
    prior: float
    directed: bool
    positions: Form | None
    rank: int
    seed: int

    @property
    def window(self) -> int:
        return int(self.counter.window) if self.counter is not None else 0

    def table(self, distance: int | None = None, directed: bool = True, back: bool = False) -> Table:
        """Associations at a distance, or over the whole window; `back` has the later words in rows."""
        if self.matrix is not None:
            return Table(self.matrix.T.tocsr() if back else self.matrix)
        counts = self.counter.counts(distance, directed=directed)
        counts = counts.T.tocsr() if back else counts
        cells = association(counts, self.kind, smoothing=self.smoothing, shift=self.shift, beta=self.prior)
        if self.kind != "conditional":
            return Table(cells)
        sums = np.asarray(counts.sum(axis=1)).reshape(-1)
        return Table(cells, np.log(self.prior / (sums + self.prior)))

    @cached_property
    def whole(self) -> Table:
        """Associations over the whole window."""
        return self.table(directed=self.directed)

    @cached_property
    def by_distance(self) -> list[Table]:
        """Associations at each distance 1..w."""
        return [self.table(distance) for distance in range(1, self.window + 1)]

    @cached_property
    def _back(self) -> dict[int | None, Table]:
        """Tables that have the later words in rows, by distance."""
        distances = range(1, self.window + 1) if self.positions == "distance" else (None,)
        return {distance: self.table(distance, back=True) for distance in distances}

    def towards(self, word: int, distance: int) -> np.ndarray:
        """Associations of a word with all, `(V,)`, that stand `distance` places behind it, or before it where that is negative."""
        size = self.whole.cells.shape[0]
        apart = abs(distance)
        if not self.directed:
            return self.whole.row(word)
        if self.positions is not None and apart > self.window:
            return np.zeros(size)
        if self.positions == "distance":
            return (self.by_distance[apart - 1] if distance > 0 else self._back[apart]).row(word)
        if self.positions in (None, "additive"):
            added = self.biases[apart - 1] if self.positions == "additive" else 0.0
            return (self.whole if distance > 0 else self._back[None]).row(word) + added
        (left, right), core = self.sides, self.cores[apart - 1]
        return np.asarray(right @ (left[word] @ core) if distance > 0 else left @ (core @ right[word]))

    @cached_property
    def factors(self) -> Factors:
        """Query and key `(V, rank)` whose products are scores: rows look, columns are looked at."""
        if self.whole.rows is not None:
            raise Unsupported(
                "association='conditional' has a value in every cell, and its factors are not sparse; use scores()"
            )
        # The word that looks is the later one where the order counts.
        cells = self.whole.cells if self.directed else self.whole.cells.T.tocsr()
        return directional(cells, self.rank, seed=self.seed)

    @cached_property
    def sides(self) -> tuple[np.ndarray, np.ndarray]:
        """U and V with orthonormal columns: singular vectors of earlier and of later words."""
        left, _, right = svd(self.table().cells, self.rank, seed=self.seed)
        return left, right

    @cached_property
    def cores(self) -> np.ndarray:
        """A small matrix for each distance, `(w, rank, rank)`."""
        small = cores([table.cells for table in self.by_distance], *self.sides)
        return rotations(small) if self.positions == "rotary" else small

    @cached_property
    def biases(self) -> np.ndarray:
        """What each distance adds, `(w,)`."""
        return biases([table.cells for table in self.by_distance], self.whole.cells, self._counts())

    def _counts(self) -> list[Any]:
        return [self.counter.counts(distance) for distance in range(1, self.window + 1)]

    def vectors(self) -> np.ndarray:
        """Left singular vectors of symmetric PPMI, `(V, rank)`: the vectors that do best at similarity."""
        if self.counter is None:
            raise InvalidArgument("there are no vectors to average: give vectors=, an array (V, d) or WordVectors")
        table = association(self.counter.counts(directed=False), "ppmi", smoothing=self.smoothing)
        return svd(table, self.rank, seed=self.seed)[0]

    def scores(self, ids: np.ndarray) -> np.ndarray:
        """M `(..., n, n)` for words `(..., n)`, looked up."""
        if not self.directed:
            return self.whole.at(ids)
        n = ids.shape[-1]
        if self.positions in (None, "additive"):
            forward = self.whole.at(ids)  # [..., earlier, later]
            scores = np.where(np.tri(n, k=-1, dtype=bool), np.swapaxes(forward, -1, -2), forward)
            if self.positions is None:
                return scores
            apart = np.abs(np.arange(n)[:, None] - np.arange(n))
            added = np.concatenate(([0.0], self.biases, [0.0]))[np.minimum(apart, self.window + 1)]
            known = (ids >= 0)[..., :, None] & (ids >= 0)[..., None, :]
            return np.where(known & (apart <= self.window) & (apart > 0), scores + added, 0.0)
        out = np.zeros((*ids.shape, n))
        for distance in range(1, min(self.window, n - 1) + 1):
            earlier = np.arange(n - distance)
            values = self._at_distance(ids, distance)
            out[..., earlier, earlier + distance] = out[..., earlier + distance, earlier] = values
        return out

    def _at_distance(self, ids: np.ndarray, distance: int) -> np.ndarray:
        """Associations of each word with the one so many places later, `(..., n - distance)`."""
        earlier, later = ids[..., :-distance], ids[..., distance:]
        if self.positions == "distance":
            return self.by_distance[distance - 1].pairs(earlier, later)
        left, right = self.sides
        values = ((left[earlier] @ self.cores[distance - 1]) * right[later]).sum(-1)
        return np.where((earlier >= 0) & (later >= 0), values, 0.0)

    def explained(self) -> PositionEnergy:
        """All forms of positions beside one another."""
        if self.counter is None or not self.counter.per_distance:
            raise InvalidArgument("this needs counts of each distance: Cooccurrence(per_distance=True)")
        if self.kind == "conditional":
            raise Unsupported("association='conditional' has a value in every cell; use 'ppmi' or 'pmi'")
        even = self.rank - self.rank % 2
        left, right = (side[:, :even] for side in self.sides)
        tables = [self.table(distance).cells for distance in range(1, self.window + 1)]
        return explained(tables, self.table().cells, self._counts(), left, right)

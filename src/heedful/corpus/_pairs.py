"""Pairs of token numbers within a window, as sparse matrices of whole numbers; numpy and scipy alone, for processes that start fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from heedful._errors import InvalidArgument, MissingExtra

# So many tokens are counted at once: their pairs at one distance fit into the caches of a processor.
PIECE = 2**20
# Sums of weights stay below 2^63 for corpora of 10^9 tokens.
LARGEST_DENOMINATOR = 2**28


def sparse() -> Any:
    """scipy's module of sparse matrices."""
    try:
        import scipy.sparse
    except ImportError:
        raise MissingExtra("scipy", "corpus") from None
    return scipy.sparse


@dataclass(frozen=True)
class Weights:
    """The weight of each distance 1..w: `parts / denominator` in whole numbers, or floats that no small denominator gives.

    Sums of whole numbers do not depend on their order; this is why counts of shards add up to the bit.
    """

    floats: tuple[float, ...]
    parts: tuple[int, ...] | None = None
    denominator: int = 1


class Table:
    """Weights that were a function when they were saved."""

    def __init__(self, weights: tuple[float, ...]) -> None:
        self.weights = weights

    def __call__(self, distance: int) -> float:
        return self.weights[distance - 1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and other.weights == self.weights

    def __hash__(self) -> int:
        return hash(self.weights)


def weights_of(weighting: str | Callable[[int], float], window: int) -> Weights:
    """The weights that a name stands for, or a function of the distance."""
    distances = range(1, window + 1)
    if weighting == "uniform":
        return _rational([1] * window, 1)
    if weighting == "linear":
        return _rational([window + 1 - distance for distance in distances], window)
    if weighting == "inverse":
        common = math.lcm(*distances)
        if common > LARGEST_DENOMINATOR:
            return Weights(tuple(1 / distance for distance in distances))
        return _rational([common // distance for distance in distances], common)
    if weighting == "exponential":
        return Weights(tuple(math.exp(-2 * distance / window) for distance in distances))
    assert callable(weighting)
    floats = tuple(float(weighting(distance)) for distance in distances)
    for distance, weight in zip(distances, floats, strict=True):
        if not 0 <= weight < math.inf:
            raise InvalidArgument(f"weighting({distance}) must be a number from 0 on; got {weight}")
    return Weights(floats)


def _rational(parts: Sequence[int], denominator: int) -> Weights:
    return Weights(tuple(part / denominator for part in parts), tuple(parts), denominator)


def count_pairs(ids: np.ndarray, lengths: np.ndarray, size: int, window: int, parts: Sequence[int] | None) -> list[Any]:
    """CSR matrices `(size, size)` of int64: rows earlier tokens, columns later ones.

    Args:
        ids: numbers of all tokens, document by document, -1 for a token that keeps its place and is not counted.
        lengths: tokens of each document; no pair crosses from one to the next.
        parts: a whole weight for each distance, and one matrix is returned; or None, and there is one for each distance.
    """
    places = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    results: list[Any] = [None] * (window if parts is None else 1)
    for start in range(0, len(ids), PIECE):
        # Pairs whose earlier token is in this piece.
        piece, home = ids[start : start + PIECE + window], places[start : start + PIECE + window]
        for distance in range(1, min(window, len(piece) - 1) + 1):
            stop = min(PIECE, len(piece) - distance)
            earlier, later = piece[:stop], piece[distance : distance + stop]
            fits = (home[:stop] == home[distance : distance + stop]) & (earlier >= 0) & (later >= 0)
            weight = 1 if parts is None else parts[distance - 1]
            matrix = _matrix(earlier[fits], later[fits], weight, size)
            place = distance - 1 if parts is None else 0
            results[place] = matrix if results[place] is None else results[place] + matrix
    return [nothing(size) if result is None else result for result in results]


def _matrix(earlier: np.ndarray, later: np.ndarray, weight: int, size: int) -> Any:
    data = np.full(len(earlier), weight, dtype=np.int64)
    return sparse().coo_array((data, (earlier, later)), shape=(size, size)).tocsr()


def nothing(size: int) -> Any:
    """A matrix of no counts."""
    return sparse().csr_array((size, size), dtype=np.int64)


def total(matrices: Sequence[Any], weights: Weights) -> Any:
    """The weighted sum in float64, of one matrix of whole weights or of one for each distance; in the order of distances."""
    if weights.parts is None:
        result = nothing(matrices[0].shape[0]).astype(np.float64)
        for weight, matrix in zip(weights.floats, matrices, strict=True):
            result = result + matrix.astype(np.float64) * weight
        return result
    if len(matrices) == 1:
        result = matrices[0]
    else:
        result = nothing(matrices[0].shape[0])
        for part, matrix in zip(weights.parts, matrices, strict=True):
            result = result + matrix * part
    result = result.astype(np.float64)
    # scipy divides by multiplying, which rounds twice.
    result.data /= weights.denominator
    return result


class Tally:
    """Matrices of whole numbers that are added up, small ones first, so that each is touched a logarithmic number of times."""

    def __init__(self) -> None:
        self._levels: list[list[Any]] = []

    def add(self, matrices: list[Any]) -> None:
        self._levels.append(matrices)
        while len(self._levels) > 1 and _entries(self._levels[-2]) < 2 * _entries(self._levels[-1]):
            self._levels.append(_sum(self._levels.pop(), self._levels.pop()))

    @property
    def bytes(self) -> int:
        """What the matrices take."""
        return sum(part.nbytes for level in self._levels for m in level for part in (m.data, m.indices, m.indptr))

    def total(self) -> list[Any] | None:
        """The sums; None where nothing was added."""
        while len(self._levels) > 1:
            self._levels.append(_sum(self._levels.pop(), self._levels.pop()))
        return self._levels[0] if self._levels else None


def _entries(matrices: list[Any]) -> int:
    return sum(matrix.nnz for matrix in matrices)


def _sum(first: list[Any], second: list[Any]) -> list[Any]:
    return [one + other for one, other in zip(first, second, strict=True)]


def arrays_of(matrices: list[Any]) -> dict[str, np.ndarray]:
    """The arrays of sparse matrices, by names that `matrices_of` reads."""
    parts = ("indptr", "indices", "data")
    return {f"{part}.{place}": getattr(matrix, part) for place, matrix in enumerate(matrices) for part in parts}


def matrices_of(arrays: dict[str, np.ndarray], size: int) -> list[Any]:
    """Sparse matrices `(size, size)`, of the arrays that `arrays_of` gave."""
    matrices = []
    for place in range(len(arrays) // 3):
        data, indices, indptr = (arrays[f"{part}.{place}"] for part in ("data", "indices", "indptr"))
        matrices.append(sparse().csr_array((data, indices, indptr), shape=(size, size)))
    return matrices

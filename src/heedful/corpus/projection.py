"""A matrix between all words, read at the words of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from heedful._errors import InvalidArgument

__all__ = ["Table", "project"]

# Different words of a batch whose square is held at once: 128 MiB of float64.
WORDS = 4096


def project(matrix: Any, ids: Any, other: Any = None) -> np.ndarray:
    r"""$M_{ij} = S_{t_i u_j}$, that is $M = O_t S O_u^\top$ with one-hot rows $O$, by look-up: no one-hot matrix is written.

    Mehta (2025), section 3, for one sequence; with `other`, a second one of perhaps another vocabulary, it is cross-attention. Of a
    sparse matrix the rows of the words that occur are taken, then their columns, once for a whole batch.

    Args:
        matrix: S `(V, W)`, of scipy or numpy.
        ids: whole numbers t `(..., n)`; -1 is an unknown word, whose row and column are zeros.
        other: u `(..., m)`; the same as `ids` by default.

    Returns:
        `(..., n, m)` in float64.

    >>> project(np.array([[1.0, 2.0], [3.0, 4.0]]), [1, 0, 0])
    array([[4., 3., 3.],
           [2., 1., 1.],
           [2., 1., 1.]])
    """
    ids = check_ids(ids, matrix.shape[0])
    other = ids if other is None else check_ids(other, matrix.shape[1])
    rows, at_rows = np.unique(ids, return_inverse=True)
    columns, at_columns = np.unique(other, return_inverse=True)
    if ids.ndim > 1 and max(len(rows), len(columns)) > WORDS and len(ids) > 1:
        return np.stack([project(matrix, *pair) for pair in zip(ids, other, strict=True)])
    known_rows, known_columns = rows[rows >= 0], columns[columns >= 0]
    part = np.zeros((len(rows), len(columns)))
    if len(known_rows) and len(known_columns):
        cells = matrix[known_rows][:, known_columns]
        part[-len(known_rows) :, -len(known_columns) :] = cells if isinstance(cells, np.ndarray) else cells.toarray()
    # One flat index is twice as fast as a pair of them.
    places = at_rows.reshape(ids.shape)[..., :, None] * len(columns) + at_columns.reshape(other.shape)[..., None, :]
    return part.reshape(-1).take(places)


def check_ids(ids: Any, size: int) -> np.ndarray:
    """Whole numbers from -1 (unknown) to below the size of the vocabulary."""
    numbers = np.asarray(ids)
    if numbers.size == 0:
        numbers = numbers.astype(np.int64)
    if numbers.ndim < 1 or not np.issubdtype(numbers.dtype, np.integer):
        raise InvalidArgument(
            f"ids must be whole numbers of shape (..., n); got {numbers.dtype} of shape {numbers.shape}"
        )
    if numbers.size and (numbers.min() < -1 or numbers.max() >= size):
        wrong = int(numbers.max() if numbers.max() >= size else numbers.min())
        raise InvalidArgument(f"ids must be below the vocabulary's size {size}, or -1 for an unknown word; got {wrong}")
    return numbers.astype(np.int64, copy=False)


@dataclass(frozen=True, eq=False)
class Table:
    """Associations of pairs: cells of a sparse matrix, and a number that every cell of a row has besides.

    The second is there for `conditional` alone, where cells without a count are not zero.
    """

    cells: Any
    rows: np.ndarray | None = None

    def __post_init__(self) -> None:
        # Numbers of 32 bits are enough for the columns, and rows are taken in half the time.
        cells = self.cells
        if cells.indices.dtype != np.int32 and max(cells.nnz, *cells.shape) < 2**31:
            narrow = (cells.data, cells.indices.astype(np.int32), cells.indptr.astype(np.int32))
            object.__setattr__(self, "cells", type(cells)(narrow, shape=cells.shape))

    def at(self, ids: np.ndarray) -> np.ndarray:
        """`(..., n, n)` for ids `(..., n)`; zero where a word is unknown."""
        scores = project(self.cells, ids)
        if self.rows is not None:
            known = ids >= 0
            scores += np.where(known, self.rows[ids], 0.0)[..., :, None] * known[..., None, :]
        return scores

    def pairs(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Associations of words with those in the same place of another array of that shape; zero where one is unknown."""
        known = (first >= 0) & (second >= 0)
        out = np.zeros(first.shape)
        if known.any():
            a, b = first[known], second[known]
            cells = self.cells[a, b]
            out[known] = cells.toarray().reshape(-1) if hasattr(cells, "toarray") else cells
            if self.rows is not None:
                out[known] += self.rows[a]
        return out

    def row(self, word: int) -> np.ndarray:
        """Associations of one word with all, `(V,)`."""
        out = np.zeros(self.cells.shape[1]) if self.rows is None else np.full(self.cells.shape[1], self.rows[word])
        part = slice(*self.cells.indptr[word : word + 2])
        out[self.cells.indices[part]] += self.cells.data[part]
        return out

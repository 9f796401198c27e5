"""GloVe: word vectors whose inner products are logarithms of counts, by alternating least squares or by AdaGrad."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful._plot import Axes, axes
from heedful._progress import Progress, silent
from heedful._result import Result
from heedful._runtime import device_of
from heedful.corpus.associations import counted

__all__ = ["Glove", "glove"]

Solver = Literal["als", "adagrad"]
# Numbers that are gathered at once, for rows of similar lengths.
CELLS = 2**22
# As in the published program: steps of AdaGrad, and the largest entry of a gradient.
RATE, CLIP = 0.05, 100.0
SWEEPS: dict[str, int] = {"als": 8, "adagrad": 15}


@dataclass(frozen=True)
class Glove(Result):
    """Vectors and biases of words and of contexts.

    Attributes:
        words, contexts: `(V, rank)`; their sum is the usual vector of a word.
        word_biases, context_biases: `(V,)`.
        losses: J after each sweep or epoch.
    """

    words: np.ndarray
    contexts: np.ndarray
    word_biases: np.ndarray
    context_biases: np.ndarray
    losses: tuple[float, ...] = ()

    _not = ("words", "contexts", "word_biases", "context_biases")

    def loss(self, counts: Any, *, x_max: float = 100.0, exponent: float = 0.75) -> float:
        """J of these vectors on a matrix of counts."""
        return self._cells(counts, x_max, exponent).loss(*map(torch.from_numpy, self._sides))

    def gradient(self, counts: Any, *, x_max: float = 100.0, exponent: float = 0.75) -> Glove:
        """Derivatives of J by every vector and bias, in their places; zero where J has its least value."""
        cells = self._cells(counts, x_max, exponent)
        left, right = self._sides
        slopes = np.zeros_like(left), np.zeros_like(right)
        for part in cells.parts(left.shape[1]):
            rows, columns = cells.rows[part], cells.columns[part]
            for table, places, one in zip(slopes, (rows, columns), _slopes(left, right, cells, part), strict=True):
                np.add.at(table, places, 2 * one)
        return _result(*slopes)

    def _cells(self, counts: Any, x_max: float, exponent: float) -> _Cells:
        check_number(0, x_max=x_max, exponent=exponent)
        cells = _Cells(counts, x_max, exponent)
        if cells.shape != (len(self.words), len(self.contexts)):
            raise InvalidArgument(
                f"counts must have shape {(len(self.words), len(self.contexts))}, as the vectors; got {cells.shape}"
            )
        return cells

    @property
    def _sides(self) -> tuple[np.ndarray, np.ndarray]:
        """`(V, rank + 1)` of words and of contexts, the bias behind the vector."""
        return np.c_[self.words, self.word_biases], np.c_[self.contexts, self.context_biases]

    def __str__(self) -> str:
        fell = f"; J from {self.losses[0]:.4g} to {self.losses[-1]:.4g}" if self.losses else ""
        return f"{self.words.shape[0]} words, rank {self.words.shape[1]}{fell}"

    def plot(self, ax: Axes | None = None) -> Axes:
        """J after each sweep or epoch."""
        ax = axes(ax)
        ax.plot(range(1, len(self.losses) + 1), self.losses, marker="o")
        ax.set(xlabel="sweep", ylabel="J")
        return ax


def _result(left: np.ndarray, right: np.ndarray, losses: Sequence[float] = ()) -> Glove:
    return Glove(left[:, :-1], right[:, :-1], left[:, -1], right[:, -1], tuple(losses))


def glove(
    counts: Any,
    rank: int,
    *,
    solver: Solver = "als",
    sweeps: int | None = None,
    x_max: float = 100.0,
    exponent: float = 0.75,
    ridge: float = 1e-3,
    seed: int = 0,
    device: str | torch.device = "cpu",
    progress: Progress = silent,
) -> Glove:
    r"""Minimises

    $$J = \sum_{X_{ab} > 0} f(X_{ab}) \left(w_a \cdot \tilde w_b + b_a + \tilde b_b - \ln X_{ab}\right)^2, \qquad
    f(x) = \min\left(1, (x / x_{\max})^{\alpha}\right)$$

    (Pennington, Socher & Manning 2014, eq. 8 and 9).

    `"als"` solves for each word's vector and bias exactly while those of contexts stay, then the other way round: least squares
    with a ridge, no step size; $J$ plus the ridge never rises. `"adagrad"` is the method of the published program: cells one after
    the other in random order, vectors and biases from $U(-\frac12, \frac12)/d$, steps $\eta g / \sqrt{G}$ with $\eta = 0.05$, $G$ from
    1 on and updated after use, entries of gradients g (of $J/2$) clipped at 100. Ours takes many cells at once that share neither row nor column,
    which gives what one after the other gives.

    Args:
        counts: `(V, V)`, symmetric as a rule, `Cooccurrence.counts(directed=False)`; rows are words, columns contexts.
        rank: d, the size of vectors.
        solver: `"als"` or `"adagrad"`.
        sweeps: of ALS, 8 by default; epochs of AdaGrad, 15 by default.
        x_max, exponent: of f.
        ridge: $\lambda$ of ALS, which adds $\lambda (|w|^2 + b^2)$ for each vector and bias.
        seed: of the start, and of the order of AdaGrad.
        device: where ALS is computed.
        progress: called with the sweeps done, all of them, and a text.

    >>> import numpy as np
    >>> X = np.exp(np.random.default_rng(0).normal(size=(7, 7)))
    >>> result = glove(X, 3, sweeps=5, x_max=2.0)
    >>> result.words.shape, result.losses[-1] < result.losses[0]
    ((7, 3), True)
    """
    check_whole(rank=rank)
    check_choice(Solver, solver=solver)
    check_whole(0, optional=True, sweeps=sweeps)
    check_number(0, x_max=x_max, exponent=exponent, ridge=ridge)
    check_whole(0, seed=seed)
    cells = _Cells(counts, x_max, exponent)
    start = _start(cells.shape, rank, seed)
    count = SWEEPS[solver] if sweeps is None else sweeps
    if solver == "als":
        return _result(*_als(cells, start, count, ridge, device_of(device), progress))
    return _result(*_adagrad(cells, start, count, seed, progress))


class _Cells:
    """The cells with counts: where they are, logarithms, weights."""

    def __init__(self, counts: Any, x_max: float, exponent: float) -> None:
        matrix = counted(counts)
        if not matrix.nnz:
            raise InvalidArgument("there are no counts above zero, so there is nothing to fit")
        self.shape: tuple[int, int] = matrix.shape
        self.indptr = matrix.indptr
        self.rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
        self.columns = matrix.indices.astype(np.int64)
        self.logs = np.log(matrix.data)
        self.weights = np.minimum(1.0, (matrix.data / x_max) ** exponent)

    def parts(self, width: int) -> Iterator[slice]:
        """All cells, as many at a time as may be gathered."""
        step = max(1, CELLS // width)
        return (slice(start, start + step) for start in range(0, len(self.logs), step))

    def loss(self, left: Tensor, right: Tensor) -> float:
        """J for `(V, rank + 1)` vectors with the bias behind."""
        total = 0.0
        for part in self.parts(left.shape[1]):
            one, other = left[self.rows[part]].numpy(), right[self.columns[part]].numpy()
            total += float((self.weights[part] * _errors(one, other, self.logs[part]) ** 2).sum())
        return total


def _errors(one: np.ndarray, other: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """w_a . w~_b + b_a + b~_b - ln X_ab."""
    return np.einsum("cd,cd->c", one[:, :-1], other[:, :-1]) + one[:, -1] + other[:, -1] - logs


def _slopes(left: np.ndarray, right: np.ndarray, cells: _Cells, part: Any) -> tuple[np.ndarray, np.ndarray]:
    """Derivatives of J / 2 by both vectors of each of some cells, with the bias behind."""
    one, other = left[cells.rows[part]], right[cells.columns[part]]
    slope = (cells.weights[part] * _errors(one, other, cells.logs[part]))[:, None]
    one[:, -1] = other[:, -1] = 1.0
    return slope * other, slope * one


def _start(shape: tuple[int, int], rank: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    left, right = ((draw.random((size, rank + 1)) - 0.5) / rank for size in shape)
    return left, right


def _als(
    cells: _Cells,
    start: tuple[np.ndarray, np.ndarray],
    sweeps: int,
    ridge: float,
    device: torch.device,
    progress: Progress,
) -> tuple[np.ndarray, np.ndarray, list[float]]:
    left, right = (torch.from_numpy(part).to(device) for part in start)
    across = np.argsort(cells.columns, kind="stable")
    ends = np.concatenate([[0], np.cumsum(np.bincount(cells.columns, minlength=cells.shape[1]))])
    sides = (
        _Side(cells.indptr, cells.columns, cells.logs, cells.weights, left.shape[1], device),
        _Side(ends, cells.rows[across], cells.logs[across], cells.weights[across], left.shape[1], device),
    )
    losses = []
    for sweep in range(sweeps):
        left = sides[0].solved(left, right, ridge)
        right = sides[1].solved(right, left, ridge)
        losses.append(cells.loss(left.cpu(), right.cpu()))
        progress(sweep + 1, sweeps, f"sweeps, J {losses[-1]:.4g}")
    return left.cpu().numpy(), right.cpu().numpy(), losses


class _Side:
    """One half of a sweep: for each row its cells, padded together with those of rows that have about as many."""

    def __init__(
        self,
        indptr: np.ndarray,
        columns: np.ndarray,
        logs: np.ndarray,
        weights: np.ndarray,
        width: int,
        device: torch.device,
    ) -> None:
        sizes = np.diff(indptr)
        self._cells = [torch.from_numpy(part).to(device) for part in (columns, logs, weights)]
        self._starts = torch.from_numpy(indptr[:-1].astype(np.int64)).to(device)
        self._sizes = torch.from_numpy(sizes.astype(np.int64)).to(device)
        # A word without counts is told by the ridge alone.
        self._alone = torch.from_numpy(sizes == 0).to(device)
        self._batches: list[Tensor] = []
        order = np.argsort(sizes, kind="stable")
        order = order[sizes[order] > 0]
        while len(order):
            # Rows with about as many cells as the longest of those that are left.
            count = max(1, CELLS // (int(sizes[order[-1]]) * width))
            self._batches.append(torch.from_numpy(order[-count:].copy()).to(device))
            order = order[:-count]

    def solved(self, own: Tensor, other: Tensor, ridge: float) -> Tensor:
        r"""Rows that minimise $\sum_b f_b (z_b \cdot x + \tilde b_b - \ln X_b)^2 + \lambda |x|^2$, $z_b = (\tilde w_b, 1)$."""
        columns, logs, weights = self._cells
        result = own.masked_fill(self._alone[:, None], 0.0)
        design = other.clone()
        design[:, -1] = 1.0
        identity = ridge * torch.eye(own.shape[1], dtype=own.dtype, device=own.device)
        for rows in self._batches:
            sizes = self._sizes[rows]
            offsets = torch.arange(int(sizes.max()), device=own.device)
            there = offsets < sizes[:, None]
            places = (self._starts[rows, None] + offsets).clamp_max(len(columns) - 1)
            at = columns[places]
            z = design[at]  # [rows, cells, rank + 1]
            weight = (weights[places] * there)[..., None]
            target = (logs[places] - other[at, -1])[..., None]
            weighted = (z * weight).mT
            result[rows] = torch.linalg.solve(weighted @ z + identity, weighted @ target)[..., 0]
        return result


def _adagrad(
    cells: _Cells, start: tuple[np.ndarray, np.ndarray], epochs: int, seed: int, progress: Progress
) -> tuple[np.ndarray, np.ndarray, list[float]]:
    left, right = (part.copy() for part in start)
    squares = [np.ones_like(part) for part in start]
    draw = np.random.default_rng([seed, 1])
    losses = []
    for epoch in range(epochs):
        for part in _independent(cells, draw):
            _step(left, right, squares, cells, part)
        losses.append(cells.loss(torch.from_numpy(left), torch.from_numpy(right)))
        progress(epoch + 1, epochs, f"epochs, J {losses[-1]:.4g}")
    return left, right, losses


def _independent(cells: _Cells, draw: np.random.Generator) -> list[np.ndarray]:
    """All cells in sets without a common row or column: those with one sum of row and column, both numbered at random."""
    size = max(cells.shape)
    rows, columns = draw.permutation(size), draw.permutation(size)
    sums = (rows[cells.rows] + columns[cells.columns]) % size
    order = np.argsort(sums, kind="stable")
    sets = np.split(order, np.cumsum(np.bincount(sums, minlength=size))[:-1])
    return [sets[place] for place in draw.permutation(size) if len(sets[place])]


def _step(left: np.ndarray, right: np.ndarray, squares: list[np.ndarray], cells: _Cells, part: np.ndarray) -> None:
    """A step of AdaGrad for each of some cells, which share no row and no column."""
    slopes = _slopes(left, right, cells, part)
    for table, places, slope, square in zip(
        (left, right), (cells.rows[part], cells.columns[part]), slopes, squares, strict=True
    ):
        gradient = RATE * np.clip(slope, -CLIP, CLIP)
        held = square[places]
        table[places] -= gradient / np.sqrt(held)
        square[places] = held + gradient**2

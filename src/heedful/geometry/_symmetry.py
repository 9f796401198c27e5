"""A declared symmetry, measured: cases are turned, mirrored, moved and renumbered, and the answers must follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from heedful.geometry._cases import Cases

TRIALS = 4
MOST_CASES, MOST_PAIRS = 8, 2**22


@dataclass(frozen=True)
class Move:
    r"""What is done to cases: a `turn` Q (d, d), a `shift` t (d,) and an `order` of the points `(cases, n)`.

    Vectors are rows: the first of a point, its position, becomes $x Q^\top + t$, others $v Q^\top$.
    """

    turn: np.ndarray
    shift: np.ndarray
    order: np.ndarray

    def cases(self, cases: Cases, vectors: int) -> Cases:
        """The cases moved."""
        size = vectors * len(self.turn)
        values = np.take_along_axis(cases.values, self.order[..., None], axis=1)
        turned = values[..., :size].reshape(*values.shape[:2], vectors, -1 if vectors else 1) @ self.turn.T
        if vectors:
            turned[:, :, 0] += np.where(cases.inside[..., None], self.shift, 0.0)
        turned = turned.reshape(*values.shape[:2], size)
        return replace(cases, values=np.concatenate((turned, values[..., size:]), axis=-1))

    def answers(self, values: np.ndarray, *, per_point: bool, vector: bool, unit: float | None) -> np.ndarray:
        """Answers as they must then be; where there is a `unit`, vectors move along, and are counted in it."""
        if per_point:
            order = self.order.reshape(*self.order.shape, *[1] * (values.ndim - 2))
            values = np.take_along_axis(values, order, axis=1)
        values = values @ self.turn.T if vector else values
        return values if unit is None else values + self.shift / unit

    def back(self) -> Move:
        """What undoes this one."""
        return Move(self.turn.T, -self.shift @ self.turn, np.argsort(self.order, axis=1))


def draw(rng: np.random.Generator, cases: Cases, dim: int, *, mirror: bool, shift: float, permutation: bool) -> Move:
    """A random orthogonal matrix (Haar: the signs of QR are fixed) of determinant 1, or -1 with `mirror`, a shift and an order."""
    turn, upper = np.linalg.qr(rng.normal(size=(dim, dim)))
    turn = turn * np.sign(np.diag(upper))
    if (np.linalg.det(turn) < 0) != mirror:
        turn[:, 0] *= -1
    order = np.tile(np.arange(cases.values.shape[1]), (len(cases.lengths), 1))
    if permutation:
        for row, n in zip(order, cases.lengths, strict=True):
            row[:n] = rng.permutation(n)
    return Move(turn, shift * rng.normal(size=dim), order)


def some(rng: np.random.Generator, lengths: np.ndarray) -> np.ndarray:
    """Places of some cases, few enough for the check to be short beside a training."""
    places = rng.permutation(len(lengths))[:MOST_CASES]
    places = places[np.argsort(lengths[places], kind="stable")]
    pairs = np.cumsum(lengths[places].astype(float) ** 2)
    return places[: max(1, int((pairs <= MOST_PAIRS).sum()))]


def deviation(
    answer: Callable[[Cases], np.ndarray],
    cases: Cases,
    moves: list[Move],
    vectors: int,
    *,
    per_point: bool,
    vector: bool,
    unit: float | None,
) -> tuple[float, float]:
    """The largest deviation of answers from what the symmetry says, and that of answers to cases moved there and back.

    Both are relative to the largest answer, or to 1 where all are smaller. The second is rounding alone.
    """
    there = cases.inside if per_point else np.ones(len(cases.lengths), dtype=bool)
    first = answer(cases)
    size = max(1.0, float(np.abs(first[there]).max()))
    errors, noises = [0.0], [0.0]
    for move in moves:
        moved = move.cases(cases, vectors)
        wanted = move.answers(first, per_point=per_point, vector=vector, unit=unit)
        errors.append(float(np.abs(answer(moved) - wanted)[there].max()) / size)
        noises.append(float(np.abs(answer(move.back().cases(moved, vectors)) - first)[there].max()) / size)
    return max(errors), max(noises)

"""Answers as they come: a number or a vector for each case, or for each point of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from heedful._errors import InvalidArgument
from heedful.bridges.frames import is_frame, is_list, numbers_of
from heedful.geometry._cases import Cases, Frames, check_finite, numbers, padded


@dataclass(frozen=True)
class Answers:
    """`values` (cases, outputs) or with `per_point` (cases, n, outputs), of vectors with an axis (dim,) behind; `is_flat`: one without axis."""

    values: np.ndarray
    per_point: bool
    is_flat: bool

    @property
    def outputs(self) -> int:
        return self.values.shape[2 if self.per_point else 1]


def read_answers(y: Any, cases: Cases, frames: Frames | None, dim: int | None) -> Answers:
    """What y says of cases; `dim` is the size of vectors, None where answers are numbers."""
    parts = None if frames is None else frames.per_row(y)
    if parts is not None:
        y = parts
        flat = parts[0].ndim == 1
        values, per_point = _of_points(parts, cases), True
    else:
        y = y if frames is None else frames.aligned(y)
        values, per_point, flat = _of_list(y, cases, dim) if is_list(y) and _holds_parts(y) else _of_array(y, cases)
    if dim is None:
        return Answers(values, per_point, flat)
    if flat or values.shape[-1] % dim:
        form = "(cases, points, columns)" if per_point else "(cases, columns)"
        got = 1 if flat else values.shape[-1]
        raise InvalidArgument(
            f"output='vector' wants y of shape {form} with {dim} columns for each vector; got {got} columns. output='scalar' predicts numbers"
        )
    return Answers(values.reshape(*values.shape[:-1], -1, dim), per_point, flat)


def _holds_parts(y: Any) -> bool:
    return len(y) > 0 and hasattr(y[0], "__len__") and not isinstance(y[0], str)


def _of_array(y: Any, cases: Cases) -> tuple[np.ndarray, bool, bool]:
    values = numbers_of(y) if is_frame(y) else numbers(y, "y")
    count, n = cases.values.shape[:2]
    if values.ndim not in (1, 2, 3) or 0 in values.shape[1:]:
        raise InvalidArgument(
            f"y must have shape (cases,), (cases, columns) or (cases, points, columns); got {values.shape}"
        )
    if len(values) != count:
        raise InvalidArgument(f"y must have one entry for each of the {count} cases of X; got {len(values)}")
    if values.ndim == 3:
        if values.shape[1] != n:
            raise InvalidArgument(
                f"y of shape (cases, points, columns) must have the {n} points of X; got {values.shape[1]}"
            )
        check_finite(values, cases.inside, "y")
        return np.where(cases.inside[..., None], values, 0.0), True, False
    check_finite(values, np.ones(count, dtype=bool), "y")
    return values.reshape(count, -1), False, values.ndim == 1


def _of_list(y: Any, cases: Cases, dim: int | None) -> tuple[np.ndarray, bool, bool]:
    parts = [numbers_of(part) if is_frame(part) else numbers(part, f"y of case {at}") for at, part in enumerate(y)]
    if len(parts) != len(cases.lengths):
        raise InvalidArgument(
            f"y must have one entry for each of the {len(cases.lengths)} cases of X; got {len(parts)}"
        )
    axes, sizes = {part.ndim for part in parts}, [len(part) if part.ndim else 0 for part in parts]
    if axes == {2}:
        return _of_points(parts, cases), True, False
    if axes != {1}:
        raise InvalidArgument(
            f"parts of y must all have one axis, or all two (points, columns); got {sorted(axes)} axes"
        )
    if len(set(sizes)) > 1:
        return _of_points(parts, cases), True, True
    if dim is None and sizes[0] > 1 and sizes == cases.lengths.tolist():
        raise InvalidArgument(
            f"each part of y has {sizes[0]} numbers, as many as each case has points, so that it cannot be said what they are; give an array "
            f"(cases, {sizes[0]}) for {sizes[0]} answers per case, or (cases, {sizes[0]}, 1) for one per point"
        )
    return _of_array(np.stack(parts), cases)


def _of_points(parts: list[np.ndarray], cases: Cases) -> np.ndarray:
    parts = [numbers(part, f"y of case {at}") for at, part in enumerate(parts)]
    parts = [part[:, None] if part.ndim == 1 else part for part in parts]
    for at, (part, n) in enumerate(zip(parts, cases.lengths, strict=True)):
        if part.shape != (n, parts[0].shape[1]) or not part.shape[1]:
            raise InvalidArgument(
                f"y of case {at} must have shape ({n}, {parts[0].shape[1]}): its points, and the columns of case 0; got {part.shape}"
            )
    values = padded(parts).values
    check_finite(values, cases.inside, "y")
    return values

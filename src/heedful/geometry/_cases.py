"""Sets of points as they come, made into one array: arrays, lists of unequal numbers of points, data frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from heedful._errors import InvalidArgument
from heedful.bridges import frames
from heedful.bridges.frames import is_frame, is_list, listed, names_of, numbers_of

FORMS = (
    "give an array (cases, points, columns), a list of arrays (points, columns), a list of data frames, or a data frame whose rows name "
    "their case"
)


@dataclass(frozen=True)
class Cases:
    """`values` (cases, n, columns), zero behind each case's points; `lengths` (cases,), how many they are."""

    values: np.ndarray
    lengths: np.ndarray

    @property
    def inside(self) -> np.ndarray:
        """(cases, n), True where there is a point."""
        return np.arange(self.values.shape[1]) < self.lengths[:, None]

    @property
    def are_equal(self) -> bool:
        return bool((self.lengths == self.values.shape[1]).all())


@dataclass(frozen=True)
class Frames(frames.Frames):
    """What data frames held; `rows` are the places of the tables' rows in the frame that they come from, `index` its index."""

    rows: np.ndarray | None = None
    index: Any = None

    def per_row(self, y: Any) -> list[np.ndarray] | None:
        """The parts of y for each case where it has an entry for each row of a frame; None where it has not."""
        lengths = [len(table) for table in self.tables]
        if self.rows is None or not hasattr(y, "__len__") or is_list(y) or len(y) != len(self.rows):
            return None
        if len(y) == len(lengths):
            return None
        own = getattr(y, "index", None)
        if hasattr(y, "iloc") and not own.equals(self.index):  # type: ignore[union-attr]
            raise InvalidArgument(
                "y has an entry for each row of X and another index than X; give y.loc[X.index], or y.to_numpy() if it is in X's order"
            )
        values = numbers_of(y) if is_frame(y) else np.asarray(y)
        return np.split(values[self.rows], np.cumsum(lengths)[:-1])


def read_frames(X: Any, case: str) -> Frames | None:
    """The sets of data frames; None where X holds none, or is a table with one point in each row."""
    if isinstance(X, Mapping) and not hasattr(X, "shape"):  # a sparse matrix may be a mapping too
        raise InvalidArgument(f"X is a {type(X).__name__}; {FORMS}")
    if is_list(X):
        several = listed(X, "Give one or the other")
        return None if several is None else Frames(several.tables, several.names)
    if not is_frame(X):
        return None
    levels = list(X.index.names)
    if case in X.columns:
        named, X = X[case], X.drop(columns=[case])
    elif case in levels:
        named = X.index.get_level_values(case)
    elif len(levels) == 2:
        named = X.index.get_level_values(0)
    elif len(levels) > 2:
        raise InvalidArgument(
            f"the index of X has {len(levels)} levels, none of which is called {case!r}; case=... says which names the case"
        )
    else:
        return None
    return _long(X, named, case)


def _long(X: Any, named: Any, case: str) -> Frames:
    """Rows by case, in the order in which they come; cases in the order of their first row."""
    import pandas

    if not X.size:
        raise InvalidArgument(
            f"X has {X.shape[0]} rows and {X.shape[1]} columns beside {case!r}; give one point or more"
        )
    codes, cases = pandas.factorize(named)
    if (codes < 0).any():
        raise InvalidArgument(f"X has rows without a case ({case!r} is NaN); drop them or fill it in")
    rows = np.argsort(codes, kind="stable")
    tables = np.split(numbers_of(X)[rows], np.flatnonzero(np.diff(codes[rows])) + 1)
    return Frames(tables, names_of(X.columns), pandas.Index(cases), rows=rows, index=X.index)


def check_table(X: Any, y: Any, case: str) -> None:
    """Refuses a frame that names no cases and whose rows are not one answer each."""
    if is_frame(X) and hasattr(y, "__len__") and len(y) != len(X):
        raise InvalidArgument(
            f"X is a data frame without a column or index level {case!r}, so each of its {len(X)} rows is a case of one point, and y has "
            f"{len(y)} answers; case=... says which column names the case"
        )


def read_cases(X: Any) -> Cases | None:
    """Cases of an array (cases, n, columns) or of a list of arrays (n, columns); None where X is a table, or no such thing."""
    if is_list(X) and _is_deep(X):
        parts = [_points(part, at) for at, part in enumerate(X)]
        for at, part in enumerate(parts):
            if part.shape[1] != parts[0].shape[1]:
                raise InvalidArgument(
                    f"all points must have the same columns; case 0 has {parts[0].shape[1]}, case {at} has {part.shape[1]}"
                )
        cases = padded(parts)
        check_finite(cases.values, cases.inside, "X")
        return cases
    axes = getattr(X, "ndim", 2)
    if axes < 3 or is_list(X):
        return None
    if axes > 3 or 0 in X.shape:
        raise InvalidArgument(
            f"X must have shape (cases, points, columns), or (cases, columns), with one of each or more; got {tuple(X.shape)}"
        )
    values = numbers(X, "X")
    check_finite(values, np.ones(values.shape[:2], dtype=bool), "X")
    return Cases(values, np.full(len(values), values.shape[1]))


def padded(parts: list[np.ndarray]) -> Cases:
    """Arrays (n, columns) of unequal n, zero behind each."""
    lengths = np.array([len(part) for part in parts])
    values = np.zeros((len(parts), lengths.max(), *parts[0].shape[1:]))
    for row, part in zip(values, parts, strict=True):
        row[: len(part)] = part
    return Cases(values, lengths)


def _is_deep(X: Any) -> bool:
    """Whether parts of a list are sets of points and not rows of a table."""
    if not len(X):
        raise InvalidArgument(f"X is empty; {FORMS}")
    first = X[0]
    axes = getattr(first, "ndim", None)
    if axes is None:
        return isinstance(first, list | tuple) and any(
            hasattr(row, "__len__") and not isinstance(row, str) for row in first
        )
    return axes > 1


def _points(part: Any, at: int) -> np.ndarray:
    values = numbers(part, f"case {at}")
    if values.ndim != 2 or 0 in values.shape:
        raise InvalidArgument(
            f"each case must be (points, columns) with one point or more; case {at} has shape {values.shape}"
        )
    return values


def numbers(values: Any, what: str) -> np.ndarray:
    try:
        array = np.asarray(values)
        if array.dtype.kind not in "biufO":
            raise TypeError(f"{array.dtype} is no number")
        return array.astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise InvalidArgument(f"{what} cannot be read as numbers: {why:.100}") from None


def check_finite(values: np.ndarray, inside: np.ndarray, what: str) -> None:
    """Refuses NaN and infinity among values `(cases, ...)` or `(cases, n, ...)`, where `inside` `(cases,)` or `(cases, n)` is True."""
    bad = ~np.isfinite(values) & inside.reshape(*inside.shape, *[1] * (values.ndim - inside.ndim))
    if not bad.any():
        return
    place = np.argwhere(bad)[0]
    names = ("case", "point", "column") if inside.ndim == 2 else ("case", "column")
    where = ", ".join(f"{name} {at}" for name, at in zip(names, place, strict=False))
    kind = "NaN" if np.isnan(values[tuple(place)]) else "infinity"
    raise InvalidArgument(f"{what} contains {kind} ({where}); drop it or fill it in, missing values are not read")

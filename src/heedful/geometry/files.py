"""Files of sets of points: NumPy's .npz, and long tables in .csv and .parquet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from heedful._errors import InvalidArgument
from heedful._text import quantity
from heedful.bridges.frames import read_table
from heedful.bridges.npz import read_npz

Split = Literal["train", "test"]
CASE, TARGET = "case", "target"


@dataclass(frozen=True, eq=False)
class PointData:
    """Sets of points of a file and, where it has them, their answers.

    `X` is an array (cases, points, columns) or (cases, columns), a list of arrays (points, columns) of unequal numbers of points, or a data
    frame whose rows are points and whose column `case` says of which case. `y` is what `fit` takes: answers of cases or of points.
    """

    X: Any
    y: Any
    name: str

    def __len__(self) -> int:
        return self.X[CASE].nunique() if hasattr(self.X, "columns") else len(self.X)

    def __repr__(self) -> str:
        if hasattr(self.X, "columns"):
            lengths, columns = self.X[CASE].value_counts(sort=False).tolist(), self.X.shape[1] - 1
        else:
            lengths = [len(case) if np.ndim(case) == 2 else 1 for case in self.X]
            columns = self.X[0].shape[-1]
        least, most = min(lengths), max(lengths)
        points = quantity(most, "point") if least == most else f"{least} to {most} points"
        return f"{self.name}: {quantity(len(self), 'case')} of {points}, {quantity(columns, 'column')}"


def read(file: str | Path, split: Split = "train") -> PointData:
    """Reads a .npz with `X_train`, `y_train` (or `X_test`, `y_test`, by `split`; or `X`, `y`), or a long table in .csv or .parquet.

    In a .npz X is numbers (cases, points, columns), with `lengths` where cases have unequal numbers of points: X is then padded, or
    (all points, columns), case after case. y is (cases,), (cases, columns), or for each point as X is; it may be left out. Object arrays,
    which are pickles, are not read.

    In a table each row is a point; the column `case` says of which case, and columns whose names begin with `target` are the answer:
    of the case where they are the same in all its rows, for every case, else of the point. Other columns are those of X.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/drops.npz", X=np.zeros((7, 3)), lengths=[4, 3], y=[0.5, 1.5])
    ...     read(f"{folder}/drops.npz")
    drops: 2 cases of 3 to 4 points, 3 columns
    """
    file = Path(file).expanduser()
    if not file.is_file():
        raise InvalidArgument(f"there is no file {file}")
    if file.suffix == ".npz":
        return _of_npz(file, split)
    if file.suffix in (".csv", ".parquet"):
        return _of_table(file)
    raise InvalidArgument(
        f"{file} is none of .npz, .csv, .parquet; save X and y by numpy.savez('points.npz', X=X, y=y)"
    )


def _of_npz(file: Path, split: Split) -> PointData:
    arrays = read_npz(file, split, ("X", "y", "lengths"))
    called, X = arrays["X"]
    y = arrays["y"][1]
    assert X is not None
    if X.ndim not in (2, 3) or 0 in X.shape or X.dtype.kind not in "biuf":
        raise InvalidArgument(
            f"{called} in {file} must be numbers of shape (cases, points, columns), (cases, columns), or with lengths (all points, columns); "
            f"got {X.dtype} of shape {X.shape}"
        )
    if y is not None and (y.ndim == 0 or y.dtype.kind not in "biufUS"):
        raise InvalidArgument(
            f"{arrays['y'][0]} in {file} must be numbers or strings with a row for each case; got {y.dtype} of shape {y.shape}"
        )
    if y is not None and y.dtype.kind == "S":
        y = y.astype(str)
    name, lengths = arrays["lengths"]
    if lengths is None:
        return PointData(X, y, file.stem)
    count = len(X) if X.ndim == 3 else len(lengths)
    most = X.shape[1] if X.ndim == 3 else len(X)
    whole = lengths.ndim == 1 and lengths.dtype.kind in "iu" and len(lengths) == count
    if (
        not whole
        or lengths.min(initial=1) < 1
        or lengths.max(initial=1) > most
        or (X.ndim == 2 and lengths.sum() != len(X))
    ):
        form = (
            f"{count} whole numbers from 1 to {most}"
            if X.ndim == 3
            else f"whole numbers from 1 on whose sum is {len(X)}"
        )
        raise InvalidArgument(
            f"{name} in {file} must be {form}, the points of each case; got {lengths.dtype} of shape {lengths.shape}"
        )
    return PointData(_parts(X, lengths), _answers(y, X, lengths), file.stem)


def _parts(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Of padded cases, or of all points, those of each case."""
    if values.ndim == 2:
        return np.split(values, np.cumsum(lengths)[:-1])
    return [case[:n] for case, n in zip(values, lengths, strict=True)]


def _answers(y: np.ndarray | None, X: np.ndarray, lengths: np.ndarray) -> Any:
    """y as it is where it is of cases, else in parts as X."""
    if y is None or (len(y) == len(lengths) and y.ndim < 3):
        return y
    if X.ndim == 2 and len(y) == len(X):
        return _parts(y if y.ndim == 2 else y[:, None], lengths)
    return _parts(y, lengths) if y.ndim == 3 and len(y) == len(lengths) else y


def _of_table(file: Path) -> PointData:
    table = read_table(file)
    if CASE not in table.columns:
        raise InvalidArgument(
            f"{file} has no column {CASE!r}, which says of which case a point is; it has {', '.join(map(str, table.columns[:8]))}"
        )
    if table[CASE].isna().any():
        raise InvalidArgument(f"{file} has rows without a case; fill the column in, or drop them")
    targets = [column for column in table.columns if str(column).startswith(TARGET)]
    X = table.drop(columns=targets)
    if not targets:
        return PointData(X, None, file.stem)
    empty = table[targets].isna().any(axis=1)
    if empty.any():
        raise InvalidArgument(
            f"{file} has rows without {' or '.join(map(str, targets))}, as that of case {table[CASE][empty].iloc[0]!r}"
        )
    grouped = table.groupby(CASE, sort=False)[targets]
    whole = (grouped.nunique() == 1).all(axis=None)
    # One column is an answer without an axis.
    y = (grouped.first() if whole else table)[targets[0] if len(targets) == 1 else targets].to_numpy()
    return PointData(X, y.astype(str) if y.dtype == object else y, file.stem)

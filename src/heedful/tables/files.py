"""Files of tables: .csv and .parquet with a row for each case, and NumPy's .npz with X and y."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from heedful._errors import InvalidArgument
from heedful._text import quantity
from heedful.bridges.frames import is_frame, read_table
from heedful.bridges.npz import read_npz

Split = Literal["train", "test"]
# Dates begin with the year; a number that begins with zeros is a code.
DATE, CODE, WHOLE = r"\d{4}-\d{2}-\d{2}", r"[+-]?0\d", r"\s*[+-]?\d+\s*"
CLASSES = 20
"""Whole numbers of so many kinds are still classes."""
# Rows, columns and classes of tables that need no training (recipe `tables-prior`), and the options that there are without.
ROWS, COLUMNS, ANSWERED = 1000, 50, 10
UNTRAINED = {"target", "categorical", "variants", "context_size", "precision", "random_state", "device"}


@dataclass(frozen=True, eq=False)
class TableData:
    """A table of a file: `X`, a data frame or an array, and `y` where it is known which column is the target."""

    X: Any
    name: str
    y: Any = None

    def __len__(self) -> int:
        return len(self.X)

    def __repr__(self) -> str:
        return f"{self.name}: {quantity(len(self.X), 'row')} of {quantity(self.X.shape[1], 'feature')}"

    def labelled_by(self, target: str | None, *, every: bool = False) -> Self:
        """The same with the column `target` as y, where it is there. Rows in which it is missing are left out; or stay, with `every`, and then there is no y."""
        if target is None or not is_frame(self.X) or target not in self.X.columns:
            return self
        known = self.X[target].notna()
        if every and not known.all():
            return replace(self, X=self.X.drop(columns=target))
        if not known.any():
            raise InvalidArgument(
                f"{self.name} has no row with a value in the column {target!r}, which is to be predicted"
            )
        frame = self.X[known]
        y = frame[target].to_numpy()
        if len(y) and y.dtype.kind == "f" and (y == np.round(y)).all() and not known.all():
            # Whole numbers are numbers with fractions only where some are missing.
            y = y.astype(np.int64)
        return replace(self, X=frame.drop(columns=target), y=y.astype(str) if y.dtype.kind in "OT" else y)


def read(file: str | Path, split: Split = "train") -> TableData:
    """Reads a table in .csv or .parquet with a row for each case, or a .npz with X and perhaps y.

    Text that is a date in every cell is read as dates; numbers that begin with zeros stay texts, as they are codes. In a .npz the arrays may have `_train` or `_test` behind their names: then those of `split` are read. Object arrays,
    which are pickles, are not read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lines = ["petal,kind", "1.4,setosa", "5.1,virginica"]
    ...     _ = Path(f"{folder}/flowers.csv").write_text(chr(10).join(lines))
    ...     read(f"{folder}/flowers.csv").labelled_by("kind")
    flowers: 2 rows of 1 feature
    """
    file = Path(file).expanduser()
    if not file.is_file():
        raise InvalidArgument(f"there is no file {file}")
    if file.suffix in (".csv", ".parquet"):
        return TableData(_typed(read_table(file, text=True)), file.stem)
    if file.suffix != ".npz":
        raise InvalidArgument(f"{file} is none of .csv, .parquet, .npz; save a table with a row for each case")
    arrays = {name: array for name, (_, array) in read_npz(file, split, ("X", "y")).items()}
    X = arrays["X"]
    if X is None or X.ndim != 2:
        got = None if X is None else X.shape
        raise InvalidArgument(f"X in {file} must have two axes, (rows, columns); got shape {got}")
    return TableData(X, file.stem, arrays["y"])


def _typed(frame: Any) -> Any:
    """Columns of text that are numbers as numbers, and those that are dates as dates. Numbers that begin with zeros are texts: codes of places, say."""
    import pandas

    for name in frame.columns:
        column = frame[name]
        if not (pandas.api.types.is_object_dtype(column.dtype) or pandas.api.types.is_string_dtype(column.dtype)):
            continue
        known = column.dropna().astype(str)
        try:
            if len(known) and known.str.match(DATE).all():
                frame[name] = pandas.to_datetime(column, format="ISO8601")
            elif not known.str.match(CODE).any():
                whole = len(known) == len(column) and known.str.fullmatch(WHOLE).all()
                frame[name] = column.astype(np.int64 if whole else np.float64)
        except (ValueError, TypeError, OverflowError):
            continue
    return frame


def estimator_for(y: Any, X: Any = None, options: Collection[str] = ()) -> str:
    """The estimator that predicts what y holds: numbers with fractions or of more than twenty kinds are numbers, all else are classes.

    A table X of 1,000 rows and 50 columns at most, with ten classes at most, needs no training, unless `options` name what only a trained estimator has.

    >>> estimator_for([1, 2, 2]), estimator_for([0.5, 1.5]), estimator_for(["a", "b"])
    ('DatapointClassifier', 'DatapointRegressor', 'DatapointClassifier')
    """
    values = np.asarray(y)
    numbers = values.dtype.kind in "fiu" and len(np.unique(values)) > CLASSES
    numbers |= values.dtype.kind == "f" and bool((values != np.round(values)).any())
    small = X is not None and len(X) <= ROWS and X.shape[1] <= COLUMNS and set(options) <= UNTRAINED
    small &= numbers or len(np.unique(values)) <= ANSWERED
    return f"{'InContext' if small else 'Datapoint'}{'Regressor' if numbers else 'Classifier'}"

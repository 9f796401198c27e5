"""Data frames of cases that are tables of their own: lists of frames, and frames whose rows name the case they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from heedful._errors import InvalidArgument, MissingExtra

__all__ = ["Frames", "is_frame", "is_list", "is_numeric", "listed", "names_of", "numbers_of", "read_table"]


@dataclass(frozen=True)
class Frames:
    """What data frames held: a table (rows, columns) for each case, names of the columns and of the cases.

    `nouns` are what errors call the columns and the cases.
    """

    tables: list[np.ndarray]
    names: tuple[str, ...] | None
    cases: Any = None  # a pandas index, where frames have one
    nouns: tuple[str, str] = ("columns", "cases")

    def ordered(self, expected: Sequence[str] | None, of: str = "fit", here: str = "X") -> Self:
        """The same with its columns in the order of `expected`, those `of` another, whatever order they came in."""
        if expected is None or self.names is None or list(expected) == list(self.names):
            return self
        missing = [name for name in expected if name not in self.names]
        unknown = [name for name in self.names if name not in expected]
        if missing or unknown:
            what = " and ".join(
                f"{kind} {', '.join(map(repr, names[:5]))}"
                for kind, names in (("lacks", missing), ("has besides", unknown))
                if names
            )
            raise InvalidArgument(
                f"the {self.nouns[0]} must be those of {of}, {', '.join(map(repr, expected))}; {here} {what}"
            )
        places = [self.names.index(name) for name in expected]
        return replace(self, tables=[table[:, places] for table in self.tables], names=tuple(expected))

    def aligned(self, y: Any, what: str = "y") -> Any:
        """y, one entry for each case, in the order of the cases: by its index where that names them."""
        if self.cases is None or y is None or not hasattr(y, "__len__"):
            return y
        count, noun = len(self.cases), self.nouns[1]
        if len(y) != count:
            rows = sum(len(table) for table in self.tables)
            one = "series" if noun == "instances" else "case"
            hint = f"; where each row is a {one} of its own, give X.reset_index(drop=True)" if len(y) == rows else ""
            raise InvalidArgument(
                f"{what} must have one entry for each of the {count} {noun} that X names; got {len(y)}{hint}"
            )
        index = getattr(y, "index", None)
        if index is None or not hasattr(y, "reindex") or index.equals(self.cases) or not index.is_unique:
            return y
        if set(index) != set(self.cases):
            return y
        if _is_counted(index):
            raise InvalidArgument(
                f"the index of {what} counts 0, 1, ..., and X names the same {noun} in another order, so that it cannot be "
                f"told which is meant; give {what}.loc[{noun}] or {what}.to_numpy(), in the order in which X names them"
            )
        return y.reindex(self.cases)


def is_frame(X: Any) -> bool:
    """Whether this is a data frame, of pandas or alike."""
    return hasattr(X, "iloc") and getattr(X, "ndim", 0) == 2


def is_list(X: Any) -> bool:
    """Whether this holds cases that may be of unequal sizes: a list, a tuple, or an array of objects."""
    return isinstance(X, list | tuple) or (isinstance(X, np.ndarray) and X.dtype == object and X.ndim == 1)


def listed(X: Any, mixed: str, nouns: tuple[str, str] = ("columns", "cases")) -> Frames | None:
    """A list of data frames, a case each, columns in the order of the first; None where no part is one.

    `mixed` is what an error says of a list in which only some are.
    """
    framed = [is_frame(case) for case in X]
    if not any(framed):
        return None
    if not all(framed):
        at = framed.index(False)
        raise InvalidArgument(f"X mixes data frames and others: case {at} is a {type(X[at]).__name__}. {mixed}")
    names = names_of(X[0].columns, nouns[0])
    tables = []
    for at, frame in enumerate(X):
        own = names_of(frame.columns, nouns[0])
        if (own is None) != (names is None):
            raise InvalidArgument(
                f"the {nouns[0]} must be those of case 0, {list(X[0].columns)[:5]}; case {at} has {list(frame.columns)[:5]}"
            )
        case = Frames([numbers_of(frame, f"case {at}: ")], own, nouns=nouns)
        tables.append(case.ordered(names, "case 0", f"case {at}").tables[0])
    return Frames(tables, names, nouns=nouns)


def names_of(columns: Any, noun: str = "columns") -> tuple[str, ...] | None:
    """Names of columns as text; None where columns are only counted."""
    if columns.nlevels > 1:
        raise InvalidArgument(f"columns of X have several levels; expected one, the {noun}")
    names = tuple(map(str, columns))
    if len(set(names)) < len(names):
        raise InvalidArgument(f"columns of X must have names of their own; got {', '.join(names[:8])}")
    return None if names == tuple(map(str, range(len(names)))) else names


def is_numeric(column: Any) -> bool:
    """Whether a column of a frame holds numbers."""
    from pandas.api.types import is_numeric_dtype

    return bool(is_numeric_dtype(column.dtype))


def numbers_of(frame: Any, place: str = "") -> np.ndarray:
    """(rows, columns) in float64, NaN where a value is missing."""
    values = np.full(frame.shape, np.nan)
    for at in range(frame.shape[1]):
        column = frame.iloc[:, at]
        try:
            if getattr(column.dtype, "kind", "O") in "Mmc":
                raise TypeError(f"{column.dtype} is no number")
            values[:, at] = column.to_numpy(dtype=np.float64, na_value=np.nan)
        except (TypeError, ValueError) as error:
            why = " ".join(str(error).split())
            raise InvalidArgument(
                f"{place}column {frame.columns[at]!r} cannot be read as numbers ({why:.80})"
            ) from None
    return values


def read_table(file: Path, *, text: bool = False) -> Any:
    """The data frame in a .csv or .parquet file; with `text` the cells of a .csv are as they are written there."""
    try:
        import pandas
    except ImportError:
        raise MissingExtra("pandas", "tables") from None
    try:
        if file.suffix == ".csv":
            return pandas.read_csv(file, dtype=object) if text else pandas.read_csv(file, float_precision="round_trip")
        return pandas.read_parquet(file)
    except ImportError:
        raise InvalidArgument(f"pandas needs pyarrow to read {file}; pip install pyarrow, or save it as .csv") from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"{file} is not text in UTF-8; convert it first") from None
    except pandas.errors.EmptyDataError:
        raise InvalidArgument(f"{file} is empty; give a table with names of columns and a row for each case") from None
    except (OSError, ValueError, pandas.errors.ParserError) as error:
        raise InvalidArgument(f"{file} cannot be read: {' '.join(str(error).split())}") from None


def _is_counted(index: Any) -> bool:
    return type(index).__name__ == "RangeIndex" and index.start == 0 and index.step == 1

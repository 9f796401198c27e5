"""Events in data frames: a row for each event, with columns for its sequence, its time and its type."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from heedful._errors import InvalidArgument
from heedful.bridges.frames import is_numeric
from heedful.events._sequences import Columns, Sequences, numbers_of_times


def of_frame(frame: Any, columns: Columns) -> Sequences:
    """The rows of each sequence in their order; sequences in the order of their first row. Without a column of types, events have none."""
    import pandas

    if columns.time not in frame.columns and columns.time in frame.index.names:
        frame = frame.reset_index()
    if not len(frame):
        raise InvalidArgument("X has no rows; give one event or more")
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise InvalidArgument(f"X has two columns called {twice!r}; rename or drop one")
    wanted = [columns.sequence, columns.time, *columns.marks, *columns.static]
    if columns.type != Columns.type:
        wanted.append(columns.type)
    missing = [name for name in wanted if name not in frame.columns]
    if missing:
        raise InvalidArgument(
            f"X has no column {missing[0]!r}; it has {', '.join(map(repr, list(frame.columns)[:10]))}. Name them: sequence=..., time_column=..., "
            "type=..., marks=..., static=..."
        )
    if columns.type not in frame.columns:
        warnings.warn(
            f"X has no column {columns.type!r}: events have no types, and their times alone are read", stacklevel=6
        )
    for name in (columns.sequence, columns.time, columns.type):
        if name in frame.columns and frame[name].isna().any():
            at = int(frame[name].isna().to_numpy().argmax())
            raise InvalidArgument(f"column {name!r} is empty (NaN) in row {at}; fill it in, or drop such rows")
    codes, names = pandas.factorize(frame[columns.sequence])
    order = np.argsort(codes, kind="stable")
    frame, codes = frame.iloc[order], codes[order]
    offsets = np.append(0, np.cumsum(np.bincount(codes, minlength=len(names))))
    times, dated = numbers_of_times(_times(frame[columns.time]), f"column {columns.time!r}")
    types = None
    if columns.type in frame.columns:
        column = frame[columns.type]
        types = column.to_numpy() if is_numeric(column) else column.astype(str).to_numpy(dtype=str)
    static = {}
    for name in columns.static:
        values = _values(frame[name])
        changing = frame.groupby(codes, sort=False)[name].nunique(dropna=False) > 1
        if changing.any():
            raise InvalidArgument(
                f"column {name!r} changes within sequence {str(names[int(changing.to_numpy().argmax())])!r}; static columns do not: give it as marks"
            )
        static[name] = values[offsets[:-1]]
    marks = {name: _values(frame[name]) for name in columns.marks}
    return Sequences(times, offsets, types, marks=marks, static=static, names=pandas.Index(names), dated=dated)


def _times(column: Any) -> Any:
    """Text as dates; numbers and dates as they are."""
    import pandas

    if is_numeric(column) or column.dtype.kind == "M" or getattr(column.dtype, "tz", None) is not None:
        return column
    try:
        return pandas.to_datetime(column, utc=True, format="ISO8601")
    except (TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise InvalidArgument(
            f"column {column.name!r} cannot be read as times ({why:.120}); give numbers or dates, by pandas.to_numeric or pandas.to_datetime"
        ) from None


def _values(column: Any) -> np.ndarray:
    """Numbers as float64, anything else as text, missing ones as NaN or as an empty text."""
    if is_numeric(column):
        return column.to_numpy(dtype=np.float64, na_value=np.nan)
    return column.astype(object).where(column.notna(), "").astype(str).to_numpy(dtype=str)

"""Series in data frames: lists of frames, frames with an index (instance, time), and long frames. Rows are steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from heedful._errors import InvalidArgument

# Columns of long frames, by what they are called in small letters.
INSTANCE = {"instance", "instances", "instance_id", "case", "case_id", "id", "series", "series_id", "unique_id", "sample_id"}  # fmt: skip
TIME = {"time", "times", "time_id", "timepoint", "timepoints", "timestamp", "step", "t", "date", "datetime", "reading_id", "ds"}  # fmt: skip
CHANNEL = {"dim", "dim_id", "dimension", "channel", "channel_id", "variable"}
VALUE = {"value", "values"}

FORMS = (
    "give a list of data frames (rows = steps, columns = channels), a frame with an index (instance, time), or columns called "
    "instance and time"
)


@dataclass(frozen=True)
class Frames:
    """What data frames held: a series (channels, time) for each case, names of the channels and of the cases."""

    series: list[np.ndarray]
    channels: tuple[str, ...] | None
    cases: Any = None  # a pandas index, where frames have one

    def ordered(self, expected: Sequence[str] | None, of: str = "fit", here: str = "X") -> Frames:
        """The same with its channels in the order of `expected`, those `of` another, whatever order they came in."""
        if expected is None or self.channels is None or list(expected) == list(self.channels):
            return self
        missing = [name for name in expected if name not in self.channels]
        unknown = [name for name in self.channels if name not in expected]
        if missing or unknown:
            what = " and ".join(
                f"{kind} {', '.join(map(repr, names[:5]))}"
                for kind, names in (("lacks", missing), ("has besides", unknown))
                if names
            )
            raise InvalidArgument(
                f"the channels must be those of {of}, {', '.join(map(repr, expected))}; {here} {what}"
            )
        places = [self.channels.index(name) for name in expected]
        return replace(self, series=[case[places] for case in self.series], channels=tuple(expected))

    def aligned(self, y: Any, what: str = "y") -> Any:
        """y, one entry for each case, in the order of the cases: by its index where that names them."""
        if self.cases is None or y is None or not hasattr(y, "__len__"):
            return y
        count = len(self.cases)
        if len(y) != count:
            rows = sum(case.shape[1] for case in self.series)
            hint = "; where each row is a series of its own, give X.reset_index(drop=True)" if len(y) == rows else ""
            raise InvalidArgument(
                f"{what} must have one entry for each of the {count} instances that X names; got {len(y)}{hint}"
            )
        index = getattr(y, "index", None)
        if index is None or not hasattr(y, "reindex") or index.equals(self.cases) or not index.is_unique:
            return y
        if set(index) != set(self.cases):
            return y
        if _is_counted(index):
            raise InvalidArgument(
                f"the index of {what} counts 0, 1, ..., and X names the same instances in another order, so that it cannot be "
                f"told which is meant; give {what}.loc[instances] or {what}.to_numpy(), in the order in which X names them"
            )
        return y.reindex(self.cases)


def read_frames(X: Any) -> Frames | None:
    """The series of data frames; None where X holds none, or is a table of one univariate series per row."""
    if isinstance(X, Mapping) and not hasattr(X, "shape"):  # a sparse matrix may be a mapping too
        raise InvalidArgument(f"X is a {type(X).__name__}; {FORMS}")
    if isinstance(X, list | tuple) or (isinstance(X, np.ndarray) and X.dtype == object and X.ndim == 1):
        framed = [_is_frame(case) for case in X]
        if not any(framed):
            return None
        if not all(framed):
            at = framed.index(False)
            raise InvalidArgument(
                f"X mixes data frames and others: case {at} is a {type(X[at]).__name__}. Rows of a frame are steps, those of an "
                "array channels; give one or the other"
            )
        return _listed(list(X))
    levels = getattr(getattr(X, "index", None), "nlevels", 1)
    if levels > 1:
        if levels != 2:
            raise InvalidArgument(f"the index of X has {levels} levels; expected two, (instance, time)")
        frame = X if _is_frame(X) else X.to_frame()
        return _panel(frame, X.index.get_level_values(0), X.index.get_level_values(1))
    return _long(X) if _is_frame(X) else None


def check_rows(X: Any, y: Any) -> None:
    """Refuses a plain frame whose rows are not one labelled series each."""
    if _is_frame(X) and hasattr(y, "__len__") and len(y) != len(X):
        raise InvalidArgument(
            f"X is a data frame without instances and times, so each of its {len(X)} rows is a univariate series, and y has {len(y)} "
            f"labels. For other data {FORMS}"
        )


def check_single(X: Any, channels: Sequence[str]) -> None:
    """Refuses a plain frame whose columns are a model's channels: its rows would be read as series of one channel."""
    if _is_frame(X) and set(map(str, X.columns)) == set(channels):
        raise InvalidArgument(
            f"the columns of X are the channels of fit, {', '.join(map(repr, channels[:5]))}, so its rows are the steps of one series; "
            "give it in a list, [X]"
        )


def _is_frame(X: Any) -> bool:
    return hasattr(X, "iloc") and getattr(X, "ndim", 0) == 2


def _is_counted(index: Any) -> bool:
    return type(index).__name__ == "RangeIndex" and index.start == 0 and index.step == 1


def _listed(frames: list[Any]) -> Frames:
    names = _names(frames[0].columns)
    series = []
    for at, frame in enumerate(frames):
        own = _names(frame.columns)
        if (own is None) != (names is None):
            raise InvalidArgument(
                f"the channels must be those of case 0, {list(frames[0].columns)[:5]}; case {at} has {list(frame.columns)[:5]}"
            )
        case = Frames([_numbers(frame, f"case {at}: ").T], own)
        series.append(case.ordered(names, "case 0", f"case {at}").series[0])
    return Frames(series, names)


def _long(X: Any) -> Frames | None:
    """A frame with columns for instance and time: the others are channels, or one names a channel and one holds its value."""
    called = {column: str(column).lower() for column in X.columns}
    instance, time = (_only(called, names, X) for names in (INSTANCE, TIME))
    if instance is None or time is None:
        if instance is not None and X[instance].duplicated().any():
            raise InvalidArgument(
                f"column {instance!r} names instances and no column is called time; X.set_index([{instance!r}, ...]) says which is"
            )
        _check_table(X)
        return None
    channel, value = _only(called, CHANNEL, X), _only(called, VALUE, X)
    if channel is not None and value is not None and X.shape[1] == 4:
        if X.duplicated([instance, time, channel]).any():
            row = X[X.duplicated([instance, time, channel])].iloc[0]
            raise InvalidArgument(
                f"X has two values of channel {row[channel]!r} for instance {row[instance]!r} at {row[time]!r}; keep one"
            )
        order = X[instance].drop_duplicates()
        wide = X.pivot(index=[instance, time], columns=channel, values=value)
        if not _is_numeric(X[channel]):
            # A pivot sorts, dim_10 before dim_2.
            wide = wide[X[channel].drop_duplicates()]
        panel = _panel(wide, wide.index.get_level_values(0), wide.index.get_level_values(1))
        places = panel.cases.get_indexer(order)
        return Frames([panel.series[at] for at in places], panel.channels, panel.cases[places])
    rest = X.drop(columns=[instance, time])
    if not rest.shape[1]:
        raise InvalidArgument(
            f"X has columns {instance!r} and {time!r} alone; expected one or more channels beside them"
        )
    return _panel(rest, X[instance], X[time])


def _check_table(X: Any) -> None:
    """Refuses a frame that is no table of numbers, one univariate series in each row."""
    if not X.size:
        raise InvalidArgument(
            f"X is a data frame of {X.shape[0]} rows and {X.shape[1]} columns; give one series or more"
        )
    if len({isinstance(column, str) for column in X.columns}) > 1:
        raise InvalidArgument(
            "columns of X are named by text and by numbers; X.columns = X.columns.astype(str) makes all text"
        )
    if hasattr(X.iloc[0, 0], "__len__") and not isinstance(X.iloc[0, 0], str):
        raise InvalidArgument(f"a data frame of series is not read; {FORMS}")
    try:
        _numbers(X.iloc[:, [at for at, column in enumerate(X.columns) if not _is_numeric(X[column])]])
    except InvalidArgument as error:
        raise InvalidArgument(
            f"X is a data frame without instances and times, so each row is a univariate series, and {error}. For other data {FORMS}"
        ) from None


def _only(called: dict[Any, str], names: set[str], X: Any) -> Any:
    having = [column for column, name in called.items() if name in names]
    if len(having) > 1:
        raise InvalidArgument(
            f"columns {', '.join(map(repr, having))} of X could each name the same thing; X.set_index([instance, time]) says which does"
        )
    return having[0] if having else None


def _panel(frame: Any, instances: Any, times: Any) -> Frames:
    """Rows sorted by time within each instance; instances in the order of their first row."""
    import pandas

    codes, cases = pandas.factorize(instances)
    cases = pandas.Index(cases)
    times = pandas.Series(np.asarray(times) if getattr(times, "tz", None) is None else times).reset_index(drop=True)
    if not len(frame):
        raise InvalidArgument("X has no rows; give one series or more")
    if (codes < 0).any() or times.isna().any():
        what = "instance" if (codes < 0).any() else "time"
        raise InvalidArgument(f"X has rows without {what} ({what} is NaN); drop them or fill it in")
    if not _is_numeric(times) and times.dtype.kind not in "Mm" and not hasattr(times.dtype, "freq"):
        raise InvalidArgument(
            f"times of X are {times.dtype}, as {times.iloc[0]!r}; give numbers or dates, by pandas.to_numeric or pandas.to_datetime"
        )
    keys = pandas.DataFrame({"case": codes, "time": times})
    double = keys.duplicated()
    if double.any():
        at = int(double.to_numpy().argmax())
        raise InvalidArgument(f"X has two rows for instance {cases[codes[at]]!r} at time {times.iloc[at]!s}; keep one")
    order = keys.sort_values(["case", "time"], kind="stable").index.to_numpy()
    values = _numbers(frame)[order]
    ends = np.flatnonzero(np.diff(codes[order])) + 1
    return Frames([part.T for part in np.split(values, ends)], _names(frame.columns), cases)


def _names(columns: Any) -> tuple[str, ...] | None:
    """Names of channels as text; None where columns are only counted."""
    if columns.nlevels > 1:
        raise InvalidArgument("columns of X have several levels; expected one, the channels")
    names = tuple(map(str, columns))
    if len(set(names)) < len(names):
        raise InvalidArgument(f"columns of X must have names of their own; got {', '.join(names[:8])}")
    return None if names == tuple(map(str, range(len(names)))) else names


def _is_numeric(column: Any) -> bool:
    from pandas.api.types import is_numeric_dtype

    return bool(is_numeric_dtype(column.dtype))


def _numbers(frame: Any, place: str = "") -> np.ndarray:
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

"""Series in data frames: lists of frames, frames with an index (instance, time), and long frames. Rows are steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from heedful._errors import InvalidArgument
from heedful.bridges import frames
from heedful.bridges.frames import is_frame, is_list, is_numeric, listed, names_of, numbers_of

# Columns of long frames, by what they are called in small letters.
INSTANCE = {"instance", "instances", "instance_id", "case", "case_id", "id", "series", "series_id", "unique_id", "sample_id"}  # fmt: skip
TIME = {"time", "times", "time_id", "timepoint", "timepoints", "timestamp", "step", "t", "date", "datetime", "reading_id", "ds"}  # fmt: skip
CHANNEL = {"dim", "dim_id", "dimension", "channel", "channel_id", "variable"}
VALUE = {"value", "values"}

FORMS = (
    "give a list of data frames (rows = steps, columns = channels), a frame with an index (instance, time), or columns called "
    "instance and time"
)


NOUNS = ("channels", "instances")


@dataclass(frozen=True)
class Frames(frames.Frames):
    """What data frames held, with a channel in each column and a step in each row."""

    @property
    def channels(self) -> tuple[str, ...] | None:
        return self.names

    @property
    def series(self) -> list[np.ndarray]:
        """(channels, time) of each case."""
        return [table.T for table in self.tables]


def read_frames(X: Any) -> Frames | None:
    """The series of data frames; None where X holds none, or is a table of one univariate series per row."""
    if isinstance(X, Mapping) and not hasattr(X, "shape"):  # a sparse matrix may be a mapping too
        raise InvalidArgument(f"X is a {type(X).__name__}; {FORMS}")
    if is_list(X):
        several = listed(X, "Rows of a frame are steps, those of an array channels; give one or the other", NOUNS)
        return None if several is None else Frames(several.tables, several.names, nouns=NOUNS)
    levels = getattr(getattr(X, "index", None), "nlevels", 1)
    if levels > 1:
        if levels != 2:
            raise InvalidArgument(f"the index of X has {levels} levels; expected two, (instance, time)")
        frame = X if is_frame(X) else X.to_frame()
        return _panel(frame, X.index.get_level_values(0), X.index.get_level_values(1))
    return _long(X) if is_frame(X) else None


def check_rows(X: Any, y: Any) -> None:
    """Refuses a plain frame whose rows are not one labelled series each."""
    if is_frame(X) and hasattr(y, "__len__") and len(y) != len(X):
        raise InvalidArgument(
            f"X is a data frame without instances and times, so each of its {len(X)} rows is a univariate series, and y has {len(y)} "
            f"labels. For other data {FORMS}"
        )


def check_single(X: Any, channels: Sequence[str]) -> None:
    """Refuses a plain frame whose columns are a model's channels: its rows would be read as series of one channel."""
    if is_frame(X) and set(map(str, X.columns)) == set(channels):
        raise InvalidArgument(
            f"the columns of X are the channels of fit, {', '.join(map(repr, channels[:5]))}, so its rows are the steps of one series; "
            "give it in a list, [X]"
        )


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
        if not is_numeric(X[channel]):
            # A pivot sorts, dim_10 before dim_2.
            wide = wide[X[channel].drop_duplicates()]
        panel = _panel(wide, wide.index.get_level_values(0), wide.index.get_level_values(1))
        places = panel.cases.get_indexer(order)
        return Frames([panel.tables[at] for at in places], panel.names, panel.cases[places], NOUNS)
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
        numbers_of(X.iloc[:, [at for at, column in enumerate(X.columns) if not is_numeric(X[column])]])
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
    if not is_numeric(times) and times.dtype.kind not in "Mm" and not hasattr(times.dtype, "freq"):
        raise InvalidArgument(
            f"times of X are {times.dtype}, as {times.iloc[0]!r}; give numbers or dates, by pandas.to_numeric or pandas.to_datetime"
        )
    keys = pandas.DataFrame({"case": codes, "time": times})
    double = keys.duplicated()
    if double.any():
        at = int(double.to_numpy().argmax())
        raise InvalidArgument(f"X has two rows for instance {cases[codes[at]]!r} at time {times.iloc[at]!s}; keep one")
    order = keys.sort_values(["case", "time"], kind="stable").index.to_numpy()
    values = numbers_of(frame)[order]
    ends = np.flatnonzero(np.diff(codes[order])) + 1
    return Frames(np.split(values, ends), names_of(frame.columns, "channels"), cases, NOUNS)

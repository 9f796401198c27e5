"""Sequences of events as they come, made into flat arrays: lists of (types, times), dicts of arrays, padded arrays, frames."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from heedful._errors import InvalidArgument
from heedful.bridges.frames import is_frame, is_list

FORMS = "give a list of (types, times), a dict with types and times, or a data frame with columns for sequence, time and type"


@dataclass(frozen=True)
class Columns:
    """The columns of a data frame by what they hold."""

    sequence: str = "sequence"
    time: str = "time"
    type: str = "type"
    marks: tuple[str, ...] = ()
    static: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sequences:
    """Events of sequence i lie at `offsets[i]:offsets[i + 1]`; times do not fall within a sequence.

    `starts` and `ends` say from when until when a sequence was watched, NaN where that is not known. `marks` are columns with an entry for each
    event, `static` with one for each sequence. `dated` times were dates; they are seconds since 1970 here.
    """

    times: np.ndarray  # (events,) float64
    offsets: np.ndarray  # (sequences + 1,)
    types: np.ndarray | None = None  # (events,) labels; None where events have no types
    starts: np.ndarray = field(default_factory=lambda: np.empty(0))  # (sequences,)
    ends: np.ndarray = field(default_factory=lambda: np.empty(0))  # (sequences,)
    marks: Mapping[str, np.ndarray] = field(default_factory=dict)
    static: Mapping[str, np.ndarray] = field(default_factory=dict)
    names: Any = None  # a pandas index, where a frame names sequences
    dated: bool = False

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


def read_sequences(X: Any, columns: Columns, *, sort: bool = False) -> Sequences:
    """What X holds, checked: times finite and rising within each sequence (or brought in order by `sort`), none empty."""
    X = getattr(X, "X", X) if not isinstance(X, Mapping) and hasattr(X, "X") else X
    if is_frame(X):
        from heedful.events._frames import of_frame

        return _ordered(of_frame(X, columns), sort)
    if isinstance(X, Mapping):
        return _ordered(_of_mapping(X), sort)
    if isinstance(X, np.ndarray) and X.dtype != object:
        return _ordered(_of_array(X), sort)
    if is_list(X):
        return _ordered(_of_list(X), sort)
    raise InvalidArgument(f"X is a {type(X).__name__}; {FORMS}")


def numbers_of_times(values: Any, place: str = "times") -> tuple[np.ndarray, bool]:
    """Times as float64, and whether they were dates: then they are seconds since 1970, in UTC."""
    if hasattr(values, "dtype") and getattr(values.dtype, "tz", None) is not None:
        values = values.dt.tz_convert("UTC").dt.tz_localize(None) if hasattr(values, "dt") else values.tz_convert(None)
    values = np.asarray(values)
    if values.dtype == object and any(hasattr(one, "isoformat") for one in values.flat):
        values = _dates(values, place)
    if values.dtype.kind == "M":
        if np.isnat(values).any():
            raise InvalidArgument(f"{place} hold NaT at {int(np.isnat(values).argmax())}; leave such events out")
        whole = values.astype("datetime64[s]")
        # Seconds and what is below them apart: nanoseconds since 1970 have more digits than a float.
        below = (values - whole).astype("timedelta64[ns]").astype(np.int64)
        return whole.astype(np.int64) + below / 1e9, True
    if values.dtype.kind not in "iuf" or values.ndim != 1:
        raise InvalidArgument(
            f"{place} must be numbers or dates in one axis; got {values.dtype} of shape {values.shape}"
        )
    if values.dtype in (np.float32, np.float16) or (
        values.dtype.kind in "iu" and np.abs(values).max(initial=0) > 2**53
    ):
        _check_resolution(values, place)
    return values.astype(np.float64), False


def _dates(values: np.ndarray, place: str) -> np.ndarray:
    """Objects that are dates, with time zones or without, as datetime64 in UTC."""
    try:
        import pandas

        return pandas.to_datetime(values, utc=True).tz_localize(None).to_numpy()
    except ImportError:
        return values.astype("datetime64[us]")
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{place} cannot be read as dates: {' '.join(str(error).split()):.120}") from None


def _check_resolution(values: np.ndarray, place: str) -> None:
    finite = np.unique(values[np.isfinite(values)])
    kind = values.dtype if values.dtype.kind == "f" else np.dtype(np.float64)
    step = float(np.spacing(np.abs(finite).max(initial=0).astype(kind)))
    if len(finite) > 1 and step >= np.diff(finite).min():
        warnings.warn(
            f"{place} are {values.dtype}, whose steps{'' if kind == values.dtype else ' in float64'} at {np.abs(finite).max():.6g} are {step:.3g}: "
            "gaps are rounded to that. Keep times in float64 or int64, or count them from a nearer origin",
            stacklevel=6,
        )


def _of_list(X: Any) -> Sequences:
    """A list of (types, times), or of times alone."""
    if not len(X):
        raise InvalidArgument(f"X is empty; {FORMS}")
    marked = [isinstance(case, tuple | list) and len(case) == 2 and np.ndim(case[0]) > 0 for case in X]
    if not any(marked):
        if any(
            np.asarray(case).dtype.kind in "USO"
            and not hasattr(np.ravel(case)[:1].tolist()[0] if np.size(case) else 0, "isoformat")
            for case in X
        ):
            raise InvalidArgument(
                f"X holds text where times are expected; {FORMS}, also of one sequence: [(types, times)]"
            )
        return _of_mapping({"times": X})
    if not all(marked):
        at = marked.index(False)
        raise InvalidArgument(f"sequence {at} is a {type(X[at]).__name__}, not (types, times); {FORMS}")
    return _of_mapping({"types": [case[0] for case in X], "times": [case[1] for case in X]})


def _of_array(X: np.ndarray) -> Sequences:
    """(sequences, events, 2) with type and time of each event, NaN behind a sequence's end."""
    if X.ndim != 3 or X.shape[2] != 2 or X.dtype.kind not in "iuf":
        raise InvalidArgument(
            f"an array must be (sequences, events, 2), type and time of each event; got {X.dtype} of shape {X.shape}; else {FORMS}"
        )
    known = ~np.isnan(X).any(2)
    lengths = np.where(known.any(1), X.shape[1] - known[:, ::-1].argmax(1), 0)
    inside = np.arange(X.shape[1]) < lengths[:, None]
    if not known[inside].all():
        at = int((inside & ~known).any(1).argmax())
        raise InvalidArgument(f"sequence {at} holds NaN between its events; leave such events out")
    flat = X[inside]
    types = flat[:, 0].astype(np.int64) if (flat[:, 0] == np.round(flat[:, 0])).all() else flat[:, 0]
    return Sequences(flat[:, 1].astype(np.float64), np.append(0, np.cumsum(lengths)), types)


def _of_mapping(X: Mapping[str, Any]) -> Sequences:
    unknown = set(X) - {"types", "times", "offsets", "starts", "ends", "marks", "static"}
    if "times" not in X or unknown:
        raise InvalidArgument(
            f"a dict of events holds times and may hold types, offsets, starts, ends, marks, static; got {', '.join(map(str, X))}"
        )
    offsets = X.get("offsets")
    if offsets is None:
        # A missing type is told by its own name, so lengths are compared before anything is joined.
        if any(np.ndim(case) == 0 for case in X["times"]):
            raise InvalidArgument(
                "times are flat and there are no offsets; events of sequence i are times[offsets[i]:offsets[i + 1]]"
            )
        lengths = np.array([len(case) for case in X["times"]], dtype=np.int64)
        offsets = np.append(0, np.cumsum(lengths))
    else:
        offsets, size = np.asarray(offsets), len(X["times"])
        whole = offsets.ndim == 1 and offsets.dtype.kind in "iu" and len(offsets) > 1
        if not whole or offsets[0] != 0 or offsets[-1] != size or (np.diff(offsets) < 0).any():
            raise InvalidArgument(f"offsets must rise from 0 to {size}, the number of events; got {offsets!r:.80}")
    times, dated = _all_times(X["times"], offsets, "offsets" in X)
    per_event = {
        str(name): _flat(values, offsets, f"marks[{name!r}]", "offsets" in X)
        for name, values in _named(X.get("marks"), "marks").items()
    }
    types, count = X.get("types"), len(offsets) - 1
    per_sequence = {
        str(name): _per_sequence(values, count, f"static[{name!r}]")
        for name, values in _named(X.get("static"), "static").items()
    }
    return Sequences(
        times,
        offsets.astype(np.int64),
        None if types is None else _labels(_flat(types, offsets, "types", "offsets" in X)),
        starts=_bounds(X.get("starts"), count, dated, "starts"),
        ends=_bounds(X.get("ends"), count, dated, "ends"),
        marks=per_event,
        static=per_sequence,
        dated=dated,
    )


def _all_times(values: Any, offsets: np.ndarray, is_flat: bool) -> tuple[np.ndarray, bool]:
    """Times of all events; where sequences come in different types, each is read by itself, and all must be dates or none."""
    kinds = {getattr(case, "dtype", None) for case in values} if not is_flat else set()
    if is_flat or (len(kinds) == 1 and all(isinstance(kind, np.dtype) and kind.kind in "iuf" for kind in kinds)):
        return numbers_of_times(_flat(values, offsets, "times", is_flat))
    parts = [numbers_of_times(case, f"times of sequence {at}") for at, case in enumerate(values) if len(case)]
    if len({dated for _, dated in parts}) > 1:
        raise InvalidArgument("times are dates in some sequences and numbers in others; give all alike")
    return (np.concatenate([part for part, _ in parts]), parts[0][1]) if parts else (np.empty(0), False)


def _named(values: Any, what: str) -> Mapping[Any, Any]:
    if values is not None and not isinstance(values, Mapping):
        raise InvalidArgument(f"{what} must be a dict from names to columns; got a {type(values).__name__}")
    return values or {}


def _flat(values: Any, offsets: np.ndarray, what: str, is_flat: bool) -> np.ndarray:
    if is_flat:
        if len(values) != offsets[-1]:
            raise InvalidArgument(f"{what} must have an entry for each of the {offsets[-1]} events; got {len(values)}")
        return values if hasattr(values, "dtype") else np.asarray(values)
    if len(values) != len(offsets) - 1:
        raise InvalidArgument(
            f"{what} must have a list for each of the {len(offsets) - 1} sequences; got {len(values)}"
        )
    for at, (case, wanted) in enumerate(zip(values, np.diff(offsets), strict=True)):
        given = len(case) if np.ndim(case) else 0
        if given != wanted or np.ndim(case) != 1:
            raise InvalidArgument(f"sequence {at} has {wanted} times and {given} {what}; give one for each event")
    parts = [part for case in values if len(part := np.asarray(case))]
    return np.concatenate(parts) if parts else np.empty(0)


def _labels(types: np.ndarray) -> np.ndarray:
    types = np.asarray(types)
    if types.ndim != 1 or types.dtype.kind not in "biufUSO":
        raise InvalidArgument(f"types must be numbers or strings in one axis; got {types.dtype} of shape {types.shape}")
    if types.dtype.kind == "f" and np.isnan(types).any():
        raise InvalidArgument(
            f"types hold NaN, first at event {int(np.isnan(types).argmax())}; name such events, or leave them out"
        )
    if types.dtype.kind == "O":
        missing = [at for at, label in enumerate(types) if label is None or label != label]
        if missing:
            raise InvalidArgument(f"types hold nothing at event {missing[0]}; name such events, or leave them out")
        types = types.astype(str) if any(isinstance(label, str) for label in types) else np.array(types.tolist())
    return types.astype(str) if types.dtype.kind == "S" else types


def _bounds(values: Any, count: int, dated: bool, what: str) -> np.ndarray:
    if values is None:
        return np.full(count, np.nan)
    numbers, dates = numbers_of_times(np.full(count, values) if np.ndim(values) == 0 else values, what)
    if len(numbers) != count:
        raise InvalidArgument(f"{what} must be one time, or one for each of the {count} sequences; got {len(numbers)}")
    if dates != dated:
        raise InvalidArgument(f"{what} are {'dates' if dates else 'numbers'} and times are not; give both alike")
    return numbers


def _per_sequence(values: Any, count: int, what: str) -> np.ndarray:
    values = np.asarray(values)
    if values.shape != (count,):
        raise InvalidArgument(f"{what} must have an entry for each of the {count} sequences; got shape {values.shape}")
    return values


def _ordered(sequences: Sequences, sort: bool) -> Sequences:
    """Checked, and with events in the order of time where that was asked for; equal times keep their order."""
    times, offsets, count = sequences.times, sequences.offsets, len(sequences)
    starts, ends = (bound if len(bound) else np.full(count, np.nan) for bound in (sequences.starts, sequences.ends))
    sequences = replace(sequences, starts=starts, ends=ends)
    owner = np.repeat(np.arange(count), sequences.lengths)
    if not np.isfinite(times).all():
        at = int((~np.isfinite(times)).argmax())
        raise InvalidArgument(
            f"sequence {owner[at]} has the time {times[at]} at its event {at - offsets[owner[at]]}; times must be finite: NaN and "
            "infinite ones are to be left out"
        )
    empty = np.flatnonzero((sequences.lengths == 0) & np.isnan(starts))
    if len(empty):
        raise InvalidArgument(
            f"sequence {empty[0]} is empty or all NaN ({len(empty)} such); leave it out, or say when it starts"
        )
    falling = (np.diff(times) < 0) & (np.diff(owner) == 0)
    if falling.any() and sort:
        order = np.lexsort((times, owner))
        sequences = replace(
            sequences,
            times=times[order],
            types=None if sequences.types is None else sequences.types[order],
            marks={name: column[order] for name, column in sequences.marks.items()},
        )
    elif falling.any():
        at = int(falling.argmax())
        raise InvalidArgument(
            f"times of sequence {owner[at]} fall from {times[at]:.10g} to {times[at + 1]:.10g} at its event {at + 1 - offsets[owner[at]]}; "
            "bring events in order, or give sort=True"
        )
    first, last = sequences.offsets[:-1], sequences.offsets[1:] - 1
    filled = sequences.lengths > 0
    for bound, place, wrong, what in (
        (starts, first, np.greater, "starts after its first event"),
        (ends, last, np.less, "ends before its last event"),
    ):
        bad = np.zeros(count, dtype=bool)
        bad[filled] = wrong(bound[filled], sequences.times[place[filled]])
        if bad.any():
            raise InvalidArgument(f"sequence {int(bad.argmax())} {what}; got {bound[bad][0]:.10g}")
    return sequences


def label_codes(types: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, list[Any]]:
    """The place of each label among sorted classes, their number where it is none of them, and those unknown labels."""
    if types.dtype.kind in "US" or classes.dtype.kind in "US":
        types, classes = types.astype(str), classes.astype(str)
        order = np.argsort(classes)
    else:
        order = np.arange(len(classes))
    places = order[np.searchsorted(classes, types, sorter=order).clip(max=len(classes) - 1)]
    known = classes[places] == types
    return np.where(known, places, len(classes)), np.unique(types[~known]).tolist()


def chosen(columns: str | Sequence[str] | None) -> tuple[str, ...]:
    """Names of columns: a list, or one text with commas between them."""
    if columns is None:
        return ()
    return tuple(part.strip() for part in columns.split(",")) if isinstance(columns, str) else tuple(columns)

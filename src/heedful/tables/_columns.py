"""Columns of a table as people hold them: numbers, categories, dates, missing cells; read once, the same way for every estimator."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Literal, Self

import numpy as np

from heedful._checks import is_whole
from heedful._errors import InvalidArgument, MissingExtra
from heedful._savable import coded, decode, encode
from heedful.bridges.frames import is_frame
from heedful.bridges.samples import FAR, moments, validated

Kind = Literal["number", "category", "date", "duration"]

LEVELS = 256
"""Levels of a category that are told apart, the most frequent ones; the others count as missing."""

DAY = np.timedelta64(1, "D")


@coded("columns")
@dataclass(frozen=True)
class Columns:
    """What `fit` learned of the columns of a table: kind of each, levels of categories, mean and scale of the others.

    Cells are float64 `(rows, columns)`: numbers as they are, days since 1970 for dates, days for lengths of time, the place of a level among `levels` for categories, NaN for a
    cell that is missing or holds a level never seen.
    """

    kinds: tuple[Kind, ...]
    levels: tuple[tuple[Any, ...] | None, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    names: tuple[str, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of each column 1, or the number of its levels."""
        return tuple(1 if levels is None else len(levels) for levels in self.levels)

    @property
    def is_category(self) -> np.ndarray:
        return np.array([kind == "category" for kind in self.kinds])

    @property
    def width(self) -> int:
        """Columns of `dense`."""
        return sum(self.sizes)

    def standardised(self, cells: np.ndarray) -> np.ndarray:
        """Cells with numbers in standard deviations from the mean of the training; codes and NaN as they are."""
        scaled = (cells - np.array(self.mean)) / np.array(self.scale)
        far = np.abs(scaled) > FAR
        if far.any():
            row, column = np.argwhere(far)[0]
            raise InvalidArgument(
                f"column {self.names[column]!r} has a value more than {FAR:g} standard deviations from the training's mean, in row {row}"
            )
        return scaled

    def centred(self, cells: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Cells with numbers as distances from the median of `known` rows, in units that all but a twentieth of these stay below; codes and NaN as they are.

        One huge number among known rows leaves the others apart also in float32; in standard deviations they would be one number. What `standardised` refuses is refused.
        """
        self.standardised(cells)
        centre, unit = np.zeros(len(self.kinds)), np.full(len(self.kinds), 0.5)
        for place in np.flatnonzero(~self.is_category):
            # Halves, whose differences do not overflow.
            half = known[~np.isnan(known[:, place]), place] / 2
            centre[place] = np.median(half)
            distances = np.abs(half - centre[place])
            distances = distances[distances > 0]
            if len(distances):
                unit[place] = np.quantile(distances, 0.95, method="lower")
        with np.errstate(over="ignore"):
            return np.clip((cells / 2 - centre) / unit, -FAR, FAR)

    def raw(self, scaled: np.ndarray) -> np.ndarray:
        """The way back from `standardised`."""
        return scaled * np.array(self.scale) + np.array(self.mean)

    def dense(self, cells: np.ndarray) -> np.ndarray:
        """`(rows, width)`: standardised numbers, and a column of 0 and 1 for each level; zeros where a cell is missing."""
        scaled, parts = self.standardised(cells), []
        for place, levels in enumerate(self.levels):
            column = scaled[:, place]
            parts.append(
                np.nan_to_num(column)[:, None] if levels is None else column[:, None] == np.arange(len(levels))
            )
        return np.concatenate(parts, axis=1).astype(np.float64)

    def shown(self, cells: np.ndarray) -> dict[str, np.ndarray]:
        """Cells as they were given: numbers, levels, dates; by the names of columns."""
        table = {}
        for place, (name, kind, levels) in enumerate(zip(self.names, self.kinds, self.levels, strict=True)):
            column = cells[:, place]
            missing = np.isnan(column)
            if levels is not None:
                values = np.array([*levels, None], dtype=object)
                column = values[np.where(missing, len(levels), column).astype(int)]
            elif kind in ("date", "duration"):
                sort = "datetime64" if kind == "date" else "timedelta64"
                seconds = (np.where(missing, 0, column) * 86400).round().astype(np.int64)
                column = np.where(missing, np.array("NaT", f"{sort}[s]"), seconds.astype(f"{sort}[s]"))
            table[name] = column
        return table

    def to_dict(self) -> dict[str, Any]:
        return {
            "kinds": list(self.kinds),
            "levels": [None if levels is None else encode(list(levels)) for levels in self.levels],
            "mean": list(self.mean),
            "scale": list(self.scale),
            "names": list(self.names),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        levels = tuple(None if part is None else tuple(decode(part)) for part in data["levels"])
        return cls(tuple(data["kinds"]), levels, tuple(data["mean"]), tuple(data["scale"]), tuple(data["names"]))


def read_columns(
    estimator: Any, X: Any, y: Any = None, *, fitting: bool, categorical: str | Sequence[Any] = "auto"
) -> tuple[np.ndarray, Any]:
    """Cells of X and, in `fit`, y checked as scikit-learn does; sets `columns_`, `n_features_in_` and `feature_names_in_` there."""
    if fitting:
        y = _known_targets(y)
    if not is_frame(X) and not _is_mixed(X):
        if fitting:
            cells, y = validated(estimator, X, y)
            estimator.columns_ = _learned(_framed(cells), cells, _chosen(categorical, _framed(cells).columns))
        else:
            cells = validated(estimator, X, reset=False)
        chosen = [place for place, levels in enumerate(estimator.columns_.levels) if levels is not None]
        if chosen:
            cells = cells.copy()
            for place in chosen:
                cells[:, place] = _codes(_framed(cells).iloc[:, place], estimator.columns_, place, fitting)
        return cells, y
    frame = X if is_frame(X) else _inferred(X)
    if not frame.shape[1]:
        raise InvalidArgument("X has 0 feature(s), no column to predict from; give one at least")
    if fitting:
        places = _chosen(categorical, frame.columns)
        cells = _cells(frame, [_kind(frame.iloc[:, place], place in places) for place in range(frame.shape[1])])
        coded_frame = _framed(np.nan_to_num(cells), frame.columns if is_frame(X) else None)
        _, y = validated(estimator, coded_frame if is_frame(X) else coded_frame.to_numpy(), y)
        estimator.columns_ = _learned(frame, cells, places)
    columns = estimator.columns_
    if not fitting:
        given = _framed(np.zeros(frame.shape), frame.columns)
        validated(estimator, given if is_frame(X) else given.to_numpy(), reset=False)
        cells = _cells(frame, list(columns.kinds), columns)
    for place, kind in enumerate(columns.kinds):
        if kind == "category":
            cells[:, place] = _codes(frame.iloc[:, place], columns, place, fitting)
    infinite = np.isinf(cells).any(0)
    if infinite.any():
        raise InvalidArgument(f"column {columns.names[infinite.argmax()]!r} holds infinity; leave it empty, or cut it")
    return cells, y


def read_rows(estimator: Any, X: Any, y: Any = None, *, fitting: bool) -> tuple[np.ndarray, Any]:
    """Cells and y as `read_columns` gives them, of an estimator with `target` and `categorical` whose answers look at other rows: `fit` needs two, and a value in each column."""
    X, y = without_target(X, y, estimator.target, fitting=fitting)
    cells, y = read_columns(estimator, X, y, fitting=fitting, categorical=estimator.categorical)
    if fitting and len(cells) < 2:
        raise InvalidArgument("X has one sample; a table to look at needs two rows or more")
    if fitting and np.isnan(cells).all(0).any():
        name = estimator.columns_.names[int(np.isnan(cells).all(0).argmax())]
        raise InvalidArgument(f"column {name!r} of X holds no value at all; leave it out")
    return cells, y


def weighed(X: Any, y: Any, weights: Any, groups: Any) -> tuple[Any, Any, Any, Any, np.ndarray | None]:
    """Rows, targets, weights and groups without those of weight 0, of which nothing may be learned; and the places of the others where some are left out."""
    from sklearn.utils import _safe_indexing

    given = None if weights is None else np.asarray(weights)
    if given is not None and not hasattr(X, "__len__"):
        X = np.asarray(X)
    if (
        given is None
        or given.ndim != 1
        or given.dtype.kind not in "fiub"
        or len(given) != len(X)
        or not (given == 0).any()
    ):
        return X, y, weights, groups, None
    kept = np.flatnonzero(given != 0)
    if not len(kept):
        return X, y, weights, groups, None
    parts = [None if part is None else _safe_indexing(part, kept) for part in (X, y, groups)]
    return parts[0], parts[1], given[kept], parts[2], kept


def _known_targets(y: Any) -> Any:
    """Targets, of which none may be missing (in the words that scikit-learn looks for); pandas' own kinds of numbers and truth values as numpy's."""
    missing = 0 if y is None else int(np.sum(_pandas().isna(y)))
    if missing:
        raise InvalidArgument(f"Input y contains NaN: {missing} of {len(y)} targets missing; leave these rows out")
    plain = getattr(getattr(y, "dtype", None), "numpy_dtype", None)
    return y if plain is None or not hasattr(y, "to_numpy") else y.to_numpy(dtype=plain)


def without_target(X: Any, y: Any, target: str | None, *, fitting: bool) -> tuple[Any, Any]:
    """A frame without its target column, and that column where y was not given."""
    if target is None or not hasattr(X, "columns"):
        return X, y
    if target not in X.columns:
        if fitting and y is None:
            known = ", ".join(map(str, X.columns[:8]))
            raise InvalidArgument(f"target={target!r} is no column of X; there are {known}")
        return X, y
    return X.drop(columns=target), (X[target] if fitting and y is None else y)


def is_missing(X: Any) -> np.ndarray:
    """Which cells of a frame or an array hold nothing, `(rows, columns)`."""
    return np.asarray(_pandas().isna(X if is_frame(X) else np.asarray(X, dtype=object)))


def mended(column: Any, missing: np.ndarray, values: np.ndarray) -> Any:
    """A column of a frame with its missing cells replaced, of its own dtype where that can hold them."""
    pandas = _pandas()
    dtype = column.dtype
    if isinstance(dtype, pandas.DatetimeTZDtype):
        values = pandas.to_datetime(values, utc=True).tz_convert(dtype.tz).to_numpy(dtype=object)
    cells = column.astype(object).to_numpy(copy=True)
    cells[missing] = values[missing]
    plain = pandas.Series(cells, index=column.index, name=column.name, dtype=object)
    for wanted in (dtype, "Float64" if pandas.api.types.is_extension_array_dtype(dtype) else np.float64):
        try:
            typed = plain.astype(wanted)
        except (TypeError, ValueError):
            continue
        # Whole numbers would cut what was filled in, and a category forget it.
        if typed.notna().all() and (typed.astype(object) == plain).all():
            return typed
    return plain


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise MissingExtra("pandas", "tables") from None
    return pandas


def _framed(cells: np.ndarray, columns: Any = None) -> Any:
    return _pandas().DataFrame(cells, columns=columns)


def _is_mixed(X: Any) -> bool:
    """Whether an array or a list holds text among its cells; arrays of numbers, also as objects, are scikit-learn's to read."""
    try:
        array = np.asarray(X)
    except (TypeError, ValueError):
        return False
    if array.ndim != 2 or array.dtype.kind not in "OUS":
        return False
    if array.dtype.kind == "O":
        return any(isinstance(value, str) for value in array.ravel())
    return True


def _inferred(X: Any) -> Any:
    """A frame of an array of mixed cells; columns of numbers are numbers."""
    pandas = _pandas()
    frame = pandas.DataFrame(np.asarray(X, dtype=object))
    for name in frame.columns:
        try:
            frame[name] = pandas.to_numeric(frame[name])
        except (TypeError, ValueError):
            continue
    return frame


def _chosen(categorical: Any, names: Any) -> set[int]:
    """Places of the columns that were said to be categories."""
    if isinstance(categorical, str):
        wanted = [] if categorical == "auto" else [part.strip() for part in categorical.split(",")]
    elif isinstance(categorical, Sequence | np.ndarray):
        wanted = list(categorical)
    else:
        raise InvalidArgument(f"categorical must be 'auto' or names or places of columns; got {categorical!r:.100}")
    known, places = [str(name) for name in names], set()
    for one in wanted:
        if isinstance(one, str) and one in known:
            places.add(known.index(one))
        elif (is_whole(one) or (isinstance(one, str) and one.isdigit())) and 0 <= int(one) < len(known):
            places.add(int(one))
        else:
            raise InvalidArgument(f"categorical names {one!r}, which is no column; there are {', '.join(known[:8])}")
    return places


def _kind(column: Any, chosen: bool) -> Kind:
    types = _pandas().api.types
    dtype = column.dtype
    if getattr(dtype, "kind", "O") == "c":
        raise InvalidArgument(f"column {column.name!r} holds complex numbers; split it into two columns")
    if chosen or isinstance(dtype, _pandas().CategoricalDtype):
        return "category"
    if types.is_datetime64_any_dtype(dtype):
        return "date"
    if types.is_timedelta64_dtype(dtype):
        return "duration"
    if types.is_bool_dtype(dtype):
        return "category"
    if types.is_numeric_dtype(dtype):
        return "number"
    values = column.dropna()
    if len(values) and all(isinstance(value, bool | np.bool_) for value in values):
        return "category"
    if all(isinstance(value, int | float | np.number | Decimal) for value in values):
        return "number"
    if all(isinstance(value, date) for value in values):
        return "date"
    if all(isinstance(value, timedelta) for value in values):
        return "duration"
    strange = next((value for value in values if not isinstance(value, str | int | float | bool | np.generic)), None)
    if strange is not None:
        raise InvalidArgument(
            f"column {column.name!r} holds a {type(strange).__name__} among other cells; all cells of a column are numbers, texts, dates or "
            "lengths of time"
        )
    return "category"


def _cells(frame: Any, kinds: list[Kind], columns: Columns | None = None) -> np.ndarray:
    """Numbers and dates in float64; columns of categories are left NaN."""
    cells = np.full(frame.shape, np.nan)
    for place, kind in enumerate(kinds):
        column = frame.iloc[:, place]
        if kind == "number":
            try:
                if getattr(column.dtype, "kind", "O") in "Mm":
                    raise TypeError("it holds dates")
                cells[:, place] = column.to_numpy(dtype=np.float64, na_value=np.nan)
            except (TypeError, ValueError) as error:
                before = "held numbers in fit and " if columns is not None else ""
                why = " ".join(str(error).split())
                raise InvalidArgument(
                    f"column {column.name!r} {before}cannot be read as numbers now ({why:.80})"
                ) from None
        elif kind in ("date", "duration"):
            cells[:, place] = _days(column, kind)
    return cells


def _days(column: Any, kind: Kind) -> np.ndarray:
    """Days since 1970, or of a length of time."""
    pandas = _pandas()
    try:
        if pandas.api.types.is_numeric_dtype(column.dtype) and column.notna().any():
            raise TypeError("it holds numbers")
        if kind == "duration":
            lengths = pandas.to_timedelta(column).to_numpy(dtype="timedelta64[ns]")
            return np.where(np.isnat(lengths), np.nan, lengths / DAY)
        # Zones are left behind: one moment is one number.
        moments_ = pandas.to_datetime(column, utc=True).dt.tz_localize(None).to_numpy(dtype="datetime64[ns]")
        return np.where(np.isnat(moments_), np.nan, (moments_ - np.datetime64("1970-01-01", "ns")) / DAY)
    except (TypeError, ValueError, OverflowError) as error:
        why = " ".join(str(error).split())
        what = "dates" if kind == "date" else "lengths of time"
        raise InvalidArgument(f"column {column.name!r} cannot be read as {what} ({why:.80})") from None


def _learned(frame: Any, cells: np.ndarray, chosen: set[int]) -> Columns:
    kinds: list[Kind] = []
    levels: list[tuple[Any, ...] | None] = []
    scales: list[tuple[float, float]] = []
    for place in range(frame.shape[1]):
        column = frame.iloc[:, place]
        kinds.append(_kind(column, place in chosen))
        if kinds[-1] == "category":
            counts = column.value_counts()
            most = [_plain(value) for value, count in counts.items() if count][:LEVELS]
            levels.append(tuple(sorted(most, key=lambda value: (isinstance(value, str), value))))
            scales.append((0.0, 1.0))
            continue
        levels.append(None)
        column = cells[:, place]
        scales.append(moments(column[np.isfinite(column)]))
    mean, scale = zip(*scales, strict=True)
    return Columns(tuple(kinds), tuple(levels), mean, scale, tuple(map(str, frame.columns)))


def _plain(value: Any) -> Any:
    """A level as JSON knows it."""
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, str | int | float | bool) else str(value)


def _texts(level: Any) -> list[str]:
    """What a level may be written as: 12 also as 12.0, a midnight also as its day.

    >>> _texts(12.0), _texts(True), _texts("7")
    (['12.0', '12'], ['True'], ['7'])
    """
    level = level.item() if isinstance(level, np.generic) else level
    texts = [str(level)]
    if isinstance(level, float) and level.is_integer():
        texts.append(str(int(level)))
    elif isinstance(level, datetime):
        texts.append(level.isoformat())
        texts += [level.date().isoformat()] if level.time() == time(0) else []
    return texts


def _codes(column: Any, columns: Columns, place: int, fitting: bool) -> np.ndarray:
    levels = columns.levels[place]
    assert levels is not None
    # A file of numbers alone, or of dates alone, has other types than one with a word among them: levels are the same where their texts are.
    texts = {text: code for code, level in enumerate(levels) for text in _texts(level)}
    known = {(type(level) is bool, level): code for code, level in enumerate(levels)}
    missing = column.isna().to_numpy()
    values = [None if gone else value for value, gone in zip(column.tolist(), missing, strict=True)]
    seen: dict[Any, float] = {}
    for value in values:
        key = (type(value), value)
        if value is not None and key not in seen:
            plain = _plain(value)
            codes_ = (texts[text] for text in _texts(value) if text in texts)
            seen[key] = known.get((type(plain) is bool, plain), next(codes_, np.nan))
    codes = np.array([np.nan if value is None else seen[type(value), value] for value in values], dtype=np.float64)
    foreign = np.isnan(codes) & ~missing
    if foreign.any() and not fitting:
        strange = sorted({str(values[row]) for row in np.flatnonzero(foreign)})
        warnings.warn(
            f"column {columns.names[place]!r} holds levels that are not among the {len(levels)} known ones ({', '.join(strange[:5])}); they count as missing",
            stacklevel=6,
        )
    return codes

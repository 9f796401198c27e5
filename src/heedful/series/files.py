"""Files of series: NumPy's .npz, the .ts of the UEA and UCR archives, and the data sets that PyPI packages carry."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from heedful._errors import InvalidArgument, MissingExtra, Unsupported
from heedful._text import quantity
from heedful.bridges.npz import read_npz

Split = Literal["train", "test"]


@dataclass(frozen=True, eq=False)
class SeriesData:
    """Series of a file and, where it has them, their labels.

    `X` is an array (cases, channels, time) or (cases, time), or a list of arrays (channels, time) of unequal lengths.
    """

    X: np.ndarray | list[np.ndarray]
    y: np.ndarray | None
    name: str

    def __len__(self) -> int:
        return len(self.X)

    def __repr__(self) -> str:
        first = self.X[0]
        lengths = sorted({case.shape[-1] for case in self.X}) if isinstance(self.X, list) else [first.shape[-1]]
        steps = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
        channels = first.shape[0] if first.ndim == 2 else 1
        classes = "" if self.y is None else f", {quantity(len(np.unique(self.y)), 'class', 'classes')}"
        if self.y is not None and estimator_for(self.y) == "SeriesRegressor":
            classes = ", numbers to predict"
        unit = "step" if lengths == [1] else "steps"
        return f"{self.name}: {len(self)} series of {quantity(channels, 'channel')}, {steps} {unit}{classes}"


def read(file: str | Path, split: Split = "train") -> SeriesData:
    """Reads a .npz with `X_train`, `y_train` (or `X_test`, `y_test`, by `split`; or `X`, `y`), or a .ts file.

    X is numbers, (cases, channels, time) or (cases, time); steps behind the end of a shorter series are NaN in all
    channels. y is labels, one per case; it may be left out. Object arrays, which are pickles, are not read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/waves.npz", X=np.zeros((5, 2, 30)), y=list("abbab"))
    ...     read(f"{folder}/waves.npz")
    waves: 5 series of 2 channels, 30 steps, 2 classes
    """
    file = Path(file).expanduser()
    if not file.is_file():
        raise InvalidArgument(f"there is no file {file}")
    if file.suffix == ".npz":
        return _read_npz(file, split)
    if file.suffix == ".ts":
        return _read_ts(file)
    raise InvalidArgument(f"{file} is neither .npz nor .ts; save X and y by numpy.savez('series.npz', X=X, y=y)")


def archive(name: str) -> tuple[SeriesData, SeriesData]:
    """A data set of the UEA or UCR archive that an installed aeon or sktime carries: its training and its test part.

    The packages are not imported; their files are read. Both carry JapaneseVowels and BasicMotions.
    """
    folders = [folder / "datasets" / "data" for folder in _packages()]
    if not folders:
        raise MissingExtra("sktime", "archive")
    for folder in folders:
        files = [folder / name / f"{name}_{split}.ts" for split in ("TRAIN", "TEST")]
        if all(file.is_file() for file in files):
            train, test = map(_read_ts, files)
            return train, test
    known = sorted({file.parent.name for folder in folders for file in folder.glob("*/*_TRAIN.ts")})
    raise InvalidArgument(f"no data set {name!r} in the packages installed here; they carry {', '.join(known)}")


def _packages() -> Iterator[Path]:
    for package in ("aeon", "sktime"):
        spec = find_spec(package)
        yield from (Path(place) for place in (spec and spec.submodule_search_locations) or ())


def _read_npz(file: Path, split: Split) -> SeriesData:
    (called, X), (labels, y) = read_npz(file, split).values()
    assert X is not None
    if X.ndim not in (2, 3) or 0 in X.shape or X.dtype.kind not in "biuf":
        raise InvalidArgument(
            f"{called} in {file} must be numbers of shape (cases, channels, time) or (cases, time); "
            f"got {X.dtype} of shape {X.shape}"
        )
    if y is not None:
        y = _labels(f"{labels} in {file}", y, len(X))
    return SeriesData(X, y, file.stem)


def _labels(name: str, y: np.ndarray, cases: int) -> np.ndarray:
    if y.shape != (cases,):
        raise InvalidArgument(f"{name} must hold one label for each of the {cases} series; got shape {y.shape}")
    if y.dtype.kind not in "biufUS":
        raise InvalidArgument(f"{name} must be numbers or strings; got {y.dtype}")
    if y.dtype.kind == "f" and np.isnan(y).any():
        raise InvalidArgument(f"{name} is NaN at case {int(np.isnan(y).argmax())}; every series needs a label")
    return y.astype(str) if y.dtype.kind == "S" else y


def _read_ts(file: Path) -> SeriesData:
    header: dict[str, str] = {}
    cases, labels = [], []
    with file.open(encoding="utf-8", errors="replace") as lines:
        inside = False
        for number, line in enumerate(lines, 1):
            line = line.strip()
            if not line or line[0] in "#%":
                continue
            if inside:
                case, label = _read_case(line, f"{file}, line {number}", header)
                cases.append(case)
                labels.append(label)
            elif line.lower() == "@data":
                inside = True
                _check_header(file, header)
            elif line[0] == "@":
                word, _, rest = line[1:].partition(" ")
                header[word.lower()] = rest.strip()
            else:
                raise InvalidArgument(f"{file}, line {number}: expected a line @name value or @data; got {line!r:.60}")
    if not cases:
        raise InvalidArgument(f"{file} holds no series: there is {'nothing behind' if inside else 'no line'} @data")
    if len({len(case) for case in cases}) > 1:
        raise InvalidArgument(f"{file}: its series differ in their number of channels")
    equal = len({case.shape for case in cases}) == 1
    y = np.array(labels) if _labelled(header) else None
    if y is not None and header.get("targetlabel", "false").lower().startswith("true"):
        y = _targets(file, y)
    return SeriesData(np.stack(cases) if equal else cases, y, file.stem)


def _labelled(header: dict[str, str]) -> bool:
    return any(header.get(name, "false").lower().startswith("true") for name in ("classlabel", "targetlabel"))


def _targets(file: Path, labels: np.ndarray) -> np.ndarray:
    """Numbers to predict, of a file with @targetLabel."""
    try:
        return labels.astype(np.float64)
    except ValueError as error:
        raise InvalidArgument(f"{file} has @targetLabel, numbers to predict, and not all are: {error}") from None


def _check_header(file: Path, header: dict[str, str]) -> None:
    if header.get("timestamps", "false").lower() == "true":
        raise Unsupported(f"{file} has time stamps, which are not read; write values alone, at equal distances")


def _read_case(line: str, place: str, header: dict[str, str]) -> tuple[np.ndarray, str]:
    *parts, last = line.split(":")
    label = last.strip() if _labelled(header) else ""
    channels = parts if _labelled(header) else [*parts, last]
    wanted = header.get("dimensions") or header.get("dimension")
    if not channels or (wanted is not None and wanted != str(len(channels))):
        raise InvalidArgument(
            f"{place}: expected {wanted or 'one or more'} channels with : behind each; got {len(channels)}"
        )
    try:
        values = [[np.nan if word.strip() == "?" else float(word) for word in part.split(",")] for part in channels]
    except ValueError as error:
        raise InvalidArgument(f"{place}: {error}") from None
    case: Any = np.full((len(values), max(map(len, values))), np.nan)
    for row, part in zip(case, values, strict=True):
        row[: len(part)] = part
    return case, label


def estimator_for(y: Any, X: Any = None, options: Collection[str] = ()) -> str:
    """The estimator that predicts what y holds: numbers with fractions are numbers, all else are classes.

    >>> estimator_for(np.array([1, 2, 2])), estimator_for(np.array([0.5, 1.5]))
    ('SeriesClassifier', 'SeriesRegressor')
    """
    y = np.asarray(y)
    if y.dtype.kind != "f" or not (y != np.round(y)).any():
        return "SeriesClassifier"
    foreign = sorted(set(options) - {"kernel", "segments", "features", "device", "random_state"})
    if foreign:
        raise InvalidArgument(
            f"y holds numbers with fractions, for SeriesRegressor, which has no {', '.join(foreign)}; leave that out, or give classes"
        )
    return "SeriesRegressor"

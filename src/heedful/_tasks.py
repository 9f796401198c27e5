"""The fit registry: what `heedful fit`, `predict` and `score` read, and where the estimators live that folders name."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from heedful._errors import InvalidArgument


@dataclass(frozen=True)
class Task:
    """One kind of data: its package, the endings of its files, its `read(file, split)`, its estimators, the first by default.

    `endings` maps each to names by which a file of this kind is known among others with that ending: columns of a table, arrays of a .npz. `holds` says what its files hold, for the help of the command line. What `read` gives has `X`, `y` (None where the file has no labels), a length, the number of
    cases, and a `repr` that says what it is. What is to be predicted is in X itself where a task is not `labelled`. `chooser` names a function of the package that says, for y, X and the
    names of options that were given, which of the estimators fits them; those of `offers` are offered where no estimator is named, by default the first one's.
    """

    name: str
    endings: Mapping[str, tuple[str, ...]]
    reader: str
    estimators: tuple[str, ...]
    holds: str
    labelled: bool = True
    chooser: str | None = None
    offers: tuple[str, ...] = ()

    @property
    def package(self) -> Any:
        return import_module(f"heedful.{self.name}")

    @property
    def read(self) -> Callable[..., Any]:
        return getattr(self.package, self.reader)

    def estimator(self, name: str | None = None) -> type[Any]:
        """The class of an estimator by its name."""
        if name is not None and name not in self.estimators:
            raise InvalidArgument(f"estimator must be one of {', '.join(self.estimators)}; got {name!r}")
        return getattr(self.package, name or self.estimators[0])

    def fitting(self, y: Any, X: Any = None, options: Collection[str] = ()) -> str:
        """The name of the estimator that predicts what y holds and takes these options."""
        return self.estimators[0] if self.chooser is None else getattr(self.package, self.chooser)(y, X, options)


TASKS = {
    task.name: task
    for task in (
        Task("series", {".npz": ("X",), ".ts": ()}, "read", ("SeriesClassifier", "SeriesRegressor"), ".npz with X and y, or X_train and y_train, X_test and y_test; or .ts", chooser="estimator_for"),
        Task("geometry", {".npz": ("X",), ".csv": ("case",), ".parquet": ("case",)}, "read", ("EquivariantRegressor", "EquivariantClassifier"), ".npz with X, y and lengths, --task geometry; or .csv and .parquet with a row for each point, columns case and target"),
        Task("events", {".csv": ("sequence", "time"), ".parquet": ("sequence", "time"), ".npz": ("times", "offsets")}, "read", ("NextEvent",), ".csv and .parquet with a row for each event, columns sequence, time and type, or others that --sequence, --time-column and --type name; or .npz with times, offsets and types", labelled=False),
        Task("tables", {".csv": (), ".parquet": (), ".npz": ("X",)}, "read", ("DatapointClassifier", "DatapointRegressor", "InContextClassifier", "InContextRegressor", "TransportClassifier"), ".csv and .parquet with a row for each case, --target names the column to predict; or .npz with X and y, --task tables", chooser="estimator_for", offers=("InContextClassifier", "DatapointClassifier")),
    )
}  # fmt: skip

HOMES = {name: f"heedful.{task.name}" for task in TASKS.values() for name in task.estimators}


def task_of(file: Path, task: str | None = None) -> Task:
    """What a file holds, as it was said, or by its ending and, of several kinds with one ending, by the names in it."""
    if task is not None and task not in TASKS:
        raise InvalidArgument(f"task must be one of {', '.join(TASKS)}; got {task!r}")
    fitting = [kind for kind in TASKS.values() if file.suffix in kind.endings]
    if task is None and not fitting:
        endings = "; ".join(f"{name}: {', '.join(kind.endings)}" for name, kind in TASKS.items())
        raise InvalidArgument(f"cannot tell from its ending what {file} holds; files that are read: {endings}")
    if task is not None or len(fitting) == 1:
        return fitting[0] if task is None else TASKS[task]
    names = _names(file.expanduser())
    for kind in fitting:
        if names is None or all(
            any(f"{key}{end}" in names for end in ("", "_train", "_test")) for key in kind.endings[file.suffix]
        ):
            return kind
    wanted = "; ".join(f"{kind.name}: {', '.join(kind.endings[file.suffix])}" for kind in fitting)
    raise InvalidArgument(
        f"cannot tell what {file} holds: it has {', '.join(names[:8]) if names else 'nothing'}. Known by their names are {wanted}; "
        "or give task=..., and the names of its columns"
    )


def _names(file: Path) -> list[str] | None:
    """Columns of a table or arrays of a .npz, as far as they can be had without reading it; None where not."""
    try:
        if file.suffix == ".csv":
            with file.open(newline="", encoding="utf-8-sig") as lines:
                return next(csv.reader(lines), [])
        if file.suffix == ".npz":
            with zipfile.ZipFile(file) as held:
                return [name.removesuffix(".npy") for name in held.namelist()]
        parquet = import_module("pyarrow.parquet")
        return list(parquet.read_schema(file).names)
    except UnicodeDecodeError:
        raise InvalidArgument(f"{file} is not text in UTF-8; convert it first") from None
    except (OSError, ValueError, ImportError, csv.Error, zipfile.BadZipFile):
        return None

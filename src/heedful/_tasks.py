"""The fit registry: what `heedful fit`, `predict` and `score` read, and where the estimators live that folders name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from heedful._errors import InvalidArgument


@dataclass(frozen=True)
class Task:
    """One kind of data: its package, the endings of its files, its `read(file, split)`, its estimators, the first by default.

    `holds` says what its files hold, for the help of the command line. What `read` gives has `X`, `y` (None where the file has no labels), a length, the number of
    cases, and a `repr` that says what it is.
    """

    name: str
    endings: tuple[str, ...]
    reader: str
    estimators: tuple[str, ...]
    holds: str

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


TASKS = {
    task.name: task
    for task in (
        Task("series", (".npz", ".ts"), "read", ("SeriesClassifier",), ".npz with X and y, or X_train and y_train, X_test and y_test; or .ts"),
        Task("geometry", (".npz", ".csv", ".parquet"), "read", ("EquivariantRegressor", "EquivariantClassifier"), ".npz with X, y and lengths, --task geometry; or .csv and .parquet with a row for each point, columns case and target"),
    )
}  # fmt: skip

HOMES = {name: f"heedful.{task.name}" for task in TASKS.values() for name in task.estimators}


def task_of(file: Path, task: str | None = None) -> Task:
    """What a file holds, as it was said or by its ending."""
    if task is not None and task not in TASKS:
        raise InvalidArgument(f"task must be one of {', '.join(TASKS)}; got {task!r}")
    fitting = [kind for kind in TASKS.values() if file.suffix in kind.endings]
    if task is None and not fitting:
        endings = "; ".join(f"{name}: {', '.join(kind.endings)}" for name, kind in TASKS.items())
        raise InvalidArgument(f"cannot tell from its ending what {file} holds; files that are read: {endings}")
    return fitting[0] if task is None else TASKS[task]

"""What `heedful fit`, `predict`, `score` and `impute` ask for alike, and how they read cases from a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful._errors import InvalidArgument
from heedful._tasks import TASKS

if TYPE_CHECKING:
    from heedful._tasks import Task

TaskName = Annotated[
    str | None,
    typer.Option(help=f"What the file holds: {', '.join(TASKS)}.", show_default="by its ending and the names in it"),
]


def check_file(file: Path) -> None:
    if file.expanduser().is_dir():
        raise InvalidArgument(f"{file} is a folder; give a file")
    if not file.expanduser().is_file():
        raise InvalidArgument(f"there is no file {file}")


def read(kind: Task, file: Path, split: str, target: str | None, every: bool = False) -> Any:
    """What a file holds; of a table whose target has a name that column is y. With `every`, also rows in which it is missing."""
    data = kind.read(file, split)
    if hasattr(data, "__len__") and not len(data):
        raise InvalidArgument(f"{file} has no rows; give one case or more")
    return data.labelled_by(target, every=every) if hasattr(data, "labelled_by") else data


def labelled(kind: Task, file: Path, split: str, target: str | None = None) -> Any:
    data = read(kind, file, split, target)
    if data.y is not None or not kind.labelled:
        return data
    if not hasattr(data, "labelled_by") or not hasattr(data.X, "columns"):
        raise InvalidArgument(f"{file} holds no labels; add y, one for each case")
    if split == "test":
        raise InvalidArgument(f"{file} has no column {target}, with the answers; add it, or call heedful predict")
    names = ", ".join(map(str, data.X.columns[:8]))
    wrong = "--target is missing" if target is None else f"target={target!r} is no column of {file}"
    others = "; ".join(
        f"{one.name}: {', '.join(one.endings[file.suffix])}" for one in TASKS.values() if one.endings.get(file.suffix)
    )
    raise InvalidArgument(
        f"{wrong}; name the column to predict, one of {names}. Files of other kinds are known by columns ({others}), or by --task"
    )

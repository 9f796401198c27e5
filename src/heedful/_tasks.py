"""What `heedful fit` and `predict` read, and where the estimators live that folders name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One kind of data: the module that has `read(file, split)` and the estimators, and the endings of its files."""

    room: str
    endings: tuple[str, ...]
    estimators: tuple[str, ...]


TASKS = {"series": Task("heedful.series", (".npz", ".ts"), ("SeriesClassifier",))}

HOMES = {name: task.room for task in TASKS.values() for name in task.estimators}

"""How long work says how far it is: one callback, one bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# How much is done, how much there is, and what is under way.
Progress = Callable[[int, int, str], None]


def silent(done: int, total: int, what: str = "") -> None:
    """Progress that nobody sees."""


@contextmanager
def bar(*, wanted: bool = True, stays: bool = False) -> Iterator[Progress]:
    """A bar on standard error, moved by `progress(done, total, what)`.

    Args:
        wanted: without it nothing is shown.
        stays: the bar stays when the work is done, and its last line is written where no terminal is; without it, it is
            shown at a terminal alone, and gone afterwards.
    """
    if not wanted or not (stays or sys.stderr.isatty()):
        yield silent
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=not stays) as shown:
        task = shown.add_task("loading", total=None)

        def move(done: int, total: int, what: str = "") -> None:
            # A step that cannot tell how far it is has a bar that only moves; update() takes no total for no change.
            shown.tasks[0].total = total if total > 1 else None
            shown.update(task, completed=done, description=what)

        yield move

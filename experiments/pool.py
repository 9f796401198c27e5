"""Parts of a recipe in processes beside one another, each with a file of its own: a part that has its file is not run again."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any


def processes() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def workers(count: int) -> ProcessPoolExecutor:
    """Fresh processes: a CUDA context does not survive a fork."""
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def budget() -> float:
    """Seconds after which no further part is started; `HEEDFUL_BUDGET_S` sets them."""
    return float(os.environ.get("HEEDFUL_BUDGET_S", "inf"))


def run_parts(
    function: Callable[..., Any],
    parts: Mapping[str, tuple[Any, ...]],
    folder: Path,
    *,
    jobs: int,
    say: Callable[[str], None],
    seconds: float = float("inf"),
) -> dict[str, Any]:
    """`function(*arguments)` by the name of its part, for all that are finished; results are JSON.

    After `seconds` no further part is started. A part that fails does not stop the others; its error is raised at the end. With
    one job all runs in this process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + seconds
    left = [name for name in parts if not _file(folder, name).is_file()]
    say(f"{len(parts) - len(left)} of {len(parts)} parts are there; {jobs} at a time")
    faults: list[BaseException] = []

    def end(name: str, result: Callable[[], str]) -> None:
        try:
            say(f"{name}: {result()}")
        except Exception as fault:
            say(f"{name}: {type(fault).__name__}: {fault}")
            faults.append(fault)

    if jobs == 1:
        while left and time.monotonic() < until:
            name = left.pop(0)
            end(name, lambda name=name: _run(function, parts[name], _file(folder, name)))  # type: ignore[misc]
    elif left:
        running: dict[Future[str], str] = {}
        with workers(min(jobs, len(left))) as pool:
            while running or (left and time.monotonic() < until):
                while left and len(running) < jobs and time.monotonic() < until:
                    name = left.pop(0)
                    running[pool.submit(_beside, function, parts[name], _file(folder, name))] = name
                for one in wait(running, return_when=FIRST_COMPLETED).done:
                    end(running.pop(one), one.result)
    if faults:
        raise faults[0]
    return {name: json.loads(_file(folder, name).read_text()) for name in parts if _file(folder, name).is_file()}


def _beside(function: Callable[..., Any], arguments: tuple[Any, ...], file: Path) -> str:
    # Each of many processes takes one core; a function that needs no torch is spared its import.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    return _run(function, arguments, file)


def _run(function: Callable[..., Any], arguments: tuple[Any, ...], file: Path) -> str:
    made = json.dumps(function(*arguments))
    part = file.with_suffix(".part")
    part.write_text(made)
    part.replace(file)
    return made if len(made) < 200 else made[:200] + " ..."


def _file(folder: Path, name: str) -> Path:
    return folder / f"{re.sub(r'[^A-Za-z0-9.=+-]+', '-', name)}.json"

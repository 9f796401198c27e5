"""Finished parts of a recipe, each in a file of its own: a part that has its file is not run again, also after a stop."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from heedful._errors import Unsupported
from heedful._files import write


def processes() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def copied(name: str, beside: Path, folder: Path) -> Path:
    """A file in a work folder, copied there from the data folder beside the checkout the first time."""
    file = folder / name
    if not file.is_file():
        if not (beside / name).is_file():
            raise Unsupported(f"there is no {name} in {folder} or {beside}; copy it to one of them")
        folder.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}-{id(file)}")
        shutil.copyfile(beside / name, part)
        part.replace(file)
    return file


def workers(count: int) -> ProcessPoolExecutor:
    """Fresh processes: a CUDA context does not survive a fork."""
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


class Store:
    """Results by the name of their part, JSON in a folder; after `seconds` no further part is begun."""

    def __init__(self, folder: Path, say: Callable[[str], None] = print, seconds: float = math.inf) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.say, self.until = folder, say, time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds in which a part may be begun."""
        return self.until - time.monotonic()

    def file(self, name: str) -> Path:
        return self.folder / f"{re.sub(r'[^A-Za-z0-9.=+-]+', '-', name)}.json"

    def has(self, name: str) -> bool:
        return self.file(name).is_file()

    def read(self, name: str) -> Any:
        return json.loads(self.file(name).read_text())

    def keep(self, name: str, result: Any) -> None:
        text = json.dumps(result)
        write(self.file(name), text)
        self.say(f"{name}: {text if len(text) < 200 else text[:200] + ' ...'}")

    def get(self, name: str, run: Callable[[], Any]) -> Any:
        """A part's result, which is run where it is not there."""
        if not self.has(name):
            self.keep(name, run())
        return self.read(name)

    def run(self, function: Callable[..., Any], parts: Mapping[str, tuple[Any, ...]], jobs: int = 1) -> dict[str, Any]:
        """`function(*arguments)` by the name of its part, for all that are finished; with one job in this process.

        A part that fails does not stop the others; its error is raised at the end.
        """
        left = [name for name in parts if not self.has(name)]
        self.say(f"{len(parts) - len(left)} of {len(parts)} parts are there; {jobs} at a time")
        faults: list[BaseException] = []

        def end(name: str, result: Callable[[], Any]) -> None:
            try:
                self.keep(name, result())
            except Exception as fault:
                self.say(f"{name}: {type(fault).__name__}: {fault}")
                faults.append(fault)

        if jobs == 1:
            while left and self.left > 0:
                name = left.pop(0)
                end(name, lambda name=name: function(*parts[name]))  # type: ignore[misc]
        elif left:
            running: dict[Future[Any], str] = {}
            with workers(min(jobs, len(left))) as pool:
                while running or (left and self.left > 0):
                    while left and len(running) < jobs and self.left > 0:
                        name = left.pop(0)
                        running[pool.submit(_beside, function, parts[name])] = name
                    for one in wait(running, return_when=FIRST_COMPLETED).done:
                        end(running.pop(one), one.result)
        if faults:
            raise faults[0]
        return {name: self.read(name) for name in parts if self.has(name)}


def _beside(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    # Each of many processes takes one core; a function that needs no torch is spared its import.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    return function(*arguments)

"""Timing that cannot flatter: the check comes first, contestants take turns, medians are compared."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import heedful

RESULTS = Path(__file__).parent / "results"


def kernels() -> str:
    """A fingerprint of the fused kernels, so that a page can tell whether its figures are those of the code beside it."""
    room = Path(heedful.__file__).parent / "ops" / "fused"
    files = sorted(file for file in room.glob("*.py") if not file.name.startswith("primal"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


# Calls between two marks of the clock, at most.
MOST_CALLS = 50

# Who needs long takes fewer turns: this many milliseconds in all, but three turns at least.
LONG, FEWEST = 3000.0, 3

Run = Callable[[], Any]


@dataclass(frozen=True)
class Contest:
    """Named ways to do the same thing, each with the float64 truth it must meet before it is timed."""

    name: str
    runs: dict[str, Run]
    truths: dict[str, Run]
    tolerance: float = 1e-4


@dataclass(frozen=True)
class Outcome:
    name: str
    errors: dict[str, float]
    milliseconds: dict[str, float]
    spread: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median over repeats and the quartiles; each repeat is the mean of `calls` calls."""

    median: float
    low: float
    high: float
    repeats: int
    calls: int

    @classmethod
    def of(cls, times: list[float], calls: int) -> Timing:
        low, _, high = statistics.quantiles(times, n=4)
        return cls(statistics.median(times), low, high, len(times), calls)


class WrongResult(Exception):
    """A contestant that computes something else has no speed."""


def check(contest: Contest) -> dict[str, float]:
    """The relative error of every contestant; refuses to go on where one is wrong."""
    errors = {}
    for name, run in contest.runs.items():
        wanted = contest.truths[name]().double()
        error = float((run().detach().double() - wanted).norm() / wanted.norm())
        if not error < contest.tolerance:
            raise WrongResult(f"{contest.name}: {name} has relative error {error:.2e}, allowed {contest.tolerance:.0e}")
        errors[name] = error
    return errors


def measure(contest: Contest, repeats: int) -> Outcome:
    """Median milliseconds over interleaved repeats, with the quartiles."""
    errors = check(contest)
    timings = interleaved(contest.runs, repeats)
    return Outcome(
        contest.name,
        errors,
        {name: one.median for name, one in timings.items()},
        {name: (one.low, one.high) for name, one in timings.items()},
    )


def interleaved(runs: dict[str, Run], repeats: int, device: str = "cpu", least: float = 0.0) -> dict[str, Timing]:
    """Times every run `repeats` times, all of them in turn, after they have been called at least once.

    Each turn has an order of its own, drawn from a fixed seed: what a run leaves in caches and in the allocator makes the next one
    faster or slower (in one fixed order torch's own attention, entered twice, differed from itself by 5 %).

    On a CUDA device the marks are events in the stream, and nobody waits for the device between them: it stays busy while
    the next call is prepared. Where a call takes less than `least` milliseconds, a repeat is the mean of several, and who
    takes very long has fewer turns.
    """
    once = {name: _once(run, device) if least else 0.0 for name, run in runs.items()}
    calls = {name: max(1, min(MOST_CALLS, math.ceil(least / max(t, 1e-6)))) for name, t in once.items()}
    turns = {name: max(FEWEST, min(repeats, int(LONG / max(t, 1e-6)))) for name, t in once.items()}
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in runs}
    order, draw = list(runs.items()), random.Random(0)
    for turn in range(repeats):
        draw.shuffle(order)
        for name, run in order:
            if turn >= turns[name]:
                continue
            start = _mark(device)
            for _ in range(calls[name]):
                run()
            marks[name].append((start, _mark(device)))
    synchronize(device)
    timings = {}
    for name, pairs in marks.items():
        times = [_between(*pair) / calls[name] for pair in pairs]
        timings[name] = Timing.of(times, calls[name])
    return timings


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _once(run: Run, device: str) -> float:
    """Milliseconds of a call, after one that warms up."""
    run()
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def _mark(device: str) -> Any:
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def write(name: str, outcomes: list[Outcome]) -> Path:
    """The raw figures with what they were measured on."""
    path = RESULTS / f"{name}.json"
    machine = {
        "processor": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "heedful": heedful.__version__,
    }
    path.write_text(json.dumps({"machine": machine, "outcomes": [asdict(o) for o in outcomes]}, indent=1) + "\n")
    return path

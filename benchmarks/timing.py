"""Timing that cannot flatter: the check comes first, contestants take turns, medians are compared."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import heedful

RESULTS = Path(__file__).parent / "results"

Run = Callable[[], torch.Tensor]


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
    taken: dict[str, list[float]] = {name: [] for name in contest.runs}
    for _ in range(repeats):
        for name, run in contest.runs.items():
            start = time.perf_counter()
            run()
            taken[name].append(1e3 * (time.perf_counter() - start))
    spread = {}
    for name, times in taken.items():
        low, _, high = statistics.quantiles(times, n=4)
        spread[name] = (low, high)
    return Outcome(contest.name, errors, {name: statistics.median(t) for name, t in taken.items()}, spread)


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

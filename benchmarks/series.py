"""Time series by convolution features and a ridge on a CUDA device: `python -m benchmarks.series`.

`SeriesClassifier(method="kernel")` is fitted to drawn series. First small sets on the device and on the CPU, with the same seed: series of one length, more
series than features, and channels of unequal lengths with missing values, compared by segments too. Scores for unseen series must agree, also those that the
CPU computes from what the device has learned, and the evidence must sum to them. Then 1,000 and 10,000 series of 1,000 steps are fitted on
the device, with three bars: five minutes, 8 GB, and evidence that sums to the scores to 1e-6. Memory is that which tensors take on the device; on
a CPU, that of the process. The raw figures are printed as JSON and go to `benchmarks/results/series.json` (`series_cpu.json` with `--device cpu`, all of
whose cores are used); the exit code is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bars import Bar
from benchmarks.flow import highest
from benchmarks.gpu import concluded, machine
from benchmarks.timing import RESULTS, WrongResult, synchronize
from heedful.series import SeriesClassifier

SECONDS, MEMORY, GAP = 300.0, 8e9, 1e-6
# Relative, and in shares of unseen series: rounding moves single steps across a bias.
ERROR, OTHERWISE = 3e-3, 1e-2
CLASSES = 4


@dataclass(frozen=True)
class Compared:
    """A set that is small enough for the CPU."""

    name: str
    series: int
    steps: int
    channels: int = 1
    kernel: str = "linear"
    features: int | None = None


@dataclass(frozen=True)
class Setting:
    compared: tuple[Compared, ...] = (
        Compared("one length", 300, 200),
        Compared("more series than features", 2_500, 100, features=420),
        Compared("unequal lengths, missing values, segments compared", 200, 120, 3, "linear+softmax"),
    )
    fitted: tuple[tuple[int, int], ...] = ((1_000, 1_000), (10_000, 1_000))
    unseen: int = 500
    device: str = "cuda"


QUICK = Setting(
    (
        Compared("one length", 41, 37, features=168),
        Compared("more series than features", 211, 23, features=84),
        Compared("unequal lengths, missing values, segments compared", 31, 29, 3, "linear+softmax", 84),
    ),
    ((43, 61),),
    17,
    "cpu",
)


def drawn(count: int, steps: int, channels: int, seed: int) -> tuple[Any, np.ndarray]:
    """Noise whose spectrum is its class; of several channels the first alone, with unequal lengths and a tenth of the values missing."""
    draw = np.random.default_rng(seed)
    X, y = draw.standard_normal((count, channels, steps)), draw.integers(CLASSES, size=count)
    X[:, 0, 1:] += (0.2 * y)[:, None] * X[:, 0, :-1]
    if channels == 1:
        return X, y
    X[draw.random(X.shape) < 0.1] = np.nan
    X[:, :, 0] = 0.0
    return [case[:, : draw.integers(steps // 2, steps + 1)] for case in X], y


def gap(model: SeriesClassifier, X: Any) -> float:
    """The largest difference between a score and the sum of its evidence."""
    return float(np.abs(model.evidence(X).scores - model.decision_function(X)).max())


def compare(case: Compared, setting: Setting) -> dict[str, Any]:
    """Scores of the device beside those of the CPU; refuses to go on where they differ."""
    X, y = drawn(case.series, case.steps, case.channels, 0)
    unseen, answers = drawn(setting.unseen, case.steps, case.channels, 1)
    options: dict[str, Any] = {"method": "kernel", "kernel": case.kernel, "features": case.features, "random_state": 0}
    there = SeriesClassifier(device=setting.device, **options).fit(X, y)
    here = SeriesClassifier(device="cpu", **options).fit(X, y)
    wanted, got = here.decision_function(unseen), there.decision_function(unseen)
    found = {
        **asdict(case),
        "accuracy": {"cpu": _accuracy(wanted, answers), setting.device: _accuracy(got, answers)},
        "error": _error(got, wanted),
        "otherwise": float((got.argmax(1) != wanted.argmax(1)).mean()),
        "gap": gap(there, unseen),
    }
    found["error_taken_along"] = _error(there.set_params(device="cpu").decision_function(unseen), got)
    for name, bound in (("error", ERROR), ("otherwise", OTHERWISE), ("error_taken_along", ERROR), ("gap", GAP)):
        if not found[name] <= bound:
            raise WrongResult(f"{case.name}: {name} is {found[name]:.1e}, allowed {bound:.0e}")
    return found


def _accuracy(scores: np.ndarray, answers: np.ndarray) -> float:
    return float((scores.argmax(1) == answers).mean())


def _error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def fit(count: int, steps: int, setting: Setting) -> dict[str, Any]:
    """Seconds of `fit`, `predict` and `evidence`, and the most memory."""
    X, y = drawn(count, steps, 1, 0)
    unseen, answers = drawn(setting.unseen, steps, 1, 1)
    model = SeriesClassifier(method="kernel", device=setting.device, random_state=0)
    if setting.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = {"fit": _seconds(lambda: model.fit(X, y), setting.device)}
    memory = torch.cuda.max_memory_allocated() if setting.device == "cuda" else highest()
    seconds |= {
        name: _seconds(lambda run=run: run(unseen), setting.device)
        for name, run in (("predict", model.predict), ("evidence", model.evidence))
    }
    return {
        "series": count,
        "steps": steps,
        "seconds": seconds,
        "memory": memory,
        "loo_accuracy": model.loo_score_,
        "accuracy": float(model.score(unseen, answers)),
        "gap": gap(model, unseen),
    }


def _seconds(run: Callable[[], Any], device: str) -> float:
    synchronize(device)
    begun = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - begun


def bars(found: dict[str, Any]) -> list[Bar]:
    made = []
    for row in found["fitted"]:
        name = f"{row['series']:,} series of {row['steps']:,} steps"
        made.append(Bar(name, "seconds to fit", SECONDS, at_least=False, value=row["seconds"]["fit"]))
        made.append(Bar(name, "bytes to fit", MEMORY, at_least=False, value=row["memory"]))
        made.append(Bar(name, "evidence less score", GAP, at_least=False, value=row["gap"]))
    return made


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.series", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where the large sets are fitted")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes on the CPU that try the driver and judge nothing"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the raw figures go")
    asked = parser.parse_args(given)
    if asked.device == "cuda" and not (asked.quick or torch.cuda.is_available()):
        print("there is no CUDA device here; --quick tries the driver, --device cpu measures the CPU", file=sys.stderr)
        return 2
    setting = QUICK if asked.quick else Setting(device=asked.device)
    result: dict[str, Any] = {"machine": machine(setting.device), "threads": torch.get_num_threads()}
    result["compared"] = [compare(case, setting) for case in setting.compared]
    result["fitted"] = [fit(*size, setting) for size in setting.fitted]
    judged = [] if asked.quick else bars(result)
    name = "series.json" if setting.device == "cuda" else "series_cpu.json"
    return concluded(result, judged, None if asked.quick else asked.out / name)


if __name__ == "__main__":
    sys.exit(main())

"""The GPU benchmark: `python -m benchmarks.gpu`, or `make bench-gpu`.

First every variant of ours is compared with float64, then everybody is timed, and who computed something else has no speed. The
raw figures go to `gpu.json`, the bars are printed last, and the exit code is 1 where one of them is missed or has no figure.
Parts that hold bars come first; the others are skipped, and say so, once `--seconds` have passed. A run that is not the whole
one (`--quick`, `--only`, `--device cpu`) writes `gpu-partial.json` instead, from which no page is made.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import heedful
from benchmarks import accuracy, bars
from benchmarks.contest import hold
from benchmarks.contestants import FIELDS, SWEEP, Setting
from benchmarks.timing import RESULTS, kernels

# Compiling takes most of the time of a sweep: after this part of the time its compiled peers are left out.
PATIENCE = 0.75


@dataclass(frozen=True)
class Part:
    name: str
    holds_bars: bool
    run: Callable[[], None]


class Driver:
    """A run: what was found so far, and how much time is left."""

    def __init__(self, device: str, *, quick: bool, seconds: float, file: Path) -> None:
        self.device, self.quick, self.seconds, self.file = device, quick, seconds, file
        self.started = time.monotonic()
        self.repeats = 5 if quick else 21
        self.length = 1024 if device == "cuda" else 64
        self.checked: set[tuple[str, str]] = set()
        self.ahead: dict[tuple[str, str], list[dict]] = {}
        self.result: dict[str, Any] = {
            "machine": machine(device),
            "settings": {"quick": quick, "repeats": self.repeats, "seconds": seconds},
            "parts": [],
            "accuracy": [],
            "contests": [],
        }

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def say(self, line: str) -> None:
        print(f"[{self.elapsed:6.1f} s] {line}", file=sys.stderr, flush=True)

    def parts(self) -> list[Part]:
        """All that can be run, in order: bars first."""
        settings = [*bars.BARS, bars.CAUSAL, *bars.LINEAR]
        sweep = SWEEP
        if self.device != "cuda":
            settings, sweep = ([replace(s, device=self.device) for s in small(one)] for one in (settings, sweep))
        elif self.quick:
            settings, sweep = settings[:2], sweep[2:3]
        more = [Part(f"accuracy {dtype}", dtype != "float16", lambda d=dtype: self.check_all(d)) for dtype in BY_NEED]
        return [
            *(Part(s.name, True, lambda s=s: self.hold(s)) for s in settings),
            *more,
            *(Part(s.name, False, lambda s=s: self.hold(s)) for s in sweep),
        ]

    def check_ahead(self) -> None:
        """Every check at once, in many processes: most of the time of one goes into compiling. Nothing is timed meanwhile."""
        asked = [
            (variant, dtype, self.device, self.length, case)
            for dtype in BY_NEED
            for variant in accuracy.VARIANTS
            for case in range(len(accuracy.CASES))
        ]
        self.say(f"{len(asked)} checks against float64")
        with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 2)) as pool:
            for one, rows in zip(asked, pool.starmap(accuracy.check_one, asked, chunksize=1), strict=True):
                self.ahead.setdefault(one[:2], []).extend(rows)

    def run(self, pattern: str | None) -> None:
        for part in self.parts():
            if pattern and not re.search(pattern, part.name):
                continue
            told: dict[str, Any] = {"name": part.name}
            if not part.holds_bars and self.elapsed > self.seconds:
                told["skipped"] = f"over the time of {self.seconds:g} s"
                self.say(f"{part.name}: {told['skipped']}")
            else:
                self.say(part.name)
                before = self.elapsed
                try:
                    part.run()
                except Exception as fault:
                    told["skipped"] = accuracy.first_line(fault)
                    self.say(f"{part.name}: {told['skipped']}")
                told["seconds"] = round(self.elapsed - before, 1)
            self.result["parts"].append(told)
            self.save()

    def save(self) -> None:
        """After each part: a run that is cut short leaves what it has."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.result, indent=1, allow_nan=False) + "\n")

    def check(self, variant: str, dtype: str) -> None:
        """Compares a variant with float64, once."""
        if (variant, dtype) in self.checked:
            return
        self.checked.add((variant, dtype))
        rows = self.ahead.get((variant, dtype))
        if rows is None:
            rows = accuracy.check(accuracy.VARIANTS[variant], dtype, self.device, self.length)
        self.result["accuracy"] += rows
        for names in (("out",), ("dq", "dk", "dv")):
            found = bars.worst(self.result, variant, dtype, names)
            if found:
                self.say(f"  {variant} {dtype}: largest error of {', '.join(names)} {found[0]:.1e} ({found[1]})")
        for row in rows:
            if row["verdict"] != "met":
                self.say(f"  {variant} {dtype}, {row['case']}: {row['verdict']} {row.get('reason', '')}".rstrip())

    def check_all(self, dtype: str) -> None:
        for variant in accuracy.VARIANTS:
            if variant in bars.TIMED or self.elapsed < self.seconds:
                self.check(variant, dtype)

    def hold(self, setting: Setting) -> None:
        def gate(variant: str, names: tuple[str, ...]) -> str | None:
            self.check(variant, setting.dtype)
            return accuracy.refusal(self.result["accuracy"], variant, setting.dtype, names)

        field = FIELDS[setting.role]
        if setting.role == "sweep" and self.elapsed > PATIENCE * self.seconds:
            field = [one for one in field if not one.is_compiled]
            self.say("  compiled peers left out: little time remains")
        least = 2.0 if self.device == "cuda" else 0.0
        contest = hold(setting, field, gate, self.repeats, self.say, least)
        self.result["contests"].append(contest)
        for row in contest["rows"]:
            times = {d: row[d]["median"] for d in ("forward", "backward", "forward+backward") if d in row}
            self.say(f"  {row['contestant']}: " + ", ".join(f"{d} {t:.3f} ms" for d, t in times.items()))


# The dtype that is timed is checked before its contests; these follow.
BY_NEED = ("bfloat16", "float32", "float16")


def small(settings: list[Setting]) -> list[Setting]:
    """The same roles at sizes that any processor can run, one of each."""
    roles = {(s.role, s.is_causal): s for s in reversed(settings)}
    return [replace(s, shape=(1, 2, 64, 16)) for s in settings if s is roles[s.role, s.is_causal]]


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    told: dict[str, Any] = {
        "device": platform.machine(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "heedful": heedful.__version__,
        "kernels": kernels(),
        "date": datetime.date.today().isoformat(),
    }
    try:
        import triton

        told["triton"] = triton.__version__
    except ImportError:
        told["triton"] = None
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        told |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory": properties.total_memory,
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return told


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def prepare(device: str) -> None:
    """Float32 products in float32, and compiled graphs that may be run backward more than once."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    if device != "cuda":
        torch.set_num_threads(1)
        return
    from torch._functorch import config

    config.donated_buffer = False


def report(found: list[bars.Bar]) -> str:
    """One line for each bar, those that fail last."""
    lines = []
    for bar in sorted(found, key=lambda bar: bar.fails):
        value = "" if bar.value is None else f"{bar.value:.3g}"
        sign = ">=" if bar.at_least else "<="
        lines.append(
            f"{bar.verdict:<8} {value:>9} {sign} {bar.bound:<6g} {bar.setting}: {bar.what} {bar.note}".rstrip()
        )
    failed = sum(bar.fails for bar in found)
    return "\n".join([*lines, f"{len(found)} bars: {len(found) - failed} hold, {failed} missed or refused"])


def concluded(result: dict[str, Any], judged: list[bars.Bar], file: Path | None) -> int:
    """Prints a driver's figures and their bars and keeps them, where there is a file for them. Gives the exit code: 1 where a bar fails."""
    result["bars"] = [{**asdict(bar), "verdict": bar.verdict} for bar in judged]
    text = json.dumps(result, indent=1, allow_nan=False)
    print(text)
    if judged:
        print(report(judged))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return int(any(bar.fails for bar in judged))


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--quick", action="store_true", help="fewer repeats and settings")
    parser.add_argument(
        "--only", metavar="PATTERN", help="run only the parts whose name matches this regular expression"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the parts and stop")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the raw figures go")
    parser.add_argument("--seconds", type=float, default=450.0, help="after these, parts without bars are skipped")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a small run that tries the driver"
    )
    parser.add_argument("--page", action="store_true", help="write docs/performance.md from the raw figures and stop")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    asked = arguments(given)
    if asked.page:
        from benchmarks.pages import write_page

        print(f"wrote {write_page()}")
        return 0
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; --device cpu tries the driver at small sizes", file=sys.stderr)
        return 2
    partial = asked.quick or asked.only or asked.device != "cuda"
    file = asked.out / ("gpu-partial.json" if partial else "gpu.json")
    driver = Driver(asked.device, quick=asked.quick, seconds=asked.seconds, file=file)
    if asked.list:
        print("\n".join(part.name for part in driver.parts()))
        return 0
    prepare(asked.device)
    if asked.device == "cuda" and not asked.only:
        driver.check_ahead()
    driver.run(asked.only)
    found = bars.table(driver.result)
    print(report(found))
    print(f"raw figures in {file}")
    return int(any(bar.fails for bar in found))


if __name__ == "__main__":
    sys.exit(main())

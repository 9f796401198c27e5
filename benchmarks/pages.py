"""Writes docs/performance.md and its picture from the raw figures: `python -m benchmarks.pages`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from experiments.recipe import Table

from benchmarks import bars, cpu, overview
from benchmarks.accuracy import BOUNDS
from benchmarks.contestants import SWEEP, Setting
from benchmarks.timing import RESULTS, Outcome, kernels

DOCS = Path(__file__).parent.parent / "docs"
PICTURE = "performance.svg"
BACKWARD = 2.5  # times the arithmetic of forward


def write_page(results: Path = RESULTS, docs: Path = DOCS) -> Path:
    """The page, and the picture where there are figures for it."""
    found = load(results / "launching.json")
    file = docs / "performance.md"
    file.write_text(page(results))
    if found:
        overview.draw(found, docs / PICTURE)
    return file


def load(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text()) if file.exists() else None


def page(results: Path = RESULTS) -> str:
    """The text of docs/performance.md, from `launching.json`, `cpu.json` and `gpu.json`."""
    first, on_cpu, on_gpu = (load(results / f"{name}.json") for name in ("launching", "cpu", "gpu"))
    lines = [
        "# Performance",
        "",
        *([] if first is None else overview.section(first, PICTURE)),
        "## How it was measured",
        "",
        "Written by `python -m benchmarks.pages` from `benchmarks/results/`. `python -m benchmarks.launching` measures the section above,",
        "`make bench` the CPU, `make bench-gpu` the last one; each checks a contestant against float64 before it times it, and a bar that is",
        "missed is marked MISSED.",
        "",
        "## CPU",
        "",
    ]
    if on_cpu is None:
        lines += ["Not measured yet: `make bench` writes `benchmarks/results/cpu.json`.", ""]
    else:
        lines += cpu.section([Outcome(**outcome) for outcome in on_cpu["outcomes"]])
    lines += ["## GPU: portable kernels beside other ways to compute the same", ""]
    if on_gpu is None:
        lines += [
            "Not measured yet. On a machine with a CUDA device `PYTHONPATH=src python -m benchmarks.gpu` writes",
            "`benchmarks/results/gpu.json` in about eight minutes; `python -m benchmarks.pages` then makes this page from it.",
            "",
        ]
    else:
        lines += gpu_section(on_gpu)
    return "\n".join(lines)


def gpu_section(result: dict[str, Any]) -> list[str]:
    return [
        *_machine(result),
        *_cautions(result),
        *_throughput(result),
        *_sweep(result),
        *_linear(result),
        *_memory(result),
        *_errors(result),
        *_bars(result),
        *_left_out(result),
    ]


def _machine(result: dict[str, Any]) -> list[str]:
    machine = result["machine"]
    versions = [
        f"{name} {machine[name]}" for name in ("torch", "triton", "cuda", "cudnn", "driver") if machine.get(name)
    ]
    repeats = result["settings"]["repeats"]
    return [
        f"{machine['device']}, {', '.join(versions)}, {machine['date']}. bfloat16, median of {repeats} interleaved repeats, CUDA events;",
        "forward as in training, backward of a graph that is kept. TFLOP/s count 4 B H n² D forward and 2.5 times that backward, half of",
        "both when causal. `heedful` rows are `attend` with that kernel; `compiled` and `eager` are the plain formula, with and without",
        "`torch.compile`; FlexAttention's Gaussian adds the key's norm to the score. The raw figures hold the quartiles.",
        "",
    ]


def _cautions(result: dict[str, Any]) -> list[str]:
    """What a reader must know before the figures: that the kernels changed since, that parts are missing."""
    told = []
    if result["machine"].get("kernels") != kernels():
        told.append(
            "These are the portable kernels as they were then, before those for Hopper; `make bench-gpu` measures what serves now."
        )
    run = {part["name"] for part in result["parts"] if "skipped" not in part}
    missing = [s.name for s in SWEEP if s.name not in run]
    missing += [f"errors in {dtype}" for dtype in BOUNDS if f"accuracy {dtype}" not in run]
    if missing:
        told.append(f"The run ended before it came to: {', '.join(missing)}.")
    return [f"**{' '.join(told)}**", ""] if told else []


def _throughput(result: dict[str, Any]) -> list[str]:
    contests = [c for c in result["contests"] if c["role"] in ("bar", "causal")]
    if not contests:
        return []
    heads = [_shape(c) for c in contests]
    body = [[name, *(_speeds(_row(c, name), setting_of(c)) for c in contests)] for name in _names(contests)]
    return [
        "### Throughput",
        "",
        "TFLOP/s, forward / backward, by batch x heads x length x head size.",
        "",
        str(Table(["", *heads], body)),
        "",
    ]


def _sweep(result: dict[str, Any]) -> list[str]:
    contests = sweep_of(result)
    if not contests:
        return []
    body = [[_shape(c), *(_speeds(_row(c, name), setting_of(c)) for name in _names(contests))] for c in contests]
    return [
        "### Lengths, called one by one",
        "",
        "TFLOP/s, forward / backward, called one by one. Short sequences wait for the processor that launches the work, whoever computes them.",
        "",
        str(Table(["", *_names(contests)], body)),
        "",
    ]


def _linear(result: dict[str, Any]) -> list[str]:
    contests = [c for c in result["contests"] if c["role"] == "linear"]
    if not contests:
        return []
    directions = ("forward", "backward", "forward+backward")
    body = [
        [_shape(c), row["contestant"], *(_milliseconds(row, d) for d in directions)]
        for c in contests
        for row in c["rows"]
    ]
    return [
        "### Linear attention",
        "",
        "Milliseconds. A feature map is another kernel than softmax: the ratio is what that choice saves.",
        "",
        str(Table(["", "", *directions], body)),
        "",
    ]


def _memory(result: dict[str, Any]) -> list[str]:
    contests = [c for c in result["contests"] if c["role"] in ("bar", "causal", "linear")]
    if not contests:
        return []
    body = [[name, *(_extra(_row(c, name)) for c in contests)] for name in _names(contests)]
    return [
        "### Memory",
        "",
        "Peak beyond inputs, output and gradients, in MB: forward / forward and backward, and the latter relative to them.",
        "",
        str(Table(["", *(_shape(c) for c in contests)], body)),
        "",
    ]


def _errors(result: dict[str, Any]) -> list[str]:
    body = []
    for name in dict.fromkeys(row["variant"] for row in result["accuracy"]):
        for dtype in BOUNDS:
            mine = [row for row in result["accuracy"] if (row["variant"], row["dtype"]) == (name, dtype)]
            if not mine:
                continue
            out, gradients = (bars.worst(result, name, dtype, names) for names in (("out",), ("dq", "dk", "dv")))
            skipped = [row["case"] for row in mine if row["verdict"] == "skipped"]
            body.append([name, dtype, f"{BOUNDS[dtype]:.0e}", _worst(out), _worst(gradients), ", ".join(skipped)])
    if not body:
        return []
    return [
        "### Errors",
        "",
        "The largest relative error against float64 over random and adversarial inputs, and where it was met. A case is skipped where",
        "the implementation does not serve it, or where the dtype cannot hold the true result.",
        "",
        str(Table(["", "dtype", "allowed", "output", "gradients", "skipped"], body)),
        "",
    ]


def _bars(result: dict[str, Any]) -> list[str]:
    body = []
    for bar in bars.table(result):
        bound = f"{'>=' if bar.at_least else '<='} {bar.bound:g}"
        measured = bar.note if bar.value is None else f"{bar.value:.3g}" + (f" ({bar.note})" if bar.note else "")
        body.append([bar.setting, bar.what, measured, bound, bar.verdict])
    return ["### Bars", "", str(Table(["setting", "", "measured", "bar", ""], body)), ""]


def _left_out(result: dict[str, Any]) -> list[str]:
    """Each reason once, with all it holds for."""
    reasons: dict[str, list[str]] = {}
    for contest in result["contests"]:
        for row in contest["rows"]:
            for key, reason in row.items():
                if key.startswith(("skipped", "refused")):
                    aspect = f" {key.partition(' ')[2]}" if " " in key else ""
                    reasons.setdefault(f"{row['contestant']}{aspect}: {reason}", []).append(contest["name"])
    for part in result["parts"]:
        if "skipped" in part:
            reasons.setdefault(part["skipped"], []).append(part["name"])
    if not reasons:
        return []
    return [
        "### Left out",
        "",
        *(f"- {' '.join(why.split())} ({', '.join(where)})" for why, where in reasons.items()),
        "",
    ]


def sweep_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [c for c in result["contests"] if c["role"] == "sweep"]


def setting_of(contest: dict[str, Any]) -> Setting:
    return Setting(contest["role"], tuple(contest["shape"]), contest["is_causal"], contest["dtype"], contest["device"])


def tflops(row: dict[str, Any], setting: Setting, direction: str) -> float | None:
    """TFLOP/s, where there is a time."""
    if direction not in row:
        return None
    work = setting.flops * (BACKWARD if direction == "backward" else 1.0)
    return work / row[direction]["median"] / 1e9


def _names(contests: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["contestant"] for c in contests for row in c["rows"]))


def _row(contest: dict[str, Any], name: str) -> dict[str, Any]:
    return next((row for row in contest["rows"] if row["contestant"] == name), {})


def _shape(contest: dict[str, Any]) -> str:
    return "x".join(map(str, contest["shape"])) + (" causal" if contest["is_causal"] else "")


def _speeds(row: dict[str, Any], setting: Setting) -> str:
    if not row:
        return ""
    cells = []
    for direction in ("forward", "backward"):
        speed = tflops(row, setting, direction)
        cells.append(_absent(row, direction) if speed is None else f"{speed:.0f}" if speed >= 10 else f"{speed:.2g}")
    return cells[0] if cells[0] == cells[1] and not cells[0][0].isdigit() else " / ".join(cells)


def _milliseconds(row: dict[str, Any], direction: str) -> str:
    return f"{row[direction]['median']:.3g}" if direction in row else _absent(row, direction)


def _absent(row: dict[str, Any], direction: str) -> str:
    if "refused" in row or (direction != "forward" and "refused backward" in row):
        return "refused"
    reason = str(row.get("skipped") or row.get(f"skipped {direction}") or "")
    return "no room" if reason.startswith("memory") else "-"


def _extra(row: dict[str, Any]) -> str:
    share = bars.share(row)
    if share is None or "refused" in row:
        return _absent(row, "forward") if row else ""
    extra = row["memory"]["extra"]
    return f"{extra['forward'] / 1e6:.0f} / {extra['forward+backward'] / 1e6:.0f} ({100 * share:.1f} %)"


def _worst(found: tuple[float, str] | None) -> str:
    return "" if found is None else f"{found[0]:.1e} ({found[1]})"


def main(given: list[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__).parse_args(given)
    print(f"wrote {write_page()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

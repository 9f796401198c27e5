"""The first part of docs/performance.md, from `launching.json`: one sentence, one picture, then the figures behind them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from experiments.recipe import Table

from benchmarks.launching import WAYS
from benchmarks.lengths import BARRED, LOW, SPEED, TORCH
from benchmarks.timing import kernels
from heedful.ops.fused.serving import VERSIONS

DIRECTIONS = ("forward", "backward")
LONG = 1024

# Of speed: within it repeats are as far from one another.
CLOSE = 0.01
# What torch's own call took the host in a run that met all bars of single calls without a mask.
EARLIER = {"without": 20.5, "with gradients": 31.0}
# Slower by more than this, torch's own attention is named as the better choice.
SLOWER = 0.05


def section(result: dict[str, Any], picture: str) -> list[str]:
    return [
        _sentence(result),
        "",
        f"![Speed over cuDNN's softmax attention by length]({picture})",
        "",
        f"{_machine(result)} `python -m benchmarks.launching` measures this section and writes `benchmarks/results/launching.json`, from which `python -m benchmarks.pages` makes ratios, tables and picture. "
        "`Gaussian` divides each row by its sum, `Gaussian raw` is `Gaussian(normalize=False)`. Shapes are sequences x heads x tokens x head size.",
        "",
        f"The kernels for Hopper are made for Triton {VERSIONS}, which torch 2.11 to 2.15 bring; with another version portable kernels run in their place, whose figures are at the end of the page. `heedful doctor` and "
        "`attend.plan(...)` tell which.",
        "",
        *([f"**{result['note']}**", ""] if result.get("note") else []),
        *_since(result),
        *_instead(result),
        *_ratios(result),
        *_others(result),
        *_host(result),
        *_steps(result),
        *_bars(result),
    ]


def _since(result: dict[str, Any]) -> list[str]:
    """What changed after the run, by whoever changed it and for the kernels as they were left; else that something did."""
    if result["machine"].get("kernels") == kernels():
        return []
    changed = result.get("changed", {})
    told = changed["what"] if changed.get("kernels") == kernels() else "The fused kernels changed after this run."
    return [f"**{told}**", ""]


def _machine(result: dict[str, Any]) -> str:
    machine = result["machine"]
    setting = result["setting"]
    sizes = f"{setting['tokens']:,} tokens and {setting['heads']} heads a call up to 16,384 tokens, half as many heads beyond"
    return f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}, cuDNN {machine['cudnn']}, {machine['date']}, bfloat16; {sizes}."


def plain(result: dict[str, Any], size: int, causal: bool) -> list[dict[str, Any]]:
    """Rows without a mask of one head size."""
    rows = [row for row in result["lengths"] if not row["mask"] and "forward" in row]
    return [row for row in rows if row["shape"][3] == size and row["causal"] == causal]


def ratios(result: dict[str, Any], name: str, size: int, causal: bool, way: str) -> dict[int, float]:
    """Speed over that of cuDNN, by length."""
    known = [row for row in plain(result, size, causal) if way in row["TFLOP/s"]]
    rows = {(row["contestant"], row["shape"][2]): row["TFLOP/s"][way] for row in known}
    mine = {length: speed for (who, length), speed in rows.items() if who == name}
    return {length: speed / rows[TORCH, length] for length, speed in mine.items() if (TORCH, length) in rows}


def _sentence(result: dict[str, Any]) -> str:
    def spread(names: tuple[str, ...], way: str) -> str:
        found = [
            ratio
            for name in names
            for size in (64, 128)
            for causal in (False, True)
            for length, ratio in ratios(result, name, size, causal, way).items()
            if length in BARRED and length >= LONG
        ]
        return f"{way} at {min(found):.2f} to {max(found):.2f}" if found else ""

    def told(names: tuple[str, ...]) -> str:
        return " and ".join(filter(None, (spread(names, way) for way in DIRECTIONS)))

    compiled = [share for (way, _, who), share in _shares(result).items() if way != "eager" and who in SPEED]
    lines = [
        f"**On an H200 in bfloat16, from {LONG:,} to 32,768 tokens, squared-ReLU and sigmoid attention (bias -5) run {told(('Sigmoid', 'ReluSquared'))} times the speed of cuDNN's softmax attention, "
        f"Gaussian attention, rows divided or not, {told(('Gaussian raw', 'Gaussian'))} times.**",
        "Head sizes are 64 and 128, causal and not; others and masks have a table below. Speeds are of kernels alone.",
    ]
    if low := told((LOW,)):
        lines.append(f"Sigmoid attention with a bias of -10 runs {low} times.")
    if compiled:
        lines.append(f"A compiled training step of GPT-2-small runs at {min(compiled):.2f} to {max(compiled):.2f} times the speed of one with torch's attention.")  # fmt: skip
    if any(bar["value"] is None for bar in result["bars"]):
        lines.append("Some bars have no figure, see below.")
    return " ".join(lines)


def _shares(result: dict[str, Any]) -> dict[tuple[str, int, str], float]:
    """Tokens a second of a training step over those with torch's attention, by way, length and contestant."""
    rates = {(r["way"], r["length"], r["contestant"]): r["tokens/s"] for r in result["step"] if "tokens/s" in r}
    return {
        (way, n, who): rate / rates[way, n, TORCH]
        for (way, n, who), rate in rates.items()
        if who != TORCH and (way, n, TORCH) in rates
    }


def _instead(result: dict[str, Any]) -> list[str]:
    """When torch's own attention is the better choice, by the same figures."""
    softmax = [share for (way, _, who), share in _shares(result).items() if way == "compiled" and who == "Softmax"]
    told = []
    if softmax and min(softmax) < 1 - CLOSE:
        told.append(
            f"A compiled causal model with plain softmax runs at {min(softmax):.2f} to {max(softmax):.2f} of the speed through `attend(kernel=Softmax())`, which keeps numbers that are not finite from reaching queries "
            "that do not see them: call `scaled_dot_product_attention` itself where that does not matter."
        )
    slow = {}
    for size in sorted({row["shape"][3] for row in result["lengths"]} - {64, 128}):
        found = [r for name in SPEED for causal in (False, True) for way in DIRECTIONS for r in ratios(result, name, size, causal, way).values()]  # fmt: skip
        if found and min(found) < 1 - SLOWER:
            slow[size] = f"{min(found):.2f} to {max(found):.2f} at head size {size}"
    if slow:
        told.append(
            f"Head sizes other than 64 and 128 have no kernels for Hopper: the portable ones run at {', '.join(slow.values())}."
        )
    body = []
    for name in (*SPEED, LOW):
        for way in DIRECTIONS:
            for size in (64, 128):
                for causal in (False, True):
                    known = ratios(result, name, size, causal, way)
                    below = {length: ratio for length, ratio in known.items() if ratio < 1 - SLOWER}
                    if below:
                        lengths = "all" if len(below) == len(known) else ", ".join(f"{n:,}" for n in below)
                        least, most = min(below.values()), max(below.values())
                        body.append([name, way, f"{size}{', causal' if causal else ''}", lengths, f"{least:.2f} to {most:.2f}" if len(below) > 1 else f"{least:.2f}"])  # fmt: skip
    if body:
        told.append(
            f"By more than {SLOWER:.0%} cuDNN's softmax attention is the faster one here; take the others for what they compute, not for speed:"
        )
    table = [str(Table(["", "pass", "head size", "tokens", "speed over cuDNN's"], body)), ""] if body else []
    return ["### When to take torch's own", "", "\n\n".join(told), "", *table] if told else []


def _ratios(result: dict[str, Any]) -> list[str]:
    lines = [
        "### By length",
        "",
        "Speed over cuDNN's softmax attention, forward / backward, kernels alone (replayed as CUDA graphs); the first column is cuDNN's own, in TFLOP/s. `Sigmoid` has a bias of -5; with one of -10, "
        "which long sequences ask for, the exact formula serves. For orientation: FlashSigmoid (Ramapuram et al. 2024) reports 1.17 times FlashAttention-2, forward, on an H100; FlashAttention-2 is slower than cuDNN on this chip.",
        "",
    ]
    names = [*SPEED, LOW]
    for size in (64, 128):
        for causal in (False, True):
            theirs = {row["shape"][2]: row for row in plain(result, size, causal) if row["contestant"] == TORCH}
            if not theirs:
                continue
            found = {(name, way): ratios(result, name, size, causal, way) for name in names for way in DIRECTIONS}
            body = []
            for length, row in theirs.items():
                cells = [" / ".join(_cell(found[name, way].get(length)) for way in DIRECTIONS) for name in names]
                speeds = " / ".join(
                    f"{row['TFLOP/s'][way]:.0f}" if way in row["TFLOP/s"] else "-" for way in DIRECTIONS
                )
                body.append(["x".join(map(str, row["shape"])), speeds, *cells])
            lines += [str(Table([f"head size {size}{', causal' if causal else ''}", "cuDNN", *names], body)), ""]
    return lines


def _cell(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _others(result: dict[str, Any]) -> list[str]:
    """Head sizes and masks of their own table."""
    shapes = [
        (tuple(r["shape"]), r["causal"], r["mask"])
        for r in result["lengths"]
        if r["contestant"] == TORCH and (r["mask"] or r["shape"][3] not in (64, 128))
    ]
    names = list(dict.fromkeys(r["contestant"] for r in result["lengths"] if r["contestant"] != LOW))
    rows = {(tuple(r["shape"]), r["causal"], r["mask"], r["contestant"]): r for r in result["lengths"]}
    body = []
    for shape, causal, mask in shapes:
        cells = []
        for name in names:
            row = rows.get((shape, causal, mask, name), {})
            cells.append(" / ".join(f"{row['TFLOP/s'][way]:.0f}" for way in DIRECTIONS) if "forward" in row else "-")
        body.append(
            ["x".join(map(str, shape)) + (", causal" if causal else "") + (f", {mask}" if mask else ""), *cells]
        )
    if not body:
        return []
    return [
        "### Head sizes and masks",
        "",
        "TFLOP/s, forward / backward, of the pairs that are in sight. Torch takes masks as a matrix of all pairs; without one its row is cuDNN's. Padding hides the last quarter of the keys, packed sequences are "
        "two documents, the window reaches 1,024 tokens to each side.",
        "",
        str(Table(["", *names], body)),
        "",
    ]


def _host(result: dict[str, Any]) -> list[str]:
    shape = "x".join(map(str, result["host"][0]["shape"]))
    by = {(row["contestant"], row["causal"], row.get("mask", "")): row for row in result["host"]}
    names = list(dict.fromkeys(name for name, *_ in by))
    situations = list(dict.fromkeys((causal, mask) for _, causal, mask in by))

    def table(masked: bool) -> str:
        mine = [(causal, mask, way) for causal, mask in situations if bool(mask) == masked for way in WAYS]
        heads = [f"{way}{', causal' if causal else ''}{mask and f', {mask}'}" for causal, mask, way in mine]
        return str(
            Table(["", *heads], [[name, *(f"{by[name, c, m][way]:.0f}" for c, m, way in mine)] for name in names])
        )

    lines = [
        "### What a call costs the processor",
        "",
        f"Microseconds until a call returns ({shape}): without gradients, with gradients asked for, and with its backward pass through `torch.autograd.grad`, most of which is torch's engine.",
        "",
        table(masked=False),
        "",
    ]
    if any(mask for _, mask in situations):
        lines += ["The same under a mask that is made once, which torch takes as a matrix:", "", table(masked=True), ""]
    return [*lines, *_layers(result)]


def _layers(result: dict[str, Any]) -> list[str]:
    if not result["layers"]:
        return []
    return [
        "Forward and backward of a layer (16 sequences of 1,024 tokens, width 1,024, 16 heads) with `torch.autograd.grad` for all its parameters, and of linear attention for its inputs:",
        "",
        str(Table(["", "microseconds"], [[row["layer"], f"{row['microseconds']:.0f}"] for row in result["layers"]])),
        "",
    ]


def _steps(result: dict[str, Any]) -> list[str]:
    rows = [row for row in result["step"] if "tokens/s" in row]
    if not rows:
        return []
    rates = {(row["way"], row["length"], row["contestant"]): row["tokens/s"] for row in rows}
    ways = list(dict.fromkeys((row["way"], row["length"]) for row in rows))
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    body = []
    for name in names:
        cells = []
        for way in ways:
            rate, own = rates.get((*way, name)), rates.get((*way, TORCH))
            cells.append("-" if rate is None else f"{rate / 1e3:.0f}" + (f" ({rate / own:.3f})" if own else ""))
        body.append([name, *cells])
    skipped = [f"{r['contestant']} ({r['way']}, {r['length']})" for r in result["step"] if "skipped" in r]
    return [
        "### A training step of GPT-2-small",
        "",
        "Thousands of tokens a second (over those of torch's attention): 12 layers, 12 heads of 64, causal, autocast to bfloat16, AdamW, 16,384 tokens a step.",
        "",
        str(Table(["", *(f"{way}, {length} tokens" for way, length in ways)], body)),
        "",
        *([f"Not run, as no time was left: {', '.join(skipped)}.", ""] if skipped else []),
    ]


def _bars(result: dict[str, Any]) -> list[str]:
    body = [
        [b["setting"], b["what"], f"{b['value']:.3g} {b['note']}".strip() if b["value"] is not None else b["note"], f"{'>=' if b['at_least'] else '<='} {b['bound']:g}", b["verdict"]]
        for b in result["bars"]
    ]  # fmt: skip
    missed = sum(b["verdict"] != "met" for b in result["bars"])
    return [
        "### Bars of this section",
        "",
        f"{len(body) - missed} of {len(body)} are met.",
        "",
        str(Table(["setting", "", "measured", "bar", ""], body)),
        "",
        *_behind(result),
    ]


def _behind(result: dict[str, Any]) -> list[str]:
    """Why bars are missed, each cause with how many."""
    bars, slow = result["bars"], _slow(result)
    told: dict[str, int] = {}
    for bar in bars:
        if bar["verdict"] != "met":
            cause = _cause(bar, bars, slow)
            told[cause] = told.get(cause, 0) + 1
    lines = [f"- in {count}, {cause}" for cause, count in told.items()]
    return ["Why bars are missed:", "", *lines, ""] if lines else []


def _slow(result: dict[str, Any]) -> str | None:
    """In words, that the processor of this run was a slow one, if it was."""
    own = [row for row in result.get("host", []) if row["contestant"] == TORCH and not row.get("mask")]
    times = [row[way] / EARLIER[way] for row in own for way in EARLIER]
    if not times or min(times) < 1.25:
        return None
    before = " and ".join(f"{taken:g} us {way}" for way, taken in EARLIER.items())
    return f"the processor is a slow one: torch's own call without a mask took {min(times):.2f} to {max(times):.2f} times as long as in an earlier run on a machine of the same kind ({before}), which met these bars without a mask."


def _cause(bar: dict[str, Any], bars: list[dict[str, Any]], slow: str | None) -> str:
    """What is known to be behind a bar that is missed."""
    what, setting, value = bar["what"], bar["setting"], bar["value"]
    if value is None:
        return "no figure was taken."
    if abs(value / bar["bound"] - 1) < CLOSE + 1e-9:
        return f"the figure is within {CLOSE:.0%} of the bar, as near as repeats are to one another."
    theirs = re.search(r"torch's own: ([\d.]+)", bar["note"])
    if what.endswith("and backward") and theirs and float(theirs[1]) > bar["bound"]:
        met = {one["setting"] for one in bars if one["what"].endswith("with gradients") and one["verdict"] == "met"}
        alone = " The call that records gradients, without their computation, is within the bar." if setting in met else ""  # fmt: skip
        return f"torch's own attention, through the same engine, is above the bar as well.{alone}"
    if "Gaussian" in setting and what.startswith("forward") and "n = 512" in bar["note"]:
        return "norms of keys are taken as well, of which softmax has none: under causality by warps that share a multiprocessor with those that multiply, else by a launch before, about a tenth of the time at 512 tokens by the bytes; what dividing rows takes beside that is not known."
    if slow and what.endswith((", without", ", with gradients")):
        return slow
    return "no cause is known."


def draw(result: dict[str, Any], file: Path) -> None:
    """Speed over cuDNN's against length: forward and backward, two head sizes. The same figures give the same file."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    ways = [way for way in DIRECTIONS if any(way in row.get("TFLOP/s", {}) for row in result["lengths"])]
    ticks = sorted({row["shape"][2] for size in (64, 128) for row in plain(result, size, False)})  # of all panels
    with plt.rc_context({"svg.hashsalt": "heedful", "svg.fonttype": "none", "font.size": 9}):
        size_of = (10, 3.1 * len(ways) + 0.6)
        figure, panels = plt.subplots(
            len(ways), 2, figsize=size_of, sharex=True, sharey=True, squeeze=False, layout="constrained"
        )
        for way, line in zip(ways, panels, strict=True):
            for size, panel in zip((64, 128), line, strict=True):
                panel.axhline(1.0, color="0.2", linewidth=1)
                for index, name in enumerate(SPEED):
                    for causal in (False, True):
                        points = sorted(ratios(result, name, size, causal, way).items())
                        style = {
                            "color": f"C{index}",
                            "linestyle": "--" if causal else "-",
                            "marker": "o",
                            "markersize": 3,
                        }
                        label = None if causal else name
                        panel.plot([x for x, _ in points], [y for _, y in points], label=label, **style)
                panel.set_xscale("log", base=2)
                panel.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=45)
                panel.set_title(f"{way}, head size {size}")
                panel.set_ylim(bottom=0.4)
                panel.grid(alpha=0.3)
            line[0].set_ylabel("times as fast as cuDNN's softmax")
        for panel in panels[-1]:
            panel.set_xlabel("tokens")
        marks = panels[0][1].get_legend_handles_labels()
        styles = [Line2D([], [], color="0.2", linestyle=style) for style in ("-", "--")]
        panels[0][1].legend(
            [*marks[0], *styles], [*marks[1], "all pairs", "causal"], loc="lower right", frameon=False, ncols=2
        )
        figure.suptitle(f"{result['machine']['device']}, bfloat16: above 1 is faster than cuDNN's softmax attention")
        figure.savefig(file, format="svg", metadata={"Date": None})
        plt.close(figure)

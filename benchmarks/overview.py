"""The first part of docs/performance.md, from `launching.json`: one sentence, one picture, then the figures behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.recipe import Table

from benchmarks.launching import WAYS
from benchmarks.lengths import BARRED, LOW, SPEED, TORCH
from benchmarks.timing import kernels

DIRECTIONS = ("forward", "backward")
LONG = 1024

# What is behind a bar that is missed, by what is measured and a word of the setting.
CAUSES = {
    ("us of host, and backward", ""): "Most of a call with its backward pass is torch's engine: torch's own attention takes longer than the bar as well. The call that records gradients, without them, meets it.",
    ("forward: ", "Gaussian"): "Gaussians read all keys once before, for their norms. By the bytes that is a tenth of the time at 512 tokens, a seventh under causality, and less the longer the sequence.",
    ("backward: ", "Gaussian"): "Gradients of queries are summed in float32 in global memory, which is cleared before and converted behind, and Gaussians read queries or results and their gradients once before. "
    "By the bytes that is a quarter of the time at 512 causal tokens. At head size 128 under causality their loop also spills 9 to 12 registers, none without it (`python -m benchmarks.registers`).",
}  # fmt: skip
CLOSE = 0.01  # of a bar


def section(result: dict[str, Any], picture: str) -> list[str]:
    stale = result["machine"].get("kernels") != kernels()
    return [
        *([_sentence(result), ""]),
        f"![Speed over cuDNN's softmax attention by length]({picture})",
        "",
        f"{_machine(result)} `python -m benchmarks.launching` prints every figure of this section and writes `benchmarks/results/launching.json`. Full lines are without a mask, dashed ones causal.",
        "",
        *([f"**{result['note']}**", ""] if result.get("note") else []),
        *(["**The fused kernels changed after this run.**", ""] if stale else []),
        *_instead(result),
        *_ratios(result),
        *_others(result),
        *_host(result),
        *_steps(result),
        *_bars(result),
    ]


def _machine(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}, cuDNN {machine['cudnn']}, {machine['date']}, bfloat16."


def plain(result: dict[str, Any], size: int, causal: bool) -> list[dict[str, Any]]:
    """Rows without a mask of one head size."""
    rows = [row for row in result["lengths"] if not row["mask"] and "forward" in row]
    return [row for row in rows if row["shape"][3] == size and row["causal"] == causal]


def ratios(result: dict[str, Any], name: str, size: int, causal: bool, way: str) -> dict[int, float]:
    """Speed over that of cuDNN, by length."""
    known = [row for row in plain(result, size, causal) if way in row["TFLOP/s"]]
    rows = {(row["contestant"], row["shape"][2]): row["TFLOP/s"][way] for row in known}
    return {length: speed / rows[TORCH, length] for (who, length), speed in rows.items() if who == name}


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

    def told_of(*names: str) -> str:
        return " and ".join(filter(None, (spread(names, way) for way in DIRECTIONS)))

    steps = {(r["way"], r["length"], r["contestant"]): r["tokens/s"] for r in result["step"] if "tokens/s" in r}
    compiled = [
        rate / steps[way, n, TORCH] for (way, n, who), rate in steps.items() if way == "compiled" and who in SPEED
    ]
    told = f", and a compiled training step of GPT-2-small at {min(compiled):.2f} to {max(compiled):.2f} times the speed of one with torch's attention" if compiled else ""  # fmt: skip
    lacks = "; some of these have no figure, see below" if any(bar["value"] is None for bar in result["bars"]) else ""
    return (
        f"**On a GPU, from {LONG:,} to 32,768 tokens, sigmoid and squared-ReLU attention run {told_of('Sigmoid', 'ReluSquared')} times the speed of cuDNN's softmax attention, "
        f"Gaussian attention {told_of('Gaussian raw', 'Gaussian')} times (head sizes 64 and 128, causal and not{lacks}){told}.**"
    )


def _instead(result: dict[str, Any]) -> list[str]:
    """When torch's own attention is the better choice, by the same figures."""
    short = [
        ratio
        for name in ("Gaussian raw", "Gaussian")
        for size in (64, 128)
        for causal in (False, True)
        for length, ratio in ratios(result, name, size, causal, "forward").items()
        if length < LONG
    ]
    rates = {(r["length"], r["contestant"]): r["tokens/s"] for r in result["step"] if r["way"] == "compiled" and "tokens/s" in r}  # fmt: skip
    softmax = [rate / rates[n, TORCH] for (n, who), rate in rates.items() if who == "Softmax"]
    told = []
    if softmax and min(softmax) < 1 - CLOSE:
        told.append(
            f"A compiled causal model with plain softmax runs at {min(softmax):.2f} to {max(softmax):.2f} of the speed through `attend(kernel=Softmax())`, which keeps numbers that are not finite from reaching queries "
            "that do not see them: call `scaled_dot_product_attention` itself where that does not matter."
        )
    if short:
        told.append(
            f"Below {LONG:,} tokens Gaussian attention runs forward at {min(short):.2f} to {max(short):.2f} times the speed of cuDNN's softmax attention: take it there for what it computes, not for speed."
        )
    sizes = sorted({row["shape"][3] for row in result["lengths"]} - {64, 128})
    slow = {}
    for size in sizes:
        found = [r for name in SPEED for causal in (False, True) for way in DIRECTIONS for r in ratios(result, name, size, causal, way).values()]  # fmt: skip
        if found and min(found) < 1:
            slow[size] = f"{min(found):.2f} to {max(found):.2f} at head size {size}"
    if slow:
        told.append(
            f"Head sizes other than 64 and 128 have no kernels for Hopper: the portable ones run at {', '.join(slow.values())}."
        )
    return ["### When to take torch's own", "", " ".join(told), ""] if told else []


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
    by = {(row["contestant"], row["causal"]): row for row in result["host"]}
    names = list(dict.fromkeys(row["contestant"] for row in result["host"]))
    ways = [(causal, way) for causal in (False, True) for way in WAYS if way in by[TORCH, False]]
    body = [[name, *(f"{by[name, causal][way]:.0f}" for causal, way in ways)] for name in names]
    heads = [f"{way}{', causal' if causal else ''}" for causal, way in ways]
    return [
        "### What a call costs the processor",
        "",
        f"Microseconds until a call returns ({shape}): without gradients, with gradients asked for, and with its backward pass through `torch.autograd.grad`, most of which is torch's engine.",
        "",
        str(Table(["", *heads], body)),
        "",
        *_layers(result),
    ]


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
    missed = [bar for bar in result["bars"] if bar["verdict"] == "MISSED"]
    close = [bar for bar in missed if abs(bar["value"] / bar["bound"] - 1) < CLOSE]
    told = {f"Within {CLOSE:.0%} of the bar, as near as repeats are to one another.": len(close)} if close else {}
    for (what, setting), cause in CAUSES.items():
        count = sum(bar["what"].startswith(what) and setting in bar["setting"] for bar in missed if bar not in close)
        told |= {cause: count} if count else {}
    others = len(missed) - sum(told.values())
    told |= {"Of others no cause is known.": others} if others else {}
    lines = [f"- {count}: {cause}" for cause, count in told.items()]
    return ["Behind those that are missed:", "", *lines, ""] if lines else []


def draw(result: dict[str, Any], file: Path) -> None:
    """Speed over cuDNN's against length: forward and backward, two head sizes. The same figures give the same file."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

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
                panel.set_ylim(bottom=0)
                panel.grid(alpha=0.3)
            line[0].set_ylabel("speed / cuDNN softmax")
        for panel in panels[-1]:
            panel.set_xlabel("tokens")
        panels[0][1].legend(loc="lower right", frameon=False)
        figure.suptitle(f"{result['machine']['device']}, bfloat16: speed over cuDNN's softmax attention")
        figure.savefig(file, format="svg", metadata={"Date": None})
        plt.close(figure)

"""Explaining sets of several methods on the same inputs: how often, how small, how many calls, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.recipe import Block, Table

# An input: by method the size of the set that was found (None: none within the limit) and the calls of the model.
Row = dict[str, dict[str, Any]]
DRAWS = 2000
OURS = "causal"
BOUND = "exhaustive"
BLIND = "no graph"
# At this level no test finds independence, so that graphs are complete.
COMPLETE = 1 - 1e-12


def searches(model: Any, options: dict[str, Any], text: Any = None) -> dict[str, Any]:
    """The searches beside ours: without a graph, and in the paper's order."""
    from heedful.lens.causes import CausalExplainer

    # Complete graphs are alike, so that one head is enough.
    blind = CausalExplainer(model, **{**options, "alpha": COMPLETE, "heads": [0]}, baselines=False).explain(text)
    if blind.pag.density < 1:
        raise RuntimeError(f"the control without a graph has one: it joins {blind.pag.density:.3f} of the pairs")
    paper = CausalExplainer(model, **options, order="depth", prune=False, baselines=False).explain(text)
    return {BLIND: blind, "CLEANN": paper}


def interval(values: np.ndarray, draws: int = DRAWS, seed: int = 0) -> list[float] | None:
    """The mean and the 95 % interval of the bootstrap over inputs; None where there are none.

    >>> interval(np.array([1.0, 1.0, 1.0]))
    [1.0, 1.0, 1.0]
    """
    if not len(values):
        return None
    picks = np.random.default_rng(seed).integers(0, len(values), (draws, len(values)))
    low, high = np.percentile(values[picks].mean(axis=1), [2.5, 97.5])
    return [float(values.mean()), float(low), float(high)]


def summary(rows: Sequence[Row], max_size: int) -> dict[str, Any]:
    """Figures of every method: alone, where all methods succeed, and against ours where both do."""
    methods = list(rows[0])
    sizes = {
        name: np.array([np.nan if row[name]["size"] is None else row[name]["size"] for row in rows], float)
        for name in methods
    }
    solved = {name: ~np.isnan(values) for name, values in sizes.items()}
    common = np.logical_and.reduce(list(solved.values()))
    figures = []
    for name in methods:
        filled = np.where(solved[name], sizes[name], max_size + 1)
        both = solved[name] & solved[OURS]
        figures.append({
            "method": name,
            "success": interval(solved[name].astype(float)),
            "mean_common": interval(sizes[name][common]),
            "median_common": float(np.median(sizes[name][common])) if common.any() else None,
            "mean_filled": interval(filled),
            "median_filled": float(np.median(filled)),
            "calls": float(np.mean([row[name]["calls"] for row in rows])),
            "pairs": int(both.sum()),
            "ours_less": interval((sizes[OURS] - sizes[name])[both]),
            "ours_less_filled": interval(np.where(solved[OURS], sizes[OURS], max_size + 1) - filled),
        })  # fmt: skip
    return {"inputs": len(rows), "common": int(common.sum()), "max_size": max_size, "methods": figures}


def violations(rows: Sequence[Row]) -> dict[str, int]:
    """Sets of any method smaller than the exhaustive search's: none can be."""
    below = 0
    for row in rows:
        least = row[BOUND]["size"] if BOUND in row else None
        for name, one in row.items():
            below += (
                name != BOUND and BOUND in row and one["size"] is not None and (least is None or one["size"] < least)
            )
    return {"below the lower bound": int(below)}


def blocks(figures: dict[str, Any]) -> list[Block]:
    """The table of methods, with what it says."""

    def cell(values: list[float] | None, digits: int = 2) -> str:
        return "" if values is None else f"{values[0]:.{digits}f} [{values[1]:.{digits}f}, {values[2]:.{digits}f}]"

    most, rows = figures["max_size"], []
    for row in figures["methods"]:
        less = "" if row["method"] == OURS else f"{cell(row['ours_less'])} ({row['pairs']})"
        median = "" if row["median_common"] is None else f"{row['median_common']:g}"
        filled = f"{row['median_filled']:g}", f"{row['calls']:.0f}"
        success = cell([100 * value for value in row["success"]], 0)
        rows.append([row["method"], success, cell(row["mean_common"]), median, cell(row["mean_filled"]), *filled, less])
    sizes = ["size where all solve", "median", f"size, failures as {most + 1}", "median"]
    control = BLIND if any(row[0] == BLIND for row in rows) else ""
    return [
        f"{figures['inputs']} inputs, sets of at most {most}; {figures['common']} are solved by every method. In brackets 95 % "
        "intervals.",
        Table(["method", "solved, %", *sizes, "calls", "ours minus it, where both solve"], rows, control=control),
        reading(figures),
    ]


def reading(figures: dict[str, Any]) -> str:
    """Who has smaller sets than ours, in words that follow the figures."""
    others = [row for row in figures["methods"] if row["method"] not in (OURS, BOUND)]
    worse = [row["method"] for row in others if (row["ours_less"] or [0])[0] > 0 or row["ours_less_filled"][0] > 0]
    clear = [row["method"] for row in others if row["ours_less_filled"][2] < 0]
    ours = next(row for row in figures["methods"] if row["method"] == OURS)
    best = max(others, key=lambda row: row["success"][0])
    text = (
        f"Our sets are larger in the mean than those of {', '.join(worse)}."
        if worse
        else "No baseline's sets are smaller in the mean, neither where both solve nor with failures counted."
    )
    if clear:
        text += f" With failures counted ours are smaller beyond the interval than those of {', '.join(clear)}."
    if ours["success"][0] < best["success"][0]:
        text += f" More inputs are solved by {best['method']}: {100 * best['success'][0]:.0f} % against {100 * ours['success'][0]:.0f} %."
    return text

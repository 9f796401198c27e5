"""Does the confidence of a learned graph say how right it is? (the measure is ours)

The confidence of a test is 1 - exp(-|ln p - ln alpha|): 0 where p is at the threshold. A graph's is the mean over its tests, a pair's
the least among its tests. Random linear models with latent variables (20 observed, 4 latent, degree 2.5; 40 graphs per
setting) are learned by ICD at alpha = 0.01, and the confidence is compared with what is right: for a graph the share of true end
marks found again and F1 of the skeleton (Spearman's rank correlation); for a pair whether it was rightly joined or left apart (the
chance that a right pair has more confidence than a wrong one: 0.5 says nothing, 1 everything). Intervals are 95 % of 2,000
bootstrap draws of graphs. "Within a setting" is the question of a user, who has one model and one N; "over all" mixes
sample sizes, where more data makes both figures rise.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from experiments import sem
from experiments.recipe import Block, Setting, Table

SHAPE, ALPHA, SAMPLES, SEEDS, DRAWS = (20, 4, 2.5), 0.01, (100, 300, 1000, 3000), 40, 2000
BINS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)


def of_samples(samples: int, seeds: int, shape: tuple[int, int, float]) -> list[dict[str, Any]]:
    """A row per graph: its confidence, what is right about it, and for every pair (confidence, rightly decided)."""
    from heedful.discovery import PAG, discover

    rows = []
    for seed in range(seeds):
        model, random = sem.draw(*shape, seed)
        true = PAG.from_dag(model.parents, model.observed).marks
        graph = discover(np.corrcoef(model.data(samples, random), rowvar=False), samples=samples, alpha=ALPHA)
        upper = np.triu_indices(graph.n, 1)
        right = (graph.marks[upper] != 0) == (true[upper] != 0)
        score = sem.compare(graph.marks, true)
        rows.append({
            "samples": samples, "seed": seed, "confidence": graph.confidence, "marks": score["marks"], "f1": score["f1"],
            "pairs": [[round(float(c), 6), bool(r)] for c, r in zip(graph.edge_confidence()[upper], right, strict=True)],
        })  # fmt: skip
    return rows


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Rank correlation; ties share their mean rank.

    >>> spearman(np.array([1.0, 2, 3]), np.array([10.0, 20, 15]))
    0.5
    """
    a, b = _ranks(first), _ranks(second)
    if not a.std() or not b.std():
        return 0.0
    return float(np.round(((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std()), 12))


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def area(confidence: np.ndarray, right: np.ndarray) -> float:
    """The chance that a right one has more confidence than a wrong one, ties half; NaN if all are right or all wrong.

    >>> area(np.array([0.9, 0.8, 0.1]), np.array([True, True, False]))
    1.0
    """
    if right.all() or not right.any():
        return float("nan")
    ranks = _ranks(confidence)
    good = int(right.sum())
    return float((ranks[right].sum() - good * (good + 1) / 2) / (good * (len(right) - good)))


def summary(rows: list[dict[str, Any]], draws: int) -> dict[str, Any]:
    """Figures with intervals over draws of graphs."""
    random = np.random.default_rng(0)

    def figures(chosen: list[dict[str, Any]]) -> list[float]:
        confidence = np.array([row["confidence"] for row in chosen])
        pairs = np.concatenate([np.asarray(row["pairs"], float) for row in chosen])
        return [
            *(spearman(confidence, np.array([row[key] for row in chosen])) for key in ("marks", "f1")),
            area(pairs[:, 0], pairs[:, 1] > 0.5),
        ]

    drawn = np.array([figures([rows[at] for at in random.integers(0, len(rows), len(rows))]) for _ in range(draws)])
    intervals = {}
    for name, value, column in zip(("marks", "f1", "pairs"), figures(rows), drawn.T, strict=True):
        low, high = np.nanpercentile(column, [2.5, 97.5]) if np.isfinite(column).any() else (np.nan, np.nan)
        intervals[name] = [None if not np.isfinite(one) else round(float(one), 4) for one in (value, low, high)]
    return intervals


def bins(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many pairs were rightly decided, by confidence."""
    pairs = np.concatenate([np.asarray(row["pairs"], float) for row in rows])
    counts = []
    for low, high in itertools.pairwise(BINS):
        inside = (pairs[:, 0] >= low) & ((pairs[:, 0] < high) | (high == 1.0))
        if inside.any():
            counts.append(
                {"from": low, "to": high, "pairs": int(inside.sum()), "right": float(pairs[inside, 1].mean())}
            )
    return counts


def run(setting: Setting) -> dict[str, Any]:
    seeds, shape = (4, (7, 2, 2.0)) if setting.quick else (SEEDS, SHAPE)
    samples, draws = (SAMPLES[1:3], 50) if setting.quick else (SAMPLES, DRAWS)
    parts = {f"N {size}": (size, seeds, shape) for size in samples}
    done = setting.store().run(of_samples, parts, setting.jobs)
    rows = [row for name in parts for row in done[name]]
    settings = [
        {"samples": size, **_means(own), **summary(own, draws)}
        for size, own in zip(samples, (done[n] for n in parts), strict=True)
    ]
    return {
        "quick": setting.quick, "shape": list(shape), "alpha": ALPHA, "graphs": seeds, "settings": settings,
        "over_all": summary(rows, draws), "bins": bins(rows),
    }  # fmt: skip


def _means(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {f"mean_{key}": float(np.mean([row[key] for row in rows])) for key in ("confidence", "marks", "f1")}


def tables(result: dict[str, Any]) -> list[Block]:
    def cells(row: dict[str, Any]) -> list[str]:
        values = (row[key] for key in ("marks", "f1", "pairs"))
        return ["" if value is None else f"{value:.2f} [{low:.2f}, {high:.2f}]" for value, low, high in values]

    means = ("confidence", "marks", "f1")
    rows = [
        [row["samples"], *(f"{row[f'mean_{key}']:.3f}" for key in means), *cells(row)] for row in result["settings"]
    ]
    by_confidence = [
        [f"{one['from']:g} to {one['to']:g}", one["pairs"], f"{100 * one['right']:.1f} %"] for one in result["bins"]
    ]
    columns = [
        "N",
        "mean confidence",
        "mean marks",
        "mean F1",
        "confidence and marks",
        "confidence and F1",
        "pairs rightly decided",
    ]
    return [
        Table(columns, [*rows, ["over all", "", "", "", *cells(result["over_all"])]]),
        Table(["confidence of a pair", "pairs", "rightly decided"], by_confidence),
        _reading(result),
    ]


def _reading(result: dict[str, Any]) -> str:
    inside = [row["marks"] for row in result["settings"]]
    clear = sum(low is not None and low > 0 for _, low, _ in inside)
    pairs = [row["pairs"][0] for row in result["settings"] if row["pairs"][0] is not None]
    return (
        f"Within a setting the confidence of a graph goes with its marks clearly above chance in {clear} of {len(inside)} settings; "
        f"over all settings the rank correlation is {result['over_all']['marks'][0]:.2f}. "
        + (
            f"The confidence of a pair separates right from wrong with {min(pairs):.2f} to {max(pairs):.2f}."
            if pairs
            else ""
        )
    )

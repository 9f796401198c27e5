"""Learned causal graphs against the true ones: linear models with latent variables, and attention that is such a model.

Random linear models (20 observed and 4 latent nodes, mean degree 2.5, effects of size 0.3 to 0.9) are sampled; each learner sees the
same correlations and the true partial ancestral graph is learned by d-separation. Skeleton: precision, recall, F1. Marks: the share
of true end marks found again (a missed edge misses both); for PC, whose marks mean something else, there is none. causal-learn
is given the same data at alpha = 0.01. Seconds are of one core in one run, for comparison within a row's setting alone.

The second table turns each model into an attention matrix (rows of (I - B)^-T over their sums, effects made positive) and goes
through `attention_correlation` with the observed tokens as nodes: the independences are exact there, so that the true graph must come back.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from experiments import sem
from experiments.recipe import Bar, Block, Setting, Table

SHAPE = (20, 4, 2.5)
SAMPLES, ALPHAS, SEEDS = (300, 1000, 3000), (0.001, 0.01, 0.05), 30
BESIDE = 0.01
ATTENTION = ((6, 2, 2.0), (8, 2, 2.2), (10, 3, 2.2), (12, 4, 2.5))
# What is asked for at 1000 samples and alpha = 0.01.
BARS = {"icd": 0.88, "fci": 0.86}


def of_samples(samples: int, alpha: float, seeds: int, shape: tuple[int, int, float]) -> list[dict[str, Any]]:
    """A row per learner: means over the seeds."""
    from heedful.discovery import PAG, discover

    runs: dict[str, list[dict[str, Any]]] = {}
    for seed in range(seeds):
        model, random = sem.draw(*shape, seed)
        true = PAG.from_dag(model.parents, model.observed).marks
        data = model.data(samples, random)
        correlation = np.corrcoef(data, rowvar=False)
        for learner in ("icd", "fci", "pc"):
            began = time.perf_counter()
            graph = discover(correlation, samples=samples, alpha=alpha, learner=learner)
            score = sem.compare(graph.marks, true) | {"seconds": time.perf_counter() - began, "tests": len(graph.tests)}
            if learner == "pc":
                score |= {"marks": None, "definite_right": None, "exact": None}
            runs.setdefault(learner, []).append(score)
        if alpha == BESIDE:
            began = time.perf_counter()
            marks = _beside(data, alpha)
            if marks is not None:
                score = sem.compare(marks, true) | {"seconds": time.perf_counter() - began, "tests": None}
                runs.setdefault("causal-learn FCI", []).append(score)
    return [
        {"learner": name, "samples": samples, "alpha": alpha, "graphs": len(rows)} | _means(rows)
        for name, rows in runs.items()
    ]


def _beside(data: np.ndarray, alpha: float) -> np.ndarray | None:
    """causal-learn's FCI in our marks; None where it is not installed."""
    try:
        from causallearn.search.ConstraintBased.FCI import fci
    except ImportError:
        return None
    from contextlib import redirect_stdout
    from io import StringIO

    from heedful.discovery import PAG

    with redirect_stdout(StringIO()):
        graph, _ = fci(data, "fisherz", alpha, show_progress=False)
    return PAG.from_causallearn(graph).marks


def _means(rows: list[dict[str, Any]]) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for key in rows[0]:
        values = [row[key] for row in rows if row[key] is not None]
        means[key] = (sum(values) if key == "exact" else statistics.fmean(values)) if values else None
    return means


def of_attention(seeds: int) -> list[dict[str, Any]]:
    """For each shape how many graphs come back exactly, by learner."""
    from heedful.discovery import PAG, RhoThreshold, fci, icd
    from heedful.lens.causes import attention_correlation

    rows = []
    for shape in ATTENTION:
        count = dict.fromkeys(("icd", "fci"), 0)
        for seed in range(seeds):
            model, _ = sem.draw(*shape, seed)
            true = PAG.from_dag([np.flatnonzero(column).tolist() for column in model.weights.T], model.observed).marks
            test = RhoThreshold(attention_correlation(model.attention(), nodes=model.observed), 1e-9)
            for name, learner in (("icd", icd), ("fci", fci)):
                count[name] += bool((learner(test).marks == true).all())
        rows.append({"observed": shape[0], "latent": shape[1], "degree": shape[2], "graphs": seeds, **count})
    return rows


def run(setting: Setting) -> dict[str, Any]:
    seeds, shape = (2, (7, 2, 2.0)) if setting.quick else (SEEDS, SHAPE)
    samples, alphas = (SAMPLES[1:2], ALPHAS[1:2]) if setting.quick else (SAMPLES, ALPHAS)
    parts = {f"N {size} alpha {alpha}": (size, alpha, seeds, shape) for size in samples for alpha in alphas}
    store = setting.store()
    done = store.run(of_samples, parts, setting.jobs)
    exact = store.get("attention", lambda: of_attention(3 if setting.quick else 60))
    return {
        "quick": setting.quick,
        "shape": list(shape),
        "samples": [row for name in parts for row in done[name]],
        "attention": exact,
    }


def tables(result: dict[str, Any]) -> list[Block]:
    observed, latent, degree = result["shape"]
    figures = ("precision", "recall", "f1", "marks", "definite_right")
    rows = [
        [
            row["samples"], f"{row['alpha']:g}", row["learner"], *(None if row[key] is None else f"{row[key]:.3f}" for key in figures),
            None if row["tests"] is None else f"{row['tests']:.0f}", f"{row['seconds']:.3f}",
        ]
        for row in result["samples"]
    ]  # fmt: skip
    at = {(row["learner"], row["samples"], row["alpha"]): row["f1"] for row in result["samples"]}
    bars = [
        Bar(f"F1 of {learner.upper()} at N = 1000, alpha = 0.01", at[learner, 1000, 0.01], bar, shown=".3f")
        for learner, bar in BARS.items()
        if not result["quick"]
    ]
    exact = result["attention"]
    total, icd, fci = (sum(row[key] for row in exact) for key in ("graphs", "icd", "fci"))
    counts = [[r["observed"], r["latent"], f"{r['degree']:g}", r["graphs"], r["icd"], r["fci"]] for r in exact]
    columns = ["precision", "recall", "F1", "marks", "definite marks right", "tests", "seconds"]
    return [
        f"{observed} observed, {latent} latent nodes, degree {degree}; means over {result['samples'][0]['graphs']} graphs:",
        Table(["N", "alpha", "learner", *columns], rows),
        *bars,
        "Attention that is a model, independent if |rho| < 1e-9; graphs that come back exactly:",
        Table(["observed", "latent", "degree", "graphs", "ICD", "FCI"], counts),
        f"Together ICD {icd} and FCI {fci} of {total}.",
    ]

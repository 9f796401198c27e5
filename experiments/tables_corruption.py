"""Do predictions rely on other rows? Scrambled and deleted rows (Kossen et al. 2021, section 4.3, algorithms 1 and 2, and appendix B).

`fast` is fitted on the 90 % of each fold that the paper's protocol has beside the test (`tables-uci`), then asked for the test rows.
*Corruption*: every column of the stored rows, the target's too, is permuted by itself, five times; a model that looks at other rows gets
worse, and one without attention between rows, the control, must not change at all. The paper permutes the other rows of the batch, among
them the test's, of a transductive model that sees no labels in most tables. *Deletion*: stored rows are deleted, one by one at random, as
long as the prediction stays within a tenth; the test (Wilcoxon, one-sided, of all predictions together) is whether those that are needed
lie nearer to the row asked for than as many random ones. The authors' p, of kept against deleted rows, which sets of unequal sizes bias,
stands beside it. The first five of ten folds, one row of each for deletion. Protein, whose 41,000 rows are for a GPU, is not among the tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from experiments import tabular
from experiments.recipe import Bar, Block, Setting, Table
from experiments.symmetry import mean, shown

SETS = ("yacht", "boston", "concrete", "breast cancer")
FOLDS = 5
FAST, APART = "ours, fast", "ours, fast, rows apart"
REPEATS, ASKED = 5, 1
QUICK: dict[str, Any] = {"epochs": 1, "members": 2}
# How much larger the error gets, in percent (of breast cancer: points of accuracy lost); the p-value of deletion over all sets.
PAPER = {"yacht": "52 %", "boston": "20 %", "concrete": "7 %", "breast cancer": "0.0 points"}
PAPER_P = "8.8e-130"


def _part(work: Path, model: str, name: str, fold: int, device: str, quick: bool) -> dict[str, Any]:
    data = tabular.drawn(name, 130, 2 * (name == "breast cancer")) if quick else tabular.read(work, name)
    split = tabular.published(data, fold)
    options = {"preset": "fast", "between_rows": model == FAST} | (QUICK if quick else {})

    def also(estimator: Any) -> dict[str, Any]:
        x, y = data.X[split.test], data.y[split.test]
        found = estimator.corruption_test(x, y, n_repeats=1 if quick else REPEATS)
        figures: dict[str, Any] = {"clean": dict(found.clean), "corrupted": dict(found.corrupted)}
        if model == FAST:
            asked = np.random.default_rng(fold).permutation(len(x))[: 1 if quick else ASKED]
            began = tabular.clock(device)
            deleted = estimator.deletion_test(x[asked], **{"first": 0.09, "retries": 1} if quick else {})
            figures["deletion"] = {
                "shares": list(deleted.shares),
                **{side: _finite(getattr(deleted, side)) for side in ("near", "far", "random")},
                "seconds": tabular.clock(device) - began,
            }
        return figures

    return tabular.ours(data, split.fitting, split.test, options, fold, device, also)


def _finite(values: tuple[float, ...]) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values]


def run(setting: Setting) -> dict[str, Any]:
    quick = setting.quick
    parts = {
        f"{model}, {name}, fold {fold}": (setting.work, model, name, fold, setting.device, quick)
        for name in (("yacht", "breast cancer") if quick else SETS)
        for model in (FAST, APART)
        for fold in range(1 if quick else FOLDS)
    }
    # Deletions take longest.
    order = sorted(parts, key=lambda part: (APART in part, "breast" not in part, "concrete" not in part))
    done = setting.store().run(_part, {part: parts[part] for part in order}, setting.jobs)
    rows = [{"model": parts[part][1], "set": parts[part][2], **done[part]} for part in parts if part in done]
    return {"quick": quick, "rows": rows, "wanted": len(parts)}


def _worse(row: dict[str, Any]) -> float:
    """Percent by which the error grew; of classes, points of accuracy lost."""
    clean, corrupted = row["clean"], row["corrupted"]
    if "rmse" in clean:
        return 100 * (corrupted["rmse"] / clean["rmse"] - 1)
    return 100 * (clean["accuracy"] - corrupted["accuracy"])


def less(rows: list[dict[str, Any]], other: str) -> float | None:
    """The p-value of a one-sided Wilcoxon signed-rank test that needed rows lie nearer than others; None where all are needed."""
    from scipy.stats import wilcoxon

    pairs = [
        (near, far)
        for row in rows
        for near, far in zip(row["deletion"]["near"], row["deletion"][other], strict=True)
        if near is not None and far is not None
    ]
    differences = np.subtract(*np.array(pairs).T) if pairs else np.zeros(0)
    return float(wilcoxon(differences, alternative="less").pvalue) if differences.any() else None


def tables(result: dict[str, Any]) -> list[Block]:
    rows = result["rows"]
    names = list(dict.fromkeys(row["set"] for row in rows))
    lines: list[list[object]] = []
    for name in names:
        unit, key = ("points", "accuracy") if name == "breast cancer" else ("%", "rmse")
        for model in (FAST, APART):
            found = [row for row in rows if (row["model"], row["set"]) == (model, name)]
            if found:
                lines.append([
                    model, name, len(found), *(f"{mean([row[side][key] for row in found]):.4g}" for side in ("clean", "corrupted")),
                    f"{shown([_worse(row) for row in found], 1)} {unit}", PAPER[name] if model == FAST else None,
                ])  # fmt: skip
    fast = [row for row in rows if row["model"] == FAST and "deletion" in row]
    needed = []
    for name in (*names, "all"):
        found = [row for row in fast if name in (row["set"], "all")]
        if found:
            deletions = [row["deletion"] for row in found]
            needed.append([
                name, sum(len(each["shares"]) for each in deletions), f"{100 * mean([share for each in deletions for share in each['shares']]):.0f} %",
                *(_average([value for each in deletions for value in each[side]]) for side in ("near", "random", "far")),
                *(_p(less(found, side)) for side in ("random", "far")), PAPER_P if name == "all" else None,
            ])  # fmt: skip
    control = [row for row in rows if row["model"] == APART]
    change = max(
        (abs(row["clean"][key] - row["corrupted"][key]) for row in control for key in row["clean"]), default=None
    )
    overall = less(fast, "random") if fast else None
    errors = [_worse(row) for row in rows if row["model"] == FAST and row["set"] == "yacht"]
    return [
        tabular.fitted_on(rows),
        "Scrambled rows: RMSE, or accuracy; how much worse, mean (lowest-highest) over folds:",
        Table(["model", "table", "folds", "rows as they are", "columns scrambled", "worse by", "published"], lines, paper="published", control=APART if control else ""),
        "Deleted rows: the share of stored rows that a prediction needs, and mean distances to it (columns standardised):",
        Table(["table", "predictions", "needed", "distance, needed", "as many random ones", "deleted", "p, needed < random", "p, needed < deleted", "published"], needed, control="as many random ones"),
        Bar("rows apart: largest change by scrambled rows", change, 0.0, False),
        Bar("yacht: percent by which scrambled rows make it worse", mean(errors) if errors else None, 0.0, shown=".1f"),
        Bar("deletion: p that needed rows are no nearer than random ones", overall, 0.01, False, ".2g"),
        f"- Incomplete: {len(rows)} of {result['wanted']} fits." if len(rows) < result["wanted"] else "",
    ]  # fmt: skip


def _average(values: list[float | None]) -> str:
    there = [value for value in values if value is not None]
    return f"{mean(there):.3f}" if there else ""


def _p(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"

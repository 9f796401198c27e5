"""Thirty small tables of OpenML-CC18: our estimator as it comes, beside what one would take instead.

The 30 tables of that suite with at most 2,000 rows (on which TabPFN was first tested), of 4 to 77 columns and 2 to 10 classes, with
categories and missing cells. Of each at most 1,000 rows are drawn, half to learn from and half to test on, shares of classes kept; three
draws (the seed is that of the model too). Nothing is tuned, neither ours nor theirs, and no setting of ours was chosen on these tables (one
of them, wdbc, is the breast cancer of scikit-learn, for which `tables-uci` has a bar): all models are as they come, the logistic
regression, the neighbours and the SVM on standardised columns with a column for each level, the forests on codes of levels, boosted trees
with their own categories, each on one core.

The area under the ROC curve is, of several classes, the mean over pairs. A rank is that of a model's mean over the three draws among ours
(`fast`) and the rivals on one table, averaged over tables; the control, ours without attention between rows, is ranked in the place of
ours. Seconds are of one core, for learning and answering, unless the table says that ours ran on a GPU. The paper did not have these
tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments import rivals as others
from experiments import tabular
from experiments.recipe import Bar, Block, Setting, Table
from experiments.rivals import FOREST
from experiments.symmetry import mean, shown

SEEDS = (0, 1, 2)
FAST, APART = "ours, fast", "ours, fast, rows apart"
OURS: dict[str, dict[str, Any]] = {FAST: {"preset": "fast"}, APART: {"preset": "fast", "between_rows": False}}
RIVALS = (
    "linear", "5 nearest rows", "SVM, Gaussian kernel", FOREST, "extra trees, 300", "XGBoost", "LightGBM", "CatBoost",
)  # fmt: skip
QUICK: dict[str, Any] = {"epochs": 1, "members": 2}
QUICK_TABLES = {"drawn, 2 classes": 2, "drawn, 3 classes": 3}
QUICK_RIVALS = ("linear", FOREST, "LightGBM")
FIGURES = ("auc", "accuracy", "nll", "seconds")
ROWS, QUICK_ROWS = 1000, 120


def _table(work: Path, name: str) -> tabular.Data:
    return tabular.drawn(name, 150, QUICK_TABLES[name]) if name in QUICK_TABLES else tabular.cc18(work, name)


def _rival(work: Path, name: str, table: str, seed: int, rows: int) -> dict[str, Any]:
    data = _table(work, table)
    return others.fitted(name, data, *tabular.halves(data, seed, rows), seed)


def _ours(work: Path, name: str, table: str, seed: int, rows: int, device: str, quick: bool) -> dict[str, Any]:
    data = _table(work, table)
    return tabular.ours(data, *tabular.halves(data, seed, rows), OURS[name] | (QUICK if quick else {}), seed, device)


def _asked(setting: Setting) -> tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...], int]:
    """Tables, seeds, rivals and rows of a run."""
    if setting.quick:
        return tuple(QUICK_TABLES), SEEDS[:1], QUICK_RIVALS, QUICK_ROWS
    return tuple(tabular.cc18_names(setting.work)), SEEDS, RIVALS, ROWS


def rivals(setting: Setting, jobs: int) -> dict[str, Any]:
    """Finished parts of all rivals whose package is here."""
    tables, seeds, names, rows = _asked(setting)
    store = setting.store()
    parts = {
        f"{name}, {table}, seed {seed}": (setting.work, name, table, seed, rows)
        for name in names for table in tables for seed in seeds
    }  # fmt: skip
    there = others.possible(store, parts, {part: given[1] for part, given in parts.items()})
    return store.run(_rival, there, jobs)


def run(setting: Setting) -> dict[str, Any]:
    tables, seeds, names, rows = _asked(setting)
    parts = {
        f"{name}, {table}, seed {seed}": (setting.work, name, table, seed, rows, setting.device, setting.quick)
        for name in OURS for table in tables for seed in seeds
    }  # fmt: skip
    done = rivals(setting, setting.jobs)
    done |= setting.store().run(_ours, parts, setting.jobs)
    figures: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name in (*OURS, *names):
        for table in tables:
            found = [done.get(f"{name}, {table}, seed {seed}") for seed in seeds]
            if all(found):
                row = {figure: [round(part[figure], 5) for part in found if part] for figure in FIGURES}
                figures.setdefault(name, {})[table] = row
    return {
        "quick": setting.quick,
        "tables": list(tables),
        "seeds": list(seeds),
        "figures": figures,
        "fits": [
            {"device": done[part]["device"], "parameters": done[part]["parameters"]} for part in parts if part in done
        ],
        "packages": sorted({part["package"] for part in done.values() if "package" in part}),
        "wanted": len(tables) * len(seeds) * (len(OURS) + len(names)),
        "finished": len(done),
    }


def ranks(figures: Mapping[str, Mapping[str, Mapping[str, list[float]]]], figure: str) -> dict[str, float]:
    """The mean rank of each model, 1 the best, equals sharing theirs; of tables that all of them have. A larger `figure` is the better one, but of "nll"."""
    from scipy.stats import rankdata

    names = list(figures)
    common = [table for table in figures[names[0]] if all(table in figures[name] for name in names)]
    if not common:
        return {}
    sign = 1 if figure == "nll" else -1
    values = np.array([[sign * mean(figures[name][table][figure]) for name in names] for table in common])
    return dict(zip(names, rankdata(values, axis=1).mean(0).tolist(), strict=True))


def tables(result: dict[str, Any]) -> list[Block]:
    figures, seeds = result["figures"], range(len(result["seeds"]))
    complete = {name: rows for name, rows in figures.items() if len(rows) == len(result["tables"])}
    without = {name: rows for name, rows in complete.items() if name != APART}
    ranked = {figure: ranks(without, figure) if without else {} for figure in ("auc", "accuracy", "nll")}
    if APART in complete:
        swapped = {name: rows for name, rows in complete.items() if name != FAST}
        for figure in ranked:
            ranked[figure][APART] = ranks(swapped, figure)[APART]
    rows = []
    for name, of in complete.items():
        by_seed = {
            figure: [mean([of[table][figure][seed] for table in result["tables"]]) for seed in seeds]
            for figure in FIGURES
        }
        rows.append([
            name, *(shown(by_seed[figure]) for figure in ("auc", "accuracy", "nll")),
            *(f"{ranked[figure][name]:.2f}" for figure in ranked), _record(complete, name), f"{mean(by_seed['seconds']):.1f}",
        ])  # fmt: skip
    rows.sort(key=lambda row: float(row[4]))
    fast, forest = (ranked["auc"].get(name) for name in (FAST, FOREST))
    worst = _by_table(complete, result["tables"])
    count = len(result["tables"])
    return [
        tabular.fitted_on(result["fits"]),
        f"Means over {count} tables, over draws (lowest-highest); {', '.join(result['packages'])}:",
        Table(
            ["model", "AUC", "accuracy", "-log p", "rank by AUC", "rank by accuracy", "rank by -log p", "ours, fast, is better / worse by AUC", "seconds"],
            rows, control=APART if APART in complete else "",
        ),
        "Every table, AUC:" if worst else "",
        *([Table(["table", FAST, APART, FOREST, "the best rival", "its AUC"], worst, control=APART)] if worst else []),
        Bar("mean rank by AUC, ours less the random forest's", None if fast is None or forest is None else fast - forest, 0.0, False, ".2f"),
        f"- Incomplete: {result['finished']} of {result['wanted']} parts." if result["finished"] < result["wanted"] else "",
    ]  # fmt: skip


def _record(figures: Mapping[str, Any], name: str) -> str:
    """Tables on which ours has a larger area than a model, and on which a smaller one."""
    if name == FAST or FAST not in figures:
        return ""
    apart = [mean(row["auc"]) - mean(figures[name][table]["auc"]) for table, row in figures[FAST].items()]
    return f"{sum(each > 0 for each in apart)} / {sum(each < 0 for each in apart)}"


def _by_table(figures: Mapping[str, Any], names: list[str]) -> list[list[object]]:
    if not {FAST, APART, FOREST} <= set(figures):
        return []
    rows: list[list[object]] = []
    for table in names:
        area = {name: mean(of[table]["auc"]) for name, of in figures.items()}
        best = max((name for name in area if name not in OURS), key=lambda name: area[name])
        rows.append([table, *(f"{area[name]:.3f}" for name in (FAST, APART, FOREST)), best, f"{area[best]:.3f}"])
    return rows

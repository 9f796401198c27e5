"""Numbers without training: a network that learned from synthetic tables predicts numbers of tables it never saw, beside models that are trained on each.

The network is that of `tables-prior` with steps of a number instead of classes; it begins with what that one learned and is trained on synthetic tables whose targets are
numbers (`heedful reproduce tables-numbers --train`, on a GPU). Five real tables (UCI's yacht, concrete and protein, Boston's houses, scikit-learn's diabetes) and Friedman's three functions
(scikit-learn draws them): at most 1,000 rows, half of them to learn from and half to test on, three draws. All models as they come, rivals on one core; nothing was chosen here.
The paper (Hollmann et al. 2023) has classes only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from experiments import prefitting, tabular
from experiments import rivals as others
from experiments.prefitting import SEEDS, SHIPPED
from experiments.recipe import Bar, Block, Setting, Table
from experiments.rivals import FOREST
from experiments.symmetry import mean, shown
from experiments.tables_cc18 import ranks

TRAINS = True
DRAWS = (0, 1, 2)
REAL = ("yacht", "concrete", "boston", "diabetes", "protein")
DRAWN = ("friedman1", "friedman2", "friedman3")
RIVALS = (
    "linear", "5 nearest rows", "SVM, Gaussian kernel", FOREST, "extra trees, 300", "Gaussian process", "XGBoost", "LightGBM", "CatBoost",
)  # fmt: skip


def _table(work: Path, name: str) -> tabular.Data:
    if name not in DRAWN:
        return tabular.read(work, name)
    from sklearn import datasets

    noise = {"friedman1": 1.0, "friedman2": 100.0, "friedman3": 0.1}[name]
    return tabular.Data(name, *getattr(datasets, f"make_{name}")(1000, noise=noise, random_state=0))


def _explained(data: tabular.Data, test: np.ndarray, found: dict[str, Any]) -> dict[str, Any]:
    """With the share of the variance that is explained."""
    return {**found, "r2": 1 - found["rmse"] ** 2 / float(data.y[test].var())}


def _ours(work: Path, table: str, draw: int, seed: int, device: str) -> dict[str, Any]:
    data = _table(work, table)
    learn, test = tabular.halves(data, draw)
    return _explained(data, test, prefitting.ours(data, learn, test, seed, work, device))


def _rival(work: Path, name: str, table: str, draw: int) -> dict[str, Any]:
    data = _table(work, table)
    learn, test = tabular.halves(data, draw)
    return _explained(data, test, others.fitted(name, data, learn, test, draw))


def rivals(setting: Setting, jobs: int) -> dict[str, Any]:
    """Finished parts of all rivals whose package is here."""
    store = setting.store()
    parts = {
        f"{name}, {table}, draw {draw}": (setting.work, name, table, draw)
        for name in RIVALS for table in (*REAL, *DRAWN) for draw in DRAWS
    }  # fmt: skip
    there = others.possible(store, parts, {part: given[1] for part, given in parts.items()})
    return store.run(_rival, there, jobs)


def run(setting: Setting) -> dict[str, Any]:
    trainings = prefitting.trainings(setting, "numbers")
    if setting.quick:
        return {"quick": True, "trainings": trainings, "tables": [], "figures": {}, "devices": []}
    names = (*REAL, *DRAWN)
    seeds = [seed for seed in SEEDS if prefitting.weights(setting.work, "numbers", seed).is_dir()]
    parts = {
        f"ours, seed {seed}, {table}, draw {draw}": (setting.work, table, draw, seed, setting.device)
        for seed in seeds for table in names for draw in DRAWS
    }  # fmt: skip
    done = setting.store().run(_ours, parts, 1)
    done |= rivals(setting, setting.jobs)
    figures: dict[str, Any] = {}
    for name in (*(f"ours, seed {seed}" for seed in seeds), *RIVALS):
        for table in names:
            found = [done.get(f"{name}, {table}, draw {draw}") for draw in DRAWS]
            if all(found):
                row = {
                    figure: [round(part[figure], 5) for part in found if part] for figure in ("r2", "rmse", "seconds")
                }
                figures.setdefault(name, {})[table] = row
    devices = sorted({part["device"] for part in done.values() if "device" in part})
    return {"quick": False, "trainings": trainings, "tables": list(names), "figures": figures, "devices": devices}


def tables(result: dict[str, Any]) -> list[Block]:
    names = result["tables"]
    figures = {name: of for name, of in result["figures"].items() if len(of) == len(names)}
    own = [name for name in figures if name.startswith("ours")]
    if not own:
        return [prefitting.table(result["trainings"])]
    one = {name: of for name, of in figures.items() if name not in own[1:]}
    ranked = ranks(one, "r2")
    rows = [
        [name, *(f"{mean(of[table]['r2']):.3f}" for table in names), f"{mean([mean(of[table]['r2']) for table in names]):.4f}",
         f"{ranked[name]:.2f}" if name in ranked else "", f"{mean([mean(of[table]['seconds']) for table in names]):.2f}"]
        for name, of in figures.items()
    ]  # fmt: skip
    best = min(rank for name, rank in ranked.items() if name not in own)
    return [
        f"Explained share of the variance, means over three draws; ours on {', '.join(result['devices'])}, rivals on one core; ranks with ours of the shipped seed ({SHIPPED}) alone:",
        Table(["model", *names, "mean", "rank", "seconds"], rows, control="linear"),
        f"Over seeds of ours: {shown([mean([mean(figures[name][table]['r2']) for table in names]) for name in own])}.",
        prefitting.table(result["trainings"]),
        Bar("mean rank, the best rival's less ours", best - ranked[own[0]], 0.0, shown=".2f"),
    ]

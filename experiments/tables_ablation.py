"""What helps a network that answers tables without training: its votes, its inputs, small tables first, running means, each kind of synthetic target.

A small network (width 64, three layers) is trained for 400 steps of 100,000 cells, once as it is and once without each part, with three seeds: first weights,
tables and identities are others. Measured are new synthetic tables of all kinds, the same for all, and the 29 tables of KEEL's collection that are none of the thirty on
which `tables-prior` is tested (half of at most 1,000 rows is the context; four variants). A difference counts where it is beyond the spread of the seeds; what helps here
need not at the size of the network that is shipped, which Muon trains at another rate. The figures are of synthetic tables before those of many classes, and of classes that are groups,
became more frequent. The paper of the first such network (Hollmann et al. 2023) has no such table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import outside
from experiments.recipe import Block, Setting, Table
from experiments.symmetry import mean, shown
from heedful.tables.in_context import InContextNetwork
from heedful.tables.pretraining import pretrain
from heedful.tables.prior import TARGETS, Shape

SEEDS = (0, 1, 2)
SIZE: dict[str, Any] = {"embed_dim": 64, "num_heads": 4, "layers": 3}
TRAINED: dict[str, Any] = {
    "epochs": 5,
    "steps": 80,
    "cells": 100_000,
    "lr": 2e-3,
    "average": 0.98,
    "optimizer": "AdamW",
    "part": 32,
}
QUICK: dict[str, Any] = {"epochs": 1, "steps": 2, "cells": 2_000, "held_out": 1}
ALL = "everything"
NETWORKS: dict[str, dict[str, Any]] = {
    "without votes of rows": {"votes": False},
    "without ranks": {"ranks": False},
    "without sines and cosines": {"waves": False},
    "without identities of columns": {"identity": 0},
}
TRAININGS: dict[str, dict[str, Any]] = {
    "without small tables first": {"easy": 0.0},
    "the last weights, not their mean": {"average": None},
    "half the learning rate": {"lr": 1e-3},
    "twice the learning rate": {"lr": 4e-3},
    **{f"without targets by {name}": {"targets": [other for other in TARGETS if other != name]} for name in TARGETS},
}
VARIANTS = (ALL, *NETWORKS, *TRAININGS)
FIGURES = ("held_out", "auc", "accuracy", "nll")


def _trained(name: str, seed: int, work: Path, device: str, quick: bool) -> dict[str, float]:
    torch.manual_seed(seed)
    network = InContextNetwork(**SIZE | NETWORKS.get(name, {}))
    how = TRAINED | TRAININGS.get(name, {}) | (QUICK | {"size": lambda draws: Shape(40, 20, 3)} if quick else {})
    training = pretrain(network, seed=seed, device=device, **how)
    figures = {"held_out": training.epochs[training.best - 1].held_out["loss"]}
    if not quick:
        found = outside.judged(network, work, device, variants=4, seed=seed)
        figures |= {figure: mean([row[figure] for row in found.values()]) for figure in FIGURES[1:]}
    return figures


def run(setting: Setting) -> dict[str, Any]:
    names, seeds = (VARIANTS[:3], SEEDS[:1]) if setting.quick else (VARIANTS, SEEDS)
    parts = {
        f"{name}, seed {seed}": (name, seed, setting.work, setting.device, setting.quick)
        for seed in seeds for name in names
    }  # fmt: skip
    done = setting.store().run(_trained, parts, setting.jobs)
    figures: dict[str, dict[str, list[float]]] = {}
    for name in names:
        found = [done[part] for part in (f"{name}, seed {seed}" for seed in seeds) if part in done]
        if found:
            figures[name] = {figure: [round(row[figure], 5) for row in found] for figure in found[0]}
    return {
        "quick": setting.quick,
        "seeds": list(seeds),
        "figures": figures,
        "wanted": len(parts),
        "finished": len(done),
    }


def tables(result: dict[str, Any]) -> list[Block]:
    figures = result["figures"]
    whole, rows = figures.get(ALL), []
    for name, of in figures.items():
        cells = [shown(of[figure]) if figure in of else "" for figure in FIGURES]
        worse = []
        for figure in ("held_out", "nll"):
            if whole is None or name == ALL or figure not in of or len(of[figure]) != len(whole[figure]):
                worse.append("")
                continue
            apart = np.array(of[figure]) - np.array(whole[figure])
            worse.append(f"{apart.mean():+.4f} ({(apart > 0).sum()} of {len(apart)})")
        rows.append([name, *cells, *worse])
    return [
        f"Means over seeds (lowest-highest); the last columns: how much larger -log p is than that of {ALL!r}, and for how many seeds:",
        Table(
            ["network", "-log p, synthetic", "AUC, outside", "accuracy, outside", "-log p, outside", "synthetic", "outside"],
            rows, control=ALL,
        ),
        f"- Incomplete: {result['finished']} of {result['wanted']} parts." if result["finished"] < result["wanted"] else "",
    ]  # fmt: skip

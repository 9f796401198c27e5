"""Networks that answer tables without training, trained here on synthetic ones; what `tables-prior`, `tables-numbers` and `tables-large` have in common.

A training goes on where a killed one stopped: its checkpoint lies in the work folder until it ends, then its weights, in 16 bits.
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import heedful
from experiments.recipe import Setting, Table, hardware
from experiments.store import processes
from experiments.tabular import Data, clock, judged, one_thread, spread
from heedful._files import write
from heedful.tables import InContextClassifier, InContextNetwork, InContextRegressor
from heedful.tables.pretraining import pretrain
from heedful.tables.prior import Shape

SEEDS = (0, 1, 2)
SHIPPED = 0
"""The seed whose weights lie in the package: the one with the least loss on held-out synthetic tables, which no real table had a say in."""

STEPS = 100
"""Steps of a number."""

NETWORKS: dict[str, dict[str, Any]] = {
    "classes": {"paired": 10},
    "numbers": {"classes": STEPS, "numbers": True, "paired": 10},
}
RECIPES = {"classes": "tables-prior", "numbers": "tables-numbers"}
# Rate, optimizer and pairs of columns were chosen in trainings of 700 steps, on synthetic tables and on those of `outside`.
TRAINED: dict[str, Any] = {"epochs": 17, "steps": 400, "cells": 250_000, "lr": 4e-3}
# Numbers begin with what the network of classes has learned.
NUMBERS: dict[str, Any] = TRAINED | {"epochs": 8, "steps": 250, "easy": 0.0, "lr": 2e-3}
QUICK: dict[str, Any] = {"epochs": 1, "steps": 2, "cells": 2_000, "held_out": 1, "size": lambda draws: Shape(40, 20, 3)}
WORKERS = 3
"""Processes that draw tables for one training, at most."""

PACKAGE = Path(heedful.__file__).parent / "tables" / "weights"


def weights(work: Path, kind: str, seed: int) -> Path:
    """The folder of trained weights; of the shipped seed that of the package, where none was trained here."""
    own = work / "weights" / f"{kind}-{seed}"
    return own if own.is_dir() or seed != SHIPPED else PACKAGE / kind


def trained(
    work: Path, kind: str, seed: int, device: str, at_once: int = 1, how: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Trains a network of "classes" or of "numbers", which begins with that of classes, and leaves its weights in the work folder."""
    torch.manual_seed(seed)
    network = InContextNetwork(**NETWORKS[kind])
    if kind == "numbers":
        known, own = InContextNetwork.from_pretrained(weights(work, "classes", seed)).state_dict(), network.state_dict()
        fits = {
            name: known[name].float() for name, part in own.items() if name in known and known[name].shape == part.shape
        }
        network.load_state_dict(own | fits)
    work.mkdir(parents=True, exist_ok=True)
    checkpoint, clock = work / f"{kind}-{seed}.ckpt", work / f"{kind}-{seed}.seconds"
    # What was stopped took its time too.
    before = float(clock.read_text()) if clock.is_file() and checkpoint.is_file() else 0.0
    began, marks = time.perf_counter(), []

    def progress(done: int, total: int, text: str) -> None:
        marks.append(time.perf_counter() - began)
        write(clock, f"{before + marks[-1]:.1f}")
        print(f"{kind}-{seed}: {done} of {total} epochs, {before + marks[-1]:.0f} s, {text}", flush=True)

    settings = (NUMBERS if kind == "numbers" else TRAINED) | {"workers": min(WORKERS, processes() // at_once - 1)}
    settings |= dict(how or {})
    training = pretrain(network, seed=seed, device=device, progress=progress, checkpoint=checkpoint, **settings)
    network.half().save_pretrained(work / "weights" / f"{kind}-{seed}")
    return {
        "seed": seed,
        "held_out": [round(epoch.held_out["loss"], 5) for epoch in training.epochs],
        "best": training.best,
        "resumed": training.resumed,
        "seconds": round(before + marks[-1], 1),
        "epoch_seconds": round((marks[-1] - marks[0]) / max(1, len(marks) - 1), 2),
        "at_once": at_once,
        "parameters": sum(part.numel() for part in network.parameters()),
        "hardware": hardware(device),
    }


def trainings(setting: Setting, kind: str) -> list[dict[str, Any]]:
    """What is known of the trainings of all seeds: those that the work folder holds, or with `train` all, and the shipped one as the package says. With `train` the package's weights
    are replaced."""
    store = setting.store("trainings")
    if setting.quick:
        return [store.get(kind, lambda: trained(setting.work / "quick", kind, SHIPPED, setting.device, how=QUICK))]
    at_once = len(SEEDS) if setting.device != "cpu" else 1
    parts = {f"{kind}, seed {seed}": (setting.work, kind, seed, setting.device, at_once) for seed in SEEDS}
    if not setting.train:
        parts = {name: part for name, part in parts.items() if store.has(name)}
    done = store.run(trained, parts, at_once)
    if setting.train and f"{kind}, seed {SHIPPED}" in done:
        for file in (setting.work / "weights" / f"{kind}-{SHIPPED}").iterdir():
            shutil.copyfile(file, PACKAGE / kind / file.name)
        about = {"recipe": f"heedful reproduce {RECIPES[kind]} --train", **done[f"{kind}, seed {SHIPPED}"]}
        write(PACKAGE / kind / "training.json", json.dumps(about, indent=1) + "\n")
    return list(done.values())


def ours(
    data: Data, learn: np.ndarray, test: np.ndarray, seed: int, work: Path, device: str, **options: Any
) -> dict[str, Any]:
    """The network of a training measured on one table."""
    data = data.filled(learn)
    kind = InContextClassifier if data.classes else InContextRegressor
    made = kind(categorical=list(data.categorical) or "auto", device=device, **options)
    network = InContextNetwork.from_pretrained(weights(work, "classes" if data.classes else "numbers", seed)).float()
    with one_thread(), warnings.catch_warnings():
        # Levels that the rows to learn from have not are to be expected, and so are large tables.
        warnings.simplefilter("ignore")
        began = clock(device)
        made.fit(data.X[learn], data.y[learn])
        made.network_ = network
        answers = made.predict_proba(data.X[test]) if data.classes else made.predict(data.X[test])
        seconds = clock(device) - began
    if data.classes:
        answers = spread(answers, made.classes_, data.classes)
    return {**judged(data.y[test], answers), "seconds": seconds, "device": hardware(device)}


def table(trainings: list[dict[str, Any]]) -> Table:
    """What is known of trainings; several may have shared a GPU."""
    rows = [
        [one["seed"], f"{one['held_out'][one['best'] - 1]:.4f}", one["best"], f"{one['seconds']:.0f}", one.get("at_once", 1), one["hardware"]]
        for one in trainings
    ]  # fmt: skip
    return Table(["training, seed", "loss on new synthetic tables", "best epoch", "seconds", "at once", "on"], rows)

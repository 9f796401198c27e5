"""Networks that answer tables without training, trained here on synthetic ones; what `tables-prior` and `tables-prior-numbers` have in common.

A training goes on where a killed one stopped: its checkpoint lies in the work folder until it ends, then its weights, in 16 bits.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from heedful.tables.in_context import InContextNetwork
from heedful.tables.pretraining import pretrain

SEEDS = (0, 1, 2)
SHIPPED = 0
"""The seed whose weights lie in the package: the first, whatever the others reached."""

TRAINED: dict[str, Any] = {"epochs": 25, "steps": 240, "cells": 400_000, "lr": 1.5e-3}


def trained(
    work: Path, seed: int, device: str, *, numbers: int = 0, start: Path | None = None, **how: Any
) -> dict[str, Any]:
    """Trains a network, of classes or of so many steps of a number, and leaves its weights in the folder `weights` of its work folder; `start` are those of another to begin with."""
    name = f"{'numbers' if numbers else 'classes'}-{seed}"
    torch.manual_seed(seed)
    network = InContextNetwork(numbers, numbers=True) if numbers else InContextNetwork()
    if start is not None:
        known = InContextNetwork.from_pretrained(start).state_dict()
        own = network.state_dict()
        network.load_state_dict(
            {k: known[k].float() if k in known and known[k].shape == v.shape else v for k, v in own.items()}
        )
    began, marks = time.perf_counter(), []

    def progress(done: int, total: int, text: str) -> None:
        marks.append(time.perf_counter() - began)
        print(f"{name}: {done} of {total} epochs, {marks[-1]:.0f} s, {text}", flush=True)

    training = pretrain(
        network, seed=seed, device=device, progress=progress, checkpoint=work / f"{name}.ckpt", **TRAINED | how
    )
    network.half().save_pretrained(work / "weights" / name)
    return {
        "seed": seed,
        "held_out": [round(epoch.held_out["loss"], 5) for epoch in training.epochs],
        "best": training.best,
        "resumed": training.resumed,
        "seconds": round(marks[-1], 1),
        "epoch_seconds": round((marks[-1] - marks[0]) / max(1, len(marks) - 1), 2),
        "parameters": sum(part.numel() for part in network.parameters()),
    }

"""`heedful.events.NextEvent` fitted to a split and measured on its test: what the recipes of events have in common."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.events import Split
from experiments.recipe import hardware


def foreseen(
    split: Split, options: Mapping[str, Any], seed: int, device: str, marks: Sequence[str] = ()
) -> dict[str, Any]:
    """Accuracy and losses of the test events, their times unknown and, where the model can be asked so, known; how long it took.

    The estimator holds out as many of the sequences that are not for the test as the split has for validation.
    """
    from heedful.events import NextEvent

    learned, asked = split.fitting.given(marks), split.test.given(marks)
    model = NextEvent(
        **{"validation_fraction": len(split.validation) / len(split.fitting), **options},
        random_state=seed,
        device=device,
    )
    began = time.perf_counter()
    model.fit(learned)
    seconds = time.perf_counter() - began
    typed = len(split.test.names) > 1
    ways = {"unknown": None} | ({"known": "true"} if typed and model.network_.targets is not None else {})
    row: dict[str, Any] = {
        "seed": seed,
        "device": hardware(device),
        "seconds": seconds,
        "epochs": len(model.training_.epochs),
        "parameters": sum(part.numel() for part in model.network_.parameters()),
        "clock": [float(period) for period in model.clock_],
        "cycles": [float(period) for period in model.cycles_],
        "periods": _periods(model.network_),
    }
    for name, at in ways.items():
        began = time.perf_counter()
        found = model.evaluate(asked, at=at)
        row[name] = {
            "targets": found.targets, "accuracy": found.accuracy, "nll": found.type_nll, "time_nll": found.time_nll,
            "calibration": found.calibration_error, "seconds": time.perf_counter() - began,
        }  # fmt: skip
    return row


def _periods(network: Any) -> list[float]:
    """Every period that the trained network holds, shortest first."""
    from heedful.nn.time import PeriodicTime

    parts = [module.periods().detach().flatten() for module in network.modules() if isinstance(module, PeriodicTime)]
    return sorted({float(f"{value:.6g}") for part in parts for value in part.tolist() if value < float("inf")})


def fitted_on(fits: Sequence[Mapping[str, Any]]) -> str:
    """On what the fits of a table ran."""
    counts = Counter(fit["device"] for fit in fits)
    places = " and ".join(f"{place} ({count})" for place, count in counts.items())
    return f"Fitted on {places}, several at once: seconds to fit are upper bounds." if places else ""

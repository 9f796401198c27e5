"""What cycles there are in the times of events, without training."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from heedful.events._sequences import Columns, label_codes, read_sequences
from heedful.nn import as_period
from heedful.ops.periodogram import Peak, Periodogram, periodogram

__all__ = ["Peak", "Periodogram", "as_wait", "found", "periods"]

FEWEST = 30
"""Events below which no cycle is looked for."""
MOST = 4
"""Cycles of each kind that a model starts from."""


def periods(
    X: Any, *, sequence: str = "sequence", time_column: str = "time", type: str = "type", sort: bool = False
) -> Periodogram:
    """The cycles in the times of events, and in their types, each with its significance; X is what `NextEvent` takes.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> days = np.sort(rng.integers(0, 200, 400)) * 24.0
    >>> X = [np.sort(days + rng.normal(9.0, 1.0, 400)) for _ in range(3)]  # around nine o'clock
    >>> round(periods(X).peaks[0].period, 1)
    24.0
    """
    sequences = read_sequences(X, Columns(sequence, time_column, type), sort=sort)
    types = None if sequences.types is None else label_codes(sequences.types, np.unique(sequences.types))[0]
    return periodogram(sequences.times, types, offsets=sequences.offsets)


def found(times: np.ndarray, types: np.ndarray, offsets: np.ndarray) -> tuple[list[float], list[float]]:
    """Periods of one clock for all sequences, and of clocks that each sequence has for itself, the most significant first."""
    if len(times) < FEWEST or times.min() == times.max():
        return [], []
    peaks = periodogram(times, types if types.any() else None, offsets=offsets).peaks
    kinds = {kind: [peak.period for peak in peaks if peak.kind == kind][:MOST] for kind in ("coherent", "within")}
    return kinds["coherent"], kinds["within"]


def as_wait(period: Any) -> float:
    """A period or wait in units of time; text as "1d" in seconds, text that is a number as it is."""
    if isinstance(period, str):
        period = period.strip()
        with suppress(ValueError):
            period = float(period)
    return 0.0 if period == 0 else as_period(period)

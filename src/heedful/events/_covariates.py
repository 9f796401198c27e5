"""Further columns of events and of sequences, made into numbers: standardised, or the code of a level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from heedful._errors import InvalidArgument
from heedful.bridges.samples import FAR, moments

LEVELS = 4096
"""Levels of a column of text that are told apart, the most frequent ones."""


def learned(columns: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """How to read each column again: mean and scale of numbers, levels of text."""
    return [_learned(name, _read(values)) for name, values in columns.items()]


def _read(values: Any) -> np.ndarray:
    """Numbers with NaN for None, or whatever else they are."""
    values = np.asarray(values)
    if values.dtype == object:
        try:
            return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
        except (TypeError, ValueError):
            return values
    return values


def _learned(name: str, values: np.ndarray) -> dict[str, Any]:
    if values.dtype.kind in "biuf":
        values = values.astype(np.float64)
        if np.isinf(values).any():
            raise InvalidArgument(f"column {name!r} holds infinite values; leave them out or cut them")
        mean, scale = moments(values[~np.isnan(values)])
        return {"name": name, "mean": mean, "scale": scale}
    levels, counts = np.unique(values.astype(str), return_counts=True)
    most = levels[np.argsort(-counts, kind="stable")[:LEVELS]]
    return {"name": name, "levels": sorted(most.tolist())}


def numbers(parts: Sequence[Mapping[str, Any]]) -> int:
    """Columns of `matrix` that hold numbers; they come first."""
    return 2 * sum("levels" not in part for part in parts)


def levels(parts: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Codes that each of its other columns may hold: 0 for a level never seen, then one for each."""
    return tuple(1 + len(part["levels"]) for part in parts if "levels" in part)


def matrix(columns: Mapping[str, np.ndarray], parts: Sequence[Mapping[str, Any]], count: int) -> np.ndarray:
    """(count, columns) in float32: numbers with 1 beside them where they are missing, then codes of levels."""
    missing = [part["name"] for part in parts if part["name"] not in columns]
    if missing:
        raise InvalidArgument(f"X lacks the column {missing[0]!r} that the model was fitted with")
    blocks, codes = [np.zeros((count, 0), dtype=np.float32)], []
    for part in parts:
        values = _read(columns[part["name"]])
        if "levels" in part:
            known = np.array(part["levels"], dtype=str)
            places = np.searchsorted(known, values.astype(str)).clip(max=len(known) - 1)
            codes.append(np.where(known[places] == values.astype(str), 1 + places, 0)[:, None])
            continue
        try:
            scaled = (values.astype(np.float64) - part["mean"]) / part["scale"]
        except ValueError:
            raise InvalidArgument(f"column {part['name']!r} held numbers in fit; got {values.dtype}") from None
        if (np.abs(scaled) > FAR).any():
            raise InvalidArgument(
                f"column {part['name']!r} has values more than {FAR:g} standard deviations from the training's mean"
            )
        blocks.append(np.stack((np.nan_to_num(scaled), np.isnan(scaled)), axis=1))
    return np.concatenate([block.astype(np.float32) for block in (*blocks, *codes)], axis=1)

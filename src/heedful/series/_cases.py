"""Series as they come, made into one array: unequal lengths, missing values, standardised channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful.bridges.samples import FAR, moments


@dataclass(frozen=True)
class Cases:
    """`values` (cases, channels, time), NaN behind each series' end and where a value is missing; `lengths` (cases,)."""

    values: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: np.ndarray) -> Cases:
        return Cases(self.values[rows], self.lengths[rows])

    @property
    def inside(self) -> np.ndarray:
        """(cases, time), True up to each series' end."""
        return np.arange(self.values.shape[2]) < self.lengths[:, None]


def as_array(X: Any) -> Any:
    """X as one array where it is a list of series, NaN behind each end; anything else as it is."""
    if isinstance(X, list | tuple) and not X:
        raise InvalidArgument("X is empty; give one series or more")
    listed = isinstance(X, np.ndarray) and X.dtype == object and X.ndim == 1
    if not listed and (not isinstance(X, list | tuple) or not _are_series(X)):
        return X
    parts: list[np.ndarray] = []
    for at, case in enumerate(X):
        part = _numbers(case, at)
        part = part[None] if part.ndim == 1 else part
        if part.ndim != 2 or 0 in part.shape:
            raise InvalidArgument(
                f"each series must be (channels, time) with one step or more; case {at} is {part.shape}"
            )
        if parts and part.shape[0] != parts[0].shape[0]:
            raise InvalidArgument(
                f"each series must have the same channels; case 0 has {parts[0].shape[0]}, case {at} has {part.shape[0]}. "
                "A series is (channels, time): transpose it if its steps come first"
            )
        parts.append(part)
    values = np.full((len(parts), len(parts[0]), max(part.shape[1] for part in parts)), np.nan)
    for row, part in zip(values, parts, strict=True):
        row[:, : part.shape[1]] = part
    return values


def _are_series(X: Any) -> bool:
    """Whether each part of a list is (channels, time), or they are univariate series of unequal lengths."""
    if not X or not all(hasattr(case, "__len__") and not isinstance(case, str) for case in X):
        return False
    deep = any(
        getattr(case, "ndim", 0) == 2 or (isinstance(case, list) and case and hasattr(case[0], "__len__")) for case in X
    )
    return deep or len({len(case) for case in X}) > 1


def _numbers(case: Any, at: int) -> np.ndarray:
    try:
        return np.asarray(case, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"case {at} cannot be read as numbers: {error}") from None


def cases_of(values: np.ndarray) -> Cases:
    """Finds where each series ends: behind the last step that has a value in any channel."""
    known = ~np.isnan(values).all(axis=1)  # [cases, time]
    lengths = np.where(known.any(1), values.shape[2] - known[:, ::-1].argmax(1), 0)
    empty = np.flatnonzero(lengths == 0)
    if len(empty):
        raise InvalidArgument(f"case {empty[0]} holds no value at all ({len(empty)} such cases); leave it out")
    return Cases(values, lengths)


def filled(cases: Cases) -> Cases:
    """Missing values inside a series: linear between known neighbours, constant before the first and behind the last.

    A channel without any value stays NaN; it becomes the channel's mean when it is standardised.
    """
    missing = np.isnan(cases.values) & cases.inside[:, None]
    if not missing.any():
        return cases
    values = cases.values.copy()
    for case, channel in np.argwhere(missing.any(2)):
        line = values[case, channel, : cases.lengths[case]]
        known = np.flatnonzero(~np.isnan(line))
        if len(known):
            line[:] = np.interp(np.arange(len(line)), known, line[known])
    return Cases(values, cases.lengths)


def scales(cases: Cases) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (ddof = 1) of each channel over all steps of all series; a constant channel has 1."""
    values = cases.values.swapaxes(0, 1)
    pairs = [moments(channel[~np.isnan(channel)]) for channel in values]
    means, spreads = np.array(pairs).T
    return means, spreads


def standardised(cases: Cases, mean: np.ndarray, scale: np.ndarray, max_len: int) -> tuple[Tensor, Tensor]:
    """`x` (cases, n, channels) in float32, zero where nothing is known, and `padding` (cases, n); n at most `max_len`."""
    n = min(int(cases.lengths.max()), max_len)
    with np.errstate(over="ignore"):
        values = (cases.values[:, :, :n] - mean[:, None]) / scale[:, None]
    far = np.flatnonzero((np.abs(values) > FAR).any((1, 2)))
    if len(far):
        raise InvalidArgument(
            f"case {far[0]} has values more than {FAR:g} standard deviations from the training's mean ({len(far)} such cases), "
            "too far for float32; are its units those of the training?"
        )
    x = torch.from_numpy(np.nan_to_num(values, nan=0.0).transpose(0, 2, 1).astype(np.float32))
    return x.contiguous(), torch.from_numpy(~cases.inside[:, :n])

"""Frequencies that learn: exact numbers beside parameters of any precision, the scale of a data set's times, laws of frequencies.

Frequencies are turns per unit of time: a period P is the rate 1 / P, and the angular frequency of the papers is 2 pi times that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from heedful._checks import check_number, is_number, shown
from heedful._errors import InvalidArgument

UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "y": 31557600.0}
_PERIOD = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", re.ASCII)


class TimeScale(NamedTuple):
    """Shortest and longest period to start at, and the horizon: the span over which phases are compared."""

    low: float
    high: float
    horizon: float


def exact(values: Any, device: Any = None) -> Tensor:
    """Float64 numbers as int64 bit patterns, which no change of a module's dtype touches.

    >>> number(exact([0.1])).tolist(), exact([1.0]).dtype
    ([0.1], torch.int64)
    """
    return torch.as_tensor(values, dtype=torch.float64, device=device).view(torch.int64)


def number(bits: Tensor) -> Tensor:
    """The float64 numbers that `exact` keeps."""
    return bits.view(torch.float64)


def as_period(value: float | str) -> float:
    """A period as a number: strings are seconds, minutes ("min"), hours, days, weeks or years of 365.25 days, in seconds.

    >>> as_period(7.3), as_period("1d"), as_period("30min"), as_period("365.25d") == as_period("1y")
    (7.3, 86400.0, 1800.0, True)
    """
    if isinstance(value, str):
        parts = _PERIOD.fullmatch(value.lower())
        if not parts or parts[2] not in UNITS:
            raise InvalidArgument(
                f"{value!r} is no period: give a number in the unit of the times, or seconds as a number with one of "
                f"{', '.join(UNITS)}, as in '7d'"
            )
        value = float(parts[1]) * UNITS[parts[2]]
    check_number(0, period=value)
    return float(value)


def as_periods(values: Sequence[float | str] | None) -> list[float]:
    """Periods as numbers, none for None."""
    if values is None:
        return []
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise InvalidArgument(f"periods must be a list of numbers or of strings as '7d'; got {shown(values)}")
    return [as_period(value if isinstance(value, str) or is_number(value) else float(value)) for value in values]


def as_range(period_range: Any) -> TimeScale | None:
    """`period_range` as a scale, None for "auto"; the horizon is a quarter of the longest period."""
    if period_range == "auto":
        return None
    if isinstance(period_range, str) or not hasattr(period_range, "__len__") or len(period_range) != 2:
        raise InvalidArgument(f"period_range must be 'auto' or (shortest, longest) period; got {shown(period_range)}")
    low, high = as_periods(period_range)
    if low > high:
        raise InvalidArgument(f"period_range is (shortest, longest); got {shown(period_range)}")
    return TimeScale(low, high, high / 4)


DEFAULT = TimeScale(1.0, 1e4, 2.5e3)


def ranged(period_range: Any, scale: TimeScale) -> TimeScale:
    """The scale of the data, within the range of periods where one was given."""
    given = as_range(period_range)
    if given is None:
        return scale
    return given if scale is DEFAULT else given._replace(horizon=scale.horizon)


def check_times(times: Any) -> None:
    """Refuses what is no tensor of times."""
    if (
        not isinstance(times, Tensor)
        or times.dtype in (torch.bool, torch.float16, torch.bfloat16)
        or times.is_complex()
    ):
        got = times.dtype if isinstance(times, Tensor) else type(times).__name__
        raise InvalidArgument(
            f"times must be a tensor of float64 or whole numbers (float32 where it is exact enough); got {got}"
        )


def time_scale(times: Tensor, mask: Tensor | None = None) -> TimeScale:
    """Twice the 1st percentile of positive gaps, four times the 99th percentile of spans, and that percentile itself.

    Args:
        times: `(n,)` or `(B, n)`, each row a sequence.
        mask: boolean, of the same shape; True = a real event. Padding enters nothing.

    >>> time_scale(torch.tensor([[0.0, 2.0, 10.0, 0.0]]), torch.tensor([[True, True, True, False]]))
    TimeScale(low=4.12, high=40.0, horizon=10.0)
    """
    check_times(times)
    if times.dim() not in (1, 2):
        raise InvalidArgument(f"times must have shape (sequences, events); got {tuple(times.shape)}")
    real = torch.ones_like(times, dtype=torch.bool) if mask is None else mask
    if not isinstance(real, Tensor) or real.dtype != torch.bool or real.shape != times.shape:
        got = f"{real.dtype} of shape {tuple(real.shape)}" if isinstance(real, Tensor) else type(real).__name__
        raise InvalidArgument(
            f"mask must be boolean (True = a real event) of shape {tuple(times.shape)}, as times; got {got}"
        )
    flat = times.detach()[real].double().cpu().numpy()
    row = torch.nonzero(real.reshape(-1, real.shape[-1]))[:, 0].cpu().numpy()
    if not np.isfinite(flat).all():
        count = int((~np.isfinite(flat)).sum())
        raise InvalidArgument(f"{count} of {flat.size} times are NaN or infinite: drop these events, or mask them")
    gaps = np.diff(flat)[np.diff(row) == 0]
    gaps = gaps[gaps > 0]
    if gaps.size == 0:
        raise InvalidArgument(
            "no sequence has two events at different times in order, so there is no scale of time to read off: "
            "give period_range=(shortest, longest)"
        )
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    spans = np.maximum.reduceat(flat, starts) - np.minimum.reduceat(flat, starts)
    horizon = float(np.percentile(spans[spans > 0], 99))
    low = 2 * float(np.percentile(gaps, 1))
    return TimeScale(low, max(4 * horizon, low), horizon)


def log_spaced(low: float, high: float, count: int) -> list[float]:
    """So many numbers from low to high, evenly on a logarithmic scale; the geometric mean for one."""
    if count == 1:
        return [math.sqrt(low) * math.sqrt(high)]
    return [low * (high / low) ** (at / (count - 1)) for at in range(count)]


def fraction(turns: Tensor) -> Tensor:
    """Turns less their whole part, with the gradient of the turns."""
    return turns - turns.detach().floor()


class Law(nn.Module):
    """Rates `(F,)` as a function of parameters; how much of the kernel each holds; where they start."""

    def __init__(self, frequencies: int, trainable: bool) -> None:
        super().__init__()
        self.frequencies, self.trainable = frequencies, trainable

    def parameter(self, *shape: int, value: float = 0.0, **place: Any) -> nn.Parameter:
        return nn.Parameter(torch.full(shape, value, **place), requires_grad=self.trainable)

    def rates(self) -> Tensor:
        """Float64 `(F,)`."""
        raise NotImplementedError

    def periods(self) -> Tensor:
        """Float64 `(F,)`; infinite where a rate is 0."""
        return 1 / self.rates().abs()

    def turns(self, times: Tensor) -> Tensor:
        """Phases of float64 times `(...,)`, `(..., F)` in float64 within [0, 1)."""
        return fraction(times[..., None] * self.rates())

    def shares(self) -> Tensor:
        """What each frequency has of the kernel at 0, `(F,)`, of sum 1."""
        return self.rates().detach().new_full((self.frequencies,), 1 / self.frequencies)

    def start(self, scale: TimeScale, periods: Sequence[float]) -> None:
        """Starts at these periods, and at what the scale says for the rest."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Draws base points anew, where there are any."""


class Free(Law):
    """Each rate by itself: 1 / P + shift / horizon, with P and the horizon exact and the shift learned."""

    start_periods: Tensor
    horizon: Tensor

    def __init__(self, frequencies: int, trainable: bool, **place: Any) -> None:
        super().__init__(frequencies, trainable)
        self.shift = self.parameter(frequencies, **place)
        self.register_buffer("start_periods", exact([1.0] * frequencies, place["device"]))
        self.register_buffer("horizon", exact(1.0, place["device"]))

    def start(self, scale: TimeScale, periods: Sequence[float]) -> None:
        first = list(periods)[: self.frequencies]
        rest = self.frequencies - len(first)
        first += log_spaced(scale.low, scale.high, rest) if rest else []
        self.start_periods.copy_(exact(first))
        self.horizon.copy_(exact(scale.horizon))
        self.shift.data.zero_()

    def slopes(self) -> Tensor:
        return self.shift.double() / number(self.horizon)

    def rates(self) -> Tensor:
        return 1 / number(self.start_periods) + self.slopes()

    def periods(self) -> Tensor:
        start = number(self.start_periods)
        return (start / (1 + start * self.slopes())).abs()

    def turns(self, times: Tensor) -> Tensor:
        # Whole periods are taken off as times: exact for 86400 s and the like, where a rounded 1 / P times 1e9 s is not.
        times, periods = times.unsqueeze(-1), number(self.start_periods)
        whole = (times.detach() / periods).floor()
        return fraction((times - whole * periods) / periods + times * self.slopes())

"""Frequencies as a law of a few parameters: normal laws and mixtures of them, a learned quantile function, powers of ten."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from heedful.nn._frequencies import Law, TimeScale, exact, log_spaced, number

HIDDEN = 16  # units of the flow's network


class _Sampled(Law):
    """A law through base points u in (0, 1): fixed ones, and where asked others in each call while training."""

    points: Tensor
    drawn: Tensor

    def __init__(
        self, frequencies: int, trainable: bool, sampler: str, resample: str, groups: int = 1, **place: Any
    ) -> None:
        super().__init__(frequencies, trainable)
        self.resample, self.groups = resample, groups
        at = torch.arange(frequencies, dtype=torch.float64, device=place["device"])
        counts = self.spread(self.group_sizes(place["device"]))
        points = (
            _uniform(frequencies, place["device"]) if sampler == "random" else (at.div(groups).floor() + 0.5) / counts
        )
        self.register_buffer("points", exact(points))
        self.register_buffer("drawn", exact(points.clone()), persistent=False)

    def group_sizes(self, device: Any) -> Tensor:
        """How many frequencies each group has: frequency i belongs to group i modulo `groups`."""
        group = torch.arange(self.groups, dtype=torch.float64, device=device)
        return ((self.frequencies - group) / self.groups).ceil()

    def spread(self, values: Tensor) -> Tensor:
        """Values of groups, `(groups,)`, as those of their frequencies `(F,)`."""
        return values.repeat(-(-self.frequencies // self.groups))[: self.frequencies]

    def base(self) -> Tensor:
        fresh = self.training and self.resample == "train"
        return number(self.drawn if fresh else self.points).clone()

    def redraw(self) -> None:
        if self.training and self.resample == "train":
            self.drawn.copy_(exact(_uniform(self.frequencies, self.drawn.device)))


class Mixture(_Sampled):
    """Normal laws with means mu + shift / horizon and deviations sigma e^s; weights are shares of the kernel."""

    means: Tensor
    deviations: Tensor
    horizon: Tensor

    def __init__(
        self,
        frequencies: int,
        trainable: bool,
        sampler: str,
        resample: str,
        components: int,
        centred: bool,
        **place: Any,
    ) -> None:
        super().__init__(frequencies, trainable, sampler, resample, components, **place)
        self.centred = centred
        self.shift = self.parameter(components, **place)
        self.log_deviation = self.parameter(components, **place)
        self.logits = self.parameter(components, **place) if components > 1 else None
        for name in ("means", "deviations"):
            self.register_buffer(name, exact([1.0] * components, place["device"]))
        self.register_buffer("horizon", exact(1.0, place["device"]))

    def start(self, scale: TimeScale, periods: Sequence[float]) -> None:
        first = list(periods)[: self.groups]
        rest = log_spaced(scale.low, scale.high, self.groups - len(first)) if len(first) < self.groups else []
        # A given period is a line: it keeps its phase over the horizon. The others share the range out.
        self.deviations.copy_(
            exact([0.25 / scale.horizon] * len(first) + [(1.0 if self.centred else 0.5) / p for p in rest])
        )
        self.means.copy_(exact([1 / p for p in first] + [0.0 if self.centred else 1 / p for p in rest]))
        self.horizon.copy_(exact(scale.horizon))
        for parameter in self.parameters():
            parameter.data.zero_()

    def rates(self) -> Tensor:
        mean = number(self.means) + self.shift.double() / number(self.horizon)
        deviation = number(self.deviations) * self.log_deviation.double().exp()
        return self.spread(mean) + self.spread(deviation) * torch.special.ndtri(self.base())

    def shares(self) -> Tensor:
        sizes = self.group_sizes(self.shift.device)
        weights = sizes / self.frequencies if self.logits is None else self.logits.double().softmax(0)
        return self.spread(weights / sizes)


class Flow(_Sampled):
    """Rates exp(-g(u)): g is linear from the logarithm of the shortest period to that of the longest, plus a small network."""

    log_range: Tensor

    def __init__(self, frequencies: int, trainable: bool, sampler: str, resample: str, **place: Any) -> None:
        super().__init__(frequencies, trainable, sampler, resample, **place)
        self.inner, self.outer = nn.Linear(1, HIDDEN, **place), nn.Linear(HIDDEN, 1, **place)
        self.requires_grad_(trainable)
        self.register_buffer("log_range", exact([0.0, 1.0], place["device"]))

    def start(self, scale: TimeScale, periods: Sequence[float]) -> None:
        self.log_range.copy_(exact([math.log(scale.low), math.log(scale.high)]))
        self.inner.reset_parameters()
        for parameter in self.outer.parameters():
            parameter.data.zero_()

    def rates(self) -> Tensor:
        u, (low, high) = self.base(), number(self.log_range)
        hidden = functional.linear(u[:, None], self.inner.weight.double(), self.inner.bias.double()).tanh()
        bend = functional.linear(hidden, self.outer.weight.double(), self.outer.bias.double())[:, 0]
        return (-(low + (high - low) * u + bend)).exp()


class Exponents(Law):
    """Angular frequencies 10^-s with s learned, evenly from 0 to `most` at first, as in the authors' code."""

    def __init__(self, frequencies: int, trainable: bool, most: float, copies: int = 1, **place: Any) -> None:
        super().__init__(frequencies, trainable)
        self.most, self.copies = most, copies
        self.exponents = self.parameter(frequencies, **place)

    def start(self, scale: TimeScale, periods: Sequence[float]) -> None:
        steps = torch.linspace(0, self.most, self.frequencies // self.copies, dtype=torch.float64)
        self.exponents.data.copy_(steps.repeat(self.copies))

    def rates(self) -> Tensor:
        return 10 ** -self.exponents.double() / (2 * math.pi)


def _uniform(count: int, device: Any) -> Tensor:
    """Numbers in (0, 1), never 0: their normal quantile is finite."""
    return torch.rand(count, dtype=torch.float64, device=device) + 2.0**-54

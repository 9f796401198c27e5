r"""Power of event times at many frequencies, in four ways, each with its law where there is no cycle.

Events i have times $t_i$, types $k_i$ and sequences $s_i$; $z_i = e^{2\pi i f t_i}$, and $w_i$ falls smoothly to 0 at the ends (Hann), so that one cycle
does not leak to other frequencies. $p_{sk}$ is the share of type k in sequence s.

- One clock for all: $|\sum_i w_i z_i|^2$ for times, and $\sum_k |\sum_i w_i (1[k_i = k] - p_{s_i k}) z_i|^2 / v_k$ for types. What a rhythm of the times
  alone does to the types is taken off with their shares. Sequences with clocks of their own add up by chance: a sum over all must
  stand out from theirs, too.
- A clock for each sequence: $\sum_s |\sum_{i \in s} w_i z_i|^2$, and $\sum_{s,k}$ of the same with types. Written out, both are sums of $c_{ij} \cos 2\pi
  f (t_i - t_j)$ over pairs within sequences, one Fourier transform of a histogram of differences; for types $c_{ij}$ has mean 0 over
  all orders of a sequence's types, whatever the times.

Each is divided by its mean without a cycle, and then close to a Gamma law of mean 1 and known shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

OVERSAMPLING = 2  # frequencies for each 1 / span
BINS = 4  # of time for the shortest period
MOST_TYPES = 32  # rarer ones count as one
MOST_PAIRS = 10_000_000
LONGEST = 1000  # events of a sequence whose pairs are looked at together
BLOCK = 1_000_000

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Events:
    """Times from 0 on, types from 0 on or None, and where sequences begin and end."""

    times: Array  # [N] float64
    types: Array | None  # [N] int64
    offsets: Array  # [S + 1]

    @property
    def sequence(self) -> Array:
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    @property
    def starts(self) -> Array:
        return np.minimum.reduceat(self.times, self.offsets[:-1])

    @property
    def spans(self) -> Array:
        return np.maximum.reduceat(self.times, self.offsets[:-1]) - self.starts

    def chosen(self, sequences: Array) -> Events:
        """These sequences alone."""
        sizes = np.diff(self.offsets)[sequences]
        begin = np.repeat(self.offsets[sequences], sizes)
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        at = begin + np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
        return Events(self.times[at], None if self.types is None else self.types[at], offsets)


@dataclass(frozen=True, eq=False)
class Power:
    """One statistic over all frequencies: mean 1 and Gamma of this shape where there is no cycle."""

    kind: str
    subject: str
    frequencies: Array  # [F], multiples of 1 / (OVERSAMPLING span)
    values: Array  # [F]
    shape: float
    largest: float  # where every event follows one cycle
    width: float  # how far from a cycle's frequency a tenth of its power is left
    span: float
    at: Callable[[float], float]  # the same, exactly, at any frequency
    clocks: Clocks | None = None  # of sequences, behind one clock for all


class Clocks:
    """Sums of turned events for the types of each sequence, each less its share of the sequence's sum; squares in units of `scale`."""

    def __init__(self, events: Events, weights: Array, types: Array | None, scale: Array) -> None:
        self.events, self.weights, self.scale, self.count = events, weights, scale, len(events.offsets) - 1
        self.sequence = events.sequence
        self.groups = Groups(np.zeros_like(self.sequence) if types is None else types, self.sequence)
        self.share = 0.0 if types is None else self.groups.share

    def sums(self, frequency: float) -> Array:
        """Complex, for each group of events of one type in one sequence."""
        turned = self.weights * _turned(self.events.times, frequency)
        whole = _sums(turned, self.sequence, self.count)
        return _sums(turned, self.groups.group, self.groups.count) - self.share * whole[self.groups.sequence]

    def together(self, frequency: float) -> float:
        """Power by one clock for all."""
        return float((np.abs(_sums(self.sums(frequency), self.groups.type, len(self.scale))) ** 2 / self.scale).sum())

    def apart(self, frequency: float) -> float:
        """What that is on average where sequences have phases of their own."""
        return float((np.abs(self.sums(frequency)) ** 2 / self.scale[self.groups.type]).sum())

    def drawn(self, frequency: float, draws: int) -> Array:
        """What it is with random phases of sequences, `[draws]`."""
        parts = np.zeros((self.count, len(self.scale)), dtype=np.complex128)
        parts[self.groups.sequence, self.groups.type] = self.sums(frequency)
        turns = np.random.default_rng(0).random((draws, self.count))
        return (np.abs(np.exp(2j * np.pi * turns) @ parts) ** 2 / self.scale).sum(axis=1)


class Groups:
    """Events of one type in one sequence."""

    def __init__(self, types: Array, sequence: Array) -> None:
        kinds = int(types.max()) + 1
        codes, self.group, sizes = np.unique(sequence * kinds + types, return_inverse=True, return_counts=True)
        self.sequence, self.type, self.count = codes // kinds, codes % kinds, len(codes)
        self.share = sizes / np.bincount(sequence)[self.sequence]  # of the type in its sequence


def coherent(events: Events, highest: float) -> list[Power]:
    """Power by one clock for all sequences, of times and, where there are several, of types."""
    span = float(np.ptp(events.times))
    grid = _Grid(span, highest)
    sequence, bins = events.sequence, grid.bins(events.times)
    weights = np.sin(np.pi * events.times / span) ** 2
    moment = _moment(events, weights)
    power = np.abs(grid.transform(np.bincount(bins, weights))) ** 2 / moment
    clocks = Clocks(events, weights, None, np.array([moment]))
    largest = float(weights.sum() ** 2 / moment)
    shared = _width(np.array([span]), np.ones(1)), span
    found = [Power("coherent", "times", grid.frequencies, power, 1.0, largest, *shared, clocks.together, clocks)]
    if events.types is None:
        return found
    types = _pooled(events.types)
    shares = _shares(types, sequence)  # [S, K]
    each = np.bincount(sequence, weights**2)
    expected = each @ shares  # [K]
    covariance = np.diag(expected) - (shares * each[:, None]).T @ shares
    scaled = covariance / np.sqrt(expected[:, None] * expected)
    mean, variance = float(np.trace(scaled)), float((scaled**2).sum())
    if mean <= 1e-6:
        return found
    clocks = Clocks(events, weights, types, expected * mean)
    total, most = np.zeros(len(grid.frequencies)), 0.0
    for kind, scale in enumerate(clocks.scale):
        centred = (types == kind) - shares[sequence, kind]
        total += np.abs(grid.transform(np.bincount(bins, weights * centred))) ** 2 / scale
        most += float((weights * centred**2).sum() / scale)
    largest = float(weights.sum()) * most
    shape = mean**2 / variance
    return [
        *found,
        Power("coherent", "types", grid.frequencies, total, shape, largest, *shared, clocks.together, clocks),
    ]


def _moment(events: Events, weights: Array) -> float:
    """The sum of squared weights, in which events of a sequence at one time are one: they come together, a basket and not many visits."""
    order = np.lexsort((events.times, events.sequence))
    sequence, times = events.sequence[order], events.times[order]
    first = np.append(True, (np.diff(sequence) != 0) | (np.diff(times) != 0))
    return float((np.add.reduceat(weights[order], np.flatnonzero(first)) ** 2).sum())


def within(events: Events, highest: float) -> list[Power]:
    """Power by a clock for each sequence; sequences have at least three events and a span."""
    spans, sizes, sequence = events.spans, np.diff(events.offsets), events.sequence
    span = float(spans.max())
    grid = _Grid(span, highest)
    # A gap is added at both ends: short sequences keep their first and last events.
    margin = spans / sizes
    weights = np.sin(np.pi * (events.times - (events.starts - margin)[sequence]) / (spans + 2 * margin)[sequence]) ** 2
    moment = float((weights**2).sum())
    pairs = _Pairs(events, weights)
    histograms, squares = pairs.histograms(grid)
    both = [2 * grid.transform(each).real for each in histograms]
    sums = np.bincount(sequence, weights)
    shared = _width(spans + 2 * margin, sums**2), span
    clocks = Clocks(events, weights, None, np.array([moment]))
    largest, shape = float((sums**2).sum() / moment), moment**2 / (2 * squares[0])
    found = [Power("within", "times", grid.frequencies, 1 + both[0] / moment, shape, largest, *shared, clocks.apart)]
    if events.types is None or pairs.variation <= 1e-6 * moment:
        return found
    largest = float((sums * np.bincount(sequence, weights * pairs.lengths)).sum() / pairs.variation)
    shape = pairs.variation**2 / (2 * squares[1])
    values = 1 + both[1] / pairs.variation
    return [*found, Power("within", "types", grid.frequencies, values, shape, largest, *shared, pairs.of_types)]


class _Pairs:
    """Pairs of events in one sequence, their differences and what each adds to the power."""

    def __init__(self, events: Events, weights: Array) -> None:
        self.events, self.weights, self.types = events, weights, events.types
        self.sequence, self.sizes = events.sequence, np.diff(events.offsets)
        if self.types is None:
            return
        groups = self.groups = Groups(self.types, self.sequence)
        self.share = groups.share[groups.group]
        self.same = np.bincount(groups.sequence, groups.share**2)  # [S], that two draws agree
        self.lengths = 1 - 2 * self.share + self.same[self.sequence]  # squared, of an event's type less the shares
        self.moments = np.bincount(self.sequence, weights**2)
        self.alone = float((weights**2 * self.lengths).sum())
        self.variation = float(((1 - self.same) * self.moments).sum())
        self.tie = (1 - self.same) / (self.sizes - 1)

    def histograms(self, grid: _Grid) -> tuple[list[Array], list[float]]:
        """What pairs add, by their difference, and the sums of squares."""
        sums = [np.zeros(grid.bins_within + 1) for _ in range(1 if self.types is None else 2)]
        squares = [0.0] * len(sums)
        for first, second in self._blocks():
            bins = grid.bins(np.abs(self.events.times[second] - self.events.times[first]))
            weight = self.weights[first] * self.weights[second]
            parts = [weight]
            if self.types is not None:
                at = self.sequence[first]
                agree = (
                    (self.types[first] == self.types[second]) - self.share[first] - self.share[second] + self.same[at]
                )
                parts.append(weight * (agree + self.tie[at]))
            for which, part in enumerate(parts):
                sums[which] += np.bincount(bins, part, minlength=len(sums[which]))
                squares[which] += float(part @ part)
        return sums, squares

    def of_types(self, frequency: float) -> float:
        """The power of types by a clock for each sequence, from sums over types instead of pairs."""
        turned = self.weights * _turned(self.events.times, frequency)
        whole = _sums(turned, self.sequence, len(self.sizes))
        groups = self.groups
        sums = _sums(turned, groups.group, groups.count) - groups.share * whole[groups.sequence]
        tied = (self.tie * (np.abs(whole) ** 2 - self.moments)).sum()
        return 1 + float((np.abs(sums) ** 2).sum() - self.alone + tied) / self.variation

    def _blocks(self) -> Iterator[tuple[Array, Array]]:
        """Pairs (i, j), i < j, some lags at a time."""
        ends = self.events.offsets[1:][self.sequence]
        left, lag = np.arange(len(ends)), 0
        waiting: list[Array] = []
        lags: list[Array] = []
        while len(left):
            lag += 1
            left = left[left + lag < ends[left]]
            waiting.append(left)
            lags.append(np.full(len(left), lag))
            if not len(left) or sum(map(len, waiting)) >= BLOCK:
                first = np.concatenate(waiting)
                yield first, first + np.concatenate(lags)
                waiting, lags = [], []


class _Grid:
    """Frequencies up to the highest, and bins of time that are short enough for them."""

    def __init__(self, span: float, highest: float) -> None:
        self.span = span
        self.bins_within = max(8, int(np.ceil(BINS * span * highest)))
        self.step = span / self.bins_within
        self.size = OVERSAMPLING * self.bins_within
        self.frequencies = np.arange(min(int(OVERSAMPLING * span * highest), self.size // 2) + 1) / (
            OVERSAMPLING * span
        )

    def bins(self, times: Array) -> Array:
        return np.rint(times / self.step).astype(np.int64)

    def transform(self, sums: Array) -> Array:
        return np.fft.rfft(sums, self.size)[: len(self.frequencies)]


def _width(lengths: Array, weights: Array) -> float:
    """How far from a cycle's frequency a tenth of its power is left, of Hann windows of these lengths."""
    low, high = 0.0, 2 / float(lengths.min())
    for _ in range(40):
        middle = (low + high) / 2
        x = lengths * middle
        # The window's transform has a removable pole at 1, where it is a half.
        close = np.abs(x - 1) < 1e-6
        left = np.where(close, 0.5, np.sinc(x) / np.where(close, 1.0, 1 - x**2)) ** 2
        low, high = (middle, high) if left @ weights > 0.1 * weights.sum() else (low, middle)
    return high


def _turned(times: Array, frequency: float) -> Array:
    turns = times * frequency
    return np.exp(2j * np.pi * (turns - np.floor(turns)))


def _sums(values: Array, group: Array, count: int) -> Array:
    return np.bincount(group, values.real, count) + 1j * np.bincount(group, values.imag, count)


def _pooled(types: Array) -> Array:
    """Types by their number, the rarest as one."""
    names, codes, counts = np.unique(types, return_inverse=True, return_counts=True)
    rank = np.empty(len(names), dtype=np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(names))
    return np.minimum(rank[codes], MOST_TYPES - 1)


def _shares(types: Array, sequence: Array) -> Array:
    """The share of each type in each sequence, `[S, K]`."""
    kinds = int(types.max()) + 1
    counts = np.bincount(sequence * kinds + types, minlength=(int(sequence[-1]) + 1) * kinds).reshape(-1, kinds)
    return counts / counts.sum(axis=1, keepdims=True)

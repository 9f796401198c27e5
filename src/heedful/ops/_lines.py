"""Cycles among the frequencies of power spectra: peaks above their neighbourhood, and which of them belong together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from heedful.ops._power import OVERSAMPLING, Array, Power

NEIGHBOURS = 16  # widths on either side by which a peak is judged
BROAD = 0.6  # of a peak's height one width away: no cycle, but a range of frequencies
LEAST_CYCLES = 4  # in a span
MOST_LINES = 100  # of each spectrum, harmonics included
DRAWS = 400
MANY = 2000  # sequences, from which on sums of random phases follow their limit
SPREAD = 6  # widths
MULTIPLES = 64
SIDEBANDS = 7


@dataclass
class Line:
    """A frequency at which one spectrum, or several, stand out."""

    frequency: float
    power: Power
    level: float
    value: float
    strength: float = 0.0
    evidence: float = 0.0  # -log p
    others: list[Line] = field(default_factory=list)  # the same cycle in other spectra
    overtones: list[tuple[int, Line]] = field(default_factory=list)  # multiples of the frequency, the lowest first

    @property
    def width(self) -> float:
        return self.power.width


def log_tail(power: Power, values: Array) -> Array:
    """Log of the chance that the statistic is that large at one frequency without a cycle."""
    shape, values = power.shape, np.maximum(values, 1e-12)
    scaled = torch.from_numpy(shape * np.atleast_1d(values))
    chance = torch.special.gammaincc(torch.full_like(scaled, shape), scaled).numpy()
    bound = -shape * (values - 1 - np.log(values))  # Chernoff's, where the chance is too small for a number
    return np.where(chance > 1e-290, np.log(np.maximum(chance, 1e-290)), np.minimum(bound, 0))


def lines(power: Power, lowest: float, significance: float, tests: int) -> list[Line]:
    """The peaks of one spectrum that are significant after all tests, the most evident first."""
    values, frequencies = power.values, power.frequencies
    bar = math.log(significance / tests)
    inner = values[1:-1]
    tops = np.flatnonzero((inner >= values[:-2]) & (inner > values[2:])) + 1
    tops = tops[frequencies[tops] >= max(lowest, LEAST_CYCLES / power.span)]
    tops = tops[log_tail(power, values[tops]) <= bar]
    levels = _levels(power, tops)
    kept = (log_tail(power, values[tops] / levels) <= bar) & ~_are_broad(power, tops, levels)
    tops, levels = tops[kept], levels[kept]
    found: list[Line] = []
    for at in np.argsort(-values[tops], kind="stable"):
        line = Line(_vertex(values, frequencies, int(tops[at])), power, float(levels[at]), float(values[tops[at]]))
        # A cycle whose strength changes slowly is spread over frequencies nearby.
        if any(abs(line.frequency - other.frequency) <= SPREAD * power.width for other in found):
            continue
        if not any(_multiple(line, other) for other in found):
            line.level = max(line.level, _chance(line))
        judge(line, tests)
        if line.evidence >= -math.log(significance):
            found.append(line)
        if len(found) >= MOST_LINES:
            break
    return sorted(found, key=lambda line: -line.evidence)


def _chance(line: Line) -> float:
    """What one clock for all is expected to give where each sequence has a clock of its own."""
    clocks = line.power.clocks
    return 0.0 if clocks is None or clocks.count == 1 else clocks.apart(line.frequency)


def is_shared(frequency: float, power: Power, significance: float) -> bool:
    """Whether sequences agree in phase more than random phases do."""
    clocks = power.clocks
    if clocks is None:
        return False
    value = clocks.together(frequency)
    if clocks.count > MANY:
        return float(log_tail(power, np.array([value / clocks.apart(frequency)]))[0]) <= math.log(significance)
    return clocks.count == 1 or float((clocks.drawn(frequency, DRAWS) >= value).mean()) <= significance


def judge(line: Line, tests: int) -> None:
    """Evidence after all tests, and strength, of a line's value."""
    tail = log_tail(line.power, np.array([line.value / line.level]))
    line.evidence = -(float(tail[0]) + math.log(tests))
    share = (line.value - line.level) / max(line.power.largest - 1, 1e-12)
    line.strength = math.sqrt(min(max(share, 0.0), 1.0))


def refine(line: Line, tests: int) -> None:
    """The frequency and the value from the events themselves, by parabolas through three exact values."""
    step = 0.5 * line.power.width
    best = line.frequency
    for shrink in (0.5, 0.1, 0.02):
        points = best + shrink * step * np.array([-1.0, 0.0, 1.0])
        heights = [line.power.at(float(point)) for point in points]
        best = float(points[1] + shrink * step * _parabola(*heights))
    line.frequency, line.value = best, line.power.at(best)
    judge(line, tests)
    # The c-th multiple knows the frequency c times as well; each is asked once those below have said which turn it is in.
    known = line.evidence / line.width**2
    for multiple, other in line.overtones:
        if abs(other.frequency - multiple * line.frequency) <= 0.75 * other.width:
            more = multiple**2 * other.evidence / other.width**2
            line.frequency += (other.frequency / multiple - line.frequency) * more / (known + more)
            known += more


def united(found: Sequence[Line]) -> list[Line]:
    """One line for each cycle, whichever spectra it is in: the one that knows its frequency best."""
    kept: list[Line] = []
    for line in sorted(found, key=lambda line: line.power.width / math.sqrt(max(line.evidence, 1e-9))):
        for other in kept:
            if abs(line.frequency - other.frequency) <= 1.5 * max(line.width, other.width):
                other.others.append(line)
                break
        else:
            kept.append(line)
    return kept


def fundamentals(found: Sequence[Line]) -> list[Line]:
    """Lines that are no multiple of another, nor a multiple with another as its modulation; harmonics counted."""
    strongest = sorted(found, key=_weight, reverse=True)
    kept: list[Line] = []
    for line in strongest:
        owner = next((other for other in kept if _multiple(line, other)), None)
        if owner is None:
            kept.append(line)
    # Half a day may be stronger than the day: it is its harmonic all the same.
    for line in list(kept):
        slower = [
            o for o in kept if o is not line and _multiple(line, o) in (2, 3, 4) and _weight(line) <= 3 * _weight(o)
        ]
        if slower:
            kept.remove(line)
    for line in sorted(kept, key=_weight):
        if any(_sideband(line, carrier, slow) for carrier in kept for slow in kept):
            kept.remove(line)
    for line in kept:
        line.overtones = sorted(((_multiple(other, line), other) for other in found), key=lambda pair: pair[0])
        line.overtones = [pair for pair in line.overtones if pair[0]]
    return kept


def _weight(line: Line) -> float:
    return max(part.strength for part in (line, *line.others))


def _multiple(line: Line, other: Line) -> int:
    """Which multiple of the other's frequency this is, from 2 on; else 0."""
    ratio = round(line.frequency / other.frequency)
    if line is other or not 2 <= ratio <= MULTIPLES:
        return 0
    # As wide as what a slow change of strength spreads a cycle over, and less where multiples are close together.
    slack = min(SPREAD * max(line.width, other.width), 0.2 * other.frequency)
    return ratio if abs(line.frequency - ratio * other.frequency) <= slack else 0


def _sideband(line: Line, carrier: Line, slow: Line) -> bool:
    """Whether the line is a multiple of the carrier, plus or minus a few times a slower line that modulates it."""
    if (
        line in (carrier, slow)
        or slow.frequency >= min(line.frequency, carrier.frequency)
        or _weight(line) >= _weight(carrier)
    ):
        return False
    slack = 1.5 * max(each.width for each in (line, carrier, slow))
    base = round(line.frequency / carrier.frequency)
    for multiple in {base, base + 1, max(base - 1, 0)}:
        rest = abs(line.frequency - multiple * carrier.frequency)
        times = round(rest / slow.frequency)
        if 1 <= times <= SIDEBANDS and abs(rest - times * slow.frequency) <= slack:
            return True
    return False


def _levels(power: Power, tops: Array) -> Array:
    """The power to stand out from: that of no cycle, the higher of both sides' usual power, and that of a drift."""
    values, width = power.values, power.width * OVERSAMPLING * power.span
    near = max(2, round(2.5 * width))
    far = near + max(8, round(NEIGHBOURS * width))
    first = min(max(1, round(1.5 * width)), len(values) - 1)  # frequencies below are the span itself
    away = _some(near, far, len(values))
    left = np.median(values[np.maximum(tops[:, None] - away, first)], axis=1)
    right = np.median(values[np.minimum(tops[:, None] + away, len(values) - 1)], axis=1)
    usual = np.maximum(left, np.where(tops + near < len(values), right, left))
    if power.kind == "within":
        # Sums over many sequences are smooth: next to a cycle they are as without it, on a broad rise they are not.
        close = _some(max(1, round(1.3 * width)), near + 1, len(values))
        beside = np.concatenate((tops[:, None] - close, tops[:, None] + close), axis=1)
        usual = np.maximum(usual, np.median(values[np.clip(beside, first, len(values) - 1)], axis=1))
    middle = (1 - 1 / (9 * power.shape)) ** 3  # the median of the law without a cycle (Wilson and Hilferty)
    slow = slice(2 * OVERSAMPLING, LEAST_CYCLES * OVERSAMPLING)  # too slow for a cycle; a drift falls off from there
    fall = (power.frequencies[slow] / power.frequencies[tops][:, None]) ** 2
    drift = 1 + ((values[slow] - 1) * fall).max(axis=1, initial=0.0)
    return np.maximum(usual / middle, drift)


def _some(near: int, far: int, count: int) -> Array:
    """Distances from near to far on a grid of so many places, 256 of them at most: where spans differ by orders, lines of the short ones are as wide as the grid."""
    near, far = min(near, count), min(far, count)
    return np.unique(np.linspace(near, far, min(256, far - near + 1)).astype(int))


def _are_broad(power: Power, tops: Array, levels: Array) -> Array:
    """Whether most of the height is there one width away, too."""
    away = max(1, round(power.width * OVERSAMPLING * power.span))
    last = len(power.values) - 1
    sides = (power.values[np.maximum(tops - away, 0)] + power.values[np.minimum(tops + away, last)]) / 2
    return sides - levels > BROAD * (power.values[tops] - levels)


def _vertex(values: Array, frequencies: Array, top: int) -> float:
    return float(frequencies[top] + (frequencies[1] - frequencies[0]) * _parabola(*values[top - 1 : top + 2]))


def _parabola(left: float, middle: float, right: float) -> float:
    """Where the parabola through values at -1, 0, 1 is highest, within a step."""
    bend = left - 2 * middle + right
    return float(np.clip(0.5 * (left - right) / bend, -1, 1)) if bend < 0 else float(np.sign(right - left))

"""What cycles there are in events, without training: a periodogram of their times and types with the significance of each peak."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from heedful._checks import check_number, check_whole, shown
from heedful._errors import InvalidArgument
from heedful._plot import Axes, axes
from heedful._result import Result
from heedful._text import quantity
from heedful.ops import _lines, _power
from heedful.ops._power import Array, Events

MOST_EVENTS = 500_000
FEWEST = 20
SHOWN = 12

Kind = Literal["coherent", "within"]


@dataclass(frozen=True)
class Peak(Result):
    """A cycle.

    `kind` is "coherent" where all sequences share one clock and "within" where each has its own phase; `subject` says whether it
    is in the times, in the types given the times, or in both. `p_value` is the chance that any frequency stands out that far
    without a cycle. `strength` is the root of the share that the cycle's first harmonic has in all variation, from 0 to 1: for one clock
    and times the length of the mean vector of phases. `harmonics` counts the significant ones, the first included.
    """

    period: float
    p_value: float
    strength: float
    kind: Kind
    subject: Literal["times", "types", "times and types"]
    harmonics: int


@dataclass(frozen=True, eq=False)
class PowerSpectrum(Result):
    """Power over frequencies, with mean 1 where there is no cycle."""

    kind: Kind
    subject: Literal["times", "types"]
    frequencies: Array  # [F], turns for a unit of time
    power: Array  # [F]
    _not = ("frequencies", "power")

    @property
    def periods(self) -> Array:
        """`[F]`, in the unit of the times."""
        return 1 / self.frequencies


@dataclass(frozen=True, eq=False)
class Periodogram(Result):
    """Cycles of events, the most evident first, and the spectra in which they stand out."""

    peaks: tuple[Peak, ...]
    spectra: tuple[PowerSpectrum, ...]
    events: int
    sequences: int
    significance: float
    notes: tuple[str, ...]
    _not = ("spectra",)

    def __str__(self) -> str:
        head = f"{quantity(len(self.peaks), 'cycle')} in {quantity(self.events, 'event')} of {quantity(self.sequences, 'sequence')}"
        lines = [f"{head} (significance {self.significance:g})"]
        if self.peaks:
            lines.append(f"  {'period':>12}  {'p-value':>9}  strength  harmonics  clock         cycle of")
        for peak in self.peaks[:SHOWN]:
            clock = "one for all" if peak.kind == "coherent" else "one for each"
            chance = f"{peak.p_value:.1e}" if peak.p_value > 1e-99 else "< 1e-99"
            lines.append(
                f"  {peak.period:12.6g}  {chance:>9}  {peak.strength:8.3f}  {peak.harmonics:9d}  {clock:<12}  {peak.subject}"
            )
        if len(self.peaks) > SHOWN:
            lines.append(f"  and {quantity(len(self.peaks) - SHOWN, 'weaker cycle')}")
        return "\n".join([*lines, *self.notes])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Power over periods, the highest in each of 800 bins, with peaks marked; in grey where none was found."""
        ax = axes(ax)
        having = {(peak.kind, peak.subject) for peak in self.peaks}
        for spectrum in sorted(self.spectra, key=lambda one: (one.kind, one.subject) in having):
            periods, power = spectrum.periods, spectrum.power
            edges = np.geomspace(periods.min(), periods.max(), 801)
            bins = np.clip(np.searchsorted(edges, periods, "right") - 1, 0, 799)
            highest = np.full(800, np.nan)
            np.fmax.at(highest, bins, power)
            has = np.isfinite(highest)
            label = (
                f"{spectrum.subject}, {'one clock for all' if spectrum.kind == 'coherent' else 'one for each sequence'}"
            )
            look: dict[str, Any] = (
                {"label": label} if (spectrum.kind, spectrum.subject) in having else {"color": "0.85"}
            )
            ax.plot(np.sqrt(edges[1:] * edges[:-1])[has], highest[has], linewidth=0.8, **look)
        ax.set(xscale="log", yscale="log", xlabel="period", ylabel="power (1 without a cycle)")
        ax.set_ylim(bottom=0.5)
        for peak in self.peaks[:SHOWN]:
            ax.axvline(peak.period, color="0.4", linewidth=0.8, linestyle=":", zorder=0)
            ax.annotate(
                f"{peak.period:.5g}", (peak.period, 1), xycoords=("data", "axes fraction"), xytext=(2, -4),
                textcoords="offset points", rotation=90, va="top", fontsize="small",
            )  # fmt: skip
        if self.peaks:
            ax.legend(loc="upper left", fontsize="small", frameon=False)
        return ax


def periodogram(
    times: Any,
    types: Any = None,
    *,
    offsets: Any = None,
    period_range: Sequence[float] | None = None,
    max_frequencies: int = 65_536,
    significance: float = 0.01,
) -> Periodogram:
    r"""The cycles of event sequences: in when events happen, and in which type happens when.

    At each frequency f the events are turned by their phases, $z_i = e^{2\pi i f t_i}$, and summed: over all events (one clock for all sequences, as the
    calendar) and over those of each sequence (its own phase), for all events together and for each type less its share in the sequence, so that a rhythm
    of the times alone is no rhythm of the types. Sums are tapered by a Hann window. Squared and divided by their means they are close to Gamma
    laws where there is no cycle. A peak must stand out from these laws *and* from its neighbourhood, since trends, bursts and regular gaps
    raise whole ranges of frequencies, must be no wider than a cycle is, and have at least four turns in a span. p-values are Bonferroni's over all
    frequencies and sums. Multiples of a cycle's frequency are its harmonics; so are sums with a slower cycle that modulates it.

    Periods come from the sums over the events themselves, not from bins. Deterministic.

    Args:
        times: all events, sequence by sequence, `(N,)`.
        types: whole numbers `(N,)`.
        offsets: `(S + 1,)`: sequence s is `times[offsets[s]:offsets[s + 1]]`; None for one sequence.
        period_range: (shortest, longest). By default up to a quarter of the span; down to twice the 1st percentile of gaps for clocks of
            sequences, and for one clock as far as `max_frequencies` goes, but not below twice the unit to which times are rounded.
        max_frequencies: of each sum; more reach shorter periods.
        significance: of the peaks.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> times = np.sort(rng.integers(0, 365, 2000) * 24 + rng.normal(9, 2, 2000))  # hours; around nine o'clock
    >>> print(periodogram(times))
    1 cycle in 2,000 events of 1 sequence (significance 0.01)
            period    p-value  strength  harmonics  clock         cycle of
           24.0008    < 1e-99     0.869          3  one for all   times
    """
    check_whole(16, max_frequencies=max_frequencies)
    check_number(0, 1, significance=significance)
    events = _read(times, types, offsets)
    count, sequences = len(events.times), len(events.offsets) - 1
    empty = Periodogram((), (), count, sequences, significance, ())
    if count < FEWEST:
        return empty
    span = float(np.ptp(events.times))
    if span == 0:
        raise InvalidArgument("all events happen at one time; a cycle needs times that differ")
    low, high = _range(period_range)
    notes: list[str] = []
    spectra = _spectra(events, low, max_frequencies, notes)
    lowest = 1 / high if high else 0.0
    tests = 2 * sum(len(power.frequencies) for power in spectra)
    found = [line for power in spectra for line in _lines.lines(power, lowest, significance, tests)]
    kept = _lines.fundamentals(_lines.united(found))
    peaks = [peak for line in kept if (peak := _peak(line, spectra, tests, significance))]
    shown_spectra = tuple(
        PowerSpectrum(power.kind, power.subject, power.frequencies[at:], power.values[at:])  # type: ignore[arg-type]
        for power in spectra
        for at in [int(np.searchsorted(power.frequencies, max(lowest, _lines.LEAST_CYCLES / power.span)))]
        if at < len(power.frequencies)
    )
    ordered = tuple(peak for _, peak in sorted(peaks, key=lambda pair: -pair[0]))
    return Periodogram(ordered, shown_spectra, count, sequences, significance, tuple(notes))


def _peak(line: _lines.Line, spectra: list[_power.Power], tests: int, significance: float) -> tuple[float, Peak] | None:
    """A line's evidence and what it says, once its value at the events themselves holds too."""
    _lines.refine(line, tests)
    if line.evidence < -math.log(significance):
        return None
    parts = [line, *line.others]
    subjects = sorted({part.power.subject for part in parts})
    shared = any(part.power.kind == "coherent" for part in parts) or any(
        _lines.is_shared(line.frequency, power, significance) for power in spectra if power.subject in subjects
    )
    kind: Kind = "coherent" if shared else "within"
    best = max(parts, key=lambda part: part.evidence)
    peak = Peak(
        float(1 / line.frequency),
        math.exp(-best.evidence),
        max(part.strength for part in parts),
        kind,
        " and ".join(subjects),  # type: ignore[arg-type]
        1 + len({multiple for multiple, _ in line.overtones}),
    )
    return best.evidence, peak


def _spectra(events: Events, low: float | None, most: int, notes: list[str]) -> list[_power.Power]:
    rng = np.random.default_rng(0)
    sizes = np.diff(events.offsets)
    all_events = events
    if len(events.times) > MOST_EVENTS and len(sizes) > 1:
        order = rng.permutation(len(sizes))
        chosen = np.sort(order[: max(1, int(np.searchsorted(np.cumsum(sizes[order]), MOST_EVENTS)))])
        all_events = events.chosen(chosen)
        notes.append(f"one clock for all: {quantity(len(chosen), 'sequence')} of {len(sizes):,}, drawn at random")
    span = float(np.ptp(all_events.times))
    shortest = low if low is not None else 2 * _unit(all_events.times)
    spectra = _power.coherent(all_events, _highest(shortest, span, len(all_events.times), most))
    if len(sizes) == 1:
        return spectra
    pieces = _pieces(events)
    if pieces is None:
        return spectra
    sizes = np.diff(pieces.offsets)
    pairs = sizes * (sizes - 1) // 2
    if pairs.sum() > _power.MOST_PAIRS:
        order = rng.permutation(len(sizes))
        chosen = np.sort(order[: max(1, int(np.searchsorted(np.cumsum(pairs[order]), _power.MOST_PAIRS)))])
        pieces = pieces.chosen(chosen)
        notes.append(f"a clock for each: {quantity(len(chosen), 'sequence')} of {len(sizes):,}, drawn at random")
    gaps = np.abs(np.diff(pieces.times))[np.diff(pieces.sequence) == 0]
    shortest = low if low is not None else 2 * float(np.percentile(gaps[gaps > 0], 1))
    highest = _highest(shortest, float(pieces.spans.max()), len(pieces.times), most)
    return [*spectra, *_power.within(pieces, highest)]


def _highest(shortest: float, span: float, count: int, most: int) -> float:
    """The highest frequency: by the shortest period, the number of frequencies and that of events."""
    return min(1 / shortest if shortest else math.inf, min(most, 64 * count) / (_power.OVERSAMPLING * span))


def _pieces(events: Events) -> Events | None:
    """Sequences with three events and a span, long ones cut."""
    cuts = [np.arange(a, b, _power.LONGEST) for a, b in zip(events.offsets[:-1], events.offsets[1:], strict=True)]
    cut = Events(events.times, events.types, np.append(np.concatenate(cuts), len(events.times)))
    usable = np.flatnonzero((np.diff(cut.offsets) >= 3) & (cut.spans > 0))
    return cut.chosen(usable) if len(usable) else None


def _unit(times: Array) -> float:
    """The unit to which all times are rounded; 0 where there is none."""
    steps = np.diff(np.unique(times))
    unit = float(steps.min())
    ratio = steps / unit
    return unit if bool((np.abs(ratio - np.rint(ratio)) < 1e-6).all()) else 0.0


def _range(period_range: Sequence[float] | None) -> tuple[float | None, float | None]:
    if period_range is None:
        return None, None
    if isinstance(period_range, str) or not hasattr(period_range, "__len__") or len(period_range) != 2:
        raise InvalidArgument(f"period_range must be (shortest, longest); got {shown(period_range)}")
    low, high = period_range
    check_number(0, shortest=low, longest=high)
    if low >= high:
        raise InvalidArgument(
            f"period_range must be (shortest, longest), the shortest first; got {shown(period_range)}"
        )
    return float(low), float(high)


def _read(times: Any, types: Any, offsets: Any) -> Events:
    """Arguments as checked arrays: times from 0 on, types as codes where there are two or more, no empty sequence."""
    times = _flat("times", times)
    if times.dtype.kind not in "iuf":
        raise InvalidArgument(f"times must be numbers; got {times.dtype}")
    if not np.isfinite(times).all():
        raise InvalidArgument(
            f"{int((~np.isfinite(times)).sum())} of {times.size} times are NaN or infinite: drop these events"
        )
    offsets = np.array([0, len(times)]) if offsets is None else _flat("offsets", offsets)
    if (
        offsets.dtype.kind not in "iu"
        or len(offsets) < 2
        or offsets[0] != 0
        or offsets[-1] != len(times)
        or (np.diff(offsets) < 0).any()
    ):
        raise InvalidArgument(
            f"offsets must be whole numbers from 0 to the number of events, {len(times)}, in order; got {shown(offsets.tolist())}"
        )
    offsets = np.unique(offsets.astype(np.int64))
    codes = None
    if types is not None:
        types = _flat("types", types)
        if types.shape != times.shape or types.dtype.kind not in "iu":
            raise InvalidArgument(
                f"types must be {len(times)} whole numbers, one for each time; got {types.dtype} of shape {types.shape}"
            )
        names, codes = np.unique(types, return_inverse=True)
        codes = codes.astype(np.int64) if len(names) > 1 else None
    times = times - times.min() if len(times) else times
    return Events(times.astype(np.float64), codes, offsets)


def _flat(name: str, values: Any) -> Array:
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.ndim != 1:
        raise InvalidArgument(f"{name} must have one axis; got shape {array.shape}")
    return array

"""Cycles of events without training: sums against loops, laws without a cycle, and what is found in drawn and in real data."""

import cmath
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from heedful import InvalidArgument
from heedful.ops import _power
from heedful.ops import periodogram as module
from heedful.ops.periodogram import periodogram

SHARED = Path(__file__).parents[3] / "shared" / "data" / "events"
shared_data = pytest.mark.skipif(not SHARED.is_dir(), reason=f"there is no {SHARED}; it runs where that folder lies")


def joined(sequences):
    return np.concatenate(sequences), np.concatenate(([0], np.cumsum([len(s) for s in sequences])))


def rhythm(rng, count, span, period, depth, phase=0.0):
    """About so many times with the intensity 1 + depth cos(2 pi (t / period - phase))."""
    t = rng.uniform(0, span, int(count * (1 + depth)))
    return np.sort(t[rng.random(len(t)) < (1 + depth * np.cos(2 * np.pi * (t / period - phase))) / (1 + depth)])


def phase_clock(seed, sequences, n=48, kinds=6, period=7.3, noise=0.05):
    """S2 of the sheet: times without a rhythm, types by the phase of a clock that each sequence has for itself."""
    rng = np.random.default_rng(seed)
    times, types = [], []
    for _ in range(sequences):
        phase = rng.uniform(0, period)
        t = np.cumsum(rng.exponential(11.0, n))
        u, r = rng.random(n), rng.integers(kinds, size=n)
        times.append(t)
        types.append(np.where(u >= noise, np.floor(kinds * ((t + phase) / period % 1)).astype(int), r))
    return np.concatenate(times), np.concatenate(types), np.arange(sequences + 1) * n


def small(seed=0):
    """Three sequences on a grid of 1/4 between 0 and 100, so that bins round nothing."""
    rng = np.random.default_rng(seed)
    sequences = [np.sort(rng.choice(401, n, replace=False)) / 4 for n in (7, 11, 5)]
    sequences[1][0], sequences[1][-1] = 0.0, 100.0
    times, offsets = joined(sequences)
    return _power.Events(times, rng.integers(0, 3, len(times)), offsets)


def by_loops(events, kind, subject, frequency):
    """The statistic as the module's docstring says it, one event at a time."""
    bounds = list(itertools.pairwise(events.offsets.tolist()))
    types = events.types.tolist()
    span = max(events.times) - min(events.times)
    total = moment = 0.0
    if kind == "coherent":
        weight = [math.sin(math.pi * t / span) ** 2 for t in events.times]
    else:
        weight = []
        for a, b in bounds:
            length = events.times[b - 1] - events.times[a]
            gap = length / (b - a)
            weight += [
                math.sin(math.pi * (t - events.times[a] + gap) / (length + 2 * gap)) ** 2 for t in events.times[a:b]
            ]
    z = [w * cmath.exp(2j * math.pi * frequency * t) for w, t in zip(weight, events.times, strict=True)]
    if subject == "times":
        blocks = [(0, len(z))] if kind == "coherent" else bounds
        return sum(abs(sum(z[a:b])) ** 2 for a, b in blocks) / sum(w * w for w in weight)
    share = {(a, k): sum(types[i] == k for i in range(a, b)) / (b - a) for a, b in bounds for k in range(3)}
    if kind == "coherent":
        expected = [sum(weight[i] ** 2 * share[a, k] for a, b in bounds for i in range(a, b)) for k in range(3)]
        for k in range(3):
            sums = sum(z[i] * ((types[i] == k) - share[a, k]) for a, b in bounds for i in range(a, b))
            total += abs(sums) ** 2 / expected[k]
            moment += (
                sum(weight[i] ** 2 * share[a, k] * (1 - share[a, k]) for a, b in bounds for i in range(a, b))
                / expected[k]
            )
        return total / moment
    for a, b in bounds:
        same = sum(share[a, k] ** 2 for k in range(3))
        moment += (1 - same) * sum(w * w for w in weight[a:b])
        for i in range(a, b):
            for j in range(a, b):
                if i != j:
                    agree = (
                        (types[i] == types[j])
                        - share[a, types[i]]
                        - share[a, types[j]]
                        + same
                        + (1 - same) / (b - a - 1)
                    )
                    total += agree * (z[i] * z[j].conjugate()).real
    return 1 + total / moment


@pytest.mark.parametrize("kind", ["coherent", "within"])
def test_spectra_are_the_sums_of_the_formulas(kind):
    events = small()
    found = getattr(_power, kind)(events, 1.0)
    assert [power.subject for power in found] == ["times", "types"]
    for power in found:
        for frequency in (0.0317, 0.2, 0.731):
            assert math.isclose(power.at(frequency), by_loops(events, kind, power.subject, frequency), rel_tol=1e-9)
        assert math.isclose(power.frequencies[1], 1 / 200)
        assert len(power.frequencies) == 201
        exact = [by_loops(events, kind, power.subject, f) for f in power.frequencies[::17]]
        np.testing.assert_allclose(power.values[::17], exact, rtol=1e-8, atol=1e-8)
        assert power.values.max() <= power.largest * (1 + 1e-9)


def test_types_have_mean_one_over_all_their_orders():
    """Whatever the times: here three of five at one phase."""
    times = np.array([0.0, 3.0, 6.0, 7.1, 8.3])
    powers = []
    for order in itertools.permutations([0, 0, 1, 1, 2]):
        _, types = _power.within(_power.Events(times, np.array(order), np.array([0, 5])), 1.0)
        powers.append(types.at(1 / 3))
    assert math.isclose(np.mean(powers), 1, rel_tol=1e-12)


def test_laws_without_a_cycle():
    """Mean 1 and variance 1 / shape of all four, over sequences of unequal lengths and types of unequal shares."""
    rng = np.random.default_rng(0)
    drawn = {}
    for _ in range(30):
        times, offsets = joined([np.sort(rng.uniform(0, 100, n)) for n in rng.integers(5, 60, 40)])
        types = rng.choice(4, len(times), p=[0.6, 0.2, 0.15, 0.05])
        events = _power.Events(times - times.min(), types, offsets)
        for power in _power.coherent(events, 1.0) + _power.within(events, 1.0):
            drawn.setdefault((power.kind, power.subject), []).append((power.values[20::4], power.shape))
    assert len(drawn) == 4
    for rows in drawn.values():
        values, shape = np.concatenate([v for v, _ in rows]), np.mean([s for _, s in rows])
        assert abs(values.mean() - 1) < 0.03
        assert 0.85 < values.var() * shape < 1.15


def poisson(rng, sequences=40, mean=30, kinds=4):
    times, offsets = joined([np.sort(rng.uniform(0, 100, n)) for n in rng.poisson(mean, sequences) + 1])
    return times, rng.integers(0, kinds, len(times)), offsets


def regular(rng, sequences=100, n=40):
    """Gaps that vary by a third: a broad rise of power, and no clock."""
    times = np.cumsum(rng.gamma(9, 1 / 9, (sequences, n)), axis=1)
    return times.ravel(), rng.integers(0, 3, times.size), np.arange(sequences + 1) * n


def alternating(rng, sequences=100, n=40):
    times = np.cumsum(rng.gamma(4, 1 / 4, (sequences, n)), axis=1)
    types = (np.arange(n) + rng.integers(0, 2, (sequences, 1))) % 2
    return times.ravel(), types.ravel(), np.arange(sequences + 1) * n


def bursts(rng, sequences=100):
    def one():
        centres = rng.uniform(0, 1000, rng.poisson(6) + 1)
        return np.sort(np.concatenate([c + rng.exponential(1.0, rng.poisson(8) + 1) for c in centres]))

    times, offsets = joined([one() for _ in range(sequences)])
    return times, rng.integers(0, 3, len(times)), offsets


def drifting(rng, sequences=100):
    times, offsets = joined([np.sort(1000 * rng.beta(2, 5, n)) for n in rng.poisson(40, sequences) + 2])
    return times, (rng.random(len(times)) < times / 1000).astype(int), offsets


def dates(rng, sequences=100):
    """Whole days: the unit is no cycle."""
    times, offsets = joined([np.sort(rng.integers(0, 365, 30)) * 86400 for _ in range(sequences)])
    return times, rng.integers(0, 3, len(times)), offsets


def test_nothing_is_found_where_there_is_nothing():
    """Poisson times and random types, 50 seeds at a significance of 0.05: 2.5 alarms expected at most, and 7 in 1 of 200 cases."""
    alarms = 0
    for seed in range(50):
        times, types, offsets = poisson(np.random.default_rng(seed))
        alarms += bool(periodogram(times, types, offsets=offsets, significance=0.05, max_frequencies=8192).peaks)
    assert alarms <= 6


@pytest.mark.parametrize("draw", [regular, alternating, bursts, drifting, dates])
def test_what_is_no_cycle(draw):
    for seed in range(3):
        times, types, offsets = draw(np.random.default_rng(seed))
        assert periodogram(times, types, offsets=offsets).peaks == ()


def test_a_clock_of_each_sequence_in_the_types():
    """S2 of the sheet: 7.3 within 0.5 %."""
    times, types, offsets = phase_clock(0, 2000)
    (peak,) = periodogram(times, types, offsets=offsets).peaks
    assert abs(peak.period / 7.3 - 1) < 0.0005
    assert (peak.kind, peak.subject) == ("within", "types")
    assert peak.p_value < 1e-100
    assert peak.harmonics >= 5
    assert periodogram(times, offsets=offsets).peaks == ()
    few = phase_clock(1, 30)
    assert abs(periodogram(*few[:2], offsets=few[2]).peaks[0].period / 7.3 - 1) < 0.005


def test_a_rhythm_of_the_times_is_none_of_the_types():
    rng = np.random.default_rng(0)
    times, offsets = joined([rhythm(rng, 40, 1000, 24, 1.0) for _ in range(200)])
    (peak,) = periodogram(times, rng.integers(0, 3, len(times)), offsets=offsets).peaks
    assert (peak.kind, peak.subject, peak.harmonics) == ("coherent", "times", 1)
    assert abs(peak.period / 24 - 1) < 1e-3
    assert abs(peak.strength - 0.5) < 0.02  # half the depth: the length of the mean vector of phases
    types = (rng.random(len(times)) < 0.5 + 0.4 * np.cos(2 * np.pi * times / 24)).astype(int)
    (peak,) = periodogram(times, types, offsets=offsets).peaks
    assert peak.subject == "times and types"
    even, offsets = joined([np.sort(rng.uniform(0, 1000, 40)) for _ in range(200)])
    types = (rng.random(len(even)) < 0.5 + 0.3 * np.cos(2 * np.pi * even / 24)).astype(int)
    (peak,) = periodogram(even, types, offsets=offsets).peaks
    assert (peak.kind, peak.subject) == ("coherent", "types")
    assert abs(peak.period / 24 - 1) < 1e-3


@pytest.mark.parametrize("sequences", [3, 100])
def test_one_clock_or_one_for_each(sequences):
    rng = np.random.default_rng(1)
    for kind in ("coherent", "within"):
        phases = np.zeros(sequences) if kind == "coherent" else rng.random(sequences)
        times, offsets = joined([rhythm(rng, 200, 1000, 24, 0.9, phase) for phase in phases])
        (peak,) = periodogram(times, offsets=offsets).peaks
        assert (peak.kind, peak.subject) == (kind, "times")
        assert abs(peak.period / 24 - 1) < 5e-3


def test_weak_cycles_and_rare_events():
    rng = np.random.default_rng(2)
    times, offsets = joined([rhythm(rng, 40, 1000, 24, 0.2) for _ in range(200)])
    assert [round(p.period, 1) for p in periodogram(times, offsets=offsets).peaks] == [24.0]
    # Customers who come once in months, at noon: gaps are far longer than the cycle.
    visits = np.cumsum(rng.integers(30, 120, (500, 4)), axis=1) * 24 + rng.normal(12, 3, (500, 4))
    peaks = periodogram(visits.ravel(), offsets=np.arange(501) * 4).peaks
    assert abs(peaks[0].period / 24 - 1) < 1e-3


def test_harmonics_and_modulations_belong_to_their_cycle():
    rng = np.random.default_rng(3)
    t = np.sort(rng.uniform(0, 365 * 24, 200_000))
    day = 1 + 0.6 * np.cos(2 * np.pi * t / 24) + 0.2 * np.cos(4 * np.pi * t / 24)
    week = np.where(t // 24 % 7 < 5, 1, 0.6)
    peaks = periodogram(t[rng.random(len(t)) < day * week / 2]).peaks
    assert [round(peak.period, 1) for peak in peaks] == [24.0, 168.0]
    assert abs(peaks[1].period / 168 - 1) < 1e-4
    assert (peaks[0].harmonics, peaks[1].harmonics >= 3) == (2, True)
    t = np.sort(rng.uniform(0, 3000, 60_000))
    both = 1 + 0.2 * np.cos(2 * np.pi * t / 24) + 0.5 * np.cos(4 * np.pi * t / 24)  # the half is stronger
    (peak,) = periodogram(t[rng.random(len(t)) < both / 1.7]).peaks
    assert (round(peak.period, 2), peak.harmonics) == (24.0, 2)


def test_units_origins_and_types_do_not_matter():
    times, types, offsets = phase_clock(2, 60)
    first = periodogram(times, types, offsets=offsets)
    again = periodogram(torch.from_numpy(times), torch.from_numpy(types), offsets=torch.from_numpy(offsets))
    assert again.peaks == first.peaks
    whole = np.rint((times + 1.4e9) * 1000).astype(np.int64)
    later = periodogram(whole, 7 - 3 * types, offsets=offsets, period_range=(500, 130_000))
    assert abs(later.peaks[0].period / first.peaks[0].period / 1000 - 1) < 1e-4
    assert len(later.peaks) == len(first.peaks) == 1
    empty = np.insert(offsets, 5, offsets[5])
    assert periodogram(times, types, offsets=empty).peaks == first.peaks


def test_large_data_is_drawn_from_and_says_so(monkeypatch):
    monkeypatch.setattr(module, "MOST_EVENTS", 2000)
    monkeypatch.setattr(_power, "MOST_PAIRS", 40_000)
    times, types, offsets = phase_clock(3, 100)
    result = periodogram(times, types, offsets=offsets)
    assert result.notes == (
        "one clock for all: 41 sequences of 100, drawn at random",
        "a clock for each: 35 sequences of 100, drawn at random",
    )
    assert "35 sequences of 100" in str(result)
    assert abs(result.peaks[0].period / 7.3 - 1) < 0.005
    assert result.peaks == periodogram(times, types, offsets=offsets).peaks
    # Long sequences are cut: their pieces keep the cycle.
    monkeypatch.setattr(_power, "LONGEST", 20)
    assert abs(periodogram(times, types, offsets=offsets).peaks[0].period / 7.3 - 1) < 0.01


def test_the_result_reads_draws_and_serialises():
    times, types, offsets = phase_clock(4, 60)
    result = periodogram(times, types, offsets=offsets, period_range=(1.0, 50.0))
    assert [(s.kind, s.subject) for s in result.spectra] == [
        ("coherent", "times"), ("coherent", "types"), ("within", "times"), ("within", "types"),
    ]  # fmt: skip
    for spectrum in result.spectra:
        assert spectrum.periods.max() <= 50 * (1 + 1e-9)
        assert spectrum.periods.min() >= 1 - 1e-9
        assert spectrum.power.shape == spectrum.frequencies.shape
    types_within = result.spectra[3]
    assert abs(types_within.periods[types_within.power.argmax()] / 7.3 - 1) < 0.01
    lines = str(result).splitlines()
    assert lines[0] == "1 cycle in 2,880 events of 60 sequences (significance 0.01)"
    assert "one for each" in lines[2]
    assert json.loads(json.dumps(result.to_dict()))["peaks"][0]["kind"] == "within"
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    ax = result.plot()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["types, one for each sequence"]
    assert [text.get_text() for text in ax.texts] == [f"{result.peaks[0].period:.5g}"]


def test_few_events_have_no_cycle():
    assert periodogram(np.arange(19.0)).peaks == ()
    assert periodogram(np.zeros(0), offsets=[0, 0]).spectra == ()
    pairs = np.sort(np.random.default_rng(0).uniform(0, 100, (30, 2)), axis=1).ravel()
    assert [s.kind for s in periodogram(pairs, offsets=np.arange(31) * 2).spectra] == ["coherent"]
    one_each = periodogram(pairs, np.repeat(np.arange(30), 2), offsets=np.arange(31) * 2)
    assert [s.subject for s in one_each.spectra] == ["times"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"times": [[0.0, 1.0]]}, r"times must have one axis; got shape \(1, 2\)"),
        ({"times": [0.0, math.nan]}, "1 of 2 times are NaN or infinite: drop these events"),
        ({"times": ["a", "b"]}, "times must be numbers"),
        ({"times": np.ones(50)}, "all events happen at one time"),
        ({"offsets": [0, 3]}, "offsets must be whole numbers from 0 to the number of events, 50, in order; got"),
        ({"offsets": [0, 30, 20, 50]}, "offsets must be whole numbers"),
        ({"offsets": [0.0, 50.0]}, "offsets must be whole numbers"),
        ({"types": np.zeros(49, dtype=int)}, "types must be 50 whole numbers, one for each time; got int64 of shape"),
        ({"types": np.zeros(50)}, "got float64 of shape"),
        ({"period_range": (5, 2)}, r"\(shortest, longest\), the shortest first; got \(5, 2\)"),
        ({"period_range": 3}, r"period_range must be \(shortest, longest\); got 3"),
        ({"period_range": (0, 3)}, "shortest must be a number above 0; got 0"),
        ({"significance": 1}, "significance must be a number above 0 and below 1; got 1"),
        ({"max_frequencies": 3}, "max_frequencies must be a whole number from 16 on; got 3"),
    ],
)  # fmt: skip
def test_what_is_refused(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        periodogram(**{"times": np.arange(50.0)} | arguments)


@pytest.mark.data
@shared_data
def test_departures_go_by_day_and_week():
    """The day within 0.1 % without being told, and the week."""
    data = np.load(SHARED / "nyc_flights_2013.npz")
    sizes, train = np.diff(data["offsets"]), data["split"] == 0
    chosen = np.repeat(train, sizes)
    offsets = np.concatenate(([0], np.cumsum(sizes[train])))
    peaks = periodogram(data["times_min"][chosen], data["dest"][chosen], offsets=offsets).peaks
    assert abs(peaks[0].period / 1440 - 1) < 1e-4
    assert (peaks[0].kind, peaks[0].subject) == ("coherent", "times and types")
    assert any(abs(peak.period / 10080 - 1) < 1e-3 for peak in peaks)
    assert len(peaks) <= 4


@pytest.mark.data
@shared_data
def test_badges_go_by_day_and_week():
    data = np.load(SHARED / "stackoverflow_badges.npz")
    peaks = periodogram(data["times_ms"], data["types"], offsets=data["offsets"]).peaks
    day = 86_400_000
    assert abs(peaks[0].period / day - 1) < 1e-3
    assert abs(peaks[1].period / (7 * day) - 1) < 1e-3
    assert {peak.kind for peak in peaks} == {"coherent"}


@pytest.mark.data
@shared_data
@pytest.mark.parametrize("name", ["hawkes1", "hawkes2", "self_correcting", "stationary_renewal"])
def test_processes_without_a_clock(name):
    data = np.load(SHARED / "tpp_unmarked.npz")
    assert periodogram(data[f"{name}_times"], offsets=data[f"{name}_offsets"]).peaks == ()

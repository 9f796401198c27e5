"""What the recipes of events stand on: drawn worlds with the best that is possible, count tables, laws of waiting times, splits."""

import math

import numpy as np
import pytest
from experiments import counting, events, renewal, worlds
from experiments.counting import CountTable
from experiments.events import Events, Split

from heedful._errors import InvalidArgument, Unsupported

with_data = pytest.mark.skipif(
    not events.BESIDE.is_dir(), reason="the data folder is not beside the checkout; it runs where shared/data/events is"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("events")


def best(name, seed=1):
    generate, chances, _, count = worlds.WORLDS[name]
    drawn = generate(count, seed)
    return drawn, chances(drawn)


def test_gap_switch_is_drawn_in_its_order():
    drawn = worlds.gap_switch(3, 5)
    random = np.random.default_rng(5)
    for types, times in drawn.pairs():
        gaps = random.uniform(0, 4, 64)
        first = random.integers(8)
        uniform, other = random.random(64), random.integers(8, size=64)
        assert types[0] == first
        np.testing.assert_array_equal(times, np.cumsum(gaps))
        for i in range(1, 64):
            assert types[i] == (other[i] if uniform[i] < 0.1 else (types[i - 1] + 1 + math.floor(gaps[i])) % 8)


def test_gap_switch_has_its_best():
    assert worlds.gap_switch_best(True) == pytest.approx(0.9125)
    assert worlds.gap_switch_best(False) == pytest.approx(0.2375)
    drawn, chances = best("gap switch")
    figures = counting.measured(chances, drawn.types[drawn.targets])
    assert figures["accuracy"] == pytest.approx(0.9125, abs=0.005)
    # The entropy of a type that is expected nine times in ten and else drawn among eight.
    right, wrong = 0.9125, 0.1 / 8
    assert figures["nll"] == pytest.approx(-right * math.log(right) - 7 * wrong * math.log(wrong), abs=0.02)


def test_phase_clock_has_its_best():
    drawn, chances = best("phase clock")
    answers = drawn.types[drawn.targets]
    places = worlds.places(drawn)
    assert places[:3].tolist() == [1, 2, 3]
    np.testing.assert_allclose(chances.sum(1), 1)
    assert counting.measured(chances, answers)["accuracy"] == pytest.approx(0.918, abs=0.0005)
    late = places >= 16
    assert counting.measured(chances[late], answers[late])["accuracy"] == pytest.approx(0.938, abs=0.0006)


def test_posterior_of_the_phase_by_hand():
    """After one event at time 0 the phase is in the sector of its type, nineteen times of twenty and a sixth of the rest."""
    drawn = events.listed([(np.array([2, 3]), np.array([0.0, 7.3 / 6]))], tuple("012345"))
    chances = worlds.phase_clock_chances(drawn, 6000)[0]
    inside = 0.95 + 0.05 / 6
    np.testing.assert_allclose(chances[3], 0.95 * inside + 0.05 / 6, rtol=1e-3)
    np.testing.assert_allclose(chances[0], 0.95 * 0.05 / 6 + 0.05 / 6, rtol=1e-3)


def test_marked_hawkes_has_its_best():
    drawn, chances = best("marked Hawkes")
    figures = counting.measured(chances, drawn.types[drawn.targets])
    assert figures["accuracy"] == pytest.approx(0.6419, abs=5e-5)
    assert figures["nll"] == pytest.approx(0.8042, abs=5e-5)
    rates = np.bincount(drawn.types) / (100 * len(drawn))
    np.testing.assert_allclose(rates, [0.271, 0.142, 0.142], atol=0.012)


def test_intensities_are_the_sums_of_the_definition():
    drawn = worlds.hawkes(2, 3)
    wanted = []
    for types, times in drawn.pairs():
        for i in range(1, len(times)):
            row = [0.20, 0.02, 0.02]
            for k in range(3):
                for j, before in zip(types[:i], times[:i], strict=True):
                    alpha, beta = worlds.WEIGHT[k, j], worlds.DECAY[k, j]
                    row[k] += alpha * beta * math.exp(-beta * (times[i] - before))
            wanted.append(row)
    np.testing.assert_allclose(worlds.hawkes_intensities(drawn), wanted, rtol=1e-12)


@pytest.mark.parametrize(("name", "most"), [("gap switch", 0.25), ("phase clock", 0.205), ("marked Hawkes", 0.5)])
def test_order_alone_says_little_of_a_world(name, most):
    generate, _, count, tests = worlds.WORLDS[name]
    learned = generate(count, 0)
    split = Split(learned.take(np.arange(count - 100)), learned.take(np.arange(count - 100, count)), generate(tests, 1))
    figures = counting.grams(split)
    assert list(figures) == ["majority", "Markov 1", "Markov 2", "Markov 3"]
    assert max(row["accuracy"] for row in figures.values()) <= most
    assert figures["Markov 1"]["accuracy"] > figures["majority"]["accuracy"]


def test_count_table_by_hand():
    table = CountTable(3, weight=2.0).fit([np.array([0, 0, 1, 1]), np.array([4, 5, 4, 4])], np.array([0, 1, 2, 2]))
    shares = np.array([2, 2, 3]) / 7
    by_first = {0: (np.array([1, 1, 0]) + 2 * shares) / 4, 1: (np.array([0, 0, 2]) + 2 * shares) / 4}
    asked = table.chances([np.array([0, 1, 0, 7, -1]), np.array([4, 4, 6, 4, 4])])
    np.testing.assert_allclose(asked[0], (np.array([1, 0, 0]) + 2 * by_first[0]) / 3)
    np.testing.assert_allclose(asked[1], (np.array([0, 0, 2]) + 2 * by_first[1]) / 4)
    np.testing.assert_allclose(asked[2], by_first[0])
    np.testing.assert_allclose(asked[3:], np.tile(shares, (2, 1)))
    np.testing.assert_allclose(
        list(counting.measured(asked[:2], np.array([0, 0])).values()),
        [0.5, -np.log(asked[:2, 0]).mean()],
    )


def test_keys_stop_at_the_beginning_of_a_sequence():
    drawn = events.listed(
        [(np.array([1, 2, 0]), np.array([1.0, 3.0, 7.0])), (np.array([2]), np.array([4.0])), (np.array([0, 1]), np.array([0.5, 1.0]))],
        ("a", "b", "c"),
    )  # fmt: skip
    assert drawn.targets.tolist() == [1, 2, 5]
    assert [key.tolist() for key in counting.history(drawn, 3)] == [[1, 2, 0], [-1, 1, -1], [-1, -1, -1]]
    assert counting.gaps(drawn).tolist() == [2.0, 4.0, 0.5]
    assert counting.log_bins(np.array([0.5, 1.5, 15, 150]), 1, 100, 3).tolist() == [0, 1, 2, 3]


def test_sequences_are_taken_and_joined():
    drawn = worlds.gap_switch(7, 2, n=11)
    drawn = Events(drawn.types, drawn.times, drawn.starts, drawn.names, {"double": 2 * drawn.types}, 50.0)
    some = drawn.take(np.array([5, 1]))
    np.testing.assert_array_equal(some.of(0), drawn.of(5))
    np.testing.assert_array_equal(some.of(1), drawn.of(1))
    np.testing.assert_array_equal(some.marks["double"], 2 * some.types)
    mask = np.arange(7) < 3
    both = Split(drawn.take(mask), drawn.take(~mask), some).fitting
    assert len(both) == 7
    assert both.end == 50.0
    np.testing.assert_array_equal(both.starts, drawn.starts)
    np.testing.assert_array_equal(both.times, drawn.times)
    np.testing.assert_array_equal(both.marks["double"], drawn.marks["double"])


def poisson(rate, count, seed, end=100.0):
    random = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        times = np.sort(random.uniform(0, end, random.poisson(rate * end)))
        sequences.append((np.zeros(len(times), np.int64), times))
    return events.listed(sequences, ("event",), end)


def test_one_rate_on_a_process_of_one_rate():
    figures = renewal.constant_rate(poisson(0.7, 300, 0), poisson(0.7, 300, 1))
    assert figures["rate"] == pytest.approx(0.7, abs=0.01)
    assert figures["nll"] == pytest.approx(1 - math.log(0.7), abs=0.02)


def test_log_normal_waits_are_found_though_the_last_is_cut():
    random = np.random.default_rng(0)
    sequences = []
    for _ in range(500):
        times = np.cumsum(random.lognormal(0.5, 0.8, 60))
        times = times[times < 20.0]
        sequences.append((np.zeros(len(times), np.int64), times))
    drawn = events.listed(sequences, ("event",), 20.0)
    figures = renewal.log_normal(drawn, drawn)
    assert figures["location"] == pytest.approx(0.5, abs=0.03)
    assert figures["scale"] == pytest.approx(0.8, abs=0.03)
    gaps, cut = renewal.waits(drawn)
    assert len(cut) == 500
    assert gaps.sum() + cut.sum() == pytest.approx(500 * 20.0)


def test_true_likelihood_against_an_integral_by_steps():
    times = np.array([0.4, 0.45, 2.0, 3.1])
    base, parts = renewal.TRUE_HAWKES["hawkes2"]

    def intensity(t):
        return base + sum(
            alpha * math.exp(-beta * (t - before)) for alpha, beta in parts for before in times if before < t
        )

    grid = np.linspace(0, 5, 500_001)
    past = np.subtract.outer(grid, times)
    value = np.full(len(grid), base)
    for alpha, beta in parts:
        value += (alpha * np.exp(-beta * past) * (past > 0)).sum(1)
    wanted = (np.trapezoid(value, grid) - sum(math.log(intensity(t)) for t in times)) / 4
    drawn = events.listed([(np.zeros(4, np.int64), times)], ("event",), 5.0)
    assert renewal.true_hawkes("hawkes2", drawn) == pytest.approx(wanted, abs=2e-4)


def test_what_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "BESIDE", tmp_path / "nowhere")
    with pytest.raises(Unsupported, match=r"there is no stackoverflow_badges\.npz in"):
        events.badges(tmp_path, 1)
    with pytest.raises(InvalidArgument, match="split must be 1 to 5; got 6"):
        events.badges(tmp_path, 6)
    with pytest.raises(InvalidArgument, match="target must be dest or origin"):
        events.flights(tmp_path, "carrier")
    with pytest.raises(InvalidArgument, match="there is no process 'hawkes3'"):
        events.process(tmp_path, "hawkes3")
    with pytest.raises(InvalidArgument, match="no end"):
        renewal.waits(worlds.gap_switch(2, 0))


@with_data
@pytest.mark.parametrize(("split", "gap_table"), [(1, 46.27), (2, 46.00), (3, 46.68), (4, 46.42), (5, 46.36)])
def test_tables_of_badges(folder, split, gap_table):
    data = events.badges(folder, split)
    assert [len(part) for part in data] == [2842, 300, 1326]
    figures = counting.badge_tables(data)
    assert 100 * figures[counting.GAP_TABLE]["accuracy"] == pytest.approx(gap_table, abs=0.0055)
    if split == 1:
        assert len(data.test.targets) == 95_907
        accuracies = [100 * figures[name]["accuracy"] for name in ("majority", "Markov 1", "Markov 2")]
        np.testing.assert_allclose(accuracies, [42.89, 44.48, 44.82], atol=0.011)


@with_data
@pytest.mark.parametrize(
    ("target", "wanted"),
    [("dest", (27.3, 31.0, 33.5, 40.7, 42.4)), ("origin", (52.5, 60.0, 59.4, 70.3, 68.2))],
)
def test_tables_of_flights(folder, target, wanted):
    data = events.flights(folder, target)
    assert [len(part) for part in data] == [2215, 316, 632]
    figures = {name: 100 * row["accuracy"] for name, row in counting.flight_tables(data).items()}
    names = ["", ", gap", ", hour", ", hour, gap", ", quarter-hour"]
    np.testing.assert_allclose([figures[f"last destination{name}"] for name in names], wanted, atol=0.051)
    assert figures[counting.TIMETABLE] > {"dest": 76, "origin": 94}[target]


@with_data
@pytest.mark.parametrize(("name", "nll"), [("hawkes1", 0.5010), ("hawkes2", -0.0459)])
def test_processes_have_their_true_likelihood(folder, name, nll):
    data = events.process(folder, name)
    assert [len(part) for part in data] == [700, 100, 200]
    assert renewal.true_hawkes(name, data.test) == pytest.approx(nll, abs=5e-5)
    one_rate, log_normal = (law(data.fitting, data.test)["nll"] for law in (renewal.constant_rate, renewal.log_normal))
    assert nll < log_normal < one_rate


@with_data
def test_the_last_fifth_of_the_taxis_is_the_test(folder):
    assert [len(part) for part in events.process(folder, "taxi")] == [128, 18, 36]

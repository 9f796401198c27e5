"""Events that are not as expected: one-time customers, mixed dates, names in another order, drifts, large catalogues."""

import tracemalloc

import numpy as np
import pandas as pd
import pytest
import torch

from drawn import flat, waits
from heedful import InvalidArgument
from heedful.events import NextEvent, periods
from heedful.events import _answers as answers

SMALL = {"embed_dim": 16, "num_heads": 2, "layers": 1, "components": 4, "lr": 0.01, "random_state": 0, "clock": "none"}
TRAIN = waits(60, 0)


@pytest.fixture(scope="module")
def model():
    return NextEvent(**SMALL, epochs=6, predict_dtype="float64").fit(TRAIN)


def test_times_at_go_by_the_names_of_sequences(model):
    frame = pd.concat(
        pd.DataFrame({"sequence": name, "time": times - times[-1] + 100, "type": kinds})
        for name, (kinds, times) in zip(("zoe", "adam"), TRAIN, strict=False)
    )
    at = pd.Series({"adam": 103.0, "zoe": 100.05})
    np.testing.assert_array_equal(model.predict_proba(frame, at=at), model.predict_proba(frame, at=[100.05, 103.0]))
    several = pd.concat((frame, frame.assign(sequence=frame["sequence"] + " again")))
    index = ["zoe again", "adam again", "adam", "zoe"]
    by_name = NextEvent(**SMALL, epochs=1).fit(several, sample_weight=pd.Series([1.0, 2.0, 3.0, 4.0], index=index))
    by_place = NextEvent(**SMALL, epochs=1).fit(several, sample_weight=[4.0, 3.0, 1.0, 2.0])
    np.testing.assert_array_equal(by_name.predict_proba(frame), by_place.predict_proba(frame))


def test_dates_of_every_kind_are_the_same_times():
    stamps = pd.date_range("2024-01-01", periods=20, freq="h")
    kinds = np.array(["a", "b"] * 10)
    model = NextEvent(**SMALL, epochs=1).fit([(kinds, stamps.to_numpy())] * 12)
    forms = [
        stamps.to_pydatetime(), stamps.to_numpy("datetime64[ns]"), stamps.to_numpy("datetime64[s]"), list(stamps),
        pd.Series(stamps.tz_localize("UTC").tz_convert("Asia/Tokyo")), list(stamps.tz_localize("Europe/Paris").tz_convert("UTC") + pd.Timedelta(hours=1)),
    ]  # fmt: skip
    times = model.predict_time([(kinds, form) for form in forms])
    assert (times == times[0]).all()
    ats = [stamps[-1] + pd.Timedelta(hours=1)] * 6
    wanted = model.predict_proba([(kinds, form) for form in forms], at=np.array(ats, dtype="datetime64[us]"))
    zoned = [at.tz_localize("UTC").tz_convert("Asia/Tokyo") for at in ats]
    np.testing.assert_array_equal(model.predict_proba([(kinds, form) for form in forms], at=zoned), wanted)
    for broken, said in (
        ([(kinds, stamps.to_numpy()), (kinds, np.arange(20.0))], "dates in some sequences and numbers in others"),
        ([(kinds, [*stamps[:-1], pd.NaT])], "hold NaT at 19"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            model.predict(broken)
    late = NextEvent(**SMALL, epochs=1).fit([(kinds, stamps.to_numpy())] * 12)
    assert not np.isnat(late._dates(np.array([1e300, 0.0]))).any()


def test_sequences_of_one_event_are_never_all_that_is_held_out():
    rng = np.random.default_rng(0)
    for seed in range(6):
        X = [(rng.integers(0, 2, k), np.cumsum(rng.exponential(1, k))) for k in np.where(rng.random(60) < 0.1, 4, 1)]
        X[0] = (np.array([0, 1, 0]), np.array([0.0, 1.0, 2.0]))
        fitted = NextEvent(**SMALL | {"random_state": seed}, epochs=1).fit(X)
        assert np.isfinite(fitted.training_.epochs[0].loss)
    one = NextEvent(**SMALL, epochs=1, validation_fraction=0.9).fit([X[0], (np.array([1]), np.array([3.0]))])
    assert one.training_.epochs[0].held_out == {}


def test_shorter_waits_than_ever_are_not_taken_for_the_least(model):
    """A drift shows; only waits of 0, at which there is no density, count as the least gap."""
    network, least = model.network_.double(), model.least_gap_
    times = np.cumsum(np.full(9, least / 100))
    kinds = np.array(["quick"] * 9)
    with torch.no_grad():
        states = network.states(
            torch.zeros(1, 9, dtype=torch.long),
            torch.tensor(times[None]),
            None,
            torch.zeros(1, 9, 0),
            torch.zeros(1, 0),
        )
        own = -network.waits(states[:, :-1]).log_prob(torch.tensor(np.diff(times)[None])).mean()
    network.float()
    assert model.evaluate([(kinds, times)]).time_nll == pytest.approx(own.item(), rel=1e-6)
    tied = model.evaluate([(kinds, np.zeros(9))])
    assert np.isfinite(tied.time_nll)
    assert len(tied.levels) == 0
    assert tied.calibration_error is None
    assert "waits" in str(tied)


def test_starts_are_no_events_of_a_clock():
    rng = np.random.default_rng(0)
    days = np.sort(rng.integers(0, 300, 200)) * 24.0
    X = {
        "types": [rng.integers(0, 2, 5) for _ in days],
        "times": [day + np.sort(rng.uniform(0, 400, 5)) for day in days],
    }
    options = SMALL | {"epochs": 1, "clock": "auto"}
    started = NextEvent(**options).fit(X | {"starts": days})
    assert (started.clock_, started.cycles_) == ([], [])
    assert started.is_started_
    with pytest.raises(InvalidArgument, match="in fit it did not; leave starts out"):
        NextEvent(**options).fit(X).predict(X | {"starts": days})


def test_a_column_of_types_that_is_not_there_is_noticed():
    frame = pd.DataFrame({"sequence": np.repeat(range(9), 7), "time": np.tile(np.arange(7.0), 9)})
    with pytest.raises(InvalidArgument, match="X has no column 'kind'"):
        NextEvent(**SMALL, epochs=1, type="kind").fit(frame)
    with pytest.warns(UserWarning, match="X has no column 'type': events have no types"):
        untyped = NextEvent(**SMALL, epochs=1).fit(frame)
    with pytest.warns(UserWarning, match="no column 'type'"):
        assert untyped.score(frame) == -untyped.evaluate(frame).time_nll
    with pytest.raises(InvalidArgument, match="two columns called 'time'"):
        NextEvent(**SMALL).fit(pd.concat((frame, frame["time"]), axis=1))


def test_marks_with_gaps_and_columns_that_were_named():
    marks = {
        "load": [[1.0, None, 3.0, *([2.0] * (len(times) - 3))] for _, times in TRAIN],
        "kind": [["x"] * len(times) for _, times in TRAIN],
    }
    X = {"types": [kinds for kinds, _ in TRAIN], "times": [times for _, times in TRAIN], "marks": marks}
    fitted = NextEvent(**SMALL, epochs=1).fit(X)
    assert [("levels" in part) for part in fitted.covariates_["marks"]] == [False, True]
    assert np.isfinite(fitted.predict_proba(X)).all()
    with pytest.raises(InvalidArgument, match="marks names 'speed', and X has no such column"):
        NextEvent(**SMALL, marks="speed").fit(X)
    with pytest.raises(InvalidArgument, match="marks names 'load'"):
        NextEvent(**SMALL, marks="load").fit(TRAIN)
    wide = X | {"marks": {"load": [np.zeros((len(times), 2)) for _, times in TRAIN]}}
    with pytest.raises(InvalidArgument, match="give one for each event"):
        NextEvent(**SMALL).fit(wide)


@pytest.mark.parametrize(
    ("X", "said"),
    [
        ({"times": np.arange(9.0), "types": list("ababababa")}, "flat and there are no offsets"),
        ({"times": [[1.0, 2.0]], "types": ["ab"]}, "sequence 0 has 2 times and 0 types"),
        ((list("ab"), [1.0, 2.0]), r"text where times are expected; .* \[\(types, times\)\]"),
        ([np.zeros(3)] * 4, None),
    ],
)
def test_forms_that_are_nearly_right(X, said):
    if said is None:
        fitted = NextEvent(**SMALL, epochs=1).fit(X)
        assert np.isfinite(fitted.predict_time(X)).all(), "all at once, a scale of time there is not"
        return
    with pytest.raises(InvalidArgument, match=said):
        NextEvent(**SMALL).fit(X)


def test_nanoseconds_as_whole_numbers_are_warned_of():
    times = np.int64(1_700_000_000_000_000_000) + np.arange(50) * 100
    with pytest.warns(UserWarning, match="int64, whose steps in float64 at 1.7e"):
        NextEvent(**SMALL, epochs=1).fit([(["a", "b"] * 25, times)] * 5)


def test_nothing_to_learn_is_refused():
    with pytest.raises(InvalidArgument, match="there is nothing to learn"):
        NextEvent(**SMALL | {"components": 0}).fit([times for _, times in TRAIN])


def test_words_for_times(model):
    last = np.array([times[-1] for _, times in TRAIN])
    np.testing.assert_array_equal(model.times_at(TRAIN, "+0"), last)
    np.testing.assert_array_equal(model.times_at(TRAIN, "+2.5"), last + 2.5)
    for word, said in (("+1d", "numbers of an unknown unit"), ("nan", None)):
        with pytest.raises(InvalidArgument, match=said or "at is nan for sequence 0"):
            model.predict(TRAIN, at=model.times_at(TRAIN, word))


def test_spans_that_differ_by_orders_need_no_memory():
    rng = np.random.default_rng(0)
    X = [rng.uniform(0, 3e7) + np.sort(rng.uniform(0, 60, 10)) for _ in range(300)]
    X += [np.sort(rng.uniform(0, 3e7, 300)) for _ in range(5)]
    tracemalloc.start()
    found = periods(X)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.peaks == ()
    assert peak < 3e8


def test_large_catalogues_are_judged_piece_by_piece(model, monkeypatch):
    whole = model.evaluate(TRAIN)
    monkeypatch.setattr(answers, "CELLS", 7)
    assert model.evaluate(TRAIN).type_nll == pytest.approx(whole.type_nll, abs=1e-12)
    assert flat(TRAIN)["offsets"][-1] - len(TRAIN) == whole.targets

"""The next event: answers that agree with one another, whatever batch, window, form or folder they come from."""

import warnings
from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch

from drawn import flat, waits
from heedful import InvalidArgument
from heedful.events import NextEvent
from heedful.events._sequences import Columns, read_sequences
from heedful.events._windows import EventSamples, Windows

SMALL = {"embed_dim": 16, "num_heads": 2, "layers": 1, "components": 4, "clock": "none", "lr": 0.01, "random_state": 0}
TRAIN, TEST = waits(60, 0), waits(11, 1)


@cache
def fitted(**options):
    return NextEvent(**SMALL | {"epochs": 6, "predict_dtype": "float64"} | options).fit(TRAIN)


def prefixes(sequences):
    """Every beginning of every sequence, with the type and the time of the event behind it."""
    for kinds, times in sequences:
        for n in range(1, len(times)):
            yield (kinds[:n], times[:n]), kinds[n], times[n]


def test_it_learns_what_the_wait_says():
    model = NextEvent(**SMALL, epochs=25).fit(TRAIN)
    known, unknown = (model.evaluate(TEST, at=at) for at in ("true", None))
    assert known.accuracy > 0.93
    assert unknown.accuracy < 0.75, "a wait that is not known says nothing"
    assert unknown.time_nll == pytest.approx(1.0, abs=0.15), "exponential waits of mean 1 have an entropy of 1"
    assert known.targets == sum(len(times) - 1 for _, times in TEST)


@pytest.mark.parametrize("at", [None, "true"])
def test_all_targets_of_a_pass_are_those_of_prefixes(at):
    """Two streams in one pass against a call for each prefix."""
    model = fitted()
    heads, kinds, times = zip(*prefixes(TEST), strict=True)
    shares = model.predict_proba(list(heads), at=None if at is None else np.array(times))
    own = shares[np.arange(len(kinds)), np.searchsorted(model.classes_, kinds)]
    result = model.evaluate(TEST, at=at)
    assert result.targets == len(kinds)
    assert result.type_nll == pytest.approx(-np.log(own).mean(), abs=1e-9)
    assert result.accuracy == (model.classes_[shares.argmax(1)] == kinds).mean()


def test_an_answer_is_that_of_a_sequence_alone_wherever_its_clock_starts():
    model = fitted()
    together = model.predict_proba(TEST, at=[times[-1] + 0.3 for _, times in TEST])
    for at, (kinds, times) in enumerate(TEST):
        alone = model.predict_proba([(kinds, times + 1e6)], at=[times[-1] + 1e6 + 0.3])
        np.testing.assert_allclose(alone[0], together[at], atol=1e-7)


def test_a_curve_is_made_of_single_answers():
    model = fitted()
    curve = model.probability_curve(TEST[0], [0.1, 0.5, 2.0])
    for wait, shares in zip(curve.waits, curve.probabilities, strict=True):
        np.testing.assert_allclose(model.predict_proba(TEST[:1], at=[TEST[0][1][-1] + wait])[0], shares, atol=1e-12)
    auto = model.probability_curve([TEST[0]])
    assert (len(auto.waits), auto.waits[0]) == (200, 0.0)
    assert np.trapezoid(auto.density, auto.waits) == pytest.approx(0.95, abs=0.03)
    assert "likeliest next" in str(curve)


def test_when_has_quantiles_and_a_mean():
    model = fitted()
    quick, middle, late = (model.predict_time(TEST, share) for share in (0.1, 0.5, 0.9))
    last = np.array([times[-1] for _, times in TEST])
    assert ((last < quick) & (quick < middle) & (middle < late)).all()
    np.testing.assert_array_equal(model.predict_time(TEST), middle)
    assert (model.predict_time(TEST, "mean") > middle).all()
    levels = model.evaluate(TEST).levels
    assert (np.diff(levels) >= 0).all()
    assert 0 <= levels[0] <= levels[-1] <= 1


def test_futures_are_drawn_by_seed_and_go_on_from_the_past():
    model = fitted()
    future = model.sample(TEST[:3], steps=5, draws=4, random_state=1)
    assert future.types.shape == future.times.shape == (3, 4, 5)
    assert set(future.types.flat) <= set(model.classes_)
    last = np.array([times[-1] for _, times in TEST[:3]])[:, None, None]
    assert (np.diff(np.concatenate((np.broadcast_to(last, (3, 4, 1)), future.times), axis=2)) > 0).all()
    np.testing.assert_array_equal(model.sample(TEST[:3], 5, 4, random_state=1).times, future.times)
    assert not np.array_equal(model.sample(TEST[:3], 5, 4, random_state=2).times, future.times)
    assert future.to_frame().shape == (60, 5)
    # The law of simulated waits is that of the prediction.
    many = model.sample(TEST[:1], steps=1, draws=2000, random_state=0).times.ravel()
    assert np.median(many) == pytest.approx(model.predict_time(TEST[:1])[0], abs=0.1)


def test_long_sequences_are_cut_into_windows_and_each_event_is_a_target_once():
    lengths = np.array([1, 2, 7, 8, 9, 16, 31])
    offsets = np.append(0, np.cumsum(lengths))
    count = offsets[-1]
    inputs = (np.arange(count), np.arange(count) * 1.0, np.zeros((count, 0)), np.full(7, np.nan), np.zeros((7, 0)))
    windows = Windows(EventSamples(inputs, offsets=offsets), 8)
    targets, least = [], 8
    for at in range(len(windows)):
        (codes, *_), target, _ = windows.batch([at])
        counts = target[0, :, 2] > 0
        targets += target[0, :, 0][counts].long().tolist()
        first = windows.samples.offsets[windows.owners[at]]
        for code in codes[0][counts].tolist():
            least = min(least, code - int(codes[0, 0]) + 1) if codes[0, 0] > first else least
        assert codes.shape[1] <= 8
    assert sorted(targets) == sorted(set(range(count)) - set(offsets[:-1].tolist()))
    assert least >= 4, "a target sees half a window or more"
    assert sum(len(rows) for rows in windows.batches(cells=16)) == len(windows)
    long = NextEvent(**SMALL, epochs=1, history=8).fit(TRAIN)
    assert long.evaluate(TEST).targets == sum(len(times) - 1 for _, times in TEST)


def test_padding_repeats_times_and_batches_do_not_matter():
    samples = EventSamples(
        (
            np.arange(5),
            np.array([1.0, 2.0, 4.0, 10.0, 11.0]),
            np.zeros((5, 0)),
            np.array([5.0, np.nan]),
            np.zeros((2, 0)),
        ),
        offsets=np.array([0, 3, 5]),
    )
    (_, times, padding, *_), target, rest = Windows(samples, 9).batch([0, 1])
    assert times.tolist() == [[1, 2, 4], [10, 11, 11]]
    assert padding.tolist() == [[False, False, False], [False, False, True]]
    assert target[..., 1].tolist() == [[1, 2, 0], [1, 0, 0]]
    assert target[..., 2].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert rest.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_forms_dates_and_marks_go_through(tmp_path):
    rows = [
        (f"s{at}", pd.Timestamp("2026-01-01", tz="Europe/Berlin") + pd.Timedelta(hours=time), kind, at % 2, time % 3)
        for at, (kinds, times) in enumerate(TRAIN)
        for kind, time in zip(kinds, times, strict=True)
    ]
    frame = pd.DataFrame(rows, columns=["user", "when", "what", "plan", "load"])
    names = {"sequence": "user", "time_column": "when", "type": "what", "marks": "load", "static": ["plan"]}
    model = NextEvent(**SMALL | {"epochs": 2} | names).fit(frame)
    assert model.is_dated_
    assert model.predict_time(frame).dtype.kind == "M"
    last = frame.groupby("user", sort=False)["when"].last()
    shares = model.predict_proba(frame, at=last + pd.Timedelta(hours=1))
    model.save_pretrained(tmp_path)
    again = NextEvent.from_pretrained(tmp_path)
    np.testing.assert_array_equal(again.predict_proba(frame, at=last + pd.Timedelta(hours=1)), shares)
    np.testing.assert_allclose(again.predict_proba(frame, at=again.times_at(frame, "+1h")), shares, atol=1e-6)
    assert list(again.columns_beside(frame)["user"]) == [f"s{at}" for at in range(60)]
    with pytest.raises(InvalidArgument, match="times were dates in fit and are numbers now"):
        model.predict(frame.assign(when=np.arange(len(frame))))
    with pytest.raises(InvalidArgument, match="at holds numbers, and times were dates in fit"):
        model.predict(frame, at=np.arange(60))
    assert model.sample(frame, steps=2).times.dtype.kind == "M"


def test_starts_and_ends_count_the_first_event_and_the_tail():
    X = flat(TRAIN) | {
        "starts": np.array([times[0] - 1.0 for _, times in TRAIN]),
        "ends": np.array([times[-1] + 2.0 for _, times in TRAIN]),
    }
    model = NextEvent(**SMALL, epochs=2, predict_dtype="float64").fit(X)
    result = model.evaluate(X)
    assert result.targets == len(X["times"])
    watched = model.evaluate({**X, "ends": None})
    tails = []
    for at, (kinds, times) in enumerate(TRAIN):
        one = {"types": [kinds], "times": [times], "starts": X["starts"][at]}
        law = model.network_.double()
        samples = model._read(one)
        inputs = Windows(samples, 128, last=True).batch([0])[0]
        with torch.no_grad():
            tails.append(
                law.waits(law.states(*inputs)[:, -1]).log_survival(torch.tensor([2.0], dtype=torch.float64)).item()
            )
    model.network_.float()
    assert (result.time_nll - watched.time_nll) * result.targets == pytest.approx(-sum(tails), rel=1e-6)
    empty = {"types": [[]], "times": [[]], "starts": [0.0]}
    assert model.predict_proba(empty).shape == (1, 2)


def test_events_without_types_and_places_without_times():
    model = NextEvent(**SMALL, epochs=2).fit([times for _, times in TRAIN])
    result = model.evaluate([times for _, times in TEST])
    assert (result.accuracy, result.type_nll) == (None, None)
    assert "accuracy" not in str(result)
    assert model.score([times for _, times in TEST]) == -result.time_nll
    assert model.predict_time([times for _, times in TEST]).shape == (11,)
    order = fitted(time="order")
    shares = order.predict_proba(TEST)
    np.testing.assert_allclose(order.predict_proba([(kinds, times**2) for kinds, times in TEST]), shares, atol=1e-12)
    with pytest.raises(InvalidArgument, match="time='order' and has no answers for a known time"):
        order.evaluate(TEST, at="true")


def test_sampled_softmax_is_softmax_in_the_mean():
    torch.manual_seed(0)
    from heedful.events.next_event import _cross_entropy

    for tied in (False, True):
        network = NextEvent(**SMALL, tied=tied)._make(50).double()
        states, wanted = torch.randn(7, 16, dtype=torch.float64), torch.randint(50, (7,))
        exact, _ = _cross_entropy(network, states, wanted, False, None)
        drawn = torch.stack([_cross_entropy(network, states, wanted, False, 20)[0] for _ in range(300)]).mean(0)
        torch.testing.assert_close(drawn, exact, atol=0.08, rtol=0)
        torch.testing.assert_close(network.own_logits(states, wanted), network.logits(states)[torch.arange(7), wanted])
        torch.testing.assert_close(network.logits(states, items=wanted), network.logits(states)[:, wanted])
    model = NextEvent(**SMALL, epochs=1, tied=True, negatives=1).fit(TRAIN)
    assert model.predict_proba(TEST).sum(1) == pytest.approx(np.ones(11))


def test_types_that_were_never_seen_are_warned_of_and_wrong():
    model = fitted()
    strange = [(np.append(kinds[:-1], "odd"), times) for kinds, times in TEST]
    with pytest.warns(UserWarning, match="1 type of events not seen in fit, read as unknown: odd"):
        result = model.evaluate(strange)
    assert result.accuracy <= model.evaluate(TEST).accuracy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert np.isfinite(model.predict_proba(strange)).all()
    with pytest.raises(InvalidArgument, match="X has no types"):
        model.predict([times for _, times in TEST])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m: m.predict(TEST, at="true"), "has no true time; .* score or evaluate"),
        (lambda m: m.predict(TEST, at=[1.0]), "at must have a time for each of the 11 sequences; got 1"),
        (lambda m: m.predict(TEST, at=np.zeros(11)), "at is before the last event of sequence 0"),
        (lambda m: m.evaluate(TEST, at="soon"), "at must be one of true, or None"),
        (lambda m: m.predict_time(TEST, 1.5), "quantile must be a number above 0 and below 1"),
        (lambda m: m.probability_curve(TEST), "takes one sequence; got 11"),
        (lambda m: m.probability_curve(TEST[0], [-1.0]), "grid must be waits of 0 or more"),
        (lambda m: m.sample(TEST, steps=0), "steps must be a whole number from 1 on"),
        (lambda m: m.evaluate([(["slow"], [1.0])]), "no sequence of X has two events"),
        (lambda m: m.times_at(TEST, "soon"), "at must be a number, or a wait as"),
        (lambda m: fitted(components=0).predict_time(TEST), "components=0 and has no density"),
        (lambda m: fitted(target_layers=0).score(TEST, at="true"), "target_layers=0 and has no answers for a known time"),
        (lambda m: NextEvent(**SMALL).fit([(["a"], [1.0])]), "no sequence has two events or more"),
        (lambda m: NextEvent(**SMALL | {"clock": "often"}).fit(TRAIN), "is no period"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_error(call, said):
    with pytest.raises(InvalidArgument, match=said):
        call(fitted())


def test_pictures_have_what_they_say():
    model = fitted()
    ax = model.probability_curve(TEST[0]).plot()
    assert {text.get_text() for text in ax.get_legend().get_texts()} == {"quick", "slow", "when (density)"}
    assert model.evaluate(TEST).plot().get_xlabel() == "predicted share of waits below"
    assert model.sample(TEST[:1], 3, 2).plot().get_ylabel() == "draw"
    assert "its time unknown" in str(model.evaluate(TEST))
    assert model.evaluate(TEST).to_dict().keys() == {
        "at",
        "targets",
        "accuracy",
        "type_nll",
        "time_nll",
        "calibration_error",
    }


def test_reading_again_is_reading(tmp_path):
    sequences = read_sequences(TRAIN, Columns())
    rows = np.array([3, 1, 7])
    samples = EventSamples(
        (
            np.arange(len(sequences.times)),
            sequences.times,
            np.zeros((len(sequences.times), 1)),
            np.arange(60.0),
            np.zeros((60, 0)),
        ),
        offsets=sequences.offsets,
    )
    some = samples[rows]
    assert (
        some.inputs[0].tolist()
        == np.concatenate([np.arange(sequences.offsets[row], sequences.offsets[row + 1]) for row in rows]).tolist()
    )
    assert some.inputs[3].tolist() == [3, 1, 7]
    both = some.joined(some)
    assert both.lengths.tolist() == (2 * some.lengths).tolist()
    first = some.lengths[0]
    assert both.inputs[0][: 2 * first].tolist() == [*some.inputs[0][:first], *some.inputs[0][:first]]

"""What stands beside ours in the recipes of events: boosted trees, what easy-tpp is given, films that follow films."""

import json

import numpy as np
import pytest
from experiments import boosted, counting, easytpp, events, movielens, worlds
from experiments.boosted import Trees
from experiments.events import Events, Split

from heedful._errors import Unsupported

DAY = 24.0


@pytest.fixture
def two():
    """A sequence of four events and one of two, with a mark."""
    drawn = events.listed(
        [(np.array([1, 0, 1, 2]), np.array([1.0, 3.0, 30.0, 31.5])), (np.array([2, 2]), np.array([50.0, 51.0]))],
        ("a", "b", "c"),
    )
    return Events(drawn.types, drawn.times, drawn.starts, drawn.names, {"own": drawn.types, "wind": 5 - drawn.types})


def test_features_by_hand(two):
    x, categories = boosted.features(two, DAY, known=True)
    assert x.shape == (4, boosted.DEPTH + 1 + boosted.DEPTH - 1 + 4 + 2 * 3 + 5)
    assert categories.sum() == boosted.DEPTH + 1  # the mark that is the type itself is not given twice
    third = x[2]  # of the event at 31.5
    np.testing.assert_allclose(third[:5], [1, 0, 1, np.nan, 4])
    np.testing.assert_allclose(third[5:8], [np.log(28), np.log(3), np.nan], rtol=1e-6)
    np.testing.assert_allclose(third[8:12], [6 / 24, 1, np.log(30), 3], rtol=1e-6)
    # Of each type: how often, and how long before the last event.
    np.testing.assert_allclose(third[12:18], [1, np.log(28), 2, 0, 0, np.nan], rtol=1e-6)
    np.testing.assert_allclose(third[18:], [np.log(2.5), 7.5 / 24, 30, 1, 1], rtol=1e-6)
    np.testing.assert_array_equal(np.isnan(x[3, 1:4]), [True] * 3)
    without, _ = boosted.features(two, DAY, known=False)
    np.testing.assert_array_equal(without, x[:, :-5])


def test_features_do_not_see_the_target(two):
    """Nor what comes after it: changed types and times behind the last event leave every feature of the earlier targets."""
    changed = Events(np.array([1, 0, 1, 0, 2, 2]), two.times + np.array([0, 0, 0, 7, 0, 0]), two.starts, two.names)
    plain = Events(two.types, two.times, two.starts, two.names)
    before, after = (boosted.features(each, DAY, known=False)[0] for each in (plain, changed))
    np.testing.assert_array_equal(before, after)


def test_trees_learn_a_world_by_its_gaps():
    drawn = worlds.gap_switch(50, 0)
    parts = [drawn.take(np.arange(begin, end)) for begin, end in ((0, 36), (36, 43), (43, 50))]
    settings = (Trees(0.5, 11, 4, l2=1.0), Trees(0.5, 2, 1))
    known, unknown = (boosted.fitted(Split(*parts), DAY, way, settings) for way in (True, False))
    assert known["accuracy"] > 0.6
    assert 0.1 < unknown["accuracy"] < 0.35
    assert known["rounds"] == 4
    assert [row["leaves"] for row in known["tried"]] == [11, 2]
    assert json.loads(json.dumps(known)) == known


def test_easy_tpp_is_given_what_we_have(tmp_path):
    drawn = worlds.hawkes(9, 0)
    split = Split(drawn.take(np.arange(4)), drawn.take(np.array([4, 5])), drawn.take(np.array([6, 7, 8])))
    easytpp.export(split, tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as held:
        given = easytpp.sequences(held, "test")
    for (types, times), (wanted_types, wanted_times) in zip(given, split.test.pairs(), strict=True):
        np.testing.assert_array_equal(types, [3, *wanted_types, 3])
        np.testing.assert_array_equal(times, [0, *wanted_times, 100])
    scale = 1.7
    (batch,) = easytpp.batches(given, 3, scale)
    sizes = sorted(len(times) for _, times in given)
    assert batch["seq_non_pad_mask"].sum(1).tolist() == sizes
    gaps = batch["time_delta_seqs"].double()
    np.testing.assert_allclose(gaps.sum(1), [100 / scale] * 3, rtol=1e-5)
    hidden = batch["attention_mask"]
    assert not hidden[0, 5, :6].any()
    assert hidden[0, 5, 6:].all()
    assert hidden[0, :, sizes[0] :].all()
    assert easytpp.results(tmp_path / "a.npz") == {}
    (tmp_path / "a, THP.json").write_text('{"nll": 0.5}')
    assert easytpp.results(tmp_path / "a.npz") == {"THP": {"nll": 0.5}}


def test_easy_tpp_of_unwatched_sequences_begins_at_their_first_event(tmp_path):
    drawn = worlds.gap_switch(3, 0, n=5)
    easytpp.export(Split(drawn, drawn, drawn), tmp_path / "b.npz")
    with np.load(tmp_path / "b.npz") as held:
        types, times = easytpp.sequences(held, "train")[1]
    np.testing.assert_array_equal(types, drawn.of(1)[0])
    np.testing.assert_allclose(times, drawn.of(1)[1] - drawn.of(1)[1][0])


@pytest.mark.parametrize("name", easytpp.MODELS)
def test_easy_tpp_trains(tmp_path, monkeypatch, name):
    pytest.importorskip("easy_tpp", reason="easy-tpp has an environment of its own; it runs where that is this one")
    monkeypatch.setattr(easytpp, "EPOCHS", 2)
    drawn = worlds.hawkes(9, 0)
    easytpp.export(Split(drawn, drawn, drawn), tmp_path / "a.npz")
    row = easytpp.measured(name, tmp_path / "a.npz")
    assert 0 < row["known"]["accuracy"] < 1
    assert row["nll"] < 3


@pytest.fixture
def ratings():
    """Three users and five films: 1 is followed by 2 twice, by 3 once."""
    sequences = [[1, 2, 4, 5, 3], [5, 1, 2, 4, 3], [1, 3, 5, 2, 4]]
    times = np.arange(15.0)
    return movielens.Ratings(np.concatenate(sequences), np.array([0, 5, 10, 15]), ("", *"abcde"), times)


def test_ratings_keep_their_times(ratings, tmp_path):
    items, times, starts = ratings.without(2)
    assert items.tolist() == [1, 2, 4, 5, 1, 2, 1, 3, 5]
    assert times.tolist() == [0, 1, 2, 5, 6, 7, 10, 11, 12]
    assert starts.tolist() == [0, 3, 6, 9]
    some = ratings.first(2)
    assert some.users == 2
    assert some.times.tolist() == list(range(10))
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    lines += [f"u{user}\tF{item}\t5\t{100 * user + (7 * item) % 5}" for user in range(5) for item in range(5)]
    (tmp_path / "ml-1m.inter").write_text("\n".join(lines) + "\n")
    read = movielens.read(tmp_path / "ml-1m.inter")
    assert read.times.tolist() == [100 * user + at for user in range(5) for at in range(5)]
    assert [read.titles[item] for item in read.of(1)] == ["F0", "F3", "F1", "F4", "F2"]


def test_ratings_kept_without_times_say_so(ratings, tmp_path):
    np.savez(tmp_path / "ml-1m.npz", items=ratings.items, starts=ratings.starts, titles=np.asarray(ratings.titles))
    old = movielens.prepare(tmp_path)
    assert old.times is None
    with pytest.raises(Unsupported, match=r"kept without their times; remove ml-1m\.npz"):
        old.without(1)


def test_followers_by_hand(ratings):
    np.testing.assert_array_equal(movielens.popularity(ratings), [0, 3, 2, 1, 1, 2])
    shares = np.array([0, 3, 2, 1, 1, 2]) / 9
    rows = movielens.followers(ratings, np.array([0, 2]))
    # The last film before the test is 5 (followed by 1 once), then 2 (by 4 once).
    np.testing.assert_allclose(rows[0], (np.eye(6)[1] + shares) / 2, rtol=1e-6)
    np.testing.assert_allclose(rows[1], (np.eye(6)[4] + shares) / 2, rtol=1e-6)
    more = movielens.followers(ratings, np.array([0]), back=2)
    # Film 4 was the last of its training sequence: nothing follows it.
    np.testing.assert_allclose(more[0], rows[0] + shares / 2, rtol=1e-6)


def test_count_tables_and_trees_answer_the_same_targets(two):
    assert len(boosted.features(two, DAY, known=True)[0]) == len(counting.gaps(two)) == len(two.targets)

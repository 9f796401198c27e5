"""Events as users hold them: every form gives the same arrays, and what is wrong is named."""

import numpy as np
import pandas as pd
import pytest

from drawn import flat, waits
from heedful import InvalidArgument
from heedful.events import _covariates, read
from heedful.events._sequences import Columns, label_codes, numbers_of_times, read_sequences

X = waits(7, 0)
NAMES = Columns()


def same(a, b):
    np.testing.assert_array_equal(a.offsets, b.offsets)
    np.testing.assert_array_equal(a.times, b.times)
    np.testing.assert_array_equal(a.types, b.types)


def frame_of(sequences, shuffled=None):
    rows = [
        (f"s{at}", time, kind)
        for at, (kinds, times) in enumerate(sequences)
        for kind, time in zip(kinds, times, strict=True)
    ]
    return pd.DataFrame(rows, columns=["sequence", "time", "type"])


def test_every_form_holds_the_same():
    wanted = read_sequences(X, NAMES)
    np.testing.assert_array_equal(wanted.times, flat(X)["times"])
    same(read_sequences(flat(X), NAMES), wanted)
    same(read_sequences({"types": [kinds for kinds, _ in X], "times": [times for _, times in X]}, NAMES), wanted)
    frame = frame_of(X)
    same(read_sequences(frame, NAMES), wanted)
    same(read_sequences(frame.sample(frac=1, random_state=0).sort_values("time", kind="stable").rename(columns={"time": "when"}).assign(
        sequence=lambda rows: pd.Categorical(rows["sequence"], [f"s{at}" for at in range(7)])).sort_values("sequence", kind="stable"),
        Columns(time="when")), wanted)  # fmt: skip
    padded = np.full((7, 23, 2), np.nan)
    for row, (kinds, times) in zip(padded, X, strict=True):
        row[: len(times)] = np.stack((kinds == "slow", times), axis=1)
    numbers = read_sequences(padded, NAMES)
    np.testing.assert_array_equal(numbers.types, (wanted.types == "slow").astype(int))
    np.testing.assert_array_equal(numbers.times, wanted.times)


def test_dates_become_seconds_without_losing_digits():
    stamps = np.array(["2014-01-01T00:00:00.123456789", "2014-01-01T00:00:01.5"], dtype="datetime64[ns]")
    numbers, dated = numbers_of_times(stamps)
    assert dated
    assert numbers[1] == 1388534401.5
    assert numbers[0] == pytest.approx(1388534400.123456789, abs=2e-7)
    aware = pd.Series(
        pd.to_datetime(["2014-03-30T01:59:00+01:00", "2014-03-30T03:01:00+02:00"], utc=True)
    ).dt.tz_convert("Europe/Berlin")
    assert np.diff(numbers_of_times(aware)[0]).tolist() == [120.0], "time that passed, not what clocks showed"
    text = frame_of([(["a", "b"], ["2014-01-01", "2014-01-02T12:00"])])
    assert np.diff(read_sequences(text, NAMES).times).tolist() == [129600.0]
    assert numbers_of_times(np.array([1388533518993], dtype=np.int64))[0].tolist() == [1388533518993.0]


def test_order_is_demanded_or_made_and_ties_keep_theirs():
    kinds, times = np.array(["a", "b", "c", "d"]), np.array([3.0, 1.0, 1.0, 2.0])
    with pytest.raises(InvalidArgument, match=r"times of sequence 1 fall from 3 to 1 at its event 1; .* sort=True"):
        read_sequences([X[0], (kinds, times)], NAMES)
    sorted_ = read_sequences({"types": [kinds], "times": [times], "marks": {"m": [[0, 1, 2, 3]]}}, NAMES, sort=True)
    assert (sorted_.types.tolist(), sorted_.marks["m"].tolist()) == (["b", "c", "d", "a"], [1, 2, 3, 0])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([], "X is empty"),
        (7, "X is a int"),
        ({"types": [[1]]}, "holds times"),
        ([(["a"], [1.0]), 3.0], "sequence 1 is a float"),
        ([(["a", "b"], [1.0])], "sequence 0 has 1 times and 2 types"),
        ([(["a"], [np.nan])], "sequence 0 has the time nan at its event 0"),
        ([(["a", "a"], [1.0, np.inf])], "sequence 0 has the time inf at its event 1"),
        ([(["a"], [1.0]), ([], [])], "sequence 1 is empty"),
        ([(["a", None], [1.0, 2.0])], "types hold nothing at event 1"),
        ([([1.0, np.nan], [1.0, 2.0])], "types hold NaN, first at event 1"),
        ([(["a"], ["soon"])], "times of sequence 0 must be numbers or dates"),
        ({"types": ["a", "b"], "times": [1.0, 2.0], "offsets": [0, 1]}, "offsets must rise from 0 to 2"),
        ({"times": [[1.0, 2.0]], "ends": [1.5]}, "sequence 0 ends before its last event"),
        ({"times": [[1.0, 2.0]], "starts": 1.5}, "sequence 0 starts after its first event"),
        ({"times": [[1.0, 2.0]], "ends": [3.0, 4.0]}, "ends must be one time, or one for each of the 1 sequences"),
        ({"times": [[1.0, 2.0]], "ends": np.array(["2020"], dtype="datetime64[s]")}, "ends are dates and times are not"),
        ({"times": [[1.0]], "marks": [1]}, "marks must be a dict"),
        ({"times": [[1.0, 2.0]], "marks": {"m": [[1.0]]}}, "sequence 0 has 2 times and 1 marks"),
        ({"times": [[1.0]], "static": {"s": [1, 2]}}, r"static\['s'\] must have an entry for each of the 1 sequences"),
        (np.zeros((3, 5, 3)), r"an array must be \(sequences, events, 2\)"),
        (pd.DataFrame({"time": [1.0]}), "X has no column 'sequence'; it has 'time'"),
        (pd.DataFrame({"sequence": ["a"], "time": [np.nan], "type": ["x"]}), r"column 'time' is empty \(NaN\) in row 0"),
        (pd.DataFrame({"sequence": ["a"], "time": ["soon"], "type": ["x"]}), "column 'time' cannot be read as times"),
        (pd.DataFrame({"sequence": [], "time": [], "type": []}), "X has no rows"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_error(wrong, said):
    with pytest.raises(InvalidArgument, match=said):
        read_sequences(wrong, NAMES)


def test_float32_timestamps_are_warned_of():
    seconds = np.array([1.4e9, 1.4e9 + 3600, 1.4e9 + 3728], dtype=np.float32)
    with pytest.warns(UserWarning, match=r"times are float32, whose steps at 1.4e\+09 are 128: .* float64"):
        read_sequences([(["a", "b", "a"], seconds)], NAMES)


def test_static_columns_do_not_change_and_text_is_levels():
    frame = frame_of(X).assign(
        country=lambda rows: np.where(rows["sequence"] == "s0", "fr", "de"), size=np.arange(len(flat(X)["times"]))
    )
    sequences = read_sequences(frame, Columns(static=("country",), marks=("size",)))
    assert sequences.static["country"].tolist() == ["fr"] + ["de"] * 6
    with pytest.raises(InvalidArgument, match="column 'size' changes within sequence 's0'"):
        read_sequences(frame, Columns(static=("size",)))
    parts = _covariates.learned(sequences.static) + _covariates.learned({"size": np.array([1.0, 3.0, np.nan])})
    assert (_covariates.numbers(parts), _covariates.levels(parts)) == (2, (3,))
    got = _covariates.matrix({"country": np.array(["fr", "es"]), "size": np.array([np.nan, 3.0])}, parts, 2)
    np.testing.assert_allclose(got, [[0, 1, 2], [2**-0.5, 0, 0]], rtol=1e-6)
    with pytest.raises(InvalidArgument, match="lacks the column 'country'"):
        _covariates.matrix({}, parts, 2)


def test_labels_are_found_among_classes():
    codes, unknown = label_codes(np.array(["b", "z", "a"]), np.array(["a", "b"]))
    assert (codes.tolist(), unknown) == ([1, 2, 0], ["z"])
    assert label_codes(np.array(["10", "9"]), np.array([9, 10]))[0].tolist() == [1, 0]


def test_files_hold_the_same(tmp_path):
    frame_of(X).to_csv(tmp_path / "e.csv", index=False)
    np.savez(tmp_path / "e.npz", **flat(X))
    for file in ("e.csv", "e.npz"):
        same(read_sequences(read(tmp_path / file), NAMES), read_sequences(X, NAMES))
    assert repr(read(tmp_path / "e.npz")) == f"e: {len(flat(X)['times'])} events in 7 sequences"
    np.savez(tmp_path / "f.npz", times=[1.0, 2.0])
    (tmp_path / "g.txt").write_text("")
    for file, said in (("f.npz", "times and no offsets"), ("g.txt", "none of .csv"), ("h.csv", "there is no file")):
        with pytest.raises(InvalidArgument, match=said):
            read(tmp_path / file)

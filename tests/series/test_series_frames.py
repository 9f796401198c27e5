"""Data frames: rows are steps, channels go by their names, and what cannot be read is named."""

import numpy as np
import pytest

pytest.importorskip("pandas", reason="the extra 'tables' is not installed")
pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")
pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")

import pandas as pd
from sklearn.model_selection import GridSearchCV

from bumps import two_bumps
from heedful import InvalidArgument
from heedful.series import SeriesClassifier
from heedful.series._frames import read_frames

SMALL = {"embed_dim": 8, "num_heads": 2, "rank": 3, "epochs": 2, "random_state": 0}
NAMES = ["pulse", "air"]
LENGTHS = [11 - at % 4 for at in range(24)]
WHOLE, Y = two_bumps(24, 0)
SERIES = [case[:, :length] for case, length in zip(WHOLE, LENGTHS, strict=True)]
IDS = [f"patient {(5 * at) % 24}" for at in range(24)]  # not sorted


def listed(series=SERIES, names=NAMES):
    return [pd.DataFrame(case.T, columns=names) for case in series]


def indexed(series=SERIES, names=NAMES):
    return pd.concat(listed(series, names), keys=IDS[: len(series)], names=["who", "when"])


def long(series=SERIES, names=NAMES):
    return indexed(series, names).rename_axis(["case_id", "time"]).reset_index()


def molten(series=SERIES, names=NAMES):
    return long(series, names).melt(["case_id", "time"], var_name="dim", value_name="value")


FORMS = {form.__name__: form for form in (listed, indexed, long, molten)}


@pytest.fixture(scope="module")
def model():
    return SeriesClassifier(**SMALL).fit(SERIES, Y)


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_steps(form, model):
    X = FORMS[form]()
    again = SeriesClassifier(**SMALL).fit(X, Y)
    assert (again.n_features_in_, again.channels_, again.max_len_) == (2, 2, 11)
    assert again.feature_names_in_.tolist() == NAMES
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(SERIES))


def test_channels_go_by_name_and_rows_by_time(tmp_path):
    model = SeriesClassifier(**SMALL).fit(indexed(), Y)
    wanted = model.predict_proba(indexed())
    swapped = [frame[NAMES[::-1]] for frame in listed()]
    shuffled = long().sample(frac=1, random_state=0)
    places = [IDS.index(name) for name in shuffled["case_id"].drop_duplicates()]
    np.testing.assert_array_equal(model.predict_proba(swapped), wanted)
    np.testing.assert_array_equal(model.predict_proba(indexed()[NAMES[::-1]]), wanted)
    np.testing.assert_array_equal(model.predict_proba(shuffled), wanted[places])
    np.testing.assert_array_equal(model.predict_proba(molten()), wanted)
    dated = long().assign(time=lambda frame: pd.Timestamp("2026-01-01") + pd.to_timedelta(frame["time"], unit="D"))
    for times in (dated, dated.assign(time=dated["time"].dt.tz_localize("Asia/Tokyo"))):
        np.testing.assert_array_equal(model.predict_proba(times.iloc[::-1])[::-1], wanted)
    mixed = [frame[NAMES[::-1]] if at % 2 else frame for at, frame in enumerate(listed())]
    np.testing.assert_array_equal(SeriesClassifier(**SMALL).fit(mixed, Y).predict_proba(swapped), wanted)
    model.save_pretrained(tmp_path)
    again = SeriesClassifier.from_pretrained(tmp_path)
    np.testing.assert_array_equal(again.predict_proba(swapped), wanted)
    with pytest.raises(
        InvalidArgument, match=r"must be those of fit, 'pulse', 'air'; X lacks 'air' and has besides 'co2'"
    ):
        again.predict(indexed().rename(columns={"air": "co2"}))
    with pytest.raises(InvalidArgument, match=r"'pulse', 'air', so its rows are the steps of one series; .* \[X\]"):
        again.predict(listed()[0])
    with pytest.raises(InvalidArgument, match="X has besides 'more'"):
        again.predict([frame.assign(more=1.0) for frame in listed()])


def test_frames_hold_what_frames_hold():
    frames = listed()
    frames[0].iloc[2, 0] = np.nan
    frames[1] = frames[1].astype(object)
    frames[2] = frames[2].astype("Float64")
    frames[3].index = pd.date_range("2026-01-01", periods=len(frames[3]))
    frames[4]["air"] = frames[4]["air"] > 0
    series = read_frames(frames).series
    assert [case.shape for case in series] == [(2, length) for length in LENGTHS]
    assert np.isnan(series[0][0, 2])
    unnamed = read_frames([pd.DataFrame(case.T) for case in SERIES])
    assert unnamed.channels is None
    np.testing.assert_array_equal(unnamed.series[7], SERIES[7])
    one = read_frames(indexed()["air"])
    assert (len(one.series), one.channels, one.series[3].shape) == (24, ("air",), (1, LENGTHS[3]))
    many = molten([np.tile(case, (6, 1)) for case in SERIES], names=[f"dim_{at}" for at in range(12)])
    assert read_frames(many).channels == tuple(f"dim_{at}" for at in range(12))
    counted = read_frames(molten().assign(dim=lambda frame: (frame["dim"] == "air").astype(int)))
    np.testing.assert_array_equal(counted.series[5], SERIES[5])
    assert read_frames(pd.DataFrame(WHOLE[:, 0])) is None


def test_labels_follow_their_index():
    frame = indexed()
    wanted = SeriesClassifier(**SMALL).fit(frame, Y).predict_proba(frame)
    labels, weights = pd.Series(Y, index=IDS), pd.Series(np.arange(24.0), index=IDS)
    for y in (labels, labels.sort_index(), labels.reset_index(drop=True), Y.tolist()):
        np.testing.assert_array_equal(SeriesClassifier(**SMALL).fit(frame, y).predict_proba(frame), wanted)
    weighted = SeriesClassifier(**SMALL).fit(frame, Y, weights.to_numpy()).predict_proba(frame)
    again = SeriesClassifier(**SMALL).fit(frame, labels.sort_index(), weights.sort_index()).predict_proba(frame)
    np.testing.assert_array_equal(again, weighted)
    numbered = pd.concat(listed(), keys=np.roll(np.arange(24), 3))
    with pytest.raises(InvalidArgument, match=r"the index of y counts 0, 1, .* in another order.*y.to_numpy\(\)"):
        SeriesClassifier(**SMALL).fit(numbered, pd.Series(Y))
    assert SeriesClassifier(**SMALL).fit(numbered, pd.Series(Y).to_numpy()).classes_.tolist() == ["other", "same"]


@pytest.mark.parametrize(
    ("X", "told"),
    [
        (lambda: [*listed()[:3], SERIES[3]], "X mixes data frames and others: case 3 is a ndarray. Rows of a frame are steps"),
        (lambda: dict(enumerate(listed())), "X is a dict; give a list of data frames"),
        (lambda: [*listed()[:2], listed()[2].rename(columns={"air": "co2"})], "case 0, .* case 2 lacks 'air'"),
        (lambda: [*listed()[:2], pd.DataFrame(SERIES[2].T)], r"those of case 0, \['pulse', 'air'\]; case 2 has \[0, 1\]"),
        (lambda: [listed()[0], listed()[1].assign(air="thin")], "case 1: column 'air' cannot be read as numbers"),
        (lambda: [listed()[0].assign(air=pd.Timestamp("2026-01-01"))], "column 'air' cannot be read as numbers"),
        (lambda: [listed()[0], listed()[1].iloc[:0]], r"case 1 is \(2, 0\)"),
        (lambda: listed(names=["a", "a"]), "must have names of their own; got a, a"),
        (lambda: pd.concat([indexed()], keys=["ward"]), r"the index of X has 3 levels; expected two, \(instance, time\)"),
        (lambda: pd.concat([indexed(), indexed().iloc[:1]]), "two rows for instance 'patient 0' at time 0; keep one"),
        (lambda: pd.concat([molten(), molten().iloc[:1]]), "two values of channel 'pulse' for instance 'patient 0'"),
        (lambda: long().assign(time=lambda f: f["time"].astype(str)), "times of X are str.*pandas.to_numeric"),
        (lambda: long().assign(time=lambda f: f["time"].where(f["time"] > 0)), "rows without time"),
        (lambda: long().assign(case_id=lambda f: f["case_id"].where(f["time"] > 0)), "rows without instance"),
        (lambda: long().assign(id=1), "columns 'case_id', 'id' of X could each name the same thing"),
        (lambda: long()[["case_id", "time"]], "columns 'case_id' and 'time' alone"),
        (lambda: long().drop(columns="time"), r"column 'case_id' names instances .*X.set_index\(\['case_id', \.\.\.\]\)"),
        (
            lambda: long().rename(columns={"case_id": "patient", "time": "minute"}),
            r"each row is a univariate series, and column 'patient' cannot be read.* an index \(instance, time\)",
        ),
        (lambda: indexed().iloc[:0], "X has no rows"),
        (lambda: pd.DataFrame(), "a data frame of 0 rows and 0 columns"),
        (lambda: pd.DataFrame(WHOLE[:3, 0]).assign(id=range(3)), "named by text and by numbers"),
        (
            lambda: indexed().reset_index(drop=True),
            rf"each of its {sum(LENGTHS)} rows is a univariate series, and y has 3 labels. .* an index \(instance, time\)",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(X, told):
    with pytest.raises(InvalidArgument, match=told):
        SeriesClassifier(**SMALL).fit(X(), Y[:3])


def test_a_list_of_frames_is_searched_over():
    cases = [frame for _, frame in indexed().groupby(level=0, sort=False)]
    search = GridSearchCV(SeriesClassifier(**SMALL | {"epochs": 1}), {"class_weight": [None, "balanced"]}, cv=2)
    found = search.fit(cases, Y, sample_weight=np.ones(24)).best_estimator_
    np.testing.assert_array_equal(found.predict_proba(cases), found.predict_proba(indexed()))


def test_a_label_for_every_row_is_refused():
    frame = indexed()
    with pytest.raises(
        InvalidArgument, match=rf"each of the 24 instances .* got {len(frame)}; .*reset_index\(drop=True\)"
    ):
        SeriesClassifier(**SMALL).fit(frame, np.arange(len(frame)) % 2)
    with pytest.raises(
        InvalidArgument, match=r"sample_weight must have one entry for each of the 24 instances .* got 3$"
    ):
        SeriesClassifier(**SMALL).fit(frame, Y, np.ones(3))


def test_a_plain_frame_is_a_table():
    table = pd.DataFrame(WHOLE[:, 0], columns=[f"t{at}" for at in range(11)])
    model = SeriesClassifier(**SMALL).fit(table, Y)
    wanted = model.predict_proba(table)
    np.testing.assert_array_equal(model.predict_proba([pd.DataFrame({"any": case[0]}) for case in WHOLE]), wanted)
    assert model.n_features_in_ == 11


def test_a_model_of_a_table_takes_lists_of_any_length():
    model = SeriesClassifier(**SMALL, predict_dtype="float64").fit(WHOLE[:, 0], Y)
    wanted = model.predict_proba(WHOLE[:, 0])
    for longer in ([[*case[0], 1.0, 2.0] for case in WHOLE], tuple(np.append(case[0], [1.0, 2.0]) for case in WHOLE)):
        with pytest.warns(UserWarning, match="24 of 24 series are longer than the longest of the training, 11 steps"):
            np.testing.assert_allclose(model.predict_proba(longer), wanted, atol=1e-12)
    unequal = [case[0, :length] for case, length in zip(WHOLE, LENGTHS, strict=True)]
    np.testing.assert_allclose(
        model.predict_proba([unequal[1].tolist()] * 2), model.predict_proba(unequal)[[1, 1]], atol=1e-12
    )
    with pytest.raises(ValueError, match="X has 12 features, but SeriesClassifier is expecting 11"):
        model.predict(np.zeros((3, 12)))

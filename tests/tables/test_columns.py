"""Columns as people hold them: what a cell is does not depend on the rows beside it, and what is filled in is of its column's kind."""

import datetime
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.datasets import load_iris

from heedful import InvalidArgument, Unsupported
from heedful.tables import DatapointClassifier, DatapointRegressor, TransportClassifier, read
from heedful.tables._columns import mended

QUICK = {
    "members": 1,
    "epochs": 3,
    "embed_dim": 8,
    "row_tokens": 2,
    "lr": 0.01,
    "random_state": 0,
    "device": "cpu",
    "progress": False,
}


def fit(X, y, **options):
    return DatapointClassifier(**QUICK | options).fit(X, y)


def test_a_level_is_the_same_whatever_stands_beside_it(tmp_path):
    """A file of numbers alone, of dates alone or of truth values alone has other types than one with a word among them."""
    words = {
        "place": ["12", "7", "A1", "12.5"],
        "day": ["2020-01-01", "2020-02-01", "unknown", "2021-01-01"],
        "sure": ["True", "False", "maybe", "True"],
    }
    lines = [[words[name][row % 4] for name in words] + [str(row % 2)] for row in range(40)]
    for name, rows in (("all", lines), ("some", lines[:2])):
        text = "\n".join(",".join(row) for row in [[*words, "y"], *rows])
        (tmp_path / f"{name}.csv").write_text(text)
    whole, some = (read(tmp_path / f"{name}.csv").labelled_by("y") for name in ("all", "some"))
    model = fit(whole.X, whole.y)
    assert set(model.columns_.kinds) == {"category"}
    np.testing.assert_allclose(model.predict_proba(some.X), model.predict_proba(whole.X)[:2], atol=1e-6)
    cells = np.array(lines, dtype=object)[:, :3]
    model = fit(cells, whole.y)
    np.testing.assert_allclose(model.predict_proba(cells[:1]), model.predict_proba(cells)[:1], atol=1e-6)


def test_codes_keep_their_zeros(tmp_path):
    (tmp_path / "a.csv").write_text("zip,n,x,d\n00003,1,0.1,2021-04-25\n10000,2,,2021-04-26\n")
    frame = read(tmp_path / "a.csv").X
    assert frame["zip"].tolist() == ["00003", "10000"]
    assert frame["n"].dtype == np.int64
    assert frame["x"].tolist()[0] == 0.1
    assert frame["d"].dtype.kind == "M"


@pytest.mark.parametrize(
    "estimator", [DatapointClassifier(**QUICK), TransportClassifier(members=1, epochs=3, random_state=0, device="cpu")]
)
def test_rows_of_weight_zero_teach_nothing(estimator):
    X, y = load_iris(return_X_y=True)
    weights = np.linspace(0.5, 2, 150)
    weights[::7] = 0
    kept = weights > 0
    X[~kept], named = 1e8, np.where(kept, y, 7)
    model = clone(estimator).fit(X, named, sample_weight=weights)
    wanted = clone(estimator).fit(X[kept], y[kept], sample_weight=weights[kept])
    assert model.classes_.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(model.predict_proba(X[1:5]), wanted.predict_proba(X[1:5]))


def test_explained_rows_are_those_of_fit():
    X, y = load_iris(return_X_y=True)
    weights = np.ones(150)
    weights[:50:2] = 0
    model = DatapointClassifier(**QUICK).fit(X, y, sample_weight=weights)
    found = model.explain_row(X[60:61], top=5)
    values = np.stack([found.values[name] for name in found.values], axis=1)
    np.testing.assert_array_equal(values, X[list(found.rows)])
    assert found.targets == tuple(y[list(found.rows)].tolist())
    kept = model.deletion_test(X[60:61], first=0.05, retries=2).kept[0]
    assert weights[list(kept)].all()


def test_an_explanation_is_of_the_prediction(tmp_path):
    """Also where answers look at the nearest rows alone."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(150, 2))
    y = ((X**2).sum(1) > 1.2).astype(int)
    model = fit(X, y, context_size=8, members=2)
    model.save_pretrained(tmp_path / "model")
    model = DatapointClassifier.from_pretrained(tmp_path / "model")
    asked = rng.normal(size=(7, 2))
    shares = model.row_attention(asked)
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-6)
    assert ((shares > 0).sum(1) <= 8).all()
    for row in range(7):
        found = model.explain_row(asked[row : row + 1], top=20)
        assert found.prediction == pytest.approx(model.predict_proba(asked[row : row + 1]).max(), abs=1e-6)
        assert (found.answer, found.stored) == (model.predict(asked[row : row + 1])[0], 8)
        assert set(found.rows) == set(np.argsort(np.linalg.norm((X - asked[row]) / X.std(0), axis=1))[:8].tolist())
        np.testing.assert_allclose(found.shares, shares[row, list(found.rows)], atol=1e-6)
    assert model.corruption_test(asked, np.arange(7) % 2).clean == pytest.approx(
        model.evaluate(asked, np.arange(7) % 2), abs=1e-6
    )
    with pytest.raises(Unsupported, match="context_size=None"):
        model.deletion_test(asked)
    with pytest.raises(Unsupported, match="part of the table"):
        model.explain_row(asked[:1], context="batch")
    with pytest.raises(Unsupported, match="part of the table"):
        fit(X, y, mode="transductive").row_attention(asked)


def test_what_is_filled_in_is_of_its_kind():
    rng = np.random.default_rng(0)
    count = 40
    frame = pd.DataFrame(
        {
            "length": pd.to_timedelta(rng.integers(0, 90, count), unit="h"),
            "zoned": pd.date_range("2024-01-01", periods=count, tz="Europe/Berlin"),
            "whole": pd.array(rng.integers(0, 9, count), dtype="Int64"),
            "sure": pd.array(rng.random(count) < 0.5, dtype="boolean"),
            "word": pd.array(rng.choice(["a", "b"], count), dtype="string"),
            "number": rng.normal(size=count),
            "sort": pd.Categorical(rng.choice(["u", "v"], count)),
        }
    )
    holed = frame.copy()
    for place in range(frame.shape[1]):
        holed.iloc[[place, 20 + place], place] = None
    model = fit(holed, np.arange(count) % 2)
    assert model.columns_.kinds == ("duration", "date", "number", "category", "category", "number", "category")
    filled = model.impute(holed)
    assert filled.notna().all().all()
    there = holed.notna()
    for name in frame:
        assert (filled[name][there[name]] == frame[name][there[name]]).all(), name
    kinds = {name: filled[name].dtype for name in frame if name != "whole"}
    assert kinds == {name: holed[name].dtype for name in frame if name != "whole"}
    assert str(filled["whole"].dtype) == "Float64"
    assert isinstance(model.explain_row(holed[:1]).values["length"][0], np.timedelta64)


def test_levels_that_are_there_stay():
    """Also those never seen in `fit`, and those beyond the most frequent ones."""
    X = np.array([[f"l{row}", row % 3] for row in range(300)], dtype=object)
    X[-1, 1] = None
    model = fit(X, np.arange(300) % 2)
    with pytest.warns(UserWarning, match="not among the 256 known ones"):
        filled = model.impute(X)
    np.testing.assert_array_equal(filled[:, 0], X[:, 0])
    np.testing.assert_array_equal(filled[:-1, 1], X[:-1, 1])
    assert isinstance(filled[-1, 1], float)


def test_mended_columns_keep_what_they_hold():
    gone = np.array([False, True])
    assert mended(pd.Series([True, None], dtype=object), gone, np.array([True, False])).tolist() == [True, False]
    assert mended(pd.Series([1.0, np.nan]), gone, np.array([1.0, 2.5])).tolist() == [1.0, 2.5]


def test_days_and_decimals_are_read():
    days = [datetime.date(2020, 1, 1 + row % 28) for row in range(30)]
    frame = pd.DataFrame({"day": days, "price": [Decimal(row) / 4 for row in range(30)]})
    model = fit(frame, np.arange(30) % 2)
    assert model.columns_.kinds == ("date", "number")
    with pytest.raises(InvalidArgument, match="cannot be read as dates"):
        model.predict(frame.assign(day=1.5))


def test_one_group_is_no_hold_out():
    X, y = load_iris(return_X_y=True)
    for estimator in (DatapointClassifier, DatapointRegressor):
        model = estimator(**QUICK | {"members": 3}).fit(X, y, groups=np.zeros(150))
        assert not model.training_.measured


def test_a_target_in_the_frame_serves_scores_too():
    X, y = load_iris(return_X_y=True)
    frame = pd.DataFrame(X).rename(columns=str).assign(kind=y)
    model = DatapointClassifier(**QUICK, target="kind").fit(frame)
    assert model.score(frame) == model.score(frame.drop(columns="kind"), y)
    assert model.evaluate(frame) == model.evaluate(frame.drop(columns="kind"), y)
    truth = pd.Series(y > 1, dtype="boolean")
    assert DatapointClassifier(**QUICK).fit(X, truth).predict(X[:1]).dtype == bool


def test_wrong_targets_and_contexts_are_named():
    X, y = load_iris(return_X_y=True)
    with pytest.raises(InvalidArgument, match="y must be numbers"):
        DatapointRegressor(**QUICK).fit(X, np.array(["a", "b", "c"])[y])
    with pytest.raises(InvalidArgument, match="dates or lengths"):
        DatapointRegressor(**QUICK).fit(X, np.datetime64("2020-01-01") + y.astype("timedelta64[D]"))
    model = fit(X, y)
    for context in (X, pd.DataFrame(X)):
        with pytest.raises(InvalidArgument, match="context must be"):
            model.predict(X, context=context)
    assert fit(X, y, row_encoder="flatten").score(X, y) > 0.3

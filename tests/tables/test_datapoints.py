"""Estimators of rows: what an answer may depend on, what they read, fill in and explain."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_iris

from heedful import InvalidArgument, Unsupported
from heedful.bridges.estimator import Estimator
from heedful.bridges.samples import Samples
from heedful.tables import DatapointClassifier, DatapointRegressor, estimator_for
from heedful.tables._calibration import temperature
from heedful.tables._folds import drawn_folds

QUICK = {"members": 2, "epochs": 4, "embed_dim": 8, "row_tokens": 2, "lr": 0.01, "random_state": 0, "device": "cpu"}


def people(n=120, seed=0):
    """Numbers, text, dates and missing cells; who buys is older than 45, or lives in Rome."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.integers(18, 80, n).astype(float),
            "city": rng.choice(["Bern", "Rome", "Oslo"], n),
            "since": pd.to_datetime("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, n), unit="D"),
            "income": rng.normal(50, 10, n),
            "member": pd.Categorical(rng.choice([1, 2, 3], n)),
        }
    )
    y = np.where((frame["age"] > 45) | (frame["city"] == "Rome"), "yes", "no")
    frame.loc[rng.random(n) < 0.1, "age"] = np.nan
    frame.loc[rng.random(n) < 0.1, "city"] = None
    frame.loc[rng.random(n) < 0.1, "since"] = pd.NaT
    return frame, y


@pytest.fixture(scope="module")
def fitted():
    X, y = people()
    return DatapointClassifier(**QUICK | {"epochs": 10}).fit(X, y)


@pytest.fixture(scope="module")
def flowers():
    X, y = load_iris(return_X_y=True)
    return DatapointClassifier(**QUICK).fit(X[::2], y[::2])


def test_an_answer_does_not_depend_on_what_else_is_asked(flowers):
    X = load_iris().data[1::2]
    answers = flowers.predict_proba(X)
    order = np.random.default_rng(0).permutation(len(X))
    np.testing.assert_allclose(flowers.predict_proba(X[order]), answers[order], atol=1e-6)
    np.testing.assert_allclose(
        np.concatenate([flowers.predict_proba(X[i : i + 1]) for i in range(9)]), answers[:9], atol=1e-6
    )
    together = flowers.predict_proba(X, context="batch")
    assert np.abs(together - answers).max() > 1e-4, "rows that are part of the table are looked at"


def test_the_labels_of_asked_rows_are_no_part_of_anything():
    """Rows without a target, and the values stored for it, change neither weights nor answers."""
    X, y = load_iris(return_X_y=True)
    weights = []
    for labels in (y, np.where(np.arange(150) % 2, 2 - y, y)):
        model = DatapointClassifier(**QUICK).fit(X[::2], labels[::2], unlabelled=X[1::2])
        weights.append(torch.cat([part.flatten() for part in model.network_.parameters()]))
    assert torch.equal(*weights)
    plain = DatapointClassifier(**QUICK).fit(X[::2], y[::2])
    assert not torch.equal(weights[0], torch.cat([part.flatten() for part in plain.network_.parameters()]))


def test_transductive_rows_are_part_of_the_table():
    X, y = load_iris(return_X_y=True)
    model = DatapointClassifier(**QUICK, mode="transductive").fit(X[::2], y[::2], unlabelled=X[1::2])
    np.testing.assert_array_equal(model.predict_proba(X[1::2]), model.predict_proba(X[1::2], context="batch"))
    assert len(model.context_cells_) == 75
    assert model.score(X[1::2], y[1::2]) > 0.8


def test_another_context_gives_another_answer(flowers):
    X, y = load_iris(return_X_y=True)
    own = flowers.predict_proba(X[1::2], context=(X[::2], y[::2]))
    np.testing.assert_allclose(own, flowers.predict_proba(X[1::2]), atol=1e-6)
    assert np.abs(flowers.predict_proba(X[1::2], context=(X[:60:3], y[:60:3])) - own).max() > 1e-4
    with pytest.raises(InvalidArgument, match="no class of this model"):
        flowers.predict(X[:2], context=(X[:3], np.array([7, 7, 7])))
    with pytest.raises(InvalidArgument, match="one for each"):
        flowers.predict(X[:2], context=(X[:3], y[:2]))
    with pytest.raises(InvalidArgument, match="context must be"):
        flowers.predict(X[:2], context=3)


def test_nearest_rows_are_a_table_of_their_own(flowers):
    X, y = load_iris(return_X_y=True)
    stored, asked = X[::2], X[1::2]
    answers = flowers.predict_proba(asked, context_size=11)
    scaled = (stored - stored.mean(0)) / stored.std(0, ddof=1)
    for i in (0, 20, 60):
        row = (asked[i] - stored.mean(0)) / stored.std(0, ddof=1)
        nearest = np.argsort(((scaled - row) ** 2).sum(1))[:11]
        alone = flowers.predict_proba(asked[i : i + 1], context=(stored[nearest], y[::2][nearest]))
        np.testing.assert_allclose(answers[i], alone[0], atol=1e-5)
    np.testing.assert_allclose(flowers.predict_proba(asked, context_size=75), flowers.predict_proba(asked), atol=1e-6)


@pytest.mark.parametrize("nothing", [np.nan, None, pd.NA])
def test_missing_targets_are_counted(nothing):
    frame, y = people(30)
    cells = [nothing, nothing, *y[2:]]
    for target in (cells, pd.Series(cells, dtype=object)):
        with pytest.raises(InvalidArgument, match="2 of 30 targets missing"):
            DatapointClassifier(**QUICK).fit(frame, target)


def test_nearest_rows_are_found_among_all(flowers, monkeypatch):
    """Also where answers by default look at some rows alone, and where distances are taken in parts."""
    X = load_iris().data[1::2]
    wanted = flowers.predict_proba(X, context_size=9)
    monkeypatch.setattr("heedful.tables._looking.STORED", 20)
    monkeypatch.setattr("heedful.tables._looking.DISTANCES", 7 * 75)
    np.testing.assert_allclose(flowers.predict_proba(X, context_size=9), wanted, atol=1e-6)


def test_of_many_rows_some_are_measured(monkeypatch):
    """The same ones in each epoch, and with weights; few rows are all measured."""
    X, y = load_iris(return_X_y=True)
    whole = DatapointClassifier(**QUICK).fit(X, y, sample_weight=np.arange(1, 151)).training_
    monkeypatch.setattr("heedful.tables._training.MEASURED", 10)
    models = [DatapointClassifier(**QUICK).fit(X, y, sample_weight=np.arange(1, 151)) for _ in range(2)]
    losses = [[epoch.held_out["loss"] for epoch in model.training_.epochs] for model in models]
    assert losses[0] == losses[1]
    assert losses[0] != [epoch.held_out["loss"] for epoch in whole.epochs]


def test_frames_of_people(fitted, tmp_path):
    X, y = people(seed=1)
    assert fitted.columns_.kinds == ("number", "category", "date", "number", "category")
    assert fitted.score(X, y) > 0.7
    fitted.save_pretrained(tmp_path / "model")
    again = Estimator.from_pretrained(tmp_path / "model")
    np.testing.assert_array_equal(again.predict_proba(X), fitted.predict_proba(X))
    with pytest.warns(UserWarning, match="'city' holds levels that are not among the 3 known ones \\(Pisa\\)"):
        answers = fitted.predict_proba(X.assign(city="Pisa"))
    np.testing.assert_allclose(answers, fitted.predict_proba(X.assign(city=None)), atol=1e-6)
    with pytest.raises(InvalidArgument, match="'age' held numbers in fit"):
        fitted.predict(X.assign(age="old"))
    with pytest.raises(InvalidArgument, match="'since' cannot be read as dates"):
        fitted.predict(X.assign(since="soon"))
    with pytest.raises(InvalidArgument, match="feature names"):
        fitted.predict(X.rename(columns={"age": "years"}))


def test_a_target_column_may_lie_in_the_frame():
    X, y = people()
    model = DatapointClassifier(**QUICK, target="buys").fit(X.assign(buys=y))
    plain = DatapointClassifier(**QUICK).fit(X, y)
    np.testing.assert_array_equal(model.predict_proba(X.assign(buys="no")), plain.predict_proba(X))
    with pytest.raises(InvalidArgument, match="target='sells' is no column"):
        DatapointClassifier(**QUICK, target="sells").fit(X)


def test_categories_may_be_said():
    X = np.random.default_rng(0).integers(0, 3, (60, 2)).astype(float)
    y = X[:, 0] == 1
    model = DatapointClassifier(**QUICK, categorical=[0]).fit(X, y)
    assert model.columns_.kinds == ("category", "number")
    assert model.score(X, y) == 1.0
    with pytest.raises(InvalidArgument, match="no column"):
        DatapointClassifier(**QUICK, categorical=["colour"]).fit(X, y)
    mixed = np.array([[1.5, "a"], [2.5, "b"], [None, "a"], [0.5, None]] * 5, dtype=object)
    assert DatapointClassifier(**QUICK).fit(mixed, [0, 1, 0, 1] * 5).columns_.kinds == ("number", "category")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda X, y: (X[:1], y[:1]), "one sample"),
        (lambda X, y: (X, np.zeros(len(y))), "one class"),
        (lambda X, y: (np.column_stack((X, np.full(len(X), np.nan))), y), "holds no value at all"),
        (lambda X, y: (np.where(X > 7, np.inf, X), y), "infinity"),
        (lambda X, y: (X, y[:-1]), "inconsistent"),
        (lambda X, y: (X, np.where(y == 1, np.nan, y)), "NaN"),
    ],
)
def test_what_cannot_be_learned_from(change, message):
    with pytest.raises(InvalidArgument, match=message):
        DatapointClassifier(**QUICK).fit(*change(*load_iris(return_X_y=True)))


def test_far_values_are_refused(flowers):
    with pytest.raises(InvalidArgument, match="standard deviations"):
        flowers.predict([[1e30, 1.0, 1.0, 1.0]])


def test_cells_are_filled_in(fitted):
    X, _ = people(seed=2)
    filled = fitted.impute(X)
    assert not filled.isna().any().any()
    known = X.notna()
    for name in X.columns:
        assert (filled[name][known[name]].to_numpy() == X[name][known[name]].to_numpy()).all()
    assert set(filled["city"]) <= {"Bern", "Rome", "Oslo"}
    assert filled["since"].dtype.kind == "M"
    assert X["age"].isna().any(), "what was given stays as it was"
    assert fitted.impute(X.dropna()).equals(X.dropna())


def test_filled_cells_are_nearer_than_means():
    """Check 13 on one split: a fifth of the cells is missing."""
    X, y = load_breast_cancer(return_X_y=True)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(X))
    X, y = X[order], y[order]
    gone = rng.random(X.shape) < 0.2
    holes = np.where(gone, np.nan, X)
    model = DatapointClassifier(members=1, random_state=0, device="cpu").fit(holes[:400], y[:400])
    scale = np.nanstd(holes[:400], axis=0)
    hidden = gone[400:]
    ours = ((model.impute(holes[400:]) - X[400:]) / scale)[hidden]
    means = ((np.nanmean(holes[:400], axis=0) - X[400:]) / scale)[hidden]
    assert np.sqrt((ours**2).mean()) < 0.7 * np.sqrt((means**2).mean())
    assert model.score(holes[400:], y[400:]) > 0.9


def test_attention_to_rows_is_shown(flowers):
    X = load_iris().data[1::2]
    for options in ({}, {"layer": 0}, {"head": 1}):
        weights = flowers.row_attention(X, **options)
        assert weights.shape == (75, 75)
        np.testing.assert_allclose(weights.sum(1), 1.0, atol=1e-5)
    with pytest.raises(InvalidArgument, match="layer must be"):
        flowers.row_attention(X, layer=5)
    with pytest.raises(InvalidArgument, match="head must be"):
        flowers.row_attention(X, head=9)


def test_the_effect_of_a_row_is_what_its_removal_does(flowers):
    X, y = load_iris(return_X_y=True)
    stored, labels = X[::2], y[::2]
    asked = X[101:102]
    explanation = flowers.explain_row(asked, top=4)
    probabilities = flowers.predict_proba(asked)[0]
    best = probabilities.argmax()
    assert explanation.answer == flowers.classes_[best]
    assert abs(explanation.prediction - probabilities[best]) < 1e-6
    for row, effect in zip(explanation.rows, explanation.effects, strict=True):
        rest = np.arange(75) != row
        without = flowers.predict_proba(asked, context=(stored[rest], labels[rest]))[0, best]
        assert abs(probabilities[best] - without - effect) < 1e-6
    np.testing.assert_array_equal(explanation.values["0"], stored[list(explanation.rows), 0])
    assert list(explanation.targets) == labels[list(explanation.rows)].tolist()
    assert list(explanation.shares) == sorted(explanation.shares, reverse=True)
    assert "asked" in str(explanation)
    assert explanation.to_frame().shape == (5, 7)
    assert explanation.plot().get_xlabel() == "share of the votes"
    assert explanation.to_dict()["stored"] == 75
    with pytest.raises(InvalidArgument, match="one row"):
        flowers.explain_row(X[:2])


def test_explanations_of_people_show_what_stands_there(fitted):
    X, _ = people()
    explanation = fitted.explain_row(X[3:4], top=60)
    shown = explanation.to_frame()
    for name, column in X.iloc[[3, *explanation.rows]].items():
        values, stands = shown[name].to_numpy(), column.astype(object).to_numpy()
        assert all(one == two or (pd.isna(one) and pd.isna(two)) for one, two in zip(values, stands, strict=True)), name
    text = str(explanation)
    assert " 202" in text, "dates are dates"
    assert "T00" not in text
    assert "NaT" not in text
    assert " - " in text


def test_scrambled_rows_and_deleted_rows(flowers):
    X, y = load_iris(return_X_y=True)
    test = flowers.corruption_test(X[1::2], y[1::2], n_repeats=2)
    assert set(test.clean) == {"accuracy", "log_loss"}
    assert test.change["log_loss"] != 0
    apart = DatapointClassifier(**QUICK, between_rows=False).fit(X[::2], y[::2])
    assert apart.corruption_test(X[1::2], y[1::2], n_repeats=5).change == {"accuracy": 0.0, "log_loss": 0.0}
    with pytest.raises(Unsupported, match="between_rows=False"):
        apart.explain_row(X[:1])
    deleted = flowers.deletion_test(X[1:140:40])
    assert len(deleted.kept) == 4
    assert all(0 < share <= 1 for share in deleted.shares)
    before = flowers.predict_proba(X[1:2])[0]
    kept = list(deleted.kept[0])
    after = flowers.predict_proba(X[1:2], context=(X[::2][kept], y[::2][kept]))[0]
    assert abs(after[before.argmax()] - before.max()) / before.max() < 0.1 + 1e-6
    assert "needed" in str(deleted)
    assert deleted.plot() is not None
    assert test.plot() is not None


def test_groups_are_held_out_together():
    X, y = load_iris(return_X_y=True)
    groups = np.arange(150) // 5
    folds = drawn_folds(Samples((X,), y, None, groups), 2, 0.2, seed=0)
    assert all(len(set(folds[groups == group])) == 1 for group in range(30))
    assert set(folds) == {0, 1}
    DatapointClassifier(**QUICK | {"epochs": 1}).fit(X, y, groups=groups)


def test_numbers_are_predicted():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(150, 3))
    y = 100 + 20 * (X[:, 0] - 2 * X[:, 1])
    model = DatapointRegressor(**QUICK).fit(X[:100], y[:100])
    assert model.score(X[100:], y[100:]) > 0.95
    explanation = model.explain_row(X[100:101], top=3)
    assert abs(explanation.prediction - model.predict(X[100:101])[0]) < 1e-3
    np.testing.assert_array_equal(explanation.targets, y[list(explanation.rows)])
    assert set(model.corruption_test(X[100:], y[100:]).clean) == {"rmse"}
    assert len(model.deletion_test(X[100:102]).kept) == 2
    with pytest.raises(InvalidArgument, match="must be numbers"):
        model.predict(X[:2], context=(X[:2], np.array(["a", "b"])))


def test_where_nothing_is_hidden_numbers_are_filled_by_the_others_and_categories_by_their_most_frequent_level():
    rng = np.random.default_rng(0)
    first = rng.normal(size=150)
    table = pd.DataFrame({"a": first, "b": 3 * first, "kind": np.where(first > -0.5, "often", "apart")})
    model = DatapointRegressor(**QUICK).fit(table, first + rng.normal(size=150))
    assert model._setting("p_feature") == 0
    asked = table.copy()
    asked.loc[::2, "kind"] = None
    asked.loc[1::2, "b"] = np.nan
    filled = model.impute(asked)
    assert set(filled["kind"][::2]) == {"often"}
    assert np.corrcoef(filled["b"][1::2], table["b"][1::2])[0, 1] > 0.99


@pytest.mark.parametrize("preset", ["small", "base", "authors"])
def test_every_preset_learns(preset):
    X, y = load_iris(return_X_y=True)
    # Few steps of the published schedule: LAMB's are small.
    options = {"epochs": 12, "embed_dim": 16, "num_heads": 4, "lr": 0.02 if preset != "small" else 0.005}
    model = DatapointClassifier(preset, layers=1, random_state=0, device="cpu", **options).fit(X[::2], y[::2])
    assert model.score(X[1::2], y[1::2]) > 0.85
    assert model.predict_proba(X[:2]).shape == (2, 3)


def test_inducing_rows_answer_too():
    X, y = load_iris(return_X_y=True)
    model = DatapointClassifier(**QUICK, inducing=5).fit(X[::2], y[::2])
    assert model.score(X[1::2], y[1::2]) > 0.8
    with pytest.raises(Unsupported, match="inducing"):
        model.row_attention(X[:2])


def test_sure_answers_are_cooled():
    torch.manual_seed(0)
    target = torch.randint(2, (2000,))
    logits = torch.randn(2000, 2, dtype=torch.float64) + 2 * torch.nn.functional.one_hot(target, 2)
    fair = temperature(logits, target)
    assert abs(temperature(3 * logits, target) / fair - 3) < 0.1


def test_the_estimator_follows_the_target():
    assert estimator_for(np.arange(50)) == "DatapointRegressor"
    assert estimator_for(np.array([True, False])) == "DatapointClassifier"
    assert estimator_for(np.arange(50) % 7) == "DatapointClassifier"


def test_the_same_seed_gives_the_same_weights():
    X, y = load_iris(return_X_y=True)
    first, second = (DatapointClassifier(**QUICK).fit(X, y).predict_proba(X) for _ in range(2))
    np.testing.assert_array_equal(first, second)

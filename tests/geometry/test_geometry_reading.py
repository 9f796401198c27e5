"""What users hold: arrays, lists of unequal numbers of points, data frames in long form; what cannot be read says why."""

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")
pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")

import pandas as pd
import torch

from heedful import InvalidArgument
from heedful.bridges.estimator import Estimator
from heedful.geometry import EquivariantClassifier, EquivariantRegressor

QUICK = {"layers": 1, "channels": 3, "width": 8, "units": 4, "epochs": 2, "random_state": 0, "device": "cpu"}
EXACT = QUICK | {"predict_dtype": "float64"}


def sets(count=17, seed=0):
    """Sets of one to seven points with a position and a charge, and what is to be predicted of each kind."""
    rng = np.random.default_rng(seed)
    X = [rng.normal(size=(n, 4)) for n in rng.permutation(np.resize(np.arange(1, 8), count))]
    return X, np.array([np.square(case).sum() for case in X])


def long(X, names=None, order=None):
    """One row per point; the rows of a case keep their order."""
    names = [f"m{at}" for at in range(len(X))] if names is None else names
    frame = pd.DataFrame(np.concatenate(X), columns=["x", "y", "z", "charge"])
    frame.insert(0, "case", np.repeat(names, [len(case) for case in X]))
    return frame if order is None else frame.iloc[order]


def test_every_form_of_equal_sets_gives_one_model():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(13, 5, 4))
    y = np.square(X).sum((1, 2))
    wanted = EquivariantRegressor(3, **EXACT).fit(X, y).predict(X)
    objects = np.empty(13, dtype=object)
    objects[:] = list(X)
    frame = long(X)
    forms = [
        list(X), tuple(X), objects, X.tolist(), torch.from_numpy(X), [torch.from_numpy(case) for case in X], frame,
        frame.set_index("case"), frame.set_index(["case", np.tile(np.arange(5), 13)]),
        frame.rename(columns={"case": "molecule"}).set_index(["molecule", np.tile(np.arange(5), 13)]),
        [part.drop(columns="case") for _, part in frame.groupby("case", sort=False)],
    ]  # fmt: skip
    for form in forms:
        model = EquivariantRegressor(3, **EXACT).fit(form, y)
        np.testing.assert_allclose(model.predict(form), wanted, rtol=1e-9)
        np.testing.assert_allclose(model.predict(X), wanted, rtol=1e-9)
    named = EquivariantRegressor(3, case="molecule", **EXACT).fit(frame.rename(columns={"case": "molecule"}), y)
    np.testing.assert_allclose(named.predict(frame.rename(columns={"case": "molecule"})), wanted, rtol=1e-9)


def test_sets_of_unequal_sizes_are_answered_as_if_alone():
    X, y = sets()
    model = EquivariantRegressor(3, **EXACT).fit(X, y)
    alone = np.concatenate([model.predict([case]) for case in X])
    np.testing.assert_allclose(model.predict(X), alone, atol=1e-12)
    model = EquivariantRegressor(3, output="vector", **EXACT).fit(X, [case[:, :3] * case[:, 3:] for case in X])
    answers = model.predict(X)
    assert isinstance(answers, list)
    assert [part.shape for part in answers] == [(len(case), 3) for case in X]
    for case, part in zip(X, answers, strict=True):
        np.testing.assert_allclose(model.predict([case])[0], part, atol=1e-12)
        np.testing.assert_allclose(model.predict(case[None]), part[None], atol=1e-12)


def test_frames_go_by_their_names(tmp_path):
    X, y = sets()
    frame = long(X)
    model = EquivariantRegressor(3, **EXACT).fit(frame, pd.Series(y, index=[f"m{at}" for at in range(17)])[::-1])
    assert model.feature_names_in_.tolist() == ["x", "y", "z", "charge"]
    wanted = model.predict(frame)
    np.testing.assert_allclose(wanted, EquivariantRegressor(3, **EXACT).fit(X, y).predict(X), rtol=1e-9)
    model.save_pretrained(tmp_path)
    again = Estimator.from_pretrained(tmp_path)
    np.testing.assert_array_equal(again.predict(frame[["charge", "z", "case", "x", "y"]]), wanted)
    # Rows in another order: the same sets, cases in the order of their first rows.
    rows = np.random.default_rng(1).permutation(len(frame))
    order = pd.unique(frame["case"].iloc[rows])
    np.testing.assert_allclose(
        again.predict(frame.iloc[rows]), pd.Series(wanted, index=pd.unique(frame["case"]))[order], atol=1e-12
    )
    with pytest.raises(InvalidArgument, match="must be those of fit, 'x', 'y', 'z', 'charge'; X lacks 'charge'"):
        again.predict(frame.drop(columns="charge"))
    with pytest.raises(InvalidArgument, match="has besides 'mass'"):
        again.predict(frame.assign(mass=1.0))


def test_answers_of_points_come_with_the_rows():
    X, _ = sets()
    frame = long(X)
    forces = pd.DataFrame(np.concatenate([case[:, :3] * case[:, 3:] for case in X]), columns=list("uvw"))
    rows = np.random.default_rng(1).permutation(len(frame))
    model = EquivariantRegressor(3, output="vector", **EXACT).fit(frame, forces)
    mixed = EquivariantRegressor(3, output="vector", **EXACT | {"validation_fraction": None})
    mixed.fit(frame.iloc[rows], forces.iloc[rows])
    plain = EquivariantRegressor(3, output="vector", **EXACT).fit(X, [case[:, :3] * case[:, 3:] for case in X])
    for first, second in zip(model.predict(frame), plain.predict(X), strict=True):
        np.testing.assert_allclose(first, second, atol=1e-9)
    assert mixed.score(frame.iloc[rows], forces.iloc[rows]) == pytest.approx(mixed.score(frame, forces))
    assert model.score(frame, forces.to_numpy()) == pytest.approx(
        plain.score(X, [case[:, :3] * case[:, 3:] for case in X])
    )
    flat = EquivariantRegressor(3, **EXACT).fit(frame, forces["u"] ** 2)
    assert [part.shape for part in flat.predict(frame)] == [(len(case),) for case in X]
    with pytest.raises(InvalidArgument, match=r"another index than X; give y.loc\[X.index\]"):
        model.fit(frame, forces.iloc[rows])
    with pytest.raises(
        InvalidArgument, match="a label for each of 62 points, and a classifier takes one for each of 17"
    ):
        EquivariantClassifier(3, **QUICK).fit(frame, np.where(forces["u"] > 0, "up", "down"))


@pytest.mark.parametrize(
    ("output", "shape", "outputs", "per_point"),
    [
        ("scalar", (13,), 1, False), ("scalar", (13, 1), 1, False), ("scalar", (13, 2), 2, False), ("scalar", (13, 5, 1), 1, True),
        ("scalar", (13, 5, 2), 2, True), ("vector", (13, 3), 1, False), ("vector", (13, 6), 2, False), ("vector", (13, 5, 3), 1, True),
        ("vector", (13, 5, 9), 3, True),
    ],
)  # fmt: skip
def test_answers_have_the_shape_of_y(output, shape, outputs, per_point, tmp_path):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(13, 5, 4)), rng.normal(size=shape)
    model = EquivariantRegressor(3, output=output, **QUICK).fit(X, y)
    assert (model.outputs_, model.per_point_) == (outputs, per_point)
    assert model.predict(X).shape == shape
    assert model.predict(X).dtype == np.float64
    assert np.isfinite(model.score(X, y))
    assert {"loss", "absolute_error"} == set(model.training_.measured)
    model.save_pretrained(tmp_path)
    np.testing.assert_array_equal(EquivariantRegressor.from_pretrained(tmp_path).predict(X), model.predict(X))


def test_columns_are_vectors_and_then_scalars():
    X = np.random.default_rng(0).normal(size=(11, 3, 6))
    y = X.sum((1, 2))
    for options, wanted in (
        ({}, (6, 1, 0)), ({"vectors": 2}, (3, 2, 0)), ({"dim": 2}, (2, 1, 4)), ({"dim": 2, "vectors": 3}, (2, 3, 0)),
        ({"vectors": 0}, (1, 0, 6)), ({"dim": 1, "group": "SO"}, (1, 1, 5)),
    ):  # fmt: skip
        model = EquivariantRegressor(**options, **QUICK).fit(X, y)
        assert (model.dim_, model.vectors_, model.scalars_) == wanted
        assert model.n_features_in_ == 6
    table = EquivariantRegressor(**QUICK).fit(X[:, 0], y)
    assert (table.vectors_, table.scalars_, table.max_points_) == (0, 6, 1)
    table = EquivariantRegressor(dim=3, output="vector", **QUICK).fit(X[:, 0], X[:, 0, :3])
    assert (table.vectors_, table.scalars_, table.predict(X[:, 0]).shape) == (1, 3, (11, 3))


X, Y = np.random.default_rng(0).normal(size=(9, 5, 4)), np.arange(9.0)


def spoiled(value, at=(6, 2, 1)):
    spoiled = X.copy()
    spoiled[at] = value
    return spoiled


@pytest.mark.parametrize(
    ("X", "y", "options", "message"),
    [
        (spoiled(np.nan), Y, {}, r"X contains NaN \(case 6, point 2, column 1\); drop it or fill it in"),
        (list(spoiled(np.inf)), Y, {}, r"X contains infinity \(case 6, point 2, column 1\)"),
        (long(spoiled(np.nan)), Y, {}, r"X contains NaN \(case 6, point 2"),
        (X, np.where(Y == 3, np.nan, Y), {}, r"y contains NaN \(case 3\)"),
        (X, np.where(np.arange(45).reshape(9, 5, 1) == 7, np.nan, 0.0), {}, r"y contains NaN \(case 1, point 2"),
        (X, Y[:8], {}, "y must have one entry for each of the 9 cases of X; got 8"),
        (X, None, {}, "requires y to be passed"),
        (X, Y.astype(str), {}, "y cannot be read as numbers"),
        (X, np.zeros((9, 4, 1)), {}, "must have the 5 points of X; got 4"),
        (X, [np.zeros(5)] * 9, {}, r"as many as each case has points.*\(cases, 5, 1\) for one per point"),
        (list(X), [np.zeros((4, 2))] * 9, {}, r"y of case 0 must have shape \(5, 2\)"),
        (X, Y, {"output": "vector"}, "output='vector' wants y of shape .* with 3 columns for each vector; got 1"),
        (X, np.zeros((9, 4)), {"output": "vector"}, "3 columns for each vector; got 4 columns"),
        (X, Y, {"dim": 5}, "X has 4 columns; vectors=1 of dim=5 numbers need 5 or more"),
        (X, Y, {"dim": None, "vectors": 3}, "X has 4 columns, which are not vectors=3 vectors of equal size"),
        (X[0], Y[:5], {"dim": None, "translation": "invariant"}, "X is a table, a case of one point"),
        (X[..., None], Y, {}, r"X must have shape \(cases, points, columns\)"),
        (X[:, :0], Y, {}, r"with one of each or more; got \(9, 0, 4\)"),
        ([X[0], X[1][:0]], Y[:2], {}, r"with one point or more; case 1 has shape \(0, 4\)"),
        ([X[0], X[1][:, :3]], Y[:2], {}, "all points must have the same columns; case 0 has 4, case 1 has 3"),
        ([X[0], pd.DataFrame(X[1])], Y[:2], {}, "X mixes data frames and others: case 0 is a ndarray"),
        ([[["a", "b"]]] * 9, Y, {}, "case 0 cannot be read as numbers"),
        (X.astype(complex), Y, {}, "X cannot be read as numbers: complex128 is no number"),
        ([], Y, {}, "X is empty; give an array"),
        ({"x": [1.0]}, Y, {}, "X is a dict; give an array"),
        (long(X).rename(columns={"case": "molecule"}), Y, {}, "'case', so each of its 45 rows is a case of one point"),
        (long(X).assign(case=np.nan), Y, {}, "rows without a case"),
        (long(X).assign(charge="a"), Y, {}, "column 'charge' cannot be read as numbers"),
        (long(X)[["case"]], Y, {}, "45 rows and 0 columns beside 'case'"),
        (X, Y, {"translation": "equivariant"}, "is for answers that move along"),
        (X, Y, {"translation": "moved"}, "translation must be one of invariant, equivariant"),
        (X, Y, {"vectors": 0, "output": "vector"}, "needs points that have vectors"),
    ],
)
def test_what_cannot_be_read_says_why(X, y, options, message):
    with pytest.raises(InvalidArgument, match=message):
        EquivariantRegressor(**{"dim": 3} | QUICK | options).fit(X, y)


def test_what_does_not_fit_the_model_says_why():
    model = EquivariantRegressor(3, **QUICK).fit(X, Y)
    for wrong, message in (
        (X[0], r"was fitted on sets of points .* one case \(points, columns\) is given in a list, \[X\]"),
        (X[..., :3], "X has 3 features, but EquivariantRegressor is expecting 4 features"),
        (X * 1e14, "case 0 has values more than 1e.12 times as large"),
        (spoiled(np.nan), r"X contains NaN \(case 6"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            model.predict(wrong)
    table = EquivariantRegressor(**QUICK).fit(X[:, 0], Y)
    for wrong in (X, list(X)):
        with pytest.raises(InvalidArgument, match="fitted on a table"):
            table.predict(wrong)
    classes = EquivariantClassifier(3, **QUICK)
    for labels, message in (
        (np.zeros((9, 5)), "one label for each of the 9 cases; got shape .9, 5."),
        (["a"] * 9, "y holds one class"),
        (Y + 0.5, "Unknown label type: continuous"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            classes.fit(X, labels)


def test_labels_weights_and_groups_follow_the_cases():
    frame = long(X)
    names = [f"m{at}" for at in range(9)]
    labels = pd.Series(np.where(Y % 2 > 0, "odd", "even"), index=names)
    weights = pd.Series(1.0 + Y, index=names)
    plain = EquivariantClassifier(3, **QUICK).fit(X, labels.to_numpy(), weights.to_numpy())
    framed = EquivariantClassifier(3, **QUICK).fit(frame, labels[::-1], weights[::-1])
    np.testing.assert_allclose(framed.predict_proba(frame), plain.predict_proba(X), atol=1e-6)
    grouped = EquivariantClassifier(3, **QUICK).fit(frame, labels, groups=pd.Series(np.arange(9) // 3, index=names))
    assert grouped.classes_.tolist() == ["even", "odd"]
    with pytest.raises(InvalidArgument, match="sample_weight must have one entry for each of the 9 cases"):
        plain.fit(frame, labels, weights[:4])

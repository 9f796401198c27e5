"""Classes that are carried to places: where the places are, what is paired with what, and what is learned from."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")
pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")
pytest.importorskip("ot", reason="the extra 'transport' is not installed")

import pandas as pd
from sklearn.datasets import load_iris

from heedful import InvalidArgument
from heedful.bridges.estimator import Estimator
from heedful.tables import TransportClassifier
from heedful.tables._calibration import temperature
from heedful.tables._places import centres_of, distances, targets_of

QUICK = {"hidden": 32, "members": 3, "epochs": 15, "lr": 0.02, "random_state": 0, "device": "cpu"}


def blobs(count=60, width=3, classes=3, seed=0, apart=4.0):
    rng = np.random.default_rng(seed)
    y = np.arange(count) % classes
    means = apart * np.random.default_rng(99).normal(size=(classes, width))
    return rng.normal(size=(count, width)) + means[y], y


def sets(count=24, tokens=7, seed=0, apart=1.5):
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 2
    X = rng.normal(size=(count, tokens, 2))
    X[..., 0] += apart * (2 * y - 1)[:, None]
    return X, y


@pytest.fixture(scope="module")
def fitted():
    X, y = blobs()
    return TransportClassifier(**QUICK).fit(X, y)


def places(geometry, classes, width, separation=None):
    X, y = blobs(20 * classes, width, classes)
    return centres_of(geometry, separation, (X - X.mean(0)) / X.std(0), y)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_a_simplex_has_equal_distances(classes):
    for width in (classes - 1, classes, 11):
        found = places("simplex", classes, width)
        np.testing.assert_allclose(distances(found), 12.0, rtol=1e-12)
        np.testing.assert_allclose(found.mean(0), 0, atol=1e-12)
        np.testing.assert_allclose(distances(places("simplex", classes, width, 5.0)), 5.0, rtol=1e-12)


def test_more_classes_than_a_simplex_has_room_for_are_spread():
    with pytest.warns(UserWarning, match="6 classes in 2 columns: equal distances need 5"):
        found = places("simplex", 6, 2)
    # The best that there is on a circle: a hexagon.
    assert distances(found).min() == pytest.approx(12.0)
    assert np.linalg.norm(found, axis=1).max() == pytest.approx(12.0, rel=0.02)
    with pytest.warns(UserWarning, match="4 classes in 1 columns"):
        np.testing.assert_allclose(np.diff(places("simplex", 4, 1)[:, 0]), 12.0)
    with pytest.warns(UserWarning, match="9 classes in 3 columns"):
        found = places("simplex", 9, 3)
    assert np.linalg.norm(found, axis=1).max() < 12.0 / 1.1, "nine points on a ball can be 1.15 radii apart"


def test_a_circle_is_that_of_the_thesis():
    for classes, least in ((2, 12), (3, 15.59), (4, 16.97), (5, 17.63), (10, 18.54), (20, 18.77)):
        found = places("circle", classes, 3)
        angle = 2 * np.pi / classes
        np.testing.assert_allclose(found[1], [3 * classes * np.sin(angle), 3 * classes * np.cos(angle), 0], atol=1e-12)
        assert distances(found).min() == pytest.approx(least, abs=0.01)
    assert distances(places("circle", 7, 2, 5.0)).min() == pytest.approx(5.0)


def test_discriminant_places_keep_who_is_near_whom():
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    points = rng.normal(size=(90, 4)) + np.array([[0, 0, 0, 0], [2.0, 0, 0, 0], [9.0, 0, 0, 0]])[y]
    found = distances(centres_of("lda", None, points, y))
    assert found.mean() == pytest.approx(12.0)
    assert found[0] < found[2] < found[1], "the first two are near, the last is far from the first"


def test_places_that_cannot_be_are_refused():
    X, y = blobs()
    line = X[:, :1]
    with pytest.raises(InvalidArgument, match="geometry='circle' needs two columns or more"):
        TransportClassifier("circle", **QUICK).fit(line, y)
    with pytest.raises(InvalidArgument, match=r"geometry has shape \(3, 2\); expected \(classes, columns\) = \(3, 3\)"):
        TransportClassifier(np.eye(3)[:, :2], **QUICK).fit(X, y)
    with pytest.raises(InvalidArgument, match="two centres in geometry are equal"):
        TransportClassifier([[0, 0, 0], [1, 1, 1], [0, 0, 0]], **QUICK).fit(X, y)
    with pytest.raises(InvalidArgument, match="puts two classes at one place"):
        TransportClassifier("lda", **QUICK).fit(np.tile(np.eye(3), (2, 1)), [0, 0, 0, 1, 1, 1])
    for wrong, message in (
        ({"geometry": np.full((3, 3), np.nan)}, "geometry must be simplex, circle, lda or an array"),
        ({"geometry": np.eye(3), "separation": 2.0}, "separation belongs to a named geometry"),
        ({"separation": 0.0}, "separation must be a number above 0"),
        ({"pairing": "best"}, "pairing must be one of mean, ot, random"),
        ({"likelihood": "distance"}, "likelihood must be one of gaussian, softmax_distance"),
        ({"hidden": [8, 0]}, "hidden must be a whole number from 1 on"),
        ({"p": 0.5}, "p must be a number from 1 on"),
        ({"ot_batch": 0}, "ot_batch must be a whole number"),
        ({"calibrate": 1}, "calibrate must be one of True, False"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            TransportClassifier(**QUICK | wrong).fit(X, y)
    with pytest.raises(InvalidArgument, match="y holds one class"):
        TransportClassifier(**QUICK).fit(X, np.zeros(60))
    with pytest.warns(UserWarning, match="one case alone of the class 7"):
        TransportClassifier(**QUICK).fit(X, np.where(np.arange(60) == 5, 7, y))


def cheapest(points, cloud):
    """The best pairing, by trying all."""
    orders = itertools.permutations(range(len(cloud)))
    return min(np.square(points - cloud[list(order)]).sum() for order in orders)


def test_rows_are_paired_in_class_at_least_cost():
    points, codes = blobs(14, 2, 2)
    centres = np.array([[0.0, 6.0], [0.0, -6.0]])
    options = {"p": 2.0, "deviation": 1.5, "batch": 100, "seed": 3}
    paired, random = (targets_of(name, centres, points, codes, **options) for name in ("ot", "random"))
    for code in (0, 1):
        at = codes == code
        cloud = random[at]
        np.testing.assert_allclose(np.sort(paired[at], 0), np.sort(cloud, 0), err_msg="the same clouds")
        assert np.square(points[at] - paired[at]).sum() == pytest.approx(cheapest(points[at], cloud), abs=1e-9)
        assert np.abs(cloud - centres[code]).max() < 1.5 * 4
    np.testing.assert_array_equal(targets_of("mean", centres, points, codes, **options), centres[codes])
    batched = targets_of("ot", centres, points, codes, **options | {"batch": 3})
    assert np.isfinite(batched).all()
    assert np.square(points - batched).sum() > np.square(points - paired).sum() - 1e-9


@pytest.mark.parametrize("tokens", [1, 4, 20])
def test_tokens_of_sets_are_paired_as_a_flat_problem(tokens):
    """The code of the thesis un-flattened by the other axis: its cost is that of a random pairing."""
    from scipy.optimize import linear_sum_assignment

    X, y = sets(14, tokens)
    model = TransportClassifier(pairing="ot", **QUICK | {"epochs": 1})
    found = []
    inner = model._scale
    model._scale = lambda samples: (inner(samples), found.append(model._goals * model._unit))
    model.fit(X, y)
    goals = found[0]  # [cases, tokens, width]
    assert goals.shape == X.shape
    flat = (X - X.mean((0, 1))) / X.std((0, 1), ddof=1)
    total = 0.0
    for code in (0, 1):
        points, cloud = flat[y == code].reshape(-1, 2), goals[y == code].reshape(-1, 2)
        cost = np.square(points[:, None] - cloud).sum(-1)
        best = cost[linear_sum_assignment(cost)].sum()
        assert np.trace(cost) == pytest.approx(best, rel=1e-9), "each token is with its own goal"
        total += best
    assert model.plan_cost_ == pytest.approx(total / (14 * tokens), rel=1e-9)


def test_the_answers_are_those_of_the_formula(fitted):
    X, y = blobs(seed=1)
    mapped = fitted.transform(X)
    assert mapped.shape == (60, 3)
    squares = np.array([[np.square(point - centre).sum() for centre in fitted.centres_] for point in mapped])
    scores = (np.log(np.bincount(y) / 60) - squares / 2) / fitted.temperature_
    shares = np.exp(scores - scores.max(1, keepdims=True))
    np.testing.assert_allclose(fitted.predict_proba(X), shares / shares.sum(1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(fitted.outlier_score(X), np.sqrt(squares.min(1)), rtol=1e-9)
    assert fitted.score(X, y) > 0.95
    assert np.abs(mapped - fitted.centres_[y]).mean() < 2.0
    assert fitted.outlier_score(X + 30).min() > fitted.outlier_score(X).max()
    fitted.likelihood = "softmax_distance"
    try:
        scores = -np.sqrt(squares) / fitted.temperature_
        shares = np.exp(scores - scores.max(1, keepdims=True))
        np.testing.assert_allclose(fitted.predict_proba(X), shares / shares.sum(1, keepdims=True), rtol=1e-6)
    finally:
        fitted.likelihood = "gaussian"


def test_a_map_is_the_mean_of_members_that_left_rows_out():
    X, y = blobs()
    model = TransportClassifier(**QUICK)
    seen = []
    inner = model._loss

    def loss(network, inputs, target, weight):
        value = inner(network, inputs, target, weight)
        codes, goals, folds = target
        mapped = network.every(*inputs).detach()
        errors = [
            (mapped[member, row] - goals[row, 0]).square().mean()
            for row in range(len(codes))
            for member in range(3)
            if member != folds[row]
        ]
        seen.append((value.item(), torch.stack(errors).mean().item()))
        return value

    model._loss = loss
    model.fit(X, y)
    values, written = np.array(seen).T
    np.testing.assert_allclose(values, written, rtol=1e-4)
    with torch.no_grad():
        inputs = model._tensors(model._read(X))[0]
        every = model.network_.every(inputs)
    np.testing.assert_allclose(every.mean(0).numpy() * model._unit, model.transform(X), rtol=1e-5)


@pytest.mark.parametrize("pairing", ["mean", "ot", "random"])
@pytest.mark.parametrize("geometry", ["simplex", "circle", "lda"])
def test_every_pairing_and_geometry_learns(pairing, geometry):
    X, y = blobs()
    model = TransportClassifier(geometry, pairing=pairing, **QUICK).fit(X, y)
    other, labels = blobs(seed=1)
    assert model.score(other, labels) > 0.9
    assert model.training_.epochs[-1].loss < 0.5 * model.training_.epochs[0].loss
    assert np.isfinite(model.predict_proba(other)).all()


def test_test_labels_are_not_looked_at_and_training_statistics_are_used():
    X, y = blobs()
    other, labels = blobs(seed=1)
    model, again = (TransportClassifier(**QUICK).fit(X, y) for _ in range(2))
    before = model.predict_proba(other)
    model.score(other, labels[::-1])
    np.testing.assert_array_equal(model.predict_proba(other), before)
    np.testing.assert_array_equal(again.predict_proba(other), before)
    np.testing.assert_array_equal(model.predict_proba(other[:7]), before[:7]), "whatever else is asked"
    assert not np.allclose(model.predict_proba(3 * other), before, atol=0.01)


def test_units_of_columns_do_not_matter():
    X, y = load_iris(return_X_y=True)
    unit, shift = np.array([1e-3, 7.0, 1e4, 0.5]), np.array([5.0, -100.0, 3.0, 0.0])
    plain, changed = TransportClassifier(**QUICK).fit(X, y), TransportClassifier(**QUICK).fit(X * unit + shift, y)
    wanted, found = plain.predict_proba(X), changed.predict_proba(X * unit + shift)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    np.testing.assert_array_equal(found.argmax(1), wanted.argmax(1))


def test_tokens_add_their_log_scores(fitted):
    X, y = sets()
    model = TransportClassifier(**QUICK).fit(X, y)
    other, labels = sets(seed=1)
    alone = other.reshape(-1, 1, 2)
    once = np.log(model.priors_[1] / model.priors_[0])
    single = model.decision_function(alone).reshape(24, 7) - once
    np.testing.assert_allclose(model.decision_function(other) - once, single.sum(1), rtol=1e-5)
    assert model.score(other, labels) > model.score(alone, labels.repeat(7))
    assert model.transform(other).shape == (24, 7, 2)
    np.testing.assert_allclose(model.outlier_score(other), model.outlier_score(alone).reshape(24, 7).mean(1))
    far = model.predict_proba(1e3 * np.ones((1, 300, 2)))
    assert np.isfinite(far).all(), "products of probabilities would have vanished"
    with pytest.raises(InvalidArgument, match="2 features"):
        model.predict(np.zeros((3, 7, 5)))


def test_rows_and_cases_of_tokens_are_not_taken_for_one_another(fitted):
    model = TransportClassifier(**QUICK | {"epochs": 1}).fit(*sets())
    with pytest.raises(
        InvalidArgument, match=r"fitted on cases of tokens \(cases, tokens, columns\); got X of shape \(5, 2\)"
    ):
        model.predict(np.zeros((5, 2)))
    with pytest.raises(InvalidArgument, match=r"fitted on rows \(cases, columns\); got X of shape \(5, 7, 3\)"):
        fitted.transform(np.zeros((5, 7, 3)))


def test_a_rare_class_of_cases_with_tokens_is_found(tmp_path):
    """The share of a class counts once for a case: with each of 20 tokens it would outweigh them. Bayes' rule: recall 0.44, -log p 0.105."""

    def draw(count, seed):
        rng = np.random.default_rng(seed)
        y = (rng.random(count) < 0.05).astype(int)
        return rng.normal(size=(count, 20, 2)) + 0.35 * y[:, None, None], y

    X, y = draw(600, 0)
    other, labels = draw(4000, 1)
    model = TransportClassifier(members=2, epochs=20, random_state=0, device="cpu").fit(X, y)
    shares = model.predict_proba(other)
    assert -np.log(shares[np.arange(4000), labels]).mean() < 0.12
    assert (model.predict(other)[labels == 1] == 1).mean() > 0.2
    squares = np.square(model.transform(other)[:, :, None] - model.centres_).sum((1, 3))
    logits = np.log(model.priors_) + 20 * model.offsets_ - squares / 2 / model.temperature_
    np.testing.assert_allclose(model.decision_function(other), logits[:, 1] - logits[:, 0], rtol=1e-9)
    model.save_pretrained(tmp_path)
    np.testing.assert_array_equal(Estimator.from_pretrained(tmp_path).predict_proba(other), shares)


def test_frames_with_categories_and_missing_cells(tmp_path):
    rng = np.random.default_rng(0)
    y = np.where(np.arange(80) % 2, "late", "early")
    frame = pd.DataFrame(
        {
            "size": np.where(rng.random(80) < 0.1, np.nan, rng.normal(size=80)),
            "colour": np.where(y == "late", "red", rng.choice(["blue", "green"], 80)),
            "day": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 99, 80), "D"),
            "outcome": y,
        }
    )
    model = TransportClassifier(target="outcome", **QUICK).fit(frame)
    assert model.centres_.shape == (2, 5), "two numbers and three colours"
    assert model.score(frame, y) > 0.95
    model.save_pretrained(tmp_path)
    again = Estimator.from_pretrained(tmp_path)
    np.testing.assert_array_equal(again.predict_proba(frame), model.predict_proba(frame.drop(columns="outcome")))
    with pytest.warns(UserWarning, match="'colour' holds levels that"):
        assert np.isfinite(model.predict_proba(frame.assign(colour="black"))).all()
    with pytest.raises(InvalidArgument, match="target='nothing' is no column of X"):
        TransportClassifier(target="nothing", **QUICK).fit(frame)


def test_weights_and_groups():
    X, y = blobs(apart=0.5)
    weights = np.where(y == 0, 5.0, 1.0)
    plain, heavy = TransportClassifier(**QUICK).fit(X, y), TransportClassifier(**QUICK).fit(X, y, weights)
    np.testing.assert_allclose(heavy.priors_, [5 / 7, 1 / 7, 1 / 7])
    assert (heavy.predict(X) == 0).mean() > (plain.predict(X) == 0).mean()
    balanced = TransportClassifier(class_weight="balanced", **QUICK).fit(X[15:], y[15:])
    np.testing.assert_allclose(balanced.priors_, 1 / 3)
    grouped = TransportClassifier(**QUICK)
    inner, seen = grouped._scale, []
    grouped._scale = lambda samples: (inner(samples), seen.append(grouped._folds.copy()))
    groups = np.arange(60) // 4
    grouped.fit(X, y, groups=groups)
    assert all(len(set(seen[0][groups == group])) == 1 for group in range(15))
    assert set(seen[0]) == {0, 1, 2}


def test_temperatures():
    X, y = blobs(apart=0.7)
    other, labels = blobs(300, apart=0.7, seed=1)

    def loss(model):
        return -np.log(model.predict_proba(other)[np.arange(300), labels]).mean()

    calibrated, raw = (TransportClassifier(calibrate=one, **QUICK).fit(X, y) for one in (True, False))
    assert raw.temperature_ == 1.0
    assert loss(calibrated) < loss(raw)
    single = TransportClassifier(**QUICK | {"members": 1, "validation_fraction": 0.3}).fit(X, y)
    everything = TransportClassifier(validation_fraction=None, **QUICK).fit(X, y)
    assert not everything.training_.measured
    assert min(single.temperature_, everything.temperature_) > 0
    # Ten rows without an error do not make the eleventh certain.
    logits = 100.0 * nn.functional.one_hot(torch.arange(10) % 2, 2).double()
    share = (logits / temperature(logits, torch.arange(10) % 2, 1000.0)).softmax(1).max().item()
    assert share == pytest.approx(11 / 12, abs=0.02)

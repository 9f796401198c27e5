"""Sets of points: the declared symmetry holds in users' units, is checked by fit, and helps to learn."""

import inspect
import pickle
import re
import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")
pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")

from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from heedful import HeedfulError, InvalidArgument
from heedful.bridges.estimator import Estimator
from heedful.geometry import EquivariantClassifier, EquivariantRegressor
from heedful.geometry._symmetry import Move
from heedful.series import SeriesClassifier
from ions import ions, orthogonal, sorted_distances, turned

QUICK = {"layers": 2, "channels": 3, "width": 8, "units": 4, "epochs": 3, "random_state": 0, "device": "cpu"}


def clouds(count=23, n=5, seed=0):
    """Positions, velocities and two scalars, in units of their own, far from the origin; an answer of each kind."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(count, n, 8)) * np.repeat([30.0, 0.2, 7.0], [3, 3, 2]) + np.repeat(
        [100.0, 0.0, 1.0], [3, 3, 2]
    )
    relative = X[..., :3] - X[..., :3].mean(1, keepdims=True)
    size = np.square(relative).sum(-1)
    return X, {
        ("scalar", False): 1000 + size.mean(1),
        ("scalar", True): np.stack((size, X[..., 6] * size), -1),
        ("vector", False): (X[..., 6:7] * relative).sum(1) + 40 * X[..., 3:6].mean(1),
        ("vector", True): np.concatenate((relative, size[..., None] * X[..., 3:6]), -1),
    }


CASES = [
    ("O", None, "vector", False, True),
    ("O", "invariant", "scalar", False, True),
    ("O", "invariant", "vector", True, False),
    ("O", "equivariant", "vector", False, True),
    ("SO", "invariant", "scalar", True, True),
    ("SO", "equivariant", "vector", True, True),
    ("SO", None, "vector", True, True),
]


@pytest.mark.parametrize(("group", "translation", "output", "per_point", "permutation"), CASES)
def test_moved_cases_have_moved_answers(group, translation, output, per_point, permutation):
    """Turned, mirrored, shifted and renumbered; what is not declared does change the answers."""
    X, answers = clouds()
    y = answers[output, per_point]
    if translation == "equivariant":
        y = y[..., :3] + X[..., :3].mean(1, keepdims=per_point)
    options = QUICK | {"group": group, "translation": translation, "output": output, "permutation": permutation}
    model = EquivariantRegressor(3, 2, **options).fit(X, y)
    assert (model.dim_, model.vectors_, model.scalars_) == (3, 2, 2)
    assert 0 < model.symmetry_error_ < 1e-11
    assert model.predict(X).shape == y.shape
    rng = np.random.default_rng(7)
    unseen = clouds(11, seed=1)[0]

    def deviation(model, *, det=1, shift=0.0, order=None):
        matrix, moved = orthogonal(rng, det=det), np.arange(5) if order is None else order
        wanted = model.predict(unseen)
        if output == "vector":
            wanted = (wanted.reshape(*wanted.shape[:-1], -1, 3) @ matrix.T).reshape(wanted.shape)
            wanted = wanted + (shift if translation == "equivariant" else 0.0)
        wanted = wanted[:, moved] if per_point else wanted
        given = model.predict(turned(unseen, matrix, 2, shift)[:, moved])
        # In units of the answers, whose mean is no answer.
        spread = (wanted - wanted.mean(0, keepdims=True)).std() if output == "scalar" else np.abs(wanted).std()
        return np.abs(given - wanted).max() / spread

    shift = 0.0 if translation is None else np.array([200.0, -50.0, 3.0])
    order = rng.permutation(5) if permutation else None
    for det in (1, -1) if group == "O" else (1,):
        model.set_params(predict_dtype="float32")
        assert deviation(model, det=det, shift=shift, order=order) < 1e-5
        model.set_params(predict_dtype="float64")
        assert deviation(model, det=det, shift=shift, order=order) < 1e-10
    # What was not declared.
    if group == "SO":
        assert deviation(model, det=-1, shift=shift) > 1e-4
    if translation is None:
        assert deviation(model, shift=100.0) > 1e-4
    if not permutation:
        assert deviation(model, shift=shift, order=np.roll(np.arange(5), 1)) > 1e-4


def test_a_broken_symmetry_stops_fit():
    """The control of the check: a network with a direction of its own, of a size that float32 would hide."""

    class Crooked(EquivariantRegressor):
        size = 1e-6

        def _network(self):
            network, size = super()._network(), self.size

            class Tilted(type(network)):
                def forward(self, vectors, scalars, padding=None):
                    return super().forward(vectors, scalars, padding) + size * vectors[:, 0, 0, :1].tanh()

            network.__class__ = Tilted
            return network

    X, y, _ = ions(20, 0)
    with pytest.raises(HeedfulError, match=r"answers deviate from the declared symmetry by .*e-0[678]"):
        Crooked(3, **QUICK).fit(X, y)
    Crooked.size = 0.0
    model = Crooked(3, **QUICK).fit(X, y)
    assert model.symmetry_error_ < 1e-12


def test_a_move_and_its_way_back_are_what_they_say():
    from heedful.geometry._cases import Cases

    rng = np.random.default_rng(0)
    X = rng.normal(size=(2, 5, 7))
    cases = Cases(X, np.array([5, 3]))
    matrix, order = orthogonal(rng, det=-1), np.array([[2, 0, 1, 4, 3], [1, 2, 0, 3, 4]])
    move = Move(matrix, np.array([1.0, 2.0, 3.0]), order)
    moved = move.cases(cases, 2)
    wanted = turned(X[1, order[1, :3]], matrix, 2, move.shift)
    np.testing.assert_allclose(moved.values[1, :3], wanted, atol=1e-14)
    np.testing.assert_allclose(move.back().cases(moved, 2).values, X, atol=1e-13)


@pytest.mark.parametrize("spread", [0.0, 1e-3])
def test_points_that_nearly_coincide_far_away_are_no_mistake_of_ours(spread):
    """Rounding in the centre of a case, divided by its size, is large; it is told from a broken symmetry."""
    rng = np.random.default_rng(0)
    X = 1e6 + rng.normal(size=(20, 1, 3)) + spread * rng.normal(size=(20, 3, 3))
    y = np.square(X - X.mean(1, keepdims=True)).sum((1, 2)) + np.arange(20)
    model = EquivariantRegressor(translation="invariant", **QUICK).fit(X, y)
    assert np.isfinite(model.predict(X)).all()


def test_energies_and_forces_of_charges_beat_what_reads_coordinates():
    """Ridge, gradient boosting and a network on coordinates are far behind; invariants written by hand are not (docs/geometry.md)."""
    X, energy, force = ions(300, 0)
    unseen, energies, forces = ions(500, 1)
    rows, unseen_rows = (part.reshape(len(part), -1) for part in (X, unseen))
    sizes = {"layers": 2, "channels": 4, "width": 16, "units": 8, "batch_size": 24, "epochs": 25, "lr": 0.02}
    ours = EquivariantRegressor(3, translation="invariant", random_state=0, device="cpu", **sizes)
    network = make_pipeline(
        StandardScaler(), MLPRegressor(hidden_layer_sizes=(64, 64), max_iter=100, random_state=0, tol=0)
    )
    rivals = [RidgeCV(), HistGradientBoostingRegressor(random_state=0), network]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the network could go on, which does not help it
        scores = [rival.fit(rows, energy).score(unseen_rows, energies) for rival in rivals]
        theirs = network.fit(rows, force.reshape(300, -1)).score(unseen_rows, forces.reshape(500, -1))
    assert ours.fit(X, energy).score(unseen, energies) > 0.85
    assert max(scores) < 0.65, scores
    by_hand = RidgeCV().fit(sorted_distances(X), energy).score(sorted_distances(unseen), energies)
    assert by_hand > 0.9, "whoever can write down the invariants needs no network"
    assert ours.set_params(output="vector").fit(X, force).score(unseen, forces) > 0.75
    assert theirs < 0.3


def helices(count, seed, n=7):
    """Points on noisy helices, turned at random; left ones are mirror images of right ones."""
    rng = np.random.default_rng(seed)
    t = np.linspace(0, 5, n)
    curve = np.stack((np.cos(t), np.sin(t), 0.4 * t), -1)
    right = np.stack([turned(case, orthogonal(rng), 1) for case in curve + 0.1 * rng.normal(size=(count, n, 3))])
    return np.concatenate((right, right * [1, 1, -1])), np.repeat(["right", "left"], count)


def test_left_and_right_are_told_apart_by_rotations_alone():
    X, y = helices(60, 0)
    unseen, labels = helices(50, 1)
    options = QUICK | {"channels": 4, "width": 16, "units": 8, "epochs": 40}
    turns, mirrors = (
        EquivariantClassifier(3, group=group, translation="invariant", **options).fit(X, y) for group in ("SO", "O")
    )
    assert turns.score(unseen, labels) > 0.95
    assert turns.score(turned(unseen, orthogonal(np.random.default_rng(3), det=-1), 1), labels) < 0.05
    # A case and its mirror image have one answer, which is right for one of them.
    assert mirrors.set_params(predict_dtype="float64").score(unseen, labels) == 0.5
    logits = mirrors.decision_function(unseen)
    np.testing.assert_allclose(logits[:50], logits[50:], atol=1e-10)
    assert turns.predict_proba(unseen).shape == (100, 2)


def test_scales_keep_the_symmetry():
    X, answers = clouds()
    scalar = EquivariantRegressor(3, 2, translation="invariant", **QUICK | {"epochs": 1, "validation_fraction": None})
    scalar.fit(X, answers["scalar", True])
    relative = X[..., :3] - X[..., :3].mean(1, keepdims=True)
    np.testing.assert_allclose(
        scalar.vector_scale_, [np.square(relative).mean() ** 0.5, np.square(X[..., 3:6]).mean() ** 0.5]
    )
    np.testing.assert_allclose(scalar.scalar_mean_, X[..., 6:].mean((0, 1)))
    np.testing.assert_allclose(scalar.scalar_scale_, X[..., 6:].reshape(-1, 2).std(0, ddof=1))
    np.testing.assert_allclose(scalar.target_mean_, answers["scalar", True].mean((0, 1)))
    vector = EquivariantRegressor(3, 2, output="vector", **QUICK | {"epochs": 1, "validation_fraction": None})
    y = answers["vector", True]
    vector.fit(X, y)
    np.testing.assert_allclose(
        np.ravel(vector.target_scale_), [np.square(y[..., at : at + 3]).mean() ** 0.5 for at in (0, 3)]
    )
    assert vector.target_mean_ == 0.0
    # Units do not matter: the network sees the same numbers.
    other = EquivariantRegressor(3, 2, output="vector", **QUICK | {"epochs": 1, "validation_fraction": None})
    units = np.repeat([2.0**100, 2.0**-70, 4.0], [3, 3, 2])
    other.fit(X * units, y * 2.0**90)
    np.testing.assert_allclose(other.predict(X * units) / 2.0**90, vector.predict(X), rtol=1e-9)


def test_losses_are_those_of_the_points_that_are_there():
    """The held-out error of answers per point, by hand."""
    rng = np.random.default_rng(0)
    X = [rng.normal(size=(n, 3)) for n in rng.integers(1, 7, 20)]
    y = [np.linalg.norm(case, axis=1) for case in X]
    model = EquivariantRegressor(**QUICK | {"validation_fraction": 0.5, "predict_dtype": "float64"}).fit(X, y)
    from heedful.bridges.samples import hold_out

    _, held = hold_out(20, 0.5, 0)
    errors = [np.abs(model.predict([X[at]])[0] - y[at]).mean() for at in held]
    assert np.mean(errors) == pytest.approx(model.training_.measured["absolute_error"], rel=1e-5)


def test_models_are_saved_searched_and_copied(tmp_path):
    X, answers = clouds()
    y = answers["vector", True]
    model = EquivariantRegressor(3, 2, output="vector", translation="invariant", **QUICK).fit(X, y)
    model.save_pretrained(tmp_path)
    again = Estimator.from_pretrained(tmp_path)
    assert isinstance(again, EquivariantRegressor)
    assert again.symmetry_error_ == model.symmetry_error_
    for other in (again, pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(other.predict(X), model.predict(X))
        assert other.score(X, y) == model.score(X, y)
    search = GridSearchCV(
        EquivariantClassifier(3, 2, **QUICK | {"epochs": 1}), {"group": ["O", "SO"], "permutation": [True, False]}, cv=2
    )
    search.fit(X, np.where(answers["scalar", False] > np.median(answers["scalar", False]), "large", "small"))
    assert set(search.best_params_) == {"group", "permutation"}


def test_r2_is_over_a_vector_as_a_whole():
    X, answers = clouds()
    y = answers["vector", True]
    model = EquivariantRegressor(3, 2, output="vector", **QUICK).fit(X, y)
    predicted = model.predict(X)
    wanted = np.mean(
        [
            1 - np.square(predicted - y)[..., at].sum() / np.square(y - y.mean((0, 1)))[..., at].sum()
            for at in (slice(0, 3), slice(3, 6))
        ]
    )
    assert model.score(X, y) == pytest.approx(wanted)
    matrix = orthogonal(np.random.default_rng(1))
    model.set_params(predict_dtype="float64")
    moved = (y.reshape(*y.shape[:2], 2, 3) @ matrix.T).reshape(y.shape)
    assert model.score(turned(X, matrix, 2), moved) == pytest.approx(model.score(X, y), abs=1e-9)
    weights = np.arange(23.0)
    assert model.score(X, y, weights) != model.score(X, y)
    kept = weights > 0
    assert model.score(X, y, kept) == pytest.approx(model.score(X[1:], y[1:]))
    with pytest.raises(InvalidArgument, match="answers of this model are 2 for each point; y has 1 for each case"):
        model.score(X, answers["vector", False])


def test_shared_arguments_are_described_alike():
    def described(kind):
        text = re.search(r"Args:\n(.*?)\n\n", inspect.getdoc(kind), re.S)[1]
        entries = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", text, re.M)
        return {name: " ".join(words.split()) for name, words in entries}

    numbers, classes, series = map(described, (EquivariantRegressor, EquivariantClassifier, SeriesClassifier))
    assert numbers.keys() == set(inspect.signature(EquivariantRegressor).parameters)
    assert classes.keys() == set(inspect.signature(EquivariantClassifier).parameters)
    same = set(numbers) & set(classes) - {"group", "translation", "predict_dtype"}
    assert {name: numbers[name] for name in same} == {name: classes[name] for name in same}
    alike = {
        "epochs",
        "patience",
        "device",
        "progress",
        "checkpoint_dir",
        "devices",
        "num_nodes",
        "strategy",
        "class_weight",
    }
    assert {name: classes[name] for name in alike} == {name: series[name] for name in alike}


def test_more_points_than_ever_seen_are_read_or_refused():
    X, y, _ = ions(20, 0)
    more = ions(3, 1, n=7)[0]
    assert np.isfinite(EquivariantRegressor(3, **QUICK).fit(X, y).predict(more)).all()
    ordered = EquivariantRegressor(3, permutation=False, **QUICK).fit(X, y)
    assert ordered.predict(X[:, :4]).shape == (20,)
    with pytest.raises(InvalidArgument, match="case 0 has 7 points, more than any of the training"):
        ordered.predict(more)


def test_garbage_behind_the_points_never_matters():
    rng = np.random.default_rng(0)
    X = [rng.normal(size=(n, 4)) for n in (2, 5, 3)] * 5
    y = [case[:, :3] for case in X]
    model = EquivariantRegressor(3, output="vector", predict_dtype="float64", **QUICK).fit(X, y)
    vectors, scalars, padding = model._tensors(model._read(X))
    clean = model._run((vectors, scalars, padding))
    for junk in (np.nan, np.inf, 1e30):
        filled = vectors.masked_fill(padding[..., None, None], junk), scalars.masked_fill(padding[..., None], junk)
        there = ~padding
        assert torch.equal(model._run((*filled, padding))[there], clean[there])
    for at in range(3):
        np.testing.assert_allclose(model.predict([X[at]])[0], model.predict(X)[at], atol=1e-12)

"""Weights of cases and classes, answers in two precisions, and folders that a fresh process opens."""

import json
import subprocess
import sys
from itertools import count

import numpy as np
import pytest
import torch

from heedful import CorruptModel, InvalidArgument
from heedful._savable import digest

pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")
pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")

from bumps import two_bumps
from heedful.bridges.estimator import Estimator, outputs
from heedful.bridges.predictors import Classifier
from heedful.bridges.samples import weights_of
from heedful.series import SeriesClassifier

SMALL = {"embed_dim": 8, "num_heads": 2, "rank": 3, "epochs": 3, "random_state": 0}
X, Y = two_bumps(60, 0)


def answers(sample_weight=None, y=Y, **options):
    return SeriesClassifier(**SMALL | options).fit(X, y, sample_weight).predict_proba(X)


def test_weights_are_their_formula():
    classes, codes = np.array(["a", "b", "c"]), np.array([0, 0, 0, 1, 1, 2])
    assert weights_of(classes, codes, None, None) is None
    np.testing.assert_allclose(weights_of(classes, codes, "balanced", None), [2 / 3] * 3 + [1] * 2 + [2])
    own = np.array([1.0, 0.0, 3.0, 2.0, 2.0, 0.0])
    np.testing.assert_allclose(weights_of(classes, codes, {"a": 5, "c": 7}, own), [5, 0, 15, 2, 2, 0])
    # Balanced by weight: what is left out does not count, and each class that is left has half of 8.
    balanced = weights_of(classes, codes, "balanced", own)
    np.testing.assert_allclose(np.bincount(codes, balanced), [4, 4, 0])
    np.testing.assert_allclose(weights_of(np.array(["1", "2"]), np.array([0, 1]), {"1": 3.0}, None), [3, 1])
    np.testing.assert_allclose(weights_of(np.array([1, 2]), np.array([0, 1]), {np.int64(2): 3}, 2.0), [2, 6])


def test_the_loss_is_weighted():
    model = SeriesClassifier(**SMALL, eta=0).fit(X, Y)
    inputs = model._tensors(model._read(X))
    codes = torch.from_numpy((Y == "same").astype(int))
    weights = torch.rand(60) + 0.5
    with torch.no_grad():
        each = -model.network_(*inputs).log_softmax(1)[torch.arange(60), codes]
        loss = model._loss(model.network_, inputs, codes, weights)
    torch.testing.assert_close(loss, (weights * each).sum() / 60)


def test_cases_and_classes_weigh():
    plain = answers()
    np.testing.assert_allclose(answers(np.ones(60)), plain, atol=1e-5)
    np.testing.assert_allclose(answers(np.full(60, 1e6)), plain, atol=1e-5)
    np.testing.assert_allclose(answers(class_weight={}), plain, atol=1e-5)
    same = Y == "same"
    heavy = answers(class_weight={"same": 50.0}, epochs=12, lr=0.01)
    assert (heavy[:, 1] > 0.5).mean() > 0.9
    np.testing.assert_array_equal(answers(np.where(same, 50.0, 1.0), epochs=12, lr=0.01), heavy)
    # A third of one class: balanced, the weights are those of its share.
    few = np.where(same & (np.arange(60) % 3 > 0), "rare", "other")
    share = {name: 60 / (2 * (few == name).sum()) for name in ("rare", "other")}
    np.testing.assert_allclose(answers(y=few, class_weight="balanced"), answers(y=few, class_weight=share), atol=1e-6)


def test_a_weight_of_zero_leaves_a_case_out():
    kept = np.arange(60) % 3 > 0
    spoilt = X.copy()
    spoilt[~kept] *= 1e6
    model = SeriesClassifier(**SMALL).fit(spoilt, Y, kept)
    fewer = SeriesClassifier(**SMALL).fit(X[kept], Y[kept], np.ones(kept.sum()))
    np.testing.assert_array_equal(model.predict_proba(X), fewer.predict_proba(X))
    one = SeriesClassifier(**SMALL).fit(X, Y, Y == "same")
    assert one.classes_.tolist() == ["other", "same"]


def test_a_checkpoint_belongs_to_its_weights(tmp_path, monkeypatch):
    loss, batches = SeriesClassifier._loss, count()

    def stopping(model, *batch):
        if next(batches) == 3 * 2:
            raise KeyboardInterrupt
        return loss(model, *batch)

    weights = np.linspace(1, 2, 60)
    monkeypatch.setattr(SeriesClassifier, "_loss", stopping)
    with pytest.raises(KeyboardInterrupt):
        answers(weights, checkpoint_dir=tmp_path)
    monkeypatch.undo()
    other = SeriesClassifier(**SMALL, checkpoint_dir=tmp_path).fit(X, Y, weights[::-1])
    again = SeriesClassifier(**SMALL, checkpoint_dir=tmp_path).fit(X, Y, weights)
    assert (other.training_.resumed, again.training_.resumed) == (0, 2)
    np.testing.assert_array_equal(again.predict_proba(X), answers(weights))


@pytest.mark.parametrize(
    ("class_weight", "sample_weight", "told"),
    [
        ("heavy", None, "class_weight must be None, 'balanced' or a mapping from classes to numbers; got 'heavy'"),
        (3.0, None, "class_weight must be None, 'balanced' or a mapping"),
        ({"sane": 2.0}, None, "class_weight names 'sane', which is no class; y has 'other', 'same'"),
        ({"same": -1}, None, "class_weight must hold numbers from 0 on; got -1 for 'same'"),
        ({"same": float("nan")}, None, "class_weight must hold numbers from 0 on; got nan"),
        ({"same": 0, "other": 0}, None, "all weights are zero"),
        (None, np.zeros(60), "all weights are zero"),
        (None, np.ones(59), r"one number for each of the 60 cases; got shape \(59,\)"),
        (None, np.ones((60, 1)), r"one number for each of the 60 cases; got shape \(60, 1\)"),
        (None, [-1.0, *[1.0] * 59], "from 0 on; got -1.0 for case 0"),
        (None, [*[1.0] * 59, np.inf], "from 0 on; got inf for case 59"),
        (None, ["a"] * 60, "sample_weight cannot be read as numbers"),
    ],
)
def test_bad_weights_are_told(class_weight, sample_weight, told):
    with pytest.raises(InvalidArgument, match=told):
        SeriesClassifier(**SMALL, class_weight=class_weight).fit(X, Y, sample_weight)


@pytest.fixture(scope="module")
def model():
    return SeriesClassifier(**SMALL, class_weight={"same": 2}).fit(X, Y)


def test_answers_are_float32_without_a_copy(model, monkeypatch):
    exact = model.set_params(predict_dtype="float64").predict_proba(X)
    logits = model.decision_function(X)
    model.set_params(predict_dtype="float32")
    seen = []
    hook = model.network_.register_forward_hook(lambda network, given, out: seen.append((network, out.dtype)))
    monkeypatch.setattr("copy.deepcopy", None)
    quick = model.predict_proba(X)
    hook.remove()
    assert seen == [(model.network_, torch.float32)]
    assert (model.decision_function(X).dtype, logits.dtype) == (np.float32, np.float64)
    np.testing.assert_allclose(quick, exact, atol=1e-5)
    assert {p.dtype for p in model.network_.parameters()} == {torch.float32}


def test_a_network_in_training_mode_answers_all_the_same(model):
    wanted = model.predict_proba(X)
    network = model.network_.train()
    np.testing.assert_array_equal(model.predict_proba(X), wanted)
    assert network.training
    network.eval()
    assert outputs(network, model._tensors(model._read(X)), torch.device("cpu"), torch.float64).dtype == torch.float64
    for wrong in ("float16", "double", torch.float32, None):
        with pytest.raises(InvalidArgument, match="predict_dtype must be one of float32, float64"):
            SeriesClassifier(**SMALL, predict_dtype=wrong).fit(X, Y)
        with pytest.raises(InvalidArgument, match="predict_dtype must be"):
            model.set_params(predict_dtype=wrong).predict(X)
    model.set_params(predict_dtype="float32")


def test_a_fresh_process_opens_a_folder_of_the_first_release(model, tmp_path):
    """It names no module."""
    model.save_pretrained(tmp_path)
    np.save(tmp_path / "x.npy", X[:3])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["estimator"].pop("module") == "heedful.series.classifier"
    config["sha256"] = digest(config, (tmp_path / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = """
import sys, numpy
from heedful import MissingExtra
from heedful.bridges.predictors import Classifier
sys.modules["pytorch_lightning"] = None
model, X = Classifier.from_pretrained(sys.argv[1]), numpy.load(sys.argv[2])
print(type(model).__module__, model.class_weight, model.predict(X).tolist())
try:
    model.fit(X, [0, 1, 1])
except MissingExtra as error:
    print(error)
"""
    call = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "x.npy")]
    opened, refused = subprocess.run(call, capture_output=True, text=True, check=True).stdout.splitlines()
    assert opened == f"heedful.series.classifier {{'same': 2}} {model.predict(X[:3]).tolist()}"
    assert "pip install 'heedful[train]'" in refused


def test_an_estimator_of_ones_own(model, tmp_path):
    class Mine(SeriesClassifier):
        pass

    Mine(**SMALL).fit(X, Y).save_pretrained(tmp_path)
    assert type(Estimator.from_pretrained(tmp_path)) is type(Mine.from_pretrained(tmp_path)) is Mine
    config = json.loads((tmp_path / "config.json").read_text())
    config["estimator"]["module"] = "somebody.elses"
    config["sha256"] = digest(config, (tmp_path / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CorruptModel, match=r"unknown estimator 'Mine' of somebody.elses; known: .* must be defined \(imported\)"
    ):
        Classifier.from_pretrained(tmp_path)
    assert type(Mine.from_pretrained(tmp_path)) is Mine

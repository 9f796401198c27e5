"""Estimators of a few lines: on the three bases that no room is built on yet, and one whose tables are series; data for them."""

import numpy as np
import pytest
from torch import nn

pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")

from heedful.bridges.predictors import Ranker, Regressor, Transformer
from heedful.corpus import WordVectors
from heedful.series import SeriesClassifier


class Small:
    """What the three below have in common: sizes, and no more of a training than is needed."""

    def __init__(
        self, width=16, epochs=60, batch_size="auto", lr=0.02, validation_fraction=0.2, patience=None, random_state=0, device="cpu",
        predict_dtype="float64", progress=False, checkpoint_dir=None,
    ):  # fmt: skip
        self.width, self.epochs, self.batch_size, self.lr = width, epochs, batch_size, lr
        self.validation_fraction, self.patience, self.random_state = validation_fraction, patience, random_state
        self.device, self.predict_dtype, self.progress, self.checkpoint_dir = (
            device,
            predict_dtype,
            progress,
            checkpoint_dir,
        )

    def _layers(self, outputs):
        return nn.Sequential(nn.Linear(self.n_features_in_, self.width), nn.GELU(), nn.Linear(self.width, outputs))


class Numbers(Small, Regressor):
    _fitted = ("n_features_in_", "training_", *Regressor._target)

    def _network(self):
        return nn.Sequential(self._layers(1), nn.Flatten(0))


class Scores(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x, padding):
        assert x.shape[:2] == padding.shape
        return self.layers(x).squeeze(-1).masked_fill(padding, 0.0)


class Order(Small, Ranker):
    _fitted = ("n_features_in_", "training_")

    def _network(self):
        return Scores(self._layers(1))


class Coordinates(Small, Transformer):
    """A linear autoencoder; what it gives are its codes."""

    _fitted = ("n_features_in_", "training_", "_n_features_out")

    def _scale(self, samples):
        self._n_features_out = 2

    def _network(self):
        return nn.Linear(self.n_features_in_, 2, bias=False)

    def _measure(self, network, inputs, target, weight):
        assert target is None
        loss = (network(*inputs) @ network.weight - inputs[0]).square().mean(1)
        return {"loss": loss if weight is None else weight * loss}

    def _loss(self, network, inputs, target, weight):
        return self._measure(network, inputs, target, weight)["loss"].mean()


class CubeClassifier(SeriesClassifier):
    """Gives a table (cases, columns) on as an array (cases, channels, one step)."""

    def _read(self, X, *labels, **more):
        values = np.asarray(X)
        return super()._read(values[..., None] if values.ndim == 2 else X, *labels, **more)


class PairVectors(WordVectors):
    """Says that X is square, of which scikit-learn's checks then take care."""

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.pairwise = True
        return tags


def table(count=120, seed=0):
    X = np.random.default_rng(seed).normal(size=(count, 3))
    return X, 100 + 5 * X[:, 0] * X[:, 1]


def lists(count=40, seed=0):
    """Lists of two to nine members; what is relevant is the largest first feature."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(count), rng.integers(2, 10, count))
    X = rng.normal(size=(len(groups), 3))
    best = np.array([X[at, 0] == X[groups == group, 0].max() for at, group in enumerate(groups)])
    order = rng.permutation(len(groups))
    return X[order], best[order].astype(int), groups[order]

"""A classifier of sets of points with a declared symmetry, as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from heedful._errors import InvalidArgument
from heedful.bridges.predictors import Classifier
from heedful.bridges.samples import Samples
from heedful.geometry._cases import Cases, Frames
from heedful.geometry._points import Points


class EquivariantClassifier(Points, Classifier):
    r"""Classifies sets of points, with a symmetry that holds exactly: a case turned, mirrored, moved or renumbered has the same class.

    Each case is a set of points in `dim` dimensions: the first columns of a point are `vectors` vectors (its position first), the others
    scalars. `EquivariantNetwork` reads nothing but inner products (Ma & Ying 2023, Prop. 3.2), with `group="SO"` also the orientation, so
    that left and right hands are two classes. `fit` measures the symmetry in float64 on cases that it learned from, keeps the deviation as
    `symmetry_error_`, and raises if it is more than rounding.

    X is an array (cases, points, columns), a list of arrays (points, columns) of unequal numbers of points, a list of data frames, or a
    data frame whose rows are points and name their case; columns of frames are known by their names. A table (cases, columns) holds
    cases of one point whose columns are scalars, unless `dim` is given. y holds a label for each case, numbers or strings.

    Args:
        dim: numbers in a vector; by default all columns are vectors.
        vectors: vectors of each point, in its first columns; 0 for sets of scalars.
        group: `"O"` (turned and mirrored cases are the same) or `"SO"` (turned ones alone: left and right differ).
        translation: `"invariant"` (where a case lies does not matter; the first vector is the position). By default places matter.
        permutation: whether points have no order; else each place has weights of its own.
        case: the column, or index level, of a data frame that says which case a row belongs to.
        layers: number of layers.
        channels: vectors of each point inside the network.
        width: scalars of each point inside the network.
        units: coefficients of each pair of points in a layer.
        depth: hidden layers in the network of a pair; more than 1 writes all pairs out.
        epochs: passes over the data, at most.
        batch_size: cases in a batch; `"auto"` is 16, of more than 1,000 cases up to 256.
        lr: learning rate of RAdam at its highest, gradients clipped to norm 4.
        schedule: `"cosine"` (the learning rate falls to 0 over all epochs) or `"flat"`.
        validation_fraction: share of the cases to hold out; with 0 or none all are learned from, for all epochs. The weights
            of the epoch with the least held-out loss are kept.
        patience: stop after this many epochs without a better held-out loss.
        class_weight: `"balanced"` (every class weighs the same in the loss, however many cases it has). In Python also a mapping
            from classes to weights. The held-out loss is weighted too, the held-out accuracy is not.
        random_state: decides split, first weights and order. On the CPU the result is the same bit for bit.
        device: `"auto"` (CUDA where there is one), `"cpu"`, `"cuda"`, `"cuda:1"` or `"mps"`.
        predict_dtype: what answers are computed in, `"float32"` or `"float64"`. In the first a turned case has the same logits up to about
            1e-6, in the second up to about 1e-13, at two to three times the time. May be set after `fit`.
        progress: shows a bar on standard error.
        checkpoint_dir: a folder in which the training is kept after every epoch, until it ends. `fit` called again after a
            kill, with equal parameters and data, goes on there and reaches the same weights. One folder serves many fits.
        devices: how many devices train on each machine, as Lightning takes it; see `docs/scale.md`.
        num_nodes: how many machines train.
        strategy: how processes work together, as Lightning calls it: `"ddp"`.

    Fitted: `classes_`, `dim_`, `vectors_` and `scalars_` (what the columns are), `n_features_in_` (columns), `network_`, `training_` (every
    epoch), `symmetry_error_`, `vector_scale_`, `scalar_mean_`, `scalar_scale_`, `max_points_`, `seed_`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(80, 5, 3)); X[40:] /= np.linalg.norm(X[40:], axis=-1, keepdims=True)
    >>> y = np.repeat(["cloud", "sphere"], 40)
    >>> model = EquivariantClassifier(layers=2, width=16, epochs=15, random_state=0).fit(X, y)
    >>> model.predict_proba(X[:3]).shape, model.score(X, y) > 0.8
    ((3, 2), True)
    """

    _fitted: ClassVar[tuple[str, ...]] = ("classes_", *Points._fitted)
    output = "scalar"

    def __init__(
        self,
        dim: int | None = None,
        vectors: int = 1,
        *,
        group: str = "O",
        translation: str | None = None,
        permutation: bool = True,
        case: str = "case",
        layers: int = 4,
        channels: int = 8,
        width: int = 32,
        units: int = 16,
        depth: int = 1,
        epochs: int = 100,
        batch_size: int | str = "auto",
        lr: float = 1e-2,
        schedule: str = "cosine",
        validation_fraction: float | None = 0.2,
        patience: int | None = 20,
        class_weight: str | Mapping[Any, float] | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        predict_dtype: str = "float32",
        progress: bool = False,
        checkpoint_dir: str | Path | None = None,
        devices: int | str = 1,
        num_nodes: int = 1,
        strategy: str = "auto",
    ) -> None:
        self.dim = dim
        self.vectors = vectors
        self.group = group
        self.translation = translation
        self.permutation = permutation
        self.case = case
        self.layers = layers
        self.channels = channels
        self.width = width
        self.units = units
        self.depth = depth
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.schedule = schedule
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.class_weight = class_weight
        self.random_state = random_state
        self.device = device
        self.predict_dtype = predict_dtype
        self.progress = progress
        self.checkpoint_dir = checkpoint_dir
        self.devices = devices
        self.num_nodes = num_nodes
        self.strategy = strategy

    def _read_target(self, y: Any, cases: Cases, frames: Frames | None) -> np.ndarray:
        if frames is not None and frames.per_row(y) is not None:
            raise InvalidArgument(
                f"y has a label for each of {len(y)} points, and a classifier takes one for each of {len(cases.lengths)} cases; classes of "
                "points are not predicted, EquivariantRegressor predicts a number for each point"
            )
        labels = np.asarray(y if frames is None else frames.aligned(y))
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.shape != (len(cases.lengths),):
            raise InvalidArgument(
                f"y must hold one label for each of the {len(cases.lengths)} cases; got shape {labels.shape}. Classes of points are not "
                "predicted"
            )
        return labels

    def _labelled(self, samples: Samples) -> Samples:
        samples = super()._labelled(samples)
        self.outputs_, self.per_point_ = len(self.classes_), False
        return samples

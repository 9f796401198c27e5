"""A regressor of sets of points with a declared symmetry, as a scikit-learn estimator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from heedful._errors import InvalidArgument
from heedful.bridges.estimator import Inputs
from heedful.bridges.predictors import Regressor
from heedful.bridges.samples import Samples, check_is_fitted, moments
from heedful.geometry._answers import Answers, read_answers
from heedful.geometry._cases import Cases, Frames
from heedful.geometry._points import Points, beside
from heedful.geometry._scales import root_mean_square


class EquivariantRegressor(Points, Regressor):
    r"""Predicts numbers or vectors from sets of points, with a symmetry that holds exactly.

    Each case is a set of points in `dim` dimensions: the first columns of a point are `vectors` vectors (its position first, then perhaps
    a velocity or a force), the others scalars (a charge, a mass). What is declared holds for every case, whatever was learned: with
    X turned by Q, moved by t and its points renumbered by $\Pi$,

    $$f(\Pi X Q^\top + \mathbf{1} t^\top) = f(X) \;\text{ (scalar)}, \qquad f(X) Q^\top \;\text{ (vector)}, \qquad
    f(X) Q^\top + t \;\text{ (translation="equivariant")},$$

    and answers per point are renumbered with their points. The network is `EquivariantNetwork`: combinations of the vectors with
    coefficients that depend on inner products alone (Ma & Ying 2023, Prop. 3.2). `fit` measures the symmetry in float64 on cases that it
    learned from, keeps the deviation as `symmetry_error_`, and raises if it is more than rounding.

    X is an array (cases, points, columns), a list of arrays (points, columns) of unequal numbers of points, a list of data frames, or a
    data frame whose rows are points and name their case; columns of frames are known by their names. A table (cases, columns) holds
    cases of one point whose columns are scalars, unless `dim` is given. y is a number for each case, (cases, columns) for several, and for each point
    (cases, points, columns) or a list; vectors are columns beside one another.

    Args:
        dim: numbers in a vector; by default all columns are vectors.
        vectors: vectors of each point, in its first columns; 0 for sets of scalars.
        output: `"scalar"` (numbers, which do not turn) or `"vector"`.
        group: `"O"` (turned and mirrored cases have the turned and mirrored answer) or `"SO"` (turned ones alone: left and right differ).
        translation: what moving a case does to the answer: nothing (`"invariant"`), or a vector answer moves along (`"equivariant"`). By
            default places matter. The first vector is then the position.
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
        random_state: decides split, first weights and order. On the CPU the result is the same bit for bit.
        device: `"auto"` (CUDA where there is one), `"cpu"`, `"cuda"`, `"cuda:1"` or `"mps"`.
        predict_dtype: what answers are computed in, `"float32"` or `"float64"`. In the first a turned case has the turned answer up to about
            1e-6, in the second up to about 1e-13, at two to three times the time. May be set after `fit`.
        progress: shows a bar on standard error.
        checkpoint_dir: a folder in which the training is kept after every epoch, until it ends. `fit` called again after a
            kill, with equal parameters and data, goes on there and reaches the same weights. One folder serves many fits.
        devices: how many devices train on each machine, as Lightning takes it; see `docs/scale.md`.
        num_nodes: how many machines train.
        strategy: how processes work together, as Lightning calls it: `"ddp"`.

    Fitted: `dim_`, `vectors_` and `scalars_` (what the columns are), `n_features_in_` (columns), `per_point_`, `outputs_` (numbers or vectors
    of an answer), `network_`, `training_` (every epoch), `symmetry_error_`, `vector_scale_`, `scalar_mean_`, `scalar_scale_`, `target_mean_`,
    `target_scale_`, `max_points_`, `seed_`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(200, 4, 3))
    >>> y = np.square(X - X.mean(1, keepdims=True)).sum((1, 2))  # how far four points lie apart
    >>> model = EquivariantRegressor(translation="invariant", layers=2, width=16, epochs=12, random_state=0).fit(X, y)
    >>> turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    >>> bool(np.allclose(model.predict(X @ turn + 5.0), model.predict(X), rtol=1e-4)), model.score(X, y) > 0.8
    (True, True)
    """

    _fitted: ClassVar[tuple[str, ...]] = (*Points._fitted, "is_flat_", *Regressor._target)

    def __init__(
        self,
        dim: int | None = None,
        vectors: int = 1,
        *,
        output: str = "scalar",
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
        self.output = output
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
        self.random_state = random_state
        self.device = device
        self.predict_dtype = predict_dtype
        self.progress = progress
        self.checkpoint_dir = checkpoint_dir
        self.devices = devices
        self.num_nodes = num_nodes
        self.strategy = strategy

    def _read_target(self, y: Any, cases: Cases, frames: Frames | None) -> np.ndarray:
        answers = self._read_answers(y, cases, frames)
        self.outputs_, self.per_point_, self.is_flat_ = answers.outputs, answers.per_point, answers.is_flat
        return answers.values

    def _read_answers(self, y: Any, cases: Cases, frames: Frames | None) -> Answers:
        """With vectors that move along taken from the centre of their case."""
        answers = read_answers(y, cases, frames, self.dim_ if self.output == "vector" else None)
        if self.translation != "equivariant":
            return answers
        centre = self._columns.vectors_of(cases)[1]
        return replace(answers, values=answers.values - beside(centre, answers.values))

    def _scale(self, samples: Samples) -> None:
        super()._scale(samples)
        cases, target = Cases(*samples.inputs), samples.target
        assert target is not None
        values = target[cases.inside] if self.per_point_ else target  # [answers, outputs] or [answers, outputs, d]
        if self.translation == "equivariant":
            # Answers are places too.
            self.target_mean_, self.target_scale_ = 0.0, float(self.vector_scale_[0])
        elif self.output == "vector":
            sizes = [root_mean_square(values[:, at]) for at in range(self.outputs_)]
            self.target_mean_, self.target_scale_ = 0.0, np.array(sizes)[:, None]
        else:
            self.target_mean_, self.target_scale_ = np.array([moments(column) for column in values.T]).T

    def _errors(self, network: nn.Module, inputs: Inputs, target: Tensor) -> Tensor:
        errors = super()._errors(network, inputs, target)
        if not self.per_point_:
            return errors
        return errors.masked_fill(inputs[-1].reshape(*inputs[-1].shape, *[1] * (errors.dim() - 2)), 0.0)

    def _case_means(self, values: Tensor, inputs: Inputs) -> Tensor:
        if not self.per_point_:
            return super()._case_means(values, inputs)
        return values.flatten(2).mean(2).sum(1) / (~inputs[-1]).sum(1)

    def predict(self, X: Any) -> Any:
        """Answers in the shape of y: an array; of points a list of arrays where cases have unequal numbers of them."""
        check_is_fitted(self, "network_")
        cases, _ = self._cases(X)
        values = self._predicted(cases)
        values = values.reshape(*values.shape[: 2 if self.per_point_ else 1], -1)
        values = values[..., 0] if self.is_flat_ else values
        if not self.per_point_ or cases.are_equal:
            return values
        return [part[:n] for part, n in zip(values, cases.lengths, strict=True)]

    def _predicted(self, cases: Cases) -> np.ndarray:
        """(cases, outputs) or (cases, n, outputs), of vectors with an axis (dim,) behind."""
        values = self._run(self._tensors(Samples((cases.values, cases.lengths)))).numpy().astype(np.float64)
        values = values * self.target_scale_ + self.target_mean_
        if self.translation != "equivariant":
            return values
        return values + beside(self._columns.vectors_of(cases)[1], values)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R^2 over cases, or over all points; of a vector its numbers together, so that axes do not matter; a mean over outputs."""
        from sklearn.metrics import r2_score

        check_is_fitted(self, "network_")
        cases, frames = self._cases(X)
        wanted = read_answers(y, cases, frames, self.dim_ if self.output == "vector" else None)
        if (wanted.per_point, wanted.outputs) != (self.per_point_, self.outputs_):
            kinds = [
                f"{count} for each {'point' if per_point else 'case'}"
                for per_point, count in ((self.per_point_, self.outputs_), (wanted.per_point, wanted.outputs))
            ]
            raise InvalidArgument(f"answers of this model are {kinds[0]}; y has {kinds[1]}")
        there = cases.inside if self.per_point_ else np.ones(len(cases.lengths), dtype=bool)
        weights = None
        if sample_weight is not None:
            weights = np.broadcast_to(
                np.asarray(sample_weight, dtype=float).reshape(-1, *[1] * (there.ndim - 1)), there.shape
            )[there]
        first, second = wanted.values[there], self._predicted(cases)[there]
        scores = [
            r2_score(
                first[:, at].reshape(len(first), -1), second[:, at].reshape(len(first), -1),
                sample_weight=weights, multioutput="variance_weighted",
            )
            for at in range(self.outputs_)
        ]  # fmt: skip
        return float(np.mean(scores))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

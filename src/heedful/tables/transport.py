"""A classifier that carries each class to a place of its own, as a scikit-learn estimator."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument, MissingExtra
from heedful.bridges.batches import each
from heedful.bridges.estimator import placed
from heedful.bridges.predictors import Classifier
from heedful.bridges.record import Hyperparameters
from heedful.bridges.samples import Samples, check_is_fitted
from heedful.tables._calibration import calibrated, temperature
from heedful.tables._columns import Columns, read_columns, weighed, without_target
from heedful.tables._folds import drawn_folds
from heedful.tables._maps import Maps
from heedful.tables._places import Pairing, centres_of, check_geometry, distances, targets_of

try:
    from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
except ImportError:
    raise MissingExtra("scikit-learn", "tables") from None

Likelihood = Literal["gaussian", "softmax_distance"]

REACH = 1000.0
"""The temperature is sought up to here."""


_WANTED = {2: "rows (cases, columns)", 3: "cases of tokens (cases, tokens, columns)"}


class TransportClassifier(ClassNamePrefixFeaturesOutMixin, TransformerMixin, Classifier):  # type: ignore[misc]
    r"""Classifies rows by a map $T$ that carries each class to a centre of its own; the nearest centre is the class.

    $$T = \arg\min \frac{1}{n} \sum_i |T(x_i) - t_i|^2, \qquad p(c \mid x) \propto \pi_c\, N(T(x); m_c, \sigma^2 I) \text{ at a temperature}$$

    (Quadrio & Candelieri 2025, arXiv 2512.09530.) The target $t_i$ of a row is the centre $m_c$ of its class (`pairing="mean"`), or a point of a Gaussian cloud around it
    that optimal transport pairs it with (`"ot"`). The squared loss has its optimum at $E[t \mid x]$, so with centres T(x) is the mean of the centres by the
    probabilities of their classes. Where ours differs from the thesis: on no data set did pairing by transport do better than the centres
    (recipe `transport-classifier`), so these are the default; centres are equally far apart (`"simplex"`) and not on a circle, where those of many classes are near; probabilities
    are calibrated; rows are standardised by the training alone, and no test label is looked at.

    X is an array or a data frame with a row for each case: numbers, categories, dates; missing cells are allowed. It may also be an array (cases, tokens,
    columns): each token is carried by the same map, which learns from classes of equal weight, so that their shares count once for a case and not once for a token,
    $\log p(c \mid x_1 \dots x_k) = \log \pi_c + \sum_j \left( b_c - |T(x_j) - m_c|^2 / 2\sigma^2\tau \right)$ up to a constant, with the temperature $\tau$ and the offsets $b_c$ fitted to cases that maps left out (else 0).

    Args:
        geometry: where the centres are: `"simplex"`, `"circle"` (as published) or `"lda"` (as the classes lie to one another). In Python also an array (classes, columns).
        separation: distance of the centres, in standard deviations of the clouds; 12, and on the circle that of a radius of 3 x classes.
        covariance: variance of the clouds around the centres.
        pairing: what a row is carried to: `"mean"` (the centre of its class), `"ot"` (the point of a cloud around it that optimal transport pairs it with) or `"random"` (any
            point of that cloud: the control of `"ot"`).
        likelihood: `"gaussian"` or `"softmax_distance"` (as published). The second is $p \propto e^{-|T(x) - m_c|}$.
        calibrate: whether the temperature of the scores is fitted, to rows that maps left out; else it is 1.
        p: exponent of the distance that `"ot"` pairs by.
        ot_batch: rows of a class that are paired at once.
        target: column of a frame that is to be predicted, where y is not given; `predict` leaves it out.
        categorical: columns that are categories though they hold numbers: names or places with commas between them; `"auto"` takes text and pandas' categories. In
            Python also a list.
        hidden: width of the hidden layer; in Python also a list of widths.
        dropout: share of the hidden units that training drops.
        members: maps whose mean is taken; each leaves out its own part of the rows, which it is measured on.
        epochs: passes over the data, at most.
        batch_size: rows in a batch; `"auto"` is a tenth of all, from 16 to 64; of more than 4,096 rows a 64th, up to 256.
        lr: learning rate at its highest; it falls to 0 as a cosine.
        weight_decay: weight decay of AdamW.
        validation_fraction: share of the rows to hold out where there is one member; with 0 or none all members learn from all rows, for all epochs. The
            weights of the epoch with the least held-out loss are kept.
        patience: stop after this many epochs without a better held-out loss.
        class_weight: `"balanced"` (every class weighs the same in the loss, however many cases it has). In Python also a mapping
            from classes to weights.
        random_state: decides clouds, folds, first weights, order and dropout. On the CPU the result is the same bit for bit.
        device: `"auto"` (CUDA where there is one), `"cpu"`, `"cuda"`, `"cuda:1"` or `"mps"`.
        predict_dtype: what answers are computed in, `"float32"` or `"float64"`. May be set after `fit`.
        progress: shows a bar on standard error.
        checkpoint_dir: a folder in which the training is kept after every epoch, until it ends. `fit` called again after a
            kill, with equal parameters and data, goes on there and reaches the same weights. One folder serves many fits.
        devices: how many devices train on each machine, as Lightning takes it; see `docs/scale.md`.
        num_nodes: how many machines train.
        strategy: how processes work together, as Lightning calls it: `"ddp"`.

    Fitted: `classes_`, `centres_` `(classes, width)` (the width counts a category by its levels), `priors_`, `temperature_`, `offsets_` ($b_c$, of cases with tokens), `plan_cost_` (mean of $|x - t|^p$ over standardised rows),
    `columns_`, `n_features_in_`, `n_axes_in_` (2, or 3 of cases with tokens), `network_` (the maps), `training_` (every epoch), `seed_`.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = TransportClassifier(epochs=20, random_state=0).fit(X[::2], y[::2])
    >>> model.score(X[1::2], y[1::2]) > 0.9, model.transform(X[:3]).shape
    (True, (3, 4))
    >>> bool(model.outlier_score(X[:1] + 20)[0] > model.outlier_score(X).max())
    True
    """

    _fitted: ClassVar[tuple[str, ...]] = (
        "classes_", "n_features_in_", "n_axes_in_", "columns_", "temperature_", "plan_cost_", "seed_", "training_",
    )  # fmt: skip
    _arrays: ClassVar[tuple[str, ...]] = ("centres_", "priors_", "offsets_")
    # What Hyperparameters asks for by name.
    optimizer: ClassVar[str] = "AdamW"
    schedule: ClassVar[str] = "cosine"
    columns_: Columns
    n_axes_in_: int
    centres_: np.ndarray
    priors_: np.ndarray
    offsets_: np.ndarray
    temperature_: float

    def __init__(
        self,
        geometry: str | Sequence[Any] = "simplex",
        *,
        separation: float | None = None,
        covariance: float = 1.0,
        pairing: str = "mean",
        likelihood: str = "gaussian",
        calibrate: bool = True,
        p: float = 2.0,
        ot_batch: int = 2000,
        target: str | None = None,
        categorical: str | Sequence[Any] = "auto",
        hidden: int | Sequence[int] = 256,
        dropout: float = 0.0,
        members: int = 8,
        epochs: int = 60,
        batch_size: int | str = "auto",
        lr: float = 3e-3,
        weight_decay: float = 0.01,
        validation_fraction: float | None = 0.1,
        patience: int | None = None,
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
        self.geometry = geometry
        self.separation = separation
        self.covariance = covariance
        self.pairing = pairing
        self.likelihood = likelihood
        self.calibrate = calibrate
        self.p = p
        self.ot_batch = ot_batch
        self.target = target
        self.categorical = categorical
        self.hidden = hidden
        self.dropout = dropout
        self.members = members
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
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

    def _check(self) -> None:
        check_geometry(self.geometry, self.separation)
        check_choice(Pairing, pairing=self.pairing)
        check_choice(Likelihood, likelihood=self.likelihood)
        check_choice((True, False), calibrate=self.calibrate)
        check_number(0, covariance=self.covariance)
        check_number(least=1, p=self.p)
        check_number(least=0, high=1, dropout=self.dropout)
        check_whole(ot_batch=self.ot_batch, members=self.members)
        for size in self._sizes:
            check_whole(hidden=size)
        super()._check()

    def _hyperparameters(self, count: int, seed: int) -> Hyperparameters:
        how = super()._hyperparameters(count, seed)
        size = min(max(16, min(count // 10, 64), count // 64), 256)
        return replace(how, batch_size=size) if self.batch_size == "auto" else how

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Widths of the hidden layers."""
        return tuple(self.hidden) if isinstance(self.hidden, Sequence | np.ndarray) else (self.hidden,)

    def _read(
        self, X: Any, y: Any = None, sample_weight: Any = None, groups: Any = None, *, fitting: bool = False
    ) -> Samples:
        X, y = without_target(X, y, self.target, fitting=fitting)
        tokens = X.shape[1] if getattr(X, "ndim", 2) == 3 and 0 not in X.shape else 0
        if fitting:
            self.n_axes_in_ = 3 if tokens else 2
        elif (self.n_axes_in_ == 3) != bool(tokens):
            raise InvalidArgument(
                f"this classifier was fitted on {_WANTED[self.n_axes_in_]}; got X of shape {np.shape(X)}. "
                f"{'A case of one token is X[:, None]' if not tokens else 'Fit it on cases of tokens, or ask for one token at a time'}"
            )
        if tokens:
            X = np.asarray(X).reshape(-1, X.shape[2])
            y = np.repeat(np.asarray(y), tokens) if fitting and y is not None else y
        cells, y = read_columns(self, X, y, fitting=fitting, categorical=self.categorical)
        if tokens:
            cells, y = cells.reshape(-1, tokens, cells.shape[1]), y[::tokens] if fitting else y
        return Samples((cells,), y, sample_weight, groups)

    def _labelled(self, samples: Samples) -> Samples:
        samples = super()._labelled(samples)
        single = np.bincount(samples.target) < 2  # type: ignore[arg-type]
        if single.any():
            names = ", ".join(map(str, self.classes_[single][:5]))
            warnings.warn(
                f"there is one case alone of the class {names}; nothing says how its cases vary", stacklevel=3
            )
        return samples

    def _split(self, samples: Samples) -> tuple[np.ndarray, np.ndarray]:
        everything = np.arange(len(samples))
        self._folds = drawn_folds(samples, self.members, self.validation_fraction, self.seed_)
        return everything, everything[:0]

    def _dense(self, samples: Samples) -> np.ndarray:
        """Standardised numbers `(cases, width)` or `(cases, tokens, width)`."""
        cells = samples.inputs[0]
        return self.columns_.dense(cells.reshape(-1, cells.shape[-1])).reshape(*cells.shape[:-1], -1)

    def _flat(self, samples: Samples) -> tuple[np.ndarray, np.ndarray, int]:
        """Points `(cases x tokens, width)`, their classes, and how many a case has."""
        dense = self._dense(samples)
        tokens = dense.shape[1] if dense.ndim == 3 else 1
        assert samples.target is not None
        return dense.reshape(-1, dense.shape[-1]), np.repeat(samples.target, tokens), tokens

    def _scale(self, samples: Samples) -> None:
        points, codes, tokens = self._flat(samples)
        weights = np.ones(len(samples)) if samples.weights is None else samples.weights
        self.priors_ = np.bincount(samples.target, weights) / weights.sum()  # type: ignore[arg-type]
        self.centres_ = centres_of(self.geometry, self.separation, points, codes)
        cloud = {
            "p": float(self.p),
            "deviation": float(self.covariance) ** 0.5,
            "batch": self.ot_batch,
            "seed": self.seed_,
        }
        self._goals = targets_of(self.pairing, self.centres_, points, codes, **cloud)  # type: ignore[arg-type]
        self.plan_cost_ = float((np.square(points - self._goals).sum(1) ** (self.p / 2)).mean())
        self._goals = (self._goals / self._unit).reshape(len(samples), tokens, -1)

    @property
    def _unit(self) -> float:
        """What the network's outputs are measured in: the root mean square of the centres about zero, so that errors are of order one."""
        return float(np.sqrt(np.square(self.centres_).mean() + self.covariance * (self.pairing != "mean"))) or 1.0

    def _network(self) -> Maps:
        width = self.columns_.width
        return Maps(width, self._sizes, width, self.members, float(self.dropout))

    def _tensors(self, samples: Samples) -> tuple[Tensor, ...]:
        return (torch.from_numpy(self._dense(samples)).float(),)

    def _parts(self, samples: Samples, learn: np.ndarray, held: np.ndarray) -> dict[str, Any]:
        """Rows with their class, their goal and the member that leaves them out; those rows are measured by it.

        Of tokens each class weighs the same: a map that knew of the shares of classes would count them with every token of a case.
        """
        if self.n_axes_in_ == 3:
            assert samples.target is not None
            weights = np.ones(len(samples)) if samples.weights is None else samples.weights
            samples = replace(samples, weights=weights / self.priors_[samples.target])
        data, _ = super()._parts(samples, learn, held).values()
        inputs, codes, weight = data
        folds = torch.from_numpy(self._folds)
        goals = torch.from_numpy(self._goals).float()
        everything = inputs, (codes, goals, folds), weight
        left = torch.nonzero(folds < self.members)[:, 0]
        return {"data": everything, "held_out": each(everything, lambda part: part[left]) if len(left) else None}

    def _loss(self, network: nn.Module, inputs: Any, target: Any, weight: Any) -> Tensor:
        _, goals, folds = target
        mapped = network.every(*inputs).reshape(self.members, *goals.shape)  # type: ignore[operator]
        errors = (mapped - goals).square().mean((2, 3))  # [M, cases]
        learned = (folds != torch.arange(self.members, device=folds.device)[:, None]).to(errors)
        counts = learned if weight is None else learned * weight
        # A batch may lie in one member's part alone; and a share of its own weights would give a rare class less in all, since many batches have none of it.
        total = (learned if self.n_axes_in_ == 3 else counts).sum().clamp_min(torch.finfo(counts.dtype).tiny)
        return (errors * counts).sum() / total

    def _measure(self, network: nn.Module, inputs: Any, target: Any, weight: Any) -> Mapping[str, Tensor]:
        """Squared distances of left-out rows to the centre of their class, by the member that left them out.

        A distance counts up to that of two centres: a row far from all others, which may go anywhere, is as wrong as one of another class.
        """
        codes, goals, folds = target
        mapped = network.every(*inputs).reshape(self.members, *goals.shape)  # type: ignore[operator]
        own = mapped[folds, torch.arange(len(folds), device=folds.device)]  # [cases, tokens, width]
        centres = torch.from_numpy(self.centres_ / self._unit).to(own)
        squares = (own[:, :, None] - centres).square().sum(-1)  # [cases, tokens, classes]
        most = np.square(distances(self.centres_ / self._unit)).mean()
        loss = (
            squares.gather(2, codes[:, None, None].expand(-1, squares.shape[1], 1)).clamp_max(most).mean((1, 2)) / most
        )
        return {
            "loss": loss if weight is None else weight * loss,
            "accuracy": (squares.sum(1).argmin(1) == codes).float(),
        }

    def _verify(self, network: nn.Module, samples: Samples) -> None:
        """Fits the temperature to rows that were left out; where none were, to those that were learned from."""
        self.temperature_, self.offsets_ = 1.0, np.zeros(len(self.priors_))
        if not self.calibrate:
            return
        with torch.no_grad():
            mapped = placed(network, torch.device("cpu")).every(*self._tensors(samples))  # type: ignore[operator]
        assert samples.target is not None
        left = np.flatnonzero(self._folds < self.members)
        points = mapped[self._folds[left], left] if len(left) else mapped.mean(0)
        rows = left if len(left) else np.arange(len(samples))
        scores = torch.from_numpy(self._log_scores(points.double().numpy() * self._unit))
        weight = None if samples.weights is None else torch.from_numpy(samples.weights[rows])
        # Tokens of a case may be alike, so that they say together no more than one of them.
        target = torch.from_numpy(samples.target[rows])
        if self.n_axes_in_ == 3:
            reach = REACH * points.shape[1]
            self.temperature_, offsets = calibrated(scores, target, reach, weight)
            self.offsets_ = (offsets.numpy() - self._log_priors) / points.shape[1]
        else:
            self.temperature_ = temperature(scores, target, REACH, weight)

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, *, groups: Any = None) -> Self:
        """Learns from X and y; goes on where a killed call with the same `checkpoint_dir` stopped.

        `sample_weight` has a number for each case: how much its loss counts. A case of weight 0 is left out altogether. Cases of
        one entry of `groups` are left out by the same member.
        """
        X, y, sample_weight, groups, _ = weighed(X, y, sample_weight, groups)
        try:
            return super().fit(X, y, sample_weight, groups=groups)
        finally:
            for name in ("_folds", "_goals"):
                self.__dict__.pop(name, None)

    @property
    def _log_priors(self) -> np.ndarray:
        return np.log(np.maximum(self.priors_, np.finfo(float).tiny))

    def _log_scores(self, points: np.ndarray) -> np.ndarray:
        """Of each class, `(cases, classes)`, up to a constant and before the temperature; those of a case's tokens are added, without the shares of classes."""
        squares = np.square(points[..., None, :] - self.centres_).sum(-1)
        scores = -squares / (2 * self.covariance) if self.likelihood == "gaussian" else -np.sqrt(squares)
        if self.n_axes_in_ == 3:
            return scores.sum(1)
        return self._log_priors + scores if self.likelihood == "gaussian" else scores

    @property
    def _n_features_out(self) -> int:
        return self.columns_.width

    def transform(self, X: Any) -> np.ndarray:
        """Where the map carries each row, `(cases, width)` or `(cases, tokens, width)`, in the space of `centres_`."""
        check_is_fitted(self, "network_")
        return self._run(self._tensors(self._read(X))).double().numpy() * self._unit

    def _outputs(self, X: Any) -> np.ndarray:
        points = self.transform(X)
        scores = self._log_scores(points) / self.temperature_
        return self._log_priors + points.shape[1] * self.offsets_ + scores if self.n_axes_in_ == 3 else scores

    def outlier_score(self, X: Any) -> np.ndarray:
        """Distance of T(x) to the nearest centre, `(cases,)`, of tokens the mean: large where a row is like none of the classes, or between them."""
        points = self.transform(X)
        nearest = np.linalg.norm(points[..., None, :] - self.centres_, axis=-1).min(-1)
        return nearest if nearest.ndim == 1 else nearest.mean(1)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        return tags

"""A classifier of multivariate time series with any attention, as a scikit-learn estimator."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from heedful._checks import check_number, check_whole
from heedful._errors import InvalidArgument
from heedful.bridges.predictors import Classifier
from heedful.bridges.samples import Samples, validated
from heedful.nn import Primal, ksvd_loss
from heedful.series._cases import Cases, as_array, cases_of, filled, scales, standardised
from heedful.series._frames import Frames, check_rows, check_single, read_frames
from heedful.series.network import Head, SeriesNetwork

LAYERS = ("softmax", "primal", "linear", "none")


class SeriesClassifier(Classifier):
    r"""Classifies multivariate time series by a small Transformer whose layers attend as you say.

    X is an array (cases, channels, time), a list of arrays (channels, time) of unequal lengths, or a table (cases, time) of
    univariate series. In data frames rows are steps and columns channels, known by their names: a list of frames, a frame
    with an index (instance, time), or a long frame with columns called instance and time. y holds labels, numbers or
    strings. NaN inside a series is a missing value and is interpolated; steps behind the last value of a series do not
    belong to it. Channels are standardised by the part that is learned from. A series longer than all of the training is
    cut, with a warning: positions and head know no later step.

    Loss: cross-entropy + `eta` x the mean $J^2$ of the primal layers (Chen et al. 2023, "Primal-Attention").

    Args:
        attention: `"softmax"`, `"primal"`, `"linear"`, `"none"` (no attention: the control), or such names joined by +, the first of
            which is repeated to fill `layers`. In Python also a list with a kernel, a `heedful.nn.Primal` or a name per layer.
        layers: number of layers; 2, or as many as are named.
        embed_dim: width of the network.
        num_heads: heads; they must divide the width.
        hidden: width inside the feed-forward layers; 4 x `embed_dim`.
        dropout: share of activations that the encoder drops in training.
        rank: rank of layers named `"primal"`.
        eta: weight of the primal layers' loss.
        head: `"flatten"` (weights of its own for every step, as in the paper) or `"mean"`.
        max_len: cut all series here, without a warning.
        epochs: passes over the data, at most.
        batch_size: series in a batch; `"auto"` is 16, of more than 1,000 series up to 256.
        lr: learning rate of RAdam, gradients clipped to norm 4.
        validation_fraction: share of the series to hold out; with 0 or none all are learned from, for all epochs. The weights
            of the epoch with the least held-out loss are kept.
        patience: stop after this many epochs without a better held-out loss.
        class_weight: `"balanced"` (every class weighs the same in the loss, however many cases it has). In Python also a mapping
            from classes to weights. The held-out loss is weighted too, the held-out accuracy is not.
        random_state: decides split, first weights, order and dropout. On the CPU the result is the same bit for bit.
        device: `"auto"` (CUDA where there is one), `"cpu"`, `"cuda"`, `"cuda:1"` or `"mps"`.
        predict_dtype: what answers are computed in, `"float32"` or `"float64"`. In the first the answer for a case may move by about
            1e-6 with the batch it is in, in the second it does not, at two to three times the time. May be set after `fit`.
        progress: shows a bar on standard error.
        checkpoint_dir: a folder in which the training is kept after every epoch, until it ends. `fit` called again after a
            kill, with equal parameters and data, goes on there and reaches the same weights. One folder serves many fits.
        devices: how many devices train on each machine, as Lightning takes it; see `docs/scale.md`.
        num_nodes: how many machines train.
        strategy: how processes work together, as Lightning calls it: `"ddp"`.

    Fitted: `classes_`, `n_features_in_` (channels; of a table its columns), `network_`, `training_` (every epoch),
    `max_len_`, `mean_`, `scale_`, `seed_`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(40, 2, 15)); X[20:, 0] += 3 * np.sin(np.arange(15))
    >>> y = np.repeat(["noise", "wave"], 20)
    >>> model = SeriesClassifier("softmax", embed_dim=16, num_heads=2, lr=0.01, epochs=15, random_state=0).fit(X, y)
    >>> model.predict_proba(X[:3]).shape, model.score(X, y) > 0.8
    ((3, 2), True)
    """

    _fitted: ClassVar[tuple[str, ...]] = (
        "classes_", "n_features_in_", "channels_", "is_table_", "max_len_", "mean_", "scale_", "seed_", "training_",
    )  # fmt: skip

    def __init__(
        self,
        attention: str | Sequence[Any] = "softmax+primal",
        *,
        layers: int | None = None,
        embed_dim: int = 64,
        num_heads: int = 8,
        hidden: int | None = None,
        dropout: float = 0.1,
        rank: int = 10,
        eta: float = 0.1,
        head: Head = "flatten",
        max_len: int | None = None,
        epochs: int = 100,
        batch_size: int | str = "auto",
        lr: float = 1e-3,
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
        self.attention = attention
        self.layers = layers
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.hidden = hidden
        self.dropout = dropout
        self.rank = rank
        self.eta = eta
        self.head = head
        self.max_len = max_len
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
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
        super()._check()
        check_whole(optional=True, layers=self.layers, max_len=self.max_len, hidden=self.hidden)
        check_number(least=0, eta=self.eta)
        # Sizes of layers are checked where layers are made.
        self._make(1, 1, 1, device="meta")

    def _read(
        self, X: Any, y: Any = None, sample_weight: Any = None, groups: Any = None, *, fitting: bool = False
    ) -> Samples:
        frames = read_frames(X)
        if not fitting:
            return self._read_unseen(X if frames is None else frames)
        if frames is None:
            check_rows(X, y)
        else:
            y, sample_weight = frames.aligned(y), frames.aligned(sample_weight, "sample_weight")
            groups = frames.aligned(groups, "groups")
        values, y = validated(self, _with_axes(as_array(X if frames is None else frames.series)), y)
        cases = filled(cases_of(values[:, None] if values.ndim == 2 else values))
        longest = int(cases.lengths.max())
        self.channels_, self.is_table_ = cases.values.shape[1], values.ndim == 2
        self.max_len_ = longest if self.max_len is None else min(longest, int(self.max_len))
        if frames is not None and frames.channels is not None:
            self.feature_names_in_ = np.array(frames.channels, dtype=object)
        return Samples((cases.values, cases.lengths), y, sample_weight, groups)

    def _read_unseen(self, X: Any) -> Samples:
        # The names of a table's columns are those of its steps.
        channels = None if self.is_table_ else getattr(self, "feature_names_in_", None)
        if isinstance(X, Frames):
            X = X.ordered(channels).series
        elif channels is not None:
            check_single(X, channels)
        # A list holds series, whatever their length; the columns of a table are those of fit.
        table = self.is_table_ and not isinstance(X, list | tuple)
        X = _with_axes(as_array(X))
        values = validated(self, X, reset=False, features=table and getattr(X, "ndim", 2) == 2)
        values = values[:, None] if values.ndim == 2 else values
        if values.shape[1] != self.channels_:
            raise InvalidArgument(
                f"X has {values.shape[1]} features, but {type(self).__name__} is expecting {self.channels_} features as input: "
                "the features of series are their channels, X is (cases, channels, time)"
            )
        cases = cases_of(values)
        longer = int((cases.lengths > self.max_len_).sum())
        if longer and self.max_len_ != self.max_len:
            warnings.warn(
                f"{longer} of {len(cases)} series are longer than the longest of the training, {self.max_len_} steps, and "
                "are cut there: positions and head know no later step",
                stacklevel=5,
            )
        cases = filled(cases)
        return Samples((cases.values, cases.lengths))

    def _scale(self, samples: Samples) -> None:
        self.mean_, self.scale_ = scales(Cases(*samples.inputs))

    def _tensors(self, samples: Samples) -> tuple[Tensor, ...]:
        return standardised(Cases(*samples.inputs), self.mean_, self.scale_, self.max_len_)

    def _network(self) -> SeriesNetwork:
        return self._make(self.channels_, len(self.classes_), self.max_len_)

    def _make(self, channels: int, classes: int, max_len: int, device: str | None = None) -> SeriesNetwork:
        sizes: dict[str, Any] = {"embed_dim": self.embed_dim, "num_heads": self.num_heads, "hidden": self.hidden}
        options: dict[str, Any] = {"dropout": self.dropout, "head": self.head, "device": device}
        return SeriesNetwork(channels, classes, max_len, kernels=self._kernels(), **sizes, **options)

    def _kernels(self) -> list[Any]:
        """One entry per layer; tensors of kernels are copies, so that training leaves the parameters alone."""
        named = isinstance(self.attention, str)
        if not named and not isinstance(self.attention, Sequence):
            raise InvalidArgument(
                f"attention must be names joined by + or a list of layers; got {self.attention!r:.100}"
            )
        if isinstance(self.attention, str):
            parts = [part.strip() for part in self.attention.split("+")]
            if not set(parts) <= set(LAYERS):
                raise InvalidArgument(
                    f"attention must be of {', '.join(LAYERS)}, or such names joined by +; got {self.attention!r:.100}"
                )
        else:
            parts = list(copy.deepcopy(self.attention))
        count = self.layers or (max(2, len(parts)) if named else len(parts))
        if not parts or count < len(parts) or (count > len(parts) and not named):
            raise InvalidArgument(
                f"attention names {len(parts)} layers and layers={self.layers}; give a list of one entry for each layer, or "
                "names joined by +, no more than layers"
            )
        parts = parts[:1] * (count - len(parts)) + parts
        primal = Primal(self.rank, track_loss=bool(self.eta > 0))
        return [primal if isinstance(part, str) and part == "primal" else part for part in parts]

    def _loss(self, network: nn.Module, inputs: Any, target: Any, weight: Any) -> Tensor:
        loss = super()._loss(network, inputs, target, weight)
        return loss + float(self.eta) * ksvd_loss(network) if self.eta else loss

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = True
        return tags


def _with_axes(X: Any) -> Any:
    if getattr(X, "ndim", 2) > 3:
        raise InvalidArgument(f"X must have two or three axes, (cases, time) or (cases, channels, time); got {X.ndim}")
    if getattr(X, "ndim", 2) == 3 and 0 in X.shape:
        raise InvalidArgument(f"X must hold one case, one channel and one step or more; got shape {tuple(X.shape)}")
    return X

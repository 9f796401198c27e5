"""A classifier of multivariate time series with any attention, as a scikit-learn estimator."""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from heedful import __version__
from heedful._errors import InvalidArgument
from heedful._pretrained import located
from heedful.bridges.estimator import (
    Classifier,
    Recipe,
    Training,
    check_range,
    check_whole,
    device_of,
    dtype_of,
    encoded,
    hold_out,
    plain_number,
    seed_of,
    validated,
    weights_of,
)
from heedful.nn import Primal, ksvd_loss
from heedful.nn._describe import LayerName
from heedful.series._cases import Cases, as_array, cases_of, filled, scales, standardised
from heedful.series._frames import Frames, check_rows, check_single, read_frames
from heedful.series.network import Head, SeriesNetwork

# What does not decide the result of a training.
_ASIDE = ("random_state", "device", "progress", "checkpoint_dir", "predict_dtype")


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
        attention: `"softmax"`, `"primal"`, `"linear"`, `"none"` (no attention: the control), or such names joined by +, the
            first of which is repeated to fill `layers`; or a list with a kernel, a `heedful.nn.Primal` or a name per layer.
        layers: number of layers; 2, or as many as are named.
        embed_dim, num_heads, hidden, dropout: sizes and dropout of the encoder; `hidden` is 4 x `embed_dim`.
        rank, eta: rank of layers named `"primal"`, and the weight of their loss.
        head: `"flatten"` (weights of its own for every step, as in the paper) or `"mean"`.
        max_len: cut all series here, without a warning.
        epochs, batch_size, lr: of RAdam, gradients clipped to norm 4; batches of `"auto"` are 16, of more than 1,000 cases
            up to 256.
        validation_fraction, patience: the part of the cases held out. Training stops when its loss has not fallen for
            `patience` epochs, and the weights of its best epoch are kept. With None all cases are learned from, for all
            epochs.
        class_weight: None, `"balanced"` (every class weighs the same in the loss, however many cases it has), or a mapping from
            classes to weights. The held-out loss is weighted too, the held-out accuracy is not.
        random_state: decides split, first weights, order and dropout; on the CPU the result is the same bit for bit.
        device: `"auto"` is CUDA where there is one.
        predict_dtype: what answers are computed in. In `"float32"` the answer for a case may move by about 1e-6 with the batch it
            is in, in `"float64"` it does not, at two to three times the time. May be set after `fit`.
        progress: shows a bar on standard error.
        checkpoint_dir: a folder in which the training is kept after every epoch, until it ends. `fit` called again after a
            kill, with equal parameters and data, goes on there and reaches the same weights. One folder serves many fits.

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
        random_state: Any = None,
        device: str = "auto",
        predict_dtype: str = "float32",
        progress: bool = False,
        checkpoint_dir: str | Path | None = None,
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

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learns from series X and labels y; goes on where a killed call with the same `checkpoint_dir` stopped.

        `sample_weight` has a number for each case: how much its loss counts. A case of weight 0 is left out altogether.
        """
        self._check()
        from heedful.bridges.training import train

        device = device_of(self.device)
        frames = read_frames(X)
        if frames is None:
            check_rows(X, y)
        else:
            y, sample_weight = frames.aligned(y), frames.aligned(sample_weight, "sample_weight")
        cases, codes = self._learn_shape(X if frames is None else frames, y)
        if len(self.classes_) < 2:
            raise InvalidArgument(f"y holds one class, {self.classes_[0]}; a classifier needs series of two or more")
        weights = weights_of(self.classes_, codes, self.class_weight, sample_weight)
        if weights is not None:
            counting = weights > 0
            cases, codes, weights = cases[counting], codes[counting], weights[counting]
        checkpoint, self.seed_ = self._place(cases, codes, weights)
        learn, held = hold_out(codes, self.validation_fraction, self.seed_)
        self.mean_, self.scale_ = scales(cases[learn])
        x, padding = standardised(cases, self.mean_, self.scale_, self.max_len_)
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed_)
            network = self._network()

        def part(rows: np.ndarray) -> tuple[Tensor, ...]:
            tensors = x[rows], padding[rows], torch.from_numpy(codes[rows])
            # A mean weight of 1 leaves the learning rate what it is.
            more = () if weights is None else (torch.from_numpy(weights[rows] / weights[rows].mean()).float(),)
            return (*tensors, *more)

        self.training_: Training = train(
            network,
            part(learn),
            part(held) if len(held) else None,
            loss=self._loss,
            measure=_measure,
            recipe=Recipe(self.epochs, self._batch_size(len(learn)), self.lr, patience=self.patience, seed=self.seed_),
            device=device,
            progress=self.progress,
            checkpoint=checkpoint,
        )
        self.network_ = network
        return self

    def _check(self) -> None:
        """Refuses parameters that cannot be, before data is touched; sizes of layers are checked where layers are made."""
        dtype_of(self.predict_dtype, device_of(self.device))
        check_whole(layers=self.layers, max_len=self.max_len, hidden=self.hidden)
        check_range(validation_fraction=(self.validation_fraction, 0.0, 1.0))
        eta = plain_number(self.eta)
        if not isinstance(eta, int | float) or isinstance(eta, bool) or not 0 <= eta < np.inf:
            raise InvalidArgument(f"eta must be a number from 0 on; got {self.eta!r}")
        if self.random_state is not None and not isinstance(self.random_state, np.random.RandomState):
            seed_of(self.random_state)
        Recipe(self.epochs, self._batch_size(1), self.lr, patience=self.patience)
        self._make(1, 1, 1, device="meta")

    def _learn_shape(self, X: Any, y: Any) -> tuple[Cases, np.ndarray]:
        """Sets what X and y say about themselves: classes, channels and lengths."""
        values, y = validated(self, as_array(X.series if isinstance(X, Frames) else X), y)
        classes, codes = encoded(y)
        cases = filled(cases_of(values[:, None] if values.ndim == 2 else values))
        longest = int(cases.lengths.max())
        self.__dict__.pop("network_", None)
        self.classes_, self.channels_, self.is_table_ = classes, cases.values.shape[1], values.ndim == 2
        self.max_len_ = longest if self.max_len is None else min(longest, int(self.max_len))
        if isinstance(X, Frames) and X.channels is not None:
            self.feature_names_in_ = np.array(X.channels, dtype=object)
        return cases, codes

    def _tensors(self, X: Any) -> tuple[Tensor, ...]:
        frames = read_frames(X)
        # The names of a table's columns are those of its steps.
        channels = None if self.is_table_ else getattr(self, "feature_names_in_", None)
        if frames is not None:
            X = frames.ordered(channels).series
        elif channels is not None:
            check_single(X, channels)
        # A list holds series, whatever their length; the columns of a table are those of fit.
        table = self.is_table_ and not isinstance(X, list | tuple)
        X = as_array(X)
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
                stacklevel=4,
            )
        return standardised(filled(cases), self.mean_, self.scale_, self.max_len_)

    def _network(self) -> SeriesNetwork:
        return self._make(self.channels_, len(self.classes_), self.max_len_)

    def _make(self, channels: int, classes: int, max_len: int, device: str | None = None) -> SeriesNetwork:
        sizes: dict[str, Any] = {"embed_dim": self.embed_dim, "num_heads": self.num_heads, "hidden": self.hidden}
        options: dict[str, Any] = {"dropout": self.dropout, "head": self.head, "device": device}
        given = {name: plain_number(value) for name, value in (sizes | options).items()}
        return SeriesNetwork(channels, classes, max_len, kernels=self._kernels(), **given)

    def _kernels(self) -> list[Any]:
        """One entry per layer; tensors of kernels are copies, so that training leaves the parameters alone."""
        named = isinstance(self.attention, str)
        if not named and not isinstance(self.attention, Sequence):
            raise InvalidArgument(
                f"attention must be names joined by + or a list of layers; got {self.attention!r:.100}"
            )
        if isinstance(self.attention, str):
            parts = [part.strip() for part in self.attention.split("+")]
            if not set(parts) <= set(get_args(LayerName)):
                raise InvalidArgument(
                    f"attention must be of {', '.join(get_args(LayerName))}, or such names joined by +; got {self.attention!r:.100}"
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
        primal = Primal(plain_number(self.rank), track_loss=bool(self.eta > 0))
        return [primal if isinstance(part, str) and part == "primal" else part for part in parts]

    def _batch_size(self, count: int) -> int:
        if isinstance(self.batch_size, str):
            if self.batch_size != "auto":
                raise InvalidArgument(f"batch_size must be 'auto' or a whole number from 1 on; got {self.batch_size!r}")
            return min(max(16, count // 64), 256)
        return self.batch_size

    def _loss(
        self, network: nn.Module, x: Tensor, padding: Tensor, codes: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        logits = network(x, padding)
        if weights is None:
            loss = functional.cross_entropy(logits, codes)
        else:
            loss = (weights * functional.cross_entropy(logits, codes, reduction="none")).mean()
        return loss + float(self.eta) * ksvd_loss(network) if self.eta else loss

    def _place(self, cases: Cases, codes: np.ndarray, weights: np.ndarray | None) -> tuple[Path | None, int]:
        """The checkpoint of this very training, and its seed; without `random_state` the seed of the one to go on with."""
        if self.checkpoint_dir is None:
            return None, seed_of(self.random_state)
        folder = located(self.checkpoint_dir)
        params = {name: value for name, value in self._settings().items() if name not in _ASIDE}
        told = json.dumps([__version__, params, self.classes_.tolist(), cases.values.shape])
        digest = hashlib.sha256(told.encode())
        for array in (cases.values, cases.lengths, codes, *(() if weights is None else (weights,))):
            digest.update(np.ascontiguousarray(array).tobytes())
        name = digest.hexdigest()[:16]
        if self.random_state is None:
            for found in folder.glob(f"{name}-*.ckpt"):
                return found, int(found.stem.split("-")[1])
        seed = seed_of(self.random_state)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"checkpoint_dir={str(folder)!r} cannot be made: {error.strerror}") from None
        return folder / f"{name}-{seed}.ckpt", seed

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = True
        return tags


def _measure(
    network: nn.Module, x: Tensor, padding: Tensor, codes: Tensor, weights: Tensor | None = None
) -> Mapping[str, Tensor]:
    logits = network(x, padding)
    loss = functional.cross_entropy(logits, codes, reduction="none")
    return {
        "loss": loss if weights is None else weights * loss,
        "accuracy": (logits.argmax(1) == codes).float(),
    }

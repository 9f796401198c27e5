"""A classifier of multivariate time series, by convolution features and a ridge or by a network with any attention."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful.bridges.predictors import Classifier
from heedful.bridges.samples import Samples
from heedful.nn import Primal, ksvd_loss
from heedful.series._cases import Cases, standardised
from heedful.series._method import KernelMethod, KernelName
from heedful.series.network import Head, SeriesNetwork

LAYERS = ("softmax", "primal", "linear", "none")
USUAL = "softmax+primal"
# Arguments that say something to the network alone.
TRAINED = (
    "attention", "layers", "embed_dim", "num_heads", "hidden", "dropout", "rank", "eta", "head", "epochs", "batch_size", "lr",
    "validation_fraction", "patience", "devices", "num_nodes", "strategy",
)  # fmt: skip
Method = Literal["auto", "kernel", "network"]


class SeriesClassifier(KernelMethod, Classifier):
    r"""Classifies multivariate time series: by convolution features and a ridge, in seconds, or by a small Transformer.

    `method="kernel"`: shares of positive convolutions (MiniRocket's) and wins of competing kernels (Hydra's), of each series and of its
    differences; a ridge for each kind, its penalty by leave-one-out errors in closed form; `evidence` says where in time an answer comes
    from. `method="network"`: an encoder whose layers attend as you say, trained by gradients. On small sets the first is better
    and far cheaper: `docs/series.md` has the figures.

    X is an array (cases, channels, time), a list of arrays (channels, time) of unequal lengths, or a table (cases, time) of
    univariate series. In data frames rows are steps and columns channels, known by their names: a list of frames, a frame
    with an index (instance, time), or a long frame with columns called instance and time. y holds labels, numbers or
    strings. NaN inside a series is a missing value and is interpolated; steps behind the last value of a series do not
    belong to it. Channels are standardised by the part that is learned from. To the network a series longer than all of the training is
    cut, with a warning: positions and head know no later step.

    The network's loss: cross-entropy + `eta` x the mean $J^2$ of the primal layers (Chen et al. 2023, "Primal-Attention").

    Args:
        attention: `"softmax"`, `"primal"`, `"linear"`, `"none"` (no attention: the control), or such names joined by +, the first of
            which is repeated to fill `layers`; of the network alone, `"softmax+primal"` by default. In Python also a list with a kernel, a
            `heedful.nn.Primal` or a name per layer.
        method: `"kernel"`, `"network"`, or `"auto"`: the network where one of its own arguments is given another value than by default, else
            the kernel method.
        kernel: `"linear"` (on features of whole series), `"softmax"` (every segment of a series is compared with every segment of another, up to 8
            times the time) or `"linear+softmax"`.
        segments: in how many parts of equal length `evidence` divides each series.
        features: how many shares of positive convolutions are drawn, for the series and again for its differences; by default 9,996, or
            2,520 of more than 2,000 series.
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

    The network's own arguments are `attention`, those from `layers` to `head` and from `epochs` to `patience`, `devices`, `num_nodes` and `strategy`.

    Fitted: `classes_`, `n_features_in_` (channels; of a table its columns), `method_`, `mean_`, `scale_`, `seed_`; `loo_score_` (kernel: the
    accuracy on training cases, each left out in turn); `network_`, `training_` (every epoch) and `max_len_`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(40, 2, 15)); X[20:, 0] += 3 * np.sin(np.arange(15))
    >>> y = np.repeat(["noise", "wave"], 20)
    >>> model = SeriesClassifier(features=840, random_state=0).fit(X, y)
    >>> model.score(X, y), model.evidence(X[20:]).values.shape  # series, segments, channels, classes
    (1.0, (20, 8, 2, 2))
    >>> model = SeriesClassifier("softmax", embed_dim=16, num_heads=2, lr=0.01, epochs=15, random_state=0).fit(X, y)
    >>> model.predict_proba(X[:3]).shape, model.score(X, y) > 0.8
    ((3, 2), True)
    """

    _fitted: ClassVar[tuple[str, ...]] = ("classes_", *KernelMethod._read_facts, "seed_")
    _optional: ClassVar[tuple[str, ...]] = ("feature_names_in_", "method_", "loo_score_", "max_len_", "training_")
    method_: str = "network"  # of folders that were written when there was no other

    def __init__(
        self,
        attention: str | Sequence[Any] | None = None,
        *,
        method: Method = "auto",
        kernel: KernelName = "linear",
        segments: int = 8,
        features: int | None = None,
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
        self.method = method
        self.kernel = kernel
        self.segments = segments
        self.features = features
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
        check_choice(Method, method=self.method)
        self._check_kernel()
        check_whole(optional=True, layers=self.layers, max_len=self.max_len, hidden=self.hidden)
        check_number(least=0, eta=self.eta)
        # Sizes of layers are checked where layers are made.
        self._make(1, 1, 1, device="meta")

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, *, groups: Any = None) -> Self:
        """Learns from X and y, labels; `sample_weight` has a number for each case, and a case of weight 0 is left out altogether.

        The network goes on where a killed call with the same `checkpoint_dir` stopped, and holds cases of one entry of `groups` out together.
        """
        self._check()
        if self._is_network:
            super().fit(X, y, sample_weight, groups=groups)
            self.method_ = "network"
            return self
        samples = self._labelled(self._read(X, y, sample_weight, groups, fitting=True))
        if samples.weights is not None:
            samples = samples[samples.weights > 0]
        assert samples.target is not None
        codes = torch.from_numpy(samples.target)
        weights = torch.ones(len(codes)) if samples.weights is None else torch.from_numpy(samples.weights)
        weights = (weights / weights.sum()).double()

        def error(unseen: Tensor) -> float:
            wrong = unseen.cpu().argmax(1) != codes
            return float(weights @ wrong.double()) + 1 / len(codes)

        target = np.where(samples.target[:, None] == np.arange(len(self.classes_)), 1.0, -1.0)
        unseen = self._fit_machine(samples, target, error)
        self.loo_score_ = float((unseen.argmax(1) == codes).double().mean())
        self.machine_.scaled(_sharpness(unseen, codes, weights))
        self.method_ = "kernel"
        return self

    @property
    def _is_network(self) -> bool:
        if self.method != "auto":
            return self.method == "network"
        usual = inspect.signature(SeriesClassifier).parameters
        # Lists of layers may hold what cannot be compared.
        given = (getattr(self, name) for name in TRAINED)
        return any(
            type(value) is not type(usual[name].default) or value != usual[name].default
            for name, value in zip(TRAINED, given, strict=True)
        )

    def _outputs(self, X: Any) -> np.ndarray:
        return self._machine_scores(X) if hasattr(self, "machine_") else super()._outputs(X)

    def _load(self, weights: dict[str, Tensor]) -> None:
        if self.method_ == "kernel":
            super()._load(weights)
        else:
            Classifier._load(self, weights)

    def _read(
        self, X: Any, y: Any = None, sample_weight: Any = None, groups: Any = None, *, fitting: bool = False
    ) -> Samples:
        samples = super()._read(X, y, sample_weight, groups, fitting=fitting)
        longest = int(samples.inputs[1].max())
        if fitting:
            # Data that is refused leaves the model that was there.
            for name in ("machine_", "loo_score_", "network_", "training_", "method_"):
                self.__dict__.pop(name, None)
            self.max_len_ = longest if self.max_len is None else min(longest, int(self.max_len))
        elif hasattr(self, "network_") and longest > self.max_len_ != self.max_len:
            longer = int((samples.inputs[1] > self.max_len_).sum())
            warnings.warn(
                f"{longer} of {len(samples)} series are longer than the longest of the training, {self.max_len_} steps, and "
                "are cut there: positions and head know no later step",
                stacklevel=5,
            )
        return samples

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
        attention = USUAL if self.attention is None else self.attention
        named = isinstance(attention, str)
        if not named and not isinstance(attention, Sequence):
            raise InvalidArgument(f"attention must be names joined by + or a list of layers; got {attention!r:.100}")
        if isinstance(attention, str):
            parts = [part.strip() for part in attention.split("+")]
            if not set(parts) <= set(LAYERS):
                raise InvalidArgument(
                    f"attention must be of {', '.join(LAYERS)}, or such names joined by +; got {attention!r:.100}"
                )
        else:
            parts = list(copy.deepcopy(attention))
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


def _sharpness(scores: Tensor, codes: Tensor, weights: Tensor) -> float:
    """What scores of cases that were left out are multiplied by, so that their softmax is likeliest.

    One more case is counted, whose class is drawn: where all others are right, probabilities stay short of 1.
    """
    factors = np.geomspace(0.1, 30.0, 40).tolist()
    options: dict[str, Any] = {"reduction": "none", "label_smoothing": 1 / (1 + len(codes))}
    losses = [float(weights @ nn.functional.cross_entropy(factor * scores, codes, **options)) for factor in factors]
    return factors[int(np.argmin(losses))]

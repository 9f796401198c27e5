"""What every estimator here shares: scikit-learn's habits, one `fit`, a hold-out part, checkpoints, folders without pickles."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from heedful import __version__
from heedful._checks import check_choice, check_number, check_whole, is_whole
from heedful._errors import InvalidArgument, MissingExtra
from heedful._files import located
from heedful._progress import bar
from heedful._runtime import device_of
from heedful._savable import Savable, decode, encode, entry_of
from heedful.bridges.record import Hyperparameters, Training
from heedful.bridges.samples import Samples, hold_out, validated

try:
    from sklearn.base import BaseEstimator
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted
except ImportError:
    raise MissingExtra("scikit-learn", "tables") from None

__all__ = ["Estimator", "device_of", "dtype_of", "outputs", "placed", "seed_of"]

Inputs = tuple[Tensor, ...]
# Fitted arrays lie beside the weights, under names that no module has.
_FITTED = "fitted:"


class Estimator(Savable, BaseEstimator):  # type: ignore[misc]
    """A scikit-learn estimator around one network: `network_`, saved with what was fitted to a folder of two files.

    A subclass says what is its own: `_read` (X, y -> samples), `_network` (made anew from parameters and fitted attributes),
    `_loss` and `_measure`; where needed also `_scale` (what is learned of samples before the network), `_start` (what a new network takes
    from them), `_tensors` (the network's inputs), `_check` (parameters, before data is touched) and `_verify` (the network, after training). `_fitted` lists fitted attributes that go to `config.json`, `_arrays`
    those that lie beside the weights. Its constructor stores `epochs`, `batch_size`, `lr`, `validation_fraction`, `patience`,
    `random_state`, `device`, `predict_dtype`, `progress`, `checkpoint_dir`, and, where it offers them, any other field of
    `Hyperparameters` and Lightning's `devices`, `num_nodes`, `strategy`.
    """

    _kind = "estimator"
    _needs = ("params", "fitted")
    _fitted: ClassVar[tuple[str, ...]] = ()
    _optional: ClassVar[tuple[str, ...]] = ("feature_names_in_",)
    _arrays: ClassVar[tuple[str, ...]] = ()
    # What does not decide the result of a training.
    _ASIDE: ClassVar[tuple[str, ...]] = (
        "random_state", "device", "progress", "checkpoint_dir", "predict_dtype", "devices", "num_nodes", "strategy",
    )  # fmt: skip

    network_: nn.Module
    training_: Training
    seed_: int

    def _read(
        self, X: Any, y: Any = None, sample_weight: Any = None, groups: Any = None, *, fitting: bool = False
    ) -> Samples:
        """What X, and in `fit` y and the rest, hold; by default a table of numbers."""
        table = validated(self, X, y, reset=fitting)
        table, y = table if isinstance(table, tuple) else (table, None)
        return Samples((table,), y, sample_weight, groups)

    def _network(self) -> nn.Module:
        raise NotImplementedError

    def _loss(self, network: nn.Module, inputs: Inputs, target: Any, weight: Any) -> Tensor:
        """The mean loss of a batch; target and weight are tensors, or None where there are none."""
        raise NotImplementedError

    def _measure(self, network: nn.Module, inputs: Inputs, target: Any, weight: Any) -> Mapping[str, Tensor]:
        """Values of each held-out case, among them `"loss"`."""
        raise NotImplementedError

    def _labelled(self, samples: Samples) -> Samples:
        """Samples with the target as numbers and with weights, as the kind of prediction asks."""
        return samples

    def _scale(self, samples: Samples) -> None:
        """Learns of the samples that are learned from what `_tensors` and `_network` need."""

    def _start(self, network: nn.Module, samples: Samples) -> None:
        """Sets what a new network takes from the samples that it will learn from, besides `_scale`."""

    def _verify(self, network: nn.Module, samples: Samples) -> None:
        """Checks the trained network on the samples that it learned from; what it raises ends `fit`."""

    def _tensors(self, samples: Samples) -> Inputs:
        """The network's inputs; it learns from them in float32."""
        return tuple(torch.from_numpy(part.astype(np.float32)) for part in samples.inputs)

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, *, groups: Any = None) -> Self:
        """Learns from X and y; goes on where a killed call with the same `checkpoint_dir` stopped.

        `sample_weight` has a number for each case: how much its loss counts. A case of weight 0 is left out altogether. Cases of
        one entry of `groups` are held out together.
        """
        self._check()
        from heedful.bridges.training import is_first, train

        device = device_of(self.device)
        samples = self._read(X, y, sample_weight, groups, fitting=True)
        self.__dict__.pop("network_", None)
        samples = self._labelled(self._grouped(samples))
        if samples.weights is not None:
            samples = samples[samples.weights > 0]
        checkpoint, self.seed_ = self._place(samples)
        learn, held = self._split(samples)
        self._scale(samples[learn])
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed_)
            network = self._network()
            self._start(network, samples[learn])
        with bar(wanted=self.progress and is_first(), stays=True) as progress:
            self.training_ = train(
                network,
                **self._parts(samples, learn, held),
                loss=self._loss,
                measure=self._measure,
                hyperparameters=self._hyperparameters(len(learn), self.seed_),
                device=device,
                progress=progress,
                checkpoint=checkpoint,
                **self._processes,
            )
        self._verify(network, samples[learn])
        self.network_ = network
        return self

    def _check(self) -> None:
        """Refuses parameters that cannot be, before data is touched."""
        dtype_of(self.predict_dtype, device_of(self.device))
        check_number(least=0, high=1, optional=True, validation_fraction=self.validation_fraction)
        if self.random_state is not None and not isinstance(self.random_state, np.random.RandomState):
            seed_of(self.random_state)
        if self._processes:
            self._check_processes()
        if self._processes and not is_whole(self.random_state):
            raise InvalidArgument(
                f"with several processes random_state must be a whole number, the same for all; got {self.random_state!r:.100}"
            )
        self._hyperparameters(1, 0)

    def _check_processes(self) -> None:
        from heedful.bridges.training import STRATEGIES

        options = self._processes
        check_whole(num_nodes=options["num_nodes"])
        if options["devices"] not in ("auto", -1) and not isinstance(options["devices"], list):
            check_whole(devices=options["devices"])
        if isinstance(options["strategy"], str):
            check_choice(("auto", *STRATEGIES), strategy=options["strategy"])

    @property
    def _processes(self) -> dict[str, Any]:
        """What Lightning is told of processes, where it is more than one."""
        usual = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
        options = {name: getattr(self, name, value) for name, value in usual.items()}
        return {} if options == usual else options

    def _hyperparameters(self, count: int, seed: int) -> Hyperparameters:
        options = {
            field.name: getattr(self, field.name) for field in fields(Hyperparameters) if hasattr(self, field.name)
        }
        size = options["batch_size"]
        if isinstance(size, str):
            if size != "auto":
                raise InvalidArgument(f"batch_size must be 'auto' or a whole number from 1 on; got {size!r}")
            size = min(max(16, count // 64), 256)
        return Hyperparameters(**options | {"batch_size": size, "seed": seed})

    def _grouped(self, samples: Samples) -> Samples:
        if samples.groups is None:
            return samples
        codes = np.unique(np.asarray(samples.groups), return_inverse=True)[1]
        if codes.shape != (len(samples),):
            raise InvalidArgument(f"groups must have one entry for each of the {len(samples)} cases; got {len(codes)}")
        return replace(samples, groups=codes)

    def _split(self, samples: Samples) -> tuple[np.ndarray, np.ndarray]:
        """The rows to learn from and those held out."""
        return hold_out(len(samples), self.validation_fraction, self.seed_, groups=samples.groups, times=samples.times)

    def _parts(self, samples: Samples, learn: np.ndarray, held: np.ndarray) -> dict[str, Any]:
        """The data that `train` takes, and how it makes batches of them."""
        inputs = tuple(part.float() if part.is_floating_point() else part for part in self._tensors(samples))
        target = None if samples.target is None else torch.from_numpy(samples.target)

        def part(rows: np.ndarray) -> tuple[Any, ...]:
            # A mean weight of 1 leaves the learning rate what it is.
            weights = None if samples.weights is None else samples.weights[rows]
            weight = None if weights is None else torch.from_numpy(weights / weights.mean()).float()
            return tuple(tensor[rows] for tensor in inputs), None if target is None else target[rows], weight

        return {"data": part(learn), "held_out": part(held) if len(held) else None}

    def _place(self, samples: Samples) -> tuple[Path | None, int]:
        """The checkpoint of this very training, and its seed; without `random_state` the seed of the one to go on with."""
        if self.checkpoint_dir is None:
            return None, seed_of(self.random_state)
        folder = located(self.checkpoint_dir)
        params = {name: value for name, value in self._settings().items() if name not in self._ASIDE}
        shapes = [part.shape for part in samples.arrays]
        about = [__version__, type(self).__name__, params, encode(getattr(self, "classes_", None)), shapes]
        digest = hashlib.sha256(json.dumps(about).encode())
        for array in samples.arrays:
            digest.update(np.ascontiguousarray(array).tobytes())
        name = digest.hexdigest()[:16]
        if self.random_state is None:
            for file in folder.glob(f"{name}-*.ckpt"):
                return file, int(file.stem.split("-")[1])
        seed = seed_of(self.random_state)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"checkpoint_dir={str(folder)!r} cannot be made: {error.strerror}") from None
        return folder / f"{name}-{seed}.ckpt", seed

    def _outputs(self, X: Any) -> np.ndarray:
        """What the network makes of each case."""
        check_is_fitted(self, "network_")
        return self._run(self._tensors(self._read(X))).numpy()

    def _run(self, inputs: Inputs) -> Tensor:
        device = device_of(self.device)
        return outputs(self.network_, inputs, device, dtype_of(self.predict_dtype, device))

    def _settings(self) -> dict[str, Any]:
        """The parameters as JSON."""
        return {name: encode(value) for name, value in self.get_params(deep=False).items()}

    def _described(self) -> dict[str, Any]:
        check_is_fitted(self)
        names = [*self._fitted, *(name for name in self._optional if hasattr(self, name))]
        fitted = {name: encode(getattr(self, name)) for name in names}
        return entry_of(type(self)) | {"params": self._settings(), "fitted": fitted}

    def _tensors_saved(self) -> dict[str, Tensor]:
        weights = self.network_.state_dict() if hasattr(self, "network_") else {}
        arrays = {name: getattr(self, name) for name in self._arrays if hasattr(self, name)}
        return weights | {_FITTED + name: torch.from_numpy(array) for name, array in arrays.items()}

    @classmethod
    def _remade(cls, description: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        params, fitted = description["params"], description["fitted"]
        estimator = cls(**{name: decode(value) for name, value in params.items()})
        for name in (*cls._fitted, *(name for name in cls._optional if name in fitted)):
            setattr(estimator, name, decode(fitted[name]))
        for name in [name for name in tensors if name.startswith(_FITTED)]:
            if name.removeprefix(_FITTED) not in cls._arrays:
                raise KeyError(name)
            setattr(estimator, name.removeprefix(_FITTED), tensors.pop(name).numpy())
        estimator._load(tensors)
        return estimator

    def _load(self, weights: dict[str, Tensor]) -> None:
        with torch.random.fork_rng([]):  # first weights are drawn, and replaced
            self.network_ = self._network()
        self.network_.load_state_dict(weights, assign=True)
        self.network_.eval()


def outputs(
    network: nn.Module,
    tensors: Sequence[Tensor],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    batch_size: int = 256,
) -> Tensor:
    """The network's outputs in eval mode, computed batch by batch in `dtype`, and brought to the CPU."""
    network = placed(network, device, dtype)
    with torch.no_grad():
        parts = [
            network(*(part.to(device, dtype if part.is_floating_point() else None) for part in batch)).cpu()
            for batch in zip(*(tensor.split(batch_size) for tensor in tensors), strict=True)
        ]
    return torch.cat(parts)


def placed(network: nn.Module, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A network in eval mode, on the device and of that dtype: as it is where it is so, else a copy."""
    parameters = list(network.parameters())
    fits = all(one.device.type == device.type == "cpu" and one.dtype == dtype for one in parameters)
    if fits and not any(module.training for module in network.modules()):
        return network
    return copy.deepcopy(network).eval().to(device, dtype)


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The dtype that a parameter `predict_dtype` names.

    >>> dtype_of("float64", torch.device("cpu"))
    torch.float64
    """
    check_choice(("float32", "float64"), predict_dtype=name)
    if name == "float64" and device.type == "mps":
        raise InvalidArgument("predict_dtype='float64' is not there on 'mps'; take device='cpu' or 'float32'")
    return torch.float64 if name == "float64" else torch.float32


def seed_of(random_state: Any) -> int:
    """A seed for torch from scikit-learn's `random_state`: an integer is itself, a generator or None is drawn from.

    >>> seed_of(3)
    3
    """
    if is_whole(random_state) and 0 <= random_state < 2**32:
        return int(random_state)
    try:
        return int(check_random_state(random_state).randint(2**31 - 1))
    except ValueError:
        raise InvalidArgument(
            f"random_state must be a whole number from 0 to 2**32 - 1, None or a RandomState; got {random_state!r:.100}"
        ) from None

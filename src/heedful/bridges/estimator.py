"""What every estimator here shares: scikit-learn's habits, a hold-out part, a record of the training, folders without pickles."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from heedful._errors import CorruptModel, HeedfulError, InvalidArgument, MissingExtra
from heedful._plot import axes
from heedful._pretrained import Register, read_folder, write_folder
from heedful._tasks import HOMES
from heedful._text import quantity
from heedful.nn._module import from_plain, to_plain

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.model_selection import StratifiedShuffleSplit
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_array, check_is_fitted, validate_data
except ImportError:
    raise MissingExtra("scikit-learn", "tables") from None

if TYPE_CHECKING:
    from heedful._plot import Axes

__all__ = [
    "Classifier",
    "Epoch",
    "Estimator",
    "Recipe",
    "Training",
    "check_range",
    "check_whole",
    "device_of",
    "dtype_of",
    "encoded",
    "hold_out",
    "outputs",
    "plain_number",
    "seed_of",
    "validated",
    "weights_of",
]


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: everything beside network and data that decides the result.

    `optimizer` is a class of `torch.optim` by its name. Gradients are clipped to the norm `clip`. Training ends after
    `epochs`, or when the held-out loss has not fallen for `patience` epochs.

    >>> Recipe(epochs=3).lr
    0.001
    """

    epochs: int = 100
    batch_size: int = 16
    lr: float = 1e-3
    optimizer: str = "RAdam"
    weight_decay: float = 0.0
    clip: float | None = 4.0
    patience: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "lr", "weight_decay", "clip", "patience", "seed"):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        for name in ("epochs", "batch_size", "lr"):
            if getattr(self, name) is None:
                raise InvalidArgument(f"{name} must be a number; got None")
        check_whole(epochs=self.epochs, batch_size=self.batch_size, patience=self.patience)
        check_range(lr=(self.lr, 0.0, np.inf), clip=(self.clip, 0.0, np.inf))
        if not _is_number(self.weight_decay) or self.weight_decay < 0:
            raise InvalidArgument(f"weight_decay must be a number from 0 on; got {self.weight_decay!r}")
        made = getattr(torch.optim, self.optimizer, None) if isinstance(self.optimizer, str) else None
        if not (
            isinstance(made, type) and issubclass(made, torch.optim.Optimizer) and made is not torch.optim.Optimizer
        ):
            raise InvalidArgument(
                f"optimizer must name a class of torch.optim, as 'RAdam' or 'AdamW'; got {self.optimizer!r}"
            )


@dataclass(frozen=True)
class Epoch:
    """One pass over the training part: its mean loss, and what was measured on the held-out part after it."""

    loss: float
    held_out: Mapping[str, float]


@dataclass(frozen=True)
class Training:
    """What a training did: every epoch, the one whose weights were kept, and how many came from a checkpoint.

    `best` counts from 1. Without a held-out part it is the last epoch.

    >>> print(Training((Epoch(0.9, {"loss": 0.8, "accuracy": 0.5}), Epoch(0.4, {"loss": 0.6, "accuracy": 0.75})), best=2))
    2 epochs, the best is 2: held-out loss 0.6, accuracy 0.75
    """

    epochs: tuple[Epoch, ...]
    best: int
    resumed: int = 0

    @property
    def measured(self) -> Mapping[str, float]:
        """What was measured on the held-out part with the weights that were kept."""
        return self.epochs[self.best - 1].held_out

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"epochs": [{"loss": e.loss, "held_out": dict(e.held_out)} for e in self.epochs]}

    def __str__(self) -> str:
        found = ", ".join(f"{name} {value:.3g}" for name, value in self.measured.items())
        kept = f"the best is {self.best}: held-out {found}" if found else f"last loss {self.epochs[-1].loss:.3g}"
        again = f" ({self.resumed} from a checkpoint)" if self.resumed else ""
        return f"{quantity(len(self.epochs), 'epoch')}{again}, {kept}"

    def plot(self, ax: Axes | None = None) -> Axes:
        """Losses by epoch; a dotted line marks the epoch whose weights were kept."""
        ax = axes(ax)
        from matplotlib.ticker import MaxNLocator

        count = range(1, len(self.epochs) + 1)
        ax.plot(count, [epoch.loss for epoch in self.epochs], label="training")
        if self.measured:
            ax.plot(count, [epoch.held_out["loss"] for epoch in self.epochs], label="held out")
            ax.axvline(self.best, color="gray", linestyle=":", label="kept")
        ax.set(xlabel="epoch", ylabel="loss")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.legend(frameon=False)
        return ax


class Estimator(BaseEstimator):  # type: ignore[misc]
    """A scikit-learn estimator around one network: `network_`, saved with what was fitted to a folder of two files.

    A subclass lists its fitted attributes in `_fitted` (numbers, strings, lists, numpy arrays; they go to `config.json`),
    and `_network()` makes its network anew from parameters and fitted attributes.
    """

    _fitted: ClassVar[tuple[str, ...]] = ()
    _optional: ClassVar[tuple[str, ...]] = ("feature_names_in_",)
    _register: ClassVar[Register[Estimator]] = Register(HOMES)

    network_: nn.Module

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Estimator._register.add(cls)

    def _network(self) -> nn.Module:
        raise NotImplementedError

    def _settings(self) -> dict[str, Any]:
        """The parameters as JSON."""
        return {name: _written(value) for name, value in self.get_params(deep=False).items()}

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes `config.json` (parameters and what was fitted) and `model.safetensors` (weights) into a folder."""
        check_is_fitted(self, "network_")
        names = [*self._fitted, *(name for name in self._optional if hasattr(self, name))]
        fitted = {name: _written(getattr(self, name)) for name in names}
        entry = Register.entry(type(self)) | {"params": self._settings(), "fitted": fitted}
        write_folder(folder, {"estimator": entry}, self.network_.state_dict())

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """The fitted estimator that `save_pretrained` wrote; nothing is unpickled.

        Called on a base, as `Estimator.from_pretrained`, it gives whatever estimator of heedful's the folder holds.
        """
        config, tensors = read_folder(folder, expects="estimator")
        try:
            kind, params, fitted = (config["estimator"][name] for name in ("type", "params", "fitted"))
            if not isinstance(kind, str) or not isinstance(params, dict) or not isinstance(fitted, dict):
                raise TypeError
        except (TypeError, KeyError):
            raise CorruptModel(
                f"{folder}: config.json has no type, params and fitted of an estimator; save it again"
            ) from None
        made_by = Estimator._register.find(config["estimator"], cls)
        if made_by is None:
            where = config["estimator"].get("module")
            raise InvalidArgument(
                f"{folder} holds a {kind}{f' of {where}' if where else ''}, which is not heedful's and not imported; import "
                f"{kind} before it is loaded"
            )
        if not issubclass(made_by, cls):
            raise InvalidArgument(f"{folder} holds a {kind}, not a {cls.__name__}; call {kind}.from_pretrained")
        try:
            estimator = made_by(**{name: _read(value) for name, value in params.items()})
            for name in (*made_by._fitted, *(name for name in made_by._optional if name in fitted)):
                setattr(estimator, name, _read(fitted[name]))
            estimator.network_ = estimator._network()
            estimator.network_.load_state_dict(tensors, assign=True)
        except (HeedfulError, TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
            raise CorruptModel(f"{folder}: {kind} cannot be made from what was saved: {error}") from error
        estimator.network_.eval()
        return estimator


class Classifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """An estimator whose network gives one logit for each of `classes_`; a subclass says `_tensors(X)`, the network's inputs."""

    classes_: np.ndarray
    device: str
    predict_dtype: str

    def _tensors(self, X: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _logits(self, X: Any) -> np.ndarray:
        check_is_fitted(self, "network_")
        device = device_of(self.device)
        return outputs(self.network_, self._tensors(X), device, dtype_of(self.predict_dtype, device)).numpy()

    def decision_function(self, X: Any) -> np.ndarray:
        """Logits `(cases, classes)`; of two classes the second's logit minus the first's, `(cases,)`."""
        logits = self._logits(X)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities `(cases, classes)`, in the order of `classes_`."""
        return torch.from_numpy(self._logits(X)).double().softmax(1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The class of largest probability for each case."""
        best = self._logits(X).argmax(1)
        return self.classes_[best]


def outputs(
    network: nn.Module,
    tensors: Sequence[Tensor],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    batch_size: int = 256,
) -> Tensor:
    """The network's outputs in eval mode, computed batch by batch in `dtype`, and brought to the CPU.

    A network that is in eval mode, on the device and of that dtype is used as it is; any other is copied first.
    """
    parameters = list(network.parameters())
    fits = all(one.device.type == device.type == "cpu" and one.dtype == dtype for one in parameters)
    if not fits or any(module.training for module in network.modules()):
        network = copy.deepcopy(network).eval().to(device, dtype)
    with torch.no_grad():
        parts = [
            network(*(part.to(device, dtype if part.is_floating_point() else None) for part in batch)).cpu()
            for batch in zip(*(tensor.split(batch_size) for tensor in tensors), strict=True)
        ]
    return torch.cat(parts)


def device_of(device: str | torch.device) -> torch.device:
    """The device that a parameter `device` names: `"auto"` is CUDA where there is one, else the CPU.

    >>> device_of("cpu")
    device(type='cpu')
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidArgument(f"device must be 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps'; got {device!r}") from None
    here = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(
        found.type, 0
    )
    if (found.index or 0) >= here:
        raise InvalidArgument(
            f"there is no device {str(found)!r} here; heedful doctor tells what there is, 'auto' chooses"
        )
    return found


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The dtype that a parameter `predict_dtype` names.

    >>> dtype_of("float64", torch.device("cpu"))
    torch.float64
    """
    if not isinstance(name, str) or name not in ("float32", "float64"):
        raise InvalidArgument(f"predict_dtype must be 'float32' or 'float64'; got {name!r:.100}")
    if name == "float64" and device.type == "mps":
        raise InvalidArgument("predict_dtype='float64' is not there on 'mps'; take device='cpu' or 'float32'")
    return torch.float64 if name == "float64" else torch.float32


def seed_of(random_state: Any) -> int:
    """A seed for torch from scikit-learn's `random_state`: an integer is itself, a generator or None is drawn from.

    >>> seed_of(3)
    3
    """
    if isinstance(random_state, int | np.integer) and not isinstance(random_state, bool) and 0 <= random_state < 2**32:
        return int(random_state)
    try:
        return int(check_random_state(random_state).randint(2**31 - 1))
    except ValueError:
        raise InvalidArgument(
            f"random_state must be None, an integer from 0 to 2**32 - 1 or a RandomState; got {random_state!r:.100}"
        ) from None


def hold_out(codes: np.ndarray, fraction: float | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the cases to learn from and of those held out; the second may be empty.

    Every class keeps at least one case to learn from. Classes are held out in proportion where each has two cases and the
    held-out part has room for all; else cases are drawn, but never the only one of a class.

    >>> learn, held = hold_out(np.array([0, 0, 0, 1, 1, 1, 2]), 0.3, seed=0)
    >>> len(learn), len(held), 6 in learn
    (5, 2, True)
    """
    everything, count = np.arange(len(codes)), round(len(codes) * (fraction or 0.0))
    if count == 0:
        return everything, everything[:0]
    sizes = np.bincount(codes)
    if sizes.min() >= 2 and count >= len(sizes) and len(codes) - count >= len(sizes):
        splitter = StratifiedShuffleSplit(1, test_size=count, random_state=seed)
        learn, held = next(splitter.split(np.zeros((len(codes), 1)), codes))
        return np.sort(learn), np.sort(held)
    shuffled = np.random.default_rng(seed).permutation(everything)
    # The first case of each class, in the shuffled order, stays.
    _, stay = np.unique(codes[shuffled], return_index=True)
    held = np.sort(np.delete(shuffled, stay)[:count])
    return np.setdiff1d(everything, held), held


def validated(estimator: Estimator, X: Any, y: Any = None, *, reset: bool = True, features: bool = True) -> Any:
    """X, and y where it is given, checked as scikit-learn does; NaN in X may be, and X may have three axes.

    `features=False` leaves the number of features unchecked, where the second axis means something else than in `fit`.
    """
    options: dict[str, Any] = {"allow_nd": True, "ensure_all_finite": "allow-nan", "dtype": np.float64}
    if getattr(X, "ndim", 2) > 3:
        raise InvalidArgument(f"X must have two or three axes, (cases, time) or (cases, channels, time); got {X.ndim}")
    if getattr(X, "ndim", 2) == 3 and 0 in X.shape:
        raise InvalidArgument(f"X must hold one case, one channel and one step or more; got shape {tuple(X.shape)}")
    try:
        if not features:
            return check_array(X, **options)
        return validate_data(estimator, X, *(() if not reset else (y,)), reset=reset, **options)
    except ValueError as error:
        raise InvalidArgument(str(error)) from None


def encoded(y: Any) -> tuple[np.ndarray, np.ndarray]:
    """The classes in y, sorted, and the number of each case's class among them.

    >>> encoded(np.array(["b", "a", "b"]))[1]
    array([1, 0, 1])
    """
    try:
        check_classification_targets(y)
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
    classes, codes = np.unique(y, return_inverse=True)
    return classes, codes


def weights_of(classes: np.ndarray, codes: np.ndarray, class_weight: Any, sample_weight: Any) -> np.ndarray | None:
    """The weight of each case, its own times its class's; None where neither is given.

    `class_weight` is a mapping from classes to numbers, 1 for those it leaves out, or `"balanced"`: every class then weighs the
    same in all, $w_c = n / (k n_c)$, where $n_c$ counts cases by `sample_weight`.

    >>> weights_of(np.array(["a", "b"]), np.array([0, 0, 0, 1]), "balanced", None)
    array([0.66666667, 0.66666667, 0.66666667, 2.        ])
    """
    if class_weight is None and sample_weight is None:
        return None
    weights = np.ones(len(codes)) if sample_weight is None else _sample_weights(sample_weight, len(codes))
    if isinstance(class_weight, str) and class_weight == "balanced":
        counts = np.bincount(codes, weights, len(classes))
        present = counts > 0
        factors = np.where(present, counts.sum() / (present.sum() * np.where(present, counts, 1.0)), 0.0)
    elif class_weight is None or isinstance(class_weight, Mapping):
        factors = _class_weights(class_weight or {}, classes)
    else:
        raise InvalidArgument(
            f"class_weight must be None, 'balanced' or a mapping from classes to numbers; got {class_weight!r:.100}"
        )
    weights = weights * factors[codes]
    if not weights.any():
        raise InvalidArgument("all weights are zero, so there is no case to learn from; give some more than zero")
    return weights


def _sample_weights(given: Any, cases: int) -> np.ndarray:
    try:
        weights = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"sample_weight cannot be read as numbers: {error}") from None
    weights = np.full(cases, float(weights)) if weights.ndim == 0 else weights
    if weights.shape != (cases,):
        raise InvalidArgument(
            f"sample_weight must have one number for each of the {cases} cases; got shape {weights.shape}"
        )
    if not np.isfinite(weights).all() or (weights < 0).any():
        at = int((~np.isfinite(weights) | (weights < 0)).argmax())
        raise InvalidArgument(f"sample_weight must be finite numbers from 0 on; got {weights[at]} for case {at}")
    return weights


def _class_weights(given: Mapping[Any, Any], classes: np.ndarray) -> np.ndarray:
    names = classes.tolist()
    foreign = [name for name in given if name not in names]
    if foreign:
        raise InvalidArgument(
            f"class_weight names {foreign[0]!r}, which is no class; y has {', '.join(map(repr, names[:10]))}"
        )
    for name, weight in given.items():
        if not _is_number(weight) or not 0 <= weight < np.inf:
            raise InvalidArgument(f"class_weight must hold numbers from 0 on; got {weight!r:.50} for {name!r}")
    return np.array([float(given.get(name, 1.0)) for name in names])


def check_whole(**sizes: int | None) -> None:
    """Refuses what is given and is no whole number from 1 on."""
    for name, value in sizes.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1):
            raise InvalidArgument(f"{name} must be a whole number from 1 on; got {value!r}")


def check_range(**ranges: tuple[Any, float, float]) -> None:
    """Refuses a number that is given and does not lie strictly between its bounds."""
    for name, (value, low, high) in ranges.items():
        if value is not None and not (_is_number(value) and low < value < high):
            wanted = f"above {low:g}" if high == np.inf else f"between {low:g} and {high:g}, or None"
            raise InvalidArgument(f"{name} must be a number {wanted}; got {value!r}")


def plain_number(value: Any) -> Any:
    """A number of numpy's as Python's own, which searches over arrays of settings do not give; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _written(value: Any) -> Any:
    """A parameter or fitted value as JSON."""
    if isinstance(value, Training):
        return {"training": value.to_dict()}
    if isinstance(value, np.ndarray):
        plain = value.tolist()
        if value.dtype.kind not in "biufUO" or not all(isinstance(part, str | int | float) for part in plain):
            raise InvalidArgument(f"cannot save an array of {value.dtype}; use numbers or strings, as class labels too")
        return {"array": plain, "dtype": value.dtype.str}
    if isinstance(value, Mapping):
        return {"mapping": [[_written(key), _written(part)] for key, part in value.items()]}
    if isinstance(value, Path | torch.device):
        return str(value)
    value = plain_number(value)
    # A generator's state is no setting; what it gave is in the weights.
    return None if isinstance(value, np.random.RandomState) else to_plain(value)


def _read(value: Any) -> Any:
    if isinstance(value, dict) and "training" in value:
        told = value["training"]
        epochs = tuple(Epoch(epoch["loss"], epoch["held_out"]) for epoch in told["epochs"])
        return Training(epochs, told["best"], told["resumed"])
    if isinstance(value, dict) and "mapping" in value:
        return {_read(key): _read(part) for key, part in value["mapping"]}
    if isinstance(value, dict) and "array" in value:
        return np.array(value["array"], dtype=np.dtype(value["dtype"]))
    return from_plain(value)

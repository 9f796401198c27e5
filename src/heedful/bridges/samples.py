"""Cases to learn from: what is held out, what they weigh, what classes they have, and scikit-learn's checks of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from heedful._checks import is_number
from heedful._errors import InvalidArgument, MissingExtra

try:
    from sklearn.base import BaseEstimator
    from sklearn.model_selection import GroupShuffleSplit, StratifiedShuffleSplit
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_array, check_is_fitted, validate_data
except ImportError:
    raise MissingExtra("scikit-learn", "tables") from None

__all__ = ["FAR", "Samples", "check_is_fitted", "encoded", "hold_out", "moments", "validated", "weights_of"]

FAR = 1e12
"""Standard deviations from the mean up to which a network computes in float32: squares and their sums stay finite."""


@dataclass(frozen=True)
class Samples:
    """Cases as a data package reads them: arrays with a row for each, and what else is known of each.

    `inputs` are what the network's inputs are made of, `target` what is to be predicted. Cases of one entry of `groups` (a
    patient, a query) are held out together; where there are `times`, the latest cases are held out.
    """

    inputs: tuple[np.ndarray, ...]
    target: np.ndarray | None = None
    weights: np.ndarray | None = None
    groups: np.ndarray | None = None
    times: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.inputs[0])

    def __getitem__(self, rows: np.ndarray) -> Samples:
        rest = (getattr(self, field.name) for field in fields(self)[1:])
        return Samples(
            tuple(part[rows] for part in self.inputs), *(None if part is None else part[rows] for part in rest)
        )

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """All that is there."""
        rest = (self.target, self.weights, self.groups, self.times)
        return (*self.inputs, *(part for part in rest if part is not None))


def hold_out(
    count: int,
    fraction: float | None,
    seed: int,
    *,
    codes: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    times: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the cases to learn from and of those held out, both rising; the second may be empty.

    With `times` the latest are held out, with `groups` whole groups. With `codes`, the cases' classes, every class keeps at least
    one case to learn from. Classes are held out in proportion where each has two cases and the held-out part has room for
    all; else cases are drawn, but never the only one of a class.

    >>> learn, held = hold_out(7, 0.3, seed=0, codes=np.array([0, 0, 0, 1, 1, 1, 2]))
    >>> len(learn), len(held), 6 in learn
    (5, 2, True)
    >>> hold_out(4, 0.5, seed=0, times=np.array([3.0, 1.0, 2.0, 4.0]))[1].tolist()
    [0, 3]
    """
    everything, size = np.arange(count), round(count * (fraction or 0.0))
    if size == 0:
        return everything, everything[:0]
    if times is not None:
        held = np.argsort(times, kind="stable")[count - size :]
    elif groups is not None:
        if len(np.unique(groups)) < 2:
            return everything, everything[:0]
        held = next(GroupShuffleSplit(1, test_size=fraction, random_state=seed).split(everything, groups=groups))[1]
    else:
        codes = np.zeros(count, dtype=int) if codes is None else codes
        sizes = np.bincount(codes)
        if sizes.min() >= 2 and size >= len(sizes) and count - size >= len(sizes):
            splitter = StratifiedShuffleSplit(1, test_size=size, random_state=seed)
            held = next(splitter.split(np.zeros((count, 1)), codes))[1]
        else:
            shuffled = np.random.default_rng(seed).permutation(everything)
            # The first case of each class, in the shuffled order, stays.
            _, stay = np.unique(codes[shuffled], return_index=True)
            held = np.delete(shuffled, stay)[:size]
    return np.setdiff1d(everything, held), np.sort(held)


def validated(estimator: BaseEstimator, X: Any, y: Any = None, *, reset: bool = True, features: bool = True) -> Any:
    """X, and in `fit` (`reset`) y, checked as scikit-learn does; whether NaN and more axes than two may be, the estimator's tags say.

    `features=False` leaves the number of features unchecked, where the second axis means something else than in `fit`.
    """
    tags = estimator.__sklearn_tags__()
    options: dict[str, Any] = {
        "allow_nd": tags.input_tags.three_d_array,
        "ensure_all_finite": "allow-nan" if tags.input_tags.allow_nan else True,
        "dtype": np.float64,
    }
    try:
        if not features:
            return check_array(X, **options)
        numeric = {"y_numeric": True} if reset and y is not None and tags.estimator_type == "regressor" else {}
        numeric |= {"multi_output": True} if numeric and tags.target_tags.multi_output else {}
        return validate_data(estimator, X, *(() if not reset else (y,)), reset=reset, **options, **numeric)
    except ValueError as error:
        raise InvalidArgument(str(error)) from None


def moments(values: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation (ddof = 1) of numbers, however large or small; of a constant the deviation is 1.

    >>> moments(np.array([3.0, 4.0, 5.0])), moments(np.array([0.1, 0.1, 0.1]))[1]
    ((4.0, 1.0), 1.0)
    """
    # A power of two near the largest: squares neither overflow nor vanish, and nothing is rounded.
    unit = np.ldexp(1.0, np.frexp(np.abs(values).max(initial=0.0))[1] - 1)
    values = values / unit
    mean = values.mean() if len(values) else 0.0
    spread = values.std(ddof=1) if len(values) > 1 else 0.0
    # Rounding in the mean of a constant is not a spread.
    return float(mean * unit), float(spread * unit) if spread > 1e-12 * abs(mean) else 1.0


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


def _sample_weights(sample_weight: Any, cases: int) -> np.ndarray:
    try:
        weights = np.asarray(sample_weight, dtype=np.float64)
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


def _class_weights(class_weight: Mapping[Any, Any], classes: np.ndarray) -> np.ndarray:
    names = classes.tolist()
    foreign = [name for name in class_weight if name not in names]
    if foreign:
        raise InvalidArgument(
            f"class_weight names {foreign[0]!r}, which is no class; y has {', '.join(map(repr, names[:10]))}"
        )
    for name, weight in class_weight.items():
        if not is_number(weight) or not 0 <= weight < np.inf:
            raise InvalidArgument(f"class_weight must hold numbers from 0 on; got {weight!r:.50} for {name!r}")
    return np.array([float(class_weight.get(name, 1.0)) for name in names])

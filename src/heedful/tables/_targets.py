"""Targets of rows that are given beside those of `fit`."""

from __future__ import annotations

import numpy as np

from heedful._errors import InvalidArgument


def as_codes(y: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Places of labels among the classes of a model.

    >>> as_codes(np.array(["b", "a"]), np.array(["a", "b"])).tolist()
    [1, 0]
    """
    places = {label: code for code, label in enumerate(classes.tolist())}
    labels = _one_for_each(y).tolist()
    foreign = [label for label in labels if label not in places]
    if foreign:
        raise InvalidArgument(
            f"the context has a target {foreign[0]!r}, which is no class of this model; its classes are {', '.join(map(str, classes[:8]))}"
        )
    return np.array([places[label] for label in labels], dtype=np.int64)


def as_numbers(y: np.ndarray) -> np.ndarray:
    """Finite numbers."""
    y = _one_for_each(y)
    try:
        numbers = y.astype(np.float64)
    except (TypeError, ValueError):
        raise InvalidArgument("targets of the context must be numbers") from None
    if not np.isfinite(numbers).all():
        raise InvalidArgument("targets of the context must be finite numbers")
    return numbers


def _one_for_each(y: np.ndarray) -> np.ndarray:
    """Targets along one axis; a column of them, which `fit` takes too, is one."""
    if y.ndim == 2 and y.shape[1] == 1:
        return y[:, 0]
    if y.ndim != 1:
        raise InvalidArgument(f"targets must have one axis, a target for each row; got shape {y.shape}")
    return y

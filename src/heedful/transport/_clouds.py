"""Clouds of points as they are given, and the costs between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from heedful._checks import check_number
from heedful._errors import InvalidArgument

Array = NDArray[np.float64]


def array(values: Any, name: str, axes: int | tuple[int, ...] = 2) -> Array:
    """Finite numbers in float64, of tensors, arrays or lists, with so many axes and nothing empty."""
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} cannot be read as numbers: {error}") from None
    allowed = (axes,) if isinstance(axes, int) else axes
    if numbers.ndim not in allowed or 0 in numbers.shape:
        raise InvalidArgument(
            f"{name} must have {' or '.join(map(str, allowed))} axes, none of them empty; got shape {numbers.shape}"
        )
    if not np.isfinite(numbers).all():
        raise InvalidArgument(f"{name} holds NaN or infinite numbers; leave those points out")
    return numbers


def pair(X: Any, Y: Any, p: float, names: tuple[str, str] = ("X", "Y")) -> tuple[Array, Array]:
    """Two clouds `(N, r)` and `(M, r)` of one width, and an exponent that makes a distance."""
    check_number(least=1, p=p)
    first, second = array(X, names[0]), array(Y, names[1])
    if first.shape[1] != second.shape[1]:
        raise InvalidArgument(
            f"{names[0]} has points of {first.shape[1]} numbers and {names[1]} of {second.shape[1]}; both must have the same width"
        )
    return first, second


def masses(weights: Any, count: int, name: str) -> Array | None:
    """Weights of points divided by their sum; None where all are equal."""
    if weights is None:
        return None
    numbers = array(weights, name, 1)
    if numbers.shape != (count,) or (numbers < 0).any() or not numbers.any():
        raise InvalidArgument(
            f"{name} must have a number from 0 on for each of the {count} points, some above 0; got shape {numbers.shape}, "
            f"the least is {numbers.min():g}"
        )
    return None if (numbers == numbers[0]).all() else numbers / numbers.sum()


def labels(y: Any, count: int) -> list[NDArray[np.intp]]:
    """The places of each class's points; without labels all points are one class."""
    if y is None:
        return [np.arange(count)]
    codes = np.asarray(y.detach().cpu() if isinstance(y, torch.Tensor) else y)
    if codes.shape != (count,):
        raise InvalidArgument(f"y must have one label for each of the {count} points; got shape {codes.shape}")
    try:
        codes = np.unique(codes, return_inverse=True)[1]
    except TypeError:
        kinds = sorted({type(label).__name__ for label in codes.tolist()})
        raise InvalidArgument(
            f"y must have labels of one kind; got {', '.join(kinds)}. Leave points without a label out, or give them a class of their own"
        ) from None
    return [np.flatnonzero(codes == code) for code in range(codes.max() + 1)]


def moves(X: Array, Y: Array, p: float) -> Array:
    """$|x_i - y_i|^p$, `(..., N)`."""
    squares = np.square(X - Y).sum(-1)
    return squares if p == 2 else squares ** (p / 2)


def costs(X: Array, Y: Array, p: float, u: Array | None = None, v: Array | None = None) -> Array:
    r"""$C_{ij} = |x_i - y_j|^p$, `(..., N, M)`, less the potentials $u_i + v_j$ where they are given.

    One product of matrices gives all squares, about a common centre, where little cancels; for p = 2 it subtracts the potentials too.
    """
    centre = (X.mean(-2, keepdims=True) + Y.mean(-2, keepdims=True)) / 2
    X, Y = X - centre, Y - centre
    rows, columns = np.square(X).sum(-1, keepdims=True), np.square(Y).sum(-1, keepdims=True)
    if p == 2 and u is not None and v is not None:
        rows, columns = rows - u[..., None], columns - v[..., None]
    left = np.concatenate((X, np.ones_like(rows), rows), axis=-1)
    right = np.concatenate((-2 * Y, columns, np.ones_like(columns)), axis=-1)
    squares = left @ np.swapaxes(right, -1, -2)
    if p == 2:
        return squares if u is not None else np.maximum(squares, 0, out=squares)
    np.sqrt(np.maximum(squares, 0, out=squares), out=squares)
    distances = squares if p == 1 else squares**p
    if u is not None and v is not None:
        distances -= u[..., None]
        distances -= v[..., None, :]
    return distances


def typical(X: Array, Y: Array, p: float) -> float:
    """About what a random pair of points costs; above 0."""
    centre = (X.mean(0) + Y.mean(0)) / 2
    return float((np.square(X - centre).sum(1).mean() + np.square(Y - centre).sum(1).mean()) ** (p / 2)) or 1.0

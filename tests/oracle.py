"""Attention written out a second time, apart from heedful: numpy, float64, formulas of pairs, visible pairs alone.

Nothing here imports an implementation. Every function takes complex numbers too, so that a derivative is exact to rounding: the
imaginary part of f(x + i h d) over h is the derivative of f along d, for an h so small that nothing is subtracted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from heedful import Kernel
from heedful.kernels import feature_map

STEP = 1e-30
DISTANCES = ("Gaussian", "Laplace", "Matern", "RationalQuadratic")


class Oracle:
    """The coefficients of a kernel for queries and keys `[..., H, Q, D]`, `[..., H, K, D]`.

    `parameters` are the kernel's tensors by their dotted names, perhaps complex; `keep` and `bias` are `[..., H, Q, K]`.
    """

    def __init__(self, kernel: Kernel, parameters: dict[str, np.ndarray], keep: np.ndarray, bias: np.ndarray | None):
        self.kernel, self.parameters, self.keep = kernel, parameters, keep
        self.bias = np.zeros(keep.shape) if bias is None else np.where(keep, bias, 0.0)
        self.least = np.ones(keep.shape[:-1])  # the smallest sum that a row was divided by, where it was not zero

    def weights(self, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        kernel, path = self.kernel, ""
        if type(kernel).__name__ == "HigherOrder":
            count = np.maximum(self.keep.sum(-1, keepdims=True), 1)
            orders = (kernel.order,) if isinstance(kernel.order, int) else kernel.order
            moved, total = query, query if 2 in orders else 0.0
            for at in range(max(orders) // 2 - 1):
                moved = np.where(self.keep, moved @ key.swapaxes(-1, -2), 0.0) @ key / count
                mix = self.parameters.get("mix", self.parameters.get(f"mix.{at}"))
                moved = moved if mix is None else moved @ mix
                total = total + moved if 2 * at + 4 in orders else total
            kernel, path, query = kernel.kernel, "kernel.", total
        with np.errstate(all="ignore"):
            return self._weights(kernel, path, query, key, self.bias)

    def _weights(self, kernel: Kernel, path: str, query: Any, key: Any, bias: Any) -> np.ndarray:
        name = type(kernel).__name__
        if exponential(kernel):
            score = self._score(kernel, path, query, key) + bias
            if division(kernel) == "sum":
                score = score - np.where(self.keep, score.real, -np.inf).max(-1, keepdims=True, initial=-1e300)
            return self._divided(np.where(self.keep, np.exp(score), 0.0), division(kernel))
        if name == "Sum":
            parts = ("left", "right")
            return sum(self._weights(getattr(kernel, part), f"{path}{part}.", query, key, bias) for part in parts)
        if name == "Product":
            left, right = (
                self._weights(getattr(kernel, part), f"{path}{part}.", query, key, 0.0) for part in ("left", "right")
            )
            return left * right * np.exp(bias)
        if name == "Scaled":
            return self._weights(kernel.kernel, f"{path}kernel.", query, key, bias) * self._value(
                kernel, path, "factor"
            )
        if name == "Divided":
            return self._divided(self._weights(kernel.kernel, f"{path}kernel.", query, key, bias), kernel.by)
        if name == "FeatureMap":
            left, right = self._features(kernel, path, query, True), self._features(kernel, path, key, False)
            coefficients = left @ right.swapaxes(-1, -2) * np.exp(bias)
        else:
            score = self._score(kernel, path, query, key) + bias
            coefficients = {
                "Sigmoid": lambda: _sigmoid(score),
                "Tanh": lambda: 2 * _sigmoid(2 * score) - 1,
                "Silu": lambda: score * _sigmoid(score),
                "Relu": lambda: np.where(score.real > 0, score, 0.0),
                "ReluSquared": lambda: np.where(score.real > 0, score, 0.0) ** 2,
                "Cosine": lambda: score,
                "Polynomial": lambda: score**kernel.degree,
            }[name]()
        return self._divided(np.where(self.keep, coefficients, 0.0), division(kernel))

    def _score(self, kernel: Kernel, path: str, query: Any, key: Any) -> np.ndarray:
        name = type(kernel).__name__
        if name == "Product":
            return self._score(kernel.left, f"{path}left.", query, key) + self._score(
                kernel.right, f"{path}right.", query, key
            )
        if name == "Divided":
            return self._score(kernel.kernel, f"{path}kernel.", query, key)
        if name in DISTANCES:
            squares = ((query[..., :, None, :] - key[..., None, :, :]) ** 2).sum(-1)
            size = query.shape[-1]
            if name == "Gaussian":
                return -squares / (2 * self._value(kernel, path, "bandwidth", size**0.25) ** 2)
            length = _root(squares) / self._value(kernel, path, "bandwidth", size**0.5)
            if name == "RationalQuadratic":
                alpha = self._value(kernel, path, "alpha")
                return -alpha * np.log(1 + length**2 / (2 * alpha))
            if name == "Matern":
                a = length * (2 * kernel.smoothness) ** 0.5
                return np.log(1 + a + (a**2 / 3 if kernel.smoothness == 2.5 else 0.0)) - a
            return -length
        if name == "Cosine":
            query, key = _unit(query), _unit(key)
        product = query @ key.swapaxes(-1, -2)
        if name == "Cosine":
            return product
        product = product * self._value(kernel, path, "scale", query.shape[-1] ** -0.5)
        added = dict.fromkeys(("Sigmoid", "Tanh", "Silu", "Exponential"), "bias").get(name)
        added = "offset" if name == "Polynomial" else added
        return product if added is None else product + self._value(kernel, path, added)

    def _features(self, kernel: Kernel, path: str, x: Any, rows: bool) -> np.ndarray:
        if kernel.map == "elu":
            return np.where(x.real > 0, x + 1, np.exp(np.where(x.real > 0, 0, x)))
        if kernel.map == "relu":
            return np.where(x.real > 0, x, 0.0)
        if kernel.map == "cosine":
            return _unit(x)
        # The directions are the kernel's data; what is made of them is not.
        directions = feature_map.orthogonal_directions(kernel.features_count, x.shape[-1], kernel.seed, _cpu()).numpy()
        x = x * self._value(kernel, path, "scale", x.shape[-1] ** -0.5) ** 0.5
        exponent = x @ directions.T - (x**2).sum(-1, keepdims=True) / 2
        if division(kernel) == "sum":
            exponent = exponent - exponent.real.max(-1 if rows else (-2, -1), keepdims=True, initial=-1e300)
        return np.exp(exponent) / kernel.features_count**0.5

    def _divided(self, weights: np.ndarray, by: str | None) -> np.ndarray:
        if by is None:
            return weights
        total = weights.sum(-1, keepdims=True) if by == "sum" else self.keep.sum(-1, keepdims=True)
        self.least = np.minimum(self.least, np.where(self.keep.any(-1), np.abs(total[..., 0]), 1.0))
        return weights / np.where(total == 0, 1, total)

    def _value(self, kernel: Kernel, path: str, name: str, default: float | None = None) -> Any:
        """A parameter, shaped to act on `[..., H, Q, K]`."""
        value = self.parameters.get(path + name, getattr(kernel, name))
        value = default if value is None else value
        return value[:, None, None] if isinstance(value, np.ndarray) and value.ndim == 1 else value


def exponential(kernel: Kernel) -> bool:
    """Whether a coefficient is e to a score, before rows are divided once."""
    name = type(kernel).__name__
    if name == "Product":
        return exponential(kernel.left) and exponential(kernel.right)
    if name == "Divided":
        return exponential(kernel.kernel) and division(kernel.kernel) is None
    return name in ("Softmax", "Exponential", *DISTANCES)


def division(kernel: Kernel) -> str | None:
    name = type(kernel).__name__
    if name == "Softmax":
        return "sum"
    if name in DISTANCES:
        return "sum" if kernel.normalize else None
    if name == "FeatureMap":
        return "sum" if kernel.normalize or (kernel.normalize is None and kernel.map != "cosine") else None
    if name == "Divided":
        return kernel.by
    if name == "Product" and exponential(kernel):
        kinds = {division(kernel.left), division(kernel.right)}
        return "sum" if "sum" in kinds else "count" if "count" in kinds else None
    return None


def _root(squares: np.ndarray) -> np.ndarray:
    """The square root, with derivative zero at zero (which is next to it, a step away)."""
    zero = np.abs(squares) < 1e3 * STEP**2
    return np.where(zero, 0.0, np.sqrt(np.where(zero, 1.0, squares)))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    small = np.exp(np.where(x.real > 0, -x, x))
    return np.where(x.real > 0, 1.0, small) / (1 + small)


def _unit(x: np.ndarray) -> np.ndarray:
    length = _root((x**2).sum(-1, keepdims=True))
    return np.where(length == 0, 0.0, x / np.where(length == 0, 1.0, length))


def _cpu() -> Any:
    import torch

    return torch.device("cpu")

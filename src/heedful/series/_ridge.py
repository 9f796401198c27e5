"""Ridge regression with the penalty chosen by leave-one-out errors in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# In means of the squared length of a case.
PENALTIES = torch.logspace(-6, 0, 13, dtype=torch.float64).tolist()
COLUMNS = 2_048


@dataclass(frozen=True)
class Ridge:
    """`weight` (features, outputs) and `offset`; `unseen` (n, outputs) is what each case is predicted without itself."""

    weight: Tensor
    offset: Tensor
    unseen: Tensor
    penalty: float


def ridge(z: Tensor, y: Tensor, weights: Tensor) -> Ridge:
    r"""Minimises $\sum_i w_i \|y_i - W^T z_i - b\|^2 + \lambda \|W\|^2$ for z `(n, features)` and y `(n, outputs)`.

    With $\tilde z_i = \sqrt{w_i} (z_i - \bar z)$ and the hat matrix $H = \tilde Z (\tilde Z^T \tilde Z + \lambda)^{-1} \tilde Z^T$ the error at
    case i of a fit without it is $(y_i - \hat y_i) / (1 - H_{ii} - w_i)$ for weights that sum to 1. Of all penalties the one with the
    least mean square is taken. One eigendecomposition serves them all, of n x n numbers or of features x features, whichever is smaller.
    """
    n, width = z.shape
    y = y.double()
    weights = weights.double() / weights.sum()
    root = (n * weights).sqrt()[:, None]
    center = y.T @ weights
    target = root * (y - center)
    mean = torch.cat([part.double().T @ weights for part in z.split(COLUMNS, 1)])
    dual = n <= width
    gram = z.new_zeros(n if dual else width, n if dual else width, dtype=torch.float64)
    if dual:
        for _, part in _columns(z, mean, root):
            gram += part @ part.T
    else:
        whole = root * (z - mean)
        gram += whole.T @ whole
    size = float(gram.trace()) / n or 1.0
    values, vectors = torch.linalg.eigh(gram / size)
    values = values.clamp(min=0.0)
    # Left singular vectors of the scaled cases.
    left = vectors if dual else whole @ vectors * (size * values.clamp(min=1e-12)).rsqrt()
    heads = left.T @ target
    best = None
    for penalty in PENALTIES:
        shrunk = values / (values + penalty)
        leverage = left.square() @ shrunk + weights
        errors = (target - (left * shrunk) @ heads) / (1 - leverage).clamp(min=1e-9)[:, None]
        loss = float(errors.square().mean())
        if best is None or loss < best[0]:
            best = loss, penalty, errors
    assert best is not None
    _, penalty, errors = best
    if dual:
        alpha = left @ (heads / (values + penalty)[:, None]) / size
        weight = z.new_zeros(width, y.shape[1], dtype=torch.float64)
        for begin, part in _columns(z, mean, root):
            weight[begin : begin + COLUMNS] = part.T @ alpha
    else:
        weight = vectors @ (heads * (values.clamp(min=1e-12).sqrt() / (values + penalty))[:, None]) / size**0.5
    # A weight of zero has no error of its own.
    unseen = y - errors / torch.where(root > 0, root, 1.0)
    return Ridge(weight, center - mean @ weight, unseen, penalty)


def _columns(z: Tensor, mean: Tensor, root: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Scaled cases in float64, some columns at a time."""
    for begin in range(0, z.shape[1], COLUMNS):
        part = slice(begin, begin + COLUMNS)
        yield begin, root * (z[:, part].double() - mean[part])

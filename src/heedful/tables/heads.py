"""A classifying head that is trained alone, on drawn clouds, and then held still: what comes before it must carry the data to it."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from heedful._checks import check_number, check_whole, is_whole
from heedful._errors import InvalidArgument
from heedful.bridges.record import Hyperparameters


def pretrain_head(
    head: nn.Module,
    centres: Any,
    covariance: float = 1.0,
    n: int = 1000,
    *,
    angle: float = 0.0,
    freeze: bool = True,
    epochs: int = 200,
    patience: int = 5,
    lr: float = 1e-2,
    random_state: int = 0,
) -> float:
    r"""Trains a head on points drawn from Gaussians $N(m_c, s I)$, one for each class, and freezes it (Quadrio & Candelieri 2025, section on pretraining).

    A model whose last part is this head can then be trained in everything else: its blocks must carry each class to where the head expects it.

    Args:
        head: any module from points `(batch, width)` to logits `(batch, classes)`; it is trained in place.
        centres: $m_c$, `(classes, width)`.
        covariance: s, the variance of every cloud in every direction.
        n: points, shared evenly among the classes; a fifth of them decides when to stop.
        angle: turns the centres in the plane of the first two coordinates, in degrees: how far the head's places are from the data's.
        freeze: whether the head's parameters then ask for no gradient; `head.requires_grad_(True)` undoes it.
        epochs, patience, lr: of Adam, on all points at once; training stops after `patience` epochs without a smaller loss on the points left out, and the best weights are kept.
        random_state: decides the points. Random states of torch are left as they were.

    Returns:
        The share of the left-out points that the head classifies rightly.

    >>> head = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> pretrain_head(head, [[-5.0, 0.0], [5.0, 0.0], [0.0, 5.0]]) > 0.95
    True
    >>> any(parameter.requires_grad for parameter in head.parameters())
    False
    """
    from heedful.bridges.training import train

    how = Hyperparameters(epochs, max(1, n) if is_whole(n) else 1, lr, "Adam", clip=None, patience=patience)
    check_number(0, covariance=covariance)
    check_number(angle=angle)
    if not is_whole(random_state):
        raise InvalidArgument(f"random_state must be a whole number; got {random_state!r:.80}")
    means = _turned(centres, angle)
    check_whole(5 * len(means), n=n)
    parameter = next(head.parameters(), None)
    if parameter is None:
        raise InvalidArgument(f"head has no parameters to train; got {type(head).__name__}")
    rng = np.random.default_rng(random_state)
    codes = rng.permutation(np.arange(n) % len(means))
    points = means[codes] + math.sqrt(covariance) * rng.normal(size=(n, means.shape[1]))
    x, y = torch.from_numpy(points).to(parameter.dtype), torch.from_numpy(codes)
    held, was_training, device = n // 5, head.training, parameter.device
    _check_logits(head, x[:2].to(device), len(means))
    head.requires_grad_(True)
    training = train(
        head,
        (x[held:], y[held:]),
        (x[:held], y[:held]),
        loss=lambda network, *batch: _measure(network, *batch)["loss"].mean(),
        measure=_measure,
        hyperparameters=replace(how, seed=int(random_state)),
        device=device,
    )
    head.to(device).zero_grad()
    head.requires_grad_(not freeze)
    head.train(was_training)
    return training.measured["accuracy"]


def _measure(head: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    logits = head(x)
    losses = functional.cross_entropy(logits, y, reduction="none")
    return {"loss": losses, "accuracy": (logits.argmax(1) == y).float()}


def _check_logits(head: nn.Module, x: Tensor, classes: int) -> None:
    """Refuses a head of another shape before it is trained."""
    with torch.no_grad():
        shape = tuple(copy.deepcopy(head).eval()(x).shape)
    if shape != (len(x), classes):
        raise InvalidArgument(
            f"head must give logits of shape ({len(x)}, {classes}), one for each of the centres; got {shape}"
        )


def _turned(centres: Any, angle: float) -> np.ndarray:
    try:
        centres = np.asarray(centres, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"centres must be numbers (classes, width), such as centres_ of a fitted TransportClassifier; got {centres!r:.80}"
        ) from None
    if centres.ndim != 2 or len(centres) < 2 or not np.isfinite(centres).all():
        raise InvalidArgument(
            f"centres must be finite, (classes, width) with two classes or more; got shape {centres.shape}"
        )
    if len(np.unique(centres, axis=0)) < len(centres):
        raise InvalidArgument("two of the centres are the same; classes need places of their own")
    if angle and centres.shape[1] < 2:
        raise InvalidArgument("angle turns the first two coordinates; these centres have one")
    turned = centres.copy()
    if angle:
        cosine, sine = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        turned[:, :2] = centres[:, :2] @ np.array([[cosine, sine], [-sine, cosine]])
    return turned

"""Probabilities that are as sure as they are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

# Values that are tried, evenly spaced in logarithm.
VALUES = 221
# Temperature and offsets are fitted in so many turns, with so many steps for the offsets.
ROUNDS, STEPS = 8, 20


def temperature(
    logits: Tensor, target: Tensor, reach: float = 4.0, weight: Tensor | None = None, offset: Tensor | float = 0.0
) -> float:
    r"""What logits are divided by so that $-\log p$ of the targets is least, between 1 / reach and reach; an offset is added thereafter.

    Each class counts as seen once more in each case's place by 1 / (n + classes) (Platt 1999): few rows without an error do not make the next ones certain.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch...>
    >>> target = torch.randint(2, (4000,))
    >>> sure = torch.where(torch.rand(4000) < 0.8, target, 1 - target)
    >>> round(temperature(60.0 * functional.one_hot(sure, 2).double(), target, reach=100), 0)
    43.0
    """
    count, classes = logits.shape
    logs = torch.linspace(-np.log(reach), np.log(reach), VALUES, dtype=logits.dtype)
    each = torch.ones(count, dtype=logits.dtype) if weight is None else weight / weight.mean()
    smooth: dict[str, Any] = {"label_smoothing": classes / (count + classes), "reduction": "none"}
    target = target.long()
    losses = [(each * functional.cross_entropy(logits / log.exp() + offset, target, **smooth)).mean() for log in logs]
    return float(logs[torch.stack(losses).argmin()].exp())


def calibrated(scores: Tensor, target: Tensor, reach: float, weight: Tensor | None = None) -> tuple[float, Tensor]:
    r"""A temperature $\tau$ and an offset for each class, `(classes,)`, so that $\mathrm{softmax}(s / \tau + b)$ fits the targets.

    The offsets are those for which the mean probability of each class is its share of the targets, every class counted once more in both; they and the temperature
    are fitted in turn.
    """
    count, classes = scores.shape
    each = torch.ones(count, dtype=scores.dtype) if weight is None else weight / weight.mean()
    shares = (torch.zeros(classes, dtype=scores.dtype).index_add(0, target.long(), each) + 1) / (count + classes)
    value, offset = 1.0, shares.log()
    for _ in range(ROUNDS):
        value = temperature(scores, target, reach, weight, offset)
        for _ in range(STEPS):
            mean = (each[:, None] * (scores / value + offset).softmax(1)).mean(0)
            # Counted once more on both sides: where all cases are certain and right, offsets stay.
            offset = offset + shares.log() - ((count * mean + 1) / (count + classes)).log()
    return value, offset

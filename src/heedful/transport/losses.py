"""Losses that draw the layers of a network towards cheap and straight movements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heedful._checks import check_number
from heedful._errors import InvalidArgument
from heedful.transport._clouds import labels
from heedful.transport.plans import assignment, assignments


def monge_gap_loss(x: Tensor, tx: Tensor, p: float = 2, y: Any = None) -> Tensor:
    r"""The Monge gap of points x that a network moved to tx, as a term of its loss: 0 where no exchange of targets is cheaper.

    $$\frac{1}{N} \sum_i |x_i - t_i|^p - \min_\sigma \frac{1}{N} \sum_i |x_i - t_{\sigma(i)}|^p$$

    (Uscidda & Cuturi 2023, definition 3.1; their transport is entropic, ours exact.) The gradient holds the optimal permutation fixed,
    which is the exact one wherever it is unique (envelope theorem). The permutation is found on the CPU in float64.

    Args:
        x: points `(N, r)`, or sets of points `(B, N, r)`, of which each has its own permutation; the gap is then the mean over sets.
        tx: where they went, in the same shape.
        p: exponent of the distance, from 1 on.
        y: `(N,)` labels of points `(N, r)`: targets are exchanged in class.

    >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> turned = (x @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]])).requires_grad_()
    >>> gap = monge_gap_loss(x, turned)
    >>> gap.backward()
    >>> gap.item(), turned.grad.abs().sum().item() > 0
    (2.0, True)
    """
    check_number(least=1, p=p)
    if x.shape != tx.shape or x.dim() not in (2, 3) or (y is not None and x.dim() == 3):
        raise InvalidArgument(
            f"x and tx must have one shape, (points, width) or without labels (sets, points, width); got {tuple(x.shape)} and {tuple(tx.shape)}"
        )
    order = torch.empty(x.shape[:-1], dtype=torch.long)
    if x.dim() == 3:
        for row, plan in zip(order, assignments(x, tx, p), strict=True):
            row.copy_(torch.from_numpy(plan.index))
    else:
        for at in labels(y, len(x)):
            places = torch.from_numpy(at)
            plan = assignment(x[places], tx[places], p, method="exact")
            order[places] = places[torch.from_numpy(plan.index)]
    order = order.to(tx.device)
    best = tx.gather(-2, order[..., None].expand_as(tx))
    return _costs(x - tx, p).mean() - _costs(x - best, p).mean()


def straightness_loss(trajectory: Tensor) -> Tensor:
    r"""What points went round about, as a term of a loss: $1 - \sum_i |x_i^{(S)} - x_i^{(0)}| / \sum_i \sum_s |x_i^{(s+1)} - x_i^{(s)}|$, 0 for straight ways.

    Args:
        trajectory: `(S + 1, ..., r)`, the places of points after each of S layers or steps.

    >>> corner = torch.tensor([[[0.0, 0.0]], [[3.0, 0.0]], [[3.0, 4.0]]])
    >>> round(straightness_loss(corner).item(), 4)
    0.2857
    """
    if trajectory.dim() < 2 or len(trajectory) < 2:
        raise InvalidArgument(
            f"trajectory must be (steps + 1, ..., width) with two steps or more of places; got shape {tuple(trajectory.shape)}"
        )
    way = torch.linalg.vector_norm(trajectory.diff(dim=0), dim=-1).sum()
    whole = torch.linalg.vector_norm(trajectory[-1] - trajectory[0], dim=-1).sum()
    # Where nothing moved there is no way round.
    return torch.where(way > 0, 1 - whole / torch.where(way > 0, way, 1), 0 * way)


def _costs(moves: Tensor, p: float) -> Tensor:
    return moves.square().sum(-1) if p == 2 else torch.linalg.vector_norm(moves, dim=-1) ** p

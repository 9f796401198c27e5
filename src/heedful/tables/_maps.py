"""Several maps of points at once, each a small network: their mean is the map that is used."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class Maps(nn.Module):
    r"""`members` networks $T_m(x) = W_m^{(2)} \mathrm{ReLU}(W_m^{(1)} x + b_m^{(1)}) + b_m^{(2)}$ in one; forward gives their mean, `every` all of them.

    >>> maps = Maps(3, (7,), 2, members=5, dropout=0.0)
    >>> maps.every(torch.randn(11, 3)).shape, maps(torch.randn(11, 4, 3)).shape
    (torch.Size([5, 11, 2]), torch.Size([11, 4, 2]))
    """

    def __init__(self, width: int, hidden: Sequence[int], outputs: int, members: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for size, following in itertools.pairwise((width, *hidden, outputs)):
            reach = size**-0.5
            self.weights.append(nn.Parameter(torch.empty(members, size, following).uniform_(-reach, reach)))
            self.biases.append(nn.Parameter(torch.empty(members, 1, following).uniform_(-reach, reach)))

    def every(self, x: Tensor) -> Tensor:
        """`(..., width)` to `(members, ..., outputs)`."""
        points = x.reshape(-1, x.shape[-1]).expand(len(self.weights[0]), -1, -1)  # [M, N, width]
        for place, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            points = functional.dropout(points.relu(), self.dropout, self.training) if place else points
            points = torch.baddbmm(bias, points, weight)
        return points.unflatten(1, x.shape[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return self.every(x).mean(0)

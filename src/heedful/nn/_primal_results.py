"""What a primal layer tells about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful._plot import axes, heat_map
from heedful._result import Result
from heedful._text import quantity


@dataclass(frozen=True, eq=False, repr=False)
class PrimalScores(Result):
    """The projections of every token: `e` from its query, `r` from its key, each `[B, H, n, s]`, zero at padding."""

    e: Tensor
    r: Tensor

    def plot(self, ax: Any = None, *, sequence: int = 0, head: int = 0) -> Any:
        """The first two components of one head: tokens by query (discs) and by key (crosses), coloured by position."""
        pair = [x[sequence, head, :, :2].detach().float().cpu().numpy() for x in (self.e, self.r)]
        if pair[0].shape[-1] < 2:
            raise InvalidArgument("a plot of scores takes two components; this layer has rank 1")
        ax = axes(ax)
        for points, marker, label in zip(pair, "ox", ("e (queries)", "r (keys)"), strict=True):
            ax.scatter(points[:, 0], points[:, 1], c=range(len(points)), marker=marker, label=label)
        ax.set(xlabel="component 1", ylabel="component 2", title=f"scores of head {head}")
        ax.legend()
        return ax

    def __repr__(self) -> str:
        batch, heads, length, rank = self.e.shape
        return f"PrimalScores({batch} x {quantity(length, 'token')}, {quantity(heads, 'head')}, {quantity(rank, 'component')})"


@dataclass(frozen=True, eq=False, repr=False)
class PrimalDual(Result):
    """Dual variables `h_e`, `h_r` `[B, H, n, s]`, and how far the weights they make are from the layer's, `[B, H]` each."""

    h_e: Tensor
    h_r: Tensor
    residual_e: Tensor
    residual_r: Tensor

    def plot(self, ax: Any = None, *, sequence: int = 0, head: int = 0) -> Any:
        """The values that attention with this kernel would give each token: h_r of one head."""
        ax = heat_map(ax, self.h_r[sequence, head].detach().float().cpu().numpy())
        ax.set(xlabel="component", ylabel="token", title=f"dual variables of head {head}")
        return ax

    def __repr__(self) -> str:
        batch, heads, length, rank = self.h_e.shape
        worst = torch.stack((self.residual_e, self.residual_r)).max().item()
        return f"PrimalDual({batch} x {quantity(length, 'token')}, {quantity(heads, 'head')}, {quantity(rank, 'component')}, relative residual up to {worst:.2g})"

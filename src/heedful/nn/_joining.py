"""Features of times joined to the vectors of events before anything is projected (Xu et al. 2019)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


class Joining(nn.Module):
    r"""$z + W \Phi$ (`"add"`), $[z; \Phi]$ (`"concat"`), a network of it (`"concat_mlp"`), or that and a linear map (`"residual"`).

    `width` is the size of what comes of it: embed_dim, or for `"concat"` that and the size of $\Phi$.
    """

    def __init__(
        self, kind: str, embed_dim: int, dim: int, hidden: int | None, depth: int, place: dict[str, Any]
    ) -> None:
        super().__init__()
        self.kind, joint = kind, embed_dim + dim
        self.width = joint if kind == "concat" else embed_dim
        self.time_map: nn.Module | None = None
        self.skip = nn.Linear(joint, embed_dim, bias=False, **place) if kind == "residual" else None
        if kind == "add":
            self.time_map = nn.Linear(dim, embed_dim, bias=False, **place)
        elif hidden is not None:
            sizes = [joint, *[hidden] * depth]
            layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair, **place), nn.ReLU())]
            self.time_map = nn.Sequential(*layers, nn.Linear(hidden, embed_dim, **place))

    def forward(self, events: Tensor, features: Tensor) -> Tensor:
        """Events `[B, n, embed]` and features of their times `[B, n, dim]` -> `[B, n, width]`."""
        features = features.to(events.dtype)
        if self.kind == "add":
            assert self.time_map is not None
            return events + self.time_map(features)
        both = torch.cat((events, features), dim=-1)
        if self.time_map is None:
            return both
        return self.time_map(both) if self.skip is None else self.time_map(both) + self.skip(both)

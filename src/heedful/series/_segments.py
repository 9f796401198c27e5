"""A kernel between series: every segment of one is compared with every segment of the other, as attention does before it divides."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from heedful.kernels import Gaussian
from heedful.series._views import View

# Bandwidths in time, in lengths of the series: segments meet wherever they are, or where they are near.
ANYWHERE, NEAR = torch.inf, 0.25
BANDWIDTHS = (ANYWHERE, NEAR)
# Width of tokens and most segments. Of more series than `BASIS`, `LANDMARKS` are drawn to compare with, and tokens are fewer and narrower.
WIDTH, FINEST = 2_048, 8
NARROW, COARSEST = 512, 4
BASIS, LANDMARKS = 1_000, 300
CELLS = 2**24
KERNEL = Gaussian(1.0, normalize=False)


class SegmentKernel:
    r"""$K(x, x') = \sum_{s, t} e^{-(s - t)^2 / 2 h^2} e^{\cos(z_s, z'_t) - 1}$ over segments s of x and t of x', for 1, 2, 4 and 8 segments and two h.

    Tokens z are a view's features of each segment, standardised, and brought to `width` sums of features with random signs (a count
    sketch, which keeps inner products in the mean). With $\|z\| = 1$ and the place of a segment as one more coordinate, both factors are
    one `Gaussian` of `heedful.kernels`: time is a coordinate of queries and keys. Each term is divided by the mean of its centred diagonal.
    """

    def __init__(self, segments: int, width: int) -> None:
        self.segments, self.width = segments, width
        finest = FINEST if width == WIDTH else COARSEST
        self.levels = [level for level in (1, 2, 4, 8) if level <= finest and segments % level == 0]
        self.tensors: dict[str, Tensor] = {}

    def learn(self, view: View, parts: Tensor, seed: int) -> None:
        """What a view's tokens are standardised by, and how they are summed."""
        draw = np.random.default_rng(seed)
        name = "lagged" if view.lagged else "plain"
        places = draw.integers(self.width, size=view.size) * draw.choice((-1, 1), size=view.size)
        self.tensors[f"{name}.sums"] = torch.from_numpy(places).to(parts.device, torch.int32)
        for level in self.levels:
            token = self._level(view, parts, level)
            mean, spread = token.mean((0, 1)), token.mean(1).std(0, correction=0)
            self.tensors[f"{name}.{level}.mean"] = mean
            self.tensors[f"{name}.{level}.scale"] = inverse_scale(view, token.flatten(0, 1), spread)

    def _level(self, view: View, parts: Tensor, level: int) -> Tensor:
        """Features of each of `level` segments, (n, level, features), from what the finest ones add."""
        joined = parts.unflatten(1, (level, -1)).sum(2)
        return joined * level if view.kind == "shares" else (joined * parts.sum(1, keepdim=True)).clamp(min=0).sqrt()

    def add(self, view: View, parts: Tensor, rows: Tensor, tokens: dict[int, Tensor]) -> None:
        """Adds a view's part of the tokens of some series to those of all, {segments: (n, segments, width)}."""
        name = "lagged" if view.lagged else "plain"
        sums = self.tensors[f"{name}.sums"].long()
        for level in self.levels:
            token = self._level(view, parts, level) - self.tensors[f"{name}.{level}.mean"]
            token = token * self.tensors[f"{name}.{level}.scale"] * torch.where(sums < 0, -1.0, 1.0)
            # A GPU adds in any order, which float64 hides: scores and evidence are computed apart.
            token = token.double() if token.is_cuda else token
            own = token.new_zeros(*token.shape[:2], self.width).index_add_(2, sums.abs(), token)
            tokens[level][rows] += own.to(tokens[level])

    def empty(self, n: int, device: torch.device) -> dict[int, Tensor]:
        return {level: torch.zeros(n, level, self.width, device=device) for level in self.levels}

    def keep(self, tokens: dict[int, Tensor], rows: Tensor) -> None:
        """The series that others are compared with, and the scale of each term."""
        for level in self.levels:
            self.tensors[f"keys.{level}"] = torch.nn.functional.normalize(tokens[level][rows], dim=2)
        for level in self.levels:
            for at, own in enumerate(self._terms({level: tokens[level][rows]}, level)):
                gram = own.sum(1)
                center = gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()
                self.tensors[f"size.{level}.{at}"] = center.diagonal().mean().clamp(min=1e-9)[None]

    def _terms(self, tokens: dict[int, Tensor], level: int) -> list[Tensor]:
        """For each bandwidth what each segment adds, (n, level, basis)."""
        query, key = torch.nn.functional.normalize(tokens[level], dim=2), self.tensors[f"keys.{level}"]
        return [self._pairs(query, key, bandwidth) for bandwidth in BANDWIDTHS]

    @staticmethod
    def _pairs(query: Tensor, key: Tensor, bandwidth: float) -> Tensor:
        level, basis = key.shape[1], len(key)
        places = (torch.arange(level, device=key.device) + 0.5) / level / bandwidth
        query, key = (
            torch.cat((part.double(), places.expand(len(part), level)[..., None].double()), 2) for part in (query, key)
        )
        parts = [
            KERNEL.coefficients(some.flatten(0, 1)[None], key.flatten(0, 1)[None])[0]
            .reshape(len(some), level, basis, level)
            .sum(3)
            for some in query.split(max(1, CELLS // (basis * level * level)))
        ]
        return torch.cat(parts)

    def parts(self, tokens: dict[int, Tensor]) -> Tensor:
        """What each of the finest segments adds to the kernel with each kept series: (n, segments, basis)."""
        total: Tensor | float = 0.0
        for level in self.levels:
            for at, term in enumerate(self._terms(tokens, level)):
                term = term / self.tensors[f"size.{level}.{at}"] / (len(self.levels) * len(BANDWIDTHS))
                finer = self.segments // level
                total = total + term.repeat_interleave(finer, 1) / finer
        assert isinstance(total, Tensor)
        return total


def inverse_scale(view: View, features: Tensor, spread: Tensor) -> Tensor:
    """What features are multiplied by; zero for those that do not vary. All together then have a square of about 1.

    Shares that vary little are not blown up by more than ten times the usual; nor are counts that are mostly zero.
    """
    alive = spread > 1e-6
    if view.kind == "shares":
        spread = spread.clamp(min=float(spread[alive].median()) / 10 if bool(alive.any()) else 1.0)
    else:
        spread = spread + (features == 0).float().mean(0) ** 4
    return alive / torch.where(alive, spread, 1.0) / max(1, int(alive.sum())) ** 0.5

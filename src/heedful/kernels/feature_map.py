"""Coefficients that are inner products of finite feature vectors, which attend at linear cost."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument
from heedful.kernels.base import Kernel, check_parameter, default_scale, unit
from heedful.kernels.forms import Parameter, Traits

MapName = Literal["elu", "relu", "cosine", "random"]


class FeatureMap(Kernel):
    r"""Linear attention: $\kappa(q, k) = \phi(q) \cdot \phi(k)$.

    | map | phi(x) | rows by default |
    |---|---|---|
    | `"elu"` | elu(x) + 1, Katharopoulos et al. (2020) | normalised |
    | `"relu"` | max(0, x) | normalised |
    | `"cosine"` | x / norm of x | not normalised: coefficients may be negative |
    | `"random"` | positive orthogonal random features of exp(s q.k), Choromanski et al. (2021) | normalised |

    `"random"` approximates `Softmax(scale)` with `features` directions drawn from `seed`; the others are exact kernels of
    their own. `scale` acts on `"random"` alone.

    >>> from heedful import FeatureMap
    >>> FeatureMap("elu").traits.nonnegative
    True
    """

    map: MapName = "elu"
    normalize: bool | None = None
    features_count: int = 256
    seed: int = 0
    scale: Parameter | None = None

    def __post_init__(self) -> None:
        check_choice(MapName, map=self.map)
        if self.map == "cosine" and self.normalize:
            raise InvalidArgument(
                "FeatureMap('cosine'): coefficients may be negative, so a row sum may vanish; leave normalize unset"
            )
        check_choice((True, False), optional=True, normalize=self.normalize)
        check_whole(features_count=self.features_count)
        check_whole(-(2**63), seed=self.seed)
        check_parameter(self, "scale", positive=True, optional=True)

    @property
    def traits(self) -> Traits:
        signed = self.map == "cosine"
        normalized = not signed if self.normalize is None else self.normalize
        return Traits(division="sum" if normalized else None, nonnegative=not signed, invariant=signed)

    def coefficients(self, query: Tensor, key: Tensor) -> Tensor:
        query, key = self.features(query, key)
        return query @ key.mT

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.map == "elu":
            return elu_plus_one(query), elu_plus_one(key)
        if self.map == "relu":
            return query.relu(), key.relu()
        if self.map == "cosine":
            return unit(query), unit(key)
        query, key = self._exponent(query), self._exponent(key)
        if self.traits.division == "sum":
            # Constant in a row of coefficients, so they cancel, and larger vectors stay in range.
            query = query - query.detach().amax(dim=-1, keepdim=True)
            key = key - (key.detach().amax(dim=(-2, -1), keepdim=True) if key.shape[-2] else 0.0)
        return query.exp(), key.exp()

    def steady_features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.map != "random":
            return self.features(query, key)
        return self._exponent(query).exp(), self._exponent(key).exp()

    def with_scale(self, scale: float | None) -> Kernel:
        if scale is not None and self.map != "random":
            raise InvalidArgument(f"scale={scale!r} given, but FeatureMap({self.map!r}) has no scale")
        return super().with_scale(scale)

    def feature_size(self, head_dim: int) -> int:
        return self.features_count if self.map == "random" else head_dim

    @property
    def fused_map(self) -> Literal["elu", "relu"] | None:
        return self.map if self.map == "elu" or self.map == "relu" else None

    def _exponent(self, x: Tensor) -> Tensor:
        # In float64: e to the minus squared norm of an ordinary vector leaves the range of float32.
        x = x.double() * default_scale(self.scale, x.double()) ** 0.5
        directions = orthogonal_directions(self.features_count, x.shape[-1], self.seed, x.device)
        return x @ directions.T - x.square().sum(-1, keepdim=True) / 2 - math.log(self.features_count) / 2


def elu_plus_one(x: Tensor) -> Tensor:
    """x + 1 above zero, else e^x, which elu(x) + 1 would round to zero where it is small."""
    return torch.where(x > 0, x + 1, x.clamp_max(0).exp())


@lru_cache(maxsize=64)
def _directions(count: int, dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-count // dim)
    gaussian = torch.randn(groups, dim, dim, generator=generator, dtype=torch.float64)
    basis, triangle = torch.linalg.qr(gaussian)
    # Without this sign the bases are not uniform over the orthogonal group, and the estimate is biased.
    basis = basis * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    lengths = torch.randn(groups, dim, dim, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
    return (basis.mT * lengths).flatten(0, 1)[:count]


# An operator of its own, because a seeded generator cannot be made inside a compiled graph.
@torch.library.custom_op("heedful::orthogonal_directions", mutates_args=())
def orthogonal_directions(count: int, dim: int, seed: int, device: torch.device) -> Tensor:
    """Gaussian directions `[count, dim]`, orthogonal in groups of `dim`: the same ones for the same arguments."""
    return _directions(count, dim, seed).to(device, copy=True)


@orthogonal_directions.register_fake
def _(count: int, dim: int, seed: int, device: torch.device) -> Tensor:
    return torch.empty(count, dim, dtype=torch.float64, device=device)

"""Kernels of the distance between query and key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful.kernels.base import (
    Folded,
    FusedForm,
    Kernel,
    Parameter,
    Traits,
    check_parameter,
    minus_squared_distance,
    per_head,
    wide,
)


class _Distance(Kernel):
    """What kernels of a distance share: a bandwidth, and rows that are normalised unless told otherwise."""

    bandwidth: Parameter | None = None
    normalize: bool = True

    def __post_init__(self) -> None:
        check_parameter(self, "bandwidth", positive=True, optional=True)
        if not isinstance(self.normalize, bool):
            raise InvalidArgument(f"{type(self).__name__}: normalize must be True or False; got {self.normalize!r}")

    @property
    def traits(self) -> Traits:
        return Traits(
            exponential=True,
            division="sum" if self.normalize else None,
            nonnegative=True,
            stationary=True,
            invariant=True,
        )


class Gaussian(_Distance):
    r"""Gaussian (radial basis function) attention: $\kappa(q, k) = e^{-\|q - k\|^2 / 2\ell^2}$.

    `bandwidth` $\ell$ is a number or a tensor per head. The default, (head size)^(1/4), gives the inner product the
    weight it has in softmax attention. With `normalize` (the default) each row is divided by its sum; then the kernel is
    softmax attention with the extra score $-\|k\|^2 / 2\ell^2$ and runs at its speed. Without it, this is the
    coefficient of Chen et al., Skyformer (2021).

    >>> from heedful import Gaussian
    >>> Gaussian(2.0)
    Gaussian(bandwidth=2.0, normalize=True)
    """

    def _inverse_square(self, query: Tensor) -> Parameter:
        if self.bandwidth is None:
            return float(query.shape[-1]) ** -0.5
        return per_head(self.bandwidth, query) ** -2

    def score(self, query: Tensor, key: Tensor) -> Tensor:
        return minus_squared_distance(query, key, 0.5 * self._inverse_square(query))

    def fold(self, query: Tensor, key: Tensor) -> Folded:
        keys = wide(key)
        precision = self._inverse_square(keys)
        column = -0.5 * keys.square().sum(-1)  # [..., K]
        if isinstance(precision, Tensor):
            by_head = precision[..., 0] if precision.dim() == 3 else precision
            return Folded((wide(query) * precision).to(query.dtype), key, column * by_head, 1.0)
        return Folded(query, key, column * precision, precision)

    @property
    def fused_form(self) -> FusedForm:
        precision = None if self.bandwidth is None else self.bandwidth**-2
        return FusedForm("exp", precision, division="sum" if self.normalize else None, distance=True)


class Laplace(_Distance):
    r"""Laplace attention: $\kappa(q, k) = e^{-\|q - k\| / \ell}$ with the Euclidean norm.

    `bandwidth` $\ell$ is a number or a tensor per head; the default is sqrt(head size). Distances are taken from
    differences, not from inner products: near zero the square root would magnify their rounding. The gradient at distance
    zero is zero.

    >>> from heedful import Laplace
    >>> Laplace(bandwidth=3.0, normalize=False)
    Laplace(bandwidth=3.0, normalize=False)
    """

    def score(self, query: Tensor, key: Tensor) -> Tensor:
        bandwidth = query.shape[-1] ** 0.5 if self.bandwidth is None else per_head(self.bandwidth, query)
        return -_Euclidean.apply(query, key) / bandwidth


class _Euclidean(torch.autograd.Function):
    """||q - k|| for every pair. torch's own `cdist` has no second derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(query: Tensor, key: Tensor) -> Tensor:
        return torch.cdist(query, key, compute_mode="donot_use_mm_for_euclid_dist")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        query, key, distance = ctx.saved_tensors
        ratio = gradient / distance.masked_fill(distance == 0, torch.inf)
        by_query = query * ratio.sum(dim=-1, keepdim=True) - ratio @ key
        by_key = key * ratio.sum(dim=-2)[..., None] - ratio.mT @ query
        return by_query.sum_to_size(query.shape), by_key.sum_to_size(key.shape)

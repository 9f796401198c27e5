"""Kernels of the distance between query and key."""

from __future__ import annotations

import torch
from torch import Tensor

from heedful.kernels._base import (
    Folded,
    Kernel,
    Parameter,
    Traits,
    check_parameter,
    per_head,
    squared_distance,
)


class _Distance(Kernel):
    """What kernels of a distance share: a bandwidth, and rows that are normalised unless told otherwise."""

    bandwidth: Parameter | None = None
    normalize: bool = True

    def __post_init__(self) -> None:
        check_parameter(self, "bandwidth", positive=True, optional=True)

    @property
    def traits(self) -> Traits:
        return Traits(
            exponential=True,
            bilinear=type(self).fold is not Kernel.fold,
            division="sum" if self.normalize else None,
            nonnegative=True,
            stationary=True,
            invariant=True,
        )


class Gaussian(_Distance):
    r"""Gaussian (radial basis function) attention: :math:`\kappa(q, k) = e^{-\|q - k\|^2 / 2\ell^2}`.

    `bandwidth` :math:`\ell` is a number or a tensor per head. The default, (head size)^(1/4), gives the inner product the
    weight it has in softmax attention. With `normalize` (the default) each row is divided by its sum; then the kernel is
    softmax attention with the extra score :math:`-\|k\|^2 / 2\ell^2` and runs at its speed. Without it, this is the
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
        return -0.5 * squared_distance(query, key) * self._inverse_square(query)

    def fold(self, query: Tensor, key: Tensor) -> Folded:
        wide_key = key if key.dtype == torch.float64 else key.float()
        precision = self._inverse_square(wide_key)
        column = -0.5 * wide_key.square().sum(-1)  # [..., K]
        if isinstance(precision, Tensor):
            moved = (query * precision).to(query.dtype)
            return Folded(moved, key, column * precision.flatten()[:, None], 1.0)
        return Folded(query, key, column * precision, precision)


class Laplace(_Distance):
    r"""Laplace attention: :math:`\kappa(q, k) = e^{-\|q - k\| / \ell}` with the Euclidean norm.

    `bandwidth` :math:`\ell` is a number or a tensor per head; the default is sqrt(head size). The distance is taken in
    float64: near zero its square root would magnify the rounding of float32 a thousandfold. Its gradient at distance zero
    is zero.

    >>> from heedful import Laplace
    >>> Laplace(bandwidth=3.0, normalize=False)
    Laplace(bandwidth=3.0, normalize=False)
    """

    def score(self, query: Tensor, key: Tensor) -> Tensor:
        squares = squared_distance(query.double(), key.double())
        apart = squares > 0
        distance = squares.masked_fill(~apart, 1.0).sqrt().masked_fill(~apart, 0.0).to(query.dtype)
        bandwidth = query.shape[-1] ** 0.5 if self.bandwidth is None else per_head(self.bandwidth, query)
        return -distance / bandwidth

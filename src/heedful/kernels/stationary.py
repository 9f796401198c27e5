"""Kernels of the distance between query and key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heedful._checks import check_choice
from heedful._errors import InvalidArgument
from heedful.kernels.base import Kernel, check_parameter, minus_squared_distance, per_head, wide
from heedful.kernels.forms import Folded, FusedForm, Parameter, Traits


class _Distance(Kernel):
    """What kernels of a distance share: a bandwidth, and rows that are normalised unless told otherwise."""

    bandwidth: Parameter | None = None
    normalize: bool = True

    def __post_init__(self) -> None:
        _check(self, self.normalize)

    @property
    def traits(self) -> Traits:
        return _traits(self.normalize)


def _check(owner: Kernel, normalize: bool) -> None:
    check_parameter(owner, "bandwidth", positive=True, optional=True)
    if not isinstance(normalize, bool):
        raise InvalidArgument(f"{type(owner).__name__}: normalize must be True or False; got {normalize!r}")


def _traits(normalize: bool) -> Traits:
    return Traits(
        exponential=True,
        division="sum" if normalize else None,
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

    def remoteness(self, vectors: Tensor) -> Tensor:
        # The score with the origin in one pass: every call on a CPU is judged by it.
        return 0.5 * self._inverse_square(vectors) * torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).square()

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
        return -_lengths(query, key, self.bandwidth)


class Matern(Kernel):
    r"""Matern attention: $\kappa(q, k) = (1 + a)\, e^{-a}$ or $(1 + a + a^2/3)\, e^{-a}$, $a = \sqrt{2\nu}\, \|q - k\| / \ell$.

    `smoothness` $\nu$ is 1.5, the first form, or 2.5, the second: between `Laplace` (1/2) and `Gaussian` (infinite), Rasmussen &
    Williams (2006), eq. 4.17. `bandwidth` $\ell$ is a number or a tensor per head; the default is sqrt(head size). The score is
    the logarithm of the coefficient, so that rows are divided by their sum also where every coefficient is too small for a
    float. Distances are taken as `Laplace` takes them, and the gradient at distance zero is zero.

    >>> from heedful import Matern
    >>> Matern(2.5, bandwidth=2.0)
    Matern(smoothness=2.5, bandwidth=2.0, normalize=True)
    """

    smoothness: float = 1.5
    bandwidth: Parameter | None = None
    normalize: bool = True

    def __post_init__(self) -> None:
        _check(self, self.normalize)
        check_choice((1.5, 2.5), smoothness=self.smoothness)

    @property
    def traits(self) -> Traits:
        return _traits(self.normalize)

    def score(self, query: Tensor, key: Tensor) -> Tensor:
        a = _lengths(query, key, self.bandwidth) * (2 * self.smoothness) ** 0.5
        return (a if self.smoothness == 1.5 else a + a.square() / 3).log1p() - a


class RationalQuadratic(Kernel):
    r"""Rational quadratic attention: $\kappa(q, k) = (1 + \|q - k\|^2 / 2\alpha\ell^2)^{-\alpha}$.

    A mixture of Gaussians of many bandwidths, with tails that fall as a power of the distance; large `alpha` is nearly
    `Gaussian(bandwidth)`. Rasmussen & Williams (2006), eq. 4.19. `alpha` and `bandwidth` $\ell$ are numbers or tensors per head; the
    default bandwidth is sqrt(head size). Distances are taken as `Laplace` takes them, and the gradient at distance zero is
    zero.

    >>> from heedful import RationalQuadratic
    >>> RationalQuadratic(alpha=0.5, normalize=False)
    RationalQuadratic(alpha=0.5, normalize=False)
    """

    alpha: Parameter = 1.0
    bandwidth: Parameter | None = None
    normalize: bool = True

    def __post_init__(self) -> None:
        check_parameter(self, "alpha", positive=True)
        _check(self, self.normalize)

    @property
    def traits(self) -> Traits:
        return _traits(self.normalize)

    def score(self, query: Tensor, key: Tensor) -> Tensor:
        alpha = per_head(self.alpha, query)
        return -alpha * (_lengths(query, key, self.bandwidth).square() / (2 * alpha)).log1p()

    def remoteness(self, vectors: Tensor) -> Tensor:
        # The score is a logarithm, small for vectors whose gradients are lost in rounding.
        return _lengths(vectors, torch.zeros_like(vectors[..., :1, :]), self.bandwidth)


def _lengths(query: Tensor, key: Tensor, bandwidth: Parameter | None) -> Tensor:
    """||q - k|| / bandwidth for every pair; by default the bandwidth is sqrt(head size)."""
    unit = query.shape[-1] ** 0.5 if bandwidth is None else per_head(bandwidth, query)
    # Its square is finite, so that a vector far away spoils no gradient of the pairs it is hidden from (0 x inf = NaN).
    return _Euclidean.apply(query, key).clamp_max(torch.finfo(query.dtype).max ** 0.25) / unit


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

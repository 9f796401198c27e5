"""Kernels that are an elementwise function of a scaled inner product."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import silu

from heedful._checks import check_whole
from heedful.kernels.base import Kernel, check_parameter, default_scale, per_head, shifted, unit
from heedful.kernels.forms import Division, Folded, FusedForm, Parameter, Traits
from heedful.kernels.softmax import Softmax


class _Affine(Kernel):
    """What elementwise functions of s q.k + b share: the scale s, the bias b, and the score."""

    scale: Parameter | None = None
    bias: Parameter = 0.0

    def __post_init__(self) -> None:
        check_parameter(self, "scale", optional=True)
        check_parameter(self, "bias")

    def score(self, query: Tensor, key: Tensor) -> Tensor:
        return shifted((query * default_scale(self.scale, query)) @ key.mT, self.bias)


class Sigmoid(_Affine):
    r"""Sigmoid attention: $\kappa(q, k) = \sigma(s\, q \cdot k + b)$, rows not normalised.

    `scale` s (default 1/sqrt(head size)) and `bias` b are numbers or tensors per head. For n keys, b = -log n starts rows
    near unit sum (Ramapuram et al., 2024).

    >>> from heedful import Sigmoid
    >>> Sigmoid(bias=-3.0)
    Sigmoid(bias=-3.0)
    """

    @property
    def traits(self) -> Traits:
        return Traits(nonnegative=True, invariant=True)

    def activation(self, score: Tensor) -> Tensor:
        return score.sigmoid()

    @property
    def fused_form(self) -> FusedForm:
        return FusedForm("sigmoid", self.scale, self.bias)


class Tanh(_Affine):
    r"""Signed attention: $\kappa(q, k) = \tanh(s\, q \cdot k + b)$, rows not normalised.

    `scale` s (default 1/sqrt(head size)) and `bias` b are numbers or tensors per head. Coefficients lie between -1 and 1, so
    rows are not divided by their sum; `averaged()` divides them by the number of keys.

    >>> from heedful import Tanh
    >>> Tanh(scale=0.5).averaged()
    Divided(kernel=Tanh(scale=0.5, bias=0.0), by='count')
    """

    @property
    def traits(self) -> Traits:
        return Traits(invariant=True)

    def activation(self, score: Tensor) -> Tensor:
        return score.tanh()


class Silu(_Affine):
    r"""Gated linear attention scores: $\kappa(q, k) = t\, \sigma(t)$ with $t = s\, q \cdot k + b$, rows not normalised.

    `scale` s (default 1/sqrt(head size)) and `bias` b are numbers or tensors per head. Coefficients are above -0.279.

    >>> import torch
    >>> from heedful import Silu, attend
    >>> x = torch.eye(2)
    >>> attend.coefficients(x, x, kernel=Silu(scale=1.0)).round(decimals=4)
    tensor([[0.7311, 0.0000],
            [0.0000, 0.7311]])
    """

    @property
    def traits(self) -> Traits:
        return Traits(invariant=True)

    def activation(self, score: Tensor) -> Tensor:
        return silu(score)


class Exponential(_Affine):
    r"""Exponential attention: $\kappa(q, k) = e^{s\, q \cdot k + b}$, rows not normalised.

    `scale` s (default 1/sqrt(head size)) and `bias` b are numbers or tensors per head. Divided by their sums, rows are those of
    `Softmax`, for which the bias is a common factor that cancels: `normalized()` gives that kernel.

    >>> from heedful import Exponential
    >>> Exponential(scale=0.5).normalized()
    Softmax(scale=0.5)
    """

    @property
    def traits(self) -> Traits:
        return Traits(exponential=True, nonnegative=True, invariant=True)

    def activation(self, score: Tensor) -> Tensor:
        # Finite, so that a row far away spoils no gradient of the others (0 x inf = NaN).
        return score.clamp_max(math.log(torch.finfo(score.dtype).max) - 1).exp()

    def fold(self, query: Tensor, key: Tensor) -> Folded | None:
        # The bias is the same for every key of a row, which `Folded` leaves out.
        return Softmax(self.scale).fold(query, key)

    def _divided(self, by: Division) -> Kernel:
        return Softmax(self.scale) if by == "sum" and type(self) is Exponential else super()._divided(by)

    @property
    def fused_form(self) -> FusedForm:
        return FusedForm("exp", self.scale, self.bias)


class Relu(Kernel):
    r"""Rectified attention: $\kappa(q, k) = \max(0, s\, q \cdot k)$, rows not normalised."""

    scale: Parameter | None = None

    def __post_init__(self) -> None:
        check_parameter(self, "scale", optional=True)

    @property
    def traits(self) -> Traits:
        return Traits(nonnegative=True, invariant=True)

    def score(self, query: Tensor, key: Tensor) -> Tensor:
        return (query * default_scale(self.scale, query)) @ key.mT

    def activation(self, score: Tensor) -> Tensor:
        return score.relu()

    @property
    def fused_form(self) -> FusedForm:
        return FusedForm("relu", self.scale)


class ReluSquared(Relu):
    r"""Squared rectified attention: $\kappa(q, k) = \max(0, s\, q \cdot k)^2$, rows not normalised."""

    def activation(self, score: Tensor) -> Tensor:
        return score.relu().square()

    @property
    def fused_form(self) -> FusedForm:
        return FusedForm("relu_squared", self.scale)


class Cosine(Kernel):
    r"""The cosine of the angle: $\kappa(q, k) = q \cdot k / \|q\| \|k\|$, rows not normalised, zero for a zero vector.

    It has a finite feature map, x / ||x||, so it also runs at linear cost.
    """

    @property
    def traits(self) -> Traits:
        return Traits(invariant=True)

    def score(self, query: Tensor, key: Tensor) -> Tensor:
        return unit(query) @ unit(key).mT

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return unit(query), unit(key)

    def feature_size(self, head_dim: int) -> int:
        return head_dim

    @property
    def fused_form(self) -> FusedForm:
        return FusedForm("power", 1.0, inputs="unit")


class Polynomial(Kernel):
    r"""Polynomial attention: $\kappa(q, k) = (s\, q \cdot k + c)^p$, rows not normalised.

    `degree` p is a positive integer, `offset` c and `scale` s (default 1/sqrt(head size)) are numbers or tensors per head.
    Degrees 1 and 2 have finite feature maps of size D + 1 and (D + 1)^2, so they also run at linear cost; degree 1 with
    offset 0 is the identity of the symmetry paper's family, with its associative path.

    >>> from heedful import Polynomial
    >>> Polynomial(degree=3, offset=1.0)
    Polynomial(degree=3, offset=1.0)
    """

    degree: int = 2
    offset: Parameter = 0.0
    scale: Parameter | None = None

    def __post_init__(self) -> None:
        check_whole(degree=self.degree)
        check_parameter(self, "offset")
        check_parameter(self, "scale", optional=True)

    @property
    def traits(self) -> Traits:
        return Traits(nonnegative=self.degree % 2 == 0, invariant=True)

    def score(self, query: Tensor, key: Tensor) -> Tensor:
        return shifted((query * default_scale(self.scale, query)) @ key.mT, self.offset)

    def activation(self, score: Tensor) -> Tensor:
        return score**self.degree

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.degree > 2:
            return None
        query = query * default_scale(self.scale, query)
        if isinstance(self.offset, Tensor) or self.offset != 0.0:
            offset = torch.zeros_like(query[..., :1]) + per_head(self.offset, query)
            query = torch.cat((query, offset), dim=-1)
            key = torch.cat((key, torch.ones_like(key[..., :1])), dim=-1)
        return (query, key) if self.degree == 1 else (_outer(query), _outer(key))

    def feature_size(self, head_dim: int) -> int | None:
        if self.degree > 2:
            return None
        return (head_dim + (isinstance(self.offset, Tensor) or self.offset != 0.0)) ** self.degree

    @property
    def fused_form(self) -> FusedForm:
        return FusedForm("power", self.scale, self.offset, degree=self.degree)


def _outer(x: Tensor) -> Tensor:
    # Finite, so that a key far away spoils no gradient of the rows it is hidden from (0 x inf = NaN).
    most = torch.finfo(x.dtype).max
    return (x[..., :, None] * x[..., None, :]).flatten(-2).clamp(-most, most)  # [..., n, D * D]

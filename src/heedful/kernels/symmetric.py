"""Coefficients divided by the roots of both degrees, as the adjacency matrix of a graph is."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful.kernels.base import Kernel, _hide, check_parameter, per_head
from heedful.kernels.forms import Balance, Parameter, Traits


class Symmetric(Kernel):
    r"""Symmetric normalisation of a non-negative kernel K: $A = D^{-1/2} K D^{-1/2}$, times `factor`.

    $$A_{ij} = \frac{K_{ij}}{\sqrt{d_i d_j}}, \qquad d_i = \sum_{j\ \text{seen by}\ i} K_{ij}.$$

    It takes the place of a division of rows, and is made by `kernel.symmetric()`. The degree of key j is that of its own row, so
    there must be as many queries as keys, and under a causal mask nothing from the future enters. Where queries and keys are the
    same vectors and the mask is symmetric, so is A, and its largest eigenvalue is 1. A token whose own row is zero, or sees
    nothing, has degree zero and counts for nothing.

    The degrees are attention with values of one, by any implementation that serves K. Those of an exponential kernel are
    kept as logarithms, so that scores of any size neither overflow nor vanish: with $L_i = \log d_i$, A is softmax attention whose scores
    are lowered by $L_j / 2$, times the exponential of $\log \sum_j e^{s_{ij} - L_j / 2} - L_i / 2$. `factor` is a number or a tensor per head.

    >>> import torch
    >>> from heedful import Gaussian, attend
    >>> x = torch.randn(1, 1, 5, 3, dtype=torch.float64)
    >>> A = attend.coefficients(x, x, kernel=Gaussian(2.0).symmetric())
    >>> A.allclose(A.mT), round(float(torch.linalg.eigvalsh(A).max()), 9)
    (True, 1.0)
    """

    kernel: Kernel
    factor: Parameter = 1.0

    def __post_init__(self) -> None:
        inner = self.kernel
        if not isinstance(inner, Kernel) or inner.balances or inner.traits.division is not None:
            raise InvalidArgument(f"Symmetric: kernel must be a kernel whose rows are not divided; got {inner!r}")
        if not inner.traits.nonnegative and type(inner).traits is not Kernel.traits:
            raise InvalidArgument(f"{inner!r} may have negative coefficients, of which a degree has no root")
        check_parameter(self, "factor")

    @property
    def traits(self) -> Traits:
        inner = self.kernel.traits
        positive = not isinstance(self.factor, Tensor) and self.factor >= 0
        return inner._replace(exponential=False, nonnegative=inner.nonnegative and positive)

    @property
    def of_pairs(self) -> Kernel:
        inner = self.kernel.of_pairs
        return inner.normalized() if inner.traits.exponential else inner

    @property
    def moves(self) -> tuple[Kernel, ...]:
        return self.kernel.moves

    def move(self, query: Tensor, key: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        return self.kernel.move(query, key, attend)

    @property
    def balances(self) -> tuple[Kernel, ...]:
        inner = self.kernel.of_pairs
        return (_LogSum(inner),) * 2 if inner.traits.exponential else (inner,)

    def balance(self, total: Callable[..., Tensor], sees: Tensor | None) -> Balance:
        kernel = self.balances[0]
        degree = total(kernel)  # [..., Q, 1]
        factor = per_head(self.factor, degree)
        if not isinstance(kernel, _LogSum):
            # Zero, or so little that its inverse root is nothing to multiply by.
            root = degree.masked_fill(degree < torch.finfo(degree.dtype).tiny, torch.inf).rsqrt()
            return Balance(root * factor, keys=root)
        # Finite, so that a garbage row spoils no gradient of the rows its key is hidden from (0 x inf = NaN).
        most = torch.finfo(degree.dtype).max ** 0.5
        column = (degree / -2).clamp(-most, most)
        rows = total(kernel, column) - degree / 2
        rows = rows if sees is None else rows.masked_fill(~sees, -torch.inf)
        return Balance(rows.clamp_max(math.log(torch.finfo(rows.dtype).max)).exp() * factor, column=column)

    def check(self, query: Tensor, key: Tensor) -> None:
        self.kernel.check(query, key)
        if query.shape[-2] != key.shape[-2]:
            raise InvalidArgument(
                f"{self!r} takes as many keys as queries, since a key's degree is the sum of its own row; "
                f"got query {tuple(query.shape)} and key {tuple(key.shape)}. normalized() divides rows alone"
            )

    def coefficients(self, query: Tensor, key: Tensor) -> Tensor:
        raise InvalidArgument(
            f"{self!r} is a kernel of the whole sequence, not of a pair; call attend, or attend.coefficients"
        )

    def with_scale(self, scale: float | None) -> Kernel:
        return self if scale is None else Symmetric(self.kernel.with_scale(scale), self.factor)

    def symmetric(self) -> Kernel:
        return self

    def _divided(self, by: str) -> Kernel:
        raise InvalidArgument(
            f"{self!r} is divided by both degrees already; call {by!r} division on the kernel inside it"
        )

    def __mul__(self, other: Kernel | Parameter) -> Kernel:
        if isinstance(other, Kernel):
            raise InvalidArgument(f"{self!r} acts on the whole sequence; compose inside it, as in (a * b).symmetric()")
        return Symmetric(self.kernel, self.factor * other)

    __rmul__ = __mul__

    def __add__(self, other: Kernel) -> Kernel:
        raise InvalidArgument(f"{self!r} acts on the whole sequence; compose inside it, as in (a + b).symmetric()")


class _LogSum(Kernel):
    """The logarithm of a row's sum of exponentials, as what values of one are combined to; zero for a row that sees nothing."""

    kernel: Kernel

    @property
    def traits(self) -> Traits:
        return Traits(stationary=self.kernel.traits.stationary)

    def weights(self, query: Tensor, key: Tensor, keep: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        score = self._square(self.kernel.score(query, key), query, key)
        if bias is not None:
            score = score + _hide(bias, keep)
        if score.shape[-1] == 0:
            return score
        score = _hide(score, keep, torch.finfo(score.dtype).min)
        total, at = score.logsumexp(dim=-1, keepdim=True), score.detach().argmax(dim=-1, keepdim=True)
        # Whole and in one place: a sum of n parts of it would round.
        return _hide(torch.zeros_like(score).scatter(-1, at, total), keep)

"""The network that the theory analyses: attention without softmax, which sees the other tokens through one matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heedful._errors import InvalidArgument


class PolynomialAttention(nn.Module):
    r"""Depth L of attention without softmax, normalisation or feed-forward (Levine et al. 2020, eq. 3), in moment form.

    $y^{l+1,j} = \sum_h W^O_h \sum_{j'} \langle W^Q_h y^{l,j}, W^K_h y^{l,j'} \rangle W^V_h y^{l,j'}$. With $M = \sum_j x^j
    x^{jT}$ and $T_l(M) = \sum_h W^O_h W^V_h M W^{KT}_h W^Q_h$ it is $y^{L,j} = T_L(M^{L-1}) \cdots T_1(M^0) x^j$, $M^l = T_l
    M^{l-1} T_l^T$: $O(N d^2 + L H d^3)$, and no matrix of tokens by tokens. This form is ours; `direct` is the paper's.

    `forward` takes `[..., N, d]` to the same shape.

    >>> network = PolynomialAttention(6, heads=2, depth=3).double()
    >>> x = torch.randn(5, 6, dtype=torch.float64)
    >>> torch.allclose(network(x), network.direct(x))
    True
    """

    query: Tensor
    key: Tensor
    value: Tensor

    def __init__(self, width: int, heads: int = 1, depth: int = 1, *, residual: bool = False) -> None:
        super().__init__()
        if min(width, heads, depth) < 1 or width % heads:
            raise InvalidArgument(f"{heads} heads do not divide width {width}, or a size of {depth} layers is below 1")
        self.width, self.heads, self.depth, self.residual = width, heads, depth, residual
        # Of order one at the output for tokens of unit norm.
        inner = width // heads
        for name, shape in (("query", (inner, width)), ("key", (inner, width)), ("value", (inner, width))):
            setattr(self, name, nn.Parameter(torch.randn(depth, heads, *shape) / inner**0.5))
        self.out = nn.Parameter(torch.randn(depth, heads, width, inner) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (self._product(x.mT @ x, self._factors(x.dtype)) @ x.mT).mT

    def direct(self, x: Tensor) -> Tensor:
        """The recursion over tokens, $O(L N^2 d)$: the slow twin."""
        for query, key, value, out in zip(self.query, self.key, self.value, self.out, strict=True):
            rows = x[..., None, :, :]  # [..., 1, N, d]
            scores = (rows @ query.mT) @ (rows @ key.mT).mT  # [..., H, N, N]
            mixed = (scores @ (rows @ value.mT) @ out.mT).sum(dim=-3)
            x = x + mixed if self.residual else mixed
        return x

    def double_from_moment(self, moment: Tensor, x: Tensor) -> Tensor:
        """The output `[..., d]` of tokens x for a given moment `[..., d, d]`, in float64."""
        return (self._product(moment, self._factors(torch.float64)) @ x[..., None]).squeeze(-1)

    def _factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """$W^O W^V$ and $W^{KT} W^Q$ of every layer and head, `[L, H, d, d]`."""
        left, right = self.out.to(dtype) @ self.value.to(dtype), self.key.to(dtype).mT @ self.query.to(dtype)
        return left, right

    def _product(self, moment: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
        """$T_L \\cdots T_1$ as a matrix."""
        total = one = torch.eye(self.width, dtype=moment.dtype, device=moment.device)
        for left, right in zip(*factors, strict=True):
            mix = (left @ moment[..., None, :, :] @ right).sum(dim=-3)
            mix = mix + one if self.residual else mix
            total = mix @ total
            moment = mix @ moment @ mix.mT
        return total

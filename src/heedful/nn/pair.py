"""The form that permutation equivariance alone leaves: Proposition 4.1."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument
from heedful.masks import Mask
from heedful.nn._module import Module, check_input, layer_mask, learned


class PairAttention(Module):
    r"""Attention by functions of pairs and of pooled pairs, $f = A X$ (Ma & Ying 2023, Prop. 4.1).

    With coordinates $y_i = Z x_i$ (`size` learned rows Z),

    $$A_{ii} = \rho_1\big(y_i, \textstyle\sum_{t \ne i} \psi_1(y_t, y_i)\big), \qquad
    A_{ij} = \rho_2\big(y_i, y_j, \textstyle\sum_{t \ne i,j} \psi_2(y_t, y_i, y_j)\big).$$

    `form="mlp"` learns rho and psi as small networks. `form="softmax"` is softmax attention exactly: psi is e^s with the score
    s of two linear maps of y, rho_1(x, p) = e^{s(x,x)} / (e^{s(x,x)} + p), and

    $$\rho_2(x, y, p) = e^{s(x,y)} / (e^{s(x,x)} + e^{s(x,y)} + p).$$

    Remark 4.1 of the paper prints rho_2 without the first term of the denominator, which loses the term t = i: its rows do
    not sum to one. `arity=2` lets psi see (y_t, y_i), O(n^2); `arity=3` also y_j, O(n^3), refused beyond `max_length` tokens.

    >>> import torch, heedful
    >>> layer = heedful.nn.PairAttention(8, size=6, form="softmax")
    >>> layer.coefficients(torch.randn(1, 5, 8)).sum(-1).allclose(torch.ones(1, 5))
    True
    """

    def __init__(
        self,
        embed_dim: int,
        size: int = 16,
        *,
        form: Literal["mlp", "softmax"] = "mlp",
        arity: Literal[2, 3] = 2,
        hidden: int = 32,
        max_length: int = 128,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_whole(embed_dim=embed_dim, size=size, hidden=hidden, max_length=max_length)
        check_choice(("mlp", "softmax"), form=form)
        check_choice((2, 3), arity=arity)
        self.embed_dim, self.size, self.form, self.arity = embed_dim, size, form, arity
        self.hidden, self.max_length = hidden, max_length
        place = {"device": device, "dtype": dtype}
        self.rows = learned(size, embed_dim, **place)
        self.functions: _Learned | _Softmax = (
            _Softmax(size, arity, **place) if form == "softmax" else _Learned(size, arity, hidden, **place)
        )

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Mask | Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """A x: `(B, n, d)` -> `(B, n, d)`; masks are True = ignore."""
        keep = self._keep(x, key_padding_mask, attn_mask, is_causal)
        x = _without_hidden(x, keep)
        return self._coefficients(x, keep) @ x

    def coefficients(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Mask | Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """A: `(B, n, n)`; hidden pairs are zero and enter no sum."""
        keep = self._keep(x, key_padding_mask, attn_mask, is_causal)
        return self._coefficients(_without_hidden(x, keep), keep)

    def _keep(
        self, x: Tensor, key_padding_mask: Tensor | None, attn_mask: Mask | Tensor | None, is_causal: bool
    ) -> Tensor:
        check_input("x", x, self.embed_dim)
        batch, n, _ = x.shape
        if self.arity == 3 and n > self.max_length:
            raise InvalidArgument(
                f"arity=3 costs n^3 and n = {n} exceeds max_length = {self.max_length}; use arity=2, or raise max_length"
            )
        mask = layer_mask(batch, 1, n, n, attn_mask, key_padding_mask, is_causal)
        if mask is None:
            return torch.ones(batch, n, n, dtype=torch.bool, device=x.device)
        if mask.bias is not None or mask.factors is not None:
            raise InvalidArgument("PairAttention has no score to add to; give boolean masks (True = ignore)")
        return mask.dense((batch, 1, n, n), x.device).expand(batch, 1, n, n)[:, 0]

    def _coefficients(self, x: Tensor, keep: Tensor) -> Tensor:
        batch, n, _ = x.shape
        y = self.functions.prepare(x @ self.rows.mT, keep)  # [B, n, size], or one more
        y_i, y_j = y[:, :, None].expand(-1, -1, n, -1), y[:, None].expand(-1, n, -1, -1)  # [B, i, j, size]
        same = torch.eye(n, dtype=torch.bool, device=x.device)
        off = keep[..., None] & ~same[..., None]
        # [B, i, t, s]: what t says about i, nothing where i does not see t or t is i.
        around = self.functions.psi1(y_j, y_i).masked_fill(~off, 0.0)
        own = self.functions.rho1(y, around.sum(dim=2))[..., 0]  # [B, n]
        if self.arity == 2:
            pooled = self.functions.psi2(y_j, y_i, None).masked_fill(~off, 0.0)
            rest = pooled.sum(dim=2, keepdim=True) - pooled  # [B, i, j, s]
        else:
            shape = (batch, n, n, n, y.shape[-1])  # [B, i, j, t, size]
            messages = self.functions.psi2(
                y[:, None, None].expand(shape), y_i[:, :, :, None].expand(shape), y_j[:, :, :, None].expand(shape)
            )
            others = off[:, :, None] & ~same[:, :, None]
            rest = messages.masked_fill(~others, 0.0).sum(dim=3)
        itself = keep.diagonal(dim1=1, dim2=2)[:, :, None, None].to(
            y.dtype
        )  # [B, i, 1, 1], 0 where i does not see itself
        other = self.functions.rho2(y_i, y_j, rest, itself)[..., 0]
        return torch.where(same, own[..., None], other).masked_fill(~keep, 0.0)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, size={self.size}, form={self.form!r}, arity={self.arity}"


def _without_hidden(x: Tensor, keep: Tensor) -> Tensor:
    """Zeros for tokens that nobody sees, whatever they hold: 0 x NaN would be NaN."""
    return x.masked_fill(~keep.any(dim=1)[..., None], 0.0)


class _Learned(nn.Module):
    def __init__(self, size: int, arity: int, hidden: int, device: Any, dtype: Any) -> None:
        super().__init__()

        def network(inputs: int, outputs: int) -> nn.Sequential:
            first, last = (
                nn.Linear(a, b, device=device, dtype=dtype) for a, b in ((inputs, hidden), (hidden, outputs))
            )
            return nn.Sequential(first, nn.GELU(), last)

        self.said = nn.ModuleList([network(2 * size, hidden), network(arity * size, hidden)])
        self.read = nn.ModuleList([network(size + hidden, 1), network(2 * size + hidden, 1)])

    def prepare(self, y: Tensor, keep: Tensor) -> Tensor:
        return y

    def psi1(self, y_t: Tensor, y_i: Tensor) -> Tensor:
        return self.said[0](torch.cat((y_t, y_i), dim=-1))

    def psi2(self, y_t: Tensor, y_i: Tensor, y_j: Tensor | None) -> Tensor:
        return self.said[1](torch.cat((y_t, y_i) if y_j is None else (y_t, y_i, y_j), dim=-1))

    def rho1(self, y_i: Tensor, pooled: Tensor) -> Tensor:
        return self.read[0](torch.cat((y_i, pooled), dim=-1))

    def rho2(self, y_i: Tensor, y_j: Tensor, pooled: Tensor, itself: Tensor) -> Tensor:
        return self.read[1](torch.cat((y_i, y_j, pooled), dim=-1))


class _Softmax(nn.Module):
    def __init__(self, size: int, arity: int, device: Any, dtype: Any) -> None:
        super().__init__()
        self.query = learned(size, size, device=device, dtype=dtype)
        self.key = learned(size, size, device=device, dtype=dtype)

    def prepare(self, y: Tensor, keep: Tensor) -> Tensor:
        """y with the largest score that i sees as one more entry: e^{s - max} is e^s up to a factor that cancels in rho."""
        scores = self._score(y[:, :, None], y[:, None])[..., 0]
        largest = scores.detach().masked_fill(~keep, -torch.inf).amax(dim=-1, keepdim=True)
        return torch.cat((y, largest.masked_fill(largest.isinf(), 0.0)), dim=-1)

    def _score(self, y_i: Tensor, y_t: Tensor) -> Tensor:
        query, key = y_i @ self.query.mT, y_t @ self.key.mT
        return (query * key).sum(dim=-1, keepdim=True) * query.shape[-1] ** -0.5

    def _exponential(self, y_i: Tensor, y_t: Tensor) -> Tensor:
        # What i does not see may be larger than its maximum; it is hidden afterwards.
        return (self._score(y_i[..., :-1], y_t[..., :-1]) - y_i[..., -1:]).clamp_max(0.0).exp()

    def psi1(self, y_t: Tensor, y_i: Tensor) -> Tensor:
        return self._exponential(y_i, y_t)

    def psi2(self, y_t: Tensor, y_i: Tensor, y_j: Tensor | None) -> Tensor:
        return self._exponential(y_i, y_t)

    def rho1(self, y_i: Tensor, pooled: Tensor) -> Tensor:
        own = self._exponential(y_i, y_i)
        return own / (own + pooled)

    def rho2(self, y_i: Tensor, y_j: Tensor, pooled: Tensor, itself: Tensor) -> Tensor:
        own, other = itself * self._exponential(y_i, y_i), self._exponential(y_i, y_j)
        return other / (own + other + pooled)

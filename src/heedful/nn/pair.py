"""The form that permutation equivariance alone leaves: Proposition 4.1."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument
from heedful.masks import Mask
from heedful.nn._module import Activation, Coefficients, check_input, check_knowledge, layer_mask, learned
from heedful.nn._values import Value, ValueModule


class PairFunctions(Protocol):
    r"""The functions of Prop. 4.1 on tensors whose last axis holds coordinates, as an `nn.Module`.

    `psi1(y_t, y_i)` and `psi2(y_t, y_i, y_j)`, where `y_j` is None with `arity=2`, return what is summed up over t, of any width;
    `rho1(y_i, pooled)` and `rho2(y_i, y_j, pooled, itself)` return one coefficient on the last axis, where `itself` is 1, or 0 for rows
    that do not see themselves. To read knowledge, `rho3(y_i, pooled)` with the pool of `psi1` returns k coefficients.
    `prepare(y, keep)`, where it is there, changes the coordinates `[B, n, size]` first; `keep` `[B, n, n]` says who sees whom.
    """

    def psi1(self, y_t: Tensor, y_i: Tensor, /) -> Tensor: ...

    def psi2(self, y_t: Tensor, y_i: Tensor, y_j: Tensor | None, /) -> Tensor: ...

    def rho1(self, y_i: Tensor, pooled: Tensor, /) -> Tensor: ...

    def rho2(self, y_i: Tensor, y_j: Tensor, pooled: Tensor, itself: Tensor, /) -> Tensor: ...


class PairAttention(ValueModule):
    r"""Attention by functions of pairs and of pooled pairs, $f = A X + B Z$ (Ma & Ying 2023, Prop. 4.1).

    With coordinates $y_i = Z x_i$, Z being `size` learned rows, or those given at call time with `knowledge="given"`,

    $$A_{ii} = \rho_1\big(y_i, \textstyle\sum_{t \ne i} \psi_1(y_t, y_i)\big), \qquad
    A_{ij} = \rho_2\big(y_i, y_j, \textstyle\sum_{t \ne i,j} \psi_2(y_t, y_i, y_j)\big).$$

    `form="mlp"` learns rho and psi as small networks. `form="softmax"` is softmax attention exactly: psi is e^s with the score
    s of two linear maps of y, rho_1(x, p) = e^{s(x,x)} / (e^{s(x,x)} + p), and

    $$\rho_2(x, y, p) = e^{s(x,y)} / (e^{s(x,x)} + e^{s(x,y)} + p).$$

    Remark 4.1 of the paper prints rho_2 without the first term of the denominator, which loses the term t = i: its rows do
    not sum to one. `form` may also be a module with functions of your own (`PairFunctions`), shared by all heads; a layer with such
    is saved by its state dict alone. `arity=2` lets psi see (y_t, y_i), O(n^2); `arity=3` also y_j, O(n^3), refused beyond
    `max_length` tokens.

    `readout="x|z"` adds B Z with $B_{i\cdot} = \rho_3(y_i, \sum_{t \ne i} \psi_1(y_t, y_i))$, k coefficients of each token on the rows of Z: what
    permutation equivariance leaves of B. Each of `num_heads` heads has its own Z (where it is learned) and its own functions; their
    outcomes evolve by `value` and are summed, as in `KnowledgeAttention`. With `value="identity"` (the default) and given knowledge the
    layer is orthogonally and permutation equivariant.

    >>> import torch, heedful
    >>> layer = heedful.nn.PairAttention(8, size=6, form="softmax")
    >>> layer.coefficients(torch.randn(1, 5, 8)).x.sum(-1).allclose(torch.ones(1, 1, 5))
    True
    """

    def __init__(
        self,
        embed_dim: int,
        size: int = 16,
        num_heads: int = 1,
        *,
        form: Literal["mlp", "softmax"] | nn.Module = "mlp",
        arity: Literal[2, 3] = 2,
        knowledge: Literal["learned", "given"] = "learned",
        readout: Literal["x", "x|z"] = "x",
        value: Value = "identity",
        value_dim: int | None = None,
        activation: Activation = "gelu",
        out_dim: int | None = None,
        hidden: int = 32,
        residual: bool = False,
        max_length: int = 128,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_whole(embed_dim=embed_dim, size=size, num_heads=num_heads, hidden=hidden, max_length=max_length)
        check_whole(optional=True, value_dim=value_dim)
        check_choice((2, 3), arity=arity)
        check_choice(("learned", "given"), knowledge=knowledge)
        check_choice(("x", "x|z"), readout=readout)
        self.embed_dim, self.size, self.num_heads, self.form, self.arity = embed_dim, size, num_heads, form, arity
        self.knowledge, self.readout, self.hidden, self.max_length = knowledge, readout, hidden, max_length
        self.value_dim = embed_dim if value_dim is None else value_dim
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        shape = (size, embed_dim) if num_heads == 1 else (num_heads, size, embed_dim)
        self.rows = learned(*shape, **place) if knowledge == "learned" else None
        read = size if readout == "x|z" else 0
        if isinstance(form, nn.Module):
            functions = [_checked(form, readout)] * num_heads
        else:
            check_choice(("mlp", "softmax"), form=form)
            sort = _Softmax if form == "softmax" else _Learned
            functions = [sort(size, arity, hidden, read, **place) for _ in range(num_heads)]
        self.functions: Any = functions[0] if num_heads == 1 else nn.ModuleList(functions)
        inner = {"linear": self.value_dim, "mlp": 4 * embed_dim}
        self._make_values(value, num_heads, embed_dim, inner, activation, out_dim, residual, place)

    def forward(
        self,
        x: Tensor,
        z: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Mask | Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """f(x, z): `(B, n, d)` -> `(B, n, out_dim)`; z `(size, d)` or `(B, size, d)` where knowledge is given; masks are True = ignore."""
        keep = self._keep(x, key_padding_mask, attn_mask, is_causal)
        clean, poison = _without_hidden(x, keep)
        vectors = self._vectors(x, z)
        own, read = self._coefficients(clean, vectors, keep)
        heads = own @ self._values(clean[:, None])
        if read is not None:
            heads = heads + read @ self._values(vectors)
        return self._evolved(heads + poison, x)

    def coefficients(
        self,
        x: Tensor,
        z: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Mask | Tensor | None = None,
        is_causal: bool = False,
    ) -> Coefficients:
        """A `[B, heads, n, n]` and B `[B, heads, n, size]`; hidden pairs are zero and enter no sum."""
        keep = self._keep(x, key_padding_mask, attn_mask, is_causal)
        clean, poison = _without_hidden(x, keep)
        own, read = self._coefficients(clean, self._vectors(x, z), keep)
        return Coefficients(own + poison, None if read is None else read + poison)

    def _keep(
        self, x: Tensor, key_padding_mask: Tensor | None, attn_mask: Mask | Tensor | None, is_causal: bool
    ) -> Tensor:
        """Who sees whom, `[B, H, n, n]`."""
        check_input("x", x, self.embed_dim)
        batch, n, _ = x.shape
        if self.arity == 3 and n > self.max_length:
            raise InvalidArgument(
                f"arity=3 costs n^3 and n = {n} exceeds max_length = {self.max_length}; use arity=2, or raise max_length"
            )
        mask = layer_mask(batch, self.num_heads, n, n, attn_mask, key_padding_mask, is_causal)
        shape = (batch, self.num_heads, n, n)
        if mask is None:
            return torch.ones(shape, dtype=torch.bool, device=x.device)
        if mask.bias is not None or mask.factors is not None:
            raise InvalidArgument("PairAttention has no score to add to; give boolean masks (True = ignore)")
        return mask.dense(shape, x.device).expand(shape)

    def _vectors(self, x: Tensor, z: Tensor | None) -> Tensor:
        """Z `[B, 1 or H, size, d]`."""
        if self.rows is not None:
            if z is not None:
                raise InvalidArgument("this layer has learned its Z; make it with knowledge='given' to give z")
            rows = self.rows if self.rows.dim() == 3 else self.rows[None]
            return rows.expand(x.shape[0], *rows.shape)
        if z is None:
            raise InvalidArgument("this layer compares with given knowledge: call it with z")
        z = check_knowledge(z, x, self.size, self.num_heads)
        return (z if z.dim() == 4 else z.unsqueeze(-3)).expand(x.shape[0], -1, -1, -1)

    def _coefficients(self, x: Tensor, vectors: Tensor, keep: Tensor) -> Coefficients:
        y = (x[:, None] @ vectors.mT).expand(-1, self.num_heads, -1, -1)  # [B, H, n, size]
        functions = self.functions if isinstance(self.functions, nn.ModuleList) else [self.functions]
        heads = [self._head(one, y[:, head], keep[:, head]) for head, one in enumerate(functions)]
        own = torch.stack([a for a, _ in heads], dim=1)
        return Coefficients(own, None if heads[0][1] is None else torch.stack([b for _, b in heads], dim=1))  # type: ignore[misc]

    def _head(self, functions: Any, y: Tensor, keep: Tensor) -> tuple[Tensor, Tensor | None]:
        """A `[B, n, n]` and B `[B, n, size]` of one head."""
        batch, n, _ = y.shape
        if hasattr(functions, "prepare"):
            y = functions.prepare(y, keep)  # [B, n, size], or one more
        y_i, y_j = y[:, :, None].expand(-1, -1, n, -1), y[:, None].expand(-1, n, -1, -1)  # [B, i, j, size]
        same = torch.eye(n, dtype=torch.bool, device=y.device)
        off = keep[..., None] & ~same[..., None]
        # [B, i, t, s]: what t says about i, nothing where i does not see t or t is i.
        around = functions.psi1(y_j, y_i).masked_fill(~off, 0.0).sum(dim=2)
        own = functions.rho1(y, around)[..., 0]  # [B, n]
        if self.arity == 2:
            pooled = functions.psi2(y_j, y_i, None).masked_fill(~off, 0.0)
            rest = pooled.sum(dim=2, keepdim=True) - pooled  # [B, i, j, s]
        else:
            shape = (batch, n, n, n, y.shape[-1])  # [B, i, j, t, size]
            messages = functions.psi2(
                y[:, None, None].expand(shape), y_i[:, :, :, None].expand(shape), y_j[:, :, :, None].expand(shape)
            )
            others = off[:, :, None] & ~same[:, :, None]
            rest = messages.masked_fill(~others, 0.0).sum(dim=3)
        # [B, i, 1, 1], 0 where i does not see itself.
        itself = keep.diagonal(dim1=1, dim2=2)[:, :, None, None].to(y.dtype)
        other = functions.rho2(y_i, y_j, rest, itself)[..., 0]
        combined = torch.where(same, own[..., None], other).masked_fill(~keep, 0.0)
        return combined, functions.rho3(y, around) if self.readout == "x|z" else None

    def extra_repr(self) -> str:
        form = self.form if isinstance(self.form, str) else type(self.form).__name__
        return f"{self.embed_dim}, size={self.size}, num_heads={self.num_heads}, form={form!r}, arity={self.arity}"


def _checked(functions: nn.Module, readout: str) -> nn.Module:
    wanted = ["psi1", "psi2", "rho1", "rho2", *(["rho3"] if readout == "x|z" else [])]
    missing = [name for name in wanted if not callable(getattr(functions, name, None))]
    if missing:
        raise InvalidArgument(
            f"form={type(functions).__name__} has no {missing[0]}; functions of your own are a module with {', '.join(wanted)}: see "
            "heedful.nn.PairFunctions"
        )
    return functions


def _without_hidden(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros for tokens that nobody sees, and for numbers that are not finite or whose products would not be: 0 x NaN would be NaN; and
    NaN to be added for those who see the latter, `[B, H, n, 1]`.
    """
    bad = ~(x.detach().square().sum(dim=-1) < torch.finfo(x.dtype).max ** 0.5)  # [B, n]
    poisoned = (keep & bad[:, None, None]).any(dim=-1, keepdim=True)
    poison = torch.zeros_like(poisoned, dtype=x.dtype).masked_fill(poisoned, torch.nan)
    return x.masked_fill((~keep.any(dim=(1, 2)) | bad)[..., None], 0.0), poison


class _Learned(nn.Module):
    def __init__(self, size: int, arity: int, hidden: int, read: int, device: Any, dtype: Any) -> None:
        super().__init__()

        def network(inputs: int, outputs: int) -> nn.Sequential:
            first, last = (
                nn.Linear(a, b, device=device, dtype=dtype) for a, b in ((inputs, hidden), (hidden, outputs))
            )
            return nn.Sequential(first, nn.GELU(), last)

        self.said = nn.ModuleList([network(2 * size, hidden), network(arity * size, hidden)])
        self.read = nn.ModuleList([network(size + hidden, 1), network(2 * size + hidden, 1)])
        if read:
            self.read.append(network(size + hidden, read))

    def psi1(self, y_t: Tensor, y_i: Tensor) -> Tensor:
        return self.said[0](torch.cat((y_t, y_i), dim=-1))

    def psi2(self, y_t: Tensor, y_i: Tensor, y_j: Tensor | None) -> Tensor:
        return self.said[1](torch.cat((y_t, y_i) if y_j is None else (y_t, y_i, y_j), dim=-1))

    def rho1(self, y_i: Tensor, pooled: Tensor) -> Tensor:
        return self.read[0](torch.cat((y_i, pooled), dim=-1))

    def rho2(self, y_i: Tensor, y_j: Tensor, pooled: Tensor, itself: Tensor) -> Tensor:
        return self.read[1](torch.cat((y_i, y_j, pooled), dim=-1))

    def rho3(self, y_i: Tensor, pooled: Tensor) -> Tensor:
        return self.read[2](torch.cat((y_i, pooled), dim=-1))


class _Softmax(nn.Module):
    def __init__(self, size: int, arity: int, hidden: int, read: int, device: Any, dtype: Any) -> None:
        super().__init__()
        self.knowledge = learned(read, size, device=device, dtype=dtype) if read else None
        self.query = learned(size, size, device=device, dtype=dtype)
        self.key = learned(size, size, device=device, dtype=dtype)

    def prepare(self, y: Tensor, keep: Tensor) -> Tensor:
        """y with the largest score that i sees as one more entry: e^{s - max} is e^s up to a factor that cancels in rho."""
        if not y.shape[1]:
            return torch.cat((y, y[..., :1]), dim=-1)
        scores = self._score(y[:, :, None], y[:, None])[..., 0]
        largest = scores.detach().masked_fill(~keep, -torch.inf).amax(dim=-1, keepdim=True)
        return torch.cat((y, largest.masked_fill(largest.isinf(), 0.0)), dim=-1)

    def _score(self, y_i: Tensor, y_t: Tensor) -> Tensor:
        query, key = y_i @ self.query.mT, y_t @ self.key.mT
        return (query * key).sum(dim=-1, keepdim=True) * query.shape[-1] ** -0.5

    def _exponential(self, y_i: Tensor, y_t: Tensor) -> Tensor:
        # What i does not see may be larger than its maximum; it is hidden afterwards. What it sees is larger by rounding alone, which
        # must not cost it its gradient.
        return (self._score(y_i[..., :-1], y_t[..., :-1]) - y_i[..., -1:]).clamp_max(1.0).exp()

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

    def rho3(self, y_i: Tensor, pooled: Tensor) -> Tensor:
        """Softmax of a linear map of y over the k vectors, apart from the tokens': Y W_B of section 3.3."""
        assert self.knowledge is not None
        return (y_i[..., :-1] @ self.knowledge.mT).softmax(dim=-1)

"""The block of attention and network that tables go through, between rows and between columns (Kossen et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from heedful._attend import attend
from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument, Unsupported
from heedful.kernels import Kernel
from heedful.masks import Mask
from heedful.nn._module import KernelModule, check_heads, check_input, layer_mask

Scale = Literal["head", "width"]
Residual = Literal["linear", "identity", "query"]


class Remembered(NamedTuple):
    """Keys and values `[B, heads, n, head size]` of rows that others attend to, and which are padding (`[B, n]`, True = ignore)."""

    key: Tensor
    value: Tensor
    padding: Tensor | None = None


class DatapointBlock(KernelModule):
    r"""Attention between items and a network, with a learned residual map (Kossen et al. 2021, eq. 1 to 4).

    For items H `(B, m, w)` that attend to items S `(B, n, w)`, H itself by default, with heads of width w / heads and normalisations LN:

    $$Q = \mathrm{LN}_1(H) W_Q + b_Q,\quad K = \mathrm{LN}_1(S) W_K + b_K,\quad V = \mathrm{LN}_1(S) W_V + b_V$$
    $$R = H W_R + b_R + \mathrm{concat}_a(\mathrm{softmax}(Q_a K_a^\top / \tau) V_a) W_O + b_O$$
    $$\mathrm{out} = R + \mathrm{GELU}(\mathrm{LN}_2(R) W_1 + b_1) W_2 + b_2$$

    which are $13 w^2 + 14 w$ parameters. Attention goes through `heedful.attend`: no m x n matrix is formed, and any kernel serves. The
    authors' released models differ from their paper; theirs is `norm_kv=False, scale="width", eps=1e-12` (`authors_state` takes their weights).

    Args:
        embed_dim: w, a multiple of `num_heads`.
        hidden: width of the network, by default 4 w.
        dropout: of what attention adds, and behind both maps of the network.
        attention_dropout: of coefficients, by default `dropout`; with 0 none of them is written out in training.
        norm_kv: whether keys and values are of normalised items (the paper's eq. 3), or of items as they are (the authors' code).
        scale: $\tau$ is the root of the width of a head (`"head"`), or of w (`"width"`: the paper's eq. 1 and the code, which starts
            almost uniform where w is large).
        residual: the residual goes through a map of its own (`"linear"`), through none (`"identity"`), or is the query's projection Q
            (`"query"`, as in Set Transformers).
        eps: of the normalisations.
        inducing: so many learned rows attend to S first, by a block of their own, and H attends to these (the ISAB of Lee et
            al. 2019, eq. 9 and 10): O((m + n) k) in place of O(m n).

    Rows under `key_padding_mask` count as zeros, whatever they hold. A row that sees nothing gets no attention but $b_O$.

    >>> import torch, heedful
    >>> block = heedful.nn.DatapointBlock(12, 3).eval()
    >>> rows, queries = torch.randn(2, 7, 12), torch.randn(2, 5, 12)
    >>> block(rows).shape
    torch.Size([2, 7, 12])
    >>> stored = block.remember(rows)
    >>> block(queries, remembered=stored).allclose(block(queries, key=rows), atol=1e-6)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        hidden: int | None = None,
        dropout: float = 0.1,
        *,
        attention_dropout: float | None = None,
        norm_kv: bool = True,
        scale: Scale = "head",
        residual: Residual = "linear",
        eps: float = 1e-5,
        kernel: Kernel | Sequence[Kernel] | None = None,
        impl: str = "auto",
        inducing: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        check_heads(embed_dim, num_heads)
        check_whole(optional=True, hidden=hidden, inducing=inducing)
        check_choice(Scale, scale=scale)
        check_choice(Residual, residual=residual)
        check_number(0, eps=eps)
        super().__init__(kernel, num_heads, dropout, impl, device)
        check_number(least=0, high=1, optional=True, attention_dropout=attention_dropout)
        self.attention_dropout = dropout if attention_dropout is None else attention_dropout
        self.embed_dim, self.num_heads, self.norm_kv, self.scale = embed_dim, num_heads, norm_kv, scale
        self.residual, self.eps, self.inducing = residual, eps, inducing
        self.hidden = 4 * embed_dim if hidden is None else hidden
        self.kernel.with_scale(self._factor)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query, self.key, self.value, self.out = (nn.Linear(embed_dim, embed_dim, **place) for _ in range(4))
        self.skip = nn.Linear(embed_dim, embed_dim, **place) if residual == "linear" else None
        self.linear1 = nn.Linear(embed_dim, self.hidden, **place)
        self.linear2 = nn.Linear(self.hidden, embed_dim, **place)
        self.norm1, self.norm2 = (nn.LayerNorm(embed_dim, eps=eps, **place) for _ in range(2))
        self.rows: nn.Parameter | None = None
        self.gather: DatapointBlock | None = None
        if inducing is not None:
            self.rows = nn.Parameter(torch.randn(inducing, embed_dim, **place))
            self.gather = DatapointBlock(
                embed_dim, num_heads, hidden, dropout, attention_dropout=attention_dropout, norm_kv=norm_kv, scale=scale, residual=residual, eps=eps,
                kernel=deepcopy(kernel), impl=impl, **place,
            )  # fmt: skip

    @property
    def _factor(self) -> float | None:
        """What scores are multiplied by, where it is not the kernel's to say."""
        return None if self.scale == "head" else self.embed_dim**-0.5

    def remember(self, key: Tensor, key_padding_mask: Tensor | None = None) -> Remembered:
        """Keys and values of rows `(B, n, w)`, or of the inducing rows that attended to them, for any number of calls.

        With them a call costs O(queries x n), and nothing of the rows' own projections.
        """
        check_input("key", key, self.embed_dim)
        if self.gather is not None:
            assert self.rows is not None
            queries = self.rows.to(key.dtype).expand(key.shape[0], -1, -1)
            key, key_padding_mask = self.gather(queries, key, key_padding_mask), None
        return self._project(_without(key, key_padding_mask), None, key_padding_mask)

    def _project(self, rows: Tensor, normed: Tensor | None, padding: Tensor | None) -> Remembered:
        if self.norm_kv:
            rows = self.norm1(rows) if normed is None else normed
        return Remembered(self._heads(self.key(rows)), self._heads(self.value(rows)), padding)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, n, w] -> [B, H, n, D]

    def forward(
        self,
        x: Tensor,
        key: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Mask | Tensor | None = None,
        *,
        remembered: Remembered | None = None,
    ) -> Tensor:
        """`(B, m, w)` -> `(B, m, w)`.

        `key` `(B, n, w)` are rows, of the same layer's input, that x attends to instead of itself; `remembered` is what `remember`
        keeps of them. Masks are those of `Attention` (True = ignore): `key_padding_mask` `(B, n)`, `attn_mask` `(m, n)` or
        `(B * heads, m, n)`, or a heedful mask.
        """
        call = self._call(x, key, key_padding_mask, attn_mask, remembered)
        dropout = self.attention_dropout if self.training else 0.0
        out = attend(
            self._heads(call.query), call.key, call.value, call.mask, dropout,
            scale=self._factor, kernel=self.kernel, impl=self.impl,
        )  # fmt: skip
        out = self._drop(self.out(out.transpose(1, 2).flatten(-2)))  # [B, m, w]
        if self.skip is not None:
            out = self.skip(call.x) + out
        else:
            out = (call.query if self.residual == "query" else call.x) + out
        inner = self._drop(functional.gelu(self.linear1(self.norm2(out))))
        return out + self._drop(self.linear2(inner))

    def coefficients(
        self,
        x: Tensor,
        key: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Mask | Tensor | None = None,
        *,
        remembered: Remembered | None = None,
    ) -> Tensor:
        """How much each row of x takes of each other row in the same call, `[B, heads, m, n]`.

        With inducing rows it is what goes through them: the product of the coefficients to them and from them; where they alone are
        `remembered`, the coefficients to them.
        """
        call = self._call(x, key, key_padding_mask, attn_mask, remembered)
        own = attend.coefficients(self._heads(call.query), call.key, call.mask, scale=self._factor, kernel=self.kernel)
        if self.gather is None or remembered is not None:
            return own
        assert self.rows is not None
        rows = x if key is None else key
        queries = self.rows.to(rows.dtype).expand(rows.shape[0], -1, -1)
        return own @ self.gather.coefficients(queries, rows, key_padding_mask)

    def _call(
        self,
        x: Tensor,
        key: Tensor | None,
        padding: Tensor | None,
        attn_mask: Mask | Tensor | None,
        remembered: Remembered | None,
    ) -> _Call:
        """What `attend` is called with."""
        check_input("x", x, self.embed_dim)
        if remembered is not None and (key is not None or padding is not None):
            given = "key" if key is not None else "key_padding_mask"
            raise InvalidArgument(
                f"got {given} beside remembered, which holds keys and their padding; give one of them"
            )
        if self.inducing is not None and attn_mask is not None:
            raise Unsupported(
                f"with inducing={self.inducing} rows see others through the inducing rows, so attn_mask cannot act; "
                "give key_padding_mask, or inducing=None"
            )
        if key is None and remembered is None:
            x = _without(x, padding)
        normed = self.norm1(x)
        if remembered is None:
            plain = key is None and self.gather is None
            remembered = (
                self._project(x, normed, padding) if plain else self.remember(x if key is None else key, padding)
            )
        keys, padding = remembered.key, remembered.padding
        if keys.dim() != 4 or keys.shape[:2] != (x.shape[0], self.num_heads):
            raise InvalidArgument(
                f"rows to attend to must be (batch, heads, n, head size) with batch {x.shape[0]} and {self.num_heads} heads; "
                f"got {tuple(keys.shape)}: x and key share the batch"
            )
        mask = layer_mask(x.shape[0], self.num_heads, x.shape[1], keys.shape[2], attn_mask, padding, False)
        return _Call(x, self.query(normed), keys, remembered.value, mask)

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)

    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, norm_kv={self.norm_kv}, scale={self.scale!r}, "
            f"residual={self.residual!r}, inducing={self.inducing}, impl={self.impl!r}"
        )


class _Call(NamedTuple):
    """Rows without padding, their projected queries `[B, m, w]`, and the keys, values and mask that `attend` is called with."""

    x: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None


def _without(rows: Tensor, padding: Tensor | None) -> Tensor:
    """Zeros in place of padding: hidden from attention, NaN in it would still reach the gradients of the maps in."""
    if padding is None or padding.dtype != torch.bool or padding.shape != rows.shape[:2]:
        return rows
    return rows.masked_fill(padding[..., None], 0.0)


# What the authors call the parts of a block; the second map of the network comes behind a dropout, where there is one.
AUTHORS = {
    "fc_q": "query", "fc_k": "key", "fc_v": "value", "fc_mix_heads": "out", "fc_res": "skip", "ln0": "norm1", "ln1": "norm2",
    "rff.0": "linear1", "rff.2": "linear2", "rff.3": "linear2",
}  # fmt: skip


def authors_state(state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The state dict of a `DatapointBlock` from that of a block of Kossen et al. (2021), in their code's names.

    Of a whole model's, `prefix` says which block: `"enc.1."` is the first between rows, `"enc.3."` the first between columns, and so on
    by odd numbers. The block that computes the same has `norm_kv=False, scale="width", eps=1e-12`.

    >>> import torch
    >>> sorted(authors_state({"enc.1.mab.fc_res.bias": torch.zeros(2), "enc.1.mab.rff.3.bias": torch.zeros(2)}, "enc.1."))
    ['linear2.bias', 'skip.bias']
    """
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not name.startswith(prefix):
            continue
        part, _, kind = name.removeprefix(prefix).removeprefix("mab.").rpartition(".")
        if part not in AUTHORS:
            raise InvalidArgument(
                f"{name!r} is none of a block's parameters, mab.{{{', '.join(AUTHORS)}}}; "
                f"got prefix={prefix!r}, give that of one block, as 'enc.1.'"
            )
        found[f"{AUTHORS[part]}.{kind}"] = tensor
    return found

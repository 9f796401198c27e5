"""Multi-head attention with any kernel, a drop-in for `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from heedful import masks
from heedful._attend import attend
from heedful._checks import check_whole
from heedful._errors import InvalidArgument
from heedful.kernels import Kernel
from heedful.masks import Mask
from heedful.nn._module import KernelModule, check_heads, check_input, layer_mask


class Attention(KernelModule):
    r"""`torch.nn.MultiheadAttention` with a kernel: $\mathrm{head}_h = \kappa(X W^Q_h, Y W^K_h)\, Y' W^V_h$.

    Constructor, `forward`, masks (True = ignore) and state dict are those of `nn.MultiheadAttention`, whose weights load
    as they are. Where ours differs:

    - `batch_first` is True by default; inputs are `(batch, seq, embed)`, or `(seq, embed)` without a batch;
    - `kernel` says what a coefficient is (default `Softmax()`); its tensors that require gradients are learned;
    - `num_kv_heads` shares key and value heads between groups of query heads;
    - `key` and `value` default to `query`; `is_causal=True` needs no mask beside it, and with one means *and*;
    - a query that may attend to nothing gets zeros before the output map, where torch gives NaN;
    - returned weights are those before dropout, and asking for them never changes the output.

    >>> import torch, heedful
    >>> layer = heedful.nn.Attention(32, 4, kernel=heedful.Sigmoid(bias=-2.0))
    >>> x = torch.randn(2, 7, 32)
    >>> y, weights = layer(x, is_causal=True)
    >>> y.shape, weights.shape
    (torch.Size([2, 7, 32]), torch.Size([2, 7, 7]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        kernel: Kernel | None = None,
        num_kv_heads: int | None = None,
        impl: str = "auto",
    ) -> None:
        check_heads(embed_dim, num_heads, num_kv_heads)
        check_whole(optional=True, kdim=kdim, vdim=vdim)
        super().__init__(kernel, num_heads, dropout, impl, device)
        self.embed_dim, self.num_heads, self.bias = embed_dim, num_heads, bias
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.batch_first, self.add_zero_attn = batch_first, add_zero_attn
        # Torch's encoder layers ask for this before their fast path, which knows softmax alone.
        self._qkv_same_embed_dim = False
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.add_bias_kv = add_bias_kv
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        shared = self.head_dim * self.num_kv_heads
        self._sizes = [embed_dim, shared, shared]

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, **place))

        packed = self.kdim == self.vdim == embed_dim
        self.in_proj_weight = empty(sum(self._sizes), embed_dim) if packed else None
        self.q_proj_weight = None if packed else empty(embed_dim, embed_dim)
        self.k_proj_weight = None if packed else empty(shared, self.kdim)
        self.v_proj_weight = None if packed else empty(shared, self.vdim)
        self.in_proj_bias = empty(sum(self._sizes)) if bias else None
        self.bias_k = empty(1, 1, shared) if add_bias_kv else None
        self.bias_v = empty(1, 1, shared) if add_bias_kv else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **place)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The start of `nn.MultiheadAttention`: Glorot for the maps in, zeros for biases."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Mask | Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the coefficients (averaged over heads unless told otherwise) or None.

        Shapes: query `(B, Q, embed)`, key `(B, K, kdim)`, value `(B, K, vdim)`, `key_padding_mask` `(B, K)`, `attn_mask`
        `(Q, K)` or `(B * heads, Q, K)`; boolean True = ignore, floats are added to the score. A heedful mask also serves.
        """
        key = query if key is None else key
        value = key if value is None else value
        batched = query.dim() == 3
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            raise InvalidArgument(
                f"query, key and value must all be (batch, seq, embed) or all (seq, embed); got {shapes}"
            )
        inputs = [query, key, value] if batched else [x[None] for x in (query, key, value)]
        if batched and not self.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        for name, x, width in zip(
            ("query", "key", "value"), inputs, (self.embed_dim, self.kdim, self.vdim), strict=True
        ):
            check_input(name, x, width)
        if not inputs[0].shape[0] == inputs[1].shape[0] == inputs[2].shape[0]:
            raise InvalidArgument(f"query, key and value must share the batch; got {[x.shape[0] for x in inputs]}")
        mask = self._mask(inputs[0], inputs[1], key_padding_mask, attn_mask, is_causal)
        queries, keys, values = self._project(*inputs)
        kernel = self.kernel
        shared: dict[str, Any] = {"enable_gqa": self.num_kv_heads != self.num_heads, "kernel": kernel}
        dropout = self.dropout if self.training else 0.0
        out = attend(queries, keys, values, mask, dropout, impl=self.impl, **shared)  # [B, H, Q, D]
        out = self.out_proj(out.transpose(1, 2).flatten(-2))
        weights = attend.coefficients(queries, keys, mask, **shared) if need_weights else None
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _mask(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Mask | Tensor | None,
        is_causal: bool,
    ) -> Mask | None:
        batch, keys = key.shape[:2]
        mask = layer_mask(batch, self.num_heads, query.shape[1], keys, attn_mask, key_padding_mask, is_causal)
        extra = self.add_bias_kv + self.add_zero_attn
        return masks.beside(mask, keys, None, extra) if extra else mask

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """`[B, n, E]` three times -> `[B, heads, n, D]` three times."""
        biases = [None] * 3 if self.in_proj_bias is None else list(self.in_proj_bias.split(self._sizes))
        if self.in_proj_weight is not None and query is key is value:
            projected = list(linear(query, self.in_proj_weight, self.in_proj_bias).split(self._sizes, dim=-1))
        else:
            weights = (
                self.in_proj_weight.split(self._sizes)
                if self.in_proj_weight is not None
                else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            )
            projected = [linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]
        for place, extra in ((1, self.bias_k), (2, self.bias_v)):
            x = projected[place]
            if extra is not None:
                x = torch.cat((x, extra.expand(x.shape[0], -1, -1)), dim=1)
            if self.add_zero_attn:
                x = torch.cat((x, torch.zeros_like(x[:, :1])), dim=1)
            projected[place] = x
        return [x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in projected]

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, impl={self.impl!r}"

"""Attention and a feed-forward network with residual connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional

from heedful._errors import InvalidArgument
from heedful.kernels import Kernel
from heedful.masks import Mask
from heedful.nn._module import Module
from heedful.nn.attention import Attention

Norm = Literal["layer", "rms"]
Activation = Literal["gelu", "relu", "silu"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}


class Block(Module):
    """One Transformer layer with any kernel; the state dict of `nn.TransformerEncoderLayer` loads as it is.

    `norm_first` (the default) normalises before attention and network, else after the residual sums. `norm="layer"` is
    LayerNorm; `norm="rms"` is RMSNorm without gain, which keeps orthogonal symmetry where LayerNorm breaks it.

    >>> import torch, heedful
    >>> block = heedful.nn.Block(32, 4, kernel=heedful.Gaussian())
    >>> block(torch.randn(2, 7, 32)).shape
    torch.Size([2, 7, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        hidden: int | None = None,
        dropout: float = 0.0,
        *,
        kernel: Kernel | None = None,
        activation: Activation = "gelu",
        norm: Norm = "layer",
        norm_first: bool = True,
        bias: bool = True,
        num_kv_heads: int | None = None,
        impl: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise InvalidArgument(f"activation must be one of {', '.join(_ACTIVATIONS)}; got {activation!r}")
        self.embed_dim, self.num_heads, self.activation, self.norm = embed_dim, num_heads, activation, norm
        self.hidden = 4 * embed_dim if hidden is None else hidden
        self.norm_first, self.bias, self.impl = norm_first, bias, impl
        self.dropout = dropout
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.self_attn = Attention(
            embed_dim, num_heads, dropout, bias, kernel=kernel, num_kv_heads=num_kv_heads, impl=impl, **place
        )
        self.num_kv_heads = self.self_attn.num_kv_heads
        self.linear1 = nn.Linear(embed_dim, self.hidden, bias=bias, **place)
        self.linear2 = nn.Linear(self.hidden, embed_dim, bias=bias, **place)
        self.norm1 = make_norm(norm, embed_dim, bias, **place)
        self.norm2 = make_norm(norm, embed_dim, bias, **place)

    @property
    def kernel(self) -> Kernel:
        return self.self_attn.kernel

    def forward(
        self,
        x: Tensor,
        attn_mask: Mask | Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """`(B, n, embed)` -> `(B, n, embed)`; masks as in `Attention`."""
        if self.norm_first:
            x = x + self._attend(self.norm1(x), attn_mask, key_padding_mask, is_causal)
            return x + self._network(self.norm2(x))
        x = self.norm1(x + self._attend(x, attn_mask, key_padding_mask, is_causal))
        return self.norm2(x + self._network(x))

    def _attend(self, x: Tensor, attn_mask: Mask | Tensor | None, padding: Tensor | None, is_causal: bool) -> Tensor:
        out, _ = self.self_attn(
            x, key_padding_mask=padding, need_weights=False, attn_mask=attn_mask, is_causal=is_causal
        )
        return functional.dropout(out, self.dropout, self.training)

    def _network(self, x: Tensor) -> Tensor:
        inner = functional.dropout(_ACTIVATIONS[self.activation](self.linear1(x)), self.dropout, self.training)
        return functional.dropout(self.linear2(inner), self.dropout, self.training)


def make_norm(kind: str, size: int, bias: bool, device: Any, dtype: Any) -> nn.Module:
    if kind == "layer":
        return nn.LayerNorm(size, bias=bias, device=device, dtype=dtype)
    if kind == "rms":
        return nn.RMSNorm(size, elementwise_affine=False, device=device, dtype=dtype)
    raise InvalidArgument(f"norm must be 'layer' or 'rms'; got {kind!r}")

"""Attention and a feed-forward network with residual connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

from torch import Tensor, nn
from torch.nn import functional

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument, Unsupported
from heedful.kernels import Kernel, Softmax
from heedful.masks import Mask
from heedful.nn._describe import Layer, Primal, find_layer
from heedful.nn._module import Module, check_heads
from heedful.nn.attention import Attention
from heedful.nn.primal import PrimalAttention

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

    `kernel` is a kernel (default `Softmax()`), a `Primal()`, or one of the names `"softmax"`, `"linear"` (`FeatureMap("elu")`),
    `"primal"` and `"none"`, which leaves attention out: tokens do not mix, the control of every comparison. A primal layer whose
    weights depend on the data needs `max_len`; `num_kv_heads` and `impl` are for kernels.

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
        kernel: Layer | None = None,
        activation: Activation = "gelu",
        norm: Norm = "layer",
        norm_first: bool = True,
        bias: bool = True,
        num_kv_heads: int | None = None,
        impl: str = "auto",
        max_len: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads, num_kv_heads)
        check_number(least=0, high=1, dropout=dropout)
        check_whole(optional=True, hidden=hidden)
        layer = Softmax() if kernel is None else find_layer(kernel)
        check_choice(_ACTIVATIONS, activation=activation)
        self.embed_dim, self.num_heads, self.activation, self.norm = embed_dim, num_heads, activation, norm
        self.hidden = 4 * embed_dim if hidden is None else hidden
        self.norm_first, self.bias, self.impl = norm_first, bias, impl
        self.dropout = dropout
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.max_len = max_len
        self.self_attn: Attention | PrimalAttention | None = None
        if isinstance(layer, Primal):
            self.self_attn = PrimalAttention(
                embed_dim, num_heads, max_len=max_len, bias=bias, **layer.arguments(), **place
            )
        elif isinstance(layer, Kernel):
            self.self_attn = Attention(
                embed_dim, num_heads, dropout, bias, kernel=layer, num_kv_heads=num_kv_heads, impl=impl, **place
            )
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.linear1 = nn.Linear(embed_dim, self.hidden, bias=bias, **place)
        self.linear2 = nn.Linear(self.hidden, embed_dim, bias=bias, **place)
        self.norm1 = None if self.self_attn is None else make_norm(norm, embed_dim, bias, **place)
        self.norm2 = make_norm(norm, embed_dim, bias, **place)

    @property
    def kernel(self) -> Kernel | Primal | Literal["none"]:
        """What mixes the tokens: the kernel, the primal layer as data, or `"none"`."""
        if self.self_attn is None:
            return "none"
        return self.self_attn.kernel if isinstance(self.self_attn, Attention) else self.self_attn.description

    def resize_(self, max_len: int) -> Self:
        """Changes `max_len`: see `PrimalAttention.resize_`. Layers whose parameters know no length stay as they are."""
        check_whole(max_len=max_len)
        if isinstance(self.self_attn, PrimalAttention) and self.self_attn.weights == "data":
            self.self_attn.resize_(max_len)
        self.max_len = max_len
        return self

    def forward(
        self,
        x: Tensor,
        attn_mask: Mask | Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """`(B, n, embed)` -> `(B, n, embed)`; masks as in `Attention`."""
        if self.norm_first:
            if self.norm1 is not None:
                x = x + self._attend(self.norm1(x), attn_mask, key_padding_mask, is_causal)
            return x + self._network(self.norm2(x))
        if self.norm1 is not None:
            x = self.norm1(x + self._attend(x, attn_mask, key_padding_mask, is_causal))
        return self.norm2(x + self._network(x))

    def _attend(self, x: Tensor, attn_mask: Mask | Tensor | None, padding: Tensor | None, is_causal: bool) -> Tensor:
        if isinstance(self.self_attn, PrimalAttention):
            _refuse(self.self_attn, attn_mask, is_causal)
            out = self.self_attn(x, padding)
        else:
            assert self.self_attn is not None
            out, _ = self.self_attn(
                x, key_padding_mask=padding, need_weights=False, attn_mask=attn_mask, is_causal=is_causal
            )
        return functional.dropout(out, self.dropout, self.training)

    def _network(self, x: Tensor) -> Tensor:
        inner = functional.dropout(_ACTIVATIONS[self.activation](self.linear1(x)), self.dropout, self.training)
        return functional.dropout(self.linear2(inner), self.dropout, self.training)


def _refuse(layer: PrimalAttention, attn_mask: Mask | Tensor | None, is_causal: bool) -> None:
    """A primal layer has no coefficient per pair to hide."""
    if attn_mask is not None:
        raise Unsupported(
            "a primal layer has no coefficient per pair, so attn_mask cannot act on it; give key_padding_mask for padding, "
            "Primal(causal='prefix') for causality, or a kernel such as Softmax() for this layer"
        )
    if is_causal and not layer.causal:
        raise Unsupported(
            "is_causal=True, but this primal layer sees the whole sequence; make it Primal(causal='prefix') or "
            "Primal(causal='cummean')"
        )


def make_norm(kind: str, size: int, bias: bool, device: Any, dtype: Any) -> nn.Module:
    if kind == "layer":
        return nn.LayerNorm(size, bias=bias, device=device, dtype=dtype)
    if kind == "rms":
        return nn.RMSNorm(size, elementwise_affine=False, device=device, dtype=dtype)
    raise InvalidArgument(f"norm must be 'layer' or 'rms'; got {kind!r}")

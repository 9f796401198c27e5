"""A stack of blocks, each with a kernel of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from heedful._errors import InvalidArgument
from heedful.kernels import Kernel
from heedful.masks import Mask
from heedful.nn._module import Module
from heedful.nn.block import Activation, Block, Norm, make_norm


class Encoder(Module):
    """Blocks in a row, one per kernel in `kernels`, and a last normalisation where blocks normalise first.

    Without positions the encoder is permutation equivariant; it has no parameter that depends on the sequence's length.

    >>> import torch, heedful
    >>> encoder = heedful.nn.Encoder(32, 4, kernels=[heedful.Softmax(), heedful.Gaussian()])
    >>> encoder(torch.randn(2, 7, 32)).shape
    torch.Size([2, 7, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kernels: Sequence[Kernel],
        hidden: int | None = None,
        dropout: float = 0.0,
        *,
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
        if (
            isinstance(kernels, Kernel)
            or not isinstance(kernels, Sequence)
            or not kernels
            or not all(isinstance(kernel, Kernel) for kernel in kernels)
        ):
            raise InvalidArgument(
                f"kernels must be a list of kernels, one per layer, as [Softmax()] * 6; got {kernels!r:.100}"
            )
        self.embed_dim, self.num_heads, self.dropout, self.activation = embed_dim, num_heads, dropout, activation
        self.norm_first, self.bias, self.impl = norm_first, bias, impl
        self.norm = norm
        self.layers = nn.ModuleList(
            Block(
                embed_dim,
                num_heads,
                hidden,
                dropout,
                kernel=kernel,
                activation=activation,
                norm=norm,
                norm_first=norm_first,
                bias=bias,
                num_kv_heads=num_kv_heads,
                impl=impl,
                device=device,
                dtype=dtype,
            )
            for kernel in kernels
        )
        first = self.layers[0]
        assert isinstance(first, Block)
        self.hidden, self.num_kv_heads = first.hidden, first.num_kv_heads
        self.last_norm = make_norm(norm, embed_dim, bias, device, dtype) if norm_first else nn.Identity()

    @property
    def kernels(self) -> list[Kernel]:
        return [layer.kernel for layer in self.layers]  # type: ignore[misc]

    def forward(
        self,
        x: Tensor,
        attn_mask: Mask | Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """`(B, n, embed)` -> `(B, n, embed)`; masks as in `Attention`."""
        for layer in self.layers:
            x = layer(x, attn_mask, key_padding_mask, is_causal)
        return self.last_norm(x)

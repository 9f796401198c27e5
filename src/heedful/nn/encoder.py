"""A stack of blocks, each with a kernel of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

from torch import Tensor, nn

from heedful._checks import check_whole
from heedful._errors import InvalidArgument
from heedful.kernels import Kernel
from heedful.masks import Mask
from heedful.nn._describe import Description, Layer, find_layer
from heedful.nn._module import Activation, Module
from heedful.nn.block import Block, Evolved, Norm, make_norm


class Encoder(Module):
    """Blocks in a row, one per entry of `kernels`, and a last normalisation where blocks normalise first.

    An entry is a kernel, a `Primal()`, `Knowledge()`, `Pairs()` or `Timed()`, or one of the names `"softmax"`, `"linear"`, `"primal"`, `"none"`; see `Block`. With kernels
    alone and without positions the encoder is permutation equivariant, and no parameter depends on the sequence's length;
    primal layers know positions, and those with data-dependent weights need `max_len`. Knowledge z, where a layer reads it, goes
    through the stack beside the tokens and evolves with them: `out, z = encoder(x, z=z)`; see `Block`.

    >>> import torch, heedful
    >>> encoder = heedful.nn.Encoder(32, 4, kernels=[heedful.Softmax(), heedful.Gaussian()])
    >>> encoder(torch.randn(2, 7, 32)).shape
    torch.Size([2, 7, 32])
    >>> hybrid = heedful.nn.Encoder(32, 4, kernels=["softmax", "primal"], max_len=100)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kernels: Sequence[Layer],
        hidden: int | None = None,
        dropout: float = 0.0,
        *,
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
        if isinstance(kernels, str) or not isinstance(kernels, Sequence) or not kernels:
            raise InvalidArgument(
                f"kernels must be a list of kernels, one per layer, as [Softmax()] * 6; got {kernels!r:.100}"
            )
        forms = [find_layer(kernel) for kernel in kernels]
        self.embed_dim, self.num_heads, self.dropout, self.activation = embed_dim, num_heads, dropout, activation
        self.norm_first, self.bias, self.impl = norm_first, bias, impl
        self.norm, self.max_len = norm, max_len
        self.layers = nn.ModuleList(
            Block(
                embed_dim,
                num_heads,
                hidden,
                dropout,
                kernel=form,
                activation=activation,
                norm=norm,
                norm_first=norm_first,
                bias=bias,
                num_kv_heads=num_kv_heads,
                impl=impl,
                max_len=max_len,
                device=device,
                dtype=dtype,
            )
            for form in forms
        )
        first = self.layers[0]
        assert isinstance(first, Block)
        self.hidden, self.num_kv_heads = first.hidden, num_heads if num_kv_heads is None else num_kv_heads
        self.last_norm = make_norm(norm, embed_dim, bias, device, dtype) if norm_first else nn.Identity()

    @property
    def kernels(self) -> list[Kernel | Description | Literal["none"]]:
        """What mixes tokens in each layer."""
        return [layer.kernel for layer in self.layers]  # type: ignore[misc]

    def resize_(self, max_len: int) -> Self:
        """Changes `max_len` of every layer that has one; parameters that change are new ones, so make the optimizer anew."""
        check_whole(max_len=max_len)
        for layer in self.layers:
            layer.resize_(max_len)  # type: ignore[operator]
        self.max_len = max_len
        return self

    def forward(
        self,
        x: Tensor,
        attn_mask: Mask | Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        z: Tensor | None = None,
        z_padding_mask: Tensor | None = None,
        times: Tensor | None = None,
    ) -> Any:
        """`(B, n, embed)` -> `(B, n, embed)`; masks as in `Attention`; primal layers take no `attn_mask`.

        With z `(k, embed)` or `(B, k, embed)`, tokens and knowledge behind all layers. `times` `(B, n)` are for layers of `Timed()`.
        """
        if z is None and z_padding_mask is not None:
            raise InvalidArgument(f"got z_padding_mask of shape {tuple(z_padding_mask.shape)}, but no z was given")
        if z is not None and not any(layer.reads_knowledge for layer in self.layers):
            raise InvalidArgument("no layer of this encoder reads z; give kernels=[Knowledge(...)] or leave z out")
        if times is not None and not any(layer.reads_times for layer in self.layers):
            raise InvalidArgument("no layer of this encoder reads times; give kernels=[Timed(...)] or leave times out")
        for layer in self.layers:
            at = times if layer.reads_times else None
            if z is None:
                x = layer(x, attn_mask, key_padding_mask, is_causal, times=at)
            else:
                x, z = layer(x, attn_mask, key_padding_mask, is_causal, z=z, z_padding_mask=z_padding_mask, times=at)
        return self.last_norm(x) if z is None else Evolved(self.last_norm(x), self.last_norm(z))

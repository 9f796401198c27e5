"""The network: positions, an encoder of any attention, and a head that reads all steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument
from heedful.nn import Encoder, Module

Head = Literal["flatten", "mean"]


class SeriesNetwork(Module):
    r"""Series to logits: the network of the time series experiments in Chen et al. (2023), "Primal-Attention".

    $$h_t = \sqrt{d}\, (W x_t + b) + p_t, \qquad z = \mathrm{GELU}(\mathrm{LayerNorm}(\mathrm{Encoder}(h))), \qquad
    \mathrm{logits} = V [z_1, \dots, z_n] \;\text{ or }\; V \operatorname{mean}_t z_t$$

    with learned positions $p_t$, layers that normalise after each residual sum, and z set to zero where a series is padded.
    `head="flatten"` has weights of its own for each of the `max_len` steps; `head="mean"` averages over the series' own
    steps, so that its size does not grow with them.

    Where ours differs: padding is hidden from every attention too.

    >>> import torch
    >>> network = SeriesNetwork(channels=3, classes=4, max_len=20, embed_dim=16, num_heads=2)
    >>> padding = torch.arange(20) >= torch.tensor([[20], [13]])
    >>> network(torch.randn(2, 20, 3), padding).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        max_len: int,
        embed_dim: int = 64,
        num_heads: int = 8,
        kernels: Sequence[Any] = ("softmax", "primal"),
        hidden: int | None = None,
        dropout: float = 0.1,
        *,
        head: Head = "flatten",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_whole(channels=channels, classes=classes, max_len=max_len)
        check_choice(Head, head=head)
        self.channels, self.classes, self.max_len, self.head = channels, classes, max_len, head
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.encoder = Encoder(
            embed_dim, num_heads, list(kernels), hidden, dropout, norm_first=False, max_len=max_len, **place
        )
        self.hidden = self.encoder.hidden
        self.input = nn.Linear(channels, embed_dim, **place)
        self.positions = nn.Parameter(torch.empty(max_len, embed_dim, **place).uniform_(-0.02, 0.02))
        self.norm = nn.LayerNorm(embed_dim, **place)
        self.output = nn.Linear(embed_dim * (max_len if head == "flatten" else 1), classes, **place)

    @property
    def kernels(self) -> list[Any]:
        return self.encoder.kernels

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """`(B, n, channels)` with n up to `max_len`, and `(B, n)` that is True behind a series' end -> `(B, classes)`."""
        if x.dim() != 3 or x.shape[2] != self.channels or not 1 <= x.shape[1] <= self.max_len:
            raise InvalidArgument(
                f"x must have shape (batch, n, {self.channels}) with n from 1 to {self.max_len}; got {tuple(x.shape)}"
            )
        if padding.shape != x.shape[:2]:
            raise InvalidArgument(f"padding must have shape {tuple(x.shape[:2])}; got {tuple(padding.shape)}")
        x = x.masked_fill(padding[..., None], 0.0)
        hidden = math.sqrt(self.embed_dim) * self.input(x) + self.positions[: x.shape[1]]
        hidden = self.encoder(functional.dropout(hidden, self.dropout, self.training), key_padding_mask=padding)
        hidden = functional.dropout(functional.gelu(self.norm(hidden)), self.dropout, self.training)
        hidden = hidden.masked_fill(padding[..., None], 0.0)  # [B, n, embed]
        if self.head == "mean":
            return self.output(hidden.sum(1) / (~padding).sum(1, keepdim=True).clamp(min=1))
        # Weights of steps behind the longest series of this batch would meet zeros.
        weight = self.output.weight[:, : hidden[0].numel()]
        return functional.linear(hidden.flatten(1), weight, self.output.bias)

"""The parts of the model that are not its heads: image tokens by a transformer on patches, and positions that can be seen."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from heedful._errors import InvalidArgument
from heedful.kernels import Softmax
from heedful.nn import Attention, Block, Encoder, Positions

__all__ = ["PatchEncoder", "Where", "line_positions", "plane_positions"]

# "small" and "none" are controls that cannot relate.
Where = Literal["sincos", "small", "none"]
SMALL = 0.02


def line_positions(length: int, width: int) -> Tensor:
    """Sines and cosines of places on a line, `(length, width)`, of variance 1: as large as normalised features.

    >>> line_positions(7, 12).square().mean().round(decimals=4)
    tensor(1.)
    """
    return (math.sqrt(2) * Positions(width).table(length)).float()


def plane_positions(rows: int, columns: int, width: int) -> Tensor:
    """Sines and cosines of places in a plane, row by row, `(rows x columns, width)`: one half is of the row, the other of the column."""
    if width % 4:
        raise InvalidArgument(f"positions in a plane need a width that is a multiple of 4; got {width}")
    down, right = line_positions(rows, width // 2), line_positions(columns, width // 2)
    return torch.cat((down.repeat_interleave(columns, 0), right.repeat(rows, 1)), 1)


def positions(kind: Where, full: Tensor) -> nn.Parameter | None:
    """Learned positions that start as these, or small ones, or none."""
    if kind == "none":
        return None
    return nn.Parameter(full if kind == "sincos" else SMALL * torch.randn_like(full))


class PatchEncoder(nn.Module):
    """Image tokens: patches of pixels, mapped linearly, with positions, through blocks of self-attention over the whole image.

    `encoder(pixels)` is `(B, tokens, width)`, of pixels `(B, channels, H, W)`; with `attention=True` also the weights
    of the last layer, averaged over heads, `(B, tokens, tokens)`, without gradients: which image tokens belong
    together.

    >>> encoder = PatchEncoder(64, 16, width=32, heads=4, layers=2)
    >>> tokens, weights = encoder(torch.rand(2, 3, 64, 64), attention=True)
    >>> tokens.shape, weights.shape
    (torch.Size([2, 16, 32]), torch.Size([2, 16, 16]))
    """

    def __init__(
        self,
        image_size: int = 64,
        patch_size: int = 8,
        channels: int = 3,
        width: int = 128,
        heads: int = 4,
        layers: int = 3,
        *,
        dropout: float = 0.0,
        where: Where = "sincos",
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise InvalidArgument(f"patch_size {patch_size} does not divide image_size {image_size}")
        self.image_size, self.patch_size, self.channels, self.width = image_size, patch_size, channels, width
        side = image_size // patch_size
        self.tokens = side**2
        self.patch = nn.Linear(channels * patch_size**2, width)
        self.positions = positions(where, plane_positions(side, side, width))
        self.encoder = Encoder(width, heads, [Softmax()] * layers, dropout=dropout)

    def forward(self, pixels: Tensor, attention: bool = False) -> Any:
        cut = patches(pixels, self.patch_size)
        if pixels.shape[1:] != (self.channels, self.image_size, self.image_size):
            raise InvalidArgument(
                f"pictures have {self.channels} channels of {self.image_size} x {self.image_size} pixels; got shape {tuple(pixels.shape)}"
            )
        x = self.patch(cut)
        if self.positions is not None:
            x = x + self.positions
        *before, last = self.encoder.layers
        for layer in before:
            x = layer(x)
        weights = self._weights(last, x) if attention else None
        x = self.encoder.last_norm(last(x))
        return (x, weights) if attention else x

    @torch.no_grad()
    def _weights(self, layer: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(layer, Block)
        assert isinstance(layer.self_attn, Attention)
        assert layer.norm1 is not None
        weights = layer.self_attn(layer.norm1(x))[1]
        assert weights is not None
        return weights


def patches(pixels: Tensor, size: int) -> Tensor:
    """Pixels `(B, C, H, W)` -> `(B, tokens, C x size^2)`, row by row."""
    if pixels.ndim != 4 or pixels.shape[2] % size or pixels.shape[3] % size:
        raise InvalidArgument(
            f"pixels must be (batch, channels, height, width) of whole patches of {size}; got shape {tuple(pixels.shape)}"
        )
    rows, columns = pixels.shape[2] // size, pixels.shape[3] // size
    cut = pixels.unflatten(3, (columns, size)).unflatten(2, (rows, size))  # [B, C, rows, size, columns, size]
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

"""Weights as pictures: quantised, pooled, coloured, written as PNG by the standard library alone."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heedful._errors import InvalidArgument

Lch = tuple[float, float, float]
LEVELS = 256

# Paper to night blue by way of green: lightness falls all the way, so it reads without colour too.
SEQUENTIAL: tuple[Lch, ...] = ((0.985, 0.012, 100.0), (0.80, 0.115, 165.0), (0.52, 0.12, 235.0), (0.24, 0.09, 272.0))
# Blue for negative, orange for positive, paper for zero: the pair that every kind of colour vision tells apart.
NEGATIVE: tuple[Lch, ...] = ((0.985, 0.006, 250.0), (0.75, 0.105, 245.0), (0.42, 0.14, 258.0))
POSITIVE: tuple[Lch, ...] = ((0.985, 0.006, 80.0), (0.75, 0.135, 62.0), (0.42, 0.12, 50.0))


@lru_cache
def ramp(anchors: tuple[Lch, ...] = SEQUENTIAL, steps: int = LEVELS) -> bytes:
    """A palette of `steps` RGB triples through these colours (OKLCH), each step equally far from the last (OKLab).

    >>> colours = ramp(steps=3)
    >>> colours[:3].hex(), colours[-3:].hex()
    ('fcfaf1', '121849')
    """
    lightness, chroma, hue = np.array(anchors).T
    corners = np.stack((lightness, chroma * np.cos(np.radians(hue)), chroma * np.sin(np.radians(hue))), 1)
    # Straight between anchors, so that hues do not run round the wheel.
    along = np.linspace(0, len(anchors) - 1, 1001)
    path = np.stack([np.interp(along, range(len(anchors)), channel) for channel in corners.T], 1)
    # The colour itself, or the most colourful one of its lightness and hue that a screen can show.
    while (outside := (np.abs(_linear(path) - 0.5) > 0.5 + 1e-4).any(1)).any():
        path[outside, 1:] *= 0.98
    walked = np.concatenate(([0.0], np.linalg.norm(np.diff(path, axis=0), axis=1).cumsum()))
    chosen = np.searchsorted(walked, walked[-1] * np.arange(steps) / (steps - 1) - 1e-12)
    light = _linear(path[chosen]).clip(0.0, 1.0)
    channels = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    return (255 * channels).round().astype(np.uint8).tobytes()


@lru_cache
def diverging() -> bytes:
    """The palette of signed levels: 0 the most negative, 128 zero, 255 the most positive.

    >>> colours = diverging()
    >>> len(colours) // 3, colours[128 * 3 : 129 * 3].hex()
    (256, 'fcfaf6')
    """
    falling = ramp(NEGATIVE, 129)
    return b"".join(falling[3 * at : 3 * at + 3] for at in range(128, 0, -1)) + ramp(POSITIVE, 128)


def _linear(lab: NDArray[np.float64]) -> NDArray[np.float64]:
    """OKLab to linear sRGB (Ottosson 2020), `[n, 3]` both."""
    cones = np.array(
        [[1, 0.3963377774, 0.2158037573], [1, -0.1055613458, -0.0638541728], [1, -0.0894841775, -1.2914855480]]
    )
    light = np.array([[4.0767416621, -3.3077115913, 0.2309699292], [-1.2684380046, 2.6097574011, -0.3413193965],
                      [-0.0041960863, -0.7034186147, 1.7076147010]])  # fmt: skip
    return (lab @ cones.T) ** 3 @ light.T


def levels(weights: Tensor, scale: Tensor | float, *, signed: bool = False) -> Tensor:
    r"""Weights in 256 levels, finer near zero: $\mathrm{round}(255 \sqrt{w / s})$; signed, $128 + 127$ times the signed root.

    Read back as $s (l / 255)^2$, a weight is off by at most $\sqrt{w s} / 255 + s / 510^2$.

    >>> import torch
    >>> levels(torch.tensor([0.0, 0.25, 1.0]), 1.0)
    tensor([  0, 128, 255], dtype=torch.uint8)
    """
    relative = weights / torch.as_tensor(scale, dtype=weights.dtype).clamp_min(torch.finfo(weights.dtype).tiny)
    root = relative.abs().clamp_max(1).sqrt()
    return (128 + 127 * root * relative.sign() if signed else 255 * root).round().to(torch.uint8)


def pool(weights: Tensor, factor: int) -> Tensor:
    """`[..., Q, K]` with each block of `factor x factor` as its largest weight, or the one farthest from zero.

    >>> import torch
    >>> pool(torch.tensor([[0.1, -0.5, 0.2], [0.3, 0.0, 0.4]]), 2)
    tensor([[-0.5000,  0.4000]])
    """
    if factor == 1:
        return weights
    blocks = weights.reshape(-1, 1, *weights.shape[-2:])
    high = torch.nn.functional.max_pool2d(blocks, factor, ceil_mode=True)
    low = -torch.nn.functional.max_pool2d(-blocks, factor, ceil_mode=True)
    return torch.where(high >= -low, high, low).reshape(*weights.shape[:-2], *high.shape[-2:])


def png(pixels: Tensor, palette: bytes) -> bytes:
    """An indexed PNG of `[height, width]` bytes, coloured by a palette of RGB triples.

    >>> import torch
    >>> png(torch.zeros(2, 3, dtype=torch.uint8), bytes(3))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    if pixels.dim() != 2 or pixels.dtype != torch.uint8 or pixels.numel() == 0:
        raise InvalidArgument(f"pixels must be uint8 [height, width]; got {pixels.dtype} {tuple(pixels.shape)}")
    height, width = pixels.shape
    # Each row begins with its filter: 0, none.
    rows = torch.cat((torch.zeros(height, 1, dtype=torch.uint8), pixels.cpu()), dim=1).numpy().tobytes()

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = (
        chunk(b"IHDR", header),
        chunk(b"PLTE", palette),
        chunk(b"IDAT", zlib.compress(rows, 9)),
        chunk(b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def base64(content: bytes) -> str:
    """Bytes as text that may stand in a page.

    >>> base64(b"map")
    'bWFw'
    """
    return b64encode(content).decode("ascii")

"""Who takes part on the GPU: ours, and the ways people compute attention without us."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.accuracy import VARIANTS
from heedful import Gaussian, Kernel, ReluSquared, Sigmoid, Softmax, attend

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

# What all pairs may take as scores and coefficients of two bytes each, for who writes them out.
ROOM = 20e9


@dataclass(frozen=True)
class Setting:
    """What is timed: `role` says which bars read it."""

    role: str
    shape: tuple[int, int, int, int]  # batch, heads, length, head size
    is_causal: bool = False
    dtype: str = "bfloat16"
    device: str = "cuda"

    @property
    def name(self) -> str:
        named = self.role == "causal" or not self.is_causal
        return f"{self.role} {'x'.join(map(str, self.shape))}{'' if named else ' causal'}"

    @property
    def flops(self) -> float:
        """4 B H n^2 D forward, half of it when causal; backward counts 2.5 times that."""
        batch, heads, length, dim = self.shape
        return 4.0 * batch * heads * length**2 * dim / (2 if self.is_causal else 1)

    @property
    def matrix(self) -> float:
        """Bytes of scores and coefficients of all pairs."""
        batch, heads, length, _ = self.shape
        return 4.0 * batch * heads * length**2


class CannotTakePart(Exception):
    """Why a contestant is left out of a setting."""


@dataclass(frozen=True)
class Contestant:
    """A way to attend, and the kernel it must agree with. One of ours names the variant whose accuracy gates it."""

    name: str
    kernel: Kernel
    make: Callable[[Setting], Attention]
    variant: str | None = None
    is_compiled: bool = False


def ours(variant: str) -> Contestant:
    one = VARIANTS[variant]

    def make(setting: Setting) -> Attention:
        impl = one.on(setting.device)
        return lambda q, k, v: attend(q, k, v, is_causal=setting.is_causal, kernel=one.kernel, impl=impl)

    return Contestant(f"heedful {variant}", one.kernel, make, variant)


def fused(name: str, backend: SDPBackend) -> Contestant:
    def make(setting: Setting) -> Attention:
        if setting.device != "cuda" and backend is SDPBackend.CUDNN_ATTENTION:
            raise CannotTakePart("cuDNN is for CUDA devices")

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=setting.is_causal)

        return run

    return Contestant(name, Softmax(), make)


def _compiled(function: Callable[..., Tensor], setting: Setting) -> Callable[..., Tensor]:
    if setting.device != "cuda":
        raise CannotTakePart("compiled peers are timed on CUDA devices alone")
    return torch.compile(function, fullgraph=True, dynamic=False)


def _block_mask(setting: Setting) -> object:
    from torch.nn.attention.flex_attention import create_block_mask

    if not setting.is_causal:
        return None
    length = setting.shape[2]
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=setting.device)


def _flex(setting: Setting) -> Attention:
    from torch.nn.attention.flex_attention import flex_attention

    mask = _block_mask(setting)

    def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=mask)

    return _compiled(softmax, setting)


def _flex_gaussian(setting: Setting) -> Attention:
    """In log space: -||q - k||^2 / 2 l^2 is a scaled product, a term of the key, and a term that normalisation cancels."""
    from torch.nn.attention.flex_attention import flex_attention

    mask = _block_mask(setting)
    precision = setting.shape[-1] ** -0.5

    def of_keys(k: Tensor) -> Tensor:
        return -0.5 * precision * k.float().square().sum(-1)  # [B, H, K]

    def gaussian(q: Tensor, k: Tensor, v: Tensor, column: Tensor) -> Tensor:
        def of_the_key(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + column[b, h, j]

        return flex_attention(q, k, v, score_mod=of_the_key, block_mask=mask, scale=precision)

    # Two graphs: flex_attention takes a captured tensor as it lies in memory, not as a step of the same graph.
    column, attention = _compiled(of_keys, setting), _compiled(gaussian, setting)
    return lambda q, k, v: attention(q, k, v, column(k))


def sigmoid_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).sigmoid() @ v


def relu_squared_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).relu().square() @ v


def gaussian_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, columns = (x.float().square().sum(-1) for x in (q, k))
    distance = rows[..., :, None] + columns[..., None, :] - 2 * (q @ k.mT)
    return (distance * (-0.5 * q.shape[-1] ** -0.5)).exp().to(v.dtype) @ v


FORMULAS: dict[str, tuple[Kernel, Attention]] = {
    "Sigmoid": (Sigmoid(), sigmoid_formula),
    "ReluSquared": (ReluSquared(), relu_squared_formula),
    "Gaussian raw": (Gaussian(normalize=False), gaussian_formula),
}


def formula(variant: str, *, is_compiled: bool) -> Contestant:
    kernel, function = FORMULAS[variant]

    def make(setting: Setting) -> Attention:
        if setting.is_causal:
            raise CannotTakePart("the plain formula is not causal")
        if setting.matrix > ROOM:
            raise CannotTakePart(f"memory: {setting.matrix / 1e9:.0f} GB of coefficients, allowed {ROOM / 1e9:.0f} GB")
        return _compiled(function, setting) if is_compiled else function

    return Contestant(f"{'compiled' if is_compiled else 'eager'} {variant}", kernel, make, is_compiled=is_compiled)


FLEX = Contestant("FlexAttention softmax", Softmax(), _flex, is_compiled=True)
FLEX_GAUSSIAN = Contestant("FlexAttention Gaussian", Gaussian(), _flex_gaussian, is_compiled=True)
CUDNN = fused("cuDNN SDPA", SDPBackend.CUDNN_ATTENTION)
FLASH = fused("flash SDPA", SDPBackend.FLASH_ATTENTION)

UNNORMALISED = ("Sigmoid", "ReluSquared", "Gaussian raw")
OURS = [ours(name) for name in (*UNNORMALISED, "Gaussian", "Softmax")]

SWEEP = [
    Setting("sweep", (max(16384 // length, 1), 8, length, 64))
    for length in (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
]

FIELDS: dict[str, list[Contestant]] = {
    "bar": [
        *OURS,
        FLEX,
        FLEX_GAUSSIAN,
        CUDNN,
        FLASH,
        *(formula(name, is_compiled=True) for name in UNNORMALISED),
        *(formula(name, is_compiled=False) for name in UNNORMALISED),
    ],
    "causal": [*OURS, FLEX, CUDNN, FLASH],
    "linear": [ours("linear elu"), CUDNN],
    "sweep": [
        *(ours(name) for name in ("Sigmoid", "Gaussian raw", "Gaussian")),
        FLEX,
        CUDNN,
        FLASH,
        formula("Sigmoid", is_compiled=False),
    ],
}

"""Primal-Attention's fold as operators of torch: forward and backward of the kernels in `primal`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from heedful._errors import Unsupported

LARGEST = 128
"""The widest head and the widest output that the kernels take."""

ROWS = 64
"""Tokens of a block."""

_HAS_TRITON = find_spec("triton") is not None


def usable(query: Tensor, width: int, devices: frozenset[str]) -> bool:
    """Whether the kernels take queries `[B, H, n, p]` and outputs of this width."""
    if not _HAS_TRITON or query.device.type not in devices or query.dtype == torch.float64 or query.numel() == 0:
        return False
    if query.device.type == "cuda" and torch.cuda.get_device_properties(query.device).major < 8:
        return False
    return max(query.shape[-1], width) <= LARGEST and not torch._C._are_functorch_transforms_active()


def _settings(pair: Tensor, width: int) -> tuple[int, int, dict[str, Any]]:
    """How many spans the tokens are cut into, blocks of each, and what the kernels are compiled for."""
    import triton.language as tl

    batch, n, _, heads, size = pair.shape
    interpreted = pair.device.type == "cpu"
    rows = 16 if interpreted else ROWS
    blocks = -(-n // rows)
    # One program for each multiprocessor: partial sums stay few.
    programs = 0 if interpreted else torch.cuda.get_device_properties(pair.device).multi_processor_count
    each = 2 if interpreted else -(-batch * heads * blocks // programs)
    exact = pair.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return -(-blocks // each), each, {
        "P": size, "V": width, "BLOCK_P": _power(size), "BLOCK_V": _power(width), "ROWS": rows,
        "DOT": tl.bfloat16 if pair.dtype == torch.bfloat16 else tl.float32,
        "PRECISION": "ieee" if interpreted else "tf32x3" if exact else "tf32",
        "num_warps": 8,
    }  # fmt: skip


def _power(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("heedful::primal_fold", mutates_args=())
def primal_fold(
    pair: Tensor, mix: Tensor, bias: Tensor | None, keep: Tensor | None, gram: bool
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, n, H, v]` of `pair` `[B, n, 2, H, p]` by `mix` `[B, 2, H, p, v]`, and both Gram matrices `[B, 2, H, p, p]`."""
    from heedful.ops.fused import primal

    batch, n, _, heads, size = pair.shape
    width = mix.shape[-1]
    pair, mix = _unit(pair), mix.contiguous()
    spans, blocks, settings = _settings(pair, width)
    out = torch.empty(batch, n, heads, width, dtype=pair.dtype, device=pair.device)
    shape = (batch, heads, spans, 2, size, size) if gram else (0,)
    partial = torch.empty(shape, dtype=torch.float32, device=pair.device)
    primal.fold[(batch * heads, spans)](
        pair, mix, bias, None if keep is None else keep.contiguous().view(torch.uint8), out, partial, heads, n, blocks,
        *pair.stride()[:4], KEEP=keep is not None, BIAS=bias is not None, GRAM=gram, **settings,
    )  # fmt: skip
    return out, partial.sum(dim=2).transpose(1, 2).contiguous() if gram else partial


@primal_fold.register_fake
def _(pair: Tensor, mix: Tensor, bias: Tensor | None, keep: Tensor | None, gram: bool) -> tuple[Tensor, Tensor]:
    batch, n, _, heads, size = pair.shape
    shape = (batch, 2, heads, size, size) if gram else (0,)
    return pair.new_empty(batch, n, heads, mix.shape[-1]), pair.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("heedful::primal_fold_backward", mutates_args=())
def primal_fold_backward(
    pair: Tensor, mix: Tensor, keep: Tensor | None, above: Tensor, slope: Tensor | None, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `pair`, `mix` and the bias (empty where it has none); `slope` is that of the Gram matrices."""
    from heedful.ops.fused import primal

    batch, n, _, heads, size = pair.shape
    width = mix.shape[-1]
    pair, mix, above = _unit(pair), mix.contiguous(), _unit(above)
    spans, blocks, settings = _settings(pair, width)
    place: dict[str, Any] = {"dtype": torch.float32, "device": pair.device}
    dpair = torch.empty(pair.shape, dtype=pair.dtype, device=pair.device)
    dmix = torch.empty(batch, heads, spans, 2, size, width, **place)
    dbias = torch.empty((batch * heads * spans, width) if bias else (0,), **place)
    primal.fold_backward[(batch * heads, spans)](
        pair, mix, None if keep is None else keep.contiguous().view(torch.uint8), above,
        None if slope is None else (slope + slope.mT).contiguous(), dpair, dmix, dbias, heads, n, blocks,
        *pair.stride()[:4], *above.stride()[:3],
        KEEP=keep is not None, BIAS=bias, GRAM=slope is not None, **settings,
    )  # fmt: skip
    return dpair, dmix.sum(dim=2).transpose(1, 2).contiguous(), dbias.sum(dim=0) if bias else dbias


@primal_fold_backward.register_fake
def _(
    pair: Tensor, mix: Tensor, keep: Tensor | None, above: Tensor, slope: Tensor | None, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dmix = torch.empty_like(mix, dtype=torch.float32)
    return pair.new_empty(pair.shape), dmix, dmix.new_empty((mix.shape[-1],) if bias else (0,))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    pair, mix, bias, keep, ctx.gram = inputs
    ctx.save_for_backward(pair, mix, bias, keep)


def _gradients(ctx: Any, above: Tensor, slope: Tensor) -> tuple[Tensor | None, ...]:
    pair, mix, bias, keep = ctx.saved_tensors
    wanted = bias is not None and ctx.needs_input_grad[2]
    dpair, dmix, dbias = torch.ops.heedful.primal_fold_backward(
        pair, mix, keep, above, slope if ctx.gram else None, wanted
    )
    return dpair, dmix.to(mix.dtype), dbias.to(bias.dtype) if wanted else None, None, None


def _no_second(ctx: Any, *above: Tensor) -> None:
    raise Unsupported(
        "fused Primal-Attention has no second derivatives; heedful.ops.primal.FUSED = frozenset() turns it off"
    )


primal_fold.register_autograd(_gradients, setup_context=_keep)
primal_fold_backward.register_autograd(_no_second)

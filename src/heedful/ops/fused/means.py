"""The means of segments of a sequence as operators of torch: what stands for it in Primal-Attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heedful.ops.fused import primal_ops
from heedful.ops.fused._device import unit_stride
from heedful.ops.fused._eager import eager, recorded
from heedful.ops.fused.primal_ops import launch_of

BLOCK, WIDE = 16, 128  # tokens and columns of a tile


def usable(x: Tensor, devices: frozenset[str]) -> bool:
    """Whether the kernels take the means of segments of tokens `[B, n, d]`."""
    return primal_ops.usable(x, 1, 1, 1, devices)


def _means(x: Tensor, rows: int) -> Tensor:
    from heedful.ops.fused import prepared, primal

    x = unit_stride(x)

    def anew(launch: prepared.Launcher) -> Sequence[Tensor]:
        batch, n, width = x.shape
        out = launch.empty(batch, rows, width)
        launch(
            primal.means, (batch * rows, -(-width // WIDE)), x, out, n, rows, width, *x.stride()[:2],
            BLOCK=BLOCK, COLS=WIDE, num_warps=4, **launch_of(x.device),
        )  # fmt: skip
        return (out,)

    return prepared.again((x,), ("means", rows), anew, device=x.device)[0]


def _means_backward(above: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    from heedful.ops.fused import prepared, primal

    above = unit_stride(above)

    def anew(launch: prepared.Launcher) -> Sequence[Tensor]:
        batch, rows, width = above.shape
        dx = launch.empty(batch, n, width, dtype=dtype)
        launch(
            primal.means_backward, (batch * -(-n // BLOCK), -(-width // WIDE)),
            above, dx, n, rows, width, -(-rows // n), *above.stride()[:2],
            BLOCK=BLOCK, COLS=WIDE, num_warps=4, **launch_of(above.device),
        )  # fmt: skip
        return (dx,)

    return prepared.again((above,), ("means backward", n, dtype), anew, device=above.device)[0]


@torch.library.custom_op("heedful::segment_means", mutates_args=())
def segment_means(x: Tensor, rows: int) -> Tensor:
    """The means of so many segments of tokens `[B, n, d]`, in float32: `[B, rows, d]`; see `heedful.ops.primal.sample`."""
    return _means(x, rows)


@segment_means.register_fake
def _(x: Tensor, rows: int) -> Tensor:
    return x.new_empty(x.shape[0], rows, x.shape[2], dtype=torch.float32)


@torch.library.custom_op("heedful::segment_means_backward", mutates_args=())
def segment_means_backward(above: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """The gradient of n tokens in their type."""
    return _means_backward(above, n, dtype)


@segment_means_backward.register_fake
def _(above: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    return above.new_empty(above.shape[0], n, above.shape[2], dtype=dtype)


def _keep_means(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _ = inputs
    ctx.tokens = x.shape[1], x.dtype


def _means_gradient(ctx: Any, above: Tensor) -> tuple[Tensor, None]:
    is_plain = eager(above) and not torch.is_grad_enabled()
    return (_means_backward if is_plain else segment_means_backward)(above, *ctx.tokens), None


def _keep_means_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    above, *_ = inputs
    ctx.segments = above.shape[1], above.dtype


def _means_second(ctx: Any, above: Tensor) -> tuple[Tensor, None, None]:
    rows, dtype = ctx.segments
    return segment_means(above, rows).to(dtype), None, None


segment_means.register_autograd(_means_gradient, setup_context=_keep_means)
segment_means_backward.register_autograd(_means_second, setup_context=_keep_means_backward)


class _Means(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        _keep_means(ctx, (x, rows), x)
        return _means(x, rows)

    backward = staticmethod(_means_gradient)


def means(x: Tensor, rows: int) -> Tensor:
    """`segment_means` by the shortest way."""
    if not eager(x):
        return segment_means(x, rows)
    return _Means.apply(x, rows) if recorded(x) else _means(x, rows)

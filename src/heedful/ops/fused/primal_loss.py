"""Primal-Attention's loss as operators of torch: the mean of J^2, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heedful._runtime import transforming
from heedful.ops.fused._device import power_of_2
from heedful.ops.fused._eager import eager, recorded
from heedful.ops.fused.primal_ops import AVAILABLE, launch_of, no_second, whole

MOST = 4096
"""The most weights lambda of a layer that the kernels take."""


def usable(energy: Tensor, lam: Tensor, product: Tensor, tokens: Tensor, devices: frozenset[str]) -> bool:
    """Whether the kernel of the loss takes energies `[B, 2, H, s]`, lambda `[H, s]`, traces `[H]` and lengths `[B]`: none may broadcast."""
    if lam.shape != energy.shape[2:] or product.shape != lam.shape[:1] or tokens.shape != energy.shape[:1]:
        return False
    here = energy.device.type in devices and energy.device == lam.device and energy.dtype == torch.float32
    return here and AVAILABLE and lam.numel() <= MOST and not transforming()


def _loss_sizes(energy: Tensor) -> dict[str, Any]:
    _, _, heads, rank = energy.shape
    block = power_of_2(heads * rank)
    return {
        "SIZE": heads * rank, "BLOCK": block, "ROWS": max(1, 2048 // block), "HEADS": power_of_2(heads), "num_warps": 4,
        **launch_of(energy.device),
    }  # fmt: skip


def _penalty(energy: Tensor, lam: Tensor, product: Tensor, tokens: Tensor) -> Sequence[Tensor]:
    from heedful.ops.fused import prepared, primal

    energy, lam, product, tokens = (whole(x) for x in (energy, lam, product, tokens))
    batch, _, heads, _ = energy.shape

    def anew(launch: prepared.Launcher) -> Sequence[Tensor]:
        found = launch.empty(), launch.empty()
        launch(primal.penalty, (1,), energy, lam, product, tokens, *found, batch, heads, **_loss_sizes(energy))
        return found

    return prepared.again((energy, lam, product, tokens), ("penalty",), anew, device=energy.device)


def _penalty_backward(
    energy: Tensor, lam: Tensor, product: Tensor, tokens: Tensor, count: Tensor, above: Tensor
) -> Sequence[Tensor]:
    from heedful.ops.fused import prepared, primal

    given = tuple(whole(x) for x in (energy, lam, product, tokens, count, above))
    batch, _, heads, _ = energy.shape

    def anew(launch: prepared.Launcher) -> Sequence[Tensor]:
        found = launch.empty(*energy.shape), launch.empty(*lam.shape, dtype=lam.dtype), launch.empty(*product.shape)
        launch(primal.penalty_backward, (1,), *given, *found, batch, heads, **_loss_sizes(energy))
        return found

    return prepared.again(given, ("penalty backward",), anew, device=energy.device)


@torch.library.custom_op("heedful::primal_penalty", mutates_args=())
def primal_penalty(energy: Tensor, lam: Tensor, product: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of J^2, and of how many sequences, from energies `[B, 2, H, s]`, lambda `[H, s]`, traces `[H]`, lengths `[B]`."""
    out, count = _penalty(energy, lam, product, tokens)
    return out, count


@primal_penalty.register_fake
def _(energy: Tensor, lam: Tensor, product: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return energy.new_empty(()), energy.new_empty(())


@torch.library.custom_op("heedful::primal_penalty_backward", mutates_args=())
def primal_penalty_backward(
    energy: Tensor, lam: Tensor, product: Tensor, tokens: Tensor, count: Tensor, above: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of energies, lambda and traces."""
    denergy, dlam, dproduct = _penalty_backward(energy, lam, product, tokens, count, above)
    return denergy, dlam, dproduct


@primal_penalty_backward.register_fake
def _(
    energy: Tensor, lam: Tensor, product: Tensor, tokens: Tensor, count: Tensor, above: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return energy.new_empty(energy.shape), lam.new_empty(lam.shape), product.new_empty(product.shape)


def _keep_loss(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(False)


def _loss_gradients(ctx: Any, above: Tensor | None, _: Tensor | None = None) -> Any:
    if above is None:
        return None, None, None, None
    given = *ctx.saved_tensors, above
    run = (
        _penalty_backward
        if eager(*given) and not torch.is_grad_enabled()
        else torch.ops.heedful.primal_penalty_backward
    )
    return *run(*given), None


primal_penalty.register_autograd(_loss_gradients, setup_context=_keep_loss)
primal_penalty_backward.register_autograd(no_second)


class _Penalty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        found = _penalty(*inputs)
        _keep_loss(ctx, inputs, found)
        return found[0]

    backward = staticmethod(_loss_gradients)


def penalty(energy: Tensor, lam: Tensor, product: Tensor, tokens: Tensor) -> Tensor:
    """`primal_penalty` by the shortest way."""
    given = energy, lam, product, tokens
    if not eager(*given):
        return primal_penalty(*given)[0]
    return _Penalty.apply(*given) if recorded(*given) else _penalty(*given)[0]

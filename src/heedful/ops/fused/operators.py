"""Two operators of torch: fused attention and its gradients. Both have shapes without values, so that they compile and export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heedful._errors import Unsupported

NUMBER_OF_TENSORS = 13  # the leading arguments of both operators that are tensors


@torch.library.custom_op("heedful::fused_attention", mutates_args=())
def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor,
    beta: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    bias: Tensor | None,
    lengths: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    keep: Tensor | None,
    blocks: Tensor | None,
    block_size: Sequence[int],
    low: int | None,
    high: int | None,
    activation: str,
    degree: int,
    division: int,
    distance: bool,
) -> tuple[Tensor, Tensor]:
    """The output [B, H, Q, E], and the divisor of every row as backward needs it."""
    from heedful.ops.fused import launch

    problem = launch.Problem(
        query, key, value, alpha, beta, left, right, bias, lengths, query_ids, key_ids, keep, blocks,
        block_size, low, high, activation, degree, division, distance,
    )  # fmt: skip
    return launch.forward(problem)


@fused_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    division = rest[-2]
    out = value.new_empty(*query.shape[:-1], value.shape[-1])
    return out, query.new_empty(query.shape[:-1] if division else (0,), dtype=torch.float32)


@torch.library.custom_op("heedful::fused_attention_backward", mutates_args=())
def fused_attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor,
    beta: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    bias: Tensor | None,
    lengths: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    keep: Tensor | None,
    blocks: Tensor | None,
    out: Tensor,
    stat: Tensor,
    above: Tensor,
    block_size: Sequence[int],
    low: int | None,
    high: int | None,
    activation: str,
    degree: int,
    division: int,
    distance: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and, where wanted, of alpha, beta, left, right and bias."""
    from heedful.ops.fused import launch

    problem = launch.Problem(
        query, key, value, alpha, beta, left, right, bias, lengths, query_ids, key_ids, keep, blocks,
        block_size, low, high, activation, degree, division, distance,
    )  # fmt: skip
    gradients = launch.backward(problem, out, stat, above, wanted)
    # What nobody wants may be one tensor several times, which torch takes from no operator.
    others = (x if want else x.new_empty(0) for x, want in zip(gradients[3:], wanted, strict=True))
    return (*gradients[:3], *others)  # type: ignore[return-value]


@fused_attention_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    small = rest[:5]  # alpha, beta, left, right, bias
    gradients = [x.new_empty(x.shape) for x in (query, key, value)]
    empty = query.new_empty(0, dtype=torch.float32)
    return (
        *gradients,
        *(x.new_empty(x.shape) if want else empty.clone() for x, want in zip(small, rest[-1], strict=True)),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:NUMBER_OF_TENSORS], *output)
    ctx.settings = inputs[NUMBER_OF_TENSORS:]
    ctx.wanted = [bool(x) for x in ctx.needs_input_grad[3:8]]


def _gradients(ctx: Any, above: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.heedful.fused_attention_backward(*ctx.saved_tensors, above, *ctx.settings, ctx.wanted)
    chosen = (*gradients[:3], *(x if want else None for x, want in zip(gradients[3:], ctx.wanted, strict=True)))
    return (*chosen, *(None,) * (len(ctx.needs_input_grad) - len(chosen)))


def _no_second(ctx: Any, *above: Tensor) -> None:
    raise Unsupported("impl='triton' has no second derivatives; impl='stream' and impl='reference' have them")


fused_attention.register_autograd(_gradients, setup_context=_keep)
fused_attention_backward.register_autograd(_no_second)


class _Eager(torch.autograd.Function):
    """The same two launches without the dispatcher, whose handling of so many arguments takes longer than a small kernel."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        from heedful.ops.fused import launch

        out, stat = launch.forward(launch.Problem(*inputs))
        ctx.save_for_backward(*inputs[:NUMBER_OF_TENSORS], out, stat)
        ctx.settings = inputs[NUMBER_OF_TENSORS:]
        return out

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        from heedful.ops.fused import launch

        wanted = ctx.needs_input_grad[3:8]
        if torch.is_grad_enabled():  # a second derivative is being prepared: the operator tells when it is asked for
            gradients = fused_attention_backward(*ctx.saved_tensors, above, *ctx.settings, wanted)
        else:
            *inputs, out, stat = ctx.saved_tensors
            gradients = launch.backward(launch.Problem(*inputs, *ctx.settings), out, stat, above, wanted)
        chosen = (*gradients[:3], *(x if want else None for x, want in zip(gradients[3:], wanted, strict=True)))
        return (*chosen, *(None,) * (len(ctx.needs_input_grad) - len(chosen)))


def attention(*inputs: Any) -> Tensor:
    """`fused_attention` by the shortest way: operators where torch traces or looks on, plain launches elsewhere."""
    tensors = [x for x in inputs[:NUMBER_OF_TENSORS] if x is not None]
    plain = all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
    if not plain or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return fused_attention(*inputs)[0]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _Eager.apply(*inputs)
    from heedful.ops.fused import launch

    return launch.forward(launch.Problem(*inputs))[0]

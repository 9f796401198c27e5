"""Softmax attention in many short sequences, as between the columns of each row of a table: one program for each head of each of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from heedful._errors import Unsupported
from heedful.ops import reference
from heedful.ops.fused._device import unable, unit_stride
from heedful.ops.request import Cost, Implementation, Request

LONGEST = 64
"""Queries and keys of a sequence, at most; and the size of a head."""

MANY = 2**11
"""Heads of sequences from which on `auto` takes it: fewer do not fill a GPU."""


@torch.library.custom_op("heedful::short_attention", mutates_args=())
def short_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The output `[B, H, Q, E]`."""
    from heedful.ops.fused import _short

    return _short.forward(query, key, value, scale)


@short_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return like_rows(query, value.shape[-1])


@torch.library.custom_op("heedful::short_attention_backward", mutates_args=())
def short_attention_backward(
    query: Tensor, key: Tensor, value: Tensor, above: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    from heedful.ops.fused import _short

    return _short.backward(query, key, value, above, scale)


@short_attention_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, above: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return like_rows(query), like_rows(key), like_rows(value)


def like_rows(x: Tensor, width: int | None = None) -> Tensor:
    """An empty `[B, H, n, width]` whose heads lie beside one another, as output maps read them."""
    batch, heads, count, size = x.shape
    return x.new_empty(batch, count, heads, size if width is None else width).transpose(1, 2)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.scale = inputs[3]


def _gradients(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
    return (*short_attention_backward(*ctx.saved_tensors, above, ctx.scale), None)


def _no_second(ctx: Any, *above: Tensor) -> None:
    raise Unsupported("impl='short' has no second derivatives; impl='stream' and impl='reference' have them")


short_attention.register_autograd(_gradients, setup_context=_keep)
short_attention_backward.register_autograd(_no_second)


def run(request: Request) -> Tensor:
    *lead, queries, _ = request.shape
    heads = lead[-1] if lead else 1

    def four(x: Tensor) -> Tensor:
        x = unit_stride(x).expand(*lead, *x.shape[-2:])
        return x if len(lead) == 2 else x.reshape(math.prod(lead[:-1]), heads, *x.shape[-2:])

    scale = request.kernel.fused_form.alpha  # type: ignore[union-attr]
    scale = request.query.shape[-1] ** -0.5 if scale is None else float(scale)
    out = short_attention(*(four(x) for x in (request.query, request.key, request.value)), scale)
    return out if len(lead) == 2 else out.reshape(*lead, queries, out.shape[-1])


def refuse(request: Request) -> str | None:
    reason = unable(request.value)
    if reason is not None:
        return reason
    form = request.kernel.fused_form if request.kernel.is_plain_softmax else None
    if form is None or isinstance(form.alpha, Tensor):
        return "it computes plain softmax alone, with a number for a scale"
    if request.mask is not None or request.bias is not None or request.factors is not None or request.dropout_p:
        return "it takes no mask and drops nothing"
    if request.query.dim() > 2 and request.key.shape[-3] != request.query.shape[-3]:
        return "key and query have unequally many heads"
    sizes = (*request.shape[-2:], request.query.shape[-1], request.value.shape[-1])
    if max(sizes) > LONGEST:
        return f"sequences and heads are at most {LONGEST} long"
    return None


def cost(request: Request) -> Cost:
    """Nothing is kept beside the inputs."""
    return Cost(reference.cost(request).flops, 0.0)


IMPLEMENTATION = Implementation(
    name="short",
    summary="many short sequences on the GPU: all pairs of one in one program",
    refuse=refuse,
    cost=cost,
    run=run,
)

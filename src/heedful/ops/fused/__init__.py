"""Fused Triton kernels: elementwise kernels of inner products and distances at the speed of fused softmax attention."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor
from torch.nn.functional import pad

from heedful import masks
from heedful.kernels._base import Parameter, unit
from heedful.ops import reference
from heedful.ops._request import Cost, Implementation, Request, wide
from heedful.ops.fused._device import HAS_TRITON, chip
from heedful.ops.fused.forms import Form, form

LARGEST = 256


def run(request: Request) -> Tensor:
    found = form(request.kernel)
    assert isinstance(found, Form)
    from heedful.ops.fused.operators import attention

    query, key, value, alpha, column = _inputs(found, request)
    *lead, queries, _ = request.shape
    heads, batch = lead[-1] if lead else 1, math.prod(lead[:-1])
    parts = masks.parts(request.mask, request.shape, query.device)
    bias = (
        request.bias if column is None else column if request.bias is None else request.bias.to(column.dtype) + column
    )

    def four(x: Tensor, tail: int) -> Tensor:
        """`[..., *tail]` with leading axes that broadcast to (batch, heads)."""
        missing = len(lead) - (x.dim() - tail)
        return _flat(x.reshape(*(1,) * missing, *x.shape) if missing else x, lead, tail)

    def by_batch(x: Tensor | None, tail: int) -> Tensor | None:
        """The same of a tensor whose leading axes are the first of the grid's."""
        return None if x is None else _flat(x.reshape(*x.shape[: x.dim() - tail], *(1,) * (len(lead) - x.dim() + tail), *x.shape[x.dim() - tail :]), lead, tail)  # fmt: skip

    def whole(x: Tensor) -> Tensor:
        axes = (*lead[:-1], x.shape[-3] if lead else 1)
        return x.expand(*axes, *x.shape[-2:]).reshape(batch, axes[-1], *x.shape[-2:])

    ids = parts.ids or (None, None)
    out = attention(
        whole(query),
        whole(key),
        whole(value),
        _by_head(alpha, heads, query),
        None if not isinstance(found.beta, Tensor) and found.beta == 0 else _by_head(found.beta, heads, query),
        *((None, None) if request.factors is None else (four(x.to(query.dtype), 2) for x in request.factors)),
        None if bias is None else four(bias, 2),
        by_batch(parts.lengths, 0),
        by_batch(ids[0], 1),
        by_batch(ids[1], 1),
        None if parts.keep is None else four(parts.keep, 2),
        None if parts.blocks is None else four(parts.blocks[0], 2),
        [1, 1] if parts.blocks is None else list(parts.blocks[1]),
        parts.low,
        parts.high,
        found.activation,
        found.degree,
        found.division,
        found.distance,
    )
    out, width = out.reshape(*lead, queries, value.shape[-1]), request.value.shape[-1]
    out = out if out.shape[-1] == width else out[..., :width]
    for factor in found.factors:
        out = out * (factor.to(out.dtype)[:, None, None] if isinstance(factor, Tensor) and factor.dim() else factor)
    return out


def _inputs(found: Form, request: Request) -> tuple[Tensor, Tensor, Tensor, Parameter, Tensor | None]:
    """Query, key and value as the kernel reads them, alpha, and a term of every key."""
    query, key, value = request.query, request.key, request.value
    alpha: Parameter = query.shape[-1] ** -0.5 if found.alpha is None else found.alpha
    column = None
    if found.inputs == "unit":
        query, key = (unit(x.to(wide(x.dtype))) for x in (query, key))
    if found.inputs == "folded":
        expanded = request.expanded() if request.kernel.tensors() else request
        folded = request.kernel.fold(*(x.to(wide(x.dtype)) for x in (expanded.query, expanded.key)))
        assert folded is not None
        query, key, value, alpha, column = folded.query, folded.key, expanded.value, folded.scale, folded.column
        column = None if column is None else request.per_head(column, axis=-2)[..., None, :]
    query, key = query.to(value.dtype), key.to(value.dtype)
    step = 16 // value.element_size()
    query, key, value = (pad(x, (0, -x.shape[-1] % step)) if x.shape[-1] % step else x for x in (query, key, value))
    return query, key, value, alpha, column


def _by_head(parameter: Parameter, heads: int, like: Tensor) -> Tensor:
    if not isinstance(parameter, Tensor):
        return torch.full((heads,), float(parameter), dtype=torch.float32, device=like.device)
    return parameter.float().expand(heads).contiguous()


def _flat(x: Tensor, lead: list[int], tail: int) -> Tensor:
    """Leading axes joined to (batch, heads); each of one entry where it stands for all."""
    axes = x.shape[: x.dim() - tail]
    if not lead:
        return x.reshape(1, 1, *x.shape)
    if any(size > 1 for size in axes[:-1]):
        x = x.expand(*lead[:-1], *x.shape[len(lead) - 1 :])
    return x.reshape(-1, axes[-1], *x.shape[x.dim() - tail :])


def refuse(request: Request) -> str | None:
    found = form(request.kernel)
    if isinstance(found, str):
        return found
    if request.dropout_p:
        return "fused kernels drop no coefficients"
    if (
        request.bias is not None
        and request.bias.requires_grad
        and torch.is_grad_enabled()
        and request.bias.shape[-2] != 1
    ):
        return "the gradient of a full bias is a matrix of queries x keys; masks.low_rank has a small one"
    if request.bias is not None and request.bias.shape[-2] != 1 and found.inputs == "folded":
        return "a full bias beside the product's own term of every key"
    if max(_folded_size(found, request), request.value.shape[-1]) > LARGEST:
        return f"head sizes above {LARGEST} do not fit"
    if torch._C._are_functorch_transforms_active():
        return "torch.func's transforms do not see into fused kernels"
    return _unable(request.value)


def _folded_size(found: Form, request: Request) -> int:
    if found.inputs != "folded":
        return request.query.shape[-1]
    folded = request.kernel.fold(request.query[..., :0, :], request.expanded().key[..., :0, :])
    return LARGEST + 1 if folded is None else folded.query.shape[-1]


def _unable(value: Tensor) -> str | None:
    """Why these tensors cannot be served here, whatever the kernel."""
    if not HAS_TRITON:
        return "triton is not installed"
    if value.dtype == torch.float64:
        return "fused kernels compute in float32 and 16 bit"
    if value.device.type == "cuda":
        return None if chip(value.device).major >= 8 else "fused kernels need a GPU of compute capability 8.0 or newer"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return f"fused kernels run on CUDA devices; these tensors are on {value.device.type}"
    if value.device.type != "cpu" or value.dtype != torch.float32:
        return "triton's interpreter serves float32 on CPU alone"
    return None


def guards(request: Request) -> bool:
    """Inside the kernels nothing leaks; what is computed from the inputs before them is not inside."""
    found = form(request.kernel)
    return isinstance(found, Form) and found.inputs == "plain" and request.factors is None and request.bias is None


def cost(request: Request) -> Cost:
    """No coefficient is written; two numbers per row are kept."""
    rows = math.prod(request.shape[:-1]) + math.prod((*request.shape[:-2], request.shape[-1]))
    return Cost(reference.cost(request).flops, 8.0 * rows)


IMPLEMENTATION = Implementation(
    name="triton",
    summary="fused forward and backward on the GPU: no coefficient is written",
    refuse=refuse,
    cost=cost,
    run=run,
    guards=guards,
)

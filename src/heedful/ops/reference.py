"""The obvious implementation: write every coefficient out, then combine."""

from __future__ import annotations

import torch
from torch import Tensor

from heedful.kernels import Kernel
from heedful.ops.request import Cost, Implementation, Request, pairs, wide


def rows(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """A block of rows of attention: [..., q, D], [..., K, D], [..., K, E] -> [..., q, E], summed in `wide` precision."""
    weights = coefficients(kernel, query, key, keep, bias)
    if dropout_p:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    return (weights.to(wide(value.dtype)) @ value.to(wide(value.dtype))).to(value.dtype)


def coefficients(kernel: Kernel, query: Tensor, key: Tensor, keep: Tensor | None, bias: Tensor | None) -> Tensor:
    kind = wide(query.dtype)
    return kernel.weights(query.to(kind), key.to(kind), keep, None if bias is None else bias.to(kind))


def run(request: Request) -> Tensor:
    request = request.expanded()
    return rows(request.kernel, request.query, request.key, request.value, *request.visible(), request.dropout_p)


def cost(request: Request) -> Cost:
    rank = 0 if request.factors is None else request.factors[0].shape[-1]
    depth = request.query.shape[-1] + request.value.shape[-1] + rank
    item = wide(request.query.dtype).itemsize
    return Cost(2.0 * pairs(request) * depth, 3.0 * pairs(request) * item)


IMPLEMENTATION = Implementation(
    name="reference",
    summary="writes all coefficients out; any kernel, any mask, float64",
    refuse=lambda request: None,
    cost=cost,
    run=run,
)

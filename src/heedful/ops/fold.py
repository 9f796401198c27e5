"""Kernels that are softmax attention in disguise, run by torch's fused `scaled_dot_product_attention`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from heedful._runtime import differentiating_forward
from heedful.kernels.forms import Folded
from heedful.masks import split_causal
from heedful.masks.factors import side_by_side
from heedful.ops import reference
from heedful.ops.request import Cost, Implementation, Request, wide

# Torch's fused kernels give each sequence of a batch a row of the grid they are launched on, and CUDA has so many.
LAUNCHED = 2**16 - 1


def run(request: Request) -> Tensor:
    if request.kernel.tensors():
        request = request.expanded()
    if request.query.dtype != request.key.dtype:
        request = request._replace(query=request.query.to(request.key.dtype))
    if request.factors is not None and request.factors[1].shape[:-2][-1:] not in ((), (1,), request.key.shape[-3:-2]):
        request = request.expanded()  # factors of their own for query heads that share keys
    folded = request.kernel.fold(request.query, request.key)
    assert folded is not None
    if request.factors is not None:
        folded = append_factors(folded, *request.factors)
    folded = _upright(folded)
    query, key, value = folded.query, folded.key, request.value
    width = value.shape[-1]
    is_causal, attn_mask, sees = _mask(request)
    if folded.column is not None and _fits_a_mask(request, folded.column):
        attn_mask = request.per_head(folded.column, axis=-2)[..., None, :].to(query.dtype)
    else:
        if folded.column is not None:
            query, key = append_column(query, key, folded.column / folded.scale, least=width)
        if query.shape[-1] != width or key.shape[-1] != width:
            # Fused kernels want one head size for all three.
            size = max(query.shape[-1], width)
            size = size if request.factors is None else -(-size // 8) * 8
            query, key, value = (
                x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in (query, key, value)
            )
    if attn_mask is not None and attn_mask.is_floating_point() and query.device.type == "cuda":
        # Torch's kernels on a GPU take a mask of the queries' own type; a finer one is not rounded.
        query, key, value = (x.to(attn_mask.dtype) for x in (query, key, value))
    # Given only where it acts: a compiled graph may leave the number of heads open, and the flag must be a plain bool.
    grouped = {"enable_gqa": True} if query.dim() > 2 and query.shape[-3] != key.shape[-3] else {}
    options: dict[str, Any] = {"dropout_p": request.dropout_p, "is_causal": is_causal, "scale": folded.scale, **grouped}
    if query.device.type == "cuda" and query.dim() == 4 and max(query.shape[0], key.shape[0]) > LAUNCHED:
        out = in_parts(LAUNCHED, query, key, value, attn_mask, **options)
    else:
        out = scaled_dot_product_attention(query, key, value, attn_mask, **options)
    out = out[..., :width] if out.shape[-1] != width else out
    # Some fused kernels give a mean of values to a row that sees nothing.
    return out if sees is None else out.masked_fill(~sees, 0.0)


def in_parts(most: int, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, **options: Any) -> Tensor:
    """Torch's attention of at most so many sequences at a time; what is given once serves all."""
    batch = max(x.shape[0] for x in (query, key, value))
    parts = [
        x.split(most) if x is not None and x.dim() == 4 and x.shape[0] == batch else [x] * -(-batch // most)
        for x in (query, key, value, attn_mask)
    ]
    return torch.cat([scaled_dot_product_attention(*part, **options) for part in zip(*parts, strict=True)])


def _upright(folded: Folded) -> Folded:
    """The same scores with a scale above zero: fused kernels hide a pair before they scale it, and -inf x -1 is no hiding."""
    if folded.scale > 0:
        return folded
    sign, scale = (-1.0, -folded.scale) if folded.scale < 0 else (0.0, 1.0)
    return folded._replace(query=folded.query * sign, scale=scale)


def _fits_a_mask(request: Request, column: Tensor) -> bool:
    """Whether the column goes in as a float mask: cheaper than coordinates where no other mask, gradient or rounding is in play."""
    asks = torch.is_grad_enabled() and column.requires_grad
    alone = request.mask is None and request.factors is None
    return alone and not asks and column.device.type == "cpu" and request.query.dtype == column.dtype


def append_factors(folded: Folded, left: Tensor, right: Tensor) -> Folded:
    """Adds `left . right` to the scores as further coordinates, exactly also in 16 bit.

    With s query . key as the score, the coordinates beside the query are left / s. In 16 bit, the power of two in a small s
    is given to the query, which does not round, and left / s, which would, is written as a sum of three 16-bit numbers;
    their products with `right` are summed in float32 by the fused kernel.
    """
    query, key, column, scale = folded
    left, right = left.to(query.dtype), right.to(key.dtype)
    parts = [left]
    if query.dtype in (torch.float32, torch.float64):
        query, scale = query * scale, 1.0
    elif scale == 0:
        query, scale = query * 0.0, 1.0
    else:
        power = math.ldexp(1.0, min(math.frexp(scale)[1] - 1, 0))
        query, scale = query * power, scale / power
        exact = abs(math.frexp(scale)[0]) == 0.5
        parts = [left / scale] if exact else split(left.to(wide(left.dtype)) / scale, query.dtype)
    query, key = side_by_side(query, *parts), side_by_side(key, *[right] * len(parts))
    return Folded(query, key, None if column is None else column.expand(key.shape[:-1]), scale)


def split(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """A sum of three 16-bit numbers, the gradient all through the first."""
    parts = [x.to(dtype)]
    rest = x.detach() - parts[0].detach().to(x.dtype)
    for _ in range(2):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].to(x.dtype)
    return parts


def append_column(query: Tensor, key: Tensor, column: Tensor, least: int = 0) -> tuple[Tensor, Tensor]:
    """Adds `column` to every row of scores as further coordinates, exactly also in 16 bit; at least `least` in all.

    A 16-bit number holds 8 or 11 bits of the column, which for a squared norm of 64 is an error of 0.1 in the exponent. So
    the column is written as a sum of up to three 16-bit numbers (24 bits or more), each with a query coordinate of one; the
    products are summed in float32 by the fused kernel. But for a CPU the head size is filled up to a multiple of 8, which it wants
    anyway.
    """
    parts = []
    terms = 1 if query.dtype in (torch.float32, torch.float64) else 3
    limit = torch.finfo(query.dtype).max
    if terms > 1 and column.shape[-1]:
        # A constant in every row, which normalisation cancels: only differences between keys need the range.
        column = column - column.detach().amax(dim=-1, keepdim=True)
    for _ in range(terms):
        part = column.clamp(-limit, limit).to(query.dtype)
        parts.append(part[..., None])
        column = column - part.to(column.dtype)
    step = 1 if query.device.type == "cpu" else 8
    fill = -(-max(query.shape[-1] + terms, least) // step) * step - query.shape[-1] - terms
    # The fill is multiplied by zeros among the keys, so any number will do among the queries.
    ones = torch.ones((), dtype=query.dtype, device=query.device).expand(*query.shape[:-1], terms + fill)
    zeros = torch.zeros((), dtype=key.dtype, device=key.device).expand(*key.shape[:-1], fill)
    return torch.cat((query, ones), dim=-1), torch.cat((key, *parts, zeros), dim=-1)


def _mask(request: Request) -> tuple[bool, Tensor | None, Tensor | None]:
    """`is_causal`, `attn_mask`, and which rows see anything (None where all do)."""
    if request.mask is None:
        return False, None, None
    if request.bias is None and split_causal(request.mask, request.shape) == (True, None):
        return True, None, None
    keep, bias = request._replace(factors=None).visible()  # factors are coordinates
    assert keep is not None
    sees = keep.any(dim=-1, keepdim=True)
    if bias is None:
        return False, keep, sees
    # Torch takes a mask of float32 beside 16-bit queries, so a finer mask is not rounded.
    bias = bias if bias.dtype == request.query.dtype else bias.to(wide(request.query.dtype))
    return False, bias.masked_fill(~keep, -math.inf), sees


def refuse(request: Request) -> str | None:
    traits = request.kernel.traits
    if not traits.exponential:
        return "the coefficient is not the exponential of a score"
    if traits.division != "sum":
        return "rows are not normalised by their sum"
    if not request.kernel.folds:
        return "the score is no inner product plus a term of the key"
    if differentiating_forward():
        return "torch's fused attention has no forward-mode derivative"
    narrow = request.query.dtype.itemsize == 2 and request.query.device.type == "cuda"
    if narrow and request.bias is not None and request.bias.dtype != request.query.dtype:
        return (
            f"on a GPU torch takes a float mask beside {request.query.dtype} in that dtype alone, which would round it"
        )
    if request.factors is not None:
        kinds = {x.dtype for x in request.factors}
        if request.key.dtype.itemsize == 2 and kinds != {request.key.dtype}:
            return f"a bias of low rank beside {request.key.dtype} must be of that dtype, or folding it would round it"
    return None


def cost(request: Request) -> Cost:
    base, request = reference.cost(request), request.expanded()
    depth = request.query.shape[-1] + request.value.shape[-1]
    query, key = request.query[..., :0, :], request.key[..., :0, :]
    folded = request.kernel.fold(query, key)
    assert folded is not None
    item = request.query.dtype.itemsize
    extra = 0.0
    if folded.query is not query or folded.column is not None or request.factors is not None:
        rank = 0 if request.factors is None else request.factors[0].shape[-1]
        size = folded.query.shape[-1] + (folded.column is not None) + rank
        size = -(-max(size, request.value.shape[-1]) // 8) * 8
        rows = request.query.shape[:-1].numel() * 2 + request.key.shape[:-1].numel() * 2
        base, extra = Cost(base.flops * 2 * size / depth, 0.0), float(rows * size * item)
    if request.mask is not None and split_causal(request.mask, request.shape) != (True, None):
        rows = 1 if request.mask.same_for_every_query else request.shape[-2]
        extra += float(math.prod(request.shape[:-3]) * rows * request.shape[-1] * (1 if request.bias is None else 5))
    return Cost(base.flops, extra)


IMPLEMENTATION = Implementation(
    name="sdpa",
    summary="folds exactly into torch's fused softmax attention",
    refuse=refuse,
    cost=cost,
    run=run,
)

"""What a mask hides must not leak, not even NaN."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from heedful import masks
from heedful.kernels._base import readable
from heedful.ops._request import Request


def shield(request: Request) -> tuple[Request, Tensor | None]:
    """Zeros where an input is not finite, and NaN to be added for the queries that may attend to it.

    A coefficient of zero does not hide NaN (0 x NaN = NaN), in forward or in backward, so what a mask hides is taken out
    before it is combined.
    """
    shape, mask = request.shape, request.mask
    if mask is None or (_free_to_look(request) and _all_finite(request)):
        return request, None
    bad = _not_finite(request.key) | _not_finite(request.value)  # [..., G, K]
    bad = request.per_head(bad, axis=-2) if bad.dim() > 1 else bad
    bad_query, factors = _not_finite(request.query), request.factors
    if factors is not None:
        left, right = factors
        bad_query, bad = bad_query | _not_finite(left), bad | _not_finite(right)
        factors = left.nan_to_num(0.0, 0.0, 0.0), right.nan_to_num(0.0, 0.0, 0.0)
    if mask is not masks.causal:
        # A query that sees nothing gives zeros whatever it holds; under causality alone every query sees something.
        bad_query = bad_query & mask.reach(torch.ones_like(bad), shape)
    poisoned = mask.reach(bad, shape) | bad_query
    query, key, value = (x.nan_to_num(0.0, 0.0, 0.0) for x in (request.query, request.key, request.value))
    clean = request._replace(query=query, key=key, value=value, factors=factors)
    poison = torch.zeros((), dtype=request.value.dtype, device=request.value.device).expand(shape[:-1])
    return clean, poison.masked_fill(poisoned, torch.nan)[..., None]


def _not_finite(x: Tensor) -> Tensor:
    """Which vectors hold NaN or infinity, in one pass: the largest magnitude tells."""
    return ~torch.linalg.vector_norm(x.detach(), ord=math.inf, dim=-1).isfinite()


def _free_to_look(request: Request) -> bool:
    return all(readable(x) for x in (request.query, request.key, request.value, *(request.factors or ())))


def _all_finite(request: Request) -> bool:
    # Any NaN or infinity survives a sum; a sum that overflows merely takes the careful path.
    total = request.query.detach().sum() + request.key.detach().sum() + request.value.detach().sum()
    for factor in request.factors or ():
        total = total + factor.detach().sum()
    return math.isfinite(total.item())

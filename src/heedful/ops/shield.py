"""What a mask hides must not matter, whatever it holds."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from heedful import masks
from heedful._runtime import readable
from heedful.masks import Mask, Region, cut
from heedful.masks.algebra import some_rows
from heedful.ops.request import Request


def shield(request: Request) -> tuple[Request, Tensor | None]:
    """Zeros in place of numbers that must not matter, and NaN to be added for the queries that may attend to such.

    A coefficient of zero does not hide what is not finite (0 x NaN = NaN), in forward or in backward, nor finite numbers
    whose products are not. So keys that no query sees, queries that see nothing, and all that is not finite are taken out
    before anything is combined.
    """
    shape, mask = request.shape, request.mask
    if mask is None or (_free_to_look(request) and _tame(request)):
        return request, None
    seen = mask.seen_keys(shape, request.key.device)  # [..., K]
    if seen is not None and seen.dim() > 1 and seen.shape[-2] > 1:
        request = request.expanded()  # heads of their own that share keys
    query, key, value, factors = request.query, request.key, request.value, request.factors
    bad = _not_finite(key) | _not_finite(value)  # [..., G, K]
    bad = request.per_head(bad, axis=-2) if bad.dim() > 1 else bad
    bad_query = _not_finite(query)
    if factors is not None:
        bad_query, bad = bad_query | _not_finite(factors[0]), bad | _not_finite(factors[1])
    # Under causality alone every query sees something.
    sighted = None if mask is masks.causal else mask.reach(torch.ones_like(bad), shape)  # [..., Q]
    poisoned = mask.reach(bad, shape) | (bad_query if sighted is None else bad_query & sighted)
    bias = request.bias
    if bias is not None:
        poisoned, bias = poisoned | _reads_nan(mask, bias, shape), bias.masked_fill(bias.isnan(), 0.0)
    clean = request._replace(
        query=_only(query, sighted),
        key=_only(key, seen),
        value=_only(value, seen),
        bias=bias,
        factors=factors and (_only(factors[0], sighted), _only(factors[1], seen)),
    )
    poison = torch.zeros((), dtype=value.dtype, device=value.device).expand(shape[:-1])
    return clean, poison.masked_fill(poisoned, torch.nan)[..., None]


def shield_factors(request: Request) -> tuple[Request, Tensor | None]:
    """The same of the factors of a low-rank bias alone, for an implementation that lets nothing of the vectors leak by itself."""
    mask, factors, shape = request.mask, request.factors, request.shape
    if mask is None or factors is None:
        return request, None
    bad_left, bad_right = (_not_finite(x) for x in factors)  # [..., Q], [..., K]
    sighted = True if mask is masks.causal else mask.reach(torch.ones_like(bad_right), shape)
    poison = torch.zeros((), dtype=request.value.dtype, device=request.value.device).expand(shape[:-1])
    poison = poison.masked_fill(mask.reach(bad_right, shape) | (bad_left & sighted), torch.nan)
    left, right = (_only(x, None) for x in factors)
    return request._replace(factors=(left, right)), poison[..., None]


def _only(vectors: Tensor, wanted: Tensor | None) -> Tensor:
    """Finite vectors `[..., n, D]`: zero where they are not, or are not wanted."""
    finite = vectors.nan_to_num(0.0, 0.0, 0.0)
    return finite if wanted is None else torch.where(wanted[..., None], finite, 0.0)


def _reads_nan(mask: Mask, bias: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Queries `[..., Q]` to whose scores the mask adds NaN at a place that they see."""
    blocks = []
    for at in some_rows(Region.whole(shape, bias.device)):
        read = (mask.block(at) & cut(bias, at).isnan()).any(dim=-1)
        blocks.append(read.expand(*read.shape[:-1], at.rows[1] - at.rows[0]))
    return torch.cat(blocks, dim=-1)


def _not_finite(x: Tensor) -> Tensor:
    """Which vectors hold NaN or infinity, in one pass: the largest magnitude tells."""
    return ~torch.linalg.vector_norm(x.detach(), ord=math.inf, dim=-1).isfinite()


def _free_to_look(request: Request) -> bool:
    return all(readable(x) for x in _vectors(request)) and (request.bias is None or readable(request.bias))


def _tame(request: Request) -> bool:
    if request.bias is not None and request.bias.numel() and bool(request.bias.detach().amax().isnan()):
        return False
    return tame(request.value.dtype, *_vectors(request))


def tame(dtype: torch.dtype, *vectors: Tensor) -> bool:
    """Whether nothing is NaN, nor so large that a product of four could leave the range of `dtype`."""
    limit = torch.finfo(dtype).max ** 0.25
    return all(_within(x.detach(), limit) for x in vectors if x.numel())


def _within(x: Tensor, limit: float) -> bool:
    # Extremes are found by vector instructions where numbers lie side by side; torch's maximum norm takes one number at a time,
    # which for 2048 tokens costs a tenth of causal attention.
    least, most = torch.aminmax(x if x.stride(-1) == 1 else x.mT)
    return -limit < float(least) and float(most) < limit  # not of NaN, which both would be


def _vectors(request: Request) -> list[Tensor]:
    return [request.query, request.key, request.value, *(request.factors or ())]

"""Kernels of query - key alone, in float32, far from zero.

A squared distance is a difference of squares, in which those of vectors far from zero drown it: the score of a pair has a
rounding error of about 1e-7 times the score of either vector with the origin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heedful._runtime import readable
from heedful.ops.request import Request

SAMPLE, MIDDLE = 31, 7
"""Of so many keys, spread over all of them, the mean of so many in the middle is the centre."""

FAR = 64.0
"""The score with the origin beyond which float32 is not enough."""


def steadied(request: Request, chosen: str, *, by_name: bool) -> Request:
    """The same request where rounding does not matter: about another origin, or in float64.

    The origin moves where all rows see the same keys: to the middle of some of these, one for every head, so that a head
    depends on what it sees alone and a distant key moves nothing. Where rows see different keys no origin is right for
    all of them. On a CPU the squares are then taken in float64 if they are large. On other devices, where looking would
    wait, `reference` and `stream` take them so when asked for by name; the others leave the origin where it is.
    """
    if not request.kernel.traits.stationary or request.key.dtype != torch.float32 or 0 in request.shape:
        return request
    shared = request.mask is None or request.mask.same_for_every_query
    if shared:
        request = _moved(request)
    if request.query.device.type != "cpu":
        doubled = not shared and by_name and chosen in ("reference", "stream")
    elif readable(request.query) and readable(request.key):
        doubled = chosen != "triton" and not _near(request)
    else:
        doubled = chosen != "triton" and not shared
    if not doubled:
        return request
    query, key, value = (x.double() for x in (request.query, request.key, request.value))
    return request._replace(query=query, key=key, value=value)


def _moved(request: Request) -> Request:
    keys = request.key.detach()
    at = torch.arange(SAMPLE, device=keys.device) * keys.shape[-2] // SAMPLE
    sample = keys[..., at, :]
    if request.mask is not None:
        seen = request.mask.seen_keys(request.shape, keys.device)
        if seen is not None and seen.dim() > 1 and seen.shape[-2] > 1 and keys.dim() > 2:
            request = request.expanded()  # heads of their own that share keys
            sample = request.key.detach()[..., at, :]
        if seen is not None:
            sample = torch.where(seen[..., at, None], sample, torch.nan)
    centre = _middle(sample)
    query = request.query - request.per_head(centre)
    return request._replace(query=query, key=request.key - centre)


def _middle(sample: Tensor) -> Tensor:
    """The mean of the middle of the numbers in each coordinate, `[..., 1, D]`; zero where there is none."""
    ordered = sample.sort(dim=-2).values  # NaN comes last
    count = (~sample.isnan()).sum(dim=-2, keepdim=True)
    ranks = torch.arange(MIDDLE, device=sample.device)[:, None] - MIDDLE // 2 + count // 2
    middle = ordered.gather(-2, ranks.minimum(count - 1).clamp_min(0))
    return middle.mean(dim=-2, keepdim=True).nan_to_num(0.0, 0.0, 0.0)


def _near(request: Request) -> bool:
    """Whether no vector has a large score with the origin; not where a kernel has no score."""
    with torch.no_grad():
        vectors = request.query, request.per_head(request.key)
        return all(
            leaf.scored and float(leaf.remoteness(x).max()) < FAR for leaf in request.kernel.leaves() for x in vectors
        )

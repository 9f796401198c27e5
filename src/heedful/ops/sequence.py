"""Kernels of the whole sequence as requests of kernels of pairs: queries moved, rows and keys weighed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heedful import masks
from heedful.kernels import Kernel
from heedful.kernels.forms import Balance
from heedful.masks.factors import joined
from heedful.ops.request import Request, wide
from heedful.ops.shield import shield


def of_pairs(call: Request) -> Request:
    """The request that an implementation will be given, but for its numbers."""
    request = call._replace(kernel=call.kernel.of_pairs)
    if not call.kernel.balances or not request.kernel.traits.exponential:
        return request
    return _lowered(request, call.key[..., :1, :1].detach().new_zeros(call.key.shape[-2], 1), None)


def shielded(call: Request) -> tuple[Request, Tensor | None]:
    """`shield`, and NaN also for rows that see a token whose own row, and so its degree, is NaN or too large for a float."""
    request, poison = shield(call)
    if poison is None or call.mask is None or not call.kernel.balances:
        return request, poison
    # Finite garbage whose own row overflows would reach, through its degree, rows from which it is hidden.
    limit = torch.finfo(wide(call.key.dtype)).max ** 0.25
    far_query, far_key = ((x.detach().abs() >= limit).any(dim=-1, keepdim=True) for x in (request.query, request.key))
    far = far_query | request.per_head(far_key)
    request = request._replace(
        query=request.query.masked_fill(far_query, 0.0), key=request.key.masked_fill(far_key, 0.0)
    )
    poisoned = poison[..., 0].isnan() | far[..., 0]
    return request, poison.masked_fill((poisoned | call.mask.reach(poisoned, call.shape))[..., None], torch.nan)


def moved(request: Request, run: Callable[[Request], Tensor]) -> tuple[Request, Balance | None]:
    """The request of the kernel of pairs, in wide precision, and how its rows and keys are weighed; `run` attends by pairs."""
    kernel = request.kernel
    if kernel.of_pairs is kernel:
        return request, None
    kind = wide(request.key.dtype)

    def through(query: Tensor, key: Tensor, kernel: Kernel) -> Tensor:
        query, key = query.to(kind), key.to(kind)
        bare = request._replace(query=query, key=key, value=key, kernel=kernel, bias=None, factors=None, dropout_p=0.0)
        return run(bare)

    query = kernel.move(request.query, request.key, through)
    pairs = request._replace(kernel=kernel.of_pairs, query=query)
    if not kernel.balances:
        return pairs, None
    sees = _sighted(request)

    def total(kernel: Kernel, column: Tensor | None = None) -> Tensor:
        key = request.key.to(kind)
        summed = _lowered(
            pairs._replace(query=query.to(kind), key=key, value=torch.ones_like(key[..., :1])), column, sees
        )
        return run(summed._replace(kernel=kernel, dropout_p=0.0)).to(kind)

    reach = None if sees is None or request.mask is None else request.mask.reach(sees, request.shape)[..., None]
    balance = kernel.balance(total, reach)
    pairs = _lowered(pairs, balance.column, sees)
    if balance.keys is not None:
        pairs = pairs.expanded()
        value = pairs.value * balance.keys
        # The 16 bit of float16 have no room for roots of degrees.
        pairs = pairs._replace(value=value.to(torch.bfloat16) if request.value.dtype == torch.bfloat16 else value)
    return pairs, balance


def _sighted(request: Request) -> Tensor | None:
    """Which rows see anything, `[..., Q]`, where rows differ in that."""
    mask = request.mask
    if mask is None or mask.same_for_every_query or mask is masks.causal or 0 in request.shape:
        return None
    every = torch.ones(request.shape[-1], dtype=torch.bool, device=request.key.device)
    return mask.reach(every, request.shape).expand(request.shape[:-1])


def _lowered(request: Request, column: Tensor | None, sees: Tensor | None) -> Request:
    """With a term for every key, `[..., K, 1]`; keys whose own row sees nothing are hidden."""
    if column is None:
        return request
    if sees is not None:
        request = request._replace(mask=masks.keys(sees) if request.mask is None else request.mask & masks.keys(sees))
    if request.key.dtype.itemsize > 2:
        # As factors of low rank, which no implementation writes out.
        ones = column.new_ones(request.query.shape[-2], 1)
        return request._replace(factors=joined(request.factors, (ones, column)))
    # Exact also in 16 bit, where factors would be rounded.
    term = column.mT
    hiding = masks.from_sdpa(term)
    assert hiding is not None
    return request._replace(
        mask=hiding if request.mask is None else request.mask & hiding,
        bias=term if request.bias is None else request.bias.to(term.dtype) + term,
    )

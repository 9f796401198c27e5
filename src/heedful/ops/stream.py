"""The reference on blocks of rows, recomputed in backward: any kernel in O(n) memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from heedful.kernels import Kernel
from heedful.masks import Block, cut
from heedful.ops import reference
from heedful.ops._request import Cost, Implementation, Request, wide

# Coefficients in flight: few enough to stay near the caches, enough to hide the cost of a call.
BLOCK = {"cpu": 2**20, "cuda": 2**25}
LEAST_ROWS = 128


def run(request: Request) -> Tensor:
    request = request.expanded()
    shape = request.shape
    lead, (queries, keys) = shape[:-2], shape[-2:]
    if queries == 0 or torch.Size(lead).numel() == 0:
        return reference.run(request)
    tensors = [x.expand(*lead, *x.shape[-2:]) for x in (request.query, request.key, request.value)]
    parts = [_part(request, tensors, cuts) for cuts in _leading_blocks(lead, keys, request.query.device)]
    return _join(parts, lead)


def _part(request: Request, tensors: list[Tensor], lead: tuple[slice, ...]) -> Tensor:
    """Every row of one slice of the leading axes."""
    query, key, value = (x[lead] for x in tensors)
    shape = request.shape
    kernel = _heads(request.kernel, lead[-1], shape[-3]) if lead else request.kernel
    count = max(1, _budget(query.device) // max(1, key.shape[-2] * query.shape[:-2].numel()))
    recompute = torch.is_grad_enabled() and (
        any(x.requires_grad for x in (query, key, value))
        or any(t.requires_grad for t in kernel.tensors().values())
        or (request.bias is not None and request.bias.requires_grad)
    )
    out = []
    for start in range(0, shape[-2], count):
        stop = min(start + count, shape[-2])
        span = slice(0, shape[-1]) if request.mask is None else request.mask.span(slice(start, stop), shape)
        at = Block(lead, slice(start, stop), span, shape, query.device)
        pieces = query[..., start:stop, :], key[..., span, :], value[..., span, :]
        if recompute:
            out.append(
                checkpoint(
                    _block, request, kernel, at, *pieces, use_reentrant=False, preserve_rng_state=request.dropout_p > 0
                )
            )
        else:
            out.append(_block(request, kernel, at, *pieces))
    return torch.cat(out, dim=-2)


def _block(request: Request, kernel: Kernel, at: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    keep = None if request.mask is None else request.mask.block(at)
    bias = None if request.bias is None else cut(request.bias, at)
    return reference.rows(kernel, query, key, value, keep, bias, request.dropout_p)


def _budget(device: torch.device) -> int:
    return BLOCK.get(device.type, BLOCK["cpu"])


def _leading_blocks(lead: tuple[int, ...], keys: int, device: torch.device) -> list[tuple[slice, ...]]:
    """Slices of the leading axes, the last ones kept whole while LEAST_ROWS rows of them fit the budget."""
    room = max(1, _budget(device) // max(1, keys * LEAST_ROWS))
    blocks: list[tuple[slice, ...]] = [()]
    for size in reversed(lead):
        step = max(1, min(size, room))
        room //= step
        blocks = [(slice(start, min(start + step, size)), *rest) for start in range(0, size, step) for rest in blocks]
    return blocks


def _join(parts: list[Tensor], lead: tuple[int, ...]) -> Tensor:
    """Puts the parts of `_leading_blocks` together again: last axis fastest."""
    for axis in reversed(range(len(lead))):
        joined, group, size = [], [], 0
        for part in parts:
            group.append(part)
            size += part.shape[axis]
            if size == lead[axis]:
                joined.append(torch.cat(group, dim=axis) if len(group) > 1 else group[0])
                group, size = [], 0
        parts = joined
    return parts[0]


def _heads(kernel: Kernel, cut: slice, heads: int) -> Kernel:
    """The kernel of some of the heads."""
    if cut == slice(0, heads):
        return kernel
    return kernel.with_tensors(
        {name: t[cut] if t.dim() == 1 and t.shape[0] > 1 else t for name, t in kernel.tensors().items()}
    )


def cost(request: Request) -> Cost:
    base = reference.cost(request)
    keys, item = request.shape[-1], wide(request.query.dtype).itemsize
    return Cost(base.flops, 3.0 * item * max(_budget(request.query.device), keys))


IMPLEMENTATION = Implementation(
    name="stream",
    summary="the reference in blocks of rows, recomputed in backward: any kernel, any mask, O(n) memory",
    refuse=lambda request: None,
    cost=cost,
    run=run,
)

"""The reference on blocks of rows, recomputed in backward: any kernel in O(n) memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from heedful._runtime import transforming
from heedful.kernels import Kernel
from heedful.masks import Region, cut
from heedful.masks.algebra import Range, cut_along
from heedful.ops import reference
from heedful.ops.request import Cost, Implementation, Request, added, wide

# Coefficients in flight: few enough to stay near the caches, enough to hide the cost of a call.
BLOCK = {"cpu": 2**19, "cuda": 2**25}
LEAST_ROWS = 256


def run(request: Request) -> Tensor:
    request = request.expanded()
    lead = request.shape[:-2]
    query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (request.query, request.key, request.value))
    request = request._replace(query=query, key=key, value=value)
    if torch.compiler.is_compiling() or request.dropout_p or transforming():
        return _traceable(request)
    names, tensors = zip(*request.kernel.tensors().items(), strict=True) if request.kernel.tensors() else ((), ())
    return _Stream.apply(request, names, query, key, value, request.bias, *(request.factors or (None, None)), *tensors)


class _Stream(torch.autograd.Function):
    """Writes every block's rows into one output, and in backward adds every block's gradients into one tensor each.

    Lists of small pieces would leave the allocator with holes between them that add up to n x n.
    """

    @staticmethod
    def forward(ctx: Any, request: Request, names: tuple[str, ...], *inputs: Tensor | None) -> Tensor:
        query, _, value, *_ = inputs
        assert query is not None
        assert value is not None
        ctx.save_for_backward(*inputs)
        ctx.request, ctx.names = request._replace(kernel=_empty(request.kernel)), names
        out = value.new_empty(*query.shape[:-1], value.shape[-1])
        for at in _blocks(request):
            _narrow(out, at.lead, at.rows).copy_(_rows(request, at))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            # A second derivative is being prepared: every step must leave its own history.
            saved = ctx.saved_tensors
            gradients = iter(
                torch.autograd.grad(
                    _traceable(_with(ctx, saved)),
                    [x for x, want in zip(saved, needs, strict=True) if want],
                    gradient,
                    create_graph=True,
                )
            )
            return None, None, *(next(gradients) if want else None for want in needs)
        saved = [x if x is None else x.detach() for x in ctx.saved_tensors]
        totals = [torch.zeros_like(x) if want else None for x, want in zip(saved, needs, strict=True)]
        for at in _blocks(_with(ctx, saved)):
            _add_block(ctx, saved, totals, gradient, at)
        return None, None, *totals


def _add_block(ctx: Any, saved: list[Any], totals: list[Any], gradient: Tensor, at: Region) -> None:
    """Adds a block's share to the gradients, each to the part of it that the block reads."""
    request = _with(ctx, saved)
    needs = [total is not None for total in totals]
    value = _narrow(request.value, at.lead, at.cols)
    kind = wide(value.dtype)
    above = _narrow(gradient, at.lead, at.rows).to(kind)
    with torch.enable_grad():
        query, key, _ = (
            part.detach().requires_grad_(want) for part, want in zip(_pieces(request, at), needs, strict=False)
        )
        keep, bias, factors = request.cut(at)
        bias = None if bias is None else bias.detach().requires_grad_(needs[3])
        if factors is not None:
            left, right = (x.detach().requires_grad_(want) for x, want in zip(factors, needs[4:6], strict=True))
            factors = left, right
        tensors = [tensor.requires_grad_(want) for tensor, want in zip(saved[6:], needs[6:], strict=True)]
        kernel = request.kernel.with_tensors(dict(zip(ctx.names, tensors, strict=True)))
        weights = reference.coefficients(
            _of_heads(kernel, at, request.shape), query, key, keep, added(bias, factors, wide(query.dtype))
        )
    if totals[2] is not None:
        _narrow(totals[2], at.lead, at.cols).add_(weights.detach().mT.to(kind) @ above)
    sources = [query, key, None, bias, *(factors or (None, None)), *tensors]
    wanted = [n for n, want in enumerate(needs) if want and n != 2]
    if not wanted:
        return
    by_weights = (above @ value.to(kind).mT).to(weights.dtype)
    gradients = torch.autograd.grad(weights, [sources[n] for n in wanted], by_weights, allow_unused=True)
    for n, part in zip(wanted, gradients, strict=True):
        if part is None:
            continue
        if n < 2:
            _narrow(totals[n], at.lead, at.cols if n else at.rows).add_(part)
        elif n == 3:
            cut(totals[n], at).add_(part)
        elif n < 6:
            cut_along(totals[n], at, at.rows if n == 4 else at.cols).add_(part)
        else:
            totals[n].add_(part)


def _with(ctx: Any, saved: Sequence[Any]) -> Request:
    query, key, value, bias, left, right, *tensors = saved
    kernel = ctx.request.kernel.with_tensors(dict(zip(ctx.names, tensors, strict=True)))
    factors = None if left is None else (left, right)
    return ctx.request._replace(query=query, key=key, value=value, bias=bias, factors=factors, kernel=kernel)


def _traceable(request: Request) -> Tensor:
    """The same by torch's own recomputation: it can be compiled, transformed and drops coefficients reproducibly."""
    bias = [] if request.bias is None else [request.bias]
    learned = [*bias, *(request.factors or ()), *request.kernel.tensors().values()]
    asks = [request.query, request.key, request.value, *learned]
    recompute = torch.is_grad_enabled() and not transforming() and any(x.requires_grad for x in asks)
    out: dict[tuple[Range, ...], list[Tensor]] = {}
    for at in _blocks(request):
        pieces = _pieces(request, at)
        piece = (
            checkpoint(_rows, request, at, *pieces, use_reentrant=False, preserve_rng_state=request.dropout_p > 0)
            if recompute
            else _rows(request, at, *pieces)
        )
        out.setdefault(at.lead, []).append(piece)
    return _join([torch.cat(rows, dim=-2) for rows in out.values()], request.shape[:-2])


def _rows(
    request: Request, at: Region, query: Tensor | None = None, key: Tensor | None = None, value: Tensor | None = None
) -> Tensor:
    """One block, of the request's tensors or of given pieces of them."""
    if query is None or key is None or value is None:
        query, key, value = _pieces(request, at)
    kernel = _of_heads(request.kernel, at, request.shape)
    return reference.rows(kernel, query, key, value, *request.visible(at), request.dropout_p)


def _pieces(request: Request, at: Region) -> list[Tensor]:
    ranges = zip((request.query, request.key, request.value), (at.rows, at.cols, at.cols), strict=True)
    return [_narrow(x, at.lead, along) for x, along in ranges]


def _narrow(x: Tensor, lead: tuple[Range, ...], along: Range) -> Tensor:
    for axis, (start, stop) in enumerate((*lead, along)):
        if (start, stop) != (0, x.shape[axis]):
            x = x.narrow(axis, start, stop - start)
    return x


def _blocks(request: Request) -> Iterator[Region]:
    """Pieces of the grid of about `BLOCK` pairs: leading axes kept whole while LEAST_ROWS rows of them fit."""
    *lead, queries, keys = request.shape
    budget = BLOCK.get(request.query.device.type, BLOCK["cpu"])
    room = max(1, budget // max(1, keys * LEAST_ROWS))
    steps: list[list[Range]] = []
    for size in reversed(lead):
        step = max(1, min(size, room))
        room //= step
        steps.insert(0, [(start, min(start + step, size)) for start in range(0, size, step)])
    for cuts in product(*steps):
        width = torch.Size([stop - start for start, stop in cuts]).numel()
        start = 0
        while start < queries:
            stop, span = _reach(request, start, budget // max(1, width))
            yield Region(cuts, (start, stop), span, request.shape, request.query.device)
            start = stop


def _reach(request: Request, start: int, budget: int) -> tuple[int, Range]:
    """How many rows from `start` on fit the budget, given what the mask lets them see, and what that is."""
    queries, keys = request.shape[-2:]
    stop = min(queries, start + max(1, budget // max(1, keys)))
    if request.mask is None:
        return stop, (0, keys)
    span = request.mask.span((start, stop), request.shape)
    while stop < queries:
        further = min(queries, stop + (stop - start))
        wider = request.mask.span((start, further), request.shape)
        if 2 * (further - start) * (wider[1] - wider[0]) > budget:
            break
        stop, span = further, wider
    return stop, span


def _join(parts: list[Tensor], lead: tuple[int, ...]) -> Tensor:
    """Puts the parts of `_blocks` together again: last axis fastest."""
    for axis in reversed(range(len(lead))):
        joined: list[Tensor] = []
        group: list[Tensor] = []
        size = 0
        for part in parts:
            group.append(part)
            size += part.shape[axis]
            if size == lead[axis]:
                joined.append(torch.cat(group, dim=axis) if len(group) > 1 else group[0])
                group, size = [], 0
        parts = joined
    return parts[0]


def _of_heads(kernel: Kernel, at: Region, shape: tuple[int, ...]) -> Kernel:
    """The kernel of the heads in a block."""
    if not at.lead or at.lead[-1] == (0, shape[-3]):
        return kernel
    start, stop = at.lead[-1]
    tensors = kernel.tensors().items()
    return kernel.with_tensors({n: t[start:stop] if t.dim() and t.shape[0] > 1 else t for n, t in tensors})


def _empty(kernel: Kernel) -> Kernel:
    """The kernel without its tensors' values, which autograd keeps."""
    return kernel.with_tensors({name: t.detach().to("meta") for name, t in kernel.tensors().items()})


def cost(request: Request) -> Cost:
    budget = BLOCK.get(request.query.device.type, BLOCK["cpu"])
    item = wide(request.query.dtype).itemsize
    return Cost(reference.cost(request).flops, 4.0 * item * max(budget, request.shape[-1]))


IMPLEMENTATION = Implementation(
    name="stream",
    summary="the reference in blocks of rows, recomputed in backward: any kernel, any mask, O(n) memory",
    refuse=lambda request: None,
    cost=cost,
    run=run,
)

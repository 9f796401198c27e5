"""Feature maps at linear cost: combine keys and values first, then let queries read the sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from heedful._errors import InvalidArgument
from heedful.kernels import Kernel
from heedful.masks import Mask, split_causal
from heedful.ops._request import Cost, Implementation, Request, wide

CHUNK = 128


class LinearState(NamedTuple):
    """All that a causal feature-map kernel remembers of the keys and values it has seen: constant in their number."""

    memory: Tensor  # [..., F, E], the sum of phi(k) v
    total: Tensor  # [..., F], the sum of phi(k)
    seen: Tensor  # [..., 1], how many keys


class Step(NamedTuple):
    output: Tensor
    state: LinearState


def run(request: Request) -> Tensor:
    request = request.expanded()
    parts = split_causal(request.mask, request.shape)
    assert parts is not None
    is_causal, mask = parts
    query, key, value = _prepare(request.kernel.features, request.query, request.key, request.value)
    keep = _visible(request, mask, key.dtype)
    key = key if keep is None else key * keep[..., None]
    if is_causal:
        out, total = _causal(query, key, value)
    else:
        out, total = query @ (key.mT @ value), query @ key.sum(dim=-2)[..., None]
    count = None
    if request.kernel.traits.division == "count":
        seen = torch.ones_like(key[..., 0]) if keep is None else (keep != 0).to(key.dtype)
        count = seen.cumsum(dim=-1)[..., None] if is_causal else seen.sum(dim=-1)[..., None, None]
    return _divide(request.kernel, out, total, count).to(request.value.dtype)


def _visible(request: Request, mask: Mask | None, dtype: torch.dtype) -> Tensor | None:
    """The weight of every key, `[..., K]`: zero where it is hidden, else exp of what the mask adds."""
    if mask is None:
        return None
    keep, bias = request._replace(mask=mask).visible()
    assert keep is not None
    keep = keep[..., 0, :].expand(*keep.shape[:-2], request.key.shape[-2])
    if bias is None:
        return keep.to(dtype)
    return keep * bias[..., 0, :].to(dtype).masked_fill(~keep, 0.0).exp()


def step(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, state: LinearState | None = None) -> Step:
    """Continues causal attention by the given tokens: O(F E) each, whatever came before."""
    dtype = value.dtype
    query, key, value = _prepare(kernel.steady_features, query, key, value)
    wanted = ((*key.shape[:-2], key.shape[-1], value.shape[-1]), (*key.shape[:-2], key.shape[-1]), (*key.shape[:-2], 1))
    state = LinearState(*(key.new_zeros(size) for size in wanted)) if state is None else state
    for name, tensor, size in zip(LinearState._fields, state, wanted, strict=True):
        if not isinstance(tensor, Tensor) or tensor.shape != size:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidArgument(
                f"step: the state's {name} must have shape {size}; got {got}: give what step returned"
            )
    out, total = _causal(query, key, value)
    out = out + query @ state.memory
    total = total + query @ state.total[..., None]
    count = state.seen[..., None] + torch.arange(1, query.shape[-2] + 1, device=query.device)[:, None]
    new = LinearState(state.memory + key.mT @ value, state.total + key.sum(dim=-2), state.seen + query.shape[-2])
    return Step(_divide(kernel, out, total, count).to(dtype), new)


def _prepare(
    features: Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    kind = wide(key.dtype)
    made = features(query.to(kind), key.to(kind))
    if made is None:
        raise InvalidArgument("the kernel has no finite feature map, so it keeps no state of constant size")
    return *made, value.to(made[1].dtype)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over j <= i of (q_i.k_j) v_j, and of q_i.k_j, by chunks: a state between chunks, a small triangle inside."""
    length = query.shape[-2]
    size = min(CHUNK, max(length, 1))
    chunks = -(-length // size)
    if torch.compiler.is_compiling() or chunks * size != length:
        query, key, value = (pad(x, (0, 0, 0, chunks * size - length)) for x in (query, key, value))
    query, key, value = (x.unflatten(-2, (chunks, size)) for x in (query, key, value))  # [..., C, c, F]
    memory, total = key.mT @ value, key.sum(dim=-2)[..., None]  # [..., C, F, E], [..., C, F, 1]
    future = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    inside = (query @ key.mT).masked_fill(future, 0.0)
    out = query @ _before(memory) + inside @ value
    sums = query @ _before(total) + inside.sum(dim=-1, keepdim=True)
    return out.flatten(-3, -2)[..., :length, :], sums.flatten(-3, -2)[..., :length, :]


def _before(chunks: Tensor) -> Tensor:
    """Sums of all chunks before each one. Not the whole sum less the chunk: what comes later must not round what came."""
    return pad(chunks.cumsum(dim=-3)[..., :-1, :, :], (0, 0, 0, 0, 1, 0))


def _divide(kernel: Kernel, out: Tensor, total: Tensor, count: Tensor | None) -> Tensor:
    if kernel.traits.division == "sum":
        return out / total.masked_fill(total == 0, 1.0)
    return out if kernel.traits.division is None or count is None else out / count.clamp_min(1)


def refuse(request: Request) -> str | None:
    if request.kernel.feature_size(request.query.shape[-1]) is None:
        return "the kernel has no finite feature map"
    parts = split_causal(request.mask, request.shape)
    if parts is None:
        return "the mask differs between queries by more than causality"
    if request.bias is not None and (request.bias.shape[-2] != 1 or request.kernel.scored):
        return "a float mask here must be the same for every query, on a kernel without a score"
    if parts[0] and request.shape[-2] != request.shape[-1]:
        return "causal linear attention takes as many queries as keys (attend.step continues from a state)"
    if request.dropout_p:
        return "coefficients are never formed, so none can be dropped"
    return None


def cost(request: Request) -> Cost:
    *lead, queries, keys = request.shape
    size = request.kernel.feature_size(request.query.shape[-1]) or 0
    width, heads = request.value.shape[-1] + 1, torch.Size(lead).numel()
    item = wide(request.query.dtype).itemsize
    flops = 2.0 * heads * (queries + keys) * size * width
    memory = heads * (queries + keys) * size
    parts = split_causal(request.mask, request.shape)
    if parts is not None and parts[0]:
        chunk = min(CHUNK, queries)
        flops += 2.0 * heads * queries * chunk * (size + width)
        memory += 2 * heads * -(-queries // chunk) * size * width + heads * queries * chunk
    return Cost(flops, float(memory * item))


IMPLEMENTATION = Implementation(
    name="linear",
    summary="feature maps in O(n): keys and values are summed before queries read them",
    refuse=refuse,
    cost=cost,
    run=run,
)

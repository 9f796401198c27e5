"""Feature maps at linear cost: combine keys and values first, then let queries read the sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from heedful._errors import InvalidArgument
from heedful.kernels import Kernel
from heedful.kernels.base import divisor
from heedful.masks import Mask, split_causal
from heedful.ops.fused import chunk_ops
from heedful.ops.request import Cost, Implementation, Request, wide

CHUNK = 128

# Devices on which the fused kernels run. Tests add the CPU, where Triton's interpreter runs them.
FUSED = frozenset({"cuda"})
# Whether they take a sum over all keys in float32 as well. It is a matrix product, which torch does faster; tests try it.
SINGLE = False


class LinearState(NamedTuple):
    """All that a causal feature-map kernel remembers of the keys and values it has seen: constant in their number."""

    memory: Tensor  # [..., F, E], the sum of phi(k) v
    total: Tensor  # [..., F], the sum of phi(k)
    seen: Tensor  # [..., 1], how many keys


class Step(NamedTuple):
    output: Tensor
    state: LinearState


def run(request: Request) -> Tensor:
    parts = split_causal(request.mask, request.shape)
    assert parts is not None
    is_causal, mask = parts
    division = request.kernel.traits.division
    fused = _fusable(request.kernel, request.query, request.value)
    name = request.kernel.fused_map
    # One sum over all keys is a matrix product, which loses only where 16 bit would be written out in 32 first.
    if fused and name is not None and (is_causal or SINGLE or request.query.dtype != torch.float32):
        return _run_fused(request, name, is_causal, _visible(request, mask, torch.float32))
    request = request.expanded()
    query, key, value = _prepare(request.kernel.features, request.query, request.key, request.value)
    keep = _visible(request, mask, key.dtype)
    count = None
    if division == "count":
        seen = torch.ones_like(key[..., 0]) if keep is None else (keep != 0).to(key.dtype)
        count = seen.cumsum(dim=-1)[..., None] if is_causal else seen.sum(dim=-1)[..., None, None]
    if fused and is_causal and key.dtype == torch.float32:
        query = query if count is None else query / count.clamp_min(1)
        return _run_fused(request._replace(query=query, key=key), "identity", is_causal, keep)
    key = key if keep is None else key * keep[..., None]
    out, total = sums(query, key, value, is_causal)
    return _divide(request.kernel, out, total, count).to(request.value.dtype)


def sums(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Sum over j of (q_i.k_j) v_j, and of q_i.k_j: over all j, or over j <= i."""
    if is_causal:
        return _causal(query, key, value)
    return query @ (key.mT @ value), query @ key.sum(dim=-2)[..., None]


def _fusable(kernel: Kernel, query: Tensor, value: Tensor) -> bool:
    return chunk_ops.usable(query, value, kernel.feature_size(query.shape[-1]) or 0, FUSED)


def _run_fused(request: Request, name: chunk_ops.MapName, is_causal: bool, weight: Tensor | None) -> Tensor:
    """By the fused kernels, which take `[B, H, n, D]`, as many heads of keys as of values, and a weight for each of those."""
    normal = request.kernel.traits.division == "sum"
    if weight is None and _is_plain(request.query, request.key, request.value):
        return chunk_ops.attention(request.query, request.key, request.value, None, name, normal, is_causal)
    lead, flat = request.shape[:-3], request.query.dim() == 2
    of_heads = weight is not None and weight.dim() > 1 and weight.shape[-2] > 1
    if not flat and of_heads:
        request = request.expanded()
    query, key, value = (
        x[None, None] if flat else x.expand(*lead, *x.shape[-3:]).reshape(-1, *x.shape[-3:])
        for x in (request.query, request.key, request.value)
    )
    if weight is not None:
        weight = weight.expand(*lead, *key.shape[1:3]).reshape(key.shape[:3])
    out = chunk_ops.attention(query, key, value, weight, name, normal, is_causal)
    return out.reshape(*request.query.shape[:-1] if flat else (*lead, *request.query.shape[-3:-1]), value.shape[-1])


def _is_plain(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether tensors are as the kernels take them: four axes, of which none broadcasts."""
    return query.dim() == 4 and query.shape[0] == key.shape[0] and key.shape[:3] == value.shape[:3]


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
    dtype, length = value.dtype, query.shape[-2]
    fused = _fusable_step(kernel, query, key, value, state)
    name = kernel.fused_map if fused else None
    original = value
    if name is None:
        query, key, value = _prepare(kernel.steady_features, query, key, value)
    lead, kind = key.shape[:-2], wide(key.dtype)
    wanted = ((*lead, key.shape[-1], value.shape[-1]), (*lead, key.shape[-1]), (*lead, 1))
    state = LinearState(*(key.new_zeros(size, dtype=kind) for size in wanted)) if state is None else state
    for field, tensor, size in zip(LinearState._fields, state, wanted, strict=True):
        if not isinstance(tensor, Tensor) or tensor.shape != size:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidArgument(
                f"step: the state's {field} must have shape {size}; got {got}: give what step returned"
            )
    count = state.seen[..., None] + torch.arange(1, length + 1, device=query.device)[:, None]
    seen = state.seen + length
    if fused and kind == torch.float32:
        if kernel.traits.division == "count":
            query = query / count
        out, memory, total = _step_fused(kernel, query, key, original, state, name or "identity")
        return Step(out, LinearState(memory, total, seen))
    out, total = _causal(query, key, value)
    out = out + query @ state.memory
    total = total + query @ state.total[..., None]
    new = LinearState(state.memory + key.mT @ value, state.total + key.sum(dim=-2), seen)
    return Step(_divide(kernel, out, total, count).to(dtype), new)


def _fusable_step(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, state: LinearState | None) -> bool:
    """Whether the fused kernels take a step: nothing asks for a gradient, nothing broadcasts, the state is in float32."""
    tensors = [query, key, value, *kernel.tensors().values(), *(state or ())]
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors):
        return False
    if any(not isinstance(x, Tensor) or x.dtype != torch.float32 for x in (state or ())[:2]):
        return False
    return query.shape[:-2] == key.shape[:-2] == value.shape[:-2] and _fusable(kernel, query, value)


def _step_fused(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, state: LinearState, name: chunk_ops.MapName
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, memory and total by the fused kernels, which take two leading axes."""
    lead, normal = key.shape[:-2], kernel.traits.division == "sum"
    query, key, value, memory = (
        x.reshape(-1, lead[-1] if lead else 1, *x.shape[-2:]) for x in (query, key, value, state.memory)
    )
    total = state.total.reshape(memory.shape[:-1])
    out, memory, total = chunk_ops.chunks_step(query, key, value, memory, total, name, normal)
    return out.reshape(*lead, *out.shape[-2:]), memory.reshape(state.memory.shape), total.reshape(state.total.shape)


def _prepare(
    features: Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    kind = wide(key.dtype)
    pair = features(query.to(kind), key.to(kind))
    if pair is None:
        raise InvalidArgument("the kernel has no finite feature map, so it keeps no state of constant size")
    return *pair, value.to(pair[1].dtype)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over j <= i of (q_i.k_j) v_j, and of q_i.k_j, by chunks: a state between chunks, a small triangle inside."""
    length = query.shape[-2]
    size = min(CHUNK, max(length, 1))
    chunks = -(-length // size)
    compiling = torch.compiler.is_compiling()
    if compiling or chunks * size != length:
        # Padding by nothing keeps strides, which a graph compiled for any length does not foresee.
        parts = (x.contiguous() if compiling else x for x in (query, key, value))
        query, key, value = (pad(x, (0, 0, 0, chunks * size - length)) for x in parts)
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
        return out / divisor(total)
    return out if kernel.traits.division is None or count is None else out / count.clamp_min(1)


def refuse(request: Request) -> str | None:
    if request.kernel.feature_size(request.query.shape[-1]) is None:
        return "the kernel has no finite feature map"
    parts = split_causal(request.mask, request.shape)
    if parts is None:
        return "the mask differs between queries by more than causality"
    if request.bias is not None and (request.bias.shape[-2] != 1 or request.kernel.scored):
        return "a float mask here must be the same for every query, on a kernel without a score"
    if request.factors is not None:
        return (
            "a bias of low rank (masks.low_rank) differs between queries, and its exponential has no finite feature map"
        )
    if parts[0] and request.shape[-2] != request.shape[-1]:
        return "causal linear attention takes as many queries as keys (attend.step continues from a state)"
    if request.dropout_p:
        return "coefficients are never formed, so none can be dropped"
    return None


def guards(request: Request) -> bool:
    """The fused kernels read no hidden key, and let no later one reach an earlier row."""
    return _fusable(request.kernel, request.query, request.value) and request.kernel.fused_map is not None


def cost(request: Request) -> Cost:
    *lead, queries, keys = request.shape
    size = request.kernel.feature_size(request.query.shape[-1]) or 0
    width, heads = request.value.shape[-1] + 1, torch.Size(lead).numel()
    item = wide(request.query.dtype).itemsize
    flops = 2.0 * heads * (queries + keys) * size * width
    fused = _fusable(request.kernel, request.query, request.value)
    memory = 0 if fused and request.kernel.fused_map is not None else heads * (queries + keys) * size
    parts = split_causal(request.mask, request.shape)
    if parts is not None and parts[0]:
        chunk = min(CHUNK, queries)
        flops += 2.0 * heads * queries * chunk * (size + width)
        # Sums of the chunks, of which the fused kernels keep one in eight, and the coefficients inside chunks.
        sums = 2 * heads * -(-queries // chunk) * size * width
        memory += sums // 8 if fused else sums + heads * queries * chunk
    return Cost(flops, float(memory * item))


IMPLEMENTATION = Implementation(
    name="linear",
    summary="feature maps in O(n): keys and values are summed before queries read them",
    refuse=refuse,
    cost=cost,
    run=run,
    guards=guards,
)

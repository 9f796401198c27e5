"""Fused Triton kernels: elementwise kernels of inner products and distances at the speed of fused softmax attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from heedful import _runtime, masks
from heedful._runtime import lasting
from heedful.kernels import FusedForm, Kernel
from heedful.kernels.base import Parameter, unit
from heedful.masks import Mask
from heedful.ops import reference
from heedful.ops.fused._device import approximate, interpreting, unable
from heedful.ops.fused.listing import Sight
from heedful.ops.request import Cost, Implementation, Request, wide

LARGEST = 256
# The least bias with which coefficients are to be expected that the hardware's hyperbolic tangent gives well.
LOWEST = -8.5

DIVISIONS = {None: 0, "sum": 1, "count": 2}

# Types in which the origin of vectors moves before distances are taken.
MOVED: frozenset[torch.dtype] = frozenset({torch.float32})

# What kernels read of masks, by the flag beside them, the grid, the device and its stream.
OF_MASKS: WeakKeyDictionary[Mask, dict[Any, Any]] = WeakKeyDictionary()
OF_TENSORS = WeakTensorKeyDictionary()
GRIDS = 4  # of one mask, at most


def run(request: Request) -> Tensor:
    form = request.kernel.fused_form
    assert form is not None
    from heedful.ops.fused.operators import attention

    arguments, seen = _arguments(form, request)
    *lead, queries, _ = request.shape
    out = attention(*arguments, sight=seen)
    out, width = out.reshape(*lead, queries, arguments[2].shape[-1]), request.value.shape[-1]
    out = out if out.shape[-1] == width else out[..., :width]
    for factor in form.factors:
        out = out * (factor.to(out.dtype)[:, None, None] if isinstance(factor, Tensor) and factor.dim() else factor)
    return out


def detail(request: Request) -> str:
    """Which kernels serve a request that `refuse` lets through."""
    form = looked_at(request.kernel)
    assert form is not None
    from heedful.ops.fused import launch, serving

    return serving.passes(launch.Problem(*_arguments(form, request)[0]))


def _arguments(form: FusedForm, request: Request) -> tuple[tuple[Any, ...], Sight]:
    """Those of the operator, and what kernels read of the mask."""
    query, key, value, alpha, column = _inputs(form, request)
    lead = request.shape[:-2]
    heads, batch = lead[-1] if lead else 1, math.prod(lead[:-1])
    seen = sight(request.mask, False, request.shape, query.device)
    bias = (
        request.bias if column is None else column if request.bias is None else request.bias.to(column.dtype) + column
    )

    def whole(x: Tensor) -> Tensor:
        axes = (*lead[:-1], x.shape[-3] if lead else 1)
        return x.expand(*axes, *x.shape[-2:]).reshape(batch, axes[-1], *x.shape[-2:])

    arguments = (
        whole(query),
        whole(key),
        whole(value),
        _by_head(alpha, heads, query),
        None if not isinstance(form.beta, Tensor) and form.beta == 0 else _by_head(form.beta, heads, query),
        *((None, None) if request.factors is None else (_of_pairs(x.to(query.dtype), lead) for x in request.factors)),
        None if bias is None else _of_pairs(bias, lead),
        *seen.given,
        *_settings(form, seen, value.dtype),
    )
    return arguments, seen


def _masking(parts: masks.Parts, lead: Sequence[int]) -> tuple[Tensor | None, ...]:
    """Lengths, ids of queries and of keys, `keep` and blocks with leading axes that broadcast to (batch, heads)."""
    ids = parts.ids or (None, None)
    by_batch = [(parts.lengths, 0), (ids[0], 1), (ids[1], 1)]
    pairs = parts.keep, None if parts.blocks is None else parts.blocks[0]
    return (
        *(None if x is None else _of_batch(x, lead, tail) for x, tail in by_batch),
        *(None if x is None else _of_pairs(x, lead) for x in pairs),
    )


def _of_batch(x: Tensor, lead: Sequence[int], tail: int) -> Tensor:
    """A tensor whose leading axes are the first of the grid's."""
    at = x.dim() - tail
    return _flat(x.reshape(*x.shape[:at], *(1,) * (len(lead) - at), *x.shape[at:]), lead, tail)


def _of_pairs(x: Tensor, lead: Sequence[int]) -> Tensor:
    """`[..., n, m]`, whose leading axes are the last of the grid's."""
    missing = len(lead) + 2 - x.dim()
    return _flat(x.reshape(*(1,) * missing, *x.shape) if missing else x, lead, 2)


def _settings(form: FusedForm, seen: Sight, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of the operator that are no tensors."""
    function = _function(form, dtype), form.degree, DIVISIONS[form.division], form.distance
    return list(seen.block_size), seen.low, seen.high, *function


def _inputs(form: FusedForm, request: Request) -> tuple[Tensor, Tensor, Tensor, Parameter, Tensor | None]:
    """Query, key and value as the kernel reads them, alpha, and a term of every key."""
    query, key, value = request.query, request.key, request.value
    alpha: Parameter = query.shape[-1] ** -0.5 if form.alpha is None else form.alpha
    column = None
    if form.inputs == "unit":
        query, key = (unit(x.to(wide(x.dtype))) for x in (query, key))
    if form.inputs == "folded":
        expanded = request.expanded() if request.kernel.tensors() else request
        folded = request.kernel.fold(*(x.to(wide(x.dtype)) for x in (expanded.query, expanded.key)))
        assert folded is not None
        query, key, value, alpha, column = folded.query, folded.key, expanded.value, folded.scale, folded.column
        column = None if column is None else request.per_head(column, axis=-2)[..., None, :]
    query, key = query.to(value.dtype), key.to(value.dtype)
    step = 16 // value.element_size()
    query, key, value = (pad(x, (0, -x.shape[-1] % step)) if x.shape[-1] % step else x for x in (query, key, value))
    return query, key, value, alpha, column


def _function(form: FusedForm, dtype: torch.dtype) -> str:
    """The function that makes coefficients: a sigmoid in 16 bit is tried by the hardware's hyperbolic tangent, see `approximate`."""
    is_narrow = dtype != torch.float32 or interpreting()
    is_high = not isinstance(form.beta, Tensor) and form.beta >= LOWEST
    quick = form.activation == "sigmoid" and is_narrow and is_high and approximate.allowed
    return "tanh" if quick else form.activation


def _by_head(parameter: Parameter, heads: int, like: Tensor) -> Tensor:
    if not isinstance(parameter, Tensor):
        return torch.full((heads,), float(parameter), dtype=torch.float32, device=like.device)
    if parameter.dtype == torch.float32 and parameter.shape == (heads,) and parameter.is_contiguous():
        return parameter  # as it is, without steps that a backward pass would take back
    return parameter.to(like.device, torch.float32).expand(heads).contiguous()


def ready(request: Request) -> Callable[..., Tensor] | None:
    """What such requests come down to, with all but query, key and value settled; None where more of it must be looked at each time.

    So it is where inputs are read as they are and the mask, if any, adds nothing. It is given `sight` of a mask that is neither none nor
    plain causality, and `parameters` of a kernel with tensors.
    """
    form, kernel = looked_at(request.kernel), request.kernel
    query, key, value = request.query, request.key, request.value
    if form is None or form.inputs != "plain" or form.factors or kernel.of_pairs is not kernel:
        return None
    if request.bias is not None or request.factors is not None:
        return None
    step = 16 // value.element_size()
    alike = query.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0] and key.shape[1] == value.shape[1]
    if not alike or query.shape[-1] % step or value.shape[-1] % step or query.device.type not in _runtime.SETTLED:
        return None
    if form.distance and query.dtype in MOVED:
        return None
    from heedful.ops.fused.operators import Settled

    # Learned ones are those of each call (`parameters`): nothing of this one is kept.
    alpha = (
        query.shape[-1] ** -0.5 if form.alpha is None else 0.0 if isinstance(form.alpha, Tensor) else float(form.alpha)
    )
    beta = 0.0 if isinstance(form.beta, Tensor) else float(form.beta) or None
    seen = sight(request.mask, False, request.shape, query.device)
    settings = _settings(form, seen, value.dtype)
    return Settled((alpha, beta), query.shape[1], query.device, *settings, is_learned=bool(kernel.tensors()))


def parameters(kernel: Kernel, alpha: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """These of a kernel that `ready` has served, with its tensors as they are now."""
    form, heads = kernel.fused_form, alpha.shape[0]
    assert form is not None
    alpha = _begun(form.alpha, heads, alpha) if isinstance(form.alpha, Tensor) else alpha
    return alpha, _begun(form.beta, heads, alpha) if isinstance(form.beta, Tensor) else beta


def _begun(parameter: Tensor, heads: int, like: Tensor) -> Tensor:
    """One for each head, which begins where kernels may count on it."""
    found = _by_head(parameter, heads, like)
    return found.clone() if found.data_ptr() % 16 else found


def sight(attn_mask: Mask | Tensor | None, is_causal: bool, shape: tuple[int, ...], device: torch.device) -> Sight:
    """What kernels read of a mask, made once for each grid and kept as long as the mask is and nothing is written into its tensors."""
    # Another name for a tensor, so that what is kept with the tensor does not keep it.
    mask = masks.from_sdpa(attn_mask.detach() if isinstance(attn_mask, Tensor) else attn_mask, is_causal)
    stream = None if mask is None else lasting(device)
    versions = None if mask is None or stream is None else masks.versions(mask)
    if versions is None:
        return _seen(mask, shape, device)
    home: Any = OF_TENSORS if isinstance(attn_mask, Tensor) else OF_MASKS
    known, where = home.setdefault(attn_mask, {}), (is_causal, shape, device, stream)
    then, found = known.get(where, (None, None))
    if then != versions:
        if len(known) >= GRIDS:
            known.clear()
        with torch.inference_mode(False):  # a later call may record gradients
            found = _seen(mask, shape, device)
        known[where] = versions, found
    return found


def _seen(mask: Mask | None, shape: tuple[int, ...], device: torch.device) -> Sight:
    parts = masks.parts(mask, shape, device)
    *lead, queries, keys = shape
    sizes = math.prod(lead[:-1]), lead[-1] if lead else 1, queries, keys
    block = (1, 1) if parts.blocks is None else parts.blocks[1]
    return Sight(sizes, device, _masking(parts, lead), block, parts.low, parts.high)


def _flat(x: Tensor, lead: Sequence[int], tail: int) -> Tensor:
    """Leading axes joined to (batch, heads); each of one entry where it stands for all."""
    axes = x.shape[: x.dim() - tail]
    if not lead:
        return x.reshape(1, 1, *x.shape)
    if any(size > 1 for size in axes[:-1]):
        x = x.expand(*lead[:-1], *x.shape[len(lead) - 1 :])
    return x.reshape(math.prod(x.shape[: len(axes) - 1]), axes[-1], *x.shape[x.dim() - tail :])


def looked_at(kernel: Kernel) -> FusedForm | None:
    """Its form, for a look: nothing is recorded, or a checkpoint would count what is saved for it in the first call of a signature alone."""
    with torch.no_grad():
        return kernel.fused_form


def refuse(request: Request) -> str | None:
    form = looked_at(request.kernel)
    if form is None:
        return f"{type(request.kernel).__name__} is no elementwise function of one inner product or squared distance"
    if request.dropout_p:
        return "fused kernels drop no coefficients"
    if (
        request.bias is not None
        and request.bias.requires_grad
        and torch.is_grad_enabled()
        and request.bias.shape[-2] != 1
    ):
        return "the gradient of a full bias is a matrix of queries x keys; masks.low_rank has a small one"
    if request.bias is not None and request.bias.shape[-2] != 1 and form.inputs == "folded":
        return "a full bias beside the product's own term of every key"
    if max(_folded_size(form, request), request.value.shape[-1]) > LARGEST:
        return f"head sizes above {LARGEST} do not fit"
    return unable(request.value)


def _folded_size(form: FusedForm, request: Request) -> int:
    if form.inputs != "folded":
        return request.query.shape[-1]
    folded = request.kernel.fold(request.query[..., :0, :], request.expanded().key[..., :0, :])
    return LARGEST + 1 if folded is None else folded.query.shape[-1]


def guards(request: Request) -> bool:
    """Inside the kernels nothing leaks; what is computed from the inputs before them is not inside."""
    form = looked_at(request.kernel)
    return form is not None and form.inputs == "plain" and request.factors is None and request.bias is None


def cost(request: Request) -> Cost:
    """No coefficient is written; two numbers per row are kept."""
    rows = math.prod(request.shape[:-1]) + math.prod((*request.shape[:-2], request.shape[-1]))
    return Cost(reference.cost(request).flops, 8.0 * rows)


IMPLEMENTATION = Implementation(
    name="triton",
    summary="fused forward and backward on the GPU: no coefficient is written",
    refuse=refuse,
    cost=cost,
    run=run,
    guards=guards,
    detail=detail,
)

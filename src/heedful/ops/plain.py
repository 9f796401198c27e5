"""Calls that need neither checks nor a plan again: told by a signature, and kept as what is run for it.

Two kinds are kept. Softmax attention without a mask that is torch's own call as it stands, with plain causality on a CPU alone and after
a look whether anything hidden could leak; and, on a GPU, calls of the fused kernels without a mask or with one that adds nothing to
scores, whatever learned parameters and masks hold.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from heedful import _runtime, masks
from heedful.kernels import Kernel, Softmax
from heedful.masks import Mask
from heedful.ops import fused
from heedful.ops.fold import LAUNCHED
from heedful.ops.fused._device import approximate
from heedful.ops.request import Request
from heedful.ops.shield import tame

Signature = tuple[Any, ...]
# Of query, key and value, and what else `run` gives it. None: these numbers need more than the one call.
Run = Callable[..., Tensor | None]

# None: looked at, and nothing to keep.
KNOWN: dict[Signature, Run | None] = {}
MOST = 4096

NUMBERS = (float, int, bool, str, type(None))


def signature(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask | Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    kernel: Kernel | Sequence[Kernel] | None,
) -> Signature | None:
    """All that decides how such a call is computed; None where more does."""
    if torch.compiler.is_compiling() or not type(query) is type(key) is type(value) is Tensor:
        return None
    if not (scale is None or type(scale) is float) or _runtime.transforming():
        return None
    device, dtype = query.device, query.dtype
    masking = _masking(attn_mask, is_causal, device)
    if masking is None:
        return None
    if dtype != key.dtype or dtype != value.dtype:
        return None
    if torch._C._is_any_autocast_enabled() and _is_cast(device, dtype):
        return None
    kernel = _SOFTMAX if kernel is None else kernel
    numbers = _numbers(kernel)
    if numbers is None and device.type in _runtime.SETTLED and isinstance(kernel, Kernel):
        numbers = _described(kernel, tensors_too=True)
    if numbers is None:
        return None
    flags = enable_gqa, approximate.allowed, torch.are_deterministic_algorithms_enabled()
    shapes = query.shape, key.shape, value.shape
    return (masking, numbers, scale, *shapes, dtype, device, key.device, value.device, *flags)


def _masking(attn_mask: Mask | Tensor | None, flag: bool, device: torch.device) -> Hashable | None:
    """False where there is no mask, True where it is plain causality, else the kind of a mask that adds nothing to scores; None of others."""
    if attn_mask is None:
        return flag
    if attn_mask is masks.causal:
        return True
    if device.type not in _runtime.SETTLED or not isinstance(attn_mask, Mask | Tensor):
        return None
    if isinstance(attn_mask, Tensor):
        if type(attn_mask) is not Tensor or attn_mask.dtype != torch.bool:
            return None
    elif attn_mask.bias is not None or attn_mask.factors is not None:
        return None
    mask = masks.from_sdpa(attn_mask)
    kind = None if mask is None else masks.kind(mask)
    return None if kind is None else (flag, kind)


def run(
    known: Run,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask | Tensor | None,
    is_causal: bool,
    scale: float | None,
    kernel: Any,
) -> Tensor | None:
    """What is kept for a signature, of the numbers of one call."""
    # Settled calls of the fused kernels have it; all others take vectors alone.
    is_learned = getattr(known, "is_learned", None)
    if is_learned is None:
        return known(query, key, value)
    seen = parameters = None
    if attn_mask is not None and attn_mask is not masks.causal:
        seen = fused.sight(attn_mask, is_causal, (*query.shape[:3], key.shape[2]), query.device)
    if is_learned:
        parameters = fused.parameters(kernel.with_scale(scale), *known.rows())  # type: ignore[attr-defined]
    return known(query, key, value, seen, parameters)


def _is_cast(device: torch.device, dtype: torch.dtype) -> bool:
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) != dtype


def _numbers(kernel: Kernel | Sequence[Kernel]) -> Signature | None:
    """A kernel by its kind and its parameters, where these are numbers; kept with it, since it never changes."""
    if not isinstance(kernel, Kernel):
        return None
    known = kernel.__dict__.get(KEPT, 0)
    if known == 0:
        known = _described(kernel, tensors_too=False)
        object.__setattr__(kernel, KEPT, known)
    return known


def _described(kernel: Kernel, *, tensors_too: bool) -> Signature | None:
    """A kernel by its kind, its parameters and the kernels that it is made of; tensors, where they are taken, by what they are alone."""
    found: list[Any] = [type(kernel)]
    for name in kernel._names:
        one = getattr(kernel, name)
        if isinstance(one, Kernel):
            one = _described(one, tensors_too=tensors_too)
            if one is None:
                return None
        elif tensors_too and type(one) in (Tensor, nn.Parameter):
            one = one.shape, one.dtype, one.device
        elif type(one) not in NUMBERS:
            return None
        found.append(one)
    return tuple(found)


KEPT = "_numbers"
_SOFTMAX = Softmax()


def learn(new: Signature, given: Sequence[Tensor], request: Request, chosen: str) -> None:
    """Keeps what a checked request of these vectors comes down to, where that is one call."""
    if torch._C._len_torch_dispatch_stack():
        return  # what a mode makes of tensors is its own
    if request.query.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # so is what a graph's capture makes
    if len(KNOWN) >= MOST:
        KNOWN.clear()
    query, key, value = given
    plain = query.dim() == 4 and key.shape[:-1] == value.shape[:-1] and query.device.type in ("cuda", "cpu")
    KNOWN[new] = _run_of(request, chosen) if plain else None


def _run_of(request: Request, chosen: str) -> Run | None:
    if chosen == "sdpa" and _is_torchs(request):
        return _torchs(request)
    return fused.ready(request) if chosen == "triton" else None


def _is_torchs(request: Request) -> bool:
    """Whether torch's attention takes a request as it is: nothing to pad, to cut in parts or to turn around."""
    kernel = request.kernel
    if type(kernel) is not Softmax or isinstance(kernel.scale, Tensor):
        return False
    # On other devices a look at the numbers would wait.
    if request.mask is not None and (request.mask is not masks.causal or request.query.device.type != "cpu"):
        return False
    alike = request.query.shape[-1] == request.value.shape[-1] and 0 not in request.shape
    alike = alike and max(request.query.shape[0], request.key.shape[0]) <= LAUNCHED
    return alike and (kernel.scale is None or kernel.scale > 0)


def _torchs(request: Request) -> Run:
    query, key, scale = request.query, request.key, request.kernel.scale  # type: ignore[attr-defined]
    # The number that a fold gives: torch's own default may differ from it in the last digit, and watched calls are folded. A flag
    # that changes nothing is left out, as the kernel for it may be another one.
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    run = partial(scaled_dot_product_attention, scale=scale, enable_gqa=query.shape[-3] != key.shape[-3])
    return run if request.mask is None else partial(_unless_wild, partial(run, is_causal=True))


def _unless_wild(run: Run, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """Torch multiplies what causality hides by zero, which hides no NaN: such numbers go the long way."""
    return run(query, key, value) if tame(value.dtype, query, key, value) else None

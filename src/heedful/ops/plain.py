"""Softmax attention without a mask that is torch's own call as it stands: told by a signature, checked and planned once for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heedful.kernels import Kernel, Softmax
from heedful.ops.fold import LAUNCHED
from heedful.ops.request import Request

Signature = tuple[Any, ...]

# Those that were found to be torch's own.
KNOWN: set[Signature] = set()
MOST = 4096


def signature(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    enable_gqa: bool,
    kernel: Kernel | Sequence[Kernel] | None,
) -> Signature | None:
    """All that decides how such a call is computed, with torch's `scale` and `enable_gqa` last; None where more does."""
    if kernel is not None:
        if type(kernel) is not Softmax or isinstance(kernel.scale, Tensor):
            return None
        scale = kernel.scale if scale is None else scale
    if torch.compiler.is_compiling() or not type(query) is type(key) is type(value) is Tensor:
        return None
    device = query.device
    if device.type not in ("cpu", "cuda") or torch.is_autocast_enabled(device.type):
        return None
    same = key.device == value.device == device and query.dtype == key.dtype == value.dtype
    same = same and key.shape[:-1] == value.shape[:-1] and query.dim() == 4
    if not same or not (scale is None or type(scale) is float):
        return None
    # The number that a fold gives: torch's own default may differ from it in the last digit, and watched calls are folded.
    scale = query.shape[-1] ** -0.5 if scale is None and query.shape[-1] else scale
    # A flag that changes nothing is left out, as the kernel for it may be another one.
    shared = enable_gqa and query.shape[-3] != key.shape[-3]
    return query.shape, key.shape, value.shape, query.dtype, device, scale, shared


def run(query: Tensor, key: Tensor, value: Tensor, known: Signature) -> Tensor:
    return scaled_dot_product_attention(query, key, value, scale=known[-2], enable_gqa=known[-1])


def fits(request: Request, new: Signature) -> bool:
    """Whether torch's attention takes a checked request as it is: nothing to pad, to cut in parts or to turn around."""
    alike = request.query.shape[-1] == request.value.shape[-1] and 0 not in request.shape
    alike = alike and max(request.query.shape[0], request.key.shape[0]) <= LAUNCHED
    return alike and new[-2] is not None and new[-2] > 0


def learn(new: Signature) -> None:
    if len(KNOWN) >= MOST:
        KNOWN.clear()
    KNOWN.add(new)

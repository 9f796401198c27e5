"""Whether an operator of torch is needed, or its launches serve."""

from __future__ import annotations

import torch
from torch import Tensor


def eager(*tensors: Tensor | None) -> bool:
    """Whether plain launches serve, which take less time than an operator: nobody traces or looks on."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return all(x is None or type(x) is Tensor or type(x) is torch.nn.Parameter for x in tensors)


def recorded(*tensors: Tensor | None) -> bool:
    """Whether gradients will be asked for."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)

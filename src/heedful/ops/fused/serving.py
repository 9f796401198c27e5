"""Which kernels serve a problem: those that are made for one chip and tried with some versions of Triton, or the portable ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from heedful.ops.fused._device import interpreting

if TYPE_CHECKING:
    from heedful.ops.fused.launch import Problem

# Versions of Triton that `hopper` was tried with: Gluon is experimental, and changes between them.
HOPPER = ("3.6.", "3.7.", "3.8.", "3.9.")
VERSIONS = f"{HOPPER[0]}* to {HOPPER[-1]}*"


def refusal(problem: Problem) -> str | None:
    """Why the forward pass for Hopper does not serve, or None."""
    if interpreting() or problem.query.device.type != "cuda":
        return "made for GPUs of compute capability 9.0"
    if not triton.__version__.startswith(HOPPER):
        return f"made for Triton {VERSIONS}, this is {triton.__version__}"
    from heedful.ops.fused import hopper

    return hopper.refuse(problem)


def forward(problem: Problem) -> Callable[..., None] | None:
    """The forward pass for Hopper, where it serves."""
    if refusal(problem) is not None:
        return None
    from heedful.ops.fused import hopper

    return hopper.forward


def backward(problem: Problem, above: Tensor) -> Callable[..., None] | None:
    """Likewise of the backward pass."""
    if forward(problem) is None:
        return None
    from heedful.ops.fused import hopper_backward

    return hopper_backward.backward if hopper_backward.refuse(problem, above) is None else None


def passes(problem: Problem) -> str:
    """In words, where the gradient above lies as the result does."""
    reason = refusal(problem)
    if reason is not None:
        return f"portable kernels (those for Hopper: {reason})"
    from heedful.ops.fused import hopper_backward

    above = torch.empty(*problem.query.shape[:3], problem.value.shape[-1], dtype=problem.value.dtype, device="meta")
    learned = any(x is not None and x.requires_grad for x in (problem.alpha, problem.beta))
    reason = "no gradients of scales or biases" if learned else hopper_backward.refuse(problem, above)
    return "kernels for Hopper" + ("" if reason is None else f", backward portable ones (those for Hopper: {reason})")


def standing() -> str:
    """Whether this version of Triton has the kernels for Hopper."""
    if triton.__version__.startswith(HOPPER):
        return f"{triton.__version__}, with kernels for Hopper"
    return f"{triton.__version__}, portable kernels alone: those for Hopper are made for {VERSIONS}"

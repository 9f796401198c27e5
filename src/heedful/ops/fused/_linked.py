"""Launches one behind the other: the next begins while the last warps of the one before still work, and waits for what these write."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from heedful.ops.fused._device import interpreting

# How a kernel is launched that waits as below; on chips of compute capability 9.0 alone.
LINKED: dict[str, Any] = {} if interpreting() else {"launch_pdl": True}
COMPILED = tl.constexpr(not interpreting())


@triton.jit
def linked():
    """The next launch may begin; the one before, and so all before it, has ended."""
    if COMPILED:
        gdc_launch_dependents()
        gdc_wait()

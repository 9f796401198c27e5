"""Parts that programs left, added up: a kernel that others end with."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,misc"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from heedful.ops.fused.prepared import Launcher

BLOCK = 1024


@triton.jit
def total(part_, out_, count, size, BLOCK: tl.constexpr):
    """Parts `[count, size]` in order, so that results repeat bit by bit; in the type of the output."""
    cols = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found, at = tl.zeros([BLOCK], tl.float32), part_ + cols
    for _ in range(count):
        found += tl.load(at, mask=cols < size, other=0.0)
        at += size
    tl.store(out_ + cols, found.to(out_.dtype.element_ty), mask=cols < size)


def add_up(launch: Launcher, parts: Tensor, out: Tensor) -> None:
    """The sum over the first axis."""
    count, size = parts.shape[0], out.numel()
    launch(total, (-(-size // BLOCK),), parts, out, count, size, BLOCK=BLOCK, num_warps=4)

"""From a problem to the launch of `_hopper`: which ones it serves, where heads lie, how tiles are shared out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from heedful.ops.fused import _forward, _hopper
from heedful.ops.fused._blocks import Constants
from heedful.ops.fused._device import chip
from heedful.ops.fused._linked import LINKED
from heedful.ops.fused.activations import UNITS

if TYPE_CHECKING:
    from heedful.ops.fused.launch import Problem

NUMBERS = 8192  # of keys whose norms a program takes

BRIEF = 1024  # queries and keys of short causal sequences

# Of how many heads tiles may be ordered together.
TOGETHER = (2, 4, 8, 16, 32)

# Bytes of heads whose tiles are ordered together, so that they find one another's rows in the cache: 16 for each number.
NEAR = 80 * 2**20


class Numbers(NamedTuple):
    """Lengths, and where heads begin in the plane of each tensor: rows by batch and by head, columns by head."""

    Q: int
    K: int
    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]


@dataclass(frozen=True)
class Form:
    """What is fixed when the kernel is compiled."""

    ACT: str
    UNIT: float
    D: int
    CONSUMERS: int  # warpgroups
    STAGES: int
    AHEAD: int  # tiles of queries in shared memory
    REGISTERS: int  # of a consumer's thread
    BESIDE: bool  # coefficients are made while the warpgroup's own product runs
    BETA: bool = False
    DISTANCE: bool = False
    DIVIDED: bool = False  # by the sum of the row
    CAUSAL: bool = False
    STAT: bool = False
    ONES: bool = False  # rows are summed by the matrix unit, as products with ones
    TURNS: bool = True  # warpgroups multiply one after the other
    TICKETS: bool = False  # programs draw their tiles
    MEASURED: bool = False  # norms of keys are taken as they come in, not by a launch before
    FEW: int = 24  # registers of all other threads
    ROWS: int = 64  # of a warpgroup
    COLS: int = 128  # keys of a block


Plane = tuple[list[int], list[int], int, int, int]


def plane(x: Tensor) -> Plane | None:
    """Shape and strides of the plane that [B, H, n, D] lies in; rows by batch, rows and columns by head where one begins."""
    B, H, n, D = x.shape
    by_batch, by_head, by_row, one = x.stride()
    by_batch, by_head = by_batch if B > 1 else 0, by_head if H > 1 else 0
    if one != 1 or by_row < D or by_row % 8 or by_batch % by_row or x.data_ptr() % 16:
        return None
    beside = by_head % by_row != 0
    if beside and (H - 1) * by_head + D > by_row:
        return None
    rows_b, rows_h, cols_h = by_batch // by_row, 0 if beside else by_head // by_row, by_head if beside else 0
    return [(B - 1) * rows_b + (H - 1) * rows_h + n, (H - 1) * cols_h + D], [by_row, 1], rows_b, rows_h, cols_h


def is_cuda(x: Tensor) -> bool:
    return x.device.type == "cuda"


def refuse(problem: Problem) -> str | None:
    """Why this kernel does not serve a problem, or None."""
    _, H, G, Q, K = problem.sizes
    query, key, value = problem.query, problem.key, problem.value
    if not is_cuda(query) or chip(query.device).major != 9:
        return "made for GPUs of compute capability 9.0"
    if any(x.dtype != torch.bfloat16 for x in (query, key, value)):
        return f"bfloat16 alone, which has the range of coefficients that are not divided, got {query.dtype}"
    if any(x is not None for x in problem[5:13]) or problem.low is not None:
        return "no mask but causality, and nothing added to scores but a number of the head"
    if problem.high is not None and (problem.high != 0 or Q != K):
        return f"causality of as many queries as keys, got j - i <= {problem.high} of {Q} and {K}"
    if problem.activation not in (("exp",) if problem.distance else ("exp", "sigmoid", "tanh", "relu_squared")):
        return f"exp, and of products sigmoid and relu_squared, got {problem.activation}"
    if problem.division not in ((0, 1) if problem.activation == "exp" else (0,)):
        return "rows are divided by their sum alone, and where it is one of exponentials"
    if query.shape[-1] not in (64, 128) or value.shape[-1] != query.shape[-1]:
        return f"head sizes 64 and 128, got {query.shape[-1]} and {value.shape[-1]}"
    if not Q or not K or Q % 128 or K % 128 or H % G:
        return f"lengths that 128 divides, got {Q} and {K}"
    if any(plane(x) is None for x in (query, key, value)):
        return "rows of all heads must lie in one plane"
    if query.shape[0] * H * Q < 128 * chip(query.device).processors:
        return "too few rows to give every multiprocessor its part"
    return None


@cache
def balance(
    heads: int, Q: int, K: int, tall: int, causal: bool, processors: int, most: int = TOGETHER[-1]
) -> tuple[int, int]:
    """How many programs, and of how many heads tiles are ordered together: few, whose keys stay near, unless the load is uneven."""
    parts = -(-Q // tall)
    tiles = heads * parts
    if not causal or tiles <= processors or tiles > 16 * 1024:
        return min(tiles, processors), min(8, most) if causal else 1
    # A tile costs about one block more than it has.
    costs = [min((part * tall + tall - 1) // 128 + 1, K // 128) + 1 for part in reversed(range(parts))]
    best, found = float("inf"), (processors, 1)
    for together in (*(x for x in TOGETHER if x < heads and x <= most), *([heads] if heads <= most else [])):
        order = [cost for at in range(0, heads, together) for cost in costs for _ in range(min(together, heads - at))]
        for programs in (processors, processors - processors % 16 or processors):
            load = [0] * programs
            for i, cost in enumerate(order):
                turn, at = divmod(i, programs)
                load[at if turn % 2 == 0 else programs - 1 - at] += cost
            if max(load) < 0.98 * best:
                best, found = max(load), (programs, together)
    return found


def near(length: int, size: int) -> int:
    """Of how many heads tiles may be ordered together that find one another's rows in the cache."""
    return max(2, NEAR // (16 * length * size))


def shares(heads: int, Q: int, K: int, chosen: Form, processors: int) -> tuple[int, int]:
    """How many programs there are for tiles of Q rows, and of how many heads tiles are ordered together."""
    tall = chosen.ROWS * chosen.CONSUMERS
    if chosen.TICKETS:  # the load is even by itself
        return min(heads * -(-Q // tall), processors), near(Q, chosen.D)
    return balance(heads, Q, K, tall, chosen.CAUSAL, processors)


def form(problem: Problem, stat: bool) -> Form:
    """How a problem is compiled."""
    size, causal, (_, _, _, Q, K) = problem.query.shape[-1], problem.high is not None, problem.sizes
    # Tiles of 192 rows are a loss where much of them lies behind the last query or the diagonal.
    low = size == 128 or (causal and Q <= BRIEF) or -(-Q // 192) * 192 > 1.2 * Q
    # What fits into shared memory and registers.
    sizes = (128, 2, 2, 1, 240, True) if size == 128 else (64, 2, 4, 2, 240, True) if low else (64, 3, 4, 2, 160, False)
    terms = problem.beta is not None, problem.distance, problem.division == 1, causal
    # At head size 128 the matrix unit is the one that has no time to spare; at 64 there are no registers for what is added up.
    ones = size == 64 and (problem.division == 1 or (problem.activation == "tanh" and stat))
    chosen = Form(problem.activation, UNITS[problem.activation], *sizes, *terms, stat, ones)
    if not problem.distance:
        return chosen
    # As measured: each tile takes norms of all keys that it sees, which pays where these are few.
    if low and max(Q, K) <= (BRIEF if causal else BRIEF // 4):
        return replace(chosen, MEASURED=True, REGISTERS=216, FEW=40)
    return replace(chosen, TICKETS=True)  # the launch that takes norms begins the count


@cache
def constants(chosen: Form) -> Constants:
    return Constants(chosen)


def forward(
    problem: Problem, out: Tensor, stat: Tensor | None, halves: Tensor | None, tickets: Tensor | None,
    launch: Callable[..., Any], chosen: Form | None = None,
) -> None:  # fmt: skip
    """Launches the kernel, where distances are taken behind one that takes norms of keys, unless it takes them itself.

    Where distances are taken `halves` `[B, G, K]` get half the squared norms of keys, and `tickets`, one whole number, counts tiles.
    `stat` `[B, H, Q]` gets NaN for rows that are left to another kernel: those beyond the range of a short form, under causality those
    that are not finite, of a hyperbolic tangent those whose coefficients are small. All others get log2 of their sum, or zero where
    nothing divides them.
    """
    chosen = chosen or form(problem, stat is not None)
    B, H, G, Q, K = problem.sizes
    key, processors = problem.key, chip(problem.query.device).processors
    is_behind = halves is not None and not chosen.MEASURED
    if is_behind:
        rows = NUMBERS // chosen.D
        launch(_forward.half_squares, (B * G * K // rows,), key, halves, tickets, G, K, *key.stride()[:3], chosen.D, rows, num_warps=4)  # fmt: skip
    programs, together = shares(B * H, Q, K, chosen, processors)
    descs, begins = [], []
    heights = chosen.ROWS, chosen.COLS, chosen.COLS, chosen.ROWS
    for x, rows in zip((problem.query, problem.key, problem.value, out), heights, strict=True):
        found = plane(x)
        assert found is not None
        layout = gl.NVMMASharedLayout.get_default_for([rows, chosen.D], gl.bfloat16)
        descs.append(TensorDescriptor(x, found[0], found[1], [rows, chosen.D], layout))
        begins.append(found[2:])
    # Registers of a thread before the warpgroups share them out anew.
    most = 168 if chosen.CONSUMERS == 2 and not chosen.MEASURED else 128
    launch(
        _hopper.forward_kernel, (programs,), *descs, problem.alpha, problem.beta, halves, stat, tickets, B * H, H, G, together,
        Numbers(Q, K, *begins[:3]), constants(chosen), num_warps=4, maxnreg=most, **(LINKED if is_behind else {}),
    )  # fmt: skip

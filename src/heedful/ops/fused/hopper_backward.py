"""From a problem to the launches of `_hopper_backward`: which ones it serves, and in which form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from heedful.ops.fused import _hopper_backward, hopper
from heedful.ops.fused._blocks import Constants
from heedful.ops.fused._device import chip
from heedful.ops.fused.activations import UNITS

if TYPE_CHECKING:
    from heedful.ops.fused.launch import Problem


class Numbers(NamedTuple):
    """Rows that tiles are made of and rows they are multiplied with, and where heads begin in the plane of each tensor."""

    Q: int
    K: int
    x: tuple[int, int, int]
    y: tuple[int, int, int]
    a: tuple[int, int, int]
    c: tuple[int, int, int]


@dataclass(frozen=True)
class Form:
    """What is fixed when a kernel is compiled."""

    ACT: str
    UNIT: float
    COLUMNS: bool  # gradients of keys and values, not of queries
    D: int
    CONSUMERS: int  # warpgroups
    STAGES: int
    REGISTERS: int  # of a consumer's thread
    COLS: int  # rows of a block that tiles are multiplied with
    LATE: bool = False  # gradients are summed behind the next block's scores
    HELD: bool = False  # tiles are kept in registers, and the next ones fetched early
    TURNS: bool = False  # warpgroups multiply one after the other
    PINNED: bool = True  # coefficients are made before the second product is waited for
    BETA: bool = False
    DISTANCE: bool = False
    DIVIDED: bool = False  # by the sum of the row
    CAUSAL: bool = False
    ROWS: int = 64  # of a warpgroup


def refuse(problem: Problem, above: Tensor) -> str | None:
    """Why these kernels do not serve a problem with this gradient of its result, or None."""
    _, H, G, _, _ = problem.sizes
    if H != G:
        return f"no keys that query heads share, got {H} and {G} heads"
    if above.dtype != torch.bfloat16 or hopper.plane(above) is None:
        return f"the gradient above in bfloat16 and in one plane, got {above.dtype} with strides {above.stride()}"
    return hopper.refuse(problem)


# Queries up to which the kernel of columns is the faster one, whatever the function and the head size.
SHORT = 2048


def is_slower(problem: Problem, columns: bool) -> bool:
    """Whether the Triton kernel was the faster one on an H200, at 1,024 and 4,096 tokens."""
    if problem.activation == "sigmoid" or not columns or problem.query.shape[2] <= SHORT:
        return problem.activation == "sigmoid"
    wide, divided = problem.query.shape[-1] == 128, problem.division == 1
    return problem.activation == "tanh" or (problem.distance and (wide or (divided and problem.high is None)))


def form(problem: Problem, columns: bool) -> Form:
    """How a problem is compiled."""
    # By head size: what fits into shared memory and registers.
    if problem.query.shape[-1] == 128:
        sizes = (128, 2, 3, 240, 64) if columns else (128, 2, 4, 240, 64)
    else:
        sizes = (64, 2, 4, 240, 64) if columns else (64, 2, 3, 240, 128)
    raw = problem.distance and not problem.division
    held = not columns if problem.query.shape[-1] == 128 else columns or not raw
    return Form(
        problem.activation, UNITS[problem.activation], columns, *sizes, HELD=held, BETA=problem.beta is not None,
        DISTANCE=problem.distance, DIVIDED=problem.division == 1, CAUSAL=problem.high is not None,
    )  # fmt: skip


@cache
def constants(chosen: Form) -> Constants:
    return Constants(chosen)


def rows(
    problem: Problem, above: Tensor, stat: Tensor | None, delta: Tensor | None, hq: Tensor | None, hk: Tensor | None,
    dq: Tensor, left: Tensor, launch: Callable[..., Any], chosen: Form | None = None,
) -> None:  # fmt: skip
    """Launches the kernel of queries once.

    Half squared norms `hq` `[B, H, Q]` and `hk` `[B, H, K]` are needed where distances are taken; where rows are divided as well,
    forward's `stat` and `delta` = out . above `[B, H, Q]`, and `hq` is not. `left` `[B * H * Q / 64]`, int32, gets one for every block
    of 64 rows whose result is left to another kernel, else zero.
    """
    given = problem.query, above, problem.key, problem.value
    chosen = chosen or form(problem, columns=False)
    _launch(
        _hopper_backward.backward_rows,
        problem,
        given,
        (dq,),
        (hk, stat if chosen.DIVIDED else hq, delta, left),
        launch,
        chosen,
    )


def columns(
    problem: Problem, above: Tensor, stat: Tensor | None, delta: Tensor | None, hq: Tensor | None, hk: Tensor | None,
    dk: Tensor, dv: Tensor, left: Tensor, launch: Callable[..., Any], chosen: Form | None = None,
) -> None:  # fmt: skip
    """Launches the kernel of keys and values once; `left` `[B * H * K / 64]`, all else as for `rows`."""
    given = problem.key, problem.value, problem.query, above
    chosen = chosen or form(problem, columns=True)
    _launch(
        _hopper_backward.backward_columns,
        problem,
        given,
        (dk, dv),
        (hk, stat if chosen.DIVIDED else hq, delta, left),
        launch,
        chosen,
    )


def _launch(
    kernel: Any, problem: Problem, given: tuple[Tensor, ...], made: tuple[Tensor, ...], terms: tuple[Tensor | None, ...],
    launch: Callable[..., Any], chosen: Form,
) -> None:  # fmt: skip
    B, H, _, Q, K = problem.sizes
    own, other = (K, Q) if chosen.COLUMNS else (Q, K)
    processors = chip(problem.query.device).processors
    programs, together = hopper.balance(B * H, own, other, chosen.ROWS * chosen.CONSUMERS, chosen.CAUSAL, processors)
    descs, begins = [], []
    heights = chosen.ROWS, chosen.ROWS, chosen.COLS, chosen.COLS, chosen.ROWS, chosen.ROWS
    for x, height in zip((*given, *made), heights, strict=False):
        found = hopper.plane(x)
        assert found is not None
        layout = gl.NVMMASharedLayout.get_default_for([height, chosen.D], gl.bfloat16)
        descs.append(TensorDescriptor(x, found[0], found[1], [height, chosen.D], layout))
        begins.append(found[2:])
    # Registers of a thread before the warpgroups share them out anew.
    most = 168 if chosen.CONSUMERS == 2 else 128
    launch(
        kernel, (programs,), *descs, problem.alpha, problem.beta, *terms, B * H, H, together,
        Numbers(own, other, *begins[:4]), constants(chosen), num_warps=4, maxnreg=most,
    )  # fmt: skip

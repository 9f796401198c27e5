"""From a problem to the launch of `_hopper_backward`: which ones it serves, and in which form."""

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
from heedful.ops.fused._linked import LINKED
from heedful.ops.fused.activations import UNITS

if TYPE_CHECKING:
    from heedful.ops.fused.launch import Problem


class Numbers(NamedTuple):
    """How many keys tiles are made of, how many queries they meet, and where heads begin in the plane of each tensor."""

    Q: int
    K: int
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    q: tuple[int, int, int]
    do: tuple[int, int, int]


@dataclass(frozen=True)
class Form:
    """What is fixed when the kernel is compiled."""

    ACT: str
    UNIT: float
    D: int
    COLS: int  # queries of a block
    STAGES: int  # blocks of queries that are fetched ahead, and of gradients of scores between the warpgroups
    OWN: int  # tiles of keys and values
    BETA: bool = False
    DISTANCE: bool = False
    DIVIDED: bool = False  # by the sum of the row
    CAUSAL: bool = False
    TURNS: bool = False  # one warpgroup at a time makes coefficients
    REGISTERS: int = 240  # of a consumer's thread
    CONSUMERS: int = 2  # warpgroups
    ROWS: int = 64  # keys of a warpgroup


def refuse(problem: Problem, above: Tensor) -> str | None:
    """Why this kernel does not serve a problem with this gradient of its result, or None."""
    _, H, G, _, _ = problem.sizes
    if H != G:
        return f"no keys that query heads share, got {H} and {G} heads"
    if above.dtype != torch.bfloat16 or hopper.plane(above) is None:
        return f"the gradient above in bfloat16 and in one plane, got {above.dtype} with strides {above.stride()}"
    if torch.are_deterministic_algorithms_enabled():
        return "sums of gradients of queries are added up in any order"
    return hopper.refuse(problem)


def form(problem: Problem) -> Form:
    """How a problem is compiled."""
    # By head size: what fits into shared memory and registers.
    sizes = (128, 64, 2, 1) if problem.query.shape[-1] == 128 else (64, 128, 2, 1)
    terms = problem.beta is not None, problem.distance, problem.division == 1, problem.high is not None
    turns = problem.query.shape[-1] == 128 or not problem.distance
    return Form(problem.safe, UNITS[problem.safe], *sizes, *terms, turns)


@cache
def constants(chosen: Form) -> Constants:
    return Constants(chosen)


def backward(
    problem: Problem, above: Tensor, terms: Tensor | None, deltas: Tensor | None, norms: Tensor | None,
    sums: Tensor, dk: Tensor, dv: Tensor, left: Tensor | None, launch: Callable[..., Any], chosen: Form | None = None,
) -> None:  # fmt: skip
    """Launches the kernel once.

    Rows of `terms` `[B, H, Q, 8]`, bfloat16, add up to what all scores of a query get before they are scaled, where distances are taken or
    rows divided, rows of `deltas` to what gradients of scores get, where rows are divided. Sums of ds' k are added to `sums`
    `[B, H, Q, D]`, float32. Under causality `norms` `[B, H, K]` get half the squared norms of keys, where
    distances are taken, and `left` `[B * H * K / 64]`, int32, one for every 64 keys whose results are not finite, else zero.
    """
    chosen = chosen or form(problem)
    B, H, _, Q, K = problem.sizes
    processors = chip(problem.query.device).processors
    tall, most = chosen.ROWS * chosen.CONSUMERS, hopper.near(Q, chosen.D)
    programs, together = hopper.balance(B * H, K, Q, tall, chosen.CAUSAL, processors, most)
    descs, begins = [], []
    heights = chosen.ROWS, chosen.ROWS, chosen.COLS, chosen.COLS, chosen.ROWS, chosen.ROWS
    for x, height in zip((problem.key, problem.value, problem.query, above, dk, dv), heights, strict=True):
        found = hopper.plane(x)
        assert found is not None
        layout = gl.NVMMASharedLayout.get_default_for([height, chosen.D], gl.bfloat16)
        descs.append(TensorDescriptor(x, found[0], found[1], [height, chosen.D], layout))
        begins.append(found[2:])
    tile = [chosen.COLS, 16]  # as long as products are: the copy engine makes the last eight zeros
    layout = gl.NVMMASharedLayout.get_default_for(tile, gl.bfloat16)
    for added in (terms, deltas):
        descs.insert(-2, None if added is None else TensorDescriptor(added, [B * H * Q, 8], [8, 1], tile, layout))
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float32)
    descs.append(TensorDescriptor(sums, [B * H * Q, chosen.D], [chosen.D, 1], [64, 64], layout))
    launch(
        _hopper_backward.backward_kernel, (programs,), *descs, problem.alpha, problem.beta, norms, left,
        B * H, H, together, Numbers(K, Q, *begins[:4]), constants(chosen), num_warps=4, maxnreg=168, **LINKED,
    )  # fmt: skip

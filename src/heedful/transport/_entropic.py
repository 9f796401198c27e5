"""An entropic plan whose strength is lowered until its cost is proven to be near the least one."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heedful.transport._clouds import Array

# The strength of the entropy at first, as a share of the mean cost, and what it is divided by.
ENTROPY = 0.1
FACTOR = 2.0
# Iterations between two looks at the gap, and the most of them; on a CPU fewer, so that costs are looked at so many times.
CHUNK = 50
ITERATIONS = 2000
WORK = 2.5e10
# The strength is lowered once what rounding adds is less than this part of the gap.
ROUNDED = 0.8
# Gaps and strengths below this share of the mean cost are rounding.
SMALL = 1e-12
# Scaling factors up to here stay out of the kernel.
FACTORS = 1e30


def entropic(
    ot: Any, X: Array, Y: Array, cost: Array, a: Array, b: Array, device: torch.device, goal: float
) -> tuple[Array, tuple[Array, Array], float, float]:
    r"""A plan with exactly these weights, potentials with $u_i + v_j \le C_{ij}$, its cost and the gap $1 - (a^T u + b^T v) / \langle P, C \rangle$.

    POT's stabilised Sinkhorn, started at the potentials of the strength before. These are replaced by $u_i = \min_j C_{ij} - v_j$ and likewise v,
    so that they bound the least cost from below (linear programming duality) and no row or column of the kernel vanishes.
    """
    rows, columns = np.flatnonzero(a > 0), np.flatnonzero(b > 0)
    C = torch.from_numpy(cost[np.ix_(rows, columns)]).to(device)
    left, right = torch.from_numpy(a[rows]).to(device), torch.from_numpy(b[columns]).to(device)
    lines = _lines(X[rows], Y[columns])
    mean = float(C.mean()) or 1.0
    strength = ENTROPY * mean
    most = ITERATIONS if device.type == "cuda" else min(ITERATIONS, max(4 * CHUNK, int(WORK / C.numel())))
    u, v = _feasible(C, torch.zeros_like(right))
    matrix, least, bound, potentials = torch.outer(left, right), float(left @ C @ right), -np.inf, v
    for _ in range(0, most, CHUNK):
        with warnings.catch_warnings():
            # Where it ends in numbers that are not finite, the plan before is kept.
            warnings.simplefilter("ignore")
            plan, log = ot.sinkhorn(
                left, right, C, strength, method="sinkhorn_stabilized", numItermax=CHUNK, stopThr=0.0, tau=FACTORS,
                warmstart=(u, v), log=True, warn=False, print_period=CHUNK,
            )  # fmt: skip
        u, v = log["alpha"], log["beta"]
        if not (torch.isfinite(u).all() and torch.isfinite(v).all()):
            break
        raw = _product(plan, C)
        plan = _rounded(ot, plan, left, right, lines)
        value = _product(plan, C)
        if value < least:
            matrix, least = plan, value
        below = _feasible(C, v)
        here = float(below[0] @ left + below[1] @ right)
        if here > bound:
            bound, potentials = here, v
        if least - bound <= max(goal * least, SMALL * mean) or strength < SMALL * mean:
            break
        if value - raw < ROUNDED * (value - here):
            strength, (u, v) = strength / FACTOR, below
    whole = np.zeros_like(cost)
    whole[np.ix_(rows, columns)] = matrix.cpu().numpy()
    # Points without weight have potentials as well.
    first = (cost[:, columns] - potentials.cpu().numpy()).min(1)
    second = (cost - first[:, None]).min(0)
    total = float((whole * cost).sum())
    above = total - float(first @ a + second @ b)
    return whole, (first, second), total, above / total if above > SMALL * mean else 0.0


def _feasible(C: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Potentials as large as v and the costs allow."""
    u = (C - v).amin(1)
    return u, (C - u[:, None]).amin(0)


def _product(plan: Tensor, C: Tensor) -> float:
    return float(torch.dot(plan.reshape(-1), C.reshape(-1)))


def _lines(X: Array, Y: Array) -> tuple[Array, Array]:
    """Places along the direction in which the points of both clouds spread most."""
    both = np.concatenate((X, Y))
    axis = np.linalg.eigh(np.atleast_2d(np.cov(both, rowvar=False, bias=True)))[1][:, -1]
    return X @ axis, Y @ axis


def _rounded(ot: Any, plan: Tensor, a: Tensor, b: Tensor, lines: tuple[Array, Array]) -> Tensor:
    """A plan with exactly these weights: rows and columns that are too heavy are scaled down, what they lack is paired in the order along a line."""
    plan = plan * (a / plan.sum(1)).clamp_max(1.0).nan_to_num(1.0)[:, None]
    plan *= (b / plan.sum(0)).clamp_max(1.0).nan_to_num(1.0)
    lacks = [lack.clamp_min(0.0).cpu().numpy() for lack in (a - plan.sum(1), b - plan.sum(0))]
    total = lacks[0].sum()
    if total > 0 and lacks[1].sum() > 0:
        rest = ot.emd_1d(*lines, *(lack / lack.sum() for lack in lacks), dense=False)
        at = torch.from_numpy(rest.row).long().to(plan.device), torch.from_numpy(rest.col).long().to(plan.device)
        plan.index_put_(at, total * torch.from_numpy(rest.data).to(plan), accumulate=True)
    return plan

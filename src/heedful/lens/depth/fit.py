"""The law of your own runs: where a deeper model begins to win, fitted by a line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heedful._errors import InvalidArgument
from heedful.lens.depth.law import KAPPA, DepthLaw

# Crossings are fitted to sizes within this factor e^x of them.
NEAR = 1.6


class Point(NamedTuple):
    """A crossing: the mean depth of a pair, the mean log-width at which both are as good, and its standard error."""

    depth: float
    log_width: float
    sigma: float


def fit_law(rows: Iterable[Sequence[float]]) -> DepthLaw:
    r"""Fits $\ln d = a + bL$ to runs (layers, width, loss) or (layers, width, loss, seed).

    Curves of loss against $\ln N$, $N = 12 L d^2$, of neighbouring depths are compared. Where they cross, shape 1 lies as far on
    one side of the optimum as shape 2 on the other, so the point $(\frac{L_1+L_2}{2}, \frac{\ln d_1 + \ln d_2}{2})$ is on the
    law; a weighted line through these points gives a and b with their errors. Levine et al. 2020 (section 5) fit the line to
    the transitions they read off; the midpoint is ours.

    >>> law = DepthLaw(a=4.0, b=0.1)
    >>> def loss(depth, width):
    ...     return 9 * (12 * depth * width**2) ** -0.08 + 0.05 * (math.log(width) - 4.0 - 0.1 * depth) ** 2
    >>> sizes = [2e5 * 2**step for step in range(12)]
    >>> rows = [(L, d, loss(L, d)) for L in (3, 6, 12, 18) for N in sizes for d in [(N / 12 / L) ** 0.5]]
    >>> fitted = fit_law(rows)
    >>> round(fitted.a, 2), round(fitted.b, 3)
    (4.0, 0.1)
    """
    curves, noise = _curves(rows)
    depths = sorted(curves)
    if len(depths) < 3:
        raise InvalidArgument(f"a line needs runs at three depths or more; got {', '.join(map(str, depths)) or 'none'}")
    crossings = (_crossing(low, curves[low], high, curves[high], noise) for low, high in pairwise(depths))
    points = [point for point in crossings if point is not None]
    if len(points) < 2:
        raise InvalidArgument(
            f"a line needs two crossings; in these runs {len(points)} of {len(depths) - 1} pairs of depths cross. "
            "Train smaller models, where the shallow win, and larger ones, where the deep win"
        )
    a, b, a_std, b_std = _line(points)
    if b <= 0:
        raise InvalidArgument(f"the crossings do not move to wider models with depth (b = {b:.3g}); add sizes or seeds")
    return DepthLaw(a, b, a_std, b_std, (points[0].depth, points[-1].depth), "fitted")


def _curves(rows: Iterable[Sequence[float]]) -> tuple[dict[int, NDArray[np.float64]], float | None]:
    """For each depth its ln N and mean loss by size, `[2, sizes]`, and the standard error of a mean; None with one seed."""
    if not isinstance(rows, Iterable):
        raise InvalidArgument(f"rows must be a list of runs (layers, width, loss); got {rows!r}")
    cells: dict[tuple[int, float], list[float]] = {}
    for row in rows:
        layers, width, loss = _run(row)
        cells.setdefault((int(layers), width), []).append(loss)
    curves: dict[int, list[tuple[float, float]]] = {}
    for (depth, width), losses in sorted(cells.items()):
        curves.setdefault(depth, []).append((math.log(KAPPA * depth * width**2), float(np.mean(losses))))
    runs = sum(map(len, cells.values()))
    spread = sum(float(np.var(losses)) * len(losses) for losses in cells.values())
    repeats = runs - len(cells)
    noise = math.sqrt(spread / repeats * len(cells) / runs) if repeats else None
    return {depth: np.array(curve).T for depth, curve in curves.items()}, noise


def _run(row: Sequence[float]) -> tuple[float, float, float]:
    """Layers, width and loss of a run."""
    with suppress(TypeError, ValueError, OverflowError):
        layers, width, loss, *_ = map(float, row)
        if len(row) <= 4 and 1 <= layers < math.inf and 0 < width < math.inf and math.isfinite(loss):
            return layers, width, loss
    raise InvalidArgument(f"a run is (layers, width, loss) or (layers, width, loss, seed); got {row!r:.80}")


def _crossing(
    low: int, shallow: NDArray[np.float64], high: int, deep: NDArray[np.float64], noise: float | None
) -> Point | None:
    """Where the deeper curve falls below the shallower; None where it does not in the sizes both have."""
    sizes = np.union1d(shallow[0], deep[0])
    sizes = sizes[(sizes >= max(shallow[0, 0], deep[0, 0])) & (sizes <= min(shallow[0, -1], deep[0, -1]))]
    gaps = np.interp(sizes, *deep) - np.interp(sizes, *shallow)
    if len(gaps) < 2 or not gaps[0] > 0 > gaps[-1]:
        return None
    at = int(np.flatnonzero((gaps[:-1] > 0) & (gaps[1:] <= 0))[0])
    here = sizes[at] - gaps[at] * (sizes[at + 1] - sizes[at]) / (gaps[at + 1] - gaps[at])
    near = np.abs(sizes - here) <= NEAR
    x, y = (sizes[near], gaps[near]) if near.sum() > 2 else (sizes, gaps)
    slope, offset = np.polyfit(x, y, 1)
    if slope >= 0:
        return None
    root = -offset / slope
    spread = math.sqrt(float(np.square(y - offset - slope * x).sum()) / max(len(x) - 2, 1))
    error = spread if noise is None else noise * math.sqrt(2)
    width = float(np.square(x - x.mean()).sum())
    # Points of the two curves share runs, so they count as half as many.
    sigma = math.sqrt(2) * error / abs(slope) * math.sqrt(1 / len(x) + (root - x.mean()) ** 2 / width)
    log_width = root / 2 - (math.log(KAPPA * low) + math.log(KAPPA * high)) / 4
    return Point((low + high) / 2, float(log_width), max(float(sigma) / 2, 1e-6))


def _line(points: list[Point]) -> tuple[float, float, float, float]:
    """a, b and their errors by weighted least squares; errors grow where the points scatter by more than their own."""
    depth, log_width, sigma = np.array(points).T
    design = np.stack((np.ones_like(depth), depth), axis=1) / sigma[:, None]
    solution, *_ = np.linalg.lstsq(design, log_width / sigma)
    misfit = float(np.square(log_width / sigma - design @ solution).sum())
    scale = max(1.0, misfit / (len(points) - 2)) if len(points) > 2 else 1.0
    a_std, b_std = np.sqrt(scale * np.linalg.inv(design.T @ design).diagonal())
    return float(solution[0]), float(solution[1]), float(a_std), float(b_std)

"""The law of your own runs: where a deeper model begins to win, fitted by a line."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

from heedful._errors import InvalidArgument
from heedful.lens.depth.law import KAPPA, DepthLaw

__all__ = ["fit_law"]

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


def _curves(rows: Iterable[Sequence[float]]) -> tuple[dict[int, list[tuple[float, float]]], float | None]:
    """For each depth its (ln N, mean loss) by size, and the standard error of a mean; None with one seed."""
    cells: dict[tuple[int, float], list[float]] = defaultdict(list)
    if not isinstance(rows, Iterable):
        raise InvalidArgument(f"rows must be a list of runs (layers, width, loss); got {rows!r}")
    for row in rows:
        layers, width, loss = _run(row)
        cells[int(layers), width].append(loss)
    curves: dict[int, list[tuple[float, float]]] = defaultdict(list)
    squares = degrees = 0.0
    for (depth, width), losses in sorted(cells.items()):
        mean = sum(losses) / len(losses)
        squares += sum((loss - mean) ** 2 for loss in losses)
        degrees += len(losses) - 1
        curves[depth].append((math.log(KAPPA * depth * width**2), mean))
    each = sum(map(len, cells.values())) / max(len(cells), 1)
    return curves, math.sqrt(squares / degrees / each) if degrees else None


def _run(row: Sequence[float]) -> tuple[float, float, float]:
    """Layers, width and loss of a run."""
    with suppress(TypeError, ValueError, OverflowError):
        layers, width, loss, *_ = map(float, row)
        if len(row) <= 4 and 1 <= layers < math.inf and 0 < width < math.inf and math.isfinite(loss):
            return layers, width, loss
    raise InvalidArgument(f"a run is (layers, width, loss) or (layers, width, loss, seed); got {row!r:.80}")


def _crossing(
    low: int, shallow: list[tuple[float, float]], high: int, deep: list[tuple[float, float]], noise: float | None
) -> Point | None:
    """Where the deeper curve falls below the shallower; None where it does not in the sizes both have."""
    sizes = sorted({x for x, _ in shallow + deep})
    both = [x for x in sizes if max(shallow[0][0], deep[0][0]) <= x <= min(shallow[-1][0], deep[-1][0])]
    gaps = [(x, _at(deep, x) - _at(shallow, x)) for x in both]
    if len(gaps) < 2 or not (gaps[0][1] > 0 > gaps[-1][1]):
        return None
    here = next(x - g * (y - x) / (h - g) for (x, g), (y, h) in pairwise(gaps) if g > 0 >= h)
    near = [(x, gap) for x, gap in gaps if abs(x - here) <= NEAR]
    near = near if len(near) > 2 else gaps
    offset, slope, spread = _regress(near)
    if slope >= 0:
        return None
    root = -offset / slope
    error = noise * math.sqrt(2) if noise is not None else spread
    centre = sum(x for x, _ in near) / len(near)
    width = sum((x - centre) ** 2 for x, _ in near)
    # Points of the two curves share runs, so they count as half as many.
    sigma = math.sqrt(2) * error / abs(slope) * math.sqrt(1 / len(near) + (root - centre) ** 2 / width)
    log_width = root / 2 - (math.log(KAPPA * low) + math.log(KAPPA * high)) / 4
    return Point((low + high) / 2, log_width, max(sigma / 2, 1e-6))


def _at(curve: list[tuple[float, float]], x: float) -> float:
    """The curve between its points."""
    for (left, first), (right, second) in pairwise(curve):
        if left <= x <= right:
            return first + (second - first) * (x - left) / (right - left)
    return next(loss for size, loss in curve if size == x)


def _regress(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Offset, slope and residual spread of a least-squares line."""
    n = len(points)
    x0, y0 = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    slope = sum((x - x0) * (y - y0) for x, y in points) / sum((x - x0) ** 2 for x, _ in points)
    offset = y0 - slope * x0
    squares = sum((y - offset - slope * x) ** 2 for x, y in points)
    return offset, slope, math.sqrt(squares / max(n - 2, 1))


def _line(points: list[Point]) -> tuple[float, float, float, float]:
    """a, b and their errors by weighted least squares; errors grow where the points scatter by more than their own."""
    weights = [1 / point.sigma**2 for point in points]
    total = sum(weights)
    x0 = sum(w * p.depth for w, p in zip(weights, points, strict=True)) / total
    y0 = sum(w * p.log_width for w, p in zip(weights, points, strict=True)) / total
    square = sum(w * (p.depth - x0) ** 2 for w, p in zip(weights, points, strict=True))
    b = sum(w * (p.depth - x0) * (p.log_width - y0) for w, p in zip(weights, points, strict=True)) / square
    a = y0 - b * x0
    misfit = sum(w * (p.log_width - a - b * p.depth) ** 2 for w, p in zip(weights, points, strict=True))
    scale = max(1.0, misfit / (len(points) - 2)) if len(points) > 2 else 1.0
    return a, b, math.sqrt(scale * (1 / total + x0**2 / square)), math.sqrt(scale / square)

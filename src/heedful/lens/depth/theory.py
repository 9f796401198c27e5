"""Separation ranks by formula: how much a network of the theory can tie two halves of its input together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from heedful._checks import check_whole
from heedful._errors import InvalidArgument
from heedful._plot import Axes, axes
from heedful._result import Result


def sep_bound(width: int, depth: int) -> int:
    r"""The highest separation rank of width d and depth L, an exact integer.

    $$S(d, L) = \sum_{t=0}^{C} \min\{\tbinom{t+m-1}{m-1},\ d \tbinom{C-t+m-1}{m-1}\},\quad C = (3^L - 1)/2,\ m = d(d+1)/2$$

    The network of Levine et al. 2020 (section 2) sees the other tokens through $M = \sum_j x^j x^{jT}$ alone, which has m
    entries and enters with degree C. This count is ours, not the paper's; `separation_rank` attains it for one head and
    enough tokens wherever that was computed. For $L \to \infty$ it grows like $3^{L m}$: capacity follows $L d^2$, the number of
    parameters.

    >>> sep_bound(2, 3), sep_bound(3, 3), sep_bound(4, 3)
    (232, 3102, 31460)
    """
    check_whole(width=width, depth=depth)
    if depth > 14:
        raise InvalidArgument(f"depth {depth} means a sum over 3^{depth} / 2 terms; give 14 at most")
    degree, m = (3**depth - 1) // 2, width * (width + 1) // 2
    counts = [1]
    for t in range(degree):
        counts.append(counts[-1] * (t + m) // (t + 1))
    return sum(min(right, width * left) for right, left in zip(counts, reversed(counts), strict=True))


def log3_sep_curve(width: int, max_depth: int) -> list[float]:
    """$\\log_3 S(d, L)$ for L from 1 on: double-exponential at first, then a line of slope $d(d+1)/2$.

    >>> [round(value, 2) for value in log3_sep_curve(8, 4)]
    [2.0, 6.29, 15.89, 32.41]
    """
    check_whole(max_depth=max_depth)
    return [math.log(sep_bound(width, depth)) / math.log(3) for depth in range(1, max_depth + 1)]


@dataclass(frozen=True)
class Bounds(Result):
    """Bounds on $\\log_3$ of the separation rank; `leading` says that terms of order $d \\log d$ are left out."""

    lower: float
    upper: float
    regime: str
    leading: bool


def theorem_bounds(width: int, heads: int, depth: int) -> Bounds:
    r"""The bounds of Levine et al. 2020 on $\log_3 sep$, almost everywhere in the weights.

    Theorem 1, for $L < \log_3 d$: $3^{L-2}(\log_3(d-H) + 2 - L - \log_3 2) \le \log_3 sep \le \frac{3^L-1}{2}\log_3(d+H)$.
    Theorem 2, for deeper ones, leading terms alone: $\frac12 dL - L(\frac H2 + 1) \le \log_3 sep \le 2dL + L$. The second upper
    bound grows more slowly than the exact count `sep_bound`; see docs/depth.md before relying on it.

    >>> bounds = theorem_bounds(width=10, heads=1, depth=2)
    >>> f"{3**bounds.lower:.1f} <= {sep_bound(10, 2)} <= {3**bounds.upper:.0f}"
    '4.5 <= 2156 <= 14641'
    """
    check_whole(width=width, heads=heads, depth=depth)
    if heads >= width:
        raise InvalidArgument(f"the theorems need fewer heads than channels; got {heads} heads of width {width}")
    log3 = math.log(3)
    if depth < math.log(width) / log3:
        lower = 3.0 ** (depth - 2) * (math.log(width - heads) / log3 + 2 - depth - math.log(2) / log3)
        return Bounds(lower, (3**depth - 1) / 2 * math.log(width + heads) / log3, "depth-efficient", False)
    lower = width * depth / 2 - depth * (heads / 2 + 1)
    return Bounds(lower, 2.0 * width * depth + depth, "depth-inefficient", True)


def plot_sep_curves(widths: Sequence[int] = (2, 4, 8, 16), max_depth: int = 9, ax: Axes | None = None) -> Axes:
    """Draws $\\log_3 S$ against depth for several widths; a dot marks depth $2 \\log_3 d$, where they bend."""
    ax = axes(ax)
    for width in widths:
        curve = log3_sep_curve(width, max_depth)
        (line,) = ax.plot(range(1, max_depth + 1), curve, label=f"width {width}")
        knee = 2 * math.log(width) / math.log(3)
        if 1 <= knee <= max_depth:
            below = int(knee)
            here, there = curve[below - 1], curve[min(below, max_depth - 1)]
            # A line on a logarithmic axis.
            ax.plot(knee, here * (there / here) ** (knee - below), "o", color=line.get_color())
    ax.set(xlabel="depth", ylabel="log3 of the separation rank", yscale="log", title="Separation rank by depth")
    ax.legend(title="dot: depth 2 log3(width)")
    return ax

"""Ways of points as lines in a plane."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from heedful._checks import check_whole
from heedful._errors import InvalidArgument
from heedful._plot import Axes, colours

Array = NDArray[np.float64]


def flattened(points: NDArray[Any]) -> tuple[Array, float]:
    """Snapshots `(S, N, r)` in the two directions in which the points of all snapshots spread most, and the share of the spread seen.

    Two features stay as they are.

    >>> flat, share = flattened(np.random.default_rng(0).normal(size=(3, 5, 7)))
    >>> flat.shape, 0 < share < 1
    ((3, 5, 2), True)
    """
    numbers = np.asarray(points, dtype=np.float64)
    if numbers.shape[-1] == 2:
        return numbers, 1.0
    cloud = numbers.reshape(-1, numbers.shape[-1])
    centred = cloud - cloud.mean(0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    first = vectors[:, ::-1][:, :2]
    # Signs by which the largest entry is positive: the same picture each time.
    first = first * np.sign(first[np.abs(first).argmax(0), range(first.shape[1])])
    return (centred @ first).reshape(*numbers.shape[:-1], -1), float(values[-2:].sum() / (values.sum() or 1.0))


def draw_paths(points: NDArray[Any], y: NDArray[Any] | None, ax: Axes, most: int) -> Axes:
    """A line for each point through its snapshots, in the colour of its class."""
    check_whole(most=most)
    chosen = np.unique(np.linspace(0, points.shape[1] - 1, min(most, points.shape[1])).astype(int))
    codes, names = np.zeros(points.shape[1], dtype=int), np.array([""])
    if y is not None:
        names, codes = np.unique(y, return_inverse=True)
    shades = colours("viridis", len(names), 0.85)
    line = points.shape[-1] == 1
    flat, share = (np.asarray(points, dtype=np.float64), 1.0) if line else flattened(points)
    steps = np.arange(len(flat))
    for code, name in enumerate(names):
        own = chosen[codes[chosen] == code]
        across, up = (
            (np.repeat(steps[:, None], len(own), 1), flat[:, own, 0]) if line else (flat[:, own, 0], flat[:, own, 1])
        )
        ax.plot(across, up, color=shades[code], lw=0.6, alpha=0.35)
        ax.scatter(across[0], up[0], s=6, color=shades[code], alpha=0.5, linewidths=0)
        ax.scatter(
            across[-1], up[-1], s=26, color=shades[code], label=str(name), edgecolors="white", linewidths=0.6, zorder=3
        )
    if line:
        ax.set(xlabel="snapshot", ylabel="feature")
    else:
        what = "feature" if points.shape[-1] == 2 else "principal direction"
        ax.set(
            xlabel=f"{what} 1",
            ylabel=f"{what} 2" + ("" if share == 1 else f" ({share:.0%} of the spread in both)"),
            aspect="equal",
        )
    if y is not None:
        ax.legend(title="class", frameon=False, fontsize="small")
    return ax


def distinct_moves(before: Any, after: Any, decimals: int = 2) -> int:
    """How many different vectors points were moved by, after rounding: a LayerNorm over two features allows but two.

    Args:
        before, after: the places of the same points, `(..., features)`: two snapshots of a trajectory.
        decimals: to which a move is rounded.

    >>> distinct_moves([[0.0, 0.0], [1.0, 5.0], [3.0, 2.0]], [[1.0, 0.0], [2.0, 5.0], [3.0, 3.0]])
    2
    """
    check_whole(0, decimals=decimals)
    first, last = (np.asarray(place, dtype=np.float64) for place in (before, after))
    if first.shape != last.shape or first.ndim < 2:
        raise InvalidArgument(
            f"before and after must be places of the same points, (..., features); got {first.shape} and {last.shape}"
        )
    moves = np.round(last - first, decimals).reshape(-1, first.shape[-1])
    # Nothing is negative zero.
    return len(np.unique(moves + 0.0, axis=0))

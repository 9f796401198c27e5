"""The metrics of a movement at every snapshot, by plans that go on from one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heedful._plot import Axes, axes, whole_ticks
from heedful._result import Result
from heedful._text import quantity
from heedful.transport import Plan, assignment

Array = NDArray[np.float64]

# Two final places that differ by less than this share of the cloud's radius are one.
SAME = 1e-6


@dataclass(frozen=True)
class TransportCurve(Result):
    """How points had moved by each snapshot, from snapshot 0 on; `heedful.transport.transport_metrics` says what each figure is.

    Args:
        steps: how many calls of `record()` there were before each snapshot.
        points: how many points there are.
        p: exponent of the distance.
        direct, ot: the cost of the movement, and the least cost between the same clouds.
        optimality: $(ot / direct)^{1/p}$.
        centred_optimality: the same without the shift of each class's mean; None unless p = 2.
        efficiency: the straight distance by the length of the way so far.
        matching: share of points that are where the optimal plan sends them.
        is_exact: whether every plan was.
    """

    steps: tuple[int, ...]
    points: int
    p: float
    direct: tuple[float, ...]
    ot: tuple[float, ...]
    optimality: tuple[float, ...]
    centred_optimality: tuple[float, ...] | None
    efficiency: tuple[float, ...]
    matching: tuple[float, ...]
    is_exact: bool

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def shares(self) -> dict[str, tuple[float, ...]]:
        """The figures from 0 to 1, by name."""
        named = {
            "optimality": self.optimality,
            "centred optimality": self.centred_optimality,
            "matching": self.matching,
            "efficiency": self.efficiency,
        }
        return {name: values for name, values in named.items() if values is not None}

    def plot(self, ax: Axes | None = None) -> Axes:
        """A line for each share over the snapshots."""
        ax = axes(ax)
        for at, (name, values) in enumerate(self.shares.items()):
            ax.plot(self.steps, values, ("-", "--", "-.", ":")[at], color=f"C{at}", label=name, lw=1.5)
        ax.set(xlabel="snapshot after so many records", ylim=(0, 1.05))
        whole_ticks(ax, "x")
        ax.legend(frameon=False, fontsize="small")
        return ax

    def __str__(self) -> str:
        names = list(self.shares)
        lines = [f"{quantity(self.points, 'point')}, p = {self.p:g}", f"{'after':>6}  " + "  ".join(names)]
        # The first, the last and a few between them.
        shown = sorted({round(at * (len(self) - 1) / 9) for at in range(10)})
        lines += [
            f"{self.steps[at]:>6}  "
            + "  ".join(f"{values[at]:>{len(name)}.3f}" for name, values in self.shares.items())
            for at in shown
        ]
        return "\n".join(lines)


def measure_curve(points: NDArray[Any], y: NDArray[Any] | None, p: float, steps: Sequence[int]) -> TransportCurve:
    """The metrics from the first of the snapshots `(S + 1, N, r)` to each later one."""
    start = np.asarray(points[0], dtype=np.float64)
    codes = np.zeros(len(start), dtype=np.intp) if y is None else np.unique(y, return_inverse=True)[1]
    classes = [np.flatnonzero(codes == code) for code in range(codes.max() + 1)]
    plans: list[Plan | None] = [None] * len(classes)
    way, before = np.zeros(len(start)), start
    rows: list[tuple[float, ...]] = []
    exact = True
    for snapshot in points[1:]:
        now = np.asarray(snapshot, dtype=np.float64)
        way += np.linalg.norm(now - before, axis=1)
        before = now
        found = [
            # A plan of another kind has nothing to go on from.
            assignment(start[at], now[at], p, start=plan if plan is not None and plan.method == "exact" else None)
            for at, plan in zip(classes, plans, strict=True)
        ]
        exact &= all(plan.is_exact for plan in found)
        rows.append((*_shares(start, now, found, classes, p), _ratio(_lengths(now - start).sum(), way.sum())))
        plans = list(found)
    direct, ot, optimality, centred, matching, efficiency = zip(*rows, strict=True)
    return TransportCurve(
        tuple(steps),
        len(start),
        float(p),
        direct,
        ot,
        optimality,
        centred if p == 2 else None,
        efficiency,
        matching,
        exact,
    )


def _shares(
    start: Array, now: Array, plans: Sequence[Plan], classes: Sequence[NDArray[np.intp]], p: float
) -> tuple[float, ...]:
    """direct, ot, optimality, centred optimality and matching of one snapshot."""
    direct, same = float(np.mean(_lengths(now - start) ** p)), 0
    ot = inner = least = 0.0
    scale = float(np.sqrt(np.square(now - now.mean(0)).sum(1).mean()))
    for plan, at in zip(plans, classes, strict=True):
        first, last = start[at], now[at]
        shift = last.mean(0) - first.mean(0)
        # Of split mass, where most of it goes.
        sigma = np.asarray(plan.matrix).argmax(1) if plan.index is None else plan.index
        ot += plan.cost * len(at) / len(start)
        inner += float(np.square(last - first - shift).sum())
        split = (plan.cost - float(np.square(shift).sum())) * len(at)
        least += split if plan.index is None else float(np.square(last[sigma] - first - shift).sum())
        same += int((_lengths(last - last[sigma]) <= SAME * scale).sum())
    # Where classes moved as one, what is left is rounding of the means.
    nothing = len(start) * (1e-14 * float(max(np.abs(start).max(), np.abs(now).max()))) ** 2
    return direct, ot, _ratio(ot, direct) ** (1 / p), _ratio(least, inner, nothing) ** 0.5, same / len(start)


def _lengths(moves: Array) -> Array:
    return np.linalg.norm(moves, axis=1)


def _ratio(part: float, whole: float, nothing: float = 0.0) -> float:
    """Part of the whole, 1 where the whole is nothing; what rounding puts above 1 is 1."""
    return float(min(max(part, 0.0) / whole, 1.0)) if whole > nothing else 1.0

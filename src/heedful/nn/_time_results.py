"""The lines of a time encoding's kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heedful._plot import Axes, axes
from heedful._result import Result
from heedful._text import quantity

SHOWN = 8


def is_wide(periods: np.ndarray) -> bool:
    """Whether periods differ so much that a linear axis would hide the short ones."""
    return bool(periods.size and periods.max() > 100 * periods.min())


@dataclass(frozen=True, eq=False)
class TimeSpectrum(Result):
    r"""The lines of a kernel, $\psi(\tau) = c + \sum_i w_i \cos(2 \pi \tau / P_i)$, heaviest first."""

    periods: np.ndarray  # [F], in the unit of the times
    weights: np.ndarray  # [F]
    constant: float

    def kernel(self, tau: np.ndarray) -> np.ndarray:
        r"""$\psi(\tau)$ in float64."""
        turns = np.asarray(tau, dtype=np.float64)[..., None] / self.periods
        return self.constant + np.cos(2 * np.pi * turns) @ self.weights

    def __str__(self) -> str:
        whole = self.constant + self.weights.sum()
        lines = [
            f"{quantity(len(self.periods), 'period')}, kernel {whole:.4g} at 0, of which {self.constant:.4g} constant"
        ]
        for period, weight in zip(self.periods[:SHOWN], self.weights, strict=False):
            lines.append(f"  {period:<12.6g} {weight / whole:6.1%}")
        if len(self.periods) > SHOWN:
            lines.append(f"  and {quantity(len(self.periods) - SHOWN, 'period')} of no larger weight")
        return "\n".join(lines)

    def plot(self, ax: Axes | None = None) -> Axes:
        """The weight of each period, on a logarithmic axis where periods differ widely."""
        ax = axes(ax)
        finite = np.isfinite(self.periods)
        periods, weights = self.periods[finite], self.weights[finite]
        ax.vlines(periods, 0, weights)
        ax.plot(periods, weights, "o", markersize=4)
        ax.set(xscale="log" if is_wide(periods) else "linear", xlabel="period", ylabel="weight", ylim=(0, None))
        return ax

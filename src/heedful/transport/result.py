"""What is measured of a movement of points."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from heedful._errors import MissingExtra
from heedful._plot import Axes, axes
from heedful._result import Result

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class TransportMetrics(Result):
    r"""How points moved; `transport_metrics` returns it and says what each figure is.

    With `metrics="thesis"` `direct` is the sum over classes of Frobenius norms, `ot` that of $\sqrt{\min_\sigma \sum_i |.|^2}$, `path` a sum
    over points; `centred_optimality`, quantiles and baselines are None there.
    """

    metrics: str
    points: int
    steps: int
    p: float
    direct: float
    ot: float
    monge_gap: float
    optimality: float
    centred_optimality: float | None
    efficiency: float
    efficiency_quantiles: tuple[float, ...] | None
    matching: float
    path: float
    baseline: float | None
    centred_baseline: float | None
    is_exact: bool

    def to_frame(self) -> Any:
        """One row of a pandas data frame, so that runs can be put below one another."""
        try:
            import pandas as pd
        except ImportError:
            raise MissingExtra("pandas", "tables") from None
        row = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "efficiency_quantiles"}
        named = {
            f"efficiency_{share:g}": value
            for share, value in zip(QUANTILES, self.efficiency_quantiles or (), strict=False)
        }
        return pd.DataFrame([row | named])

    def __str__(self) -> str:
        sign = "" if self.is_exact else "at most "
        beside = "" if self.baseline is None else f" (a random pairing of the same clouds: {self.baseline:.3f})"
        lines = [
            f"{self.points} points, {self.steps} steps, {self.metrics} metrics, p = {self.p:g}",
            f"optimality {sign}{self.optimality:.3f}{beside}",
        ]
        if self.centred_optimality is not None:
            lines.append(
                f"without the shift of means {sign}{self.centred_optimality:.3f} (random: {self.centred_baseline:.3f})"
            )
        lines.append(
            f"efficiency of the way {self.efficiency:.3f}, points that are where the optimal plan sends them {self.matching:.3f}"
        )
        return "\n".join(lines)

    def plot(self, ax: Axes | None = None) -> Axes:
        """The shares as bars; a line across a bar is what a random pairing of the same clouds has."""
        ax = axes(ax)
        pairs = {
            "optimality": (self.optimality, self.baseline),
            "centred\noptimality": (self.centred_optimality, self.centred_baseline),
            "matching": (self.matching, None),
            "efficiency": (self.efficiency, None),
        }
        shares = {name: (value, base) for name, (value, base) in pairs.items() if value is not None}
        ax.bar(range(len(shares)), [value for value, _ in shares.values()], color="tab:blue")
        for at, (_, base) in enumerate(shares.values()):
            if base is not None:
                ax.hlines(base, at - 0.4, at + 0.4, color="black", linestyle=":", label="" if at else "random pairing")
        ax.set(xticks=range(len(shares)), xticklabels=list(shares), ylim=(0, 1.05))
        if self.baseline is not None:
            ax.legend(frameon=False)
        return ax

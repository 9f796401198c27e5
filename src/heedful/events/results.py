"""What `NextEvent` answers besides arrays: an evaluation, a curve over the waiting time, simulated futures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from heedful._plot import Axes, axes, colours
from heedful._result import Result
from heedful._text import quantity


@dataclass(frozen=True, eq=False)
class Evaluation(Result):
    """How well the events of sequences are foreseen, each from those before it.

    Attributes:
        at: `"true"` where the model was given the time of each event, None where it was not.
        targets: events that were to be foreseen.
        accuracy: share of them whose type had the largest probability; None where all events are of one type.
        type_nll: mean of -log p(type), in nats; None likewise.
        time_nll: mean of -log p(wait) per unit of time, with the tail behind each last event where its sequence's end is known; None without a density of waits.
        levels: shares of the predicted law below each true wait above 0, rising, from 0 to 1: uniform where the law is calibrated.
    """

    at: str | None
    targets: int
    accuracy: float | None
    type_nll: float | None
    time_nll: float | None
    levels: np.ndarray
    _also: ClassVar[tuple[str, ...]] = ("calibration_error",)
    _not: ClassVar[tuple[str, ...]] = ("levels",)

    @property
    def calibration_error(self) -> float | None:
        """The largest difference between a share and how often the wait fell below it (Kolmogorov-Smirnov)."""
        if not len(self.levels):
            return None
        steps = np.arange(len(self.levels) + 1) / len(self.levels)
        return float(max(np.abs(self.levels - steps[1:]).max(), np.abs(self.levels - steps[:-1]).max()))

    def __str__(self) -> str:
        known = "its time known" if self.at == "true" else "its time unknown"
        what = "each" if self.accuracy is None else "the type of each"
        lines = [f"{quantity(self.targets, 'event')}, {what} foreseen from those before it, {known}:"]
        if self.accuracy is not None:
            lines.append(f"accuracy {self.accuracy:.4f}, -log p(type) {self.type_nll:.4f}")
        if self.time_nll is not None:
            error = self.calibration_error
            calibration = "" if error is None else f", calibration error {error:.3f}"
            lines.append(f"waits: -log p {self.time_nll:.4f} per event{calibration}")
        return "\n".join(lines)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Calibration of the waits: how often the true wait fell below each share of the predicted law."""
        ax = axes(ax)
        shares = np.linspace(0, 1, 101)
        ax.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        if len(self.levels):
            ax.plot(shares, np.searchsorted(self.levels, shares, side="right") / len(self.levels), linewidth=2)
        ax.set(xlabel="predicted share of waits below", ylabel="observed share", xlim=(0, 1), ylim=(0, 1))
        ax.set_aspect("equal")
        return ax


@dataclass(frozen=True, eq=False)
class Curve(Result):
    """The probability of each next type if it happens after each wait.

    Attributes:
        waits: `(m,)`, in units of time behind the last event; of dates, seconds.
        probabilities: `(m, types)`.
        classes: the types.
        density: `(m,)`, of the wait itself, per unit of time; None where the model has none.
    """

    waits: np.ndarray
    probabilities: np.ndarray
    classes: np.ndarray
    density: np.ndarray | None = None

    def plot(self, ax: Axes | None = None, top: int = 6) -> Axes:
        """A line for each of the `top` types that are likeliest somewhere on the grid."""
        ax = axes(ax)
        best = np.argsort(-self.probabilities.max(0), kind="stable")[:top]
        for colour, place in zip(colours("viridis", len(best), 0.9), sorted(best), strict=True):
            ax.plot(self.waits, self.probabilities[:, place], color=colour, label=str(self.classes[place]), linewidth=2)
        if self.density is not None and self.density.max() > 0:
            shape = self.density / self.density.max()
            ax.fill_between(self.waits, 0, shape * ax.get_ylim()[1], color="0.9", zorder=0, label="when (density)")
        ax.set(xlabel="wait until the next event", ylabel="probability of each type", ylim=(0, None))
        ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
        return ax

    def __str__(self) -> str:
        likeliest = self.classes[self.probabilities.argmax(1)]
        change = np.append(True, likeliest[1:] != likeliest[:-1])
        parts = [f"{likeliest[at]} from a wait of {self.waits[at]:.4g}" for at in np.flatnonzero(change)]
        return f"likeliest next: {', then '.join(parts[:8])}" + (", ..." if len(parts) > 8 else "")


@dataclass(frozen=True, eq=False)
class Futures(Result):
    """Simulated events behind each sequence.

    Attributes:
        types: `(sequences, draws, steps)` labels.
        times: `(sequences, draws, steps)`; of dates datetime64.
    """

    types: np.ndarray
    times: np.ndarray

    def __str__(self) -> str:
        sequences, draws, steps = self.types.shape
        return f"{quantity(draws, 'future')} of {quantity(steps, 'event')} for {quantity(sequences, 'sequence')}"

    def to_frame(self) -> Any:
        """A data frame with a row for each simulated event."""
        import pandas

        index = pandas.MultiIndex.from_product(
            [range(size) for size in self.types.shape], names=["sequence", "draw", "step"]
        )
        return pandas.DataFrame(
            {"time": self.times.reshape(-1), "type": self.types.reshape(-1)}, index=index
        ).reset_index()

    def plot(self, ax: Axes | None = None, sequence: int = 0) -> Axes:
        """The draws of one sequence as rows of points, coloured by type."""
        ax = axes(ax)
        types = np.unique(self.types[sequence])
        for colour, name in zip(colours("viridis", len(types), 0.9), types, strict=True):
            draw, step = np.nonzero(self.types[sequence] == name)
            ax.scatter(self.times[sequence][draw, step], draw, color=colour, s=12, label=str(name))
        ax.set(xlabel="time", ylabel="draw")
        ax.legend(frameon=False, fontsize="small")
        return ax

"""Where in time, and in which channel, the evidence for an answer lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from heedful._checks import check_whole
from heedful._errors import InvalidArgument
from heedful._plot import Axes, axes
from heedful._result import Result


@dataclass(frozen=True)
class Evidence(Result):
    """What each segment and channel of each series adds to the score of each class, or of each number that is predicted.

    $$\\mathrm{score}_{ik} = \\mathrm{base}_{ik} + \\sum_{s, c} \\mathrm{values}_{isck}$$

    exactly: scores are sums over steps (see `docs/series.md`). The mean training series has evidence zero everywhere. A feature that reads
    several channels counts evenly to each of them.

    Attributes:
        values: `(cases, segments, channels, outputs)`; of a classifier in log-odds, of a regressor in units of y.
        base: `(cases, outputs)`, the mean score of the training series and what the series' length says.
        outputs: the classes, or numbers of outputs.
        channels: their names, or their numbers.
        lengths: steps of each series; segment s of S begins at step ceil(s length / S).
        series: the series, `(cases, channels, time)`, NaN behind their ends.
    """

    values: np.ndarray
    base: np.ndarray
    outputs: tuple[Any, ...]
    channels: tuple[str, ...]
    lengths: np.ndarray
    series: np.ndarray
    _not: ClassVar[tuple[str, ...]] = ("series",)

    def __len__(self) -> int:
        return len(self.base)

    @property
    def scores(self) -> np.ndarray:
        """`(cases, outputs)`."""
        return self.base + self.values.sum((1, 2))

    def edges(self, case: int) -> np.ndarray:
        """The steps at which segments of a series begin, and its end."""
        count = self.values.shape[1]
        return -(-np.arange(count + 1) * int(self.lengths[case]) // count)

    def of(self, case: int, output: Any = None) -> np.ndarray:
        """`(segments, channels)` for one class, by default the likeliest; of two classes, against the other one."""
        check_whole(0, len(self) - 1, case=case)
        if output is not None and output not in self.outputs:
            raise InvalidArgument(f"there is no output {output!r}; there are {', '.join(map(repr, self.outputs[:10]))}")
        at = int(self.scores[case].argmax()) if output is None else self.outputs.index(output)
        own = self.values[case, :, :, at]
        return own - self.values[case, :, :, 1 - at] if len(self.outputs) == 2 else own

    def __str__(self) -> str:
        count, segments, channels, outputs = self.values.shape
        return f"evidence of {segments} segments and {channels} channels of {count} series for {outputs} outputs"

    def plot(self, case: int = 0, output: Any = None, ax: Axes | None = None) -> Axes:
        """The channels of a series below one another, on colours that say what each segment adds: red for, blue against."""
        own = self.of(case, output)
        ax = axes(ax)
        edges, count = self.edges(case), len(self.channels)
        most = float(np.abs(own).max()) or 1.0
        mesh = ax.pcolormesh(
            edges, np.arange(count + 1), own.T, cmap="RdBu_r", vmin=-most, vmax=most, alpha=0.7, rasterized=True
        )
        for place, line in enumerate(self.series[case, :, : self.lengths[case]]):
            low, high = np.nanmin(line, initial=np.inf), np.nanmax(line, initial=-np.inf)
            # The first channel is above; each line has nine tenths of its row.
            height = place + 0.95 - 0.9 * (line - low) / (high - low if high > low else 1.0)
            ax.plot(np.arange(len(line)) + 0.5, height, color="black", linewidth=1.2)
        ax.set_yticks(np.arange(count) + 0.5, self.channels)
        ax.set(xlabel="step", ylabel="channel", ylim=(count, 0), xlim=(0, edges[-1]))
        name = self.outputs[int(self.scores[case].argmax())] if output is None else output
        ax.figure.colorbar(mesh, ax=ax, label=f"evidence for {name}")
        return ax

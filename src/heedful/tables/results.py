"""What is known of a prediction's rows: which it relied on, and whether it needs them at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from heedful._plot import Axes, axes
from heedful._result import Result
from heedful._text import quantity


@dataclass(frozen=True)
class RowExplanation(Result):
    """The stored rows that one prediction relied on, the most attended first.

    `rows` are their places in the table of `fit`, `shares` their shares of the attention, or of the votes where rows vote (`share_of`), `effects` by how much the prediction falls when a row is taken out
    (negative: it rises), `values` and `targets` what stands in them; `row` is the row that was asked for.
    """

    answer: Any
    prediction: float
    rows: tuple[int, ...]
    shares: tuple[float, ...]
    effects: tuple[float, ...]
    values: Mapping[str, Any]
    targets: tuple[Any, ...]
    row: Mapping[str, Any]
    stored: int
    share_of: str = "attention"

    def to_frame(self) -> Any:
        """A data frame: the row that was asked for, then the stored ones."""
        import pandas

        table = pandas.DataFrame({name: [self.row[name][0], *self.values[name]] for name in self.values})
        table.insert(0, "effect", [np.nan, *self.effects])
        table.insert(0, "share", [np.nan, *self.shares])
        table.insert(0, "target", [self.answer, *self.targets])
        table.index = pandas.Index(["asked", *self.rows], name="row")
        return table

    def __str__(self) -> str:
        names = list(self.values)[:6]
        lines = [["row", "target", "share", "effect", *names]]
        lines.append(["asked", f"{_shown(self.answer)}?", "", "", *(_shown(self.row[name][0]) for name in names)])
        for at, row in enumerate(self.rows):
            shares = [f"{self.shares[at]:.3f}", f"{self.effects[at]:+.4f}"]
            lines.append([str(row), _shown(self.targets[at]), *shares, *(_shown(self.values[n][at]) for n in names)])
        widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
        table = "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
        )
        even = 1 / self.stored
        head = (
            f"prediction {_shown(self.answer)} ({self.prediction:.3f}); of {quantity(self.stored, 'stored row')} these {len(self.rows)} have "
            f"{sum(self.shares):.0%} of the {self.share_of} (an even share is {even:.3f})"
        )
        more = f"\n{len(self.values) - 6} more columns: to_frame()" if len(self.values) > 6 else ""
        return f"{head}\n{table}{more}"

    def plot(self, ax: Axes | None = None) -> Axes:
        """Shares of the attention as bars, with the target of each row; a dotted line marks an even share."""
        ax = axes(ax)
        places = np.arange(len(self.rows))[::-1]
        ax.barh(places, self.shares)
        labels = [f"row {row}: {_shown(target)}" for row, target in zip(self.rows, self.targets, strict=True)]
        ax.set_yticks(places, labels)
        ax.axvline(1 / self.stored, color="black", linestyle=":", label=f"an even share, {1 / self.stored:.3g}")
        ax.set(xlabel=f"share of the {self.share_of}", title=f"rows behind the prediction {_shown(self.answer)}")
        ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15))
        return ax


@dataclass(frozen=True)
class Corruption(Result):
    """Scores with the stored rows as they are and with every column of them scrambled."""

    clean: Mapping[str, float]
    corrupted: Mapping[str, float]
    repeats: int
    asked: int
    stored: int
    _also: ClassVar[tuple[str, ...]] = ("change",)

    @property
    def change(self) -> dict[str, float]:
        """Scores with scrambled rows minus those with the rows as they are."""
        return {name: self.corrupted[name] - self.clean[name] for name in self.clean}

    def __str__(self) -> str:
        lines = [
            f"{name}: {self.clean[name]:.4f} with {quantity(self.stored, 'stored row')}, {self.corrupted[name]:.4f} with their columns scrambled "
            f"({self.change[name]:+.4f})"
            for name in self.clean
        ]
        return "\n".join(lines)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Both scores of each kind, side by side."""
        ax = axes(ax)
        places = np.arange(len(self.clean))
        ax.bar(places - 0.2, list(self.clean.values()), 0.4, label="rows as they are")
        ax.bar(places + 0.2, list(self.corrupted.values()), 0.4, label="columns scrambled")
        ax.set_xticks(places, list(self.clean))
        ax.legend(frameon=False)
        return ax


@dataclass(frozen=True)
class Deletion(Result):
    """Stored rows that predictions need, and how near they lie.

    `kept` has the places, in the table of `fit`, of the rows that stayed, for each row asked for. `near`, `far` and `random` are mean distances of it to the kept rows, to the
    deleted ones, and to as many random rows as were kept. `p_value` is of a one-sided Wilcoxon signed-rank test that kept rows lie nearer than random ones; `p_deleted` than the
    deleted ones, the authors' test, which sets of unequal sizes bias. NaN where nothing was deleted, or nothing kept but all.
    """

    kept: tuple[tuple[int, ...], ...]
    near: tuple[float, ...]
    far: tuple[float, ...]
    random: tuple[float, ...]
    p_value: float
    p_deleted: float
    stored: int

    @classmethod
    def of(
        cls, kept: Sequence[np.ndarray], distances: np.ndarray, places: np.ndarray, generator: np.random.Generator
    ) -> Self:
        count = distances.shape[1]
        near, far, random = [], [], []
        for row, stay in zip(distances, kept, strict=True):
            gone = np.setdiff1d(np.arange(count), stay)
            drawn = generator.choice(count, len(stay), replace=False)
            near.append(float(row[stay].mean()))
            far.append(float(row[gone].mean()) if len(gone) else float("nan"))
            random.append(float(row[drawn].mean()))
        return cls(
            tuple(tuple(places[stay].tolist()) for stay in kept),
            tuple(near), tuple(far), tuple(random), _less(near, random), _less(near, far), count,
        )  # fmt: skip

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the stored rows that each prediction needs."""
        return tuple(len(stay) / self.stored for stay in self.kept)

    def __str__(self) -> str:
        return (
            f"{quantity(len(self.kept), 'prediction')} of {quantity(self.stored, 'stored row')}: on average {np.mean(self.shares):.0%} of them are needed; these lie at a mean "
            f"distance of {np.nanmean(self.near):.3f}, as many random ones at {np.nanmean(self.random):.3f} (Wilcoxon p = {self.p_value:.2g})"
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Mean distance to the kept rows against that to as many random ones, a point for each prediction."""
        ax = axes(ax)
        ax.scatter(self.random, self.near)
        ends = [float(np.nanmin([self.near, self.random])), float(np.nanmax([self.near, self.random]))]
        ax.plot(ends, ends, color="gray", linestyle=":")
        ax.set(xlabel="mean distance to random rows", ylabel="mean distance to rows that are needed")
        return ax


def _less(first: Sequence[float], second: Sequence[float]) -> float:
    """The p-value of a one-sided Wilcoxon signed-rank test that the first are less."""
    from scipy.stats import wilcoxon

    differences = np.subtract(first, second)
    differences = differences[np.isfinite(differences)]
    return float(wilcoxon(differences, alternative="less").pvalue) if np.any(differences) else float("nan")


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, np.datetime64):
        return "-" if np.isnat(value) else str(value.astype("datetime64[s]")).replace("T00:00:00", "")
    if isinstance(value, float | np.floating):
        return "-" if np.isnan(value) else f"{value:.4g}"
    return str(value)[:24]

"""What a conversion did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from heedful._plot import Axes, axes
from heedful._result import Result
from heedful._text import quantity


@dataclass(frozen=True)
class LayerFit(Result):
    """How near one primal layer came to the attention it replaces; errors are shares of the spread, on held-out data.

    Args:
        layer: its place among the model's self-attentions.
        name: the module that was replaced.
        heads, rank, rows: the primal layer's; rows is n', how many stand for a sequence.
        fitted: the error of the attention's output after least squares, $\\|Y - D\\| / \\|D - \\bar D\\|$.
        control: that of the best linear map of each token by itself, which mixes no tokens.
        block: the error of the whole layer's output as it is in the end.
    """

    layer: int
    name: str
    heads: int
    rank: int
    rows: int
    fitted: float
    control: float
    block: float


@dataclass(frozen=True, repr=False)
class Primalized(Result):
    """A model with primal layers, and how it compares with the one it was made from, on held-out data.

    Args:
        model: the converted model; the one that was given is as it was.
        layers: what became of each layer, first to last.
        cosines: of the embedding of each held-out sequence, before and after.
        control: the mean cosine of a model whose layers had the best linear map of each token by itself instead: what is
            reached without any mixing of tokens, before distillation.
        latency_before, latency_after: seconds for one call of the whole model, the median of several.
        batch: sequences and tokens of that call.
        distillation: steps for each layer.
    """

    model: Any
    layers: tuple[LayerFit, ...]
    cosines: tuple[float, ...]
    control: float
    latency_before: float
    latency_after: float
    batch: tuple[int, int]
    distillation: int

    _also = ("agreement", "lowest")
    _not = ("model",)

    @property
    def agreement(self) -> float:
        """The mean cosine of embeddings before and after."""
        return sum(self.cosines) / len(self.cosines)

    @property
    def lowest(self) -> float:
        """The lowest of these cosines."""
        return min(self.cosines)

    def plot(self, ax: Axes | None = None) -> Axes:
        """How many held-out sequences keep which cosine; dotted the mean, dashed the control's."""
        ax = axes(ax)
        ax.hist(self.cosines, bins=30, color="C0", alpha=0.8)
        ax.axvline(self.agreement, color="C0", ls=":", label=f"mean, {self.agreement:.3f}")
        ax.axvline(self.control, color="gray", ls="--", label=f"no mixing, not distilled, {self.control:.3f}")
        ax.set(xlabel="cosine of embeddings before and after", ylabel="sequences")
        ax.legend(frameon=False)
        return ax

    def __str__(self) -> str:
        rows = [
            f"{one.layer:>5}  {one.heads:>5}  {one.rank:>4}  {one.fitted:>13.3f}  {one.control:>10.3f}  {one.block:>12.3f}"
            for one in self.layers
        ]
        sequences, tokens = self.batch
        return "\n".join(
            [
                f"{quantity(len(self.layers), 'layer')} of the model became primal; errors on held-out data (1: no better than a constant)",
                "layer  heads  rank  least squares  no mixing  whole layer",
                *rows,
                f"embeddings agree to {self.agreement:.4f} (mean cosine of {quantity(len(self.cosines), 'sequence')}, the lowest "
                f"{self.lowest:.4f})",
                f"with the best map of each token alone in place of these layers, not distilled: {self.control:.4f}",
                f"one call ({sequences} x {quantity(tokens, 'token')}): {1e3 * self.latency_before:.1f} ms before, "
                f"{1e3 * self.latency_after:.1f} ms after",
            ]
        )

    def __repr__(self) -> str:
        which = ", ".join(str(one.layer) for one in self.layers)
        return f"Primalized({type(self.model).__name__}, layers {which}, agreement {self.agreement:.4f})"


@dataclass(frozen=True)
class BreakingPoint(Result):
    """How embeddings change as more of the last layers become primal.

    `agreements[k]` is the mean cosine with k + 1 layers converted, counted from the last; the series ends where it falls below
    the threshold, or with the model.
    """

    agreements: tuple[float, ...]
    threshold: float
    runs: tuple[Primalized, ...] = field(repr=False)

    _also = ("layers",)

    @property
    def layers(self) -> int:
        """How many of the last layers can be converted while embeddings agree to the threshold."""
        return next((at for at, one in enumerate(self.agreements) if one < self.threshold), len(self.agreements))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Agreement against the number of converted layers, and that of token-wise maps."""
        ax = axes(ax)
        count = range(1, len(self.agreements) + 1)
        ax.plot(count, self.agreements, "o-", label="primal")
        ax.plot(count, [run.control for run in self.runs], "s--", color="gray", label="no mixing, not distilled")
        ax.axhline(self.threshold, color="gray", lw=0.8)
        ax.set(xlabel="converted layers, from the last on", ylabel="mean cosine of embeddings", xticks=list(count))
        ax.legend(frameon=False)
        return ax

    def __str__(self) -> str:
        cosines = ", ".join(f"{at} {one:.3f}" for at, one in enumerate(self.agreements, 1))
        return f"{quantity(self.layers, 'layer')} converted: embeddings stay at {self.threshold:g} or more (mean cosine by number of layers: {cosines})"

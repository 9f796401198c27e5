"""What is known of tokens on their way through the layers of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from numpy.typing import NDArray

from heedful._plot import Axes, axes, whole_ticks
from heedful._result import Result
from heedful._text import quantity
from heedful.lens.transport.paths import draw_paths, flattened


@dataclass(frozen=True)
class LayerMove(Result):
    r"""How one layer moved the tokens, or all layers together: $x_i \to x_i + \Delta_i$.

    Args:
        name: the layer; empty for all of them.
        length: the median of $|\Delta_i| / |x_i|$.
        common: the share of $\sum_i |\Delta_i|^2$ that is the shift of the mean, which all tokens have in common.
        optimality: $\sqrt{\mathrm{OT}_2 / \frac{1}{N} \sum_i |\Delta_i|^2}$: 1 where no exchange of destinations would be cheaper. The common shift
            dominates it.
        centred_optimality: the same without the common shift.
        baseline, centred_baseline: optimality of a random pairing of the same two clouds.
        exchanged: centred optimality of the same moves given to other tokens at random; where it is 1 too, the moves are merely short.
        matching: share of tokens whose destination is the one that the cheapest plan gives them.
        exchanged_matching: the same for exchanged moves.
    """

    name: str
    length: float
    common: float
    optimality: float
    centred_optimality: float
    baseline: float
    centred_baseline: float
    exchanged: float
    matching: float
    exchanged_matching: float


@dataclass(frozen=True, repr=False)
class LayerTransport(Result):
    """The way of tokens through the layers of a model; `between_layers` returns it.

    Args:
        model: the class of the model.
        moves: one for each layer, in the order in which they ran.
        whole: from what the first layer reads to what the last one returns.
        straightness: the straight distance by the length of the way, summed over tokens; 1 for tokens that move on a line.
        right_angles: what it would be if each layer moved every token as far, at right angles to the moves of all others.
        travelled, distance: the mean length of the way before each layer and after the last, and the mean distance from its beginning.
        tokens, left_out: what was followed, and tokens so far out that they were not.
        trajectory: `(layers + 1, tokens, features)`.
    """

    model: str
    moves: tuple[LayerMove, ...]
    whole: LayerMove
    straightness: float
    right_angles: float
    travelled: tuple[float, ...]
    distance: tuple[float, ...]
    tokens: tuple[str, ...]
    left_out: tuple[str, ...]
    trajectory: NDArray[Any] = field(repr=False)
    _not: ClassVar[tuple[str, ...]] = ("trajectory",)

    def __len__(self) -> int:
        return len(self.moves)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Optimality without the common shift by layer, beside exchanged moves and a random pairing."""
        ax = axes(ax)
        kinds = {
            "layer's own": "centred_optimality",
            "moves exchanged": "exchanged",
            "random pairing": "centred_baseline",
        }
        for at, (label, name) in enumerate(kinds.items()):
            heights = [getattr(move, name) for move in self.moves]
            ax.plot(range(len(heights)), heights, ("o-", "s--", "^:")[at], color=f"C{at}", label=label)
        ax.set(xlabel="layer", ylabel="optimality without the common shift", ylim=(0, 1.05))
        whole_ticks(ax, "x")
        ax.legend(frameon=False, fontsize="small")
        return ax

    def plot_paths(self, ax: Axes | None = None) -> Axes:
        """The way of each token in the two directions in which tokens spread most, with its name at the end."""
        ax = draw_paths(self.trajectory, None, axes(ax), len(self.tokens))
        for token, place in zip(self.tokens, flattened(self.trajectory)[0][-1], strict=True):
            ax.annotate(token, place, xytext=(4, 2), textcoords="offset points", fontsize="x-small")
        return ax

    def __str__(self) -> str:
        lines = [
            f"{self!r}",
            f"straightness of the way {self.straightness:.3f} (moves at right angles: {self.right_angles:.3f})",
            "layer  length  common  optimality  centred  exchanged  random  matching",
        ]
        for at, move in enumerate((*self.moves, self.whole)):
            lines.append(
                f"{at if at < len(self) else 'all':>5}  {move.length:>6.2f}  {move.common:>6.0%}  {move.optimality:>10.3f}  "
                f"{move.centred_optimality:>7.3f}  {move.exchanged:>9.3f}  {move.centred_baseline:>6.3f}  {move.matching:>8.3f}"
            )
        if self.left_out:
            lines.append(f"left out, for they lie more than ten times as far out as others: {' '.join(self.left_out)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"LayerTransport({self.model}, {quantity(len(self), 'layer')}, {quantity(len(self.tokens), 'token')} of "
            f"{quantity(self.trajectory.shape[-1], 'feature')})"
        )

"""What counts of words explain of each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from heedful._plot import Axes, heat_map
from heedful._result import Result


@dataclass(frozen=True)
class CountedHead(Result):
    r"""One head: shares of the variance of its scores within rows, $R^2$, that regressions on the following explain.

    Attributes:
        layer, head: which.
        symmetric: positive PMI of the two words, whichever stands first.
        directed: positive PMI of the earlier word before the later one, a slope for keys on the left and one for those on the right.
        distance: the same from counts at the very distance of the two.
        position: no words at all, but how far apart they are, a number for each distance.
        together: all of them at once.
        chance: the same as `together`, with words of the text exchanged for others that are about as frequent: the control. What regressions
            of so many numbers fit anyway, and what positions alone say, is in it.
    """

    layer: int
    head: int
    symmetric: float
    directed: float
    distance: float
    position: float
    together: float
    chance: float

    _also = ("gain",)

    @property
    def gain(self) -> float:
        """What it matters which words these are: `together` less `chance`."""
        return self.together - self.chance

    def __str__(self) -> str:
        return (
            f"head {self.layer}.{self.head}: {self.together:.2f} ({self.chance:.2f} with words exchanged); symmetric {self.symmetric:.2f}, "
            f"directed {self.directed:.2f}, by distance {self.distance:.2f}, position alone {self.position:.2f}"
        )


@dataclass(frozen=True)
class CountedHeads(Result, Sequence[CountedHead]):
    """Every head of a model that has scores.

    Attributes:
        heads: in the order of layers.
        pairs: pairs of tokens that the regressions are over, in each layer.
        counted: the share of these pairs that occurs within the window of the counts at all.
        luck: the largest `gain` that any of the heads has in any of the exchanges, against the others: the best of many heads has one by
            chance. With nine exchanges, a best head that knows nothing of pairs is above it in one text of ten.
        source: what was counted, in words.
        left_out: layers whose coefficients are no function of one score.
    """

    heads: tuple[CountedHead, ...]
    pairs: int
    counted: float
    luck: float
    source: str
    left_out: tuple[int, ...] = ()

    @overload
    def __getitem__(self, index: int) -> CountedHead: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[CountedHead, ...]: ...
    def __getitem__(self, index: int | slice) -> CountedHead | tuple[CountedHead, ...]:
        return self.heads[index]

    def __len__(self) -> int:
        return len(self.heads)

    def most(self, count: int = 5) -> list[CountedHead]:
        """The heads whose scores depend most on which words these are."""
        return sorted(self.heads, key=lambda one: -one.gain)[:count]

    def mean(self, name: str) -> float:
        """The mean of a field over heads."""
        return float(np.mean([getattr(one, name) for one in self.heads]))

    def __str__(self) -> str:
        lines = [
            f"{len(self)} heads on {self.pairs} pairs of tokens, {self.counted:.0%} of them in {self.source}; on average counts and positions "
            f"explain {self.mean('together'):.2f} of a head's scores, {self.mean('chance'):.2f} with words exchanged; the best head gains "
            f"{self.most(1)[0].gain:.2f}, and {self.luck:.2f} by luck"
        ]
        return "\n".join([*lines, *(f"  {one}" for one in self.most())])

    def plot(self, ax: Axes | None = None) -> Axes:
        """What the words add in every head: layers down, heads across."""
        layers = sorted({one.layer for one in self.heads})
        width = 1 + max(one.head for one in self.heads)
        values = np.full((len(layers), width), np.nan)
        for one in self.heads:
            values[layers.index(one.layer), one.head] = one.gain
        ax = heat_map(ax, values, "R² beyond words exchanged")
        ax.set(xlabel="head", ylabel="layer", title="How much of a head is counting")
        return ax

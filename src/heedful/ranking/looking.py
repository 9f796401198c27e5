"""What the members of a result list look at while a trained network re-scores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heedful._checks import check_whole, is_whole
from heedful._errors import InvalidArgument
from heedful._plot import Axes, heat_map
from heedful._result import Result
from heedful._text import quantity


@dataclass(frozen=True)
class ListAttention(Result):
    """Attention between a query and its results.

    It says where the network looks, not what the order would be without it; for that, re-rank the list with a result left out of `candidates`.

    Attributes:
        places: `(K,)`, the results in the order of the first list, as places in the database.
        scores: `(K,)`, their new scores.
        weights: `(layers, heads, K + 1, K + 1)`, what each member, down, takes of each, across; member 0 is the query. Rows sum to 1.

    >>> equal = ListAttention(np.array([7, 3]), np.array([0.2, 0.9]), np.full((1, 1, 3, 3), 1 / 3))
    >>> equal.order.tolist(), equal.of_query().round(2).tolist()
    ([3, 7], [0.33, 0.33, 0.33])
    >>> print(equal)
    2 results, 1 layer with 1 head
    place 1: 3, place 2 before, the query takes 33.3 % of it
    place 2: 7, place 1 before, the query takes 33.3 % of it
    """

    places: NDArray[np.int64]
    scores: NDArray[np.floating]
    weights: NDArray[np.floating]

    @property
    def order(self) -> NDArray[np.int64]:
        """The results in their new order, as places in the database."""
        return self.places[self._new]

    def between(self, layer: int | None = None, head: int | None = None) -> NDArray[np.floating]:
        """Weights `(K + 1, K + 1)` of a layer and a head; the mean over those that are not named."""
        layers, heads = self.weights.shape[:2]
        for name, value, count in (("layer", layer, layers), ("head", head, heads)):
            if value is not None and (not is_whole(value) or not -count <= value < count):
                raise InvalidArgument(f"{name} must be a whole number from {-count} to {count - 1}; got {value!r}")
        chosen = self.weights if layer is None else self.weights[layer][None]
        return (chosen if head is None else chosen[:, head][:, None]).mean((0, 1))

    def of_query(self, layer: int | None = None, head: int | None = None) -> NDArray[np.floating]:
        """What the query takes of itself and of each result, `(K + 1,)`, in the order of the first list."""
        return self.between(layer, head)[0]

    def plot(
        self,
        ax: Axes | None = None,
        *,
        top: int = 20,
        layer: int | None = None,
        head: int | None = None,
        names: Sequence[str] | None = None,
    ) -> Axes:
        """A map of the query and the first results in their new order: what each, down, takes of each, across.

        `names` are those of the first list's results; by default their places in the database.
        """
        check_whole(top=top)
        if names is not None and len(names) != len(self.places):
            raise InvalidArgument(f"names must be {len(self.places)}, one for each result; got {len(names)}")
        called = [str(place) for place in self.places] if names is None else list(names)
        shown = self._new[:top]
        members = np.concatenate(([0], 1 + shown))
        labels = ["query", *(called[at] for at in shown)]
        ax = heat_map(ax, self.between(layer, head)[np.ix_(members, members)], "attention", aspect="equal", vmin=0)
        ticks = range(len(labels))
        ax.set_xticks(ticks, labels, rotation=90, fontsize=7)
        ax.set_yticks(ticks, labels, fontsize=7)
        ax.set(xlabel="takes of", ylabel="results, the best first")
        return ax

    @property
    def _new(self) -> NDArray[np.int64]:
        """Where in the first list each result of the new order stands."""
        return np.argsort(-self.scores, kind="stable")

    def __str__(self) -> str:
        layers, heads = self.weights.shape[:2]
        taken = self.of_query()
        lines = [f"{quantity(len(self.places), 'result')}, {quantity(layers, 'layer')} with {quantity(heads, 'head')}"]
        for new, at in enumerate(self._new[:10], 1):
            lines.append(
                f"place {new}: {self.places[at]}, place {at + 1} before, the query takes {100 * taken[1 + at]:.1f} % of it"
            )
        return "\n".join(lines)

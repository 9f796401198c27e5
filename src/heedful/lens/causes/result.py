"""What an explanation holds, and how it is told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heedful.lens.causes.baselines import BaselineResult
from heedful.lens.causes.graph import PAG

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Alternative", "Effect", "Explanation"]


class Effect(NamedTuple):
    """What taking the set away does.

    `before` and `after` are margins of the answer: its score less that of its strongest rival. `kept` is the margin where the set alone is
    left of the candidates. Probabilities are those of the answer; of an embedding, which has none, they are NaN.
    """

    before: float
    after: float
    kept: float
    probability_before: float
    probability_after: float


class Alternative(NamedTuple):
    """Another set that was tried: its nodes, whether the answer changes without them, and the margin then."""

    indices: tuple[int, ...]
    flipped: bool
    margin: float


@dataclass(frozen=True, repr=False, eq=False)
class Explanation:
    """The smallest set of words found whose removal changes a model's answer, with the graph that proposed it.

    Masking is the evidence; a graph only proposes what to mask. It tells how the model's own attention ties tokens together, not
    what causes what in the world.

    Attributes:
        task: what was asked: `"classification"`, `"mlm"`, `"next-token"`, `"recommendation"`, `"embedding"`.
        tokens: all that the model read, its own answer put in.
        nodes: the places in `tokens` of each node of the graphs; one of several places is a word of several tokens.
        target_node: the node where the answer stands.
        names: of the nodes.
        answer, rank: what the model says, or what else was asked about, and its place among the answers; 1 is the model's own.
        found: whether a set was found. Where not, `indices` is the set with the largest effect.
        flipped_to: what the model says without the set; None where nothing was found.
        indices, words: the set, as nodes and as words.
        head, layer: where the graph comes from that proposed it; head is None where no graph connects the set.
        pags, heads: the graphs, and the heads they belong to. `pag` is the one that proposed the set.
        correlation: `[heads, m, m]`.
        sem: for decoders, `sem_weights` of every head, `[heads, n, n]`; else None.
        effect: margins and probabilities before and after.
        alternatives: other sets: those that change the answer too, then those with the largest effects.
        baselines: what other methods give, by name; empty where they were not asked for.
        calls: different inputs that the search asked the model about, the check at the end included.
        seconds: of all of it.
        settings: what it was done with.
        confidence: of the structure, for each head.
        trust: plain sentences on how far to trust it.
    """

    task: str
    tokens: tuple[str, ...]
    nodes: tuple[tuple[int, ...], ...]
    target_node: int
    names: tuple[str, ...]
    answer: str
    rank: int
    found: bool
    flipped_to: str | None
    indices: tuple[int, ...]
    words: tuple[str, ...]
    head: int | None
    layer: int
    pags: tuple[PAG, ...]
    heads: tuple[int, ...]
    correlation: NDArray[np.float64]
    sem: NDArray[np.float64] | None
    effect: Effect
    alternatives: tuple[Alternative, ...]
    baselines: dict[str, BaselineResult]
    calls: int
    seconds: float
    settings: dict[str, Any]
    confidence: tuple[float, ...]
    trust: tuple[str, ...]

    @property
    def pag(self) -> PAG:
        """The graph that proposed the set; the surest one where none did."""
        if self.head is not None:
            return self.pags[self.heads.index(self.head)]
        return self.pags[int(np.argmax(self.confidence))]

    @property
    def places(self) -> tuple[int, ...]:
        """The set as places in `tokens`."""
        return tuple(sorted(place for node in self.indices for place in self.nodes[node]))

    @property
    def size(self) -> int:
        """How many words the set has."""
        return len(self.indices)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the graph, the set and the answer marked."""
        return self.pag.plot(ax, highlight=self.indices, target=self.target_node)

    def to_html(self) -> str:
        """A page that needs nothing but itself: the text with its set, the graph, the baselines."""
        from heedful.lens.causes.page import html_of

        return html_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the attention; JSON types alone."""
        effect = {name: value if math.isfinite(value) else None for name, value in self.effect._asdict().items()}
        return {
            "task": self.task,
            "tokens": list(self.tokens),
            "nodes": [list(node) for node in self.nodes],
            "target_node": self.target_node,
            "names": list(self.names),
            "answer": self.answer,
            "rank": self.rank,
            "found": self.found,
            "flipped_to": self.flipped_to,
            "indices": list(self.indices),
            "words": list(self.words),
            "head": self.head,
            "layer": self.layer,
            "heads": list(self.heads),
            "pag": self.pag.to_dict(),
            "densities": [pag.density for pag in self.pags],
            "effect": effect,
            "alternatives": [
                {"indices": list(one.indices), "flipped": one.flipped, "margin": one.margin}
                for one in self.alternatives
            ],
            "baselines": {name: one.to_dict() for name, one in self.baselines.items()},
            "calls": self.calls,
            "seconds": self.seconds,
            "settings": dict(self.settings),
            "confidence": list(self.confidence),
            "trust": list(self.trust),
        }

    def __repr__(self) -> str:
        if not self.found:
            return f"Explanation({self.answer!r}: no set of {self.settings['max_size']} or fewer changes it, {self.calls} calls)"
        words = ", ".join(self.words)
        where = f", head {self.head}" if self.head is not None else ""
        return f"Explanation({self.answer!r} hangs on {{{words}}}: without it {self.flipped_to!r}{where}, {self.calls} calls)"

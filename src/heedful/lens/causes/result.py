"""What an explanation holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heedful._plot import Axes
from heedful._result import Result, plain
from heedful.discovery.graph import PAG
from heedful.lens.causes.baselines import BaselineResult


def measurable(before: float, after: float) -> bool:
    """Whether a probability or a cosine falls by more than rounding.

    >>> measurable(0.5, 0.4999), measurable(0.5, 0.5 - 1e-9), measurable(0.5, 0.6)
    (True, False, False)
    """
    return before - after > 1e-6 * abs(before)


class Effect(NamedTuple):
    """What taking the set away does.

    `before` and `after` are margins of the answer: its score less that of its strongest rival. `kept` is the margin where the set alone is
    left of the candidates. Probabilities are those of the answer; of an embedding, which has none, they are NaN. Cosines are those of the
    embedding with the whole text's, and NaN for everything else.
    """

    before: float
    after: float
    kept: float
    probability_before: float
    probability_after: float
    cosine_before: float
    cosine_after: float


class Removal(NamedTuple):
    """What the model answers without some words.

    Attributes:
        indices, words: what was removed, as nodes and as words.
        flipped: whether the answer changes.
        answer: what the model answers then.
        score: the probability of the answer that is explained; of an embedding, its cosine with the whole text's.
        margin: by how much the explained answer leads its strongest rival; below zero where it changes.
        rank: the place of the explained answer among the answers then; 1 is the first.
    """

    indices: tuple[int, ...]
    words: tuple[str, ...]
    flipped: bool
    answer: str
    score: float
    margin: float
    rank: int


class WordScore(NamedTuple):
    """How much one word matters, measured.

    Attributes:
        node, word: the node, and its word.
        leave_one_out: by how much the probability of the answer (the cosine of an embedding) falls when this word alone is removed.
        mean_effect: by how much it falls when the word is removed as well, averaged over all sets S of other words, the empty one
            among them, for which both S and S with the word were asked about. These are the terms of a Shapley value, but for the sets that the search
            chose and not for all.
        sets: how many such sets there are.
        alone: what the model answers without this word alone.
    """

    node: int
    word: str
    leave_one_out: float
    mean_effect: float
    sets: int
    alone: Removal


@dataclass(frozen=True, repr=False, eq=False)
class Explanation(Result):
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
        sets: the sets of the smallest size that were found to change the answer, by falling effect, `max_sets` of them (all of single
            words); `indices` is the first.
        sets_note: which sets of that size were tried, and whether a limit ended the search for more.
        ending: of a text whose next token is asked for, the smallest sets that change the answer and hold its last word. Without it another next
            word is asked for, so that they are apart; where no other set was found they are `sets` too.
        scores: how much each word matters by itself and beside others, in the order of the text.
        alternatives: other sets that were tried: those that change the answer too, then those with the largest effects.
        left_out: what was never removed, each with the reason.
        text, spans: the text that was read, and where each node stands in it (None for one that is no part of it); empty where there is no text.
        part: how much of a longer text was read; empty where all of it was.
        baselines: what other methods give, by name; empty where they were not asked for.
        calls: different inputs that the model was asked about to find the first set, the check at the end included.
        more_calls: those that looked for other sets of the same size, and measured words that had not been removed alone.
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
    sets: tuple[Removal, ...]
    sets_note: str
    ending: tuple[Removal, ...]
    scores: tuple[WordScore, ...]
    alternatives: tuple[Removal, ...]
    left_out: tuple[tuple[str, str], ...]
    text: str
    spans: tuple[tuple[int, int] | None, ...]
    part: str
    baselines: dict[str, BaselineResult]
    calls: int
    more_calls: int
    seconds: float
    settings: dict[str, Any]
    confidence: tuple[float, ...]
    trust: tuple[str, ...]

    _also = ("pag",)
    _not = ("pags", "correlation", "sem", "confidence")

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

    @property
    def measure(self) -> str:
        """What `Removal.score` is: `"probability"`, or `"cosine"` of an embedding."""
        return "cosine" if self.task == "embedding" else "probability"

    @property
    def before(self) -> float:
        """The score of the whole input."""
        return self.effect.cosine_before if self.task == "embedding" else self.effect.probability_before

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the graph, the set and the answer marked."""
        return self.pag.plot(ax, highlight=self.indices, target=self.target_node)

    def to_html(self) -> str:
        """A page that needs nothing but itself: the text with its set, the graph, the baselines."""
        from heedful.lens.causes.section import html_of

        return html_of(self)

    def _repr_html_(self) -> str:
        from heedful.report.page import framed

        return framed(self.to_html())

    @property
    def only_ending(self) -> bool:
        """Whether no set was found but such as hold the last word of the text."""
        return bool(self.ending) and self.ending[:1] == self.sets[:1]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the attention; JSON types alone."""
        from heedful.lens.causes.telling import ending_note

        return super().to_dict() | {
            **{name: [self._listed(one) for one in getattr(self, name)] for name in ("sets", "ending", "alternatives")},
            self.measure: self.before,
            "densities": [pag.density for pag in self.pags],
            "ending_note": ending_note(self),
            "scores": [plain(one) | {"alone": self._listed(one.alone)} for one in self.scores],
            "left_out": [{"word": word, "reason": reason} for word, reason in self.left_out],
        }

    def _listed(self, one: Removal) -> dict[str, Any]:
        return {
            "indices": list(one.indices),
            "words": list(one.words),
            "flipped": one.flipped,
            "answer": one.answer,
            f"{self.measure}_before": self.before,
            f"{self.measure}_after": one.score,
            "margin": one.margin,
            "rank_before": self.rank,
            "rank_after": one.rank,
        }

    def __str__(self) -> str:
        from heedful.lens.causes.telling import lines

        return "\n".join(lines(self))

    def __repr__(self) -> str:
        if not self.found:
            return f"Explanation({self.answer!r}: no set of {self.settings['max_size']} or fewer changes it, {self.calls} calls)"
        sets = " or ".join(f"{{{', '.join(one.words)}}}" for one in self.sets[:3])
        more = f" or {len(self.sets) - 3} other sets" if len(self.sets) > 3 else ""
        return f"Explanation({self.answer!r} changes without {sets}{more}: to {self.flipped_to!r}, {self.calls} calls)"

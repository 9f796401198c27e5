"""Which words of a text attend to which, to be looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from heedful._plot import Axes, heat_map
from heedful._result import Result

if TYPE_CHECKING:
    from heedful.corpus.attention import CorpusAttention

__all__ = ["AttentionMap"]

SHADES = " \u2591\u2592\u2593\u2588"
# Signs of a word's name, and words of a text, up to which a map is drawn in the terminal.
NAME, DRAWN = 14, 16


@dataclass(frozen=True)
class AttentionMap(Result):
    """Weights of attention between the words of a text.

    Attributes:
        words: of the text.
        known: whether each of them was counted.
        weights: `(heads, n, n)`; rows look, columns are looked at.
    """

    words: tuple[str, ...]
    known: tuple[bool, ...]
    weights: np.ndarray

    @classmethod
    def of(cls, attention: CorpusAttention, text: Any) -> AttentionMap:
        """The map of a text by `CorpusAttention`.

        >>> from heedful.corpus import Cooccurrence, CorpusAttention
        >>> counts = Cooccurrence(window=3).fit(["the deep sea", "the deep lake", "the bank lends money"])
        >>> print(AttentionMap.of(CorpusAttention(counts), "the deep sea"))
                   1     2     3
        1 the        ▓  66 ▒  34
        2 deep ▒  45       ▓  55
        3 sea  ▒  30 ▓  70
        """
        words = tuple(attention.tokens(text))
        ids = attention.ids(list(words))
        weights = attention.attention(ids) if len(words) else np.zeros((attention.num_heads, 0, 0))
        return cls(words, tuple((ids >= 0).tolist()), np.asarray(weights))

    @property
    def unknown(self) -> tuple[str, ...]:
        """Words of the text that were not counted, each once."""
        return tuple(dict.fromkeys(word for word, known in zip(self.words, self.known, strict=True) if not known))

    def strongest(self, word: int, top: int = 3) -> list[tuple[str, float]]:
        """The words that one, by its place, attends to most, heads averaged."""
        row = self.weights.mean(axis=0)[word]
        best = np.argsort(-row, kind="stable")[:top]
        return [(self.words[place], float(row[place])) for place in best if row[place] > 0]

    def __str__(self) -> str:
        """A table in percent of each row, heads averaged; of a long text the strongest words of each."""
        names = [word if len(word) <= NAME else f"{word[: NAME - 1]}\u2026" for word in self.words]
        labels = [f"{place} {name}" for place, name in enumerate(names, 1)]
        width = max(map(len, labels), default=0)
        if len(names) > DRAWN:
            rows = (
                ", ".join(f"{word} {weight:.0%}" for word, weight in self.strongest(at)) for at in range(len(names))
            )
            return "\n".join(f"{label:<{width}}  {row}".rstrip() for label, row in zip(labels, rows, strict=True))
        head = " " * width + "".join(f"{place:>6}" for place in range(1, len(names) + 1))
        body = (
            f"{label:<{width}}" + "".join(map(_cell, row))
            for label, row in zip(labels, self.weights.mean(axis=0), strict=True)
        )
        return "\n".join(line.rstrip() for line in (head, *body))

    def plot(self, ax: Axes | None = None, head: int | None = None) -> Axes:
        """The map in colours, of one head or of all averaged."""
        weights = self.weights.mean(axis=0) if head is None else self.weights[head]
        ax = heat_map(ax, weights, "weight", vmin=0)
        ax.set_xticks(range(len(self.words)), self.words, rotation=60, ha="right")
        ax.set_yticks(range(len(self.words)), self.words)
        ax.set(xlabel="is looked at", ylabel="looks")
        return ax


def _cell(weight: float) -> str:
    percent = round(100 * weight)
    if not percent:
        return " " * 6
    return f" {SHADES[min(4, 1 + int(4 * weight))] if percent >= 5 else ' '}{percent:>4}"

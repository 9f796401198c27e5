"""Which word fits into a gap: associations of the words around it, added up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from heedful._checks import check_number, check_whole, is_whole
from heedful._errors import InvalidArgument
from heedful._plot import Axes, axes
from heedful._result import Result

if TYPE_CHECKING:
    from heedful.corpus.attention import CorpusAttention

__all__ = ["Cloze", "ClozeScore"]

GAP = re.compile(r"\[MASK\]|<mask>|_{2,}")
# A word that no text has, in the place of the gap.
MARK = "\0"


@dataclass(frozen=True)
class Cloze(Result):
    r"""Words for a gap, the best first, by

    $$\ln p(w) + \lambda \sum_{j} S_{|\delta|}[t_j, w]$$

    over the words $t_j$ around it, $\delta$ places away; p is the frequency, and the probabilities are a softmax of this over all
    words. They rank well and are too sure of themselves: words of a context are not independent.

    Attributes:
        words, probabilities: the best words.
        before, after: what stands around the gap.
    """

    words: tuple[str, ...]
    probabilities: tuple[float, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]

    def __str__(self) -> str:
        shown = [f"{' '.join(self.before)} ___ {' '.join(self.after)}".strip()]
        return "\n".join(
            [*shown, *(f"  {p:6.1%}  {word}" for word, p in zip(self.words, self.probabilities, strict=True))]
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Bars of probabilities, the best word on top."""
        ax = axes(ax)
        ax.barh(self.words[::-1], self.probabilities[::-1])
        ax.set(xlabel="probability", title=f"{' '.join(self.before)} ___ {' '.join(self.after)}".strip())
        return ax


@dataclass(frozen=True)
class ClozeScore(Result):
    """How well gaps are filled.

    Attributes:
        mrr: the mean of 1 / rank of the true word among all words.
        top_10: the share of gaps whose word is among the best ten.
        ranks: of each gap, from 1 on.
        chance: `mrr` of the order by frequency alone on the same gaps.
    """

    mrr: float
    top_10: float
    chance: float
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{len(self.ranks)} gaps: mean reciprocal rank {self.mrr:.3f} ({self.chance:.3f} by frequency alone), "
            f"{self.top_10:.1%} among the best ten"
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """The share of gaps whose word has at most a rank."""
        ax = axes(ax)
        ranks = np.sort(self.ranks)
        ax.step(ranks, np.arange(1, len(ranks) + 1) / len(ranks), where="post")
        ax.set(xscale="log", xlabel="rank of the true word", ylabel="share of gaps", ylim=(0, 1))
        return ax


def gap_logits(
    attention: CorpusAttention, before: np.ndarray, after: np.ndarray, strength: float, context: int
) -> np.ndarray:
    """Logits of all words `(V,)` for a gap between words, of which the nearest on either side are read; -1 is unknown."""
    logits = attention.log_frequencies_.copy()
    for distance, word in enumerate(before[::-1][:context], 1):
        if word >= 0:
            logits += strength * attention.towards(int(word), distance)
    for distance, word in enumerate(after[:context], 1):
        if word >= 0:
            logits += strength * attention.towards(int(word), -distance)
    return logits


def predict(
    attention: CorpusAttention,
    text: Any,
    position: int | None,
    *,
    top: int,
    strength: float,
    context: int | None,
) -> Cloze:
    """`CorpusAttention.predict_masked`."""
    check_whole(top=top)
    check_number(strength=strength)
    reach = _context(attention, context)
    if position is None:
        words, place = _gap(attention, text)
    else:
        if (
            GAP.search(text)
            if isinstance(text, str)
            else any(isinstance(word, str) and GAP.fullmatch(word) for word in text)
        ):
            raise InvalidArgument("the text has a gap, ___ or [MASK]; leave position out, or write the word")
        words = attention.tokens(text)
        if not is_whole(position) or not -len(words) <= position < len(words):
            raise InvalidArgument(
                f"position must be a whole number from {-len(words)} to {len(words) - 1}; got {position!r}"
            )
        place = position % len(words)
    before, after = words[:place], words[place + 1 :]
    logits = gap_logits(attention, attention.ids(before), attention.ids(after), strength, reach)
    best = np.argsort(-logits, kind="stable")[:top]
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    chosen = tuple(attention.vocabulary.words[at] for at in best)
    return Cloze(chosen, tuple(shares[best].tolist()), tuple(before), tuple(after))


def _gap(attention: CorpusAttention, text: Any) -> tuple[list[str], int]:
    """The words of a text with a gap, and the place of the gap among them."""
    if isinstance(text, str):
        parts = GAP.split(text)
        if len(parts) == 2:
            before, after = (attention.tokens(part) for part in parts)
            return [*before, MARK, *after], len(before)
        count = len(parts) - 1
    elif not isinstance(text, list | tuple):
        raise InvalidArgument(f"a text with a gap, or a list of words, is expected; got {type(text).__name__}")
    else:
        places = [at for at, word in enumerate(text) if isinstance(word, str) and GAP.fullmatch(word)]
        if len(places) == 1:
            before, after = (attention.tokens(part) for part in (text[: places[0]], text[places[0] + 1 :]))
            return [*before, MARK, *after], len(before)
        count = len(places)
    raise InvalidArgument(f"the text must have one gap, written ___ or [MASK], or give position; got {count} of them")


def _context(attention: CorpusAttention, context: int | None) -> int:
    if context is None:
        return attention.window or 5
    check_whole(context=context)
    return context


def score(
    attention: CorpusAttention,
    texts: Sequence[Any],
    *,
    context: int | None,
    strength: float,
    common: int,
    most: int,
    seed: int,
) -> ClozeScore:
    """`CorpusAttention.score`."""
    check_whole(0, common=common, seed=seed)
    check_whole(most=most)
    check_number(strength=strength)
    if isinstance(texts, str):
        raise InvalidArgument("texts must be a list of texts; give [text]")
    reach = _context(attention, context)
    places = gaps(attention, texts, common, most, seed)
    if not places:
        raise InvalidArgument(f"no word of these texts is known and rarer than the {common} most frequent ones")
    base = attention.log_frequencies_
    ranks, chance = [], []
    for ids, at in places:
        logits = gap_logits(attention, ids[:at], ids[at + 1 :], strength, reach)
        ranks.append(1 + int((logits > logits[ids[at]]).sum()))
        chance.append(1 / (1 + int((base > base[ids[at]]).sum())))
    inverse = 1 / np.array(ranks)
    top = float((np.array(ranks) <= 10).mean())
    return ClozeScore(float(inverse.mean()), top, float(np.mean(chance)), tuple(ranks))


def gaps(
    attention: CorpusAttention, texts: Sequence[Any], common: int, most: int, seed: int
) -> list[tuple[np.ndarray, int]]:
    """Places to ask for, drawn at random: the words of a text, and which of them is the gap."""
    rank = np.empty(attention.size, dtype=np.int64)
    rank[np.argsort(-attention.log_frequencies_, kind="stable")] = np.arange(attention.size)
    sequences = [attention.ids(text) for text in texts]
    places = [(ids, at) for ids in sequences for at in np.flatnonzero(ids >= 0).tolist() if rank[ids[at]] >= common]
    if len(places) > most:
        chosen = np.random.default_rng(seed).choice(len(places), most, replace=False)
        places = [places[at] for at in np.sort(chosen)]
    return places

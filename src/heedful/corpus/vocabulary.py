"""The words that are counted, each with its number and how often it occurs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from heedful._checks import check_whole
from heedful._errors import InvalidArgument
from heedful._savable import coded

__all__ = ["Vocabulary"]


@coded("vocabulary")
class Vocabulary:
    """Words in a fixed order; the number of a word is its place.

    `Vocabulary.of(counts)` orders by frequency, the most frequent first, equal ones alphabetically, so that the same text always
    gives the same numbers.

    Args:
        words: texts, each once.
        counts: how often each occurs; zeros where that is not known.

    >>> vocabulary = Vocabulary.of({"sand": 1, "sea": 4, "a": 1})
    >>> vocabulary.words
    ['sea', 'a', 'sand']
    >>> vocabulary.encode(["the", "sand"])
    array([-1,  2])
    """

    def __init__(self, words: Iterable[str], counts: Any = None) -> None:
        self.words = list(words)
        self.counts = np.zeros(len(self.words), np.int64) if counts is None else np.array(counts, dtype=np.int64)
        self._places = {word: place for place, word in enumerate(self.words)}
        if not all(isinstance(word, str) for word in self.words):
            odd = next(word for word in self.words if not isinstance(word, str))
            raise InvalidArgument(f"words must be texts; got {odd!r:.100}")
        if len(self._places) != len(self.words):
            twice = next(word for place, word in enumerate(self.words) if self._places[word] != place)
            raise InvalidArgument(f"a vocabulary holds every word once; {twice!r:.100} is there twice")
        if self.counts.shape != (len(self.words),):
            raise InvalidArgument(
                f"counts must have one number for each of {len(self.words)} words; got shape {self.counts.shape}"
            )

    @classmethod
    def of(cls, counts: Mapping[str, int], *, min_count: int = 1, max_size: int | None = None) -> Self:
        """The words that occur `min_count` times or more, at most the `max_size` most frequent of them."""
        check_whole(min_count=min_count)
        check_whole(optional=True, max_size=max_size)
        kept = sorted(((-count, word) for word, count in counts.items() if count >= min_count))[:max_size]
        return cls([word for _, word in kept], [-count for count, _ in kept])

    def index(self, word: str) -> int:
        """The number of a word; an error where it is unknown."""
        try:
            return self._places[word]
        except KeyError:
            raise InvalidArgument(f"{word!r:.100} is not among the {len(self)} words of the vocabulary") from None

    def encode(self, tokens: Iterable[str]) -> np.ndarray:
        """The numbers of words `(n,)`, -1 for those that are unknown."""
        find = self._places.get
        return np.array([find(token, -1) for token in tokens], dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The words of numbers."""
        return [self.words[place] for place in ids]

    def to_dict(self) -> dict[str, Any]:
        return {"words": self.words, "counts": self.counts.tolist()}

    @classmethod
    def from_dict(cls, description: dict[str, Sequence[Any]]) -> Self:
        return cls(description["words"], description["counts"])

    def __len__(self) -> int:
        return len(self.words)

    def __iter__(self) -> Iterator[str]:
        return iter(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._places

    def __eq__(self, other: object) -> bool:
        """Whether the words are the same in the same order; how often they occur does not count."""
        return self.words == other.words if isinstance(other, Vocabulary) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.words[:3]))
        return f"Vocabulary({len(self)} words: {shown}{', ...' if len(self) > 3 else ''})"

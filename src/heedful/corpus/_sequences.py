"""What users give as a sequence: a text, a list of words, numbers of words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful.corpus._documents import Tokens, kind_of
from heedful.corpus.projection import check_ids
from heedful.corpus.vocabulary import Vocabulary

Unknown = Literal["zero", "skip", "raise"]


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences as words of a vocabulary, and as their numbers."""

    vocabulary: Vocabulary
    tokenizer: Any
    unknown: Unknown

    def tokens(self, text: Any) -> list[str]:
        """The words of a text as they are counted, without unknown ones where these are left out."""
        words = self._split(text)
        return [word for word in words if word in self.vocabulary] if self.unknown == "skip" else words

    def _split(self, text: Any) -> list[str]:
        if kind_of(text) == "words":
            for word in text:
                if isinstance(word, str) and len(word.split()) > 1 and word not in self.vocabulary:
                    raise InvalidArgument(f"{word!r:.60} in a list of words is a text; give one text, or its words")
            return list(text)
        split = Tokens(self.tokenizer)
        tokens = split([text])[0]
        names = split.vocabulary
        return list(tokens) if names is None else [names[at] for at in tokens]

    def ids(self, sequence: Any) -> np.ndarray:
        """Numbers of words `(..., n)`, -1 for unknown ones: of a text, a list of words, or numbers as they are."""
        sequence = sequence.detach().cpu().numpy() if isinstance(sequence, Tensor) else sequence
        if isinstance(sequence, list | tuple) and sequence and isinstance(sequence[0], list | tuple):
            if len({len(part) if isinstance(part, list | tuple) else -1 for part in sequence}) > 1:
                raise InvalidArgument(
                    "sequences of a batch must have one length: fill them up with -1, and give padding"
                )
            sequence = np.asarray(sequence)
        if isinstance(sequence, np.ndarray) or kind_of(sequence) == "ids":
            return check_ids(sequence, len(self.vocabulary))
        words = self.tokens(sequence)
        numbers = self.vocabulary.encode(words)
        if self.unknown == "raise" and (numbers < 0).any():
            raise InvalidArgument(
                f"{words[int(np.argmin(numbers))]!r} is not in the vocabulary; unknown='skip' or 'zero' passes over it"
            )
        return numbers

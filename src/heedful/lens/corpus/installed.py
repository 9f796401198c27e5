"""Counts of a text's tokens in what is installed with every Python: its handbook, and the docstrings of its library."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from heedful._errors import InvalidArgument
from heedful._installed import SOURCE, installed_texts

WINDOW = 10


@dataclass(frozen=True, eq=False)
class SmallCounts:
    """Pairs of a few tokens within a window of a corpus, every distance by itself, dense: what one text needs.

    It has `association` and `encode` as counts of a whole vocabulary have them, and gives the same numbers.

    Attributes:
        names: the tokens.
        pairs: `(w, V, V)`, earlier tokens in rows.
        earlier, later: how often each token stands before, and behind, any other one at each distance, `(w, V)`.
        contexts: powers of these sums over all tokens of the corpus, `(w + 1, 3)`: for each distance and for all of them, of later tokens,
            earlier ones and both.
        tokens: how many tokens the corpus has.
        source: what it is.
    """

    names: tuple[str, ...]
    pairs: np.ndarray
    earlier: np.ndarray
    later: np.ndarray
    contexts: np.ndarray
    tokens: int
    source: str
    smoothing: float = 0.75

    @property
    def window(self) -> int:
        return len(self.pairs)

    @property
    def frequencies(self) -> np.ndarray:
        """How often each token stands beside another one, `(V,)`."""
        return np.asarray(self.earlier[0] + self.later[0])

    def encode(self, tokens: Sequence[str]) -> np.ndarray:
        """Numbers of tokens, -1 for those that were not counted."""
        places = {name: at for at, name in enumerate(self.names)}
        return np.array([places.get(token, -1) for token in tokens], dtype=np.int64)

    def association(self, distance: int | None = None, *, directed: bool = True) -> np.ndarray:
        """Positive PMI with smoothed contexts `(V, V)`: at one distance, or summed over all with weights 1 / distance."""
        weights = 1 / np.arange(1, self.window + 1) if distance is None else np.eye(self.window)[distance - 1]
        counts, rows, columns = (np.tensordot(weights, part, 1) for part in (self.pairs, self.earlier, self.later))
        if not directed:
            counts, rows = counts + counts.T, rows + columns
            columns = rows
        total = self.contexts[self.window if distance is None else distance - 1, 0 if directed else 2]
        with np.errstate(divide="ignore", invalid="ignore"):
            pmi = np.log(counts) - np.log(rows)[:, None] - np.log(columns**self.smoothing / total)
        return np.where(counts > 0, np.maximum(pmi, 0.0), 0.0)


def count(
    documents: Sequence[np.ndarray], wanted: np.ndarray, names: Sequence[str], source: str, window: int = WINDOW
) -> SmallCounts:
    """Counts of some tokens `wanted` in documents of token numbers; no pair crosses from one document to the next."""
    ids = np.concatenate(documents) if len(documents) else np.zeros(0, np.int64)
    home = np.repeat(np.arange(len(documents)), [len(part) for part in documents])
    size = 1 + int(max(ids.max(initial=-1), wanted.max(initial=-1)))
    place = np.full(size, -1)
    place[wanted] = np.arange(len(wanted))
    few = place[ids]
    v = len(wanted)
    pairs = np.zeros((window, v, v))
    sums = np.zeros((2, window, size))
    for distance in range(1, min(window, len(ids) - 1) + 1):
        same = home[:-distance] == home[distance:]
        first, second = ids[:-distance][same], ids[distance:][same]
        sums[0, distance - 1] = np.bincount(first, minlength=size)
        sums[1, distance - 1] = np.bincount(second, minlength=size)
        a, b = few[:-distance][same], few[distance:][same]
        both = (a >= 0) & (b >= 0)
        pairs[distance - 1] = np.bincount(a[both] * v + b[both], minlength=v * v).reshape(v, v)
    weights = 1 / np.arange(1, window + 1)
    each = np.concatenate([sums, np.einsum("w,swt->st", weights, sums)[:, None]], axis=1)  # [2, w + 1, size]
    powers = [(side**0.75).sum(-1) for side in (each[1], each[0], each[0] + each[1])]
    return SmallCounts(
        tuple(names), pairs, sums[0][:, wanted], sums[1][:, wanted], np.stack(powers, axis=1), len(ids), source
    )


# Documents of the last tokenizers, by what these are.
_SHELF: dict[str, list[np.ndarray]] = {}
KEPT = 2


def _documents(tokenizer: Any) -> list[np.ndarray]:
    """The texts as token numbers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = repr(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    name = hashlib.sha256(described.encode()).hexdigest()
    if name not in _SHELF:
        ids = tokenizer(list(installed_texts()), add_special_tokens=False, verbose=False)["input_ids"]
        while len(_SHELF) >= KEPT:
            _SHELF.pop(next(iter(_SHELF)))
        _SHELF[name] = [np.asarray(part, dtype=np.int64) for part in ids]
    return _SHELF[name]


def installed_counts(tokenizer: Any, tokens: Sequence[str], window: int = WINDOW) -> SmallCounts:
    """Counts of these tokens in texts that come with Python itself: its handbook, and the docstrings of its library.

    About 400,000 tokens of technical English. Nothing is downloaded, and no table is shipped. It suits a first look; for a
    statement about a model give counts of a corpus like the one it was trained on.

    Args:
        tokenizer: of Hugging Face, the model's.
        tokens: as it names them; special ones are left out.
        window: how far apart two tokens may be.
    """
    if not hasattr(tokenizer, "convert_tokens_to_ids"):
        raise InvalidArgument(f"tokenizer must be one of Hugging Face; got {type(tokenizer).__name__}")
    names = sorted(set(tokens) - set(tokenizer.all_special_tokens))
    wanted = np.array(tokenizer.convert_tokens_to_ids(names), dtype=np.int64)
    return count(_documents(tokenizer), wanted, names, SOURCE, window)

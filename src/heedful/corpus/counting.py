"""Who stands near whom: pairs of tokens within a window, counted exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch

from heedful._checks import check_choice, check_whole, is_whole
from heedful._errors import InvalidArgument
from heedful._progress import bar
from heedful._savable import Savable, decode, encode, entry_of
from heedful.corpus._documents import Shard, Tokens, documents, shard_of
from heedful.corpus._pairs import Tally, count_pairs, nothing, sparse, total, weights_of
from heedful.corpus.associations import Kind, association
from heedful.corpus.vocabulary import Vocabulary

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["Cooccurrence"]

Unknown = Literal["squeeze", "keep"]
WEIGHTINGS = ("inverse", "linear", "uniform", "exponential")
# Documents are read in batches of about so many characters.
BATCH = 2**22


class Cooccurrence(Savable):
    r"""Counts of pairs of tokens, by direction and, where wanted, by distance.

    $$C_\delta[a, b] = \#\{(s, t): t - s = \delta,\ \mathrm{token}_s = a,\ \mathrm{token}_t = b\}, \qquad
    C = \sum_{\delta = 1}^{w} \omega(\delta)\, C_\delta$$

    a is the earlier token, b the later one; no pair crosses from one document to the next. $S = C + C^T$ is the symmetric matrix, whose
    diagonal is twice that of C (GloVe, Pennington et al. 2014, section 4.2; Mehta 2025, arXiv 2511.13780, where S is the
    corpus matrix).

    What is added up are whole numbers: counts for each distance, or weights over a common denominator. So the result does not
    depend on the order or on how the corpus was cut: shards merged, `partial_fit` in pieces and several processes give
    the same float64 numbers, bit by bit.

    Args:
        window: w, how far apart two tokens may be.
        weighting: $\omega$. `"inverse"` $1/\delta$ (GloVe), `"linear"` $(w + 1 - \delta)/w$ (what the random windows of word2vec amount to),
            `"uniform"` 1, `"exponential"` $e^{-2\delta/w}$, or a function of $\delta$.
        vocabulary: which words count; by default those of the corpus, by frequency. A number V says that documents hold token numbers
            below V.
        max_vocabulary, min_count: of the corpus' words the most frequent ones, and those that occur so often.
        unknown: tokens outside the vocabulary are removed before distances are taken, `"squeeze"`, as GloVe and word2vec do; or
            `"keep"` their places, so that distances are true.
        per_distance: keep the counts of each distance apart, for `counts(distance=...)`.
        tokenizer: `"words"` (lower case, letters with apostrophes inside), a function from a text to a list of words, or a tokenizer of
            Hugging Face, whose vocabulary is then that of the counts.
        progress: shows a bar on standard error, at a terminal.

    Attributes:
        vocabulary_: a `Vocabulary`.
        word_counts_: how often each of its words occurs, `(V,)`.
        tokens_: tokens of the corpus, unknown ones among them.
        documents_: documents of the corpus.

    >>> counter = Cooccurrence(window=2, per_distance=True).fit(["a b a c"])
    >>> counter.vocabulary_.words
    ['a', 'b', 'c']
    >>> counter.counts().toarray()  # a b, b a, a c next to each other; a a and b c two apart
    array([[0.5, 1. , 1. ],
           [1. , 0. , 0.5],
           [0. , 0. , 0. ]])
    >>> counter.counts(distance=2).toarray()[0, 0]
    np.float64(1.0)
    """

    _kind = "counts"
    _needs = ("params", "fitted")

    def __init__(
        self,
        window: int = 10,
        weighting: str | Callable[[int], float] = "inverse",
        *,
        vocabulary: Vocabulary | int | None = None,
        max_vocabulary: int | None = None,
        min_count: int = 1,
        unknown: Unknown = "squeeze",
        per_distance: bool = False,
        tokenizer: Any = None,
        progress: bool = True,
    ) -> None:
        self.window = window
        self.weighting = weighting
        self.vocabulary = vocabulary
        self.max_vocabulary = max_vocabulary
        self.min_count = min_count
        self.unknown = unknown
        self.per_distance = per_distance
        self.tokenizer = tokenizer
        self.progress = progress
        self._check()
        self._clear()

    def _check(self) -> None:
        check_whole(window=self.window, min_count=self.min_count)
        check_whole(optional=True, max_vocabulary=self.max_vocabulary)
        check_choice(Unknown, unknown=self.unknown)
        if not callable(self.weighting):
            check_choice(WEIGHTINGS, weighting=self.weighting)
        self._weights = weights_of(self.weighting, self.window)
        for distance, weight in enumerate(self._weights.floats, 1):
            if not 0 <= weight < math.inf:
                raise InvalidArgument(f"weighting({distance}) must be a number from 0 on; got {weight}")
        self._tokens = Tokens(self.tokenizer)
        own = self.vocabulary
        if own is not None and not isinstance(own, Vocabulary):
            check_whole(vocabulary=own)
        if self._tokens.vocabulary is not None:
            if own is not None:
                raise InvalidArgument("a tokenizer of Hugging Face has its own vocabulary; leave vocabulary out")
            own = Vocabulary(self._tokens.vocabulary)
        if own is not None and (self.max_vocabulary is not None or self.min_count > 1):
            raise InvalidArgument(
                "min_count and max_vocabulary choose words of the corpus; with a vocabulary leave them out"
            )
        # Numbers are their own names.
        self._numbers = is_whole(own) or self._tokens.numbers
        self._settled: Vocabulary | None = Vocabulary(map(str, range(own))) if is_whole(own) else own  # type: ignore[assignment]

    def _clear(self) -> None:
        self._seen: dict[str, int] = {}
        self._shards: list[Shard] = []
        self._occurrences = np.zeros(0 if self._settled is None else len(self._settled), np.int64)
        self._tally = Tally()
        self._result: list[Any] | None = None
        self._final: Vocabulary | None = None
        self.tokens_ = 0
        self.documents_ = 0

    @property
    def _parts(self) -> tuple[int, ...] | None:
        """Whole weights, where distances need not be kept apart."""
        return None if self.per_distance else self._weights.parts

    def fit(self, corpus: Any, y: Any = None) -> Self:
        """Counts a corpus: a text file (a line is a document) or a folder of them, or an iterable of texts, lists of words or arrays of token numbers."""
        self._clear()
        self.partial_fit(corpus)
        if not len(self.vocabulary_):
            raise InvalidArgument(
                f"no word of the corpus occurs min_count={self.min_count} times or more; it has {self.tokens_} tokens"
            )
        self._counted()
        return self

    def partial_fit(self, documents: Any, y: Any = None) -> Self:
        """Adds documents to what was counted, as if they had been part of one corpus.

        Without a vocabulary of its own, the counter keeps the documents as numbers, four bytes for each token, because what comes
        later can make a word frequent enough to count. With one, it keeps counts alone.
        """
        for batch in self._batches(documents):
            self._take(shard_of(batch, self._tokens))
        return self

    def _batches(self, corpus: Any) -> Iterator[list[Any]]:
        whole = len(corpus) if hasattr(corpus, "__len__") and not isinstance(corpus, str) else 0
        with bar(wanted=self.progress) as say:
            batch: list[Any] = []
            size, done = 0, 0
            for document in documents(corpus):
                batch.append(document)
                size += len(document) + 8 if isinstance(document, str) else 6 * len(document) + 8
                if size >= BATCH:
                    yield batch
                    done += len(batch)
                    batch, size = [], 0
                    say(done, whole, f"documents, {self.tokens_:,} tokens")
            if batch:
                yield batch

    def _take(self, shard: Shard) -> None:
        """Counts a shard or, while the vocabulary is open, keeps it."""
        if self._numbers and shard.words is not None and len(shard.ids):
            raise InvalidArgument(
                "the vocabulary is of token numbers; give documents of numbers, or a Vocabulary of words"
            )
        if shard.words is None and self._settled is None and (self.max_vocabulary or self.min_count > 1):
            raise InvalidArgument(
                "min_count and max_vocabulary choose words; documents of token numbers take vocabulary=V"
            )
        self.tokens_ += len(shard.ids)
        self.documents_ += len(shard.lengths)
        self._result = self._final = None
        if self._settled is None:
            self._keep(shard)
        else:
            ids = self._ids(shard, self._settled)
            self._occurrences += np.bincount(ids[ids >= 0], minlength=len(self._settled))
            self._tally.add(self._pairs(ids, shard.lengths, len(self._settled)))

    def _ids(self, shard: Shard, vocabulary: Vocabulary) -> np.ndarray:
        """Numbers in a settled vocabulary."""
        if shard.words is not None:
            return vocabulary.encode(shard.words)[shard.ids] if len(shard.ids) else shard.ids
        self._check_range(shard.ids, len(vocabulary))
        return shard.ids

    def _check_range(self, ids: np.ndarray, size: int) -> None:
        if len(ids) and (ids.min() < -1 or ids.max() >= size):
            raise InvalidArgument(
                f"token numbers must be from 0 to {size - 1}, or -1 for unknown; got {ids.min()} to {ids.max()}"
            )

    def _keep(self, shard: Shard) -> None:
        if self._shards and (self._shards[0].words is None) != (shard.words is None) and len(shard.ids):
            raise InvalidArgument("some documents are words and others token numbers; give all of one kind")
        ids = shard.ids
        if shard.words is None:
            self._check_range(ids, 2**31)
            known = ids[ids >= 0]
        else:
            for word in shard.words:
                self._seen.setdefault(word, len(self._seen))
            known = ids = np.array([self._seen[word] for word in shard.words], dtype=np.int64)[ids] if len(ids) else ids
        counts = np.bincount(known, minlength=len(self._occurrences))
        counts[: len(self._occurrences)] += self._occurrences
        self._occurrences = counts
        self._shards.append(Shard(ids.astype(np.int32), shard.lengths, None if shard.words is None else []))

    def _pairs(self, ids: np.ndarray, lengths: np.ndarray, size: int) -> list[Any]:
        if self.unknown == "squeeze":
            kept = ids >= 0
            homes = np.repeat(np.arange(len(lengths)), lengths)[kept]
            ids, lengths = ids[kept], np.bincount(homes, minlength=len(lengths))
        return count_pairs(ids, lengths, size, self.window, self._parts)

    @property
    def vocabulary_(self) -> Vocabulary:
        """The words that are counted."""
        if self._final is None:
            if self._settled is not None:
                self._final = Vocabulary(self._settled.words, self._occurrences)
            elif not self._shards:
                raise InvalidArgument("nothing is counted yet; call fit(corpus) first")
            elif self._shards[0].words is None:
                self._final = Vocabulary(map(str, range(len(self._occurrences))), self._occurrences)
            else:
                counts = dict(zip(self._seen, self._occurrences.tolist(), strict=True))
                self._final = Vocabulary.of(counts, min_count=self.min_count, max_size=self.max_vocabulary)
        return self._final

    @property
    def word_counts_(self) -> np.ndarray:
        """How often each word of `vocabulary_` occurs, `(V,)`."""
        return self.vocabulary_.counts

    def _counted(self) -> list[Any]:
        """Whole numbers: one matrix of weights, or one of counts for each distance."""
        if self._result is None:
            vocabulary, tally = self.vocabulary_, self._tally
            if self._settled is None:
                tally = Tally()
                # Of numbers in the order of their appearance; the last one is for -1.
                numbers = np.append(vocabulary.encode(self._seen), -1)
                with bar(wanted=self.progress) as say:
                    for done, shard in enumerate(self._shards):
                        ids = shard.ids.astype(np.int64) if shard.words is None else numbers[shard.ids]
                        tally.add(self._pairs(ids, shard.lengths, len(vocabulary)))
                        say(done + 1, len(self._shards), "parts counted")
            size = self.window if self._parts is None else 1
            self._result = tally.total() or [nothing(len(vocabulary))] * size
        return self._result

    def counts(self, distance: int | None = None, *, directed: bool = True) -> csr_array:
        """A sparse matrix `(V, V)` in float64: rows earlier tokens, columns later ones.

        Args:
            distance: the plain counts of this distance, which needs `per_distance=True`; by default the weighted sum of all.
            directed: without it $C + C^T$, in which the order of two words is lost.
        """
        check_whole(1, self.window, optional=True, distance=distance)
        if distance is not None and not self.per_distance:
            raise InvalidArgument("counts of one distance are kept apart with Cooccurrence(per_distance=True) alone")
        matrices = self._counted()
        matrix = total(matrices, self._weights) if distance is None else matrices[distance - 1].astype(np.float64)
        return matrix if directed else (matrix + matrix.T).tocsr()

    def association(
        self, kind: Kind = "ppmi", distance: int | None = None, *, directed: bool = True, **options: Any
    ) -> csr_array:
        """Associations of the counts, `(V, V)`: `heedful.corpus.association(self.counts(distance, directed=directed), kind, **options)`."""
        return association(self.counts(distance, directed=directed), kind, **options)

    def merge(self, other: Cooccurrence) -> Self:
        """Adds what another counter with the same settings has counted, as if its documents had come here."""
        names = ("window", "weighting", "max_vocabulary", "min_count", "unknown", "per_distance")
        for name in names:
            if getattr(self, name) != getattr(other, name):
                raise InvalidArgument(
                    f"counters of one {name} can be merged; got {getattr(self, name)!r} and {getattr(other, name)!r}"
                )
        if (self._settled is None) != (other._settled is None) or self._settled != other._settled:
            raise InvalidArgument("counters of one vocabulary can be merged; give both the same vocabulary=...")
        if self._settled is None:
            words = list(other._seen)
            for shard in other._shards:
                self._take(Shard(shard.ids.astype(np.int64), shard.lengths, None if shard.words is None else words))
        else:
            self.tokens_ += other.tokens_
            self.documents_ += other.documents_
            self._occurrences = self._occurrences + other._occurrences
            self._tally.add(list(other._counted()))
            self._result = self._final = None
        return self

    def _described(self) -> dict[str, Any]:
        names = ("window", "unknown", "per_distance", "max_vocabulary", "min_count")
        weighting = "custom" if callable(self.weighting) else self.weighting
        params = {name: getattr(self, name) for name in names} | {"weighting": weighting}
        fitted = {
            "vocabulary": encode(self.vocabulary_),
            "weights": list(self._weights.floats),
            "numbers": self._numbers,
            "tokens": self.tokens_,
            "documents": self.documents_,
        }
        return entry_of(type(self)) | {"params": params, "fitted": fitted}

    def _tensors_saved(self) -> dict[str, torch.Tensor]:
        parts = {}
        for place, matrix in enumerate(self._counted()):
            for name in ("indptr", "indices", "data"):
                parts[f"{name}.{place}"] = torch.from_numpy(getattr(matrix, name))
        return parts

    @classmethod
    def _remade(cls, description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Self:
        params, fitted = description["params"], description["fitted"]
        floats = fitted["weights"]
        if params["weighting"] == "custom":
            params["weighting"] = _Table(tuple(floats))
        chosen = {name: params.pop(name) for name in ("max_vocabulary", "min_count")}
        counter = cls(**params, vocabulary=decode(fitted["vocabulary"]))
        for name, value in chosen.items():
            setattr(counter, name, value)
        counter._numbers, counter.tokens_, counter.documents_ = fitted["numbers"], fitted["tokens"], fitted["documents"]
        counter._occurrences = counter._settled.counts.copy()  # type: ignore[union-attr]
        size = len(counter._occurrences)
        matrices = []
        for place in range(len(tensors) // 3):
            indptr, indices, data = (tensors[f"{name}.{place}"].numpy() for name in ("indptr", "indices", "data"))
            matrices.append(sparse().csr_array((data, indices, indptr), shape=(size, size)))
        counter._tally.add(matrices)
        return counter

    def __repr__(self) -> str:
        held = f": {self.tokens_:,} tokens in {self.documents_:,} documents" if self.documents_ else ""
        return f"Cooccurrence(window={self.window}, weighting={self.weighting!r}{held})"


class _Table:
    """Weights that were a function when they were saved."""

    def __init__(self, weights: tuple[float, ...]) -> None:
        self.weights = weights

    def __call__(self, distance: int) -> float:
        return self.weights[distance - 1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Table) and other.weights == self.weights

    def __hash__(self) -> int:
        return hash(self.weights)

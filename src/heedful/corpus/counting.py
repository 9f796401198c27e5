"""Who stands near whom: pairs of tokens within a window, counted exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Literal, Self
from weakref import finalize

import numpy as np
import torch

from heedful._checks import check_choice, check_number, check_whole, is_whole
from heedful._errors import InvalidArgument
from heedful._progress import bar
from heedful._savable import Savable, decode, encode, entry_of
from heedful.corpus._documents import NotKept, Shard, Tokens, batches, described
from heedful.corpus._merging import check_same
from heedful.corpus._pairs import Table, arrays_of, matrices_of, total, weights_of
from heedful.corpus._store import Record, Store, digest_of, size_of
from heedful.corpus._thinning import chances
from heedful.corpus._work import Counted, Engine, Kept, Sums, Work, known, merged_counts, merged_words, spread
from heedful.corpus.associations import Kind, association
from heedful.corpus.vocabulary import Vocabulary

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["Cooccurrence"]

Unknown = Literal["squeeze", "keep"]
WEIGHTINGS = ("inverse", "linear", "uniform", "exponential")


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
        subsample: t; a word that makes up a share f of the corpus is left out at random, but for $\sqrt{t / f}$ of its places (Mikolov et al.
            2013, eq. 5), as `unknown` says of others. Which ones depends on `seed` and the document alone. None is left out by default.
        per_distance: keep the counts of each distance apart, for `counts(distance=...)`.
        tokenizer: `"words"` (lower case, letters with apostrophes inside), a function from a text to a list of words, or a tokenizer of
            Hugging Face, whose vocabulary is then that of the counts.
        max_memory: what counts may take, as `"1GB"`, or bytes; what is more goes to disk, into `folder` or a temporary one. The part of the
            corpus that is being read, some hundred MB, and the matrix that `counts` returns come on top.
        folder: where a count is kept that may be stopped, or killed, at any time: the same call on the same corpus goes on there,
            and gives the same numbers. The corpus lies in it as token numbers.
        n_jobs: how many processes read and count; -1 for one on each core.
        engine: `"numpy"`; `"numba"`, compiled, about twice as fast; `"auto"` takes numba where it is installed and the corpus is not small.
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
        subsample: float | None = None,
        seed: int = 0,
        per_distance: bool = False,
        tokenizer: Any = None,
        max_memory: int | str = "1GB",
        folder: str | Path | None = None,
        n_jobs: int = 1,
        engine: Engine = "auto",
        progress: bool = True,
    ) -> None:
        self.window = window
        self.weighting = weighting
        self.vocabulary = vocabulary
        self.max_vocabulary = max_vocabulary
        self.min_count = min_count
        self.unknown = unknown
        self.subsample = subsample
        self.seed = seed
        self.per_distance = per_distance
        self.tokenizer = tokenizer
        self.max_memory = max_memory
        self.folder = folder
        self.n_jobs = n_jobs
        self.engine = engine
        self.progress = progress
        self._check()
        self._clear()

    def _check(self) -> None:
        check_whole(window=self.window, min_count=self.min_count)
        check_whole(optional=True, max_vocabulary=self.max_vocabulary)
        check_choice(Unknown, unknown=self.unknown)
        check_number(0, optional=True, subsample=self.subsample)
        check_whole(0, seed=self.seed)
        check_choice(Engine, engine=self.engine)
        if self.n_jobs != -1:
            check_whole(n_jobs=self.n_jobs)
        self._budget = size_of(self.max_memory)
        if not callable(self.weighting):
            check_choice(WEIGHTINGS, weighting=self.weighting)
        self._weights = weights_of(self.weighting, self.window)
        tokens = Tokens(self.tokenizer)
        own = self.vocabulary
        if own is not None and not isinstance(own, Vocabulary):
            check_whole(vocabulary=own)
        if tokens.vocabulary is not None:
            if own is not None:
                raise InvalidArgument("a tokenizer of Hugging Face has its own vocabulary; leave vocabulary out")
            own = Vocabulary(tokens.vocabulary)
        if own is not None and (self.max_vocabulary is not None or self.min_count > 1):
            raise InvalidArgument(
                "min_count and max_vocabulary choose words of the corpus; with a vocabulary leave them out"
            )
        self._work = Work(
            tokens,
            self.window,
            None if self.per_distance else self._weights.parts,
            self.unknown,
            self.engine,
            numbers=is_whole(own) or tokens.numbers,
        )
        self._settled = own if own is None or isinstance(own, Vocabulary) else Vocabulary(map(str, range(own)))
        if self._settled is not None:
            if self.subsample is not None and not self._settled.counts.any():
                raise InvalidArgument(
                    "subsample needs to know how often words occur; give a Vocabulary with counts, or none"
                )
            self._work = self._thinning(known(self._work, self._settled), self._settled)

    def _thinning(self, work: Work, vocabulary: Vocabulary) -> Work:
        """The same work, with frequent words left out if that is wanted."""
        if self.subsample is None:
            return work
        return replace(work, chance=chances(vocabulary.counts, self.subsample), seed=self.seed)

    def _clear(self) -> None:
        self._store: Store | None = None
        # Sums that the folder had before.
        self._early = 0
        self._kept = Kept()
        self._place = 0
        self._occurrences = np.zeros(self._work.size, np.int64)
        self._sums: Sums | None = None
        self._result: list[Any] | None = None
        self._final: Vocabulary | None = None
        self.tokens_ = 0
        self.documents_ = 0

    def fit(self, corpus: Any, y: Any = None) -> Self:
        """Counts a corpus: a text file (a line is a document) or a folder of them, or an iterable of texts, lists of words or arrays of token numbers."""
        self._clear()
        with self._at_work():
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
        store = self._disk() if self.folder is not None else None
        self._result = self._final = None
        whole = len(documents) if hasattr(documents, "__len__") and not isinstance(documents, str) else 0
        records: list[Record] = []

        def new() -> Iterator[list[Any]]:
            """Parts of the corpus that the folder does not know; those that it knows are passed over."""
            sizes = [] if store is None else [record.documents for record in store.shards[self._place :]]
            for place, batch in enumerate(batches(documents, sizes)):
                if store is not None and place < len(sizes):
                    self._again(store, store.check(self._place, batch))
                else:
                    records.append(Record(len(batch), 0, "" if store is None else digest_of(batch)))
                    yield batch

        read: Callable[[list[Any]], Any] = self._work.read if self._settled is None else self._work.settle
        start = self.documents_
        with self._at_work(), bar(wanted=self.progress) as say:
            for place, part in enumerate(spread(read, new(), self.n_jobs)):
                self._take(part, records[place])
                say(self.documents_ - start, whole, f"documents, {self.tokens_:,} tokens")
            if self._sums is not None and store is not None:
                self._sums.spill(self._place)
        return self

    def _again(self, store: Store, record: Record) -> None:
        """Takes a part of the corpus from the folder."""
        if self._settled is None:
            self._kept.again(*store.shard(self._place, self._kept.seen))
        self._place += 1
        self.tokens_ += record.tokens
        self.documents_ += record.documents

    def _take(self, part: Shard | Counted, record: Record) -> None:
        """Adds counts or, while the vocabulary is open, keeps the part as numbers."""
        self._place += 1
        tokens = part.tokens if isinstance(part, Counted) else len(part.ids)
        record = replace(record, tokens=tokens)
        self.tokens_ += tokens
        self.documents_ += record.documents
        if isinstance(part, Counted):
            if self.folder is not None:
                self._disk().put_shard(record)
            self._counting().add(part.matrices, tokens, self._place, part.occurrences)
            self._occurrences = self._occurrences + part.occurrences
            return
        if part.words is None and (self.max_vocabulary or self.min_count > 1):
            raise InvalidArgument(
                "min_count and max_vocabulary choose words; documents of token numbers take vocabulary=V"
            )
        shard, new = self._kept.add(part)
        if self.folder is not None or 4 * self._kept.bytes > self._budget:
            self._keep_on_disk(shard, new, record)

    def _keep_on_disk(self, shard: Shard, new: list[str], record: Record) -> None:
        store, kept = self._disk(), self._kept.shards
        if self.folder is not None:
            store.put_shard(record, shard, new)
            kept[-1] = store.shard(len(kept) - 1)[0]
            return
        # Parts that were in memory so far; their words stay there.
        for place in range(len(store.shards), len(kept)):
            store.put_shard(record, kept[place])
            kept[place] = store.shard(place)[0]

    def _disk(self) -> Store:
        """The folder, or a temporary one that goes with the counter."""
        if self._store is None:
            place = self.folder
            if place is None:
                place = mkdtemp(prefix="heedful-counts-")
                finalize(self, rmtree, place, ignore_errors=True)
            self._store = Store(place, self._fingerprint())
            self._early = len(self._store.sums)
        return self._store

    def _at_work(self) -> AbstractContextManager[None]:
        """Keeps others out of the folder, where there is one, while it is written to."""
        return nullcontext() if self.folder is None else self._disk().at_work()

    def _fingerprint(self) -> dict[str, Any]:
        """The settings that decide counts, as JSON."""
        words = None if self._settled is None else digest_of(self._settled.words)
        plain = {
            name: getattr(self, name) for name in ("window", "unknown", "per_distance", "min_count", "max_vocabulary")
        }
        # Folders of counts without it do not name it.
        plain |= {} if self.subsample is None else {"subsample": self.subsample, "seed": self.seed}
        return plain | {
            "weights": list(self._weights.floats),
            "vocabulary": words,
            "tokenizer": described(self.tokenizer),
        }

    def _counting(self) -> Sums:
        """The sums for a vocabulary that was given; with those of the folder, if it has some."""
        if self._sums is None:
            self._sums = Sums(self._budget, self._disk, persistent=self.folder is not None)
        return self._sums

    def _check_place(self) -> None:
        """A folder may know of more documents than were given in this process."""
        if self.folder is not None and self._store is not None and self._place < len(self._store.shards):
            more = sum(record.documents for record in self._store.shards[self._place :])
            raise InvalidArgument(
                f"{self.folder} holds a count of {more:,} more documents than were given; give them too, or another folder"
            )
        if not self.documents_:
            raise InvalidArgument("nothing is counted yet; call fit(corpus) first")

    @property
    def vocabulary_(self) -> Vocabulary:
        """The words that are counted."""
        if self._final is None:
            self._check_place()
            if self._settled is not None:
                early = (self._disk().occurrences(place) for place in range(self._early))
                self._final = Vocabulary(self._settled.words, sum(early, self._occurrences))
            elif self._kept.numbers:
                names = map(str, range(len(self._kept.occurrences)))
                self._final = Vocabulary(names, self._kept.occurrences)
            else:
                self._final = self._chosen(dict(zip(self._kept.seen, self._kept.occurrences.tolist(), strict=True)))
        return self._final

    def _chosen(self, occurrences: dict[str, int]) -> Vocabulary:
        return Vocabulary.of(occurrences, min_count=self.min_count, max_size=self.max_vocabulary)

    @property
    def word_counts_(self) -> np.ndarray:
        """How often each word of `vocabulary_` occurs, `(V,)`."""
        return self.vocabulary_.counts

    def _counted(self) -> list[Any]:
        """Whole numbers: one matrix of weights, or one of counts for each distance."""
        if self._result is None:
            size = len(self.vocabulary_)
            with self._at_work():
                sums = self._counting() if self._settled is not None else self._count_kept(size)
                number = self.window if self._work.parts is None else 1
                self._result = sums.total(number, size, self._place)
        return self._result

    def _count_kept(self, size: int) -> Sums:
        """Counts the parts that were kept, now that the vocabulary is known; from where the folder says they are counted."""
        kept, store = self._kept, self._disk() if self.folder is not None else self._store
        if store is not None and (store.of != len(kept.shards) or self.folder is None):
            store.drop_sums()
        of = len(kept.shards)
        since = store.sums[-1] if store is not None and store.sums else 0
        sums = Sums(self._budget, self._disk, persistent=self.folder is not None, of=of)
        numbers = None if kept.numbers else self.vocabulary_.encode(kept.seen)
        ends: list[tuple[int, int]] = []

        def groups() -> Iterator[Any]:
            for upto, group in kept.groups(numbers, size, since, self._budget):
                ends.append((upto, len(group[0])))
                yield group

        work = self._thinning(self._work, self.vocabulary_)
        with bar(wanted=self.progress) as say:
            for place, matrices in enumerate(spread(work.count_group, groups(), self.n_jobs)):
                upto, tokens = ends[place]
                sums.add(matrices, tokens, upto)
                say(upto, of, "parts counted")
        return sums

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
        check_same(self, other)
        if self._settled is None:
            words = list(other._kept.seen)
            for shard in list(other._kept.shards):
                part = Shard(shard.ids.astype(np.int64), shard.lengths, None if shard.words is None else words)
                self._take(part, Record(len(shard.lengths), 0, ""))
        else:
            counted = Counted(other.tokens_, other.documents_, other.word_counts_, other._counted())
            self._take(counted, Record(other.documents_, 0, ""))
        self._result = self._final = None
        return self

    @classmethod
    def from_dask(cls, bag: Any, **options: Any) -> Self:
        """Counts the documents of a `dask.bag.Bag` where dask runs it: in threads, processes, or, while a `dask.distributed.Client` is open, on the machines of a cluster.

        The bag is computed twice, first for the vocabulary, unless one is given, then for pairs; sums of parts are added as in a
        tree. The counts are those of `fit` in one process, bit by bit, also where workers died meanwhile and dask did their part
        again. Results come to this process: its memory must hold the counts.

        Args:
            bag: of texts, lists of words or arrays of token numbers, as `dask.bag.read_text("corpus/*.txt")` gives.
            options: of the constructor, without `folder` and `n_jobs`, which dask decides.
        """
        counter = cls(**options)
        if counter.folder is not None or counter.n_jobs != 1:
            raise InvalidArgument("dask decides where work is done; leave folder and n_jobs out")
        if not hasattr(bag, "reduction") or not hasattr(bag, "npartitions"):
            raise InvalidArgument(f"a dask.bag.Bag is expected, as of dask.bag.read_text; got {type(bag).__name__}")
        if counter._settled is None:
            found = bag.reduction(counter._work.words_of, merged_words, split_every=8).compute()
            vocabulary: Any = len(found) if isinstance(found, np.ndarray) else counter._chosen(found)
            counter = cls._of(vocabulary, options)
        counted = bag.reduction(counter._work.settle_all, merged_counts, split_every=8).compute()
        counter._take(counted, Record(counted.documents, 0, ""))
        return counter

    @classmethod
    def _of(cls, vocabulary: Any, options: dict[str, Any]) -> Self:
        """A counter of a settled vocabulary, with settings by which it was chosen."""
        chosen = {name: value for name, value in options.items() if name in ("max_vocabulary", "min_count")}
        counter = cls(**{name: value for name, value in options.items() if name not in chosen}, vocabulary=vocabulary)
        for name, value in chosen.items():
            setattr(counter, name, value)
        return counter

    def _described(self) -> dict[str, Any]:
        names = ("window", "unknown", "subsample", "seed", "per_distance", "max_vocabulary", "min_count")
        weighting = "custom" if callable(self.weighting) else self.weighting
        params = {name: getattr(self, name) for name in names} | {"weighting": weighting}
        fitted = {
            "vocabulary": encode(self.vocabulary_),
            "weights": list(self._weights.floats),
            "numbers": self._work.numbers,
            "tokens": self.tokens_,
            "documents": self.documents_,
        }
        if described(self.tokenizer) != "words":
            fitted["tokenizer"] = described(self.tokenizer)
        return entry_of(type(self)) | {"params": params, "fitted": fitted}

    def _tensors_saved(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array) for name, array in arrays_of(self._counted()).items()}

    @classmethod
    def _remade(cls, description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Self:
        params, fitted = description["params"], description["fitted"]
        floats = fitted["weights"]
        if params["weighting"] == "custom":
            params["weighting"] = Table(tuple(floats))
        counter = cls._of(decode(fitted["vocabulary"]), params)
        counter._work = replace(counter._work, numbers=fitted["numbers"])
        matrices = matrices_of({name: tensor.numpy() for name, tensor in tensors.items()}, counter._work.size)
        assert counter._settled is not None
        part = Counted(fitted["tokens"], fitted["documents"], counter._settled.counts, matrices)
        counter._take(part, Record(part.documents, 0, ""))
        if "tokenizer" in fitted:
            counter._split_by(NotKept(fitted["tokenizer"]))
        return counter

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, tokenizer: Any = None) -> Self:
        """What `save_pretrained` wrote; a tokenizer of one's own is not in the folder, and is given again for texts."""
        counter = super().from_pretrained(folder)
        if tokenizer is not None:
            counter._split_by(tokenizer)
        return counter

    def _split_by(self, tokenizer: Any) -> None:
        tokens = Tokens(tokenizer)
        if tokens.vocabulary is not None and tokens.vocabulary != self.vocabulary_.words:
            raise InvalidArgument(
                "the tokenizer has another vocabulary than the counts; give the one they were made with"
            )
        self.tokenizer, self._work = tokenizer, replace(self._work, tokens=tokens)

    def __repr__(self) -> str:
        held = f": {self.tokens_:,} tokens in {self.documents_:,} documents" if self.documents_ else ""
        return f"Cooccurrence(window={self.window}, weighting={self.weighting!r}{held})"

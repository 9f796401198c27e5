"""What is done with a part of a corpus, in this process or another; numpy and scipy alone, for processes that start fast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np

from heedful._errors import InvalidArgument, MissingExtra, Unsupported
from heedful.corpus import _compiled, _pairs
from heedful.corpus._documents import Shard, Tokens, batches, shard_of
from heedful.corpus._store import Store
from heedful.corpus._thinning import thinned

Engine = Literal["auto", "numpy", "numba"]
# From so many tokens on it pays to wait for the compiler.
MANY = 2**18
# Parts of a corpus are counted together up to so many tokens; a process that is killed loses the work on a few of them.
GROUP = 2**22
EVERY = 2**23
# Bytes that pairs of one token take while they are counted, at most.
TOKEN = 250

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Counted:
    """Counts of a part of the corpus."""

    tokens: int
    documents: int
    occurrences: np.ndarray
    matrices: list[Any]


@dataclass(frozen=True)
class Work:
    """The settings that decide counts, and the words where they are known beforehand."""

    tokens: Tokens
    window: int
    parts: tuple[int, ...] | None
    unknown: str
    engine: Engine
    numbers: bool
    places: dict[str, int] | None = None
    size: int = 0
    # With which probability each word stays, where frequent ones are left out at random.
    chance: np.ndarray | None = None
    seed: int = 0

    def read(self, batch: list[Any]) -> Shard:
        """A part of the corpus as numbers."""
        shard = shard_of(batch, self.tokens)
        if self.numbers and shard.words is not None and len(shard.ids):
            raise InvalidArgument(
                "the vocabulary is of token numbers; give documents of numbers, or a Vocabulary of words"
            )
        return shard

    def settle(self, batch: list[Any]) -> Counted:
        """Counts of a part of the corpus, for words that are known."""
        assert self.places is not None
        shard = self.read(batch)
        ids = shard.ids
        if shard.words is None:
            check_range(ids, self.size)
        elif len(ids):
            ids = np.array([self.places.get(word, -1) for word in shard.words], dtype=np.int64)[ids]
        occurrences = np.bincount(ids[ids >= 0], minlength=self.size)
        return Counted(len(ids), len(shard.lengths), occurrences, self.count(ids, shard.lengths, self.size))

    def count(self, ids: np.ndarray, lengths: np.ndarray, size: int) -> list[Any]:
        """Pairs of numbers, -1 for unknown tokens, as whole numbers in sparse matrices."""
        if self.chance is not None:
            ids = thinned(ids, lengths, self.chance, self.seed)
        if self.unknown == "squeeze":
            known = ids >= 0
            homes = np.repeat(np.arange(len(lengths)), lengths)[known]
            ids, lengths = ids[known], np.bincount(homes, minlength=len(lengths))
        compiled = self.engine == "numba" or (self.engine == "auto" and len(ids) >= MANY and _compiled.is_there())
        count_pairs = _compiled.count_pairs if compiled else _pairs.count_pairs
        return count_pairs(ids, lengths, size, self.window, self.parts)

    def words_of(self, documents: Iterable[Any]) -> Any:
        """How often words occur: a dictionary, or an array where documents hold token numbers."""
        kept = Kept()
        for batch in batches(documents):
            kept.add(self.read(batch))
            kept.shards = kept.shards[-1:]
        return kept.occurrences if kept.numbers else dict(zip(kept.seen, kept.occurrences.tolist(), strict=True))

    def settle_all(self, documents: Iterable[Any]) -> Counted:
        """Counts of many documents, for words that are known."""
        return merged_counts(map(self.settle, batches(documents)), self)

    def count_group(self, group: tuple[np.ndarray, np.ndarray, int]) -> list[Any]:
        """As `count`, of one argument."""
        return self.count(*group)


def merged_words(parts: Iterable[Any]) -> Any:
    """The sum of what `words_of` gave."""
    total: Any = Counter()
    for part in parts:
        if isinstance(part, np.ndarray):
            total = part if not len(total) else _padded(total, part)
        elif len(part):
            total.update(part)
    return total


def _padded(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    return longer + np.pad(shorter, (0, len(longer) - len(shorter)))


def merged_counts(parts: Iterable[Counted], work: Work | None = None) -> Counted:
    """The sum of counts; of none, zeros for what the work asks."""
    tally, tokens, documents = _pairs.Tally(), 0, 0
    occurrences: Any = 0
    for part in parts:
        tally.add(list(part.matrices))
        tokens, documents = tokens + part.tokens, documents + part.documents
        occurrences = occurrences + part.occurrences
    matrices = tally.total()
    if matrices is None:
        assert work is not None
        number = work.window if work.parts is None else 1
        matrices, occurrences = [_pairs.nothing(work.size)] * number, np.zeros(work.size, np.int64)
    return Counted(tokens, documents, occurrences, matrices)


def check_range(ids: np.ndarray, size: int) -> None:
    """Refuses token numbers that are not below the size of the vocabulary."""
    if len(ids) and (ids.min() < -1 or ids.max() >= size):
        raise InvalidArgument(
            f"token numbers must be from 0 to {size - 1}, or -1 for unknown; got {ids.min()} to {ids.max()}"
        )


def spread(function: Callable[[Item], Outcome], items: Iterable[Item], n_jobs: int) -> Iterator[Outcome]:
    """Outcomes in the order of items, computed by so many processes; -1 stands for as many as there are cores."""
    if n_jobs == 1:
        yield from map(function, items)
        return
    try:
        from joblib import Parallel, delayed
    except ImportError:
        raise MissingExtra("joblib", "corpus") from None
    # Few parts wait for a process: they are in memory.
    pool = Parallel(n_jobs=n_jobs, return_as="generator", pre_dispatch="n_jobs", batch_size=1)
    try:
        yield from pool(delayed(function)(item) for item in items)
    except RuntimeError as error:
        if type(error).__name__ != "TerminatedWorkerError":
            raise
        raise Unsupported(
            "a process that counted was ended from outside, perhaps for memory; take n_jobs=1, or fewer, and max_memory"
        ) from None


class Kept:
    """Parts of a corpus as numbers, while it is not yet known which words count: four bytes for a token."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self.occurrences = np.zeros(0, np.int64)
        self.shards: list[Shard] = []

    @property
    def numbers(self) -> bool:
        """Whether documents hold token numbers, not words."""
        return any(shard.words is None for shard in self.shards)

    @property
    def bytes(self) -> int:
        """What parts take in memory."""
        return sum(shard.ids.nbytes for shard in self.shards if not isinstance(shard.ids, np.memmap))

    def add(self, shard: Shard) -> tuple[Shard, list[str]]:
        """Takes a part; returns it with numbers of the whole, and the words that are new."""
        if len(shard.ids) and any(len(s.ids) and (s.words is None) != (shard.words is None) for s in self.shards[-1:]):
            raise InvalidArgument("some documents are words and others token numbers; give all of one kind")
        ids, new = shard.ids, []
        if shard.words is None:
            check_range(ids, 2**31)
        else:
            new = [word for word in shard.words if word not in self.seen]
            self.seen.update(zip(new, range(len(self.seen), len(self.seen) + len(new)), strict=True))
            ids = np.array([self.seen[word] for word in shard.words], dtype=np.int64)[ids] if len(ids) else ids
        part = Shard(ids.astype(np.int32), shard.lengths, None if shard.words is None else [])
        self._include(part)
        return part, new

    def again(self, shard: Shard, new: list[str]) -> None:
        """Takes a part that was kept before."""
        self.seen.update(zip(new, range(len(self.seen), len(self.seen) + len(new)), strict=True))
        self._include(shard)

    def _include(self, shard: Shard) -> None:
        counts = np.bincount(shard.ids[shard.ids >= 0], minlength=max(len(self.occurrences), len(self.seen)))
        counts[: len(self.occurrences)] += self.occurrences
        self.occurrences = counts
        self.shards.append(shard)

    def groups(
        self, numbers: np.ndarray | None, size: int, since: int, budget: int
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Numbers and lengths of a few parts at a time, from one on, in a vocabulary of this size, and up to where."""
        most = min(GROUP, budget // TOKEN)
        waiting: list[Shard] = []
        for place in range(since, len(self.shards)):
            waiting.append(self.shards[place])
            if place + 1 == len(self.shards) or sum(len(shard.ids) for shard in waiting) >= most:
                ids = np.concatenate([shard.ids for shard in waiting])
                lengths = np.concatenate([shard.lengths for shard in waiting])
                yield place + 1, (ids if numbers is None else numbers[ids], lengths, size)
                waiting = []


class Sums:
    """Counts that are added up, in memory up to a limit, and on disk beyond it or where a store is to survive."""

    def __init__(self, budget: int, disk: Callable[[], Store], *, persistent: bool, of: int | None = None) -> None:
        self._tally = _pairs.Tally()
        self._budget, self._disk, self._persistent, self._of = budget, disk, persistent, of
        self._spilled = persistent and bool(disk().sums)
        self._tokens = 0
        self._occurrences: Any = 0

    def add(self, matrices: list[Any], tokens: int, upto: int, occurrences: Any = None) -> None:
        """Adds counts of parts up to one of them."""
        self._tally.add(matrices)
        self._tokens += tokens
        self._occurrences = None if occurrences is None else self._occurrences + occurrences
        # Two sums and what comes of them may be there at once.
        if 3 * self._tally.bytes > self._budget or (self._persistent and self._tokens >= EVERY):
            self.spill(upto)

    def spill(self, upto: int) -> None:
        """Writes what is in memory, where there is something."""
        matrices = self._tally.total()
        if matrices is not None:
            self._disk().put_sums(matrices, upto, self._of, self._occurrences)
            self._tally, self._tokens, self._spilled = _pairs.Tally(), 0, True
            self._occurrences = 0

    def total(self, number: int, size: int, upto: int) -> list[Any]:
        """The sums of all, one matrix of weights or one for each distance."""
        if self._spilled or self._persistent:
            self.spill(upto)
        if self._spilled:
            return self._disk().total(number, size)
        return self._tally.total() or [_pairs.nothing(size)] * number


def known(work: Work, words: Iterable[str]) -> Work:
    """The same work for words that are known."""
    places = {word: place for place, word in enumerate(words)}
    return replace(work, places=places, size=len(places))

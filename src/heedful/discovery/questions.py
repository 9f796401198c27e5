"""Questions put to an independence test in bounded blocks, recorded, within a budget."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heedful._checks import check_whole, is_whole
from heedful._errors import InvalidArgument
from heedful._progress import Progress, silent
from heedful.discovery.independence import Decisions, IndependenceTest
from heedful.discovery.record import TestLog

Sets = NDArray[np.int32]
Pair = tuple[int, int]

# Tests in one block: the arrays of a block stay within tens of MiB.
BLOCK = 1 << 15
# Pairs answered at once while edges are taken out one by one.
_PAIRS = 64


class OutOfBudget(Exception):
    """More tests would be executed than were allowed."""


class _Wanted(Exception):
    """There is something to test."""


class Separation(NamedTuple):
    """The set that separates a pair best, the members of all sets that do, and why it is the best."""

    sepset: tuple[int, ...]
    members: frozenset[int]
    rank: tuple[float, float] = (0.0, 0.0)


# What separates a pair that is independent given nothing.
NOTHING = Separation((), frozenset())


class Questions:
    """A test restricted to some nodes, with a record of what was executed and a limit on how much may be."""

    def __init__(
        self,
        test: IndependenceTest,
        nodes: Sequence[int] | None,
        max_cond_size: int | None,
        max_tests: int | None,
        progress: Progress | None,
    ) -> None:
        self.test = test
        self.nodes = np.array(check_nodes(test.n, nodes), np.int32)
        check_whole(0, optional=True, max_cond_size=max_cond_size, max_tests=max_tests)
        self.limit, self.max_size = max_tests, max_cond_size
        self.record = TestLog()
        self.untestable_pairs = 0
        self._probing = False
        self._progress = progress or silent

    @property
    def n(self) -> int:
        return len(self.nodes)

    @property
    def left(self) -> int:
        """How many more tests may be executed."""
        return 1 << 62 if self.limit is None else self.limit - self.record.count

    def would_ask(self, one: Callable[[int], None], size: int) -> bool:
        """Whether a pass has anything to test; nothing is."""
        self._probing = True
        try:
            one(size)
        except (_Wanted, OutOfBudget):
            return True
        finally:
            self._probing = False
        return False

    def counted(self, pairs: Sequence[Pair], done: int = 0, total: int | None = None) -> Iterator[Pair]:
        """The pairs, with progress: `done` of `total` lie before them."""
        for at, pair in enumerate(pairs, done):
            self._progress(at, total or len(pairs), "learning")
            yield pair
        self._progress(done + len(pairs), total or len(pairs), "learning")

    def first(self, pair: Pair, blocks: Iterable[Sets]) -> tuple[int, ...] | None:
        """The first of these sets that separates the pair; later ones do not count as executed."""
        x, y = pair
        for sets in _growing(blocks):
            if self._probing:
                raise _Wanted
            decisions = self._run(np.full(len(sets), x), np.full(len(sets), y), sets)
            hits = np.flatnonzero(decisions.independent)
            used = int(hits[0]) + 1 if len(hits) else len(sets)
            if used > self.left:
                raise OutOfBudget
            self.record.add(np.full(used, x), np.full(used, y), sets[:used], *(each[:used] for each in decisions))
            if len(hits):
                return tuple(sets[used - 1].tolist())
        return None

    def singles(
        self,
        pairs: Sequence[Pair],
        near: Callable[[Pair], NDArray[np.bool_]],
        remove: Callable[[Pair, tuple[int, ...]], None],
    ) -> None:
        """What `first` does pair by pair with the single nodes of `near(pair)`, answered for many pairs at once.

        `remove` may only take nodes out of what `near` gives; those are passed over when their turn comes.
        """
        for start in range(0, len(pairs), _PAIRS):
            block = pairs[start : start + _PAIRS]
            nodes = [np.flatnonzero(near(pair)) for pair in block]
            x, y = np.repeat(np.array(block), [len(each) for each in nodes], axis=0).T
            z = np.concatenate(nodes)[:, None]
            if self._probing and len(z):
                raise _Wanted
            decisions = self._run(x, y, z)
            executed = np.zeros(len(x), bool)
            at = 0
            for pair, each in zip(self.counted(block, start, len(pairs)), nodes, strict=True):
                rows = at + np.flatnonzero(near(pair)[each])
                hits = np.flatnonzero(decisions.independent[rows])
                if len(hits):
                    rows = rows[: hits[0] + 1]
                    remove(pair, (int(z[rows[-1], 0]),))
                executed[rows] = True
                at += len(each)
            if np.count_nonzero(executed) > self.left:
                raise OutOfBudget
            self.record.add(x[executed], y[executed], z[executed], *(each[executed] for each in decisions))

    def best(self, questions: Iterable[tuple[Pair, Iterable[Sets]]]) -> dict[Pair, Separation]:
        """For every pair that some set separates: the set with the largest p-value, and all members of such sets; in joint blocks.

        Neither depends on an order of the nodes, so learners that use them give the same graph however these are numbered.
        """
        chosen: dict[Pair, Separation] = {}
        waiting: list[tuple[Pair, Sets]] = []
        count = 0
        for pair, blocks in questions:
            for sets in blocks:
                if self._probing:
                    raise _Wanted
                waiting.append((pair, sets))
                count += len(sets)
                if count > self.left:
                    raise OutOfBudget
                if count >= BLOCK:
                    self._choose(waiting, chosen)
                    waiting, count = [], 0
        if waiting:
            self._choose(waiting, chosen)
        return chosen

    def marginal(self, pairs: Sequence[Pair]) -> list[Pair]:
        """The pairs that are independent given nothing."""
        if len(pairs) > self.left:
            raise OutOfBudget
        x, y = np.array(pairs, np.int32).reshape(-1, 2).T
        decisions = self._recorded(x, y, np.zeros((len(pairs), 0), np.int32))
        return [pairs[at] for at in np.flatnonzero(decisions.independent).tolist()]

    def separated(self, questions: Sequence[tuple[Pair, tuple[int, ...]]]) -> NDArray[np.bool_]:
        """Whether each set separates its pair; these do not count against the budget, being as few as they are."""
        apart = np.zeros(len(questions), bool)
        for size in sorted({len(sepset) for _, sepset in questions}):
            rows = [at for at, (_, sepset) in enumerate(questions) if len(sepset) == size]
            x, y = np.array([sorted(questions[at][0]) for at in rows]).T
            z = np.array([questions[at][1] for at in rows], np.int32).reshape(len(rows), size)
            apart[rows] = self._recorded(x, y, z).independent
        return apart

    def _choose(self, waiting: list[tuple[Pair, Sets]], chosen: dict[Pair, Separation]) -> None:
        pairs = np.array([pair for pair, _ in waiting])
        x, y = np.repeat(pairs, [len(sets) for _, sets in waiting], axis=0).T
        z = np.concatenate([sets for _, sets in waiting])
        decisions = self._recorded(x, y, z)
        hits = np.flatnonzero(decisions.independent)
        ranks = zip(decisions.log_p[hits].tolist(), (-np.abs(decisions.rho[hits])).tolist(), strict=True)
        for i, j, sepset, rank in zip(x[hits].tolist(), y[hits].tolist(), z[hits].tolist(), ranks, strict=True):
            members, best = frozenset(sepset), chosen.get((i, j))
            if best is None or rank > best.rank:
                chosen[i, j] = Separation(tuple(sepset), members | best.members if best else members, rank)
            elif not members <= best.members:
                chosen[i, j] = best._replace(members=members | best.members)

    def _run(self, x: Any, y: Any, z: Any) -> Decisions:
        return self.test.run(self.nodes[x], self.nodes[y], self.nodes[z])

    def _recorded(self, x: Any, y: Any, z: Any) -> Decisions:
        decisions = self._run(x, y, z)
        self.record.add(x, y, z, *decisions)
        return decisions

    def warn(self) -> None:
        """One warning if anything could not be tested."""
        if self.record.untestable or self.untestable_pairs:
            warnings.warn(
                f"{self.record.untestable + self.untestable_pairs} independence tests could not be decided (too few samples "
                f"for the size of the set, or variables that determine one another); their edges stay. See trust().",
                stacklevel=4,
            )


def _growing(blocks: Iterable[Sets]) -> Iterator[Sets]:
    """The same rows, a few at first: one of them may be all that is needed."""
    few = 256
    for block in blocks:
        at = 0
        while at < len(block):
            yield block[at : at + few]
            at, few = at + few, 4 * few


def subsets(pool: Sequence[int], size: int) -> Iterator[Sets]:
    """All subsets of a rising pool of this size in lexicographic order, in blocks of rows."""
    values = np.array(pool, np.int32)
    if math.comb(len(pool), size) <= BLOCK:
        table = _table(len(pool), size)
        if len(table):
            yield values[table]
        return
    every = combinations(pool, size)
    while block := list(islice(every, BLOCK)):
        yield np.array(block, np.int32)


@lru_cache(maxsize=32)
def _table(count: int, size: int) -> Sets:
    rows = list(combinations(range(count), size))
    return np.array(rows, np.int32).reshape(len(rows), size)


def check_nodes(n: int, nodes: Sequence[int] | None) -> list[int]:
    """The nodes asked for, checked; all by default."""
    if nodes is None:
        return list(range(n))
    wanted = whole_numbers(nodes)
    if wanted is None or len(set(wanted)) < len(wanted) or not set(wanted) <= {*range(n)}:
        raise InvalidArgument(
            f"nodes must be distinct whole numbers in 0 ... {n - 1}; got {' '.join(repr(nodes).split()):.80}"
        )
    return wanted


def whole_numbers(values: Any) -> list[int] | None:
    """The values as integers; None where they are no row of whole numbers.

    >>> whole_numbers(range(2)), whole_numbers([0.5, 1]), whole_numbers("01"), whole_numbers(5)
    ([0, 1], None, None, None)
    """
    try:
        numbers = list(values)
    except TypeError:
        return None
    return [int(value) for value in numbers] if all(map(is_whole, numbers)) else None

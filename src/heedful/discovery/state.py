"""A graph under construction: which edges are left, what separated the others, and the marks that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heedful._errors import InvalidArgument
from heedful.discovery.graph import PAG
from heedful.discovery.orientation import Oriented, open_marks, orient
from heedful.discovery.paths import Links
from heedful.discovery.questions import NOTHING, OutOfBudget, Pair, Questions, Separation, Sets, whole_numbers


class State:
    """Begins complete; learners take edges out pass by pass.

    Attributes:
        ask: the questions, with their record and budget.
        names, order: of the nodes; the order, causes first, if it is known.
        skeleton: `[n, n]` bool, the edges left.
        sepsets, members: what separated the pairs that have none, and the members of all sets that did.
        links: the present graph as bit sets.
        reach, stopped: how far the passes got, and why not farther.
    """

    def __init__(self, ask: Questions, names: Sequence[str] | None, order: Sequence[int | str] | None = None) -> None:
        self.ask = ask
        self.names = _names(names, ask)
        self.order = None if order is None else _permutation(order, self.names)
        self.rank = [0] * ask.n
        for place, node in enumerate(self.order or range(ask.n)):
            self.rank[node] = place
        self.skeleton = ~np.eye(ask.n, dtype=bool)
        self.sepsets: dict[Pair, tuple[int, ...]] = {}
        self.members: dict[Pair, frozenset[int]] = {}
        self.marks = open_marks(self.skeleton, self.order)
        self.conflicts = 0
        self.links = Links.of(self.marks)
        self.reach: int | None = None
        self.stopped = ""

    def pairs(self) -> list[Pair]:
        """The edges left, i < j, in the order of the nodes."""
        pairs = [(i, j) for i, j in np.argwhere(np.triu(self.skeleton)).tolist()]
        return pairs if self.order is None else sorted(pairs, key=lambda pair: sorted(self.rank[v] for v in pair))

    def remove(self, pair: Pair, sepset: tuple[int, ...]) -> None:
        """Takes an edge out at once."""
        i, j = pair
        self.skeleton[i, j] = self.skeleton[j, i] = False
        self.sepsets[pair], self.members[pair] = sepset, frozenset(sepset)
        self.links.cut(i, j)

    def remove_best(self, questions: Iterable[tuple[Pair, Iterable[Sets]]]) -> None:
        """Takes out, at the end, every pair that one of its sets separates."""
        self._remove_all(self.ask.best(questions))

    def _remove_all(self, separations: Mapping[Pair, Separation]) -> None:
        for pair, separation in separations.items():
            self.sepsets[pair], self.members[pair] = separation.sepset, separation.members
        if separations:
            i, j = np.array([*separations]).T
            self.skeleton[i, j] = self.skeleton[j, i] = False
            self._relink()

    def _relink(self) -> None:
        self.links = Links.of(np.where(self.skeleton, self.marks, 0).astype(np.int8))

    def beside(self, pair: Pair) -> NDArray[np.bool_]:
        """The nodes that share an edge with one of the pair; with an order, with its later one, and before it."""
        i, j = pair
        if self.order is None:
            near: NDArray[np.bool_] = self.skeleton[i] | self.skeleton[j]
        else:
            base = i if self.rank[i] > self.rank[j] else j
            near = self.skeleton[base] & (np.array(self.rank) < self.rank[base])
        near[[i, j]] = False
        return near

    def orient(self, **how: Any) -> None:
        """Resets the marks and applies the rules."""
        self.take(orient(open_marks(self.skeleton, self.order), self.members, **how))

    def take(self, oriented: Oriented) -> None:
        """Makes these the marks."""
        self.marks, self.conflicts = oriented.marks, len(oriented.conflicts)
        self.links = Links.of(self.marks)

    def passes(
        self,
        sizes: Iterable[int],
        one: Callable[[int], None],
        after: Callable[[], None] | None = None,
        gaps: bool = False,
    ) -> None:
        """Tests pairs given nothing for size 0, else runs `one(size)`, until a pass has nothing to test or something stops it.

        `after()` follows each pass; a pass cut short is undone; with `gaps` an empty pass is no end.
        """
        for size in sizes:
            left = int(self.skeleton.sum()) // 2
            if not left:
                return
            if self.ask.test.samples is not None and size >= self.ask.test.samples - 3:
                if self.ask.would_ask(one, size):
                    self.ask.untestable_pairs += left
                    what = f"{self.ask.test.samples} samples cannot test sets of {size} or more variables"
                    self._stop(size, f"{what}; {left} pairs stay adjacent without such tests.")
                return
            if self.ask.max_size is not None and size > self.ask.max_size:
                self.reach = self.ask.max_size if self.ask.would_ask(one, size) else self.reach
                return
            skeleton, mark = self.skeleton.copy(), self.ask.record.mark()
            kept = dict(self.sepsets), dict(self.members)
            try:
                if size == 0:
                    self._remove_all(dict.fromkeys(self.ask.marginal(self.pairs()), NOTHING))
                else:
                    one(size)
            except OutOfBudget:
                self.ask.record.back_to(mark)
                self.skeleton, (self.sepsets, self.members) = skeleton, kept
                self._relink()
                why = f"with them more than {self.ask.limit} tests would be needed"
                self._stop(size, f"Stopped before sets of {size} variables: {why}.")
                return
            if after is not None:
                after()
            tested = self.ask.record.count - mark[1]
            if not tested and not gaps:
                return
            if tested and tested == self.ask.record.untestable - mark[2]:
                why = "they determine one another"
                self._stop(size, f"No set of {size} or more variables could be tested: {why}.")
                return

    def _stop(self, size: int, why: str) -> None:
        self.reach, self.stopped = size - 1, why

    def result(self, learner: str, selection_bias: bool = False) -> PAG:
        self.ask.warn()
        return PAG(
            marks=self.marks,
            names=self.names,
            sepsets=self.sepsets,
            tests=self.ask.record.tests(),
            conflicts=self.conflicts,
            untestable=self.ask.record.untestable + self.ask.untestable_pairs,
            selection_bias=selection_bias,
            order=self.order,
            learner=learner,
            alpha=self.ask.test.alpha,
            samples=self.ask.test.samples,
            reach=self.reach,
            stopped=self.stopped,
        )


def _names(names: Sequence[str] | None, ask: Questions) -> tuple[str, ...]:
    if names is None:
        return tuple(f"x{v}" for v in ask.nodes.tolist())
    strings = tuple(str(name) for name in names)
    if len(strings) != ask.n:
        raise InvalidArgument(f"{ask.n} nodes need as many names; got {len(strings)}")
    twice = sorted({name for name in strings if strings.count(name) > 1})
    if twice:
        raise InvalidArgument(f"names must differ from one another; {', '.join(twice[:3])} stands more than once")
    return strings


def _permutation(order: Sequence[int | str], names: Sequence[str]) -> tuple[int, ...]:
    """The order as numbers of nodes; it may be given by their names."""
    place = {name: at for at, name in enumerate(names)}
    try:
        entries = [] if isinstance(order, str) else list(order)
    except TypeError:
        entries = []
    nodes = whole_numbers([place.get(node, node) if isinstance(node, str) else node for node in entries])
    if nodes is None or sorted(nodes) != list(range(len(names))):
        raise InvalidArgument(
            f"order must hold each of the {len(names)} nodes once, causes first: a permutation of 0 ... {len(names) - 1}, or of their "
            f"names; got {' '.join(repr(order).split()):.80}"
        )
    return tuple(nodes)

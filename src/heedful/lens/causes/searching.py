"""The search for the smallest set of words without which a model answers otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from heedful._errors import CorruptModel, InvalidArgument
from heedful._progress import Progress, silent
from heedful.discovery.graph import PAG
from heedful.discovery.paths import Links, mask_of
from heedful.lens.causes.questions import Task

Units = tuple[int, ...]

# Sets of one size that are ordered at once, and those among them whose effect is foretold from smaller sets.
MOST_SETS, FORETOLD = 50_000, 5_000
# Sets of one size that are tried whatever is foretold of them.
ANYHOW = 16
# The first questions of a size are asked few at a time: the best of them mostly settles it.
CHUNKS = (1, 2, 4, 8, 16)


class Reply(NamedTuple):
    """What a model answers without some units: by how much its first answer still leads, which leads, and a number to compare.

    The margin is the answer's score less the best of the others; for an answer that was ranked r-th, less the r-th best of
    the others. Below zero the answer has lost its rank. The number is the answer's probability; of an embedding, its cosine with
    that of the whole text. The rank is that of the answer, 1 for the model's own.
    """

    margin: float
    winner: int
    score: float
    rank: int

    @property
    def flipped(self) -> bool:
        return self.margin < 0


class Replies:
    """Every set that a model was asked about, each once, whoever asks."""

    def __init__(self, task: Task, answer: object = None, batch_size: int = 32) -> None:
        self._task, self._batch = task, batch_size
        scores = self._scores([()])[0]
        self.answer = int(scores.argmax()) if answer is None else task.column(answer)
        own = scores[self.answer]
        self.rank = int((scores > own).sum())
        usable = int(scores.isfinite().sum())
        if self.rank >= usable - 1:
            raise InvalidArgument(
                f"{task.name(self.answer)!r} ranks last of {usable} answers, so that nothing can push it down; the model's own "
                f"answer is {task.name(int(scores.argmax()))!r}: explain that one"
            )
        self._known: dict[Units, Reply] = {}

    def __call__(self, sets: Iterable[Units]) -> list[Reply]:
        sets = [tuple(sorted(one)) for one in sets]
        new = [one for one in dict.fromkeys(sets) if one not in self._known]
        for start in range(0, len(new), self._batch):
            part = new[start : start + self._batch]
            self._known |= zip(part, self.replies(part), strict=True)
        return [self._known[one] for one in sets]

    def replies(self, sets: Sequence[Units]) -> list[Reply]:
        """Asks anew, whatever is known."""
        scores = self._scores(sets)
        own, winners = scores[:, self.answer], scores.argmax(-1)
        odds = own if self._task.kind == "embedding" else scores.softmax(-1)[:, self.answer]
        others = scores.index_fill(-1, torch.tensor([self.answer]), -math.inf)
        rival = others.topk(self.rank + 1, dim=-1).values[:, -1]
        ranks = (scores > own[:, None]).sum(-1) + 1
        columns = (own - rival, winners, odds, ranks)
        return [Reply(*one) for one in zip(*(column.tolist() for column in columns), strict=True)]

    def _scores(self, sets: Sequence[Units]) -> torch.Tensor:
        scores = self._task.scores(sets)
        if bool(scores.isnan().any()) or not bool(scores.isfinite().any()):
            raise CorruptModel("the model answers with numbers that are not finite; its weights are damaged")
        return scores

    def inquiry(self, limit: int | None = None, units: Sequence[int] | None = None) -> Inquiry:
        """One method's questions about some of the units, counted apart from those of the others."""
        return Inquiry(self, limit, units)


class Inquiry:
    """Counts the different sets that one method asks about, as if it were alone; members are places in `units`."""

    def __init__(self, replies: Replies, limit: int | None = None, units: Sequence[int] | None = None) -> None:
        self._replies, self._limit, self._units = replies, limit, units
        self.tried: dict[Units, Reply] = {}

    @property
    def calls(self) -> int:
        """Different inputs; the whole one is known to every method."""
        return len(self.tried) - (() in self.tried)

    @property
    def left(self) -> float:
        return math.inf if self._limit is None else max(0, self._limit - self.calls)

    def __call__(self, sets: Sequence[Units]) -> list[Reply]:
        sets = [tuple(sorted(one)) for one in sets]
        units = self._units
        replies = self._replies(sets if units is None else [tuple(units[at] for at in one) for one in sets])
        self.tried |= zip(sets, replies, strict=True)
        return replies


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        units: the set with the largest effect among the smallest that were found; empty where none was.
        all_units: every set of that size that was found, by falling effect.
        head: the place of the graph that proposed the set; None where it was no graph's.
        calls: different inputs that were asked about until the first set was found and pruned; the rest of the calls looked for others.
        exhausted: whether the search ended because its calls did.
        full: whether it ended because as many sets were found as were asked for.
    """

    units: Units
    all_units: tuple[Units, ...]
    head: int | None
    calls: int
    exhausted: bool
    full: bool


def search(
    ask: Inquiry,
    pags: Sequence[PAG],
    target: int,
    nodes: Sequence[int],
    attention: Sequence[float] | None = None,
    *,
    max_size: int = 5,
    radius: int | None = None,
    order: str = "effect",
    slack: float = 0.8,
    patience: int = 256,
    prune: bool = True,
    max_sets: int = 1,
    last: int | None = None,
    progress: Progress | None = None,
) -> Found:
    """The smallest sets whose removal changes the answer, by size, over the graphs of all heads together.

    A set is proposed by a graph where each of its members is reached from the target by a possible-d-sep path through members
    alone (Rohekar et al. 2023, section 4). Ours differs in three ways, each to ask the model less. All heads share what was asked.
    Sets of one size are ordered by the effect that smaller ones foretell: that of the set less one member, plus that member's own,
    averaged over what is known; those that no graph connects come after those that one does, since attention may miss a tie. A
    set behind the first 16 is left out if less than `slack` of the margin is foretold, and all behind the first `patience` are. And a set that was
    found is pruned, since being connected may have brought in a passenger. `order="depth"` is the paper's: by the sum of depths,
    then by how strongly the members depend on the target, and none left out. Of more than 50,000 sets of one size either takes those
    of the units that do most by themselves. Pruning may ask a few questions beyond the bound on calls. After the first set the search goes on
    through the sets of its size until it has found `max_sets` of them; single units are all tried, but for `order="depth"`.

    Args:
        ask: what the model answers, counted.
        pags: one for each head.
        target: the node of the answer.
        nodes: the node of each unit.
        attention: the weight that the target gives each unit, by which single units are ordered; by dependence without it.
        last: the unit without which another question is asked, as the last word is of a text that goes on. Sets with it change the
            answer, but do not end the search: larger ones without it are tried, and it counts where none of these does.
    """
    graphs = [_Graph(pag, target, nodes, radius) for pag in pags]
    count = len(nodes)
    margin = ask([()])[0].margin
    # What single units do, and what every set that was tried does.
    drop, known = np.zeros(count), dict[Units, float]()
    ending: Found | None = None
    for size, chosen in _turns(count, max_size, drop, last):
        if ending is not None and (chosen == last).any():
            continue
        if order == "depth":
            proposed = _by_depth(chosen, graphs)
        elif size == 1:
            nearest = sorted(range(count), key=lambda unit: _nearness(unit, graphs, attention))
            proposed = ((unit,) for unit in nearest)
        else:
            proposed = islice(_by_effect(chosen, _foretold(chosen, drop, known), slack * margin, graphs), patience)
        hits: list[Units] = []
        calls, full = 0, False
        for part in _chunks(proposed, ask):
            for one, reply in zip(part, ask(part), strict=True):
                known[one] = margin - reply.margin
                if size == 1:
                    drop[one[0]] = known[one]
                if reply.flipped:
                    hits.append(one)
            (progress or silent)(size, max_size, "searching")
            if hits and not calls:
                if prune:
                    pruned(ask, min(hits, key=lambda one: (-known[one], one)))
                calls = ask.calls
            full = len(hits) >= max_sets and (size > 1 or order == "depth")
            if full:
                break
        if hits:
            own = [one for one in hits if last not in one]
            every = _smallest(ask, own or hits, prune)
            outcome = Found(every[0], every, _proposing(every[0], graphs), calls, ask.left <= 0, full)
            if last not in every[0]:
                return outcome
            ending = ending or outcome
    return replace(ending or Found((), (), None, ask.calls, False, False), exhausted=ask.left <= 0)


def _turns(
    count: int, max_size: int, drop: NDArray[np.float64], last: int | None
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The sets to try, by size: single units together, of larger sets those with the last unit behind the others."""
    for size in range(1, min(max_size, count) + 1):
        every = _sets(count, size, drop)
        held = (every == (-1 if last is None else last)).any(-1) & (size > 1)
        if not held.all():
            yield size, every[~held]
        if held.any():
            yield size, every[held]


def _smallest(ask: Inquiry, hits: Sequence[Units], prune: bool) -> tuple[Units, ...]:
    """The sets without members that they do not need; of these the smallest, by falling effect."""
    hits = sorted(hits, key=lambda one: (ask.tried[one].margin, one))
    needed = {pruned(ask, one) if prune and (at == 0 or ask.left > 0) else one for at, one in enumerate(hits)}
    least = [one for one in needed if len(one) == min(map(len, needed))]
    return tuple(sorted(least, key=lambda one: (ask.tried[one].score, ask.tried[one].margin, one)))


def exhaustive(ask: Inquiry, count: int, max_size: int = 5, batch: int = 32) -> Units:
    """The first smallest set that changes the answer among all sets; empty where there is none. The lower bound of any search."""
    for size in range(1, min(max_size, count) + 1):
        every = combinations(range(count), size)
        while part := list(islice(every, int(min(batch, ask.left)))):
            for one, reply in zip(part, ask(part), strict=True):
                if reply.flipped:
                    return one
    return ()


def pruned(ask: Inquiry, units: Units) -> Units:
    """The set without members that it does not need: no one of them can be left in and the answer still change.

    Of several that could go, the one goes without which the answer loses most.
    """
    units = tuple(sorted(units))
    while len(units) > 1:
        smaller = [units[:at] + units[at + 1 :] for at in range(len(units))]
        margin, best = min((reply.margin, one) for one, reply in zip(smaller, ask(smaller), strict=True))
        if margin >= 0:
            break
        units = best
    return units


class _Graph:
    """One head's graph, asked how a set of units hangs together around the target."""

    def __init__(self, pag: PAG, target: int, nodes: Sequence[int], radius: int | None) -> None:
        self._links, self._root, self._nodes = Links.of(pag.marks), target, list(nodes)
        tree = pag.dsep_tree(target, radius)
        # A unit may be where the answer is read.
        self.depth = [0 if node == target else tree.depth.get(node) for node in nodes]
        self._within = mask_of(node for node in nodes if node in tree.depth)
        # The weakest dependence that a test found between a unit and the target.
        weakest = np.full(pag.n, -np.inf)
        tests = pag.tests
        for ends, others in ((tests.x, tests.y), (tests.y, tests.x)):
            np.maximum.at(weakest, others[ends == target], tests.log_p[ends == target])
        self.log_p = [float(weakest[node]) for node in nodes]

    def connects(self, units: Sequence[int]) -> bool:
        if any(self.depth[unit] is None for unit in units):
            return False
        mask = mask_of(self._nodes[unit] for unit in units if self._nodes[unit] != self._root)
        return mask & ~self._links.reached_through(self._root, mask, self._within) == 0

    def depth_of(self, units: Sequence[int]) -> int:
        """The sum of the members' depths."""
        return sum(self.depth[unit] or 0 for unit in units)


def _proposing(units: Sequence[int], graphs: Sequence[_Graph]) -> int | None:
    """The graph that connects the set with the least depth; None where none does."""
    able = [at for at, graph in enumerate(graphs) if graph.connects(units)]
    return min(able, key=lambda at: graphs[at].depth_of(units), default=None)


def _nearness(unit: int, graphs: Sequence[_Graph], attention: Sequence[float] | None) -> tuple[float, ...]:
    """What comes first among single units: those that some graph connects, then by attention or dependence on the target."""
    depth = min((graph.depth_of((unit,)) for graph in graphs if graph.connects((unit,))), default=math.inf)
    if attention is not None:
        return float(math.isinf(depth)), -attention[unit], unit
    return depth, sum(max(graph.log_p[unit], -1e6) for graph in graphs), unit


def _sets(count: int, size: int, drop: NDArray[np.float64]) -> NDArray[np.int64]:
    """Sets of this size; where there are too many, of those units alone that do most by themselves."""
    taken = count
    while taken > size and math.comb(taken, size) > MOST_SETS:
        taken -= 1
    units = np.sort(np.argsort(-drop, kind="stable")[:taken])
    return np.array(list(combinations(units.tolist(), size)), dtype=np.int64)


def _foretold(sets: NDArray[np.int64], drop: NDArray[np.float64], known: dict[Units, float]) -> NDArray[np.float64]:
    """How far the margin should fall without each set."""
    effects = drop[sets].sum(-1)
    if sets.shape[1] < 3:
        return effects
    for at in np.argsort(-effects, kind="stable")[:FORETOLD].tolist():
        one = tuple(sets[at].tolist())
        parts = [(one[:i] + one[i + 1 :], one[i]) for i in range(len(one))]
        sums = [known[rest] + drop[member] for rest, member in parts if rest in known]
        if sums:
            effects[at] = sum(sums) / len(sums)
    return effects


def _by_effect(
    sets: NDArray[np.int64], foretold: NDArray[np.float64], least: float, graphs: Sequence[_Graph]
) -> Iterator[Units]:
    """Largest effect first; sets that no graph connects after all that one does."""
    best = np.argsort(-foretold, kind="stable")
    best = best[: min(max(ANYHOW, int((foretold >= least).sum())), FORETOLD)]
    later: list[Units] = []
    for one in map(tuple, sets[best].tolist()):
        if any(graph.connects(one) for graph in graphs):
            yield one
        else:
            later.append(one)
    yield from later


def _by_depth(sets: NDArray[np.int64], graphs: Sequence[_Graph]) -> Iterator[Units]:
    """The paper's order: nearest first, then those that depend most on the target."""
    keyed = []
    for one in map(tuple, sets.tolist()):
        able = [graph for graph in graphs if graph.connects(one)]
        if able:
            keyed.append((min((graph.depth_of(one), sum(graph.log_p[unit] for unit in one)) for graph in able), one))
    return (one for _, one in sorted(keyed))


def _chunks(sets: Iterator[Units], ask: Inquiry) -> Iterator[list[Units]]:
    """Few at first, then more; no more than may still be asked."""
    sizes = iter(CHUNKS)
    while part := list(islice(sets, int(min(next(sizes, 32), ask.left)))):
        yield part

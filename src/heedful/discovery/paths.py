"""Paths in a graph with marks: possible-d-sep, possible ancestors, uncovered paths. Node sets are bits of Python integers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NONE, CIRCLE, ARROW, TAIL = 0, 1, 2, 3
Marks = NDArray[np.int8]
Pair = tuple[int, int]
Before = dict[Pair, Pair | None]

# Steps of a search for a path without repeated nodes, after the walk has been shown to exist.
_STEPS = 20_000


def bits(mask: int) -> list[int]:
    """The nodes of a set, rising."""
    nodes = []
    while mask:
        low = mask & -mask
        nodes.append(low.bit_length() - 1)
        mask ^= low
    return nodes


def mask_of(nodes: Iterable[int]) -> int:
    mask = 0
    for node in nodes:
        mask |= 1 << int(node)
    return mask


def mask_rows(matrix: NDArray[np.bool_]) -> list[int]:
    """Each row as a set of columns."""
    padded = np.zeros((len(matrix), -(-matrix.shape[1] // 64) * 64), bool)
    padded[:, : matrix.shape[1]] = matrix
    words = np.packbits(padded, axis=1, bitorder="little").view("<u8").T.tolist()
    rows = words[0] if words else [0] * len(matrix)
    for at, column in enumerate(words[1:], 1):
        rows = [row | word << 64 * at for row, word in zip(rows, column, strict=True)]
    return rows


@dataclass
class Links:
    """A graph as bit sets: neighbours, neighbours with an arrowhead here, and the two ends of possibly directed edges.

    `into[v]` holds every u with `u *-> v`; `steps[u]` every v, and `back[v]` every u, such that the edge from u to v can lie on
    a possibly directed path: neither an arrowhead at u nor a tail at v.
    """

    adjacent: list[int]
    into: list[int]
    steps: list[int]
    back: list[int]

    @classmethod
    def of(cls, marks: Marks) -> Links:
        step = (marks != NONE) & (marks != TAIL) & (marks.T != ARROW)
        return cls(mask_rows(marks != NONE), mask_rows((marks == ARROW).T), mask_rows(step), mask_rows(step.T))

    @property
    def n(self) -> int:
        return len(self.adjacent)

    def copy(self) -> Links:
        return Links(*(list(table) for table in (self.adjacent, self.into, self.steps, self.back)))

    def cut(self, i: int, j: int) -> None:
        """Removes the edge between i and j."""
        for table in (self.adjacent, self.into, self.steps, self.back):
            table[i] &= ~(1 << j)
            table[j] &= ~(1 << i)

    def possible_ancestors(self, targets: int) -> int:
        """Every node with a possibly directed path into one of `targets`, these included."""
        seen = new = targets
        while new:
            reached = 0
            for v in bits(new):
                reached |= self.back[v]
            new = reached & ~seen
            seen |= new
        return seen

    def dsep_tree(self, root: int, radius: int | None = None) -> DsepTree:
        """Shortest paths from `root` on which every inner node is a collider or the middle of a triangle.

        The search goes over directed pairs (u, v): which nodes may follow v depends on where v was entered from. It finds walks;
        where the shortest walk to a node passes another one twice, a path is looked for on its own.
        """

        def onward(u: int, v: int) -> int:
            return self.follow(u, v) & ~(1 << root)

        depth: dict[int, int] = {}
        parents: dict[int, list[int]] = {}
        starts = [(root, v) for v in bits(self.adjacent[root])]
        walked = 0
        for level, (front, before) in enumerate(_walks(starts, onward), 1):
            if (radius is not None and level > radius) or len(depth) == self.n - 1:
                break
            for u, v in front:
                walked |= 1 << v
                if depth.get(v, level) == level and _is_simple(before, (u, v)):
                    depth[v] = level
                    parents.setdefault(v, []).append(u)
        for v in bits(walked & ~mask_of(depth)):
            if path := _shortest_path(starts, onward, v, radius):
                depth[v], parents[v] = len(path) - 1, [path[-2]]
        return DsepTree(root, depth, {v: tuple(sorted(each)) for v, each in parents.items()})

    def depths(self, root: int, within: int, wanted: int) -> dict[int, int]:
        """How far the nodes of `wanted` are from `root` by possible-d-sep walks in `within`; all of them must be reached by some."""
        depth: dict[int, int] = {}
        within &= ~(1 << root)
        starts = [(root, v) for v in bits(self.adjacent[root] & within)]
        for level, (front, _) in enumerate(_walks(starts, lambda u, v: self.follow(u, v) & within), 1):
            depth |= {v: level for _, v in front if v not in depth}
            if not wanted & ~mask_of(depth):
                break
        return depth

    def follow(self, u: int, v: int) -> int:
        """The nodes w such that in u, v, w either u and w are adjacent or v is a collider."""
        allowed = self.adjacent[u]
        if self.into[v] >> u & 1:
            allowed |= self.into[v]
        return self.adjacent[v] & allowed & ~(1 << u)

    def reached_through(self, root: int, inner: int, within: int) -> int:
        """Nodes of `within` that a possible-d-sep walk from `root` reaches with every inner node in `inner`.

        Walks may pass a node twice, so that a few nodes more are found than by paths: learners then test a few sets more.
        """
        reached = self.adjacent[root] & within
        left = [inner & within & ~(1 << root)] * self.n  # from each node, where no walk has gone on to
        front = [(root, v) for v in bits(reached & inner)]
        while front:
            u, v = front.pop()
            follow = self.follow(u, v) & within & ~(1 << root)
            reached |= follow
            fresh = follow & left[v]
            if fresh:
                left[v] ^= fresh
                front += [(v, w) for w in bits(fresh)]
        return reached


@dataclass(frozen=True)
class DsepTree:
    """Possible-d-sep of a node as a tree of shortest paths.

    Attributes:
        root: the node it was grown from.
        depth: for each node reached, the length of its shortest path; in order of being reached.
        parents: for each node reached, the nodes before it on its shortest paths.
    """

    root: int
    depth: dict[int, int]
    parents: dict[int, tuple[int, ...]]

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted(self.depth))


def reachable_sets(links: Links, root: int, pool: int, size: int, limit: int) -> list[int] | None:
    """Every subset of `pool` of this size whose members are reached from `root` through members alone; None beyond `limit`.

    Sets grow node by node: taking the farthest node out of such a set leaves one, so none is missed and no other is built.
    """
    family = [0]
    for _ in range(size):
        grown: set[int] = set()
        for chosen in family:
            for v in bits(links.reached_through(root, chosen, pool) & ~chosen):
                grown.add(chosen | 1 << v)
            if len(grown) > limit:
                return None
        family = sorted(grown)
    return family


def uncovered_reach(
    start: int, first: int, allowed: Callable[[int], int], adjacent: list[int], targets: int, avoid: int = 0
) -> int:
    """The nodes of `targets` that an uncovered path start, first, ... reaches, along edges from v to nodes of `allowed(v)`.

    A search over directed pairs gives walks; where the shortest walk to a target repeats a node, a path is looked for.
    """

    def onward(u: int, v: int) -> int:
        return allowed(v) & ~adjacent[u] & ~(1 << u) & ~(1 << start) & ~avoid

    reached = doubtful = 0
    for front, before in _walks([(start, first)], onward):
        for pair in front:
            node = 1 << pair[1]
            if targets & ~reached & node:
                if _is_simple(before, pair):
                    reached |= node
                else:
                    doubtful |= node
        if not targets & ~reached & ~(1 << start):
            break
    for target in bits(doubtful & ~reached):
        if _shortest_path([(start, first)], onward, target):
            reached |= 1 << target
    return reached


def _walks(starts: Iterable[Pair], onward: Callable[[int, int], int]) -> Iterator[tuple[list[Pair], Before]]:
    """Directed pairs (u, v) by their distance, each once, with the pair before each; w may follow where `onward(u, v)` holds it."""
    before: Before = dict.fromkeys(starts)
    front = list(before)
    while front:
        yield front, before
        after: list[Pair] = []
        for u, v in front:
            for w in bits(onward(u, v)):
                if (v, w) not in before:
                    before[v, w] = (u, v)
                    after.append((v, w))
        front = after


def _is_simple(before: Before, pair: Pair) -> bool:
    """Whether the walk that ends with this pair passes no node twice."""
    seen = {pair[1]}
    at: Pair | None = pair
    while at is not None:
        if at[0] in seen:
            return False
        seen.add(at[0])
        at = before[at]
    return True


def _shortest_path(
    starts: Iterable[Pair], onward: Callable[[int, int], int], target: int, radius: int | None = None
) -> tuple[int, ...] | None:
    """A shortest path without repeated nodes, within a bounded number of steps."""
    paths: list[tuple[int, ...]] = list(starts)
    steps = 0
    while paths and steps <= _STEPS and (radius is None or len(paths[0]) <= radius + 1):
        longer = []
        for path in paths:
            if path[-1] == target:
                return path
            longer += [(*path, w) for w in bits(onward(path[-2], path[-1]) & ~mask_of(path))]
        steps += len(paths)
        paths = longer
    return None

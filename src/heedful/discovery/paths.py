"""Paths in a graph with marks: possible-d-sep, possible ancestors, uncovered paths. Node sets are bits of Python integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ARROW",
    "CIRCLE",
    "DsepTree",
    "Links",
    "NONE",
    "TAIL",
    "bits",
    "mask_of",
    "mask_rows",
    "reachable_sets",
    "uncovered_reach",
]

NONE, CIRCLE, ARROW, TAIL = 0, 1, 2, 3
Marks = NDArray[np.int8]

# Steps of a search for a path without repeated nodes, after the walk has been shown to exist.
_STEPS = 20_000


def bits(mask: int) -> Iterator[int]:
    """The nodes of a set, rising."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def mask_of(nodes: Any) -> int:
    found = 0
    for node in nodes:
        found |= 1 << int(node)
    return found


def mask_rows(matrix: NDArray[np.bool_]) -> list[int]:
    """Each row as a set of columns."""
    packed = np.packbits(matrix, axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


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
        depth: dict[int, int] = {}
        parents: dict[int, list[int]] = {}
        before: dict[tuple[int, int], tuple[int, int] | None] = {(root, v): None for v in bits(self.adjacent[root])}
        front = list(before)
        level, walked = 0, 0
        while front and (radius is None or level < radius) and len(depth) < self.n - 1:
            level += 1
            for u, v in front:
                walked |= 1 << v
                if depth.get(v, level) == level and _is_simple(before, (u, v)):
                    depth[v] = level
                    parents.setdefault(v, []).append(u)
            after: list[tuple[int, int]] = []
            for u, v in front:
                for w in bits(self.follow(u, v) & ~(1 << root)):
                    if (v, w) not in before:
                        before[v, w] = (u, v)
                        after.append((v, w))
            front = after
        for v in bits(walked):
            if v not in depth and (path := self._path(root, v, radius)):
                depth[v], parents[v] = len(path) - 1, [path[-2]]
        return DsepTree(root, depth, {v: tuple(sorted(each)) for v, each in parents.items()})

    def _path(self, root: int, target: int, radius: int | None) -> tuple[int, ...] | None:
        """A shortest possible-d-sep path without repeated nodes, within a bounded number of steps."""
        paths: list[tuple[int, ...]] = [(root, v) for v in bits(self.adjacent[root])]
        steps = 0
        while paths and (radius is None or len(paths[0]) <= radius + 1):
            longer = []
            for path in paths:
                if path[-1] == target:
                    return path
                steps += 1
                follow = self.follow(path[-2], path[-1]) & ~mask_of(path)
                longer += [(*path, w) for w in bits(follow)]
            if steps > _STEPS:
                return None
            paths = longer
        return None

    def depths(self, root: int, within: int, wanted: int) -> dict[int, int]:
        """How far the nodes of `wanted` are from `root` by possible-d-sep walks in `within`; all of them must be reached by some."""
        depth: dict[int, int] = {}
        left = list(self.adjacent)  # for each v, the nodes w whose pair (v, w) was not entered
        front = [(root, self.adjacent[root] & within)]
        level = 0
        while wanted:
            level += 1
            for _, entered in front:
                for v in bits(entered & wanted):
                    depth[v] = level
                wanted &= ~entered
            after: dict[int, int] = {}
            for u, entered in front if wanted else ():
                for v in bits(entered):
                    follow = self.follow(u, v) & left[v] & within & ~(1 << root)
                    if follow:
                        left[v] &= ~follow
                        after[v] = after.get(v, 0) | follow
            front = list(after.items())
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
        left: dict[int, int] = {}
        front = [(root, v) for v in bits(reached & inner)]
        stop = ~(1 << root) & within
        while front:
            u, v = front.pop()
            follow = self.follow(u, v) & stop
            reached |= follow
            fresh = follow & inner & ~left.get(v, 0)
            if fresh:
                left[v] = left.get(v, 0) | fresh
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

    A search over directed pairs finds walks; where the shortest walk to a target repeats a node, a path is looked for in depth.
    """
    found = (1 << first) & targets
    wanted = targets & ~found & ~(1 << start)
    # Pair (u, v) -> the pair before it on the shortest walk.
    before: dict[tuple[int, int], tuple[int, int] | None] = {(start, first): None}
    front = [(start, first)]
    doubtful = 0
    while front and wanted:
        after: list[tuple[int, int]] = []
        for u, v in front:
            follow = allowed(v) & ~adjacent[u] & ~(1 << u) & ~(1 << start) & ~avoid
            for w in bits(follow):
                if (v, w) in before:
                    continue
                before[v, w] = (u, v)
                after.append((v, w))
                if wanted >> w & 1:
                    if _is_simple(before, (v, w)):
                        found |= 1 << w
                        wanted &= ~(1 << w)
                    else:
                        doubtful |= 1 << w
        front = after
    for target in bits(doubtful & wanted):
        if _simple_path(start, first, allowed, adjacent, target, avoid):
            found |= 1 << target
    return found


def _is_simple(before: dict[tuple[int, int], tuple[int, int] | None], pair: tuple[int, int]) -> bool:
    seen = {pair[1]}
    at: tuple[int, int] | None = pair
    while at is not None:
        if at[0] in seen:
            return False
        seen.add(at[0])
        at = before[at]
    return True


def _simple_path(
    start: int, first: int, allowed: Callable[[int], int], adjacent: list[int], target: int, avoid: int
) -> bool:
    stack = [(start, first, 1 << start | 1 << first)]
    for _ in range(_STEPS):
        if not stack:
            return False
        u, v, used = stack.pop()
        follow = allowed(v) & ~adjacent[u] & ~used & ~avoid
        if follow >> target & 1:
            return True
        stack += [(v, w, used | 1 << w) for w in bits(follow)]
    return False

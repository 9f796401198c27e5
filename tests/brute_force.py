"""Slow, plain judges for causal graphs: every Markov-equivalent MAG of a small graph, paths listed one by one, random graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

import numpy as np

from heedful.discovery import DSeparation

NONE, CIRCLE, ARROW, TAIL = 0, 1, 2, 3


def random_dag(rng, observed: int, latent: int, selection: int = 0, degree: float = 2.5):
    """Parents of each node, the observed, and the selection nodes: children of two others, without children."""
    n = observed + latent
    order = rng.permutation(n)
    parents: list[list[int]] = [[] for _ in range(n + selection)]
    for a, b in combinations(range(n), 2):
        if rng.random() < degree / (n - 1):
            parents[order[b]].append(int(order[a]))
    for extra in range(selection):
        parents[n + extra] = sorted(rng.choice(n, 2, replace=False).tolist())
    children = np.bincount([p for each in parents for p in each], minlength=n)
    roots = [v for v in range(n) if not parents[v] and children[v] >= 2]
    hidden = [*roots, *(v for v in range(n) if v not in roots)][:latent]
    return parents, [v for v in range(n) if v not in hidden], list(range(n, n + selection))


def topological(parents) -> list[int]:
    """All nodes, causes first."""
    found: list[int] = []
    while len(found) < len(parents):
        found += [v for v in range(len(parents)) if v not in found and set(parents[v]) <= set(found)]
    return found


def model_of_dag(oracle: DSeparation) -> np.ndarray:
    """[Z, x, y]: whether x and y are dependent given the set with bits Z; False where Z holds x or y."""
    n = oracle.n
    found = np.zeros((2**n, n, n), bool)
    for z in range(2**n):
        given = [v for v in range(n) if z >> v & 1]
        for x, y in combinations([v for v in range(n) if not z >> v & 1], 2):
            found[z, x, y] = found[z, y, x] = not oracle.separated(x, y, given)
    return found


def models_of_mags(mags: np.ndarray) -> np.ndarray:
    """The same for graphs [m, n, n] with tails and arrowheads, by walks: [m, Z, x, y]."""
    m, n, _ = mags.shape
    adjacent = mags != NONE
    directed = (mags == ARROW) & (mags.transpose(0, 2, 1) == TAIL)
    ancestor = np.eye(n, dtype=bool) | directed  # [m, v, w]: v is w or an ancestor of it
    for _ in range(n):
        ancestor = ancestor | (ancestor.astype(np.uint8) @ ancestor.astype(np.uint8) > 0)
    member = (np.arange(2**n)[:, None] >> np.arange(n) & 1).astype(bool)  # [Z, v]
    opens = (ancestor.astype(np.uint8) @ member.T.astype(np.uint8) > 0).transpose(0, 2, 1)  # [m, Z, v]
    collider = (mags == ARROW)[:, :, :, None] & (mags == ARROW).transpose(0, 2, 1)[:, None]  # [m, u, v, w]
    triple = adjacent[:, :, :, None] & adjacent[:, None] & ~np.eye(n, dtype=bool)[:, None, :]
    passes = triple[:, None] & np.where(collider[:, None], opens[:, :, None, :, None], ~member[None, :, None, :, None])
    # [m, Z, v, x, u]: a walk x, ..., u, v is open so far.
    reached = np.broadcast_to(np.eye(n, dtype=bool)[None, :, :, None] & adjacent[:, None], (m, n, n, n))
    reached = np.broadcast_to(reached.transpose(0, 3, 1, 2)[:, None], (m, 2**n, n, n, n)).astype(np.float32)
    onward = passes.transpose(0, 1, 3, 2, 4).astype(np.float32)  # [m, Z, v, u, w]
    while True:
        more = (reached @ onward).transpose(0, 1, 4, 3, 2)  # [m, Z, w, x, v]
        grown = np.maximum(reached, more > 0)
        if (grown == reached).all():
            break
        reached = grown
    found = reached.any(axis=4).transpose(0, 1, 3, 2)  # [m, Z, x, v]
    return found & ~member[None, :, :, None] & ~member[None, :, None, :] & ~np.eye(n, dtype=bool)


def skeleton_of(model: np.ndarray) -> np.ndarray:
    """Adjacent: dependent given every set of the others."""
    n = model.shape[1]
    member = (np.arange(2**n)[:, None] >> np.arange(n) & 1).astype(bool)
    return (model | member[:, :, None] | member[:, None, :]).all(axis=0) & ~np.eye(n, dtype=bool)


def candidate_mags(model: np.ndarray, undirected: bool = False) -> np.ndarray:
    """Every ancestral graph over the skeleton of a model with its unshielded colliders: [m, n, n] marks."""
    n = model.shape[1]
    skeleton = skeleton_of(model)
    edges = [(i, j) for i, j in combinations(range(n), 2) if skeleton[i, j]]
    kinds = [(TAIL, ARROW), (ARROW, TAIL), (ARROW, ARROW)] + [(TAIL, TAIL)] * undirected  # at i, at j
    # An unshielded triple is a collider iff its middle is in no separating set; any one set will do.
    triples: dict[int, list[tuple[int, int, int, bool]]] = {}
    for a, c in combinations(range(n), 2):
        if skeleton[a, c]:
            continue
        z = next(z for z in range(2**n) if not z >> a & 1 and not z >> c & 1 and not model[z, a, c])
        for b in np.flatnonzero(skeleton[a] & skeleton[c]).tolist():
            last = max(edges.index((min(a, b), max(a, b))), edges.index((min(b, c), max(b, c))))
            triples.setdefault(last, []).append((a, b, c, not z >> b & 1))
    graphs: list[np.ndarray] = []
    marks = np.zeros((n, n), np.int8)

    def grow(at: int) -> None:
        if at == len(edges):
            graphs.append(marks.copy())
            return
        i, j = edges[at]
        for marks[j, i], marks[i, j] in kinds:
            right = all((marks[a, b] == marks[c, b] == ARROW) == wanted for a, b, c, wanted in triples.get(at, ()))
            # What forbids a part forbids the whole.
            if right and is_ancestral(marks):
                grow(at + 1)
        marks[i, j] = marks[j, i] = NONE

    grow(0)
    return np.array(graphs, np.int8).reshape(-1, n, n)


def shared_marks(model: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """The marks shared by all candidates with exactly these independences; a circle where they differ.

    Candidates are looked at in a mixed order until no further one could turn a shared mark into a circle.
    """
    n = model.shape[1]
    candidates = np.random.default_rng(0).permutation(candidates)
    least = invariant(candidates)
    shared = None
    step = max(1, 2**19 // (2**n * n**3))
    for at in range(0, len(candidates), step):
        block = candidates[at : at + step]
        block = block[(models_of_mags(block) == model).all(axis=(1, 2, 3))]
        if len(block):
            shared = invariant(block if shared is None else np.concatenate([shared[None], block]))
            if (shared == least).all():
                break
    assert shared is not None
    return shared


def is_ancestral(marks: np.ndarray) -> bool:
    """No directed cycle, no arrowhead at an ancestor, and no arrowhead where an undirected edge ends."""
    n = len(marks)
    reach = (marks == ARROW) & (marks.T == TAIL)
    for via in range(n):
        reach |= reach[:, via : via + 1] & reach[via : via + 1]
    if reach.diagonal().any() or (reach & (marks.T == ARROW)).any():
        return False
    ends = ((marks == TAIL) & (marks.T == TAIL)).any(axis=0)
    return not (ends & (marks == ARROW).any(axis=0)).any()


def invariant(mags: np.ndarray) -> np.ndarray:
    """The marks that all graphs share; a circle where they differ."""
    return np.where((mags == mags[0]).all(axis=0), mags[0], CIRCLE).astype(np.int8)


def brute_pag(parents, observed: Sequence[int], selection: Sequence[int] = (), order: Sequence[int] | None = None):
    """The PAG by definition; with an order, over the MAGs in which the later node of an edge never has a tail."""
    model = model_of_dag(DSeparation(parents, observed=observed, selection=selection))
    mags = candidate_mags(model, undirected=bool(selection))
    if order is not None:
        place = np.argsort(order)
        later = place[:, None] < place[None, :]
        mags = mags[~((mags == TAIL) & later).any(axis=(1, 2))]
    return shared_marks(model, mags)


def simple_paths(marks: np.ndarray, start: int) -> Iterator[tuple[int, ...]]:
    """Every path from `start` without repeated nodes."""
    stack = [(start,)]
    while stack:
        path = stack.pop()
        if len(path) > 1:
            yield path
        stack += [(*path, w) for w in np.flatnonzero(marks[path[-1]]).tolist() if w not in path]


def brute_dsep(marks: np.ndarray, x: int) -> set[int]:
    """Possible-d-sep by its definition."""
    return {
        path[-1]
        for path in simple_paths(marks, x)
        if all(
            marks[u, w] or marks[u, v] == marks[w, v] == ARROW
            for u, v, w in zip(path, path[1:], path[2:], strict=False)
        )
    }


def brute_m_separated(marks: np.ndarray, x: int, y: int, given: set[int]) -> bool:
    """m-separation by listing paths."""
    n = len(marks)
    reach = ((marks == ARROW) & (marks.T == TAIL)) | np.eye(n, dtype=bool)
    for via in range(n):
        reach |= reach[:, via : via + 1] & reach[via : via + 1]
    opens = {v for v in range(n) if any(reach[v, z] for z in given)}
    for path in simple_paths(marks, x):
        triples = zip(path, path[1:], path[2:], strict=False)
        if path[-1] == y and all(
            (v in opens) if marks[u, v] == marks[w, v] == ARROW else (v not in given) for u, v, w in triples
        ):
            return False
    return True


def subsets_of(nodes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for keep in product((False, True), repeat=len(nodes)):
        yield tuple(v for v, k in zip(nodes, keep, strict=True) if k)

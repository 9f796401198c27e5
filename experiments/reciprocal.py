"""Re-ranking by k-reciprocal neighbours as it was published: dense matrices, and a loop over items.

Zhong et al. 2017, "Re-ranking person re-identification with k-reciprocal encoding"; written after their definitions, for checks and for times
beside ours. An item is the first of its own ranking, and equal distances are in the order of places; the published script leaves both open.
"""

from __future__ import annotations

import numpy as np


def published(X: np.ndarray, asked: int, k1: int = 20, k2: int = 6, weight: float = 0.3) -> np.ndarray:
    """Distances, `(asked, n)`, of the last so many of all n items X `(n, d)`, of length 1, from all items."""
    count = len(X)
    squared = 2 - 2 * (X @ X.T)
    np.fill_diagonal(squared, 0)
    squared = np.maximum(squared, 0)
    original = squared / squared.max(axis=1, keepdims=True)
    ordered = original.copy()
    np.fill_diagonal(ordered, -1)
    rank = np.argsort(ordered, axis=1, kind="stable")
    V = np.zeros_like(original)
    for i in range(count):
        own = _reciprocal(rank, i, k1)
        members = own
        for j in own:
            half = _reciprocal(rank, j, int(np.around(k1 / 2)))
            if 3 * len(np.intersect1d(half, own)) > 2 * len(half):
                members = np.append(members, half)
        members = np.unique(members)
        near = np.exp(-original[i, members])
        V[i, members] = near / near.sum()
    if k2 > 1:
        V = np.stack([V[rank[i, :k2]].mean(axis=0) for i in range(count)])
    holders = [np.flatnonzero(V[:, column]) for column in range(count)]
    distances = []
    for i in range(count - asked, count):
        shared = np.zeros(count)
        for column in np.flatnonzero(V[i]):
            them = holders[column]
            shared[them] += np.minimum(V[i, column], V[them, column])
        distances.append((1 - weight) * (1 - shared / (2 - shared)) + weight * original[i])
    return np.stack(distances)


def _reciprocal(rank: np.ndarray, item: int, k: int) -> np.ndarray:
    forward = rank[item, : k + 1]
    back = rank[forward, : k + 1]
    return forward[(back == item).any(axis=1)]

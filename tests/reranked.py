"""Re-ranking in plain loops, for tests: neighbours, a graph of them, and what spreads on it."""

import numpy as np


def unit(X):
    return X / np.linalg.norm(X, axis=-1, keepdims=True)


def by_place(ranking, n):
    """Scores by the places in the database; NaN for those that are not in the list."""
    table = np.full((len(ranking), n), np.nan)
    for row, places, scores in zip(table, ranking.order, ranking.scores, strict=True):
        row[places[places >= 0]] = scores[places >= 0]
    return table


def nearest(cosines, n, own=None):
    places = sorted((j for j in range(len(cosines)) if j != own), key=lambda j: (-cosines[j], j))
    return places[:n]


def spread(X, k, gamma, alpha):
    """The inverse of I - alpha S, edge by edge."""
    n = len(X)
    near = [set(nearest(X @ x, k, place)) for place, x in enumerate(X)]
    W = np.zeros((n, n))
    for i in range(n):
        for j in near[i]:
            if i in near[j]:
                W[i, j] = max(X[i] @ X[j], 0) ** gamma
    degree = W.sum(1)
    degree[degree == 0] = 1
    return np.linalg.inv(np.eye(n) - alpha * W / np.sqrt(np.outer(degree, degree)))


def starts(Q, X, k, gamma):
    Y = np.zeros((len(Q), len(X)))
    for row, q in zip(Y, Q, strict=True):
        for j in nearest(X @ q, k):
            row[j] = max(X[j] @ q, 0) ** gamma
    return Y

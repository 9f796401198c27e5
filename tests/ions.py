"""Charges in space: their energy and forces, and a random move of them, as plain formulas."""

import numpy as np


def ions(count, seed, n=5):
    """Positions and charges (count, n, 4), energies (count,), and forces (count, n, 3); pairs are softened, so that none is infinite."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(count, n, 3))
    q = rng.choice([-1.0, 1.0], size=(count, n, 1))
    apart = X[:, :, None] - X[:, None]  # [count, n, n, 3]
    r = np.sqrt(np.square(apart).sum(-1) + 0.25)
    pairs = q @ q.transpose(0, 2, 1) * (1 - np.eye(n))
    return np.concatenate((X, q), -1), (pairs / r).sum((1, 2)) / 2, ((pairs / r**3)[..., None] * apart).sum(2)


def sorted_distances(X):
    """What one would compute by hand: distances of like and of unlike charges, each in order, as 1 / r."""
    first, second = np.triu_indices(X.shape[1], 1)
    r = np.linalg.norm(X[:, first, :3] - X[:, second, :3], axis=-1)
    like = X[:, first, 3] * X[:, second, 3] > 0
    return np.hstack([np.sort(np.where(kind, 1 / r, 0.0), axis=1) for kind in (like, ~like)])


def orthogonal(rng, d=3, det=1):
    """A matrix drawn by Householder's reflections of random directions, as many as make the determinant."""
    matrix = np.eye(d)
    for _ in range(2 * d - (det < 0)):
        u = rng.normal(size=d)
        matrix = matrix @ (np.eye(d) - 2 * np.outer(u, u) / (u @ u))
    return matrix


def turned(X, matrix, vectors=1, shift=0.0):
    """Points whose first columns are vectors, turned; the first vector also moved."""
    d = len(matrix)
    X = X.copy()
    for at in range(vectors):
        X[..., at * d : (at + 1) * d] = X[..., at * d : (at + 1) * d] @ matrix.T
    X[..., :d] += shift
    return X

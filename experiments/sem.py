"""Random linear structural equation models with latent variables, and how a learned graph compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

NONE, CIRCLE = 0, 1


@dataclass(frozen=True)
class Model:
    """`weights[a, b]` is the effect of a on b; `observed` are the nodes that data shows."""

    weights: np.ndarray
    observed: tuple[int, ...]

    @property
    def parents(self) -> list[list[int]]:
        return [np.flatnonzero(column).tolist() for column in self.weights.T]

    @property
    def mixing(self) -> np.ndarray:
        """T with data = noise T."""
        return np.linalg.inv(np.eye(len(self.weights)) - self.weights)

    def data(self, samples: int, random: np.random.Generator) -> np.ndarray:
        """`[samples, observed]` with unit noise at every node."""
        noise = random.standard_normal((samples, len(self.weights)))
        return (noise @ self.mixing)[:, self.observed]

    def attention(self) -> np.ndarray:
        """The same model with positive effects as an attention matrix: rows of (I - B)^-T, divided by their sums (5.4)."""
        rows = np.linalg.inv(np.eye(len(self.weights)) - np.abs(self.weights)).T
        # Zeros come out of the inverse as 1e-17 of either sign.
        rows = np.maximum(rows, 0.0)
        return rows / rows.sum(axis=1, keepdims=True)


def draw(
    observed: int, latent: int, degree: float, seed: int, low: float = 0.3, high: float = 0.9
) -> tuple[Model, np.random.Generator]:
    """A random model, and the generator that goes on to its data."""
    random = np.random.default_rng(seed)
    n = observed + latent
    order = random.permutation(n)
    kept = (random.random((n, n)) < degree / (n - 1)) & np.triu(np.ones((n, n), bool), 1)
    sizes = random.uniform(low, high, (n, n))
    signs = np.where(random.random((n, n)) < 0.5, -1, 1)
    weights = np.zeros((n, n))
    weights[np.ix_(order, order)] = sizes * signs * kept
    # Common causes make the best latent variables.
    roots = [v for v in range(n) if not weights[:, v].any() and (weights[v] != 0).sum() >= 2]
    hidden = set((roots + [v for v in range(n) if v not in roots])[:latent])
    return Model(weights, tuple(v for v in range(n) if v not in hidden)), random


def compare(marks: np.ndarray, true: np.ndarray) -> dict[str, Any]:
    """Precision, recall and F1 of the skeleton; the shares of true end marks found again, and of definite marks that are right."""
    upper = np.triu_indices(len(true), 1)
    here, there = marks[upper] != NONE, true[upper] != NONE
    both = int((here & there).sum())
    precision, recall = both / max(1, here.sum()), both / max(1, there.sum())
    edge, definite = true != NONE, (marks != NONE) & (marks != CIRCLE)
    return {
        "precision": precision if here.any() else 1.0,
        "recall": recall if there.any() else 1.0,
        "f1": 2 * both / max(1, here.sum() + there.sum()) if here.any() or there.any() else 1.0,
        "marks": float((marks == true)[edge].mean()) if edge.any() else 1.0,
        "definite_right": float((marks == true)[definite].mean()) if definite.any() else None,
        "exact": bool((marks == true).all()),
    }

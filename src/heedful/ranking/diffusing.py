"""Re-ranking by diffusion on the graph of mutual neighbours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heedful._checks import check_number, check_whole
from heedful._errors import Unsupported
from heedful.ranking._asked import Asked, ask
from heedful.ranking.expansion import powers
from heedful.ranking.reciprocal import reciprocal
from heedful.ranking.result import Ranking
from heedful.ranking.search import CELLS, top

# Rows up to which the system may be inverted, and the least share of them that must be asked for; else conjugate gradients are cheaper.
DENSE = 5000
SHARE = 1 / 20
# Conjugate gradients: the relative residual that is enough, and the most steps.
TOLERANCE = 1e-8
STEPS = 1000


def diffusion(
    queries: Any,
    database: Any,
    *,
    k: int = 50,
    k_query: int = 10,
    gamma: float = 3.0,
    alpha: float = 0.99,
    top: int | None = None,
    candidates: Any = None,
    normalize: bool = True,
    device: str | torch.device = "auto",
) -> Ranking:
    r"""Items by what reaches them of a query's weight along a graph of neighbours (Zhou et al. 2003; Iscen et al. 2017, equations 1 to 6).

    $$(I - \alpha S) f = y, \qquad S = \Delta^{-1/2} W \Delta^{-1/2}, \qquad \Delta = \mathrm{diag}(W 1),$$

    $W_{ij} = \max(x_i \cdot x_j, 0)^\gamma$ where i and j are among each other's k nearest, else 0; $y_j = \max(q \cdot x_j, 0)^\gamma$ on the nearest rows
    of the query, `k_query` of them. A query that is a row of the database (`queries=None`) starts at its own node, $y = e_q$. The score of row j is $f_j$.

    Solved in float64 by conjugate gradients, many queries together, to a relative residual of 1e-8; with up to 5,000 rows and many queries by the
    inverse (Cholesky). Rows that nothing reaches have the score 0, in the order of their cosines.

    Args:
        queries, database, top, candidates, normalize, device: as those of `cosine`; the graph is that of the whole database, also where
            `candidates` says which items to order.
        k: neighbours in the graph.
        k_query: rows at which a query that is not in the database starts.
        gamma: exponent of the similarities.
        alpha: how far weight travels: 0 nowhere, near 1 through the whole graph.

    >>> X = [[1.0, 0.0], [0.9, 0.3], [0.7, 0.7], [-1.0, 0.2]]
    >>> diffusion([[1.0, 0.1]], X, k=2, k_query=1, alpha=0.5).order.tolist()
    [[0, 1, 2, 3]]
    """
    check_whole(k=k, k_query=k_query)
    asked = ask(queries, database, top, candidates, normalize, device)
    spreading = Diffusion(asked, k, k_query, gamma, alpha)
    return asked.by_rows(lambda numbers, cosines: spreading.rows(numbers), size=spreading.block)


class Diffusion:
    """The system of `diffusion`, ready to be solved for queries by their numbers; `many` says that most rows will be asked for."""

    def __init__(
        self,
        asked: Asked,
        k: int = 50,
        k_query: int = 10,
        gamma: float = 3.0,
        alpha: float = 0.99,
        many: bool = False,
    ) -> None:
        check_number(least=0, gamma=gamma)
        check_number(high=1, least=0, alpha=alpha)
        self.alpha, self.count = alpha, len(asked.database)
        self.dtype = torch.float32 if asked.database.device.type == "mps" else torch.float64
        self.block = max(1, CELLS // (4 * self.count))
        self._starts = None if asked.among else _start(asked, k_query, gamma, self.dtype)
        edges, weights = _graph(asked.database, k, gamma, self.dtype)
        self._inverse: Tensor | None = None
        if self.count <= DENSE and (many or len(asked.queries) >= SHARE * self.count):
            system = torch.eye(self.count, dtype=self.dtype, device=weights.device)
            system[edges[0], edges[1]] = -alpha * weights
            self._inverse = torch.cholesky_inverse(torch.linalg.cholesky(system))
        else:
            shape = (self.count, self.count)
            self._links = torch.sparse_coo_tensor(edges, weights, shape, is_coalesced=True, check_invariants=False)

    def rows(self, numbers: Tensor) -> Tensor:
        """f of queries by their numbers, `(b, n)`."""
        if self._starts is None:
            return self.of_rows(numbers)
        weights, places = (part[numbers] for part in self._starts)
        if self._inverse is not None:
            return torch.stack([w @ self._inverse[at] for w, at in zip(weights, places, strict=True)])
        right = torch.zeros(len(numbers), self.count, dtype=self.dtype, device=weights.device)
        return self._solved(right.scatter_(1, places, weights))

    def of_rows(self, places: Tensor) -> Tensor:
        """f of rows of the database by their places, `(b, n)`: rows of the inverse."""
        if self._inverse is not None:
            return self._inverse[places]
        right = torch.zeros(len(places), self.count, dtype=self.dtype, device=places.device)
        return self._solved(right.scatter_(1, places[:, None], 1))

    def received(self, spread: Tensor) -> Tensor:
        """What arrives of f `(b, n)` at the rows where each query starts, by its weights there, `(b, queries)`."""
        assert self._starts is not None
        weights, places = self._starts
        return torch.stack([(row[places] * weights).sum(1) for row in spread])

    def _solved(self, right: Tensor) -> Tensor:
        return _conjugate(lambda f: f - self.alpha * torch.sparse.mm(self._links, f), right.T.contiguous()).T


def _start(asked: Asked, k: int, gamma: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scores, places = asked.neighbours(k)
    return powers(scores.to(dtype), gamma), places


def _graph(database: Tensor, k: int, gamma: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Edges `(2, e)`, rising, and their weights in S; an item without a mutual neighbour has none."""
    own = torch.arange(len(database), device=database.device)
    scores, places, _ = top(database, database, min(k, len(database) - 1), own)
    weights = powers(scores.to(dtype), gamma) * reciprocal(places)
    row, at = weights.nonzero(as_tuple=True)
    column, values = places[row, at], weights[row, at]
    by = (row * len(database) + column).argsort()
    row, column, values = row[by], column[by], values[by]
    degrees = values.new_zeros(len(database)).index_add_(0, row, values)
    degrees = torch.where(degrees > 0, degrees, 1)
    return torch.stack((row, column)), values / (degrees[row] * degrees[column]).sqrt()


def _conjugate(apply: Any, right: Tensor) -> Tensor:
    """Conjugate gradients for many right-hand sides `(n, b)`, each with its own steps."""
    found = torch.zeros_like(right)
    rest, direction = right.clone(), right.clone()
    size = (rest * rest).sum(0)
    enough = TOLERANCE**2 * size
    for _ in range(STEPS):
        if bool((size <= enough).all()):
            return found
        image = apply(direction)
        # A column that is done has a direction of 0, or nearly so.
        step = torch.where(size > enough, size / (direction * image).sum(0), 0)
        found += step * direction
        rest -= step * image
        before, size = size, (rest * rest).sum(0)
        direction = rest + torch.where(before > enough, size / before, 0) * direction
    raise Unsupported(
        f"conjugate gradients did not reach a residual of {TOLERANCE:g} in {STEPS} steps; an alpha further below 1 converges sooner"
    )

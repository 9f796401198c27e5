r"""Queries and database rows replaced by means over their neighbours.

With rows of length 1, $\mathrm{norm}(x) = x / |x|_2$ and the n nearest rows $x_{r(1)}, x_{r(2)}, \ldots$ of a query q, itself never
among them, the new query is

$$q' = \mathrm{norm}\Big(q + \sum_{i=1}^{n} w_i x_{r(i)}\Big),$$

and the database is searched again. Averages: Chum et al. 2007 ("Total Recall"); falling weights: Gordo et al. 2017; powers of the
similarity, and the same for the database: Radenovic, Tolias & Chum 2018, section 3.5, and Arandjelovic & Zisserman 2012.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heedful._checks import check_number, check_whole
from heedful.ranking._asked import ask
from heedful.ranking.result import Ranking
from heedful.ranking.search import CELLS, blocks, normalized


def cosine(
    queries: Any,
    database: Any,
    *,
    top: int | None = None,
    candidates: Any = None,
    normalize: bool = True,
    device: str | torch.device = "auto",
) -> Ranking:
    r"""The plain search: the database by $q \cdot x_j$, the first list that other methods re-score.

    Args:
        queries: `(nq, d)`; None: every row of the database asks the others, itself never in its list.
        database: `(n, d)`.
        top: how many items to return for each query; all by default.
        candidates: `(nq, m)`, places in the database, as an index returns them, -1 for missing ones: these alone are ordered.
        normalize: whether rows are divided by their lengths first; False trusts that they have length 1.
        device: where to compute; `"auto"` is CUDA where there is one.

    >>> print(cosine([[1.0, 0.2]], [[0.0, 1.0], [1.0, 1.0], [2.0, 0.0]]))
    1 query, up to 3 items each
    query 0: 2 (0.981), 1 (0.832), 0 (0.196)
    """
    asked = ask(queries, database, top, candidates, normalize, device)
    return asked.by_vectors(asked.queries, asked.database)


def average_query_expansion(
    queries: Any,
    database: Any,
    *,
    n: int = 10,
    decay: bool = False,
    top: int | None = None,
    candidates: Any = None,
    normalize: bool = True,
    device: str | torch.device = "auto",
) -> Ranking:
    r"""Average query expansion (AQE): $w_i = 1$; with `decay` (AQEwD) $w_i = (n - i + 1) / n$.

    The n neighbours are those of the whole database, also where `candidates` says which items to order. Other arguments: `cosine`.

    >>> average_query_expansion([[1.0, 0.0]], [[0.6, 0.8], [0.8, -0.6], [0.9, 0.5]], n=1).order.tolist()
    [[2, 0, 1]]
    """
    check_whole(n=n)
    asked = ask(queries, database, top, candidates, normalize, device)
    scores, places = asked.neighbours(n)
    weights = torch.ones_like(scores)
    if decay:
        weights = weights - torch.arange(scores.shape[1], dtype=scores.dtype, device=scores.device) / n
    return asked.by_vectors(expanded(asked.queries, asked.database, places, weights), asked.database)


def alpha_query_expansion(
    queries: Any,
    database: Any,
    *,
    n: int = 10,
    alpha: float = 3.0,
    top: int | None = None,
    candidates: Any = None,
    normalize: bool = True,
    device: str | torch.device = "auto",
) -> Ranking:
    r"""Query expansion weighted by powers of the similarity (alphaQE): $w_i = \max(q \cdot x_{r(i)}, 0)^\alpha$.

    The n neighbours are those of the whole database, also where `candidates` says which items to order. Other arguments: `cosine`.

    >>> alpha_query_expansion([[1.0, 0.0]], [[0.6, 0.8], [0.8, -0.6], [0.9, 0.5]], n=1).order.tolist()
    [[2, 0, 1]]
    """
    check_whole(n=n)
    check_number(least=0, alpha=alpha)
    asked = ask(queries, database, top, candidates, normalize, device)
    scores, places = asked.neighbours(n)
    return asked.by_vectors(expanded(asked.queries, asked.database, places, powers(scores, alpha)), asked.database)


def database_augmentation(
    queries: Any,
    database: Any,
    *,
    n: int = 10,
    alpha: float = 3.0,
    expand: bool = True,
    top: int | None = None,
    candidates: Any = None,
    normalize: bool = True,
    device: str | torch.device = "auto",
) -> Ranking:
    r"""Every row of the database expanded by its own neighbours (alphaDBA), then, with `expand`, the queries by the new rows (alphaQE).

    $$x_j' = \mathrm{norm}\Big(x_j + \sum_{i=1}^{n} \max(x_j \cdot x_{r_j(i)}, 0)^\alpha x_{r_j(i)}\Big),$$

    all from the old rows. Queries that are rows of the database (`queries=None`) are expanded with it. Other arguments: `cosine`.

    >>> database_augmentation([[1.0, 0.0]], [[0.6, 0.8], [0.8, -0.6], [0.9, 0.5]], n=1).order.tolist()
    [[1, 2, 0]]
    """
    check_whole(n=n)
    check_number(least=0, alpha=alpha)
    asked = ask(queries, database, top, candidates, normalize, device)
    stored = augmented(asked.database, n, alpha)
    sought = stored if asked.among else asked.queries
    if expand:
        scores, places = asked.neighbours(n, sought, stored)
        sought = expanded(sought, stored, places, powers(scores, alpha))
    return asked.by_vectors(sought, stored)


def augmented(database: Tensor, n: int, alpha: float) -> Tensor:
    """Rows of length 1 `(n, d)`, each expanded by its n nearest others: alphaDBA."""
    everyone = ask(None, database, normalize=False, device=database.device)
    scores, places = everyone.neighbours(n)
    return expanded(database, database, places, powers(scores, alpha))


def powers(scores: Tensor, alpha: float) -> Tensor:
    """Similarities below 0 have no weight, also where alpha is 0."""
    return torch.where(scores > 0, scores.clamp(min=0) ** alpha, 0)


def expanded(queries: Tensor, database: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Each query and the weighted sum of the rows at its places, of length 1; -1 is no row."""
    weights = weights.masked_fill(places < 0, 0)
    size = max(1, CELLS // max(1, places.shape[1] * database.shape[1]))
    parts = [
        queries[part] + torch.einsum("bn,bnd->bd", weights[part], database[places[part].clamp(min=0)])
        for part in blocks(len(queries), size)
    ]
    return normalized(torch.cat(parts))

"""Methods that look at the first results of a query alone: SuperGlobal, and cosines of rows of similarities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heedful._checks import check_number, check_whole
from heedful.ranking._asked import Asked, ask, ranking
from heedful.ranking.result import Ranking
from heedful.ranking.search import CELLS, blocks, normalized, stable_top


def super_global(
    queries: Any,
    database: Any,
    *,
    candidates_count: int = 400,
    k: int = 9,
    beta: float = 0.15,
    top: int | None = None,
    candidates: Any = None,
    normalize: bool = True,
    device: str | torch.device = "auto",
) -> Ranking:
    r"""The first results refined by one another, and the query by the best of them (Shao et al. 2023, "SuperGlobal", section 3.3).

    Each of the first M results is replaced by a mean with its k most similar fellows j, not divided by its length again:

    $$x_i' = \frac{x_i + \sum_j \beta\, (x_i \cdot x_j)\, x_j}{1 + \sum_j \beta\, (x_i \cdot x_j)}, \qquad
    \mathrm{score}_i = \tfrac12 \big(q \cdot x_i' + e \cdot x_i'\big),$$

    where e is the largest number, dimension by dimension, among the k + 1 refined results nearest to q. Results after the first M keep their
    order below them. Ours re-ranks many queries at once.

    Args:
        queries, database, top, candidates, normalize, device: as those of `cosine`; `candidates` are the only items that are looked at.
        candidates_count: M.
        k: fellows of each result.
        beta: weight of the fellows.

    >>> super_global([[1.0, 0.1]], [[1.0, 0.0], [0.9, 0.3], [0.0, 1.0]], k=1).order.tolist()
    [[1, 0, 2]]
    """
    check_whole(candidates_count=candidates_count, k=k)
    check_number(least=0, beta=beta)
    asked = ask(queries, database, top, candidates, normalize, device)
    scores, places = asked.listed(max(candidates_count, asked.length))
    first = places[:, :candidates_count]
    width = first.shape[1]
    parts = []
    for part in blocks(len(first), max(1, CELLS // max(1, width * (2 * width + asked.database.shape[1])))):
        parts.append(_refined(asked.queries[part], asked.database, first[part], k, beta))
    return _rescored(asked, torch.cat(parts), scores, places)


def _refined(queries: Tensor, database: Tensor, places: Tensor, k: int, beta: float) -> Tensor:
    """New scores `(b, M)` of the results at these places; minus infinity where there is none."""
    count, width = places.shape
    there = places >= 0
    if width == 0:
        return queries.new_empty(count, 0)
    rows = database[places.clamp(min=0)] * there[:, :, None]
    alike = rows @ rows.mT
    alike.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
    alike.masked_fill_(~there[:, None], -torch.inf)
    values, at = stable_top(alike.view(-1, width), min(k, width))
    weights = torch.where(values > -torch.inf, beta * values, 0)
    mixing = torch.zeros_like(alike).view(-1, width).scatter_(1, at, weights).view_as(alike)
    rows = (rows + mixing @ rows) / (1 + mixing.sum(-1, keepdim=True))
    near = torch.einsum("bmd,bd->bm", rows, queries).masked_fill(~there, -torch.inf)
    values, best = stable_top(near, min(k + 1, width))
    chosen = rows.gather(1, best[:, :, None].expand(-1, -1, rows.shape[2]))
    # A missing result is never the largest, unless there is none at all.
    chosen = chosen.masked_fill((values == -torch.inf)[:, :, None], -torch.inf)
    peak = chosen.amax(1).masked_fill(~there.any(1)[:, None], 0)
    return ((near + torch.einsum("bmd,bd->bm", rows, peak)) / 2).masked_fill(~there, -torch.inf)


def affinity(
    queries: Any,
    database: Any,
    *,
    anchors: int = 128,
    candidates_count: int | None = 128,
    top: int | None = None,
    candidates: Any = None,
    normalize: bool = True,
    device: str | torch.device = "auto",
) -> Ranking:
    r"""Results by whom they resemble: the cosine of their similarities with the first results and those of the query.

    With the anchors $z = (q, x_{r(1)}, \ldots, x_{r(L-1)})$, row i of the affinities is $a_i = (x_{r(i)} \cdot z_1, \ldots, x_{r(i)} \cdot z_L)$ and

    $$\mathrm{score}_i = \frac{a_0 \cdot a_i}{|a_0|\, |a_i|}, \qquad a_0 = (q \cdot z_1, \ldots, q \cdot z_L)$$

    (Ouyang et al. 2021, "affinity feature": their model without its network). Where vectors have a mean of zero it orders worse than the plain
    search; it suits vectors whose similarities are nearly all positive.

    Args:
        queries, database, top, candidates, normalize, device: as those of `cosine`; `candidates` are the only items that are looked at.
        anchors: L, the query among them.
        candidates_count: how many results get a new score; the others keep their order below them. None: all.

    >>> affinity([[1.0, 0.0]], [[0.6, 0.8], [0.8, -0.6], [0.9, 0.5]], anchors=2).order.tolist()
    [[2, 1, 0]]
    """
    check_whole(anchors=anchors)
    check_whole(optional=True, candidates_count=candidates_count)
    asked = ask(queries, database, top, candidates, normalize, device)
    scores, places = asked.listed(None if candidates_count is None else max(candidates_count, asked.length, anchors))
    first = places[:, :candidates_count]
    width = max(1, first.shape[1])
    parts = []
    for part in blocks(len(first), max(1, CELLS // (width * (anchors + asked.database.shape[1])))):
        parts.append(_affine(asked.queries[part], asked.database, places[part], first[part], anchors))
    return _rescored(asked, torch.cat(parts), scores, places)


def _affine(queries: Tensor, database: Tensor, places: Tensor, first: Tensor, anchors: int) -> Tensor:
    """New scores `(b, M)` of the results `first`; minus infinity where there is none."""

    def rows(at: Tensor) -> Tensor:
        return database[at.clamp(min=0)] * (at >= 0)[:, :, None]

    columns = torch.cat((queries[:, None], rows(places[:, : anchors - 1])), dim=1)
    own = normalized(torch.einsum("bd,bld->bl", queries, columns))
    scores = torch.einsum("bml,bl->bm", normalized(rows(first) @ columns.mT), own)
    return scores.masked_fill(first < 0, -torch.inf)


def _rescored(asked: Asked, new: Tensor, scores: Tensor, places: Tensor) -> Ranking:
    """The first results by their new scores, equal ones as they were; the others behind, their scores lowered below the new ones."""
    width = new.shape[1]
    values, by = new.sort(dim=1, descending=True, stable=True)
    behind = scores[:, width:]
    if width and behind.shape[1]:
        behind = behind - (behind[:, :1] - values[:, -1:]).clamp(min=0).nan_to_num(0)
    values = torch.cat((values, behind), dim=1)[:, : asked.length]
    order = torch.cat((places[:, :width].gather(1, by), places[:, width:]), dim=1)[:, : asked.length]
    return ranking(values, order.masked_fill(values == -torch.inf, -1))

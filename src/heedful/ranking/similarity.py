"""Similarities by which lists are found and tables are filled: what a trained re-ranker sees of a list."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument
from heedful.ranking._asked import Asked, ask
from heedful.ranking.diffusing import Diffusion
from heedful.ranking.reciprocal import Neighbourhoods
from heedful.ranking.search import CELLS, Index, nearest

SIMILARITIES = ("cosine", "jaccard", "diffusion")
# Items up to which all similarities are kept at once: their square.
KEPT = 2**25


def similarity(
    name: str,
    queries: Any,
    database: Any,
    *,
    exclude_self: bool = True,
    normalize: bool = True,
    device: str | torch.device = "auto",
    **options: Any,
) -> Similarity:
    """A similarity of queries and database rows, which gives first lists and tables of the similarities inside a list.

    Args:
        name: `"cosine"`; `"jaccard"`, of k-reciprocal neighbourhoods (`k_reciprocal` with weight 0); or `"diffusion"` (`diffusion`).
        queries: `(nq, d)`; None: every row of the database asks the others.
        database: `(n, d)`.
        exclude_self: whether a row that asks the others is left out of its own list.
        normalize, device: as those of `cosine`.
        options: `k1` and `k2` of `"jaccard"`; `k`, `k_query`, `gamma` and `alpha` of `"diffusion"`; `index` of `"cosine"`, as that of `nearest`.

    >>> similar = similarity("cosine", None, [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
    >>> scores, places = similar.lists(2)
    >>> places.tolist()
    [[1, 2], [0, 2], [1, 0]]
    >>> similar.table(torch.tensor([0]), places[:1], 2)[0].tolist()
    [[1.0, 0.8], [0.8, 1.0], [0.0, 0.6]]
    """
    check_choice(SIMILARITIES, similarity=name)
    kinds: dict[str, type[Similarity]] = {"cosine": Cosine, "jaccard": Jaccard, "diffusion": Diffused}
    allowed = kinds[name].options
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise InvalidArgument(f"the similarity {name!r} has the options {', '.join(allowed)}; got {', '.join(unknown)}")
    return kinds[name](ask(queries, database, None, None, normalize, device), exclude_self, **options)


class Similarity:
    """Base of the similarities: those who know rows of similarities by blocks.

    Items are numbered together: the rows of the database, then the queries that are not among them.

    Attributes:
        count: rows of the database.
        queries: number of queries.
        device: where lists and tables lie.
    """

    options: tuple[str, ...] = ()

    def __init__(self, asked: Asked, exclude_self: bool) -> None:
        self._asked = asked
        self._hidden = asked.among and exclude_self
        self.count, self.queries, self.device = len(asked.database), len(asked.queries), asked.database.device
        self._items = self.count if asked.among else self.count + self.queries
        self._kept: Tensor | None = None

    def lists(self, k: int) -> tuple[Tensor, Tensor]:
        """Scores and places of the first k items of each query, `(queries, k)`, or of all there are; equal ones by their cosines."""
        check_whole(k=k)
        # Without `hide`, the database asks as if its rows were queries of somebody else.
        asked = self._asked if self._hidden else Asked(self._asked.queries, self._asked.database, False, None, None)
        return asked.top_rows(lambda numbers, cosines: self._scores(numbers), min(k, asked.most), self._block)

    def table(self, asked: Tensor, places: Tensor, anchors: int) -> Tensor:
        r"""Similarities inside lists, `(B, K + 1, L)`: of the query and its K results with the query and its first L - 1 results.

        $A_{ij} = \mathrm{sim}(c_i, z_j)$ with $c = (q, x_{r(1)}, \ldots, x_{r(K)})$ and $z = (q, x_{r(1)}, \ldots, x_{r(L-1)})$ (Ouyang et al. 2021,
        section 3.1); 1 for an item with itself. Rows and columns of missing results are 0, as are columns beyond the list.

        Args:
            asked: `(B,)`, the numbers of the queries.
            places: `(B, K)`, places in the database, -1 for none.
            anchors: L.
        """
        check_whole(anchors=anchors)
        first = asked if self._asked.among else asked + self.count
        members = torch.cat((first[:, None], places), dim=1)
        width = min(anchors, members.shape[1])
        table = self._tables(members.clamp(min=0), width)
        there = members >= 0
        table = table * (there[:, :, None] & there[:, None, :width])
        return torch.nn.functional.pad(table, (0, anchors - width)).to(self._asked.database.dtype)

    def cosines(self, asked: Tensor, places: Tensor) -> Tensor:
        """Cosines of queries, by their numbers `(B,)`, with the rows at `places` `(B, K)`; 0 where there is none."""
        rows = self._asked.database[places.clamp(min=0)]
        found = (rows @ self._asked.queries[asked][:, :, None])[:, :, 0]
        return found.masked_fill(places < 0, 0.0)

    @property
    def _block(self) -> int:
        return max(1, CELLS // (4 * self._items))

    def _scores(self, numbers: Tensor) -> Tensor:
        """Of queries by their numbers with the database, `(b, n)`: what lists are ordered by."""
        return self._rows(numbers if self._asked.among else numbers + self.count)[:, : self.count]

    def _rows(self, items: Tensor) -> Tensor:
        """Of items by their numbers with all items, `(b, items)`."""
        raise NotImplementedError

    def _scaled(self, values: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Similarities as tables hold them, of their similarities with themselves."""
        return values

    def _tables(self, members: Tensor, width: int) -> Tensor:
        if self._items**2 <= KEPT:
            if self._kept is None:
                everyone = torch.arange(self._items, device=self.device).split(self._block)
                rows = torch.cat([self._rows(part) for part in everyone])
                own = rows.diagonal()
                self._kept = self._scaled(rows, own[:, None], own[None]).to(self._asked.database.dtype)
            return self._kept[members[:, :, None], members[:, None, :width]]
        return torch.stack([self._inside(one, width) for one in members])

    def _inside(self, members: Tensor, width: int) -> Tensor:
        rows, own = [], []
        for part in members.split(self._block):
            values = self._rows(part)
            rows.append(values[:, members[:width]])
            own.append(values.gather(1, part[:, None])[:, 0])
        alone = torch.cat(own)
        return self._scaled(torch.cat(rows), alone[:, None], alone[None, :width])


class Cosine(Similarity):
    """Cosines, of vectors that are gathered for each list."""

    options = ("index",)

    def __init__(self, asked: Asked, exclude_self: bool, index: str | Index | None = None) -> None:
        super().__init__(asked, exclude_self)
        self.index = index

    def lists(self, k: int) -> tuple[Tensor, Tensor]:
        own = self._asked.own if self._hidden else None
        return nearest(self._asked.queries, self._asked.database, k, index=self.index, exclude=own, normalize=False)

    def _tables(self, members: Tensor, width: int) -> Tensor:
        first = self._asked.queries[members[:, :1] - (0 if self._asked.among else self.count)]
        rows = torch.cat((first, self._asked.database[members[:, 1:]]), dim=1)
        return rows @ rows[:, :width].mT


class Jaccard(Similarity):
    """The Jaccard similarity of k-reciprocal neighbourhoods."""

    options = ("k1", "k2")

    def __init__(self, asked: Asked, exclude_self: bool, k1: int = 20, k2: int = 6) -> None:
        check_whole(k1=k1, k2=k2)
        super().__init__(asked, exclude_self)
        items = asked.database if asked.among else torch.cat((asked.database, asked.queries))
        self._near = Neighbourhoods(items, k1, k2)

    def _rows(self, items: Tensor) -> Tensor:
        return self._near.jaccard(items)


class Diffused(Similarity):
    r"""What reaches one item of another's weight, $y_i^T (I - \alpha S)^{-1} y_j$; tables divide it by the roots of both items' own values."""

    options = ("k", "k_query", "gamma", "alpha")

    def __init__(
        self,
        asked: Asked,
        exclude_self: bool,
        k: int = 50,
        k_query: int = 10,
        gamma: float = 3.0,
        alpha: float = 0.99,
    ) -> None:
        check_whole(k=k, k_query=k_query)
        super().__init__(asked, exclude_self)
        self._spread = Diffusion(asked, k, k_query, gamma, alpha, many=True)

    def _scores(self, numbers: Tensor) -> Tensor:
        return self._spread.rows(numbers)

    def _rows(self, items: Tensor) -> Tensor:
        if self._asked.among:
            return self._spread.of_rows(items)
        rows = torch.empty(len(items), self.count, dtype=self._spread.dtype, device=self.device)
        inside = items < self.count
        rows[inside] = self._spread.of_rows(items[inside])
        rows[~inside] = self._spread.rows(items[~inside] - self.count)
        return torch.cat((rows, self._spread.received(rows)), dim=1)

    def _scaled(self, values: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return values / (first * second).clamp(min=1e-24).sqrt()

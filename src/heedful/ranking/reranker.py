"""`ListReranker`: a trained model that re-scores result lists by the similarities among their members."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful.bridges.estimator import device_of, dtype_of, placed
from heedful.bridges.predictors import Ranker
from heedful.bridges.samples import Samples, check_is_fitted, encoded, hold_out
from heedful.ranking._asked import ask
from heedful.ranking._lists import LISTS, candidate_lists, relevant_places
from heedful.ranking.encoder import ListEncoder
from heedful.ranking.looking import ListAttention
from heedful.ranking.metrics import mean_average_precision, ndcg, precision_at, recall_at, relevance_by_label
from heedful.ranking.result import Ranking
from heedful.ranking.similarity import SIMILARITIES, similarity

Measure = Literal["map", "p@1", "ndcg", "recall@10"]
MEASURES: dict[str, Callable[[np.ndarray, Any], float]] = {
    "map": mean_average_precision,
    "p@1": lambda order, relevant: precision_at(order, relevant, 1),
    "ndcg": ndcg,
    "recall@10": lambda order, relevant: recall_at(order, relevant, 10),
}
# Networks as they lie on a GPU, so that a query does not wait for their way there; no part of a model that is saved or pickled.
_COPIES: WeakKeyDictionary[nn.Module, tuple[Any, ListEncoder]] = WeakKeyDictionary()

BEHIND = 3.0
"""What is taken off the similarities of results that are not re-scored: cosines of the others are never below -1."""


class ListReranker(Ranker):
    r"""Re-ranks what a search found by the context of the list: contextual similarity aggregation (Ouyang et al. 2021).

    The first K results of a query are known to the network by their similarities to one another alone, never by their vectors; a small
    Transformer without positions compares the rows of that table (`ListEncoder`) and scores each result by its cosine with the query. So one
    trained model serves vectors of other dimensions, of other models and of other kinds of data.

    It learns from vectors with labels, `fit(X, y)`: each row asks for the others of its label; or from queries with what is relevant to
    them, `fit(queries, database=..., relevant=...)`. X may be a list of arrays: several descriptions of the same items, each with lists
    of its own (the published augmentation).

    Args:
        candidates: how many results of a list are re-scored; what lies behind keeps its order.
        anchors: how many members of the list, the query among them, a row's similarities are to; all by default.
        embed_dim, num_heads, depth, dropout, drop_path: the network's sizes; see `ListEncoder`. 768, 12, 2, 0.1, 0.1 are the published ones.
        attention: `"softmax"`, any kernel, or `"none"`: no attention, the control.
        affinity: the similarity in lists and tables: `"cosine"`, as published; `"jaccard"`, of k-reciprocal neighbours, which starts where
            that re-ranking ends; `"diffusion"`; or a function of (queries, database) that gives an object with `lists(k)`, `table(asked, places, anchors)` and,
            unless `weight` is 0, `cosines(asked, places)`.
        affinity_options: options of that similarity, as `{"k1": 30}`.
        temperature, reconstruction: t and the weight of the second loss; see `ListEncoder.losses`.
        weight: the share of the cosine of query and result in a score, the rest is the network's: $(1 - w) s_k + w\, q \cdot x_k$; 0 is as published.
            The network hardly tells apart what stands first, and a little of the cosine brings back the first places that are lost by that.
        own: whether a query counts as its own positive, as published. Below a temperature of 1 that term swallows the loss: then it must be False.
        keep: in every step so large a share of the database, between these two, is searched, drawn anew; (1, 1) is as published.
        normalize: whether vectors are brought to length 1; False trusts that they are.
        epochs, batch_size, lr, optimizer, schedule, warmup, weight_decay, clip: of training; lists in a batch. The learning rate falls as a cosine.
        validation_fraction: share of the labels whose rows ask nothing in training, and are measured after each epoch instead.
        patience: epochs without a better held-out loss before training stops; None trains for all epochs.
        random_state, device, predict_dtype, precision, progress, checkpoint_dir: as in all estimators here.

    >>> rng = np.random.default_rng(0)
    >>> centres = rng.normal(size=(12, 16)).repeat(6, 0)
    >>> X, y = centres + rng.normal(size=centres.shape), np.arange(72) // 6
    >>> model = ListReranker(candidates=20, embed_dim=16, num_heads=2, epochs=3, random_state=0, progress=False).fit(X, y)
    >>> model.rerank(X[:2], X[2:], top=5).order.shape
    (2, 5)
    """

    metric: ClassVar[str] = "average_precision"
    _fitted: ClassVar[tuple[str, ...]] = ("training_",)

    def __init__(
        self,
        candidates: int = 128,
        anchors: int | None = None,
        *,
        embed_dim: int = 256,
        num_heads: int = 4,
        depth: int = 2,
        attention: Any = "softmax",
        affinity: str | Callable[..., Any] = "cosine",
        affinity_options: Mapping[str, Any] | None = None,
        temperature: float = 2.0,
        reconstruction: float = 0.2,
        weight: float = 0.05,
        own: bool = True,
        keep: tuple[float, float] = (0.5, 1.0),
        dropout: float = 0.1,
        drop_path: float = 0.1,
        normalize: bool = True,
        epochs: int = 30,
        batch_size: int | str = 64,
        lr: float = 5e-4,
        optimizer: str = "AdamW",
        schedule: str = "cosine",
        warmup: float = 0.05,
        weight_decay: float = 0.01,
        clip: float | None = 1.0,
        validation_fraction: float | None = None,
        patience: int | None = None,
        random_state: Any = None,
        device: str | torch.device = "auto",
        predict_dtype: str = "float32",
        precision: str = "float32",
        progress: bool = True,
        checkpoint_dir: str | Path | None = None,
    ) -> None:
        self.candidates = candidates
        self.anchors = anchors
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.depth = depth
        self.attention = attention
        self.affinity = affinity
        self.affinity_options = affinity_options
        self.temperature = temperature
        self.reconstruction = reconstruction
        self.weight = weight
        self.own = own
        self.keep = keep
        self.dropout = dropout
        self.drop_path = drop_path
        self.normalize = normalize
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.optimizer = optimizer
        self.schedule = schedule
        self.warmup = warmup
        self.weight_decay = weight_decay
        self.clip = clip
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.random_state = random_state
        self.device = device
        self.predict_dtype = predict_dtype
        self.precision = precision
        self.progress = progress
        self.checkpoint_dir = checkpoint_dir

    def fit(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        groups: Any = None,
        database: Any = None,
        relevant: Any = None,
    ) -> Self:
        """Learns from the rows of X: each asks for the others with its label y, or, where `database` is given, for its rows that are `relevant` to it.

        `relevant` is a list with the places of each query, or a matrix (queries, rows of the database). Rows of weight 0 ask nothing, and rows of
        one entry of `groups` are held out together; by default rows of one label are.
        """
        self._asked_for = (database, relevant)
        try:
            return super().fit(X, y, sample_weight, groups=groups)
        finally:
            for name in ("_asked_for", "_lists_of", "_learned"):
                self.__dict__.pop(name, None)

    def rerank(
        self, queries: Any, database: Any = None, *, top: int | None = None, candidates: Any = None, index: Any = None
    ) -> Ranking:
        """The rows of `database` for each query, in their new order; without a database each row of `queries` asks the others.

        Of each list the first `candidates` results, of the model's parameter, are re-scored: their scores are means of two cosines. What lies behind
        keeps its order, with its first similarity less 3. `top` cuts the lists. `candidates` `(queries, m)` are places that a search of your own found,
        -1 where it found none: nothing else is in the lists then. `index` is passed on to `search.nearest`.
        """
        check_is_fitted(self, "network_")
        check_whole(optional=True, top=top)
        queries, database = (None, queries) if database is None else (queries, database)
        similar = self._similar(queries, database, index=index)
        if candidates is None:
            first, places = similar.lists(similar.count if top is None else max(top, self.candidates))
        else:
            first, places = candidate_lists(
                similar, ask(queries, database, None, candidates, self.normalize, similar.device)
            )
        near, far = (part.tensor_split([self.candidates], dim=1) for part in (places, first))
        scores = self._scores(similar, near[0])
        order = scores.argsort(dim=1, descending=True, stable=True)
        places = torch.cat((near[0].gather(1, order), near[1]), dim=1)
        scores = torch.cat((scores.gather(1, order), far[1].to(scores) - BEHIND), dim=1)
        return Ranking(places[:, :top].cpu().numpy(), scores[:, :top].cpu().numpy())

    def rerank_lists(self, similarities: Any, padding: Any = None, cosines: Any = None) -> Ranking:
        """New orders of lists of which nothing but similarities is known, `(lists, K + 1, L)`: of the query, in row 0, and of each result to the query and the first L - 1 results.

        `padding` `(lists, K + 1)` is True where a list has no such member. `cosines` `(lists, K)` are what `weight` is the share of; without them the
        similarities to the query are. Places in `order` count the results of a list from 0.
        """
        check_is_fitted(self, "network_")
        tables = torch.as_tensor(np.asarray(similarities, dtype=np.float32))
        if tables.ndim != 3 or tables.shape[1] < 2:
            raise InvalidArgument(
                f"similarities must be (lists, results + 1, anchors), the query first; got shape {tuple(tables.shape)}"
            )
        hidden = None if padding is None else torch.as_tensor(np.asarray(padding, dtype=bool))
        if hidden is not None and hidden.shape != tables.shape[:2]:
            raise InvalidArgument(
                f"padding must be {tuple(tables.shape[:2])}, one for each row of a list; got {tuple(hidden.shape)}"
            )
        known = tables if hidden is None else tables[~hidden]
        if not torch.isfinite(known).all():
            raise InvalidArgument("similarities must be finite; give padding where a list has no such member")
        hidden = torch.zeros(tables.shape[:2], dtype=torch.bool) if hidden is None else hidden
        first = tables[:, 1:, 0] if cosines is None else torch.as_tensor(np.asarray(cosines, dtype=np.float32))
        if first.shape != (len(tables), tables.shape[1] - 1):
            raise InvalidArgument(
                f"cosines must be {(len(tables), tables.shape[1] - 1)}, one for each result; got {tuple(first.shape)}"
            )
        parts = zip(tables.split(LISTS), hidden.split(LISTS), first.split(LISTS), strict=True)
        scores = torch.cat([self._mixed(*part) for part in parts])
        order = scores.argsort(dim=1, descending=True, stable=True)
        scores = scores.gather(1, order)
        order = order.masked_fill(scores == -torch.inf, -1)
        return Ranking(order.cpu().numpy(), scores.cpu().numpy())

    def attention_between(self, query: Any, database: Any, *, candidates: Any = None) -> ListAttention:
        """How the members of one query's list attend to one another, with their scores: what the network looks at when it re-scores them.

        `query` is one vector `(d,)`. The list has the first `candidates` results, of the model's parameter, or those of the argument, places `(m,)` that a
        search of your own found. `lens.observe(model.network_, tables)` records the same weights with queries, keys and values.
        """
        check_is_fitted(self, "network_")
        asked = np.asarray(query, dtype=np.float32)
        if asked.ndim != 1:
            raise InvalidArgument(f"query must be one vector, (d,); got shape {asked.shape}")
        similar = self._similar(asked[None], database)
        if candidates is None:
            places = similar.lists(self.candidates)[1]
        else:
            chosen = ask(asked[None], database, None, np.asarray(candidates)[None], self.normalize, similar.device)
            places = candidate_lists(similar, chosen)[1][:, : self.candidates]
        places = places[:, places[0] >= 0]
        network, device, dtype = self._placed()
        table = similar.table(torch.zeros(1, dtype=torch.long, device=places.device), places, self._anchors)
        with torch.no_grad():
            weights = network.coefficients(table.to(device, dtype))[0].float()
        scores = self._scores(similar, places)[0]
        return ListAttention(places[0].cpu().numpy(), scores.cpu().numpy(), weights.cpu().numpy())

    def predict(self, X: Any, database: Any = None) -> np.ndarray:
        """`rerank(X, database).order`: places in the database, for each row of X, the best first."""
        return self.rerank(X, database).order

    def score(self, X: Any, y: Any, groups: Any = None, *, measure: Measure = "map") -> float:
        """How well rows of X find the others with their label y: mean average precision, or `"p@1"`, `"ndcg"`, `"recall@10"`."""
        check_choice(Measure, measure=measure)
        order = self.predict(X)
        labels = np.asarray(y)
        if len(labels) != len(order):
            raise InvalidArgument(f"y must have a label for each of the {len(order)} rows of X; got {len(labels)}")
        return float(MEASURES[measure](order, relevance_by_label(labels)))

    # Learning

    def _check(self) -> None:
        check_whole(candidates=self.candidates, depth=self.depth)
        check_whole(optional=True, anchors=self.anchors)
        check_number(0, temperature=self.temperature)
        check_number(least=0, reconstruction=self.reconstruction)
        check_number(least=0, most=1, weight=self.weight)
        if self.own and self.temperature < 1:
            raise InvalidArgument(
                f"with temperature={self.temperature} a query that is its own positive swallows the loss; give own=False"
            )
        if not callable(self.affinity):
            check_choice(SIMILARITIES, affinity=self.affinity)
        if not isinstance(self.keep, Sequence) or len(self.keep) != 2:
            raise InvalidArgument(f"keep must be two shares, as (0.5, 1); got {self.keep!r:.80}")
        least, most = self.keep
        check_number(0, most=1, keep=least)
        check_number(0, most=1, keep=most)
        if least > most:
            raise InvalidArgument(f"keep must be two shares, the smaller first; got {self.keep!r}")
        super()._check()
        self._one(device="meta")

    def _one(self, device: Any = None) -> ListEncoder:
        return ListEncoder(
            self._anchors, self.embed_dim, self.num_heads, self.depth, None, self.dropout, self.drop_path,
            kernel=self.attention, device=device,
        )  # fmt: skip

    @property
    def _anchors(self) -> int:
        return self.candidates + 1 if self.anchors is None else self.anchors

    def _network(self) -> nn.Module:
        return self._one()

    def _read(
        self, X: Any, y: Any = None, sample_weight: Any = None, groups: Any = None, *, fitting: bool = False
    ) -> Samples:
        database, relevant = self._asked_for
        several = isinstance(X, list | tuple) and all(np.ndim(part) == 2 for part in X) and len(X) > 0
        parts = tuple(np.asarray(part) for part in (X if several else (X,)))
        if database is not None:
            if several:
                raise InvalidArgument(
                    "several descriptions go with labels, fit([X1, X2], y); give one array of queries"
                )
            if relevant is None or y is not None:
                raise InvalidArgument("with a database give relevant, the places for each query, and no y")
            return Samples(parts, None, sample_weight, groups)
        if y is None or relevant is not None:
            raise InvalidArgument("give labels, fit(X, y), or fit(queries, database=..., relevant=...)")
        if any(len(part) != len(y) for part in parts):
            sizes = ", ".join(str(len(part)) for part in parts)
            raise InvalidArgument(f"X and y must have as many rows; got {sizes} and {len(y)}")
        return Samples(parts, encoded(np.asarray(y))[1], sample_weight, groups)

    def _labelled(self, samples: Samples) -> Samples:
        weights = None if samples.weights is None else np.asarray(samples.weights, dtype=float)
        if weights is not None and (weights.shape != (len(samples),) or not np.isin(weights, (0, 1)).all()):
            raise InvalidArgument("sample_weight of a re-ranker is 0 or 1 for each row: whether it asks in training")
        self._learned = np.arange(len(samples)) if weights is None else np.flatnonzero(weights)
        if not len(self._learned):
            raise InvalidArgument("sample_weight leaves no row that asks")
        return replace(samples, weights=None)

    def _split(self, samples: Samples) -> tuple[np.ndarray, np.ndarray]:
        together = samples.target if samples.groups is None else samples.groups
        learn, held = hold_out(len(samples), self.validation_fraction or 0, self.seed_, groups=together)
        return np.intersect1d(learn, self._learned), held

    def _parts(self, samples: Samples, learn: np.ndarray, held: np.ndarray) -> dict[str, Any]:
        database, relevant = self._asked_for
        self._lists_of = []
        depth = int(np.ceil(self.candidates / self.keep[0]))
        for part in samples.inputs:
            similar = self._similar(None, part) if database is None else self._similar(part, database)
            places = similar.lists(min(depth, similar.count))[1]
            if samples.target is not None:
                codes = torch.from_numpy(samples.target).to(places.device)
                good = (codes[places] == codes[:, None]) & (places >= 0)
            else:
                good = relevant_places(places, relevant, similar.count)
            self._lists_of.append((similar, places, good))
        count = len(samples)
        asks = np.concatenate([number * count + learn for number in range(len(samples.inputs))])
        good = torch.cat([part[2] for part in self._lists_of]).any(1).cpu().numpy()
        # A query that finds nothing relevant has nothing to teach.
        asks = asks[good[asks]]
        if not len(asks):
            raise InvalidArgument(
                f"among the first {depth} results of no query is a relevant one; there is nothing to learn from"
            )
        held = held[good[held]]
        return {
            "data": ((torch.from_numpy(asks),), None, None),
            "held_out": ((torch.from_numpy(held),), None, None) if len(held) else None,
        }

    def _similar(self, queries: Any, database: Any, index: Any = None) -> Any:
        if callable(self.affinity):
            return self.affinity(queries, database, **dict(self.affinity_options or {}))
        options = dict(self.affinity_options or {}) | ({} if index is None else {"index": index})
        return similarity(
            self.affinity, queries, database, normalize=self.normalize, device=device_of(self.device), **options
        )

    def _batch(self, numbers: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Tables, what is relevant, and which members are not there, of queries by number."""
        count = len(self._lists_of[0][1])
        tables, goods, hidden = [], [], []
        for number, (similar, places, good) in enumerate(self._lists_of):
            asked = numbers[numbers // count == number].to(places.device) % count
            if not len(asked):
                continue
            at, relevant = places[asked], good[asked]
            if keep:
                share = torch.empty((), device=at.device).uniform_(*self.keep)
                stays = torch.rand(similar.count + 1, device=at.device) < share
                away = ~stays[at] | (at < 0)
                order = away.to(torch.int8).argsort(dim=1, stable=True)
                at, relevant = (part.gather(1, order) for part in (at.masked_fill(away, -1), relevant & ~away))
            at, relevant = at[:, : self.candidates], relevant[:, : self.candidates]
            tables.append(similar.table(asked, at, self._anchors))
            goods.append(relevant)
            hidden.append(nn.functional.pad(at < 0, (1, 0)))
        parts = (torch.cat(tables).float().to(numbers.device), torch.cat(goods), torch.cat(hidden))
        return parts[0], *(part.to(numbers.device) for part in parts[1:])  # type: ignore[return-value]

    def _loss(self, network: nn.Module, inputs: Any, target: Any, weight: Any) -> Tensor:
        contrast, distance = self._list_losses(network, *self._batch(inputs[0], keep=self.keep != (1, 1)))
        return (contrast + self.reconstruction * distance).mean()

    def _list_losses(self, network: nn.Module, tables: Tensor, good: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(network, ListEncoder)
        return network.losses(tables, good, hidden, temperature=self.temperature, own=self.own)

    def _measure(self, network: nn.Module, inputs: Any, target: Any, weight: Any) -> Mapping[str, Tensor]:
        assert isinstance(network, ListEncoder)
        tables, good, hidden = self._batch(inputs[0], keep=False)
        contrast, distance = self._list_losses(network, tables, good, hidden)
        order = network.scores(tables, hidden).argsort(dim=1, descending=True, stable=True)
        hits = good.gather(1, order).float()
        ranks = torch.arange(1, hits.shape[1] + 1, device=hits.device)
        precision = (hits.cumsum(1) / ranks * hits).sum(1) / hits.sum(1).clamp_min(1)
        return {"loss": contrast + self.reconstruction * distance, "average_precision": precision}

    # Answering

    def _scores(self, similar: Any, places: Tensor) -> Tensor:
        """New scores `(queries, K)`; -inf where there is no result."""
        parts = []
        asked = torch.arange(len(places), device=places.device)
        for at, chosen in zip(asked.split(LISTS), places.split(LISTS), strict=True):
            hidden = nn.functional.pad(chosen < 0, (1, 0))
            table = similar.table(at, chosen, self._anchors)
            first = similar.cosines(at, chosen) if self.weight else table.new_zeros(chosen.shape)
            parts.append(self._mixed(table, hidden, first))
        return torch.cat(parts).to(places.device)

    def _mixed(self, tables: Tensor, hidden: Tensor, cosines: Tensor) -> Tensor:
        """Scores of the network and cosines, each with its weight."""
        network, device, dtype = self._placed()
        with torch.no_grad():
            scores = network.scores(tables.to(device, dtype), hidden.to(device)).float()
        # Where there is no result, a table of the user's may hold anything.
        mixed = (1 - self.weight) * scores + self.weight * cosines.to(scores)
        return torch.where(hidden[:, 1:].to(device), scores, mixed)

    def _placed(self) -> tuple[ListEncoder, torch.device, torch.dtype]:
        device = device_of(self.device)
        dtype = dtype_of(self.predict_dtype, device)
        # Whoever changes weights in place raises their version.
        state = (device, dtype, *((id(weight), weight._version) for weight in self.network_.parameters()))
        known = _COPIES.get(self.network_)
        if known is None or known[0] != state:
            network = placed(self.network_, device, dtype)
            assert isinstance(network, ListEncoder)
            if network is self.network_:
                _COPIES.pop(network, None)
                return network, device, dtype
            known = _COPIES[self.network_] = (state, network)
        return known[1], device, dtype

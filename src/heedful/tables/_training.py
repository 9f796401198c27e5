"""What `DatapointClassifier` and `DatapointRegressor` share while they learn: folds, steps, what is hidden, what is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heedful._checks import check_choice, check_number, check_whole
from heedful.bridges.estimator import Estimator
from heedful.bridges.record import Hyperparameters
from heedful.bridges.samples import Samples
from heedful.tables._columns import Columns, read_rows, weighed
from heedful.tables._folds import drawn_folds
from heedful.tables._masking import Masking, Tradeoff, feature_loss, target_losses, tradeoff_at
from heedful.tables._presets import PRESETS
from heedful.tables.network import Members, Rows, TableNetwork

STEPS = 10
"""Steps of an epoch, if all rows are seen in as many."""

ROWS = 1024
"""Rows of a step by default, at most."""

MEASURED = 2048
"""Held-out rows, and rows that they see, in what is measured after an epoch, at most."""

_NETWORK = (
    "layers", "embed_dim", "num_heads", "row_encoder", "row_tokens", "between_columns", "numbers", "linear", "votes", "residual", "norm_kv", "scale",
    "eps", "expansion", "dropout", "attention_dropout",
)  # fmt: skip
_TRAINING = (
    "optimizer",
    "lr",
    "schedule",
    "flat",
    "warmup",
    "weight_decay",
    "clip",
    "clip_value",
    "epochs",
    "patience",
)


@dataclass
class Stored:
    """The table that is learned from, as tensors on one device; row i is held out from member `folds[i]`."""

    rows: Rows
    folds: Tensor
    weights: Tensor | None

    def to(self, device: torch.device) -> Stored:
        rows = Rows(*(part.to(device) for part in self.rows))
        return Stored(rows, self.folds.to(device), None if self.weights is None else self.weights.to(device))


class Learning(Estimator):
    """Training of members on one table, each of which leaves out rows of its own."""

    columns_: Columns

    def _setting(self, name: str) -> Any:
        """A parameter, or what the preset says where it is None."""
        given = getattr(self, name, None)
        if name in ("between_columns", "votes") and self._setting("row_encoder") == "flatten":
            # Rows that are whole tables of cells have no vector of their own to vote by.
            return name == "between_columns"
        return self._preset[name] if given is None else given

    @property
    def _preset(self) -> dict[str, Any]:
        return PRESETS[self.preset]

    @property
    def _votes(self) -> bool:
        """Whether stored rows vote; those that look at no others answer by themselves."""
        return self._setting("votes") and self.between_rows

    def _check(self) -> None:
        check_choice(tuple(PRESETS), preset=self.preset)
        check_choice(("inductive", "transductive"), mode=self.mode)
        check_choice(Tradeoff, tradeoff_schedule=self.tradeoff_schedule)
        check_whole(members=self._setting("members"))
        check_whole(optional=True, context_size=self.context_size, inducing=self.inducing)
        check_number(least=0, high=1, p_feature=self._setting("p_feature"))
        check_number(0, most=1, p_target=self._setting("p_target"))
        check_number(least=0, most=1, tradeoff=self._setting("tradeoff"))
        super()._check()
        self._one((0,), 2, device="meta")

    def _hyperparameters(self, count: int, seed: int) -> Hyperparameters:
        size = self.batch_size
        if size != "auto":
            check_whole(2, batch_size=size)
        options = {name: self._setting(name) for name in _TRAINING}
        return Hyperparameters(**options, batch_size=1, seed=seed, precision=self.precision)

    def _read(
        self, X: Any, y: Any = None, sample_weight: Any = None, groups: Any = None, *, fitting: bool = False
    ) -> Samples:
        cells, y = read_rows(self, X, y, fitting=fitting)
        return Samples((cells,), y, sample_weight, groups)

    def _split(self, samples: Samples) -> tuple[np.ndarray, np.ndarray]:
        everything = np.arange(len(samples))
        known = self._known(samples)
        self._folds = np.full(len(samples), self._setting("members"))
        self._folds[known] = drawn_folds(samples[known], self._setting("members"), self.validation_fraction, self.seed_)
        return everything, everything[:0]

    def _known(self, samples: Samples) -> np.ndarray:
        """Places of rows whose target is there: not of those that `fit` was given unlabelled."""
        return np.arange(len(samples) - getattr(self, "_unlabelled", 0))

    def _tensors(self, samples: Samples) -> tuple[Tensor, ...]:
        """Standardised values and which are missing, `(1, rows, columns)`."""
        cells = self.columns_.standardised(samples.inputs[0])
        missing = np.isnan(cells)
        return torch.from_numpy(np.nan_to_num(cells)).float()[None], torch.from_numpy(missing)[None]

    def _codes(self, target: np.ndarray) -> Tensor:
        """Targets as the network takes them."""
        raise NotImplementedError

    def _network(self) -> Members:
        levels = tuple(0 if part is None else len(part) for part in self.columns_.levels)
        networks = []
        for number in range(self._setting("members")):
            torch.manual_seed(self.seed_ + 1000 * number)
            networks.append(self._one(levels, self._outputs_count))
        return Members(networks)

    def _one(self, levels: Sequence[int], outputs: int, device: Any = None) -> TableNetwork:
        options = {name: self._setting(name) for name in _NETWORK}
        options["votes"] = self._votes
        return TableNetwork(
            levels, outputs, between_rows=self.between_rows, inducing=self.inducing, device=device, **options
        )

    def _start(self, network: nn.Module, samples: Samples) -> None:
        """Where there is a linear map of cells, members start as the linear model of the rows that they learn from."""
        if not self._setting("start"):
            return
        assert isinstance(network, Members)
        assert samples.target is not None
        known = self._known(samples)
        values, missing = self._tensors(samples)
        for number, member in enumerate(network):
            rows = known[self._folds[known] != number]
            cells = member.embedding.dense(values[:, rows], missing[:, rows])[0].detach().numpy()
            weights = None if samples.weights is None else samples.weights[rows]
            slope, offset = self._linear(cells.astype(np.float64), samples.target[rows], weights)
            assert member.linear_head is not None
            assert member.feature_linear is not None
            count = sum(not levels for levels in member.levels)
            with torch.no_grad():
                member.feature_linear.weight[:count].copy_(torch.from_numpy(by_others(cells)[:count]))
                for part in member.feature_head.parameters():
                    part.zero_()
                if not self._setting("p_feature"):
                    # Nothing else is learned of a category: its most frequent level.
                    shares = torch.from_numpy(cells[:, count:].mean(0)).clamp_min(0.5 / len(cells)).log()
                    member.feature_head.shared.bias[count:].copy_(shares)  # type: ignore[union-attr]
                member.linear_head.weight.copy_(torch.from_numpy(slope))
                member.target_head.weight.zero_()
                member.target_head.bias.copy_(torch.from_numpy(offset))

    def _linear(
        self, cells: np.ndarray, target: np.ndarray, weights: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Weights `(outputs, cells)` and offsets of a linear model."""
        raise NotImplementedError

    def _parts(self, samples: Samples, learn: np.ndarray, held: np.ndarray) -> dict[str, Any]:
        values, missing = self._tensors(samples)
        hidden = torch.ones(1, len(samples), dtype=torch.bool)
        hidden[0, self._known(samples)] = False
        assert samples.target is not None
        weights = None
        if samples.weights is not None:
            weights = torch.from_numpy(samples.weights / samples.weights.mean()).float()
        folds = torch.from_numpy(self._folds)
        self._stored = Stored(Rows(values, missing, self._codes(samples.target)[None], hidden), folds, weights)
        self._size = min(ROWS, len(samples)) if self.batch_size == "auto" else self.batch_size
        self._epoch_steps = max(STEPS, -(-len(samples) // self._size))
        held_from = [number for number in range(self._setting("members")) if (self._folds == number).any()]
        return {
            "data": list(range(self._epoch_steps)),
            "held_out": held_from or None,
            "collate": lambda cases: (torch.tensor(cases), None, None),
        }

    @property
    def _masking(self) -> Masking:
        levels = tuple(0 if part is None else len(part) for part in self.columns_.levels)
        shares = {name: self._setting(name) for name in ("p_feature", "p_target", "noise")}
        return Masking(**shares, levels=levels, outputs=self._outputs_count)

    def _loss(self, network: nn.Module, inputs: Any, target: Any, weight: Any) -> Tensor:
        assert isinstance(network, Members)
        stored = self._on(inputs.device)
        steps = self._setting("epochs") * self._epoch_steps
        share = tradeoff_at(self._setting("tradeoff"), self.tradeoff_schedule, int(network.step), steps)
        share = share if self._setting("p_feature") else 0.0
        network.step += 1
        total = stored.rows.values.new_zeros(())
        for number, member in enumerate(network):
            places = torch.nonzero(stored.folds != number)[:, 0]
            if len(places) > self._size:
                places = places[torch.randperm(len(places), device=places.device)[: self._size]]
            rows = stored.rows.take(places)
            drawn = self._masking.draw(rows)
            answers = member(drawn.rows, self._keys_hidden(drawn.rows, drawn.targets))
            losses = target_losses(answers.target, rows.target)
            weights = drawn.targets.to(losses)
            if stored.weights is not None:
                losses = losses * stored.weights[places]
            guess = (losses * weights).sum() / weights.sum().clamp_min(1)
            loss = (1 - share) * guess
            if share:
                cells = feature_loss(answers, rows, drawn.cells, member.order, member.levels)
                loss = loss + share * cells
            total = total + loss
        return total

    def _keys_hidden(self, rows: Rows, targets: Tensor) -> Tensor | None:
        """Rows that others do not look at: where the target is asked for, unless no target is ever an input, or rows that are asked belong to the table."""
        if self.mode == "transductive" or self._setting("p_target") >= 1:
            return None
        hidden = targets | rows.hidden
        # Where every target was drawn there is nothing to look at but what is asked.
        return hidden & ~hidden.all(1, keepdim=True)

    def _on(self, device: torch.device) -> Stored:
        if self._stored.folds.device != device:
            self._stored = self._stored.to(device)
        return self._stored

    def _measure(self, network: nn.Module, inputs: Any, target: Any, weight: Any) -> Mapping[str, Tensor]:
        parts = [self._measured(network, int(number)) for number in inputs]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _measured(self, network: nn.Module, number: int) -> dict[str, Tensor]:
        stored = self._on(next(network.parameters()).device)
        held, seen = (_some(places, MEASURED) for places in (stored.folds == number, stored.folds != number))
        answers, target = self._held_answers(network, number, held, seen)
        weights = None if stored.weights is None else stored.weights[held]
        losses = target_losses(answers[None], target[None])[0]
        return {"loss": losses if weights is None else weights * losses, **self._judged(answers, target)}

    def _held_answers(
        self, network: nn.Module, number: int, held: Tensor | None = None, seen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What a member says of rows held out from it, seeing others, by default all; and their targets."""
        assert isinstance(network, Members)
        stored = self._on(next(network.parameters()).device)
        member = list(network)[number]
        held = stored.folds == number if held is None else held
        seen = stored.folds != number if seen is None else seen
        blind = self._setting("p_target") >= 1
        context = stored.rows.take(seen)
        asked = stored.rows.take(held)
        context = context._replace(hidden=torch.ones_like(context.hidden)) if blind else context
        asked = asked._replace(hidden=torch.ones_like(asked.hidden))
        with torch.no_grad():
            memory = member.remember(context, None if blind or self.mode == "transductive" else context.hidden)
            answers = member(asked, memory=memory).target[0].float()
        return answers, stored.rows.target[0, held]

    def _judged(self, answers: Tensor, target: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, *, groups: Any = None, unlabelled: Any = None
    ) -> Any:
        """Learns from X and y; goes on where a killed call with the same `checkpoint_dir` stopped.

        y may be a column of the frame X: `target` names it. `sample_weight` has a number for each row: how much its loss counts; rows of weight 0 are left out.
        Rows of one entry of `groups` are held out together. `unlabelled` are further rows without a target: their features are learned from, and with
        `mode="transductive"` the others look at them.
        """
        X, y, sample_weight, groups, self._chosen = weighed(X, y, sample_weight, groups)
        self._unread = unlabelled
        try:
            return super().fit(X, y, sample_weight, groups=groups)
        finally:
            for name in ("_unread", "_chosen", "_unlabelled", "_stored", "_folds", "_size", "_epoch_steps"):
                self.__dict__.pop(name, None)

    def _labelled(self, samples: Samples) -> Samples:
        samples = super()._labelled(samples)
        if self._unread is None:
            return samples
        more = self._read(self._unread).inputs[0]
        self._unlabelled = len(more)
        assert samples.target is not None
        cells = np.concatenate((samples.inputs[0], more))
        filler = np.repeat(samples.target[:1], len(more), axis=0)
        weights = None if samples.weights is None else np.concatenate((samples.weights, np.ones(len(more))))
        groups = None
        if samples.groups is not None:
            groups = np.concatenate((samples.groups, samples.groups.max() + 1 + np.arange(len(more))))
        return replace(
            samples, inputs=(cells,), target=np.concatenate((samples.target, filler)), weights=weights, groups=groups
        )


def _some(chosen: Tensor, most: int) -> Tensor:
    """The places where `chosen` holds, or `most` of them, the same in every call."""
    places = torch.nonzero(chosen)[:, 0]
    if len(places) <= most:
        return places
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(len(places)))
    return places[order[:most].to(places.device)]


def by_others(cells: np.ndarray, ridge: float = 0.1) -> np.ndarray:
    r"""The linear prediction of each column by the others, of standardised cells: $W_{jk} = -P_{jk} / P_{jj}$ for $k \ne j$, with P the inverse of the covariance plus `ridge`.

    >>> first = np.random.default_rng(0).normal(size=1000)
    >>> by_others(np.stack((first, first), axis=1)).round(1).tolist()
    [[0.0, 0.9], [0.9, 0.0]]
    """
    covariance = np.cov(cells, rowvar=False).reshape(cells.shape[1], -1)
    precision = np.linalg.inv(covariance + ridge * np.eye(len(covariance)))
    weights = -precision / np.diag(precision)[:, None]
    np.fill_diagonal(weights, 0.0)
    return weights

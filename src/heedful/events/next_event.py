"""The next event of a sequence, its type and its time, as a scikit-learn estimator."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful._text import quantity
from heedful.bridges.estimator import Estimator, Inputs
from heedful.bridges.frames import Frames
from heedful.bridges.samples import Samples, hold_out, moments, weights_of
from heedful.events import _covariates
from heedful.events._answers import Answering, judged, positive, sort_of
from heedful.events._sequences import Columns, Sequences, chosen, label_codes, read_sequences
from heedful.events._windows import EventSamples, Windows
from heedful.events.cycles import as_wait, found
from heedful.events.network import EventNetwork, Time

UNKNOWN = 0.01
"""Share of past types that a training step hides, so that a type never seen has a meaning."""


class NextEvent(Answering, Estimator):
    r"""Foresees the next event of a sequence: its type, its type if it happens at a given time, and when.

    X is a list of (types, times), a dict with `types` and `times` (lists of arrays, or flat arrays with `offsets`) and perhaps `starts`, `ends`
    (when each sequence was watched), `marks`, `static`; an array (sequences, events, 2); or a data frame with a row for each event and columns for sequence, time and
    type. Types are numbers or strings; without types only times are foreseen. Times are numbers in any unit or dates (then in seconds), and may be equal.

    With `at=None` the time of the next event is unknown; with an array it is given, and every answer says "if it happens then". `score` and `evaluate` foresee
    every event of X from those before it, and also take `at="true"`: each one's own time. A model that knows when the next event happens is not comparable with one that does not.

    Loss: cross-entropy of the next type, with its time unknown and known, and $-\log p$ of the wait under a log-normal mixture, with the tail
    behind the last event where the sequence's end is known (Xu et al. 2019, "Self-attention with functional time representation learning"; network: `EventNetwork`).

    Args:
        embed_dim: width of the network.
        num_heads: heads; they must divide the width.
        layers: layers of attention between events.
        target_layers: layers in which a given time attends to the events; 0 leaves answers for a given time out, and is about twice as fast.
        hidden: width inside the feed-forward layers; none is 4 x `embed_dim`.
        dropout: share of activations that training drops.
        time: how gaps are encoded: `"linear"` (with logarithm), `"bochner"`, `"mercer"`, `"time2vec"`, `"tgat"`, or `"order"` (times are ignored: the control).
        interaction: how attention sees times: `"rotary"`, `"bias"`, `"decay"`, `"bucket"`, `"add"`, `"concat"`, `"concat_mlp"` or `"residual"`; see `heedful.nn.TimeAttention`.
        rotate_values: with `"rotary"`, rotates values too, which carries phase along: for cycles in which types follow one another.
        clock: calendar periods: `"auto"` (those that a periodogram finds), `"none"`, or periods with commas between them, as `"1d,7d"` for dates or `"1440"` in units of time. In
            Python also a list.
        degree: harmonics of each calendar period.
        trend: encodes absolute time, for sequences whose next events lie in the span of the training; worse than nothing for later ones.
        components: log-normal laws in the density of the wait; 0 leaves it out.
        tied: predicts a type by its embedding; for large catalogues.
        negatives: how many types are drawn for the loss in place of all, for large catalogues; none takes all.
        history: events that an answer looks back on, at most.
        sequence: column of a data frame that says of which sequence a row is.
        time_column: column of a data frame with the time.
        type: column of a data frame with the type.
        marks: further columns of each event, with commas between them; in Python also a list. Text is read as levels, each with a vector of its own.
        static: columns that do not change within a sequence.
        sort: brings events in the order of their times; else times that fall are refused.
        epochs: passes over the data, at most.
        batch_size: sequences in a batch; `"auto"` is 16, of more than 1,000 sequences up to 256.
        lr: learning rate of RAdam at its highest, gradients clipped to norm 4.
        schedule: how the learning rate falls: `"cosine"` (to 0 over all epochs), `"flat-cosine"` or `"flat"`.
        weight_decay: weight decay of the optimizer.
        precision: what is trained in, `"float32"` or `"bfloat16"` (where that is safe); `"auto"` is bfloat16 on a GPU. Times and phases are float64 in both.
        validation_fraction: share of the sequences to hold out; with 0 or none all are learned from, for all epochs. The weights
            of the epoch with the least held-out loss are kept.
        patience: stop after this many epochs without a better held-out loss.
        random_state: decides split, first weights, order and dropout. On the CPU the result is the same bit for bit.
        device: where it trains and answers: `"auto"` (CUDA where there is one), `"cpu"`, `"cuda"`, `"cuda:1"` or `"mps"`.
        predict_dtype: what answers are computed in, `"float32"` or `"float64"`; times are always float64. May be set after `fit`.
        progress: shows a bar on standard error.
        checkpoint_dir: a folder in which the training is kept after every epoch, until it ends. `fit` called again after a
            kill, with equal parameters and data, goes on there and reaches the same weights. One folder serves many fits.
        devices: how many devices train on each machine, as Lightning takes it; see `docs/scale.md`.
        num_nodes: how many machines train.
        strategy: how processes work together, as Lightning calls it: `"ddp"`.

    Fitted: `classes_` (types), `clock_` and `cycles_` (periods found or given), `gap_moments_` (mean and deviation of log gaps), `least_gap_`, `network_`,
    `training_` (every epoch), `is_dated_`, `seed_`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> def sequence():  # short waits are followed by "b", long ones by "a"
    ...     gaps = rng.exponential(1.0, 30)
    ...     return np.where(gaps < 0.7, "b", "a"), np.cumsum(gaps)
    >>> X = [sequence() for _ in range(80)]
    >>> model = NextEvent(embed_dim=16, num_heads=2, layers=1, epochs=20, lr=0.01, random_state=0).fit(X)
    >>> model.score(X, at="true") > 0.9, model.predict(X[:2], at=[X[0][1][-1] + 0.1, X[1][1][-1] + 3.0]).tolist()
    (True, ['b', 'a'])
    """

    metric: ClassVar[str] = "accuracy"
    _fitted: ClassVar[tuple[str, ...]] = (
        "classes_", "is_typed_", "is_dated_", "is_started_", "clock_", "cycles_", "span_", "gap_moments_", "least_gap_", "covariates_", "seed_",
        "training_",
    )  # fmt: skip

    def __init__(
        self,
        embed_dim: int = 64,
        num_heads: int = 4,
        *,
        layers: int = 2,
        target_layers: int = 1,
        hidden: int | None = None,
        dropout: float = 0.1,
        time: Time = "linear",
        interaction: str = "rotary",
        rotate_values: bool = False,
        clock: str | Sequence[Any] = "auto",
        degree: int = 8,
        trend: bool = False,
        components: int = 16,
        tied: bool = False,
        negatives: int | None = None,
        history: int = 128,
        sequence: str = "sequence",
        time_column: str = "time",
        type: str = "type",
        marks: str | Sequence[str] | None = None,
        static: str | Sequence[str] | None = None,
        sort: bool = False,
        epochs: int = 30,
        batch_size: int | str = "auto",
        lr: float = 4e-3,
        schedule: str = "cosine",
        weight_decay: float = 0.0,
        precision: str = "auto",
        validation_fraction: float | None = 0.1,
        patience: int | None = 5,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        predict_dtype: str = "float32",
        progress: bool = False,
        checkpoint_dir: str | Path | None = None,
        devices: int | str = 1,
        num_nodes: int = 1,
        strategy: str = "auto",
    ) -> None:
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.layers = layers
        self.target_layers = target_layers
        self.hidden = hidden
        self.dropout = dropout
        self.time = time
        self.interaction = interaction
        self.rotate_values = rotate_values
        self.clock = clock
        self.degree = degree
        self.trend = trend
        self.components = components
        self.tied = tied
        self.negatives = negatives
        self.history = history
        self.sequence = sequence
        self.time_column = time_column
        self.type = type
        self.marks = marks
        self.static = static
        self.sort = sort
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.schedule = schedule
        self.weight_decay = weight_decay
        self.precision = precision
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.random_state = random_state
        self.device = device
        self.predict_dtype = predict_dtype
        self.progress = progress
        self.checkpoint_dir = checkpoint_dir
        self.devices = devices
        self.num_nodes = num_nodes
        self.strategy = strategy

    def _check(self) -> None:
        super()._check()
        check_whole(2, history=self.history)
        check_whole(optional=True, negatives=self.negatives)
        check_choice((True, False), sort=self.sort, tied=self.tied, trend=self.trend, rotate_values=self.rotate_values)
        check_number(least=0, high=1, dropout=self.dropout)
        self._given_clock()
        self._columns()
        # Sizes of layers are checked where layers are made.
        self._make(2, device="meta")

    def _columns(self) -> Columns:
        for name in ("sequence", "time_column", "type"):
            if not isinstance(getattr(self, name), str):
                raise InvalidArgument(f"{name} must be the name of a column; got {getattr(self, name)!r:.100}")
        return Columns(self.sequence, self.time_column, self.type, chosen(self.marks), chosen(self.static))

    def _given_clock(self) -> list[float] | None:
        """The periods that were given; None where they are to be found."""
        if isinstance(self.clock, str) and self.clock in ("auto", "none"):
            return None if self.clock == "auto" else []
        if not isinstance(self.clock, str | list | tuple | np.ndarray):
            raise InvalidArgument(f"clock must be 'auto', 'none', or periods as '1d,7d'; got {self.clock!r:.100}")
        periods = [as_wait(part) for part in (self.clock.split(",") if isinstance(self.clock, str) else self.clock)]
        check_number(0, clock=min(periods, default=1.0))
        return periods

    def _read(
        self, X: Any, y: Any = None, sample_weight: Any = None, groups: Any = None, *, fitting: bool = False
    ) -> EventSamples:
        sequences = read_sequences(X, self._columns(), sort=bool(self.sort))
        if fitting:
            self._learn_types(sequences)
            self._check_covariates(sequences)
            self.is_dated_, self.is_started_ = sequences.dated, bool((~np.isnan(sequences.starts)).any())
            self.covariates_ = {name: _covariates.learned(getattr(sequences, name)) for name in ("marks", "static")}
        elif not self.is_started_ and not np.isnan(sequences.starts).all():
            raise InvalidArgument("X says when sequences start, and in fit it did not; leave starts out")
        elif sequences.dated != self.is_dated_:
            raise InvalidArgument(f"times were {sort_of(self.is_dated_)} in fit and are {sort_of(sequences.dated)} now")
        if sequences.names is not None:
            frames = Frames([], None, sequences.names, nouns=("columns", "sequences"))
            sample_weight, groups = frames.aligned(sample_weight, "sample_weight"), frames.aligned(groups, "groups")
        return self._encoded(sequences, sample_weight, groups)

    def _learn_types(self, sequences: Sequences) -> None:
        self.is_typed_ = sequences.types is not None
        self.classes_ = np.array([0]) if sequences.types is None else np.unique(sequences.types)
        if sequences.lengths.max() + (~np.isnan(sequences.starts)).max() < 2:
            raise InvalidArgument("no sequence has two events or more, so there is no next event to learn from")
        if len(self.classes_) == 1 and not self.components:
            raise InvalidArgument(
                "all events are of one type, and components=0 leaves their times out: there is nothing to learn"
            )

    def _check_covariates(self, sequences: Sequences) -> None:
        for name in ("marks", "static"):
            missing = [column for column in chosen(getattr(self, name)) if column not in getattr(sequences, name)]
            if missing:
                raise InvalidArgument(
                    f"{name} names {missing[0]!r}, and X has no such column; give it in a data frame, or in a dict under {name!r}"
                )

    def _encoded(self, sequences: Sequences, sample_weight: Any = None, groups: Any = None) -> EventSamples:
        """Codes of types, matrices of covariates, and an event of its own where a sequence's start is known."""
        count, kinds = len(sequences.times), len(self.classes_)
        codes = np.zeros(count, dtype=np.int64)
        if sequences.types is not None and self.is_typed_:
            codes, unknown = label_codes(sequences.types, self.classes_)
            if unknown:
                warnings.warn(
                    f"{quantity(len(unknown), 'type')} of events not seen in fit, read as unknown: {', '.join(map(str, unknown[:5]))}",
                    stacklevel=4,
                )
        elif self.is_typed_:
            raise InvalidArgument("X has no types, and the model was fitted with types")
        marks = _covariates.matrix(sequences.marks, self.covariates_["marks"], count)
        static = _covariates.matrix(sequences.static, self.covariates_["static"], len(sequences))
        times, offsets = sequences.times, sequences.offsets
        started = ~np.isnan(sequences.starts)
        if started.any():
            places = offsets[:-1][started]
            codes = np.insert(codes, places, kinds + 1)
            times = np.insert(times, places, sequences.starts[started])
            marks = np.insert(marks, places, 0.0, axis=0)
            offsets = offsets + np.append(0, np.cumsum(started))
        inputs = (codes, times, marks, sequences.ends, static)
        return EventSamples(inputs, None, sample_weight, groups, offsets=offsets, names=sequences.names)

    def _labelled(self, samples: Samples) -> Samples:
        assert isinstance(samples, EventSamples)
        weights = weights_of(np.zeros(1), np.zeros(len(samples), dtype=int), None, samples.weights)
        return EventSamples(samples.inputs, None, weights, samples.groups, offsets=samples.offsets)

    def _split(self, samples: Samples) -> tuple[np.ndarray, np.ndarray]:
        """Sequences with something to foresee are held out; those of one event are not."""
        assert isinstance(samples, EventSamples)
        longer = np.flatnonzero(samples.lengths > 1)
        groups = None if samples.groups is None else samples.groups[longer]
        held = longer[hold_out(len(longer), self.validation_fraction, self.seed_, groups=groups)[1]]
        learn = np.setdiff1d(np.arange(len(samples)), held)
        return (learn, held) if (samples.lengths[learn] > 1).any() else (np.arange(len(samples)), held[:0])

    def _scale(self, samples: Samples) -> None:
        assert isinstance(samples, EventSamples)
        codes, times = samples.inputs[:2]
        positive = samples.gaps[samples.gaps > 0]
        self.least_gap_ = float(positive.min()) if len(positive) else 1.0
        self.gap_moments_ = moments(np.log(positive)) if len(positive) else (0.0, 1.0)
        self.span_ = (float(times.min()), float(times.max()))
        given = self._given_clock()
        self.clock_: list[float] = given or []
        self.cycles_: list[float] = []
        if given is None and self.time != "order":
            # Where a sequence starts is no event.
            real = codes <= len(self.classes_)
            offsets = np.append(0, np.cumsum(real))[samples.offsets]
            self.clock_, self.cycles_ = found(times[real], codes[real], offsets)

    def _network(self) -> EventNetwork:
        return self._make(len(self.classes_), self.clock_, self.span_, self.gap_moments_, self.covariates_)

    def _make(
        self,
        types: int,
        clock: Sequence[float] = (),
        span: tuple[float, float] = (0.0, 1.0),
        gap_moments: tuple[float, float] = (0.0, 1.0),
        covariates: Mapping[str, Any] | None = None,
        device: str | None = None,
    ) -> EventNetwork:
        widths: dict[str, Any] = {name: _covariates.numbers(parts) for name, parts in (covariates or {}).items()}
        widths |= {
            f"{name.removesuffix('s')}_levels": _covariates.levels(parts) for name, parts in (covariates or {}).items()
        }
        # Searches over arrays of settings give numpy's numbers.
        sizes: dict[str, Any] = {
            name: value.item() if isinstance(value := getattr(self, name), np.generic) else value
            for name in ("embed_dim", "num_heads", "layers", "target_layers", "hidden", "dropout", "time", "interaction", "degree", "components")
        }  # fmt: skip
        return EventNetwork(
            types,
            **sizes,
            **widths,
            rotate_values=bool(self.rotate_values),
            tied=bool(self.tied),
            clock=clock,
            trend=span if self.trend and span[1] > span[0] else None,
            log_mean=gap_moments[0],
            log_scale=gap_moments[1],
            device=device,
        )

    def _start(self, network: nn.Module, samples: Samples) -> None:
        """First periods by what the times of the data are."""
        assert isinstance(network, EventNetwork)
        assert isinstance(samples, EventSamples)
        if not samples.gaps.any():
            return  # all events of a sequence happen at once: there is no scale of time
        windows = Windows(samples, int(self.history))
        some = np.linspace(0, len(windows) - 1, min(len(windows), 2048)).astype(int)
        (_, times, padding, *_), _, _ = windows.batch(some)
        network.calibrate(times, ~padding, sorted({*self.clock_, *self.cycles_}) or None)

    def _parts(self, samples: Samples, learn: np.ndarray, held: np.ndarray) -> dict[str, Any]:
        assert isinstance(samples, EventSamples)
        windows = Windows(samples, int(self.history))
        rows = windows.of(learn)
        return {
            "data": rows,
            "held_out": windows.of(held) if len(held) else None,
            "collate": windows.batch,
            "lengths": windows.lengths[rows],
        }

    def _terms(
        self, network: EventNetwork, inputs: Inputs, target: Tensor, rest: Tensor, negatives: int | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor]:
        """Losses of each target by name, which type answers are right, the weights of targets, and the sum of the tails."""
        types, times, padding, marks, static = inputs
        following, waits, counts = target[..., 0].long(), target[..., 1], target[..., 2] > 0
        states = network.states(types, times, padding, marks, static)
        wanted = following[counts]
        terms: dict[str, Tensor] = {}
        right: dict[str, Tensor] = {}
        if network.types > 1:
            heads = {"accuracy": states}
            if network.targets is not None:
                heads["accuracy_time_known"] = network.read(states, times, times + waits, padding)
            for name, hidden in heads.items():
                terms[name], right[name] = _cross_entropy(
                    network, hidden[counts], wanted, name != "accuracy", negatives
                )
        tail = states.new_zeros(())
        law = network.waits(states)
        if law is not None:
            floor = positive(waits, self.least_gap_)
            # Per unit of the standardised logarithm: constants of the data do not weigh in the loss.
            constant = floor[counts].log().float() + math.log(law.spread)
            terms["wait"] = -law.at(counts).log_prob(floor[counts]) - constant
            last = (~padding).sum(1) - 1
            ends = law.at((torch.arange(len(last), device=last.device), last))
            tail = -(ends.log_survival(rest[:, 0]) * rest[:, 1] * rest[:, 2]).sum()
        weight = rest[:, 2:3].expand_as(waits)[counts].to(tail.dtype)
        return terms, right, weight, tail

    def _loss(self, network: nn.Module, inputs: Inputs, target: Any, rest: Any) -> Tensor:
        assert isinstance(network, EventNetwork)
        hidden = torch.rand(inputs[0].shape, device=inputs[0].device) < UNKNOWN
        types = torch.where(hidden & (inputs[0] < network.types), network.types, inputs[0])
        terms, _, weight, tail = self._terms(network, (types, *inputs[1:]), target, rest, self.negatives)
        total = sum((weight * part).sum() for part in terms.values()) + tail
        return total / max(1, len(weight))

    def _measure(self, network: nn.Module, inputs: Inputs, target: Any, rest: Any) -> Mapping[str, Tensor]:
        assert isinstance(network, EventNetwork)
        terms, right, weight, tail = self._terms(network, inputs, target, rest)
        total = torch.stack([weight * part for part in terms.values()]).sum(0) if terms else weight * 0
        return {"loss": total + tail / max(1, len(weight)), **right}


def _cross_entropy(
    network: EventNetwork, states: Tensor, wanted: Tensor, known: bool, negatives: int | None
) -> tuple[Tensor, Tensor]:
    """The loss of each target and whether its type is the likeliest; a type that was never learned costs nothing and is wrong.

    With `negatives` the softmax is over the wanted type and so many types drawn alike for the batch; each drawn one stands for K / negatives types.
    """
    learned = wanted < network.types
    safe = torch.where(learned, wanted, 0)
    if not torch.is_grad_enabled():
        own, right = judged(network, states, wanted, known)
        return torch.where(learned, -own, 0.0).float(), right.float()
    if negatives is None or negatives >= network.types:
        logits = network.logits(states, known=known).float()
        loss = functional.cross_entropy(logits, safe, reduction="none")
        return loss * learned, (logits.argmax(1) == wanted).float()
    drawn = torch.randint(network.types, (negatives,), device=wanted.device)
    others = network.logits(states, known=known, items=drawn).float() + math.log(network.types / negatives)
    others = others.masked_fill(drawn == wanted[:, None], -torch.inf)
    own = network.own_logits(states, safe, known=known).float()
    loss = torch.logsumexp(torch.cat((own[:, None], others), dim=1), dim=1) - own
    return loss * learned, (own > others.amax(1)).float()

"""The network: events attend to events before them, and times at which something might happen attend to them too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful.events.density import LogNormalMixture
from heedful.nn import Block, BochnerTime, Encoder, MercerTime, Module, Timed, time_encoding

Time = Literal["linear", "bochner", "mercer", "time2vec", "tgat", "order"]
FEATURES = 32  # of a time, before they are mapped to the width of the network


class Answers(NamedTuple):
    """What is known after each event of the next one."""

    types: Tensor  # [B, n, K] logits, its time unknown
    at_times: Tensor | None  # [B, n, K] logits, if it happens at the target time
    waits: LogNormalMixture | None  # how long until it


class EventNetwork(Module):
    r"""Two streams of attention over events with times.

    *Events.* Event i is its type's embedding plus a map of the gap since the event before it (and of its marks, and of the calendar). `layers`
    causal blocks of `TimeAttention` give states $h_i$, from which the next type (its time unknown) and the density of the wait follow.

    *Targets.* "Event i + 1, if it happens at $s_i$" is a token $W h_i + \phi(s_i - t_i)$ (+ the calendar at $s_i$) with the time $s_i$. It attends to
    the states of events 0 to i through `target_layers` blocks and is never a key, so that all n targets come from one pass and "what if it happens at t" costs
    queries alone.

    After Xu et al. (2019), "Self-attention with functional time representation learning". Where ours differs: theirs makes a window of each prefix, and has no density of times.

    Args:
        types: types of events, K. Codes from 0 to K - 1; K is an unknown type, K + 1 the start of a sequence.
        time: how gaps are encoded: by one of the encodings of `heedful.nn`, or not at all (`"order"`: the network sees places instead of times).
        interaction: how attention sees times; see `TimeAttention`. Those that change with the origin of time get times since the first event.
        clock: periods of the calendar, in units of time, with `degree` harmonics each.
        trend: encodes absolute time besides, from a first to a last one: for data whose next events lie in the same span.
        marks, static: numbers beside each event and each sequence.
        mark_levels, static_levels: of columns behind them that hold codes from 0 on, how many each may hold.
        components: log-normal laws of the wait; 0 leaves it out.
        target_layers: blocks of the targets; 0 leaves them out.
        tied: the embedding of a type is also what it is predicted by.

    >>> import torch
    >>> network = EventNetwork(3, embed_dim=16, num_heads=2)
    >>> times = torch.tensor([[0.0, 1.5, 4.0]], dtype=torch.float64)
    >>> answers = network(torch.tensor([[0, 2, 1]]), times, target_times=times + 1)
    >>> answers.types.shape, answers.at_times.shape, answers.waits.quantile(0.5).shape
    (torch.Size([1, 3, 3]), torch.Size([1, 3, 3]), torch.Size([1, 3]))
    """

    def __init__(
        self,
        types: int,
        embed_dim: int = 64,
        num_heads: int = 4,
        layers: int = 2,
        target_layers: int = 1,
        hidden: int | None = None,
        dropout: float = 0.1,
        *,
        time: Time = "linear",
        interaction: Any = "rotary",
        rotate_values: bool = False,
        clock: Sequence[float] = (),
        degree: int = 8,
        trend: Sequence[float] | None = None,
        marks: int = 0,
        mark_levels: Sequence[int] = (),
        static: int = 0,
        static_levels: Sequence[int] = (),
        components: int = 16,
        tied: bool = False,
        log_mean: float = 0.0,
        log_scale: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_whole(types=types, layers=layers, degree=degree)
        check_whole(0, target_layers=target_layers, marks=marks, static=static, components=components)
        check_choice(Time, time=time)
        check_number(0, log_scale=log_scale)
        check_number(log_mean=log_mean)
        self.types, self.embed_dim, self.num_heads, self.layers = types, embed_dim, num_heads, layers
        self.target_layers, self.dropout, self.time, self.interaction = target_layers, dropout, time, interaction
        self.rotate_values, self.clock, self.degree = rotate_values, tuple(map(float, clock)), degree
        self.trend = None if trend is None else tuple(map(float, trend))
        self.marks, self.static, self.components, self.tied = marks, static, components, tied
        self.mark_levels, self.static_levels = tuple(mark_levels), tuple(static_levels)
        self.log_mean, self.log_scale = float(log_mean), float(log_scale)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        timed = Timed(interaction=interaction, rotate_values=rotate_values)
        # Those that change with the origin of time get features of times, and times since the first event.
        self._since_first = not timed.is_stationary
        if self._since_first:
            features = time_encoding("sinusoidal" if time == "order" else time, FEATURES, **place)
            timed = replace(timed, encoding=features)
        self.embedding = nn.Embedding(types + 2, embed_dim, **place)
        nn.init.normal_(self.embedding.weight, std=embed_dim**-0.5)
        self.encoder = Encoder(embed_dim, num_heads, [timed] * layers, hidden, dropout, **place)
        self.hidden = self.encoder.hidden
        self.gap = None if time == "order" else _Mapped(time_encoding(time, FEATURES, **place), embed_dim, place)
        self.marked = _Covariates(marks, self.mark_levels, embed_dim, place) if marks or mark_levels else None
        self.fixed = _Covariates(static, self.static_levels, embed_dim, place) if static or static_levels else None
        self.calendar = _calendar(self.clock, degree, self.trend, embed_dim, place) if time != "order" else None
        self.output = nn.Linear(embed_dim, embed_dim if tied else types, **place)
        self.bias = nn.Parameter(torch.zeros(types, **place)) if tied else None
        self.waiting = nn.Linear(embed_dim, 3 * components, **place) if components else None
        self.targets: nn.ModuleList | None = None
        if target_layers and time != "order":
            sizes = embed_dim, num_heads, hidden, dropout
            self.targets = nn.ModuleList(Block(*sizes, kernel=timed, **place) for _ in range(target_layers))
            self.since = _Mapped(time_encoding(time, FEATURES, **place), embed_dim, place)
            self.then = _calendar(self.clock, degree, self.trend, embed_dim, place)
            self.start = nn.Linear(embed_dim, embed_dim, **place)
            self.last_norm = nn.LayerNorm(embed_dim, **place)
            self.target_output = nn.Linear(embed_dim, embed_dim if tied else types, **place)

    def calibrate(self, times: Tensor, mask: Tensor, periods: Sequence[float] | None = None) -> Self:
        """Sets the first periods of all encodings by times `(B, n)`, True in `mask` where there is an event."""
        if self.time == "order":
            times = torch.arange(times.shape[1], dtype=torch.float64).expand_as(times)
        for module in self.modules():
            if module is not self and hasattr(module, "calibrate") and module not in self._absolute:
                module.calibrate(times, mask, periods=periods)  # type: ignore[operator]
        return self

    @property
    def _absolute(self) -> list[nn.Module]:
        """Encodings whose periods are given."""
        calendars = [self.calendar, getattr(self, "then", None)]
        return [module for calendar in calendars if calendar is not None for module in calendar.modules()]

    def forward(
        self,
        types: Tensor,
        times: Tensor,
        padding: Tensor | None = None,
        marks: Tensor | None = None,
        static: Tensor | None = None,
        target_times: Tensor | None = None,
    ) -> Answers:
        """Codes and times `(B, n)`, `padding` True behind a sequence's end, marks `(B, n, m)`, static `(B, s)`, target times `(B, n)`."""
        states = self.states(types, times, padding, marks, static)
        logits = None
        if target_times is not None:
            logits = self.logits(self.read(states, times, target_times, padding), known=True)
        return Answers(self.logits(states), logits, self.waits(states))

    def states(
        self,
        types: Tensor,
        times: Tensor,
        padding: Tensor | None = None,
        marks: Tensor | None = None,
        static: Tensor | None = None,
    ) -> Tensor:
        """`[B, n, embed]`, each of what happened up to its event."""
        x = self.embedding(types)
        if self.gap is not None:
            x = x + self.gap(torch.diff(times, dim=1, prepend=times[:, :1]))
        if self.calendar is not None:
            x = x + self.calendar(times)
        if self.marked is not None:
            x = x + self.marked(marks, "marks")
        if self.fixed is not None:
            x = x + self.fixed(static, "static")[:, None]
        x = functional.dropout(x, self.dropout, self.training)
        if self.time == "order":
            times = torch.arange(times.shape[1], dtype=torch.float64, device=times.device).expand_as(times)
        elif self._since_first:
            times = times - times[:, :1]
        return self.encoder(x, key_padding_mask=padding, is_causal=True, times=times)

    def read(
        self,
        states: Tensor,
        times: Tensor,
        target_times: Tensor,
        padding: Tensor | None = None,
        *,
        last: Tensor | None = None,
    ) -> Tensor:
        """`[B, n, embed]` of targets at `target_times` `(B, n)`, the i-th after event i.

        With `last` `(B,)`, the place of each sequence's last event, all targets `(B, m)` come after that one and see all events.
        """
        if self.targets is None:
            raise InvalidArgument(
                "this network has no answers for a known time (target_layers=0, or time='order'); leave target_times out"
            )
        base, since = states, times
        if last is not None:
            rows = torch.arange(len(states), device=states.device)
            base, since = states[rows, last][:, None], times[rows, last][:, None]
        x = self.start(base) + self.since(target_times - since)
        if self.then is not None:
            x = x + self.then(target_times)
        x = functional.dropout(x, self.dropout, self.training)
        if self._since_first:
            target_times, times = target_times - times[:, :1], times - times[:, :1]
        for block in self.targets:
            x = block(
                x, key_padding_mask=padding, is_causal=last is None, times=target_times, key=states, key_times=times
            )
        return self.last_norm(x)

    def logits(self, states: Tensor, *, known: bool = False, items: Tensor | None = None) -> Tensor:
        """`[..., K]`, or those of `items` alone; `known` for states of targets."""
        output = self.target_output if known else self.output
        if not self.tied:
            if items is None:
                return output(states)
            return functional.linear(states, output.weight[items], output.bias[items])
        assert self.bias is not None
        weight, bias = self.embedding.weight[: self.types], self.bias
        if items is not None:
            return functional.linear(output(states), weight[items], bias[items])
        return functional.linear(output(states), weight, bias)

    def own_logits(self, states: Tensor, items: Tensor, *, known: bool = False) -> Tensor:
        """`[N]`: of each state `[N, embed]` the logit of its own item."""
        output = self.target_output if known else self.output
        if self.tied:
            assert self.bias is not None
            return (output(states) * self.embedding(items)).sum(-1) + self.bias[items]
        return (states * output.weight[items]).sum(-1) + output.bias[items]

    def waits(self, states: Tensor) -> LogNormalMixture | None:
        """The law of the wait after each state."""
        if self.waiting is None:
            return None
        return LogNormalMixture.of(self.waiting(states).float(), self.log_mean, self.log_scale)


class _Mapped(nn.Module):
    """An encoding of times and a small network behind it."""

    def __init__(self, encoding: nn.Module, embed_dim: int, place: dict[str, Any]) -> None:
        super().__init__()
        self.encoding = encoding
        self.inner = nn.Linear(encoding.dim, embed_dim, **place)  # type: ignore[arg-type]
        self.outer = nn.Linear(embed_dim, embed_dim, **place)

    def forward(self, times: Tensor) -> Tensor:
        return self.outer(functional.gelu(self.inner(self.encoding(times).to(self.inner.weight.dtype))))


class _Calendar(nn.Module):
    """Encodings of absolute time, side by side."""

    def __init__(self, encodings: Sequence[nn.Module], embed_dim: int, place: dict[str, Any]) -> None:
        super().__init__()
        self.encodings = nn.ModuleList(encodings)
        self.inner = nn.Linear(sum(one.dim for one in encodings), embed_dim, **place)  # type: ignore[misc]
        self.outer = nn.Linear(embed_dim, embed_dim, **place)

    def forward(self, times: Tensor) -> Tensor:
        features = torch.cat([encoding(times) for encoding in self.encodings], dim=-1)
        return self.outer(functional.gelu(self.inner(features.to(self.inner.weight.dtype))))


def _calendar(
    clock: Sequence[float], degree: int, trend: Sequence[float] | None, embed_dim: int, place: dict[str, Any]
) -> _Calendar | None:
    encodings: list[nn.Module] = []
    if clock:
        encodings.append(MercerTime(list(clock), degree, trainable=False, **place))
    if trend is not None:
        span = trend[1] - trend[0]
        encodings.append(BochnerTime(16, period_range=(span / 8, 4 * span), trainable=False, **place))
    return _Calendar(encodings, embed_dim, place) if encodings else None


class _Covariates(nn.Module):
    """Numbers by a linear map, and codes of levels by an embedding each, added up."""

    def __init__(self, numbers: int, levels: Sequence[int], embed_dim: int, place: dict[str, Any]) -> None:
        super().__init__()
        self.numbers = numbers
        self.linear = nn.Linear(max(1, numbers), embed_dim, **place)
        self.embeddings = nn.ModuleList(nn.Embedding(count, embed_dim, **place) for count in levels)
        for embedding in self.embeddings:
            nn.init.normal_(embedding.weight, std=embed_dim**-0.5)  # type: ignore[arg-type]

    def forward(self, values: Tensor | None, name: str) -> Tensor:
        width = self.numbers + len(self.embeddings)
        if values is None or values.shape[-1] != width:
            got = None if values is None else tuple(values.shape)
            raise InvalidArgument(f"{name} must have {width} columns, numbers and then codes; got {got}")
        numbers = values[..., : self.numbers] if self.numbers else torch.zeros_like(values[..., :1])
        out = self.linear(numbers.to(self.linear.weight.dtype))
        for at, embedding in enumerate(self.embeddings, self.numbers):
            out = out + embedding(values[..., at].long())
        return out

"""Attention between events that happen at times: eight ways in which time meets them (Xu et al. 2019, and beyond)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

from heedful import masks
from heedful._attend import Plan, attend
from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful._runtime import full_precision
from heedful.masks import Mask
from heedful.nn._describe import JOINED, Interaction
from heedful.nn._frequencies import DEFAULT, TimeScale, exact, log_spaced, number, time_scale
from heedful.nn._joining import Joining
from heedful.nn._module import Module, check_heads, check_input, layer_mask, learned
from heedful.nn._timing import Moments, Rotation, bucketed, decayed, harmonics, moments, whole_or_float64
from heedful.nn.time import BochnerTime, PeriodicTime, TimeEncoding
from heedful.ops import IMPLEMENTATIONS

# softplus(EVEN) = 1
EVEN = math.log(math.e - 1)


class TimeAttention(Module):
    r"""Softmax attention of queries at times $t_i$ to events at times $t_j$, with $\tau = t_i - t_j$ the time elapsed.

    | `interaction` | what time does | memory | shift of all times |
    |---|---|---|---|
    | `"rotary"` | $(R(\omega t_i) q_i) \cdot (R(\omega t_j) k_j)$: pairs of coordinates turn, each with a frequency of its own | n | no change |
    | `"bias"` | adds $\sum_r a_{hr} \cos \omega_r \tau + b_{hr} \sin \omega_r \tau$ to the score | n | no change |
    | `"decay"` | adds $-\gamma_h \tau$, $\gamma_h \ge 0$ | n | no change |
    | `"bucket"` | adds a learned number for each bucket of $\log_2(1 + \lvert\tau\rvert / u)$ and sign of $\tau$ | heads n² | no change |
    | `"add"` | events $z_j + W \Phi(t_j)$ | n | changes |
    | `"concat"` | events $[z_j; \Phi(t_j)]$ | n | changes |
    | `"concat_mlp"` | events $h_j = \mathrm{ReLU}([z_j; \Phi(t_j)] W_0 + b_0) W_1 + b_1$, with `depth` hidden layers | n | changes |
    | `"residual"` | events $h_j + [z_j; \Phi(t_j)] W_r$ | n | changes |

    The last four are those of Xu et al. (2019): $\Phi(t)^\top M \Phi(t')$ with a free M is no function of $t - t'$, so with
    them a shift of all times changes the output; give them times since the first event, or until the prediction. The first four depend
    on $\tau$ alone, also in float32 with times in Unix seconds: times are counted from the first event that is seen, in float64,
    before anything is rounded.

    `"rotary"` and `"bias"` take their frequencies from `encoding` (`BochnerTime`). In `"rotary"` head h has every `num_heads`-th of
    embed_dim / 2, so each has slow and fast ones; with `rotate_values` values turn too and the outcome turns back,
    $\sum_j \alpha_{ij} R(-\omega \tau) v_j$, which carries the phase of an event to the query. `"bias"` is
    `masks.low_rank` of rank 2 r: further coordinates of queries and keys, so that no n x n bias is formed and torch's fused attention
    or our own serve it. In 16 bit these coordinates are rounded as queries and keys are. `"decay"` cancels along a row but for
    $\gamma_h t_j$, one coordinate of the key, in 16 bit a sum of three with 24 bits; the score's error is that of float32 at
    $\gamma_h (t_i - t_1)$. Events after the query, where a mask shows them, gain by it.

    Padding (`key_padding_mask`) and events that no query sees may have any time, NaN too. A query that sees nothing gives zeros before
    the output map. Equal times keep the order of the input under `is_causal`.

    Args:
        embed_dim: size of queries and events, a multiple of `num_heads`.
        interaction: see the table.
        encoding: a `TimeEncoding`; by default `BochnerTime`, of 16 frequencies for `"bias"` and embed_dim / 2 otherwise.
        hidden: units of each hidden layer of `"concat_mlp"` and `"residual"`; by default the size of $[z; \Phi]$.
        depth: their number of hidden layers, 1 or 2.
        buckets: entries of the table of `"bucket"`, an even number, half for events before the query.
        dropout: of the coefficients, while training.

    >>> import torch, heedful
    >>> layer = heedful.nn.TimeAttention(32, 4, "bias")
    >>> events, times = torch.randn(2, 7, 32), torch.rand(2, 7, dtype=torch.float64).cumsum(1)
    >>> layer(events, times, is_causal=True).shape
    torch.Size([2, 7, 32])
    >>> late = layer(events, times + 1e9, is_causal=True)
    >>> late.allclose(layer(events, times, is_causal=True), atol=1e-5)
    True
    >>> later = layer(torch.randn(2, 3, 32), times[:, -1:] + torch.arange(1, 4), key=events, key_times=times)
    """

    constants: Tensor  # float64 numbers as `exact` keeps them

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        interaction: Interaction = "rotary",
        *,
        encoding: TimeEncoding | None = None,
        rotate_values: bool = False,
        hidden: int | None = None,
        depth: int = 1,
        buckets: int = 32,
        dropout: float = 0.0,
        bias: bool = True,
        impl: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        check_choice(Interaction, interaction=interaction)
        check_whole(optional=True, hidden=hidden)
        check_whole(1, 2, depth=depth)
        check_whole(2, buckets=buckets)
        check_number(least=0, high=1, dropout=dropout)
        check_choice(("auto", *IMPLEMENTATIONS), impl=impl)
        self.embed_dim, self.num_heads, self.interaction = embed_dim, num_heads, interaction
        self.rotate_values, self.hidden, self.depth, self.buckets = rotate_values, hidden, depth, buckets
        self.dropout, self.bias, self.impl = dropout, bias, impl
        self.head_dim = embed_dim // num_heads
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.encoding = self._fitting(encoding, place)
        self._make_interaction(place)
        width = embed_dim if self.joining is None else self.joining.width
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, width, **place))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim, **place)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **place)
        self.reset_parameters()

    def _fitting(self, encoding: TimeEncoding | None, place: dict[str, Any]) -> TimeEncoding | None:
        """The encoding that was given, checked, or one of the right size."""
        kind, size = self.interaction, self.embed_dim
        if self.rotate_values and kind != "rotary":
            raise InvalidArgument(f"rotate_values=True is for interaction='rotary'; got {kind!r}")
        if self.hidden is not None and kind not in ("concat_mlp", "residual"):
            raise InvalidArgument(f"hidden is for interaction='concat_mlp' and 'residual'; got {kind!r}")
        if kind in ("decay", "bucket"):
            if encoding is not None:
                raise InvalidArgument(f"interaction={kind!r} reads the elapsed time itself; leave encoding out")
            return None
        if kind == "rotary" and self.head_dim % 2:
            raise InvalidArgument(
                f"interaction='rotary' turns pairs of coordinates: embed_dim / num_heads must be even; got {self.head_dim}"
            )
        if encoding is None:
            return BochnerTime(32 if kind == "bias" else size + size % 2, **place)
        if not isinstance(encoding, TimeEncoding):
            raise InvalidArgument(f"encoding must be a TimeEncoding such as BochnerTime; got {type(encoding).__name__}")
        encoding = encoding.to(**place)
        if kind in JOINED:
            return encoding
        if not isinstance(encoding, PeriodicTime):
            raise InvalidArgument(
                f"interaction={kind!r} takes the frequencies of a BochnerTime or MercerTime; got {type(encoding).__name__}, "
                "which 'add', 'concat', 'concat_mlp' and 'residual' take"
            )
        if getattr(encoding, "resample", "never") != "never":
            raise InvalidArgument(
                f"interaction={kind!r} keeps its frequencies from call to call; give resample='never'"
            )
        if kind == "rotary" and _frequencies(encoding) != size // 2:
            raise InvalidArgument(
                f"interaction='rotary' has a frequency for each of {size // 2} pairs of coordinates: give BochnerTime({size}); "
                f"got {_frequencies(encoding)} frequencies"
            )
        return encoding

    def _make_interaction(self, place: dict[str, Any]) -> None:
        """The parameters that time has besides those of the encoding."""
        heads, kind = self.num_heads, self.interaction
        self.cosine = self.sine = self.decay = self.table = None
        self.joining: Joining | None = None
        if kind == "bias":
            assert isinstance(self.encoding, PeriodicTime)
            self.cosine, self.sine = (learned(heads, _frequencies(self.encoding), **place) for _ in range(2))
        elif kind == "decay":
            self.decay = nn.Parameter(torch.full((heads,), EVEN, **place))
            self.register_buffer("constants", exact([1.0] * heads, place["device"]))
        elif kind == "bucket":
            if self.buckets % 2:
                raise InvalidArgument(
                    f"buckets must be even, half for each sign of the elapsed time; got {self.buckets}"
                )
            self.table = nn.Parameter(torch.zeros(heads, self.buckets, **place))
            self.register_buffer("constants", exact([1.0, 1.0], place["device"]))
        elif kind in JOINED:
            assert self.encoding is not None
            if kind in ("concat_mlp", "residual") and self.hidden is None:
                self.hidden = self.embed_dim + self.encoding.dim
            self.joining = Joining(kind, self.embed_dim, self.encoding.dim, self.hidden, self.depth, place)
        self._start(DEFAULT)

    def reset_parameters(self) -> None:
        """The start of `nn.MultiheadAttention` for the projections: Glorot, zeros for biases."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def calibrate(self, times: Tensor, mask: Tensor | None = None, periods: Any = None) -> Self:
        """Fits the scale of time to a data set, in place: see `TimeEncoding.calibrate`.

        `"decay"` starts with time constants $1 / \\gamma_h$ evenly on a logarithmic scale from the shortest period to the longest span;
        `"bucket"` takes buckets of equal width on it, from the shortest gap to the longest span.
        """
        if self.encoding is not None:
            self.encoding.calibrate(times, mask, periods)
        else:
            self._start(time_scale(times, mask))
        return self

    def _start(self, scale: TimeScale) -> None:
        with torch.no_grad():
            if self.decay is not None:
                self.constants.copy_(exact(log_spaced(scale.low, max(scale.low, scale.horizon), self.num_heads)))
                self.decay.fill_(EVEN)
            elif self.table is not None:
                unit, last = scale.low / 2, max(self.buckets // 2 - 1, 1)
                self.constants.copy_(exact([unit, math.log2(1 + scale.horizon / unit) / last]))

    def decays(self) -> Tensor:
        """The rates $\\gamma_h$ of `"decay"`, float64 `(num_heads,)`: softplus of a parameter over a time constant."""
        if self.decay is None:
            raise InvalidArgument(f"interaction='decay' has rates of decay; this layer has {self.interaction!r}")
        return softplus(self.decay.double()) / number(self.constants)

    def forward(
        self,
        query: Tensor,
        times: Tensor,
        key: Tensor | None = None,
        key_times: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Mask | Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """`(B, m, embed)` at `times` `(B, m)` -> `(B, m, embed)`.

        Events are `key` `(B, n, embed)` at `key_times` `(B, n)`, the queries themselves by default. With both and `is_causal` query i
        sees events 0..i, whatever its own time: m = n queries at target times, answered at once, each as if alone. Masks are those of
        `Attention` (True = ignore). Times that count must be finite: others raise an error on a CPU, and give NaN on a device or in
        a compiled graph, where values cannot be looked at.
        """
        call = self._call(query, times, key, key_times, key_padding_mask, attn_mask, is_causal)
        dropout = self.dropout if self.training else 0.0
        out = attend(call.query, call.key, call.value, call.mask, dropout, impl=self.impl)  # [B, H, m, D]
        if call.back is not None:
            with full_precision(out.device):
                out = call.back.turn(out, back=True)
        return self.out_proj(out.transpose(1, 2).flatten(-2))

    def coefficients(
        self,
        query: Tensor,
        times: Tensor,
        key: Tensor | None = None,
        key_times: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Mask | Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """How much each query takes of each event in the same call, `(B, heads, m, n)`."""
        call = self._call(query, times, key, key_times, key_padding_mask, attn_mask, is_causal)
        return attend.coefficients(call.query, call.key, call.mask)

    def plan(
        self,
        query: Tensor,
        times: Tensor,
        key: Tensor | None = None,
        key_times: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Mask | Tensor | None = None,
        is_causal: bool = False,
    ) -> Plan:
        """Which implementation serves the same call, and why: see `attend.plan`.

        >>> import torch, heedful
        >>> x, times = torch.randn(1, 5, 16), torch.arange(5)[None]
        >>> heedful.nn.TimeAttention(16, 2, "bias").plan(x, times, is_causal=True).chosen
        'sdpa'
        """
        call = self._call(query, times, key, key_times, key_padding_mask, attn_mask, is_causal)
        dropout = self.dropout if self.training else 0.0
        return attend.plan(call.query, call.key, call.value, call.mask, dropout, impl=self.impl)

    def _call(
        self,
        query: Tensor,
        times: Tensor,
        key: Tensor | None,
        key_times: Tensor | None,
        padding: Tensor | None,
        attn_mask: Mask | Tensor | None,
        is_causal: bool,
    ) -> _Call:
        """What `attend` is called with."""
        check_input("query", query, self.embed_dim)
        if (key is None) != (key_times is None):
            given, missing = ("key", "key_times") if key_times is None else ("key_times", "key")
            raise InvalidArgument(
                f"got {given} without {missing}; give both, or neither for events that are the queries"
            )
        events = query if key is None else key
        check_input("key", events, self.embed_dim)
        if events.shape[0] != query.shape[0]:
            raise InvalidArgument(f"query and key must share the batch; got {query.shape[0]} and {events.shape[0]}")
        times = whole_or_float64("times", times, tuple(query.shape[:2]))
        event_times = times if key_times is None else whole_or_float64("key_times", key_times, tuple(events.shape[:2]))
        mask = layer_mask(
            query.shape[0], self.num_heads, query.shape[1], events.shape[1], attn_mask, padding, is_causal
        )
        # A query stands for padding where it is itself, or stands beside, an event that is.
        beside = key is None or (is_causal and query.shape[1] == events.shape[1])
        hidden = padding if beside and padding is not None and padding.dtype == torch.bool else None
        seen = self._seen(mask, query, events)
        at, event_at = moments(times, event_times, seen, hidden)
        queries, keys, values = self._project(query, None if key is None else events, at, event_at)
        with full_precision(query.device):
            return self._meet(queries, keys, values, mask, at, event_at)

    def _seen(self, mask: Mask | None, query: Tensor, events: Tensor) -> Tensor | None:
        """Events `[B, n]` that some query sees; None for all."""
        shape = query.shape[0], self.num_heads, query.shape[1], events.shape[1]
        if mask is None:
            return None
        mask.check(shape)
        seen = mask.seen_keys(shape, events.device)
        return None if seen is None else seen.expand(shape[0], self.num_heads, shape[3]).any(dim=1)

    def _project(self, query: Tensor, key: Tensor | None, at: Moments, event_at: Moments) -> list[Tensor]:
        """Queries, keys and values `[B, H, n, D]`; key is None where the events are the queries."""
        size, weight, bias = self.embed_dim, self.in_proj_weight, self.in_proj_bias
        if self.joining is not None:
            features, event_features = self._features(at, event_at)
            query = self.joining(query, features)
            key = None if key is None else self.joining(key, event_features)
        if key is None:
            parts = list(linear(query, weight, bias).split(size, dim=-1))
        else:
            own, other = (None, None) if bias is None else bias.split((size, 2 * size))
            both = linear(key, weight[size:], other)
            parts = [linear(query, weight[:size], own), *both.split(size, dim=-1)]
        return [x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in parts]

    def _features(self, at: Moments, event_at: Moments) -> tuple[Tensor, Tensor]:
        """Features `[B, n, dim]` of the times of queries and of events."""
        assert self.encoding is not None
        if event_at is at:
            both = self.encoding(at.times)
            return both, both
        if not isinstance(self.encoding, PeriodicTime):
            return self.encoding(at.times), self.encoding(event_at.times)
        # In one call: frequencies that are drawn anew in each must be the same on both sides.
        sizes = at.times.shape[1], event_at.times.shape[1]
        own, other = self.encoding(torch.cat((at.times, event_at.times), dim=1)).split(sizes, dim=1)
        return own, other

    def _meet(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, at: Moments, event_at: Moments
    ) -> _Call:
        """Queries, keys and values as time leaves them, and what it adds to scores."""
        kind, encoding = self.interaction, self.encoding
        if self.joining is not None:
            return _Call(query, key, value, mask, None)
        if kind == "rotary":
            assert isinstance(encoding, PeriodicTime)
            own = Rotation.by(encoding.turns(at.since()), self.num_heads)
            other = own if event_at is at else Rotation.by(encoding.turns(event_at.since()), self.num_heads)
            value = other.turn(value) if self.rotate_values else value
            return _Call(own.turn(query), other.turn(key), value, mask, own if self.rotate_values else None)
        if kind == "bucket":
            assert self.table is not None
            unit, step = number(self.constants).unbind()
            added = masks.from_sdpa(bucketed(at.since(), event_at.since(), self.table, unit, step))
        elif kind == "bias":
            assert isinstance(encoding, PeriodicTime)
            assert self.cosine is not None
            assert self.sine is not None
            turns = encoding.turns(at.since())
            event_turns = turns if event_at is at else encoding.turns(event_at.since())
            left, right = harmonics(turns, event_turns, self.cosine, self.sine)
            added = masks.low_rank(left.to(query.dtype), right.to(key.dtype))
        else:
            added = masks.low_rank(*decayed(at.since(), event_at.since(), self.decays(), key.dtype))
        assert added is not None
        return _Call(query, key, value, added if mask is None else mask & added, None)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, interaction={self.interaction!r}, impl={self.impl!r}"


def _frequencies(encoding: PeriodicTime) -> int:
    """How many pairs of cosine and sine an encoding has."""
    place = next(encoding.parameters()).device
    with torch.no_grad():
        return encoding.turns(torch.zeros(1, dtype=torch.float64, device=place)).shape[-1]


class _Call(NamedTuple):
    """What `attend` is called with, and the rotation that its outcome turns back by."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    back: Rotation | None

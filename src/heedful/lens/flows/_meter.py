"""Turns the calls of attention of one run into sums between kinds of tokens, each as it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from heedful._errors import InvalidArgument, Unsupported
from heedful.bridges.modalities import Modalities
from heedful.bridges.structure import block_of, output_map, output_matrix
from heedful.bridges.watch import Watched
from heedful.kernels import Kernel, Softmax
from heedful.lens.flows._masses import as_values, masses, pulled, uniform, visible
from heedful.lens.flows.result import Crossing, LayerFlow

# What a row of attention sums to where there is nothing to attend to.
LEAST = 1e-12
# Bytes of weights that wait to be summed up with those of other layers.
HELD = 2**22


@dataclass(frozen=True)
class Settings:
    """What to measure, as `flow` describes it."""

    mode: str = "fraction"
    special: str = "keep"
    rho: float = 0.0
    start: str = "uniform"


class Sorted(NamedTuple):
    """The tokens of a call: kinds of queries and keys (-1: left out), and which of them are no padding."""

    queries: Tensor  # [B, Q]
    keys: Tensor  # [B, K]
    real_queries: Tensor
    real_keys: Tensor


class Shared(NamedTuple):
    """What layers with one mask have in common: who their tokens are, and what even attention would give."""

    mask: Tensor | None
    form: tuple[object, ...]
    rows: Tensor  # [B, 1, M, Q]: queries by kinds
    columns: Tensor  # [B, 1 or H, K, M + 1]
    values: Tensor | None  # the same as attention takes them
    even: Tensor  # sums between kinds


class Given(NamedTuple):
    """What the queries of a call give to each kind of keys."""

    name: str
    kernel: Kernel | None
    weights: Tensor  # [B, H, Q, M + 1]
    rows: Tensor
    even: Tensor


class Summed(NamedTuple):
    """Sums between kinds of some layers, one after the other, with the same tokens."""

    names: Sequence[str]
    sums: Tensor  # [L, B, H, M, M]
    even: Tensor  # [B, 1 or H, M, M]
    outside: Tensor  # [L, B, H]


class Update(NamedTuple):
    """What a layer added to each token of a kind, by its norm."""

    block: str
    queries: int
    keys: int
    norms: Tensor  # [B, Q]


class Meter:
    """Measures every call of one run; `copy` and `tell` are what `watch` asks for."""

    def __init__(
        self,
        kinds: Modalities,
        settings: Settings,
        model: nn.Module | None = None,
        special: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> None:
        self.kinds, self.settings, self.model = kinds, settings, model
        self.special, self.valid = special, valid
        self.layers: list[LayerFlow] = []
        self.counts: Tensor | None = None
        self.other: set[str] = set()
        self._waiting: list[Watched] = []
        self._held: list[Given] = []
        self._summed: list[Summed] = []
        self._updates: list[Update] = []
        self._real: dict[int, Tensor] = {}
        self._shared: Shared | None = None
        self._uniform: tuple[Tensor | None, tuple[object, ...], Tensor] | None = None
        self._least: list[tuple[str, Kernel | None, Tensor]] = []

    def copy(self, call: Watched) -> object:
        """What becomes of a call at once: its weights by kinds, or the call itself where kinds or the layers above must be known first."""
        if not self.kinds.is_mixed(call.name):
            return ()
        if self.settings.mode == "flow" or self.kinds.ids is None:
            # Of the output only its size is wanted.
            size = call.output.new_empty(1).expand(call.output.shape)
            return replace(call, output=size, value=call.value if self.settings.mode == "norm" else None)
        shared = self._same(call)
        if shared is None:
            tokens = self.tokens(call)
            shared = None if tokens is None else self._settled(call, tokens)
        return () if shared is None else self._given(call, shared)

    def tell(self, call: Watched) -> None:
        if not self.kinds.is_joint:
            self._update(call)
        elif isinstance(call.kept, Given) and not call.cross:
            self._hold(call.kept)
        elif isinstance(call.kept, Watched) and not call.cross:
            self._waiting.append(call.kept)
        else:
            self.other.add(call.name)

    def finish(self, kinds: Modalities | None = None) -> None:
        """Measures the calls that waited, once the kinds are known."""
        self.kinds = kinds or self.kinds
        waiting = [(call, tokens) for call in self._waiting if (tokens := self.tokens(call)) is not None]
        self.other |= {call.name for call in self._waiting} - {call.name for call, _ in waiting}
        if self.settings.mode == "flow":
            self._summed = self._traced(waiting)
        else:
            for call, tokens in waiting:
                self._hold(self._given(call, self._same(call) or self._settled(call, tokens)))
            self._sum()
        # Read here, all at once: each number that is read while layers run would wait for the device.
        for name, kernel, least in self._least:
            if float(least) < -1e-3:
                raise Unsupported(
                    f"{name} attends with {kernel!r}, whose coefficients may be negative: they are no shares of anything"
                )
        self.counts = None if self.counts is None else self.counts.cpu()
        for names, *parts in self._summed:
            sums, even, outside = (part.double().cpu() for part in parts)
            first = len(self.layers)
            self.layers += [LayerFlow(first + at, name, sums[at], even, outside[at]) for at, name in enumerate(names)]

    def received(self, heads: Sequence[tuple[int, int]], kind: int) -> Tensor:
        """`[heads, B, N]`: what each token is given by the queries of a kind, on average, from heads of calls that waited."""
        waiting = [(call, tokens) for call in self._waiting if (tokens := self.tokens(call)) is not None]
        parts = []
        for layer, head in heads:
            if not 0 <= layer < len(waiting) or not 0 <= head < waiting[layer][0].output.shape[1]:
                raise InvalidArgument(f"there is no head {layer}.{head}: {len(waiting)} layers mix kinds")
            call, tokens = waiting[layer]
            chosen = self._kinds_of(tokens.queries, tokens.real_queries)[..., kind]  # [B, Q]
            rows = chosen.new_zeros(call.output.shape[:3])
            rows[:, head] = chosen / chosen.sum(1, keepdim=True).clamp_min(1)
            parts.append(pulled(call, rows).float().cpu())
        return torch.stack(parts)

    def tokens(self, call: Watched) -> Sorted | None:
        """The kinds of a call's tokens; None where it is not of the sequence that holds all of them."""
        batch, _, queries = call.output.shape[:3]
        keys = _keys(call)
        ids = self.kinds.of_sequence(keys)
        if ids is None or queries > keys:
            return None
        if ids.shape[0] not in (1, batch):
            raise InvalidArgument(
                f"modality is for {ids.shape[0]} sequences, but the model attends in {batch}; give integers ({batch}, tokens) or (tokens,)"
            )
        device = call.output.device
        ids = ids.to(device).expand(batch, -1)
        real = self._real_keys(call, keys).to(device).expand(batch, -1)
        if self.special is not None and self.settings.special == "exclude":
            marks = nn.functional.pad(self.special, (0, max(0, keys - self.special.shape[1])))[:, :keys].to(device)
            ids = ids.masked_fill(marks.expand_as(ids), -1)
        if self.counts is None:
            self.counts = torch.stack([((ids == at) & real).sum(1) for at in range(len(self.kinds.names))], 1)
        # With a cache, queries are the last of the sequence.
        return Sorted(ids[:, keys - queries :], ids, real[:, keys - queries :], real)

    def _real_keys(self, call: Watched, keys: int) -> Tensor:
        for known in (self.valid, self.kinds.valid):
            if known is not None and known.shape[1] == keys:
                return known
        shown = visible(call)
        return torch.ones(1, keys, dtype=torch.bool) if shown is None else shown

    def _given(self, call: Watched, shared: Shared) -> Given:
        # A copy: the rest of what attention gave on a GPU is many times as wide.
        weights = masses(call, shared.columns, shared.values).contiguous()
        return Given(call.name, call.kernel, weights, shared.rows, shared.even)

    def _hold(self, given: Given) -> None:
        """Keeps the weights of some layers: on a GPU what is done to small tensors costs as much for one layer as for several."""
        self._held.append(given)
        if sum(one.weights.nbytes for one in self._held) > HELD:
            self._sum()

    def _sum(self) -> None:
        """Sums up what is held, layers with the same tokens together."""
        held, self._held = self._held, []
        for _, layers in groupby(held, lambda one: (id(one.rows), id(one.even))):
            same = list(layers)
            rows, names = same[0].rows, [one.name for one in same]
            sums = torch.stack([one.weights for one in same]).to(rows.dtype)
            if sums.numel() and not all(isinstance(one.kernel, Softmax) for one in same):
                least = sums.flatten(1).amin(1)
                self._least += [(one.name, one.kernel, low) for one, low in zip(same, least, strict=True)]
            by_kind = _by_kind(rows, self._shares(sums))
            # The mean share that queries that count give to tokens that are left out.
            outside = by_kind[..., -1].sum(-1) / rows.sum((2, 3)).clamp_min(1)
            outside = outside if self.settings.mode == "fraction" else torch.zeros_like(outside)
            self._summed.append(Summed(names, by_kind[..., :-1], same[0].even, outside))

    def _form(self, call: Watched) -> tuple[object, ...]:
        key = call.key if call.weights is None else None
        heads = None if key is None else key.shape[1]
        return call.causal, call.output.shape[:3], _keys(call), heads, call.output.dtype, call.output.device

    def _same(self, call: Watched) -> Shared | None:
        """What the last call had in common with this one, if its mask and its sizes are the same."""
        last = self._shared
        alike = self.settings.mode == "fraction" and call.weights is None and last is not None
        return last if alike and last.mask is call.mask and last.form == self._form(call) else None  # type: ignore[union-attr]

    def _settled(self, call: Watched, tokens: Sorted) -> Shared:
        rows = self._kinds_of(tokens.queries, tokens.real_queries).mT[:, None]
        columns = self._columns(call, tokens)
        even = self._shares(self._even(call, tokens, columns))[..., : len(self.kinds.names)]
        values = as_values(call, columns) if call.weights is None and call.output.is_cuda else None
        shared = Shared(call.mask, self._form(call), rows, columns, values, _by_kind(rows, even))
        # A mask of weights is their own, and norms are of one layer's values.
        self._shared = shared if self.settings.mode == "fraction" and call.weights is None else None
        return shared

    def _kinds_of(self, ids: Tensor, real: Tensor) -> Tensor:
        """`[B, n, M]`: one where a token is of a kind; nothing for padding and what is left out."""
        kinds = torch.arange(len(self.kinds.names), device=ids.device)
        return ((ids[..., None] == kinds) & real[..., None]).to(_wide(ids))

    def _columns(self, call: Watched, tokens: Sorted) -> Tensor:
        """`[B, 1 or H, K, M + 1]`: the kinds of keys, and in the last column those left out that are no padding."""
        kinds = self._kinds_of(tokens.keys, tokens.real_keys)
        outside = ((tokens.keys < 0) & tokens.real_keys).to(kinds.dtype)[..., None]
        columns = torch.cat((kinds, outside), -1)[:, None]
        return columns if self.settings.mode != "norm" else columns * self._norms(call, tokens.real_keys)

    def _norms(self, call: Watched, real: Tensor) -> Tensor:
        r"""`[B, H, K, 1]`: $|v_j W_O^h|$, over the largest of all."""
        if call.value is None or self.model is None:
            raise Unsupported("mode='norm' needs values and the map of outputs; give the model and its inputs")
        heads, size = call.output.shape[1], call.value.shape[-1]
        matrix = output_matrix(output_map(self.model, call.name)).detach().float()
        if matrix.shape[1] != heads * size:
            raise Unsupported(
                f"the map of outputs of {call.name} is {tuple(matrix.shape)}; expected {heads} heads of {size}"
            )
        by_head = matrix.mT.unflatten(0, (heads, size))  # [H, E, d]
        values = torch.where(real[:, None, :, None], call.value.float(), 0.0)
        values = values.repeat_interleave(heads // values.shape[1], 1)
        squares = ((values @ (by_head @ by_head.mT)) * values).sum(-1, keepdim=True)
        norms = squares.clamp_min(0).sqrt()
        return norms / norms.amax().clamp_min(1e-30)

    def _even(self, call: Watched, tokens: Sorted, columns: Tensor) -> Tensor:
        """Even attention over the keys that a query may see, which layers that share a mask have in common."""
        alike = self.settings.mode != "norm" and call.weights is None
        last = self._uniform
        if alike and last is not None and last[0] is call.mask and last[1] == self._form(call):
            return last[2]
        there = tokens.real_keys.to(columns.dtype)[:, None, :, None].expand(-1, columns.shape[1], -1, -1)
        even = uniform(call, torch.cat((columns, there), -1))
        self._uniform = (call.mask, self._form(call), even) if alike else None
        return even

    def _shares(self, sums: Tensor) -> Tensor:
        """Rows over what they give to all that is no padding; norms are compared as they are."""
        return sums if self.settings.mode == "norm" else _over(sums, sums.sum(-1, keepdim=True))

    def _traced(self, waiting: Sequence[tuple[Watched, Sorted]]) -> list[Summed]:
        """From the last layer down: where that which is read off at the end came from."""
        layers: list[Summed] = []
        here: Tensor | None = None
        for call, tokens in reversed(waiting):
            if call.output.shape[2] != _keys(call):
                raise Unsupported(
                    "mode='flow' follows whole sequences through all layers; run the model without a cache"
                )
            here = self._first(tokens) if here is None else here
            columns = self._columns(call, tokens)
            sums = masses(call, columns).to(columns.dtype)
            even = self._shares(self._even(call, tokens, columns)).mean(1)
            step, even = (self._between(tokens, here, part) for part in (self._shares(sums).mean(1), even))
            layers.append(Summed([call.name], step[None], even, step.new_zeros(1, *step.shape[:2])))
            here = self._below(call, tokens, here, sums.sum(-1))
        return layers[::-1]

    def _first(self, tokens: Sorted) -> Tensor:
        """`[B, n]`: what is read off at the end, all of it or one token."""
        real = tokens.real_queries
        if self.settings.start == "uniform":
            return real.to(_wide(real)) / real.sum(1, keepdim=True).clamp_min(1)
        places = torch.arange(real.shape[1], device=real.device).expand_as(real)
        last = self.settings.start == "last"
        end = (places * real).amax(1) if last else places.masked_fill(~real, real.shape[1]).amin(1)
        return (places == end[:, None]).to(_wide(real))

    def _between(self, tokens: Sorted, here: Tensor, shares: Tensor) -> Tensor:
        """`[B, 1, M, M]`: what goes from kind to kind in a layer, with the part that stays with each token."""
        count, rho = len(self.kinds.names), self.settings.rho
        kinds = self._kinds_of(tokens.queries, tokens.real_queries)
        moved = (1 - rho) * shares[..., :count] + rho * kinds
        return (kinds.mT @ (here[..., None] * moved))[:, None]

    def _below(self, call: Watched, tokens: Sorted, here: Tensor, total: Tensor) -> Tensor:
        """`[B, n]`: where it was below a layer; `total` is what each query of each head gives to tokens that are no padding."""
        rows = _over(here[:, None].expand_as(total), total) / total.shape[1]
        # A query that attends to nothing keeps what it has.
        kept = here * (total <= LEAST).to(here.dtype).mean(1)
        moved = pulled(call, rows) * tokens.real_keys + kept
        return (1 - self.settings.rho) * moved + self.settings.rho * here

    def _update(self, call: Watched) -> None:
        """Notes how much a call adds to its tokens, of a model with a sequence for each kind."""
        sides = self.kinds.of_call(call.name, call.cross)
        if sides is None:
            return
        shown = visible(call)
        for kind, length in ((sides[0], call.output.shape[2]), (sides[1], _keys(call))):
            self._real.setdefault(kind, torch.ones(call.output.shape[0], length, dtype=torch.bool))
        if shown is not None:
            self._real[sides[1]] = shown.expand(call.output.shape[0], -1).cpu()
        assert self.model is not None
        behind = output_map(self.model, call.name)
        bias = getattr(behind, "bias", None)
        context = call.output.transpose(1, 2).flatten(2)
        added = nn.functional.linear(context, output_matrix(behind).to(context.dtype), bias)
        self._updates.append(Update(block_of(call.name), *sides, added.float().norm(dim=-1).double().cpu()))

    def crossings(self) -> tuple[Crossing, ...]:
        """Each update of cross-attention beside that of self-attention in the same block, or else in the last one before."""
        found, names = [], self.kinds.names
        for at, one in enumerate(self._updates):
            if one.queries == one.keys:
                continue
            own = [other for other in self._updates if other.queries == other.keys == one.queries]
            beside = [other for other in own if other.block == one.block] or [
                other for other in self._updates[:at] if other.queries == other.keys == one.queries
            ]
            if not beside or beside[-1].norms.shape != one.norms.shape:
                continue
            parts = one.norms / (one.norms + beside[-1].norms).clamp_min(1e-30)
            real = self._real[one.queries]
            share = (parts * real).sum(1) / real.sum(1).clamp_min(1)
            found.append(Crossing(one.block, names[one.queries], names[one.keys], share))
        if found:
            self.counts = torch.stack([self._real[at].sum(1) for at in range(len(names))], 1)
        return tuple(found)


def _wide(x: Tensor) -> torch.dtype:
    """What sums are kept in: double where that is cheap."""
    return torch.float64 if x.device.type == "cpu" else torch.float32


def _keys(call: Watched) -> int:
    return (
        call.weights.shape[-1]
        if call.weights is not None
        else call.output.shape[2]
        if call.key is None
        else call.key.shape[2]
    )


def _over(part: Tensor, total: Tensor) -> Tensor:
    """A quotient; nothing where there is nothing to divide."""
    return torch.where(total > LEAST, part / total.clamp_min(LEAST), 0.0).to(total.dtype)


def _by_kind(rows: Tensor, shares: Tensor) -> Tensor:
    """`[..., B, H, M, C]`: shares `[..., B, H, Q, C]` summed over the queries of each kind; a matrix product of so few columns is slower on a GPU."""
    kinds = rows.unbind(2)  # [B, 1, Q] each
    return torch.stack([(shares * kind[..., None]).sum(-2) for kind in kinds], -2)

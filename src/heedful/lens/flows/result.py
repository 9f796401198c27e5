"""Shares of attention between kinds of tokens, and what is read off them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from heedful._errors import InvalidArgument, MissingExtra, Unsupported
from heedful._plot import Axes, axes, colours, heat_map, whole_ticks
from heedful._result import Result
from heedful._text import cut, quantity

# Draws of the bootstrap, its coverage, and lines of a table.
DRAWS, LEVEL, SHOWN = 2000, 0.95, 8


def share(sums: Tensor) -> Tensor:
    """The share of `[..., M, M]` that lies off the diagonal; 0 where there is nothing."""
    total = sums.sum((-2, -1))
    own = sums.diagonal(0, -2, -1).sum(-1)
    return torch.where(total > 0, 1 - own / total.clamp_min(1e-300), 0.0).clamp(0.0, 1.0)


def interval(values: Tensor, level: float = LEVEL) -> tuple[float, float] | None:
    """The percentile bootstrap of the mean of `[B]` samples; None for fewer than two."""
    values = values[~values.isnan()]
    if len(values) < 2:
        return None
    at = torch.randint(len(values), (DRAWS, len(values)), generator=torch.Generator().manual_seed(0))
    means = values.double()[at].mean(1)
    low, high = torch.quantile(means, torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)).tolist()
    return low, high


def _by_row(sums: Tensor) -> Tensor:
    total = sums.sum(-1, keepdim=True)
    return sums / total.where(total > 0, math.nan)


@dataclass(frozen=True, repr=False)
class LayerFlow(Result):
    """One layer: sums of attention from the queries of each kind to the keys of each kind.

    Args:
        layer: its place among the layers that were measured.
        name: the module that attended.
        sums: `[B, H, M, M]`; rows are the kinds of queries.
        uniform: `[B, 1 or H, M, M]`, the same where every query attends evenly to all keys that it may see.
        outside: `[B, H]`, the share of attention on tokens that are left out, as special ones may be.
    """

    layer: int
    name: str
    sums: Tensor
    uniform: Tensor
    outside: Tensor

    @property
    def imf(self) -> Tensor:
        """`[B, H]`: the share of attention that goes from one kind to another."""
        return share(self.sums)

    @property
    def chance(self) -> Tensor:
        """`[B, 1 or H]`: the same for even attention."""
        return share(self.uniform)

    @property
    def mass(self) -> Tensor:
        """`[B, H, M, M]`: of the attention of a kind of queries, the share that goes to each kind of keys; NaN for a kind that is not there."""
        return _by_row(self.sums)

    @property
    def even_mass(self) -> Tensor:
        """`[B, 1 or H, M, M]`: the same for even attention."""
        return _by_row(self.uniform)

    def __repr__(self) -> str:
        return f"LayerFlow({self.layer}, {self.name}, {float(self.imf.mean()):.3f}, chance {float(self.chance.mean()):.3f})"


@dataclass(frozen=True)
class HeadFlow(Result):
    """One head: the share of its attention between kinds, that of even attention, and where most of it goes."""

    layer: int
    head: int
    imf: float
    chance: float
    lift: float
    direction: str

    def __str__(self) -> str:
        return f"head {self.layer}.{self.head}: {self.imf:.2f} between kinds ({_times(self.lift)}), most of it {self.direction}"


@dataclass(frozen=True, repr=False)
class Crossing(Result):
    r"""A layer of cross-attention beside the self-attention of the same tokens.

    Which keys it attends to is a matter of construction, so its share is that of the updates: $|u^{cross}_i| / (|u^{self}_i| + |u^{cross}_i|)$, mean over
    tokens i, with u what the map of outputs adds to the token.

    Args:
        layer: the block, as in `model.named_modules()`.
        queries, keys: the kinds.
        cross_share: `[B]`.
    """

    layer: str
    queries: str
    keys: str
    cross_share: Tensor

    _also = ("mean", "interval")

    @property
    def mean(self) -> float:
        return float(self.cross_share.nanmean())

    @property
    def interval(self) -> tuple[float, float] | None:
        return interval(self.cross_share)

    def __repr__(self) -> str:
        return f"Crossing({self.layer}, {self.queries} -> {self.keys}, {self.mean:.3f})"


@dataclass(frozen=True, repr=False)
class Flow(Result):
    r"""How much attention goes between kinds of tokens, layer by layer and head by head.

    With $m_i$ the kind of token i, and sums over tokens that count: $IMF = \sum_{m_i \ne m_j} a_{ij} / \sum_{ij} a_{ij}$, of each head on each sample.

    Attributes:
        names: the kinds of tokens.
        counts: `[B, M]`, how many tokens of each.
        layers: a `LayerFlow` for each layer that mixes kinds.
        crossings: a `Crossing` for each layer of cross-attention, in models that keep a sequence for each kind.
        mode: `"fraction"`, `"flow"` or `"norm"`.
        reduce: `"macro"`, the mean over heads, then over samples; `"micro"`, the ratio of the sums of all.
        notes: what was left out, and why.
    """

    names: tuple[str, ...]
    counts: Tensor
    layers: tuple[LayerFlow, ...]
    crossings: tuple[Crossing, ...] = ()
    mode: str = "fraction"
    reduce: str = "macro"
    notes: tuple[str, ...] = ()

    _also = ("per_layer", "chance", "lift", "intervals", "directions")
    _not = ("layers",)

    @cached_property
    def per_layer(self) -> tuple[float, ...]:
        """IMF of each layer."""
        return tuple(self._reduced([one.sums for one in self.layers]))

    @cached_property
    def chance(self) -> tuple[float, ...]:
        """The same of even attention over the keys that each query may see."""
        return tuple(self._reduced([one.uniform.expand_as(one.sums) for one in self.layers]))

    @property
    def lift(self) -> tuple[float, ...]:
        """IMF over chance; NaN where one kind alone is there."""
        pairs = zip(self.per_layer, self.chance, strict=True)
        return tuple(own / even if even > 0 else math.nan for own, even in pairs)

    @cached_property
    def intervals(self) -> tuple[tuple[float, float] | None, ...]:
        """A 95 % bootstrap interval over samples for each layer; None for a single sample."""
        if self.reduce == "macro":
            return tuple(interval(one.imf.mean(1)) for one in self.layers)
        return tuple(_micro_interval(one.sums) for one in self.layers)

    @property
    def mass(self) -> Tensor:
        """`[L, B, H, M, M]`: of the attention of a kind of queries (rows), the share that goes to each kind of keys."""
        masses = [one.mass for one in self.layers]
        if len({tuple(mass.shape) for mass in masses}) > 1:
            raise Unsupported("layers have different numbers of heads; take mass layer by layer: flow.layers[0].mass")
        if not masses:
            raise Unsupported("kinds meet in cross-attention alone, whose map says nothing of them; see crossings")
        return torch.stack(masses)

    def direction(self, queries: str, keys: str) -> tuple[float, ...]:
        """The share of one kind's attention that goes to another, by layer: mean over heads, then samples in which it is there."""
        p, q = (self._number(name) for name in (queries, keys))
        return tuple(float(one.mass[..., p, q].mean(1).nanmean()) for one in self.layers)

    def direction_chance(self, queries: str, keys: str) -> tuple[float, ...]:
        """The same of even attention."""
        p, q = (self._number(name) for name in (queries, keys))
        return tuple(float(one.even_mass[..., p, q].mean(1).nanmean()) for one in self.layers)

    @property
    def directions(self) -> dict[str, tuple[float, ...]]:
        """Every direction from one kind to another, by layer."""
        return {f"{a} -> {b}": self.direction(a, b) for a, b in self.pairs}

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Kinds of queries and keys that differ."""
        return [(a, b) for a in self.names for b in self.names if a != b]

    def heads(self, count: int | None = None) -> tuple[HeadFlow, ...]:
        """The heads with the largest lift over chance, the largest first; all of them without a count."""
        if self.mode == "flow":
            raise Unsupported("mode='flow' averages heads; mode='fraction' ranks them")
        heads = []
        for one in self.layers:
            own, even = one.imf.mean(0), one.chance.mean(0).expand(one.sums.shape[1])
            for head, (imf, chance) in enumerate(zip(own.tolist(), even.tolist(), strict=True)):
                lift = imf / chance if chance > 0 else math.nan
                heads.append(HeadFlow(one.layer, head, imf, chance, lift, self._most(one.sums[:, head].sum(0))))
        ranked = sorted(heads, key=lambda one: (math.isnan(one.lift), -one.lift, -one.imf))
        return tuple(ranked[:count])

    def to_pandas(self) -> Any:
        """A row for each layer, head, sample and direction: the share of that kind's attention, and that of even attention."""
        try:
            import pandas
        except ImportError:
            raise MissingExtra("pandas", "tables") from None
        rows: list[dict[str, Any]] = []
        for one in self.layers:
            uniform = one.even_mass.expand_as(one.sums).tolist()
            for sample, heads in enumerate(one.mass.tolist()):
                for head, table in enumerate(heads):
                    rows += [
                        {"layer": one.layer, "module": one.name, "sample": sample, "head": head, "queries": a, "keys": b}
                        | {"mass": table[p][q], "chance": uniform[sample][head][p][q]}
                        for p, a in enumerate(self.names)
                        for q, b in enumerate(self.names)
                    ]  # fmt: skip
        return pandas.DataFrame(rows)

    def plot(self, ax: Axes | None = None) -> Axes:
        """IMF by layer with its interval, and every direction, each beside even attention; of models with cross-attention, its share by layer."""
        ax = axes(ax)
        if not self.layers:
            for pair in dict.fromkeys((one.queries, one.keys) for one in self.crossings):
                own = [one.mean for one in self.crossings if (one.queries, one.keys) == pair]
                ax.plot(range(len(own)), own, "o-", label=" \u2192 ".join(pair))
            ax.set(
                xlabel="layer of cross-attention",
                ylabel="share of the update",
                ylim=(0, 1),
                title="What cross-attention adds",
            )
        else:
            at = [one.layer for one in self.layers]
            bands = [one or (own, own) for one, own in zip(self.intervals, self.per_layer, strict=True)]
            ax.fill_between(at, [low for low, _ in bands], [high for _, high in bands], color="C1", alpha=0.2, lw=0)
            ax.plot(at, self.per_layer, "o-", color="C1", lw=2, label="between kinds")
            ax.plot(at, self.chance, "--", color="C1", lw=1, label="dashed: even attention")
            shown = self.pairs[:6]
            for colour, pair in zip(colours("viridis", len(shown), 0.85), shown, strict=True):
                ax.plot(at, self.direction(*pair), color=colour, lw=1, label=" \u2192 ".join(pair))
                ax.plot(at, self.direction_chance(*pair), "--", color=colour, lw=0.8)
            ax.set(xlabel="layer", ylabel="share of attention", title="Attention between kinds of tokens")
            ax.set_ylim(0, 1)
        whole_ticks(ax, "x")
        ax.legend(frameon=False, fontsize="small")
        return ax

    def plot_heads(self, ax: Axes | None = None) -> Axes:
        """IMF over chance as a heat map, layers down and heads across, on a scale of powers of two."""
        if not self.layers or self.mode == "flow":
            raise Unsupported("there are no heads to draw: kinds meet in cross-attention alone, or heads were averaged")
        lifts = {(one.layer, one.head): one.lift for one in self.heads()}
        wide = max(one.sums.shape[1] for one in self.layers)
        grid = [
            [math.log2(max(lifts.get((one.layer, head), math.nan), 2**-4)) for head in range(wide)]
            for one in self.layers
        ]
        ends = max(1.0, *(abs(value) for row in grid for value in row if not math.isnan(value)))
        ax = heat_map(ax, grid, "log2(share between kinds / even attention)", vmin=-ends, vmax=ends, cmap="PuOr_r")
        ax.set(xlabel="head", ylabel="layer", title="Which heads attend to another kind")
        return ax

    def __str__(self) -> str:
        return "\n".join([*self._head(), *(self._rows() if self.layers else self._crossed()), *self.notes])

    def __repr__(self) -> str:
        what = quantity(len(self.layers), "layer") if self.layers else quantity(len(self.crossings), "crossing")
        return f"Flow({', '.join(self.names)}: {what}, {quantity(self.counts.shape[0], 'sample')})"

    def _head(self) -> list[str]:
        means = self.counts.double().mean(0).tolist()
        kinds = ", ".join(f"{name} {mean:.0f}" for name, mean in zip(self.names, means, strict=True))
        several = f", mean of {self.counts.shape[0]} samples" if self.counts.shape[0] > 1 else ""
        return [f"Tokens: {kinds}{several}."]

    def _rows(self) -> list[str]:
        sampled = any(self.intervals)
        shown = self.pairs
        if len(shown) > 4:
            taken = {pair: sum(share for share in self.direction(*pair) if not math.isnan(share)) for pair in shown}
            shown = sorted(shown, key=lambda pair: -taken[pair])[:3]
        names = [cut(f"{a} -> {b}", 21) for a, b in shown]
        widths = [max(12, len(name)) for name in names]
        parts = [list(zip(self.direction(*pair), self.direction_chance(*pair), strict=True)) for pair in shown]
        head = "layer  between kinds" + ("        95 %" if sampled else "") + "  chance  lift"
        lines = [head + "".join(f"  {name:>{width}}" for name, width in zip(names, widths, strict=True))]
        ended = [at for at, one in enumerate(self.layers) if self.mode == "flow" and not one.sums.any()]
        for at, one in enumerate(self.layers):
            if at in ended:
                continue
            bound = self.intervals[at]
            cells = f"{one.layer:>5}  {self.per_layer[at]:>13.3f}"
            cells += (f"  {bound[0]:.2f}..{bound[1]:.2f}" if bound else " " * 12) if sampled else ""
            cells += f"  {self.chance[at]:>6.3f}  {_times(self.lift[at], '')[:4]:>4}"
            pairs = ["-" if math.isnan(part[at][0]) else f"{part[at][0]:.2f} ({part[at][1]:.2f})" for part in parts]
            lines.append(cells + "".join(f"  {pair:>{width}}" for pair, width in zip(pairs, widths, strict=True)))
        lines.append("Of each direction, the share of its queries' attention; in brackets that of even attention.")
        if ended:
            several = f"layer {ended[0]}" if len(ended) == 1 else f"layers {ended[0]} to {ended[-1]}"
            lines.append(
                f"Nothing is shown of {several}: what is followed down is there a token that is left out, as special ones."
            )
        if self.mode != "flow":
            lines += ["The heads with most attention to another kind, against even attention:"]
            lines += [f"  {one}" for one in self.heads(5)]
        outside = sum(float(one.outside.mean()) for one in self.layers) / len(self.layers)
        if outside > 0.005:
            lines.append(f"{outside:.0%} of the attention is on tokens that are left out, as special ones.")
        return lines

    def _crossed(self) -> list[str]:
        lines = ["share of the update that cross-attention makes, beside self-attention, mean over tokens:"]
        width = max((len(one.layer) for one in self.crossings), default=0)
        for one in self.crossings:
            bound = f"  95 %: {one.interval[0]:.2f}..{one.interval[1]:.2f}" if one.interval else ""
            lines.append(f"  {one.layer:<{width}}  {one.queries} -> {one.keys}  {one.mean:.3f}{bound}")
        return lines

    def _reduced(self, sums: Sequence[Tensor]) -> list[float]:
        if self.reduce == "micro":
            return [float(share(one.sum((0, 1)))) for one in sums]
        return [float(share(one).mean(1).mean()) for one in sums]

    def _most(self, sums: Tensor) -> str:
        """The direction that takes most of what goes between kinds."""
        p, q = divmod(int(sums.clone().fill_diagonal_(-1.0).argmax()), len(self.names))
        return f"{self.names[p]} -> {self.names[q]}"

    def _number(self, name: str) -> int:
        if name not in self.names:
            raise InvalidArgument(f"there is no kind {name!r}; the kinds are {', '.join(self.names)}")
        return self.names.index(name)


def _micro_interval(sums: Tensor) -> tuple[float, float] | None:
    samples = sums.sum(1)
    if len(samples) < 2:
        return None
    at = torch.randint(len(samples), (DRAWS, len(samples)), generator=torch.Generator().manual_seed(0))
    drawn = share(samples[at].sum(1))
    ends = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    low, high = torch.quantile(drawn.double(), ends).tolist()
    return low, high


def _times(lift: float, words: str = " times chance") -> str:
    return "none" if math.isnan(lift) else f"{lift:.1f}{words}"

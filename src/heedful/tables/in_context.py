"""A network that answers tables it was not trained on: rows with known targets are its context, other rows are asked (Müller et al. 2022; Hollmann et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from heedful._attend import attend
from heedful._checks import check_whole
from heedful._errors import InvalidArgument
from heedful.kernels import Softmax
from heedful.nn import Block, Module

FAR = 6.0
"""Standard deviations beyond which numbers are cut."""

WAVES = (1.0, 2.0, 4.0)
"""Frequencies of the sines and cosines of a number and of its rank."""

DOUBT = 2e-3
"""What is added to the votes of rows under the logarithm: no class is impossible."""

WIDE = 5.0
"""Numbers are answered between so many deviations on both sides of the mean."""


class Context(NamedTuple):
    """What is known of the rows of a context: their cells and targets, what rows are in front of each layer, and what votes need."""

    values: Tensor
    missing: Tensor
    is_category: Tensor
    identity: Tensor
    layers: tuple[Tensor, ...]
    rows: Tensor
    target: Tensor
    classes: Tensor


class InContextNetwork(Module):
    r"""Attention between the columns of each row, and from each row to the rows of the context, in turn; nothing is fitted to a table.

    A cell is a vector of its number (in deviations of the context, cut at 6), its rank in the context, sines and cosines of both, whether it is missing and whether it is
    a category, and of a random identity of its column; in wide tables two neighbours share a vector (`paired`). The target is a column in front. Layers are $x \leftarrow \mathrm{Block}_{columns}(x)$, then each column
    attends along its rows, to those of the context alone. The log-probability of class c is that of a map of the target's cell plus votes of the context,

    $$\sum_h w_h \log \left( \sum_i a_{hi} [y_i = c] + 0.002 \right),$$

    of classes that the context has. Asked rows do not see one another; an order of the context's rows does not matter.

    With `numbers` targets are numbers, which the context's mean and deviation standardise, and the classes are steps from -5 to 5 deviations: a target between
    two steps is a share of each, so that an answer is a law, and its mean (`means`) a number.

    Args:
        classes: classes of a table, at most; steps of a number.
        embed_dim, num_heads, layers, expansion: the network's sizes.
        numbers: whether targets are numbers.
        votes: whether rows of the context vote, beside the map.
        ranks, waves, identity: whether cells know their rank, sines and cosines; how many random numbers identify a column (0: columns are known by their cells alone).
        paired: of tables with more columns than this, two neighbouring cells of a row are one vector, which halves the work; None for never.

    >>> network = InContextNetwork(4, embed_dim=16, num_heads=2, layers=1)
    >>> values, target = torch.randn(3, 12, 5), torch.randint(2, (3, 8))
    >>> network(values, target, torch.tensor([2, 2, 2])).exp().sum(-1).allclose(torch.ones(3, 4))
    True
    """

    def __init__(
        self,
        classes: int = 10,
        embed_dim: int = 128,
        num_heads: int = 4,
        layers: int = 6,
        expansion: int = 2,
        *,
        numbers: bool = False,
        votes: bool = True,
        ranks: bool = True,
        waves: bool = True,
        identity: int = 16,
        paired: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_whole(classes=classes, embed_dim=embed_dim, layers=layers, expansion=expansion)
        check_whole(0, identity=identity)
        check_whole(optional=True, paired=paired)
        self.classes, self.embed_dim, self.num_heads, self.layers = classes, embed_dim, num_heads, layers
        self.numbers, self.paired = numbers, paired
        self.expansion, self.votes, self.ranks, self.waves, self.identity = expansion, votes, ranks, waves, identity
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        size, cells = (1 + ranks) * (1 + 2 * len(WAVES) * waves) + 2, 1 if paired is None else 2
        self.cell = nn.Sequential(
            nn.Linear(cells * size, embed_dim, **place), nn.GELU(), nn.Linear(embed_dim, embed_dim, **place)
        )
        self.column = nn.Linear(cells * identity, embed_dim, bias=False, **place) if identity else None
        # Of a target that is asked for: the last class, or of numbers the only one.
        self.label = nn.Embedding(1 if numbers else classes + 1, embed_dim, **place)
        if numbers:
            self.number = nn.Sequential(
                nn.Linear(size - 2, embed_dim, **place), nn.GELU(), nn.Linear(embed_dim, embed_dim, **place)
            )
        self.between_columns = nn.ModuleList(Block(embed_dim, num_heads, 0, bias=False, **place) for _ in range(layers))
        self.between_rows = nn.ModuleList(
            Block(embed_dim, num_heads, expansion * embed_dim, bias=False, **place) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(embed_dim, **place)
        self.head = nn.Sequential(
            nn.Linear(embed_dim, 2 * embed_dim, **place), nn.GELU(), nn.Linear(2 * embed_dim, classes, **place)
        )
        if votes:
            self.query = nn.Linear(embed_dim, embed_dim, **place)
            self.key = nn.Linear(embed_dim, embed_dim, **place)
            self.weight = nn.Parameter(torch.full((num_heads,), 0.5 / num_heads, **place))
        if self.column is not None:
            nn.init.normal_(self.column.weight, std=0.1)
        for name, part in self.named_parameters():
            # Layers begin as what changes nothing.
            if name.startswith("between_") and name.endswith(("out_proj.weight", "linear2.weight")):
                nn.init.zeros_(part)

    def forward(
        self,
        values: Tensor,
        target: Tensor,
        classes: Tensor,
        is_category: Tensor | None = None,
        identity: Tensor | None = None,
    ) -> Tensor:
        """Log-probabilities `(B, asked, classes)` of the rows behind the context, which has as many as `target` `(B, n)`.

        `values` `(B, n + asked, d)`, NaN where a cell is missing; `classes` `(B,)`: how many the context has, numbered from 0; `is_category` `(B, d)`; `identity` `(B, d, identity)`, drawn anew by
        default, so that a call without it is one of many answers: give it, or average over calls.
        """
        count = target.shape[1]
        context = self._known(values[:, :count], target, classes, is_category, identity)
        row = self._layers(self._cells(values, context, count), count)
        return self._decided(row[:, count:], context._replace(rows=row[:, :count]))

    def remember(
        self,
        values: Tensor,
        target: Tensor,
        classes: Tensor,
        is_category: Tensor | None = None,
        identity: Tensor | None = None,
    ) -> Context:
        """Everything that answers need of a context `(B, n, d)`, computed once."""
        layers: list[Tensor] = []
        known = self._known(values, target, classes, is_category, identity)
        row = self._layers(self._cells(values, known, target.shape[1]), target.shape[1], layers)
        return known._replace(layers=tuple(layers), rows=row)

    def _known(
        self,
        values: Tensor,
        target: Tensor,
        classes: Tensor,
        is_category: Tensor | None,
        identity: Tensor | None,
    ) -> Context:
        """What cells need of a context."""
        if values.ndim != 3 or target.shape != values.shape[:2]:
            raise InvalidArgument(
                f"values must be (batch, rows, columns) and target (batch, rows); got {tuple(values.shape)} and {tuple(target.shape)}"
            )
        if is_category is None:
            is_category = torch.zeros(len(values), values.shape[2], dtype=torch.bool, device=values.device)
        if identity is None:
            identity = torch.randn(
                len(values), values.shape[2], self.identity, device=values.device, dtype=values.dtype
            )
        missing = values.isnan()
        return Context(values, missing, is_category, identity, (), values, target, classes)

    def _layers(self, x: Tensor, count: int, kept: list[Tensor] | None = None) -> Tensor:
        """The targets' cells `(B, rows, embed_dim)` behind all layers, in which rows look at the first `count` ones; `kept` takes what rows looked at."""
        for columns, rows in self._pairs():
            along, sizes = self._along(columns, x)
            if kept is not None:
                kept.append(along)
            x = rows(along, seen=None if count == along.shape[1] else count).unflatten(0, sizes).transpose(1, 2)
            del along
        return self.norm(x[:, :, 0])

    def _pairs(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        return zip(self.between_columns, self.between_rows, strict=True)

    def _along(self, columns: nn.Module, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Cells behind a block between columns, each column along its rows, `(B * columns, rows, embed_dim)`; behind the last one only the target's is asked for."""
        cells = x.flatten(0, 1)
        is_last = columns is self.between_columns[-1]
        cells = columns(cells[:, :1], key=cells) if is_last else columns(cells)
        return cells.unflatten(0, x.shape[:2]).transpose(1, 2).flatten(0, 1), (len(x), cells.shape[1])

    def answer(self, values: Tensor, context: Context) -> Tensor:
        """Log-probabilities `(B, asked, classes)` of rows `(B, asked, d)` by a context."""
        return self._decided(self._rows(values, context), context)

    def _decided(self, row: Tensor, context: Context) -> Tensor:
        logits = self.head(row)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.votes:
            logits = logits + self._votes(row, context).to(logits)
        if self.numbers:
            return logits.log_softmax(-1)
        absent = torch.arange(self.classes, device=row.device) >= context.classes[:, None]
        return logits.masked_fill(absent[:, None], -torch.inf).log_softmax(-1)

    def attention(self, values: Tensor, context: Context) -> Tensor:
        """How much each asked row takes of the votes of each row of the context, `(B, asked, n)`, the mean over heads; rows sum to 1."""
        if not self.votes:
            raise InvalidArgument("this network has no votes; votes=False")
        q, k = self._heads(self.query(self._rows(values, context))), self._heads(self.key(context.rows))
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1).mean(1)

    def _rows(self, values: Tensor, context: Context) -> Tensor:
        """The targets' cells of asked rows behind all layers, `(B, asked, embed_dim)`."""
        x = self._cells(values, context, 0)
        for (columns, rows), key in zip(self._pairs(), context.layers, strict=True):
            along, sizes = self._along(columns, x)
            x = rows(along, key=key).unflatten(0, sizes).transpose(1, 2)
        return self.norm(x[:, :, 0])

    def _votes(self, row: Tensor, context: Context) -> Tensor:
        labels = self.shares(context.target, context.target).to(row)[:, None].expand(-1, self.num_heads, -1, -1)
        shares = attend(self._heads(self.query(row)), self._heads(self.key(context.rows)), labels, kernel=Softmax())
        return torch.einsum("bhnc,h->bnc", (shares.float() + DOUBT).log(), self.weight.float())

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def shares(self, target: Tensor, known: Tensor) -> Tensor:
        """Targets `(B, m)` as shares of the classes, `(B, m, classes)`, by the targets `(B, n)` of a context: one class, or of a number the two steps that it lies between."""
        if not self.numbers:
            return functional.one_hot(target, self.classes)
        step = 2 * WIDE / (self.classes - 1)
        place = ((_standard(target, known).clamp(-WIDE, WIDE) + WIDE) / step).clamp(0, self.classes - 1)
        below = place.floor().clamp(max=self.classes - 2)
        above = place - below
        both = torch.stack((1 - above, above), dim=-1)
        at = torch.stack((below, below + 1), dim=-1).long()
        return torch.zeros(*target.shape, self.classes, dtype=both.dtype, device=both.device).scatter_(-1, at, both)

    def means(self, logs: Tensor, known: Tensor) -> Tensor:
        """The mean of answers `(B, asked, classes)` in the units of a context's targets `(B, n)`, `(B, asked)`."""
        return (logs.exp() * self.steps(known.to(logs))[:, None]).sum(-1)

    def steps(self, known: Tensor) -> Tensor:
        """Where the steps of a number lie, `(B, classes)`, by the targets `(B, n)` of a context."""
        mean, spread = _moments(known)
        return torch.linspace(-WIDE, WIDE, self.classes, dtype=known.dtype, device=known.device) * spread + mean

    def _cells(self, values: Tensor, context: Context, count: int) -> Tensor:
        """Vectors of the target and of all cells, `(B, rows, 1 + d, embed_dim)`, or of all pairs; targets of the first `count` rows are known."""
        inputs = self._together(self._inputs(values, context))
        x = self.cell(inputs.to(self.norm.weight.dtype))
        if self.column is not None:
            x = x + self.column(self._together(context.identity).to(x.dtype))[:, None]
        return torch.cat((self._labels(context.target[:, :count], values.shape[1]).to(x.dtype)[:, :, None], x), dim=2)

    def _together(self, x: Tensor) -> Tensor:
        """What is known of columns, `(..., d, k)`, as vectors have it: of each alone, or of each with the next one; zeros where there is none."""
        if self.paired is None:
            return x
        if x.shape[-2] <= self.paired:
            return functional.pad(x, (0, x.shape[-1]))
        return functional.pad(x, (0, 0, 0, x.shape[-2] % 2)).unflatten(-2, (-1, 2)).flatten(-2)

    def _labels(self, target: Tensor, rows: int) -> Tensor:
        """Vectors `(B, rows, embed_dim)` of targets, of which the first are known."""
        if not self.numbers:
            return self.label(functional.pad(target, (0, rows - target.shape[1]), value=self.classes))
        hidden = self.label.weight.expand(len(target), rows - target.shape[1], -1)
        parts = [_standard(target, target).clamp(-FAR, FAR)] if target.shape[1] else []
        if not parts:
            return hidden
        if self.ranks:
            parts.append(_ranks(target.contiguous(), target.sort(-1).values, target.shape[1]))
        known = self.number(self._waves(parts).to(self.norm.weight.dtype))
        return torch.cat((known, hidden.to(known)), dim=1)

    def _waves(self, parts: list[Tensor]) -> Tensor:
        """Numbers, with their sines and cosines, along a new last axis."""
        waves = [wave(speed * part) for part in parts for speed in WAVES for wave in (torch.sin, torch.cos)]
        return torch.stack(parts + waves * self.waves, dim=-1)

    def _inputs(self, values: Tensor, context: Context) -> Tensor:
        """What is known of each cell, `(B, rows, d, inputs)`; statistics are of the context alone."""
        missing = values.isnan()
        x = torch.where(missing, values.new_zeros(()), values)
        known = torch.where(context.missing, values.new_zeros(()), context.values)
        there = (~context.missing).to(values)
        count = there.sum(1, keepdim=True).clamp_min(1)
        mean = (known * there).sum(1, keepdim=True) / count
        spread = ((known - mean).square() * there).sum(1, keepdim=True).div(count).sqrt()
        number = torch.where(spread > 1e-8, (x - mean) / (spread + 1e-8), 0.0).clamp(-FAR, FAR)
        parts = [number]
        if self.ranks:
            # Missing cells are sorted to the end.
            ordered = torch.where(context.missing, torch.inf, known).mT.sort(-1).values.contiguous()
            parts.append(_ranks(x.mT.contiguous(), ordered, count.mT).mT)
        inputs = self._waves(parts) * (~missing)[..., None]
        flags = torch.stack((missing, context.is_category[:, None].expand_as(missing)), dim=-1)
        return torch.cat((inputs, flags.to(inputs)), dim=-1)


def _ranks(x: Tensor, ordered: Tensor, count: Tensor | int) -> Tensor:
    """The share of `count` ordered numbers below x, the middle of all equal ones, of mean 0 and deviation 1 over those numbers."""
    place = torch.searchsorted(ordered, x) + torch.searchsorted(ordered, x, right=True)
    return (place.to(x) / (2 * count)).clamp(0, 1).sub(0.5).mul(12**0.5)


def _moments(known: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of numbers `(B, n)`, `(B, 1)`."""
    return known.mean(-1, keepdim=True), known.std(-1, keepdim=True, correction=0)


def _standard(x: Tensor, known: Tensor) -> Tensor:
    mean, spread = _moments(known)
    return torch.where(spread > 1e-12, (x - mean) / spread.clamp_min(1e-12), 0.0)

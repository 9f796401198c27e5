"""Synthetic tables to learn from: columns of random graphs, targets of many kinds, measured as people measure things.

A network that is to answer tables it never saw, without training, is trained on tables drawn here (Müller et al. 2022, "Transformers can do
Bayesian inference"; Hollmann et al. 2023, "TabPFN"). `draw` gives a batch of one shape; each kind of target is a small function in `TARGETS`,
each way of measuring a column one in `MEASURED`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heedful._checks import check_choice, check_whole
from heedful.tables._draws import Draws, gumbel, ranks_of, standardised

CLASSES = 10
"""Classes of a table, at most."""

FAR = 1e4
"""No cell is larger."""

LEVELS = 18
"""Levels of a discrete column, at most."""

MOST_GROUPS = 24
"""Groups that the rows of a table are of, at most."""

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x,
    lambda x: x,
    torch.tanh,
    torch.relu,
    lambda x: functional.leaky_relu(x, 0.1),
    lambda x: torch.sin(2 * x),
    lambda x: torch.sin(5 * x),
    torch.abs,
    torch.square,
    lambda x: torch.exp(-x.square()),
    torch.sign,
    lambda x: torch.sigmoid(6 * x),
    lambda x: torch.floor(2 * x) / 2,
    lambda x: x * x.abs(),
    lambda x: x * x.roll(1, -1),
    lambda x: torch.maximum(x, x.roll(1, -1)),
)


class Synthetic(NamedTuple):
    """Tables of one shape: `values (B, n, d)`, NaN where a cell is missing; `is_category (B, d)`; `target (B, n)`, classes from 0 on, -1 for one that no row of the
    context has; `classes (B,)`, how many the context has; or numbers, and no classes. The first `context` rows are those whose targets are known."""

    values: Tensor
    is_category: Tensor
    target: Tensor
    classes: Tensor
    context: int


class Shape(NamedTuple):
    """Rows whose targets are known, rows that are asked for, columns."""

    context: int
    asked: int
    columns: int


def shape(draws: Draws) -> Shape:
    """A table's size: 30 to 600 known rows, 1 to 50 columns, more small ones than large ones.

    >>> shape(Draws(0))
    Shape(context=365, asked=143, columns=44)
    """
    common = draws.common
    context = int(math.exp(common.uniform(math.log(30), math.log(600))))
    context = context if draws.chance(0.6) else common.randint(150, 520)
    columns = int(math.exp(common.uniform(math.log(2), math.log(50)))) if draws.chance(0.85) else common.randint(1, 50)
    return Shape(context, max(48, int(context * common.uniform(0.2, 0.6))), columns)


def draw(
    count: int,
    size: Shape,
    draws: Draws,
    *,
    part: int = 32,
    targets: Sequence[str] | None = None,
    numbers: bool = False,
) -> Synthetic:
    """`count` tables of one size. Up to `part` of them share the kind of graph, of roots and of target, not its numbers.

    `targets` names the kinds to draw from, of `TARGETS`; by default all. With `numbers` a target is a number instead of a class.

    >>> tables = draw(4, Shape(20, 10, 3), Draws(0))
    >>> tables.values.shape, tables.target.shape, bool((tables.target[:, :20] >= 0).all())
    (torch.Size([4, 30, 3]), torch.Size([4, 30]), True)
    """
    check_whole(count=count, part=part)
    names = tuple(TARGETS) if targets is None else tuple(targets)
    for name in names:
        check_choice(TARGETS, targets=name)
    rows = size.context + size.asked
    parts = [_part(min(part, count - at), rows, size.columns, draws, names, numbers) for at in range(0, count, part)]
    values, is_category, target = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    order = draws.order(size.columns)
    values, is_category = values[..., order], is_category[:, order]
    share = 0.3 * draws.uniform(count, 1, size.columns) * (draws.uniform(count, 1, 1) < 0.12)
    values = torch.where(draws.uniform(*values.shape) < share, torch.nan, values)
    classes = torch.zeros(count, dtype=torch.long, device=target.device)
    target, classes = (target, classes) if numbers else renamed(target, size.context, draws)
    return Synthetic(values, is_category, target, classes, size.context)


def renamed(target: Tensor, context: int, draws: Draws) -> tuple[Tensor, Tensor]:
    """Classes in a random order, those of the first `context` rows first, and how many these have; -1 for one that they do not have."""
    there = functional.one_hot(target[:, :context], CLASSES).any(1)
    places = (draws.uniform(*there.shape) + 10.0 * ~there).argsort(1).argsort(1)
    return torch.where(there, places, -1).gather(1, target), there.sum(1)


def _part(
    count: int, rows: int, columns: int, draws: Draws, names: Sequence[str], numbers: bool
) -> tuple[Tensor, Tensor, Tensor]:
    kinds = 2 if draws.chance(0.4) else draws.common.choice([3, 3, 4, 4, 5, 6, 7, 8, 9, 10, 10, 10])
    kinds = 0 if numbers else kinds
    weights = [TARGETS[name][1] for name in names]
    target = draws.common.choices([TARGETS[name][0] for name in names], weights)[0]
    # Half of the tables whose classes are groups have as many groups as classes.
    groups = kinds if kinds and draws.chance(0.5) else draws.common.randint(2, MOST_GROUPS)
    graph = nodes(count, rows, columns, draws, groups if target is by_group else None)
    values, is_category = measured(graph.seen, draws)
    source = standardised(values) if draws.chance(0.6) else graph.seen
    labels = target(source, graph, kinds, draws)
    if numbers:
        return values, is_category, labels
    share = 0.4 * draws.uniform(count, 1) ** 2 * (draws.uniform(count, 1) < 0.4)
    wrong = draws.uniform(count, rows) < share
    return values, is_category, torch.where(wrong, draws.whole(kinds, count, rows), labels)


# Columns


class Graph(NamedTuple):
    """Nodes of a random graph: those that become columns `(B, n, d)`, others that do not, and the group that each row is of, where its roots have groups."""

    seen: Tensor
    hidden: Tensor
    groups: Tensor | None


def nodes(count: int, rows: int, columns: int, draws: Draws, groups: int | None = None) -> Graph:
    """A layered random graph: nodes are sparse sums of nodes before, through random functions, with noise; some are seen as columns.

    Half of the graphs have roots in groups, and all for which a number of `groups` is given.
    """
    common = draws.common
    roots = common.choice([1, 2, 3, 4, 5, 6, 8, 10, 14, 20, 30]) if draws.chance(0.8) else columns
    kind, group = 1.0 if groups else common.random(), None
    if kind < 0.3:
        z = draws.normal(count, rows, roots)
    elif kind < 0.45:
        z = 3.4 * draws.uniform(count, rows, roots) - 1.7
    elif kind < 0.5:
        z = draws.normal(count, rows, roots) / (draws.normal(count, rows, roots).abs() + 0.3)
    else:
        z, group = grouped(count, rows, roots, groups or common.randint(2, MOST_GROUPS), draws)
    layers, width = common.choice([0, 1, 1, 2, 2, 3, 4]), common.choice([16, 24, 32, 48])
    is_linear = layers == 0
    layers, width = (1, columns + 12) if is_linear else (max(layers, math.ceil((columns + 12) / width)), width)
    noise = torch.exp(4.6 * draws.uniform(count, 1, 1) - 4.6) * (draws.uniform(count, 1, 1) < 0.8)
    known, new = z, []
    for _ in range(layers):
        source = known if draws.chance(0.7) else known[..., -width:]
        h = standardised(source @ weights(count, source.shape[-1], width, draws))
        if not is_linear:
            h = h * torch.exp(0.5 * draws.normal(count, 1, width)) + 0.7 * draws.normal(count, 1, width)
            pieces = h.tensor_split(common.choice([1, 2, 4]), dim=-1)
            h = standardised(torch.cat([common.choice(ACTIVATIONS)(piece) for piece in pieces], dim=-1))
        h = h + noise * torch.exp(0.7 * draws.normal(count, 1, width)) * draws.normal(count, rows, width)
        new.append(h)
        known = torch.cat((known, h), dim=-1)
    everything = torch.cat(new, dim=-1)
    # Columns are rather early or rather late nodes.
    size = everything.shape[-1]
    lean = 1.5 * draws.normal(count, 1) * torch.arange(size, device=z.device) / size
    order = (draws.uniform(count, size) + lean).argsort(-1)
    everything = everything.gather(2, order[:, None].expand_as(everything))
    return Graph(everything[..., :columns], everything[..., columns:], group)


def grouped(count: int, rows: int, roots: int, groups: int, draws: Draws) -> tuple[Tensor, Tensor]:
    """Roots that lie in groups of unequal size and spread, and the group of each row."""
    centres = draws.normal(count, groups, roots) * (0.5 + 2.5 * draws.uniform(count, 1, 1))
    sizes = draws.normal(count, 1, groups) * draws.uniform(count, 1, 1)
    group = (sizes + gumbel(draws, count, rows, groups)).argmax(-1)
    at = group[..., None].expand(count, rows, roots)
    spread = torch.exp(0.4 * draws.normal(count, groups, roots)).gather(1, at)
    return centres.gather(1, at) + spread * draws.normal(count, rows, roots), group


def weights(count: int, inputs: int, outputs: int, draws: Draws) -> Tensor:
    """Sparse weights `(B, inputs, outputs)`: each output has an input, and some tables have few for each."""
    w = draws.normal(count, inputs, outputs)
    if draws.chance(0.3):
        w = w * draws.normal(count, inputs, outputs).abs()
    many = torch.exp(draws.uniform(count, 1, 1) * math.log(max(inputs, 2)))
    wanted = many if draws.chance(0.6) else torch.full_like(many, 1 + 4 * draws.common.random())
    there = draws.uniform(count, inputs, outputs) < wanted / inputs
    one = functional.one_hot(draws.whole(inputs, count, outputs), inputs).mT.bool()
    return w * (there | one)


# How a column is measured: each takes columns `(B, n, d)` and their ranks in [0, 1), both standardised before.


def skewed(x: Tensor, ranks: Tensor, draws: Draws) -> Tensor:
    """Like an income: the exponential of a normal number."""
    return torch.exp(x.clamp(-4, 4) * (0.3 + 1.2 * draws.uniform(len(x), 1, x.shape[2])))


def powered(x: Tensor, ranks: Tensor, draws: Draws) -> Tensor:
    """A power that keeps the sign."""
    return x.sign() * x.abs() ** (0.4 + 2 * draws.uniform(len(x), 1, x.shape[2]))


def floored(x: Tensor, ranks: Tensor, draws: Draws) -> Tensor:
    """Cut from below, as by a limit of detection."""
    return torch.maximum(x, 0.7 * draws.normal(len(x), 1, x.shape[2]))


def ranked(x: Tensor, ranks: Tensor, draws: Draws) -> Tensor:
    """A rank among the rows."""
    return ranks


def counted(x: Tensor, ranks: Tensor, draws: Draws) -> Tensor:
    """A count: whole numbers, many of them small."""
    return torch.floor(
        torch.exp(x.clamp(-4, 4) * draws.uniform(len(x), 1, x.shape[2])) * 3 * draws.uniform(len(x), 1, 1)
    )


# Each with the share of columns that it is tried on.
MEASURED: dict[Callable[[Tensor, Tensor, Draws], Tensor], float] = {
    skewed: 0.3,
    powered: 0.15,
    floored: 0.15,
    ranked: 0.15,
    counted: 0.15,
}


def measured(x: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Columns as a table has them: some say nothing, some are warped, some are whole numbers or names of levels, `(B, d)` says which."""
    count, rows, columns = x.shape

    def some(share: float) -> Tensor:
        most = share * (draws.uniform(count, 1, 1) < 0.5) * draws.uniform(count, 1, 1) * 2
        return draws.uniform(count, 1, columns) < most

    x = standardised(torch.where(some(0.3), draws.normal(count, rows, columns), x))
    ranks = ranks_of(x)
    for way, share in MEASURED.items():
        x = torch.where(some(share), way(x, ranks, draws), x)
    is_discrete = draws.uniform(count, 1, columns) < draws.uniform(count, 1, 1) * (draws.uniform(count, 1, 1) < 0.6)
    many = torch.floor(1 + torch.exp(2.8 * draws.uniform(count, 1, columns)))
    alike = draws.uniform(count, 1, 1) < 0.25
    many = torch.where(alike, many[..., :1].clamp(max=6), many)
    level = torch.floor(ranks ** torch.exp(0.6 * draws.normal(count, 1, columns)) * many).clamp(0, LEVELS - 1)
    is_named = draws.uniform(count, 1, columns) < draws.uniform(count, 1, 1)
    names = draws.order(count, columns, LEVELS).mT.to(x)
    x = torch.where(is_discrete, torch.where(is_named, names.gather(1, level.long()), level), x)
    is_category = is_discrete & is_named & (draws.uniform(count, 1, columns) < 0.85)
    return torch.nan_to_num(x, 0.0, FAR, -FAR).clamp(-FAR, FAR), is_category[:, 0]


# Kinds of targets: each takes columns `(B, n, d)`, the graph they are from, the number of classes, and gives classes `(B, n)`; numbers where there are no classes.


def by_group(x: Tensor, graph: Graph, kinds: int, draws: Draws) -> Tensor:
    """The class is the cause: rows of one group have one class. Without groups, by a node that is not seen."""
    if graph.groups is None:
        return by_node(x, graph, kinds, draws)
    count = len(x)
    if not kinds:
        return numbers_of(draws.normal(count, MOST_GROUPS).gather(1, graph.groups)[..., None], draws)
    classes = torch.arange(MOST_GROUPS, device=x.device).expand(count, -1) % kinds
    classes = classes if draws.chance(0.7) else draws.whole(kinds, count, MOST_GROUPS)
    return classes.gather(1, graph.groups)


def by_node(x: Tensor, graph: Graph, kinds: int, draws: Draws) -> Tensor:
    """By one node that is not seen, or the largest of several: of twelve those that a column has most to do with."""
    hidden = graph.hidden[..., :12]
    related = (standardised(graph.seen).mT @ standardised(hidden)).abs().amax(1)
    best = related.argsort(1, descending=True)[:, None, : _scores(min(kinds, hidden.shape[2]), draws, 0.4)]
    return classes_of(hidden.gather(2, best.expand(-1, hidden.shape[1], -1)), kinds, draws)


def by_line(x: Tensor, graph: Graph, kinds: int, draws: Draws) -> Tensor:
    """By sparse linear scores."""
    return classes_of(standardised(x @ weights(len(x), x.shape[2], _scores(kinds, draws), draws)), kinds, draws)


def by_network(x: Tensor, graph: Graph, kinds: int, draws: Draws) -> Tensor:
    """By a network of one hidden layer."""
    width = draws.common.choice([4, 8, 16, 32])
    h = standardised(x @ weights(len(x), x.shape[2], width, draws)) + 0.7 * draws.normal(len(x), 1, width)
    scores = draws.common.choice(ACTIVATIONS)(h) @ draws.normal(len(x), width, _scores(kinds, draws))
    return classes_of(scores, kinds, draws)


def by_trees(x: Tensor, graph: Graph, kinds: int, draws: Draws) -> Tensor:
    """By 1 to 16 trees of depth 1 to 6; thresholds are values of random rows."""
    count, rows, columns = x.shape
    trees, depth = draws.common.choice([1, 1, 2, 4, 8, 16]), draws.common.randint(1, 6)
    size = 2**depth
    used = torch.exp(draws.uniform(count, 1) * math.log(columns + 1)).clamp(1, columns)
    column = (draws.uniform(count, trees * size) * used).long().clamp(max=columns - 1)
    bound = _cells(x, draws.whole(rows, count, trees * size), column) + 1e-4
    first = torch.arange(trees, device=x.device) * size
    node = torch.ones(count, rows, trees, dtype=torch.long, device=x.device)
    for _ in range(depth):
        at = (node + first).flatten(1)
        chosen, limit = (part.gather(1, at).view(node.shape) for part in (column, bound))
        node = 2 * node + (x.gather(2, chosen) > limit)
    leaves = draws.normal(count, trees * size, _scores(kinds, draws, 0.7))
    at = (node - size + first).flatten(1)[..., None].expand(-1, -1, leaves.shape[2])
    return classes_of(leaves.gather(1, at).view(count, rows, trees, -1).sum(2), kinds, draws)


def by_prototype(x: Tensor, graph: Graph, kinds: int, draws: Draws) -> Tensor:
    """By the nearest of some rows, in columns of unequal weight."""
    count, rows, columns = x.shape
    each, several = draws.common.choice([1, 2, 4]), kinds or 6
    x = x * torch.exp(1.5 * draws.normal(count, 1, columns))
    chosen = draws.whole(rows, count, each * several)[..., None].expand(-1, -1, columns)
    near = -torch.cdist(x, x.gather(1, chosen)).square() / columns
    if not kinds:
        shares = (near * torch.exp(3 * draws.uniform(count, 1, 1))).softmax(-1)
        return numbers_of(shares @ draws.normal(count, each * several, 1), draws)
    return classes_of(near.view(count, rows, each, kinds).amax(2), kinds, draws)


def by_rules(x: Tensor, graph: Graph, kinds: int, draws: Draws) -> Tensor:
    """By the first rule of a list that holds: each is "and" of 1 to 4 conditions, a column above, below or equal to a value of a random row. Where none holds, one class is left."""
    count, rows, columns = x.shape
    rules, most = draws.common.choice([1, 2, 3, 4, 8, 12]), draws.common.randint(1, 4)
    column = draws.whole(columns, count, rules * most)
    value = _cells(x, draws.whole(rows, count, rules * most), column)
    # Columns with few different values are compared for equality, at times.
    few = (x[:, : min(rows, 64), None] == x[:, None, : min(rows, 64)]).float().mean((1, 2)) > 0.1
    equal = few.gather(1, column) & (draws.uniform(count, rules * most) < 0.7)
    above = draws.uniform(count, rules * most) < 0.5
    cells = x.gather(2, column[:, None].expand(-1, rows, -1))
    value = value[:, None]
    holds = torch.where(equal[:, None], cells == value, torch.where(above[:, None], cells >= value, cells <= value))
    unused = draws.uniform(count, 1, rules, most) > 0.8
    unused[..., 0] = False
    holds = (holds.view(count, rows, rules, most) | unused).all(3)
    first = functional.pad(holds, (0, 1), value=True).to(torch.int8).argmax(2)
    if not kinds:
        return numbers_of(draws.normal(count, rules + 1).gather(1, first)[..., None], draws)
    classes = functional.pad(draws.whole(kinds, count, rules), (0, 1))
    # A rule of another class than the one that is left, so that there are two.
    classes[:, 0] = 1
    return classes.gather(1, first)


def by_products(x: Tensor, graph: Graph, kinds: int, draws: Draws) -> Tensor:
    """By sums of products of two or three columns: each of them says nothing by itself."""
    count, rows, columns = x.shape
    terms, order = draws.common.choice([1, 1, 2, 3, 5]), draws.common.choice([2, 2, 3])
    column = draws.whole(columns, count, terms * order)[:, None].expand(-1, rows, -1)
    factors = x.gather(2, column).view(count, rows, terms, order)
    factors = factors.sign() if draws.chance(0.3) else factors
    return classes_of(factors.prod(3) @ draws.normal(count, terms, _scores(kinds, draws)), kinds, draws)


def by_waves(x: Tensor, graph: Graph, kinds: int, draws: Draws) -> Tensor:
    """By sines of linear scores: bands and rings."""
    count, columns = len(x), x.shape[2]
    waves = _scores(kinds, draws)
    speed = 1 + 5 * draws.uniform(count, 1, waves)
    line = standardised(x @ weights(count, columns, waves, draws))
    return classes_of(torch.sin(speed * line + 6.28 * draws.uniform(count, 1, waves)), kinds, draws)


def by_counts(x: Tensor, graph: Graph, kinds: int, draws: Draws) -> Tensor:
    """By how many of some conditions hold, or whether that is odd."""
    count, rows, columns = x.shape
    many = draws.common.randint(2, 12)
    column = draws.whole(columns, count, many)
    value = _cells(x, draws.whole(rows, count, many), column)
    held = (x.gather(2, column[:, None].expand(-1, rows, -1)) > value[:, None]).sum(2)
    if not kinds:
        return numbers_of(held[..., None].to(x), draws)
    if many <= 4 and draws.chance(0.5):
        return held % 2
    return (held * kinds // (many + 1)).clamp(max=kinds - 1)


Target = Callable[[Tensor, Graph, int, Draws], Tensor]
TARGETS: dict[str, tuple[Target, float]] = {
    "group": (by_group, 0.25),
    "node": (by_node, 0.2),
    "line": (by_line, 0.09),
    "network": (by_network, 0.1),
    "trees": (by_trees, 0.13),
    "prototype": (by_prototype, 0.06),
    "rules": (by_rules, 0.08),
    "products": (by_products, 0.04),
    "waves": (by_waves, 0.02),
    "counts": (by_counts, 0.03),
}
"""Kinds of targets by name, each with how often it is drawn."""


def classes_of(scores: Tensor, kinds: int, draws: Draws) -> Tensor:
    """Classes `(B, n)` by scores: by intervals of one of them, or by the largest of `kinds`; with noise in some tables. Without classes, numbers."""
    if not kinds:
        return numbers_of(scores, draws)
    count, rows = scores.shape[:2]
    scores = standardised(torch.nan_to_num(scores))
    noise = _noise(count, draws)
    if scores.shape[2] == 1:
        ranks = ranks_of(scores + noise * draws.normal(count, rows, 1))[..., 0]
        least = 0.3 if draws.chance(0.7) else 0.02
        widths = torch.cumsum(least - torch.log(draws.uniform(count, kinds) + 1e-7), dim=-1)
        return torch.searchsorted((widths / widths[:, -1:])[:, :-1].contiguous(), ranks.contiguous())
    # Where there are fewer scores than classes, the others are rare.
    scores = functional.pad(scores, (0, kinds - scores.shape[2]), value=-2.0)
    scores = scores + 1.2 * draws.uniform(count, 1, 1) * draws.normal(count, 1, kinds)
    return (scores + noise * gumbel(draws, count, rows, kinds)).argmax(-1)


def numbers_of(scores: Tensor, draws: Draws) -> Tensor:
    """Numbers `(B, n)` by one score: with noise, skewed or cut or in whole steps in some tables; mean 0 and deviation 1."""
    count, rows = scores.shape[:2]
    x = standardised(torch.nan_to_num(scores))
    x = standardised(x + _noise(count, draws) * draws.normal(count, rows, 1))
    kind = draws.uniform(count, 1, 1)
    for way, low, high in ((skewed, 0.0, 0.25), (powered, 0.25, 0.35), (floored, 0.35, 0.4), (counted, 0.4, 0.45)):
        x = torch.where((kind >= low) & (kind < high), way(x, x, draws), x)
    return standardised(x.clamp(-FAR, FAR))[..., 0]


def _noise(count: int, draws: Draws) -> Tensor:
    """How far scores are off, `(B, 1, 1)`: not at all in some tables."""
    return 0.6 * torch.exp(3.3 * draws.uniform(count, 1, 1) - 3) * (draws.uniform(count, 1, 1) < 0.6)


def _scores(kinds: int, draws: Draws, share: float = 0.6) -> int:
    """One score for each class, or one for all."""
    return kinds if kinds and draws.chance(share) else 1


def _cells(x: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Cells `(B, m)` by their rows and columns `(B, m)`."""
    return x.flatten(1).gather(1, row * x.shape[2] + column)

"""Look-up tasks: rows whose target is hidden, beside copies of them that show it (Kossen et al. 2021, section 4.2).

Whoever answers has to find a row's copy by its features and to read the target there; targets drawn apart from the features leave nothing
else to go by. Variants: the last three features of originals and copies are drawn anew, each for itself (N(1, 1)); the copies show a
target larger by 1 standard deviation; both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heedful.tables import Rows, TableNetwork

ORIGINAL, RANDOM, ADDED, BOTH = "original", "random features", "add one", "both"
VARIANTS = (ORIGINAL, RANDOM, ADDED, BOTH)
REDRAWN = 3  # features that a variant draws anew
GRID = (-4.0, -2.0, 0.0, 2.0, 4.0)

Draw = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]  # tables -> features [B, n, q], targets [B, n]


class Pairs(NamedTuple):
    """Tables of n originals, then their n copies; and the originals' targets `[B, n]`."""

    rows: Rows
    truth: Tensor


def toy(pairs: int, features: int) -> Draw:
    """Features and targets that have nothing to do with one another, all standard normal."""

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        cells = torch.randn(count, pairs, features + 1, generator=generator)
        return cells[..., :-1], cells[..., -1]

    return draw


def drawn_from(features: Tensor, targets: Tensor, pairs: int) -> Draw:
    """Rows of a table, `pairs` different ones for each."""

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        places = torch.stack([torch.randperm(len(targets), generator=generator)[:pairs] for _ in range(count)])
        return features[places], targets[places]

    return draw


def paired(features: Tensor, targets: Tensor, variant: str, generator: torch.Generator) -> Pairs:
    """Originals with hidden targets and copies that show theirs."""
    sides = [features.clone(), features.clone()]
    if variant in (RANDOM, BOTH):
        for side in sides:
            side[..., -REDRAWN:] = 1 + torch.randn(*side.shape[:-1], REDRAWN, generator=generator)
    shown = targets + (variant in (ADDED, BOTH))
    values = torch.cat(sides, dim=1)
    hidden = torch.zeros(values.shape[:2], dtype=torch.bool)
    hidden[:, : targets.shape[1]] = True
    rows = Rows(values, torch.zeros_like(values, dtype=torch.bool), torch.cat((targets, shown), dim=1), hidden)
    return Pairs(rows, targets)


def _on(pairs: Pairs, device: str) -> Pairs:
    return Pairs(Rows(*(part.to(device) for part in pairs.rows)), pairs.truth.to(device))


def answers(network: TableNetwork, pairs: Pairs) -> Tensor:
    """What the network says of the originals, `[B, n]`."""
    return network(pairs.rows).target[:, : pairs.truth.shape[1], 0]


def trained(
    draw: Draw,
    variant: str,
    seed: int,
    *,
    steps: int = 800,
    tables: int = 16,
    rate: float = 5e-3,
    clip: float = 0.3,
    device: str = "cpu",
    **options: Any,
) -> TableNetwork:
    """A network that learns from fresh tables at every step, by Adam on the squared error of the hidden targets; the rate falls to 0 as half a cosine."""
    generator = torch.Generator().manual_seed(seed)
    features = draw(1, torch.Generator().manual_seed(0))[0].shape[-1]
    torch.manual_seed(seed)
    network = TableNetwork((0,) * features, 0, **{"dropout": 0.0, "attention_dropout": 0.0, **options}).to(device)
    optimizer = torch.optim.Adam(network.parameters(), rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    for _ in range(steps):
        pairs = _on(paired(*draw(tables, generator), variant, generator), device)
        optimizer.zero_grad()
        (answers(network, pairs) - pairs.truth).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        schedule.step()
    return network.eval()


def scored(found: Tensor, truth: Tensor) -> dict[str, float]:
    """The root of the mean squared error, and the correlation (0 where all answers are equal)."""
    both = torch.stack((found.flatten(), truth.flatten())).double()
    apart = both - both.mean(1, keepdim=True)
    spread = apart.square().sum(1).sqrt().prod()
    return {
        "rmse": float((both[0] - both[1]).square().mean().sqrt()),
        "r": float(apart[0] @ apart[1] / spread) if spread > 0 else 0.0,
    }


@torch.no_grad()
def measured(network: TableNetwork, draw: Draw, variant: str, tables: int, device: str = "cpu") -> dict[str, float]:
    """On fresh tables; beside it what always saying 0 scores, and the nearest copy's target."""
    generator = torch.Generator().manual_seed(10_000)
    pairs = _on(paired(*draw(tables, generator), variant, generator), device)
    found = torch.cat([answers(network, Pairs(*part)) for part in _split(pairs)])
    return {
        **scored(found, pairs.truth),
        "zero": scored(torch.zeros_like(pairs.truth), pairs.truth)["rmse"],
        "nearest": scored(nearest(pairs), pairs.truth)["rmse"],
    }


def _split(pairs: Pairs, size: int = 64) -> list[tuple[Rows, Tensor]]:
    rows = zip(*(part.split(size) for part in pairs.rows), strict=True)
    return [(Rows(*part), truth) for part, truth in zip(rows, pairs.truth.split(size), strict=True)]


def nearest(pairs: Pairs) -> Tensor:
    """What the copy shows whose features are nearest to the original's."""
    count = pairs.truth.shape[1]
    original, copies = pairs.rows.values.split(count, dim=1)
    return pairs.rows.target[:, count:].gather(1, torch.cdist(original, copies).argmin(-1))


@torch.no_grad()
def intervened(network: TableNetwork, draw: Draw, tables: int) -> dict[str, Any]:
    """What the first original is said to be when its copy shows a value of the grid instead: the mean over tables, and the slope over all of them."""
    generator = torch.Generator().manual_seed(20_000)
    pairs = paired(*draw(tables, generator), ORIGINAL, generator)
    place, found = pairs.truth.shape[1], []
    for value in GRID:
        target = pairs.rows.target.clone()
        target[:, place] = value
        found.append(answers(network, Pairs(pairs.rows._replace(target=target), pairs.truth))[:, 0])
    answered = torch.stack(found).double()  # [grid, tables]
    grid = torch.tensor(GRID, dtype=torch.float64)
    return {
        "grid": list(GRID),
        "answers": answered.mean(1).tolist(),
        "slope": float((grid @ answered.mean(1)) / (grid @ grid)),
        "deviation": float((answered.mean(1) - grid).abs().max()),
        "largest": float((answered - grid[:, None]).abs().max()),
    }


@torch.no_grad()
def corrupted(network: TableNetwork, draw: Draw, tables: int) -> dict[str, float]:
    """Algorithm 1: for each original every column, the target's too, is permuted by itself over the other rows of its table; errors before and after."""
    generator = torch.Generator().manual_seed(30_000)
    pairs = paired(*draw(tables, generator), ORIGINAL, generator)
    count = pairs.truth.shape[1]
    found = torch.empty_like(pairs.truth)
    for place in range(count):
        rows = Rows(*(part.clone() for part in pairs.rows))
        others = torch.tensor([row for row in range(2 * count) if row != place])
        for table in range(tables):
            for column in range(rows.values.shape[-1]):
                order = others[torch.randperm(len(others), generator=generator)]
                rows.values[table, others, column] = pairs.rows.values[table, order, column]
            order = others[torch.randperm(len(others), generator=generator)]
            rows.target[table, others] = pairs.rows.target[table, order]
            rows.hidden[table, others] = pairs.rows.hidden[table, order]
        found[:, place] = answers(network, Pairs(rows, pairs.truth))[:, place]
    clean = answers(network, pairs)
    return {
        "clean": scored(clean, pairs.truth)["rmse"],
        "corrupted": scored(found, pairs.truth)["rmse"],
        "change": float((found - clean).abs().max()),
    }

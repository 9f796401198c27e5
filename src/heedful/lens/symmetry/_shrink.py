"""From a failing trial to the simplest one that still fails clearly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from heedful._errors import HeedfulError
from heedful.lens.symmetry.moves import Group, Move, Shuffle, reflection, simple, simple_orders

if TYPE_CHECKING:
    from heedful.lens.symmetry._trial import Trial

Run = Callable[[Move, Tensor, Tensor | None], "Trial"]

# A smaller example must fail by this many times the tolerance, so that nobody doubts it.
CLEARLY = 10.0

# So many failing inputs are tried with each simple group element, by so many trials in all.
SOURCES, BUDGET = 6, 500


def shrink(run: Run, failed: list[Trial], group: str, symmetry: str, free: bool) -> Trial:
    """The simplest clear failure found: fewer rows, whole or one-hot numbers, then a group element checked by eye.

    `free` says that inputs were drawn by us and may be changed; those a user's sampler gave keep their domain.
    """
    left = BUDGET

    def attempt(move: Move, x: Tensor, z: Tensor | None) -> Trial | None:
        nonlocal left
        left -= 1
        try:
            trial = run(move, x, z) if left >= 0 else None
        except HeedfulError:
            return None
        return trial if trial is not None and not trial.error <= CLEARLY * trial.tolerance else None

    start = min(failed, key=lambda trial: (len(trial.x), trial.x.numel()))
    best = _simplified(start, attempt) if free else start
    sources = [best, *(trial for trial in failed if trial is not start)][:SOURCES]
    simplest = next(_with_simple_moves(sources, group, symmetry, attempt), best)
    return _simplified(simplest, attempt) if free else simplest


def _with_simple_moves(
    sources: list[Trial], group: str, symmetry: str, attempt: Callable[[Move, Tensor, Tensor | None], Trial | None]
) -> Iterator[Trial]:
    """The sources that fail under simple moves, simplest move first."""
    pairs: list[tuple[Move, Trial]] = []
    if symmetry == "position":
        pairs = [(move, trial) for trial in sources for move in simple_orders(len(trial.x))]
    else:
        moves = list(simple(cast(Group, group), sources[0].x.shape[-1]))
        pairs = [(move, trial) for move in moves for trial in sources]
        if group == "O":
            turned = [(outside(trial), trial) for trial in sources]
            pairs += [(reflection(u), trial) for u, trial in turned if u is not None]
    for move, trial in pairs:
        result = attempt(move, trial.x, trial.z)
        if result is not None:
            yield result


def outside(trial: Trial) -> Tensor | None:
    """The part of one output row outside the span of X and Z: a reflection there is a counterexample."""
    rows = trial.x if trial.z is None else torch.cat((trial.x, trial.z))
    if trial.expected.shape[-1:] != rows.shape[-1:] or not bool(trial.expected.isfinite().all()):
        return None
    out = torch.atleast_2d(trial.move.undo(trial.expected)).flatten(0, -2)
    rest = out - out @ torch.linalg.pinv(rows) @ rows
    row = rest[rest.norm(dim=-1).argmax()]
    return row if float(row.norm()) > 1e-6 * float(out.norm()) else None


def _simplified(trial: Trial, attempt: Callable[[Move, Tensor, Tensor | None], Trial | None]) -> Trial:
    """Fewer rows of X, fewer of Z, then rounder numbers, each kept if the trial still fails clearly."""
    for rows in range(1, len(trial.x)):
        smaller = _restricted(trial.move, rows)
        smaller_trial = attempt(smaller, trial.x[:rows], trial.z) if smaller is not None else None
        if smaller_trial is not None:
            trial = smaller_trial
            break
    for rows in range(1, 0 if trial.z is None else len(trial.z)):
        smaller_trial = attempt(trial.move, trial.x, trial.z[:rows]) if trial.z is not None else None
        if smaller_trial is not None:
            trial = smaller_trial
            break
    for rounder in (Tensor.round, _one_hot):
        z = None if trial.z is None else rounder(trial.z)
        trial = attempt(trial.move, rounder(trial.x), z) or attempt(trial.move, rounder(trial.x), trial.z) or trial
    return trial


def _restricted(move: Move, rows: int) -> Move | None:
    """The same move for the first rows; None for a permutation that takes others there or fixes them all."""
    if not isinstance(move, Shuffle):
        return move
    order = move.data[move.data < rows]
    return Shuffle(move.name, order) if rows > 1 and not torch.equal(order, torch.arange(rows)) else None


def _one_hot(rows: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(rows.abs().argmax(-1), rows.shape[-1]).to(rows) * rows.sign()

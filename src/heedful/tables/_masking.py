"""What training hides, as masked language models do, and the loss of what was hidden (Kossen et al. 2021, sections 2.5 and 2.6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heedful.tables.network import Answers, Rows

Tradeoff = Literal["cosine", "linear", "constant"]


class Drawn(NamedTuple):
    """Rows with cells hidden or replaced, and which cells `(B, n, d)` and targets `(B, n)` were drawn: the loss is of these."""

    rows: Rows
    cells: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Masking:
    """Draws cells to be guessed: each feature that is there with `p_feature`, each target with `p_target`; of these the share `noise` is replaced by
    noise (a standard normal number, a level drawn evenly) and says nothing of it, the others are hidden. With `p_target=1` every target is hidden.

    Draws are independent of one another, where the authors draw a number of cells from a normal law and then as many cells.
    """

    p_feature: float
    p_target: float
    noise: float
    levels: tuple[int, ...]
    outputs: int

    def draw(self, rows: Rows) -> Drawn:
        cells = torch.zeros_like(rows.missing)
        values, missing = rows.values, rows.missing
        if self.p_feature:
            cells = (torch.rand(missing.shape, device=missing.device) < self.p_feature) & ~missing
            noised = cells & (torch.rand(missing.shape, device=missing.device) < self.noise)
            values = torch.where(noised, self._noise(values), values)
            missing = missing | (cells & ~noised)
        known = ~rows.hidden
        if self.p_target >= 1:
            return Drawn(Rows(values, missing, rows.target, torch.ones_like(rows.hidden)), cells, known)
        targets = (torch.rand(known.shape, device=known.device) < self.p_target) & known
        targets = targets | _one_at_least(targets, known)
        noised = targets & (torch.rand(known.shape, device=known.device) < self.noise)
        target = torch.where(noised, self._target_noise(rows.target), rows.target)
        return Drawn(Rows(values, missing, target, rows.hidden | (targets & ~noised)), cells, targets)

    def _noise(self, values: Tensor) -> Tensor:
        noise = torch.randn_like(values)
        for place, count in enumerate(self.levels):
            if count:
                noise[..., place] = torch.randint(count, values.shape[:-1], device=values.device).to(values)
        return noise

    def _target_noise(self, target: Tensor) -> Tensor:
        if self.outputs:
            return torch.randint_like(target, self.outputs)
        return torch.randn_like(target)


def _one_at_least(targets: Tensor, known: Tensor) -> Tensor:
    """A target of each table in which none was drawn, where there is one."""
    first = torch.rand(known.shape, device=known.device).masked_fill(~known, -1.0).argmax(1, keepdim=True)
    one = torch.zeros_like(targets).scatter(1, first, True)
    return one & known & ~targets.any(1, keepdim=True)


def target_losses(answers: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of classes, squared error of standardised numbers, for each row `(B, n)`."""
    if target.is_floating_point():
        return (answers[..., 0] - target).square()
    return functional.cross_entropy(answers.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)


def feature_loss(answers: Answers, rows: Rows, cells: Tensor, order: Sequence[int], levels: Sequence[int]) -> Tensor:
    """The mean over drawn cells, one vote each: squared errors of standardised numbers, cross-entropies of levels."""
    numbers = [place for place in order if not levels[place]]
    total = answers.features.new_zeros(())
    if numbers:
        errors = answers.features[..., : len(numbers)] - rows.values[..., numbers].masked_fill(
            ~cells[..., numbers], 0.0
        )
        total = total + (errors.square() * cells[..., numbers]).sum()
    at = len(numbers)
    for place in order[len(numbers) :]:
        here = cells[..., place]
        logits = answers.features[..., at : at + levels[place]]
        code = rows.values[..., place].masked_fill(~here, 0.0).long()
        losses = functional.cross_entropy(logits.flatten(0, 1), code.flatten(), reduction="none")
        total = total + (losses * here.flatten()).sum()
        at += levels[place]
    return total / cells.sum().clamp_min(1)


def tradeoff_at(start: float, schedule: str, step: int, steps: int) -> float:
    """The weight of the feature loss at a step: `start` at step 0, 0 from `steps` on; a cosine, a line, or always the same.

    >>> [round(tradeoff_at(1.0, "cosine", step, 100), 3) for step in (0, 50, 100)]
    [1.0, 0.5, 0.0]
    """
    if schedule == "constant":
        return start
    done = min(1.0, step / max(1, steps))
    return start * ((1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1 - done)

"""One layer taught by another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from heedful._checks import check_choice, check_number, check_whole
from heedful._progress import Progress

Pooling = Literal["mean", "first"]
Train = Literal["layer", "attention"]

# A cosine is worth this much beside the relative error of tokens: embeddings differ by some percent where tokens differ by half.
COSINE = 30.0


@dataclass(frozen=True)
class Distillation:
    """How a layer is taught after least squares: so many steps of Adam on the outputs of the layer it replaces.

    `train="layer"` moves all of the block's weights, its network and norms included; `"attention"` the primal layer's alone. The
    rate rises to `lr` and falls to zero.
    """

    steps: int
    lr: float = 2e-3
    train: Train = "layer"

    def __post_init__(self) -> None:
        check_whole(0, steps=self.steps)
        check_number(0, lr=self.lr)
        check_choice(Train, train=self.train)


class Lesson(NamedTuple):
    """What a block is called with, what it shall return, and where there are tokens `[B, n]`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wanted: Tensor
    keep: Tensor | None


def pool(hidden: Tensor, keep: Tensor | None, pooling: Pooling) -> Tensor:
    """The embedding of each sequence: the mean of its tokens, or the first of them; `[B, n, d]` -> `[B, d]`."""
    if hidden.dim() == 2:
        return hidden
    if keep is None:
        return hidden.mean(dim=1) if pooling == "mean" else hidden[:, 0]
    if pooling == "first":
        return hidden[torch.arange(len(hidden), device=hidden.device), keep.int().argmax(dim=1)]
    return hidden.masked_fill(~keep[..., None], 0.0).sum(dim=1) / keep.sum(dim=1, keepdim=True).clamp_min(1)


def distill_(
    block: nn.Module,
    parameters: Sequence[nn.Parameter],
    lessons: Sequence[Lesson],
    how: Distillation,
    pooling: Pooling | None,
    seed: int,
    progress: Progress,
    what: str,
) -> None:
    """Moves these parameters of a block so that it gives what was wanted: every token, and with `pooling` the embedding too."""
    if not how.steps:
        return
    flags = {parameter: parameter.requires_grad for parameter in block.parameters()}
    order, moved = torch.Generator().manual_seed(seed), set(parameters)
    for parameter in flags:
        parameter.requires_grad_(parameter in moved)
    optimizer = torch.optim.Adam(parameters, lr=how.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, how.lr, how.steps) if how.steps > 1 else None
    with torch.enable_grad():
        for step in range(how.steps):
            lesson = lessons[int(torch.randint(len(lessons), (), generator=order))]
            loss = _loss(block, lesson, pooling)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
            progress(step + 1, how.steps, what)
    for parameter, before in flags.items():
        parameter.grad = None
        parameter.requires_grad_(before)


def _loss(block: nn.Module, lesson: Lesson, pooling: Pooling | None) -> Tensor:
    output = block(*lesson.args, **lesson.kwargs)
    output = (output if isinstance(output, Tensor) else output[0]).float()
    wanted = lesson.wanted.float()
    gap, level = output - wanted, wanted
    if lesson.keep is not None:
        # Filled, not picked out, which would make a device wait for its host at every step.
        gap, level = (part.masked_fill(~lesson.keep[..., None], 0.0) for part in (gap, level))
    loss = gap.square().sum() / level.square().sum()
    if pooling is None:
        return loss
    cosine = cosine_similarity(pool(output, lesson.keep, pooling), pool(wanted, lesson.keep, pooling))
    return loss + COSINE * (1 - cosine).mean()

"""Training of networks that answer tables in context, on a stream of synthetic ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from heedful._checks import check_number, check_whole
from heedful._progress import Progress, silent
from heedful.bridges.batches import mixed
from heedful.bridges.record import Hyperparameters, Training
from heedful.nn import Block
from heedful.tables._draws import Draws
from heedful.tables.in_context import InContextNetwork
from heedful.tables.prior import Shape, Synthetic, draw, shape

MOST = 256
"""Tables of a batch, at most."""

HELD_OUT = -1
"""The epoch whose tables are held out."""


@dataclass
class SyntheticTables(IterableDataset[Synthetic]):
    """A stream of batches of synthetic tables, each of one shape, with as many tables as `cells` allow; drawn on the CPU.

    Args:
        steps: batches of an epoch.
        cells: vectors of cells in a batch, targets among them.
        easy: epochs at the start whose tables are small: a quarter of the rows, up to 12 columns, half of the cells.
        targets: kinds of targets to draw from, by default all of `prior.TARGETS`.
        seed: with the numbers of the epoch and of the batch, decides everything.
        size: draws the shape of a batch; `prior.shape` by default.
        numbers: whether targets are numbers instead of classes.
        part: tables of a batch that share a kind of graph and of target, at most.
        paired: columns above which two count as one, as in the network.
        workers: processes that draw, each a batch; 0: this one does.

    >>> first = next(iter(SyntheticTables(steps=2, cells=2_000)))
    >>> first.values.shape[1:] == (first.target.shape[1], first.is_category.shape[1])
    True
    """

    steps: int
    cells: int = 300_000
    easy: int = 0
    targets: Sequence[str] | None = None
    seed: int = 0
    size: Callable[[Draws], Shape] = shape
    numbers: bool = False
    part: int = 4
    paired: int | None = None
    workers: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        check_whole(steps=self.steps, cells=self.cells)
        check_whole(0, easy=self.easy, workers=self.workers)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Synthetic]:
        return iter(DataLoader(_Numbered(self), batch_size=None, num_workers=self.workers))

    def batch(self, number: int) -> Synthetic:
        """The batch of this number of the epoch."""
        draws = Draws(mixed(self.seed, 1 + self.epoch, number))
        size, cells = self.size(draws), self.cells
        if 0 <= self.epoch < self.easy:
            context = 30 + size.context // 4
            size, cells = Shape(context, max(48, context // 2), 1 + size.columns % 12), cells // 2
        halved = self.paired is not None and size.columns > self.paired
        count = cells // ((size.context + size.asked) * (1 + (-(-size.columns // 2) if halved else size.columns)))
        return draw(max(4, min(MOST, count)), size, draws, part=self.part, targets=self.targets, numbers=self.numbers)


class _Numbered(Dataset[Synthetic]):
    """The batches of an epoch, each by its number, so that any process can draw it."""

    def __init__(self, tables: SyntheticTables) -> None:
        self.tables = tables

    def __len__(self) -> int:
        return self.tables.steps

    def __getitem__(self, number: int) -> Synthetic:
        return self.tables.batch(number)


def losses(network: InContextNetwork, tables: Synthetic) -> tuple[Tensor, Tensor]:
    """-log p of each asked row `(B, asked)`, 0 where its class is none of the context's, and which rows count. Of a number the mean over the steps that it lies between."""
    known, asked = tables.target[:, : tables.context], tables.target[:, tables.context :]
    found = network(tables.values, known, tables.classes, tables.is_category)
    if network.numbers:
        return -(network.shares(asked, known) * found).sum(-1), torch.ones_like(asked, dtype=torch.bool)
    counts = (asked >= 0) & (tables.classes[:, None] > 1)
    each = -found.gather(2, asked.clamp_min(0)[..., None])[..., 0]
    return torch.where(counts, each, 0.0), counts


def pretrain(
    network: InContextNetwork,
    *,
    epochs: int = 25,
    steps: int = 320,
    cells: int = 300_000,
    easy: float = 0.2,
    lr: float = 2e-3,
    optimizer: str = "MuonAdamW",
    average: float | None = 0.998,
    targets: Sequence[str] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    part: int = 4,
    workers: int = 0,
    held_out: int = 24,
    size: Callable[[Draws], Shape] = shape,
    progress: Progress = silent,
    checkpoint: Path | None = None,
) -> Training:
    """Trains a network in place on `epochs * steps` batches of synthetic tables; held-out ones, the same for all seeds, are measured after each epoch.

    The share `easy` of the epochs has small tables. Training is that of every estimator here, `heedful.bridges.training.train`: Muon whose
    rate rises over 150 steps and falls as half a cosine, gradients of norm 1 at most, bfloat16 on a GPU, where blocks are compiled. What is
    kept are running means of the weights (`average`), of the epoch with the best held-out loss. `workers` processes draw the tables.
    """
    check_number(least=0, most=1, easy=easy)
    from heedful.bridges.training import train

    device = torch.device(device)
    numbers = network.numbers
    stream = SyntheticTables(
        steps, cells, round(easy * epochs), targets, seed, size, numbers, part, network.paired, workers
    )
    others = SyntheticTables(held_out, cells // 6, seed=12345, size=size, numbers=numbers, part=part, epoch=HELD_OUT)
    how = Hyperparameters(
        epochs, 1, lr, optimizer, 0.01, 1.0, None, seed, "cosine", min(0.5, 150 / (epochs * steps)), precision="auto", average=average
    )  # fmt: skip

    def loss(network: InContextNetwork, *batch: Any) -> Tensor:
        each, counts = losses(network, Synthetic(*batch))
        return each.sum() / counts.sum().clamp_min(1)

    def measure(network: InContextNetwork, *batch: Any) -> dict[str, Tensor]:
        with torch.compiler.set_stance("force_eager"):
            each, counts = losses(network, Synthetic(*batch))
        return {"loss": (each.sum(1) / counts.sum(1))[counts.any(1)]}

    with _fused(network if device.type == "cuda" else nn.Module()):
        return train(
            network,
            stream,
            list(others),
            loss=loss,
            measure=measure,
            hyperparameters=how,
            device=device,
            collate=lambda cases: cases[0],
            progress=progress,
            checkpoint=checkpoint,
        )


@contextmanager
def _fused(network: nn.Module) -> Iterator[None]:
    """What blocks do to each token by itself, compiled once for all of them and for every shape; attention between tokens stays as it is.

    It does without cuDNN's, which plans for a third of a second whenever it meets a new shape, and here each batch has its own.
    """
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    parts = ("_first", "_evolve")
    blocks = [module for module in network.modules() if isinstance(module, Block)]
    for block in blocks:
        for part in parts:
            setattr(block, part, torch.compile(getattr(block, part), dynamic=True))
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        for block in blocks:
            for part in parts:
                delattr(block, part)

"""Batches of any data for one process or many: rows of tensors, cases of a Dataset, streams; by length where that saves padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from heedful._errors import InvalidArgument
from heedful.bridges.record import Hyperparameters

# Cases that are measured at once where they are rows of tensors.
MEASURED = 256
# Batches of similar lengths are made inside so many batches of cases in random order.
POOL = 50


def each(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Tensors inside tuples, each by itself; anything else as it is."""
    if isinstance(tree, tuple):
        return tuple(each(part, function) for part in tree)
    return function(tree) if isinstance(tree, Tensor) else tree


def leaves(tree: Any) -> list[Tensor]:
    """All tensors inside tuples."""
    inside: list[Tensor] = []
    each(tree, inside.append)
    return inside


def batches(
    data: Any, hyperparameters: Hyperparameters, collate: Any, lengths: Sequence[int] | None, *, shuffle: bool
) -> Places | Stream:
    """The batches of tensors, a Dataset or a stream, as `train` takes them."""
    size = hyperparameters.batch_size
    if isinstance(data, IterableDataset):
        if lengths is not None:
            raise InvalidArgument("lengths are of cases that have places; a stream comes in its own order")
        return Stream(data, collate or default_collate, size)
    seed = hyperparameters.seed if shuffle else None
    if isinstance(data, tuple):
        return Places(_Rows(data), leaves(data)[0].shape[0], size if shuffle else MEASURED, seed, lengths)
    return Places(_Chosen(data, collate or default_collate), len(data), size, seed, lengths)


class Share:
    """A process's part of batches: of each, the cases it takes, how many they are, and what its mean loss weighs.

    Gradients are averaged over processes, so a process's mean counts by its share of the batch, times their number. One
    that gets none of a small last batch computes on a case all the same, and weighs nothing: all must take every step.
    """

    trainer: Any = None
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def part(self, batch: list[Any]) -> tuple[list[Any], int, float]:
        rank, world = self.trainer.global_rank, self.trainer.world_size
        own = batch[rank::world]
        return own or batch[:1], len(own), len(own) * world / len(batch)


class Places(Share, Sampler[Any]):
    """The batches of an epoch of cases with places, in an order that (seed, epoch) alone decides; without a seed their own."""

    def __init__(
        self, data: Dataset[Any], count: int, size: int, seed: int | None, lengths: Sequence[int] | None
    ) -> None:
        if count == 0 or (lengths is not None and len(lengths) != count):
            raise InvalidArgument(f"there are {count} cases" + (f" and {len(lengths)} lengths" if lengths else ""))
        self.data, self.count, self.size, self.seed = data, count, size, seed
        self.lengths = None if lengths is None else np.asarray(lengths)

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.data, sampler=self, batch_size=None)

    def __len__(self) -> int:
        return -(-self.count // self.size)

    def __iter__(self) -> Iterator[Any]:
        return (self.part(batch) for batch in self._order())

    def _order(self) -> list[list[int]]:
        if self.seed is None:
            return [part.tolist() for part in torch.arange(self.count).split(self.size)]
        generator = torch.Generator().manual_seed(mixed(self.seed, self.epoch, 0))
        order = torch.randperm(self.count, generator=generator)
        if self.lengths is None:
            return [part.tolist() for part in order.split(self.size)]
        pools = (part.numpy() for part in order.split(self.size * POOL))
        sorted_pools = [pool[np.argsort(self.lengths[pool], kind="stable")] for pool in pools]
        batches = [pool[at : at + self.size].tolist() for pool in sorted_pools for at in range(0, len(pool), self.size)]
        return [batches[at] for at in torch.randperm(len(batches), generator=generator).tolist()]


class _Rows(Dataset[Any]):
    """Tensors with one row per case."""

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors

    def __getitem__(self, part: tuple[list[int], int, float]) -> tuple[Any, int, float]:
        rows, count, share = part
        return each(self.tensors, lambda tensor: tensor[rows]), count, share


class _Chosen(Dataset[Any]):
    """Cases of a Dataset, made into batches."""

    def __init__(self, data: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.data, self.collate = data, collate

    def __getitem__(self, part: tuple[list[int], int, float]) -> tuple[Any, int, float]:
        rows, count, share = part
        return self.collate([self.data[row] for row in rows]), count, share


class Stream(Share, IterableDataset[Any]):
    """The batches of a stream, in its order."""

    def __init__(self, data: IterableDataset[Any], collate: Callable[[list[Any]], Any], size: int) -> None:
        self.data, self.collate, self.size = data, collate, size

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self, batch_size=None)

    def __len__(self) -> int:
        # Without a length of its own this raises TypeError, which is how torch and Lightning learn of it.
        return -(-len(self.data) // self.size)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(self.epoch)
        self.epoch += 1
        cases = iter(self.data)
        while batch := list(islice(cases, self.size)):
            own, count, share = self.part(batch)
            yield self.collate(own), count, share


def mixed(*numbers: int) -> int:
    """One seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1

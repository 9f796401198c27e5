"""Windows of sequences as padded batches: no sequence is held longer than its batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heedful.bridges.samples import Samples


@dataclass(frozen=True)
class EventSamples(Samples):
    """Sequences as samples: `inputs` are codes, times and marks of all events, and ends and static columns of each sequence.

    The events of sequence i lie at `offsets[i]:offsets[i + 1]`.
    """

    offsets: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    names: Any = None  # of the sequences, a pandas index, where a frame has them

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rows: np.ndarray) -> EventSamples:
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows
        lengths = np.diff(self.offsets)[rows]
        offsets = np.append(0, np.cumsum(lengths))
        places = np.repeat(self.offsets[rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
        of_events, of_sequences = self.inputs[:3], self.inputs[3:]
        return EventSamples(
            (*(part[places] for part in of_events), *(part[rows] for part in of_sequences)),
            weights=None if self.weights is None else self.weights[rows],
            groups=None if self.groups is None else self.groups[rows],
            offsets=offsets,
        )

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return (*super().arrays, self.offsets)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def gaps(self) -> np.ndarray:
        """Between events of one sequence, of all sequences."""
        return np.delete(np.diff(self.inputs[1]), self.offsets[1:-1] - 1)

    @property
    def last_times(self) -> np.ndarray:
        """The time of each sequence's last event."""
        return self.inputs[1][self.offsets[1:] - 1]

    def joined(self, other: EventSamples) -> EventSamples:
        """Each sequence with the events of another behind it."""
        lengths = self.lengths + other.lengths
        offsets = np.append(0, np.cumsum(lengths))
        parts = []
        for mine, theirs in zip(self.inputs[:3], other.inputs[:3], strict=True):
            whole = np.empty((offsets[-1], *mine.shape[1:]), dtype=mine.dtype)
            for source, samples, skip in ((mine, self, np.zeros_like(lengths)), (theirs, other, self.lengths)):
                shift = np.repeat(offsets[:-1] + skip - samples.offsets[:-1], samples.lengths)
                whole[shift + np.arange(len(source))] = source
            parts.append(whole)
        return replace(self, inputs=(*parts, *self.inputs[3:]), offsets=offsets)


class Windows:
    """Parts of sequences of up to `size` events; a window's targets are the events behind its first ones.

    A sequence longer than `size` is cut into windows that overlap by half, so that a target sees `size // 2` events or more (all where
    there are fewer), and each event but the first of its sequence is a target once.
    """

    def __init__(self, samples: EventSamples, size: int, *, last: bool = False) -> None:
        self.samples = samples
        starts, stops, firsts, owners = [], [], [], []
        half = max(1, size // 2)
        for owner, (begin, end) in enumerate(zip(samples.offsets[:-1], samples.offsets[1:], strict=True)):
            if last:
                starts.append(max(begin, end - size))
                stops.append(end)
                firsts.append(end)
                owners.append(owner)
                continue
            at, first = begin, begin + 1
            while True:
                stop = min(at + size, end)
                starts.append(at)
                stops.append(stop)
                firsts.append(first)
                owners.append(owner)
                if stop == end:
                    break
                at, first = at + half, stop
        self.starts, self.stops, self.firsts, self.owners = (
            np.array(part, dtype=np.int64) for part in (starts, stops, firsts, owners)
        )

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> np.ndarray:
        return self.stops - self.starts

    def of(self, sequences: np.ndarray) -> list[int]:
        """The windows of some sequences."""
        return np.flatnonzero(np.isin(self.owners, sequences)).tolist()

    def batch(self, windows: Sequence[int] | np.ndarray) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Inputs (codes, times, padding, marks, static), targets, and what is known of the tail.

        Targets `(B, n, 3)`: for event i the type of event i + 1, the wait until it and whether it counts; tail `(B, 3)`: the wait behind the
        last event until the sequence's end, whether it counts, and the weight of the sequence. Padding repeats the last event's time.
        """
        codes, times, marks, ends, static = self.samples.inputs
        chosen = np.asarray(windows)
        starts, stops, owners = self.starts[chosen], self.stops[chosen], self.owners[chosen]
        places = starts[:, None] + np.arange(int((stops - starts).max()))
        padding = places >= stops[:, None]
        places = np.minimum(places, stops[:, None] - 1)
        now = times[places]
        following = np.minimum(places + 1, stops[:, None] - 1)
        counts = (places + 1 >= self.firsts[chosen][:, None]) & (places + 1 < stops[:, None]) & ~padding
        whole = stops == self.samples.offsets[owners + 1]
        tail = np.where(np.isnan(ends[owners]), 0.0, ends[owners] - times[stops - 1])
        weights = self.samples.weights
        weight = np.ones(len(chosen)) if weights is None else weights[owners] / weights.mean()
        inputs = (codes[places], now, padding, marks[places], static[owners])
        target = np.stack((codes[following], times[following] - now, counts), axis=-1)
        rest = np.stack((tail, whole & ~np.isnan(ends[owners]), weight), axis=-1)
        return tuple(torch.from_numpy(part) for part in inputs), torch.from_numpy(target), torch.from_numpy(rest)

    def batches(self, cells: int = 2**15) -> Iterator[np.ndarray]:
        """Windows of similar lengths together, about `cells` events at once."""
        order = np.argsort(self.lengths, kind="stable")[::-1]
        at = 0
        while at < len(order):
            count = max(1, cells // int(self.lengths[order[at]]))
            yield order[at : at + count]
            at += count

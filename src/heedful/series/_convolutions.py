"""Random convolutions of series, counted by segment: shares of positive values, and which of competing kernels fits best.

Everything is a sum over steps, so that what each segment adds is known, and a series' own counts do not depend on the others beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

TAPS = 9
# Weights -1, and 2 at three of the nine taps: 84 kernels whose weights sum to zero (Dempster et al. 2021).
PATTERNS = 2.0 - 3.0 * np.array([[tap not in three for tap in range(TAPS)] for three in combinations(range(TAPS), 3)])
DILATIONS = 32
# Values that are held at once, so that they stay in a core's cache; on a GPU there is room for more.
CELLS, GPU_CELLS = 2**21, 2**26
# Words of eight bytes whose bytes can be summed before one of them overflows.
WORDS = 255
GOLDEN = (5**0.5 + 1) / 2
# Added to what is not to be counted; the values themselves are at most 1e14, by `standardised`.
HIDDEN = -1e30


@dataclass(frozen=True)
class Layout:
    """Steps of series in order, each segment filled up to `width`, a multiple of eight.

    `places` (n, segments x width) is the step that lies at each place, `inside` whether the series has it there.
    """

    places: Tensor
    inside: Tensor
    lengths: Tensor
    segments: int

    @classmethod
    def of(cls, lengths: Tensor, segments: int) -> Layout:
        """Step t of a series of length L is in segment floor(t S / L)."""
        edges = torch.arange(segments + 1, device=lengths.device)
        edges = (edges * lengths[:, None] + segments - 1) // segments  # [n, S + 1]
        steps = torch.arange(width(int(lengths.max()), segments), device=lengths.device)
        places = edges[:, :-1, None] + steps
        inside = places < edges[:, 1:, None]
        return cls(places.clamp(max=int(lengths.max()) - 1).flatten(1), inside.flatten(1), lengths, segments)

    def within(self, margin: int) -> Tensor:
        """`inside`, without the first and last steps of each series unless that leaves none: (n, places)."""
        inner = self.inside & (self.places >= margin) & (self.places < self.lengths[:, None] - margin)
        return torch.where(inner.any(1, keepdim=True), inner, self.inside)

    def windows(self, x: Tensor, dilation: int) -> Tensor:
        """What the taps of a kernel see at each place, zero beyond the series: (n, channels x taps, places)."""
        n, channels, _ = x.shape
        reach = TAPS // 2 * dilation
        padded = functional.pad(x, (reach, reach))
        taps = self.places[:, None] + dilation * torch.arange(TAPS, device=x.device)[:, None]  # [n, taps, P]
        if n == 1 or bool((self.lengths == self.lengths[0]).all()):
            return padded[:, :, taps[0]].reshape(n, channels * TAPS, -1)
        index = taps[:, None].expand(-1, channels, -1, -1).flatten(2)
        return padded.gather(2, index).reshape(n, channels * TAPS, -1)

    def counts(self, hot: Tensor) -> Tensor:
        """How often a truth value holds in each segment, (..., places) -> (..., segments).

        Eight truth values are a whole number of eight bytes; sums of up to 255 of them do not carry from one byte to the next.
        """
        words = hot.view(torch.int64).unflatten(-1, (self.segments, -1))
        blocks = -(-words.shape[-1] // WORDS)
        sums = words.unflatten(-1, (blocks, -1)).sum(-1)
        low = 0x00FF00FF00FF00FF
        pairs = (sums & low) + ((sums >> 8) & low)  # four numbers of 16 bits
        total = (pairs * 0x0001000100010001 >> 48) & 0xFFFF
        return total.sum(-1, dtype=torch.float32)


def width(longest: int, segments: int) -> int:
    """Places of a segment: a multiple of eight that splits evenly into blocks of up to `WORDS` words."""
    words = -(-longest // (8 * segments))
    blocks = -(-words // WORDS)
    return 8 * blocks * -(-words // blocks)


def batches(lengths: Tensor, segments: int, rows: int) -> Iterator[Tensor]:
    """Numbers of series that have one layout; `rows` values per step are held for each."""
    widths = torch.tensor([width(int(length), segments) for length in lengths.tolist()])
    cells = CELLS if lengths.device.type == "cpu" else GPU_CELLS
    for one in widths.unique().tolist():
        same = (widths == one).nonzero()[:, 0].to(lengths.device)
        yield from same.split(max(1, cells // (rows * one * segments)))


def cleared(x: Tensor, lengths: Tensor) -> Tensor:
    """Zero behind each end, cut behind the longest."""
    x = x[..., : int(lengths.max())]
    return x.masked_fill(torch.arange(x.shape[2], device=x.device) >= lengths[:, None, None], 0.0)


def some_channels(draw: np.random.Generator, channels: int) -> np.ndarray:
    """A few channels that one kernel reads: up to nine, small numbers likelier."""
    most = np.log2(min(channels, TAPS) + 1)
    return draw.choice(channels, min(channels, int(2 ** draw.uniform(0, most))), replace=False)


def typical(lengths: Tensor) -> int:
    """The median length, which bounds dilations."""
    return max(int(lengths.float().median()) - 1, TAPS - 1)


class Shares:
    r"""PPV: the share of steps at which a convolution exceeds a bias (Dempster et al. 2021, "MiniRocket").

    84 kernels of nine taps at up to 32 dilations; biases are quantiles of the convolutions of training series. Every second kernel
    is read only where its window lies inside the series.
    """

    def __init__(self, dilations: list[int], reads: Tensor, biases: list[Tensor]) -> None:
        self.dilations, self.reads, self.biases = dilations, reads, biases

    @classmethod
    def drawn(cls, x: Tensor, lengths: Tensor, features: int, seed: int) -> Shares:
        draw = np.random.default_rng(seed)
        n, channels, _ = x.shape
        each = max(1, features // len(PATTERNS))
        steps = np.logspace(0, np.log2(typical(lengths) / (TAPS - 1)), min(each, DILATIONS), base=2).astype(int)
        dilations, repeats = np.unique(steps, return_counts=True)
        sizes = np.maximum(repeats * each // len(steps), 1)
        sizes[: each - sizes.sum()] += 1
        reads = np.zeros((len(dilations), len(PATTERNS), channels), dtype=bool)
        for kernel in reads.reshape(-1, channels):
            kernel[some_channels(draw, channels)] = True
        shares = cls(dilations.tolist(), torch.from_numpy(reads).to(x.device), [])
        sample = torch.from_numpy(np.sort(draw.choice(n, min(n, DILATIONS), replace=False))).to(x.device)
        x, lengths = cleared(x[sample], lengths[sample]), lengths[sample]
        layout, begun = Layout.of(lengths, 1), 0
        for at, size in enumerate(sizes.tolist()):
            values, _ = shares._convolved(x, layout, at)  # [sample, 84, P]
            chosen = torch.from_numpy(draw.integers(len(sample), size=len(PATTERNS))).to(x.device)
            own = values[chosen, torch.arange(len(PATTERNS), device=x.device)].sort(1).values  # hidden ones first
            count = (own > HIDDEN / 2).sum(1, keepdim=True)
            order = begun + 1 + np.arange(len(PATTERNS) * size).reshape(len(PATTERNS), size)
            begun += order.size
            quantile = torch.from_numpy(order * GOLDEN % 1).to(own) * (count - 1)
            first = own.shape[1] - count + quantile.long()
            lower, upper = own.gather(1, first), own.gather(1, (first + 1).clamp(max=own.shape[1] - 1))
            shares.biases.append(lower + (upper - lower) * quantile.frac())
        return shares

    @property
    def rows(self) -> int:
        return len(PATTERNS) * max(bias.shape[1] for bias in self.biases)

    def channels(self) -> Tensor:
        """Which channels each feature reads, (features, channels)."""
        parts = [reads.repeat_interleave(bias.shape[1], 0) for reads, bias in zip(self.reads, self.biases, strict=True)]
        return torch.cat(parts)

    def _convolved(self, x: Tensor, layout: Layout, at: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(n, kernels, places), far below zero where a kernel is not read; the places where even and odd kernels are read."""
        dilation = self.dilations[at]
        masks = layout.inside, layout.within(TAPS // 2 * dilation)
        weight = (torch.from_numpy(PATTERNS).to(x)[:, None] * self.reads[at, :, :, None]).flatten(1)
        # Two more inputs, 1 where even and where odd kernels are hidden: cheaper than to write over the product.
        hidden = torch.tensor([[HIDDEN, 0.0], [0.0, HIDDEN]]).to(x).repeat(len(PATTERNS) // 2, 1)
        outside = torch.stack(masks, 1).logical_not().to(x)
        return torch.cat((weight, hidden), 1) @ torch.cat((layout.windows(x, dilation), outside), 1), masks

    def __call__(self, x: Tensor, layout: Layout) -> Tensor:
        """What each segment adds to each share: (n, segments, features)."""
        parts = []
        for at, bias in enumerate(self.biases):
            values, masks = self._convolved(x, layout, at)
            counts = layout.counts(values[:, :, None] > bias[:, :, None])  # [n, 84, m, S]
            for first, mask in enumerate(masks):
                counts[:, first::2] /= mask.sum(1)[:, None, None, None]
            parts.append(counts.flatten(1, 2))
        return torch.cat(parts, 1).transpose(1, 2)

    def state(self) -> dict[str, Tensor]:
        sizes = torch.tensor([bias.shape[1] for bias in self.biases])
        dilations = torch.tensor(self.dilations)
        return {"dilations": dilations, "sizes": sizes, "reads": self.reads, "biases": torch.cat(self.biases, 1)}

    @classmethod
    def of(cls, state: dict[str, Tensor]) -> Shares:
        return cls(state["dilations"].tolist(), state["reads"], list(state["biases"].split(state["sizes"].tolist(), 1)))


class Contests:
    r"""Hydra: kernels compete in groups of eight, and each step counts for the winner (Dempster et al. 2023, "Hydra").

    At every step the largest convolution of a group adds its value, where it is positive, to the winner's first feature, and the smallest
    adds 1 to its second.
    """

    SIZE = 8

    def __init__(self, dilations: list[int], weights: Tensor, reads: Tensor) -> None:
        self.dilations, self.weights, self.reads = dilations, weights, reads

    @classmethod
    def drawn(cls, x: Tensor, lengths: Tensor, groups: int, seed: int) -> Contests:
        draw = np.random.default_rng(seed)
        channels = x.shape[1]
        dilations = [2**power for power in range(int(np.log2(typical(lengths) / (TAPS - 1))) + 1)]
        weights = draw.standard_normal((len(dilations), groups, cls.SIZE, TAPS))
        weights -= weights.mean(-1, keepdims=True)
        weights /= np.abs(weights).sum(-1, keepdims=True)
        reads = np.zeros((len(dilations), groups, channels), dtype=bool)
        for group in reads.reshape(-1, channels):
            group[some_channels(draw, channels) if channels > 2 else slice(None)] = True
        return cls(dilations, torch.from_numpy(weights).float().to(x.device), torch.from_numpy(reads).to(x.device))

    @property
    def rows(self) -> int:
        return 2 * self.weights.shape[1] * self.SIZE

    def channels(self) -> Tensor:
        """Which channels each feature reads, (features, channels)."""
        return self.reads.repeat_interleave(2 * self.SIZE, 1).flatten(0, 1)

    def __call__(self, x: Tensor, layout: Layout) -> Tensor:
        """What each segment adds to each feature: (n, segments, features)."""
        outside = ~layout.inside[:, None, None]
        parts = []
        for dilation, weight, reads in zip(self.dilations, self.weights, self.reads, strict=True):
            windows = layout.windows(x, dilation).masked_fill(outside[:, 0], 0.0)
            kernels = (weight[:, :, None] * reads[:, None, :, None]).flatten(0, 1).flatten(1).to(x)
            values = (kernels @ windows).unflatten(1, weight.shape[:2])  # [n, groups, 8, P]
            # Outside of a series all values are zero: they add nothing above, and are no winners below.
            lowest = values.amin(2, keepdim=True).masked_fill_(outside, -torch.inf)
            least = layout.counts(values <= lowest)
            values.mul_(values >= values.amax(2, keepdim=True)).clamp_(min=0.0)
            most = values.unflatten(3, (layout.segments, -1)).sum(4)
            parts.append(torch.stack((most, least), 3).flatten(1, 3))  # [n, groups x 8 x 2, S]
        return torch.cat(parts, 1).transpose(1, 2)

    def state(self) -> dict[str, Tensor]:
        return {"dilations": torch.tensor(self.dilations), "weights": self.weights, "reads": self.reads}

    @classmethod
    def of(cls, state: dict[str, Tensor]) -> Contests:
        return cls(state["dilations"].tolist(), state["weights"], state["reads"])

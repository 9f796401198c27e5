"""Features of series in views: two kinds of convolutions, each of the series and of its differences, by segment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from heedful.series._convolutions import Contests, Layout, Shares, batches, cleared

KINDS: dict[str, type[Shares] | type[Contests]] = {"shares": Shares, "contests": Contests}
# From so many series on fewer features are drawn by themselves: the ridge then has enough series for each.
MANY = 2_000
FEATURES, FEWER_FEATURES = 9_996, 2_520
GROUPS, FEWER_GROUPS = 32, 16


@dataclass(frozen=True)
class View:
    """Convolutions of one kind, of series or (`lagged`) of their differences from step to step."""

    kind: str
    lagged: bool
    convolutions: Shares | Contests

    @property
    def size(self) -> int:
        return len(self.channels)

    @property
    def channels(self) -> Tensor:
        """Which channels each feature reads, (features, channels)."""
        return self.convolutions.channels()

    def parts(self, x: Tensor, lengths: Tensor, segments: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(numbers of series, what each segment adds to each feature) in batches; (n, segments, features).

        The features are the sums over segments: shares, or roots of what a kernel won. Of a root each segment has its share.
        """
        x, lengths = differences(x, lengths) if self.lagged else (x, lengths)
        for rows in batches(lengths, segments, self.convolutions.rows):
            own = lengths[rows]
            added = self.convolutions(cleared(x[rows], own), Layout.of(own, segments))
            if self.kind == "contests":
                total = added.sum(1, keepdim=True)
                added = added * torch.where(total > 0, total, 1.0).rsqrt()
            yield rows, added

    def state(self) -> dict[str, Tensor]:
        return self.convolutions.state()


def differences(x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """From step to step; a series of one step has one difference, zero."""
    steps = torch.arange(1, max(2, x.shape[2]), device=x.device)
    later = x[:, :, 1:] if x.shape[2] > 1 else x
    change = (later - x[:, :, : later.shape[2]]).masked_fill(steps >= lengths[:, None, None], 0.0)
    return change, (lengths - 1).clamp(min=1)


def drawn(x: Tensor, lengths: Tensor, kinds: tuple[str, ...], features: int | None, seed: int) -> list[View]:
    """Views of training series (n, channels, time), zero behind their ends."""
    many = len(x) > MANY
    shares = features or (FEWER_FEATURES if many else FEATURES)
    sizes = {"shares": shares, "contests": FEWER_GROUPS if shares <= FEWER_FEATURES else GROUPS}
    views: list[View] = []
    for kind in kinds:
        for lagged in (False, True):
            series = differences(x, lengths) if lagged else (x, lengths)
            own = int(np.random.SeedSequence([seed, len(views)]).generate_state(1)[0])
            views.append(View(kind, lagged, KINDS[kind].drawn(*series, sizes[kind], own)))
    return views


def wholes(
    view: View, x: Tensor, lengths: Tensor, segments: int, said: Callable[[int], None] = lambda count: None
) -> tuple[Tensor, Tensor]:
    """The features of each series, (n, features), and their means by segment, (segments, features)."""
    whole = x.new_empty(len(x), view.size)
    means = x.new_zeros(segments, view.size, dtype=torch.float64)
    for rows, parts in view.parts(x, lengths, segments):
        whole[rows] = parts.sum(1)
        means += parts.sum(0, dtype=torch.float64) / len(x)
        said(len(rows))
    return whole, means


def packed(views: list[View]) -> dict[str, Tensor]:
    """All views as tensors by name."""
    return {
        f"{view.kind}{'-lagged' * view.lagged}.{name}": value for view in views for name, value in view.state().items()
    }


def unpacked(tensors: dict[str, Tensor]) -> list[View]:
    """The views among tensors by name, in the order in which they are drawn."""
    views = []
    for kind, convolutions in KINDS.items():
        for lagged in (False, True):
            prefix = f"{kind}{'-lagged' * lagged}."
            state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            if state:
                views.append(View(kind, lagged, convolutions.of(state)))
    return views

"""Where training sends the points of a probe: a snapshot after each epoch, and what the whole way cost."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument
from heedful._plot import Axes, axes
from heedful._text import quantity
from heedful.lens.transport._snapshots import Snapshots
from heedful.lens.transport._tap import Place, Reached, Tap
from heedful.lens.transport.curve import TransportCurve, measure_curve
from heedful.lens.transport.paths import draw_paths
from heedful.transport import TransportMetrics, transport_metrics

# Up to so many features a LayerNorm leaves next to nothing of what it reads.
FEW = 3


class TransportTracker:
    r"""Records where a module sends the points of a probe while a model is trained.

    Snapshot 0 is the input, $x^{(0)}$; snapshot s is the tapped output $x^{(s)}$ for the same probe after the s-th `record()`, in
    evaluation mode (Quadrio & Candelieri 2025, arXiv 2512.09530). `summary()` then says how near the movement from the first to the last
    snapshot is to optimal transport, and how straight the way was (`heedful.transport.transport_metrics`); `curve()` says it of every
    snapshot.

    Training goes on as if nobody looked: modes, gradients, buffers and random states are as before after each snapshot, and hooks are there
    while a snapshot is taken alone.

    Args:
        model: any `torch.nn.Module`; wrapped by `torch.compile`, `DistributedDataParallel` or `heedful.bridges.transformers.use` as well.
        tap: where to look: a module of the model, its name (`"blocks.0.attention"`), `"block"` for the last layer that holds attention, or
            a function `tap(model, *probe)` that returns a tensor. Of what a module returns the first tensor of floating numbers counts. It has
            shape `(instances, features)` or `(instances, tokens, features)`.
        probe: what the model is called with for each snapshot: a tensor, a tuple of arguments, or a mapping of named ones.
        y: labels, one for each instance or `(instances, tokens)`; the metrics then exchange points within their class alone.
        every: of so many calls of `record()` the last takes a snapshot.
        max_points: points (instances x tokens) that are kept; of a larger probe a fixed random choice, with a warning. The model still reads
            all of it, since instances may depend on one another.
        store: `"cpu"`, or `"disk"` for a temporary file that is deleted with the tracker.
        side: `"output"`, or `"input"`: what the tapped module reads. That is the stream of tokens between attention and network in front of
            a block's second normalisation.
        start: what snapshot 0 is. `"input"`: the probe, where it is a tensor of the shape of the tapped output, else what the tapped
            module reads before training. `"output"`: the tapped output before training, for modules that change the number of features.

    >>> import torch
    >>> from heedful import nn
    >>> from heedful.lens.transport import TransportTracker
    >>> _ = torch.manual_seed(0)
    >>> model, x = nn.Block(8, 2), torch.randn(5, 7, 8)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> with TransportTracker(model, model, x) as tracker:
    ...     for epoch in range(3):
    ...         optimizer.zero_grad()
    ...         model(x).square().mean().backward()
    ...         optimizer.step()
    ...         tracker.record()
    >>> tracker
    TransportTracker(Block, 3 snapshots of 5 x 7 points with 8 features, from the probe)
    >>> tracker.trajectory.shape, tracker.summary().matching > 0.5
    ((4, 5, 7, 8), True)
    """

    def __init__(
        self,
        model: nn.Module,
        tap: Tap,
        probe: Any,
        y: Any = None,
        every: int = 1,
        max_points: int = 2000,
        store: Literal["cpu", "disk"] = "cpu",
        *,
        side: Literal["output", "input"] = "output",
        start: Literal["input", "output"] = "input",
    ) -> None:
        check_whole(every=every, max_points=max_points)
        check_choice(("cpu", "disk"), store=store)
        check_choice(("output", "input"), side=side)
        check_choice(("input", "output"), start=start)
        self.every, self.max_points, self.store, self.side, self.start = every, max_points, store, side, start
        self._place: Place | None = Place(model, tap, side)
        self._tapped, self._probe, self._calls = str(self._place), probe, 0
        reached = self._place.run(probe)
        first, self.origin = self._first(reached)
        self._shape = tuple(first.shape)
        _warn_of_norm(reached, self._tapped)
        self._chosen = _chosen(self._shape[:-1], max_points)
        self.y = None if y is None else self._labels(y)
        self._snapshots = Snapshots(store == "disk")
        self._keep(first)

    def _first(self, reached: Reached) -> tuple[Tensor, str]:
        """Snapshot 0, and where it comes from in words."""
        shape = reached.returned.shape
        if len(shape) not in (2, 3):
            raise InvalidArgument(
                f"{self._tapped} gives a tensor of shape {tuple(shape)}; a snapshot is (instances, features) or (instances, tokens, "
                "features). Give a function as the tap that reshapes it"
            )
        if self.start == "output":
            return reached.returned, "the output before training"
        if isinstance(self._probe, Tensor) and self._probe.is_floating_point() and self._probe.shape == shape:
            return self._probe.detach(), "the probe"
        if reached.read is not None and reached.read.shape == shape:
            return reached.read, "the tapped module's input before training"
        got = f"a probe of shape {tuple(self._probe.shape)}" if isinstance(self._probe, Tensor) else "this probe"
        own = "" if reached.read is None else f", which reads {tuple(reached.read.shape)}"
        raise InvalidArgument(
            f"{self._tapped}{own}, gives {tuple(shape)} for {got}: points can be followed between places of one shape alone. "
            "start='output' takes the output before training as snapshot 0"
        )

    def _labels(self, y: Any) -> NDArray[Any]:
        """One label for each kept point."""
        labels = np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y)
        points = self._shape[:-1]
        if labels.shape not in (points[:1], points):
            wanted = " or ".join(str(shape) for shape in dict.fromkeys((points[:1], points)))
            raise InvalidArgument(f"y must have one label for each point, of shape {wanted}; got {labels.shape}")
        spread = labels.reshape(labels.shape + (1,) * (len(points) - labels.ndim))
        return np.broadcast_to(spread, points)[self._chosen].reshape(-1)

    def _keep(self, points: Tensor) -> None:
        if tuple(points.shape) != self._shape:
            raise InvalidArgument(
                f"{self._tapped} gave {tuple(points.shape)} for the probe and {self._shape} before; snapshots must have one shape"
            )
        numbers = points.cpu() if points.dtype in (torch.float32, torch.float64) else points.cpu().float()
        self._snapshots.append(numbers.numpy()[self._chosen])

    def record(self) -> None:
        """Takes a snapshot, if this is the `every`-th call since the last one. Call it after an epoch, or a step."""
        if self._place is None:
            raise InvalidArgument("this tracker is closed; record inside of its `with` block")
        self._calls += 1
        if self._calls % self.every == 0:
            self._keep(self._place.run(self._probe).returned)

    def callback(self) -> Any:
        """A callback for the `Trainer` of `pytorch_lightning` that calls `record()` after each epoch, in the first process."""
        from heedful.bridges.training import AfterEpochs

        return AfterEpochs(self.record)

    def close(self) -> None:
        """Lets go of the model and the probe; snapshots stay."""
        self._place = self._probe = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def trajectory(self) -> NDArray[Any]:
        """The snapshots, `(S + 1, instances, tokens, features)` or `(S + 1, instances, features)`; mapped from the file with `store="disk"`."""
        return self._snapshots.array()

    def __len__(self) -> int:
        """How many snapshots there are beside the first, the input."""
        return len(self._snapshots) - 1

    def __bool__(self) -> bool:
        """True, also before the first `record()`: an empty tracker is a tracker."""
        return True

    def _points(self) -> NDArray[Any]:
        """`(S + 1, N, features)`, with tokens as points of their own."""
        if not len(self):
            raise InvalidArgument("there is no snapshot yet beside the input; call record() after an epoch")
        trajectory = self.trajectory
        return trajectory.reshape(len(trajectory), -1, trajectory.shape[-1])

    def summary(self, metrics: Literal["consistent", "thesis"] = "consistent", **options: Any) -> TransportMetrics:
        """How the points moved from the first snapshot to the last: `heedful.transport.transport_metrics`, which takes the options."""
        return transport_metrics(self._points(), self.y, metrics=metrics, **options)

    def curve(self, p: float = 2) -> TransportCurve:
        """The metrics from snapshot 0 to each other one; plans start where those of the snapshot before ended."""
        steps = range(self.every, self.every * len(self) + 1, self.every)
        return measure_curve(self._points(), self.y, p, steps)

    def plot(self, ax: Axes | None = None) -> Axes:
        """`curve()` as a picture."""
        return self.curve().plot(ax)

    def plot_paths(self, ax: Axes | None = None, most: int = 200) -> Axes:
        """The way of each point from snapshot 0 (small dots) to the last (large ones), in the colour of its class.

        Of more than two features the two directions are drawn along which the points spread most, over all snapshots; of one feature its
        value over the snapshots. At most `most` points are drawn, evenly spread.
        """
        return draw_paths(self._points(), self.y, axes(ax), most)

    def __repr__(self) -> str:
        sizes = " x ".join(f"{size:,}" for size in self._snapshots.shape[:-1])
        return (
            f"TransportTracker({self._tapped}, {quantity(len(self), 'snapshot')} of {sizes} points with "
            f"{quantity(self._shape[-1], 'feature')}, from {self.origin})"
        )


def _chosen(points: tuple[int, ...], most: int) -> Any:
    """Which points are kept, as an index of `(instances, features)` or `(instances, tokens, features)`."""
    count, tokens = points[0], points[1] if len(points) > 1 else 1
    if count * tokens <= most:
        return slice(None)
    rng = np.random.default_rng(0)
    keep = np.sort(rng.choice(count, max(1, most // tokens), replace=False))
    within = np.sort(rng.choice(tokens, min(tokens, most), replace=False))
    warnings.warn(
        f"the probe has {count * tokens:,} points, more than max_points={most:,}: {len(keep) * len(within):,} of them are kept, the same in "
        "each snapshot",
        stacklevel=3,
    )
    return keep if len(points) == 1 else np.ix_(keep, within)


def _warn_of_norm(reached: Reached, tapped: str) -> None:
    """Optimality near one is built in where a LayerNorm over a few features comes last."""
    features, last = reached.returned.shape[-1], reached.last
    if features > FEW or last is None or not type(last).__name__.endswith("LayerNorm"):
        return
    left = {1: "one value", 2: "two values"}.get(features, "the points of a circle")
    warnings.warn(
        f"{tapped} ends in a LayerNorm over {quantity(features, 'feature')}, which leaves {left} of what it reads: points are moved by next to "
        "nothing but a few fixed vectors, so that optimality near 1 is built in. Take 4 features or more, or no LayerNorm there",
        stacklevel=3,
    )

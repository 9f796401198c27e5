"""Whether heads that attend to another kind matter more than others: their output is zeroed, and the model asked again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heedful._checks import check_whole
from heedful._errors import InvalidArgument, Unsupported
from heedful._plot import Axes, axes
from heedful._progress import Progress, silent
from heedful._result import Result
from heedful._runtime import undisturbed
from heedful._text import quantity
from heedful.bridges.structure import output_map, output_matrix
from heedful.bridges.transformers import bare
from heedful.lens._inputs import read_inputs
from heedful.lens.depth.skipping import outcome_of
from heedful.lens.flows.groups import grouped
from heedful.lens.flows.measure import batches_of, flow
from heedful.lens.flows.result import Flow

# A head: the module that attends, and its number in it.
Place = tuple[str, int]
# The share of all heads that is zeroed together.
SHARE = 0.1
SHUFFLES = 2000


@dataclass(frozen=True)
class HeadEffect(Result):
    """A head, the share of its attention between kinds, and what is lost without it."""

    layer: int
    head: int
    imf: float
    lift: float
    effect: float


@dataclass(frozen=True, repr=False)
class CausalCheck(Result):
    """What zeroing heads does, beside the share of their attention that goes between kinds.

    Attributes:
        heads: every head zeroed alone.
        count: how many are zeroed together.
        top: the effect of zeroing the heads with the largest lift.
        random: the effects of as many heads drawn at random.
        correlation: Spearman's, between a head's lift and its effect.
        p: the share of random orders of the heads whose correlation is as far from zero.
        measure: what an effect is.
        whole: the score of the whole model, where a score was given.
    """

    heads: tuple[HeadEffect, ...]
    count: int
    top: float
    random: tuple[float, ...]
    correlation: float
    p: float
    measure: str
    whole: float | None = None

    _also = ("mean_random", "as_harmful", "verdict")

    @property
    def mean_random(self) -> float:
        return sum(self.random) / len(self.random)

    @property
    def as_harmful(self) -> float:
        """The share of random sets that do at least as much as the top heads; ties count as one half."""
        more = sum(one > self.top for one in self.random) + 0.5 * sum(one == self.top for one in self.random)
        return more / len(self.random)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Each head: its lift and its effect."""
        ax = axes(ax)
        ax.scatter([one.lift for one in self.heads], [one.effect for one in self.heads], s=14, color="C1", alpha=0.7)
        ax.axvline(1.0, color="gray", lw=0.8, ls=":")
        ax.set(xlabel="share between kinds / even attention", ylabel=f"{self.measure}, head zeroed")
        ax.set_title(f"Spearman {self.correlation:.2f} (p = {self.p:.2g}) over {len(self.heads)} heads")
        return ax

    def __str__(self) -> str:
        spread = math.sqrt(sum((one - self.mean_random) ** 2 for one in self.random) / max(1, len(self.random) - 1))
        several = quantity(self.count, "head")
        rows = [
            ("zeroed", self.measure),
            (f"{several} with most attention to another kind", f"{self.top:.4f}"),
            (
                f"{several} at random, {len(self.random)} draws",
                f"{self.mean_random:.4f}, standard deviation {spread:.4f}",
            ),
        ]
        width = max(len(first) for first, _ in rows)
        lines = [] if self.whole is None else [f"The whole model scores {self.whole:.4f}."]
        lines += [f"{first:<{width}}  {second}" for first, second in rows]
        lines.append(f"{self.as_harmful:.0%} of the random sets do as much as the top heads, or more.")
        lines.append(
            f"Spearman's correlation of lift and effect over {quantity(len(self.heads), 'head')}: {self.correlation:.2f} (p = {self.p:.2g})."
        )
        return "\n".join([*lines, self.verdict])

    @property
    def verdict(self) -> str:
        """What both comparisons say together."""
        if not self.p < 0.05:
            return "Attention between kinds does not tell here which heads matter."
        if self.correlation < 0:
            return "Heads that attend across matter less here than others, as far as zeroing shows."
        if self.as_harmful > 0.25:
            return "A weak guide here: the correlation is above zero, but the top heads together do no more than random ones."
        return "Heads that attend across matter more here than others, as far as zeroing shows."

    def __repr__(self) -> str:
        return f"CausalCheck({quantity(len(self.heads), 'head')}, correlation {self.correlation:.2f}, p {self.p:.2g})"


def causal_check(
    model: nn.Module,
    inputs: Any = None,
    *,
    score: Callable[[nn.Module], float] | None = None,
    count: int | None = None,
    draws: int = 20,
    seed: int = 0,
    groups: Any = None,
    tokenizer: Any = None,
    progress: Progress | None = None,
    **options: Any,
) -> CausalCheck:
    r"""Zeroes heads and measures what is lost: the ones with most attention between kinds, as many at random, and each alone.

    Attention says where a head looks, not whether that matters. Here the columns of the map of outputs that belong to a head are set to
    zero, so that it adds nothing, and the model reads the same inputs again. The effect is $|f_{-h}(x) - f(x)| / |f(x)|$, of the first
    tensor that the model returns, or how far a score falls. The model is left as it was.

    Args:
        model, inputs, groups, tokenizer: as for `flow`, and further options too.
        score: what the model is good for, the larger the better, as accuracy on held-out questions: `score(model)`.
        count: heads that are zeroed together; a tenth of all by default.
        draws: random sets of as many heads.
        seed: of the draws.
        progress: called with how much is done, how much there is, and what is under way.

    >>> import torch
    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <...>
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    >>> causal_check(model, torch.randn(1, 6, 8), modality=[0, 0, 0, 1, 1, 1], draws=3).count
    1
    """
    check_whole(draws=draws)
    check_whole(count=count, optional=True)
    model = bare(model)
    inputs = list(inputs) if isinstance(inputs, Iterator) else inputs  # read more than once
    found = flow(model, inputs, groups=groups, tokenizer=tokenizer, **options)
    if not found.layers:
        raise Unsupported(
            "kinds meet in cross-attention alone here, so that heads have no share between kinds to check"
        )
    places = [(layer.name, head) for layer in found.layers for head in range(layer.sums.shape[1])]
    sizes = {layer.name: layer.sums.shape[1] for layer in found.layers}
    count = count or max(1, round(SHARE * len(places)))
    if count >= len(places):
        raise InvalidArgument(f"count must be below {len(places)}, the number of heads; got {count}")
    runs = (
        [one.inputs for one in grouped(model, tokenizer, groups, inputs)] if groups is not None else batches_of(inputs)
    )
    tested = _Tested(model, sizes, score, runs, tokenizer)
    ranked = [(found.layers[one.layer].name, one.head) for one in found.heads()]
    source = torch.Generator().manual_seed(seed)
    sets = [[places[at] for at in torch.randperm(len(places), generator=source)[:count]] for _ in range(draws)]
    say, total = progress or silent, len(places) + draws + 1
    effects = []
    with undisturbed(model):
        tested.begin()
        for done, chosen in enumerate([place] for place in places):
            say(done, total, "heads")
            effects.append(tested.effect(chosen))
        top = tested.effect(ranked[:count])
        random = []
        for done, chosen in enumerate(sets):
            say(len(places) + 1 + done, total, "random heads")
            random.append(tested.effect(chosen))
    heads = _effects(found, effects)
    correlation, p = _correlated([one.lift for one in heads], effects, source)
    return CausalCheck(heads, count, top, tuple(random), correlation, p, tested.measure, tested.whole)


def _effects(found: Flow, effects: Sequence[float]) -> tuple[HeadEffect, ...]:
    by_place = {(one.layer, one.head): one for one in found.heads()}
    order = [(layer.layer, head) for layer in found.layers for head in range(layer.sums.shape[1])]
    return tuple(
        HeadEffect(*place, by_place[place].imf, by_place[place].lift, effect)
        for place, effect in zip(order, effects, strict=True)
    )


class _Tested:
    """A model whose heads are zeroed in turn, and what it then gives."""

    def __init__(
        self,
        model: nn.Module,
        sizes: dict[str, int],
        score: Callable[[nn.Module], float] | None,
        runs: Sequence[Any],
        tokenizer: Any,
    ) -> None:
        self.model, self.sizes, self.score = model, sizes, score
        self.calls = [] if score else [read_inputs(model, one, tokenizer, strings=False)[:2] for one in runs]
        self.measure = "how far the score falls" if score else "relative change of the output"
        self.whole: float | None = None
        self._outputs: list[Tensor] = []

    def begin(self) -> None:
        """What the whole model gives."""
        if self.score is not None:
            self.whole = float(self.score(self.model))
        else:
            self._outputs = self._run()

    def effect(self, heads: Sequence[Place]) -> float:
        with zeroed(self.model, heads, self.sizes):
            if self.score is not None:
                assert self.whole is not None
                return self.whole - float(self.score(self.model))
            parts = zip(self._run(), self._outputs, strict=True)
            squares = [(float((one - whole).square().sum()), float(whole.square().sum())) for one, whole in parts]
        return math.sqrt(sum(one for one, _ in squares) / max(1e-300, sum(whole for _, whole in squares)))

    def _run(self) -> list[Tensor]:
        # The same draws every time: ViLT takes its patches in a random order.
        outputs = []
        for args, named in self.calls:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                outputs.append(outcome_of(self.model(*args, **named))[0])
        return outputs


@contextmanager
def zeroed(model: nn.Module, heads: Sequence[Place], sizes: dict[str, int]) -> Iterator[None]:
    """While it lasts, these heads add nothing: their columns of the map of outputs are zero; then they are as before."""
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for name in dict.fromkeys(name for name, _ in heads):
            matrix = output_matrix(output_map(model, name)).detach()
            if not matrix.is_floating_point() or matrix.shape[1] % sizes[name]:
                raise Unsupported(
                    f"the map of outputs of {name} is {matrix.dtype} {tuple(matrix.shape)}, whose heads cannot be zeroed"
                )
            kept.append((matrix, matrix.clone()))
            size = matrix.shape[1] // sizes[name]
            for own, head in heads:
                if own == name:
                    matrix[:, head * size : (head + 1) * size] = 0.0
        yield
    finally:
        for matrix, before in kept:
            matrix.copy_(before)


def _ranks(values: Sequence[float]) -> Tensor:
    """Ranks from 1 on; equal values share the mean of theirs."""
    numbers = torch.tensor(values, dtype=torch.float64)
    below, equal = (numbers[:, None] > numbers).sum(1), (numbers[:, None] == numbers).sum(1)
    return below + (equal + 1) / 2


def _correlated(one: Sequence[float], other: Sequence[float], source: torch.Generator) -> tuple[float, float]:
    """Spearman's correlation, and how often a random order gives one as far from zero."""
    kept = [(a, b) for a, b in zip(one, other, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if len(kept) < 3:
        return math.nan, math.nan
    first, second = (_ranks(side) for side in zip(*kept, strict=True))
    first, second = (side - side.mean() for side in (first, second))
    size = first.norm() * second.norm()
    if float(size) == 0:
        return math.nan, math.nan
    value = float(first @ second / size)
    orders = torch.stack([torch.randperm(len(kept), generator=source) for _ in range(SHUFFLES)])
    others = (first * second[orders]).sum(1) / size
    return value, float(((others.abs() >= abs(value) - 1e-12).sum() + 1) / (SHUFFLES + 1))

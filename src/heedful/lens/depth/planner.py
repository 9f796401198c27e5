"""From a budget to a shape that can be trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from heedful._checks import check_whole
from heedful._errors import InvalidArgument
from heedful._text import quantity
from heedful.lens.depth.law import Law, find_law
from heedful.lens.depth.plans import Choice, Plan
from heedful.lens.depth.shape import LARGEST, Shape, parse_count

# Weights, gradients and Adam's moments in mixed precision.
BYTES_PER_PARAM = 16
# Fewer bytes are no memory, but a number without its unit.
LEAST_MEMORY = 10_000

# Past the embedding's rank width is cut to this much above it, and the depth-to-width ratio grows tenfold at most:
# Wies et al. 2021 put the best ratio for a vocabulary of 256 at about ten times that of text.
SLACK, STRETCH = 1.25, 10.0

# Runners-up that a plan holds.
OTHERS = 4

# Widths on either side among which one with usual heads is looked for.
TRIED = 8

# Beyond so many halves of its band a law calls a shape inefficient.
BAND = 2

# What misses the budget, or the law's width where a depth was given, by more than this is no answer.
FAR, FAR_WIDTH = 0.1, 0.25


def plan(
    params: str | float | None = None,
    *,
    flops: str | float | None = None,
    memory: str | float | None = None,
    layers: int | None = None,
    width: int | None = None,
    vocab: int = 50257,
    tied: bool = True,
    gated: bool = False,
    ffn_mult: float | None = None,
    kv_ratio: int = 1,
    head_dim: int | None = None,
    head_multiple_of: int = 8,
    multiple_of: int = 64,
    seq_len: int = 1024,
    include_embeddings: bool = False,
    embedding_rank: int | None = None,
    max_depth: int | None = None,
    tolerance: float | None = None,
    law: str | Law | Callable[[float], float] = "levine2020",
) -> Plan:
    r"""How deep and how wide for a budget.

    Solves $\kappa L d^2 = N$ on the law $\ln d = a + bL$ (Levine et al. 2020, section 5; see `DepthLaw`), then takes whole
    layers within three standard errors and widths that are multiples of `multiple_of`, drops what misses the budget by more
    than `tolerance`, and ranks by distance from the law in steps of half a standard error, then by how well the sizes suit
    tensor cores, then by nearness to the budget. Where nothing is left, or
    nothing within the law's band, shapes up to 10 % off are taken. $\kappa$ is that of the layer asked for: 12 for a plain one
    with a feed-forward of 4 d.

    Args:
        params: parameters in the layers' matrices ("1.3B" or 1.3e9), with `include_embeddings` all matrices.
        flops: training compute instead; $N = \sqrt{C / 120}$ after Hoffmann et al. 2022 (20 tokens per parameter).
        memory: bytes instead, a ceiling for weights, gradients and Adam's moments: 16 a parameter, embeddings included.
        layers, width: instead, one size; the law gives the other.
        ffn_mult: feed-forward size over width; 4, or 8/3 when gated.
        kv_ratio: query heads for each key head.
        head_dim: by default near 64, near 128 from width 2048 on, and such that heads divide the width.
        head_multiple_of: head sizes are multiples of this, an even number: rotary positions turn pairs of channels, and fast
            attention wants multiples of 8. Widths that have no such head size from 32 to 128 are passed over.
        embedding_rank: of a factorised embedding. Where it, or the vocabulary, is below the width, width is cut towards it and
            depth gets the rest (Wies et al. 2021), the depth-to-width ratio growing tenfold at most.
        max_depth: no more layers than this, say for latency.
        tolerance: by default 3 %, and up to 8 % where `multiple_of` is coarse for the width.
        law: `levine2020`, `constant_aspect`, `depth_delusion`, a `Law`, or a function from width to depth.

    >>> best = plan("1.21B", multiple_of=8)  # GPT-3 XL was 24 x 2048
    >>> best.layers, best.width, best.heads
    (42, 1560, 39)
    """
    budgets = {"params": params, "flops": flops, "memory": memory, "layers": layers, "width": width}
    named = [name for name, value in budgets.items() if value is not None]
    if len(named) != 1:
        raise InvalidArgument(f"give one of {', '.join(budgets)}; got {', '.join(named) or 'none'}")
    check_whole(
        vocab=vocab, kv_ratio=kv_ratio, multiple_of=multiple_of, seq_len=seq_len, head_multiple_of=head_multiple_of
    )
    sizes = {"layers": layers, "width": width, "head_dim": head_dim}
    check_whole(1, LARGEST, optional=True, **sizes, embedding_rank=embedding_rank, max_depth=max_depth)
    if head_multiple_of % 2:
        raise InvalidArgument(f"head_multiple_of must be even, for rotary positions turn pairs; got {head_multiple_of}")
    whole = include_embeddings or memory is not None
    if whole and embedding_rank is not None:
        raise InvalidArgument("a budget with embeddings and an embedding_rank are not planned together; drop one")
    rule = find_law(law)

    def shape(depth: int, d: int) -> Shape:
        if head_dim is not None and d % head_dim:
            raise InvalidArgument(f"heads of {head_dim} do not divide width {d}; give a divisor")
        heads = d // head_dim if head_dim else _heads(d, kv_ratio, head_multiple_of)
        f = round(d * (ffn_mult or (8 / 3 if gated else 4)) / multiple_of) * multiple_of
        kv = max(k for k in range(1, heads + 1) if heads % k == 0 and k <= max(1, heads // kv_ratio))
        table = {"vocab": vocab, "tied": tied, "context": seq_len, "embedding_rank": embedding_rank}
        return Shape(depth, d, heads, kv_heads=kv, ffn=max(f, multiple_of), gated=gated, **table)  # type: ignore[arg-type]

    step = math.lcm(multiple_of, head_dim or head_multiple_of)
    if layers is not None or width is not None:
        only = _one_size(layers, width, shape, rule, step, seq_len)
        if abs(only.width / only.width_star - 1) > FAR_WIDTH:
            miss = f"the law's width for {layers} layers is {only.width_star:.0f}, and {only.width} the nearest"
            raise InvalidArgument(_coarse(miss, step, multiple_of, head_dim))
        return only
    budget = _budget(params, flops, memory)
    tables = vocab * (1 if tied else 2) if whole else 0
    # Of a wide layer, where rounding of the feed-forward no longer shows.
    kappa = shape(1, step * max(1, 4096 // step)).kappa
    search = _Search(shape, rule, budget, kappa, tables, step, tolerance, ceiling=memory is not None)
    depth, d = search.optimum()
    aim, remarks = _aim(depth, d, min(vocab, embedding_rank or vocab), max_depth)
    choices, order = search.choices(aim, depth, max_depth)
    if abs(choices[0].off) > max(FAR, tolerance or 0.0):
        one = choices[0].shape
        miss = f"the nearest shape, {one.layers} x {one.width}, misses the budget of {budget:,.0f} by {choices[0].off:+.0%}"
        raise InvalidArgument(_coarse(miss, step, multiple_of, head_dim) + ", or a larger budget")
    best = choices[0].shape
    if choices[0].distance > 3 and aim == depth:
        sigma = rule.sigma_depth(depth)
        far = "% of the depth" if sigma is None else "standard errors"
        count = choices[0].distance * (5 if sigma is None else 1)
        remarks += (f"{count:.0f} {far} off the law: multiples of {step} are coarse here",)
    timed = tuple(replace(c, time=c.shape.step_time() / best.step_time()) for c in choices)
    return Plan(best, rule, budget, depth, d, rule.sigma_depth(depth), timed, seq_len, best.flags(rule), remarks, order)


@dataclass(frozen=True)
class _Search:
    """Shapes near a budget; `tables` are parameters per channel outside of layers."""

    shape: Callable[[int, int], Shape]
    rule: Law
    budget: float
    kappa: float
    tables: int
    step: int
    tolerance: float | None
    ceiling: bool = False  # nothing above the budget

    def optimum(self) -> tuple[float, float]:
        """Depth and width on the law that spend the budget."""
        if not self.tables:
            return self.rule.solve(self.budget, self.kappa)
        low, high = 0.01, 1.0  # the share of the layers

        def spent(share: float) -> float:
            return share * self.budget + self.tables * self.rule.solve(share * self.budget, self.kappa)[1]

        if spent(low) > self.budget:
            raise InvalidArgument(
                f"embeddings alone take the {self.budget:,.0f} parameters; give a larger budget or a smaller vocab"
            )
        for _ in range(50):
            share = (low + high) / 2
            low, high = (share, high) if spent(share) < self.budget else (low, share)
        return self.rule.solve(low * self.budget, self.kappa)

    def width(self, depth: float) -> float:
        """The width that spends the budget at a depth: $\\kappa L d^2 + t d = N$."""
        return 2 * self.budget / (self.tables + math.sqrt(self.tables**2 + 4 * self.kappa * depth * self.budget))

    def near(self, depth: int) -> list[Shape]:
        """The shapes of this depth whose widths are next to the budget's, below and above, and have usual heads."""
        steps = self.width(depth) / self.step
        nearest = []
        for first, way in ((max(1, math.floor(steps)), -1), (max(1, math.ceil(steps)), 1)):
            shapes = [self.shape(depth, at * self.step) for at in range(first, first + TRIED * way, way) if at > 0]
            nearest.append(next((one for one in shapes if one.width < 64 or _usual(one)), shapes[0]))
        return list(dict.fromkeys(nearest))

    def choices(self, aim: float, optimum: float, max_depth: int | None) -> tuple[tuple[Choice, ...], str]:
        """Shapes within the tolerance, best first, and what ranks them; those nearest to the budget where none is."""
        reach = 3 * (self.rule.sigma_depth(optimum) or optimum / 20)
        last = math.ceil(aim + reach) if max_depth is None else min(math.ceil(aim + reach), max_depth)
        first = last if aim == max_depth else max(1, math.floor(aim - reach))
        candidates = []
        for depth in range(first, last + 1):
            for one in self.near(depth):
                off = (one.layer_params + self.tables * one.width) / self.budget - 1
                if not self.ceiling or one.params <= self.budget:
                    candidates.append(Choice(one, off, self.rule.distance(depth, one.width)))
        if not candidates:
            raise InvalidArgument(
                f"no shape near {aim:.0f} layers fits into the memory; give more, or a smaller multiple_of"
            )
        coarse = max(0.03, min(0.08, self.step / self.width(aim)))
        fits = [choice for choice in candidates if abs(choice.off) <= (self.tolerance or coarse)]
        if self.tolerance is None and aim == optimum and not any(choice.distance <= BAND for choice in fits):
            fits += [choice for choice in candidates if choice.distance <= BAND and abs(choice.off) <= FAR]

        def rank(choice: Choice) -> tuple[float, int, float]:
            # Half a standard error is no difference; what was moved off the law on purpose is to stay where it was moved.
            far = 2 * choice.distance if aim == optimum else abs(choice.shape.layers - aim)
            return math.floor(far), _unfriendly(choice.shape), abs(choice.off)

        if not fits:
            return tuple(
                sorted(candidates, key=lambda choice: abs(choice.off))[: 1 + OTHERS]
            ), "by nearness to the budget"
        step = "2.5 %" if self.rule.sigma_depth(optimum) is None else "half a σ"  # noqa: RUF001
        first_by = f"distance from the law in steps of {step}" if aim == optimum else f"distance from {aim:.0f} layers"
        order = f"by {first_by}, then by sizes that suit tensor cores, then by nearness to the budget"
        return tuple(sorted(fits, key=rank)[: 1 + OTHERS]), order


def _aim(depth: float, width: float, rank: int, max_depth: int | None) -> tuple[float, tuple[str, ...]]:
    """The depth to look around, moved off the optimum by a low embedding rank or a limit, and why."""
    remarks = []
    narrow = max(SLACK * rank, width / STRETCH ** (1 / 3))
    if rank < width and narrow < width:
        depth *= (width / narrow) ** 2
        remarks.append(
            f"width cut from {width:.0f} towards the embedding's rank {rank}, the rest of the budget went to depth"
        )
    if max_depth is not None and depth > max_depth:
        remarks.append(f"depth cut from {depth:.0f} to {max_depth} as asked")
        depth = float(max_depth)
    return depth, tuple(remarks)


def _one_size(
    layers: int | None, width: int | None, shape: Callable[[int, int], Shape], rule: Law, step: int, seq_len: int
) -> Plan:
    """The plan for a given depth or a given width."""
    if layers is not None:
        depth, d = float(layers), rule.optimal_width(layers)
    else:
        assert width is not None
        depth, d = rule.optimal_depth(width), float(width)
        if depth < 1:
            raise InvalidArgument(f"the law gives {depth:.1f} layers for width {width}; give a larger width")
    wide = width or max(step, round(d / step) * step)
    best = shape(layers or round(depth), wide)
    choice = Choice(best, 0.0, rule.distance(best.layers, wide))
    sigma, flags = rule.sigma_depth(depth), best.flags(rule)
    return Plan(best, rule, float(best.layer_params), depth, d, sigma, (choice,), seq_len, flags)


def _coarse(miss: str, step: int, multiple_of: int, head_dim: int | None) -> str:
    heads = f" and head_dim {head_dim}" if head_dim else ""
    other = " or another head_dim" if head_dim else ""
    return (
        f"{miss}: widths are multiples of {step} (multiple_of {multiple_of}{heads}); give a smaller multiple_of{other}"
    )


def _budget(params: str | float | None, flops: str | float | None, memory: str | float | None) -> float:
    if params is not None:
        return parse_count(params, "params")
    if flops is not None:
        return math.sqrt(parse_count(flops, "flops") / 120)
    assert memory is not None
    size = parse_count(memory, "memory")
    if size < LEAST_MEMORY:
        raise InvalidArgument(
            f"{size:,.0f} bytes hold {quantity(int(size // BYTES_PER_PARAM), 'parameter')} in training; did you mean {size:g}GB?"
        )
    return size / BYTES_PER_PARAM


def _heads(d: int, kv_ratio: int, multiple: int) -> int:
    """Heads that divide the width, of a size near 64, or 128 from width 2048 on, and a multiple of the key heads.

    Sizes are multiples of `multiple`; a width that was given and has none gets even ones.
    """
    target = 64 if d < 2048 else 128
    even = [size for size in range(2, min(d, 1024) + 1, 2) if d % size == 0]
    sizes = [size for size in even if size % multiple == 0] or even
    if not sizes:
        raise InvalidArgument(f"no even head size divides width {d}; give an even width, or a head_dim")

    def cost(size: int) -> float:
        return abs(math.log(size / target)) + 0.7 * (size % 8 != 0) + 2 * (d // size % kv_ratio != 0)

    return d // min(sizes, key=cost)


def _usual(shape: Shape) -> bool:
    return shape.head_dim % 8 == 0 and 32 <= shape.head_dim <= 128


def _unfriendly(shape: Shape) -> int:
    return 2 * (not _usual(shape)) + (shape.width % 128 != 0) + (shape.ffn % 256 != 0)

"""What others would call the explanation: words in the order of some importance, taken away until the answer changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heedful._result import Result
from heedful.lens.causes.searching import Inquiry, Replies, Units, exhaustive, pruned

BASELINES = ("attention", "smart attention", "gradient x input", "leave-one-out", "random")


@dataclass(frozen=True)
class BaselineResult(Result):
    """What one baseline gives.

    Attributes:
        indices: nodes of the set, as in `Explanation.indices`; those it had taken where nothing flipped.
        flipped: whether the answer changes without them.
        size: how many there are.
        calls: different inputs that it asked the model about, its own order included.
        effect: how far the margin fell.
        pruned: the set without members it does not need, for a fair comparison; as it is where nothing flipped.
        pruned_calls: inputs that pruning asked about beyond `calls`.
    """

    indices: tuple[int, ...]
    flipped: bool
    size: int
    calls: int
    effect: float
    pruned: tuple[int, ...]
    pruned_calls: int


def compare(
    replies: Replies,
    attention: Sequence[float],
    gradient: Sequence[float] | None,
    nodes: Sequence[int],
    units: Sequence[int] | None = None,
    *,
    max_size: int = 5,
    seed: int = 0,
    with_exhaustive: bool = False,
    max_calls: int | None = None,
) -> dict[str, BaselineResult]:
    """Every baseline on the same units and the same bound on size, by name.

    `"attention"` takes units by the weight that the target's row gives them, head mean, until the answer changes; `"smart
    attention"` keeps one only if the margin falls. `"gradient x input"`, `"leave-one-out"` and `"random"` take them in these
    orders; the first is absent where the model has no gradients, and its backward pass is not among its calls. `"exhaustive"`, if
    asked for, tries every set by size.

    Args:
        replies: what the model answers; a baseline's calls are counted as if it were alone.
        attention, gradient: importance of each unit.
        nodes: the node of each unit.
        units: which of the task's units these are; all by default.
    """
    count = len(nodes)
    shuffled = np.random.default_rng(seed).permutation(count).tolist()
    worths = dict(zip(BASELINES, (attention, attention, gradient, [], shuffled), strict=True))
    results: dict[str, BaselineResult] = {}
    for name, worth in worths.items():
        if worth is None:
            continue
        ask = replies.inquiry(units=units)
        if name == "leave-one-out":
            worth = [-reply.margin for reply in ask([(unit,) for unit in range(count)])]
        order = np.argsort(-np.asarray(worth, float), kind="stable").tolist()
        results[name] = _result(ask, (_smart if name == "smart attention" else _greedy)(ask, order, max_size), nodes)
    if with_exhaustive:
        ask = replies.inquiry(max_calls, units)
        results["exhaustive"] = _result(ask, exhaustive(ask, count, max_size), nodes)
    return results


def _greedy(ask: Inquiry, order: Sequence[int], max_size: int) -> Units:
    taken: Units = ()
    for unit in order[:max_size]:
        taken = (*taken, unit)
        if ask([taken])[0].flipped:
            break
    return taken


def _smart(ask: Inquiry, order: Sequence[int], max_size: int) -> Units:
    taken: Units = ()
    margin = ask([()])[0].margin
    for unit in order:
        reply = ask([(*taken, unit)])[0]
        if reply.margin < margin:
            taken, margin = (*taken, unit), reply.margin
        if reply.flipped or len(taken) == max_size:
            break
    return taken


def _result(ask: Inquiry, units: Units, nodes: Sequence[int]) -> BaselineResult:
    whole, without = ask([(), units])
    calls = ask.calls
    least = pruned(ask, units) if without.flipped else units
    return BaselineResult(
        indices=tuple(nodes[unit] for unit in sorted(units)),
        flipped=without.flipped,
        size=len(units),
        calls=calls,
        effect=whole.margin - without.margin,
        pruned=tuple(nodes[unit] for unit in sorted(least)),
        pruned_calls=ask.calls - calls,
    )

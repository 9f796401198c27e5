"""How often a function that passed may still fail."""

from __future__ import annotations

import math

from heedful._errors import InvalidArgument


def failure_bound(failures: int, trials: int, confidence: float = 0.95) -> float:
    r"""Clopper and Pearson's upper bound on a failure probability: the p with $P(\mathrm{Bin}(T, p) \le x) = 1 - c$.

    With no failure it is $1 - 0.05^{1/T}$, just below $3/T$.

    >>> round(failure_bound(0, 200), 4), round(failure_bound(3, 200), 4)
    (0.0149, 0.0383)
    """
    if trials < 1 or not 0 <= failures <= trials:
        raise InvalidArgument(f"failures must lie between 0 and trials >= 1; got {failures} of {trials}")
    if failures == trials:
        return 1.0
    low, high = failures / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(failures, trials, middle) > 1 - confidence else (low, middle)
    return high


def _at_most(failures: int, trials: int, p: float) -> float:
    """The chance of so many failures or fewer."""
    if p >= 1.0:
        return 0.0
    logs = (
        math.lgamma(trials + 1) - math.lgamma(x + 1) - math.lgamma(trials - x + 1)
        + (x * math.log(p) if x else 0.0) + (trials - x) * math.log1p(-p)
        for x in range(failures + 1)
    )  # fmt: skip
    return math.fsum(math.exp(log) for log in logs)

"""How near a movement of points is to the cheapest one, and how straight its way."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from heedful._checks import check_choice, check_number
from heedful._errors import InvalidArgument
from heedful.transport._clouds import Array, array, costs, labels, moves, pair
from heedful.transport.plans import Plan, assignment
from heedful.transport.result import QUANTILES, TransportMetrics

Metrics = Literal["consistent", "thesis"]

# Two final places that differ by less than this share of the cloud's radius are one.
SAME = 1e-6


def monge_gap(X: Any, TX: Any, p: float = 2, y: Any = None, **options: Any) -> float:
    r"""What a map costs more than the cheapest way between the same two clouds: 0 where it is optimal.

    $$\frac{1}{N} \sum_i |x_i - T(x_i)|^p - \mathrm{OT}_p(X, T(X))$$

    (Uscidda & Cuturi 2023, definition 3.1, with exact instead of entropic transport). With labels y points may be exchanged with points of
    their class alone, and the gap is the mean over points of the classes' gaps.

    Args:
        X: points `(N, r)`.
        TX: where they went, `(N, r)`.
        p: exponent of the distance, from 1 on.
        y: `(N,)` labels.
        options: of `assignment`. Of an entropic plan the gap is a lower bound; where it is negative it is 0, with a warning.

    >>> import numpy as np
    >>> X = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> monge_gap(X, 3 * X), monge_gap(X, X @ [[0.0, 1.0], [-1.0, 0.0]])
    (0.0, 2.0)
    """
    X, TX = _same(X, TX, p)
    ot, _, exact = _matched(X, TX, p, labels(y, len(X)), options)
    return _gap(float(moves(X, TX, p).mean()), ot, exact)


def transport_metrics(
    trajectory: Any,
    y: Any = None,
    p: float = 2,
    metrics: Metrics = "consistent",
    per_class: bool = True,
    centred: bool = True,
    **options: Any,
) -> TransportMetrics:
    r"""How points moved from the first snapshot to the last: how near to optimal transport, and how straight.

    With $\Delta_i = x_i^{(S)} - x_i^{(0)}$ and a mass of 1/N at each point:

    - `direct` $= \frac{1}{N} \sum_i |\Delta_i|^p$, what the movement cost,
    - `ot` $= \sum_c \frac{N_c}{N} \mathrm{OT}_p$ between the first and the last cloud of each class (`per_class=False`: of all points),
    - `monge_gap` = direct - ot, `optimality` $= (\mathrm{ot} / \mathrm{direct})^{1/p}$, 1 where nothing moved,
    - `centred_optimality`: the same after each class's mean is subtracted at both ends (p = 2): the shift of means, which any map of the
      classes has in common, dominates the uncentred one,
    - `path` $= \frac{1}{N} \sum_i \sum_s |x_i^{(s+1)} - x_i^{(s)}|$, `efficiency` $= \sum_i |\Delta_i| / \sum_i \sum_s |x_i^{(s+1)} - x_i^{(s)}|$,
      1 for straight ways; `efficiency_quantiles` are those of single points, at 5, 25, 50, 75 and 95 %,
    - `matching`: share of points whose last place is where the optimal plan sends them (an equal place counts),
    - `baseline`, `centred_baseline`: optimality of a random pairing of the same two clouds, in class. In many dimensions it is near 1
      by itself, and so is any other: a value above it alone says something.

    Args:
        trajectory: snapshots `(S + 1, N, r)`, or of sets of T tokens `(S + 1, N, T, r)`.
        y: `(N,)` labels; tokens have that of their set.
        p: exponent of the distance, from 1 on.
        metrics: `"thesis"` computes as Quadrio & Candelieri (2025, arXiv 2512.09530) do (p = 2, classes apart): sums instead of means,
            and per class $\sqrt{\sum}$ for `direct` and `ot`, but a sum of norms for `path`. Their efficiency is therefore not 1 for
            straight ways but $\sum_c \sqrt{N_c} / N$ (0.047 for their two classes of 450 points), and all grow with the number of points.
        per_class: whether points may be exchanged with points of their class alone.
        centred: whether the centred figures are wanted.
        options: of `assignment`.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).normal(size=(11, 3))
    >>> print(transport_metrics(np.stack([X, X + 1.0, X + 2.0])))
    11 points, 2 steps, consistent metrics, p = 2
    optimality 1.000 (a random pairing of the same clouds: 0.874)
    without the shift of means 1.000 (random: 0.000)
    efficiency of the way 1.000, points that are where the optimal plan sends them 1.000
    """
    check_choice(Metrics, metrics=metrics)
    check_number(least=1, p=p)
    steps, y = _snapshots(trajectory, y)
    if metrics == "thesis" and (p != 2 or not per_class):
        raise InvalidArgument(f"metrics='thesis' is of p = 2 and classes apart; got p={p:g}, per_class={per_class}")
    X, TX = steps[0], steps[-1]
    classes = labels(y if per_class else None, len(X))
    ot, plans, exact = _matched(X, TX, p, classes, options)
    sigma = _sigma(plans, classes)
    lengths = sum((np.sqrt(moves(one, two, 2)) for one, two in pairwise(steps)), np.zeros(len(X)))
    whole = np.sqrt(moves(X, TX, 2))
    common: dict[str, Any] = {
        "metrics": metrics,
        "points": len(X),
        "steps": len(steps) - 1,
        "p": float(p),
        "is_exact": exact,
    }
    if metrics == "thesis":
        direct = float(sum(np.sqrt(np.square(whole[at]).sum()) for at in classes))
        ot = float(sum(np.sqrt(plan.cost * len(at)) for plan, at in zip(plans, classes, strict=True)))
        return TransportMetrics(
            direct=direct, ot=ot, monge_gap=_gap(direct, ot, exact), optimality=_ratio(ot, direct), efficiency=_ratio(direct, lengths.sum()),
            matching=float(np.mean(sigma == np.arange(len(X)))), path=float(lengths.sum()), centred_optimality=None,
            efficiency_quantiles=None, baseline=None, centred_baseline=None, **common,
        )  # fmt: skip
    direct = float(moves(X, TX, p).mean())
    scale = np.sqrt(np.square(TX - TX.mean(0)).sum(1).mean())
    single = np.divide(whole, lengths, out=np.ones_like(whole), where=lengths > 0)
    centre = _centred(X, TX, plans, classes) if centred and p == 2 else (None, None)
    return TransportMetrics(
        direct=direct, ot=ot, monge_gap=_gap(direct, ot, exact), optimality=_ratio(ot, direct) ** (1 / p), centred_optimality=centre[0],
        efficiency=_ratio(whole.sum(), lengths.sum()), efficiency_quantiles=tuple(map(float, np.quantile(single, QUANTILES))),
        matching=float(np.mean(np.sqrt(moves(TX, TX[sigma], 2)) <= SAME * scale)), path=float(lengths.mean()),
        baseline=_ratio(ot, _random(X, TX, p, classes)) ** (1 / p), centred_baseline=centre[1], **common,
    )  # fmt: skip


def _same(X: Any, TX: Any, p: float) -> tuple[Array, Array]:
    first, second = pair(X, TX, p, ("X", "TX"))
    if first.shape != second.shape:
        raise InvalidArgument(f"X and TX must be the same points; got shapes {first.shape} and {second.shape}")
    return first, second


def _snapshots(trajectory: Any, y: Any) -> tuple[Array, Any]:
    """`(S + 1, N, r)` with the tokens of a set as points, and a label for each."""
    if isinstance(trajectory, list | tuple):
        shapes = {tuple(np.shape(one)) for one in trajectory}
        if len(shapes) > 1:
            raise InvalidArgument(
                f"snapshots of a trajectory must have one shape; got {', '.join(map(str, sorted(shapes)))}. Where the width changes, start at "
                "the first snapshot of the final width"
            )
        trajectory = np.stack([array(one, "trajectory", (2, 3)) for one in trajectory]) if trajectory else trajectory
    steps = array(trajectory, "trajectory", (3, 4))
    if len(steps) < 2:
        raise InvalidArgument("trajectory must have two snapshots or more, the first and the last; got one")
    if steps.ndim == 3:
        return steps, y
    tokens = steps.shape[2]
    if y is not None:
        # Checked here: repeated labels of a wrong number would be told as a number of tokens.
        labels(y, steps.shape[1])
        y = np.repeat(np.asarray(y.detach().cpu() if hasattr(y, "detach") else y), tokens)
    return steps.reshape(len(steps), -1, steps.shape[-1]), y


def _matched(
    X: Array, TX: Array, p: float, classes: list[Any], options: dict[str, Any]
) -> tuple[float, list[Plan], bool]:
    plans = [assignment(X[at], TX[at], p, **options) for at in classes]
    shares = [len(at) / len(X) for at in classes]
    ot = float(sum(share * plan.cost for share, plan in zip(shares, plans, strict=True)))
    return ot, plans, all(plan.is_exact for plan in plans)


def _sigma(plans: list[Plan], classes: list[Any]) -> Any:
    """Where each point goes, among all; of a split mass where most of it goes."""
    sigma = np.empty(sum(map(len, classes)), dtype=np.intp)
    for plan, at in zip(plans, classes, strict=True):
        sigma[at] = at[plan.index if plan.matrix is None else plan.matrix.argmax(1)]
    return sigma


def _gap(direct: float, ot: float, exact: bool) -> float:
    if not exact and direct < ot:
        warnings.warn(
            f"the entropic plan costs {ot:.6g}, more than the movement itself, {direct:.6g}: the gap is set to 0. A larger max_exact solves exactly",
            stacklevel=3,
        )
    return max(direct - ot, 0.0)


def _ratio(part: float, whole: float, nothing: float = 0.0) -> float:
    """Part of the whole, 1 where the whole is nothing; what rounding puts above 1 is 1."""
    return float(min(part / whole, 1.0)) if whole > nothing else 1.0


def _random(X: Array, TX: Array, p: float, classes: list[Any]) -> float:
    """The mean cost of a random pairing in class."""
    if p != 2:
        return float(sum(costs(X[at], TX[at], p).mean() * len(at) for at in classes) / len(X))
    means = (
        np.square(X[at].mean(0) - TX[at].mean(0)).sum() + X[at].var(0).sum() + TX[at].var(0).sum() for at in classes
    )
    return float(sum(mean * len(at) for mean, at in zip(means, classes, strict=True)) / len(X))


def _centred(X: Array, TX: Array, plans: list[Plan], classes: list[Any]) -> tuple[float, float]:
    """Optimality, and that of a random pairing, about the means of classes: the same plan is optimal there (p = 2)."""
    direct = ot = 0.0
    first, second = X.copy(), TX.copy()
    for plan, at in zip(plans, classes, strict=True):
        shift = TX[at].mean(0) - X[at].mean(0)
        first[at], second[at] = X[at] - X[at].mean(0), TX[at] - TX[at].mean(0)
        direct += moves(first[at], second[at], 2).sum()
        split = max(plan.cost - np.square(shift).sum(), 0.0) * len(at)
        ot += split if plan.index is None else moves(first[at], second[at][plan.index], 2).sum()
    random = _random(first, second, 2, classes) * len(X)
    # Where classes moved as one, what is left is rounding of the means.
    nothing = len(X) * (1e-14 * max(np.abs(X).max(), np.abs(TX).max())) ** 2
    return _ratio(ot, direct, nothing) ** 0.5, _ratio(ot, random, nothing) ** 0.5

"""The cheapest way to carry one cloud of points onto another."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument, MissingExtra, Unsupported
from heedful._result import Result
from heedful.transport._clouds import Array, array, costs, masses, moves, pair, typical
from heedful.transport._entropic import entropic
from heedful.transport._warm import improved

Method = Literal["auto", "exact", "plan", "sinkhorn"]

# The entropic plan is good enough where it is proven to cost so much more than the least at most.
GOAL = 0.01
# The least cost that counts, as a share of the largest.
SMALL = 1e-12
# From so many points on POT's simplex finds plans one to one: scipy's search is up to twice as fast on clouds of one law, and many times slower on
# clouds that were moved or stretched, for which most points want the same few partners.
MANY = 500
# Costs of many small problems that are held at once.
CELLS = 2**20


@dataclass(frozen=True)
class Plan(Result):
    r"""How the mass of one cloud goes to another: `assignment` returns it.

    Attributes:
        cost: $\langle P, C \rangle$ for a total mass of 1; $W_p = \mathrm{cost}^{1/p}$.
        index: `(N,)`, point i goes to point `index[i]`; None where mass is split.
        matrix: P, `(N, M)`; None where `index` says it all.
        potentials: (u, v) with $u_i + v_j \le C_{ij}$, equal where mass goes; about equal of an entropic plan. None where the solver does not
            give them: of a first `"exact"` plan of few points and of a sorted line.
        is_exact: whether the cost is the least; that of an entropic plan is an upper bound.
        method: how it was found: `"exact"`, `"line"` (points with one number, sorted), `"plan"` or `"sinkhorn"`.
        gap: of an entropic plan $1 - (a^T u + b^T v) / \mathrm{cost}$: the least cost lies between (1 - gap) x cost and cost, by duality. Else None.
    """

    cost: float
    index: NDArray[np.intp] | None = None
    matrix: Array | None = None
    potentials: tuple[Array, Array] | None = None
    is_exact: bool = True
    method: str = "exact"
    gap: float | None = None
    _not: ClassVar[tuple[str, ...]] = ("matrix", "potentials")

    def map(self, Y: Any) -> Array:
        r"""Where each point goes, `(N, r)`: $T(x_i) = \sum_j P_{ij} y_j / a_i$, the mean of the places that its mass goes to.

        A point without mass goes nowhere: its row is NaN.
        """
        Y = array(Y, "Y")
        target: Any = self.index if self.matrix is None else self.matrix.T
        if len(Y) != len(target):
            raise InvalidArgument(f"this plan leads to {len(target)} points; got Y of shape {Y.shape}")
        if self.matrix is None:
            return Y[self.index]
        total = self.matrix.sum(1, keepdims=True)
        return np.divide(self.matrix @ Y, total, out=np.full((len(total), Y.shape[1]), np.nan), where=total > 0)

    def __str__(self) -> str:
        shape = f"{len(self.index)} points one to one" if self.index is not None else "mass is split"
        bound = "exact" if self.gap is None else f"an upper bound, the least is at most {100 * self.gap:.2g} % less"
        return f"cost {self.cost:.6g} ({bound}, {self.method}), {shape}"


def assignment(
    X: Any,
    Y: Any,
    p: float = 2,
    *,
    method: Method = "auto",
    a: Any = None,
    b: Any = None,
    max_exact: int = 5000,
    start: Plan | None = None,
) -> Plan:
    r"""The cheapest plan from the points X `(N, r)` to the points Y `(M, r)`.

    $$\mathrm{OT}_p(X, Y) = \min_{P \ge 0,\ P 1 = a,\ P^T 1 = b} \langle P, C \rangle, \qquad C_{ij} = |x_i - y_j|^p.$$

    With N = M points of equal weight an optimal P is a permutation divided by N: `scipy.optimize.linear_sum_assignment` finds it, in
    at most O(N^3), or, for 500 points and more where POT is installed, `ot.emd`; points with one number each are sorted. Otherwise the plan
    is that of `ot.emd`.

    Args:
        p: exponent of the Euclidean distance, from 1 on.
        method: `"exact"` (one to one), `"plan"` (any numbers and weights), `"sinkhorn"`, or `"auto"`: the first that serves these clouds;
            above `max_exact` points the entropic one, with a warning.
        a, b: weights of the points of X and Y, divided by their sums; equal by default.
        max_exact: number of points in the larger cloud up to which `"auto"` solves exactly.
        start: an earlier plan one to one between clouds that lay near these, as a training step before; X should be the same, Y may have
            moved. The search starts at its potentials (`_warm.py`); the result is as exact as without, at a tenth of the time or less where
            points moved little. A plan without potentials gives a plan that has them.

    `"sinkhorn"` is POT's, stabilised; its plan is rounded to the exact weights (Altschuler, Weed & Rigollet 2017, algorithm 2; what rows and
    columns lack is paired in order along one direction instead of at random), so that its cost $\langle P, C \rangle$ is an upper bound
    of the least one. Its potentials, lowered until $u_i + v_j \le C_{ij}$, give a lower bound $a^T u + b^T v$. The strength of the
    entropy starts at 0.1 x the mean cost and is halved until both bounds are within 1 %, or 2,000 iterations are spent (on a CPU fewer of
    more than 3,500 points: 1,000 of 5,000, 250 of 10,000). `gap` of the plan says how near they came; it is large where the least cost is a
    small part of the mean cost, as of clouds that lie close, and iterations end first. The entropic objective, which may lie on either side, is never reported.
    It runs on the device of X, if that is a tensor: it is meant for a GPU, on a CPU `"exact"` is faster up to some thousands of points.

    >>> plan = assignment([[0.0, 0.0], [1.0, 0.0]], [[1.0, 1.0], [0.0, 1.0]])
    >>> plan.index.tolist(), plan.cost
    ([1, 0], 1.0)
    >>> assignment([[0.0], [1.0], [2.0]], [[0.0], [2.0]], p=1).map([[0.0], [2.0]]).round(9).tolist()
    [[0.0], [1.0], [2.0]]
    """
    check_choice(Method, method=method)
    check_whole(max_exact=max_exact)
    device = X.device if isinstance(X, torch.Tensor) else torch.device("cpu")
    X, Y = pair(X, Y, p)
    a, b = masses(a, len(X), "a"), masses(b, len(Y), "b")
    single = len(X) == len(Y) and a is None and b is None
    line = single and X.shape[1] == 1
    if method == "exact" and not single:
        raise Unsupported(
            f"method='exact' pairs equal numbers of points of equal weight; got {len(X)} and {len(Y)} points"
            f"{'' if a is None and b is None else ' with weights'}. Take 'plan' or 'auto'"
        )
    large = False
    if method == "auto":
        method = "exact" if single else "plan"
        large = max(len(X), len(Y)) > max_exact and not line
        method = "sinkhorn" if large else method
    if start is not None and method != "exact":
        raise Unsupported(f"start serves method='exact' alone; these clouds need {method!r}")
    if method == "exact":
        return _line(X, Y, p) if line else _exact(X, Y, p, start)
    a, b = (np.full(len(part), 1 / len(part)) if mass is None else mass for part, mass in ((X, a), (Y, b)))
    if method == "plan":
        return _plan(X, Y, p, a, b)
    plan = _entropic(X, Y, p, a, b, device)
    if large:
        warnings.warn(f"more than max_exact={max_exact} points: the plan is entropic, {plan}", stacklevel=2)
    return plan


def wasserstein(X: Any, Y: Any, p: float = 2, **options: Any) -> float:
    r"""$W_p(X, Y) = \mathrm{OT}_p(X, Y)^{1/p}$ for a total mass of 1; options are those of `assignment`.

    >>> wasserstein([[0.0, 0.0], [3.0, 4.0]], [[3.0, 4.0], [6.0, 8.0]], p=1)
    5.0
    """
    return float(assignment(X, Y, p, **options).cost ** (1 / p))


def assignments(X: Any, Y: Any, p: float = 2) -> list[Plan]:
    r"""The cheapest plans of many small problems, from X `(B, N, r)` to Y `(B, N, r)`: the costs of all by one product of matrices.

    >>> import numpy as np
    >>> X = np.array([[[0.0, 0.0], [1.0, 0.0]], [[0.0, 0.0], [5.0, 0.0]]])
    >>> [plan.index.tolist() for plan in assignments(X, X[::-1, ::-1])]
    [[1, 0], [1, 0]]
    """
    check_number(least=1, p=p)
    X, Y = array(X, "X", 3), array(Y, "Y", 3)
    if X.shape != Y.shape:
        raise InvalidArgument(f"X and Y must have one shape (batch, points, width); got {X.shape} and {Y.shape}")
    solve, plans = _solver(), []
    # As many costs at once as lie near the processor.
    step = max(1, CELLS // X.shape[1] ** 2)
    for begin in range(0, len(X), step):
        parts = slice(begin, begin + step)
        plans += [
            Plan(float(moves(x, y[index], p).mean()), index)
            for x, y, cost in zip(X[parts], Y[parts], costs(X[parts], Y[parts], p), strict=True)
            for index in [solve(cost)[1]]
        ]
    return plans


def _line(X: Array, Y: Array, p: float) -> Plan:
    index = np.empty(len(X), dtype=np.intp)
    index[np.argsort(X[:, 0], kind="stable")] = np.argsort(Y[:, 0], kind="stable")
    return Plan(float(moves(X, Y[index], p).mean()), index, method="line")


def _exact(X: Array, Y: Array, p: float, start: Plan | None) -> Plan:
    if start is not None and (start.index is None or len(start.index) != len(X)):
        raise InvalidArgument(f"start must be a plan of {len(X)} points one to one; got one with {start}")
    if start is None and (len(X) < MANY or find_spec("ot") is None):
        index, potentials = _solver()(costs(X, Y, p))[1], None
    elif start is None or start.potentials is None:
        mass = np.full(len(X), 1 / len(X))
        plan = _plan(X, Y, p, mass, mass)
        assert plan.matrix is not None
        index, potentials = plan.matrix.argmax(1), plan.potentials
    else:
        assert start.index is not None
        u, v = start.potentials[0], np.empty(len(X))
        # To first order the points that moved, those of Y, change their potential by what their own pair costs more.
        v[start.index] = moves(X, Y[start.index], p) - u
        index, du, dv = improved(_pot(), costs(X, Y, p, u, v), start.index, typical(X, Y, p))
        potentials = u + du, v + dv
    return Plan(float(moves(X, Y[index], p).mean()), index, potentials=potentials)


def _solver() -> Any:
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise MissingExtra("scipy", "transport") from None
    return linear_sum_assignment


def _pot() -> Any:
    try:
        import ot
    except ImportError:
        raise MissingExtra("POT", "transport") from None
    return ot


def _plan(X: Array, Y: Array, p: float, a: Array, b: Array) -> Plan:
    cost = costs(X, Y, p)
    # POT lets go of differences below an absolute bound; large numbers do it no harm.
    unit = max(float(cost.min(1).mean()), SMALL * float(cost.max())) or 1.0
    # The simplex steps grow with the points; the usual bound of POT, 100,000, stops clouds of some thousands.
    matrix, log = _pot().emd(a, b, cost / unit, numItermax=max(100_000, 100 * cost.size), log=True)
    if log["warning"] is not None:
        raise Unsupported(f"POT found no optimal plan: {log['warning']}; take method='sinkhorn'")
    return Plan(float((matrix * cost).sum()), None, matrix, (unit * log["u"], unit * log["v"]), method="plan")


def _entropic(X: Array, Y: Array, p: float, a: Array, b: Array, device: torch.device) -> Plan:
    matrix, potentials, cost, gap = entropic(_pot(), X, Y, costs(X, Y, p), a, b, device, GOAL)
    return Plan(cost, None, matrix, potentials, False, "sinkhorn", gap)

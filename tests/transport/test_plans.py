"""Plans between clouds of points: brute force over permutations, POT's own figures, the entropic bound, warm starts."""

import itertools
import time

import numpy as np
import pytest
import torch

pytest.importorskip("ot", reason="the extra 'transport' is not installed")
import ot
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from heedful import InvalidArgument, MissingExtra, Unsupported
from heedful.transport import Plan, _entropic, assignment, assignments, gaussian_w2, plans, wasserstein


def clouds(points=7, others=None, width=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(points, width)), rng.normal(size=(others or points, width)) + 0.5


def cheapest(X, Y, p):
    """Over all permutations, pair by pair."""
    return min(
        sum(np.linalg.norm(x - Y[to]) ** p for x, to in zip(X, order, strict=True)) / len(X)
        for order in itertools.permutations(range(len(Y)))
    )


@pytest.mark.parametrize("p", [1, 1.5, 2, 3])
@pytest.mark.parametrize("points", [1, 2, 5, 7])
def test_the_cost_is_that_of_the_best_permutation(points, p):
    for width in (1, 3):
        X, Y = clouds(points, width=width)
        plan = assignment(X, Y, p)
        assert plan.cost == pytest.approx(cheapest(X, Y, p), rel=1e-12, abs=1e-12)
        assert sorted(plan.index) == list(range(points))
        np.testing.assert_array_equal(plan.map(Y), Y[plan.index])
        assert plan.is_exact
        assert plan.method == ("line" if width == 1 else "exact")
        assert wasserstein(X, Y, p) == pytest.approx(plan.cost ** (1 / p))


@pytest.mark.parametrize("p", [1, 2])
def test_it_costs_what_pot_says(p):
    for width in (1, 5):
        X, Y = clouds(30, width=width)
        C = np.linalg.norm(X[:, None] - Y[None], axis=-1) ** p
        assert assignment(X, Y, p).cost == pytest.approx(ot.emd2([], [], C), abs=1e-9)
        assert assignment(X, Y, p, method="plan").cost == pytest.approx(ot.emd2([], [], C), abs=1e-9)
    X, Y = clouds(3, 5)
    a, b = np.array([0.5, 0.2, 0.3]), np.array([0.1, 0.1, 0.3, 0.3, 0.2])
    C = np.linalg.norm(X[:, None] - Y[None], axis=-1) ** p
    plan = assignment(X, Y, p, a=a, b=b)
    assert plan.cost == pytest.approx(ot.emd2(a, b, C), abs=1e-9)
    np.testing.assert_allclose(plan.matrix.sum(1), a, atol=1e-12)
    np.testing.assert_allclose(plan.matrix.sum(0), b, atol=1e-12)
    np.testing.assert_allclose(plan.map(Y), ot.emd(a, b, C) @ Y / a[:, None], atol=1e-9)
    u, v = plan.potentials
    assert (u[:, None] + v - C).max() < 1e-9
    assert u @ a + v @ b == pytest.approx(plan.cost, abs=1e-9)


def test_weights_are_divided_by_their_sum_and_equal_ones_are_none():
    X, Y = clouds(5)
    assert assignment(X, Y, a=np.full(5, 3.0), b=np.full(5, 0.1)).method == "exact"
    a = np.array([2.0, 1, 1, 0, 4])
    assert assignment(X, Y, a=a).cost == pytest.approx(assignment(X, Y, a=a / 8).cost, abs=1e-12)
    assert np.isnan(assignment(X, Y, a=a).map(Y)[3]).all()
    assert np.isfinite(assignment(X, Y, a=a).map(Y)[[0, 1, 2, 4]]).all()


def test_tensors_and_lists_are_read_and_the_graph_is_left():
    X, Y = clouds(5)
    wanted = assignment(X, Y).cost
    assert assignment(torch.tensor(X, requires_grad=True), Y.tolist()).cost == pytest.approx(wanted)


def test_far_clouds_lose_no_digits():
    X, Y = clouds(7)
    assert assignment(X + 1e6, Y + 1e6).cost == pytest.approx(cheapest(X, Y, 2), rel=1e-9)


@pytest.mark.parametrize(("p", "count"), [(1, 97), (2, 500)])
def test_the_entropic_plan_is_a_plan_and_an_upper_bound(p, count):
    rng = np.random.default_rng(1)
    X, Y = rng.normal(size=(count, 2)), rng.normal(size=(count, 2)) * 0.5 + 1
    exact, entropic = assignment(X, Y, p), assignment(X, Y, p, method="sinkhorn")
    assert exact.cost <= entropic.cost <= 1.02 * exact.cost
    assert not entropic.is_exact
    np.testing.assert_allclose(entropic.matrix.sum(1), 1 / count, rtol=1e-12)
    np.testing.assert_allclose(entropic.matrix.sum(0), 1 / count, rtol=1e-12)
    assert entropic.matrix.min() >= 0
    assert "an upper bound" in str(entropic)


def near_and_far(kind, count):
    rng = np.random.default_rng(2)
    X, noise = rng.normal(size=(2, count, 3))
    if kind == "close":
        return X, X + 0.1 * noise
    if kind == "same":
        return X, X[::-1].copy()
    apart = 50.0 * (np.arange(count) % 2)[:, None]
    return X + apart, noise + apart


@pytest.mark.parametrize(("kind", "count"), [("close", 401), ("clusters", 201), ("same", 97)])
def test_the_gap_of_an_entropic_plan_is_proven(kind, count):
    """Where the least cost is a small part of the mean cost as well: an entropy of 0.01 x the mean cost gave 2, 16 and 1e16 times the least."""
    X, Y = near_and_far(kind, count)
    exact, entropic = assignment(X, Y), assignment(X, Y, method="sinkhorn")
    C = np.square(X[:, None] - Y).sum(-1)
    u, v = entropic.potentials
    assert (u[:, None] + v - C).max() < 1e-12 * C.mean()
    low = (1 - entropic.gap) * entropic.cost
    assert low == pytest.approx(u.mean() + v.mean(), abs=1e-12 * C.mean())
    assert low - 1e-12 * C.mean() <= exact.cost <= entropic.cost + 1e-12 * C.mean()
    assert entropic.gap <= 0.01
    assert f"the least is at most {100 * entropic.gap:.2g} % less" in str(entropic)
    assert exact.gap is None


def test_few_iterations_leave_a_larger_gap_that_is_as_true(monkeypatch):
    X, Y = near_and_far("close", 201)
    monkeypatch.setattr(_entropic, "ITERATIONS", 2 * _entropic.CHUNK)
    plan = assignment(X, Y, method="sinkhorn")
    least = assignment(X, Y).cost
    assert plan.gap > 0.1
    assert (1 - plan.gap) * plan.cost <= least <= plan.cost


def test_the_entropic_plan_has_weights_of_its_own():
    X, Y = clouds(5, 11)
    a = np.array([0.5, 0.1, 0.0, 0.2, 0.2])
    plan = assignment(X, Y, a=a, method="sinkhorn")
    np.testing.assert_allclose(plan.matrix.sum(1), a, atol=1e-12)
    np.testing.assert_allclose(plan.matrix.sum(0), 1 / 11, atol=1e-12)
    least = assignment(X, Y, a=a).cost
    assert (1 - plan.gap) * plan.cost <= least <= plan.cost
    u, v = plan.potentials
    assert (u[:, None] + v - np.square(X[:, None] - Y).sum(-1)).max() < 1e-12, "of the point without weight too"


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e-4, 1.0, 1e8])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_no_scale_is_too_small_or_too_large(p, scale):
    """POT lets go of cost differences below an absolute bound."""
    X, Y = scale * np.random.default_rng(0).normal(size=(2, 101, 3))
    exact = assignment(X, Y, p).cost
    first = assignment(X, X, p)
    C = np.linalg.norm(X[:, None] - Y, axis=-1) ** p
    for plan in (
        assignment(X, Y, p, method="plan"),
        assignment(X, Y, p, start=first),
        assignment(X, Y, p, start=assignment(X, X, p, start=first)),
    ):
        assert plan.cost == pytest.approx(exact, rel=1e-12, abs=0)
        u, v = plan.potentials
        assert (u[:, None] + v - C).max() < 1e-10 * C.mean()
        assert u.mean() + v.mean() == pytest.approx(exact, rel=1e-9, abs=0)
    entropic = assignment(X, Y, p, method="sinkhorn")
    assert exact * (1 - 1e-12) <= entropic.cost <= exact * 1.011


def test_auto_says_what_it_takes():
    X, Y = clouds(11)
    with pytest.warns(UserWarning, match="more than max_exact=10 points: the plan is entropic"):
        assert assignment(X, Y, max_exact=10).method == "sinkhorn"
    assert assignment(X[:, :1], Y[:, :1], max_exact=10).method == "line"
    assert assignment(X, Y[:7]).method == "plan"
    assert assignment(X, Y, max_exact=10, method="exact").is_exact


def test_what_cannot_be_is_refused():
    X, Y = clouds(5)
    for wrong, message in (
        ({"p": 0.5}, "p must be a number from 1 on"),
        ({"method": "auction"}, "method must be one of auto, exact, plan, sinkhorn"),
        ({"max_exact": 0}, "max_exact must be a whole number"),
        ({"a": [1.0, 2.0]}, r"a must have a number from 0 on for each of the 5 points"),
        ({"b": [1.0, -2.0, 0, 0, 0]}, "b must have a number from 0 on"),
        ({"start": assignment(X[:3], Y[:3])}, "start must be a plan of 5 points"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            assignment(X, Y, **wrong)
    with pytest.raises(InvalidArgument, match="X has points of 3 numbers and Y of 2"):
        assignment(X, Y[:, :2])
    with pytest.raises(InvalidArgument, match="X holds NaN"):
        assignment(np.where(X > 1, np.nan, X), Y)
    with pytest.raises(InvalidArgument, match=r"Y must have 2 axes, none of them empty; got shape \(0, 3\)"):
        assignment(X, Y[:0])
    with pytest.raises(InvalidArgument, match="Y cannot be read as numbers"):
        assignment(X, [["a", "b", "c"]])
    with pytest.raises(Unsupported, match="method='exact' pairs equal numbers of points"):
        assignment(X, Y[:3], method="exact")
    with pytest.raises(Unsupported, match="start serves method='exact' alone"):
        assignment(X, Y[:3], start=Plan(1.0, np.arange(5)))
    with pytest.raises(InvalidArgument, match="this plan leads to 5 points"):
        assignment(X, Y).map(Y[:3])
    with pytest.raises(InvalidArgument, match=r"X and Y must have one shape"):
        assignments(X[None], Y[None, :3])


def test_missing_packages_are_named(monkeypatch):
    X, Y = clouds(5)
    monkeypatch.setitem(__import__("sys").modules, "ot", None)
    with pytest.raises(MissingExtra, match=r"POT is not installed; it comes with the extra 'transport'"):
        assignment(X, Y, method="plan")
    monkeypatch.setitem(__import__("sys").modules, "scipy.optimize", None)
    with pytest.raises(MissingExtra, match="scipy is not installed"):
        assignment(X, Y)


def test_many_small_problems_are_solved_as_one_by_one(monkeypatch):
    rng = np.random.default_rng(2)
    X, Y = rng.normal(size=(2, 23, 7, 3))
    monkeypatch.setattr(plans, "CELLS", 5 * 49)
    for p in (1, 2):
        together = assignments(X, Y, p)
        assert len(together) == 23
        for plan, x, y in zip(together, X, Y, strict=True):
            alone = assignment(x, y, p)
            assert plan.cost == pytest.approx(alone.cost, rel=1e-12)
            np.testing.assert_array_equal(plan.index, alone.index)


def flow(points, width, steps, seed=0, speed=1.0, noise=0.002):
    """A trained network's movement: a smooth field that changes slowly, and small noise."""
    rng = np.random.default_rng(seed)
    places, waves, phase = [rng.normal(size=(points, width))], rng.normal(size=(2, width, 16)), rng.uniform(0, 6, 16)
    turns = rng.normal(size=(2, 16, width)) / 4
    for step in range(steps):
        late = step / steps
        fields = [np.cos(places[-1] @ wave + phase) @ turn for wave, turn in zip(waves, turns, strict=True)]
        move = (1 - late) * fields[0] + late * fields[1]
        places.append(places[-1] + 2 * speed / steps * move + noise * rng.normal(size=(points, width)))
    return np.stack(places)


@pytest.mark.parametrize("p", [1, 2, 2.5])
@pytest.mark.parametrize(
    ("points", "width", "speed", "noise"),
    [(101, 2, 1.0, 0.0), (67, 5, 3.0, 0.1), (31, 2, 30.0, 1.0), (53, 3, 0.0, 0.0)],
)
def test_a_warm_start_is_exact(points, width, speed, noise, p):
    """Also after jumps, where nothing of the earlier plan holds, and where nothing moves."""
    places = flow(points, width, 12, speed=speed, noise=noise)
    plan = None
    for place in places[1:]:
        plan = assignment(places[0], place, p, start=plan)
        assert plan.cost == pytest.approx(assignment(places[0], place, p).cost, rel=1e-12, abs=1e-12)
    u, v = plan.potentials
    C = np.linalg.norm(places[0][:, None] - places[-1], axis=-1) ** p
    assert (u[:, None] + v - C).max() < 1e-9 * C.mean()
    assert u.mean() + v.mean() == pytest.approx(plan.cost, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("count", [plans.MANY - 1, plans.MANY])
def test_both_solvers_of_one_to_one_plans_agree(count):
    """Clouds that were stretched and moved, from few points to as many as the other solver takes."""
    rng = np.random.default_rng(count)
    X = rng.normal(size=(count, 3))
    Y = 3 * X[rng.permutation(count)] + 5 + 0.1 * rng.normal(size=X.shape)
    plan, cost = assignment(X, Y), cdist(X, Y, "sqeuclidean")
    assert sorted(plan.index) == list(range(count))
    assert plan.cost == pytest.approx(cost[linear_sum_assignment(cost)].mean(), rel=1e-12)
    assert (plan.potentials is not None) == (count == plans.MANY)


def test_a_warm_start_serves_equal_points():
    """Ties: rows that are there twice, and a cloud on a grid."""
    rng = np.random.default_rng(3)
    X = rng.integers(0, 4, size=(60, 2)).astype(float)
    plan = assignment(X, X)
    for _ in range(8):
        Y = X + rng.integers(-1, 2, size=X.shape)
        plan = assignment(X, Y, start=plan)
        assert plan.cost == pytest.approx(assignment(X, Y).cost, abs=1e-12)


def test_tracking_costs_a_tenth_of_cold_solves():
    """A thousand points on a plane beside scipy's search; of a hundred cold solves every twentieth is timed, of two rounds the faster one counts."""
    places = flow(1000, 2, 100)
    ratios = []
    for _ in range(2):
        cold, warm, plan, costs = 0.0, 0.0, None, {}
        for step in range(20, 101, 20):
            began = time.thread_time()
            cost = cdist(places[0], places[step], "sqeuclidean")
            costs[step] = cost[linear_sum_assignment(cost)].mean()
            cold += 20 * (time.thread_time() - began)
        for step in range(1, 101):
            began = time.thread_time()
            plan = assignment(places[0], places[step], start=plan)
            warm += time.thread_time() - began
            if step in costs:
                assert plan.cost == pytest.approx(costs[step], abs=1e-9)
        ratios.append(warm / cold)
        if ratios[-1] < 0.1:
            break
    print(f"100 snapshots of 1,000 points: {min(ratios):.3f} of cold solves")
    assert min(ratios) < 0.1


def bures(m1, S1, m2, S2):
    from scipy.linalg import sqrtm

    root = sqrtm(S2)
    squared = np.square(m1 - m2).sum() + np.trace(S1 + S2 - 2 * np.real(sqrtm(root @ S1 @ root)))
    return np.sqrt(squared)


@pytest.mark.parametrize("size", [1, 2, 5, 11])
def test_gaussians(size):
    rng = np.random.default_rng(size)
    (m1, m2), factors = rng.normal(size=(2, size)), rng.normal(size=(2, size, size + 2))
    S1, S2 = (factor @ factor.T for factor in factors)
    assert gaussian_w2(m1, S1, m2, S2) == pytest.approx(bures(m1, S1, m2, S2), abs=1e-8)
    assert gaussian_w2(m1, S1, m2, S2) == pytest.approx(gaussian_w2(m2, S2, m1, S1), rel=1e-12)
    assert gaussian_w2(m1, S1, m2, S1) == pytest.approx(np.linalg.norm(m1 - m2), rel=1e-12)
    assert gaussian_w2(m1, S1, m1, S1) < 1e-13 * np.trace(S1)
    s1, s2 = rng.uniform(0, 2, size=(2, size))
    wanted = np.sqrt(np.square(m1 - m2).sum() + np.square(s1 - s2).sum())
    assert gaussian_w2(m1, np.diag(s1**2), m2, np.diag(s2**2)) == pytest.approx(wanted, abs=1e-8)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_equal_flat_gaussians_are_at_no_distance(rank, scale):
    factor = np.random.default_rng(rank).normal(size=(5, rank))
    S = scale * factor @ factor.T
    S = (S + S.T) / 2
    assert gaussian_w2(np.zeros(5), S, np.zeros(5), S) <= 1e-14 * np.sqrt(np.trace(S))
    assert gaussian_w2(np.zeros(5), S, np.zeros(5), 4 * S) == pytest.approx(np.sqrt(np.trace(S)), rel=1e-12)


def test_gaussians_may_be_flat_and_must_be_covariances():
    line, point = np.diag([1.0, 0.0]), np.zeros((2, 2))
    assert gaussian_w2([0, 0], line, [0, 0], point) == pytest.approx(1.0)
    for wrong, message in (
        ([[1.0, 2.0], [0.5, 1.0]], r"S2\[0, 1\] = 2 and S2\[1, 0\] = 0.5 differ by 1.5"),
        ([[1.0, 2.0], [2.0, 1.0]], "S2 has the negative eigenvalue -1"),
        ([[1.0]], r"S2 must be a symmetric matrix of shape \(2, 2\)"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            gaussian_w2([0, 0], line, [0, 0], wrong)
    with pytest.raises(InvalidArgument, match="m1 has 2 numbers and m2 3"):
        gaussian_w2([0, 0], line, [0, 0, 0], line)

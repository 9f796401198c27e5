"""How points moved: hand values, the identities that the definitions imply, and the figures as the thesis has them."""

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("ot", reason="the extra 'transport' is not installed")

from heedful import InvalidArgument
from heedful.transport import assignment, monge_gap, monge_gap_loss, straightness_loss, transport_metrics

SHARES = ("optimality", "centred_optimality", "efficiency", "matching", "baseline", "centred_baseline")


def trajectories(count, steps=4, points=11, width=3):
    """Random walks with a drift, each with labels."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        start = rng.normal(size=(points, width))
        moves = rng.normal(size=(steps, points, width)) * rng.uniform(0.05, 1.5) + rng.normal(size=width)
        yield np.concatenate((start[None], start + moves.cumsum(0))), rng.integers(0, 3, size=points)


def least(X, Y, p):
    """The mean cost of the best permutation, by trying all."""
    C = np.array([[np.linalg.norm(x - y) ** p for y in Y] for x in X])
    return min(C[range(len(X)), list(order)].mean() for order in itertools.permutations(range(len(X))))


@pytest.mark.parametrize("p", [1, 2, 3])
def test_figures_by_hand(p):
    """Every figure written out, for two classes of four and three points."""
    rng = np.random.default_rng(0)
    steps, y = rng.normal(size=(5, 7, 2)), np.array(list("abababa"))
    found = transport_metrics(steps, y, p)
    classes = [[at for at in range(7) if y[at] == name] for name in "ab"]
    length = [np.linalg.norm(steps[-1, at] - steps[0, at]) for at in range(7)]
    ways = [sum(np.linalg.norm(steps[s + 1, at] - steps[s, at]) for s in range(4)) for at in range(7)]
    direct = sum(one**p for one in length) / 7
    ot = sum(len(at) / 7 * least(steps[0, at], steps[-1, at], p) for at in classes)
    random = sum(
        np.linalg.norm(steps[0, one] - steps[-1, two]) ** p / len(at) / 7 for at in classes for one in at for two in at
    )
    assert found.direct == pytest.approx(direct)
    assert found.ot == pytest.approx(ot)
    assert found.monge_gap == pytest.approx(direct - ot)
    assert found.optimality == pytest.approx((ot / direct) ** (1 / p))
    assert found.efficiency == pytest.approx(sum(length) / sum(ways))
    assert found.path == pytest.approx(sum(ways) / 7)
    assert found.baseline == pytest.approx((ot / random) ** (1 / p))
    singles = [one / way for one, way in zip(length, ways, strict=True)]
    np.testing.assert_allclose(found.efficiency_quantiles, np.quantile(singles, [0.05, 0.25, 0.5, 0.75, 0.95]))
    assert monge_gap(steps[0], steps[-1], p, y) == pytest.approx(found.monge_gap)
    assert (found.points, found.steps, found.is_exact) == (7, 4, True)
    if p != 2:
        assert found.centred_optimality is None
        assert found.centred_baseline is None
        return
    ends = [steps[at].copy() for at in (0, -1)]
    for at in classes:
        for end in ends:
            end[at] -= end[at].mean(0)
    direct = np.square(ends[0] - ends[1]).sum() / 7
    ot = sum(len(at) / 7 * least(ends[0][at], ends[1][at], 2) for at in classes)
    assert found.centred_optimality == pytest.approx((ot / direct) ** 0.5)
    assert found.centred_optimality <= found.optimality


def test_the_thesis_by_hand():
    """Four instances of two tokens in the plane, four snapshots, written out with square roots of sums."""
    rng = np.random.default_rng(4)
    steps, y = rng.normal(size=(4, 4, 2, 2)), np.array([0, 0, 0, 1])
    found = transport_metrics(steps, y, metrics="thesis")
    tokens = {0: [(i, t) for i in (0, 1, 2) for t in (0, 1)], 1: [(3, 0), (3, 1)]}
    distance = wasserstein = 0.0
    kept = 0
    for places in tokens.values():
        first, last = ([steps[at][place] for place in places] for at in (0, 3))
        distance += sum(np.square(a - b).sum() for a, b in zip(first, last, strict=True)) ** 0.5
        orders = list(itertools.permutations(range(len(places))))
        costs = [sum(np.square(first[i] - last[j]).sum() for i, j in enumerate(order)) for order in orders]
        wasserstein += min(costs) ** 0.5
        kept += sum(i == j for i, j in enumerate(orders[int(np.argmin(costs))]))
    path = sum(
        np.linalg.norm(steps[s + 1, i, t] - steps[s, i, t]) for s in range(3) for i in range(4) for t in range(2)
    )
    assert found.direct == pytest.approx(distance, abs=1e-9)
    assert found.ot == pytest.approx(wasserstein, abs=1e-9)
    assert found.monge_gap == pytest.approx(distance - wasserstein, abs=1e-9)
    assert found.optimality == pytest.approx(wasserstein / distance, abs=1e-9)
    assert found.path == pytest.approx(path, abs=1e-9)
    assert found.efficiency == pytest.approx(distance / path, abs=1e-9)
    assert found.matching == pytest.approx(kept / 8)
    assert found.baseline is found.centred_optimality is found.efficiency_quantiles is None


def test_the_efficiency_of_the_thesis_is_small_for_straight_ways():
    X = np.random.default_rng(0).normal(size=(45, 20, 2))
    steps = np.stack([X + 0.3 * step for step in range(4)])
    for y, ceiling in ((np.arange(45) % 2, 0.0471), (np.arange(45) % 3, 0.0577)):
        sizes = 20 * np.bincount(y)
        found = transport_metrics(steps, y, metrics="thesis").efficiency
        assert found == pytest.approx(np.sqrt(sizes).sum() / 900, rel=1e-9)
        assert found == pytest.approx(ceiling, abs=1e-4)
        assert transport_metrics(steps, y).efficiency == 1.0


def test_gradients_of_convex_functions_are_optimal_and_turns_are_not():
    rng = np.random.default_rng(1)
    X, factor = rng.normal(size=(23, 3)), rng.normal(size=(3, 3))
    assert monge_gap(X, X @ (factor @ factor.T)) <= 1e-10
    Z = rng.normal(size=(7, 2))
    Z -= Z.mean(0)
    turned = Z @ np.array([[0.0, 1.0], [-1.0, 0.0]])
    assert monge_gap(Z, turned) > 0.1
    found = transport_metrics(np.stack((Z, turned)))
    assert found.optimality < 0.95
    assert found.matching < 1


def test_pooled_is_at_most_per_class_is_at_most_direct():
    for steps, y in trajectories(100):
        pooled, per_class = (transport_metrics(steps, y, per_class=one) for one in (False, True))
        assert pooled.ot <= per_class.ot + 1e-12
        assert per_class.ot <= per_class.direct + 1e-12
        assert per_class.direct == pooled.direct
        assert min(pooled.monge_gap, per_class.monge_gap) >= 0


def test_shares_do_not_depend_on_place_turn_and_unit():
    for steps, y in trajectories(50):
        wanted = transport_metrics(steps, y)
        rng = np.random.default_rng(7)
        turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
        found = transport_metrics(17.0 * (steps @ turn) + rng.normal(size=3), y)
        for name in SHARES:
            assert getattr(found, name) == pytest.approx(getattr(wanted, name), abs=1e-9), name
            assert 0 <= getattr(found, name) <= 1
        split = np.concatenate(
            [np.stack((one, one + 0.3 * (two - one))) for one, two in itertools.pairwise(steps)] + [steps[-1:]]
        )
        assert transport_metrics(split, y).efficiency == pytest.approx(wanted.efficiency, abs=1e-12)


def test_exchanged_ends_leave_the_optimum_and_the_optimum_itself_is_optimal():
    for steps, y in trajectories(20):
        last = steps[-1].copy()
        rng = np.random.default_rng(0)
        for name in np.unique(y):
            at = np.flatnonzero(y == name)
            last[at] = last[rng.permutation(at)]
        found, other = (transport_metrics(np.stack((steps[0], end)), y) for end in (steps[-1], last))
        assert other.ot == pytest.approx(found.ot, abs=1e-12)
        best = steps[-1].copy()
        for name in np.unique(y):
            at = np.flatnonzero(y == name)
            best[at] = assignment(steps[0][at], steps[-1][at]).map(steps[-1][at])
        optimal = transport_metrics(np.stack((steps[0], best)), y)
        assert optimal.optimality == pytest.approx(1.0, abs=1e-12)
        assert optimal.matching == 1.0
        assert optimal.monge_gap <= 1e-10


def test_nothing_moved_and_everything_moved_alike():
    X = np.random.default_rng(0).normal(size=(11, 3))
    still = transport_metrics(np.stack((X, X, X)))
    assert still.optimality == still.efficiency == still.centred_optimality == still.matching == 1.0
    assert still.monge_gap == still.path == 0.0
    shifted = transport_metrics(np.stack((X, X + 5.0)))
    assert shifted.optimality == shifted.centred_optimality == 1.0
    assert shifted.baseline > 0.95, "the shift of means alone makes a random pairing look near to optimal"
    assert shifted.centred_baseline < 1e-6
    # Rows that are there twice: whichever is exchanged, they are where they should be.
    twice = np.concatenate((X, X))
    assert transport_metrics(np.stack((twice, twice + 1.0))).matching == 1.0


def test_tokens_have_the_label_of_their_set():
    """A flat problem of the same points gives the same figures, for one, four and twenty tokens."""
    for tokens in (1, 4, 20):
        rng = np.random.default_rng(tokens)
        steps, y = rng.normal(size=(3, 7, tokens, 2)), np.array([0, 1, 0, 1, 1, 0, 2])
        flat = steps.reshape(3, 7 * tokens, 2)
        found, wanted = transport_metrics(steps, y), transport_metrics(flat, y.repeat(tokens))
        assert found == wanted
        ot = sum(
            (y == name).mean() * assignment(*(part[y == name].reshape(-1, 2) for part in steps[[0, -1]])).cost
            for name in range(3)
        )
        assert found.ot == pytest.approx(ot, abs=1e-9)
    assert transport_metrics(torch.from_numpy(steps), torch.from_numpy(y)) == found
    assert transport_metrics(list(steps), list(y)) == found


def test_an_entropic_plan_bounds_the_gap():
    X = np.random.default_rng(0).normal(size=(101, 2))
    with pytest.warns(UserWarning, match="more than the movement itself"):
        assert monge_gap(X, X + 0.01, method="sinkhorn") == 0.0
    turned = X @ np.array([[0.0, 1.0], [-1.0, 0.0]])
    steps = np.stack((X, turned))
    exact, bound = transport_metrics(steps), transport_metrics(steps, method="sinkhorn")
    assert 0.9 * exact.monge_gap < bound.monge_gap < exact.monge_gap
    assert exact.optimality < bound.optimality < 1.1 * exact.optimality
    assert not bound.is_exact
    assert "optimality at most" in str(bound)
    assert exact.centred_optimality < bound.centred_optimality


def test_results_are_read_in_many_ways():
    pytest.importorskip("pandas", reason="the extra 'tables' is not installed")
    steps, y = next(trajectories(1))
    found = transport_metrics(steps, y)
    frame = found.to_frame()
    assert len(frame) == 1
    assert frame.loc[0, "optimality"] == found.optimality
    assert frame.loc[0, "efficiency_0.5"] == found.efficiency_quantiles[2]
    assert found.to_dict()["monge_gap"] == found.monge_gap
    assert transport_metrics(steps, y, centred=False).centred_optimality is None
    assert "centred" not in str(transport_metrics(steps, y, metrics="thesis"))
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    from matplotlib import pyplot

    pyplot.switch_backend("Agg")
    for metrics, bars in (("consistent", 4), ("thesis", 3)):
        ax = transport_metrics(steps, y, metrics=metrics).plot()
        assert len(ax.patches) == bars
        pyplot.close(ax.figure)


def test_what_cannot_be_is_refused():
    steps, y = next(trajectories(1))
    for arguments, message in (
        ((steps[:1], y), "trajectory must have two snapshots or more"),
        (([steps[0], steps[1][:5]], y), r"snapshots of a trajectory must have one shape; got \(5, 3\), \(11, 3\)"),
        ((steps, y[:5]), "y must have one label for each of the 11 points"),
        ((steps[..., None, :], y[:5]), "y must have one label for each of the 11 points"),
        ((steps[0], y), "trajectory must have 3 or 4 axes"),
        ((steps, y, 0.5), "p must be a number from 1 on"),
        ((steps, y, 2, "paper"), "metrics must be one of consistent, thesis"),
        ((steps, y, 1, "thesis"), "metrics='thesis' is of p = 2"),
        ((np.where(steps > 2, np.inf, steps), y), "trajectory holds NaN or infinite"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            transport_metrics(*arguments)
    with pytest.raises(InvalidArgument, match="X and TX must be the same points"):
        monge_gap(steps[0], steps[1][:5])


@pytest.mark.parametrize("p", [1, 2, 3])
def test_the_loss_is_the_gap_and_its_gradient_holds_the_permutation(p):
    rng = np.random.default_rng(p)
    x, tx = (torch.tensor(rng.normal(size=(7, 3)), requires_grad=True) for _ in range(2))
    y = [0, 1, 0, 1, 0, 0, 1]
    assert monge_gap_loss(x, tx, p).item() == pytest.approx(monge_gap(x, tx, p), abs=1e-12)
    assert monge_gap_loss(x, tx, p, y).item() == pytest.approx(monge_gap(x, tx, p, y), abs=1e-12)
    assert torch.autograd.gradcheck(lambda one, two: monge_gap_loss(one, two, p, y), (x, tx))
    sets = [torch.tensor(rng.normal(size=(5, 7, 3)), requires_grad=True) for _ in range(2)]
    wanted = np.mean([monge_gap(one, two, p) for one, two in zip(*sets, strict=True)])
    assert monge_gap_loss(*sets, p).item() == pytest.approx(wanted, abs=1e-12)
    assert torch.autograd.gradcheck(lambda one, two: monge_gap_loss(one, two, p), sets)
    with pytest.raises(InvalidArgument, match="x and tx must have one shape"):
        monge_gap_loss(x, tx[:5])


def test_the_loss_makes_a_map_optimal():
    """A linear map that starts as a turn and is drawn to its targets' cloud only loosely becomes symmetric and positive."""
    torch.manual_seed(0)
    x = torch.randn(23, 2)
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]]).requires_grad_()
    optimizer = torch.optim.Adam([turn], lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        loss = monge_gap_loss(x, x @ turn) + ((x @ turn).square().mean() - 1).square()
        loss.backward()
        optimizer.step()
    assert monge_gap(x, x @ turn) < 1e-3
    assert torch.linalg.eigvalsh((turn + turn.T).detach()).min() > 0


def test_straightness_is_one_less_the_efficiency():
    steps = torch.tensor(np.random.default_rng(0).normal(size=(4, 7, 3)), requires_grad=True)
    assert straightness_loss(steps).item() == pytest.approx(1 - transport_metrics(steps).efficiency)
    assert torch.autograd.gradcheck(straightness_loss, (steps,))
    still = torch.zeros(3, 5, 2, requires_grad=True)
    straightness_loss(still).backward()
    assert straightness_loss(still).item() == 0.0
    assert torch.equal(still.grad, torch.zeros_like(still))
    with pytest.raises(InvalidArgument, match="trajectory must be"):
        straightness_loss(steps[:1])


def test_labels_of_several_kinds_are_refused():
    steps = np.random.default_rng(0).normal(size=(2, 5, 3))
    with pytest.raises(InvalidArgument, match="y must have labels of one kind; got NoneType, int"):
        transport_metrics(steps, y=[0, 1, None, 1, 0])

"""Learners at their edges: nothing to learn, nothing testable, budgets, orders, names, data, and errors before work starts."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from brute_force import random_dag, topological
from heedful import InvalidArgument
from heedful.discovery import (
    CIRCLE,
    NONE,
    PAG,
    TAIL,
    DSeparation,
    FisherZ,
    RhoThreshold,
    RowFisherZ,
    discover,
    discover_data,
    fci,
    icd,
    pc,
)
from heedful.discovery import questions as module

LEARNERS = {"icd": icd, "fci": fci, "pc": pc, "stable": lambda test, **how: icd(test, stable=True, **how)}
every = pytest.mark.parametrize("learner", LEARNERS.values(), ids=LEARNERS)


def attention(n, seed=0, sharp=1.5, common=0.0):
    A = np.exp(np.random.default_rng(seed).standard_normal((n, n)) * sharp)
    A /= A.sum(1, keepdims=True)
    return (1 - common) * A + common * A.mean(0)


@every
@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_identity_gives_no_edges(learner, n):
    for test in (FisherZ(np.eye(n), 50, 0.01), RowFisherZ(np.eye(n), 50, 0.01)):
        pag = learner(test)
        assert (pag.n, pag.edges(), len(pag.tests)) == (n, [], n * (n - 1) // 2)
        assert pag.names == tuple(f"x{i}" for i in range(n))


@every
@pytest.mark.parametrize("n", [2, 3, 12, 40])
def test_equal_rows_give_a_complete_graph_and_a_warning(learner, n):
    test = FisherZ(np.ones((n, n)), 768, 0.01)
    if n == 2:
        pag = learner(test)
    else:
        with pytest.warns(UserWarning, match="could not be decided") as caught:
            pag = learner(test)
        assert len(caught) == 1
        assert pag.untestable > 0
        assert "determine one another" in pag.stopped
        assert pag.trust().level == "none"
    mark = TAIL if pag.learner == "pc" else CIRCLE
    assert (pag.marks == mark * (1 - np.eye(n))).all()
    assert not np.isnan(pag.tests.log_p).any()
    assert pag.confidence is not None


@every
def test_too_few_samples(learner):
    test = FisherZ(0.999 * np.ones((8, 8)) + 0.001 * np.eye(8), 5, 0.9)
    with pytest.warns(UserWarning, match="could not be decided"):
        pag = learner(test)
    assert pag.tests.size.max() <= 1
    assert pag.reach == 1
    assert "5 samples cannot test sets of 2 or more variables" in pag.stopped
    assert pag.untestable >= len(pag.edges())


@every
def test_a_singular_covariance(learner):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((6, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for test in (FisherZ(rows @ rows.T, 100, 0.01), RowFisherZ(rows, 100, 0.01)):
            pag = learner(test)
            assert pag.untestable > 0
            assert np.isfinite(pag.tests.rho).all()
            assert not np.isnan(pag.tests.log_p).any()


@every
def test_a_budget_undoes_the_pass_that_exceeds_it(learner):
    A = attention(25, common=0.7)
    test = FisherZ(A @ A.T, 384, 0.01)
    sizes = learner(test).tests.size
    assert sizes.max() >= 2
    budget = int((sizes <= 1).sum()) + 1
    pag = learner(test, max_tests=budget)
    assert pag.reach == 1
    assert f"more than {budget} tests would be needed" in pag.stopped
    assert pag.stopped in str(pag.trust())
    assert pag.tests.size.max() == 1
    # What is left is the graph of a search that was told to go so far.
    same = learner(test, max_cond_size=1)
    np.testing.assert_array_equal(pag.marks, same.marks)
    assert pag.sepsets == same.sepsets
    assert (same.stopped, same.reach) == ("", 1)


def test_a_near_complete_graph_of_128_ends():
    pag = icd(FisherZ(0.95 * np.ones((128, 128)) + 0.05 * np.eye(128), 384, 0.01), max_tests=1_200_000)
    assert pag.density == 1
    assert (pag.reach, len(pag.tests)) == (1, 8128 + 8128 * 126)
    assert "more than 1200000 tests would be needed" in pag.stopped
    assert pag.trust().level == "none"
    assert "Every one of the 8128 pairs" in str(pag.trust())


@every
def test_each_size_is_valid_for_itself(learner):
    # Oracle: the graph after sets of r variables has every edge that no such set separates.
    parents, observed, _ = random_dag(np.random.default_rng(3), 8, 2, 0, 3.0)
    oracle = DSeparation(parents, observed=observed)
    last = learner(oracle).marks != NONE
    for size in range(4):
        pag = learner(oracle, max_cond_size=size)
        assert ((pag.marks != NONE) | ~last).all()
        assert pag.tests.size.max() <= size
        assert all(len(given) <= size for given in pag.sepsets.values())
    assert learner(oracle, max_cond_size=20).reach is None


def test_blocks_of_sets_change_nothing(monkeypatch):
    A = attention(14, common=0.5)
    test = FisherZ(A @ A.T, 100, 0.05)
    whole = [learner(test) for learner in LEARNERS.values()]
    monkeypatch.setattr(module, "BLOCK", 7)
    module._table.cache_clear()
    for one, learner in zip(whole, LEARNERS.values(), strict=True):
        again = learner(test)
        np.testing.assert_array_equal(again.marks, one.marks)
        assert list(again.tests) == list(one.tests)


def test_permuted_order():
    parents, observed, _ = random_dag(np.random.default_rng(5), 7, 2, 0, 2.5)
    order = [observed.index(v) for v in topological(parents) if v in observed]
    found = icd(DSeparation(parents, observed=observed), order=order)
    straight = icd(DSeparation(parents, observed=[observed[v] for v in order]), order=range(7))
    np.testing.assert_array_equal(found.marks[np.ix_(order, order)], straight.marks)
    # Sets around the later node come from before it.
    place = {v: at for at, v in enumerate(order)}
    for row in found.tests:
        assert all(place[v] < max(place[row.x], place[row.y]) for v in row.z)


def test_nodes_and_names():
    A = attention(9)
    C = A @ A.T
    keep = [7, 2, 5, 1]
    part = icd(FisherZ(C, 100, 0.05), nodes=keep)
    alone = icd(FisherZ(C[np.ix_(keep, keep)], 100, 0.05), names=list("abcd"))
    np.testing.assert_array_equal(part.marks, alone.marks)
    assert part.names == ("x7", "x2", "x5", "x1")
    assert alone.names == ("a", "b", "c", "d")


def test_data_and_its_names():
    rng = np.random.default_rng(0)
    data = rng.standard_normal((500, 4))
    data[:, 2] += data[:, 0] + data[:, 1]
    plain = discover(data=data)
    by_covariance = discover(np.cov(data, rowvar=False), samples=500)
    np.testing.assert_array_equal(plain.marks, by_covariance.marks)
    np.testing.assert_allclose(plain.tests.rho, by_covariance.tests.rho, atol=1e-13)
    assert (plain.samples, plain.alpha) == (500, 0.01)
    np.testing.assert_array_equal(discover_data(torch.from_numpy(data)).marks, plain.marks)
    for scale in (1e-200, 1e200):
        np.testing.assert_array_equal(discover(data=data * scale + scale).marks, plain.marks)
    pandas = pytest.importorskip("pandas", reason="the extra 'tables' is not installed")
    frame = pandas.DataFrame(data, columns=["a", "b", "c", "d"])
    assert discover(data=frame).names == ("a", "b", "c", "d")
    assert discover(data=frame, nodes=[2, 0]).names == ("c", "a")
    assert discover(data=frame, names=list("wxyz")).names == ("w", "x", "y", "z")


def test_a_constant_column_stands_alone():
    data = np.random.default_rng(0).standard_normal((100, 3))
    data[:, 1] = 0.1
    covariance = np.cov(data, rowvar=False)
    covariance[1] = covariance[:, 1] = 0
    for given in ({"data": data}, {"covariance": covariance, "samples": 100}):
        with pytest.warns(UserWarning, match="'b' does not vary"):
            pag = discover(**given, names=["a", "b", "c"])
        assert pag.adjacent(1) == ()
        assert pag.trust().level == "limited"
        assert "'b' does not vary" in str(pag.trust())
        assert PAG.from_dict(pag.to_dict()).notes == pag.notes


@pytest.mark.parametrize("learner", ["icd", "fci", "pc"])
def test_options_that_a_learner_does_not_take_are_refused(learner):
    options = {"order": [0, 1, 2], "stable": True, "selection_bias": True, "max_tests": 100, "names": ["a", "b", "c"]}
    able = {"icd": set(options), "fci": set(options) - {"order", "stable"}, "pc": {"max_tests", "names"}}[learner]
    for name, value in options.items():
        if name in able:
            assert discover(np.eye(3), 100, learner=learner, **{name: value}).n == 3
            continue
        with pytest.raises(InvalidArgument, match=f"learner='{learner}' does not take {name}; .* learner='icd'"):
            discover(np.eye(3), 100, learner=learner, **{name: value})
        # A switch that is off asks for nothing.
        assert discover(np.eye(3), 100, learner=learner, **{name: None}).n == 3
    assert discover(np.eye(3), 100, learner=learner, selection_bias=False).n == 3
    with pytest.raises(InvalidArgument, match="there is no option 'depth'"):
        discover(np.eye(3), 100, learner=learner, depth=3)


def test_a_matrix_that_no_data_has():
    far = np.array([[1, 0.9, -0.9], [0.9, 1, 0.9], [-0.9, 0.9, 1]])
    with pytest.raises(InvalidArgument, match=r"smallest eigenvalue of its correlation matrix is -0\.8"):
        discover(far, samples=100)
    with pytest.raises(InvalidArgument, match="no covariance"):
        FisherZ(far, 100)
    # Slightly off, as by rounding to three digits: a warning, and no good trust.
    near = np.array([[1, 0.7, 0.72], [0.7, 1, 0], [0.72, 0, 1]])
    assert -0.01 < np.linalg.eigvalsh(near)[0] < 0
    with pytest.warns(UserWarning, match="not positive semidefinite"):
        pag = discover(near, samples=100)
    assert pag.trust().level != "good"
    assert "not positive semidefinite" in str(pag.trust())
    # What rounding in float64 leaves of a singular covariance is no matter.
    data = np.random.default_rng(0).standard_normal((50, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert discover(np.cov(np.c_[data, data[:, 0] + 2 * data[:, 1]].T), samples=50, max_cond_size=1).notes == ()


def test_frames_keep_their_names_and_say_which_column_is_text():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(np.random.default_rng(0).standard_normal((50, 3)), columns=["rain", "hose", "wet"])
    assert discover(data=frame).names == discover(frame.cov(), samples=50).names == ("rain", "hose", "wet")
    assert discover(data=frame, nodes=[2, 0]).names == ("wet", "rain")
    frame["city"] = "Rome"
    with pytest.raises(InvalidArgument, match="column 'city' must be left out or made numbers"):
        discover(data=frame)


def test_progress_counts_pairs():
    A = attention(30, common=0.5)
    calls: list[tuple[int, int]] = []
    icd(FisherZ(A @ A.T, 384, 0.01), progress=lambda done, total, what: calls.append((done, total)))
    assert calls
    assert all(0 <= done <= total for done, total in calls)


def test_deterministic():
    A = attention(20, common=0.6)
    for learner in LEARNERS.values():
        one, two = (learner(FisherZ(A @ A.T, 384, 0.01)) for _ in range(2))
        assert one.to_dict() == two.to_dict()


def test_row_space_learns_the_same():
    A = attention(15, common=0.6)
    one, two = icd(FisherZ(A @ A.T, 384, 0.01)), icd(RowFisherZ(A, 384, 0.01))
    np.testing.assert_array_equal(one.marks, two.marks)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: discover(np.eye(3), samples=50, alpha=0), "alpha"),
        (lambda: discover(np.eye(3), samples=50, alpha=1), "alpha"),
        (lambda: discover(np.eye(3)), "samples="),
        (lambda: discover(), "either a covariance"),
        (lambda: discover(np.eye(3), data=np.ones((3, 3))), "either a covariance"),
        (lambda: discover(data=np.ones((9, 3)), samples=3), "rows of data"),
        (lambda: discover(data=np.ones(9)), "data must be a table of numbers, with rows and columns"),
        (lambda: discover(data=np.full((9, 3), np.nan)), "not finite"),
        (lambda: discover(data=np.ones((3, 2))), "at least 4"),
        (lambda: discover(np.eye(3), samples=50, learner="ges"), "icd, fci, pc"),
        (lambda: icd(RhoThreshold(np.eye(3)), order=[0, 1, 1]), "permutation"),
        (lambda: icd(RhoThreshold(np.eye(3)), nodes=5), "whole numbers in 0"),
        (lambda: icd(RhoThreshold(np.eye(3)), nodes=["a", "b"]), "whole numbers in 0"),
        (lambda: icd(RhoThreshold(np.eye(3)), max_tests="all"), "max_tests must be a whole number"),
        (lambda: icd(RhoThreshold(np.eye(3)), nodes=[0, 3]), r"0 \.\.\. 2"),
        (lambda: icd(RhoThreshold(np.eye(3)), nodes=[0, 0]), "distinct"),
        (lambda: icd(RhoThreshold(np.eye(3)), names=["a"]), "as many names"),
        (lambda: icd(RhoThreshold(np.eye(3)), max_cond_size=-1), "max_cond_size"),
        (lambda: fci(RhoThreshold(np.eye(3)), max_tests=1.5), "max_tests"),
    ],
)
def test_errors_say_what_is_wrong(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()


@pytest.mark.parametrize(
    "order",
    [["a", "b", "c"], "abc", 5, [0.5, 1, 2], [0, 1], [True, 0, 2], [True, 0, 1, 2], [[0], [1], [2]], [None] * 3, "012"],
)
def test_an_order_that_is_none_is_refused_in_one_line(order):
    for given in (order, np.array(order, object)):
        with pytest.raises(
            InvalidArgument, match=r"^order must hold each of the 3 nodes once, causes first: .*; got .*$"
        ):
            discover(np.eye(3), 100, order=given)


def test_an_order_may_be_of_names():
    noise = np.random.default_rng(0).standard_normal((500, 3))
    noise[:, 1] += noise[:, 2] + noise[:, 0]
    names = ["rain", "wet", "hose"]
    by_name = discover(data=noise, names=names, order=["hose", "rain", "wet"])
    by_number = discover(data=noise, names=names, order=np.array([2, 0, 1]))
    assert by_name.order == by_number.order == (2, 0, 1)
    np.testing.assert_array_equal(by_name.marks, by_number.marks)
    with pytest.raises(InvalidArgument, match="order must hold"):
        discover(data=noise, names=names, order=["hose", "rain", "snow"])


def test_what_is_no_covariance_is_refused():
    with pytest.raises(InvalidArgument, match="variables 0 and 1 would have correlation 2, beyond 1"):
        discover([[1.0, 2.0], [2.0, 1.0]], 100)
    with pytest.raises(InvalidArgument, match="covariance must be a table of numbers; got list"):
        discover([["a", "b"], ["c", "d"]], 100)
    with pytest.raises(InvalidArgument, match="a table of numbers"):
        discover(data=[["x", "y"]])
    with pytest.raises(InvalidArgument, match="a stands more than once"):
        discover(np.eye(2), 100, names=["a", "a"])

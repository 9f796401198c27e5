"""Association matrices against their formulas, cell by cell."""

import math

import numpy as np
import pytest
from scipy.sparse import coo_array, csr_array

from heedful import InvalidArgument
from heedful.corpus import association

COUNTS = np.array([[3.0, 1, 0, 7], [0, 2, 5, 1], [1, 0, 0, 4], [2, 0.5, 1, 0]])
PMI_KINDS = ("pmi", "ppmi", "sppmi", "npmi")


def oracle(kind, a, b, *, alpha, shift, beta):
    """One cell by the formula; None where nothing was counted."""
    count, total = COUNTS[a, b], COUNTS.sum()
    if not count:
        return None
    row = sum(COUNTS[a, j] for j in range(4))
    columns = [sum(COUNTS[i, j] for i in range(4)) for j in range(4)]
    share = columns[b] ** alpha / sum(c**alpha for c in columns)
    pmi = math.log(count / (row * share))
    whole = math.log((count + beta * columns[b] / total) / (row + beta)) - math.log(columns[b] / total)
    return {
        "pmi": pmi,
        "ppmi": max(pmi, 0),
        "sppmi": max(pmi - math.log(shift), 0),
        "npmi": pmi / -math.log(count / total),
        "log": math.log(count),
        "log1p": math.log(1 + count),
        "conditional": whole - math.log(beta / (row + beta)),
    }[kind]


@pytest.mark.parametrize("kind", [*PMI_KINDS, "log", "log1p", "conditional"])
@pytest.mark.parametrize("alpha", [1, 0.75])
def test_formulas(kind, alpha):
    got = association(csr_array(COUNTS), kind, smoothing=alpha, shift=1.3, beta=7.0)
    dense = got.toarray()
    for a in range(4):
        for b in range(4):
            expected = oracle(kind, a, b, alpha=alpha, shift=1.3, beta=7.0)
            assert dense[a, b] == pytest.approx(expected or 0.0, abs=1e-12)
    assert got.nnz <= (COUNTS > 0).sum()
    if kind in ("pmi", "npmi", "log", "log1p", "conditional"):
        assert got.nnz == (COUNTS > 0).sum(), "cells with a count are there, also where they are zero"
    else:
        assert (got.data > 0).all()


def test_conditional_with_its_rows_is_the_smoothed_probability():
    """With ln(beta / (r + beta)) for each row the matrix is ln((C + beta p) / (r + beta)) - ln p in every cell."""
    sparse = association(COUNTS, "conditional", beta=11.0).toarray()
    row, share = COUNTS.sum(1), COUNTS.sum(0) / COUNTS.sum()
    whole = sparse + np.log(11 / (row + 11))[:, None]
    expected = np.log((COUNTS + 11 * share) / (row + 11)[:, None]) - np.log(share)
    np.testing.assert_allclose(whole, expected, atol=1e-12)
    np.testing.assert_allclose((np.exp(whole) * share).sum(1), 1.0, atol=1e-12)


def test_chance_has_no_association():
    product = np.outer([2.0, 3, 5, 7, 11], [1.0, 4, 6, 13, 17])
    for kind in PMI_KINDS:
        assert abs(association(product, kind, smoothing=1)).max() < 1e-12
    draw = np.random.default_rng(0)
    sizes = [
        abs(association(draw.multinomial(n, np.full(49, 1 / 49)).reshape(7, 7), "pmi")).max() for n in (10**4, 10**8)
    ]
    assert sizes[1] < sizes[0] / 30


def test_relations():
    ppmi = association(COUNTS)
    assert (association(COUNTS, "sppmi", shift=1) != ppmi).nnz == 0
    assert ppmi.nnz > association(COUNTS, "sppmi", shift=2).nnz
    together = association(np.diag([2.0, 3, 5]), "npmi", smoothing=1)
    np.testing.assert_allclose(together.diagonal(), 1.0, atol=1e-12)
    assert association(np.array([[5.0, 0], [0, 0]]), "npmi").toarray()[0, 0] == 1.0
    order = np.array([2, 0, 3, 1])
    moved = association(COUNTS[order][:, order]).toarray()
    np.testing.assert_allclose(moved, ppmi.toarray()[order][:, order], atol=1e-12)


def test_what_is_given_stays_and_what_is_no_count_is_refused():
    twice = coo_array(([1.0, 2.0, 0.0], ([0, 0, 1], [1, 1, 0])), shape=(2, 2))
    assert association(twice, "log1p").toarray()[0, 1] == pytest.approx(math.log(4))
    matrix = csr_array(COUNTS)
    association(matrix, "ppmi")
    assert (matrix.toarray() == COUNTS).all()
    assert association(csr_array((3, 3)), "ppmi").nnz == 0
    with pytest.raises(InvalidArgument, match="finite and not negative"):
        association(-COUNTS)
    with pytest.raises(InvalidArgument, match="kind must be one of ppmi"):
        association(COUNTS, "tfidf")
    with pytest.raises(InvalidArgument, match="smoothing must be a number"):
        association(COUNTS, smoothing=0)
    with pytest.raises(InvalidArgument, match="shift must be a number from 1 on"):
        association(COUNTS, "sppmi", shift=0.5)
    with pytest.raises(InvalidArgument, match="beta must be a number above 0"):
        association(COUNTS, "conditional", beta=0)

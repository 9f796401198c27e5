"""Separation ranks: the theory's table as exact integers, and the moment form against the recursion over tokens."""

import json
import math

import numpy as np
import pytest
import torch

from heedful import InvalidArgument, Unsupported
from heedful.lens.depth import (
    PolynomialAttention,
    float_separation_rank,
    log3_sep_curve,
    rank,
    sep_bound,
    separation_rank,
    theorem_bounds,
)

# (depth, width, heads, tokens): rank
RANKS = {
    (1, 1, 1, 2): 2,
    (1, 3, 3, 4): 4,
    (1, 4, 2, 2): 5,
    (2, 2, 1, 2): 15,
    (2, 2, 2, 2): 15,
    (2, 2, 1, 4): 18,
    (2, 2, 2, 4): 17,
    (2, 3, 1, 2): 35,
    (2, 3, 3, 2): 35,
    (2, 3, 1, 4): 49,
    (2, 3, 3, 4): 43,
    (2, 4, 1, 2): 70,
    (2, 4, 2, 2): 70,
    (2, 4, 4, 2): 69,
    (2, 4, 1, 4): 110,
    (2, 4, 2, 4): 107,
    (2, 4, 4, 4): 85,
    (3, 1, 1, 4): 14,
    (3, 2, 1, 2): 105,
    (3, 2, 2, 2): 105,
    (3, 2, 1, 4): 232,
    (3, 2, 2, 4): 215,
}


# Check 6.
@pytest.mark.parametrize(("sizes", "expected"), RANKS.items(), ids=str)
def test_exact_ranks(sizes, expected):
    assert separation_rank(*sizes) == expected
    assert separation_rank(*sizes, residual=True, seed=1) == expected
    if sizes[1] <= 3:
        assert separation_rank(*sizes, query="right", seed=2) == expected


def test_more_tokens_than_four_change_nothing():
    assert separation_rank(2, 3, 1, 8) == 49


def test_elimination_finds_a_known_rank():
    draw = np.random.default_rng(0)
    for rows, columns, inner in ((83, 71, 37), (41, 67, 41), (5, 5, 0), (97, 97, 97)):
        left, right = (draw.integers(rank.P, size=size, dtype=np.uint64) for size in ((rows, inner), (inner, columns)))
        product = rank._matmul(left, right) if inner else np.zeros((rows, columns), dtype=np.uint64)
        assert rank._rank(product) == inner


def test_products_over_the_field_are_exact():
    draw = np.random.default_rng(1)
    left, right = (draw.integers(rank.P - 5, rank.P, size=size, dtype=np.uint64) for size in ((7, 32), (32, 5)))
    exact = (left.astype(object) @ right.astype(object)) % rank.P
    assert (rank._matmul(left, right) == exact).all()
    assert (rank._times(left, right) == exact).all()


# Check 7.
def test_the_moment_form_is_the_recursion_in_exact_arithmetic():
    tokens, width, heads, layers = 6, 4, 2, 3
    draw = np.random.default_rng(7)
    network = rank.weights(layers, width, heads, draw)
    x = draw.integers(rank.P, size=(tokens, width), dtype=np.uint64)
    # Over Python's integers: y_j <- sum_h sum_j' (y_j . B_h^T y_j') A_h y_j', with A = W_O W_V and B = W_K^T W_Q.
    y = x.astype(object)
    for layer in network:
        y = sum((y @ b.astype(object).T @ y.T) @ (y @ a.astype(object).T) for a, b in layer) % rank.P
    for at in range(tokens):
        moment = rank._matmul(x.T, x)
        assert (rank.forward(network, moment, x[at, :, None], False)[:, 0] == y[at]).all()


@pytest.mark.parametrize("residual", [False, True])
def test_the_moment_form_is_the_recursion_in_float64(residual):
    network = PolynomialAttention(4, heads=2, depth=3, residual=residual).double()
    x = torch.randn(5, 6, 4, dtype=torch.float64, requires_grad=True)
    fast, slow = network(x), network.direct(x)
    assert ((fast - slow).abs().max() / slow.abs().max()).item() < 1e-10
    weights = [x, *network.parameters()]
    ours, theirs = (torch.autograd.grad(out.sum(), weights) for out in (fast, slow))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * b.abs().max().item())


# Check 8.
@pytest.mark.parametrize(
    ("depth", "width", "heads", "inner", "expected"),
    [(2, 4, 1, 1, 5), (2, 4, 2, 2, 18), (2, 6, 1, 2, 18), (2, 6, 1, 3, 49), (2, 6, 3, 3, 49), (3, 4, 1, 2, 232)],
)
def test_a_low_embedding_rank_is_a_low_width(depth, width, heads, inner, expected):
    assert separation_rank(depth, width, heads, embedding_rank=inner) == expected == sep_bound(inner, depth)


@pytest.mark.parametrize(
    ("width", "depth", "bound"), [(2, 3, 232), (3, 3, 3102), (4, 3, 31460), (8, 2, 999), (2, 4, 4538)]
)
def test_the_bound(width, depth, bound):
    assert sep_bound(width, depth) == bound


@pytest.mark.parametrize("width", [2, 3, 5, 7, 11])
def test_the_closed_form_of_depth_two(width):
    m = width * (width + 1) // 2
    assert sep_bound(width, 2) == 1 + m + m * (m + 1) // 2 + width * m + width
    assert sep_bound(width, 1) == width + 1


def test_the_first_theorem_brackets_the_bound():
    bounds = theorem_bounds(10, 1, 2)
    assert 3**bounds.lower == pytest.approx(4.5, abs=1e-9)
    assert 3**bounds.upper == pytest.approx(14641)
    assert 3**bounds.lower <= sep_bound(10, 2) == 2156 <= 3**bounds.upper
    assert (bounds.regime, bounds.leading) == ("depth-efficient", False)
    deep = theorem_bounds(8, 2, 5)
    assert (deep.lower, deep.upper, deep.leading) == (10.0, 85.0, True)
    assert json.loads(json.dumps(deep.to_dict()))["regime"] == "depth-inefficient"


# Check 9.
def test_the_curve_bends_into_a_line():
    curve = log3_sep_curve(8, 11)
    expected = [2.00, 6.29, 15.89, 32.41, 57.12, 88.01, 122.05, 157.36, 193.13, 229.05, 265.02]
    assert curve == pytest.approx(expected, abs=0.01)
    assert curve[-1] - curve[-2] == pytest.approx(36, abs=0.05)


def test_floating_point_finds_small_ranks():
    assert separation_rank(2, 2, method="float") == 18
    assert separation_rank(2, 3, method="float") == 49
    torch.manual_seed(1)
    found = float_separation_rank(PolynomialAttention(2, 2, 2))
    assert found.rank == 17
    assert found.gap > 100
    assert len(json.loads(json.dumps(found.to_dict()))["singular_values"]) == 80


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: separation_rank(2, 4, 3), InvalidArgument, "3 heads do not divide width 4"),
        (lambda: separation_rank(2, 4, n_tokens=3), InvalidArgument, "must be even"),
        (
            lambda: separation_rank(2, 4, embedding_rank=5),
            InvalidArgument,
            "embedding_rank must be a whole number from 1 to 4",
        ),
        (lambda: separation_rank(0, 4), InvalidArgument, "depth must be a whole number from 1 on"),
        (lambda: separation_rank(2, 4, method="guess"), InvalidArgument, "'guess'"),
        (lambda: separation_rank(4, 4), Unsupported, "need a grid"),
        (lambda: separation_rank(2, 4, embedding_rank=2, method="float"), Unsupported, "use method='exact'"),
        (lambda: sep_bound(2, 40), InvalidArgument, "give 14 at most"),
        (lambda: theorem_bounds(4, 4, 2), InvalidArgument, "fewer heads than channels"),
        (lambda: PolynomialAttention(5, 2), InvalidArgument, "2 heads do not divide width 5"),
    ],
)
def test_sizes_that_make_no_sense(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_threshold_of_the_theory():
    for width, layers in ((512, 5.7), (768, 6.0), (2048, 6.9), (12288, 8.6)):
        assert math.log(width, 3) == pytest.approx(layers, abs=0.06)
        assert theorem_bounds(width, 8, math.floor(layers)).regime == "depth-efficient"

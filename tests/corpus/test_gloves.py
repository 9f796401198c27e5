"""GloVe against its formula written cell by cell, and both solvers against one another."""

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.sparse import csr_array

from heedful import InvalidArgument
from heedful._installed import installed_texts
from heedful.corpus import Cooccurrence, Glove, glove
from heedful.corpus._documents import words
from heedful.corpus.gloves import CLIP, RATE


def counts(size=13, seed=0, density=0.5):
    g = np.random.default_rng(seed)
    return np.where(g.random((size, size)) < density, np.exp(2 * g.normal(size=(size, size))), 0.0)


def parameters(size=13, rank=3, seed=1):
    g = np.random.default_rng(seed)
    left, right = 0.5 * g.normal(size=(2, size, rank))
    return Glove(left, right, *(0.5 * g.normal(size=(2, size))))


def objective(X, words, contexts, word_biases, context_biases, x_max, exponent):
    """J, one cell after the other."""
    total = 0.0
    for a, row in enumerate(X):
        for b, x in enumerate(row):
            if x > 0:
                weight = 1.0 if x >= x_max else (x / x_max) ** exponent
                product = sum(one * other for one, other in zip(words[a], contexts[b], strict=True))
                total += weight * (product + word_biases[a] + context_biases[b] - math.log(x)) ** 2
    return total


@pytest.mark.parametrize(("x_max", "exponent"), [(100.0, 0.75), (1.5, 0.5)])
def test_objective_and_gradient(x_max, exponent):
    """In one coordinate J is a parabola, so that central differences are exact but for rounding."""
    X, point = counts(), parameters()
    names = ("words", "contexts", "word_biases", "context_biases")
    values = {name: getattr(point, name).copy() for name in names}
    assert point.loss(X, x_max=x_max, exponent=exponent) == pytest.approx(
        objective(X, **values, x_max=x_max, exponent=exponent), rel=1e-12
    )
    gradient = point.gradient(csr_array(X), x_max=x_max, exponent=exponent)
    step = 1e-2
    for name, table in values.items():
        slopes = np.zeros_like(table)
        for place in np.ndindex(table.shape):
            held = table[place]
            sides = []
            for moved in (held + step, held - step):
                table[place] = moved
                sides.append(objective(X, **values, x_max=x_max, exponent=exponent))
            table[place] = held
            slopes[place] = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(getattr(gradient, name), slopes, rtol=0, atol=1e-10 * abs(slopes).max())


def test_als_never_rises_and_solves_each_side():
    X, ridge = counts(17), 1e-3
    results = [glove(X, 4, sweeps=sweeps, x_max=3.0, ridge=ridge) for sweeps in range(1, 10)]

    def ridged(one):
        squares = (np.square(part).sum() for part in (one.words, one.contexts, one.word_biases, one.context_biases))
        return one.losses[-1] + ridge * sum(squares)

    values = [ridged(one) for one in results]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(values))
    assert values[-1] < 0.9 * values[0]
    assert results[-1].losses == pytest.approx([one.losses[-1] for one in results], rel=1e-9)
    last = results[-1]
    slope = last.gradient(X, x_max=3.0)
    # Contexts were solved for last: there J's slope is the ridge's.
    np.testing.assert_allclose(slope.contexts, -2 * ridge * last.contexts, atol=1e-9)
    np.testing.assert_allclose(slope.context_biases, -2 * ridge * last.context_biases, atol=1e-9)


def test_als_reproduces_what_has_its_rank():
    g = np.random.default_rng(3)
    logs = g.normal(size=(19, 2)) @ g.normal(size=(2, 19)) + g.normal(size=(19, 1)) + g.normal(size=19)
    result = glove(np.exp(logs), 2, sweeps=300, x_max=1e-9, ridge=1e-9)
    np.testing.assert_allclose(
        result.words @ result.contexts.T + result.word_biases[:, None] + result.context_biases, logs, atol=1e-3
    )


def test_adagrad_is_the_method_of_one_cell_after_the_other():
    """The same cells in the order in which ours takes them, written with loops."""
    from heedful.corpus.gloves import _Cells, _independent, _start

    X = counts(11, seed=4, density=0.6)
    X[0, 1] = 1e30
    cells, (left, right) = _Cells(X, 2.0, 0.75), _start((11, 11), 3, 5)
    squares = np.ones((2, 11, 4))
    draw = np.random.default_rng([5, 1])
    for _ in range(3):
        for cell in np.concatenate(_independent(cells, draw)):
            a, b = cells.rows[cell], cells.columns[cell]
            error = left[a, :3] @ right[b, :3] + left[a, 3] + right[b, 3] - math.log(X[a, b])
            slope = min(1.0, (X[a, b] / 2.0) ** 0.75) * error
            steps = [slope * np.append(right[b, :3], 1.0), slope * np.append(left[a, :3], 1.0)]
            for table, place, step, square in zip((left, right), (a, b), steps, squares, strict=True):
                step = RATE * np.clip(step, -CLIP, CLIP)
                table[place] -= step / np.sqrt(square[place])
                square[place] += step**2
    result = glove(X, 3, solver="adagrad", sweeps=3, x_max=2.0, seed=5)
    np.testing.assert_allclose(result.words, left[:, :3], rtol=1e-9)
    np.testing.assert_allclose(result.context_biases, right[:, 3], rtol=1e-9)
    assert result.losses[2] < result.losses[1] < result.losses[0]


def test_als_is_lower_after_8_sweeps_than_adagrad_after_15():
    """On 200,000 words that are installed with Python."""
    tokens = [words(text) for text in installed_texts()]
    some = np.searchsorted(np.cumsum([len(one) for one in tokens]), 200_000)
    counter = Cooccurrence(10, min_count=5, max_vocabulary=2000, progress=False).fit(tokens[: some + 1])
    assert counter.tokens_ >= 200_000
    X = counter.counts(directed=False)
    als, adagrad = (glove(X, 15, solver=solver, x_max=10.0) for solver in ("als", "adagrad"))
    assert len(als.losses) == 8
    assert len(adagrad.losses) == 15
    assert als.losses[-1] <= adagrad.losses[-1]


def test_seeds_starts_and_words_without_counts():
    X = counts(9)
    X[4], X[:, 4] = 0.0, 0.0
    for solver in ("als", "adagrad"):
        first, again, other = (glove(X, 2, solver=solver, sweeps=2, seed=seed) for seed in (3, 3, 4))
        np.testing.assert_array_equal(first.words, again.words)
        assert not np.allclose(first.words, other.words)
        none = glove(X, 2, solver=solver, sweeps=0, seed=3)
        assert none.losses == ()
        assert abs(none.words).max() <= 0.25
    result = glove(X, 2)
    assert (result.words[4] == 0).all()
    assert (result.context_biases[4] == 0).all()
    assert np.isfinite(glove(X[:1], 2).words).all()
    assert glove(np.full((1, 1), 7.0), 1).losses[-1] == pytest.approx(0, abs=1e-4)
    assert np.isfinite(glove(np.array([[1e30, 1e-30]]), 1).losses).all()


def test_results_are_told(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    result = glove(counts(), 2, sweeps=3)
    assert result.to_dict() == {"losses": list(result.losses)}
    assert str(result).startswith("13 words, rank 2; J from ")
    assert result.plot().get_ylabel() == "J"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be"),
        ({"solver": "sgd"}, "solver must be one of als, adagrad"),
        ({"ridge": 0.0}, "ridge must be a number above 0"),
        ({"x_max": -1.0}, "x_max must be"),
        ({"sweeps": -1}, "sweeps must be"),
        ({"device": "cuda:99"}, "cuda:99"),
    ],
)
def test_errors(options, message):
    with pytest.raises(InvalidArgument, match=message):
        glove(counts(), **{"rank": 2} | options)


def test_errors_of_counts():
    with pytest.raises(InvalidArgument, match="no counts above zero"):
        glove(np.zeros((3, 3)), 2)
    with pytest.raises(InvalidArgument, match="finite and not negative"):
        glove(-counts(), 2)
    with pytest.raises(InvalidArgument, match=r"shape \(13, 13\)"):
        parameters().loss(counts(5))

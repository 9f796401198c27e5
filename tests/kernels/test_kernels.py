"""Kernels against their formulas written as loops, their algebra, their descriptions, and what they refuse."""

import json
import math

import pytest
import torch

import heedful
from heedful import (
    Cosine,
    Exponential,
    FeatureMap,
    Gaussian,
    HigherOrder,
    InvalidArgument,
    Kernel,
    Laplace,
    Matern,
    Polynomial,
    RationalQuadratic,
    Relu,
    ReluSquared,
    Sigmoid,
    Silu,
    Softmax,
    Tanh,
    attend,
    masks,
)
from listed import KERNELS, Cauchy, inputs

DOT = lambda q, k: sum(a * b for a, b in zip(q, k, strict=True))  # noqa: E731
NORM = lambda x: math.sqrt(DOT(x, x))  # noqa: E731
APART = lambda q, k: NORM([a - b for a, b in zip(q, k, strict=True)])  # noqa: E731
ELU1 = lambda x: [a + 1 if a > 0 else math.exp(a) for a in x]  # noqa: E731
MATERN32 = lambda a: (1 + a) * math.exp(-a)  # noqa: E731
MATERN52 = lambda a: (1 + a + a * a / 3) * math.exp(-a)  # noqa: E731

# kernel, the coefficient of one pair in plain Python, whether rows are divided by their sum
FORMULAS = [
    (Softmax(), lambda q, k: math.exp(DOT(q, k) / math.sqrt(7)), True),
    (Softmax(0.3), lambda q, k: math.exp(0.3 * DOT(q, k)), True),
    (Gaussian(1.5), lambda q, k: math.exp(-(APART(q, k) ** 2) / (2 * 1.5**2)), True),
    (Gaussian(1.5, normalize=False), lambda q, k: math.exp(-(APART(q, k) ** 2) / (2 * 1.5**2)), False),
    (Gaussian(), lambda q, k: math.exp(-(APART(q, k) ** 2) / (2 * math.sqrt(7))), True),
    (Laplace(2.0), lambda q, k: math.exp(-APART(q, k) / 2.0), True),
    (Laplace(normalize=False), lambda q, k: math.exp(-APART(q, k) / math.sqrt(7)), False),
    (Matern(1.5, 2.0), lambda q, k: MATERN32(math.sqrt(3) * APART(q, k) / 2.0), True),
    (Matern(2.5, normalize=False), lambda q, k: MATERN52(math.sqrt(5) * APART(q, k) / math.sqrt(7)), False),
    (RationalQuadratic(0.7, 1.5), lambda q, k: (1 + APART(q, k) ** 2 / (2 * 0.7 * 1.5**2)) ** -0.7, True),
    (RationalQuadratic(normalize=False), lambda q, k: 1 / (1 + APART(q, k) ** 2 / 14), False),
    (Sigmoid(0.5, -1.0), lambda q, k: 1 / (1 + math.exp(-(0.5 * DOT(q, k) - 1.0))), False),
    (Tanh(0.5, -1.0), lambda q, k: math.tanh(0.5 * DOT(q, k) - 1.0), False),
    (Silu(0.5, 0.2), lambda q, k: (0.5 * DOT(q, k) + 0.2) / (1 + math.exp(-(0.5 * DOT(q, k) + 0.2))), False),
    (Exponential(bias=-0.5), lambda q, k: math.exp(DOT(q, k) / math.sqrt(7) - 0.5), False),
    (Exponential(0.3, 2.0).normalized(), lambda q, k: math.exp(0.3 * DOT(q, k)), True),
    (Relu(1.0), lambda q, k: max(0.0, DOT(q, k)), False),
    (ReluSquared(), lambda q, k: max(0.0, DOT(q, k) / math.sqrt(7)) ** 2, False),
    (Cosine(), lambda q, k: DOT(q, k) / (NORM(q) * NORM(k)), False),
    (Polynomial(3, 0.5, 0.2), lambda q, k: (0.2 * DOT(q, k) + 0.5) ** 3, False),
    (FeatureMap("elu"), lambda q, k: DOT(ELU1(q), ELU1(k)), True),
    (FeatureMap("relu"), lambda q, k: DOT([max(0, a) for a in q], [max(0, a) for a in k]), True),
    (FeatureMap("cosine"), lambda q, k: DOT(q, k) / (NORM(q) * NORM(k)), False),
    (
        Softmax() * Gaussian(2.0),
        lambda q, k: math.exp(DOT(q, k) / math.sqrt(7) - APART(q, k) ** 2 / 8),
        True,
    ),
    (ReluSquared(1.0).normalized(), lambda q, k: max(0.0, DOT(q, k)) ** 2, True),
]


def looped(formula, normalised, query, key, keep):
    rows = []
    for i, q in enumerate(query.tolist()):
        row = [formula(q, k) if keep[i][j] else 0.0 for j, k in enumerate(key.tolist())]
        total = sum(row) if normalised else 1.0
        rows.append([c / total if total else 0.0 for c in row])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("kernel", "formula", "normalised"), FORMULAS, ids=[repr(k) for k, _, _ in FORMULAS])
def test_coefficients_are_the_formula(kernel, formula, normalised):
    query, key, value = (x[0, 0] for x in inputs(11, 13))
    keep = torch.rand(11, 13) > 0.3
    keep[2] = False
    wanted = looped(formula, normalised, query, key, keep.tolist())
    torch.testing.assert_close(attend.coefficients(query, key, keep, kernel=kernel), wanted, rtol=1e-12, atol=1e-12)
    for impl in ("reference", "stream"):
        out = attend(query, key, value, keep, kernel=kernel, impl=impl)
        torch.testing.assert_close(out, wanted @ value, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("order", [4, 6])
@pytest.mark.parametrize("is_causal", [False, True])
def test_higher_order_is_the_product_of_all_factors(order, is_causal):
    query, key, value = inputs(9, 9)
    mix = torch.randn(7, 7, dtype=torch.float64)
    seen = torch.ones(9, 9, dtype=torch.float64).tril() if is_causal else torch.ones(9, 9, dtype=torch.float64)
    count = seen.sum(-1)
    # C[i] written out for every row: n x D x D, and for order 6 the product of two of them.
    moment = torch.einsum("it,bhtd,bhte->bhide", seen, key, key) / count[:, None, None]
    moved = torch.einsum("bhid,bhide,ef->bhif", query, moment, mix)
    if order == 6:
        moved = torch.einsum("bhid,bhide,ef->bhif", moved, moment, mix)
    score = 0.1 * torch.einsum("bhid,bhjd->bhij", moved, key)
    wanted = (score.sigmoid() * seen) @ value
    kernel = HigherOrder(Sigmoid(scale=0.1), order=order, mix=mix)
    for impl in ("reference", "stream", "auto"):
        out = attend(query, key, value, kernel=kernel, is_causal=is_causal, impl=impl)
        torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)


def test_higher_order_sums_over_the_token_between():
    """q C k = mean over t of (q.k_t)(k_t.k_j), by n x n x n work."""
    query, key, value = inputs(5, 5)
    triple = torch.einsum("bhid,bhtd,bhte,bhje->bhitj", query, key, key, key).mean(-2)
    out = attend(query, key, value, kernel=HigherOrder(Polynomial(1, scale=1.0)))
    torch.testing.assert_close(out, triple @ value)


def test_higher_order_never_forms_n_cubed(monkeypatch):
    """At n = 4096, n x n x n doubles would be 512 GiB; the whole is linear here."""
    x = torch.randn(1, 1, 4096, 8)
    kernel = HigherOrder(Polynomial(1))
    assert attend.plan(x, x, x, kernel=kernel, is_causal=True).chosen == "linear"
    assert attend(x, x, x, kernel=kernel, is_causal=True).shape == x.shape


def test_sum_of_kernels_is_sum_of_outputs():
    query, key, value = inputs()
    left, right = Gaussian(2.0), Sigmoid()
    both = attend(query, key, value, kernel=left + right)
    torch.testing.assert_close(both, attend(query, key, value, kernel=left) + attend(query, key, value, kernel=right))


def test_product_multiplies_coefficients():
    query, key, _ = inputs()
    left, right = Softmax(), Relu()
    product = attend.coefficients(query, key, kernel=left * right)
    parts = attend.coefficients(query, key, kernel=left), attend.coefficients(query, key, kernel=right)
    torch.testing.assert_close(product, parts[0] * parts[1])


def test_product_of_exponentials_adds_scores():
    query, key, _ = inputs()
    kernel = Softmax(0.4) * Laplace(2.0)
    score = Softmax(0.4).score(query, key) + Laplace(2.0).score(query, key)
    assert kernel.traits.exponential
    torch.testing.assert_close(attend.coefficients(query, key, kernel=kernel), score.softmax(-1))


def test_rows_are_divided_by_sum_or_count():
    query, key, _ = inputs()
    keep = masks.padding([19, 5])
    normal = attend.coefficients(query, key, keep, kernel=Sigmoid().normalized())
    torch.testing.assert_close(normal.sum(-1), torch.ones(2, 3, 19, dtype=torch.float64))
    raw = attend.coefficients(query, key, keep, kernel=Sigmoid())
    mean = attend.coefficients(query, key, keep, kernel=Sigmoid().averaged())
    torch.testing.assert_close(mean[0], raw[0] / 19)
    torch.testing.assert_close(mean[1], raw[1] / 5)


def test_normalized_uses_the_kernels_own_switch():
    assert Gaussian(2.0, normalize=False).normalized() == Gaussian(2.0)
    assert Softmax().normalized() == Softmax()
    assert Exponential(0.5, bias=2.0).normalized() == Softmax(0.5)
    assert Matern(2.5, normalize=False).normalized() == Matern(2.5)
    assert (Gaussian(2.0, normalize=False) * Softmax()).traits.division == "sum"


def test_random_features_approach_softmax():
    """The error falls like 1 / sqrt(features), the mean over seeds is unbiased, equal seeds give equal features."""
    query, key, _ = (x / 2 for x in inputs())
    exact = attend.coefficients(query, key)
    errors = []
    for count in (64, 4096):
        kernel = FeatureMap("random", features_count=count)
        estimate = attend.coefficients(query, key, kernel=kernel)
        assert torch.equal(estimate, attend.coefficients(query, key, kernel=kernel))
        errors.append(float((estimate - exact).norm() / exact.norm()))
    assert errors[1] < 0.03
    assert errors[1] < errors[0] / 4
    seeds = [FeatureMap("random", False, 64, seed).coefficients(query, key) for seed in range(200)]
    wanted = (query @ key.mT / 7**0.5).exp()
    assert float((torch.stack(seeds).mean(0) / wanted - 1).abs().mean()) < 0.03


def test_orthogonal_directions_op():
    from heedful.kernels.feature_map import orthogonal_directions

    torch.library.opcheck(orthogonal_directions, (11, 7, 3, torch.device("cpu")))
    rows = orthogonal_directions(14, 7, 3, torch.device("cpu"))
    gram = rows[:7] @ rows[:7].T
    torch.testing.assert_close(gram, gram.diagonal().diag())


def test_linear_feature_sizes_are_what_features_return():
    query, key, _ = inputs()
    for make in KERNELS.values():
        kernel = make()
        features = None if isinstance(kernel, HigherOrder) else kernel.features(query, key)
        size = kernel.feature_size(7)
        if features is not None:
            assert features[0].shape[-1] == features[1].shape[-1] == size
            torch.testing.assert_close(features[0] @ features[1].mT, kernel.coefficients(query, key), check_dtype=False)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_data(name):
    kernel = KERNELS[name]()
    again = Kernel.from_json(kernel.to_json())
    assert again == kernel
    assert hash(again) == hash(kernel)
    assert json.loads(kernel.to_json())["type"] == type(kernel).__name__
    assert type(kernel).__name__ in repr(kernel)
    assert kernel != Gaussian(123.0)
    with pytest.raises(AttributeError):
        kernel.anything = 1  # frozen


def test_equality_is_by_value():
    assert Gaussian(2) == Gaussian(2.0)
    assert Gaussian(2.0) != Laplace(2.0)
    assert Gaussian(torch.ones(3)) == Gaussian(torch.ones(3))
    assert Gaussian(torch.ones(3)) != Gaussian(2 * torch.ones(3))
    assert Gaussian(torch.ones(1)) != Gaussian(1.0)
    assert len({Softmax(), Softmax(), Softmax(1.0)}) == 2


def test_traits_hold():
    """What a trait claims is checked on the coefficients themselves."""
    query, key, _ = inputs()
    turn, _ = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64))
    shift = torch.randn(7, dtype=torch.float64)
    invariant = 0
    for name, make in KERNELS.items():
        kernel = make()
        traits = kernel.traits
        base = attend.coefficients(query, key, kernel=kernel)
        if traits.nonnegative:
            assert (base >= 0).all(), name
        if traits.division == "sum":
            # A row of rectified coefficients may be zero throughout.
            torch.testing.assert_close(base.sum(-1), (base != 0).any(-1).double())
        if traits.stationary:
            torch.testing.assert_close(attend.coefficients(query + shift, key + shift, kernel=kernel), base)
        if traits.invariant:
            invariant += 1
            torch.testing.assert_close(attend.coefficients(query @ turn, key @ turn, kernel=kernel), base)
    assert invariant >= 18


def test_a_kernel_of_ones_own_takes_one_method():
    query, key, value = inputs()
    for impl in ("reference", "stream"):
        assert attend(query, key, value, kernel=Cauchy(), impl=impl).shape == (2, 3, 19, 5)

    class Shifted(Kernel):
        shift: float = 1.0

        def score(self, query, key):
            return query @ key.mT + self.shift

    torch.testing.assert_close(attend.coefficients(query, key, kernel=Shifted(2.0)), query @ key.mT + 2.0)
    assert Kernel.from_dict(Shifted(2.0).to_dict()) == Shifted(2.0)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Gaussian(-1.0), "bandwidth must be a positive number"),
        (lambda: Gaussian(0), "bandwidth must be a positive number"),
        (lambda: Gaussian("wide"), "'wide'"),
        (lambda: Gaussian(torch.tensor([1.0, -2.0])), "bandwidth must be a positive number"),
        (lambda: Gaussian(torch.ones(2, 3)), r"shape=\(2, 3\)"),
        (lambda: Laplace(math.nan), "bandwidth"),
        (lambda: Matern(2.0), "smoothness must be one of 1.5, 2.5; got 2.0"),
        (lambda: Matern(bandwidth=0.0), "Matern: bandwidth must be a positive number"),
        (lambda: RationalQuadratic(alpha=-1.0), "alpha must be a positive number"),
        (lambda: RationalQuadratic(normalize=1), "normalize must be True or False; got 1"),
        (lambda: Tanh(bias="low"), "bias must be a finite number"),
        (lambda: Tanh().normalized(), "use averaged"),
        (lambda: Silu().normalized(), "use averaged"),
        (lambda: Sigmoid(bias=math.inf), "bias must be a finite number"),
        (lambda: Softmax(scale=True), "scale must be a finite number"),
        (lambda: Polynomial(0), "degree must be a whole number from 1 on; got 0"),
        (lambda: Polynomial(1.5), "degree must be a whole number from 1 on; got 1.5"),
        (lambda: FeatureMap("tanh"), "one of elu, relu, cosine, random; got 'tanh'"),
        (lambda: FeatureMap("random", features_count=0), "features_count must be a whole number from 1 on"),
        (lambda: FeatureMap("cosine", normalize=True), "a row sum may vanish"),
        (lambda: Cosine().normalized(), "use averaged"),
        (lambda: HigherOrder(order=3), "order must be an even number of at least 4; got 3"),
        (lambda: HigherOrder(order=(2, 4, 4)), "different even numbers, one of at least 4"),
        (lambda: HigherOrder(order=(2,)), "different even numbers, one of at least 4"),
        (lambda: HigherOrder(order=(4, 5)), "different even numbers, one of at least 4"),
        (lambda: HigherOrder(order=6, mix=(torch.eye(2),)), "moves queries 2 times, so mix must be one tensor or 2"),
        (lambda: HigherOrder(order=6, mix=(torch.eye(2), 1.0)), "one such tensor for each move"),
        (lambda: HigherOrder(HigherOrder()), "kernel must be a kernel of pairs"),
        (lambda: HigherOrder(mix=torch.ones(3)), "mix must be a tensor"),
        (lambda: Softmax() * HigherOrder(), "compose inside it"),
        (lambda: Kernel.from_dict({"type": "Nothing"}), "unknown kernel 'Nothing'; known: "),
        (lambda: Kernel.from_dict({"type": "Gaussian", "width": 1}), "cannot be made"),
        (lambda: Kernel.from_dict({"bandwidth": 1}), "entry 'type'"),
        (lambda: Kernel.from_json("{"), "does not parse"),
    ],
)
def test_bad_parameters_are_refused(make, told):
    with pytest.raises(InvalidArgument, match=told):
        make()


def test_public_kernels_are_exported():
    assert set(heedful.kernels.__all__) >= {"Softmax", "Gaussian", "HigherOrder", "Kernel", "Traits"}
    assert all(hasattr(heedful.kernels, name) for name in heedful.kernels.__all__)

"""Coefficients recovered, evaluated from inner products alone, named; averages; and the acceptance checks on operators."""

import time

import pytest
import torch

from heedful import Cosine, Gaussian, InvalidArgument, Polynomial, Relu, Sigmoid, Softmax, attend
from heedful.lens.symmetry import (
    SymmetryBroken,
    check_equivariance,
    coefficient_function,
    identify,
    recover_coefficients,
    symmetrize,
)
from heedful.lens.symmetry.moves import haar
from heedful.nn import KnowledgeAttention

F64 = {"dtype": torch.float64}


def turned(d, seed=3):
    return haar(d, torch.Generator().manual_seed(seed), -1)


def with_knowledge(x, z):
    score = torch.softmax(x @ torch.cat((x, z)).T / 3, -1)
    return score @ torch.cat((x, z)) + 0.5 * x


def test_coefficients_are_recovered():
    """f = C [X; Z] with n + k < d: C to 1e-10, the same for every turn of the input, and moved by permutations."""
    n, k, d = 3, 4, 11
    fixed = torch.randn(n, n + k, **F64)
    x, z = torch.randn(n, d, **F64), torch.randn(k, d, **F64)
    found = recover_coefficients(lambda x, z: fixed @ torch.cat((x, z)), x, z)
    joint = torch.cat((found.A, found.B), -1)
    assert float((joint - fixed).norm() / fixed.norm()) <= 1e-10
    assert (found.rank, found.unique, found.vacuous, found.passed) == (7, True, False, True)
    assert found.residual < 1e-12
    q = turned(d)
    a, b = (recover_coefficients(with_knowledge, x @ p.T, z @ p.T) for p in (torch.eye(d, **F64), q))
    assert float((a.A - b.A).norm() / a.A.norm()) <= 1e-10
    assert float((a.B - b.B).norm() / a.B.norm()) <= 1e-10
    torch.testing.assert_close(a.combine(x, z), with_knowledge(x, z), rtol=1e-10, atol=1e-10)
    order = torch.tensor([2, 0, 1])
    moved = recover_coefficients(with_knowledge, x[order], z)
    torch.testing.assert_close(moved.A, a.A[order][:, order], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(moved.B, a.B[order], rtol=1e-9, atol=1e-10)


def test_a_part_outside_the_span_is_a_counterexample():
    vector = torch.randn(7, **F64)
    x = torch.randn(3, 7, **F64)
    found = recover_coefficients(lambda x: x + vector, x)
    example = found.counterexample
    q = example.element
    torch.testing.assert_close(x @ q.T, x)  # every input is fixed, ...
    assert float((example.expected - example.got).norm()) > 0.1  # ... but not the output
    torch.testing.assert_close(q @ q.T, torch.eye(7, **F64))
    assert torch.linalg.det(q) == pytest.approx(-1.0)
    assert not found.passed
    with pytest.raises(SymmetryBroken, match="reflection that fixes every row"):
        found.raise_if_failed()
    assert found.to_dict()["counterexample"]["move"] == example.move


def test_as_many_vectors_as_dimensions_prove_nothing():
    x = torch.randn(5, 5, **F64)
    with pytest.warns(UserWarning, match=r"vacuous: 5 vectors span all of R\^5"):
        found = recover_coefficients(lambda x: x + 1.0, x)
    assert found.vacuous
    assert not found.passed
    assert found.counterexample is None


def test_coefficients_are_a_function_of_inner_products():
    x, z = torch.randn(3, 8, **F64), torch.randn(2, 8, **F64)
    rows = torch.cat((x, z))
    found = coefficient_function(with_knowledge, d=8, k=2)(rows @ rows.T)
    wanted = recover_coefficients(with_knowledge, x, z)
    assert float((found.A - wanted.A).norm() / wanted.A.norm()) <= 1e-9
    assert float((found.B - wanted.B).norm() / wanted.B.norm()) <= 1e-9
    # A function of 8 dimensions acts on 31, as long as the rank allows it, singular Gram matrices included.
    wide = torch.randn(5, 31, **F64)
    wide[3] = wide[0] + wide[1]
    out = coefficient_function(with_knowledge, d=8, k=2)(wide @ wide.T).combine(wide[:3], wide[3:])
    torch.testing.assert_close(out, with_knowledge(wide[:3], wide[3:]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("gram", "told"),
    [
        (torch.ones(3, 2), "must be square"),
        (torch.tensor([[1.0, 2.0], [0.0, 1.0]]), "symmetric without negative"),
        (-torch.eye(3), "symmetric without negative"),
        (torch.eye(5), "has rank 5, but f takes vectors of size 4"),
    ],
)
def test_bad_gram_matrices_are_refused(gram, told):
    with pytest.raises(InvalidArgument, match=told):
        coefficient_function(lambda x: x, d=4)(gram)


def test_bad_inputs_of_recovery_are_refused():
    x = torch.randn(2, 3, 5, **F64)
    with pytest.raises(InvalidArgument, match="without a batch"):
        recover_coefficients(lambda x: x, x)
    with pytest.raises(InvalidArgument, match=r"z of shape \(3, 4\), expected \(k, 5\)"):
        recover_coefficients(lambda x, z: x, x[0], torch.ones(3, 4))
    with pytest.raises(InvalidArgument, match="not finite"):
        recover_coefficients(lambda x: x / 0, x[0])
    with pytest.raises(InvalidArgument, match="n \\+ k <= d"):
        identify(lambda x: x, d=3, n=4)


LAYERS = {
    "softmax attention": Softmax(),
    "normalised Gaussian": Gaussian(2.0),
    "Gaussian attention": Gaussian(2.0, normalize=False),
    "sigmoid attention": Sigmoid(),
    "relu attention": Relu(),
    "cosine attention": Cosine(),
    "linear attention": Polynomial(1),
    "quadratic attention": Polynomial(2, 1.0),
}


@pytest.mark.parametrize("form", LAYERS)
@pytest.mark.parametrize("coordinates", ["inputs", "knowledge"])
@pytest.mark.parametrize("residual", [False, True])
def test_a_black_box_gets_its_formula(form, coordinates, residual):
    layer = KnowledgeAttention(
        8, kernel=LAYERS[form], coordinates=coordinates, value="identity", residual=residual, **F64
    )
    found = identify(layer, d=8, k=2 if coordinates == "knowledge" else 0)
    assert found.identified
    assert found.best.coordinates == coordinates
    assert found.best.form == ("residual + " if residual else "") + form


def test_learned_queries_and_keys_are_seen_and_strangers_are_not_named():
    layer = KnowledgeAttention(6, coordinates="learned", value="identity", **F64)
    found = identify(layer, d=6, samples=120)
    assert (found.best.form, found.best.coordinates) == ("softmax attention", "learned queries and keys")
    assert found.identified
    assert identify(lambda x: x.mean(0).expand_as(x), d=6).best.form == "constant"
    odd = identify(lambda x: torch.sin(7 * x @ x.T) @ x, d=6)
    assert not odd.identified
    assert "none of the forms" in str(odd)
    outside = identify(lambda x: torch.relu(x), d=6)
    assert not outside.identified
    assert "outside the span" in str(outside)


def test_scale_and_bandwidth_are_read_off():
    assert "softmax_j(0.7 s_ij)" in str(identify(lambda x: torch.softmax(0.7 * x @ x.T, -1) @ x, d=6))
    layer = KnowledgeAttention(6, kernel=Gaussian(2.0), coordinates="inputs", value="identity", **F64)
    assert "softmax_j(-0.125 |x_i - x_j|^2)" in str(identify(layer, d=6))


def test_averaging_makes_symmetric():
    def error(f):
        return check_equivariance(f, d=4, trials=16, shrinking=False).quantile(0.5)

    few, many = error(symmetrize(torch.relu, samples=4)), error(symmetrize(torch.relu, samples=100))
    assert error(torch.relu) > 1.3 * few > 4 * many  # five times less by 1 / sqrt(25), with room for luck
    x = torch.randn(2, 5, 4, **F64, requires_grad=True)
    unchanged = symmetrize(lambda x: x * x.norm(), samples=3)(x)
    torch.testing.assert_close(unchanged, x * x.norm())
    unchanged.sum().backward()
    assert x.grad.isfinite().all()
    with pytest.raises(InvalidArgument, match="translations have no average"):
        symmetrize(torch.relu, "translation")


def test_pictures():
    import matplotlib

    matplotlib.use("Agg")
    x, z = torch.randn(3, 8, **F64), torch.randn(2, 8, **F64)
    assert "knowledge" in recover_coefficients(with_knowledge, x, z).plot().get_xlabel()
    assert "R2" in identify(lambda x: torch.softmax(x @ x.T, -1) @ x, d=6).plot().get_xlabel()


def test_the_fast_gaussian_is_the_kernel_written_out():
    """The fold into softmax attention against exp(-|y - y'|^2 / 2l^2) row-normalised, in three precisions, with gradients."""
    y = torch.randn(1, 2, 37, 8, **F64)
    value = torch.randn(1, 2, 37, 5, **F64)
    kernel = torch.exp(-(y[..., :, None, :] - y[..., None, :, :]).square().sum(-1) / (2 * 1.5**2))
    wanted = kernel / kernel.sum(-1, keepdim=True) @ value
    for dtype, bar in ((torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        rows, mixed = y.to(dtype), value.to(dtype)
        exact = wanted
        if dtype == torch.bfloat16:  # rounding the inputs is not the fold's error
            exact = attend(rows.double(), rows.double(), mixed.double(), kernel=Gaussian(1.5), impl="reference")
        out = attend(rows, rows, mixed, kernel=Gaussian(1.5), impl="sdpa").double()
        assert float((out - exact).abs().max()) <= bar

    def run(y, width):
        return attend(y, y, value[..., :5, :], kernel=Gaussian(width), impl="sdpa")

    small = y[..., :5, :].clone().requires_grad_()
    assert torch.autograd.gradcheck(run, (small, torch.tensor(1.5, **F64, requires_grad=True)))


@pytest.mark.parametrize("is_causal", [False, True])
def test_linear_attention_without_the_matrix(is_causal):
    x = torch.randn(1, 1, 257, 32, **F64)
    value = torch.randn(1, 1, 257, 64, **F64)
    slow, fast = (
        attend(x, x, value, kernel=Polynomial(1), is_causal=is_causal, impl=i) for i in ("reference", "linear")
    )
    assert float((slow - fast).abs().max() / slow.abs().max()) <= 1e-11


def test_linear_attention_is_eight_times_faster_at_4096():
    x, value = torch.randn(1, 1, 4096, 32), torch.randn(1, 1, 4096, 64)

    def seconds(impl):
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            attend(x, x, value, kernel=Polynomial(1), impl=impl)
            best = min(best, time.perf_counter() - began)
        return best

    with torch.no_grad():
        assert seconds("reference") >= 8 * seconds("linear")


@pytest.mark.parametrize("kernel", [Softmax(), Gaussian(2.0), Sigmoid(), Polynomial(1)], ids=repr)
def test_padding_of_any_size_is_unread(kernel):
    layer = KnowledgeAttention(8, 2, kernel=kernel, knowledge=2, **F64).requires_grad_(False)
    x = torch.randn(2, 7, 8, **F64)
    hidden = torch.zeros(2, 7, dtype=torch.bool)
    hidden[:, 5:] = True
    junk = x.clone()
    junk[:, 5:] = 1e6
    before, after = (layer(rows, key_padding_mask=hidden)[:, :5] for rows in (x, junk))
    assert float((before - after).abs().max()) == 0.0
    blind = torch.ones(7, 7, dtype=torch.bool)
    blind[1:] = False
    alone = KnowledgeAttention(8, 2, kernel=kernel, **F64)
    assert (alone(x, attn_mask=blind)[:, 0] == 0).all()


def test_knowledge_attention_compiles_and_exports():
    layer = KnowledgeAttention(8, 2, kernel=Gaussian(2.0), knowledge=2, **F64)
    x, z = torch.randn(2, 7, 8, **F64), torch.randn(3, 8, **F64)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, z), layer(x, z))
    exported = torch.export.export(layer, (x, z)).module()
    torch.testing.assert_close(exported(x, z), layer(x, z))

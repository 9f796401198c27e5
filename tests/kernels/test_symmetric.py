"""D^-1/2 K D^-1/2 against matrices written out, where degrees are huge, vanish, or lie behind a mask."""

import math

import pytest
import torch

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
    ReluSquared,
    Sigmoid,
    Softmax,
    attend,
    masks,
)
from heedful.kernels import Symmetric
from listed import inputs, per_head

N = 11


def window():
    """Rows that see nothing, and a key that others see whose own row is one of these."""
    keep = masks.window(3, 1).dense((N, N)).clone()
    keep[4] = False
    return keep


MASKS = {
    "none": lambda: None,
    "causal": lambda: masks.causal,
    "padding": lambda: masks.padding([N, 5]),
    "left-padding": lambda: masks.causal & ~masks.padding([0, 4]),
    "window": lambda: masks.dense(window()),
    "bias": lambda: torch.linspace(-1, 1, N * N, dtype=torch.float64).view(N, N).masked_fill(~window(), -math.inf),
}
KERNELS = {
    "exponential": lambda: Exponential(bias=per_head(-1.0)),
    "gaussian": lambda: Gaussian(per_head(1.0), normalize=False),
    "matern": lambda: Matern(2.5, 2.0, normalize=False),
    "product": lambda: Exponential(0.3) * Laplace(2.0, normalize=False),
    "sigmoid": lambda: Sigmoid(bias=per_head(-1.0)),
    "relu-squared": ReluSquared,
    "polynomial": lambda: Polynomial(2, offset=0.5),
    "elu": lambda: FeatureMap("elu", normalize=False),
    "sum": lambda: 0.5 * Sigmoid() + Gaussian(2.0, normalize=False),
}


def direct(kernel, query, key, mask):
    """A written out from the inner kernel's own coefficients under the mask."""
    raw = attend.coefficients(query, key, mask, kernel=kernel)
    degree = raw.sum(-1)
    root = torch.where(degree > 0, degree.clamp_min(1e-300) ** -0.5, 0.0)
    return root[..., :, None] * raw * root[..., None, :]


def answers(function, leaves):
    out = function(*leaves)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", KERNELS)
def test_values_and_gradients_are_those_of_the_matrix(name, mask):
    """Every implementation that takes the inner kernel, and the coefficients, to 1e-10."""
    kernel, hiding = KERNELS[name](), MASKS[mask]()
    leaves = [x.requires_grad_() for x in (*inputs(N, N), *(x.detach() for x in kernel.tensors().values()))]
    own = lambda tensors: kernel.with_tensors(dict(zip(kernel.tensors(), tensors, strict=True)))  # noqa: E731
    wanted = answers(lambda q, k, v, *tensors: direct(own(tensors), q, k, hiding) @ v, leaves)
    query, key, value = leaves[:3]
    plan = attend.plan(query, key, value, hiding, kernel=kernel.symmetric())
    served = [one.name for one in plan.considered if one.refusal is None]
    assert {"reference", "stream"} <= set(served)
    for impl in ("auto", *served):
        got = answers(lambda q, k, v, *t, i=impl: attend(q, k, v, hiding, kernel=own(t).symmetric(), impl=i), leaves)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        attend.coefficients(query, key, hiding, kernel=kernel.symmetric()), direct(kernel, query, key, hiding)
    )


def test_it_takes_the_place_of_a_division_of_rows():
    assert Softmax(0.5).symmetric() == Symmetric(Exponential(0.5))
    assert Gaussian(2.0).symmetric() == Symmetric(Gaussian(2.0, normalize=False))
    assert Sigmoid().normalized().symmetric() == Sigmoid().symmetric() == Sigmoid().symmetric().symmetric()
    assert (Softmax() * Gaussian(2.0)).symmetric() == Symmetric(Exponential() * Gaussian(2.0, normalize=False))
    assert HigherOrder(Softmax()).symmetric() == Symmetric(HigherOrder(Exponential()))


def test_the_matrix_is_symmetric_and_not_row_normalised():
    """Negative control: rows divided by their sums are no symmetric matrix."""
    x, _, _ = inputs(N, N)
    both = attend.coefficients(x, x, kernel=Gaussian(2.0).symmetric())
    rows = attend.coefficients(x, x, kernel=Gaussian(2.0))
    torch.testing.assert_close(both, both.mT)
    assert (rows - rows.mT).abs().max() > 1e-2
    assert (both.sum(-1) - 1).abs().max() > 1e-2
    torch.testing.assert_close(torch.linalg.eigvalsh(both)[..., -1], torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("size", [1e3, -1e3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scores_of_a_thousand_do_not_overflow(size, dtype, is_causal):
    """e^1000 is no float: the same coefficients, by subtracting in the exponent, in float64 and by hand."""
    generator = torch.Generator().manual_seed(3)
    x, value = (torch.randn(1, 2, N, 7, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    kernel = Exponential(scale=1.0, bias=size)
    double = x.double()
    score = double @ double.mT + size
    score = score.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -math.inf) if is_causal else score
    degree = score.logsumexp(-1)
    wanted = (score - degree[..., :, None] / 2 - degree[..., None, :] / 2).exp() @ value.double()
    bound = {torch.float64: 1e-11, torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}[dtype]
    for impl in ("auto", "reference", "stream", "sdpa"):
        leaves = [x.clone().requires_grad_(), value.clone().requires_grad_()]
        out = attend(leaves[0], leaves[0], leaves[1], is_causal=is_causal, kernel=kernel.symmetric(), impl=impl)
        assert out.dtype == dtype
        assert (out.double() - wanted).norm() < bound * wanted.norm()
        for gradient in torch.autograd.grad(out.float().square().sum(), leaves):
            assert gradient.isfinite().all()
    if abs(size) > 700 and dtype != torch.float64:
        raw = attend.coefficients(x, x, kernel=kernel)
        # What the degrees would have been made of: as large as a float can be, or nothing.
        assert (raw > 0.3 * torch.finfo(raw.dtype).max).all() or (raw.float() > 1e4).all() or (raw == 0).all()


def test_a_large_spread_of_degrees():
    """Degrees from e^-1000 to e^1000 in one sequence, as lengths of vectors that differ make them."""
    x = torch.randn(1, 1, N, 7, generator=torch.Generator().manual_seed(4))
    x = x / x.norm(dim=-1, keepdim=True) * torch.linspace(0.1, 33.0, N)[:, None]
    score = x.double() @ x.double().mT
    degree = score.logsumexp(-1)
    wanted = (score - degree[..., :, None] / 2 - degree[..., None, :] / 2).exp()
    got = attend.coefficients(x, x, kernel=Exponential(1.0).symmetric())
    assert (got - wanted).abs().max() < 1e-3 * wanted.max()
    torch.testing.assert_close(
        wanted.diagonal(dim1=-2, dim2=-1).max(), torch.ones((), dtype=torch.float64), rtol=1e-2, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_degrees_that_vanish_give_zeros(dtype):
    """Rectified rows of zeros, with zero gradient; small degrees keep their precision."""
    query, value = torch.eye(3, dtype=dtype)[None, None], torch.ones(1, 1, 3, 2, dtype=dtype)
    query = query * torch.tensor([1e-3, 1.0, -1.0], dtype=dtype)[:, None]
    key = torch.eye(3, dtype=dtype)[None, None].clone()
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    out = attend(*leaves, kernel=ReluSquared(scale=1.0).symmetric())
    assert torch.equal(out[0, 0, 2], torch.zeros(2, dtype=dtype))
    torch.testing.assert_close(out[0, 0, :2], torch.ones(2, 2, dtype=dtype), rtol=1e-2, atol=0)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("name", ["exponential", "sigmoid"])
def test_nothing_from_the_future_enters(name):
    query, key, value = inputs(N, N)
    kernel = KERNELS[name]().symmetric()
    before = attend(query, key, value, is_causal=True, kernel=kernel)[..., :7, :]
    for x in (query, key, value):
        x[..., 7:, :] = torch.randn(2, 3, 4, x.shape[-1], dtype=torch.float64)
    after = attend(query, key, value, is_causal=True, kernel=kernel)[..., :7, :]
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    # A degree summed over columns would have changed.
    assert (attend(query, key, value, kernel=kernel)[..., :7, :] - before).abs().max() > 1e-3


@pytest.mark.parametrize("garbage", [1e20, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("name", ["exponential", "gaussian", "matern", "sigmoid", "elu"])
def test_garbage_behind_a_mask_does_not_matter(name, garbage):
    """Keys that nobody sees and rows that see nothing hold it, in queries, keys and values: values and gradients are the same."""
    keep = torch.ones(N, N, dtype=torch.bool)
    keep[2], keep[:, 2] = False, False
    keep[5, 7:] = False
    results = []
    for filler in (0.5, garbage):
        query, key, value = (x.float() for x in inputs(N, N))
        for x in (query, key, value):
            x[..., 2, :] = filler
        for impl in ("auto", "reference", "stream"):
            leaves = [x.clone().requires_grad_() for x in (query, key, value)]
            out = attend(*leaves, masks.dense(keep), kernel=KERNELS[name]().symmetric(), impl=impl)
            assert (out[..., 2, :] == 0).all()
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for clean, littered in zip(results[:3], results[3:], strict=True):
        for one, other in zip(clean, littered, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["exponential", "sigmoid"])
def test_nan_reaches_those_who_see_it_or_its_degree(name):
    """Under a window row 8 sees tokens 5..9: what is NaN at 7 makes NaN of the rows that see 7, and of those that see such a row."""
    query, key, value = inputs(N, N)
    key[..., 7, :] = math.nan
    mask = masks.window(1, 1)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = attend(*leaves, mask, kernel=KERNELS[name]().symmetric())
    bad = torch.tensor([5 <= i <= 9 for i in range(N)])
    assert out[..., bad, :].isnan().all()
    assert out[..., ~bad, :].isfinite().all()
    for gradient in torch.autograd.grad(out[..., ~bad, :].sum(), leaves):
        assert gradient.isfinite().all()
    assert torch.equal(
        attend.coefficients(query, key, mask, kernel=KERNELS[name]().symmetric()).isnan().all(-1)[0, 0], bad
    )


def test_a_factor_stands_outside():
    query, key, value = inputs(N, N)
    kernel, scales = Sigmoid().symmetric(), per_head(-0.3)
    out = attend(query, key, value, kernel=kernel)
    torch.testing.assert_close(attend(query, key, value, kernel=-2.0 * kernel), -2.0 * out)
    torch.testing.assert_close(
        attend(query, key, value, kernel=0.5 * (kernel * scales)), 0.5 * scales[:, None, None] * out
    )
    torch.testing.assert_close(
        attend.coefficients(query, key, kernel=2.0 * kernel), 2.0 * attend.coefficients(query, key, kernel=kernel)
    )
    assert not (-2.0 * kernel).traits.nonnegative
    # Inside, a factor cancels.
    torch.testing.assert_close(attend(query, key, value, kernel=(3.0 * Sigmoid()).symmetric()), out)


def test_shared_heads_and_higher_orders():
    query, key, value = inputs(N, N, 1)
    whole = key.expand(2, 3, N, 7), value.expand(2, 3, N, 5)
    for kernel in (
        Softmax(per_head()).symmetric(),
        Sigmoid(bias=per_head()).symmetric(),
        HigherOrder(Sigmoid()).symmetric(),
    ):
        for mask in (None, masks.causal):
            wanted = attend(query, *whole, mask, kernel=kernel)
            torch.testing.assert_close(attend(query, key, value, mask, kernel=kernel, enable_gqa=True), wanted)
    kernel = HigherOrder(Sigmoid(), mix=torch.eye(7, dtype=torch.float64) / 2)
    torch.testing.assert_close(
        attend.coefficients(query, whole[0], masks.causal, kernel=kernel.symmetric()),
        direct(kernel, query, whole[0], masks.causal),
    )


def test_dropout_acts_on_coefficients_and_not_on_degrees():
    x = torch.randn(1, 1, 401, 4, dtype=torch.float64)
    kernel = Gaussian(2.0).symmetric()
    whole = attend(x, x, torch.ones_like(x), kernel=kernel)
    torch.manual_seed(0)
    for impl in ("reference", "stream", "sdpa"):
        dropped = attend(x, x, torch.ones_like(x), None, 0.5, kernel=kernel, impl=impl)
        ratio = dropped / whole
        assert abs(float(ratio.mean()) - 1) < 0.05
        assert 0.02 < float(ratio.std()) < 0.3


def test_the_plan_counts_the_passes():
    x = torch.randn(1, 2, 64, 16)
    for inner, main, passes in ((Softmax(), "sdpa", 2), (Sigmoid(), "reference", 1)):
        plan = attend.plan(x, x, x, is_causal=True, kernel=inner.symmetric())
        bare = attend.plan(x, x, x, is_causal=True, kernel=inner)
        assert plan.chosen == main
        costs = [next(one.cost for one in p.considered if one.name == "reference").flops for p in (plan, bare)]
        assert costs[0] - costs[1] >= passes * 2 * 2 * 64 * 64 * 17
    far = torch.empty(1, 1, 2**15, 8, device="meta")
    plan = attend.plan(far, far, far, is_causal=True, kernel=FeatureMap("elu").symmetric())
    assert plan.chosen == "linear"
    assert next(one.cost for one in plan.considered if one.name == "linear").bytes < 2**28


def test_it_is_data(tmp_path):
    kernel = 0.5 * Gaussian(torch.tensor([1.0, 2.0]), normalize=False).symmetric()
    again = Kernel.from_json(kernel.to_json())
    assert again == kernel
    assert hash(again) == hash(kernel)
    kernel.save_pretrained(tmp_path)
    assert Kernel.from_pretrained(tmp_path) == kernel
    assert list(kernel.tensors()) == ["kernel.bandwidth"]
    assert kernel.traits.invariant
    assert not HigherOrder(Sigmoid(), mix=torch.eye(3)).symmetric().traits.invariant


@pytest.mark.parametrize(
    ("inner", "mask"),
    [(Softmax(), None), (Sigmoid(), masks.causal), (Gaussian(2.0), masks.causal), (RationalQuadratic(), None)],
    ids=repr,
)
def test_it_compiles_in_one_graph(inner, mask):
    torch.compiler.reset()
    leaves = [x.float().requires_grad_() for x in inputs(N, N)]
    run = lambda *x: attend(*x, mask, kernel=inner.symmetric())  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for one, other in zip(answers(run, leaves), answers(compiled, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_empty_sequences():
    for shape in ((2, 3, 0, 4), (0, 3, 5, 4)):
        x = torch.randn(shape)
        for kernel in (Softmax().symmetric(), Sigmoid().symmetric()):
            assert attend(x, x, x, is_causal=True, kernel=kernel).shape == shape


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda x: attend(x, x[..., :3, :], x[..., :3, :], kernel=Softmax().symmetric()), "as many keys as queries"),
        (lambda x: attend.plan(x, x[..., :3, :], x[..., :3, :], kernel=Softmax().symmetric()), r"query \(1, 1, 5, 4\)"),
        (lambda x: Cosine().symmetric(), "may have negative coefficients"),
        (lambda x: Symmetric(Softmax()), "whose rows are not divided"),
        (lambda x: Symmetric(Sigmoid().symmetric()), "whose rows are not divided"),
        (lambda x: Sigmoid().symmetric().normalized(), "divided by both degrees already"),
        (lambda x: Sigmoid().symmetric() + Softmax(), "compose inside it"),
        (lambda x: Softmax() + Sigmoid().symmetric(), "acts on the whole sequence"),
        (lambda x: Sigmoid().symmetric() * Softmax(), "compose inside it"),
        (lambda x: HigherOrder(Sigmoid().symmetric()), "kernel must be a kernel of pairs"),
        (lambda x: Sigmoid().symmetric().coefficients(x, x), "kernel of the whole sequence"),
        (lambda x: Symmetric(Sigmoid(), factor=math.nan), "factor must be a finite number"),
    ],
)
def test_what_it_refuses(make, told):
    with pytest.raises(InvalidArgument, match=told):
        make(torch.randn(1, 1, 5, 4))

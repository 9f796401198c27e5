"""What a mask hides, another head or another document holds does not matter, whatever it is."""

import math

import pytest
import torch

from heedful import (
    Cosine,
    FeatureMap,
    Gaussian,
    Laplace,
    Polynomial,
    Sigmoid,
    Softmax,
    Unsupported,
    _attend,
    attend,
    masks,
)
from heedful.ops import plain

IMPLEMENTATIONS = ("auto", "reference", "stream", "sdpa", "linear", "triton")
STATIONARY = [Gaussian(2.0), Gaussian(2.0, normalize=False), Laplace(2.0), Softmax() * Gaussian(2.0), 0.5 * Gaussian()]


def served(query, key, value, mask=None, **call):
    """The outputs of all implementations that take the call."""
    outputs = {}
    for impl in IMPLEMENTATIONS:
        try:
            outputs[impl] = attend(query, key, value, mask, impl=impl, **call)
        except Unsupported:
            continue
    assert {"auto", "reference", "stream"} <= set(outputs)
    return outputs


@pytest.mark.parametrize("far", [1e4, 1e9, 1e30])
@pytest.mark.parametrize("kernel", STATIONARY, ids=repr)
def test_a_later_key_far_away_moves_no_earlier_row(kernel, far):
    query, value = torch.randn(2, 1, 2, 8, 16).unbind()
    key = query.clone()
    before = served(query, key, value, is_causal=True, kernel=kernel)
    key[..., -1, :] = far
    after = served(query, key, value, is_causal=True, kernel=kernel)
    for impl, out in before.items():
        torch.testing.assert_close(after[impl][..., :7, :], out[..., :7, :], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", STATIONARY, ids=repr)
def test_another_head_and_another_document_move_nothing(kernel):
    query, key, value = torch.randn(3, 1, 2, 8, 16).unbind()
    ids = torch.arange(8) // 4
    for mask in (None, masks.padding([6]), masks.document(ids)):
        before = served(query, key, value, mask, kernel=kernel)
        moved_query, moved_key = query.clone(), key.clone()
        moved_query[:, 0] += 1e3
        moved_key[:, 0] += 1e3
        for impl, out in served(moved_query, moved_key, value, mask, kernel=kernel).items():
            torch.testing.assert_close(out[:, 1], before[impl][:, 1], rtol=0, atol=1e-6)
    moved_key = key.clone()
    moved_key[..., 4:, :] += 1e4
    for impl, out in served(query, moved_key, value, masks.document(ids), kernel=kernel).items():
        torch.testing.assert_close(out[..., :4, :], before[impl][..., :4, :], rtol=0, atol=1e-6)


@pytest.mark.parametrize("mask", [None, masks.padding([64, 40]), masks.causal, masks.document(torch.arange(64) // 17)])
@pytest.mark.parametrize("kernel", STATIONARY[:3], ids=repr)
def test_distances_far_from_zero_under_any_mask(kernel, mask):
    query, key, value = ((torch.randn(2, 2, 64, 16) + 1000 * (n < 2)).requires_grad_() for n in range(3))
    doubles = [x.detach().double().requires_grad_() for x in (query, key, value)]
    wanted = attend(*doubles, mask, kernel=kernel, impl="reference")
    for impl in ("auto", "reference", "stream"):
        out = attend(query, key, value, mask, kernel=kernel, impl=impl)
        assert (out - wanted).norm() < 1e-5 * wanted.norm()
        for one, other in zip(
            torch.autograd.grad(out.square().sum(), (query, key, value)),
            torch.autograd.grad(wanted.square().sum(), doubles, retain_graph=True),
            strict=True,
        ):
            assert (one - other).norm() < 1e-4 * other.norm()


@pytest.mark.parametrize("queries", [7, 11, 13])
def test_causal_calls_that_are_torchs_own_are_planned_once(queries, monkeypatch):
    """The second call of a signature goes to torch, with the numbers and the gradients of every other way; masks beside it do not."""
    monkeypatch.setattr(plain, "KNOWN", {})
    asked, whole = [], _attend._request
    monkeypatch.setattr(_attend, "_request", lambda *given: asked.append(given) or whole(*given))
    leaves = [torch.randn(2, heads, n, 5, requires_grad=True) for heads, n in ((6, queries), (3, 11), (3, 11))]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    wanted = attend(*doubles, is_causal=True, enable_gqa=True, impl="reference")
    gradients = torch.autograd.grad(wanted.square().sum(), doubles)
    asked.clear()
    for out in (attend(*leaves, is_causal=True, enable_gqa=True) for _ in range(3)):
        assert (out - wanted).abs().max() < 1e-5
        for one, other in zip(torch.autograd.grad(out.square().sum(), leaves), gradients, strict=True):
            assert (one - other).abs().max() < 1e-4
    assert len(asked) == 1
    # The mask is another name for the flag; all of them agree on what else hides.
    assert torch.equal(attend(*leaves, masks.causal, enable_gqa=True), out)
    assert len(asked) == 1
    keep = torch.ones(11, dtype=torch.bool)
    keep[0] = False
    both = attend(*leaves, keep.expand(queries, 11), is_causal=True, enable_gqa=True)
    assert (both[..., 0, :] == 0).all()
    assert len(asked) == 2
    watched = []
    monkeypatch.setattr(_attend, "WATCHERS", [lambda request, output: watched.append((request.mask, output))])
    assert torch.equal(attend(*leaves, is_causal=True, enable_gqa=True), out)
    assert [mask for mask, _ in watched] == [masks.causal]


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
@pytest.mark.parametrize("garbage", [1e30, -1e30, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_known_causal_call_looks_at_its_numbers(which, garbage, layout, monkeypatch):
    """What comes later is hidden also where the signature went to torch before; who sees what is not finite gives NaN."""
    monkeypatch.setattr(plain, "KNOWN", {})
    laid = {
        "contiguous": torch.Tensor.clone,
        "transposed": lambda x: x.mT.contiguous().mT,
        "strided": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    }[layout]
    vectors = list(torch.randn(3, 2, 3, 13, 7).unbind())
    results = []
    for filler in (0.5, garbage):
        vectors[which][..., 11, 5] = filler
        leaves = [laid(x).requires_grad_() for x in vectors]
        out = attend(*leaves, is_causal=True)
        results.append((out, *torch.autograd.grad(out[..., :11, :].square().sum(), leaves)))
    ((known,),) = [plain.KNOWN.values()]
    assert known(*vectors) is None
    (clean, *gradients), (littered, *others) = results
    torch.testing.assert_close(littered[..., :11, :], clean[..., :11, :], rtol=0, atol=1e-6)
    # Keys and values do not hide from a later query: what one of finite but absurd size does to them is its own affair.
    of = slice(1) if which == 0 and math.isfinite(garbage) else slice(3)
    for one, other in zip(gradients[of], others[of], strict=True):
        torch.testing.assert_close(one[..., :11, :], other[..., :11, :], rtol=0, atol=1e-5)
    if not math.isfinite(garbage):
        assert littered[..., 11, :].isnan().all()


@pytest.mark.parametrize("far", [1e4, 1e20, 1e30, math.inf, math.nan])
def test_compiled_rows_do_not_see_what_comes_later(far):
    """Traced, no value decides: the same holds."""
    torch.compiler.reset()
    query, key, value = torch.randn(3, 1, 2, 8, 16).unbind()
    run = torch.compile(
        lambda query, key: attend(query, key, value, is_causal=True, kernel=Gaussian(2.0)),
        fullgraph=True,
        backend="aot_eager",
    )
    before = run(query, key)[..., :7, :]
    leaves = [query.clone().requires_grad_(), key.clone()]
    leaves[1][..., -1, :] = far
    out = run(*leaves)[..., :7, :]
    torch.testing.assert_close(out, before, rtol=0, atol=1e-6)
    assert torch.autograd.grad(out.sum(), leaves[0])[0][..., :7, :].isfinite().all()


@pytest.mark.parametrize("scale", [-1.0, 0.0, torch.tensor(-0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scales_that_are_not_positive(scale, dtype):
    query, key, value = torch.randn(3, 2, 3, 7, 8).to(dtype).unbind()
    kernel = Softmax(scale)
    for mask in (masks.causal, masks.padding([7, 3])):
        wanted = attend(query.double(), key.double(), value.double(), mask, kernel=kernel, impl="reference")
        for out in served(query, key, value, mask, kernel=kernel).values():
            assert (out - wanted).abs().max() < (3e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("garbage", [1e20, 1e30, math.inf, math.nan])
@pytest.mark.parametrize(
    "kernel",
    [Polynomial(2), Gaussian(torch.tensor(1.5)), Laplace(torch.tensor(1.5)), Softmax(), FeatureMap("elu")],
    ids=repr,
)
def test_what_nobody_sees_and_who_sees_nothing(kernel, garbage):
    """Values, and gradients of everything, learned parameters included."""
    shape = (2, 2, 7, 4)
    keep = torch.ones(7, 7, dtype=torch.bool)
    keep[2], keep[:, 5] = False, False
    results = []
    for filler in (0.5, garbage):
        torch.manual_seed(0)
        query, key, value = (torch.randn(shape) for _ in range(3))
        query[..., 2, :], key[..., 5, :], value[..., 5, :] = filler, filler, filler
        for impl in IMPLEMENTATIONS:
            leaves = [x.clone().requires_grad_() for x in (query, key, value)]
            tensors = {name: x.clone().requires_grad_() for name, x in kernel.tensors().items()}
            try:
                out = attend(*leaves, masks.dense(keep), kernel=kernel.with_tensors(tensors), impl=impl)
                rows = leaves[0][..., 3:, :], *leaves[1:]
                also = attend(*rows, masks.padding([5, 5]), kernel=kernel.with_tensors(tensors), impl=impl)
            except Unsupported:
                continue
            loss = out.square().sum() + also.square().sum()
            results.append((impl, out, *torch.autograd.grad(loss, [*leaves, *tensors.values()])))
    half = len(results) // 2
    for (impl, *clean), (_, *littered) in zip(results[:half], results[half:], strict=True):
        for one, other in zip(clean, littered, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=impl)


def test_value_heads_may_differ_from_key_heads():
    query, key, value = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 5, 4), torch.randn(2, 2, 5, 3)
    whole = key.repeat_interleave(2, 1), value.repeat_interleave(3, 1)
    for kernel in (Softmax(), Gaussian(torch.ones(6)), Sigmoid(), FeatureMap("elu"), Polynomial(1)):
        wanted = attend(query, *whole, masks.padding([5, 2]), kernel=kernel)
        for out in served(query, key, value, masks.padding([5, 2]), kernel=kernel, enable_gqa=True).values():
            torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kernel", [Softmax(), Gaussian(2.0), Sigmoid(), FeatureMap("elu"), Softmax() + Sigmoid()], ids=repr
)
def test_nan_in_a_float_mask_poisons_the_rows_that_read_it(kernel):
    query, key, value = (x.requires_grad_() for x in torch.randn(3, 2, 3, 7, 4).unbind())
    bias = torch.zeros(7, 7)
    bias[4, 2], bias[1, 6] = math.nan, math.nan  # the second behind causality
    for out in served(query, key, value, bias, is_causal=True, kernel=kernel).values():
        assert out[..., 4, :].isnan().all()
        others = torch.arange(7) != 4
        assert out[..., others, :].isfinite().all()
        for gradient in torch.autograd.grad(out[..., others, :].sum(), (query, key, value)):
            assert gradient.isfinite().all()
    column = torch.zeros(1, 7)
    column[0, 3] = math.nan
    for out in served(query, key, value, column, is_causal=True, kernel=kernel).values():
        assert out[..., 3:, :].isnan().all()
        assert out[..., :3, :].isfinite().all()


def test_small_features_keep_their_precision():
    """e^x of x = -20 in float32, which elu(x) + 1 rounds to zero."""
    query = torch.full((1, 1, 3, 4), -20.0)
    key, value = torch.randn(1, 1, 5, 4) - 20.0, torch.randn(1, 1, 5, 2)
    for kernel in (FeatureMap("elu"), FeatureMap("elu", normalize=False)):
        wanted = attend(query.double(), key.double(), value.double(), kernel=kernel, impl="reference")
        for out in served(query, key, value, kernel=kernel).values():
            torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=0)


def test_a_kernel_divided_twice_keeps_both_divisions():
    query, key, value = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64).unbind()
    left = attend.coefficients(query, key, kernel=Softmax()) / 5
    right = attend.coefficients(query, key, kernel=Gaussian(1.0, normalize=False))
    kernel = Softmax().averaged() * Gaussian(1.0, normalize=False)
    for out in served(query, key, value, kernel=kernel).values():
        torch.testing.assert_close(out, (left * right) @ value)


@pytest.mark.parametrize("kernel", [Softmax(), Gaussian(2.0), Sigmoid(), FeatureMap("elu")], ids=repr)
def test_an_empty_batch_broadcasts_alike_everywhere(kernel):
    for lead in ((0, 1, 1), (1, 0, 1), (1, 1, 0), (0, 0, 0)):
        parts = [torch.randn(size, 3, 5, 4) for size in lead]
        assert {tuple(out.shape) for out in served(*parts, kernel=kernel).values()} == {(0, 3, 5, 4)}


@pytest.mark.parametrize("kernel", [Cosine(), FeatureMap("cosine")], ids=repr)
def test_a_zero_vector_has_no_direction_and_no_gradient(kernel):
    query = torch.zeros(1, 1, 2, 4, requires_grad=True)
    key, value = torch.randn(2, 1, 1, 3, 4).unbind()
    for out in served(query, key, value, kernel=kernel).values():
        assert (out == 0).all()
        assert (torch.autograd.grad(out.sum(), query)[0] == 0).all()


@pytest.mark.parametrize(("kernel", "garbage"), [(Softmax(), math.nan), (Gaussian(2.0), 1e30)], ids=repr)
def test_what_is_hidden_beside_a_bias_of_low_rank(kernel, garbage):
    """In queries, keys, values and both factors: no output or gradient changes, and who sees a factor that is no number gives NaN."""
    mask = masks.causal & masks.padding([13]) & masks.dense(torch.arange(19)[:, None] != 5)
    tensors = [*torch.randn(3, 1, 2, 19, 16), torch.randn(1, 1, 19, 3), torch.randn(2, 19, 3)]  # the last for each head
    hidden = {
        0: 5,
        3: 5,
        1: slice(13, 19),
        2: slice(13, 19),
        4: slice(13, 19),
    }  # a query that sees nothing, and padding
    for impl in ("reference", "sdpa", "triton"):
        found = []
        for filler in (0.5, garbage):
            leaves = [x.clone() for x in tensors]
            for leaf, rows in hidden.items():
                leaves[leaf][..., rows, :] = filler
            leaves = [x.requires_grad_() for x in leaves]
            out = attend(*leaves[:3], mask & masks.low_rank(*leaves[3:]), kernel=kernel, impl=impl)
            found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        tensors[4][0, 11] = math.nan
        with torch.no_grad():
            out = attend(*tensors[:3], mask & masks.low_rank(*tensors[3:]), kernel=kernel, impl=impl)
        tensors[4][0, 11] = 0.0
        assert out[0, 0, 11:].isnan().all()
        assert out[0, 0, :11].isfinite().all()
        assert out[0, 1].isfinite().all()

"""The operator: against torch's own, its gradients, its memory, its plan, and what it refuses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

import heedful
from heedful import (
    FeatureMap,
    Gaussian,
    HigherOrder,
    InvalidArgument,
    Laplace,
    Polynomial,
    Relu,
    Sigmoid,
    Softmax,
    Unsupported,
    _attend,
    attend,
    masks,
)
from heedful.ops import IMPLEMENTATIONS, linear, plain, stream
from listed import KERNELS, inputs

IMPLS = ("sdpa", "linear", "stream", "reference")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    shared=st.integers(1, 2),
    queries=st.integers(1, 17),
    keys=st.integers(1, 17),
    dim=st.integers(1, 9),
    width=st.integers(1, 9),
    mask=st.sampled_from(["none", "bool", "float", "causal"]),
    lead=st.sampled_from(["4d", "3d", "5d"]),
    scale=st.sampled_from([None, 0.3]),
    impl=st.sampled_from(["auto", "sdpa", "stream", "reference"]),
    seed=st.integers(0, 10**6),
)
def test_softmax_is_scaled_dot_product_attention(
    batch, groups, shared, queries, keys, dim, width, mask, lead, scale, impl, seed
):
    """200 random configurations: values, and the gradients of all inputs and of a float mask."""
    torch.manual_seed(seed)
    before = {"4d": (batch,), "3d": (), "5d": (2, batch)}[lead]
    heads = groups * shared
    query = torch.randn(*before, heads, queries, dim, dtype=torch.float64, requires_grad=True)
    key = torch.randn(*before, groups, keys, dim, dtype=torch.float64, requires_grad=True)
    value = torch.randn(*before, groups, keys, width, dtype=torch.float64, requires_grad=True)
    attn_mask = None
    if mask == "bool":
        attn_mask = torch.rand(*before, 1, queries, keys) > 0.3
    elif mask == "float":
        attn_mask = torch.randn(queries, keys, dtype=torch.float64, requires_grad=True)
    arguments = {"is_causal": mask == "causal", "scale": scale, "enable_gqa": shared > 1}
    leaves = [query, key, value] + ([attn_mask] if mask == "float" else [])
    wanted = scaled_dot_product_attention(query, key, value, attn_mask, **arguments)
    out = attend(query, key, value, attn_mask, impl=impl, **arguments)
    weight = torch.randn_like(wanted)
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)
    found, expected = (torch.autograd.grad((y * weight).sum(), leaves) for y in (out, wanted))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_one_value_by_hand():
    """Two keys with scores 0 and log 3: weights 1/4 and 3/4."""
    query, key = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3.0)]])
    value = torch.tensor([[4.0], [8.0]])
    torch.testing.assert_close(attend(query, key, value, scale=1.0), torch.tensor([[7.0]]))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", KERNELS)
def test_a_row_with_nothing_to_attend_is_zero_with_zero_gradient(name, impl, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK", {"cpu": 64})
    kernel = KERNELS[name]()
    query, key, value = (x.requires_grad_() for x in inputs())
    keep = masks.keys(torch.tensor([[True] * 19, [False] * 19]))
    request = (query, key, value, keep)
    if attend.plan(*request, kernel=kernel).considered[list(IMPLEMENTATIONS).index(impl)].refusal:
        with pytest.raises(Unsupported):
            attend(*request, kernel=kernel, impl=impl)
        return
    out = attend(*request, kernel=kernel, impl=impl)
    assert (out[1] == 0).all()
    out.sum().backward()
    for x in (query, key, value):
        assert (x.grad[1] == 0).all()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("impl", ["sdpa", "stream", "reference"])
def test_floats_at_their_lowest_hide_like_infinity(impl):
    query, key, value = (x.requires_grad_() for x in inputs())
    for hidden in (-torch.inf, torch.finfo(torch.float64).min):
        bias = torch.zeros(19, 19, dtype=torch.float64)
        bias[3] = hidden
        out = attend(query, key, value, bias, impl=impl)
        assert (out[..., 3, :] == 0).all()
        assert (torch.autograd.grad(out.sum(), query)[0][..., 3, :] == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e6])
def test_what_is_hidden_never_leaks(impl, bad):
    """Junk in padded keys and values, and in queries that see nothing, changes no bit of the rest."""
    kernel = FeatureMap("elu") if impl == "linear" else Gaussian(2.0)
    clean = [x.clone() for x in inputs()]
    dirty = [x.clone() for x in clean]
    dirty[1][1, :, 11:] = dirty[2][1, :, 11:] = bad
    outs, gradients = [], []
    for query, key, value in (clean, dirty):
        for x in (query, key, value):
            x.requires_grad_()
        out = attend(query, key, value, masks.padding([19, 11]), kernel=kernel, impl=impl)
        out.sum().backward()
        outs.append(out)
        gradients.append((query.grad, key.grad, value.grad))
    assert torch.equal(outs[0], outs[1])
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("impl", IMPLS)
def test_nan_that_may_be_seen_is_shown(impl):
    """Causal: rows before the NaN are clean, rows from it on are NaN; nothing is silently repaired."""
    kernel = FeatureMap("elu") if impl == "linear" else Softmax()
    query, key, value = inputs()
    wanted = attend(query, key, value, kernel=kernel, is_causal=True, impl=impl)
    value[0, 1, 12, 0] = torch.nan
    out = attend(query, key, value, kernel=kernel, is_causal=True, impl=impl)
    assert out[0, 1, 12:].isnan().all()
    assert torch.equal(out[0, 1, :12], wanted[0, 1, :12])
    assert torch.equal(out[1], wanted[1])


COMPILED = {
    "sdpa": [Softmax(), Gaussian(torch.ones(3)), Softmax() * Gaussian(2.0), HigherOrder()],
    "linear": [FeatureMap("elu"), FeatureMap("random", features_count=11), Polynomial(2, 1.0)],
    "stream": [Gaussian(2.0, normalize=False), Sigmoid(bias=torch.zeros(3)), Relu() + Softmax()],
    "reference": [Laplace(2.0), HigherOrder(Sigmoid(), 6)],
}


@pytest.mark.parametrize("impl", COMPILED)
@pytest.mark.parametrize("mask", ["none", "causal", "lazy", "tensor"])
def test_compiles_without_a_graph_break(impl, mask, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK", {"cpu": 19 * 7 * 3})
    monkeypatch.setattr(stream, "LEAST_ROWS", 11)
    arguments = {
        "none": {},
        "causal": {"is_causal": True},
        "lazy": {"attn_mask": masks.padding([19, 7])},
        "tensor": {"attn_mask": torch.rand(2, 1, 1, 19) > 0.2},
    }[mask]
    if mask == "tensor":
        arguments["attn_mask"][..., 0] = True
    # Every kernel under causality, every mask with one of them.
    for kernel in COMPILED[impl] if mask == "causal" else COMPILED[impl][:1]:
        torch.compiler.reset()
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        leaves = [x.requires_grad_() for x in inputs()]
        out, wanted = (f(*leaves, kernel=kernel, impl=impl, **arguments) for f in (compiled, attend))
        torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)
        ours, theirs = (torch.autograd.grad(y.square().sum(), leaves) for y in (out, wanted))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_compiles_with_inductor():
    """The default backend, once: forward and backward."""
    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True)
    leaves = [x.float().requires_grad_() for x in inputs()]
    out, wanted = (f(*leaves, kernel=Gaussian(2.0), is_causal=True) for f in (compiled, attend))
    torch.testing.assert_close(out, wanted)
    ours, theirs = (torch.autograd.grad(y.sum(), leaves) for y in (out, wanted))
    torch.testing.assert_close(ours, theirs)


def test_exports():
    class Layer(torch.nn.Module):
        def forward(self, query, key, value):
            return attend(query, key, value, kernel=Sigmoid(), is_causal=True)

    query, key, value = inputs()
    exported = torch.export.export(Layer(), (query, key, value)).module()
    torch.testing.assert_close(exported(query, key, value), Layer()(query, key, value))


@pytest.mark.parametrize("name", KERNELS)
def test_gradcheck(name):
    kernel = KERNELS[name]()
    torch.manual_seed(1)
    leaves = [torch.randn(1, 3, 5, 7, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    parameters = kernel.tensors()
    names = list(parameters)

    def run(query, key, value, *tensors):
        made = kernel.with_tensors(dict(zip(names, tensors, strict=True)))
        return attend(query, key, value, masks.causal, kernel=made, impl="reference")

    inputs_ = (*leaves, *(t.detach().clone().requires_grad_() for t in parameters.values()))
    assert torch.autograd.gradcheck(run, inputs_, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs_, fast_mode=True)


def peak_bytes(run):
    """The most memory that `run` holds at once beyond what was there before, as torch's allocator reports it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    changes = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("kernel", [Sigmoid(), Softmax(), Gaussian(2.0, normalize=False)], ids=repr)
def test_stream_memory_is_linear(kernel):
    """Peak beyond inputs at n = 8192, one head, float32, forward and backward: under 64 MiB, where n x n is 256 MiB."""
    leaves = [torch.randn(1, 1, 8192, 64, requires_grad=True) for _ in range(3)]
    mask = masks.causal if isinstance(kernel, Softmax) else None
    peak = peak_bytes(lambda: attend(*leaves, mask, kernel=kernel, impl="stream").sum().backward())
    assert 2**20 < peak < 64 * 2**20


@pytest.mark.parametrize("normalize", [True, False])
def test_gaussian_attention_in_little_memory(normalize):
    """2,048 tokens of 8 heads in float32: the direct kernel to 1e-5, in a tenth of the memory of its coefficients."""
    query, key, value = torch.randn(3, 1, 8, 2048, 16)
    kernel, found = Gaussian(2.0, normalize=normalize), []
    peak = peak_bytes(lambda: found.append(attend(query, key, value, kernel=kernel)))
    assert peak < 0.1 * 4 * 8 * 2048**2
    for head in range(8):
        direct = torch.exp(-torch.cdist(query[0, head].double(), key[0, head].double()).square() / 8)
        direct = direct / direct.sum(-1, keepdim=True) if normalize else direct
        wanted = direct @ value[0, head].double()
        assert float((found[0][0, head] - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_the_memory_measure_sees_what_is_materialised():
    x = torch.randn(1, 1, 1024, 64)
    assert peak_bytes(lambda: attend(x, x, x, kernel=Sigmoid(), impl="reference")) >= 4 * 1024**2


def test_stream_reads_the_mask_bias_by_blocks(monkeypatch):
    monkeypatch.setattr(stream, "BLOCK", {"cpu": 100})
    query, key, value = inputs()
    bias = torch.randn(3, 19, 19, dtype=torch.float64, requires_grad=True)
    ours = torch.autograd.grad(attend(query, key, value, bias, impl="stream").sum(), bias)[0]
    theirs = torch.autograd.grad(attend(query, key, value, bias, impl="reference").sum(), bias)[0]
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 4.0])
def test_the_folded_column_stays_accurate_in_16_bit(dtype, offset):
    """Against the same fold with the squared norm rounded to 16 bit, on inputs that are 16-bit numbers already."""
    torch.manual_seed(2)
    query, key = ((torch.randn(1, 2, 257, 64) + offset).to(dtype) for _ in range(2))
    value = torch.randn(1, 2, 257, 64).to(dtype)
    kernel = Gaussian(2.0)
    wanted = attend(query.double(), key.double(), value.double(), kernel=kernel, impl="reference")
    out = attend(query, key, value, kernel=kernel, impl="sdpa")
    folded = kernel.fold(query, key)
    rounded = (folded.column / folded.scale).to(dtype)[..., None]
    careless = torch.cat((query, torch.ones_like(rounded)), -1), torch.cat((key, rounded), -1)
    rough = scaled_dot_product_attention(*(x.double() for x in (*careless, value)), scale=folded.scale)
    error, rough_error = (float((y.double() - wanted).norm() / wanted.norm()) for y in (out, rough))
    print(f"{dtype} offset {offset}: error {error:.2e}, with a rounded column {rough_error:.2e}")
    assert error < (4e-3 if dtype == torch.bfloat16 else 1e-3)
    assert rough_error > 2 * error


def test_padding_the_head_size_changes_nothing():
    for dim, width in ((7, 5), (8, 8), (64, 3)):
        query, key = torch.randn(2, 1, 2, 11, dim, dtype=torch.float64).unbind()
        value = torch.randn(1, 2, 11, width, dtype=torch.float64)
        out, wanted = (attend(query, key, value, kernel=Gaussian(2.0), impl=impl) for impl in ("sdpa", "reference"))
        torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["elu", "relu-map", "cosine", "dot", "random-map", "averaged", "polynomial-2"])
@pytest.mark.parametrize("pieces", [[1] * 19, [7, 1, 11], [19]])
def test_steps_continue_causal_attention(name, pieces, monkeypatch):
    monkeypatch.setattr(linear, "CHUNK", 4)
    kernel = KERNELS[name]()
    query, key, value = inputs()
    whole = attend(query, key, value, kernel=kernel, is_causal=True, impl="reference")
    state, outs, start = None, [], 0
    for size in pieces:
        part = [x[..., start : start + size, :] for x in (query, key, value)]
        out, state = attend.step(*part, state, kernel=kernel)
        outs.append(out)
        start += size
        assert state.memory.shape[-2:] == (kernel.feature_size(7), 5)
    torch.testing.assert_close(torch.cat(outs, -2), whole, rtol=1e-10, atol=1e-10)
    assert float(state.seen.max()) == 19


def test_step_refuses_what_has_no_state():
    query, key, value = inputs()
    with pytest.raises(InvalidArgument, match="no finite feature map"):
        attend.step(query, key, value, kernel=Softmax())
    with pytest.raises(Unsupported, match="no state"):
        attend.step(query, key, value, kernel=HigherOrder(Polynomial(1)))


@pytest.mark.parametrize("impl", ["sdpa", "stream", "reference"])
def test_dropout_keeps_the_mean(impl):
    query, key = torch.zeros(2, 1, 1, 64, 4).unbind()
    value = torch.ones(1, 1, 64, 2, requires_grad=True)
    torch.manual_seed(0)
    outs = torch.stack([attend(query, key, value, dropout_p=0.5, impl=impl) for _ in range(50)])
    assert float(outs.detach().std()) > 0.05
    assert abs(float(outs.detach().mean()) - 1.0) < 0.05
    outs.sum().backward()
    torch.testing.assert_close(value.grad.sum(), outs.detach().sum(), rtol=1e-2, atol=0.0)


def test_the_named_implementation_never_falls_back():
    query, key, value = inputs()
    with pytest.raises(Unsupported, match=r"impl='sdpa' cannot serve Sigmoid.*not the exponential"):
        attend(query, key, value, kernel=Sigmoid(), impl="sdpa")
    with pytest.raises(Unsupported, match="rows are not normalised"):
        attend(query, key, value, kernel=Gaussian(1.0, normalize=False), impl="sdpa")
    with pytest.raises(Unsupported, match="no finite feature map"):
        attend(query, key, value, impl="linear")
    with pytest.raises(Unsupported, match="differs between queries"):
        attend(query, key, value, masks.window(2), kernel=FeatureMap("elu"), impl="linear")
    with pytest.raises(Unsupported, match="none can be dropped"):
        attend(query, key, value, dropout_p=0.1, kernel=FeatureMap("elu"), impl="linear")
    with pytest.raises(Unsupported, match="fused kernels"):
        attend(query, key, value, impl="triton")


def test_plan_says_what_auto_does():
    query, key, value = torch.randn(3, 1, 8, 1024, 64).unbind()
    for kernel, chosen in [
        (Softmax(), "sdpa"),
        (Gaussian(2.0), "sdpa"),
        (Sigmoid(), "stream"),
        (FeatureMap("elu"), "linear"),
        (HigherOrder(), "sdpa"),
    ]:
        plan = attend.plan(query, key, value, kernel=kernel)
        assert plan.chosen == chosen
        assert [c.name for c in plan.considered] == list(IMPLEMENTATIONS)
        for considered in plan.considered:
            assert (considered.refusal is None) == (considered.cost is not None)
    small = attend.plan(query[..., :16, :], key[..., :16, :], value[..., :16, :], kernel=Sigmoid())
    assert small.chosen == "reference"
    told = str(attend.plan(query, key, value, kernel=Gaussian(2.0)))
    assert "sdpa: folds exactly" in told
    assert "cannot: the kernel has no finite feature map" in told
    assert "FLOP" in told
    assert "iB" in told
    assert plan.to_dict()["kernel"]["type"] == "HigherOrder"
    moving, plain = (
        next(c for c in attend.plan(query, key, value, kernel=kernel).considered if c.name == "reference").cost.flops
        for kernel in (HigherOrder(), Softmax())
    )
    assert plain == 4 * 8 * 1024 * 1024 * 64 < moving < 1.2 * plain


def test_plan_runs_nothing():
    """On the meta device there is nothing to run on."""
    x = torch.empty(1, 2, 64, 8, device="meta")
    assert attend.plan(x, x, x, kernel=Sigmoid()).chosen == "reference"


def test_meta_shapes():
    x = torch.empty(1, 2, 64, 8, device="meta")
    for kernel in (Softmax(), Gaussian(2.0), Sigmoid(), FeatureMap("elu")):
        assert attend(x, x, x, kernel=kernel, is_causal=True).shape == x.shape


def test_no_keys_and_no_queries():
    query, key, value = inputs()
    for kernel in (Softmax(), Gaussian(1.0), Sigmoid(), FeatureMap("elu")):
        assert (attend(query, key[..., :0, :], value[..., :0, :], kernel=kernel) == 0).all()
        assert attend(query[..., :0, :], key, value, kernel=kernel).shape == (2, 3, 0, 5)


X = torch.zeros(2, 3, 5, 4)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: attend([1.0], X, X), "query must be a floating tensor .* got list"),
        (lambda: attend(X.long(), X, X), r"query must be a floating tensor .* got torch.int64 \(2, 3, 5, 4\)"),
        (lambda: attend(X[0, 0, 0], X, X), "query must be a floating tensor"),
        (lambda: attend(X, X.double(), X), "must agree in dtype"),
        (lambda: attend(X, X[0], X), "number of axes"),
        (lambda: attend(X, X[..., :3], X), "query and key must share their last axis; got 4 and 3"),
        (lambda: attend(X, X, X[..., :2, :]), "key and value must be equally many; got 5 and 2"),
        (lambda: attend(X, X[:, :1], X[:, :1]), "pass enable_gqa=True"),
        (lambda: attend(X, X[:, :2], X[:, :2], enable_gqa=True), "must be a multiple of key heads"),
        (lambda: attend(X, X.expand(2, 3, 5, 4)[:1].expand(3, -1, -1, -1), X), "leading axes must broadcast"),
        (lambda: attend(X, X, X, torch.ones(5, 4, dtype=torch.bool)), "does not broadcast"),
        (lambda: attend(X, X, X, torch.ones(5, 5, dtype=torch.long)), "attn_mask must be boolean"),
        (lambda: attend(X, X, X, dropout_p=1.5), r"dropout_p must lie in \[0, 1\); got 1.5"),
        (lambda: attend(X, X, X, impl="fast"), "impl must be 'auto' or one of .*; got 'fast'"),
        (lambda: attend(X, X, X, kernel="softmax"), "kernel must be a heedful kernel"),
        (lambda: attend(X, X, X, kernel=Gaussian(1.0), scale=0.5), "has no scale"),
        (lambda: attend(X, X, X, kernel=Softmax(1.0), scale=0.5), "scale given twice"),
        (lambda: attend(X, X, X, kernel=Gaussian(torch.ones(4))), "has 4 entries; expected 1 or heads = 3"),
        (lambda: attend(X[0, 0], X[0, 0], X[0, 0], kernel=Softmax(torch.ones(1))), "has no axis of heads"),
    ],
)
def test_bad_input_is_refused(make, told):
    with pytest.raises(InvalidArgument, match=told):
        make()


def test_errors_are_value_errors():
    assert issubclass(heedful.InvalidArgument, ValueError)
    assert issubclass(heedful.Unsupported, RuntimeError)
    assert issubclass(heedful.MissingExtra, ImportError)
    assert "pip install 'heedful[hf]'" in str(heedful.MissingExtra("transformers", "hf"))


def test_calls_that_are_torchs_own_are_planned_once(monkeypatch):
    """The second call of a signature goes to torch; whatever else decides is another signature."""
    query, key, value = (torch.randn(2, 6, n, 5) for n in (7, 11, 11))
    few = [x[:, :3].contiguous() for x in (key, value)]
    wanted = attend(query, key, value, impl="reference")
    monkeypatch.setattr(plain, "KNOWN", {})
    asked = []
    whole = _attend._request
    monkeypatch.setattr(_attend, "_request", lambda *given: asked.append(given) or whole(*given))
    first, again = (attend(query, key, value) for _ in range(2))
    assert len(asked) == 1
    assert torch.equal(first, again)
    assert (again - wanted).abs().max() < 1e-5
    # A number in the kernel is as good as one beside it; each way is a signature.
    scaled = [
        out
        for _ in range(2)
        for out in (attend(query, key, value, scale=0.3), attend(query, key, value, kernel=Softmax(0.3)))
    ]
    assert len(asked) == 3
    assert torch.equal(*scaled[:2])
    assert (scaled[0] - attend(query, key, value, scale=0.3, impl="reference")).abs().max() < 1e-5
    shared = [attend(query, *few, enable_gqa=True) for _ in range(2)]
    assert torch.equal(*shared)
    assert (shared[0] - attend(query, *few, enable_gqa=True, impl="reference")).abs().max() < 1e-5
    one = attend(query, key[:, :3], value[:, :2], enable_gqa=True)
    assert torch.equal(one, attend(query, key[:, :3], value[:, :2], enable_gqa=True))
    assert (one - attend(query, key[:, :3], value[:, :2], enable_gqa=True, impl="reference")).abs().max() < 1e-5
    # Gradients, autocast, dropout, masks and other kernels after the same shapes.
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    attend(*inputs).square().sum().backward()
    others = [x.clone().requires_grad_() for x in (query, key, value)]
    attend(*others, impl="reference").square().sum().backward()
    assert all((a.grad - b.grad).abs().max() < 1e-4 for a, b in zip(inputs, others, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(query, key, value).dtype == torch.bfloat16
    assert (
        attend(query, key, value, scale=-0.3) - attend(query, key, value, scale=-0.3, impl="reference")
    ).abs().max() < 1e-5
    assert attend(query, key, value, is_causal=True)[:, :, 0].allclose(value[:, :, 0])
    with pytest.raises(InvalidArgument, match="enable_gqa"):
        attend(query, *few)
    with pytest.raises(InvalidArgument, match="agree in dtype"):
        attend(query, key.double(), value)


def test_the_first_call_of_a_signature_has_the_digits_of_all_later_ones(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, size, 7, dtype=torch.float64, generator=generator) for size in (19, 23, 23))
    for options in ({}, {"kernel": Softmax()}, {"scale": 0.3}, {"is_causal": True}, {"attn_mask": masks.causal}):
        monkeypatch.setattr(plain, "KNOWN", {})
        first, second = (attend(q, k, v, **options) for _ in range(2))
        assert torch.equal(first, second)
        # Nor do they change where somebody watches.
        monkeypatch.setattr(_attend, "WATCHERS", [lambda request, output: None])
        assert torch.equal(first, attend(q, k, v, **options))
        monkeypatch.setattr(_attend, "WATCHERS", [])

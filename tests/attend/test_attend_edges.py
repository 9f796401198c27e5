"""Where operators of this kind go wrong: large numbers, odd masks, transforms, memory that only the process sees."""

import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad

from heedful import (
    Cosine,
    FeatureMap,
    Gaussian,
    HigherOrder,
    InvalidArgument,
    Kernel,
    Laplace,
    Polynomial,
    Relu,
    Sigmoid,
    Softmax,
    Unsupported,
    attend,
    masks,
)
from heedful.ops import stream
from listed import KERNELS, inputs, relative_error

MEASURE = """
import re, sys, torch
from heedful import Sigmoid, Softmax, attend, masks
torch.set_num_threads(2)
small, large = ([torch.randn(1, 1, n, 64, requires_grad=True) for _ in range(3)] for n in (300, 5003))
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
def run(parts):
    for kernel, mask in ((Sigmoid(), None), (Softmax(), masks.causal)):
        attend(*parts, mask, kernel=kernel, impl="stream").sum().backward()
run(small)
before = peak()
run(large)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's peak memory as Linux reports it")
def test_stream_grows_the_process_by_less_than_64_mib():
    """Forward and backward at n = 5003, one head, float32, in a process of its own; n x n alone is 95 MiB."""
    out = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    grown = float(out.stdout)
    print(f"{grown:.0f} MiB")
    assert 1 < grown < 64


def test_stream_under_a_window_costs_what_the_window_shows(monkeypatch):
    """Pairs evaluated in forward and backward grow with n, not with n x n."""
    evaluated = []
    rows = stream.reference.rows

    def counted(kernel, query, key, *rest):
        evaluated.append(query.shape[-2] * key.shape[-2])
        return rows(kernel, query, key, *rest)

    monkeypatch.setattr(stream.reference, "rows", counted)
    monkeypatch.setattr(stream, "BLOCK", {"cpu": 2**14})
    totals = []
    for n in (1024, 4096):
        evaluated.clear()
        x = torch.randn(1, 1, n, 4, requires_grad=True)
        attend(x, x, x, masks.window(16), impl="stream").sum().backward()
        totals.append(sum(evaluated))
    assert totals[1] < 5 * totals[0]
    evaluated.clear()
    attend(x, x, x, masks.padding([100]), impl="stream")
    assert sum(evaluated) == 4096 * 100


@pytest.mark.parametrize("kernel", [Softmax(), Sigmoid(bias=torch.zeros(3)), Gaussian(2.0, normalize=False)], ids=repr)
def test_stream_has_second_derivatives(kernel, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK", {"cpu": 40})
    leaves = [torch.randn(1, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bias = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)

    def run(query, key, value, bias):
        return attend(query, key, value, masks.from_sdpa(bias, True), kernel=kernel, impl="stream")

    assert torch.autograd.gradcheck(run, (*leaves, bias))
    assert torch.autograd.gradgradcheck(run, (*leaves, bias), fast_mode=True)


def test_a_changed_formula_drops_the_parents_shortcuts():
    class Capped(Softmax):
        def score(self, query, key):
            return super().score(query, key).tanh()

    class Near(Gaussian):
        def score(self, query, key):
            return super().score(query, key) / 2

    class Squared(Cosine):
        def activation(self, score):
            return score.square()

    query, key, value = inputs()
    for kernel in (Capped(), Near(2.0), Squared(), Capped() * Gaussian(2.0)):
        wanted = attend(query, key, value, kernel=kernel, impl="reference")
        torch.testing.assert_close(attend(query, key, value, kernel=kernel), wanted)
        for impl in ("sdpa", "linear"):
            with pytest.raises(Unsupported):
                attend(query, key, value, kernel=kernel, impl=impl)


def test_means_count_keys_under_masks_that_broadcast():
    query, key, value = inputs()
    for kernel in (Polynomial(1).averaged(), HigherOrder(Sigmoid())):
        wanted = attend(query, key, value, kernel=kernel)
        causal = attend(query, key, value, kernel=kernel, is_causal=True)
        for mask in (torch.ones(19, 1, dtype=torch.bool), torch.ones(1, 1, dtype=torch.bool)):
            for impl in ("auto", "reference", "stream"):
                torch.testing.assert_close(attend(query, key, value, mask, kernel=kernel, impl=impl), wanted)
                out = attend(query, key, value, mask, is_causal=True, kernel=kernel, impl=impl)
                torch.testing.assert_close(out, causal)


def test_a_float_mask_of_keys_means_the_same_everywhere():
    query, key, value = inputs()
    bias = torch.randn(1, 19, dtype=torch.float64)
    for kernel in (
        0.5 * Polynomial(1),
        Cosine(),
        Polynomial(1).averaged(),
        FeatureMap("elu"),
        2.0 * FeatureMap("cosine"),
    ):
        wanted = attend(query, key, value, bias, kernel=kernel, impl="reference")
        torch.testing.assert_close(attend(query, key, value, bias, kernel=kernel), wanted)


@pytest.mark.parametrize("kernel", [FeatureMap("elu"), Polynomial(2, 1.0), Polynomial(1)], ids=repr)
def test_the_future_does_not_round_the_past(kernel):
    """One huge key at 255 leaves rows before it as they were."""
    query, key, value = (torch.randn(1, 1, 512, 8) for _ in range(3))
    before = attend(query, key, value, kernel=kernel, is_causal=True, impl="linear")[..., :255, :]
    key[..., 255, :] *= 1e7
    value[..., 300, :] *= 1e8
    after = attend(query, key, value, kernel=kernel, is_causal=True, impl="linear")[..., :255, :]
    assert torch.equal(before, after)


def test_step_keeps_nan_where_it_belongs():
    query, key, value = inputs()
    clean = attend.step(query, key, value, kernel=FeatureMap("elu")).output
    key[0, 1, 7] = torch.nan
    out = attend.step(query, key, value, kernel=FeatureMap("elu")).output
    assert torch.equal(out[0, 1, :7], clean[0, 1, :7])
    assert out[0, 1, 7:].isnan().all()
    assert torch.equal(out[1], clean[1])


@pytest.mark.parametrize("size", [1.0, 5.0, 8.0])
def test_random_features_stay_in_range(size):
    query, key, value = (torch.randn(1, 2, 64, 64, requires_grad=True) for _ in range(3))
    kernel = FeatureMap("random")
    for is_causal in (False, True):
        out = attend(query * size, key * size, value, kernel=kernel, is_causal=is_causal, impl="linear")
        assert (out != 0).any(-1).all()
        for gradient in torch.autograd.grad(out.sum(), (query, key, value)):
            assert gradient.isfinite().all()


def test_random_features_step_as_they_attend():
    query, key, value = inputs()
    kernel = FeatureMap("random", features_count=11)
    first = attend.step(query[..., :8, :], key[..., :8, :], value[..., :8, :], kernel=kernel)
    last = attend.step(query[..., 8:, :], key[..., 8:, :], value[..., 8:, :], first.state, kernel=kernel)
    whole = attend(query, key, value, kernel=kernel, is_causal=True, impl="reference")
    torch.testing.assert_close(torch.cat((first.output, last.output), -2), whole)


@pytest.mark.parametrize("mean", [0.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("kernel", [Gaussian(4.0), Gaussian(4.0, normalize=False), Laplace(4.0)], ids=repr)
def test_kernels_of_differences_survive_a_shift(kernel, mean):
    """float32 far from the origin, with junk in padded keys: 1e-5 of the float64 result all the same."""
    query, key, value = ((torch.randn(2, 2, 64, 64) + mean * (n < 2)) for n in range(3))
    key[1, :, 40:] = -1e6
    mask = masks.padding([64, 40])
    wanted = attend(query.double(), key.double(), value.double(), mask, kernel=kernel, impl="reference")
    for impl in ("reference", "stream", "auto"):
        assert relative_error(attend(query, key, value, mask, kernel=kernel, impl=impl), wanted) < 1e-5


def test_float16_gaussian_far_from_the_origin():
    query, key = ((torch.randn(1, 1, 128, 64) + 80).half() for _ in range(2))
    value = torch.randn(1, 1, 128, 64).half()
    wanted = attend(query.double(), key.double(), value.double(), kernel=Gaussian(4.0), impl="reference")
    assert relative_error(attend(query, key, value, kernel=Gaussian(4.0), impl="sdpa"), wanted) < 2e-2


def test_a_fine_mask_is_not_rounded_to_the_query():
    query, key, value = (x.bfloat16() for x in inputs())
    bias = 100 * torch.randn(19, 19)
    wanted = attend(query, key, value, bias, impl="reference")
    assert relative_error(attend(query, key, value, bias, impl="sdpa"), wanted) < 1e-2


def test_two_axes_are_a_sequence_without_heads():
    x = torch.randn(5, 4)
    for kernel in (Gaussian(torch.tensor(2.0)), Softmax(), Sigmoid(), HigherOrder()):
        torch.testing.assert_close(attend(x, x, x, kernel=kernel), attend(x[None], x[None], x[None], kernel=kernel)[0])
    with pytest.raises(InvalidArgument, match="padding: got shape"):
        attend(x, x, x, masks.padding([3]))


def test_tensors_of_ones_own_kernel_are_cut_by_head(monkeypatch):
    class Weighted(Kernel):
        weight: torch.Tensor  # [heads, 1, D]

        def score(self, query, key):
            return (query * self.weight) @ key.mT

    monkeypatch.setattr(stream, "BLOCK", {"cpu": 60})
    monkeypatch.setattr(stream, "LEAST_ROWS", 2)
    query, key, value = inputs()
    kernel = Weighted(torch.randn(3, 1, 7, dtype=torch.float64, requires_grad=True))
    outs = [attend(query, key, value, kernel=kernel, impl=impl) for impl in ("reference", "stream")]
    torch.testing.assert_close(outs[0], outs[1])
    gradients = [torch.autograd.grad(out.sum(), kernel.weight)[0] for out in outs]
    torch.testing.assert_close(gradients[0], gradients[1])
    with pytest.raises(InvalidArgument, match="has 7 entries; expected 1 or heads = 3"):
        attend(query, key, value, kernel=Weighted(torch.randn(7, dtype=torch.float64)))


def test_a_kernel_that_says_nothing_or_too_much():
    class Silent(Kernel):
        pass

    class Flat(Kernel):
        def coefficients(self, query, key):
            return query.sum(-1)

    query, key, value = inputs()
    with pytest.raises(InvalidArgument, match=r"Silent defines no score"):
        attend(query, key, value, kernel=Silent())
    with pytest.raises(InvalidArgument, match=r"Flat gave shape .* expected \(\.\.\., 19, 19\)"):
        attend(query, key, value, kernel=Flat())
    with pytest.raises(InvalidArgument, match=r"a kernel Relu exists in heedful\.kernels\.elementwise"):
        type("Relu", (Kernel,), {})
    with pytest.raises(InvalidArgument, match="cannot be called 'type'"):
        type("Typed", (Kernel,), {"__annotations__": {"type": int}})


def test_kernels_of_the_whole_sequence_compose_inside():
    for make in (
        lambda: HigherOrder() + Relu(),
        lambda: Relu() + HigherOrder(),
        lambda: HigherOrder() * Relu(),
    ):
        with pytest.raises(InvalidArgument, match="compose inside it"):
            make()
    query, key, value = inputs()
    twice = attend(query, key, value, kernel=2 * HigherOrder(Sigmoid()))
    torch.testing.assert_close(twice, 2 * attend(query, key, value, kernel=HigherOrder(Sigmoid())))
    with pytest.raises(InvalidArgument, match=r"mix has shape \(3, 3\); expected \(\.\.\., 7, 7\)"):
        attend(query, key, value, kernel=HigherOrder(mix=torch.eye(3, dtype=torch.float64)))


def test_plan_and_attend_agree_on_kernels_of_the_whole_sequence():
    query, key, value = inputs()
    call = {"attn_mask": torch.randn(1, 19, dtype=torch.float64), "kernel": HigherOrder(FeatureMap("elu"))}
    assert attend.plan(query, key, value, impl="linear", **call).chosen == "linear"
    out, wanted = (attend(query, key, value, impl=impl, **call) for impl in ("linear", "reference"))
    torch.testing.assert_close(out, wanted)


def test_plan_of_a_computed_parameter_goes_to_json():
    query, key, value = inputs()
    width = torch.zeros(3, dtype=torch.float64, requires_grad=True).exp()
    plan = attend.plan(query, key, value, kernel=Gaussian(width)).to_dict()
    assert plan["chosen"] == "sdpa"
    assert plan["kernel"]["bandwidth"]["tensor"] == [1.0] * 3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", KERNELS)
def test_a_float_mask_is_not_read_where_it_is_hidden(name, bad):
    query, key, value = (x.requires_grad_() for x in inputs())
    bias = torch.zeros(19, 19, dtype=torch.float64)
    clean = attend(query, key, value, bias, is_causal=True, kernel=KERNELS[name](), impl="reference")
    bias[3, 7] = bad
    for impl in ("reference", "stream"):
        out = attend(query, key, value, bias, is_causal=True, kernel=KERNELS[name](), impl=impl)
        torch.testing.assert_close(out, clean)
        for gradient in torch.autograd.grad(out.sum(), (query, key, value)):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_of_clean_rows_are_clean(name):
    """NaN in a later key, and in a later query, when the loss reads earlier rows alone."""
    leaves = [x.clone() for x in inputs()]
    leaves[1][:, :, 11] = torch.nan
    leaves[0][:, :, 13] = torch.nan
    for x in leaves:
        x.requires_grad_()
    kernel = KERNELS[name]()
    for impl in ("auto", "stream", "reference"):
        out = attend(*leaves, is_causal=True, kernel=kernel, impl=impl)
        assert out[:, :, 11:].isnan().all()
        for gradient in torch.autograd.grad(out[:, :, :11].sum(), leaves):
            assert gradient.isfinite().all()
    weights = attend.coefficients(*leaves[:2], is_causal=True, kernel=kernel)
    for gradient in torch.autograd.grad(weights[:, :, :11].sum(), leaves[:2]):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("kernel", [Softmax(), Gaussian(2.0), Laplace(2.0), Sigmoid()], ids=repr)
def test_an_empty_row_passes_the_detector_of_nan(kernel):
    leaves = [x.requires_grad_() for x in inputs()]
    for impl in ("reference", "stream"):
        with torch.autograd.detect_anomaly(check_nan=True):
            attend(*leaves, masks.padding([19, 0]), kernel=kernel, impl=impl).sum().backward()
        assert leaves[0].grad.isfinite().all()


def test_lower_right_hides_nothing_from_one_query():
    query, key, value = inputs(1, 23)
    assert torch.equal(attend(query, key, value, masks.lower_right), attend(query, key, value))


@pytest.mark.parametrize("kernel", [Sigmoid(), Laplace(2.0), Softmax(), FeatureMap("elu")], ids=repr)
@pytest.mark.parametrize("is_causal", [False, True])
def test_compiles_once_for_many_lengths(kernel, is_causal):
    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="eager", dynamic=True)
    for n in range(20, 140, 10):
        x = torch.randn(1, 2, n, 8)
        out = compiled(x, x, x, kernel=kernel, is_causal=is_causal)
        torch.testing.assert_close(out, attend(x, x, x, kernel=kernel, is_causal=is_causal))


def test_a_kernel_made_inside_a_compiled_graph():
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(query, key, value, width):
        return attend(query, key, value, kernel=Gaussian(width.exp()))

    query, key, value = inputs()
    width = torch.zeros(3, dtype=torch.float64)
    torch.testing.assert_close(run(query, key, value, width), attend(query, key, value, kernel=Gaussian(1.0)))


@pytest.mark.parametrize("impl", ["sdpa", "stream", "reference"])
def test_transforms_of_torch_func(impl, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK", {"cpu": 60})
    kernel = Gaussian(2.0)
    query, key, value = inputs()

    def loss(query, key, value):
        return attend(query, key, value, is_causal=True, kernel=kernel, impl=impl).square().sum()

    wanted = torch.stack([loss(*parts) for parts in zip(query, key, value, strict=True)])
    torch.testing.assert_close(torch.func.vmap(loss)(query, key, value), wanted)
    by_query = torch.func.grad(loss)(query, key, value)
    leaf = query.clone().requires_grad_()
    torch.testing.assert_close(by_query, torch.autograd.grad(loss(leaf, key, value), leaf)[0])
    samples = torch.func.vmap(torch.func.grad(loss))(query, key, value)
    torch.testing.assert_close(samples, by_query)


@pytest.mark.parametrize("mask", [None, masks.causal], ids=["all", "causal"])
@pytest.mark.parametrize("impl", ["auto", "reference", "stream"])
@pytest.mark.parametrize("kernel", [Softmax(), Gaussian(2.0), Sigmoid(bias=-1.0)], ids=lambda x: type(x).__name__)
def test_derivatives_along_a_direction(kernel, impl, mask):
    """Forward-mode derivatives, which torch's fused attention refuses, are those by differences; kernels without them are refused."""
    vectors = inputs()
    along = [torch.randn_like(x) for x in vectors]

    def at(step):
        return attend(
            *(x + step * y for x, y in zip(vectors, along, strict=True)), mask, kernel=kernel, impl="reference"
        )

    wanted = (at(1e-5) - at(-1e-5)) / 2e-5
    _, found = torch.func.jvp(lambda *x: attend(*x, mask, kernel=kernel, impl=impl), tuple(vectors), tuple(along))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    for _ in range(2):
        attend(*vectors, mask, kernel=kernel)  # settles the call, where it can be
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(x, y) for x, y in zip(vectors, along, strict=True)]
        found = forward_ad.unpack_dual(attend(*dual, mask, kernel=kernel, impl=impl)).tangent
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
        for fused in ("triton", "short", "sdpa"):
            with pytest.raises(Unsupported):
                attend(*dual, mask, kernel=kernel, impl=fused)


@pytest.mark.parametrize("name", ["softmax", "gaussian", "sigmoid", "elu", "higher-order"])
def test_autocast_chooses_the_dtype_and_nothing_else(name):
    """As torch's attention: inputs in the autocast dtype, sums in float32, one output dtype for every implementation."""
    query, key, value = (x.float() for x in inputs())
    kernel = KERNELS[name]()
    rounded = [x.bfloat16() for x in (query, key, value)]
    wanted = attend(*rounded, kernel=kernel, impl="reference")
    with torch.autocast("cpu", torch.bfloat16):
        for impl in ("auto", "reference", "stream"):
            out = attend(query, key.bfloat16(), value, kernel=kernel, impl=impl)
            assert out.dtype == torch.bfloat16
            assert relative_error(out, wanted) < 1e-2


def test_kernels_add_up():
    query, key, value = inputs()
    kernels = [Softmax(), Relu(), Sigmoid()]
    total = attend(query, key, value, kernel=sum(kernels))
    torch.testing.assert_close(total, sum(attend(query, key, value, kernel=kernel) for kernel in kernels))
    bias = torch.randn(19, 19, dtype=torch.float64)
    parts = [attend(query, key, value, bias, kernel=kernel) for kernel in (*kernels, FeatureMap("elu"))]
    torch.testing.assert_close(attend(query, key, value, bias, kernel=sum(kernels) + FeatureMap("elu")), sum(parts))
    torch.testing.assert_close(
        attend(query, key, value, kernel=0.5 * Softmax(), scale=0.3),
        0.5 * attend(query, key, value, scale=0.3),
    )


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda x: attend(x[..., :0], x[..., :0], x), r"query must be .* got torch.float32 \(2, 3, 5, 0\)"),
        (lambda x: attend(x, x[:, :0], x[:, :0], enable_gqa=True), "multiple of key heads"),
        (lambda x: attend(x.to(torch.float8_e5m2), x, x), "16, 32 or 64 bit"),
        (lambda x: attend(x, x, x, dropout_p="0.1"), "dropout_p must lie in"),
        (lambda x: attend(x, x, x, impl=["sdpa"]), "impl must be 'auto'"),
        (lambda x: attend(x, x, x, kernel=FeatureMap("elu"), scale=0.5), "has no scale"),
        (lambda x: attend.step(x, x[..., :3, :], x[..., :3, :], kernel=FeatureMap("elu")), "one key per query"),
        (lambda x: attend.step(*[x[..., :0, :]] * 3, kernel=FeatureMap("elu")), "at least one"),
        (lambda x: attend.step(x, x, x, (1, 2, 3), kernel=FeatureMap("elu")), "the state's memory must have shape"),
        (lambda x: Gaussian(2.0, normalize="no"), "normalize must be True or False"),
        (lambda x: FeatureMap("random", seed="a"), "seed must be a whole number"),
        (lambda x: Gaussian(torch.tensor([torch.inf])), "bandwidth must be a positive number"),
        (lambda x: Kernel.from_dict({"type": "Gaussian", "bandwidth": {"tensor": [1.0], "dtype": "zzz"}}), "'zzz'"),
    ],
)
def test_more_bad_input_is_refused(make, told):
    with pytest.raises(InvalidArgument, match=told):
        make(torch.zeros(2, 3, 5, 4))

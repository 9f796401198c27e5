"""The contract suite on a CUDA device, and what only a device can show."""

from contextlib import contextmanager

import pytest
import torch

import listed as contracts
from heedful import FeatureMap, Gaussian, Polynomial, ReluSquared, Sigmoid, Softmax, attend, masks
from heedful.ops import plain
from listed import CASES, KERNELS, Case, Comparison, accepted, relative_error, results

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run where there is one"),
]

# Sums run in another order there, and bfloat16 gradients of parameters cancel.
BOUNDS = {torch.float64: 1e-9, torch.float32: 5e-5, torch.bfloat16: 1e-1}


def on_device(case):
    moved = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in case.arguments.items()}
    return Case(case.query.cuda(), case.key.cuda(), case.value.cuda(), moved)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kernel_name", KERNELS)
def test_the_contract_holds_on_the_device(kernel_name, dtype):
    for name, impl, case_name, kind in accepted(kernel_name):
        if kind != dtype:
            continue
        case, kernel = CASES[case_name]().to(dtype), KERNELS[name]()
        moved = kernel.with_tensors({n: t.detach().cuda().requires_grad_() for n, t in kernel.tensors().items()})
        out, gradients = results(on_device(case).to(dtype), moved, impl)
        truth = case.to(torch.float64)
        if case_name == "nan-under-mask":
            with torch.no_grad():
                truth.key[1, :, 15:], truth.value[1, :, 15:] = 1.0, 2.0
        wanted, wanted_gradients = results(truth, kernel, "reference")
        assert relative_error(out.cpu(), wanted) < BOUNDS[dtype], (impl, case_name)
        for leaf, gradient in gradients.items():
            assert relative_error(gradient.cpu(), wanted_gradients[leaf]) < BOUNDS[dtype], (impl, case_name, leaf)


@pytest.mark.parametrize("kernel", [Sigmoid(), Gaussian(4.0, normalize=False), Softmax()], ids=repr)
def test_stream_memory_is_linear_on_the_device(kernel):
    leaves = [torch.randn(1, 8, 16384, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(*leaves, masks.causal, kernel=kernel, impl="stream").float().sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2 * 2**30 < 8 * 16384**2 * 4


def test_nothing_waits_for_the_device():
    """Dispatch, masks and the NaN shield read no value back."""
    x = torch.randn(2, 4, 257, 64, device="cuda")
    lengths = torch.tensor([257, 100], device="cuda")
    for kernel in (Softmax(), Gaussian(torch.ones(4, device="cuda")), Sigmoid(), FeatureMap("elu")):
        attend(x, x, x, masks.padding(lengths), kernel=kernel)
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = attend(x, x, x, masks.padding(lengths) & masks.causal, kernel=kernel)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert out.shape == x.shape


def test_gaussian_attention_costs_little_more_memory_than_softmax():
    shape = {"device": "cuda", "dtype": torch.bfloat16}
    query, key, value = torch.randn(3, 1, 8, 16384, 64, **shape).unbind()
    peaks = []
    for kernel in (Softmax(), Gaussian(4.0)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(query, key, value, kernel=kernel)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < peaks[0] + 6 * query.numel() * 2


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_observe_on_the_device(implementation, dtype):
    """Whatever runs, the weights are those of eager, and no record stays on the device."""
    hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    from heedful.lens import observe

    sizes = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = hf.LlamaConfig(vocab_size=31, intermediate_size=96, **sizes)
    torch.manual_seed(0)
    model = hf.LlamaModel(config).to("cuda", dtype).eval()
    inputs = {"input_ids": torch.randint(0, 31, (2, 37), device="cuda"), "use_cache": False}
    inputs["attention_mask"] = torch.ones(2, 37, dtype=torch.long, device="cuda")
    inputs["attention_mask"][1, 30:] = 0
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        plain = model(**inputs)
    seen = observe(model, inputs)
    assert torch.equal(plain.last_hidden_state, seen.output.last_hidden_state)
    for record, weights in zip(seen, expected, strict=True):
        rows = seen.valid[:, None].expand(-1, 4, -1)
        bound = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(record.weights[rows].float(), weights.cpu()[rows].float(), rtol=0, atol=bound)
        assert record.queries.device.type == "cpu"


# Fused kernels. Each combination of kernel, mask and head size compiles for seconds, so every feature meets some kernels.
# Gradients of parameters cancel: theirs is the last bound.
FUSED_BOUNDS = {
    torch.bfloat16: (1e-2, 2e-2, 1e-1),
    torch.float16: (5e-3, 1e-2, 5e-2),
    torch.float32: (1e-5, 1e-5, 1e-4),
}
PER_HEAD = torch.tensor([0.25, 0.5, 0.75, 1.0])
LENGTHS = torch.tensor([257, 100])


def fused_case(name):
    """A kernel, its sizes (queries, keys, key heads, head size), arguments of `attend`, and the shapes they are made of."""
    return {
        "softmax causal": (Softmax(PER_HEAD), (257, 257, 4, 64), lambda: {"is_causal": True}, ()),
        "gaussian": (Gaussian(2.5 + PER_HEAD), (257, 311, 4, 40), lambda: {}, ()),
        "gaussian raw lengths": (
            Gaussian(2.5 + PER_HEAD, normalize=False),
            (257, 257, 4, 64),
            lambda: {"attn_mask": masks.padding(LENGTHS.cuda())},
            (),
        ),
        "sigmoid packed": (
            Sigmoid(PER_HEAD * 0.25, -PER_HEAD),
            (600, 600, 4, 64),
            lambda: {"attn_mask": masks.packed(torch.tensor([0, 90, 90, 400, 577]).cuda()), "is_causal": True},
            (),
        ),
        "relu squared shared window": (
            ReluSquared(PER_HEAD * 0.25).averaged(),  # normalised, it would not feel its scale
            (311, 311, 2, 128),
            lambda: {"attn_mask": masks.window(70, 9), "enable_gqa": True},
            (),
        ),
        "sigmoid low rank": (
            Sigmoid(),
            (257, 311, 4, 64),
            lambda left, right: {"attn_mask": masks.low_rank(left, right)},
            ((4, 257, 5), (2, 1, 311, 5)),
        ),
        "softmax column 256": (Softmax(), (257, 257, 4, 256), lambda bias: {"attn_mask": bias}, ((4, 1, 257),)),
        "polynomial averaged dense": (
            Polynomial(3, PER_HEAD).averaged(),
            (257, 257, 4, 40),
            lambda: {
                "attn_mask": torch.arange(257, device="cuda") % 5 != torch.arange(257, device="cuda")[:, None] % 3
            },
            (),
        ),
    }[name]


FUSED = [
    "softmax causal", "gaussian", "gaussian raw lengths", "sigmoid packed", "relu squared shared window", "sigmoid low rank",
    "softmax column 256", "polynomial averaged dense",
]  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", FUSED_BOUNDS, ids=str)
def test_fused_kernels_on_the_device(name, dtype):
    if dtype == torch.float16 and FUSED.index(name) % 3:
        pytest.skip("compiling takes seconds: every third case in float16, all of them in the other dtypes")
    kernel, (queries, keys, key_heads, size), arguments, shapes = fused_case(name)
    inputs = [torch.randn(2, 4, queries, size), *(torch.randn(2, key_heads, keys, size) for _ in range(2))]
    errors = Comparison(dtype, "cuda").errors(kernel, inputs, arguments, *(torch.randn(shape) for shape in shapes))
    of_output, of_inputs, of_parameters = FUSED_BOUNDS[dtype]
    bounds = {"out": of_output} | dict.fromkeys(("query", "key", "value"), of_inputs)
    assert not {leaf: error for leaf, error in errors.items() if not error < bounds.get(leaf, of_parameters)}


@pytest.mark.parametrize("kernel", [Gaussian(2.0), Gaussian(2.0, normalize=False), Sigmoid()], ids=repr)
def test_fused_kernels_hide_numbers_that_are_not_finite(kernel):
    """16-bit inputs are not shielded before: the kernels do it."""
    query, key, value = (torch.randn(2, 4, 257, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    made = []
    for filler in (1.0, float("nan")):
        key[:, :, 129], value[:, :, 129], key[1, :, 200:] = filler, filler, filler
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        mask = masks.padding(torch.tensor([257, 200]).cuda()) & masks.dense(torch.arange(257, device="cuda") != 129)
        out = attend(*leaves, mask, kernel=kernel, impl="triton")
        made.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "kernel", [Softmax(), Gaussian(2.0), Gaussian(2.0, normalize=False), Sigmoid(), ReluSquared()], ids=repr
)
def test_a_query_that_is_not_finite_spoils_its_own_row_alone(kernel, is_causal):
    """Rows share instructions (the sigmoid its reciprocals), not results."""
    query, key, value = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    wanted = attend(query, key, value, is_causal=is_causal, kernel=kernel, impl="triton")
    query[:, :, 77, 5] = float("nan")
    out = attend(query, key, value, is_causal=is_causal, kernel=kernel, impl="triton")
    assert out[:, :, 77].isnan().all()
    others = torch.arange(256, device="cuda") != 77
    assert relative_error(out[:, :, others], wanted[:, :, others].double()) < 5e-3


@pytest.mark.parametrize("kernel", [Gaussian(), Gaussian(normalize=False), Sigmoid(bias=-20.0), Softmax()], ids=repr)
def test_fused_kernels_on_hard_inputs(kernel):
    """Large norms, equal keys, all-negative scores, one huge bias."""
    query, key, value = torch.randn(3, 1, 4, 257, 64)
    huge = torch.zeros(1, 257).index_fill(1, torch.tensor([5]), 50.0)
    for inputs, arguments in (
        ([query * 6, key, value], ()),
        ([query, key[..., :1, :].expand_as(key), value], ()),
        ([query.abs(), -key.abs(), value], ()),
        ([query, key, value], (lambda bias: {"attn_mask": bias}, huge)),
    ):
        errors = Comparison(torch.bfloat16, "cuda").errors(kernel, inputs, *arguments)
        assert errors["out"] < 1e-2
        assert not {leaf: error for leaf, error in errors.items() if not error < 5e-2}


def test_addresses_beyond_31_bits():
    """70000 x 8 x 64 x 64 numbers; some heads against the reference."""
    query, key, value = (torch.randn(70000, 8, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    assert query.numel() > 2**31
    with torch.no_grad():
        out = attend(query, key, value, is_causal=True, kernel=Sigmoid(), impl="triton")
        for at in (0, 65535, 65536, 69999):
            given = (x[at].double() for x in (query, key, value))
            wanted = attend(*given, is_causal=True, kernel=Sigmoid(), impl="reference")
            assert relative_error(out[at], wanted) < 1e-2


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("kernel", [Sigmoid(), ReluSquared(), Gaussian(normalize=False)], ids=repr)
def test_fused_kernels_take_next_to_no_memory(kernel, is_deterministic):
    """Beside inputs, result and gradients: float32 sums of gradients of queries, where these are added up in any order, and nothing else."""
    leaves = [torch.randn(2, 16, 8192, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    above = torch.randn_like(leaves[0])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with deterministic(is_deterministic):
        out = attend(*leaves, kernel=kernel, impl="triton")
        out.backward(above)
    extra = torch.cuda.max_memory_allocated() - before
    own = sum(x.numel() * x.element_size() for x in (out, *(x.grad for x in leaves)))
    inputs = sum(x.numel() * x.element_size() for x in (*leaves, above))
    sums = 0 if is_deterministic else 4 * leaves[0].numel()
    assert extra - own - sums < 0.05 * (own + inputs)


@contextmanager
def deterministic(on):
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


WHOLE = [Sigmoid(), Sigmoid(bias=-12.0), ReluSquared(), Softmax(), Gaussian(3.0), Gaussian(3.0, normalize=False)]


@pytest.mark.parametrize("length", [512, 1152])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", WHOLE, ids=repr)
def test_gradients_of_many_tiles(kernel, is_causal, size, length):
    """Each call again: results that differ by more than rounding would be a race. In torch's deterministic mode they do not differ at all."""
    x = [torch.randn(4, length, 16, size, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)]
    leaves = [one.requires_grad_() for one in x[:3]]
    truths = [one.detach().double().requires_grad_() for one in leaves]
    wanted = attend(*truths, is_causal=is_causal, kernel=kernel, impl="reference")
    truth = torch.autograd.grad(wanted, truths, x[3].double())

    def gradients():
        return torch.autograd.grad(attend(*leaves, is_causal=is_causal, kernel=kernel, impl="triton"), leaves, x[3])

    for _ in range(5):
        for one, other in zip(gradients(), truth, strict=True):
            assert relative_error(one, other) < 4e-3
    with deterministic(True):
        first, again = gradients(), gradients()
    assert all(map(torch.equal, first, again))
    for one, other in zip(first, truth, strict=True):
        assert relative_error(one, other) < 4e-3


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("kernel", WHOLE, ids=repr)
def test_what_is_not_finite_reaches_the_gradients_it_is_part_of_alone(kernel, size):
    """A query's own gradient and those of all keys; where rows share instructions, not those of other queries. Likewise a key."""
    x = [torch.randn(4, 16, 512, size, device="cuda", dtype=torch.bfloat16) for _ in range(4)]

    def gradients(*given):
        leaves = [one.clone().requires_grad_() for one in given]
        return torch.autograd.grad(attend(*leaves, kernel=kernel, impl="triton"), leaves, x[3])

    right = gradients(*x[:3])
    query = x[0].clone()
    query[1, 2, 77, 5] = float("nan")
    dq, dk, dv = gradients(query, *x[1:3])
    others = torch.arange(512, device="cuda") != 77
    assert dq[1, 2, 77].isnan().all()
    assert dk[1, 2].isnan().all()
    assert dv[1, 2].isnan().all()
    assert relative_error(dq[1, 2, others], right[0][1, 2, others].double()) < 4e-3
    assert relative_error(dk[1, 3], right[1][1, 3].double()) < 4e-3
    if isinstance(kernel, Softmax) or (isinstance(kernel, Gaussian) and kernel.normalize):
        return  # every row's sum has every key in it
    key = x[1].clone()
    key[1, 2, 77, 5] = float("nan")
    dq, dk, dv = gradients(x[0], key, x[2])
    assert dq[1, 2].isnan().all()
    assert dk[1, 2, 77].isnan().all()
    assert relative_error(dv[1, 2, others], right[2][1, 2, others].double()) < 4e-3
    assert relative_error(dk[1, 2, others], right[1][1, 2, others].double()) < 4e-3


def test_fused_kernels_wait_for_nothing():
    """Lists of blocks, lengths and bounds stay on the device, forward and backward."""
    leaves = [torch.randn(2, 40, 257, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    bounds, keep = torch.tensor([0, 90, 257], device="cuda"), torch.rand(257, 257, device="cuda") > 0.5
    for mask in (masks.padding(LENGTHS.cuda()) & masks.causal, masks.packed(bounds) & masks.causal, masks.dense(keep)):
        attend(*leaves, mask, kernel=Sigmoid(), impl="triton").sum().backward()
        for impl in ("triton", "auto", "auto", "auto"):
            torch.cuda.set_sync_debug_mode("error")
            try:
                out = attend(*leaves, mask, kernel=Sigmoid(), impl=impl)
                out.sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert out.isfinite().all()


def test_rows_of_few_keys_keep_their_gradients():
    """The first rows under causality are nearly one-hot: what they gain is a difference of nearly equal numbers."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    leaves = [torch.randn(1, 2, 512, 64, **shape).requires_grad_() for _ in range(3)]
    above = torch.randn(1, 2, 512, 64, **shape)
    for kernel in (Gaussian(), Softmax(), ReluSquared().normalized()):
        found = torch.autograd.grad(attend(*leaves, is_causal=True, kernel=kernel, impl="triton"), leaves, above)
        wide = [x.detach().double().requires_grad_() for x in leaves]
        wanted = torch.autograd.grad(
            attend(*wide, is_causal=True, kernel=kernel, impl="reference"), wide, above.double()
        )
        for one, other in zip(found, wanted, strict=True):
            assert relative_error(one[..., :64, :], other[..., :64, :]) < 1e-2, kernel


# Compiled models. Inductor takes seconds for each: every path once with it, every kernel with the backend that only traces.


def assert_compiles(function, *inputs, dynamic=False, backend="inductor", dtype=torch.bfloat16):
    """A function compiled into one graph, against itself: outputs and gradients, relative to their norms."""
    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = run(*leaves)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    bound = {torch.bfloat16: 3e-2, torch.float32: 1e-4}[dtype]
    for one, other in zip(*results, strict=True):
        assert relative_error(one, other.double()) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("impl", ["auto", "sdpa", "stream", "reference", "linear", "triton"])
def test_every_implementation_compiles_on_the_device(impl, dtype):
    torch.compiler.reset()
    kernel = FeatureMap("elu") if impl == "linear" else Gaussian(torch.linspace(2, 3, 4, device="cuda"))
    query, key, value = torch.randn(3, 2, 4, 512, 64, device="cuda", dtype=dtype).unbind()
    assert_compiles(lambda *x: attend(*x, is_causal=True, kernel=kernel, impl=impl), query, key, value, dtype=dtype)


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_compiles_on_the_device(name):
    torch.compiler.reset()
    kernel = KERNELS[name]()
    kernel = kernel.with_tensors({n: t.detach().cuda().float() for n, t in kernel.tensors().items()})
    query, key, value = (x.cuda().bfloat16() for x in contracts.inputs())
    mask = masks.padding(torch.tensor([19, 7], device="cuda")) & masks.causal
    assert_compiles(lambda *x: attend(*x, mask, kernel=kernel), query, key, value, backend="aot_eager")


@pytest.mark.parametrize("kernel", [Sigmoid(), Gaussian(2.0), FeatureMap("elu"), Softmax()], ids=repr)
def test_one_graph_serves_many_lengths_on_the_device(kernel):
    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for n in (2100, 2200, 2345):
        x = torch.randn(2, 4, n, 64, device="cuda", dtype=torch.bfloat16)
        out = compiled(x, x, x, kernel=kernel, is_causal=True)
        assert relative_error(out, attend(x, x, x, kernel=kernel, is_causal=True).double()) < 1e-2


TIMED = ["rotary", "bias", "decay", "bucket", "add", "concat", "concat_mlp", "residual"]


TABLES = ["rows", "columns", "inducing"]


@pytest.mark.parametrize("which", ["attention", "encoder", "primal", "knowledge", "invariant", *TIMED, *TABLES])
def test_layers_train_compiled_under_autocast(which):
    """A step of training, as people write it: the loss falls, and is that of the layer that was not compiled."""
    from heedful.nn import (
        Attention,
        ColumnAttention,
        DatapointAttention,
        Encoder,
        InvariantCoefficients,
        Knowledge,
        PrimalAttention,
        TimeAttention,
    )

    losses = []
    # Unix seconds, the last events padding.
    at = {"times": 1.4e9 + torch.rand(4, 1024, dtype=torch.float64, device="cuda").cumsum(1), "is_causal": True}
    at["key_padding_mask"] = torch.arange(1024, device="cuda").expand(4, -1) >= 1000
    call = at if which in TIMED else {}
    if which in ("rows", "inducing"):
        call = {"key_padding_mask": at["key_padding_mask"]}
    for compiling in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        layer = {
            "attention": lambda: Attention(256, 4, kernel=Sigmoid(bias=-6.0)),
            "encoder": lambda: Encoder(256, 4, [Gaussian(3.0), Softmax()]),
            "primal": lambda: PrimalAttention(256, 4, rank=16, max_len=1024),
            "knowledge": lambda: Encoder(
                256, 4, [Knowledge(knowledge=8, kernel=[Softmax(), Gaussian(4.0), Sigmoid(), Softmax()])]
            ),
            "invariant": lambda: InvariantCoefficients(units=4),
            "rotary": lambda: TimeAttention(256, 4, rotate_values=True),
            "rows": lambda: DatapointAttention(8, 32, 4, dropout=0.0),
            "columns": lambda: ColumnAttention(32, 4, dropout=0.0),
            "inducing": lambda: DatapointAttention(8, 32, 4, dropout=0.0, inducing=64),
        }.get(which, lambda: TimeAttention(256, 4, which))().cuda()
        run = torch.compile(layer, fullgraph=True) if compiling else layer
        optimizer = torch.optim.AdamW(layer.parameters(), 1e-3)
        x, target = torch.randn(2, 4, 1024, *((8, 32) if which in TABLES else (256,)), device="cuda").unbind()
        losses.append([])
        for _ in range(3):
            with torch.autocast("cuda", torch.bfloat16):
                out = run(x, **call)
                out = out[0] if isinstance(out, tuple) else out
            loss = (out.float() - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1][2] < losses[1][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_rows_than_the_device_launches_at_once(dtype):
    """Values and gradients of the cells of 70,001 rows, each row by itself, against float64 on the CPU."""
    from heedful.nn import ColumnAttention

    torch.manual_seed(0)
    layer, table = ColumnAttention(32, 4, dropout=0.0, dtype=dtype), torch.randn(1, 70_001, 5, 32, dtype=dtype)
    some, found = torch.tensor([0, 65_534, 65_535, 70_000]), []
    for device, kind in (("cuda", dtype), ("cpu", torch.float64)):
        layer.to(device, kind)
        x = (table if device == "cuda" else table[:, some]).to(device, kind).requires_grad_()
        out = layer(x)[:, some if device == "cuda" else slice(None)]
        gradients = torch.autograd.grad(out.double().square().sum(), [x, *layer.parameters()])
        taken = gradients[0][:, some] if device == "cuda" else gradients[0]
        found.append([part.cpu() for part in (out, taken, *gradients[1:])])
    bounds = (1e-5, 1e-4) if dtype == torch.float32 else (1e-2, 5e-2)
    for at, (one, other) in enumerate(zip(*found, strict=True)):
        assert relative_error(one, other) < bounds[at > 0], at


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("interaction", TIMED)
def test_attention_at_times_on_the_device(interaction, dtype):
    """Values and every gradient against float64 on the CPU: two streams, causal, padding that holds NaN, Unix seconds."""
    from heedful.nn import TimeAttention

    torch.manual_seed(0)
    layer = TimeAttention(128, 2, interaction, rotate_values=interaction == "rotary", dtype=dtype)
    n, origin = 257, 0.0 if interaction in ("add", "concat", "concat_mlp", "residual") else 1.4e9
    inputs = torch.randn(2, 2, n, 128, dtype=dtype)
    padding = torch.arange(n) >= torch.tensor([n, 200])[:, None]
    times = (origin + torch.rand(2, n, dtype=torch.float64).cumsum(1)).masked_fill(padding, float("nan"))
    found = []
    for device, kind in (("cuda", dtype), ("cpu", torch.float64)):
        layer.to(device, kind)
        x, key = (part.to(device, kind).requires_grad_() for part in inputs)
        at, hidden = times.to(device), padding.to(device)
        out = layer(x, at + 1, key, at, key_padding_mask=hidden, is_causal=True)[~hidden]
        gradients = torch.autograd.grad(out.double().square().sum(), [x, key, *layer.parameters()])
        found.append([part.cpu() for part in (out, *gradients)])
    bounds = (1e-5, 1e-4) if dtype == torch.float32 else (1e-2, 5e-2)
    for at, (one, other) in enumerate(zip(*found, strict=True)):
        assert relative_error(one, other) < bounds[at > 0], at


@pytest.mark.parametrize("kernel", [Sigmoid(bias=-3.0), Gaussian(3.0), Softmax()], ids=repr)
def test_a_model_of_hugging_face_compiles_after_use(kernel):
    hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    from heedful.bridges.transformers import use

    torch.compiler.reset()
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=97, intermediate_size=256, **sizes)).to(
        "cuda", torch.bfloat16
    )
    use(model, kernel)
    ids = torch.randint(0, 97, (2, 1024), device="cuda")
    found = []
    for run in (model, torch.compile(model)):
        model.zero_grad()
        loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        weight = model.model.layers[0].self_attn.q_proj.weight
        found.append((loss.detach(), weight.grad.clone()))
    for one, other in zip(*found, strict=True):
        assert relative_error(one, other.double()) < 3e-2


@pytest.mark.parametrize("impl", ["auto", "sdpa", "triton", "stream", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_hidden_moves_nothing_on_the_device(impl, dtype):
    """A later key, another head, another document, whatever they hold; gradients of learned bandwidths included."""
    bandwidth = torch.full((2,), 2.0, device="cuda", requires_grad=True)
    query, key, value = torch.randn(3, 2, 2, 257, 64, device="cuda").to(dtype).unbind()
    keep = torch.ones(257, 257, dtype=torch.bool, device="cuda").tril()
    keep[:, 100], keep[50] = False, False
    found = []
    for garbage in (0.5, 1e4, 1e30, float("nan")):
        leaves = [x.clone() for x in (query, key, value)]
        leaves[0][..., 50, :], leaves[1][..., 100, :], leaves[2][..., 100, :] = garbage, garbage, garbage
        leaves[1][..., 200, :] = garbage if abs(garbage) < 1e20 else 0.5
        leaves = [x.requires_grad_() for x in leaves]
        kernel = Gaussian(bandwidth)
        out = attend(*leaves, masks.dense(keep), kernel=kernel, impl=impl)[..., :200, :]
        gradients = torch.autograd.grad(out.float().square().sum(), [leaves[0], leaves[2], bandwidth])
        found.append([out, gradients[0][..., :200, :], gradients[1], gradients[2]])
    for other in found[1:]:
        for n, (one, two) in enumerate(zip(found[0], other, strict=True)):
            assert two.isfinite().all()
            bound = 1e-6 if n == 0 and dtype == torch.float32 else 1e-4 if dtype == torch.float32 else 1e-2
            assert (one.double() - two.double()).abs().max() <= bound * max(1.0, float(one.abs().max()))


def test_a_tracker_leaves_training_on_a_device_as_it_was():
    """Dropout draws from the device's own random state, BatchNorm keeps its statistics there."""
    from heedful.lens.transport import TransportTracker

    def trained(track):
        torch.manual_seed(0)
        parts = torch.nn.Linear(11, 11), torch.nn.BatchNorm1d(11), torch.nn.Dropout(0.4), torch.nn.Linear(11, 3)
        model, x = torch.nn.Sequential(*parts).cuda(), torch.randn(29, 11)
        tracker = TransportTracker(model, "0", x) if track else None
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(x.cuda()).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if tracker is not None:
                tracker.record()
                assert tracker.trajectory.shape[1:] == (29, 11)
        return losses, [value.cpu() for value in model.state_dict().values()]

    (losses, state), (seen, seen_state) = trained(False), trained(True)
    assert seen == losses
    assert all(map(torch.equal, state, seen_state))


FORMS = {
    "heads apart": lambda: torch.randn(4, 16, 16, 193, 64, device="cuda", dtype=torch.bfloat16).unbind(),
    "heads beside one another": lambda: torch.randn(16, 193, 4, 16, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 3).unbind(2),
    "whole blocks": lambda: torch.randn(4, 8, 16, 256, 128, device="cuda", dtype=torch.bfloat16).unbind(),
    "whole blocks beside one another": lambda: torch.randn(16, 384, 4, 16, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 3).unbind(2),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "kernel", [Softmax(), Sigmoid(), Sigmoid(bias=-3.0), ReluSquared(), Gaussian(3.0), Gaussian(3.0, normalize=False)], ids=repr
)  # fmt: skip
def test_later_calls_of_a_form_are_as_right_as_the_first(kernel, is_causal, name):
    """What is kept of a call is its form alone: other numbers, other tensors, one tensor in three places, far-off ones."""
    for at in range(5):
        *drawn, above = FORMS[name]()
        if at == 2:
            drawn = [drawn[0]] * 3
        if at == 3:
            drawn = [drawn[0] * 30, *drawn[1:]]  # beyond what a first pass takes
        leaves = [x.detach().requires_grad_() for x in drawn] if at != 2 else [drawn[0].detach().requires_grad_()] * 3
        truths = [x.detach().double().requires_grad_() for x in leaves]
        if at == 2:
            truths = [truths[0]] * 3
        out = attend(*leaves, is_causal=is_causal, kernel=kernel)
        with torch.no_grad():
            assert torch.equal(attend(*leaves, is_causal=is_causal, kernel=kernel), out)
        wanted = attend(*truths, is_causal=is_causal, kernel=kernel, impl="reference")
        assert relative_error(out, wanted) < 1e-2, at
        count = 1 if at == 2 else 3
        gradients = torch.autograd.grad(out, leaves[:count], above)
        for one, other in zip(gradients, torch.autograd.grad(wanted, truths[:count], above.double()), strict=True):
            assert relative_error(one, other) < 2e-2, at


def cuts(length, count):
    return torch.cat(
        (torch.tensor([0]), torch.randperm(length - 1)[: count - 1].sort().values + 1, torch.tensor([length]))
    ).cuda()


KINDS = {
    "padding": lambda n: masks.padding(torch.randint(1, n + 1, (16,)).cuda()),
    "keys": lambda n: masks.keys(torch.rand(16, n, device="cuda") < 0.5) & masks.causal,
    "packed": lambda n: masks.packed(cuts(n, 3)) & masks.causal,
    "window": lambda n: masks.window(50, 20),
    "boolean": lambda n: torch.rand(16, 1, n, n, device="cuda") < 0.5,
    "blocks": lambda n: masks.blocks(torch.rand(1, 16, 4, 4, device="cuda") < 0.6, -(-n // 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "kernel", [Softmax(), Sigmoid(bias=-3.0), Gaussian(3.0), Gaussian(3.0, normalize=False)], ids=repr
)
@pytest.mark.parametrize("length", [193, 256])
def test_later_masks_of_a_kind_are_as_right_as_the_first(kernel, name, length):
    """What is kept is the kind of mask, and with a mask what kernels read of it: other masks, the same one again, from another stream."""
    side = torch.cuda.Stream()
    for at in range(5):
        if at != 3:
            mask = KINDS[name](length)
        *drawn, above = torch.randn(4, 16, 16, length, 64, device="cuda", dtype=torch.bfloat16).unbind()
        leaves = [x.requires_grad_() for x in drawn]
        truths = [x.detach().double().requires_grad_() for x in leaves]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if at == 4 else torch.cuda.current_stream()):
            out = attend(*leaves, mask, kernel=kernel)
            gradients = torch.autograd.grad(out, leaves, above)
        torch.cuda.current_stream().wait_stream(side)
        wanted = attend(*truths, mask, kernel=kernel, impl="reference")
        assert relative_error(out, wanted) < 1e-2, at
        for one, other in zip(gradients, torch.autograd.grad(wanted, truths, above.double()), strict=True):
            assert relative_error(one, other) < 2e-2, at


def test_a_graph_reads_a_mask_when_it_is_replayed():
    """What was kept of it before is of what it was then."""
    ids = torch.randint(0, 3, (16, 256), device="cuda").sort(-1).values
    mask = masks.document(ids) & masks.causal
    x = torch.randn(3, 16, 16, 256, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        attend(*x.unbind(), mask, kernel=Sigmoid())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*x.unbind(), mask, kernel=Sigmoid())
    for _ in range(2):
        ids.copy_(torch.randint(0, 3, (16, 256)).sort(-1).values)
        graph.replay()
        wanted = attend(*x.double().unbind(), mask, kernel=Sigmoid(), impl="reference")
        assert relative_error(out, wanted) < 1e-2
        assert relative_error(attend(*x.unbind(), mask, kernel=Sigmoid()), wanted) < 1e-2


def test_a_graph_keeps_the_numbers_of_its_kernels(monkeypatch):
    """Also when so many signatures were seen that all were forgotten, and their memory was given to others."""
    monkeypatch.setattr(plain, "MOST", 1)
    x = torch.randn(3, 16, 16, 256, 64, device="cuda", dtype=torch.bfloat16)
    kernel = Sigmoid(bias=-3.125)
    for _ in range(2):
        attend(*x.unbind(), kernel=kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*x.unbind(), kernel=kernel)
    attend(*x[:, :8].unbind(), kernel=kernel)
    torch.cuda.empty_cache()
    others = [torch.full((128,), 7.0, device="cuda") for _ in range(4096)]
    graph.replay()
    assert relative_error(out, attend(*x.double().unbind(), kernel=kernel, impl="reference")) < 1e-2
    assert len(others) == 4096


def test_numbers_of_a_kernel_wait_for_no_other_stream():
    x = torch.randn(3, 16, 16, 256, 64, device="cuda", dtype=torch.bfloat16)
    attend(*x.unbind(), kernel=Sigmoid(bias=-2.0))  # compiled
    kernel, (first, second) = Sigmoid(bias=-2.75), (torch.cuda.Stream(), torch.cuda.Stream())
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(10**9)
        attend(*x.unbind(), kernel=kernel)
    with torch.cuda.stream(second):
        found = [attend(*x.unbind(), kernel=kernel) for _ in range(2)]
    torch.cuda.synchronize()
    wanted = attend(*x.double().unbind(), kernel=kernel, impl="reference")
    for out in found:
        assert relative_error(out, wanted) < 1e-2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mask", [None, masks.padding(torch.arange(16) * 16 + 1)], ids=["none", "padding"])
def test_another_gpu_than_the_current_one(mask):
    for _ in range(3):
        x = torch.randn(3, 16, 16, 256, 64, device="cuda:1", dtype=torch.bfloat16).requires_grad_()
        out = attend(*x.unbind(), mask, kernel=Sigmoid(bias=-2.0))
        (gradient,) = torch.autograd.grad(out.float().square().sum(), x)
        exact = x.detach().double().requires_grad_()
        wanted = attend(*exact.unbind(), mask, kernel=Sigmoid(bias=-2.0), impl="reference")
        (other,) = torch.autograd.grad(wanted.square().sum(), exact)
        assert relative_error(out, wanted) < 1e-2
        assert relative_error(gradient, other) < 2e-2


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("filler", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize(
    "kernel", [Softmax(), Sigmoid(), Sigmoid(bias=-10.0), ReluSquared(), Gaussian(3.0), Gaussian(3.0, normalize=False)], ids=repr
)  # fmt: skip
def test_what_comes_later_is_hidden(kernel, filler, size):
    """Causality alone, in whole blocks: a key or a value that no query sees yet moves no result and no gradient of theirs."""
    x = [torch.randn(16, 16, 256, size, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    made = []
    for at in (1.0, filler):
        query, key, value = (one.clone() for one in x[:3])
        key[1, 2, 201], value[3, 4, 77] = at, at
        leaves = [one.requires_grad_() for one in (query, key, value)]
        out = attend(*leaves, is_causal=True, kernel=kernel)
        seen = torch.ones_like(out)
        seen[1, 2, 201:], seen[3, 4, 77:] = 0.0, 0.0
        gradients = torch.autograd.grad(out, leaves, torch.where(seen.bool(), x[3], 0.0))
        made.append((out, gradients[0], seen.bool()))
    # Blocks with something that is not finite are computed in another order, to the same precision.
    for one, other in zip(made[0][:2], made[1][:2], strict=True):
        for head in ((1, 2), (3, 4)):
            sees = made[0][2][head]
            assert relative_error(other[head][sees], one[head][sees].double()) < 5e-3
        others = torch.ones(16, 16, dtype=torch.bool)
        others[1, 2] = others[3, 4] = False
        if one is made[0][0]:
            assert torch.equal(one[others], other[others])
        else:  # gradients of queries are added up in any order
            assert relative_error(other[others], one[others].double()) < 1e-4


def test_small_coefficients_keep_their_precision_on_the_device():
    """Scores of about -12: the hardware's hyperbolic tangent would be off by a tenth of such a coefficient."""
    for size in (64, 128):
        for is_causal in (False, True):
            leaves = [torch.randn(16, 16, 256, size, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
            leaves[0][..., 0], leaves[1][..., 0] = -12.0 * size**0.5, 1.0
            leaves = [x.requires_grad_() for x in leaves]
            truths = [x.detach().double().requires_grad_() for x in leaves]
            out = attend(*leaves, is_causal=is_causal, kernel=Sigmoid())
            wanted = attend(*truths, is_causal=is_causal, kernel=Sigmoid(), impl="reference")
            assert float((out - wanted).norm() / wanted.norm()) < 1e-2
            above = torch.randn_like(out)
            for one, other in zip(
                torch.autograd.grad(out, leaves, above),
                torch.autograd.grad(wanted, truths, above.double()),
                strict=True,
            ):
                assert float((one - other).norm() / other.norm()) < 2e-2


def test_a_graph_replays_fused_calls():
    x = torch.randn(3, 16, 16, 256, 64, device="cuda", dtype=torch.bfloat16)
    kernels = Sigmoid(bias=-2.5), Gaussian(2.5), Softmax()
    # Both before and after the first call of a form.
    for kernel in kernels:
        for _ in range(2):
            graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                attend(*x.clone().unbind(), is_causal=True, kernel=kernel)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                out = attend(*x.unbind(), is_causal=True, kernel=kernel)
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert (
                relative_error(out, attend(*x.double().unbind(), is_causal=True, kernel=kernel, impl="reference"))
                < 1e-2
            )


def test_a_first_call_inside_a_graph_keeps_nothing_of_it():
    x = torch.randn(3, 8, 16, 320, 64, device="cuda", dtype=torch.bfloat16)
    kernel = Sigmoid(bias=-2.75)
    attend(
        *torch.randn(3, 8, 16, 384, 64, device="cuda", dtype=torch.bfloat16).unbind(), kernel=kernel
    )  # compiled by now
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(*x.unbind(), kernel=kernel)
    out = attend(*x.unbind(), kernel=kernel)
    assert relative_error(out, attend(*x.double().unbind(), kernel=kernel, impl="reference")) < 1e-2


def test_calls_first_made_without_gradients_may_have_them_later():
    x = torch.randn(3, 8, 16, 448, 64, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        attend(*x.clone().unbind(), kernel=Sigmoid(bias=-2.25))
    leaves = [one.detach().clone().requires_grad_() for one in x.unbind()]
    attend(*leaves, kernel=Sigmoid(bias=-2.25)).float().sum().backward()
    assert all(leaf.grad is not None and bool(leaf.grad.isfinite().all()) for leaf in leaves)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_is_the_eager_one(mode):
    """Also as CUDA graphs: a training step of two layers, several times over."""
    kernels = Sigmoid(bias=-4.0), Gaussian(3.0)

    def loss(x, weights):
        for kernel, weight in zip(kernels, weights, strict=True):
            q, k, v = (x @ weight).unflatten(-1, (3, 8, 64)).transpose(1, 3).unbind(2)
            x = x + attend(q, k, v, is_causal=True, kernel=kernel).transpose(1, 2).flatten(2)
        return x.float().square().mean()

    compiled = torch.compile(loss, fullgraph=True, mode=mode)
    weights = [(torch.randn(512, 1536, device="cuda") / 32).bfloat16().requires_grad_() for _ in kernels]
    for _ in range(4):
        x = torch.randn(8, 512, 512, device="cuda", dtype=torch.bfloat16)
        found = compiled(x, weights)
        gradients = [one.clone() for one in torch.autograd.grad(found, weights)]
        wanted = loss(x, weights)
        assert float(found) == pytest.approx(float(wanted), rel=1e-2)
        for one, other in zip(gradients, torch.autograd.grad(wanted, weights), strict=True):
            assert relative_error(one, other) < 5e-2


def _primal(dtype, keep):
    """A layer, its input and a padding mask; and what a step gives: output, loss and every gradient."""
    from heedful.nn import PrimalAttention

    layer = PrimalAttention(192, 3, rank=13, max_len=1031).to("cuda", dtype)
    mask = torch.arange(1031, device="cuda") >= torch.tensor([[1031], [700], [1]], device="cuda") if keep else None

    def step(layer, x, above):
        out = layer(x, mask)
        loss = layer.ksvd_loss()
        return out, loss, *torch.autograd.grad([out, loss], [x, *layer.parameters()], [above, torch.ones_like(loss)])

    return layer, step


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_later_steps_of_primal_attention_are_as_right_as_the_first(dtype, keep):
    from copy import deepcopy

    layer, step = _primal(dtype, keep)
    for _ in range(4):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
        x, above = torch.randn(2, 3, 1031, 192, device="cuda", dtype=dtype)
        found = step(layer, x.requires_grad_(), above)
        wanted = step(deepcopy(layer).double(), x.detach().double().requires_grad_(), above.double())
        for at, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert relative_error(one, other) < (1e-3 if dtype == torch.float32 else 1e-1), at


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [64, 96])
def test_later_calls_of_linear_attention_are_as_right_as_the_first(size, is_causal):
    kernel = FeatureMap("elu")
    for at in range(4):
        if at % 2:
            drawn = torch.randn(4, 2, 8, 1031, size, device="cuda", dtype=torch.bfloat16).unbind()
        else:
            drawn = torch.randn(2, 1031, 4, 8, size, device="cuda", dtype=torch.bfloat16).transpose(1, 3).unbind(2)
        *drawn, above = drawn
        leaves = [x.detach().requires_grad_() for x in drawn]
        out = attend(*leaves, is_causal=is_causal, kernel=kernel, impl="linear")
        truths = [x.detach().double().requires_grad_() for x in drawn]
        wanted = attend(*truths, is_causal=is_causal, kernel=kernel, impl="reference")
        assert relative_error(out, wanted) < 1e-2, at
        gradients = torch.autograd.grad(out, leaves, above)
        for one, leaf, other in zip(
            gradients, leaves, torch.autograd.grad(wanted, truths, above.double()), strict=True
        ):
            assert relative_error(one, other) < 3e-2, at
            assert one.stride() == torch.empty_like(leaf).stride()  # so that nobody has to copy it
        itself = drawn[0].detach().requires_grad_()
        out = attend(itself, itself, itself, is_causal=is_causal, kernel=kernel, impl="linear")
        truth = itself.detach().double().requires_grad_()
        wanted = attend(truth, truth, truth, is_causal=is_causal, kernel=kernel, impl="reference")
        (one,), (other,) = torch.autograd.grad(out, itself, above), torch.autograd.grad(wanted, truth, above.double())
        assert relative_error(one, other) < 3e-2, at


@pytest.mark.parametrize("which", ["primal", "linear"])
def test_a_graph_replays_whole_steps(which):
    if which == "primal":
        layer, step = _primal(torch.bfloat16, keep=False)
        x, above = torch.randn(2, 3, 1031, 192, device="cuda", dtype=torch.bfloat16)
        x.requires_grad_()

        def run():
            return step(layer, x, above)
    else:
        x = torch.randn(3, 2, 8, 1031, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()

        def run():
            out = attend(*x.unbind(), is_causal=True, kernel=FeatureMap("elu"), impl="linear")
            return out, *torch.autograd.grad(out.float().sin().sum(), x)

    # Both before and after a form is known.
    for _ in range(2):
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            found = run()
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        replayed = [part.detach().clone() for part in found]
        for one, other in zip(replayed, run(), strict=True):
            assert torch.equal(one, other)

"""The contract suite on a CUDA device, and what only a device can show."""

import pytest
import torch

from contracts import CASES, KERNELS, Case, accepted, relative_error, results
from heedful import FeatureMap, Gaussian, Sigmoid, Softmax, attend, masks

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

"""Attention at times in one graph of `torch.compile`, and what a CUDA device would run, on fake tensors of one."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from heedful.ops.fused import _device
from heedful.ops.fused._device import Chip
from timed import INTERACTIONS, E, made, moments


@pytest.mark.parametrize("name", [name for name in INTERACTIONS if name != "rotary"])
def test_a_layer_compiles_into_one_graph(name):
    """The same output and gradients; queries at times of their own beside events, causal, with padding that holds NaN."""
    torch.compiler.reset()
    layer, n = made(name, dtype=torch.float32), 7
    padding = torch.arange(n) >= torch.tensor([n, 4])[:, None]
    times = moments(2, n).masked_fill(padding, float("nan"))
    backend = "aot_eager" if name == "bias" else "eager"  # tracing gradients costs a second more
    found = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        torch.manual_seed(1)
        x, key = (torch.randn(2, n, E, requires_grad=True) for _ in range(2))
        out = run(x, times + 1, key, times, key_padding_mask=padding, is_causal=True)
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, key, *layer.parameters()])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.fixture
def device(monkeypatch):
    """As if a device were there: what its driver says of it."""
    pytest.importorskip("triton", reason="the fused kernels need triton, which exists for Linux")
    torch.compiler.reset()
    monkeypatch.setattr(_device, "chip", lambda device: Chip(9, 132, 233472))


def operators(module, x, times, **call):
    """What the one graph of a module on a device calls, the module's tensors being made there."""
    names = [(*name.rpartition(".")[::2], tensor) for name, tensor in module.state_dict().items()]
    graphs = []

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return lambda *inputs: [None]

    with FakeTensorMode():
        for at, name, tensor in names:
            part, fake = module.get_submodule(at), torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
            if name in part._parameters:
                part._parameters[name] = torch.nn.Parameter(fake, requires_grad=False)
            else:
                part._buffers[name] = fake
        x, times = (torch.empty(part.shape, dtype=part.dtype, device="cuda") for part in (x, times))
        torch.compile(module, fullgraph=True, backend=keep)(x, times=times, **call)
    (found,) = graphs
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU; see test_gpu.py")
@pytest.mark.parametrize("name", ["rotate_values", "bias", "decay"])
def test_fused_kernels_serve_times_on_a_device(device, name):
    """In bfloat16 our own kernels, which read the factors of a bias beside queries and keys."""
    layer = made(name, 512, 8, torch.bfloat16).requires_grad_(False)
    x, times = torch.empty(1, 8192, 512, dtype=torch.bfloat16), torch.empty(1, 8192, dtype=torch.float64)
    # What adds to scores is not left to torch even where nothing is hidden.
    found = operators(layer, x, times, is_causal=name == "rotate_values")
    assert sum(name.startswith("heedful.fused_attention") for name in found) == 1
    assert not any("scaled_dot_product" in name or "softmax" in name for name in found)

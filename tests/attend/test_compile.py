"""The paths of a CUDA device under `torch.compile`, on machines without one: its dispatch on fake tensors of such a device, and
its operators in Triton's interpreter. On a device itself: test_gpu.py."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="the fused kernels need triton, which exists for Linux")

from heedful import FeatureMap, Gaussian, Polynomial, ReluSquared, Sigmoid, Softmax, _attend, attend, masks
from heedful.nn import Attention, Encoder, PrimalAttention
from heedful.ops import fused, linear, primal
from heedful.ops.fused import _device, primal_ops
from heedful.ops.fused._device import Chip

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU; see test_gpu.py")


@pytest.fixture
def device(monkeypatch):
    """As if a device were there: what its driver says of it."""
    torch.compiler.reset()
    for room in (_device, primal_ops):
        monkeypatch.setattr(room, "chip", lambda device: Chip(9, 132, 233472))


def traced(function, *inputs, dynamic=False):
    """The operators of the one graph that Dynamo makes of a call."""
    graphs = []

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return lambda *inputs: [None]

    torch.compile(function, fullgraph=True, backend=keep, dynamic=dynamic)(*inputs)
    (found,) = graphs
    return found


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("kernel", "operator"),
    [
        (Softmax(), "heedful.fused_attention"),
        (Gaussian(2.0), "heedful.fused_attention"),
        (Sigmoid(), "heedful.fused_attention"),
        (ReluSquared(), "heedful.fused_attention"),
        (FeatureMap("elu"), "heedful.chunks"),
    ],
    ids=repr,
)
def test_dispatch_on_a_device_is_traced(device, kernel, operator, dynamic):
    with FakeTensorMode():
        x = torch.empty(2, 4, 2048, 64, device="cuda", dtype=torch.bfloat16)
        found = traced(lambda x: attend(x, x, x, is_causal=True, kernel=kernel), x, dynamic=dynamic)
    assert any(name.startswith(operator) for name in found)


def test_facts_about_a_chip_are_constants_of_a_graph(monkeypatch):
    """Dynamo folds `torch.cuda.get_device_properties`: nothing else may be asked of the driver while it traces."""
    from torch._dynamo.variables.torch import constant_fold_functions

    assert torch.cuda.get_device_properties in constant_fold_functions
    facts = SimpleNamespace(major=9, multi_processor_count=132, shared_memory_per_multiprocessor=233472)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert _device.chip(torch.device("cuda")) == Chip(9, 132, 233472)


@pytest.fixture
def interpreted(monkeypatch):
    """`auto` takes the fused kernels as on a device; the interpreter runs them in float32 on the CPU."""
    torch.compiler.reset()
    able = lambda request: fused.IMPLEMENTATION.refuse(request) is None  # noqa: E731
    monkeypatch.setattr(_attend, "_fusing", able)
    monkeypatch.setattr(_attend, "BRIEF", 0)
    monkeypatch.setattr(linear, "FUSED", frozenset({"cpu"}))
    monkeypatch.setattr(primal, "FUSED", frozenset({"cpu"}))


def assert_compiles(module, *inputs, **call):
    """Compiled and not: the same output and the same gradients, in one graph."""
    results = []
    for run in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = run(*leaves, **call)
        out = out[0] if isinstance(out, tuple) else out
        parameters = list(module.parameters()) if isinstance(module, torch.nn.Module) else []
        given = [x for x in (*leaves, *parameters) if x.requires_grad]
        gradients = torch.autograd.grad(out.square().sum(), given, allow_unused=True)
        results.append([out, *(x for x in gradients if x is not None)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


MASKS = {
    "causal": lambda: masks.causal,
    "padding": lambda: masks.padding(torch.tensor([17, 9])),
    "packed": lambda: masks.packed(torch.tensor([0, 5, 17])) & masks.causal,
}


# Every mask with one kernel, every kernel with one mask.
PER_HEAD = Gaussian(torch.tensor([1.5, 2.0]))
COMPILED = [(PER_HEAD, mask) for mask in MASKS]
COMPILED += [(kernel, "packed") for kernel in (Softmax(), Sigmoid(), Polynomial(2), FeatureMap("elu"))]


@pytest.mark.parametrize(("kernel", "mask"), COMPILED, ids=str)
def test_operators_of_a_device_compile_with_their_gradients(interpreted, kernel, mask):
    query, key, value = torch.randn(3, 2, 2, 17, 16).unbind()
    hiding = MASKS[mask]()
    assert_compiles(lambda *parts: attend(*parts, hiding, kernel=kernel), query, key, value)


def test_layers_of_a_device_compile_with_their_gradients(interpreted):
    x = torch.randn(2, 17, 32)
    assert_compiles(Attention(32, 2, kernel=Gaussian(2.0)), x, is_causal=True)
    assert_compiles(Encoder(32, 2, [Gaussian(2.0), Sigmoid()]).eval(), x)


def test_primal_attention_of_a_device_compiles_with_its_gradients(interpreted):
    assert_compiles(PrimalAttention(32, 2, rank=8, max_len=17), torch.randn(2, 17, 32))

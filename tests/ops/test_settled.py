"""Primal-Attention and linear attention by launches that were made before: the next call's numbers, none of the first one's tensors.

A kernel that stands for a compiled one runs by Triton's interpreter at the addresses that it is launched with.
"""

import ctypes
import gc
import weakref

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton

from heedful import FeatureMap, _runtime, attend
from heedful.nn import PrimalAttention
from heedful.ops import linear, primal
from heedful.ops.fused import _sums, chunks, prepared
from heedful.ops.fused import primal as primal_kernels

if torch.cuda.is_available():
    pytest.skip("on a GPU tests/test_gpu.py does the same with compiled kernels", allow_module_level=True)


def at(address, dtype, size):
    """The tensor that begins at an address."""
    memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


class Compiled:
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    function, packed_metadata, tensordesc_meta = 0, (), ()

    def __init__(self, kernel, args, options):
        self.kernel, self.options = kernel, options
        self.forms = [
            (x.dtype, 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)))
            if isinstance(x, torch.Tensor) and x.numel()
            else None
            for x in args
        ]
        self.metadata = self.run = self

    def launch(self, *raw):
        args = [x if form is None else at(x, *form) for x, form in zip(raw[13:], self.forms, strict=True)]
        self.kernel[raw[:3]](*args, **self.options)


class Kernel:
    def __init__(self, real, anew):
        self.real, self.arg_names, self.anew = real, real.arg_names, anew

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.anew.append(self.real)
            self.real[grid](*args, **options)
            return Compiled(self.real, args, options)

        return launch


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    """The kernels that were launched as for the first time."""
    launched = []
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(_runtime, "SETTLED", frozenset({"cpu"}))
    monkeypatch.setattr(prepared, "KNOWN", {})
    monkeypatch.setattr(prepared, "interpreting", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for room in (primal, linear):
        monkeypatch.setattr(room, "FUSED", frozenset({"cpu"}))
    names = [
        (primal_kernels, "means means_backward prepare fold fold_backward gather spread penalty penalty_backward"),
        (chunks, "_span_states _running_sums _outputs _query_gradient _key_gradients _one_token"),
        (_sums, "total"),
    ]
    for home, kernels in names:
        for name in kernels.split():
            monkeypatch.setattr(home, name, Kernel(getattr(home, name), launched))
    torch.manual_seed(0)
    return launched


def close(found, wanted, bound=3e-5):
    for one, other in zip(found, wanted, strict=True):
        one, other = one.detach(), other.detach()
        assert one.shape == other.shape
        assert float((one.double() - other).norm()) <= bound * float(other.norm().clamp_min(1e-3))


PRIMAL = {"plain": {}, "padded": {"keep": True}, "one sequence": {"batch": 1}, "static": {"rows": None}, "two readouts": {"readout": "two"},
          "one readout twice": {"readout": "twice"}, "without parts": {"parts": False}, "no bias": {"bias": False}}  # fmt: skip


def drawn(batch=2, heads=3, n=19, size=7, rows=11, rank=5, readout="joint", bias=True, dtype=torch.float32):
    width = rank if readout == "twice" else 13
    one = (heads, width, rank) if readout == "twice" else (width, rank)
    shapes = {
        "pair": (batch, n, 2, heads, size),
        "sample": None if rows is None else (batch, heads, rows, size),
        "w_e": (heads, rows or size, rank),
        "w_r": (heads, rows or size, rank),
        "c_e": (width, 2 * rank) if readout == "joint" else one,
        "c_r": one if readout == "two" else None,
        "bias": (width,) if bias else None,
    }
    return {name: None if s is None else torch.randn(s, dtype=dtype).requires_grad_() for name, s in shapes.items()}


def folded(given, keep, parts, twice):
    given = dict(given)
    if twice:
        given["c_r"] = given["c_e"]
    out, made = primal.folded_pair(**given, keep=keep, parts=parts)
    leaves = [x for name, x in given.items() if x is not None and not (twice and name == "c_r")]
    above = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    loss, found = (out * above).sum(), [out]
    if parts:
        heads, _, rank = given["w_e"].shape
        lam = torch.linspace(0.5, 2.0, heads * rank, dtype=out.dtype).view(heads, rank).requires_grad_()
        leaves.append(lam)
        loss = loss + primal.penalty(made, lam) + (made.energy / 100).sin().sum() + made.data.on.cos().mean()
        found += [made.energy, made.tokens, made.product, primal.penalty(made, lam)]
    return [x.detach() for x in (*found, *torch.autograd.grad(loss, leaves))]


@pytest.mark.parametrize("case", PRIMAL)
def test_the_next_fold_of_a_form(case, anew, monkeypatch):
    settings = dict(PRIMAL[case])
    keep, parts = settings.pop("keep", False), settings.pop("parts", True)
    keep = torch.arange(19) < torch.tensor([[19], [11]]) if keep else None
    twice = settings.get("readout") == "twice"
    for _ in range(2):
        anew.clear()
        given = drawn(**settings)
        found = folded(given, keep, parts, twice)
    assert not anew
    monkeypatch.setattr(primal, "FUSED", frozenset())
    exact = {name: None if x is None else x.detach().double().requires_grad_() for name, x in given.items()}
    close(found, folded(exact, keep, parts, twice))


@pytest.mark.parametrize(("n", "rows"), [(19, 5), (20, 5), (5, 5), (5, 13), (1, 3), (131, 7)])
def test_the_next_means_of_a_form(n, rows, anew, monkeypatch):
    def outcome(x):
        made = primal.sample(x, rows, "segment_mean")
        (first,) = torch.autograd.grad(made.sin().sum(), x, create_graph=True)
        return made, first, *torch.autograd.grad(first.square().sum(), x)

    for _ in range(2):
        anew.clear()
        x = torch.randn(2, n, 11, requires_grad=True)
        found = outcome(x)
    assert not anew
    monkeypatch.setattr(primal, "FUSED", frozenset())
    close(found, outcome(x.detach().double().requires_grad_()))


LINEAR = {"all": {}, "causal": {"is_causal": True}, "not divided": {"normalize": False}, "shared heads": {"group": 3},
          "beside": {"beside": True}, "wide": {"size": 67, "width": 71, "is_causal": True}, "itself": {"itself": True},
          "weighted": {"weighted": True}, "wide and weighted": {"size": 67, "width": 71, "weighted": True}}  # fmt: skip


def attended(case, dtype=torch.float32, seed=0):
    settings = {"normalize": True, "group": 1, "size": 5, "width": 7, "is_causal": False} | LINEAR[case]
    torch.manual_seed(seed)
    batch, heads, n = (1, 1, 37) if settings["size"] > 64 else (2, 3, 37)
    shapes = [(batch, heads, n, settings["size"]), (batch, heads // settings["group"], n, settings["size"])]
    shapes.append((batch, heads // settings["group"], n, settings["width"]))
    leaves = [torch.randn(shape) for shape in shapes]
    if settings.get("beside"):
        leaves = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves]
    leaves = [x.to(dtype).requires_grad_() for x in leaves]
    given = leaves[:1] * 3 if settings.get("itself") else leaves
    leaves = leaves[:1] if settings.get("itself") else leaves
    how = {"kernel": FeatureMap("elu", normalize=settings["normalize"]), "is_causal": settings["is_causal"]}
    if settings.get("weighted"):
        mask = torch.randn(batch, 1, 1, n).to(dtype).requires_grad_()
        leaves, how = [*leaves, mask], how | {"attn_mask": mask, "is_causal": True}
    out = attend(*given, enable_gqa=settings["group"] > 1, impl="linear", **how)
    above = torch.cos(torch.arange(out.numel(), dtype=dtype)).view_as(out)
    return [x.detach() for x in (out, *torch.autograd.grad(out, leaves, above))]


@pytest.mark.parametrize("case", LINEAR)
def test_the_next_linear_attention_of_a_form(case, anew, monkeypatch):
    # In float32 a sum over all keys is left to matrix products.
    monkeypatch.setattr(linear, "SINGLE", True)
    for seed in range(2):
        anew.clear()
        found = attended(case, seed=seed)
    assert not anew
    monkeypatch.setattr(linear, "FUSED", frozenset())
    close(found, attended(case, torch.float64, seed=1))
    if case == "beside":
        assert all(x.transpose(1, 2).is_contiguous() for x in found[1:])


def test_steps_from_a_state(anew):
    kernel = FeatureMap("elu")
    for _ in range(2):
        anew.clear()
        x = torch.randn(3, 2, 3, 23, 4)  # so that slices are aligned
        with torch.no_grad():
            first = attend.step(*x[..., :19, :], kernel=kernel)
            more = attend.step(*x[..., 19:22, :], first.state, kernel=kernel)
            last = attend.step(*x[..., 22:, :], more.state, kernel=kernel)
    assert not anew
    found = torch.cat((first.output, more.output, last.output), dim=-2)
    close([found], [attend(*x.double(), kernel=kernel, is_causal=True)])


def test_another_form_is_another_entry(anew, monkeypatch):
    def outcome(x, fused=True):
        with monkeypatch.context() as patched:
            patched.setattr(linear, "FUSED", frozenset({"cpu"}) if fused else frozenset())
            out = attend(*x, kernel=FeatureMap("elu"), is_causal=True, impl="linear")
            if not any(y.requires_grad for y in x):
                return [out]
            return [out, *torch.autograd.grad(out.square().sum(), [y for y in x if y.requires_grad])]

    def fresh(*shape):
        return [torch.randn(shape) for _ in range(3)]

    x = fresh(2, 3, 19, 5)
    forms = {
        "first": x,
        "length": fresh(2, 3, 17, 5),
        "heads": fresh(2, 1, 19, 5),
        "strides": [y.transpose(1, 2) for y in fresh(2, 19, 3, 5)],
        "one tensor": [x[0]] * 3,
        "keys are values": [x[0], x[1], x[1]],
        "gradients": [y.clone().requires_grad_() for y in x],
        "of values": [x[0], x[1], x[2].clone().requires_grad_()],
        "not aligned": [torch.randn(2 * 3 * 19 * 5 + 1)[1:].view(2, 3, 19, 5) for _ in range(3)],
    }
    for _ in range(2):
        for given in forms.values():
            found = outcome(given)
            exact = [y.detach().double().requires_grad_(y.requires_grad) for y in given]
            close([y.detach() for y in found], [y.detach() for y in outcome(exact, fused=False)])
    for name, given in forms.items():
        anew.clear()
        outcome(given)
        assert bool(anew) == (name == "not aligned"), name


def test_types_are_part_of_a_form(anew, monkeypatch):
    """Gradients come in the type of each weight."""
    given = drawn()
    for dtype in (torch.float32, torch.float16, torch.float32):
        changed = {
            name: x if x is None or name == "pair" else x.detach().to(dtype).requires_grad_()
            for name, x in given.items()
        }
        found = folded(changed, None, True, False)
        assert [x.dtype for x in found[6:10]] == [dtype] * 4
        with monkeypatch.context() as patched:
            patched.setattr(primal, "FUSED", frozenset())
            exact = {name: None if x is None else x.detach().double().requires_grad_() for name, x in changed.items()}
            close(found, folded(exact, None, True, False), 3e-5 if dtype == torch.float32 else 2e-3)
    assert len(prepared.KNOWN) == 2 * 2 + 2  # the penalty sees none of them


@pytest.mark.parametrize("what", ["primal", "linear"])
def test_nothing_of_the_first_call_is_kept(what, anew):
    if what == "primal":
        layer = PrimalAttention(24, 3, rank=4, max_len=50)
        x = torch.randn(2, 29, 24, requires_grad=True)
        (layer(x).square().sum() + layer.ksvd_loss()).backward()
        made = [x, *layer.parameters(), *(p.grad for p in layer.parameters()), *layer._last[:5], layer._last.data.on]
        gone = [weakref.ref(y) for y in made]
        del layer, made, x
    else:
        x = [torch.randn(2, 3, 29, 5, requires_grad=True) for _ in range(3)]
        out = attend(*x, kernel=FeatureMap("elu"), is_causal=True, impl="linear")
        out.square().sum().backward()
        gone = [weakref.ref(y) for y in (*x, *(y.grad for y in x), out)]
        del out, x
    gc.collect()
    assert all(one() is None for one in gone)
    assert prepared.KNOWN


def test_inference_before_training(anew, monkeypatch):
    layer = PrimalAttention(24, 3, rank=4, max_len=50)
    x = torch.randn(2, 29, 24)
    with torch.inference_mode():
        first = layer(x)
    anew.clear()
    out = layer(x)
    assert not anew
    torch.testing.assert_close(out, first)
    found = torch.autograd.grad(out.sin().sum() + layer.ksvd_loss(), [*layer.parameters()])
    monkeypatch.setattr(primal, "FUSED", frozenset())
    layer = layer.double()
    wanted = torch.autograd.grad(layer(x.double()).sin().sum() + layer.ksvd_loss(), [*layer.parameters()])
    close(found, wanted)


def test_a_capture_leaves_nothing(anew, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    attended("causal")
    assert not prepared.KNOWN


def test_operators_where_somebody_looks_on():
    """A dispatch mode sees operators, not launches."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    layer, x = PrimalAttention(24, 3, rank=4, max_len=50), torch.randn(2, 59, 24, requires_grad=True)
    with Watch():
        (layer(x).square().sum() + layer.ksvd_loss()).backward()
        attended("causal")
    names = {name.removesuffix(".default") for name in seen if name.startswith("heedful.")}
    wanted = {"primal_fold", "primal_penalty", "segment_means", "chunks"}
    assert names == {f"heedful.{name}{end}" for name in wanted for end in ("", "_backward")}

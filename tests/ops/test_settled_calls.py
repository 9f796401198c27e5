"""Calls by launches that were made before: another mask of the kind, other numbers and parameters, and nothing looked at twice.

A kernel that stands for a compiled one runs by Triton's interpreter at the addresses that it is launched with.
"""

import copy
import ctypes
import gc
import math
import weakref

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor, TwoTensorMode
from torch.utils.checkpoint import checkpoint
from triton.tools.tensor_descriptor import TensorDescriptor

import heedful
from heedful import Gaussian, InvalidArgument, ReluSquared, Sigmoid, Softmax, _attend, _runtime, attend, masks
from heedful.ops import fused, plain
from heedful.ops.fused import _backward, _blocks, _forward, listing, operators, prepared
from heedful.ops.fused._blocks import Terms
from interpreted import needs_interpreter

pytestmark = needs_interpreter
B, H, Q, K, D = 2, 3, 37, 41, 8
CHOOSE = _attend._choose


class Compiled:
    """A kernel launched at addresses by Triton's own handle."""

    def __init__(self, kernel, args, options):
        self.kernel, self.options, self.forms = kernel, options, [extent(x) for x in args]
        self.metadata = None

    def __getitem__(self, grid):
        def run(*args, stream):
            given = [x if form is None else form(x) for x, form in zip(args, self.forms, strict=True)]
            self.kernel[grid](*given, **self.options)

        return run


def extent(x):
    """How an argument is made again from an address; None where it is a number."""
    if isinstance(x, Terms):
        forms = [extent(one) for one in x]
        return lambda values: Terms(*(y if form is None else form(y) for y, form in zip(values, forms, strict=True)))
    if isinstance(x, TensorDescriptor):
        kind, size = x.base.dtype, 1 + sum((n - 1) * step for n, step in zip(x.shape, x.strides, strict=True))

        def described(one):
            found = object.__new__(TensorDescriptor)
            found.__dict__.update(vars(one), base=at(one.base.data_ptr(), kind, size))
            return found

        return described
    if isinstance(x, torch.Tensor) and x.numel():
        kind, size = x.dtype, 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        return lambda address: at(address, kind, size)
    return (lambda _, kind=x.dtype: torch.empty(0, dtype=kind)) if isinstance(x, torch.Tensor) else None


def at(address, dtype, size):
    memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


class Kernel:
    def __init__(self, real, anew):
        self.real, self.anew = real, anew

    def __getitem__(self, grid):
        def run(*args, **options):
            self.anew.append(self.real)
            self.real[grid](*args, **options)
            return Compiled(self.real, args, options)

        return run


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    """The kernels that were launched as for the first time; calls on a CPU are settled as on a GPU."""
    launched = []
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    monkeypatch.setattr(_runtime, "SETTLED", frozenset({"cpu"}))
    monkeypatch.setattr(fused, "MOVED", frozenset())
    for home in (prepared, plain):
        monkeypatch.setattr(home, "KNOWN", {})
    monkeypatch.setattr(prepared, "LAUNCHES", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(_attend, "_choose", lambda request, impl: CHOOSE(request, "triton" if impl == "auto" else impl))
    for home, name in (
        (_forward, "forward"),
        (_backward, "backward_rows"),
        (_backward, "backward_columns"),
        (_blocks, "row_dot"),
    ):
        monkeypatch.setattr(home, name, Kernel(getattr(home, name), launched))
    return launched


@pytest.fixture
def looked(monkeypatch):
    """The tensors of masks that were made."""
    names = []
    read, listed = listing.Sight._read, listing.Sight._listed
    monkeypatch.setattr(listing.Sight, "_read", lambda self, name: names.append(name) or read(self, name))
    monkeypatch.setattr(listing.Sight, "_listed", lambda self, *which: names.append(which) or listed(self, *which))
    return names


def drawn(grad=True, dtype=torch.float32):
    shapes = (B, H, Q, D), (B, H, K, D), (B, H, K, D)
    return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for shape in shapes]


def outcome(vectors, mask, **how):
    out = attend(*vectors, mask, **how)
    above = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    return [x.detach() for x in (out, *torch.autograd.grad(out, vectors, above))]


def assert_right(vectors, found, mask, bound=2e-5, **how):
    exact = [x.detach().double().requires_grad_() for x in vectors]
    for one, other in zip(found, outcome(exact, mask, impl="reference", **how), strict=True):
        # A row of one key has no gradient to be near to.
        assert float((one.double() - other).norm()) <= bound * max(1.0, float(other.norm()))


def lengths():
    return torch.randint(5, K + 1, (B,))


def bounds(size, sequences):
    inner = torch.randperm(size - 1)[: sequences - 1].sort().values + 1
    return torch.cat((torch.tensor([0]), inner, torch.tensor([size])))


def ids(size):
    return torch.randint(0, 3, (B, size)).sort(-1).values


# Another mask of the kind at each call.
MASKS = {
    "padding": lambda: masks.padding(lengths()),
    "keys": lambda: masks.keys(torch.arange(K) < lengths()[:, None]),
    "packed": lambda: masks.packed(bounds(Q, 4), bounds(K, 4)),
    "packed, causal": lambda: masks.packed(bounds(Q, 3), bounds(K, 3)) & masks.causal,
    "documents": lambda: masks.document(ids(Q), ids(K)),
    "documents, padding": lambda: masks.document(ids(Q), ids(K)) & masks.padding(lengths()),
    "window": lambda: masks.window(5),
    "window, causal": lambda: masks.window(5) & masks.causal,
    "lower right": lambda: masks.lower_right,
    "boolean": lambda: masks.dense(torch.rand(B, 1, Q, K) < 0.6),
    "boolean of heads": lambda: masks.dense(torch.rand(H, Q, K) < 0.6),
    "blocks": lambda: masks.blocks(torch.rand(3, 6) < 0.7, (16, 8)),
    "or": lambda: masks.padding(lengths()) | masks.window(2),
    "not": lambda: ~masks.window(2),
    "tensor": lambda: torch.rand(B, 1, Q, K) < 0.6,
    "tensor of keys": lambda: torch.rand(K) < 0.6,
}
KERNELS = {
    "softmax": Softmax(),
    "sigmoid": Sigmoid(bias=-1.0),
    "relu squared": ReluSquared(),
    "gaussian": Gaussian(3.0),
    "gaussian raw": Gaussian(3.0, normalize=False),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_next_mask_of_a_kind(name, anew):
    kernel = Sigmoid(bias=-1.0) if name in ("packed", "padding") else Softmax()
    for flag in (False, True):
        how = {"kernel": kernel, "is_causal": flag}
        for _ in range(3):
            anew.clear()
            vectors, mask = drawn(), MASKS[name]()
            assert_right(vectors, outcome(vectors, mask, **how), mask, **how)
        assert not anew, flag


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel(name, anew):
    how = {"kernel": KERNELS[name]}
    for _ in range(2):
        anew.clear()
        vectors, mask = drawn(), MASKS["documents"]() & masks.causal
        assert_right(vectors, outcome(vectors, mask, **how), mask, **how)
    assert not anew


def test_sequences_may_be_more_or_fewer(anew):
    for sequences in (3, 3, 5, 2):
        anew.clear()
        vectors, mask = drawn(), masks.packed(bounds(Q, sequences), bounds(K, sequences))
        assert_right(vectors, outcome(vectors, mask), mask)
    assert not anew
    assert len(plain.KNOWN) == 1


def test_another_kind_is_another_entry(anew):
    """With the same names and shapes as one that is known."""
    kinds = [
        masks.window(5), masks.window(6), masks.window(5, 6), masks.window(5, align="end"), ~masks.window(5), masks.lower_right,
        masks.document(ids(Q), ids(K)), masks.keys(torch.rand(B, K) < 0.6), masks.dense(torch.rand(Q, K) < 0.6),
        masks.dense((torch.rand(K, Q) < 0.6).mT), masks.blocks(torch.rand(5, 6) < 0.7, (8, 8)), masks.blocks(torch.rand(5, 6) < 0.7, (8, 7)),
    ]  # fmt: skip
    assert len({masks.kind(mask) for mask in kinds}) == len(kinds)
    for _ in range(2):
        for mask in kinds:
            anew.clear()
            vectors = drawn()
            assert_right(vectors, outcome(vectors, mask), mask)
    assert not anew
    assert len(plain.KNOWN) == len(kinds)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_what_is_hidden_does_not_matter(garbage, anew):
    """In a call by launches that were made for another mask."""
    outcome(drawn(), masks.padding(lengths()))
    for hide in (masks.padding(torch.tensor([K, 11])), masks.padding(torch.tensor([K, 11])) & masks.causal):
        vectors = drawn()
        outcome(drawn(), hide)
        anew.clear()
        wanted = outcome(vectors, hide)
        for x in vectors[1:]:
            x.data[1, :, 11:] = garbage
        for one, other in zip(outcome(vectors, hide), wanted, strict=True):
            assert torch.equal(one, other)
    assert not anew


def test_a_mask_is_looked_at_once(looked):
    """In forward and backward, in every layer, and with another kernel."""
    mask = MASKS["documents"]()
    for kernel in (Softmax(), Softmax(), Sigmoid(), Softmax()):
        outcome(drawn(), mask, kernel=kernel)
    assert (
        len(looked) == len(set(looked)) == 2 + 2 + 1
    )  # ids; lists of forward and columns, and of rows, whose blocks differ
    before = len(looked)
    outcome(drawn(), mask, is_causal=True)
    assert len(looked) > before


def test_a_tensor_is_looked_at_once(looked):
    """From the call on that its kind is known for."""
    outcome(drawn(), torch.rand(B, 1, Q, K) < 0.6)
    looked.clear()
    mask = torch.rand(B, 1, Q, K) < 0.6
    for _ in range(3):
        outcome(drawn(), mask)
    assert len(looked) == len(set(looked)) == 4


@pytest.mark.parametrize("wrap", [masks.dense, lambda x: x, lambda x: masks.dense(x) & masks.causal])
def test_a_mask_that_is_written_into_is_looked_at_again(wrap, anew):
    keep = torch.rand(B, 1, Q, K) < 0.6
    mask = wrap(keep)
    for _ in range(3):
        anew.clear()
        vectors = drawn()
        assert_right(vectors, outcome(vectors, mask), mask)
        keep.logical_not_()
    keep.data = ~keep
    vectors = drawn()
    assert_right(vectors, outcome(vectors, mask), mask)
    assert not anew


def test_writing_into_a_mask_before_the_backward_pass_is_refused():
    keep = torch.rand(B, 1, Q, K) < 0.6
    for _ in range(2):
        vectors = drawn()
        out = attend(*vectors, masks.dense(keep))
        keep.logical_not_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_mask_in_inference_mode(anew, looked):
    """Torch does not count what is written into its tensors: they are looked at each time."""
    with torch.inference_mode():
        keep = torch.rand(B, 1, Q, K) < 0.6
        for _ in range(3):
            vectors = drawn(grad=False)
            exact = attend(*(x.double() for x in vectors), keep, impl="reference")
            torch.testing.assert_close(attend(*vectors, keep).double(), exact, atol=1e-5, rtol=1e-5)
            keep.logical_not_()
    assert len(looked) == 2 * 3


def test_layers_that_are_given_one_tensor_look_at_it_once(looked):
    ignored = torch.arange(Q) >= torch.tensor([[Q], [11]])
    for causal in (False, True):
        for _ in range(2):
            layers = [heedful.nn.Attention(24, 3) for _ in range(3)]
            looked.clear()
            x = y = torch.randn(B, Q, 24)
            for layer in layers:
                y = layer(y, y, y, key_padding_mask=ignored, is_causal=causal, need_weights=False)[0]
            y.sum().backward()
        assert not looked
        for layer in layers:
            x = layer(x, x, x, ignored.clone(), is_causal=causal, need_weights=False)[0]
        torch.testing.assert_close(x, y)
    x = torch.randn(B, Q, 24)
    for write in (ignored.logical_not_, lambda: setattr(ignored, "data", ~ignored)):
        looked.clear()
        write()
        found, wanted = (layers[0](x, x, x, one, need_weights=False)[0] for one in (ignored, ignored.clone()))
        assert looked
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("of", ["layer", "mask", "tensor"])
def test_inference_before_training(of):
    ignored = torch.arange(Q) >= torch.tensor([[Q], [11]])
    layer, x = heedful.nn.Attention(24, 3), torch.randn(B, Q, 24)
    q = torch.randn(B, H, Q, D, requires_grad=True)
    seen = masks.keys(~ignored) & masks.window(9)
    if of == "tensor":
        seen = seen.dense((B, 1, Q, Q))

    def step():
        if of == "layer":
            return layer(x, x, x, ignored, need_weights=False)[0]
        return attend(q, q, q, seen)

    with torch.inference_mode():
        for _ in range(2):
            before = step()
    for _ in range(2):
        out = step()
        out.sum().backward()
        torch.testing.assert_close(out.detach(), before.clone())


def test_what_a_capture_makes_is_its_own(looked, monkeypatch):
    """A graph is played again when its tensors were written into: what it reads of a mask must be made in it."""
    mask = MASKS["documents"]()
    for home in (fused, masks._faces):
        monkeypatch.setattr(home, "lasting", lambda device: None)
    for _ in range(3):
        outcome(drawn(), mask)
    assert len(looked) == 3 * 5
    assert mask not in fused.OF_MASKS


@pytest.mark.parametrize("wrap", [masks.dense, lambda x: x, lambda x: masks.dense(x) & masks.causal])
def test_what_is_kept_goes_with_the_mask(wrap):
    keep = torch.rand(B, 1, Q, K) < 0.6
    mask = wrap(keep)
    for _ in range(2):
        outcome(drawn(), mask)
    made = [weakref.ref(x) for x in kept_of(mask)]
    gone = weakref.ref(keep)
    assert made
    del keep, mask
    gc.collect()
    assert gone() is None
    assert all(one() is None for one in made)


def kept_of(mask):
    home = fused.OF_TENSORS if isinstance(mask, torch.Tensor) else fused.OF_MASKS
    ((_, sight),) = home[mask].values()
    return sight._made.values()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("queries", [1, Q])
def test_what_auto_takes_otherwise(name, queries, monkeypatch):
    """Settled calls are those of the fused kernels; a mask that hides nothing leaves torch's own, as when the last token is decoded."""
    monkeypatch.setattr(_attend, "_choose", CHOOSE)
    if queries == 1 and name in ("packed", "packed, causal", "documents", "documents, padding", "boolean", "boolean of heads", "blocks", "tensor"):  # fmt: skip
        pytest.skip("it is of more queries")
    for flag in (False, True):
        for _ in range(3):
            query, *others = drawn()
            vectors, mask = [query[..., :queries, :].detach().requires_grad_(), *others], MASKS[name]()
            assert_right(vectors, outcome(vectors, mask, is_causal=flag), mask, is_causal=flag)


@pytest.mark.parametrize("mask", ["documents", "window", "none"])
def test_a_checkpoint_may_run_a_first_call_again(mask):
    for _ in range(3):
        vectors, hide = drawn(), None if mask == "none" else MASKS[mask]()
        wanted = outcome(vectors, hide, kernel=Sigmoid())
        plain.KNOWN.clear()
        out = checkpoint(lambda *x, hide=hide: attend(*x, hide, kernel=Sigmoid()), *vectors, use_reentrant=False)
        above = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
        for one, other in zip(torch.autograd.grad(out, vectors, above), wanted[1:], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("is_settled", [False, True])
@pytest.mark.parametrize("mask", ["documents", "none"])
def test_a_checkpoint_of_a_learned_distance(mask, is_settled, monkeypatch):
    """What is only looked at before a call is planned saves nothing that later calls do not."""
    if is_settled:
        monkeypatch.setattr(fused, "MOVED", frozenset())  # as in 16 bit
    for _ in range(3):
        kernel, hide = Gaussian(torch.full((H,), 2.0, requires_grad=True)), None if mask == "none" else MASKS[mask]()
        out = checkpoint(lambda *x, k=kernel, hide=hide: attend(*x, hide, kernel=k), *drawn(), use_reentrant=False)
        out.sum().backward()
        assert bool(kernel.bandwidth.grad.isfinite().all())


@pytest.mark.parametrize("face", [lambda keep: keep, masks.keys, lambda keep: masks.keys(keep) & masks.causal], ids=["tensor", "keys", "nested"])  # fmt: skip
def test_copies_that_hooks_save_are_read(face):
    """As those of `save_on_cpu` of a mask on a GPU: what is written into the mask afterwards concerns no gradient."""
    x = drawn()
    for _ in range(3):
        keep = torch.rand(K) < 0.6
        keep[0] = True
        if face(keep) is keep:
            keep = keep.expand(Q, K).clone()
        wanted = torch.autograd.grad(attend(*x, face(keep.clone()), kernel=Sigmoid(), impl="reference").sum(), x)
        mask = face(keep)  # which lives on, as that of a batch does
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            out = attend(*x, mask, kernel=Sigmoid())
        keep.logical_not_()
        torch.testing.assert_close(torch.autograd.grad(out.sum(), x), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_graph_keeps_no_mask(is_checkpointed):
    """Behind its backward pass; a checkpoint not even before."""

    def layer(x):
        keep = torch.rand(B, H, Q, Q) < 0.6
        kept.append(keep.untyped_storage())
        return attend(x, x * 1, x * 1, keep)

    for _ in range(3):
        kept, x = [], torch.randn(B, H, Q, D, requires_grad=True)
        out = checkpoint(layer, x, use_reentrant=False) if is_checkpointed else layer(x)
        if not is_checkpointed:
            out.sum().backward()
        gc.collect()
        assert torch._C._storage_Use_Count(kept[0]._cdata) == 1


def test_no_kind_of_mask_from_elsewhere_is_kept():
    """One that is made in a function holds whatever its methods read there."""

    def call():
        big = torch.ones(Q, K, dtype=torch.bool)

        class Mine(masks.Mask):
            def block(self, at):
                return big[at.rows[0] : at.rows[1], at.cols[0] : at.cols[1]]

        attend(*drawn(), Mine(), kernel=Sigmoid())
        return weakref.ref(big)

    kept = call()
    gc.collect()
    assert kept() is None


def test_a_second_backward_pass():
    for _ in range(3):
        x = drawn()
        out = attend(*x, MASKS["tensor"]()).square().sum()
        first = torch.autograd.grad(out, x, retain_graph=True)
        assert all(map(torch.equal, first, torch.autograd.grad(out, x)))


def test_tensors_from_elsewhere_go_the_long_way():
    for _ in range(3):
        keep = torch.rand(B, K) < 0.6
        found = attend(*drawn(grad=False), masks.keys(TwoTensor(keep, keep.clone())))
        assert isinstance(found, TwoTensor)
    assert not plain.KNOWN


@pytest.mark.parametrize("mode", [TwoTensorMode, lambda: FakeTensorMode(allow_non_fake_inputs=True)])
def test_what_a_mode_makes_is_its_own(mode):
    vectors, how = drawn(grad=False), {"kernel": Sigmoid(bias=-1.0)}
    with mode():
        attend(*vectors, masks.causal, **how)
    assert not plain.KNOWN
    for _ in range(2):
        vectors = drawn()
        assert_right(vectors, outcome(vectors, masks.causal, **how), masks.causal, **how)


def test_numbers_of_a_stream_and_of_a_graph(monkeypatch):
    """Each stream fills its own; what a graph reads stays where it is when signatures were many."""
    kernel, vectors = Sigmoid(bias=-1.0), drawn(grad=False)
    streams = {}
    monkeypatch.setattr(operators, "OF_GRAPHS", [])
    for stream in (7, 7, 8, None, None):
        monkeypatch.setattr(operators, "lasting", lambda device, stream=stream: stream)
        attend(*vectors, kernel=kernel)
        (settled,) = plain.KNOWN.values()
        streams.setdefault(stream, []).append([x.data_ptr() for x in settled.rows()])
    assert streams[7][0] == streams[7][1] == streams[None][0] == streams[None][1] != streams[8][0]
    kept = [weakref.ref(x) for x in settled.rows()]
    del settled
    plain.KNOWN.clear()
    gc.collect()
    assert all(one() is not None for one in kept)
    assert len(operators.OF_GRAPHS) == 1


def test_a_first_call_in_a_capture_keeps_no_numbers(monkeypatch):
    monkeypatch.setattr(operators, "lasting", lambda device: None)
    monkeypatch.setattr(operators, "OF_GRAPHS", [])
    settled = operators.Settled((1.0, 2.0), H, torch.device("cpu"), is_learned=False)
    assert settled.rows()[1] is not settled.rows()[1]
    assert torch.equal(settled.rows()[1], torch.full((H,), 2.0))
    assert not operators.OF_GRAPHS


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_what_begins_anywhere_is_settled(offset, anew):
    """Lengths that are a part of others, and a row of a table of parameters."""
    several, table = torch.tensor([41, 3, 17, 29, 5, 11]), torch.rand(9 * H).add(0.5).requires_grad_()
    for at in range(3):
        anew.clear()
        mask, kernel = masks.padding(several[offset : offset + B]), Sigmoid(bias=table[offset : offset + H])
        vectors = drawn()
        exact = [doubled(x) for x in vectors]
        wanted = outcome(exact, mask, kernel=Sigmoid(bias=kernel.bias.detach().double()), impl="reference")
        for one, other in zip(outcome(vectors, mask, kernel=kernel), wanted, strict=True):
            assert float((one.double() - other).norm()) <= 2e-5 * float(other.norm())
        assert not anew or at < 2


def test_causality_twice_is_causality():
    vectors = drawn(grad=False)
    found = [attend(*vectors, masks.causal, is_causal=True, kernel=Sigmoid()) for _ in range(2)]
    assert torch.equal(*found)
    assert None not in plain.KNOWN.values()


def test_a_mask_keeps_few_grids():
    mask = masks.padding(torch.tensor([3, 5]))
    for keys in range(7, 7 + 2 * fused.GRIDS):
        x = torch.randn(B, H, keys, D)
        attend(x, x, x, mask)
    assert len(fused.OF_MASKS[mask]) <= fused.GRIDS


def test_a_mask_that_does_not_fit_is_refused_each_time():
    outcome(drawn(), masks.packed([0, 5, Q], [0, 7, K]))
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=f"packed: key_cu_seqlens ends at {K + 1}, but there are {K} keys"):
            attend(*drawn(), masks.packed([0, 5, Q], [0, 7, K + 1]))
        with pytest.raises(InvalidArgument, match="does not broadcast"):
            attend(*drawn(), torch.ones(Q, K + 1, dtype=torch.bool))


class Later(masks.Mask):
    """A mask of somebody's own, which may change."""

    offset = 0

    def block(self, at):
        return at.col_index() >= at.row_index() + self.offset


def test_masks_from_elsewhere_go_the_long_way():
    mask = Later()
    for _ in range(3):
        vectors, how = drawn(), {"kernel": Sigmoid()}
        assert_right(vectors, outcome(vectors, mask, **how), mask, **how)
        assert_right(vectors, outcome(vectors, mask & masks.causal, **how), mask & masks.causal, **how)
        mask.offset += 1
    assert not plain.KNOWN


@pytest.mark.parametrize("mask", [torch.rand(Q, K), masks.causal & masks.low_rank(torch.ones(Q, 2), torch.ones(K, 2))])
def test_what_adds_to_scores_goes_the_long_way(mask):
    vectors = drawn()
    assert_right(vectors, outcome(vectors, mask), mask)
    assert not plain.KNOWN


def test_second_derivatives_are_refused_by_name():
    mask = MASKS["documents"]()
    for _ in range(2):
        x = drawn()
        (first,) = torch.autograd.grad(attend(*x, mask).sum(), x[:1], create_graph=True)
        with pytest.raises(heedful.Unsupported, match="no second derivatives"):
            first.sum().backward()


def learned(make, dtype=torch.float32):
    """A kernel with new parameters, one for each head."""
    return make(*(nn.Parameter(torch.rand(H, dtype=torch.float64).add(0.5).to(dtype)) for _ in range(2)))


LEARNED = {
    "scale": lambda one, other: Softmax(one),
    "bias": lambda one, other: Sigmoid(bias=one),
    "both": lambda one, other: Sigmoid(one, other),
    "bandwidth": lambda one, other: Gaussian(one),
    "bandwidth, raw": lambda one, other: Gaussian(one, normalize=False),
    "one frozen": lambda one, other: Sigmoid(one.detach(), other),
    "one for all": lambda one, other: ReluSquared(nn.Parameter(one.detach()[:1])),
}


def of_all(kernel, vectors, mask, impl="auto"):
    """The result, and gradients of all that has them."""
    out = attend(*vectors, mask, kernel=kernel, impl=impl)
    leaves = [x for x in (*vectors, *kernel.tensors().values()) if x.requires_grad]
    above = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    return [x.detach() for x in (out, *torch.autograd.grad(out, leaves, above))]


def doubled(x):
    return x.detach().double().requires_grad_(x.requires_grad)


@pytest.mark.parametrize("mask", ["none", "causal", "documents"])
@pytest.mark.parametrize("name", LEARNED)
def test_learned_parameters(name, mask, anew):
    """Those of each call, and their gradients; alone where nothing else is learned."""
    for at in range(4):
        anew.clear()
        kernel, vectors = learned(LEARNED[name]), drawn(grad=at != 3)
        hide = MASKS[mask]() if mask in MASKS else {"none": None, "causal": masks.causal}[mask]
        exact = kernel.with_tensors({one: doubled(x) for one, x in kernel.tensors().items()})
        wanted = of_all(exact, [doubled(x) for x in vectors], hide, "reference")
        for one, other in zip(of_all(kernel, vectors, hide), wanted, strict=True):
            assert one.shape == other.shape
            assert float((one.double() - other).norm()) <= 5e-5 * float(other.norm())
    assert not anew
    assert len(plain.KNOWN) == 1


@pytest.mark.parametrize("name", LEARNED)
def test_no_parameter_is_kept(name):
    kernel = learned(LEARNED[name])
    for _ in range(2):
        of_all(kernel, drawn(), None)
    gone = [weakref.ref(x) for x in kernel.tensors().values()]
    del kernel
    gc.collect()
    assert all(one() is None for one in gone)


def test_what_parameters_are_made_of_is_not_kept():
    weight, features = torch.randn(50, H, requires_grad=True), torch.randn(100, 50)
    memory = features.untyped_storage()
    of_all(Sigmoid(bias=(features @ weight).mean(0)), drawn(), None)
    del features
    gc.collect()
    assert torch._C._storage_Use_Count(memory._cdata) == 1


def test_parameters_elsewhere():
    """A number of no axes is read from any device, as by operators of torch; another tensor is not."""
    vectors = drawn(grad=False)
    attend(*vectors, kernel=Sigmoid(bias=torch.ones(H)))
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="bias lies on meta, and query on cpu"):
            attend(*vectors, kernel=Sigmoid(bias=torch.ones(H, device="meta")))


def test_a_layer_learns_its_kernel(anew):
    """A training step by settled calls is the step that float64 takes."""
    layer = heedful.nn.Attention(24, 3, kernel=Sigmoid(bias=nn.Parameter(torch.full((3,), -1.0))))
    exact, ignored = copy.deepcopy(layer).double(), torch.arange(Q) >= torch.tensor([[Q], [11]])
    exact.impl = "reference"
    for _ in range(3):
        anew.clear()
        x = torch.randn(B, Q, 24)
        for one, y in ((layer, x), (exact, x.double())):
            one.zero_grad()
            one(y, y, y, ignored, need_weights=False)[0].square().mean().backward()
        for p, q in zip(layer.parameters(), exact.parameters(), strict=True):
            assert float((p.grad.double() - q.grad).norm()) <= 1e-4 * float(q.grad.norm())
            p.data -= 0.01 * p.grad
            q.data -= 0.01 * q.grad
    assert not anew


def test_compositions_of_numbers_are_settled(anew):
    for kernel in (ReluSquared().normalized(), Sigmoid(bias=-1.0).averaged()):
        for _ in range(2):
            anew.clear()
            vectors, mask = drawn(), MASKS["documents"]()
            assert_right(vectors, outcome(vectors, mask, kernel=kernel), mask, kernel=kernel)
        assert not anew
    first, second = (Sigmoid(bias=bias).averaged() for bias in (1.0, 2.0))
    assert not torch.equal(attend(*vectors, kernel=first), attend(*vectors, kernel=second))
    assert None not in plain.KNOWN.values()


def test_a_kernel_that_scales_its_result_is_known_by_its_form(anew):
    """It is looked at each time, but launched as before."""
    for _ in range(2):
        anew.clear()
        vectors, mask, how = drawn(), MASKS["documents"](), {"kernel": 0.5 * Sigmoid()}
        assert_right(vectors, outcome(vectors, mask, **how), mask, **how)
    assert set(plain.KNOWN.values()) == {None}
    assert not anew

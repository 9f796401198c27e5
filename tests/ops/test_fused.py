"""Fused kernels in Triton's interpreter: values and every gradient against the reference in float64.

The interpreter's blocks are 16 and 32 long, so that a length of 37 crosses some and fills none. Compiled kernels are tested in
test_gpu.py, where each variant takes seconds to make.
"""

import math

import pytest
import torch

pytest.importorskip("triton", reason="the fused kernels need triton, which exists for Linux")

import triton
import triton.language as tl

from heedful import (
    Cosine,
    FeatureMap,
    Gaussian,
    HigherOrder,
    Laplace,
    Polynomial,
    Relu,
    ReluSquared,
    Sigmoid,
    Softmax,
    Unsupported,
    attend,
    masks,
)
from heedful.ops.fused import activations
from heedful.ops.fused.operators import fused_attention, fused_attention_backward
from interpreted import (
    DEVICE,
    GAUSSIAN,
    HEADS,
    INF,
    KERNELS,
    LENGTHS,
    assert_same,
    fused,
    needs_interpreter,
    per_head,
    shaped,
)

pytestmark = [needs_interpreter, pytest.mark.usefixtures("unwritten_is_nan")]

SEEN = torch.rand(2, HEADS, 37, 41, generator=torch.Generator().manual_seed(3)) > 0.5

# Sizes of the inputs, arguments of `attend`, and the shapes of what those are made of.
FEATURES = {
    "plain": ({"queries": 32, "keys": 64}, lambda: {}, ()),
    "odd": ({"queries": 37, "keys": 53, "size": 7, "width": 5}, lambda: {}, ()),
    "size-40": ({"size": 40, "width": 40}, lambda: {}, ()),
    "size-80": ({"size": 80, "width": 80}, lambda: {}, ()),
    "causal": ({"queries": 41, "keys": 41}, lambda: {"is_causal": True}, ()),
    "lengths": ({"batch": 2, "size": 8}, lambda: {"attn_mask": masks.padding(LENGTHS)}, ()),
    "packed": (
        {"queries": 41, "keys": 41},
        lambda: {"attn_mask": masks.packed([0, 11, 11, 30, 37]), "is_causal": True},
        (),
    ),
    "window": ({"queries": 47, "keys": 47, "size": 8}, lambda: {"attn_mask": masks.window(19, 3)}, ()),
    "shared-heads": ({"key_heads": 1}, lambda: {"is_causal": True, "enable_gqa": True}, ()),
    "low-rank": (
        {},
        lambda left, right: {"attn_mask": masks.low_rank(left, right)},
        ((HEADS, 37, 3), (1, 1, 41, 3)),
    ),
    "column": ({}, lambda bias: {"attn_mask": bias}, ((HEADS, 1, 41),)),
}


# Half a second each in the interpreter: every other feature of each kernel, another half for the next; test_fuzz.py mixes them all.
HALF = [(name, feature) for i, name in enumerate(KERNELS) for j, feature in enumerate(FEATURES) if (i + j) % 2 == 0]


@pytest.mark.parametrize(("name", "feature"), HALF)
def test_kernels_with_features(name, feature):
    sizes, arguments, shapes = FEATURES[feature]
    assert_same(KERNELS[name], shaped(**sizes), arguments, *(torch.randn(shape) for shape in shapes))


MASKS = {
    "dense": lambda: masks.dense(SEEN[:1, :1]),
    "dense-per-head": lambda: masks.dense(SEEN[:1]),
    "dense-per-batch-and-head": lambda: masks.dense(SEEN),
    "dense-of-keys": lambda: masks.dense(SEEN[:, :1, :1]),
    "dense-of-queries": lambda: masks.dense(SEEN[:1, :, :, :1]),
    "dense-causal": lambda: masks.dense(SEEN[0, 0]) & masks.causal,
    "keys": lambda: masks.keys(SEEN[:, 0, 0]),
    "blocks": lambda: masks.blocks(SEEN[:1, :1, :4, :5], (10, 9)),
    "blocks-per-batch-and-head": lambda: masks.blocks(SEEN[..., :3, :2], (17, 23)) & masks.window(20),
    "two-sizes-of-blocks": lambda: masks.blocks(SEEN[0, 0, :3, :2], (17, 23)) & masks.blocks(SEEN[0, 1, :2, :3], 19),
    "lower-right": lambda: masks.lower_right,
    "window-from-the-end": lambda: masks.window(5, 2, align="end") & masks.padding(LENGTHS),
    "ahead": lambda: masks.window(0, 7) & ~masks.causal,
    "document": lambda: masks.document(torch.arange(37) // 9, torch.arange(41) % 5),
    "documents-per-batch": lambda: masks.document(torch.arange(74).reshape(2, 37) // 9, torch.arange(82).reshape(2, 41) // 9),
    "packed-with-keys-of-their-own": lambda: masks.packed([0, 11, 11, 30], [0, 3, 20, 41]),
    "or": lambda: masks.causal | masks.padding(LENGTHS),
    "lengths-0-and-1": lambda: masks.padding([0, 1]) & masks.causal,
    "lengths-beyond-the-keys": lambda: masks.padding([60, 3]),
    "nothing": lambda: masks.padding([0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    kernel = (Softmax(), Gaussian(2.0, normalize=False), Sigmoid().averaged())[list(MASKS).index(name) % 3]
    assert_same(kernel, shaped(batch=2, size=8, width=4), lambda: {"attn_mask": MASKS[name]()})


def test_a_row_that_sees_nothing_gives_zeros():
    """With zero gradient, whatever the query holds and whatever the others see."""
    keep = torch.ones(37, 41, dtype=torch.bool, device=DEVICE)
    keep[3], keep[35] = False, False
    for kernel in (Softmax(), Gaussian(), Gaussian(normalize=False), ReluSquared().normalized(), Sigmoid().averaged()):
        query, key, value = (x.to(DEVICE, torch.float32).requires_grad_() for x in shaped())
        out = attend(query, key, value, keep, kernel=kernel, impl="triton")
        gradients = torch.autograd.grad(out.square().sum(), (query, key, value))
        assert not out[..., [3, 35], :].any()
        assert not gradients[0][..., [3, 35], :].any()
        assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("kernel", [Softmax(), Polynomial(2, 1.0)], ids=repr)
def test_float_masks(kernel):
    """Added to scores; the lowest and -inf hide. Of one number per pair there is no gradient."""
    pair = torch.randn(2, 1, 37, 41).masked_fill(torch.rand(2, 1, 37, 41) > 0.7, -INF)
    pair[0, 0, 5] = torch.finfo(torch.float32).min
    sizes = {"batch": 2, "size": 8}
    assert_same(kernel, shaped(**sizes), lambda: {"attn_mask": pair.to(DEVICE), "is_causal": True})
    assert_same(kernel, shaped(**sizes), lambda: {"attn_mask": torch.linspace(-1, 1, 37, device=DEVICE)[:, None]})
    hidden = masks.dense(pair[:, :, :1] > 0)
    for shape in ((2, 1, 1, 41), (HEADS, 1, 1)):
        assert_same(kernel, shaped(**sizes), lambda bias: {"attn_mask": masks.from_sdpa(bias, False) & hidden}, torch.randn(shape))  # fmt: skip


def test_a_float_mask_of_pairs_has_no_gradient():
    query, key, value = (x.to(DEVICE, torch.float32) for x in shaped())
    bias = torch.zeros(37, 41, device=DEVICE, requires_grad=True)
    with pytest.raises(Unsupported, match=r"gradient of a full bias.*masks\.low_rank"):
        attend(query, key, value, bias, impl="triton")
    with torch.no_grad():
        assert attend(query, key, value, bias, impl="triton").isfinite().all()


@pytest.mark.parametrize("kernel", [Gaussian(per_head(2.0)), Sigmoid(bias=per_head())], ids=repr)
def test_biases_of_low_rank(kernel):
    """Their leading axes broadcast, heads share keys, and two of them beside a column make one."""
    for shapes, sizes in (
        [((37, 3), (41, 3)), {"batch": 2}],
        [((2, 1, 37, 17), (1, HEADS, 41, 17)), {"batch": 2, "key_heads": 1}],
    ):
        factors = [torch.randn(shape) * 0.5 for shape in shapes]
        assert_same(kernel, shaped(**sizes), lambda left, right: {"attn_mask": masks.low_rank(left, right), "is_causal": True, "enable_gqa": True}, *factors)  # fmt: skip
    parts = [torch.randn(shape) for shape in ((HEADS, 37, 1), (41, 1), (37, 2), (2, 1, 41, 2), (2, 1, 1, 41))]
    assert_same(kernel, shaped(batch=2), lambda a, b, c, d, e: {"attn_mask": masks.low_rank(a, b) & masks.low_rank(c, d) & masks.from_sdpa(e, False)}, *parts)  # fmt: skip


def test_factors_may_lie_transposed():
    factors = torch.randn(HEADS, 3, 37), torch.randn(3, 41)
    assert_same(Softmax(), shaped(), lambda left, right: {"attn_mask": masks.low_rank(left.mT, right.mT)}, *factors)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 41), (37, 1), (16, 16), (33, 31)], ids=str)
def test_few_queries_and_keys(sizes):
    for kernel in (Softmax(), Gaussian(2.0, normalize=False)):
        assert_same(kernel, shaped(*sizes, size=8, width=8), lambda: {"is_causal": True})
        assert_same(kernel, shaped(*sizes, size=8, width=8))


@pytest.mark.parametrize("sizes", [(1, 1), (3, 17), (16, 20), (17, 3), (20, 256), (256, 16)], ids=str)
def test_head_sizes(sizes):
    size, width = sizes
    for kernel in (Gaussian(2.0 * size**0.25), Sigmoid()):
        assert_same(kernel, shaped(19, 23, size, width, heads=1))


def test_axes():
    """None of heads, several of batches, some that broadcast."""
    for shapes in (
        [(37, 8), (41, 8), (41, 5)],
        [(HEADS, 37, 8), (HEADS, 41, 8), (HEADS, 41, 5)],
        [(3, 1, HEADS, 13, 8), (1, 2, HEADS, 17, 8), (1, 1, HEADS, 17, 5)],
        [(1, HEADS, 13, 8), (3, HEADS, 17, 8), (1, HEADS, 17, 5)],
    ):
        kernel = Sigmoid(bias=0.5 if len(shapes[0]) == 2 else per_head())
        assert_same(kernel, [torch.randn(shape) for shape in shapes], lambda: {"is_causal": True})
    lengths, keep = torch.tensor([[17, 0], [1, 9], [3, 16]]), torch.rand(2, 1, 1, 17) > 0.3
    for mask in (masks.padding(lengths), masks.padding(lengths[:, 1]) & masks.dense(keep)):
        given = [torch.randn(3, 2, 1, n, 8) for n in (13, 17, 17)]
        assert_same(Softmax(), given, lambda mask=mask: {"attn_mask": mask & masks.window(11)})


def test_shared_heads():
    """With masks of every head, and with parameters of each."""
    bandwidth, keep = torch.tensor([1.5, 2.0, 2.5, 3.0]), torch.rand(1, 4, 37, 41) > 0.4
    for kernel, mask in ((Gaussian(bandwidth), masks.dense(keep)), (ReluSquared().normalized(), masks.padding([11]))):
        given = shaped(heads=4, key_heads=2, size=8, width=8)
        assert_same(kernel, given, lambda mask=mask: {"attn_mask": mask, "enable_gqa": True})


@pytest.mark.parametrize("heads", [(2, 4), (1, 2), (4, 1), (2, 1)], ids=str)
def test_keys_and_values_shared_differently(heads):
    for_keys, for_values = heads
    query, key, _ = shaped(heads=4, key_heads=for_keys, size=8)
    arguments = {"kernel": Sigmoid(), "impl": "triton", "enable_gqa": True}
    given = [x.to(DEVICE, torch.float32) for x in (query, key, torch.randn(1, for_values, 41, 8))]
    considered = {one.name: one.refusal for one in attend.plan(*given, **(arguments | {"impl": "auto"})).considered}
    if considered["triton"] is None:
        assert_same(Sigmoid(), given, lambda: {"enable_gqa": True})
    else:
        with pytest.raises(Unsupported, match="heads"):
            attend(*given, **arguments)


LAYOUTS = {
    "heads behind tokens": lambda *given: [x.transpose(1, 2) for x in given],
    "every second number": lambda *given: [x[..., ::2] for x in given],
    "every second token": lambda *given: [x[:, :, ::2] for x in given],
    "rows that are not aligned": lambda *given: [x[..., 1:] for x in given],
    "one tensor": lambda x, y, z: (x + y + z).expand(3, *x.shape).unbind(),
    "expanded": lambda *given: [x[:, :, :, :1].expand(x.shape) for x in given],
    "heads that are one": lambda *given: [x[:, :1].expand(-1, 2, -1, -1) for x in given],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [32, 37])
def test_inputs_that_are_not_contiguous(layout, length):
    shape = (2, length, 2, 8) if "behind" in layout else (2, 2, length, 8)
    assert_same(Gaussian(2.0), [torch.randn(shape) for _ in range(3)], starts=LAYOUTS[layout])


@pytest.mark.parametrize("length", [32, 37])
def test_gradients_from_above_that_are_not_contiguous(length):
    for ends in (
        lambda out: out.transpose(1, 2).reshape(2, length, -1),
        lambda out: out.sum(),
        lambda out: out[..., ::2],
        lambda out: out.mT.reshape(2, -1),
    ):
        assert_same(Softmax(), shaped(length, length, 8, 8, batch=2), ends=ends)


def test_results_repeat():
    given = [x.to(DEVICE, torch.float32).requires_grad_() for x in shaped(batch=2, heads=4, key_heads=2)]
    scale = torch.rand(4, device=DEVICE).requires_grad_()
    made = []
    for _ in range(2):
        out = attend(*given, is_causal=True, kernel=Softmax(scale), impl="triton", enable_gqa=True)
        made.append([out, *torch.autograd.grad(out.square().sum(), (*given, scale))])
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


def test_one_value_by_hand():
    """sigma(ln 3) = 3/4 and sigma(0) = 1/2: 0.75 * 4 + 0.5 * 6."""
    query = torch.tensor([[1.0, 0.0]], device=DEVICE)
    key = torch.tensor([[math.log(3.0), 5.0], [0.0, 7.0]], device=DEVICE)
    value = torch.tensor([[4.0], [6.0]], device=DEVICE)
    out = attend(query, key, value, kernel=Sigmoid(scale=1.0), impl="triton")
    torch.testing.assert_close(out, torch.tensor([[6.0]], device=DEVICE))


OPERATORS = {
    "gaussian": lambda: GAUSSIAN | {"lengths": torch.tensor([[17], [3]])},
    "bias": lambda: {
        "activation": "sigmoid",
        "beta": torch.zeros(2).requires_grad_(),
        "left": torch.randn(1, 2, 11, 3).requires_grad_(),
        "right": torch.randn(2, 1, 17, 3).requires_grad_(),
        "bias": torch.randn(1, 2, 1, 17).requires_grad_(),
    },
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_pass_opcheck(name, monkeypatch):
    monkeypatch.undo()
    given = fused(
        *(x.to(DEVICE, torch.float32).requires_grad_() for x in shaped(11, 17, 8, 8, batch=2)), **OPERATORS[name]()
    )
    torch.library.opcheck(fused_attention, given)
    tensors, settings = [None if x is None else x.detach() for x in given[:13]], given[13:]
    out, stat = fused_attention(*tensors, *settings)
    wanted = [x is not None for x in tensors[3:8]]
    torch.library.opcheck(fused_attention_backward, (*tensors, out, stat, torch.randn_like(out), *settings, wanted))


def test_a_compiled_call_is_one_graph(monkeypatch):
    kernel = Sigmoid(bias=per_head())
    monkeypatch.undo()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(query, key, value, lengths, bias, own):
        mask = masks.padding(lengths) & masks.from_sdpa(bias, True)
        return attend(query, key, value, mask, kernel=kernel.with_tensors(own), impl="triton", enable_gqa=True)

    for length in (37, 41):
        given = [x.to(DEVICE, torch.float32).requires_grad_() for x in shaped(length, length, key_heads=1, batch=2)]
        bias = torch.randn(HEADS, 1, length, device=DEVICE).requires_grad_()
        own = {name: x.to(DEVICE).requires_grad_() for name, x in kernel.tensors().items()}
        lengths = torch.tensor([length, 11], device=DEVICE)
        made = []
        for call in (compiled, compiled._torchdynamo_orig_callable):
            out = call(*given, lengths, bias, own)
            made.append([out, *torch.autograd.grad(out.square().sum(), (*given, bias, *own.values()))])
        for one, other in zip(*made, strict=True):
            torch.testing.assert_close(one, other)


def test_no_second_derivatives():
    query, key, value = (x.to(DEVICE, torch.float32).requires_grad_() for x in shaped())
    out = attend(query, key, value, impl="triton")
    gradient = torch.autograd.grad(out.square().sum(), query, create_graph=True)[0]
    with pytest.raises(Unsupported, match=r"no second derivatives; impl='stream'"):
        torch.autograd.grad(gradient.sum(), key)


class Bent(Sigmoid):
    """A user's kernel that inherits everything but its function."""

    def activation(self, score):
        return score.tanh()


def test_what_is_refused_says_why():
    x = torch.randn(1, 2, 19, 8, device=DEVICE)
    big = torch.randn(1, 1, 3, 257, device=DEVICE)
    for reason, given, arguments in (
        ("Bent is no elementwise function", (x, x, x), {"kernel": Bent()}),
        ("Laplace is no elementwise", (x, x, x), {"kernel": Laplace()}),
        ("FeatureMap is no elementwise", (x, x, x), {"kernel": FeatureMap()}),
        ("Sum is no elementwise", (x, x, x), {"kernel": Sigmoid() + Relu()}),
        ("Product is no elementwise", (x, x, x), {"kernel": Softmax() * Sigmoid()}),
        ("Divided is no elementwise", (x, x, x), {"kernel": Softmax().averaged()}),
        ("drop no coefficients", (x, x, x), {"dropout_p": 0.5}),
        ("above 256", (big, big, big[..., :8]), {}),
        ("above 256", (big[..., :8], big[..., :8], big), {}),
        ("above 256", (big[..., :130],) * 3, {"kernel": Softmax() * Gaussian()}),
        ("float32 and 16 bit", (x.double(),) * 3, {}),
    ):
        with pytest.raises(Unsupported, match=reason):
            attend(*given, impl="triton", **arguments)
    with pytest.raises(Unsupported, match=r"torch\.func"):
        torch.func.vmap(lambda y: attend(y, y, y, impl="triton"))(x)
    with pytest.raises(Unsupported, match=r"torch\.func"):
        torch.func.grad(lambda y: attend(y, y, y, impl="triton").sum())(x)


def test_the_interpreter_serves_float32_alone():
    x = torch.randn(1, 2, 19, 8)
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(Unsupported, match="interpreter serves float32"):
            attend(*(x.to(dtype),) * 3, impl="triton")
    for kernel in (Softmax(), Sigmoid(), Gaussian(normalize=False), FeatureMap()):
        assert attend.plan(x, x, x, kernel=kernel).chosen != "triton", "the interpreter is for tests"


def test_a_kernel_of_the_whole_sequence_moves_its_queries_here_too():
    assert_same(HigherOrder(Sigmoid(bias=per_head()), order=4), shaped(37, 37), lambda: {"is_causal": True})


@triton.jit
def read_table(score_, coefficient_, slope_, UNIT: tl.constexpr, ACT: tl.constexpr, DEGREE: tl.constexpr):
    at = tl.arange(0, 64)
    t = tl.load(score_ + at) * UNIT
    p = activations.coefficient(t, ACT, DEGREE, False)
    tl.store(coefficient_ + at, p)
    tl.store(slope_ + at, activations.slope(t, p, ACT, DEGREE))


@pytest.mark.parametrize("kernel", [Softmax(), Gaussian(), Sigmoid(), Relu(), ReluSquared(), *map(Polynomial, range(1, 5)), Cosine()], ids=repr)  # fmt: skip
def test_the_table(kernel):
    """The word of torch is the kernel's own, the line of Triton is the word of torch, its slope what autograd makes of it."""
    form = kernel.fused_form
    score = torch.linspace(-6.0, 6.0, 64, dtype=torch.float64).to(DEVICE).requires_grad_()
    wanted = activations.REFERENCES[form.activation](score, form.degree)
    torch.testing.assert_close(wanted, kernel.activation(score))
    (slope,) = torch.autograd.grad(wanted.sum(), score)
    made = torch.empty(2, 64, device=DEVICE)
    read_table[(1,)](score.detach().float(), *made, activations.UNITS[form.activation], form.activation, form.degree)
    torch.testing.assert_close(made.double(), torch.stack((wanted, slope)).detach(), rtol=1e-5, atol=1e-6)
    if form.activation == "sigmoid":
        read_table[(1,)](score.detach().float(), *made, activations.UNITS["tanh"], "tanh", 1)
        torch.testing.assert_close(made.double(), torch.stack((wanted, slope)).detach(), rtol=1e-5, atol=1e-6)


def test_the_table_is_complete():
    forms = {type(kernel): kernel.fused_form for kernel in KERNELS.values()}
    # A hyperbolic tangent is another form of the logistic function.
    assert {form.activation for form in forms.values() if form} | {"tanh"} == set(activations.REFERENCES)


def test_a_formula_of_its_own_inherits_no_form():
    class Steeper(Sigmoid):
        def activation(self, score):
            return (2 * score).sigmoid()

    class Renamed(Softmax):
        pass

    assert Steeper().fused_form is None
    assert Renamed().fused_form is None
    assert not Renamed().is_plain_softmax
    assert Renamed().folds


def test_gradients_that_nobody_wants_are_tensors_of_their_own(monkeypatch):
    """A kept launch has one tensor for all of them; torch takes no operator that returns one twice."""
    from heedful.ops.fused import launch, operators

    x = [torch.randn(1, 2, 7, 8) for _ in range(4)]
    settled = (*(None,) * 9, [1, 1], None, None, "relu", 1, 0, False)
    out, stat = operators.fused_attention(*x[:3], torch.ones(2), *settled)
    plain = launch.backward

    def aliased(*given):
        found = plain(*given)
        return found._replace(**dict.fromkeys(("alpha", "beta", "left", "right", "bias"), found.alpha))

    monkeypatch.setattr(launch, "backward", aliased)
    tensors, numbers = settled[:9], settled[9:]
    gradients = operators.fused_attention_backward(
        *x[:3], torch.ones(2), *tensors, out, stat, x[3], *numbers, [False] * 5
    )
    assert len({id(one) for one in gradients}) == 8


@pytest.mark.parametrize(
    "mask",
    [masks.keys(torch.ones(2, 0, dtype=torch.bool)), torch.ones(0, 0, dtype=torch.bool), masks.packed([0, 0])],
    ids=["keys", "tensor", "packed"],
)
def test_plan_where_there_is_nothing(mask):
    x = torch.empty(2, 3, 0, 8)
    assert attend(x, x, x, mask, impl="triton").shape == x.shape
    assert attend.plan(x, x, x, mask, impl="triton").chosen == "triton"

"""One kernel per head: the heads of a call are calls of their own, whatever kernels, masks and shared keys they have."""

import pytest
import torch

from heedful import (
    Cosine,
    Gaussian,
    HigherOrder,
    InvalidArgument,
    Kernel,
    Laplace,
    PerHead,
    Sigmoid,
    Softmax,
    Tanh,
    Unsupported,
    _attend,
    attend,
    lens,
    masks,
)
from heedful.kernels import as_kernel
from heedful.ops import heads

HEADS, N = 6, 11
GENERATOR = torch.Generator().manual_seed(11)


def normal(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def kernels():
    """Equal ones apart and together, tensors, and kernels of the whole sequence."""
    width, mix = torch.tensor(1.5, dtype=torch.float64), normal(7, 7) / 7
    each = [
        Softmax(),
        Gaussian(width),
        Softmax(),
        HigherOrder(Tanh(), (2, 4), mix),
        Sigmoid().symmetric(),
        Gaussian(width),
    ]
    return [kernel.with_tensors({n: t.requires_grad_() for n, t in kernel.tensors().items()}) for kernel in each]


MASKS = {
    "none": lambda: None,
    "causal": lambda: masks.causal,
    "padding": lambda: masks.padding([N, 5]),
    "window": lambda: masks.window(3, 2) & masks.padding([N, 5]),
    "dense per head": lambda: normal(2, HEADS, N, N) > -1,
    "float per head": lambda: normal(HEADS, N, N).masked_fill(normal(HEADS, N, N) > 1, -torch.inf),
    "causal per head": lambda: masks.dense(normal(HEADS, N, N) > -1) & masks.causal,
    "column": lambda: normal(2, 1, 1, N),
    "blocks per head": lambda: masks.blocks(normal(2, HEADS, 3, 4) > -0.5, (4, 3)),
    "keys per head": lambda: masks.keys(normal(2, HEADS, N) > -1),
    "beside": lambda: masks.beside(masks.padding([7, 2]), 8, None, 3),
    "factors": lambda: masks.low_rank(normal(HEADS, N, 2), normal(2, 1, N, 2)) & masks.causal,
}


def written_out(mask, shape):
    """A mask as booleans and what it adds, over all heads."""
    mask = masks.from_sdpa(mask)
    if mask is None:
        return None
    keep = mask.dense(shape).expand(shape)
    added = torch.zeros(shape, dtype=torch.float64) if mask.bias is None else mask.bias.expand(shape)
    if mask.factors is not None:
        added = added + (mask.factors[0] @ mask.factors[1].mT).expand(shape)
    return added.masked_fill(~keep, -torch.inf)


def answers(function, leaves):
    out = function(*leaves)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    gradients = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True))]


@pytest.mark.parametrize("key_heads", [HEADS, 3, 1])
@pytest.mark.parametrize("mask", MASKS)
def test_every_head_is_a_call_of_its_own(mask, key_heads):
    """Values and every gradient, of one call a head with its part of the mask, to 1e-10."""
    each, hiding = kernels(), MASKS[mask]()
    dense = written_out(hiding, (2, HEADS, N, N))
    whole = PerHead(tuple(each))
    width, mix = each[1].bandwidth, each[3].mix
    leaves = [
        x.requires_grad_() for x in (normal(2, HEADS, N, 7), normal(2, key_heads, N, 7), normal(2, key_heads, N, 5))
    ]
    leaves += [width, mix]

    def one_by_one(query, key, value, *_):
        outs = []
        for head, kernel in enumerate(each):
            group = head // (HEADS // key_heads)
            parts = query[:, head : head + 1], key[:, group : group + 1], value[:, group : group + 1]
            outs.append(
                attend(*parts, None if dense is None else dense[:, head : head + 1], kernel=kernel, impl="reference")
            )
        return torch.cat(outs, dim=1)

    wanted = answers(one_by_one, leaves)
    for kernel in (whole, each):
        for impl in ("auto", "reference", "stream"):

            def together(query, key, value, *_, kernel=kernel, impl=impl):
                return attend(query, key, value, hiding, enable_gqa=True, kernel=kernel, impl=impl)

            for one, other in zip(answers(together, leaves), wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    query, key, value = leaves[:3]
    weights = attend.coefficients(query, key, hiding, enable_gqa=True, kernel=each)
    value = value.repeat_interleave(HEADS // key_heads, dim=1)
    torch.testing.assert_close((weights @ value).detach(), wanted[0], rtol=1e-10, atol=1e-10)


def test_heads_stand_in_their_order():
    """Negative control: the same kernels in another order give another result."""
    x = normal(1, 3, N, 7)
    out = attend(x, x, x, kernel=[Softmax(), Sigmoid(), Tanh()])
    other = attend(x, x, x, kernel=[Sigmoid(), Softmax(), Tanh()])
    assert (out - other).abs().amax(dim=(0, 2, 3)).gt(1e-2).tolist() == [True, True, False]


def test_equal_kernels_run_together(monkeypatch):
    """By value where they have no tensors, by the same tensors where they have some: two parameters are learned apart."""
    ran = []
    combined = _attend._combined
    monkeypatch.setattr(_attend, "_combined", lambda call, impl: ran.append(call) or combined(call, impl))
    width, other = (torch.tensor(2.0, requires_grad=True) for _ in range(2))
    x = torch.randn(2, 6, 5, 4)
    attend(x, x, x, kernel=[Softmax(), Gaussian(width), Softmax(), Gaussian(other), Gaussian(width), Softmax()])
    assert [(call.query.shape[1], type(call.kernel).__name__) for call in ran] == [
        (3, "Softmax"),
        (2, "Gaussian"),
        (1, "Gaussian"),
    ]
    ran.clear()
    attend(x, x, x, kernel=[Softmax()] * 6)
    assert len(ran) == 1
    assert ran[0].query is x


def test_masks_that_are_the_same_for_all_heads_are_kept_as_they_are():
    x = torch.randn(2, 3, 5, 4)
    for mask in (masks.causal, masks.padding([5, 2]), masks.causal & masks.padding([5, 2]), masks.window(1)):
        call = _attend._request(x, x, x, mask, 0.0, False, None, False, [Softmax(), Sigmoid(), Softmax()])
        assert all(part.mask is call.mask for _, part in heads.split(call))


def test_the_plan_names_the_implementation_of_each_head():
    x = torch.randn(2, 3, 19, 8)
    plan = attend.plan(x, x, x, is_causal=True, kernel=[Softmax(), Sigmoid(), Gaussian(2.0)])
    assert plan.heads == ("sdpa", "reference", "sdpa")
    assert plan.chosen == "sdpa + reference"
    assert plan.reason == "one kernel per head: sdpa for heads 0, 2, reference for head 1"
    told = {one.name: one for one in plan.considered}
    assert told["sdpa"].refusal == "head 1: the coefficient is not the exponential of a score"
    assert told["sdpa"].cost is None
    parts = [attend.plan(x[:, :1], x[:, :1], x[:, :1], is_causal=True, kernel=k) for k in plan.kernel.kernels]
    of = lambda part, name: next(one.cost for one in part.considered if one.name == name).flops  # noqa: E731
    assert told["stream"].cost.flops == sum(of(part, "stream") for part in parts)
    assert told["sdpa + reference"].cost.flops == pytest.approx(sum(of(part, part.chosen) for part in parts))
    assert "> sdpa + reference" in str(plan)
    assert plan.to_dict()["heads"] == ["sdpa", "reference", "sdpa"]
    assert attend.plan(x, x, x, kernel=[Softmax(), Softmax(), Gaussian(2.0)]).chosen == "sdpa"
    assert attend.plan(x, x, x).heads == ("sdpa",) * 3
    with pytest.raises(Unsupported, match="'sdpa' cannot serve Sigmoid"):
        attend(x, x, x, kernel=[Softmax(), Sigmoid(), Softmax()], impl="sdpa")


def test_dropout_acts_in_every_head():
    x, value = torch.randn(1, 3, 301, 4), torch.ones(1, 3, 301, 2)
    each = [Softmax(), Sigmoid(), Softmax()]
    torch.manual_seed(0)
    ratio = attend(x, x, value, None, 0.5, kernel=each) / attend(x, x, value, kernel=each)
    assert (ratio.mean(dim=(0, 2, 3)) - 1).abs().max() < 0.05
    assert ratio.std(dim=(0, 2, 3)).min() > 0.02


def test_watchers_hear_of_one_call():
    heard = []
    x = torch.randn(1, 3, 5, 4)
    _attend.WATCHERS.append(lambda request, out: heard.append((request, out)))
    try:
        out = attend(x, x, x, kernel=[Softmax(), Sigmoid().symmetric(), Softmax()])
    finally:
        _attend.WATCHERS.pop()
    ((request, told),) = heard
    assert told is out
    assert request.query is x
    assert request.kernel == PerHead((Softmax(), Sigmoid().symmetric(), Softmax()))


def test_a_model_with_one_kernel_per_head_is_observed():
    class Model(torch.nn.Module):
        def forward(self, x):
            return attend(x, x, x, masks.causal, kernel=[Softmax(), Sigmoid(), Gaussian(2.0).symmetric()])

    x = torch.randn(2, 3, 5, 4)
    (layer,) = lens.observe(Model(), x)
    wanted = attend.coefficients(x, x, is_causal=True, kernel=[Softmax(), Sigmoid(), Gaussian(2.0).symmetric()])
    torch.testing.assert_close(layer.weights, wanted)
    torch.testing.assert_close(layer.weights_of(heads=slice(1, 3)), wanted[:, 1:3])


def test_it_compiles_in_one_graph():
    torch.compiler.reset()
    leaves = [normal(2, 4, N, 7).float().requires_grad_() for _ in range(3)]
    leaves += [torch.tensor(1.5, requires_grad=True)]

    def run(query, key, value, width):
        each = [Softmax(), Gaussian(width), Softmax(), Gaussian(width).symmetric()]
        return attend(query, key, value, masks.causal, kernel=each)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for one, other in zip(answers(run, leaves), answers(compiled, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("garbage", [1e30, torch.inf, torch.nan])
def test_garbage_behind_a_mask_does_not_matter(garbage):
    """Hidden from one head alone, too: what a head does not see is nothing to it."""
    keep = torch.ones(3, N, N, dtype=torch.bool)
    keep[:, :, 2], keep[:, 2] = False, False
    keep[1, :, 4] = False
    results = []
    for filler in (0.5, garbage):
        query, key, value = (torch.randn(1, 3, N, 4, generator=torch.Generator().manual_seed(n)) for n in range(3))
        for x in (query, key, value):
            x[..., 2, :] = filler
        key[:, 1, 4], value[:, 1, 4] = filler, filler
        leaves = [x.requires_grad_() for x in (query, key, value)]
        out = attend(*leaves, masks.dense(keep), kernel=[Softmax(), Gaussian(2.0), Sigmoid()])
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def test_the_algebra_acts_on_each():
    query, key, value = normal(1, 3, N, 7), normal(1, 3, N, 7), normal(1, 3, N, 5)
    whole = PerHead((Sigmoid(), Gaussian(2.0, normalize=False), Sigmoid(bias=-1.0)))
    factors = normal(3)
    out = attend(query, key, value, kernel=whole)
    torch.testing.assert_close(attend(query, key, value, kernel=0.5 * whole), 0.5 * out)
    torch.testing.assert_close(attend(query, key, value, kernel=whole * factors), factors[:, None, None] * out)
    torch.testing.assert_close(attend(query, key, value, kernel=whole + whole), 2 * out)
    torch.testing.assert_close(
        attend(query, key, value, kernel=whole + Cosine()), out + attend(query, key, value, kernel=Cosine())
    )
    assert whole.normalized() == PerHead(tuple(one.normalized() for one in whole.kernels))
    assert whole.symmetric() == PerHead(tuple(one.symmetric() for one in whole.kernels))
    assert whole * Laplace() == PerHead(tuple(one * Laplace() for one in whole.kernels))
    assert whole.normalized().traits.division == "sum"
    scaled = attend(query, key, value, scale=0.3, kernel=[Softmax(), Sigmoid(), Softmax()])
    torch.testing.assert_close(scaled, attend(query, key, value, kernel=[Softmax(0.3), Sigmoid(0.3), Softmax(0.3)]))


def test_traits_are_those_of_all():
    assert PerHead((Softmax(), Gaussian())).traits.invariant
    assert not PerHead((Softmax(), HigherOrder(mix=torch.eye(2)))).traits.invariant
    assert not PerHead((Softmax(), Tanh())).traits.nonnegative
    assert PerHead((Softmax(), Tanh())).traits.division is None


def test_it_is_data(tmp_path):
    width = torch.tensor([2.0], requires_grad=True)
    mixes = torch.eye(2), torch.ones(2, 2)
    kernel = as_kernel([Gaussian(width), HigherOrder(Sigmoid(), 6, mixes).symmetric(), 0.5 * Softmax()])
    assert list(kernel.tensors()) == ["kernels.0.bandwidth", "kernels.1.kernel.mix.0", "kernels.1.kernel.mix.1"]
    again = Kernel.from_json(kernel.to_json())
    assert again == kernel
    assert hash(again) == hash(kernel)
    assert repr(kernel).startswith(
        "PerHead(kernels=(Gaussian(bandwidth=tensor(2; shape=(1,)), normalize=True), Symmetric("
    )
    kernel.save_pretrained(tmp_path)
    loaded = Kernel.from_pretrained(tmp_path)
    assert loaded == kernel
    assert loaded.kernels[0].bandwidth.requires_grad
    assert kernel != as_kernel([Gaussian(width), Softmax(), Softmax()])
    assert kernel.with_tensors({"kernels.0.bandwidth": torch.tensor([3.0])}).kernels[0] == Gaussian(torch.tensor([3.0]))
    assert {type(leaf).__name__ for leaf in kernel.leaves()} == {"Gaussian", "Sigmoid", "Softmax"}


def test_one_head_without_an_axis():
    x = torch.randn(5, 4)
    torch.testing.assert_close(attend(x, x, x, kernel=[Sigmoid()]), attend(x, x, x, kernel=Sigmoid()))
    empty = torch.randn(2, 2, 0, 4)
    assert attend(empty, empty, empty, masks.causal, kernel=[Sigmoid(), Softmax()]).shape == (2, 2, 0, 4)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda x: attend(x, x, x, kernel=[Softmax(), Sigmoid()]),
            "2 kernels given, one per head, and query .* has 3 heads",
        ),
        (lambda x: attend.plan(x, x, x, kernel=[Softmax()] * 4), "give 3 kernels"),
        (lambda x: attend.coefficients(x, x, kernel=[Softmax()] * 4), "give 3 kernels"),
        (lambda x: attend(x, x, x, kernel=[]), "a list of kernels, one per head"),
        (
            lambda x: attend(x, x, x, kernel=[Softmax(), None, Softmax()]),
            "kernel of head 1 must be one kernel; got None",
        ),
        (lambda x: PerHead((Softmax(), PerHead((Softmax(),)))), "kernel of head 1 must be one kernel"),
        (lambda x: PerHead(Softmax()), "a list of kernels, one per head"),
        (lambda x: PerHead((Gaussian(torch.ones(3)),)), "bandwidth of head 0 has 3 entries; expected 1"),
        (
            lambda x: attend(x, x[..., :2, :], x[..., :2, :], kernel=[Softmax().symmetric()] * 3),
            "as many keys as queries",
        ),
        (lambda x: HigherOrder(PerHead((Softmax(),))), "kernel must be a kernel of pairs"),
        (lambda x: PerHead((Softmax(),)) + PerHead((Softmax(), Softmax())), "do not combine"),
        (lambda x: attend(x, x, x, kernel="softmax"), "kernel must be a heedful kernel"),
        (lambda x: PerHead((Softmax(),)).coefficients(x, x), "acts on all heads"),
    ],
)
def test_what_it_refuses(make, told):
    with pytest.raises(InvalidArgument, match=told):
        make(torch.randn(1, 3, 5, 4))

"""Fused kernels on hard inputs, in Triton's interpreter: huge and far vectors, and what a mask hides, finite or not."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the fused kernels need triton, which exists for Linux")


import heedful.ops.fused as room
from heedful import (
    Cosine,
    Gaussian,
    ReluSquared,
    Sigmoid,
    Softmax,
    attend,
    masks,
)
from heedful.ops.fused import launch
from heedful.ops.fused.operators import fused_attention
from interpreted import (
    DEVICE,
    GAUSSIAN,
    HEADS,
    INF,
    KERNELS,
    LENGTHS,
    NAN,
    SOFTMAX,
    assert_same,
    fused,
    needs_interpreter,
    shaped,
)

pytestmark = [needs_interpreter, pytest.mark.usefixtures("unwritten_is_nan")]

ONE_HUGE = torch.zeros(41).index_fill(0, torch.tensor([5]), 50.0)


@pytest.mark.parametrize(
    "kernel",
    [Softmax(), Gaussian(2.0), Gaussian(2.0, normalize=False), Sigmoid(), ReluSquared().normalized()],
    ids=repr,
)
def test_hard_inputs(kernel):
    """Equal keys, scores that are all negative, one huge bias, vectors far from zero, large queries."""
    query, key, value = shaped(size=8)
    # Rows divided by their sum do not depend on the query then: what is left of its gradient is rounding.
    assert_same(kernel, [query, key[..., :1, :].expand_as(key), value], bound=1e-4 if kernel.traits.division else 1e-5)
    assert_same(kernel, [query.abs(), -key.abs(), value])
    assert_same(kernel, [query, key, value], lambda bias: {"attn_mask": bias}, ONE_HUGE[None].clone())
    if kernel.traits.stationary:
        assert_same(kernel, [query + 100.0, key + 100.0, value], bound=2e-5)
    else:
        # A row divided by a large sum cancels in its gradient.
        assert_same(kernel, [query * 10, key, value], bound=5e-5 if kernel.traits.division else 1e-5)


def test_small_coefficients_keep_their_relative_precision():
    for kernel in (Sigmoid(bias=-20.0), Gaussian(0.5, normalize=False)):
        assert_same(kernel, shaped(size=8), floor=1e-30)


def mixed(far):
    """Some rows and some columns far away, so that blocks differ in the form that serves them."""
    query, key, value = shaped(71, 83, 8, 8, heads=1)
    query[..., 20:40, :] *= far
    key[..., 30:50, :] *= far
    return [query, key, value]


@pytest.mark.parametrize(
    "kernel",
    [Gaussian(1.0), Gaussian(1.0, normalize=False), Softmax(1.0), Softmax() * Gaussian(1.0)],
    ids=repr,
)
def test_what_is_out_of_range_takes_the_other_form(kernel):
    """Scores of a thousand: a divided row is known to a float32's rounding of its logarithm, about 1e-4 there."""
    for far, causal in ((3.0, False), (8.0, True)):
        given = mixed(far)
        largest = float((given[0] @ given[1].mT).abs().max() + given[1].square().sum(-1).max())
        assert_same(kernel, given, lambda causal=causal: {"is_causal": causal}, bound=max(1e-5, 1e-7 * largest))


def with_safe_form(monkeypatch, **changes):
    """Forms that serve where the short one does not, changed so that their results can be told from its own."""
    forms = launch._forms

    def changed(*args):
        short, safe = forms(*args)
        return short, launch.constants(replace(safe.spec, **changes))

    monkeypatch.setattr(launch, "_forms", changed)


@pytest.mark.parametrize("kernel", [Gaussian(1.0), Gaussian(1.0, normalize=False)], ids=repr)
def test_the_short_form_serves_what_is_in_range_alone(kernel, monkeypatch):
    with_safe_form(monkeypatch, ACT="power", DEGREE=2)
    query, key, value = (x.to(DEVICE, torch.float32) for x in mixed(8.0))
    out = attend(query, key, value, kernel=kernel, impl="triton")
    wanted = attend(query, key, value, kernel=kernel, impl="reference")
    assert not torch.isclose(out[..., 20:40, :], wanted[..., 20:40, :], rtol=1e-2, atol=1e-4).any(-1).all()
    torch.testing.assert_close(out[..., 64:, :], wanted[..., 64:, :])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("bias", "lowered", "short"), [(-5.0, 0.0, True), (0.0, 0.0, True), (0.0, 12.0, False), (-8.0, 1.0, False)]
)
def test_small_coefficients_are_not_those_of_a_hyperbolic_tangent(bias, lowered, short, causal, monkeypatch):
    """Scores that all are far below zero: the other form serves, forward and backward."""
    with_safe_form(monkeypatch, ACT="relu")
    leaves = [0.1 * x.to(DEVICE, torch.float32) for x in shaped(71, 71, 16, 16)]
    leaves[0][..., 0], leaves[1][..., 0] = -4.0, lowered  # scores of -lowered
    leaves = [x.requires_grad_() for x in leaves]
    out = attend(*leaves, kernel=Sigmoid(1.0, bias), is_causal=causal, impl="triton")
    ours = [out, *torch.autograd.grad(out.sum(), leaves)]
    if not short:
        assert not any(x.any() for x in ours)
        return
    wanted = attend(*leaves, kernel=Sigmoid(1.0, bias), is_causal=causal, impl="reference")
    torch.testing.assert_close(ours, [wanted, *torch.autograd.grad(wanted.sum(), leaves)])


def test_who_is_tried_by_a_hyperbolic_tangent():
    """Sigmoids in 16 bit whose bias is a number that lets large coefficients be expected, unless somebody forbids it."""

    def function(bias, dtype=torch.bfloat16):
        return room._function(Sigmoid(bias=bias).fused_form, dtype)

    assert [function(bias) for bias in (0.0, -8.5, -8.6, torch.zeros(2))] == ["tanh", "tanh", "sigmoid", "sigmoid"]
    with room.approximate(False):
        assert function(0.0) == "sigmoid"
    assert function(0.0) == "tanh"
    assert room._function(Gaussian().fused_form, torch.bfloat16) == "exp"


def test_keys_far_from_every_query_take_the_other_form():
    """A divided row is what it is however small its coefficients are; one that is not divided vanishes."""
    # Sixteenths: float32 sums their products exactly in any order, where how a processor rounds them would decide.
    query, key, value = [(16 * x).round() / 16 for x in shaped(size=8)]
    key = torch.cat((key[..., :20, :] + 12.0, key[..., 20:, :] - 12.0), dim=-2)
    assert_same(Gaussian(1.0), [query, key, value], bound=2e-4)
    assert_same(Gaussian(1.0, normalize=False), [query, key, value])


def test_a_large_bias_on_far_vectors():
    """exp(-|q - k|^2 / 2 + 50), where |q|^2 / 2 alone is out of range."""
    away = torch.full((8,), 3.2 * 2.7 / 8**0.5)
    query = away + 0.1 * torch.randn(1, HEADS, 37, 8)
    key = torch.cat((away + 0.1 * torch.randn(1, HEADS, 20, 8), -away + 0.1 * torch.randn(1, HEADS, 21, 8)), dim=-2)
    for kernel in (Gaussian(1.0), Gaussian(1.0, normalize=False)):
        given = [query, key, torch.randn(1, HEADS, 41, 8)]
        assert_same(kernel, given, lambda bias: {"attn_mask": bias}, ONE_HUGE[None].clone(), bound=1e-4)


# Arguments of the operator: a form, and masks that hide keys 20..29 from everybody. Through `attend` float32 distances are
# shielded before they arrive; those of 16 bit, which the interpreter does not multiply, are not.
HIDING = {
    "lengths": lambda: {"lengths": torch.tensor([[20]])},
    "causal": lambda: {"high": -18},
    "window": lambda: {"low": -37, "high": -18},
    "packed": lambda: {"query_ids": torch.arange(37)[None, None] // 20, "key_ids": torch.arange(30)[None, None] // 20 * 7},
    "dense": lambda: {"keep": (torch.arange(30) < 20).expand(1, 1, 37, 30)},
    "blocks": lambda: {"blocks": torch.tensor([[[[True, True, False]] * 4]]), "block_size": [10, 10]},
}  # fmt: skip


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize(
    ("given", "key_heads"),
    [
        (SOFTMAX, 1),
        (GAUSSIAN, 2),
        (GAUSSIAN, 1),
        (GAUSSIAN | {"division": 0}, 2),
        ({"activation": "power", "degree": 3, "division": 2}, 2),
    ],
    ids=["softmax shared", "gaussian", "gaussian shared", "gaussian raw", "polynomial averaged"],
)
def test_hidden_numbers_leak_nowhere(hiding, given, key_heads):
    """Neither into outputs nor into gradients."""
    query, key, value = (x.to(DEVICE, torch.float32) for x in shaped(37, 30, 8, 8, key_heads=key_heads))
    made = []
    for keys, values in ((1.0, 1.0), (NAN, INF)):
        key[..., 20:, :], value[..., 20:, 3] = keys, values
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out, _ = fused_attention(*fused(*leaves, **given, **HIDING[hiding]()))
        made.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other)
    assert not made[1][2][..., 20:, :].any()
    assert not made[1][3][..., 20:, :].any()


@pytest.mark.parametrize("name", ["softmax", "gaussian", "sigmoid", "cosine", "normalized", "product"])
def test_attend_lets_nothing_hidden_through(name):
    kernel = KERNELS[name].with_tensors({n: t.to(DEVICE) for n, t in KERNELS[name].tensors().items()})
    query, key, value = (x.to(DEVICE, torch.float32) for x in shaped(batch=2, size=8, width=8))
    key[0, :, 37:], value[0, :, 37:] = NAN, INF  # behind the last query
    made = []
    for filler in (1.0, NAN):
        key[1, :, 11:], value[1, :, 11:] = filler, filler
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = attend(*leaves, masks.padding(LENGTHS) & masks.causal, kernel=kernel, impl="triton")
        made.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert one.isfinite().all()


@pytest.mark.parametrize("kernel", [Softmax(), Gaussian(2.0), Gaussian(2.0, normalize=False), Sigmoid(), Cosine(), ReluSquared().normalized()], ids=repr)  # fmt: skip
def test_what_is_seen_and_not_finite_makes_rows_nan(kernel):
    """As `stream` does it: the whole row of every query that may attend to it, and no other. An infinite key has an infinite score."""
    query, key, value = (x.to(DEVICE, torch.float32) for x in shaped(37, 37, 8, 8, batch=2))
    query[0, 0, 3, 1], key[0, 1, 25, 2], value[1, 0, 11, 7], key[1, 1, 36], value[0, 0, 2, 0] = NAN, NAN, -INF, NAN, NAN
    for mask in (masks.causal & masks.padding([37, 20]), masks.packed([0, 9, 30]) & masks.window(20, 37)):
        out, wanted = (attend(query, key, value, mask, kernel=kernel, impl=impl) for impl in ("triton", "stream"))
        assert torch.equal(out.isnan(), wanted.isnan())
        assert wanted.isnan().any()
        assert not wanted.isnan().all()
        torch.testing.assert_close(out, wanted, equal_nan=True, rtol=1e-4, atol=1e-5)

"""The passes for Hopper as far as they go without one: whom they serve, where heads lie, what goes before and who serves what they leave."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

from heedful import Gaussian, ReluSquared, Sigmoid, Softmax, attend
from heedful.ops.fused import hopper, hopper_backward, launch, serving
from heedful.ops.fused._device import Chip, Setting
from interpreted import needs_interpreter

SHAPE = (3, 5, 7, 8)


def laid(name):
    """Heads apart, beside one another, and beside one another as a slice of a joint projection."""
    B, H, n, D = SHAPE
    numbers = torch.arange(3.0 * B * H * n * D)
    return {
        "apart": lambda: numbers[: B * H * n * D].view(SHAPE),
        "beside": lambda: numbers[: B * H * n * D].view(B, n, H, D).transpose(1, 2),
        "joint": lambda: numbers.view(B, n, 3, H, D)[:, :, 1].transpose(1, 2),
        "one head": lambda: numbers[: B * n * D].view(B, n, 1, D).transpose(1, 2),
    }[name]()


@pytest.mark.parametrize("name", ["apart", "beside", "joint", "one head"])
def test_a_plane_holds_every_row_where_it_says(name):
    x = laid(name)
    shape, strides, rows_b, rows_h, cols_h = hopper.plane(x)
    flat = torch.as_strided(x, shape, strides)
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            row, column = b * rows_b + h * rows_h, h * cols_h
            assert torch.equal(flat[row : row + x.shape[2], column : column + x.shape[3]], x[b, h])


def test_what_lies_in_no_plane():
    x = laid("apart")
    for other in (x.mT, x.transpose(0, 2), torch.zeros(3, 5, 7, 6)):
        assert hopper.plane(other) is None
    assert hopper.plane(x.expand(3, *SHAPE[1:])) is not None


@pytest.mark.parametrize("processors", [132, 14])  # a whole chip, and a small part of one
@pytest.mark.parametrize(("heads", "length", "tall"), [(32, 1152, 192), (7, 256, 128), (256, 1024, 192)])
def test_every_program_has_its_part(heads, length, tall, processors):
    programs, together = hopper.balance(heads, length, length, tall, True, processors)
    tiles = heads * -(-length // tall)
    assert 1 <= programs <= min(processors, tiles)
    assert together >= 1


def problem(dtype=torch.bfloat16, size=64, length=128, batch=16, **changes):
    shape = (batch, 16, length, size)
    query, key, value = (torch.empty(shape, dtype=dtype, device="meta") for _ in range(3))
    settled = {"block_size": [1, 1], "low": None, "high": None, "activation": "sigmoid", "degree": 1, "division": 0, "distance": False}  # fmt: skip
    return launch.Problem(query, key, value, torch.ones(16), *(None,) * 9, **settled)._replace(**changes)


REFUSED = {
    "compute capability": problem(),
    "bfloat16": problem(torch.float16),
    "no mask": problem(low=-5),
    "causality of as many": problem(high=3),
    "exp, and of products": problem(activation="power"),
    "divided": problem(division=1),
    "by their sum alone": problem(activation="exp", division=2),
    "head sizes": problem(size=96),
    "128 divides": problem(length=130),
    "too few rows": problem(batch=1),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_who_is_refused(reason, monkeypatch):
    monkeypatch.setattr(hopper, "chip", lambda device: Chip(8 if reason == "compute capability" else 9, 132, 2**17))
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 0)
    monkeypatch.setattr(hopper, "is_cuda", lambda x: True)
    assert reason in hopper.refuse(REFUSED[reason])
    assert hopper.refuse(problem()) is None or reason == "compute capability"


@needs_interpreter
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", [Sigmoid(bias=-3.0), ReluSquared(), Softmax(), Gaussian(3.0), Gaussian(3.0, normalize=False)], ids=repr)  # fmt: skip
def test_what_is_left_is_computed_behind(kernel, causal, monkeypatch):
    """A stand-in that computes nothing of some rows and marks them; all others stay as it gave them."""
    leaves = [torch.randn(2, 3, 96, 16, requires_grad=True) for _ in range(3)]
    wanted = attend(*leaves, is_causal=causal, kernel=kernel, impl="reference")
    gradients = torch.autograd.grad(wanted.sum(), leaves)
    marked = []

    def forward(problem, out, stat, halves, tickets, launch):
        out[:] = wanted.detach()
        if halves is not None:
            halves[:] = 0.5 * problem.key.square().sum(-1)
        if stat is None:
            return
        stat[:] = 0.0
        if problem.division:
            scores = kernel.fold(problem.query, problem.key)
            t = scores.query @ scores.key.mT * scores.scale + (
                0 if scores.column is None else scores.column[..., None, :]
            )
            t = t.masked_fill(torch.ones(96, 96).triu(1).bool(), -torch.inf) if causal else t
            stat[:] = t.logsumexp(-1) / torch.log(torch.tensor(2.0))
        out[1, 2, 40:], stat[1, 2, 50] = 7.0, torch.nan
        marked.append(stat)

    monkeypatch.setattr(serving, "forward", lambda problem: forward)
    monkeypatch.setattr(launch, "chip", lambda device: Chip(9, 1, 2**17))
    out = attend(*leaves, is_causal=causal, kernel=kernel, impl="triton")
    assert bool(marked) == (causal or not isinstance(kernel, ReluSquared))
    if marked:
        torch.testing.assert_close(out[1, 2, 32:64], wanted[1, 2, 32:64], rtol=1e-4, atol=1e-5)
        assert bool((out[1, 2, 64:] == 7.0).all())  # in a block without a mark
        return
    torch.testing.assert_close(torch.autograd.grad(out.sum(), leaves), gradients, rtol=1e-4, atol=1e-4)


def in_one_pass(problem, above, terms, deltas, norms, sums, dk, dv, left, launch):
    """What the kernel for Hopper computes, from what it is given: gradients of keys and values, norms of keys, and sums of ds' k."""
    query, key, value = problem[:3]
    alpha = problem.alpha[:, None, None]
    t = alpha * (query @ key.mT) + (0.0 if problem.beta is None else problem.beta[:, None, None])
    if problem.distance:
        norms[:] = 0.5 * key.square().sum(-1)
        t = t - alpha * norms[..., None, :]
    assert (terms is not None) == bool(problem.distance or problem.division)
    if terms is not None:
        t = t + alpha * terms.float().sum(-1)[..., None]
    keep = torch.ones(t.shape[-2:]).tril().bool() if problem.high is not None else torch.ones(t.shape[-2:]).bool()
    t = t.masked_fill(~keep, -torch.inf)
    p = {"exp": t.exp(), "sigmoid": t.sigmoid(), "relu_squared": t.relu().square()}[problem.safe]
    slope = {"exp": p, "sigmoid": p - p * p, "relu_squared": t.relu()}[problem.safe]
    dp = above @ value.mT
    ds = slope * (dp if deltas is None else dp + deltas.float().sum(-1)[..., None])
    sums += ds @ key
    ds = ds * (2.0 if problem.safe == "relu_squared" else 1.0)
    dv[:] = p.mT @ above
    dk[:] = alpha * (ds.mT @ query - (ds.sum(-2)[..., None] * key if problem.distance else 0.0))
    if left is not None:
        left[:] = 0


@needs_interpreter
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", [Sigmoid(bias=-3.0), ReluSquared(), Softmax(), Gaussian(3.0), Gaussian(3.0, normalize=False)], ids=repr)  # fmt: skip
def test_a_backward_pass_in_one_kernel(kernel, causal, monkeypatch):
    """Between what it is given and what is made of its sums; what it leaves under causality is computed behind it."""
    leaves = [torch.randn(2, 192, 3, 16).transpose(1, 2).requires_grad_() for _ in range(3)]
    above = torch.randn(2, 192, 3, 16).transpose(1, 2)
    wanted = attend(*leaves, is_causal=causal, kernel=kernel, impl="reference")
    gradients = torch.autograd.grad(wanted, leaves, above)
    calls = []

    def stand_in(problem, above, terms, deltas, norms, sums, dk, dv, left, launch):
        in_one_pass(problem, above, terms, deltas, norms, sums, dk, dv, left, launch)
        calls.append(left)
        if left is not None:
            left.view(2, 3, 3)[0, 1, 2] = 1
            dk[0, 1, 128:], dv[0, 1, 128:], sums[1, 2, 70, 3] = torch.nan, 7.0, torch.inf

    monkeypatch.setattr(serving, "backward", lambda problem, above: stand_in)
    monkeypatch.setattr(launch, "chip", lambda device: Chip(9, 1, 2**17))
    blocks = {"rows": Setting(64, 32, 1, 4), "columns": Setting(32, 64, 1, 4)}
    right = launch.settings
    monkeypatch.setattr(launch, "settings", lambda kind, *more: [blocks[kind]] if kind in blocks else right(kind, *more))  # fmt: skip
    found = torch.autograd.grad(attend(*leaves, is_causal=causal, kernel=kernel, impl="triton"), leaves, above)
    assert [left is not None for left in calls] == [causal]
    torch.testing.assert_close(found, gradients, rtol=1e-3, atol=1e-4)


def test_who_is_refused_a_backward_pass_in_one_kernel(monkeypatch):
    monkeypatch.setattr(hopper, "chip", lambda device: Chip(9, 132, 2**17))
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 0)
    monkeypatch.setattr(hopper, "is_cuda", lambda x: True)
    given = problem()
    assert hopper_backward.refuse(given, given.query) is None
    fewer = given._replace(key=given.key[:, :4], value=given.value[:, :4])
    assert "share" in hopper_backward.refuse(fewer, given.query)
    assert "bfloat16" in hopper_backward.refuse(given, given.query.float())
    assert "one plane" in hopper_backward.refuse(given, given.query.mT.contiguous().mT)
    torch.use_deterministic_algorithms(True)
    try:
        assert "any order" in hopper_backward.refuse(given, given.query)
    finally:
        torch.use_deterministic_algorithms(False)


def test_heads_that_are_ordered_together_stay_few():
    assert hopper.balance(64, 4096, 4096, 128, True, 132, 4)[1] <= 4
    assert hopper.balance(3, 4096, 4096, 128, True, 132, 2)[1] <= 2
    assert [hopper.near(4096, 128), hopper.near(32768, 128)] == [10, 2]


def test_programs_that_draw_tiles_are_no_more_than_tiles():
    drawn = hopper.form(problem(length=1152, activation="exp", distance=True), stat=True)
    assert drawn.TICKETS
    assert hopper.shares(64, 4096, 4096, drawn, 132) == (132, hopper.near(4096, 64))
    assert hopper.shares(3, 128, 128, drawn, 132)[0] == 3


@pytest.mark.parametrize(("length", "size", "causal", "measured"), [(256, 64, False, True), (512, 64, False, False), (512, 128, False, False), (512, 64, True, True), (1024, 128, True, True), (1152, 128, True, False)])  # fmt: skip
def test_norms_of_few_keys_are_taken_as_they_come_in(length, size, causal, measured):
    given = problem(length=length, size=size, high=0 if causal else None, activation="exp", distance=True)
    chosen = hopper.form(given, stat=True)
    assert (measured, not measured) == (chosen.MEASURED, chosen.TICKETS)
    assert not hopper.form(given._replace(distance=False), stat=True).MEASURED


@pytest.mark.parametrize(("length", "causal", "warpgroups"), [(512, True, 2), (1024, True, 2), (1152, True, 3), (256, False, 2), (384, False, 3), (512, False, 3)])  # fmt: skip
def test_tiles_are_low_where_tall_ones_would_be_empty(length, causal, warpgroups):
    given = problem(length=length, high=0 if causal else None)
    assert warpgroups == hopper.form(given, stat=True).CONSUMERS
    assert hopper.form(problem(length=length, size=128), stat=True).CONSUMERS == 2


@needs_interpreter
def test_a_plan_says_which_kernels_serve():
    x = torch.randn(2, 3, 37, 8)
    text = str(attend.plan(x, x, x, kernel=0.5 * Sigmoid(), impl="triton"))
    assert "portable kernels (those for Hopper: made for GPUs of compute capability 9.0)" in text
    assert "portable kernels" not in str(attend.plan(x, x, x, kernel=Sigmoid(), impl="stream"))

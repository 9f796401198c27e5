"""The kernels for Hopper on a chip played by torch (`chip.py`), beside formulas in float64."""

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

import chip as played
from heedful.ops.fused import hopper, hopper_backward, launch, prepared, serving
from heedful.ops.fused._device import Chip
from interpreted import needs_interpreter

pytestmark = needs_interpreter
H = 6
LENGTHS = {64: 512, 128: 384}  # tiles of 192 rows, the last of which has no rows for one of three warpgroups; of 128
EXP = {"activation": "exp", "distance": True}
KERNELS = {
    "sigmoid": {"activation": "sigmoid", "beta": -1.0},
    "tanh": {"activation": "tanh", "beta": -2.0},
    "relu squared": {"activation": "relu_squared"},
    "softmax": {"activation": "exp", "division": 1},
    "gaussian raw": EXP,
    "gaussian": EXP | {"division": 1},
}
FUNCTIONS = {
    "exp": torch.exp, "sigmoid": torch.sigmoid, "tanh": torch.sigmoid, "relu_squared": lambda t: t.relu().square()
}  # fmt: skip
every_form = pytest.mark.parametrize(("size", "causal"), [(64, False), (64, True), (128, False), (128, True)])


@pytest.fixture(autouse=True)
def chip(monkeypatch, unwritten_is_nan):
    """Problems in bfloat16 on a CPU take the kernels for Hopper; what these leave is noted, not computed."""
    notes = SimpleNamespace(seed=0, left=[])

    def run(self, kernel, grid, *args, **options):
        self.whole = False
        if hasattr(kernel, "is_gluon"):
            return played.launch(kernel, grid, *args, seed=notes.seed)
        return kernel[grid](*args, **options)

    monkeypatch.setattr(prepared.Recorder, "launch", run)
    monkeypatch.setattr(hopper, "is_cuda", lambda x: True)
    for module in (hopper, hopper_backward, launch):
        monkeypatch.setattr(module, "chip", lambda device: Chip(9, 16, 2**17))
    monkeypatch.setattr(serving, "refusal", hopper.refuse)
    monkeypatch.setattr(launch, "_left", lambda recorder, kernel, args, *rest: notes.left.append(args[-1]))
    return notes


def problem(kernel, size, causal, key_heads=H, batch=1):
    settings = {"low": None, "high": 0 if causal else None, "degree": 1, "division": 0, "distance": False}
    settings |= KERNELS[kernel]
    beta = settings.pop("beta", None)
    query, key, value = (vectors(heads, size, batch) for heads in (H, key_heads, key_heads))
    alpha = torch.linspace(0.5, 1.0, H) / math.sqrt(size)
    beta = None if beta is None else beta + torch.linspace(0.0, 1.0, H)
    return launch.Problem(query, key, value, alpha, beta, *(None,) * 8, block_size=[1, 1], **settings)


def vectors(heads, size, batch=1):
    """Heads beside one another, as a projection leaves them."""
    return torch.randn(batch, LENGTHS[size], heads, size).bfloat16().transpose(1, 2)


def formula(problem, query, key, value):
    """What the operator is to compute, of vectors in float64."""
    key, value = (x.repeat_interleave(H // x.shape[1], 1) for x in (key, value))
    alpha = problem.alpha.double()[:, None, None]
    t = alpha * (query @ key.mT)
    if problem.distance:
        t = t - alpha / 2 * (query.square().sum(-1)[..., :, None] + key.square().sum(-1)[..., None, :])
    if problem.beta is not None:
        t = t + problem.beta.double()[:, None, None]
    p = FUNCTIONS[problem.activation](t)
    if problem.high is not None:
        p = p * torch.ones(p.shape[-2:]).tril()
    return (p / p.sum(-1, keepdim=True) if problem.division else p) @ value


def doubled(problem):
    return [x.double().requires_grad_() for x in problem[:3]]


def assert_near(found, wanted):
    """As near as numbers of 8 bits can be."""
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < 4e-3, error


@every_form
@pytest.mark.parametrize("kernel", KERNELS)
def test_forward(kernel, size, causal, chip):
    given = problem(kernel, size, causal, key_heads=2 if size == 64 else H)
    out, stat = launch.forward(given)
    assert hopper.refuse(given) is None
    assert_near(out, formula(given, *doubled(given)))
    assert all(bool(marks.isfinite().all()) for marks in (stat, *chip.left))


@pytest.mark.parametrize("kernel", KERNELS)
def test_forward_with_three_warpgroups_under_causality(kernel, monkeypatch):
    """As for long sequences."""
    monkeypatch.setattr(hopper, "BRIEF", 0)
    given = problem(kernel, 64, causal=True, key_heads=2)
    out, _ = launch.forward(given)
    assert_near(out, formula(given, *doubled(given)))


@every_form
@pytest.mark.parametrize("kernel", ["gaussian raw", "gaussian"])
def test_forward_behind_a_launch_that_takes_norms(kernel, size, causal, chip, monkeypatch):
    """As for long sequences."""
    monkeypatch.setattr(hopper, "BRIEF", 0)
    given = problem(kernel, size, causal)
    out, stat = launch.forward(given)
    assert_near(out, formula(given, *doubled(given)))
    assert all(bool(marks.isfinite().all()) for marks in (stat, *chip.left))


@pytest.mark.parametrize("factor", [1.0, 20.0, 300.0])
@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
def test_rows_beyond_the_range_are_left(kernel, factor, chip):
    given = problem(kernel, 64, causal=False)
    given.query.mul_(factor)
    out, stat = launch.forward(given)
    wanted = formula(given, *doubled(given))
    served = stat.isfinite()
    assert bool(served.all()) if factor == 1.0 else not served.any() if factor == 300.0 else True
    if served.any():
        assert_near(out[served], wanted[served])


@every_form
@pytest.mark.parametrize("kernel", ["sigmoid", "relu squared", "softmax", "gaussian raw", "gaussian"])
def test_backward(kernel, size, causal, chip):
    given = problem(kernel, size, causal)
    leaves = doubled(given)
    out = formula(given, *leaves)
    above = vectors(H, size)
    wanted = torch.autograd.grad(out, leaves, above.double())
    found = launch.backward(given, *launch.forward(given), above, (False,) * 5)
    for one, other in zip(found[:3], wanted, strict=True):
        assert_near(one, other)
    assert not any(bool(marks.any()) for marks in chip.left if marks.dtype == torch.int32)


@every_form
@pytest.mark.parametrize("kernel", ["sigmoid", "gaussian raw"])
def test_programs_of_many_tiles(kernel, size, causal, chip, monkeypatch):
    """Whether each knows its tiles or draws them, and however many times rings of barriers go round."""
    for module in (hopper, hopper_backward, launch):
        monkeypatch.setattr(module, "chip", lambda device: Chip(9, 3, 2**17))
    given = problem(kernel, size, causal)
    leaves, above = doubled(given), vectors(H, size)
    wanted = formula(given, *leaves)
    out, stat = launch.forward(given)
    assert_near(out, wanted)
    found = launch.backward(given, out, stat, above, (False,) * 5)
    for one, other in zip(found[:3], torch.autograd.grad(wanted, leaves, above.double()), strict=True):
        assert_near(one, other)


def test_the_order_of_warps_changes_no_bit(chip):
    given = problem("gaussian", 64, causal=True, batch=2)  # some programs have two tiles
    found = []
    for chip.seed in range(3):
        out, stat = launch.forward(given)
        gradients = launch.backward(given, out, stat, out, (False,) * 5)
        found.append((out, stat, gradients.key, gradients.value))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_which_kernels_serve():
    given = problem("sigmoid", 64, causal=True)
    assert serving.passes(given) == "kernels for Hopper"
    learned = given._replace(beta=given.beta.clone().requires_grad_())
    shared = problem("sigmoid", 64, causal=True, key_heads=2)
    for other, reason in ((learned, "no gradients of scales or biases"), (shared, "no keys that query heads share, got 6 and 2 heads")):  # fmt: skip
        assert serving.passes(other) == f"kernels for Hopper, backward portable ones (those for Hopper: {reason})"
    short = given._replace(query=given.query[:, :, :100])
    assert serving.passes(short).startswith("portable kernels (those for Hopper: causality of as many queries as keys")


GARBAGE = {0: math.nan, 2: math.inf, 4: 1e30}  # of a head; those between stay as they are
CLEAN = [1, 3, 5]


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_causality_hides(kernel, chip):
    """A row is as if there was nothing behind it, or is left to the kernel behind, which is told so."""
    given = problem(kernel, 64, causal=True)
    clean, _ = launch.forward(given)
    at = 430
    for head, garbage in GARBAGE.items():
        given.key[:, head, at] = given.value[:, head, at] = garbage
    chip.left.clear()
    out, _ = launch.forward(given)
    same = (out == clean).all(-1)
    assert bool((same | chip.left[0].isnan())[:, :, :at].all())
    assert bool(same[:, CLEAN].all())
    assert bool(same[:, :, :384].all())  # rows of other tiles


@pytest.mark.parametrize("kernel", ["sigmoid", "softmax", "gaussian raw", "gaussian"])
def test_gradients_that_causality_hides(kernel, chip):
    """The same of gradients: of queries before what is not finite, and of keys that only these see."""
    given = problem(kernel, 64, causal=True)
    above = vectors(H, 64)
    clean = launch.backward(given, *launch.forward(given), above, (False,) * 5)
    at = 430
    for head in (0, 2):
        for x in (*given[:3], above):
            x[:, head, at] = GARBAGE[head]
    out, stat = launch.forward(given)
    out[:, [0, 2], at:] = torch.nan  # as the kernel behind gives it
    chip.left.clear()
    found = launch.backward(given, out, stat, above, (False,) * 5)
    for name, marks in zip(("query", "key"), chip.left, strict=True):
        one, other = getattr(found, name).float(), getattr(clean, name).float()
        near = ((one - other).abs() < 0.1).all(-1)
        marked = marks.view(1, H, -1).repeat_interleave(64, -1).bool()
        assert bool(near[:, CLEAN].all())
        if name == "query":
            assert bool((near | marked)[:, :, :at].all())
            assert bool(near[:, :, :384].all())
        assert bool((one.isfinite().all(-1) | marked).all())


def test_small_coefficients_are_left():
    given = problem("tanh", 64, causal=False)
    given = given._replace(beta=torch.full((H,), -20.0))
    out, mark = torch.empty_like(given.query), torch.empty(1, H, LENGTHS[64])
    hopper.forward(given, out, mark, None, None, played.launch)
    assert bool(mark.isnan().all())


DEFECTS = {
    "without a fence": {"hopper": SimpleNamespace(fence_async_shared=lambda: None)},
    "that nobody waits for": {"warpgroup_mma_wait": lambda pending, deps: deps if len(deps) > 1 else deps[0]},
    "can go on": {"fetch": lambda *args: None},
    "written over": {"mbarrier": type("hasty", (played.mbarrier,), {"wait": staticmethod(lambda at, parity: played.LOCAL.warps.pause(played.always))})},
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_chip_finds(defect, monkeypatch):
    names = dict(played.named("_hopper"))
    played.named("_hopper").update(DEFECTS[defect])
    try:
        with pytest.raises((AssertionError, RuntimeError), match=defect):
            launch.forward(problem("sigmoid", 64, causal=False))
    finally:
        played.named("_hopper").update(names)

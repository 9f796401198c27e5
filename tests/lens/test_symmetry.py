"""The symmetry laboratory: right verdicts on functions whose symmetries are known, and checks that can fail."""

import json
import math
import random
import time

import numpy as np
import pytest
import torch
from experiments import arithmetic
from torch import nn

from heedful import (
    Cosine,
    FeatureMap,
    Gaussian,
    HigherOrder,
    InvalidArgument,
    Laplace,
    Polynomial,
    Relu,
    ReluSquared,
    Sigmoid,
    Softmax,
    Unsupported,
)
from heedful.lens import symmetry
from heedful.lens.symmetry import (
    SymmetryBroken,
    audit,
    check_equivariance,
    check_finite_information,
    check_permutation,
    failure_bound,
)
from heedful.nn import Block, KnowledgeAttention, PairAttention

F64 = {"dtype": torch.float64}
TURNS = {"O", "SO", "permutation", "signed_permutation", "sign"}


def drawn(*shape, seed=5):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **F64)


def gram_schmidt(x):
    rows = []
    for row in x:
        for other in rows:
            row = row - (row @ other) * other
        rows.append(row / row.norm())
    return torch.stack(rows)


def softmax_attention(x):
    return torch.softmax(x @ x.T, -1) @ x


def causal_attention(x):
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    return torch.softmax((x @ x.T).masked_fill(hidden, -torch.inf), -1) @ x


def gaussian_attention(x):
    return torch.softmax(-(x[:, None] - x).square().sum(-1) / 2, -1) @ x


def numpy_attention(x):
    score = np.exp(x.astype(np.float64) @ x.T)
    return (score / score.sum(-1, keepdims=True)) @ x


def nearest(x, z):
    return z[torch.cdist(x, z).argmin(-1)]


def module(kind, *args, **kwargs):
    torch.manual_seed(1)
    made = kind(*args, **kwargs, **F64)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


# name -> function, d, what holds of the groups, of translation and of position, further arguments.
BATTERY = {
    "identity": (lambda x: x, 4, TURNS | {"translation", "position"}),
    "zero": (lambda x: 0 * x, 4, TURNS | {"position"}),
    "relu": (torch.relu, 4, {"permutation", "position"}),
    "tanh": (torch.tanh, 4, {"permutation", "signed_permutation", "sign", "position"}),
    "abs": (torch.abs, 4, {"permutation", "position"}),
    "layer norm": (lambda x: nn.functional.layer_norm(x, x.shape[-1:]), 4, {"permutation", "position"}),
    "rms norm": (lambda x: nn.functional.rms_norm(x, x.shape[-1:]), 4, TURNS | {"position"}),
    "rms norm with gain": (lambda x: nn.functional.rms_norm(x, (4,), drawn(4)), 4, {"sign", "position"}),
    "cumsum": (lambda x: x.cumsum(0), 4, TURNS),
    "centring": (lambda x: x - x.mean(0), 4, TURNS | {"position"}),
    "mean": (lambda x: x.mean(0).expand_as(x), 4, TURNS | {"translation", "position"}),
    "gram-schmidt": (gram_schmidt, 11, TURNS),
    "sort by norm": (lambda x: x[x.norm(dim=-1).argsort()], 4, TURNS),
    "cross product": (lambda x: torch.linalg.cross(x, x.mean(0).expand_as(x)), 3, {"SO", "position"}),
    "fixed rotation": (lambda x: x @ torch.linalg.qr(drawn(4, 4))[0], 4, {"position"}),
    "bias of 1e-3": (lambda x: x + 1e-3 * drawn(4), 4, {"translation", "position"}),
    "nearest knowledge": (nearest, 4, TURNS | {"translation", "position"}, {"k": 3}),
    "softmax attention": (softmax_attention, 4, TURNS | {"position"}),
    "causal attention": (causal_attention, 4, TURNS),
    "gaussian attention": (gaussian_attention, 4, TURNS | {"translation", "position"}),
    "attention by a fixed matrix": (lambda x: torch.softmax(x @ drawn(4, 4) @ x.T, -1) @ x, 4, {"position"}),
    "attention in numpy": (numpy_attention, 4, TURNS | {"position"}),
    "reversal": (lambda x: x.flip(0), 4, TURNS | {"translation"}),
    "maximum by coordinate": (lambda x: x.amax(0).expand_as(x), 4, {"permutation", "translation", "position"}),
    "first coordinate": (lambda x: x * torch.eye(4, **F64)[0], 4, {"sign", "position"}),
    "position table": (lambda x: x + drawn(9, 4)[: len(x)], 4, {"translation"}),
    "first token": (lambda x: x[:1].expand_as(x), 4, TURNS | {"translation"}),
    "scaled by the norm": (lambda x: x * x.norm(dim=-1, keepdim=True), 4, TURNS | {"position"}),
    "linear layer": (module(nn.Linear, 4, 4), 4, {"position"}),
    "lstm": (module(nn.LSTM, 4, 4, batch_first=True), 4, set()),
    "multi-head attention": (module(nn.MultiheadAttention, 4, 2), 4, {"position", "O with its parameters"}),
}


@pytest.mark.parametrize("name", BATTERY)
def test_the_verdict_is_right(name):
    f, d, holds, *more = BATTERY[name]
    options = {"n": (2, 3, 5), "trials": 30, **(more[0] if more else {})}
    found = audit(f, d=d, checks=[*symmetry.moves.GROUPS, "position"], **options)
    assert found.refused == {}
    assert {check for check, report in found.reports.items() if report.passed} == holds
    for report in found.reports.values():
        # A counterexample stands for itself: the two sides differ, and clearly.
        assert (report.counterexample is None) == report.passed
        if not report.passed:
            assert report.counterexample.error > 10 * report.counterexample.tolerance
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_battery_is_large_and_quick():
    """The bar is 60 s; a fifth of the trials of one function of each kind tells what all of it takes."""
    assert len(BATTERY) >= 20
    began = time.process_time()
    for name in ("relu", "softmax attention", "lstm"):
        audit(BATTERY[name][0], d=4, n=(2, 3, 5), trials=30)
    assert (time.process_time() - began) / 3 * len(BATTERY) < 60


def test_cross_product_knows_rotations_from_reflections():
    def cross(x):
        return torch.linalg.cross(x, x.roll(1, 0))

    proper = check_equivariance(cross, d=3, n=(2, 3, 5), group="SO")
    assert proper.passed
    assert proper.largest <= 1e-13
    full = check_equivariance(cross, d=3, n=(2, 3, 5), group="O")
    assert [(part.determinant, part.trials, part.passed) for part in full.components] == [
        (1, 100, True),
        (-1, 100, False),
    ]
    assert torch.linalg.det(full.counterexample.element) == pytest.approx(-1.0)
    assert "det -1" in str(full)


def test_a_clean_function_is_bounded_by_three_over_trials():
    for trials in (50, 400):
        report = check_equivariance(softmax_attention, d=5, trials=trials)
        assert report.passed
        assert report.bound <= 3 / trials * 1.05
        assert report.bound >= 2.9 / trials


def test_clopper_and_pearson():
    from scipy.stats import binom

    for failures, trials in ((0, 7), (1, 20), (3, 200), (199, 200)):
        bound = failure_bound(failures, trials)
        assert binom.cdf(failures, trials, bound) == pytest.approx(0.05, abs=1e-9)
    assert failure_bound(9, 9) == 1.0
    with pytest.raises(InvalidArgument, match="between 0 and trials"):
        failure_bound(3, 2)


def test_a_function_that_breaks_on_two_percent_is_caught():
    limit = 2.0537  # one standard normal in fifty is above

    def rarely(x):
        # The projection on a fixed direction decides, so that about 2 % of inputs are treated differently.
        return torch.where(x[0, 0] > limit, x.abs(), x)

    def normal(generator, n):
        return torch.randn(n, 6, generator=generator, **F64)

    # A trial looks at x and at x turned, so that just under 4 % of the trials see the breach.
    for seed in range(3):
        report = check_equivariance(rarely, d=6, n=(1, 3), trials=400, seed=seed, sampler=normal)
        assert not report.passed
        assert 2 <= report.failures <= 40
        assert report.bound > 0.005
        assert report.counterexample is not None
    assert (1 - 0.02) ** 400 < 1e-3


def test_small_outputs_are_measured_against_the_inputs():
    cancelled = check_equivariance(lambda x: (x + 1.0) - 1.0 - x, d=5, trials=40)
    assert cancelled.passed
    assert not check_equivariance(lambda x: 1e-6 * torch.relu(x), d=5, trials=40).passed


def test_outputs_that_are_not_finite_fail_with_the_input():
    report = check_equivariance(lambda x: x / (x[0, 0] < 1.5), d=4, trials=60)
    assert not report.passed
    assert report.largest == math.inf
    assert report.counterexample.reason == "the output is not finite"
    assert report.counterexample.x.shape[-1] == 4
    assert "not finite" in str(report)
    assert report.to_dict()["largest"] is None
    json.dumps(report.to_dict(), allow_nan=False)


def test_random_functions_are_undecided():
    report = check_equivariance(lambda x: x + 1e-9 * torch.randn_like(x), d=4, trials=20)
    assert not report.deterministic
    assert not report.passed
    assert "UNDECIDED" in str(report)
    dropout = check_equivariance(nn.Dropout(0.5).train(), d=4, trials=20)
    assert dropout.passed  # eval mode


def test_vacuous_checks_say_so():
    assert "vacuous" in check_equivariance(torch.relu, d=1, group="SO", trials=5).notes[0]
    assert "zeros" in check_equivariance(lambda x: 0 * x, d=3, trials=5).notes[0]


class Untidy(nn.Module):
    """Uses every random state, counts its calls in a buffer, and may raise."""

    def __init__(self, fails=False):
        super().__init__()
        self.inner = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4))
        self.register_buffer("calls", torch.zeros(1))
        self.fails = fails

    def forward(self, x):
        torch.rand(1), np.random.rand(), random.random()
        self.calls += 1
        if self.fails and len(x[0]) > 3:
            raise ValueError("too long")
        return x


@pytest.mark.parametrize("fails", [False, True])
def test_a_module_is_left_as_it_was(fails):
    layer = Untidy(fails).train()
    layer.inner[0].eval()
    layer.requires_grad_(False)
    parameters = [(id(p), p.clone()) for p in layer.parameters()]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    fused = torch.backends.mha.get_fastpath_enabled()
    if fails:
        with pytest.raises(
            InvalidArgument, match=r"Untidy raised ValueError for x of shape \(5, 4\) and a batch axis: too long"
        ):
            check_equivariance(layer, d=4, trials=20)
    else:
        assert check_equivariance(layer, d=4, trials=20).passed
    assert [m.training for m in layer.modules()] == [True, True, False, True]
    assert float(layer.calls) == 0
    assert [(id(p), True) for p in layer.parameters()] == [(i, True) for i, _ in parameters]
    assert all(torch.equal(p, old) for p, (_, old) in zip(layer.parameters(), parameters, strict=True))
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()
    assert states[2] == random.getstate()
    assert torch.backends.mha.get_fastpath_enabled() == fused
    assert torch.is_grad_enabled()


def test_parameters_are_knowledge_by_their_roles():
    """nn.MultiheadAttention: rounding with parameters moved, errors of size one with parameters held."""
    layer = module(nn.MultiheadAttention, 8, 2)
    roles = {"in_proj_weight": "rows", "out_proj.weight": "cols", "out_proj.bias": "bias", "in_proj_bias": "fixed"}
    moved = check_equivariance(layer, d=8, roles=roles, trials=60)
    assert moved.passed
    assert moved.largest < 1e-13
    assert moved.moved == {name: role for name, role in roles.items() if role != "fixed"}
    held = check_equivariance(layer, d=8, trials=60)
    assert held.quantile(0.5) > 0.5
    for name in ("in_proj_weight", "out_proj.weight", "out_proj.bias"):
        forgotten = {key: role for key, role in roles.items() if key != name}
        assert not check_equivariance(layer, d=8, roles=forgotten, trials=20).passed
    both = module(nn.Linear, 8, 8, bias=False)
    assert check_equivariance(both, d=8, roles={"*": "both"}, trials=20).passed
    assert not check_equivariance(both, d=8, roles={"*": "rows"}, trials=20).passed


def test_roles_of_known_layers():
    for layer in (
        KnowledgeAttention(8, 2, knowledge=3, value="mlp", **F64),
        PairAttention(8, 3, **F64),
        Block(8, 2, norm="rms", **F64),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, **F64), 2),
    ):
        report = check_equivariance(layer, d=8, roles="auto", trials=10)
        assert report.passed == (not any(isinstance(m, nn.LayerNorm) for m in layer.modules()))
        assert not check_equivariance(layer, d=8, trials=10).passed
    with pytest.raises(Unsupported, match=r"does not know Sequential with the parameter 0\.weight"):
        check_equivariance(nn.Sequential(nn.Linear(4, 4)), d=4, roles="auto")


def test_invariants_and_pooled_outputs():
    assert check_equivariance(lambda x: x.norm(dim=-1), d=5, invariant=True, trials=20).passed
    assert not check_equivariance(lambda x: x[:, 0], d=5, invariant=True, trials=20).passed
    assert check_permutation(lambda x: x.sum(0), d=5, invariant=True, trials=20).passed
    assert check_equivariance(lambda x: x.sum(0), d=5, trials=20).passed


def test_samplers_and_given_inputs():
    def positive(generator, n):
        return torch.rand(n, 5, generator=generator, **F64)

    assert check_equivariance(torch.relu, d=5, group="permutation", sampler=positive, trials=20).passed
    # Swaps keep positive numbers positive, turns do not; the sampler's domain is kept by the shrinker.
    report = check_equivariance(torch.relu, d=5, sampler=positive, trials=20)
    assert report.counterexample.x.min() >= 0
    given = [torch.ones(2, 5), (torch.ones(3, 5), torch.ones(2, 5))]
    assert check_equivariance(lambda x, z=None: x, d=5, sampler=given, trials=8).trials == 8
    with pytest.raises(InvalidArgument, match=r"gave X of shape \(2, 4\), expected \(rows, 5\)"):
        check_equivariance(torch.relu, d=5, sampler=[torch.ones(2, 4)])


KERNELS = [Softmax(), Gaussian(2.0), Laplace(2.0), Sigmoid(bias=-1.0), Relu(), ReluSquared(), Cosine(), Polynomial(1),
           Polynomial(3), FeatureMap("cosine"), HigherOrder(), HigherOrder(Sigmoid(), 6), Gaussian(2.0, normalize=False)]  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_every_kernel_is_equivariant_with_knowledge(kernel):
    """200 trials at once, half of them reflections, for d = 3, 8, 16: relative error at most 1e-12."""
    for d in (3, 8, 16):
        turns = torch.stack([symmetry.moves.haar(d, torch.Generator().manual_seed(i), (-1) ** i) for i in range(200)])
        x, z = drawn(200, 5, d), drawn(200, 3, d, seed=6) / d**0.5
        for coordinates in ("inputs", "knowledge"):
            layer = KnowledgeAttention(d, 1, kernel=kernel, coordinates=coordinates, value="identity", **F64)
            moved, wanted = layer(x @ turns.mT, z @ turns.mT), layer(x, z) @ turns.mT
            error = (moved - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
            assert float(error.max()) <= 1e-12


@pytest.mark.parametrize("kernel", [Softmax(), HigherOrder()], ids=repr)
def test_the_check_agrees_on_our_layers(kernel):
    layer = KnowledgeAttention(8, 1, kernel=kernel, coordinates="inputs", value="identity", **F64)
    report = check_equivariance(layer, d=8, k=3)
    assert (report.passed, report.trials) == (True, 200)
    assert report.largest <= 1e-12
    alone = check_equivariance(lambda x: layer(x[None], drawn(3, 8))[0], d=8, trials=20)
    assert not alone.passed  # knowledge left behind


@pytest.mark.parametrize("layer", [*KERNELS, "pair"], ids=repr)
def test_position_symmetry_unless_causal(layer):
    made = PairAttention(7, 3, **F64) if layer == "pair" else KnowledgeAttention(7, kernel=layer, coordinates="inputs", value="identity", **F64)  # fmt: skip
    free = check_permutation(made, d=7, k=0 if layer == "pair" else 2, trials=16)
    assert free.passed
    causal = check_permutation(made, d=7, trials=16, arguments={"is_causal": True}, shrinking=False)
    assert not causal.passed
    assert causal.largest > 0.1
    assert "causal" in causal.notes[0]


def test_row_by_row_functions_are_not_called_causal():
    report = check_permutation(lambda x: x + drawn(9, 4)[: len(x)], d=4, trials=10)
    assert not report.passed
    assert report.notes == ()


def test_arithmetic_needs_its_token_vectors():
    for seed in range(3):
        report = check_equivariance(arithmetic.fixed, d=12, n=3, sampler=arithmetic.sample, trials=60, seed=seed)
        assert not report.passed
        assert report.counterexample.move == "swap of coordinates 0 and 1"
        assert abs(report.counterexample.error - math.sqrt(2)) < 1e-12
    told = check_equivariance(arithmetic.with_knowledge, d=12, sampler=arithmetic.sample_with_knowledge)
    assert told.passed
    assert told.largest == 0.0
    swap = torch.eye(12, **F64)[[1, 0, *range(2, 12)]]
    x = arithmetic.encode("2+1")
    assert arithmetic.decode(arithmetic.fixed(x @ swap.T), torch.eye(12)) == "1"
    assert arithmetic.decode(arithmetic.with_knowledge(x @ swap.T, swap), swap) == "3"
    with pytest.raises(InvalidArgument, match="as '2\\+1'"):
        arithmetic.encode("12+1")


def test_counterexamples_are_small():
    cases = {
        "O": (torch.relu, "sign flip of coordinate 0"),
        "permutation": (lambda x: x * torch.arange(1.0, 6, **F64), "swap of coordinates 0 and 1"),
        "sign": (torch.relu, "sign flip of coordinate 0"),
        "SO": (torch.relu, "quarter turn of coordinates 0 and 1"),
        "translation": (torch.tanh, "translation by 1 along coordinate 0"),
    }
    for group, (f, move) in cases.items():
        example = check_equivariance(f, d=5, group=group, trials=20).counterexample
        assert example.move == move
        assert len(example.x) == 1
        assert torch.equal(example.x, example.x.round())
    example = check_permutation(lambda x: x.cumsum(0), d=5, trials=20).counterexample
    assert example.move == "swap of positions 0 and 1"
    assert len(example.x) == 2
    raw = check_equivariance(torch.relu, d=5, trials=20, shrinking=False).counterexample
    assert raw.move.startswith("rotation")


def test_lengths_and_tables():
    class Table(nn.Module):
        def __init__(self, longest):
            super().__init__()
            self.positions = nn.Parameter(torch.randn(longest, 6))

        def forward(self, x):
            return x + self.positions[: x.shape[1]] * torch.ones(x.shape[1], 1)

    assert check_finite_information(nn.MultiheadAttention(6, 2), d=6).passed
    found = check_finite_information(Table(20), d=6)
    assert (found.passed, found.limit, list(found.refused)) == (False, 20, [32, 129])
    assert found.tensors == {"positions": (20, 6)}
    assert "n = 20 is the most it takes; tied to the length: positions (20, 6)" in str(found)
    exact = check_finite_information(Table(129), d=6)
    assert exact.tensors == {"positions": (129, 6)}
    assert check_finite_information(lambda n: nn.Linear(6, 6), d=6, factory=True).passed
    grown = check_finite_information(Table, d=6, factory=True)
    assert grown.tensors == {"positions": (129, 6)}
    with pytest.raises(SymmetryBroken, match="positions"):
        grown.raise_if_failed()
    json.dumps(found.to_dict())
    with pytest.raises(InvalidArgument, match="must return a module"):
        check_finite_information(lambda n: n, d=6, factory=True)


def test_reports_raise_print_and_draw():
    import matplotlib

    matplotlib.use("Agg")
    report = check_equivariance(torch.relu, d=4, trials=20)
    with pytest.raises(SymmetryBroken, match="embedding symmetry, group O: BROKEN in 20 of 20 trials"):
        report.raise_if_failed()
    check_permutation(torch.relu, d=4, trials=20).raise_if_failed()
    assert report.plot().get_ylabel() == "relative error"
    whole = audit(nn.MultiheadAttention(4, 2), d=4, trials=10)
    assert whole.plot().get_xlabel() == "largest relative error"
    assert "O with its parameters    holds" in str(whole)
    with pytest.raises(SymmetryBroken, match="embedding symmetry"):
        whole.raise_if_failed()
    invariant = audit(lambda x: x.norm(dim=-1), d=4, trials=5, checks=["O", "position"], invariant=True)
    assert (invariant.reports["O"].passed, invariant.conclusion) == (True, "")
    assert "note on position: f is causal" in str(audit(lambda x: x.cumsum(0), d=4, trials=5))
    pooled = audit(lambda x: x.sum(0), d=4, trials=5)
    assert "not 2 rows, one per token" in pooled.refused["position"]
    assert "position not tested: " in str(pooled)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: check_equivariance(torch.relu, d=0), "d must be a whole number from 1 on; got 0"),
        (lambda: check_equivariance(torch.relu, d=3, k=-1), "k must be a whole number from 0 on; got -1"),
        (lambda: check_equivariance(torch.relu, d=3, trials=0), "trials must be a whole number from 1 on"),
        (lambda: check_equivariance(torch.relu, d=3, n=()), "n must hold numbers of tokens from 1 on"),
        (lambda: check_permutation(torch.relu, d=3, n=1), "n must hold numbers of tokens from 2 on; got 1"),
        (lambda: check_equivariance(torch.relu, d=3, group="U"), "group must be one of O, SO"),
        (lambda: check_equivariance(3, d=3), "must be a function or a module; got int"),
        (lambda: check_equivariance(lambda x: None, d=3), "must return a tensor, an array or a number; got NoneType"),
        (lambda: check_equivariance(lambda x: x[:, :2], d=3), r"returns \(1, 2\), not vectors of size d = 3"),
        (lambda: check_equivariance(nn.Linear(4, 4), d=3), "Linear raised RuntimeError for x of shape"),
        (lambda: check_equivariance(lambda x: x.double() * 1j, d=3), "returns complex numbers"),
        (lambda: check_equivariance(torch.relu, d=3, roles={"w": "rows"}), "a function has none"),
        (
            lambda: check_equivariance(nn.Linear(3, 3), d=3, roles={"w": "rows"}),
            "roles name 'w', but Linear has weight",
        ),
        (lambda: check_equivariance(nn.Linear(3, 3), d=3, roles={"weight": "row"}), "must be one of rows, cols"),
        (lambda: check_equivariance(nn.Linear(3, 5), d=3, roles={"weight": "cols"}), r"shape \(5, 3\) cannot have"),
        (lambda: check_equivariance(nn.Linear(3, 3), d=3, group="translation", roles={"*": "rows"}), "leave roles out"),
        (lambda: audit(torch.relu, d=3, checks=["U"]), "checks must be among O, SO"),
        (lambda: check_finite_information(torch.relu, d=3, lengths=()), "lengths must hold"),
    ],
)
def test_bad_arguments_are_refused(make, told):
    with pytest.raises(InvalidArgument, match=told):
        make()

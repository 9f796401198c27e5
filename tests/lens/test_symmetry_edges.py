"""The symmetry laboratory at its edges: coarse arithmetic inside, tiny outputs, odd lengths, odd arguments."""

import math

import matplotlib as mpl
import pytest
import torch
from torch import nn

from heedful import InvalidArgument
from heedful.lens.symmetry import (
    audit,
    check_equivariance,
    check_finite_information,
    check_permutation,
    coefficient_function,
    recover_coefficients,
    symmetrize,
)

mpl.use("Agg")
F64 = {"dtype": torch.float64}


def attention(x):
    return torch.softmax(x @ x.T, -1) @ x


class Autocast(nn.Module):
    """Attention of a float32 model that computes its products in bfloat16."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return x + (torch.softmax(x @ x.mT, -1) @ x).float()


def test_rounding_is_no_failure():
    """float32, a function that amplifies rounding, bfloat16: none is broken; and a breach just above rounding is."""
    assert check_equivariance(attention, d=7, dtype=torch.float32, trials=60).passed
    amplified = check_equivariance(lambda x: (x + 1e8 * x.norm()) - 1e8 * x.norm(), d=7, trials=60)
    assert amplified.passed
    assert amplified.noise > 1e-10
    single = check_equivariance(lambda x: nn.functional.normalize(x.float()).double(), d=7, trials=60)
    assert single.passed
    assert single.largest > 1e-9
    assert check_equivariance(attention, d=7, dtype=torch.bfloat16, trials=60).passed
    assert not check_equivariance(lambda x: x + 1e-4, d=7, dtype=torch.float32, trials=60).passed
    assert not check_equivariance(lambda x: x + 1e-12, d=7, trials=60).passed
    assert check_equivariance(lambda x: x + 1e-13, d=7, trials=60, tol=1e-9).passed


def test_a_function_without_any_smoothness_does_not_pass_as_noise():
    def scrambled(x):
        return torch.frac(x * 1e17) + 1

    assert not check_equivariance(scrambled, d=4, trials=20).passed


COARSE = {
    "float32 inside": lambda x: attention(x.float()).double(),
    "bfloat16 inside": lambda x: attention(x.bfloat16()).double(),
    "rounded to bfloat16": lambda x: x.bfloat16().double() * 2,
    "a residual beside float32": lambda x: x + 0.3 * attention(x.float()).double(),
    "a residual beside bfloat16": lambda x: x + 0.3 * attention(x.bfloat16()).double(),
    "float16 inside": lambda x: nn.functional.normalize(x.half()).double(),
    "autocast": Autocast(),
    "autocast in a module of float32": nn.Sequential(nn.RMSNorm(6), Autocast()),
}


@pytest.mark.parametrize("name", COARSE)
def test_coarse_arithmetic_inside_is_no_failure(name):
    for n, trials in (((1, 2, 5, 9), 60), (1, 60), (1, 3), (20, 20)):
        for seed in range(3):
            assert check_equivariance(COARSE[name], d=6, n=n, trials=trials, seed=seed).passed
    assert check_equivariance(COARSE[name], d=6, trials=200).passed
    assert check_permutation(COARSE[name], d=6, trials=60).passed


FINE = {
    "identity": lambda x: x,
    "softmax": attention,
    "sharp softmax": lambda x: torch.softmax(10 * x @ x.T, -1) @ x,
    "relu of products": lambda x: torch.relu(x @ x.T) @ x,
    "hard attention": lambda x: x[(x @ x.T).argmax(-1)],
    "sort by norm": lambda x: x[x.norm(dim=-1).argsort()],
    "unit vectors": nn.functional.normalize,
    "scaled by the norm": lambda x: x * x.norm(dim=-1, keepdim=True),
    "kinks": lambda x: x * (x.norm(dim=-1, keepdim=True) - 2.0).abs(),
    "steps": lambda x: x * (1 + 0.01 * x.norm(dim=-1, keepdim=True).floor()),
}


@pytest.mark.parametrize("size", [1e-2, 1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("name", FINE)
def test_a_small_breach_of_a_fine_function_is_caught(name, size):
    """The other side: what computes in float64 hides no bias, also with kinks and jumps."""
    f = FINE[name]
    for n in ((1, 2, 5, 9), (30,)):
        assert check_equivariance(f, d=6, n=n, trials=40).passed
        assert not check_equivariance(lambda x: f(x) + size, d=6, n=n, trials=40, shrinking=False).passed
    if size == 1e-3:
        assert not check_equivariance(lambda x: f(x) + size, d=6, n=100, trials=20, shrinking=False).passed


def test_a_small_breach_of_a_float32_function_is_caught():
    for f in (attention, nn.functional.normalize, lambda x: torch.relu(x @ x.T) @ x):
        options = {"d": 6, "trials": 40, "dtype": torch.float32, "shrinking": False}
        assert check_equivariance(f, **options).passed
        assert not check_equivariance(lambda x, f=f: f(x) + 1e-3, **options).passed
        assert not check_equivariance(lambda x, f=f: (f(x.float()) + 1e-3).double(), d=6, trials=40).passed
        assert not check_equivariance(lambda x, f=f: f(x.bfloat16()).double() + 0.5, d=6, trials=40).passed


def test_tiny_outputs_are_noted():
    tiny = check_equivariance(lambda x: 1e-9 * torch.relu(x), d=5, dtype=torch.float32, trials=20)
    assert any("weak: outputs are below 0.001 of the inputs" in note for note in tiny.notes)
    assert check_equivariance(attention, d=5, trials=20).notes == ()


@pytest.mark.parametrize("pool", [lambda x: x.mean(0, keepdim=True), lambda x: x.mean(0)])
def test_averages_keep_the_shape_of_the_output(pool):
    x = torch.randn(5, 3, **F64)
    torch.testing.assert_close(symmetrize(pool)(x), pool(x))
    single = symmetrize(pool)(x.float())
    assert (single.shape, single.dtype) == (pool(x).shape, torch.float32)


def test_knowledge_is_not_dropped():
    x, z = torch.randn(3, 9, **F64), torch.randn(2, 9, **F64)
    found = recover_coefficients(lambda x, z: x + z.sum(0), x, z)
    with pytest.raises(InvalidArgument, match=r"B of shape \(3, 2\).*got no z"):
        found.combine(x)
    with pytest.raises(InvalidArgument, match="no B"):
        recover_coefficients(lambda x: 2 * x, x).combine(x, z)


def test_the_error_of_torch_is_told():
    with pytest.raises(InvalidArgument, match=r"<lambda> raised RuntimeError.*7"):
        check_equivariance(lambda x: x.unsqueeze(0) @ torch.ones(7, 7).double(), d=6)


def test_a_size_that_happens_to_be_the_length_is_not_accused():
    torch.manual_seed(0)
    assert check_finite_information(nn.TransformerEncoderLayer(16, 2, 64), d=16, lengths=(1, 8, 64)).passed
    assert check_finite_information(nn.TransformerEncoderLayer(16, 2, 129), d=16).passed
    assert check_finite_information(nn.Linear(6, 6), d=6, lengths=(1, 6)).passed


@pytest.mark.parametrize("lengths", [(1, 2, 3, 7, 32, 129), (2, 4, 8, 129)])
def test_lengths_without_a_limit_are_told_as_seen(lengths):
    found = check_finite_information(lambda x: x.reshape(2, -1, 6).sum(0), d=6, lengths=lengths)
    assert not found.passed
    assert found.limit is None
    assert "runs for n = 2, " in found.verdict
    assert ", not for n = " in found.verdict
    assert all(n % 2 == 0 for n in found.accepted)
    assert all(n % 2 == 1 for n in found.refused)


def test_a_least_length_is_told():
    found = check_finite_information(lambda x: torch.stack((x[0], x[2])), d=6)
    assert found.verdict.endswith("BROKEN, runs for n = 3, 7, 32, 129, not for n = 1, 2")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: check_equivariance(torch.relu, d=3, sampler=[]), "sampler holds no inputs"),
        (lambda: check_permutation(torch.relu, d=3, sampler=[]), "sampler holds no inputs"),
        (lambda: check_equivariance(torch.relu, d=3, tol="x"), "tol must be a number from 0 on; got 'x'"),
        (lambda: check_equivariance(torch.relu, d=3, tol=-1), "tol must be a number from 0 on; got -1"),
        (lambda: check_permutation(torch.relu, d=3, tol=math.nan), "tol must be a number from 0 on; got nan"),
        (lambda: audit(torch.relu, d=3, tol=-1), "tol must be"),
        (lambda: audit(torch.relu, d=3, n=0), "n must hold numbers of tokens from 1 on; got 0"),
        (lambda: audit(torch.relu, d=3, n=(2, 2.5)), "n must hold numbers of tokens from 1 on"),
        (
            lambda: coefficient_function(attention, 5)(torch.full((3, 3), torch.nan)),
            "gram holds numbers that are not finite",
        ),
        (
            lambda: recover_coefficients(torch.zeros_like, torch.full((3, 5), torch.nan)),
            "x holds numbers that are not finite",
        ),
    ],
)
def test_odd_arguments_are_refused(make, told):
    with pytest.raises(InvalidArgument, match=told):
        make()


def test_infinite_errors_are_drawn():
    def broken(x):
        return x / 0

    report = check_equivariance(broken, d=3, trials=10)
    assert report.largest == math.inf
    ax = report.plot()
    assert [len(line.get_xdata()) for line in ax.lines if line.get_label() == "not finite"] == [10]
    whole = audit(broken, d=3, trials=10, checks=["O", "position"]).plot()
    assert [text.get_text() for text in whole.texts] == ["not finite", "not finite"]
    large = audit(lambda x: x.abs() ** 40, d=3, trials=10, checks=["O"]).plot()
    assert [text.get_text() for text in large.texts] == [""]

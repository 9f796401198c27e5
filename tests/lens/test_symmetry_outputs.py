"""Outputs that are no rows: energies, matrices, representations of one's own, and numbers near the end of the range."""

import json
import sys

import pytest
import torch
from torch import nn

from heedful import InvalidArgument, cli
from heedful.lens.symmetry import SymmetryBroken, audit, check_equivariance, check_permutation


def covariance(x):
    return x.T @ x


def inertia(x):
    return x.square().sum() * torch.eye(x.shape[-1], dtype=x.dtype) - x.T @ x


class Energy(nn.Module):
    """One number for each member of a batch."""

    def __init__(self, broken=False):
        super().__init__()
        self.broken = broken

    def forward(self, x):
        return (x if self.broken else x @ x.mT).sum((1, 2))


ENERGIES = {
    "no dimension": (lambda x: (x @ x.T).sum(), torch.sum),
    "a Python number": (lambda x: float((x @ x.T).sum()), lambda x: float(x.sum())),
    "numpy": (lambda x: x.numpy().std() * 0 + (x.numpy() ** 2).sum(), lambda x: x.numpy().sum()),
    "a batch": (Energy(), Energy(broken=True)),
    "an energy and more": (lambda x: ((x @ x.T).sum(), x), lambda x: (x.sum(), x)),
    "by name": (lambda x: {"energy": (x @ x.T).sum()}, lambda x: {"energy": x.sum()}),
    "per row": (lambda x: x.norm(dim=-1), lambda x: x[:, 0]),
}


@pytest.mark.parametrize("name", ENERGIES)
def test_energies_print_raise_and_serialise(name):
    right, wrong = ENERGIES[name]
    for options in ({"invariant": True}, {"output": "scalar"}):
        assert check_equivariance(right, d=4, trials=20, **options).passed
        report = check_equivariance(wrong, d=4, trials=20, **options)
        assert not report.passed
        assert "f of the moved input = " in str(report)
        with pytest.raises(SymmetryBroken, match="BROKEN in"):
            report.raise_if_failed()
        json.dumps(report.to_dict(), allow_nan=False)
        assert report.to_dict()["output"] == "scalar"
        example = report.to_dict()["counterexample"]
        assert isinstance(example["got"], list if name == "per row" else float)
    whole = audit(wrong, d=4, trials=10, output="scalar")
    assert "relative error" in str(whole)
    json.dumps(whole.to_dict(), allow_nan=False)


def test_energies_that_are_not_finite():
    report = check_equivariance(lambda x: x.sum() / 0, d=4, trials=8, output="scalar")
    assert "f of the moved input = " in str(report)
    assert report.to_dict()["counterexample"]["got"] is None
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize("f", [covariance, inertia])
def test_matrices(f):
    for group in ("O", "SO", "permutation", "sign"):
        assert check_equivariance(f, d=5, trials=30, group=group, output="matrix").passed
    assert check_permutation(f, d=5, trials=30, output="matrix").passed
    assert not check_equivariance(lambda x: f(x).abs(), d=5, trials=30, output="matrix").passed
    centred = check_equivariance(lambda x: f(x - x.mean(0)), d=5, trials=30, group="translation", output="matrix")
    assert centred.passed
    assert not check_equivariance(f, d=5, trials=30, group="translation", output="matrix").passed
    rows = check_equivariance(f, d=5, trials=30)
    assert not rows.passed
    assert any("give output='matrix'" in note for note in rows.notes)
    whole = audit(f, d=5, trials=20, output="matrix")
    assert (whole.refused, whole.conclusion, whole.output) == ({}, "", "matrix")
    assert all(whole.reports[check].passed for check in ("O", "position"))
    assert "give output='matrix'" in str(audit(f, d=5, trials=10))


def test_rows_that_break_get_no_hint():
    for f in (torch.relu, lambda x: x.cumsum(0) + 1):
        assert not any("matrix" in note for note in check_equivariance(f, d=5, trials=30).notes)


def test_a_representation_of_ones_own():
    def outer(y, q):
        return torch.einsum("ia,jb,kc,abc->ijk", q, q, q, y)

    def third(x):
        return torch.einsum("na,nb,nc->abc", x, x, x)

    report = check_equivariance(third, d=3, trials=30, output=outer)
    assert report.passed
    assert report.output == "outer"
    assert not check_equivariance(third, d=3, trials=30, output=lambda y, q: y).passed
    shuffled = check_permutation(lambda x: x @ x.T, d=3, trials=30, output=lambda y, order: y[order][:, order])
    assert shuffled.passed


@pytest.mark.parametrize("size", [1e150, 1e200, 1e300, 1e-200, 1e-300])
def test_huge_and_tiny_outputs(size):
    assert check_equivariance(lambda x: size * x, d=5, trials=40).passed
    assert check_equivariance(lambda x: size * (x @ x.T).sum().clamp(max=1e6), d=5, trials=40, output="scalar").passed
    if size > 1:
        report = check_equivariance(lambda x: size * torch.relu(x), d=5, trials=40)
        assert not report.passed
        assert 0.1 < report.quantile(0.5) < 2.0
        json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: check_equivariance(torch.relu, d=3, output="tensor"),
            "output must be one of rows, matrix, scalar",
        ),
        (lambda: check_equivariance(covariance, d=3, output="matrix", invariant=True), "give one"),
        (
            lambda: check_equivariance(torch.relu, d=3, n=2, output="matrix"),
            r"returns \(2, 3\), and output='matrix' is for",
        ),
        (lambda: check_equivariance(torch.relu, d=3, output=lambda y, q: y[:1, :1]), "must keep the shape"),
        (lambda: check_equivariance(torch.sum, d=3), r"returns \(\), not vectors of size d = 3; output='scalar'"),
        (lambda: audit(torch.relu, d=3, output="tensor"), "output must be one of"),
    ],
)
def test_odd_outputs_are_refused(make, told):
    with pytest.raises(InvalidArgument, match=told):
        make()


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `heedful symmetry ARGUMENTS` in this process: exit code, stdout, stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["heedful", "symmetry", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        told = capsys.readouterr()
        return stopped.value.code or 0, told.out, told.err

    return call


def test_the_command_takes_energies_and_matrices(run, tmp_path):
    code, out, err = run("torch:sum", "--d", 4, "--invariant", "--trials", 20)
    assert (code, err) == (0, "")
    assert "embedding  O                        BROKEN" in out
    assert "counterexample" in out
    code, out, err = run("torch:sum", "--d", 4, "--output", "scalar", "--trials", 10, "--json")
    assert (code, err, json.loads(out)["output"]) == (0, "", "scalar")
    assert isinstance(json.loads(out)["reports"]["O"]["counterexample"]["got"], float)
    assert run("torch:sum", "--d", 4, "--invariant", "--trials", 10, "--group", "position")[0] == 0
    place = tmp_path / "layers.py"
    place.write_text("def covariance(x):\n    return x.T @ x\n")
    assert run(f"{place}:covariance", "--d", 4, "--output", "matrix", "--group", "O", "--trials", 10)[0] == 0
    code, out, err = run(f"{place}:covariance", "--d", 4, "--output", "both")
    assert (code, out) == (2, "")
    assert "--output must be one of rows, matrix, scalar; got 'both'" in err
    assert "give one" in run(f"{place}:covariance", "--d", 4, "--output", "matrix", "--invariant")[2]

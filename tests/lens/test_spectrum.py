"""Singular values of attention: against a plain SVD, on odd shapes, with padding cut out, in the report."""

from __future__ import annotations

import json
import math
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import pyplot

from heedful import Cosine, Gaussian, InvalidArgument, Unsupported, lens
from heedful.lens import MatrixSpectrum, Spectrum, Subject
from heedful.lens.spectra import section as page
from heedful.nn import Attention, Encoder, GaussianProcessAttention, PrimalAttention
from pages import Tree, observed, result_of, softmax

D = torch.float64


def plain(values: torch.Tensor) -> MatrixSpectrum:
    return lens.spectrum(torch.diag(values))[0]


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (5, 11), (11, 5), (13, 13)])
def test_values_are_those_of_numpy(shape):
    matrix = torch.randn(shape, dtype=D)
    (one,) = lens.spectrum(matrix)
    np.testing.assert_allclose(one.values, np.linalg.svd(matrix.numpy(), compute_uv=False), rtol=1e-12)
    assert (one.rows, one.columns, one.bound) == (*shape, min(shape))
    assert one.cumulative()[-1] == one.cumulative(2)[-1] == 1.0


def test_figures_by_their_formulas():
    one = lens.spectrum(torch.randn(7, 5, dtype=D))[0]
    s = np.array(one.values)
    for power in (1, 2):
        np.testing.assert_allclose(one.cumulative(power), (s**power).cumsum() / (s**power).sum(), rtol=1e-12)
        for share in (0.3, 0.9, 1.0):
            assert one.rank(share, power) == 1 + int(((s**power).cumsum() / (s**power).sum() < share - 1e-12).sum())
    p = s / s.sum()
    assert one.effective_rank == pytest.approx(math.exp(-(p * np.log(p)).sum()), rel=1e-12)
    assert one.stable_rank == pytest.approx((s**2).sum() / s[0] ** 2, rel=1e-12)


def test_figures_known_by_hand():
    flat = plain(torch.ones(6))
    assert flat.effective_rank == pytest.approx(6)
    assert flat.stable_rank == pytest.approx(6)
    assert flat.rank(0.5) == 3
    one = lens.spectrum(torch.ones(5, 5))[0]
    assert (one.effective_rank, one.stable_rank, one.rank()) == (pytest.approx(1), pytest.approx(1), 1)
    # Shares of 0.5 and 0.4 hold 0.9, whatever rounding does to their sum.
    assert plain(torch.tensor([5.0, 4.0, 1.0])).rank(0.9) == 2


def test_zeros_and_extreme_scales():
    (zero,) = lens.spectrum(torch.zeros(3, 4))
    assert (zero.effective_rank, zero.stable_rank, zero.rank(), zero.rank(power=2)) == (0, 0, 0, 0)
    assert zero.cumulative() == (1.0, 1.0, 1.0)
    matrix = torch.randn(5, 5, dtype=D)
    one = lens.spectrum(matrix)[0]
    for scale in (1e-200, 1e200, -3.0):
        other = lens.spectrum(scale * matrix)[0]
        assert other.cumulative(2) == pytest.approx(one.cumulative(2))
        assert other.stable_rank == pytest.approx(one.stable_rank)


def test_kinds_of_sources():
    batch = torch.randn(2, 3, 7, 5)
    found = lens.spectrum(batch)
    assert [(one.sequence, one.head) for one in found] == [(b, h) for b in range(2) for h in range(3)]
    assert found[4].values == pytest.approx(torch.linalg.svdvals(batch[1, 1].double()).tolist())
    assert [one.head for one in lens.spectrum(batch[0].numpy())] == [0, 1, 2]
    layers = lens.spectrum([batch, batch[:1]])
    assert layers.layers == (0, 1)
    assert len(layers) == 9
    named = lens.spectrum({"a": batch[0, 0], "b": [batch[0], batch[1]]})
    assert named.names == ("a", "b")
    assert [one.head for one in lens.spectrum(batch[0].half())] == [0, 1, 2]
    assert lens.spectrum(torch.eye(3, dtype=torch.bool))[0].effective_rank == pytest.approx(3)


def test_padding_is_cut_out_of_each_sequence():
    matrices = torch.randn(3, 2, 7, 7)
    valid = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 0], [0] * 7], dtype=torch.bool)
    found = lens.spectrum(matrices, valid=valid)
    assert [(one.sequence, one.rows) for one in found] == [(0, 7), (0, 7), (1, 4), (1, 4)]
    np.testing.assert_allclose(found[3].values, torch.linalg.svdvals(matrices[1, 1, 2:6, 2:6].double()), rtol=1e-12)
    # What stands at padding does not matter, not even where it is no number.
    matrices[1, :, 0] = float("nan")
    matrices[2] = float("inf")
    assert lens.spectrum(matrices, valid=valid) == found


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (torch.tensor([[1.0, float("nan")]]), "layer 0, head 0 holds numbers that are not finite"),
        ([torch.eye(2), torch.eye(2).repeat(2, 1, 1) / torch.tensor([1.0, 0.0])[:, None, None]], "layer 1, head 1"),
        (torch.empty(0, 3), "is empty"),
        (torch.empty(0, 3, 3), "is empty"),
        (torch.ones(3), "must be real matrices"),
        (torch.ones(1, 1, 1, 2, 2), "must be real matrices"),
        (torch.ones(2, 2) + 1j, "must be real matrices"),
        (np.array([["a"]]), "must be real matrices.*got ndarray"),
        ("text", "must be real matrices.*got str"),
        ([], "no matrix to decompose"),
    ],
)
def test_what_cannot_be_decomposed_is_refused(source, message):
    with pytest.raises(InvalidArgument, match=message):
        lens.spectrum(source)


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(InvalidArgument, match="power must be 1"):
        lens.spectrum(torch.eye(2), power=3)
    with pytest.raises(InvalidArgument, match="x is what a module reads"):
        lens.spectrum(torch.eye(2), torch.eye(2))
    with pytest.raises(InvalidArgument, match=r"needs an input: spectrum\(model, x\)"):
        lens.spectrum(Attention(4, 2))
    with pytest.raises(InvalidArgument, match="valid is for matrices"):
        lens.spectrum(Attention(4, 2), torch.ones(1, 3, 4), valid=torch.ones(1, 3, dtype=torch.bool))
    for valid in (torch.ones(1, 2), torch.ones(1, 3, dtype=torch.bool), "no"):
        with pytest.raises(InvalidArgument, match=r"valid must be boolean of shape \(batch, n\)"):
            lens.spectrum(torch.eye(2), valid=valid)
    with pytest.raises(InvalidArgument, match="all padding"):
        lens.spectrum(torch.eye(2), valid=torch.zeros(1, 2, dtype=torch.bool))
    one = lens.spectrum(torch.eye(2))
    with pytest.raises(InvalidArgument, match="no matrix with name 'x'"):
        one.select("x")
    with pytest.raises(InvalidArgument, match="share must lie"):
        one[0].rank(0.0)
    with pytest.raises(InvalidArgument, match="power must be"):
        one[0].cumulative(3)


def test_a_layer_shows_its_coefficients_and_the_cosine_kernel():
    layer = Attention(14, 2).eval()
    x, pad = torch.randn(3, 11, 14), torch.zeros(3, 11, dtype=torch.bool)
    pad[1, 8:] = pad[2] = True
    found = lens.spectrum(layer, {"query": x, "key_padding_mask": pad})
    assert found.names == ("softmax", "cosine")
    assert {one.sequence for one in found} == {0, 1}
    seen = lens.observe(layer, {"query": x, "key_padding_mask": pad})[0]
    expected = torch.linalg.svdvals(seen.weights[1, 1, :8, :8].double())
    one = next(one for one in found if (one.name, one.sequence, one.head) == ("softmax", 1, 1))
    np.testing.assert_allclose(one.values, expected, atol=1e-7)
    q, k = (torch.nn.functional.normalize(part[1, 1, :8].double(), dim=-1) for part in (seen.queries, seen.keys))
    one = next(one for one in found if (one.name, one.sequence, one.head) == ("cosine", 1, 1))
    assert one.bound == 7
    np.testing.assert_allclose(one.values, torch.linalg.svdvals(q @ k.mT)[:7], rtol=1e-10)


def test_names_follow_the_kernel_and_shared_keys_are_repeated():
    x = torch.randn(1, 5, 12)
    assert lens.spectrum(Attention(12, 2, kernel=Gaussian()), x).names == ("gaussian", "cosine")
    assert lens.spectrum(Attention(12, 2, kernel=Cosine()), x).names == ("cosine",)
    shared = lens.spectrum(Attention(12, 4, num_kv_heads=2), x).select("cosine")
    assert [one.head for one in shared] == [0, 1, 2, 3]
    seen = lens.observe(Attention(12, 2), x, keep=("weights",))
    assert lens.spectrum(seen).names == ("softmax",)


def test_a_primal_layer_shows_k_x_and_its_features():
    layer = PrimalAttention(14, 2, rank=3, max_len=23).eval()
    x, pad = torch.randn(2, 11, 14), torch.zeros(2, 11, dtype=torch.bool)
    pad[1, 9:] = True
    found = lens.spectrum(layer, (x, pad))
    assert found.names == ("primal", "cosine")
    k = layer.kernel_matrix(x, pad)[1, 1, :9, :9].detach().double()
    one = next(one for one in found if (one.name, one.sequence, one.head) == ("primal", 1, 1))
    assert (one.rows, one.bound) == (9, 7)
    np.testing.assert_allclose(one.values, torch.linalg.svdvals(k)[:7], rtol=1e-4, atol=1e-6)
    few = PrimalAttention(14, 2, rank=3, max_len=23, rank_multi=1).eval()
    assert {one.bound for one in lens.spectrum(few, x).select("primal")} == {3}
    assert lens.spectrum(PrimalAttention(14, 2, max_len=9, feature_map="elu"), x).names == ("primal", "features")
    assert lens.spectrum(GaussianProcessAttention(14, 2, rank=3, max_len=23), x).names == ("primal", "cosine")
    with pytest.raises(Unsupported, match="prefix"):
        lens.spectrum(PrimalAttention(14, 2, rank=3, max_len=23, causal="prefix"), x)
    with pytest.warns(UserWarning, match="mixes no tokens"):
        static = PrimalAttention(14, 2, weights="static")
    assert lens.spectrum(static, x).names == ("primal",)


def test_layers_of_both_kinds_are_numbered_in_the_order_of_execution():
    model = Encoder(12, 2, kernels=["primal", "softmax", "primal", "softmax"], max_len=13).eval()
    x = torch.randn(1, 7, 12)
    found = lens.spectrum(model, x)
    assert found.select("primal").layers == (0, 2)
    assert found.select("softmax").layers == (1, 3)
    assert found.select("cosine").layers == (0, 1, 2, 3)
    assert lens.spectrum(model, x, layers=[-1, 0]).select("softmax").layers == (3,)
    seen = lens.observe(model, x)
    assert lens.spectrum(seen, layers=[-1]) == Spectrum(lens.spectrum(seen).select(layer=1).matrices)
    assert not any(part._forward_hooks for part in model.modules())
    for layers in ([2], ["x"]):
        with pytest.raises(InvalidArgument, match="layers must be integers below 2"):
            lens.spectrum(seen, layers=layers)


def test_an_ablation_goes_beside():
    x = torch.randn(1, 11, 14)
    layer, ablation = (PrimalAttention(14, 2, rank=3, max_len=11) for _ in range(2))
    both = lens.spectrum(layer, x).beside(lens.spectrum(ablation, x), "eta = 0")
    assert both.names == ("primal", "cosine", "primal, eta = 0", "cosine, eta = 0")
    assert both.select("primal, eta = 0").effective_rank == lens.spectrum(ablation, x).select("primal").effective_rank
    with pytest.raises(InvalidArgument, match="labelled 'eta = 0' already"):
        both.beside(lens.spectrum(ablation, x), "eta = 0")


def test_results_print_plot_and_go_to_json():
    found = lens.spectrum({"a": [torch.randn(3, 7, 7)] * 2, "b": torch.eye(5)}, power=2)
    assert repr(found) == "Spectrum(a, b: 7 matrices)"
    assert repr(lens.spectrum(torch.eye(2))) == "Spectrum(matrix: 1 matrix)"
    told = str(found).splitlines()
    assert len(told) == 4
    assert told[-1].split() == ["b", "0", "5.0", "5.0", "5.0", "5"]
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["power"] == 2
    assert data["matrices"][-1]["values"] == pytest.approx([1.0] * 5)
    assert data["matrices"][-1]["rank_90_energy"] == 5
    figure, ax = pyplot.subplots()
    assert found.plot(ax) is ax
    lines = {line.get_label(): line.get_ydata() for line in ax.get_lines()}
    np.testing.assert_allclose(lines["b, layer 0"], np.arange(1, 6) / 5)
    np.testing.assert_allclose(
        lines["a, layer 1"], np.mean([one.cumulative(2) for one in found.select("a", 1)], axis=0)
    )
    assert "squared" in ax.get_ylabel()
    pyplot.close(figure)


def subject_of(weights, **options) -> Subject:
    return Subject(torch.nn.Identity(), None, None, "text", observed(weights, **options))


def test_the_section_says_what_spectrum_says():
    made = page.section(subject_of(softmax(layers=3)))
    expected = lens.spectrum(observed(softmax(layers=3)))
    assert made.title == "Singular values"
    assert [one.layer for one in made.result] == [one.layer for one in expected]
    rows = [line.split() for line in made.summary.splitlines() if re.match(r"\s+\d", line)]
    assert [int(row[0]) for row in rows] == [0, 1, 2]
    assert rows[1][1] == f"{made.result.select(layer=1).effective_rank:.1f}"
    assert max(map(len, made.summary.splitlines())) <= 100
    data = json.loads(json.dumps(made.data, allow_nan=False))
    assert len(data["matrices"]) == 9
    assert "values" not in data["matrices"][0]
    assert len(data["mean_curves"]) == 3
    tree = Tree(result_of(made).html())
    assert len([attrs for attrs in tree.all("svg") if attrs.get("role") == "img"]) == 4
    assert all(attrs.get("aria-label") for attrs in tree.all("svg") if attrs.get("role") == "img")
    assert len(Tree(made.html).all("tr")) == 10
    assert len(Tree(made.html).all("polygon")) == 3


def test_the_section_leaves_out_padding_and_refuses_what_is_not_finite():
    weights = softmax(layers=1, n=5)
    made = page.section(subject_of(weights, valid=[True, True, True, False, False]))
    assert {one.rows for one in made.result} == {3}
    weights[0][1, 2, 3] = float("nan")
    with pytest.raises(Unsupported, match="head 1 holds numbers that are not finite"):
        page.section(subject_of(weights))


def test_the_section_bounds_its_work(monkeypatch):
    monkeypatch.setattr(page, "WORK", 2 * 2 * 7**3)
    made = page.section(subject_of(softmax(heads=5)))
    assert [one.head for one in made.result] == [0, 2, 0, 2]
    assert "some heads were read" in made.summary
    model = Encoder(12, 2, kernels=["softmax"]).eval()

    class Reads(torch.nn.Module):
        def forward(self, input_ids):
            return model(torch.nn.functional.one_hot(input_ids, 12).float())

    reader = Reads()
    reader.inner = model
    inputs = {"input_ids": torch.randint(12, (1, 9))}
    monkeypatch.setattr(page, "TOKENS", 5)
    made = page.section(Subject(reader, None, None, "text", lens.observe(reader, inputs), inputs=inputs))
    assert {one.rows for one in made.result} == {5}
    assert "first 5 tokens" in made.summary


def test_the_section_shows_primal_layers():
    model = Encoder(12, 2, kernels=["softmax", "primal"], max_len=13).eval()
    inputs = {"x": torch.randn(1, 7, 12)}
    made = page.section(Subject(model, None, None, "text", lens.observe(model, inputs), inputs=inputs))
    assert made.result == lens.spectrum(model, inputs)
    assert "primal" in made.summary
    Tree(made.html)


def test_the_gallery_draws_its_picture(tmp_path, monkeypatch, capsys):
    script = Path(__file__).parents[2] / "gallery" / "plot_spectrum.py"
    monkeypatch.setattr("sys.argv", [str(script), str(tmp_path / "picture.png")])
    runpy.run_path(str(script), run_name="__main__")
    picture = pyplot.imread(tmp_path / "picture.png")
    assert picture.shape[1] > 1000
    assert picture.std() > 0.05
    assert "wrote" in capsys.readouterr().out
    pyplot.close("all")

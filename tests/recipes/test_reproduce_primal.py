"""The recipes about Primal-Attention but for ListOps: parts that survive a stop, fair contests, and what tables say."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest
import torch
from experiments.recipe import Setting, text
from experiments.store import Store

from heedful import InvalidArgument, Unsupported
from heedful.cli.reproduce import root
from heedful.nn import PrimalAttention
from heedful.series import SeriesClassifier, SeriesData

sys.path.insert(0, str(root()))
from experiments import (
    primal_convert,
    primal_efficiency,
    primal_spectrum,
    primal_uea,
    series,
)


def quiet(line):
    pass


def test_convert_tells_where_embeddings_break():
    def one(agreement):
        times = {"batch": [32, 27], "latency_before": 0.004, "latency_after": 0.006, "hardware": "a chip", "torch": "2"}
        return {"agreement": agreement, "lowest": 0.5, "control": 0.6, **times}

    def table(*agreements, **others):
        primal = {str(at): one(value) for at, value in enumerate(agreements, 1) if value}
        return text(primal_convert, result | {"primal": primal} | others)

    result = {
        "calibration": 300, "held_out": 40, "steps": 10, "threshold": 0.9, "model_layers": 4, "least_squares": one(0.8),
        "anatomy": {"no_attention": [0.9, 0.7], "sentence_mean": 0.99, "directions": {"24": 0.8}},
        "no_mixing": {"1": one(0.96)}, "costs_on": "a chip",
        "costs": [{"batch": 2, "length": 512, "before": 0.04, "after": 0.03}],
    }  # fmt: skip
    assert "| 3 | not run | | | | |" in table(0.98, 0.95, None, 0.91)
    assert "2 layers keep the mean cosine at 0.9 or above; 3 were not tried." in table(0.98, 0.95, None, 0.91)
    assert "4 layers keep the mean cosine at 0.9 or above, which is all of them." in table(0.98, 0.95, 0.93, 0.91)
    assert "1 layer keeps the mean cosine at 0.9 or above, 2 do not." in table(0.98, 0.89, 0.93, 0.91)
    assert "1, 2, 1 without mixing on a chip, torch 2." in table(0.98, 0.95)
    assert "All layers, a chip: 2 x 512 tokens 40.0 ms before, 30.0 after." in table(0.98)
    assert "Agreement of the last layer: 0.9800, wanted >= 0.97: met" in table(0.98)
    assert "Without any mixing" not in table(0.98)
    assert (
        "0.9600, wanted >= 0.97: MISSED\n- Without any mixing in that layer the same procedure does as well."
        in table(0.96)
    )


def test_parts_are_run_once_and_survive_a_fault(tmp_path):
    def root_of(number):
        calls.append(number)
        return math.sqrt(number)

    calls = []
    parts = {"four": (4,), "minus one": (-1,), "nine": (9,)}
    with pytest.raises(ValueError, match="math domain"):
        Store(tmp_path, quiet).run(root_of, parts)
    assert calls == [4, -1, 9]
    del parts["minus one"]
    assert Store(tmp_path, quiet).run(root_of, parts) == {"four": 2.0, "nine": 3.0}
    assert calls == [4, -1, 9]
    assert Store(tmp_path, quiet, seconds=0).run(root_of, parts | {"one": (1,)}) == {"four": 2.0, "nine": 3.0}
    assert len(calls) == 3


def test_parts_run_in_processes_beside_one_another(tmp_path):
    parts = {str(number): (number,) for number in (4, -1, 9, 16)}
    told = []
    with pytest.raises(ValueError, match="math domain"):
        Store(tmp_path, told.append).run(math.sqrt, parts, 2)
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["16", "4", "9"]
    assert sum("ValueError" in line for line in told) == 1
    del parts["-1"]
    assert Store(tmp_path, quiet).run(math.sqrt, parts, 2) == {"4": 2.0, "9": 3.0, "16": 4.0}


@pytest.fixture
def vowels(tmp_path, monkeypatch):
    """A small stand-in for JapaneseVowels: two classes, unequal lengths, some test series longer than all training series."""
    rng = np.random.default_rng(0)

    def part(count, longest):
        y = np.arange(count) % 2
        cases = [rng.normal(size=(3, rng.integers(5, longest))) + label for label in y]
        return SeriesData(cases, y.astype(str), "JapaneseVowels")

    made = part(24, 9), part(14, 12)
    asked = []

    def archive(name):
        asked.append(name)
        if name != "JapaneseVowels":
            raise InvalidArgument("not here")
        return made

    monkeypatch.setattr(series, "BESIDE", tmp_path / "nowhere")
    monkeypatch.setattr(series, "archive", archive)
    folder = tmp_path / "data"
    assert series.prepare(folder) == ["JapaneseVowels"]
    assert series.prepare(folder) == ["JapaneseVowels"]
    assert asked == ["BasicMotions", "JapaneseVowels", "BasicMotions"]
    return folder, made


def test_data_sets_are_gathered_in_a_folder(vowels, tmp_path, monkeypatch):
    folder, made = vowels
    for data, wanted in zip(series.load(folder, "JapaneseVowels"), made, strict=True):
        assert data.y.tolist() == wanted.y.tolist()
        for row, case in zip(data.X, wanted.X, strict=True):
            assert np.array_equal(row[:, : case.shape[1]], case)
            assert np.isnan(row[:, case.shape[1] :]).all()
    monkeypatch.setattr(series, "archive", lambda name: (_ for _ in ()).throw(InvalidArgument("not here")))
    with pytest.raises(Unsupported, match="no data set in"):
        series.prepare(tmp_path / "empty")


def test_uea_epochs_are_fixed_beforehand():
    assert {cases: primal_uea.epochs(cases) for cases in (30, 160, 270, 7494)} == {30: 100, 160: 100, 270: 58, 7494: 15}
    assert [primal_uea.batch_size(cases) for cases in (30, 1_100, 7_494, 10**6)] == [16, 17, 117, 256]


def test_uea_runs_and_resumes(vowels, tmp_path):
    setting = Setting(True, "cpu", tmp_path, quiet)
    result = primal_uea.run(setting)
    assert json.loads(json.dumps(result)) == result
    assert [fit["attention"] for fit in result["fits"]] == list(primal_uea.ATTENTION)
    assert all(0 <= fit["accuracy"] <= 100 and fit["epochs"] == 2 for fit in result["fits"])
    assert primal_uea.run(setting) == result
    assert "| JapaneseVowels | 24 / 14 | 2 |" in text(primal_uea, result)


def fits(accuracies, seeds=2):
    """A result: {set: {attention: mean}}, seeds one point apart."""
    rows = [
        {"set": name, "attention": kind, "accuracy": mean + seed - (seeds - 1) / 2}
        for name, kinds in accuracies.items()
        for kind, mean in kinds.items()
        for seed in range(seeds)
    ]
    sets = {name: {"cases": [10, 20], "epochs": 100} for name in accuracies}
    return {"quick": False, "sets": sets, "fits": rows, "wanted": len(rows)}


def test_uea_table_says_who_wins():
    kinds = dict(zip(primal_uea.ATTENTION, (98.0, 97.0, 98.2, 90.0, 97.5), strict=True))
    other = dict(zip(primal_uea.ATTENTION, (80.0, 81.0, 82.0, 79.0, 83.0), strict=True))
    table = text(primal_uea, fits({"JapaneseVowels": kinds, "UWaveGestureLibrary": other}))
    assert "| 98.0 ± 0.7 [98.4] |" in table
    assert "**89.0**" in table
    assert "Accuracy of primal on JapaneseVowels, %: 98.0, wanted >= 97: met" in table
    assert "Accuracy of primal on UWaveGestureLibrary, %: 80.0, wanted >= 82: MISSED" in table
    assert "above softmax in the mean: -1.1, wanted >= -0.5: MISSED" in table
    assert (
        "The control wins: without any attention the mean is 90.2 %, 0.2 points above the best attention (softmax)"
        in table
    )
    assert "on UWaveGestureLibrary nothing beats it." in table
    table = text(primal_uea, fits({"JapaneseVowels": kinds}, seeds=1) | {"wanted": 9})
    assert "+" not in table.split("in the mean: ")[1].split(" points")[0]
    assert "Without any attention the mean is 97.5 %, 0.7 points below the best attention (softmax)" in table
    assert "it is no worse than softmax+primal, linear; on no set is it the best." in table
    assert "Incomplete: 5 of 9 fits." in table


def test_uea_mean_is_over_sets_that_all_ran():
    half = {"primal": 50.0}
    kinds = dict.fromkeys(primal_uea.ATTENTION, 90.0)
    table = text(primal_uea, fits({"A": kinds, "B": half}))
    assert "**mean of 1 sets**" in table
    assert table.count("**90.0**") == 5


def test_spectra_are_summed_up_by_layer_and_matrix():
    from heedful import lens

    given = {
        "softmax": [torch.diag(torch.tensor([4.0, 2.0, 2.0])), torch.eye(3)],
        "cosine": [torch.ones(3, 3), torch.eye(3)],
    }
    rows = primal_spectrum.summary(lens.spectrum(given))
    assert [(row["layer"], row["matrix"]) for row in rows] == [
        (0, "softmax"),
        (0, "cosine"),
        (1, "softmax"),
        (1, "cosine"),
    ]
    assert rows[0]["c_1"] == pytest.approx(0.5)
    assert rows[0]["effective_rank"] == pytest.approx(2**1.5)
    assert rows[0]["rank_90"] == 3
    assert rows[1]["effective_rank"] == pytest.approx(1.0, abs=1e-6)
    assert rows[3]["effective_rank"] == pytest.approx(3.0)


def test_spectrum_of_networks(vowels):
    folder, (train, test) = vowels
    hybrid = primal_spectrum.of_network(folder, "softmax+primal, eta 0.1", 0, 1, 3)
    kinds = [(row["layer"], row["matrix"]) for row in hybrid["rows"]]
    assert kinds == [(0, "softmax"), (0, "cosine"), (1, "primal"), (1, "cosine")]
    assert len(hybrid["kkt"]) == 1
    assert hybrid["rows"][2]["matrices"] == 3 * 8
    longest = max(case.shape[1] for case in train.X)
    lengths = [min(case.shape[1], longest) for case in test.X[:3]]
    assert len(set(lengths)) > 1
    assert hybrid["rows"][0]["bound"] == pytest.approx(np.mean(lengths))
    assert hybrid["j_squared"] > 0
    untrained = primal_spectrum.of_network(folder, "primal, untrained", 0, 1, 3)
    trained = primal_spectrum.of_network(folder, "primal, eta 0", 0, 1, 3)
    assert untrained["j_squared"] != trained["j_squared"]
    assert untrained["kkt"] != trained["kkt"]
    # A rate this small moves nothing to speak of: the weights are those that the seed drew.
    model = SeriesClassifier("primal", epochs=1, lr=1e-30, random_state=0, device="cpu").fit(train.X, train.y)
    torch.manual_seed(0)
    for name, drawn in model._network().state_dict().items():
        assert torch.allclose(model.network_.state_dict()[name], drawn, rtol=0, atol=1e-30), name


def test_certificates_tell_a_kernel_svd(vowels):
    torch.manual_seed(1)

    class One(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = PrimalAttention(10, 2, rank=3, max_len=11).double()

        def forward(self, x):
            return self.layer(x)

    network, x = One(), torch.randn(1, 11, 10, dtype=torch.float64)
    before = primal_spectrum.certificates(network, (x,))
    network.layer.fit_ksvd_(x)
    after = primal_spectrum.certificates(network, (x,))
    assert before["kkt"][0] > 0.1
    assert after["kkt"][0] < 1e-12
    assert after["j_squared"] < 1e-12 < before["j_squared"]


def test_spectrum_table_follows_its_figures():
    told = json.loads((root() / "experiments" / "results" / "primal-spectrum.json").read_text())
    result = told["result"]
    table = text(primal_spectrum, result)
    assert "| 11 (the last) | 0.77 | 0.93 |" in table
    assert len(result["minilm"]["rows"]) == 12
    assert {one["network"] for one in result["networks"]} == set(primal_spectrum.NETWORKS)
    for one in result["networks"]:
        for row in one["rows"]:
            assert row["effective_rank"] <= row["bound"]
            assert row["bound"] <= 8 or row["matrix"] == "softmax"


@pytest.mark.parametrize(
    "name", [name for name in primal_efficiency.cases(256, "cpu", torch.float64) if "cuDNN" not in name]
)
def test_every_contestant_meets_float64(name):
    case = primal_efficiency.cases(256, "cpu", torch.float32)[name]()
    found = primal_efficiency.errors(case)
    assert primal_efficiency.worst(found)[1] < 2e-4, found
    assert {f"d out / d {leaf}" for leaf in case.names if leaf not in ("lambda", "lam")} <= set(found)
    assert ("loss" in found) == ("primal" in name)


def test_a_wrong_contestant_has_no_speed():
    case = primal_efficiency.cases(256, "cpu", torch.float32)["primal"]()

    def forgets_lambda(*leaves):
        out, loss = case.function(*leaves[:-1], torch.ones_like(leaves[-1]))
        return out, loss

    wrong = primal_efficiency.Case(forgets_lambda, case.truth, case.names, case.sets, case.upstreams, is_ours=True)
    row = {}
    primal_efficiency._measure(wrong, row, 3)
    assert row["refused"].startswith("error 1.0e+09 of d loss / d lambda, allowed 0.01")
    assert "queued_ms" not in row


def test_linear_cost_on_the_cpu():
    """Check 11 of the sheet."""
    result = {"quick": True, "gpu": [], "cpu": primal_efficiency.on_cpu(2)}
    assert result["cpu"]["worst_error"] < 1e-4
    assert [bar.verdict for bar in primal_efficiency.bars(result)] == ["met"] * 2
    assert text(primal_efficiency, result).count("| met |") == 2


def test_efficiency_needs_a_gpu_unless_quick(tmp_path):
    with pytest.raises(Unsupported, match="measures a GPU"):
        primal_efficiency.run(Setting(False, "cpu", tmp_path, quiet))


def test_efficiency_table_and_bars():
    times = {
        "primal": 0.06, "primal, plain": 0.5, "linear": 0.2, "Nystrom": 0.9, "Performer": 0.8, "cuDNN SDPA": 2.0,
        "primal module": 0.3, "primal module, segment mean": 0.31, "primal module, plain": 0.6,
    }  # fmt: skip
    rows = [
        {"name": name, "error": 1e-3, "megabytes": 3.0, "queued_ms": 2 * t, "graph_ms": t} for name, t in times.items()
    ]
    rows[3] = {"name": "Nystrom", "error": 0.5, "refused": "because"}
    cpu = {
        "milliseconds": {"primal 1024": 5.0, "SDPA 1024": 17.0, "primal 4096": 20.0, "SDPA 4096": 240.0},
        "worst_error": 1e-6,
    }
    result = {"quick": False, "cpu": cpu, "gpu": [{"length": 16_384, "floor_ms": 0.032, "rows": rows}]}
    table = text(primal_efficiency, result)
    assert "| n = 16384: cuDNN SDPA / primal | 33.33 | >= 5 | met |" in table
    assert "| n = 16384: primal module, plain / primal module | 2.00 | >= 3 | MISSED |" in table
    assert "| n = 16384: Nystrom / primal | | >= 1 | no figure |" in table
    assert "| n = 16384: primal / floor | 1.88 | <= 2 | met |" in table
    assert "- Nystrom, n = 16384: because" in table
    assert "| primal | 0.1200 / 0.0600, 3 MB |" in table


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run where there is one")
def test_efficiency_on_the_device():
    told = primal_efficiency.measure(1_024, 3)
    assert {row["name"] for row in told["rows"]} == set(primal_efficiency.cases(1_024, "cuda", torch.bfloat16))
    for row in told["rows"]:
        assert "refused" not in row, row
        assert row["queued_ms"] > 0
        assert "graph_ms" in row, row

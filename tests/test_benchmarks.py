"""The benchmark drivers without a GPU: who is wrong has no speed, bars tell the truth, the page is what the figures give."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import (  # noqa: E402
    accuracy,
    bars,
    datapoints,
    flow,
    gpu,
    launching,
    lengths,
    overview,
    pages,
    registers,
    search,
    series,
    steps,
    times,
    timing,
)
from benchmarks.contest import hold  # noqa: E402
from benchmarks.contestants import FIELDS, Contestant, Setting, sigmoid_formula  # noqa: E402

from heedful import Sigmoid, Softmax  # noqa: E402
from heedful.ops.fused import serving  # noqa: E402

TINY = Setting("bar", (1, 2, 37, 8), device="cpu")
SHARES = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.1 * gradient


def contestant(name, function, variant=None):
    return Contestant(name, Sigmoid(), lambda setting: function, variant)


def allow(variant, names):
    return None


def test_a_wrong_contestant_is_refused_and_has_no_speed():
    def crash(q, k, v):
        raise RuntimeError("cannot\nat all")

    field = [
        contestant("right", sigmoid_formula),
        contestant("wrong", lambda q, k, v: 1.1 * sigmoid_formula(q, k, v)),
        contestant("nan", lambda q, k, v: sigmoid_formula(q, k, v) * math.nan),
        contestant("wrong backward", lambda q, k, v: sigmoid_formula(WrongBackward.apply(q), k, v)),
        contestant("crash", crash),
    ]
    found = hold(TINY, field, allow, 3)
    right, wrong, nan, backward, crashed = found["rows"]
    assert found["name"] == "bar 1x2x37x8"
    assert right["forward"]["median"] > 0
    assert right["backward"]["low"] <= right["backward"]["median"] <= right["backward"]["high"]
    assert set(right["errors"]) == {"out", "dq", "dk", "dv"}
    assert wrong["refused"] == "refused: error 1.0e-01 of out, allowed 1e-02 (the timed tensors)"
    assert nan["refused"].startswith("refused: error nan of out")
    for row in (wrong, nan, crashed):
        assert not set(row) & {"forward", "backward"}
    assert backward["refused backward"].startswith("refused: error 1.0e-01 of dq")
    assert "forward" in backward
    assert "backward" not in backward
    assert crashed["skipped"] == "RuntimeError: cannot"
    json.dumps(found, allow_nan=False)


def test_the_causal_truth_is_causal():
    causal = Setting("causal", (1, 2, 37, 8), is_causal=True, device="cpu")
    (softmax,) = (one for one in FIELDS["causal"] if one.name == "heedful Softmax")
    ours, plain = hold(causal, [softmax, contestant("not causal", sigmoid_formula)], allow, 3)["rows"]
    assert ours["plan"] == "sdpa"
    assert "backward" in ours
    assert "refused" in plain


def test_a_variant_that_failed_its_check_is_not_timed():
    asked = []

    def gate(variant, names):
        asked.append((variant, names))
        return "refused: error of dq" if "dq" in names or variant == "worse" else None

    field = [contestant("a", sigmoid_formula, "Sigmoid"), contestant("b", sigmoid_formula, "worse")]
    late, whole = hold(TINY, field, gate, 3)["rows"]
    assert late["refused backward"] == "refused: error of dq"
    assert "forward" in late
    assert "backward" not in late
    assert whole == {"contestant": "b", "refused": "refused: error of dq"}
    assert asked[0] == ("Sigmoid", ("out",))


def test_errors_of_a_variant_decide_over_its_speed(monkeypatch):
    variant = accuracy.VARIANTS["Sigmoid"]
    rows = accuracy.check(variant, "bfloat16", "cpu", 64)
    assert [row["case"] for row in rows] == [case.name for case in accuracy.CASES if case.name != "far from zero"]
    assert {row["verdict"] for row in rows} == {"met"}
    assert accuracy.refusal(rows, "Sigmoid", "bfloat16") is None
    assert accuracy.refusal(rows, "Sigmoid", "float32") == "refused: no check in float32: none was run"
    right = accuracy.attend

    def worse(query, *entries, is_causal, **options):
        return right(query, *entries, is_causal=False, **options)

    monkeypatch.setattr(
        accuracy, "attend", lambda *x, impl, **o: (right if impl == "reference" else worse)(*x, impl=impl, **o)
    )
    rows = accuracy.check(variant, "bfloat16", "cpu", 64)
    assert [row["case"] for row in rows if row["verdict"] == "MISSED"] == ["causal"]
    assert accuracy.refusal(rows, "Sigmoid", "bfloat16").endswith("of out, allowed 1e-02 (causal)")


class Named(accuracy.Variant):
    def on(self, device):
        return self.impl


def test_an_implementation_that_cannot_serve_has_no_speed():
    variant = Named("Sigmoid", Sigmoid(), "linear")
    rows = accuracy.check(variant, "float32", "cpu", 64)
    assert {row["verdict"] for row in rows} == {"skipped"}
    assert accuracy.refusal(rows, "Sigmoid", "float32").startswith("refused: no check in float32: Unsupported: ")


def test_errors_know_zero_and_what_a_dtype_cannot_hold():
    scales = dict.fromkeys(accuracy.NAMES, 2.0)
    one, zero = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    truth = {"out": zero, "dq": zero, "dk": one, "dv": 1e-9 * one}
    got = {name: x.half() for name, x in truth.items()}
    found, unfit = accuracy.errors(got, truth, scales, 1e-2)
    assert found == {"out": 0.0, "dq": 0.0, "dk": 0.0}
    assert unfit == ["dv"]
    got |= {"out": one.half(), "dq": one.half(), "dk": math.nan * one.half()}
    found, _ = accuracy.errors(got, truth, scales, 1e-2)
    assert found == {"out": 1.0, "dq": 1.0, "dk": "nan"}
    assert accuracy.beyond(found, 1e-2, ("dk",)) == "refused: error nan of dk, allowed 1e-02"


def test_contestants_take_turns():
    called = []
    runs = {name: lambda name=name: called.append(name) for name in "ab"}
    found = timing.interleaved(runs, 5)
    turns = [called[at : at + 2] for at in range(0, 10, 2)]
    assert all(sorted(turn) == ["a", "b"] for turn in turns)
    # Neither is always the one who finds what the other left in the caches.
    assert ["a", "b"] in turns
    assert ["b", "a"] in turns
    assert found["a"].repeats == 5
    assert found["a"].calls == 1
    called.clear()
    found = timing.interleaved(runs, 3, least=0.01)
    assert 1 <= found["a"].calls <= timing.MOST_CALLS
    assert called.count("a") == 2 + 3 * found["a"].calls


def test_who_needs_long_takes_fewer_turns(monkeypatch):
    monkeypatch.setattr(timing, "LONG", 0.0)
    assert timing.interleaved({"a": lambda: None}, 9, least=0.01)["a"].repeats == timing.FEWEST


def test_the_cpu_driver_refuses_as_well():
    one = torch.ones(3)
    with pytest.raises(timing.WrongResult, match="made: wrong has relative error"):
        timing.measure(timing.Contest("made", {"wrong": lambda: 2 * one}, {"wrong": lambda: one}), 3)
    outcome = timing.measure(timing.Contest("made", {"right": lambda: one}, {"right": lambda: one}), 3)
    assert outcome.spread["right"][0] <= outcome.milliseconds["right"] <= outcome.spread["right"][1]


def row(name, milliseconds=1.0, **more):
    times = {"low": milliseconds, "high": milliseconds, "repeats": 5, "calls": 1}
    memory = {
        "extra": {"forward": 1e6, "forward+backward": 4e6},
        "needed": {"inputs": 3e7, "output": 1e7, "gradients": 4e7},
    }
    directions = {d: {"median": share * milliseconds, **times} for d, share in SHARES.items()}
    return {"contestant": name, "errors": {"out": 1e-3}, "memory": memory, **directions} | more


def fabricated():
    """A result in which every bar is met: ours take 1 ms where peers take 1.1, formulas 4 and full attention 1.8 or 20."""
    slower = {"compiled": 4.0, "eager": 6.0, "FlexAttention": 1.1, "cuDNN": 1.1, "flash": 1.5, "heedful": 1.0}
    contests = []
    for setting in (*bars.BARS, bars.CAUSAL, *bars.LINEAR, *gpu.SWEEP):
        rows = []
        for one in FIELDS[setting.role]:
            time = slower[one.name.split()[0]]
            time *= 20 if setting.role == "linear" and one.variant is None else 0.5 if setting.is_causal else 1.0
            rows.append(row(one.name, time))
        described = {"name": setting.name, "role": setting.role, "shape": list(setting.shape)}
        contests.append(
            described | {"is_causal": setting.is_causal, "dtype": "bfloat16", "device": "cuda", "rows": rows}
        )
    errors = dict.fromkeys(accuracy.NAMES, 1e-6)
    found = [
        {"variant": v, "dtype": d, "case": "random", "allowed": b, "errors": errors, "verdict": "met"}
        for v in accuracy.VARIANTS
        for d, b in accuracy.BOUNDS.items()
    ]
    machine = {"device": "a GPU", "torch": "2.11", "triton": None, "date": "2026-01-01"}
    settings = {"quick": False, "repeats": 21, "seconds": 450.0}
    return {"machine": machine, "settings": settings, "parts": [], "accuracy": found, "contests": contests}


def at(result, setting, name):
    return bars.row_of(result, setting, name)


def failing(result):
    return [(bar.setting, bar.what, bar.verdict) for bar in bars.table(result) if bar.fails]


def test_bars_are_met_missed_or_refused():
    result = fabricated()
    table = bars.table(result)
    # Four shapes: three variants by four bars, cuDNN's at D = 64, two of the Gaussian; causal, linear, errors of three dtypes.
    assert len(table) == 4 * (3 * 4 + 2) + 3 * 3 + 4 * 2 + 2 + 3 * 6 * 2
    assert {bar.verdict for bar in table} == {"met"}
    assert "0 missed or refused" in gpu.report(table)

    slow = at(result, bars.BARS[0], "heedful Sigmoid")
    slow["forward"]["median"] = 1.2
    name = "bar 8x16x2048x64"
    assert failing(result) == [
        (name, "heedful Sigmoid, forward: speed / FlexAttention softmax", "MISSED"),
        (name, "heedful Sigmoid, forward: speed / cuDNN SDPA", "MISSED"),
    ]
    assert gpu.report(bars.table(result)).splitlines()[-2].startswith("MISSED       0.917 >= 0.95")

    slow["memory"]["extra"]["forward+backward"] = 8e6
    assert (name, "heedful Sigmoid: memory beyond inputs, output and gradients / them", "MISSED") in failing(result)


def test_a_bar_without_a_figure_is_refused():
    result = fabricated()
    refused = at(result, bars.BARS[1], "heedful ReluSquared")
    for direction in SHARES:
        del refused[direction]
    refused["refused"] = "refused: error 2.0e-02 of out, allowed 1e-02"
    told = failing(result)
    assert {verdict for *_, verdict in told} == {"refused"}
    assert len(told) == 5 + 2  # its own at that shape, and the two that compare it with causal
    notes = {bar.note for bar in bars.table(result) if bar.fails}
    assert notes == {"heedful ReluSquared: refused: error 2.0e-02 of out, allowed 1e-02"}

    assert len(failing({**result, "contests": []})) == 4 * 14 + 9 + 8 + 2
    assert len(failing({**result, "accuracy": []})) == 7 + 2 * 6 * 2  # float16 has no bar where it was not run


def test_a_formula_that_does_not_fit_is_no_missed_bar():
    result = fabricated()
    peer = at(result, bars.BARS[3], "compiled Sigmoid")
    del peer["forward"]
    peer["skipped"] = "memory: 34 GB of coefficients, allowed 20 GB"
    assert failing(result) == []
    (bar,) = (bar for bar in bars.table(result) if bar.verdict == "no peer")
    assert bar.note == "no peer: memory: 34 GB of coefficients, allowed 20 GB"
    peer["skipped"] = "RuntimeError: it broke"
    assert [verdict for *_, verdict in failing(result)] == ["refused"]


def test_an_error_above_the_bound_misses_its_bar():
    result = fabricated()
    bad = next(r for r in result["accuracy"] if (r["variant"], r["dtype"]) == ("Gaussian raw", "float32"))
    bad["errors"] = bad["errors"] | {"dk": "nan"}
    assert failing(result) == [("float32", "heedful Gaussian raw: largest error of gradients", "MISSED")]
    del bad["errors"]
    bad |= {"verdict": "MISSED", "reason": "RuntimeError: it broke"}
    assert [verdict for *_, verdict in failing(result)] == ["refused", "refused"]


def test_the_page_is_made_from_the_figures(tmp_path):
    result = fabricated()
    refused = at(result, bars.BARS[0], "heedful Sigmoid")
    del refused["backward"]
    refused["refused backward"] = "refused: error 2.0e-02 of dq, allowed 1e-02"
    result["parts"].append({"name": "sweep 1x8x65536x64", "skipped": "over the time of 450 s"})
    (tmp_path / "gpu.json").write_text(json.dumps(result))
    text = pages.page(tmp_path)
    assert "Not measured yet: `make bench`" in text
    assert "a GPU, torch 2.11, 2026-01-01." in text
    # 4 x 8 x 16 x 2048^2 x 64 operations in a millisecond.
    assert "| heedful Sigmoid | 137 / refused | 550 / 550 |" in text
    assert "| heedful ReluSquared | 137 / 137 |" in text
    assert "1 / 4 (5.0 %)" in text
    assert "| heedful Sigmoid, backward: speed / FlexAttention softmax | heedful Sigmoid: refused: error" in text
    assert "- heedful Sigmoid backward: refused: error 2.0e-02 of dq, allowed 1e-02 (bar 8x16x2048x64)" in text
    assert "- over the time of 450 s (sweep 1x8x65536x64)" in text
    assert all(line.count("|") > 2 for line in text.splitlines() if line.startswith("|"))


def launched():
    """Figures of `launching` as if a driver had printed them: a kernel by 0.9 and one by 1.2 times cuDNN's speed."""
    shares = {
        "torch": 1.0,
        "Sigmoid": 1.2,
        "ReluSquared": 1.2,
        "Gaussian raw": 1.2,
        "Gaussian": 0.9,
        "Sigmoid, bias -10": 1.1,
    }
    rows = [
        {"contestant": name, "shape": [2, 4, n, size], "causal": causal, "mask": mask, "forward": {}, "TFLOP/s": {"forward": 500 * share, "backward": 400 * share}}
        for n, mask in ((512, ""), (1024, ""), (1024, "packed")) for size in (64, 128, 96) for causal in (False, True) for name, share in shares.items()
    ]  # fmt: skip
    host = [{"contestant": name, "causal": causal, "mask": mask, "shape": [2, 4, 1024, 64]} | dict.fromkeys(launching.WAYS, 50.0) for causal, mask in launching.HOSTED for name in ("torch", "Softmax", "Sigmoid")]  # fmt: skip
    step = [{"contestant": name, "way": "compiled", "length": 1024, "tokens/s": 1000 * share} for name, share in (("torch", 400), ("Sigmoid", 408))]  # fmt: skip
    layers = [{"layer": name, "microseconds": 700.0} for name in (launching.MODULE, "nn.Attention")]
    found = {"errors": {"Sigmoid": {"out": 2e-3}}, "host": host, "layers": layers, "lengths": rows, "step": [*step, {"contestant": "Gaussian", "way": "compiled", "length": 1024, "skipped": "no time was left"}]}  # fmt: skip
    judged = [asdict(bar) | {"verdict": bar.verdict} for bar in launching.bars(found)]
    machine = {
        "device": "a GPU",
        "torch": "2.11",
        "triton": "3.6",
        "cudnn": 9,
        "date": "2026-01-01",
        "kernels": "others",
    }
    return {"machine": machine, "setting": {"tokens": 1024, "heads": 4}, **found, "bars": judged}


def test_the_page_begins_with_one_sentence(tmp_path):
    (tmp_path / "launching.json").write_text(json.dumps(launched()))
    text = pages.page(tmp_path)
    first = text.splitlines()[2]
    assert "squared-ReLU and sigmoid attention (bias -5) run forward at 1.20 to 1.20 and backward at 1.20 to 1.20 times the speed" in first  # fmt: skip
    assert (
        "Sigmoid attention with a bias of -10 runs forward at 1.10 to 1.10 and backward at 1.10 to 1.10 times" in first
    )
    assert (
        "Gaussian attention, rows divided or not, forward at 0.90 to 1.20 and backward at 0.90 to 1.20 times" in first
    )
    assert "GPT-2-small runs at 1.02 to 1.02 times" in first
    assert "| Gaussian | forward | 64, causal | all | 0.90 to 0.90 |" in text
    assert "| Gaussian raw | forward" not in text
    assert "the portable ones run at 0.90 to 1.20 at head size 96." in text
    assert "with plain softmax runs" not in text  # it was not timed
    assert "changed after this run" in text
    assert "| 2x4x512x64 | 500 / 400 | 1.20 / 1.20 | 1.20 / 1.20 | 1.20 / 1.20 | 0.90 / 0.90 | 1.10 / 1.10 |" in text
    assert "| Sigmoid | 408 (1.020) |" in text
    assert "Not run, as no time was left: Gaussian (compiled, 1024)." in text
    assert "| MISSED |" in text


def test_the_page_says_what_changed_after_its_run(tmp_path):
    """As long as nothing else has changed since."""
    for since, told in (
        (timing.kernels(), "a line of launching"),
        ("others", "The fused kernels changed after this run."),
    ):
        changed = {"kernels": since, "what": "a line of launching"}
        (tmp_path / "launching.json").write_text(json.dumps(launched() | {"changed": changed}))
        assert [x in pages.page(tmp_path) for x in ("**a line of launching**", "changed after this run")] == [told in x for x in ("a line of launching", "The fused kernels changed after this run.")]  # fmt: skip


def test_the_page_of_a_run_in_which_torch_failed(tmp_path):
    """No ratio is told where its other side is missing."""
    found = launched()
    for rows, failed in ((found["lengths"], ("torch", 512)), (found["step"], ("torch", 1024))):
        for row in rows:
            if row["contestant"] == failed[0] and row.get("length", row.get("shape", [0, 0, 0])[2]) == failed[1]:
                for name in ("forward", "TFLOP/s", "tokens/s"):
                    row.pop(name, None)
                row["skipped"] = "no time was left"
    (tmp_path / "launching.json").write_text(json.dumps(found))
    text = pages.page(tmp_path)
    assert "A compiled training step" not in text
    assert "| 2x4x512x64 |" not in text


def bar(setting, what, bound, value, note=""):
    verdict = "no figure" if value is None else "MISSED"
    return {"setting": setting, "what": what, "bound": bound, "value": value, "note": note, "verdict": verdict}


BEHIND = {
    "above the bar as well. The call that records": bar("Sigmoid", "us of host, and backward", 110, 300, "(torch's own: 200.0)"),
    "within 1%": bar("Gaussian", "forward: least speed / cuDNN", 1.0, 0.99, "(n = 512)"),
    "norms of keys are taken": bar("Gaussian", "forward: least speed / cuDNN", 1.0, 0.9, "(n = 512)"),
    "no figure was taken": bar("Gaussian", "forward: speed / cuDNN", 1.0, None),
}  # fmt: skip
UNKNOWN = [
    bar("Gaussian", "forward: least speed / cuDNN", 1.0, 0.5, "(n = 32768)"),
    bar("Sigmoid", "us of host, and backward", 110, 300, "(torch's own: 60.0)"),
]


def test_causes_are_told_where_they_hold():
    met = bar("Sigmoid", "us of host, with gradients", 110, 50) | {"verdict": "met"}
    for words, one in BEHIND.items():
        lines = overview._behind({"bars": [met, one]})
        assert lines[2].startswith("- in 1, ")
        assert words in lines[2]
    assert overview._behind({"bars": [met, *UNKNOWN]})[2:-1] == ["- in 2, no cause is known."]
    assert "records" not in overview._behind({"bars": [BEHIND["above the bar as well. The call that records"]]})[2]
    assert overview._behind({"bars": [met]}) == []


@pytest.mark.parametrize(("times", "words"), [(1.5, "took 1.50 to 1.50 times as long"), (1.1, "no cause is known")])
def test_a_slow_processor_is_told(times, words):
    own = {"contestant": "torch", "causal": False, "mask": ""} | {
        way: times * taken for way, taken in overview.EARLIER.items()
    }
    missed = bar("Sigmoid", "us of host, with gradients", 110, 130, "(torch's own: 46.5)")
    assert words in overview._behind({"bars": [missed], "host": [own]})[2]


def test_the_picture_is_the_same_for_the_same_figures(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    files = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for file in files:
        overview.draw(launched(), file)
    first, second = (file.read_text() for file in files)
    assert first == second
    assert "times as fast as cuDNN's softmax" in first


def test_the_page_is_up_to_date():
    """docs/performance.md is what the figures that the repository keeps give."""
    wanted = "run `python -m benchmarks.pages` and commit docs/performance.md"
    assert (ROOT / "docs" / "performance.md").read_text() == pages.page(), wanted
    if pages.load(timing.RESULTS / "launching.json"):
        assert "times as fast as cuDNN's softmax" in (ROOT / "docs" / pages.PICTURE).read_text(), wanted


def test_the_whole_driver_runs_on_the_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert gpu.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "refused" in printed.out
    assert str(tmp_path / "gpu-partial.json") in printed.out
    assert "heedful Sigmoid: checked" in printed.err
    assert not (tmp_path / "gpu.json").exists()
    result = json.loads((tmp_path / "gpu-partial.json").read_text())
    assert {c["role"] for c in result["contests"]} == {"bar", "causal", "linear", "sweep"}
    assert not [part for part in result["parts"] if "skipped" in part]
    first = {row["contestant"]: row for row in result["contests"][0]["rows"]}
    for name in ("heedful Sigmoid", "heedful Gaussian", "flash SDPA", "eager ReluSquared"):
        assert first[name]["backward"]["median"] > 0
    assert first["cuDNN SDPA"]["skipped"] == "cuDNN is for CUDA devices"
    linear = next(c for c in result["contests"] if c["role"] == "linear")["rows"][0]
    assert linear["forward+backward"]["median"] > 0
    # Every error bar has its figure; times of the GPU's own shapes have none.
    judged = {bar.setting for bar in bars.table(result) if bar.value is not None}
    assert judged == set(accuracy.BOUNDS)


def test_what_holds_no_bar_is_skipped_when_time_is_over(tmp_path):
    driver = gpu.Driver("cpu", quick=True, seconds=0.0, file=tmp_path / "x.json")
    driver.run("sweep| float16")
    told = json.loads((tmp_path / "x.json").read_text())["parts"]
    assert [part["name"] for part in told] == ["accuracy float16", "sweep 1x2x64x16"]
    assert {part["skipped"] for part in told} == {"over the time of 0 s"}


def test_parts_are_listed_with_the_bars_first(capsys, tmp_path):
    assert gpu.main(["--device", "cpu", "--list"]) == 0
    assert capsys.readouterr().out.split("\n")[0] == "bar 1x2x64x16"
    driver = gpu.Driver.__new__(gpu.Driver)
    driver.device, driver.quick = "cuda", False
    parts = driver.parts()
    assert [part.holds_bars for part in parts] == sorted((part.holds_bars for part in parts), reverse=True)
    assert [part.name for part in parts[:2]] == ["bar 8x16x2048x64", "bar 2x16x8192x64"]
    assert Softmax() in {one.kernel for one in FIELDS["bar"]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens where there is no CUDA device")
def test_without_a_device_it_says_so(capsys):
    assert gpu.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_the_driver_of_times_runs_on_the_cpu(tmp_path, capsys, monkeypatch):
    """Without a device there is no peak to judge: every bar is refused, and nothing is written."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert times.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    printed, _, table = capsys.readouterr().out.rpartition("\n}\n")
    result = json.loads(printed + "\n}")
    assert len(result["rows"]) == 8
    assert all(row["milliseconds"]["bias"]["median"] > 0 for row in result["rows"])
    assert {bar["verdict"] for bar in result["bars"]} == {"refused"}
    assert "10 bars: 0 hold" in table
    assert not list(tmp_path.iterdir())


def test_bars_of_times():
    timings = {"plain": {"median": 1.0}, "bias": {"median": 1.9}, "explicit": {"median": 9.0}}
    row = {"level": "operator", "is_causal": False, "direction": "forward", "milliseconds": timings}
    found = times.bars([row | {"peak": {"plain": 10, "bias": 14, "explicit": 2**30 + 20}}])
    assert [bar.verdict for bar in found] == ["met", "met", "met"]
    found = times.bars([row | {"peak": {"plain": 10, "bias": 15, "explicit": 2**30 + 5}}])
    assert [bar.verdict for bar in found] == ["MISSED", "met", "MISSED"]


def test_a_bias_of_times_that_is_wrong_is_not_timed(monkeypatch):
    made = times.Operators(times.Setting(19, 2, 16, 3, "float32", "cpu"), is_causal=True)
    assert set(made.runs()) == {"plain", "bias", "explicit"}
    monkeypatch.setattr(made, "bias", lambda: 1.1 * made.plain())
    with pytest.raises(timing.WrongResult, match="bias has relative error"):
        made.runs()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens where there is no CUDA device")
def test_the_driver_of_datapoints_runs_on_the_cpu(tmp_path, capsys, monkeypatch):
    """Small sizes are compared with float64 and timed; they are judged by no bar, and nothing is written."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert datapoints.main(["--out", str(tmp_path)]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert datapoints.main(["--quick", "--out", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [len(result[part]) for part in ("memory", "race", "compiled", "bars")] == [2, 2, 2, 0]
    for row in (*result["memory"], *result["race"], *result["compiled"]):
        assert 1e-4 < max(row["errors"].values()) < 5e-2
    assert all(row["milliseconds"]["explicit"]["median"] > 0 for row in result["race"])
    assert not list(tmp_path.iterdir())


def test_bars_of_datapoints():
    def found(many, few, explicit):
        timings = {"heedful": {"median": 2.0}, "explicit": {"median": explicit}}
        memory = [{"encoder": "flatten", "rows": rows, "peak": peak} for rows, peak in ((100_000, many), (50_000, few))]
        return {"memory": memory, "race": [{"encoder": "latent", "rows": 8000, "milliseconds": timings}]}

    assert [bar.verdict for bar in datapoints.bars(found(60e9, 40e9, 6.0))] == ["met", "met", "met"]
    assert [bar.verdict for bar in datapoints.bars(found(61e9, 41e9, 5.9))] == ["MISSED", "MISSED", "MISSED"]


def test_a_layer_between_rows_that_is_wrong_is_not_timed(monkeypatch):
    runs = datapoints.Runs(datapoints.replace(datapoints.QUICK, device="cpu"))
    right = datapoints.explicitly
    monkeypatch.setattr(datapoints, "explicitly", lambda layer, *cells: 1.1 * right(layer, *cells))
    with pytest.raises(timing.WrongResult, match="the network has relative error"):
        runs.memory("flatten", 61)
    with pytest.raises(timing.WrongResult, match="heedful has relative error"):
        runs.race("latent")


def test_flow_is_compared_before_it_is_timed(monkeypatch):
    pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    assert 0 < flow.check(flow.QUICK) < 1e-5
    small = flow.replace(flow.QUICK, tokens=37, layers=1)
    runs = flow.ways(small, 37, maps=True)
    timings = flow.timed(runs, small)
    assert set(timings) == {"forward", "fraction", "norm", "flow", "maps"}
    assert all(one.median > 0 for one in timings.values())
    maps, ours = runs["maps"](), runs["fraction"]()
    assert maps == pytest.approx(list(ours.per_layer), abs=1e-5)
    right = flow.flow
    # One token too many counted as a picture's.
    monkeypatch.setattr(flow, "flow", lambda source, *given, modality, **more: right(source, *given, modality=modality if isinstance(source, list) else modality.roll(1), **more))  # fmt: skip
    with pytest.raises(timing.WrongResult, match="a share has error"):
        flow.check(flow.QUICK)


def test_bars_of_flow():
    def found(more, times):
        medians = {"forward": {"median": 10.0}, "fraction": {"median": 10.0 * times}}
        return {"peak": {"forward": 1e9, "fraction": 1e9 + more}, "milliseconds": medians}

    assert [bar.verdict for bar in flow.bars(found(63e6, 1.9), flow.Setting())] == ["met", "met"]
    assert [bar.verdict for bar in flow.bars(found(65e6, 2.1), flow.Setting())] == ["MISSED", "MISSED"]


def test_launching_is_compared_before_it_is_timed(monkeypatch, capsys):
    assert launching.main(["--quick"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["errors"]["Gaussian"]) == {"plain", "out", "dq", "dk", "dv"}
    assert max(error for each in told["errors"].values() for error in each.values()) < 1e-5
    assert {row["contestant"] for row in told["step"]} == {"torch", "Sigmoid"}
    assert all(row[way] > 0 for row in told["host"] for way in launching.WAYS)
    assert {(row["causal"], row["mask"]) for row in told["host"]} == set(launching.HOSTED)
    right = lengths.attend
    monkeypatch.setattr(lengths, "attend", lambda *given, **more: right(*given, **more) * 1.1)
    with pytest.raises(timing.WrongResult, match="plain has relative error"):
        launching.check(launching.QUICK)


def test_launching_goes_on_where_it_was_cut_short(tmp_path, capsys, monkeypatch):
    setting, file = launching.QUICK, tmp_path / "launching.json"
    assert launching.earlier(file, setting, launching.PARTS) == {}
    rows = [{"way": way, "length": n, "contestant": "torch", "tokens/s": 9} for way, n, *_ in setting.step.ways]
    compiled = [{"way": "compiled", "length": 32, "contestant": "Sigmoid", "skipped": "no time was left"}]
    kept = {"step": rows + compiled, "host": [{"without": 1.0}], "layers": [], "lengths": []}
    told = {"machine": launching.machine("cpu"), "setting": asdict(setting), **kept}
    file.write_text(json.dumps(told))
    found = launching.earlier(file, setting, launching.PARTS)
    assert [(row["way"], row["length"]) for row in found["step"]] == [("eager", 32), ("reduce-overhead", 32)]
    assert {name: found[name] for name in ("host", "layers", "lengths")} == {name: kept[name] for name in ("host", "layers", "lengths")}  # fmt: skip
    assert [way for way, *_ in steps.missing(setting.step, found["step"])] == ["compiled"]
    assert list(launching.PARTS["host"](setting, found["host"], {})) == []
    cases = launching.missing(replace(setting, device="cuda"), [])
    row = {"shape": list(cases[0].shape), "causal": False, "mask": ""}
    assert launching.missing(replace(setting, device="cuda"), [row]) == cases[1:]
    file.write_text(json.dumps(told | {"machine": told["machine"] | {"kernels": "others", "date": "2026-01-01"}}))
    assert launching.earlier(file, setting, launching.PARTS) == {}
    assert "figures of another kernels" in capsys.readouterr().err


def test_instructions_are_counted_in_the_loop_of_a_block():
    """A shorter loop that only waits, and a longer one around the two, are not it."""
    lines = [
        "MOV R1, R2",
        "HGMMA.64x64x16 R3",
        "MUFU.EX2 R4, R4",
        "STL [R1], R2",
        "BRA 0x0010",
        "BRA 0x0050",
        "@P0 BRA `(.L) 0x0000",
    ]
    code = "\n".join(f"        /*{16 * at:04x}*/                   {line} ;" for at, line in enumerate(lines))
    assert registers.counts(code, 1, 1) == {
        "spills in all": 1, "loop": 4, "products": 1, "exponentials": 1, "reads and writes of shared memory": 0, "spills": 1
    }  # fmt: skip
    assert registers.counts(code, 2, 0)["loop"] == 0


def test_registers_are_those_of_some_versions_of_triton(capsys, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    with pytest.raises(SystemExit):
        registers.main([])
    assert "made for Triton 3.6.* to 3.9.*; this is 4.0.0" in " ".join(capsys.readouterr().err.split())


def test_kernels_for_hopper_compile_and_their_loops_read_no_register_back():
    triton = pytest.importorskip("triton")
    if not triton.__version__.startswith(serving.HOPPER):
        pytest.skip(f"Triton {triton.__version__} was not tried on the kernels for Hopper")
    forms = "forward 64 causal tanh|forward 128 causal gaussian|backward 64 causal sigmoid|backward 128 causal gaussian"
    command = [sys.executable, "-m", "benchmarks.registers", "--only", f"^({forms})$", "--length", "512"]
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=compiled, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert [int(line.split()[-1]) for line in done.stdout.splitlines()] == [0] * 4


def test_bars_of_launching():
    def found(host, rate):
        rows = [{"contestant": name, "causal": False} | dict.fromkeys(launching.WAYS, host) for name in ("torch", "Softmax", "Sigmoid")]  # fmt: skip
        speeds = [{"contestant": name, "shape": [1, 1, length, 64], "causal": False, "mask": "", "forward": {}, "TFLOP/s": {"forward": 500 * share, "backward": 400 * share}} for length in (256, 512, 1024) for name, share in (("torch", 1), ("Sigmoid", rate if length == 512 else 1.1 if length > 512 else 0.1))]  # fmt: skip
        steps = [{"contestant": name, "way": way, "length": 8, "tokens/s": 100 * share} for way in ("eager", "compiled") for name, share in (("torch", 1), ("Sigmoid", rate))]  # fmt: skip
        layers = [{"layer": name, "microseconds": 1000 * (1 if name == launching.MODULE else 1 / rate)} for name in (launching.MODULE, "nn.Attention")]  # fmt: skip
        errors = {"Sigmoid": {"out": 2e-3, "dq": 3e-3}}
        return {"errors": errors, "host": rows, "lengths": speeds, "step": steps, "layers": layers}

    assert {bar.verdict for bar in launching.bars(found(50, 1.0))} == {"met"}
    missed = [bar.what for bar in launching.bars(found(120, 0.9)) if bar.verdict == "MISSED"]
    host = ["us of host, without", "us of host, with gradients", "us of host, and backward"]
    speed = ["forward: least speed / cuDNN", "backward: least speed / cuDNN"]
    assert missed == [*host, *speed, *["tokens/s over torch's"] * 2, "us of host of a step over torch's"]


def test_steps_in_processes_of_their_own():
    setting = steps.Steps(32, (16,), 1, 16, 32, 2, 60.0, (), "cpu")
    context = multiprocessing.get_context("spawn")
    right, wrong = (steps.Runner((setting, 16, name, None), context.Semaphore(1)) for name in ("torch", "nobody"))
    for one in (right, wrong):
        one.wait(120.0)
    assert right.fault is None
    assert right.milliseconds() > 0
    assert wrong.fault == "KeyError: 'nobody'"
    right.end()
    assert math.isnan(right.milliseconds())
    assert right.fault == "its process ended"
    late = steps.Runner((setting, 16, "torch", None), context.Semaphore(1))
    late.wait(0.0)
    assert late.fault == "no time was left"


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens where there is no CUDA device")
def test_the_driver_of_series_runs_on_the_cpu(tmp_path, capsys):
    """Small sets are compared and fitted; they are judged by no bar, and nothing is written."""
    pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")
    assert series.main(["--out", str(tmp_path)]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert series.main(["--quick", "--out", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [len(result[part]) for part in ("compared", "fitted", "bars")] == [3, 1, 0]
    assert all(row["error"] == 0 and row["gap"] < 1e-9 for row in result["compared"])
    assert set(result["fitted"][0]["seconds"]) == {"fit", "predict", "evidence"}
    assert not list(tmp_path.iterdir())


def test_bars_of_series():
    def found(seconds, memory, gap):
        row = {"series": 10_000, "steps": 1_000, "seconds": {"fit": seconds}, "memory": memory, "gap": gap}
        return {"fitted": [row]}

    assert [bar.verdict for bar in series.bars(found(299.0, 7e9, 1e-7))] == ["met", "met", "met"]
    assert [bar.verdict for bar in series.bars(found(301.0, 9e9, 1e-5))] == ["MISSED", "MISSED", "MISSED"]


@pytest.mark.parametrize("wrong", ["error", "gap"])
def test_series_that_are_scored_otherwise_are_not_timed(monkeypatch, wrong):
    pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")
    if wrong == "error":
        # The device has drawn other kernels.
        seeds = iter((0, 1))
        right = series.SeriesClassifier
        monkeypatch.setattr(series, "SeriesClassifier", lambda **given: right(**given | {"random_state": next(seeds)}))
    else:
        monkeypatch.setattr(series, "gap", lambda model, X: 1e-3)
    with pytest.raises(timing.WrongResult, match=f"one length: {wrong} is"):
        series.compare(series.QUICK.compared[0], series.QUICK)


def test_known_items_are_found_where_documents_have_words_of_their_own(tmp_path, monkeypatch):
    from bag_of_words import Words
    from heedful.ranking import Library
    from heedful.ranking._store import Store

    monkeypatch.setattr(search, "PASSED", 0)
    (tmp_path / "docs").mkdir()
    for number, word in enumerate(("tide", "stone", "cloud", "barn", "comet")):
        (tmp_path / "docs" / f"{number}.txt").write_text(f"{word} {word}. " * 300)
    words = Words(997)
    with Library(tmp_path / "docs.sqlite", words) as library:
        library.update(tmp_path / "docs")
        assert len(search.search_times(library)) == len(search.QUESTIONS)
    store = Store(tmp_path / "docs.sqlite")
    head, *lines = search.known_items(store, words)
    store.close()
    assert head.startswith("5 questions, lists of 100 of 20 passages")
    assert len(lines) == len(search.CASES)
    assert lines[0].split() == ["cosine", "100.0", "100.0", "100.0", "100.0"]


def test_documents_to_search_are_docstrings_each_once(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "MODULES", ["json", "json.decoder", "textwrap"])
    search.write_documents(tmp_path)
    names = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.rst"))
    assert "json/dumps.rst" in names
    assert len(names) == len({path.read_text().split("\n", 3)[3] for path in tmp_path.rglob("*.rst")})
    assert (tmp_path / "json" / "dumps.rst").read_text().startswith("dumps\n=====\n\nSerialize ")

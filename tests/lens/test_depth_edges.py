"""The planner and its neighbours at the edge: budgets that no shape meets, runs that are none, and what a report shows."""

import json
import math

import pytest
import torch
from experiments.crossover import Cell, run_crossover
from experiments.stacked import Protocol

from heedful import InvalidArgument, Unsupported
from heedful.lens import depth
from heedful.lens.depth.section import section
from heedful.lens.depth.shape import parse_count
from heedful.lens.sections import Subject

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": "1B", "head_dim": 63}, r"multiples of 4032 \(multiple_of 64 and head_dim 63\).*another head_dim"),
        ({"params": "1B", "multiple_of": 100_000}, "misses the budget of 1,000,000,000 by .*smaller multiple_of"),
        ({"params": 10}, "misses the budget of 10 by .*larger budget"),
        ({"layers": 24, "head_dim": 63}, "law's width for 24 layers is 585, and 4032 the nearest"),
        ({"params": 10**400}, "got an integer beyond all floats"),
        ({"params": 10**5000}, "got an integer beyond all floats"),
        ({"width": 10**400}, "got an integer beyond all floats"),
        ({"memory": "many"}, "such as 8e10, '80GB' or '80GiB'"),
        ({"params": "1GiB"}, "such as 1.3e9, '1.3B' or '350M'"),
        ({"params": "1B", "law": lambda width: math.nan}, "gives nan for width .* finite depth"),
        ({"params": "1B", "law": lambda width: None}, "gives None for width"),
        ({"params": "1B", "law": lambda width: "x"}, "gives 'x' for width"),
    ],
)
def test_plans_that_cannot_be_kept_are_refused(options, message):
    with pytest.raises(InvalidArgument, match=message):
        depth.plan(**options)


@pytest.mark.parametrize("budget", [1e6, 5e6, 2e7, 1e8, 1e9, 7e10, 1e12])
@pytest.mark.parametrize("multiple", [8, 64])
def test_a_plan_keeps_within_a_tenth_of_its_budget(budget, multiple):
    assert depth.plan(budget, multiple_of=multiple).shape.layer_params == pytest.approx(budget, rel=0.1)


def test_a_wide_tolerance_is_kept():
    best = depth.plan("2M", tolerance=0.2)
    assert 0.1 < abs(best.shape.layer_params / 2e6 - 1) < 0.2


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GB", 8e10), ("80g", 8e10), ("80 GiB", 80 * 2**30), ("3KiB", 3072), ("3kb", 3000), ("2Ti", 2**41), ("7B", 7)],
)
def test_memory_has_units(text, count):
    assert parse_count(text, "memory") == count


@pytest.mark.parametrize(
    "rows", [None, 3, [("a", 2, 3)], [(1, 2)], [(1, 2, 3, 4, 5)], [None], [(math.inf, 2, 3)], "ab"]
)
def test_rows_that_are_no_runs_are_refused(rows):
    with pytest.raises(InvalidArgument, match=r"runs? .*\(layers, width, loss\)"):
        depth.fit_law(rows)


QUICK = Protocol(vocabulary=4, context=8, batch=2, steps=5, warmup=1)
TEXT = [0, 1, 2, 3] * 40
CELL = Cell(200, 1, 4, 1, (1e-3, 1e-2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cells": [Cell(200, 1, 4, 1, ())]}, "positive learning rates"),
        ({"cells": [Cell(200, 1, 4, 1, (-1.0,))]}, "positive learning rates"),
        ({"cells": []}, "one shape at least"),
        ({"seeds": ()}, "seeds one number"),
        ({"tokens": [-1, *TEXT]}, "tokens must lie from 0 to 3.* got -1 to 3"),
        ({"tokens": [4, *TEXT]}, "got 0 to 4"),
        ({"valid": [0.5, *TEXT]}, "valid must be whole numbers in one axis; got torch.float32"),
        ({"valid": [TEXT, TEXT]}, r"of shape \(2, 160\)"),
        ({"tokens": "text"}, "tokens must be a list, array or tensor of whole numbers"),
    ],
)
def test_crossovers_that_cannot_run_are_refused(options, message):
    plain = {"tokens": TEXT, "valid": TEXT, "cells": [CELL], "seeds": [0], "protocol": QUICK}
    with pytest.raises(InvalidArgument, match=message):
        run_crossover(**plain | options)


def test_a_crossover_without_its_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="'cuda' is not available here; give device='cpu'"):
        run_crossover(TEXT, TEXT, [CELL], protocol=QUICK, device="cuda")


@pytest.fixture(scope="module")
def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "vocab_size": 50}
    return hf.T5Model(hf.T5Config(num_layers=2, num_decoder_layers=2, **sizes)).eval()


def test_the_section_carries_the_audit_of_the_part_that_read(t5):
    encoder = t5.get_encoder()
    found = section(Subject(encoder, None, None, "", (), inputs={"input_ids": torch.arange(8)[None]}))
    assert isinstance(found.result, depth.Audit)
    assert found.result.to_dict().items() <= found.data.items()
    assert found.summary.startswith("the encoder alone, 2 layers of width 32: ")
    assert "this encoder has 2" in found.html
    assert (found.data["shape"]["layers"], found.data["exact"]) == (2, True)
    assert found.data["params"] == sum(weight.numel() for weight in encoder.parameters())
    assert len(found.data["without_layer"]) == 2


def test_narrow_models_get_no_depth():
    found = depth.audit("1x24")
    assert "for width 24 the law (levine2020) says no depth" in str(found)
    assert "-" not in str(found).splitlines()[1]
    assert (found.to_dict()["depth_for_width"], found.to_dict()["sigmas"]) == (None, None)
    assert "levine2020 no depth" in " ".join(str(depth.audit("1x24", law="constant_aspect")).split())


def test_one_is_no_plural():
    assert str(depth.audit("1x24")).startswith("1x24: 1 layer x 24")
    assert str(depth.plan("100K")).startswith("2 layers x 64: 1 head of 64")


@pytest.mark.parametrize(
    "model",
    ["999999x999999999", hf.UMT5Config(), hf.GPT2Config(architectures=["GPT2ForTokenClassification"])],
    ids=lambda model: type(model).__name__,
)
def test_audits_fit_a_terminal(model):
    found = depth.audit(model)
    assert max(map(len, str(found).splitlines())) <= 80
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_huge_sizes_are_refused():
    with pytest.raises(InvalidArgument, match="model must be LAYERSxWIDTH, each from 1 to"):
        depth.audit("1x" + "9" * 400)
    with pytest.raises(InvalidArgument, match="'' is no folder"):
        depth.audit("")


def test_results_show_themselves_in_one_short_line():
    for thing in (depth.plan("1.3B"), depth.audit("t5-11b")):
        assert "\n" not in repr(thing)
        assert len(repr(thing)) <= 80
    assert repr(depth.plan("1.3B")) == "Plan(42 x 1600, 25 heads, 1,290,240,000 in layers)"


def test_labels_and_dots_stay_where_they_belong():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra 'plot' is not installed")
    pyplot.switch_backend("agg")
    for name in ("2x32", "12x768", "gpt3-175b", "4x40000"):
        ax = depth.audit(name).plot()
        ax.figure.draw_without_rendering()
        text, frame = ax.texts[0].get_window_extent(), ax.get_window_extent()
        assert frame.x0 <= text.x0 < text.x1 <= frame.x1, name
        pyplot.close(ax.figure)
    ax = depth.plot_sep_curves((2, 4, 8), 6)
    lines = [line for line in ax.lines if len(line.get_xdata()) > 1]
    dots = [line for line in ax.lines if len(line.get_xdata()) == 1]
    assert len(dots) == 3
    for line, dot in zip(lines, dots, strict=True):
        at, height = float(dot.get_xdata()[0]), float(dot.get_ydata()[0])
        left = int(at)
        below, above = (math.log(line.get_ydata()[place - 1]) for place in (left, left + 1))
        assert math.log(height) == pytest.approx(below + (at - left) * (above - below))
    pyplot.close(ax.figure)


@pytest.mark.parametrize("memory", ["8GiB", "24GB", "80GiB"])
def test_memory_is_a_ceiling(memory):
    found = depth.plan(memory=memory)
    limit = parse_count(memory, "memory")
    assert all(0.85 * limit < 16 * choice.shape.params <= limit for choice in found.choices)


def test_a_shape_far_off_the_law_says_so():
    assert "standard errors off the law" in str(depth.plan(1e6))
    assert "standard errors off the law" not in str(depth.plan("1.3B"))

"""What every recipe in experiments/ does, by its being listed: it explains itself, its kept result makes its tables, it runs."""

import json
import math
from dataclasses import dataclass
from functools import cache

import pytest

pytest.importorskip("causallearn", reason="the extra 'graphs' is not installed")

from experiments.recipe import FOLDER, Setting, Table, names, recipe, text

GPU = "measures a GPU"
DATA = "needs data or a model that a package carries; a stand-in runs in tests/recipes"
LONG = "takes longer than five seconds; what it is made of is tested in "


@dataclass(frozen=True)
class Listed:
    """One recipe: why no column holds published figures, the row or column that is the control, why `--quick` is not run here.

    An empty reason means that there is a column, or that it is run. A control that is neither row nor column has a reason too.
    """

    no_paper: str = ""
    control: str = ""
    no_control: str = ""
    no_run: str = ""


RECIPES = {
    "causal-confidence": Listed("the measure is ours", no_control="an area of 0.5 says nothing, which its docstring tells"),
    "causal-decoder": Listed("the papers have no decoder", "random", no_run=DATA),
    "causal-oracle": Listed("the papers prove it", "FCI"),
    "causal-recommender": Listed("the paper explains other users by another model", "popularity", no_run=DATA),
    "causal-sem": Listed("the paper's models are drawn otherwise", no_control="each learner is beside causal-learn's, by rows"),
    "causal-sentiment": Listed("the paper's model is in no package", "no graph", no_run=DATA),
    "depth-crossover": Listed(no_control="every depth is tried at every size", no_run=DATA),
    "depth-rank": Listed("the paper proves bounds and prints no ranks", "S(d, L)"),
    "depth-smoke": Listed("it is no evidence, and says so", no_control="it claims nothing", no_run=DATA),
    "depth-table": Listed(no_control="it recomputes what is printed"),
    "primal-convert": Listed("no paper converts this model", "no mixing (static weights), distilled alike", no_run=DATA),
    "primal-efficiency": Listed("the paper's times are of another chip", "cuDNN SDPA", no_run=GPU),
    "primal-listops": Listed(control="first token alone (a table of counts)", no_run=LONG + "test_reproduce_listops.py"),
    "primal-spectrum": Listed(control="primal, untrained", no_run=DATA),
    "primal-uea": Listed("its figures stand in the cells, in brackets: they are the best epoch on the test set", "none", no_run=DATA),
    "symmetry-arithmetic": Listed("the paper has no experiment", "augmented mlp", no_run=LONG + "test_symmetry_faces.py"),
    "symmetry-gaussian": Listed("the figure wanted is a bar of ours", "softmax (SDPA)", no_run=GPU),
    "symmetry-regression": Listed("the paper has no experiment", "augmented mlp", no_run=LONG + "test_symmetry_faces.py"),
}  # fmt: skip
every = pytest.mark.parametrize("name", names())


@cache
def kept(name):
    return json.loads(
        (FOLDER / "results" / f"{name}.json").read_text(), parse_constant=lambda value: pytest.fail(f"{name}: {value}")
    )


@cache
def tables(name):
    return [block for block in recipe(name).tables(kept(name)["result"]) if isinstance(block, Table)]


def test_every_recipe_is_listed():
    assert list(RECIPES) == names()


@every
def test_it_says_what_it_does(name):
    module = recipe(name)
    summary, _, protocol = (module.__doc__ or "").partition("\n\n")
    assert summary.strip()
    assert len(protocol.split()) > 20
    assert callable(module.run)
    assert callable(module.tables)


@every
def test_its_result_is_kept_and_makes_its_tables(name):
    record = kept(name)
    assert record["name"] == name
    assert record["quick"] is False
    assert record["command"] == f"heedful reproduce {name}"
    assert math.isfinite(record["seconds"])
    assert tables(name)
    shown = text(recipe(name), record["result"])
    assert "A quick run" not in shown
    assert shown.count("|---|") >= len(tables(name))
    assert "nan" not in shown.lower().split()


@every
def test_published_figures_and_the_control_stand_beside_ours(name):
    listed = RECIPES[name]
    columns = [table.paper for table in tables(name) if table.paper]
    assert bool(columns) != bool(listed.no_paper), "a column of published figures, or why there is none"
    for table in tables(name):
        if table.paper:
            at = list(table.columns).index(table.paper)
            assert any(row[at] for row in table.rows)
    assert bool(listed.control) != bool(listed.no_control), "a control, or why there is none"
    if listed.control:
        named = {cell for table in tables(name) for cell in (*table.columns, *(row[0] for row in table.rows))}
        assert listed.control in named, sorted(named)


@pytest.mark.parametrize("name", [name for name, listed in RECIPES.items() if not listed.no_run])
def test_its_quick_form_runs(name, tmp_path):
    module, lines = recipe(name), []
    result = module.run(Setting(True, "cpu", tmp_path, lines.append))
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert "|---|" in text(module, result)
    if any(tmp_path.iterdir()):
        assert module.run(Setting(True, "cpu", tmp_path, lines.append)) == result, "finished parts are kept"

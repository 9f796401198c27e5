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
    """One recipe: why no column holds published figures, why no table states a control, why `--quick` is not run here, why there is no result yet.

    An empty reason means that there is one, or that it is run.
    """

    no_paper: str = ""
    no_control: str = ""
    no_run: str = ""
    no_result: str = ""


RECIPES = {
    "causal-confidence": Listed("the measure is ours", no_control="an area of 0.5 says nothing, which its docstring tells"),
    "causal-decoder": Listed("the papers have no decoder", no_run=DATA),
    "causal-oracle": Listed("the papers prove it", "it is exact, or it is not; FCI stands beside it"),
    "causal-recommender": Listed("the paper explains other users by another model", no_run=DATA),
    "causal-sem": Listed("the paper's models are drawn otherwise", no_control="each learner is beside causal-learn's, by rows"),
    "causal-sentiment": Listed("the paper's model is in no package", no_run=DATA),
    "corpus-cloze": Listed(no_run=DATA),
    "corpus-context": Listed("no paper has these tasks", no_run=DATA),
    "corpus-heads": Listed("the paper measures no trained model", no_run=DATA),
    "corpus-similarity": Listed(no_run=DATA),
    "corpus-speed": Listed(no_run=DATA),
    "corpus-warmstart": Listed(no_run=DATA),
    "depth-crossover": Listed(no_control="every depth is tried at every size", no_run=DATA),
    "depth-rank": Listed("the paper proves bounds and prints no ranks", "ranks are exact; the bound stands beside them"),
    "depth-smoke": Listed("it is no evidence, and says so", no_control="it claims nothing", no_run=DATA),
    "depth-table": Listed(no_control="it recomputes what is printed"),
    "primal-convert": Listed("no paper converts this model", no_run=DATA),
    "primal-efficiency": Listed("the paper's times are of another chip", "it measures times, beside cuDNN's", no_run=GPU),
    "primal-listops": Listed(no_run=LONG + "test_reproduce_listops.py"),
    "primal-spectrum": Listed(no_run=DATA),
    "primal-uea": Listed("its figures stand in the cells, in brackets: they are the best epoch on the test set", no_run=DATA),
    "rerank-baselines": Listed("the published tables are of landmarks, whose images cannot be had; a numpy form stands beside ours"),
    "rerank-digits": Listed("the published tables are of landmarks, whose images cannot be had"),
    "rerank-latency": Listed("no published times could be recovered"),
    "rerank-omniglot": Listed("the published tables are of landmarks, whose images cannot be had; figures of another implementation stand beside ours"),
    "rerank-text": Listed("the paper has no texts"),
    "rerank-transfer": Listed("the paper transfers between landmarks, whose images cannot be had"),
    "series-rivals": Listed("its rivals are measured in the same run, not published", no_run=DATA),
    "symmetry-arithmetic": Listed("the paper has no experiment", no_run=LONG + "test_symmetry_faces.py"),
    "symmetry-bodies": Listed(),
    "symmetry-gaussian": Listed("the figure wanted is a bar of ours", "it measures times, beside SDPA's", no_run=GPU),
    "symmetry-regression": Listed("the paper has no experiment", no_run=LONG + "test_symmetry_faces.py"),
    "tables-ablation": Listed("the paper has no such table"),
    "tables-cc18": Listed("the paper did not have these tables"),
    "tables-corruption": Listed(),
    "tables-large": Listed("the paper does not have this comparison"),
    "tables-lookup": Listed(),
    "tables-numbers": Listed("the paper has classes only"),
    "tables-poker": Listed(),
    "tables-prior": Listed("the published network is larger, and was tested on other draws"),
    "tables-uci": Listed(),
    "time-flights": Listed("no paper has figures for these data", no_run=DATA),
    "time-hawkes": Listed("the published figures are of other splits, per sequence", no_run=DATA),
    "time-movielens": Listed(no_run=DATA),
    "time-stackoverflow": Listed(no_run=DATA),
    "time-synthetic": Listed("no paper has these worlds", no_run=LONG + "test_time_worlds.py"),
    "transport-classifier": Listed("the tables of the thesis could not be obtained"),
    "transport-simulation": Listed("the tables of the thesis could not be obtained"),
    "transport-training": Listed("the tables of the thesis could not be obtained"),
    "vision-ablation": Listed("the published ablations are of photographs, which cannot be had", no_run=LONG + "test_vision_recipes.py"),
    "vision-flow": Listed("the paper prints a curve without numbers", no_run=LONG + "test_vision_recipes.py"),
    "vision-pretrain": Listed("the paper trains on photographs, which cannot be had"),
    "vision-relations": Listed("the paper has no such test", no_run=LONG + "test_vision_recipes.py"),
    "vision-retrieval": Listed("the published figures are of photographs, which cannot be had; its docstring tells them"),
    "vision-smoke": Listed("the paper has no such check"),
    "vision-vqa": Listed("the published figures are of photographs, which cannot be had; its docstring tells them", no_run=LONG + "test_vision_recipes.py"),
}  # fmt: skip
every = pytest.mark.parametrize("name", names())
kept_ones = pytest.mark.parametrize("name", [name for name, listed in RECIPES.items() if not listed.no_result])


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


def test_what_waits_for_a_result_has_none():
    for name, listed in RECIPES.items():
        assert bool(listed.no_result) != (FOLDER / "results" / f"{name}.json").is_file(), name


@every
def test_it_says_what_it_does(name):
    module = recipe(name)
    summary, _, protocol = (module.__doc__ or "").partition("\n\n")
    assert summary.strip()
    assert len(protocol.split()) > 20
    assert callable(module.run)
    assert callable(module.tables)


@kept_ones
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


@kept_ones
def test_published_figures_and_the_control_stand_beside_ours(name):
    listed = RECIPES[name]
    columns = [table.paper for table in tables(name) if table.paper]
    assert bool(columns) != bool(listed.no_paper), "a column of published figures, or why there is none"
    for table in tables(name):
        if table.paper:
            at = list(table.columns).index(table.paper)
            assert any(row[at] for row in table.rows)
    controls = [table.control for table in tables(name) if table.control]
    assert bool(controls) != bool(listed.no_control), "a row or column that could embarrass ours, or why there is none"


@pytest.mark.parametrize("name", [name for name, listed in RECIPES.items() if not listed.no_run])
def test_its_quick_form_runs(name, tmp_path):
    module, lines = recipe(name), []
    result = module.run(Setting(True, "cpu", tmp_path, lines.append))
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert "|---|" in text(module, result)
    if any(tmp_path.iterdir()):
        assert module.run(Setting(True, "cpu", tmp_path, lines.append)) == result, "finished parts are kept"

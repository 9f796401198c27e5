"""`heedful reproduce`: recipes are found, run, kept and shown."""

from __future__ import annotations

import json
import sys
import types

import pytest
from experiments import recipe as recipes
from experiments.recipe import Bar, Setting, Table

from heedful import InvalidArgument, Unsupported
from heedful.cli import reproduce as room


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with one recipe that adds up."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "sum_numbers.py").write_text(
        '"""Adds numbers.\n\nBy adding.\n"""\n'
        "def run(setting):\n"
        "    (setting.work / 'part').write_text('1')\n"
        "    setting.say('adding')\n"
        "    return {'sum': 1 if setting.quick else 3, 'device': setting.device}\n"
        "def tables(result):\n    return [f\"| sum |\\n|---|\\n| {result['sum']} |\"]\n"
    )
    (folder / "helper.py").write_text("")
    monkeypatch.setattr(recipes, "FOLDER", folder)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setitem(sys.modules, "experiments", package := types.ModuleType("experiments"))
    package.__path__ = [str(folder)]
    yield tmp_path
    sys.modules.pop("experiments.sum_numbers", None)


def test_a_recipe_is_run_kept_and_shown(checkout, capsys):
    table, file = recipes.reproduce("sum-numbers", device="cpu")
    assert table.endswith("| 3 |")
    assert capsys.readouterr().err == "adding\n"
    assert file == checkout / "experiments" / "results" / "sum-numbers.json"
    told = json.loads(file.read_text())
    assert told["result"] == {"sum": 3, "device": "cpu"}
    assert told["command"] == "heedful reproduce sum-numbers"
    assert set(told["versions"]) == {"python", "torch", "heedful"}
    page = recipes.page()
    assert "## sum-numbers\n\nAdds numbers.\n\nBy adding.\n" in page
    assert "`heedful reproduce sum-numbers` (" in page
    assert "| 3 |" in page


def test_a_quick_run_touches_no_result(checkout, tmp_path):
    _, file = recipes.reproduce("sum-numbers", quick=True)
    assert file == checkout / "experiments" / ".work" / "sum-numbers" / "quick.json"
    assert not (checkout / "experiments" / "results").exists()
    assert "Not run yet: `heedful reproduce sum-numbers`" in recipes.page()
    _, file = recipes.reproduce("sum-numbers", out=tmp_path / "there" / "x.json", work=tmp_path / "w")
    assert json.loads(file.read_text())["result"]["sum"] == 3
    assert (tmp_path / "w" / "part").read_text() == "1"


def test_what_is_not_there_is_told(checkout, monkeypatch, tmp_path):
    assert recipes.names() == ["sum-numbers"]
    assert "sum-numbers" in recipes.listing()
    with pytest.raises(InvalidArgument, match="there is no recipe 'other'; there are sum-numbers"):
        recipes.reproduce("other")
    monkeypatch.undo()
    monkeypatch.setattr("heedful.__file__", str(tmp_path / "a" / "b" / "c" / "heedful" / "__init__.py"))
    with pytest.raises(Unsupported, match="from a checkout"):
        room.recipes()


def test_results_page_is_up_to_date():
    """docs/results.md is what `make docs` writes from the JSON that the repository keeps."""
    page = (room.root() / "docs" / "results.md").read_text()
    assert page == recipes.page(), "run `make docs` and commit docs/results.md"


def test_tables_are_markdown_of_one_width():
    table = Table(["", "ours", "paper"], [["primal", "35.2", None], ["none", 17.7, 36]], paper="paper", control="none")
    assert str(table) == "| | ours | paper |\n|---|---|---|\n| primal | 35.2 | |\n| none | 17.7 | 36 |"
    for wrong in ({"rows": [["a"]]}, {"paper": "theirs"}, {"control": "chance"}):
        with pytest.raises(InvalidArgument):
            Table(**{"columns": ["model", "ours"], "rows": [["primal", 1]]} | wrong)


@pytest.mark.parametrize(
    ("bar", "verdict"),
    [
        (Bar("a", 0.5, 0.5), "met"),
        (Bar("a", 0.4, 0.5), "MISSED"),
        (Bar("a", 0.5, 0.5, at_least=False), "met"),
        (Bar("a", 0.6, 0.5, at_least=False), "MISSED"),
        (Bar("a", float("nan"), 0.5, at_least=False), "MISSED"),
        (Bar("a", None, 0.5), "no figure"),
        (Bar("a", False), "MISSED"),
    ],
)
def test_bars_say_whether_they_are_met(bar, verdict):
    assert bar.verdict == verdict
    assert str(bar).endswith(verdict)


def test_the_time_limit_is_in_the_setting(tmp_path):
    setting = Setting(False, "cpu", tmp_path, lambda line: None, seconds=0)
    assert setting.store().run(float, {"one": (1,)}) == {}
    assert Setting(False, "cpu", tmp_path, lambda line: None).store().run(float, {"one": (1,)}) == {"one": 1.0}

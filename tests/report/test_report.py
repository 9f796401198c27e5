"""The report: a page that is well formed and closed to the outside, sections that say what they should, whole files."""

from __future__ import annotations

import base64
import json
import os
import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch

import heedful
from heedful import InvalidArgument, Unsupported
from heedful._files import check_place
from heedful._text import printable
from heedful.lens import Finding, Section, Subject, sections, summarize
from heedful.lens import maps as drawing
from heedful.report import Prose, Table
from heedful.report.page import fragment
from pages import HOSTILE, Tree, observed, result_of, section_of, softmax


def test_the_section_says_what_summarize_says():
    torch.manual_seed(3)
    weights = softmax()
    tokens = ["[CLS]", "the", "cat", "sat", "on", "it", "[SEP]"]
    special = [True, *[False] * 5, True]
    made = section_of(weights, tokens, special=special)
    expected = summarize(weights, tokens, special=special)
    assert made.result == expected
    assert made.data["layers"] == expected.to_dict()["layers"]
    assert str(expected) in made.summary
    assert [pair["weight"] for pair in made.data["strongest_pairs"]] == [pair.weight for pair in expected.pairs()]
    assert max(map(len, made.summary.splitlines())) <= 100
    json.dumps(made.data, allow_nan=False)
    tiles = {attrs["id"]: attrs for attrs in Tree(made.html).all("button") if "tile" in attrs.get("class", "")}
    assert list(tiles) == [f"head-{layer}-{head}" for layer in range(2) for head in range(3)]
    head = expected.layers[1][2]
    told = tiles["head-1-2"]["aria-label"]
    assert told.startswith("Layer 1, head 2: no role that a test can name. ")
    assert tiles["head-1-2"]["title"] == told
    assert f"Entropy {head.entropy:.2f} nats" in told
    assert f"distance {head.distance:.1f} tokens" in told
    assert (int(tiles["head-1-2"]["data-query"]), int(tiles["head-1-2"]["data-key"])) == (
        head.strongest.query,
        head.strongest.key,
    )


def test_large_layers_are_read_some_heads_at_a_time(monkeypatch):
    weights = softmax(heads=5)
    whole = section_of(weights)
    monkeypatch.setattr(drawing, "CELLS", 2 * 7 * 7)
    parts = section_of(weights)
    assert parts.data == whole.data
    assert parts.html == whole.html


def test_padding_is_left_out():
    weights = softmax(layers=1, n=5)
    weights[0][:, :, 3:] = 0
    weights[0] /= weights[0].sum(-1, keepdim=True)
    made = section_of(weights, ["a", "b", "c", "[PAD]", "[PAD]"], valid=[True, True, True, False, False])
    assert made.data["tokens"] == ["a", "b", "c"]
    assert made.result == summarize([weights[0][:, :3, :3]], ["a", "b", "c"])


@pytest.mark.parametrize("sign", [1, -1])
def test_coefficients_that_are_no_distribution_are_shown_with_the_reason(sign):
    weights = [sign * 3 * torch.rand(2, 5, 5) + 0.1 for _ in range(2)]
    made = section_of(weights)
    assert made.result is None
    assert "Every layer: rows of coefficients do not sum to one" in made.summary
    assert "Every layer: rows of coefficients do not sum to one" in made.html
    assert len(made.data["not_summarized"]) == 4
    first = made.data["not_summarized"][0]
    assert first["lowest"] == pytest.approx(float(weights[0][0].min()))
    assert first["total"] == pytest.approx(float(weights[0][0].sum(-1).mean()))
    assert ("scale ramp two" in made.html) == (sign < 0)
    with pytest.raises(Unsupported, match="no distribution"):
        result_of(made).plot()
    assert result_of(made).attention is None


def test_some_layers_may_be_no_distribution():
    made = section_of([*softmax(layers=1), *(3 * layer for layer in softmax(layers=2))])
    assert "Layers 1, 2: rows of coefficients do not sum to one" in made.summary
    assert len(made.result.layers) == 1
    assert [head["layer"] for head in made.data["not_summarized"]] == [1, 1, 1, 2, 2, 2]
    assert len(Tree(made.html).all("table")) == 2


def test_weights_that_are_not_finite_do_not_break_the_page():
    weights = softmax(layers=1)
    weights[0][1, 2, 3] = float("nan")
    weights[0][2, 0, 0] = float("inf")
    made = section_of(weights)
    json.dumps(made.data, allow_nan=False)
    Tree(result_of(made).html())
    assert "do not sum to one" in made.summary


def test_cross_attention_of_unequal_lengths_is_shown():
    made = section_of([torch.rand(2, 3, 11).softmax(-1)], ["x", "y", "z"], kind="cross", key_tokens=list("abcdefghijk"))
    assert made.result is None
    assert "Layer 0: looks from one sequence at another" in made.summary
    carried = json.loads(next(text for text in Tree(made.html).text["script"] if text.startswith("{")))
    layer = carried["layers"][0]
    assert layer["heads"][0]["shape"] == [3, 11]
    assert carried["labels"][layer["queries"]] == ["x", "y", "z"]
    assert carried["labels"][layer["keys"]] == list("abcdefghijk")


@pytest.fixture(scope="module")
def page():
    torch.manual_seed(0)
    tokens = ["[CLS]", "the", "cat", "sat", "on", "it", "[SEP]"]
    made = section_of(softmax(), tokens, special=[True, *[False] * 5, True])
    return result_of(made, tokens, "The cat sat on it.").html()


def test_the_page_is_well_formed_and_its_references_hold(page):
    tree = Tree(page)
    ids = [attrs["id"] for _, attrs in tree.found if "id" in attrs]
    assert len(ids) == len(set(ids)) > 10
    for _, attrs in tree.found:
        for name in ("aria-labelledby", "aria-describedby", "aria-controls", "for"):
            assert set(attrs.get(name, "").split()) <= set(ids)
        if attrs.get("href", "").startswith("#"):
            assert attrs["href"][1:] in ids
        assert not any(name.startswith("on") for name in attrs)
    assert tree.all("html") == [{"lang": "en"}]
    assert [len(tree.all(name)) for name in ("main", "header", "nav", "footer", "h1", "title")] == [1] * 6
    assert [attrs["id"] for attrs in tree.all("section")] == [
        "findings",
        "attention",
        "research",
        "depth",
        "left-out",
        "model",
    ]
    assert all("aria-labelledby" in attrs for attrs in tree.all("section"))
    assert all("alt" in attrs for attrs in tree.all("img"))
    grid = [attrs for _, attrs in tree.found if attrs.get("role") in ("grid", "row", "rowheader", "gridcell")]
    assert [attrs["role"] for attrs in grid].count("gridcell") == 6


def test_the_page_names_no_outside_address_and_lets_none_in(page):
    # Base64 may spell anything but a colon.
    plain = re.sub(r"(base64,|sha256-|text/plain[^>]*>)[\w+/=]+", "", page)
    assert not re.search(r"(?i)https?:|//[a-z]|url\(|@import|<link|<iframe|srcset", plain)
    tree = Tree(page)
    for _, attrs in tree.found:
        for name in ("src", "href", "action", "data"):
            assert attrs.get(name, "#").startswith(("#", "data:image/png;base64,"))
    policy = next(
        attrs["content"] for attrs in tree.all("meta") if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert len(scripts) == 2
    for script in scripts:
        assert f"'sha256-{base64.b64encode(sha256(script.encode()).digest()).decode()}'" in policy


def test_the_page_does_not_tell_where_the_model_lies(page):
    assert "secret" not in page
    assert "tiny" in page


def test_a_lens_that_does_not_apply_gives_its_reason(page):
    assert "Symmetry: it needs &lt;weights&gt;" in page
    told = str(result_of(section_of(softmax())))
    assert "Does not apply\n--------------\nSymmetry: it needs <weights>" in told
    data = result_of(section_of(softmax())).to_dict()
    assert data["not_applicable"] == {"symmetry": "it needs <weights>"}
    assert set(data["sections"]) == {"attention", "depth"}


def test_the_report_opens_with_findings_and_ends_with_the_model():
    result = result_of(section_of(softmax(n=9)), list("abcdefghi"))
    found = [
        Finding(f"finding {at} <b>", f"caveat {at}", evidence)
        for at, evidence in enumerate(("attention", "strongest-pairs", "depth", "depth", "depth", "depth"))
    ]
    sections = {**result.sections, "attention": replace(result.sections["attention"], findings=tuple(found))}
    result = replace(result, sections=sections)
    assert list(result.findings) == found[:5]
    assert result.to_dict()["findings"][1] == {
        "text": "finding 1 <b>", "caveat": "caveat 1", "evidence": "strongest-pairs",
    }  # fmt: skip
    page = result.html()
    tree = Tree(page)
    ids = {attrs["id"] for _, attrs in tree.found if "id" in attrs}
    links = [attrs["href"] for attrs in tree.all("a") if attrs.get("href", "").startswith("#")]
    assert {link[1:] for link in links} <= ids
    places = [page.index(word) for word in ("finding 0 &lt;b&gt;", "caveat 0", "Attention maps</h2>", "float32")]
    assert places == sorted(places)
    told = str(result)
    places = [
        told.index(word)
        for word in ("1. finding 0", "Note: caveat 0", "Attention maps\n", "For researchers", "float32")
    ]
    assert places == sorted(places)


def test_plain_lines_fill_up_what_findings_leave():
    sections = {
        name: Section(name.capitalize(), [Prose("summary")], plain=f"Plain {name}.")
        for name in ("spectrum", "symmetry", "depth")
    }
    result = replace(result_of(section_of(softmax())), sections=sections)
    assert [(one.text, one.evidence) for one in result.findings] == [
        ("Plain spectrum.", "spectrum"), ("Plain symmetry.", "symmetry"), ("Plain depth.", "depth"),
    ]  # fmt: skip
    research = result.html().split('id="research"')[1].split("</section>")[0]
    assert all(one in research for one in ("Plain spectrum.", "Plain symmetry.", "Plain depth."))


def test_hostile_tokens_stay_text():
    n = len(HOSTILE)
    made = section_of(softmax(n=n), HOSTILE)
    result = result_of(made, [printable(token) for token in HOSTILE], "".join(HOSTILE[:9]))
    page = result.html()
    tree = Tree(page)
    assert not any("onerror" in attrs for _, attrs in tree.found)
    assert len(re.findall(r"(?i)<script>", page)) == 2
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert not [sign for sign in page if ord(sign) < 32 and sign != "\n"]
    page.encode()
    carried = json.loads(next(text for text in tree.text["script"] if text.startswith("{")))
    shown = carried["labels"][0]
    assert shown[0] == HOSTILE[0]
    assert shown[4] == "\\u202eevil"
    assert shown[5] == "\\x00\\x1b[31m\\n"
    assert shown[6:9] == HOSTILE[6:9]
    assert shown[9] == "\\ud800"
    assert max(map(len, str(result).splitlines())) <= 200
    json.dumps(result.to_dict(), allow_nan=False)


def test_saving_is_whole_or_not_at_all(tmp_path, monkeypatch):
    result = result_of(section_of(softmax()))
    file = tmp_path / "report.html"
    assert result.save(file) == file.resolve()
    assert file.read_text("utf-8") == result.html()
    file.write_text("kept")
    monkeypatch.setattr(Path, "replace", lambda self, to: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(InvalidArgument, match="No space left on device"):
        result.save(file)
    assert file.read_text() == "kept"
    assert os.listdir(tmp_path) == ["report.html"]


def test_saving_follows_a_link_and_leaves_it(tmp_path):
    (tmp_path / "real.html").write_text("old")
    link = tmp_path / "link.html"
    link.symlink_to("real.html")
    result_of(section_of(softmax())).save(link)
    assert link.is_symlink()
    assert (tmp_path / "real.html").read_text("utf-8").startswith("<!doctype html>")


def test_places_that_cannot_be_written_are_told_first(tmp_path, monkeypatch):
    with pytest.raises(InvalidArgument, match="is a folder; give a file"):
        check_place(tmp_path)
    with pytest.raises(InvalidArgument, match=r"no folder .*/no/such"):
        check_place(tmp_path / "no" / "such" / "report.html")
    # Replacing a pipe or a device would take it from others.
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidArgument, match="no ordinary file"):
        check_place(tmp_path / "pipe")
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(InvalidArgument, match="permission denied"):
        check_place(tmp_path / "report.html")


def test_a_name_too_long_for_a_file_is_refused_before_the_work(tmp_path):
    with pytest.raises(InvalidArgument, match="is 245 characters long; give a shorter one"):
        check_place(tmp_path / f"{'a' * 240}.html")


def test_sections_name_each_lens_before_it_starts(monkeypatch):
    class Lens:
        @staticmethod
        def section(subject):
            begun.append("works")
            raise Unsupported("not\n  here")

    begun = []
    monkeypatch.setattr(sections, "LENSES", {"one": "x"})
    monkeypatch.setattr(sections, "import_module", lambda name: Lens)
    subject = Subject(None, None, None, "", observed(softmax()))
    assert list(sections.sections(subject, begun.append)) == [("one", "not here")]
    assert begun == ["one", "works"]


def test_a_lens_that_fails_does_not_take_the_others_with_it(monkeypatch):
    class Bad:
        @staticmethod
        def section(subject):
            raise KeyError("surprise")

    class Good:
        @staticmethod
        def section(subject):
            return "section"

    monkeypatch.setattr(sections, "LENSES", {"one": "bad", "two": "good"})
    monkeypatch.setattr(sections, "import_module", lambda name: {"bad": Bad, "good": Good}[name])
    (_, told), (_, made) = sections.sections(Subject(None, None, None, "", observed(softmax())))
    assert told == "this lens failed on this model, which is a fault of heedful's: KeyError: 'surprise'"
    assert made == "section"


def test_tables_set_numbers_right():
    made = fragment([Table(["name", "a & b"], [["x<", -1.5], ["y", "20%"]], "what")])
    tree = Tree(made)
    assert [attrs.get("class") for attrs in tree.all("th")] == [None, "number"]
    assert [attrs.get("class") for attrs in tree.all("td")] == [None, "number"] * 2
    assert "x&lt;" in made
    assert Tree(fragment([Table(["name"], [])])).all("th") == [{}]


def test_results_print_short_even_for_long_texts():
    result = replace(result_of(section_of(softmax())), tokens=("word",) * 900, special=(False,) * 900, left_out=12)
    told = str(result)
    assert "Read as 900 tokens, 12 more left out:" in told
    assert len(told.splitlines()) < 60
    assert repr(result) == "LookResult(Tiny, 900 tokens, 2 layers)"
    assert heedful.look is heedful.lens.look


def test_a_model_of_pictures_is_looked_at_by_its_inputs():
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 37}
    model = hf.ViTModel(hf.ViTConfig(**sizes, image_size=12, patch_size=4))
    inputs = {"pixel_values": torch.randn(1, 3, 12, 12)}
    result = heedful.look(model, inputs=inputs)
    silent = {name for name, one in result.sections.items() if isinstance(one, str)}
    assert silent == {"pronouns", "causes", "flow", "corpus"}
    assert "given no text" in result.sections["causes"]
    assert len(result.tokens) == 10
    json.dumps(result.to_dict(), allow_nan=False)
    Tree(result.html())
    with pytest.raises(InvalidArgument, match="instead of a text"):
        heedful.look(model, "A text.", inputs=inputs)

"""Documents in passages: nothing lost, nothing twice, nothing too long, each with its line and headings."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest

from heedful import InvalidArgument, MissingExtra
from heedful.ranking import passages
from heedful.ranking.passages import LEAST, MOST, PIECE, Passage, read_passages

PROSE = "Tides follow the moon, which pulls the sea. "


@pytest.fixture
def read(tmp_path):
    """The passages of a document with this name and content."""

    def call(name, content):
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_passages(file)

    return call


def size(text):
    return len(PIECE.findall(text))


def test_markdown_has_headings_of_both_kinds(read, monkeypatch):
    monkeypatch.setattr(passages, "LEAST", 0)
    text = """---
title: not read
---
Before all.

# Sea #

Salt.
More salt.

Tides
-----

| a | b |
|---|---|
| 1 | 2 |

### Deep

```python
# no heading

x = 1
```

Land
====

Hills.
"""
    assert read("a.md", text) == [
        Passage("Before all.", 4, ""),
        Passage("Salt.\nMore salt.", 8, "Sea"),
        Passage("| a | b |\n|---|---|\n| 1 | 2 |", 14, "Sea > Tides"),
        Passage("```python\n# no heading\n\nx = 1\n```", 20, "Sea > Tides > Deep"),
        Passage("Hills.", 29, "Land"),
    ]


def test_restructured_levels_go_by_their_signs(read, monkeypatch):
    monkeypatch.setattr(passages, "LEAST", 0)
    text = """=====
Ocean
=====

Wide.

Tides
-----

High
low.

Moon
~~~~

Pulls.

Winds
-----

Blow.
"""
    assert read("a.rst", text) == [
        Passage("Wide.", 5, "Ocean"),
        Passage("High\nlow.", 10, "Ocean > Tides"),
        Passage("Pulls.", 16, "Ocean > Tides > Moon"),
        Passage("Blow.", 21, "Ocean > Winds"),
    ]


def test_short_sections_are_joined_under_what_both_stand_under(read):
    few, many = "word " * 7, "word " * LEAST
    text = f"# A\n\n{few}\n\n## B\n\n{few}\n\n### C\n\n{few}\n\n## D\n\n{many}\n\n## E\n\n{few}\n\n# F\n\n{few}\n"
    few, many = few.strip(), many.strip()
    assert read("a.md", text) == [
        Passage(f"{few}\n\nB:\n{few}\n\nB > C:\n{few}\n\nD:\n{many}", 3, "A"),
        Passage(few, 19, "A > E"),
        Passage(few, 23, "F"),
    ]
    # One that would become too long is not.
    some = ("word " * (LEAST - 1)).strip()
    first, *rest = read("a.md", f"# A\n\n{some}\n\n## B\n\n{PROSE * 99}")
    assert (first.text, first.heading) == (some, "A")
    assert {each.heading for each in rest} == {"A > B"}
    # Without a heading over both, each stays by itself.
    assert [each.heading for each in read("b.md", f"# A\n\n{few}\n\n# B\n\n{few}\n")] == ["A", "B"]


def test_plain_text_has_paragraphs_alone(read):
    assert read("a.txt", "# One\n\ntwo\n---\n") == [Passage("# One\n\ntwo\n---", 1, "")]


@pytest.mark.parametrize("seed", range(7))
def test_no_word_is_lost_or_twice_and_lines_are_right(read, seed):
    draw = np.random.default_rng(seed)
    paragraphs = []
    for _ in range(draw.integers(1, 13)):
        words = ["".join(draw.choice([*"abcde"], draw.integers(1, 19))) for _ in range(draw.integers(1, 401))]
        ends = draw.choice(["", "", "", ".", "?", "\n"], len(words))
        paragraphs.append(" ".join(f"{word}{end}" for word, end in zip(words, ends, strict=True)))
    text = "\n\n".join(paragraphs)
    found = read("a.txt", text)
    assert re.findall(r"\S+", " ".join(each.text for each in found)) == re.findall(r"\S+", text)
    assert max(size(each.text) for each in found) <= MOST
    lines = text.split("\n")
    for each in found:
        assert each.text.split()[0] in lines[each.start - 1].split()


def test_long_paragraphs_are_cut_behind_sentences(read):
    found = read("a.txt", PROSE * 100)
    assert len(found) == -(-size(PROSE) * 100 // MOST)
    assert all(each.text.endswith("sea.") for each in found)
    # About equal: no crumbs at the end.
    assert min(size(each.text) for each in found) > 0.8 * MOST


def test_text_without_spaces_is_cut_too(read):
    for text in ("x" * 9999, "\u6d77" * 999, "\u6d77\u3002" * 333):
        found = read("a.txt", text)
        assert "".join(each.text for each in found) == text
        assert max(size(each.text) for each in found) <= MOST


def test_a_heading_is_read_with_its_passage_and_leaves_it_less(read):
    heading = "word " * 50
    found = read("a.md", f"# {heading}\n\n{PROSE * 40}")
    assert str(found[0]) == f"{heading.strip()}\n{found[0].text}"
    assert max(size(str(each)) for each in found) <= MOST


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_encodings(read, encoding):
    assert read("a.txt", "Übung: café".encode(encoding)) == [Passage("Übung: café", 1)]


def test_what_is_no_document_is_named(read, tmp_path):
    with pytest.raises(InvalidArgument, match=r"a\.txt is no text: it holds zero bytes"):
        read("a.txt", b"\x00\x01")
    with pytest.raises(InvalidArgument, match=r"a\.exe ends in \.exe; documents end in \.markdown, \.md"):
        read("a.exe", "x")
    with pytest.raises(InvalidArgument, match=r"b\.md cannot be read: No such file"):
        read_passages(tmp_path / "b.md")
    assert read("a.txt", " \n\n") == []


def test_pages_of_a_pdf(read, monkeypatch):
    pages = ["First page.\n \nMore.", "", PROSE * 30]

    class Reader:
        def __init__(self, file):
            if file.read_bytes() == b"broken":
                raise ValueError("no\nheader")
            self.pages = [SimpleNamespace(extract_text=lambda text=text: text) for text in pages]

    monkeypatch.setitem(sys.modules, "pypdf", SimpleNamespace(PdfReader=Reader))
    found = read("a.PDF", "x")
    assert found[0] == Passage("First page.\n\nMore.", 1, "page 1")
    assert {(each.start, each.heading) for each in found[1:]} == {(3, "page 3")}
    assert len(found) > 2
    with pytest.raises(InvalidArgument, match=r"b\.pdf cannot be read as a PDF: no header"):
        read("b.pdf", "broken")
    pages[:] = [" "]
    with pytest.raises(InvalidArgument, match=r"c\.pdf holds no text; pictures of pages"):
        read("c.pdf", "x")


def test_a_pdf_without_pypdf_names_the_extra(read, monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(MissingExtra, match=r"heedful\[pdf\]"):
        read("a.pdf", "x")


@pytest.mark.skipif(find_spec("pypdf") is None, reason="pypdf is not installed")
def test_a_real_pdf(read):
    content = b"BT /F1 12 Tf 72 720 Td (Tides follow the moon.) Tj ET"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%b\nendstream" % (len(content), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    body, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj\n%b\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % len(body)
    assert read("a.pdf", body + b"xref\n0 6\n0000000000 65535 f \n" + table + end) == [
        Passage("Tides follow the moon.", 1, "page 1")
    ]
    with pytest.raises(InvalidArgument, match="cannot be read as a PDF"):
        read("b.pdf", b"not a PDF")

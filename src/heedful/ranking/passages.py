"""Documents in passages: paragraphs under one heading, joined up to the length that a small model reads at once."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from heedful._errors import InvalidArgument, MissingExtra

__all__ = ["ENDINGS", "Passage", "read_passages"]

# How long a passage may be, in pieces: about as many tokens as a small model reads, which is 256.
MOST = 200
# A shorter passage is joined with the next one, if both stand under one heading.
LEAST = 60
# About a token: a sign of Chinese, Japanese or Korean, eight letters or digits in a row, any other sign.
PIECE = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{1,8}|[^\w\s]"
)
# Behind a sentence, then behind a line, then between words.
CUTS = (re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])\s*"), re.compile(r"\n"), re.compile(r"\s+"))
# Between a heading and the one below it.
BELOW = " > "
FENCE = re.compile(r"\s{0,3}(```+|~~~+)")
TITLE = re.compile(r"\s{0,3}(#{1,6})\s+(.*?)\s*#*\s*$")
UNDERLINE = re.compile(r"\s{0,3}(=+|-{3,})\s*")
RULE = re.compile(r"([=\-`:'\"~^_*+#<>.])\1{2,}\s*$")


@dataclass(frozen=True)
class Passage:
    """A part of a document.

    Attributes:
        text: its words, line ends kept.
        start: the line at which it begins, from 1 on; in a PDF, the page.
        heading: the headings it stands under, from the outermost on, with " > " between.
    """

    text: str
    start: int
    heading: str = ""

    def __str__(self) -> str:
        """What a model reads: the heading belongs to what it says."""
        return f"{self.heading}\n{self.text}" if self.heading else self.text


# A paragraph, and the line at which it begins.
Paragraph = tuple[int, str]
Section = tuple[str, list[Paragraph]]


def read_passages(file: str | Path) -> list[Passage]:
    r"""The passages of a document: `.txt`, `.md`, `.markdown`, `.rst`, or `.pdf` where pypdf is installed.

    Paragraphs under one heading are joined to passages of up to 200 pieces (words, signs, and parts of long words: about the 256 tokens that
    a small model reads), of about equal length; a longer paragraph is cut behind a sentence, else behind a line, else between words. No
    two passages share a word. One of fewer than 60 pieces is joined with the next where a heading stands over both; headings in between
    then belong to the text. A text that is no UTF-8 or UTF-16 is read as Windows-1252.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "sea.md")
    ...     _ = file.write_text("# Sea\n\nSalt water.\n\n## Tides\n\nThe moon pulls.\n\n# Land\n\nHills.\n")
    ...     read_passages(file)
    [Passage(text='Salt water.\n\nTides:\nThe moon pulls.', start=3, heading='Sea'), Passage(text='Hills.', start=11, heading='Land')]
    """
    file = Path(file)
    reader = ENDINGS.get(file.suffix.lower())
    if reader is None:
        raise InvalidArgument(
            f"{file.name} ends in {file.suffix or 'nothing'}; documents end in {', '.join(sorted(ENDINGS))}"
        )
    try:
        return list(_joined(passage for section in reader(file) for passage in _packed(*section)))
    except OSError as error:
        raise InvalidArgument(f"{file.name} cannot be read: {error.strerror or error}") from error


def _decoded(file: Path) -> list[str]:
    """The lines of a text file, without the spaces at their ends."""
    content = file.read_bytes()
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        text = content.decode("utf-16", "replace")
    elif b"\0" in content:
        raise InvalidArgument(f"{file.name} is no text: it holds zero bytes")
    else:
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = content.decode("cp1252", "replace")
    return [line.rstrip() for line in text.splitlines()]


def _plain(file: Path) -> Iterator[Section]:
    yield "", list(_paragraphs(enumerate(_decoded(file), 1)))


def _markdown(file: Path) -> Iterator[Section]:
    lines = _decoded(file)
    # What some tools keep at the top: settings between two lines of dashes.
    if lines[:1] == ["---"] and "---" in lines[1:]:
        end = lines.index("---", 1) + 1
        lines[:end] = [""] * end
    titles: list[str] = []
    body: list[tuple[int, str]] = []
    fence = ""
    for number, line in enumerate(lines, 1):
        found = FENCE.match(line)
        if found and (not fence or (found[1].startswith(fence) and not line.strip(" `~"))):
            fence = "" if fence else found[1]
        inside = bool(fence or found)
        title = None if inside else TITLE.match(line)
        below = None if inside else UNDERLINE.fullmatch(line)
        if title:
            yield _under(titles), list(_paragraphs(body))
            titles, body = _entered(titles, len(title[1]), title[2]), []
        elif below and _stands_alone(body):
            last = body.pop()[1].strip()
            yield _under(titles), list(_paragraphs(body))
            titles, body = _entered(titles, 1 if below[1][0] == "=" else 2, last), []
        else:
            # A space: what is fenced stays together over empty lines.
            body.append((number, line or " " if fence else line))
    yield _under(titles), list(_paragraphs(body))


def _stands_alone(body: list[tuple[int, str]]) -> bool:
    """Whether the last line is a paragraph of its own, and of words."""
    before = [line for _, line in body[-2:]]
    return bool(before) and before[-1][:1].isalnum() and not any(before[:-1])


def _restructured(file: Path) -> Iterator[Section]:
    lines = _decoded(file)
    titles: list[str] = []
    body: list[tuple[int, str]] = []
    # Which signs underline which level: the first that is met is the outermost.
    styles: list[tuple[str, bool]] = []
    at = 0
    while at < len(lines):
        over = bool(RULE.match(lines[at])) and at + 2 < len(lines) and lines[at].strip() == lines[at + 2].strip()
        text, rule = (lines[at + 1], lines[at + 2]) if over else (lines[at], (lines[at + 1 : at + 2] or [""])[0])
        alone = over or not body or not body[-1][1].strip()
        if alone and text.strip() and not RULE.match(text) and RULE.match(rule) and len(rule) >= len(text.strip()):
            yield _under(titles), list(_paragraphs(body))
            style = (rule[0], over)
            if style not in styles:
                styles.append(style)
            titles, body = _entered(titles, styles.index(style) + 1, text.strip()), []
            at += 3 if over else 2
            continue
        body.append((at + 1, lines[at]))
        at += 1
    yield _under(titles), list(_paragraphs(body))


def _pdf(file: Path) -> Iterator[Section]:
    try:
        import pypdf
    except ImportError:
        raise MissingExtra("pypdf", "pdf") from None
    # What matters is raised, by a dozen classes; the rest it only logs.
    log = logging.getLogger("pypdf")
    level = log.level
    try:
        log.setLevel(logging.CRITICAL)
        pages = [page.extract_text() or "" for page in pypdf.PdfReader(file).pages]
    except Exception as error:
        raise InvalidArgument(f"{file.name} cannot be read as a PDF: {' '.join(str(error).split())}") from error
    finally:
        log.setLevel(level)
    if not any(page.strip() for page in pages):
        raise InvalidArgument(f"{file.name} holds no text; pictures of pages need text recognition first")
    for number, text in enumerate(pages, 1):
        yield (
            f"page {number}",
            [(number, part) for _, part in _paragraphs(enumerate(map(str.rstrip, text.splitlines())))],
        )


def _entered(titles: list[str], level: int, title: str) -> list[str]:
    """The titles above what follows one of this level; a level that was left out stays empty."""
    above = titles[: level - 1]
    return [*above, *[""] * (level - 1 - len(above)), title]


def _under(titles: Iterable[str]) -> str:
    return BELOW.join(filter(None, titles))


def _paragraphs(lines: Iterable[tuple[int, str]]) -> Iterator[Paragraph]:
    """Lines with their numbers as paragraphs, which empty lines part."""
    start, held = 0, list[str]()
    for number, line in lines:
        if line:
            start = start if held else number
            held.append(line.rstrip())
        elif held:
            yield start, "\n".join(held)
            held = []
    if held:
        yield start, "\n".join(held)


def _size(text: str) -> int:
    return sum(1 for _ in PIECE.finditer(text))


@dataclass(frozen=True)
class _Unit:
    """What is not parted any further: what stands before it, its line, its text, its size."""

    gap: str
    line: int
    text: str
    size: int


def _units(line: int, text: str, gap: str = "\n\n", cuts: tuple[re.Pattern[str], ...] = CUTS) -> Iterator[_Unit]:
    """A paragraph in parts that fit."""
    size = _size(text)
    if size <= MOST:
        yield _Unit(gap, line, text, size)
        return
    if cuts:
        ends = [(cut.start(), cut.end()) for cut in cuts[0].finditer(text)]
    else:
        ends = [(piece.start(), piece.start()) for piece in list(PIECE.finditer(text))[MOST::MOST]]
    at = 0
    for end, following in [*ends, (len(text), len(text))]:
        if end > at:
            yield from _units(line + text.count("\n", 0, at), text[at:end], gap, cuts[1:])
            gap = ""
        gap += text[max(end, at) : following]
        at = following


def _packed(heading: str, paragraphs: list[Paragraph]) -> Iterator[Passage]:
    """The paragraphs of a section in passages of about equal size."""
    units = [unit for paragraph in paragraphs for unit in _units(*paragraph)]
    total = sum(unit.size for unit in units)
    # A heading of many words leaves less to the text.
    most = max(MOST - _size(heading), MOST // 2)
    goal = total / max(1, -(-total // most))
    line, held, size = 0, "", 0
    for unit in units:
        if held and (size + unit.size > most or size >= goal):
            yield Passage(held, line, heading)
            held, size = "", 0
        line, held = (line, held + unit.gap + unit.text) if held else (unit.line, unit.text)
        size += unit.size
    if size:
        yield Passage(held, line, heading)


def _joined(passages: Iterable[Passage]) -> Iterator[Passage]:
    """Short passages with those that follow them under the same heading."""
    held: Passage | None = None
    for each in passages:
        if held is not None:
            both = _pair(held, each)
            if both is not None and _size(held.text) < LEAST and _size(str(both)) <= MOST:
                held = both
                continue
            yield held
        held = each
    if held is not None:
        yield held


def _pair(first: Passage, second: Passage) -> Passage | None:
    """Two passages as one under the headings that both have; None where they have none."""
    titles = first.heading.split(BELOW), second.heading.split(BELOW)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*titles, strict=False))))
    if not first.heading or not shared:
        return None
    parts = [
        f"{BELOW.join(own[shared:])}:\n{each.text}" if own[shared:] else each.text
        for own, each in zip(titles, (first, second), strict=True)
    ]
    return Passage("\n\n".join(parts), first.start, BELOW.join(titles[0][:shared]))


ENDINGS: dict[str, Callable[[Path], Iterator[Section]]] = {
    ".markdown": _markdown,
    ".md": _markdown,
    ".pdf": _pdf,
    ".rst": _restructured,
    ".text": _plain,
    ".txt": _plain,
}

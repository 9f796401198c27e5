"""What a section is made of. A lens says what there is to see; how it looks in a terminal and on a page is said here and in `page`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from heedful._result import Result
from heedful._text import cut, printable

if TYPE_CHECKING:
    from heedful.report.charts import Chart, Patches
    from heedful.report.maps import Atlas, Layer

__all__ = [
    "Block",
    "Columns",
    "Figure",
    "Finding",
    "Graph",
    "Items",
    "Link",
    "Map",
    "Mark",
    "Note",
    "Prose",
    "Section",
    "Table",
    "Text",
    "plain_text",
]

# Columns of a terminal, and of a cell in it.
WIDE, CELL = 98, 24


@dataclass(frozen=True)
class Mark:
    """A stretch of text that stands out: `named`, `answer`, `chosen`, `equal`, `target`, `outside`, `special`, `strong`."""

    text: str
    kind: str


@dataclass(frozen=True)
class Link:
    """A stretch of text that leads to an element of the page by its id; `cell` is the query and key of a map to open at."""

    text: str
    to: str
    cell: tuple[int, int] | None = None


Text = str | Sequence[str | Mark | Link]


def plain_text(text: Text) -> str:
    """A text without its marks.

    >>> plain_text(["Masking ", Mark("animal", "named"), "."])
    'Masking animal.'
    """
    return text if isinstance(text, str) else "".join(part if isinstance(part, str) else part.text for part in text)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Part of a section.

    Args:
        title: a heading of its own; `name` is its id on the page.
        shown: `everywhere`, or on the `page` or in the `terminal` alone.
    """

    title: str = ""
    name: str = ""
    shown: Literal["everywhere", "page", "terminal"] = "everywhere"

    # By which the page finds how to draw it, and what it needs beside the page's own style and script.
    kind: ClassVar[str] = "block"
    files: ClassVar[tuple[str, ...]] = ()

    def lines(self) -> Iterator[str]:
        """The block in a terminal."""
        yield from ()

    def inner(self) -> Iterator[Block]:
        """The blocks inside of it, itself first."""
        yield self


@dataclass(frozen=True)
class Prose(Block):
    """A paragraph. `style` is how it looks on the page: plain, a large `answer`, a running `text`, `tokens`, an aside on `trust`, or `verbatim`."""

    text: Text
    style: str = ""
    kind = "prose"

    def lines(self) -> Iterator[str]:
        text = plain_text(self.text)
        yield from text.splitlines() if self.style == "verbatim" else textwrap.wrap(text, WIDE, subsequent_indent="  ")


@dataclass(frozen=True)
class Note(Block):
    """Small print; one that is `live` changes while a reader works with the figure above it."""

    text: str
    live: bool = False
    kind = "note"

    def lines(self) -> Iterator[str]:
        yield from textwrap.wrap(self.text, WIDE)


@dataclass(frozen=True)
class Items(Block):
    """A list; `notes` stand below the items. `style`: bullets, `findings` (numbered), `pairs` (a grid) or `note` (small)."""

    items: Sequence[Text]
    notes: Sequence[str] = ()
    style: str = ""
    kind = "items"

    def lines(self) -> Iterator[str]:
        for at, item in enumerate(self.items):
            first = f"{at + 1}. " if self.style == "findings" else "  " if self.style == "pairs" else ""
            rest = "   " if self.style == "findings" else "  "
            yield from textwrap.wrap(plain_text(item), WIDE, initial_indent=first, subsequent_indent=rest)
            if at < len(self.notes):
                yield from textwrap.wrap(self.notes[at], WIDE, initial_indent=f"{rest}Note: ", subsequent_indent=rest)


@dataclass(frozen=True)
class Table(Block):
    """Rows of cells under a head; numbers are set to the right.

    Args:
        head: the columns' names; without any, rows are pairs of a name and what it is.
        rows: cells are numbers, texts or links.
        caption: what the columns mean.
        long: scrolls in a frame, and can be sorted by a click on a heading.
        folded: a line that unfolds it.
        style: of rows without a head: a plain list, or large `facts`, whose third cell is set small.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""
    long: bool = False
    folded: str = ""
    style: str = ""
    kind = "table"

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers alone."""
        return [all(map(is_numeric, column)) for column in zip(*self.rows, strict=True)] or [False] * len(self.head)

    @property
    def label(self) -> str:
        return self.caption or ", ".join(self.head)

    def lines(self) -> Iterator[str]:
        cells = [[cut(_cell(cell), CELL) for cell in row] for row in (*([self.head] if self.head else ()), *self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        yield from textwrap.wrap(f"{self.caption}:", WIDE) if self.caption else ()
        for row in cells:
            yield "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def is_numeric(cell: Any) -> bool:
    """Whether a cell is set to the right.

    >>> [is_numeric(cell) for cell in (3, "-0.5", "12 %", "layer", "")]
    [True, True, True, False, False]
    """
    return isinstance(cell, int | float) or str(_cell(cell)).removeprefix("-")[:1].isdigit()


def _cell(cell: Any) -> str:
    return printable(cell.text if isinstance(cell, Link | Mark) else str(cell))


@dataclass(frozen=True)
class Figure(Block):
    """A chart, or several small ones beside one another; `key` names the lines, in the order of their colours."""

    charts: Sequence[Chart | Patches]
    key: Sequence[str] = ()
    caption: str = ""
    kind = "figure"


@dataclass(frozen=True)
class Map(Block):
    """Attention maps of every head, which enlarge; `notes` say how to read them."""

    layers: Sequence[Layer]
    atlas: Atlas
    notes: Sequence[str] = ()
    kind = "map"
    files = ("maps.css", "maps.js")


@dataclass(frozen=True)
class Graph(Block):
    """A graph over the words of a text.

    Args:
        names: the nodes, in the order of the text.
        edges: `(a, b, mark at a, mark at b)`, marks `-`, `>` and `o`.
        highlight, target: nodes that are filled: an explaining set, and what it explains.
        label: for those who do not see it.
        note: below it, until a reader picks a node.
    """

    names: Sequence[str]
    edges: Sequence[tuple[int, int, str, str]]
    highlight: Iterable[int] = ()
    target: int | None = None
    label: str = ""
    note: str = ""
    kind = "graph"
    files = ("graph.css", "graph.js")


@dataclass(frozen=True)
class Columns(Block):
    """Blocks side by side where there is room: one column each; `even` shares the width evenly, else the second takes the rest."""

    columns: Sequence[Sequence[Block]]
    even: bool = False
    kind = "columns"

    def lines(self) -> Iterator[str]:
        yield from _lines(block for column in self.columns for block in column)

    def inner(self) -> Iterator[Block]:
        yield self
        for column in self.columns:
            for block in column:
                yield from block.inner()


@dataclass(frozen=True)
class Finding(Result):
    """A sentence that a report opens with.

    Args:
        text: what was found, in plain words.
        caveat: what it does not show.
        evidence: the id of the element on the page that shows it: a section's name, a head (`head-3-1`), a heading.
    """

    text: str
    caveat: str
    evidence: str


@dataclass(frozen=True)
class Section:
    """What one lens says of a subject: blocks for people, data for machines.

    Args:
        title: the heading.
        blocks: what there is to see, from which terminal and page are made.
        data: what `--json` prints; JSON types alone.
        result: the lens's own result, for those who call `look` from Python.
        findings: what the report may open with, the most telling first.
        plain: the section in one sentence that needs no term of its own.
    """

    title: str
    blocks: Sequence[Block] = field(repr=False)
    data: dict[str, Any] = field(default_factory=dict, repr=False)
    result: Any = field(default=None, repr=False)
    findings: tuple[Finding, ...] = ()
    plain: str = ""

    @property
    def summary(self) -> str:
        """The section as plain text for a terminal, at most 100 columns."""
        return "\n".join(_lines(self.blocks)).strip("\n")

    @property
    def html(self) -> str:
        """The section as a fragment of a page."""
        from heedful.report.page import fragment

        return fragment(self.blocks)


def _lines(blocks: Iterable[Block]) -> Iterator[str]:
    for block in blocks:
        if block.shown != "page":
            lines = list(block.lines())
            yield from ("", block.title) if block.title and lines else ()
            yield from lines

"""What a library returns: passages with their places and who vouches for them, and what an update did."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from heedful._result import Result
from heedful._text import cut, printable, quantity


@dataclass(frozen=True)
class Neighbour(Result):
    """Another result that resembles this one.

    Attributes:
        place: where it stands in the new order, from 1 on.
        file: its document.
        similarity: the cosine of both vectors.
    """

    place: int
    file: str
    similarity: float


@dataclass(frozen=True)
class Hit(Result):
    """A passage that was found.

    Attributes:
        file: its document, as a path from the folder.
        start: the line at which it begins, in a PDF its page.
        heading: the headings it stands under.
        text: its words.
        place, first_place: where it stands in the new order and in the first one, from 1 on.
        score: what the new order is by; None for what the method leaves where it was.
        cosine: what the first order is by.
        neighbours: the results that resemble it most, the best 10 in the new order and those returned being looked at.
        copies: other documents with the same passage.
    """

    file: str
    start: int
    heading: str
    text: str
    place: int
    first_place: int
    score: float | None
    cosine: float
    neighbours: tuple[Neighbour, ...] = ()
    copies: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """Document and line, or page."""
        mark = ", page " if self.file.lower().endswith(".pdf") else ":"
        return printable(f"{self.file}{mark}{self.start}")

    @property
    def reason(self) -> str:
        """Where it stood before, and which results vouch for it."""
        before = "same place" if self.first_place == self.place else f"place {self.first_place}"
        others = ", ".join(f"{each.place} ({each.similarity:.2f})" for each in self.neighbours)
        return f"{before} before, cosine {self.cosine:.2f}" + (f"; resembles {others}" if others else "")

    def excerpt(self, query: str, signs: int = 300) -> str:
        """So many signs of the text, from the sentence on that shares most words with the question."""
        words = set(re.findall(r"\w{3,}", query.lower()))
        sentences = re.split(r"(?<=[.!?])\s+", " ".join(self.text.split()))
        shared = [len(words & set(re.findall(r"\w{3,}", sentence.lower()))) for sentence in sentences]
        at = shared.index(max(shared))
        # The end of a passage is shown with what leads to it.
        while at > 0 and len(" ".join(sentences[at - 1 :])) <= signs:
            at -= 1
        return printable(cut(("... " if at else "") + " ".join(sentences[at:]), signs))

    def lines(self, query: str, width: int = 100) -> tuple[str, ...]:
        """For people: where it stands, why, and an excerpt."""
        title = f"{self.place:>3}  {self.where}" + (f"  {printable(self.heading)}" if self.heading else "")
        more = f"; also in {', '.join(map(printable, self.copies[:3]))}" if self.copies else ""
        more += f" and {len(self.copies) - 3} more" if len(self.copies) > 3 else ""
        text = textwrap.wrap(self.excerpt(query, 3 * (width - 5)), width - 5)
        return title, f"     {self.reason}{more}", *(f"     {line}" for line in text)


@dataclass(frozen=True)
class Hits(Result):
    """The answer to a question.

    Attributes:
        query: the question.
        hits: passages, the best first.
        method: by which the first list was re-ranked.
        ranked: how many passages the first list had.
        passages: how many were searched.
        seconds: how long it took, the loading of the model left out.
    """

    query: str
    hits: tuple[Hit, ...]
    method: str
    ranked: int
    passages: int
    seconds: float

    def __len__(self) -> int:
        return len(self.hits)

    @property
    def summary(self) -> str:
        """What was done."""
        found = f"the best {len(self)} of {quantity(self.passages, 'passage')}"
        how = "in their first order" if self.method == "cosine" else f"re-ranked by {self.method}"
        return f"{found}; the first {self.ranked:,} {how}, {self.seconds:.2f} s"

    def __str__(self) -> str:
        return "\n".join([self.summary, *(line for hit in self.hits for line in ("", *hit.lines(self.query)))])


@dataclass(frozen=True)
class Update(Result):
    """What an update did.

    Attributes:
        added, changed, removed: paths of documents.
        unchanged: how many were as before.
        skipped: why each document that could not be read was left out.
        documents, passages: how many the index has now.
        seconds: how long it took.

    >>> print(Update(("a.md",), (), ("b.md", "c.md"), 7, {}, 8, 31, 0.5))
    8 documents, 31 passages: 1 added, 2 removed
    """

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    unchanged: int
    skipped: Mapping[str, str]
    documents: int
    passages: int
    seconds: float

    def __str__(self) -> str:
        counts = {name: len(getattr(self, name)) for name in ("added", "changed", "removed", "skipped")}
        what = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "nothing changed"
        lines = [f"{quantity(self.documents, 'document')}, {quantity(self.passages, 'passage')}: {what}"]
        lines += [f"skipped {printable(path)}: {why}" for path, why in list(self.skipped.items())[:5]]
        if len(self.skipped) > 5:
            lines.append(f"and {len(self.skipped) - 5:,} more")
        return "\n".join(lines)

"""The small protocol by which a lens adds its section to the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful._errors import MissingExtra, Unsupported

if TYPE_CHECKING:
    from heedful.lens.observation import Observation

__all__ = ["LENSES", "Finding", "Section", "Subject", "RESEARCH", "framed", "html_table", "readable", "sections"]

# Name -> the module whose `section(subject)` reads it, in the order of the report. To add a lens, add its line.
LENSES = {
    "pronouns": "heedful.lens.pronouns",
    "attention": "heedful.lens.attention",
    "causes": "heedful.lens.causes.page",
    "spectrum": "heedful.lens.spectra",
    "symmetry": "heedful.lens.symmetry",
    "depth": "heedful.lens.depth",
}


@dataclass(frozen=True)
class Subject:
    """One model reading one text: what every lens is shown.

    Args:
        model: what read the text: of an encoder and a decoder, the encoder.
        tokenizer: of the model.
        folder: where the model lies; None for one that was loaded by hand.
        text: as it was given; `inputs` may hold its beginning alone.
        observation: what attention did.
        progress: `progress(done, total)` may be called by a lens that works for longer than a second.
        inputs: what the model was called with.
    """

    model: Any
    tokenizer: Any
    folder: Path | None
    text: str
    observation: Observation
    progress: Callable[[int, int], None] = lambda done, total: None
    inputs: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def beginning(self, tokens: int) -> dict[str, Any]:
        """What the model was called with, cut to its first tokens; empty where it read no tokens."""
        length = next((value.shape[1] for value in self.inputs.values() if value.dim() == 2), 0)
        cut = {name: value.dim() == 2 and value.shape[1] == length for name, value in self.inputs.items()}
        return (
            {name: value[:, :tokens] if cut[name] else value for name, value in self.inputs.items()} if length else {}
        )


# Lenses whose section is for those who study models; each opens with a plain line.
RESEARCH = ("spectrum", "symmetry", "depth")


@dataclass(frozen=True)
class Finding:
    """A sentence that a report opens with.

    Args:
        text: what was found, in plain words.
        caveat: what it does not show.
        evidence: the id of the element on the page that shows it: a section's name, a head (`head-3-1`), a heading.
    """

    text: str
    caveat: str
    evidence: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Section:
    """What one lens says of a subject: for people, for machines and for the page.

    Args:
        title: the heading.
        summary: plain text for the terminal, at most 100 columns.
        data: what `--json` prints; JSON types alone.
        html: a fragment that goes under the heading, escaped where it holds text of the model's. It may hold inline SVG; it
            names no outside address and has no inline event handlers.
        style, script: what this fragment needs beyond the page's own, once per page.
        result: the lens's own result, for those who call `look` from Python.
        findings: what the report may open with, the most telling first.
        plain: the section in one sentence that needs no term of its own.
    """

    title: str
    summary: str
    data: dict[str, Any] = field(repr=False)
    html: str = field(repr=False)
    style: str = field(default="", repr=False)
    script: str = field(default="", repr=False)
    result: Any = field(default=None, repr=False)
    findings: tuple[Finding, ...] = ()
    plain: str = ""


def sections(subject: Subject, begin: Callable[[str], None] = lambda name: None) -> Iterator[tuple[str, Section | str]]:
    """Each lens by name with its section, or with the reason, in one line, why it does not apply.

    `begin(name)` is called before a lens starts.
    """
    for name, module in LENSES.items():
        begin(name)
        try:
            yield name, import_module(module).section(subject)
        except (Unsupported, MissingExtra) as reason:
            yield name, " ".join(str(reason).split())
        # One lens that stumbles over a model nobody foresaw must not take the others with it.
        except Exception as error:
            told = " ".join(f"{type(error).__name__}: {error}".split())
            yield name, f"this lens failed on this model, which is a fault of heedful's: {told:.200}"


def readable(tokenizer: Any, token: str) -> str:
    """A token as a person would write it, on one line: no marks of the tokenizer, nothing that is not printable.

    >>> readable(None, "a\\u202eb")
    'a\\\\u202eb'
    """
    plain = token if tokenizer is None else tokenizer.convert_tokens_to_string([token]).strip() or token
    # Joiners, which print nothing, are letters of Persian and Hindi, and hold emoji together.
    return "".join(sign if sign.isprintable() or sign in "\u200c\u200d" else repr(sign)[1:-1] for sign in plain)


def framed(page: str, height: int = 720) -> str:
    """A whole page inside another, such as a notebook: its style, scripts and policy stay its own.

    >>> framed("<p>a</p>", 100)
    '<iframe srcdoc="&lt;p&gt;a&lt;/p&gt;" sandbox="allow-scripts" style="width:100%;height:100px;border:0"></iframe>'
    """
    return f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" style="width:100%;height:{height}px;border:0"></iframe>'


def html_table(head: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> str:
    """A table of text cells, escaped, that scrolls where it is too wide, also by key; numbers are set to the right.

    >>> html_table(["layer", "rank"], [[0, "a < b"]])
    '<div class="scroll" tabindex="0" role="region" aria-label="layer, rank"><table><thead><tr><th class=number>layer</th><th>rank</th></tr></thead><tbody><tr><td class=number>0</td><td>a &lt; b</td></tr></tbody></table></div>'
    """

    def number(value: object) -> bool:
        return isinstance(value, int | float) or str(value)[:1].isdigit() or str(value)[:2].lstrip("-").isdigit()

    def cell(tag: str, value: object, right: bool) -> str:
        return f"<{tag}{' class=number' if right else ''}>{escape(str(value))}</{tag}>"

    right = [all(map(number, column)) for column in zip(*rows, strict=True)] or [False] * len(head)
    titles = "".join(cell("th", title, side) for title, side in zip(head, right, strict=True))
    body = "".join(f"<tr>{''.join(cell('td', value, number(value)) for value in row)}</tr>" for row in rows)
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    label = escape(caption or ", ".join(head))
    region = f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
    return f"{region}<table>{named}<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"

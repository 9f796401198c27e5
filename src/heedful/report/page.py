"""The report as one HTML page that needs nothing but itself."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from heedful.lens.sections import RESEARCH, readable

if TYPE_CHECKING:
    from heedful.lens.report import LookResult
    from heedful.lens.sections import Section

__all__ = ["page", "policy", "resource"]

# The text in the page's head is for recognising it; all of its tokens follow.
QUOTED = 280


def page(result: LookResult) -> str:
    """The whole page.

    Its policy lets nothing in from outside, and no script but those written here, known by their hashes.
    """
    shown = {name: one for name, one in result.sections.items() if not isinstance(one, str)}
    scripts = [resource("page.js"), *dict.fromkeys(one.script for one in shown.values() if one.script)]
    styles = [resource("page.css"), *dict.fromkeys(one.style for one in shown.values() if one.style)]
    left = {name: one for name, one in result.sections.items() if isinstance(one, str)}
    titles = {"findings": "Findings"} | {name: one.title for name, one in shown.items()}
    links = "".join(
        f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title in {**titles, "model": "The model"}.items()
    )
    first = next((name for name in shown if name in RESEARCH), None)
    bodies = "".join(
        (_research(shown) if name == first else "")
        + _section(name, one.title, (f'<p class="plain">{escape(one.plain)}</p>' if one.plain else "") + one.html)
        for name, one in shown.items()
    )
    name = escape(readable(None, result.model.title))
    parts = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy(scripts)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">',
        f"<title>{name}: what it looks at</title>",
        f"<style>{''.join(styles)}</style></head><body>",
        '<a class="skip" href="#main">Skip to the report</a>',
        f'<header><p class="brand">heedful <i>look</i></p><h1>{name}</h1>{_quote(result.text)}</header>',
        f'<nav aria-label="Sections"><ul>{links}</ul><button type="button" id="theme" hidden>Dark</button></nav>',
        f'<main id="main">{_findings(result)}{bodies}{_left_out(left)}{_model(result)}</main>',
        f"<footer>{_footer(result)}</footer>",
        *(f"<script>{script}</script>" for script in scripts),
        "</body></html>\n",
    )
    return "".join(parts)


def resource(name: str) -> str:
    """A file of the report's own, such as `page.css`."""
    return files(__package__).joinpath(name).read_text("utf-8")


def policy(scripts: Sequence[str]) -> str:
    """What the page may load: nothing from outside, and no script but these, known by their hashes."""
    known = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    rules = ("default-src 'none'", f"script-src {known}", "style-src 'unsafe-inline'", "img-src data:")
    return "; ".join((*rules, "base-uri 'none'", "form-action 'none'"))


def _quote(text: str) -> str:
    words = readable(None, " ".join(text.split()))
    quoted = words if len(words) <= QUOTED else f"{words[:QUOTED].rstrip()} ..."
    return f"<blockquote><bdi>{escape(quoted)}</bdi></blockquote>"


def _section(name: str, title: str, body: str) -> str:
    return f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(title)}</h2>{body}</section>'


def _findings(result: LookResult) -> str:
    items = "".join(
        f'<li><p>{escape(one.text)} <a href="#{one.evidence}">Evidence</a></p>'
        + (f'<p class="note">{escape(one.caveat)}</p>' if one.caveat else "")
        + "</li>"
        for one in result.findings
    )
    return _section("findings", "Findings", f'<ol class="findings">{items}</ol>')


def _research(shown: Mapping[str, Section]) -> str:
    items = "".join(
        f'<li><a href="#{name}">{escape(one.title)}</a>: {escape(one.plain or one.summary.splitlines()[0])}</li>'
        for name, one in shown.items()
        if name in RESEARCH
    )
    return _section("research", "For researchers", f'<ul class="plain">{items}</ul>')


def _left_out(left: Mapping[str, str]) -> str:
    items = "".join(f"<li>{escape(name.capitalize())}: {escape(why)}</li>" for name, why in left.items())
    return _section("left-out", "Does not apply", f'<ul class="note">{items}</ul>') if left else ""


def _model(result: LookResult) -> str:
    from heedful.lens.report import short

    model = result.model
    number, _, unit = short(model.parameters).partition(" ")
    facts = {
        "architecture": (model.name, ""),
        "layers": (str(model.layers), ""),
        "heads in each": (str(model.heads), ""),
        "parameters": (number, unit),
        "tokens read": (str(len(result.tokens)), f"{result.left_out} more left out" if result.left_out else ""),
        "type of numbers": (model.dtype, ""),
        "implementation": (model.attention, ""),
    }
    cells = "".join(
        f"<div><dt>{label}</dt><dd>{escape(value)}{f' <small>{escape(rest)}</small>' if rest else ''}</dd></div>"
        for label, (value, rest) in facts.items()
    )
    tokens = " ".join(
        f"<span{' class=special' if special else ''}><bdi>{escape(token)}</bdi></span>"
        for token, special in zip(result.tokens, result.special, strict=True)
    )
    return _section(
        "model",
        "The model and the text",
        f'<dl class="facts">{cells}</dl><h3>The text as tokens</h3><p class="tokens">{tokens}</p>',
    )


def _footer(result: LookResult) -> str:
    from heedful import __version__

    return f"Written by heedful {__version__}. This page is complete in itself and asks for nothing from anywhere."

"""Blocks as HTML: a fragment, or a whole page that needs nothing but itself."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

from heedful._text import printable
from heedful.report import graphs, maps
from heedful.report.blocks import Block, Graph, Section, is_numeric
from heedful.report.charts import stroke

# The text in the page's head is for recognising it.
QUOTED = 280


def page(
    sections: Mapping[str, Section],
    *,
    title: str,
    command: str,
    heading: str = "",
    quote: str = "",
    links: Iterable[str] | None = None,
    footer: str = "",
) -> str:
    """A whole page. Its policy lets nothing in from outside, and no script but those written here, known by their hashes.

    Args:
        sections: by their ids.
        title: of the window; `heading` of the page, the same by default.
        command: that made it.
        quote: what was read.
        links: the sections that the page's head leads to; all by default.

    >>> from heedful.report import Prose
    >>> page({"a": Section("A", [Prose("x < y")])}, title="t", command="look").count("x &lt; y")
    1
    """
    blocks = [block for section in sections.values() for part in section.blocks for block in part.inner()]
    needed = dict.fromkeys(name for block in blocks for name in block.files)
    styles = [resource("page.css"), *(resource(name) for name in needed if name.endswith(".css"))]
    scripts = [resource("page.js"), *(resource(name) for name in needed if name.endswith(".js"))]
    if "maps.css" in needed:
        styles.append(maps.scales())
    words = printable(" ".join(quote.split()))
    return _templates().get_template("page.html").render(
        sections=sections,
        title=printable(title),
        heading=printable(heading or title),
        command=command,
        quote=words if len(words) <= QUOTED else f"{words[:QUOTED].rstrip()} ...",
        linked={name: sections[name].title for name in (sections if links is None else links) if name in sections},
        footer=footer,
        policy=policy(scripts),
        styles=styles,
        scripts=scripts,
    ) + "\n"  # fmt: skip


def fragment(blocks: Sequence[Block]) -> str:
    """Blocks as part of a page.

    >>> from heedful.report import Note
    >>> fragment([Note("a < b")])
    '<p class="note">a &lt; b</p>'
    """
    return str(_templates().get_template("blocks.html").module.blocks(blocks))


def framed(content: str, height: int = 720) -> str:
    """A whole page inside another, such as a notebook: its style, scripts and policy stay its own.

    >>> framed("<p>a</p>", 100)
    '<iframe srcdoc="&lt;p&gt;a&lt;/p&gt;" sandbox="allow-scripts" style="width:100%;height:100px;border:0"></iframe>'
    """
    style = f"width:100%;height:{height}px;border:0"
    return f'<iframe srcdoc="{escape(content)}" sandbox="allow-scripts" style="{style}"></iframe>'


def resource(name: str) -> str:
    """A file of the report's own, such as `page.css`."""
    return files(__package__).joinpath(name).read_text("utf-8")


def policy(scripts: Sequence[str]) -> str:
    """What the page may load: nothing from outside, and no script but these, known by their hashes."""
    known = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    rules = ("default-src 'none'", f"script-src {known}", "style-src 'unsafe-inline'", "img-src data:")
    return "; ".join((*rules, "base-uri 'none'", "form-action 'none'"))


@lru_cache
def _templates() -> Any:
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(loader=FunctionLoader(resource), autoescape=True, undefined=StrictUndefined)
    environment.globals |= {
        "is_numeric": is_numeric,
        "maps_of": maps.pictures,
        "next": next,
        "picture_of": _picture,
        "slug": lambda word: "is-" + "-".join(word.split()),
        "stroke": lambda at: Markup(stroke([(0, 4), (32, 4)], at)),
    }
    return environment


def _picture(block: Graph) -> SimpleNamespace:
    graph = graphs.layout(block.names, block.edges, set(block.highlight), block.target)
    return SimpleNamespace(picture=graphs.svg(graph, block.label), key=graphs.key())

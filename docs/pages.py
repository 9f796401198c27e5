"""The site under docs/_build: guides, names, pictures and a report, to be read without a network.

Guides are Markdown, turned into pages by markdown-it; formulas become MathML, code is coloured by Pygments. The names of the
package are pdoc's pages, with the same formulas. `index.js` holds every section and name for the search of `search.js`.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from html import escape, unescape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
MENU = {
    "Start": ["README"],
    "Build with attention": [
        "operator",
        "layers",
        "form",
        "transformers",
        "primal",
        "series",
        "events",
        "geometry",
        "tables",
        "untrained",
        "ranking",
        "search",
        "corpus",
        "pictures",
        "scale",
        "convert",
    ],
    "Look into models": ["look", "observe", "flow", "causes", "spectrum", "symmetry", "transport", "depth"],
    "Evidence": ["performance", "results"],
    "Reference": ["glossary", "reference", "CONTRIBUTING", "CHANGELOG"],
}
# Pages that are not made of Markdown, by the group in which they stand.
OTHERS = {
    "Look into models": [("report.html", "A live report"), ("gallery.html", "Gallery")],
    "Reference": [("api/index.html", "API")],
}


@dataclass
class Page:
    """A guide: its address, title and body, the headings in it and the text under each."""

    address: str
    title: str
    body: str
    contents: list[tuple[str, str]] = field(default_factory=list)
    sections: list[dict[str, str]] = field(default_factory=list)


def source(name: str) -> Path:
    """The Markdown file of a page."""
    return next(path for path in (HERE / f"{name}.md", ROOT / f"{name}.md") if path.is_file())


def address(name: str) -> str:
    return "index.html" if name == "README" else f"{name.lower()}.html"


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading.

    >>> slug("The regulariser, and what it does not say")
    'the-regulariser-and-what-it-does-not-say'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).replace(" ", "-")


def mathml(formula: str, *, block: bool = False) -> str:
    """A formula of LaTeX as MathML, which browsers draw themselves."""
    from latex2mathml.converter import convert

    return convert(formula.strip(), display="block" if block else "inline")


def with_formulas(render: Callable[[str], str]) -> Callable[[str], str]:
    """A renderer of Markdown that leaves `$...$` and `$$...$$` outside of code to `mathml`."""
    code = r"(?P<code>^ *```.*?^ *```|(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)|^>>>[^\n]*|^\.\.\. [^\n]*)"
    formulas = r"\$\$(?P<block>.+?)\$\$|(?<![\\$])\$(?P<inline>[^\s$](?:(?:[^$\n]|\n(?!\n))*?[^\s$])?)\$(?![\w])"

    def rendered(text: str) -> str:
        kept: list[str] = []

        def keep(found: re.Match[str]) -> str:
            if found["code"] is not None:
                return found[0]
            kept.append(mathml(found["block"] or found["inline"], block=found["block"] is not None))
            return f"\ue000{len(kept) - 1}\ue001"

        text = re.sub(f"{code}|{formulas}", keep, text, flags=re.M | re.S)
        return re.sub("\ue000(\\d+)\ue001", lambda found: kept[int(found[1])], render(text))

    return rendered


def coloured(code: str, language: str, _: str) -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name

    if language not in ("python", "sh"):
        return escape(code)
    return highlight(code, get_lexer_by_name(language), HtmlFormatter(nowrap=True))


def page(name: str) -> Page:
    """One guide."""
    from markdown_it import MarkdownIt

    reader = MarkdownIt("commonmark", {"highlight": coloured}).enable("table")
    text = source(name).read_text()
    body = with_formulas(reader.render)(re.sub(r"<!--.*?-->\n?", "", text, flags=re.S))
    body = re.sub(r'href="([^"#:]*\.md)(#[^"]*)?"', lambda found: f'href="{moved(found[1])}{found[2] or ""}"', body)
    body = body.replace('src="docs/', 'src="')
    title = plain(re.search(r"<h1>(.*?)</h1>", body, re.S)[1])  # type: ignore[index]
    made = Page(address(name), title, "")
    made.body = re.sub(r"<h([1-3])>(.*?)</h\1>", lambda found: heading(found, made), body, flags=re.S)
    made.sections = list(sections(made))
    return made


def heading(found: re.Match[str], made: Page) -> str:
    level, label = found[1], plain(found[2])
    anchor = slug(label)
    if level == "2" or (level == "3" and made.address == "glossary.html"):
        made.contents.append((anchor, label))
    return f'<h{level} id="{anchor}">{found[2]}</h{level}>'


def moved(link: str) -> str:
    """Where a Markdown file lies on the site."""
    return address(Path(link).stem)


def plain(html: str) -> str:
    """The text of a piece of HTML; formulas are left out."""
    html = re.sub(r"</?span[^>]*>", "", re.sub(r"<math.*?</math>", " ", html, flags=re.S))
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def sections(made: Page) -> Iterable[dict[str, str]]:
    """What the search finds of a page: each heading with the text below it."""
    parts = re.split(r'<h[1-3] id="([^"]*)">(.*?)</h[1-3]>', made.body, flags=re.S)
    for anchor, title, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        yield entry(f"{made.address}#{anchor}", plain(title), made.title, plain(text)[:1500])


def entry(address: str, title: str, page: str, text: str) -> dict[str, str]:
    return {"address": address, "title": title, "page": page, "text": text}


def menu(pages: dict[str, Page]) -> dict[str, list[tuple[str, str]]]:
    return {
        group: [(pages[name].address, "Overview" if name == "README" else pages[name].title) for name in names]
        + OTHERS.get(group, [])
        for group, names in MENU.items()
    }


def write_guides(folder: Path, names: Iterable[tuple[str, str]] = (), gallery: str = "") -> None:
    """Every page made of Markdown, with the search; `names` are public names and their summaries."""
    from jinja2 import Environment, FileSystemLoader
    from pygments.formatters import HtmlFormatter

    import heedful

    folder.mkdir(parents=True, exist_ok=True)
    pages = {name: page(name) for group in MENU.values() for name in group}
    if gallery:
        pages["gallery"] = Page("gallery.html", "Gallery", gallery)
    template = Environment(loader=FileSystemLoader(HERE / "theme"), autoescape=True).get_template("page.html")
    from markupsafe import Markup

    for made in pages.values():
        html = template.render(
            title=made.title, body=Markup(made.body), contents=made.contents, here=made.address,
            menu=menu(pages), version=heedful.__version__,
        )  # fmt: skip
        (folder / made.address).write_text(html, "utf-8")
    index = [section for made in pages.values() for section in made.sections]
    for name, summary in names:
        module, _, public = name.rpartition(".")
        own = f"api/{name.replace('.', '/')}.html"  # of a module
        place = own if (folder / own).exists() else f"api/{module.replace('.', '/')}.html#{public}"
        index.append(entry(place, name, "API", summary))
    (folder / "index.js").write_text(f"const INDEX = {json.dumps(index, ensure_ascii=False)};\n", "utf-8")
    dark = HtmlFormatter(style="github-dark").get_style_defs("pre")
    colours = (
        f"{HtmlFormatter(style='default').get_style_defs('pre')}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"
    )
    colours = re.sub(
        r"^(pre|td|span)[^\n]*(line-height|linenos)[^\n]*$|pre \{ background[^}]*\}", "", colours, flags=re.M
    )
    (folder / "style.css").write_text(f"{(HERE / 'theme' / 'style.css').read_text()}\n{colours}\n", "utf-8")
    shutil.copy(HERE / "theme" / "search.js", folder)
    for picture in (*HERE.glob("*.svg"), *HERE.glob("*.png")):
        shutil.copy(picture, folder)


def write_names(folder: Path, *modules: str) -> None:
    """pdoc's pages of the package, with MathML in place of a renderer from elsewhere."""
    import pdoc

    pdoc.render.configure(docformat="markdown", math=False, show_source=False, template_directory=HERE / "theme")
    filters: dict[str, Any] = pdoc.render.env.filters
    usual = filters["to_html"]
    filters["to_html"] = with_formulas(usual)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pdoc.pdoc(*modules, output_directory=folder)
    finally:
        filters["to_html"] = usual


def write_gallery(folder: Path) -> str:
    """Runs every script of the gallery; the page's body, with the picture and the words of each."""
    from markdown_it import MarkdownIt

    (folder / "gallery").mkdir(parents=True, exist_ok=True)
    parts = ["<h1>Gallery</h1>"]
    for script in sorted((ROOT / "gallery").glob("plot_*.py")):
        picture = folder / "gallery" / f"{script.stem}.png"
        subprocess.run([sys.executable, str(script), str(picture)], check=True, stdout=subprocess.DEVNULL)
        title, *text = (ast.get_docstring(ast.parse(script.read_text())) or "").split("\n\n", 1)
        parts.append(
            f'<h2 id="{script.stem}">{escape(title)}</h2><img src="gallery/{picture.name}" alt="{escape(title)}">'
        )
        parts.append(with_formulas(MarkdownIt("commonmark").render)("\n\n".join(text)))
    return "\n".join(parts)


def write_report(file: Path) -> None:
    """The report of `heedful look` on its default sentence."""
    import heedful

    heedful.look().save(file)

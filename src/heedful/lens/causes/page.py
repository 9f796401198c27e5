"""An explanation on a page: a section of the report, or a page of its own."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from heedful._errors import CorruptModel, InvalidArgument, MissingExtra, Unsupported
from heedful.lens.causes import draw
from heedful.lens.sections import Section, html_table, readable

if TYPE_CHECKING:
    from heedful.lens.causes.explanation import Explanation
    from heedful.lens.sections import Subject

__all__ = ["fragment", "html_of", "section", "told"]

# Tokens of a long text that are explained, and inputs that the model is asked about: some seconds on two cores.
TOKENS, CALLS = 64, 300
# Parameters of a model that is opened a second time for its head.
PARAMETERS = 500_000_000
SETTLED = {"mask": "a mask", "drop": "nothing: it is hidden from attention", "pad": "padding"}
CAVEATS = (
    "Taking words away is the evidence; the graph only proposes which. It shows how this model's attention ties its words "
    "together, not what causes what in the world.",
    "N and alpha set where the line between dependent and independent is drawn. Attention is no sample, so p-values are a scale, "
    "not error rates.",
)


def section(subject: Subject) -> Section:
    """The smallest set of words found that the model's answer hangs on, and the graph over the tokens.

    A model without a head is asked whether its sentence embedding moves; one that a folder holds with its head is opened with it.

    >>> from heedful.lens import look
    >>> look(text="Water is wet.").sections["causes"].title
    'Causes'
    """
    from heedful.lens.causes.explanation import CausalExplainer

    notes: list[str] = []
    model, kind = _asked(subject)
    text = _beginning(subject, notes)
    explainer = CausalExplainer(model, subject.tokenizer, task=kind, max_calls=CALLS)
    try:
        found = explainer.explain(text, progress=lambda what, done, total: subject.progress(done, total))
    except InvalidArgument as error:
        raise Unsupported(str(error)) from None
    data = found.to_dict()
    # Every test of a long text would be most of the JSON; `explain` gives them.
    data["pag"] = {name: value for name, value in data["pag"].items() if name not in ("tests", "sepsets")}
    html = fragment(found) + "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    summary = "\n".join([told(found), *notes])
    return Section("Causes", summary, data | {"notes": notes}, html, _own("causes.css"), _own("causes.js"), found)


def _own(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _asked(subject: Subject) -> tuple[Any, str]:
    """The model to ask, and as what."""
    from heedful.bridges import answers

    mask = getattr(subject.tokenizer, "mask_token", None)

    def kind_of(model: Any) -> str:
        kind = answers.kind_of(model)
        return "embedding" if kind == "mlm" and (not mask or subject.text.count(mask) != 1) else kind

    model, config = subject.model, getattr(subject.model, "config", None)
    headed = str(next(iter(getattr(config, "architectures", None) or ()), "")).endswith(tuple(answers.KINDS))
    # `look` opens a folder without its head.
    if subject.folder is not None and headed and not type(model).__name__.endswith(tuple(answers.KINDS)):
        size = sum(parameter.numel() for parameter in model.parameters())
        if size > PARAMETERS:
            raise Unsupported(
                f"{size:,} parameters are too many to be read twice here; heedful explain reads this model with its head"
            )
        try:
            model = answers.open_model(subject.folder)[0].to(model.device)
        except (CorruptModel, MissingExtra) as error:
            raise Unsupported(str(error)) from None
    return model, kind_of(model)


def _beginning(subject: Subject, notes: list[str]) -> str:
    """The text, or as much of it as is explained."""
    ids = subject.inputs.get("input_ids")
    if ids is None:
        return subject.text
    if ids.shape[1] > TOKENS:
        notes.append(f"Of this text the first {TOKENS} tokens were read here.")
        # The mark that ends a text comes back when it is read.
        ids = ids[:, : TOKENS - 1]
    elif len(subject.tokenizer(subject.text, verbose=False)["input_ids"]) <= ids.shape[1]:
        return subject.text
    return str(subject.tokenizer.decode(ids[0], skip_special_tokens=True))


def told(found: Explanation, width: int = 100) -> str:
    """An explanation in lines of at most so many columns."""
    pag = found.pag
    where = f"layer {found.layer}" + (f", head {found.head}" if found.head is not None else "")
    asked = f"; {found.calls} inputs asked about" if found.calls != 1 else ""
    graph = (
        f"Graph of {where}: {pag.n} nodes, {len(pag.edges())} edges, {len(pag.latent_pairs())} of them hidden common causes; "
        f"{pag.learner.upper()}, N={pag.samples}, alpha={pag.alpha:g}{asked}"
    )
    lines = textwrap.wrap(_answer(found), width) + textwrap.wrap(graph, width)
    if found.baselines:
        lines.append(f"{'method':<18} {'size':>4} {'pruned':>6} {'calls':>5}  set")
        for name, size, least, calls, words in _methods(found):
            short = textwrap.shorten(words, max(20, width - 38), placeholder=" ...")
            lines.append(f"{name:<18} {size:>4} {least:>6} {calls:>5}  {short}".rstrip())
    for sentence in found.trust:
        lines += textwrap.wrap(sentence, width)
    return "\n".join(lines)


def _answer(found: Explanation) -> str:
    """What the model says, what it hangs on, and what becomes of it, in one sentence or two."""
    words = ", ".join(found.words)
    if found.task == "embedding":
        if not found.found:
            return f"No set of at most {found.settings['max_size']} words moves the text's embedding away; closest: {words or 'none'}."
        return f"The embedding of the text hangs on: {words}. Without {_them(found)} the embedding moves away."
    said = _said(found, repr(found.answer))
    if not found.found:
        return (
            f"{said}; no set of at most {found.settings['max_size']} words changes that. The largest effect "
            f"has: {words or 'none'}."
        )
    return f"{said}. That hangs on: {words}. Without {_them(found)} {_then(found, repr(found.flipped_to))}."


def _said(found: Explanation, answer: str) -> str:
    """What the answer is to the model: its own, or one that was asked about."""
    return f"The model says {answer}" if found.rank == 1 else f"{answer} is the model's answer number {found.rank}"


def _then(found: Explanation, answer: str) -> str:
    return f"the model says {answer}" if found.rank == 1 else "that rank is lost"


def _them(found: Explanation) -> str:
    return "it" if found.size == 1 else "them"


def _methods(found: Explanation) -> Iterable[tuple[str, str, str, int, str]]:
    """Ours and every baseline: name, size, size once pruned, calls, words; a set that changes nothing has no size."""
    size = str(found.size) if found.found else "none"
    yield "causal (this)", size, size, found.calls, ", ".join(found.words) if found.found else ""
    for name, one in found.baselines.items():
        words = ", ".join(found.names[node] for node in one.indices) if one.flipped else ""
        sizes = (str(one.size), str(len(one.pruned))) if one.flipped else ("none", "none")
        yield name, *sizes, one.calls, words


def fragment(found: Explanation) -> str:
    """What goes under the heading: answer, text, graph, baselines, settings, and how far to trust it."""
    low = ' class="causes-trust low"' if found.pag.trust().level != "good" else ' class="causes-trust"'
    trust = "".join(f"<p>{escape(sentence)}</p>" for sentence in found.trust)
    caveats = "".join(f'<p class="note">{escape(caveat)}</p>' for caveat in CAVEATS)
    side = (
        f"<h3>How far to trust it</h3><div{low}>{trust}</div>{caveats}"
        f"<h3>Other ways to choose words</h3>{_table(found)}<h3>Settings</h3>{_settings(found)}"
    )
    return (
        f'<p class="causes-answer">{_marked(found)}</p><p class="causes-text">{_text(found)}</p>'
        f'<div class="causes">{_figure(found)}<div>{side}</div></div>{_edges(found)}'
    )


def _marked(found: Explanation) -> str:
    """The answer with the words of the set marked."""
    words = " ".join(f"<b><bdi>{escape(word)}</bdi></b>" for word in found.words) or "none"
    if found.task == "embedding":
        if found.found:
            return f"The embedding of the text hangs on {words}: without {_them(found)} the embedding moves away."
        return (
            f"No set of at most {found.settings['max_size']} words moves the text's embedding away. Closest: {words}."
        )
    said = _said(found, f"<i><bdi>{escape(found.answer)}</bdi></i>")
    if not found.found:
        return (
            f"{said}; no set of at most {found.settings['max_size']} words changes that. The largest effect: {words}."
        )
    then = _then(found, f"<i><bdi>{escape(found.flipped_to or '')}</bdi></i>")
    return f"{said}. That hangs on {words}: without {_them(found)} {then}."


def _text(found: Explanation) -> str:
    """All that the model read, the set and the answer's place marked, word pieces put together."""
    # The mean of all tokens is no place.
    single = len(found.nodes[found.target_node]) == 1
    home = {
        place: node
        for node, places in enumerate(found.nodes)
        for place in places
        if node != found.target_node or single
    }
    kinds = dict.fromkeys(home.values(), "") | dict.fromkeys(found.indices, "chosen")
    kinds |= {found.target_node: "target"} if single else {}
    parts: list[str] = []
    before: int | None = None
    for place, (gap, piece) in enumerate(_pieces(found.tokens, found.task)):
        node = home.get(place)
        plain = f"<bdi>{escape(readable(None, piece))}</bdi>"
        if not gap and node is not None and node == before:
            parts[-1] = parts[-1].removesuffix("</span>") + f"{plain}</span>"
        else:
            kind = "outside" if node is None else kinds[node]
            parts.append(f"{gap}<span{f' class={kind}' if kind else ''}>{plain}</span>")
        before = node
    return "".join(parts)


def _pieces(tokens: Sequence[str], task: str) -> list[tuple[str, str]]:
    """Each token with what goes before it, by the marks of the usual tokenizers."""
    if task == "recommendation":
        return [(" ", token) for token in tokens]
    spaced = any(token[:1] in "\u0120\u2581" for token in tokens)
    found = []
    for token in tokens:
        plain = token.lstrip("\u0120\u2581") or token
        if spaced:
            glued = token[:1] not in "\u0120\u2581"
        elif token.startswith("##") and len(token) > 2:
            glued, plain = True, plain[2:]
        else:
            glued = token in {",", ".", ";", ":", "!", "?", ")"}
        found.append(("" if glued else " ", plain))
    return found


def _figure(found: Explanation) -> str:
    pag, drawn = found.pag, draw.layout(found.pag, found.indices, found.target_node)
    head = f", head {found.head}" if found.head is not None else ""
    pale = len(drawn.arcs) - drawn.strong
    notes = ["Pick a word to see its edges alone."]
    if pale or drawn.undrawn:
        notes.append(
            f"{drawn.strong} edges around the answer and the set are strong, {pale + drawn.undrawn} others pale."
        )
    label = f"Causal graph of layer {found.layer}{head}: {pag.n} words and {len(pag.edges())} edges, listed below"
    picture = draw.svg(pag, found.indices, found.target_node, label)
    return (
        f"<figure><h3>The graph of layer {found.layer}{head}</h3>{picture}{draw.key()}"
        f'<p class="note causes-picked" aria-live="polite">{escape(" ".join(notes))}</p></figure>'
    )


def _table(found: Explanation) -> str:
    head = ["method", "size", "pruned", "calls", "set"]
    return html_table(
        head,
        list(_methods(found)),
        "Size: of the set that changes the answer; pruned: without members it does not need",
    )


def _settings(found: Explanation) -> str:
    pag, settings = found.pag, found.settings
    samples = f"{pag.samples}" if pag.samples is not None else ""
    rows = [
        ["layer, heads", f"{found.layer}; {', '.join(map(str, found.heads))}"],
        ["learner", pag.learner.upper()],
        ["samples N, alpha", f"{samples}; {pag.alpha:g}" if pag.alpha is not None else samples],
        ["covariance", str(settings.get("covariance", ""))],
        ["a word is replaced by", SETTLED.get(str(settings.get("replace")), str(settings.get("replace", "")))],
        ["margin before, after", f"{_figures(found.effect.before)}; {_figures(found.effect.after)}"],
        ["confidence of the graph", "" if pag.confidence is None else f"{pag.confidence:.2f}"],
        ["inputs asked about", f"{found.calls}"],
        ["seconds", f"{found.seconds:.1f}"],
    ]
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows if value)
    return f'<dl class="causes-settings">{items}</dl>'


def _figures(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "none"


def _edges(found: Explanation) -> str:
    """Every edge in letters, for those who do not see the picture."""
    edges = found.pag.edges()
    if not edges:
        return '<p class="note">The graph has no edges.</p>'
    sure = found.pag.edge_confidence()
    rows = [[str(edge), f"{sure[edge.a, edge.b]:.2f}"] for edge in edges]
    table = html_table(["edge", "confidence"], rows, "The least confidence among the tests of the pair")
    return f'<details class="long sortable"><summary>All {len(edges)} edges of the graph in letters</summary>{table}</details>'


def html_of(found: Explanation) -> str:
    """A page of its own that needs nothing but itself.

    >>> from heedful.lens.causes import explain
    >>> html_of(explain(text="Water is wet."))[:15]
    '<!doctype html>'
    """
    from heedful.lens.report.page import policy, resource

    scripts = [resource("page.js"), _own("causes.js")]
    styles = resource("page.css") + _own("causes.css")
    title = "Why the embedding is what it is" if found.task == "embedding" else f"Why {found.answer!r}"
    parts = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy(scripts)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">',
        f"<title>{escape(readable(None, title))}</title><style>{styles}</style></head><body>",
        f'<header><p class="brand">heedful <i>explain</i></p><h1><bdi>{escape(readable(None, title))}</bdi></h1></header>',
        '<nav aria-label="Colours"><span></span><button type="button" id="theme" hidden>Dark</button></nav>',
        f'<main id="main"><section id="causes">{fragment(found)}</section></main>',
        "<footer>This page is complete in itself and asks for nothing from anywhere.</footer>",
        *(f"<script>{script}</script>" for script in scripts),
        "</body></html>\n",
    )
    return "".join(parts)

"""An explanation on a page: a section of the report, or a page of its own."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from heedful._errors import CorruptModel, InvalidArgument, MissingExtra, Unsupported
from heedful._text import quantity
from heedful.lens.causes import draw
from heedful.lens.causes.questions import PUNCTUATION
from heedful.lens.causes.telling import (
    ENDING,
    after,
    by_reason,
    change,
    effect_of,
    headline,
    methods,
    shown,
)
from heedful.lens.sections import Finding, Section, html_table, readable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from heedful.lens.causes.result import Explanation, Removal
    from heedful.lens.sections import Subject

__all__ = ["fragment", "html_of", "section"]

# Tokens of a long text that are explained, and inputs that the model is asked about: some seconds on two cores.
TOKENS, CALLS = 64, 300
# Parameters of a model that is opened a second time for its head.
PARAMETERS = 500_000_000
SETTLED = {"mask": "a mask", "drop": "nothing: the model no longer reads it", "pad": "padding"}
CAVEAT = (
    "Measured on this text alone, by one way of removing words; another way, or another text, may give other words."
)
CAVEATS = (
    "Taking words away is the evidence; the graph only proposes which. It shows how this model's attention ties its words "
    "together, not what causes what in the world.",
    "N and alpha set where the line between dependent and independent is drawn. Attention is no sample, so p-values are a scale, "
    "not error rates.",
)


def section(subject: Subject) -> Section:
    """The smallest sets of words whose removal changes the model's answer, and the graph over the tokens.

    A model without a head is asked whether its sentence embedding moves; one that a folder holds with its head is opened with it.
    """
    from heedful.lens.causes.explanation import CausalExplainer

    notes: list[str] = []
    model, kind = _asked(subject)
    text = _beginning(subject, notes)
    explainer = CausalExplainer(model, subject.tokenizer, task=kind, max_calls=CALLS)
    try:
        found = explainer.explain(text, progress=lambda done, total, what: subject.progress(done, total))
    except InvalidArgument as error:
        raise Unsupported(str(error)) from None
    data = found.to_dict()
    # Every test of a long text would be most of the JSON; `explain` gives them.
    data["pag"] = {name: value for name, value in data["pag"].items() if name not in ("tests", "sepsets")}
    html = fragment(found) + "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    summary = "\n".join([str(found), *notes])
    finding = Finding(headline(found), CAVEAT, "causes")
    return Section(
        "Causes",
        summary,
        data | {"notes": notes},
        html,
        _own("causes.css"),
        _own("causes.js"),
        result=found,
        findings=(finding,),
    )


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
    named = str(next(iter(getattr(config, "architectures", None) or ()), ""))
    # `look` opens a folder without its head.
    bare = subject.folder is not None and not type(model).__name__.endswith(tuple(answers.KINDS))
    bare = bare and not getattr(config, "is_encoder_decoder", False)
    if bare and subject.folder and named and answers.kind_named(named) is not None:
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
    from heedful.bridges import answers

    ids = subject.inputs.get("input_ids")
    if ids is None:
        return subject.text
    text = answers.beginning(subject.tokenizer, subject.text, min(int(ids.shape[1]), TOKENS))
    if ids.shape[1] > TOKENS:
        notes.append(f"Of this text the first {TOKENS} tokens were read here.")
    return text


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
        f'<p class="causes-answer">{_marked(found)}</p><p class="causes-text" dir="auto">{_text(found)}</p>'
        f'<div class="causes-measured"><div>{_sets(found)}{_never(found)}</div><div>{_scores(found)}</div></div>'
        f'<div class="causes">{_figure(found)}<div>{side}</div></div>{_edges(found)}'
    )


def _marked(found: Explanation) -> str:
    """The headline with its words marked."""
    return headline(
        found,
        lambda word: f"<b><bdi>{escape(word)}</bdi></b>",
        lambda answer: f"<i><bdi>{escape(answer)}</bdi></i>",
    )


def _text(found: Explanation) -> str:
    """All that the model read, as the user wrote it, the set and the answer's place marked."""
    if not found.text:
        return _listed(found)
    kinds = {found.target_node: "target"} | dict.fromkeys((node for one in found.sets for node in one.indices), "equal")
    kinds |= dict.fromkeys(found.indices, "chosen")
    answer = f"<span class=target>{_plain(found.answer)}</span>"
    parts, at = [], 0
    for node in sorted(
        (node for node, span in enumerate(found.spans) if span), key=lambda node: found.spans[node] or ()
    ):
        start, end = found.spans[node] or (0, 0)
        kind = kinds.get(node, "")
        own = f"<span{f' class={kind}' if kind else ''}>{_plain(found.text[start:end])}</span>"
        # A masked language model's answer stands where the mask was.
        parts += [_outside(found.text[at:start]), answer if found.task == "mlm" and node == found.target_node else own]
        at = end
    parts.append(_outside(found.text[at:]))
    return "".join(parts) + (f" {answer}" if found.task == "next-token" else "")


def _plain(text: str) -> str:
    return escape("".join(sign if sign in "\n\t" else readable(None, sign) for sign in text))


def _outside(text: str) -> str:
    return f"<span class=outside>{_plain(text)}</span>" if text.strip() else _plain(text)


def _listed(found: Explanation) -> str:
    """What a model of no text read: items in a row."""
    home = {place: node for node, places in enumerate(found.nodes) for place in places}
    kinds = {found.target_node: "target"} | dict.fromkeys(found.indices, "chosen")
    parts = []
    for place, token in enumerate(found.tokens):
        kind = kinds.get(home[place], "") if place in home else "outside"
        parts.append(f"<span{f' class={kind}' if kind else ''}>{_plain(token)}</span>")
    return " ".join(parts)


def _sets(found: Explanation) -> str:
    """The smallest sets with what becomes of the answer."""
    if not found.sets:
        return ""
    measure = found.measure
    head = [
        "removed",
        f"{measure} before",
        f"{measure} after",
        *(["rank before", "rank after"] if found.rank > 1 else []),
    ]
    head += [] if found.task == "embedding" else ["answer then"]

    def ranks(one: Removal) -> list[str]:
        return [str(found.rank), str(one.rank)] if found.rank > 1 else []

    def table(sets: Sequence[Removal], caption: str) -> str:
        rows = [
            [" + ".join(one.words), *change(found.before, one.score), *ranks(one), *filter(None, [after(found, one)])]
            for one in sets
        ]
        return html_table(head, rows, caption)

    apart = "" if found.only_ending or not found.ending else table(found.ending, ENDING)
    return (
        f"<h3>The smallest sets</h3>{table(found.sets, f'{found.sets_note[:1].upper()}{found.sets_note[1:]}')}{apart}"
    )


def _scores(found: Explanation) -> str:
    """How much each word matters."""
    ranked = sorted(found.scores, key=lambda one: -abs(one.leave_one_out))
    head = ["word", f"{found.measure} without it", "leave-one-out", "mean effect", "sets"]
    rows = [
        [one.word, shown(one.alone.score), effect_of(one.leave_one_out), effect_of(one.mean_effect), one.sets]
        for one in ranked
    ]
    caption = (
        f"Leave-one-out: by how much the {found.measure} falls when the word alone is removed. Mean effect: the same, averaged over all sets "
        "of other words that were asked about with and without it"
    )
    return f'<h3>The effect of each word</h3><div class="long sortable">{html_table(head, rows, caption)}</div>'


def _never(found: Explanation) -> str:
    rows = [
        f"<p class=note>Never removed: {escape((' ' if reason == PUNCTUATION else ', ').join(words))} ({escape(reason)}).</p>"
        for reason, words in by_reason(found).items()
    ]
    return "".join(rows)


def _figure(found: Explanation) -> str:
    pag, drawn = found.pag, draw.layout(found.pag, found.indices, found.target_node)
    head = f", head {found.head}" if found.head is not None else ""
    pale = len(drawn.arcs) - drawn.strong
    notes = ["Pick a word to see its edges alone."]
    if pale or drawn.undrawn:
        notes.append(
            f"{quantity(drawn.strong, 'edge')} at the answer and the set in full colour, {pale + drawn.undrawn} more in pale."
        )
    label = f"Causal graph of layer {found.layer}{head}: {quantity(pag.n, 'word')} and {quantity(len(pag.edges()), 'edge')}, listed below"
    picture = draw.svg(pag, found.indices, found.target_node, label)
    return (
        f"<figure><h3>The graph of layer {found.layer}{head}</h3>{picture}{draw.key()}"
        f'<p class="note causes-picked" aria-live="polite">{escape(" ".join(notes))}</p></figure>'
    )


def _table(found: Explanation) -> str:
    head = ["method", "size", "pruned", "calls", "set"]
    return html_table(
        head,
        list(methods(found)),
        "Size: of the set that changes the answer; pruned: without members it does not need; calls: inputs that were asked about",
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
        ["threshold of the cosine", f"{settings['threshold']:g}" if "threshold" in settings else ""],
        [
            "inputs asked about",
            f"{found.calls} until the first set, {found.more_calls} for equal sets and single words",
        ],
        ["seconds", f"{found.seconds:.1f}"],
    ]
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows if value)
    return f'<dl class="causes-settings">{items}</dl>'


def _edges(found: Explanation) -> str:
    """Every edge in letters, for those who do not see the picture."""
    edges = found.pag.edges()
    if not edges:
        return '<p class="note">The graph has no edges.</p>'
    sure = found.pag.edge_confidence()
    rows = [[str(edge), f"{sure[edge.a, edge.b]:.2f}"] for edge in edges]
    table = html_table(["edge", "confidence"], rows, "The least confidence among the tests of the pair")
    return f'<details class="long sortable"><summary>{quantity(len(edges), "edge")} of the graph in letters</summary>{table}</details>'


def html_of(found: Explanation) -> str:
    """A page of its own that needs nothing but itself.

    >>> from heedful.lens.causes import explain
    >>> html_of(explain(text="Water is wet."))[:15]
    '<!doctype html>'
    """
    from heedful.lens.report.page import policy, resource

    scripts = [resource("page.js"), _own("causes.js")]
    styles = resource("page.css") + _own("causes.css")
    title = f"Why the model answers {found.answer!r}"
    if found.task == "embedding":
        title = "Which words the embedding depends on"
    elif found.rank > 1:
        title = f"Why {found.answer!r} is answer number {found.rank}"
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

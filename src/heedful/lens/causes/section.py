"""An explanation on a page: a section of the report, or a page of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from heedful._errors import InvalidArgument, Unsupported
from heedful._text import printable, quantity
from heedful.bridges import answers, reading
from heedful.lens.causes.telling import (
    ENDING,
    after,
    by_reason,
    change,
    effect_of,
    headline,
    methods,
    never_removed,
    shown,
)
from heedful.report import Block, Columns, Finding, Graph, Mark, Note, Prose, Section, Table
from heedful.report.graphs import layout
from heedful.report.page import page

if TYPE_CHECKING:
    from heedful.lens.causes.result import Explanation, Removal
    from heedful.lens.sections import Subject

# Tokens of a long text that are explained, and inputs that the model is asked about: some seconds on two cores.
TOKENS, CALLS = 64, 300
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

    subject.check_words()
    notes: list[str] = []
    model, kind = _question(subject)
    text = _beginning(subject, notes)
    explainer = CausalExplainer(model, subject.tokenizer, task=kind, max_calls=CALLS)
    try:
        explanation = explainer.explain(text, progress=subject.progress)
    except InvalidArgument as error:
        raise Unsupported(str(error)) from None
    data = explanation.to_dict()
    # Every test of a long text would be most of the JSON; `explain` gives them.
    data["pag"] = {name: value for name, value in data["pag"].items() if name not in ("tests", "sepsets")}
    content = [Prose(str(explanation), style="verbatim", shown="terminal"), *blocks(explanation), *map(Note, notes)]
    finding = Finding(headline(explanation), CAVEAT, "causes")
    return Section("Causes", content, data | {"notes": notes}, result=explanation, findings=(finding,))


def _question(subject: Subject) -> tuple[Any, str]:
    """The model to ask, and as what."""
    if isinstance(subject.headed, str):
        raise Unsupported(subject.headed)
    model = subject.model if subject.headed is None else subject.headed
    kind, mask = answers.kind_of(model), getattr(subject.tokenizer, "mask_token", None)
    # Without a mask in the text a masked model has nothing to say of it.
    unasked = kind == "mlm" and (not mask or subject.text.count(mask) != 1)
    return (subject.model, "embedding") if unasked else (model, kind)


def _beginning(subject: Subject, notes: list[str]) -> str:
    """The text, or as much of it as is explained."""
    ids = subject.inputs.get("input_ids")
    if ids is None:
        return subject.text
    text = reading.beginning(subject.tokenizer, subject.text, min(int(ids.shape[1]), TOKENS))
    if ids.shape[1] > TOKENS:
        notes.append(f"Of this text the first {TOKENS} tokens were read here.")
    return text


def blocks(result: Explanation) -> list[Block]:
    """Answer, text, graph, baselines, settings, and how far to trust it, for the page."""
    head = f", head {result.head}" if result.head is not None else ""
    trust = "trust" if result.pag.trust().level == "good" else "trust low"
    sentences = [Prose(text, style=trust, shown="page") for text in result.trust]
    side: list[Block] = [
        *([replace(sentences[0], title="How far to trust it"), *sentences[1:]] if sentences else []),
        *(Note(caveat, shown="page") for caveat in CAVEATS),
        _methods(result),
        _settings(result),
    ]
    return [
        Prose(_marked(result), style="answer", shown="page"),
        Prose(_text(result), style="text", shown="page"),
        Columns([[*_sets(result), *_never(result)], [_scores(result)]], even=True, shown="page"),
        Columns([[_graph(result, f"The graph of layer {result.layer}{head}")], side], shown="page"),
        _edges(result),
    ]


def _marked(result: Explanation) -> list[str | Mark]:
    """The headline with its words marked."""
    text = headline(result, lambda word: f"\1named\2{word}\1", lambda answer: f"\1answer\2{answer}\1")
    parts = (part.partition("\2") for part in text.split("\1"))
    return [Mark(content, kind) if mark else kind for kind, mark, content in parts if kind or content]


def _text(result: Explanation) -> list[str | Mark]:
    """All that the model read, as the user wrote it, the set and the answer's place marked."""
    if not result.text:
        return _listed(result)
    kinds = {result.target_node: "target"} | dict.fromkeys((at for one in result.sets for at in one.indices), "equal")
    kinds |= dict.fromkeys(result.indices, "chosen")
    answer = Mark(_plain(result.answer), "target")
    parts: list[str | Mark] = []
    at = 0
    for (start, end), node in sorted((span, node) for node, span in enumerate(result.spans) if span):
        own = Mark(_plain(result.text[start:end]), kinds.get(node, "unit"))
        # A masked language model's answer stands where the mask was.
        parts += [
            _outside(result.text[at:start]),
            answer if result.task == "mlm" and node == result.target_node else own,
        ]
        at = end
    parts.append(_outside(result.text[at:]))
    parts += [" ", answer] if result.task == "next-token" else []
    return parts


def _plain(text: str) -> str:
    return "".join(sign if sign in "\n\t" else printable(sign) for sign in text)


def _outside(text: str) -> str | Mark:
    return Mark(_plain(text), "outside") if text.strip() else _plain(text)


def _listed(result: Explanation) -> list[str | Mark]:
    """What a model of no text read: items in a row."""
    home = {place: node for node, places in enumerate(result.nodes) for place in places}
    kinds = {result.target_node: "target"} | dict.fromkeys(result.indices, "chosen")
    parts: list[str | Mark] = []
    for place, token in enumerate(result.tokens):
        parts += [Mark(_plain(token), kinds.get(home[place], "unit") if place in home else "outside"), " "]
    return parts[:-1]


def _sets(result: Explanation) -> Iterator[Table]:
    """The smallest sets with what becomes of the answer."""
    measure, ranked = result.measure, result.rank > 1
    head = ["removed", f"{measure} before", f"{measure} after", *(["rank before", "rank after"] if ranked else [])]
    head += [] if result.task == "embedding" else ["answer then"]

    def table(sets: Sequence[Removal], caption: str, title: str = "") -> Table:
        rows = [
            [" + ".join(one.words), *change(result.before, one.score)]
            + ([result.rank, one.rank] if ranked else [])
            + [part for part in [after(result, one)] if part]
            for one in sets
        ]
        return Table(head, rows, caption, title=title, shown="page")

    if result.sets:
        yield table(result.sets, result.sets_note[:1].upper() + result.sets_note[1:], "The smallest sets")
        if result.ending and not result.only_ending:
            yield table(result.ending, ENDING)


def _scores(result: Explanation) -> Table:
    """How much each word matters."""
    ranked = sorted(result.scores, key=lambda one: -abs(one.leave_one_out))
    head = ["word", f"{result.measure} without it", "leave-one-out", "mean effect", "sets"]
    rows = [
        [one.word, shown(one.alone.score), effect_of(one.leave_one_out), effect_of(one.mean_effect), one.sets]
        for one in ranked
    ]
    caption = (
        f"Leave-one-out: by how much the {result.measure} falls when the word alone is removed. Mean effect: the same, averaged over all sets "
        "of other words that were asked about with and without it"
    )
    return Table(head, rows, caption, long=True, title="The effect of each word", shown="page")


def _never(result: Explanation) -> Iterator[Note]:
    for reason, words in by_reason(result).items():
        yield Note(never_removed(reason, words), shown="page")


def _graph(result: Explanation, title: str) -> Graph:
    pag = result.pag
    edges = pag.links()
    graph = layout(pag.names, edges, result.indices, result.target_node)
    notes = ["Pick a word to see its edges alone."]
    if pale := len(edges) - graph.strong:
        notes.append(f"{quantity(graph.strong, 'edge')} at the answer and the set in full colour, {pale} more in pale.")
    label = (
        f"Causal{title.removeprefix('The')}: {quantity(pag.n, 'word')} and {quantity(len(edges), 'edge')}, listed below"
    )
    return Graph(
        pag.names, edges, result.indices, result.target_node, label, " ".join(notes), title=title, shown="page"
    )


def _methods(result: Explanation) -> Table:
    head = ["method", "size", "pruned", "calls", "set"]
    caption = "Size: of the set that changes the answer; pruned: without members it does not need; calls: inputs that were asked about"
    return Table(head, list(methods(result)), caption, title="Other ways to choose words", shown="page")


def _settings(result: Explanation) -> Table:
    pag, settings = result.pag, result.settings
    samples = f"{pag.samples}" if pag.samples is not None else ""
    rows = [
        ["layer, heads", f"{result.layer}; {', '.join(map(str, result.heads))}"],
        ["learner", pag.learner.upper()],
        ["samples N, alpha", f"{samples}; {pag.alpha:g}" if pag.alpha is not None else samples],
        ["covariance", str(settings.get("covariance", ""))],
        ["a word is replaced by", SETTLED.get(str(settings.get("replace")), str(settings.get("replace", "")))],
        ["threshold of the cosine", f"{settings['threshold']:g}" if "threshold" in settings else ""],
        ["inputs asked about", f"{result.calls} until the first set, {result.more_calls} for equal sets and single words"],
        ["seconds", f"{result.seconds:.1f}"],
    ]  # fmt: skip
    return Table((), [row for row in rows if row[1]], title="Settings", shown="page")


def _edges(result: Explanation) -> Block:
    """Every edge in letters, for those who do not see the picture."""
    edges = result.pag.edges()
    if not edges:
        return Note("The graph has no edges.", shown="page")
    sure = result.pag.edge_confidence()
    rows = [[str(edge), f"{sure[edge.a, edge.b]:.2f}"] for edge in edges]
    caption = "The least confidence among the tests of the pair"
    unfold = f"{quantity(len(edges), 'edge')} of the graph in letters"
    return Table(["edge", "confidence"], rows, caption, folded=unfold, shown="page")


def html_of(result: Explanation) -> str:
    """A page of its own that needs nothing but itself.

    >>> from heedful.lens.causes import explain
    >>> html_of(explain(text="Water is wet."))[:15]
    '<!doctype html>'
    """
    title = f"Why the model answers {result.answer!r}"
    if result.task == "embedding":
        title = "Which words the embedding depends on"
    elif result.rank > 1:
        title = f"Why {result.answer!r} is answer number {result.rank}"
    return page({"causes": Section("", blocks(result))}, title=title, command="explain")

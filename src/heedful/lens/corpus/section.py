"""How much of each head is counting, as a section of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heedful._errors import InvalidArgument, Unsupported
from heedful.lens.corpus.heads import explain_heads
from heedful.lens.corpus.installed import installed_counts
from heedful.lens.corpus.result import CountedHeads
from heedful.lens.observation import observe
from heedful.report import Figure, Note, Prose, Section, Table
from heedful.report.charts import Axis, Chart, Dots, Line, ticks

if TYPE_CHECKING:
    from heedful.lens.sections import Subject

# Tokens of a long text that are read anew: pairs grow with their square.
TOKENS = 128

# Differences of shares that are called none.
CLEAR = 0.02

INTRODUCTION = (
    "Scores of each head, before the softmax, are regressed on how strongly the two words go together in a corpus (positive PMI: in any order, in "
    "their order, at their very distance) and on how far apart they stand. The control exchanges words of the text for others of it that are "
    "about as frequent: what is then still explained is position, frequency and chance."
)


def section(subject: Subject) -> Section:
    """Shares of every head's scores that counts explain, beside the control, with counts of what is installed."""
    subject.check_words()
    if subject.tokenizer is None:
        raise Unsupported("without a tokenizer there are no words to count")
    seen, notes = subject.observation, []
    longest = max((record.queries_len for record in seen), default=0)
    if longest > TOKENS and (beginning := subject.beginning(TOKENS)):
        notes.append(f"Of this text the first {TOKENS} tokens were read here.")
        seen = observe(subject.model, beginning, keep=("queries", "keys"), tokenizer=subject.tokenizer)
    counts = installed_counts(subject.tokenizer, [token for row in seen.tokens for token in row])
    try:
        result = explain_heads(seen, counts=counts, progress=subject.progress)
    except InvalidArgument as error:
        raise Unsupported(str(error)) from None
    notes.append(
        f"Counted: {counts.tokens:,} tokens of {counts.source}, technical English; {result.counted:.0%} of the {result.pairs} pairs of this text go "
        "together in it. heedful.lens.corpus.explain_heads takes counts of a corpus of yours."
    )
    blocks = [
        Prose(INTRODUCTION, shown="page"),
        Prose(_lines(result), style="verbatim", shown="terminal"),
        Figure(
            [_chart(result)],
            key=("counts and positions", "words exchanged", "positions alone"),
            caption="a dot for each head, lines: means of layers",
            title="How much of a head's scores is explained",
        ),
        *map(Note, notes),
        _table(result),
    ]
    data = result.to_dict() | {"notes": notes}
    return Section("Counting", blocks, data, result=result, plain=_plain(result))


def _plain(result: CountedHeads) -> str:
    """The section in one sentence."""
    best = result.most(1)[0]
    if best.gain < max(CLEAR, result.luck):
        return (
            f"How often words stand together in {result.source} explains no head's scores better than if the words were exchanged for others as frequent: the "
            f"best of {len(result)} heads gains {best.gain:.0%}, as it may by luck."
        )
    return (
        f"Scores of head {best.layer}.{best.head} depend most on how often words stand together in {result.source}: with positions this explains "
        f"{best.together:.0%} of them, {best.chance:.0%} if words are exchanged; of an average head {result.mean('together'):.0%} and "
        f"{result.mean('chance'):.0%}."
    )


def _lines(result: CountedHeads) -> str:
    lines = ["Share of scores that is explained   all  exchanged  symmetric  directed  by distance  position"]
    names = ("together", "chance", "symmetric", "directed", "distance", "position")
    widths = (4, 11, 11, 10, 13, 10)
    rows = [("mean of all heads", [result.mean(name) for name in names])]
    rows += [(f"head {one.layer}.{one.head}", [getattr(one, name) for name in names]) for one in result.most(4)]
    for title, values in rows:
        cells = "".join(f"{value:>{width}.2f}" for value, width in zip(values, widths, strict=True))
        lines.append(f"{title:<35}{cells}")
    return "\n".join(lines)


def _chart(result: CountedHeads) -> Chart:
    layers = sorted({one.layer for one in result})
    tallest = max(max(one.together for one in result) * 1.08, 0.1)
    parts: list[Dots | Line] = []
    for kind, name in enumerate(("together", "chance", "position")):
        shift = 0.5 + 0.2 * (kind - 1)
        parts.append(Dots([(layers.index(one.layer) + shift, getattr(one, name)) for one in result], kind))
        own = [[getattr(one, name) for one in result if one.layer == layer] for layer in layers]
        parts.append(Line([(at + shift, sum(values) / len(values)) for at, values in enumerate(own)], kind))
    marks = [(layers.index(layer) + 0.5, str(layer)) for layer in layers[:: max(1, len(layers) // 16)]]
    x, y = Axis(0, len(layers), marks, "layer"), Axis(0, tallest, ticks(tallest))
    return Chart("Explained shares of scores by layer", x, y, parts, (720, 300))


def _table(result: CountedHeads) -> Table:
    head = ["layer", "head", "all", "exchanged", "gain", "symmetric", "directed", "by distance", "position"]
    names = ("together", "chance", "gain", "symmetric", "directed", "distance", "position")
    rows = [[one.layer, one.head, *(f"{getattr(one, name):.3f}" for name in names)] for one in result]
    caption = "Shares of the variance of scores within rows"
    return Table(head, rows, caption, long=True, title="Every head in figures", shown="page")

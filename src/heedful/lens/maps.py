"""The attention maps of one model reading one text, as a section of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful._result import Result, plain
from heedful._text import cut
from heedful.bridges.words import token_text
from heedful.lens.attention import UNNAMED, AttentionSummary, HeadSummary, TokenPair, heads_of
from heedful.lens.probe import probe
from heedful.lens.roles import ROLES, SINKS
from heedful.report import Block, Finding, Items, Link, Map, Mark, Note, Prose, Section, Table, Text
from heedful.report.maps import Atlas, Layer, Tile

if TYPE_CHECKING:
    from heedful.lens._record import LayerRecord
    from heedful.lens.sections import Subject

# Weights that are worked on at once: 16 MiB of them, and a few times that in float64.
CELLS = 2**22


@dataclass(frozen=True)
class HeadRange(Result):
    """A head whose coefficients are no distribution over the tokens of one text: where they lie, and what rows sum to."""

    layer: int
    head: int
    lowest: float
    highest: float
    total: float
    word: str


@dataclass(frozen=True)
class LayerView:
    """One layer: its heads in figures, what the page shows of it, and why it has no entropy where it has none."""

    heads: tuple[HeadSummary, ...] | tuple[HeadRange, ...]
    layer: Layer
    why_not: str = ""

    @property
    def summarized(self) -> tuple[HeadSummary, ...]:
        return tuple(head for head in self.heads if isinstance(head, HeadSummary))


def section(subject: Subject) -> Section:
    """Reads every layer once and draws its maps; of a batch, the first sequence."""
    seen = subject.observation
    atlas = Atlas([(record.heads, record.queries_len, record.keys_len) for record in seen])
    readings = []
    for done, record in enumerate(seen):
        subject.progress(done, len(seen), "attention")
        readings.append(_read(record, subject, atlas))
    tokens = _names(seen.tokens[0], seen.valid[0], subject.tokenizer)
    readings, untested = _probed(readings, subject)
    summaries = tuple(reading.summarized for reading in readings if reading.summarized)
    summary = AttentionSummary(tuple(tokens), summaries) if summaries else None
    pairs = summary.pairs() if summary else ()
    ranges = [head for reading in readings for head in reading.heads if isinstance(head, HeadRange)]
    notes = [*_notes(readings), *(untested if summary else ())]
    data = {
        "tokens": tokens,
        "layers": summary.to_dict()["layers"] if summary else [],
        "named_heads": summary.named if summary else 0,
        "strongest_pairs": plain(pairs),
        "strongest_neighbours": plain(summary.pairs(neighbours=True) if summary else ()),
        "not_summarized": plain(ranges),
        "notes": notes,
    }
    blocks = [
        Map([reading.layer for reading in readings], atlas, [FIGURES if summary else RANGES, *notes]),
        *([Prose(f"{summary}\n", style="verbatim", shown="terminal")] if summary else []),
        *_pairs(pairs),
        *(Note(note, shown="terminal") for note in notes),
        *_tables(summary, ranges),
    ]
    return Section("Attention maps", blocks, data, result=summary, findings=findings(summary) if summary else ())


RANGES = "Below each map: the head's number, its lowest and its highest coefficient."
FIGURES = (
    "Below each map: the head's number; its role, where a test finds one; its spread (0%: all weight on one token, 100%: evenly on all); "
    "and how many tokens away it attends, on average."
)
CAVEAT = (
    "Roles are tested on 12 English sentences and on repeated random tokens, where the model can read these. One is named where its share of "
    "attention is at least 0.3 (0.5 for a resting place), twice chance, and four standard deviations above heads that attend to random places. "
    "It says where a head attends, not what the model does with it."
)


def findings(summary: AttentionSummary) -> tuple[Finding, ...]:
    """What is worth saying first of the heads, and of pairs of words."""
    heads = [head for layer in summary.layers for head in layer]
    sentences = []
    counts = Counter(role.name for head in heads for role in head.roles)
    if counts:
        resting = sum(counts[name] for name in SINKS)
        others = [f"{name} ({number})" for name, number in counts.most_common() if name not in SINKS]
        parts = [f"{', '.join(others)}"] if others else []
        parts += [f"resting on the first or special tokens ({resting})"] if resting else []
        several = " (a head may have several)" if counts.total() > summary.named else ""
        text = f"{summary.named} of {len(heads)} heads have a role that a test can name{several}: {'; '.join(parts)}."
    else:
        text = f"None of the {len(heads)} heads has a role that a test can name."
    sentences.append(Finding(text, CAVEAT, "attention"))
    # No pair stands out where attention is nearly even.
    pairs = [pair for pair in summary.pairs(3) if pair.weight >= 2 / len(summary.tokens)]
    if pairs:
        shares = ", ".join(f"{cut(str(pair), 40)} ({pair.weight:.2f}, head {pair.layer}.{pair.head})" for pair in pairs)
        sentences.append(
            Finding(
                f"The strongest attention between words that are not neighbours: {shares}.",
                "A large weight need not matter to the output: what it carries may be small.",
                "strongest-pairs",
            )
        )
    return tuple(sentences)


def _probed(readings: Sequence[LayerView], subject: Subject) -> tuple[list[LayerView], tuple[str, ...]]:
    """The readings with what tests beyond this text say of each head, and what could not be tested."""
    if subject.model is None or subject.tokenizer is None or not any(reading.summarized for reading in readings):
        return list(readings), ()
    try:
        probed = probe(subject.model, subject.tokenizer, subject.progress)
    # Models fail by every class there is; the roles that the text itself shows are left.
    except Exception as error:
        return list(readings), (f"Roles beyond this text were not tested: {' '.join(str(error).split()):.200}.",)
    tested = []
    for reading in readings:
        more = probed.layers.get(reading.layer.index, ())
        if len(more) == len(reading.summarized):
            heads = tuple(head.tested(roles) for head, roles in zip(reading.summarized, more, strict=True))
            reading = replace(reading, heads=heads, layer=replace(reading.layer, tiles=[_tile(head) for head in heads]))
        tested.append(reading)
    return tested, probed.notes


def _read(record: LayerRecord, subject: Subject, atlas: Atlas) -> LayerView:
    sides = (subject.observation.query_tokens(record), subject.observation.key_tokens(record))
    rows, columns = (side.valid[0].nonzero().flatten() for side in sides)
    queries, keys = (_names(side.strings[0], side.valid[0], subject.tokenizer) for side in sides)
    special = sides[0].special[0][rows].tolist()
    mask = None
    if record.mask is not None and record.kernel is not None:
        mask = record.mask[0].any(0).expand(record.queries_len, record.keys_len)[rows][:, columns]
    crosses = record.kind == "cross"
    why_not = "looks from one sequence at another, so entropy and distance are not summed up" if crosses else ""
    heads: list[HeadSummary] = []
    ranges: list[HeadRange] = []
    for first, weights in _parts(record):
        part = weights[:, rows][:, :, columns]
        atlas.add(part)
        ranges += _ranges(part, record.index, first, "cross attention" if crosses else "raw coefficients")
        if not why_not:
            try:
                heads += heads_of(part, record.index, queries, special, mask, first)
            except InvalidArgument:
                why_not = "rows of coefficients do not sum to one, so entropy does not apply"
    summaries: tuple[HeadSummary, ...] | tuple[HeadRange, ...] = tuple(ranges) if why_not else tuple(heads)
    return LayerView(
        summaries, Layer(record.index, record.name, queries, keys, [_tile(head) for head in summaries]), why_not
    )


def _notes(readings: Sequence[LayerView]) -> list[str]:
    """Each reason why layers have no entropy, once, with those layers."""
    notes = []
    for why in dict.fromkeys(reading.why_not for reading in readings if reading.why_not):
        places = [str(one.layer.index) for one in readings if one.why_not == why]
        which = f"Layer{'s' if len(places) > 1 else ''} {', '.join(places)}"
        notes.append(f"{'Every layer' if len(places) == len(readings) > 1 else which}: {why}.")
    return notes


def _parts(record: LayerRecord) -> Iterator[tuple[int, Tensor]]:
    """Some heads at a time: the first one's number, and weights `[heads, Q, K]`."""
    step = max(1, CELLS // max(1, record.queries_len * record.keys_len))
    for first in range(0, record.heads, step):
        yield first, record.weights_of(slice(first, first + step), sequence=0).detach().cpu()


def _names(strings: Sequence[str], valid: Tensor, tokenizer: Any) -> list[str]:
    return [token_text(tokenizer, token) for token, counts in zip(strings, valid.tolist(), strict=True) if counts]


def _ranges(weights: Tensor, layer: int, first: int, word: str) -> list[HeadRange]:
    finite = torch.nan_to_num(weights)
    totals = finite.sum(dim=-1, dtype=torch.float64).mean(dim=-1).tolist()
    ends = zip(finite.amin((1, 2)).tolist(), finite.amax((1, 2)).tolist(), totals, strict=True)
    return [HeadRange(layer, first + at, *figures, word) for at, figures in enumerate(ends)]


def _tile(head: HeadSummary | HeadRange) -> Tile:
    start = f"Layer {head.layer}, head {head.head}: "
    if isinstance(head, HeadRange):
        sentence = f"{head.word} from {head.lowest:.3g} to {head.highest:.3g}, rows sum to {head.total:.3g}"
        figures = (f"from {_brief(head.lowest)}", f"to {_brief(head.highest)}")
        return Tile(head.head, head.word, figures, start + sentence)
    roles = (
        "; ".join(
            f"{role.name} ({ROLES[role.name]}): {role.score:.2f} of its attention, chance {role.chance:.2f}"
            for role in head.roles
        )
        or WORDS[head.focus]
    )
    sentence = (
        f"{roles}. Entropy {head.entropy:.2f} nats, {head.normalized_entropy:.0%} of the highest; mean distance "
        f"{head.distance:.1f} tokens"
    )
    cell = (head.strongest.query, head.strongest.key) if head.strongest else (0, 0)
    figures = (f"spread {head.normalized_entropy:.0%}", f"{head.distance:.1f} away")
    return Tile(head.head, head.focus, figures, start + sentence, cell, tuple(role.name for role in head.roles))


WORDS = {"broad": "broad: attends nearly evenly to all tokens", UNNAMED: "no role that a test can name"}


def _brief(value: float) -> str:
    """A number in few signs, for a place that has room for six."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.0f}{unit}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}"


def _pairs(pairs: Sequence[TokenPair]) -> Iterator[Block]:
    """The strongest pairs: a list that opens their maps, and a table for the terminal."""
    if not pairs:
        return
    items: list[Text] = [
        [
            Link(f"{cut(pair.query_token, 60)} \u2192 {cut(pair.key_token, 60)}", f"head-{pair.layer}-{pair.head}", (pair.query, pair.key)),
            " ",
            Mark(f"{pair.weight:.2f}", "weight"),
            Mark(f"layer {pair.layer}, head {pair.head}", "where"),
        ]
        for pair in pairs
    ]  # fmt: skip
    caption = "Neighbours and special tokens are left out."
    yield Note(caption, title="Strongest pairs", name="strongest-pairs", shown="page")
    yield Items(items, style="pairs", shown="page")
    rows = [[str(pair), f"{pair.weight:.2f}", f"layer {pair.layer}, head {pair.head}"] for pair in pairs]
    width = max(len(cut(row[0], 60)) for row in rows)
    lines = ["The strongest pairs of tokens, neighbours and special tokens left out:"]
    lines += [f"  {cut(pair, 60):<{width}}  {weight}  {where}" for pair, weight, where in rows]
    yield Prose("\n".join(lines), style="verbatim", shown="terminal")


TABLE = (
    "Roles with their share of attention and, in brackets, that of random heads. Entropy in nats, distance in tokens, then the share of "
    "attention on each, and the strongest pair of words that are not neighbours"
)


def _role(head: HeadSummary) -> str:
    return ", ".join(f"{role.name}: {role.score:.2f} ({role.chance:.2f})" for role in head.roles) or head.focus


def _tables(summary: AttentionSummary | None, ranges: Sequence[HeadRange]) -> Iterator[Table]:
    """Every head in figures, for those who would rather read or sort than look."""
    if summary is not None:
        shares = ("itself", "previous", "next", "first", "special")
        head = ["layer", "head", "role: share (chance)", "entropy", "of highest", "distance", *shares, "strongest pair"]
        rows = [
            [one.layer, one.head, _role(one)]
            + [f"{one.entropy:.3f}", f"{one.normalized_entropy:.0%}", f"{one.distance:.2f}"]
            + [f"{getattr(one, name):.3f}" for name in shares]
            + [cut(str(one.farther or ""), 40)]
            for heads in summary.layers
            for one in heads
        ]
        yield Table(head, rows, TABLE, long=True, title="Every head in figures", shown="page")
    if ranges:
        head = ["layer", "head", "kind", "lowest", "highest", "row sum"]
        rows = [
            [one.layer, one.head, one.word, f"{one.lowest:.4g}", f"{one.highest:.4g}", f"{one.total:.4g}"]
            for one in ranges
        ]
        caption = "Coefficients that are no distribution over the tokens of one text"
        yield Table(head, rows, caption, long=True, title="" if summary else "Every head in figures", shown="page")

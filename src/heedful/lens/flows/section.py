"""Attention between kinds of tokens on a page: a section of the report, or a page of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from heedful._errors import InvalidArgument, Unsupported
from heedful._text import cut, quantity
from heedful.bridges.modalities import picture_of
from heedful.lens.flows.measure import flow, received_by
from heedful.lens.flows.result import Flow, HeadFlow
from heedful.report import Block, Figure, Finding, Note, Prose, Section, Table
from heedful.report.charts import Axis, Band, Chart, Line, Patches
from heedful.report.image import base64, png
from heedful.report.page import page

if TYPE_CHECKING:
    from heedful.lens.sections import Subject

# Heads in the table, and over the picture.
RANKED, DRAWN = 12, 6
# Directions that are drawn.
SMALL = 12
# Light enough for colour to show on.
GRAY = bytes(96 + 159 * level // 255 for level in range(256) for _ in range(3))

INTRODUCTION = (
    "How much attention goes from tokens of one kind to tokens of another. Even attention, the same to every token that may be seen, depends on how many "
    "tokens there are of each kind: compare with it, not with zero."
)
CAVEAT = "Attention says where a head looks, not whether that matters: heedful.lens.flows.causal_check zeroes heads and measures what is lost."


def section(subject: Subject) -> Section:
    """Shares between kinds by layer and head, beside those of even attention."""
    if not subject.inputs:
        raise Unsupported("there are no inputs to run the model on again; try heedful.lens.flow")
    try:
        result = flow(subject.model, dict(subject.inputs), tokenizer=subject.tokenizer)
    except InvalidArgument as error:
        raise Unsupported(str(error)) from None
    except Unsupported as error:
        if "groups" not in str(error):
            raise
        hint = "; heedful flow MODEL --groups question=... --groups context=... compares groups of words"
        raise Unsupported(
            f"{type(subject.model).__name__} reads tokens of one kind{hint if subject.text else ''}"
        ) from None
    over = over_picture(result, subject.model, subject.inputs)
    data = result.to_dict() | {"heads": [one.to_dict() for one in (result.heads() if result.layers else ())]}
    content = [Prose(str(result), style="verbatim", shown="terminal"), *blocks(result, over)]
    finding = Finding(headline(result), CAVEAT, "flow")
    return Section("Between kinds of tokens", content, data, result=result, findings=(finding,))


def headline(result: Flow) -> str:
    """What is worth saying first."""
    if not result.layers:
        best = max(result.crossings, key=lambda one: one.mean)
        mean = sum(one.mean for one in result.crossings) / len(result.crossings)
        return (
            f"Cross-attention makes {mean:.0%} of what attention adds to a token, on average over {quantity(len(result.crossings), 'layer')}; most "
            f"in {best.layer} ({best.queries} to {best.keys}, {best.mean:.0%})."
        )
    lifts = [(lift, one.layer) for lift, one in zip(result.lift, result.layers, strict=True) if not math.isnan(lift)]
    kinds = " and ".join(result.names) if len(result.names) == 2 else ", ".join(result.names)
    if not lifts:
        return f"Of {kinds}, one kind of tokens alone is there."
    most, least = max(lifts), min(lifts)
    own = result.per_layer[most[1]]
    return (
        f"Layer {most[1]} sends most attention between {kinds}: {own:.0%} of its attention, {most[0]:.1f} times what even attention would give; least in layer "
        f"{least[1]} ({least[0]:.1f} times)."
    )


def blocks(result: Flow, over: Sequence[Patches] = ()) -> list[Block]:
    """Charts and tables for the page."""
    if not result.layers:
        rows = [
            [one.layer, f"{one.queries} \u2192 {one.keys}", f"{one.mean:.3f}", _bounds(one.interval)]
            for one in result.crossings
        ]
        head = ["block", "direction", "share of the update", "95 %"]
        return [
            Prose("Kinds meet in cross-attention. What it adds to a token is compared with what self-attention adds, by the norm.", shown="page"),
            Figure([_crossed(result)], shown="page"),
            Table(head, rows, "Mean over tokens and samples", shown="page"),
        ]  # fmt: skip
    content: list[Block] = [
        Prose(INTRODUCTION, shown="page"),
        Prose(headline(result), style="answer", shown="page"),
        Figure([chart(result)], title="By layer", shown="page"),
        Figure(
            [_direction(result, *pair) for pair in result.pairs[:SMALL]],
            key=("share of the attention of these queries", "even attention"),
            title="Each direction by layer",
            shown="page",
        ),
        _matrix(result),
    ]
    if over:
        caption = "What each patch is given by the text, in the heads that send most from text to picture; in full colour from three times the mean on"
        content += [Note(caption, title="Over the picture", shown="page"), Figure(list(over), shown="page")]
    if result.mode != "flow":
        content.append(_heads(result))
    return [*content, *(Note(note, shown="page") for note in (*result.notes, CAVEAT))]


def _bounds(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"


def _arrow(name: str) -> str:
    return name.replace("->", "\u2192")


def chart(result: Flow) -> Chart:
    """Shares by layer: all that goes between kinds, and that of even attention."""
    at = [one.layer for one in result.layers]
    own = list(zip(at, result.per_layer, strict=True))
    parts: list[Line | Band] = []
    if all(result.intervals):
        ends = [one for one in result.intervals if one]
        upper, lower = ([(x, one[side]) for x, one in zip(at, ends, strict=True)] for side in (1, 0))
        parts.append(Band(upper, lower))
    even = list(zip(at, result.chance, strict=True))
    parts += [Line(_long(own), 0, "between"), Line(_long(even), 1, "even")]
    return Chart(
        f"Share of attention between kinds by layer: {headline(result)}", _layers(at), SHARE, parts, (680, 300)
    )


def _direction(result: Flow, queries: str, keys: str) -> Chart:
    at = [one.layer for one in result.layers]
    own, even = result.direction(queries, keys), result.direction_chance(queries, keys)
    lines = [
        Line(_long([point for point in zip(at, shares, strict=True) if not math.isnan(point[1])]), colour)
        for colour, shares in enumerate((own, even))
    ]
    name = f"{queries} \u2192 {keys}"
    there = [share for share in own if not math.isnan(share)]
    words = f"{there[0]:.0%} in the first layer, {there[-1]:.0%} in the last" if there else "not there"
    ends = [(layer, str(layer)) for layer in dict.fromkeys((at[0], at[-1]))]
    small = Axis(0, 1, [(0.0, ""), (0.5, ""), (1.0, "")])
    parts = [line for line in lines if line.points]
    return Chart(f"{name}: {words}", Axis(0, _layers(at).high, ends), small, parts, (220, 130), cut(name, 34))


SHARE = Axis(0, 1, [(mark / 4, f"{mark / 4:g}") for mark in range(5)], "share")


def _layers(at: Sequence[int]) -> Axis:
    step = max(1, math.ceil(len(at) / 16))
    return Axis(0, max(at[-1], 0.4), [(layer, str(layer)) for layer in at[::step]], "layer")


def _long(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A single point as a line that can be seen."""
    return [(0.0, points[0][1]), (0.4, points[0][1])] if len(points) == 1 else list(points)


def _crossed(result: Flow) -> Chart:
    pairs = dict.fromkeys((one.queries, one.keys) for one in result.crossings)
    parts = []
    for colour, pair in enumerate(pairs):
        own = [one.mean for one in result.crossings if (one.queries, one.keys) == pair]
        parts.append(
            Line(
                _long([(float(at), share) for at, share in enumerate(own)]),
                colour,
                cut(f"{pair[0]} \u2192 {pair[1]}", 16),
            )
        )
    last = max(part.points[-1][0] for part in parts)
    x = Axis(0, last, [(at, str(at)) for at in range(int(last) + 1)], "layer of cross-attention")
    return Chart(headline(result), x, SHARE, parts, (680, 300))


def _matrix(result: Flow) -> Table:
    """Where the attention of each kind goes, mean over layers."""
    rows: list[list[Any]] = []
    counts = result.counts.double().mean(0).tolist()
    for p, name in enumerate(result.names):
        own, even = (
            [_mean(part(name, key)) for key in result.names] for part in (result.direction, result.direction_chance)
        )
        cells = ["" if math.isnan(a) else f"{a:.2f} ({b:.2f})" for a, b in zip(own, even, strict=True)]
        rows.append([name, f"{counts[p]:.0f}", *cells])
    head = ["queries", "tokens", *(f"to {name}" for name in result.names)]
    caption = "The share of each kind's attention, mean over layers and heads; in brackets, that of even attention"
    return Table(head, rows, caption, title="Where each kind looks", shown="page")


def _mean(shares: Sequence[float]) -> float:
    there = [share for share in shares if not math.isnan(share)]
    return sum(there) / len(there) if there else math.nan


def _heads(result: Flow) -> Table:
    rows = [
        [one.layer, one.head, f"{one.imf:.2f}", f"{one.chance:.2f}", f"{one.lift:.1f}", _arrow(one.direction)]
        for one in result.heads(RANKED)
        if not math.isnan(one.lift)
    ]
    head = ["layer", "head", "between kinds", "even", "lift", "most of it"]
    return Table(
        head,
        rows,
        "The heads with the largest share between kinds, against even attention",
        title="Heads",
        shown="page",
    )


def over_picture(result: Flow, model: Any, inputs: Mapping[str, Any], count: int = DRAWN) -> list[Patches]:
    """The heads that send most from text to a picture, each over the patches; none where there is no picture in order."""
    if not {"text", "image"} <= set(result.names) or not result.layers or result.mode == "flow":
        return []
    text, image = (result.names.index(name) for name in ("text", "image"))
    drawn = picture_of(model, inputs, int(result.counts[0, image]))
    if drawn is None:
        return []
    rows, columns, pixels = drawn
    ranked = sorted(_sending(result, text, image), key=lambda pair: -pair[0])[:count]
    given, ids = received_by(model, dict(inputs), [(one.layer, one.head) for _, one in ranked], queries="text")
    places = (ids[0] == image).nonzero().flatten()
    ground = (
        "" if pixels is None else f"data:image/png;base64,{base64(png((255 * pixels).round().to(torch.uint8), GRAY))}"
    )
    pictures = []
    for (share, one), weights in zip(ranked, given, strict=True):
        values = weights[0][places].reshape(rows, columns)
        best = int(values.argmax())
        label = (
            f"Layer {one.layer}, head {one.head}: text gives {share:.0%} of its attention to the picture, most to the patch in row {best // columns + 1}, "
            f"column {best % columns + 1}"
        )
        pictures.append(
            Patches(label, values.tolist(), ground, f"layer {one.layer}, head {one.head}: {share:.0%} to the picture")
        )
    return pictures


def _sending(result: Flow, text: int, image: int) -> Iterator[tuple[float, HeadFlow]]:
    """Each head with the share of the text's attention that it sends to the picture."""
    for one in result.heads():
        share = float(result.layers[one.layer].mass[0, one.head, text, image])
        if not math.isnan(share):
            yield share, one


def html_of(
    result: Flow, over: Sequence[Patches] = (), *, title: str = "Attention between kinds of tokens", quote: str = ""
) -> str:
    """A page of its own that needs nothing but itself."""
    return page({"flow": Section("", blocks(result, over))}, title=title, heading=title, quote=quote, command="flow")

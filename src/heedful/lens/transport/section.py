"""How the tokens of one text move from layer to layer, as a section of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from heedful._errors import InvalidArgument, Unsupported
from heedful._text import quantity
from heedful.bridges.words import token_text
from heedful.lens.transport.layers import between_layers
from heedful.lens.transport.paths import flattened
from heedful.lens.transport.result import LayerMove, LayerTransport
from heedful.report import Figure, Note, Prose, Section, Table
from heedful.report.charts import Axis, Chart, Dots, Line, Point, ticks

if TYPE_CHECKING:
    from heedful.lens.sections import Subject

# Tokens of a long text that are followed: plans take the cube of their number.
TOKENS = 128

# Ways that are drawn.
WAYS = 48

# Shares of tokens that differ by less are called equal.
CLEAR = 0.05

INTRODUCTION = (
    "Each layer moves the state of every token. The cheapest plan between the places before a layer and those behind it says which exchange of "
    "destinations would shorten the moves, in the sum of squares: optimality is 1 where there is none."
)

WAYS_MEAN = "A line for each token, from what the first layer reads to what the last one returns, where its name stands if there is room."


def section(subject: Subject) -> Section:
    """The way of each token, its straightness, and the optimality of every layer beside what chance reaches."""
    if not subject.inputs:
        raise Unsupported("there is nothing to run the model on again")
    inputs = dict(subject.inputs)
    longest = max((record.queries_len for record in subject.observation), default=0)
    notes = []
    if longest > TOKENS and (beginning := subject.beginning(TOKENS)):
        inputs = beginning
        notes.append(f"Of this text the first {TOKENS} tokens were followed.")
    try:
        result = between_layers(subject.model, inputs, tokenizer=subject.tokenizer)
    except InvalidArgument as error:
        raise Unsupported(str(error)) from None
    names = [token_text(subject.tokenizer, token) if subject.tokenizer else token for token in result.tokens]
    if result.left_out:
        notes.append(
            f"Left out, for their states are more than ten times as long as the median: {' '.join(result.left_out)}."
        )
    blocks = [
        Prose(INTRODUCTION, shown="page"),
        Prose(_optimal(result)),
        Figure([_travelled(result)], title="How far tokens travel, and how far they get"),
        Figure([_ways(result, names)], title="The way of each token"),
        Note(WAYS_MEAN, shown="page"),
        _table(result),
        *map(Note, notes),
    ]
    data = result.to_dict() | {"notes": notes}
    return Section("How tokens move", blocks, data, result=result, plain=_plain(result))


def _plain(result: LayerTransport) -> str:
    """The section in one sentence."""
    if len(result) == 1:
        return f"Its one layer moves the state of a token by {result.whole.length:.0%} of its length."
    times, angles = 1 / max(result.straightness, 1e-9), 1 / result.right_angles
    how = "as far as if each moved it in a direction of its own"
    if times > 1.1 * angles:
        how = f"later layers undo part of what earlier ones did (directions of their own would make it {angles:.1f} times)"
    elif times < angles / 1.1:
        how = f"layers move it on in similar directions (directions of their own would make it {angles:.1f} times)"
    return f"Through {len(result)} layers the state of a token travels {times:.1f} times the straight line from its start to its end: {how}."


def _optimal(result: LayerTransport) -> str:
    """What optimality says here, and how much of it chance says too."""
    whole, count = result.whole, len(result.tokens)
    moved = round((1 - whole.matching) * count)
    ends = "No exchange of ends between tokens would shorten the way"
    if moved:
        ends = f"With {moved} of the {count} ends given to other tokens the way would be shorter"
    first = (
        f"{ends}: from the first layer to the last optimality is {whole.optimality:.3f}, and {whole.centred_optimality:.3f} without the shift "
        f"that all tokens have in common ({whole.common:.0%} of the squared moves). A random pairing of the same starts and ends has "
        f"{whole.centred_baseline:.3f}."
    )
    fitted = [at for at, move in enumerate(result.moves) if move.matching - move.exchanged_matching > CLEAR]
    if not fitted:
        least = _least(result.moves)
        return (
            f"{first} This is no achievement of the model: the same moves, given to other tokens at random, have {least:.3f}{'' if least == 1 else ' or more'} "
            f"in every layer, since {count} tokens in {result.trajectory.shape[-1]} dimensions lie far apart against their moves."
        )
    at = max(fitted, key=lambda at: result.moves[at].matching - result.moves[at].exchanged_matching)
    move = result.moves[at]
    return (
        f"{first} In {quantity(len(fitted), 'layer')} of {len(result)} the moves suit their tokens: in layer {at} {move.matching:.0%} of the tokens "
        f"are where the cheapest plan sends them, and {move.exchanged_matching:.0%} if the same moves are given to other tokens at random."
    )


def _least(moves: tuple[LayerMove, ...]) -> float:
    """The least share of exchanged moves, rounded down: "or more" shall hold."""
    return float(np.floor(1000 * min(move.exchanged for move in moves) + 1e-6) / 1000)


def _table(result: LayerTransport) -> Table:
    head = ["layer", "move / length", "in common", "optimality", "centred", "exchanged", "random pairing", "matching"]
    rows = []
    for at, move in enumerate((*result.moves, result.whole)):
        figures = (move.optimality, move.centred_optimality, move.exchanged, move.centred_baseline, move.matching)
        name = str(at) if at < len(result) else "all"
        rows.append([name, f"{move.length:.2f}", f"{move.common:.0%}", *(f"{figure:.3f}" for figure in figures)])
    caption = (
        "The median move by the length of the state; the share of the squared moves that all tokens have in common; optimality, and without "
        "that share: of the layer, of its moves exchanged at random, of a random pairing; share of tokens that the cheapest plan leaves "
        "where they are"
    )
    return Table(head, rows, caption)


def _travelled(result: LayerTransport) -> Chart:
    """The way so far against the distance from the start, before each layer and after the last."""
    parts = [
        Line(list(enumerate(result.travelled)), 0, "travelled"),
        Line(list(enumerate(result.distance)), 1, "distance"),
    ]
    tallest = max(result.travelled[-1], 1e-9) * 1.05
    marks = [(at, str(at)) for at in range(0, len(result) + 1, max(1, len(result) // 12))]
    label = f"Mean way of a token and its distance from the start, over {quantity(len(result), 'layer')}"
    return Chart(
        label,
        Axis(0, len(result), marks, "layers passed"),
        Axis(0, tallest, ticks(tallest), "length"),
        parts,
        (720, 260),
    )


def _ways(result: LayerTransport, names: list[str]) -> Chart:
    """Tokens through the layers, in the two directions in which they spread most."""
    flat, share = flattened(result.trajectory)
    count = flat.shape[1]
    drawn = np.unique(np.linspace(0, count - 1, min(count, WAYS)).astype(int))
    shown = flat[:, drawn]
    low, high = shown.min((0, 1)), shown.max((0, 1))
    wide, tall = 720, 440
    # One scale for both axes, with room for names.
    scale = max((high[0] - low[0]) / (wide - 190), (high[1] - low[1]) / (tall - 96), 1e-9)
    middle = (low + high) / 2
    across, up = scale * (wide - 64) / 2, scale * (tall - 56) / 2
    parts: list[Line | Dots | Point] = [Line([tuple(place) for place in flat[:, at].tolist()], 0) for at in drawn]
    parts.append(Dots([tuple(place) for place in flat[0, drawn].tolist()], 2))
    written: list[tuple[float, float, float]] = []  # from, to and height of a name
    for at in drawn:
        x, y = flat[-1, at].tolist()
        left, width = x < middle[0], 7 * scale * (len(names[at]) + 2)
        begin, end = (x - width, x) if left else (x, x + width)
        free = all(end < other[0] or begin > other[1] or abs(y - other[2]) > 13 * scale for other in written)
        written += [(begin, end, y)] if free else []
        parts.append(Point(x, y, names[at] if free else "", left=left))
    return Chart(
        f"The ways of {quantity(len(drawn), 'token')} through the layers",
        Axis(
            middle[0] - across,
            middle[0] + across,
            (),
            f"two directions that hold {share:.0%} of the spread of all states",
        ),
        Axis(middle[1] - up, middle[1] + up),
        parts,
        (wide, tall),
    )

"""The graph over tokens as a picture: one layout, drawn by matplotlib or written as inline SVG.

Tokens stand in a column in reading order, each in a box, edges are arcs at their right. A column needs no crossing search, keeps the
text readable from top to bottom, has room for long words, and fits a telephone. Every arc leaves and arrives level, at a port of its
own, so that its end mark can be read. Boxes are all of one height, whatever the number of arcs, which is no measure of importance: where
ports need more room they stand on a thin rail beside the box. Ports are ordered so that arcs of one token
never cross one another. A dense graph shows the edges that matter strongly and the others as pale lines without marks.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np

from heedful._plot import Axes, axes
from heedful._text import quantity
from heedful.report.charts import element

# An edge: its upper and its lower node, and the marks at them: `-`, `>` or `o`.
Edge = tuple[int, int, str, str]
TAIL, ARROW, CIRCLE = "-", ">", "o"

# Pixels: between ports, of a box, between boxes and rails, around everything, of an end mark, of arcs.
PORT, ROW, GAP, EDGE, LEAD, REACH = 8.0, 20.0, 4.0, 6.0, 11.0, 250.0
FONT = 12.5
WIDEST = 164.0
# Arcs that are drawn at all; a page with more is slow, and the pale ones are a gray plane anyway.
ARCS = 1500

COLOURS = {
    "ink": "#1d2129", "soft": "#5f6672", "line": "#d5d1c6", "paper": "#ffffff", "raised": "#f4f2ec",
    "warm": "#f0c594", "directed": "#14508c", "latent": "#b0410e",
}  # fmt: skip
# A box by its role: its colour, that of its border, that of its text.
FILLS = {"": ("raised", "line", "ink"), "chosen": ("warm", "ink", "ink"), "target": ("ink", "ink", "paper")}


@dataclass(frozen=True)
class Box:
    """A token: its place among the nodes, its label, where its box and the rail of its ports begin and how high they are."""

    node: int
    label: str
    name: str
    top: float
    height: float
    role: str  # "", "target" or "chosen"
    rail: tuple[float, float]

    @property
    def middle(self) -> float:
        return self.top + self.height / 2


@dataclass(frozen=True)
class Arc:
    """An edge between the upper node `a` and the lower node `b`: its marks, its ports' heights, how far it reaches."""

    a: int
    b: int
    at_a: str
    at_b: str
    y_a: float
    y_b: float
    reach: float
    strong: bool

    @property
    def kind(self) -> str:
        return kind_of(self.at_a, self.at_b)


@dataclass(frozen=True)
class Layout:
    """Where everything is, in pixels, y downwards; `column` is the right side of the boxes."""

    width: float
    height: float
    column: float
    boxes: tuple[Box, ...]
    arcs: tuple[Arc, ...]
    undrawn: int

    @property
    def strong(self) -> int:
        return sum(arc.strong for arc in self.arcs)

    @property
    def paleness(self) -> float:
        """The opacity of arcs in the background: the more there are, the paler."""
        return max(0.08, min(0.5, 20 / max(1, len(self.arcs) - self.strong)))


def layout(
    names: Sequence[str], edges: Sequence[Edge], highlight: Collection[int] = (), target: int | None = None
) -> Layout:
    """Places the tokens of a graph and its edges.

    Args:
        names: the nodes, from top to bottom.
        edges: each with its upper node first.
        highlight: nodes of the explaining set.
        target: the node whose answer is explained.

    >>> graph = layout("abc", [(0, 1, "o", ">"), (1, 2, "-", ">")])
    >>> [box.label for box in graph.boxes], [arc.kind for arc in graph.arcs]
    (['a', 'b', 'c'], ['open', 'directed'])
    """
    names = [" ".join(str(name).split()) or repr(str(name)) for name in names]
    count, chosen = len(names), set(highlight)
    marks = {(a, b): (at_a, at_b) for a, b, at_a, at_b in edges}

    def worth(pair: tuple[int, int]) -> tuple[int, int]:
        return _tier(pair, chosen, target), marks[pair].count(CIRCLE)

    ranked = sorted(marks, key=lambda pair: (*worth(pair), pair[1] - pair[0], pair[0]))
    strong = set(ranked[: _readable([worth(pair) for pair in ranked], count)])
    arcs_shown = ranked[:ARCS]
    column = EDGE + min(WIDEST, max((wide(name) for name in names), default=0.0) + 14)
    ports = _ports(count, strong)
    boxes, top = [], EDGE
    for node, name in enumerate(names):
        room = max(ROW, _apart(ports[node]) * len(ports[node]) + 6)
        role = "chosen" if node in highlight else "target" if node == target else ""
        label = fitting(name, column - EDGE - 12)
        boxes.append(Box(node, label, name, top + (room - ROW) / 2, ROW, role, (top, room)))
        top += room + GAP
    places = {(node, edge): boxes[node].middle + _apart(own) * (at - (len(own) - 1) / 2)
              for node, own in enumerate(ports) for at, edge in enumerate(own)}  # fmt: skip
    pale = _ports(count, set(arcs_shown) - strong)
    for node, own in enumerate(pale):
        for at, edge in enumerate(own):
            start, room = boxes[node].rail
            places[node, edge] = start + room * (at + 1) / (len(own) + 1)
    longest = max((places[b, (a, b)] - places[a, (a, b)] for a, b in arcs_shown), default=1.0)
    arcs = []
    for a, b in sorted(arcs_shown):
        span = places[b, (a, b)] - places[a, (a, b)]
        # Long arcs reach further, but not in proportion: short ones must still be seen as arcs.
        reach = 16 + (REACH - 16) * (span / max(longest, 8 * ROW)) ** 0.75
        ends = places[a, (a, b)], places[b, (a, b)]
        arcs.append(Arc(a, b, *marks[a, b], *ends, reach, (a, b) in strong))
    across = column + LEAD + 0.75 * max((arc.reach for arc in arcs), default=0.0) + EDGE
    return Layout(
        max(across, column + 90), top - GAP + EDGE, column, tuple(boxes), tuple(arcs), len(ranked) - len(arcs_shown)
    )


def _tier(pair: tuple[int, int], chosen: set[int], target: int | None) -> int:
    """0 between target and explaining set, 1 at the target, 2 at the set, 3 elsewhere."""
    core = chosen | ({target} if target is not None else set())
    if core.issuperset(pair):
        return 0
    return 1 if target in pair else 2 if chosen.intersection(pair) else 3


def _readable(worths: list[tuple[int, int]], count: int) -> int:
    """How many of the ranked edges are drawn strongly: whole groups, as long as they stay readable together."""
    most = max(28, 3 * count // 2)
    ends = [at for at, (one, other) in enumerate(pairwise(worths), 1) if one != other] + [len(worths)]
    core = sum(tier == 0 for tier, _ in worths)
    # Without a target or set any first group may be too large; its nearest edges are shown then.
    return max([core, *(end for end in ends if end <= most)]) or min(most, len(worths))


def _ports(count: int, edges: Collection[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """For each node its edges from top to bottom: to nodes above, near ones first; to nodes below, far ones first."""
    own: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for edge in edges:
        for node in edge:
            own[node].append(edge)
    return [
        sorted((e for e in edges if e[1] == node), key=lambda e: -e[0])
        + sorted((e for e in edges if e[0] == node), key=lambda e: -e[1])
        for node, edges in enumerate(own)
    ]


def _apart(ports: Collection[Any]) -> float:
    """Pixels between ports: a little fewer where there are many."""
    return min(PORT, max(6.6, 80 / max(1, len(ports))))


def wide(text: str) -> float:
    """About how many pixels a text takes, rather too many than too few."""
    return FONT * sum(_em(sign) for sign in text)


def _em(sign: str) -> float:
    if unicodedata.east_asian_width(sign) in "WF":
        return 1.0
    if sign in "mwMW@%\u2026":
        return 1.0
    return 0.42 if sign in "fijlrt.,;:'!|()[] " else 0.72 if sign.isupper() else 0.64


def fitting(text: str, room: float) -> str:
    """A text cut to so many pixels."""
    if wide(text) <= room:
        return text
    while text and wide(text) + 0.56 * FONT > room:
        text = text[:-1]
    return text + "\u2026"


def plot(
    names: Sequence[str],
    edges: Sequence[Edge],
    ax: Axes | None = None,
    highlight: Collection[int] = (),
    target: int | None = None,
    legend: bool = True,
) -> Axes:
    """Draws a graph with matplotlib; new axes are as large as the graph needs.

    >>> ax = plot("ab", [(0, 1, "-", ">")])
    >>> [text.get_text() for text in ax.texts][:2]
    ['a', 'b']
    """
    graph = layout(names, edges, highlight, target)
    high = graph.height + (46 if legend else 0)
    across = max(graph.width, 300 if legend else 0)
    ax = axes(ax, size=(across / 72, high / 72))
    from matplotlib.patches import FancyBboxPatch, PathPatch
    from matplotlib.path import Path

    for arc in sorted(graph.arcs, key=lambda one: one.strong):
        start, far = graph.column + (LEAD if arc.strong else 0), graph.column + LEAD + arc.reach
        points = [(graph.column, arc.y_a), (start, arc.y_a), (far, arc.y_a), (far, arc.y_b), (start, arc.y_b),
                  (graph.column, arc.y_b)]  # fmt: skip
        path = Path(points, [Path.MOVETO, Path.LINETO, Path.CURVE4, Path.CURVE4, Path.CURVE4, Path.LINETO])
        colour, dashes = look(arc.at_a, arc.at_b)
        alpha, line = (1.0, 1.4) if arc.strong else (graph.paleness, 0.6)
        ax.add_patch(PathPatch(path, fc="none", ec=colour, lw=line, alpha=alpha, ls=dashes if arc.strong else "-"))
        if arc.strong:
            for mark, y in ((arc.at_a, arc.y_a), (arc.at_b, arc.y_b)):
                end_mark(ax, mark, (graph.column + 0.5, y), (graph.column + 9, y), colour)
    for box in graph.boxes:
        face, edge, text = (COLOURS[name] for name in FILLS[box.role])
        ax.add_patch(FancyBboxPatch((EDGE, box.top), graph.column - EDGE, box.height,
                                    boxstyle="round,pad=0,rounding_size=4", fc=face, ec=edge, lw=0.8))  # fmt: skip
        if box.rail[1] > box.height:
            ax.plot([graph.column] * 2, [box.rail[0], sum(box.rail)], color=edge, lw=0.8, zorder=1)
        # A dollar sign would begin mathematics.
        ax.text(
            graph.column - 6, box.middle, box.label, ha="right", va="center", fontsize=8.5, color=text, parse_math=False
        )
    if legend:
        key_on(ax, [(EDGE + 140 * (at % 2), graph.height + 12 + 18 * (at // 2)) for at in range(len(KEY))])
    ax.set(xlim=(0, across), ylim=(high, 0), aspect="equal")
    ax.axis("off")
    return ax


def kind_of(left: str, right: str) -> str:
    """latent (`<->`), directed (`->` or `<-`), or open, with a circle or two tails."""
    if left == right == ARROW:
        return "latent"
    return "directed" if {left, right} == {ARROW, TAIL} else "open"


def look(left: str, right: str) -> tuple[str, Any]:
    """The colour and the dashes of an edge by its marks."""
    if kind_of(left, right) == "latent":
        return COLOURS["latent"], (0, (4, 2))
    return COLOURS["directed" if kind_of(left, right) == "directed" else "soft"], "-"


def end_mark(ax: Axes, mark: str, tip: Any, towards: Any, colour: str) -> None:
    """An end mark with its tip at the border of a box, on the line to the other end."""
    from matplotlib.patches import Circle, Polygon

    way = np.asarray(towards, float) - tip
    way = way / max(float(np.linalg.norm(way)), 1e-9)
    if mark == ARROW:
        side = np.array([-way[1], way[0]])
        wings = [tip, tip + 8 * way + 3.4 * side, tip + 8 * way - 3.4 * side]
        ax.add_patch(Polygon(wings, fc=colour, ec="none", zorder=3))
    elif mark == CIRCLE:
        ax.add_patch(Circle(tuple(tip + 3.4 * way), 2.9, fc=COLOURS["paper"], ec=colour, lw=1.1, zorder=3))


# Marks at both ends, and what they mean.
KEY = (
    (TAIL, ARROW, "leads to"),
    (CIRCLE, ARROW, "may lead to"),
    (CIRCLE, CIRCLE, "direction open"),
    (ARROW, ARROW, "hidden common cause"),
)


def key_on(ax: Axes, places: Sequence[tuple[float, float]]) -> None:
    """What marks mean, each at its place."""
    for (x, y), (left, right, meaning) in zip(places, KEY, strict=True):
        colour, dashes = look(left, right)
        ax.plot([x, x + 34], [y, y], color=colour, lw=1.4, ls=dashes, zorder=1)
        end_mark(ax, left, (x, y), (x + 34, y), colour)
        end_mark(ax, right, (x + 34, y), (x, y), colour)
        ax.text(x + 39, y, meaning, va="center", fontsize=8, color=COLOURS["soft"])


def svg(graph: Layout, label: str = "") -> str:
    """The same picture as inline SVG in the colours of the page around it; `graph.js` lets a reader pick a token.

    >>> svg(layout("ab", [(0, 1, "-", ">")])).count("<rect")
    2
    """
    column = graph.column
    parts = []
    for arc in sorted(graph.arcs, key=lambda one: one.strong):
        lead, far = column + (LEAD if arc.strong else 0), column + LEAD + arc.reach
        line = f"M{column:.0f} {arc.y_a:.1f}H{lead:.0f}C{far:.0f} {arc.y_a:.1f} {far:.0f} {arc.y_b:.1f} {lead:.0f} {arc.y_b:.1f}H{column:.0f}"
        kind, ends = f"arc {arc.kind}{' strong' if arc.strong else ''}", f"{arc.a} {arc.b} {arc.at_a} {arc.at_b}"
        parts.append(element("path", class_=kind, data_ends=ends, d=line))
    for arc in graph.arcs:
        if arc.strong:
            shapes = _shape(arc.at_a, column, arc.y_a) + _shape(arc.at_b, column, arc.y_b)
            parts.append(element("g", shapes, class_=f"marks {arc.kind}", data_ends=f"{arc.a} {arc.b}"))
    for box in graph.boxes:
        shapes = element("title", escape(box.name)) if box.label != box.name else ""
        rail = f"M{column:.1f} {box.rail[0]:.1f}v{box.rail[1]:.1f}"
        shapes += element("path", class_="rail", d=rail) if box.rail[1] > box.height else ""
        across, high = f"{column - EDGE:.1f}", f"{box.height:.1f}"
        shapes += element("rect", x=f"{EDGE:.0f}", y=f"{box.top:.1f}", width=across, height=high, rx=4)
        end = {"x": f"{column - 6:.1f}", "y": f"{box.middle:.1f}", "dy": ".34em", "text_anchor": "end"}
        shapes += element("text", escape(box.label), **end)
        parts.append(element("g", shapes, class_=f"token {box.role}", data_node=box.node))
    parts.append('<g class="picked-marks"></g>')
    count = quantity(len(graph.arcs) + graph.undrawn, "edge")
    size = {"viewBox": f"0 0 {graph.width:.0f} {graph.height:.0f}", "width": f"{graph.width:.0f}"}
    known = {"role": "img", "aria_label": label or f"Graph over {quantity(len(graph.boxes), 'token')} with {count}"}
    style = {"class_": "graph", "style": f"--pale:{graph.paleness:.2f}", "data_column": f"{column:.1f}"}
    return element("svg", "".join(parts), **style, **size, **known)


def _shape(mark: str, x: float, y: float, way: int = 1) -> str:
    if mark == ARROW:
        return element("path", class_="arrow", d=f"M{x + 0.5 * way:.1f} {y:.1f}l{7.5 * way:g} -3.4v6.8z")
    return element("circle", cx=f"{x + 4 * way:.1f}", cy=f"{y:.1f}", r=2.9) if mark == CIRCLE else ""


def key() -> list[tuple[str, str]]:
    """Each kind of edge as a small picture, and what it means."""
    pictures = []
    for left, right, meaning in KEY:
        kind = kind_of(left, right)
        line = element("path", class_=f"arc {kind} strong", d="M3 6H31")
        marks = element("g", _shape(left, 0, 6) + _shape(right, 34, 6, -1), class_=f"marks {kind}")
        picture = element("svg", line + marks, class_="graph", viewBox="0 0 34 12", aria_hidden="true")
        pictures.append((picture, meaning))
    return pictures

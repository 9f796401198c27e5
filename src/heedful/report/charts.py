"""Charts as data, and as inline SVG in the colours of the page around them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

COLOURS = ("var(--accent, #9a4a00)", "var(--link, #14508c)", "var(--ink, #1d2129)")
DASHES = ("", "6 3", "2 3")

# Pixels: between the labels of lines, and beside a chart for them.
APART, LABELS = 15.0, 94.0

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """From where to where, which values are marked and how they are written, and what is counted."""

    low: float
    high: float
    marks: Sequence[tuple[float, str]] = ()
    name: str = ""
    log: bool = False

    def share(self, value: float) -> float:
        """How far along the axis a value lies, from 0 to 1 and beyond."""
        low, high, at = map(math.log, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return (at - low) / ((high - low) or 1.0)


@dataclass(frozen=True)
class Line:
    """A line; `name` stands at its end."""

    points: Points
    colour: int = 0
    name: str = ""


@dataclass(frozen=True)
class Band:
    """What lies between two lines."""

    upper: Points
    lower: Points
    colour: int = 0


@dataclass(frozen=True)
class Dots:
    """Many small points of one kind."""

    points: Points
    colour: int = 0


@dataclass(frozen=True)
class Point:
    """One point with its name to the right or left of it; a `strong` one is what the chart is about."""

    x: float
    y: float
    name: str = ""
    left: bool = False
    strong: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines, bands and points between two axes; `label` is for those who do not see it, `caption` for all."""

    label: str
    x: Axis
    y: Axis
    parts: Sequence[Line | Band | Dots | Point]
    size: tuple[int, int] = (640, 320)
    caption: str = ""

    @property
    def small(self) -> bool:
        """Whether it is one of several beside one another: no room for names of axes."""
        return self.size[0] <= 240

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where values lie, in pixels."""
        left, right, top, bottom = self._margins
        across, down = self.size[0] - left - right, self.size[1] - top - bottom
        return left + self.x.share(x) * across, top + (1 - self.y.share(y)) * down

    @property
    def _margins(self) -> tuple[float, float, float, float]:
        if self.small:
            return 8, 8, 4, 16
        named = any(isinstance(part, Line) and part.name for part in self.parts)
        return 48, 16 + (LABELS if named else 0), 26 if self.y.name else 16, 40

    def svg(self) -> str:
        """The chart as one element.

        >>> Chart("a", Axis(0, 1), Axis(0, 1), [Line([(0, 0), (1, 1)])]).svg().count("<polyline")
        1
        """
        wide, high = self.size
        parts = "".join(
            [*self._frame(), *(shape for part in self.parts for shape in self._shapes(part)), *self._names()]
        )
        style = "width:100%" if self.small else f"max-width:{wide}px;width:100%"
        return element("svg", parts, viewBox=f"0 0 {wide} {high}", role="img", aria_label=self.label, style=style)

    def _frame(self) -> Iterator[str]:
        left, right, _, bottom = self._margins
        wide, high = self.size
        for value, name in self.y.marks:
            y = self.place(self.x.low, value)[1]
            yield element("path", d=f"M{left:g} {y:.1f}H{wide - right:g}", stroke="currentColor", opacity=0.18)
            yield _text(left - 6, y + 4, name, "end") if name else ""
        for value, name in self.x.marks:
            x = self.place(value, self.y.low)[0]
            yield _text(x, high - bottom + (13 if self.small else 18), name, size=11 if self.small else 12)
        if not self.small:
            yield _text((left + wide - right) / 2, high - 6, self.x.name)
            yield _text(left - 6, 14, self.y.name, "end") if self.y.name else ""

    def _shapes(self, part: Line | Band | Dots | Point) -> Iterator[str]:
        if isinstance(part, Line):
            yield stroke([self.place(*point) for point in part.points], part.colour)
        elif isinstance(part, Band):
            corners = [self.place(*point) for point in (*part.upper, *reversed(part.lower))]
            yield element("polygon", points=_joined(corners), fill=_colour(part.colour), opacity=0.16)
        elif isinstance(part, Dots):
            for x, y in (self.place(*point) for point in part.points):
                yield element("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=2.6, fill=_colour(part.colour), opacity=0.4)
        else:
            x, y = self.place(part.x, part.y)
            pale: dict[str, object] = {"fill": "currentColor", "opacity": 0.55, "r": 3}
            dot = {"fill": _colour(0), "stroke": "currentColor", "stroke_width": 2, "r": 6} if part.strong else pale
            yield element("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", **dot)
            ink: dict[str, Any] = {"font_weight": "bold"} if part.strong else {"opacity": 0.7}
            side = (x - 11, "end") if part.left else (x + 11, "start")
            yield _text(side[0], y + 4, part.name, side[1], fill="currentColor", **ink)

    def _names(self) -> Iterator[str]:
        """The names of lines at their ends, moved down where they would overlap."""
        lines = [part for part in self.parts if isinstance(part, Line) and part.name]
        lowest = -math.inf
        for line in sorted(lines, key=lambda line: -self.y.share(line.points[-1][1])):
            lowest = max(self.place(*line.points[-1])[1], lowest + APART)
            yield _text(self.size[0] - LABELS - 8, lowest + 4, line.name, "start", size=13, fill=_colour(line.colour))


@dataclass(frozen=True)
class Patches:
    """Shares on the patches of a picture, in colour over its shades of gray.

    The largest is coloured in full where it is three times the mean or more; even shares are pale.

    Args:
        label: for those who do not see it.
        values: rows from the top.
        picture: the address of an image (`data:...`); none leaves the ground empty.
        caption: below it.
    """

    label: str
    values: Sequence[Sequence[float]]
    picture: str = ""
    caption: str = ""
    size: tuple[int, int] = (200, 200)
    small = True

    def svg(self) -> str:
        """The picture as one element.

        >>> Patches("a", [[0.1, 0.3], [0.0, 0.6]]).svg().count("<rect")
        4
        """
        rows, columns = len(self.values), max(map(len, self.values))
        wide = self.size[0]
        side = wide / columns
        high = side * rows
        flat = [value for row in self.values for value in row]
        most = max(max(flat), 3 * sum(flat) / len(flat)) or 1.0
        ground = (
            element("image", href=self.picture, width=wide, height=f"{high:g}", preserveAspectRatio="none")
            if self.picture
            else ""
        )
        cells = "".join(
            element("rect", x=f"{column * side:.2f}", y=f"{row * side:.2f}", width=f"{side:.2f}", height=f"{side:.2f}",
                    fill=COLOURS[0], fill_opacity=f"{0.9 * max(0.0, value) / most:.3f}", stroke="currentColor", stroke_opacity=0.12)
            for row, values in enumerate(self.values)
            for column, value in enumerate(values)
        )  # fmt: skip
        return element(
            "svg", ground + cells, viewBox=f"0 0 {wide} {high:g}", role="img", aria_label=self.label, style="width:100%"
        )


def ticks(highest: float) -> list[tuple[float, str]]:
    """A few round numbers from 0 up to the highest, as an axis marks them.

    >>> ticks(7.5)
    [(0, '0'), (2, '2'), (4, '4'), (6, '6')]
    """
    step = next(size for size in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if highest / size <= 6)
    return [(step * at, f"{step * at:g}") for at in range(int(highest / step) + 1)]


def stroke(points: Points, colour: int) -> str:
    """A line in the colour and the dashes of its kind."""
    dash = {"stroke_dasharray": DASHES[colour % len(DASHES)]} if DASHES[colour % len(DASHES)] else {}
    return element("polyline", points=_joined(points), fill="none", stroke=_colour(colour), stroke_width=2, **dash)


def element(tag: str, content: str = "", /, **attributes: object) -> str:
    """An element with its attributes escaped; `_` in their names stands for `-`, and `content` is markup already.

    >>> element("path", d="M0 0", aria_label="a < b")
    '<path d="M0 0" aria-label="a &lt; b"/>'
    """
    named = "".join(f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for name, value in attributes.items())  # fmt: skip
    return f"<{tag}{named}>{content}</{tag}>" if content else f"<{tag}{named}/>"


def _text(
    x: float, y: float, text: str, anchor: str = "middle", size: int = 12, fill: str = "currentColor", **ink: object
) -> str:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text_anchor": anchor}
    return element("text", escape(text), **place, font_size=size, fill=fill, **ink)


def _joined(points: Points) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _colour(at: int) -> str:
    return COLOURS[at % len(COLOURS)]

"""The picture of a graph over tokens: where things go, and that both ways to draw it show the same."""

from __future__ import annotations

import re
from html import unescape
from itertools import combinations

import numpy as np
import pytest

from heedful import InvalidArgument
from heedful.discovery import ARROW, CIRCLE, PAG, TAIL
from heedful.report import diagrams, graphs

MARKS = {
    "o-o": (CIRCLE, CIRCLE),
    "o->": (CIRCLE, ARROW),
    "-->": (TAIL, ARROW),
    "<->": (ARROW, ARROW),
    "<-o": (ARROW, CIRCLE),
}


def graph(names, edges):
    """A PAG from `{(a, b): "o->"}`."""
    marks = np.zeros((len(names), len(names)), np.int8)
    for (a, b), text in edges.items():
        marks[b, a], marks[a, b] = MARKS[text]
    return PAG(marks, tuple(names))


def layout(pag, **options):
    return graphs.layout(pag.names, pag.links(), **options)


def svg(pag, label="", **options):
    return graphs.svg(layout(pag, **options), label)


def plot(pag, **options):
    return graphs.plot(pag.names, pag.links(), **options)


def places(pag):
    return diagrams.places(pag.names, pag.links())


def random_graph(count, density, seed=0):
    random = np.random.default_rng(seed)
    kinds = list(MARKS)
    pairs = [pair for pair in combinations(range(count), 2) if random.random() < density]
    return graph([f"word{at}" for at in range(count)], {pair: kinds[random.integers(5)] for pair in pairs})


def test_every_edge_is_drawn_with_its_marks():
    pag = graph(["a", "b", "c", "d"], {(0, 1): "o->", (0, 3): "<->", (1, 2): "-->", (2, 3): "<-o"})
    drawn = layout(pag)
    assert [(arc.a, arc.b, arc.at_a, arc.at_b) for arc in drawn.arcs] == pag.links()
    assert pag.links() == [(0, 1, "o", ">"), (0, 3, ">", ">"), (1, 2, "-", ">"), (2, 3, ">", "o")]
    assert [arc.kind for arc in drawn.arcs] == ["open", "latent", "directed", "open"]
    assert all(arc.strong for arc in drawn.arcs)


@pytest.mark.parametrize(("count", "density"), [(12, 0.3), (12, 1.0), (40, 0.06), (40, 0.95)])
def test_boxes_and_ports_do_not_overlap(count, density):
    pag = random_graph(count, density)
    drawn = layout(pag, highlight=(3, 7), target=0)
    for above, below in zip(drawn.boxes, drawn.boxes[1:], strict=False):
        assert sum(above.rail) < below.rail[0]
        # A word with many arcs looks like any other.
        assert above.height == below.height
        assert above.rail[0] <= above.top < above.top + above.height <= sum(above.rail)
    ports = {}
    for arc in drawn.arcs:
        for node, y in ((arc.a, arc.y_a), (arc.b, arc.y_b)):
            box = drawn.boxes[node]
            assert box.rail[0] <= y <= sum(box.rail)
            if arc.strong:
                ports.setdefault(node, []).append(y)
    for own in ports.values():
        gaps = np.diff(sorted(own))
        # A mark is 6.8 pixels high at most, its tip a point: two at this distance can be told apart.
        assert (gaps > 6.5).all()
    assert drawn.width < 400
    assert drawn.height < 45 * count + 100


def test_arcs_of_one_token_never_cross():
    """The ports of arcs that share a token are in the order of their nesting."""
    drawn = layout(random_graph(9, 1.0), target=4)
    strong = [arc for arc in drawn.arcs if arc.strong]
    shared = 0
    for one, other in combinations(strong, 2):
        # Two arcs with the same upper token: the longer one must enclose the shorter at both ends; likewise at the lower.
        for here in ("a", "b"):
            if getattr(one, here) == getattr(other, here):
                shared += 1
                inner, outer = sorted((one, other), key=lambda arc: arc.b - arc.a)
                assert outer.y_a < inner.y_a
                assert inner.y_b < outer.y_b
        if one.b == other.a or other.b == one.a:
            upper, lower = (one, other) if one.b == other.a else (other, one)
            assert upper.y_b < lower.y_a
    assert shared > 10


def test_a_dense_graph_shows_what_matters():
    pag = random_graph(40, 1.0)
    drawn = layout(pag, highlight=(5, 9), target=20)
    strong = {(arc.a, arc.b) for arc in drawn.arcs if arc.strong}
    assert {(5, 9), (5, 20), (9, 20)} <= strong
    assert len(strong) <= 60
    assert len([pair for pair in strong if 20 in pair]) == 39
    assert len(drawn.arcs) == 780
    assert drawn.undrawn == 0
    assert drawn.paleness < 0.1


def test_definite_edges_come_first_without_a_target():
    pag = graph(
        [str(at) for at in range(30)],
        dict.fromkeys(combinations(range(30), 2), "o-o") | {(0, 29): "<->", (3, 20): "-->"},
    )
    strong = {(arc.a, arc.b) for arc in layout(pag).arcs if arc.strong}
    assert strong == {(0, 29), (3, 20)}


def test_without_any_preference_the_nearest_are_shown():
    drawn = layout(graph([str(at) for at in range(30)], dict.fromkeys(combinations(range(30), 2), "o-o")))
    strong = [arc.b - arc.a for arc in drawn.arcs if arc.strong]
    assert len(strong) == 45
    assert max(strong) == 2


def test_the_most_arcs_are_bounded_and_told():
    drawn = layout(random_graph(70, 1.0))
    assert len(drawn.arcs) == graphs.ARCS
    assert drawn.undrawn == 70 * 69 // 2 - graphs.ARCS


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_tokens(count):
    pag = graph([f"t{at}" for at in range(count)], {(0, 1): "o-o"} if count == 2 else {})
    drawn = layout(pag)
    assert len(drawn.boxes) == count
    assert len(drawn.arcs) == (count == 2)
    assert svg(pag).count("<rect") == count
    ax = plot(pag)
    assert ax.get_ylim()[0] > 0


@pytest.mark.filterwarnings("ignore:Glyph")
def test_long_and_strange_names():
    names = ["x" * 90, "a\nb", "<script>alert(1)</script>", "$\\frac{1}{", "", "\u65e5\u672c\u8a9e" * 20]
    pag = graph(names, {(0, 1): "o-o"})
    drawn = layout(pag)
    assert drawn.boxes[0].label.endswith("\u2026")
    assert len(drawn.boxes[5].label) < len(drawn.boxes[0].label) < 20
    assert drawn.boxes[1].label == "a b"
    assert drawn.column < 175
    text = svg(pag)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert f"<title>{'x' * 90}</title>" in text
    plot(pag).figure.canvas.draw()


def test_svg_and_picture_have_the_same_parts():
    pytest.importorskip("matplotlib")
    from matplotlib.patches import Circle, FancyBboxPatch, PathPatch, Polygon

    pag = graph(["a", "b", "c", "d"], {(0, 1): "o->", (0, 3): "<->", (1, 2): "-->", (2, 3): "<-o"})
    text = svg(pag, highlight=(1,), target=0, label="Words & arcs")
    ax = plot(pag, highlight=(1,), target=0, legend=False)
    kinds = [type(patch) for patch in ax.patches]
    assert kinds.count(FancyBboxPatch) == text.count("<rect") == 4
    assert kinds.count(PathPatch) == len(re.findall(r'class="arc', text)) == 4
    assert kinds.count(Circle) == text.count("<circle") == 2
    assert kinds.count(Polygon) == text.count('class="arrow"') == 5
    assert (
        [one.get_text() for one in ax.texts] == re.findall(r"<text[^>]*>([^<]*)</text>", text) == ["a", "b", "c", "d"]
    )
    assert text.count("token chosen") == text.count("token target") == 1
    assert 'aria-label="Words &amp; arcs"' in text
    assert "Words & arcs" in unescape(text)


def test_svg_needs_nothing_from_outside():
    text = svg(random_graph(12, 0.5)) + "".join(picture for picture, _ in graphs.key())
    assert "http" not in text
    assert not re.search(r"\son\w+=", text)
    assert [word for _, word in graphs.key()] == ["leads to", "may lead to", "direction open", "hidden common cause"]


def test_the_pag_draws_itself(tmp_path):
    pytest.importorskip("matplotlib")
    pag = random_graph(12, 0.4)
    ax = pag.plot(highlight=(2,), target=0)
    ax.figure.savefig(tmp_path / "graph.png")
    wide, high = ax.figure.get_size_inches()
    assert high > wide
    assert (tmp_path / "graph.png").stat().st_size > 10_000
    from matplotlib import pyplot

    given = pyplot.subplots()[1]
    assert pag.plot(given) is given
    pyplot.close("all")


def crossed(at, sizes, pag):
    """How many boxes an edge of others runs through: on a fine grid along every edge."""
    found = 0
    for edge in pag.edges():
        points = at[edge.a] + np.linspace(0, 1, 200)[:, None] * (at[edge.b] - at[edge.a])
        for node in set(range(pag.n)) - {edge.a, edge.b}:
            found += bool((np.abs(points - at[node]) < sizes[node] / 2).all(1).any())
    return found


@pytest.mark.parametrize(("count", "edges"), [(1, 0), (2, 1), (10, 14), (40, 48)])
def test_tables_are_laid_out_by_their_edges(count, edges):
    """No boxes overlap, hardly an edge runs through another's box, neighbours are near, and the same graph is drawn the same."""
    random = np.random.default_rng(count)
    pairs = list(combinations(range(count), 2))
    chosen = [pairs[at] for at in random.permutation(len(pairs))[:edges]]
    pag = graph([f"variable {at}" for at in range(count)], {pair: list(MARKS)[random.integers(5)] for pair in chosen})
    at, sizes = places(pag)
    assert np.isfinite(at).all()
    for a, b in combinations(range(count), 2):
        assert (np.abs(at[a] - at[b]) >= (sizes[a] + sizes[b]) / 2).any()
    assert crossed(at, sizes, pag) <= edges // 8
    if count > 2:
        lengths = [np.linalg.norm(at[edge.a] - at[edge.b]) for edge in pag.edges()]
        others = [np.linalg.norm(at[a] - at[b]) for a, b in combinations(range(count), 2)]
        assert np.mean(lengths) < 0.7 * np.mean(others)
        wide, high = np.ptp(at, axis=0)
        assert 0.3 < wide / high < 4
    np.testing.assert_array_equal(at, places(pag)[0])


def test_arrows_of_a_table_point_down():
    pag = graph("abcdef", {(0, 1): "-->", (1, 2): "-->", (1, 3): "o->", (3, 4): "-->", (2, 5): "-->"})
    at = places(pag)[0]
    assert all(at[edge.a, 1] < at[edge.b, 1] for edge in pag.edges())


def test_the_layout_is_chosen_by_what_is_drawn():
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot
    from matplotlib.patches import Circle, FancyBboxPatch, PathPatch, Polygon

    pag = graph(["a", "b$", "c"], {(0, 1): "o->", (1, 2): "<->"})
    table = [type(patch) for patch in pag.plot().patches]
    # The key has four edges of its own: four arrowheads and three circles.
    assert (table.count(FancyBboxPatch), table.count(Polygon), table.count(Circle)) == (3, 3 + 4, 1 + 3)
    assert PathPatch not in table
    assert PathPatch in [type(patch) for patch in pag.plot(target=0).patches]
    assert PathPatch in [type(patch) for patch in pag.plot(layout="column").patches]
    assert PathPatch not in [type(patch) for patch in pag.plot(layout="graph", target=0, highlight=(1,)).patches]
    empty = PAG(np.zeros((0, 0), np.int8)).plot()
    empty.figure.canvas.draw()
    with pytest.raises(InvalidArgument, match="layout must be"):
        pag.plot(layout="circle")
    pyplot.close("all")

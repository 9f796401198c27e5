"""A graph over the variables of a table as a picture: nodes that share edges stand near one another, causes above effects.

The order of a table's columns means nothing, other than that of the words of a text (`draw`), so that places follow the edges: distances in the picture
approach those in the graph (stress majorization, Gansner et al. 2004), the whole is turned so that arrows point down, and boxes are pushed
apart and off the edges of others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from heedful._plot import Axes, axes
from heedful.report.graphs import ARROW, COLOURS, FILLS, Edge, end_mark, fitting, key_on, look, wide

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


Points = NDArray[np.float64]

# Points of the picture: the wished length of an edge, the height of a box, the least gap between boxes, around everything, of the key.
EDGE, HIGH, GAP, AROUND, KEY_HIGH = 96.0, 20.0, 24.0, 14.0, 24.0
WIDEST = 150.0
STEPS = 300


def places(names: Sequence[str], edges: Sequence[Edge]) -> tuple[Points, Points]:
    """The middle of each node's box `[n, 2]` and its width and height `[n, 2]`, in points, y downwards."""
    networkx: Any = import_module("networkx")
    sizes = np.array([(min(WIDEST, wide(name) + 14), HIGH) for name in names]).reshape(-1, 2)
    graph = networkx.Graph([edge[:2] for edge in edges])
    graph.add_nodes_from(range(len(names)))
    middles = np.zeros((len(names), 2))
    # Where edges are many they need more room between them.
    length = EDGE * max(1.0, (2 * graph.number_of_edges() / max(1, len(names)) / 3) ** 0.5)
    parts = sorted(map(sorted, networkx.connected_components(graph)), key=lambda nodes: (-len(nodes), nodes))
    blocks: list[tuple[list[int], Points]] = []
    for nodes in parts:
        apart = np.array([[networkx.shortest_path_length(graph, a, b) for b in nodes] for a in nodes], float)
        place = {node: at for at, node in enumerate(nodes)}
        own = [(place[a], place[b], at_a, at_b) for a, b, at_a, at_b in edges if a in place]
        at = _turned(_stressed(apart) * length, own)
        lines = np.array([edge[:2] for edge in own], np.int64).reshape(-1, 2)
        blocks.append((nodes, _spread(at, sizes[nodes], lines)))
    _pack(blocks, sizes, middles)
    return middles, sizes


def _stressed(apart: NDArray[np.float64]) -> Points:
    """Points whose distances are as near to those wished as they can be."""
    count = len(apart)
    if count == 1:
        return np.zeros((1, 2))
    middle = np.eye(count) - 1 / count
    values, vectors = np.linalg.eigh(-0.5 * middle @ apart**2 @ middle)
    at = vectors[:, -2:] * np.sqrt(np.maximum(values[-2:], 1e-6))
    # Nodes with the same neighbours would stay in one place.
    at = at + 0.05 * np.random.default_rng(0).standard_normal(at.shape)
    weights = np.where(apart > 0, 1 / np.maximum(apart, 1) ** 2, 0.0)
    laplace = np.diag(weights.sum(1)) - weights
    inverse = np.linalg.pinv(laplace)
    for _ in range(STEPS):
        gaps = np.linalg.norm(at[:, None] - at[None], axis=-1)
        pull = -weights * apart / np.maximum(gaps, 1e-9)
        np.fill_diagonal(pull, 0.0)
        np.fill_diagonal(pull, -pull.sum(1))
        at = inverse @ (pull @ at)
    return at


def _turned(at: Points, edges: Sequence[Edge]) -> Points:
    """Turned and mirrored so that arrows point down; without any, so that it is wider than high."""
    down = [(a, b) if at_b == ARROW else (b, a) for a, b, at_a, at_b in edges if (at_a == ARROW) != (at_b == ARROW)]

    def worth(turned: Points) -> float:
        width, height = np.ptp(turned, axis=0)
        falls = sum(np.sign(turned[b, 1] - turned[a, 1]) for a, b in down) / max(1, len(down))
        return float(falls + 0.3 * (width > height))

    angles = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    turns = [at @ np.array([[np.cos(one), -np.sin(one)], [np.sin(one), np.cos(one)]]) for one in angles]
    return max(turns, key=worth) * (1.25, 1.0)


def _spread(at: Points, sizes: Points, lines: NDArray[np.int64]) -> Points:
    """Boxes that overlap, or that an edge of others runs through, are moved apart."""
    at = at.copy()
    count = len(at)
    rows, columns = np.triu_indices(count, 1)
    for step in range(STEPS):
        gap = at[rows] - at[columns]
        need = (sizes[rows] + sizes[columns]) / 2 + GAP
        over = need - np.abs(gap)
        hit = (over > 0).all(1)
        moved = np.zeros_like(at)
        # Along the way that is shorter.
        short = np.argmin(over, axis=1)
        for pair in np.flatnonzero(hit):
            axis = short[pair]
            push = over[pair, axis] / 2 * (1 if gap[pair, axis] >= 0 else -1)
            moved[rows[pair], axis] += push
            moved[columns[pair], axis] -= push
        # The last steps only part boxes.
        if step < STEPS - 60:
            moved += _off(at, sizes, lines)
        if not moved.any():
            break
        at += moved * 0.5
    return at


def _off(at: Points, sizes: Points, lines: NDArray[np.int64]) -> Points:
    """How boxes move off the edges of others that run through them."""
    moved = np.zeros_like(at)
    if not len(lines):
        return moved
    start, way = at[lines[:, 0]], at[lines[:, 1]] - at[lines[:, 0]]  # [e, 2]
    share = ((at[:, None] - start) * way).sum(-1) / np.maximum((way**2).sum(-1), 1e-9)  # [n, e]
    near = start + np.clip(share, 0, 1)[..., None] * way  # [n, e, 2]
    gap = at[:, None] - near
    reach = sizes[:, None] / 2 + 5
    inside = (np.abs(gap) < reach).all(-1) & (share > 0.02) & (share < 0.98)
    nodes = np.arange(len(at))[:, None]
    inside &= (nodes != lines[:, 0]) & (nodes != lines[:, 1])
    normal = np.stack([-way[:, 1], way[:, 0]], -1) / np.maximum(np.linalg.norm(way, axis=-1, keepdims=True), 1e-9)
    side = np.where((gap * normal).sum(-1) >= 0, 1.0, -1.0)
    wanted = (np.abs(normal) * reach).sum(-1)
    push = side * np.maximum(wanted - np.abs((gap * normal).sum(-1)), 0)
    moved += (np.where(inside, push, 0.0)[..., None] * normal).sum(1) * 0.4
    return moved


def _pack(blocks: list[tuple[list[int], Points]], sizes: Points, middles: Points) -> None:
    """Parts that no edge joins, side by side in rows no wider than the largest, or than a square of all would be."""
    boxes = []
    for nodes, at in blocks:
        low, high = (at - sizes[nodes] / 2).min(0), (at + sizes[nodes] / 2).max(0)
        boxes.append((nodes, at - low, high - low))
    area = sum(float(np.prod(size + 2 * GAP)) for _, _, size in boxes)
    limit = max(max((float(size[0]) for _, _, size in boxes), default=0.0), 1.3 * area**0.5)
    x = y = row = 0.0
    for nodes, at, size in boxes:
        if x > 0 and x + size[0] > limit:
            x, y, row = 0.0, y + row + 2 * GAP, 0.0
        middles[nodes] = at + np.array([x, y])
        x, row = x + size[0] + 2 * GAP, max(row, float(size[1]))


def plot(
    names: Sequence[str],
    edges: Sequence[Edge],
    ax: Axes | None = None,
    highlight: Collection[int] = (),
    target: int | None = None,
) -> Axes:
    """Draws the graph of a table with matplotlib; new axes are as large as it needs.

    >>> ax = plot(["rain", "wet"], [(0, 1, "-", ">")])
    >>> [text.get_text() for text in ax.texts][:2]
    ['rain', 'wet']
    """
    at, sizes = places(names, edges)
    low = (at - sizes / 2).min(0, initial=0.0) - AROUND
    width, height = np.maximum((at + sizes / 2).max(0, initial=0.0) - low + AROUND, (470.0, 40.0))
    ax = axes(ax, size=(width / 72, (height + KEY_HIGH) / 72))
    from matplotlib.patches import FancyBboxPatch

    pale = max(0.25, min(1.0, 90 / max(1, len(edges))))
    for a, b, at_a, at_b in edges:
        colour, dashes = look(at_a, at_b)
        first, last = _border(at[a], sizes[a], at[b]), _border(at[b], sizes[b], at[a])
        ax.plot(*np.transpose([first, last]), color=colour, lw=1.3, ls=dashes, alpha=pale, zorder=1)
        end_mark(ax, at_a, first, last, colour)
        end_mark(ax, at_b, last, first, colour)
    for node, name in enumerate(names):
        face, line, ink = FILLS["chosen" if node in highlight else "target" if node == target else ""]
        (x, y), (across, high) = at[node], sizes[node]
        ax.add_patch(FancyBboxPatch((x - across / 2, y - high / 2), across, high, boxstyle="round,pad=0,rounding_size=4",
                                    fc=COLOURS[face], ec=COLOURS[line], lw=0.8, zorder=3))  # fmt: skip
        label = fitting(" ".join(str(name).split()) or repr(str(name)), across - 8)
        # A dollar sign would begin mathematics.
        ax.text(x, y, label, ha="center", va="center", fontsize=8.5, color=COLOURS[ink], parse_math=False, zorder=4)
    key_on(ax, [(low[0] + AROUND + left, low[1] + height + 8) for left in (0, 85, 185, 290)])
    ax.set(xlim=(low[0], low[0] + width), ylim=(low[1] + height + KEY_HIGH, low[1]), aspect="equal")
    ax.axis("off")
    return ax


def _border(middle: Points, size: Points, towards: Points) -> Points:
    """Where the line from the middle of a box to another leaves the box."""
    way = towards - middle
    with np.errstate(divide="ignore"):
        share = np.min(np.where(way != 0, (size / 2 + 1) / np.abs(way), np.inf))
    return np.asarray(middle + way * min(float(share), 0.5))

"""A graph for other programs: networkx, Graphviz, GraphML, causal-learn."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from heedful._errors import InvalidArgument, MissingExtra
from heedful.discovery.paths import ARROW, CIRCLE, NONE, TAIL

if TYPE_CHECKING:
    from heedful.discovery.graph import PAG

__all__ = ["MARK_NAMES", "from_causallearn", "to_causallearn", "to_dot", "to_graphml", "to_networkx"]

MARK_NAMES = {NONE: "none", CIRCLE: "circle", ARROW: "arrow", TAIL: "tail"}
_DOT = {CIRCLE: "odot", ARROW: "normal", TAIL: "none"}
_CAUSALLEARN = {NONE: 0, CIRCLE: 2, ARROW: 1, TAIL: -1}


def to_dot(pag: PAG) -> str:
    """Graphviz source."""
    lines = ["digraph {", "  edge [dir=both];"]
    lines += [f"  {at} [label={_quoted(name)}];" for at, name in enumerate(pag.names)]
    lines += [
        f"  {edge.a} -> {edge.b} [arrowtail={_DOT[edge.at_a]}, arrowhead={_DOT[edge.at_b]}];" for edge in pag.edges()
    ]
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    safe = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{safe}"'


def to_graphml(pag: PAG) -> str:
    """GraphML with node names and the marks of each edge."""
    keys = [("name", "node"), ("at_source", "edge"), ("at_target", "edge")]
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        '<graphml xmlns="http://graphml.graphdrawing.org/xmlns">',
        *(f'  <key id="{key}" for="{of}" attr.name="{key}" attr.type="string"/>' for key, of in keys),
        '  <graph edgedefault="directed">',
    ]
    for at, name in enumerate(pag.names):
        lines.append(f'    <node id={quoteattr(str(at))}><data key="name">{escape(_printable(name))}</data></node>')
    for edge in pag.edges():
        lines.append(
            f'    <edge source="{edge.a}" target="{edge.b}"><data key="at_source">{MARK_NAMES[edge.at_a]}</data>'
            f'<data key="at_target">{MARK_NAMES[edge.at_b]}</data></edge>'
        )
    return "\n".join([*lines, "  </graph>", "</graphml>"]) + "\n"


def _printable(text: str) -> str:
    # XML 1.0 has no way to write most control characters.
    return "".join(one if one >= " " or one in "\t\n\r" else "\ufffd" for one in text)


def _extra(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise MissingExtra(package, "graphs") from None


def to_networkx(pag: PAG) -> Any:
    """A `networkx.DiGraph` with both directions of every edge."""
    networkx = _extra("networkx", "networkx")
    graph = networkx.DiGraph()
    graph.add_nodes_from((at, {"name": name}) for at, name in enumerate(pag.names))
    for edge in pag.edges():
        graph.add_edge(edge.a, edge.b, mark=MARK_NAMES[edge.at_b])
        graph.add_edge(edge.b, edge.a, mark=MARK_NAMES[edge.at_a])
    return graph


def to_causallearn(pag: PAG) -> Any:
    """A `GeneralGraph` with the same marks."""
    theirs = {
        name: getattr(_extra(f"causallearn.graph.{name}", "causal-learn"), name)
        for name in ("Edge", "Endpoint", "GeneralGraph", "GraphNode")
    }
    ends = {mark: getattr(theirs["Endpoint"], MARK_NAMES[mark].upper()) for mark in (CIRCLE, ARROW, TAIL)}
    nodes = [theirs["GraphNode"](name) for name in pag.names]
    graph = theirs["GeneralGraph"](nodes)
    for edge in pag.edges():
        graph.add_edge(theirs["Edge"](nodes[edge.a], nodes[edge.b], ends[edge.at_a], ends[edge.at_b]))
    return graph


def from_causallearn(graph: Any) -> PAG:
    """From a `GeneralGraph` or its matrix: `graph[j, i]` is the mark at j."""
    from heedful.discovery.graph import PAG

    matrix = np.asarray(getattr(graph, "graph", graph))
    if matrix.ndim != 2 or not np.isin(matrix, list(_CAUSALLEARN.values())).all():
        raise InvalidArgument("expected a GeneralGraph or its matrix of 0, 1 (arrowhead), -1 (tail) and 2 (circle)")
    marks = np.zeros(matrix.shape, np.int8)
    for ours, theirs in _CAUSALLEARN.items():
        marks[theirs == matrix.T] = ours
    names = [node.get_name() for node in graph.get_nodes()] if hasattr(graph, "get_nodes") else ()
    return PAG(marks, tuple(names))

"""A graph for other programs: networkx, Graphviz, GraphML, causal-learn."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from heedful._errors import InvalidArgument, MissingExtra
from heedful.discovery.paths import ARROW, CIRCLE, NONE, TAIL

if TYPE_CHECKING:
    from heedful.discovery.graph import PAG

MARK_NAMES = {NONE: "none", CIRCLE: "circle", ARROW: "arrow", TAIL: "tail"}
_DOT = {CIRCLE: "odot", ARROW: "normal", TAIL: "none"}
_CAUSALLEARN = {NONE: 0, CIRCLE: 2, ARROW: 1, TAIL: -1}


def to_dot(pag: PAG) -> str:
    """Graphviz source."""
    lines = ["digraph {", "  edge [dir=both];"]
    for at, name in enumerate(pag.names):
        label = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines.append(f'  {at} [label="{label}"];')
    lines += [
        f"  {edge.a} -> {edge.b} [arrowtail={_DOT[edge.at_a]}, arrowhead={_DOT[edge.at_b]}];" for edge in pag.edges()
    ]
    return "\n".join([*lines, "}"]) + "\n"


def to_graphml(pag: PAG) -> str:
    """GraphML, each edge once with attributes `at_source` and `at_target`."""
    networkx: Any = import_module("networkx")
    graph = networkx.DiGraph()
    # XML 1.0 has no way to write most control characters.
    names = ["".join(one if one >= " " or one in "\t\n\r" else "\ufffd" for one in name) for name in pag.names]
    graph.add_nodes_from((at, {"name": name}) for at, name in enumerate(names))
    for edge in pag.edges():
        graph.add_edge(edge.a, edge.b, at_source=MARK_NAMES[edge.at_a], at_target=MARK_NAMES[edge.at_b])
    return "\n".join(networkx.generate_graphml(graph, named_key_ids=True)) + "\n"


def to_networkx(pag: PAG) -> Any:
    """A `networkx.DiGraph` with both directions of every edge; `mark` on (i, j) is the mark at j."""
    networkx: Any = import_module("networkx")
    graph = networkx.DiGraph()
    graph.add_nodes_from((at, {"name": name}) for at, name in enumerate(pag.names))
    for edge in pag.edges():
        graph.add_edge(edge.a, edge.b, mark=MARK_NAMES[edge.at_b])
        graph.add_edge(edge.b, edge.a, mark=MARK_NAMES[edge.at_a])
    return graph


def to_causallearn(pag: PAG) -> Any:
    """A `causallearn` GeneralGraph: there `graph[j, i]` is the mark at j, 1 arrowhead, -1 tail, 2 circle."""
    try:
        Edge, Endpoint, GeneralGraph, GraphNode = (
            getattr(import_module(f"causallearn.graph.{name}"), name)
            for name in ("Edge", "Endpoint", "GeneralGraph", "GraphNode")
        )
    except ImportError:
        raise MissingExtra("causal-learn", "graphs") from None
    ends = {mark: getattr(Endpoint, MARK_NAMES[mark].upper()) for mark in (CIRCLE, ARROW, TAIL)}
    nodes = [GraphNode(name) for name in pag.names]
    graph = GeneralGraph(nodes)
    for edge in pag.edges():
        graph.add_edge(Edge(nodes[edge.a], nodes[edge.b], ends[edge.at_a], ends[edge.at_b]))
    return graph


def from_causallearn(graph: Any) -> PAG:
    """From a `causallearn` GeneralGraph or its `graph` matrix."""
    from heedful.discovery.graph import PAG

    matrix = np.asarray(getattr(graph, "graph", graph))
    if matrix.ndim != 2 or not np.isin(matrix, list(_CAUSALLEARN.values())).all():
        raise InvalidArgument("expected a GeneralGraph or its matrix of 0, 1 (arrowhead), -1 (tail) and 2 (circle)")
    marks = np.zeros(matrix.shape, np.int8)
    for ours, theirs in _CAUSALLEARN.items():
        marks[theirs == matrix.T] = ours
    names = [node.get_name() for node in graph.get_nodes()] if hasattr(graph, "get_nodes") else ()
    return PAG(marks, tuple(names))

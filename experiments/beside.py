"""causal-learn's FCI, watched while it works."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

from heedful.discovery import ARROW, CIRCLE, NONE, PAG, TAIL, orientation
from heedful.discovery.orientation import RULES, Oriented


class CausalLearn:
    """causal-learn's FCI on data: its marks, its skeleton before (`first`) and after possible-d-sep, and the sets that separated pairs.

    Rules given by name take the place of its own.
    """

    def __init__(self, data, alpha, **swapped):
        from causallearn.search.ConstraintBased import FCI

        real = {name: getattr(FCI, name) for name in (*swapped, "removeByPossibleDsep")}

        def watched(graph, test, alpha, sepsets):
            self.first = PAG.from_causallearn(graph).marks != NONE
            real["removeByPossibleDsep"](graph, test, alpha, sepsets)
            self.skeleton = PAG.from_causallearn(graph).marks != NONE
            # Keys (x, y) and (y, x) are both there, but the later search writes the one alone.
            ordered = {**{(b, a): each for (a, b), each in sepsets.items()}, **sepsets}
            self.sepsets = {
                (a, b): tuple(sorted(each)) for (a, b), each in ordered.items() if a < b and not self.skeleton[a, b]
            }

        try:
            for name, rule in {**swapped, "removeByPossibleDsep": watched}.items():
                setattr(FCI, name, rule)
            with redirect_stdout(io.StringIO()):
                graph, _ = FCI.fci(data, "fisherz", alpha, show_progress=False)
        finally:
            for name, rule in real.items():
                setattr(FCI, name, rule)
        self.marks = PAG.from_causallearn(graph).marks


def no_selection(graph, changed, verbose=False):
    return changed


def r4_by_sets(graph, length, data, test, alpha, sepsets, changed, knowledge, verbose=False):
    """R4 that asks the set which separated the ends, not a further test, for causal-learn's loop."""
    at = Oriented(PAG.from_causallearn(graph).marks.copy())
    written = RULES["R4"](at, {(min(pair), max(pair)): tuple(each) for pair, each in sepsets.items()})
    return (written and write_marks(graph, at.marks)) or changed


def disagreements(skeleton, sepsets):
    """Our orientation, and for every end in conflict what wanted an arrowhead there and what a tail."""
    wanted = {}

    def want(rule, end, mark):
        wanted.setdefault((int(end[0]), int(end[1])), {"arrowhead": set(), "tail": set()})[mark].add(rule)

    class Watched(Oriented):
        rule = ""

        def write(self, arrows=(), tails=()):
            arrows, tails = set(arrows), set(tails)
            for mark, ends in (("arrowhead", arrows), ("tail", tails)):
                for end in ends:
                    want(Watched.rule, end, mark)
            return super().write(arrows, tails)

        def point(self, edges, arrows=()):
            # An edge that cannot be pointed is not written, but it was wanted.
            edges = set(edges)
            for i, j in edges:
                want(Watched.rule, (i, j), "arrowhead")
                want(Watched.rule, (j, i), "tail")
            return super().point(edges, arrows)

    def named(name, rule):
        def call(*args):
            Watched.rule = name
            return rule(*args)

        return call

    rules = dict(RULES)
    try:
        orientation.Oriented = Watched
        RULES.update({name: named(name, rule) for name, rule in rules.items()})
        ours = orientation.orient(orientation.open_marks(skeleton), sepsets)
    finally:
        orientation.Oriented = Oriented
        RULES.update(rules)
    for end in orientation.contradictions(ours, sepsets):
        want("a separating set", end, "tail")
    # Where a mark has no voice yet, discriminating paths of R4 contradicted one another before anything was written.
    for end in ours.conflicts:
        for mark in ("arrowhead", "tail"):
            if not wanted.get(end, {}).get(mark):
                want("R4", end, mark)
    return ours, {(int(i), int(j)): wanted[i, j] for i, j in ours.conflicts}


def write_marks(graph, marks):
    """Gives the edges of causal-learn's graph these marks; true."""
    from causallearn.graph.Edge import Edge
    from causallearn.graph.Endpoint import Endpoint

    ends = {CIRCLE: Endpoint.CIRCLE, ARROW: Endpoint.ARROW, TAIL: Endpoint.TAIL}
    nodes = graph.get_nodes()
    for edge, old in zip(PAG(marks).edges(), PAG.from_causallearn(graph).edges(), strict=True):
        if (edge.at_a, edge.at_b) != (old.at_a, old.at_b):
            graph.remove_edge(graph.get_edge(nodes[edge.a], nodes[edge.b]))
            graph.add_edge(Edge(nodes[edge.a], nodes[edge.b], ends[edge.at_a], ends[edge.at_b]))
    return True

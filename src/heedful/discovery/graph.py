"""The partial ancestral graph: marks, what they mean, and every test that put them there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heedful._checks import check_choice
from heedful._errors import InvalidArgument
from heedful._plot import Axes
from heedful._result import Result
from heedful._text import quantity
from heedful.discovery import exports
from heedful.discovery.confidence import Trust, confidences, judge, structure_confidence
from heedful.discovery.paths import ARROW, CIRCLE, NONE, TAIL, DsepTree, Links, bits
from heedful.discovery.record import Tests

# What JSON holds as it is.
_PLAIN = ("conflicts", "untestable", "selection_bias", "learner", "alpha", "samples", "reach", "stopped")
_LEFT = {CIRCLE: "o", ARROW: "<", TAIL: "-"}
_RIGHT = {CIRCLE: "o", ARROW: ">", TAIL: "-"}


@dataclass(frozen=True)
class Edge:
    """An edge between nodes a and b with the mark at each end.

    >>> from heedful.discovery import ARROW, CIRCLE, Edge
    >>> str(Edge(0, 1, CIRCLE, ARROW, ("rain", "wet")))
    'rain o-> wet'
    """

    a: int
    b: int
    at_a: int
    at_b: int
    names: tuple[str, str] | None = None

    def __str__(self) -> str:
        a, b = self.names or (str(self.a), str(self.b))
        return f"{a} {_LEFT[self.at_a]}-{_RIGHT[self.at_b]} {b}"


@dataclass(frozen=True, eq=False, repr=False)
class PAG(Result):
    """A partial ancestral graph: every mark that all graphs with the same independences share, a circle elsewhere.

    `a -> b` says that a is a cause of b, `a <-> b` that neither is a cause of the other (something outside the graph moves both),
    `a - b` that selection ties them, and a circle that the independences leave it open. From `pc` it is a CPDAG in the same marks:
    there `a - b` is an edge whose direction is open.

    Attributes:
        marks: `[n, n]` int8, read-only; `marks[i, j]` is the mark at j on the edge between i and j: 0 none, 1 circle, 2 arrowhead, 3 tail.
        names: what the nodes are called.
        sepsets: for pairs i < j without an edge, the set that separated them.
        tests: every test that was executed.
        conflicts: marks on which rules or separating sets disagree; 0 for a perfect test.
        untestable: tests that could not be decided and counted as dependent.
        selection_bias: whether selection was allowed for (rules R5-R7).
        order: the order of the nodes that was given to the learner, if any.
        learner, alpha, samples: how it was learned.
        reach: conditioning sets up to this size were tried; the graph is valid for these. None if the learner ended by itself.
        stopped: why the learner stopped before it was done; empty if it did not.
        notes: what was odd about the data, in plain sentences.

    >>> from heedful.discovery import PAG
    >>> pag = PAG.from_dag([[], [], [0, 1], [2]], observed=range(4), names=["rain", "hose", "wet", "slip"])
    >>> [str(edge) for edge in pag.edges()]
    ['rain o-> wet', 'hose o-> wet', 'wet --> slip']
    """

    marks: NDArray[np.int8]
    names: tuple[str, ...] = ()
    sepsets: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    tests: Tests = field(default_factory=Tests.none)
    conflicts: int = 0
    untestable: int = 0
    selection_bias: bool = False
    order: tuple[int, ...] | None = None
    learner: str = ""
    alpha: float | None = None
    samples: int | None = None
    reach: int | None = None
    stopped: str = ""
    notes: tuple[str, ...] = ()

    _also = ("density",)
    _not = ("sepsets",)

    def __post_init__(self) -> None:
        marks = np.array(self.marks, np.int8)
        if marks.ndim != 2 or marks.shape[0] != marks.shape[1]:
            raise InvalidArgument(f"marks must be square; got shape {marks.shape}")
        if marks.size and (marks.min() < NONE or marks.max() > TAIL):
            raise InvalidArgument("marks must be 0 (none), 1 (circle), 2 (arrowhead) or 3 (tail)")
        if ((marks == NONE) != (marks.T == NONE)).any() or marks.diagonal().any():
            raise InvalidArgument("marks: an edge needs a mark at both ends, and no node has an edge to itself")
        marks.flags.writeable = False
        object.__setattr__(self, "marks", marks)
        names = tuple(str(name) for name in self.names) or tuple(f"x{i}" for i in range(len(marks)))
        if len(names) != len(marks):
            raise InvalidArgument(f"{len(marks)} nodes need as many names; got {len(names)}")
        object.__setattr__(self, "names", names)

    @property
    def n(self) -> int:
        """How many nodes there are."""
        return len(self.marks)

    def edges(self) -> list[Edge]:
        """Every edge once, a < b."""
        rows, columns = np.nonzero(np.triu(self.marks))
        pairs = zip(rows.tolist(), columns.tolist(), strict=True)
        return [
            Edge(a, b, int(self.marks[b, a]), int(self.marks[a, b]), (self.names[a], self.names[b])) for a, b in pairs
        ]

    def links(self) -> list[tuple[int, int, str, str]]:
        """Every edge as pictures take it: both nodes, and the mark at each as a sign, `-`, `>` or `o`."""
        return [(edge.a, edge.b, _RIGHT[edge.at_a], _RIGHT[edge.at_b]) for edge in self.edges()]

    @property
    def density(self) -> float:
        """Edges over pairs; 0 for fewer than two nodes."""
        return float((self.marks != NONE).mean() * self.n / (self.n - 1)) if self.n > 1 else 0.0

    def adjacent(self, i: int) -> tuple[int, ...]:
        """The nodes that share an edge with i."""
        return tuple(np.flatnonzero(self.marks[self._node(i)]).tolist())

    @cached_property
    def _links(self) -> Links:
        return Links.of(self.marks)

    def dsep_tree(self, x: int, radius: int | None = None) -> DsepTree:
        """Possible-d-sep of x with the depth of each node and the nodes before it; `radius` ends the paths."""
        return self._links.dsep_tree(self._node(x), radius=radius)

    def possible_ancestors(self, x: int) -> tuple[int, ...]:
        """Nodes with a possibly directed path to x: no arrowhead against it and no tail at its far end; x left out."""
        return tuple(bits(self._links.possible_ancestors(1 << self._node(x)) & ~(1 << x)))

    def definite_ancestors(self, x: int) -> tuple[int, ...]:
        """Nodes with a path of arrows `->` to x."""
        directed = (self.marks == ARROW) & (self.marks.T == TAIL)
        seen, new = {self._node(x)}, [x]
        while new:
            new = [u for u in np.flatnonzero(directed[:, new].any(axis=1)).tolist() if u not in seen]
            seen.update(new)
        return tuple(sorted(seen - {x}))

    def latent_pairs(self) -> list[tuple[int, int]]:
        """The pairs a `<->` b: something that is not in the graph moves both."""
        return [(edge.a, edge.b) for edge in self.edges() if edge.at_a == edge.at_b == ARROW]

    @property
    def confidence(self) -> float | None:
        """Mean of $1 - e^{-|ln p - ln alpha|}$ over the executed tests, ours; None where there are no p-values."""
        return None if self.alpha is None else structure_confidence(self.tests, self.alpha)

    def edge_confidence(self) -> NDArray[np.float64]:
        """`[n, n]`: the least confidence among the tests of each pair; 0 on the diagonal and where nothing was tested."""
        least = np.full((self.n, self.n), np.inf)
        if self.alpha is not None and len(self.tests):
            np.minimum.at(least, (self.tests.x, self.tests.y), confidences(self.tests, self.alpha))
        least = np.minimum(least, least.T)
        return np.where(np.isfinite(least), least, 0.0)

    def trust(self) -> Trust:
        """How far to trust the graph, in plain sentences."""
        return judge(self)

    @classmethod
    def from_dag(
        cls,
        parents: Sequence[Iterable[int]],
        observed: Sequence[int],
        selection: Iterable[int] = (),
        names: Sequence[str] | None = None,
    ) -> PAG:
        """The true PAG over `observed` of a graph without cycles: ICD with d-separation for a test.

        Args:
            parents: `parents[v]` are the parents of node v.
            observed: the nodes of the PAG, in this order; nodes that are neither these nor `selection` are latent.
            selection: nodes conditioned on when sampling.
            names: of the observed nodes.
        """
        from heedful.discovery.independence import DSeparation
        from heedful.discovery.learners import icd

        chosen = tuple(selection)
        oracle = DSeparation(parents, observed=observed, selection=chosen)
        return icd(oracle, names=names, selection_bias=bool(chosen))

    def to_dict(self) -> dict[str, Any]:
        """JSON types alone; `from_dict` reads it back. `edge_confidence` is in the order of `edges`."""
        edges, sure = self.edges(), self.edge_confidence()
        return super().to_dict() | {
            "edges": [str(edge) for edge in edges],
            "sepsets": [[a, b, list(each)] for (a, b), each in sorted(self.sepsets.items())],
            "edge_confidence": None if self.alpha is None else [float(sure[edge.a, edge.b]) for edge in edges],
            "trust": self.trust().to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PAG:
        """A graph from what `to_dict` gave."""
        try:
            return cls(
                marks=np.array(values["marks"], np.int8).reshape(len(values["names"]), len(values["names"])),
                names=tuple(values["names"]),
                sepsets={(int(a), int(b)): tuple(each) for a, b, each in values["sepsets"]},
                tests=Tests.from_dict(values["tests"]),
                order=None if values["order"] is None else tuple(values["order"]),
                notes=tuple(values.get("notes", ())),
                **{name: values[name] for name in _PLAIN},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"not a graph as PAG.to_dict writes it: {error!r}") from error

    to_networkx = exports.to_networkx
    to_dot = exports.to_dot
    to_graphml = exports.to_graphml
    to_causallearn = exports.to_causallearn
    from_causallearn = staticmethod(exports.from_causallearn)

    def plot(
        self, ax: Axes | None = None, highlight: Iterable[int] = (), target: int | None = None, layout: str = "auto"
    ) -> Axes:
        """Draws the graph; `highlight` are nodes to stand out, `target` the one asked about.

        `layout="column"` keeps the order of the nodes, as for the words of a text; `"graph"` puts nodes that share edges near one another and
        causes above effects. `"auto"` takes the column where there is a target or an order.
        """
        from heedful.report import diagrams, graphs

        check_choice(("auto", "column", "graph"), layout=layout)
        ordered = target is not None or self.order is not None
        picture: Any = graphs if layout == "column" or (layout == "auto" and ordered) else diagrams
        return picture.plot(self.names, self.links(), ax=ax, highlight=tuple(highlight), target=target)

    def __iter__(self) -> Iterator[Edge]:
        return iter(self.edges())

    def __repr__(self) -> str:
        edges = [str(edge) for edge in self.edges()]
        shown = ", ".join(edges[:8]) + (f", ... {len(edges) - 8} more" if len(edges) > 8 else "")
        how = ", ".join(
            f"{name}={value!r}"
            for name, value in (("learner", self.learner), ("alpha", self.alpha), ("samples", self.samples))
            if value
        )
        return f"PAG({quantity(self.n, 'node')}, {quantity(len(edges), 'edge')}{', ' + how if how else ''}: {shown or 'none'})"

    def _node(self, at: int) -> int:
        if not 0 <= at < self.n:
            raise InvalidArgument(f"node {at} is not in 0 ... {self.n - 1}")
        return int(at)

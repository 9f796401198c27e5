"""How far a graph depends on the head, the layer and the settings it was learned with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heedful._checks import check_choice
from heedful._plot import Axes, heat_map
from heedful._progress import Progress, silent
from heedful._result import Result
from heedful._text import quantity
from heedful.discovery.graph import PAG
from heedful.discovery.paths import ARROW, NONE
from heedful.lens.causes.attention_graph import AttentionCausalGraph
from heedful.lens.observation import Observation

ALPHAS = (1e-5, 1e-3, 0.01, 0.05)


@dataclass(frozen=True, repr=False, eq=False)
class Stability(Result):
    """In what share of the graphs each edge stands, when one thing is changed at a time.

    Attributes:
        names: of the nodes.
        by: for each of `"heads"`, `"layers"`, `"alpha"`, `"samples"`: `[n, n]`, the share of graphs in which a pair is adjacent.
        into: the same for arrowheads: `into[kind][i, j]` is the share of graphs with an arrowhead at j, of those in which i and j are
            adjacent; NaN where none is.
        settings: for each, what was tried.
        agreement: for each, the mean over pairs of how many of two graphs agree on an edge: 1 where all graphs have the same edges.
    """

    names: tuple[str, ...]
    by: dict[str, NDArray[np.float64]]
    into: dict[str, NDArray[np.float64]]
    settings: dict[str, tuple[Any, ...]]
    agreement: dict[str, float]

    def edges(self, kind: str = "heads", least: float = 0.5) -> list[tuple[str, str, float]]:
        """The pairs that are adjacent in at least this share of graphs, the surest first."""
        check_choice(self.by, kind=kind)
        share = self.by[kind]
        pairs = zip(*np.nonzero(np.triu(share >= least, 1)), strict=True)
        return sorted(((self.names[i], self.names[j], float(share[i, j])) for i, j in pairs), key=lambda one: -one[2])

    def plot(self, ax: Axes | None = None, kind: str = "heads") -> Axes:
        """Draws the shares as a matrix."""
        check_choice(self.by, kind=kind)
        ax = heat_map(ax, self.by[kind], vmin=0, vmax=1, aspect="equal")
        ax.set_xticks(range(len(self.names)), self.names, rotation=90)
        ax.set_yticks(range(len(self.names)), self.names)
        ax.set_title(f"share of {len(self.settings[kind])} graphs with an edge, by {kind}")
        return ax

    def __repr__(self) -> str:
        by = ", ".join(f"{kind} {value:.2f} of {len(self.settings[kind])}" for kind, value in self.agreement.items())
        return f"Stability({quantity(len(self.names), 'node')}; agreement by {by})"


def stability(
    seen: Observation,
    nodes: Sequence[Sequence[int] | int] | None = None,
    names: Sequence[str] | None = None,
    *,
    head: int | None = None,
    layers: Sequence[int] | None = None,
    alphas: Sequence[float] = ALPHAS,
    samples: Sequence[int] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Stability:
    """Learns the graph again with another head, layer, alpha or sample size, one thing at a time, and counts edges.

    Args:
        seen: what was observed, of one text.
        nodes, names: as in `AttentionCausalGraph.fit`.
        head: the one whose alpha and samples are changed; by default all heads are counted together.
        layers: to compare, all that were observed by default, each with all its heads.
        alphas: to compare.
        samples: to compare; a quarter, a half, all and twice of the embedding's width by default.
        settings: of `AttentionCausalGraph`.

    >>> import torch
    >>> from heedful.lens import observe
    >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval()
    >>> sorted(stability(observe(layer, torch.randn(1, 5, 16))).by)
    ['alpha', 'heads', 'layers', 'samples']
    """
    base = AttentionCausalGraph(**settings)
    tried = list(range(len(seen))) if layers is None else list(layers)
    graph = replace(base).fit(seen, nodes=nodes, names=names)
    one = replace(base, head=base.head if head is None else head)
    middle = graph.samples_
    sizes = [max(4, middle // 4), max(4, middle // 2), middle, 2 * middle] if samples is None else list(samples)
    sizes = list(dict.fromkeys(sizes))
    total, done = len(tried) + len(alphas) + len(sizes), 0

    def learn(which: AttentionCausalGraph) -> tuple[PAG, ...]:
        nonlocal done
        (progress or silent)(done, total, "learning")
        done += 1
        return which.fit(seen, nodes=graph.nodes_, names=graph.pags_[0].names).pags_

    groups: dict[str, list[tuple[PAG, ...]]] = {
        "heads": [(pag,) for pag in graph.pags_],
        "layers": [learn(replace(base, layer=layer)) for layer in tried],
        "alpha": [learn(replace(one, alpha=alpha)) for alpha in alphas],
        "samples": [learn(replace(one, n_samples=size)) for size in sizes],
    }
    by: dict[str, NDArray[np.float64]] = {}
    into: dict[str, NDArray[np.float64]] = {}
    agreement: dict[str, float] = {}
    for kind, graphs in groups.items():
        # [settings, n, n]: the share of heads with the edge, under each setting.
        shares = np.stack([np.mean([pag.marks != NONE for pag in pags], axis=0) for pags in graphs])
        arrows = np.mean([np.mean([pag.marks == ARROW for pag in pags], axis=0) for pags in graphs], axis=0)
        by[kind] = shares.mean(0)
        with np.errstate(invalid="ignore"):
            into[kind] = np.where(by[kind] > 0, arrows / by[kind], np.nan)
        agreement[kind] = _agreement(shares)
    changes = {"heads": graph.heads_, "layers": tuple(tried), "alpha": tuple(alphas), "samples": tuple(sizes)}
    return Stability(graph.pags_[0].names, by, into, changes, agreement)


def _agreement(shares: NDArray[np.float64]) -> float:
    """1 less the mean difference between two settings, over pairs of nodes and pairs of settings."""
    count, n = shares.shape[:2]
    if count < 2 or n < 2:
        return 1.0
    upper = shares[:, *np.triu_indices(n, 1)]
    return float(1 - np.mean([np.abs(one - other).mean() for one, other in combinations(upper, 2)]))

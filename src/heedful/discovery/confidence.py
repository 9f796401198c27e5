"""How sure a learned graph is: of each test, of the whole, and in plain words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from heedful._checks import check_number
from heedful._result import Result
from heedful._text import quantity
from heedful.discovery.record import Tests

if TYPE_CHECKING:
    from heedful.discovery.graph import PAG

# Above this share of adjacent pairs a graph says little: ours, see `judge`.
NEAR_COMPLETE = 0.8
UNSURE = 0.5
# Fewer samples than these find an edge only where a correlation is all but 1: ours, see `weakest_edge`.
VISIBLE = 0.9


@dataclass(frozen=True)
class Trust(Result):
    """A verdict on a graph.

    Attributes:
        level: `"good"`, `"limited"` or `"none"`.
        sentences: why, plainly; at least one.
    """

    level: str
    sentences: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.sentences)


def confidences(tests: Tests, alpha: float) -> NDArray[np.float64]:
    r"""$c_t = 1 - e^{-|\ln p_t - \ln\alpha|}$ for each test: 0 at the threshold, $1 - \alpha$ for p = 1, 1 for p = 0; 0 if untestable.

    Ours. The confidence of Rohekar et al. (ICML 2025) compares entropies of p-values and is another quantity.
    """
    check_number(0, 1, alpha=alpha)
    return np.where(tests.testable, -np.expm1(-np.abs(tests.log_p - math.log(alpha))), 0.0)


def structure_confidence(tests: Tests, alpha: float) -> float:
    """The mean of `confidences` over the executed tests, in [0, 1]; 0 without tests.

    >>> import numpy as np
    >>> from heedful.discovery import discover, structure_confidence
    >>> pag = discover(np.eye(3), samples=100, alpha=0.01)
    >>> round(structure_confidence(pag.tests, 0.01), 6)
    0.99
    """
    return float(confidences(tests, alpha).mean()) if len(tests) else 0.0


def weakest_edge(samples: int, alpha: float) -> float:
    """The smallest correlation that Fisher's z tells from none, given nothing: tanh(z / sqrt(N - 3)).

    >>> round(weakest_edge(4, 0.01), 3), round(weakest_edge(1000, 0.01), 3)
    (0.988, 0.081)
    """
    if alpha <= 0 or samples <= 3:
        return 1.0
    return math.tanh(-NormalDist().inv_cdf(alpha / 2) / math.sqrt(samples - 3)) if alpha < 1 else 0.0


def judge(pag: PAG) -> Trust:
    """Reads a graph's own record for reasons not to trust it."""
    pairs = pag.n * (pag.n - 1) // 2
    if pairs == 0:
        return Trust("none", (f"A graph of {quantity(pag.n, 'node')} has no pairs to test.",))
    edges = len(pag.edges())
    void: list[str] = []
    doubts = list(pag.notes)
    weakest = 0.0 if None in (pag.samples, pag.alpha) else weakest_edge(pag.samples or 0, pag.alpha or 0.01)
    if weakest > VISIBLE:
        void.append(
            f"{pag.samples} samples have no power: at alpha = {pag.alpha:g} a correlation below {weakest:.3f} counts as none, so that missing "
            "edges mean nothing; take more samples."
        )
    if pag.n > 2 and edges == pairs:
        void.append(f"Every one of the {pairs} pairs stays adjacent: no independence was found, so nothing is learned.")
    elif pag.n > 2 and edges > NEAR_COMPLETE * pairs:
        void.append(f"{edges} of {pairs} pairs stay adjacent: a near-complete graph says little about causes.")
    if len(pag.tests) and pag.untestable == len(pag.tests):
        void.append("None of the tests could be decided: too few samples, or variables that fix one another.")
    elif pag.untestable:
        doubts.append(
            f"{pag.untestable} of {len(pag.tests)} tests could not be decided (too few samples, or variables that fix one "
            "another) and were counted as dependent."
        )
    if pag.stopped:
        doubts.append(pag.stopped)
    elif pag.reach is not None:
        doubts.append(
            f"Only sets of up to {pag.reach} variables were tested: edges that larger ones separate are still there."
        )
    if pag.conflicts:
        marks = quantity(pag.conflicts, "mark")
        doubts.append(f"The rules disagreed on {marks}: the tests contradict one another there.")
    if pag.confidence is not None and len(pag.tests) and pag.confidence < UNSURE:
        doubts.append("Many tests fell near the threshold: a slightly different sample may give another graph.")
    if void or doubts:
        return Trust("none" if void else "limited", (*void, *doubts))
    return Trust("good", (f"{pairs - edges} of {pairs} pairs were separated and no rule disagreed with another.",))

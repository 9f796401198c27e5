"""From attention to a causal graph over its tokens, one for each head."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from heedful._checks import is_whole
from heedful._errors import InvalidArgument, Unsupported
from heedful._progress import Progress, silent
from heedful.discovery.graph import PAG
from heedful.discovery.independence import RowFisherZ
from heedful.discovery.learners import fci, icd, pc
from heedful.lens._record import LayerRecord
from heedful.lens.causes import covariance
from heedful.lens.causes.covariance import attention_factor, sem_weights, values_of, weights_of
from heedful.lens.causes.questions import unique
from heedful.lens.causes.settings import check_graph
from heedful.lens.observation import Observation


@dataclass
class AttentionCausalGraph:
    r"""Learns what causes what among tokens from one layer's attention: an estimator with `fit`, a graph for each head.

    $R = \mathrm{corr}(A A^T)$, partial correlations of R by Fisher's z with N samples, iterative causal discovery on its decisions (ABCD,
    Rohekar et al., NeurIPS 2023; for decoders the ordered learner, ICML 2025). N is how many dimensions an embedding has: each is
    read as one draw. $A A^T$ is no sample covariance, so alpha is a threshold and no error rate; N and alpha are kept with
    each graph. Partial correlations are computed from the rows of A and not from R, whose condition number is A's squared.

    Args:
        layer: place in the order of execution, for an `Observation`.
        head: `"all"`, one, or several.
        n_samples: `"hidden_size"` (heads times their width), `"head_dim"`, or a number.
        alpha: tests with p above it count as independent.
        learner: `"icd"`, `"ordered icd"`, `"fci"`, `"pc"`; `"auto"` takes the ordered one where no token sees a later one.
        covariance: as in `attention_correlation`.
        selection_bias: as in `icd`.
        stable: as in `icd`; here the default, so that the order of the nodes decides nothing.
        max_cond_size, max_tests: bounds of the learner, for each head.
        normalize: accept rows that do not sum to one.

    Fitted: `pags_` (one for each head), `heads_`, `nodes_` (the places of each node), `correlation_` `[heads, m, m]`, `confidence_`
    `[heads]`, `samples_`, `sem_weights_` (`[heads, n, n]` of causal attention, else None).

    >>> import numpy as np
    >>> A = np.array([[1.0, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]])
    >>> graph = AttentionCausalGraph(n_samples=64, learner="ordered icd").fit(A)
    >>> [str(edge) for edge in graph.pags_[0].edges()]
    ['x0 o-> x1', 'x1 --> x2']
    """

    layer: int = -1
    head: Any = "all"
    n_samples: Any = "hidden_size"
    alpha: float = 0.01
    learner: str = "auto"
    covariance: str = "attention"
    selection_bias: bool = False
    stable: bool = True
    max_cond_size: int | None = None
    max_tests: int | None = 200_000
    normalize: bool = False

    def fit(
        self,
        A: Any,
        y: None = None,
        *,
        V: Any = None,
        nodes: Sequence[Sequence[int] | int] | None = None,
        names: Sequence[str] | None = None,
        sequence: int = 0,
        progress: Progress | None = None,
    ) -> Self:
        """Learns the graphs.

        Args:
            A: weights `[n, n]` or `[heads, n, n]`, a `LayerRecord`, or an `Observation`.
            V: values `[heads, n, d]`, where weights are given and the covariance needs them.
            nodes: tokens, or groups of tokens to be merged, in order; all that are no padding and not special by default.
            names: of the nodes; repeated ones are numbered.
            sequence: which of an observed batch.
            progress: called with the heads done and to do, and what is under way.
        """
        check_graph(self)
        weights, V, width = self._read(A, V, sequence)
        if nodes is None:
            nodes, tokens = self._content(A, weights.shape[-1], sequence)
            names = tokens if names is None else names
        names = None if names is None else unique(names)
        groups = [(node,) if isinstance(node, int | np.integer) else tuple(node) for node in nodes]
        self.heads_ = self._heads(len(weights))
        self.samples_ = self._samples(width, len(weights))
        weights = weights[list(self.heads_)]
        V = None if V is None else V[list(self.heads_)]
        causal = bool(weights.shape[-1] > 1) and covariance.is_triangular(weights)
        learner = ("ordered icd" if causal else "icd") if self.learner == "auto" else self.learner
        rows = attention_factor(weights, None, self.covariance, V, groups, normalize=self.normalize)
        self.correlation_ = covariance.correlation_of(rows)
        self.nodes_, self.learner_ = tuple(groups), learner
        pags: list[PAG] = []
        for at, one in enumerate(rows):
            (progress or silent)(at, len(rows), "learning")
            with warnings.catch_warnings():
                # What could not be tested is told by each graph's `trust()`.
                warnings.simplefilter("ignore", UserWarning)
                pags.append(self._learn(RowFisherZ(one, self.samples_, self.alpha), learner, names))
        self.pags_ = tuple(pags)
        self.confidence_: NDArray[np.float64] = np.array([pag.confidence for pag in pags], float)
        try:
            self.sem_weights_ = sem_weights(weights) if causal else None
        # A token gives itself no weight, or weights are damaged outside the nodes.
        except InvalidArgument:
            self.sem_weights_ = None
        return self

    def _read(self, A: Any, V: Any, sequence: int) -> tuple[NDArray[np.float64], Any, int | None]:
        """Weights `[heads, n, n]`, values, and the head's width where it is known."""
        if isinstance(A, Observation):
            try:
                A = A[self.layer]
            except IndexError:
                raise InvalidArgument(f"layer {self.layer} is out of range: {len(A)} were observed") from None
        if isinstance(A, LayerRecord):
            if A.kind != "self" or A.queries_len != A.keys_len:
                raise Unsupported(f"layer {A.index} ({A.name}) attends elsewhere than to its own tokens")
            if not 0 <= sequence < A.batch:
                raise InvalidArgument(f"sequence {sequence} is out of range: {A.batch} were observed")
            needs = self.covariance in ("value", "output")
            width = A._tensors["values"].shape[-1] if "values" in A._keep and "values" in A._tensors else None
            if width is None and "queries" in A._tensors:
                width = A._tensors["queries"].shape[-1]
            return weights_of(A, sequence), values_of(A, sequence) if needs else None, width
        weights = covariance.array(A, "A")
        if weights.ndim not in (2, 3):
            raise InvalidArgument(f"A must be weights [n, n] or [heads, n, n]; got shape {weights.shape}")
        alone = weights.ndim == 2
        if V is not None:
            V = covariance.array(V, "V")
            V = V[None] if alone and V.ndim == 2 else V
        return weights[None] if alone else weights, V, None if V is None else V.shape[-1]

    def _content(self, A: Any, n: int, sequence: int) -> tuple[list[int], list[str] | None]:
        if not isinstance(A, Observation):
            return list(range(n)), None
        tokens = A.query_tokens(A[self.layer])
        usable = (tokens.valid & ~tokens.special)[sequence].tolist()
        places = [place for place, counts in enumerate(usable) if counts]
        return places, [tokens.strings[sequence][place] for place in places]

    def _heads(self, count: int) -> tuple[int, ...]:
        heads = range(count) if isinstance(self.head, str) and self.head == "all" else self.head
        heads = [heads] if is_whole(heads) else heads
        numbers = list(heads) if hasattr(heads, "__iter__") else []
        if not numbers or not all(is_whole(head) and 0 <= head < count for head in numbers):
            raise InvalidArgument(f"heads must be 'all' or among 0..{count - 1}; got {self.head!r}")
        return tuple(int(head) for head in numbers)

    def _samples(self, width: int | None, heads: int) -> int:
        if isinstance(self.n_samples, int):
            return self.n_samples
        if width is None:
            raise InvalidArgument(
                f"n_samples={self.n_samples!r} needs to know the head's width; give a number with weights alone"
            )
        return width if self.n_samples == "head_dim" else width * heads

    def _learn(self, test: RowFisherZ, learner: str, names: Sequence[str] | None) -> PAG:
        options: dict[str, Any] = {"max_cond_size": self.max_cond_size, "max_tests": self.max_tests, "names": names}
        if learner == "pc":
            return pc(test, **options)
        options["selection_bias"] = self.selection_bias
        if learner == "fci":
            return fci(test, **options)
        return icd(test, order=range(test.n) if learner == "ordered icd" else None, stable=self.stable, **options)

"""Why a model gave its answer: the causal graph over its tokens, and the smallest sets of words whose removal changes it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heedful._errors import InvalidArgument
from heedful.lens.causes.attention_graph import AttentionCausalGraph
from heedful.lens.causes.baselines import BaselineResult, compare
from heedful.lens.causes.conclusion import Searched, conclude, last_of
from heedful.lens.causes.covariance import weights_of
from heedful.lens.causes.questions import Seen, Task, unique
from heedful.lens.causes.result import Effect, Explanation, Removal, WordScore
from heedful.lens.causes.searching import Replies, search
from heedful.lens.causes.tasks import asked, asked_in_windows, opened

__all__ = ["CausalExplainer", "Effect", "Explanation", "Removal", "WordScore", "explain"]

# Words that a graph is learned over unless more are asked for.
CANDIDATES = 32
# A set of candidates is an integer's bits.
MOST_CANDIDATES = 256
# Sets of one size that are tried; a quarter in texts of more tokens than are short, where each question takes long.
PATIENCE, SHORT = 256, 64
SETTINGS = (
    "layer",
    "heads",
    "alpha",
    "covariance",
    "merge",
    "max_size",
    "max_sets",
    "max_calls",
    "radius",
    "order",
    "slack",
    "patience",
    "prune",
    "seed",
)
ORDERS = ("effect", "depth")


@dataclass
class CausalExplainer:
    """Explains a model's answers; settings are kept, `explain` is called as often as needed.

    Arguments are those of `heedful.explain`.

    >>> explainer = CausalExplainer(max_size=2, heads=[0, 1], baselines=False)
    >>> explainer.explain("Water is wet.").task
    'embedding'
    """

    model: Any = None
    tokenizer: Any = None
    task: str = "auto"
    layer: int = -1
    heads: Any = "all"
    alpha: float = 0.01
    n_samples: Any = "hidden_size"
    covariance: str = "attention"
    learner: str = "auto"
    replace: str = "auto"
    merge: str = "words"
    max_size: int = 5
    max_sets: int = 10
    max_calls: int = 2000
    radius: int | None = None
    candidates: int | None = None
    order: str = "effect"
    slack: float = 0.8
    patience: int | None = None
    prune: bool = True
    baselines: bool | str = True
    seed: int = 0
    batch_size: int = 32
    truncate: bool = False
    _ready: Any = field(default=None, init=False, repr=False, compare=False)

    def explain(
        self, text: Any = None, target: Any = None, *, progress: Callable[[str, int, int], None] | None = None
    ) -> Explanation:
        """One answer explained; `progress` is told what is under way, how much of it is done, and how much there is."""
        began = time.perf_counter()
        self._graph()
        say = progress or (lambda what, done, total: None)
        say("reading", 0, 1)
        task = asked(self._adapter(), text, self.replace, self.merge, self.truncate)
        return self._explained(task, target, say, began)

    def explain_windows(
        self, text: str, target: Any = None, *, progress: Callable[[str, int, int], None] | None = None
    ) -> list[Explanation]:
        """A text of any length in windows that the model can read, each explained by itself; `Explanation.part` says which it is.

        Windows hold whole words, follow one another without a gap, and share nothing. For classifiers and encoders.
        """
        self._graph()
        say = progress or (lambda what, done, total: None)
        say("reading", 0, 1)
        tasks = asked_in_windows(self._adapter(), text, self.replace, self.merge)
        return [self._explained(task, target, say, time.perf_counter()) for task in tasks]

    def _explained(self, task: Task, target: Any, say: Callable[[str, int, int], None], began: float) -> Explanation:
        graph = self._graph()
        replies = Replies(task, target, self.batch_size)
        seen = task.observed(replies.answer, self.layer)
        attention = _attended(weights_of(seen.record), task)
        gradient = task.gradient(replies.answer)
        units = _chosen(attention, gradient, self.candidates or CANDIDATES)
        nodes, names, target_node, of_unit = _nodes(task, units, seen)
        graph.fit(seen.record, nodes=nodes, names=names, progress=lambda done, total: say("learning", done, total))
        ask = replies.inquiry(self.max_calls, units)
        found = search(
            ask,
            graph.pags_,
            target_node,
            of_unit,
            [attention[unit] for unit in units],
            max_size=self.max_size,
            radius=self.radius,
            order=self.order,
            slack=self.slack,
            patience=self.patience or (PATIENCE if len(seen.tokens) <= SHORT else PATIENCE // 4),
            prune=self.prune,
            max_sets=self.max_sets,
            last=last_of(task, units),
            progress=lambda done, total: say("searching", done, total),
        )
        # Every word by itself, whether or not the search came to it.
        ask([(at,) for at in range(len(units)) if (at,) not in ask.tried][: int(min(ask.left, len(units)))])
        others: dict[str, BaselineResult] = {}
        if self.baselines:
            say("comparing", 0, 1)
            parts = ([worth[unit] for unit in units] if worth else None for worth in (attention, gradient))
            by_attention, by_gradient = parts
            assert by_attention is not None
            others = compare(
                replies,
                by_attention,
                by_gradient,
                of_unit,
                units,
                max_size=self.max_size,
                seed=self.seed,
                with_exhaustive=self.baselines == "exhaustive",
                max_calls=self.max_calls,
            )
        searched = Searched(task, seen, replies, ask, found, graph, names, target_node, of_unit, units)
        settings = {name: getattr(self, name) for name in SETTINGS}
        return replace(conclude(searched, settings, others), seconds=time.perf_counter() - began)

    def _adapter(self) -> Any:
        """The model made ready, once for as long as it is the same."""
        given = (self.model, self.tokenizer, self.task)
        if self._ready is None or any(old is not new for old, new in zip(self._ready[0], given, strict=True)):
            self._ready = given, opened(*given)
        return self._ready[1]

    def _graph(self) -> AttentionCausalGraph:
        """The graph's estimator, all settings checked before work starts."""
        counts = {name: getattr(self, name) for name in ("max_size", "max_sets", "max_calls", "batch_size")}
        counts |= {
            name: value
            for name, value in (("radius", self.radius), ("candidates", self.candidates), ("patience", self.patience))
            if value is not None
        }
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgument(f"{name} must be a whole number from 1 on; got {value!r}")
        if self.candidates is not None and self.candidates > MOST_CANDIDATES:
            raise InvalidArgument(f"candidates must be {MOST_CANDIDATES} at most; got {self.candidates}")
        if self.baselines not in (True, False, "exhaustive"):
            raise InvalidArgument(f"baselines must be True, False or 'exhaustive'; got {self.baselines!r}")
        if self.order not in ORDERS:
            raise InvalidArgument(f"order must be one of {', '.join(ORDERS)}; got {self.order!r}")
        if not isinstance(self.slack, int | float) or not 0 <= self.slack < math.inf:
            raise InvalidArgument(f"slack must be a share of the margin, 0 or more; got {self.slack!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise InvalidArgument(f"seed must be a whole number from 0 on; got {self.seed!r}")
        if not isinstance(self.truncate, bool):
            raise InvalidArgument(f"truncate must be True or False; got {self.truncate!r}")
        if isinstance(self.layer, bool) or not isinstance(self.layer, int):
            raise InvalidArgument(f"layer must be a whole number, -1 for the last; got {self.layer!r}")
        graph = AttentionCausalGraph(
            layer=self.layer,
            head=self.heads,
            n_samples=self.n_samples,
            alpha=self.alpha,
            learner=self.learner,
            covariance=self.covariance,
            normalize=True,
        )
        graph.check()
        return graph


def explain(
    model: Any = None,
    text: Any = None,
    target: Any = None,
    *,
    tokenizer: Any = None,
    task: str = "auto",
    layer: int = -1,
    heads: Any = "all",
    alpha: float = 0.01,
    n_samples: Any = "hidden_size",
    covariance: str = "attention",
    learner: str = "auto",
    replace: str = "auto",
    merge: str = "words",
    max_size: int = 5,
    max_sets: int = 10,
    max_calls: int = 2000,
    radius: int | None = None,
    candidates: int | None = None,
    order: str = "effect",
    slack: float = 0.8,
    patience: int | None = None,
    prune: bool = True,
    baselines: bool | str = True,
    seed: int = 0,
    batch_size: int = 32,
    truncate: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Explanation:
    r"""Which words made a model say this: the smallest sets whose removal changes its answer, found along a causal graph.

    1. The model's own answer is put into its input (the predicted word in place of the mask, the next token or item behind the rest; a
    classifier's stands at `[CLS]`). 2. From the attention of that pass a causal graph over the words is learned, for each head.
    3. Sets of 1, 2, ... words that a graph connects to the answer are taken away and the model asked again, until its answer
    changes. 4. The set is pruned, and checked by one more call (CLEANN, Rohekar et al., NeurIPS 2023). 5. Other sets of the same size are
    looked for, and the effect of every single word is measured.

    Args:
        model: a Hugging Face folder (the demo MiniLM by default), a model of transformers with its tokenizer, a
            `lens.causes.TextModel` (an encoder with a head of its own), a `lens.causes.Recommender`, or any `lens.causes.Task`.
        text: what it reads: a text, with one mask for a masked language model; for a recommender, a list of items.
        target: the answer to explain: a label, a word, an item, or its number; the model's own by default. An answer that is not
            the first is explained by what makes it lose its rank.
        task: `"classification"`, `"mlm"`, `"next-token"`, `"embedding"`; by the model's class where it is `"auto"`. An encoder
            without a head predicts nothing: for it the set is what moves the sentence's embedding below a cosine of 0.7.
        layer, heads: whose attention; the deepest layer and all its heads by default.
        alpha, n_samples, covariance, learner: as in `lens.causes.AttentionCausalGraph`.
        replace: how a word is taken away: `"mask"` puts the mask token there, `"pad"` the padding token, seen as any other. `"drop"` hides its
            place from the attention of an encoder; from the text of a decoder, or a history of items, it is cut out, so that the first and the
            last word can go like any other. `"auto"` masks where there is a mask token, and drops elsewhere.
        merge: `"words"` takes the pieces of a word away together, since what is left of a word tells it; `"tokens"` does not. Words are
            those of your text, by its characters, whatever the tokenizer makes of them.
        max_size, max_calls: bounds on the set and on the different inputs that the search asks about.
        max_sets: how many sets of the smallest size are looked for and listed; of single words, all are.
        radius: how far from the answer the graph is followed; to its end by default.
        candidates: how many words take part, 32 by default: those most attended from the answer and those with the largest
            gradient times input, in turn. `settings` tells of how many.
        order, slack, patience: as in `lens.causes.search`; `order="depth"` is the paper's. By default up to 256 sets of one size
            are tried, 64 in texts of more than 64 tokens; `slack=0` with a large `patience` leaves none out.
        prune: take out members that the set does not need.
        baselines: also what other methods would give; `"exhaustive"` tries every set as well. Their calls are not among the
            result's.
        seed: of the random baseline.
        batch_size: how many inputs the model reads at once.
        truncate: read as much as the model can of a text that is too long: its beginning, the part around a mask, or what stands before the
            next token. `CausalExplainer.explain_windows` reads all of it.
        progress: called with what is under way, how much of it is done, and how much there is.

    Special tokens and punctuation are no candidates; `left_out` names every word that was never removed, and why.

    >>> from heedful import explain
    >>> found = explain(text="The blue whale is the largest animal on the planet.")
    >>> found.task, found.found, found.effect.after < 0
    ('embedding', True, True)
    """
    given = {name: value for name, value in locals().items() if name not in ("text", "target", "progress")}
    return CausalExplainer(**given).explain(text, target, progress=progress)


def _attended(weights: NDArray[np.float64], task: Task) -> list[float]:
    """The weight that the target's row gives each unit, head mean."""
    row = weights.mean(0)[list(task.target)].mean(0)
    return [float(row[list(unit)].sum()) for unit in task.units]


def _chosen(attention: Sequence[float], gradient: Sequence[float] | None, count: int) -> list[int]:
    """The units that take part, in the order of the text: by attention and by gradient times input, in turn."""
    orders = [sorted(range(len(attention)), key=lambda unit: -attention[unit])]
    if gradient is not None:
        orders.append(sorted(range(len(attention)), key=lambda unit: -abs(gradient[unit])))
    turns = [unit for pair in zip(*orders, strict=True) for unit in pair]
    return sorted(list(dict.fromkeys(turns))[:count])


def _nodes(
    task: Task, units: Sequence[int], seen: Seen
) -> tuple[list[tuple[int, ...]], tuple[str, ...], int, list[int]]:
    """The places and names of the nodes in order, the target's node, and the node of each unit."""
    target = tuple(task.target)
    # A decoder that classifies reads its answer at the last word, which can be removed like any other.
    home = next((unit for unit in units if set(target) <= set(task.units[unit])), None)
    if home is not None:
        target = tuple(task.units[home])
    # The mean of all tokens stands before them.
    places = sorted({*(tuple(task.units[unit]) for unit in units), target}, key=lambda one: (one[0], len(one) == 1))
    at = places.index(target)
    of_unit = [places.index(tuple(task.units[unit])) for unit in units]
    names = [""] * len(places)
    for unit, node in zip(units, of_unit, strict=True):
        names[node] = task.names[unit]
    if home is None:
        names[at] = seen.tokens[target[0]] if len(target) == 1 else "(mean of all tokens)"
    if names[at] in names[:at] + names[at + 1 :]:
        names[at] = f"{names[at]} (answer)"
    return places, unique(names), at, of_unit

"""Why a model gave its answer: the causal graph over its tokens, and the smallest set of words it hangs on."""

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
from heedful.lens.causes.covariance import weights_of
from heedful.lens.causes.questions import Seen, Task, unique
from heedful.lens.causes.result import Alternative, Effect, Explanation
from heedful.lens.causes.searching import Found, Inquiry, Replies, Units, search
from heedful.lens.causes.tasks import asked, opened

__all__ = ["Alternative", "CausalExplainer", "Effect", "Explanation", "explain"]

# Words that a graph is learned over unless more are asked for.
CANDIDATES = 32
# A set of candidates is an integer's bits.
MOST_CANDIDATES = 256
ALTERNATIVES = 10
# Sets of one size that are tried; a quarter in texts of more tokens than are short, where each question takes long.
PATIENCE, SHORT = 256, 64
SETTINGS = (
    "layer",
    "heads",
    "alpha",
    "covariance",
    "merge",
    "max_size",
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
    max_calls: int = 2000
    radius: int | None = None
    candidates: int | None = None
    order: str = "effect"
    slack: float = 0.8
    patience: int | None = None
    prune: bool = True
    all_minimal: bool = False
    baselines: bool | str = True
    seed: int = 0
    batch_size: int = 32
    _ready: Any = field(default=None, init=False, repr=False, compare=False)

    def explain(
        self, text: Any = None, target: Any = None, *, progress: Callable[[str, int, int], None] | None = None
    ) -> Explanation:
        """One answer explained; `progress` is told what is under way, how much of it is done, and how much there is."""
        began = time.perf_counter()
        graph = self._graph()
        say = progress or (lambda what, done, total: None)
        say("reading", 0, 1)
        task = asked(self._adapter(), text, self.replace, self.merge)
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
            all_minimal=self.all_minimal,
            progress=lambda done, total: say("searching", done, total),
        )
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
        return self._told(task, seen, replies, ask, found, graph, names, target_node, of_unit, units, others, began)

    def _adapter(self) -> Any:
        """The model made ready, once for as long as it is the same."""
        given = (self.model, self.tokenizer, self.task)
        if self._ready is None or any(old is not new for old, new in zip(self._ready[0], given, strict=True)):
            self._ready = given, opened(*given)
        return self._ready[1]

    def _graph(self) -> AttentionCausalGraph:
        """The graph's estimator, all settings checked before work starts."""
        counts = {"max_size": self.max_size, "max_calls": self.max_calls, "batch_size": self.batch_size}
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

    def _told(
        self,
        task: Task,
        seen: Seen,
        replies: Replies,
        ask: Inquiry,
        found: Found,
        graph: AttentionCausalGraph,
        names: tuple[str, ...],
        target_node: int,
        of_unit: list[int],
        units: list[int],
        others: dict[str, BaselineResult],
        began: float,
    ) -> Explanation:
        whole = ask([()])[0]
        best: Units = found.units or min(
            (one for one in ask.tried if one), key=lambda one: (ask.tried[one].margin, one), default=()
        )
        calls = ask.calls
        # Alone, and not in the batch it was found in.
        without = replies.replies([tuple(units[at] for at in best)])[0]
        flipped = bool(found.units) and without.flipped
        rest = tuple(at for at in range(len(units)) if at not in best)
        kept = replies.inquiry(units=units)([rest])[0]
        head = None if found.head is None or not flipped else graph.heads_[found.head]
        odds = (math.nan, math.nan) if task.kind == "embedding" else (whole.probability, without.probability)
        tried = sorted(
            (one for one in ask.tried if one and one != best),
            key=lambda one: (
                not ask.tried[one].flipped,
                len(one) if ask.tried[one].flipped else 0,
                ask.tried[one].margin,
            ),
        )
        more = len(found.all_units) if self.all_minimal else ALTERNATIVES
        alternatives = tuple(
            Alternative(tuple(of_unit[at] for at in one), ask.tried[one].flipped, ask.tried[one].margin)
            for one in tried[: max(more, ALTERNATIVES)]
        )
        indices = tuple(of_unit[at] for at in best)
        settings = {name: getattr(self, name) for name in SETTINGS} | {
            "replace": task.replace,
            "samples": graph.samples_,
            "learner": graph.learner_,
            "words": len(task.units),
            "candidates": len(units),
        }
        if not isinstance(settings["heads"], str | int):
            settings["heads"] = [int(one) for one in settings["heads"]]
        made = Explanation(
            task=task.kind,
            tokens=seen.tokens,
            nodes=graph.nodes_,
            target_node=target_node,
            names=names,
            answer=task.name(replies.answer),
            rank=replies.rank + 1,
            found=flipped,
            flipped_to=task.name(without.winner) if flipped else None,
            indices=indices,
            words=tuple(names[node] for node in indices),
            head=head,
            layer=seen.record.index,
            pags=graph.pags_,
            heads=graph.heads_,
            correlation=graph.correlation_,
            sem=graph.sem_weights_,
            effect=Effect(whole.margin, without.margin, kept.margin, *odds),
            alternatives=alternatives,
            baselines=others,
            calls=calls + 1,
            seconds=time.perf_counter() - began,
            settings=settings,
            confidence=tuple(graph.confidence_.tolist()),
            trust=(),
        )
        return replace(made, trust=_trust(made, found, without.flipped))


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
    max_calls: int = 2000,
    radius: int | None = None,
    candidates: int | None = None,
    order: str = "effect",
    slack: float = 0.8,
    patience: int | None = None,
    prune: bool = True,
    all_minimal: bool = False,
    baselines: bool | str = True,
    seed: int = 0,
    batch_size: int = 32,
    progress: Callable[[str, int, int], None] | None = None,
) -> Explanation:
    r"""Which words made a model say this: the smallest set whose removal changes its answer, found along a causal graph.

    1. The model's own answer is put into its input (the predicted word in place of the mask, the next token or item behind the rest; a
    classifier's stands at `[CLS]`). 2. From the attention of that pass a causal graph over the words is learned, for each head.
    3. Sets of 1, 2, ... words that a graph connects to the answer are taken away and the model asked again, until its answer
    changes. 4. The set is pruned, and checked by one more call (CLEANN, Rohekar et al., NeurIPS 2023).

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
        replace: how a word is taken away: `"mask"` puts the mask token there, `"drop"` hides its place from attention (of items:
            cuts them out), `"pad"` puts the padding token there, seen as any other. `"auto"` masks where there is a mask token.
        merge: `"words"` takes the pieces of a word away together, since what is left of a word tells it; `"tokens"` does not.
        max_size, max_calls: bounds on the set and on the different inputs that the search asks about.
        radius: how far from the answer the graph is followed; to its end by default.
        candidates: how many words take part, 32 by default: those most attended from the answer and those with the largest
            gradient times input, in turn. `settings` tells of how many.
        order, slack, patience: as in `lens.causes.search`; `order="depth"` is the paper's. By default up to 256 sets of one size
            are tried, 64 in texts of more than 64 tokens; `slack=0` with a large `patience` leaves none out.
        prune: take out members that the set does not need.
        all_minimal: go on to every set of the smallest size, for `alternatives`.
        baselines: also what other methods would give; `"exhaustive"` tries every set as well. Their calls are not among the
            result's.
        seed: of the random baseline.
        batch_size: how many inputs the model reads at once.
        progress: called with what is under way, how much of it is done, and how much there is.

    Special tokens, punctuation and a decoder's first token, which gathers the attention that goes nowhere, are no candidates.

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
    # The mean of all tokens stands before them.
    places = sorted([*(tuple(task.units[unit]) for unit in units), target], key=lambda one: (one[0], len(one) == 1))
    at = places.index(target)
    of_unit = [places.index(tuple(task.units[unit])) for unit in units]
    names = [""] * len(places)
    for unit, node in zip(units, of_unit, strict=True):
        names[node] = task.names[unit]
    names[at] = seen.tokens[target[0]] if len(target) == 1 else "(mean of all tokens)"
    if names[at] in names[:at] + names[at + 1 :]:
        names[at] = f"{names[at]} (answer)"
    return places, unique(names), at, of_unit


def _trust(told: Explanation, found: Found, alone: bool) -> tuple[str, ...]:
    """When not to trust it, plainly."""
    settings = told.settings
    said = []
    if told.task == "embedding":
        said.append(
            "Nothing is predicted here: the set is what moves the embedding of the text, not the cause of an answer."
        )
    if told.rank > 1:
        said.append(
            f"{told.answer!r} is not the model's first answer but its number {told.rank}; the set makes it lose that rank."
        )
    if settings["candidates"] < settings["words"]:
        said.append(
            f"Only {settings['candidates']} of {settings['words']} words took part, here and in the baselines: the most attended, and "
            "those with the largest gradient times input."
        )
    if found.units and not alone:
        said.append(
            "A set changed the answer in a batch but not alone: its margin is within rounding, so it does not count."
        )
    elif not told.found:
        why = "max_calls ended the search" if found.exhausted else "more words may have to go together, or other ones"
        said.append(
            f"No set of {settings['max_size']} or fewer words was found whose removal changes the answer; {why}."
        )
    elif told.head is None:
        said.append("No head's graph connects this set to the answer: it was found by single effects, not by a graph.")
    dense = sum(pag.trust().level == "none" for pag in told.pags)
    if dense:
        said.append(
            f"The graphs of {dense} of {len(told.pags)} heads are near-complete or untestable and propose almost any set."
        )
    said += [f"The graph shown: {sentence}" for sentence in told.pag.trust().sentences]
    return tuple(said)

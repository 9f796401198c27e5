"""Why a model gave its answer: the causal graph over its tokens, and the smallest sets of words whose removal changes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from heedful._errors import InvalidArgument
from heedful._progress import Progress, silent
from heedful._settings import documented
from heedful.bridges import answers
from heedful.bridges.reading import demo_model_path
from heedful.lens.causes.attention_graph import AttentionCausalGraph
from heedful.lens.causes.baselines import BaselineResult, compare
from heedful.lens.causes.conclusion import Evidence, conclude, last_of
from heedful.lens.causes.covariance import weights_of
from heedful.lens.causes.questions import Seen, Task, unique
from heedful.lens.causes.result import Explanation
from heedful.lens.causes.searching import Replies, search
from heedful.lens.causes.settings import CANDIDATES, ExplainSettings
from heedful.lens.causes.texts import TextModel

# Sets of one size that are tried; a quarter in texts of more tokens than are short, where each question takes long.
PATIENCE, SHORT = 256, 64


class CausalExplainer:
    """Explains a model's answers; settings are kept, `explain` is called as often as needed.

    Arguments are those of `heedful.explain`; `settings` holds them.

    >>> explainer = CausalExplainer(max_size=2, heads=[0, 1], baselines=False)
    >>> explainer.explain("Water is wet.").task
    'embedding'
    """

    @documented(ExplainSettings)
    def __init__(self, model: Any = None, tokenizer: Any = None, **settings: Any) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, ExplainSettings(**settings)

    def explain(self, text: Any = None, target: Any = None, *, progress: Progress | None = None) -> Explanation:
        """One answer explained; `progress` is called as in `heedful.explain`."""
        began, settings = time.perf_counter(), self.settings
        (progress or silent)(0, 1, "reading")
        reader = self._reader
        if settings.truncate and not isinstance(reader, TextModel):
            raise InvalidArgument("truncate is for models that read texts")
        if not isinstance(reader, Task):
            more = {"truncate": True} if settings.truncate else {}
            reader = reader.ask(text, settings.replace, settings.merge, **more)
        elif text is not None or settings.replace != "auto":
            raise InvalidArgument(
                "a Task holds its input and its way of taking away already; leave text and replace out"
            )
        return self._explanation(reader, target, progress or silent, began)

    def explain_windows(self, text: str, target: Any = None, *, progress: Progress | None = None) -> list[Explanation]:
        """A text of any length in windows that the model can read, each explained by itself; `Explanation.part` says which it is.

        Windows hold whole words, follow one another without a gap, and share nothing. For classifiers and encoders.
        """
        (progress or silent)(0, 1, "reading")
        if not isinstance(self._reader, TextModel):
            raise InvalidArgument("windows are for models that read texts")
        tasks = self._reader.windows(text, self.settings.replace, self.settings.merge)
        return [self._explanation(task, target, progress or silent, time.perf_counter()) for task in tasks]

    @cached_property
    def _reader(self) -> Any:
        """What can be asked: something with `ask`, or a `Task` itself, from whatever of the known kinds the model is."""
        model, tokenizer, kind = self.model, self.tokenizer, self.settings.task
        if isinstance(model, Task) or hasattr(model, "ask"):
            return model
        if kind == "recommendation":
            raise InvalidArgument("a recommender's marks must be told: explain(Recommender(model, mask_id=...), items)")
        if model is None or isinstance(model, str | Path):
            model, own = answers.open_model(demo_model_path() if model is None else model, kind)
            tokenizer = tokenizer or own
        if not isinstance(model, nn.Module) or not hasattr(model, "config"):
            raise InvalidArgument(
                "model must be a Hugging Face folder, a model of transformers with tokenizer=..., a TextModel, a Recommender or "
                f"a Task; got {type(model).__name__}"
            )
        return TextModel(model, tokenizer, kind)

    def _explanation(self, task: Task, target: Any, progress: Progress, began: float) -> Explanation:
        settings = self.settings
        replies = Replies(task, target, settings.batch_size)
        seen = task.observed(replies.answer, settings.layer)
        # The weight that the target's row gives each unit, head mean.
        row = weights_of(seen.record).mean(0)[list(task.target)].mean(0)
        attention = [float(row[list(unit)].sum()) for unit in task.units]
        gradient = task.gradient(replies.answer)
        units = _candidates(attention, gradient, settings.candidates or CANDIDATES)
        nodes, names, target_node, of_unit = _nodes(task, units, seen)
        graph = AttentionCausalGraph(
            head=settings.heads,
            normalize=True,
            **{name: getattr(settings, name) for name in ("layer", "n_samples", "alpha", "learner", "covariance")},
        ).fit(seen.record, nodes=nodes, names=names, progress=progress)
        ask = replies.inquiry(settings.max_calls, units)
        bounds = {
            name: getattr(settings, name) for name in ("max_size", "radius", "order", "slack", "prune", "max_sets")
        }
        worth = [attention[unit] for unit in units]
        outcome = search(
            ask,
            graph.pags_,
            target_node,
            of_unit,
            worth,
            patience=settings.patience or (PATIENCE if len(seen.tokens) <= SHORT else PATIENCE // 4),
            last=last_of(task, units),
            progress=progress,
            **bounds,
        )
        # Every word by itself, whether or not the search came to it.
        ask([(at,) for at in range(len(units)) if (at,) not in ask.tried][: int(min(ask.left, len(units)))])
        baselines: dict[str, BaselineResult] = {}
        if settings.baselines:
            progress(0, 1, "comparing")
            baselines = compare(
                replies,
                worth,
                [gradient[unit] for unit in units] if gradient else None,
                of_unit,
                units,
                max_size=settings.max_size,
                seed=settings.seed,
                with_exhaustive=settings.baselines == "exhaustive",
                max_calls=settings.max_calls,
            )
        evidence = Evidence(task, seen, replies, ask, outcome, graph, names, target_node, of_unit, units)
        return replace(conclude(evidence, settings, baselines), seconds=time.perf_counter() - began)


@documented(ExplainSettings)
def explain(
    model: Any = None,
    text: Any = None,
    target: Any = None,
    *,
    tokenizer: Any = None,
    progress: Progress | None = None,
    **settings: Any,
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
        progress: called with how much is done, how much there is, and what is under way.

    Special tokens and punctuation are no candidates; `left_out` names every word that was never removed, and why.

    >>> from heedful import explain
    >>> result = explain(text="The blue whale is the largest animal on the planet.")
    >>> result.task, result.found, result.effect.after < 0
    ('embedding', True, True)
    """
    return CausalExplainer(model, tokenizer, **settings).explain(text, target, progress=progress)


def _candidates(attention: Sequence[float], gradient: Sequence[float] | None, count: int) -> list[int]:
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

"""An explanation put together from what a search asked: the sets, the words' scores, what was left out, and how far to trust it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from heedful._text import quantity
from heedful.lens.causes.attention_graph import AttentionCausalGraph
from heedful.lens.causes.baselines import BaselineResult
from heedful.lens.causes.questions import Seen, Task
from heedful.lens.causes.result import Effect, Explanation, Removal, WordScore, measurable
from heedful.lens.causes.searching import Found, Inquiry, Replies, Reply, Units

__all__ = ["Searched", "conclude", "last_of"]

ALTERNATIVES = 10


class Searched(NamedTuple):
    """A question, the graphs over its words, and what a search asked and found.

    `units` are the candidates among the task's units, `of_unit` the node of each, `names` those of the nodes.
    """

    task: Task
    seen: Seen
    replies: Replies
    ask: Inquiry
    found: Found
    graph: AttentionCausalGraph
    names: tuple[str, ...]
    target_node: int
    of_unit: list[int]
    units: list[int]


def last_of(task: Task, units: Sequence[int]) -> int | None:
    """The place in `units` of the word that the next token is to follow; None where there is none.

    Without it a text asks for another next word, often that very one.
    """
    last = len(task.units) - 1
    ends = task.kind == "next-token" and last in units and task.target[0] - 1 in task.units[last]
    return units.index(last) if ends else None


def conclude(searched: Searched, settings: dict[str, Any], others: dict[str, BaselineResult]) -> Explanation:
    """The explanation; its seconds are for the caller to tell."""
    task, seen, replies, ask, found, graph, names, target_node, of_unit, units = searched
    whole = ask([()])[0]
    # Single words are all known, also those that no graph proposed.
    alone = [one for one in ask.tried if len(one) == 1 and ask.tried[one].flipped] if len(found.units) == 1 else []
    last = last_of(task, units)
    # A lower rank can come of rivals that rise: where the probability never falls, the rank is the effect.
    falls = any(measurable(whole.score, ask.tried[one].score) for one in found.all_units or ask.tried)

    def strength(one: Units) -> tuple[Any, ...]:
        reply = ask.tried[one]
        return last in one, 0 if falls else -reply.rank, reply.score, reply.margin, one

    every = sorted({*found.all_units, *alone}, key=strength)
    with_last = [one for one in ask.tried if last in one and ask.tried[one].flipped]
    least = min(map(len, with_last), default=0)
    ending = sorted((one for one in with_last if len(one) == least), key=strength)
    every = [one for one in every if last not in one] or every
    best: Units = (
        every[0]
        if every
        else min(
            (one for one in ask.tried if one),
            key=lambda one: (ask.tried[one].score, ask.tried[one].margin, one),
            default=(),
        )
    )
    # Alone, and not in the batch it was found in.
    without = replies.replies([tuple(units[at] for at in best)])[0]
    flipped = bool(every) and without.flipped
    kept = replies.inquiry(units=units)([tuple(at for at in range(len(units)) if at not in best)])[0]
    head = None if found.head is None or not flipped or best != found.units else graph.heads_[found.head]

    def removal(one: Units, reply: Reply) -> Removal:
        indices = tuple(of_unit[at] for at in one)
        words = tuple(names[node] for node in indices)
        return Removal(indices, words, reply.flipped, task.name(reply.winner), reply.score, reply.margin, reply.rank)

    chosen = removal(best, without)
    sets = (chosen, *(removal(one, ask.tried[one]) for one in every if one != best)) if flipped else ()
    # Single words are all measured, and all told.
    most = len(sets) if len(best) == 1 else settings["max_sets"]
    tried = sorted(
        (one for one in ask.tried if one and one != best and one not in every),
        key=lambda one: (
            not ask.tried[one].flipped,
            len(one) if ask.tried[one].flipped else 0,
            ask.tried[one].margin,
        ),
    )
    none = (math.nan, math.nan)
    scores = whole.score, without.score
    embedding = task.kind == "embedding"
    settings = settings | {
        "replace": task.replace,
        "samples": graph.samples_,
        "learner": graph.learner_,
        "words": len(task.units),
        "candidates": len(units),
    }
    settings |= {"threshold": whole.score - whole.margin} if embedding else {}
    if not isinstance(settings["heads"], str | int):
        settings["heads"] = [int(one) for one in settings["heads"]]
    spans: dict[int, Any] = {}
    if getattr(task, "text", ""):
        spans = {target_node: getattr(task, "target_span", None)}
        spans |= {node: task.spans[unit] for unit, node in zip(units, of_unit, strict=True)}  # type: ignore[attr-defined]
    made = Explanation(
        task=task.kind,
        tokens=seen.tokens,
        nodes=graph.nodes_,
        target_node=target_node,
        names=names,
        answer=task.name(replies.answer),
        rank=replies.rank + 1,
        found=flipped,
        flipped_to=chosen.answer if flipped else None,
        indices=chosen.indices,
        words=chosen.words,
        head=head,
        layer=seen.record.index,
        pags=graph.pags_,
        heads=graph.heads_,
        correlation=graph.correlation_,
        sem=graph.sem_weights_,
        effect=Effect(
            whole.margin,
            without.margin,
            kept.margin,
            *(none if embedding else scores),
            *(scores if embedding else none),
        ),
        sets=sets[:most],
        sets_note=_tried(ask, found, len(units), settings["max_sets"], last, len(sets)) if flipped else "",
        ending=tuple(removal(one, ask.tried[one]) for one in ending[: settings["max_sets"]]),
        scores=tuple(
            _word_score(at, ask, removal((at,), ask.tried[at,]))
            for at in sorted((one[0] for one in ask.tried if len(one) == 1), key=of_unit.__getitem__)
        ),
        alternatives=tuple(removal(one, ask.tried[one]) for one in tried[:ALTERNATIVES]),
        left_out=_left_out(task, units, ask),
        text=getattr(task, "text", ""),
        spans=tuple(spans.get(node) for node in range(len(names))) if spans else (),
        part=getattr(task, "part", ""),
        baselines=others,
        calls=found.calls + 1,
        more_calls=ask.calls - found.calls,
        seconds=0.0,
        settings=settings,
        confidence=tuple(graph.confidence_.tolist()),
        trust=(),
    )
    return replace(made, trust=_trust(made, found, without.flipped))


def _word_score(at: int, ask: Inquiry, alone: Removal) -> WordScore:
    """What a word does by itself, and in addition to others where both inputs were asked about."""
    tried = ask.tried
    falls = []
    for one, reply in tried.items():
        rest = tuple(unit for unit in one if unit != at)
        if at in one and rest in tried:
            falls.append(tried[rest].score - reply.score)
    return WordScore(
        alone.indices[0], alone.words[0], tried[()].score - alone.score, sum(falls) / len(falls), len(falls), alone
    )


def _tried(ask: Inquiry, found: Found, count: int, most: int, last: int | None, known: int) -> str:
    """Which sets of the smallest size were tried."""
    size = len(found.units)
    without = last is not None and size > 1 and last not in found.units
    asked = sum(len(one) == size and not (without and last in one) for one in ask.tried)
    every = math.comb(count - without, size)
    kind = ("single word", "single words") if size == 1 else (f"set of {size} words", f"sets of {size} words")
    what = kind[every != 1] + " without the last word" * without
    if asked == every:
        return f"{f'all {every:,}' if every > 1 else 'the one'} {what} among the candidates {'were' if every > 1 else 'was'} tried"
    if found.full:
        more = f"; {known - most} more {'are' if known - most > 1 else 'is'} known" if known > most and size > 1 else ""
        why = f"; the search stopped at its limit of {quantity(most, 'set')} (max_sets), so there may be more{more}"
    elif found.exhausted:
        why = "; max_calls ended the search, so there may be more"
    else:
        why = "; those that smaller sets foretell little effect for were not, so there may be more"
    return f"{asked:,} of {every:,} {what} among the candidates {'was' if asked == 1 else 'were'} tried{why}"


def _left_out(task: Task, units: Sequence[int], ask: Inquiry) -> tuple[tuple[str, str], ...]:
    """What was never removed, and why."""
    why = (
        f"not among the {len(units)} candidates, which get the most attention or have the largest gradient times input"
    )
    others = [(name, why) for unit, name in enumerate(task.names) if unit not in set(units)]
    removed = {at for one in ask.tried for at in one}
    unasked = [
        (task.names[unit], "max_calls ended the search before") for at, unit in enumerate(units) if at not in removed
    ]
    return (*getattr(task, "left_out", ()), *others, *unasked)


def _trust(told: Explanation, found: Found, alone: bool) -> tuple[str, ...]:
    """When not to trust it, plainly."""
    settings = told.settings
    said = []
    if told.task == "embedding":
        said.append(
            "Nothing is predicted here: the words are those that the embedding of the text depends on, not the cause of an answer."
        )
    if told.rank > 1:
        said.append(
            f"{told.answer!r} is not the model's first answer but its number {told.rank}; the set makes it lose that rank."
        )
    if told.settings["learner"] == "ordered icd" and told.text and any(node[0] == 0 for node in told.nodes):
        said.append(
            "The first word stands where a decoder's idle attention goes, so that its edges in the graph need not be about the word; "
            "removing it is what counts."
        )
    if told.ending:
        said.append(
            "Without its last word the text asks for another next word, so that sets with it say little about the answer"
            f"{'' if told.only_ending else ', and are listed apart'}."
        )
    if told.part:
        said.append(f"The text is longer than the model can read: {told.part}.")
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
        thing = "embedding beyond the threshold" if told.task == "embedding" else "answer"
        why = "max_calls ended the search" if found.exhausted else "more words may have to go together, or other ones"
        said.append(
            f"No set of {settings['max_size']} or fewer words was found whose removal changes the {thing}; {why}."
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

"""An explanation put together from what a search asked: the sets, the words' scores, what was left out, and how far to trust it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from heedful._text import quantity
from heedful.lens.causes.attention_graph import AttentionCausalGraph
from heedful.lens.causes.baselines import BaselineResult
from heedful.lens.causes.questions import Seen, Task
from heedful.lens.causes.result import Effect, Explanation, Removal, WordScore, measurable
from heedful.lens.causes.searching import Found, Inquiry, Replies, Reply, Units
from heedful.lens.causes.settings import ExplainSettings

ALTERNATIVES = 10
# Settings that say how to read the model, or have a plainer form in the result.
UNTOLD = ("task", "n_samples", "learner", "replace", "candidates", "baselines", "batch_size", "truncate")


class Evidence(NamedTuple):
    """A question, the graphs over its words, and what a search asked and came to.

    `units` are the candidates among the task's units, `of_unit` the node of each, `names` those of the nodes.
    """

    task: Task
    seen: Seen
    replies: Replies
    ask: Inquiry
    outcome: Found
    graph: AttentionCausalGraph
    names: tuple[str, ...]
    target_node: int
    of_unit: list[int]
    units: list[int]

    def removal(self, units: Units, reply: Reply | None = None) -> Removal:
        """A set that was asked about, for people."""
        reply = reply or self.ask.tried[units]
        nodes = tuple(self.of_unit[at] for at in units)
        words, answer = tuple(self.names[node] for node in nodes), self.task.name(reply.winner)
        return Removal(nodes, words, reply.flipped, answer, reply.score, reply.margin, reply.rank)


def last_of(task: Task, units: Sequence[int]) -> int | None:
    """The place in `units` of the word that the next token is to follow; None where there is none.

    Without it a text asks for another next word, often that very one.
    """
    last = len(task.units) - 1
    ends = task.kind == "next-token" and last in units and task.target[0] - 1 in task.units[last]
    return units.index(last) if ends else None


def conclude(evidence: Evidence, chosen: ExplainSettings, baselines: dict[str, BaselineResult]) -> Explanation:
    """The explanation; its seconds are for the caller to fill in."""
    task, seen, replies, ask, outcome, graph, names, target_node, of_unit, units = evidence
    tried, whole = ask.tried, ask([()])[0]
    # Single words are all known, also those that no graph proposed.
    alone = [one for one in tried if len(one) == 1 and tried[one].flipped] if len(outcome.units) == 1 else []
    last = last_of(task, units)
    # A lower rank can come of rivals that rise: where the probability never falls, the rank is the effect.
    falls = any(measurable(whole.score, tried[one].score) for one in outcome.all_units or tried)

    def strength(one: Units) -> tuple[Any, ...]:
        reply = tried[one]
        return last in one, 0 if falls else -reply.rank, reply.score, reply.margin, one

    hits = sorted({*outcome.all_units, *alone}, key=strength)
    hits = [one for one in hits if last not in one] or hits
    with_last = [one for one in tried if last in one and tried[one].flipped]
    least = min(map(len, with_last), default=0)
    ending = sorted((one for one in with_last if len(one) == least), key=strength)
    nearest = sorted((one for one in tried if one), key=lambda one: (tried[one].score, tried[one].margin, one))
    best: Units = next(iter(hits or nearest), ())
    # Alone, and not in the batch it was met in.
    without = replies.replies([tuple(units[at] for at in best)])[0]
    flipped = bool(hits) and without.flipped
    kept = replies.inquiry(units=units)([tuple(at for at in range(len(units)) if at not in best)])[0]
    first = evidence.removal(best, without)
    sets = (first, *(evidence.removal(one) for one in hits if one != best)) if flipped else ()
    others = sorted(
        (one for one in tried if one and one != best and one not in hits),
        key=lambda one: (not tried[one].flipped, len(one) if tried[one].flipped else 0, tried[one].margin),
    )
    embedding = task.kind == "embedding"
    settings = {name: value for name, value in asdict(chosen).items() if name not in UNTOLD} | {
        "replace": task.replace,
        "samples": graph.samples_,
        "learner": graph.learner_,
        "words": len(task.units),
        "candidates": len(units),
    }
    settings |= {"threshold": whole.score - whole.margin} if embedding else {}
    if not isinstance(chosen.heads, str | int):
        settings["heads"] = [int(head) for head in chosen.heads]
    text, spans = getattr(task, "text", ""), dict[int, Any]()
    if text:
        spans = {target_node: getattr(task, "target_span", None)}
        spans |= {node: task.spans[unit] for unit, node in zip(units, of_unit, strict=True)}  # type: ignore[attr-defined]
    none, scores = (math.nan, math.nan), (whole.score, without.score)
    odds, cosines = (none, scores) if embedding else (scores, none)
    explanation = Explanation(
        task=task.kind,
        tokens=seen.tokens,
        nodes=graph.nodes_,
        target_node=target_node,
        names=names,
        answer=task.name(replies.answer),
        rank=replies.rank + 1,
        found=flipped,
        flipped_to=first.answer if flipped else None,
        indices=first.indices,
        words=first.words,
        head=graph.heads_[outcome.head] if outcome.head is not None and flipped and best == outcome.units else None,
        layer=seen.record.index,
        pags=graph.pags_,
        heads=graph.heads_,
        correlation=graph.correlation_,
        sem=graph.sem_weights_,
        effect=Effect(whole.margin, without.margin, kept.margin, *odds, *cosines),
        # Single words are all measured, and all listed.
        sets=sets if len(best) == 1 else sets[: chosen.max_sets],
        sets_note=_extent(ask, outcome, len(units), chosen.max_sets, last, len(sets)) if flipped else "",
        ending=tuple(evidence.removal(one) for one in ending[: chosen.max_sets]),
        scores=tuple(
            _word_score(at, ask, evidence.removal((at,)))
            for at in sorted((one[0] for one in tried if len(one) == 1), key=of_unit.__getitem__)
        ),
        alternatives=tuple(evidence.removal(one) for one in others[:ALTERNATIVES]),
        left_out=_left_out(task, units, ask),
        text=text,
        spans=tuple(spans.get(node) for node in range(len(names))) if spans else (),
        part=getattr(task, "part", ""),
        baselines=baselines,
        calls=outcome.calls + 1,
        more_calls=ask.calls - outcome.calls,
        seconds=0.0,
        settings=settings,
        confidence=tuple(graph.confidence_.tolist()),
        trust=(),
    )
    return replace(explanation, trust=_trust(explanation, outcome, without.flipped))


def _word_score(at: int, ask: Inquiry, alone: Removal) -> WordScore:
    """What a word does by itself, and in addition to others where both inputs were asked about."""
    tried = ask.tried
    rests = {one: tuple(unit for unit in one if unit != at) for one in tried if at in one}
    falls = [tried[rest].score - tried[one].score for one, rest in rests.items() if rest in tried]
    mean = sum(falls) / len(falls)
    return WordScore(alone.indices[0], alone.words[0], tried[()].score - alone.score, mean, len(falls), alone)


def _extent(ask: Inquiry, outcome: Found, count: int, most: int, last: int | None, known: int) -> str:
    """Which sets of the smallest size were tried."""
    size = len(outcome.units)
    without = last is not None and size > 1 and last not in outcome.units
    tried = sum(len(one) == size and not (without and last in one) for one in ask.tried)
    every = math.comb(count - without, size)
    what = ("single word" if size == 1 else f"set{'s' * (every != 1)} of {size} words") + "s" * (size == 1 < every)
    what += " without the last word" * without
    if tried == every:
        return f"{f'all {every:,}' if every > 1 else 'the one'} {what} among the candidates {'were' if every > 1 else 'was'} tried"
    if outcome.full:
        more = f"; {known - most} more {'are' if known - most > 1 else 'is'} known" if known > most and size > 1 else ""
        why = f"the search stopped at its limit of {quantity(most, 'set')} (max_sets), so there may be more{more}"
    elif outcome.exhausted:
        why = "max_calls ended the search, so there may be more"
    else:
        why = "those that smaller sets foretell little effect for were not, so there may be more"
    return f"{tried:,} of {every:,} {what} among the candidates {'was' if tried == 1 else 'were'} tried; {why}"


def _left_out(task: Task, units: Sequence[int], ask: Inquiry) -> tuple[tuple[str, str], ...]:
    """What was never removed, and why."""
    why = (
        f"not among the {len(units)} candidates, which get the most attention or have the largest gradient times input"
    )
    removed = {units[at] for one in ask.tried for at in one}
    others = [(name, why) for unit, name in enumerate(task.names) if unit not in set(units)]
    late = [(task.names[unit], "max_calls ended the search before") for unit in units if unit not in removed]
    return (*getattr(task, "left_out", ()), *others, *late)


def _trust(result: Explanation, outcome: Found, alone: bool) -> tuple[str, ...]:
    """When not to trust it, plainly."""
    settings = result.settings
    doubts = []
    if result.task == "embedding":
        doubts.append(
            "Nothing is predicted here: the words are those that the embedding of the text depends on, not the cause of an answer."
        )
    if result.rank > 1:
        doubts.append(
            f"{result.answer!r} is not the model's first answer but its number {result.rank}; the set makes it lose that rank."
        )
    if settings["learner"] == "ordered icd" and result.text and any(node[0] == 0 for node in result.nodes):
        doubts.append(
            "The first word stands where a decoder's idle attention goes, so that its edges in the graph need not be about the word; "
            "removing it is what counts."
        )
    if result.ending:
        doubts.append(
            "Without its last word the text asks for another next word, so that sets with it say little about the answer"
            f"{'' if result.only_ending else ', and are listed apart'}."
        )
    if result.part:
        doubts.append(f"The text is longer than the model can read; {result.part}.")
    if settings["candidates"] < settings["words"]:
        doubts.append(
            f"Only {settings['candidates']} of {settings['words']} words took part, here and in the baselines: the most attended, and "
            "those with the largest gradient times input."
        )
    if outcome.units and not alone:
        doubts.append(
            "A set changed the answer in a batch but not alone: its margin is within rounding, so it does not count."
        )
    elif not result.found:
        thing = "embedding beyond the threshold" if result.task == "embedding" else "answer"
        ended = (
            "max_calls ended the search" if outcome.exhausted else "more words may have to go together, or other ones"
        )
        doubts.append(
            f"No set of {settings['max_size']} or fewer words was found whose removal changes the {thing}; {ended}."
        )
    elif result.head is None:
        doubts.append(
            "No head's graph connects this set to the answer: it was found by single effects, not by a graph."
        )
    dense = sum(pag.trust().level == "none" for pag in result.pags)
    if dense:
        doubts.append(
            f"The graphs of {dense} of {len(result.pags)} heads are near-complete or untestable and propose almost any set."
        )
    doubts += [f"The graph shown: {sentence}" for sentence in result.pag.trust().sentences]
    return tuple(doubts)

"""An explanation in words: the headline, and lines for a terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from heedful._text import quantity
from heedful.lens.causes.result import measurable

if TYPE_CHECKING:
    from heedful.lens.causes.result import Explanation, Removal

__all__ = [
    "after",
    "before",
    "by_reason",
    "change",
    "effect_of",
    "ending_note",
    "headline",
    "lines",
    "listed",
    "methods",
    "shown",
    "told",
]

# Words that a headline names, sets that are listed, words whose scores are printed, words of a reason to leave them out.
NAMED, SETS, WORDS, REASONS = 6, 10, 8, 12
VERBS = {"mask": "Masking"}
PUNCTUATION = "punctuation"
ENDING = "Sets with the last word, without which the text asks for another next word"


def headline(
    found: Explanation, word: Callable[[str], str] = str, answer: Callable[[str], str] = lambda text: repr(text)
) -> str:
    """The strongest thing that was found to be true, with every equal beside it; `word` and `answer` mark these up."""
    masking = _verb(found)
    things = _things(found)
    score = found.effect.cosine_after if found.task == "embedding" else found.effect.probability_after
    was, then = change(found.before, score)
    if found.task == "embedding":
        opening = ""
        changes = "changes the embedding of the text beyond the threshold"
        bound = f" (cosine with the embedding of the whole text below {found.settings['threshold']:g})"
        most = "changes it most"
    else:
        opening = f"{_opening(found, answer, was)} "
        changes = "changes the answer" if found.rank == 1 else "makes it lose that rank"
        bound, most = "", "has the largest effect"

    def joined(one: Sequence[str]) -> str:
        return listed([word(name) for name in one], "and")

    ending = f" {note}" if (note := ending_note(found, word)) else ""
    but = " but the last" if any(len(one.indices) == 1 for one in found.ending) and not found.only_ending else ""
    singles = sum(one.alone.flipped for one in found.scores) - bool(but)
    if not found.found:
        size = found.settings["max_size"]
        closest = (
            f" {masking} {joined(found.words)} {most}: {_effect(found, None, answer, then)}." if found.words else ""
        )
        if not measurable(found.before, score):
            closest = (
                f" None of the {things} that were tried has a measurable effect: the {found.measure} does not fall."
            )
        # In the paper's order a word that no graph connects is measured, but proposed by none.
        which = "that the graphs propose" if singles else "that was tried"
        return f"{opening}No set of at most {quantity(size, things[:-1])} {which} {changes}{bound}.{closest}"
    first, size = found.sets[0], found.size
    none = f" No single {things[:-1]}{but} does." if size == 2 and not singles else ""
    without = " without the last word" if found.ending and not found.only_ending else ""
    smaller = none or (f" No smaller set{without} that was tried does." if size > 2 and not singles else "")
    effect = _effect(found, first, answer, then)
    if len(found.sets) == 1:
        together = " alone" if size == 1 else " together"
        all_tried = found.sets_note.startswith("all ")
        only = f" No other single {things[:-1]}{but} does." if size == 1 and singles == 1 and all_tried else smaller
        return f"{opening}{masking} {joined(first.words)}{together} {changes}{bound}: {effect}.{only}{ending}"
    if size == 1:
        every = [word(one.words[0]) for one in found.sets]
        rest = [f"{len(every) - NAMED} others"] if len(every) > NAMED + 1 else every[NAMED:]
        any_one = f"any one of {listed(every[:NAMED] + rest, 'or')}"
    else:
        any_one = f"any one of {len(found.sets)} sets of {size} {things}"
    return f"{opening}{masking} {any_one} {changes}{bound}; {joined(first.words)} {most}: {effect}.{smaller}{ending}"


def ending_note(found: Explanation, word: Callable[[str], str] = str) -> str:
    """What to think of sets that hold the last word of a text whose next token is asked for; empty where there are none."""
    if not found.ending:
        return ""
    if found.only_ending:
        return (
            "This is the last word, without which the text asks for another next word; "
            if found.size == 1
            else "With the last word gone the text asks for another next word; "
        ) + f"no set of at most {quantity(found.settings['max_size'], 'other word')} that was tried changes the answer."
    first = listed([word(name) for name in found.ending[0].words], "and")
    what = f"the last word, {first}," if len(found.ending[0].words) == 1 else f"{first}, the last word among them,"
    return f"{_verb(found)} {what} changes it too, but then the text asks for another next word."


def _opening(found: Explanation, answer: Callable[[str], str], was: str) -> str:
    odds = f" (probability {was})"
    if found.rank == 1:
        return f"The model answers {answer(found.answer)}{odds}."
    return f"{answer(found.answer)} is the model's answer number {found.rank}{odds}."


def _effect(found: Explanation, one: Removal | None, answer: Callable[[str], str], then: str) -> str:
    """What becomes of the answer without a set: its score, or its rank where the score does not fall."""
    if found.task == "embedding":
        return f"the cosine is then {then}"
    told = f"the probability of {answer(found.answer)} is then {then}"
    if one is not None and not measurable(found.before, one.score):
        told = f"{answer(found.answer)} then has rank {one.rank} instead of {found.rank}, though its probability does not fall"
    return f"the model answers {answer(one.answer)}, and {told}" if one is not None and found.rank == 1 else told


def _verb(found: Explanation) -> str:
    return VERBS.get(str(found.settings.get("replace")), "Removing")


def _things(found: Explanation) -> str:
    return "items" if found.task == "recommendation" else "words"


def listed(words: Sequence[str], last: str) -> str:
    """Words in a row.

    >>> listed(["a", "b", "c"], "or")
    'a, b or c'
    """
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def shown(value: float, digits: int = 3) -> str:
    """A probability, a cosine, or a difference of two.

    >>> shown(0.25), shown(-0.00002), shown(-0.0), shown(-1e-12)
    ('0.250', '-2.0e-05', '0.000', '-1.0e-12')
    """
    if not math.isfinite(value):
        return "none"
    return f"{value + 0.0:.{digits}f}" if abs(value) >= 0.5 * 10**-digits or value == 0 else f"{value:.{digits - 2}e}"


def change(before: float, after: float) -> tuple[str, str]:
    """Two numbers with as many digits as it takes to tell them apart, unless they differ by rounding.

    >>> change(0.998, 0.2), change(0.99804, 0.99801), change(0.5, 0.5)
    (('0.998', '0.200'), ('0.99804', '0.99801'), ('0.500', '0.500'))
    """
    pairs = ((shown(before, digits), shown(after, digits)) for digits in range(3, 8))
    return next((pair for pair in pairs if pair[0] != pair[1]), (shown(before), shown(after)))


def effect_of(value: float) -> str:
    """By how much something falls; nothing where that is rounding."""
    return shown(value if abs(value) >= 1e-7 else 0.0)


def before(found: Explanation) -> str:
    """The name of what is measured."""
    return "cosine" if found.task == "embedding" else f"probability of {found.answer!r}"


def after(found: Explanation, one: Removal) -> str:
    """What the model answers without a set, where that is more than a number."""
    return "" if found.task == "embedding" else repr(one.answer)


def told(found: Explanation, width: int = 100) -> str:
    """An explanation in lines of at most so many columns."""
    return "\n".join(part for part in lines(found, width))


def lines(found: Explanation, width: int = 100, spell: Callable[[str], str] = str) -> list[str]:
    """The headline, then the sets, the scores of words, the graph, the baselines, and how far to trust it.

    `spell` writes the arguments that a note names as the reader gives them.
    """
    made = ["\n".join(textwrap.wrap(headline(found), width))]
    made += _set_lines(found, width, spell) + _score_lines(found, width)
    for reason, words in by_reason(found).items():
        some = (" " if reason == PUNCTUATION else ", ").join(words[:REASONS])
        some += f" and {len(words) - REASONS} more" if len(words) > REASONS else ""
        made += textwrap.wrap(f"Never removed: {some} ({spell(reason)}).", width)
    pag = found.pag
    where = f"layer {found.layer}" + (f", head {found.head}" if found.head is not None else "")
    made += textwrap.wrap(
        f"Graph of {where}: {quantity(pag.n, 'node')}, {quantity(len(pag.edges()), 'edge')}, "
        f"{quantity(len(pag.latent_pairs()), 'pair')} with a hidden common cause; {pag.learner.upper()}, N={pag.samples}, alpha={pag.alpha:g}; {quantity(found.calls, 'input')} asked about, and "
        f"{found.more_calls} more for equal sets and single words",
        width,
    )
    if found.baselines:
        made.append(f"{'method':<18} {'size':>4} {'pruned':>6} {'calls':>5}  set")
        for name, size, least, calls, taken in methods(found):
            short = textwrap.shorten(taken, max(20, width - 38), placeholder=" ...")
            made.append(f"{name:<18} {size:>4} {least:>6} {calls:>5}  {short}".rstrip())
    for sentence in found.trust:
        made += textwrap.wrap(spell(sentence), width)
    return made


def _set_lines(found: Explanation, width: int, spell: Callable[[str], str]) -> list[str]:
    if not found.found:
        return []
    made = textwrap.wrap(f"Smallest sets ({spell(found.sets_note)}):", width) + _rows(found, found.sets, width)
    if found.ending and not found.only_ending:
        made += textwrap.wrap(f"{ENDING}:", width) + _rows(found, found.ending, width)
    return made


def _rows(found: Explanation, sets: Sequence[Removal], width: int) -> list[str]:
    made = []
    names = [" + ".join(one.words) for one in sets[:SETS]]
    room = min(max(map(len, names)), max(12, width - 46))
    for name, one in zip(names, sets, strict=False):
        effect = f"{found.measure} {' -> '.join(change(found.before, one.score))}"
        effect += f", rank {found.rank} -> {one.rank}" if found.rank > 1 else ""
        then = f", answer {after(found, one)}" if after(found, one) else ""
        made.append(_fit(f"  {_fit(name, room):<{room}}  {effect}{then}", width))
    if len(sets) > SETS:
        made.append(f"  ... {len(sets) - SETS} more; --json prints all")
    return made


def _score_lines(found: Explanation, width: int) -> list[str]:
    """The words that matter most by themselves, with what they do."""
    ranked = sorted(found.scores, key=lambda one: -abs(one.leave_one_out))
    names = [one.word for one in ranked[:WORDS]]
    room = min(max([4, *map(len, names)]), max(12, width - 44))
    made = textwrap.wrap(
        f"Effect of each {_things(found)[:-1]} on the {before(found)} (a positive number: it falls without it):", width
    )
    made.append(f"  {_things(found)[:-1]:<{room}}  removed alone  mean effect  sets")
    for name, one in zip(names, ranked, strict=False):
        made.append(
            f"  {_fit(name, room):<{room}}  {effect_of(one.leave_one_out):>13}  {effect_of(one.mean_effect):>11}  {one.sets:>4}"
        )
    if len(ranked) > WORDS:
        made.append(f"  ... {len(ranked) - WORDS} more; --json prints all")
    return made


def _fit(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 3] + "..."


def by_reason(found: Explanation) -> dict[str, list[str]]:
    """What was never removed, by the reason why."""
    groups: dict[str, list[str]] = {}
    for word, reason in found.left_out:
        groups.setdefault(reason, []).append(word)
    return groups


def methods(found: Explanation) -> Iterable[tuple[str, str, str, int, str]]:
    """Ours and every baseline: name, size, size once pruned, calls, words; a set that changes nothing has no size.

    Our calls are all that were made, since the set shown is the strongest of several.
    """
    size = str(found.size) if found.found else "none"
    yield "causal (this)", size, size, found.calls + found.more_calls, ", ".join(found.words) if found.found else ""
    for name, one in found.baselines.items():
        words = ", ".join(found.names[node] for node in one.indices) if one.flipped else ""
        yield (
            name,
            str(one.size) if one.flipped else "none",
            str(len(one.pruned)) if one.flipped else "none",
            one.calls,
            words,
        )

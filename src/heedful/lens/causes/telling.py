"""An explanation in words: the headline, and lines for a terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from heedful._text import quantity
from heedful.lens.causes.questions import PUNCTUATION
from heedful.lens.causes.result import measurable

if TYPE_CHECKING:
    from heedful.lens.causes.result import Explanation, Removal

__all__ = ["after", "by_reason", "change", "effect_of", "ending_note", "headline", "lines", "methods", "shown"]

# Words that a headline names, sets that are listed, words whose scores are printed, words of a reason to leave them out.
NAMED, SETS, WORDS, REASONS = 6, 10, 8, 12
ENDING = "Sets with the last word, without which the text asks for another next word"


def headline(
    why: Explanation, word: Callable[[str], str] = str, answer: Callable[[str], str] = lambda text: repr(text)
) -> str:
    """The strongest thing that holds, with every equal beside it; `word` and `answer` mark these up."""
    masking, things = _verb(why), _things(why)
    score = why.effect.cosine_after if why.task == "embedding" else why.effect.probability_after
    was, then = change(why.before, score)
    if why.task == "embedding":
        opening = ""
        changes = "changes the embedding of the text beyond the threshold"
        bound = f" (cosine with the embedding of the whole text below {why.settings['threshold']:g})"
        most = "changes it most"
    else:
        own = answer(why.answer)
        opening = f"The model answers {own}" if why.rank == 1 else f"{own} is the model's answer number {why.rank}"
        opening += f" (probability {was}). "
        changes = "changes the answer" if why.rank == 1 else "makes it lose that rank"
        bound, most = "", "has the largest effect"

    def joined(one: Sequence[str]) -> str:
        return listed([word(name) for name in one], "and")

    ending = f" {note}" if (note := ending_note(why, word)) else ""
    but = " but the last" if any(len(one.indices) == 1 for one in why.ending) and not why.only_ending else ""
    singles = sum(one.alone.flipped for one in why.scores) - bool(but)
    if not why.found:
        size = why.settings["max_size"]
        closest = f" {masking} {joined(why.words)} {most}: {_effect(why, None, answer, then)}." if why.words else ""
        if not measurable(why.before, score):
            closest = f" None of the {things} that were tried has a measurable effect: the {why.measure} does not fall."
        # In the paper's order a word that no graph connects is measured, but proposed by none.
        which = "that the graphs propose" if singles else "that was tried"
        return f"{opening}No set of at most {quantity(size, things[:-1])} {which} {changes}{bound}.{closest}"
    first, size = why.sets[0], why.size
    none = f" No single {things[:-1]}{but} does." if size == 2 and not singles else ""
    without = " without the last word" if why.ending and not why.only_ending else ""
    smaller = none or (f" No smaller set{without} that was tried does." if size > 2 and not singles else "")
    effect = _effect(why, first, answer, then)
    if len(why.sets) == 1:
        together = " alone" if size == 1 else " together"
        all_tried = why.sets_note.startswith("all ")
        only = f" No other single {things[:-1]}{but} does." if size == 1 and singles == 1 and all_tried else smaller
        return f"{opening}{masking} {joined(first.words)}{together} {changes}{bound}: {effect}.{only}{ending}"
    if size == 1:
        every = [word(one.words[0]) for one in why.sets]
        rest = [f"{len(every) - NAMED} others"] if len(every) > NAMED + 1 else every[NAMED:]
        any_one = f"any one of {listed(every[:NAMED] + rest, 'or')}"
    else:
        any_one = f"any one of {len(why.sets)} sets of {size} {things}"
    return f"{opening}{masking} {any_one} {changes}{bound}; {joined(first.words)} {most}: {effect}.{smaller}{ending}"


def ending_note(why: Explanation, word: Callable[[str], str] = str) -> str:
    """What to think of sets that hold the last word of a text whose next token is asked for; empty where there are none."""
    if not why.ending:
        return ""
    if why.only_ending:
        gone = "This is the last word, without which" if why.size == 1 else "With the last word gone"
        most = quantity(why.settings["max_size"], "other word")
        return (
            f"{gone} the text asks for another next word; no set of at most {most} that was tried changes the answer."
        )
    first = listed([word(name) for name in why.ending[0].words], "and")
    what = f"the last word, {first}," if len(why.ending[0].words) == 1 else f"{first}, the last word among them,"
    return f"{_verb(why)} {what} changes it too, but then the text asks for another next word."


def _effect(why: Explanation, one: Removal | None, answer: Callable[[str], str], then: str) -> str:
    """What becomes of the answer without a set: its score, or its rank where the score does not fall."""
    if why.task == "embedding":
        return f"the cosine is then {then}"
    own, effect = answer(why.answer), f"the probability of {answer(why.answer)} is then {then}"
    if one is not None and not measurable(why.before, one.score):
        effect = f"{own} then has rank {one.rank} instead of {why.rank}, though its probability does not fall"
    return f"the model answers {answer(one.answer)}, and {effect}" if one is not None and why.rank == 1 else effect


def _verb(why: Explanation) -> str:
    return "Masking" if why.settings.get("replace") == "mask" else "Removing"


def _things(why: Explanation) -> str:
    return "items" if why.task == "recommendation" else "words"


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


def after(why: Explanation, one: Removal) -> str:
    """What the model answers without a set, where that is more than a number."""
    return "" if why.task == "embedding" else repr(one.answer)


def lines(why: Explanation, width: int = 100, spell: Callable[[str], str] = str) -> list[str]:
    """The headline, then the sets, the scores of words, the graph, the baselines, and how far to trust it.

    `spell` writes the arguments that a note names as the reader gives them.
    """

    def wrapped(text: str) -> list[str]:
        return textwrap.wrap(text, width)

    text = ["\n".join(wrapped(headline(why)))]
    if why.found:
        text += wrapped(f"Smallest sets ({spell(why.sets_note)}):") + _rows(why, why.sets, width)
        if why.ending and not why.only_ending:
            text += wrapped(f"{ENDING}:") + _rows(why, why.ending, width)
    text += _score_lines(why, width)
    for reason, words in by_reason(why).items():
        some = (" " if reason == PUNCTUATION else ", ").join(words[:REASONS])
        some += f" and {len(words) - REASONS} more" if len(words) > REASONS else ""
        text += wrapped(f"Never removed: {some} ({spell(reason)}).")
    pag, where = why.pag, f"layer {why.layer}" + (f", head {why.head}" if why.head is not None else "")
    text += wrapped(
        f"Graph of {where}: {quantity(pag.n, 'node')}, {quantity(len(pag.edges()), 'edge')}, "
        f"{quantity(len(pag.latent_pairs()), 'pair')} with a hidden common cause; {pag.learner.upper()}, N={pag.samples}, alpha={pag.alpha:g}; "
        f"{quantity(why.calls, 'input')} asked about, and {why.more_calls} more for equal sets and single words"
    )
    if why.baselines:
        text.append(f"{'method':<18} {'size':>4} {'pruned':>6} {'calls':>5}  set")
        for name, size, least, calls, taken in methods(why):
            short = textwrap.shorten(taken, max(20, width - 38), placeholder=" ...")
            text.append(f"{name:<18} {size:>4} {least:>6} {calls:>5}  {short}".rstrip())
    for sentence in why.trust:
        text += wrapped(spell(sentence))
    return text


def _rows(why: Explanation, sets: Sequence[Removal], width: int) -> list[str]:
    names = [" + ".join(one.words) for one in sets[:SETS]]
    room = min(max(map(len, names)), max(12, width - 46))
    rows = []
    for name, one in zip(names, sets, strict=False):
        effect = f"{why.measure} {' -> '.join(change(why.before, one.score))}"
        effect += f", rank {why.rank} -> {one.rank}" if why.rank > 1 else ""
        then = f", answer {after(why, one)}" if after(why, one) else ""
        rows.append(_fit(f"  {_fit(name, room):<{room}}  {effect}{then}", width))
    return rows + _rest(len(sets) - SETS)


def _score_lines(why: Explanation, width: int) -> list[str]:
    """The words that matter most by themselves, with what they do."""
    thing = _things(why)[:-1]
    ranked = sorted(why.scores, key=lambda one: -abs(one.leave_one_out))
    room = min(max([4, *(len(one.word) for one in ranked[:WORDS])]), max(12, width - 44))
    measure = "cosine" if why.task == "embedding" else f"probability of {why.answer!r}"
    text = textwrap.wrap(f"Effect of each {thing} on the {measure} (a positive number: it falls without it):", width)
    text.append(f"  {thing:<{room}}  removed alone  mean effect  sets")
    for one in ranked[:WORDS]:
        effects = f"{effect_of(one.leave_one_out):>13}  {effect_of(one.mean_effect):>11}  {one.sets:>4}"
        text.append(f"  {_fit(one.word, room):<{room}}  {effects}")
    return text + _rest(len(ranked) - WORDS)


def _rest(count: int) -> list[str]:
    return [f"  ... {count} more; --json prints all"] if count > 0 else []


def _fit(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 3] + "..."


def by_reason(why: Explanation) -> dict[str, list[str]]:
    """What was never removed, by the reason why."""
    groups: dict[str, list[str]] = {}
    for word, reason in why.left_out:
        groups.setdefault(reason, []).append(word)
    return groups


def methods(why: Explanation) -> Iterable[tuple[str, str, str, int, str]]:
    """Ours and every baseline: name, size, size once pruned, calls, words; a set that changes nothing has no size.

    Our calls are all that were needed, since the set shown is the strongest of several.
    """
    size = str(why.size) if why.found else "none"
    yield "causal (this)", size, size, why.calls + why.more_calls, ", ".join(why.words) if why.found else ""
    for name, one in why.baselines.items():
        sizes = (str(one.size), str(len(one.pruned))) if one.flipped else ("none", "none")
        yield name, *sizes, one.calls, ", ".join(why.names[node] for node in one.indices) if one.flipped else ""

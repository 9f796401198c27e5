"""An explanation in words: the headline, and lines for a terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from heedful._text import cut, quantity
from heedful.lens.causes.questions import PUNCTUATION
from heedful.lens.causes.result import measurable

if TYPE_CHECKING:
    from heedful.lens.causes.result import Explanation, Removal

# Words that a headline names, sets that are listed, words whose scores are printed, words of a reason to leave them out.
NAMED, SETS, WORDS, REASONS = 6, 10, 8, 12
ENDING = "Sets with the last word, without which the text asks for another next word"


def headline(
    result: Explanation, word: Callable[[str], str] = str, answer: Callable[[str], str] = lambda text: repr(text)
) -> str:
    """The strongest thing that holds, with every equal beside it; `word` and `answer` mark these up."""
    masking, things = _verb(result), _things(result)
    score = result.effect.cosine_after if result.task == "embedding" else result.effect.probability_after
    was, then = change(result.before, score)
    if result.task == "embedding":
        opening = ""
        changes = "changes the embedding of the text beyond the threshold"
        bound = f" (cosine with the embedding of the whole text below {result.settings['threshold']:g})"
        most = "changes it most"
    else:
        own = answer(result.answer)
        opening = (
            f"The model answers {own}" if result.rank == 1 else f"{own} is the model's answer number {result.rank}"
        )
        opening += f" (probability {was}). "
        changes = "changes the answer" if result.rank == 1 else "makes it lose that rank"
        bound, most = "", "has the largest effect"

    def joined(one: Sequence[str]) -> str:
        return listed([word(name) for name in one], "and")

    ending = f" {note}" if (note := ending_note(result, word)) else ""
    but = " but the last" if any(len(one.indices) == 1 for one in result.ending) and not result.only_ending else ""
    singles = sum(one.alone.flipped for one in result.scores) - bool(but)
    if not result.found:
        size = result.settings["max_size"]
        closest = (
            f" {masking} {joined(result.words)} {most}: {_effect(result, None, answer, then)}." if result.words else ""
        )
        if not measurable(result.before, score):
            closest = (
                f" None of the {things} that were tried has a measurable effect: the {result.measure} does not fall."
            )
        # In the paper's order a word that no graph connects is measured, but proposed by none.
        which = "that the graphs propose" if singles else "that was tried"
        return f"{opening}No set of at most {quantity(size, things[:-1])} {which} {changes}{bound}.{closest}"
    first, size = result.sets[0], result.size
    none = f" No single {things[:-1]}{but} does." if size == 2 and not singles else ""
    without = " without the last word" if result.ending and not result.only_ending else ""
    smaller = none or (f" No smaller set{without} that was tried does." if size > 2 and not singles else "")
    effect = _effect(result, first, answer, then)
    if len(result.sets) == 1:
        together = " alone" if size == 1 else " together"
        all_tried = result.sets_note.startswith("all ")
        only = f" No other single {things[:-1]}{but} does." if size == 1 and singles == 1 and all_tried else smaller
        return f"{opening}{masking} {joined(first.words)}{together} {changes}{bound}: {effect}.{only}{ending}"
    if size == 1:
        every = [word(one.words[0]) for one in result.sets]
        rest = [f"{len(every) - NAMED} others"] if len(every) > NAMED + 1 else every[NAMED:]
        any_one = f"any one of {listed(every[:NAMED] + rest, 'or')}"
    else:
        any_one = f"any one of {len(result.sets)} sets of {size} {things}"
    return f"{opening}{masking} {any_one} {changes}{bound}; {joined(first.words)} {most}: {effect}.{smaller}{ending}"


def ending_note(result: Explanation, word: Callable[[str], str] = str) -> str:
    """What to think of sets that hold the last word of a text whose next token is asked for; empty where there are none."""
    if not result.ending:
        return ""
    if result.only_ending:
        gone = "This is the last word, without which" if result.size == 1 else "With the last word gone"
        most = quantity(result.settings["max_size"], "other word")
        return (
            f"{gone} the text asks for another next word; no set of at most {most} that was tried changes the answer."
        )
    first = listed([word(name) for name in result.ending[0].words], "and")
    what = f"the last word, {first}," if len(result.ending[0].words) == 1 else f"{first}, the last word among them,"
    return f"{_verb(result)} {what} changes it too, but then the text asks for another next word."


def _effect(result: Explanation, one: Removal | None, answer: Callable[[str], str], then: str) -> str:
    """What becomes of the answer without a set: its score, or its rank where the score does not fall."""
    if result.task == "embedding":
        return f"the cosine is then {then}"
    own, effect = answer(result.answer), f"the probability of {answer(result.answer)} is then {then}"
    if one is not None and not measurable(result.before, one.score):
        effect = f"{own} then has rank {one.rank} instead of {result.rank}, though its probability does not fall"
    return f"the model answers {answer(one.answer)}, and {effect}" if one is not None and result.rank == 1 else effect


def _verb(result: Explanation) -> str:
    return "Masking" if result.settings.get("replace") == "mask" else "Removing"


def _things(result: Explanation) -> str:
    return "items" if result.task == "recommendation" else "words"


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


def after(result: Explanation, one: Removal) -> str:
    """What the model answers without a set, where that is more than a number."""
    return "" if result.task == "embedding" else repr(one.answer)


def lines(result: Explanation, width: int = 100, spell: Callable[[str], str] = str) -> list[str]:
    """The headline, then the sets, the scores of words, the graph, the baselines, and how far to trust it.

    `spell` writes the arguments that a note names as the reader gives them.
    """

    def wrapped(text: str) -> list[str]:
        return textwrap.wrap(text, width)

    text = ["\n".join(wrapped(headline(result)))]
    if result.found:
        text += wrapped(f"Smallest sets ({spell(result.sets_note)}):") + _rows(result, result.sets, width)
        if result.ending and not result.only_ending:
            text += wrapped(f"{ENDING}:") + _rows(result, result.ending, width)
    text += _score_lines(result, width)
    for reason, words in by_reason(result).items():
        text += wrapped(never_removed(spell(reason), words, REASONS))
    pag, where = result.pag, f"layer {result.layer}" + (f", head {result.head}" if result.head is not None else "")
    text += wrapped(
        f"Graph of {where}: {quantity(pag.n, 'node')}, {quantity(len(pag.edges()), 'edge')}, "
        f"{quantity(len(pag.latent_pairs()), 'pair')} with a hidden common cause; {pag.learner.upper()}, N={pag.samples}, alpha={pag.alpha:g}; "
        f"{quantity(result.calls, 'input')} asked about, and {result.more_calls} more for equal sets and single words"
    )
    if result.baselines:
        text.append(f"{'method':<18} {'size':>4} {'pruned':>6} {'calls':>5}  set")
        for name, size, least, calls, taken in methods(result):
            short = textwrap.shorten(taken, max(20, width - 38), placeholder=" ...")
            text.append(f"{name:<18} {size:>4} {least:>6} {calls:>5}  {short}".rstrip())
    for sentence in result.trust:
        text += wrapped(spell(sentence))
    return text


def _rows(result: Explanation, sets: Sequence[Removal], width: int) -> list[str]:
    names = [" + ".join(one.words) for one in sets[:SETS]]
    room = min(max(map(len, names)), max(12, width - 46))
    rows = []
    for name, one in zip(names, sets, strict=False):
        effect = f"{result.measure} {' -> '.join(change(result.before, one.score))}"
        effect += f", rank {result.rank} -> {one.rank}" if result.rank > 1 else ""
        then = f", answer {after(result, one)}" if after(result, one) else ""
        rows.append(cut(f"  {cut(name, room):<{room}}  {effect}{then}", width))
    return rows + _rest(len(sets) - SETS)


def _score_lines(result: Explanation, width: int) -> list[str]:
    """The words that matter most by themselves, with what they do."""
    thing = _things(result)[:-1]
    ranked = sorted(result.scores, key=lambda one: -abs(one.leave_one_out))
    room = min(max([4, *(len(one.word) for one in ranked[:WORDS])]), max(12, width - 44))
    measure = "cosine" if result.task == "embedding" else f"probability of {result.answer!r}"
    text = textwrap.wrap(f"Effect of each {thing} on the {measure} (a positive number: it falls without it):", width)
    text.append(f"  {thing:<{room}}  removed alone  mean effect  sets")
    for one in ranked[:WORDS]:
        effects = f"{effect_of(one.leave_one_out):>13}  {effect_of(one.mean_effect):>11}  {one.sets:>4}"
        text.append(f"  {cut(one.word, room):<{room}}  {effects}")
    return text + _rest(len(ranked) - WORDS)


def _rest(count: int) -> list[str]:
    return [f"  ... {count} more; --json prints all"] if count > 0 else []


def by_reason(result: Explanation) -> dict[str, list[str]]:
    """What was never removed, by the reason why."""
    groups: dict[str, list[str]] = {}
    for word, reason in result.left_out:
        groups.setdefault(reason, []).append(word)
    return groups


def never_removed(reason: str, words: list[str], most: int | None = None) -> str:
    """What was never removed and why, so many words at most; of punctuation how often there is some.

    >>> never_removed("punctuation", [".", ","])
    'Never removed: punctuation (2 times).'
    """
    if reason == PUNCTUATION:
        return f"Never removed: punctuation ({'once' if len(words) == 1 else f'{len(words)} times'})."
    shown = words[:most]
    more = f" and {len(words) - len(shown)} more" if len(words) > len(shown) else ""
    return f"Never removed: {', '.join(shown)}{more} ({reason})."


def methods(result: Explanation) -> Iterable[tuple[str, str, str, int, str]]:
    """Ours and every baseline: name, size, size once pruned, calls, words; a set that changes nothing has no size.

    Our calls are all that were needed, since the set shown is the strongest of several.
    """
    size = str(result.size) if result.found else "none"
    yield "causal (this)", size, size, result.calls + result.more_calls, ", ".join(result.words) if result.found else ""
    for name, one in result.baselines.items():
        sizes = (str(one.size), str(len(one.pruned))) if one.flipped else ("none", "none")
        yield name, *sizes, one.calls, ", ".join(result.names[node] for node in one.indices) if one.flipped else ""

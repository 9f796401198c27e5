"""Which earlier words the pronouns of a text attend to, head by head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from torch import Tensor

from heedful._errors import HeedfulError, Unsupported
from heedful._result import Result, plain
from heedful._runtime import undisturbed
from heedful.bridges.reading import Reading, read_text
from heedful.lens._english import FUNCTION, PERSONAL
from heedful.lens.looking import SENTENCE
from heedful.lens.observation import Observation, observe
from heedful.report import Block, Finding, Link, Note, Prose, Section, Table

if TYPE_CHECKING:
    from heedful.lens.sections import Subject

# Pronouns that are shown, and heads of each.
SHOWN, HEADS = 3, 8
# A sentence -> what its pronoun stands for; one word of it, another in its place, and what the pronoun stands for then.
KNOWN = {SENTENCE: ("animal", "tired", "wide", "street")}
# A head attends to a word where it gives it so many times what an even spread would.
TIMES = 2.0
# Rows of 16-bit weights sum to one within this.
ROUNDING = 2e-2


@dataclass(frozen=True)
class HeadReference:
    """One head: the weight from the pronoun to the word, and the word's rank among all words that the pronoun sees."""

    layer: int
    head: int
    weight: float
    rank: int


@dataclass(frozen=True)
class Change(Result):
    """The same pronoun after one word of the text was replaced, so that it stands for another word.

    Attributes:
        old, new: the word that was replaced, and the one in its place.
        word: what the pronoun stands for after that.
        before, after: by head, `(layer, head)`, the weights on the reference's word and on this one.
    """

    old: str
    new: str
    word: str
    before: Mapping[tuple[int, int], tuple[float, float]]
    after: Mapping[tuple[int, int], tuple[float, float]]

    _not = ("before", "after")

    @property
    def preferring(self) -> list[tuple[int, int]]:
        """The heads that give the first word more than the other in the original text."""
        return [at for at, (one, other) in self.before.items() if one > other]

    @property
    def switched(self) -> list[tuple[int, int]]:
        """Those of them that give the other word more after the change."""
        return [at for at in self.preferring if self.after[at][0] < self.after[at][1]]

    def to_dict(self) -> dict[str, Any]:
        counts = {"preferring": len(self.preferring), "switched": len(self.switched)}
        heads = [
            {"layer": at[0], "head": at[1], "before": plain(weights), "after": plain(self.after[at])}
            for at, weights in self.before.items()
        ]
        return super().to_dict() | counts | {"heads": heads}


@dataclass(frozen=True)
class Reference(Result):
    """A pronoun, and an earlier word: the one that it stands for where that is known, else that which the heads attend to most from it.

    Attributes:
        pronoun, query: the pronoun, and its token's place.
        word, keys: the earlier content word, by default that with the largest weight, head mean; and its tokens' places.
        heads: every head, by falling weight.
        chance: what an even spread over all visible tokens gives that word.
        means: of every earlier content word, the mean weight over heads.
        change: what happens when another word of the text is replaced; None where nothing was tried.
    """

    pronoun: str
    query: int
    word: str
    keys: tuple[int, ...]
    heads: tuple[HeadReference, ...]
    chance: float
    means: Mapping[str, float]
    change: Change | None = None

    _also = ("median", "first")

    @property
    def median(self) -> float:
        """The weight that the median head gives the word."""
        return median(head.weight for head in self.heads)

    @property
    def first(self) -> int:
        """How many heads give the word more weight than any other word."""
        return sum(head.rank == 1 for head in self.heads)

    def __str__(self) -> str:
        return self.sentence()

    @property
    def attended(self) -> bool:
        """Whether any head attends to the word clearly more than an even spread would."""
        return self.heads[0].weight >= TIMES * self.chance

    def sentence(self) -> str:
        """The strongest head, beside chance and the other heads."""
        top = self.heads[0]
        if not self.attended:
            return (
                f'No head attends from "{self.pronoun}" to "{self.word}" with twice the weight of an even spread over all tokens '
                f"({self.chance:.2f}): the largest is {top.weight:.2f}, in head {top.layer}.{top.head}."
            )
        rank = "more than to any other word" if top.rank == 1 else f"rank {top.rank} among the words that it sees"
        return (
            f'"{self.pronoun}" attends to "{self.word}" most in head {top.layer}.{top.head}, with a weight of {top.weight:.2f}, {rank}; an even '
            f"spread over all tokens gives {self.chance:.2f}, the median head {self.median:.2f}. In {self.first} of {len(self.heads)} heads no "
            f'other word gets more of the attention of "{self.pronoun}".'
        )

    def changed(self) -> str:
        """What the change does, and what it does not; empty where nothing was changed, or no head attends to the word."""
        change = self.change
        if change is None or not self.attended:
            return ""
        top = self.heads[0].layer, self.heads[0].head
        (one, other), (one_after, other_after) = change.before[top], change.after[top]
        verdict = "it switches" if other_after > one_after else f'it does not switch to "{change.word}"'
        kept, switched = len(change.preferring), len(change.switched)
        return (
            f'With "{change.new}" in place of "{change.old}" a reader takes "{self.pronoun}" for "{change.word}". Head {top[0]}.{top[1]} then '
            f'gives "{self.word}" {one_after:.2f} (was {one:.2f}) and "{change.word}" {other_after:.2f} (was {other:.2f}): {verdict}. '
            f'Of the {kept} heads that give "{self.word}" more than "{change.word}", {switched or "none"} '
            f"{'switches' if switched < 2 else 'switch'}."
        )


def references(observation: Observation, reading: Reading, known: str | None = None) -> tuple[Reference, ...]:
    """The pronouns of a text that have a content word before them, in the order of the text.

    Args:
        observation: of the model reading the text.
        reading: the text in tokens, of which the observation may hold the beginning alone.
        known: the word that the pronouns stand for; by default, of each pronoun, the one that heads attend to most.
    """
    layers = _layers(observation)
    words = reading.places(observation.valid.shape[1])
    names = [_plain(word) for word, _ in words]
    results = []
    for at, (word, places) in enumerate(words):
        if names[at] not in PERSONAL:
            continue
        # What stands right before a pronoun is attended to for being there.
        earlier = [
            one
            for one in range(at)
            if names[one] not in FUNCTION and any(map(str.isalpha, names[one])) and words[one][1][-1] < places[0] - 1
        ]
        if known is not None:
            earlier = [one for one in earlier if words[one][0] == known]
        if earlier and layers:
            results.append(_reference(word, at, places[0], words, earlier, layers))
    return tuple(results)


def _plain(word: str) -> str:
    """A word as lists hold it: small letters, `it` for `it's`."""
    lower = word.lower().replace("\u2019", "'")
    return lower if lower in FUNCTION else lower.split("'")[0]


def _layers(observation: Observation) -> list[Any]:
    """The layers in which tokens attend to tokens of the same text."""
    n = observation.valid.shape[1]
    return [one for one in observation if one.kind == "self" and one.queries_len == one.keys_len == n]


def _rows(layers: Sequence[Any], query: int) -> dict[tuple[int, int], Tensor]:
    """The weights from one token to all others, by layer and head; those that are no shares of attention are left out."""
    weights: dict[tuple[int, int], Tensor] = {}
    for record in layers:
        rows = record.weights_of(sequence=0, queries=query).detach().cpu().double()
        if bool((rows >= 0).all()) and bool(((rows.sum(-1) - 1).abs() <= ROUNDING).all()):
            weights |= {(record.index, head): row for head, row in enumerate(rows)}
    return weights


def _visible(record: Any, query: int) -> int:
    """How many keys a token may attend to."""
    if record.mask is None:
        return int(record.keys_len)
    return int(record.mask[0].any(0).expand(record.queries_len, record.keys_len)[query].sum())


def _reference(
    pronoun: str,
    at: int,
    query: int,
    words: Sequence[tuple[str, list[int]]],
    earlier: Sequence[int],
    layers: Sequence[Any],
) -> Reference:
    rows = _rows(layers, query)
    if not rows:
        raise Unsupported("the weights of this model are no shares of attention")
    weights = {head: [float(row[places].sum()) for _, places in words] for head, row in rows.items()}
    means = {one: sum(each[one] for each in weights.values()) / len(weights) for one in earlier}
    best = max(means, key=lambda one: means[one])
    heads = [
        HeadReference(*head, each[best], 1 + sum(value > each[best] for other, value in enumerate(each) if other != at))
        for head, each in weights.items()
    ]
    visible = max(_visible(record, query) for record in layers)
    word, keys = words[best]
    ranked = sorted(heads, key=lambda one: (-one.weight, one.layer, one.head))
    named = {words[one][0]: mean for one, mean in means.items()}
    return Reference(pronoun, query, word, tuple(keys), tuple(ranked), len(keys) / visible, named)


def compare(reference: Reference, other: str, runs: Sequence[tuple[Observation, Reading]], change: tuple[str, str]) -> Reference:  # fmt: skip
    """The reference with what becomes of it in a second run, on a text in which one word is replaced."""
    sides = []
    for observation, reading in runs:
        words = reading.places(observation.valid.shape[1])
        places = dict(reversed(words))
        if not {reference.pronoun, reference.word, other} <= set(places):
            return reference
        rows = _rows(_layers(observation), places[reference.pronoun][0])
        sides.append({
            head: (float(row[places[reference.word]].sum()), float(row[places[other]].sum())) for head, row in rows.items()
        })  # fmt: skip
    before, after = sides
    return (
        replace(reference, change=Change(*change, other, before, after)) if before.keys() == after.keys() else reference
    )


def section(subject: Subject) -> Section:
    """Which earlier word each pronoun attends to; for the default sentence, also what happens when one word of it is replaced."""
    subject.check_words()
    try:
        reading = read_text(subject.model, subject.tokenizer, subject.text)
    except HeedfulError as error:
        raise Unsupported(str(error)) from None
    known = KNOWN.get(subject.text)
    results = references(subject.observation, reading, known and known[0]) or references(subject.observation, reading)
    if not results:
        raise Unsupported(
            "the text has no English pronoun (it, she, they, ...) with a content word before it, neighbours apart"
        )
    results = tuple(_compared(one, subject, reading) for one in results[:SHOWN])
    # The report opens with the sentences on the first one.
    blocks = [block for at, one in enumerate(results) for block in _blocks(one, sentence=at > 0)]
    data = {"references": [one.to_dict() for one in results]}
    title = "What the pronouns attend to" if len(results) > 1 else f"What “{results[0].pronoun}” attends to"
    return Section(title, blocks, data, result=results, findings=_findings(results[0], _unchanged(subject)))


CAVEAT = "That a head attends to a word does not show that the model takes the pronoun to mean it."
CHANGE_CAVEAT = "This is one pair of sentences; another pair may differ."


def _findings(one: Reference, note: str) -> tuple[Finding, ...]:
    findings = [Finding(one.sentence(), CAVEAT, "pronouns")]
    if one.changed():
        findings.append(Finding(one.changed(), CHANGE_CAVEAT, "pronouns"))
    elif note:
        findings.append(Finding(note, "The same holds for every word after a pronoun.", "pronouns"))
    return tuple(findings)


def _unchanged(subject: Subject) -> str:
    """Why the replaced word cannot matter; empty where it can."""
    if subject.text not in KNOWN or not all(record.causal for record in subject.observation):
        return ""
    _, old, new, _ = KNOWN[subject.text]
    return f'With "{new}" in place of "{old}" nothing changes at the pronoun: this model reads from left to right, and "{old}" comes later.'


def _compared(one: Reference, subject: Subject, reading: Reading) -> Reference:
    """The reference with its change, for the sentences that have one."""
    if subject.text not in KNOWN or one.word != KNOWN[subject.text][0] or _unchanged(subject):
        return one
    _, old, new, word = KNOWN[subject.text]
    text = subject.text.replace(old, new)
    with undisturbed(subject.model):
        observation = observe(subject.model, text, keep=("weights",), tokenizer=subject.tokenizer)
    changed = read_text(subject.model, subject.tokenizer, text)
    return compare(one, word, [(subject.observation, reading), (observation, changed)], (old, new))


def _blocks(one: Reference, *, sentence: bool) -> Iterator[Block]:
    """The heads with the largest weights, as a table; `sentence` for a reference that the report does not open with."""
    if sentence:
        yield Prose(one.sentence(), style="reference")
    yield Note("Each row is a head; its name opens its map. The largest weights come first.", shown="page")
    head, change = ["head", one.word, "rank"], one.change
    caption = f"Weight from “{one.pronoun}” on “{one.word}”, and its rank among the words"
    if change is not None:
        head += [change.word, f"{one.word}, with {change.new}", f"{change.word}, with {change.new}"]
        caption += f"; then on “{change.word}”, and both with “{change.new}” for “{change.old}”"
    rows: list[list[Any]] = []
    for each in one.heads[:HEADS]:
        at = each.layer, each.head
        link = Link(f"{each.layer}.{each.head}", f"head-{each.layer}-{each.head}", (one.query, one.keys[0]))
        rows.append([link, f"{each.weight:.2f}", each.rank])
        if change is not None:
            rows[-1] += [f"{value:.2f}" for value in (change.before[at][1], *change.after[at])]
    yield Table(head, rows, f"{caption}. Heads are named layer.head")

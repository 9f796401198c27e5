"""Sentences and random tokens that show what heads do, whatever text is looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heedful._errors import HeedfulError
from heedful._progress import Progress, silent
from heedful._runtime import undisturbed
from heedful.bridges.reading import Reading, inputs_of, limit_of, read_text
from heedful.bridges.words import segments
from heedful.lens._english import ARTICLES, PREPOSITIONS, PRONOUNS, PUNCTUATION
from heedful.lens.observation import Observation, observe
from heedful.lens.roles import Role, Tally, measured, position_tests

# Sentences with their links, written out by hand: article > noun, verb > object, pronoun > noun. A word stands once in its sentence.
SENTENCES = (
    ("The farmer sold a horse because it was lame.", "The>farmer a>horse", "sold>horse", "it>horse"),
    ("Yesterday the teacher read a letter and burned it.", "the>teacher a>letter", "read>letter", "it>letter"),
    ("The tired children carried an old boat to the river.", "The>children an>boat the>river", "carried>boat", ""),
    ("Anna met the doctor, but she did not greet him.", "the>doctor", "met>doctor greet>him", "she>Anna him>doctor"),
    ("A storm broke the window of an empty house.", "A>storm the>window an>house", "broke>window", ""),
    ("The waiters brought the soup, and they spilled it.", "The>waiters the>soup", "brought>soup spilled>it", "they>waiters it>soup"),
    ("In the garden a boy found the silver coin.", "a>boy", "found>coin", ""),
    ("My sister painted the fence before she left.", "the>fence", "painted>fence", "she>sister"),
    ("When the judge saw a film, he praised the actor.", "a>film", "saw>film praised>actor", "he>judge"),
    ("The engine heats the water until a valve opens.", "The>engine the>water a>valve", "heats>water", ""),
    ("Two students wrote an essay on the history of Rome.", "an>essay the>history", "wrote>essay", ""),
    ("The nurse lost her keys; Peter found them under a chair.", "The>nurse a>chair", "lost>keys found>them", "her>nurse them>keys"),
)  # fmt: skip
LINKS = ("article to noun", "verb to object", "pronoun to noun")
BACK = {"article to noun": "noun to article", "verb to object": "object to verb"}
CLASSES = (ARTICLES, PREPOSITIONS, PRONOUNS, PUNCTUATION)
# Fewer sentences than these that the tokenizer knows are no test.
ENOUGH = 6
# Random tokens in chunks of so many, and the most chunks; then all chunks again in another order.
CHUNK, CHUNKS = 4, 6


@dataclass(frozen=True)
class Probed:
    """What tests beyond one text say: by layer, the roles of each head; and the reasons for what could not be tested."""

    layers: Mapping[int, Sequence[Sequence[Role]]]
    notes: tuple[str, ...]


def probe(model: Any, tokenizer: Any, progress: Progress = silent) -> Probed:
    """Runs a model on sentences whose links between words are known, and on random tokens that come twice.

    English sentences show where heads attend by place, along links between words (article and noun, verb and object, pronoun and noun), and
    within a class of words; random tokens show duplicates and, in decoders, induction: at the second `x` of `x y ... x`, attending to `y` (Olsson et al. 2022).

    >>> from heedful.bridges.reading import demo_model_path, load
    >>> found = probe(*load(demo_model_path()))
    >>> [role.name for role in found.layers[2][8] if role.passed]
    ['article to noun', 'next token']
    """
    tallies: dict[tuple[int, str], Tally] = {}
    notes = []
    known = [one for one in SENTENCES if _known(model, tokenizer, one[0])]
    if len(known) < ENOUGH:
        notes.append("Links between words were not tested: the model cannot read the English test sentences.")
        known = []
    for done, (text, *links) in enumerate(known):
        progress(done, len(known) + 1, "attention")
        reading = read_text(model, tokenizer, text)
        _tally(
            tallies,
            _observed(model, inputs_of(model, tokenizer, text)),
            _word_tests(reading, links),
            reading.special,
            positions=True,
        )
    ids, earlier = _repeated(model, tokenizer)
    if earlier:
        inputs = {"input_ids": ids[None].to(model.device)}
        _tally(tallies, _observed(model, inputs), _repeat_tests(earlier), [False] * len(ids))
    else:
        notes.append("Duplicates and induction were not tested: the vocabulary or the model's limit is too small.")
    return Probed(_by_layer(tallies), tuple(notes))


def _known(model: Any, tokenizer: Any, text: str) -> bool:
    """Whether the model can read a sentence, each of its words known."""
    try:
        reading = read_text(model, tokenizer, text)
    except HeedfulError:
        return False
    words = len(segments(text))
    unknown = getattr(tokenizer, "unk_token_id", None)
    # Of a language it was not made for, a tokenizer leaves pieces of a letter or two.
    return unknown not in reading.ids and len(reading.ids) <= 2 * words + 4


def _observed(model: Any, inputs: dict[str, Any]) -> Observation:
    with undisturbed(model):
        return observe(model, inputs, keep=("weights",))


def _tally(
    tallies: dict[tuple[int, str], Tally],
    observation: Observation,
    tests: Mapping[str, Tensor],
    special: Sequence[bool],
    *,
    positions: bool = False,
) -> None:
    n = len(special)
    words = ~torch.tensor(special)
    for record in observation:
        if record.kind == "cross" or (record.queries_len, record.keys_len) != (n, n):
            continue
        weights = record.weights_of(sequence=0).detach().cpu()
        visible = torch.ones(n, n, dtype=torch.bool)
        if record.mask is not None:
            visible = record.mask[0].any(0).expand(n, n).cpu()
        among = visible & words & words[:, None] & ~torch.eye(n, dtype=torch.bool)
        keys = {name: (wanted, among) for name, wanted in tests.items() if record.causal or name != "induction"}
        keys |= position_tests(special, visible) if positions else {}
        for name, both in keys.items():
            one, key = measured(weights, *both), (record.index, name)
            tallies[key] = tallies[key] + one if key in tallies else one


def _word_tests(reading: Reading, links: Sequence[str]) -> dict[str, Tensor]:
    """The keys that each test wants of a sentence."""
    text, n = reading.text, len(reading.ids)
    spans = [text[slice(*span)] if span else "" for span in reading.spans]
    places = dict(reading.places())
    tests = {name: torch.zeros(n, n, dtype=torch.bool) for name in (*LINKS, *BACK.values(), "same word class")}
    for name, pairs in zip(LINKS, links, strict=True):
        for one, other in (pair.split(">") for pair in pairs.split()):
            tests[name][places[one][-1], places[other]] = True
            if name in BACK:
                tests[BACK[name]][places[other][-1], places[one]] = True
    for members in CLASSES:
        same = torch.tensor([span.lower() in members for span in spans])
        tests["same word class"] |= same & same[:, None] & ~torch.eye(n, dtype=torch.bool)
    return tests


def _repeated(model: Any, tokenizer: Any) -> tuple[Tensor, list[int]]:
    """Random tokens twice, and for each of the second half its place in the first; none where there are too few to choose from."""
    size = min(len(tokenizer), model.get_input_embeddings().weight.shape[0])
    ordinary = torch.tensor(sorted(set(range(size)) - set(tokenizer.all_special_ids)))
    limit = limit_of(model, tokenizer)
    earlier = _order(min(CHUNKS, len(ordinary) // CHUNK, limit // (2 * CHUNK)))
    chosen = ordinary[torch.randperm(len(ordinary), generator=torch.Generator().manual_seed(0))[: len(earlier)]]
    return torch.cat((chosen, chosen[earlier])) if earlier else chosen, earlier


def _order(chunks: int) -> list[int]:
    """Where in the first half each token of the second half stands: chunks from the middle and the beginning in turn.

    No two chunks have moved by the same number of places, so that a head which attends a fixed number of places back finds one of them alone.

    >>> _order(3)
    [4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11]
    """
    if chunks < 3:
        return []
    turns = [at // 2 if at % 2 else chunks // 2 + at // 2 for at in range(chunks)]
    return [CHUNK * chunk + at for chunk in turns for at in range(CHUNK)]


def _repeat_tests(earlier: Sequence[int]) -> dict[str, Tensor]:
    """Duplicates: from each token to its other place. Induction: from its second place to what followed the first, which comes next."""
    half = len(earlier)
    same, after = (torch.zeros(2 * half, 2 * half, dtype=torch.bool) for _ in range(2))
    for at, place in enumerate(earlier):
        same[half + at, place] = same[place, half + at] = True
        if (at + 1) % CHUNK:
            after[half + at, place + 1] = True
    return {"duplicate token": same, "induction": after}


def _by_layer(tallies: Mapping[tuple[int, str], Tally]) -> dict[int, list[list[Role]]]:
    columns: dict[int, list[Sequence[Role]]] = {}
    for (layer, name), tally in tallies.items():
        columns.setdefault(layer, []).append(tally.roles(name))
    return {
        layer: [[role for role in roles if role.places] for roles in zip(*own, strict=True)]
        for layer, own in columns.items()
    }

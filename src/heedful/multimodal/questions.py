"""Questions about scenes as numbers, many at once: the kinds and answers of `worlds.QUESTIONS`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heedful.multimodal.scenes import Scenes, Vocabulary, packed
from heedful.multimodal.worlds import ANSWERS, COLOURS, PRESETS, QUESTIONS, SIZES

__all__ = ["Questions", "questions"]

COLOUR, SHAPE, COUNT, EXIST, RELATION, WHERE = range(len(QUESTIONS))


class Questions(NamedTuple):
    """Texts `(n, length)`, answers `(n,)` by their places in `ANSWERS`, and kinds `(n,)` by theirs in `QUESTIONS`."""

    input_ids: Tensor
    answers: Tensor
    kinds: Tensor


def questions(
    scenes: Scenes, generator: torch.Generator | None = None, *, weights: Sequence[float] = (1,) * 6, preset: str = "full", length: int = 16
) -> Questions:  # fmt: skip
    """A question about each scene, of a kind drawn by its weight; where a scene has nothing to ask so, a colour or shape is counted, and a relation is asked as `"exist"`.

    >>> found = questions(Scenes.draw(5, torch.Generator().manual_seed(0)))
    >>> found.input_ids.shape, found.answers.shape
    (torch.Size([5, 16]), torch.Size([5]))
    """
    things, there, device = scenes.things, scenes.there, scenes.things.device
    count, most = there.shape
    of, vocabulary = PRESETS[preset], Vocabulary()
    how: dict[str, Any] = {"generator": generator, "device": device}
    rows = torch.arange(count, device=device)
    size, colour, shape = things[..., 0], things[..., 1], things[..., 2]

    def pick(allowed: Tensor) -> tuple[Tensor, Tensor]:
        """One of the allowed objects of each scene, and whether there is any."""
        draws = torch.rand(allowed.shape, **how).masked_fill(~allowed, -1)
        return draws.flatten(1).argmax(1), allowed.flatten(1).any(1)

    def alone(of: Tensor) -> Tensor:
        same = (of[:, :, None] == of[:, None]) & there[:, None]
        return (same.sum(2) == 1) & there

    shares = torch.tensor(weights, dtype=torch.float32).cumsum(0)
    drawn = torch.rand(count, **how) * float(shares[-1])
    kind = sum((drawn >= float(share)).long() for share in shares[:-1])
    assert isinstance(kind, Tensor)
    by_shape, can_colour = pick(alone(shape))
    by_colour, can_shape = pick(alone(colour))
    column = things[..., 4]
    pair, can_relate = pick((column[:, :, None] < column[:, None]) & there[:, :, None] & there[:, None])
    kind = torch.where((kind == COLOUR) & ~can_colour | (kind == SHAPE) & ~can_shape, COUNT, kind)
    kind = torch.where((kind == RELATION) & ~can_relate, EXIST, kind)
    yes = torch.rand(count, **how) < 0.5
    any_object, _ = pick(there)
    # A pair of colour and shape that no object has.
    taken = torch.zeros(count, of.colours * of.shapes, dtype=torch.bool, device=device)
    taken.scatter_(1, torch.where(there, colour * of.shapes + shape, (colour * of.shapes + shape)[:, :1]), True)
    missing, _ = pick(~taken)
    of_shapes = torch.rand(count, **how) < 0.5
    counted = torch.randint(of.shapes, (count,), **how), torch.randint(len(SIZES), (count,), **how)
    number = torch.where(of_shapes, ((shape == counted[0][:, None]) & there).sum(1), ((size == counted[1][:, None]) & there).sum(1))  # fmt: skip
    left, right = pair // most, pair % most
    first, second = torch.where(yes, left, right), torch.where(yes, right, left)
    first = torch.where(kind == RELATION, first, any_object)
    first_colour, first_shape = colour[rows, first], shape[rows, first]
    first_colour = torch.where((kind == EXIST) & ~yes, missing // of.shapes, first_colour)
    first_shape = torch.where((kind == EXIST) & ~yes, missing % of.shapes, first_shape)
    place = 2 * (things[rows, any_object, 3] > 1).long() + (things[rows, any_object, 4] > 1).long()

    start = {name: ANSWERS.index(name) for name in ("red", "circle", "0", "yes", "top left")}
    answers = torch.stack((
        start["red"] + colour[rows, by_shape], start["circle"] + shape[rows, by_colour], start["0"] + number.clamp(max=3),
        start["yes"] + (~yes).long(), start["yes"] + (~yes).long(), start["top left"] + place,
    ))[kind, rows]  # fmt: skip

    nothing = torch.full((count,), -1, device=device)

    def word(text: str, *kinds: int) -> Tensor:
        return torch.where(torch.stack([kind == one for one in kinds]).any(0), vocabulary.number(text), nothing)

    def look(words: Sequence[str], at: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, vocabulary.numbers(words, device)[at.clamp(max=len(words) - 1)], nothing)

    described = (kind == EXIST) | (kind == RELATION) | (kind == WHERE)
    counts, relates = kind == COUNT, kind == RELATION
    columns = [
        torch.full((count,), vocabulary.number("[CLS]"), device=device),
        word("what", COLOUR, SHAPE), word("color", COLOUR), word("shape", SHAPE), word("where", WHERE), word("how", COUNT), word("many", COUNT),
        word("is", COLOUR, SHAPE, EXIST, RELATION, WHERE), word("there", EXIST), word("a", EXIST), word("the", COLOUR, SHAPE, RELATION, WHERE),
        look(vocabulary.shapes, shape[rows, by_shape], kind == COLOUR), look(COLOURS, colour[rows, by_colour], kind == SHAPE), word("one", SHAPE),
        look(vocabulary.shapes, counted[0], counts & of_shapes), look(SIZES, counted[1], counts & ~of_shapes),
        torch.where(counts & ~of_shapes, vocabulary.number("thing"), nothing),
        look(COLOURS, first_colour, described), look(vocabulary.shapes, first_shape, described),
        word("left", RELATION), word("of", RELATION), torch.where(relates, vocabulary.number("the"), nothing),
        look(COLOURS, colour[rows, second], relates), look(vocabulary.shapes, shape[rows, second], relates),
        torch.full((count,), vocabulary.number("[SEP]"), device=device),
    ]  # fmt: skip
    return Questions(packed(torch.stack(columns, 1), length), answers, kind)

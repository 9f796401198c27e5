"""Scenes of the world `shapes` as tensors: many at once, on any device, with captions, foils and questions as numbers.

The numbers follow the same laws as those of `worlds.Shapes`, from other random streams. Objects may be more than 3,
pairs of colour and shape may be left out, captions may say two relations, and small pictures, as of written digits, may
stand in place of the drawn shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from heedful._errors import InvalidArgument
from heedful.multimodal.worlds import COLOURS, FOILS, MEAN, PRESETS, RGB, SHAPES, SIDE, SIZES, STD, VOCABULARY, Thing

__all__ = ["KINDS", "Captions", "Scenes", "Vocabulary", "pixel_values"]

# What a caption says: a place, a relation, a relation along both axes, or two relations in a row.
KINDS = ("location", "relation", "both", "chain")
RELATIONS = ("left", "right", "above", "below")
# Columns of a caption's numbers.
KIND, FIRST, SECOND, THIRD, WORD, OTHER, ROW, COLUMN = 0, 1, 4, 7, 10, 11, 12, 13
SLOTS = {"size": 0, "colour": 1, "shape": 2}


@dataclass(frozen=True)
class Vocabulary:
    """The words of a world by their numbers; `shapes` are the names of what objects are.

    >>> len(Vocabulary()), len(Vocabulary(tuple("0123456789")))
    (49, 55)
    """

    shapes: tuple[str, ...] = SHAPES

    @property
    def words(self) -> tuple[str, ...]:
        return (*VOCABULARY, *(word for word in self.shapes if word not in VOCABULARY))

    def __len__(self) -> int:
        return len(self.words)

    def number(self, word: str) -> int:
        return self.words.index(word)

    def numbers(self, words: Sequence[str], device: Any = None) -> Tensor:
        return _table(tuple(self.number(word) for word in words), device)


@dataclass(frozen=True)
class Scenes:
    """Objects of n pictures, and what it takes to draw them.

    Attributes:
        things: `(n, k, 5)` size, colour, shape, row and column of each object, as in `worlds.Thing`.
        there: `(n, k)`; False where a picture has fewer objects.
        jitter: `(n, k, 2)` pixels off the middle of the cell, to the right and down.
        background: `(n,)` grey of the ground.

    >>> scenes = Scenes.draw(5, torch.Generator().manual_seed(0))
    >>> scenes.render().shape, scenes.captions().true(scenes).all().item()
    (torch.Size([5, 3, 64, 64]), True)
    """

    things: Tensor
    there: Tensor
    jitter: Tensor
    background: Tensor

    @classmethod
    def draw(
        cls,
        count: int,
        generator: torch.Generator | None = None,
        *,
        preset: str = "full",
        objects: tuple[int, int] | None = None,
        held_out: Sequence[tuple[int, int]] = (),
        shapes: int | None = None,
    ) -> Scenes:
        """New scenes on the generator's device.

        `objects` are how many, least and most; `held_out` pairs (colour, shape) never occur; `shapes` is how many kinds
        of object there are.
        """
        of = PRESETS[preset]
        low, high = objects or (of.objects[0], of.objects[1] - 1)
        kinds = shapes or of.shapes
        device = None if generator is None else generator.device
        left = set(held_out)
        pairs = _table(
            tuple((c, s) for c in range(of.colours) for s in range(kinds) if (c, s) not in left), torch.device(device or "cpu")
        )  # fmt: skip
        if not 2 <= low <= high <= min(16, len(pairs)):
            raise InvalidArgument(f"pictures have 2 to {min(16, len(pairs))} objects; got {objects}")
        how: dict[str, Any] = {"generator": generator, "device": device}
        cells = torch.rand(count, 16, **how).argsort(1)[:, :high]
        pair = pairs[torch.rand(count, len(pairs), **how).argsort(1)[:, :high]]
        size = 1 - torch.randint(of.sizes, (count, high), **how)
        there = torch.arange(high, device=device) < torch.randint(low, high + 1, (count, 1), **how)
        things = torch.stack((size, pair[..., 0], pair[..., 1], cells // 4, cells % 4), -1)
        return cls(things, there, torch.randint(-1, 2, (count, high, 2), **how), 0.2 * torch.rand(count, **how))

    @classmethod
    def of(cls, scenes: Sequence[Sequence[Thing]], device: Any = None) -> Scenes:
        """The objects of scenes of numpy's world, which gives their pictures too."""
        most = max(map(len, scenes))
        rows = torch.tensor([[*scene, *[(0,) * 7] * (most - len(scene))] for scene in scenes], device=device)
        counts = torch.tensor([len(scene) for scene in scenes], device=device)
        there = torch.arange(most, device=device) < counts[:, None]
        return cls(rows[..., :5], there, rows[..., 5:], torch.zeros(len(scenes), device=device))

    def __len__(self) -> int:
        return len(self.things)

    def __getitem__(self, rows: Any) -> Scenes:
        return Scenes(self.things[rows], self.there[rows], self.jitter[rows], self.background[rows])

    def render(
        self, generator: torch.Generator | None = None, noise: float = 0.02, glyphs: Tensor | None = None
    ) -> Tensor:
        """Pictures `(n, 3, 64, 64)` of numbers in 0..1.

        With `glyphs` `(shapes, m, g, g)`, numbers in 0..1, one of the m small pictures of its kind, chosen at random,
        is painted for each object instead of a drawn shape.
        """
        device = self.things.device
        size, colour, shape, row, column = self.things.unbind(-1)
        at = torch.arange(SIDE, device=device) + 0.5
        dx = (at - (16 * column + 8 + self.jitter[..., 0])[..., None])[:, :, None, :]  # [n, k, 1, 64]
        dy = (at - (16 * row + 8 + self.jitter[..., 1])[..., None])[:, :, :, None]
        R = (4 + 2 * size).float()[..., None, None]
        inside = _drawn(shape, dx, dy, R) if glyphs is None else _pasted(glyphs, shape, dx / R, dy / R, generator)
        inside = inside * self.there[..., None, None]
        picture = self.background[:, None, None, None].expand(-1, 3, SIDE, SIDE)
        rgb = _table(RGB, device).float()[colour][..., None, None]  # [n, k, 3, 1, 1]
        for k in range(self.things.shape[1]):
            picture = torch.lerp(picture, rgb[:, k].expand_as(picture), inside[:, k, None])
        if noise:
            picture = picture + noise * torch.randn(picture.shape, generator=generator, device=device)
        return picture.clamp(0, 1)

    def captions(
        self, generator: torch.Generator | None = None, weights: Sequence[float] = (1, 1, 0, 0), about: Tensor | None = None
    ) -> Captions:  # fmt: skip
        """A true caption for each scene, of `KINDS` drawn by their weights; where a scene has no such relation, of one relation.

        `about` `(n, k)`, where given, marks objects of which the first is to be one.
        """
        count, device = len(self), self.things.device
        how: dict[str, Any] = {"generator": generator, "device": device}
        order = torch.rand(self.there.shape, **how) + 2 * ~self.there
        if about is not None:
            order = order - 4 * (about & self.there) * (torch.rand(self.there.shape, **how) + 1)
        order = order.argsort(1)
        rows = torch.arange(count, device=device)[:, None]
        chosen = self.things[rows, order]  # [n, k, 5]
        first, second, third = (chosen[:, min(at, chosen.shape[1] - 1)] for at in range(3))
        shares = _table(tuple(float(sum(weights[: at + 1]) / sum(weights)) for at in range(len(KINDS) - 1)), device)
        kind = (torch.rand(count, 1, **how) >= shares).sum(1)
        word, axes = _relation(first, second, torch.rand(count, **how) < 0.5)
        other, _ = _relation(second, third, torch.rand(count, **how) < 0.5)
        both = (kind == 2) & (axes == 2)
        kind = torch.where((kind == 2) & ~both | (kind == 3) & (self.there.sum(1) < 3), 1, kind)
        # Along both axes the vertical word comes first: "above left of".
        word = torch.where(both, 2 + (first[:, 3] > second[:, 3]).long(), word)
        other = torch.where(both, (first[:, 4] > second[:, 4]).long(), other)
        place = (first[:, 3:] > 1).long()
        parts = (kind[:, None], first[:, :3], second[:, :3], third[:, :3], word[:, None], other[:, None], place)
        return Captions(torch.cat(parts, 1))


@cache
def _table(numbers: tuple[Any, ...], device: Any) -> Tensor:
    """Numbers on a device, copied there once: a copy in every step would wait for the device."""
    return torch.tensor(numbers, device=device)


def _relation(a: Tensor, b: Tensor, horizontal: Tensor) -> tuple[Tensor, Tensor]:
    """The word for where a is of b, along this axis where both differ, and how many axes differ."""
    row, column = a[:, 3] != b[:, 3], a[:, 4] != b[:, 4]
    horizontal = (horizontal | ~row) & column
    word = torch.where(horizontal, (a[:, 4] > b[:, 4]).long(), 2 + (a[:, 3] > b[:, 3]).long())
    return word, row.long() + column.long()


def _drawn(shape: Tensor, dx: Tensor, dy: Tensor, R: Tensor) -> Tensor:
    x, y, square = dx.abs(), dy.abs(), dx**2 + dy**2
    longest = torch.maximum(x, y)
    masks = (
        square <= R**2,
        longest <= 0.88 * R,
        (dy >= -R) & (dy <= 0.8 * R) & (x <= (dy + R) / 1.8),
        ((x <= R / 3) | (y <= R / 3)) & (longest <= R),
        (square <= R**2) & (square >= (0.55 * R) ** 2),
        x + y <= 1.15 * R,
    )
    inside = torch.zeros_like(square, dtype=torch.bool)
    for at, mask in enumerate(masks):
        inside |= mask & (shape == at)[..., None, None]
    return inside.float()


def _pasted(glyphs: Tensor, shape: Tensor, x: Tensor, y: Tensor, generator: torch.Generator | None) -> Tensor:
    """Small pictures over the square of side 2 R around each object; x and y run from -1 to 1 there."""
    count, most = shape.shape
    which = torch.randint(glyphs.shape[1], shape.shape, generator=generator, device=shape.device)
    chosen = glyphs[shape, which].flatten(0, 1)[:, None]  # [n k, 1, g, g]
    grid = torch.stack(torch.broadcast_tensors(x, y), -1).flatten(0, 1)
    return functional.grid_sample(chosen, grid, align_corners=False).view(count, most, SIDE, SIDE)


@dataclass(frozen=True)
class Captions:
    """Captions as numbers `(n, 14)`: kind, size, colour and shape of up to three objects, two relations, bottom, right."""

    numbers: Tensor

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows: Any) -> Captions:
        return Captions(self.numbers[rows])

    @property
    def kind(self) -> Tensor:
        return self.numbers[:, KIND]

    @property
    def located(self) -> Tensor:
        """Those that say a place."""
        return self.kind == 0

    def true(self, scenes: Scenes) -> Tensor:
        """Which of them are true of their scene, `(n,)`."""
        numbers = self.numbers
        row, column = scenes.things[..., 3], scenes.things[..., 4]

        def alike(at: int) -> Tensor:
            return (scenes.things[..., :3] == numbers[:, None, at : at + 3]).all(-1) & scenes.there

        first, second, third = alike(FIRST), alike(SECOND), alike(THIRD)
        placed = (row > 1) == numbers[:, None, ROW].bool()
        placed = (first & placed & ((column > 1) == numbers[:, None, COLUMN].bool())).any(1)
        down, right = (
            row[:, :, None] - row[:, None],
            column[:, :, None] - column[:, None],
        )  # of the first, less the second
        by = torch.stack((right < 0, right > 0, down < 0, down > 0), 1)  # [n, 4, k, k]
        at = torch.arange(len(numbers), device=numbers.device)
        one, two = by[at, numbers[:, WORD]], by[at, numbers[:, OTHER]]
        related = torch.where((numbers[:, KIND] == 2)[:, None, None], one & two, one)
        reached = (first[:, :, None] & related).any(
            1
        ) & second  # [n, k] second objects for which the first relation holds
        chained = (reached[:, :, None] & two & third[:, None]).flatten(1).any(1)
        kind = self.kind
        return torch.where(kind == 0, placed, torch.where(kind == 3, chained, reached.any(1)))

    def foils(
        self, kind: Tensor | str, generator: torch.Generator | None = None, of: tuple[int, int, int] | None = None
    ) -> Captions:
        """Captions with one thing changed, `FOILS` by their numbers `(n,)` or one name for all; `Captions.true` says whether they are false.

        A foil of `"relation"` or `"swap"` leaves a caption of a place as it is, one of `"location"` a relation. `of`
        are the sizes, colours and shapes that there are.
        """  # fmt: skip
        numbers, device = self.numbers.clone(), self.numbers.device
        if isinstance(kind, str):
            kind = torch.full((len(self),), FOILS.index(kind), device=device)

        def below(high: Any) -> Tensor:
            return (torch.rand(len(self), generator=generator, device=device) * high).long()

        rows = torch.arange(len(self), device=device)
        # Descriptions are one in a caption of a place, three in a chain, else two.
        side = below(1 + (self.kind > 0).long() + (self.kind == 3).long())
        for name, count in zip(SLOTS, of or (len(SIZES), len(COLOURS), len(SHAPES)), strict=True):
            place = FIRST + 3 * side + SLOTS[name]
            old = self.numbers[rows, place]
            # One of the others, each equally often; where there is no other the caption stays.
            new = (old + 1 + below(count - 1)) % count
            numbers[rows, place] = torch.where(kind == FOILS.index(name), new, numbers[rows, place])
        later = below(1 + (self.kind > 1).long()).bool()
        related = self.kind > 0
        inverse = (kind == FOILS.index("relation")) & related
        numbers[:, WORD] ^= (inverse & ~later).long()
        numbers[:, OTHER] ^= (inverse & later).long()
        swap = ((kind == FOILS.index("swap")) & related)[:, None]
        a, b, c = (self.numbers[:, at : at + 3] for at in (FIRST, SECOND, THIRD))
        behind = (later & (self.kind == 3))[:, None]
        mixed = torch.cat((torch.where(behind, a, b), torch.where(behind, c, a), torch.where(behind, b, c)), 1)
        numbers[:, FIRST:WORD] = torch.where(swap, mixed, numbers[:, FIRST:WORD])
        moved = (kind == FOILS.index("location")) & ~related
        quadrant = (2 * numbers[:, ROW] + numbers[:, COLUMN] + 1 + below(3)) % 4
        numbers[:, ROW] = torch.where(moved, quadrant // 2, numbers[:, ROW])
        numbers[:, COLUMN] = torch.where(moved, quadrant % 2, numbers[:, COLUMN])
        return Captions(numbers)

    def names(self, pairs: Tensor) -> Tensor:
        """Which captions name one of these pairs; `pairs` `(colours, shapes)` is True at them."""
        named = [pairs[self.numbers[:, at + 1], self.numbers[:, at + 2]] for at in (FIRST, SECOND, THIRD)]
        related = self.kind > 0
        return named[0] | (related & named[1]) | ((self.kind == 3) & named[2])

    def tokens(self, vocabulary: Vocabulary | None = None, length: int = 16) -> Tensor:
        """The captions' words by their numbers, `(n, length)`."""
        vocabulary = vocabulary or Vocabulary()
        numbers, device = self.numbers, self.numbers.device
        count, kind = len(self), self.kind
        tables = [vocabulary.numbers(words, device) for words in (SIZES, COLOURS, vocabulary.shapes, RELATIONS, ("top", "bottom"), ("left", "right"))]  # fmt: skip
        nothing = torch.full((count,), -1, device=device)

        def word(text: str, where: Tensor | None = None) -> Tensor:
            every = torch.full((count,), vocabulary.number(text), device=device)
            return every if where is None else torch.where(where, every, nothing)

        def look(table: int, at: int, where: Tensor | None = None) -> Tensor:
            found = tables[table][numbers[:, at]]
            return found if where is None else torch.where(where, found, nothing)

        def described(at: int, where: Tensor | None = None) -> list[Tensor]:
            return [word("a", where), *(look(slot, at + slot, where) for slot in range(3))]

        located, related, both, chain = kind == 0, kind > 0, kind == 2, kind == 3
        sideways, further = numbers[:, WORD] < 2, numbers[:, OTHER] < 2
        columns = [
            word("[CLS]"),
            *described(FIRST),
            word("in", located),
            word("the", located),
            look(4, ROW, located),
            look(5, COLUMN, located),
            look(3, WORD, related),
            look(3, OTHER, both),
            word("of", related & (sideways | both)),
            *described(SECOND, related),
            look(3, OTHER, chain),
            word("of", chain & further),
            *described(THIRD, chain),
            word("[SEP]"),
        ]
        return packed(torch.stack(columns, 1), length)


def packed(tokens: Tensor, length: int) -> Tensor:
    """Rows of tokens with the absent ones, below 0, taken out, filled with 0 behind."""
    order = (tokens < 0).to(torch.uint8).argsort(dim=1, stable=True)
    rows = tokens.gather(1, order).clamp(min=0)
    return functional.pad(rows, (0, max(0, length - rows.shape[1])))[:, :length]


def pixel_values(pictures: Tensor) -> Tensor:
    """Pictures of numbers in 0..1 as a model takes them: less the world's mean, over its standard deviation.

    Most of a picture is dark ground. Taken from -1 to 1, it is most of what each patch says, image tokens are nearly
    the same, and learning to see takes longer.
    """
    return (pictures - MEAN) / STD

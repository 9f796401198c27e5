"""The world `shapes`: small pictures of coloured shapes, drawn by numpy, with captions, foils and questions whose truth is known.

Every item has a random generator of its own, so that picture i is the same wherever it is drawn. `scenes` draws the
same world by torch, many at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument

__all__ = ["ANSWERS", "FOILS", "PRESETS", "QUESTIONS", "VOCABULARY", "Scene", "Shapes", "Thing", "encode", "holds"]

WORDS = """
[PAD] [CLS] [SEP] [MASK] [UNK] a the of is are there what how many color shape one thing left right above below in top bottom where
small large red green blue yellow magenta cyan white orange circle square triangle cross ring diamond yes no 0 1 2 3 size
"""
VOCABULARY = tuple(WORDS.split())
SIZES = ("small", "large")
COLOURS = ("red", "green", "blue", "yellow", "magenta", "cyan", "white", "orange")
SHAPES = ("circle", "square", "triangle", "cross", "ring", "diamond")
RGB = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1), (1, 0.5, 0))
# A word, and the one that says the inverse.
INVERSE = {"left": "right", "right": "left", "above": "below", "below": "above"}
QUADRANTS = ("top left", "top right", "bottom left", "bottom right")
FOILS = ("colour", "shape", "size", "relation", "swap", "location")
QUESTIONS = ("colour", "shape", "count", "exist", "relation", "where")
ANSWERS = (*COLOURS, *SHAPES, "0", "1", "2", "3", "yes", "no", *QUADRANTS)
LENGTH = 16  # tokens of a text
SIDE = 64  # pixels
# Mean and standard deviation of its pictures, by which a model takes them.
MEAN, STD = 0.12, 0.14
NUMBERS = dict(zip(VOCABULARY, range(len(VOCABULARY)), strict=True))
CAPTION = re.compile(
    r"a (?P<first>\w+ \w+ \w+) (?:in the (?P<row>top|bottom) (?P<column>left|right)|(?P<word>left of|right of|above|below) a (?P<second>\w+ \w+ \w+))"
)


class Preset(NamedTuple):
    """How many objects a picture has, from and below, and how many of the shapes, colours and sizes occur."""

    objects: tuple[int, int]
    shapes: int
    colours: int
    sizes: int


PRESETS: Mapping[str, Preset] = {"full": Preset((2, 4), 6, 8, 2), "easy": Preset((2, 3), 4, 4, 1)}


class Thing(NamedTuple):
    """An object: places in `SIZES`, `COLOURS` and `SHAPES`, row and column of 4 x 4 cells, pixels off the cell's middle."""

    size: int
    colour: int
    shape: int
    row: int
    column: int
    jx: int = 0
    jy: int = 0

    def __str__(self) -> str:
        return f"{SIZES[self.size]} {COLOURS[self.colour]} {SHAPES[self.shape]}"


@dataclass(frozen=True)
class Scene:
    """A picture `(64, 64, 3)` of numbers in 0..1, and what is in it."""

    things: tuple[Thing, ...]
    pixels: NDArray[np.float32]

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """The picture in 8 bits, as the published hashes take it."""
        return np.round(255 * self.pixels).astype(np.uint8)


class Shapes:
    """The world `shapes`: item i is a picture of 2 or 3 objects that differ in colour or shape, with as many captions, foils and questions as are asked for.

    Args:
        preset: `"full"` (6 shapes, 8 colours, 2 sizes, 2 or 3 objects) or `"easy"` (2 large objects of 4 shapes and 4
            colours).
        seed: 0 is for training, 1 for tests.
        size: how many items there are to train on; any number can be asked for.

    The sequence of random draws is part of the definition: the same numpy gives the same bytes everywhere.

    >>> world = Shapes()
    >>> print(world.caption(0, 0))
    a large blue circle right of a small red cross
    >>> print(world.caption(0, 1))
    a large blue circle in the top right
    >>> holds(world.foil(0, 0, "swap"), world.scene(0))
    False
    >>> world[0].pixels.shape, len(world)
    ((64, 64, 3), 20000)
    """

    def __init__(self, preset: str = "full", seed: int = 0, size: int = 20_000) -> None:
        if preset not in PRESETS:
            raise InvalidArgument(f"preset must be one of {', '.join(PRESETS)}; got {preset!r}")
        check_whole(0, seed=seed)
        check_whole(size=size)
        self.preset, self.seed, self.size = preset, seed, size
        self.of = PRESETS[preset]

    def __repr__(self) -> str:
        return f"Shapes({self.preset!r}, seed={self.seed}, size={self.size})"

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Scene:
        if not 0 <= i < self.size:
            raise IndexError(f"there are {self.size} items; got {i}")
        return self.scene(i)

    def scene(self, i: int) -> Scene:
        """Picture i and what is in it."""
        rng = self._generator(i)
        things = self._things(rng)
        pixels = painted(things, rng.uniform(0, 0.2))
        pixels += rng.normal(0, 0.02, pixels.shape)
        return Scene(things, np.clip(pixels, 0, 1).astype(np.float32))

    def things(self, i: int) -> tuple[Thing, ...]:
        """What is in picture i, which is not drawn."""
        return self._things(self._generator(i))

    def _generator(self, i: int, *more: int) -> np.random.Generator:
        check_whole(0, i=i)
        return np.random.default_rng([self.seed, int(i), *more])

    def _things(self, rng: np.random.Generator) -> tuple[Thing, ...]:
        count = int(rng.integers(*self.of.objects))
        cells = rng.permutation(16)[:count]
        pairs: list[tuple[int, int]] = []
        things = []
        for cell in cells:
            while True:
                pair = int(rng.integers(self.of.shapes)), int(rng.integers(self.of.colours))
                if pair not in pairs:
                    break
            pairs.append(pair)
            size = 1 - int(rng.integers(self.of.sizes))
            jx, jy = rng.integers(-1, 2, size=2)
            things.append(Thing(size, pair[1], pair[0], int(cell) // 4, int(cell) % 4, int(jx), int(jy)))
        return tuple(things)

    def caption(self, i: int, c: int = 0) -> str:
        """Caption c of picture i, true of it: of a relation where c is even, of a place where it is odd."""
        check_whole(0, c=c)
        things = self.things(i)
        rng = self._generator(i, 1000 + c)
        first, second = (things[at] for at in rng.permutation(len(things))[:2])
        if c % 2:
            return f"a {first} in the {_quadrant(first)}"
        vertical = int(rng.integers(2))
        if first.row == second.row or first.column == second.column:
            vertical = int(first.column == second.column)
        if vertical:
            return f"a {first} {'above' if first.row < second.row else 'below'} a {second}"
        return f"a {first} {'left' if first.column < second.column else 'right'} of a {second}"

    def foil(self, i: int, c: int, kind: str, f: int = 0) -> str:
        """Caption c of picture i changed so that it is false: one of `FOILS`."""
        if kind not in FOILS:
            raise InvalidArgument(f"kind must be one of {', '.join(FOILS)}; got {kind!r}")
        check_whole(0, f=f)
        caption, things = self.caption(i, c), self.things(i)
        located = bool(c % 2)
        if located != (kind == "location") and kind in ("relation", "swap", "location"):
            raise InvalidArgument(
                f"caption {c} says a {'place' if located else 'relation'}, which a foil of kind {kind!r} cannot change"
            )
        if kind == "size" and self.of.sizes == 1:
            raise InvalidArgument(f"in {self!r} all objects are large: there is no foil of the size")
        if kind == "relation":
            return re.sub("left|right|above|below", lambda word: INVERSE[word[0]], caption)
        found = _parsed(caption)
        if kind == "swap":
            return f"a {found['second']} {found['word']} a {found['first']}"
        rng = self._generator(i, 2000 + f)
        words = {"colour": COLOURS[: self.of.colours], "shape": SHAPES[: self.of.shapes], "size": SIZES}
        while True:
            if kind == "location":
                row, column = ("top", "bottom")[rng.integers(2)], ("left", "right")[rng.integers(2)]
                foil = f"a {found['first']} in the {row} {column}"
            else:
                side = 0 if located else int(rng.integers(2))
                new = words[kind][rng.integers(len(words[kind]))]
                parts = caption.split()
                parts[(1 if side == 0 else len(parts) - 3) + ("size", "colour", "shape").index(kind)] = new
                foil = " ".join(parts)
            if foil != caption and not holds(foil, things):
                return foil

    def question(self, i: int, kind: str, q: int = 0) -> tuple[str, str] | None:
        """A question of a kind of `QUESTIONS` about picture i, and its answer; None where the picture has nothing to ask so.

        `"what shape is the COLOUR one"` needs a colour, and `"what color is the SHAPE"` a shape, that one object alone
        has. Answers to `"exist"` and `"relation"` are yes and no equally often.
        """
        check_choice(QUESTIONS, kind=kind)
        check_whole(0, q=q)
        things = self.things(i)
        rng = self._generator(i, 3000 + len(QUESTIONS) * q + QUESTIONS.index(kind))
        order = [things[at] for at in rng.permutation(len(things))]
        if kind in ("colour", "shape"):
            other = "shape" if kind == "colour" else "colour"
            known = [getattr(thing, other) for thing in order]
            alone = [thing for thing in order if known.count(getattr(thing, other)) == 1]
            if not alone:
                return None
            if kind == "colour":
                return f"what color is the {SHAPES[alone[0].shape]}", COLOURS[alone[0].colour]
            return f"what shape is the {COLOURS[alone[0].colour]} one", SHAPES[alone[0].shape]
        if kind == "count":
            by = ("shape", "size")[rng.integers(2)]
            of = int(rng.integers(self.of.shapes if by == "shape" else 2))
            word = SHAPES[of] if by == "shape" else f"{SIZES[of]} thing"
            return f"how many {word}", str(sum(getattr(thing, by) == of for thing in things))
        if kind == "where":
            return f"where is the {_pair(order[0])}", _quadrant(order[0])
        if kind == "exist":
            there = {(thing.colour, thing.shape) for thing in things}
            colour, shape = order[0].colour, order[0].shape
            wanted = bool(rng.integers(2))
            while not wanted and (colour, shape) in there:
                colour, shape = int(rng.integers(self.of.colours)), int(rng.integers(self.of.shapes))
            return f"is there a {COLOURS[colour]} {SHAPES[shape]}", "yes" if wanted else "no"
        apart = [(a, b) for a in order for b in order if a.column < b.column]
        if not apart:
            return None
        (a, b), wanted = apart[rng.integers(len(apart))], bool(rng.integers(2))
        a, b = (a, b) if wanted else (b, a)
        return f"is the {_pair(a)} left of the {_pair(b)}", "yes" if wanted else "no"


def painted(things: Sequence[Thing], background: float) -> NDArray[np.float64]:
    """Objects on a grey ground, `(64, 64, 3)`, without noise."""
    pixels = np.full((SIDE, SIDE, 3), background)
    at = np.arange(SIDE) + 0.5
    for thing in things:
        dx = at[None, :] - (16 * thing.column + 8 + thing.jx)
        dy = at[:, None] - (16 * thing.row + 8 + thing.jy)
        pixels[_inside(thing.shape, dx, dy, 6 if thing.size else 4)] = RGB[thing.colour]
    return pixels


def _inside(shape: int, dx: NDArray[Any], dy: NDArray[Any], R: int) -> NDArray[np.bool_]:
    x, y, square = np.abs(dx), np.abs(dy), dx**2 + dy**2
    longest = np.maximum(x, y)
    match SHAPES[shape]:
        case "circle":
            return square <= R**2
        case "square":
            return longest <= 0.88 * R
        case "triangle":
            return (dy >= -R) & (dy <= 0.8 * R) & (x <= (dy + R) / 1.8)
        case "cross":
            return ((x <= R / 3) | (y <= R / 3)) & (longest <= R)
        case "ring":
            return (square <= R**2) & (square >= (0.55 * R) ** 2)
        case _:
            return x + y <= 1.15 * R


def holds(caption: str, scene: Scene | Sequence[Thing]) -> bool:
    """Whether a caption is true of a picture.

    >>> things = [Thing(1, 2, 0, row=0, column=3), Thing(0, 0, 3, row=2, column=1)]
    >>> holds("a large blue circle right of a small red cross", things)
    True
    """
    found = _parsed(caption)
    things = scene.things if isinstance(scene, Scene) else tuple(scene)
    first = [thing for thing in things if str(thing) == found["first"]]
    if found["word"] is None:
        return any(_quadrant(thing) == f"{found['row']} {found['column']}" for thing in first)
    second = [thing for thing in things if str(thing) == found["second"]]
    word = found["word"].split()[0]
    axis = "column" if word in ("left", "right") else "row"
    sign = 1 if word in ("left", "above") else -1
    return any(sign * (getattr(b, axis) - getattr(a, axis)) > 0 for a in first for b in second)


def encode(text: str, length: int = LENGTH) -> list[int]:
    """A text's words by their places in `VOCABULARY`, between `[CLS]` and `[SEP]`, filled with `[PAD]`.

    >>> encode("a ring", 6)
    [1, 5, 40, 2, 0, 0]
    """
    words = [NUMBERS["[CLS]"], *(NUMBERS.get(word, NUMBERS["[UNK]"]) for word in text.split()), NUMBERS["[SEP]"]]
    if len(words) > length:
        raise InvalidArgument(f"{text!r:.80} has {len(words)} tokens, more than length={length}")
    return words + [NUMBERS["[PAD]"]] * (length - len(words))


def _parsed(caption: str) -> dict[str, str | None]:
    found = CAPTION.fullmatch(caption)
    if found is None:
        raise InvalidArgument(
            f"{caption!r:.80} is no caption of this world, as 'a large blue circle right of a small red cross' "
            "or 'a large blue circle in the top right'"
        )
    return found.groupdict()


def _quadrant(thing: Thing) -> str:
    return QUADRANTS[2 * (thing.row > 1) + (thing.column > 1)]


def _pair(thing: Thing) -> str:
    return f"{COLOURS[thing.colour]} {SHAPES[thing.shape]}"

"""Attention maps on a page: a grid of small pictures, each of which enlarges, and the same figures as tables."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heedful.report.image import base64, diverging, levels, png, pool, ramp

if TYPE_CHECKING:
    from heedful.report.blocks import Map

# Bytes of base64 that the maps of a page may take together, and the small pictures together.
MAPS = 12_000_000
SMALL = 2_000_000
# Cells kept before compression; more are pooled before they are tried.
CELLS = 48_000_000
# Weights that sum to one are at most this much above it.
ROUNDING = 2e-2
# Pixels of a small picture's longer side.
SIDE = 48


@dataclass(frozen=True)
class Tile:
    """One head: a word, two short figures, a sentence for those who do not see the map, the cell to begin with.

    `words` are all words by which the head can be picked out; the one word where none are given.
    """

    head: int
    word: str
    figures: tuple[str, str]
    sentence: str
    cell: tuple[int, int] = (0, 0)
    words: tuple[str, ...] = ()

    @property
    def picked(self) -> tuple[str, ...]:
        return self.words or (self.word,)

    @property
    def brief(self) -> str:
        """The first part of the word for a place that has little room; the tooltip has the whole."""
        return "none" if self.word.startswith("no ") else self.word.split()[0]


@dataclass(frozen=True)
class Layer:
    """One attention layer on the page: its module, the labels of rows and columns, its heads."""

    index: int
    name: str
    queries: Sequence[str]
    keys: Sequence[str]
    tiles: Sequence[Tile]


@dataclass(frozen=True)
class Packed:
    """A map as the page carries it: zlib-compressed levels in base64, and what turns them back into weights."""

    data: str = field(repr=False)
    shape: tuple[int, int]
    scale: float
    signed: bool


@dataclass
class Atlas:
    """Takes the maps of every head, in order, and makes them ready for the page within a budget of bytes.

    Maps are pooled by one factor for all heads, the smallest that keeps them within the budget.

    Args:
        shapes: `(heads, queries, keys)` of every layer to come.
        budget: bytes of base64.

    >>> import torch
    >>> atlas = Atlas([(2, 3, 3)])
    >>> atlas.add(torch.eye(3).expand(2, 3, 3))
    >>> packed, factor = atlas.pack()
    >>> len(packed), factor, packed[0].shape
    (2, 1, (3, 3))
    """

    shapes: Sequence[tuple[int, int, int]]
    budget: int = MAPS

    def __post_init__(self) -> None:
        self._maps: list[tuple[Tensor, float, bool]] = []
        self._small: list[Tensor] = []
        fits = (
            factor
            for factor in count(1)
            if sum(h * -(-q // factor) * -(-k // factor) for h, q, k in self.shapes) <= CELLS
        )
        self._factor = next(fits)
        heads = sum(shape[0] for shape in self.shapes)
        # Three bytes are four of base64, and a small picture hardly compresses.
        self._side = max(4, min(SIDE, math.isqrt(SMALL * 3 // 4 // max(heads, 1))))

    def add(self, weights: Tensor) -> None:
        """Takes the next heads, `[heads, Q, K]`."""
        for one in torch.nan_to_num(weights.detach().to("cpu", torch.float32)):
            scale, signed = float(one.abs().max()), bool((one < 0).any())
            self._maps.append((levels(pool(one, self._factor), scale, signed=signed), scale, signed))
            self._small.append(pool(one, -(-max(one.shape) // self._side)))

    def pack(self) -> tuple[list[Packed], int]:
        """Every map, and the factor that they were pooled by."""
        for times in count(1):
            packed, left = [], self.budget
            for kept, scale, signed in self._maps:
                # Levels rise with weights, so that pooling them is pooling weights.
                zero = 128 if signed else 0
                cells = (pool(kept.float() - zero, times) + zero).to(torch.uint8)
                data = base64(zlib.compress(cells.numpy().tobytes(), 6))
                left -= len(data)
                packed.append(Packed(data, (cells.shape[0], cells.shape[1]), scale, signed))
                # A single cell is as far as pooling goes.
                if left < 0 and cells.numel() > 1:
                    break
            else:
                return packed, self._factor * times
        raise AssertionError("a map of one cell ends the loop")

    @property
    def scale(self) -> float | None:
        """The weight that small pictures show darkest; None where each has its own, since no share exceeds one."""
        largest = max((scale for _, scale, _ in self._maps), default=1.0)
        return largest if largest <= 1 + ROUNDING else None

    @property
    def signed(self) -> bool:
        """Whether any head has a negative weight."""
        return any(signed for _, _, signed in self._maps)

    def pictures(self) -> Iterator[str]:
        """A small picture of every head, as an address that holds it."""
        # The low bits of a picture this small are noise that does not compress.
        palette = diverging() if self.signed else ramp(steps=64)
        for one, (_, own, _) in zip(self._small, self._maps, strict=True):
            cells = levels(one, self.scale or own, signed=self.signed)
            yield f"data:image/png;base64,{base64(png(cells if self.signed else cells // 4, palette))}"


def scales() -> str:
    """The style of the bars that show which colour is which weight."""
    return "\n".join(
        f".scale.{name} {{ background: linear-gradient(to right, {', '.join(_sampled(colours))}); }}"
        for name, colours in (("one", ramp()), ("two", diverging()))
    )


def _sampled(colours: bytes, steps: int = 9) -> Iterator[str]:
    last = len(colours) // 3 - 1
    for at in range(steps):
        start = 3 * round(last * at / (steps - 1))
        yield f"#{colours[start : start + 3].hex()}"


def pictures(block: Map) -> SimpleNamespace:
    """What the page's template shows of the maps: legend, note, small pictures, and the levels that a click needs."""
    atlas = block.atlas
    packed, factor = atlas.pack()
    own = atlas.scale is None
    notes = [
        "A row is a token that attends, a column a token it attends to; darker is more weight, on a square-root scale, "
        f"{'for each map its own' if own else 'the same for all maps'}.",
        *block.notes,
    ]
    if factor > 1:
        notes.append(
            f"To keep this file small, a cell of an enlarged map is the largest weight of {factor} x {factor} tokens."
        )
    # The scale is one of square roots: half of the way is a quarter of the weight.
    top, half = ("largest", "a quarter") if atlas.scale is None else (f"{atlas.scale:.3g}", f"{atlas.scale / 4:.3g}")
    words = Counter(word for layer in block.layers for tile in layer.tiles for word in tile.picked)
    names = [f"{layer.index}-{tile.head}" for layer in block.layers for tile in layer.tiles]
    return SimpleNamespace(
        words=words.most_common(),
        scale="two" if atlas.signed else "one",
        ends=("negative", "0", "positive") if atlas.signed else ("0", half, top),
        note=" ".join(notes),
        pictures=atlas.pictures(),
        data=_carried(block.layers, iter(packed), factor),
        levels=[(name, one.data) for name, one in zip(names, packed, strict=True)],
    )


def _carried(layers: Sequence[Layer], maps: Iterator[Packed], factor: int) -> str:
    """What is known of each map beside its levels, as JSON in which no tag can begin: what a token holds stays text."""
    labels: list[Sequence[str]] = []
    about = []
    for layer in layers:
        places = []
        for names in (layer.queries, layer.keys):
            if names not in labels:
                labels.append(names)
            places.append(labels.index(names))
        heads = [
            {"shape": one.shape, "scale": one.scale, "signed": one.signed}
            for _, one in zip(layer.tiles, maps, strict=False)
        ]
        about.append({"queries": places[0], "keys": places[1], "heads": heads})
    ramps = {"one": ramp().hex(), "two": diverging().hex()}
    carried = {"factor": factor, "labels": labels, "layers": about, "ramps": ramps}
    return json.dumps(carried, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")

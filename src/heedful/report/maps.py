"""Attention maps on a page: a grid of small pictures, each of which enlarges, and the same figures as tables."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from itertools import count
from typing import Any

import torch
from torch import Tensor

from heedful.lens.maps.image import base64, diverging, levels, png, pool, ramp

__all__ = ["Atlas", "Layer", "Packed", "Tile", "fragment", "script", "style"]

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


def style() -> str:
    """The style sheet of the maps."""
    bars = (
        f".scale.{name} {{ background: linear-gradient(to right, {', '.join(_sampled(colours))}); }}"
        for name, colours in (("one", ramp()), ("two", diverging()))
    )
    return "\n".join((files(__name__).joinpath("maps.css").read_text("utf-8"), *bars))


def _sampled(colours: bytes, steps: int = 9) -> Iterator[str]:
    last = len(colours) // 3 - 1
    for at in range(steps):
        start = 3 * round(last * at / (steps - 1))
        yield f"#{colours[start : start + 3].hex()}"


def script() -> str:
    """What enlarges a map, moves over the grid and picks heads out by word."""
    return files(__name__).joinpath("maps.js").read_text("utf-8")


def fragment(layers: Sequence[Layer], atlas: Atlas, notes: Iterable[str] = (), after: str = "") -> str:
    """The grid of maps with its legend and notes, then `after`, and what a click on a map needs."""
    packed, factor = atlas.pack()
    scale = "for each map its own" if atlas.scale is None else "the same for all maps"
    told = [
        f"A row is a token that attends, a column a token it attends to; darker is more weight, on a square-root scale, {scale}.",
        *notes,
    ]
    if factor > 1:
        told.append(
            f"To keep this file small, a cell of an enlarged map is the largest weight of {factor} x {factor} tokens."
        )
    pictures, maps = atlas.pictures(), iter(packed)
    rows = "".join(_row(layer, pictures) for layer in layers)
    return (
        f'{_legend(layers, atlas)}<p class="note">{escape(" ".join(told))}</p>'
        f'<div class="maps" role="grid" aria-label="Attention heads, a row for each layer">{rows}</div>'
        f"{after}{DIALOG}{_carried(layers, maps, factor)}"
    )


def _row(layer: Layer, pictures: Iterator[str]) -> str:
    cells = "".join(
        f'<div role="gridcell"><button type="button" class="tile" id="head-{layer.index}-{one.head}" data-words="{escape("|".join(one.picked))}" '
        f'data-query="{one.cell[0]}" data-key="{one.cell[1]}" aria-label="{escape(one.sentence)}" title="{escape(one.sentence)}">'
        f'<span class="picture"><img src="{picture}" alt="" width="96" height="96" class="ramp"></span>'
        f'<span class="line"><b>{one.head}</b><span class="word {_slug(one.word)}">{escape(_brief(one.word))}</span></span>'
        f'<span class="line figures"><span>{escape(one.figures[0])}</span><span>{escape(one.figures[1])}</span></span>'
        "</button></div>"
        for one, picture in zip(layer.tiles, pictures, strict=False)
    )
    name = f'<span class="module">{escape(layer.name)}</span>' if layer.name else ""
    header = f'<div class="layer" role="rowheader"><strong>Layer {layer.index}</strong>{name}</div>'
    return f'<div role="row" class="heads">{header}{cells}</div>'


def _brief(word: str) -> str:
    """The first part of a word for a place that has little room; the tooltip has the whole."""
    return "none" if word.startswith("no ") else word.split()[0]


def _slug(word: str) -> str:
    return "is-" + "-".join(word.split())


def _legend(layers: Sequence[Layer], atlas: Atlas) -> str:
    words = Counter(word for layer in layers for tile in layer.tiles for word in tile.picked)
    chips = "".join(
        f'<li data-word="{escape(word)}"><span class="word {_slug(word)}">{escape(word)}</span> <b>{number}</b></li>'
        for word, number in words.most_common()
    )
    top = "largest" if atlas.scale is None else f"{atlas.scale:.3g}"
    # The scale is one of square roots: half of the way is a quarter of the weight.
    half = "a quarter" if atlas.scale is None else f"{atlas.scale / 4:.3g}"
    ends = ("negative", "0", "positive") if atlas.signed else ("0", half, top)
    labels = "".join(f"<span>{end}</span>" for end in ends)
    return (
        f'<div class="legend"><ul class="words" aria-label="What the heads look at">{chips}</ul>'
        f'<div class="key"><div class="scale ramp {"two" if atlas.signed else "one"}"></div><div class="ends">{labels}</div></div></div>'
    )


def _carried(layers: Sequence[Layer], maps: Iterator[Packed], factor: int) -> str:
    """The maps and labels, in elements that a browser keeps as text until a map is asked for."""
    labels: list[Sequence[str]] = []
    about, parts = [], []
    for layer in layers:
        places = []
        for names in (layer.queries, layer.keys):
            if names not in labels:
                labels.append(names)
            places.append(labels.index(names))
        heads = []
        for tile, one in zip(layer.tiles, maps, strict=False):
            heads.append({"shape": one.shape, "scale": one.scale, "signed": one.signed})
            parts.append(f'<script type="text/plain" id="map-{layer.index}-{tile.head}">{one.data}</script>')
        about.append({"queries": places[0], "keys": places[1], "heads": heads})
    carried: dict[str, Any] = {
        "factor": factor,
        "labels": labels,
        "layers": about,
        "ramps": {"one": ramp().hex(), "two": diverging().hex()},
    }
    # No tag can begin inside: what a token holds stays text.
    text = json.dumps(carried, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="maps-data">{text}</script>{"".join(parts)}'


DIALOG = """
<dialog id="map" aria-labelledby="map-title" aria-describedby="map-told">
<div class="map-head"><div><h3 id="map-title"></h3><p id="map-told"></p></div><div class="map-tools">
<button type="button" id="map-previous" aria-keyshortcuts="p">&larr; Previous</button>
<button type="button" id="map-next" aria-keyshortcuts="n">Next &rarr;</button>
<button type="button" id="map-out" aria-label="Smaller">&minus;</button>
<button type="button" id="map-fit">Fit</button>
<button type="button" id="map-in" aria-label="Larger">+</button>
<button type="button" id="map-close">Close</button></div></div>
<div class="map-body"><div class="map-scroll"><div class="map-frame">
<div class="map-corner"><span>to &rarr;</span><span>from &darr;</span></div>
<div class="map-keys" aria-hidden="true"></div><div class="map-queries" aria-hidden="true"></div>
<div class="map-plane" tabindex="0" role="application" aria-label="Map: arrow keys move, p and n change the head"
aria-describedby="map-reading"><canvas class="ramp"></canvas><i class="map-line across"></i><i class="map-line down"></i></div>
</div></div><div class="map-side"><p id="map-reading" aria-live="polite"></p>
<div class="key"><div class="scale ramp"></div><div class="ends" id="map-ends"></div></div>
<h4 id="map-from"></h4><p id="map-row"></p>
<p class="hint">Point at a cell to read it, click it to keep its row. Keys: arrows move, <kbd>p</kbd> <kbd>n</kbd> change the head,
<kbd>+</kbd> <kbd>&minus;</kbd> zoom, <kbd>Esc</kbd> closes.</p></div></div></dialog>
"""

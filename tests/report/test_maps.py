"""Attention maps as pictures: read back by hand, within their bounds of error and of size."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from itertools import chain, pairwise

import pytest
import torch

from heedful import InvalidArgument
from heedful.report import image
from heedful.report.maps import Atlas


def decode_png(content):
    """Width, height, palette and rows of an indexed PNG, by hand."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(content):
        (size,) = struct.unpack(">I", content[at : at + 4])
        name, body = content[at + 4 : at + 8], content[at + 8 : at + 8 + size]
        assert struct.unpack(">I", content[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + body)
        chunks[name] = body
        at += 12 + size
    assert list(chunks) == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    width, height, *kind = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert kind == [8, 3, 0, 0, 0]
    raw = zlib.decompress(chunks[b"IDAT"])
    rows = [raw[row * (width + 1) : (row + 1) * (width + 1)] for row in range(height)]
    assert len(raw) == height * (width + 1)
    assert all(row[0] == 0 for row in rows)
    return [list(row[1:]) for row in rows], chunks[b"PLTE"]


def unpacked(one):
    """The weights that the page shows, from what it carries."""
    cells = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(one.data))), dtype=torch.uint8).double()
    root = (cells - 128) / 127 if one.signed else cells / 255
    return (root.sign() * root.square() * one.scale).reshape(one.shape)


def lab(colour):
    """OKLab of an sRGB triple."""
    r, g, b = ((c / 255 + 0.055) ** 2.4 / 1.055**2.4 if c > 10 else c / 255 / 12.92 for c in colour)
    long, medium, short = (
        (a * r + b_ * g + c * b) ** (1 / 3)
        for a, b_, c in (
            (0.4122214708, 0.5363325363, 0.0514459929),
            (0.2119034982, 0.6806995451, 0.1073969566),
            (0.0883024619, 0.2817188376, 0.6299787005),
        )
    )
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def triples(palette):
    return [tuple(palette[at : at + 3]) for at in range(0, len(palette), 3)]


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (48, 31)])
def test_png_is_read_back(shape):
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
    rows, palette = decode_png(image.png(pixels, image.ramp()))
    assert rows == pixels.tolist()
    assert palette == image.ramp()
    with pytest.raises(InvalidArgument, match=r"uint8 \[height, width\]"):
        image.png(pixels.float(), image.ramp())


def test_colours_go_evenly_from_light_to_dark():
    # Few steps, so that rounding to 8 bits is small beside them.
    path = [lab(colour) for colour in triples(image.ramp(steps=9))]
    lightness = [one[0] for one in path]
    assert lightness == sorted(lightness, reverse=True)
    assert lightness[0] - lightness[-1] > 0.7
    steps = [math.dist(a, b) for a, b in pairwise(path)]
    assert max(steps) / min(steps) < 1.1


def test_diverging_colours_are_even_about_zero_and_never_red_against_green():
    colours = triples(image.diverging())
    assert len(colours) == 256
    path = [lab(colour) for colour in colours]
    assert max(path, key=lambda one: one[0])[0] == pytest.approx(path[128][0], abs=5e-3)
    for step in (32, 64, 127):
        below, above = path[128 - step], path[128 + step]
        assert below[0] == pytest.approx(above[0], abs=0.08)
        assert below[2] < -0.02 < 0.02 < above[2]  # blue against yellow


@pytest.mark.parametrize("signed", [False, True])
def test_quantised_weights_stay_within_their_bound(signed):
    weights = torch.rand(3, 61, 61, dtype=torch.float64) ** 4 * 0.37
    if signed:
        weights *= torch.randn_like(weights).sign()
    weights[0, 0, 0], weights[1] = 0.37, 0
    scale, steps = 0.37, 127 if signed else 255
    cells = image.levels(weights, scale, signed=signed).double()
    root = (cells - 128) / 127 if signed else cells / 255
    back = root.sign() * root.square() * scale
    bound = (weights.abs() * scale).sqrt() / steps + scale / (2 * steps) ** 2
    assert ((back - weights).abs() <= bound + 1e-12).all()
    assert back[0, 0, 0] == pytest.approx(0.37)
    assert (back[1] == 0).all()
    assert (image.levels(torch.zeros(2, 2), 0.0) == 0).all()


def test_pooling_keeps_what_is_farthest_from_zero():
    x = torch.randn(3, 19, 23)
    pooled = image.pool(x, 4)
    assert pooled.shape == (3, 5, 6)
    for q in range(5):
        for k in range(6):
            block = x[1, 4 * q : 4 * q + 4, 4 * k : 4 * k + 4].flatten()
            assert pooled[1, q, k] == block[block.abs().argmax()]
    assert image.pool(x, 1) is x


@pytest.mark.parametrize("signed", [False, True])
def test_maps_are_pooled_only_as_far_as_the_budget_asks(signed):
    weights = [torch.rand(2, 60, 60), torch.rand(3, 60, 60)]
    if signed:
        weights = [w - 0.5 for w in weights]
    sizes = {}
    for budget in (10**6, 20_000, 5_000, 1_500):
        atlas = Atlas([tuple(w.shape) for w in weights], budget)
        for w in weights:
            atlas.add(w)
        packed, factor = atlas.pack()
        assert sum(len(one.data) for one in packed) <= budget
        sizes[budget] = factor
        for one, w in zip(packed, torch.cat(weights), strict=True):
            # Of two weights that round to the same distance from zero, either may be kept.
            assert (unpacked(one).abs() - image.pool(w, factor).abs()).abs().max() < 6e-3
    assert list(sizes.values()) == sorted(sizes.values())
    assert sizes[10**6] == 1
    assert sizes[20_000] == 2


def test_a_budget_for_nothing_ends_with_single_cells():
    atlas = Atlas([(2, 9, 9)], budget=0)
    atlas.add(torch.rand(2, 9, 9))
    packed, factor = atlas.pack()
    assert ([one.shape for one in packed], factor) == ([(1, 1), (1, 1)], 9)


def test_many_heads_have_smaller_pictures_and_are_pooled_before_they_are_tried(monkeypatch):
    monkeypatch.setattr("heedful.report.maps.CELLS", 1000)
    monkeypatch.setattr("heedful.report.maps.SMALL", 500)
    atlas = Atlas([(4, 30, 30)])
    atlas.add(torch.rand(4, 30, 30))
    packed, factor = atlas.pack()
    assert (factor, packed[0].shape) == (2, (15, 15))
    rows, _ = decode_png(base64.b64decode(next(atlas.pictures()).split(",")[1]))
    assert len(rows) <= 9


def test_pictures_show_weights_on_one_scale():
    atlas = Atlas([(2, 5, 5)])
    atlas.add(torch.stack((torch.eye(5), torch.full((5, 5), 0.25))))
    pictures = [decode_png(base64.b64decode(one.removeprefix("data:image/png;base64,"))) for one in atlas.pictures()]
    assert pictures[0][0][2] == [0, 0, 63, 0, 0]
    assert set(chain(*pictures[1][0])) == {32}
    assert pictures[0][1] == image.ramp(steps=64)

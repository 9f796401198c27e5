"""Where things are: does a small model of pictures and texts relate objects, and how far does what it learned reach.

The world `shapes` (`heedful.multimodal.Shapes`): pictures of 2 or 3 coloured shapes with captions as "a large blue
circle right of a small red cross". A foil is the caption with the relation inverted, the objects exchanged, another
place, colour, shape or size; the figure is how often the true caption scores above its foil, ties one half, on 2,000
pictures of the test. A model that knows the position of the first object alone reaches 5 of 6 inverted relations.
`VisualParsingModel` as it comes (1.5 million parameters, patches of 8, text and picture in one sequence), 1,500 steps
of 256 new pictures, MLM and ITM without MFR, three seeds, which share one GPU: seconds are of three trainings beside
one another.

Two controls change the positions alone: those of image tokens start at 0.02 beside features of size 1, and texts have
none. Objects as vectors of zeros and ones in place of pictures show what is left where seeing is no question.

How far it reaches: pictures of more objects than were trained on; captions of two relations, at once ("above left of")
and in a row ("a left of b above c", longer than any text of the training); eight pairs of colour and shape that occur
in no picture and no caption of the training; two-relation captions trained on; and written digits (scikit-learn's,
other writers in the test) in place of drawn shapes. The paper has no such test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from experiments import pictures
from experiments.pictures import ATTRIBUTES, HELD_OUT, SPATIAL, foils, percent, reached, spread
from experiments.recipe import Bar, Block, Setting, Table
from heedful.multimodal import SceneCaptions, Scenes, pixel_values
from heedful.multimodal.worlds import FOILS

SEEDS = (0, 1, 2)
MORE = (4, 6, 8)
TWO = {"both": (0, 0, 1, 0), "chain": (0, 0, 0, 1)}
WEAK, UNPLACED = "image positions of 0.02", "no text positions"
CONTROLS: dict[str, dict[str, Any]] = {WEAK: {"image_positions": "small"}, UNPLACED: {"text_positions": "none"}}
OBJECTS, PAIRS, BOTH, DIGITS = "objects as vectors", "pairs held out", "two relations trained on", "written digits"
ENOUGH = 0.97
LENGTH = 24  # tokens, of which a caption of two relations has up to 18
TASKS: dict[str, Any] = {"tasks": ("mlm", "itm")}


def _sizes(quick: bool) -> dict[str, Any]:
    if quick:
        return {"steps": 4, "batch": 8, "rounds": 2, "config": pictures.SMALL, "count": 24}
    return {"steps": 1500, "batch": 256, "rounds": 15, "config": {}, "count": 2000}


def _run(kind: str, seed: int, work: str, device: str, quick: bool) -> dict[str, Any]:
    """One training and all that is measured of it."""
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    sizes = _sizes(quick)
    count, config = sizes.pop("count"), dict(sizes["config"]) | CONTROLS.get(kind, {})
    options: dict[str, Any] = {}
    data: dict[str, Any] = {}
    images, scenes = pictures.pictures_asked(count, device)
    if kind == OBJECTS:
        data, images = {"see": pictures.ObjectTokens.see}, pictures.ObjectTokens.see(scenes)
    elif kind == PAIRS:
        data = {"held_out": HELD_OUT}
    elif kind == BOTH:
        data = {"weights": (1, 1, 0.5, 0.5), "length": LENGTH}
    elif kind == DIGITS:
        words = pictures.digit_words()
        learned, other = (part.to(device) for part in pictures.digits(Path(work)))
        config["vocab_size"] = len(words)
        data = {"vocabulary": words, "glyphs": learned}
        generator = torch.Generator(device).manual_seed(1)
        scenes = Scenes.draw(count, generator, shapes=10)
        images = pixel_values(scenes.render(generator, glyphs=other))
        options = {"vocabulary": words, "counts": (2, 8, 10)}
    sizes["config"] = config
    part = slice(512)

    def measure(model: Any) -> dict[str, float]:
        return foils(model, images[part], scenes[part], kinds=SPATIAL, **options)

    vision = "objects" if kind == OBJECTS else "transformer"
    model, record = pictures.trained(
        SceneCaptions(**data), measure, device=device, seed=seed, vision=vision, **sizes, **TASKS
    )
    record["foils"] = foils(model, images, scenes, **options)
    if kind == "pixels":
        record["more"] = {str(most): foils(model, *_drawn(count, device, objects=(most, most))) for most in MORE}
    if kind in ("pixels", BOTH):
        drawn = _drawn(count, device, objects=(3, 3))
        record["two"] = {
            name: foils(model, *drawn, kinds=("relation", "swap"), weights=dict.fromkeys(FOILS, by), length=LENGTH)
            for name, by in TWO.items()
        }
    if kind == PAIRS:
        record["unseen"] = _unseen(model, count, device)
    return record


def _drawn(count: int, device: str, **how: Any) -> tuple[torch.Tensor, Scenes]:
    generator = torch.Generator(device).manual_seed(11)
    scenes = Scenes.draw(count, generator, **how)
    return pixel_values(scenes.render(generator)), scenes


def _unseen(model: Any, count: int, device: str) -> dict[str, float]:
    """Captions whose first object is of a pair that was held out."""
    images, scenes = _drawn(4 * count, device)
    away = torch.zeros(8, 6, dtype=torch.bool, device=device)
    for colour, shape in HELD_OUT:
        away[colour, shape] = True
    about = away[scenes.things[..., 1], scenes.things[..., 2]] & scenes.there
    rows = about.any(1).nonzero()[:count, 0]
    return foils(model, images[rows], scenes[rows], about=about[rows])


def run(setting: Setting) -> dict[str, Any]:
    store = setting.store()

    def part(kind: str, seed: int) -> tuple[Any, ...]:
        return kind, seed, str(setting.work), setting.device, setting.quick

    seeds = SEEDS[:1] if setting.quick else SEEDS
    pixels = {f"pixels, seed {seed}": part("pixels", seed) for seed in seeds}
    found = store.run(_run, pixels, pictures.jobs(setting))
    if setting.quick or len(found) == len(seeds):
        others = {kind: part(kind, 0) for kind in (*CONTROLS, OBJECTS, PAIRS, BOTH, DIGITS)}
        found |= store.run(_run, others, pictures.jobs(setting))
    return {"quick": setting.quick, "parts": found}


def tables(result: dict[str, Any]) -> list[Block]:
    parts = result["parts"]
    ours = [part for name, part in parts.items() if name.startswith("pixels")]

    def row(name: str, shown: list[dict[str, float]]) -> list[str]:
        return [
            name,
            *(
                spread([each[kind] for each in shown if kind in each])
                if len(shown) > 1
                else percent(shown[0].get(kind))
                for kind in FOILS
            ),
        ]

    def when(part: dict[str, Any]) -> str:
        at = reached(part["curve"], ("relation", "swap"))
        return "never" if at is None else f"{at:,}"

    rows = (
        [[*row("from pixels, three seeds", [part["foils"] for part in ours]), ", ".join(map(when, ours))]]
        if ours
        else []
    )
    rows += [
        [*row(name, [parts[name]["foils"]]), when(parts[name])]
        for name in (*CONTROLS, OBJECTS, BOTH, DIGITS)
        if name in parts
    ]
    columns = ("percent of pairs", *FOILS, "both relation and swap above 90 from step")
    blocks: list[Block] = [Table(columns, rows, control=WEAK if WEAK in parts else "")]
    far: list[list[str]] = []
    if ours:
        far += [row(f"{most} objects, trained on 2 and 3", [part["more"][str(most)] for part in ours]) for most in MORE]
        far += [row(f"two relations, {name}, never trained on", [part["two"][name] for part in ours]) for name in TWO]
    if BOTH in parts:
        far += [row(f"two relations, {name}, trained on", [parts[BOTH]["two"][name]]) for name in TWO]
    if PAIRS in parts:
        far += [
            row("pairs of colour and shape never seen", [parts[PAIRS]["unseen"]]),
            row("the same model, all pairs", [parts[PAIRS]["foils"]]),
        ]
    if far:
        blocks += [
            "How far it reaches, with what was trained on 2 or 3 objects:",
            Table(("percent of pairs", *FOILS), far),
        ]
    if not result["quick"]:
        blocks += _bars(parts, ours)
    return blocks


def _bars(parts: dict[str, Any], ours: list[dict[str, Any]]) -> list[Bar]:
    def least(kinds: tuple[str, ...], which: list[dict[str, Any]]) -> float | None:
        return min((part["foils"][kind] for part in which for kind in kinds), default=None)

    def furthest(name: str, kinds: tuple[str, ...]) -> float | None:
        """How far from chance, at most."""
        return max(abs(parts[name]["foils"][kind] - 0.5) for kind in kinds) if name in parts else None

    times = [reached(part["curve"], SPATIAL, ENOUGH, "seconds") for part in ours]
    return [
        Bar("relation, swap and location, the least of three seeds", least(SPATIAL, ours), ENOUGH),
        Bar("colour, shape and size, the least of three seeds", least(ATTRIBUTES, ours), 0.95),
        Bar(f"seconds of training until relation, swap and location stay above {ENOUGH:.0%}, the longest", max(times) if times and None not in times else None, 120, at_least=False),
        Bar("objects as vectors: relation and swap", least(("relation", "swap"), [parts[OBJECTS]] if OBJECTS in parts else []), 0.98),
        Bar(f"{WEAK}: relation and location differ from one half by", furthest(WEAK, ("relation", "location")), 0.05, at_least=False, shown=".3f"),
        Bar(f"{UNPLACED}: relation and swap differ from one half by", furthest(UNPLACED, ("relation", "swap")), 0.05, at_least=False, shown=".3f"),
        Bar(f"{UNPLACED}: location", least(("location",), [parts[UNPLACED]] if UNPLACED in parts else []), 0.95),
    ]  # fmt: skip

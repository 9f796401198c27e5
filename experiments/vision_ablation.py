"""What helps: image tokens by self-attention or by convolutions, and hidden image tokens chosen by attention, at random, or not at all (Xue et al. 2021, ablations).

The world `shapes`; equal steps (800 of 256 new pictures), equal sizes; up to three seeds of the four arms of the
question (the column of steps has one entry for each), one of the others. Image tokens come of a transformer on patches
or of a convolutional network with about as many parameters, both without masked feature regression (MFR); then the
transformer with MFR by attention, the paper's, or at random, and by attention with other targets: features of a running
mean of the vision model (EMA), pixels of the patch. One arm takes pictures from -1 to 1, whose dark ground is most of
what a patch then says, where the others take them less their mean. MFR begins after two fifths of the steps, as in
`vision-pretrain`. Then no MFR, MFR by attention and at random again on 1,000 pictures alone, whose captions and noise
are new each time: whether MFR spares data.

Measured on 2,000 pictures of the test's seed: true captions above foils, ties one half; "what" is the mean of colour,
shape and size, "where" of relation, swap and location; and from which step on relation and swap both stay above 90 %.
No MFR is the control of MFR, convolutions that of self-attention. The paper's ablations are of photographs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments import pictures
from experiments.pictures import ATTRIBUTES, SPATIAL, foils, reached, spread
from experiments.recipe import Bar, Block, Setting, Table
from experiments.vision_pretrain import MFR_AFTER
from heedful.multimodal import SceneCaptions, Scenes
from heedful.multimodal.worlds import MEAN, STD

SEEDS = (0, 1, 2)
NONE, ATTENTION, RANDOM = "transformer, no MFR", "transformer, MFR by attention", "transformer, MFR at random"
EMA, PIXELS, CONVOLUTION = "MFR by attention, EMA", "MFR by attention, pixels", "convolutions, no MFR"
DARK = "transformer, no MFR, dark ground as -1"
PLAIN = ("mlm", "itm")
ARMS: dict[str, dict[str, Any]] = {
    CONVOLUTION: {"tasks": PLAIN, "vision": "convolution"},
    NONE: {"tasks": PLAIN},
    DARK: {"tasks": PLAIN},
    ATTENTION: {},
    RANDOM: {"mfr_mask": "random"},
    EMA: {"config": {"mfr_target": "ema"}},
    PIXELS: {"config": {"mfr_target": "pixels"}},
}
FEW = (NONE, ATTENTION, RANDOM)
MAIN = (CONVOLUTION, *FEW)
SCENES = 1000


def folder(work: Path, arm: str) -> Path:
    """Where the first seed's model is kept, for `vision-flow`."""
    return work / "models" / arm.replace(",", "").replace(" ", "-")


def _dark(pictures: torch.Tensor) -> torch.Tensor:
    """Pictures from -1 to 1, most of them near -1."""
    return 2 * pictures - 1


def _run(arm: str, seed: int, scenes: int | None, work: str, device: str, quick: bool) -> dict[str, Any]:
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    count = 24 if quick else 2000
    how = dict(ARMS[arm])
    config = (pictures.SMALL if quick else {}) | how.pop("config", {})
    images, asked = pictures.pictures_asked(count, device)
    part = slice(512)
    data = SceneCaptions(None if scenes is None else Scenes.draw(scenes, torch.Generator().manual_seed(100 + seed)))
    if arm == DARK:
        images = _dark(images * STD + MEAN)
        data.see = lambda scenes, generator: _dark(scenes.render(generator))
    kept = None
    if arm in MAIN and seed == 0 and scenes is None:
        kept = folder(Path(work), f"{arm}{' quick' if quick else ''}")
    steps, batch, rounds = (4, 8, 2) if quick else (800, 256, 16)
    model, record = pictures.trained(
        data, lambda model: foils(model, images[part], asked[part]), device=device, seed=seed, steps=steps, batch=batch, rounds=rounds,
        config=config, kept=kept, mfr_after=MFR_AFTER, **how,
    )  # fmt: skip
    return record | {"foils": foils(model, images, asked)}


def run(setting: Setting) -> dict[str, Any]:
    seeds = SEEDS[:1] if setting.quick else SEEDS
    arms = (CONVOLUTION, NONE, ATTENTION, EMA) if setting.quick else tuple(ARMS)
    end = (str(setting.work), setting.device, setting.quick)

    def of(arms: Sequence[str], seed: int, scenes: int | None = None) -> dict[str, tuple[Any, ...]]:
        few = "" if scenes is None else ", few"
        return {f"{arm}{few}, seed {seed}": (arm, seed, scenes, *end) for arm in arms}

    # What the bars and `vision-flow` need comes first, further seeds last: time may end before.
    main = [arm for arm in MAIN if arm in arms]
    parts = of(main, 0) | of([arm for arm in FEW if arm in arms], 0, SCENES)
    for seed in seeds[1:2]:
        parts |= of(main, seed)
    parts |= of([arm for arm in arms if arm not in MAIN], 0)
    for seed in seeds[2:]:
        parts |= of(main, seed)
    return {"quick": setting.quick, "parts": setting.store().run(_run, parts, pictures.jobs(setting))}


def tables(result: dict[str, Any]) -> list[Block]:
    parts = result["parts"]

    def of(arm: str, few: bool = False) -> list[dict[str, Any]]:
        middle = ", few" if few else ""
        return [parts[name] for seed in SEEDS if (name := f"{arm}{middle}, seed {seed}") in parts]

    def means(found: list[dict[str, float]], kinds: tuple[str, ...]) -> list[float]:
        return [sum(each[kind] for kind in kinds) / len(kinds) for each in found]

    def row(name: str, found: list[dict[str, Any]]) -> list[str]:
        half = [part["curve"][len(part["curve"]) // 2 - 1] for part in found]
        last = [part["foils"] for part in found]
        steps = ", ".join(
            "never" if (at := reached(part["curve"], ("relation", "swap"))) is None else f"{at:,}" for part in found
        )
        cells = [spread(means(rows, kinds)) for rows in (half, last) for kinds in (ATTRIBUTES, SPATIAL)]
        return [name, *cells, steps, f"{min(part['spread'] for part in found):.2f}"]

    columns = ("percent, mean and range over seeds", "what, half of the steps", "where", "what, all steps", "where", "relation and swap above 90 from step", "least spread")  # fmt: skip
    rows = [row(arm, of(arm)) for arm in ARMS if of(arm)]
    blocks: list[Block] = [Table(columns, rows, control=NONE if of(NONE) else "")]
    few = [row(arm, of(arm, few=True)) for arm in FEW if of(arm, few=True)]
    if few:
        blocks += [f"With {SCENES:,} pictures to learn from:", Table(columns, few)]
    if of(NONE):
        blocks.append(f"Parameters that see: {of(NONE)[0]['vision parameters']:,} of the transformer" + (f", {of(CONVOLUTION)[0]['vision parameters']:,} of convolutions." if of(CONVOLUTION) else "."))  # fmt: skip
    if not result["quick"]:

        def gain(first: str, second: str) -> float | None:
            """The mean difference over the seeds that both have."""
            pairs = [
                [parts[f"{arm}, seed {seed}"]["foils"] for arm in (first, second)]
                for seed in SEEDS
                if all(f"{arm}, seed {seed}" in parts for arm in (first, second))
            ]
            gains = [a - b for a, b in (means(pair, ATTRIBUTES) for pair in pairs)]
            return sum(gains) / len(gains) if gains else None

        blocks += [
            Bar("what: the transformer less convolutions", gain(NONE, CONVOLUTION), 0.05, shown=".3f"),
            Bar("what: MFR by attention less none", gain(ATTENTION, NONE), 0.0, shown=".3f"),
        ]
        if (apart := gain(ATTENTION, RANDOM)) is not None:
            blocks.append(f"- what: MFR by attention less at random, no bar: {apart:.3f}")
    return blocks

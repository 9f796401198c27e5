"""Does a model of pictures and texts learn to see on a CPU: a check of minutes that pre-training is sound, for whoever changes it.

The world `shapes` in its easy form (two large objects of four shapes and four colours), patches of 16, 64 numbers, 2
layers that see and 3 of fusion, all three tasks; 2,500 steps of 64 pictures on one core, each caption with one rival:
half the time another picture's caption, else a foil of any kind. One seed.

Measured after every 250 steps on 500 pictures of the test's seed: true captions above foils, ties one half. Three bars
are healthy signs: colours are seen, the loss of matching is below that of guessing (0.693, which is the control), and
image tokens stay apart (the smallest spread over all steps; 0 where the model has stopped seeing). The paper has no
such check.
"""

from __future__ import annotations

from typing import Any

import torch

from experiments import pictures
from experiments.pictures import foils, percent
from experiments.recipe import Bar, Block, Setting, Table
from heedful.multimodal import SceneCaptions

KINDS = ("colour", "shape", "relation", "swap", "location")
CONFIG: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "vision_layers": 2, "patch_size": 16}
SIZES: dict[bool, dict[str, Any]] = {
    True: {"steps": 4, "batch": 8, "rounds": 2, "config": pictures.SMALL},
    False: {"steps": 2500, "batch": 64, "rounds": 10, "config": CONFIG},
}


def _run(device: str, quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    images, scenes = pictures.pictures_asked(24 if quick else 500, device, "easy")

    def measure(model: Any) -> dict[str, float]:
        return foils(model, images, scenes, kinds=KINDS, counts=(1, 4, 4))

    data = SceneCaptions(preset="easy", rivals="one", length=12)
    return pictures.trained(data, measure, device=device, seed=0, mfr_tokens=4, **SIZES[quick])[1]


def run(setting: Setting) -> dict[str, Any]:
    return {"quick": setting.quick, **setting.store().run(_run, {"model": (setting.device, setting.quick)})}


def tables(result: dict[str, Any]) -> list[Block]:
    record = result["model"]
    rows = [
        (f"{row['step']:,}", f"{row['seconds']:.0f}", *(percent(row[kind]) for kind in KINDS), "")
        for row in record["curve"]
    ]
    rows[-1] = (*rows[-1][:-1], f"{record['losses']['itm']:.3f}")
    rows.append(("guessing", "", *["50.0"] * len(KINDS), "0.693"))
    blocks: list[Block] = [Table(("step", "seconds", *KINDS, "loss of matching"), rows, control="guessing")]
    if not result["quick"]:
        blocks += [
            Bar("foils of colour at the end", record["curve"][-1]["colour"], 0.95, shown=".3f"),
            Bar("loss of matching at the end", record["losses"]["itm"], 0.6, at_least=False, shown=".3f"),
            Bar("spread of image tokens at all times", record["spread"], 0.2, shown=".3f"),
        ]
    return blocks

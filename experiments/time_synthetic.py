"""Three drawn worlds in which times say what comes next, beside the best that any model can do (`worlds.py`).

*gap switch*: the gap to the next event chooses its type. *phase clock*: the type is the sector of a hidden clock of period 7.3; rotated values carry its phase along, and the period is found in the data.
*marked Hawkes*: type 0 triggers type 1 soon and type 2 late. 2,000, 2,000 and 1,500 sequences drawn with seed 0 to learn from, a tenth of them held out; 200, 300 and 200 drawn with seed 1 as the test. Three seeds of the
model. "best possible" knows the law that drew the data (of the phase clock all but the phase); the control sees the order of types alone: tables of the last types, and our model without times. No paper has these worlds.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from experiments import counting, worlds
from experiments.events import Split
from experiments.foreseen import fitted_on, foreseen
from experiments.recipe import Bar, Block, Setting, Table
from experiments.symmetry import shown

SEEDS = (0, 1, 2)
ORDER, OURS = "ours, order alone", "ours, time known"
GRAMS = "the last types, best table"
HELD_OUT = 0.1
# Options of NextEvent by world.
OPTIONS: dict[str, dict[str, Any]] = {
    "gap switch": {},
    "phase clock": {"rotate_values": True},
    "marked Hawkes": {},
}
COMMON: dict[str, Any] = {"epochs": 15, "batch_size": 32}
QUICK: dict[str, Any] = {"embed_dim": 16, "num_heads": 2, "layers": 1, "epochs": 2}
# Accuracy at least with the time known, at most by order alone
BARS = {"gap switch": (0.90, 0.25), "phase clock": (0.86, 0.22), "marked Hawkes": (0.63, 0.50)}
MOST_LOSS = 0.82  # of the marked Hawkes process


def drawn(world: str, quick: bool) -> Split:
    generate, _, learned, asked = worlds.WORLDS[world]
    count = 40 if quick else learned
    every, held = generate(count, 0), round(HELD_OUT * count)
    numbers = np.arange(count)
    return Split(
        every.take(numbers < count - held), every.take(numbers >= count - held), generate(20 if quick else asked, 1)
    )


def _best(world: str, quick: bool) -> dict[str, Any]:
    test = drawn(world, quick).test
    return counting.measured(worlds.WORLDS[world][1](test), test.types[test.targets])


def _grams(world: str, quick: bool) -> dict[str, Any]:
    return counting.grams(drawn(world, quick))


def _ours(world: str, quick: bool, ordered: bool, seed: int, device: str) -> dict[str, Any]:
    options = COMMON | ({"time": "order"} if ordered else OPTIONS[world]) | (QUICK if quick else {})
    return foreseen(drawn(world, quick), options, seed, device)


def run(setting: Setting) -> dict[str, Any]:
    quick, device, store = setting.quick, setting.device, setting.store()
    seeds = SEEDS[:1] if quick else SEEDS
    best = {world: store.get(f"best, {world}", partial(_best, world, quick)) for world in worlds.WORLDS}
    grams = {world: store.get(f"tables, {world}", partial(_grams, world, quick)) for world in worlds.WORLDS}
    parts = {
        f"{ORDER if ordered else OURS}, {world}, seed {seed}": (world, quick, ordered, seed, device)
        for world in worlds.WORLDS for ordered in (True, False) for seed in seeds
    }  # fmt: skip
    done = store.run(_ours, parts, setting.jobs)
    return {
        "quick": quick,
        "best": best,
        "tables": grams,
        "fits": [
            {"model": ORDER if ordered else OURS, "world": world, **done[part]}
            for part, (world, _, ordered, *_) in parts.items() if part in done
        ],
        "wanted": len(parts),
    }  # fmt: skip


def tables(result: dict[str, Any]) -> list[Block]:
    fits = result["fits"]

    def of(name: str, world: str, figure: str = "accuracy") -> list[float]:
        way = "unknown" if name == ORDER else "known"
        return [fit[way][figure] for fit in fits if (fit["model"], fit["world"]) == (name, world)]

    names = list(worlds.WORLDS)
    rows = []
    table = {world: max(result["tables"][world].values(), key=lambda row: row["accuracy"]) for world in names}
    for name, figures in (("best possible, time known", result["best"]), (GRAMS, table)):
        rows.append(
            [
                name,
                *(
                    cell
                    for world in names
                    for cell in (f"{figures[world]['accuracy']:.4f}", f"{figures[world]['nll']:.4f}")
                ),
            ]
        )
    for name in (ORDER, OURS):
        rows.append([
            name, *(cell for world in names for cell in ((shown(of(name, world), 4), shown(of(name, world, "nll"), 4)) if of(name, world) else ("", ""))),
        ])  # fmt: skip
    bars: list[Block] = []
    for world, (least, most) in BARS.items():
        known, order = of(OURS, world), of(ORDER, world)
        bars += [
            Bar(f"{world}, time known, the worst seed", min(known, default=None), least, shown=".4f"),
            Bar(f"{world}, order alone, the best seed", max(order, default=None), most, False, ".4f"),
        ]
    periods = [
        min(abs(period / worlds.PERIOD - 1) for period in fit["periods"])
        for fit in fits if fit["world"] == "phase clock" and fit["model"] == OURS and fit["periods"]
    ]  # fmt: skip
    return [
        fitted_on(fits),
        Table(["", *(f"{world}{more}" for world in names for more in ("", ", -log p"))], rows, control=GRAMS),
        *bars,
        Bar("marked Hawkes, -log p(type), the worst seed", max(of(OURS, "marked Hawkes", "nll"), default=None), MOST_LOSS, False, ".4f"),
        Bar("phase clock, relative distance of the nearest learned period from 7.3, the worst seed", max(periods, default=None), 0.005, False, ".1e"),
        f"- Incomplete: {len(fits)} of {result['wanted']} fits." if len(fits) < result["wanted"] else "",
    ]  # fmt: skip

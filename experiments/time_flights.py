"""Where an aircraft flies next from New York, and from which airport: a day and a week in the data, found or given.

Scheduled departures of 2013, a sequence for each of 3,163 aircraft, 632 of them the test; every departure that has one before it is foreseen, its destination (104) and its
airport (3). One model per row, three seeds, `clock="auto"` finding its periods in the training aircraft. A row says whether the time of the departure is known, and what else is seen of past
departures: destinations (or airports) alone, or carrier, airport and destination of each.

Beside ours: count tables of the last destination with the gap, the hour and the quarter of an hour (the control), gradient-boosted trees on features made by hand (`boosted.py`),
and a table that looks the flight up: aircraft of the test fly flights of the timetable that others fly too, so carrier, five minutes of the day and four weeks of the year say most of it. No paper has figures for these data.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments import boosted, counting, events
from experiments.boosted import Trees
from experiments.foreseen import fitted_on, foreseen
from experiments.recipe import Bar, Block, Setting, Table
from experiments.symmetry import mean, shown

DAY = 1440.0  # minutes
TARGETS = {"dest": "destination", "origin": "airport"}
SEEDS = (0, 1, 2)
ORDER, FOUND, MARKED = "order alone", "periods found", "periods found, and marks"
CONTROL = "last destination, quarter-hour"
UNKNOWN, KNOWN = "unknown", "known"

# Options of NextEvent and whether it sees carrier, airport and destination of past departures.
OURS: dict[str, tuple[dict[str, Any], bool]] = {
    ORDER: ({"time": "order"}, False),
    FOUND: ({"clock": "auto"}, False),
    "a day and a week given": ({"clock": "1440,10080"}, False),
    MARKED: ({"clock": "auto", "trend": True}, True),
}
COMMON: dict[str, Any] = {"epochs": 12, "degree": 32}
QUICK: dict[str, Any] = {"embed_dim": 16, "num_heads": 2, "layers": 1, "epochs": 1}
TREES = {"dest": (Trees(0.3, 31, 25), Trees(0.1, 31, 25)), "origin": (Trees(0.1, 31, 300), Trees(0.3, 31, 300))}
LIMIT = 30  # aircraft of each part in a quick run


def _split(work: Path, target: str, quick: bool) -> events.Split:
    split = events.flights(work, target)
    return events.Split(*(part.take(np.arange(LIMIT)) for part in split)) if quick else split


def _ours(work: Path, target: str, quick: bool, name: str, seed: int, device: str) -> dict[str, Any]:
    options, marked = OURS[name]
    marks = [each for each in ("carrier", "origin", "dest") if each != target] if marked else []
    return foreseen(_split(work, target, quick), COMMON | options | (QUICK if quick else {}), seed, device, marks)


def _tables(work: Path, target: str, quick: bool) -> dict[str, Any]:
    return counting.flight_tables(_split(work, target, quick))


def _trees(work: Path, target: str, quick: bool, known: bool) -> dict[str, Any]:
    settings = (Trees(0.1, 7, 2),) if quick else TREES[target]
    return boosted.fitted(_split(work, target, quick), DAY, known, settings)


def part_of_trees(target: str, known: bool) -> str:
    return f"trees, {target}, time {KNOWN if known else UNKNOWN}"


def run(setting: Setting) -> dict[str, Any]:
    quick, work, device = setting.quick, setting.work, setting.device
    seeds, names = (SEEDS[:1], [ORDER, FOUND]) if quick else (SEEDS, list(OURS))
    store = setting.store()
    tables = {target: store.get(f"tables, {target}", partial(_tables, work, target, quick)) for target in TARGETS}
    # Trees take what cores there are, networks one each.
    ways = [(target, known) for target in TARGETS for known in (False, True)]
    trees = store.run(_trees, {part_of_trees(*way): (work, way[0], quick, way[1]) for way in ways})
    parts = {
        f"{name}, {target}, seed {seed}": (work, target, quick, name, seed, device)
        for target in TARGETS for name in names for seed in seeds
    }  # fmt: skip
    done = store.run(_ours, parts, setting.jobs)
    return {
        "quick": quick,
        "tables": tables,
        "trees": [
            {"target": target, "way": KNOWN if known else UNKNOWN, **trees[part_of_trees(target, known)]}
            for target, known in ways if part_of_trees(target, known) in trees
        ],
        "fits": [
            {"model": name, "target": target, **done[part]}
            for part, (_, target, _, name, *_) in parts.items() if part in done
        ],
        "wanted": len(parts),
    }  # fmt: skip


def tables(result: dict[str, Any]) -> list[Block]:
    fits = result["fits"]

    def of(name: str, target: str, way: str, figure: str = "accuracy") -> list[float]:
        return [fit[way][figure] for fit in fits if (fit["model"], fit["target"]) == (name, target) and way in fit]

    names = list(dict.fromkeys(fit["model"] for fit in fits))
    columns = [
        "model",
        "time of the target",
        *(f"{what}{more}" for what in TARGETS.values() for more in (", %", ", -log p")),
        "seconds to fit",
    ]
    rows: list[list[object]] = []
    for table in result["tables"]["dest"]:
        way = KNOWN if any(word in table for word in ("gap", "hour", "minutes")) else UNKNOWN
        rows.append([table, way, *_cells([result["tables"][target][table] for target in TARGETS]), ""])
    for way in (UNKNOWN, KNOWN):
        own = {row["target"]: row for row in result["trees"] if row["way"] == way}
        if len(own) == len(TARGETS):
            seconds = ", ".join(f"{own[target]['seconds']:.0f}" for target in TARGETS)
            limits = " and ".join(str(TREES[target][0].rounds) for target in TARGETS)
            rows.append(
                [
                    f"boosted trees, all marks (at most {limits} rounds)",
                    way,
                    *_cells([own[target] for target in TARGETS]),
                    seconds,
                ]
            )
    for name in names:
        for way in (UNKNOWN, KNOWN):
            values = {target: [100 * value for value in of(name, target, way)] for target in TARGETS}
            if any(values.values()):
                cells = [
                    cell for target in TARGETS
                    for cell in ((shown(values[target], 2), f"{mean(of(name, target, way, 'nll')):.3f}") if values[target] else ("", ""))
                ]  # fmt: skip
                seconds = mean([fit["seconds"] for fit in fits if fit["model"] == name])
                rows.append([f"ours: {name}", way, *cells, f"{seconds:.0f}"])

    def average(name: str, target: str, way: str) -> float | None:
        values = of(name, target, way)
        return 100 * mean(values) if values else None

    found, order = average(FOUND, "dest", KNOWN), average(ORDER, "dest", UNKNOWN)
    # Over every seed, the farthest from a day of what was found nearest to it.
    days = [
        min(abs(period / DAY - 1) for period in fit["clock"]) for fit in fits if fit["model"] == FOUND and fit["clock"]
    ]
    looked_up = 100 * result["tables"]["dest"][counting.TIMETABLE]["accuracy"]
    best = max((value for name in names if (value := average(name, "dest", KNOWN)) is not None), default=None)
    return [
        fitted_on(fits),
        Table(columns, rows, control=CONTROL),
        f"The timetable, looked up, has {looked_up:.1f} % of the destinations, our best row {best:.1f} %." if best is not None else "",
        Bar("destination, its time known, periods found", found, 41.0, shown=".2f"),
        Bar("and above the control's table", found, 42.4, shown=".2f"),
        Bar("points over the same model by order alone", None if found is None or order is None else found - order, 8.0, shown=".2f"),
        Bar("airport, its time known, periods found", average(FOUND, "origin", KNOWN), 86.0, shown=".2f"),
        Bar("period found, relative distance from a day", max(days, default=None), 1e-3, False, ".1e"),
        f"- Incomplete: {len(fits)} of {result['wanted']} fits." if len(fits) < result["wanted"] else "",
    ]  # fmt: skip


def _cells(figures: list[dict[str, float]]) -> list[str]:
    return [cell for one in figures for cell in (f"{100 * one['accuracy']:.2f}", f"{one['nll']:.3f}")]

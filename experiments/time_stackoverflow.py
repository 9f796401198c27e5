"""Which badge comes next on Stack Overflow: what its time is worth, and what a count table makes of it (Xu et al. 2019).

Badges of 2012 and 2013, 22 types, the five test sets of Du et al. (2016) complete: 1,326 users and about 96,000 badges each, every one of which
that has one before it is foreseen. To learn from there are 3,142 users of the original 5,307 (the others' times are not to be had), 300 of them held out for choosing the
epoch. One model per row and split, three seeds of split 1. A row says whether the time of the badge that is asked for is known: that alone is worth two points, so rows
are comparable only with rows that know as much. The published figures are of the whole training set, the model of each row there chosen on the
test set, PosEnc without and the time encodings with the target's time.

Beside ours: counts of the last types, the last type with the gap to the target in 40 bins (the control), and gradient-boosted trees on features made by
hand (`boosted.py`: last types and gaps, counts so far, hour, weekday), tuned on held-out users, all of the same users; easy-tpp's RMTPP and THP on split 1 (`easytpp.py`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from experiments import boosted, counting, easytpp, events
from experiments.boosted import Trees
from experiments.foreseen import fitted_on, foreseen
from experiments.recipe import Bar, Block, Setting, Table
from experiments.store import processes
from experiments.symmetry import mean, shown

DAY = 86_400.0
SPLITS = (1, 2, 3, 4, 5)
SEEDS = (0, 1, 2)  # of split 1; of the others the first
ORDER, BEST = "order alone", "all of them, and the calendar"

# Options of NextEvent by row.
OURS: dict[str, dict[str, Any]] = {
    ORDER: {"time": "order"},
    "gaps, linear and log": {"time": "linear", "clock": "none"},
    "gaps, Bochner": {"time": "bochner", "clock": "none"},
    "gaps, Mercer": {"time": "mercer", "clock": "none"},
    BEST: {"time": "linear", "clock": "auto", "trend": True},
}
COMMON: dict[str, Any] = {"epochs": 15}
QUICK: dict[str, Any] = {"embed_dim": 16, "num_heads": 2, "layers": 1, "epochs": 1}

# Accuracy in percent, mean (deviation) over ten runs: Xu et al. 2019, table 2
PAPER = {
    "LSTM": "46.03 (0.21)", "TimeJoint": "46.30 (0.23)", "RMTPP": "46.23 (0.24)", "PosEnc": "44.03 (0.33)",
    "Bochner, normal": "44.89 (0.46)", "Bochner, inverse CDF": "44.67 (0.38)", "Bochner, non-parametric": "46.27 (0.29)",
    "Mercer": "46.83 (0.20)",
}  # fmt: skip
# The row of theirs that is like one of ours.
LIKE = {ORDER: "PosEnc", "gaps, Bochner": "Bochner, non-parametric", "gaps, Mercer": "Mercer"}

TREES = (Trees(0.1, 31, 120), Trees(0.1, 15, 120))
KNOWN, UNKNOWN = "known", "unknown"
LIMIT = 40  # users of each part in a quick run


def _split(work: Path, number: int, quick: bool) -> events.Split:
    split = events.badges(work, number)
    if not quick:
        return split
    import numpy as np

    return events.Split(*(part.take(np.arange(LIMIT)) for part in split))


def _ours(work: Path, number: int, quick: bool, name: str, seed: int, device: str) -> dict[str, Any]:
    return foreseen(_split(work, number, quick), COMMON | OURS[name] | (QUICK if quick else {}), seed, device)


def _timed(work: Path) -> dict[str, Any]:
    """The best row of split 1 once more, on all cores of a CPU: how long it takes there."""
    return {"cores": processes(), **foreseen(_split(work, 1, False), COMMON | OURS[BEST], SEEDS[0], "cpu")}


def _tables(work: Path, number: int, quick: bool) -> dict[str, Any]:
    return counting.badge_tables(_split(work, number, quick))


def _trees(work: Path, number: int, quick: bool, known: bool) -> dict[str, Any]:
    settings = (Trees(0.1, 7, 2),) if quick else TREES
    return boosted.fitted(_split(work, number, quick), DAY, known, settings)


def part_of_trees(number: int, known: bool) -> str:
    return f"trees, split {number}, time {KNOWN if known else UNKNOWN}"


def run(setting: Setting) -> dict[str, Any]:
    quick, work, device = setting.quick, setting.work, setting.device
    splits, seeds = (SPLITS[:1], SEEDS[:1]) if quick else (SPLITS, SEEDS)
    names = [ORDER, BEST] if quick else list(OURS)
    store = setting.store()
    tables = {number: store.get(f"tables, split {number}", partial(_tables, work, number, quick)) for number in splits}
    # Trees take what cores there are, networks one each.
    trees = store.run(_trees, {part_of_trees(1, known): (work, 1, quick, known) for known in (False, True)})
    parts = {
        f"{name}, split {number}, seed {seed}": (work, number, quick, name, seed, device)
        for number in splits for name in names for seed in (seeds if number == 1 else seeds[:1])
    }  # fmt: skip
    done = store.run(_ours, parts, setting.jobs)
    rows = [
        {"model": name, "split": number, **done[part]}
        for part, (_, number, _, name, *_) in parts.items()
        if part in done
    ]
    timed = {} if quick or device != "cpu" else store.run(_timed, {"fit on all cores": (work,)})
    file = work / "easy-tpp" / "split 1.npz"
    if not (quick or file.is_file()):
        easytpp.export(events.badges(work, 1), file)
    return {
        "quick": quick,
        "tables": {str(number): tables[number] for number in splits},
        "trees": {UNKNOWN if "unknown" in name else KNOWN: row for name, row in trees.items()},
        "fits": rows,
        "on the CPU": timed.get("fit on all cores"),
        "easy-tpp": {} if quick else easytpp.results(file),
        "wanted": len(parts),
    }


def tables(result: dict[str, Any]) -> list[Block]:
    fits, counted = result["fits"], result["tables"]
    splits = list(counted)

    def of(name: str, split: str, way: str, figure: str = "accuracy") -> list[float]:
        return [fit[way][figure] for fit in fits if (fit["model"], str(fit["split"])) == (name, split) and way in fit]

    names = list(dict.fromkeys(fit["model"] for fit in fits))
    rows: list[list[object]] = []
    for table, figures in counted["1"].items():
        known = "known" if table == counting.GAP_TABLE else "unknown"
        rows.append([table, known, f"{100 * figures['accuracy']:.2f}", f"{figures['nll']:.3f}", "", None])
    for way, row in result["trees"].items():
        rows.append([
            f"boosted trees ({row['leaves']} leaves, {row['rounds']} rounds)", way, f"{100 * row['accuracy']:.2f}", f"{row['nll']:.3f}",
            f"{row['seconds']:.0f}", None,
        ])  # fmt: skip
    for name, peer in result["easy-tpp"].items():
        for way in (UNKNOWN, KNOWN):
            if way in peer:
                rows.append([
                    f"easy-tpp {name}", way, f"{100 * peer[way]['accuracy']:.2f}", f"{peer[way]['nll']:.3f}", f"{peer['seconds']:.0f}",
                    PAPER["RMTPP"] if (name, way) == ("RMTPP", UNKNOWN) else None,
                ])  # fmt: skip
    for name in names:
        for way in (UNKNOWN, KNOWN):
            values = [100 * value for value in of(name, "1", way)]
            if values:
                seconds = mean([fit["seconds"] for fit in fits if (fit["model"], fit["split"]) == (name, 1)])
                rows.append([
                    f"ours: {name}", way, shown(values, 2), f"{mean(of(name, '1', way, 'nll')):.3f}", f"{seconds:.0f}",
                    PAPER.get(LIKE.get(name, "")) if way == (UNKNOWN if name == ORDER else KNOWN) else None,
                ])  # fmt: skip
    for name, figure in PAPER.items():
        if name not in (*LIKE.values(), *(("RMTPP",) if "RMTPP" in result["easy-tpp"] else ())):
            rows.append(
                [
                    f"{name} (published)",
                    KNOWN if name.startswith(("Bochner", "Mercer")) else UNKNOWN,
                    "",
                    "",
                    "",
                    figure,
                ]
            )
    gap = {split: 100 * counted[split][counting.GAP_TABLE]["accuracy"] for split in splits}
    by_split = [[counting.GAP_TABLE, *(f"{gap[split]:.2f}" for split in splits)]]
    gains = {}
    for name in names:
        for way in (UNKNOWN, KNOWN):
            if of(name, "1", way):
                means = {split: 100 * mean(of(name, split, way)) for split in splits if of(name, split, way)}
                by_split.append(
                    [f"{name}, time {way}", *(f"{means[split]:.2f}" if split in means else "" for split in splits)]
                )
                gains[name, way] = {split: value - gap[split] for split, value in means.items()}
    best = gains.get((BEST, KNOWN), {})
    apart = max(abs(value - best["1"]) for value in best.values()) if len(best) > 1 else None
    order, known = ([100 * value for value in of(*which)] for which in ((ORDER, "1", UNKNOWN), (BEST, "1", KNOWN)))
    cpu = result["on the CPU"]
    trees = result["trees"].get(KNOWN)
    ahead = trees is not None and known and 100 * trees["accuracy"] > mean(known)
    return [
        fitted_on(fits),
        "Split 1, accuracy in percent, mean (lowest-highest) over seeds where there are several:",
        Table(["model", "time of the target", "accuracy", "-log p", "seconds to fit", "published"], rows, paper="published", control=counting.GAP_TABLE),
        "By split:",
        Table(["model", *(f"split {split}" for split in splits)], by_split, control=counting.GAP_TABLE),
        f"Boosted trees are ahead of ours by {100 * trees['accuracy'] - mean(known):.2f} points where the time is known." if ahead else "",
        Bar("target's time known, split 1", mean(known) if known else None, 48.0, shown=".2f"),
        Bar("order alone, split 1", mean(order) if order else None, 45.4, shown=".2f"),
        Bar("gain over the gap table of split 1 less that of another split, at most", apart, 0.8, False, ".2f"),
        Bar("seconds to fit the best row on two CPU cores", cpu and cpu["seconds"], 360, False, ".0f"),
        Bar("seconds to foresee its test events there, their times known", cpu and cpu[KNOWN]["seconds"], 30, False, ".1f"),
        f"- Incomplete: {len(fits)} of {result['wanted']} fits." if len(fits) < result["wanted"] else "",
    ]  # fmt: skip

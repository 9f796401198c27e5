"""Time series beside what one would take instead: MiniRocket, MultiRocket, Hydra, warped neighbours, trees; 17 sets and PLAID, and where the evidence lies.

Sets of the UCR and UEA archives with their own splits; five seeds where something is drawn. Ours is `SeriesClassifier()` as it comes:
"linear", because cross-validation on the training parts (one seed) had "linear + softmax" ahead by 0.15 points only, at several times the cost; "softmax" compares segments with segments by a kernel instead, "linear + softmax" does both with the same
features: the ablation of attention, three seeds. Accuracy in %, processor seconds of one thread for all series of a part. Rivals are measured by `rockets.py` in an environment of its own (its docstring has the commands), in the
same folder and on the same machine; this recipe writes the data for it, and shows what it finds. Sets that are in no package here are left out and named.

"network" is `SeriesClassifier` with "softmax+primal" as `primal-uea` has it, by its protocol: all training cases, 100 epochs or 1,000 steps of the optimizer, the last epoch. Its figures on the
nine sets of that recipe are that recipe's (five seeds, on a GPU, without times); on others of up to 300 steps, and on OSULeaf, it is trained here, one seed. Longer series are left out.
"network on features" puts convolution features of eight segments, brought to 64 components each, into the same network as eight steps: softmax attention, and the same without attention. Three
seeds, on the sets of 150 training series or more. Which numbers stand for a segment was chosen by 30 % of the training parts of six of them (one seed, PenDigits left out); test parts were scored once.
It is no part of the library: `docs/series.md` says why.

Evidence: in half of the drawn series a burst of 16 steps lies in one of eight segments; of the unseen ones that have it, how often is it the segment with most
evidence? Five seeds. Then 10,000 drawn series of 1,000 steps are fitted by one thread.

Times of networks, of the second and third seed of the ablations and of ablations on PLAID come from a later run than the rest, on another machine of two cores, on which fits of ours took about a tenth less.
Half an hour of a core for ours, an hour for the ablations and the rivals, half an hour for networks; `--seconds` starts no further part.
"""

from __future__ import annotations

import resource
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments import networks, rockets, series
from experiments.recipe import Bar, Block, Setting, Table
from experiments.store import workers
from experiments.tabular import one_thread
from heedful._errors import HeedfulError

SETS = (
    "Coffee", "GunPoint", "ItalyPowerDemand", "ArrowHead", "Trace", "BasicMotions", "ERing", "RacketSports", "Libras", "Epilepsy",
    "PickupGestureWiimoteZ", "JapaneseVowels", "UWaveGestureLibrary", "Handwriting", "OSULeaf", "ACSF1", "PigCVP",
)  # fmt: skip
BESIDE = ("PLAID", "PenDigits")
PACKAGED = ("ArrowHead", "ItalyPowerDemand", "OSULeaf", "ACSF1", "PLAID", "GunPoint")
OURS = {
    "ours": {},
    "softmax": {"kernel": "softmax"},
    "linear + softmax": {"kernel": "linear+softmax"},
}
SEEDS, FEWER = (0, 1, 2, 3, 4), (0, 1, 2)
NETWORK, STEPS, LARGE_STEPS = networks.NETWORK, 300, 500
MINI, MULTI = "MiniRocket", "MultiRocket"
BURSTS = {"plain": {}, "a fifth of the values missing": {"missing": 0.2}, "one of three channels": {"channels": 3}}


def prepare(folder: Path) -> list[str]:
    """Writes the sets that are found here; the names of those of this recipe that lie in the folder, in its order."""
    there = series.prepare(folder)
    for name in PACKAGED:
        if name not in there:
            try:
                series.write(folder / f"{name}.npz", *series.archive(name))
            except HeedfulError:
                continue
    return [name for name in (*SETS, *BESIDE) if (folder / f"{name}.npz").is_file()]


def fit(folder: Path, name: str, method: str, seed: int) -> dict[str, Any]:
    """One model of ours on one set."""
    from heedful.series import SeriesClassifier

    train, test = series.load(folder, name)
    options = networks.training(len(train)) if method == NETWORK else OURS[method]
    model = SeriesClassifier(random_state=seed, device="cpu", **options)
    return networks.measured(model, (train.X, train.y, test.X, test.y), {"method": method, "set": name, "seed": seed})


def bursts(
    draw: np.random.Generator, count: int, channels: int = 1, missing: float = 0.0
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Autoregressive noise of 160 to 240 steps; half have a burst of 16 steps in the middle of one of eight segments of one channel.

    Series, labels, and (segment, channel) of each.
    """
    X, labels, places = [], [], []
    for _ in range(count):
        steps = int(draw.integers(160, 241))
        x = draw.standard_normal((channels, steps))
        for at in range(1, steps):
            x[:, at] += 0.7 * x[:, at - 1]
        segment, channel, has = int(draw.integers(8)), int(draw.integers(channels)), bool(draw.random() < 0.5)
        if has:
            begin = min(max(int((segment + 0.5) * steps / 8) - 8, 0), steps - 16)
            wave = np.sin(np.pi * np.arange(16) / 2 + draw.uniform(0, 2 * np.pi))
            x[channel, begin : begin + 16] += 3.75 * wave * np.sqrt(np.hanning(16))
        x[draw.random(x.shape) < missing] = np.nan
        X.append(x)
        labels.append("burst" if has else "none")
        places.append((segment, channel))
    return X, np.array(labels), np.array(places)


def find_bursts(kind: str, seed: int) -> dict[str, Any]:
    """How often the planted burst's segment, and of several channels its segment and channel, has most evidence."""
    from heedful.series import SeriesClassifier

    draw = np.random.default_rng(seed)
    (X, y, _), (unseen, answers, places) = (bursts(draw, 200, **BURSTS[kind]) for _ in range(2))
    model = SeriesClassifier(random_state=seed, device="cpu").fit(X, y)
    evidence = model.evidence(unseen)
    scores = evidence.scores
    own = evidence.values[..., 0] - evidence.values[..., 1]  # burst, none
    has = answers == "burst"
    channels = own.shape[2]
    return {
        "kind": kind,
        "seed": seed,
        "accuracy": 100 * float(model.score(unseen, answers)),
        "segments": 100 * float((own.sum(2).argmax(1) == places[:, 0])[has].mean()),
        "cells": 100 * float((own.reshape(len(own), -1).argmax(1) == places @ (channels, 1))[has].mean()),
        "gap": float(np.abs(scores[:, 1] - scores[:, 0] - model.decision_function(unseen)).max()),
    }


def scale(count: int, steps: int) -> dict[str, Any]:
    """Processor seconds of one thread, and memory, of a fit of many long series; classes differ in their spectrum."""
    from heedful.series import SeriesClassifier

    draw = np.random.default_rng(0)
    X, y = draw.standard_normal((count, steps)), draw.integers(4, size=count)
    X[:, 1:] += (0.2 * y)[:, None] * X[:, :-1]
    model = SeriesClassifier(random_state=0, device="cpu")
    with one_thread():
        began, wall = time.process_time(), time.perf_counter()
        model.fit(X, y)
        seconds, wall = time.process_time() - began, time.perf_counter() - wall
    return {
        "series": count,
        "steps": steps,
        "cpu_seconds": seconds,
        "wall_seconds": wall,
        "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "loo_accuracy": 100 * model.loo_score_,
    }


def _scaled(size: tuple[int, int]) -> dict[str, Any]:
    # A process of its own: its memory is the fit's.
    with workers(1) as pool:
        return pool.submit(scale, *size).result()


def run(setting: Setting) -> dict[str, Any]:
    folder = setting.work / "data"
    names = prepare(folder)
    store = setting.store("ours")
    if setting.quick:
        names = [name for name in names if name in ("GunPoint", "ERing")] or names[:1]
        parts = {f"{name} {method} 0": (folder, name, method, 0) for name in names for method in OURS}
        fits = store.run(fit, parts)
        found = store.run(find_bursts, {"plain 0": ("plain", 0)})
        size = store.get("scale", lambda: _scaled((60, 100)))
        wanted, on_features, held_out = parts, {}, {}
    else:
        wanted = {
            f"{name} ours {seed}": (folder, name, "ours", seed)
            for some in (SETS, BESIDE)
            for seed in SEEDS
            for name in some
            if name in names and (name != rockets.LARGE or seed == 0)
        }
        found = {f"{kind} {seed}": (kind, seed) for seed in SEEDS for kind in BURSTS}  # type: ignore[misc]
        size_of = (10_000, 1_000)
        fits = store.run(fit, wanted, setting.jobs)
        found = store.run(find_bursts, found, setting.jobs)
        size = store.get("scale", lambda: _scaled(size_of)) if store.left > 0 or store.has("scale") else None
        ablations = {
            f"{name} {method} {seed}": (folder, name, method, seed)
            for seed in FEWER
            for method in ("linear + softmax", "softmax")
            for name in names
            if name != rockets.LARGE
        }
        network = {f"{name} {NETWORK} 0": (folder, name, NETWORK, 0) for name in names if _short(folder, name)}
        larger = [name for name in networks.LARGER if name in names]
        tokens = {
            f"{name} tokens {kind}": (folder, name, kind)
            for name in larger
            if name != rockets.LARGE
            for kind in networks.TOKENS
        }
        held_out = store.run(networks.hold_out, tokens, setting.jobs)
        pairs = {f"{name} on features {seed}": (folder, name, seed) for seed in FEWER for name in larger}
        on_features = store.run(networks.fit_on_features, pairs, setting.jobs)
        fits |= store.run(fit, ablations | network, setting.jobs)
        wanted = (
            wanted | ablations | network | {f"{name}, {kind}": () for name in pairs for kind in networks.ON_FEATURES}
        )
    return {
        "quick": setting.quick,
        "sets": {name: [len(part) for part in series.load(folder, name)] for name in names},
        "missing": [name for name in (*SETS, *BESIDE) if name not in names] if not setting.quick else [],
        "fits": [*fits.values(), *(row for rows in on_features.values() for row in rows)],
        "networks": [row for row in networks.measured_before() if row["set"] in names],
        "held_out": list(held_out.values()),
        "rivals": [row for row in rockets.results(setting.work) if row["set"] in names],
        "bursts": list(found.values()),
        "scale": size,
        "wanted": len(wanted),
    }


def _short(folder: Path, name: str) -> bool:
    """Whether a network is trained here: no steps beyond what an hour bears, and no figures in `primal-uea`."""
    steps = max(case.shape[-1] for part in series.load(folder, name) for case in part.X)
    most = LARGE_STEPS if name in networks.LARGER else STEPS
    return steps <= most and name not in {row["set"] for row in networks.measured_before()}


def collected(result: dict[str, Any], what: str = "accuracy") -> dict[str, dict[str, float]]:
    """Means over seeds by method and set."""
    values: dict[str, dict[str, list[float]]] = {}
    for row in (*result["fits"], *result["rivals"], *result["networks"]):
        if what in row:
            values.setdefault(row["method"], {}).setdefault(row["set"], []).append(row[what])
    return {method: {name: statistics.fmean(each) for name, each in rows.items()} for method, rows in values.items()}


def tables(result: dict[str, Any]) -> list[Block]:
    accuracy, times, predictions = (collected(result, what) for what in ("accuracy", "fit", "predict"))
    first = ["ours", MINI, MULTI, "Hydra", "1-NN DTW", "summaries, trees", "softmax", "linear + softmax", NETWORK]
    methods = [method for method in first if method in accuracy]
    names = list(result["sets"])
    main = [name for name in names if name in SETS]
    rows = [
        [name, " / ".join(map(str, result["sets"][name])), *(networks.shown(accuracy[m].get(name)) for m in methods)]
        for name in names
    ]
    whole = {m: [accuracy[m][name] for name in main if name in accuracy[m]] for m in methods}
    means = [f"**{statistics.fmean(whole[m]):.2f}**" if len(whole[m]) == len(main) else "" for m in methods]
    rows.append([f"**mean of the {len(main)}**", "", *means])
    timed = [m for m in methods if m in times]
    seconds = [
        [name, *(f"{times[m][name]:.1f} / {predictions[m][name]:.1f}" if name in times[m] else "" for m in timed)]
        for name in names
    ]
    blocks: list[Block] = [
        "Test accuracy in %, means over seeds: five; of softmax and linear + softmax three, of warping one, of the network five on the sets of `primal-uea` and one on others. On PenDigits one seed, of the network five.",
        Table(["data set", "train / test", *methods], rows, control=MINI if MINI in methods else ""),
        f"Left out, because no package here has them: {', '.join(result['missing'])}." if result["missing"] else "",
        *_bars(result, accuracy, times, predictions, main),
        *_attention(result),
        "Processor seconds of one thread for all series, fit / predict.",
        Table(["data set", *timed], seconds),
        *networks.blocks(result, accuracy),
        *_bursts(result),
        *_scale(result["scale"]),
    ]
    if len(result["fits"]) < result["wanted"]:
        blocks.append(f"- Incomplete: {len(result['fits'])} of {result['wanted']} fits.")
    return blocks


def _bars(
    result: dict[str, Any],
    accuracy: dict[str, dict[str, float]],
    times: dict[str, dict[str, float]],
    predictions: dict[str, dict[str, float]],
    names: list[str],
) -> list[Bar]:
    ours, bars = accuracy.get("ours", {}), []
    for rival in (MINI, MULTI):
        both = [name for name in names if name in ours and name in accuracy.get(rival, {})]
        if both:
            ahead = statistics.fmean(ours[name] - accuracy[rival][name] for name in both)
            bars.append(Bar(f"Points above {rival} in the mean of {len(both)} sets", ahead, 0, shown="+.2f"))
    both = [name for name in names if name in ours and name in accuracy.get(MINI, {})]
    if both:
        worst = min(both, key=lambda name: ours[name] - accuracy[MINI][name])
        gap = ours[worst] - accuracy[MINI][worst]
        bars.append(Bar(f"Points above {MINI} where it is worst, {worst}", gap, -3, shown="+.1f"))
    both = [name for name in names if name in ours and name in times.get(MULTI, {})]
    if both:
        slowest = max(both, key=lambda name: times["ours"][name] / times[MULTI][name])
        ratio = times["ours"][slowest] / times[MULTI][slowest]
        bars.append(Bar(f"Fit, times that of {MULTI}, where it is slowest, {slowest}", ratio, 3, False, ".2f"))
    if ours:

        def dear(name: str) -> float:
            learned, unseen = result["sets"][name]
            return (predictions["ours"][name] / unseen) / (times["ours"][name] / learned)

        dearest = max((name for name in names if name in ours), key=dear)
        bars.append(
            Bar(f"Prediction of a series, parts of its fit, where dearest, {dearest}", dear(dearest), 1, False, ".2f")
        )
    return bars


def _attention(result: dict[str, Any]) -> list[str]:
    """What softmax between segments adds to the same features, seed by seed."""
    rows = {(row["method"], row["set"], row["seed"]): row["accuracy"] for row in result["fits"]}
    lines = []
    for method in ("softmax", "linear + softmax"):
        pairs: dict[str, list[float]] = {}
        for (other, name, seed), value in rows.items():
            if other == method and name in SETS and ("ours", name, seed) in rows:
                pairs.setdefault(name, []).append(value - rows["ours", name, seed])
        gaps = {name: statistics.fmean(values) for name, values in pairs.items()}
        if len(gaps) > 5:
            from scipy.stats import wilcoxon

            chance = float(wilcoxon(list(gaps.values())).pvalue) if any(gaps.values()) else 1.0
            least, most = min(gaps, key=gaps.__getitem__), max(gaps, key=gaps.__getitem__)
            lines.append(
                f"- The ablation of attention, {method} against ours with the same features and seeds, {len(gaps)} sets: {statistics.fmean(gaps.values()):+.2f} "
                f"points (Wilcoxon p {chance:.2f}), from {gaps[least]:+.1f} on {least} to {gaps[most]:+.1f} on {most}."
            )
    return lines


def _bursts(result: dict[str, Any]) -> list[Block]:
    rows, bars = [], []
    for kind in BURSTS:
        own = [row for row in result["bursts"] if row["kind"] == kind]
        if own:
            means = {what: statistics.fmean(row[what] for row in own) for what in ("accuracy", "segments", "cells")}
            gap = max(row["gap"] for row in own)
            rows.append([kind, *(f"{means[what]:.1f}" for what in ("accuracy", "segments", "cells")), f"{gap:.0e}"])
            if kind == "plain":
                bars.append(
                    Bar("Planted bursts whose segment has most evidence, %", means["segments"], 95, shown=".1f")
                )
    if result["bursts"]:
        gap = max(row["gap"] for row in result["bursts"])
        bars.append(Bar("Largest gap between evidence and score", gap, 1e-6, False, ".0e"))
    return [
        "Planted bursts: % of unseen series whose burst is in the segment with most evidence (chance 12.5), in the segment and channel with most.",
        Table(["series", "accuracy", "segment", "segment and channel", "evidence less score"], rows),
        *bars,
    ]


def _scale(size: dict[str, Any] | None) -> list[Block]:
    if size is None:
        return []
    what = f"{size['series']:,} series of {size['steps']:,} steps"
    return [
        Bar(f"Processor seconds of one thread to fit {what}", size["cpu_seconds"], 300, False, ".0f"),
        Bar("Memory of that process, GB", size["gigabytes"], 8, False, ".1f"),
    ]

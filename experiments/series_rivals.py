"""Time series beside what one would take instead: MiniRocket, MultiRocket, Hydra, warped neighbours, trees; 17 sets and PLAID, and where the evidence lies.

Sets of the UCR and UEA archives with their own splits; five seeds where something is drawn. Ours is `SeriesClassifier()` as it comes:
"linear", because cross-validation on the training parts (one seed) had "linear + softmax" ahead by 0.15 points only, at several times the cost; "softmax" compares segments with segments by a kernel instead, "linear + softmax" does both with the same
features: the ablation of attention. "network" is `SeriesClassifier("softmax+primal")` as in `primal-uea`, for sets of up to 500 steps. Accuracy in %, processor
seconds of one thread for all series of a part. Rivals are measured by `rockets.py` in an environment of its own (its docstring has the commands), in the
same folder and on the same machine; this recipe writes the data for it, and shows what it finds. Sets that are in no package here are left out and named.

Evidence: in half of the drawn series a burst of 16 steps lies in one of eight segments; of the unseen ones that have it, how often is it the segment with most
evidence? Then 10,000 drawn series of 1,000 steps are fitted by one thread. "network on features" puts the convolution features of eight segments, brought to
64 components, into the network as eight steps: with attention, and without.

Half an hour of a core for ours, an hour for the ablations and the rivals; `--seconds` starts no further part.
"""

from __future__ import annotations

import resource
import statistics
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from experiments import rockets, series
from experiments.primal_uea import batch_size, epochs
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
SEEDS, FEWER = (0, 1, 2, 3, 4), (0,)
NETWORK, STEPS = "network", 500
ON_FEATURES = {"network on features": "softmax", "network on features, no attention": "none"}
LARGER = ("PLAID", "PenDigits", "JapaneseVowels", "OSULeaf")
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
    options: dict[str, Any] = OURS.get(method, {})
    if method == NETWORK:
        count = len(train)
        options = {"attention": "softmax+primal", "epochs": epochs(count), "batch_size": batch_size(count)}
        options["validation_fraction"] = None
    model = SeriesClassifier(random_state=seed, device="cpu", **options)
    return _measured(model, (train.X, train.y, test.X, test.y), {"method": method, "set": name, "seed": seed})


def fit_on_features(folder: Path, name: str, method: str, seed: int) -> dict[str, Any]:
    """The network on convolution features of eight segments."""
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import StandardScaler

    from heedful.series import SeriesClassifier, SeriesFeatures

    train, test = series.load(folder, name)
    features = SeriesFeatures(segments=8, features=2520, random_state=seed, device="cpu").fit(train.X)
    tokens, unseen = (features.transform(part.X).reshape(8 * len(part), -1) for part in (train, test))
    scale = StandardScaler().fit(tokens)
    components = PCA(64, whiten=True, svd_solver="randomized", random_state=seed).fit(scale.transform(tokens))
    X, unseen = (
        components.transform(scale.transform(part)).reshape(-1, 8, 64).swapaxes(1, 2) for part in (tokens, unseen)
    )
    count = len(train)
    model = SeriesClassifier(
        ON_FEATURES[method],
        epochs=epochs(count),
        batch_size=batch_size(count),
        validation_fraction=None,
        random_state=seed,
        device="cpu",
    )
    return _measured(model, (X, train.y, unseen, test.y), {"method": method, "set": name, "seed": seed})


def _measured(model: Any, data: tuple[Any, ...], about: dict[str, Any]) -> dict[str, Any]:
    X, y, unseen, answers = data
    _warm()
    with one_thread(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "[0-9]+ of [0-9]+ series are longer")
        began = time.process_time()
        model.fit(X, y)
        between = time.process_time()
        accuracy = 100 * float(np.mean(model.predict(unseen) == answers))
    return about | {"accuracy": accuracy, "fit": between - began, "predict": time.process_time() - between}


@cache
def _warm() -> None:
    """A first fit pays for imports; the rivals' do not count either."""
    from heedful.series import SeriesClassifier

    X = np.random.default_rng(0).standard_normal((8, 30))
    SeriesClassifier(features=84, device="cpu").fit(X, [0, 1] * 4).predict(X)


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
    short = [name for name in names if _steps(folder, name) <= STEPS]
    if setting.quick:
        names = [name for name in names if name in ("GunPoint", "ERing")] or names[:1]
        parts = {f"{name} {method} 0": (folder, name, method, 0) for name in names for method in OURS}
        fits = store.run(fit, parts)
        found = store.run(find_bursts, {"plain 0": ("plain", 0)})
        size = store.get("scale", lambda: _scaled((60, 100)))
        wanted, on_features = parts, {}
    else:
        wanted = {
            f"{name} ours {seed}": (folder, name, "ours", seed)
            for some in (SETS, BESIDE)
            for seed in SEEDS
            for name in some
            if name in names and (name != rockets.LARGE or seed == 0)
        }
        found = {f"{kind} {seed}": (kind, seed) for seed in SEEDS[:3] for kind in BURSTS}  # type: ignore[misc]
        size_of = (10_000, 1_000)
        fits = store.run(fit, wanted, setting.jobs)
        found = store.run(find_bursts, found, setting.jobs)
        size = store.get("scale", lambda: _scaled(size_of)) if store.left > 0 or store.has("scale") else None
        ablations = {
            f"{name} {method} {seed}": (folder, name, method, seed)
            for seed in FEWER
            for method in ("linear + softmax", "softmax")
            for name in names
            if name in SETS
        }
        network = {f"{name} {NETWORK} {seed}": (folder, name, NETWORK, seed) for seed in FEWER for name in short}
        tokens = {
            f"{name} {method} {seed}": (folder, name, method, seed)
            for seed in FEWER
            for name in LARGER
            if name in names
            for method in ON_FEATURES
        }
        on_features = store.run(fit_on_features, tokens, setting.jobs)
        fits |= store.run(fit, ablations | network, setting.jobs)
        wanted = wanted | ablations | network | tokens
    return {
        "quick": setting.quick,
        "sets": {name: [len(part) for part in series.load(folder, name)] for name in names},
        "missing": [name for name in (*SETS, *BESIDE) if name not in names] if not setting.quick else [],
        "fits": [*fits.values(), *on_features.values()],
        "rivals": [row for row in rockets.results(setting.work) if row["set"] in names],
        "bursts": list(found.values()),
        "scale": size,
        "wanted": len(wanted),
    }


def _steps(folder: Path, name: str) -> int:
    return max(case.shape[-1] for part in series.load(folder, name) for case in part.X)


def collected(result: dict[str, Any], what: str = "accuracy") -> dict[str, dict[str, float]]:
    """Means over seeds by method and set."""
    values: dict[str, dict[str, list[float]]] = {}
    for row in (*result["fits"], *result["rivals"]):
        values.setdefault(row["method"], {}).setdefault(row["set"], []).append(row[what])
    return {method: {name: statistics.fmean(each) for name, each in rows.items()} for method, rows in values.items()}


def tables(result: dict[str, Any]) -> list[Block]:
    accuracy, times, predictions = (collected(result, what) for what in ("accuracy", "fit", "predict"))
    first = ["ours", MINI, MULTI, "Hydra", "1-NN DTW", "summaries, trees", "softmax", "linear + softmax", NETWORK]
    methods = [method for method in first if method in accuracy]
    names = list(result["sets"])
    main = [name for name in names if name in SETS]
    rows = [
        [name, " / ".join(map(str, result["sets"][name])), *(_shown(accuracy[m].get(name)) for m in methods)]
        for name in names
    ]
    whole = {m: [accuracy[m][name] for name in main if name in accuracy[m]] for m in methods}
    means = [f"**{statistics.fmean(whole[m]):.2f}**" if len(whole[m]) == len(main) else "" for m in methods]
    rows.append([f"**mean of the {len(main)}**", "", *means])
    timed = [m for m in methods if m != NETWORK]
    seconds = [
        [name, *(f"{times[m][name]:.1f} / {predictions[m][name]:.1f}" if name in times[m] else "" for m in timed)]
        for name in names
    ]
    blocks: list[Block] = [
        "Test accuracy in %, means over seeds: five; of softmax, linear + softmax, the network and warping one, and on PenDigits one.",
        Table(["data set", "train / test", *methods], rows, control=MINI if MINI in methods else ""),
        f"Left out, because no package here has them: {', '.join(result['missing'])}." if result["missing"] else "",
        *_bars(result, accuracy, times, predictions, main),
        *_attention(result),
        "Processor seconds of one thread for all series, fit / predict.",
        Table(["data set", *timed], seconds),
        *_on_features(accuracy),
        *_bursts(result),
        *_scale(result["scale"]),
    ]
    if len(result["fits"]) < result["wanted"]:
        blocks.append(f"- Incomplete: {len(result['fits'])} of {result['wanted']} fits.")
    return blocks


def _shown(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"


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


def _on_features(accuracy: dict[str, dict[str, float]]) -> list[Block]:
    methods = [m for m in ("ours", NETWORK, *ON_FEATURES) if m in accuracy]
    names = [name for name in LARGER if all(name in accuracy.get(m, {}) for m in ON_FEATURES)]
    if not names:
        return []
    rows = [[name, *(_shown(accuracy[m].get(name)) for m in methods)] for name in names]
    return [
        "A network on convolution features of eight segments, on the larger sets.",
        Table(["data set", *methods], rows, control="network on features, no attention"),
    ]


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

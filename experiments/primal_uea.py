"""Time series of the UEA archive with five kinds of attention: Chen et al. 2023 (Primal-Attention), by a protocol without peeking.

Every set that is at hand keeps its own split. All training cases are learned from, for a number of epochs that was fixed
beforehand (100 as in the paper, but no more than 1,000 steps), and the last epoch is tested, once; five seeds. **The paper's
numbers are the best epoch on the test set**, of a network eight times as wide, with a rank and an eta chosen for each set:
they are printed beside ours, and are no target for it. Our network: width 64, 8 heads, hidden 256, 2 layers, flattened head,
batches of 16 (117 for PenDigits), RAdam 1e-3; rank 10, 5 rows per component (means of segments), eta 0.1 for every set.
"none" leaves attention out: tokens meet in the head alone. Beside them stands what one would take instead, MiniRocket with a ridge, as `series-rivals`
measured it on the same splits (five seeds; PenDigits one).

One process per core, two fewer beside a GPU. `--seconds 480` starts no fit later than that; the next run goes on.
"""

from __future__ import annotations

import statistics
import time
import warnings
from pathlib import Path
from typing import Any

from experiments import rockets, series
from experiments.recipe import FOLDER, Bar, Block, Setting, Table
from heedful.nn import Primal

PRIMAL = Primal(10, rank_multi=5)
ATTENTION: dict[str, list[Any]] = {
    "primal": [PRIMAL, PRIMAL],
    "softmax+primal": ["softmax", PRIMAL],
    "softmax": ["softmax", "softmax"],
    "linear": ["linear", "linear"],
    "none": ["none", "none"],
}
EPOCHS, STEPS = 100, 1_000

# Chen et al. 2023, table of UEA, in %: the best epoch on the test set.
PAPER = {
    "Handwriting": {"primal": 29.6, "softmax+primal": 28.7, "softmax": 32.0, "linear": 34.7},
    "JapaneseVowels": {"primal": 98.4, "softmax+primal": 98.9, "softmax": 98.7, "linear": 99.2},
    "UWaveGestureLibrary": {"primal": 86.3, "softmax+primal": 88.4, "softmax": 85.6, "linear": 85.0},
}
# (data set, attention): the least mean accuracy
BARS = {
    ("JapaneseVowels", "primal"): 97.0,
    ("JapaneseVowels", "softmax"): 97.5,
    ("UWaveGestureLibrary", "primal"): 82.0,
}
MARGIN = 0.5
RIVAL = "MiniRocket"


def batch_size(cases: int) -> int:
    """What `SeriesClassifier` takes by itself."""
    return min(max(16, cases // 64), 256)


def epochs(cases: int) -> int:
    return max(1, min(EPOCHS, STEPS // -(-cases // batch_size(cases))))


def fit(folder: Path, name: str, attention: str, seed: int, device: str, at_most: int) -> dict[str, Any]:
    """One network: trained on all training cases, tested once."""
    from heedful.series import SeriesClassifier

    train, test = series.load(folder, name)
    model = SeriesClassifier(
        ATTENTION[attention],
        epochs=min(at_most, epochs(len(train))),
        batch_size=batch_size(len(train)),
        validation_fraction=None,
        random_state=seed,
        device=device,
    )
    began = time.perf_counter()
    with warnings.catch_warnings():
        # A test series longer than all training series is cut, as in the paper.
        warnings.filterwarnings("ignore", "[0-9]+ of [0-9]+ series are longer")
        model.fit(train.X, train.y)
        accuracy = 100 * model.score(test.X, test.y)
    return {
        "set": name,
        "attention": attention,
        "seed": seed,
        "accuracy": accuracy,
        "last_loss": model.training_.epochs[-1].loss,
        "epochs": len(model.training_.epochs),
        "seconds": round(time.perf_counter() - began, 1),
    }


def run(setting: Setting) -> dict[str, Any]:
    folder = setting.work / "data"
    names = series.prepare(folder)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    at_most = EPOCHS
    if setting.quick:
        names, seeds, at_most = [name for name in names if name in ("BasicMotions", "ERing")] or names[:1], (0,), 2
    parts = {
        f"{name} {attention} {seed}": (folder, name, attention, seed, setting.device, at_most)
        for seed in seeds
        for name in names
        for attention in ATTENTION
    }
    rows = setting.store("fits").run(fit, parts, max(1, setting.jobs - 2 * setting.device.startswith("cuda")))
    sizes = {name: [len(part) for part in series.load(folder, name)] for name in names}
    return {
        "quick": setting.quick,
        "sets": {name: {"cases": size, "epochs": min(at_most, epochs(size[0]))} for name, size in sizes.items()},
        "fits": [rows[name] for name in parts if name in rows],
        "rival": rival(FOLDER / ".work" / "series-rivals", names),
        "wanted": len(parts),
    }


def rival(work: Path, names: list[str]) -> dict[str, list[float]]:
    """MiniRocket's accuracies by set, where `series-rivals` has measured them."""
    rows = [row for row in rockets.results(work) if row["method"] == RIVAL and row["set"] in names]
    return {name: [row["accuracy"] for row in rows if row["set"] == name] for name in names}


def collected(result: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Accuracies by set and attention, one for each seed."""
    accuracies: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in ATTENTION} for name in result["sets"]}
    for row in result["fits"]:
        accuracies[row["set"]][row["attention"]].append(row["accuracy"])
    return accuracies


def tables(result: dict[str, Any]) -> list[Block]:
    accuracies, beside = collected(result), result.get("rival", {})
    rows = [
        [
            name,
            " / ".join(map(str, about["cases"])),
            about["epochs"],
            *(_cell(accuracies[name][kind], PAPER.get(name, {}).get(kind)) for kind in ATTENTION),
            _cell(beside.get(name, []), None),
        ]
        for name, about in result["sets"].items()
    ]
    # A mean over sets compares kinds of attention, so it takes the sets on which all of them were run.
    whole = [name for name, kinds in accuracies.items() if all(kinds.values())]
    means = {
        kind: statistics.fmean(statistics.fmean(accuracies[name][kind]) for name in whole)
        for kind in ATTENTION
        if whole
    }
    if whole:
        others = [statistics.fmean(beside[name]) for name in whole if beside.get(name)]
        last = f"**{statistics.fmean(others):.1f}**" if len(others) == len(whole) else ""
        rows.append([f"**mean of {len(whole)} sets**", "", "", *(f"**{means[kind]:.1f}**" for kind in ATTENTION), last])
    fits = len(result["fits"])
    return [
        "Test accuracy in %, mean ± standard deviation over seeds; in brackets the paper's, the best epoch on the test set.",
        Table(["data set", "train / test", "epochs", *ATTENTION, RIVAL], rows, control="none"),
        *_bars(accuracies, means),
        *_control(accuracies, means, whole),
        f"- Incomplete: {fits} of {result['wanted']} fits." if fits < result["wanted"] else "",
    ]


def _cell(values: list[float], paper: float | None) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}" + ("" if paper is None else f" [{paper}]")


def _bars(accuracies: dict[str, dict[str, list[float]]], means: dict[str, float]) -> list[Bar]:
    bars = [
        Bar(f"Accuracy of {kind} on {name}, %", statistics.fmean(values), bar, shown=".1f")
        for (name, kind), bar in BARS.items()
        if (values := accuracies.get(name, {}).get(kind))
    ]
    if means:
        best = max(("primal", "softmax+primal"), key=means.__getitem__)
        ahead = means[best] - means["softmax"]
        bars.append(
            Bar(f"Points of the best primal kind, {best}, above softmax in the mean", ahead, -MARGIN, shown="+.1f")
        )
    return bars


def _control(accuracies: dict[str, dict[str, list[float]]], means: dict[str, float], whole: list[str]) -> list[str]:
    """What the network without attention says about these sets."""
    if not means:
        return []
    others = {kind: mean for kind, mean in means.items() if kind != "none"}
    best = max(others, key=others.__getitem__)
    gap = means["none"] - others[best]
    first = [
        name
        for name in whole
        if statistics.fmean(accuracies[name]["none"])
        >= max(statistics.fmean(accuracies[name][kind]) for kind in others)
    ]
    verdict = (
        f"The control wins: without any attention the mean is {means['none']:.1f} %, {gap:.1f} points above the best attention ({best})"
        if gap >= 0
        else f"Without any attention the mean is {means['none']:.1f} %, {-gap:.1f} points below the best attention ({best})"
    )
    beaten = [kind for kind in others if means["none"] >= others[kind]]
    worse = f"; it is no worse than {', '.join(beaten)}" if beaten and gap < 0 else ""
    alone = f"; on {', '.join(first)} nothing beats it" if first else "; on no set is it the best"
    return [f"- {verdict}{worse}{alone}."]

"""Does training move tokens by optimal transport? The study of Quadrio & Candelieri (2025), with and without its LayerNorm.

The block of the study (`clouds.py`: LayerNorm at the end of each residual branch) is trained for 100 epochs of RMSprop at 0.01, the whole training set as one
batch, on 45 instances of 20 tokens, and `lens.transport.TransportTracker` takes a snapshot of these 900 tokens after each epoch. Three seeds of data and
weights. Classes at ±1 (two) or with i = 2 (three), covariance 2 I, in 2 and in 6 dimensions.
"efficiency" is the straight distance by the length of the way, "by the thesis" the same as its code computes it, which is 0.047 or 0.058 at most for these numbers
of points, however straight the way. A "move" is what attention adds to a token, rounded to two decimals. The controls: a random pairing of the same tokens within their classes, and the same
block before any training. The tables of the thesis could not be obtained. Last, the time for the optimal plans to all 100 snapshots of 1,000 tokens, each plan started at
the one before, against as many plans from nothing: as `heedful.transport.assignment` finds them, by the network simplex of POT, and by scipy's search, which is
what the bar of a tenth was set for.
"""

from __future__ import annotations

import time
import warnings
from statistics import mean
from typing import Any

import torch

from experiments import clouds
from experiments.recipe import Bar, Block, Setting, Table
from experiments.symmetry import shown
from heedful.lens.transport import TransportTracker, distinct_moves
from heedful.transport import assignment

SEEDS = (0, 1, 2)
EPOCHS = 100
QUICK = {"instances": 18, "tokens": 5}
# Number of classes and how far they are apart, in the sheet's i.
WORLDS = {"two classes": (2, 1.0), "three classes": (3, 2.0)}
FEATURES = (2, 6)
FIGURES = ("optimality", "centred_optimality", "centred_baseline", "matching", "efficiency")


def _run(world: str, features: int, normed: bool, seed: int, quick: bool) -> dict[str, Any]:
    data = clouds.drawn(*WORLDS[world], features, seed, **QUICK if quick else {})
    torch.manual_seed(seed)
    model = clouds.Study(features, WORLDS[world][0], normed)
    with warnings.catch_warnings():
        # That a LayerNorm over two features leaves two values is what is measured.
        warnings.simplefilter("ignore")
        tracker, untrained = (TransportTracker(model, "block", data.x, data.y) for _ in range(2))
        attention = TransportTracker(model, lambda model, x: model.block.attended(x), data.x)
    untrained.record()
    _train(model, data, tracker, quick)
    attention.record()
    found, before = tracker.summary(), untrained.summary()
    tokens, instances = model.accuracies(data.test_x, data.test_y)
    return {
        "moves": distinct_moves(*attention.trajectory),
        **{name: getattr(found, name) for name in FIGURES},
        "thesis_efficiency": tracker.summary(metrics="thesis").efficiency,
        "untrained": {name: getattr(before, name) for name in FIGURES[:4]},
        "token_accuracy": tokens,
        "instance_accuracy": instances,
    }


def _train(model: clouds.Study, data: clouds.Clouds, tracker: TransportTracker, quick: bool) -> None:
    optimizer = clouds.optimizer(model)
    for _ in range(2 if quick else EPOCHS):
        optimizer.zero_grad()
        model.loss(data.x, data.y).backward()
        optimizer.step()
        tracker.record()


def _plans(features: int, normed: bool, quick: bool) -> dict[str, Any]:
    """Seconds for the optimal plan from the input to each snapshot: of the tracker's curve, and each from nothing."""
    from scipy.optimize import linear_sum_assignment
    from scipy.spatial.distance import cdist

    data = clouds.drawn(*WORLDS["two classes"], features, 0, **QUICK if quick else {"instances": 100})
    torch.manual_seed(0)
    model = clouds.Study(features, 2, normed)
    tracker = TransportTracker(model, "block", data.x)
    _train(model, data, tracker, quick)
    points = tracker.trajectory.reshape(len(tracker) + 1, -1, features)
    few = points[0, :5], points[1, :5]
    assignment(*few, start=assignment(*few))  # what is imported once is not timed
    began = time.thread_time()
    curve = tracker.curve()
    middle = time.thread_time()
    cold = [assignment(points[0], snapshot).cost for snapshot in points[1:]]
    ended = time.thread_time()
    for snapshot in points[1:]:
        linear_sum_assignment(cdist(points[0], snapshot, "sqeuclidean"))
    scipy = time.thread_time() - ended
    apart = max(abs(one / other - 1) for one, other in zip(curve.ot, cold, strict=True))
    return {"points": curve.points, "warm": middle - began, "cold": ended - middle, "scipy": scipy, "apart": apart}


def run(setting: Setting) -> dict[str, Any]:
    seeds = SEEDS[:1] if setting.quick else SEEDS
    parts = {
        f"{world}, {features} features, {'normed' if normed else 'free'}, seed {seed}": (world, features, normed, seed, setting.quick)
        for world in WORLDS for features in FEATURES for normed in (True, False) for seed in seeds
    }  # fmt: skip
    store = setting.store()
    done = store.run(_run, parts, setting.jobs)
    # One at a time: they are timed.
    timed = {f"plans, r = {features}": (features, False, setting.quick) for features in FEATURES}
    plans = store.run(_plans, timed) if len(done) == len(parts) else {}
    return {
        "quick": setting.quick,
        "runs": [
            {"world": world, "features": features, "normed": normed, "seed": seed, **done[part]}
            for part, (world, features, normed, seed, _) in parts.items() if part in done
        ],
        "plans": plans,
        "wanted": len(parts),
    }  # fmt: skip


def tables(result: dict[str, Any]) -> list[Block]:
    runs = result["runs"]

    def of(world: str, features: int, normed: bool, *names: str) -> list[float]:
        chosen = [one for one in runs if (one["world"], one["features"], one["normed"]) == (world, features, normed)]
        values = []
        for one in chosen:
            for name in names:
                one = one[name]
            values.append(one)
        return values

    rows, controls = [], []
    for world in WORLDS:
        for features in FEATURES:
            for normed in (True, False):
                key = world, features, normed
                if not of(*key, "moves"):
                    continue
                name = f"{world}, r = {features}, {'LayerNorm' if normed else 'no LayerNorm'}"
                moves = of(*key, "moves")
                figures = [shown(of(*key, figure), 3) for figure in FIGURES]
                rows.append([
                    name, f"{min(moves)}" if min(moves) == max(moves) else f"{min(moves)}-{max(moves)}", *figures,
                    shown(of(*key, "thesis_efficiency"), 3), shown(of(*key, "token_accuracy"), 3),
                ])  # fmt: skip
                controls.append([name, *(shown(of(*key, "untrained", figure), 3) for figure in FIGURES[:4])])
    columns = ["after training", "moves of attention", "optimality", "centred", "centred, random pairing", "matching", "efficiency", "by the thesis", "test accuracy of tokens"]  # fmt: skip
    return [
        Table(columns, rows, control="centred, random pairing"),
        "The same blocks before any training:",
        Table(["before training", "optimality", "centred", "centred, random pairing", "matching"], controls),
        *_bars(of),
        _beside(of),
        *_timed(result["plans"]),
        f"- Incomplete: {len(runs)} of {result['wanted']} runs." if len(runs) < result["wanted"] else "",
    ]


def _beside(of: Any) -> str:
    above = [
        mean(of(world, r, False, "centred_optimality")) - mean(of(world, r, False, "centred_baseline"))
        for world in WORLDS for r in FEATURES if of(world, r, False, "moves")
    ]  # fmt: skip
    if not above:
        return ""
    return (
        f"- Without LayerNorm, centred optimality lies {min(above):.3f} to {max(above):.3f} above that of a random pairing (means of runs): once the "
        "shift of the classes is taken out, this is what is left of the pairing of tokens and ends."
    )


def _timed(plans: dict[str, Any]) -> list[Block]:
    rows = [
        [
            name,
            one["points"],
            f"{one['warm']:.1f}",
            f"{one['cold']:.1f}",
            f"{one['scipy']:.1f}",
            f"{one['apart']:.0e}",
        ]
        for name, one in plans.items()
    ]
    columns = ["plans of all snapshots, no LayerNorm, no classes", "points", "seconds, each from the last", "seconds, each from nothing", "seconds of scipy, each from nothing", "largest relative difference of costs"]  # fmt: skip
    bars = [
        Bar(f"{name}: tracking as a share of as many {title}", one["warm"] / one[key], 0.10, False, ".3f")
        for name, one in plans.items()
        for key, title in (
            ("scipy", "cold solves by scipy"),
            ("cold", "cold solves by POT's simplex, ours from 500 points on"),
        )
    ]
    return [Table(columns, rows), *bars] if rows else []


def _bars(of: Any) -> list[Block]:
    def every(normed: bool, features: int, *names: str) -> list[float]:
        return [value for world in WORLDS for value in of(world, features, normed, *names)]

    normed, free = every(True, 2, "moves"), every(False, 2, "moves")
    centred = {kind: every(kind, 2, "centred_optimality") for kind in (True, False)}
    ceiling = [
        value / 0.058 for kind in (True, False) for r in FEATURES for value in every(kind, r, "thesis_efficiency")
    ]
    return [
        Bar("r = 2 with LayerNorm: most different moves of attention in any run", max(normed, default=None), 2, False),
        Bar("r = 2 without LayerNorm: fewest different moves of attention in any run", min(free, default=None), 800),
        Bar("r = 2: how much centred optimality falls without LayerNorm, means of runs", mean(centred[True]) - mean(centred[False]) if normed and free else None, 0.0, shown=".3f"),
        Bar("the largest efficiency by the thesis as a share of its ceiling of 0.058", max(ceiling, default=None), 1.0, False, ".3f"),
    ]  # fmt: skip

"""Re-ranking drawings of unseen alphabets by a trained network, alone and on top of k-reciprocal neighbours.

Contextual similarity aggregation (Ouyang et al. 2021; `heedful.ranking.ListReranker`) learns from the drawings of 136 characters, five alphabets of
Omniglot, 20 drawings each, as 64 numbers (`retrieval.py`), and re-ranks those of 106 characters of three other alphabets. Every drawing asks for the others of its
character, itself left out: mAP, and in brackets P@1, in percent. The first 128 results are re-scored by a network of 2 layers, 256 numbers and 4 heads; two or
three seeds where a deviation is shown.

The paper's figures are of landmarks, whose images cannot be had. "Reference" are figures of another implementation of the paper on these drawings, computed beforehand, one
seed; "cosine" there means the similarity in lists and tables, as published. "Parts of the database": each step searches a random half or more of it. "Three descriptions": the training
drawings as shades of grey and as directions of strokes as well, which the reference learned from for 60 epochs. Weight: the share of the query's cosine in the score, 0 as published.

How long the network on top of k-reciprocal neighbours is trained, on parts or not, and its weight are chosen on the training alphabets alone: fitted on two thirds of
the characters, measured on the others, with the first and with the last third left out. No attention is the control: each result is scored by its own row of similarities.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.recipe import Bar, Block, Setting, Table
from experiments.reranking import QUICK, WEIGHTS, figures, fitted, items, jobs, mean, method, places, shown
from experiments.retrieval import Items

TRAIN, TEST, POINTS = "omniglot train", "omniglot test", "omniglot points, test"
DESCRIPTIONS = (TRAIN, "omniglot points, train", "omniglot directions, train")
SETS = (*DESCRIPTIONS, TEST, POINTS)
WHOLE: dict[str, Any] = {"keep": (1.0, 1.0)}
PARTS: dict[str, Any] = {"keep": (0.5, 1.0)}
JACCARD: dict[str, Any] = {"affinity": "jaccard", "affinity_options": {"k1": 20, "k2": 6}}
# What training on top of k-reciprocal neighbours is chosen from.
CHOICES: dict[str, dict[str, Any]] = {
    **{f"{epochs} epochs": {"epochs": epochs} | WHOLE for epochs in (30, 10, 3, 1)},
    "10 epochs, parts": {"epochs": 10} | PARTS,
    "10 epochs, rate 1e-4": {"epochs": 10, "lr": 1e-4} | WHOLE,
    **{f"{epochs} epochs, 64 results": {"epochs": epochs, "candidates": 64} | WHOLE for epochs in (3, 1)},
}
# Name -> (options, whether in three descriptions, seeds, reference), in the order in which they are fitted.
CHOSEN = "jaccard, chosen"
BOTH = "cosine, 4 epochs, parts, three descriptions"
VARIANTS: dict[str, tuple[dict[str, Any], bool, int, float | None]] = {
    CHOSEN: (JACCARD, False, 3, None),
    "jaccard, chosen, no attention": (JACCARD | {"attention": "none"}, False, 3, None),
    "cosine, 1 epoch": ({"epochs": 1} | WHOLE, False, 3, 47.9),
    "cosine, 1 epoch, no attention": ({"epochs": 1, "attention": "none"} | WHOLE, False, 3, None),
    "jaccard, 30 epochs": ({"epochs": 30} | WHOLE | JACCARD, False, 3, 59.2),
    "cosine, 30 epochs": ({"epochs": 30} | WHOLE, False, 2, 49.9),
    BOTH: ({"epochs": 4} | PARTS, True, 1, 51.5),
}  # fmt: skip
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "cosine": ("cosine", {}),
    "k-reciprocal (20, 6, 0)": ("k-reciprocal", {"weight": 0.0}),
    "k-reciprocal (20, 6, 0.3)": ("k-reciprocal", {}),
    "diffusion (20, 0.9)": ("diffusion", {"k": 20, "alpha": 0.9}),
    "alpha-dba (5, 1)": ("alpha-dba", {"n": 5, "alpha": 1}),
}


def _items(work: Path, name: str, quick: bool) -> Items:
    return items(work, ("other small" if name in DESCRIPTIONS else "small") if quick else name)


def _held(work: Path, options: Mapping[str, Any] | None, fold: int, quick: bool, device: str) -> dict[str, Any]:
    """A fit measured on the characters that were left out of it; without options the figures of the cosine there."""
    X, y = _items(work, TRAIN, quick)
    order = np.unique(y)
    left = np.isin(y, order[: len(order) // 3] if fold == 0 else order[-(len(order) // 3) :])
    if options is None:
        return method("cosine", {}, Items(X[left], y[left]), device)
    options = {**options, **(QUICK | {"affinity_options": {"k1": 5, "k2": 2}} if quick else {})}
    return fitted(Items(X[~left], y[~left]), {"held out": Items(X[left], y[left])}, options, 0, device)


def _fit(work: Path, options: Mapping[str, Any], several: bool, seed: int, quick: bool, device: str) -> dict[str, Any]:
    learn = [_items(work, name, quick) for name in DESCRIPTIONS] if several else _items(work, TRAIN, quick)
    tests = {name: _items(work, name, quick) for name in (TEST, POINTS)}
    options = {**options, **(QUICK if quick else {})}
    return fitted(learn, tests, options, seed, device)


def _method(work: Path, name: str, quick: bool, device: str) -> dict[str, Any]:
    called, options = METHODS[name]
    return {test: method(called, options, _items(work, test, quick), device) for test in (TEST, POINTS)}


def _chosen(done: Mapping[str, Any]) -> tuple[str, float] | None:
    """The setting and the weight of largest mAP on characters left out, of those that lose no first places there; once all were tried."""
    found, firsts = {}, [f"held out, cosine, fold {fold}" for fold in range(2)]
    if not all(part in done for part in firsts):
        return None
    first = np.mean([done[part]["first"] for part in firsts])
    for name in CHOICES:
        parts = [f"held out, {name}, fold {fold}" for fold in range(2)]
        if not all(part in done for part in parts):
            return None
        for weight in WEIGHTS:
            of = figures(done, parts, "held out", weight)
            loses = np.mean([one["first"] for one in of]) < first
            found[name, weight] = (not loses, np.mean([one["map"] for one in of]))
    return max(found, key=lambda at: found[at])


def run(setting: Setting) -> dict[str, Any]:
    store, quick, work, device = setting.store(), setting.quick, setting.work, setting.device
    done = store.run(_method, {f"method, {name}": (work, name, quick, device) for name in METHODS})
    choices = {
        f"held out, {name}, fold {fold}": (work, options | JACCARD, fold, quick, device)
        for name, options in CHOICES.items()
        for fold in range(2)
    } | {f"held out, cosine, fold {fold}": (work, None, fold, quick, device) for fold in range(2)}
    done |= store.run(_held, choices, jobs(setting))
    chosen = _chosen(done)
    parts = {}
    for name, (options, several, seeds, _) in VARIANTS.items():
        if "chosen" in name:
            if chosen is None:
                continue
            options = CHOICES[chosen[0]] | options
        for seed in range(1 if quick else seeds):
            parts[f"{name}, seed {seed}"] = (work, options, several, seed, quick, device)
    done |= store.run(_fit, parts, jobs(setting))
    wanted = sum(1 if quick else seeds for _, _, seeds, _ in VARIANTS.values())
    finished = sum(
        f"{name}, seed {seed}" in done for name, (_, _, seeds, _) in VARIANTS.items() for seed in range(seeds)
    )
    return {"quick": quick, "parts": done, "chosen": chosen and list(chosen), "wanted": wanted, "finished": finished}  # fmt: skip


def tables(result: dict[str, Any]) -> list[Block]:
    done, chosen = result["parts"], result["chosen"]
    weight = chosen[1] if chosen else 0.05
    folds = {name: [f"held out, {name}, fold {fold}" for fold in range(2)] for name in CHOICES}
    cosines = [done[part] for part in (f"held out, cosine, fold {fold}" for fold in range(2)) if part in done]
    blocks: list[Block] = [
        "Training alphabets alone, two thirds of the characters learned from, the others measured: mAP (P@1), the mean of both thirds, by the weight of the cosine. Taken is the largest mAP that loses no first places:",
        Table(
            ["k-reciprocal neighbours, then", *(f"{each:g}" for each in WEIGHTS)],
            [
                ["nothing but the cosine", *([_pair(cosines)] * len(WEIGHTS))],
                *(
                    [name, *(_pair(figures(done, parts, "held out", each)) for each in WEIGHTS)]
                    for name, parts in folds.items()
                ),
            ],
        ),
    ]
    if chosen:
        blocks.append(f"So: {chosen[0]}, weight {chosen[1]:g}.")
    rows: list[list[object]] = [
        [name, "", _pair([done[f"method, {name}"][TEST]]), "", _pair([done[f"method, {name}"][POINTS]]), "", ""]
        for name in METHODS
        if f"method, {name}" in done
    ]
    for name, (_, _, seeds, reference) in VARIANTS.items():
        parts = [f"{name}, seed {seed}" for seed in range(seeds)]
        seconds = mean([done[part]["seconds"] for part in parts if part in done])
        for each in dict.fromkeys((0.0, weight)):
            found = figures(done, parts, TEST, each)
            if found:
                rows.append([
                    name, f"{each:g}", shown(found), f"{reference:.1f}" if reference and not each else "",
                    shown(figures(done, parts, POINTS, each)), len(found), f"{seconds:.0f}",
                ])  # fmt: skip
    blocks += [
        "The unseen alphabets; last but two the same network on shades of grey instead, 1,225 numbers that it was not fitted on (but in three descriptions):",
        Table(["lists and tables", "weight", "mAP (P@1)", "reference", "shades of grey", "seeds", "seconds of training"], rows, control="cosine"),
    ]  # fmt: skip
    if not result["quick"]:
        blocks += _bars(done, weight)
    blocks.append(places(done))
    if result["finished"] < result["wanted"]:
        blocks.append(f"- Incomplete: {result['finished']} of {result['wanted']} fits.")
    return blocks


def _pair(found: list[dict[str, float]]) -> str:
    return shown([{key: float(np.mean([one[key] for one in found])) for key in ("map", "first")}]) if found else ""


def _bars(done: Mapping[str, Any], weight: float) -> list[Block]:
    def of(name: str, each: float = 0.0, key: str = "map", test: str = TEST) -> float | None:
        parts = [f"{name}, seed {seed}" for seed in range(VARIANTS[name][2])]
        return mean([one[key] for one in figures(done, parts, test, each)])

    cosine = done["method, cosine"]
    ours = [
        one["map"]
        for name, (_, _, seeds, _) in VARIANTS.items()
        for one in figures(done, [f"{name}, seed {seed}" for seed in range(seeds)], TEST, 0.0)
    ]
    best = max(done[f"method, {name}"][TEST]["map"] for name in METHODS)
    return [
        Bar("cosine, one epoch: mAP", of("cosine, 1 epoch"), 47.0, shown=".2f"),
        Bar("cosine, 30 epochs: mAP", of("cosine, 30 epochs"), 49.5, shown=".2f"),
        Bar("cosine, both augmentations: mAP", of(BOTH), 51.0, shown=".2f"),
        Bar("the least mAP of any variant beside cosine's", min(ours) if ours else None, cosine[TEST]["map"], shown=".2f"),
        Bar("jaccard, chosen, weight 0: mAP", of(CHOSEN), 58.8, shown=".2f"),
        Bar("jaccard, 30 epochs, weight 0: mAP", of("jaccard, 30 epochs"), 58.8, shown=".2f"),
        Bar("jaccard, chosen: mAP", of(CHOSEN, weight), 59.5, shown=".2f"),
        Bar("jaccard, chosen: P@1 beside cosine's", of(CHOSEN, weight, "first"), cosine[TEST]["first"], shown=".2f"),
        Bar("jaccard, chosen: mAP beside the best method without training", of(CHOSEN, weight), best, shown=".2f"),
        Bar("fitted on 64 numbers, used on shades of grey: mAP beside their cosine's", of("cosine, 30 epochs", test=POINTS), cosine[POINTS]["map"], shown=".2f"),
    ]  # fmt: skip

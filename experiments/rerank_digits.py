"""Re-ranking digits of 8 x 8 points by a network that was fitted on other digits.

The 1,797 digits of scikit-learn, pixels less their mean, in two halves: 0 to 4 and 5 to 9. `heedful.ranking.ListReranker` learns from one half and re-ranks the
other: every image asks for the others of its digit, itself left out, among those of its half. mAP, and in brackets P@1, in percent; the mean over both directions stands in the bars.

A digit has about 180 images and its half 900; the first 128 results are re-scored by a network of 2 layers, 128 numbers and 4 heads, one seed, since a CPU should do. With similarities of k-reciprocal neighbours or diffused ones the network starts from the lists of that method.
No attention is the control: each result is scored by its own row of similarities. The paper's figures are of landmarks, whose images cannot be had.
"""

from __future__ import annotations

from typing import Any

from experiments.recipe import Bar, Block, Setting
from experiments.reranking import QUICK, WEIGHT, Study

HALVES = ("digits 0 to 4", "digits 5 to 9")
LONG: dict[str, Any] = {"candidates": 128, "embed_dim": 128, "epochs": 5, "keep": (1.0, 1.0)}
AFFINITIES: dict[str, dict[str, Any]] = {
    "cosine": {},
    "jaccard": {"affinity": "jaccard", "affinity_options": {"k1": 50, "k2": 10}},
    "diffusion": {"affinity": "diffusion", "affinity_options": {"k": 20, "alpha": 0.99}},
}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "cosine": ("cosine", {}),
    "alpha-dba (20, 3)": ("alpha-dba", {"n": 20, "alpha": 3}),
    "k-reciprocal (20, 6, 0.3)": ("k-reciprocal", {}),
    "k-reciprocal (50, 10, 0)": ("k-reciprocal", {"k1": 50, "k2": 10, "weight": 0.0}),
    "diffusion (20, 0.99)": ("diffusion", {"k": 20, "alpha": 0.99}),
}
SETS = HALVES


def _studies(quick: bool) -> list[Study]:
    """One for each direction."""
    pairs = (("other small", "small"),) if quick else (HALVES[::-1], HALVES)
    size = QUICK | {"anchors": None} if quick else {}
    kinds = AFFINITIES | {"cosine, no attention": {"attention": "none"}}
    return [
        Study(
            (test,),
            METHODS,
            {f"{learn}: {kind}": ((learn,), LONG | options | size, 1) for kind, options in kinds.items()},
        )
        for learn, test in pairs
    ]


def run(setting: Setting) -> dict[str, Any]:
    studies = [study.run(setting) for study in _studies(setting.quick)]
    parts = {name: part for study in studies for name, part in study["parts"].items()}
    return {"quick": setting.quick, "parts": parts, "wanted": sum(study["wanted"] for study in studies)}


def tables(result: dict[str, Any]) -> list[Block]:
    done, quick = result["parts"], result["quick"]
    studies = _studies(quick)
    blocks: list[Block] = []
    for study in studies:
        blocks += [f"Asked: {study.tests[0]}:", study.table(done)]

    def both(kind: str, key: str = "map") -> float | None:
        """The mean over both directions, of a method or, with a colon in front, of a re-ranker by its similarity."""
        found = []
        for study in studies:
            name = next(fit for fit in study.fits if fit.endswith(kind)) if kind.startswith(":") else kind
            found.append(study.of(done, name, study.tests[0], WEIGHT, key))
        return None if None in found else sum(one for one in found if one is not None) / len(found)

    if not quick:
        best = max((each for name in METHODS if (each := both(name)) is not None), default=None)
        blocks += [
            Bar("tables of cosines: mAP beside that of the plain search", both(": cosine"), both("cosine"), shown=".2f"),
            Bar("on top of diffusion: mAP beside diffusion's", both(": diffusion"), both("diffusion (20, 0.99)"), shown=".2f"),
            Bar("on top of diffusion: mAP beside the best method's", both(": diffusion"), best, shown=".2f"),
            Bar("on top of diffusion: P@1 beside that of the plain search", both(": diffusion", "first"), both("cosine", "first"), shown=".2f"),
        ]  # fmt: skip
    blocks.append(studies[0].left(result))
    return blocks

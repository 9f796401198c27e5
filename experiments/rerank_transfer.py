"""Re-rankers fitted on one kind of data and used on others: characters, digits, clothes, texts, clouds and arcs of points.

A `heedful.ranking.ListReranker` sees similarities alone, so that it can be used on vectors of another dimension, model and kind. Here it is fitted on characters (Omniglot's training
alphabets), on texts (docstrings of scikit-learn), on drawn clouds, and on all of these together, each set in dimensions of its own; and it re-ranks every set of `rerank-baselines`.
Each item asks for the others of its class, itself left out: mAP, and in brackets P@1, in percent, weight 0.05 of the cosine; the first 128 results are re-scored. Characters, texts and clouds
of the tests are of kinds that a network was fitted on, with other classes; digits, clothes and arcs are not.

"Clouds": 200 others than those of the test, gone through once. One seed. One bar asks whether a re-ranker should come with the package: it
should if one that was fitted on all free data gains more on average, on the sets of a kind that it has not seen, than the k-reciprocal re-ranking that it starts from. Arcs are a world where it
should not win: similarity must travel along them, which diffusion does and a list of 128 does not.
"""

from __future__ import annotations

from typing import Any

from experiments.recipe import Bar, Block, Setting
from experiments.reranking import QUICK, WEIGHT, Study, mean

TESTS = ("omniglot test", "digits", "fashion900", "mnist2k", "scipy docstrings", "clusters", "arcs")
UNSEEN = ("digits", "fashion900", "mnist2k", "arcs")
TRAINING = ("omniglot train", "sklearn docstrings", "other clusters")
WHOLE: dict[str, Any] = {"keep": (1.0, 1.0)}
JACCARD: dict[str, Any] = {"affinity": "jaccard"}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "cosine": ("cosine", {}),
    "alpha-dba (5, 1)": ("alpha-dba", {"n": 5, "alpha": 1}),
    "k-reciprocal (20, 6, 0)": ("k-reciprocal", {"weight": 0.0}),
    "k-reciprocal (20, 6, 0.3)": ("k-reciprocal", {}),
    "diffusion (20, 0.9)": ("diffusion", {"k": 20, "alpha": 0.9}),
}
# The one that could come with the package.
PRETRAINED = "all: jaccard"
FITS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "all: jaccard": (TRAINING, {"epochs": 3} | WHOLE | JACCARD),
    "clouds: jaccard": (("more clusters",), {"epochs": 1} | WHOLE | JACCARD),
    "characters: jaccard": (TRAINING[:1], {"epochs": 3} | WHOLE | JACCARD),
    "texts: jaccard": (TRAINING[1:2], {"epochs": 10} | WHOLE | JACCARD),
    "all: jaccard, no attention": (TRAINING, {"epochs": 3, "attention": "none"} | WHOLE | JACCARD),
    "characters: cosine": (TRAINING[:1], {"epochs": 10}),
    "texts: cosine": (TRAINING[1:2], {"epochs": 30}),
}


def _study(quick: bool) -> Study:
    if quick:
        fits = {
            name: (("other small", "small") if name.startswith("all") else ("other small",), options | QUICK, 1)
            for name, (_, options) in FITS.items()
        }
        return Study(("small",), METHODS, fits)
    fits = {name: (names, options, 1) for name, (names, options) in FITS.items()}
    return Study(TESTS, METHODS, fits, kept=PRETRAINED)


SETS = _study(False).sets


def run(setting: Setting) -> dict[str, Any]:
    return _study(setting.quick).run(setting)


def tables(result: dict[str, Any]) -> list[Block]:
    study, done = _study(result["quick"]), result["parts"]
    blocks: list[Block] = [study.table(done, (WEIGHT,))]
    if not result["quick"]:

        def gain(name: str, tests: tuple[str, ...], key: str = "map") -> float | None:
            """Points over the cosine, the mean over tests."""
            pairs = [(study.of(done, name, test, key=key), study.of(done, "cosine", test, key=key)) for test in tests]
            found = [one - other for one, other in pairs if one is not None and other is not None]
            return mean(found) if len(found) == len(tests) else None

        neighbours = "k-reciprocal (20, 6, 0)"
        blocks += [
            Bar("fitted on characters, cosine: points of mAP over the cosine on the five other kinds but arcs", gain("characters: cosine", TESTS[1:6]), 0.0, shown=".2f"),
            Bar("characters, cosine, weight 0, on clouds: mAP beside 65.9 of another implementation that was fitted on clouds", study.of(done, "characters: cosine", "clusters", 0.0), 65.9, shown=".2f"),
            Bar("clouds, jaccard, on clouds: mAP beside the best method's", study.of(done, "clouds: jaccard", "clusters"), max((each for name in METHODS if (each := study.of(done, name, "clusters")) is not None), default=None), shown=".2f"),
            Bar("fitted on all, jaccard, kinds it has not seen: points of mAP over the cosine, beside k-reciprocal neighbours'", gain("all: jaccard", UNSEEN), gain(neighbours, UNSEEN), shown=".2f"),
            Bar("the same, all seven sets", gain("all: jaccard", TESTS), gain(neighbours, TESTS), shown=".2f"),
            Bar("fitted on all, jaccard, all seven sets: points of P@1 over the cosine", gain("all: jaccard", TESTS, "first"), 0.0, shown=".2f"),
        ]  # fmt: skip
    blocks.append(study.left(result))
    return blocks

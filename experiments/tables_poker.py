"""Poker hands: which of ten classes five cards are, a table that no single column says anything of (Kossen et al. 2021, table 2).

The hands are drawn (`poker.py`): 25,000 at random and five each of the two rarest classes make the 25,010 to learn from that the published
table has; 50,000 others, all at random, are the test. Half of all hands hold nothing, so that this is the accuracy to beat; "by class" is
the mean of the classes' accuracies among those that the test has. Ours is given suits and ranks as categories; boosted trees have suits as
categories and ranks as numbers, as they come and with 1,000 rounds (LightGBM's then with leaves of weight 1 at least, as XGBoost's are: as
it comes it diverges on the rare classes). Three seeds of ours, one of the rivals.

The paper's NPT took 200,000 steps of 4,096 rows, class-balanced, and a network of 8 blocks; ours has what fits into minutes: `fast` as it
comes, and `small`, which has attention between columns, for 200 epochs (5,000 steps). The published rivals were tuned over a grid, those
here were not. "rows apart", the control, sees no other rows; the random forest on sorted cards (ranks in order, steps between them, number
of suits) is what somebody does who knows the game.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments import poker, tabular
from experiments import rivals as others
from experiments.recipe import Bar, Block, Setting, Table
from experiments.rivals import FOREST
from experiments.symmetry import mean, shown

SEEDS = (0, 1, 2)
TEST = 50_000
FAST, APART, SMALL = "ours, fast", "ours, fast, rows apart", "ours, small, 200 epochs"
OURS: dict[str, dict[str, Any]] = {
    FAST: {"preset": "fast"},
    APART: {"preset": "fast", "between_rows": False},
    SMALL: {"preset": "small", "epochs": 200, "p_feature": 0.0},
}
SORTED = "random forest on sorted cards"
RIVALS = ("linear", "LightGBM", "LightGBM, 1,000 rounds", "XGBoost", "XGBoost, 1,000 rounds", SORTED, "CatBoost")
QUICK: dict[str, Any] = {"epochs": 1, "members": 1}
# Accuracy in percent: Kossen et al. 2021, table 2
PAPER = {"CatBoost": 99.2, "XGBoost": 95.9, "LightGBM": 92.8}
NPT = 99.3


def _hands(quick: bool) -> tuple[np.ndarray, np.ndarray]:
    """Hands to learn from, and of the test."""
    random = np.random.default_rng(0)
    drawn, test = (300, 200) if quick else (poker.TRAIN - 10, TEST)
    return np.concatenate((poker.dealt(drawn, random), poker.rare(5, random))), poker.dealt(test, random)


def _asked(kind: str, quick: bool) -> tuple[tabular.Data, np.ndarray, np.ndarray]:
    learn, test = _hands(quick)
    both = np.concatenate((learn, test))
    places = np.arange(len(both))
    if kind == "sorted":
        data = poker.sorted_table(both)
    else:
        data = poker.table(both, poker.SUITS if kind == "suits" else tuple(range(2 * poker.CARDS)))
    return data, places[: len(learn)], places[len(learn) :]


def _rival(name: str, quick: bool) -> dict[str, Any]:
    kind = "sorted" if name == SORTED else "all" if name == "linear" else "suits"
    return others.fitted(FOREST if name == SORTED else name, *_asked(kind, quick))


def _ours(name: str, seed: int, quick: bool, device: str) -> dict[str, Any]:
    return tabular.ours(*_asked("all", quick), OURS[name] | (QUICK if quick else {}), seed, device)


def rivals(setting: Setting, jobs: int) -> dict[str, Any]:
    """Finished parts of all rivals whose package is here."""
    store = setting.store()
    names = ("linear", SORTED) if setting.quick else RIVALS
    packages = {name: FOREST if name == SORTED else name for name in names}
    there = others.possible(store, {name: (name, setting.quick) for name in names}, packages)
    return store.run(_rival, there, jobs)


def _classes(quick: bool) -> dict[str, Any]:
    learn, test = _hands(quick)
    formula = poker.counts()
    return {
        "formula": list(formula),
        "agrees": True if quick else poker.every_count() == formula,
        **{
            name: np.bincount(poker.worth(hands), minlength=10).tolist()
            for name, hands in (("learned", learn), ("tested", test))
        },
    }


def run(setting: Setting) -> dict[str, Any]:
    quick, store = setting.quick, setting.store()
    classes = store.get("classes", lambda: _classes(quick))
    beside = rivals(setting, setting.jobs)
    names = (FAST, APART) if quick else tuple(OURS)
    parts = {
        f"{name}, seed {seed}": (name, seed, quick, setting.device)
        for name in names
        for seed in (SEEDS[:1] if quick else SEEDS)
    }
    # The longest first.
    order = sorted(parts, key=lambda part: SMALL not in part)
    done = store.run(_ours, {part: parts[part] for part in order}, setting.jobs)
    return {
        "quick": quick,
        "classes": classes,
        "rivals": beside,
        "fits": [{"model": parts[part][0], **done[part]} for part in parts if part in done],
        "wanted": len(parts),
    }


def tables(result: dict[str, Any]) -> list[Block]:
    classes, fits, beside = result["classes"], result["fits"], result["rivals"]
    total, tested = sum(classes["formula"]), sum(classes["tested"])
    most = classes["tested"][0] / tested
    rows: list[list[object]] = [["always nothing", f"{100 * most:.2f}", "", "", "", None]]
    for name in OURS:
        found = [fit for fit in fits if fit["model"] == name]
        if found:
            rows.append([
                name, shown([100 * fit["accuracy"] for fit in found], 2), shown([100 * fit["balanced"] for fit in found], 1),
                shown([fit["nll"] for fit in found]), f"{mean([fit['seconds'] for fit in found]):.0f}", None,
            ])  # fmt: skip
    for name, row in beside.items():
        rows.append([
            name, f"{100 * row['accuracy']:.2f}", f"{100 * row['balanced']:.1f}", f"{row['nll']:.3f}", f"{row['seconds']:.0f}",
            PAPER.get(name),
        ])  # fmt: skip
    rows += [[f"{name} (published)", "", "", "", "", value] for name, value in PAPER.items() if name not in beside]
    rows.append(["NPT (published)", "", "", "", "", NPT])
    return [
        tabular.fitted_on(fits),
        "Accuracy in percent, mean (lowest-highest) over seeds where there are several:",
        Table(["model", "accuracy", "by class", "-log p", "seconds", "published"], rows, paper="published", control=APART if any(fit["model"] == APART for fit in fits) else ""),
        "The classes, over all hands and in both parts:",
        Table(
            ["class", "hands, by formula", "share", "learned from", "tested on"],
            [
                [name, f"{count:,}", f"{100 * count / total:.4f} %", *(classes[part][label] for part in ("learned", "tested"))]
                for label, (name, count) in enumerate(zip(poker.NAMES, classes["formula"], strict=True))
            ],
        ),
        Bar("classes counted over all hands are those of the formula", float(classes["agrees"])),
        f"- Incomplete: {len(fits)} of {result['wanted']} fits." if len(fits) < result["wanted"] else "",
    ]  # fmt: skip

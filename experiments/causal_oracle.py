"""Causal learners against brute force, against the truth where brute force cannot go, and beside causal-learn.

Small graphs (5-6 observed nodes, 2-3 latent): tests are answered by d-separation, and the learned graph must be what all Markov-equivalent
MAGs share, listed one by one. Ordered ICD is compared with the MAGs in which the later node of an edge never has a tail.

Larger graphs (8-10 observed nodes, 3 latent, degree 3; with selection 3 more): a tail must be at an ancestor of the other end or of a
selected node, an arrowhead must not. A graph is false if one mark breaks this. causal-learn gets the same oracle; its rules R5 and R10
are replaced by ours in turn. Without selection its R5, which it always applies, is counted as well.

Decisions: marks that follow from causal-learn's own skeleton and separating sets on 60 samples (10 observed nodes, 3 latent, N = 1000,
alpha = 0.01), ours beside its own, and beside it with an R4 that asks the recorded sets and no further tests. Whole runs differ further in which possible-d-sep sets are tested: causal-learn's search never goes farther than two
edges (it keeps the first node of each pair), and takes nodes that cause neither end.

Speed: processor time of one thread, the least of several runs, in one process: FCI on 60 nodes (12 latent, degree 2.5, N = 1000), ICD on 30, 40 and 60.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import numpy as np

from experiments import sem
from experiments.recipe import Block, Setting, Table
from heedful._text import quantity

ARROW, TAIL = 2, 3


def small(seed: int, graphs: int, selection: bool) -> dict[str, int]:
    """How many of these graphs each learner gets right, by brute force; tests of ICD and ordered ICD."""
    from tests.brute_force import brute_pag, random_dag, topological

    from heedful.discovery import DSeparation, fci, icd

    rng = np.random.default_rng(seed)
    counts = dict.fromkeys(("graphs", "icd", "stable", "fci", "ordered", "icd_tests", "ordered_tests"), 0)
    while counts["graphs"] < graphs:
        chosen = int(rng.integers(1, 3)) if selection else 0
        degree = rng.uniform(1.5, 2.5 if selection else 3.0)
        parents, observed, selected = random_dag(rng, int(rng.integers(5, 7)), int(rng.integers(2, 4)), chosen, degree)
        oracle = DSeparation(parents, observed=observed, selection=selected)
        plain = icd(oracle, selection_bias=selection)
        true = brute_pag(parents, observed, selected)
        counts["graphs"] += 1
        counts["icd"] += bool((plain.marks == true).all())
        counts["stable"] += bool((icd(oracle, selection_bias=selection, stable=True).marks == true).all())
        counts["fci"] += bool((fci(oracle, selection_bias=selection).marks == true).all())
        if not selection:
            order = [observed.index(v) for v in topological(parents) if v in observed]
            ordered = icd(oracle, order=order)
            counts["ordered"] += bool((ordered.marks == brute_pag(parents, observed, order=order)).all())
            counts["icd_tests"] += len(plain.tests)
            counts["ordered_tests"] += len(ordered.tests)
    return counts


def large(seed: int, graphs: int, selection: int) -> dict[str, int]:
    """In how many graphs a definite mark is false: of ICD, of FCI, and of causal-learn with rules of its own or ours."""
    from tests.brute_force import random_dag

    from heedful.discovery import DSeparation, fci, icd

    rng = np.random.default_rng(seed)
    counts = dict.fromkeys(
        ("graphs", "icd", "fci", "icd_is_fci", "causal_learn", "r5_ours", "r10_ours", "both_ours"), 0
    )
    for _ in range(graphs):
        parents, observed, selected = random_dag(rng, int(rng.integers(8, 11)), 3, selection, 3.0)
        oracle = DSeparation(parents, observed=observed, selection=selected)
        one, two = icd(oracle, selection_bias=bool(selection)), fci(oracle, selection_bias=bool(selection))
        counts["graphs"] += 1
        counts["icd_is_fci"] += bool((one.marks == two.marks).all())
        counts["icd"] += _false(one.marks, parents, observed, selected)
        counts["fci"] += _false(two.marks, parents, observed, selected)
        for name, rules in (("causal_learn", ()), ("r5_ours", (5,)), ("r10_ours", (10,)), ("both_ours", (5, 10))):
            counts[name] += _false(_theirs(oracle, rules, bool(selection)), parents, observed, selected)
    return counts


def _false(marks: np.ndarray, parents: list[list[int]], observed: list[int], selected: list[int]) -> bool:
    from tests.brute_force import topological

    n = len(parents)
    ancestor = np.zeros((n, n), bool)
    for v in topological(parents):
        for parent in parents[v]:
            ancestor[:, v] |= ancestor[:, parent]
            ancestor[parent, v] = True
    seen = ancestor[np.ix_(observed, observed)] | ancestor[np.ix_(observed, selected)].any(axis=1)[:, None]
    # marks[i, j] is at j: a tail says that j is an ancestor.
    return bool((~seen.T[marks == TAIL]).any() or seen.T[marks == ARROW].any())


def _theirs(oracle: Any, rules: tuple[int, ...], selection: bool) -> np.ndarray:
    """causal-learn's FCI with our oracle and, of its rules, ours for these."""
    from causallearn.search.ConstraintBased import FCI
    from causallearn.utils.cit import CIT_Base, register_ci_test

    from heedful.discovery import PAG, orientation

    class Oracle(CIT_Base):  # type: ignore[misc]
        method = "oracle"

        def __call__(self, x: int, y: int, given: Any = None) -> float:
            return float(oracle.separated(int(x), int(y), [int(v) for v in given or ()]))

    register_ci_test("oracle", Oracle)
    swapped: dict[str, Callable[..., Any]] = {}
    if 5 in rules:
        swapped["ruleR5"] = lambda graph, changed, verbose=False: (
            _apply(graph, orientation.RULES["R5"]) | changed if selection else changed
        )
    if 10 in rules:
        swapped["rule10"] = lambda graph, changed: _apply(graph, orientation.RULES["R10"]) | changed
    real = {name: getattr(FCI, name) for name in swapped}
    try:
        for name, rule in swapped.items():
            setattr(FCI, name, rule)
        data = np.random.default_rng(0).standard_normal((50, oracle.n))
        with redirect_stdout(io.StringIO()):
            graph, _ = FCI.fci(data, "oracle", 0.5, show_progress=False)
    finally:
        for name, rule in real.items():
            setattr(FCI, name, rule)
    return PAG.from_causallearn(graph).marks


def _apply(graph: Any, rule: Callable[..., bool]) -> bool:
    """One of our rules on causal-learn's graph."""
    from experiments.beside import write_marks
    from heedful.discovery import PAG
    from heedful.discovery.orientation import Oriented

    at = Oriented(PAG.from_causallearn(graph).marks.copy())
    return rule(at, {}) and write_marks(graph, at.marks)


def decisions(seeds: int) -> dict[str, Any]:
    """On causal-learn's own skeletons and sets: how many graphs are equal, and why the others are not; and whole runs beside it."""
    from experiments.beside import CausalLearn, disagreements, no_selection, r4_by_sets
    from heedful.discovery import discover

    counts: dict[str, Any] = dict.fromkeys(("graphs", "equal", "whole_skeleton", "whole_marks"), 0) | {"cases": []}
    for seed in range(seeds):
        model, random = sem.draw(10, 3, 2.2, seed)
        data = model.data(1000, random)
        theirs = CausalLearn(data, 0.01, ruleR5=no_selection)
        ours, torn = disagreements(theirs.skeleton, theirs.sepsets)
        whole = discover(data=data, alpha=0.01, learner="fci").marks
        counts["graphs"] += 1
        counts["whole_skeleton"] += bool(((whole != 0) == theirs.skeleton).all())
        counts["whole_marks"] += bool((whole == theirs.marks).all())
        apart = np.argwhere(ours.marks != theirs.marks).tolist()
        if not apart:
            counts["equal"] += 1
            continue
        mended = CausalLearn(data, 0.01, ruleR5=no_selection, ruleR4B=r4_by_sets).marks
        left = np.argwhere(ours.marks != mended).tolist()
        voices = [_voices(*end, torn[tuple(end)]) for end in left if tuple(end) in torn]
        why = "R4" if not left else "conflict" if voices else "unexplained"
        counts["cases"].append(
            {
                "seed": seed,
                "why": why,
                "ends": apart,
                "left": left,
                "voices": voices,
                "conflicts": sorted(map(list, torn)),
            }
        )
    return counts


def _voices(i: int, j: int, marks: dict[str, set[str]]) -> str:
    """What wants an arrowhead and what a tail at j."""
    wants = (f"{mark} by {' and '.join(sorted(rules))}" for mark, rules in sorted(marks.items()))
    return f"{i}-{j} at {j}: {', '.join(wants)}"


REASONS = {
    "R4": "its R4 asks further tests where the rule speaks of the set that separated; equal once it asks that set.",
    "conflict": "two rules, or one rule twice, want different marks at one end, so that the tests fit no graph. Ours leaves open what one round of a "
    "rule wants both ways; else each keeps what came first in its own order, causal-learn node by node, ours rule by rule.",
    "unexplained": "not explained.",
}


def _cases(cases: list[dict[str, Any]], why: str) -> str:
    return ", ".join(f"{one['seed']} ({len(one['ends'])})" for one in cases if one["why"] == why)


def _traced(one: dict[str, Any]) -> str:
    """A case of conflict, end by end."""
    by_r4, follow = sum(end not in one["left"] for end in one["ends"]), len(one["left"]) - len(one["voices"])
    more = [f"{by_r4} ends by R4"] * bool(by_r4) + [f"{follow} follow from it"] * bool(follow)
    return f"  - {one['seed']}: {'; '.join([*one['voices'], *more])}."


def speed(sizes: tuple[int, ...], beside: int) -> dict[str, Any]:
    """Processor seconds of ICD by size, and of FCI beside causal-learn's at one size."""
    from experiments.beside import CausalLearn
    from heedful.discovery import discover

    icd = []
    for n in sizes:
        model, random = sem.draw(n, n // 5, 2.5, 7)
        data = model.data(1000, random)
        taken, graph = _least(lambda data=data: discover(data=data), 5)
        icd.append({"nodes": n, "seconds": taken, "tests": len(graph.tests), "edges": len(graph.edges())})
    model, random = sem.draw(beside, beside // 5, 2.5, 7)
    data = model.data(1000, random)
    covariance = np.corrcoef(data, rowvar=False)
    ours, graph = _least(lambda: discover(covariance, 1000, 0.01, learner="fci"), 9)
    slow, theirs = _least(lambda: CausalLearn(data, 0.01), 3)
    apart = np.argwhere(np.triu(theirs.skeleton != (graph.marks != 0))).tolist()
    return {
        "icd": icd,
        "fci": {
            "nodes": beside,
            "seconds": ours,
            "causal_learn_seconds": slow,
            "ratio": slow / ours,
            "edges": len(graph.edges()),
            "first_skeleton_equal": bool((theirs.first == (graph.marks != 0)).all()),
            "skeleton_differences": [{"pair": pair, "set": theirs.sepsets.get(tuple(pair))} for pair in apart],
        },
    }


def _least(call: Callable[[], Any], times: int) -> tuple[float, Any]:
    best, answer = float("inf"), None
    for _ in range(times):
        began = time.process_time()
        answer = call()
        best = min(best, time.process_time() - began)
    return best, answer


def run(setting: Setting) -> dict[str, Any]:
    import torch

    quick = setting.quick
    torch.set_num_threads(1)
    store = setting.store()
    each, plain, chosen, many = (2, 1, 1, 1) if quick else (20, 10, 3, 15)
    parts = {f"plain {at}": (at, each, False) for at in range(plain)}
    parts |= {f"selection {at}": (1000 + at, each, True) for at in range(chosen)}
    counts = store.run(small, parts, setting.jobs)
    wide = {f"large {at}": (2000 + at, each, 0) for at in range(many)}
    wide |= {f"large selection {at}": (3000 + at, each, 3) for at in range(many)}
    far = store.run(large, wide, setting.jobs)
    same = store.get("decisions", lambda: decisions(4 if quick else 60))
    sizes = ((12,), 15) if quick else ((30, 40, 60), 60)
    fast = store.get("speed", lambda: speed(*sizes))
    return {
        "quick": quick,
        "plain": _sum(counts, "plain"),
        "selection": _sum(counts, "selection"),
        "large": _sum(far, "large", without="selection"),
        "large_selection": _sum(far, "large selection"),
        "decisions": same,
        "speed": fast,
    }


def _sum(parts: dict[str, dict[str, int]], start: str, without: str = "\0") -> dict[str, int]:
    total: dict[str, int] = {}
    for name, own in parts.items():
        if name.startswith(start) and without not in name:
            for key, value in own.items():
                total[key] = total.get(key, 0) + value
    return total


def tables(result: dict[str, Any]) -> list[Block]:
    kinds = (("plain", "without selection"), ("selection", "with selection"))
    counts = [
        [row["graphs"], kind, row["icd"], row["stable"], row["fci"], row["ordered"] if key == "plain" else ""]
        for key, kind in kinds
        for row in [result[key]]
    ]
    names = ("icd", "fci", "icd_is_fci", "causal_learn", "r5_ours", "r10_ours", "both_ours")
    larger = [
        [result[key]["graphs"], kind, *(result[key][name] for name in names)]
        for key, kind in (("large", "without selection"), ("large_selection", "3 selection variables"))
    ]
    plain, row, fci = result["plain"], result["decisions"], result["speed"]["fci"]
    times = [
        ["ICD", one["nodes"], one["tests"], one["edges"], f"{one['seconds']:.3f}"] for one in result["speed"]["icd"]
    ]
    apart = len(fci["skeleton_differences"])
    same = "the same skeleton" if not apart else f"skeletons that differ in {quantity(apart, 'edge')}"
    beside = ["causal-learn", "with our R5", "with our R10", "with both"]
    return [
        "Equal to brute force:",
        Table(["graphs", "", "ICD", "ICD, stable", "FCI", "ordered ICD"], counts),
        f"ICD executed {plain['icd_tests']} tests on these, ordered ICD {plain['ordered_tests']}.",
        "Larger graphs with a false mark:",
        Table(["graphs", "", "ICD", "FCI", "ICD = FCI", *beside], larger),
        f"The same decisions, {row['graphs']} samples: {row['equal']} graphs equal to causal-learn's. Whole runs of FCI: {row['whole_skeleton']} "
        f"equal skeletons, {row['whole_marks']} equal graphs. The others, by seed and number of ends that differ:",
        *(f"- {_cases(row['cases'], why)}: {reason}" for why, reason in REASONS.items() if _cases(row["cases"], why)),
        *(_traced(one) for one in row["cases"] if one["why"] == "conflict"),
        Table(["learner", "nodes", "tests", "edges", "seconds"], times),
        f"FCI, {fci['nodes']} nodes: {fci['seconds'] * 1e3:.0f} ms, causal-learn {fci['causal_learn_seconds'] * 1e3:.0f} ms, "
        f"{fci['ratio']:.0f} times; {same}.",
    ]

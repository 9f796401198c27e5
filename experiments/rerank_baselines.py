"""Re-ranking without training: query expansion, augmentation, k-reciprocal neighbours, diffusion, SuperGlobal, affinities.

Every item of a set asks all the others, itself left out; relevant are those of its class. mAP is the mean over queries of the mean precision at
each hit, P@1 how often the first is relevant, both in percent. Sets: drawings of characters (Omniglot, alphabets to train on and others), digits of
8 x 8 points, clothes (900 of Fashion-MNIST), 2,000 digits of MNIST, docstrings of scipy as vectors of all-MiniLM-L6-v2, and two drawn worlds,
clouds and arcs (`retrieval.py`).

The first table has each method with the setting that suited each set best in a small grid, beside the figures of a plain numpy form of it that
was computed beforehand, with ties in the order of places. Ours orders items of equal score by their cosines, which counts where a method gives
many items nothing (diffusion, and k-reciprocal neighbours with weight 0); "ties by place" is ours in the order of the reference.

The second table has the same few settings on all sets: what one would take without labels to choose by. The last has times of k-reciprocal
re-ranking, for the first 100 of each list and for whole lists, beside the published form (dense matrices, a loop over items, which has no short
lists; `reciprocal.py`), one after the other on the same core, the largest difference of their scores, and the memory of ours on 20,000 points.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments import retrieval
from experiments.recipe import Bar, Block, Setting, Table
from experiments.store import workers

SETS: dict[str, Callable[[Path], retrieval.Items]] = {
    "omniglot test": lambda work: retrieval.omniglot(work, "test"),
    "omniglot train": lambda work: retrieval.omniglot(work, "train"),
    "digits": retrieval.digits,
    "fashion900": retrieval.fashion,
    "mnist2k": retrieval.mnist,
    "docstrings": retrieval.docstrings,
    "clusters": lambda work: retrieval.clusters(),
    "arcs": lambda work: retrieval.arcs(),
    "small": lambda work: retrieval.clusters(2, 11, 7, 13),
}
# How far ours may be from the reference: texts change with the version of scipy, the others are the same numbers.
NEAR = {"omniglot test": 0.02, "omniglot train": 0.02, "digits": 0.02, "docstrings": 0.5}


def _options(kind: str, *values: float) -> dict[str, Any]:
    names = {
        "aqe": ("n",),
        "alpha-qe": ("n", "alpha"),
        "alpha-dba": ("n", "alpha"),
        "alpha-dba alone": ("n", "alpha"),
        "k-reciprocal": ("k1", "k2", "weight"),
        "diffusion": ("k", "alpha"),
        "super-global": (),
        "affinity": ("anchors",),
        "cosine": (),
    }[kind]
    alone: dict[str, Any] = {"expand": False} if kind == "alpha-dba alone" else {}
    return dict(zip(names, values, strict=True)) | alone


# Set -> (method, its setting, mAP of the reference).
REFERENCE: dict[str, list[tuple[str, tuple[float, ...], float]]] = {
    "omniglot test": [
        ("cosine", (), 44.56), ("aqe", (3,), 48.97), ("alpha-qe", (5, 1), 48.91), ("alpha-dba", (5, 1), 56.23), ("k-reciprocal", (20, 6, 0.3), 57.98),
        ("k-reciprocal", (20, 6, 0), 58.45), ("diffusion", (20, 0.9), 55.32), ("super-global", (), 50.02), ("affinity", (128,), 41.23),
    ],
    "omniglot train": [
        ("cosine", (), 52.22), ("aqe", (5,), 57.89), ("alpha-qe", (5, 1), 57.87), ("alpha-dba", (5, 1), 64.67), ("k-reciprocal", (20, 6, 0.3), 66.78),
        ("k-reciprocal", (20, 6, 0), 67.38), ("diffusion", (10, 0.9), 64.22), ("super-global", (), 58.46), ("affinity", (128,), 50.23),
    ],
    "digits": [
        ("cosine", (), 67.68), ("aqe", (10,), 73.47), ("alpha-qe", (50, 3), 74.66), ("alpha-dba", (20, 3), 80.32), ("k-reciprocal", (20, 6, 0.3), 74.13),
        ("k-reciprocal", (50, 10, 0.3), 81.62), ("diffusion", (20, 0.99), 87.67), ("super-global", (), 73.40),
    ],
    "fashion900": [
        ("cosine", (), 49.22), ("aqe", (10,), 50.42), ("alpha-qe", (10, 3), 50.40), ("alpha-dba", (10, 3), 52.20), ("k-reciprocal", (20, 6, 0.3), 52.40),
        ("k-reciprocal", (50, 10, 0.3), 54.74), ("diffusion", (20, 0.9), 56.88), ("super-global", (), 50.74),
    ],
    "mnist2k": [
        ("cosine", (), 45.94), ("aqe", (10,), 51.60), ("alpha-qe", (20, 1), 52.09), ("alpha-dba", (20, 3), 57.87), ("k-reciprocal", (20, 6, 0.3), 53.82),
        ("k-reciprocal", (50, 10, 0.3), 60.33), ("diffusion", (10, 0.99), 73.74), ("super-global", (), 49.60),
    ],
    "docstrings": [
        ("cosine", (), 47.96), ("aqe", (10,), 51.93), ("alpha-qe", (10, 3), 51.10), ("alpha-dba", (10, 1), 56.95), ("k-reciprocal", (20, 6, 0.3), 54.33),
        ("k-reciprocal", (50, 10, 0.3), 57.39), ("diffusion", (50, 0.9), 55.99),
    ],
    "clusters": [("cosine", (), 54.26), ("aqe", (5,), 66.68), ("alpha-dba", (5, 1), 73.57), ("diffusion", (20, 0.9), 67.24)],
    "arcs": [("cosine", (), 54.1), ("alpha-dba alone", (3, 3), 59.5), ("diffusion", (10, 0.99), 98.4)],
    "small": [("cosine", (), 0.0), ("k-reciprocal", (3, 2, 0.3), 0.0), ("diffusion", (5, 0.9), 0.0)],
}  # fmt: skip
COMMON: list[tuple[str, tuple[float, ...]]] = [
    ("cosine", ()), ("aqe", (5,)), ("alpha-qe", (10, 3)), ("alpha-dba", (5, 1)), ("alpha-dba", (10, 3)), ("k-reciprocal", (10, 3, 0.3)),
    ("k-reciprocal", (20, 6, 0.3)), ("k-reciprocal", (20, 6, 0)), ("k-reciprocal", (30, 6, 0.3)), ("k-reciprocal", (50, 10, 0.3)), ("diffusion", (10, 0.9)),
    ("diffusion", (20, 0.9)), ("diffusion", (20, 0.99)), ("diffusion", (50, 0.99)), ("super-global", ()), ("affinity", (128,)),
]  # fmt: skip


def _named(method: str, setting: tuple[float, ...]) -> str:
    return f"{method} ({', '.join(f'{value:g}' for value in setting)})" if setting else method


def _measured(work: Path, name: str, method: str, setting: tuple[float, ...], device: str) -> dict[str, float]:
    from heedful.ranking import METHODS, mean_average_precision, precision_at, relevance_by_label

    X, y = SETS[name](work)
    relevant = relevance_by_label(y)
    began = time.perf_counter()
    ranking = METHODS[method.removesuffix(" alone")](None, X, device=device, **_options(method, *setting))
    seconds = time.perf_counter() - began
    at = np.lexsort((ranking.order, -ranking.scores))
    return {
        "map": 100 * mean_average_precision(ranking, relevant),
        "first": 100 * precision_at(ranking, relevant, 1),
        "trapezoid": 100 * mean_average_precision(ranking, relevant, rule="trapezoid"),
        "by_place": 100 * mean_average_precision(np.take_along_axis(ranking.order, at, 1), relevant),
        "seconds": seconds,
        "items": len(X),
    }


def _beside(count: int) -> dict[str, float]:
    """Seconds of one core that ours and the published form take in float32, which its authors compute in, and the largest difference of their scores in float64."""
    import torch

    from experiments.reciprocal import published
    from heedful.ranking import k_reciprocal

    X = retrieval.clusters(3, count // 20).X
    single = X.astype(np.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = {}
    # What others do on the same machine does not count.
    for name, call in {
        "published": lambda: published(single, len(X)).argsort(axis=1),
        "ours": lambda: k_reciprocal(None, single, top=100, device="cpu"),
        "whole": lambda: k_reciprocal(None, single, device="cpu"),
    }.items():
        began = time.thread_time()
        call()
        seconds[name] = time.thread_time() - began
    torch.set_num_threads(threads)
    expected, ranking = published(X, len(X)), k_reciprocal(None, X, device="cpu")
    difference = np.abs(1 - np.take_along_axis(expected, ranking.order, 1) - ranking.scores).max()
    return {**seconds, "difference": float(difference)}


def _large(count: int) -> dict[str, float]:
    """Seconds, and the most memory that this process had, in GB; as Linux counts it since the program began, without what started it."""
    from heedful.ranking import k_reciprocal

    X = retrieval.clusters(3, count // 20).X.astype(np.float32)
    began = time.perf_counter()
    k_reciprocal(None, X, top=100, device="cpu")
    seconds = time.perf_counter() - began
    peak = next(
        line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return {"seconds": seconds, "memory": int(peak) * 1024 / 1e9}


def _alone(count: int) -> dict[str, float]:
    with workers(1) as pool:
        return pool.submit(_large, count).result()


def run(setting: Setting) -> dict[str, Any]:
    store, quick = setting.store(), setting.quick
    sets = ["small"] if quick else [name for name in SETS if name != "small"]
    wanted = {
        name: list(dict.fromkeys([*[(m, s) for m, s, _ in REFERENCE[name]], *([] if quick else COMMON)]))
        for name in sets
    }
    parts = {
        f"{name}, {_named(method, values)}": (setting.work, name, method, values, setting.device)
        for name in sets
        for method, values in wanted[name]
    }
    done = store.run(_measured, parts)
    found = {name: {_named(m, s): done.get(f"{name}, {_named(m, s)}") for m, s in wanted[name]} for name in sets}
    sizes = (100, 100, 100) if quick else (2000, 5000, 20_000)
    beside = store.run(_beside, {f"published, {size}": (size,) for size in sizes[:2]})
    large = store.run(_large if quick else _alone, {f"memory, {sizes[2]}": (sizes[2],)})
    return {
        "quick": quick,
        "sets": found,
        "sizes": list(sizes),
        "beside": [beside.get(f"published, {size}") for size in sizes[:2]],
        "large": large.get(f"memory, {sizes[2]}"),
        "wanted": len(parts),
    }


def tables(result: dict[str, Any]) -> list[Block]:
    sets, quick = result["sets"], result["quick"]
    rows, apart, finished = [], {}, sum(one is not None for of in sets.values() for one in of.values())
    for name, found in sets.items():
        for method, values, reference in REFERENCE[name]:
            one = found[_named(method, values)]
            if one is None:
                continue
            apart.setdefault(name, []).append(abs(one["by_place"] - reference))
            rows.append([
                name, _named(method, values), f"{one['map']:.2f}", f"{one['by_place']:.2f}", "" if quick else f"{reference:.2f}", f"{one['first']:.1f}",
                f"{one['trapezoid']:.2f}", f"{one['seconds']:.1f}",
            ])  # fmt: skip
    blocks: list[Block] = [
        "Each method with the setting that suits the set; the row of cosine is the plain search:",
        Table(["set", "method", "mAP", "ties by place", "reference", "P@1", "mAP by trapezoids", "seconds"], rows),
    ]  # fmt: skip
    if not quick:
        names = list(sets)
        cells = []
        for method, values in COMMON:
            of = [sets[name][_named(method, values)] for name in names]
            gains = [
                one["map"] - sets[name]["cosine"]["map"]
                for one, name in zip(of, names, strict=True)
                if one and sets[name]["cosine"]
            ]
            firsts = [
                one["first"] - sets[name]["cosine"]["first"]
                for one, name in zip(of, names, strict=True)
                if one and sets[name]["cosine"]
            ]
            shown = [f"{one['map']:.1f} ({one['first']:.1f})" if one else "" for one in of]
            mean = (
                (f"{np.mean(gains):+.1f}", f"{np.mean(firsts):+.1f}", f"{min(firsts):+.1f}") if gains else ("", "", "")
            )
            cells.append([_named(method, values), *shown, *mean])
        blocks += [
            "One setting for all sets: mAP (P@1), and the changes against cosine, on average and of P@1 at worst:",
            Table(["method", *names, "mAP", "P@1", "P@1, worst"], cells, control="cosine"),
            *(
                Bar(f"{name}: largest difference from the reference, ties by place", max(values), NEAR.get(name, 0.1), False, ".3f")
                for name, values in apart.items()
            ),
            Bar("mAP by trapezoids is never above the plain one", float(all(one["trapezoid"] <= one["map"] for of in sets.values() for one in of.values() if one))),
        ]  # fmt: skip
    small, middle, large = result["sizes"]
    (first, second), memory = result["beside"], result["large"]
    if first and second and memory:
        blocks += [
            "k-reciprocal re-ranking of all items among themselves (times in float32, differences in float64):",
            Table(
                ["items", "ours, first 100, seconds", "ours, whole lists", "published form", "ratio of the first to it", "largest difference of scores", "memory, GB"],
                [
                    *(
                        [f"{size:,}", f"{one['ours']:.2f}", f"{one['whole']:.2f}", f"{one['published']:.1f}", f"{one['published'] / one['ours']:.1f}", f"{one['difference']:.1e}", ""]
                        for size, one in ((small, first), (middle, second))
                    ),
                    [f"{large:,}", f"{memory['seconds']:.1f}", "", "", "", "", f"{memory['memory']:.2f}"],
                ],
            ),
        ]  # fmt: skip
        if not quick:
            blocks += [
                Bar(f"difference from the published form, {small:,} items", first["difference"], 1e-6, False, ".1e"),
                Bar(f"difference from the published form, {middle:,} items", second["difference"], 1e-6, False, ".1e"),
                Bar(f"first 100, {middle:,} items: times as fast as the published form", second["published"] / second["ours"], 5, shown=".1f"),
                Bar(f"whole lists, {middle:,} items: times as fast", second["published"] / second["whole"], 5, shown=".1f"),
                Bar(f"GB of memory, {large:,} items", memory["memory"], 2, False, ".2f"),
            ]  # fmt: skip
    blocks.append(f"- Incomplete: {finished} of {result['wanted']} parts." if finished < result["wanted"] else "")
    return blocks

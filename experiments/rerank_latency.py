"""What re-ranking a list costs: a trained network beside k-reciprocal neighbours and diffusion, on the same lists of 1,024 results.

A database of 20,000 points of 64 numbers (drawn clouds), 1,024 results of each query found beforehand. Each method re-ranks these lists and sees nothing else of the database: the network by the
similarities of its 1,024 results to their first 511 and the query (published sizes: 768 numbers, 12 heads, 2 layers, 15 million parameters; and a small one of 256 numbers and 4 heads), k-reciprocal
neighbours and diffusion by taking the list as their database. Milliseconds for one query, and for each of many queries at once, where a method can: the median of several calls, the first left out.
The network was fitted for one step: what it learned does not change its time. Vectors go to the device once per call.

Further, for the network with 512 results: queries per second of one call with 256 queries beside a loop over them, in full precision and with products of 10 bits
(`torch.set_float32_matmul_precision("high")`), and on a GPU the memory that a call takes beside the database of 10,000 and of 1,000,000 rows. Times are of the device that is named;
no paper has such figures that could be recovered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments import retrieval
from experiments.recipe import Bar, Block, Setting, Table, hardware

SIZES: dict[str, dict[str, int]] = {
    "ListReranker, published size": {"embed_dim": 768, "num_heads": 12},
    "ListReranker, small": {"embed_dim": 256, "num_heads": 4},
}
OTHERS = ("k-reciprocal", "diffusion")
BATCHED = ("batched, cpu", "batched, cuda", "batched, cuda, 10 bits")


def _model(device: str, candidates: int, anchors: int, **sizes: Any) -> Any:
    """Fitted for one step on two lists."""
    from heedful.ranking import ListReranker

    X, y = retrieval.clusters(5, 12, 6, 16)
    model = ListReranker(
        candidates, anchors, **sizes, epochs=1, keep=(1.0, 1.0), random_state=0, device=device, progress=False
    )
    return model.fit(X.astype(np.float32), y, sample_weight=(np.arange(len(y)) < 2).astype(float))


def _lists(count: int, queries: int, k: int, device: str) -> tuple[Any, Any, np.ndarray]:
    """Queries and a database on the device, and the places of each query's k nearest."""
    import torch

    from heedful.ranking import nearest

    X = torch.from_numpy(retrieval.clusters(4, (count + queries) // 20 + 1).X.astype(np.float32))
    X = X[torch.randperm(len(X), generator=torch.Generator().manual_seed(0))].to(device)
    asked, stored = X[:queries], X[queries : queries + count]
    return asked, stored, nearest(asked, stored, k)[1].cpu().numpy()


def _median(call: Callable[[], Any], device: str, times: int) -> float:
    """Seconds."""
    import torch

    found = []
    for _ in range(times + 1):
        began = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return float(np.median(found[1:]))


def _times(name: str, device: str, count: int, k: int, queries: int, quick: bool) -> dict[str, float]:
    """Milliseconds of one query, and per query of several at once."""
    import torch

    from heedful.ranking import METHODS

    asked, stored, places = _lists(count, queries, k, device)
    times = 2 if quick else 5
    if name in OTHERS:
        lists = [stored[torch.from_numpy(row).to(device)] for row in places]
        alone = _median(lambda: METHODS[name](asked[:1], lists[0], device=device), device, times)
        # A list is a database of its own for these, so several are a loop.
        return {"one": 1e3 * alone}
    model = _model(device, k, k // 2, **({"embed_dim": 16, "num_heads": 2} if quick else SIZES[name]))
    alone = _median(lambda: model.rerank(asked[:1], stored, candidates=places[:1]), device, times)
    several = _median(lambda: model.rerank(asked, stored, candidates=places), device, 1 if device == "cpu" else times)
    return {"one": 1e3 * alone, "many": 1e3 * several / queries}


def _batched(device: str, k: int, queries: int, precision: str, quick: bool) -> dict[str, float]:
    """Queries per second of one call and of a loop, published size."""
    import torch

    torch.set_float32_matmul_precision(precision)
    try:
        return _throughput(device, k, queries, quick)
    finally:
        torch.set_float32_matmul_precision("highest")


def _throughput(device: str, k: int, queries: int, quick: bool) -> dict[str, float]:
    asked, stored, places = _lists(200 if quick else 10_000, queries, k, device)
    model = _model(
        device, k, k, **({"embed_dim": 16, "num_heads": 2} if quick else SIZES["ListReranker, published size"])
    )
    # Rows have length 1: neither form spends its time on that.
    model.set_params(normalize=False)
    together = _median(lambda: model.rerank(asked, stored, candidates=places), device, 1 if device == "cpu" else 3)

    def loop() -> None:
        for at in range(queries):
            model.rerank(asked[at : at + 1], stored, candidates=places[at : at + 1])

    model.rerank(asked[:1], stored, candidates=places[:1])
    began = time.perf_counter()
    loop()
    return {"batch": queries / together, "loop": queries / (time.perf_counter() - began)}


def _memory(device: str, rows: int, k: int) -> dict[str, float]:
    """The most GPU memory of a call beside the database, in MB."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    stored = torch.nn.functional.normalize(torch.randn(rows, 64, device=device, generator=generator), dim=1)
    asked = torch.nn.functional.normalize(torch.randn(64, 64, device=device, generator=generator), dim=1)
    places = torch.stack([torch.randperm(rows, device=device, generator=generator)[:k] for _ in range(64)]).cpu()
    model = _model(device, k, k, **SIZES["ListReranker, published size"]).set_params(normalize=False)
    model.rerank(asked[:1], stored, candidates=places[:1].numpy())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model.rerank(asked, stored, candidates=places.numpy())
    torch.cuda.synchronize()
    return {"megabytes": (torch.cuda.max_memory_allocated() - before) / 2**20}


def run(setting: Setting) -> dict[str, Any]:
    store, quick = setting.store(), setting.quick
    count, k, queries = (300, 64, 3) if quick else (20_000, 1024, 64)
    names = (*SIZES, *OTHERS)
    device = setting.device
    kind = device.split(":")[0]
    store.get(f"chip, {kind}", lambda: hardware(device))
    # On a CPU a query of the published size takes a second.
    asked = queries if kind == "cuda" else min(queries, 8)
    store.run(_times, {f"{name}, {kind}": (name, device, count, k, asked, quick) for name in names})
    short, many = (16, 3) if quick else (512, 256 if kind == "cuda" else 8)
    ways = {"": "highest", ", 10 bits": "high"} if kind == "cuda" else {"": "highest"}
    store.run(_batched, {f"batched, {kind}{way}": (device, short, many, precision, quick) for way, precision in ways.items()})  # fmt: skip
    if kind == "cuda":
        store.run(_memory, {f"memory, {rows}": (device, rows, short) for rows in (10_000, 1_000_000)})
    # What another run measured on a GPU stays beside what this one measured on a CPU.
    kinds = ("cpu", "cuda")
    parts = (*(f"{name}, {each}" for each in kinds for name in names), *BATCHED, "memory, 10000", "memory, 1000000")
    done = {part: store.read(part) for part in parts if store.has(part)}
    chips = {each: store.read(f"chip, {each}") for each in kinds if store.has(f"chip, {each}")}
    return {"quick": quick, "parts": done, "chips": chips, "k": k}


def tables(result: dict[str, Any]) -> list[Block]:
    done, chips = result["parts"], result["chips"]
    rows = []
    for kind, chip in chips.items():
        for name in (*SIZES, *OTHERS):
            one = done.get(f"{name}, {kind}")
            if one:
                rows.append([name, chip, f"{one['one']:.2f}", f"{one['many']:.2f}" if "many" in one else ""])
    blocks: list[Block] = [
        f"Lists of {result['k']:,} results, milliseconds for a query:",
        Table(["method", "device", "one query", "many at once"], rows, control="k-reciprocal"),
    ]
    batched = {part: done[part] for part in BATCHED if part in done}
    if batched:
        lines = [
            [chips[part.split(", ")[1]] + (", products of 10 bits" if part.endswith("bits") else ""), f"{one['batch']:.1f}", f"{one['loop']:.1f}", f"{one['batch'] / one['loop']:.1f}"]
            for part, one in batched.items()
        ]  # fmt: skip
        blocks += [
            "Lists of 512 results, published size, queries per second:",
            Table(["device", "in one call", "one after the other", "ratio"], lines),
        ]
    if not result["quick"]:
        gpu, fast = (done.get(f"batched, cuda{way}") for way in ("", ", 10 bits"))
        small, large = (done.get(f"memory, {rows}") for rows in (10_000, 1_000_000))
        blocks += [
            Bar("GPU, one call with 256 queries beside a loop: times as many per second", gpu and gpu["batch"] / gpu["loop"], 8, shown=".1f"),
            Bar("the same with products of 10 bits", fast and fast["batch"] / fast["loop"], 8, shown=".1f"),
            Bar("GPU memory of a call, 1,000,000 rows beside 10,000: change in percent", 100 * abs(large["megabytes"] / small["megabytes"] - 1) if small and large else None, 5, False, ".2f"),
        ]  # fmt: skip
    return blocks

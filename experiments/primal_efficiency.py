"""Time and memory of a training step against the length: Primal-Attention, softmax by cuDNN, and other methods of linear cost.

Eight heads of width 64, bfloat16, batch 1, rank 20 with 200 rows, forward and backward; primal methods with their KSVD loss
and its gradient. Operators start from queries and keys (and values), each in the layout it likes best (ours as one linear
map makes both), modules from the layer's input. "plain" is the formula written out as in the authors' code, every step a
kernel of its own, scores in memory, here in bfloat16 throughout. Nystrom has 64 landmarks and 6 steps of its inverse (Xiong
et al. 2021), Performer 256 positive random features (Choromanski et al. 2021), both plain; linear is `attend` with
`FeatureMap("elu")`.

Everyone is compared with float64 first, values and gradients; one of ours that is off by more than 1 % has no speed. A time
is the median of queued calls between two events, or of replays of a CUDA graph, whichever is shorter; input sets take turns,
so that they do not lie in the cache, though backward may find there what forward read. The floor is what reading inputs and
writing outputs once takes at 4.2 TB/s: queries, keys, output; then queries, keys, its gradient and theirs. Training steps
alone, where the paper's times hold evaluation, and a softmax without a fused kernel.

Needs a GPU, about two minutes of it; `--quick` runs the check on the CPU alone where there is none.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.timing import interleaved, synchronize
from torch import Tensor
from torch.nn import functional

from experiments.formulas import (
    Tensors,
    directions_of,
    linear,
    nystrom,
    performer,
    places,
    plain,
    plain_module,
    softmax,
)
from experiments.recipe import Bar, Block, Setting, Table
from heedful import FeatureMap, Unsupported, attend
from heedful.nn import Attention, PrimalAttention
from heedful.ops import primal as ops

HEADS, DIM, RANK, ROWS, ETA = 8, 64, 20, 200, 0.1
LENGTHS = (1_024, 4_096, 16_384, 65_536)
BANDWIDTH = 4.2e12
ALLOWED, WRONG = 1e-2, 1e9
# Sets of inputs take turns until they fill this many bytes, about twice the second-level cache.
ROTATED = 2**27


@dataclass(frozen=True)
class Case:
    """A function of leaves, several sets of them, and the same function for float64; `names` are those of the leaves."""

    function: Callable[..., Tensors]
    truth: Callable[..., Tensors]
    names: tuple[str, ...]
    sets: list[list[Tensor]]
    upstreams: Tensors
    is_ours: bool = False
    forget: Callable[[], None] = lambda: None  # what a call left behind, which would hold on to a stream

    def step(self, leaves: list[Tensor]) -> Tensors:
        """Forward and backward."""
        outputs = self.function(*leaves)
        return torch.autograd.grad(outputs, leaves, self.upstreams, allow_unused=True)

    def rotating(self) -> Callable[[], Tensors]:
        turns: Iterator[list[Tensor]] = itertools.cycle(self.sets)
        return lambda: self.step(next(turns))


def cases(length: int, device: str, dtype: torch.dtype) -> dict[str, Callable[[], Case]]:
    """By name; each is made when its turn comes, so that one at a time takes memory."""
    generator = torch.Generator(device).manual_seed(length)
    bytes_each = 8 * length * HEADS * DIM * dtype.itemsize
    count = max(1, min(16, ROTATED // bytes_each)) if device.startswith("cuda") else 1

    def draw(*shape: int, kind: torch.dtype = dtype, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator, device=device)).to(kind).requires_grad_()

    def upstream() -> Tensor:
        return draw(1, HEADS, length, DIM).detach()

    def small() -> list[Tensor]:
        one = torch.float32 if dtype == torch.bfloat16 else dtype
        weights = [draw(HEADS, ROWS, RANK, kind=one, scale=(ROWS * RANK) ** -0.5) for _ in range(2)]
        readout = [draw(DIM, RANK, kind=one, scale=(2 * RANK) ** -0.5) for _ in range(2)]
        return [*weights, *readout, draw(DIM, kind=one), torch.rand_like(weights[0][:, 0], requires_grad=True)]

    def operator(function: Callable[..., Tensors], truth: Callable[..., Tensors], of_pairs: bool) -> Case:
        sizes = [(1, length, 2, HEADS, DIM)] if of_pairs else [(1, HEADS, length, DIM)] * 2
        sets = [[*(draw(*size) for size in sizes), draw(1, HEADS, ROWS, DIM), *small()] for _ in range(count)]
        names = (*(("pair",) if of_pairs else ("query", "key")), "sample", "w_e", "w_r", "c_e", "c_r", "bias", "lambda")
        eta = torch.tensor(ETA, device=device, dtype=function(*sets[0])[1].dtype)
        after = draw(1, length, HEADS, DIM).detach().transpose(1, 2) if of_pairs else upstream()
        return Case(function, truth, names, sets, (after, eta), is_ours=of_pairs)

    def ours(pair: Tensor, *weights: Tensor) -> Tensors:
        *weights_alone, lam = weights
        out, parts = ops.folded_pair(pair, *weights_alone)
        assert parts is not None
        return out, ops.penalty(parts, lam)

    def of_pair(pair: Tensor, *weights: Tensor) -> Tensors:
        query, key = pair.unbind(2)
        return plain(query.transpose(1, 2), key.transpose(1, 2), *weights)

    def module(sampling: Any, is_ours: bool) -> Case:
        torch.manual_seed(length)
        size = HEADS * DIM
        layer = PrimalAttention(
            size, HEADS, RANK, max_len=max(length, ROWS), sampling=sampling, device=device, dtype=dtype
        )
        names, parameters = zip(*layer.named_parameters(), strict=True)
        rows = places(length, ROWS, sampling, device)

        def mine(x: Tensor, *_: Tensor) -> Tensors:
            return layer(x), layer.ksvd_loss()

        def written(x: Tensor, *given: Tensor) -> Tensors:
            return plain_module(x, HEADS, rows, dict(zip(names, given, strict=True)))

        sets = [[draw(1, length, size), *parameters] for _ in range(count)]
        function = mine if is_ours else written
        after = draw(1, length, size).detach(), torch.tensor(ETA, device=device, dtype=function(*sets[0])[1].dtype)

        def forget() -> None:
            layer._last = None

        return Case(function, written, ("x", *names), sets, after, is_ours, forget)

    def attention(function: Callable[..., Tensors], truth: Callable[..., Tensors], is_ours: bool = False) -> Case:
        sets = [[draw(1, HEADS, length, DIM) for _ in range(3)] for _ in range(count)]
        return Case(function, truth, ("query", "key", "value"), sets, (upstream(),), is_ours)

    def by_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return (functional.scaled_dot_product_attention(q, k, v),)

    directions = directions_of(DIM, 256, device)

    def random(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        return performer(q, k, v, directions)

    def by_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        return (attend(q, k, v, kernel=FeatureMap("elu")),)

    return {
        "primal": lambda: operator(ours, of_pair, True),
        "primal, plain": lambda: operator(plain, plain, False),
        "linear": lambda: attention(by_attend, linear, True),
        "Nystrom": lambda: attention(nystrom, nystrom),
        "Performer": lambda: attention(random, random),
        "cuDNN SDPA": lambda: attention(by_cudnn, softmax),
        "primal module": lambda: module("stride", True),
        "primal module, segment mean": lambda: module("segment_mean", True),
        "primal module, plain": lambda: module("stride", False),
    }


LINEAR_PEERS = ("primal, plain", "linear", "Nystrom", "Performer")


def errors(case: Case) -> dict[str, float]:
    """||got - truth|| / ||truth|| of every output, and of the gradients of each with respect to every leaf."""
    leaves = case.sets[0]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    if case.truth is softmax:
        return _rows_of_softmax(case, wide)
    got, wanted = case.function(*leaves), case.truth(*wide)
    errors = {}
    for name, mine, true, after in zip(("out", "loss"), got, wanted, case.upstreams, strict=False):
        errors[name] = _error(mine, true)
        after = after / after.norm() if name == "out" else torch.ones_like(after)
        pairs = zip(
            case.names,
            torch.autograd.grad(mine, leaves, after, retain_graph=True, allow_unused=True),
            torch.autograd.grad(true, wide, after.double(), retain_graph=True, allow_unused=True),
            strict=True,
        )
        for leaf, one, other in pairs:
            if other is not None:
                errors[f"d {name} / d {leaf}"] = WRONG if one is None else _error(one, other)
    return errors


def _rows_of_softmax(case: Case, wide: list[Tensor], rows: int = 64) -> dict[str, float]:
    """A few rows: all pairs in float64 would not fit."""
    query, key, value = wide
    at = torch.linspace(0, query.shape[-2] - 1, rows, device=query.device).long()
    with torch.no_grad():
        return {"out": _error(case.function(*case.sets[0])[0][..., at, :], softmax(query[..., at, :], key, value)[0])}


def _error(got: Tensor, wanted: Tensor) -> float:
    error = float((got.detach().double() - wanted.detach()).norm() / wanted.detach().norm().clamp_min(1e-30))
    # JSON has no word for what is not finite.
    return error if error < WRONG else WRONG


def worst(errors: dict[str, float]) -> tuple[str, float]:
    return max(errors.items(), key=lambda item: item[1])


def graph_of(case: Case) -> Callable[[], None]:
    """All sets in one CUDA graph."""
    side = torch.cuda.Stream()
    case.forget()
    gc.collect()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            case.step(case.sets[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for leaves in case.sets:
            case.step(leaves)
    return graph.replay


def measure(length: int, repeats: int) -> dict[str, Any]:
    """One length on the GPU: errors, milliseconds by both clocks, and the peak of memory, of everyone."""
    rows: list[dict[str, Any]] = []
    for name, make in cases(length, "cuda", torch.bfloat16).items():
        row: dict[str, Any] = {"name": name}
        rows.append(row)
        try:
            _measure(make(), row, repeats)
        except Exception as fault:
            lines = str(fault).strip().splitlines()
            row["refused"] = f"{type(fault).__name__}: {lines[0][:200] if lines else ''}"
        gc.collect()
        torch.cuda.empty_cache()
    return {"length": length, "floor_ms": 1e3 * 8 * length * HEADS * DIM * 2 / BANDWIDTH, "rows": rows}


def _measure(case: Case, row: dict[str, Any], repeats: int) -> None:
    row["worst"], row["error"] = worst(errors(case))
    if case.is_ours and not row["error"] <= ALLOWED:
        row["refused"] = f"error {row['error']:.1e} of {row['worst']}, allowed {ALLOWED:g}"
        return
    row["megabytes"] = _peak(case) / 1e6
    run = case.rotating()
    row["queued_ms"] = interleaved({"": run}, repeats, "cuda", 2.0)[""].median
    try:
        replay = graph_of(case)
        row["graph_ms"] = interleaved({"": replay}, repeats, "cuda", 2.0)[""].median / len(case.sets)
    except Exception as fault:
        torch.cuda.synchronize()
        row["no_graph"] = f"{type(fault).__name__}: {str(fault).strip().splitlines()[0][:120]}"


def _peak(case: Case) -> int:
    """Bytes of a step beyond its inputs: output, what is kept for backward, gradients."""
    case.step(case.sets[0])
    synchronize("cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = case.step(case.sets[0])
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak


def on_cpu(repeats: int) -> dict[str, Any]:
    """The module of width 64 against softmax attention by SDPA, one thread, float32, forward and backward.

    The least of several times, of the processor and not of the clock on the wall: other programs may be at work.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs: dict[str, Callable[[], Any]] = {}
        for length in (1_024, 4_096):
            torch.manual_seed(length)
            x = torch.randn(1, length, 64, requires_grad=True)
            primal, dense = PrimalAttention(64, 2, RANK, max_len=length), Attention(64, 2)

            def of_primal(x: Tensor = x, layer: PrimalAttention = primal) -> None:
                torch.autograd.grad(layer(x).sum() + ETA * layer.ksvd_loss(), [x, *layer.parameters()])

            def of_softmax(x: Tensor = x, layer: Attention = dense) -> None:
                torch.autograd.grad(layer(x, need_weights=False)[0].sum(), [x, *layer.parameters()])

            runs |= {f"primal {length}": of_primal, f"SDPA {length}": of_softmax}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repeats):
            for name, run in runs.items():
                calls = 1 if name == "SDPA 4096" else 5
                began = time.process_time()
                for _ in range(calls):
                    run()
                times[name].append(1e3 * (time.process_time() - began) / calls)
        named = cases(1_024, "cpu", torch.float32)
        error = max(worst(errors(make()))[1] for name, make in named.items() if name != "cuDNN SDPA")
    finally:
        torch.set_num_threads(threads)
    return {"milliseconds": {name: min(spent) for name, spent in times.items()}, "worst_error": error}


def run(setting: Setting) -> dict[str, Any]:
    on_gpu = setting.device.startswith("cuda")
    if not on_gpu and not setting.quick:
        raise Unsupported("primal-efficiency measures a GPU; --quick runs its check on the CPU alone")
    result: dict[str, Any] = {"quick": setting.quick, "cpu": on_cpu(5 if setting.quick else 9), "gpu": []}
    if on_gpu:
        lengths, repeats = (LENGTHS[:1], 5) if setting.quick else (LENGTHS, 21)
        parts = {f"n={length}": (length, repeats) for length in lengths}
        result["gpu"] = list(setting.store("lengths").run(measure, parts).values())
    return result


def time_of(row: dict[str, Any]) -> float | None:
    """The shorter of the two clocks."""
    times = [row[name] for name in ("queued_ms", "graph_ms") if name in row]
    return min(times) if times else None


def bars(result: dict[str, Any]) -> list[Bar]:
    """Ratios of times with their bounds; no figure where one of the two was refused."""
    times = {one["length"]: {row["name"]: time_of(row) for row in one["rows"]} for one in result["gpu"]}
    floors = {one["length"]: one["floor_ms"] for one in result["gpu"]}

    def ratio(length: int, above: str, below: str) -> float | None:
        one, other = times[length].get(above), times[length].get(below)
        return None if one is None or other is None else one / other

    wanted: list[tuple[str, float | None, float, bool]] = []
    for length in (n for n in times if n >= 4_096):
        wanted += [
            (f"n = {length}: {peer} / primal", ratio(length, peer, "primal"), 1.0, True) for peer in LINEAR_PEERS
        ]
    if 16_384 in times:
        wanted.append(("n = 16384: cuDNN SDPA / primal", ratio(16_384, "cuDNN SDPA", "primal"), 5.0, True))
        wanted.append(("n = 16384: primal, plain / primal", ratio(16_384, "primal, plain", "primal"), 3.0, True))
        pair = "primal module, plain", "primal module"
        wanted.append((f"n = 16384: {' / '.join(pair)}", ratio(16_384, *pair), 3.0, True))
    for length in (n for n in times if n >= 4_096):
        mine = times[length].get("primal")
        wanted.append((f"n = {length}: primal / floor", None if mine is None else mine / floors[length], 2.0, False))
    cpu = result["cpu"]["milliseconds"]
    wanted.append(("CPU, module: primal at 4096 / at 1024", cpu["primal 4096"] / cpu["primal 1024"], 5.0, False))
    wanted.append(("CPU, module: SDPA / primal at 4096", cpu["SDPA 4096"] / cpu["primal 4096"], 10.0, True))
    return [Bar(*one, shown=".2f") for one in wanted]


def tables(result: dict[str, Any]) -> list[Block]:
    cpu = ", ".join(f"{name} {value:.1f}" for name, value in result["cpu"]["milliseconds"].items())
    return [
        *(_on_gpu(result["gpu"]) if result["gpu"] else []),
        f"CPU, one thread, float32, modules of width 64 with 2 heads, milliseconds of the processor: {cpu}; largest error against "
        f"float64 {result['cpu']['worst_error']:.0e}.",
        Table(["ratio of times", "measured", "bar", ""], [bar.cells for bar in bars(result)]),
    ]


def _on_gpu(lengths: list[dict[str, Any]]) -> list[Block]:
    rows = [["floor", *(f"{one['floor_ms']:.4f}" for one in lengths)]]
    for name in (row["name"] for row in lengths[0]["rows"]):
        rows.append([name, *(_cell(next(row for row in one["rows"] if row["name"] == name)) for one in lengths)])
    every = [(one["length"], row) for one in lengths for row in one["rows"]]
    largest: dict[str, float] = {}
    for _, row in every:
        largest[row["name"]] = max(largest.get(row["name"], 0.0), row.get("error", 0.0))
    errors = ", ".join(f"{name} {error:.1e}" for name, error in largest.items() if error)
    return [
        "Milliseconds of forward and backward: queued calls / graph replays, and megabytes beyond the inputs.",
        Table(["", *(f"n = {one['length']:,}" for one in lengths)], rows),
        *(f"- {row['name']}, n = {length}: {row['refused']}" for length, row in every if "refused" in row),
        f"Largest relative error against float64: {errors}.",
    ]


def _cell(row: dict[str, Any]) -> str:
    if "refused" in row:
        return "refused"
    graph = f"{row['graph_ms']:.4f}" if "graph_ms" in row else "no graph"
    return f"{row['queued_ms']:.4f} / {graph}, {row['megabytes']:.0f} MB"

"""Gaussian attention beside softmax attention on a GPU: time, memory and error at 16,384 tokens.

Row-normalised Gaussian attention is softmax attention with one more term per key, so it needs no matrix of n x n numbers. Eight
heads of 64, bfloat16, forward; medians of interleaved repeats after the error was checked against float64 on some rows. The bar is
1.25 times the time and 1.2 times the peak memory of `scaled_dot_product_attention`. Time is that of the device, ten calls queued one
behind the other as the layers of a model are; beside it stands one call with an idle device, which also waits for the processor.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from experiments.recipe import Bar, Block, Setting, Table
from heedful import Gaussian, attend
from heedful._errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


HEADS, SIZE, BANDWIDTH, ROWS, CALLS = 8, 64, 4.0, 64, 10
BARS = {"time": 1.25, "memory": 1.2}


def run(setting: Setting) -> dict[str, Any]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    if not setting.device.startswith("cuda"):
        raise Unsupported("symmetry-gaussian measures a GPU; run it where torch.cuda.is_available()")
    n = 2048 if setting.quick else 16384
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, HEADS, n, SIZE, device=setting.device, dtype=torch.bfloat16).unbind()
    contestants: dict[str, Callable[[], Tensor]] = {
        "softmax": lambda: scaled_dot_product_attention(query, key, value),
        "gaussian": lambda: attend(query, key, value, kernel=Gaussian(BANDWIDTH)),
    }
    exact = attend(
        query[..., :ROWS, :].double(), key.double(), value.double(), kernel=Gaussian(BANDWIDTH), impl="reference"
    )
    error = float((contestants["gaussian"]()[..., :ROWS, :].double() - exact).norm() / exact.norm())
    if error > 2e-2:
        raise Unsupported(f"Gaussian attention is off by {error:.2g} here; no time is taken of a wrong result")
    taken = {calls: {name: [] for name in contestants} for calls in (CALLS, 1)}
    for repeat in range(30):
        for calls, times in taken.items():
            for name, call in contestants.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(calls):
                    call()
                end.record()
                torch.cuda.synchronize()
                if repeat >= 5:
                    times[name].append(start.elapsed_time(end) / calls)
    queued, alone = taken[CALLS], taken[1]
    peaks = {}
    for name, call in contestants.items():
        torch.cuda.reset_peak_memory_stats()
        call()
        peaks[name] = torch.cuda.max_memory_allocated()
    return {
        "n": n,
        "error": error,
        "ms": {name: median(times) for name, times in queued.items()},
        "spread_ms": {name: [min(times), max(times)] for name, times in queued.items()},
        "alone_ms": {name: median(times) for name, times in alone.items()},
        "peak_bytes": peaks,
        "matrix_bytes": HEADS * n * n * 2,
        "implementation": attend.plan(query, key, value, kernel=Gaussian(BANDWIDTH)).chosen,
    }


def tables(result: dict[str, Any]) -> list[Block]:
    def row(what: str, figures: dict[str, float], unit: float, how: str, bound: float | None) -> list[str]:
        bar = Bar(what, figures["gaussian"] / figures["softmax"], bound, at_least=False, shown=".2f")
        both = [f"{figures[name] / unit:{how}}" for name in ("softmax", "gaussian")]
        return [what, *both, bar.cells[1], bar.wanted, bar.verdict if bound else ""]

    rows = [
        row("time, ms", result["ms"], 1, ".3f", BARS["time"]),
        row("one call alone, ms", result["alone_ms"], 1, ".3f", None),
        row("peak memory, inputs included, MiB", result["peak_bytes"], 2**20, ".0f", BARS["memory"]),
    ]
    return [
        Table(["", "softmax (SDPA)", "Gaussian (`attend`)", "ratio", "bar", ""], rows),
        f"n = {result['n']:,}, by `{result['implementation']}`, relative error {result['error']:.1e} against float64. "
        f"All coefficients in bfloat16 would be {result['matrix_bytes'] / 2**30:.1f} GiB.",
    ]

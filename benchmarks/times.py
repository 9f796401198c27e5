"""A bias of elapsed times beside plain attention on a CUDA device: `python -m benchmarks.times`.

Memory and time of `nn.TimeAttention(interaction="bias")`, whose bias is further coordinates of queries and keys, relative to torch's
attention without any bias, and to the same bias written out for all pairs. Each is compared with float64 before it is timed. The raw
figures are printed as JSON and go to `benchmarks/results/times.json`; the exit code is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.bars import Bar
from benchmarks.gpu import concluded, machine, prepare
from benchmarks.timing import RESULTS, WrongResult, interleaved
from heedful import attend, masks
from heedful.nn import Attention, BochnerTime, TimeAttention

MEMORY, SPEED, PAIRS = 1.4, 2.0, 2**30
# Queries compared with float64, and the relative error that 16 bit may have.
COMPARED, ERROR = 64, 2e-2


@dataclass(frozen=True)
class Setting:
    length: int = 8192
    heads: int = 8
    head_dim: int = 64
    frequencies: int = 16
    dtype: str = "bfloat16"
    device: str = "cuda"


class Operators:
    """Attention of given queries, keys and values: without a bias, with one of elapsed times, and with that written out."""

    def __init__(self, setting: Setting, is_causal: bool) -> None:
        torch.manual_seed(0)
        place: dict[str, Any] = {"device": setting.device, "dtype": getattr(torch, setting.dtype)}
        shape = 1, setting.heads, setting.length, setting.head_dim
        self.leaves = [torch.randn(shape, **place, requires_grad=True) for _ in range(3)]
        self.times = unix(setting)
        self.encoding = BochnerTime(2 * setting.frequencies).calibrate(self.times).to(setting.device)
        size = setting.heads, setting.frequencies
        self.amplitudes = [torch.randn(size, device=setting.device).mul(0.25).requires_grad_() for _ in range(2)]
        self.is_causal = is_causal
        self.like = self.leaves[0]
        self.own = {"plain": self.leaves, "bias": self._all(), "explicit": self._all()}

    def _all(self) -> list[Tensor]:
        return [*self.leaves, *self.amplitudes, *self.encoding.parameters()]

    def factors(self) -> tuple[Tensor, Tensor]:
        angles = 2 * math.pi * self.encoding.turns(self.times - self.times[:, :1])[:, None]  # [1, 1, n, r]
        cosine, sine = angles.cos(), angles.sin()
        a, b = (x[:, None] for x in self.amplitudes)
        left = torch.cat((a * cosine + b * sine, a * sine - b * cosine), dim=-1)
        dtype = self.leaves[0].dtype
        return left.to(dtype), torch.cat((cosine, sine), dim=-1).to(dtype)

    def plain(self) -> Tensor:
        return sdpa(*self.leaves, is_causal=self.is_causal)

    def bias(self) -> Tensor:
        return attend(*self.leaves, masks.low_rank(*self.factors()), is_causal=self.is_causal)

    def explicit(self) -> Tensor:
        left, right = self.factors()
        added = left @ right.mT
        if self.is_causal:
            hidden = torch.ones(added.shape[-2:], dtype=torch.bool, device=added.device).triu(1)
            added = added.masked_fill(hidden, -math.inf)
        return sdpa(*self.leaves, attn_mask=added)

    @torch.no_grad()
    def error(self, run: Callable[[], Tensor], biased: bool) -> float:
        """Of some queries, relative to float64."""
        length = self.times.shape[1]
        rows = torch.linspace(0, length - 1, min(COMPARED, length), device=self.times.device).long()
        query, key, value = (x.double() for x in self.leaves)
        scores = query[:, :, rows] @ key.mT / math.sqrt(query.shape[-1])
        if biased:
            elapsed = (self.times[0, rows, None] - self.times[0])[..., None]
            angles = 2 * math.pi * self.encoding.rates() * elapsed  # [rows, n, r]
            a, b = (x.double() for x in self.amplitudes)
            scores = (
                scores + torch.einsum("hr,ijr->hij", a, angles.cos()) + torch.einsum("hr,ijr->hij", b, angles.sin())
            )
        if self.is_causal:
            later = torch.arange(length, device=rows.device) > rows[:, None]
            scores = scores.masked_fill(later, -math.inf)
        wanted = scores.softmax(-1) @ value
        return float((run()[:, :, rows].double() - wanted).norm() / wanted.norm())

    def runs(self) -> dict[str, Callable[[], Tensor]]:
        found: dict[str, Callable[[], Tensor]] = {"plain": self.plain, "bias": self.bias, "explicit": self.explicit}
        for name, run in found.items():
            error = self.error(run, name != "plain")
            if not error < ERROR:
                raise WrongResult(f"{name} has relative error {error:.1e}, allowed {ERROR:.0e}")
        return found


class Layers:
    """The same inside layers: projections in and out, phases and factors included."""

    def __init__(self, setting: Setting, is_causal: bool) -> None:
        torch.manual_seed(0)
        place: dict[str, Any] = {"device": setting.device, "dtype": getattr(torch, setting.dtype)}
        size = setting.heads * setting.head_dim
        self.x = torch.randn(1, setting.length, size, **place, requires_grad=True)
        self.times, self.is_causal = unix(setting), is_causal
        self.layers: dict[str, nn.Module] = {"plain": Attention(size, setting.heads, **place)}
        self.layers["bias"] = TimeAttention(
            size, setting.heads, "bias", encoding=BochnerTime(2 * setting.frequencies), **place
        ).calibrate(self.times)
        self.like = self.x
        self.own = {name: [self.x, *layer.parameters()] for name, layer in self.layers.items()}

    def runs(self) -> dict[str, Callable[[], Tensor]]:
        plain, bias = self.layers["plain"], self.layers["bias"]
        return {
            "plain": lambda: plain(self.x, need_weights=False, is_causal=self.is_causal)[0],
            "bias": lambda: bias(self.x, self.times, is_causal=self.is_causal),
        }


def unix(setting: Setting) -> Tensor:
    """Seconds since 1970, a gap of an hour on average."""
    gaps = torch.empty(1, setting.length, dtype=torch.float64).exponential_(1 / 3600)
    return (1.4e9 + gaps.cumsum(1)).to(setting.device)


def measured(setting: Setting, repeats: int) -> Iterator[dict[str, Any]]:
    """Peak memory, inputs included, and milliseconds of each contestant at each level and in each direction."""
    for level in (Operators, Layers):
        for is_causal in (False, True):
            made = level(setting, is_causal)
            runs = made.runs()

            above = torch.ones_like(made.like)

            def backward(
                name: str, run: Callable[[], Tensor], made: Any = made, above: Tensor = above
            ) -> Callable[[], Any]:
                return lambda: torch.autograd.grad(run(), made.own[name], above)

            directions = {
                "forward": {name: torch.no_grad()(run) for name, run in runs.items()},
                "forward+backward": {name: backward(name, run) for name, run in runs.items()},
            }
            for direction, ways in directions.items():
                peaks = {name: peak(run, setting.device) for name, run in ways.items()}
                timings = interleaved(ways, repeats, setting.device, least=2.0 if setting.device == "cuda" else 0.0)
                yield {
                    "level": "operator" if level is Operators else "layer",
                    "is_causal": is_causal,
                    "direction": direction,
                    "peak": peaks,
                    "milliseconds": {name: asdict(one) for name, one in timings.items()},
                }


def peak(run: Callable[[], Any], device: str) -> int | None:
    """Bytes at most while it runs, after a call that compiles."""
    run()
    if device != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def bars(rows: list[dict[str, Any]]) -> list[Bar]:
    """Those of attention without a mask; the figures of causal attention are told for completeness."""
    made = []
    for row in rows:
        if row["is_causal"]:
            continue
        name, peaks = f"{row['level']}, {row['direction']}", row["peak"]
        times = {one: timing["median"] for one, timing in row["milliseconds"].items()}
        known = peaks["plain"] is not None
        memory, speed = (x["bias"] / x["plain"] if known else None for x in (peaks, times))
        made.append(Bar(name, "memory of the bias / plain", MEMORY, at_least=False, value=memory))
        made.append(Bar(name, "time of the bias / plain", SPEED, at_least=False, value=speed))
        if "explicit" in peaks:
            extra = peaks["explicit"] - peaks["plain"] if known else None
            made.append(Bar(name, "bytes of a bias of all pairs beyond plain", PAIRS, value=extra))
    return made


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.times", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a small run that tries the driver"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the raw figures go")
    asked = parser.parse_args(given)
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; --device cpu tries the driver at small sizes", file=sys.stderr)
        return 2
    setting = Setting() if asked.device == "cuda" else Setting(61, 2, 16, 3, "float32", "cpu")
    prepare(asked.device)
    result: dict[str, Any] = {"machine": machine(asked.device), "setting": asdict(setting), "rows": []}
    for row in measured(setting, 21 if asked.device == "cuda" else 3):
        result["rows"].append(row)
    return concluded(result, bars(result["rows"]), asked.out / "times.json" if asked.device == "cuda" else None)


if __name__ == "__main__":
    sys.exit(main())

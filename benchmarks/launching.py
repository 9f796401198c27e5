"""What a call costs the processor that launches it, and what a training step of a small GPT gains or loses by it: `python -m benchmarks.launching`.

Three parts, each by the same contestants: torch's `scaled_dot_product_attention`, and `attend` with softmax, sigmoid, squared ReLU and
Gaussian kernels. `host`: microseconds until a call returns, with the device idle before, without and with gradients. `short`: milliseconds of a
forward pass at 256 to 4,096 tokens (16,384 in a batch), called one by one and replayed as a CUDA graph. `step`: tokens a second of a training
step of GPT-2-small (12 layers, 12 heads of 64, causal, autocast to bfloat16, AdamW), eager and compiled, at 1,024 and 4,096 tokens. Results and
gradients of calls that take the short way are compared with float64 before anything is timed.
The raw figures are printed as JSON and go to `benchmarks/results/launching.json`; the exit code is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from benchmarks.bars import Bar
from benchmarks.gpu import concluded, machine, prepare
from benchmarks.timing import RESULTS, WrongResult, interleaved, synchronize
from heedful import Gaussian, Kernel, ReluSquared, Sigmoid, Softmax, attend

KERNELS: dict[str, Kernel] = {
    "Softmax": Softmax(),
    "Sigmoid": Sigmoid(bias=-5.0),
    "ReluSquared": ReluSquared(),
    "Gaussian raw": Gaussian(normalize=False),
    "Gaussian": Gaussian(),
}
# Microseconds without and with gradients.
HOST = {"Sigmoid": (60, 110), "ReluSquared": (60, 110), "Gaussian raw": (60, 110), "Gaussian": (80, 140)}
OVER_TORCH = 15.0
# Tokens a second over those of torch's attention: compiled, and eager.
COMPILED = {"Softmax": 0.99, "Sigmoid": 1.0, "ReluSquared": 1.0, "Gaussian": 0.97}
EAGER = 0.97
TORCH = "torch"
CLOSE = 1e-2


@dataclass(frozen=True)
class Setting:
    tokens: int = 16_384
    heads: int = 16
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    steps: tuple[int, ...] = (1024, 4096)
    layers: int = 12
    width: int = 768
    vocabulary: int = 50_304
    repeats: int = 11
    seconds: float = 600.0  # in which compiled steps are begun
    compiled: tuple[str, ...] = (TORCH, "Softmax", "Sigmoid", "ReluSquared", "Gaussian")
    device: str = "cuda"


QUICK = Setting(64, 2, (32,), (32,), 1, 32, 64, 3, 60.0, (), "cpu")


def attention(name: str, is_causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if name == TORCH:
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    kernel = KERNELS[name]
    return lambda q, k, v: attend(q, k, v, is_causal=is_causal, kernel=kernel)


def check(setting: Setting) -> dict[str, float]:
    """The largest relative error of results and gradients, each of the third call of a form with other numbers."""
    kind = torch.bfloat16 if setting.device == "cuda" else torch.float32
    errors: dict[str, float] = {}
    for name in KERNELS:
        for causal in (False, True):
            # Heads apart, and heads beside one another; so many pairs that `auto` takes the fused kernels on a GPU.
            for shape in ((16, 16, 193, 64), (16, 193, 16, 64)):
                for _ in range(3):
                    drawn = [torch.randn(shape, device=setting.device).to(kind) for _ in range(4)]
                    drawn = drawn if shape[1] == 16 else [x.transpose(1, 2) for x in drawn]
                    ours = _all(attention(name, causal), drawn)
                wanted = [x.double() for x in drawn]
                kernel = KERNELS[name]
                truth = _all(lambda *x, c=causal, k=kernel: attend(*x, is_causal=c, kernel=k, impl="reference"), wanted)
                for a, b in zip(ours, truth, strict=True):
                    error = float((a.detach().double() - b.detach()).norm() / b.detach().norm())
                    errors[name] = max(errors.get(name, 0.0), error)
        if not errors[name] < CLOSE:
            raise WrongResult(f"{name} has relative error {errors[name]:.2e}, allowed {CLOSE:.0e}")
    return errors


def _all(run: Callable[..., Tensor], drawn: Sequence[Tensor]) -> list[Tensor]:
    """The result, without and with gradients asked for, and the gradients."""
    leaves = [x.detach().requires_grad_() for x in drawn[:3]]
    with torch.no_grad():
        plain = run(*leaves)
    out = run(*leaves)
    return [plain, out, *torch.autograd.grad(out, leaves, drawn[3])]


def host(setting: Setting) -> list[dict[str, Any]]:
    """Microseconds of the processor for one call, the median of rounds of ten."""
    rows = []
    size, length = (64, 1024) if setting.device == "cuda" else (8, 32)
    shape = (setting.tokens // length, setting.heads, length, size)
    kind = torch.bfloat16 if setting.device == "cuda" else torch.float32
    for causal in (False, True):
        for name in (TORCH, *KERNELS):
            run = attention(name, causal)
            row: dict[str, Any] = {"contestant": name, "causal": causal, "shape": shape}
            for grad in (False, True):
                leaves = [torch.randn(shape, device=setting.device, dtype=kind, requires_grad=grad) for _ in range(3)]
                above = torch.randn(shape, device=setting.device, dtype=kind)

                def call(run=run, leaves=leaves, above=above, grad=grad) -> None:
                    out = run(*leaves)
                    if grad:
                        torch.autograd.grad(out, leaves, above)

                row["with gradients" if grad else "without"] = _returned(call, setting)
            rows.append(row)
    return rows


def _returned(call: Callable[[], None], setting: Setting) -> float:
    for _ in range(5):
        call()
    taken = []
    for _ in range(setting.repeats):
        synchronize(setting.device)
        begun = time.perf_counter()
        for _ in range(10):
            call()
        taken.append(1e5 * (time.perf_counter() - begun))
        synchronize(setting.device)
    return round(statistics.median(taken), 1)


def short(setting: Setting) -> list[dict[str, Any]]:
    """Milliseconds of forward passes, one by one and as a CUDA graph."""
    rows = []
    for length in setting.lengths if setting.device == "cuda" else ():
        shape = (setting.tokens // length, setting.heads, length, 64)
        x = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        runs = {name: partial(attention(name, False), *x) for name in (TORCH, *KERNELS)}
        with torch.no_grad():
            eager = interleaved(runs, setting.repeats, "cuda", 5.0)
            graphs = interleaved({n: _graph(run) for n, run in runs.items()}, setting.repeats, "cuda", 5.0)
        flops = 4 * shape[0] * shape[1] * length**2 * 64
        for name in runs:
            times = {"called": asdict(eager[name]), "replayed": asdict(graphs[name])}
            rates = {f"{way} TFLOP/s": round(flops / time["median"] / 1e9, 1) for way, time in times.items()}
            rows.append({"contestant": name, "shape": shape, **times, **rates})
    return rows


def _graph(run: Callable[[], Tensor]) -> Callable[[], None]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.attention = heads, attention

    def forward(self, x: Tensor) -> Tensor:
        split = self.inward(self.first(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)  # [B, H, 3, n, D]
        x = x + self.outward(self.attention(*split.unbind(2)).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    def __init__(self, setting: Setting, length: int, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        wide, heads = setting.width, max(1, setting.width // 64)
        self.words, self.places = nn.Embedding(setting.vocabulary, wide), nn.Embedding(length, wide)
        self.blocks = nn.ModuleList(Block(wide, heads, attention) for _ in range(setting.layers))
        self.norm = nn.LayerNorm(wide)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.words.weight.T
        return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def stepping(setting: Setting, length: int, name: str, mode: str | None) -> Callable[[], Any]:
    """A training step; `mode` is that of `torch.compile`, None for eager."""
    torch.manual_seed(0)
    model: Any = Gpt(setting, length, attention(name, True)).to(setting.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=setting.device == "cuda")
    run = model if mode is None else torch.compile(model, fullgraph=True, mode=mode)
    ids = torch.randint(setting.vocabulary, (max(1, setting.tokens // length), length), device=setting.device)

    def step() -> None:
        with torch.autocast(setting.device, torch.bfloat16):
            loss = run(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps(setting: Setting) -> list[dict[str, Any]]:
    """Eager steps first; compiled ones are begun while there is time, and who has none says so."""
    rows: list[dict[str, Any]] = []
    contestants = (TORCH, *KERNELS) if setting.device == "cuda" else (TORCH, "Sigmoid")
    until = time.monotonic() + setting.seconds
    graphs = ("Sigmoid",) if setting.compiled else ()
    ways = [("eager", length, contestants, None) for length in setting.steps]
    ways += [("compiled", length, setting.compiled, "default") for length in setting.steps]
    ways += [("reduce-overhead", setting.steps[0], graphs, "reduce-overhead")]
    for way, length, names, mode in ways:
        tokens = max(1, setting.tokens // length) * length
        runs = {}
        for name in names:
            if mode and time.monotonic() > until:
                rows.append({"contestant": name, "way": way, "length": length, "skipped": "no time was left"})
                continue
            if mode:
                torch._dynamo.reset()
            runs[name] = stepping(setting, length, name, mode)
            for _ in range(3):
                runs[name]()
            synchronize(setting.device)
        for name, found in (interleaved(runs, setting.repeats, setting.device) if runs else {}).items():
            rate = round(1e3 * tokens / found.median)
            rows.append(
                {"contestant": name, "way": way, "length": length, "milliseconds": asdict(found), "tokens/s": rate}
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def bars(found: dict[str, Any]) -> list[Bar]:
    judged = []
    by = {(row["contestant"], row["causal"]): row for row in found["host"]}
    for (name, causal), row in by.items():
        where = f"{name}{', causal' if causal else ''}"
        for at, way in enumerate(("without", "with gradients")):
            if name in HOST:
                judged.append(Bar(where, f"us of host, {way}", HOST[name][at], at_least=False, value=row[way]))
        if name == "Softmax" and not causal:
            over = row["without"] - by[TORCH, causal]["without"]
            judged.append(Bar(where, "us of host over torch's", OVER_TORCH, at_least=False, value=round(over, 1)))
    timed = [row for row in found["step"] if "tokens/s" in row]
    rates = {(row["way"], row["length"], row["contestant"]): row["tokens/s"] for row in timed}
    for (way, length, name), rate in rates.items():
        bound = EAGER if way == "eager" else COMPILED.get(name)
        if name == TORCH or bound is None or (way, length, TORCH) not in rates:
            continue
        share = round(rate / rates[way, length, TORCH], 3)
        judged.append(Bar(f"GPT-2-small, {length} tokens, {way}, {name}", "tokens/s over torch's", bound, value=share))
    return judged


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launching", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("--quick", action="store_true", help="small sizes that try the driver and judge nothing")
    parser.add_argument("--eager", action="store_true", help="without compiled steps, which take minutes to compile")
    parser.add_argument("--seconds", type=float, default=Setting.seconds, help="begin no compiled step after so many")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the raw figures go")
    asked = parser.parse_args(given)
    if not asked.quick and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --quick tries the driver on a CPU")
    setting = QUICK if asked.quick else Setting(seconds=asked.seconds, **({"compiled": ()} if asked.eager else {}))
    prepare(setting.device)
    parts = {"errors": check, "host": host, "short": short, "step": steps}
    found: dict[str, Any] = {}
    for name, part in parts.items():
        found[name] = part(setting)
        print(name, found[name], file=sys.stderr, flush=True)
    result = {"machine": machine(setting.device), "setting": asdict(setting), **found}
    return concluded(result, [] if asked.quick else bars(found), None if asked.quick else asked.out / "launching.json")


if __name__ == "__main__":
    sys.exit(main())

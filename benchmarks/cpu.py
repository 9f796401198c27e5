"""CPU ratios of `attend` to torch's attention and between its own implementations: `make bench`.

Absolute times on a shared machine mean little; ratios of medians of interleaved repeats in one run mean something. The bars
are the project's own, and a missed one is printed as missed.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from experiments.recipe import Table
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.timing import Contest, Outcome, measure, write
from heedful import FeatureMap, Gaussian, Kernel, Sigmoid, Softmax, attend
from heedful.nn import Attention, InvariantCoefficients

HEADS, DIM = 4, 64

# contest, what is compared, with what, the bar on the ratio of their times (None: told for completeness), and whether the
# bar is from above
BARS: list[tuple[str, str, str, float | None, bool]] = [
    ("n=2048", "attend(Softmax)", "sdpa", 1.03, True),
    ("n=2048 causal", "attend(Softmax)", "sdpa", 1.03, True),
    ("n=2048", "attend(Gaussian)", "sdpa", 1.25, True),
    ("n=2048 causal", "attend(Gaussian)", "sdpa", 1.25, True),
    ("n=2048 forward+backward", "attend(Gaussian)", "sdpa", 1.25, True),
    ("n=2048", "reference(Sigmoid)", "stream(Sigmoid)", 1.0, False),
    ("n=4096", "reference(Sigmoid)", "stream(Sigmoid)", 1.5, False),
    ("n=2048 forward+backward", "reference(Sigmoid)", "stream(Sigmoid)", None, False),
    ("n=4096 forward+backward", "reference(Sigmoid)", "stream(Sigmoid)", None, False),
    ("n=8192", "sdpa", "linear(elu)", 10.0, False),
    ("n=8192 causal", "sdpa", "linear(elu)", None, False),
    ("layers", "InvariantCoefficients", "Attention, 4 heads", 4.0, True),
    ("layers", "InvariantCoefficients", "Attention, 8 heads", None, True),
    ("layers", "InvariantCoefficients", "Attention, 1 head", None, True),
]

OURS: dict[str, tuple[Kernel, str]] = {
    "attend(Softmax)": (Softmax(), "auto"),
    "attend(Gaussian)": (Gaussian(4.0), "auto"),
    "reference(Sigmoid)": (Sigmoid(), "reference"),
    "stream(Sigmoid)": (Sigmoid(), "stream"),
    "linear(elu)": (FeatureMap("elu"), "linear"),
}


def contest(name: str, length: int, names: list[str], *, is_causal: bool, backward: bool) -> Contest:
    torch.manual_seed(0)
    leaves = [torch.randn(1, HEADS, length, DIM, requires_grad=backward) for _ in range(3)]
    # The truth is computed on one head and a stretch of queries at a time, so that float64 fits.
    wide = [x.detach()[:, :1].double() for x in leaves]

    def forward(one: str, entries: list[torch.Tensor], impl: str | None = None) -> torch.Tensor:
        if one == "sdpa" and impl is None:
            return sdpa(*entries, is_causal=is_causal)
        kernel, named = OURS.get(one, (Softmax(), "auto"))
        return attend(*entries, is_causal=is_causal, kernel=kernel, impl=impl or named)

    def timed(one: str) -> torch.Tensor:
        if not backward:
            with torch.no_grad():
                return forward(one, leaves)[:, :1]
        out = forward(one, leaves)
        gradient = torch.autograd.grad(out.square().sum(), leaves)[0]
        return gradient[:, :1]

    def truth(one: str) -> torch.Tensor:
        entries = [x.clone().requires_grad_(backward) for x in wide]
        out = forward(one, entries, "stream")
        return torch.autograd.grad(out.square().sum(), entries)[0] if backward else out

    return Contest(name, {n: lambda n=n: timed(n) for n in names}, {n: lambda n=n: truth(n) for n in names})


def layers() -> Contest:
    """Layers of width 16 on 32 sequences of 256 tokens, forward and backward: coefficients of inner products beside attention."""
    torch.manual_seed(0)
    x = torch.randn(32, 256, 16, requires_grad=True)
    made: dict[str, torch.nn.Module] = {
        "InvariantCoefficients": InvariantCoefficients(),
        "Attention, 4 heads": Attention(16, 4),
        "Attention, 8 heads": Attention(16, 8),
        "Attention, 1 head": Attention(16, 1),
    }

    def gradient(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = layer(x)[0] if isinstance(layer, InvariantCoefficients) else layer(x, need_weights=False)[0]
        return torch.autograd.grad(out.square().sum(), [x, *layer.parameters()], allow_unused=True)[0]

    def truth(layer: torch.nn.Module) -> torch.Tensor:
        return gradient(copy.deepcopy(layer).double(), x.detach().double().requires_grad_())

    runs = {name: lambda layer=layer: gradient(layer, x) for name, layer in made.items()}
    return Contest("layers", runs, {name: lambda layer=layer: truth(layer) for name, layer in made.items()})


def contests() -> Iterator[tuple[Contest, int]]:
    """Every contest that a bar names, with its repeats."""
    yield layers(), 11
    for name in dict.fromkeys(bar[0] for bar in BARS if bar[0] != "layers"):
        length = int(name.split()[0].removeprefix("n="))
        names = list(dict.fromkeys(n for bar in BARS if bar[0] == name for n in bar[1:3]))
        made = contest(name, length, names, is_causal="causal" in name, backward="backward" in name)
        yield made, {2048: 61, 4096: 11, 8192: 7}[length]


@dataclass(frozen=True)
class Row:
    setting: str
    compared: str
    ratio: float
    bar: str
    verdict: str


def rows(outcomes: list[Outcome]) -> list[Row]:
    by_name = {outcome.name: outcome for outcome in outcomes}
    made = []
    for name, above, below, bar, at_most in BARS:
        times = by_name[name].milliseconds
        ratio = times[above] / times[below]
        told, verdict = "", ""
        if bar is not None:
            told = f"{'<=' if at_most else '>='} {bar:g}"
            verdict = "met" if (ratio <= bar if at_most else ratio >= bar) else "MISSED"
        made.append(Row(name, f"{above} / {below}", ratio, told, verdict))
    return made


def section(outcomes: list[Outcome]) -> list[str]:
    """The lines of docs/performance.md about the CPU."""
    body = [(row.setting, row.compared, f"{row.ratio:.2f}", row.bar, row.verdict) for row in rows(outcomes)]
    return [
        f"Ratios of median times, batch 1, {HEADS} heads of size {DIM}, float32, interleaved repeats in one run. Every contestant met",
        "a float64 reference first.",
        "",
        str(Table(["setting", "ratio of times", "measured", "bar", ""], body)),
        "",
        "`sdpa` is `torch.nn.functional.scaled_dot_product_attention`. The kernels of `reference` and `stream` have no fused",
        "peer on CPU; they are compared with each other. With backward, `stream` multiplies seven matrices where `reference`",
        "multiplies six, so it wins by memory traffic alone. `linear` computes another kernel than `sdpa`: the ratio is what",
        "that choice saves, not a faster softmax; causal `sdpa` does half the work, and causal `linear` more.",
        "",
        "`layers` are modules of width 16 on 32 sequences of 256 tokens, forward and backward: `nn.InvariantCoefficients`, whose 8 units",
        "are as many heads, beside `nn.Attention`.",
        "",
    ]


def main(given: list[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__).parse_args(given)
    torch.set_num_threads(2)
    outcomes = []
    for made, repeats in contests():
        print(f"{made.name} ...", file=sys.stderr)
        outcomes.append(measure(made, repeats))
    table = rows(outcomes)
    for row in table:
        print(f"{row.setting:<26} {row.compared:<38} {row.ratio:6.2f}  {row.bar:<8} {row.verdict}")
    print(f"raw figures in {write('cpu', outcomes)}")

    from benchmarks.pages import write_page

    print(f"wrote {write_page()}")
    return int(any(row.verdict == "MISSED" for row in table))


if __name__ == "__main__":
    sys.exit(main())

"""What it costs to measure attention between kinds of tokens: `python -m benchmarks.flow`.

A decoder of 8 heads reads 16,384 tokens, of which most stand for pictures. Beside its plain forward pass: the same with `lens.flow` in its
three modes (time and peak memory), and, at a length where that fits, what people do today, eager attention that returns its maps, summed
up. Shares are compared with those of the maps in float64 before anything is timed. On a CUDA device in bfloat16, with two bars: 64 MB more
memory and twice the time of the forward pass. On a CPU in float32 with one layer; there time is that of the
process, and memory that of a process of its own.
The raw figures are printed as JSON and go to `benchmarks/results/flow.json` (`flow_cpu.json` on a CPU); the exit code is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bars import Bar
from benchmarks.gpu import concluded, machine, prepare
from benchmarks.times import peak
from benchmarks.timing import RESULTS, Timing, WrongResult, interleaved
from heedful.lens import flow

# Bytes beyond the forward pass, and how many times its time.
MEMORY, TIME = 64e6, 2.0
MODES = ("fraction", "norm", "flow")
KINDS = ["text", "image"]


@dataclass(frozen=True)
class Setting:
    tokens: int = 16_384
    maps: int = 4_096  # tokens at which maps fit
    heads: int = 8
    width: int = 64
    layers: int = 8
    repeats: int = 11
    dtype: str = "bfloat16"
    device: str = "cuda"


ON_CPU = Setting(layers=1, maps=2_048, repeats=3, dtype="float32", device="cpu")
QUICK = Setting(tokens=257, maps=131, layers=2, repeats=3, dtype="float32", device="cpu")


def decoder(setting: Setting, implementation: str = "sdpa") -> Any:
    from transformers import LlamaConfig, LlamaModel

    wide = setting.heads * setting.width
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=wide,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        intermediate_size=11 * wide // 4,
        max_position_embeddings=max(setting.tokens, 512),
        # Attention far from even.
        initializer_range=0.15,
        attn_implementation=implementation,
    )
    torch.manual_seed(0)
    return LlamaModel(config).eval().to(setting.device, getattr(torch, setting.dtype))


def inputs(setting: Setting, tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens, and their kinds: a picture of 7/8 of them behind a short text, then the rest of the text."""
    ids = torch.randint(64, (1, tokens), generator=torch.Generator().manual_seed(1)).to(setting.device)
    at = torch.arange(tokens)
    return ids, ((at >= tokens // 32) & (at < tokens // 32 + 7 * tokens // 8)).long()


def ways(setting: Setting, tokens: int, *, maps: bool = False) -> dict[str, Callable[[], Any]]:
    """Each way to run the model on so many tokens."""
    model = decoder(setting)
    ids, kinds = inputs(setting, tokens)

    @torch.no_grad()
    def forward() -> Any:
        return model(input_ids=ids, use_cache=False)

    def measuring(mode: str) -> Callable[[], Any]:
        return lambda: flow(model, {"input_ids": ids, "use_cache": False}, modality=kinds, names=KINDS, mode=mode)

    runs = {"forward": forward, **{mode: measuring(mode) for mode in MODES}}
    if maps:
        eager = decoder(setting, "eager")

        @torch.no_grad()
        def written() -> Any:
            found = eager(input_ids=ids, use_cache=False, output_attentions=True).attentions
            differ = (kinds[:, None] != kinds).to(setting.device)
            return [float((one.float() * differ).sum() / one.float().sum()) for one in found]

        runs["maps"] = written
    return runs


def check(setting: Setting) -> float:
    """The largest error of a share, of layers and heads, beside maps in float64 of the same weights."""
    ids, kinds = inputs(setting, 257)
    wanted = decoder(replace(setting, dtype="float64", device="cpu"), "eager")
    wanted.load_state_dict({name: value.cpu() for name, value in decoder(setting).state_dict().items()})
    with torch.no_grad():
        maps = wanted(input_ids=ids.cpu(), use_cache=False, output_attentions=True).attentions
    theirs = flow(list(maps), modality=kinds, names=KINDS)
    ours = flow(decoder(setting), {"input_ids": ids, "use_cache": False}, modality=kinds, names=KINDS)
    errors = [float((a.imf - b.imf).abs().max()) for a, b in zip(ours.layers, theirs.layers, strict=True)]
    # In 16 bit the model itself is not that of float64; its first layer is.
    error, allowed = (max(errors), 1e-5) if setting.dtype == "float32" else (errors[0], 1e-2)
    if not error < allowed:
        raise WrongResult(f"a share has error {error:.1e}, allowed {allowed:.0e}")
    return error


def memory(setting: Setting, name: str) -> int:
    """Bytes at most while it runs; on a CPU those of a process of its own."""
    if setting.device == "cuda":
        return peak(ways(setting, setting.tokens)[name], "cuda") or 0
    command = [sys.executable, "-m", "benchmarks.flow", "--alone", name, "--setting", json.dumps(asdict(setting))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    return int(done.stdout.split()[-1])


def highest() -> int:
    """The most memory that this process has held. What getrusage says is also that of whoever started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def timed(runs: dict[str, Callable[[], Any]], setting: Setting) -> dict[str, Timing]:
    """Each in turn. On a CPU by the time of the process, which other work on the machine does not lengthen."""
    if setting.device == "cuda":
        return interleaved(runs, setting.repeats, setting.device)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(setting.repeats):
        for name, run in runs.items():
            begun = time.process_time()
            run()
            taken[name].append(1e3 * (time.process_time() - begun))
    quartiles = {name: statistics.quantiles(one, n=4) for name, one in taken.items()}
    return {name: Timing(mid, low, high, setting.repeats, 1) for name, (low, mid, high) in quartiles.items()}


def measured(setting: Setting) -> dict[str, Any]:
    error = check(setting)
    long = timed(ways(setting, setting.tokens), setting)
    short = timed(ways(setting, setting.maps, maps=True), setting)
    return {
        "error": error,
        "peak": {name: memory(setting, name) for name in ("forward", *MODES)},
        "milliseconds": {name: asdict(one) for name, one in long.items()},
        "beside_maps": {name: asdict(one) for name, one in short.items()},
        "bytes_of_one_map": setting.heads * setting.tokens**2 * getattr(torch, setting.dtype).itemsize,
    }


def bars(found: dict[str, Any], setting: Setting) -> list[Bar]:
    name = f"{setting.tokens} tokens, {setting.heads} heads"
    times = {way: timing["median"] for way, timing in found["milliseconds"].items()}
    more = found["peak"]["fraction"] - found["peak"]["forward"]
    return [
        Bar(name, "bytes beyond the forward pass", MEMORY, at_least=False, value=more),
        Bar(name, "time / forward pass", TIME, at_least=False, value=times["fraction"] / times["forward"]),
    ]


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flow", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--quick", action="store_true", help="small sizes that try the driver and judge nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the raw figures go")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    asked = parser.parse_args(given)
    if asked.alone:
        setting = Setting(**json.loads(asked.setting))
        prepare(setting.device)
        ways(setting, setting.tokens)[asked.alone]()
        print(highest())
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    setting = QUICK if asked.quick else Setting() if device == "cuda" else ON_CPU
    prepare(setting.device)
    found = measured(setting)
    judged = [] if asked.quick else bars(found, setting)
    result: dict[str, Any] = {"machine": machine(setting.device), "setting": asdict(setting), **found}
    name = "flow.json" if device == "cuda" else "flow_cpu.json"
    return concluded(result, judged, None if asked.quick else asked.out / name)


if __name__ == "__main__":
    sys.exit(main())

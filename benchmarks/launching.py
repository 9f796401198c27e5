"""What a user gets of the fused kernels on a GPU, in a call and in a model: `python -m benchmarks.launching`.

Four parts, by the same contestants: torch's attention, and `attend` with sigmoid, squared ReLU and Gaussian kernels. `host`: microseconds until
a call returns, with the device idle before: without gradients, with gradients asked for, and with its backward pass; `layers`: the same of whole layers. `lengths`: forward and
backward passes at 256 to 65,536 tokens, head sizes 32 to 256, causal and under masks, replayed as CUDA graphs so that whoever launches them
does not count, and forward passes called one by one. `step`: tokens a second of a training step of GPT-2-small (12 layers, 12 heads of 64,
causal, autocast to bfloat16, AdamW), eager and compiled, at 1,024 and 4,096 tokens. Results and gradients, also of calls that take the short
way, are compared with float64 before anything is timed.
The raw figures are printed as JSON and go to `benchmarks/results/launching.json`, from case to case; `--resume` goes on behind the last one.
The exit code is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import lengths, steps
from benchmarks.bars import Bar
from benchmarks.gpu import concluded, machine, prepare
from benchmarks.lengths import BARRED, KERNELS, MORE, SPEED, TORCH, Case, attention
from benchmarks.steps import Runner, Steps
from benchmarks.timing import RESULTS, WrongResult, synchronize
from heedful import FeatureMap, attend
from heedful.nn import Attention, PrimalAttention

# Microseconds without and with gradients.
HOST = {"Sigmoid": (60, 110), "ReluSquared": (60, 110), "Gaussian raw": (60, 110), "Gaussian": (80, 140)}
OVER_TORCH = 15.0
# Causality and masks of calls whose host time is taken.
HOSTED = ((False, ""), (True, ""), (False, "padding"), (False, "packed"))
WAYS = {"without": 0, "with gradients": 1, "and backward": 1}
# Tokens a second over those of torch's attention: compiled, and eager.
COMPILED = {"Softmax": 0.99, "Sigmoid": 1.0, "ReluSquared": 1.0, "Gaussian": 0.97}
EAGER = 0.97
MODULE = "torch.nn.MultiheadAttention"
CLOSE = 1e-2
COMPARED = ("plain", "out", "dq", "dk", "dv")  # the result without and with gradients asked for, and gradients


Part = Callable[["Setting", list[dict[str, Any]], dict[tuple[str, int, str], Runner]], Iterator[None]]


@dataclass(frozen=True)
class Setting:
    tokens: int = 16_384
    heads: int = 16
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
    repeats: int = 7
    device: str = "cuda"
    step: Steps = field(default_factory=Steps)


QUICK = Setting(64, 2, (), 3, "cpu", Steps(64, (32,), 1, 32, 64, 3, 60.0, (), "cpu"))


def check(setting: Setting) -> dict[str, dict[str, float]]:
    """The largest relative errors of results and of each gradient, of the third call of a form with other numbers."""
    kind = torch.bfloat16 if setting.device == "cuda" else torch.float32
    errors: dict[str, dict[str, float]] = {}
    # Heads apart and beside one another; lengths that blocks divide and others; so many pairs that `auto` takes the fused kernels.
    shapes = ((16, 16, 193, 64), (16, 384, 16, 64), (8, 16, 256, 128), (2, 16, 1024, 64), (2, 1152, 16, 128))
    shapes = shapes if setting.device == "cuda" else ((2, 16, 193, 64),)
    for name, kernel in (KERNELS | MORE).items():
        errors[name] = {}
        for causal, mask in HOSTED:
            for shape in shapes[:1] if mask else shapes:
                case = Case(shape, causal, mask)
                hiding = lengths.mask_of(case, setting.device)
                run = lengths.masked(case, setting.device)[name] if mask else attention(name, causal)
                for _ in range(3):
                    drawn = [torch.randn(shape, device=setting.device).to(kind) for _ in range(4)]
                    drawn = drawn if shape[1] == 16 else [x.transpose(1, 2) for x in drawn]
                    ours = _all(run, drawn)
                wanted, how = [x.double() for x in drawn], {"is_causal": causal, "kernel": kernel, "impl": "reference"}
                truth = _all(lambda *x, hiding=hiding, how=how: attend(*x, hiding, **how), wanted)
                for what, a, b in zip(COMPARED, ours, truth, strict=True):
                    error = float((a.detach().double() - b.detach()).norm() / b.detach().norm())
                    if not error < CLOSE:
                        raise WrongResult(f"{name}, {case}: {what} has relative error {error:.2e}, allowed {CLOSE:.0e}")
                    errors[name][what] = max(errors[name].get(what, 0.0), error)
    return errors


def _all(run: Callable[..., Tensor], drawn: Sequence[Tensor]) -> list[Tensor]:
    """The result, without and with gradients asked for, and the gradients."""
    leaves = [x.detach().requires_grad_() for x in drawn[:3]]
    with torch.no_grad():
        plain = run(*leaves)
    out = run(*leaves)
    return [plain, out, *torch.autograd.grad(out, leaves, drawn[3])]


def host(setting: Setting) -> list[dict[str, Any]]:
    """Microseconds of the processor for one call, the median of rounds of ten that all take in turn: it is not always as fast."""
    size, length = (64, 1024) if setting.device == "cuda" else (8, 32)
    shape = (setting.tokens // length, setting.heads, length, size)
    kind = torch.bfloat16 if setting.device == "cuda" else torch.float32
    plain = [torch.randn(shape, device=setting.device, dtype=kind) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in plain]
    above = torch.randn(shape, device=setting.device, dtype=kind)
    rows, calls, taken = [], {}, {}
    for causal, mask in HOSTED:
        under = lengths.masked(Case(shape, mask=mask), setting.device) if mask else {}
        for name in (TORCH, *KERNELS):
            run = under[name] if mask else attention(name, causal)
            rows.append({"contestant": name, "causal": causal, "mask": mask, "shape": shape})
            ways = zip(WAYS, ((plain, None), (leaves, None), (leaves, above)), strict=True)
            calls |= {(len(rows) - 1, way): _call(run, *given) for way, given in ways}
    for _ in range(setting.repeats + 1):
        for key, call in calls.items():
            taken.setdefault(key, []).append(_returned(call, setting))
    for (at, way), each in taken.items():
        rows[at][way] = round(statistics.median(each[1:]), 1)  # the first compiles
    return rows


def _call(run: Callable[..., Tensor], leaves: list[Tensor], above: Tensor | None) -> Callable[[], None]:
    def call() -> None:
        out = run(*leaves)
        if above is not None:
            torch.autograd.grad(out, leaves, above)

    return call


def _returned(call: Callable[[], None], setting: Setting) -> float:
    """Microseconds of each of ten calls, none of which waits for another on the device."""
    call()
    synchronize(setting.device)
    begun = time.perf_counter()
    for _ in range(10):
        call()
    taken = 1e5 * (time.perf_counter() - begun)
    synchronize(setting.device)
    return taken


def layers(setting: Setting) -> list[dict[str, Any]]:
    """Microseconds of the processor for forward and backward of a layer of width 1,024 and 16 heads, and of linear attention."""
    device, kind = setting.device, torch.bfloat16 if setting.device == "cuda" else torch.float32
    wide, shape = (1024, (16, 1024, 1024)) if device == "cuda" else (32, (2, 16, 32))
    x, above = (torch.randn(shape, device=device, dtype=kind) for _ in range(2))
    heads = [
        torch.randn(shape[0], 16, shape[1], wide // 16, device=device, dtype=kind, requires_grad=True) for _ in range(3)
    ]
    torchs = nn.MultiheadAttention(wide, 16, batch_first=True).to(device, kind)
    ours = Attention(wide, 16).to(device, kind)
    primal = PrimalAttention(wide, 16, max_len=shape[1]).to(device, kind)

    def stepping(run: Callable[[], Any], leaves: list[Tensor]) -> Callable[[], None]:
        def call() -> None:
            out = run()
            out = out[0] if isinstance(out, tuple) else out
            # Primal-Attention has parameters of its penalty alone.
            torch.autograd.grad(out, leaves, above.reshape(out.shape), allow_unused=True)

        return call

    calls = {
        MODULE: stepping(lambda: torchs(x, x, x, need_weights=False), [*torchs.parameters()]),
        "nn.Attention": stepping(lambda: ours(x, x, x, need_weights=False), [*ours.parameters()]),
        "nn.PrimalAttention": stepping(lambda: primal(x), [p for p in primal.parameters() if p.requires_grad]),
        "linear attention (elu)": stepping(lambda: attend(*heads, kernel=FeatureMap("elu"), impl="linear"), heads),
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(setting.repeats + 1):
        for name, call in calls.items():
            taken[name].append(_returned(call, setting))
    return [{"layer": name, "microseconds": round(statistics.median(each[1:]), 1)} for name, each in taken.items()]


def missing(setting: Setting, rows: list[dict[str, Any]]) -> list[Case]:
    """Cases of which `rows` have nothing yet."""
    asked = lengths.cases(setting.tokens, setting.heads, setting.lengths) if setting.device == "cuda" else []
    known = {(tuple(row["shape"]), row["causal"], row["mask"]) for row in rows}
    return [case for case in asked if (case.shape, case.is_causal, case.mask) not in known]


def earlier(file: Path, setting: Setting, parts: Iterable[str]) -> dict[str, Any]:
    """What a run that was cut short has kept, of the same kernels, machine and sizes."""
    if not file.is_file():
        return {}
    kept, sizes = json.loads(file.read_text()), ("tokens", "heads", "lengths", "repeats")
    ours = {"machine": machine(setting.device), "setting": json.loads(json.dumps(asdict(setting)))}
    differ = [name for name in ours["machine"] if name != "date" and kept["machine"].get(name) != ours["machine"][name]]
    differ += [name for name in sizes if kept["setting"][name] != ours["setting"][name]]
    if differ:
        print(f"begun anew: {file} has figures of another {', '.join(differ)}", file=sys.stderr, flush=True)
    if differ:
        return {}
    cut = {(row["way"], row["length"]) for row in kept["step"] if "skipped" in row}
    kept["step"] = [row for row in kept["step"] if (row["way"], row["length"]) not in cut]
    return {name: kept[name] for name in parts}


def bars(found: dict[str, Any]) -> list[Bar]:
    errors = [
        Bar(f"{name}, {what}", "largest relative error", CLOSE, at_least=False, value=round(error, 6))
        for name, each in found["errors"].items()
        for error, what in [max((error, what) for what, error in each.items())]
    ]
    timed = *_host_bars(found["host"]), *_length_bars(found["lengths"]), *_step_bars(found["step"])
    return [*errors, *timed, *_layer_bars(found["layers"])]


def _layer_bars(rows: list[dict[str, Any]]) -> list[Bar]:
    taken = {row["layer"]: row["microseconds"] for row in rows}
    return [
        Bar(name, "us of host of a step over torch's", 1.0, at_least=False, value=round(each / taken[MODULE], 3))
        for name, each in taken.items()
        if name != MODULE
    ]


def _host_bars(rows: list[dict[str, Any]]) -> list[Bar]:
    judged = []
    by = {(row["contestant"], row["causal"], row.get("mask", "")): row for row in rows}
    for (name, causal, mask), row in by.items():
        where = f"{name}{', causal' if causal else ''}{mask and f', {mask}'}"
        for way, at in WAYS.items():
            if name in HOST and way in row:
                note = f"(torch's own: {by[TORCH, causal, mask][way]})"
                judged.append(Bar(where, f"us of host, {way}", HOST[name][at], False, row[way], note))
        if name == "Softmax" and not causal and not mask:
            over = row["without"] - by[TORCH, causal, mask]["without"]
            judged.append(Bar(where, "us of host over torch's", OVER_TORCH, at_least=False, value=round(over, 1)))
    return judged


def _length_bars(rows: list[dict[str, Any]]) -> list[Bar]:
    """The least ratio over lengths for each kernel, head size and direction, with and without causality."""
    judged = []
    plain = [row for row in rows if not row["mask"] and row["shape"][3] in (64, 128) and row["shape"][2] in BARRED]
    theirs = {(*row["shape"], row["causal"]): row for row in plain if row["contestant"] == TORCH and "forward" in row}
    for name, bound in SPEED.items():
        for size in (64, 128):
            for causal in (False, True):
                mine = [r for r in plain if (r["contestant"], r["shape"][3], r["causal"]) == (name, size, causal)]
                for way in ("forward", "backward") if mine else ():
                    ratios = [
                        (r["TFLOP/s"][way] / theirs[*r["shape"], causal]["TFLOP/s"][way], r["shape"][2])
                        for r in mine
                        if way in r.get("TFLOP/s", {})
                    ]
                    where = f"{name}, head size {size}{', causal' if causal else ''}"
                    if len(ratios) < len(mine) or not ratios:
                        judged.append(Bar(where, f"{way}: speed / cuDNN", bound, note="a length has no figure"))
                        continue
                    least, length = min(ratios)
                    judged.append(
                        Bar(where, f"{way}: least speed / cuDNN", bound, value=round(least, 3), note=f"(n = {length})")
                    )
    return judged


def _step_bars(rows: list[dict[str, Any]]) -> list[Bar]:
    judged = []
    timed = [row for row in rows if "tokens/s" in row]
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
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes on a CPU that try the driver and judge nothing, without lengths",
    )
    parser.add_argument("--eager", action="store_true", help="without compiled steps, which take minutes to compile")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), help="these parts alone, kept nowhere")
    parser.add_argument(
        "--seconds", type=float, default=Steps.seconds, help="wait no longer than so many for compiled steps"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on where a run of the same kernels was cut short: what it kept is not measured again",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the raw figures go")
    asked = parser.parse_args(given)
    if not asked.quick and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --quick tries the driver on a CPU")
    step = Steps(seconds=asked.seconds, **({"compiled": ()} if asked.eager else {}))
    setting = QUICK if asked.quick else Setting(step=step)
    prepare(setting.device)
    file = None if asked.quick or asked.only else asked.out / "launching.json"
    wanted = asked.only or list(PARTS)
    found: dict[str, Any] = {name: [] for name in PARTS}
    found |= earlier(file, setting, PARTS) if asked.resume and file is not None else {}

    def keep() -> None:
        """A run that is cut short leaves what it has."""
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(
                json.dumps({"machine": machine(setting.device), "setting": asdict(setting), **found}) + "\n"
            )

    compiled = compile_ahead(setting, wanted, found) if setting.device == "cuda" else {}
    found["errors"] = check(setting)
    print("errors", found["errors"], file=sys.stderr, flush=True)
    for name in wanted:
        begun = time.monotonic()
        for _ in PARTS[name](setting, found[name], compiled):
            keep()
        print(f"{name} in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    result = {"machine": machine(setting.device), "setting": asdict(setting), **found}
    return concluded(result, [] if asked.quick else bars(found), file)


def _at_once(part: Callable[[Setting], list[dict[str, Any]]]) -> Part:
    """A part that is measured as a whole."""

    def run(
        setting: Setting, rows: list[dict[str, Any]], compiled: dict[tuple[str, int, str], Runner]
    ) -> Iterator[None]:
        if not rows:
            rows += part(setting)
            yield

    return run


# Each adds to its rows what these lack, and stops after every case.
PARTS: dict[str, Part] = {
    "step": lambda setting, rows, compiled: steps.timed(setting.step, compiled, rows),
    "host": _at_once(host),
    "layers": _at_once(layers),
    "lengths": lambda setting, rows, compiled: lengths.timed(missing(setting, rows), setting.repeats, rows),
}


def compile_ahead(
    setting: Setting, wanted: Sequence[str], found: dict[str, list[dict[str, Any]]]
) -> dict[tuple[str, int, str], Runner]:
    """All that will be timed, in processes of their own: most of the time of a run would go into compiling."""
    begun = time.monotonic()
    compiled = steps.runners(setting.step, found["step"]) if "step" in wanted else {}
    others = multiprocessing.get_context("spawn").Process(target=layers, args=(replace(setting, repeats=1),))
    begins = "layers" in wanted and not found["layers"]
    if begins:
        others.start()
    if "lengths" in wanted:
        lengths.compile_ahead(missing(setting, found["lengths"]))
        print(f"kernels compiled in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    if begins:
        others.join()
    for one in compiled.values():
        one.wait(begun + setting.step.seconds - time.monotonic())
    print(f"all compiled in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return compiled


if __name__ == "__main__":
    sys.exit(main())

"""One setting, all its contestants: each is checked on the tensors that are timed, then they take turns."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks import accuracy
from benchmarks.contestants import Attention, CannotTakePart, Contestant, Setting
from benchmarks.timing import interleaved, synchronize
from heedful import Kernel, attend

# Rows and keys compared with float64, in the first and the last head.
COMPARED = 64

# A repeat lasts this long at least, in milliseconds.
LEAST = 2.0

Gate = Callable[[str, tuple[str, ...]], str | None]


def hold(
    setting: Setting,
    contestants: list[Contestant],
    gate: Gate,
    repeats: int,
    say: Callable[[str], None] = lambda line: None,
    least: float = LEAST,
) -> dict[str, Any]:
    """The setting, and one row for each contestant: errors, times and memory, or why it has none.

    `gate` tells of a variant of ours why these of its results may not be timed, or None. A wrong output refuses every speed,
    a wrong gradient those with backward in them.
    """
    if setting.device == "cuda":
        # Shapes compiled before count against a limit, beyond which torch runs uncompiled.
        torch._dynamo.reset()
    _tidy(setting)
    leaves, upstream = _inputs(setting)
    truths: dict[Kernel, dict[str, Tensor]] = {}
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Attention] = {}
    for one in contestants:
        row: dict[str, Any] = {"contestant": one.name}
        rows[one.name] = row
        try:
            refused = gate(one.variant, ("out",)) if one.variant else None
            if refused:
                row["refused"] = refused
            else:
                run = one.make(setting)
                if one.variant:
                    row["plan"] = _plan(one, setting, leaves)
                if one.kernel not in truths:
                    truths[one.kernel] = _truth(one.kernel, setting, leaves, upstream)
                _qualify(row, run, setting, leaves, upstream, truths[one.kernel])
                late = gate(one.variant, accuracy.NAMES) if one.variant else None
                if late and "refused" not in row:
                    row.setdefault("refused backward", late)
                if "refused" not in row:
                    runs[one.name] = run
        except CannotTakePart as reason:
            row["skipped"] = str(reason)
        except torch.OutOfMemoryError:
            row["skipped"] = "memory: out of memory"
        except Exception as fault:
            row["skipped"] = accuracy.first_line(fault)
        told = row.get("refused") or row.get("skipped") or row.get("refused backward") or "checked"
        say(f"  {one.name}: {told}")
        _tidy(setting)
    truths.clear()
    _time(setting, runs, rows, leaves, upstream, repeats, least)
    _tidy(setting)
    return asdict(setting) | {"name": setting.name, "rows": list(rows.values())}


def _inputs(setting: Setting) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator(setting.device).manual_seed(0)
    made = [
        torch.randn(setting.shape, generator=generator, device=setting.device).to(getattr(torch, setting.dtype))
        for _ in range(4)
    ]
    return [x.requires_grad_() for x in made[:3]], made[3]


def _tidy(setting: Setting) -> None:
    if setting.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _plan(one: Contestant, setting: Setting, leaves: list[Tensor]) -> str:
    impl = accuracy.VARIANTS[one.variant or ""].on(setting.device)
    return attend.plan(*leaves, is_causal=setting.is_causal, kernel=one.kernel, impl=impl).chosen


def _qualify(
    row: dict[str, Any],
    run: Attention,
    setting: Setting,
    leaves: list[Tensor],
    upstream: Tensor,
    truth: dict[str, Tensor],
) -> None:
    """Runs once to compile, once more for memory, and compares with the truth."""
    torch.autograd.grad(run(*leaves), leaves, upstream)
    got = _watched(row, run, setting, leaves, upstream)
    bound = accuracy.BOUNDS[setting.dtype]
    compared = {name: _heads(x)[..., _chosen(setting, x.device), :] for name, x in got.items()}
    scales = dict.fromkeys(accuracy.NAMES, 1.0)
    row["errors"], unfit = accuracy.errors(compared, truth, scales, bound)
    if unfit:
        raise CannotTakePart(f"the true {', '.join(unfit)} does not fit {setting.dtype}")
    refused = accuracy.beyond(row["errors"], bound, ("out",))
    late = accuracy.beyond(row["errors"], bound)
    if refused:
        row["refused"] = f"{refused} (the timed tensors)"
    elif late:
        row["refused backward"] = f"{late} (the timed tensors)"


def _watched(
    row: dict[str, Any], run: Attention, setting: Setting, leaves: list[Tensor], upstream: Tensor
) -> dict[str, Tensor]:
    """Results of a fresh forward and backward; notes the peak beyond inputs, output, upstream gradient and gradients."""
    on_device = setting.device == "cuda"
    before = 0
    if on_device:
        synchronize(setting.device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    out = run(*leaves)
    forward = torch.cuda.max_memory_allocated() - before if on_device else 0
    gradients = torch.autograd.grad(out, leaves, upstream)
    both = torch.cuda.max_memory_allocated() - before if on_device else 0
    size = {"inputs": _bytes(*leaves), "output": _bytes(out), "gradients": _bytes(upstream, *gradients)}
    if on_device:
        returned = size["output"] + _bytes(*gradients)
        extra = {"forward": max(forward - size["output"], 0), "forward+backward": max(both - returned, 0)}
        row["memory"] = {"extra": extra, "needed": size}
    return dict(zip(accuracy.NAMES, (out.detach(), *gradients), strict=True))


def _bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _heads(x: Tensor) -> Tensor:
    """The first and the last head: an address that overflows shows in the last."""
    return torch.stack((x[0, 0], x[-1, -1]))[None].detach()  # [1, 2, n, D]


def _chosen(setting: Setting, device: torch.device) -> Tensor:
    length = setting.shape[2]
    return torch.linspace(0, length - 1, min(COMPARED, length), device=device).round().long()


def _truth(kernel: Kernel, setting: Setting, leaves: list[Tensor], upstream: Tensor) -> dict[str, Tensor]:
    """Output and gradients of the chosen rows and keys of two heads, in float64."""
    query, key, value, after = (_heads(x).double() for x in (*leaves, upstream))
    at = _chosen(setting, query.device)
    every = torch.arange(setting.shape[2], device=query.device)

    def sees(rows: Tensor, keys: Tensor) -> Tensor | None:
        return rows[:, None] >= keys if setting.is_causal else None

    some = query[..., at, :].requires_grad_()
    out = attend(some, key, value, attn_mask=sees(at, every), kernel=kernel, impl="reference")
    (by_query,) = torch.autograd.grad(out, some, after[..., at, :])
    if kernel.traits.division is None:
        # Each key adds to the output by itself, so a few of them stand for all.
        pair = [x[..., at, :].requires_grad_() for x in (key, value)]
        whole = attend(query, *pair, attn_mask=sees(every, at), kernel=kernel, impl="reference")
        by_key, by_value = torch.autograd.grad(whole, pair, after)
    else:
        pair = [x.requires_grad_() for x in (key, value)]
        whole = attend(query, *pair, is_causal=setting.is_causal, kernel=kernel, impl="stream")
        by_key, by_value = (x[..., at, :] for x in torch.autograd.grad(whole, pair, after))
    return dict(zip(accuracy.NAMES, (out.detach(), by_query, by_key, by_value), strict=True))


def _time(
    setting: Setting,
    runs: dict[str, Attention],
    rows: dict[str, dict[str, Any]],
    leaves: list[Tensor],
    upstream: Tensor,
    repeats: int,
    least: float,
) -> None:
    """Forward as in training, backward of a graph that is kept; where linear attention takes part, both in one as well."""

    def both(run: Attention) -> None:
        torch.autograd.grad(run(*leaves), leaves, upstream)

    with_backward = {name: run for name, run in runs.items() if "refused backward" not in rows[name]}
    _race("forward", {n: lambda run=run: run(*leaves) for n, run in runs.items()}, rows, setting, repeats, least)
    if setting.role == "linear":
        together = {n: lambda run=run: both(run) for n, run in with_backward.items()}
        _race("forward+backward", together, rows, setting, repeats, least)
    graphs: dict[str, Tensor] = {}
    for name, run in with_backward.items():
        try:
            graphs[name] = run(*leaves)
        except torch.OutOfMemoryError:
            rows[name]["skipped backward"] = "memory: out of memory"
    kept = {
        n: lambda out=out: torch.autograd.grad(out, leaves, upstream, retain_graph=True) for n, out in graphs.items()
    }
    graphs.clear()
    _race("backward", kept, rows, setting, repeats, least)


def _race(
    direction: str,
    runs: dict[str, Callable[[], Any]],
    rows: dict[str, dict[str, Any]],
    setting: Setting,
    repeats: int,
    least: float,
) -> None:
    try:
        timings = interleaved(runs, repeats, setting.device, least)
    except torch.OutOfMemoryError:
        # Who writes all pairs out may leave no room for the others.
        large = [name for name in runs if name.startswith(("eager", "compiled"))]
        if not large:
            raise
        for name in large:
            rows[name][f"skipped {direction}"] = "memory: out of memory beside the others"
            del runs[name]
        _tidy(setting)
        timings = interleaved(runs, repeats, setting.device, least)
    for name, timing in timings.items():
        rows[name][direction] = asdict(timing)

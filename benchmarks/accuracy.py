"""How far fused attention is from float64, on random and on adversarial inputs: values and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heedful import FeatureMap, Gaussian, Kernel, Polynomial, Relu, ReluSquared, Sigmoid, Softmax, Unsupported, attend

BOUNDS = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
NAMES = ("out", "dq", "dk", "dv")

# A gradient this much smaller than its sisters is what rounding leaves of a zero.
ZERO = 1e-13


@dataclass(frozen=True)
class Variant:
    """A kernel of ours by the implementation whose speed is asked for."""

    name: str
    kernel: Kernel
    impl: str

    def on(self, device: str) -> str:
        """The implementation that exists on this device."""
        return self.impl if device == "cuda" else "auto"


VARIANTS = {
    one.name: one
    for one in (
        Variant("Sigmoid", Sigmoid(), "triton"),
        Variant("ReluSquared", ReluSquared(), "triton"),
        Variant("Gaussian raw", Gaussian(normalize=False), "triton"),
        Variant("Gaussian", Gaussian(), "auto"),
        Variant("Softmax", Softmax(), "auto"),
        Variant("linear elu", FeatureMap("elu"), "auto"),
        Variant("Relu", Relu(), "triton"),
        Variant("Polynomial", Polynomial(3, offset=1.0), "triton"),
    )
}


@dataclass(frozen=True)
class Inputs:
    query: Tensor
    key: Tensor
    value: Tensor
    upstream: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True)
class Case:
    """What is asked of a kernel: a length, a head size and a change of random inputs."""

    name: str
    extra: int = 0
    dim: int = 64
    is_causal: bool = False
    change: Callable[[Inputs], Inputs] = lambda x: x
    only: Callable[[Kernel], bool] = lambda kernel: True
    instead: dict[str, Kernel] = field(default_factory=dict)


def _with(x: Inputs, query: Tensor | None = None, key: Tensor | None = None, mask: Tensor | None = None) -> Inputs:
    return Inputs(x.query if query is None else query, x.key if key is None else key, x.value, x.upstream, mask)


def _equal_keys(x: Inputs) -> Inputs:
    return _with(x, key=x.key[..., :1, :].expand_as(x.key).clone())


def _opposed(x: Inputs) -> Inputs:
    """Scores near -10 at the usual scale: queries and keys on the two sides of zero."""
    length = (10.0 * x.query.shape[-1] ** 0.5) ** 0.5
    direction = torch.ones_like(x.query[..., :1, :]) * x.query.shape[-1] ** -0.5
    return _with(x, 0.75 * x.query + length * direction, 0.75 * x.key - length * direction)


def _one_huge_bias(x: Inputs) -> Inputs:
    mask = torch.zeros(1, 1, 1, x.key.shape[-2], dtype=x.query.dtype, device=x.query.device)
    mask[..., x.key.shape[-2] // 3] = 50.0
    return _with(x, mask=mask)


CASES = [
    Case("random"),
    Case(
        "large norms",
        change=lambda x: _with(x, 4 * x.query, 4 * x.key),
        # At the bandwidth of the others every coefficient would be under 1e-30, and the check one of underflow.
        instead={"Gaussian raw": Gaussian(2 * 64**0.25, normalize=False)},
    ),
    Case("equal keys", change=_equal_keys),
    Case("negative scores", change=_opposed),
    Case("bias -20", instead={"Sigmoid": Sigmoid(bias=-20.0)}, only=lambda kernel: isinstance(kernel, Sigmoid)),
    Case("one huge bias", change=_one_huge_bias),
    Case(
        "far from zero",
        change=lambda x: _with(x, x.query + 2, x.key + 2),
        only=lambda kernel: kernel.traits.stationary,
    ),
    Case("odd length", extra=-17),
    Case("causal", extra=-17, is_causal=True),
    Case("head size 128", dim=128),
]


def draw(case: Case, length: int, dtype: torch.dtype, device: str) -> Inputs:
    """The inputs of a case, rounded to the dtype: the truth starts from the same numbers."""
    generator = torch.Generator().manual_seed(len(case.name))
    shape = (1, 8, length + case.extra, case.dim)  # enough pairs for `auto` to take what it takes of the timed ones
    query, key, value, upstream = torch.randn(4, *shape, generator=generator).to(device).unbind()
    made = case.change(Inputs(query, key, value, upstream))
    rounded = (x.to(dtype) for x in (made.query, made.key, made.value, made.upstream))
    return Inputs(*rounded, None if made.mask is None else made.mask.to(dtype))


def results(x: Inputs, case: Case, kernel: Kernel, impl: str) -> dict[str, Tensor]:
    """The output and the three gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in (x.query, x.key, x.value)]
    out = attend(*leaves, attn_mask=x.mask, is_causal=case.is_causal, kernel=kernel, impl=impl)
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, leaves, x.upstream)), strict=True))


def widened(x: Inputs) -> Inputs:
    wide = (t.double() for t in (x.query, x.key, x.value, x.upstream))
    return Inputs(*wide, None if x.mask is None else x.mask.double())


def errors(
    got: dict[str, Tensor], truth: dict[str, Tensor], scales: dict[str, float], bound: float
) -> tuple[dict[str, float | str], list[str]]:
    """||got - truth|| / ||truth|| by name, and the names whose truth the dtype of `got` cannot hold.

    Where the truth is zero the error is told relative to `scales`. A truth that loses half the bound by being rounded to the
    dtype, or leaves its range, says nothing about who computed it.
    """
    largest = max((float(truth[name].norm()) for name in truth if name != "out"), default=0.0)
    told: dict[str, float | str] = {}
    unfit = []
    for name, wanted in truth.items():
        size = float(wanted.norm())
        vanishes = size == 0.0 or (name != "out" and size <= ZERO * largest)
        against = (largest or scales[name]) if vanishes and name != "out" else (scales[name] if vanishes else size)
        rounding = float((wanted.to(got[name].dtype).double() - wanted).norm()) / against
        if not rounding <= bound / 2:
            unfit.append(name)
            continue
        error = float((got[name].double() - wanted).norm()) / against
        # JSON has no word for what is not finite.
        told[name] = error if error < float("inf") else str(error)
    return told, unfit


def check(variant: Variant, dtype: str, device: str, length: int = 1024, cases: Iterable[Case] = CASES) -> list[dict]:
    """One row for each case: errors and verdict, or why there are none."""
    rows = []
    bound = BOUNDS[dtype]
    for case in cases:
        if not case.only(variant.kernel):
            continue
        row: dict[str, Any] = {"variant": variant.name, "dtype": dtype, "case": case.name}
        row |= {"length": length + case.extra, "dim": case.dim, "allowed": bound}
        x = draw(case, length, getattr(torch, dtype), device)
        kernel = case.instead.get(variant.name, variant.kernel)
        try:
            got = results(x, case, kernel, variant.on(device))
        except Unsupported as refusal:
            rows.append(row | {"verdict": "skipped", "reason": first_line(refusal)})
            continue
        except Exception as fault:
            rows.append(row | {"verdict": "MISSED", "reason": first_line(fault)})
            continue
        truth = results(widened(x), case, kernel, "reference")
        scales = {name: float((x.value if name == "out" else x.upstream).double().norm()) for name in NAMES}
        found, unfit = errors(got, truth, scales, bound)
        reasons = [f"the true {', '.join(unfit)} does not fit {dtype}"] if unfit else []
        if any(not float(e) <= bound for e in found.values()):
            jumps = _jumps(x, truth, case, kernel, bound)
            reasons += [f"the true {', '.join(jumps)} jumps with the last bits of float32"] if jumps else []
            found = {name: e for name, e in found.items() if name not in jumps}
        verdict = "met" if all(float(e) <= bound for e in found.values()) else "MISSED"
        row |= {"errors": found, "verdict": verdict if found else "skipped"}
        if reasons:
            row["reason"] = "; ".join(reasons)
        rows.append(row)
    return rows


def _jumps(x: Inputs, truth: dict[str, Tensor], case: Case, kernel: Kernel, bound: float) -> list[str]:
    """Whose truth changes by half the bound when inputs change by their last bits in float32, as a slope does at a kink.

    The largest of 8 units in the last place: about what a sum of 64 products may lose.
    """
    moved = widened(x)
    generator = torch.Generator(x.query.device).manual_seed(0)
    for one in (moved.query, moved.key, moved.value):
        noise = torch.rand(one.shape, generator=generator, device=one.device, dtype=one.dtype)
        one.mul_(1 + 8 * torch.finfo(torch.float32).eps * (2 * noise - 1))
    other = results(moved, case, kernel, "reference")
    return [n for n in truth if float((other[n] - truth[n]).norm()) > bound / 2 * float(truth[n].norm())]


def check_one(variant: str, dtype: str, device: str, length: int, case: int) -> list[dict]:
    """One case of `check`, by names that travel between processes."""
    torch.set_float32_matmul_precision("highest")
    return check(VARIANTS[variant], dtype, device, length, CASES[case : case + 1])


def refusal(rows: list[dict], variant: str, dtype: str, names: Iterable[str] = NAMES) -> str | None:
    """Why these results of a variant have no speed in a dtype: an error above the bound, or no check at all."""
    mine = [row for row in rows if (row["variant"], row["dtype"]) == (variant, dtype)]
    for row in mine:
        if row["verdict"] == "MISSED" and "errors" not in row:
            return f"refused: {row['case']} failed: {row['reason']}"
        told = beyond(row.get("errors", {}), row["allowed"], names)
        if told:
            return f"{told} ({row['case']})"
    if not any(row.get("errors") for row in mine):
        why = next((row["reason"] for row in mine if row.get("reason")), "none was run")
        return f"refused: no check in {dtype}: {why}"
    return None


def beyond(found: dict[str, float | str], bound: float, names: Iterable[str] = NAMES) -> str | None:
    """Tells the first of these errors that is above the bound, or not a number."""
    for name in names:
        if not float(found.get(name, 0.0)) <= bound:
            return f"refused: error {float(found[name]):.1e} of {name}, allowed {bound:.0e}"
    return None


def first_line(fault: BaseException) -> str:
    lines = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {lines[0][:200] if lines else ''}"

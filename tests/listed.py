"""One suite for every kernel, implementation and kind of request: what is listed here is tested by being listed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heedful import (
    Cosine,
    Exponential,
    FeatureMap,
    Gaussian,
    HigherOrder,
    Kernel,
    Laplace,
    Matern,
    PerHead,
    Polynomial,
    RationalQuadratic,
    Relu,
    ReluSquared,
    Sigmoid,
    Silu,
    Softmax,
    Tanh,
    attend,
    masks,
)
from heedful.ops import IMPLEMENTATIONS

HEADS = 3


class Cauchy(Kernel):
    """A user's own kernel: one method."""

    width: float = 1.5

    def coefficients(self, query: Tensor, key: Tensor) -> Tensor:
        squares = query.square().sum(-1)[..., :, None] + key.square().sum(-1)[..., None, :] - 2 * query @ key.mT
        return 1 / (1 + squares / self.width**2)


def per_head(low: float = 0.5) -> Tensor:
    return torch.linspace(low, low + 1.0, HEADS, dtype=torch.float64).requires_grad_()


def one(entry: float = 0.7) -> Tensor:
    return torch.tensor(entry, dtype=torch.float64, requires_grad=True)


def mix(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(7, 7, generator=generator, dtype=torch.float64).requires_grad_()


KERNELS: dict[str, Callable[[], Kernel]] = {
    "softmax": Softmax,
    "softmax-per-head": lambda: Softmax(scale=per_head()),
    "gaussian": lambda: Gaussian(1.5),
    "gaussian-per-head": lambda: Gaussian(per_head(1.0)),
    "gaussian-default": Gaussian,
    "gaussian-raw": lambda: Gaussian(2.0, normalize=False),
    "laplace": lambda: Laplace(per_head(1.0)),
    "laplace-raw": lambda: Laplace(2.0, normalize=False),
    "matern": lambda: Matern(1.5, per_head(1.0)),
    "matern-raw": lambda: Matern(2.5, 2.0, normalize=False),
    "rational": lambda: RationalQuadratic(per_head(0.7), per_head(1.0)),
    "sigmoid": lambda: Sigmoid(scale=per_head(), bias=per_head(-1.0)),
    "tanh": lambda: Tanh(bias=per_head(-1.0)),
    "silu": lambda: Silu(scale=per_head()),
    "exponential": lambda: Exponential(scale=per_head(0.2), bias=per_head(-1.0)),
    "relu": Relu,
    "relu-squared": lambda: ReluSquared(scale=0.7),
    "cosine": Cosine,
    "dot": lambda: Polynomial(1),
    "polynomial-2": lambda: Polynomial(2, offset=per_head()),
    "polynomial-3": lambda: Polynomial(3, offset=1.0),
    "elu": lambda: FeatureMap("elu"),
    "relu-map": lambda: FeatureMap("relu"),
    "cosine-map": lambda: FeatureMap("cosine"),
    "random-map": lambda: FeatureMap("random", features_count=11),
    "higher-order": lambda: HigherOrder(Softmax(), order=4),
    "higher-order-mix": lambda: HigherOrder(Sigmoid(), order=6, mix=mix()),
    "higher-orders": lambda: HigherOrder(Sigmoid(), order=(2, 4, 6), mix=(mix(1), mix(2))),
    "product": lambda: Softmax() * Gaussian(per_head(1.0)),
    "gated": lambda: Softmax() * Sigmoid(),
    "sum": lambda: 0.5 * Gaussian(1.5) + Relu(),
    "normalized": lambda: ReluSquared().normalized(),
    "averaged": lambda: Polynomial(1).averaged(),
    "symmetric": lambda: Softmax(per_head()).symmetric(),
    "symmetric-sigmoid": lambda: 0.5 * Sigmoid(bias=per_head(-1.0)).symmetric(),
    "per-head": lambda: PerHead((Softmax(), Gaussian(one(1.5)), Sigmoid(bias=one()))),
    "own": Cauchy,
    "own-normalized": lambda: Cauchy(2.0).normalized(),
}


@dataclass(frozen=True)
class Case:
    """Inputs in float64, and the arguments of `attend` that go with them."""

    query: Tensor
    key: Tensor
    value: Tensor
    arguments: dict[str, Any] = field(default_factory=dict)

    def to(self, dtype: torch.dtype) -> Case:
        """The same request in another dtype, its tensors new leaves that ask for gradients."""
        moved = {name: _moved(x, dtype) for name, x in self.arguments.items()}
        query, key, value = (x.detach().to(dtype).requires_grad_() for x in (self.query, self.key, self.value))
        return Case(query, key, value, moved)


def _moved(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, masks.Mask) and x.factors is not None:
        made = masks.low_rank(*(factor.detach().to(dtype).requires_grad_() for factor in x.factors))
        return made if x.hiding is None else made & x.hiding
    return x.to(dtype).requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x


def inputs(queries: int = 19, keys: int = 19, key_heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(2, HEADS, queries, 7), (2, key_heads, keys, 7), (2, key_heads, keys, 5)]
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query, key, value


def boolean(queries: int, keys: int, empty: bool = False) -> Tensor:
    keep = torch.rand(2, 1, queries, keys, generator=torch.Generator().manual_seed(3)) > 0.4
    keep[..., 0] = True
    if empty:
        keep[0, :, 4] = False
        keep[1, :, -1] = False
    return keep


def additive() -> Tensor:
    bias = torch.randn(2, HEADS, 19, 23, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return bias.masked_fill(~boolean(19, 23, empty=True), -math.inf)


def factors(queries: int, keys: int) -> masks.Mask:
    """A bias of rank 4: of each head among the queries, of each batch among the keys."""
    generator = torch.Generator().manual_seed(6)
    shapes = [(HEADS, queries, 4), (2, 1, keys, 4)]
    return masks.low_rank(*(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes))


def block_mask() -> masks.Mask:
    keep = torch.rand(2, HEADS, 4, 4, generator=torch.Generator().manual_seed(8)) > 0.4
    return masks.blocks(keep, (5, 6))


def not_a_number() -> Case:
    """Padded keys and values that are NaN, and a later key that only later queries may see."""
    query, key, value = inputs()
    key[1, :, 15:], value[1, :, 15:] = torch.nan, torch.inf
    return Case(query, key, value, {"attn_mask": masks.padding([19, 15]), "is_causal": True})


CASES: dict[str, Callable[[], Case]] = {
    "plain": lambda: Case(*inputs()),
    "cross": lambda: Case(*inputs(19, 23)),
    "one": lambda: Case(*inputs(1, 1)),
    "one-query": lambda: Case(*inputs(1, 23)),
    "causal": lambda: Case(*inputs(), {"is_causal": True}),
    "causal-cross": lambda: Case(*inputs(23, 19), {"is_causal": True}),
    "lower-right": lambda: Case(*inputs(19, 23), {"attn_mask": masks.lower_right}),
    "boolean": lambda: Case(*inputs(19, 23), {"attn_mask": boolean(19, 23)}),
    "boolean-causal": lambda: Case(*inputs(), {"attn_mask": boolean(19, 19), "is_causal": True}),
    "additive": lambda: Case(*inputs(19, 23), {"attn_mask": additive()}),
    "column": lambda: Case(*inputs(19, 23), {"attn_mask": additive()[:, :1, :1]}),
    "padding": lambda: Case(*inputs(19, 23), {"attn_mask": masks.padding([23, 11])}),
    "padding-causal": lambda: Case(*inputs(), {"attn_mask": masks.padding([19, 7]), "is_causal": True}),
    "window": lambda: Case(*inputs(), {"attn_mask": masks.window(3, 1) & ~masks.padding([2, 0])}),
    "document": lambda: Case(*inputs(), {"attn_mask": masks.document(torch.arange(19) // 5)}),
    "packed": lambda: Case(*inputs(), {"attn_mask": masks.packed([0, 5, 5, 12, 17]) & masks.causal}),
    "blocks": lambda: Case(*inputs(19, 23), {"attn_mask": block_mask()}),
    "low-rank": lambda: Case(*inputs(19, 23), {"attn_mask": factors(19, 23)}),
    "low-rank-causal": lambda: Case(
        *inputs(), {"attn_mask": factors(19, 19) & masks.padding([19, 7]), "is_causal": True}
    ),
    "low-rank-shared-heads": lambda: Case(*inputs(19, 23, 1), {"attn_mask": factors(19, 23), "enable_gqa": True}),
    "empty": lambda: Case(*inputs(19, 23), {"attn_mask": boolean(19, 23, empty=True)}),
    "all-hidden": lambda: Case(*inputs(19, 23), {"attn_mask": masks.padding([23, 0])}),
    "shared-heads": lambda: Case(*inputs(19, 23, 1), {"enable_gqa": True}),
    "shared-heads-causal": lambda: Case(*inputs(19, 19, 1), {"enable_gqa": True, "is_causal": True}),
    "nan-under-mask": not_a_number,
}

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}
# A parameter's gradient sums, with cancellation, gradients that fused attention hands back rounded to 8 bits.
PARAMETER_TOLERANCE = TOLERANCE | {torch.bfloat16: 1e-1}


# Triton's interpreter takes half a second a case: all cases with these kernels, all kernels with these cases. The features
# of a fused kernel are tested one by one in test_fused.py.
INTERPRETED_KERNELS = {"gaussian-per-head", "sigmoid"}
INTERPRETED_CASES = {"cross", "padding-causal", "column", "shared-heads-causal", "nan-under-mask"}


def fits(kernel: Kernel, case: Case) -> bool:
    """Degrees of keys are those of their own rows: such a kernel takes as many queries as keys."""
    of_heads = kernel.kernels if isinstance(kernel, PerHead) else (kernel,)
    return case.query.shape[-2] == case.key.shape[-2] or not any(one.balances for one in of_heads)


def accepted(*names: str) -> Iterator[tuple[str, str, str, torch.dtype]]:
    """(kernel, implementation, case, dtype) for all that some implementation says it can do, of these kernels or of all."""
    for kernel_name in names or KERNELS:
        for case_name, case in CASES.items():
            for dtype in TOLERANCE:
                request, kernel = case().to(dtype), KERNELS[kernel_name]()
                if not fits(kernel, request):
                    continue
                plan = attend.plan(request.query, request.key, request.value, kernel=kernel, **request.arguments)
                listed = kernel_name in INTERPRETED_KERNELS or case_name in INTERPRETED_CASES
                for considered in plan.considered:
                    if considered.name not in IMPLEMENTATIONS:
                        continue  # several of them, one for some heads and one for others
                    if considered.refusal is None and (listed or considered.name != "triton"):
                        yield kernel_name, considered.name, case_name, dtype


def results(case: Case, kernel: Kernel, impl: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradient of a fixed linear functional of it with respect to everything that asks for one."""
    out = attend(case.query, case.key, case.value, kernel=kernel, impl=impl, **case.arguments)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(out)
    asked = {"query": case.query, "key": case.key, "value": case.value, **kernel.tensors()}
    asked |= {name: x for name, x in case.arguments.items() if isinstance(x, Tensor)}
    mask = case.arguments.get("attn_mask")
    if isinstance(mask, masks.Mask) and mask.factors is not None:
        asked |= dict(zip(("left", "right"), mask.factors, strict=True))
    asked = {name: x for name, x in asked.items() if x.requires_grad}
    gradients = torch.autograd.grad((out * weight).sum(), list(asked.values()), allow_unused=True)
    zeros = (torch.zeros_like(x) if g is None else g for g, x in zip(gradients, asked.values(), strict=True))
    return out.detach(), dict(zip(asked, zeros, strict=True))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """In norm; inputs are of unit scale, and so is the floor that serves where the wanted value is zero."""
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1.0))


@dataclass(frozen=True)
class Comparison:
    """An implementation against the reference in float64, on the same inputs rounded to its dtype."""

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    impl: str = "triton"
    floor: float = 1.0  # of the norm that an error is divided by

    def errors(
        self,
        kernel: Kernel,
        inputs: Sequence[Tensor],
        arguments: Callable[..., dict[str, Any]] = dict,
        *extras: Tensor,
        starts: Callable[..., Sequence[Tensor]] = lambda *inputs: inputs,
        ends: Callable[[Tensor], Tensor] = lambda out: out,
    ) -> dict[str, float]:
        """Relative errors, in norm, of the output and of every gradient: inputs, the kernel's tensors, and `extras`.

        `arguments` makes those of `attend` from `extras`; `starts` makes query, key and value from the inputs; `ends` is what
        becomes of the output.
        """
        names = ["query", "key", "value", *kernel.tensors(), *(f"extra {i}" for i in range(len(extras)))]
        made = []
        for dtype, impl in ((self.dtype, self.impl), (torch.float64, "reference")):
            rounded = (x.detach().to(self.dtype) for x in (*inputs, *kernel.tensors().values(), *extras))
            leaves = [x.to(self.device, dtype).requires_grad_() for x in rounded]
            own = kernel.with_tensors(dict(zip(kernel.tensors(), leaves[3:], strict=False)))
            given = arguments(*leaves[3 + len(kernel.tensors()) :])
            out = ends(attend(*starts(*leaves[:3]), kernel=own, impl=impl, **given))
            weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
            made.append([out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)])
        return {
            name: float((found.double() - wanted).norm() / wanted.norm().clamp_min(self.floor))
            for name, found, wanted in zip(["out", *names], *made, strict=True)
        }


assert set(IMPLEMENTATIONS) == {"short", "sdpa", "linear", "triton", "stream", "reference"}, (
    "list new implementations here"
)

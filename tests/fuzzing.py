"""Random calls of `attend`: any kernel and composition, any mask, garbage where nothing may read it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
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
    Polynomial,
    RationalQuadratic,
    Relu,
    ReluSquared,
    Sigmoid,
    Silu,
    Softmax,
    Tanh,
    Unsupported,
    attend,
    masks,
)
from oracle import STEP, Oracle

FAMILIES = ("dot", "distance", "features", "composed", "higher order")

# Relative to the sums of absolute values that an output or a derivative is made of.
BOUNDS = {torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}


@dataclass
class Draw:
    """One call: tensors by name, and who may attend to whom, written out apart from heedful's masks."""

    kernel: Kernel
    tensors: dict[str, Tensor]  # query, key, value, and what the mask and the kernel are made of
    shape: tuple[int, ...]  # (*leading, queries, keys)
    keep: np.ndarray
    mask: Any = None  # makes attn_mask from the tensors
    hides: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    garbage: float | None = None
    bad: dict[str, np.ndarray] = field(default_factory=dict)  # vectors of garbage, by tensor

    def __str__(self) -> str:
        shapes = {name: tuple(x.shape) for name, x in self.tensors.items()}
        return f"{self.kernel!r}\n{shapes} {self.tensors['query'].dtype}\n{self.arguments} garbage {self.garbage}\n{self.keep.astype(int)}"


class Drawing:
    """Draws calls of a family of kernels from a source of chance."""

    def __init__(self, random: Random, family: str, dtype: torch.dtype | None = None) -> None:
        self.random, self.family = random, family
        self.dtype = dtype or random.choice(list(BOUNDS))
        self.generator = torch.Generator().manual_seed(random.getrandbits(31))
        self.tensors: dict[str, Tensor] = {}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def some(self, *shape: int, share: float = 0.6) -> Tensor:
        return torch.rand(shape, generator=self.generator) < share

    def one(self) -> Draw:
        random = self.random
        queries, keys = (random.choice((1, 2, 3, 5, 7, 8)) for _ in range(2))
        if random.random() < 0.5:
            keys = queries
        if random.random() < 0.03:
            queries, keys = random.choice(((0, keys), (queries, 0)))
        size, width, heads = random.choice((1, 2, 3, 7)), random.choice((1, 3, 5)), random.choice((1, 2, 4, 6))
        lead = random.choice(((), (heads,), (2, heads), (2, heads), (2, heads), (2, 3, heads), (0, heads)))
        groups = [random.choice([g for g in (1, 2, heads) if heads % g == 0]) for _ in range(2)]
        shapes = [(*lead, queries, size), (*lead, keys, size), (*lead, keys, width)]
        arguments: dict[str, Any] = {}
        if lead and random.random() < 0.3:
            arguments["enable_gqa"] = True
            for n, group in zip((1, 2), groups, strict=True):
                shapes[n] = (*lead[:-1], group, *shapes[n][-2:])
        if len(lead) > 1 and random.random() < 0.2:
            n = random.randrange(3)
            shapes[n] = (*(1 for _ in lead[:-1]), *shapes[n][len(lead) - 1 :])
        self.tensors = {
            name: self.normal(*shape) for name, shape in zip(("query", "key", "value"), shapes, strict=True)
        }
        if random.random() < 0.1 and shapes[0] == shapes[1]:
            self.tensors["key"] = self.tensors["query"].clone()
        if random.random() < 0.1:
            self.tensors["query"][..., :1, :] = 0.0
        lead = torch.broadcast_shapes(*(shape[:-3] for shape in shapes)) + lead[-1:] if lead else ()
        drawn = Draw(self.kernel(heads if lead else 0, size), self.tensors, (*lead, queries, keys), np.array(True))
        drawn.arguments = arguments
        self.masking(drawn)
        self.littering(drawn)
        return drawn

    # Kernels.

    def number(self, name: str, heads: int, low: float, high: float) -> Any:
        """A number, or a tensor for all heads or for each, which asks for a gradient."""
        kind = self.random.randrange(3)
        if kind == 0:
            return round(self.random.uniform(low, high), 3)
        shape = (heads,) if kind == 2 and heads else ()
        drawn = torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low
        return drawn.to(torch.float32 if self.dtype.itemsize == 2 else self.dtype).requires_grad_()

    def kernel(self, heads: int, size: int) -> Kernel:
        if self.family == "higher order":
            mix = torch.randn(size, size, generator=self.generator, dtype=torch.float64) / size**0.5
            mix = mix.to(torch.float32 if self.dtype.itemsize == 2 else self.dtype).requires_grad_()
            inner = self.composed(heads, 1)
            order = self.random.choice((4, 6, (2, 4), (2, 6), (2, 4, 6)))
            many = mix if order in (4, (2, 4)) else (mix, mix.detach().flip(-1).requires_grad_())
            return HigherOrder(inner, order, self.random.choice((None, mix, many)))
        return self.composed(heads, 2 if self.family == "composed" else 0)

    def composed(self, heads: int, depth: int) -> Kernel:
        kind = self.random.randrange(6 if depth else 3)
        kernel = self.leaf(heads) if kind < 3 else self.composed(heads, depth - 1)
        if kind == 3:
            return kernel * self.composed(heads, depth - 1)
        if kind == 4:
            return kernel + self.composed(heads, depth - 1)
        if kind == 5:
            kernel = self.number("factor", heads, -2.0, 2.0) * kernel
        if depth and self.random.random() < 0.3:
            nonnegative = kernel.traits.nonnegative
            kernel = kernel.normalized() if nonnegative and self.random.random() < 0.5 else kernel.averaged()
        return kernel

    def leaf(self, heads: int) -> Kernel:
        random = self.random
        scale = None if random.random() < 0.3 else self.number("scale", heads, -1.0, 1.0)
        if random.random() < 0.03:
            scale = 0.0
        wide = None if random.random() < 0.3 else self.number("bandwidth", heads, 0.8, 2.5)
        normal = random.random() < 0.6
        options = {
            "dot": [
                lambda: Softmax(scale),
                *(
                    lambda kind=kind: kind(scale, self.number("bias", heads, -1.0, 1.0))
                    for kind in (Sigmoid, Tanh, Silu, Exponential)
                ),
                lambda: Relu(scale),
                lambda: ReluSquared(scale),
                lambda: Polynomial(random.choice((1, 2, 3)), self.number("offset", heads, -1.0, 1.0), scale),
            ],
            "distance": [
                lambda: Gaussian(wide, normal),
                lambda: Laplace(wide, normal),
                lambda: Matern(random.choice((1.5, 2.5)), wide, normal),
                lambda: RationalQuadratic(self.number("alpha", heads, 0.5, 2.0), wide, normal),
            ],
            "features": [
                Cosine,
                lambda: FeatureMap(random.choice(("elu", "relu", "cosine"))),
                lambda: FeatureMap("random", features_count=5, seed=random.randrange(3)),
                lambda: Polynomial(random.choice((1, 2)), 0.0, scale),
            ],
        }
        family = self.family if self.family in options else random.choice(list(options))
        return random.choice(options[family])()

    # Masks.

    def masking(self, drawn: Draw) -> None:
        random, shape = self.random, drawn.shape
        drawn.keep = np.ones(shape, dtype=bool)
        parts = []
        for _ in range(random.choice((0, 1, 1, 1, 2, 2))):
            mask, keep = self.hiding(shape)
            if random.random() < 0.15:
                mask, keep = ~mask, ~keep
            if random.random() < 0.15:
                other, also = self.hiding(shape)
                mask, keep = mask | other, keep | also
            parts.append(mask)
            drawn.keep = drawn.keep & keep
        if random.random() < 0.3:
            drawn.arguments["is_causal"] = True
            drawn.keep = drawn.keep & np.tri(*shape[-2:], dtype=bool)
        added = random.choice((None, None, "float", "low rank"))
        if added == "float":
            self.floating(drawn)
        if added == "low rank":
            rank, (*lead, queries, keys) = random.choice((1, 3)), shape
            self.tensors["left"] = self.normal(*self.broadcast(lead), queries, rank)
            self.tensors["right"] = self.normal(*self.broadcast(lead), keys, rank)
        drawn.hides = bool(parts) or "is_causal" in drawn.arguments or added == "float"

        def make(tensors: dict[str, Tensor]) -> Any:
            if added == "float" and not parts:
                return tensors["bias"]
            made = list(parts)
            if added == "float":
                made.append(masks.from_sdpa(tensors["bias"]))
            if added == "low rank":
                made.append(masks.low_rank(tensors["left"], tensors["right"]))
            whole = None
            for part in made:
                whole = part if whole is None else whole & part
            return whole

        drawn.mask = make

    def broadcast(self, lead: Any, share: float = 0.3) -> tuple[int, ...]:
        """Axes that stretch to these: some left away, some of one entry."""
        lead = tuple(lead)[self.random.randrange(len(lead) + 1) :]
        return tuple(1 if self.random.random() < share else size for size in lead)

    def batch(self, lead: Any) -> tuple[int, ...]:
        """The first of these axes, some of one entry."""
        lead = tuple(lead)[: self.random.randrange(1, len(lead) + 1)]
        return tuple(1 if self.random.random() < 0.3 else size for size in lead)

    def hiding(self, shape: tuple[int, ...]) -> tuple[masks.Mask, np.ndarray]:
        random, (*lead, queries, keys) = self.random, shape
        i, j = np.arange(queries)[:, None], np.arange(keys)
        whole = np.ones(shape, dtype=bool)
        shift = keys - queries

        def first(x: np.ndarray, tail: int) -> np.ndarray:
            """`[batch..., *tail]` with the leading axes it lacks."""
            axes = x.shape[: x.ndim - tail]
            return x.reshape(*axes, *(1,) * (len(lead) - len(axes)), *x.shape[x.ndim - tail :])

        kinds = ["causal", "lower right", "window", "dense", "blocks", "packed"]
        kind = random.choice(kinds + ["padding", "keys", "document"] * bool(lead))
        if kind == "causal":
            return masks.causal, whole & (j <= i)
        if kind == "lower right":
            return masks.lower_right, whole & (j <= i + shift)
        if kind == "window":
            before, after, end = random.randrange(4), random.randrange(4), random.random() < 0.5
            ahead = j - i - (shift if end else 0)
            mask = masks.window(before, after, align="end" if end else "start")
            return mask, whole & (ahead >= -before) & (ahead <= after)
        if kind == "dense":
            tail = tuple(1 if random.random() < 0.2 else n for n in (queries, keys))
            keep = self.some(*self.broadcast(lead), *tail)
            return masks.dense(keep), whole & keep.numpy()
        if kind == "blocks":
            rows, cols = random.choice((1, 2, 3)), random.choice((1, 2, 3))
            keep = self.some(*self.broadcast(lead), -(-queries // rows), -(-keys // cols))
            spread = keep.numpy().repeat(rows, axis=-2).repeat(cols, axis=-1)[..., :queries, :keys]
            return masks.blocks(keep, (rows, cols)), whole & spread
        if kind == "packed":
            cuts = [sorted(random.randrange(n + 1) for _ in range(3)) for n in (queries, keys)]
            numbers = [
                np.searchsorted(cut, np.arange(n), side="right") for cut, n in zip(cuts, shape[-2:], strict=True)
            ]
            inside = (numbers[0] < 3)[:, None] & (numbers[1] < 3)
            mask = masks.packed([0, *cuts[0]], [0, *cuts[1]])
            return mask, whole & inside & (numbers[0][:, None] == numbers[1])
        axes = self.batch(lead)
        if kind == "padding":
            lengths = torch.randint(0, keys + 2, axes, generator=self.generator)
            return masks.padding(lengths), whole & (j < first(lengths.numpy()[..., None, None], 2))
        if kind == "keys":
            keep = self.some(*axes, keys)
            return masks.keys(keep), whole & first(keep.numpy()[..., None, :], 2)
        ids = [torch.randint(0, 3, (*axes, n), generator=self.generator) for n in (queries, keys)]
        same = first(ids[0].numpy()[..., :, None], 2) == first(ids[1].numpy()[..., None, :], 2)
        return masks.document(*ids), whole & same

    def floating(self, drawn: Draw) -> None:
        *lead, queries, keys = drawn.shape
        tail = tuple(1 if self.random.random() < 0.3 else n for n in (queries, keys))
        bias = self.normal(*self.broadcast(lead), *tail)
        hidden = self.some(*bias.shape, share=0.3)
        lowest = self.random.choice((-math.inf, torch.finfo(self.dtype).min))
        self.tensors["bias"] = bias.masked_fill(hidden, lowest)
        drawn.keep = drawn.keep & ~np.broadcast_to(hidden.numpy(), drawn.shape)

    # Garbage.

    def littering(self, drawn: Draw) -> None:
        # One query behind `lower_right` sees everything: nothing is hidden, and nothing promised.
        if not drawn.hides or self.random.random() < 0.3 or 0 in drawn.shape or drawn.shape[-2] == 1:
            return
        large = [1e20, 1e30, -1e30] if self.dtype != torch.float16 else [6e4, -6e4]
        drawn.garbage = self.random.choice([math.nan, math.inf, -math.inf, *large])
        seen, sighted = drawn.keep.any(-2), drawn.keep.any(-1)
        seldom = self.random.choice((0.0, 0.0, 0.1))
        for name, useful in (("query", sighted), ("key", seen), ("value", seen), ("left", sighted), ("right", seen)):
            if name not in self.tensors:
                continue
            tensor = self.tensors[name]
            of_heads = narrowed(useful, tensor.shape[:-1], len(drawn.shape) > 2)
            share = np.where(of_heads, seldom, 0.7)
            bad = torch.rand(tensor.shape[:-1], generator=self.generator).numpy() < share
            drawn.bad[name] = bad
            tensor[torch.from_numpy(bad)] = drawn.garbage
        if "bias" in self.tensors and math.isnan(drawn.garbage):
            bias = self.tensors["bias"]
            bad = torch.rand(bias.shape, generator=self.generator).numpy() < seldom / 2
            bad &= (bias > torch.finfo(bias.dtype).min).numpy()  # there the mask itself hides
            drawn.bad["bias"] = bad
            bias[torch.from_numpy(bad)] = math.nan


def narrowed(useful: np.ndarray, shape: tuple[int, ...], headed: bool) -> np.ndarray:
    """Whether any of the grid's entries `[..., H, n]` that one entry of a tensor stands for is marked."""
    if headed and len(shape) > 1 and shape[-2] not in (1, useful.shape[-2]):
        useful = useful.reshape(*useful.shape[:-2], shape[-2], -1, useful.shape[-1]).any(-2)
    useful = useful.any(tuple(range(useful.ndim - len(shape)))) if useful.ndim > len(shape) else useful
    for axis, size in enumerate(shape):
        if size == 1 and useful.shape[axis] != 1:
            useful = useful.any(axis, keepdims=True)
    return useful


class Truth:
    """What the oracle says of a call."""

    def __init__(self, drawn: Draw) -> None:
        self.drawn = drawn
        self.arrays = {name: x.detach().double().numpy().copy() for name, x in drawn.tensors.items()}
        self.arrays |= {f"kernel {n}": t.detach().double().numpy() for n, t in drawn.kernel.tensors().items()}
        for name, bad in drawn.bad.items():
            self.arrays[name][bad] = 0.0
        self.affected = self._affected()

    def _affected(self) -> np.ndarray:
        """Rows that see garbage, or are garbage and see something: `[*leading, Q]`."""
        shape, keep = self.drawn.shape, self.drawn.keep
        rows = np.zeros(shape[:-1], dtype=bool)
        for name, bad in self.drawn.bad.items():
            if name == "bias":
                rows |= (keep & np.broadcast_to(bad, shape)).any(-1)
                continue
            full = self._spread(bad[..., None])[..., 0]
            if name in ("query", "left"):
                rows |= np.broadcast_to(full, shape[:-1]) & keep.any(-1)
            else:
                rows |= (keep & np.broadcast_to(full, (*shape[:-2], shape[-1]))[..., None, :]).any(-1)
        return rows

    def tainted(self, name: str, impl: str) -> np.ndarray | None:
        """Vectors of a tensor whose gradient nothing is promised of (None: all of it).

        Rows that see huge numbers may overflow. The fused kernels are not shielded before, so that there a row that sees NaN has
        a gradient that is NaN, also where nothing asks for it.
        """
        rows, shape = self.affected, self.drawn.shape
        shielded = impl != "triton" and not math.isfinite(self.drawn.garbage or 0.0)
        if self.drawn.garbage is None or shielded or not rows.any():
            return np.zeros(self.arrays[name].shape[:-1] or (), dtype=bool)
        if name == "query":
            return narrowed(rows, self.arrays[name].shape[:-1], len(shape) > 2)
        return None

    def _spread(self, x: np.ndarray) -> np.ndarray:
        """`[..., G, n, d]` with every head and leading axis of the grid."""
        lead = self.drawn.shape[:-2]
        if lead and x.ndim > 2 and x.shape[-3] not in (1, lead[-1]):
            x = x.repeat(lead[-1] // x.shape[-3], axis=-3)
        return np.broadcast_to(x, (*lead, *x.shape[-2:]))

    def output(self, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The output, and the sums of absolute values that it is made of."""
        bias = arrays.get("bias")
        if "left" in arrays:
            bias = self._spread(arrays["left"]) @ self._spread(arrays["right"]).swapaxes(-1, -2)
        elif bias is not None:
            bias = np.broadcast_to(bias, self.drawn.shape)
        parameters = {name.removeprefix("kernel "): x for name, x in arrays.items() if name.startswith("kernel ")}
        oracle = Oracle(self.drawn.kernel, parameters, self.drawn.keep, bias)
        query, key, value = (self._spread(arrays[name]) for name in ("query", "key", "value"))
        weights = oracle.weights(query, key)
        size = np.abs(weights) @ np.abs(value)
        # What is left of a row whose sum of coefficients is next to nothing depends on the range of a float.
        return weights @ value, np.where(oracle.least[..., None] < 1e-25, np.inf, size)

    def derivative(self, name: str, direction: np.ndarray, loss: np.ndarray) -> float:
        """Of the sum of `loss` times the output, along a direction of one tensor."""
        moved = self.arrays | {name: self.arrays[name] + 1j * STEP * direction}
        return float((self.output(moved)[0] * loss).imag.sum() / STEP)


def run(drawn: Draw, impl: str) -> tuple[Tensor, dict[str, Tensor]]:
    """A call of `attend`, and the leaves it was made of."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in drawn.tensors.items()}
    parameters = {name: x.detach().clone().requires_grad_() for name, x in drawn.kernel.tensors().items()}
    out = attend(
        *(leaves[name] for name in ("query", "key", "value")),
        drawn.mask(leaves),
        kernel=drawn.kernel.with_tensors(parameters),
        impl=impl,
        **drawn.arguments,
    )
    return out, leaves | {f"kernel {name}": x for name, x in parameters.items()}


def check(drawn: Draw, truth: Truth, impl: str) -> None:
    """Values and every gradient of one implementation against the oracle; raises `AssertionError` where they differ."""
    dtype = drawn.tensors["query"].dtype
    bound = BOUNDS[dtype]
    out, leaves = run(drawn, impl)
    wanted, size = truth.output(truth.arrays)
    assert out.dtype == dtype
    assert tuple(out.shape) == wanted.shape, (tuple(out.shape), wanted.shape)
    clean = ~np.broadcast_to(truth.affected[..., None], wanted.shape) & (size < torch.finfo(dtype).max / 16)
    found = out.detach().double().numpy()
    assert np.isfinite(found[clean]).all(), "not finite"
    wrong = np.abs(found - wanted)[clean] - bound * (1 + size[clean] + np.abs(wanted[clean]))
    assert not wrong.size or wrong.max() <= 0, f"output off by {np.abs(found - wanted)[clean].max():.3g}"
    if (
        drawn.garbage is not None
        and not math.isfinite(drawn.garbage)
        and not (impl == "triton" and math.isinf(drawn.garbage))
    ):
        assert np.isnan(found[truth.affected]).all(), "a row that sees what is not finite is finite"
    if not out.numel():
        return
    generator = torch.Generator().manual_seed(3)
    loss = torch.randn(out.shape, generator=generator, dtype=torch.float64).numpy() * clean
    picked = torch.from_numpy(clean)
    total = (out[picked].double() * torch.from_numpy(loss)[picked]).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        gradient = np.zeros(leaf.shape) if gradient is None else gradient.double().numpy()
        tainted = truth.tainted(name, impl)
        if tainted is None:
            continue
        gradient[tainted] = 0.0
        assert np.isfinite(gradient).all(), f"the gradient of {name} is not finite"
        direction = torch.randn(leaf.shape, generator=generator, dtype=torch.float64).numpy()
        direction[tainted] = 0.0
        if name in drawn.bad:
            assert (gradient[drawn.bad[name]] == 0).all(), f"what is hidden has a gradient: {name}"
            direction[drawn.bad[name]] = 0.0
        if name == "bias":
            direction[~(truth.arrays[name] > -1e30)] = 0.0
        expected = truth.derivative(name, direction, loss)
        scale = np.abs(gradient * direction).sum() + 0.1 * (np.abs(loss) * np.where(clean, size, 0.0)).sum() + 1
        error = abs((gradient * direction).sum() - expected)
        assert error <= 3 * bound * scale, f"the gradient of {name} is off by {error:.3g} of {scale:.3g}"


def implementations(drawn: Draw, random: Random) -> list[str]:
    """`auto`, and one of those that take the call."""
    leaves = drawn.tensors
    arguments = {"kernel": drawn.kernel, **drawn.arguments}
    plan = attend.plan(leaves["query"], leaves["key"], leaves["value"], drawn.mask(leaves), **arguments)
    able = [one.name for one in plan.considered if one.refusal is None and one.name != "triton"]
    return ["auto", random.choice(able)]


def fused(drawn: Draw) -> bool:
    """Whether the fused kernels take the call."""
    leaves = {name: x.detach().requires_grad_() for name, x in drawn.tensors.items()}
    try:
        attend.plan(
            *list(leaves.values())[:3], drawn.mask(leaves), kernel=drawn.kernel, impl="triton", **drawn.arguments
        )
    except Unsupported:
        return False
    return True

"""Kernels for many short sequences: all pairs of one head of one sequence in one program, forward and backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from heedful.ops.fused._device import current, power_of_2
from heedful.ops.fused.short import like_rows

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(x, batch, head, length, size, by_batch, by_head, by_row, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Pointers to the rows of a head of a sequence, and which of them exist."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, SIZE)[None, :]
    at = x + batch.to(tl.int64) * by_batch + head * by_head + row * by_row + column
    return at, (row < length) & (column < size)


@triton.jit
def _coefficients(q, k, scale, keys, K: tl.constexpr, PRECISION: tl.constexpr):
    """Softmax of the scores; nothing is given to rows that only fill the block."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2_E)
    score = tl.where(tl.arange(0, K)[None, :] < keys, score, -float("inf"))
    top = tl.max(score, axis=1, keep_dims=True)
    weight = tl.exp2(score - top)
    return weight / tl.sum(weight, axis=1, keep_dims=True)


@triton.jit
def _forward(
    query, key, value, out, heads, queries, keys, size, width, scale,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on,
    Q: tl.constexpr, K: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    at, there = _tile(query, batch, head, queries, size, qb, qh, qn, Q, D)
    q = tl.load(at, there, 0.0)
    at, there = _tile(key, batch, head, keys, size, kb, kh, kn, K, D)
    k = tl.load(at, there, 0.0)
    at, there = _tile(value, batch, head, keys, width, vb, vh, vn, K, E)
    v = tl.load(at, there, 0.0)
    weight = _coefficients(q, k, scale, keys, K, PRECISION)
    at, there = _tile(out, batch, head, queries, width, ob, oh, on, Q, E)
    tl.store(at, tl.dot(weight.to(v.dtype), v, input_precision=PRECISION).to(out.dtype.element_ty), there)


@triton.jit
def _backward(
    query, key, value, above, to_query, to_key, to_value, heads, queries, keys, size, width, scale,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, ab, ah, an, gb, gh, gn, hb, hh, hn, ib, ih, in_,
    Q: tl.constexpr, K: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    at, there = _tile(query, batch, head, queries, size, qb, qh, qn, Q, D)
    q = tl.load(at, there, 0.0)
    at, there = _tile(key, batch, head, keys, size, kb, kh, kn, K, D)
    k = tl.load(at, there, 0.0)
    at, there = _tile(value, batch, head, keys, width, vb, vh, vn, K, E)
    v = tl.load(at, there, 0.0)
    at, there = _tile(above, batch, head, queries, width, ab, ah, an, Q, E)
    a = tl.load(at, there, 0.0)
    weight = _coefficients(q, k, scale, keys, K, PRECISION)
    at, there = _tile(to_value, batch, head, keys, width, ib, ih, in_, K, E)
    tl.store(at, tl.dot(tl.trans(weight).to(a.dtype), a, input_precision=PRECISION).to(v.dtype), there)
    slope = tl.dot(a, tl.trans(v), input_precision=PRECISION)
    slope = (weight * (slope - tl.sum(weight * slope, axis=1, keep_dims=True)) * scale).to(q.dtype)
    at, there = _tile(to_query, batch, head, queries, size, gb, gh, gn, Q, D)
    tl.store(at, tl.dot(slope, k, input_precision=PRECISION).to(q.dtype), there)
    at, there = _tile(to_key, batch, head, keys, size, hb, hh, hn, K, D)
    tl.store(at, tl.dot(tl.trans(slope), q, input_precision=PRECISION).to(k.dtype), there)


def forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`[B, H, n, D]`, strided as they are -> `[B, H, Q, E]`, heads beside one another in memory as output maps want them."""
    batch, heads = query.shape[:2]
    out = like_rows(query, value.shape[-1])
    sizes, constants = _sizes(query, key, value)
    with current(query):
        _forward[(batch * heads,)](
            query, key, value, out, heads, *sizes, scale, *_strides(query, key, value, out), **constants
        )
    return out


def backward(query: Tensor, key: Tensor, value: Tensor, above: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    above = above if above.stride(-1) == 1 else above.contiguous()
    gradients = like_rows(query), like_rows(key), like_rows(value)
    sizes, constants = _sizes(query, key, value)
    with current(query):
        _backward[(query.shape[0] * query.shape[1],)](
            query, key, value, above, *gradients, query.shape[1], *sizes, scale,
            *_strides(query, key, value, above, *gradients), **constants,
        )  # fmt: skip
    return gradients


def _sizes(query: Tensor, key: Tensor, value: Tensor) -> tuple[tuple[int, ...], dict[str, int | str]]:
    sizes = (query.shape[2], key.shape[2], query.shape[3], value.shape[3])
    blocks = dict(zip("QKDE", (power_of_2(size) for size in sizes), strict=True))
    largest = max(blocks["Q"], blocks["K"])
    precise = "ieee" if query.dtype == torch.float32 else "tf32"
    return sizes, {**blocks, "PRECISION": precise, "num_warps": 1 if largest <= 32 else 4}


def _strides(*tensors: Tensor) -> list[int]:
    return [step for x in tensors for step in x.stride()[:3]]

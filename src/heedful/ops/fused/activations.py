"""The table of elementwise functions: what turns a score into a coefficient, its slope, and torch's word for both.

A new function is one line in `coefficient`, one in `slope` and one in `REFERENCES`. Scores come multiplied by the function's unit:
log2(e) where it is made of powers of two, which the hardware computes, one half for the logistic function by a hyperbolic tangent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

Pointwise = Callable[[torch.Tensor, int], torch.Tensor]

REFERENCES: dict[str, Pointwise] = {
    "exp": lambda score, degree: score.exp(),
    "sigmoid": lambda score, degree: score.sigmoid(),
    "tanh": lambda score, degree: score.sigmoid(),
    "relu": lambda score, degree: score.relu(),
    "relu_squared": lambda score, degree: score.relu().square(),
    "power": lambda score, degree: score**degree,
}
"""The same functions in torch, of a score in natural units; their slopes are what autograd makes of them."""

LOG2_E = 1.4426950408889634
UNITS = dict.fromkeys(REFERENCES, 1.0) | {"exp": LOG2_E, "sigmoid": LOG2_E, "tanh": 0.5}


@triton.jit
def coefficient(t, ACT: tl.constexpr, DEGREE: tl.constexpr, FAST_MATH: tl.constexpr):
    """The coefficient of a score."""
    if ACT == "exp":
        return tl.exp2(t)
    elif ACT == "sigmoid":
        return _quick_sigmoid(t) if FAST_MATH else 1.0 / (1.0 + tl.exp2(-t))
    elif ACT == "tanh":
        return 0.5 * _quick_tanh(t) + 0.5 if FAST_MATH else 1.0 / (1.0 + tl.exp(-2.0 * t))
    elif ACT == "relu":
        return tl.maximum(t, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "relu_squared":
        return _power(tl.maximum(t, 0.0, propagate_nan=tl.PropagateNan.ALL), 2)
    else:
        return _power(t, DEGREE)


@triton.jit
def slope(t, p, ACT: tl.constexpr, DEGREE: tl.constexpr):
    """The derivative of the coefficient p by its score (in natural units)."""
    if ACT == "exp":
        return p
    elif ACT == "sigmoid" or ACT == "tanh":
        return p - p * p
    elif ACT == "relu":
        return tl.where(t > 0, 1.0, 0.0)
    elif ACT == "relu_squared":
        return 2.0 * tl.maximum(t, 0.0)
    else:
        return _power(t, DEGREE - 1) * DEGREE


@triton.jit
def _power(t, DEGREE: tl.constexpr):
    p = tl.full(t.shape, 1.0, tl.float32) if DEGREE == 0 else t
    for _ in tl.static_range(DEGREE - 1):
        p *= t
    return p


@triton.jit
def _quick_tanh(t):
    """To about 2^-11 of itself, and to 2^-20 where it is near one."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [t], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _quick_sigmoid(t):
    """1 / (1 + 2^-t) to about 1e-6, four at a time with one reciprocal between them.

    The unit for reciprocals and exponentials is the narrowest of the chip. 1/a = (b c d) / (a b c d); beyond 2^30 the
    coefficient is one in any precision, and clipped there four factors cannot overflow. 2^t / (1 + 2^t) keeps its relative
    precision however small it is, which a hyperbolic tangent would not. A thread holds two scores of one row, two of the row
    eight below, and so on: four of one row go together, so that a NaN spoils its own row alone.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 a0, a1, a2, a3, b0, b1, b2, b3, m0, m1, m, r;
        ex2.approx.ftz.f32 a0, $8;  ex2.approx.ftz.f32 a1, $9;
        ex2.approx.ftz.f32 a2, $12;  ex2.approx.ftz.f32 a3, $13;
        add.f32 b0, a0, 0f3F800000;  add.f32 b1, a1, 0f3F800000;
        add.f32 b2, a2, 0f3F800000;  add.f32 b3, a3, 0f3F800000;
        mul.f32 m0, b0, b1;  mul.f32 m1, b2, b3;  mul.f32 m, m0, m1;
        rcp.approx.ftz.f32 r, m;
        mul.f32 m, r, m1;  mul.f32 r, r, m0;
        mul.f32 a0, a0, b1;  mul.f32 a1, a1, b0;  mul.f32 a2, a2, b3;  mul.f32 a3, a3, b2;
        mul.f32 $0, a0, m;  mul.f32 $1, a1, m;  mul.f32 $4, a2, r;  mul.f32 $5, a3, r;
        ex2.approx.ftz.f32 a0, $10;  ex2.approx.ftz.f32 a1, $11;
        ex2.approx.ftz.f32 a2, $14;  ex2.approx.ftz.f32 a3, $15;
        add.f32 b0, a0, 0f3F800000;  add.f32 b1, a1, 0f3F800000;
        add.f32 b2, a2, 0f3F800000;  add.f32 b3, a3, 0f3F800000;
        mul.f32 m0, b0, b1;  mul.f32 m1, b2, b3;  mul.f32 m, m0, m1;
        rcp.approx.ftz.f32 r, m;
        mul.f32 m, r, m1;  mul.f32 r, r, m0;
        mul.f32 a0, a0, b1;  mul.f32 a1, a1, b0;  mul.f32 a2, a2, b3;  mul.f32 a3, a3, b2;
        mul.f32 $2, a0, m;  mul.f32 $3, a1, m;  mul.f32 $6, a2, r;  mul.f32 $7, a3, r;
        }""",
        "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,f,f,f,f",
        [tl.minimum(t, 30.0, propagate_nan=tl.PropagateNan.ALL)],
        dtype=tl.float32,
        is_pure=True,
        pack=8,
    )

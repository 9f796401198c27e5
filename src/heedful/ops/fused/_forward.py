"""The forward pass, block by block: coefficients live in registers and are never written."""

from __future__ import annotations

import triton
import triton.language as tl

from heedful.ops.fused._blocks import base, clean, factor, not_finite, of_keys, of_pairs, place, tile, visible
from heedful.ops.fused._linked import linked
from heedful.ops.fused.activations import coefficient

# How far, in powers of two, a term that is constant along a loop may be left out of the exponent and multiplied in behind it.
ROOM = tl.constexpr(60.0)
LITTLE, LARGE = tl.constexpr(2.0**-60), tl.constexpr(2.0**90)
# The hardware's hyperbolic tangent is off by about 2^-21: a row of coefficients takes it while their mean is at least this.
LEAST = tl.constexpr(2.0**-13)


@triton.jit
def forward(q_, k_, v_, out_, stat_, T, C: tl.constexpr, SAFE: tl.constexpr):
    """BM rows of one head against every key they may attend to."""
    m, b, h = place(T.Q, T.H, C.BM, C.HIGH, C)
    of_block(q_, k_, v_, out_, stat_, m, b, h, T, C, SAFE)


@triton.jit
def half_squares(x_, out_, tickets_, H, n, xb, xh, xn, D: tl.constexpr, BM: tl.constexpr):
    """Half the squared norm of every row, for the kernel behind, whose count of tiles begins at zero.

    From the last row to the first, with which that kernel begins: the cache still has them.
    """
    linked()
    blocks = n // BM
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    if pid == 0:
        tl.store(tickets_, 0)
    b, h, rows = pid // blocks // H, pid // blocks % H, pid % blocks * BM + tl.arange(0, BM)
    x = tl.load(base(x_, xb, xh, b, h) + rows.to(tl.int64)[:, None] * xn + tl.arange(0, D)[None, :])
    tl.store(out_ + (b * H + h).to(tl.int64) * n + rows, half_square(x))


@triton.jit
def forward_left(q_, k_, v_, out_, stat_, count, T, C: tl.constexpr, SPAN: tl.constexpr):
    """The same for blocks that another kernel has left: those with a row whose `stat` is NaN. Most often there are none: programs look
    through SPAN blocks at once, whose rows lie one behind the other."""
    linked()
    blocks = T.Q // C.BM
    for first in range(tl.program_id(0) * SPAN, count, tl.num_programs(0) * SPAN):
        several = first * C.BM + tl.arange(0, SPAN * C.BM)
        if has_nan(tl.load(stat_ + several, mask=several < count * C.BM, other=0.0)):
            for at in range(first, tl.minimum(first + SPAN, count)):
                if has_nan(tl.load(stat_ + at * C.BM + tl.arange(0, C.BM))):
                    head = at // blocks
                    of_block(q_, k_, v_, out_, stat_, at % blocks, head // T.H, head % T.H, T, C, C)


@triton.jit
def has_nan(x):
    return tl.max(tl.where(x != x, 1, 0)) > 0


@triton.jit
def of_block(q_, k_, v_, out_, stat_, m, b, h, T, C: tl.constexpr, SAFE: tl.constexpr):
    """The results of a block of rows.

    `stat` keeps what backward needs of a divided row: log2 of the sum of an exponential kernel, else the divisor. Without the
    constant of the row, where distances are taken: it cancels. A short form is followed by the safe one where it does not serve.
    """
    g = h // (T.H // T.G)
    head = (b * T.H + h).to(tl.int64)
    rows, wide = m * C.BM + tl.arange(0, C.BM), tl.arange(0, C.E)
    q = tile(q_, b, h, T.H, T.Q, m * C.BM, C.BM, C.D, C.FLAT)
    own = tl.zeros([C.BM], tl.float32)
    if C.DISTANCE:
        own = tl.load(T.alpha + h) * C.UNIT * half_square(q)
    if C.SHORT:
        acc = tl.zeros([C.BM, C.E], tl.float32)
        total = tl.zeros([C.BM], tl.float32)
        top = tl.zeros([C.BM], tl.float32)
        # No exponent is above the row's own term: while it is small it may wait, and no maximum need be kept.
        serves = tl.max(own) < ROOM
        if serves:
            acc, total, top = sums(q, own, k_, v_, m, b, h, g, T, C)
            if C.ACT == "tanh":
                serves = are_enough(total, tl.minimum(rows + T.high + 1, T.K) if C.HIGH else T.K, rows < T.Q)
            elif C.DIVISION == 1:
                # Where even the largest coefficient is next to nothing, a running maximum is kept.
                serves = tl.min(tl.where(total > LITTLE, 1, 0)) > 0
            else:
                acc *= tl.exp2(-own)[:, None]
        if not serves:
            acc, total, top = sums(q, own, k_, v_, m, b, h, g, T, SAFE)
    else:
        acc, total, top = sums(q, own, k_, v_, m, b, h, g, T, C)
    if C.DIVISION != 0:
        some = total != 0
        divisor = tl.where(some, total, 1.0)
        acc = acc / divisor[:, None]
        stat = total
        if C.ACT == "exp" and C.DIVISION == 1:
            stat = tl.where(some, tl.log2(divisor) + top, float("inf"))
        tl.store(stat_ + head * T.Q + rows, stat, mask=rows < T.Q)
    if C.CLEAN:
        acc = tl.where(not_finite(acc)[:, None], float("nan"), acc)
    tl.store(
        out_ + (head * T.Q + rows)[:, None] * C.WIDTH + wide[None, :],
        acc.to(out_.dtype.element_ty),
        mask=(rows[:, None] < T.Q) & (wide[None, :] < C.WIDTH),
    )


@triton.jit
def are_enough(total, count, inside):
    """Whether coefficients that sum to this are large enough for the hardware's hyperbolic tangent. NaN is not."""
    return tl.min(tl.where((total >= LEAST * count) | (count <= 0) | ~inside, 1, 0)) > 0


@triton.jit
def half_square(x):
    """Half the squared norm of every row."""
    x = x.to(tl.float32)
    return 0.5 * tl.sum(x * x, 1)


@triton.jit
def stretch(m, b, h, T, C: tl.constexpr):
    """Where the keys in sight of a block of rows begin and end, and between which of them all rows see all keys."""
    last = tl.load(T.lengths + b * T.H + h).to(tl.int32) if C.LENGTHS else T.K
    first, end, m0 = 0, last, m * C.BM
    if C.LOW:
        first = tl.maximum(m0 + T.low, 0) // C.BN * C.BN
    if C.HIGH:
        end = tl.minimum(last, tl.maximum(m0 + C.BM + T.high, 0))
    full, least = first, end // C.BN * C.BN
    if C.LOW:
        full = tl.minimum(tl.cdiv(tl.maximum(m0 + C.BM - 1 + T.low, 0), C.BN) * C.BN, tl.maximum(end, first))
    if C.HIGH:
        least = tl.minimum(least, tl.maximum(m0 + T.high + 1, 0) // C.BN * C.BN)
    return last, first, full, tl.maximum(least, full), end


@triton.jit
def sums(q, own, k_, v_, m, b, h, g, T, C: tl.constexpr):
    """Masked blocks before, whole blocks between, masked blocks behind; a list names the whole ones first."""
    acc = tl.zeros([C.BM, C.E], tl.float32)
    total = tl.zeros([C.BM, 16] if C.DOTS else [C.BM], tl.float32)
    top = tl.full([C.BM], 0.0 if C.SHORT else -float("inf"), tl.float32)
    last, first, full, least, end = stretch(m, b, h, T, C)
    if C.LIST:
        end = tl.load(base(T.count, T.count_b, T.count_h, b, h) + m)
        full = tl.load(base(T.full, T.count_b, T.count_h, b, h) + m)
        acc, total, top = walk(acc, total, top, q, own, k_, v_, m, 0, full, last, b, h, g, False, T, C)
        acc, total, top = walk(acc, total, top, q, own, k_, v_, m, full, end, last, b, h, g, True, T, C)
    else:
        if C.LOW:
            acc, total, top = walk(acc, total, top, q, own, k_, v_, m, first, full, last, b, h, g, True, T, C)
        acc, total, top = walk(acc, total, top, q, own, k_, v_, m, full, least, last, b, h, g, False, T, C)
        if C.HIGH or C.LENGTHS or not C.EVEN:
            acc, total, top = walk(acc, total, top, q, own, k_, v_, m, least, end, last, b, h, g, True, T, C)
    if C.DOTS:
        total = tl.sum(total, 1) * 0.0625
    return acc, total, top


@triton.jit
def walk(acc, total, top, q, own, k_, v_, m, start, end, last, b, h, g, MASKED: tl.constexpr, T, C: tl.constexpr):
    """Adds a stretch of keys to the sums of the rows."""
    a2 = tl.load(T.alpha + h) * C.UNIT
    b2 = tl.load(T.beta + h) * C.UNIT if C.BETA else 0.0
    rows = m * C.BM + tl.arange(0, C.BM)
    if C.RANK:
        left = factor(T.left, T.left_b, T.left_h, T.left_q, b, h, rows, T.Q, C)
    for at in tl.range(start, end, 1 if C.LIST else C.BN, num_stages=C.STAGES):
        n0 = tl.load(base(T.order, T.order_b, T.order_h, b, h) + m * T.order_m + at) * C.BN if C.LIST else at
        cols = n0 + tl.arange(0, C.BN)
        k = tile(k_, b, g, T.G, T.K, n0, C.BN, C.D, C.FLAT)
        t = tl.dot(q, k.T, input_precision=C.PRECISION) * a2
        if C.DISTANCE or C.BETA or C.BIAS == 1:
            t += of_keys(cols, b, h, g, a2, b2, T, C)[None, :]
        if C.RANK:
            right = factor(T.right, T.right_b, T.right_h, T.right_k, b, h, cols, T.K, C)
            t += tl.dot(left, right.T, input_precision=C.PRECISION) * C.UNIT
        if C.BIAS == 2:
            t += of_pairs(rows[:, None], cols[None, :], b, h, T, C)
        if MASKED:
            keep = visible(rows[:, None], cols[None, :], last, b, h, T, C)
        if C.ACT == "exp" and C.DIVISION == 1 and not C.SHORT:
            if MASKED:
                t = tl.where(keep, t, -float("inf"))
            new = tl.maximum(top, tl.max(t, 1))
            shift = tl.where(new == -float("inf"), 0.0, new)
            p = tl.exp2(t - shift[:, None])
            shrink = tl.exp2(top - shift)
            acc *= shrink[:, None]
            total = total * shrink + tl.sum(p, 1)
            top = new
        else:
            if C.DISTANCE and not C.SHORT:
                t -= own[:, None]
            if MASKED and C.CLEAN and C.ACT == "sigmoid":
                t = tl.where(keep, t, 0.0)  # it shares reciprocals: what is hidden must not spoil its neighbours
            p = coefficient(t, C.ACT, C.DEGREE, C.QUICK)
            if MASKED:
                p = tl.where(keep, p, 0.0)
            if C.DOTS:
                # Of coefficients as they are multiplied: a row of one large one then returns its value unrounded.
                total = tl.dot(p.to(C.P), tl.full([C.BN, 16], 1.0, C.P), total, input_precision=C.PRECISION)
            elif C.DIVISION == 1 or C.ACT == "tanh":
                total += tl.sum(p, 1)
            if C.DIVISION == 2:
                total += tl.sum(keep.to(tl.float32), 1) if MASKED else C.BN
        v = tile(v_, b, g, T.G, T.K, n0, C.BN, C.E, C.FLAT)
        if MASKED and C.CLEAN:
            # A value that is not finite reaches the rows that see it through their coefficient, and no others.
            p = tl.where(keep & not_finite(v)[None, :], float("nan"), p)
            v = clean(v)
        acc = tl.dot(p.to(C.P), v.to(C.P), acc, input_precision=C.PRECISION)
    return acc, total, top

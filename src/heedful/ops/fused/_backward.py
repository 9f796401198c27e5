"""The backward pass in two kernels without atomics: one for the rows (queries), one for the columns (keys and values).

Coefficients are computed anew from query, key and what forward kept of a row's divisor. With ds = dL/dscore, where rows are
divided by their sum dp loses delta = out . dout first:

    dq = alpha sum_j ds_ij k_j      dk = alpha sum_i ds_ij q_i      dv = sum_i p_ij dout_i

and, where the score is that of a distance, alpha (q.k - q.q / 2 - k.k / 2), less alpha q_i sum_j ds_ij and alpha k_j sum_i ds_ij.
Both sums run in a fixed order: the same inputs give the same bits. A short form is followed by the safe one where it does not serve.
"""

from __future__ import annotations

import triton
import triton.language as tl

from heedful.ops.fused._blocks import base, clean, factor, of_keys, of_pairs, place, tile, visible
from heedful.ops.fused._forward import ROOM, are_enough, half_square, stretch
from heedful.ops.fused._linked import linked
from heedful.ops.fused.activations import coefficient, slope

# The least scale by which a term of scores is divided.
FAINT = tl.constexpr(1e-30)


@triton.jit
def backward_rows(
    q_, k_, v_, do_, again_, out_, dq_, stat_, delta_, dalpha_, dbeta_, dleft_, T, C: tl.constexpr, SAFE: tl.constexpr
):
    """The gradient of BM queries, and per row those of alpha, beta and the left factor."""
    m, b, h = place(T.Q, T.H, C.BM, C.HIGH, C)
    of_queries(q_, k_, v_, do_, again_, out_, dq_, stat_, delta_, dalpha_, dbeta_, dleft_, m, b, h, T, C, SAFE)


@triton.jit
def rows_left(q_, k_, v_, do_, again_, out_, dq_, stat_, delta_, left_, count, T, C: tl.constexpr, SPAN: tl.constexpr):
    """The same for blocks of rows that another kernel has left, by its flags for every 64 of them."""
    linked()
    blocks = T.Q // C.BM
    for first in range(tl.program_id(0) * SPAN, count, tl.num_programs(0) * SPAN):
        if is_left(left_, first, count, C.BM, SPAN):
            for at in range(first, tl.minimum(first + SPAN, count)):
                if is_left(left_, at, count, C.BM, 1):
                    m, b, h = at % blocks, at // blocks // T.H, at // blocks % T.H
                    of_queries(q_, k_, v_, do_, again_, out_, dq_, stat_, delta_, None, None, None, m, b, h, T, C, C)


@triton.jit
def columns_left(
    q_, k_, v_, do_, again_, dk_, dv_, stat_, delta_, left_, count, T, C: tl.constexpr, SPAN: tl.constexpr
):
    """And for blocks of keys."""
    linked()
    blocks = T.K // C.BN
    for first in range(tl.program_id(0) * SPAN, count, tl.num_programs(0) * SPAN):
        if is_left(left_, first, count, C.BN, SPAN):
            for at in range(first, tl.minimum(first + SPAN, count)):
                if is_left(left_, at, count, C.BN, 1):
                    n, b, g = at % blocks, at // blocks // T.G, at // blocks % T.G
                    of_keys_and_values(q_, k_, v_, do_, again_, dk_, dv_, stat_, delta_, None, None, n, b, g, T, C, C)


@triton.jit
def is_left(left_, first, count, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """Whether one of some blocks is."""
    flags = first * (BLOCK // 64) + tl.arange(0, SPAN * (BLOCK // 64))
    return tl.max(tl.load(left_ + flags, mask=flags < count * (BLOCK // 64), other=0)) > 0


@triton.jit
def of_queries(
    q_, k_, v_, do_, again_, out_, dq_, stat_, delta_, dalpha_, dbeta_, dleft_, m, b, h, T,
    C: tl.constexpr, SAFE: tl.constexpr,
):  # fmt: skip
    """A block of rows.

    `again` is the query under another name: read through it behind the loop, it need not stay in registers. What the columns need of
    every row, delta and half the squared norm of its query, is kept for them.
    """
    g = h // (T.H // T.G)
    head = (b * T.H + h).to(tl.int64)
    rows, deep, wide = m * C.BM + tl.arange(0, C.BM), tl.arange(0, C.D), tl.arange(0, C.E)
    inside = rows < T.Q
    alpha = tl.load(T.alpha + h)
    q = tile(q_, b, h, T.H, T.Q, m * C.BM, C.BM, C.D, C.FLAT)
    do = tile(do_, b, h, T.H, T.Q, m * C.BM, C.BM, C.E, C.FLAT)
    delta = tl.zeros([C.BM], tl.float32)
    if C.DIVISION == 1:
        where = out_ + (head * T.Q + rows)[:, None] * C.WIDTH + wide[None, :]
        out = tl.load(where, mask=inside[:, None] & (wide[None, :] < C.WIDTH), other=0.0)
        delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
        tl.store(delta_ + head * T.Q + rows, delta, mask=inside)
    half = tl.zeros([C.BM], tl.float32)
    if C.DISTANCE and (C.DIVISION != 1 or C.GRADIENTS[0]):
        half = half_square(q)
        tl.store(T.hq + head * T.Q + rows, half, mask=inside)
    scale = tl.full([C.BM], 1.0, tl.float32)
    if C.DIVISION == 2 or (C.DIVISION == 1 and C.ACT != "exp"):
        divisor = tl.load(stat_ + head * T.Q + rows, mask=inside, other=1.0)
        scale = tl.where(divisor == 0, 0.0, 1.0 / tl.where(divisor == 0, 1.0, divisor))
    shift = tl.zeros([C.BM], tl.float32)
    if C.ACT == "exp" and C.DIVISION == 1:
        shift = tl.load(stat_ + head * T.Q + rows, mask=inside, other=0.0)
    elif C.DISTANCE:
        shift = alpha * C.UNIT * half
    if C.SHORT:
        dq = tl.zeros([C.BM, C.D], tl.float32)
        own = tl.zeros([C.BM], tl.float32)
        far = tl.zeros([C.BM], tl.float32)
        dleft = tl.zeros([C.BM, C.R], tl.float32)
        serves = tl.max(tl.abs(shift)) < ROOM
        if serves:
            dq, own, far, dleft, total = of_rows(q, do, delta, shift, k_, v_, m, b, h, g, T, C)
            if C.ACT == "tanh":
                serves = are_enough(total, tl.minimum(rows + T.high + 1, T.K) if C.HIGH else T.K, inside)
            else:
                late = tl.exp2(-shift)
                dq, own, far, dleft = dq * late[:, None], own * late, far * late, dleft * late[:, None]
        if not serves:
            dq, own, far, dleft, total = of_rows(q, do, delta, shift, k_, v_, m, b, h, g, T, SAFE)
    else:
        dq, own, far, dleft, total = of_rows(q, do, delta, shift, k_, v_, m, b, h, g, T, C)
    dq *= scale[:, None]
    own *= scale
    if C.DISTANCE or C.GRADIENTS[0]:
        q = tile(again_, b, h, T.H, T.Q, m * C.BM, C.BM, C.D, C.FLAT)
    if C.GRADIENTS[0]:
        by_alpha = tl.sum(times(dq, q), 1) - times(own, half) - far * scale
        tl.store(dalpha_ + head * T.Q + rows, by_alpha, mask=inside)
    if C.GRADIENTS[1]:
        tl.store(dbeta_ + head * T.Q + rows, own, mask=inside)
    if C.RANK and C.GRADIENTS[2]:
        r = tl.arange(0, C.R)
        where = dleft_ + (head * T.Q + rows)[:, None] * C.RANK + r[None, :]
        tl.store(where, dleft * scale[:, None], mask=inside[:, None] & (r[None, :] < C.RANK))
    if C.DISTANCE:
        dq -= times(own[:, None], q)
    where = dq_ + (head * T.Q + rows)[:, None] * C.HEAD + deep[None, :]
    tl.store(where, (alpha * dq).to(dq_.dtype.element_ty), mask=inside[:, None] & (deep[None, :] < C.HEAD))


@triton.jit
def of_rows(q, do, delta, shift, k_, v_, m, b, h, g, T, C: tl.constexpr):
    """Masked keys before, whole keys between, masked keys behind; a list names the whole ones first."""
    sums = (
        tl.zeros([C.BM, C.D], tl.float32),
        tl.zeros([C.BM], tl.float32),
        tl.zeros([C.BM], tl.float32),
        tl.zeros([C.BM, C.R], tl.float32),
        tl.zeros([C.BM], tl.float32),
    )
    last, first, full, least, end = stretch(m, b, h, T, C)
    if C.LIST:
        end = tl.load(base(T.count, T.count_b, T.count_h, b, h) + m)
        full = tl.load(base(T.full, T.count_b, T.count_h, b, h) + m)
        sums = walk_rows(sums, q, do, delta, shift, k_, v_, m, 0, full, last, b, h, g, False, T, C)
        sums = walk_rows(sums, q, do, delta, shift, k_, v_, m, full, end, last, b, h, g, True, T, C)
    else:
        if C.LOW:
            sums = walk_rows(sums, q, do, delta, shift, k_, v_, m, first, full, last, b, h, g, True, T, C)
        sums = walk_rows(sums, q, do, delta, shift, k_, v_, m, full, least, last, b, h, g, False, T, C)
        if C.HIGH or C.LENGTHS or not C.EVEN:
            sums = walk_rows(sums, q, do, delta, shift, k_, v_, m, least, end, last, b, h, g, True, T, C)
    return sums


@triton.jit
def times(gradient, x):
    """A product that is zero where the gradient is: a row that sees nothing owes nothing, whatever it holds."""
    return tl.where(gradient == 0, 0.0, gradient * x.to(tl.float32))


@triton.jit
def walk_rows(
    sums, q, do, delta, shift, k_, v_, m, start, end, last, b, h, g, MASKED: tl.constexpr, T, C: tl.constexpr
):
    """Adds a stretch of keys. `own` sums ds, `far` sums ds times half the squared norm of the key, `total` coefficients."""
    dq, own, far, dleft, total = sums
    a2 = tl.load(T.alpha + h) * C.UNIT
    b2 = tl.load(T.beta + h) * C.UNIT if C.BETA else 0.0
    rows = m * C.BM + tl.arange(0, C.BM)
    if C.RANK:
        left = factor(T.left, T.left_b, T.left_h, T.left_q, b, h, rows, T.Q, C)
    for at in tl.range(start, end, 1 if C.LIST else C.BN, num_stages=C.STAGES):
        n0 = tl.load(base(T.order, T.order_b, T.order_h, b, h) + m * T.order_m + at) * C.BN if C.LIST else at
        cols = n0 + tl.arange(0, C.BN)
        k = tile(k_, b, g, T.G, T.K, n0, C.BN, C.D, C.FLAT)
        v = tile(v_, b, g, T.G, T.K, n0, C.BN, C.E, C.FLAT)
        t = tl.dot(q, k.T, input_precision=C.PRECISION) * a2
        dp = tl.dot(do, v.T, input_precision=C.PRECISION)
        if C.DISTANCE or C.BETA or C.BIAS == 1:
            t += of_keys(cols, b, h, g, a2, b2, T, C)[None, :]
        if C.RANK:
            right = factor(T.right, T.right_b, T.right_h, T.right_k, b, h, cols, T.K, C)
            t += tl.dot(left, right.T, input_precision=C.PRECISION) * C.UNIT
        if C.BIAS == 2:
            t += of_pairs(rows[:, None], cols[None, :], b, h, T, C)
        if C.ACT == "exp" and not C.SHORT and (C.DISTANCE or C.DIVISION == 1):
            t -= shift[:, None]
        if MASKED:
            keep = visible(rows[:, None], cols[None, :], last, b, h, T, C)
            if C.CLEAN and C.ACT == "sigmoid":
                t = tl.where(keep, t, 0.0)
        p = coefficient(t, C.ACT, C.DEGREE, C.QUICK)
        if C.ACT == "tanh":
            total += tl.sum(tl.where(keep, p, 0.0) if MASKED else p, 1)
        if C.DIVISION == 1:
            dp -= delta[:, None]
        ds = slope(t, p, C.ACT, C.DEGREE) * dp
        if MASKED:
            ds = tl.where(keep, ds, 0.0)
            if C.CLEAN:
                k = clean(k)
        if (C.DISTANCE and not (C.ACT == "exp" and C.DIVISION == 1)) or C.GRADIENTS[1]:
            own += tl.sum(ds, 1)  # of rows that sum to one it is zero
        if C.DISTANCE and C.GRADIENTS[0]:
            half = tl.load(T.hk + (b * T.G + g).to(tl.int64) * T.K + cols, mask=cols < T.K, other=0.0)
            if MASKED and C.CLEAN:
                half = clean(half)
            far += tl.sum(ds * half[None, :], 1)
        if C.RANK and C.GRADIENTS[2]:
            dleft = tl.dot(ds.to(C.P), right.to(C.P), dleft, input_precision=C.PRECISION)
        dq = tl.dot(ds.to(C.P), k.to(C.P), dq, input_precision=C.PRECISION)
    return dq, own, far, dleft, total


@triton.jit
def backward_columns(
    q_, k_, v_, do_, again_, dk_, dv_, stat_, delta_, dright_, dbias_, T, C: tl.constexpr, SAFE: tl.constexpr
):
    """The gradients of BN keys and values, summed over the query heads that share them; per head those of bias and right factor."""
    n, b, g = place(T.K, T.G, C.BN, C.LOW and not C.HIGH, C)
    of_keys_and_values(q_, k_, v_, do_, again_, dk_, dv_, stat_, delta_, dright_, dbias_, n, b, g, T, C, SAFE)


@triton.jit
def of_keys_and_values(
    q_, k_, v_, do_, again_, dk_, dv_, stat_, delta_, dright_, dbias_, n, b, g, T, C: tl.constexpr, SAFE: tl.constexpr
):
    """A block of columns. `again` is the key under another name."""
    cols, deep, wide = n * C.BN + tl.arange(0, C.BN), tl.arange(0, C.D), tl.arange(0, C.E)
    group = T.H // T.G
    if C.ALONE:
        alpha = tl.load(T.alpha + g)
        seen = cols < (tl.load(T.lengths + b * T.H + g).to(tl.int32) if C.LENGTHS else T.K)
        term = of_column(cols, b, g, g, T, C)
        k = tile(k_, b, g, T.G, T.K, n * C.BN, C.BN, C.D, C.FLAT)
        v = tile(v_, b, g, T.G, T.K, n * C.BN, C.BN, C.E, C.FLAT)
        dk = tl.zeros([C.BN, C.D], tl.float32)
        dv = tl.zeros([C.BN, C.E], tl.float32)
        own = tl.zeros([C.BN], tl.float32)
        dright = tl.zeros([C.BN, C.R], tl.float32)
        total = tl.zeros([C.BN], tl.float32)
        sums = dk, dv, own, dright, total
        if C.SHORT:
            known = tl.where(seen, term, 0.0)
            serves = tl.max(tl.abs(known)) < ROOM if C.ACT == "exp" else n >= 0
            if serves:
                dk, dv, own, dright, total = of_columns(sums, k, v, term, q_, do_, stat_, delta_, n, b, g, 1.0, T, C)
                if C.ACT == "tanh":
                    serves = are_enough(total, T.Q - tl.maximum(cols - T.high, 0) if C.HIGH else T.Q, seen)
                else:
                    late = tl.exp2(known)
                    dk, dv, own, dright = dk * late[:, None], dv * late[:, None], own * late, dright * late[:, None]
            if not serves:
                term = of_column(cols, b, g, g, T, SAFE)
                dk, dv, own, dright, total = of_columns(sums, k, v, term, q_, do_, stat_, delta_, n, b, g, 1.0, T, SAFE)
        else:
            dk, dv, own, dright, total = of_columns(sums, k, v, term, q_, do_, stat_, delta_, n, b, g, 1.0, T, C)
        if C.DISTANCE:
            k = tile(again_, b, g, T.G, T.K, n * C.BN, C.BN, C.D, C.FLAT)
            k = clean(k) if C.CLEAN else k
            dk -= k.to(tl.float32) * own[:, None]
        dk = tl.where(seen[:, None], alpha * dk, 0.0)
        dv = tl.where(seen[:, None], dv, 0.0)
        keep_own(dright_, dbias_, dright, tl.where(seen, own, 0.0), cols, seen, b, g, T, C)
    else:
        k = tile(k_, b, g, T.G, T.K, n * C.BN, C.BN, C.D, C.FLAT)
        v = tile(v_, b, g, T.G, T.K, n * C.BN, C.BN, C.E, C.FLAT)
        dk = tl.zeros([C.BN, C.D], tl.float32)
        dv = tl.zeros([C.BN, C.E], tl.float32)
        for one in range(group):
            h = g * group + one
            alpha = tl.load(T.alpha + h)
            seen = cols < (tl.load(T.lengths + b * T.H + h).to(tl.int32) if C.LENGTHS else T.K)
            term = of_column(cols, b, h, g, T, C)
            own = tl.zeros([C.BN], tl.float32)
            dright = tl.zeros([C.BN, C.R], tl.float32)
            sums = dk, dv, own, dright, tl.zeros([C.BN], tl.float32)
            dk, dv, own, dright, _ = of_columns(sums, k, v, term, q_, do_, stat_, delta_, n, b, h, alpha, T, C)
            if C.DISTANCE:
                dk -= tl.where(seen[:, None], alpha * clean(k).to(tl.float32) * own[:, None], 0.0)
            keep_own(dright_, dbias_, dright, tl.where(seen, own, 0.0), cols, seen, b, h, T, C)
    where = (b * T.G + g).to(tl.int64) * T.K + cols
    inside = cols[:, None] < T.K
    tl.store(
        dk_ + where[:, None] * C.HEAD + deep[None, :],
        dk.to(dk_.dtype.element_ty),
        mask=inside & (deep[None, :] < C.HEAD),
    )
    tl.store(
        dv_ + where[:, None] * C.WIDTH + wide[None, :],
        dv.to(dv_.dtype.element_ty),
        mask=inside & (wide[None, :] < C.WIDTH),
    )


@triton.jit
def of_column(cols, b, h, g, T, C: tl.constexpr):
    """What every row's score has of these keys alone, in the units of a form."""
    alpha, beta = tl.load(T.alpha + h), tl.load(T.beta + h) if C.BETA else 0.0
    return of_keys(cols, b, h, g, alpha * C.UNIT, beta * C.UNIT, T, C)


@triton.jit
def keep_own(dright_, dbias_, dright, own, cols, seen, b, h, T, C: tl.constexpr):
    head = (b * T.H + h).to(tl.int64)
    if C.RANK and C.GRADIENTS[3]:
        r = tl.arange(0, C.R)
        where = dright_ + (head * T.K + cols)[:, None] * C.RANK + r[None, :]
        tl.store(where, tl.where(seen[:, None], dright, 0.0), mask=(cols[:, None] < T.K) & (r[None, :] < C.RANK))
    if C.GRADIENTS[4]:
        tl.store(dbias_ + head * T.K + cols, own, mask=cols < T.K)


@triton.jit
def of_columns(sums, k, v, term, q_, do_, stat_, delta_, n, b, h, weight, T, C: tl.constexpr):
    """Masked rows before, whole rows between, masked rows behind; a list names the whole ones first."""
    n0 = n * C.BN
    last = tl.load(T.lengths + b * T.H + h).to(tl.int32) if C.LENGTHS else T.K
    if C.LIST:
        end = tl.load(base(T.count, T.count_b, T.count_h, b, h) + n)
        full = tl.load(base(T.full, T.count_b, T.count_h, b, h) + n)
        sums = walk_columns(sums, k, v, term, q_, do_, stat_, delta_, n, 0, full, last, b, h, weight, False, T, C)
        sums = walk_columns(sums, k, v, term, q_, do_, stat_, delta_, n, full, end, last, b, h, weight, True, T, C)
    else:
        first, end = 0, tl.where(n0 < last, T.Q, 0)
        if C.HIGH:
            first = tl.maximum(n0 - T.high, 0) // C.BM * C.BM
        if C.LOW:
            end = tl.minimum(end, tl.maximum(n0 + C.BN - T.low, 0))
        full, least = first, end
        if C.HIGH:
            full = tl.minimum(tl.cdiv(tl.maximum(n0 + C.BN - 1 - T.high, 0), C.BM) * C.BM, tl.maximum(end, first))
        if C.LOW:
            least = tl.maximum(tl.minimum(end, tl.maximum(n0 - T.low + 1, 0)) // C.BM * C.BM, full)
        if C.HIGH:
            sums = walk_columns(
                sums, k, v, term, q_, do_, stat_, delta_, n, first, full, last, b, h, weight, True, T, C
            )
        sums = walk_columns(sums, k, v, term, q_, do_, stat_, delta_, n, full, least, last, b, h, weight, False, T, C)
        if C.LOW:
            sums = walk_columns(sums, k, v, term, q_, do_, stat_, delta_, n, least, end, last, b, h, weight, True, T, C)
    return sums


@triton.jit
def walk_columns(
    sums,
    k,
    v,
    term,
    q_,
    do_,
    stat_,
    delta_,
    n,
    start,
    end,
    last,
    b,
    h,
    weight,
    MASKED: tl.constexpr,
    T,
    C: tl.constexpr,
):
    """Adds a stretch of rows, transposed: [BN, BM] coefficients."""
    dk, dv, own, dright, total = sums
    a2 = tl.load(T.alpha + h) * C.UNIT
    head = (b * T.H + h).to(tl.int64)
    cols = n * C.BN + tl.arange(0, C.BN)
    if C.RANK:
        right = factor(T.right, T.right_b, T.right_h, T.right_k, b, h, cols, T.K, C)
    for at in tl.range(start, end, 1 if C.LIST else C.BM, num_stages=C.STAGES):
        m0 = tl.load(base(T.order, T.order_b, T.order_h, b, h) + n * T.order_m + at) * C.BM if C.LIST else at
        rows = m0 + tl.arange(0, C.BM)
        q = tile(q_, b, h, T.H, T.Q, m0, C.BM, C.D, C.FLAT)
        do = tile(do_, b, h, T.H, T.Q, m0, C.BM, C.E, C.FLAT)
        t = tl.dot(k, q.T, input_precision=C.PRECISION) * a2
        if C.ACT == "exp" and C.DIVISION == 1:
            t -= tl.load(stat_ + head * T.Q + rows, mask=rows < T.Q, other=0.0)[None, :]
        elif C.DISTANCE:
            t -= (a2 * tl.load(T.hq + head * T.Q + rows, mask=rows < T.Q, other=0.0))[None, :]
        if C.RANK:
            left = factor(T.left, T.left_b, T.left_h, T.left_q, b, h, rows, T.Q, C)
            t += tl.dot(right, left.T, input_precision=C.PRECISION) * C.UNIT
        if C.BIAS == 2:
            t += of_pairs(rows[None, :], cols[:, None], b, h, T, C)
        if (C.DISTANCE or C.BETA or C.BIAS == 1) and not (C.SHORT and C.ACT == "exp"):
            t += term[:, None]
        if MASKED or (C.LENGTHS and not C.ALONE):
            keep = visible(rows[None, :], cols[:, None], last, b, h, T, C)
            if C.CLEAN and C.ACT == "sigmoid":
                t = tl.where(keep, t, 0.0)
        p = coefficient(t, C.ACT, C.DEGREE, C.QUICK)
        dp = tl.dot(v, do.T, input_precision=C.PRECISION)
        if C.DIVISION == 1:
            dp -= tl.load(delta_ + head * T.Q + rows, mask=rows < T.Q, other=0.0)[None, :]
        ds = slope(t, p, C.ACT, C.DEGREE) * dp
        if C.DIVISION == 2 or (C.DIVISION == 1 and C.ACT != "exp"):
            divisor = tl.load(stat_ + head * T.Q + rows, mask=rows < T.Q, other=1.0)
            share = tl.where(divisor == 0, 0.0, 1.0 / tl.where(divisor == 0, 1.0, divisor))[None, :]
            p *= share
            ds *= share
        if MASKED or (C.LENGTHS and not C.ALONE):
            p = tl.where(keep, p, 0.0)
            ds = tl.where(keep, ds, 0.0)
            if C.CLEAN:
                q = clean(q)
        if C.ACT == "tanh":
            total += tl.sum(p if C.LEVEL else tl.where(rows[None, :] < T.Q, p, 0.0), 1)
        dv = tl.dot(p.to(C.P), do.to(C.P), dv, input_precision=C.PRECISION)
        if C.DISTANCE or C.GRADIENTS[4]:
            own += tl.sum(ds, 1)
        if C.RANK and C.GRADIENTS[3]:
            dright = tl.dot(ds.to(C.P), left.to(C.P), dright, input_precision=C.PRECISION)
        if not C.ALONE:
            ds *= weight
        dk = tl.dot(ds.to(C.P), q.to(C.P), dk, input_precision=C.PRECISION)
    return dk, dv, own, dright, total


@triton.jit
def thirds(x):
    """Numbers as sums of three of bfloat16, [n, 8] with zeros behind: a row that ones, in bfloat16 as well, add up to the number."""
    at = tl.arange(0, 8)[None, :]
    first = x.to(tl.bfloat16).to(tl.float32)
    rest = tl.where(tl.abs(first) < float("inf"), x - first, 0.0)
    second = rest.to(tl.bfloat16).to(tl.float32)
    behind = tl.where(at == 1, second[:, None], tl.where(at == 2, (rest - second)[:, None], 0.0))
    return tl.where(at == 0, first[:, None], behind).to(tl.bfloat16)


@triton.jit
def clear(
    sums_, terms_, deltas_, q_, do_, out_, dots_, stat_, alpha_, H, n, qb, qh, qn, ob, oh, on,
    D: tl.constexpr, BM: tl.constexpr, UNIT: tl.constexpr, DIVIDED: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """What sums [B, H, n, D] of gradients of queries begin with, and what is added to all scores of a row, before they are scaled.

    That is less log2 of the sum of the row where rows are divided, do . out of gradients of scores then, and |q|^2 / 2 of distances else.
    The gradient of a distance loses q_i sum_j ds_ij, where sum_j p_ij (do_i . v_j) = do_i . out_i: of rows that are divided that is zero.
    """
    linked()
    blocks = n // BM
    pid = tl.program_id(0)
    b, h, rows, d = pid // blocks // H, pid // blocks % H, pid % blocks * BM + tl.arange(0, BM), tl.arange(0, D)
    line = (b * H + h).to(tl.int64) * n + rows
    at, eight = line[:, None] * D + d[None, :], line[:, None] * 8 + tl.arange(0, 8)[None, :]
    begin = tl.zeros([BM, D], tl.float32)
    if DIVIDED or DISTANCE:
        do = tl.load(base(do_, ob, oh, b, h) + rows.to(tl.int64)[:, None] * on + d[None, :]).to(tl.float32)
        delta = tl.sum(do * tl.load(out_ + at).to(tl.float32), 1)
        if DIVIDED:
            own = tl.load(stat_ + line) / scale(alpha_, h, UNIT)
            tl.store(dots_ + line, delta)
            tl.store(deltas_ + eight, thirds(-delta))
        else:
            q = tl.load(base(q_, qb, qh, b, h) + rows.to(tl.int64)[:, None] * qn + d[None, :]).to(tl.float32)
            own = 0.5 * tl.sum(q * q, 1)
            tl.store(dots_ + line, own)
            begin = -delta[:, None] * q
        tl.store(terms_ + eight, thirds(-own))
    tl.store(sums_ + at, begin)


@triton.jit
def scale(alpha_, h, UNIT: tl.constexpr):
    """That of scores of a head in the function's unit; not zero, as terms of scores are divided by it."""
    a = tl.load(alpha_ + h) * UNIT
    return tl.where(tl.abs(a) < FAINT, FAINT, a)


@triton.jit
def conclude(sums_, dq_, left_, alpha_, H, n, factor, D: tl.constexpr, BM: tl.constexpr, MARKS: tl.constexpr):
    """Gradients of queries [B, H, n, D] from their sums; flags for those of 64 rows that are not finite, where asked for."""
    linked()
    blocks = n // BM
    pid = tl.program_id(0)
    rows, d = pid % blocks * BM + tl.arange(0, BM), tl.arange(0, D)
    at = ((pid // blocks).to(tl.int64) * n + rows)[:, None] * D + d[None, :]
    dq = tl.load(sums_ + at)
    if MARKS:
        unserved = tl.where(tl.abs(dq) < float("inf"), 0, 1).reshape(BM // 64, 64 * D)
        tl.store(left_ + pid * (BM // 64) + tl.arange(0, BM // 64), tl.max(unserved, 1))
    tl.store(dq_ + at, (dq * (factor * tl.load(alpha_ + pid // blocks % H))).to(dq_.dtype.element_ty))

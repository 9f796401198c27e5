r"""Primal-Attention's fold as Triton kernels: queries and keys are read once, outputs written once, scores never.

With $\phi_i = q_i / \max(\lVert q_i\rVert, \epsilon)$, $\psi_i$ the same of the keys and one matrix each, `[p, v]`, per head,

$$o_i = \phi_i M_e + \psi_i M_r + b, \qquad G_q = \sum_i m_i\, \phi_i \phi_i^\top, \qquad G_k = \sum_i m_i\, \psi_i \psi_i^\top,$$

where $m_i$ is 0 at padding. Backward, with $g_i$ the gradient of $o_i$ and $S_q$ that of $G_q$ plus its transpose,

$$\bar\phi_i = g_i M_e^\top + m_i\, \phi_i S_q, \qquad \bar q_i = (\bar\phi_i - \phi_i\, (\phi_i \cdot \bar\phi_i)) / \lVert q_i \rVert, \qquad
\bar M_e = \sum_i \phi_i g_i^\top.$$

Sums over tokens are kept in float32, one partial sum per span of tokens; nothing is added atomically, so results repeat
bit by bit. bfloat16 is multiplied in bfloat16, a float32 matrix as the sum of two bfloat16 parts.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,misc"

from __future__ import annotations

import triton
import triton.language as tl

TINY = tl.constexpr(1e-24)  # the square of the least norm, 1e-12


@triton.jit
def _rows(pointer, rows, stride, cols, n, SIZE: tl.constexpr):
    """Rows of a matrix, zero outside."""
    mask = (rows < n)[:, None] & (cols < SIZE)[None, :]
    return tl.load(pointer + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _matrix(pointer, rows, cols, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """A whole matrix, zero outside."""
    mask = (rows < HEIGHT)[:, None] & (cols < WIDTH)[None, :]
    return tl.load(pointer + rows[:, None] * WIDTH + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _keep_matrix(pointer, values, rows, cols, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    mask = (rows < HEIGHT)[:, None] & (cols < WIDTH)[None, :]
    tl.store(pointer + rows[:, None] * WIDTH + cols[None, :], values, mask=mask)


@triton.jit
def _split(matrix, DOT: tl.constexpr):
    """A matrix as the sum of two of fewer bits; the second is not used where one has them all."""
    high = matrix.to(DOT)
    return high, (matrix - high.to(tl.float32)).to(DOT)


@triton.jit
def _times(x, high, low, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """x (high + low)."""
    out = tl.dot(x.to(DOT), high, input_precision=PRECISION)
    if DOT == tl.bfloat16:
        out = tl.dot(x.to(DOT), low, out)
    return out


@triton.jit
def _inverse(x):
    """One over the norm of every row, and whether the row is long enough for its norm to count."""
    x = x.to(tl.float32)
    square = tl.sum(x * x, 1)
    return tl.rsqrt(tl.maximum(square, TINY)), square > TINY


@triton.jit
def _seen(keep_, b, rows, n, KEEP: tl.constexpr):
    inside = rows < n
    if KEEP:
        return tl.load(keep_ + b.to(tl.int64) * n + rows, mask=inside, other=0) != 0
    else:
        return inside


@triton.jit
def fold(
    pair_, mix_, bias_, keep_, out_, gram_, heads, n, blocks, stride_b, stride_n, stride_t, stride_h,
    P: tl.constexpr, V: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
    KEEP: tl.constexpr, BIAS: tl.constexpr, GRAM: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A span of tokens of one head: their outputs `[B, n, H, V]`, and their part of both Gram matrices `[B, H, spans, 2, P, P]`."""
    head, span = tl.program_id(0), tl.program_id(1)
    b, h = head // heads, head % heads
    deep, wide = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    query_ = pair_ + b.to(tl.int64) * stride_b + h * stride_h
    high_e, low_e = _split(_matrix(mix_ + (b * 2 * heads + h).to(tl.int64) * P * V, deep, wide, P, V), DOT)
    high_r, low_r = _split(_matrix(mix_ + ((b * 2 + 1) * heads + h).to(tl.int64) * P * V, deep, wide, P, V), DOT)
    gram_q = tl.zeros([BLOCK_P, BLOCK_P], tl.float32)
    gram_k = tl.zeros([BLOCK_P, BLOCK_P], tl.float32)
    for block in range(blocks):
        rows = (span * blocks + block) * ROWS + tl.arange(0, ROWS)
        query = _rows(query_, rows, stride_n, deep, n, P)
        key = _rows(query_ + stride_t, rows, stride_n, deep, n, P)
        over_q, _ = _inverse(query)
        over_k, _ = _inverse(key)
        out = _times(query, high_e, low_e, DOT, PRECISION) * over_q[:, None]
        out += _times(key, high_r, low_r, DOT, PRECISION) * over_k[:, None]
        if BIAS:
            out += tl.load(bias_ + wide, mask=wide < V, other=0.0).to(tl.float32)[None, :]
        where = ((b.to(tl.int64) * n + rows) * heads + h) * V
        inside = (rows < n)[:, None] & (wide < V)[None, :]
        tl.store(out_ + where[:, None] + wide[None, :], out.to(out_.dtype.element_ty), mask=inside)
        if GRAM:
            seen = _seen(keep_, b, rows, n, KEEP)
            part = tl.where(seen, over_q * over_q, 0.0)[:, None] * query.to(tl.float32)
            gram_q = tl.dot(tl.trans(part.to(DOT)), query.to(DOT), gram_q, input_precision=PRECISION)
            part = tl.where(seen, over_k * over_k, 0.0)[:, None] * key.to(tl.float32)
            gram_k = tl.dot(tl.trans(part.to(DOT)), key.to(DOT), gram_k, input_precision=PRECISION)
    if GRAM:
        first = gram_ + (head * tl.num_programs(1) + span).to(tl.int64) * 2 * P * P
        _keep_matrix(first, gram_q, deep, deep, P, P)
        _keep_matrix(first + P * P, gram_k, deep, deep, P, P)


@triton.jit
def fold_backward(
    pair_, mix_, keep_, above_, slope_, dpair_, dmix_, dbias_, heads, n, blocks, stride_b, stride_n, stride_t, stride_h,
    above_b, above_n, above_h,
    P: tl.constexpr, V: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
    KEEP: tl.constexpr, BIAS: tl.constexpr, GRAM: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a span's queries and keys `[B, n, 2, H, P]`, and its part of those of the matrices and the bias."""
    head, span = tl.program_id(0), tl.program_id(1)
    b, h = head // heads, head % heads
    wide = tl.arange(0, BLOCK_V)
    above_ += b.to(tl.int64) * above_b + h * above_h
    place = head * tl.num_programs(1) + span
    for side in tl.static_range(2):
        source = pair_ + b.to(tl.int64) * stride_b + h * stride_h + side * stride_t
        at = ((b * 2 + side) * heads + h).to(tl.int64)
        dmix, dbias = _half_backward(
            source, mix_ + at * P * V, keep_, above_, slope_ + at * P * P if GRAM else None,
            dpair_ + ((b.to(tl.int64) * n * 2 + side) * heads + h) * P, b, span, heads, n, blocks, stride_n, above_n,
            P, V, BLOCK_P, BLOCK_V, ROWS, KEEP, BIAS and side == 0, GRAM, DOT, PRECISION,
        )  # fmt: skip
        _keep_matrix(dmix_ + (place * 2 + side).to(tl.int64) * P * V, dmix, tl.arange(0, BLOCK_P), wide, P, V)
        if BIAS and side == 0:
            tl.store(dbias_ + place.to(tl.int64) * V + wide, dbias, mask=wide < V)


@triton.jit
def _half_backward(
    source, matrix, keep_, above_, slope_, target, b, span, heads, n, blocks, stride_n, above_n,
    P: tl.constexpr, V: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
    KEEP: tl.constexpr, BIAS: tl.constexpr, GRAM: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The queries, or the keys."""
    deep, wide = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    high, low = _split(tl.trans(_matrix(matrix, deep, wide, P, V)), DOT)
    if GRAM:
        high_g, low_g = _split(_matrix(slope_, deep, deep, P, P), DOT)
    dmix = tl.zeros([BLOCK_P, BLOCK_V], tl.float32)
    dbias = tl.zeros([BLOCK_V], tl.float32)
    for block in range(blocks):
        rows = (span * blocks + block) * ROWS + tl.arange(0, ROWS)
        x = _rows(source, rows, stride_n, deep, n, P)
        above = _rows(above_, rows, above_n, wide, n, V)
        over, long = _inverse(x)
        phi = x.to(tl.float32) * over[:, None]
        gradient = _times(above, high, low, DOT, PRECISION)
        if GRAM:
            scale = tl.where(_seen(keep_, b, rows, n, KEEP), over, 0.0)
            gradient += _times(x, high_g, low_g, DOT, PRECISION) * scale[:, None]
        along = tl.where(long, tl.sum(phi * gradient, 1), 0.0)
        gradient = (gradient - phi * along[:, None]) * over[:, None]
        where = target + rows.to(tl.int64)[:, None] * (2 * heads * P) + deep[None, :]
        tl.store(where, gradient.to(target.dtype.element_ty), mask=(rows < n)[:, None] & (deep < P)[None, :])
        dmix = tl.dot(tl.trans(phi.to(DOT)), above.to(DOT), dmix, input_precision=PRECISION)
        if BIAS:
            dbias += tl.sum(above.to(tl.float32), 0)
    return dmix, dbias

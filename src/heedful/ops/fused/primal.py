r"""Primal-Attention's fold as Triton kernels: queries and keys are read once, outputs written once, scores never.

With $\phi_i = q_i / \max(\lVert q_i\rVert, \epsilon)$, $\psi_i$ the same of the keys, weights as they act on features
$W_{e|X} = F^\top W_e$ and one matrix each, $M_e = W_{e|X} C_e^\top$ `[p, v]`, per head,

$$o_i = \phi_i M_e + \psi_i M_r + b, \qquad G_q = \sum_i m_i\, \phi_i \phi_i^\top, \qquad G_k = \sum_i m_i\, \psi_i \psi_i^\top,$$

where $m_i$ is 0 at padding. Backward, with $g_i$ the gradient of $o_i$ and $S_q$ that of $G_q$ plus its transpose,

$$\bar\phi_i = g_i M_e^\top + m_i\, \phi_i S_q, \qquad \bar q_i = (\bar\phi_i - \phi_i\, (\phi_i \cdot \bar\phi_i)) / \lVert q_i \rVert, \qquad
\bar M_e = \sum_i \phi_i g_i^\top.$$

What is small takes few launches: `prepare` makes the matrices, `finish` the energies and `penalty` the loss;
`penalty_backward`, `gather` and `spread` go the other way. Sums over tokens are kept in float32, one partial sum per span of tokens; no number is
added atomically, so results repeat bit by bit. 16-bit inputs are multiplied in 16 bit, matrices scaled to 1 for it.
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
def _inside(first, n, cols, ROWS: tl.constexpr, SIZE: tl.constexpr):
    inside = (first + tl.arange(0, ROWS) < n)[:, None]
    if cols.shape[0] != SIZE:
        inside = inside & (cols < SIZE)[None, :]
    return inside


@triton.jit
def _block(pointer, first, stride, cols, n, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """A block of rows, zero outside. Where it begins is one number, so that places within it stay the same in a loop."""
    at = pointer + first.to(tl.int64) * stride + (tl.arange(0, ROWS)[:, None] * stride + cols[None, :])
    return tl.load(at, mask=_inside(first, n, cols, ROWS, SIZE), other=0.0)


@triton.jit
def _keep_block(pointer, values, first, stride, cols, n, ROWS: tl.constexpr, SIZE: tl.constexpr):
    at = pointer + first.to(tl.int64) * stride + (tl.arange(0, ROWS)[:, None] * stride + cols[None, :])
    tl.store(at, values.to(pointer.dtype.element_ty), mask=_inside(first, n, cols, ROWS, SIZE))


@triton.jit
def _matrix(pointer, rows, cols, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """A whole matrix in float32, zero outside."""
    mask = (rows < HEIGHT)[:, None] & (cols < WIDTH)[None, :]
    return tl.load(pointer + rows[:, None] * WIDTH + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _keep_rows(pointer, values, rows, stride, cols, n, SIZE: tl.constexpr):
    mask = (rows < n)[:, None] & (cols < SIZE)[None, :]
    at = pointer + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    tl.store(at, values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _summed(pointer, spans, step, rows, cols, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The sum over spans of some rows of a matrix each; eight loads are under way at once."""
    inside = (rows < HEIGHT)[:, None] & (cols < WIDTH)[None, :]
    at = pointer + rows[:, None] * WIDTH + cols[None, :]
    total = tl.zeros([rows.shape[0], cols.shape[0]], tl.float32)
    for start in range(0, spans, 8):
        for j in tl.static_range(8):
            left = spans - start - j + tl.zeros([1, 1], tl.int32)
            total += tl.load(at + (start + j) * step, mask=inside & (left > 0), other=0.0)
    return total


@triton.jit
def _size(matrix, other, DOT: tl.constexpr):
    """What both matrices are divided by so that 16 bits hold them."""
    if DOT == tl.float16:
        most = tl.maximum(tl.max(tl.max(tl.abs(matrix), 1), 0), tl.max(tl.max(tl.abs(other), 1), 0))
        return tl.where(most > 0, most, 1.0)
    else:
        return 1.0


@triton.jit
def _unit(x, eye, DOT: tl.constexpr):
    """Rows of length 1 in the type they are multiplied in, 1 / length, and whether a row is long enough to have a direction.

    A product with the identity is exact and leaves 16-bit rows in the registers where products leave theirs: nothing is moved.
    """
    if DOT == tl.float32:
        x = x.to(tl.float32)
    else:
        x = tl.dot(x, eye)
    square = tl.sum(x * x, 1)
    over = tl.rsqrt(tl.maximum(square, TINY))
    return (x * over[:, None]).to(DOT), over, square > TINY


@triton.jit
def _counted(phi, keep_, b, first, n, KEEP: tl.constexpr):
    """Zero at padding; beyond the end phi is zero already."""
    if KEEP:
        rows = first + tl.arange(0, phi.shape[0])
        seen = tl.load(keep_ + b.to(tl.int64) * n + rows, mask=rows < n, other=0) != 0
        return tl.where(seen[:, None], phi, 0.0).to(phi.dtype)
    else:
        return phi


@triton.jit
def prepare(
    sample_, w_e_, w_r_, c_e_, c_r_, on_, mix_, product_, ticket_, heads, m, stride_b, stride_h, stride_m, stride_c,
    P: tl.constexpr, V: tl.constexpr, S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr, ROWS: tl.constexpr, STATIC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sixteen rows of one head, queries or keys: of F^T W `[B, 2, H, p, s]`, of F^T W C^T `[B, 2, H, p, v]`; and tr(W_e^T W_r) `[H]`."""
    head, side, cut = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = head // heads, head % heads
    deep, wide, rank = cut * 16 + tl.arange(0, 16), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_S)
    mine_, c_ = w_e_, c_e_
    if side == 1:
        mine_, c_ = w_r_, c_r_
    mine_ += h * m * S
    at = ((b * 2 + side) * heads + h).to(tl.int64)
    c = _matrix(c_ + h * stride_c, wide, rank, V, S)
    on = tl.zeros([16, BLOCK_S], tl.float32)
    if STATIC:
        on = _matrix(mine_, deep, rank, P, S)
    else:
        for start in range(0, m, ROWS):
            rows = start + tl.arange(0, ROWS)
            f = _rows(sample_ + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h, rows, stride_m, deep, m, P).to(
                tl.float32
            )
            w = _rows(mine_, rows, S, rank, m, S).to(tl.float32)
            on = tl.dot(tl.trans(f), w, on, input_precision=PRECISION)
    _keep_rows(on_ + at * P * S, on, deep, S, rank, P, S)
    _keep_rows(mix_ + at * P * V, tl.dot(on, tl.trans(c), input_precision=PRECISION), deep, V, wide, P, V)
    if cut == 0:
        tl.store(ticket_ + at, 0)
        if side == 0 and b == 0:
            product = tl.zeros([ROWS, BLOCK_S], tl.float32)
            for start in range(0, m, ROWS):
                rows = start + tl.arange(0, ROWS)
                other = _rows(w_r_ + h * m * S, rows, S, rank, m, S).to(tl.float32)
                product += _rows(mine_, rows, S, rank, m, S).to(tl.float32) * other
            tl.store(product_ + h, tl.sum(tl.sum(product, 1), 0))


@triton.jit
def _side(x, mix, eye, gram, keep_, b, first, n, KEEP: tl.constexpr, GRAM: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """What a block of queries, or keys, adds to its outputs and to a Gram matrix."""
    phi, over, _ = _unit(x, eye, DOT)
    if GRAM:
        phi = _counted(phi, keep_, b, first, n, KEEP)
        gram = tl.dot(tl.trans(phi), phi, gram, input_precision=PRECISION)
    # As it was loaded it is multiplied from shared memory; lengths are divided out afterwards.
    return tl.dot(x, mix, input_precision=PRECISION) * over[:, None], gram


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
    query_ = pair_ + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    out_ += (b.to(tl.int64) * n * heads + h) * V
    mix_e = _matrix(mix_ + (b * 2 * heads + h).to(tl.int64) * P * V, deep, wide, P, V)
    mix_r = _matrix(mix_ + ((b * 2 + 1) * heads + h).to(tl.int64) * P * V, deep, wide, P, V)
    size = _size(mix_e, mix_r, DOT)
    mix_e, mix_r = (mix_e / size).to(DOT), (mix_r / size).to(DOT)
    eye = (deep[:, None] == deep[None, :]).to(DOT)
    gram_q = tl.zeros([BLOCK_P, BLOCK_P], tl.float32)
    gram_k = tl.zeros([BLOCK_P, BLOCK_P], tl.float32)
    if BIAS:
        bias = tl.load(bias_ + wide, mask=wide < V, other=0.0).to(tl.float32)[None, :]
    for block in range(blocks):
        first = (span * blocks + block) * ROWS
        query = _block(query_, first, stride_n, deep, n, ROWS, P)
        key = _block(query_ + stride_t, first, stride_n, deep, n, ROWS, P)
        out, gram_q = _side(query, mix_e, eye, gram_q, keep_, b, first, n, KEEP, GRAM, DOT, PRECISION)
        other, gram_k = _side(key, mix_r, eye, gram_k, keep_, b, first, n, KEEP, GRAM, DOT, PRECISION)
        out = (out + other) * size
        if BIAS:
            out += bias
        _keep_block(out_, out, first, heads * V, wide, n, ROWS, V)
    if GRAM:
        gram_ += (head * tl.num_programs(1) + span).to(tl.int64) * 2 * P * P
        _keep_rows(gram_, gram_q, deep, P, deep, P, P)
        _keep_rows(gram_ + P * P, gram_k, deep, P, deep, P, P)


@triton.jit
def finish(
    part_, on_, gram_, moment_, share_, energy_, ticket_, heads, spans,
    P: tl.constexpr, S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sixteen rows of one head, queries or keys: of the Gram matrix and of G W. Who comes last sums diag(W^T G W) `[B, 2, H, s]`."""
    head, side, cut = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    cuts = tl.num_programs(2)
    b, h = head // heads, head % heads
    deep, rank = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_S)
    rows = cut * 16 + tl.arange(0, 16)
    at = ((b * 2 + side) * heads + h).to(tl.int64)
    # Loads that wait for nothing come first.
    on, mine = _matrix(on_ + at * P * S, deep, rank, P, S), _matrix(on_ + at * P * S, rows, rank, P, S)
    gram = _summed(part_ + (head.to(tl.int64) * spans * 2 + side) * P * P, spans, 2 * P * P, rows, deep, P, P)
    moment = tl.dot(gram, on, input_precision=PRECISION)
    share_ += at * cuts * S + rank
    tl.store(share_ + cut * S, tl.sum(mine * moment, 0), mask=rank < S)
    # The barrier puts every thread's store before the count.
    tl.debug_barrier()
    if tl.atomic_add(ticket_ + at, 1, sem="acq_rel") == cuts - 1:
        energy = tl.zeros([BLOCK_S], tl.float32)
        for j in range(cuts):
            energy += tl.load(share_ + j * S, mask=rank < S, other=0.0, cache_modifier=".cg")
        tl.store(energy_ + at * S + rank, energy, mask=rank < S)
    _keep_rows(gram_ + at * P * P, gram, rows, P, deep, P, P)
    _keep_rows(moment_ + at * P * S, moment, rows, S, rank, P, S)


@triton.jit
def _slope(on, denergy_, dmoment_, at, deep, rank, P: tl.constexpr, S: tl.constexpr, ENERGY: tl.constexpr, MOMENT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The gradient of a Gram matrix plus its transpose."""
    left = tl.zeros_like(on)
    if ENERGY:
        left += on * tl.load(denergy_ + at * S + rank, mask=rank < S, other=0.0)[None, :]
    if MOMENT:
        left += _matrix(dmoment_ + at * P * S, deep, rank, P, S)
    half = tl.dot(left, tl.trans(on), input_precision=PRECISION)
    return half + tl.trans(half)


@triton.jit
def fold_backward(
    pair_, mix_, on_, keep_, above_, denergy_, dmoment_, dpair_, dmix_, dbias_, heads, n, blocks,
    stride_b, stride_n, stride_t, stride_h, above_b, above_n, above_h,
    P: tl.constexpr, V: tl.constexpr, S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr, ROWS: tl.constexpr, KEEP: tl.constexpr, BIAS: tl.constexpr, ENERGY: tl.constexpr,
    MOMENT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradients of a span's queries, or keys, `[B, n, 2, H, P]`, and its part of those of the matrices and the bias."""
    head, span, side = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = head // heads, head % heads
    deep, wide, rank = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_S)
    GRAM: tl.constexpr = ENERGY or MOMENT
    above_ += b.to(tl.int64) * above_b + h.to(tl.int64) * above_h
    source = pair_ + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + side.to(tl.int64) * stride_t
    target = dpair_ + ((b.to(tl.int64) * n * 2 + side) * heads + h) * P
    at = ((b * 2 + side) * heads + h).to(tl.int64)
    matrix = tl.trans(_matrix(mix_ + at * P * V, deep, wide, P, V))
    size = _size(matrix, matrix, DOT)
    if GRAM:
        on = _matrix(on_ + at * P * S, deep, rank, P, S)
        slope = _slope(on, denergy_, dmoment_, at, deep, rank, P, S, ENERGY, MOMENT, EXACT)
        size = _size(matrix, slope, DOT)
        slope = (slope / size).to(DOT)
    matrix = (matrix / size).to(DOT)
    eye = (deep[:, None] == deep[None, :]).to(DOT)
    dmix = tl.zeros([BLOCK_V, BLOCK_P], tl.float32)
    dbias = tl.zeros([16, BLOCK_V], tl.float32)
    for block in range(blocks):
        first = (span * blocks + block) * ROWS
        above = _block(above_, first, above_n, wide, n, ROWS, V)
        phi, over, long = _unit(_block(source, first, stride_n, deep, n, ROWS, P), eye, DOT)
        if BIAS:
            dbias += tl.sum(tl.reshape(above.to(tl.float32), [ROWS // 16, 16, BLOCK_V]), 0)
        gradient = tl.dot(above.to(DOT), matrix, input_precision=PRECISION)
        if GRAM:
            gradient = tl.dot(_counted(phi, keep_, b, first, n, KEEP), slope, gradient, input_precision=PRECISION)
        # Turned, it takes the block from shared memory as it was loaded.
        dmix = tl.dot(tl.trans(above.to(DOT)), phi, dmix, input_precision=PRECISION)
        unit = phi.to(tl.float32)
        along = tl.where(long, tl.sum(unit * gradient, 1), 0.0)
        gradient = (gradient - unit * along[:, None]) * (over * size)[:, None]
        _keep_block(target, gradient, first, 2 * heads * P, deep, n, ROWS, P)
    place = (head * tl.num_programs(1) + span).to(tl.int64)
    _keep_rows(dmix_ + (place * 2 + side) * P * V, tl.trans(dmix), deep, V, wide, P, V)
    if BIAS:
        if side == 0:
            tl.store(dbias_ + place * V + wide, tl.sum(dbias, 0), mask=wide < V)


@triton.jit
def gather(
    dmix_, dbias_, given_, denergy_, dmoment_, on_, moment_, gram_, c_e_, c_r_, don_, dshared_, heads, spans, stride_c,
    P: tl.constexpr, V: tl.constexpr, S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr, BIAS: tl.constexpr, ON: tl.constexpr, ENERGY: tl.constexpr, MOMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sixteen rows of one head, queries or keys: the gradient of W as it acts on features, and their part of those of C and b.

    The latter, `[B, H, slices, 2 v s + v]`, are summed by `spread`.
    """
    head, side, cut = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = head // heads, head % heads
    deep, wide, rank = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_S)
    rows = cut * 16 + tl.arange(0, 16)
    at = ((b * 2 + side) * heads + h).to(tl.int64)
    c_ = c_e_
    if side == 1:
        c_ = c_r_
    given = tl.zeros([16, BLOCK_S], tl.float32)
    if ENERGY:
        weight = tl.load(denergy_ + at * S + rank, mask=rank < S, other=0.0)
        given += 2.0 * weight[None, :] * _matrix(moment_ + at * P * S, rows, rank, P, S)
    if ON:
        given += _matrix(given_ + at * P * S, rows, rank, P, S)
    if MOMENT:
        above = _matrix(dmoment_ + at * P * S, deep, rank, P, S)
        given += tl.dot(_matrix(gram_ + at * P * P, rows, deep, P, P), above, input_precision=PRECISION)
    c, on = _matrix(c_ + h * stride_c, wide, rank, V, S), _matrix(on_ + at * P * S, rows, rank, P, S)
    dmix = _summed(dmix_ + (head.to(tl.int64) * spans * 2 + side) * P * V, spans, 2 * P * V, rows, wide, P, V)
    don = tl.dot(dmix, c, input_precision=PRECISION) + given
    _keep_rows(don_ + at * P * S, don, rows, S, rank, P, S)
    dshared_ += (head * tl.num_programs(2) + cut).to(tl.int64) * (2 * V * S + V)
    dc = tl.dot(tl.trans(dmix), on, input_precision=PRECISION)
    _keep_rows(dshared_ + side * V * S, dc, wide, S, rank, V, S)
    if side == 0:
        dbias = tl.zeros([1, BLOCK_V], tl.float32)
        if BIAS:
            if cut == 0:
                dbias += _summed(dbias_ + head.to(tl.int64) * spans * V, spans, V, tl.arange(0, 1), wide, 1, V)
        tl.store(dshared_ + 2 * V * S + wide[None, :], dbias, mask=(wide < V)[None, :])


@triton.jit
def spread(
    don_, dproduct_, sample_, w_e_, w_r_, dshared_, dsample_, dw_, row_, batch, heads, m, groups, each, length,
    stride_b, stride_h, stride_m,
    P: tl.constexpr, S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, ROWS: tl.constexpr,
    STATIC: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of one head: the gradients of its sample `[B, H, m, p]` and its weights `[2, B, H, m, s]`.

    And some columns of what is shared `[B, groups, each, length]`, summed to `[groups, length]`.
    """
    head = tl.program_id(0)
    b, h = head // heads, head % heads
    deep, rank = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_S)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    on_e = don_ + (b * 2 * heads + h).to(tl.int64) * P * S
    on_r = on_e + heads * P * S
    w_e = _rows(w_e_ + h * m * S, rows, S, rank, m, S).to(tl.float32)
    w_r = _rows(w_r_ + h * m * S, rows, S, rank, m, S).to(tl.float32)
    if STATIC:
        dw_e, dw_r = _rows(on_e, rows, S, rank, m, S), _rows(on_r, rows, S, rank, m, S)
    else:
        don_e, don_r = _matrix(on_e, deep, rank, P, S), _matrix(on_r, deep, rank, P, S)
        f = _rows(sample_ + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h, rows, stride_m, deep, m, P).to(
            tl.float32
        )
        dw_e = tl.dot(f, don_e, input_precision=PRECISION)
        dw_r = tl.dot(f, don_r, input_precision=PRECISION)
        df = tl.dot(w_e, tl.trans(don_e), input_precision=PRECISION)
        df = tl.dot(w_r, tl.trans(don_r), df, input_precision=PRECISION)
        _keep_rows(dsample_ + head.to(tl.int64) * m * P, df, rows, P, deep, m, P)
    if PRODUCT:
        # All sequences share the weights: the first answers for their product.
        dproduct = tl.where(b == 0, tl.load(dproduct_ + h), 0.0)
        dw_e += dproduct * w_r
        dw_r += dproduct * w_e
    _keep_rows(dw_ + head.to(tl.int64) * m * S, dw_e, rows, S, rank, m, S)
    _keep_rows(dw_ + (batch * heads + head).to(tl.int64) * m * S, dw_r, rows, S, rank, m, S)
    columns = tl.cdiv(length, 64)
    for job in range(
        head * tl.num_programs(1) + tl.program_id(1), groups * columns, tl.num_programs(0) * tl.num_programs(1)
    ):
        group, cols = job // columns, (job % columns) * 64 + tl.arange(0, 64)
        total = tl.zeros([32, 64], tl.float32)
        for start in range(0, batch * each, 32):
            part = start + tl.arange(0, 32)
            place = ((part // each) * groups + group).to(tl.int64) * each + part % each
            inside = (part < batch * each)[:, None] & (cols < length)[None, :]
            total += tl.load(dshared_ + place[:, None] * length + cols[None, :], mask=inside, other=0.0)
        tl.store(row_ + group * length + cols, tl.sum(total, 0), mask=cols < length)


@triton.jit
def _objective(energy_, tokens_, lam, mean, rows, cols, batch, heads, SIZE: tl.constexpr):
    """J of a few sequences, whether they have tokens, and what their energy counts for."""
    inside = (rows < batch)[:, None] & (cols < SIZE)[None, :]
    at = energy_ + rows.to(tl.int64)[:, None] * 2 * SIZE + cols[None, :]
    energy = tl.load(at, mask=inside, other=0.0) + tl.load(at + SIZE, mask=inside, other=0.0)
    tokens = tl.load(tokens_ + rows, mask=rows < batch, other=0.0)
    there = tl.where(tokens > 0, 1.0, 0.0)
    share = there * 0.5 / (heads * tl.maximum(tokens, 1.0))
    return tl.sum(energy * (lam * lam)[None, :], 1) * share - mean * there, there, share, energy


@triton.jit
def penalty(
    energy_, lam_, product_, tokens_, out_, count_, batch, heads,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The mean of J^2 over the sequences that have tokens, and how many they are."""
    cols, head = tl.arange(0, BLOCK), tl.arange(0, HEADS)
    lam = tl.load(lam_ + cols, mask=cols < SIZE, other=0.0).to(tl.float32)
    mean = tl.sum(tl.load(product_ + head, mask=head < heads, other=0.0), 0) / heads
    square, there = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(0, batch, ROWS):
        value, seen, _, _ = _objective(
            energy_, tokens_, lam, mean, start + tl.arange(0, ROWS), cols, batch, heads, SIZE
        )
        square += value * value
        there += seen
    count = tl.maximum(tl.sum(there, 0), 1.0)
    tl.store(out_, tl.sum(square, 0) / count)
    tl.store(count_, count)


@triton.jit
def penalty_backward(
    energy_, lam_, product_, tokens_, count_, above_, denergy_, dlam_, dproduct_, batch, heads,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Gradients of energies `[B, 2, H, s]`, lambda `[H, s]` and traces `[H]`."""
    cols, head = tl.arange(0, BLOCK), tl.arange(0, HEADS)
    lam = tl.load(lam_ + cols, mask=cols < SIZE, other=0.0).to(tl.float32)
    mean = tl.sum(tl.load(product_ + head, mask=head < heads, other=0.0), 0) / heads
    scale = 2.0 * tl.load(above_).to(tl.float32) / tl.load(count_)
    dlam = tl.zeros([BLOCK], tl.float32)
    dmean = tl.zeros([ROWS], tl.float32)
    for start in range(0, batch, ROWS):
        rows = start + tl.arange(0, ROWS)
        value, seen, share, energy = _objective(energy_, tokens_, lam, mean, rows, cols, batch, heads, SIZE)
        value *= scale
        denergy = (value * share)[:, None] * (lam * lam)[None, :]
        _keep_rows(denergy_, denergy, rows, 2 * SIZE, cols, batch, SIZE)
        _keep_rows(denergy_ + SIZE, denergy, rows, 2 * SIZE, cols, batch, SIZE)
        dlam += tl.sum((value * share)[:, None] * energy, 0)
        dmean += value * seen
    tl.store(dlam_ + cols, 2.0 * lam * dlam, mask=cols < SIZE)
    tl.store(dproduct_ + head, -tl.sum(dmean, 0) / heads + tl.zeros([HEADS], tl.float32), mask=head < heads)

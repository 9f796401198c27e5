r"""Primal-Attention's fold as Triton kernels: queries and keys are read once, outputs written once, scores never.

With $\phi_i = q_i / \max(\lVert q_i\rVert, \epsilon)$ and weights as they act on features, $W = F^\top W_e$ `[p, s]`, of every head, queries give

$$e_i = \phi_i W, \qquad o_i = e_i C_e^\top + \dots, \qquad \mathrm{energy}_c = \sum_i m_i\, e_{ic}^2,$$

where $m_i$ is 0 at padding; keys the same with $W_r$ and $C_r$. Backward, with $g_i$ the gradient of $o_i$ and $\eta$ that of the energies,

$$h_i = g_i C_e + 2 m_i\, \eta \odot e_i, \qquad \bar\phi_i = h_i W^\top, \qquad
\bar q_i = (\bar\phi_i - \phi_i\, (e_i \cdot h_i)) / \lVert q_i \rVert, \qquad \bar W = \sum_i \phi_i^\top h_i, \qquad \bar C_e = \sum_i g_i^\top e_i.$$

`means` makes F of segments, `prepare` makes W, `fold` is the pass over tokens and `penalty` the loss; `penalty_backward`, `fold_backward`,
`gather`, `spread` and `means_backward` go the other way. Sums over tokens are kept in float32, one partial sum per span of tokens; no number is added atomically, so results repeat
bit by bit. 16-bit inputs are multiplied in 16 bit, which float16 holds after scaling.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,misc"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

TINY = tl.constexpr(1e-24)  # the square of the least norm, 1e-12


@triton.jit
def _turn(EARLY: tl.constexpr):
    """Launched early, a kernel waits here for the one before it, and lets the next one be launched."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


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
def _size(matrix, other, DOT: tl.constexpr):
    """What both are divided by so that 16 bits hold them."""
    if DOT == tl.float16:
        most = tl.maximum(tl.max(tl.max(tl.abs(matrix), 1), 0), tl.max(tl.max(tl.abs(other), 1), 0))
        return tl.where(most > 0, most, 1.0)
    else:
        return 1.0


@triton.jit
def _scores(x, on, PRECISION: tl.constexpr):
    """Scores of a block of rows, 1 / length of each row, and whether it is long enough to have a direction."""
    rows = x.to(tl.float32)
    square = tl.sum(rows * rows, 1)
    over = tl.rsqrt(tl.maximum(square, TINY))
    return tl.dot(x, on, input_precision=PRECISION) * over[:, None], over, square > TINY


@triton.jit
def _counted(values, keep_, b, first, n, KEEP: tl.constexpr):
    """Zero at padding; beyond the end scores are zero already."""
    if KEEP:
        rows = first + tl.arange(0, values.shape[0])
        seen = tl.load(keep_ + b.to(tl.int64) * n + rows, mask=rows < n, other=0) != 0
        return tl.where(seen[:, None], values, 0.0)
    else:
        return values


@triton.jit
def _segment(row, n, rows):
    """Where a segment begins, and how many tokens it has: at least one."""
    first = row * n // rows
    return first, tl.maximum((row + 1) * n // rows - first, 1)


@triton.jit
def means(
    x_, out_, n, rows, width, stride_b, stride_n, BLOCK: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Some columns of the mean of one segment of tokens `[B, n, width]`: `[B, rows, width]` in float32."""
    _turn(EARLY)
    b, row = tl.program_id(0).to(tl.int64) // rows, tl.program_id(0).to(tl.int64) % rows
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    first, size = _segment(row, n, rows)
    x_ += b * stride_b + first * stride_n
    total = tl.zeros([BLOCK, COLS], tl.float32)
    for start in range(0, size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = (token < size)[:, None] & (cols < width)[None, :]
        total += tl.load(x_ + token.to(tl.int64)[:, None] * stride_n + cols[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(out_ + (b * rows + row) * width + cols, tl.sum(total, 0) / size, mask=cols < width)


@triton.jit
def means_backward(
    above_, dx_, n, rows, width, repeats, above_b, above_m, BLOCK: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """The gradients of a block of tokens `[B, n, width]`: each is in one segment, or, of fewer tokens than rows, `repeats` at most."""
    _turn(EARLY)
    blocks = (n + BLOCK - 1) // BLOCK
    b = tl.program_id(0).to(tl.int64) // blocks
    token = tl.program_id(0).to(tl.int64) % blocks * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (token < n)[:, None] & (cols < width)[None, :]
    total = tl.zeros([BLOCK, COLS], tl.float32)
    last = ((token + 1) * rows - 1) // n  # of the segments that begin at the token or before it
    for back in range(repeats):
        row = last - back
        first, size = _segment(row, n, rows)
        there = (row >= 0) & (first + size > token)
        at = above_ + b * above_b + row[:, None] * above_m + cols[None, :]
        share = tl.load(at, mask=inside & there[:, None], other=0.0).to(tl.float32)
        total += share / size.to(tl.float32)[:, None]
    tl.store(dx_ + (b * n + token)[:, None] * width + cols[None, :], total.to(dx_.dtype.element_ty), mask=inside)


@triton.jit
def prepare(
    sample_, w_e_, w_r_, keep_, on_, product_, tokens_, ticket_, heads, n, m, stride_b, stride_h, stride_m,
    P: tl.constexpr, S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, ROWS: tl.constexpr,
    STATIC: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sixteen rows of one head, queries or keys, of F^T W `[B, 2, H, p, s]`; the last programs tr(W_e^T W_r) `[H]`, and how many tokens `[B]`."""
    _turn(EARLY)
    head, side, cut = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = head // heads, head % heads
    deep, rank = cut * 16 + tl.arange(0, 16), tl.arange(0, BLOCK_S)
    mine_ = w_e_
    if side == 1:
        mine_ = w_r_
    mine_ += h * m * S
    if cut == tl.num_programs(2) - 1:
        if side == 0:
            tl.store(ticket_ + head, 0)
            if h == 0:
                count = 0.0 + n
                if KEEP:
                    seen = tl.zeros([1024], tl.float32)
                    for start in range(0, n, 1024):
                        place = start + tl.arange(0, 1024)
                        there = tl.load(keep_ + b.to(tl.int64) * n + place, mask=place < n, other=0) != 0
                        seen += tl.where(there, 1.0, 0.0)
                    count = tl.sum(seen, 0)
                tl.store(tokens_ + b, count)
        elif b == 0:
            product = tl.zeros([ROWS, BLOCK_S], tl.float32)
            for start in range(0, m, ROWS):
                rows = start + tl.arange(0, ROWS)
                other = _rows(w_e_ + h * m * S, rows, S, rank, m, S).to(tl.float32)
                product += _rows(mine_, rows, S, rank, m, S).to(tl.float32) * other
            tl.store(product_ + h, tl.sum(tl.sum(product, 1), 0))
    else:
        on = tl.zeros([16, BLOCK_S], tl.float32)
        if STATIC:
            on = _matrix(mine_, deep, rank, P, S)
        else:
            f_ = sample_ + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
            for start in range(0, m, ROWS):
                rows = start + tl.arange(0, ROWS)
                f = _rows(f_, rows, stride_m, deep, m, P).to(tl.float32)
                w = _rows(mine_, rows, S, rank, m, S).to(tl.float32)
                on = tl.dot(tl.trans(f), w, on, input_precision=PRECISION)
        _keep_rows(on_ + ((b * 2 + side) * heads + h).to(tl.int64) * P * S, on, deep, S, rank, P, S)


# A loop stays a loop if it has one turn: of straight code Triton 3.6 made sums of products that were wrong on Hopper.
@triton.jit(do_not_specialize=["blocks"])
def fold(
    pair_, on_, c_e_, c_r_, bias_, keep_, out_, part_, energy_, ticket_, heads, n, blocks,
    stride_b, stride_n, stride_t, stride_h, stride_c, row_c, shift_c,
    P: tl.constexpr, V: tl.constexpr, S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr, SPANS: tl.constexpr, KEEP: tl.constexpr, BIAS: tl.constexpr, ENERGY: tl.constexpr,
    EARLY: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Every block of tokens of one head whose number is that of the program modulo their count: outputs `[B, n, H, V]`, and a part of
    both energies `[B, H, spans, 2, s]`. The last program of a head sums the parts, `[B, 2, H, s]`.
    """
    _turn(EARLY)
    head, span, spans = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h = head // heads, head % heads
    deep, wide, rank = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_S)
    query_ = pair_ + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    out_ += (b.to(tl.int64) * n * heads + h) * V
    on_e = _matrix(on_ + (b * 2 * heads + h).to(tl.int64) * P * S, deep, rank, P, S)
    on_r = _matrix(on_ + ((b * 2 + 1) * heads + h).to(tl.int64) * P * S, deep, rank, P, S)
    c_e = _rows(c_e_ + h * stride_c, wide, row_c, rank, V, S).to(tl.float32)
    c_r = _rows(c_r_ + h * stride_c + shift_c, wide, row_c, rank, V, S).to(tl.float32)
    size, width = _size(on_e, on_r, DOT), _size(c_e, c_r, DOT)
    on_e, on_r = (on_e / size).to(DOT), (on_r / size).to(DOT)
    c_e, c_r = tl.trans((c_e / width).to(DOT)), tl.trans((c_r / width).to(DOT))
    energy_e = tl.zeros([ROWS, BLOCK_S], tl.float32)
    energy_r = tl.zeros([ROWS, BLOCK_S], tl.float32)
    if BIAS:
        bias = tl.load(bias_ + wide, mask=wide < V, other=0.0).to(tl.float32)[None, :]
    for block in range(blocks):
        first = (block * spans + span) * ROWS  # programs move on side by side
        query = _block(query_, first, stride_n, deep, n, ROWS, P)
        key = _block(query_ + stride_t, first, stride_n, deep, n, ROWS, P)
        e, _, _ = _scores(query, on_e, PRECISION)
        r, _, _ = _scores(key, on_r, PRECISION)
        out = tl.dot(e.to(DOT), c_e, input_precision=PRECISION)
        out = tl.dot(r.to(DOT), c_r, out, input_precision=PRECISION) * (size * width)
        if BIAS:
            out += bias
        _keep_block(out_, out, first, heads * V, wide, n, ROWS, V)
        if ENERGY:
            energy_e += _counted(e * e, keep_, b, first, n, KEEP)
            energy_r += _counted(r * r, keep_, b, first, n, KEEP)
    if ENERGY:
        part_ += head.to(tl.int64) * spans * 2 * S
        mine_ = part_ + span * 2 * S + rank
        tl.store(mine_, tl.sum(energy_e, 0) * (size * size), mask=rank < S)
        tl.store(mine_ + S, tl.sum(energy_r, 0) * (size * size), mask=rank < S)
        # The barrier puts every thread's store before the count.
        tl.debug_barrier()
        if tl.atomic_add(ticket_ + head, 1, sem="acq_rel") == spans - 1:
            every, both = tl.arange(0, SPANS), tl.arange(0, 2 * BLOCK_S)
            side, which = both // BLOCK_S, both % BLOCK_S
            total = tl.zeros([SPANS, 2 * BLOCK_S], tl.float32)
            for start in range(0, spans, SPANS):
                inside = (start + every < spans)[:, None] & (which < S)[None, :]
                at = part_ + (start + every)[:, None] * 2 * S + (side * S + which)[None, :]
                total += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
            place = ((b * 2 + side) * heads + h) * S + which
            tl.store(energy_ + place, tl.sum(total, 0), mask=which < S)


@triton.jit(do_not_specialize=["blocks"])
def fold_backward(
    pair_, on_, c_e_, c_r_, keep_, above_, denergy_, dpair_, part_, heads, n, blocks,
    stride_b, stride_n, stride_t, stride_h, above_b, above_n, above_h, stride_c, row_c, shift_c,
    P: tl.constexpr, V: tl.constexpr, S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr, ROWS: tl.constexpr, KEEP: tl.constexpr, BIAS: tl.constexpr, ENERGY: tl.constexpr,
    EARLY: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a span's queries, or keys, `[B, n, 2, H, P]`, and its part, a row, of those of W, C and bias."""
    _turn(EARLY)
    head, span, side = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = head // heads, head % heads
    deep, wide = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    rank, token = tl.arange(0, BLOCK_S), tl.arange(0, ROWS)
    source = pair_ + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + side.to(tl.int64) * stride_t
    above_ += b.to(tl.int64) * above_b + h.to(tl.int64) * above_h
    target = dpair_ + ((b.to(tl.int64) * n * 2 + side) * heads + h) * P
    at = ((b * 2 + side) * heads + h).to(tl.int64)
    on = _matrix(on_ + at * P * S, deep, rank, P, S)
    c_ = c_e_
    if side == 1:
        c_ = c_r_ + shift_c
    c = _rows(c_ + h * stride_c, wide, row_c, rank, V, S).to(tl.float32)
    size, width = _size(on, on, DOT), _size(c, c, DOT)
    on, c = (on / size).to(DOT), (c / width).to(DOT)
    denergy = tl.zeros([1, BLOCK_S], tl.float32)
    if ENERGY:
        denergy = tl.load(denergy_ + at * S + rank, mask=rank < S, other=0.0)[None, :] * (2.0 * size)
    don, dc = tl.zeros([BLOCK_P, BLOCK_S], tl.float32), tl.zeros([BLOCK_V, BLOCK_S], tl.float32)
    dbias = tl.zeros([16, BLOCK_V], tl.float32)
    SPARE: tl.constexpr = BIAS and S < BLOCK_S and DOT != tl.float32
    for block in range(blocks):
        # From the end on, which the forward pass saw last: the cache still has it.
        first = ((blocks - 1 - block) * tl.num_programs(1) + span) * ROWS
        above = _block(above_, first, above_n, wide, n, ROWS, V).to(DOT)
        x = _block(source, first, stride_n, deep, n, ROWS, P)
        e, over, long = _scores(x, on, PRECISION)
        de = tl.dot(above, c, input_precision=PRECISION) * width
        if ENERGY:
            de += _counted(e, keep_, b, first, n, KEEP) * denergy
        de *= over[:, None]
        if DOT == tl.float16:
            de = tl.where(long[:, None], de, 0.0)
        most = _size(de, de, DOT)
        half = (de / most).to(DOT)
        if DOT == tl.float16:
            don += tl.dot(tl.trans(x), half) * most
        else:
            don = tl.dot(tl.trans(x), half, don, input_precision=PRECISION)
        gradient = tl.dot(half, tl.trans(on), input_precision=PRECISION) * (most * size)
        de = half.to(tl.float32) * most
        # A column to spare holds ones: its sum is the gradient of the bias.
        right = tl.where(rank[None, :] == S, 1.0, e) if SPARE else e
        dc = tl.dot(tl.trans(above), right.to(DOT), dc, input_precision=PRECISION)
        if BIAS and not SPARE:
            dbias += tl.sum(tl.reshape(above.to(tl.float32), [ROWS // 16, 16, BLOCK_V]), 0)
        along = tl.where(long, tl.sum(e * de, 1), 0.0) * (over * size)
        if DOT == tl.bfloat16 and not KEEP:
            # A product with a diagonal matrix takes the rows from where they lie, but lets a NaN out of its row.
            diagonal = tl.where(token[:, None] == token[None, :], -along[:, None], 0.0)
            gradient = tl.dot(diagonal.to(DOT), x, gradient)
        else:
            gradient -= x.to(tl.float32) * along[:, None]
        _keep_block(target, gradient, first, 2 * heads * P, deep, n, ROWS, P)
    part_ += (head * tl.num_programs(1) + span).to(tl.int64) * (2 * (P + V) * S + V)
    _keep_rows(part_ + side * P * S, don, deep, S, rank, P, S)
    part_ += 2 * P * S
    _keep_rows(part_ + side * V * S, dc * size, wide, S, rank, V, S)
    if side == 0:
        sums = tl.sum(dbias, 0)
        if SPARE:
            sums = tl.sum(tl.where(rank[None, :] == S, dc, 0.0), 1)
        tl.store(part_ + 2 * V * S + wide, sums, mask=wide < V)


@triton.jit
def gather(
    part_, given_, don_, dc_, dbias_, batch, heads, spans, groups,
    P: tl.constexpr, V: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ON: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of the parts, summed over spans: the gradients of W of one head `[B, 2, H, p, s]`; of C `[groups, v, 2 s]` and bias
    `[groups, v]`, which heads may share.
    """
    _turn(EARLY)
    OURS: tl.constexpr = 2 * P * S
    LENGTH: tl.constexpr = 2 * (P + V) * S + V
    JOBS: tl.constexpr = (OURS + COLS - 1) // COLS
    REST: tl.constexpr = (LENGTH - OURS + COLS - 1) // COLS
    job = tl.program_id(0)
    shared = job >= batch * heads * JOBS
    rest = job - batch * heads * JOBS
    # Parts lie as [outer, sets, inner, LENGTH]; one of the sets is summed.
    chosen = tl.where(shared, rest // REST, job // JOBS)
    cols = tl.where(shared, OURS + (rest % REST) * COLS, (job % JOBS) * COLS)
    last = tl.where(shared, LENGTH, OURS)
    sets = tl.where(shared, groups, batch * heads)
    inner = tl.where(shared, (heads // groups) * spans, spans)
    outer = tl.where(shared, batch, 1)
    col = cols + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, outer * inner, ROWS):
        row = start + tl.arange(0, ROWS)
        place = ((row // inner) * sets + chosen).to(tl.int64) * inner + row % inner
        inside = (row < outer * inner)[:, None] & (col < last)[None, :]
        total += tl.load(part_ + place[:, None] * LENGTH + col[None, :], mask=inside, other=0.0)
    sums = tl.sum(total, 0)
    if shared:
        spot = col - OURS
        readout = dc_ + chosen * (2 * V * S) + (spot // S % V) * (2 * S) + spot // (V * S) * S + spot % S
        tl.store(readout, sums.to(dc_.dtype.element_ty), mask=spot < 2 * V * S)
        if dbias_ is not None:
            bias = dbias_ + chosen * V + spot - 2 * V * S
            tl.store(bias, sums.to(dbias_.dtype.element_ty), mask=(spot >= 2 * V * S) & (col < last))
    else:
        side = col // (P * S)
        at = (((chosen // heads) * 2 + side) * heads + chosen % heads).to(tl.int64) * (P * S) + col % (P * S)
        if ON:
            sums += tl.load(given_ + at, mask=col < last, other=0.0)
        tl.store(don_ + at, sums, mask=col < last)


@triton.jit
def spread(
    don_, dproduct_, sample_, w_e_, w_r_, dsample_, dw_, heads, m, stride_b, stride_h, stride_m,
    P: tl.constexpr, S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, ROWS: tl.constexpr,
    STATIC: tl.constexpr, PRODUCT: tl.constexpr, EARLY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of one head: the gradients of its sample `[B, m, H, p]` and its weights `[B, 2, H, m, s]`."""
    _turn(EARLY)
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
        if dsample_ is not None:
            df = tl.dot(w_e, tl.trans(don_e), input_precision=PRECISION)
            df = tl.dot(w_r, tl.trans(don_r), df, input_precision=PRECISION)
            _keep_rows(dsample_ + (b.to(tl.int64) * m * heads + h) * P, df, rows, heads * P, deep, m, P)
    if PRODUCT:
        # All sequences share the weights: the first answers for their product.
        dproduct = tl.where(b == 0, tl.load(dproduct_ + h), 0.0)
        dw_e += dproduct * w_r
        dw_r += dproduct * w_e
    dw_ += (b.to(tl.int64) * 2 * heads + h) * m * S
    _keep_rows(dw_, dw_e, rows, S, rank, m, S)
    _keep_rows(dw_ + heads * m * S, dw_r, rows, S, rank, m, S)


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
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The mean of J^2 over the sequences that have tokens, and how many they are."""
    _turn(EARLY)
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
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Gradients of energies `[B, 2, H, s]`, lambda `[H, s]` and traces `[H]`."""
    _turn(EARLY)
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
    tl.store(dlam_ + cols, (2.0 * lam * dlam).to(dlam_.dtype.element_ty), mask=cols < SIZE)
    tl.store(dproduct_ + head, -tl.sum(dmean, 0) / heads + tl.zeros([HEADS], tl.float32), mask=head < heads)

r"""Linear attention by chunks, as Triton kernels.

With $x_i = \phi(q_i)$ and $y_j = w_j\, \phi(k_j)$, every output is $o_i = \sum_j (x_i \cdot y_j)\, v_j / z_i$ with
$z_i = \sum_j x_i \cdot y_j$ (or 1), over $j \le i$ or over all keys. Tokens are cut into spans, and spans into blocks:

1. `_span_states` sums $y_j v_j^\top$ and $y_j$ over each span: a memory `[F, E]` and a total `[F]`, one row after the other.
2. `_running_sums` adds up the spans before each one, in order: what comes later never rounds what came.
3. `_outputs` walks through a span block by block, the memory in registers: $o = x M$ plus the block's own triangle.

Backward is of the same form. With $g_i$ the gradient of $o_i$ and $\delta_i = g_i \cdot o_i$,

$$\bar x_i = \frac1{z_i} \sum_{j \le i} (g_i \cdot v_j - \delta_i)\, y_j, \qquad
\bar y_j = \sum_{i \ge j} (g_i \cdot v_j - \delta_i)\, \frac{x_i}{z_i}, \qquad
\bar v_j = \sum_{i \ge j} \frac{x_i \cdot y_j}{z_i}\, g_i :$$

`_query_gradient` reads the memories of 2 again, `_key_gradients` those that 1 and 2 make of $x_i / z_i$, $g_i$ and
$-\delta_i$ from the last span to the first. Nothing is added atomically, so results repeat bit by bit.

Sums are kept in float32. bfloat16 features are multiplied in bfloat16, and a float32 memory as the sum of two bfloat16
parts; float16 goes through tf32, whose range does not end at 65504. A key of weight zero is hidden: it is never read.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,misc"

from __future__ import annotations

import triton
import triton.language as tl

from heedful.ops.fused._blocks import clean, not_finite


@triton.jit
def _phi(x, MAP: tl.constexpr):
    """`identity`: x. `relu`: torch.relu(x). `elu`: torch.nn.functional.elu(x) + 1."""
    if MAP == "relu":
        x = tl.maximum(x, 0.0)
    elif MAP == "elu":
        x = tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
    return x


@triton.jit
def _phi_slope(x, MAP: tl.constexpr):
    """The derivative of `_phi`, as torch has it at zero."""
    if MAP == "relu":
        x = tl.where(x > 0, 1.0, 0.0)
    elif MAP == "elu":
        x = tl.exp(tl.minimum(x, 0.0))
    else:
        x = tl.full(x.shape, 1.0, tl.float32)
    return x


@triton.jit
def _at(pointer, rows, stride, cols):
    return pointer + rows[:, None] * stride + cols[None, :]


@triton.jit
def _load(pointer, rows, stride, cols, seen, SIZE: tl.constexpr):
    """Rows of a matrix, zero where they are not seen."""
    return tl.load(_at(pointer, rows, stride, cols), mask=seen[:, None] & (cols < SIZE)[None, :], other=0.0)


@triton.jit
def _store(pointer, rows, stride, cols, seen, values, SIZE: tl.constexpr):
    mask = seen[:, None] & (cols < SIZE)[None, :]
    tl.store(_at(pointer, rows, stride, cols), values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _features(raw, cols, seen, SIZE: tl.constexpr, MAP: tl.constexpr):
    """phi of loaded rows in float32, zero where nothing was loaded."""
    return tl.where(seen[:, None] & (cols < SIZE)[None, :], _phi(raw.to(tl.float32), MAP), 0.0)


@triton.jit
def _factors(pointer, rows, stride, seen, INVERSE: tl.constexpr):
    """The number that multiplies each token: its weight, or one over its total (a total of zero divides by one)."""
    if INVERSE:
        total = tl.load(pointer + rows * stride, mask=seen, other=1.0)
        factor = 1.0 / tl.where(total == 0, 1.0, total)
    else:
        factor = tl.load(pointer + rows * stride, mask=seen, other=0.0)
    return factor


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _read(a, memory, PRECISION: tl.constexpr):
    """a @ memory, the memory not rounded to the type of `a`: its first sixteen bits or more count."""
    if a.dtype == tl.bfloat16:
        high = memory.to(tl.bfloat16)
        low = (memory - high.to(tl.float32)).to(tl.bfloat16)
        found = tl.dot(a, low, tl.dot(a, high))
    elif PRECISION == "tf32":
        found = tl.dot(a, memory, input_precision="tf32x3")
    else:
        found = tl.dot(a, memory, input_precision=PRECISION)
    return found


@triton.jit
def _load_state(states, row, f, e, F: tl.constexpr, E: tl.constexpr):
    """Memory and total of one row of `states`, which is `[F * E + F]` numbers long."""
    start = states + row * (F * E + F)
    inside = f < F
    memory = tl.load(_at(start, f, E, e), mask=inside[:, None] & (e < E)[None, :], other=0.0)
    return memory, tl.load(start + F * E + f, mask=inside, other=0.0)


@triton.jit
def _span_states(
    features, values, factor, shift, states,
    n, spans, heads,
    features_b, features_h, features_n, values_b, values_h, values_n, factor_b, factor_h, factor_n,
    F: tl.constexpr, E: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr, MAP: tl.constexpr, INVERSE: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums over a span of phi(a) b^T and of phi(a), or of -shift phi(a), phi(a) multiplied by a factor; over GROUP heads."""
    span = tl.program_id(0) % spans
    head = tl.program_id(0).to(tl.int64) // spans
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    batch, first = head // heads, head % heads * GROUP
    start = span.to(tl.int64) * (BLOCKS * ROWS)
    features += batch * features_b + start * features_n
    values += batch * values_b + start * values_n
    if factor is not None:
        factor += batch * factor_b + start * factor_n
    if shift is not None:
        shift += batch * heads * GROUP * n + start
    memory = tl.zeros((BLOCK_F, BLOCK_E), tl.float32)
    total = tl.zeros((BLOCK_F,), tl.float32)
    for step in range(BLOCKS * GROUP):
        h = first + step % GROUP
        rows = step // GROUP * ROWS + tl.arange(0, ROWS)
        seen = rows < n - start
        if factor is not None:
            scale = _factors(factor + h * factor_h, rows, factor_n, seen, INVERSE)
            seen = seen & (scale != 0)
        raw = _load(features + h * features_h, rows, features_n, f, seen, F)
        y = _features(raw, f, seen, F, MAP)
        if factor is not None:
            y = y * scale[:, None]
        v = _load(values + h * values_h, rows, values_n, e, seen, E)
        if INVERSE:
            y = clean(y)
        else:
            # What is not finite makes all of a memory so, and with it every later row.
            y = tl.where((not_finite(raw) | not_finite(v))[:, None], float("nan"), y)
        y, v = y.to(DOT), v.to(DOT)
        memory += _dot(tl.trans(y), v, PRECISION)
        if shift is None:
            total += tl.sum(y.to(tl.float32), 0)
        else:
            moved = tl.load(shift + h * n + rows, mask=seen, other=0.0)
            total -= tl.sum(y.to(tl.float32) * moved[:, None], 0)
    states += tl.program_id(0).to(tl.int64) * (F * E + F)
    inside = f < F
    tl.store(_at(states, f, E, e), memory, mask=inside[:, None] & (e < E)[None, :])
    if tl.program_id(2) == 0:
        tl.store(states + F * E + f, total, mask=inside)


@triton.jit
def _running_sums(
    states, first, sums, spans, size, REVERSE: tl.constexpr, SPANS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Row s of `sums` is `first` plus the first s spans, or the last s in reverse; there is one row more than spans."""
    head = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = cols < size
    carry = tl.zeros((COLS,), tl.float32)
    if first is not None:
        carry += tl.load(first + head * size + cols, mask=inside, other=0.0)
    out = sums + head * (spans + 1) * size
    tl.store(out + cols, carry, mask=inside)
    for start in range(0, spans, SPANS):
        place = start + tl.arange(0, SPANS)
        mask = (place < spans)[:, None] & inside[None, :]
        source = place
        if REVERSE:
            source = spans - 1 - place
        tile = tl.load(_at(states + head * spans * size, source.to(tl.int64), size, cols), mask=mask, other=0.0)
        tl.store(_at(out, (place + 1).to(tl.int64), size, cols), carry[None, :] + tl.cumsum(tile, 0), mask=mask)
        carry += tl.sum(tile, 0)


@triton.jit
def _outputs(
    query, key, value, weight, sums, gradient, out, totals,
    n, spans, rows_of_sums, heads,
    query_b, query_h, query_n, key_b, key_h, key_n, value_b, value_h, value_n, weight_b, weight_h, weight_n,
    gradient_b, gradient_h, gradient_n,
    F: tl.constexpr, E: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, NORMAL: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs of a span and their totals; with a gradient, in place of the outputs, delta's share of these columns."""
    span = tl.program_id(0) % spans
    head = tl.program_id(0).to(tl.int64) // spans
    tile = tl.program_id(1)
    f, e = tl.arange(0, BLOCK_F), tile * BLOCK_E + tl.arange(0, BLOCK_E)
    batch, h = head // heads, head % heads
    g = h // GROUP
    start = span.to(tl.int64) * (BLOCKS * ROWS)
    query += batch * query_b + h * query_h + start * query_n
    key += batch * key_b + g * key_h + start * key_n
    value += batch * value_b + g * value_h + start * value_n
    if weight is not None:
        weight += batch * weight_b + g * weight_h + start * weight_n
    if gradient is not None:
        gradient += batch * gradient_b + h * gradient_h + start * gradient_n
        out += (tile * (tl.num_programs(0).to(tl.int64) // spans) + head) * n + start
    else:
        out += (head * n + start) * E
    memory = tl.zeros((BLOCK_F, BLOCK_E), tl.float32)
    total = tl.zeros((BLOCK_F,), tl.float32)
    if sums is not None:
        row = head // GROUP * rows_of_sums
        row += span if CAUSAL else rows_of_sums - 1
        memory, total = _load_state(sums, row, f, e, F, E)
    for block in range(BLOCKS):
        rows = block * ROWS + tl.arange(0, ROWS)
        inside = rows < n - start
        raw = _load(query, rows, query_n, f, inside, F)
        x = _features(raw, f, inside, F, MAP).to(DOT)
        lost = not_finite(raw)
        found = _read(x, memory, PRECISION)
        z = tl.sum(x.to(tl.float32) * total[None, :], 1)
        if CAUSAL:
            seen = inside
            if weight is not None:
                scale = _factors(weight, rows, weight_n, seen, False)
                seen = seen & (scale != 0)
            raw = _load(key, rows, key_n, f, seen, F)
            y = _features(raw, f, seen, F, MAP)
            if weight is not None:
                y = y * scale[:, None]
            v = _load(value, rows, value_n, e, seen, E)
            bad, past = not_finite(raw) | not_finite(v), rows[:, None] >= rows[None, :]
            y, v = clean(y).to(DOT), clean(v).to(DOT)
            p = tl.where(past, _dot(x, tl.trans(y), PRECISION), 0.0)
            p = tl.where(past & bad[None, :], float("nan"), p).to(DOT)
            found += _dot(p, v, PRECISION)
            z += tl.sum(p.to(tl.float32), 1)
            y = tl.where(bad[:, None], float("nan"), y.to(tl.float32)).to(DOT)
            memory += _dot(tl.trans(y), v, PRECISION)
            total += tl.sum(y.to(tl.float32), 0)
        if NORMAL:
            found = found / tl.where(z == 0, 1.0, z)[:, None]
        found = tl.where(lost[:, None], float("nan"), found)
        if gradient is not None:
            above = _load(gradient, rows, gradient_n, e, inside, E)
            # A row of total zero is divided by one, which does not depend on the row.
            delta = tl.where(z == 0, 0.0, tl.sum(above.to(tl.float32) * found, 1))
            tl.store(out + rows, clean(delta), mask=inside)
        else:
            _store(out, rows, E, e, inside, found, E)
            if NORMAL and tile == 0:
                tl.store(totals + head * n + start + rows, z, mask=inside)


@triton.jit
def _query_gradient(
    query, key, value, weight, sums, gradient, totals, deltas, out,
    n, spans, rows_of_sums, heads,
    query_b, query_h, query_n, key_b, key_h, key_n, value_b, value_h, value_n, weight_b, weight_h, weight_n,
    gradient_b, gradient_h, gradient_n, out_b, out_h, out_n,
    F: tl.constexpr, E: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, NORMAL: tl.constexpr,
    DELTA: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of the queries of a span, for BLOCK_F of the features; with DELTA (which takes all of them) deltas too."""
    span = tl.program_id(0) % spans
    head = tl.program_id(0).to(tl.int64) // spans
    f, e = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_E)
    batch, h = head // heads, head % heads
    g = h // GROUP
    start = span.to(tl.int64) * (BLOCKS * ROWS)
    query += batch * query_b + h * query_h + start * query_n
    key += batch * key_b + g * key_h + start * key_n
    value += batch * value_b + g * value_h + start * value_n
    if weight is not None:
        weight += batch * weight_b + g * weight_h + start * weight_n
    gradient += batch * gradient_b + h * gradient_h + start * gradient_n
    out += batch * out_b + h * out_h + start * out_n
    memory = tl.zeros((BLOCK_F, BLOCK_E), tl.float32)
    total = tl.zeros((BLOCK_F,), tl.float32)
    if sums is not None:
        row = head // GROUP * rows_of_sums
        row += span if CAUSAL else rows_of_sums - 1
        memory, total = _load_state(sums, row, f, e, F, E)
    for block in range(BLOCKS):
        rows = block * ROWS + tl.arange(0, ROWS)
        inside = rows < n - start
        above = _load(gradient, rows, gradient_n, e, inside, E).to(DOT)
        own = _load(query, rows, query_n, f, inside, F).to(tl.float32)
        found = _read(above, tl.trans(memory), PRECISION)
        if CAUSAL:
            seen = inside
            if weight is not None:
                scale = _factors(weight, rows, weight_n, seen, False)
                seen = seen & (scale != 0)
            raw = _load(key, rows, key_n, f, seen, F)
            y = _features(raw, f, seen, F, MAP)
            if weight is not None:
                y = y * scale[:, None]
            y = clean(y).to(DOT)
            v = clean(_load(value, rows, value_n, e, seen, E)).to(DOT)
            past = rows[:, None] >= rows[None, :]
            p = _dot(above, tl.trans(v), PRECISION)
        if NORMAL:
            z = tl.load(totals + head * n + start + rows, mask=inside, other=1.0)
            if DELTA:
                # From the sums at hand instead of the output, whose rounding would not cancel below.
                x = _features(own, f, inside, F, MAP).to(DOT)
                delta = tl.sum(x.to(tl.float32) * found, 1)
                if CAUSAL:
                    own_pairs = tl.where(past, _dot(x, tl.trans(y), PRECISION), 0.0).to(DOT)
                    delta += tl.sum(own_pairs.to(tl.float32) * p, 1)
                delta = clean(tl.where(z == 0, 0.0, delta / tl.where(z == 0, 1.0, z)))
                tl.store(deltas + head * n + start + rows, delta, mask=inside)
            else:
                delta = tl.load(deltas + head * n + start + rows, mask=inside, other=0.0)
            found -= delta[:, None] * total[None, :]
            if CAUSAL:
                p -= delta[:, None]
        if CAUSAL:
            found += _dot(tl.where(past, p, 0.0).to(DOT), y, PRECISION)
            memory += _dot(tl.trans(y), v, PRECISION)
            total += tl.sum(y.to(tl.float32), 0)
        if NORMAL:
            found = found / tl.where(z == 0, 1.0, z)[:, None]
        _store(out, rows, out_n, f, inside, clean(found * _phi_slope(own, MAP)), F)


@triton.jit
def _key_gradients(
    query, key, value, weight, sums, gradient, totals, deltas, key_out, value_out, weight_out,
    n, spans, rows_of_sums, heads,
    query_b, query_h, query_n, key_b, key_h, key_n, value_b, value_h, value_n, weight_b, weight_h, weight_n,
    gradient_b, gradient_h, gradient_n, key_out_b, key_out_h, key_out_n, value_out_b, value_out_h, value_out_n,
    F: tl.constexpr, E: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, NORMAL: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a span's keys and weights (which takes all of E), of its values (which takes all of F), or of all."""
    span = tl.program_id(0) % spans
    head = tl.program_id(0).to(tl.int64) // spans
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    batch, g = head // heads, head % heads
    start = span.to(tl.int64) * (BLOCKS * ROWS)
    query += batch * query_b + start * query_n
    key += batch * key_b + g * key_h + start * key_n
    value += batch * value_b + g * value_h + start * value_n
    gradient += batch * gradient_b + start * gradient_n
    if weight is not None:
        weight += batch * weight_b + g * weight_h + start * weight_n
    if key_out is not None:
        key_out += batch * key_out_b + g * key_out_h + start * key_out_n
    if value_out is not None:
        value_out += batch * value_out_b + g * value_out_h + start * value_out_n
    memory = tl.zeros((BLOCK_F, BLOCK_E), tl.float32)
    total = tl.zeros((BLOCK_F,), tl.float32)
    if sums is not None:
        row = head * rows_of_sums
        row += spans - 1 - span if CAUSAL else rows_of_sums - 1
        memory, total = _load_state(sums, row, f, e, F, E)
    for step in range(BLOCKS):
        rows = (BLOCKS - 1 - step) * ROWS + tl.arange(0, ROWS)
        inside = rows < n - start
        seen = inside
        if weight is not None:
            scale = _factors(weight, rows, weight_n, seen, False)
            seen = seen & (scale != 0)
        own = _load(key, rows, key_n, f, seen, F).to(tl.float32)
        features = clean(_features(own, f, seen, F, MAP))
        x = features.to(DOT)
        v = clean(_load(value, rows, value_n, e, seen, E)).to(DOT)
        if key_out is not None:
            by_key = _read(v, tl.trans(memory), PRECISION)
            if NORMAL:
                by_key += total[None, :]
        if value_out is not None:
            by_value = _read(x, memory, PRECISION)
        if CAUSAL:
            future = rows[:, None] <= rows[None, :]
            for member in range(GROUP):
                h = g * GROUP + member
                at = (head * GROUP + member) * n + start
                raw = _load(query + h * query_h, rows, query_n, f, inside, F)
                y = _features(raw, f, inside, F, MAP)
                if NORMAL:
                    y = y * _factors(totals + at, rows, 1, inside, True)[:, None]
                    delta = tl.load(deltas + at + rows, mask=inside, other=0.0)
                y = clean(y).to(DOT)
                above = _load(gradient + h * gradient_h, rows, gradient_n, e, inside, E).to(DOT)
                if key_out is not None:
                    p = _dot(v, tl.trans(above), PRECISION)
                    if NORMAL:
                        p -= delta[None, :]
                    by_key += _dot(tl.where(future, p, 0.0).to(DOT), y, PRECISION)
                if value_out is not None:
                    pairs = tl.where(future, _dot(x, tl.trans(y), PRECISION), 0.0).to(DOT)
                    by_value += _dot(pairs, above, PRECISION)
                memory += _dot(tl.trans(y), above, PRECISION)
                if NORMAL:
                    total -= tl.sum(y.to(tl.float32) * delta[:, None], 0)
        if key_out is not None:
            if weight is not None:
                if weight_out is not None:
                    heads_in_all = tl.num_programs(0).to(tl.int64) // spans
                    place = (tl.program_id(1) * heads_in_all + head) * n + start + rows
                    tl.store(weight_out + place, tl.where(seen, tl.sum(features * by_key, 1), 0.0), mask=inside)
                by_key = tl.where(seen[:, None], by_key * scale[:, None], 0.0)
            _store(key_out, rows, key_out_n, f, inside, clean(by_key * _phi_slope(own, MAP)), F)
        if value_out is not None:
            if weight is not None:
                by_value = tl.where(seen[:, None], by_value * scale[:, None], 0.0)
            _store(value_out, rows, value_out_n, e, inside, by_value, E)


@triton.jit
def _one_token(
    query, key, value, memory, total, out, new_memory, new_total,
    query_h, key_h, value_h,
    F: tl.constexpr, E: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_E: tl.constexpr, MAP: tl.constexpr,
    NORMAL: tl.constexpr,
):  # fmt: skip
    """A state with one more key and value, and what a query reads from it; every head on its own."""
    head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    f, e = tl.arange(0, BLOCK_F), tile * BLOCK_E + tl.arange(0, BLOCK_E)
    inside, within = f < F, e < E
    x = _phi(tl.load(query + head * query_h + f, mask=inside, other=0.0).to(tl.float32), MAP)
    y = _phi(tl.load(key + head * key_h + f, mask=inside, other=0.0).to(tl.float32), MAP)
    v = tl.load(value + head * value_h + e, mask=within, other=0.0).to(tl.float32)
    both = inside[:, None] & within[None, :]
    grown = tl.load(_at(memory + head * F * E, f, E, e), mask=both, other=0.0) + y[:, None] * v[None, :]
    tl.store(_at(new_memory + head * F * E, f, E, e), grown, mask=both)
    found = tl.sum(tl.where(both, x[:, None] * grown, 0.0), 0)
    sums = tl.load(total + head * F + f, mask=inside, other=0.0) + y
    if tile == 0:
        tl.store(new_total + head * F + f, sums, mask=inside)
    if NORMAL:
        z = tl.sum(tl.where(inside, x * sums, 0.0), 0)
        found = found / tl.where(z == 0, 1.0, z)
    tl.store(out + head * E + e, found.to(out.dtype.element_ty), mask=within)

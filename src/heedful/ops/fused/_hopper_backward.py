"""The plain backward pass on Hopper, in Gluon: `_backward`'s two kernels in the form of `_hopper`, with no mask but causality.

Both multiply two tiles that a warpgroup keeps, x and y, with blocks of two tensors that one warp fetches, a and c:

    rows:     x, y = q, do    a, c = k, v      s = x a', dp = y c', ds = slope(s) dp,    dq += ds a
    columns:  x, y = k, v     a, c = q, do     the same, transposed,                     dk += ds a, dv += p c

Blocks of 64 rows that a kernel cannot serve are marked in `left`.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from heedful.ops.fused._forward import LEAST, ROOM
from heedful.ops.fused._hopper import barriers_of, fetch, following, place, steps


def _four(scores: tuple[int, ...]) -> str:
    """1 / (1 + 2^-t) with one reciprocal between four, as `activations._quick_sigmoid`; results eight places before the scores."""
    lines = [f"ex2.approx.ftz.f32 a{i}, ${score}; add.f32 b{i}, a{i}, 0f3F800000;" for i, score in enumerate(scores)]
    lines += ["mul.f32 m0, b0, b1; mul.f32 m1, b2, b3; mul.f32 m, m0, m1; rcp.approx.ftz.f32 r, m;"]
    lines += ["mul.f32 m, r, m1; mul.f32 r, r, m0;"]
    lines += [
        f"mul.f32 a{i}, a{i}, b{i ^ 1}; mul.f32 ${score - 8}, a{i}, {'mmrr'[i]};" for i, score in enumerate(scores)
    ]
    return " ".join(lines)


# A thread holds two scores of one row, two of the row eight below, and so on: four of one row go together.
EXACT = gl.constexpr(
    "{ .reg .f32 a0, a1, a2, a3, b0, b1, b2, b3, m0, m1, m, r; "
    + f"{_four((8, 9, 12, 13))} {_four((10, 11, 14, 15))} }}"
)
EIGHT = gl.constexpr(",".join(["=f"] * 8 + ["f"] * 8))


@gluon.jit
def rounded(x, layout: gl.constexpr):
    """As the left side of a product, in bfloat16; done where it is written, which frees registers."""
    x = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=False, pack=2
    )
    return gl.convert_layout(x, layout)


@gluon.jit
def weighed(t, total, C: gl.constexpr):
    """Coefficients of scores in the function's unit, their slopes, and the sums of rows with theirs where these are asked for.

    Factors that all share wait until behind the loop: a coefficient of a tangent is twice as large and its slope four times, a slope
    of `relu_squared` half as large.
    """
    if C.ACT == "tanh":
        t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [t], dtype=gl.float32, is_pure=True, pack=1)
        if C.COLUMNS:
            p = t + 1.0
            total += gl.sum(p, 1)
        else:
            p = t
            total += gl.sum(t, 1) + C.COLS
        return p, 1.0 - t * t, total
    elif C.ACT == "sigmoid":
        # Beyond 2^30 a coefficient is one, and four such factors do not overflow.
        t = gl.minimum(t, 30.0, propagate_nan=tl.PropagateNan.ALL)
        p = gl.inline_asm_elementwise(EXACT, EIGHT, [t], dtype=gl.float32, is_pure=True, pack=8)
        return p, p - p * p, total
    elif C.ACT == "relu_squared":
        t = gl.maximum(t, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return t * t, t, total
    else:
        p = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [t], dtype=gl.float32, is_pure=True, pack=1)
        return p, p, total


@gluon.jit
def score(s, stage, term_buf, a2, b2, layout: gl.constexpr, C: gl.constexpr):
    """Scores in the function's unit, without what is constant along the loop where distances are taken."""
    if C.DISTANCE:
        return s * a2 + term_buf.index(stage).load(gl.SliceLayout(0, layout))[None, :]
    elif C.BETA:
        return s * a2 + b2
    else:
        return s * a2


@gluon.jit
def descended(slope, dp, own, stage, delta, delta_buf, layout: gl.constexpr, C: gl.constexpr):
    """Gradients of scores, and the sums of rows with theirs where these are asked for."""
    if C.DIVIDED:
        if C.COLUMNS:
            dp -= delta_buf.index(stage).load(gl.SliceLayout(0, layout))[None, :]
        else:
            dp -= delta[:, None]
    ds = slope * dp
    if C.DISTANCE and C.COLUMNS == C.DIVIDED:
        own += gl.sum(ds, 1)  # of rows that sum to one it is zero
    return ds, own


@gluon.jit
def sight(step, heads, together, T, C: gl.constexpr):
    """The head and the first row of a tile, and how many blocks it takes: rows the first of them, columns the last."""
    head, top, blocks = place(step, heads, together, T, C)
    if C.COLUMNS and C.CAUSAL:
        # The first keys are seen by most queries.
        tall: gl.constexpr = C.CONSUMERS * C.ROWS
        top = (gl.cdiv(T.Q, tall) - 1) * tall - top
        blocks = T.K // C.COLS - top // C.COLS
    return head, top, blocks


@gluon.jit
def produce(descs, tensors, counts, buffers, barriers, T, C: gl.constexpr):
    """Blocks of a and c from the diagonal on (rows backwards), and the tiles of every warpgroup behind the first of them."""
    x_desc, y_desc, a_desc, c_desc, _, _ = descs
    alpha, beta, norms, shifts, deltas, _ = tensors
    heads, H, together = counts
    x_buf, y_buf, a_buf, c_buf, _, term_buf, delta_buf, _ = buffers
    full, empty, own_full, own_empty, _ = barriers
    cols = gl.arange(0, C.COLS, layout=gl.BlockedLayout([C.COLS // 32], [32], [1], [0]))
    stage, parity, own = gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(1)
    for step in range(steps(heads, T, C)):
        head, top, blocks = sight(step, heads, together, T, C)
        b, h = head // H, head % H
        x_row, y_row = b * T.x[0] + h * T.x[1] + top, b * T.y[0] + h * T.y[1] + top
        a_row, c_row = b * T.a[0] + h * T.a[1], b * T.c[0] + h * T.c[1]
        at = T.K - blocks * C.COLS if C.COLUMNS else (blocks - 1) * C.COLS
        if C.DISTANCE:
            a2 = gl.load(alpha + h) * C.UNIT
            b2 = gl.load(beta + h) * C.UNIT if C.BETA else 0.0
            begin = head.to(gl.int64) * T.K
        for i in range(blocks):
            if C.DISTANCE:
                # Before the wait, during which they arrive.
                if not C.COLUMNS:
                    term = b2 - a2 * gl.load(norms + begin + at + cols)
                elif C.DIVIDED:
                    term = -gl.load(shifts + begin + at + cols)
                    delta = gl.load(deltas + begin + at + cols)
                else:
                    term = -a2 * gl.load(shifts + begin + at + cols)
            fetch(a_desc, a_row + at, h * T.a[2], full.index(stage), empty.index(stage), parity, a_buf.index(stage))
            if i == 0:
                for w in gl.static_range(C.CONSUMERS):
                    row = x_row + w * C.ROWS
                    fetch(x_desc, row, h * T.x[2], own_full.index(w), own_empty.index(w), own, x_buf.index(w))
            fetch(c_desc, c_row + at, h * T.c[2], full.index(stage), empty.index(stage), parity, c_buf.index(stage))
            if i == 0:
                for w in gl.static_range(C.CONSUMERS):
                    row = y_row + w * C.ROWS
                    fetch(y_desc, row, h * T.y[2], own_full.index(w), own_empty.index(w), own, y_buf.index(w))
            if C.DISTANCE:
                term_buf.index(stage).store(term)
                if C.COLUMNS and C.DIVIDED:
                    delta_buf.index(stage).store(delta)
                mbarrier.arrive(full.index(stage), count=1)
            stage, parity = following(stage, parity, C)
            at += C.COLS if C.COLUMNS else -C.COLS
        own ^= 1


@gluon.jit
def whole(x, layout: gl.constexpr, C: gl.constexpr):
    """A tile in float32, beside the sums: from registers, or, where it would have to be kept in them, from shared memory."""
    if C.HELD and C.COLUMNS:
        return gl.convert_layout(x, layout).to(gl.float32)
    else:
        return x.load(layout).to(gl.float32)


@gluon.jit
def finished(first, second, own, total, x, y, given, head, H, top, T, C: gl.constexpr):
    """Sums with all that was left out of the loop, and whether any of their rows is left to another kernel.

    What is constant along the loop is read here: there it would take registers.
    """
    alpha, beta, norms, shifts = given
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, sums)
    a2 = gl.load(alpha + head % H) * C.UNIT
    b2 = gl.load(beta + head % H) * C.UNIT if C.BETA else 0.0
    alone: gl.constexpr = 0.25 if C.ACT == "tanh" else 2.0 if C.ACT == "relu_squared" else 1.0
    scale = a2 * (alone / C.UNIT)
    rows = top + gl.arange(0, C.ROWS, layout=by_row)
    if C.DISTANCE:
        where = head.to(gl.int64) * T.Q + rows
        if C.COLUMNS:
            late = b2 - a2 * gl.load(norms + where, mask=rows < T.Q, other=0.0)
        elif C.DIVIDED:
            late = -gl.load(shifts + where, mask=rows < T.Q, other=0.0)
        else:
            late = -a2 * gl.load(shifts + where, mask=rows < T.Q, other=0.0)
        by_late = gl.exp2(late)
        first *= by_late[:, None]
        if C.COLUMNS:
            second *= by_late[:, None]
        if C.COLUMNS and not C.DIVIDED:
            # sum_i p_ij (do_i . v_j) = dv_j . v_j
            first -= gl.sum(second * whole(y, sums, C), 1)[:, None] * whole(x, sums, C)
        elif C.COLUMNS or not C.DIVIDED:
            own = gl.convert_layout(own, by_row) * by_late
            first -= own[:, None] * whole(x, sums, C)
    first *= scale
    if C.COLUMNS and C.ACT == "tanh":
        second *= 0.5
    unserved = gl.zeros([C.ROWS], gl.int32, by_row)
    if C.DISTANCE:
        unserved = gl.where(gl.abs(late) < ROOM, unserved, 1)
    if C.ACT == "tanh":
        # Twice the coefficients are summed.
        count = gl.full([C.ROWS], T.K, gl.int32, by_row)
        if C.CAUSAL:
            count = T.K - rows if C.COLUMNS else rows + 1
        unserved = gl.where(gl.convert_layout(total, by_row) >= (2.0 * LEAST) * count, unserved, 1)
    if C.CAUSAL:
        # What is not finite reaches rows that do not see it: 0 x NaN = NaN.
        rest = gl.sum(first * 0.0, 1)
        if C.COLUMNS:
            rest += gl.sum(second * 0.0, 1)
        unserved = gl.where(rest == 0.0, unserved, 1)
    mark = gl.max(unserved, 0)
    return first, second, mark


@gluon.jit
def consume(W: gl.constexpr, descs, tensors, counts, buffers, barriers, T, C: gl.constexpr):
    """The rows of one warpgroup.

    While the matrix unit multiplies for the gradients of scores or sums them up, coefficients are made of those that it has finished.
    """
    _, _, _, _, first_desc, second_desc = descs
    alpha, beta, norms, shifts, deltas, left = tensors
    heads, H, together = counts
    x_buf, y_buf, a_buf, c_buf, out_buf, term_buf, delta_buf, col_buf = buffers
    full, empty, own_full, own_empty, turn = barriers
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.COLS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    held: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    by_score: gl.constexpr = gl.SliceLayout(1, scores)
    NEXT: gl.constexpr = (W + 1) % C.CONSUMERS
    # Whether shared memory is free once tiles are in registers.
    EARLY: gl.constexpr = C.HELD and (C.COLUMNS or C.DIVIDED or not C.DISTANCE)
    # How many accumulating products run behind those of the scores.
    LAST: gl.constexpr = 2 if C.COLUMNS else 1
    x_smem, y_smem, out_smem = x_buf.index(W), y_buf.index(W), out_buf.index(W)
    zero = gl.zeros([C.ROWS, C.COLS], gl.float32, scores)
    stage, parity, mine_own = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    mine = gl.to_tensor(1 if W == 0 else 0)  # the first turn of all is free
    for step in range(steps(heads, T, C)):
        head, top, blocks = sight(step, heads, together, T, C)
        top += W * C.ROWS
        a2 = gl.load(alpha + head % H) * C.UNIT
        b2 = gl.load(beta + head % H) * C.UNIT if C.BETA else 0.0
        delta = gl.zeros([C.ROWS], gl.float32, by_score)
        if C.DIVIDED and not C.COLUMNS:
            rows = top + gl.arange(0, C.ROWS, layout=by_score)
            delta = gl.load(deltas + head.to(gl.int64) * T.Q + rows, mask=rows < T.Q, other=0.0)
        if C.CAUSAL:
            if C.COLUMNS:
                seen = gl.maximum(T.K // C.COLS - top // C.COLS, 1)
            else:
                seen = gl.minimum(top // C.COLS + 1, blocks)
            for _block in range(blocks - seen):
                # The rows of another warpgroup see these.
                mbarrier.wait(full.index(stage), parity)
                mbarrier.arrive(empty.index(stage), count=1)
                stage, parity = following(stage, parity, C)
                if C.TURNS:
                    mbarrier.wait(turn.index(W), mine)
                    mbarrier.arrive(turn.index(NEXT), count=1)
                    mine ^= 1
            blocks = seen
        mbarrier.wait(own_full.index(W), mine_own)
        if C.HELD:
            x, y = x_smem.load(held), y_smem.load(held)
        else:
            x, y = x_smem, y_smem
        if EARLY:
            mbarrier.arrive(own_empty.index(W), count=1)
        mbarrier.wait(full.index(stage), parity)
        s = warpgroup_mma(x, a_buf.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(y, c_buf.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        t = score(s, stage, term_buf, a2, b2, scores, C)
        if C.CAUSAL:
            # Each warpgroup begins with its one block that crosses the diagonal. Minus infinity has a coefficient of zero.
            begin = T.K - blocks * C.COLS if C.COLUMNS else (blocks - 1) * C.COLS
            last = top - begin + gl.arange(0, C.ROWS, layout=by_score)
            cols = col_buf.load(gl.SliceLayout(0, scores))
            keep = cols[None, :] >= last[:, None] if C.COLUMNS else cols[None, :] <= last[:, None]
            t = gl.where(keep, t, -float("inf"))
        nothing = gl.zeros([C.ROWS], gl.float32, by_score)
        p32, slope, total = weighed(t, nothing, C)
        first = gl.zeros([C.ROWS, C.D], gl.float32, sums)
        if C.COLUMNS:
            p = rounded(p32, factor)
            second = gl.zeros([C.ROWS, C.D], gl.float32, sums)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        ds32, own = descended(slope, dp, nothing, stage, delta, delta_buf, scores, C)
        ds = rounded(ds32, factor)
        if C.LATE:
            for _block in range(1, blocks):
                before = stage
                stage, parity = following(stage, parity, C)
                mbarrier.wait(full.index(stage), parity)
                if C.TURNS:
                    mbarrier.wait(turn.index(W), mine)
                s = warpgroup_mma(x, a_buf.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                dp = warpgroup_mma(y, c_buf.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                first = warpgroup_mma(ds, a_buf.index(before), first, is_async=True)
                if C.COLUMNS:
                    second = warpgroup_mma(p, c_buf.index(before), second, is_async=True)
                if C.TURNS:
                    mbarrier.arrive(turn.index(NEXT), count=1)
                    mine ^= 1
                s = warpgroup_mma_wait(LAST + 1, deps=(s,))
                p32, slope, total = weighed(score(s, stage, term_buf, a2, b2, scores, C), total, C)
                if C.PINNED:
                    # Passed above: the assembler moves nothing across its branch.
                    mbarrier.wait(full.index(stage), parity)
                dp, slope = warpgroup_mma_wait(LAST, deps=(dp, slope))
                ds32, own = descended(slope, dp, own, stage, delta, delta_buf, scores, C)
                if C.COLUMNS:
                    first, second, ds, p, ds32, p32 = warpgroup_mma_wait(0, deps=(first, second, ds, p, ds32, p32))
                    p = rounded(p32, factor)
                else:
                    first, ds, ds32 = warpgroup_mma_wait(0, deps=(first, ds, ds32))
                mbarrier.arrive(empty.index(before), count=1)
                ds = rounded(ds32, factor)
            if C.COLUMNS:
                second = warpgroup_mma(p, c_buf.index(stage), second, is_async=True)
            first = warpgroup_mma(ds, a_buf.index(stage), first, is_async=True)
        else:
            if C.COLUMNS:
                second = warpgroup_mma(p, c_buf.index(stage), second, use_acc=False, is_async=True)
            first = warpgroup_mma(ds, a_buf.index(stage), first, use_acc=False, is_async=True)
            for _block in range(1, blocks):
                before = stage
                stage, parity = following(stage, parity, C)
                mbarrier.wait(full.index(stage), parity)
                if C.TURNS:
                    mbarrier.wait(turn.index(W), mine)
                s = warpgroup_mma(x, a_buf.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                # What the block before had in registers is free while the matrix unit is at these scores.
                if C.COLUMNS:
                    first, second, ds, p = warpgroup_mma_wait(1, deps=(first, second, ds, p))
                else:
                    first, ds = warpgroup_mma_wait(1, deps=(first, ds))
                dp = warpgroup_mma(y, c_buf.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                mbarrier.arrive(empty.index(before), count=1)
                if C.TURNS:
                    mbarrier.arrive(turn.index(NEXT), count=1)
                    mine ^= 1
                s = warpgroup_mma_wait(1, deps=(s,))
                p32, slope, total = weighed(score(s, stage, term_buf, a2, b2, scores, C), total, C)
                if C.COLUMNS:
                    p = rounded(p32, factor)
                if C.PINNED:
                    # Passed above: the assembler moves nothing across its branch.
                    mbarrier.wait(full.index(stage), parity)
                if C.COLUMNS:
                    second = warpgroup_mma(p, c_buf.index(stage), second, is_async=True)
                dp, slope = warpgroup_mma_wait(LAST - 1, deps=(dp, slope))
                ds32, own = descended(slope, dp, own, stage, delta, delta_buf, scores, C)
                ds = rounded(ds32, factor)
                first = warpgroup_mma(ds, a_buf.index(stage), first, is_async=True)
        if C.COLUMNS:
            first, second, ds, p = warpgroup_mma_wait(0, deps=(first, second, ds, p))
        else:
            first, ds = warpgroup_mma_wait(0, deps=(first, ds))
        mbarrier.arrive(empty.index(stage), count=1)
        stage, parity = following(stage, parity, C)
        given = alpha, beta, norms, shifts
        if C.COLUMNS:
            first, second, mark = finished(first, second, own, total, x, y, given, head, H, top, T, C)
        else:
            first, _second, mark = finished(first, first, own, total, x_smem, y_smem, given, head, H, top, T, C)
        if not EARLY:
            mbarrier.arrive(own_empty.index(W), count=1)
        mine_own ^= 1
        tma.store_wait(0)
        out_smem.store(first.to(gl.bfloat16))
        hopper.fence_async_shared()
        if top < T.Q:
            gl.store(left + head * (T.Q // C.ROWS) + top // C.ROWS, mark)
            tma.async_copy_shared_to_global(first_desc, [head * T.Q + top, 0], out_smem)
        if C.COLUMNS:
            tma.store_wait(0)
            out_smem.store(second.to(gl.bfloat16))
            hopper.fence_async_shared()
            if top < T.Q:
                tma.async_copy_shared_to_global(second_desc, [head * T.Q + top, 0], out_smem)
    tma.store_wait(0)


@gluon.jit
def share_out(descs, tensors, counts, T, C: gl.constexpr):
    """Buffers and barriers of one program, and the parts of its warps."""
    x_desc, y_desc, a_desc, c_desc, first_desc, _ = descs
    N: gl.constexpr = C.CONSUMERS
    S: gl.constexpr = C.STAGES
    x_buf = gl.allocate_shared_memory(gl.bfloat16, [N, C.ROWS, C.D], x_desc.layout)
    y_buf = gl.allocate_shared_memory(gl.bfloat16, [N, C.ROWS, C.D], y_desc.layout)
    a_buf = gl.allocate_shared_memory(gl.bfloat16, [S, C.COLS, C.D], a_desc.layout)
    c_buf = gl.allocate_shared_memory(gl.bfloat16, [S, C.COLS, C.D], c_desc.layout)
    out_buf = gl.allocate_shared_memory(gl.bfloat16, [N, C.ROWS, C.D], first_desc.layout)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    term_buf = gl.allocate_shared_memory(gl.float32, [S, C.COLS if C.DISTANCE else 1], line)
    delta_buf = gl.allocate_shared_memory(gl.float32, [S, C.COLS if C.COLUMNS and C.DIVIDED else 1], line)
    # Columns are read when they are needed; computed, they would be kept in registers.
    col_buf = gl.allocate_shared_memory(gl.int32, [C.COLS if C.CAUSAL else 1], line)
    if C.CAUSAL:
        col_buf.store(gl.arange(0, C.COLS, layout=gl.BlockedLayout([1], [32], [4], [0])))
    full, empty = barriers_of(S, 3 if C.DISTANCE else 2), barriers_of(S, N)
    own_full, own_empty, turn = barriers_of(N, 2), barriers_of(N, 1), barriers_of(N, 1)
    buffers = x_buf, y_buf, a_buf, c_buf, out_buf, term_buf, delta_buf, col_buf
    barriers = full, empty, own_full, own_empty, turn
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    third: gl.constexpr = 2
    if N == 2:
        gl.warp_specialize([
            (consume, (first, descs, tensors, counts, buffers, barriers, T, C)),
            (consume, (second, descs, tensors, counts, buffers, barriers, T, C)),
            (produce, (descs, tensors, counts, buffers, barriers, T, C)),
        ], [4, 1], [C.REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (first, descs, tensors, counts, buffers, barriers, T, C)),
            (consume, (second, descs, tensors, counts, buffers, barriers, T, C)),
            (consume, (third, descs, tensors, counts, buffers, barriers, T, C)),
            (produce, (descs, tensors, counts, buffers, barriers, T, C)),
        ], [4, 4, 1], [C.REGISTERS, C.REGISTERS, 24])  # fmt: skip


@gluon.jit(do_not_specialize=["heads", "H", "together"])
def backward_rows(
    q_desc, do_desc, k_desc, v_desc, dq_desc, alpha, beta, norms, shifts, deltas, left, heads, H, together, T, C: gl.constexpr
):  # fmt: skip
    """The gradient of queries. `norms` are half those of keys squared, `shifts` log2 of the sums of rows or half their squared norms."""
    descs = q_desc, do_desc, k_desc, v_desc, dq_desc, dq_desc
    share_out(descs, (alpha, beta, norms, shifts, deltas, left), (heads, H, together), T, C)


@gluon.jit(do_not_specialize=["heads", "H", "together"])
def backward_columns(
    k_desc, v_desc, q_desc, do_desc, dk_desc, dv_desc, alpha, beta, norms, shifts, deltas, left, heads, H, together, T, C: gl.constexpr
):  # fmt: skip
    """The gradients of keys and values."""
    descs = k_desc, v_desc, q_desc, do_desc, dk_desc, dv_desc
    share_out(descs, (alpha, beta, norms, shifts, deltas, left), (heads, H, together), T, C)

"""The plain backward pass on Hopper, in Gluon: one kernel of five products, with no mask but causality.

Two warpgroups keep 64 keys and values each and walk through blocks of queries that one warp fetches. Scores are transposed, a row for
every key, so that coefficients and gradients of scores are the left sides of the next products as they are:

    s = k q', dp = v do', p = f(s), ds = f'(s) dp,    dv += p do, dk += ds q, dq += ds' k

What is added to all scores of a query is added by the matrix unit as well, three columns of bfloat16 times ones: a product that began
with it would wait for registers. For dq the warpgroups hand their ds to one another through shared memory, and each multiplies half of it, one block behind: neither
waits for the other unless it is a whole block ahead. Sums of dq over tiles of keys are added up in float32 in global memory, in any order.
"""

from __future__ import annotations

import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from heedful.ops.fused._backward import FAINT
from heedful.ops.fused._hopper import (
    barriers_of,
    fetch,
    following,
    place,
    store,
    tiles_of,
    turn_of,
)


@gluon.jit
def rounded(x):
    """In bfloat16, where it is written: later, both would be kept in registers."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=False, pack=2
    )


@gluon.jit
def anew(x):
    """The same number, of which LLVM knows nothing. It takes addresses that follow from it out of loops, where they fill registers that
    the loop lacks; the assembler makes them in the loop for next to nothing."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def weighed(t, C: gl.constexpr):
    """Coefficients of scores in the function's unit, and their slopes; that of `relu_squared` is half as large."""
    if C.ACT == "sigmoid":
        # Each by itself: what is not a number spoils no neighbour.
        work: gl.constexpr = "{ .reg .f32 x; neg.f32 x, $1; ex2.approx.ftz.f32 x, x; add.f32 x, x, 0f3F800000; rcp.approx.ftz.f32 $0, x; }"
        p = gl.inline_asm_elementwise(work, "=f,f", [t], dtype=gl.float32, is_pure=True, pack=1)
        return p, p - p * p
    elif C.ACT == "relu_squared":
        t = gl.maximum(t, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return t * t, t
    else:
        p = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [t], dtype=gl.float32, is_pure=True, pack=1)
        return p, p


@gluon.jit
def scale(alpha, h, C: gl.constexpr):
    """That of a head in the function's unit; not zero where terms of scores are divided by it."""
    a2 = gl.load(alpha + h) * C.UNIT
    return gl.where(gl.abs(a2) < FAINT, FAINT, a2) if C.DISTANCE or C.DIVIDED else a2


@gluon.jit
def product(x, y, terms, ones, zero, HAS_TERMS: gl.constexpr):
    """Has the matrix unit multiply rows of x by rows of y, to whose products `terms` add one number each."""
    if HAS_TERMS:
        found = warpgroup_mma(ones, terms.permute((1, 0)), zero, use_acc=False, is_async=True)
        return warpgroup_mma(x, y.permute((1, 0)), found, is_async=True)
    else:
        return warpgroup_mma(x, y.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def summed(x, C: gl.constexpr):
    """Sums of rows; at head size 128, where there are registers for it, of what one thread holds of them: those of four lanes are
    added up once a tile, not once a block."""
    if C.D == 128:
        return gl.sum(gl.sum(gl.reshape(x, [C.ROWS, C.COLS // 8, 4, 2]), 3), 1)
    else:
        return gl.sum(x, 1)


@gluon.jit
def sight(tile, heads, together, T, C: gl.constexpr):
    """The head and the first key of a tile, and how many blocks of queries, the last, see it."""
    head, top, blocks = place(tile, heads, together, T, C)
    if C.CAUSAL:
        # The first keys are seen by most queries.
        tall: gl.constexpr = C.CONSUMERS * C.ROWS
        top = (gl.cdiv(T.Q, tall) - 1) * tall - top
        blocks = T.K // C.COLS - top // C.COLS
    return head, top, blocks


@gluon.jit
def produce(descs, counts, buffers, barriers, T, C: gl.constexpr):
    """Blocks of queries and gradients from the diagonal on; the keys and values of a tile with the first of them."""
    k_desc, v_desc, q_desc, do_desc, term_desc, delta_desc, _, _, _ = descs
    heads, H, together = counts
    k_buf, v_buf, q_buf, do_buf, _, _, term_buf, delta_buf, _, _ = buffers
    q_full, do_full, empty, own_full, own_empty, _, _, _ = barriers
    stage, parity = gl.to_tensor(0), gl.to_tensor(1)
    step, tile = gl.to_tensor(0), gl.program_id(0)
    while tile < tiles_of(heads, T, C):
        head, top, blocks = sight(tile, heads, together, T, C)
        own, turn = step % C.OWN, (step // C.OWN + 1) % 2
        b, h = head // H, head % H
        k_row, v_row = b * T.k[0] + h * T.k[1] + top, b * T.v[0] + h * T.v[1] + top
        q_row, do_row = b * T.q[0] + h * T.q[1], b * T.do[0] + h * T.do[1]
        at = T.K - blocks * C.COLS
        for i in range(blocks):
            if i == 0:
                for w in gl.static_range(C.CONSUMERS):
                    to = k_buf.index(own * C.CONSUMERS + w)
                    fetch(k_desc, k_row + w * C.ROWS, h * T.k[2], own_full.index(own), own_empty.index(own), turn, to)
            free, line = empty.index(stage), head * T.K + at
            fetch(q_desc, q_row + at, h * T.q[2], q_full.index(stage), free, parity, q_buf.index(stage))
            if C.DISTANCE or C.DIVIDED:
                fetch(term_desc, line, 0, q_full.index(stage), free, parity, term_buf.index(stage))
            if i == 0:
                for w in gl.static_range(C.CONSUMERS):
                    to = v_buf.index(own * C.CONSUMERS + w)
                    fetch(v_desc, v_row + w * C.ROWS, h * T.v[2], own_full.index(own), own_empty.index(own), turn, to)
            fetch(do_desc, do_row + at, h * T.do[2], do_full.index(stage), free, parity, do_buf.index(stage))
            if C.DIVIDED:
                fetch(delta_desc, line, 0, do_full.index(stage), free, parity, delta_buf.index(stage))
            stage, parity = following(stage, parity, C.STAGES)
            at += C.COLS
        step += 1
        tile = turn_of(step)


@gluon.jit
def of_queries(W: gl.constexpr, stage, own, ds_buf, k_buf, C: gl.constexpr):
    """Has the matrix unit multiply this warpgroup's half of dq: half of the queries of a block, or, where these are few, of the columns."""
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dq = gl.zeros([64, 64], gl.float32, half)
    for w in gl.static_range(C.CONSUMERS):
        ds, k = ds_buf.index(stage * C.CONSUMERS + w), k_buf.index(own * C.CONSUMERS + w)
        if C.COLS == 128:
            ds = ds.slice(W * 64, 64, 1)
        if C.D == 128:
            k = k.slice(W * 64, 64, 1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=w > 0, is_async=True)
    return dq


@builtin
def add_shared_to_global(desc, coord, src, _semantic=None):
    """Has the copy engine add a tile to what is there; Gluon has a word for it from Triton 3.8 on."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else add_shared_to_global


@builtin
def shown(memory, *form, _semantic=None):
    """The same shared memory in another form; its method was a private one before Triton 3.9."""
    kind = type(memory)
    method = kind.reinterpret if hasattr(kind, "reinterpret") else kind._reinterpret
    return method(memory, *form, _semantic=_semantic)


@gluon.jit
def add_up(W: gl.constexpr, sums_desc, dq, dq_smem, head, at, T, C: gl.constexpr):
    """Adds this warpgroup's half of dq to the sums in global memory."""
    first: gl.constexpr = W * 64 if C.COLS == 128 else 0
    beside: gl.constexpr = W * 64 if C.D == 128 else 0
    tma.store_wait(0)
    dq_smem.store(dq)
    hopper.fence_async_shared()
    add(sums_desc, [head * T.K + at + first, beside], dq_smem)


@gluon.jit
def hand_over(W: gl.constexpr, ds, stage, parity, ds_buf, ds_full, ds_empty, C: gl.constexpr):
    """Puts this warpgroup's ds where both read it, once both are done with what was there."""
    mbarrier.wait(ds_empty.index(stage), parity ^ 1)
    ds_buf.index(stage * C.CONSUMERS + W).store(ds)
    hopper.fence_async_shared()
    mbarrier.arrive(ds_full.index(stage), count=1)


@gluon.jit
def before(stage, parity, N: gl.constexpr):
    """What `following` leads on from."""
    return gl.where(stage == 0, N - 1, stage - 1), gl.where(stage == 0, parity ^ 1, parity)


@gluon.jit
def hidden(W: gl.constexpr, ring, buffers, barriers, C: gl.constexpr):
    """A block of queries that see no key of this warpgroup: gradients of scores are zeros, which the other one multiplies as well."""
    stage, parity = ring
    _, _, _, _, ds_buf, _, _, _, _, _ = buffers
    _, _, empty, _, _, ds_full, ds_empty, turns = barriers
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.COLS, 16])
    mbarrier.arrive(empty.index(stage), count=1)
    if C.TURNS:
        mbarrier.wait(turns.index(W), stage if W else stage ^ 1)
        mbarrier.arrive(turns.index(1 - W), count=1)
    hand_over(W, gl.zeros([C.ROWS, C.COLS], gl.bfloat16, scores), stage, parity, ds_buf, ds_full, ds_empty, C)


@gluon.jit
def meet(
    W: gl.constexpr, IS_FIRST: gl.constexpr, IS_ALONE: gl.constexpr, CROSSES: gl.constexpr, ring, at, mine, keys, sums_of_keys, dq_smem, sums_desc, buffers, barriers, T, C: gl.constexpr
):  # fmt: skip
    """The keys of one warpgroup meet a block of queries that begins at `at`: their first, one with no other before it, one that crosses the diagonal.

    While coefficients are made of scores the matrix unit multiplies for dp, while gradients of scores are made for dv, while dq is
    added up for dk. All is waited for in two places, where registers are to be had again.
    """
    stage, parity = ring
    last, earlier = before(stage, parity, C.STAGES)
    head, own, term, a2, b2 = keys
    own = anew(own)
    dk, dv, total = sums_of_keys
    k_buf, v_buf, q_buf, do_buf, ds_buf, _, term_buf, delta_buf, one_buf, col_buf = buffers
    q_full, do_full, empty, _, _, ds_full, ds_empty, turns = barriers
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.COLS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    k, v, q, do = (
        k_buf.index(own * C.CONSUMERS + W),
        v_buf.index(own * C.CONSUMERS + W),
        q_buf.index(stage),
        do_buf.index(stage),
    )
    zero = gl.zeros([C.ROWS, C.COLS], gl.float32, scores)
    mbarrier.wait(q_full.index(stage), parity)
    s = product(k, q, term_buf.index(stage), one_buf, zero, C.DISTANCE or C.DIVIDED)
    mbarrier.wait(do_full.index(stage), parity)
    dp = product(v, do, delta_buf.index(stage), one_buf, zero, C.DIVIDED)
    s = warpgroup_mma_wait(2 if C.DIVIDED else 1, deps=(s,))
    if C.TURNS:
        mbarrier.wait(turns.index(W), stage if W else stage ^ 1)
    t = s * a2
    if C.DISTANCE:
        t += term[:, None]
    elif C.BETA:
        t += b2
    if CROSSES:
        # Minus infinity has a coefficient of zero.
        first = gl.arange(0, C.ROWS, layout=gl.SliceLayout(1, scores)) + (mine - at)
        keep = col_buf.load(gl.SliceLayout(0, scores))[None, :] >= first[:, None]
        t = gl.where(keep, t, -float("inf"))
    p32, slope = weighed(t, C)
    p = gl.convert_layout(rounded(p32), factor)
    dv = warpgroup_mma(p, do, dv, use_acc=not IS_FIRST, is_async=True)
    if C.TURNS:
        mbarrier.arrive(turns.index(1 - W), count=1)
    dp, slope = warpgroup_mma_wait(1, deps=(dp, slope))
    ds32 = slope * dp
    if CROSSES:
        ds32 = gl.where(keep, ds32, 0.0)
    if C.DIVIDED and C.DISTANCE:
        total += summed(ds32, C)
    ds = rounded(ds32)
    dv, p = warpgroup_mma_wait(0, deps=(dv, p))
    hand_over(W, ds, stage, parity, ds_buf, ds_full, ds_empty, C)
    ds = gl.convert_layout(ds, factor)
    if IS_ALONE:
        dk = warpgroup_mma(ds, q, dk, use_acc=False, is_async=True)
    else:
        mbarrier.wait(ds_full.index(last), earlier)
        dq = of_queries(W, last, own, ds_buf, k_buf, C)
        dk = warpgroup_mma(ds, q, dk, use_acc=not IS_FIRST, is_async=True)
        dq = warpgroup_mma_wait(1, deps=(dq,))
        mbarrier.arrive(ds_empty.index(last), count=1)
        add_up(W, sums_desc, dq, dq_smem, head, at - C.COLS, T, C)
    dk, ds = warpgroup_mma_wait(0, deps=(dk, ds))
    mbarrier.arrive(empty.index(stage), count=1)
    return dk, dv, total


@gluon.jit
def consume(W: gl.constexpr, descs, tensors, counts, buffers, barriers, T, C: gl.constexpr):
    """The keys of one warpgroup, tile by tile."""
    _, _, _, _, _, _, dk_desc, dv_desc, sums_desc = descs
    alpha, beta, norms, left = tensors
    heads, H, together = counts
    k_buf, v_buf, _, _, ds_buf, dq_buf, _, _, _, _ = buffers
    _, _, _, own_full, own_empty, ds_full, ds_empty, _ = barriers
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.COLS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16])
    by_key: gl.constexpr = gl.SliceLayout(1, scores)
    # Where blocks are as small as the keys of a warpgroup, none of the first one's queries sees the keys of the second.
    HIDDEN: gl.constexpr = W == 1 and C.CAUSAL and C.COLS == C.ROWS
    dq_smem = dq_buf.index(W)
    # As many bytes in another form, of which a tile of 64 columns takes half.
    out_smem = shown(dq_smem, gl.bfloat16, [8192 // C.D, C.D], dk_desc.layout).slice(0, C.ROWS, 0)
    ring = gl.to_tensor(0), gl.to_tensor(0)
    step, tile = gl.to_tensor(0), gl.program_id(0)
    while tile < tiles_of(heads, T, C):
        head, top, blocks = sight(tile, heads, together, T, C)
        mine, own = top + W * C.ROWS, step % C.OWN
        a2 = scale(alpha, head % H, C)
        b2 = gl.load(beta + head % H) * C.UNIT if C.BETA else 0.0
        term = gl.zeros([C.ROWS], gl.float32, by_key)
        mbarrier.wait(own_full.index(own), step // C.OWN % 2)
        if C.DISTANCE:
            x = k_buf.index(own * C.CONSUMERS + W).load(sums).to(gl.float32)
            half = gl.convert_layout(gl.sum(x * x, 1) * 0.5, by_key)
            term = b2 - a2 * half
            if C.CAUSAL:
                rows = mine + gl.arange(0, C.ROWS, layout=by_key)
                gl.store(norms + head.to(gl.int64) * T.Q + rows, half)
        keys = head, own, term, a2, b2
        at = T.K - blocks * C.COLS
        dk = gl.zeros([C.ROWS, C.D], gl.float32, sums)
        dv = gl.zeros([C.ROWS, C.D], gl.float32, sums)
        sums_of_keys = dk, dv, summed(gl.zeros([C.ROWS, C.COLS], gl.float32, scores), C)
        if HIDDEN:
            hidden(W, ring, buffers, barriers, C)
            ring = following(ring[0], ring[1], C.STAGES)
            at += C.COLS
        dk, dv, total = meet(
            W, True, not HIDDEN, C.CAUSAL, ring, at, mine, keys, sums_of_keys, dq_smem, sums_desc, buffers, barriers, T, C
        )  # fmt: skip
        ring = following(ring[0], ring[1], C.STAGES)
        for then in range(at + C.COLS, T.K, C.COLS):
            dk, dv, total = meet(
                W, False, False, False, ring, then, mine, keys, (dk, dv, total), dq_smem, sums_desc, buffers, barriers, T, C
            )  # fmt: skip
            ring = following(ring[0], ring[1], C.STAGES)
        stage, parity = before(ring[0], ring[1], C.STAGES)
        mbarrier.wait(ds_full.index(stage), parity)
        dq = of_queries(W, stage, own, ds_buf, k_buf, C)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        mbarrier.arrive(ds_empty.index(stage), count=1)
        add_up(W, sums_desc, dq, dq_smem, head, T.K - C.COLS, T, C)
        if C.DISTANCE:
            k, v = k_buf.index(own * C.CONSUMERS + W), v_buf.index(own * C.CONSUMERS + W)
            if C.DIVIDED:
                by = gl.convert_layout(gl.sum(total, 1) if C.D == 128 else total, gl.SliceLayout(1, sums))
            else:
                # sum_i p_ij (do_i . v_j) = dv_j . v_j
                by = gl.sum(dv * v.load(sums).to(gl.float32), 1)
            dk -= by[:, None] * k.load(sums).to(gl.float32)
        mbarrier.arrive(own_empty.index(own), count=1)
        dk *= gl.load(alpha + head % H) * (2.0 if C.ACT == "relu_squared" else 1.0)
        if C.CAUSAL:
            # What is not finite reaches keys that nobody sees it through: 0 x NaN = NaN.
            mark = gl.max(gl.where(gl.sum(dk * 0.0 + dv * 0.0, 1) == 0.0, 0, 1), 0)
            gl.store(left + head * (T.Q // C.ROWS) + mine // C.ROWS, mark)
        tma.store_wait(0)
        out_smem.store(dk.to(gl.bfloat16))
        hopper.fence_async_shared()
        store(dk_desc, [head * T.Q + mine, 0], out_smem)
        tma.store_wait(0)
        out_smem.store(dv.to(gl.bfloat16))
        hopper.fence_async_shared()
        store(dv_desc, [head * T.Q + mine, 0], out_smem)
        step += 1
        tile = turn_of(step)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "H", "together"])
def backward_kernel(
    k_desc, v_desc, q_desc, do_desc, term_desc, delta_desc, dk_desc, dv_desc, sums_desc, alpha, beta, norms, left, heads, H, together, T, C: gl.constexpr
):  # fmt: skip
    """Buffers and barriers of one program, and the parts of its warps.

    Terms are of scores, deltas of their gradients, both by `_backward.clear`; under causality `norms` get half the squared norms of keys.
    """
    gdc_launch_dependents()
    gdc_wait()
    N: gl.constexpr = C.CONSUMERS
    S: gl.constexpr = C.STAGES
    k_buf = gl.allocate_shared_memory(gl.bfloat16, [C.OWN * N, C.ROWS, C.D], k_desc.layout)
    v_buf = gl.allocate_shared_memory(gl.bfloat16, [C.OWN * N, C.ROWS, C.D], v_desc.layout)
    q_buf = gl.allocate_shared_memory(gl.bfloat16, [S, C.COLS, C.D], q_desc.layout)
    do_buf = gl.allocate_shared_memory(gl.bfloat16, [S, C.COLS, C.D], do_desc.layout)
    handed: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ds_buf = gl.allocate_shared_memory(gl.bfloat16, [S * N, C.ROWS, C.COLS], handed)
    dq_buf = gl.allocate_shared_memory(gl.float32, [N, 64, 64], sums_desc.layout)
    HAS_TERMS: gl.constexpr = C.DISTANCE or C.DIVIDED
    narrow: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    term_buf = gl.allocate_shared_memory(gl.bfloat16, [S, C.COLS if HAS_TERMS else 8, 16], narrow)
    delta_buf = gl.allocate_shared_memory(gl.bfloat16, [S, C.COLS if C.DIVIDED else 8, 16], narrow)
    one_buf = gl.allocate_shared_memory(gl.bfloat16, [C.ROWS if HAS_TERMS else 8, 16], narrow)
    if HAS_TERMS:
        one_buf.store(gl.full([C.ROWS, 16], 1.0, gl.bfloat16, gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])))
        hopper.fence_async_shared()
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # Columns are read when they are needed; computed, they would be kept in registers.
    col_buf = gl.allocate_shared_memory(gl.int32, [C.COLS if C.CAUSAL else 1], line)
    if C.CAUSAL:
        col_buf.store(gl.arange(0, C.COLS, layout=gl.BlockedLayout([1], [32], [4], [0])))
    q_full, do_full = barriers_of(S, 2 if HAS_TERMS else 1), barriers_of(S, 2 if C.DIVIDED else 1)
    empty = barriers_of(S, N)
    own_full, own_empty = barriers_of(C.OWN, 2 * N), barriers_of(C.OWN, N)
    ds_full, ds_empty, turns = barriers_of(S, N), barriers_of(S, N), barriers_of(N, 1)
    descs = k_desc, v_desc, q_desc, do_desc, term_desc, delta_desc, dk_desc, dv_desc, sums_desc
    tensors = alpha, beta, norms, left
    counts = heads, H, together
    buffers = k_buf, v_buf, q_buf, do_buf, ds_buf, dq_buf, term_buf, delta_buf, one_buf, col_buf
    barriers = q_full, do_full, empty, own_full, own_empty, ds_full, ds_empty, turns
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize([
        (consume, (first, descs, tensors, counts, buffers, barriers, T, C)),
        (consume, (second, descs, tensors, counts, buffers, barriers, T, C)),
        (produce, (descs, counts, buffers, barriers, T, C)),
    ], [4, 1], [C.REGISTERS, 24])  # fmt: skip

"""The plain forward pass on Hopper, in Gluon: one warp fetches keys and values, warpgroups of 64 rows take turns at the
matrix unit, and while one multiplies another turns its scores into coefficients. Of few keys four more warps take the norms.

It computes what `_forward.forward` does, with no mask but causality. Rows that it cannot serve get NaN in `stat`.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from heedful.ops.fused._forward import LARGE, LEAST, LITTLE, ROOM

# What the copy engine does, by the names that this version of Triton has for it.
load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


def _pair(work: str, first: int = 1, behind: str = "") -> str:
    """Assembly that does the same to two scores and rounds them to bfloat16."""
    moved = f"mov.f32 x, ${first}; {work} mov.f32 y, ${first + 1}; {work.replace('x,', 'y,').replace(' x', ' y')}"
    return f"{{ .reg .f32 x, y; {moved} cvt.rn.bf16x2.f32 $0, y, x; {behind} }}"


def _four(scores: tuple[int, ...], to: tuple[int, int]) -> str:
    """1 / (1 + 2^-t) with one reciprocal between four, as `activations._quick_sigmoid`."""
    lines = [f"ex2.approx.ftz.f32 a{i}, ${score}; add.f32 b{i}, a{i}, 0f3F800000;" for i, score in enumerate(scores)]
    lines += ["mul.f32 m0, b0, b1; mul.f32 m1, b2, b3; mul.f32 m, m0, m1; rcp.approx.ftz.f32 r, m;"]
    lines += ["mul.f32 m, r, m1; mul.f32 r, r, m0;"]
    lines += [f"mul.f32 a{i}, a{i}, b{i ^ 1}; mul.f32 a{i}, a{i}, {'mmrr'[i]};" for i in range(4)]
    return " ".join([*lines, f"cvt.rn.bf16x2.f32 ${to[0]}, a1, a0; cvt.rn.bf16x2.f32 ${to[1]}, a3, a2;"])


EXP = gl.constexpr(_pair("ex2.approx.ftz.f32 x, x;"))
# Both, and what they were rounded to.
COUNTED = gl.constexpr(_pair("ex2.approx.ftz.f32 x, x;", 3, "shl.b32 $1, $0, 16; and.b32 $2, $0, 0xFFFF0000;"))
RELU_SQUARED = gl.constexpr(_pair("max.NaN.f32 x, x, 0f00000000; mul.f32 x, x, x;"))
# 0.5 tanh(t) + 0.5 of half the score: the sum of a row tells whether its coefficients are large enough for it.
_TANH = "tanh.approx.f32 x, x; fma.rn.f32 x, x, 0f3F000000, 0f3F000000;"
TANH = gl.constexpr(_pair(_TANH))
# Both, and as they are.
SIGMOID = gl.constexpr(_pair(_TANH, 3, "mov.f32 $1, x; mov.f32 $2, y;"))
# A thread holds two scores of one row, two of the row eight below, and so on: four of one row go together.
EXACT = gl.constexpr(
    "{ .reg .f32 a0, a1, a2, a3, b0, b1, b2, b3, m0, m1, m, r; "
    + f"{_four((4, 5, 8, 9), (0, 2))} {_four((6, 7, 10, 11), (1, 3))} }}"
)

# bfloat16 as float32.
UNPACKED = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")


@gluon.jit
def weighed(t, total, C: gl.constexpr):
    """bfloat16 coefficients of scores in the function's unit, and the sums of rows, where they are added here, with theirs.

    Sums are of coefficients as they are multiplied: a row of one large one then returns its value unrounded.
    """
    if (C.DIVIDED or C.ACT == "tanh") and not C.ONES:
        both: gl.constexpr = SIGMOID if C.ACT == "tanh" else COUNTED
        p, counted = gl.inline_asm_elementwise(
            both, "=r,=f,=f,f,f", [t], dtype=(gl.bfloat16, gl.float32), is_pure=True, pack=2
        )
        return p, total + gl.sum(counted, 1)
    elif C.ACT == "sigmoid":
        # Beyond 2^30 a coefficient is one, and four such factors do not overflow.
        t = gl.minimum(t, 30.0, propagate_nan=tl.PropagateNan.ALL)
        form: gl.constexpr = "=r,=r,=r,=r,f,f,f,f,f,f,f,f"
        return gl.inline_asm_elementwise(EXACT, form, [t], dtype=gl.bfloat16, is_pure=True, pack=8), total
    else:
        work: gl.constexpr = EXP if C.ACT == "exp" else TANH if C.ACT == "tanh" else RELU_SQUARED
        return gl.inline_asm_elementwise(work, "=r,f,f", [t], dtype=gl.bfloat16, is_pure=True, pack=2), total


@gluon.jit
def tiles_of(heads, T, C: gl.constexpr):
    return heads * gl.cdiv(T.Q, C.CONSUMERS * C.ROWS)


@gluon.jit
def place(tile, heads, together, T, C: gl.constexpr):
    """The head and the first row of a tile, and how many blocks of keys it sees.

    Under causality the longest tiles of a few heads come first.
    """
    tall: gl.constexpr = C.CONSUMERS * C.ROWS
    parts = gl.cdiv(T.Q, tall)
    blocks = T.K // C.COLS
    if C.CAUSAL:
        first = tile // (parts * together) * together
        side = gl.maximum(gl.minimum(heads - first, together), 1)
        inside = tile - first * parts
        part, head = parts - 1 - inside // side, first + inside % side
        blocks = gl.minimum((part * tall + tall - 1) // C.COLS + 1, blocks)
    else:
        head = tile // parts
        part = tile - head * parts
    return head, part * tall, blocks


@gluon.jit
def turn_of(step):
    """The tile of this program at a step, where each knows its own: programs are served forwards and backwards by turns."""
    programs, program = gl.num_programs(0), gl.program_id(0)
    return step * programs + gl.where(step % 2 == 0, program, programs - 1 - program)


@gluon.jit
def ticket(tickets, C: gl.constexpr):
    """Asks for the tile behind a program's own; one lane does, and whoever reads the number waits for it.

    Multiprocessors are not equally fast: a program that is done takes whichever tile is next.
    """
    if C.TICKETS:
        lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        lanes = gl.arange(0, 32, layout=lane)
        return gl.atomic_add(tickets + lanes, gl.full([32], 1, gl.int32, lane), mask=lanes == 0, sem="relaxed")
    else:
        return gl.to_tensor(0)


@gluon.jit
def draw(step, asked, slips, C: gl.constexpr):
    """The tile behind that of a step, for the warp that fetches, which hands it to the others."""
    if C.TICKETS:
        slip_buf, slip_full, slip_empty = slips
        lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        at = step % 2
        tile = gl.num_programs(0) + gl.max(gl.where(gl.arange(0, 32, layout=lane) == 0, asked, 0), 0)
        mbarrier.wait(slip_empty.index(at), (step // 2 + 1) % 2)
        slip_buf.index(at).store(gl.full([1], tile, gl.int32, lane))
        mbarrier.arrive(slip_full.index(at), count=1)
        return tile
    else:
        return turn_of(step + 1)


@gluon.jit
def drawn(step, slips, C: gl.constexpr):
    """The same for the others."""
    if C.TICKETS:
        slip_buf, slip_full, slip_empty = slips
        at = step % 2
        mbarrier.wait(slip_full.index(at), step // 2 % 2)
        tile = gl.max(slip_buf.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        mbarrier.arrive(slip_empty.index(at), count=1)
        return tile
    else:
        return turn_of(step + 1)


@gluon.jit
def following(stage, parity, N: gl.constexpr):
    """The next place of a ring, and the parity of its barriers' phase."""
    wrap = stage == N - 1
    return gl.where(wrap, 0, stage + 1), gl.where(wrap, parity ^ 1, parity)


@gluon.jit
def fetch(desc, row, col, full, empty, parity, to):
    """Has the copy engine fill a buffer once it is free."""
    mbarrier.wait(empty, parity)
    mbarrier.expect(full, desc.block_type.nbytes)
    load(desc, [row, col], full, to)


@gluon.jit
def produce(given, T, C: gl.constexpr):
    """Keys and values from the last block in sight to the first, keys one block ahead, queries behind the first keys."""
    descs, tensors, counts, buffers, barriers, slips = given
    q_desc, k_desc, v_desc, _ = descs
    alpha, beta, norms, _, tickets = tensors
    heads, H, G, together = counts
    q_buf, k_buf, v_buf, _, term_buf, _, _ = buffers
    q_full, q_empty, k_in, k_full, k_empty, v_full, v_empty, _ = barriers
    READS: gl.constexpr = C.DISTANCE and not C.MEASURED
    cols = gl.arange(0, C.COLS, layout=gl.BlockedLayout([4], [32], [1], [0]))
    ks, kp, vs, vp = gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(0), gl.to_tensor(1)
    if READS:
        gdc_wait()  # for norms
    step, tile = gl.to_tensor(0), gl.program_id(0)
    while tile < tiles_of(heads, T, C):
        asked = ticket(tickets, C)
        head, top, blocks = place(tile, heads, together, T, C)
        b, h = head // H, head % H
        g = h // (H // G)
        q_row, k_row, v_row = b * T.q[0] + h * T.q[1] + top, b * T.k[0] + g * T.k[1], b * T.v[0] + g * T.v[1]
        if READS:
            a2, b2 = of_head(alpha, beta, h, C)
            ours = norms + (b * G + g).to(gl.int64) * (T.K // C.COLS * C.COLS) + cols
            ahead = gl.load(ours + (blocks - 1) * C.COLS)
        for i in range(blocks + 1):
            at = (blocks - 1 - i) * C.COLS
            if i < blocks:
                fetch(k_desc, k_row + at, g * T.k[2], k_in.index(ks), k_empty.index(ks), kp, k_buf.index(ks))
            if i == 0:
                qp = (step // C.AHEAD + 1) % 2
                for w in gl.static_range(C.CONSUMERS):
                    row, to = q_row + w * C.ROWS, step % C.AHEAD * C.CONSUMERS + w
                    fetch(q_desc, row, h * T.q[2], q_full.index(to), q_empty.index(to), qp, q_buf.index(to))
            if i < blocks:
                if READS:
                    # Twice as many places as of keys, since these are given back before their terms are read.
                    term_buf.index(ks + C.STAGES * (kp ^ 1)).store(b2 - a2 * ahead)
                    mbarrier.arrive(k_full.index(ks), count=1)
                    ahead = gl.load(ours + gl.maximum(at - C.COLS, 0))
                ks, kp = following(ks, kp, C.STAGES)
            if i > 0:
                row = v_row + at + C.COLS
                fetch(v_desc, row, g * T.v[2], v_full.index(vs), v_empty.index(vs), vp, v_buf.index(vs))
                vs, vp = following(vs, vp, C.STAGES)
        tile = draw(step, asked, slips, C)
        step += 1


@gluon.jit
def measure(given, T, C: gl.constexpr):
    """Takes norms of keys as they come in, and hands both on; those of whole heads are written down for other kernels."""
    _, tensors, counts, buffers, barriers, _ = given
    alpha, beta, norms, _, _ = tensors
    heads, H, G, together = counts
    _, k_buf, _, _, term_buf, _, _ = buffers
    _, _, k_in, k_full, _, _, _, _ = barriers
    LINES: gl.constexpr = 64  # at a time, for want of registers
    part: gl.constexpr = gl.BlockedLayout([1, C.D // 2], [16, 2], [4, 1], [1, 0])
    lines = gl.arange(0, LINES, layout=gl.SliceLayout(1, part))
    ks, kp = gl.to_tensor(0), gl.to_tensor(0)
    step, tile = gl.to_tensor(0), gl.program_id(0)
    while tile < tiles_of(heads, T, C):
        head, top, blocks = place(tile, heads, together, T, C)
        a2, b2 = of_head(alpha, beta, head % H, C)
        sees_all = blocks * C.COLS == T.K if C.CAUSAL else top == 0
        ours = norms + (head // H * G + head % H // (H // G)).to(gl.int64) * T.K + lines
        for i in range(blocks):
            at = (blocks - 1 - i) * C.COLS
            mbarrier.wait(k_in.index(ks), kp)
            for j in gl.static_range(0, C.COLS, LINES):
                x = gl.inline_asm_elementwise(
                    UNPACKED, "=f,=f,r", [k_buf.index(ks).slice(j, LINES).load(part)], dtype=gl.float32, is_pure=True, pack=2
                )  # fmt: skip
                # A few sums side by side, which do not wait for one another.
                sums = gl.sum(gl.sum(gl.reshape(x * x, [LINES, C.D // 16, 16]), 2), 1)
                half = 0.5 * gl.convert_layout(sums, gl.SliceLayout(1, part))
                term_buf.index(ks + C.STAGES * kp).slice(j, LINES).store(b2 - a2 * half)
                gl.store(ours + at + j, half, mask=sees_all)
            mbarrier.arrive(k_full.index(ks), count=1)
            ks, kp = following(ks, kp, C.STAGES)
        step += 1
        tile = turn_of(step)


@gluon.jit
def of_head(alpha, beta, h, C: gl.constexpr):
    """Scale and term of the scores of a head, in the function's unit."""
    return gl.load(alpha + h) * C.UNIT, gl.load(beta + h) * C.UNIT if C.BETA else 0.0


@gluon.jit
def score(s, terms, a2, b2, layout: gl.constexpr, C: gl.constexpr):
    """Scores in the function's unit."""
    if C.DISTANCE:
        return s * a2 + terms.load(gl.SliceLayout(0, layout))[None, :]
    elif C.BETA:
        return s * a2 + b2
    else:
        return s * a2


@gluon.jit
def multiply(p, values, ones, o, total, C: gl.constexpr):
    """Has the matrix unit add coefficients times values and, times ones, the sums of rows."""
    o = warpgroup_mma(p, values, o, is_async=True)
    if C.ONES:
        left: gl.constexpr = gl.DotOperandLayout(0, total.type.layout, 2)
        total = warpgroup_mma(gl.convert_layout(p, left), ones, total, is_async=True)
    return o, total


@gluon.jit
def finish(o, total, p, beside, C: gl.constexpr):
    """Waits for `multiply`; the coefficients stay where they are until then, and what is `beside` it is not made later."""
    if C.ONES:
        o, total, p, beside = warpgroup_mma_wait(0, deps=(o, total, p, beside))
    else:
        o, p, beside = warpgroup_mma_wait(0, deps=(o, p, beside))
    return o, total, p, beside


@gluon.jit
def consume(W: gl.constexpr, given, T, C: gl.constexpr):
    """The rows of one warpgroup. Queries times keys run together with the coefficients of the block before times its values."""
    descs, tensors, counts, buffers, barriers, slips = given
    _, _, _, o_desc = descs
    alpha, beta, _, stats, _ = tensors
    heads, H, _, together = counts
    q_buf, k_buf, v_buf, o_buf, term_buf, col_buf, one_buf = buffers
    q_full, q_empty, _, k_full, k_empty, v_full, v_empty, turn = barriers
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.COLS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, sums)
    # Every one of eight columns is the sum of the row.
    tally: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    ones = one_buf.permute((1, 0))
    NEXT: gl.constexpr = (W + 1) % C.CONSUMERS
    o_smem, zero = o_buf.index(W), gl.zeros([C.ROWS, C.COLS], gl.float32, scores)
    ks, kp, vs, vp = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    mine = gl.to_tensor(1 if W == 0 else 0)  # the first turn of all is free
    step, tile = gl.to_tensor(0), gl.program_id(0)
    head, top, blocks = place(tile, heads, together, T, C)
    while tile < tiles_of(heads, T, C):
        top += W * C.ROWS
        a2, b2 = of_head(alpha, beta, head % H, C)
        if C.ROWS * C.CONSUMERS != C.COLS:
            # Rows of another warpgroup may see more blocks; where there are no rows one block is enough to go on with.
            seen = blocks
            if C.CAUSAL:
                seen = gl.minimum(top // C.COLS + 1, blocks)
            seen = gl.where(top < T.Q, seen, 1)
            for _block in range(seen, blocks):
                mbarrier.wait(k_full.index(ks), kp)
                mbarrier.arrive(k_empty.index(ks), count=1)
                ks, kp = following(ks, kp, C.STAGES)
                mbarrier.wait(v_full.index(vs), vp)
                mbarrier.arrive(v_empty.index(vs), count=1)
                vs, vp = following(vs, vp, C.STAGES)
                if C.TURNS:
                    mbarrier.wait(turn.index(W), mine)
                    mbarrier.arrive(turn.index(NEXT), count=1)
                    mine ^= 1
            blocks = seen
        at = step % C.AHEAD * C.CONSUMERS + W
        q = q_buf.index(at)
        mbarrier.wait(q_full.index(at), step // C.AHEAD % 2)
        mbarrier.wait(k_full.index(ks), kp)
        s = warpgroup_mma(q, k_buf.index(ks).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(ks), count=1)
        t = score(s, term_buf.index(ks + C.STAGES * kp), a2, b2, scores, C)
        ks, kp = following(ks, kp, C.STAGES)
        if C.CAUSAL:
            # Each warpgroup begins with its one block that crosses the diagonal. Minus infinity has a coefficient of zero.
            last = top - (blocks - 1) * C.COLS + gl.arange(0, C.ROWS, layout=gl.SliceLayout(1, scores))
            cols = col_buf.load(gl.SliceLayout(0, scores))
            t = gl.where(cols[None, :] <= last[:, None], t, -float("inf"))
        if C.ONES:
            total = gl.zeros([C.ROWS, 8], gl.float32, tally)
        else:
            total = gl.zeros([C.ROWS], gl.float32, gl.SliceLayout(1, scores))
        p16, total = weighed(t, total, C)
        p = gl.convert_layout(p16, left)
        o = gl.zeros([C.ROWS, C.D], gl.float32, sums)
        for _block in range(1, blocks):
            mbarrier.wait(k_full.index(ks), kp)
            if C.TURNS:
                mbarrier.wait(turn.index(W), mine)
            s = warpgroup_mma(q, k_buf.index(ks).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(vs), vp)
            o, total = multiply(p, v_buf.index(vs), ones, o, total, C)
            if C.TURNS:
                mbarrier.arrive(turn.index(NEXT), count=1)
                mine ^= 1
            s = warpgroup_mma_wait(2 if C.ONES else 1, deps=(s,))
            mbarrier.arrive(k_empty.index(ks), count=1)
            terms = term_buf.index(ks + C.STAGES * kp)
            ks, kp = following(ks, kp, C.STAGES)
            if C.BESIDE:
                p16, total = weighed(score(s, terms, a2, b2, scores, C), total, C)
                mbarrier.wait(v_full.index(vs), vp)  # passed above: the assembler moves nothing across its branch
                o, total, p, p16 = finish(o, total, p, p16, C)
            else:
                # Behind the product, whose coefficients then need no registers beside these.
                o, total, p, s = finish(o, total, p, s, C)
                p16, total = weighed(score(s, terms, a2, b2, scores, C), total, C)
            mbarrier.arrive(v_empty.index(vs), count=1)
            vs, vp = following(vs, vp, C.STAGES)
            p = gl.convert_layout(p16, left)
        if C.DISTANCE:
            x = q.load(left).to(gl.float32)
            half = gl.convert_layout(gl.sum(x * x, 1), by_row) * (0.5 * a2)
        mbarrier.arrive(q_empty.index(at), count=1)
        tile = drawn(step, slips, C)
        step += 1
        mbarrier.wait(v_full.index(vs), vp)
        o, total = multiply(p, v_buf.index(vs), ones, o, total, C)
        then = place(tile, heads, together, T, C)  # while the matrix unit multiplies
        if C.ONES:
            o, total = warpgroup_mma_wait(0, deps=(o, total))
            total = gl.sum(total * 0.125, 1)
        else:
            o = warpgroup_mma_wait(0, deps=(o,))
        mbarrier.arrive(v_empty.index(vs), count=1)
        vs, vp = following(vs, vp, C.STAGES)
        stat = gl.zeros([C.ROWS], gl.float32, by_row)
        if C.DIVIDED:
            # Where even the largest coefficient is next to nothing, or one is very large, a running maximum is wanted.
            total = gl.convert_layout(total, by_row)
            total = gl.where((total > LITTLE) & (total < LARGE), total, float("nan"))
            o = o * (1.0 / total)[:, None]
            stat = gl.log2(total)
        elif C.DISTANCE:
            o = o * gl.exp2(-half)[:, None]
        if C.STAT:
            rows = top + gl.arange(0, C.ROWS, layout=by_row)
            if C.DISTANCE:
                stat = gl.where(half < ROOM, stat, float("nan"))
            if C.ACT == "tanh":
                least = LEAST * (gl.minimum(rows + 1, T.K) if C.CAUSAL else T.K)
                stat = gl.where(gl.convert_layout(total, by_row) >= least, stat, float("nan"))
            if C.CAUSAL or (C.DIVIDED and not C.DISTANCE):
                # A value that is not finite reaches rows that do not see it: 0 x NaN = NaN. Nor need a sum of large coefficients be finite.
                stat += gl.sum(o * 0.0, 1)
            gl.store(stats + head.to(gl.int64) * T.Q + rows, stat, mask=rows < T.Q)
        tma.store_wait(0)
        o_smem.store(o.to(gl.bfloat16))
        hopper.fence_async_shared()
        if top < T.Q:
            store(o_desc, [head * T.Q + top, 0], o_smem)
        head, top, blocks = then
    tma.store_wait(0)


@gluon.jit
def barriers_of(N: gl.constexpr, COUNT: gl.constexpr):
    found = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(found.index(i), count=COUNT)
    return found


@gluon.jit
def slips_of(C: gl.constexpr):
    """Where the next tiles are written, and barriers that tell when they are and when they are read."""
    buf = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return buf, barriers_of(2, 1), barriers_of(2, C.CONSUMERS)


@gluon.jit(do_not_specialize=["heads", "H", "G", "together"])
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, alpha, beta, norms, stats, tickets, heads, H, G, together, T, C: gl.constexpr
):  # fmt: skip
    """Buffers and barriers of one program, and the parts of its warps. Of heads there are H in each batch, with G of keys."""
    gdc_launch_dependents()
    N: gl.constexpr = C.CONSUMERS
    S: gl.constexpr = C.STAGES
    q_buf = gl.allocate_shared_memory(gl.bfloat16, [C.AHEAD * N, C.ROWS, C.D], q_desc.layout)
    k_buf = gl.allocate_shared_memory(gl.bfloat16, [S, C.COLS, C.D], k_desc.layout)
    v_buf = gl.allocate_shared_memory(gl.bfloat16, [S, C.COLS, C.D], v_desc.layout)
    o_buf = gl.allocate_shared_memory(gl.bfloat16, [N, C.ROWS, C.D], o_desc.layout)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    term_buf = gl.allocate_shared_memory(gl.float32, [2 * S, C.COLS if C.DISTANCE else 1], line)
    # Columns are read when they are needed; computed, they would be kept in registers.
    col_buf = gl.allocate_shared_memory(gl.int32, [C.COLS if C.CAUSAL else 1], line)
    if C.CAUSAL:
        col_buf.store(gl.arange(0, C.COLS, layout=gl.BlockedLayout([1], [32], [4], [0])))
    # Keys lie side by side, as the copy engine would leave them; the matrix unit sees what was stored behind the fence.
    one_buf = gl.allocate_shared_memory(gl.bfloat16, [8, C.COLS], gl.NVMMASharedLayout(128, 16, 2))
    if C.ONES:
        one_buf.store(gl.full([8, C.COLS], 1.0, gl.bfloat16, gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])))
        hopper.fence_async_shared()
    q_full, q_empty, turn = barriers_of(C.AHEAD * N, 1), barriers_of(C.AHEAD * N, 1), barriers_of(N, 1)
    k_full, k_empty = barriers_of(S, 2 if C.DISTANCE and not C.MEASURED else 1), barriers_of(S, N)
    k_in = barriers_of(S, 1) if C.MEASURED else k_full
    v_full, v_empty = barriers_of(S, 1), barriers_of(S, N)
    descs, counts = (q_desc, k_desc, v_desc, o_desc), (heads, H, G, together)
    tensors = alpha, beta, norms, stats, tickets
    buffers = q_buf, k_buf, v_buf, o_buf, term_buf, col_buf, one_buf
    barriers = q_full, q_empty, k_in, k_full, k_empty, v_full, v_empty, turn
    given = descs, tensors, counts, buffers, barriers, slips_of(C)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    third: gl.constexpr = 2
    more: gl.constexpr = C.REGISTERS
    few: gl.constexpr = C.FEW
    if N == 3:
        gl.warp_specialize([
            (consume, (first, given, T, C)),
            (consume, (second, given, T, C)),
            (consume, (third, given, T, C)),
            (produce, (given, T, C)),
        ], [4, 4, 1], [more, more, few])  # fmt: skip
    elif C.MEASURED:
        gl.warp_specialize([
            (consume, (first, given, T, C)),
            (consume, (second, given, T, C)),
            (measure, (given, T, C)),
            (produce, (given, T, C)),
        ], [4, 4, 1], [more, few, few])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (first, given, T, C)),
            (consume, (second, given, T, C)),
            (produce, (given, T, C)),
        ], [4, 1], [more, few])  # fmt: skip

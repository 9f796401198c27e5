"""What forward and backward share: what a launch knows, tiles of rows, and the score of a block of pairs."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

NONE: tuple[bool, ...] = (False,) * 5


@dataclass(frozen=True)
class Spec:
    """What is fixed when a kernel is compiled."""

    D: int  # head sizes of keys and values, filled up to powers of two
    E: int
    HEAD: int  # and as they are
    WIDTH: int
    BM: int  # rows and columns of a block
    BN: int
    STAGES: int
    ACT: str
    DEGREE: int = 1
    DIVISION: int = 0  # 1: rows divided by their sum, 2: by the number of keys in sight
    UNIT: float = 1.0  # what scores are multiplied by, see `activations`
    DISTANCE: bool = False
    BETA: bool = False
    RANK: int = 0
    R: int = 16
    BIAS: int = 0  # 1: one number per key, 2: one per pair
    LENGTHS: bool = False
    LOW: bool = False
    HIGH: bool = False
    IDS: bool = False
    KEEP: bool = False
    BLOCKS: bool = False
    LIST: bool = False  # blocks of pairs are taken from a list
    CLEAN: bool = False  # what is hidden may be NaN
    EVEN: bool = False  # no block reaches beyond the last key
    LEVEL: bool = False  # nor beyond the last query
    FLAT: bool = False  # rows of all heads lie one behind the other, and no block reaches beyond its head
    QUICK: bool = False  # approximate reciprocals, where coefficients are rounded to 16 bit anyway
    DOTS: bool = False  # a row's sum is that of its rounded coefficients, taken by the matrix unit
    SHORT: bool = (
        False  # a form that serves most blocks: terms constant along a loop wait until behind it, or a quicker function
    )
    PRECISION: str = "ieee"
    P: tl.dtype = tl.float32  # what coefficients are rounded to before they are multiplied
    TOGETHER: int = 1  # heads whose blocks are taken in turns
    ALONE: bool = True  # no query head shares its keys
    GRADIENTS: tuple[bool, ...] = NONE  # wanted beside those of query, key, value: alpha, beta, left, right, bias


class Constants:
    """A dataclass as Triton reads it inside a kernel: every field a constant of the compiler."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        for name, value in vars(spec).items():
            setattr(self, name, tl.constexpr(value))

    def __hash__(self) -> int:
        return hash(self.spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self.spec == other.spec

    def __repr__(self) -> str:
        return "spec_" + "_".join(str(x) for x in astuple(self.spec))


class Terms(NamedTuple):
    """Everything but query, key and value that a score or a mask is made of; strides count elements, 0 broadcasts."""

    H: int
    G: int
    Q: int
    K: int
    alpha: Any  # [H]
    beta: Any = None  # [H]
    hq: Any = None  # [B, H, Q], half the squared norms
    hk: Any = None  # [B, G, K]
    left: Any = None
    left_b: int = 0
    left_h: int = 0
    left_q: int = 0
    right: Any = None
    right_b: int = 0
    right_h: int = 0
    right_k: int = 0
    bias: Any = None
    bias_b: int = 0
    bias_h: int = 0
    bias_q: int = 0
    bias_k: int = 0
    lengths: Any = None  # [B, H]
    qid: Any = None  # [B, H, Q]
    kid: Any = None  # [B, H, K]
    keep: Any = None
    keep_b: int = 0
    keep_h: int = 0
    keep_q: int = 0
    keep_k: int = 0
    blocks: Any = None
    blocks_b: int = 0
    blocks_h: int = 0
    blocks_q: int = 0
    block_q: int = 1
    block_k: int = 1
    low: int = 0
    high: int = 0
    count: Any = None  # how many blocks are in each row of `order`, which lists them
    count_b: int = 0
    count_h: int = 0
    full: Any = None  # and how many of these, the first, need no mask
    order: Any = None
    order_b: int = 0
    order_h: int = 0
    order_m: int = 0


@triton.jit
def place(length, heads, BLOCK: tl.constexpr, REVERSED: tl.constexpr, C: tl.constexpr):
    """The block of a program, and its batch and head. Under causality the longest come first, those of a few heads together:
    what is left to the end is short, and the keys of these heads stay near."""
    blocks = tl.cdiv(length, BLOCK)
    pid = tl.program_id(0)
    first = pid // (blocks * C.TOGETHER) * C.TOGETHER
    side = tl.minimum(tl.num_programs(0) // blocks - first, C.TOGETHER)
    inside = pid - first * blocks
    block, head = inside // side, first + inside % side
    if REVERSED:
        block = blocks - 1 - block
    return block, head // heads, head % heads


@triton.jit
def tile(desc, b, h, heads, length, row, BLOCK: tl.constexpr, WIDTH: tl.constexpr, FLAT: tl.constexpr):
    """Rows of one head; what lies outside is zero."""
    if FLAT:
        return desc.load([(b * heads + h) * length + row, 0])
    else:
        return desc.load([b, h, row, 0]).reshape(BLOCK, WIDTH)


@triton.jit
def clean(x):
    """Zeros in place of what is not finite: a coefficient of zero does not hide it (0 x NaN = NaN)."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def not_finite(x):
    """Which rows hold NaN or infinity."""
    return tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), 1) > 0


@triton.jit
def base(pointer, stride_b, stride_h, b, h):
    """Where a head begins."""
    return pointer + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h


@triton.jit
def factor(pointer, stride_b, stride_h, stride_n, b, h, at, length, C: tl.constexpr):
    """Rows [n, R] of one factor of a bias of low rank."""
    r = tl.arange(0, C.R)
    where = base(pointer, stride_b, stride_h, b, h) + at.to(tl.int64)[:, None] * stride_n + r[None, :]
    return tl.load(where, mask=(at[:, None] < length) & (r[None, :] < C.RANK), other=0.0)


@triton.jit
def of_keys(cols, b, h, g, a2, b2, T, C: tl.constexpr):
    """What each key adds to a score, with the constant of the head."""
    term = tl.zeros(cols.shape, tl.float32) + b2
    if C.DISTANCE:
        term -= a2 * tl.load(T.hk + (b * T.G + g).to(tl.int64) * T.K + cols, mask=cols < T.K, other=0.0)
    if C.BIAS == 1:
        where = base(T.bias, T.bias_b, T.bias_h, b, h) + cols.to(tl.int64) * T.bias_k
        term += tl.load(where, mask=cols < T.K, other=0.0).to(tl.float32) * C.UNIT
    if C.CLEAN:
        term = clean(term)
    return term


@triton.jit
def of_pairs(rows, cols, b, h, T, C: tl.constexpr):
    """A full bias; `rows` and `cols` broadcast against each other."""
    where = base(T.bias, T.bias_b, T.bias_h, b, h) + rows.to(tl.int64) * T.bias_q + cols.to(tl.int64) * T.bias_k
    return tl.load(where, mask=(rows < T.Q) & (cols < T.K), other=0.0).to(tl.float32) * C.UNIT


@triton.jit
def visible(rows, cols, last, b, h, T, C: tl.constexpr):
    """Which pairs may attend; `rows` and `cols` broadcast against each other."""
    keep = (cols < last) & (rows < T.Q)
    if C.HIGH:
        keep = keep & (cols - rows <= T.high)
    if C.LOW:
        keep = keep & (cols - rows >= T.low)
    if C.IDS:
        head = (b * T.H + h).to(tl.int64)
        left = tl.load(T.qid + head * T.Q + rows, mask=rows < T.Q, other=-1)
        keep = keep & (left == tl.load(T.kid + head * T.K + cols, mask=cols < T.K, other=-2))
    if C.KEEP:
        where = base(T.keep, T.keep_b, T.keep_h, b, h) + rows.to(tl.int64) * T.keep_q + cols.to(tl.int64) * T.keep_k
        keep = keep & (tl.load(where, mask=(rows < T.Q) & (cols < T.K), other=0) != 0)
    if C.BLOCKS:
        where = base(T.blocks, T.blocks_b, T.blocks_h, b, h) + (rows // T.block_q).to(tl.int64) * T.blocks_q
        where += cols // T.block_k
        keep = keep & (tl.load(where, mask=(rows < T.Q) & (cols < T.K), other=0) != 0)
    return keep


@triton.jit
def row_dot(x_, y_, out_, H, n, xb, xh, xn, yb, yh, yn, factor, HEAD: tl.constexpr, D: tl.constexpr, BM: tl.constexpr):
    """factor x.y for every row: half squared norms, and what backward subtracts from a normalised row."""
    blocks = tl.cdiv(n, BM)
    pid = tl.program_id(0)
    b, h, rows = pid // blocks // H, pid // blocks % H, pid % blocks * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    inside = (rows[:, None] < n) & (d[None, :] < HEAD)
    at = rows.to(tl.int64)[:, None]
    x = tl.load(base(x_, xb, xh, b, h) + at * xn + d[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(base(y_, yb, yh, b, h) + at * yn + d[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ + (b * H + h).to(tl.int64) * n + rows, factor * tl.sum(x * y, 1), mask=rows < n)

"""From tensors to launches: block sizes, descriptors, lists of blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from heedful import _runtime
from heedful.ops.fused import _backward, _blocks, _forward, prepared, serving
from heedful.ops.fused._blocks import NONE, Constants, Spec, Terms
from heedful.ops.fused._device import Setting, chip, current, fitting, interpreting, power_of_2, settings, unit_stride
from heedful.ops.fused._linked import LINKED
from heedful.ops.fused.activations import UNITS
from heedful.ops.fused.listing import COUNT, FULL, MASKING, ORDER, Sight
from heedful.ops.fused.operators import gathered
from heedful.ops.fused.prepared import Recorder

INTERPRETED = interpreting()
SPAN = 16  # blocks whose marks are looked through at once
ROWS = 64  # queries of a block of what is done before and behind a backward pass in one kernel
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Problem(NamedTuple):
    """The arguments of the operator, [B, H, n, ...] throughout; what is broadcast has size one."""

    query: Tensor
    key: Tensor
    value: Tensor
    alpha: Tensor
    beta: Tensor | None
    left: Tensor | None
    right: Tensor | None
    bias: Tensor | None
    lengths: Tensor | None
    query_ids: Tensor | None
    key_ids: Tensor | None
    keep: Tensor | None
    blocks: Tensor | None
    block_size: Sequence[int]
    low: int | None
    high: int | None
    activation: str
    degree: int
    division: int
    distance: bool

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """B, H, G, Q, K."""
        return (*self.query.shape[:2], self.key.shape[1], self.query.shape[2], self.key.shape[2])

    @property
    def safe(self) -> str:
        """The function that serves everywhere: a sigmoid by the hardware's hyperbolic tangent is one of those that serve most blocks."""
        return "sigmoid" if self.activation == "tanh" else self.activation

    @property
    def listed(self) -> bool:
        return self.query_ids is not None or self.keep is not None or self.blocks is not None

    @property
    def masked(self) -> bool:
        return self.listed or self.lengths is not None or self.low is not None or self.high is not None


def _fitting(kind: str, problem: Problem, go: Callable[[Setting], None]) -> None:
    name = problem.safe
    if name == "exp" and problem.division == 1:
        name = "gaussian" if problem.distance else "softmax"
    size = power_of_2(max(problem.query.shape[-1], problem.value.shape[-1]))
    terms = tuple(x is None for x in problem[4:13]), problem.low is None, problem.high is None
    key = kind, problem.query.shape[-1], problem.value.shape[-1], problem[-4:], problem.query.dtype, terms
    fitting(key, settings(kind, problem.query.dtype, size, name, problem.masked), go)


def forward(problem: Problem, sight: Sight | None = None) -> tuple[Tensor, Tensor]:
    """The output, and what backward needs of every row's divisor (empty where rows are not divided).

    `sight` is that of the problem's mask, where somebody keeps it.
    """
    if _is_elsewhere(problem.query):
        with current(problem.query):
            return forward(problem, sight)
    sight = sight or Sight.of(problem)
    form = form_of("forward", problem, problem[:5], sight=sight)
    known = prepared.KNOWN.get(form)
    if known is not None:
        out, stat = known.run(problem[:5], problem.query.device, sight)
        return out, stat
    recorder = Recorder(problem[:5])
    found = _forward_anew(problem, sight, recorder)
    if form is not None:
        prepared.keep(form, recorder)
    return found


def _is_elsewhere(x: Tensor) -> bool:
    """Whether a tensor lies on another GPU than the current one, on which Triton launches."""
    return x.is_cuda and x.device.index != torch._C._cuda_getDevice()


def form_of(
    kind: str, problem: Problem, tensors: Sequence[Tensor | None], wanted: Sequence[bool] = (), sight: Sight | None = None
) -> Hashable | None:  # fmt: skip
    """The form of a problem whose launches may be kept: nothing added to scores. `sight` is that of its mask, if any."""
    if problem.query.device.type not in _runtime.SETTLED or any(x is not None for x in problem[5:8]):
        return None
    if prepared.is_watched():
        return None
    settings = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    if sight is not None and sight.places % prepared.ALIGNED:
        return None
    masking = [None if x is None else (x.shape, x.stride(), x.dtype) for x in problem[8:13]]
    return prepared.form(tensors, kind, *wanted, *problem.block_size, *problem[14:], *settings, *masking)


def _forward_anew(problem: Problem, sight: Sight, recorder: Recorder) -> tuple[Tensor, Tensor]:
    B, H, _, Q, _ = problem.sizes
    problem = problem._replace(query=_aligned(problem.query), key=_aligned(problem.key), value=_aligned(problem.value))
    device = problem.query.device
    out = recorder.made(torch.empty(B, H, Q, problem.value.shape[-1], dtype=problem.value.dtype, device=device))
    stat = recorder.made(torch.empty((B, H, Q) if problem.division else (0,), dtype=torch.float32, device=device))
    late = problem.distance and problem.bias is None and problem.left is None
    quick = problem.activation == "tanh"
    on_hopper = serving.forward(problem)
    halves = None, _half(problem.key, recorder, is_made=on_hopper is not None) if problem.distance else None
    mark = stat
    if on_hopper is not None:
        leaves = problem.distance or problem.division or quick or problem.high is not None
        if leaves and not problem.division:
            mark = recorder.made(torch.empty(B, H, Q, dtype=torch.float32, device=device), is_scratch=True)
        tickets = _tickets(recorder, device) if problem.distance else None
        on_hopper(problem, out, mark if leaves else None, halves[1], tickets, recorder.launch)
        if not leaves:
            return out, stat
    before = recorder.mark()

    def go(chosen: Setting) -> None:
        recorder.back_to(before)
        terms, spec = _prepare(problem, sight, recorder, chosen, halves)
        tiles = _tiles(
            spec, (problem.query, spec.BM, spec.D), (problem.key, spec.BN, spec.D), (problem.value, spec.BN, spec.E)
        )
        count = _parts(Q, spec.BM) * B * H
        if on_hopper is None:
            forms = _forms(spec, late, quick)
            recorder.launch(_forward.forward, (count,), *tiles, out, stat, terms, *forms, **chosen.options)
        else:
            _left(recorder, _forward.forward_left, (*tiles, out, mark), count, terms, spec, chosen)

    _fitting("forward", problem, go)
    return out, stat


def _left(
    recorder: Recorder, kernel: Any, args: Sequence[Any], count: int, terms: Terms, spec: Spec, chosen: Setting
) -> None:
    """Launches what serves the blocks that a kernel for one chip has left."""
    safe = constants(replace(spec, DOTS=False))
    grid = (min(_parts(count, SPAN), 2 * chip(args[-1].device).processors),)
    recorder.launch(kernel, grid, *args, count, terms, safe, SPAN, **chosen.options, **LINKED)


class Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    alpha: Tensor
    beta: Tensor
    left: Tensor
    right: Tensor
    bias: Tensor


def backward(
    problem: Problem, out: Tensor, stat: Tensor, above: Tensor, wanted: Sequence[bool], sight: Sight | None = None
) -> Gradients:
    """Gradients of everything; those of alpha, beta, left, right and bias are empty where they are not wanted."""
    if _is_elsewhere(problem.query):
        with current(problem.query):
            return backward(problem, out, stat, above, wanted, sight)
    sight = sight or Sight.of(problem)
    given = *problem[:5], out, stat, above
    form = form_of("backward", problem, given, wanted, sight)
    known = prepared.KNOWN.get(form)
    if known is not None:
        unwanted = stat.new_empty(0)
        dq, dk, dv, *rest = gathered(known.run(given, problem.query.device, sight), wanted)
        dalpha, dbeta = (unwanted if x is None else x for x in rest)
        return Gradients(dq, dk, dv, dalpha, dbeta, unwanted, unwanted, unwanted)
    recorder = Recorder(given)
    found = _backward_anew(problem, sight, out, stat, above, wanted, recorder)
    if form is not None:
        prepared.keep(form, recorder)
    return found


def _backward_anew(
    problem: Problem,
    sight: Sight,
    out: Tensor,
    stat: Tensor,
    above: Tensor,
    wanted: Sequence[bool],
    recorder: Recorder,
) -> Gradients:
    B, H, G, Q, K = problem.sizes
    device = problem.query.device
    query, key, value, above = (_aligned(x) for x in (problem.query, problem.key, problem.value, above))
    problem = problem._replace(query=query, key=key, value=value)
    needs = tuple(bool(x) for x in wanted)
    rank = 0 if problem.left is None else problem.left.shape[-1]
    quick = problem.activation == "tanh"

    def room(needs: bool, *shape: int) -> Tensor:
        return torch.empty(shape if needs else (0,), dtype=torch.float32, device=device)

    dq, dk, dv = (recorder.made(torch.empty(x.shape, dtype=x.dtype, device=device)) for x in (query, key, value))
    dalpha, dbeta = (recorder.made(room(True, B, H, Q)) if need else room(False) for need in needs[:2])
    dleft, dright, dbias = room(needs[2], B, H, Q, rank), room(needs[3], B, H, K, rank), room(needs[4], B, H, K)
    shares = problem.activation == "exp" and problem.division == 1  # coefficients are not above one
    bounded = shares or (problem.distance and problem.bias is None and problem.left is None)
    # A row that sums to one does not feel the norm of its query, but the gradient of alpha does.
    feels = problem.distance and (needs[0] or not shares)
    out = out.contiguous()
    delta = recorder.made(room(True, B, H, Q), is_scratch=True) if problem.division == 1 else None
    half = recorder.made(room(True, B, H, Q), is_scratch=True) if feels else None
    on_hopper = None if any(needs) else serving.backward(problem, above)
    # What is hidden and not finite: 0 x NaN = NaN.
    leaves = on_hopper is not None and problem.high is not None
    halves = half, _half(key, recorder, is_made=on_hopper is not None) if problem.distance else None

    def flags(length: int) -> Tensor | None:
        made = torch.empty(B * H * length // 64 if leaves else 0, dtype=torch.int32, device=device)
        return recorder.made(made, is_scratch=True) if leaves else None

    def tiles(spec: Spec, again: tuple[Tensor, int, int]) -> list[TensorDescriptor]:
        first = (query, spec.BM, spec.D), (key, spec.BN, spec.D), (value, spec.BN, spec.E), (above, spec.BM, spec.E)
        return _tiles(spec, *first, again)

    def rows(chosen: Setting) -> None:
        recorder.back_to(before)
        terms, spec = _prepare(problem, sight, recorder, chosen, halves, above, needs)
        inputs = tiles(spec, (query, spec.BM, spec.D))
        if leaves:
            args = *inputs, out, dq, stat, delta, marks[0]
            _left(recorder, _backward.rows_left, args, Q // spec.BM * B * H, terms, spec, chosen)
            return
        recorder.launch(
            _backward.backward_rows, (_parts(Q, spec.BM) * B * H,),
            *inputs, out, dq, stat, delta, dalpha, dbeta, dleft, terms, *_forms(spec, bounded, quick), **chosen.options,
        )  # fmt: skip

    def columns(chosen: Setting) -> None:
        recorder.back_to(between)
        terms, spec = _prepare(problem, sight, recorder, chosen, halves, above, needs, transposed=True)
        inputs = tiles(spec, (key, spec.BN, spec.D))
        late = bounded and H == G and (problem.distance or spec.BIAS == 1)
        if leaves:
            args = *inputs, dk, dv, stat, delta, marks[1]
            _left(recorder, _backward.columns_left, args, K // spec.BN * B * G, terms, spec, chosen)
            return
        recorder.launch(
            _backward.backward_columns, (_parts(K, spec.BN) * B * G,),
            *inputs, dk, dv, stat, delta, dright, dbias, terms, *_forms(spec, late, quick), **chosen.options,
        )  # fmt: skip

    marks = flags(Q), flags(K)
    if on_hopper is not None:
        _in_one_pass(on_hopper, problem, out, stat, above, delta, halves, (dq, dk, dv), marks, recorder)
    if on_hopper is None or leaves:
        before = recorder.mark()
        _fitting("rows", problem, rows)
        between = recorder.mark()
        _fitting("columns", problem, columns)
    return Gradients(
        dq,
        dk,
        dv,
        dalpha.sum(dim=(0, 2)) if needs[0] else dalpha,
        dbeta.sum(dim=(0, 2)) if needs[1] else dbeta,
        _like(dleft, problem.left) if needs[2] else dleft,
        _like(dright, problem.right) if needs[3] else dright,
        _like(dbias[:, :, None], problem.bias) if needs[4] else dbias,
    )


def _in_one_pass(
    kernel: Callable[..., None], problem: Problem, out: Tensor, stat: Tensor, above: Tensor, delta: Tensor | None,
    halves: tuple[Tensor | None, Tensor | None], gradients: tuple[Tensor, Tensor, Tensor], marks: tuple[Tensor | None, Tensor | None],
    recorder: Recorder,
) -> None:  # fmt: skip
    """Launches the kernel for one chip, which adds up gradients of queries in float32, between what it begins with and what it leaves."""
    B, H, _, Q, _ = problem.sizes
    query, D, divided = problem.query, problem.query.shape[-1], problem.division == 1
    dq, dk, dv = gradients
    sums = recorder.made(torch.empty(B, H, Q, D, dtype=torch.float32, device=query.device), is_scratch=True)
    grid, options = (B * H * Q // ROWS,), {"num_warps": 4}

    def eighths(needed: bool) -> Tensor | None:
        made = torch.empty(B, H, Q, 8, dtype=torch.bfloat16, device=query.device) if needed else None
        return None if made is None else recorder.made(made, is_scratch=True)

    terms, deltas = eighths(divided or problem.distance), eighths(divided)
    recorder.launch(
        _backward.clear, grid, sums, terms, deltas, query, above, out, delta if divided else halves[0], stat, problem.alpha,
        H, Q, *query.stride()[:3], *above.stride()[:3], D, ROWS, UNITS[problem.safe], divided, problem.distance, **options,
    )  # fmt: skip
    kernel(problem, above, terms, deltas, halves[1], sums, dk, dv, marks[1], recorder.launch)
    factor = 2.0 if problem.activation == "relu_squared" else 1.0
    recorder.launch(
        _backward.conclude,
        grid,
        sums,
        dq,
        marks[0],
        problem.alpha,
        H,
        Q,
        factor,
        D,
        ROWS,
        marks[0] is not None,
        **options,
        **LINKED,
    )


def _tickets(recorder: Recorder, device: torch.device) -> Tensor:
    """Counts tiles from a zero that another kernel writes before."""
    return recorder.made(torch.empty(1, dtype=torch.int32, device=device), is_scratch=True)


def row_dot(x: Tensor, y: Tensor, factor: float = 1.0, recorder: Recorder | None = None) -> Tensor:
    """factor x.y of every row, [B, H, n] in float32, read once."""
    B, H, n, D = x.shape
    x, y = unit_stride(x), unit_stride(y)
    recorder = recorder or Recorder()
    out = recorder.made(torch.empty(B, H, n, dtype=torch.float32, device=x.device), is_scratch=True)
    rows, size = 16 if INTERPRETED else 64, power_of_2(D)
    grid = (_parts(n, rows) * B * H,)
    recorder.launch(
        _blocks.row_dot, grid, x, y, out, H, n, *x.stride()[:3], *y.stride()[:3], factor, D, size, rows, num_warps=4
    )
    return out


def _like(gradient: Tensor, leaf: Tensor | None) -> Tensor:
    assert leaf is not None
    return gradient.sum_to_size(leaf.shape).to(leaf.dtype)


def _half(x: Tensor, recorder: Recorder, *, is_made: bool = False) -> Tensor:
    """Half the squared norm of every row, or room for it where another kernel makes it."""
    if is_made:
        return recorder.made(torch.empty(x.shape[:3], dtype=torch.float32, device=x.device), is_scratch=True)
    return row_dot(x, x, 0.5, recorder)


def _prepare(
    problem: Problem,
    sight: Sight,
    recorder: Recorder,
    chosen: Setting,
    halves: tuple[Tensor | None, Tensor | None],
    above: Tensor | None = None,
    wanted: tuple[bool, ...] = NONE,
    transposed: bool = False,
) -> tuple[Terms, Spec]:
    _, H, G, Q, K = problem.sizes
    query, value = problem.query, problem.value
    listed: dict[str, Any] = {}
    if problem.listed:
        which = chosen.rows, chosen.cols, transposed
        order, count, full = (recorder.read(sight, (*which, at)) for at in (ORDER, COUNT, FULL))
        listed = _strided("order", order, "bhm") | _strided("count", count, "bh") | {"full": full}
    left, right = (None if x is None else unit_stride(x) for x in (problem.left, problem.right))
    bias = problem.bias
    lengths, query_ids, key_ids, keep, blocks = (
        None if getattr(problem, name) is None else recorder.read(sight, name) for name in MASKING
    )
    terms = Terms(
        H, G, Q, K, problem.alpha, problem.beta, halves[0], halves[1],
        **_strided("left", left, "bhq"), **_strided("right", right, "bhk"), **_strided("bias", bias, "bhqk"),
        lengths=lengths, qid=query_ids, kid=key_ids, **_strided("keep", keep, "bhqk"), **_strided("blocks", blocks, "bhq"),
        block_q=problem.block_size[0], block_k=problem.block_size[1],
        low=problem.low or 0, high=problem.high or 0,
        **listed,
    )  # fmt: skip
    narrow = query.dtype != torch.float32
    divided = problem.division == 1
    late = problem.distance and problem.bias is None and problem.left is None and query.dtype != torch.float16
    # Of 16-bit numbers bfloat16 alone has the range of a coefficient that is not divided, and of its gradient.
    bounded = problem.activation == "exp" and problem.division == 1
    kind = torch.bfloat16 if query.dtype == torch.float16 and not bounded else query.dtype
    level, even = Q % chosen.rows == 0, K % chosen.cols == 0
    whole = all(x is None or x.is_contiguous() for x in (query, problem.key, value, above))
    rank = 0 if left is None else left.shape[-1]
    column = problem.bias is not None and problem.bias.shape[-2] == 1
    spec = Spec(
        D=power_of_2(query.shape[-1]), E=power_of_2(value.shape[-1]), HEAD=query.shape[-1], WIDTH=value.shape[-1],
        BM=chosen.rows, BN=chosen.cols, STAGES=chosen.stages, ACT=problem.safe, DEGREE=problem.degree,
        DIVISION=problem.division, UNIT=UNITS[problem.safe], DISTANCE=problem.distance, BETA=problem.beta is not None,
        RANK=rank, R=power_of_2(rank), BIAS=0 if problem.bias is None else 1 if column else 2,
        LENGTHS=problem.lengths is not None, LOW=problem.low is not None, HIGH=problem.high is not None,
        IDS=problem.query_ids is not None, KEEP=problem.keep is not None, BLOCKS=blocks is not None, LIST=problem.listed,
        CLEAN=problem.masked, EVEN=even, LEVEL=level, FLAT=level and even and whole, QUICK=narrow and not INTERPRETED,
        DOTS=(narrow or INTERPRETED) and divided and (problem.activation != "exp" or late),
        PRECISION=_precision(query.dtype), P=TYPES[kind],
        TOGETHER=8 if problem.high is not None else 1, ALONE=H == G, GRADIENTS=wanted,
    )  # fmt: skip
    return terms, spec


def _forms(spec: Spec, late: bool, quick: bool) -> tuple[Constants, Constants]:
    """What a kernel computes first, and what it falls back to in blocks that this does not serve; often one and the same."""
    if late and spec.P != tl.float16:  # which has not the range of a term left out
        # The other form keeps a running maximum: its largest coefficient is one, which no rounding changes.
        return constants(replace(spec, SHORT=True)), constants(replace(spec, DOTS=False))
    # Rows whose coefficients can be counted by their number alone; a head of keys that several share is safe.
    counted = not (spec.LENGTHS or spec.LOW or spec.LIST or spec.BIAS or spec.RANK or spec.DIVISION) and spec.ALONE
    if quick and counted:
        return constants(replace(spec, ACT="tanh", UNIT=UNITS["tanh"], SHORT=True)), constants(spec)
    return constants(spec), constants(spec)


@cache
def constants(spec: Spec) -> Constants:
    return Constants(spec)


def _precision(dtype: torch.dtype) -> str:
    """How float32 products are taken, as torch's own matrix products are told to."""
    if dtype != torch.float32 or INTERPRETED:
        return "ieee"
    # Three products of tf32 parts: as exact as one in float32 to about 1e-6, at three times its speed.
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _strided(name: str, x: Tensor | None, axes: str) -> dict[str, Any]:
    """A tensor and the strides of its first axes, zero where an axis of one stands for all, under the names of `Terms`."""
    if x is None:
        return {}
    return {name: x} | {f"{name}_{axis}": 0 if x.shape[n] == 1 else x.stride(n) for n, axis in enumerate(axes)}


def _aligned(x: Tensor) -> Tensor:
    """As the copy engine wants it: rows that begin at multiples of 16 bytes, nothing broadcast."""
    item = x.element_size()
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    fits = fits and all(
        n == 1 or (s > 0 and s * item % 16 == 0) for n, s in zip(x.shape[:-1], x.stride(), strict=False)
    )
    return x if fits else x.contiguous() if not x.is_contiguous() else x.clone()


def _tiles(spec: Spec, *wanted: tuple[Tensor, int, int]) -> list[TensorDescriptor]:
    descriptors = []
    for x, rows, width in wanted:
        B, H, n, D = x.shape
        if spec.FLAT:
            descriptors.append(TensorDescriptor(x, [B * H * n, D], [D, 1], [rows, width]))
        else:
            strides = [s if size > 1 else D * n * H for s, size in zip(x.stride()[:3], x.shape[:3], strict=True)]
            descriptors.append(TensorDescriptor(x, [B, H, n, D], [*strides, 1], [1, 1, rows, width]))
    return descriptors


def _parts(length: int, size: int) -> int:
    """How many stretches of a size a length takes."""
    return -(-length // size)

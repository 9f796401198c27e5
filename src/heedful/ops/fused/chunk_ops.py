"""Linear attention by chunks as operators of torch: forward, backward and one decoding step of the kernels in `chunks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from heedful.kernels.base import divisor
from heedful.kernels.feature_map import elu_plus_one
from heedful.ops.fused._device import Tiles, able, interpreting, power_of_2, tiles, unit_stride
from heedful.ops.fused._eager import eager, recorded
from heedful.ops.request import wide

if TYPE_CHECKING:
    from heedful.ops.fused.prepared import Launcher

MapName = Literal["identity", "relu", "elu"]

LARGEST = 256
"""The most features, and the widest value, that the kernels take."""


def usable(query: Tensor, value: Tensor, features: int, devices: frozenset[str]) -> bool:
    """Whether the kernels take these tensors: their device, type and sizes, and no transform of torch.func under way."""
    fits = max(features, value.shape[-1]) <= LARGEST and value.numel() > 0 and value.dtype != torch.float64
    return fits and able(query, devices)


def _one_tile(features: int, width: int) -> bool:
    """Whether a program of the backward pass holds a whole memory."""
    return max(features, width) <= 64


def _add_up(launch: Launcher, parts: Tensor, out: Tensor) -> None:
    from heedful.ops.fused._sums import add_up  # which imports triton

    add_up(launch, parts, out)


def _beside(x: Tensor) -> bool:
    """Whether the heads of `[B, H, n, D]` lie beside one another, as one linear map of every token makes them: so does their gradient."""
    return x.stride(1) < x.stride(2)


class _Job:
    """Tensors of one call, as the kernels read them, and launches of the kernels on them."""

    def __init__(
        self, launch: Launcher, query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None,
        map: str, normal: bool, causal: bool,
    ) -> None:  # fmt: skip
        from heedful.ops.fused import chunks

        self.kernels, self.launch = chunks, launch
        self.query, self.key, self.value, self.weight = query, key, value, weight
        assert weight is None or weight.shape == key.shape[:3], "strides are read as they are"
        assert key.shape[:3] == value.shape[:3]
        self.batch, self.heads, self.queries, self.features = query.shape
        self.key_heads, self.keys, self.width = value.shape[1:]
        self.group = self.heads // self.key_heads
        self.interpreted = interpreting()
        self.map, self.normal, self.causal = map, normal, causal
        self.dot = torch.bfloat16 if {query.dtype, value.dtype} == {torch.bfloat16} else torch.float32
        self.exact = value.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"

    def tiles(self, role: str) -> Tiles:
        length = max(self.queries, self.keys)
        heads = self.batch * self.key_heads
        return tiles(role, self.features, self.width, heads, length, self.dot, self.exact, self.interpreted)

    def spans(self, length: int) -> int:
        cut = self.tiles("outputs")
        return -(-length // (cut.rows * cut.blocks))

    def settings(self, cut: Tiles) -> dict[str, Any]:
        import triton.language as tl

        return {
            "F": self.features, "E": self.width, "BLOCK_F": cut.features, "BLOCK_E": cut.width, "ROWS": cut.rows,
            "BLOCKS": cut.blocks, "MAP": self.map, "DOT": tl.bfloat16 if self.dot == torch.bfloat16 else tl.float32,
            "PRECISION": "ieee" if self.exact else "tf32", "num_warps": cut.warps, "num_stages": cut.stages,
        }  # fmt: skip

    def inputs(self) -> tuple[int, ...]:
        """Strides of query, key, value and weight."""
        rest = (0, 0, 0) if self.weight is None else self.weight.stride()
        return (*self.query.stride()[:3], *self.key.stride()[:3], *self.value.stride()[:3], *rest)

    def past(self, first: Tensor | None = None) -> Tensor | None:
        """Sums of the spans of keys before each one, `[B * G, spans + 1, F * E + F]`; None where nothing needs them."""
        if self.causal and self.spans(self.keys) == 1 and first is None:
            return None
        rest = (0, 0, 0) if self.weight is None else self.weight.stride()
        strides = (*self.key.stride()[:3], *self.value.stride()[:3], *rest)
        return self._sums(self.key, self.value, self.weight, None, self.keys, strides, 1, first)

    def future(self, gradient: Tensor, totals: Tensor | None, deltas: Tensor | None) -> Tensor | None:
        """The same of queries and gradients, for the spans after each one."""
        if self.causal and self.spans(self.queries) == 1:
            return None
        rest = (0, 0, 0) if totals is None else totals.stride()
        strides = (*self.query.stride()[:3], *gradient.stride()[:3], *rest)
        return self._sums(self.query, gradient, totals, deltas, self.queries, strides, self.group, None, reverse=True)

    def _sums(
        self, features: Tensor, values: Tensor, factor: Tensor | None, shift: Tensor | None, length: int,
        strides: tuple[int, ...], group: int, first: Tensor | None, reverse: bool = False,
    ) -> Tensor:  # fmt: skip
        cut, spans, heads = self.tiles("states"), self.spans(length), self.batch * self.key_heads
        size = self.features * (self.width + 1)
        states = self.launch.empty(heads, spans, size, is_scratch=True)
        grid = (heads * spans, -(-self.features // cut.features), -(-self.width // cut.width))
        self.launch(
            self.kernels._span_states, grid,
            features, values, factor, shift, states, length, spans, self.key_heads, *strides,
            GROUP=group, INVERSE=reverse, **self.settings(cut),
        )  # fmt: skip
        # A state that a call began with is one that it gives back.
        sums = self.launch.empty(heads, spans + 1, size, is_scratch=first is None)
        cols = 64 if not self.interpreted else 1024
        self.launch(
            self.kernels._running_sums, (-(-size // cols), heads),
            states, first, sums, spans, size, REVERSE=reverse, SPANS=2 if self.interpreted else 16, COLS=cols,
        )  # fmt: skip
        return sums

    def read(self, sums: Tensor | None) -> tuple[Tensor, ...]:
        """Outputs, and totals if normal."""
        shape = (self.batch, self.heads, self.queries)
        out = self.launch.empty(*shape, self.width, dtype=self.value.dtype)
        totals = self.launch.empty(*shape) if self.normal else None
        self._read(sums, None, (0, 0, 0), out, totals)
        return (out,) if totals is None else (out, totals)

    def _read(
        self, sums: Tensor | None, gradient: Tensor | None, strides: tuple[int, ...], out: Tensor, totals: Tensor | None
    ) -> None:
        cut, spans = self.tiles("outputs"), self.spans(self.queries)
        self.launch(
            self.kernels._outputs, (self.batch * self.heads * spans, -(-self.width // cut.width)),
            self.query, self.key, self.value, self.weight, sums, gradient, out, out if totals is None else totals,
            self.queries, spans, 0 if sums is None else sums.shape[1], self.heads, *self.inputs(), *strides,
            GROUP=self.group, CAUSAL=self.causal, NORMAL=self.normal, **self.settings(cut),
        )  # fmt: skip

    def _deltas(self, sums: Tensor | None, gradient: Tensor, whole: bool) -> Tensor | None:
        """Room for delta of every query, filled where `by_query` does not fill it."""
        if not self.normal:
            return None
        shape = (self.batch, self.heads, self.queries)
        deltas = self.launch.empty(*shape, is_scratch=True)
        if not whole:
            columns = -(-self.width // self.tiles("outputs").width)
            parts = deltas if columns == 1 else self.launch.empty(columns, *shape, is_scratch=True)
            self._read(sums, gradient, gradient.stride()[:3], parts, None)
            if columns > 1:
                _add_up(self.launch, parts, deltas)
        return deltas

    def _like(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Room for a gradient of `[B, H, n, D]`, and its strides in that order: heads beside one another where those of x are."""
        batch, heads, n, size = x.shape
        if _beside(x):
            return self.launch.empty(batch, n, heads, size, dtype=x.dtype), (n * heads * size, size, heads * size)
        return self.launch.empty(*x.shape, dtype=x.dtype), (heads * n * size, n * size, size)

    def by_query(self, sums: Tensor | None, gradient: Tensor, totals: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Gradient of the queries, and deltas."""
        whole = _one_tile(self.features, self.width)
        cut, spans = self.tiles("both" if whole else "queries"), self.spans(self.queries)
        out, strides = self._like(self.query)
        deltas = self._deltas(sums, gradient, whole)
        self.launch(
            self.kernels._query_gradient, (self.batch * self.heads * spans, -(-self.features // cut.features)),
            self.query, self.key, self.value, self.weight, sums, gradient, totals, deltas, out,
            self.queries, spans, 0 if sums is None else sums.shape[1], self.heads, *self.inputs(),
            *gradient.stride()[:3], *strides,
            GROUP=self.group, CAUSAL=self.causal, NORMAL=self.normal, DELTA=whole, **self.settings(cut),
        )  # fmt: skip
        return out, deltas

    def by_key(
        self, sums: Tensor | None, gradient: Tensor, totals: Tensor | None, deltas: Tensor | None, by_weight: bool
    ) -> list[Tensor]:
        """Gradients of keys, values and, where they are wanted, weights."""
        whole = _one_tile(self.features, self.width)
        spans = self.spans(self.keys)
        (key, key_strides), (value, value_strides) = self._like(self.key), self._like(self.value)
        shape = (self.batch, self.key_heads, self.keys)
        found = [key, value, self.launch.empty(*shape)] if by_weight else [key, value]
        parts = None
        for role in ("both",) if whole else ("keys", "values"):
            cut = self.tiles(role)
            grid = (-(-self.features // cut.features), -(-self.width // cut.width))
            if by_weight and role != "values":
                parts = found[2] if grid[0] == 1 else self.launch.empty(grid[0], *shape, is_scratch=True)
            self.launch(
                self.kernels._key_gradients, (self.batch * self.key_heads * spans, *grid),
                self.query, self.key, self.value, self.weight, sums, gradient, totals, deltas,
                key if role != "values" else None, value if role != "keys" else None,
                parts if role != "values" else None,
                self.keys, spans, 0 if sums is None else sums.shape[1], self.key_heads, *self.inputs(),
                *gradient.stride()[:3], *key_strides, *value_strides,
                GROUP=self.group, CAUSAL=self.causal, NORMAL=self.normal, **self.settings(cut),
            )  # fmt: skip
        if parts is not None and parts is not found[2]:
            _add_up(self.launch, parts, found[2])
        return found


def _chunks(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, map: str, normal: bool, causal: bool
) -> Sequence[Tensor]:
    """Launches of the forward pass: outputs, and totals if normal."""
    from heedful.ops.fused import prepared

    query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
    given = query, key, value, None if weight is None else weight.float()

    def anew(launch: Launcher) -> Sequence[Tensor]:
        job = _Job(launch, *given, map, normal, causal)
        return job.read(job.past())

    settings = "chunks", map, normal, causal, torch.get_float32_matmul_precision()
    return prepared.again(given, settings, anew, device=query.device)


def _chunks_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, totals: Tensor | None,
    map: str, normal: bool, causal: bool, by_weight: bool,
) -> Sequence[Tensor]:  # fmt: skip
    """Launches of the backward pass: gradients of query, key, value and, where it is wanted, weight."""
    from heedful.ops.fused import prepared

    query, key, value, gradient = unit_stride(query), unit_stride(key), unit_stride(value), unit_stride(gradient)
    weight, totals = None if weight is None else weight.float(), totals if normal else None

    def anew(launch: Launcher) -> Sequence[Tensor]:
        job = _Job(launch, query, key, value, weight, map, normal, causal)
        by_query, deltas = job.by_query(job.past(), gradient, totals)
        return by_query, *job.by_key(job.future(gradient, totals, deltas), gradient, totals, deltas, by_weight)

    settings = "chunks backward", map, normal, causal, by_weight, torch.get_float32_matmul_precision()
    found = [*prepared.again((query, key, value, weight, totals, gradient), settings, anew, device=query.device)]
    for at, x in enumerate((query, key, value)):
        if _beside(x):
            found[at] = found[at].transpose(1, 2)
    return found


@torch.library.custom_op("heedful::chunks", mutates_args=())
def chunks(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, map: str, normal: bool, causal: bool
) -> tuple[Tensor, Tensor]:
    r"""Linear attention $o_i = \sum_j w_j (\phi(q_i) \cdot \phi(k_j))\, v_j$, divided by the sum of coefficients if normal.

    Args:
        query: `[B, H, Q, F]`.
        key: `[B, G, K, F]`, G = H or a divisor of it; with `causal`, K = Q.
        value: `[B, G, K, E]`.
        weight: `[B, G, K]` in float32; zero hides a key, whatever is in it, and then has no gradient.
        map: phi, of `MapName`.

    Returns:
        The output `[B, H, Q, E]` in the value's dtype, and the sums of coefficients `[B, H, Q]` (empty if not normal).
    """
    out, *totals = _chunks(query, key, value, weight, map, normal, causal)
    return out, totals[0] if normal else torch.empty(0, dtype=torch.float32, device=query.device)


@chunks.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, map: str, normal: bool, causal: bool
) -> tuple[Tensor, Tensor]:
    totals = query.new_empty(query.shape[:-1] if normal else (0,), dtype=torch.float32)
    return value.new_empty(*query.shape[:-1], value.shape[-1]), totals


@torch.library.custom_op("heedful::chunks_backward", mutates_args=())
def chunks_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, totals: Tensor,
    map: str, normal: bool, causal: bool, by_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value and weight (empty if not asked for)."""
    by_query, by_key, by_value, *others = _chunks_backward(
        gradient, query, key, value, weight, totals, map, normal, causal, by_weight
    )
    return by_query, by_key, by_value, others[0] if by_weight else totals.new_empty(0)


@chunks_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, totals: Tensor,
    map: str, normal: bool, causal: bool, by_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    by_query, by_key, by_value = (
        torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        if _beside(x)
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (unit_stride(query), unit_stride(key), unit_stride(value))
    )
    return by_query, by_key, by_value, totals.new_empty(key.shape[:-1] if by_weight else (0,))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    *tensors, ctx.map, ctx.normal, ctx.causal = inputs
    ctx.save_for_backward(*tensors, output[1] if ctx.normal else None)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None = None) -> tuple[Tensor | None, ...]:
    query, key, value, weight, totals = ctx.saved_tensors
    if torch.is_grad_enabled():
        # A second derivative is being prepared: every step must leave its own history.
        leaves = [x for x, want in zip((query, key, value, weight), ctx.needs_input_grad, strict=False) if want]
        out = plain(query, key, value, weight, ctx.map, ctx.normal, ctx.causal)
        gradients = iter(torch.autograd.grad(out, leaves, gradient, create_graph=True))
        return *(next(gradients) if want else None for want in ctx.needs_input_grad[:4]), None, None, None
    by_weight = weight is not None and ctx.needs_input_grad[3]
    settings = ctx.map, ctx.normal, ctx.causal, by_weight
    if eager(gradient, *ctx.saved_tensors):
        by_query, by_key, by_value, *others = _chunks_backward(gradient, query, key, value, weight, totals, *settings)
    else:
        totals = query.new_empty(0, dtype=torch.float32) if totals is None else totals
        by_query, by_key, by_value, *others = chunks_backward(gradient, query, key, value, weight, totals, *settings)
    return by_query, by_key, by_value, others[0] if by_weight else None, None, None, None


chunks.register_autograd(_differentiate, setup_context=_keep)


class _Chunks(torch.autograd.Function):
    """The same without the dispatcher, which takes longer than the kernels of a short sequence."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        found = _chunks(*inputs)
        _keep(ctx, inputs, found)
        return found[0]

    backward = staticmethod(_differentiate)


def attention(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, map: str, normal: bool, causal: bool
) -> Tensor:
    """The output of `chunks` by the shortest way: the operator where torch traces or looks on, plain launches elsewhere."""
    tensors, settings = (query, key, value, weight), (map, normal, causal)
    if not eager(*tensors):
        return chunks(*tensors, *settings)[0]
    return _Chunks.apply(*tensors, *settings) if recorded(*tensors) else _chunks(*tensors, *settings)[0]


def plain(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, map: str, normal: bool, causal: bool
) -> Tensor:
    """What `chunks` computes, by operations of torch that can be differentiated any number of times."""
    from heedful.ops.linear import sums

    kind = wide(value.dtype)
    phi = {"identity": lambda x: x, "relu": torch.relu, "elu": elu_plus_one}[map]
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    x, y, v = phi(query.to(kind)), phi(key.to(kind)), value.to(kind)
    if weight is not None:
        weight = weight.repeat_interleave(query.shape[1] // weight.shape[1], dim=1)[..., None]
        y, v = (part.masked_fill(weight == 0, 0.0) for part in (y, v))
        y = y * weight
    out, total = sums(x, y, v, causal)
    return (out / divisor(total) if normal else out).to(value.dtype)


@torch.library.custom_op("heedful::chunks_step", mutates_args=())
def chunks_step(
    query: Tensor, key: Tensor, value: Tensor, memory: Tensor, total: Tensor, map: str, normal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal linear attention continued from a state in float32: the output, the next memory and the next total.

    Shapes are `[B, H, n, F]` twice, `[B, H, n, E]`, `[B, H, F, E]` and `[B, H, F]`. There is no gradient.
    """
    from heedful.ops.fused import prepared

    batch, heads, length, features = query.shape
    width = value.shape[-1]
    if length > 1:
        first = torch.cat((memory.flatten(2), total), dim=-1).flatten(0, 1)
        given = unit_stride(query), unit_stride(key), unit_stride(value), first

        def many(launch: Launcher) -> Sequence[Tensor]:
            job = _Job(launch, *given[:3], None, map, normal, True)
            sums = job.past(first)
            assert sums is not None
            return sums, *job.read(sums)

        settings = "chunks step", map, normal, torch.get_float32_matmul_precision()
        sums, out, *_ = prepared.again(given, settings, many, device=query.device)
        last = sums[:, -1].split((features * width, features), dim=-1)
        return out, last[0].reshape(memory.shape).clone(), last[1].reshape(total.shape).clone()
    query, key, value = (unit_stride(x.reshape(batch * heads, x.shape[-1])) for x in (query, key, value))
    memory, total = memory.contiguous(), total.contiguous()

    def one(launch: Launcher) -> Sequence[Tensor]:
        from heedful.ops.fused import chunks as kernels

        made = (
            launch.empty(batch, heads, 1, width, dtype=value.dtype),
            launch.empty(*memory.shape),
            launch.empty(*total.shape),
        )
        cut = min(power_of_2(width), max(16, 4096 // power_of_2(features)))
        launch(
            kernels._one_token, (batch * heads, -(-width // cut)),
            query, key, value, memory, total, *made, *(x.stride(0) for x in (query, key, value)),
            F=features, E=width, BLOCK_F=power_of_2(features), BLOCK_E=cut, MAP=map, NORMAL=normal, num_warps=4,
        )  # fmt: skip
        return made

    out, memory, total = prepared.again(
        (query, key, value, memory, total), ("one token", map, normal, batch), one, device=query.device
    )
    return out, memory, total


@chunks_step.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, memory: Tensor, total: Tensor, map: str, normal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    out = value.new_empty(*query.shape[:-1], value.shape[-1])
    return out, memory.new_empty(memory.shape), total.new_empty(total.shape)

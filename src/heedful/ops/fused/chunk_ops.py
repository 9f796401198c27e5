"""Linear attention by chunks as operators of torch: forward, backward and one decoding step of the kernels in `chunks`."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from heedful.kernels.base import divisor
from heedful.kernels.feature_map import elu_plus_one
from heedful.ops.fused._device import Tiles, able, current, power_of_2, tiles, unit_stride
from heedful.ops.request import wide

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


class _Job:
    """Tensors of one call, and launches of the kernels on them."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, map: str, normal: bool, causal: bool
    ) -> None:
        from heedful.ops.fused import chunks
        from heedful.ops.fused.prepared import launched

        self.kernels, self.launched = chunks, launched
        self.query, self.key, self.value = (unit_stride(x) for x in (query, key, value))
        self.weight = None if weight is None else weight.float()
        assert weight is None or weight.shape == key.shape[:3], "strides are read as they are"
        assert key.shape[:3] == value.shape[:3]
        self.batch, self.heads, self.queries, self.features = query.shape
        self.key_heads, self.keys, self.width = value.shape[1:]
        self.group = self.heads // self.key_heads
        self.interpreted = query.device.type == "cpu"
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

    def past(self, first: Tensor | None = None, last: bool = False) -> Tensor | None:
        """Sums of the spans of keys before each one, `[B * G, spans + 1, F * E + F]`; None where nothing needs them."""
        if self.causal and self.spans(self.keys) == 1 and first is None and not last:
            return None
        rest = (0, 0, 0) if self.weight is None else self.weight.stride()
        strides = (*self.key.stride()[:3], *self.value.stride()[:3], *rest)
        return self._sums(self.key, self.value, self.weight, None, self.keys, strides, 1, first)

    def future(self, gradient: Tensor, totals: Tensor, deltas: Tensor) -> Tensor | None:
        """The same of queries and gradients, for the spans after each one."""
        if self.causal and self.spans(self.queries) == 1:
            return None
        rest = totals.stride() if self.normal else (0, 0, 0)
        strides = (*self.query.stride()[:3], *gradient.stride()[:3], *rest)
        by, shift = (totals, deltas) if self.normal else (None, None)
        return self._sums(self.query, gradient, by, shift, self.queries, strides, self.group, None, reverse=True)

    def _sums(
        self, features: Tensor, values: Tensor, factor: Tensor | None, shift: Tensor | None, length: int,
        strides: tuple[int, ...], group: int, first: Tensor | None, reverse: bool = False,
    ) -> Tensor:  # fmt: skip
        cut, spans, heads = self.tiles("states"), self.spans(length), self.batch * self.key_heads
        size = self.features * (self.width + 1)
        states = torch.empty(heads, spans, size, dtype=torch.float32, device=features.device)
        grid = (heads * spans, -(-self.features // cut.features), -(-self.width // cut.width))
        self.launched(self.kernels._span_states, grid)(
            features, values, factor, shift, states, length, spans, self.key_heads, *strides,
            GROUP=group, INVERSE=reverse, **self.settings(cut),
        )  # fmt: skip
        sums = torch.empty(heads, spans + 1, size, dtype=torch.float32, device=features.device)
        cols = 64 if not self.interpreted else 1024
        self.launched(self.kernels._running_sums, (-(-size // cols), heads))(
            states, first, sums, spans, size, REVERSE=reverse, SPANS=2 if self.interpreted else 16, COLS=cols
        )
        return sums

    def read(self, sums: Tensor | None, gradient: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Outputs and totals; given a gradient, deltas and nothing."""
        cut, spans = self.tiles("outputs"), self.spans(self.queries)
        columns = -(-self.width // cut.width)
        shape = (self.batch, self.heads, self.queries)
        totals = self.query.new_empty(shape if self.normal and gradient is None else (0,), dtype=torch.float32)
        strides: tuple[int, ...] = (0, 0, 0)
        if gradient is None:
            out = self.value.new_empty(*shape, self.width)
        else:
            out, strides = self.query.new_empty(columns, *shape, dtype=torch.float32), gradient.stride()[:3]
        self.launched(self.kernels._outputs, (self.batch * self.heads * spans, columns))(
            self.query, self.key, self.value, self.weight, sums, gradient, out, totals,
            self.queries, spans, 0 if sums is None else sums.shape[1], self.heads, *self.inputs(), *strides,
            GROUP=self.group, CAUSAL=self.causal, NORMAL=self.normal, **self.settings(cut),
        )  # fmt: skip
        return out if gradient is None else out.sum(dim=0), totals

    def by_query(self, sums: Tensor | None, gradient: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of the queries, and deltas."""
        whole = _one_tile(self.features, self.width)
        cut, spans = self.tiles("both" if whole else "queries"), self.spans(self.queries)
        deltas = torch.empty_like(totals) if whole or not self.normal else self.read(sums, gradient)[0]
        out = torch.empty_like(self.query)
        self.launched(self.kernels._query_gradient, (self.batch * self.heads * spans, -(-self.features // cut.features)))(
            self.query, self.key, self.value, self.weight, sums, gradient, totals, deltas, out,
            self.queries, spans, 0 if sums is None else sums.shape[1], self.heads, *self.inputs(),
            *gradient.stride()[:3], *out.stride()[:3],
            GROUP=self.group, CAUSAL=self.causal, NORMAL=self.normal, DELTA=whole, **self.settings(cut),
        )  # fmt: skip
        return out, deltas

    def by_key(
        self, sums: Tensor | None, gradient: Tensor, totals: Tensor, deltas: Tensor, by_weight: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of keys, values and weights."""
        whole = _one_tile(self.features, self.width)
        spans = self.spans(self.keys)
        key, value = torch.empty_like(self.key), torch.empty_like(self.value)
        weight = None
        for role in ("both",) if whole else ("keys", "values"):
            cut = self.tiles(role)
            grid = (-(-self.features // cut.features), -(-self.width // cut.width))
            if by_weight and role != "values":
                weight = totals.new_empty(grid[0], self.batch, self.key_heads, self.keys)
            self.launched(self.kernels._key_gradients, (self.batch * self.key_heads * spans, *grid))(
                self.query, self.key, self.value, self.weight, sums, gradient, totals, deltas,
                key if role != "values" else None, value if role != "keys" else None,
                weight if role != "values" else None,
                self.keys, spans, 0 if sums is None else sums.shape[1], self.key_heads, *self.inputs(),
                *gradient.stride()[:3], *key.stride()[:3], *value.stride()[:3],
                GROUP=self.group, CAUSAL=self.causal, NORMAL=self.normal, **self.settings(cut),
            )  # fmt: skip
        return key, value, totals.new_empty(0) if weight is None else weight.sum(dim=0)


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
    with current(query):
        job = _Job(query, key, value, weight, map, normal, causal)
        return job.read(job.past())


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
    with current(query):
        job = _Job(query, key, value, weight, map, normal, causal)
        gradient = unit_stride(gradient)
        by_query, deltas = job.by_query(job.past(), gradient, totals)
        return by_query, *job.by_key(job.future(gradient, totals, deltas), gradient, totals, deltas, by_weight)


@chunks_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, totals: Tensor,
    map: str, normal: bool, causal: bool, by_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    by_query, by_key, by_value = (torch.empty_like(unit_stride(x)) for x in (query, key, value))
    return by_query, by_key, by_value, totals.new_empty(key.shape[:-1] if by_weight else (0,))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.map, ctx.normal, ctx.causal = inputs
    ctx.save_for_backward(*tensors, output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, weight, totals = ctx.saved_tensors
    if torch.is_grad_enabled():
        # A second derivative is being prepared: every step must leave its own history.
        leaves = [x for x, want in zip((query, key, value, weight), ctx.needs_input_grad, strict=False) if want]
        out = plain(query, key, value, weight, ctx.map, ctx.normal, ctx.causal)
        gradients = iter(torch.autograd.grad(out, leaves, gradient, create_graph=True))
        return *(next(gradients) if want else None for want in ctx.needs_input_grad[:4]), None, None, None
    by_weight = weight is not None and ctx.needs_input_grad[3]
    *gradients, by_weights = chunks_backward(
        gradient, query, key, value, weight, totals, ctx.map, ctx.normal, ctx.causal, by_weight
    )
    return *gradients, by_weights if by_weight else None, None, None, None


chunks.register_autograd(_differentiate, setup_context=_keep)


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
    batch, heads, length, features = query.shape
    width = value.shape[-1]
    with current(query):
        if length > 1:
            job = _Job(query, key, value, None, map, normal, True)
            sums = job.past(torch.cat((memory.flatten(2), total), dim=-1).flatten(0, 1), last=True)
            assert sums is not None
            last = sums[:, -1].split((features * width, features), dim=-1)
            out = job.read(sums)[0]
            return out, last[0].reshape(memory.shape).clone(), last[1].reshape(total.shape).clone()
        from heedful.ops.fused import chunks as kernels
        from heedful.ops.fused.prepared import launched

        query, key, value = (x.reshape(batch * heads, x.shape[-1]) for x in (query, key, value))
        query, key, value = (unit_stride(x) for x in (query, key, value))
        out = value.new_empty(batch, heads, 1, width)
        memory, total = memory.contiguous(), total.contiguous()
        new = torch.empty_like(memory), torch.empty_like(total)
        cut = min(power_of_2(width), max(16, 4096 // power_of_2(features)))
        launched(kernels._one_token, (batch * heads, -(-width // cut)))(
            query, key, value, memory, total, out, *new, *(x.stride(0) for x in (query, key, value)),
            F=features, E=width, BLOCK_F=power_of_2(features), BLOCK_E=cut, MAP=map, NORMAL=normal, num_warps=4,
        )  # fmt: skip
        return out, *new


@chunks_step.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, memory: Tensor, total: Tensor, map: str, normal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    out = value.new_empty(*query.shape[:-1], value.shape[-1])
    return out, memory.new_empty(memory.shape), total.new_empty(total.shape)

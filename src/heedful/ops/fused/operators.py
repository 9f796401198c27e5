"""Two operators of torch: fused attention and its gradients. Both have shapes without values, so that they compile and export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heedful._errors import Unsupported
from heedful.ops.fused._eager import eager, recorded

NUMBER_OF_TENSORS = 13  # the leading arguments of both operators that are tensors


@torch.library.custom_op("heedful::fused_attention", mutates_args=())
def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor,
    beta: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    bias: Tensor | None,
    lengths: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    keep: Tensor | None,
    blocks: Tensor | None,
    block_size: Sequence[int],
    low: int | None,
    high: int | None,
    activation: str,
    degree: int,
    division: int,
    distance: bool,
) -> tuple[Tensor, Tensor]:
    """The output [B, H, Q, E], and the divisor of every row as backward needs it."""
    from heedful.ops.fused import launch

    problem = launch.Problem(
        query, key, value, alpha, beta, left, right, bias, lengths, query_ids, key_ids, keep, blocks,
        block_size, low, high, activation, degree, division, distance,
    )  # fmt: skip
    return launch.forward(problem)


@fused_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    division = rest[-2]
    out = value.new_empty(*query.shape[:-1], value.shape[-1])
    return out, query.new_empty(query.shape[:-1] if division else (0,), dtype=torch.float32)


@torch.library.custom_op("heedful::fused_attention_backward", mutates_args=())
def fused_attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor,
    beta: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    bias: Tensor | None,
    lengths: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    keep: Tensor | None,
    blocks: Tensor | None,
    out: Tensor,
    stat: Tensor,
    above: Tensor,
    block_size: Sequence[int],
    low: int | None,
    high: int | None,
    activation: str,
    degree: int,
    division: int,
    distance: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and, where wanted, of alpha, beta, left, right and bias."""
    from heedful.ops.fused import launch

    problem = launch.Problem(
        query, key, value, alpha, beta, left, right, bias, lengths, query_ids, key_ids, keep, blocks,
        block_size, low, high, activation, degree, division, distance,
    )  # fmt: skip
    gradients = launch.backward(problem, out, stat, above, wanted)
    # What nobody wants may be one tensor several times, which torch takes from no operator.
    others = (x if want else x.new_empty(0) for x, want in zip(gradients[3:], wanted, strict=True))
    return (*gradients[:3], *others)  # type: ignore[return-value]


@fused_attention_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    small = rest[:5]  # alpha, beta, left, right, bias
    gradients = [x.new_empty(x.shape) for x in (query, key, value)]
    empty = query.new_empty(0, dtype=torch.float32)
    return (
        *gradients,
        *(x.new_empty(x.shape) if want else empty.clone() for x, want in zip(small, rest[-1], strict=True)),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:NUMBER_OF_TENSORS], *output)
    ctx.settings = inputs[NUMBER_OF_TENSORS:]
    ctx.wanted = [bool(x) for x in ctx.needs_input_grad[3:8]]


def _gradients(ctx: Any, above: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.heedful.fused_attention_backward(*ctx.saved_tensors, above, *ctx.settings, ctx.wanted)
    chosen = (*gradients[:3], *(x if want else None for x, want in zip(gradients[3:], ctx.wanted, strict=True)))
    return (*chosen, *(None,) * (len(ctx.needs_input_grad) - len(chosen)))


def _no_second(ctx: Any, *above: Tensor) -> None:
    raise Unsupported("impl='triton' has no second derivatives; impl='stream' and impl='reference' have them")


fused_attention.register_autograd(_gradients, setup_context=_keep)
fused_attention_backward.register_autograd(_no_second)


class _Eager(torch.autograd.Function):
    """The same two launches without the dispatcher, whose handling of so many arguments takes longer than a small kernel."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        from heedful.ops.fused import launch

        out, stat = launch.forward(launch.Problem(*inputs))
        ctx.save_for_backward(*inputs[:NUMBER_OF_TENSORS], out, stat)
        ctx.settings = inputs[NUMBER_OF_TENSORS:]
        return out

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        from heedful.ops.fused import launch

        wanted = ctx.needs_input_grad[3:8]
        if torch.is_grad_enabled():  # a second derivative is being prepared: the operator tells when it is asked for
            gradients = fused_attention_backward(*ctx.saved_tensors, above, *ctx.settings, wanted)
        else:
            *inputs, out, stat = ctx.saved_tensors
            gradients = launch.backward(launch.Problem(*inputs, *ctx.settings), out, stat, above, wanted)
        chosen = (*gradients[:3], *(x if want else None for x, want in zip(gradients[3:], wanted, strict=True)))
        return (*chosen, *(None,) * (len(ctx.needs_input_grad) - len(chosen)))


def attention(*inputs: Any) -> Tensor:
    """`fused_attention` by the shortest way: operators where torch traces or looks on, plain launches elsewhere."""
    tensors = inputs[:NUMBER_OF_TENSORS]
    if not eager(*tensors):
        return fused_attention(*inputs)[0]
    if recorded(*tensors):
        return _Eager.apply(*inputs)
    from heedful.ops.fused import launch

    return launch.forward(launch.Problem(*inputs))[0]


class Settled:
    """Fused attention of query, key and value with all else settled: their shapes, types and device, a kernel of numbers, no mask but causality.

    Launches are kept by strides alone, which are all that is left to look at.
    """

    def __init__(self, alpha: Tensor, beta: Tensor | None, *settings: Any) -> None:
        self.rest = (alpha, beta, *(None,) * 8, *settings)
        self.device = alpha.device
        self.launches: dict[Any, Any] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if torch._C._len_torch_dispatch_stack():
            return attention(query, key, value, *self.rest)
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            return _WithGradients.apply(query, key, value, self)
        return self.forward(query, key, value)[0]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        known = self._known((query, key, value))
        if known is not None:
            return known.run((query, key, value, *self.rest[:2]), self.device)
        from heedful.ops.fused import launch

        problem = launch.Problem(query, key, value, *self.rest)
        found = launch.forward(problem)
        self._keep("forward", (query, key, value), problem, problem[:5])
        return found

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, stat: Tensor, above: Tensor
    ) -> Sequence[Tensor]:
        known = self._known((query, key, value, above))
        if known is not None:
            return known.run((query, key, value, *self.rest[:2], out, stat, above), self.device)
        from heedful.ops.fused import launch

        problem = launch.Problem(query, key, value, *self.rest)
        found = launch.backward(problem, out, stat, above, (False,) * 5)
        self._keep("backward", (query, key, value, above), problem, (*problem[:5], out, stat, above))
        return found[:3]

    def _known(self, tensors: Sequence[Tensor]) -> Any:
        """The launches of tensors with these strides, which begin where kernels may count on it, on the current device."""
        known = self.launches.get(self._key(tensors))
        if known is None or known.is_watched() or self.device.index != torch._C._cuda_getDevice():
            return None
        places = 0
        for x in tensors:
            places |= x.data_ptr()
        return known if places % 16 == 0 else None

    @staticmethod
    def _key(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        return tuple([x.stride() for x in tensors])

    def _keep(self, kind: str, tensors: Sequence[Tensor], problem: Any, given: Sequence[Tensor | None]) -> None:
        from heedful.ops.fused import launch, prepared

        found = prepared.KNOWN.get(launch.form_of(kind, problem, given))
        if found is not None:
            self.launches[self._key(tensors)] = found


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, settled: Settled) -> Tensor:
        out, stat = settled.forward(query, key, value)
        ctx.save_for_backward(query, key, value, out, stat)
        ctx.settled = settled
        return out

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            query, key, value, out, stat = ctx.saved_tensors
            rest = ctx.settled.rest
            tensors, settings = rest[: NUMBER_OF_TENSORS - 3], rest[NUMBER_OF_TENSORS - 3 :]
            gradients = fused_attention_backward(query, key, value, *tensors, out, stat, above, *settings, (False,) * 5)
            return (*gradients[:3], None)
        return (*ctx.settled.backward(*ctx.saved_tensors, above), None)

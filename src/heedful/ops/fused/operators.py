"""Two operators of torch: fused attention and its gradients. Both have shapes without values, so that they compile and export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heedful._errors import Unsupported
from heedful.ops.fused._eager import eager, recorded
from heedful.ops.fused.listing import MASKING, Sight

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
    def forward(ctx: Any, sight: Sight, *inputs: Any) -> Tensor:
        from heedful.ops.fused import launch

        out, stat = launch.forward(launch.Problem(*inputs), sight)
        ctx.save_for_backward(*inputs[:NUMBER_OF_TENSORS], out, stat)
        ctx.sight, ctx.settings = sight, inputs[NUMBER_OF_TENSORS:]
        return out

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        from heedful.ops.fused import launch

        wanted = ctx.needs_input_grad[4:9]
        if torch.is_grad_enabled():  # a second derivative is being prepared: the operator tells when it is asked for
            gradients = fused_attention_backward(*ctx.saved_tensors, above, *ctx.settings, wanted)
        else:
            *inputs, out, stat = ctx.saved_tensors
            gradients = launch.backward(launch.Problem(*inputs, *ctx.settings), out, stat, above, wanted, ctx.sight)
        chosen = (None, *gradients[:3], *(x if want else None for x, want in zip(gradients[3:], wanted, strict=True)))
        return (*chosen, *(None,) * (len(ctx.needs_input_grad) - len(chosen)))


def attention(*inputs: Any, sight: Sight) -> Tensor:
    """`fused_attention` by the shortest way: operators where torch traces or looks on, plain launches elsewhere. `sight` is that of the mask."""
    tensors = inputs[:NUMBER_OF_TENSORS]
    if not eager(*tensors):
        return fused_attention(*inputs)[0]
    if recorded(*tensors):
        return _Eager.apply(sight, *inputs)
    from heedful.ops.fused import launch

    return launch.forward(launch.Problem(*inputs), sight)[0]


Parameters = tuple[Tensor, Tensor | None]
"""Alpha and beta."""


class Settled:
    """Fused attention of query, key and value with all else settled: their shapes, types and device, the kind of kernel and of mask.

    Launches are kept by strides alone, which are all that is left to look at. `parameters` are those of the call where a kernel has tensors,
    `sight` is that of a mask that is more than bounds of j - i.
    """

    def __init__(self, alpha: Tensor, beta: Tensor | None, *settings: Any, is_learned: bool = False) -> None:
        self.parameters, self.settings, self.is_learned = (alpha, beta), settings, is_learned
        self.device = alpha.device
        self.launches: dict[Any, Any] = {}

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sight: Sight | None = None,
        parameters: Parameters | None = None,
    ) -> Tensor:
        alpha, beta = self.parameters if parameters is None else parameters
        if torch._C._len_torch_dispatch_stack():
            return fused_attention(*self.arguments((query, key, value, alpha, beta), sight))[0]
        if recorded(query, key, value, alpha, beta):
            return _WithGradients.apply(query, key, value, alpha, beta, self, sight)
        return self.forward((query, key, value, alpha, beta), sight)[0]

    def arguments(self, given: Sequence[Any], sight: Sight | None) -> tuple[Any, ...]:
        """Those of the operator."""
        return (*given, None, None, None, *(UNMASKED if sight is None else sight.given), *self.settings)

    def forward(self, given: Sequence[Any], sight: Sight | None) -> Sequence[Tensor]:
        """Of query, key, value, alpha and beta."""
        strides = self._strides(given, sight)
        known = self._known(strides, given, sight)
        if known is not None:
            return known.run(given, self.device, sight)
        from heedful.ops.fused import launch

        problem = launch.Problem(*self.arguments(given, sight))
        found = launch.forward(problem, sight)
        self._keep(strides, launch.form_of("forward", problem, given))
        return found

    def backward(self, given: Sequence[Any], sight: Sight | None, wanted: Sequence[bool]) -> Sequence[Tensor | None]:
        """Of these, the result, what was kept of its rows, and the gradient above; those of alpha and beta where they are wanted."""
        strides = (*wanted, *self._strides(given, sight))
        known = self._known(strides, given, sight)
        if known is not None:
            return gathered(known.run(given, self.device, sight), wanted)
        from heedful.ops.fused import launch

        problem, every = launch.Problem(*self.arguments(given[:5], sight)), (*wanted, False, False, False)
        out, stat, above = given[5:]
        found = launch.backward(problem, out, stat, above, every, sight)
        self._keep(strides, launch.form_of("backward", problem, given, every))
        return (*found[:3], *(x if want else None for x, want in zip(found[3:5], wanted, strict=True)))

    def _known(self, strides: Any, given: Sequence[Any], sight: Sight | None) -> Any:
        """The launches of tensors with these strides, which begin where kernels may count on it, on the current device."""
        known = self.launches.get(strides)
        if known is None or known.is_watched() or self.device.index != torch._C._cuda_getDevice():
            return None
        places = 0 if sight is None else sight.places
        for x in given:
            places |= 0 if x is None else x.data_ptr()
        return known if places % 16 == 0 else None

    @staticmethod
    def _strides(given: Sequence[Any], sight: Sight | None) -> tuple[Any, ...]:
        strides = [None if x is None else x.stride() for x in given]
        return tuple(strides) if sight is None else (*strides, sight.strides)

    def _keep(self, strides: Any, form: Any) -> None:
        from heedful.ops.fused import prepared

        found = prepared.KNOWN.get(form)
        if found is not None:
            self.launches[strides] = found


def gathered(made: Sequence[Tensor], wanted: Sequence[bool]) -> tuple[Any, ...]:
    """Gradients of query, key and value, and of alpha and beta where they are wanted, from what launches leave."""
    dq, dk, dv, *rows = made
    return dq, dk, dv, *(rows.pop(0).sum(dim=(0, 2)) if want else None for want in wanted[:2])


UNMASKED = (None,) * len(MASKING)


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        alpha: Tensor,
        beta: Tensor | None,
        settled: Settled,
        sight: Sight | None,
    ) -> Tensor:
        given = query, key, value, alpha, beta
        out, stat = settled.forward(given, sight)
        # Tensors of the mask so that torch sees whether somebody writes into them meanwhile.
        ctx.save_for_backward(*given, out, stat, *(() if sight is None else sight.given))
        ctx.settled, ctx.sight = settled, sight
        return out

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        settled, sight, wanted = ctx.settled, ctx.sight, ctx.needs_input_grad[3:5]
        given = (*ctx.saved_tensors[:7], above)
        if torch.is_grad_enabled():
            inputs = settled.arguments(given[:5], sight)
            tensors, settings = inputs[:NUMBER_OF_TENSORS], inputs[NUMBER_OF_TENSORS:]
            found = fused_attention_backward(*tensors, *given[5:], *settings, (*wanted, False, False, False))
            return (*found[:3], *(x if want else None for x, want in zip(found[3:5], wanted, strict=True)), None, None)
        return (*settled.backward(given, sight, wanted), None, None)

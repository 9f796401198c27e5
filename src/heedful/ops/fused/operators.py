"""Two operators of torch: fused attention and its gradients. Both have shapes without values, so that they compile and export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from heedful._errors import Unsupported
from heedful._runtime import lasting
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


class _Recorded(torch.autograd.Function):
    """The same launches without the dispatcher, whose handling of so many arguments takes longer than a small kernel.

    With those that `settled` keeps, where it is given: then inputs may end behind alpha and beta. The tensors that are saved are the same,
    as a checkpoint may run the first call of a signature again as a later one. Those of the mask are among them also so that torch sees
    whether somebody writes into them meanwhile.
    """

    @staticmethod
    def forward(
        ctx: Any, settled: Settled | None, sight: Sight | None, settings: tuple[Any, ...], *inputs: Any
    ) -> Tensor:
        if settled is None:
            from heedful.ops.fused import launch

            out, stat = launch.forward(launch.Problem(*inputs, *settings), sight)
        else:
            out, stat = settled.forward(inputs[:5], sight)
        ctx.save_for_backward(*inputs, out, stat)
        ctx.settled, ctx.sight, ctx.settings = settled, _held(sight), settings
        return out

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, stat = ctx.saved_tensors
        inputs += [None] * (NUMBER_OF_TENSORS - len(inputs))
        needs, sight = ctx.needs_input_grad[3:], _unless_copied(ctx.sight(), inputs[8:])
        wanted = (*needs[3:8], False, False, False)[:5]
        gradients: Sequence[Tensor | None]
        if torch.is_grad_enabled():  # a second derivative is being prepared: the operator tells when it is asked for
            gradients = fused_attention_backward(*inputs, out, stat, above, *ctx.settings, wanted)
        elif ctx.settled is None:
            from heedful.ops.fused import launch

            gradients = launch.backward(launch.Problem(*inputs, *ctx.settings), out, stat, above, wanted, sight)
        else:
            gradients = ctx.settled.backward(inputs, out, stat, above, sight, wanted)
        ctx.sight = _gone
        chosen = (*gradients[:3], *(x if want else None for x, want in zip(gradients[3:], wanted, strict=False)))
        return (None, None, None, *chosen[: len(needs)], *(None,) * (len(needs) - len(chosen)))


def _held(sight: Sight | None) -> Callable[[], Sight | None]:
    """A sight for the first backward pass; weakly where saved tensors are handed elsewhere, as in a checkpoint, which is to hold none."""
    if sight is None or torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return lambda: sight
    return ref(sight)


def _unless_copied(sight: Sight | None, saved: Sequence[Tensor | None]) -> Sight | None:
    """A sight, unless hooks have saved copies of its tensors: into these themselves somebody may have written since."""
    if sight is None:
        return None
    pairs = zip(saved, sight.given, strict=True)
    return None if any(x is not None and y is not None and x.data_ptr() != y.data_ptr() for x, y in pairs) else sight


def _gone() -> None:
    """After a backward pass nothing of a mask stays with its graph; a second one makes it anew from the saved tensors."""


def attention(*inputs: Any, sight: Sight) -> Tensor:
    """`fused_attention` by the shortest way: operators where torch traces or looks on, plain launches elsewhere. `sight` is that of the mask."""
    tensors = inputs[:NUMBER_OF_TENSORS]
    if not eager(*tensors):
        return fused_attention(*inputs)[0]
    if recorded(*tensors):
        return _Recorded.apply(None, sight, inputs[NUMBER_OF_TENSORS:], *tensors)
    from heedful.ops.fused import launch

    return launch.forward(launch.Problem(*inputs), sight)[0]


Parameters = tuple[Tensor, Tensor | None]
"""Alpha and beta."""
# What captured graphs read and no call may hold any more.
OF_GRAPHS: list[Parameters] = []


class Settled:
    """Fused attention of query, key and value with all else settled: their shapes, types and device, the kind of kernel and of mask.

    Launches are kept by strides alone, which are all that is left to look at. `parameters` are those of the call where a kernel has tensors,
    `sight` is that of a mask that is more than bounds of j - i.
    """

    def __init__(
        self, numbers: tuple[float, float | None], heads: int, device: torch.device, *settings: Any, is_learned: bool
    ) -> None:
        self.numbers, self.heads, self.device = numbers, heads, device
        self.settings, self.is_learned = settings, is_learned
        self.launches: dict[Any, Any] = {}
        self._rows: dict[int | None, Parameters] = {}
        self.rows()

    def rows(self) -> Parameters:
        """Alpha and beta of each head, where they are numbers: made once for a stream, and never freed once a graph reads them."""
        stream = lasting(self.device)
        found = self._rows.get(stream)
        if found is None:
            if stream is None and self._rows:
                # A capture begins when all before it is done, and knows addresses alone.
                found = next(iter(self._rows.values()))
                OF_GRAPHS.append(found)
            else:
                found = self._made_rows()
                if stream is None:
                    return found
            self._rows[stream] = found
        return found

    def _made_rows(self) -> Parameters:
        with torch.inference_mode(False), torch.no_grad():
            alpha, beta = (
                None if x is None else torch.full((self.heads,), x, dtype=torch.float32, device=self.device)
                for x in self.numbers
            )
        assert alpha is not None
        return alpha, beta

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sight: Sight | None = None,
        parameters: Parameters | None = None,
    ) -> Tensor:
        given = query, key, value, *(self.rows() if parameters is None else parameters)
        if torch._C._len_torch_dispatch_stack():
            return fused_attention(*self._arguments(given, sight))[0]
        if recorded(*given):
            masking = () if sight is None else (None, None, None, *sight.given)
            return _Recorded.apply(self, sight, self.settings, *given, *masking)
        return self.forward(given, sight)[0]

    def _arguments(self, given: Sequence[Any], sight: Sight | None) -> tuple[Any, ...]:
        """Those of the operator."""
        return (*given, None, None, None, *(UNMASKED if sight is None else sight.given), *self.settings)

    def forward(self, given: Sequence[Any], sight: Sight | None) -> Sequence[Tensor]:
        """Of query, key, value, alpha and beta."""
        strides = self._strides(given, sight)
        made = self._run(strides, given, sight)
        if made is not None:
            return made
        from heedful.ops.fused import launch

        problem = launch.Problem(*self._arguments(given, sight))
        found = launch.forward(problem, sight)
        self._keep(strides, launch.form_of("forward", problem, given, sight=sight))
        return found

    def backward(
        self, inputs: Sequence[Any], out: Tensor, stat: Tensor, above: Tensor, sight: Sight | None, wanted: Sequence[bool]
    ) -> Sequence[Tensor | None]:  # fmt: skip
        """Of the tensors of a call: gradients of query, key and value, and of alpha and beta where they are wanted."""
        given = (*inputs[:5], out, stat, above)
        if sight is None and any(x is not None for x in inputs[8:]):
            query, key = inputs[:2]
            sight = Sight((*query.shape[:3], key.shape[2]), self.device, inputs[8:], *self.settings[:3])
        strides = (*wanted[:2], *self._strides(given, sight))
        made = self._run(strides, given, sight)
        if made is not None:
            return gathered(made, wanted)
        from heedful.ops.fused import launch

        problem = launch.Problem(*inputs, *self.settings)
        found = launch.backward(problem, out, stat, above, wanted, sight)
        self._keep(strides, launch.form_of("backward", problem, given, wanted, sight))
        return found

    def _run(self, strides: Any, given: Sequence[Any], sight: Sight | None) -> list[Tensor] | None:
        """What kept launches make of tensors with these strides, which begin where kernels may count on it, on the current device."""
        known = self.launches.get(strides)
        if known is None or known.is_watched() or self.device.index != torch._C._cuda_getDevice():
            return None
        addresses = [0 if x is None else x.data_ptr() for x in given]
        places = 0 if sight is None else sight.places
        for address in addresses:
            places |= address
        return known.at(addresses, self.device, sight) if places % 16 == 0 else None

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

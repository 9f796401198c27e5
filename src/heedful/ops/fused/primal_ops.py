"""Primal-Attention's fold as operators of torch: forward and backward of the kernels in `primal`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from heedful._errors import Unsupported
from heedful._runtime import transforming
from heedful.ops.fused._device import (
    HAS_TRITON,
    ROOMY,
    PrimalSetting,
    chip,
    fitting,
    interpreting,
    power_of_2,
    primal_settings,
    unit_stride,
)
from heedful.ops.fused._eager import eager, recorded

LARGEST = 128
"""The widest head, the widest output and the highest rank that the kernels take; in float32 half of it.

A chip that is not `ROOMY` takes 16 bits alone, and half of it."""

_T = TypeVar("_T")

# What the kernels ask of a launch is NVIDIA's.
AVAILABLE = HAS_TRITON and torch.version.hip is None


@cache
def _largest(device: torch.device, dtype: torch.dtype) -> int:
    """The largest sizes that the kernels take on a device; 0 where they take nothing of this type there."""
    facts = chip(device) if device.type == "cuda" else None
    if not AVAILABLE or dtype == torch.float64 or (facts is not None and facts.major < 8):
        return 0
    roomy, is_single = facts is None or facts.shared >= ROOMY, dtype == torch.float32
    if is_single and not roomy:
        return 0
    return LARGEST if roomy and not is_single else LARGEST // 2


def usable(x: Tensor, size: int, width: int, rank: int, devices: frozenset[str]) -> bool:
    """Whether the kernels take queries and keys of this size, held by x, outputs of this width and scores of this rank."""
    if x.device.type not in devices or x.numel() == 0 or transforming():
        return False
    # Dynamo traces no cache.
    largest = _largest.__wrapped__ if torch.compiler.is_compiling() else _largest
    return max(size, width, rank) <= largest(x.device, x.dtype)


# Of partial sums, that one program adds up.
COLUMNS = 32

Maybe = Tensor | None


class _Sizes:
    """What the kernels are compiled for and how they are launched, from the shapes of one call."""

    def __init__(self, pair: Tensor, sample: Maybe, w_e: Tensor, c_e: Tensor, c_r: Maybe) -> None:
        import triton.language as tl

        self.batch, self.n, _, self.heads, self.p = pair.shape
        self.m, self.s = w_e.shape[-2:]
        self.v = c_e.shape[-2]
        self.pair, self.interpreted = pair, interpreting()
        exact = pair.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
        self.launch = launch_of(pair.device)
        ranked = {"P": self.p, "S": self.s, "BLOCK_P": power_of_2(self.p), "BLOCK_S": power_of_2(self.s), **self.launch}
        self.small = {
            **ranked, "num_warps": 4 if self.p <= 64 else 8,
            # Small products round no earlier than what they are made of.
            "PRECISION": "ieee" if self.interpreted else "tf32x3" if pair.dtype == torch.float32 else "tf32",
        }  # fmt: skip
        halves = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        self.large = {
            **ranked, "V": self.v, "BLOCK_V": power_of_2(self.v), "DOT": halves.get(pair.dtype, tl.float32),
            "PRECISION": "ieee" if self.interpreted else "tf32x3" if exact else "tf32",
        }  # fmt: skip
        # The sample as rows of unit stride; a readout that heads share, or one each; both of its halves in one tensor, or in two.
        self.strides = (0, 0, 0) if sample is None else sample.stride()[:3]
        self.groups = self.heads if c_e.dim() == 3 else 1
        self.readout = (c_e.stride(0) if c_e.dim() == 3 else 0, c_e.stride(-2), self.s if c_r is None else 0)

    def fitting(self, backward: bool, go: Callable[[int, int, dict[str, Any]], _T]) -> _T:
        """Calls `go(spans, blocks, settings)`, spans of so many blocks of tokens, with the first settings that the chip has room for."""
        key = (
            self.pair.device,
            self.pair.dtype,
            self.large["BLOCK_P"],
            self.large["BLOCK_V"],
            self.large["BLOCK_S"],
            backward,
        )
        tried = primal_settings(self.pair.dtype, max(self.p, self.v), backward)
        return fitting(key, tried, lambda setting: go(*self._spans(backward, setting)))

    def _spans(self, backward: bool, setting: PrimalSetting) -> tuple[int, int, dict[str, Any]]:
        rows, warps, programs, stages, registers = setting
        if self.interpreted:
            rows, each = 16, 2
        else:
            # No more programs than run at once: what is left over would take a second turn.
            total = programs * chip(self.pair.device).processors
            each = -(-self.n // (rows * max(1, total // ((2 if backward else 1) * self.batch * self.heads))))
        options = {**self.large, "ROWS": rows, "num_warps": warps, "num_stages": stages}
        return -(-self.n // (rows * each)), each, options if registers is None else {**options, "maxnreg": registers}


@cache
def launch_of(device: torch.device) -> dict[str, Any]:
    """From Hopper on a kernel is launched before the last one has ended, and waits for it itself."""
    early = device.type == "cuda" and chip(device).major >= 9
    return {"EARLY": early, **({"launch_pdl": True} if early else {})}


def whole(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def _laid_out(
    pair: Tensor, sample: Maybe, w_e: Tensor, w_r: Tensor, c_e: Tensor, c_r: Maybe, keep: Maybe
) -> tuple[Tensor, Maybe, Tensor, Tensor, Tensor, Maybe, Maybe]:
    """As the kernels read them: copies where they must be."""
    if c_e.stride(-1) != 1 or (c_r is not None and c_r.stride() != c_e.stride()):
        c_e, c_r = c_e.contiguous(), None if c_r is None else c_r.contiguous()
    return (
        unit_stride(pair), None if sample is None else unit_stride(sample), whole(w_e), whole(w_r), c_e, c_r,
        None if keep is None else keep.contiguous().view(torch.uint8),
    )  # fmt: skip


def _fold(
    pair: Tensor,
    sample: Maybe,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor,
    c_r: Maybe,
    bias: Maybe,
    keep: Maybe,
    parts: bool,
) -> Sequence[Tensor]:
    """Launches of the forward pass: outputs, W, tr(W_e^T W_r), how many tokens there are and, with `parts`, energies."""
    from heedful.ops.fused import prepared, primal

    pair, sample, w_e, w_r, c_e, c_r, keep = _laid_out(pair, sample, w_e, w_r, c_e, c_r, keep)
    bias = None if bias is None else whole(bias)

    def anew(launch: prepared.Launcher) -> Sequence[Tensor]:
        z = _Sizes(pair, sample, w_e, c_e, c_r)
        out = launch.empty(z.batch, z.n, z.heads, z.v, dtype=pair.dtype)
        on, product = launch.empty(z.batch, 2, z.heads, z.p, z.s), launch.empty(z.heads)
        tokens = launch.empty(z.batch)
        energy = launch.empty(z.batch, 2, z.heads, z.s) if parts else None
        ticket = launch.empty(z.batch * z.heads, dtype=torch.int32, is_scratch=True)
        launch(
            primal.prepare, (z.batch * z.heads, 2, -(-z.p // 16) + 1),
            sample, w_e, w_r, keep, on, product, tokens, ticket, z.heads, z.n, z.m, *z.strides,
            ROWS=min(power_of_2(z.m), 8192 // power_of_2(z.s)), STATIC=sample is None, KEEP=keep is not None, **z.small,
        )  # fmt: skip
        before = launch.mark()

        def go(spans: int, blocks: int, large: dict[str, Any]) -> None:
            launch.back_to(before)
            part = launch.empty(z.batch, z.heads, spans, 2, z.s, is_scratch=True) if parts else None
            launch(
                primal.fold, (z.batch * z.heads, spans),
                pair, on, c_e, c_e if c_r is None else c_r, bias, keep, out, part, energy, ticket,
                z.heads, z.n, blocks, *pair.stride()[:4], *z.readout,
                SPANS=min(64, power_of_2(spans)), KEEP=keep is not None, BIAS=bias is not None, ENERGY=parts, **large,
            )  # fmt: skip

        z.fitting(False, go)
        return (out, on, product, tokens) if energy is None else (out, on, product, tokens, energy)

    given = pair, sample, w_e, w_r, c_e, c_r, bias, keep
    settings = "primal", parts, torch.get_float32_matmul_precision()
    return prepared.again(given, settings, anew, device=pair.device)


def _fold_backward(
    pair: Tensor,
    sample: Maybe,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor,
    c_r: Maybe,
    keep: Maybe,
    on: Tensor,
    above: Tensor,
    don: Maybe,
    dproduct: Maybe,
    denergy: Maybe,
    by_sample: bool,
    by_bias: torch.dtype | None,
) -> Sequence[Tensor]:
    """Launches of the backward pass: gradients of the pair, the weights and the readout and, where they are wanted, of bias and sample."""
    from heedful.ops.fused import prepared, primal
    from heedful.ops.fused._sums import add_up

    pair, sample, w_e, w_r, c_e, c_r, keep = _laid_out(pair, sample, w_e, w_r, c_e, c_r, keep)
    above = unit_stride(above)
    don, dproduct, denergy = (None if x is None else whole(x) for x in (don, dproduct, denergy))

    def anew(launch: prepared.Launcher) -> Sequence[Tensor]:
        z = _Sizes(pair, sample, w_e, c_e, c_r)
        ours, rest = 2 * z.p * z.s, 2 * z.v * z.s + z.v
        dpair = launch.empty(*pair.shape, dtype=pair.dtype)
        dw = launch.empty(2, z.heads, z.m, z.s, dtype=w_e.dtype)
        found = [dpair, dw, launch.empty(*c_e.shape[:-1], 2 * z.s, dtype=c_e.dtype)]
        if by_bias is not None:
            # Heads with readouts of their own share the bias: its sum is taken in float32.
            found.append(launch.empty(*c_e.shape[:-1], dtype=by_bias if z.groups == 1 else torch.float32))
        dsample = None
        if by_sample and sample is not None:
            # As a sample lies whose heads are beside one another.
            dsample = launch.empty(z.batch, z.m, z.heads, z.p, dtype=sample.dtype)
            found.append(dsample)
        turned = launch.empty(*on.shape, is_scratch=True)
        before = launch.mark()

        def go(spans: int, blocks: int, large: dict[str, Any]) -> tuple[int, Tensor]:
            launch.back_to(before)
            partial = launch.empty(z.batch, z.heads, spans, ours + rest, is_scratch=True)
            launch(
                primal.fold_backward, (z.batch * z.heads, spans, 2),
                pair, on, c_e, c_e if c_r is None else c_r, keep, above, denergy, dpair, partial, z.heads, z.n, blocks,
                *pair.stride()[:4], *above.stride()[:3], *z.readout,
                KEEP=keep is not None, BIAS=by_bias is not None, ENERGY=denergy is not None, **large,
            )  # fmt: skip
            return spans, partial

        spans, partial = z.fitting(True, go)
        jobs = z.batch * z.heads * -(-ours // COLUMNS) + z.groups * -(-rest // COLUMNS)
        launch(
            primal.gather, (jobs,),
            partial, don, turned, found[2], None if by_bias is None else found[3], z.batch, z.heads, spans, z.groups,
            P=z.p, V=z.v, S=z.s, ROWS=64, COLS=COLUMNS, ON=don is not None, num_warps=4, **z.launch,
        )  # fmt: skip
        each = dw if z.batch == 1 else launch.empty(z.batch, *dw.shape, is_scratch=True)
        launch(
            primal.spread, (z.batch * z.heads, -(-z.m // 16)),
            turned, dproduct, sample, w_e, w_r, dsample, each, z.heads, z.m, *z.strides,
            ROWS=16, STATIC=sample is None, PRODUCT=dproduct is not None, **z.small,
        )  # fmt: skip
        if z.batch > 1:
            add_up(launch, each, dw)
        return found

    given = pair, sample, w_e, w_r, c_e, c_r, keep, on, above, don, dproduct, denergy
    settings = "primal backward", by_sample, by_bias, torch.get_float32_matmul_precision()
    return prepared.again(given, settings, anew, device=pair.device)


@torch.library.custom_op("heedful::primal_fold", mutates_args=())
def primal_fold(
    pair: Tensor,
    sample: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor,
    c_r: Tensor | None,
    bias: Tensor | None,
    keep: Tensor | None,
    parts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fold of `pair` `[B, n, 2, H, p]` with sample `[B, H, m, p]`, weights `[H, m, s]` and readouts `[(H,) v, s]`; without c_r,
    c_e holds both, `[(H,) v, 2 s]`.

    Returns outputs `[B, n, H, v]`, the weights as they act on features W `[B, 2, H, p, s]`, tr(W_e^T W_r) `[H]`, how many tokens
    there are `[B]`, and energies `[B, 2, H, s]`, which are empty without `parts`.
    """
    found = _fold(pair, sample, w_e, w_r, c_e, c_r, bias, keep, parts)
    energy = found[4] if parts else torch.empty(0, dtype=torch.float32, device=pair.device)
    return found[0], found[1], found[2], found[3], energy


@primal_fold.register_fake
def _(pair: Tensor, sample: Tensor | None, w_e: Tensor, w_r: Tensor, c_e: Tensor, *others: Any) -> tuple[Tensor, ...]:
    batch, n, _, heads, p = pair.shape
    s, v, parts = w_e.shape[-1], c_e.shape[-2], others[-1]

    def empty(*shape: int) -> Tensor:
        return pair.new_empty(shape, dtype=torch.float32)

    energy = empty(batch, 2, heads, s) if parts else empty(0)
    return pair.new_empty(batch, n, heads, v), empty(batch, 2, heads, p, s), empty(heads), empty(batch), energy


@torch.library.custom_op("heedful::primal_fold_backward", mutates_args=())
def primal_fold_backward(
    pair: Tensor,
    sample: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor,
    c_r: Tensor | None,
    keep: Tensor | None,
    on: Tensor,
    above: Tensor,
    don: Tensor | None,
    dproduct: Tensor | None,
    denergy: Tensor | None,
    by_sample: bool,
    by_bias: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the pair, the weights `[2, H, m, s]`, the readouts `[(H,) v, 2 s]`, the bias `[(H,) v]` in the type that is named,
    and the sample `[B, m, H, p]`. The last two are empty where they are not asked for.
    """
    found = [*_fold_backward(
        pair, sample, w_e, w_r, c_e, c_r, keep, on, above, don, dproduct, denergy, by_sample, by_bias
    )]  # fmt: skip
    if by_bias is None:
        found.insert(3, torch.empty(0, dtype=torch.float32, device=pair.device))
    if len(found) == 4:
        found.append(torch.empty(0, dtype=torch.float32, device=pair.device))
    return found[0], found[1], found[2], found[3], found[4]


@primal_fold_backward.register_fake
def _(pair: Tensor, sample: Tensor | None, w_e: Tensor, w_r: Tensor, c_e: Tensor, *others: Any) -> tuple[Tensor, ...]:
    by_sample, by_bias = others[-2:]
    nothing = pair.new_empty(0, dtype=torch.float32)
    dbias = (
        None if by_bias is None else c_e.new_empty(c_e.shape[:-1], dtype=by_bias if c_e.dim() == 2 else torch.float32)
    )
    dsample = None
    if by_sample and sample is not None:
        batch, heads, m, p = sample.shape
        dsample = sample.new_empty(batch, m, heads, p)
    return (
        pair.new_empty(pair.shape),
        w_e.new_empty(2, *w_e.shape),
        c_e.new_empty(*c_e.shape[:-1], 2 * w_e.shape[-1]),
        nothing if dbias is None else dbias,
        nothing.clone() if dsample is None else dsample,
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    *tensors, ctx.parts = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, above: Maybe, don: Maybe = None, dproduct: Maybe = None, _: Maybe = None, denergy: Maybe = None
) -> Any:
    pair, sample, w_e, w_r, c_e, c_r, bias, keep, on = ctx.saved_tensors
    needs = ctx.needs_input_grad
    by_sample = sample is not None and needs[1]
    by_bias = bias.dtype if bias is not None and needs[6] else None
    if above is None:
        above = pair.new_zeros(1, 1, 1, 1).expand(*pair.shape[:2], pair.shape[3], c_e.shape[-2])
    given = (
        pair, sample, w_e, w_r, c_e, c_r, keep, on, above, don, dproduct, denergy if ctx.parts else None, by_sample, by_bias,
    )  # fmt: skip
    # With gradients of gradients in view the operator serves, which tells that there are none when they are asked for.
    if eager(above, *ctx.saved_tensors) and not torch.is_grad_enabled():
        dpair, dw, dc, *others = _fold_backward(*given)
    else:
        dpair, dw, dc, *others = torch.ops.heedful.primal_fold_backward(*given)
        others = others[by_bias is None : 1 + by_sample]
    dw_e, dw_r = dw.unbind()
    dc_e, dc_r = (dc, None) if c_r is None else dc.chunk(2, dim=-1)
    dbias = None if by_bias is None else others[0] if c_e.dim() == 2 else others[0].sum(dim=0).to(by_bias)
    return dpair, others[-1].transpose(1, 2) if by_sample else None, dw_e, dw_r, dc_e, dc_r, dbias, None, None


def no_second(ctx: Any, *above: Tensor) -> None:
    raise Unsupported(
        "fused Primal-Attention has no second derivatives; heedful.ops.primal.FUSED = frozenset() turns it off"
    )


primal_fold.register_autograd(_gradients, setup_context=_keep)
primal_fold_backward.register_autograd(no_second)


class _Fold(torch.autograd.Function):
    """The same without the dispatcher, which takes longer than the kernels of a short sequence."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        found = _fold(*inputs)
        _keep(ctx, inputs, found)
        if not inputs[-1]:
            return found[0]
        ctx.mark_non_differentiable(found[3])
        return tuple(found)

    backward = staticmethod(_gradients)


def fold(*inputs: Any) -> tuple[Tensor, Parts | None]:
    """`primal_fold` by the shortest way: the operator where torch traces or looks on, plain launches elsewhere."""
    *tensors, parts = inputs
    if not eager(*tensors):
        out, on, product, tokens, energy = primal_fold(*inputs)
        return out, Parts(on, product, tokens.detach(), energy) if parts else None
    if recorded(*tensors):
        found = _Fold.apply(*inputs)
        out, *rest = found if parts else (found,)
    else:
        out, *rest = _fold(*inputs)
    return out, Parts(*rest) if parts else None


class Parts(NamedTuple):
    """What a fold leaves for the loss: W `[B, 2, H, p, s]`, tr(W_e^T W_r) `[H]`, how many tokens there are `[B]`, energies `[B, 2, H, s]`."""

    on: Tensor
    product: Tensor
    tokens: Tensor
    energy: Tensor

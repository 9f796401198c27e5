"""Primal-Attention's fold and its loss as operators of torch: forward and backward of the kernels in `primal`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from heedful._errors import Unsupported
from heedful.ops.fused._device import (
    HAS_TRITON,
    ROOMY,
    PrimalSetting,
    able,
    chip,
    fitting,
    power_of_2,
    primal_settings,
    unit_stride,
)

LARGEST = 128
"""The widest head, the widest output and the highest rank that the kernels take; in float32 half of it.

A chip that is not `ROOMY` takes 16 bits alone, and half of it."""

MOST = 4096
"""The most weights lambda of a layer that the kernels of the loss take."""

_T = TypeVar("_T")

# What the kernels ask of a launch is NVIDIA's.
_AVAILABLE = HAS_TRITON and torch.version.hip is None


def usable(query: Tensor, width: int, rank: int, devices: frozenset[str]) -> bool:
    """Whether the kernels take queries `[B, H, n, p]`, outputs of this width and scores of this rank."""
    if not _AVAILABLE or not able(query, devices):
        return False
    is_single = query.dtype == torch.float32
    roomy = query.device.type != "cuda" or chip(query.device).shared >= ROOMY
    largest = LARGEST if roomy and not is_single else LARGEST // 2
    return (roomy or not is_single) and max(query.shape[-1], width, rank) <= largest


def usable_loss(energy: Tensor, lam: Tensor, product: Tensor, tokens: Tensor, devices: frozenset[str]) -> bool:
    """Whether the kernel of the loss takes energies `[B, 2, H, s]`, lambda `[H, s]`, traces `[H]` and lengths `[B]`: none may broadcast."""
    if lam.shape != energy.shape[2:] or product.shape != lam.shape[:1] or tokens.shape != energy.shape[:1]:
        return False
    here = energy.device.type in devices and energy.device == lam.device and energy.dtype == torch.float32
    return here and _AVAILABLE and lam.numel() <= MOST and not torch._C._are_functorch_transforms_active()


# Of partial sums, that one program adds up.
COLUMNS = 32


class _Sizes:
    """What the kernels are compiled for and how they are launched, from the shapes of one call."""

    def __init__(self, pair: Tensor, sample: Tensor | None, w_e: Tensor, c_e: Tensor) -> None:
        import triton.language as tl

        self.batch, self.n, _, self.heads, self.p = pair.shape
        self.m, self.s = w_e.shape[-2:]
        self.v = c_e.shape[-2]
        self.pair, self.interpreted = pair, pair.device.type == "cpu"
        exact = pair.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
        self.launch = _launch(pair.device)
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
        # The sample as rows of unit stride; a readout that heads share, or one each.
        self.strides = (0, 0, 0) if sample is None else sample.stride()[:3]
        self.step = self.v * self.s if c_e.dim() == 3 else 0

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

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.pair.device)


@cache
def _launch(device: torch.device) -> dict[str, Any]:
    """From Hopper on a kernel is launched before the last one has ended, and waits for it itself."""
    early = device.type == "cuda" and chip(device).major >= 9
    return {"EARLY": early, **({"launch_pdl": True} if early else {})}


def _bytes(keep: Tensor | None) -> Tensor | None:
    return None if keep is None else keep.contiguous().view(torch.uint8)


@torch.library.custom_op("heedful::primal_fold", mutates_args=())
def primal_fold(
    pair: Tensor,
    sample: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor,
    c_r: Tensor,
    bias: Tensor | None,
    keep: Tensor | None,
    parts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fold of `pair` `[B, n, 2, H, p]` with sample `[B, H, m, p]`, weights `[H, m, s]` and readouts `[(H,) v, s]`.

    Returns outputs `[B, n, H, v]`, the weights as they act on features W `[B, 2, H, p, s]`, tr(W_e^T W_r) `[H]`, energies
    `[B, 2, H, s]`, which are empty without `parts`, and how many tokens there are `[B]`.
    """
    from heedful.ops.fused import primal
    from heedful.ops.fused.prepared import launched

    pair, sample = unit_stride(pair), None if sample is None else unit_stride(sample)
    w_e, w_r, c_e, c_r = (x.contiguous() for x in (w_e, w_r, c_e, c_r))
    z = _Sizes(pair, sample, w_e, c_e)
    on, product, tokens = z.empty(z.batch, 2, z.heads, z.p, z.s), z.empty(z.heads), z.empty(z.batch)
    ticket = torch.empty(z.batch * z.heads, dtype=torch.int32, device=pair.device)
    launched(primal.prepare, (z.batch * z.heads, 2, -(-z.p // 16) + 1))(
        sample, w_e, w_r, on, product, tokens, ticket, z.heads, z.n, z.m, *z.strides,
        ROWS=min(power_of_2(z.m), 8192 // power_of_2(z.s)), STATIC=sample is None, **z.small,
    )  # fmt: skip
    out = torch.empty(z.batch, z.n, z.heads, z.v, dtype=pair.dtype, device=pair.device)
    energy = z.empty(z.batch, 2, z.heads, z.s) if parts else z.empty(0)

    def go(spans: int, blocks: int, large: dict[str, Any]) -> None:
        launched(primal.fold, (z.batch * z.heads, spans))(
            pair, on, c_e, c_r, bias, _bytes(keep), out, z.empty(z.batch, z.heads, spans, 2, z.s) if parts else None,
            energy, ticket, z.heads, z.n, blocks, *pair.stride()[:4], z.step,
            SPANS=min(64, power_of_2(spans)), KEEP=keep is not None, BIAS=bias is not None, ENERGY=parts, **large,
        )  # fmt: skip

    z.fitting(False, go)
    if keep is not None:
        tokens = keep.sum(dim=-1, dtype=torch.float32)
    return out, on, product, energy, tokens


@primal_fold.register_fake
def _(pair: Tensor, sample: Tensor | None, w_e: Tensor, w_r: Tensor, c_e: Tensor, *others: Any) -> tuple[Tensor, ...]:
    batch, n, _, heads, p = pair.shape
    s, v, parts = w_e.shape[-1], c_e.shape[-2], others[-1]

    def empty(*shape: int) -> Tensor:
        return pair.new_empty(shape, dtype=torch.float32)

    energy = empty(batch, 2, heads, s) if parts else empty(0)
    return pair.new_empty(batch, n, heads, v), empty(batch, 2, heads, p, s), empty(heads), energy, empty(batch)


@torch.library.custom_op("heedful::primal_fold_backward", mutates_args=())
def primal_fold_backward(
    pair: Tensor,
    sample: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor,
    c_r: Tensor,
    keep: Tensor | None,
    on: Tensor,
    above: Tensor,
    don: Tensor | None,
    dproduct: Tensor | None,
    denergy: Tensor | None,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the pair, the sample (empty where there is none) and the weights `[2, H, m, s]`; in a row, `[(H,) (2 s + 1) v]`,
    those of the readouts and of the bias, which are zero where it is not asked for. The last two are in float32.
    """
    from heedful.ops.fused import primal
    from heedful.ops.fused.prepared import launched

    pair, above, sample = unit_stride(pair), unit_stride(above), None if sample is None else unit_stride(sample)
    w_e, w_r, c_e, c_r = (x.contiguous() for x in (w_e, w_r, c_e, c_r))
    don, dproduct, denergy = (None if x is None else x.contiguous() for x in (don, dproduct, denergy))
    z = _Sizes(pair, sample, w_e, c_e)
    dpair = torch.empty(pair.shape, dtype=pair.dtype, device=pair.device)
    ours, rest = 2 * z.p * z.s, 2 * z.v * z.s + z.v

    def go(spans: int, blocks: int, large: dict[str, Any]) -> tuple[int, Tensor]:
        partial = z.empty(z.batch, z.heads, spans, ours + rest)
        launched(primal.fold_backward, (z.batch * z.heads, spans, 2))(
            pair, on, c_e, c_r, _bytes(keep), above, denergy, dpair, partial, z.heads, z.n, blocks,
            *pair.stride()[:4], *above.stride()[:3], z.step,
            KEEP=keep is not None, BIAS=bias, ENERGY=denergy is not None, **large,
        )  # fmt: skip
        return spans, partial

    spans, partial = z.fitting(True, go)
    turned, row = torch.empty_like(on), z.empty(*c_e.shape[:-2], rest)
    groups = z.heads if c_e.dim() == 3 else 1
    jobs = z.batch * z.heads * -(-ours // COLUMNS) + groups * -(-rest // COLUMNS)
    launched(primal.gather, (jobs,))(
        partial, don, turned, row, z.batch, z.heads, spans, groups,
        P=z.p, V=z.v, S=z.s, ROWS=64, COLS=COLUMNS, ON=don is not None, num_warps=4, **z.launch,
    )  # fmt: skip
    dsample = z.empty(0) if sample is None else torch.empty_like(sample, memory_format=torch.contiguous_format)
    dw = z.empty(2, z.batch, z.heads, z.m, z.s)
    launched(primal.spread, (z.batch * z.heads, -(-z.m // 16)))(
        turned, dproduct, sample, w_e, w_r, dsample, dw, z.batch, z.heads, z.m, *z.strides,
        ROWS=16, STATIC=sample is None, PRODUCT=dproduct is not None, **z.small,
    )  # fmt: skip
    return dpair, dsample, dw[:, 0] if z.batch == 1 else dw.sum(dim=1), row


@primal_fold_backward.register_fake
def _(pair: Tensor, sample: Tensor | None, w_e: Tensor, w_r: Tensor, c_e: Tensor, *_: Any) -> tuple[Tensor, ...]:
    def empty(*shape: int) -> Tensor:
        return pair.new_empty(shape, dtype=torch.float32)

    dsample = empty(0) if sample is None else sample.new_empty(sample.shape)
    v, s = c_e.shape[-2:]
    return pair.new_empty(pair.shape), dsample, empty(2, *w_e.shape), empty(*c_e.shape[:-2], (2 * s + 1) * v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pair, sample, w_e, w_r, c_e, c_r, bias, keep, ctx.parts = inputs
    ctx.save_for_backward(pair, sample, w_e, w_r, c_e, c_r, bias, keep, output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, above: Tensor | None, don: Any, dproduct: Any, denergy: Any, _: Any) -> Any:
    pair, sample, w_e, w_r, c_e, c_r, bias, keep, on = ctx.saved_tensors
    v, s = c_e.shape[-2:]
    wanted = bias is not None and ctx.needs_input_grad[6]
    if above is None:
        above = pair.new_zeros(1, 1, 1, 1).expand(*pair.shape[:2], pair.shape[3], v)
    dpair, dsample, dw, row = torch.ops.heedful.primal_fold_backward(
        pair, sample, w_e, w_r, c_e, c_r, keep, on, above, don, dproduct, denergy if ctx.parts else None, wanted
    )
    dc, dbias = row[..., :-v].unflatten(-1, (2, v, s)), row[..., -v:]
    return (
        dpair,
        None if sample is None else dsample,
        *dw.to(w_e.dtype).unbind(),
        *dc.to(c_e.dtype).unbind(-3),
        (dbias if c_e.dim() == 2 else dbias.sum(dim=0)).to(bias.dtype) if wanted else None,
        None,
        None,
    )


def _no_second(ctx: Any, *above: Tensor) -> None:
    raise Unsupported(
        "fused Primal-Attention has no second derivatives; heedful.ops.primal.FUSED = frozenset() turns it off"
    )


primal_fold.register_autograd(_gradients, setup_context=_keep)
primal_fold_backward.register_autograd(_no_second)


def _loss_sizes(energy: Tensor) -> dict[str, Any]:
    _, _, heads, rank = energy.shape
    block = power_of_2(heads * rank)
    return {
        "SIZE": heads * rank, "BLOCK": block, "ROWS": max(1, 2048 // block), "HEADS": power_of_2(heads), "num_warps": 4,
        **_launch(energy.device),
    }  # fmt: skip


@torch.library.custom_op("heedful::primal_penalty", mutates_args=())
def primal_penalty(energy: Tensor, lam: Tensor, product: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of J^2, and of how many sequences, from energies `[B, 2, H, s]`, lambda `[H, s]`, traces `[H]`, lengths `[B]`."""
    from heedful.ops.fused import primal
    from heedful.ops.fused.prepared import launched

    batch, _, heads, _ = energy.shape
    out, count = (torch.empty((), dtype=torch.float32, device=energy.device) for _ in range(2))
    launched(primal.penalty, (1,))(
        energy.contiguous(), lam.contiguous(), product.contiguous(), tokens, out, count, batch, heads,
        **_loss_sizes(energy),
    )  # fmt: skip
    return out, count


@primal_penalty.register_fake
def _(energy: Tensor, lam: Tensor, product: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return energy.new_empty(()), energy.new_empty(())


@torch.library.custom_op("heedful::primal_penalty_backward", mutates_args=())
def primal_penalty_backward(
    energy: Tensor, lam: Tensor, product: Tensor, tokens: Tensor, count: Tensor, above: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of energies, lambda and traces."""
    from heedful.ops.fused import primal
    from heedful.ops.fused.prepared import launched

    batch, _, heads, _ = energy.shape
    energy = energy.contiguous()
    denergy, dproduct = torch.empty_like(energy), torch.empty_like(product)
    dlam = torch.empty(lam.shape, dtype=torch.float32, device=lam.device)
    launched(primal.penalty_backward, (1,))(
        energy, lam.contiguous(), product.contiguous(), tokens, count, above.contiguous(),
        denergy, dlam, dproduct, batch, heads, **_loss_sizes(energy),
    )  # fmt: skip
    return denergy, dlam, dproduct


@primal_penalty_backward.register_fake
def _(
    energy: Tensor, lam: Tensor, product: Tensor, tokens: Tensor, count: Tensor, above: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return energy.new_empty(energy.shape), lam.new_empty(lam.shape, dtype=torch.float32), torch.empty_like(product)


def _keep_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(False)


def _loss_gradients(ctx: Any, above: Tensor | None, _: Tensor | None) -> Any:
    if above is None:
        return None, None, None, None
    lam = ctx.saved_tensors[1]
    denergy, dlam, dproduct = torch.ops.heedful.primal_penalty_backward(*ctx.saved_tensors, above)
    return denergy, dlam.to(lam.dtype), dproduct, None


primal_penalty.register_autograd(_loss_gradients, setup_context=_keep_loss)
primal_penalty_backward.register_autograd(_no_second)

"""Calls of attention in one form, whoever made them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias

from heedful import masks
from heedful._attend import attend
from heedful._errors import Unsupported
from heedful.kernels import Kernel, Softmax
from heedful.ops import Request

# How far a call told in our form may be from what the model computed: rounding alone.
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Watched:
    """One call of attention: what it combined, by which kernel and mask, and what came out.

    `weights` is there where they cannot be had from queries and keys; `inputs` is what the module read.
    """

    name: str
    query: Tensor | None  # [B, H, Q, D]
    key: Tensor | None  # [B, G, K, D]
    value: Tensor | None  # [B, G, K, E]
    output: Tensor  # [B, H, Q, E]
    kernel: Kernel | None = None
    mask: Tensor | None = None  # True = may attend; broadcasts to [B, H, Q, K]
    bias: Tensor | None = None  # added to the score
    causal: bool = False
    weights: Tensor | None = None  # [B, H, Q, K]
    inputs: Tensor | None = None  # [B, n, d]
    cross: bool = False
    kept: Any = None  # what whoever watches made of the call at once


class Compared(NamedTuple):
    """A few rows of a call in our form, and the same as the model computed them."""

    ours: Tensor  # [B, H, rows, E]
    theirs: Tensor
    sees: Tensor | None  # which of them see anything, [B or 1, H or 1, rows or 1, 1]; None where all do
    largest: Tensor | None  # the largest score there may be, where rounding it moves the output


class Memory:
    """What was made of a tensor, while that tensor lives and is not written to.

    `doubts`, where it is a list, takes what calls on a device give, to be compared at the end of a run: each answer that is read at once
    would wait for the device.
    """

    def __init__(self, doubts: list[Compared] | None = None) -> None:
        self._kept: dict[int, tuple[weakref.ref[Tensor], int, Any]] = {}
        self.doubts = doubts

    def trusts(self, call: Watched) -> bool:
        """Whether a call gives what the model computed, or will be said to at the end."""
        compared = _compared(call)
        if compared is None or self.doubts is None or compared.theirs.device.type == "cpu":
            return compared is None or agree([compared])
        self.doubts.append(compared)
        return True

    def get(self, tensor: Tensor, make: Callable[[Tensor], Any]) -> Any:
        at, version = id(tensor), 0 if tensor.is_inference() else tensor._version
        known = self._kept.get(at)
        if known is None or known[0]() is not tensor or known[1] != version:
            forget = weakref.ref(tensor, lambda gone: self._forget(at, gone))
            known = self._kept[at] = (forget, version, make(tensor))
        return known[2]

    def _forget(self, at: int, gone: weakref.ref[Tensor]) -> None:
        if at in self._kept and self._kept[at][0] is gone:
            del self._kept[at]


def agrees(call: Watched) -> bool:
    """Whether a call told in our form gives what the model computed, on a few rows of queries that see anything."""
    compared = _compared(call)
    return compared is None or agree([compared])


def agree(several: Sequence[Compared]) -> bool:
    """Whether all rows are the same but for rounding; this waits for the device, once for all calls of one form."""
    forms: dict[tuple[object, ...], list[Compared]] = {}
    for one in several:
        form = tuple(None if x is None else (x.shape, x.dtype, x.device) for x in one)
        forms.setdefault(form, []).append(one)
    for same in forms.values():
        ours, theirs, sees, largest = (None if x[0] is None else torch.stack(x) for x in zip(*same, strict=True))
        assert ours is not None
        assert theirs is not None
        if not close(ours, theirs, sees, rounding(theirs.dtype, largest)).all():
            return False
    return True


def _compared(call: Watched) -> Compared | None:
    value, kernel = call.value, call.kernel
    if value is None or (call.weights is None and (kernel is None or kernel.of_pairs is not kernel)):
        return None
    rows = sorted({0, call.output.shape[2] // 2, call.output.shape[2] - 1})
    sees: Tensor | None
    if call.weights is not None:
        weights = _rows(call.weights, rows)
        got = weights @ value.nan_to_num().repeat_interleave(weights.shape[1] // value.shape[1], dim=1).to(
            weights.dtype
        )
        sees = weights.any(dim=-1, keepdim=True)
    else:
        assert call.query is not None
        assert call.key is not None
        got, sees = _attended(call, call.query, call.key, value, rows)
    return Compared(got, _rows(call.output, rows), sees, largest_score(call))


def _attended(
    call: Watched, query: Tensor, key: Tensor, value: Tensor, rows: list[int]
) -> tuple[Tensor, Tensor | None]:
    """What some rows give in our form, and which of them see anything; None where all do."""
    if call.mask is None and call.bias is None:
        if not call.causal:
            return attend(_rows(query, rows), key, value, enable_gqa=True, kernel=call.kernel), None
        # Without a mask nothing must be looked through: each row sees its own beginning.
        parts = [
            attend(query[:, :, at:end], key[:, :, :end], value[:, :, :end], enable_gqa=True, kernel=call.kernel)
            for at, end in ((row, row + 1) for row in rows)
        ]
        return torch.cat(parts, 2), None
    seen, bias = (x if x is None or x.shape[-2] == 1 else _rows(x, rows) for x in (call.mask, call.bias))
    if call.causal:
        at = torch.arange(value.shape[2], device=value.device)
        before = torch.stack([at <= row for row in rows])
        seen = before if seen is None else seen & before
    got = attend(
        _rows(query, rows), key, value, masks.join_transformers(seen, bias), enable_gqa=True, kernel=call.kernel
    )
    return got, None if seen is None else seen.any(-1, keepdim=True)[(None,) * (4 - seen.dim())]


def _rows(x: Tensor, rows: list[int]) -> Tensor:
    """Some rows `[..., rows, n]`, without a list of places that would have to go to the device."""
    return torch.cat([x[..., row : row + 1, :] for row in rows], -2)


def close(ours: Tensor, theirs: Tensor, counts: Tensor | None, allowed: float | Tensor) -> Tensor:
    """Whether two results are the same but for rounding, where they count and theirs is finite; for each of several, along the first axis."""
    counts = theirs.isfinite() if counts is None else counts & theirs.isfinite()
    wanted = torch.where(counts, theirs, 0.0).float()
    off = torch.where(counts, ours.float() - wanted, 0.0)
    return off.flatten(1).norm(dim=1) <= allowed * wanted.flatten(1).norm(dim=1) + 1e-6


def rounding(dtype: torch.dtype, largest: Tensor | None) -> float | Tensor:
    """The share of an output that rounding may move; large scores that were rounded to 16 bit move it further."""
    allowed = CLOSE.get(dtype, 1e-1)
    return allowed if largest is None else (allowed + torch.finfo(dtype).eps * largest).clamp(max=0.5)


def largest_score(call: Watched) -> Tensor | None:
    """What no score exceeds, where scores may be rounded to 16 bit. Not looked at here: that would wait for the device."""
    if call.query is None or call.key is None or call.output.dtype.itemsize > 2 or call.key.shape[-2] == 0:
        return None
    # In float32 without a copy in it: a long sequence has little room.
    longest = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).max() for x in (call.query, call.key)]
    return longest[0] * longest[1] / call.query.shape[-1] ** 0.5


def of_request(request: Request, output: Tensor) -> Watched:
    """A call of `attend`."""
    # Plain causality costs no memory; any other mask is written out.
    causal = request.mask is masks.causal and request.factors is None
    seen, bias = (None, None) if causal else request.visible()
    return _of_four(request.query, request.key, request.value, output, request.kernel, seen, bias, causal)


def of_sdpa(
    memory: Memory,
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Watched:
    """A call of `scaled_dot_product_attention`; three axes are a batch of one head each."""
    if isinstance(attn_mask, CausalBias):
        attn_mask = attn_mask._materialize(query.device)
    seen, bias = (None, None) if attn_mask is None else memory.get(attn_mask, masks.split_transformers)
    if query.dim() == 3:
        query, key, value, output = (x[:, None] for x in (query, key, value, output))
        seen, bias = (x[:, None] if x is not None and x.dim() == 3 else x for x in (seen, bias))
    return _of_four(query, key, value, output, Softmax(scale), seen, bias, is_causal)


def _of_four(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    kernel: Kernel,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
) -> Watched:
    """A call with every tensor `[B, H, n, D]`, whatever axes were left out or stand in front."""

    def four(x: Tensor) -> Tensor:
        return x[(None,) * (4 - x.dim())] if x.dim() < 4 else x.expand(*output.shape[:-3], *x.shape[-3:]).flatten(0, -4)

    def grid(x: Tensor | None) -> Tensor | None:
        if x is None or output.dim() <= 4 or x.dim() <= 3:
            return x
        return x.expand(*output.shape[:-3], *x.shape[-3:]).flatten(0, -4)

    return Watched("", four(query), four(key), four(value), four(output), kernel, grid(mask), grid(bias), causal)


def of_interface(
    memory: Memory,
    module: nn.Module,
    options: dict[str, Any],
    result: tuple[Tensor, Tensor | None],
    implementation: str,
    eager: Callable[..., Any] | None,
) -> Watched:
    """A call through transformers' attention interface, whose output is `[B, Q, H, E]`.

    What the function did is not told by its name alone: a call that does not give the module's own output is read by the
    weights that were returned, or as causal, or refused.
    """
    from heedful.bridges.transformers import FOREIGN, kernel_of

    query, key, value = (options.pop(name) for name in ("query", "key", "value"))
    mask, bias, scaling = (options.pop(name, None) for name in ("attention_mask", "position_bias", "scaling"))
    causal_flag = options.pop("is_causal", None)
    causal = bool(getattr(module, "is_causal", True) if causal_flag is None else causal_flag)
    # Only these read is_causal, and only where no mask is given; the others are always told by a mask.
    causal = causal and mask is None and query.shape[-2] > 1 and implementation in ("sdpa", "heedful")
    if causal and implementation == "sdpa" and key.shape[-2] > query.shape[-2]:
        key, value = (x[..., : query.shape[-2], :] for x in (key, value))
    shown = masks.grid_of(
        mask,
        (*query.shape[:3], key.shape[2]),
        query.device,
        causal=getattr(module, "is_causal", True),
        flash="flash" in implementation,
    )
    seen, added = (None, None) if shown is None else memory.get(shown, masks.split_transformers)
    if bias is not None and causal:
        bias = bias[..., : key.shape[-2]]
    bias = bias if added is None else added if bias is None else bias + added
    kernel = kernel_of(module, query.device, scaling) if implementation.startswith("heedful") else Softmax(scaling)
    call = Watched("", query, key, value, result[0].transpose(1, 2), kernel, seen, bias, causal)
    # SDPA has no place for these; versions of transformers that do not refuse leave them out.
    foreign = [name for name in FOREIGN if options.get(name) is not None and implementation != "sdpa"]
    if foreign and eager is not None:
        rest = {name: value for name, value in options.items() if name != "dropout"}
        call = replace(call, weights=_by_eager(eager, module, call, {**rest, "scaling": scaling}), kernel=None)
    if (options.get("dropout") and module.training) or memory.trusts(call):
        return call
    others = [replace(call, causal=not causal)] if mask is None and query.shape[-2] == key.shape[-2] else []
    sink = next((options[name] for name in ("s_aux", "sinks") if isinstance(options.get(name), Tensor)), None)
    if sink is not None and sink.numel() == query.shape[1]:
        others.append(replace(call, weights=_with_sink(call, sink, scaling), kernel=None))
    if isinstance(result[1], Tensor) and result[1].shape == (*query.shape[:3], key.shape[2]):
        others.insert(0, replace(call, weights=result[1], kernel=None))
    for other in others:
        if agrees(other):
            return other
    passed = f" ({', '.join(foreign)})" if foreign else ""
    returned = "returns weights that do not give its output" if isinstance(result[1], Tensor) else "returns no weights"
    next_step = "" if implementation == "eager" else "; set_attn_implementation('eager') may help"
    raise Unsupported(
        f"{type(module).__name__} attends by {implementation!r}, which is not softmax attention of its queries and keys{passed} "
        f"and {returned}{next_step}"
    )


def _by_eager(eager: Callable[..., Any], module: nn.Module, call: Watched, options: dict[str, Any]) -> Tensor:
    """The weights by the model's own formula; zeros for a query that may attend to nothing."""
    assert call.query is not None
    assert call.key is not None
    query, key, seen = call.query, call.key, call.mask
    if call.causal:
        seen = masks.lower_right.dense((query.shape[2], key.shape[2]), query.device)
    low = torch.finfo(query.dtype).min
    shown = None if seen is None else torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, low)
    shown = call.bias if shown is None else shown if call.bias is None else shown + call.bias
    weights: Tensor = eager(module, query, key, call.value, shown, dropout=0.0, **options)[1]
    return weights if seen is None else torch.where(seen.any(dim=-1, keepdim=True), weights, 0.0)


def _with_sink(call: Watched, sink: Tensor, scaling: float | None) -> Tensor:
    """Softmax weights beside one more logit for each head, which takes its share and has no value: rows sum to less than 1."""
    assert call.query is not None
    assert call.key is not None
    seen = (
        masks.lower_right.dense((call.query.shape[2], call.key.shape[2]), call.query.device)
        if call.causal
        else call.mask
    )
    scale = call.query.shape[-1] ** -0.5 if scaling is None else scaling
    key = call.key.repeat_interleave(call.query.shape[1] // call.key.shape[1], dim=1)
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    scores = (call.query @ key.mT).to(dtype) * scale
    scores = scores if call.bias is None else scores + call.bias
    scores = scores if seen is None else scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    logits = sink.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, logits), dim=-1).softmax(dim=-1)[..., :-1].to(call.query.dtype)

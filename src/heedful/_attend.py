"""The operator: coefficients from a kernel, values combined by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ParamSpec, Protocol, cast

import torch
from torch import Tensor

from heedful import masks
from heedful._errors import InvalidArgument, Unsupported
from heedful.kernels import Kernel, Softmax
from heedful.masks import Mask
from heedful.ops import IMPLEMENTATIONS, Cost, LinearState, Request, Step, linear, reference
from heedful.ops._request import wide

# Below this many pairs the coefficients fit a cache, and blocks would only add calls.
SMALL = 2**20

P = ParamSpec("P")


class Attend(Protocol[P]):
    """`attend` itself, and what goes with it."""

    plan: Callable[..., Plan]
    coefficients: Callable[..., Tensor]
    step: Callable[..., Step]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor: ...


@dataclass(frozen=True)
class Considered:
    """What one implementation would do with a request: why it cannot, or what it would cost."""

    name: str
    refusal: str | None
    cost: Cost | None


@dataclass(frozen=True)
class Plan:
    """Which implementation runs, why the others do not, and what it costs."""

    chosen: str
    reason: str
    kernel: Kernel
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: str
    device: str
    considered: tuple[Considered, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"kernel": self.kernel.to_dict()}

    def __str__(self) -> str:
        lines = [
            f"{self.chosen}: {self.reason}",
            f"  {self.kernel!r}",
            f"  query {self.query}  key {self.key}  value {self.value}  {self.dtype} on {self.device}",
        ]
        for one in self.considered:
            if one.cost is None:
                told = f"cannot: {one.refusal}"
            else:
                told = f"{_scaled(one.cost.flops, 1000, 'FLOP')}, {_scaled(one.cost.bytes, 1024, 'B')} beyond inputs and output"
            lines.append(f"  {'>' if one.name == self.chosen else ' '} {one.name:<10} {told}")
        return "\n".join(lines)


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    kernel: Kernel | None = None,
    impl: str = "auto",
) -> Plan:
    """Tells, without running, which implementation `attend` takes for these arguments, and why not the others.

    FLOPs count the forward pass; bytes are the memory beyond inputs and output. Both are estimates.

    >>> import torch
    >>> from heedful import attend, Gaussian
    >>> x = torch.randn(1, 8, 1024, 64)
    >>> attend.plan(x, x, x, kernel=Gaussian(2.0)).chosen
    'sdpa'
    """
    request = _request(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, kernel)
    chosen, reason = _choose(request, impl)
    considered = []
    for one in IMPLEMENTATIONS.values():
        refusal = one.refuse(request)
        considered.append(Considered(one.name, refusal, None if refusal else one.cost(request)))
    return Plan(
        chosen,
        reason,
        request.kernel,
        tuple(query.shape),
        tuple(key.shape),
        tuple(value.shape),
        str(query.dtype).removeprefix("torch."),
        str(query.device),
        tuple(considered),
    )


def coefficients(
    query: Tensor,
    key: Tensor,
    attn_mask: Mask | Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    kernel: Kernel | None = None,
) -> Tensor:
    """The matrix by which `attend` combines values, written out: `[..., heads, queries, keys]`.

    >>> import torch
    >>> from heedful import attend
    >>> x = torch.randn(2, 3, 5, 4)
    >>> attend.coefficients(x, x, is_causal=True).sum(-1).allclose(torch.ones(2, 3, 5))
    True
    """
    request = _request(query, key, key, attn_mask, 0.0, is_causal, scale, enable_gqa, kernel)
    request = _moved(request, "auto").expanded()
    at = masks.Block.whole(request.shape, query.device)
    keep = None if request.mask is None else request.mask.block(at)
    bias = None if request.bias is None else masks.cut(request.bias, at)
    return reference.coefficients(request.kernel, request.query, request.key, keep, bias).to(key.dtype)


def step(query: Tensor, key: Tensor, value: Tensor, state: LinearState | None = None, *, kernel: Kernel) -> Step:
    """Continues causal attention with a feature-map kernel by one or more tokens, from a state of constant size.

    >>> import torch
    >>> from heedful import attend, FeatureMap
    >>> x = torch.randn(1, 2, 6, 4)
    >>> first = attend.step(x[..., :4, :], x[..., :4, :], x[..., :4, :], kernel=FeatureMap("elu"))
    >>> last = attend.step(x[..., 4:, :], x[..., 4:, :], x[..., 4:, :], first.state, kernel=FeatureMap("elu"))
    >>> whole = attend(x, x, x, is_causal=True, kernel=FeatureMap("elu"))
    >>> torch.cat((first.output, last.output), -2).allclose(whole, atol=1e-6)
    True
    """
    request = _request(query, key, value, None, 0.0, True, None, True, kernel).expanded()
    if type(kernel).rewrite is not Kernel.rewrite:
        raise Unsupported(f"{kernel!r} keeps no state of constant size here; attend over the whole prefix instead")
    return linear.step(request.kernel, request.query, request.key, request.value, state)


def _operator(function: Callable[P, Tensor]) -> Attend[P]:
    operator = cast(Attend[P], function)
    operator.plan, operator.coefficients, operator.step = plan, coefficients, step
    return operator


@_operator
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    kernel: Kernel | None = None,
    impl: str = "auto",
) -> Tensor:
    r"""Combines values by a kernel of queries and keys: $y_i = \sum_j \kappa(q_i, k_j)\, v_j$.

    The signature and the meaning of masks are those of `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: `[..., heads, queries, D]`.
        key: `[..., heads, keys, D]`; with `enable_gqa` fewer heads, a divisor of the query's.
        value: `[..., heads, keys, E]`.
        attn_mask: a heedful mask, a boolean tensor (True = may attend), or a floating tensor that is added to the score
            (its lowest value and -inf mean hidden). A kernel without a score multiplies its coefficient by exp(attn_mask).
        dropout_p: probability with which a coefficient is dropped; acts whenever it is above zero, as in torch.
        is_causal: query i sees keys 0..i; together with `attn_mask` it means *and*.
        scale: for kernels that have one.
        kernel: what a coefficient is; `Softmax()` by default. See `heedful.kernels`.
        impl: `"auto"`, or the name of an implementation, which then serves the request or raises `Unsupported`.

    Returns:
        `[..., heads, queries, E]` in the value's dtype. A query that may attend to nothing gives zeros, with zero gradient.
        What is hidden never leaks, not even NaN; a query that may attend to a key or value that is not finite gives NaN.

    The form is that of Ma & Ying (2023), Proposition 3.1, in rows. Sums are kept in float32 for 16-bit inputs.

    >>> import torch
    >>> from heedful import attend, Gaussian
    >>> q, k, v = torch.randn(3, 2, 4, 9, 8).unbind()
    >>> attend(q, k, v, kernel=Gaussian(bandwidth=2.0), is_causal=True).shape
    torch.Size([2, 4, 9, 8])
    """
    request = _request(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, kernel)
    return _run(_moved(request, impl), impl)


def _run(request: Request, impl: str) -> Tensor:
    chosen, _ = _choose(request, impl)
    run = IMPLEMENTATIONS[chosen].run
    if request.mask is None:
        return run(request)
    if _free_to_look(request) and _all_finite(request):
        return run(request)
    shielded, poisoned = _shield(request)
    return run(shielded) + poisoned


def _moved(request: Request, impl: str) -> Request:
    """The request of a kernel of pairs: a kernel of the whole sequence moves the queries first, in wide precision."""

    def inner(query: Tensor, key: Tensor, kernel: Kernel) -> Tensor:
        query, key = query.to(wide(key.dtype)), key.to(wide(key.dtype))
        moved = request._replace(query=query, key=key, value=key, kernel=kernel, bias=None, dropout_p=0.0)
        refused = impl not in IMPLEMENTATIONS or IMPLEMENTATIONS[impl].refuse(moved) is not None
        return _run(moved, "auto" if refused else impl)

    kernel, query = request.kernel.rewrite(request.query, request.key, inner)
    return request._replace(kernel=kernel, query=query)


def _choose(request: Request, impl: str) -> tuple[str, str]:
    """The implementation that runs, and why."""
    if impl != "auto":
        if impl not in IMPLEMENTATIONS:
            raise InvalidArgument(f"impl must be 'auto' or one of {', '.join(IMPLEMENTATIONS)}; got {impl!r}")
        refusal = IMPLEMENTATIONS[impl].refuse(request)
        if refusal is not None:
            raise Unsupported(
                f"impl={impl!r} cannot serve {request.kernel!r}: {refusal}. "
                "impl='auto' picks one that can; attend.plan(...) lists them"
            )
        return impl, "asked for by name"
    if IMPLEMENTATIONS["sdpa"].refuse(request) is None:
        return "sdpa", IMPLEMENTATIONS["sdpa"].summary
    small = _count(request.shape) <= SMALL
    direct, why = (
        ("reference", "few pairs: writing all coefficients out is fastest")
        if small
        else ("stream", "many pairs: blocks of rows keep memory linear")
    )
    line = IMPLEMENTATIONS["linear"]
    if line.refuse(request) is None and line.cost(request).flops <= IMPLEMENTATIONS[direct].cost(request).flops:
        return "linear", line.summary
    return direct, why


def _request(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask | Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    kernel: Kernel | None,
) -> Request:
    """Checks every argument and brings masks to one form."""
    kernel = Softmax() if kernel is None else kernel
    if not isinstance(kernel, Kernel):
        raise InvalidArgument(f"kernel must be a heedful kernel such as Softmax(); got {kernel!r:.100}")
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dim() < 2:
            got = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidArgument(f"{name} must be a floating tensor of shape (..., heads, seq, dim); got {got}")
        if tensor.dtype != query.dtype or tensor.device != query.device or tensor.dim() != query.dim():
            raise InvalidArgument(
                "query, key and value must agree in dtype, device and number of axes; got "
                + ", ".join(f"{n} {t.dtype} {tuple(t.shape)} on {t.device}" for n, t in named.items())
            )
    if query.shape[-1] != key.shape[-1]:
        raise InvalidArgument(f"query and key must share their last axis; got {query.shape[-1]} and {key.shape[-1]}")
    if key.shape[-2] != value.shape[-2]:
        raise InvalidArgument(f"key and value must be equally many; got {key.shape[-2]} and {value.shape[-2]}")
    if not 0.0 <= dropout_p < 1.0:
        raise InvalidArgument(f"dropout_p must lie in [0, 1); got {dropout_p!r}")
    heads = query.shape[-3] if query.dim() > 2 else 1
    if query.dim() > 2:
        _check_heads(query, key, value, enable_gqa)
    for name, tensor in kernel.tensors().items():
        if tensor.dim() == 1 and tensor.shape[0] not in (1, heads):
            raise InvalidArgument(f"the kernel's {name} has {tensor.shape[0]} entries; expected 1 or heads = {heads}")
        if tensor.dim() == 1 and query.dim() == 2:
            raise InvalidArgument(
                f"the kernel's {name} is per head, but query {tuple(query.shape)} has no axis of heads"
            )
    mask = masks.from_sdpa(attn_mask, is_causal)
    request = Request(query, key, value, kernel.with_scale(scale), mask, dropout_p=dropout_p)
    if mask is None:
        return request
    mask.check(request.shape)
    return request._replace(bias=mask.bias)


def _check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    heads = query.shape[-3]
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[-3] == heads:
            continue
        if not enable_gqa:
            raise InvalidArgument(
                f"{name} has {tensor.shape[-3]} heads and query {heads}; pass enable_gqa=True to share key and value heads"
            )
        if heads % tensor.shape[-3]:
            raise InvalidArgument(f"query heads ({heads}) must be a multiple of {name} heads ({tensor.shape[-3]})")
    try:
        torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    except RuntimeError:
        raise InvalidArgument(
            "leading axes must broadcast; got query "
            f"{tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        ) from None


def _free_to_look(request: Request) -> bool:
    """Whether values may decide a branch: not while a graph is traced, and not where it would wait for a device."""
    return request.query.device.type == "cpu" and not torch.compiler.is_compiling()


def _all_finite(request: Request) -> bool:
    # Any NaN or infinity survives a sum; a sum that overflows merely takes the careful path.
    total = request.key.detach().sum() + request.value.detach().sum()
    if request.mask is not masks.causal:  # under which every query sees something
        total = total + request.query.detach().sum()
    return math.isfinite(total.item())


def _shield(request: Request) -> tuple[Request, Tensor]:
    """Zeros where a key or value is not finite, and NaN to be added for the queries that may attend to it.

    A coefficient of zero does not hide NaN (0 x NaN = NaN), so what a mask hides is taken out before it is combined.
    """
    expanded = request.expanded()
    shape, mask = request.shape, request.mask
    assert mask is not None
    good = expanded.key.isfinite().all(dim=-1) & expanded.value.isfinite().all(dim=-1)  # [..., H, K]
    reached = mask.reach(~good, shape)
    sees = mask.reach(torch.ones_like(good), shape)
    clean = request._replace(
        query=request.query.masked_fill(~sees.expand(shape[:-1])[..., None], 0.0),
        key=_zero_unless_finite(request.key),
        value=_zero_unless_finite(request.value),
    )
    poison = torch.zeros_like(request.query[..., 0]).expand(shape[:-1]).masked_fill(reached, torch.nan)
    return clean, poison[..., None].to(request.value.dtype)


def _zero_unless_finite(x: Tensor) -> Tensor:
    return x.masked_fill(~x.isfinite().all(dim=-1, keepdim=True), 0.0)


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _scaled(number: float, base: int, unit: str) -> str:
    prefixes = ["", "k", "M", "G", "T", "P"]
    while number >= base and len(prefixes) > 1:
        number /= base
        prefixes.pop(0)
    return f"{number:.3g} {prefixes[0]}{'i' if base == 1024 and prefixes[0] else ''}{unit}"

"""The operator: coefficients from a kernel, values combined by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, Protocol, cast

import torch
from torch import Tensor

from heedful import masks
from heedful._errors import InvalidArgument, Unsupported
from heedful._result import Result
from heedful._runtime import full_precision
from heedful.kernels import Kernel, as_kernel
from heedful.masks import Mask
from heedful.ops import IMPLEMENTATIONS, Cost, LinearState, Request, Step, heads, linear, plain, reference, sequence
from heedful.ops.distance import steadied
from heedful.ops.fused import short
from heedful.ops.request import pairs
from heedful.ops.shield import shield, shield_factors

# Up to SMALL pairs, or MANY where each head has only FEW, blocks would only add calls; on a CPU 2^24 coefficients at once already
# take twice as long as blocks of them.
SMALL, MANY, FEW = 2**20, {"cpu": 2**22, "cuda": 2**24}, 2**16
# Up to so many pairs a GPU waits for the launches of fused kernels longer than it takes to write all coefficients out.
BRIEF = 2**22

# Memory that `linear` may take for its features where it saves arithmetic alone.
ROOM = {"cpu": 2**28, "cuda": 2**32}

# Called with the request and the output of each call, while somebody watches (`heedful.bridges.watch`). One that has an `idle` is asked
# by it first whether the call may go without.
WATCHERS: list[Callable[[Request, Tensor], None]] = []

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

P = ParamSpec("P")


class Attend(Protocol[P]):
    """`attend` itself, and what goes with it."""

    plan: Callable[..., Plan]
    coefficients: Callable[..., Tensor]
    step: Callable[..., Step]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor: ...


@dataclass(frozen=True)
class Considered:
    """What one implementation would do with a request: why it cannot, or what it would cost; in what way, of the chosen one."""

    name: str
    refusal: str | None
    cost: Cost | None
    detail: str = ""


@dataclass(frozen=True)
class Plan(Result):
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
    heads: tuple[str, ...] = ()  # the implementation that each head takes

    def __str__(self) -> str:
        lines = [
            f"{self.chosen}: {self.reason}",
            f"  {self.kernel!r}",
            f"  query {self.query}  key {self.key}  value {self.value}  {self.dtype} on {self.device}",
        ]
        for one in self.considered:
            if one.cost is None:
                words = f"cannot: {one.refusal}"
            else:
                words = f"{_scaled(one.cost.flops, 1000, 'FLOP')}, {_scaled(one.cost.bytes, 1024, 'B')} beyond inputs and output"
            lines.append(f"  {'>' if one.name == self.chosen else ' '} {one.name:<10} {words}")
            lines += [f"{'':<15}{one.detail}"] if one.detail else []
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
    kernel: Kernel | Sequence[Kernel] | None = None,
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
    call = _request(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, kernel)
    groups = [(of_heads, *_planned(part, impl)) for of_heads, part in heads.split(call)]
    chosen, reason, considered = groups[0][1:] if len(groups) == 1 else _together(groups)
    return Plan(
        chosen,
        reason,
        call.kernel,
        tuple(query.shape),
        tuple(key.shape),
        tuple(value.shape),
        str(query.dtype).removeprefix("torch."),
        str(query.device),
        tuple(considered),
        tuple(name for _, name in sorted((head, group[1]) for group in groups for head in group[0])),
    )


def coefficients(
    query: Tensor,
    key: Tensor,
    attn_mask: Mask | Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    kernel: Kernel | Sequence[Kernel] | None = None,
) -> Tensor:
    """The matrix by which `attend` combines values, written out: `[..., heads, queries, keys]`.

    >>> import torch
    >>> from heedful import attend
    >>> x = torch.randn(2, 3, 5, 4)
    >>> attend.coefficients(x, x, is_causal=True).sum(-1).allclose(torch.ones(2, 3, 5))
    True
    """
    request = _request(query, key, key, attn_mask, 0.0, is_causal, scale, enable_gqa, kernel)
    groups, parts = zip(*heads.split(request), strict=True)
    return heads.join(groups, [_coefficients(part) for part in parts])


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
    if not isinstance(kernel, Kernel) or kernel.of_pairs is not kernel:
        raise Unsupported(f"{kernel!r} keeps no state of constant size here; attend over the whole prefix instead")
    request = _request(query, key, value, None, 0.0, True, None, True, kernel)
    if query.shape[-2] != key.shape[-2] or query.shape[-2] == 0:
        raise InvalidArgument(
            f"step takes one key per query, and at least one; got query {tuple(query.shape)} and key {tuple(key.shape)}"
        )
    with full_precision(query.device):
        request, poison = shield(request)
        request = request.expanded()
        output, new = linear.step(kernel, request.query, request.key, request.value, state)
    return Step(output if poison is None else output + poison, new)


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
    kernel: Kernel | Sequence[Kernel] | None = None,
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
        kernel: what a coefficient is; `Softmax()` by default. A list is one kernel per head. See `heedful.kernels`.
        impl: `"auto"`, or the name of an implementation, which then serves the request or raises `Unsupported`.

    Returns:
        `[..., heads, queries, E]` in the value's dtype. A query that may attend to nothing gives zeros, with zero gradient.
        What is hidden never leaks, not even NaN; under a mask, a query that may attend to something not finite gives NaN (in
        `triton` an infinite key or query has an infinite score, and gives what that gives).

    The form is that of Ma & Ying (2023), Proposition 3.1, in rows. Sums are kept in float32 for 16-bit inputs.

    >>> import torch
    >>> from heedful import attend, Gaussian
    >>> q, k, v = torch.randn(3, 2, 4, 9, 8).unbind()
    >>> attend(q, k, v, kernel=Gaussian(bandwidth=2.0), is_causal=True).shape
    torch.Size([2, 4, 9, 8])
    """
    told = None
    if impl == "auto" and dropout_p == 0 and not (WATCHERS and _is_watched()):
        told = plain.signature(query, key, value, attn_mask, is_causal, scale, enable_gqa, kernel)
        known = None if told is None else plain.KNOWN.get(told)
        if known is not None:
            out = plain.run(known, query, key, value, attn_mask, is_causal, scale, kernel)
            if out is not None:
                return out
    call = _request(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, kernel)
    if told is not None and told not in plain.KNOWN and 0 not in call.shape:
        plain.learn(told, (query, key, value), call, _choose(sequence.of_pairs(call), impl)[0])
    groups, parts = zip(*heads.split(call), strict=True)
    out = heads.join(groups, [_combined(part, impl) for part in parts])
    for watcher in WATCHERS:
        watcher(call, out)
    return out


def _is_watched() -> bool:
    return not all((idle := getattr(watcher, "idle", None)) is not None and idle() for watcher in WATCHERS)


def _combined(call: Request, impl: str) -> Tensor:
    of_pairs = sequence.of_pairs(call)
    chosen, _ = _choose(of_pairs, impl)
    # Where there is no pair at all, only shapes are left to agree on.
    implementation = IMPLEMENTATIONS["reference" if 0 in call.shape else chosen]
    # What keeps hidden numbers from leaking by itself needs no pass over the vectors; queries are moved before it runs.
    guarded = call.mask is not None and of_pairs.kernel is call.kernel
    guarded = guarded and implementation.guards(of_pairs._replace(factors=None))
    with full_precision(call.query.device):
        request, poison = shield_factors(call) if guarded else sequence.shielded(call)
        request, balance = sequence.moved(request, partial(_through, impl=impl))
        out = implementation.run(steadied(request, implementation.name, by_name=impl != "auto"))
        out = (out if balance is None else out * balance.rows).to(call.value.dtype)
        return out if poison is None else out + poison


def _coefficients(request: Request) -> Tensor:
    dtype = request.key.dtype
    with full_precision(request.query.device):
        request, poison = sequence.shielded(request)
        request, balance = sequence.moved(request, partial(_through, impl="auto"))
        request = steadied(request, "reference", by_name=True).expanded()
        weights = reference.coefficients(request.kernel, request.query, request.key, *request.visible())
        if balance is not None:
            weights = weights * balance.rows * (1.0 if balance.keys is None else balance.keys.mT)
        return weights.to(dtype) if poison is None else weights.to(dtype) + poison


def _planned(call: Request, impl: str) -> tuple[str, str, list[Considered]]:
    """What is chosen for a call with one kernel, why, and what of the others."""
    request, moving, considered = sequence.of_pairs(call), _cost_of_moving(call), []
    chosen, reason = _choose(request, impl)
    for one in IMPLEMENTATIONS.values():
        refusal = one.refuse(request)
        cost = None if refusal else one.cost(request)
        cost = cost and Cost(cost.flops + moving.flops, max(cost.bytes, moving.bytes))
        considered.append(Considered(one.name, refusal, cost, one.detail(request) if one.name == chosen else ""))
    return chosen, reason, considered


def _together(groups: list[tuple[list[int], str, str, list[Considered]]]) -> tuple[str, str, list[Considered]]:
    """The same of a call in groups of heads: what each implementation would cost for all, and what is chosen between them."""

    def costs(name: str, several: Sequence[Considered]) -> Considered:
        told = [cost for one in several if (cost := one.cost) is not None]
        return Considered(name, None, Cost(sum(cost.flops for cost in told), max(cost.bytes for cost in told)))

    considered = []
    for several in zip(*(group[3] for group in groups), strict=True):
        refusals = [(group[0], one.refusal) for group, one in zip(groups, several, strict=True) if one.refusal]
        reason = "; ".join(f"{_numbered(of_heads)}: {refusal}" for of_heads, refusal in refusals)
        considered.append(Considered(several[0].name, reason, None) if refusals else costs(several[0].name, several))
    names = list(dict.fromkeys(group[1] for group in groups))
    if len(names) == 1:
        return names[0], groups[0][2], considered
    taken = [one for group in groups for one in group[3] if one.name == group[1]]
    reason = "one kernel per head: " + ", ".join(
        f"{name} for {_numbered([head for group in groups if group[1] == name for head in group[0]])}" for name in names
    )
    return " + ".join(names), reason, [*considered, costs(" + ".join(names), taken)]


def _numbered(of_heads: Sequence[int]) -> str:
    return f"head{'s' if len(of_heads) > 1 else ''} {', '.join(map(str, sorted(of_heads)))}"


def _through(request: Request, impl: str) -> Tensor:
    """A request of pairs by the implementation that was named, where it can, or else by the one that `auto` takes."""
    named = impl if impl in IMPLEMENTATIONS and IMPLEMENTATIONS[impl].refuse(request) is None else "auto"
    chosen = "reference" if 0 in request.shape else _choose(request, named)[0]
    return IMPLEMENTATIONS[chosen].run(steadied(request, chosen, by_name=named != "auto"))


def _cost_of_moving(request: Request) -> Cost:
    total = Cost(0.0, 0.0)
    bare = request._replace(bias=None, factors=None, value=request.key)
    moves = [bare._replace(kernel=kernel) for kernel in request.kernel.moves]
    sums = [request._replace(kernel=kernel, value=request.key[..., :1]) for kernel in request.kernel.balances]
    for moved in (*moves, *sums):
        cost = IMPLEMENTATIONS[_choose(moved, "auto")[0]].cost(moved)
        total = Cost(total.flops + cost.flops, max(total.bytes, cost.bytes))
    return total


def _choose(request: Request, impl: str) -> tuple[str, str]:
    """The implementation that runs, and why."""
    if impl != "auto":
        if not isinstance(impl, str) or impl not in IMPLEMENTATIONS:
            raise InvalidArgument(f"impl must be 'auto' or one of {', '.join(IMPLEMENTATIONS)}; got {impl!r}")
        refusal = IMPLEMENTATIONS[impl].refuse(request)
        if refusal is not None:
            raise Unsupported(
                f"impl={impl!r} cannot serve {request.kernel!r}: {refusal}. "
                "impl='auto' picks one that can; attend.plan(...) lists them"
            )
        return impl, "asked for by name"
    if _is_many(request):
        return "short", IMPLEMENTATIONS["short"].summary
    fused = _fusing(request)
    if IMPLEMENTATIONS["sdpa"].refuse(request) is None and not (fused and _costs_copies(request)):
        return "sdpa", IMPLEMENTATIONS["sdpa"].summary
    each = request.shape[-2] * request.shape[-1]
    many = MANY.get(request.query.device.type, MANY["cpu"])
    small = pairs(request) <= (BRIEF if fused else many if each <= FEW else SMALL)
    direct, why = (
        ("triton", IMPLEMENTATIONS["triton"].summary)
        if fused and not small
        else ("reference", "few pairs: writing all coefficients out is fastest")
        if small
        else ("stream", "many pairs: blocks of rows keep memory linear")
    )
    line = IMPLEMENTATIONS["linear"]
    if line.refuse(request) is None:
        cost, other = line.cost(request), IMPLEMENTATIONS[direct].cost(request)
        if cost.flops <= other.flops and cost.bytes <= max(
            other.bytes, ROOM.get(request.query.device.type, ROOM["cpu"])
        ):
            return "linear", line.summary
    return direct, why


def _is_many(request: Request) -> bool:
    """Whether these are so many short sequences, in 16 bit on a GPU, that blocks for long ones would stay mostly empty."""
    narrow = request.value.dtype in (torch.bfloat16, torch.float16) and request.query.device.type == "cuda"
    return narrow and math.prod(request.shape[:-2]) >= short.MANY and IMPLEMENTATIONS["short"].refuse(request) is None


def _fusing(request: Request) -> bool:
    """Whether `auto` may take the fused kernels: 16 bit on a GPU, for which they are built and measured (docs/performance.md).

    In float32 their products are three on the matrix unit: as fast forward as plain matrix products and slower backward.
    """
    narrow = request.value.dtype in (torch.bfloat16, torch.float16)
    return narrow and request.query.device.type == "cuda" and IMPLEMENTATIONS["triton"].refuse(request) is None


def _costs_copies(request: Request) -> bool:
    """Whether torch's fused attention would need more than a pointer to the inputs, where ours needs no more.

    Softmax attention without a mask is as fast in torch's kernels as in ours, or faster (docs/performance.md). A term of the
    key, a scale per head, a mask that torch takes as a matrix, or inputs that must be looked through for NaN before they meet
    a mask are paid for with copies.
    """
    terms = request.mask, request.bias, request.factors
    return not request.kernel.is_plain_softmax or any(term is not None for term in terms)


def _request(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask | Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    kernel: Kernel | Sequence[Kernel] | None,
) -> Request:
    """Checks every argument and brings masks to one form."""
    kernel = as_kernel(kernel)
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES or tensor.dim() < 2 or tensor.shape[-1] == 0:
            got = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidArgument(
                f"{name} must be a floating tensor (16, 32 or 64 bit) of shape (..., heads, seq, dim); got {got}"
            )
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        query, key, value = (x if x.dtype == torch.float64 else x.to(kind) for x in (query, key, value))
        named = {"query": query, "key": key, "value": value}
    for tensor in named.values():
        if tensor.dtype != query.dtype or tensor.device != query.device or tensor.dim() != query.dim():
            raise InvalidArgument(
                "query, key and value must agree in dtype, device and number of axes; got "
                + ", ".join(f"{n} {t.dtype} {tuple(t.shape)} on {t.device}" for n, t in named.items())
            )
    if query.shape[-1] != key.shape[-1]:
        raise InvalidArgument(f"query and key must share their last axis; got {query.shape[-1]} and {key.shape[-1]}")
    if key.shape[-2] != value.shape[-2]:
        raise InvalidArgument(f"key and value must be equally many; got {key.shape[-2]} and {value.shape[-2]}")
    if not isinstance(dropout_p, int | float) or not 0.0 <= dropout_p < 1.0:
        raise InvalidArgument(f"dropout_p must lie in [0, 1); got {dropout_p!r}")
    heads = query.shape[-3] if query.dim() > 2 else 1
    if query.dim() > 2:
        _check_heads(query, key, value, enable_gqa)
    for name, tensor in kernel.of_pairs.tensors().items():
        if tensor.dim() and tensor.device != query.device:
            raise InvalidArgument(f"the kernel's {name} lies on {tensor.device}, and query on {query.device}")
        if tensor.dim() and query.dim() == 2:
            raise InvalidArgument(
                f"the kernel's {name} is per head, but query {tuple(query.shape)} has no axis of heads"
            )
        if tensor.dim() and tensor.shape[0] not in (1, heads):
            raise InvalidArgument(f"the kernel's {name} has {tensor.shape[0]} entries; expected 1 or heads = {heads}")
    kernel.check(query, key)
    mask = masks.from_sdpa(attn_mask, is_causal)
    request = Request(query, key, value, kernel.with_scale(scale), mask, dropout_p=dropout_p)
    if query.dim() > 2 and key.shape[-3] != value.shape[-3]:
        request = request.expanded()
    if mask is None:
        return request
    mask.check(request.shape)
    hiding, factors = mask.hiding, mask.factors
    if hiding is masks.lower_right and query.shape[-2] == 1:
        hiding = None  # the last query sees everything
    if factors is not None:
        factors = factors[0].to(query.device), factors[1].to(query.device)
    return request._replace(mask=hiding, bias=mask.bias, factors=factors)


def _check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    heads = query.shape[-3]
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[-3] == heads:
            continue
        if not enable_gqa:
            raise InvalidArgument(
                f"{name} has {tensor.shape[-3]} heads and query {heads}; pass enable_gqa=True to share key and value heads"
            )
        if tensor.shape[-3] == 0 or heads % tensor.shape[-3]:
            raise InvalidArgument(f"query heads ({heads}) must be a multiple of {name} heads ({tensor.shape[-3]})")
    if query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        return
    try:
        torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    except RuntimeError:
        raise InvalidArgument(
            "leading axes must broadcast; got query "
            f"{tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        ) from None


def _scaled(number: float, base: int, unit: str) -> str:
    prefixes = ["", "k", "M", "G", "T", "P"]
    while number >= base and len(prefixes) > 1:
        number /= base
        prefixes.pop(0)
    return f"{number:.3g} {prefixes[0]}{'i' if base == 1024 and prefixes[0] else ''}{unit}"

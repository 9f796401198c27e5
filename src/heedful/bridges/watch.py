"""Watching attention at work: every call that a model makes, with what went in and what came out.

Four ways lead to attention, and each is watched where it begins: transformers' attention interface, `torch.nn`'s
`MultiheadAttention` and its fused encoder layer, heedful's `attend`, and `scaled_dot_product_attention` called by a model's
own code. The model itself is not touched: no hook, attribute or config of it changes, and it runs the implementation it has.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from heedful import _attend, masks
from heedful._errors import Unsupported
from heedful.kernels import Kernel, Softmax
from heedful.nn import Attention, PairAttention
from heedful.ops import Request

__all__ = ["Watched", "watch"]

# Arguments that say where keys and values come from when it is not the queries' own sequence.
ELSEWHERE = ("key_value_states", "encoder_hidden_states", "cross_attention_states")

# Callers of `scaled_dot_product_attention` that are watched already.
KNOWN_CALLERS = ("heedful.", "torch.nn.", "transformers.integrations.")


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


@dataclass
class _Frame:
    """A module at work, and the calls it has made so far."""

    module: nn.Module
    calls: list[Watched]


class _Watch:
    """One run being watched, in one thread."""

    def __init__(self, model: nn.Module, tell: Callable[[Watched], None]) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.tell = tell
        self.frames: list[_Frame] = []
        self.silent = 0
        self.called: set[nn.Module] = set()
        self.executed: set[str] = set()
        # By identity; the mask itself is held so that its place is not given to another.
        self.masks: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}

    @contextmanager
    def silence(self) -> Iterator[None]:
        """While a call is watched, what it calls in turn is not."""
        self.silent += 1
        try:
            yield
        finally:
            self.silent -= 1

    def enter(self, module: nn.Module) -> None:
        if module in self.names and not self.silent:
            self.frames.append(_Frame(module, []))

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.silent or all(frame.module is not module for frame in self.frames):
            return
        # Those above it ended by an exception that the model caught itself.
        while (frame := self.frames.pop()).module is not module:
            pass
        given = _arguments(module, args, kwargs)
        if isinstance(module, nn.MultiheadAttention):
            self._multihead(frame, module, given)
        elif isinstance(module, nn.TransformerEncoderLayer) and module.self_attn not in self.called:
            self._encoder_layer(frame, module, given)
        elif isinstance(module, PairAttention):
            frame.calls.append(self._pair(module, args, kwargs, output))
        self.called.discard(getattr(module, "self_attn", module))
        if frame.calls:
            self.called.add(module)
        self.executed.add(self.names[module])
        inputs, cross = _inputs(given)
        for call in frame.calls:
            # Fused layers know their inputs better than their arguments tell.
            known = call.inputs is not None
            self.tell(call if known else replace(call, inputs=inputs, cross=cross))

    def add(self, call: Watched, module: nn.Module | None = None) -> None:
        """A call by this module, or by the innermost one at work."""
        for frame in reversed(self.frames):
            if module is None or frame.module is module:
                frame.calls.append(replace(call, name=call.name or self.names[frame.module]))
                return

    def _multihead(self, frame: _Frame, module: nn.MultiheadAttention, given: dict[str, Any]) -> None:
        """Our layer on torch's parameters: the same projections, masks and extra keys."""
        query, key = given["query"], given["key"]
        batched, first = query.dim() == 3, module.batch_first
        inputs = query if first or not batched else query.transpose(0, 1)
        wanted = ("query", "key", "value", "key_padding_mask", "attn_mask", "is_causal")
        arguments = {name: given[name] for name in wanted if name in given}
        frame.calls += self._through_ours(
            frame, module, arguments, inputs if batched else query[None], query is not key
        )

    def _encoder_layer(self, frame: _Frame, layer: nn.TransformerEncoderLayer, given: dict[str, Any]) -> None:
        """torch's fused layer, which never calls its own attention module."""
        x, padding = given["src"], given.get("src_key_padding_mask")
        if x.is_nested:
            lengths = torch.tensor([len(one) for one in x.unbind()], device=x.device)
            x = torch.nested.to_padded_tensor(x, 0.0)
            padding = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        with self.silence():
            x = layer.norm1(x) if layer.norm_first else x
        masked = {"key_padding_mask": padding, "attn_mask": given.get("src_mask"), "is_causal": given["is_causal"]}
        inputs = x if layer.self_attn.batch_first else x.transpose(0, 1)
        frame.calls += self._through_ours(
            frame, layer.self_attn, {"query": x, "key": x, "value": x, **masked}, inputs, False
        )

    def _through_ours(
        self, frame: _Frame, module: nn.MultiheadAttention, given: dict[str, Any], inputs: Tensor, cross: bool
    ) -> list[Watched]:
        ours = Attention(
            module.embed_dim,
            module.num_heads,
            bias=module.in_proj_bias is not None,
            add_bias_kv=module.bias_k is not None,
            add_zero_attn=module.add_zero_attn,
            kdim=module.kdim,
            vdim=module.vdim,
            batch_first=module.batch_first,
            device=torch.device("meta"),
        )
        made: list[Watched] = []
        name = self.names[module]

        def keep(request: Request, output: Tensor) -> None:
            made.append(replace(_of_request(request, output), name=name, inputs=inputs, cross=cross))

        with self.silence(), _tapped(keep):
            parameters = {name: value.detach() for name, value in module.named_parameters()}
            torch.func.functional_call(ours.eval(), parameters, (), {**given, "need_weights": False})
        self.called.add(module)
        return made

    def _pair(self, module: PairAttention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Watched:
        with self.silence():
            weights = module.coefficients(*args, **kwargs)
        return Watched(self.names[module], None, None, None, output[:, None], weights=weights[:, None])


_current: ContextVar[_Watch | None] = ContextVar("heedful_watch", default=None)
_lock = threading.RLock()
_installed: list[Callable[[], None]] = []
_watching = 0


@contextmanager
def watch(model: nn.Module, tell: Callable[[Watched], None]) -> Iterator[set[str]]:
    """While it lasts, `tell` receives every call of attention that the model makes in this thread.

    Gives the names of the modules that have run, filled as they finish.

    >>> import torch
    >>> layer, calls = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), []
    >>> x = torch.randn(1, 5, 8)
    >>> with torch.no_grad(), watch(layer, calls.append):
    ...     _ = layer(x, x, x)
    >>> calls[0].query.shape, calls[0].kernel
    (torch.Size([1, 2, 5, 4]), Softmax())
    """
    global _watching
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise Unsupported("a compiled model runs code that cannot be watched; give the model itself, model._orig_mod")
    watching = _Watch(model, tell)
    with _lock:
        if not _watching:
            _install()
        _watching += 1
    token = _current.set(watching)
    try:
        yield watching.executed
    finally:
        _current.reset(token)
        with _lock:
            _watching -= 1
            if not _watching:
                while _installed:
                    _installed.pop()()


def _install() -> None:
    """Listens at every place where attention begins; `_installed` holds what undoes it."""
    enter = nn.modules.module.register_module_forward_pre_hook(_entering)
    leave = nn.modules.module.register_module_forward_hook(_leaving, with_kwargs=True)
    _installed.extend((enter.remove, leave.remove))
    _attend.WATCHERS.append(_attended)
    _installed.append(lambda: _attend.WATCHERS.remove(_attended))
    functional = nn.functional
    plain = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _scaled_dot_product(plain)
    _installed.append(lambda: setattr(functional, "scaled_dot_product_attention", plain))
    if "transformers" in sys.modules:
        _install_transformers()


def _install_transformers() -> None:
    from transformers.modeling_utils import AttentionInterface

    find, get = AttentionInterface.get_interface, AttentionInterface.__getitem__

    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return _interface(find(self, attn_implementation, default), attn_implementation, default)

    def getitem(self: Any, key: str) -> Callable[..., Any]:
        return _interface(get(self, key), key, None)

    own = "__getitem__" in vars(AttentionInterface)
    AttentionInterface.get_interface, AttentionInterface.__getitem__ = get_interface, getitem
    _installed.append(lambda: setattr(AttentionInterface, "get_interface", find))
    _installed.append(
        lambda: setattr(AttentionInterface, "__getitem__", get) if own else delattr(AttentionInterface, "__getitem__")
    )


def _entering(module: nn.Module, args: Any) -> None:
    watching = _current.get()
    if watching is not None:
        watching.enter(module)


def _leaving(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    watching = _current.get()
    if watching is not None:
        watching.leave(module, args, kwargs, output)


def _attended(request: Request, output: Tensor) -> None:
    watching = _current.get()
    if watching is not None and not watching.silent:
        watching.add(_of_request(request, output))


@contextmanager
def _tapped(keep: Callable[[Request, Tensor], None]) -> Iterator[None]:
    _attend.WATCHERS.append(keep)
    try:
        yield
    finally:
        _attend.WATCHERS.remove(keep)


def _scaled_dot_product(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(plain)
    def watched(*args: Any, **kwargs: Any) -> Tensor:
        output = plain(*args, **kwargs)
        watching = _current.get()
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if watching is not None and not watching.silent and not caller.startswith(KNOWN_CALLERS):
            watching.add(_of_sdpa(output, *args, **kwargs))
        return output

    return watched


def _of_sdpa(
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
    seen, bias = _split(attn_mask)
    return _made(query, key, value, output, Softmax(scale), seen, bias, is_causal)


def _of_request(request: Request, output: Tensor) -> Watched:
    # Plain causality costs no memory; any other mask is written out.
    causal = request.mask is masks.causal
    seen = bias = None
    if request.mask is not None and not causal:
        seen, bias = request.visible()
    return _made(request.query, request.key, request.value, output, request.kernel, seen, bias, causal)


def _made(
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
        if x is None or x.dim() <= 4:
            return x
        return x.expand(*output.shape[:-3], *x.shape[-3:]).flatten(0, -4)

    return Watched("", four(query), four(key), four(value), four(output), kernel, grid(mask), grid(bias), causal)


def _interface(
    function: Callable[..., Any], implementation: str, eager: Callable[..., Any] | None
) -> Callable[..., Any]:
    """An attention function of transformers that also tells who watches."""
    if getattr(function, "_heedful_watched", False):
        if eager is None:
            return function
        function = function.__wrapped__  # type: ignore[attr-defined]

    @wraps(function)
    def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        watching = _current.get()
        if watching is None or watching.silent:
            return function(module, *args, **kwargs)
        with watching.silence():
            result = function(module, *args, **kwargs)
            given = dict(zip(("query", "key", "value", "attention_mask"), args, strict=False)) | kwargs
            call = _of_interface(module, given, result[0], implementation or "eager", eager)
        watching.add(call, module)
        return result

    watched._heedful_watched = True  # type: ignore[attr-defined]
    return watched


def _of_interface(
    module: nn.Module, given: dict[str, Any], output: Tensor, implementation: str, eager: Callable[..., Any] | None
) -> Watched:
    """A call through the attention interface; `output` is `[B, Q, H, E]`."""
    from heedful.bridges.transformers import FOREIGN, kernel_of

    query, key, value = (given.pop(name) for name in ("query", "key", "value"))
    mask, bias, scaling = (given.pop(name, None) for name in ("attention_mask", "position_bias", "scaling"))
    asked = given.pop("is_causal", None)
    causal = bool(getattr(module, "is_causal", True) if asked is None else asked)
    # Only these read is_causal, and only where no mask is given; the others are always told by a mask.
    causal = causal and mask is None and query.shape[-2] > 1 and implementation in ("sdpa", "heedful")
    if causal and implementation == "sdpa" and key.shape[-2] > query.shape[-2]:
        key, value = (x[..., : query.shape[-2], :] for x in (key, value))
    seen, added = _split(_grid(mask, query, key, implementation, module))
    if bias is not None and causal:
        bias = bias[..., : key.shape[-2]]
    bias = bias if added is None else added if bias is None else bias + added
    # SDPA has no place for these; versions of transformers that do not refuse leave them out.
    foreign = {name: given[name] for name in FOREIGN if given.get(name) is not None and implementation != "sdpa"}
    kernel = kernel_of(module, query.device, scaling) if implementation.startswith("heedful") else Softmax(scaling)
    call = Watched("", query, key, value, output.transpose(1, 2), kernel, seen, bias, causal)
    if not foreign:
        return call
    if eager is None:
        raise Unsupported(f"{type(module).__name__} passes {', '.join(foreign)} to attention that cannot be watched")
    lowest = torch.finfo(query.dtype).min
    if causal:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()[None, None]
    shown = None if seen is None else torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, lowest)
    shown = bias if shown is None else shown if bias is None else shown + bias
    rest = {name: value for name, value in given.items() if name != "dropout"}
    _, weights = eager(module, query, key, value, shown, scaling=scaling, dropout=0.0, **rest)
    return replace(call, weights=weights, kernel=None)


def _grid(mask: Any, query: Tensor, key: Tensor, implementation: str, module: nn.Module) -> Tensor | None:
    """The mask of an attention function as one tensor that broadcasts to `[B, H, Q, K]`."""
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 4):
        if mask is None and "flash" in implementation and getattr(module, "is_causal", True):
            return _lower_right(query, key)
        return mask if mask is None or mask.shape[-1] == key.shape[-2] else mask[..., : key.shape[-2]]
    if isinstance(mask, Tensor) and mask.dim() == 2:
        seen = mask[:, None, None, :].bool()
        return seen & _lower_right(query, key) if getattr(module, "is_causal", True) else seen
    if hasattr(mask, "mask_mod"):
        from torch.nn.attention.flex_attention import create_mask

        sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        return create_mask(mask.mask_mod, *sizes, device=str(query.device))
    raise Unsupported(f"{type(module).__name__} masks its attention by a {type(mask).__name__}, which cannot be read")


def _lower_right(query: Tensor, key: Tensor) -> Tensor:
    rows, columns = query.shape[-2], key.shape[-2]
    return torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)[None, None]


def _split(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Who may attend to whom, and what is added to the score; once for a mask that all layers share."""
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    watching = _current.get()
    known = {} if watching is None else watching.masks
    if id(mask) not in known:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        bias = mask.masked_fill(hidden, 0.0)
        known[id(mask)] = (mask, ~hidden if hidden.any() else None, bias if bias.any() else None)
    return known[id(mask)][1:]


@cache
def _signature(forward: Any) -> inspect.Signature:
    return inspect.signature(forward)


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a module was called with, by name, defaults filled in."""
    try:
        bound = _signature(type(module).forward).bind(module, *args, **kwargs)
    except (TypeError, ValueError):
        return dict(kwargs)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name != "self"}


def _inputs(given: dict[str, Any]) -> tuple[Tensor | None, bool]:
    """The tensor a module read, and whether keys and values came from elsewhere."""
    tensors = (value for value in given.values() if isinstance(value, Tensor) and value.is_floating_point())
    inputs = next(tensors, None)
    inputs = inputs[None] if inputs is not None and inputs.dim() == 2 else inputs
    key = given.get("key")
    apart = isinstance(key, Tensor) and key is not given.get("query")
    return inputs, apart or any(given.get(name) is not None for name in ELSEWHERE)

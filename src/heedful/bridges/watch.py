"""Watching attention at work: every call that a model makes, with what went in and what came out.

Five ways lead to attention, and each is watched where it begins: transformers' attention interface, `torch.nn`'s
`MultiheadAttention` and its fused encoder layer, heedful's `attend`, `scaled_dot_product_attention` called by a model's own
code, and products of what its linear maps of queries, keys and values gave. The model itself is not touched: no hook, attribute or config of it changes, and it runs the implementation it has.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, partial, wraps
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias

from heedful import _attend
from heedful._errors import Unsupported
from heedful.bridges.calls import (
    Compared,
    Memory,
    Watched,
    agree,
    close,
    largest_score,
    of_interface,
    of_request,
    of_sdpa,
    rounding,
)
from heedful.bridges.projected import Mapped, call_of, maps_of
from heedful.nn import Attention, PairAttention
from heedful.ops import Request

__all__ = ["Run", "Watched", "watch"]

# Arguments that say where keys and values come from when it is not the queries' own sequence.
ELSEWHERE = ("key_value_states", "encoder_hidden_states", "cross_attention_states")

# Callers of `scaled_dot_product_attention` that are watched already.
KNOWN_CALLERS = ("heedful.", "torch.nn.", "transformers.integrations.")


@dataclass
class _Frame:
    """A module at work, the calls it has made so far, and what its linear maps of queries, keys and values gave."""

    module: nn.Module
    calls: list[Watched]
    maps: dict[int, Mapped] = field(default_factory=dict)


@dataclass
class Run:
    """The modules that ran, those whose attention was seen but cannot be told, by name, and what calls that were not looked at gave."""

    executed: set[str] = field(default_factory=set)
    missed: set[str] = field(default_factory=set)
    doubts: list[Compared] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Whether every call was what it was taken for; this waits for the device."""
        return agree(self.doubts)


class _Watch:
    """One run being watched, in one thread."""

    def __init__(
        self, model: nn.Module, tell: Callable[[Watched], None], copy: Callable[[Watched], Any], later: bool
    ) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.maps = maps_of(self.names)
        self.tell, self.copy = tell, copy
        self.frames: list[_Frame] = []
        self.silent = 0
        self.called: set[nn.Module] = set()
        self.run = Run()
        self.memory = Memory(self.run.doubts if later else None)

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
        if self.silent or all(frame.module is not module for frame in reversed(self.frames)):
            return
        # Those above it ended by an exception that the model caught itself.
        while (frame := self.frames.pop()).module is not module:
            pass
        if module in self.maps and self.frames and args and isinstance(output, Tensor):
            around, at = self.maps[module]
            if self.frames[-1].module is around:
                self.frames[-1].maps[at] = Mapped(args[0], output)
        if isinstance(module, nn.MultiheadAttention):
            self._multihead(frame, module, _arguments(module, args, kwargs), output)
        elif isinstance(module, nn.TransformerEncoderLayer) and module.self_attn not in self.called and not frame.calls:
            self._encoder_layer(frame, module, _arguments(module, args, kwargs))
        elif isinstance(module, PairAttention):
            frame.calls.append(self._pair(module, args, kwargs, output))
        elif frame.maps and not frame.calls:
            with self.silence():
                call = call_of(module, frame.maps, _arguments(module, args, kwargs), output)
            frame.calls += [] if call is None else [replace(call, name=self.names[module])]
        self.called.discard(module._modules.get("self_attn", module))
        self.run.executed.add(self.names[module])
        if not frame.calls:
            return
        self.called.add(module)
        inputs, cross = _inputs(_arguments(module, args, kwargs))
        for call in frame.calls:
            call = call if call.kept is not None else self._copied(call)
            # Fused layers know their inputs better than their arguments tell.
            known = call.inputs is not None
            self.tell(call if known else replace(call, inputs=inputs, cross=cross))

    def add(self, call: Watched, module: nn.Module | None = None) -> None:
        """A call by this module, or by the innermost one at work."""
        for frame in reversed(self.frames):
            if module is None or frame.module is module:
                # Now: the model may write over its tensors before the module ends.
                frame.calls.append(self._copied(replace(call, name=call.name or self.names[frame.module])))
                return

    def _copied(self, call: Watched) -> Watched:
        # Whoever watches may attend as well.
        with self.silence():
            return replace(call, kept=self.copy(call))

    def _multihead(self, frame: _Frame, module: nn.MultiheadAttention, named: dict[str, Any], output: Any) -> None:
        """Our layer on torch's weights: the same projections, masks and extra keys."""
        query, key = named["query"], named["key"]
        batched = query.dim() == 3
        inputs = query if batched else query[None]
        inputs = inputs if module.batch_first or not batched else inputs.transpose(0, 1)
        wanted = ("query", "key", "value", "key_padding_mask", "attn_mask", "is_causal")
        arguments = {name: named[name] for name in wanted if name in named}
        cross = query is not key and (query.shape != key.shape or not torch.equal(query, key))
        calls, ours = self._through_ours(module, arguments, inputs, cross)
        # A subclass may do something else with its arguments.
        if (module.training and module.dropout) or _same_output(calls[0], ours, output[0], batched, module.batch_first):
            frame.calls += calls
        else:
            self.run.missed.add(self.names[module])

    def _encoder_layer(self, frame: _Frame, layer: nn.TransformerEncoderLayer, arguments: dict[str, Any]) -> None:
        """torch's fused layer, which never calls its own attention module; a subclass with its own forward is only named."""
        if (
            type(layer).forward is not nn.TransformerEncoderLayer.forward
            or type(layer.self_attn) is not nn.MultiheadAttention
        ):
            self.run.missed.add(self.names[layer])
            return
        x, padding = arguments["src"], arguments.get("src_key_padding_mask")
        if x.is_nested:
            lengths = torch.tensor([len(one) for one in x.unbind()], device=x.device)
            x = torch.nested.to_padded_tensor(x, 0.0)
            padding = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        with self.silence():
            x = layer.norm1(x) if layer.norm_first else x
        mask, causal = arguments.get("src_mask"), arguments["is_causal"]
        named = {"query": x, "key": x, "value": x, "key_padding_mask": padding, "attn_mask": mask, "is_causal": causal}
        inputs = x if layer.self_attn.batch_first else x.transpose(0, 1)
        frame.calls += self._through_ours(layer.self_attn, named, inputs, False)[0]

    def _through_ours(
        self, module: nn.MultiheadAttention, arguments: dict[str, Any], inputs: Tensor, cross: bool
    ) -> tuple[list[Watched], Tensor]:
        """The calls, and what our layer gave."""
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
        calls: list[Watched] = []
        name = self.names[module]

        def keep(request: Request, output: Tensor) -> None:
            if _current.get() is self:
                calls.append(replace(of_request(request, output), name=name, inputs=inputs, cross=cross))

        with self.silence(), _tapped(keep):
            # By attribute: a weight that is pruned or parametrised is no parameter of its module.
            weights = {name: attrgetter(name)(module).detach() for name, _ in ours.named_parameters()}
            output, _ = torch.func.functional_call(ours.eval(), weights, (), {**arguments, "need_weights": False})
        self.called.add(module)
        return calls, output

    def _pair(self, module: PairAttention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Watched:
        with self.silence():
            own, read = module.coefficients(*args, **kwargs)
        weights = own if read is None else torch.cat((own, read), dim=-1)
        # Heads are summed; what each adds is not known here, so each is given an equal part.
        parts = output[:, None].expand(-1, own.shape[1], -1, -1) / own.shape[1]
        return Watched(self.names[module], None, None, None, parts, weights=weights)


_current: ContextVar[_Watch | None] = ContextVar("heedful_watch", default=None)
_lock = threading.RLock()
_installed: list[Callable[[], Any]] = []
_watching = 0


@contextmanager
def watch(
    model: nn.Module,
    tell: Callable[[Watched], None],
    copy: Callable[[Watched], Any] = lambda call: None,
    *,
    later: bool = False,
) -> Iterator[Run]:
    """While it lasts, `tell` receives every call of attention that the model makes in this thread.

    It does so when the module ends and its arguments are known; `copy` is asked at the time of the call, before the model
    writes over its tensors, and what it returns is the call's `kept`. With `later`, calls on a device are taken for what they seem to be, and
    the run's `agrees` says at the end whether they all were; without, each is looked at, which waits for the device. Gives the names of the modules that have run, and of those whose attention cannot be told, filled as they finish.

    >>> import torch
    >>> layer, calls = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), []
    >>> x = torch.randn(1, 5, 8)
    >>> with torch.no_grad(), watch(layer, calls.append):
    ...     _ = layer(x, x, x)
    >>> calls[0].query.shape, calls[0].kernel
    (torch.Size([1, 2, 5, 4]), Softmax())
    """
    global _watching
    watching = _Watch(model, tell, copy, later)
    compiled = torch._dynamo.OptimizedModule
    if any(isinstance(module, compiled) or module._compiled_call_impl is not None for module in watching.names):
        raise Unsupported(
            "a compiled model runs code that cannot be watched; give the model as it was before torch.compile"
        )
    if any(one is not None and one.is_meta for module in watching.names for one in module._parameters.values()):
        raise Unsupported("the model lies on the meta device and has no numbers; load it first")
    with _lock:
        if not _watching:
            _install()
        _watching += 1
    token = _current.set(watching)
    try:
        yield watching.run
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
    # torch forgets to take this entry out again.
    kwargs: dict[int, bool] = getattr(nn.modules.module, "_global_forward_hooks_with_kwargs", {})
    _installed.extend((enter.remove, leave.remove, lambda: kwargs.pop(leave.id, None)))
    _attend.WATCHERS.append(_attended)
    _installed.append(lambda: _attend.WATCHERS.remove(_attended))
    plain, whole = nn.functional.scaled_dot_product_attention, nn.functional.multi_head_attention_forward
    swaps = ((plain, _scaled_dot_product(plain)), (whole, _multi_head(whole)))
    _swap(swaps)
    # Sought anew: a module that was imported meanwhile took the watched one.
    _installed.append(partial(_swap, tuple((watched, function) for function, watched in swaps)))
    if "transformers" in sys.modules:
        _install_transformers()


# Modules that were looked through: the names that each has, how many these were, and under which of them the functions were.
_looked: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {}
# All modules as they were the last time, the names of those outside of torch, how many these were, and where the functions were.
_last: tuple[list[Any], list[dict[str, Any]], list[int], list[str]] = ([], [], [], [])
# Where names come and go; both are the same module.
_MAIN = ("__main__", "__mp_main__")


def _swap(swaps: Sequence[tuple[Callable[..., Any], Callable[..., Any]]]) -> None:
    """Puts watched functions in the place of others, or back, under every name that modules outside of torch gave them.

    There are thousands of modules: those are looked through whose number of names has changed, and others only visited where they had such a name.
    """
    global _last
    sought = [function for pair in swaps for function in pair]
    for place in _MAIN:
        _looked.pop(place, None)
    # By whole lists: thousands of small containers at once would wake the garbage collector.
    modules = list(sys.modules.values())
    same = modules == _last[0]
    dicts = _last[1] if same else [vars(m) for place, m in list(sys.modules.items()) if _is_outside(place, m)]
    counts = list(map(len, dicts))
    same = same and counts == _last[2]
    for place in [*_MAIN, *_last[3]] if same else list(sys.modules):
        module = sys.modules.get(place)
        if not isinstance(module, ModuleType):
            continue
        names = module.__dict__
        known = _looked.get(place)
        if known is None or known[0] is not names or known[1] != len(names):
            within = place not in _MAIN and not _is_outside(place, module)
            under = () if within else tuple(n for n, value in list(names.items()) if any(value is f for f in sought))
            known = _looked[place] = (names, len(names), under)
        for name in known[2]:
            for old, new in swaps:
                if names.get(name) is old:
                    setattr(module, name, new)
    places = _last[3] if same else [place for place, known in _looked.items() if known[2] and place not in _MAIN]
    _last = (modules, dicts, counts, places)


def _is_outside(place: str, module: Any) -> bool:
    within = place != "torch.nn.functional" and place.startswith(("torch.", *KNOWN_CALLERS))
    return isinstance(module, ModuleType) and place not in _MAIN and not within


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
        watching.add(of_request(request, output))


def _idle() -> bool:
    watching = _current.get()
    return watching is None or bool(watching.silent)


_attended.idle = _idle  # type: ignore[attr-defined]


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
        if any(isinstance(x, CausalBias) for x in (*args, *kwargs.values())):
            # torch compares the function it is called by with the one that now has its name.
            with _lock:
                nn.functional.scaled_dot_product_attention = plain
                try:
                    output = plain(*args, **kwargs)
                finally:
                    nn.functional.scaled_dot_product_attention = watched
        else:
            output = plain(*args, **kwargs)
        watching = _current.get()
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if watching is not None and not watching.silent and not caller.startswith(KNOWN_CALLERS):
            with watching.silence():
                call = of_sdpa(watching.memory, output, *args, **kwargs)
            watching.add(call)
        return output

    return watched


def _multi_head(whole: Callable[..., Any]) -> Callable[..., Any]:
    """torch's functional form, called by a model's own code: its weights are spread over arguments, so it is only named."""

    @wraps(whole)
    def watched(*args: Any, **kwargs: Any) -> Any:
        watching = _current.get()
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if watching is not None and not watching.silent and watching.frames and not caller.startswith("torch.nn."):
            watching.run.missed.add(watching.names[watching.frames[-1].module])
        return whole(*args, **kwargs)

    return watched


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
            arguments = dict(zip(("query", "key", "value", "attention_mask"), args, strict=False)) | kwargs
            call = of_interface(watching.memory, module, arguments, result, implementation or "eager", eager)
        watching.add(call, module)
        return result

    watched._heedful_watched = True  # type: ignore[attr-defined]
    return watched


def _same_output(call: Watched, ours: Tensor, theirs: Tensor, batched: bool, batch_first: bool) -> bool:
    """Whether torch's module gave what our layer gives, for queries that see anything; others are NaN or a mean in torch."""
    sees = torch.ones(call.output.shape[0], call.output.shape[2], dtype=torch.bool, device=theirs.device)
    if call.mask is not None:
        shown = call.mask[(None,) * (4 - call.mask.dim())].any(dim=-1).all(dim=1)
        sees = sees & shown
    counts = sees if batched and batch_first else sees[0] if not batched else sees.mT
    allowed = rounding(call.output.dtype, largest_score(call))
    return bool(close(ours[None], theirs[None], counts[None, ..., None], allowed))


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


def _inputs(arguments: dict[str, Any]) -> tuple[Tensor | None, bool]:
    """The tensor a module read, and whether keys and values came from elsewhere."""
    tensors = (value for value in arguments.values() if isinstance(value, Tensor) and value.is_floating_point())
    inputs = next(tensors, None)
    inputs = inputs[None] if inputs is not None and inputs.dim() == 2 else inputs
    key = arguments.get("key")
    apart = isinstance(key, Tensor) and key is not arguments.get("query")
    return inputs, apart or any(arguments.get(name) is not None for name in ELSEWHERE)

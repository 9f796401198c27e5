"""Where a tracker looks: a module, its name or a function, run on the probe without a trace in the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from heedful._errors import InvalidArgument, Unsupported
from heedful._runtime import after_calls, before_calls, undisturbed
from heedful.bridges.structure import layers_of
from heedful.bridges.transformers import bare

Tap = str | nn.Module | Callable[..., Tensor]

# Modules that hand on what they read while a model is evaluated.
IDLE = (nn.Identity, nn.modules.dropout._DropoutNd)


@dataclass(frozen=True)
class Reached:
    """What the probe became at the tap: what the tapped module read and returned, and what ran last before that."""

    read: Tensor | None
    returned: Tensor
    last: nn.Module | None


class Place:
    """A tapped place of a model: `run(probe)` is what arrives there in evaluation mode."""

    def __init__(self, model: Any, tap: Tap, side: str) -> None:
        self.model = _unwrapped(bare(model))
        if not isinstance(self.model, nn.Module):
            raise InvalidArgument(f"model must be a torch.nn.Module; got {type(model).__name__}")
        lazy = next((name for name, part in self.model.named_parameters() if nn.parameter.is_lazy(part)), None)
        if lazy is not None:
            raise InvalidArgument(f"{lazy} has no shape yet; run the model on a batch before it is tracked")
        self.side = side
        function = callable(tap) and not isinstance(tap, nn.Module)
        self.function = cast(Callable[..., Any], tap) if function else None
        self.module = None if function else _module(self.model, tap)
        if self.function is not None and side == "input":
            raise InvalidArgument(
                "side='input' is what a tapped module reads; a function returns what it wants tracked"
            )

    def __str__(self) -> str:
        if self.module is None:
            return f"{getattr(self.function, '__name__', type(self.function).__name__)} of {type(self.model).__name__}"
        name = next(name.replace("._orig_mod", "") for name, part in self.model.named_modules() if part is self.module)
        return f"{name} ({type(self.module).__name__})" if name else type(self.module).__name__

    def run(self, probe: Any) -> Reached:
        """Evaluates the model on the probe; modes, gradients, random states and buffers are as before afterwards."""
        args, named = _arguments(_placed(probe, self.model))
        leaves = [module for module in self.model.modules() if next(module.children(), None) is None]
        last: nn.Module | None = None
        read: Tensor | None = None
        reached: Reached | None = None

        def entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal read, reached
            own = _first_tensor((*args, *kwargs.values()))
            # A module that runs several times is one move, from what it read first.
            read = own if read is None else read
            if self.side == "input":
                if own is None:
                    raise Unsupported(
                        f"{self} reads no tensor of floating numbers; tap what it returns, or give a function"
                    )
                reached = Reached(None, own, last)

        def left(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            nonlocal last, reached
            if module in watched and not isinstance(module, IDLE):
                last = module
            if module is self.module and self.side == "output":
                returned = _first_tensor(output)
                if returned is None:
                    raise Unsupported(
                        f"{self} returns no tensor of floating numbers; tap another module, or give a function"
                    )
                reached = Reached(read, returned, last)

        watched = set(leaves)
        tapped = [] if self.module is None else [self.module]
        watching = before_calls(tapped, entered), after_calls({*watched, *tapped}, left)
        with undisturbed(self.model), _same_buffers(self.model), _eager(self.model), watching[0], watching[1]:
            if self.function is None:
                self.model(*args, **named)
            else:
                returned = _first_tensor(self.function(self.model, *args, **named))
                reached = None if returned is None else Reached(None, returned, last)
        if reached is None:
            why = "did not run on the probe" if self.function is None else "returned no tensor of floating numbers"
            raise InvalidArgument(f"{self} {why}; tap something that the model calls when it reads the probe")
        return reached


def _module(model: nn.Module, tap: Any) -> nn.Module:
    # Compiled parts go by the names that they have without.
    modules = {name.replace("._orig_mod", ""): module for name, module in model.named_modules()}
    if tap == "block" and tap not in modules:
        blocks = layers_of(model)
        if not blocks:
            raise InvalidArgument(
                f"{type(model).__name__} has no list of layers that hold attention; give the tapped module, its name or a function"
            )
        return _unwrapped(blocks[-1][1])
    if isinstance(tap, str):
        if tap not in modules:
            names = [name for name in modules if name]
            more = ", ..." if len(names) > 8 else ""
            raise InvalidArgument(
                f"tap {tap!r} is no module of this {type(model).__name__}; there are {', '.join(names[:8])}{more}"
            )
        return modules[tap]
    if isinstance(tap, nn.Module):
        tap = _unwrapped(tap)
        if tap not in set(modules.values()):
            raise InvalidArgument(
                f"tap is a {type(tap).__name__} that is no part of the model; give one of its modules"
            )
        return tap
    raise InvalidArgument(f"tap must be a module, its name, 'block' or a function; got {type(tap).__name__}")


def _unwrapped(model: Any) -> Any:
    """The module itself, without what spreads it over devices or compiles it."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(model, nn.Module) and "_orig_mod" in model._modules:
            model = model._modules["_orig_mod"]
        else:
            return model


def _arguments(probe: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(probe, Tensor):
        return (probe,), {}
    if isinstance(probe, Mapping) and probe:
        return (), dict(probe)
    if isinstance(probe, tuple | list) and probe:
        return tuple(probe), {}
    raise InvalidArgument(
        f"probe must be a tensor, a tuple of what the model is called with, or a mapping; got {type(probe).__name__}"
    )


def _placed(probe: Any, model: nn.Module) -> Any:
    """The probe where the model is, in its precision."""
    weight = next((part for part in model.parameters() if part.is_floating_point()), None)
    if weight is None:
        return probe

    def move(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        return part.to(weight.device, weight.dtype if part.is_floating_point() else None)

    if isinstance(probe, Mapping):
        return {name: move(part) for name, part in probe.items()}
    return type(probe)(map(move, probe)) if type(probe) in (tuple, list) else move(probe)


def _first_tensor(value: Any) -> Tensor | None:
    """The first tensor of floating numbers in what a module reads or returns, by itself again: models write in place."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.is_floating_point() else None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((found for found in map(_first_tensor, parts) if found is not None), None)


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Buffers that a module changes even while it is evaluated have their values again afterwards."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Modules as they are written: compiled ones would not call the hooks that watch them."""
    compiled = any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in model.modules())
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield

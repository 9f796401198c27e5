"""Somebody's modules while we run them: eval mode and back, calls caught by hooks, devices, full precision, nothing left changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from heedful._errors import InvalidArgument

T = TypeVar("T")
R = TypeVar("R")

# What a hook is told: the module, and what it was called with.
Entered = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
Left = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """No dropout inside; every module in its own mode again afterwards. What is no module has no mode."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    try:
        if any(modes):
            model.eval()
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Eval mode, no gradients, random states kept apart; all of it as before afterwards, also after an exception."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    devices = sorted({parameter.device.index or 0 for parameter in parameters if parameter.is_cuda})
    states = random.getstate(), np.random.get_state()
    # torch's fused encoder layer knows LayerNorm alone.
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        # What overflows is reported by whoever asked.
        with eval_mode(model), torch.random.fork_rng(devices=devices), torch.no_grad(), np.errstate(all="ignore"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def before_calls(modules: Iterable[nn.Module], hook: Entered) -> Iterator[None]:
    """Calls `hook(module, args, kwargs)` before each of these modules runs; what it returns replaces the arguments."""
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def after_calls(modules: Iterable[nn.Module], hook: Left) -> Iterator[None]:
    """Calls `hook(module, args, kwargs, output)` after each of these modules ran; what it returns replaces the output."""
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def seed(number: int, device: torch.device) -> None:
    """Seeds what is drawn on a device. `torch.manual_seed` seeds all kinds there are, and where one was never used it keeps the whole stack
    for a later error: a millisecond a call.

    >>> seed(0, torch.device("cpu"))
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


def device_of(device: str | torch.device) -> torch.device:
    """The device that a parameter `device` names: `"auto"` is CUDA where there is one, else the CPU.

    >>> device_of("cpu")
    device(type='cpu')
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidArgument(f"device must be 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps'; got {device!r}") from None
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (place.index or 0) >= counts.get(place.type, 0):
        raise InvalidArgument(
            f"there is no device {str(place)!r} here; heedful doctor tells what there is, 'auto' chooses"
        )
    return place


def beside_one_another(function: Callable[[T], R], items: Iterable[T], device: torch.device) -> Iterator[R]:
    """`function(item)` of each, in order. On a CPU as many at a time as torch has threads, each in one of its own: threads that share every product wait for one
    another, and where others use the cores too that costs more than it saves.

    >>> list(beside_one_another(lambda x: x * x, range(5), torch.device("cpu")))
    [0, 1, 4, 9, 16]
    """
    left, count = iter(items), torch.get_num_threads() if device.type == "cpu" else 1
    if count == 1:
        yield from map(function, left)
        return
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            while some := list(islice(left, count)):
                yield from pool.map(function, some)
    finally:
        # What a thread says of itself is what later ones begin with.
        torch.set_num_threads(count)


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast has had its say in the dtype of the inputs; inside, sums keep the precision they ask for."""
    kind = device.type
    autocasting = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if autocasting else nullcontext()


def differentiating_forward() -> bool:
    """Whether torch takes derivatives along with results, which kernels without a rule for it cannot give."""
    return forward_ad._current_level >= 0


def transforming() -> bool:
    """Whether that or one of torch.func's transforms runs: neither hooks nor fused kernels see into these."""
    return bool(torch._C._are_functorch_transforms_active()) or differentiating_forward()


def readable(x: Tensor) -> bool:
    """Whether a value may decide a branch: not where it would wait for a device, nor while torch traces or transforms."""
    traced = torch.compiler.is_compiling() or transforming()
    return not traced and x.device.type == "cpu" and type(x) in (Tensor, nn.Parameter)


# Devices on which what follows from the arguments of a call is kept for the next: launching takes longer there than computing. Tests add
# the CPU.
SETTLED: frozenset[str] = frozenset({"cuda"})


def lasting(device: torch.device) -> int | None:
    """The stream on which later calls may read what is made now; None where none may: somebody traces or transforms, or a graph's capture
    makes it for itself alone."""
    if torch.compiler.is_compiling() or transforming():
        return None
    if torch._C._len_torch_dispatch_stack() or device.type not in SETTLED:
        return None
    if device.type != "cuda":
        return 0
    return None if torch.cuda.is_current_stream_capturing() else torch._C._cuda_getCurrentRawStream(device.index)

"""Launches that were made before, made again with other tensors of the same form.

Triton's launcher binds, specialises and looks up its arguments at every call, which takes longer than a short kernel. What was compiled
for a form (shapes, strides, types, alignment) is kept here with its arguments, of which only addresses differ: a later call writes
these in and hands the rest over as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from heedful import _runtime
from heedful.ops.fused._blocks import Terms
from heedful.ops.fused._device import interpreting
from heedful.ops.fused.listing import Name, Sight

MOST = 4096
ALIGNED = 16  # bytes: what a compiled kernel may count on
ROOMS = 256  # bytes between two stretches of scratch memory
MAPS = 64  # addresses whose descriptors are kept
BOUND = 4096  # sets of addresses, of all forms, whose launches are kept as they are: a step of training comes back to those of the last
# Versions of Triton whose launcher in C is called without its wrapper in Python.
KNOWN_LAUNCHERS = ("3.6.",)

Given = Sequence[Tensor | None]


class Room(NamedTuple):
    """A tensor that every call makes anew, scratch memory, which is gone with the call, or one that the call's mask has by a name."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_scratch: bool = False
    name: Name | None = None

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Address:
    """Stands for a tensor where its address alone is asked for."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class Tile(NamedTuple):
    """The place of a descriptor of the copy engine among arguments, and that of its tensor; one descriptor for each address seen."""

    at: int
    slot: int
    make: Callable[[int], Any]
    known: dict[int, Any]

    def of(self, address: int) -> Any:
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= MAPS:
                self.known.clear()
            found = self.known[address] = self.make(address)
        return found


class Launch:
    """A compiled kernel and its arguments, into which addresses are written by the places of their tensors.

    Where this version of Triton is known, its launcher in C is called and descriptors are encoded once; else Triton's own handle.
    """

    def __init__(
        self, compiled: Any, grid: tuple[int, ...], args: Sequence[Any], slot: Callable[[Tensor], int]
    ) -> None:
        # Chips without a copy engine have no descriptors to encode.
        encoded = list(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        described = sum(hasattr(one, "block_shape") for one in args)
        self.is_raw = triton.__version__.startswith(KNOWN_LAUNCHERS) and len(encoded) == described
        self.run: Callable[..., Any]
        self.args: list[Any]
        self.run, self.args = _raw(compiled, grid) if self.is_raw else (compiled[_three(grid)], [])
        self.pointers: list[tuple[int, int]] = []
        self.tiles: list[Tile] = []
        self.terms: list[tuple[int, list[Any], list[tuple[int, int]]]] = []
        for one in args:
            at = len(self.args)
            # No tensor of this call is kept.
            self.args.append(None if isinstance(one, Tensor | Terms) or hasattr(one, "block_shape") else one)
            if hasattr(one, "block_shape"):
                make = _encoder(one, encoded[len(self.tiles)]) if self.is_raw else _describer(one)
                self.tiles.append(Tile(at, slot(one.base), make, {}))
                self.args += (*one.shape, *one.strides) if self.is_raw else ()
            elif isinstance(one, Terms):
                places = [(place, slot(x)) for place, x in enumerate(one) if isinstance(x, Tensor)]
                self.terms.append((at, [None if isinstance(x, Tensor) else x for x in one], places))
            elif isinstance(one, Tensor):
                self.pointers += [(at, slot(one))] if one.numel() else []
                self.args[at] = 0

    def bound(self, addresses: Sequence[int], stream: int) -> Callable[[], Any]:
        """The launch with tensors at these addresses."""
        args = self.args.copy()
        for at, slot in self.pointers:
            args[at] = addresses[slot]
        for tile in self.tiles:
            args[tile.at] = tile.of(addresses[tile.slot])
        for at, values, places in self.terms:
            values = values.copy()
            for place, slot in places:
                values[place] = addresses[slot]
            args[at] = tuple(values)
        if self.is_raw:
            args[STREAM] = stream
            return partial(self.run, *args)
        return partial(self.run, *args, stream=stream)


def _three(grid: tuple[int, ...]) -> tuple[int, ...]:
    return (*grid, 1, 1)[:3]


STREAM = 3  # its place among the arguments of the launcher in C


def _raw(compiled: Any, grid: tuple[int, ...]) -> tuple[Callable[..., Any], list[Any]]:
    """Triton's launcher in C, and its arguments before those of the kernel."""
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        raise TypeError("the kernel needs memory that its wrapper would give it")
    run = launcher.launch
    if inspect.isfunction(run):  # it encodes descriptors before it calls the one in C
        run = inspect.getclosurevars(run).nonlocals["launcher"]
    flags = launcher.launch_cooperative_grid, launcher.launch_pdl
    return run, [*_three(grid), 0, compiled.function, *flags, None, None, compiled.packed_metadata, None, None, None]


def _encoder(descriptor: Any, meta: dict[str, Any]) -> Callable[[int], Any]:
    """From an address to what the copy engine reads."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    if meta["fp4_padded"]:
        raise TypeError("a descriptor of numbers of 4 bit")
    fill = triton.runtime.driver.active.utils.fill_tma_descriptor
    sizes = meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"]
    shape, strides, padding = list(descriptor.shape), list(descriptor.strides), int(descriptor.padding == "nan")
    return lambda address: fill(address, *sizes, shape, strides, padding)


def _describer(descriptor: Any) -> Callable[[int], Any]:
    """From an address to a descriptor in Python."""
    kind, rest = type(descriptor), {name: x for name, x in vars(descriptor).items() if name != "base"}

    def make(address: int) -> Any:
        found = object.__new__(kind)
        found.__dict__.update(rest, base=Address(address))
        return found

    return make


class Recorder:
    """Notes the launches of one call, which is given these tensors; what else they need is made by the call."""

    def __init__(self, given: Given = ()) -> None:
        self.slots = {id(x): slot for slot, x in enumerate(given) if x is not None}
        self.given, self.rooms, self.launches = len(given), list[Room](), list[Launch]()
        self.device = next((x.device for x in given if x is not None), None)
        # One tensor in two places: another call may bring two.
        self.whole = len(self.slots) == sum(x is not None for x in given)
        self._held = [*given]  # so that no other tensor gets an id of these

    def made(self, x: Tensor, *, is_scratch: bool = False) -> Tensor:
        """A tensor that this call has made, contiguous."""
        return self._noted(x, Room(tuple(x.shape), x.dtype, is_scratch))

    def read(self, sight: Sight, name: Name) -> Tensor:
        """A tensor of the mask; that of the next call has it by the same name."""
        x = sight.tensor(name)
        return self._noted(x, Room(tuple(x.shape), x.dtype, name=name))

    def _noted(self, x: Tensor, room: Room) -> Tensor:
        self.slots[id(x)] = self.given + len(self.rooms)
        self.rooms.append(room)
        self._held.append(x)
        return x

    def mark(self) -> tuple[int, int]:
        return len(self.rooms), len(self.launches)

    def back_to(self, mark: tuple[int, int]) -> None:
        """Forgets what came after: the device had no room for it."""
        del self.rooms[mark[0] :], self.launches[mark[1] :]

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        compiled = kernel[grid](*args, **options)
        if not self.whole:
            return
        try:
            self.launches.append(Launch(compiled, grid, args, lambda x: self.slots[id(x)]))
        except (AttributeError, ImportError, KeyError, TypeError):
            # The interpreter compiles nothing, another version launches in another way, or a tensor is of neither kind.
            self.whole = False


def is_watched() -> bool:
    """Whether somebody asks Triton to be told of launches, as its profiler does: then its own launcher makes them."""
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Prepared:
    """The launches of a form."""

    def __init__(self, recorder: Recorder) -> None:
        self.launches = recorder.launches
        self.number = next(NUMBERS)
        self.scratch = 0
        # By the name that the mask has for it, by its place in scratch memory, or by its like: one number in its shape, after which torch
        # makes a tensor sooner than by a list of what it is; itself where it holds nothing.
        self.rooms: list[tuple[Name | None, int, Tensor | None, bool]] = []
        for room in recorder.rooms:
            like, holds = None, room.bytes > 0
            if room.name is None and not room.is_scratch:
                with torch.inference_mode(False):
                    size = (1,) * len(room.shape) if holds else room.shape
                    like = torch.empty(size, dtype=room.dtype, device=recorder.device).expand(room.shape)
            self.rooms.append((room.name, self.scratch, like, holds))
            if room.is_scratch:
                self.scratch += -(-room.bytes // ROOMS) * ROOMS

    is_watched = staticmethod(is_watched)

    def run(self, given: Given, device: torch.device, sight: Sight | None = None) -> list[Tensor]:
        """The tensors that were made, but for scratch memory. `sight` has those of the mask."""
        return self.at([0 if x is None else x.data_ptr() for x in given], device, sight)

    def at(self, addresses: list[int], device: torch.device, sight: Sight | None = None) -> list[Tensor]:
        """The same of given tensors that lie there."""
        made = []
        # Held until all is launched: freed before, it would be given to the tensors that are made next.
        memory = torch.empty(self.scratch, dtype=torch.uint8, device=device) if self.scratch else None
        begin = 0 if memory is None else memory.data_ptr()
        for name, offset, like, holds in self.rooms:
            if name is not None:
                assert sight is not None
                addresses.append(sight.tensor(name).data_ptr())
            elif like is None:
                addresses.append(begin + offset)
            else:
                x = torch.empty_like(like) if holds else like
                made.append(x)
                addresses.append(x.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        key = (self.number, stream, *addresses)
        launches = LAUNCHES.get(key)
        if launches is None:
            launches = [launch.bound(addresses, stream) for launch in self.launches]
            if len(LAUNCHES) >= BOUND:
                LAUNCHES.clear()
            LAUNCHES[key] = launches
        for launch in launches:
            launch()
        return made


KNOWN: dict[Hashable, Prepared] = {}
# By the number of a form, which no other gets when it is gone, the stream and the addresses.
LAUNCHES: dict[tuple[int, ...], list[Callable[[], Any]]] = {}
NUMBERS = count()


def form(tensors: Given, *settings: Hashable) -> Hashable | None:
    """All that a launch depends on beside the numbers; None where it must be looked at anew."""
    found: list[Hashable] = [*settings]
    for x in tensors:
        if x is None:
            found.append(None)
        elif x.data_ptr() % ALIGNED:
            return None
        else:
            found += (x.shape, x.stride(), x.dtype)
    first = tensors[0]
    assert first is not None
    if first.device.index != torch._C._cuda_getDevice():
        return None
    return (first.device.index, *found)


class Launcher:
    """`kernel[grid]` of one call, with numbers by name as kernels are called elsewhere; and what the call makes."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self.recorder, self.device = recorder, device
        self.mark, self.back_to = recorder.mark, recorder.back_to

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32, is_scratch: bool = False) -> Tensor:
        return self.recorder.made(torch.empty(shape, dtype=dtype, device=self.device), is_scratch=is_scratch)

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        if interpreting():
            kernel[grid](*args, **named)
            return
        args = (*args, *[named.pop(name) for name in kernel.arg_names[len(args) :]])
        self.recorder.launch(kernel, grid, *args, **named)


def again(
    given: Given, settings: Sequence[Hashable], anew: Callable[[Launcher], Sequence[Tensor]], *, device: torch.device
) -> Sequence[Tensor]:
    """What `anew(launch)` makes of given tensors: all that `launch.empty` gives but scratch memory, in that order.

    Its launches are kept by the form of the tensors and by `settings`, which hold all else that it depends on. A later call of the
    form makes them without it, by addresses alone; so it may neither copy a tensor nor call an operator of torch.
    """
    form = None
    if device.type in _runtime.SETTLED and not is_watched():
        form, given = _settled(given, settings)
        known = KNOWN.get(form)
        if known is not None:
            return known.run(given, device)
    recorder = Recorder(given)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        made = anew(Launcher(recorder, device))
    if form is not None:
        keep(form, recorder)
    return made


def _settled(given: Given, settings: Sequence[Hashable]) -> tuple[Hashable | None, Given]:
    """The form of these tensors, and each of them once: one that is given in two places is told apart from two that look alike."""
    single = {id(x): x for x in given if x is not None}
    if len(single) + sum([x is None for x in given]) == len(given):
        return form(given, *settings), given
    places = {key: at for at, key in enumerate(single)}
    found = [*single.values()]
    return form(found, *settings, *[None if x is None else places[id(x)] for x in given]), found


def keep(key: Hashable, recorder: Recorder) -> None:
    if recorder.whole and recorder.launches and not torch.cuda.is_current_stream_capturing():
        if len(KNOWN) >= MOST:
            KNOWN.clear()
        KNOWN[key] = Prepared(recorder)

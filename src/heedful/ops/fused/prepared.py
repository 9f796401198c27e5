"""Launches that were made before, made again with other tensors of the same form.

Triton's launcher binds, specialises and looks up its arguments at every call, which takes longer than a short kernel. What was compiled
for a form (shapes, strides, types, alignment) is kept here with the places of its tensors, and a later call fills these in.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from heedful.ops.fused._blocks import Terms

MOST = 4096
ALIGNED = 16  # bytes: what a compiled kernel may count on

# What a place in the list of arguments holds.
FIXED, TENSOR, TILE, TERMS = range(4)


class Place(NamedTuple):
    kind: int
    slot: Any  # which tensor; of terms, the slots by their names
    rest: Any = None  # what never changes


class Launch(NamedTuple):
    run: Any
    places: tuple[Place, ...]


class Room(NamedTuple):
    """A tensor that every call makes anew."""

    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Recorder:
    """Notes the launches of one call, which is given these tensors; what else they need is made by the call."""

    def __init__(self, given: Sequence[Tensor | None] = ()) -> None:
        self.slots = {id(x): slot for slot, x in enumerate(given) if x is not None}
        self.rooms: list[Room] = []
        self.launches: list[Launch] = []
        # One tensor in two places: another call may bring two.
        self.whole = len(self.slots) == sum(x is not None for x in given)
        self._held = [*given]  # so that no other tensor gets an id of these

    def made(self, x: Tensor) -> Tensor:
        """A tensor that this call has made, contiguous."""
        slot = SLOTS + len(self.rooms)
        self.rooms.append(Room(slot, tuple(x.shape), x.dtype))
        self.slots[id(x)] = slot
        self._held.append(x)
        return x

    def mark(self) -> tuple[int, int]:
        return len(self.rooms), len(self.launches)

    def back_to(self, mark: tuple[int, int]) -> None:
        """Forgets what came after: the device had no room for it."""
        del self.rooms[mark[0] :], self.launches[mark[1] :]

    def launch(self, kernel: Any, grid: tuple[int], *args: Any, **options: Any) -> None:
        compiled = kernel[grid](*args, **options)
        try:
            self.launches.append(Launch(compiled[(*grid, 1, 1)], tuple(self._place(one) for one in args)))
        except (KeyError, TypeError, AttributeError):
            self.whole = False  # the interpreter compiles nothing, or a tensor is of neither kind

    def _place(self, one: Any) -> Place:
        if isinstance(one, TensorDescriptor):
            return Place(TILE, self.slots[id(one.base)], {name: x for name, x in vars(one).items() if name != "base"})
        if isinstance(one, Terms):
            found = {name: x for name, x in one._asdict().items() if isinstance(x, Tensor)}
            return Place(TERMS, tuple((name, self.slots[id(x)]) for name, x in found.items()), one)
        if isinstance(one, Tensor) and one.numel():
            return Place(TENSOR, self.slots[id(one)])
        return Place(FIXED, None, one)


SLOTS = 8  # the most tensors that a call is given


class Prepared:
    """The launches of a form."""

    def __init__(self, recorder: Recorder) -> None:
        self.launches = recorder.launches
        self.rooms = recorder.rooms
        self.size = max([SLOTS, *(room.slot + 1 for room in self.rooms)])

    def run(self, given: Sequence[Tensor | None], device: torch.device) -> list[Any]:
        """All tensors by their slots, those that were made among them."""
        tensors = [*given, *(None,) * (self.size - len(given))]
        for slot, shape, dtype in self.rooms:
            tensors[slot] = torch.empty(shape, dtype=dtype, device=device)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        for run, places in self.launches:
            args = []
            for kind, slot, rest in places:
                if kind == TENSOR:
                    args.append(tensors[slot])
                elif kind == TILE:
                    tile = object.__new__(TensorDescriptor)
                    tile.__dict__.update(rest, base=tensors[slot])
                    args.append(tile)
                elif kind == TERMS:
                    args.append(rest._replace(**{name: tensors[at] for name, at in slot}))
                else:
                    args.append(rest)
            run(*args, stream=stream)
        return tensors


KNOWN: dict[Hashable, Prepared] = {}


def form(tensors: Sequence[Tensor | None], *settings: Hashable) -> Hashable | None:
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


def keep(key: Hashable, recorder: Recorder) -> None:
    if recorder.whole and recorder.launches and not torch.cuda.is_current_stream_capturing():
        if len(KNOWN) >= MOST:
            KNOWN.clear()
        KNOWN[key] = Prepared(recorder)

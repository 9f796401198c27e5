"""Kernels in Gluon for Hopper where there is no such chip: torch computes, and warps are threads, one of which runs at a time.

Which warp goes on and when the copy engine is done is drawn. Products of the matrix unit are computed when they are waited for and are
NaN until then. It is an error if no warp can go on, if what the matrix unit or the copy engine still reads is written over, and if either
reads what was stored without a fence. Layouts, registers and the order of memory are the compiler's and the chip's, and not shown here.
"""

from __future__ import annotations

import inspect
import random
import re
import threading
from functools import cache
from types import FunctionType, SimpleNamespace

import torch

from heedful.ops.fused import _hopper, _hopper_backward
from heedful.ops.fused._blocks import Constants

MODULES = {"_hopper": _hopper, "_hopper_backward": _hopper_backward}


class Block(torch.Tensor):
    """A tensor whose layout may be asked for; what it says is of no matter here. What is computed of it is a plain one."""

    type = SimpleNamespace(layout=None)
    __torch_function__ = torch._C._disabled_torch_function_impl


def block(x):
    if not isinstance(x, torch.Tensor):
        x = torch.tensor(x, dtype={bool: torch.bool, int: torch.int32, float: torch.float32}[type(x)])
    return x.as_subclass(Block)


class Pointer:
    """An address of a tensor in global memory."""

    def __init__(self, of, at=0):
        self.of, self.at = of, at

    def __add__(self, more):
        return Pointer(self.of, self.at + more)


class Warps:
    """The warps of one program, one of which runs; what the copy engine has to do is done in between."""

    def __init__(self, program, programs, seed):
        self.program, self.programs, self.draw = program, programs, random.Random(seed)
        self.parts, self.gates, self.waiting, self.engine, self.error = [], [], {}, [], None

    def run(self):
        self.gates = [threading.Semaphore(0) for _ in self.parts]
        self.waiting = dict.fromkeys(range(len(self.parts)), always)
        threads = [threading.Thread(target=self._one, args=(at,), daemon=True) for at in range(len(self.parts))]
        for thread in threads:
            thread.start()
        self._choose()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        assert not self.engine, "the program ends before the copy engine does"

    def _one(self, at):
        LOCAL.warps, LOCAL.at, LOCAL.products, LOCAL.copies, LOCAL.stored = self, at, [], [], []
        self.gates[at].acquire()
        work, args = self.parts[at]
        try:
            if self.error is None:
                work(*args)
                assert not LOCAL.products, "products that nobody waits for"
                assert not LOCAL.copies, "copies that nobody waits for"
        except BaseException as error:
            self.error = self.error or error
        self._choose()

    def pause(self, ready):
        """Goes on when it is this warp's turn, and what it waits for is there."""
        self.waiting[LOCAL.at] = ready
        self._choose()
        self.gates[LOCAL.at].acquire()
        if self.error is not None:
            raise RuntimeError("another warp has failed")

    def _choose(self):
        while self.error is None and (self.waiting or self.engine):
            able = [at for at, ready in self.waiting.items() if ready()]
            if not able and not self.engine:
                self.error = RuntimeError(f"no warp can go on: {sorted(self.waiting)} wait")
                break
            pick = self.draw.randrange(len(able) + len(self.engine))
            if pick < len(able):
                del self.waiting[able[pick]]
                self.gates[able[pick]].release()
                return
            self.engine.pop(pick - len(able))()
        for at in self.waiting if self.error is not None else ():
            self.gates[at].release()


def always():
    return True


LOCAL = threading.local()


class Shared:
    """A view of shared memory."""

    def __init__(self, x, barriers=None):
        self.x, self.barriers, self.dtype = x, barriers, x.dtype

    def index(self, at):
        return Shared(self.x[int(at)], None if self.barriers is None else self.barriers[int(at)])

    def slice(self, start, length, dim=0):
        return Shared(self.x.narrow(dim, start, length))

    def permute(self, order):
        return Shared(self.x.permute(order))

    def shown(self, dtype, shape, layout):
        return Shared(self.x.view(-1).view(dtype).view(shape))

    def load(self, layout=None):
        return block(self.x.clone())

    def store(self, value):
        assert value.dtype == self.dtype, (value.dtype, self.dtype)
        assert value.shape == self.x.shape, (value.shape, self.x.shape)
        self.x.copy_(value)
        LOCAL.stored.append(self.span())

    def span(self):
        first = self.x.data_ptr()
        return first, first + (
            sum((n - 1) * s for n, s in zip(self.x.shape, self.x.stride(), strict=True)) + 1
        ) * self.x.element_size()

    def handed_over(self):
        """What the matrix unit or the copy engine will read; an error if this warp stored it without a fence."""
        low, high = self.span()
        assert not any(a < high and low < b for a, b in LOCAL.stored), "stored without a fence"
        return self.x.clone()


class Barrier:
    def __init__(self):
        self.count = self.left = self.bytes = self.parity = 0

    def arrive(self, count=1):
        assert self.left >= count, "more arrivals than the barrier was made for"
        self.left -= count
        self.complete()

    def complete(self, moved=0):
        self.bytes -= moved
        if self.left == 0 and self.bytes == 0:
            self.left, self.parity = self.count, self.parity ^ 1


class mbarrier:
    MBarrierLayout = staticmethod(lambda: None)

    @staticmethod
    def init(at, count):
        at.barriers.count = at.barriers.left = count

    @staticmethod
    def wait(at, parity):
        parity = int(parity)
        LOCAL.warps.pause(lambda: at.barriers.parity != parity)

    @staticmethod
    def arrive(at, count=1):
        at.barriers.arrive(count)
        LOCAL.warps.pause(always)

    @staticmethod
    def expect(at, count):
        at.barriers.bytes += count
        at.barriers.arrive()


class Described:
    """A plane of global memory that the copy engine reads and writes by tiles; beyond its ends it reads zeros."""

    def __init__(self, descriptor):
        self.plane = torch.as_strided(descriptor.base, descriptor.shape, descriptor.strides)
        self.tile, self.layout = descriptor.block_shape, descriptor.layout
        self.block_type = SimpleNamespace(nbytes=self.tile[0] * self.tile[1] * descriptor.base.element_size())

    def at(self, place):
        row, column = (int(x) for x in place)
        return self.plane[row : row + self.tile[0], column : column + self.tile[1]]


class tma:
    @staticmethod
    def load(desc, place, full, to):
        def work():
            found = desc.at(place)
            to.x.zero_()[: found.shape[0], : found.shape[1]] = found
            full.barriers.complete(desc.block_type.nbytes)

        assert list(to.x.shape) == desc.tile
        LOCAL.warps.engine.append(work)

    @staticmethod
    def store(desc, place, found):
        _outward(desc, place, found, lambda to, x: to.copy_(x))

    @staticmethod
    def add(desc, place, found):
        _outward(desc, place, found, lambda to, x: to.add_(x))

    @staticmethod
    def store_wait(pending):
        for work in LOCAL.copies:
            if work in LOCAL.warps.engine:
                LOCAL.warps.engine.remove(work)
                work()
        LOCAL.copies.clear()


def _outward(desc, place, found, write):
    given = found.handed_over()

    def work():
        assert torch.equal(given.view(torch.uint8), found.x.contiguous().view(torch.uint8)), (
            "written over while it was copied"
        )
        to = desc.at(place)
        write(to, given[: to.shape[0], : to.shape[1]])

    LOCAL.copies.append(work)
    LOCAL.warps.engine.append(work)


def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
    given = [x.handed_over() if isinstance(x, Shared) else x for x in (a, b)]
    out = block(torch.full_like(acc, torch.nan))
    assert given[0].dtype == given[1].dtype == torch.bfloat16

    def work():
        for x, before in zip((a, b), given, strict=True):
            if isinstance(x, Shared):
                assert torch.equal(x.x.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8)), (
                    "written over while it was multiplied"
                )
        product = given[0].float() @ given[1].float()
        out.copy_(acc + product if use_acc else product)

    LOCAL.products.append(work)
    LOCAL.warps.pause(always)
    return out


def warpgroup_mma_wait(pending, deps):
    while len(LOCAL.products) > pending:
        LOCAL.products.pop(0)()
    return deps if len(deps) > 1 else deps[0]


def fence_async_shared():
    LOCAL.stored.clear()


# Assembly, as far as the kernels have it: registers hold 32 bits.
def _of_numbers(work):
    return lambda *bits: work(*(x.view(torch.float32) for x in bits)).view(torch.int32)


def _halves(high, low):
    high, low = (x.view(torch.float32).bfloat16().view(torch.int16).int() for x in (high, low))
    return (high << 16) | (low & 0xFFFF)


WORDS = {
    "neg.f32": _of_numbers(torch.neg),
    "add.f32": _of_numbers(torch.add),
    "mul.f32": _of_numbers(torch.mul),
    "max.NaN.f32": _of_numbers(torch.maximum),
    "fma.rn.f32": _of_numbers(lambda x, y, z: x * y + z),
    "ex2.approx.ftz.f32": _of_numbers(torch.exp2),
    "rcp.approx.ftz.f32": _of_numbers(torch.reciprocal),
    "tanh.approx.f32": _of_numbers(torch.tanh),
    "mov.f32": lambda x: x,
    "mov.b32": lambda x: x,
    "shl.b32": lambda x, by: x << by,
    "and.b32": lambda x, y: x & y,
    "cvt.rn.bf16x2.f32": _halves,
}


def _constant(word):
    bits = int(word[2:], 16) if word.startswith("0f") else int(word, 0)
    return torch.tensor(bits, dtype=torch.int64).int()


@cache
def _lines(asm):
    lines = [line.strip() for line in asm.strip().strip("{}").split(";")]
    return [
        (line.split()[0], re.split(r",\s*", line.split(None, 1)[1]))
        for line in lines
        if line and not line.startswith(".reg")
    ]


def _packed(x, pack):
    """The numbers of a thread of a warpgroup, `pack` at a time: pairs of a row, the row eight below, then eight columns on."""
    if pack <= 2:  # of any layout
        return x.reshape(-1, pack)
    tall = x.view(-1, 2, 8, x.shape[1] // 8, 4, 2)  # warp, half, row, columns, lane, pair
    return tall.permute(0, 2, 4, 3, 1, 5).reshape(-1, pack)


def _unpacked(x, shape):
    if x.shape[-1] <= 2:
        return x.reshape(shape)
    tall = x.reshape(-1, 8, 4, shape[1] // 8, 2, 2)
    return tall.permute(0, 4, 1, 3, 2, 5).reshape(shape)


def _words(columns):
    """The registers of columns of numbers: of two bytes each, two share one."""
    found = [column.contiguous() for column in columns.unbind(-1)]
    if columns.dtype == torch.bfloat16:
        return [_halves(high.float(), low.float()) for low, high in zip(found[::2], found[1::2], strict=True)]
    return found


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    first = sum(kind.startswith("=") for kind in constraints.split(","))
    given = (word for x in args for word in _words(_packed(torch.Tensor(x), pack)))
    registers = {f"${at}": x.view(torch.int32) for at, x in enumerate(given, first)}
    for word, (to, *sources) in _lines(asm):
        registers[to] = WORDS[word](*(registers[x] if x in registers else _constant(x) for x in sources))
    results, outputs = [], iter([registers[f"${at}"] for at in range(first)])
    for kind in dtypes:
        if kind == torch.bfloat16:
            words = [next(outputs) for _ in range(pack // 2)]
            numbers = [x.to(torch.int16).view(kind) for word in words for x in (word << 16 >> 16, word >> 16)]
        else:
            numbers = [next(outputs).view(kind) for _ in range(pack)]
        results.append(block(_unpacked(torch.stack(numbers, -1), args[0].shape)))
    return tuple(results) if isinstance(dtype, tuple) else results[0]


def _where(keep, x, y):
    return block(torch.where(block(keep), block(x), block(y)))


def _load(pointer):
    return block(pointer.of.reshape(-1)[torch.as_tensor(pointer.at).long()])


def _store(pointer, value, mask=None):
    at, value = torch.as_tensor(pointer.at).long(), torch.as_tensor(value)
    if mask is not None:
        at, value = at[mask], value[mask]
    pointer.of.view(-1)[at] = value.to(pointer.of.dtype)


def _atomic_add(pointer, value, mask, sem=None):
    """The number before, of one lane; others get one that means nothing."""
    found = block(torch.full(mask.shape, -7, dtype=pointer.of.dtype))
    at = Pointer(pointer.of, pointer.at[mask])
    found[mask] = _load(at).clone()
    _store(at, found[mask] + value[mask])
    return found


def _allocate(dtype, shape, layout):
    if dtype == torch.int64:
        return Shared(torch.zeros(shape, dtype=dtype), [Barrier() for _ in range(shape[0])])
    return Shared(torch.full(shape, torch.nan if dtype.is_floating_point else -7, dtype=dtype))


def _layout(*args):
    return None


_layout.get_default_for = _layout

gl = SimpleNamespace(
    constexpr=lambda x: x, bfloat16=torch.bfloat16, float32=torch.float32, int32=torch.int32, int64=torch.int64,
    BlockedLayout=_layout, SliceLayout=_layout, DotOperandLayout=_layout, NVMMADistributedLayout=_layout, NVMMASharedLayout=_layout, SwizzledSharedLayout=_layout,
    program_id=lambda axis: block(LOCAL.warps.program), num_programs=lambda axis: block(LOCAL.warps.programs),
    arange=lambda start, end, layout=None: block(torch.arange(start, end, dtype=torch.int32)),
    zeros=lambda shape, dtype, layout=None: block(torch.zeros(shape, dtype=dtype)),
    full=lambda shape, value, dtype, layout=None: block(torch.full(shape, value, dtype=dtype)),
    to_tensor=block, cdiv=lambda x, y: -(-x // y), static_range=range,
    where=_where, minimum=lambda x, y, propagate_nan=None: torch.minimum(block(x), block(y)),
    maximum=lambda x, y, propagate_nan=None: torch.maximum(block(x), block(y)),
    abs=torch.abs, exp2=torch.exp2, log2=torch.log2, sum=lambda x, axis: x.sum(axis), max=lambda x, axis: x.amax(axis),
    reshape=lambda x, shape: block(x.reshape(shape)),
    convert_layout=lambda x, layout: x,
    load=_load, store=_store, atomic_add=_atomic_add, allocate_shared_memory=_allocate, inline_asm_elementwise=inline_asm_elementwise,
    warp_specialize=lambda parts, warps, registers: LOCAL.warps.parts.extend(parts),
)  # fmt: skip
STANDS_FOR = {
    "gl": gl, "mbarrier": mbarrier, "tma": tma, "warpgroup_mma": warpgroup_mma, "warpgroup_mma_wait": warpgroup_mma_wait,
    "hopper": SimpleNamespace(fence_async_shared=fence_async_shared), "load": tma.load, "store": tma.store, "add": tma.add, "shown": Shared.shown,
    "gdc_launch_dependents": lambda: None, "gdc_wait": lambda: None,
}  # fmt: skip


@cache
def named(module):
    """What a module of kernels has, with this chip's words in place of Gluon's."""
    names = dict(vars(MODULES[module]))
    for name, x in vars(MODULES[module]).items():
        if inspect.isfunction(getattr(x, "fn", None)):
            home = x.fn.__module__.rsplit(".", 1)[-1]
            names[name] = FunctionType(x.fn.__code__, named(home) if home != module else names, name)
        elif hasattr(x, "value") and type(x).__name__ == "constexpr":
            names[name] = x.value
    names.update({name: x for name, x in STANDS_FOR.items() if name in names})
    return names


def launch(kernel, grid, *args, seed=0, **options):
    """Runs every program of a kernel, one after the other."""
    module = kernel.fn.__module__.rsplit(".", 1)[-1]
    work = named(module)[kernel.fn.__name__]

    def given(x):
        if isinstance(x, Constants):
            return x.spec
        if hasattr(x, "block_shape"):
            return Described(x)
        return Pointer(x) if isinstance(x, torch.Tensor) else x

    for program in range(grid[0]):
        LOCAL.warps, LOCAL.stored = Warps(program, grid[0], f"{seed} {program}"), []
        work(*map(given, args))
        LOCAL.warps.run()

"""Facts about this installation, its chips, and the launch settings measured on them, in forms that Dynamo can trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from heedful._runtime import transforming

T = TypeVar("T")
S = TypeVar("S")

# Looked up when heedful is imported, without importing triton: the search for a module cannot be traced.
HAS_TRITON = find_spec("triton") is not None

ROOMY = 160 * 1024
"""Bytes of shared memory that a multiprocessor of a data-centre chip has at least."""


class Chip(NamedTuple):
    """Compute capability, multiprocessors, and the bytes of shared memory of each."""

    major: int
    processors: int
    shared: int


def chip(device: torch.device) -> Chip:
    """What a CUDA device is: torch knows it without asking the device, and Dynamo as a constant (it traces no cache)."""
    facts = torch.cuda.get_device_properties(device)
    return Chip(facts.major, facts.multi_processor_count, getattr(facts, "shared_memory_per_multiprocessor", ROOMY))


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unable(x: Tensor) -> str | None:
    """Why fused kernels cannot serve this tensor here, whatever the kernel."""
    if transforming():
        return "torch.func's transforms and forward-mode differentiation do not see into fused kernels"
    if not HAS_TRITON:
        return "triton is not installed"
    if x.dtype == torch.float64:
        return "fused kernels compute in float32 and 16 bit"
    if x.device.type == "cuda":
        return None if chip(x.device).major >= 8 else "fused kernels need a GPU of compute capability 8.0 or newer"
    if not interpreting():
        return f"fused kernels run on CUDA devices; these tensors are on {x.device.type}"
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return "triton's interpreter serves float32 on CPU alone"
    return None


def able(x: Tensor, devices: frozenset[str]) -> bool:
    """Whether fused kernels take this tensor on one of these devices: its type and its chip, and no transform runs."""
    if not HAS_TRITON or x.device.type not in devices or x.dtype == torch.float64 or x.numel() == 0:
        return False
    old = x.device.type == "cuda" and chip(x.device).major < 8
    return not old and not transforming()


def current(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: that of this tensor."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def power_of_2(size: int) -> int:
    """The power of two that holds a size; products of fewer than 16 columns are not made."""
    return max(16, 1 << (size - 1).bit_length())


def unit_stride(x: Tensor) -> Tensor:
    """With its last axis contiguous, as the kernels read it."""
    return x if x.stride(-1) == 1 else x.contiguous()


FITS: dict[tuple[Any, ...], int] = {}
"""How many settings were too large for the device, by what was to be launched."""


def fitting(key: tuple[Any, ...], settings: Sequence[S], launch: Callable[[S], T]) -> T:
    """Launches with the first setting that the device has room for, and remembers which one that was."""
    import triton

    for n in range(FITS.get(key, 0), len(settings)):
        try:
            result = launch(settings[n])
        except triton.runtime.errors.OutOfResources:
            if n + 1 == len(settings):
                raise
        else:
            FITS[key] = n
            return result
    raise AssertionError("the last one was tried")


class approximate(AbstractContextManager[None]):
    """Whether sigmoids in 16 bit may take the hardware's hyperbolic tangent, as they do by default; a context or a setting.

    It is off by about 2^-21 where a coefficient is small. A block of rows takes it where the bias is at least -8.5 and the mean of its
    coefficients at least 2^-13: its error is then below that of their rounding to 16 bit. All others are computed by the exact formula,
    as everything is with `approximate(False)`.

    >>> with approximate(False):
    ...     approximate.allowed
    False
    """

    allowed = True

    def __init__(self, allowed: bool) -> None:
        self.before, approximate.allowed = approximate.allowed, allowed

    def __exit__(self, *fault: object) -> None:
        approximate.allowed = self.before


class Setting(NamedTuple):
    """Rows and columns of a block, stages of the pipeline, warps, and the most registers of a thread."""

    rows: int
    cols: int
    stages: int
    warps: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """As Triton takes them at launch."""
        return {"num_warps": self.warps} | ({"maxnreg": self.registers} if self.registers else {})


# For bfloat16 on an H200, the fastest of those tried there (4 x 16 heads of 4,096 tokens): head sizes up to 64, the same under a mask,
# head sizes up to 128, the same under a mask.
SETTINGS: dict[str, dict[str, tuple[Setting, Setting, Setting, Setting]]] = {
    "forward": {
        "sigmoid": (Setting(64, 128, 2, 4), Setting(64, 64, 2, 4, 128), Setting(64, 64, 3, 4), Setting(64, 64, 3, 4)),
        "exp": (Setting(64, 128, 2, 4), Setting(64, 64, 2, 4, 128), Setting(64, 64, 3, 4), Setting(64, 64, 3, 4)),
        "gaussian": (Setting(64, 64, 2, 4, 128), Setting(64, 64, 2, 4, 128), Setting(128, 64, 3, 8), Setting(128, 64, 3, 8)),
        "softmax": (Setting(64, 128, 2, 4), Setting(64, 64, 2, 4, 128), Setting(64, 64, 3, 4), Setting(64, 64, 3, 4)),
        "others": (Setting(128, 64, 3, 8), Setting(64, 64, 3, 4), Setting(128, 64, 3, 8), Setting(64, 64, 3, 4)),
    },
    "rows": {
        "sigmoid": (Setting(64, 64, 2, 4), Setting(64, 64, 2, 4, 128), Setting(128, 64, 3, 8), Setting(128, 64, 3, 8)),
        "exp": (Setting(128, 64, 3, 8, 128), Setting(64, 64, 3, 4, 168), Setting(128, 64, 3, 8), Setting(128, 64, 3, 8)),
        "gaussian": (Setting(64, 64, 2, 4, 128), Setting(64, 64, 2, 4, 128), Setting(128, 64, 3, 8), Setting(128, 64, 3, 8)),
        "softmax": (Setting(128, 64, 3, 8), Setting(64, 64, 2, 4, 168), Setting(128, 64, 3, 8), Setting(128, 64, 3, 8)),
        "others": (Setting(128, 64, 3, 8, 128), Setting(128, 64, 3, 8), Setting(128, 64, 3, 8), Setting(128, 64, 3, 8)),
    },
    "columns": {
        "sigmoid": (Setting(64, 64, 3, 4, 168), Setting(64, 64, 2, 4, 168), Setting(64, 128, 3, 8), Setting(64, 64, 2, 4)),
        "exp": (Setting(64, 64, 3, 4, 168), Setting(64, 64, 2, 4, 168), Setting(64, 64, 2, 4), Setting(64, 64, 2, 4)),
        "gaussian": (Setting(128, 64, 2, 4), Setting(128, 64, 2, 4), Setting(64, 64, 2, 4), Setting(64, 64, 2, 4)),
        "softmax": (Setting(64, 64, 3, 4, 168), Setting(64, 64, 3, 4, 168), Setting(64, 64, 2, 4), Setting(64, 64, 2, 4)),
        "others": (Setting(64, 64, 3, 4, 168), Setting(64, 64, 3, 4, 168), Setting(64, 64, 2, 4), Setting(64, 128, 3, 8)),
    },
}  # fmt: skip
# Head sizes up to 32 without a mask, and above 128, whatever the kernel.
NARROW = {"forward": Setting(64, 128, 3, 4), "rows": Setting(64, 64, 3, 4), "columns": Setting(64, 64, 3, 4, 128)}
WIDE = {"forward": Setting(128, 64, 2, 8), "rows": Setting(128, 32, 2, 8), "columns": Setting(32, 64, 2, 8)}

# What is tried last, where a chip has no room for what was measured.
SMALL = (Setting(32, 32, 1, 4), Setting(16, 16, 1, 4))


def settings(kind: str, dtype: torch.dtype, size: int, name: str, masked: bool) -> list[Setting]:
    """What to try for a head size, the fastest first: what fits one device's shared memory may not fit another's."""
    if interpreting():
        return [
            {"forward": Setting(32, 16, 1, 4), "rows": Setting(16, 32, 1, 4), "columns": Setting(32, 16, 1, 4)}[kind]
        ]
    if dtype == torch.float32:
        best = Setting(64, 64, 2, 4) if kind == "columns" else Setting(128, 64, 2, 8)
        return [best, Setting(64, 32, 2, 4), *SMALL] if size <= 64 else [Setting(32, 32, 2, 4), *SMALL]
    if size > 128:
        return [WIDE[kind], Setting(64, 32, 2, 4), *SMALL]
    best = SETTINGS[kind].get(name, SETTINGS[kind]["others"])[2 * (size > 64) + masked]
    best = NARROW[kind] if size <= 32 and not masked else best
    return [best, best._replace(stages=1), Setting(64, 32, 1, 4), *SMALL]


class PrimalSetting(NamedTuple):
    """Tokens of a block, warps, programs for each multiprocessor, stages of the loop, the most registers of a thread."""

    rows: int
    warps: int
    programs: int
    stages: int
    registers: int | None = None


# Forward and backward: 16 bit, the same for heads or outputs wider than 64, and float32.
PRIMAL = {
    "halves": (PrimalSetting(64, 4, 2, 4), PrimalSetting(64, 4, 3, 3, 168)),
    "wide": (PrimalSetting(64, 8, 1, 2), PrimalSetting(64, 8, 1, 2)),
    "single": (PrimalSetting(32, 4, 2, 2), PrimalSetting(32, 8, 1, 2)),
}


def primal_settings(dtype: torch.dtype, size: int, backward: bool) -> list[PrimalSetting]:
    """What to try for Primal-Attention, the fastest first."""
    name = "single" if dtype == torch.float32 else "wide" if size > 64 else "halves"
    return [PRIMAL[name][backward], PrimalSetting(32, 4, 1, 2), PrimalSetting(16, 4, 1, 1)]


class Tiles(NamedTuple):
    """How a kernel is cut: rows of a block, blocks of a span, columns of a tile of the memory `[F, E]`."""

    rows: int
    blocks: int
    features: int
    width: int
    warps: int
    stages: int


def tiles(
    role: str, features: int, width: int, heads: int, length: int, dot: torch.dtype, exact: bool, interpreted: bool
) -> Tiles:
    """The launch settings of one of the roles "states", "outputs", "queries", "keys" and "values", or "both" of these."""
    whole_f, whole_e = power_of_2(features), power_of_2(width)
    if interpreted:
        cut_f = cut_e = 64
        rows, blocks, warps, stages = 16, 2, 4, 1
    else:
        small = max(whole_f, whole_e) <= 64
        rows, warps, stages, held = 64, 4 if small else 8, 2, 64 * 128
        if dot == torch.float32:
            # Products of float32 are unrolled where there are no tensor cores for them: more warps and fewer rows.
            rows, warps, stages, held = 16 if exact else 32, 8, 1, 64 * 64
        elif max(whole_f, whole_e) > 128:
            rows, stages = 32, 1
        # As many programs as keep the device busy, and as few as keep states few: a power of two, each is compiled.
        blocks = min(1024 // rows, _power_below(heads * -(-length // rows) // 1024))
        cut_f, cut_e = (64, 64) if role == "states" else (max(16, held // whole_e), max(16, held // whole_f))
    cut_f, cut_e = min(cut_f, whole_f), min(cut_e, whole_e)
    if role in ("outputs", "values", "both"):
        cut_f = whole_f
    if role in ("queries", "keys", "both"):
        cut_e = whole_e
    return Tiles(rows, blocks, cut_f, cut_e, warps, stages)


def _power_below(size: int) -> int:
    return 1 << (max(1, size).bit_length() - 1)

"""What f is tried on: numbers that models see, and those that tests forget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from heedful._checks import is_whole
from heedful._errors import InvalidArgument

if TYPE_CHECKING:
    from heedful.lens.symmetry.settings import CheckSettings

Sample = Tensor | tuple[Tensor, Tensor]
Sampler = Callable[[torch.Generator, int], Sample] | Sequence[Sample]

NORMAL, TINY, LARGE, WHOLE, EQUAL, GIVEN = (
    "standard normal", "scaled by 0.001", "scaled by 1000", "whole numbers", "with equal rows", "given",
)  # fmt: skip

# Half of the inputs are standard normal; the others take turns.
ORDER = (NORMAL, TINY, NORMAL, LARGE, NORMAL, WHOLE, NORMAL, EQUAL)


class Input(NamedTuple):
    """X and Z in float64, and how they were drawn."""

    x: Tensor
    z: Tensor | None
    kind: str


def inputs(settings: CheckSettings, generator: torch.Generator, least: int) -> Iterator[Input]:
    """Inputs without end; the length changes with every second one, and each length meets each kind."""
    lengths, sampler, d = check_tokens(settings.n, least), settings.sampler, settings.d
    if sampler is not None and not callable(sampler) and not len(sampler):
        raise InvalidArgument("the sampler holds no inputs; give at least one X [n, d] or (X, Z), or a function")
    at = 0
    while True:
        pair, length = at // 2, lengths[at // 2 % len(lengths)]
        turn = pair + (pair // len(lengths) if len(lengths) > 1 else 0)
        if sampler is None:
            yield random_input(ORDER[turn % len(ORDER)], length, d, settings.k, generator)
        else:
            yield _checked(sampler(generator, length) if callable(sampler) else sampler[at % len(sampler)], d)
        at += 1


def random_input(kind: str, n: int, d: int, k: int, generator: torch.Generator) -> Input:
    """An input of a kind; a single token cannot have equal rows, and is standard normal instead."""
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    z = torch.randn(k, d, generator=generator, dtype=torch.float64) if k else None
    if kind == EQUAL and n == 1:
        kind = NORMAL
    if kind == EQUAL:
        x[-1] = x[0]
        return Input(x, z, kind)
    act = {TINY: lambda t: t * 1e-3, LARGE: lambda t: t * 1e3, WHOLE: lambda t: (2 * t).round() + 0.0}.get(kind)
    return Input(x, z, kind) if act is None else Input(act(x), None if z is None else act(z), kind)


def _checked(sample: Sample, d: int) -> Input:
    parts = [torch.as_tensor(p).to("cpu", torch.float64) for p in (sample if isinstance(sample, tuple) else (sample,))]
    for name, rows in zip("XZ", parts, strict=False):
        if rows.dim() != 2 or rows.shape[-1] != d:
            raise InvalidArgument(f"the sampler gave {name} of shape {tuple(rows.shape)}, expected (rows, {d})")
    return Input(parts[0], parts[1] if len(parts) > 1 else None, GIVEN)


def check_tokens(n: int | Sequence[int], least: int) -> list[int]:
    """The numbers of tokens to go through, refused where one is too small."""
    lengths = [n] if isinstance(n, int) else list(n)
    if not lengths or not all(is_whole(length) and length >= least for length in lengths):
        raise InvalidArgument(f"n must hold numbers of tokens from {least} on; got {n}")
    return lengths

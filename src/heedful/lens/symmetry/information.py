"""Does f take sequences of any length with the same parameters?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from heedful._checks import check_whole
from heedful._errors import HeedfulError, InvalidArgument
from heedful._result import Result
from heedful._runtime import undisturbed
from heedful.lens.symmetry._report import SymmetryBroken
from heedful.lens.symmetry.callee import Callee, Function

LENGTHS = (1, 2, 3, 7, 32, 129)


@dataclass(frozen=True)
class InformationReport(Result):
    """Whether the number of parameters is independent of the length.

    Attributes:
        accepted: the lengths that ran (or were made, for a factory); `refused`: the others with what they raised.
        limit: the largest length that runs, where none above was seen to run.
        tensors: parameters and buffers that grow with the length, with their shapes.
    """

    name: str
    accepted: tuple[int, ...]
    refused: dict[int, str]
    limit: int | None
    tensors: dict[str, tuple[int, ...]]

    _also = ("passed",)

    @property
    def passed(self) -> bool:
        """Every length runs, and no tensor was found to be tied to the length."""
        return not self.refused and not self.tensors

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        if self.passed:
            return f"{self.name}: length independence HOLDS for n = {', '.join(map(str, self.accepted))}"
        limit = ""
        if self.limit is not None:
            limit = f", n = {self.limit} is the most it takes"
        elif self.refused:
            ran, not_ran = (", ".join(map(str, sorted(lengths))) for lengths in (self.accepted, self.refused))
            limit = f", runs for n = {ran}, not for n = {not_ran}"
        grows = ", ".join(f"{name} {shape}" for name, shape in self.tensors.items())
        return f"{self.name}: length independence BROKEN{limit}{f'; tied to the length: {grows}' if grows else ''}"

    def raise_if_failed(self) -> None:
        """Raises `SymmetryBroken` unless the check passed."""
        if not self.passed:
            raise SymmetryBroken(str(self))

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(f"  n = {n}: {why}" for n, why in self.refused.items())])


def check_finite_information(
    f: Function | Callable[[int], nn.Module],
    *,
    d: int,
    k: int = 0,
    lengths: Sequence[int] = LENGTHS,
    factory: bool = False,
    dtype: torch.dtype | None = None,
    batched: bool | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> InformationReport:
    """Tests the finite information principle: parameters do not depend on the length (Ma & Ying 2023, Assumption 3.1).

    A function or module must run for every length; where one is refused, the exact limit is searched, and parameters and
    buffers that have it as a size are named. Where all run and a tensor has the largest as a size, one more token tells
    whether that is chance. A factory n -> module is asked for modules of two lengths, and the tensors whose
    shapes differ are named. Tables that happen to be longer than all `lengths` are not found: give longer ones.

    Args:
        f: as in `check_equivariance`, or with `factory=True` a function that makes a module for a length.
        lengths: what to try, ascending.

    >>> import torch
    >>> check_finite_information(torch.nn.MultiheadAttention(6, 2), d=6).passed
    True
    >>> print(check_finite_information(lambda n: torch.nn.Linear(n, n), d=6, factory=True))
    <lambda>: length independence BROKEN; tied to the length: weight (129, 129), bias (129,)
    """
    check_whole(d=d)
    check_whole(0, k=k)
    lengths = sorted(set(lengths))
    if not lengths or lengths[0] < 1:
        raise InvalidArgument(f"lengths must hold positive numbers of tokens; got {lengths}")
    if factory:
        return _compare(f, lengths[0], lengths[-1])
    callee = Callee(f, dtype=dtype, batched=batched, arguments=arguments)
    z = torch.ones(k, d, dtype=torch.float64) if k else None

    def refusal(n: int) -> str | None:
        try:
            callee(torch.ones(n, d, dtype=torch.float64), z)
        except HeedfulError as error:
            return str(error.__cause__ or error).strip().split("\n")[0][:160]
        return None

    with undisturbed(f):
        answers = {n: refusal(n) for n in lengths}
        refused = {n: why for n, why in answers.items() if why is not None}
        accepted = tuple(n for n in lengths if n not in refused)
        if not accepted:
            raise InvalidArgument(f"{callee.name} runs for no length: {next(iter(refused.values()))}")
        limit = None
        low = accepted[-1]
        above = [n for n in refused if n > low]
        if above:
            high = above[0]
            while high - low > 1:
                middle = (low + high) // 2
                answers[middle] = refusal(middle)
                low, high = (middle, high) if answers[middle] is None else (low, middle)
            # What takes even lengths alone, say, has no limit.
            answers |= {n: refusal(n) for n in (low + 2, low + 3) if n not in answers}
            if all((why is None) == (n <= low) for n, why in answers.items()):
                limit = low
            else:
                refused = {n: why for n, why in sorted(answers.items()) if why is not None}
                accepted = tuple(sorted(answers.keys() - refused.keys()))
        # One more token tells a table from a size that is the length by chance.
        tied = limit is not None or (not refused and refusal(low + 1) is not None)
    return InformationReport(callee.name, accepted, refused, limit, _as_long_as(f, low) if tied else {})


def _as_long_as(f: Any, length: int) -> dict[str, tuple[int, ...]]:
    """Tensors with a size equal to the length."""
    if not isinstance(f, nn.Module):
        return {}
    named = [*f.named_parameters(), *f.named_buffers()]
    return {name: tuple(tensor.shape) for name, tensor in named if length in tensor.shape}


def _compare(factory: Callable[[int], Any], short: int, long: int) -> InformationReport:
    name = getattr(factory, "__name__", type(factory).__name__)
    shapes = []
    for n in (short, long):
        module = factory(n)
        if not isinstance(module, nn.Module):
            raise InvalidArgument(f"{name}({n}) must return a module; got {type(module).__name__}")
        shapes.append({key: tuple(t.shape) for key, t in [*module.named_parameters(), *module.named_buffers()]})
    grows = {key: shape for key, shape in shapes[1].items() if shapes[0].get(key) != shape}
    return InformationReport(name, (short, long), {}, None, grows)

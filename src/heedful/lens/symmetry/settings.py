"""What a check of a symmetry is run with: one set of settings for every check, `audit` and the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful.lens.symmetry._inputs import Sampler, check_tokens
from heedful.lens.symmetry._trial import OUTPUTS, Output


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """How a symmetry is tested, checked when it is made; `check_equivariance` says what each setting does."""

    d: int
    n: int | Sequence[int] = (2, 3, 5, 9)
    k: int = 0
    output: Output = "rows"
    invariant: bool = False
    trials: int = 200
    sampler: Sampler | None = None
    tol: float | Literal["auto"] = "auto"
    dtype: torch.dtype | None = None
    batched: bool | None = None
    arguments: Mapping[str, Any] | None = None
    seed: int = 0
    shrinking: bool = True

    def __post_init__(self) -> None:
        check_whole(d=self.d, trials=self.trials)
        check_whole(0, k=self.k)
        check_tokens(self.n, 1)
        if self.tol != "auto":
            check_number(least=0, tol=self.tol)
        if not callable(self.output):
            check_choice(OUTPUTS, output=self.output)
        if self.invariant and self.output not in ("rows", "scalar"):
            raise InvalidArgument(f"invariant=True means output='scalar'; got output={self.output!r} as well: give one")
        if self.invariant:
            object.__setattr__(self, "output", "scalar")

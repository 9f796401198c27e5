"""All symmetries of one function as one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from textwrap import wrap
from typing import Any, Literal, cast

import torch

from heedful._errors import HeedfulError, InvalidArgument, Unsupported
from heedful._plot import Axes, axes
from heedful._result import Result
from heedful._settings import documented
from heedful.lens.symmetry._report import Report, SymmetryBroken
from heedful.lens.symmetry.callee import Function, Roles
from heedful.lens.symmetry.equivariance import embedding, position
from heedful.lens.symmetry.information import InformationReport, check_finite_information
from heedful.lens.symmetry.moves import GROUPS, Group
from heedful.lens.symmetry.roles import known_roles
from heedful.lens.symmetry.settings import CheckSettings

CHECKS = (*GROUPS, "position", "length")
WITH_PARAMETERS = "O with its parameters"


@dataclass(frozen=True)
class Audit(Result):
    """The reports by check, `O with its parameters` among them, and why others did not apply."""

    name: str
    d: int
    k: int
    output: str
    reports: dict[str, Report | InformationReport] = field(repr=False)
    refused: dict[str, str]

    _also = ("passed", "weak", "conclusion")

    @property
    def passed(self) -> bool:
        """Whether every check that was run passed, and none was refused."""
        return not self.refused and all(report.passed for report in self.reports.values())

    @property
    def conclusion(self) -> str:
        """What the embedding and position symmetries mean together."""
        embedding, position = self._holds("O"), self._holds("position")
        if self.output != "rows" or "O" not in self.reports or "position" not in self.reports:
            return ""
        weak = [check for check in ("O", WITH_PARAMETERS, "position") if check in self.weak]
        if weak:
            return f"nothing is concluded, for rounding may hide what breaks the symmetry: weak are {', '.join(weak)}"
        vectors = "tokens and knowledge" if self.k else "tokens"
        ending = ": a form of attention (Prop. 3.2)" if position else ", but the order of tokens matters"
        if embedding:
            return f"f is a combination of {vectors} whose coefficients depend on inner products alone{ending}"
        if self._holds(WITH_PARAMETERS):
            return (
                f"f keeps no embedding symmetry by itself; with its parameters as knowledge it has all of O(d){ending}"
            )
        if position:
            return "f treats tokens alike, but its coordinates mean something: they cannot be turned by themselves"
        return ""

    @property
    def weak(self) -> tuple[str, ...]:
        """The checks that hold within a tolerance too wide to conclude from."""
        return tuple(check for check, report in self.reports.items() if isinstance(report, Report) and report.weak)

    def _holds(self, check: str) -> bool:
        return check in self.reports and self.reports[check].passed

    def raise_if_failed(self) -> None:
        """Raises `SymmetryBroken` with the reports that failed."""
        failed = [str(report) for report in self.reports.values() if not report.passed]
        if failed or self.refused:
            raise SymmetryBroken("\n".join([*failed, *(f"{check}: {why}" for check, why in self.refused.items())]))

    def plot(self, ax: Axes | None = None) -> Axes:
        """The largest error of each check on a logarithmic scale; bars end at 10, with what they stand for beside them."""
        ax = axes(ax)
        shown = {check: r for check, r in reversed(self.reports.items()) if isinstance(r, Report)}
        sizes = [min(max(r.largest, 1e-18), 10.0) for r in shown.values()]
        colors = ["tab:blue" if r.passed else "tab:orange" for r in shown.values()]
        bars = ax.barh([f"{check} ({r.outcome})" for check, r in shown.items()], sizes, color=colors)
        labels = [
            "" if r.largest <= 10 else f"{r.largest:.2g}" if isfinite(r.largest) else "not finite"
            for r in shown.values()
        ]
        ax.bar_label(bars, labels)
        ax.set(xscale="log", xlabel="largest relative error", title=f"Symmetries of {self.name}")
        return ax

    def __str__(self) -> str:
        sizes = f"d = {self.d}" + (f", k = {self.k}" if self.k else "")
        lines = [
            f"symmetries of {self.name} ({sizes})",
            "  symmetry   group                    verdict   failed   largest error  at most",
        ]
        for check, report in self.reports.items():
            if isinstance(report, InformationReport):
                outcome = "any tried" if report.passed else report.verdict.split("BROKEN")[1].lstrip(",; ")
                lines.append(f"  {'length':<10} {'':<24} {'holds' if report.passed else 'BROKEN':<9} {outcome}")
                continue
            verdict = "BROKEN" if report.outcome == "broken" else report.outcome
            name = check if report.symmetry == "embedding" else report.group
            failed = f"{report.failures}/{report.trials}"
            lines.append(
                f"  {report.symmetry:<10} {name:<24} {verdict:<9} {failed:<8} {report.largest:<14.2g} {report.bound:.2%}"
            )
        first = next((r for r in self.reports.values() if isinstance(r, Report)), None)
        asides: dict[tuple[str, str], list[str]] = {}
        for check, why in self.refused.items():
            asides.setdefault(("{} not tested: ", why), []).append(check)
        for check, report in self.reports.items():
            for note in report.notes if isinstance(report, Report) else ():
                asides.setdefault(("note on {}: ", note), []).append(check)
        texts = [start.format(", ".join(which)) + text for (start, text), which in asides.items()]
        for text in [f"inputs: {first.sample}", *texts] if first is not None else texts:
            lines += wrap(text, 98, initial_indent="  ", subsequent_indent="    ")
        lines += [self.conclusion] if self.conclusion else []
        examples = [r for r in self.reports.values() if isinstance(r, Report) and r.counterexample is not None]
        for report in examples[:1]:
            lines.append(f"{report.symmetry} symmetry, group {report.group}:\n{report.counterexample}")
        for report in [r for r in examples[1:] if r.symmetry == "position"]:
            lines.append(f"position symmetry:\n{report.counterexample}")
        return "\n".join(lines)


@documented(CheckSettings, trials=100)
def audit(
    f: Function,
    *,
    checks: Sequence[str] = CHECKS,
    roles: Roles | Literal["auto"] | None = "auto",
    **settings: Any,
) -> Audit:
    """Tests every symmetry at once: those of the embedding, the position, and the length.

    Args:
        f, d, n, k, ...: as in `check_equivariance`.
        checks: the groups `O`, `SO`, `permutation`, `signed_permutation`, `sign`, `translation` of the embedding, `position`, and
            `length` (`check_finite_information`). What does not apply is refused with its reason.
        roles: where they are given or known, O is also tested with the parameters of the module as knowledge.

    >>> import torch
    >>> result = audit(torch.nn.functional.normalize, d=5, trials=20)
    >>> [check for check, report in result.reports.items() if report.passed]
    ['O', 'SO', 'permutation', 'signed_permutation', 'sign', 'position', 'length']
    >>> print(result.conclusion)
    f is a combination of tokens whose coefficients depend on inner products alone: a form of attention (Prop. 3.2)
    """
    unknown = [check for check in checks if check not in CHECKS]
    if unknown or not checks:
        raise InvalidArgument(
            f"checks must be among {', '.join(CHECKS)}; got {', '.join(map(repr, unknown)) or 'none'}"
        )
    common = CheckSettings(**{"trials": 100, **settings})
    moving: Roles = {}
    if roles == "auto" and isinstance(f, torch.nn.Module):
        try:
            moving = known_roles(f)
        except Unsupported:
            moving = {}
    elif roles not in (None, "auto"):
        moving = roles  # type: ignore[assignment]
    jobs: dict[str, Callable[[], Report | InformationReport]] = {}
    for check in checks:
        if check == "position":
            jobs[check] = partial(position, f, common)
        elif check == "length":
            same = {name: getattr(common, name) for name in ("d", "k", "dtype", "batched", "arguments")}
            jobs[check] = partial(check_finite_information, f, **same)
        else:
            jobs[check] = partial(embedding, f, common, cast(Group, check), None)
        if check == "O" and any(role != "fixed" for role in moving.values()):
            jobs[WITH_PARAMETERS] = partial(embedding, f, common, "O", moving)
    reports: dict[str, Report | InformationReport] = {}
    refused: dict[str, str] = {}
    for check, job in jobs.items():
        try:
            reports[check] = job()
        except HeedfulError as error:
            refused[check] = " ".join(str(error).split())
    if not reports:
        raise InvalidArgument(next(iter(refused.values())))
    name = next(iter(reports.values())).name
    output = common.output if isinstance(common.output, str) else "callable"
    return Audit(name, common.d, common.k, output, reports, refused)

"""Does f commute with a group? Tested on random or given inputs, with a tolerance that follows from measured rounding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from heedful._errors import HeedfulError, InvalidArgument
from heedful._runtime import undisturbed
from heedful._settings import documented
from heedful.lens.symmetry._inputs import GIVEN, NORMAL, Input, inputs, random_input
from heedful.lens.symmetry._report import Component, Counterexample, Report, failure_bound
from heedful.lens.symmetry._shrink import shrink
from heedful.lens.symmetry._trial import CAP, FINE, FLOOR, VANISHES, WEAK, Test, Trial, settled
from heedful.lens.symmetry.callee import Callee, Function, Roles
from heedful.lens.symmetry.moves import Group, Move, Shuffle, check_group, draw
from heedful.lens.symmetry.roles import known_roles
from heedful.lens.symmetry.settings import CheckSettings


@documented(CheckSettings, n=(1, 2, 5, 9))
def check_equivariance(
    f: Function, *, group: Group = "O", roles: Roles | Literal["auto"] | None = None, **settings: Any
) -> Report:
    r"""Tests the embedding symmetry $f(XQ^T, ZQ^T) = f(X, Z)\,Q^T$ for random Q of a group (Ma & Ying 2023, Def. 3.2).

    The error of a trial is $e = |f(XQ^T, ZQ^T) - f(X,Z)Q^T| / |f(X,Z)|$ in Frobenius norms; the denominator is the larger of
    both outputs, and at least a thousandth of the inputs. Moving there and back, $e_0 = |f((XQ^T)Q, (ZQ^T)Q) - f(X,Z)| /
    |f(X,Z)|$ shows what rounding in the last digit does; $e \le 50 \max(e_0, \varepsilon\sqrt d)$ passes, up to $10^{-6}$. Above
    that the rounding is measured: fourth differences of $h(X) = f(XQ^T) - f(X)Q^T$ near the input leave nothing of a smooth
    breach, and the noise $\sigma$ of whatever precision f computes in. A trial fails when $e > 6\sigma$ (when $e > 2\sigma$, if the
    median error is above that), and always above 0.05. Where more than 1 % was let pass the report is `weak`.

    Args:
        f: any function of X `[n, d]` or of X and Z `[k, d]`, in torch or numpy, or a module. A module gets a batch axis of
            one (none where it has `batch_first=False`), runs in eval mode, and is left as it was.
        d, n, k: size of the embedding, numbers of tokens that trials go through, number of knowledge vectors.
        group: `O`, `SO`, `permutation`, `signed_permutation`, `sign` (all of coordinates) or `translation`. Half of the trials
            of O are rotations, half have determinant -1; both are reported.
        roles: how parameters of a module move with the embedding, names or patterns -> `rows` ($WQ^T$), `cols` ($QW$), `both`,
            `bias` ($Qb$), `fixed` (the default). `"auto"` knows attention layers of torch, of Hugging Face and our own.
        output: how the output moves. `"rows"`: vectors, $f(X)Q^T$. `"matrix"`: `[d, d]`, as a covariance, $Q f(X) Q^T$ (a
            translation leaves it). `"scalar"`: not at all; the output may then have any shape, as an energy. Or a function of
            the output and the group element (Q, the vector t, the order of positions) that returns the moved output.
        invariant: the same as `output="scalar"`.
        sampler: `sampler(generator, n)` returns X or (X, Z); or a list of them, used in turn. By default half of the inputs are
            standard normal, the others scaled by 0.001 or 1000, whole numbers, or with two equal rows. One of these where f
            vanishes, overflows or jumps (two rows tie) is replaced by a normal one, and the report says so.
        tol: the relative error to let pass, 0 or more, instead of the calibrated one.
        dtype: what f computes in; by default that of a module, else float64. Moves are made in float64.
        arguments: keyword arguments for every call, as `{"is_causal": True}`.
        shrinking: look for a smaller counterexample.

    >>> import torch
    >>> check_equivariance(lambda x: torch.softmax(x @ x.T, -1) @ x, d=5, trials=40).passed
    True
    >>> report = check_equivariance(torch.relu, d=5, trials=40)
    >>> report.passed, report.counterexample.move
    (False, 'sign flip of coordinate 0')
    >>> layer = torch.nn.MultiheadAttention(6, 2)
    >>> [check_equivariance(layer, d=6, trials=10, roles=roles).passed for roles in (None, "auto")]
    [False, True]
    """
    return embedding(f, CheckSettings(**{"n": (1, 2, 5, 9), **settings}), group, roles)


def embedding(f: Function, settings: CheckSettings, group: Group, roles: Roles | Literal["auto"] | None) -> Report:
    """What `check_equivariance` does with its settings."""
    check_group(group)
    moving = known_roles(f) if roles == "auto" else roles
    if moving and group == "translation":
        raise InvalidArgument("roles say how a matrix Q moves parameters; a translation has none: leave roles out")
    d, test = settings.d, _test(f, settings, moving)
    test.callee.check_width(d)
    generator = torch.Generator().manual_seed(settings.seed)
    single = d == 1 and group in ("SO", "permutation")
    notes = (f"vacuous: for d = 1 the group {group} has the identity alone",) if single else ()

    def runs() -> Iterator[tuple[Move, Input]]:
        for at, one in zip(range(settings.trials), inputs(settings, generator, 1), strict=False):
            # The determinant changes with every trial, n with every second one.
            yield draw(group, d, generator, -1 if at % 2 and group not in ("SO", "translation") else 1), one

    with undisturbed(f):
        done, void = _run(test, runs(), generator)
        return _report(test, "embedding", group, done, (*notes, *void), settings.shrinking)


def _test(f: Function, settings: CheckSettings, roles: Roles | None = None) -> Test:
    options = {name: getattr(settings, name) for name in ("batched", "dtype", "arguments")}
    return Test(Callee(f, roles=roles, **options), settings.output, settings.tol)


@documented(CheckSettings)
def check_permutation(f: Function, **settings: Any) -> Report:
    r"""Tests the position symmetry $f(\Pi X, Z) = \Pi f(X, Z)$ for random permutations of tokens (Ma & Ying 2023, Def. 4.1).

    Not to be confused with `check_equivariance(group="permutation")`, which permutes the coordinates of the embedding.
    Arguments are those of `check_equivariance`. A causal function must fail, for what a token may read depends on its place;
    where later tokens are found not to reach earlier outputs, the report says so.

    >>> import torch
    >>> check_permutation(lambda x: x - x.mean(0), d=5, trials=20).passed
    True
    >>> report = check_permutation(lambda x: x.cumsum(0), d=5, trials=20)
    >>> print(report.notes[0][:43])
    f is causal: output i reads rows 0 to i alo
    """
    return position(f, CheckSettings(**settings))


def position(f: Function, settings: CheckSettings) -> Report:
    """What `check_permutation` does with its settings."""
    test, generator = _test(f, settings), torch.Generator().manual_seed(settings.seed)

    def runs() -> Iterator[tuple[Move, Input]]:
        for _, one in zip(range(settings.trials), inputs(settings, generator, 2), strict=False):
            order = torch.randperm(len(one.x), generator=generator)
            # The identity tests nothing, and is every second draw for two tokens.
            order = order.roll(1) if torch.equal(order, torch.arange(len(one.x))) else order
            yield Shuffle("permutation of positions", order), one

    with undisturbed(f):
        done, void = _run(test, runs(), generator)
        causal = any(t.failed for t in done) and test.output == "rows" and _causal(test.callee, done)
        return _report(test, "position", "permutation", done, ((CAUSAL,) if causal else ()) + void, settings.shrinking)


CAUSAL = (
    "f is causal: output i reads rows 0 to i alone, so a row that moves changes what it may read. No causal function but one "
    "that treats each row by itself has the position symmetry"
)


def _run(
    test: Test, runs: Iterator[tuple[Move, Input]], generator: torch.Generator
) -> tuple[list[Trial], tuple[str, ...]]:
    """The trials, settled, and a note on inputs that said nothing and were replaced by normal ones."""
    done, void = [], Counter[tuple[str, str]]()
    for move, (x, z, kind) in runs:
        try:
            trial = test.run(move, x, z, kind)
            why = test.void(trial)
        except HeedfulError:
            if kind in (NORMAL, GIVEN):
                raise
            why = "f raises an error"
        if why:
            other = test.run(move, *random_input(NORMAL, len(x), x.shape[-1], 0 if z is None else len(z), generator))
            # What vanishes at every size, as the mean taken from one row, is left.
            if why != VANISHES or bool(other.base.any()):
                void[why, kind] += 1
                trial = other
        done.append(trial)
    parts = [f"{why} at {count} that were {kind}" for (why, kind), count in void.items()]
    note = f"inputs replaced by standard normal ones: {', '.join(parts)}".replace("that were with", "with")
    return settled(test, done), ((note,) if parts else ())


def _causal(callee: Callee, trials: list[Trial]) -> bool:
    """Whether changing the last row leaves the other outputs alone, while changing the first does not."""
    x, z = next(((t.x, t.z) for t in trials if t.failed and len(t.x) > 1), (trials[-1].x, trials[-1].z))
    base, scale = callee(x, z), float(x.norm())
    last, first = x.clone(), x.clone()
    last[-1] += 1.0
    first[0] += 1.0
    near = 1e-3 if torch.finfo(callee.dtype).eps > 1e-6 else 1e-9
    kept = float((callee(last, z) - base)[:-1].norm()) <= near * scale
    return kept and float((callee(first, z) - base)[1:].norm()) > near * scale


def _report(
    test: Test, symmetry: str, group: str, trials: list[Trial], notes: tuple[str, ...], shrinking: bool
) -> Report:
    callee, d = test.callee, trials[0].x.shape[-1]
    failed = sorted((trial for trial in trials if trial.failed), key=lambda trial: trial.kind not in (NORMAL, GIVEN))
    first = trials[0]
    once, again = callee(first.x, first.z), callee(first.x, first.z)
    same = once.shape == again.shape and bool(torch.equal(once.nan_to_num(), again.nan_to_num()))
    if not same:
        notes += ("two equal calls differ: take the randomness out of f, or seed it inside",)
    if test.output == "scalar":
        notes += ("tested as an invariance: f of the moved input is f itself",)
    if test.output == "rows" and failed and all(trial.got.shape[-2:] == (d, d) for trial in trials):
        notes += (
            "the output is d x d and was read as rows; where it is a matrix, as a covariance, give output='matrix'",
        )
    if failed and failed[0].kind not in (NORMAL, GIVEN):
        kinds = dict.fromkeys(trial.kind for trial in failed)
        notes += (f"broken on inputs {' and '.join(kinds)} alone".replace("inputs whole", "whole"),)
    if not any(bool(trial.expected.any()) for trial in trials):
        notes += ("vacuous: f gave zeros alone",)
    tolerance = max(trial.tolerance for trial in trials)
    # What computes coarsely has errors everywhere; what jumps has them where an input lies at a jump.
    smooth = median(trial.error for trial in trials) <= FINE
    jumps = sum(trial.noise > WEAK for trial in trials) if smooth and test.tol == "auto" else 0
    if jumps and not failed:
        notes += (
            f"f jumps at {jumps} of {len(trials)} inputs: there the rounding of the input alone moves the output by up to "
            f"{max(trial.noise for trial in trials):.2g}",
        )
    if not failed and tolerance > WEAK:
        why = f"weak: tol lets errors up to {tolerance:.2g} pass; give a smaller one"
        if test.tol == "auto":
            ask = "let f compute in float64" if callee.dtype == torch.float64 else "give dtype=torch.float64"
            why = f"weak: rounding hides errors up to {tolerance:.2g}; {ask}"
            if jumps:
                why = f"weak: f jumps there, which hides errors up to {tolerance:.2g}; try inputs off the jumps"
        notes += (why,)
    small = sum(trial.small for trial in trials)
    if small and not failed:
        notes += (
            f"weak: outputs are below {FLOOR:g} of the inputs in {small} of {len(trials)} trials, and errors are measured "
            "against that: multiply f by a number",
        )
    example = None
    if failed and same:
        worst = failed[0]
        if shrinking:

            def run(move: Move, x: Tensor, z: Tensor | None) -> Trial:
                trial = test.run(move, x, z)
                return replace(trial, tolerance=max(trial.tolerance, tolerance))

            worst = shrink(run, failed, group, symmetry, first.kind != GIVEN)
        # Errors above the cap are not measured each for itself; they fail what was let pass elsewhere as well.
        allowed = max(worst.tolerance, tolerance) if worst.error > CAP else worst.tolerance
        reason = "the output is not finite" if worst.error == math.inf else ""
        example = Counterexample(worst.move.name, worst.move.data, worst.x, worst.z, worst.got, worst.expected,
                                 worst.error, allowed, reason)  # fmt: skip
    parts = []
    for sign in sorted({trial.move.determinant for trial in trials}, key=lambda s: -(s or 0)):
        these = [trial for trial in trials if trial.move.determinant == sign]
        parts.append(Component(sign, len(these), sum(t.failed for t in these), max(t.error for t in these)))
    return Report(
        name=callee.name,
        symmetry=symmetry,
        group=group,
        d=d,
        output=test.output if isinstance(test.output, str) else getattr(test.output, "__name__", "callable"),
        errors=tuple(trial.error for trial in trials),
        failures=len(failed),
        noise=max(trial.noise for trial in trials),
        tolerance=tolerance,
        weak=same and not failed and (tolerance > WEAK or small > 0),
        bound=failure_bound(len(failed), len(trials)),
        components=tuple(parts),
        deterministic=same,
        lengths=tuple(sorted({len(trial.x) for trial in trials})),
        inputs=dict(Counter(trial.kind for trial in trials)),
        moved={name: role for name, role in callee.roles.items() if role != "fixed"},
        notes=notes,
        counterexample=example,
    )

"""Does f commute with a group? Tested on random or given inputs, with a tolerance that knows rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful.lens.symmetry._bound import failure_bound
from heedful.lens.symmetry._call import Callee, Function, Roles, undisturbed
from heedful.lens.symmetry._moves import Group, Move, Shuffle, Turn, check_group, draw
from heedful.lens.symmetry._report import Component, Counterexample, Report
from heedful.lens.symmetry._roles import known_roles
from heedful.lens.symmetry._shrink import shrink

__all__ = ["check_equivariance", "check_permutation"]

Sample = Tensor | tuple[Tensor, Tensor]
Sampler = Callable[[torch.Generator, int], Sample] | Sequence[Sample]

# A trial may be off by so many times its own rounding, ...
MARGIN = 50.0

# ... but by no more than this, or a function without any smoothness would pass.
CAP = 0.1

# Outputs below this share of the inputs' norm count as zero when errors are divided by their size.
FLOOR = 1e-3

# A second difference above this share of the step is a jump, ...
JUMP = 0.05

# ... looked for in so many steps, from so many inputs at most.
STEPS, INPUTS = 64, 8


@dataclass(frozen=True, eq=False)
class Trial:
    """One input, one group element, and how far f is from commuting there."""

    move: Move
    x: Tensor
    z: Tensor | None
    got: Tensor
    expected: Tensor
    error: float
    noise: float
    tolerance: float
    small: bool

    @property
    def failed(self) -> bool:
        """Whether the error is more than rounding can explain; outputs that are not finite always fail."""
        return not self.error <= self.tolerance


def check_equivariance(
    f: Function,
    *,
    d: int,
    n: int | Sequence[int] = (1, 2, 5, 9),
    k: int = 0,
    group: Group = "O",
    roles: Roles | Literal["auto"] | None = None,
    invariant: bool = False,
    trials: int = 200,
    sampler: Sampler | None = None,
    tol: float | Literal["auto"] = "auto",
    dtype: torch.dtype | None = None,
    batched: bool | None = None,
    arguments: Mapping[str, Any] | None = None,
    seed: int = 0,
    shrinking: bool = True,
) -> Report:
    r"""Tests the embedding symmetry $f(XQ^T, ZQ^T) = f(X, Z)\,Q^T$ for random Q of a group (Ma & Ying 2023, Def. 3.2).

    The error of a trial is $e = |f(XQ^T, ZQ^T) - f(X,Z)Q^T| / |f(X,Z)|$ in Frobenius norms. Moving there and back,
    $e_0 = |f((XQ^T)Q, (ZQ^T)Q) - f(X,Z)| / |f(X,Z)|$ shows what rounding alone does inside f; a trial fails when
    $e > 50 \max(e_0, \varepsilon\sqrt d)$, and always above 0.1. Before a small error counts, second differences of f over tiny
    steps join $e_0$: they show a coarser rounding inside, as of a norm that computes in float32 or a product in bfloat16. The
    denominator is the larger of both outputs, and at least a thousandth of the inputs.

    Args:
        f: any function of X `[n, d]` or of X and Z `[k, d]`, in torch or numpy, or a module. A module gets a batch axis of
            one (none where it has `batch_first=False`), runs in eval mode, and is left as it was.
        d, n, k: size of the embedding, numbers of tokens that trials go through, number of knowledge vectors.
        group: `O`, `SO`, `permutation`, `signed_permutation`, `sign` (all of coordinates) or `translation`. Half of the trials
            of O are rotations, half have determinant -1; both are reported.
        roles: how parameters of a module move with the embedding, names or patterns -> `rows` ($WQ^T$), `cols` ($QW$), `both`,
            `bias` ($Qb$), `fixed` (the default). `"auto"` knows attention layers of torch, of Hugging Face and our own.
        invariant: tests $f(XQ^T, ZQ^T) = f(X, Z)$ instead; the output may then have any shape.
        sampler: `sampler(generator, n)` returns X or (X, Z); or a list of them, used in turn. Standard normal by default.
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
    check_group(group)
    found = known_roles(f) if roles == "auto" else roles
    if found and group == "translation":
        raise InvalidArgument("roles say how a matrix Q moves parameters; a translation has none: leave roles out")
    callee = Callee(f, roles=found, batched=batched, dtype=dtype, arguments=arguments)
    check_numbers(d=d, k=k + 1, trials=trials)
    check_tolerance(tol)
    callee.check_width(d)
    generator = torch.Generator().manual_seed(seed)
    single = d == 1 and group in ("SO", "permutation")
    notes = (f"vacuous: for d = 1 the group {group} has the identity alone",) if single else ()

    def runs() -> Iterator[Trial]:
        for at, (x, z) in zip(range(trials), _inputs(sampler, n, d, k, generator, 1), strict=False):
            # The determinant changes with every trial, n with every second one.
            move = draw(group, d, generator, -1 if at % 2 and group not in ("SO", "translation") else 1)
            yield run(callee, move, x, z, tol, invariant)

    with undisturbed(f):
        done, grain = _settled(callee, list(runs()), tol)
        return _report(callee, "embedding", group, d, done, grain, tol, invariant, notes, shrinking, sampler is None)


def check_permutation(
    f: Function,
    *,
    d: int,
    n: int | Sequence[int] = (2, 3, 5, 9),
    k: int = 0,
    invariant: bool = False,
    trials: int = 200,
    sampler: Sampler | None = None,
    tol: float | Literal["auto"] = "auto",
    dtype: torch.dtype | None = None,
    batched: bool | None = None,
    arguments: Mapping[str, Any] | None = None,
    seed: int = 0,
    shrinking: bool = True,
) -> Report:
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
    callee = Callee(f, batched=batched, dtype=dtype, arguments=arguments)
    check_numbers(d=d, k=k + 1, trials=trials)
    check_tolerance(tol)
    generator = torch.Generator().manual_seed(seed)

    def runs() -> Iterator[Trial]:
        for _, (x, z) in zip(range(trials), _inputs(sampler, n, d, k, generator, 2), strict=False):
            order = torch.randperm(len(x), generator=generator)
            # The identity tests nothing, and is every second draw for two tokens.
            order = order.roll(1) if torch.equal(order, torch.arange(len(x))) else order
            yield run(callee, Shuffle("permutation of positions", order), x, z, tol, invariant)

    with undisturbed(f):
        found, grain = _settled(callee, list(runs()), tol)
        causal = any(t.failed for t in found) and not invariant and _causal(callee, found)
        notes = (CAUSAL,) if causal else ()
        return _report(
            callee, "position", "permutation", d, found, grain, tol, invariant, notes, shrinking, sampler is None
        )


CAUSAL = (
    "f is causal: output i reads rows 0 to i alone, so a row that moves changes what it may read. No causal function but one "
    "that treats each row by itself has the position symmetry"
)


def run(
    callee: Callee, move: Move, x: Tensor, z: Tensor | None, tol: float | str, invariant: bool, grain: float = 0.0
) -> Trial:
    """One trial: f of the moved input, the moved f, and the rounding of going there and back, or the grain where known."""
    x_moved, z_moved = move.x(x), None if z is None else move.z(z)
    moves = (move, move.inverse()) if callee.roles and isinstance(move, Turn) else ()
    base = callee(x, z)
    got = callee(x_moved, z_moved, moves[:1])
    back = callee(move.undo(x_moved), None if z_moved is None else move.undo_z(z_moved), moves)
    if got.shape != base.shape:
        raise InvalidArgument(f"{callee.name} returns {tuple(base.shape)} and, for a moved input, {tuple(got.shape)}")
    rows = isinstance(move, Shuffle)
    if not invariant and (base.dim() == 0 or base.shape[0 if rows else -1] != x.shape[0 if rows else -1]):
        wanted = f"{len(x)} rows, one per token" if rows else f"vectors of size d = {x.shape[-1]}"
        raise InvalidArgument(f"{callee.name} returns {tuple(base.shape)}, not {wanted}; invariant=True tests the rest")
    expected = base if invariant else move.x(base)
    size = max(float(base.norm()), float(got.norm()), FLOOR * float(x.norm()), 1e-300)
    finite = all(bool(out.isfinite().all()) for out in (base, got, back))
    noise = max(grain, float((back - base).norm()) / size) if finite else 0.0
    error = float((got - expected).norm()) / size if finite else float("inf")
    least = torch.finfo(callee.dtype).eps * x.shape[-1] ** 0.5
    if finite and MARGIN * max(noise, least) < error <= CAP:
        bends = _steps(callee, x, z, torch.finfo(callee.dtype).eps ** 0.5, 8)
        noise = max(noise, max(bends) / size)
    allowed = min(MARGIN * max(noise, least), CAP)
    small = 0.0 < float(base.norm()) < FLOOR * float(x.norm())
    return Trial(move, x, z, got, expected, error, noise, allowed if tol == "auto" else float(tol), small)


def _steps(callee: Callee, x: Tensor, z: Tensor | None, step: float, count: int) -> list[float]:
    """Second differences of f over random steps near x, relative to the inputs.

    A short step leaves nothing of a smooth function's second difference; what remains is its rounding. Going there and
    back cannot show that: it changes an input by its last digit, which a function that rounds inside never sees.
    """
    generator, found = torch.Generator().manual_seed(0), []
    given = [x] if z is None else [x, z]

    def scatter(size: float) -> list[Tensor]:
        return [size * torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in given]

    for _ in range(count):
        # From x itself all steps would meet the same coarse numbers, or none.
        near = [t * (1 + tilt) for t, tilt in zip(given, scatter(128 * step), strict=True)]
        tilts = scatter(step)
        below, at, above = (
            callee(*(t * (1 + s * tilt) for t, tilt in zip(near, tilts, strict=True)))  # type: ignore[arg-type]
            for s in (-1.0, 0.0, 1.0)
        )
        found.append(float((above + below - 2 * at).norm()))
    return found


def _settled(callee: Callee, trials: list[Trial], tol: float | str) -> tuple[list[Trial], float]:
    """The trials with a tolerance that knows the grain of f, and the grain; it is asked for where an error may be that."""
    doubtful = [trial for trial in trials if trial.failed and trial.error <= CAP]
    if tol != "auto" or not doubtful:
        return trials, 0.0
    others = [trial for trial in trials if trial.error <= CAP and not trial.failed]
    grain = _grain(callee, [*doubtful[: INPUTS // 2], *others, *doubtful[INPUTS // 2 :]][:INPUTS])
    noises = [max(trial.noise, grain) for trial in trials]
    return [
        replace(trial, noise=noise, tolerance=max(trial.tolerance, min(MARGIN * noise, CAP)))
        for trial, noise in zip(trials, noises, strict=True)
    ], grain


def _grain(callee: Callee, trials: list[Trial]) -> float:
    """The largest relative jump of a function that rounds to float32 or bfloat16 inside; 0 where it does not.

    A step of eps/32 takes each number over the border of two coarse ones in more than one of twenty cases, and f jumps.
    Jumps and kinks of a fine function are met far less often, and its bends are nothing beside the step.
    """
    found = 0.0
    for coarse in (torch.float32, torch.bfloat16):
        eps = torch.finfo(coarse).eps
        if eps < torch.finfo(callee.dtype).eps:
            continue
        seen, wanted, largest = 0, 0.0, 0.0
        for trial in trials:
            size = max(float(trial.got.norm()), FLOOR * float(trial.x.norm()))
            bends = _steps(callee, trial.x, trial.z, eps / 32, -(-STEPS // len(trials)))
            jumps = [bend / size for bend in bends if JUMP * eps / 32 * size < bend <= CAP * size]
            seen, largest = seen + len(jumps), max(largest, *jumps, 0.0)
            wanted += len(bends) * (1 - math.exp(-trial.x.numel() / 20)) / 3
        if seen > wanted:
            found = max(found, largest)
    return found


def _inputs(
    sampler: Sampler | None, n: int | Sequence[int], d: int, k: int, generator: torch.Generator, least: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Inputs without end, in float64; n changes with every second one."""
    lengths = check_tokens(n, least)
    if sampler is not None and not callable(sampler) and not len(sampler):
        raise InvalidArgument("the sampler holds no inputs; give at least one X [n, d] or (X, Z), or a function")
    at = 0
    while True:
        length = lengths[at // 2 % len(lengths)]
        if sampler is None:
            x = torch.randn(length, d, generator=generator, dtype=torch.float64)
            z = torch.randn(k, d, generator=generator, dtype=torch.float64) if k else None
        else:
            given = sampler(generator, length) if callable(sampler) else sampler[at % len(sampler)]
            parts = [
                torch.as_tensor(p).to("cpu", torch.float64) for p in (given if isinstance(given, tuple) else (given,))
            ]
            for name, rows in zip("XZ", parts, strict=False):
                if rows.dim() != 2 or rows.shape[-1] != d:
                    raise InvalidArgument(f"the sampler gave {name} of shape {tuple(rows.shape)}, expected (rows, {d})")
            x, z = parts[0], parts[1] if len(parts) > 1 else None
        yield x, z
        at += 1


def check_numbers(**sizes: int) -> None:
    """Refuses sizes that are no positive integers; k comes in with one added, for it may be zero."""
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            what = f"0 or more; got {value - 1}" if name == "k" else f"a positive integer; got {value}"
            raise InvalidArgument(f"{name} must be {what}")


def check_tokens(n: int | Sequence[int], least: int) -> list[int]:
    """The numbers of tokens to go through, refused where one is too small."""
    lengths = [n] if isinstance(n, int) else list(n)
    if not lengths or not all(isinstance(length, Integral) and length >= least for length in lengths):
        raise InvalidArgument(f"n must hold numbers of tokens from {least} on; got {n}")
    return lengths


def check_tolerance(tol: Any) -> None:
    """Refuses what is no tolerance."""
    if tol != "auto" and not (isinstance(tol, Real) and math.isfinite(tol) and float(tol) >= 0):
        raise InvalidArgument(f"tol must be 'auto' or a number from 0 on; got {tol!r}")


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
    callee: Callee, symmetry: str, group: str, d: int, trials: list[Trial], grain: float, tol: float | str,
    invariant: bool, notes: tuple[str, ...], shrinking: bool, free: bool,
) -> Report:  # fmt: skip
    failed = [trial for trial in trials if trial.failed]
    first = trials[0]
    once, again = callee(first.x, first.z), callee(first.x, first.z)
    same = once.shape == again.shape and bool(torch.equal(once.nan_to_num(), again.nan_to_num()))
    if not same:
        notes += ("two equal calls differ: take the randomness out of f, or seed it inside",)
    if invariant:
        notes += ("tested as an invariance: f of the moved input is f itself",)
    if not any(bool(trial.expected.any()) for trial in trials):
        notes += ("vacuous: f gave zeros alone",)
    if not failed and tol == "auto" and max(t.tolerance for t in trials) >= CAP:
        where, ask = f"in {callee.dtype}", "give dtype=torch.float64"
        if grain or callee.dtype == torch.float64:
            where, ask = "inside f", "let it compute in float64"
        notes += (f"weak: rounding {where} hides errors up to {CAP:g}; {ask}",)
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
            worst = shrink(lambda m, x, z: run(callee, m, x, z, tol, invariant, grain), failed, group, symmetry, free)
        reason = "the output is not finite" if worst.error == float("inf") else ""
        example = Counterexample(worst.move.name, worst.move.data, worst.x, worst.z, worst.got, worst.expected,
                                 worst.error, worst.tolerance, reason)  # fmt: skip
    parts = []
    for sign in sorted({trial.move.determinant for trial in trials}, key=lambda s: -(s or 0)):
        these = [trial for trial in trials if trial.move.determinant == sign]
        parts.append(Component(sign, len(these), sum(t.failed for t in these), max(t.error for t in these)))
    return Report(
        name=callee.name,
        symmetry=symmetry,
        group=group,
        d=d,
        errors=tuple(trial.error for trial in trials),
        failures=len(failed),
        noise=max(trial.noise for trial in trials),
        tolerance=max(trial.tolerance for trial in trials),
        bound=failure_bound(len(failed), len(trials)),
        components=tuple(parts),
        deterministic=same,
        moved={name: role for name, role in callee.roles.items() if role != "fixed"},
        notes=notes,
        counterexample=example,
    )

"""`heedful symmetry`: the symmetries of anything that can be imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, isclass, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from heedful._errors import InvalidArgument
from heedful.cli.arguments import AsJson, echo, in_options, spellings


def find(target: str) -> Any:
    """What `MODULE:NAME` or `FILE.py:NAME` names; a function without arguments is called, and what it makes is meant.

    >>> find("torch:relu").__name__
    'relu'
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise InvalidArgument(f"give MODULE:NAME or FILE.py:NAME, as torch:relu; got {target!r}")
    thing: Any = _module(place)
    for part in name.split("."):
        try:
            thing = getattr(thing, part)
        except AttributeError:
            raise InvalidArgument(f"{place} has no {name!r}") from None
    if isclass(thing):
        raise InvalidArgument(f"{target} is a class; name an instance, or a function without arguments that makes one")
    if not callable(thing):
        raise InvalidArgument(f"{target} is {type(thing).__name__}; name a function or a module")
    return _called(thing, target) if _takes_nothing(thing) else thing


def _module(place: str) -> Any:
    try:
        if not place.endswith(".py"):
            # Like python -m: what lies in the current folder can be imported.
            if "" not in sys.path:
                sys.path.insert(0, "")
            return importlib.import_module(place)
        if not Path(place).is_file():
            raise InvalidArgument(f"there is no file {place}")
        # Like python FILE.py: what lies beside it can be imported. The name is one that no package has.
        folder = str(Path(place).resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        spec = importlib.util.spec_from_file_location(f"_target_{Path(place).stem}", place)
        if spec is None or spec.loader is None:
            raise InvalidArgument(f"{place} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look
        spec.loader.exec_module(module)
        return module
    except InvalidArgument:
        raise
    except (Exception, SystemExit) as error:
        raise InvalidArgument(f"{place} cannot be imported: {type(error).__name__}: {error}") from error


def _takes_nothing(thing: Any) -> bool:
    try:
        parameters = signature(thing).parameters.values()
    except (TypeError, ValueError):
        return False
    return not any(p.kind is not Parameter.VAR_KEYWORD and p.default is Parameter.empty for p in parameters)


def _called(thing: Any, target: str) -> Any:
    try:
        result = thing()
    except (Exception, SystemExit) as error:
        raise InvalidArgument(f"{target}() raised {type(error).__name__}: {error}") from error
    if not callable(result):
        raise InvalidArgument(f"{target}() returns {type(result).__name__}; it must return a function or a module")
    return result


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidArgument(f"--n must be numbers of tokens with commas between, as 2,5,9; got {text!r}") from None
    if min(numbers) < 1:
        raise InvalidArgument(f"--n must be numbers of tokens from 1 on; got {text}")
    return numbers


def symmetry(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="MODULE:NAME", help="What to test, as torch:relu or layers.py:make.")],
    d: Annotated[int, typer.Option("--d", help="Size of the embedding.")],
    k: Annotated[int, typer.Option("--k", help="Knowledge vectors, a second argument (k, d).")] = 0,
    n: Annotated[str, typer.Option("--n", help="Numbers of tokens to test with.")] = "2,3,5,9",
    checks: Annotated[
        list[str] | None,
        typer.Option("--group", help="Require this symmetry: O, SO, permutation, signed_permutation, sign, translation, "
                     "position or length. May be repeated; without it all are tested."),
    ] = None,
    trials: Annotated[int, typer.Option(help="Random inputs per symmetry.")] = 100,
    tol: Annotated[float | None, typer.Option(help="Largest relative error that passes.", show_default="calibrated")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float64, ...", show_default="the module's")] = None,
    batched: Annotated[
        bool | None, typer.Option("--batched/--unbatched", help="Whether it takes (1, n, d).", show_default="modules do")
    ] = None,
    output: Annotated[
        str, typer.Option("--output", help="How the output moves: rows, matrix (d x d, as a covariance), scalar (not at all).")
    ] = "rows",
    invariant: Annotated[bool, typer.Option("--invariant", help="The same as --output scalar.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Tests which symmetries a function or module has.

    Vectors X (n, d) go in and vectors come out, in torch or numpy. A function
    without arguments is called first, and what it returns is tested.

    Exit code 0: without --group, always; with it, every symmetry named there
    holds, if only weakly (the tolerance is above 1 %). 1: one of them is
    broken. 2: it could not be tested, or is undecided.
    """
    from heedful.lens.symmetry import audit

    options: dict[str, Any] = {"checks": checks} if checks else {}
    result = audit(find(target), d=d, k=k, n=_numbers(n), trials=trials, tol="auto" if tol is None else tol,
                  dtype=_dtype(dtype), batched=batched, output=output,
                  invariant=invariant, seed=seed, **options)  # fmt: skip
    result = _spelled(result, spellings(context.command))
    if checks and result.refused:
        raise InvalidArgument(next(iter(result.refused.values())))
    echo(result, as_json)
    code = _code(result, checks or ())
    if code:
        raise typer.Exit(code)


def _spelled(result: Any, spelled: Mapping[str, str]) -> Any:
    """The audit with the command's options in its notes and reasons."""
    reports = {
        check: replace(report, notes=tuple(in_options(note, spelled) for note in report.notes))
        if hasattr(report, "counterexample")
        else report
        for check, report in result.reports.items()
    }
    refused = {check: in_options(why, spelled) for check, why in result.refused.items()}
    return replace(result, reports=reports, refused=refused)


def _code(result: Any, group: Sequence[str]) -> int:
    # With its parameters as knowledge a layer has the symmetry, but nobody demanded that form.
    failed = [result.reports[name] for name in group if not result.reports[name].passed]
    # Where two equal calls differ nothing was found out.
    undecided = [not getattr(report, "deterministic", True) for report in failed]
    return 2 if failed and all(undecided) else 1 if failed else 0


def _dtype(name: str | None) -> Any:
    if name is None:
        return None
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidArgument(f"--dtype must be float64, float32, bfloat16 or float16; got {name!r}")
    return dtype

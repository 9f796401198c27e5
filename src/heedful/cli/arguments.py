"""What several commands ask for in the same words, and errors of the library in the words of the shell."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from heedful._files import check_free
from heedful._plot import check_picture
from heedful._result import plain

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A Hugging Face folder, or a name in its local cache; demo is a small MiniLM."
    ),
]
Text = Annotated[
    list[str] | None,
    typer.Argument(metavar="TEXT", help="What the model reads; - for standard input.", show_default="a sentence"),
]
TextFile = Annotated[Path | None, typer.Option(help="Read the text from this file instead.")]


def echo(result: Any, as_json: bool, text: Callable[[Any], str] = str) -> None:
    """Prints a result as JSON alone, or as text for people."""
    typer.echo(json.dumps(plain(result), indent=2) if as_json else text(result))


# Verbs with which a message says something of an argument rather than of the thing it names.
VERBS = "must|needs?|is|are|has|have|takes?|goes|cannot|gives|says|counts?"


def with_options(settings: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command that takes `**settings` an option for each field of this dataclass that has a `help` in its metadata.

    Beside `help` a field may state its option's `name`, `read` (from the text of the shell to the value), and `shown`, the
    default as the help names it.
    """

    def add(command: Callable[..., None]) -> Callable[..., None]:
        own = signature(command, eval_str=True)
        kept = [each for each in own.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        types = get_type_hints(settings)
        stated = {each.name: each for each in fields(settings) if each.metadata.get("help")}
        for name, each in stated.items():
            more = each.metadata
            option = typer.Option(
                *filter(None, [more.get("name")]), help=more["help"], show_default=more.get("shown", True)
            )
            kind = str if "read" in more else bool if isinstance(each.default, bool) else types[name]
            default = str(each.default) if "read" in more else each.default
            kept.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]))

        @wraps(command)
        def run(**values: Any) -> None:
            for name in stated.keys() & values.keys():
                values[name] = stated[name].metadata.get("read", lambda value: value)(values[name])
            command(**values)

        run.__signature__ = own.replace(parameters=kept)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in kept}
        return run

    return add


def spellings(command: Any) -> dict[str, str]:
    """How the shell writes each parameter of a command (none where there is no command): `max_tokens` as `--max-tokens`, `text` as `TEXT`.

    A command calls its parameters as the library calls the arguments they become. Where the option is to have another
    name it is given one: `num_heads: Annotated[int, typer.Option("--heads")]`.
    """
    params = command.params if command else ()
    spelled = {
        each.name: max(each.opts, key=len) if each.param_type_name == "option" else each.metavar or each.name.upper()
        for each in params
    }
    # A switch may have a word for its opposite.
    return spelled | {f"{each.name}=False": each.secondary_opts[0] for each in params if each.secondary_opts}


def in_options(message: str, spelled: Mapping[str, str]) -> str:
    """An error of the library with the command's options in place of Python's arguments.

    A word is taken for an argument where it has an underscore, stands before `=`, is listed with other arguments, is to be
    left out, or begins a statement about itself ("layers must be ..."); elsewhere `layers` is an English word.

    >>> in_options("max_tokens must be 1 or more; got 0", {"max_tokens": "--max-tokens"})
    '--max-tokens must be 1 or more; got 0'
    >>> in_options("12 layers; give one of params, layers, or task='mlm'", {n: f"--{n}" for n in ("params", "layers", "task")})
    '12 layers; give one of --params, --layers, or --task mlm'
    >>> in_options("try another n or d, or sampler=...", {"n": "--n", "d": "--d"})
    'try another --n or --d'
    """
    names = "|".join(sorted(map(re.escape, spelled), key=len, reverse=True))
    if not names:
        return message
    one = rf"(?<![\w.'\"/-])(?:{names})(?![\w'\"/-])"

    def spell(text: str) -> str:
        return re.sub(one, lambda match: spelled[match[0]], text)

    def assign(match: re.Match[str]) -> str:
        value = match[2].strip("'\"").removeprefix("torch.")
        if f"{match[1]}={value}" in spelled:
            return spelled[f"{match[1]}={value}"]
        return spelled[match[1]] if value in ("True", "...") else f"{spelled[match[1]]} {value}"

    # One of what the library takes several of.
    message = re.sub(rf"(?<![\w.-])({names})s=\[([^],]*)\]", r"\1=\2", message)
    value = r"('[^']*'|\"[^\"]*\"|\.\.\.|\[[^]]*\]|[\w.+-]*\w)"
    message = re.sub(rf"\w+\(({names})={value}\)", assign, message)
    message = re.sub(rf"(?<![\w.-])({names})={value}", assign, message)
    several = rf"{one}(?:(?:,? and |,? or |, ){one})+"
    message = re.sub(
        rf"\b(?:one of|got|give|either|both|neither|another) {several}", lambda match: spell(match[0]), message
    )
    message = re.sub(rf"(?:^|(?<=[;:] )){one}(?= (?:{VERBS})\b)", lambda match: spell(match[0]), message)
    message = re.sub(rf"(?<=leave ){one}(?= out\b)", lambda match: spell(match[0]), message)
    message = re.sub(one, lambda match: spelled[match[0]] if "_" in match[0] else match[0], message)
    # What the shell has no option for is no advice there.
    message = re.sub(r",? or \w+=\.\.\.", "", message)
    # In the shell nothing is given by leaving an option out.
    return re.sub(r",? or None\b", "", message)


def check_outputs(
    files: Sequence[Path | None] = (),
    pictures: Sequence[Path | None] = (),
    *,
    overwrite: bool,
    reads: Sequence[Path | None] = (),
) -> list[Path]:
    """The files and pictures that a command is to write, those that were given, checked before any work is done."""
    for path in files:
        if path is not None:
            check_free(path, overwrite, reads)
    for path in pictures:
        if path is not None:
            # What a name without an ending becomes.
            check_free(path if path.suffix or not path.name else path.with_suffix(".png"), overwrite, reads)
            check_picture(path)
    return [path for path in (*files, *pictures) if path is not None]


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Warnings as one line each on standard error."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: typer.echo(f"heedful: {message}", err=True)
        yield

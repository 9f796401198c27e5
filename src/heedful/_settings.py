"""Settings that stand once: a frozen dataclass that a function, a class and a command of the shell take as their options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field, fields
from inspect import Parameter, signature
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def option(default: Any, help: str, **more: Any) -> Any:
    """A setting that the command line has an option for; `name`, `read` and `shown` say how it is written there."""
    return field(default=default, metadata={"help": help, **more})


def documented(settings: type[Any], **defaults: Any) -> Callable[[F], F]:
    """Shows the fields of a dataclass in the signature of a function that hands `**settings` on to it.

    `defaults` are those of the function where they differ from the dataclass.
    """

    def show(function: F) -> F:
        own = signature(function)
        first = [each for each in own.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        rest = [
            Parameter(
                each.name,
                Parameter.KEYWORD_ONLY,
                default=defaults.get(each.name, Parameter.empty if each.default is MISSING else each.default),
                annotation=each.type,
            )
            for each in fields(settings)
        ]
        function.__signature__ = own.replace(parameters=[*first, *rest])  # type: ignore[attr-defined]
        return function

    return show

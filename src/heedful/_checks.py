"""Checks of arguments, in one wording: what was expected, and what was given."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, TypeGuard, get_args

from heedful._errors import InvalidArgument


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether this counts something: an integer of Python's or numpy's, and no truth value.

    >>> is_whole(3), is_whole(True), is_whole(3.0)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether this is a real number, and no truth value.

    >>> is_number(3), is_number(0.5), is_number("3"), is_number(True)
    (True, True, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def check_whole(least: int = 1, most: int | None = None, *, optional: bool = False, **values: Any) -> None:
    """Refuses what is no whole number within bounds, both included; `optional` lets None pass.

    >>> check_whole(heads=0)
    Traceback (most recent call last):
    heedful._errors.InvalidArgument: heads must be a whole number from 1 on; got 0
    """
    for name, value in values.items():
        if value is None and optional:
            continue
        if not is_whole(value) or value < least or (most is not None and value > most):
            until = "on" if most is None else f"to {most}"
            raise InvalidArgument(
                f"{name} must be a whole number from {least} {until}{_or_none(optional)}; got {shown(value)}"
            )


def check_number(
    low: float = -math.inf,
    high: float = math.inf,
    *,
    least: float | None = None,
    most: float | None = None,
    optional: bool = False,
    **values: Any,
) -> None:
    """Refuses what is no number strictly between `low` and `high`, from `least` on and up to `most`; never NaN or infinite.

    >>> check_number(0, 1, rate=1.5)
    Traceback (most recent call last):
    heedful._errors.InvalidArgument: rate must be a number above 0 and below 1; got 1.5
    >>> check_number(least=0, decay=-1)
    Traceback (most recent call last):
    heedful._errors.InvalidArgument: decay must be a number from 0 on; got -1
    """
    for name, value in values.items():
        if value is None and optional:
            continue
        if (
            not is_number(value)
            or not low < value < high
            or abs(value) > sys.float_info.max
            or (least is not None and value < least)
            or (most is not None and value > most)
        ):
            raise InvalidArgument(
                f"{name} must be {_range(low, high, least, most)}{_or_none(optional)}; got {shown(value)}"
            )


def check_choice(choices: Iterable[Any] | Any, *, optional: bool = False, **values: Any) -> None:
    """Refuses what is none of the choices, a collection or a `Literal` type.

    >>> check_choice(("rows", "matrix"), output="row")
    Traceback (most recent call last):
    heedful._errors.InvalidArgument: output must be one of rows, matrix; got 'row'
    """
    known = get_args(choices) or tuple(choices)
    for name, value in values.items():
        if value is None and optional:
            continue
        if not any(type(value) is type(one) and value == one for one in known):
            raise InvalidArgument(
                f"{name} must be one of {', '.join(map(str, known))}{_or_none(optional)}; got {shown(value)}"
            )


def _range(low: float, high: float, least: float | None, most: float | None) -> str:
    bounds = [f"from {least:g}" if least is not None else f"above {low:g}" if low > -math.inf else ""]
    bounds.append(f"to {most:g}" if most is not None else f"below {high:g}" if high < math.inf else "")
    if least is not None and not bounds[1]:
        bounds[1] = "on"
    if least is not None and bounds[1].startswith("below"):
        bounds[1] = f"on, {bounds[1]}"
    joined = (" " if least is not None else " and ").join(filter(None, bounds))
    return f"a number {joined}" if joined else "a finite number"


def _or_none(optional: bool) -> str:
    return ", or None" if optional else ""


def shown(value: Any) -> str:
    """A value on one line, however long it is."""
    if is_whole(value) and abs(value) > sys.float_info.max:
        return "an integer beyond all floats"  # and perhaps of more digits than Python writes
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."

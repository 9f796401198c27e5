"""Results as JSON: one mixin for the frozen dataclasses that functions return, one converter of their values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar


class Result:
    """A frozen dataclass that tells itself as JSON: its public fields, less those in `_not`, and the properties in `_also`.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Fit(Result):
    ...     errors: tuple[float, ...]
    ...     model: object = None
    ...     _also, _not = ("largest",), ("model",)
    ...
    ...     @property
    ...     def largest(self):
    ...         return max(self.errors)
    >>> Fit((0.5, math.inf)).to_dict()
    {'errors': [0.5, None], 'largest': None}
    """

    _also: ClassVar[tuple[str, ...]] = ()
    _not: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON types alone; None for infinite numbers and NaN."""
        own = [name for name in _names(self) if not name.startswith("_") and name not in self._not]
        return {name: plain(getattr(self, name)) for name in (*own, *self._also)}


def plain(value: Any) -> Any:
    """A value as JSON types: results, dataclasses, named tuples, mappings, sequences, tensors and arrays; others as text.

    >>> plain({(1, 2): (math.nan, True)})
    {'(1, 2)': [None, True]}
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if hasattr(value, "tolist"):  # tensors, arrays, and their numbers
        return plain(value.tolist())
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif is_dataclass(value):
        value = {name: getattr(value, name) for name in _names(value)}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): plain(part) for key, part in value.items()}
    if isinstance(value, Sequence | Set):
        return [plain(part) for part in value]
    return str(value)


def _names(value: Any) -> list[str]:
    return [each.name for each in fields(value)]

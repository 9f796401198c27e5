"""Tables: predictions that look at other rows, missing cells filled in, and classes as places that points are carried to."""

from typing import TYPE_CHECKING

from heedful._lazy import lazy

# Name -> where it lives: files and networks need no scikit-learn.
_HOMES: dict[str, str] = {}

__all__: list[str] = []


__getattr__, __dir__ = lazy(__name__, _HOMES)

if TYPE_CHECKING:
    pass

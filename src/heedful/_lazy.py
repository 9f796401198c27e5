"""Names that are imported when they are first used, so that a package stays light."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`, from each public name and the module it lives in.

    A module is named from the package on, as `law` for `heedful.lens.depth.law`, or whole. A name that lives in a module of
    its own name is that module's attribute; one whose home is `""` is the module itself.

    >>> find, _ = lazy("heedful", {"kernels": "", "Softmax": "kernels"})
    >>> find("kernels").__name__, find("Softmax").__name__
    ('heedful.kernels', 'Softmax')
    """

    def find(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        whole = home if home.startswith("heedful.") else f"{package}.{home or name}"
        value = import_module(whole)
        if home:
            value = getattr(value, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return find, names

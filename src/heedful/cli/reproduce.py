"""`heedful reproduce`: the recipes of experiments/, one per published table, run from a checkout of the source."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import heedful
from heedful._errors import Unsupported


def root() -> Path:
    """The checkout that holds the recipes."""
    folder = Path(heedful.__file__).resolve().parents[2]
    if not (folder / "experiments").is_dir():
        raise Unsupported("the recipes lie in experiments/ of heedful's source; run heedful from a checkout of it")
    return folder


def recipes() -> Any:
    """The module `experiments.recipe` of the checkout: `listing`, `reproduce`, `page`."""
    if str(root()) not in sys.path:
        sys.path.insert(0, str(root()))
    return import_module("experiments.recipe")

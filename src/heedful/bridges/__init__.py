"""Bridges to other frameworks; each is imported where it is used."""

from importlib import import_module
from types import ModuleType

__all__ = ["answers", "configs", "estimator", "local", "rotation", "training", "transformers", "watch"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return import_module(f"heedful.bridges.{name}")
    raise AttributeError(f"module 'heedful.bridges' has no attribute {name!r}")

"""Bridges to other frameworks; each is imported where it is used."""

from heedful._lazy import lazy

__all__ = ["answers", "configs", "estimator", "reading", "rotation", "sentences", "training", "transformers", "watch"]

__getattr__, __dir__ = lazy(__name__, dict.fromkeys(__all__, ""))

"""Lenses: reading what attention does inside a model somebody already has."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Name -> where it lives; a module stands for itself. Nothing is imported before it is used: `heedful plan` needs no torch.
_HOMES = {
    **dict.fromkeys(("AttentionSummary", "HeadSummary", "TokenPair", "summarize"), "attention"),
    **dict.fromkeys(("LayerRecord", "Observation", "observe"), "observation"),
    **dict.fromkeys(("LookResult", "ModelFacts", "look"), "report"),
    "Reference": "pronouns",
    "Role": "roles",
    **dict.fromkeys(("Finding", "Section", "Subject"), "sections"),
    **dict.fromkeys(("MatrixSpectrum", "Spectrum", "spectrum"), "spectra"),
}
_MODULES = ("causes", "depth", "symmetry")

__all__ = [
    "AttentionSummary",
    "Finding",
    "HeadSummary",
    "LayerRecord",
    "LookResult",
    "MatrixSpectrum",
    "ModelFacts",
    "Observation",
    "Reference",
    "Role",
    "Section",
    "Spectrum",
    "Subject",
    "TokenPair",
    "causes",
    "depth",
    "look",
    "observe",
    "spectrum",
    "summarize",
    "symmetry",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"heedful.lens.{_HOMES[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"heedful.lens.{name}")
    else:
        raise AttributeError(f"module 'heedful.lens' has no attribute {name!r}")
    globals()[name] = value
    return value


if TYPE_CHECKING:
    from heedful.lens import causes, depth, symmetry
    from heedful.lens.attention import AttentionSummary, HeadSummary, TokenPair, summarize
    from heedful.lens.observation import LayerRecord, Observation, observe
    from heedful.lens.pronouns import Reference
    from heedful.lens.report import LookResult, ModelFacts, look
    from heedful.lens.roles import Role
    from heedful.lens.sections import Finding, Section, Subject
    from heedful.lens.spectra import MatrixSpectrum, Spectrum, spectrum

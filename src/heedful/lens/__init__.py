"""Lenses: reading what attention does inside a model somebody already has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heedful._lazy import lazy

# Name -> where it lives, "" for a module itself. Nothing is imported before it is used: `heedful plan` needs no torch.
_HOMES = {
    **dict.fromkeys(("AttentionSummary", "HeadSummary", "TokenPair", "summarize"), "attention"),
    "LayerRecord": "_record",
    **dict.fromkeys(("Observation", "observe"), "observation"),
    **dict.fromkeys(("LookResult", "ModelFacts", "look"), "looking"),
    "Reference": "pronouns",
    "Role": "roles",
    **dict.fromkeys(("Finding", "Section"), "heedful.report"),
    "Subject": "sections",
    **dict.fromkeys(("Flow", "flow"), "flows"),
    **dict.fromkeys(("MatrixSpectrum", "Spectrum", "spectrum"), "spectra"),
    **dict.fromkeys(("causes", "corpus", "depth", "flows", "symmetry", "transport"), ""),
}

__all__ = [
    "AttentionSummary",
    "Finding",
    "Flow",
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
    "corpus",
    "depth",
    "flow",
    "flows",
    "look",
    "observe",
    "spectrum",
    "summarize",
    "symmetry",
    "transport",
]


__getattr__, __dir__ = lazy(__name__, _HOMES)

if TYPE_CHECKING:
    from heedful.lens import causes, corpus, depth, flows, symmetry, transport
    from heedful.lens._record import LayerRecord
    from heedful.lens.attention import AttentionSummary, HeadSummary, TokenPair, summarize
    from heedful.lens.flows import Flow, flow
    from heedful.lens.looking import LookResult, ModelFacts, look
    from heedful.lens.observation import Observation, observe
    from heedful.lens.pronouns import Reference
    from heedful.lens.roles import Role
    from heedful.lens.sections import Subject
    from heedful.lens.spectra import MatrixSpectrum, Spectrum, spectrum

"""Causal discovery from a covariance or an independence oracle: ICD, FCI, PC, the graphs they learn, and how far to trust them."""

from __future__ import annotations

from heedful._lazy import lazy

# Name -> the file it lives in; nothing is imported before it is used.
_HOMES = {
    **dict.fromkeys(("Edge", "PAG"), "graph"),
    **dict.fromkeys(("DSeparation", "Decisions", "FisherZ", "IndependenceTest", "RhoThreshold"), "independence"),
    **dict.fromkeys(("RowFisherZ", "correlation", "log_p_value"), "independence"),
    **dict.fromkeys(("ARROW", "CIRCLE", "NONE", "TAIL", "DsepTree", "Links"), "paths"),
    **dict.fromkeys(("Row", "Tests"), "record"),
    **dict.fromkeys(("discover", "discover_data", "fci", "icd", "pc"), "learners"),
    **dict.fromkeys(("Trust", "structure_confidence"), "confidence"),
}

__all__ = sorted(_HOMES)


__getattr__, __dir__ = lazy(__name__, _HOMES)

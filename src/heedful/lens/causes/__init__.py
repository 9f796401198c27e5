"""Causal graphs: from any covariance, any independence oracle, or the attention of a model somebody already has."""

from __future__ import annotations

from heedful._lazy import lazy

# Name -> the file it lives in; nothing is imported before it is used.
_HOMES = {
    **dict.fromkeys(("ARROW", "CIRCLE", "NONE", "TAIL", "Edge", "PAG"), "graph"),
    **dict.fromkeys(
        (
            "DSeparation",
            "Decisions",
            "FisherZ",
            "IndependenceTest",
            "RhoThreshold",
            "RowFisherZ",
            "correlation",
            "log_p_value",
        ),
        "independence",
    ),
    "DsepTree": "paths",
    **dict.fromkeys(("Row", "Tests"), "record"),
    **dict.fromkeys(("discover", "discover_data", "fci", "icd", "pc"), "learners"),
    **dict.fromkeys(("Trust", "structure_confidence"), "confidence"),
    **dict.fromkeys(("attention_correlation", "attention_factor", "sem_weights", "weights_of"), "covariance"),
    **dict.fromkeys(("Stability", "stability"), "sweeps"),
    "AttentionCausalGraph": "attention_graph",
    **dict.fromkeys(("CausalExplainer", "Effect", "Explanation", "Removal", "WordScore", "explain"), "explanation"),
    **dict.fromkeys(("Recommender", "Seen", "Task", "TextModel"), "tasks"),
    **dict.fromkeys(("Found", "Inquiry", "Replies", "Reply", "exhaustive", "pruned", "search"), "searching"),
    **dict.fromkeys(("BaselineResult", "compare"), "baselines"),
    "section": "page",
}

__all__ = sorted(_HOMES)


__getattr__, __dir__ = lazy(__name__, _HOMES)

"""What attention says about causes: graphs over a model's tokens, and the words whose removal changes its answer."""

from __future__ import annotations

from heedful import discovery
from heedful._lazy import lazy

# Name -> the file it lives in; nothing is imported before it is used.
_HOMES = {
    # A graph from attention is one of `discovery`, whose names are at hand here.
    **dict.fromkeys(discovery.__all__, "heedful.discovery"),
    **dict.fromkeys(
        ("attention_correlation", "attention_factor", "sem_weights", "values_of", "weights_of"), "covariance"
    ),
    **dict.fromkeys(("Stability", "stability"), "sweeps"),
    "AttentionCausalGraph": "attention_graph",
    **dict.fromkeys(("CausalExplainer", "explain"), "explanation"),
    "ExplainSettings": "settings",
    **dict.fromkeys(("Effect", "Explanation", "Removal", "WordScore"), "result"),
    **dict.fromkeys(("Seen", "Task"), "questions"),
    "Recommender": "items",
    "TextModel": "texts",
    **dict.fromkeys(("Found", "Inquiry", "Replies", "Reply", "exhaustive", "pruned", "search"), "searching"),
    **dict.fromkeys(("BaselineResult", "compare"), "baselines"),
}

__all__ = sorted(_HOMES)


__getattr__, __dir__ = lazy(__name__, _HOMES)

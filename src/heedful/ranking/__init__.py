"""Ranking: exact search, result lists re-scored by their context, and how good an order is."""

from typing import TYPE_CHECKING

from heedful._lazy import lazy

# Name -> the file it lives in; nothing is imported before it is used.
_HOMES = {
    "Ranking": "result",
    "Library": "library",
    "ListAttention": "looking",
    "ListEncoder": "encoder",
    "ListReranker": "reranker",
    **dict.fromkeys(("Hit", "Hits", "Neighbour", "Update"), "hits"),
    **dict.fromkeys(("Passage", "read_passages"), "passages"),
    "nearest": "search",
    **dict.fromkeys(
        ("alpha_query_expansion", "average_query_expansion", "cosine", "database_augmentation"), "expansion"
    ),
    "k_reciprocal": "reciprocal",
    "diffusion": "diffusing",
    **dict.fromkeys(("affinity", "super_global"), "listwise"),
    **dict.fromkeys(("METHODS", "rerank"), "methods"),
    **dict.fromkeys(
        (
            "Revisited",
            "average_precision",
            "mean_average_precision",
            "ndcg",
            "precision_at",
            "recall_at",
            "relevance_by_label",
            "revisited",
        ),
        "metrics",
    ),
}

__all__ = [
    "Hit",
    "Hits",
    "Library",
    "ListAttention",
    "ListEncoder",
    "ListReranker",
    "METHODS",
    "Neighbour",
    "Passage",
    "Ranking",
    "Revisited",
    "Update",
    "affinity",
    "alpha_query_expansion",
    "average_precision",
    "average_query_expansion",
    "cosine",
    "database_augmentation",
    "diffusion",
    "k_reciprocal",
    "mean_average_precision",
    "ndcg",
    "nearest",
    "precision_at",
    "read_passages",
    "recall_at",
    "relevance_by_label",
    "rerank",
    "revisited",
    "super_global",
]


__getattr__, __dir__ = lazy(__name__, _HOMES)

if TYPE_CHECKING:
    from heedful.ranking.diffusing import diffusion
    from heedful.ranking.encoder import ListEncoder
    from heedful.ranking.expansion import (
        alpha_query_expansion,
        average_query_expansion,
        cosine,
        database_augmentation,
    )
    from heedful.ranking.hits import Hit, Hits, Neighbour, Update
    from heedful.ranking.library import Library
    from heedful.ranking.listwise import affinity, super_global
    from heedful.ranking.looking import ListAttention
    from heedful.ranking.methods import METHODS, rerank
    from heedful.ranking.metrics import (
        Revisited,
        average_precision,
        mean_average_precision,
        ndcg,
        precision_at,
        recall_at,
        relevance_by_label,
        revisited,
    )
    from heedful.ranking.passages import Passage, read_passages
    from heedful.ranking.reciprocal import k_reciprocal
    from heedful.ranking.reranker import ListReranker
    from heedful.ranking.result import Ranking
    from heedful.ranking.search import nearest

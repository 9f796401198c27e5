"""Corpus: who stands near whom in a text, counted exactly; word vectors and attention read off the counts.

>>> from heedful.corpus import Cooccurrence
>>> counter = Cooccurrence(window=2, weighting="uniform").fit(["the sea and the sand", "the sea"])
>>> counter.vocabulary_.words
['the', 'sea', 'and', 'sand']
>>> counter.counts()[0, 1]
np.float64(2.0)
"""

from typing import TYPE_CHECKING

from heedful._lazy import lazy

# Name -> the file it lives in; nothing is imported before it is used.
_HOMES = {
    "Cooccurrence": "counting",
    "Vocabulary": "vocabulary",
    "CorpusAttention": "attention",
    **dict.fromkeys(("Cloze", "ClozeScore"), "cloze"),
    "PositionEnergy": "positions",
    "project": "projection",
    "association": "associations",
    "WordVectors": "vectors",
    "AttentionMap": "weights",
    **dict.fromkeys(("AnalogyScore", "Neighbours", "PairScore"), "similarity"),
    **dict.fromkeys(("read_glove_counts", "write_glove_counts"), "exchange"),
    **dict.fromkeys(("Glove", "glove"), "gloves"),
    **dict.fromkeys(("Factors", "directional", "symmetric"), "factors"),
}

__all__ = [
    "AnalogyScore",
    "AttentionMap",
    "Cloze",
    "ClozeScore",
    "Cooccurrence",
    "CorpusAttention",
    "Factors",
    "Glove",
    "Neighbours",
    "PairScore",
    "PositionEnergy",
    "Vocabulary",
    "WordVectors",
    "association",
    "directional",
    "glove",
    "project",
    "read_glove_counts",
    "symmetric",
    "write_glove_counts",
]


__getattr__, __dir__ = lazy(__name__, _HOMES)

if TYPE_CHECKING:
    from heedful.corpus.associations import association
    from heedful.corpus.attention import CorpusAttention
    from heedful.corpus.cloze import Cloze, ClozeScore
    from heedful.corpus.counting import Cooccurrence
    from heedful.corpus.exchange import read_glove_counts, write_glove_counts
    from heedful.corpus.factors import Factors, directional, symmetric
    from heedful.corpus.gloves import Glove, glove
    from heedful.corpus.positions import PositionEnergy
    from heedful.corpus.projection import project
    from heedful.corpus.similarity import AnalogyScore, Neighbours, PairScore
    from heedful.corpus.vectors import WordVectors
    from heedful.corpus.vocabulary import Vocabulary
    from heedful.corpus.weights import AttentionMap

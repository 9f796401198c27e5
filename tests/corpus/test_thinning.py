"""Frequent words left out at random: the same ones however a corpus is cut, as often as the formula says."""

import math

import numpy as np
import pytest

from heedful import InvalidArgument
from heedful.corpus import Cooccurrence, Vocabulary
from heedful.corpus._thinning import chances, thinned


def corpus(documents=211, seed=0):
    """Words of which the first are frequent."""
    g = np.random.default_rng(seed)
    return [" ".join(f"w{word}x" for word in g.zipf(1.5, g.integers(0, 29)) if word < 50) for _ in range(documents)]


def counter(**options):
    return Cooccurrence(3, **{"subsample": 0.01, "seed": 7, "progress": False, "tokenizer": str.split} | options)


@pytest.mark.parametrize("unknown", ["squeeze", "keep"])
def test_counts_are_those_of_what_is_left(unknown):
    texts = corpus()
    counts = counter(unknown=unknown).fit(texts)
    vocabulary = counts.vocabulary_
    total = sum(vocabulary.counts)
    chance = [min(1.0, math.sqrt(0.01 / (count / total))) for count in vocabulary.counts]
    np.testing.assert_allclose(chances(vocabulary.counts, 0.01), chance)
    left, size = [], len(vocabulary)
    for text in texts:
        ids = vocabulary.encode(text.split())
        rest = thinned(ids, np.array([len(ids)]), np.array(chance), 7)
        assert set(rest.tolist()) <= {*ids.tolist(), -1}
        left.append(rest[rest >= 0] if unknown == "squeeze" else rest)
    wanted = np.zeros((size, size))
    for ids in left:
        for t, later in enumerate(ids):
            for distance in range(1, min(3, t) + 1):
                if later >= 0 and ids[t - distance] >= 0:
                    wanted[ids[t - distance], later] += 1 / distance
    np.testing.assert_allclose(counts.counts().toarray(), wanted)
    assert counts.tokens_ == total, "words that are left out are words of the corpus all the same"
    assert wanted.sum() < 0.8 * Cooccurrence(3, progress=False, tokenizer=str.split).fit(texts).counts().sum()


def test_words_stay_as_often_as_the_formula_says():
    g = np.random.default_rng(1)
    ids, chance = g.integers(0, 3, 60_000), np.array([0.1, 0.5, 1.0])
    rest = thinned(ids, np.full(2000, 30), chance, 0)
    shares = [(rest[ids == word] == word).mean() for word in range(3)]
    assert shares == pytest.approx([0.1, 0.5, 1.0], abs=0.012)
    # Neighbours in a document, and the same place of two documents, are drawn apart.
    gone = (rest.reshape(2000, 30) < 0)[:, :, None] & (ids.reshape(2000, 30, 1) == 1)
    same = ids.reshape(2000, 30) == 1
    both = same[:, 1:] & same[:, :-1]
    assert (gone[:, 1:, 0] & gone[:, :-1, 0])[both].mean() == pytest.approx(0.25, abs=0.02)
    other = thinned(ids, np.full(2000, 30), chance, 1)
    assert 0.3 < (rest == other)[ids == 1].mean() < 0.7


def test_neither_cut_nor_order_matter(tmp_path):
    texts = corpus()
    wanted = counter().fit(texts).counts()
    pieces = counter()
    for start in range(0, len(texts), 37):
        pieces.partial_fit(texts[start : start + 37])
    halves = counter().fit(texts[100:]).merge(counter().fit(texts[:100]))
    known = Vocabulary(pieces.vocabulary_.words, pieces.vocabulary_.counts)
    others = (
        pieces,
        halves,
        counter().fit(texts[::-1]),
        counter(vocabulary=known).fit(texts),
        counter(folder=tmp_path / "folder").fit(texts),
        counter(engine="numpy", max_memory=10_000).fit(texts),
    )
    for other in others:
        assert (other.counts() != wanted).nnz == 0
    assert (counter(seed=8).fit(texts).counts() != wanted).nnz > 0
    pieces.save_pretrained(tmp_path / "kept")
    again = Cooccurrence.from_pretrained(tmp_path / "kept")
    assert (again.subsample, again.seed) == (0.01, 7)
    assert (again.counts() != wanted).nnz == 0


def test_refusals(tmp_path):
    for value in (0.0, -1.0, math.nan, "often"):
        with pytest.raises(InvalidArgument, match="subsample must be a number above 0"):
            counter(subsample=value)
    with pytest.raises(InvalidArgument, match="how often words occur"):
        counter(vocabulary=Vocabulary(["a", "b"]))
    with pytest.raises(InvalidArgument, match="how often words occur"):
        counter(vocabulary=9)
    with pytest.raises(InvalidArgument, match="one seed can be merged"):
        counter().fit(corpus()).merge(counter(seed=8).fit(corpus()))
    counter(folder=tmp_path).fit(corpus())
    with pytest.raises(InvalidArgument, match="another subsample"):
        counter(folder=tmp_path, subsample=0.1).fit(corpus())

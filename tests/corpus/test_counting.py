"""Counts of pairs against plain loops over documents, and against one another however the corpus is cut."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from math import exp

import numpy as np
import pandas
import pytest

from heedful import InvalidArgument
from heedful.corpus import Cooccurrence, CorpusAttention, Vocabulary

TEXTS = [
    "the sea is wide and the sand is warm",
    "a ship on the sea",
    "",
    "sand",
    "the the the sea",
    "it's a warm wide sea and a ship and the sand",
]
WEIGHTS = {
    "inverse": lambda distance, window: Fraction(1, distance),
    "linear": lambda distance, window: Fraction(window + 1 - distance, window),
    "uniform": lambda distance, window: Fraction(1),
}


def oracle(documents, words, window, *, keep, distance=None, weight=None):
    """Pairs one by one, exact fractions, a dictionary."""
    counts = Counter()
    for document in documents:
        line = list(document) if keep else [word for word in document if word in words]
        for s, earlier in enumerate(line):
            for t in range(s + 1, len(line)):
                if t - s <= window and earlier in words and line[t] in words and distance in (None, t - s):
                    counts[words.index(earlier), words.index(line[t])] += weight(t - s) if weight else 1
    matrix = np.zeros((len(words), len(words)))
    for cell, value in counts.items():
        matrix[cell] = float(value)
    return matrix


def drawn(seed, number=37, most=23, kinds=29):
    """Documents of unequal lengths, some empty, words by Zipf's law."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, most, number)
    return [[f"w{word % kinds}" for word in draw.zipf(1.5, length)] for length in lengths]


def frequent(documents, least=1):
    counts = Counter(word for document in documents for word in document)
    return [word for word, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if count >= least]


@pytest.mark.parametrize("weighting", WEIGHTS)
@pytest.mark.parametrize("unknown", ["squeeze", "keep"])
@pytest.mark.parametrize("per_distance", [False, True])
def test_equal_to_enumeration(weighting, unknown, per_distance):
    documents = drawn(3)
    words = frequent(documents, 3)
    assert len(words) < len(frequent(documents)), "some words are unknown"
    counter = Cooccurrence(3, weighting, min_count=3, unknown=unknown, per_distance=per_distance, progress=False).fit(
        documents
    )
    assert counter.vocabulary_.words == words
    expected = oracle(documents, words, 3, keep=unknown == "keep", weight=lambda d: WEIGHTS[weighting](d, 3))
    got = counter.counts()
    assert got.dtype == np.float64
    assert (got.toarray() == expected).all()
    assert (counter.counts(directed=False).toarray() == expected + expected.T).all()
    if per_distance:
        for distance in (1, 2, 3):
            apart = oracle(documents, words, 3, keep=unknown == "keep", distance=distance)
            assert (counter.counts(distance).toarray() == apart).all()
    assert counter.tokens_ == sum(map(len, documents))
    assert counter.documents_ == len(documents)
    flat = [word for document in documents for word in document]
    assert counter.word_counts_.tolist() == [flat.count(word) for word in words]


def test_by_hand():
    """a x b b with x unknown, window 2: `squeeze` sees a b b, `keep` sees a _ b b."""
    vocabulary = Vocabulary(["a", "b"])
    squeezed = Cooccurrence(2, vocabulary=vocabulary, progress=False).fit(["a x b b"]).counts().toarray()
    kept = Cooccurrence(2, vocabulary=vocabulary, unknown="keep", progress=False).fit(["a x b b"]).counts().toarray()
    assert squeezed.tolist() == [[0, 1.5], [0, 1]]
    assert kept.tolist() == [[0, 0.5], [0, 1]]


@pytest.mark.parametrize("weighting", ["exponential", lambda distance: 1 / (1 + distance) ** 2])
def test_weights_that_are_no_fractions(weighting):
    documents = drawn(5)
    words = frequent(documents)
    weight = weighting if callable(weighting) else lambda distance: exp(-2 * distance / 5)
    counter = Cooccurrence(5, weighting, progress=False).fit(documents)
    expected = sum(weight(d) * oracle(documents, words, 5, keep=False, distance=d) for d in range(1, 6))
    np.testing.assert_allclose(counter.counts().toarray(), expected, rtol=1e-14)


def test_window_beyond_common_denominators():
    documents = drawn(7, number=5, most=61)
    counter = Cooccurrence(29, progress=False).fit(documents)
    expected = oracle(documents, frequent(documents), 29, keep=False, weight=lambda d: Fraction(1, d))
    np.testing.assert_allclose(counter.counts().toarray(), expected, rtol=1e-13)


@pytest.mark.parametrize("weighting", ["inverse", "exponential"])
@pytest.mark.parametrize("settled", [False, True])
def test_pieces_and_merges_are_equal_to_the_bit(weighting, settled):
    documents = drawn(11, number=101)
    options = {"vocabulary": Vocabulary(frequent(documents, 3))} if settled else {"min_count": 3}
    options |= {"weighting": weighting, "window": 7, "progress": False}
    whole = Cooccurrence(**options).fit(documents)
    draw = np.random.default_rng(13)
    cuts = [0, *sorted(draw.choice(101, 7, replace=False)), 101]
    pieces = [documents[start:stop] for start, stop in pairwise(cuts)]
    partial = Cooccurrence(**options)
    merged = Cooccurrence(**options)
    for piece in pieces:
        partial.partial_fit(piece)
        if draw.random() < 0.5:
            partial.counts()
        merged.merge(Cooccurrence(**options).partial_fit(piece))
    for other in (partial, merged):
        assert other.vocabulary_ == whole.vocabulary_
        assert (other.counts() != whole.counts()).nnz == 0
        assert other.counts().nnz == whole.counts().nnz > 100
        assert (other.word_counts_ == whole.word_counts_).all()
        assert (other.tokens_, other.documents_) == (whole.tokens_, whole.documents_)


def test_long_documents_are_counted_in_pieces(monkeypatch):
    documents = drawn(17, number=3, most=211)
    whole = Cooccurrence(5, progress=False).fit(documents)
    monkeypatch.setattr("heedful.corpus._pairs.PIECE", 13)
    assert (Cooccurrence(5, progress=False).fit(documents).counts() != whole.counts()).nnz == 0


def test_invariants():
    documents = drawn(19)
    counter = Cooccurrence(31, "uniform", per_distance=True, progress=False).fit(documents)
    for distance in (1, 2, 30):
        pairs = sum(max(len(document) - distance, 0) for document in documents)
        assert counter.counts(distance).sum() == pairs
    symmetric = counter.counts(directed=False)
    assert (symmetric != symmetric.T).nnz == 0
    # A window beyond all documents: every ordered pair of tokens, those of a token with itself being the counts.
    occurrences = np.array([[document.count(word) for word in counter.vocabulary_] for document in documents])
    everything = symmetric.toarray() + np.diag(counter.word_counts_)
    assert (everything == occurrences.T @ occurrences).all()
    # Other names in the same order of frequency and alphabet permute nothing.
    renamed = Cooccurrence(31, "uniform", progress=False).fit([[f"z{word}" for word in d] for d in documents])
    assert (renamed.counts() != counter.counts()).nnz == 0


def test_what_a_corpus_may_be(tmp_path):
    words = [text.split() for text in TEXTS]
    expected = Cooccurrence(3, progress=False).fit(words)
    file = tmp_path / "corpus.txt"
    file.write_text("\n".join(TEXTS))
    for corpus in (TEXTS, iter(TEXTS), file, str(file), tmp_path, [file]):
        counter = Cooccurrence(3, progress=False).fit(corpus)
        assert counter.vocabulary_ == expected.vocabulary_
        assert (counter.counts() != expected.counts()).nnz == 0
    ids = [expected.vocabulary_.encode(line) for line in words]
    for vocabulary in (None, len(expected.vocabulary_), expected.vocabulary_):
        counter = Cooccurrence(3, vocabulary=vocabulary, progress=False).fit(ids)
        assert (counter.counts() != expected.counts()).nnz == 0
    split = Cooccurrence(3, tokenizer=str.split, progress=False).fit(TEXTS)
    assert (split.counts() != expected.counts()).nnz == 0


def test_a_tokenizer_of_hugging_face():
    tokenizers = pytest.importorskip("tokenizers", reason="comes with the extra hf")
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "the", "sea", "sand", "is"]
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]")
    split = [[word if word in words else "[UNK]" for word in text.replace("it's", "x y z").split()] for text in TEXTS]
    for tokenizer in (plain, wrapped):
        counter = Cooccurrence(3, tokenizer=tokenizer, progress=False).fit(TEXTS)
        assert counter.vocabulary_.words == words
        expected = oracle(split, words, 3, keep=False, weight=lambda d: Fraction(1, d))
        assert (counter.counts().toarray() == expected).all()


def test_saved_and_loaded(tmp_path):
    documents = drawn(23)
    for place, options in enumerate(({"min_count": 2}, {"per_distance": True}, {"weighting": lambda d: 1 / (d + 1)})):
        counter = Cooccurrence(5, **options, progress=False).fit(documents)
        counter.save_pretrained(tmp_path / str(place))
        again = Cooccurrence.from_pretrained(tmp_path / str(place))
        assert again.vocabulary_ == counter.vocabulary_
        assert (again.word_counts_ == counter.word_counts_).all()
        assert (again.counts() != counter.counts()).nnz == 0
        assert (again.tokens_, again.documents_) == (counter.tokens_, counter.documents_)
        # A vocabulary that was saved is settled: more of the same doubles everything.
        again.partial_fit(documents)
        np.testing.assert_allclose(again.counts().toarray(), 2 * counter.counts().toarray(), rtol=1e-15)


def test_a_tokenizer_that_is_not_kept(tmp_path):
    texts, more = ["The cat sat", "The dog sat"], ["The dog new"]
    counter = Cooccurrence(4, tokenizer=str.split, progress=False).fit(texts)
    counter.save_pretrained(tmp_path / "own")
    again = Cooccurrence.from_pretrained(tmp_path / "own")
    again.save_pretrained(tmp_path / "twice")
    for loaded in (again, Cooccurrence.from_pretrained(tmp_path / "twice")):
        assert (loaded.counts() != counter.counts()).nnz == 0
        for call, argument in (
            (CorpusAttention(loaded).ids, more[0]),
            (loaded.partial_fit, more),
            (loaded.fit, more),
        ):
            with pytest.raises(
                InvalidArgument, match=r"a tokenizer that is not kept, str\.split; .* give lists of words"
            ):
                call(argument)
    again = Cooccurrence.from_pretrained(tmp_path / "own")
    by_words = again.partial_fit([text.split() for text in more])
    given = Cooccurrence.from_pretrained(tmp_path / "own", tokenizer=str.split).partial_fit(more)
    assert (given.counts() != by_words.counts()).nnz == 0
    assert given.word_counts_[given.vocabulary_.index("The")] == 3
    assert CorpusAttention(given).ids("The cat").tolist() == CorpusAttention(counter).ids("The cat").tolist()
    Cooccurrence(4, progress=False).fit(texts).save_pretrained(tmp_path / "words")
    assert "tokenizer" not in (tmp_path / "words" / "config.json").read_text()
    assert Cooccurrence.from_pretrained(tmp_path / "words").partial_fit(more).tokens_ == 9


def test_refusals(tmp_path):
    for options, message in (
        ({"window": 0}, "window must be a whole number from 1 on; got 0"),
        ({"weighting": "cubic"}, "weighting must be one of inverse, linear, uniform, exponential"),
        ({"weighting": lambda distance: -1.0}, r"weighting\(1\) must be a number from 0 on"),
        ({"unknown": "drop"}, "unknown must be one of"),
        ({"vocabulary": 5, "min_count": 2}, "with a vocabulary leave them out"),
        ({"tokenizer": 5}, "tokenizer must be"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            Cooccurrence(**options)
    counter = Cooccurrence(vocabulary=5, progress=False)
    with pytest.raises(InvalidArgument, match="token numbers must be from 0 to 4"):
        counter.fit([np.array([0, 5])])
    with pytest.raises(InvalidArgument, match="no word of the corpus occurs min_count=17 times"):
        Cooccurrence(min_count=17, progress=False).fit(TEXTS)
    with pytest.raises(InvalidArgument, match="a text itself goes into a list"):
        Cooccurrence().fit("no such file, but a sentence")
    with pytest.raises(InvalidArgument, match="a corpus is a file"):
        Cooccurrence().fit(5)
    with pytest.raises(InvalidArgument, match="some documents are words and others token numbers"):
        Cooccurrence(progress=False).fit([["a"], [1]])
    with pytest.raises(InvalidArgument, match="per_distance=True"):
        Cooccurrence(progress=False).fit(TEXTS).counts(1)
    with pytest.raises(InvalidArgument, match="nothing is counted yet"):
        Cooccurrence().counts()
    with pytest.raises(InvalidArgument, match="counters of one window"):
        Cooccurrence(2).merge(Cooccurrence(3))
    with pytest.raises(InvalidArgument, match="counters of one vocabulary"):
        Cooccurrence(vocabulary=3).merge(Cooccurrence(vocabulary=5))
    with pytest.raises(InvalidArgument, match="merge takes another Cooccurrence; got int"):
        Cooccurrence().merge(3)
    for one, other in ((str.split, None), (lambda text: text.split(), lambda text: text.lower().split())):
        counters = [Cooccurrence(tokenizer=tokenizer, progress=False).fit(TEXTS) for tokenizer in (one, other)]
        with pytest.raises(InvalidArgument, match="counters of one tokenizer"):
            counters[0].merge(counters[1])
    for corpus, message in (
        ({"a": "b c"}, r"got a dict, which gives its names: give its values\(\)"),
        (pandas.DataFrame({"text": TEXTS}), r"got a DataFrame, which gives its names: give a column of it"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            Cooccurrence(progress=False).fit(corpus)
    for texts in (pandas.DataFrame({"text": TEXTS})["text"], np.array(TEXTS)):
        assert Cooccurrence(progress=False).fit(texts).documents_ == len(TEXTS)
    for place, (corpus, message) in enumerate(
        (
            ([["a", 1]], "each a string; got 1"),
            ([["a", ["b"]]], r"each a string; got \['b'\]"),
            ([[1, "a"]], "whole numbers; got"),
            ([[1, 2.5]], "whole numbers; got"),
            ([[1, [2]]], "whole numbers; got"),
            (np.zeros((2, 3, 5), np.int64), "whole numbers; got"),
            ([np.array(3)], "a document is a text"),
        )
    ):
        for folder in (None, tmp_path / f"count{place}"):
            with pytest.raises(InvalidArgument, match=message):
                Cooccurrence(folder=folder, progress=False).fit(corpus)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InvalidArgument, match="is no text in UTF-8"):
        Cooccurrence().fit(tmp_path / "latin.txt")


def test_vocabulary():
    vocabulary = Vocabulary.of({"b": 2, "a": 2, "c": 5, "d": 1}, min_count=2)
    assert vocabulary.words == ["c", "a", "b"]
    assert vocabulary.counts.tolist() == [5, 2, 2]
    assert Vocabulary.of({"b": 2, "a": 2, "c": 5}, max_size=2).words == ["c", "a"]
    assert vocabulary.index("b") == 2
    assert vocabulary.encode(["d", "a"]).tolist() == [-1, 1]
    assert vocabulary.decode([2, 0]) == ["b", "c"]
    assert "a" in vocabulary
    assert "d" not in vocabulary
    assert len(vocabulary) == 3
    assert list(vocabulary) == vocabulary.words
    assert Vocabulary.from_dict(vocabulary.to_dict()) == vocabulary
    with pytest.raises(InvalidArgument, match="'d' is not among the 3 words"):
        vocabulary.index("d")
    with pytest.raises(InvalidArgument, match="'a' is there twice"):
        Vocabulary(["a", "b", "a"])


def test_numbers_are_no_documents():
    with pytest.raises(
        InvalidArgument, match="a document is a text, a list of words or an array of token numbers; got 3"
    ):
        Cooccurrence(progress=False).fit([3, 4])

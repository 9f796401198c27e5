"""Word vectors against dense decompositions and loops, the forms in which counts and texts come, and other programs' files."""

import math
import struct

import numpy as np
import pytest
from scipy.sparse import csr_array, random_array
from scipy.stats import spearmanr

from heedful import InvalidArgument
from heedful._installed import installed_texts
from heedful.bridges.estimator import Estimator
from heedful.corpus import (
    Cooccurrence,
    Vocabulary,
    WordVectors,
    association,
    glove,
    read_glove_counts,
    write_glove_counts,
)

TEXTS = [
    "the king rules the land and the queen rules the land",
    "a man walks on the land and a woman walks on the land",
    "the king is a man and the queen is a woman",
    "the sea is deep and the lake is deep",
    "boats sail on the sea and boats sail on the lake",
    "a king and a queen sail on the sea",
    "the woman walks to the lake and the man walks to the sea",
]


def counter(**options):
    return Cooccurrence(3, progress=False, **options).fit(TEXTS)


def ppmi(counts, alpha=0.75):
    """Written cell by cell."""
    dense = counts.toarray()
    shares = dense.sum(0) ** alpha
    shares /= shares.sum()
    result = np.zeros_like(dense)
    for a, b in zip(*np.nonzero(dense), strict=True):
        result[a, b] = max(0.0, math.log(dense[a, b] / dense[a].sum() / shares[b]))
    return result


@pytest.mark.parametrize("power", [0.0, 0.3, 1.0])
def test_products_of_both_sides_are_associations(power):
    counts = counter()
    size = len(counts.vocabulary_)
    wanted = ppmi(counts.counts(directed=False))
    model = WordVectors(size, power=power).fit(counts)
    np.testing.assert_allclose(model.words_ @ model.contexts_.T, wanted, atol=1e-10)
    values = np.linalg.svd(wanted, compute_uv=False)
    kept = values > 1e-12 * values[0]
    np.testing.assert_allclose((model.words_**2).sum(0)[kept], values[kept] ** (2 * power), rtol=1e-8)
    assert (model.words_[:, ~kept] == 0).all()
    largest = model.words_[abs(model.words_).argmax(0), np.arange(size)]
    assert (largest[kept] > 0).all()

    both = WordVectors(size, "symmetric", power=power).fit(counts)
    np.testing.assert_allclose(both.words_ @ both.contexts_.T, (wanted + wanted.T) / 2, atol=1e-10)
    assert not np.allclose(both.words_, both.contexts_)

    directed = WordVectors(size, "directional", power=power).fit(counts)
    np.testing.assert_allclose(directed.words_ @ directed.contexts_.T, ppmi(counts.counts()).T, atol=1e-10)


def test_fewer_components_are_the_first_ones():
    counts = counter()
    whole, few = (WordVectors(dim).fit(counts).vectors_ for dim in (len(counts.vocabulary_), 5))
    np.testing.assert_allclose(few, whole[:, :5], atol=1e-10)
    shifted = WordVectors(3, association="sppmi", shift=2, smoothing=1.0).fit(counts)
    matrix = association(counts.counts(directed=False), "sppmi", shift=2, smoothing=1.0).toarray()
    left = np.linalg.svd(matrix)[0][:, :3]
    np.testing.assert_allclose(abs(shifted.vectors_), abs(left), atol=1e-9)


def test_glove_and_its_sides():
    counts = counter()
    options = {"x_max": 3.0, "random_state": 5, "sweeps": 4, "ridge": 0.1}
    for method, solver in (("glove", "als"), ("glove-adagrad", "adagrad")):
        model = WordVectors(4, method, **options).fit(counts)
        result = glove(counts.counts(directed=False), 4, solver=solver, x_max=3.0, seed=5, sweeps=4, ridge=0.1)
        np.testing.assert_array_equal(model.vectors_, result.words + result.contexts)
        model.set_params(sides="concat")
        np.testing.assert_array_equal(model.vectors_, np.c_[result.words, result.contexts])
        np.testing.assert_array_equal(model.set_params(sides="contexts").vectors_, result.contexts)
        np.testing.assert_array_equal(model.set_params(sides="words").vectors_, result.words)


def test_counts_come_in_many_forms():
    pd = pytest.importorskip("pandas", reason="the extra 'tables' is not installed")
    counts = counter()
    words, matrix = counts.vocabulary_.words, counts.counts()
    wanted = WordVectors(5).fit(counts)
    named = WordVectors(5, vocabulary=words)
    frame = pd.DataFrame(matrix.toarray(), columns=words)
    for model, given in (
        (named, matrix), (named, matrix.toarray()), (named, matrix.tocoo()), (named, counts.counts(directed=False)),
        (WordVectors(5), frame), (WordVectors(5, window=3, min_count=1), TEXTS),
        (WordVectors(5, window=3, min_count=1), np.array(TEXTS)), (WordVectors(5, window=3, vocabulary=counts.vocabulary_), iter(TEXTS)),
    ):  # fmt: skip
        np.testing.assert_array_equal(model.fit(given).vectors_, wanted.vectors_)
        assert model.vocabulary_ == counts.vocabulary_
    assert WordVectors(5).fit(matrix).vocabulary_.words == [str(at) for at in range(len(words))]
    directed = WordVectors(5, "directional", vocabulary=words).fit(matrix)
    np.testing.assert_array_equal(directed.vectors_, WordVectors(5, "directional").fit(counts).vectors_)
    ids = [counts.vocabulary_.encode(text.split()) for text in TEXTS]
    numbers = WordVectors(5, window=3, min_count=1).fit(ids)
    np.testing.assert_array_equal(numbers.vectors_, wanted.vectors_)
    np.testing.assert_allclose(numbers.transform(ids), wanted.transform(TEXTS))


def test_a_text_is_the_mean_of_its_words():
    model = WordVectors(5).fit(counter())
    places = {word: at for at, word in enumerate(model.vocabulary_.words)}
    texts = ["The KING, the sea!", "nothing known", "", "king unheard"]

    def means(texts, unknown):
        rows = []
        for text in texts:
            words = text.lower().replace(",", "").replace("!", "").split()
            vectors = [model.vectors_[places[word]] for word in words if word in places]
            count = len(words) if unknown == "zero" else len(vectors)
            rows.append(sum(vectors, np.zeros(5)) / max(1, count))
        return np.array(rows)

    for unknown in ("skip", "zero"):
        np.testing.assert_allclose(
            model.set_params(unknown=unknown).transform(texts), means(texts, unknown), atol=1e-15
        )
    with pytest.raises(InvalidArgument, match="'nothing' is not in the vocabulary"):
        model.set_params(unknown="raise").transform(texts)
    model.set_params(unknown="skip")
    np.testing.assert_array_equal(model.transform(["sea"])[0], model.vector("sea"))
    np.testing.assert_array_equal(model.transform([["the", "sea"]]), model.transform(["the sea"]))
    assert model.transform([]).shape == (0, 5)
    assert model.get_feature_names_out().tolist() == [f"wordvectors{at}" for at in range(5)]

    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.pipeline import make_pipeline

    pipeline = make_pipeline(CountVectorizer(vocabulary=model.vocabulary_.words, token_pattern=r"[a-z]+"), model)
    np.testing.assert_allclose(pipeline.transform(texts), means(texts, "skip"), atol=1e-15)
    np.testing.assert_allclose(model.transform(np.eye(len(places))), model.vectors_)


def test_nearest_words_by_a_loop():
    model = WordVectors(6).fit(counter())
    vectors = dict(zip(model.vocabulary_.words, model.vectors_, strict=True))

    def cosine(one, other):
        return one @ other / math.sqrt((one @ one) * (other @ other))

    scores = sorted(((-cosine(vectors["sea"], v), w) for w, v in vectors.items() if w != "sea"))
    found = model.most_similar("Sea", top=7)
    assert found.words == tuple(word for _, word in scores[:7])
    assert found.cosines == pytest.approx([-score for score, _ in scores[:7]])
    assert found[0] == next(iter(found))
    assert len(found) == 7
    assert model.similarity("sea", "lake") == pytest.approx(cosine(vectors["sea"], vectors["lake"]))

    one = {word: vector / np.linalg.norm(vector) for word, vector in vectors.items()}
    towards = one["king"] - one["man"] + one["woman"]
    best = max((w for w in vectors if w not in ("king", "man", "woman")), key=lambda w: cosine(towards, vectors[w]))
    assert model.analogy("man", "king", "woman", top=3).words[0] == best
    assert str(model.analogy("man", "king", "woman", top=1)).startswith("king + woman - man\n")
    among = model.most_similar(["sea", "lake"], top=99, among=4)
    assert set(among.words) <= set(model.vocabulary_.words[:4])


def test_pairs_are_evaluated_with_their_coverage(tmp_path):
    model = WordVectors(6).fit(counter())
    pairs = [
        ("sea", "lake", 9.0),
        ("King", "queen", 8.5),
        ("man", "deep", 1),
        ("boats", "rules", 2.5),
        ("sea", "car", 3),
    ]
    cosines = [model.similarity(*pair[:2]) for pair in pairs[:4]]
    score = model.evaluate_pairs(pairs)
    assert score.rho == pytest.approx(spearmanr([pair[2] for pair in pairs[:4]], cosines).statistic)
    assert (score.covered, score.pairs) == (4, 5)
    assert score.to_dict() == {"rho": score.rho, "covered": 4, "pairs": 5}
    assert "4 of 5 pairs" in str(score)
    for header, sign in (("# remark\n", "\t"), ("word1,word2,score\n", ","), ("", " ")):
        file = tmp_path / "pairs.txt"
        file.write_text(header + "".join(f"{sign.join(map(str, pair))}\n" for pair in pairs))
        assert model.evaluate_pairs(file) == model.evaluate_pairs(str(file)) == score
    zero = model.set_params(unknown="zero").evaluate_pairs(pairs)
    assert zero.rho == pytest.approx(spearmanr([pair[2] for pair in pairs], [*cosines, 0.0]).statistic)
    with pytest.raises(InvalidArgument, match="sea, car has a word that is unknown"):
        model.set_params(unknown="raise").evaluate_pairs(pairs)
    file.write_text("sea lake 9\nsea lake high\n")
    with pytest.raises(InvalidArgument, match=r"line 2 of .* must be two words and a number"):
        model.evaluate_pairs(file)
    with pytest.raises(InvalidArgument, match="of 1 pair 0 have two known words"):
        model.set_params(unknown="skip").evaluate_pairs([("a1", "b1", 2)])
    with pytest.raises(InvalidArgument, match=r"must be \(word, word, number\)"):
        model.evaluate_pairs(["sea lake"])
    with pytest.raises(InvalidArgument, match="cannot read"):
        model.evaluate_pairs(tmp_path / "none.txt")


def test_analogies_are_evaluated_as_gensim_does(tmp_path):
    pytest.importorskip("gensim", reason="the extra 'gensim' is not installed")
    g = np.random.default_rng(0)
    words = [f"w{at}" for at in range(60)]
    # In pairs that differ by about the same.
    base = g.normal(size=(30, 8))
    vectors = np.stack([base, base + g.normal(size=8) + 0.4 * g.normal(size=(30, 8))], 1).reshape(60, 8)
    model = WordVectors.from_vectors(words, vectors)
    file = tmp_path / "questions.txt"
    lines = [": first"]
    for number in range(100):
        lines += [": second"] * (number == 50)
        i, j = g.choice(30, 2, replace=False)
        lines.append(f"W{2 * i} w{2 * i + 1} w{2 * j} {'unheard' if number % 9 == 0 else f'w{2 * j + 1}'}")
    file.write_text("\n".join(lines))
    score = model.evaluate_analogies(file)
    accuracy, sections = model.to_gensim().evaluate_word_analogies(str(file))
    assert score.accuracy == pytest.approx(accuracy)
    assert 0.2 < score.accuracy < 1
    assert [score.sections[name][0] for name in ("first", "second")] == [len(s["correct"]) for s in sections[:2]]
    assert (score.covered, score.questions) == (88, 100)
    assert "second" in str(score)
    assert model.evaluate_analogies(file, among=40).covered < 88
    rows = [line.split() for line in lines if line[0] != ":"]
    assert model.evaluate_analogies(rows).accuracy == score.accuracy
    assert model.set_params(unknown="zero").evaluate_analogies(rows).accuracy == pytest.approx(score.correct / 100)
    with pytest.raises(InvalidArgument, match="none has four known words"):
        model.set_params(unknown="skip").evaluate_analogies([("a", "b", "c", "d")])
    with pytest.raises(InvalidArgument, match="four words"):
        model.evaluate_analogies({"short": [("w0", "w1")]})


def test_gensim_and_text_files(tmp_path):
    gensim = pytest.importorskip("gensim", reason="the extra 'gensim' is not installed")
    model = WordVectors(5).fit(counter())
    keyed = model.to_gensim()
    np.testing.assert_array_equal(keyed["sea"], model.vector("sea").astype(np.float32))
    # gensim finds neighbours in float32.
    assert [word for word, _ in keyed.most_similar("sea", topn=4)] == list(model.most_similar("sea", top=4).words)
    assert keyed.get_vecattr("the", "count") == model.vocabulary_.counts[0]
    again = WordVectors.from_gensim(keyed)
    assert again.vocabulary_ == model.vocabulary_
    np.testing.assert_array_equal(again.vocabulary_.counts, model.vocabulary_.counts)
    np.testing.assert_allclose(again.vectors_, model.vectors_, atol=1e-7)

    for header in (True, False):
        file = model.save_text(tmp_path / "vectors.txt", header=header)
        read = WordVectors.from_text(file, unknown="zero")
        np.testing.assert_array_equal(read.vectors_, model.vectors_)
        assert read.vocabulary_ == model.vocabulary_
        assert read.unknown == "zero"
        theirs = gensim.models.KeyedVectors.load_word2vec_format(str(file), no_header=not header)
        np.testing.assert_allclose(theirs["lake"], model.vector("lake"), atol=1e-7)
    np.testing.assert_array_equal(read.transform(TEXTS), model.transform(TEXTS))
    with pytest.raises(InvalidArgument, match="KeyedVectors of gensim"):
        WordVectors.from_gensim({"sea": [1, 2]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cut or is no file of vectors"),
        ("3 2\na 1 2\nb 3 4\n", "says 3 words of 2 numbers, and it has 2 words"),
        ("a 1 2\nb 3\n", "line 2 of .* has 1 numbers; 2 are expected"),
        ("a 1 x\n", "line 1 of .* must be a word and numbers"),
        ("a 1 nan\n", "vectors must be finite"),
        ("a 1 2\na 1 2\n", "'a' is there twice"),
    ],
)
def test_damaged_text_files(tmp_path, text, message):
    file = tmp_path / "vectors.txt"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        WordVectors.from_text(file)


def test_words_with_spaces_are_not_written(tmp_path):
    model = WordVectors.from_vectors(["new york", "sea"], np.eye(2))
    with pytest.raises(InvalidArgument, match="'new york' cannot be written"):
        model.save_text(tmp_path / "vectors.txt")
    assert list(tmp_path.iterdir()) == []


def test_records_of_glove(tmp_path):
    counts = counter().counts(directed=False)
    file = write_glove_counts(counts, tmp_path / "cooccurrence.bin")
    with file.open("rb") as records:
        first = struct.unpack("<iid", records.read(16))
        assert file.stat().st_size == 16 * counts.nnz
    dense = counts.toarray()
    column = int(np.flatnonzero(dense[0])[0])
    assert first == (1, column + 1, dense[0, column])
    np.testing.assert_array_equal(read_glove_counts(file).toarray(), dense)
    np.testing.assert_array_equal(read_glove_counts(file, len(dense) + 2).toarray()[:-2, :-2], dense)
    big = csr_array(random_array((97, 89), density=0.3, rng=np.random.default_rng(0)))
    np.testing.assert_array_equal(read_glove_counts(write_glove_counts(big, file)).toarray()[:97, :89], big.toarray())
    with pytest.raises(InvalidArgument, match="from 1 to 5; got up to 97"):
        read_glove_counts(file, 5)
    file.write_bytes(b"123")
    with pytest.raises(InvalidArgument, match="has 3 bytes, no multiple of the 16"):
        read_glove_counts(file)
    file.write_bytes(struct.pack("<iid", 0, 1, 1.0))
    with pytest.raises(InvalidArgument, match="from 1 to V"):
        read_glove_counts(file)
    with pytest.raises(InvalidArgument, match="cannot read"):
        read_glove_counts(tmp_path / "none.bin")


def test_folders_bring_models_back(tmp_path):
    for number, method in enumerate(("svd", "directional", "glove")):
        model = WordVectors(4, method, sides="concat", random_state=3, vocabulary=None).fit(counter())
        model.save_pretrained(tmp_path / str(number))
        again = Estimator.from_pretrained(tmp_path / str(number))
        assert again.get_params() == model.get_params()
        np.testing.assert_array_equal(again.vectors_, model.vectors_)
        np.testing.assert_array_equal(again.transform(TEXTS), model.transform(TEXTS))
        assert again.most_similar("sea") == model.most_similar("sea")
        np.testing.assert_array_equal(again.vocabulary_.counts, model.vocabulary_.counts)


def test_a_tokenizer_of_ones_own_is_asked_for_again(tmp_path):
    model = WordVectors(4, tokenizer=str.split, min_count=1, window=3).fit(TEXTS)
    wanted = model.transform(["sea, the"])
    np.testing.assert_array_equal(wanted[0], model.vector("the"))
    counted = WordVectors(4).fit(counter(tokenizer=str.split))
    np.testing.assert_array_equal(counted.transform(["sea, the"]), wanted)
    for number, one in enumerate((model, counted)):
        one.save_pretrained(tmp_path / str(number))
        again = WordVectors.from_pretrained(tmp_path / str(number))
        np.testing.assert_array_equal(again.transform([["sea,", "the"]]), wanted)
        with pytest.raises(InvalidArgument, match="by a tokenizer that is not kept"):
            again.transform(["sea, the"])
        np.testing.assert_array_equal(again.set_params(tokenizer=str.split).transform(["sea, the"]), wanted)


def test_seeds_decide_and_hardly_matter():
    """Equal seeds, equal bits; with others nine of ten nearest words stay, on 2,500 words that are installed with Python."""
    counts = Cooccurrence(10, max_vocabulary=2500, progress=False).fit(installed_texts())
    first, again, other = (WordVectors(100, random_state=seed).fit(counts) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.vectors_, again.vectors_)
    assert not np.array_equal(first.vectors_, other.vectors_)
    shares = []
    for word in first.vocabulary_.words[::25]:
        one, two = (set(model.most_similar(word).words) for model in (first, other))
        shares.append(len(one & two) / 10)
    assert np.mean(shares) >= 0.9


def test_odd_sizes():
    one = WordVectors(1, vocabulary=["a"], smoothing=1.0, association="log1p").fit(np.array([[3.0]]))
    assert one.vectors_.tolist() == [[1.0]]
    assert one.most_similar("a").words == ()
    large = counter().counts(directed=False) * 1e30
    usual = WordVectors(3).fit(counter().counts(directed=False))
    np.testing.assert_allclose(WordVectors(3).fit(large).vectors_, usual.vectors_, atol=1e-9)
    far = WordVectors.from_vectors(["a", "b", "c"], [[1e300, 0], [1e300, 1e300], [0, 0]])
    assert far.similarity("a", "b") == pytest.approx(math.sqrt(0.5))
    assert far.similarity("a", "c") == 0


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({"dim": 99}, TEXTS, "dim must be at most 18, the number of words; got 99"),
        ({"vocabulary": "sea"}, TEXTS, "got the text 'sea'"),
        ({"vocabulary": ["a"]}, np.eye(3), "vocabulary has 1 words, and the matrix 3 rows"),
        ({"vocabulary": ["a", "a"]}, np.eye(2), "'a' is there twice"),
        ({}, np.ones((3, 4)), r"square matrix.*\(3, 4\)"),
        ({}, -np.ones((3, 3)), "Negative|not negative"),
        ({}, np.zeros((3, 3)), "occur together"),
        ({"association": "ppmi", "smoothing": 1.0}, np.ones((3, 3)), "all associations 'ppmi' are zero"),
        ({"min_count": 50}, TEXTS, "min_count=50"),
        ({}, "no such file", "cannot read 'no such file'"),
        ({}, 3, "a corpus is a file, a folder or an iterable"),
    ],
)  # fmt: skip
def test_errors(options, given, message):
    with pytest.raises(InvalidArgument, match=message):
        WordVectors(**{"dim": 2, "min_count": 1} | options).fit(given)


def test_errors_of_a_fitted_model():
    model = WordVectors(3).fit(counter())
    for call, message in (
        (lambda: model.most_similar("unheard"), "'unheard' is not among the 18 words"),
        (lambda: model.most_similar([]), "give a word"),
        (lambda: model.most_similar("sea", top=0), "top must be"),
        (lambda: model.most_similar(3), "iterable|a word is expected"),
        (lambda: model.transform("sea"), r"give \[text\]"),
        (lambda: model.transform(np.ones((2, 5))), "18"),
        (lambda: model.transform(csr_array(np.ones((2, 5)))), "18 words"),
        (lambda: model.transform([np.array([99])]), "from 0 to 17"),
        (lambda: WordVectors.from_vectors(["a"], np.ones((2, 2))), r"shape \(1, d\)"),
    ):
        with pytest.raises((InvalidArgument, TypeError), match=message):
            call()
    assert isinstance(model.vocabulary_, Vocabulary)


def test_pictures():
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    model = WordVectors(4).fit(counter())
    assert model.most_similar("sea", top=5).plot().get_xlabel() == "cosine"
    assert len(model.evaluate_pairs([("sea", "lake", 3), ("king", "sea", 1)]).plot().collections) == 1
    score = model.evaluate_analogies({"one": [("man", "king", "woman", "queen")], "two": [("a", "b", "c", "d")]})
    assert len(score.plot().patches) == 1

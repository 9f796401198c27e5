"""`heedful corpus` as people use it: texts in, counts and vectors kept, maps and gaps; errors in one line."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest

from failing import one_line
from heedful import _installed
from heedful.corpus import AttentionMap, Cooccurrence, CorpusAttention, WordVectors

TEXTS = """the king rules the land and the queen rules the land
a man walks on the land and a woman walks on the land
the king is a man and the queen is a woman
the sea is deep and the lake is deep
boats sail on the sea and boats sail on the lake
"""


@pytest.fixture
def corpus(run, tmp_path):
    """Runs `heedful corpus` beside texts and their counts, each distance by itself."""
    (tmp_path / "texts.txt").write_text(TEXTS)
    told = run("corpus", "count", "texts.txt", "-o", "counts", "--min-count", 1, "--window", 3, "--per-distance")
    assert told[0] == 0
    return lambda *arguments: run("corpus", *arguments)


def counted(**options):
    return Cooccurrence(3, progress=False, **options).fit(TEXTS.splitlines())


def test_counts_are_kept(corpus, tmp_path):
    kept = Cooccurrence.from_pretrained(tmp_path / "counts")
    for distance in (None, 1, 2, 3):
        wanted = counted(per_distance=True).counts(distance)
        np.testing.assert_array_equal(kept.counts(distance).toarray(), wanted.toarray())
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "one.txt").write_text("the sea\n")
    arguments = ("count", "texts.txt", "more", "--min-count", 2, "--max-vocabulary", 5, "--weighting", "linear")
    limits = (
        "--subsample",
        0.5,
        "--seed",
        3,
        "--unknown",
        "keep",
        "--max-memory",
        "1MB",
        "--folder",
        "going",
        "--n-jobs",
        1,
    )
    code, out, err = corpus(*arguments, *limits, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["documents"], told["tokens"], told["words"], told["folder"]) == (6, 57, 5, None)
    assert told["most_frequent"]["the"] == 13
    assert (tmp_path / "going" / "journal.json").is_file()
    code, out, _ = corpus("count", "texts.txt")
    assert out.splitlines()[0] == "55 words in 5 documents of texts.txt"
    assert out.splitlines()[1].startswith("2 different ones counted")
    assert out.splitlines()[2] == "not kept; --out FOLDER writes them"


def test_vectors_are_made_and_asked(corpus, tmp_path):
    (tmp_path / "pairs.txt").write_text("sea lake 9\nking queen 8\nman deep 1\nsea car 3\n")
    (tmp_path / "questions.txt").write_text("man king woman queen\n")
    files = ("--text", "vectors.txt", "--pairs", "pairs.txt", "--analogies", "questions.txt")
    code, out, err = corpus("embed", "counts", "-o", "vectors", "--dim", 5, "--power", 0.5, *files)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "17 vectors of 5 numbers by svd"
    assert lines[1].endswith("on 3 of 4 pairs")
    assert lines[2].startswith("analogies: ")
    assert lines[3:] == ["vectors written to vectors", "word2vec's text format written to vectors.txt"]
    model = WordVectors.from_pretrained(tmp_path / "vectors")
    np.testing.assert_array_equal(model.vectors_, WordVectors(5, power=0.5).fit(counted()).vectors_)
    np.testing.assert_array_equal(WordVectors.from_text(tmp_path / "vectors.txt").vectors_, model.vectors_)

    for place in ("vectors", "vectors.txt"):
        code, out, err = corpus("similar", "sea", "--model", place, "--top", 3)
        assert (code, err) == (0, "")
        assert [line.split()[1] for line in out.splitlines()[1:]] == list(model.most_similar("sea", top=3).words)
    arguments = ("similar", "king", "woman", "--minus", "man", "--model", "vectors", "--among", 9)
    assert json.loads(corpus(*arguments, "--json")[1]) == model.analogy("man", "king", "woman", among=9).to_dict()
    # Counts and texts serve as well; what is counted is told.
    code, out, err = corpus("similar", "land", "--model", "texts.txt", "--top", 1)
    assert code == 0
    assert err.startswith("counted 55 words of texts.txt; ")
    assert corpus("similar", "sea", "--model", "counts", "--top", 1)[0] == 0

    options = (
        "--method",
        "glove",
        "--sweeps",
        2,
        "--x-max",
        5,
        "--sides",
        "concat",
        "--seed",
        3,
        "--association",
        "pmi",
    )
    told = json.loads(corpus("embed", "texts.txt", "--dim", 2, *options, "--json")[1])
    assert (told["words"], told["dim"], told["pairs"]) == (17, 4, None)


def test_attention_is_drawn(corpus, tmp_path):
    attention = CorpusAttention(counted(per_distance=True), positions="distance", beta=2.0, is_causal=True)
    wanted = AttentionMap.of(attention, "the king sails")
    options = ("--counts", "counts", "--positions", "distance", "--beta", 2, "--causal")
    code, out, err = corpus("attend", "the", "king", "sails", *options)
    assert (code, out) == (0, f"{wanted}\n")
    assert err == "not counted: sails; --counts takes texts like yours\n"
    told = json.loads(corpus("attend", "the king sails", *options, "--json")[1])
    assert told["words"] == ["the", "king", "sails"]
    assert told["known"] == [True, True, False]
    np.testing.assert_allclose(told["weights"], wanted.weights)
    plain = ("--directed", "--with-self", "--association", "pmi", "--smoothing", 1, "--counts", "texts.txt")
    assert corpus("attend", "the sea", *plain)[0] == 0
    code, out, err = corpus("attend", "xx yy", "--counts", "counts")
    assert (code, err) == (0, "no word was counted: xx, yy; --counts takes texts like yours\n")


def test_attention_goes_to_pictures_and_pages(corpus, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    options = ("--counts", "counts", "--heads", 2, "--rank", 8)
    code, out, _ = corpus("attend", "the king and the queen", *options, "--out", "map.svg")
    assert code == 0
    assert out.endswith("\nmap drawn to map.svg\n")
    assert ElementTree.parse(tmp_path / "map.svg").getroot().tag.endswith("svg")
    code, out, err = corpus("attend", "the king & the queen", *options, "--out", "map.html", "--json")
    assert (code, err) == (0, "\nmap drawn to map.html\n")
    assert len(json.loads(out)["weights"]) == 2
    page = (tmp_path / "map.html").read_text()
    assert "the king &amp; the queen" in page
    assert page.count("The strongest words") >= 1
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_gaps_are_filled(corpus):
    wanted = CorpusAttention(counted(), "conditional").predict_masked("the ___ is deep", top=3)
    code, out, err = corpus("cloze", "the", "___", "is", "deep", "--counts", "counts", "--top", 3)
    assert (code, out, err) == (0, f"{wanted}\n", "")
    options = ("--positions", "tucker", "--rank", 6, "--association", "ppmi", "--strength", 0.5, "--context", 1)
    told = json.loads(corpus("cloze", "the sea is deep", "--counts", "counts", "--position", -1, *options, "--json")[1])
    assert told["before"] == ["the", "sea", "is"]
    assert corpus("cloze", "___ xx", "--counts", "counts", "--directed")[2].startswith("no word was counted: xx;")


def test_without_counts_an_installed_text_is_counted(run, tmp_path, monkeypatch):
    folder = tmp_path / "wordnet"
    folder.mkdir()
    lines = [
        "  1 This is a remark",
        "0001 00 n 01 bank 0 000 | sloping land beside a river",
        "0002 00 n 01 sea 0 000 | deep water",
    ]
    (folder / "data.noun").write_text("\n".join(lines))
    monkeypatch.setattr(_installed, "WORDNET", folder)
    code, out, err = run("corpus", "attend", "the land of the river")
    assert code == 0
    assert err.startswith("counted 7 words of WordNet's definitions; ")
    assert out.splitlines()[2].startswith("2 land")
    assert "of WordNet's definitions" in run("corpus", "count", "--min-count", 1)[1]
    monkeypatch.setattr(_installed, "WORDNET", tmp_path / "none")
    texts, source = _installed.everyday_texts()
    assert source in ("news that gensim carries", _installed.SOURCE)
    assert len(texts) > 100
    monkeypatch.setattr(_installed, "find_spec", lambda name: None)
    assert _installed.everyday_texts() == (_installed.installed_texts(), _installed.SOURCE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("count", "none.txt"), "there is no file or folder 'none.txt'"),
        (("count", "texts.txt", "-o", "counts"), "counts is there already; give a new or empty folder"),
        (("count", "texts.txt", "--window", 0), "--window must be a whole number from 1 on; got 0"),
        (("count", "texts.txt", "--weighting", "far"), "--weighting must be one of inverse, linear"),
        (("count", "texts.txt", "--unknown", "drop"), "--unknown must be one of squeeze, keep"),
        (("count", "texts.txt", "--max-memory", "lots"), "--max-memory must be bytes or a text"),
        (("count", "texts.txt", "--n-jobs", 0), "--n-jobs must be a whole number"),
        (("count", "texts.txt", "--subsample", 0), "--subsample must be a number above 0"),
        (("count", "texts.txt", "--min-count", 99), "--min-count 99 times or more"),
        (("embed", "none"), "there is no file or folder 'none'"),
        (("embed", "counts"), "--dim must be at most 17, the number of words; got 200"),
        (("embed", "counts", "--method", "lsa"), "--method must be one of svd"),
        (("embed", "counts", "--seed", -1), "--seed must be a whole number"),
        (("embed", "counts", "--pairs", "none.txt"), "there is no file 'none.txt'"),
        (("similar", "unheard", "--model", "counts"), "'unheard' is not among the 17 words"),
        (("similar", "sea", "--model", "counts", "--top", 0), "--top must be a whole number"),
        (("similar",), "WORDS"),
        (("attend", "1 2", "--counts", "counts"), "there is no word in '1 2'"),
        (("attend", "the sea", "--counts", "counts", "--heads", "many"), "--heads must be one of spectral, distance"),
        (("attend", "the sea", "--counts", "counts", "--positions", "rotary", "--rank", 5), "--rank must be even for --positions rotary"),
        (("attend", "the sea", "--counts", "counts", "--out", "map.xyz"), "cannot draw map.xyz"),
        (("cloze", "the sea", "--counts", "counts"), "must have one gap"),
        (("cloze", "the ___", "--counts", "counts", "--association", "mi"), "--association must be one of ppmi"),
        (("brew",), "No such command 'brew'"),
    ],
)  # fmt: skip
def test_errors_are_one_line(corpus, arguments, message):
    assert message in one_line(corpus(*arguments))


def test_vectors_are_no_counts(corpus):
    assert corpus("embed", "counts", "-o", "vectors", "--dim", 3)[0] == 0
    assert "vectors holds vectors; give counts, or texts" in one_line(
        corpus("attend", "the sea", "--counts", "vectors")
    )


def test_long_texts_are_listed():
    attention = CorpusAttention(counted())
    result = AttentionMap.of(
        attention, "the sea is deep and the lake is deep and boats sail on the sea and a man walks"
    )
    lines = str(result).splitlines()
    assert len(lines) == len(result.words) == 19
    name, weight = result.strongest(1, 1)[0]
    assert lines[1].startswith(f"2 sea     {name} {weight:.0%}")
    assert result.strongest(1, 1)[0][1] == pytest.approx(result.weights.mean(0)[1].max())
    assert str(AttentionMap.of(attention, "")) == ""
    assert AttentionMap.of(attention, "sea").weights.tolist() == [[[0.0]]]

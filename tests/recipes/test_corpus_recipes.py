"""Recipes that count: their parts, whole runs on stand-ins of the texts, and what their tables say."""

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from experiments import corpus, corpus_cloze, corpus_heads, corpus_warmstart, stacked, starting
from experiments.recipe import Bar, Setting, text
from experiments.stacked import Protocol

pytest.importorskip("scipy", reason="the extra 'corpus' is not installed")
pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from answering import WORDS, masked, wordpiece
from heedful import Unsupported

V = 31
TINY = Protocol(vocabulary=V, context=7, batch=3, steps=6, warmup=2)
SMALL = replace(starting.SMALL, width=8, counted=900, valid=100, protocol=TINY)
LARGE = replace(starting.LARGE, width=8, heads=2, counted=900, valid=100, protocol=TINY)


def quiet(line):
    pass


def tokens(length=1501):
    g = np.random.default_rng(0)
    after = g.dirichlet(np.full(V, 0.1), size=V)
    ids = [1]
    for _ in range(length - 1):
        ids.append(int(g.choice(V, p=after[ids[-1]])))
    return np.array(ids, dtype=np.uint16)


@pytest.fixture
def warm(tmp_path, monkeypatch):
    """A work folder with tokens; word2vec is a random table."""
    np.savez_compressed(tmp_path / "tokens.npz", train=tokens(), valid=tokens()[:211])
    monkeypatch.setattr(corpus, "VOCABULARY", V)
    monkeypatch.setattr(corpus_warmstart, "SMALL", SMALL)
    monkeypatch.setattr(corpus_warmstart, "LARGE", LARGE)
    table = np.random.default_rng(1).normal(size=(V, 8)).astype(np.float32)
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    monkeypatch.setattr(starting, "word2vec", lambda documents, scale, say: table)
    starting._loaded.cache_clear()
    return tmp_path


def test_losses_along_the_way_are_those_of_training():
    ids = torch.from_numpy(tokens().astype(np.int64))
    weights = stacked.initial(2, 8, TINY, [0, 3])
    whole = {name: torch.cat([part] * 2, dim=-3) for name, part in weights.items()}
    before = {name: part.clone() for name, part in whole.items()}
    losses = stacked.curves(whole, 2, [1e-3, 1e-3, math.inf, 1e-2], [0, 3, 0, 3], ids, ids[:90], TINY, [0, 4, 6])
    assert np.array(losses).shape == (3, 4)
    assert all(torch.equal(part, before[name]) for name, part in whole.items())
    trained = stacked.train(2, 8, 2, [1e-3], [0, 3], ids, ids[:90], TINY)
    np.testing.assert_allclose(losses[2][:2], trained[0], rtol=1e-5)
    # A model that diverged leaves the others alone, and is there before its first step.
    assert losses[1][2] == losses[2][2] == math.inf
    assert losses[0][0] == pytest.approx(losses[0][2], rel=1e-6)
    assert losses[2][3] < losses[0][3]


def test_a_start_sets_what_it_names(warm):
    arrays = starting.prepare(warm, LARGE, quiet)
    drawn = stacked.initial(LARGE.layers, LARGE.width, TINY, [0, 1])
    known = arrays["known"]
    assert 2 < known.sum() <= V
    for name, (table, queries, values) in starting.STARTS.items():
        own = starting.start(name, LARGE, [0, 1], arrays)
        assert own.keys() == drawn.keys()
        for key in ("position", "up", "down"):
            assert torch.equal(own[key], drawn[key])
        assert torch.equal(own["qkv"][1], drawn["qkv"][1])
        assert torch.equal(own["out"][1], drawn["out"][1])
        set_parts = torch.tensor(
            [not torch.equal(*(w["qkv"][0, ..., part : part + 8] for w in (own, drawn))) for part in (0, 8, 16)]
        )
        assert set_parts.tolist() == [queries, queries, values]
        assert torch.equal(own["out"][0], drawn["out"][0]) == (not values)
        assert torch.equal(own["embedding"], drawn["embedding"]) == (not table and not queries)
        if table:
            lengths = own["embedding"][:, known].norm(dim=-1)
            np.testing.assert_allclose(lengths, 1.0, rtol=1e-5)
            unknown = torch.from_numpy(~known)
            assert table == "unit" or torch.equal(own["embedding"][:, unknown], drawn["embedding"][:, unknown])


def test_the_starts_that_are_written_are_the_models(warm):
    """What goes into the stacked weights gives the logits of the module that was started."""
    arrays = starting.prepare(warm, SMALL, quiet)
    weights = starting.start(starting.FULL, SMALL, [0], arrays)
    torch.manual_seed(0)
    model = starting.Language(V, SMALL)
    with torch.no_grad():
        block = model.encoder.layers[0]
        model.table.weight.copy_(weights["embedding"][0])
        block.self_attn.in_proj_weight.copy_(weights["qkv"][0, 0].T)
        block.self_attn.out_proj.weight.copy_(weights["out"][0, 0].T)
        ids = torch.from_numpy(tokens()[:8].astype(np.int64))
        x = torch.nn.functional.rms_norm(model.table(ids[None]), (8,), eps=1e-6)
        read = block.self_attn(block.norm1(x), is_causal=True, need_weights=False)[0]
        own = stacked._norm(x)[0] @ weights["qkv"][0, 0]
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(0, 1) for part in own.chunk(3, dim=-1))
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        wanted = mixed.transpose(0, 1).flatten(1) @ weights["out"][0, 0]
    torch.testing.assert_close(read[0], wanted)


def test_a_stopped_run_goes_on(warm):
    whole = Setting(False, "cpu", warm, quiet)
    first = corpus_warmstart.run(replace(whole, seconds=0.0))
    assert first["scales"] == {}
    some = warm / "parts" / "small-random.json"
    result = corpus_warmstart.run(whole)
    written = some.stat().st_mtime_ns
    assert list(result["scales"]) == ["small", "large"]
    assert corpus_warmstart.run(whole) == result
    assert some.stat().st_mtime_ns == written
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    starts = result["scales"]["large"]["starts"]
    assert set(starting.STARTS) < set(starts)
    assert np.array(starts["random"]["losses"]).shape == (len(starts["random"]["steps"]), 7, 2)
    shown = text(corpus_warmstart, result)
    assert shown.count("embeddings of word2vec") == 2
    assert "wanted >= 1.5" in shown


def test_the_quick_form_needs_the_small_size_alone(warm, monkeypatch):
    monkeypatch.setattr(corpus_warmstart, "_brief", lambda scale: scale)
    result = corpus_warmstart.run(Setting(True, "cpu", warm, quiet))
    assert list(result["scales"]) == ["small"]
    assert not (warm / "starts-large.npz").exists()


def test_the_best_rate_is_that_of_the_last_losses():
    part = {"losses": [[[3.0, 3.0], [1.0, 1.0], [2.0, None]], [[2.0, 2.2], [2.5, 2.5], [1.0, None]]]}
    rate, loss, curve = corpus_warmstart.best(part, [0.1, 0.2, 0.3])
    assert (rate, loss, curve) == (0.1, pytest.approx(2.1), [3.0, pytest.approx(2.1)])


def test_the_verdicts_of_warm_starts(warm):
    """Against the better of both random starts, by steps that were tried."""

    def part(loss, steps):
        return {"steps": steps, "losses": [[[loss, loss]] for _ in steps], "seconds": 0}

    losses = dict.fromkeys(starting.STARTS, 4.0) | {"random": 5.0, "random, rows of length 1": 4.5}
    starts = {name: part(loss, [1, 500]) for name, loss in losses.items()}
    starts |= {
        f"{starting.FULL} in {count}": part(loss, [count]) for count, loss in ((250, 4.6), (278, 4.5), (333, 4.4))
    }
    result = {"rates": [0.1], "seeds": [0, 1], "scales": {"large": {"steps": 500, "starts": starts}}}
    below, fewer = (block for block in corpus_warmstart.tables(result) if isinstance(block, Bar))
    assert below.value == pytest.approx(0.5)
    assert fewer.value == pytest.approx(500 / 278)
    assert (below.verdict, fewer.verdict) == ("met", "met")


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Sentences of a few words in the place of the corpus and of WikiText-2."""
    g = np.random.default_rng(0)
    whole = [word for word in WORDS if not word.startswith("##")]
    after = g.dirichlet(np.full(len(whole), 0.3), size=len(whole))

    def sentence(length):
        ids = [int(g.integers(len(whole)))]
        while len(ids) < length:
            ids.append(int(g.choice(len(whole), p=after[ids[-1]])))
        return " ".join(whole[at] for at in ids)

    folder = tmp_path / "beside"
    folder.mkdir()
    for part in ("test", "valid"):
        lines = [sentence(70) for _ in range(30)]
        (folder / f"wikitext2_{part}.txt").write_text("\n".join(lines))
    monkeypatch.setattr(corpus_cloze, "BESIDE", folder)
    monkeypatch.setattr(corpus_heads, "BESIDE", folder)
    paragraphs = [sentence(20) for _ in range(400)]
    monkeypatch.setattr(corpus, "COUNTED", {name: lambda: iter(paragraphs) for name in corpus.COUNTED})
    return tmp_path


def ran(module, work):
    work.mkdir()
    setting = Setting(True, "cpu", work, quiet)
    result = module.run(setting)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert module.run(setting) == result
    return result, text(module, result)


def test_gaps_are_filled_from_counts(texts, monkeypatch):
    monkeypatch.setattr(corpus_cloze, "COMMON", 2)
    result, shown = ran(corpus_cloze, texts / "cloze")
    rows = result["rows"]
    assert result["places"] == 100
    assert result["speed"]["apart"] < 1e-10
    assert rows[corpus_cloze.RESOLVED]["mrr"] > rows[corpus_cloze.SYMMETRIC]["mrr"] > rows["frequency alone"]["mrr"]
    assert "frequency alone" in shown
    mean, low, high = result["distances - directed"]
    assert low <= mean <= high


def test_strength_is_chosen_on_other_places_than_those_shown():
    """Even places prefer 0.5, odd ones 1.0: the figures are those of 0.5 on odd ones."""
    row = corpus_cloze._row({"0.5": [1, 10, 1, 20], "1.0": [4, 1, 4, 1]})
    assert row == {"strength": 0.5, "mrr": pytest.approx((1 / 10 + 1 / 20) / 2), "top_10": 0.5}


def test_heads_beside_counts(texts, monkeypatch):
    monkeypatch.setattr(corpus_heads, "MODELS", ("a small one",))
    monkeypatch.setattr(corpus_heads, "opened", lambda name: (masked(), wordpiece()))
    monkeypatch.setattr(corpus_heads, "TOKENS", 30)
    result, shown = ran(corpus_heads, texts / "heads")
    found = result["models"]["a small one"]
    assert len(found["heads"]) == 6
    assert found["counts themselves"]["symmetric"] > 1 - 1e-6
    assert found["counts themselves"]["chance"] < 0.5
    assert found["pairs"] == 3 * 30 * 29
    assert "words as frequent" in shown
    assert "random weights" in shown


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "SOURCES", {"wordnet": lambda: iter(())})
    with pytest.raises(Unsupported, match=r"install what experiments/corpus.py names"):
        starting.texts(tmp_path, quiet)
    monkeypatch.setitem(sys.modules, "gensim.models", None)
    with pytest.raises(Unsupported, match="pip install gensim"):
        starting.word2vec([tokens()], SMALL, quiet)

"""Starts read off counts: what a layer's scores and values are afterwards, computed by its own forward pass, and what stays."""

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("scipy", reason="the extra 'corpus' is not installed")
pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

import transformers as hf

from heedful import Gaussian, InvalidArgument, Softmax, Unsupported
from heedful.convert import warm_start_
from heedful.corpus import Cooccurrence
from heedful.nn import Encoder

V, D, HEADS = 53, 24, 4


def text(seed=0, length=4001):
    """Numbers each of which depends on the one before."""
    g = np.random.default_rng(seed)
    after = g.dirichlet(np.full(V - 2, 0.1), size=V)
    ids = [0]
    for _ in range(length):
        ids.append(int(g.choice(V - 2, p=after[ids[-1]])))
    return np.array(ids)


TEXT = text()
COUNTS = Cooccurrence(5, vocabulary=V, progress=False).fit([TEXT])


class Language(nn.Module):
    """A table, our encoder, and a head that shares the table's weights or has its own."""

    def __init__(self, norm="rms", tied=True, kv=None, bias=False, norm_first=True, kernel=None):
        super().__init__()
        self.table = nn.Embedding(V, D)
        kernels = [kernel or Softmax(), Softmax()]
        self.encoder = Encoder(D, HEADS, kernels, norm=norm, num_kv_heads=kv, bias=bias, norm_first=norm_first)
        self.head = nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.table.weight


def gpt2(**options):
    sizes = {"vocab_size": V, "n_embd": D, "n_layer": 2, "n_head": HEADS, "n_positions": 64}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, **options))


def llama(cls="Llama", **options):
    sizes = {
        "vocab_size": V,
        "hidden_size": D,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "intermediate_size": 29,
    }
    return getattr(hf, f"{cls}ForCausalLM")(getattr(hf, f"{cls}Config")(**sizes, **options))


MODELS = {
    "ours, RMSNorm": Language,
    "ours, LayerNorm and biases": lambda: Language("layer", bias=True),
    "ours, head of its own": lambda: Language("layer", tied=False),
    "ours, shared keys": lambda: Language(kv=2),
    "gpt2": gpt2,
    "gpt2, head of its own": lambda: gpt2(tie_word_embeddings=False),
    "llama": llama,
    "llama, tied and shared keys": lambda: llama(tie_word_embeddings=True, num_key_value_heads=2),
    "llama, wide heads": lambda: llama(head_dim=8),
    "qwen2": lambda: llama("Qwen2", num_key_value_heads=2),
}
every = pytest.mark.parametrize("name", MODELS)


def built(name):
    torch.manual_seed(0)
    return MODELS[name]().double().eval()


def parts_of(model):
    """The first layer's norm, its maps as matrices `(d, heads, size)` of query, key, value and `(heads, size, d)` of output, and the tables."""
    if isinstance(model, Language):
        block = model.encoder.layers[0]
        attention = block.self_attn
        sizes = attention.num_heads, attention.num_kv_heads, attention.num_kv_heads
        rows = attention.in_proj_weight.split([n * attention.head_dim for n in sizes])
        out, norm, tables = attention.out_proj.weight, block.norm1, (model.table.weight, model.head.weight)
        width = attention.head_dim
    elif hasattr(model, "transformer"):
        block = model.transformer.h[0]
        rows = [part.T for part in block.attn.c_attn.weight.split(D, dim=1)]
        out, norm, width = block.attn.c_proj.weight.T, block.ln_1, D // HEADS
        tables = (model.transformer.wte.weight, model.lm_head.weight)
    else:
        block = model.model.layers[0]
        rows = [getattr(block.self_attn, f"{name}_proj").weight for name in "qkv"]
        out, norm, width = block.self_attn.o_proj.weight, block.input_layernorm, block.self_attn.head_dim
        tables = (model.model.embed_tokens.weight, model.lm_head.weight)
    maps = [part.detach().numpy().reshape(-1, width, D) for part in rows]
    maps = [np.repeat(part, len(maps[0]) // len(part), axis=0) for part in maps]
    return norm, maps, out.detach().numpy().T.reshape(-1, width, D), tables


def ppmi(counts):
    """Positive PMI with smoothed contexts, written out."""
    r, c = counts.sum(1, keepdims=True), counts.sum(0, keepdims=True) ** 0.75
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(np.maximum(np.log(counts) - np.log(r) - np.log(c / c.sum()), 0.0), neginf=0.0)


def directed():
    counts = np.zeros((V, V))
    for apart in range(1, 6):
        np.add.at(counts, (TEXT[:-apart], TEXT[apart:]), 1 / apart)
    return ppmi(counts)


def projected(left, matrix, right):
    """The matrix between the columns of two tables: least squares by orthonormal bases."""
    bases = [np.linalg.svd(side, full_matrices=False) for side in (left, right)]
    p, q = (u[:, s > 1e-6 * s[0]] @ u[:, s > 1e-6 * s[0]].T for u, s, _ in bases)
    return p @ matrix @ q


def cut(matrix, rank, left, right):
    """The part of a projected matrix that `rank` singular vectors of W = left^+ matrix right^+T give."""
    w = np.linalg.pinv(left, rcond=1e-6) @ matrix @ np.linalg.pinv(right, rcond=1e-6).T
    u, s, vt = np.linalg.svd(w)
    return left @ (u[:, :rank] * s[:rank]) @ vt[:rank] @ right.T


@every
def test_scores_and_values_are_what_was_counted(name):
    model = built(name)
    report = warm_start_(model, COUNTS, beta=0.7, gain=0.4)
    norm, (query, key, value), output, (table, head) = parts_of(model)
    known = np.unique(TEXT)
    assert report.counted == len(known) < V
    seen = norm(table.detach()[None])[0].detach().numpy()[known]
    width, kv = query.shape[1], 2 if "shared keys" in name or name == "qwen2" else HEADS
    wanted = directed()[np.ix_(known, known)]
    # rows look, columns are looked at; heads add up
    scores = sum((seen @ q.T) @ (seen @ k.T).T / width**0.5 for q, k in zip(query, key, strict=True))
    whole = projected(seen, wanted.T, seen)
    rank = min(kv * width, D)
    np.testing.assert_allclose(scores, 0.7 * cut(wanted.T, rank, seen, seen), atol=1e-8)
    if rank == D:
        np.testing.assert_allclose(scores, 0.7 * whole, atol=1e-8)
        assert np.corrcoef(scores.ravel(), whole.ravel())[0, 1] ** 2 > 0.98
    assert abs(report.scores - (1 - ((wanted.T - scores / 0.7) ** 2).sum() / (wanted**2).sum())) < 1e-8
    outward = head.detach().numpy()[known]
    logits = sum((seen @ v.T) @ o for v, o in zip(value, output, strict=True)) @ outward.T
    np.testing.assert_allclose(logits, 0.4 * cut(wanted, rank, seen, outward), atol=1e-8)
    assert abs(report.follows - (1 - ((wanted - logits / 0.4) ** 2).sum() / (wanted**2).sum())) < 1e-8


@every
def test_everything_else_stays(name):
    for parts in (("embedding",), ("qk",), ("ov",), ("embedding", "qk", "ov")):
        model = built(name)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        report = warm_start_(model, COUNTS, parts)
        assert report.parts == parts
        moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
        names = dict(model.named_parameters(remove_duplicate=False))
        tied = {key for key in names if any(names[key] is names[other] for other in report.changed)}
        zero = {key for key in report.changed if key.endswith("bias")}
        assert moved <= tied
        assert set(report.changed) - zero <= moved
        assert (report.scores is None) == ("qk" not in parts)


def test_the_layers_own_scores_follow_the_counts():
    """The positive control of `explain_head`: through the model's forward pass, without positions."""
    model = built("gpt2")
    nn.init.zeros_(model.transformer.wpe.weight)
    ids = torch.from_numpy(TEXT[:61])[None]

    def fit():
        seen = []
        hook = model.transformer.h[0].attn.c_attn.register_forward_hook(lambda module, given, out: seen.append(out))
        with torch.no_grad():
            model(ids)
        hook.remove()
        query, key, _ = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2)[0] for part in seen[0].split(D, dim=-1))
        scores = (query @ key.mT / query.shape[-1] ** 0.5).sum(0).numpy()
        known = np.unique(TEXT)
        table = model.transformer.h[0].ln_1(model.transformer.wte.weight).detach().numpy()[known]
        wanted = projected(table, directed()[np.ix_(known, known)].T, table)
        place = np.searchsorted(known, TEXT[:61])
        return np.corrcoef(scores.ravel(), wanted[np.ix_(place, place)].ravel())[0, 1] ** 2

    warm_start_(model, COUNTS, ("embedding",))
    assert fit() < 0.02
    warm_start_(model, COUNTS)
    assert fit() > 0.98


@pytest.mark.parametrize(("kind", "scale"), [("granite", 0.37), ("gpt2", 1.0), ("ours", 1.9), ("negative", -0.4)])
def test_scores_are_as_strong_whatever_they_are_multiplied_by(kind, scale):
    torch.manual_seed(0)
    if kind == "granite":
        model = llama("Granite", attention_multiplier=scale)
    elif kind == "gpt2":
        model = gpt2(scale_attn_weights=False)
    else:
        model = Language(kernel=Softmax(scale))
    model = model.double()
    warm_start_(model, COUNTS, beta=0.7)
    norm, (query, key, _), _, (table, _) = parts_of(model)
    known = np.unique(TEXT)
    seen = norm(table.detach()[None])[0].detach().numpy()[known]
    scores = scale * sum((seen @ q.T) @ (seen @ k.T).T for q, k in zip(query, key, strict=True))
    wanted = projected(seen, directed()[np.ix_(known, known)].T, seen)
    np.testing.assert_allclose(scores, 0.7 * wanted, atol=1e-8)


def test_queries_and_keys_that_cannot_be_set():
    """The model is as it was; the other parts can be had."""
    neo = hf.GPTNeoConfig(vocab_size=V, hidden_size=D, num_layers=1, num_heads=HEADS, attention_types=[[["global"], 1]])
    for model, words in (
        (llama("Qwen3", head_dim=6, num_key_value_heads=2), "normalises queries and keys"),
        (hf.GPTNeoForCausalLM(neo), "does not say what its scores are multiplied by"),
        (Language(kernel=Gaussian(1.3)), "whose scores are no products"),
        (Language(kernel=Softmax(torch.ones(HEADS))), "one number other than 0"),
    ):
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(Unsupported, match=words):
            warm_start_(model, COUNTS)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert warm_start_(model, COUNTS, ("embedding", "ov")).follows > 0.2


def test_rows_have_length_one_and_uncounted_ones_stay():
    model = built("gpt2")
    before = model.transformer.wte.weight.detach().clone()
    warm_start_(model, COUNTS, "embedding")
    after = model.transformer.wte.weight.detach()
    known = np.unique(TEXT)
    lengths = after[known].norm(dim=1)
    assert torch.allclose(lengths, torch.ones_like(lengths))
    unknown = np.setdiff1d(np.arange(V), known)
    assert len(unknown) >= 2
    assert torch.equal(after[unknown], before[unknown])
    # inner products are those of the symmetric matrix's largest eigenvectors
    counts = np.zeros((V, V))
    for apart in range(1, 6):
        np.add.at(counts, (TEXT[:-apart], TEXT[apart:]), 1 / apart)
    matrix = ppmi(counts + counts.T)
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    order = np.argsort(-abs(values))[:D]
    rows = (vectors[:, order] * np.sqrt(abs(values[order])))[known]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(after[known].numpy() @ after[known].numpy().T, rows @ rows.T, atol=1e-8)


def test_large_vocabularies_take_the_other_way(monkeypatch):
    from heedful.convert import warm

    tables = []
    for limit in (warm.WHOLE, 5):
        monkeypatch.setattr(warm, "WHOLE", limit)
        model = built("gpt2")
        warm_start_(model, COUNTS, "embedding")
        tables.append(model.transformer.wte.weight.detach())
    torch.testing.assert_close(*tables)


def test_a_table_of_ones_own():
    given = np.random.default_rng(0).normal(size=(V, D))
    model = built("ours, head of its own")
    report = warm_start_(model, COUNTS, ("embedding", "ov"), embedding=given)
    known = np.unique(TEXT)
    wanted = torch.from_numpy(given / np.linalg.norm(given, axis=1, keepdims=True))[known]
    assert torch.allclose(model.table.weight[known], wanted)
    assert torch.allclose(model.head.weight[known], wanted)
    assert report.changed[:2] == ("table.weight", "head.weight")
    with pytest.raises(InvalidArgument, match=r"embedding must have shape \(tokens, size\) = \(53, 24\)"):
        warm_start_(model, COUNTS, embedding=given[:3])


def test_counts_of_words_by_a_tokenizer():
    class Names:
        def __len__(self):
            return V

        def convert_ids_to_tokens(self, ids):
            return [f"w{(at * 7) % V}" for at in ids]

    words = Cooccurrence(5, progress=False).fit([[f"w{at}" for at in TEXT]])
    renamed = Cooccurrence(5, vocabulary=V, progress=False).fit([np.argsort(np.arange(V) * 7 % V)[TEXT]])
    models = [built("gpt2"), built("gpt2")]
    reports = [warm_start_(models[0], words, tokenizer=Names()), warm_start_(models[1], renamed)]
    assert reports[0].counted == reports[1].counted
    assert reports[0].scores == pytest.approx(reports[1].scores, abs=1e-9)
    rows = [model.transformer.wte.weight.detach() for model in models]
    torch.testing.assert_close(rows[0] @ rows[0].T, rows[1] @ rows[1].T)


def test_it_says_what_it_did():
    report = warm_start_(built("llama"), COUNTS)
    assert "rotary positions" in str(report)
    assert report.to_dict()["layer"] == 0
    assert "model.embed_tokens.weight" in str(report)
    assert warm_start_(built("gpt2"), COUNTS, layer=1).changed[1].startswith("transformer.h.1.")


def test_what_it_refuses():
    model = built("gpt2")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for options, words in (
        ({"parts": ()}, "one or more of"),
        ({"parts": ("keys",)}, "parts must be one of"),
        ({"beta": float("nan")}, "beta must be"),
        ({"layer": 2}, "layer must be below 2"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            warm_start_(model, COUNTS, **options)
    with pytest.raises(InvalidArgument, match="must be a fitted heedful"):
        warm_start_(model, np.eye(V))
    with pytest.raises(InvalidArgument, match="the counts have 60 tokens and the model 53"):
        warm_start_(model, Cooccurrence(2, vocabulary=60, progress=False).fit([TEXT]))
    with pytest.raises(InvalidArgument, match="word numbers are no token numbers"):
        warm_start_(model, Cooccurrence(2, progress=False).fit(["the sea is deep", "the sand is warm"]))
    with pytest.raises(InvalidArgument, match="finite"):
        warm_start_(model, COUNTS, embedding=np.full((V, D), np.nan))
    with pytest.raises(InvalidArgument, match="fewer than two"):
        warm_start_(model, Cooccurrence(2, vocabulary=V, progress=False).fit([[3]]))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    sizes = {
        "vocab_size": V,
        "hidden_size": D,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "intermediate_size": 5,
    }
    with pytest.raises(Unsupported, match="normalise first"):
        warm_start_(hf.BertModel(hf.BertConfig(**sizes)), COUNTS)
    with pytest.raises(Unsupported, match="normalise first"):
        warm_start_(Language(norm_first=False), COUNTS)
    wrong = llama(num_key_value_heads=3)
    with pytest.raises(Unsupported, match="4 heads of queries and 3 of keys"):
        warm_start_(wrong, COUNTS)
    with pytest.raises(Unsupported, match="no list of layers"):
        warm_start_(nn.Embedding(V, D), COUNTS)

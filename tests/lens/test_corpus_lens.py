"""How much of a head is counting: shares against least squares written apart, counts against the counter, controls."""

import numpy as np
import pytest
import torch

pytest.importorskip("scipy", reason="the extra 'corpus' is not installed")
pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

import transformers as hf

from answering import masked, wordpiece
from heedful import InvalidArgument, Unsupported
from heedful.convert import warm_start_
from heedful.corpus import Cooccurrence, CorpusAttention
from heedful.lens import observe
from heedful.lens.corpus import explain_head, explain_heads, installed_counts
from heedful.lens.corpus.heads import BAND, Counted, _Design
from heedful.lens.corpus.installed import count, installed_texts

V, W = 29, 4


def text(length, seed=0):
    g = np.random.default_rng(seed)
    after = g.dirichlet(np.full(V, 0.15), size=V)
    ids = [0]
    for _ in range(length - 1):
        ids.append(int(g.choice(V, p=after[ids[-1]])))
    return np.array(ids)


TEXT = text(3001)
COUNTS = Cooccurrence(W, vocabulary=V, per_distance=True, progress=False).fit([TEXT])
IDS = TEXT[101:132]


def share(columns, y, rows):
    """R^2 of y within rows: dummies of rows beside the regressors, by numpy's least squares."""
    dummies = np.eye(rows.max() + 1)[rows]
    own = y - dummies @ np.linalg.lstsq(dummies, y, rcond=None)[0]
    design = np.column_stack([dummies, *columns])
    rest = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    return 1 - (rest**2).sum() / (own**2).sum()


def regressors(ids, causal):
    """Every regressor by loops over pairs."""
    symmetric = COUNTS.association("ppmi", directed=False).toarray()
    directed = COUNTS.association("ppmi").toarray()
    near = [COUNTS.association("ppmi", d).toarray() for d in range(1, W + 1)]
    pairs = [(i, j) for i in range(len(ids)) for j in range(len(ids)) if i != j and (j < i or not causal)]
    s, d, p, a = [], [], [], []
    for i, j in pairs:
        first, second = (ids[j], ids[i]) if j < i else (ids[i], ids[j])
        side = 0 if j < i else 1
        s.append([symmetric[ids[i], ids[j]]])
        d.append([directed[first, second] * (side == k) for k in (0, 1)])
        at = near[abs(i - j) - 1][first, second] if abs(i - j) <= W else 0.0
        p.append([at * (side == k) for k in (0, 1)])
        apart = max(-W - 1, min(W + 1, j - i))
        a.append([float(apart == k) for k in range(-W - 1, W + 2)])
    return np.array([i for i, _ in pairs]), pairs, *(np.array(part) for part in (s, d, p, a))


@pytest.mark.parametrize("causal", [False, True])
def test_shares_by_least_squares(causal):
    scores = np.random.default_rng(1).normal(size=(len(IDS), len(IDS)))
    ours = explain_head(scores, IDS, COUNTS, is_causal=causal)
    rows, pairs, s, d, p, a = regressors(IDS, causal)
    y = np.array([scores[i, j] for i, j in pairs])
    rows = np.unique(rows, return_inverse=True)[1]
    for name, columns in (
        ("symmetric", [s]),
        ("directed", [d]),
        ("distance", [p]),
        ("position", [a]),
        ("together", [s, d, p, a]),
    ):
        assert abs(getattr(ours, name) - share(columns, y, rows)) < 1e-9, name
    assert abs(ours.gain - (ours.together - ours.chance)) < 1e-12
    assert abs(ours.gain) < 0.1


def test_a_head_that_counts_is_known():
    for name, options in (("symmetric", {}), ("directed", {"directed": True}), ("distance", {"positions": "distance"})):
        head = explain_head(CorpusAttention(COUNTS, **options).scores(IDS), IDS, COUNTS)
        assert getattr(head, name) > 1 - 1e-9
        # Scores at each distance are zero beyond the window, which positions know too.
        assert head.gain > (0.2 if name == "distance" else 0.4)
    places = np.arange(len(IDS))
    near = explain_head(-np.minimum(abs(places[:, None] - places), W + 1), IDS, COUNTS)
    assert near.position > 1 - 1e-9
    assert abs(near.gain) < 1e-9
    level = explain_head(np.ones((len(IDS), len(IDS))), IDS, COUNTS)
    assert level.together == 0


def test_what_rows_have_in_common_does_not_count():
    scores = np.random.default_rng(2).normal(size=(len(IDS), len(IDS)))
    one, other = (explain_head(scores + shift, IDS, COUNTS) for shift in (0.0, np.arange(len(IDS))[:, None]))
    assert one.to_dict() == pytest.approx(other.to_dict(), abs=1e-9)


def test_words_are_exchanged_for_others_that_are_as_frequent():
    """Scores that know how frequent the key is, and no pair: beyond any other words they seem counted, beyond as frequent ones they do not."""
    g = np.random.default_rng(0)
    size = 90
    share = 1 / np.arange(1, size + 1)
    frequent = g.choice(size, p=share / share.sum(), size=9001)
    counts = Cooccurrence(W, vocabulary=size, per_distance=True, progress=False).fit([frequent])
    ids = frequent[:150]
    scores = np.tile(-np.log(counts.word_counts_[ids]), (150, 1))
    alike, others = (explain_head(scores, ids, counts, alike=alike) for alike in (True, False))
    assert alike.together == others.together > 0.1
    assert others.gain > 0.1
    assert abs(alike.gain) < others.gain / 3
    design = _Design([ids], [np.ones((150, 150), dtype=bool)], Counted(counts))
    order = np.argsort(np.argsort(counts.word_counts_[design.words], kind="stable"))
    other = design.exchanged(g, True)
    assert sorted(other) == list(range(len(design.words)))
    # A word alone in the first or the last band stays.
    assert (other == np.arange(len(other))).sum() <= 2
    assert 0 < abs(order[other] - order).max() < BAND
    assert abs(order[design.exchanged(g, False)] - order).max() > BAND


def gpt2(seed=0):
    torch.manual_seed(seed)
    config = hf.GPT2Config(
        vocab_size=V, n_embd=32, n_layer=2, n_head=1, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    return hf.GPT2LMHeadModel(config).eval()


def test_a_layer_that_was_started_from_counts():
    """The one head of the first layer holds directed PPMI; a random one, and the second layer, do not."""
    ids = torch.from_numpy(np.stack([TEXT[at : at + 60] for at in (0, 700, 1400)]))
    model = gpt2()
    torch.nn.init.zeros_(model.transformer.wpe.weight)
    before = explain_heads(model, ids, COUNTS)
    assert max(one.gain for one in before) < 0.05
    warm_start_(model, COUNTS)
    after = explain_heads(model, ids, COUNTS)
    assert after[0].directed > 0.98
    assert after.most(1)[0] == after[0]
    assert after[0].gain > 0.5 > 10 * after.luck
    assert after.pairs == 3 * 60 * 59 // 2
    assert "counts of 3,001 tokens" in after.source
    assert "head 0.0" in str(after)
    json = after.to_dict()
    assert json["heads"][0]["gain"] == after[0].gain


def test_padding_special_tokens_and_batches():
    tokenizer, model = wordpiece(), masked()
    counts = Cooccurrence(3, tokenizer=tokenizer, per_distance=True, progress=False).fit(
        ["the cat sat on the mat and the dog ran"] * 5
    )
    alone = explain_heads(model, "the cat sat on the mat", counts, tokenizer=tokenizer)
    assert alone.pairs == 6 * 5
    both = explain_heads(model, ["the cat sat on the mat", "the dog"], counts, tokenizer=tokenizer)
    assert both.pairs == 6 * 5 + 2
    seen = observe(model, "the cat sat on the mat", tokenizer=tokenizer)
    assert explain_heads(seen, counts=counts) == alone
    with pytest.raises(InvalidArgument, match="leave texts out"):
        explain_heads(seen, "the cat", counts)


def test_small_counts_are_those_of_the_counter():
    documents = [TEXT[:900], TEXT[900:901], TEXT[901:]]
    whole = Cooccurrence(W, vocabulary=V, per_distance=True, progress=False).fit(documents)
    wanted = np.array([3, 17, 4, 28, 0])
    small = count(documents, wanted, [f"w{at}" for at in wanted], "a world", W)
    assert small.tokens == 3001
    assert small.encode(["w4", "w5"]).tolist() == [2, -1]
    for distance, directed in ((None, True), (None, False), (1, True), (W, True), (2, False)):
        ours = small.association(distance, directed=directed)
        theirs = whole.association("ppmi", distance, directed=directed).toarray()[np.ix_(wanted, wanted)]
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
        assert ours.any()


def test_what_is_installed_is_counted():
    tokenizer = wordpiece()
    counts = installed_counts(tokenizer, ["[CLS]", "the", "a", "is", "cat", "the", "[SEP]"])
    assert counts.names == ("a", "cat", "is", "the")
    assert counts.tokens > 100_000
    assert sum(map(len, installed_texts())) > 1_000_000
    table = counts.association()
    assert table.shape == (4, 4)
    assert np.isfinite(table).all()
    assert counts.pairs[0, 2, 0] > 100  # "is a"
    assert "handbook" in counts.source
    heads = explain_heads(masked(), "the big cat is a good cat and the dog is bad", tokenizer=tokenizer)
    assert heads.source == counts.source
    with pytest.raises(InvalidArgument, match="one of Hugging Face"):
        installed_counts(str.split, ["a"])


def test_what_it_refuses():
    model = gpt2()
    ids = torch.from_numpy(IDS[None])
    for counts, words in (
        (None, "or the model's tokenizer"),
        (np.eye(V), "fitted heedful"),
        (Cooccurrence(2, vocabulary=V, progress=False).fit([TEXT]), "per_distance=True"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            explain_heads(model, ids, counts)
    with pytest.raises(InvalidArgument, match="exchanges must be"):
        explain_heads(model, ids, COUNTS, exchanges=1)
    with pytest.raises(InvalidArgument, match=r"shape \(n, n\)"):
        explain_head(np.zeros((3, 4)), [1, 2, 3], COUNTS)
    with pytest.raises(InvalidArgument, match="no two words"):
        explain_head(np.zeros((3, 3)), [-1, 2, -1], COUNTS)
    words = Cooccurrence(2, per_distance=True, progress=False).fit(["sea and sand"])
    with pytest.raises(Unsupported, match="no two words of this text"):
        explain_heads(model, ids, words)

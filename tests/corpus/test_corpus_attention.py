"""Attention from counts: look-ups, factors, positions and heads against loops over pairs written apart."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("scipy", reason="the extra 'corpus' is not installed")

from scipy.sparse import csr_array

from heedful import InvalidArgument, Unsupported, attend
from heedful.corpus import Cooccurrence, CorpusAttention, Vocabulary, association, project
from heedful.corpus.cloze import gap_logits
from heedful.corpus.positions import rotations
from heedful.nn import Module, TokenAttention

V, W = 23, 5


def world(seed=3, documents=31, length=47):
    """Documents of numbers in which what follows depends on what stood one and three places before."""
    g = np.random.default_rng(seed)
    after = g.dirichlet(np.full(V, 0.2), size=(2, V))
    texts = []
    for _ in range(documents):
        ids = list(g.integers(V, size=3))
        while len(ids) < length:
            ids.append(int(g.choice(V, p=(after[0, ids[-1]] + after[1, ids[-3]]) / 2)))
        texts.append(np.array(ids))
    return texts


TEXTS = world()
COUNTS = Cooccurrence(W, vocabulary=V, per_distance=True, progress=False).fit(TEXTS)
IDS = np.array([4, 11, 2, 2, 19, 0, 7, 11, 22])


def pair_counts(distance=None):
    """C by a loop over documents and places; of one distance without its weight."""
    out = [[0.0] * V for _ in range(V)]
    for text in TEXTS:
        for s in range(len(text)):
            for apart in range(1, W + 1):
                if s + apart < len(text) and distance in (None, apart):
                    out[text[s]][text[s + apart]] += 1 / apart if distance is None else 1.0
    return out


def ppmi(counts, smoothing=0.75):
    """max(ln C / (r p), 0), cell by cell."""
    r = [sum(row) for row in counts]
    c = [sum(row[b] for row in counts) ** smoothing for b in range(V)]
    return [
        [max(math.log(x * sum(c) / (r[a] * c[b])), 0.0) if x else 0.0 for b, x in enumerate(row)]
        for a, row in enumerate(counts)
    ]


def conditional(counts, prior=200.0):
    r = [sum(row) for row in counts]
    c = [sum(row[b] for row in counts) for b in range(V)]
    p = [x / sum(c) for x in c]
    return [
        [math.log((x + prior * p[b]) / (r[a] + prior)) - math.log(p[b]) for b, x in enumerate(row)]
        for a, row in enumerate(counts)
    ]


def transposed(matrix):
    return [list(column) for column in zip(*matrix, strict=True)]


def added(one, other):
    return [[x + y for x, y in zip(*rows, strict=True)] for rows in zip(one, other, strict=True)]


DIRECTED = pair_counts()
SYMMETRIC = added(DIRECTED, transposed(DIRECTED))


def check_close(ours, wanted, bound=1e-10):
    np.testing.assert_allclose(np.asarray(ours), np.asarray(wanted), rtol=0, atol=bound)


def softmax(row):
    top = max(row, default=0.0)
    powers = [math.exp(x - top) if x > -math.inf else 0.0 for x in row]
    return [x / sum(powers) if sum(powers) else 0.0 for x in powers]


def test_scores_are_looked_up():
    table = ppmi(SYMMETRIC)
    wanted = [[table[a][b] for b in IDS] for a in IDS]
    ours = CorpusAttention(COUNTS).scores(IDS)
    assert ours.dtype == torch.float64
    check_close(ours, wanted)
    sparse = association(csr_array(np.array(SYMMETRIC)), "ppmi")
    one_hot = np.eye(V)[IDS]
    for path in (project(sparse, IDS), project(sparse.toarray(), IDS), CorpusAttention(sparse).scores(IDS)):
        check_close(path, one_hot @ sparse.toarray() @ one_hot.T)
    factored = CorpusAttention(COUNTS, rank=V).factors(IDS)
    check_close((factored[0] @ factored[1].mT)[0] / V**0.5, wanted)


@pytest.mark.parametrize("kind", ["ppmi", "conditional"])
@pytest.mark.parametrize("positions", [None, "distance", "additive", "tucker"])
def test_a_batch_and_unknown_words(kind, positions):
    batch = np.array([IDS, np.where(IDS == 11, -1, IDS)])
    ours = CorpusAttention(COUNTS, kind, positions=positions)
    whole = ours.scores(batch)
    check_close(whole[0], ours.scores(IDS), 0)
    unknown = batch[1] < 0
    assert unknown.sum() == 2
    assert (whole[1][unknown] == 0).all()
    assert (whole[1][:, unknown] == 0).all()
    check_close(whole[1][~unknown][:, ~unknown], whole[0][~unknown][:, ~unknown], 0)
    assert (ours.scores(np.full(3, -1)) == 0).all()


def test_two_vocabularies_are_cross_attention():
    matrix = np.arange(35.0).reshape(5, 7)
    check_close(project(csr_array(matrix), [4, 0, -1], [6, 1]), [[34, 29], [6, 1], [0, 0]], 0)


def test_renaming_words_changes_nothing():
    order = np.random.default_rng(0).permutation(V)
    renamed = Cooccurrence(W, vocabulary=V, per_distance=True, progress=False).fit([order[text] for text in TEXTS])
    for options in ({}, {"directed": True}, {"positions": "distance"}, {"positions": "additive"}):
        ours, again = (CorpusAttention(counts, **options) for counts in (COUNTS, renamed))
        check_close(again.scores(order[IDS]), ours.scores(IDS), 1e-12)
        check_close(again.attention(order[IDS]), ours.attention(IDS), 1e-12)


def test_every_word_once_gives_the_matrix_itself():
    check_close(CorpusAttention(COUNTS).scores(np.arange(V)), ppmi(SYMMETRIC))


@pytest.mark.parametrize("kind", ["ppmi", "conditional"])
@pytest.mark.parametrize("form", ["directed", "distance"])
def test_the_order_of_words_counts(kind, form):
    formula = ppmi if kind == "ppmi" else conditional
    ours = CorpusAttention(COUNTS, kind, directed=True, positions=None if form == "directed" else form).scores(IDS)
    tables = {apart: formula(pair_counts(apart)) for apart in range(1, W + 1)} if form == "distance" else {}
    whole = formula(DIRECTED)
    for i, a in enumerate(IDS):
        for j, b in enumerate(IDS):
            earlier, later = (a, b) if i < j else (b, a)
            table = whole if form == "directed" else tables.get(abs(i - j))
            if i == j:
                wanted = whole[a][a] if form == "directed" else 0.0
            else:
                wanted = 0.0 if table is None else table[earlier][later]
            assert abs(float(ours[i, j]) - wanted) < 1e-10


def test_biases_of_distances():
    whole = ppmi(DIRECTED)
    ours = CorpusAttention(COUNTS, positions="additive").scores(IDS)
    kappa = []
    for apart in range(1, W + 1):
        counts, table = pair_counts(apart), ppmi(pair_counts(apart))
        cells = [(a, b) for a in range(V) for b in range(V) if counts[a][b]]
        total = sum(counts[a][b] for a, b in cells)
        kappa.append(sum(counts[a][b] * (table[a][b] - whole[a][b]) for a, b in cells) / total)
    for i in range(len(IDS)):
        for j in range(i + 1, len(IDS)):
            wanted = whole[IDS[i]][IDS[j]] + kappa[j - i - 1] if j - i <= W else 0.0
            assert abs(float(ours[i, j]) - wanted) < 1e-10
            assert ours[i, j] == ours[j, i]


def test_small_matrices_of_full_rank_are_the_associations():
    exact = CorpusAttention(COUNTS, positions="distance")
    check_close(CorpusAttention(COUNTS, positions="tucker", rank=V).scores(IDS), exact.scores(IDS))
    even = Cooccurrence(W, vocabulary=V + 1, per_distance=True, progress=False).fit(TEXTS)
    energy = CorpusAttention(even).explained_energy()
    assert energy.rank == V + 1
    assert abs(energy.tucker - 1) < 1e-9
    assert abs(energy.whole - energy.none) < 1e-9
    assert energy.tucker > energy.additive >= energy.none
    assert energy.tucker > energy.rotary
    assert "rotations of planes" in str(energy)


def test_energy_by_a_loop():
    energy = CorpusAttention(COUNTS, rank=6).explained_energy()
    whole = np.array(ppmi(DIRECTED))
    u, s, vt = np.linalg.svd(whole)
    missed, total = dict.fromkeys(("none", "tucker", "whole"), 0.0), 0.0
    for apart in range(1, W + 1):
        counts, table = np.array(pair_counts(apart)), np.array(ppmi(pair_counts(apart)))
        forms = {"none": whole, "whole": u[:, :6] * s[:6] @ vt[:6]}
        forms["tucker"] = u[:, :6] @ (u[:, :6].T @ table @ vt[:6].T) @ vt[:6]
        for name, form in forms.items():
            missed[name] += (counts * (table - form) ** 2).sum()
        total += (counts * table**2).sum()
    for name, error in missed.items():
        assert abs(getattr(energy, name) - (1 - error / total)) < 1e-9


def test_rotations_are_found_again():
    """Matrices that are scaled rotations come back; nothing else has a smaller error on a grid around it."""
    distance = np.arange(1, 8)
    waves = [0.7 * np.exp(0.3j) * (0.9 * np.exp(0.8j)) ** distance, -0.4 * (0.55 * np.exp(-2.1j)) ** distance]
    small = np.zeros((7, 4, 4))
    for m, wave in enumerate(waves):
        small[:, 2 * m, 2 * m] = small[:, 2 * m + 1, 2 * m + 1] = wave.real
        small[:, 2 * m + 1, 2 * m], small[:, 2 * m, 2 * m + 1] = wave.imag, -wave.imag
    check_close(rotations(small), small, 1e-5)
    noisy = small + np.random.default_rng(0).normal(scale=0.1, size=small.shape)
    assert ((rotations(noisy) - noisy) ** 2).sum() <= ((small - noisy) ** 2).sum()


def test_attention_is_a_softmax_of_scores():
    for causal in (False, True):
        ours = CorpusAttention(COUNTS, beta=0.7, is_causal=causal)
        scores = ours.scores(IDS).tolist()
        for i, row in enumerate(scores):
            seen = [0.7 * x if j != i and (j < i or not causal) else -math.inf for j, x in enumerate(row)]
            check_close(ours.attention(IDS)[0, i], softmax(seen))


def test_what_is_hidden_has_no_weight():
    padding = np.zeros(len(IDS), dtype=bool)
    padding[[2, 7]] = True
    for options in ({}, {"is_causal": True}, {"heads": "distance"}, {"heads": 3, "rank": 21}):
        weights = CorpusAttention(COUNTS, **options).attention(IDS, padding)
        assert (weights[..., padding] == 0).all()
        assert (torch.diagonal(weights, dim1=-2, dim2=-1) == 0).all()
        sums = weights.sum(-1)
        assert ((sums - 1).abs() < 1e-12).logical_or(sums == 0).all()
        assert (sums > 0).any(-1).all()
    alone = CorpusAttention(COUNTS)
    assert alone.attention([5]).tolist() == [[[0.0]]]
    assert alone.transform([np.array([5])])[0].shape == (1, V)
    assert CorpusAttention(COUNTS, exclude_self=False).attention([5]).tolist() == [[[1.0]]]
    with pytest.raises(InvalidArgument, match="padding must be boolean"):
        alone.attention(IDS, padding[:3])


def test_evidence_is_the_triple_product():
    one_hot, table = np.eye(V)[IDS], np.array(ppmi(SYMMETRIC))
    check_close(CorpusAttention(COUNTS).evidence(IDS), one_hot @ table @ one_hot.T @ one_hot @ table)
    with pytest.raises(InvalidArgument, match="of one sequence"):
        CorpusAttention(COUNTS).evidence(IDS[None])


def test_logits_add_associations_to_frequencies():
    ours = CorpusAttention(COUNTS, "conditional")
    table, occurs = conditional(SYMMETRIC), np.bincount(np.concatenate(TEXTS), minlength=V)
    weights = ours.attention(IDS)[0].tolist()
    wanted = [
        [math.log(occurs[b] / occurs.sum()) + sum(w * table[a][b] for w, a in zip(row, IDS, strict=True)) for b in range(V)]
        for row in weights
    ]  # fmt: skip
    check_close(ours.logits(IDS), wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"heads": 2, "rank": 22},
        {"heads": 3, "rank": 21},
        {"heads": "distance"},
        {"heads": "distance", "is_causal": True},
    ],
    ids=str,
)
def test_heads_add_up(options):
    ours = CorpusAttention(COUNTS, **options)
    heads = ours.head_scores(IDS)
    assert len(heads) == ours.num_heads
    if "rank" in options:
        u, s, vt = np.linalg.svd(np.array(ppmi(SYMMETRIC)))
        cut = u[:, : ours.rank] * s[: ours.rank] @ vt[: ours.rank]
        check_close(heads.sum(0), cut[np.ix_(IDS, IDS)])
    else:
        whole = ours.scores(IDS)
        check_close(heads.sum(0), whole.tril() if options.get("is_causal") else whole)


def test_the_whole_rank_in_heads_is_the_matrix():
    ours = CorpusAttention(Cooccurrence(W, vocabulary=24, progress=False).fit(TEXTS), heads=4)
    assert ours.rank == 24
    check_close(ours.head_scores(IDS).sum(0), ours.scores(IDS))


def test_heads_by_distance_see_their_band():
    weights = CorpusAttention(COUNTS, heads="distance").attention(IDS)
    assert weights.shape == (6, 9, 9)
    for head, (low, high) in enumerate([(1, 1), (2, 3), (4, 99)] * 2):
        for i in range(9):
            for j in range(9):
                back = (i - j) if head < 3 else (j - i)
                assert (weights[head, i, j] > 0) == (low <= back <= high)


def test_plain_attend_of_the_factors():
    """Rows of the factors as queries and keys of the operator, whose default divides by the root of their size."""
    values = torch.randn(1, 1, len(IDS), 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    others = ~torch.eye(len(IDS), dtype=torch.bool)
    for options in ({}, {"exclude_self": False}, {"exclude_self": False, "directed": True, "is_causal": True}):
        ours = CorpusAttention(COUNTS, rank=V, beta=1.3, **options)
        query, key = (side[None] for side in ours.factors(IDS))
        out = attend(query, key, values, None if "exclude_self" in options else others, is_causal=ours.is_causal)
        check_close(out[0, 0], ours.attention(IDS)[0] @ values[0, 0])


def test_contextual_vectors():
    vectors = np.random.default_rng(1).normal(size=(V, 7))
    ours = CorpusAttention(COUNTS, vectors=vectors, mix=0.3)
    ids = np.append(IDS, -1)
    (out,) = ours.transform([ids])
    weights = np.zeros((10, 10))
    weights[:9, :9] = ours.attention(IDS)[0]
    weights[9, :9] = 1 / 9
    own = np.vstack([vectors[IDS], np.zeros(7)])
    check_close(out, 0.7 * own + 0.3 * weights @ own)
    check_close(ours.embed([ids])[0], out[:9].mean(0))
    assert ours.embed([np.array([-1])]).tolist() == [[0.0] * 7]
    default = CorpusAttention(COUNTS, rank=6).vectors_
    u = np.linalg.svd(np.array(ppmi(SYMMETRIC)))[0][:, :6]
    check_close(abs((default * u).sum(0)), np.ones(6))


def test_vectors_of_words():
    texts = ["the sea is deep and the sand is warm", "a deep warm sea"] * 3
    counts = Cooccurrence(3, progress=False).fit(texts)
    named = Vocabulary(["warm", "sea", "cold"])
    words = SimpleNamespace(vocabulary_=named, vectors_=np.arange(9.0).reshape(3, 3))
    ours = CorpusAttention(counts, vectors=words)
    for word in ("sea", "warm"):
        place = words.vocabulary_.index(word)
        check_close(ours.vectors_[counts.vocabulary_.index(word)], words.vectors_[place], 0)
    assert (ours.vectors_[counts.vocabulary_.index("sand")] == 0).all()


def layer_oracle(queries, keys, values, ids, beta, bias=None, causal=False, padding=()):
    """Outputs of the layer by loops, of one head, in float64 with gradients."""
    rows = []
    for i, a in enumerate(ids):
        seen = [j for j in range(len(ids)) if j != i and j not in padding and (j < i or not causal)]
        if not seen:
            rows.append(torch.zeros_like(values[0]))
            continue
        reach = 0 if bias is None else len(bias) // 2
        scores = torch.stack(
            [
                beta * (queries[a] * keys[ids[j]]).sum() + (bias[j - i + reach] if abs(j - i) <= reach > 0 else 0.0)
                for j in seen
            ]
        )
        powers = (scores - scores.max().detach()).exp()
        rows.append(sum(p * values[ids[j]] for p, j in zip(powers, seen, strict=True)) / powers.sum())
    return torch.stack(rows)


@pytest.mark.parametrize("case", ["plain", "causal", "bias", "padding"])
def test_the_layer_and_its_gradients(case):
    torch.manual_seed(0)
    layer = TokenAttention(V, 5, 7, beta=0.8, reach=2 if case == "bias" else 0, dtype=torch.float64)
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)
    padding = [3, 6] if case == "padding" else []
    hidden = torch.zeros(1, len(IDS), dtype=torch.bool)
    hidden[0, padding] = True
    ids = torch.from_numpy(IDS)[None]
    ours = layer(ids, hidden if padding else None, is_causal=case == "causal")[0]
    parameters = [parameter.detach().clone().requires_grad_() for parameter in layer.parameters()]
    bias = parameters[3][0] if case == "bias" else None
    wanted = layer_oracle(*parameters[:3], IDS.tolist(), 0.8, bias, case == "causal", padding)
    check_close(ours.detach(), wanted.detach(), 1e-12)
    weight = torch.randn_like(ours)
    (ours * weight).sum().backward()
    (wanted * weight).sum().backward()
    for own, oracle in zip(layer.parameters(), parameters, strict=True):
        check_close(own.grad, oracle.grad, 1e-11)
        assert oracle.grad.abs().max() > 0


def test_the_layer_holds_what_the_corpus_says(tmp_path):
    for options in ({}, {"heads": 2, "rank": 22}, {"directed": True, "is_causal": True}):
        ours = CorpusAttention(COUNTS, **({"rank": V, "mix": 1.0} | options))
        layer = ours.module(dtype=torch.float64)
        ids = torch.from_numpy(IDS)[None]
        if "heads" not in options:
            check_close(layer.coefficients(ids, is_causal=ours.is_causal)[0].detach(), ours.attention(IDS))
        check_close(layer(ids, is_causal=ours.is_causal)[0].detach(), ours.transform([IDS])[0])
    layer.save_pretrained(tmp_path)
    assert torch.equal(Module.from_pretrained(tmp_path)(ids), layer(ids))
    additive = CorpusAttention(COUNTS, positions="additive", is_causal=True, rank=V).module(dtype=torch.float64)
    short = CorpusAttention(COUNTS, positions="additive", is_causal=True, rank=V)
    check_close(additive.coefficients(ids[:, :6], is_causal=True)[0].detach(), short.attention(IDS[:6]))


def test_the_layer_compiles():
    layer = CorpusAttention(COUNTS, rank=6, heads=3).module()
    ids = torch.from_numpy(IDS)[None]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    check_close(compiled(ids).detach(), layer(ids).detach(), 1e-6)
    torch.manual_seed(0)
    weight = torch.randn(1, len(IDS), layer.embed_dim)
    grads = [torch.autograd.grad((call(ids) * weight).sum(), list(layer.parameters())) for call in (layer, compiled)]
    for one, other in zip(*grads, strict=True):
        check_close(one, other, 1e-5)
        assert one.abs().max() > 0


def test_the_layers_state_goes_into_another_one(tmp_path):
    layer = CorpusAttention(COUNTS, rank=6, heads=3).module()
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    other = TokenAttention(V, 6, 6, 3)
    ids = torch.from_numpy(IDS)[None]
    assert not torch.equal(other(ids), layer(ids))
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(other(ids), layer(ids))
    for wrong in (-1, V):
        with pytest.raises(IndexError):
            layer(torch.tensor([[0, wrong]]))


def test_gaps_by_a_loop():
    ours = CorpusAttention(COUNTS, "conditional", positions="distance")
    tables = {apart: pair_counts(apart) for apart in (1, 2)}
    occurs = np.bincount(np.concatenate(TEXTS), minlength=V)
    wanted = np.log(occurs / occurs.sum())
    before, after = [3, 8], [14, 1, 9]
    for apart, word in ((1, 8), (2, 3)):
        wanted += 0.7 * np.array(conditional(tables[apart]))[word]
    for apart, word in ((1, 14), (2, 1)):
        wanted += 0.7 * np.array(conditional(transposed(tables[apart])))[word]
    check_close(gap_logits(ours, np.array(before), np.array(after), 0.7, 2), wanted)


def test_rows_towards_all_words_are_the_scores():
    """What a gap adds up is what the scores have at that distance, for kinds that do not know rows from columns."""
    for positions in (None, "distance", "additive", "tucker", "rotary"):
        ours = CorpusAttention(COUNTS, "pmi", smoothing=1, directed=True, positions=positions, rank=22)
        scores = ours.scores(IDS)
        for i, j in ((1, 4), (6, 3), (2, 1), (0, 8)):
            check_close(ours.towards(int(IDS[j]), i - j)[IDS[i]], scores[i, j])


def test_words_for_a_gap():
    texts = [
        "he rows to the river bank",
        "the river bank is green",
        "she took money to the bank",
        "money in the bank",
    ] * 2
    ours = CorpusAttention(
        Cooccurrence(4, per_distance=True, progress=False).fit(texts), "conditional", prior=1.0, positions="distance"
    )
    found = ours.predict_masked("the river ___ is green", top=3)
    assert found.words[0] == "bank"
    assert found.before == ("the", "river")
    assert abs(sum(ours.predict_masked("the river ___", top=99).probabilities) - 1) < 1e-9
    assert ours.predict_masked(["the", "river", "[MASK]", "is", "green"], top=3) == found
    assert ours.predict_masked("the river bank is green", 2, top=3) == found
    assert "the river ___ is green" in str(found)
    for text, options, words in (
        ("no gap", {}, "one gap"),
        ("___ and ___", {}, "got 2 of them"),
        ("a b", {"position": 2}, "from -2 to 1"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            ours.predict_masked(text, **options)


def test_positions_fill_gaps_better():
    train, test = world(documents=60)[:50], world(documents=60)[50:]
    counts = Cooccurrence(W, vocabulary=V, per_distance=True, progress=False).fit(train)
    scores = [
        CorpusAttention(counts, "conditional", positions=positions).score(test, common=3, most=200)
        for positions in (None, "distance")
    ]
    assert len(scores[0].ranks) == 200
    assert scores[1].mrr > 1.25 * scores[0].mrr > 1.25 * scores[0].chance
    assert scores[1].mrr == np.mean(1 / np.array(scores[1].ranks))
    assert scores[1].top_10 == np.mean(np.array(scores[1].ranks) <= 10)
    assert "200 gaps" in str(scores[0])
    with pytest.raises(InvalidArgument, match="no word of these texts"):
        CorpusAttention(counts).score([[0]], common=V)


def test_texts_and_words_nobody_counted():
    counts = Cooccurrence(3, progress=False).fit(["the deep sea", "a deep sea"])
    ours = CorpusAttention(counts)
    assert ours.tokens("The SEA, at last") == ["the", "sea", "at", "last"]
    assert (ours.ids("the sea at last") == [*counts.vocabulary_.encode(["the", "sea"]), -1, -1]).all()
    assert CorpusAttention(counts, unknown="skip").tokens("the sea at last") == ["the", "sea"]
    with pytest.raises(InvalidArgument, match=r"'at' is not in the vocabulary; unknown='skip'"):
        CorpusAttention(counts, unknown="raise").ids("the sea at last")
    named = CorpusAttention(np.eye(2), vocabulary=Vocabulary(["sea", "sand"]))
    assert named.ids("sand and sea").tolist() == [1, -1, 0]
    assert ours.transform([""])[0].shape == (0, 4)
    assert ours.embed([]).shape == (0, 4)
    assert ours.embed(["", "nobody"]).tolist() == [[0.0] * 4] * 2
    assert ours.scores([[0, 1, 2], [2, 1, -1]]).shape == (2, 3, 3)
    with pytest.raises(InvalidArgument, match="one length: fill them up with -1"):
        ours.scores([[0, 1], [2]])
    with pytest.raises(InvalidArgument, match="'the deep sea' in a list of words is a text"):
        ours.attention(["the deep sea", "a sea"])
    with pytest.raises(InvalidArgument, match="got NoneType"):
        ours.predict_masked(None)
    assert ours.attention("").shape == (1, 0, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"positions": "rotary", "rank": 7}, "rank must be even"),
        ({"positions": "near"}, "positions must be one of"),
        ({"heads": 0}, "heads must be one of"),
        ({"heads": 3, "rank": 22}, "multiple of heads = 3"),
        ({"heads": 2, "rank": 22, "directed": True}, "look back alone"),
        ({"heads": 2, "rank": 22, "positions": "distance"}, "heads='distance'"),
        ({"mix": 1.5}, "mix must be"),
        ({"vocabulary": ["a"]}, "leave it out"),
    ],
)
def test_what_does_not_go_together(options, words):
    with pytest.raises(InvalidArgument, match=words):
        CorpusAttention(COUNTS, **options)


def test_what_cannot_be_had_says_why():
    with pytest.raises(InvalidArgument, match=r"Cooccurrence\(per_distance=True\)"):
        CorpusAttention(Cooccurrence(2, vocabulary=V, progress=False).fit(TEXTS), positions="tucker")
    with pytest.raises(InvalidArgument, match="square matrix"):
        CorpusAttention(np.zeros((3, 4)))
    for wrong in (np.nan, np.inf):
        with pytest.raises(InvalidArgument, match="associations must be finite"):
            CorpusAttention(np.full((3, 3), wrong))
    huge = CorpusAttention(np.array([[0, 1e30, 1], [1, 0, 2], [3, 4, 0]])).attention([0, 1, 2])[0]
    check_close(huge[0], [0, 1, 0])
    check_close(huge.sum(-1), [1, 1, 1])
    with pytest.raises(InvalidArgument, match="below the vocabulary's size 23"):
        CorpusAttention(COUNTS).scores([1, 23])
    with pytest.raises(InvalidArgument, match="there are no vectors"):
        CorpusAttention(np.eye(3)).transform([[1, 2]])
    with pytest.raises(InvalidArgument, match=r"shape \(23, d\)"):
        CorpusAttention(COUNTS, vectors=np.eye(3)).transform([[1, 2]])
    for options, words in (
        ({"positions": "tucker"}, "own matrix"),
        ({"directed": True}, "is_causal=True"),
        ({"heads": "distance"}, "are masks"),
        ({"association": "conditional"}, "not sparse"),
    ):
        with pytest.raises(Unsupported, match=words):
            CorpusAttention(COUNTS, **options).module()


def test_sixty_four_sequences_are_looked_up_at_once():
    """One look-up of the words of the whole batch, not one for each sequence: as many slices of rows."""
    g = np.random.default_rng(0)
    batch = g.integers(V, size=(7, 11))
    taken = []

    class Counted(csr_array):
        def __getitem__(self, key):
            taken.append(key)
            return super().__getitem__(key)

    scores = project(Counted(np.array(SYMMETRIC)), batch)
    assert len(taken) <= 2
    check_close(scores[5], np.array(SYMMETRIC)[np.ix_(batch[5], batch[5])], 0)


def test_biases_of_distances_are_no_part_of_query_and_key():
    options = {"positions": "additive", "is_causal": True, "rank": V}
    with pytest.raises(Unsupported, match="module"):
        CorpusAttention(COUNTS, **options).factors(IDS)
    with pytest.raises(Unsupported, match="exclude_self=True"):
        CorpusAttention(COUNTS, **options, exclude_self=False).module()


@pytest.mark.parametrize("text", ["the ___ is deep", ["the", "[MASK]", "deep"]])
def test_a_gap_is_written_or_its_place_is_given(text):
    counts = Cooccurrence(2, progress=False).fit(["the sea is deep", "the sand is warm"])
    with pytest.raises(InvalidArgument, match="leave position out"):
        CorpusAttention(counts).predict_masked(text, 0)


def test_a_small_vocabulary_bounds_the_rank():
    counts = Cooccurrence(2, per_distance=True, progress=False).fit(["the sea is deep now"])
    assert CorpusAttention(counts, positions="rotary").rank == 4
    assert CorpusAttention(counts, heads=3).rank == 3
    assert CorpusAttention(counts, rank=9).rank == 5
    with pytest.raises(InvalidArgument, match="prior"):
        CorpusAttention(counts, prior=-1)

"""The form of Ma & Ying (2023), f = A X + B Z, construction by construction: each against the paper's formula, turned, and broken on purpose."""

import itertools

import pytest
import torch
from torch import nn

from heedful import (
    Exponential,
    Gaussian,
    HigherOrder,
    InvalidArgument,
    Matern,
    RationalQuadratic,
    Relu,
    Sigmoid,
    Silu,
    Softmax,
    Tanh,
)
from heedful.lens.symmetry import audit
from heedful.nn import (
    Encoder,
    InvariantCoefficients,
    Knowledge,
    KnowledgeAttention,
    PairAttention,
    Pairs,
    Positions,
)
from orthogonal import F64, D, K, N, deviation, drawn, settled


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# sigma(Y W Y^T) with any W; g1 and g2 apart


def test_a_weight_for_given_knowledge_and_two_functions_apart():
    """The target of symmetry-regression, softmax(Y A Y^T) X + softmax(Y B) Z / 2 with Y = X Z^T, by setting parameters alone."""
    A, B = drawn(K, K), drawn(K, K)
    layer = KnowledgeAttention(D, given=K, coordinates="knowledge", weight=True, readout="x|z", value="identity",
                               kernel=Softmax(1.0), knowledge_kernel=Sigmoid(0.7, -0.5), **F64).requires_grad_(False)  # fmt: skip
    layer.mix[0], layer.knowledge_keys[0], layer.gamma[:] = A, B.T, 0.5
    x, z = drawn(2, N, D), drawn(2, K, D)
    Y = x @ z.mT
    for causal in (False, True):
        keep = torch.ones(N, N, dtype=torch.bool)
        keep = keep.tril() if causal else keep
        scores = (Y @ A @ Y.mT).masked_fill(~keep, -torch.inf)
        wanted = scores.softmax(-1) @ x + 0.5 * (0.7 * Y @ B - 0.5).sigmoid() @ z
        torch.testing.assert_close(layer(x, z, is_causal=causal), wanted, rtol=1e-10, atol=1e-10)
        error, control = deviation(lambda x, z, causal=causal: layer(x, z, is_causal=causal), x, z)
        assert error < 1e-10
        assert control > 1e-3
    order = torch.randperm(K)  # Z and the indices of W renumbered together
    again = KnowledgeAttention(**layer.arguments(), **F64).requires_grad_(False)
    again.mix[0], again.knowledge_keys[0], again.gamma[:] = A[order][:, order], B.T[order][:, order], 0.5
    torch.testing.assert_close(again(x, z[:, order]), layer(x, z), rtol=1e-10, atol=1e-10)
    joint = KnowledgeAttention(D, given=K, coordinates="knowledge", weight=True, value="identity", kernel=Softmax(1.0), **F64)  # fmt: skip
    joint.requires_grad_(False)
    joint.mix[0], joint.knowledge_keys[0] = A, B
    weights = torch.cat((Y @ A @ Y.mT, Y @ A @ B.T), -1).softmax(-1)
    torch.testing.assert_close(joint(x, z), weights @ torch.cat((x, z), 1), rtol=1e-10, atol=1e-10)


def test_learned_coordinates_apart():
    layer = KnowledgeAttention(D, 1, head_dim=3, readout="x|z", value="identity", knowledge_kernel=Gaussian(2.0), **F64)
    x, z = drawn(2, N, D), drawn(2, K, D)
    own = (x @ layer.query_rows[0].T) @ (x @ layer.key_rows[0].T).mT / 3**0.5
    q, k = x @ layer.knowledge_query_rows[0].T, z @ layer.knowledge_key_rows[0].T
    read = (-torch.cdist(q, k).square() / 8).softmax(-1)
    torch.testing.assert_close(layer(x, z), own.softmax(-1) @ x + read @ z, rtol=1e-10, atol=1e-10)
    report = audit(settled(layer), d=D, k=K, trials=20)
    assert "with its parameters as knowledge it has all of O(d): a form of attention (Prop. 3.2)" in report.conclusion


# eq. 3.2: four and six factors, each with its own W; sums of orders


def test_higher_orders_have_a_matrix_between_every_two_factors():
    W1, W2, W3 = drawn(K, K) / K, drawn(K, K) / K, drawn(K, K) / K
    x, z = drawn(2, N, D), drawn(2, K, D)
    Y = x @ z.mT
    C = Y.mT @ Y / N
    for order, mixes, score in (
        (4, (W2,), Y @ W1 @ C @ W2 @ Y.mT),
        (6, (W2, W3), Y @ W1 @ C @ W2 @ C @ W3 @ Y.mT),
        ((2, 4), (W2,), Y @ W1 @ Y.mT + Y @ W1 @ C @ W2 @ Y.mT),
        ((2, 6), ((W2,), (W3, W1, W2)), Y @ W1 @ (W2 + W3 @ C @ W1 @ C @ W2) @ Y.mT),
    ):
        kernel = HigherOrder(Tanh(scale=0.1), order=order, mix=mixes)
        layer = KnowledgeAttention(D, given=K, coordinates="knowledge", weight=True, readout="x", value="identity", kernel=kernel, **F64)  # fmt: skip
        layer.requires_grad_(False).mix[0] = W1
        torch.testing.assert_close(layer(x, z), (0.1 * score).tanh() @ x, rtol=1e-10, atol=1e-10)
        error, control = deviation(layer, x, z)
        assert error < 1e-10
        assert control > 1e-4


# sigma elementwise, kernels of the distance, both normalisations


@pytest.mark.parametrize("readout", ["x+z", "x|z"])
@pytest.mark.parametrize(
    "kernel",
    [Tanh(), Silu(), Exponential(0.1), Matern(1.5, 2.0), Matern(2.5, 3.0), RationalQuadratic(2.0, 3.0)],
    ids=repr,
)
def test_new_kernels_in_the_form(kernel, readout):
    for coordinates, causal in itertools.product(("inputs", "knowledge"), (False, True)):
        layer = settled(
            KnowledgeAttention(D, kernel=kernel, coordinates=coordinates, readout=readout, value="identity")
        )
        x, z = drawn(2, N, D), drawn(2, K, D) / D**0.5
        error, control = deviation(lambda x, z, layer=layer, causal=causal: layer(x, z, is_causal=causal), x, z)
        assert error < 1e-10
        assert control > 1e-6


def test_symmetric_normalisation_in_the_form():
    kernel = Gaussian(3.0, normalize=False).symmetric()
    layer = settled(KnowledgeAttention(D, kernel=kernel, coordinates="inputs", readout="x", value="identity"))
    x = drawn(2, N, D)
    K_ = (-torch.cdist(x, x).square() / 18).exp()
    degree = K_.sum(-1).rsqrt()
    torch.testing.assert_close(layer(x), degree[..., None] * (K_ * degree[:, None]) @ x, rtol=1e-10, atol=1e-10)


# Prop. 4.1 with functions of one's own, given knowledge, heads, B Z and value maps


class Count(nn.Module):
    """rho and psi that can be written in one line each."""

    def psi1(self, y_t, y_i):
        return y_t * y_i

    def psi2(self, y_t, y_i, y_j):
        return y_t * y_i if y_j is None else y_t * y_i * y_j

    def rho1(self, y_i, pooled):
        return (y_i + pooled).sum(-1, keepdim=True)

    def rho2(self, y_i, y_j, pooled, itself):
        return (y_i * y_j * pooled).sum(-1, keepdim=True)

    def rho3(self, y_i, pooled):
        return y_i - pooled


@pytest.mark.parametrize("arity", [2, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_pair_functions_of_ones_own_with_given_knowledge(arity, causal):
    layer = PairAttention(D, K, form=Count(), arity=arity, knowledge="given", readout="x|z", **F64)
    x, z = drawn(2, N, D), drawn(2, K, D) / D**0.5
    y = x @ z.mT
    wanted = torch.zeros(2, N, D, **F64)
    for b, i in itertools.product(range(2), range(N)):
        seen = [t for t in range(N) if t <= i or not causal]
        around = sum((y[b, t] * y[b, i] for t in seen if t != i), torch.zeros(K, **F64))
        wanted[b, i] += (y[b, i] + around).sum() * x[b, i] + (y[b, i] - around) @ z[b]
        for j in [j for j in seen if j != i]:
            third = y[b, j] if arity == 3 else torch.ones(K, **F64)
            rest = sum((y[b, t] * y[b, i] * third for t in seen if t not in (i, j)), torch.zeros(K, **F64))
            wanted[b, i] += (y[b, i] * y[b, j] * rest).sum() * x[b, j]
    torch.testing.assert_close(layer(x, z, is_causal=causal), wanted, rtol=1e-10, atol=1e-10)
    error, control = deviation(lambda x, z: layer(x, z, is_causal=causal), x, z)
    assert error < 1e-10
    assert control > 1e-3


def test_pair_attention_has_heads_values_and_knowledge():
    layer = settled(PairAttention(D, 3, 2, readout="x|z", value="mlp", value_dim=4, activation="tanh", out_dim=6))
    x = drawn(2, N, D)
    a, b = layer.coefficients(x)
    assert a.shape == (2, 2, N, N)
    assert b.shape == (2, 2, N, 3)
    heads = [
        (a[:, h] @ x @ layer.value_rows[h].T + b[:, h] @ layer.rows[h] @ layer.value_rows[h].T).tanh()
        @ layer.value_columns[h].T
        for h in range(2)
    ]
    torch.testing.assert_close(layer(x), heads[0] + heads[1], rtol=1e-10, atol=1e-10)
    for h in range(2):  # each head is a layer of its own
        alone = PairAttention(D, 3, readout="x|z", **F64)
        alone.load_state_dict({"rows": layer.rows[h]} | {f"functions.{n}": p for n, p in layer.functions[h].state_dict().items()})  # fmt: skip
        torch.testing.assert_close(alone.coefficients(x).x[:, 0], a[:, h])
    softmax = PairAttention(D, 3, form="softmax", readout="x|z", **F64)
    assert torch.allclose(softmax.coefficients(x).z.sum(-1), torch.ones(2, 1, N, **F64))
    for call, words in (
        (lambda: layer(x, drawn(3, D)), "has learned its Z"),
        (lambda: PairAttention(D, K, knowledge="given", **F64)(x), "call it with z"),
        (lambda: PairAttention(D, K, knowledge="given", **F64)(x, drawn(4, D)), rf"z must have shape \({K}, {D}\)"),
        (lambda: PairAttention(D, form=nn.ReLU()), "has no psi1"),
        (lambda: PairAttention(D, out_dim=3), "value='identity' leaves the embedding"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            call()


# eq. 2.1, 5.1, 5.2: full W_V, other sizes, other activations, other lengths


def test_a_full_value_matrix_with_narrow_queries_and_another_size():
    """Eq. 2.1: W_Q, W_K of d1 rows, W_V d x d."""
    layer = settled(KnowledgeAttention(D, head_dim=3, value_dim=D, out_dim=4, readout="x"))
    x = drawn(2, N, D)
    score = (x @ layer.query_rows[0].T) @ (x @ layer.key_rows[0].T).mT / 3**0.5
    W = layer.value_columns[0] @ layer.value_rows[0]
    torch.testing.assert_close(layer(x), score.softmax(-1) @ x @ W.T, rtol=1e-10, atol=1e-10)
    assert int(torch.linalg.matrix_rank(settled(KnowledgeAttention(D, head_dim=3, value_dim=D)).value_rows[0])) == D
    with pytest.raises(InvalidArgument, match="out_dim needs"):
        KnowledgeAttention(D, value="identity", out_dim=4)
    with pytest.raises(InvalidArgument, match="residual adds tokens"):
        KnowledgeAttention(D, residual=True, out_dim=4)


@pytest.mark.parametrize("activation", ["relu", "silu", "tanh", "sigmoid", "identity"])
def test_evolution_with_any_activation(activation):
    layer = settled(KnowledgeAttention(D, value="mlp", hidden=5, activation=activation, out_dim=3))
    x, z = drawn(2, N, D), drawn(K, D)
    a, b = layer.coefficients(x, z)
    inner = (a[:, 0] @ x + b[:, 0] @ z) @ layer.value_rows[0].T
    sigma = {"silu": nn.functional.silu, "identity": lambda t: t}.get(activation, getattr(torch, activation, None))
    torch.testing.assert_close(layer(x, z), sigma(inner) @ layer.value_columns[0].T, rtol=1e-10, atol=1e-10)


def test_from_one_length_to_another():
    layer = settled(KnowledgeAttention(D, given=K, outputs=2, coordinates="knowledge", readout="x|z", value="identity"))
    x, z = drawn(2, 3, D), drawn(2, K, D)
    Y, Z = x @ z.mT, z @ z.mT
    wanted = (layer.queries[0] @ Y.mT / K**0.5).softmax(-1) @ x + (layer.queries[0] @ Z / K**0.5).softmax(-1) @ z
    torch.testing.assert_close(layer(x, z), wanted, rtol=1e-10, atol=1e-10)
    error, control = deviation(layer, x, z)
    assert error < 1e-10
    assert control > 1e-3
    learned = KnowledgeAttention(D, outputs=4, **F64)
    hidden = torch.tensor([[False, False, True]] * 2)
    torch.testing.assert_close(learned(x, key_padding_mask=hidden), learned(x[:, :2]))
    for call, words in (
        (lambda: learned(x, is_causal=True), "queries without a place"),
        (lambda: KnowledgeAttention(D, outputs=2, coordinates="inputs"), "nothing learned to ask with"),
        (lambda: KnowledgeAttention(D, outputs=2, coordinates="knowledge"), "knowledge=k or given=k"),
        (lambda: KnowledgeAttention(D, outputs=2, residual=True), "leave residual out"),
        (lambda: KnowledgeAttention(D, weight=True), "W is W_Q"),
        (lambda: KnowledgeAttention(D, coordinates="knowledge", weight=True), "knowledge=k or given=k"),
        (lambda: KnowledgeAttention(D, knowledge_kernel=Relu()), "knowledge_kernel is for readout"),
        (lambda: KnowledgeAttention(D, own_knowledge=True), "give knowledge=k"),
        (lambda: layer(x), "expects given=5 knowledge vectors"),
        (lambda: layer(x, z[:, :2]), rf"z must have shape \({K}, {D}\)"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            call()


# eq. 5.3: a kernel, knowledge and functions of its own for each head


@pytest.mark.parametrize("coordinates", ["learned", "inputs", "knowledge"])
def test_every_head_has_its_own_kernel_and_knowledge(coordinates):
    kernels = [Softmax(), Gaussian(2.0), Silu()]
    layer = settled(KnowledgeAttention(12, 3, knowledge=2, own_knowledge=True, coordinates=coordinates, kernel=kernels,
                                       readout="x|z", knowledge_kernel=kernels[::-1], value="mlp"))  # fmt: skip
    x, z = drawn(2, N, 12), drawn(2, 3, K, 12)
    wanted = 0
    for h in range(3):
        one = KnowledgeAttention(12, 1, knowledge=2, coordinates=coordinates, kernel=kernels[h], readout="x|z", head_dim=4,
                                 knowledge_kernel=kernels[2 - h], value="mlp", **F64)  # fmt: skip
        state = {name: p[h : h + 1] if name != "vectors" else p[h] for name, p in layer.state_dict().items()}
        one.load_state_dict(state)
        wanted = wanted + one(x, z[:, h])
    torch.testing.assert_close(layer(x, z), wanted, rtol=1e-10, atol=1e-10)
    with pytest.raises(InvalidArgument, match="for each head"):
        layer(x, z[:, :2])


# Knowledge through a stack


def test_a_stack_of_attention_alone_is_exactly_equivariant():
    layer = Knowledge(coordinates="inputs", value="identity", kernel=Gaussian(3.0))
    encoder = settled(
        Encoder(D, 1, [layer, Pairs(K, knowledge="given", value="identity"), layer], hidden=0, norm="rms")
    )
    x, z = drawn(2, N, D), drawn(2, K, D)
    for causal in (False, True):
        error, control = deviation(lambda x, z, causal=causal: encoder(x, is_causal=causal, z=z).x, x, z)
        assert error < 1e-10
        assert control > 1e-3
    assert (
        float((deviation(lambda x, z: settled(Encoder(D, 1, [layer], hidden=0))(x, z=z).x, x, z))[0]) > 1e-3
    )  # LayerNorm


@pytest.mark.parametrize("norm_first", [True, False])
def test_knowledge_evolves_with_the_tokens(norm_first):
    kinds = [Knowledge(coordinates="inputs"), "softmax", Knowledge(coordinates="knowledge", readout="x|z")]
    encoder = settled(Encoder(D, 1, kinds, hidden=6, norm_first=norm_first, activation="tanh"))
    x, z = drawn(2, N, D), drawn(2, K, D)
    hidden = torch.arange(K).expand(2, -1) > 2
    out, last = encoder(x, z=z, z_padding_mask=hidden, is_causal=True)
    for block in encoder.layers:
        read = {"z_padding_mask": hidden} if block.reads_knowledge else {}

        def mixed(x, z, block=block, read=read):
            if not read:
                return block.self_attn(x, is_causal=True, need_weights=False)[0]
            return block.self_attn(x, z, is_causal=True, **read)

        def network(x, block=block):
            return block.linear2(torch.tanh(block.linear1(x)))

        if norm_first:
            x = x + mixed(block.norm1(x), block.norm1(z))
            x, z = (part + network(block.norm2(part)) for part in (x, z))
        else:
            x = block.norm1(x + mixed(x, z))
            x, z = (block.norm2(part + network(part)) for part in (x, z))
    torch.testing.assert_close(out, encoder.last_norm(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(last, encoder.last_norm(z), rtol=1e-10, atol=1e-10)
    junk = z.masked_fill(hidden[..., None], torch.nan)
    assert torch.equal(encoder(x, z=junk, z_padding_mask=hidden).x, encoder(x, z=z, z_padding_mask=hidden).x)
    with pytest.raises(InvalidArgument, match="no layer of this encoder reads z"):
        Encoder(D, 1, ["softmax"], **F64)(x, z=z)


def test_a_stack_with_knowledge_trains_and_compiles():
    encoder = Encoder(
        8, 2, [Knowledge(knowledge=2, coordinates="knowledge", weight=True, given=3), Pairs(4)], norm="rms"
    )
    x, z = torch.randn(2, 5, 8), torch.randn(3, 8)
    out, last = torch.compile(encoder, fullgraph=True, backend="aot_eager")(x, z=z)
    (out.square().mean() + last.square().mean()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters())
    torch.testing.assert_close(out, encoder(x, z=z).x, rtol=1e-4, atol=1e-5)


# Footnote 1: positions


def test_positions():
    layer = Positions(6, base=100.0)
    wanted = torch.tensor([[f(t / 100 ** (2 * (i // 2) / 6)) for i, f in enumerate([torch.sin, torch.cos] * 3)]
                           for t in torch.arange(4, **F64)], **F64)  # fmt: skip
    x = drawn(2, 4, 6)
    torch.testing.assert_close(layer(x), x + wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(x[:, 2:], start=2), (x + wanted)[:, 2:], rtol=1e-12, atol=1e-12)
    longer = layer.table(9)  # a base that depended on the length would change the first rows
    assert torch.equal(longer[:4], layer.table(4))
    learned = Positions(6, "learned", max_len=5, **F64)
    torch.testing.assert_close(learned(x), x + learned.rows[:4])
    with pytest.raises(InvalidArgument, match="give max_len"):
        Positions(6, "learned")
    with pytest.raises(InvalidArgument, match="max_len=5 places; got 6"):
        learned(drawn(1, 6, 6))
    assert Positions(5)(torch.zeros(1, 3, 5)).shape == (1, 3, 5)
    assert not torch.equal(learned(x[:, [1, 0, 2, 3]]), learned(x)[:, [1, 0, 2, 3]])


# What the paper concludes of each


@pytest.mark.parametrize(
    ("layer", "k", "words"),
    [
        (lambda: KnowledgeAttention(8, given=3, coordinates="knowledge", weight=True, readout="x|z", value="identity"), 3,
         "coefficients depend on inner products alone: a form of attention (Prop. 3.2)"),
        (lambda: KnowledgeAttention(8, given=3, coordinates="knowledge", weight=True, value="linear", value_dim=8), 3,
         "with its parameters as knowledge it has all of O(d): a form of attention (Prop. 3.2)"),
        (lambda: Encoder(8, 1, [Knowledge(coordinates="inputs", value="identity")] * 2, hidden=0, norm="rms"), 3,
         "coefficients depend on inner products alone: a form of attention (Prop. 3.2)"),
        (lambda: PairAttention(8, 3, 2, knowledge="given", readout="x|z"), 3,
         "coefficients depend on inner products alone: a form of attention (Prop. 3.2)"),
        (lambda: PairAttention(8, 3, readout="x|z", value="mlp"), 0, "with its parameters as knowledge it has all of O(d)"),
        (lambda: InvariantCoefficients(units=3), 3,
         "coefficients depend on inner products alone: a form of attention (Prop. 3.2)"),
        (lambda: InvariantCoefficients(units=3, depth=2), 0, "coefficients depend on inner products alone: a form of attention"),
        (lambda: nn.Sequential(Positions(8), PairAttention(8, 3)), 0, ""),
    ],
)  # fmt: skip
def test_the_audit_concludes_what_the_paper_says(layer, k, words):
    layer = settled(layer())
    f = layer
    if isinstance(layer, InvariantCoefficients):

        def f(x, z=None):
            return layer(x[None], None if z is None else z[None]).vectors[0]

    report = audit(f, d=8, k=k, trials=30)
    assert words in report.conclusion
    assert words or not report.passed

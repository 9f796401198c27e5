"""Layers: against `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`, their symmetries, and what they refuse."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful import (
    Cosine,
    FeatureMap,
    Gaussian,
    HigherOrder,
    InvalidArgument,
    Laplace,
    Polynomial,
    Relu,
    ReluSquared,
    Sigmoid,
    Softmax,
    masks,
)
from heedful.nn import Attention, Block, Encoder, KnowledgeAttention, PairAttention
from listed import KERNELS, Cauchy
from orthogonal import haar

F64 = {"dtype": torch.float64}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 5),
    batch=st.integers(1, 3),
    queries=st.integers(1, 9),
    keys=st.integers(1, 9),
    bias=st.booleans(),
    extra=st.sampled_from(["none", "bias_kv", "zero", "both"]),
    sizes=st.sampled_from(["same", "kdim", "both"]),
    attn_mask=st.sampled_from(["none", "bool", "float", "per-head"]),
    padding=st.sampled_from(["none", "bool", "float"]),
    form=st.sampled_from(["batch_first", "seq_first", "unbatched"]),
    average=st.booleans(),
    need_weights=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_attention_is_multihead_attention(
    heads, head_dim, batch, queries, keys, bias, extra, sizes, attn_mask, padding, form, average, need_weights, seed
):
    """200 random configurations: outputs, weights, and gradients of inputs and of every parameter."""
    torch.manual_seed(seed)
    embed = heads * head_dim
    kdim, vdim = {"same": (None, None), "kdim": (3, None), "both": (3, 5)}[sizes]
    batch = 1 if form == "unbatched" else batch
    arguments = {
        "bias": bias,
        "add_bias_kv": extra in ("bias_kv", "both"),
        "add_zero_attn": extra in ("zero", "both"),
        "kdim": kdim,
        "vdim": vdim,
        "batch_first": form != "seq_first",
    }
    theirs = torch.nn.MultiheadAttention(embed, heads, **arguments, **F64)
    ours = Attention(embed, heads, **arguments, **F64)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())

    def entry(length, width):
        shape = {"batch_first": (batch, length), "seq_first": (length, batch), "unbatched": (length,)}[form]
        return torch.randn(*shape, width, **F64, requires_grad=True)

    leaves = [entry(queries, embed), entry(keys, kdim or embed), entry(keys, vdim or embed)]
    given_mask = {
        "none": None,
        "bool": torch.rand(queries, keys) > 0.6,
        "float": torch.randn(queries, keys, **F64),
        "per-head": torch.rand(batch * heads, queries, keys) > 0.6,
    }[attn_mask]
    if given_mask is not None and given_mask.dtype == torch.bool:
        given_mask[..., 0] = False  # torch gives NaN where nothing may be attended
    hidden = torch.rand(batch, keys) > 0.7
    hidden[:, 0] = False
    given_padding = {"none": None, "bool": hidden, "float": torch.randn(batch, keys, **F64)}[padding]
    if given_padding is not None and form == "unbatched":
        given_padding = given_padding[0]
    if given_mask is not None and given_padding is not None and given_mask.dtype != given_padding.dtype:
        given_padding = None  # torch deprecates mixed kinds
    call = {
        "key_padding_mask": given_padding,
        "attn_mask": given_mask,
        "need_weights": need_weights,
        "average_attn_weights": average,
    }
    (wanted, wanted_weights), (out, weights) = theirs(*leaves, **call), ours(*leaves, **call)
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
    assert (weights is None) == (not need_weights)
    if need_weights:
        torch.testing.assert_close(weights, wanted_weights, rtol=1e-9, atol=1e-9)
    probe = torch.randn_like(wanted)
    expected = torch.autograd.grad((wanted * probe).sum(), [*leaves, *theirs.parameters()])
    named = dict(ours.named_parameters())
    found = torch.autograd.grad((out * probe).sum(), [*leaves, *(named[name] for name, _ in theirs.named_parameters())])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", KERNELS)
def test_asking_for_weights_changes_nothing(name):
    layer = Attention(21, 3, kernel=KERNELS[name](), num_kv_heads=1, **F64)
    x = torch.randn(2, 19, 21, **F64)
    for call in ({}, {"is_causal": True}, {"key_padding_mask": torch.arange(19).expand(2, -1) > 11}):
        out, weights = layer(x, average_attn_weights=False, **call)
        alone, none = layer(x, need_weights=False, **call)
        assert none is None
        assert torch.equal(out, alone)
        assert weights.shape == (2, 3, 19, 19)
        value = layer._project(x, x, x)[2].repeat_interleave(3, dim=1)
        again = layer.out_proj((weights @ value).transpose(1, 2).flatten(-2))
        torch.testing.assert_close(again, out, rtol=1e-9, atol=1e-9)


def test_implementations_agree_in_a_layer():
    x = torch.randn(2, 19, 20, **F64)
    outs = []
    for impl in ("auto", "sdpa", "stream", "reference"):
        torch.manual_seed(0)
        layer = Attention(20, 4, kernel=Gaussian(2.0), num_kv_heads=2, impl=impl, **F64)
        outs.append(layer(x, is_causal=True, need_weights=False)[0])
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-11, atol=1e-11)


def test_a_query_without_keys_gets_the_bias_alone():
    layer = Attention(6, 2, **F64)
    torch.nn.init.normal_(layer.out_proj.bias)
    x = torch.randn(1, 4, 6, **F64, requires_grad=True)
    out, weights = layer(x, key_padding_mask=torch.ones(1, 4, dtype=torch.bool))
    torch.testing.assert_close(out, layer.out_proj.bias.expand(1, 4, 6))
    assert (weights == 0).all()
    out.sum().backward()
    assert (x.grad == 0).all()


def test_learned_kernel_parameters_are_parameters():
    layer = Attention(12, 3, kernel=Gaussian(torch.nn.Parameter(torch.full((3,), 2.0))) * Softmax(torch.ones(3)))
    names = dict(layer.named_parameters())
    assert "kernel_parameters.left_bandwidth" in names
    assert "kernel_parameters.right_scale" in dict(layer.named_buffers())
    x = torch.randn(2, 5, 12)
    before = layer(x)[0]
    before.sum().backward()
    assert names["kernel_parameters.left_bandwidth"].grad.abs().sum() > 0
    with torch.no_grad():
        names["kernel_parameters.left_bandwidth"].fill_(0.5)
    assert not torch.equal(layer(x)[0], before)
    assert layer.double().kernel.tensors()["left.bandwidth"].dtype == torch.float64


def test_layers_compile():
    torch.compiler.reset()
    layer = Attention(12, 3, kernel=Gaussian(torch.nn.Parameter(torch.full((3,), 2.0))))
    x = torch.randn(2, 5, 12)
    out, _ = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, is_causal=True, need_weights=False)
    torch.testing.assert_close(out, layer(x, is_causal=True, need_weights=False)[0])


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_block_is_transformer_encoder_layer(norm_first, activation):
    theirs = torch.nn.TransformerEncoderLayer(
        12, 3, 20, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first, **F64
    )
    ours = Block(12, 3, 20, activation=activation, norm_first=norm_first, **F64)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 7, 12, **F64)
    hidden = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    torch.testing.assert_close(
        ours(x, key_padding_mask=hidden), theirs(x, src_key_padding_mask=hidden), rtol=1e-10, atol=1e-10
    )


def test_dropout_acts_in_training_alone():
    block = Block(12, 3, dropout=0.5)
    x = torch.randn(2, 7, 12)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


INVARIANT = [
    Softmax(),
    Softmax(0.3),
    Gaussian(2.0),
    Gaussian(2.0, normalize=False),
    Laplace(2.0),
    Sigmoid(bias=-1.0),
    Relu(),
    ReluSquared(),
    Cosine(),
    Polynomial(1),
    Polynomial(2, 1.0),
    Polynomial(3),
    FeatureMap("cosine"),
    HigherOrder(),
    HigherOrder(Sigmoid(), 6),
    Softmax() * Gaussian(2.0),
    Softmax() + Relu(),
    ReluSquared().normalized(),
    Cauchy(),
]


@pytest.mark.parametrize("kernel", INVARIANT, ids=repr)
@pytest.mark.parametrize("coordinates", ["inputs", "knowledge"])
@pytest.mark.parametrize("readout", ["x+z", "x|z"])
def test_attention_without_value_maps_is_orthogonally_equivariant(kernel, coordinates, readout):
    """f(XQ, ZQ) = f(X, Z) Q for rotations and reflections, to 1e-10."""
    layer = KnowledgeAttention(
        8, 2, kernel=kernel, coordinates=coordinates, readout=readout, value="identity", residual=True, **F64
    ).requires_grad_(False)
    x, z = torch.randn(2, 5, 8, **F64), torch.randn(2, 3, 8, **F64)
    for is_causal in (False, True):
        for determinant in (1, -1):
            turn = haar(8, determinant)
            turned, wanted = layer(x @ turn, z @ turn, is_causal=is_causal), layer(x, z, is_causal=is_causal) @ turn
            assert float((turned - wanted).norm() / wanted.norm()) < 1e-10
    assert float((layer(x @ turn, z) - layer(x, z) @ turn).norm()) > 1e-3  # knowledge left behind


def test_learned_coordinates_are_knowledge_too():
    """Rotating every parameter that lives in the embedding restores the symmetry, for all three evolutions."""
    turn = haar(8, -1)
    for value in ("identity", "linear", "mlp"):
        layer = KnowledgeAttention(8, 2, knowledge=3, value=value, **F64)
        x, z = torch.randn(2, 5, 8, **F64), torch.randn(4, 8, **F64)
        wanted = layer(x, z) @ turn
        assert float((layer(x @ turn, z @ turn) - wanted).norm() / wanted.norm()) > 1e-3
        moved = {name: turn.T @ p if name == "value_columns" else p @ turn for name, p in layer.named_parameters()}
        turned = torch.func.functional_call(layer, moved, (x @ turn, z @ turn))
        torch.testing.assert_close(turned, wanted, rtol=1e-10, atol=1e-10)


def test_knowledge_attention_is_multihead_attention_in_block_form():
    theirs = torch.nn.MultiheadAttention(12, 3, bias=False, batch_first=True, **F64)
    ours = KnowledgeAttention.from_multihead(theirs)
    x = torch.randn(2, 7, 12, **F64)
    assert float((ours(x) - theirs(x, x, x)[0]).abs().max()) < 1e-12
    for a, b in zip(ours.to_multihead().parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    single = KnowledgeAttention.from_multihead(theirs.float())
    assert float((single(x.float()) - theirs(x.float(), x.float(), x.float())[0]).abs().max()) < 2e-6


@pytest.mark.parametrize("readout", ["x+z", "x|z", "x"])
@pytest.mark.parametrize("coordinates", ["learned", "inputs", "knowledge"])
def test_coefficients_give_the_output(readout, coordinates):
    layer = KnowledgeAttention(12, 3, knowledge=2, coordinates=coordinates, readout=readout, value="identity", **F64)
    x, z = torch.randn(2, 5, 12, **F64), torch.randn(2, 4, 12, **F64)
    call = {"is_causal": True, "z_padding_mask": torch.tensor([[False, False, True, True], [False] * 4])}
    a, b = layer.coefficients(x, z, **call)
    out = (a @ x[:, None]).sum(1)
    if readout == "x":
        assert b is None
    else:
        assert b.shape == (2, 3, 5, 6)
        assert (b[0, ..., 4:] == 0).all()
        assert (b[..., :2] != 0).all()
        out = out + (b @ torch.cat((layer.vectors.expand(2, -1, -1), z), 1)[:, None]).sum(1)
    torch.testing.assert_close(layer(x, z, **call), out, rtol=1e-11, atol=1e-11)
    assert (a.triu(1) == 0).all()


def test_knowledge_is_shared_or_batched_and_hidden_knowledge_is_unread():
    layer = KnowledgeAttention(12, 3, **F64)
    x, z = torch.randn(2, 5, 12, **F64), torch.randn(4, 12, **F64)
    torch.testing.assert_close(layer(x, z), layer(x, z.expand(2, 4, 12)))
    hidden = torch.tensor([[False, False, True, True]] * 2)
    junk = z.clone()
    junk[2:] = torch.nan
    assert torch.equal(layer(x, junk, z_padding_mask=hidden), layer(x, z, z_padding_mask=hidden))
    torch.testing.assert_close(layer(x, z, z_padding_mask=hidden), layer(x, z[:2]))
    torch.testing.assert_close(layer(x, z, z_padding_mask=torch.ones(2, 4, dtype=torch.bool)), layer(x))


def test_single_token_attends_to_itself():
    layer = KnowledgeAttention(8, coordinates="inputs", value="identity", **F64)
    x = torch.randn(2, 1, 8, **F64)
    torch.testing.assert_close(layer(x), x)


def test_pair_attention_has_softmax_as_a_special_case():
    x = torch.randn(2, 7, 12, **F64)
    for arity in (2, 3):
        layer = PairAttention(12, 6, form="softmax", arity=arity, **F64)
        y = x @ layer.rows.mT
        score = (y @ layer.functions.query.mT) @ (y @ layer.functions.key.mT).mT / 6**0.5
        for call, keep in (
            ({}, torch.ones(7, 7, dtype=torch.bool)),
            ({"is_causal": True}, torch.ones(7, 7, dtype=torch.bool).tril()),
            ({"attn_mask": torch.eye(7, dtype=torch.bool)}, ~torch.eye(7, dtype=torch.bool)),
        ):
            wanted = score.masked_fill(~keep, -torch.inf).softmax(-1)
            torch.testing.assert_close(layer.coefficients(x, **call).x[:, 0], wanted, rtol=0.0, atol=1e-14)
            torch.testing.assert_close(layer(x, **call), wanted @ x)


def test_remark_4_1_as_printed_is_not_softmax():
    """Without the term t = i the printed rho_2 is off by more than 0.1 somewhere; with it, by rounding."""
    torch.manual_seed(3)
    score = torch.randn(9, 9, **F64) * 2
    e, softmax = score.exp(), score.softmax(-1)
    own = e.diagonal()[:, None]
    rest = e.sum(-1, keepdim=True) - own - e
    off = ~torch.eye(9, dtype=torch.bool)
    printed, corrected = e / (e + rest), e / (own + e + rest)
    assert float((printed - softmax)[off].abs().max()) > 0.1
    assert float((corrected - softmax)[off].abs().max()) < 1e-14


@pytest.mark.parametrize("arity", [2, 3])
def test_pair_attention_is_permutation_equivariant_and_blind_to_padding(arity):
    layer = PairAttention(12, 5, arity=arity, **F64)
    x = torch.randn(2, 7, 12, **F64)
    order = torch.randperm(7)
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order], rtol=1e-10, atol=1e-10)
    hidden = torch.tensor([[False] * 4 + [True] * 3] * 2)
    torch.testing.assert_close(layer(x, key_padding_mask=hidden)[:, :4], layer(x[:, :4]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", [Softmax(), Gaussian(2.0), Sigmoid(), FeatureMap("elu"), HigherOrder()], ids=repr)
def test_encoder_without_positions_is_permutation_equivariant(kernel):
    encoder = Encoder(12, 3, [kernel, Softmax(), kernel], norm="rms", **F64)
    x = torch.randn(2, 11, 12, **F64)
    order = torch.randperm(11)
    wanted = encoder(x)[:, order]
    assert float((encoder(x[:, order]) - wanted).norm() / wanted.norm()) < 1e-10
    causal = encoder(x[:, order], is_causal=True) - encoder(x, is_causal=True)[:, order]
    assert float(causal.norm() / wanted.norm()) > 0.01


def test_parameters_do_not_grow_with_length():
    for layer in (
        Encoder(12, 3, [Softmax(), HigherOrder()]),
        KnowledgeAttention(12, 3, knowledge=2),
        PairAttention(12, 5),
        Attention(12, 3, add_bias_kv=True),
    ):
        count = sum(p.numel() for p in layer.parameters())
        for n in (1, 2, 33):
            out = layer(torch.randn(1, n, 12))
            assert (out[0] if isinstance(out, tuple) else out).shape == (1, n, 12)
        assert sum(p.numel() for p in layer.parameters()) == count


def test_encoder_has_one_kernel_per_layer():
    kernels = [Softmax(), Gaussian(torch.ones(3)), Sigmoid(bias=-1.0)]
    encoder = Encoder(12, 3, kernels)
    assert encoder.kernels == kernels
    assert len(encoder.layers) == 3


Y = torch.zeros(2, 5, 12)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Attention(12, 5), "embed_dim must be a multiple of num_heads; got embed_dim=12, num_heads=5"),
        (lambda: Attention(12, 0), "num_heads must be a whole number from 1 on; got 0"),
        (lambda: Attention(12, 6, num_kv_heads=4), "num_heads must be a multiple of num_kv_heads"),
        (lambda: Attention(12, 3, kernel="softmax"), "kernel must be a heedful kernel"),
        (
            lambda: Attention(12, 3)(torch.zeros(2, 5, 11)),
            r"query must have shape \(batch, seq, 12\); got \(2, 5, 11\)",
        ),
        (
            lambda: Attention(12, 3)(Y, key_padding_mask=torch.zeros(2, 7, dtype=torch.bool)),
            r"key_padding_mask of shape \(2, 7\), expected \(batch, keys\) = \(2, 5\)",
        ),
        (
            lambda: Attention(12, 3)(Y, attn_mask=torch.zeros(5, 4, dtype=torch.bool)),
            r"attn_mask of shape \(5, 4\), expected \(queries, keys\) = \(5, 5\)",
        ),
        (lambda: Attention(12, 3)(Y, key_padding_mask=torch.zeros(2, 5, dtype=torch.long)), "True = ignore"),
        (lambda: KnowledgeAttention(12, 5), "unless head_dim is given"),
        (lambda: KnowledgeAttention(12, coordinates="xx"), "coordinates must be one of"),
        (lambda: KnowledgeAttention(12, knowledge=-1), "knowledge must be a whole number from 0 on; got -1"),
        (lambda: KnowledgeAttention(12, coordinates="knowledge")(Y), "give z"),
        (lambda: KnowledgeAttention(12)(Y, torch.zeros(3, 11)), r"z must have shape \(k, 12\)"),
        (
            lambda: KnowledgeAttention(12)(Y, torch.zeros(3, 4, 12)),
            r"or \(2, k, 12\), or for each head .*; got \(3, 4, 12\)",
        ),
        (lambda: KnowledgeAttention(12)(Y, z_padding_mask=torch.zeros(2, 3, dtype=torch.bool)), "no z was given"),
        (
            lambda: KnowledgeAttention(12)(Y, torch.zeros(3, 12), z_padding_mask=torch.zeros(2, 4, dtype=torch.bool)),
            r"expected \(batch, k\) = \(2, 3\)",
        ),
        (lambda: KnowledgeAttention.from_multihead(torch.nn.MultiheadAttention(12, 3)), "bias=False"),
        (lambda: KnowledgeAttention(12, value="mlp").to_multihead(), "value='linear'"),
        (lambda: PairAttention(12, form="tanh"), "form must be one of mlp, softmax"),
        (lambda: PairAttention(12, arity=4), "arity must be one of 2, 3"),
        (lambda: PairAttention(12, arity=3, max_length=4)(Y), "n = 5 exceeds max_length = 4"),
        (lambda: PairAttention(12)(Y, attn_mask=torch.zeros(5, 5)), "give boolean masks"),
        (lambda: Block(12, 3, activation="swish"), "activation must be one of"),
        (lambda: Block(12, 3, norm="batch"), "norm must be 'layer' or 'rms'"),
        (lambda: Encoder(12, 3, Softmax()), "kernels must be a list of kernels"),
        (lambda: Encoder(12, 3, []), "kernels must be a list of kernels"),
        (lambda: Encoder(12, 3, ["softmux"]), "a layer is a kernel such as Softmax"),
    ],
)
def test_bad_layers_are_refused(make, told):
    with pytest.raises(InvalidArgument, match=told):
        make()


def test_a_heedful_mask_serves_in_a_layer():
    layer = Attention(12, 3, **F64)
    x = torch.randn(2, 5, 12, **F64)
    torch.testing.assert_close(layer(x, attn_mask=masks.causal)[0], layer(x, is_causal=True)[0])
    ignored = ~torch.ones(5, 5, dtype=torch.bool).tril()
    torch.testing.assert_close(layer(x, attn_mask=ignored)[0], layer(x, is_causal=True)[0])

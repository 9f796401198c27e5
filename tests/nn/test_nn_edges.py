"""Layers against loops written from the definitions, in torch's own encoder, under autocast, with NaN and large numbers."""

import itertools

import pytest
import torch
from torch import nn

from heedful import Gaussian, InvalidArgument, ReluSquared, Sigmoid, Softmax, masks
from heedful.nn import Attention, Block, Encoder, KnowledgeAttention, PairAttention

F64 = {"dtype": torch.float64}
HIDDEN = torch.tensor([[False] * 5, [False, False, False, True, True]])
Z_HIDDEN = torch.tensor([[False, True, False], [False] * 3])
IGNORED = torch.tensor([[False, True, False, False, False]] * 5) & ~torch.eye(5, dtype=torch.bool)


def looped(layer, x, z, key_hidden, z_hidden, ignored, is_causal):
    """f(X, Z) = A X + B Z, pair by pair and head by head, from the table in the docstring."""
    out = []
    for b in range(x.shape[0]):
        learned = [] if layer.vectors is None else list(layer.vectors)
        given = [] if z is None else list(z[b] if z.dim() == 3 else z)
        gone = [False] * len(learned) + ([False] * len(given) if z_hidden is None else z_hidden[b].tolist())
        vectors = [torch.zeros_like(v) if g else v for v, g in zip(learned + given, gone, strict=True)]
        stack = torch.stack(vectors) if vectors else None
        total = torch.zeros_like(x[b])
        for h in range(layer.num_heads):

            def coordinates(v, rows, h=h, stack=stack):
                if layer.coordinates == "learned":
                    return rows[h] @ v
                return v if layer.coordinates == "inputs" else stack @ v

            def combine(query, members, h=h):
                """The rows that a query sees, weighted."""
                keys = torch.stack([coordinates(v, layer.key_rows) for v in members])
                rows = torch.stack(members)
                values = rows if layer.value_rows is None else rows @ layer.value_rows[h].T
                return layer.kernel.weights(query[None], keys)[0] @ values

            for i in range(x.shape[1]):
                query = coordinates(x[b, i], layer.query_rows)
                tokens = [
                    x[b, j]
                    for j in range(x.shape[1])
                    if not (key_hidden is not None and key_hidden[b, j])
                    and not (ignored is not None and ignored[i, j])
                    and not (is_causal and j > i)
                ]
                known = [v for v, g in zip(vectors, gone, strict=True) if not g]
                size = x.shape[-1] if layer.value_rows is None else layer.value_rows.shape[1]
                made = torch.zeros(size, **F64)
                if layer.readout == "x+z" and tokens + known:
                    made = combine(query, tokens + known)
                elif layer.readout != "x+z":
                    made = combine(query, tokens) if tokens else made
                    if layer.readout == "x|z" and known:
                        made = made + layer.gamma[h] * combine(query, known)
                if layer.value == "mlp":
                    made = nn.functional.gelu(made)
                total[i] += made if layer.value_columns is None else layer.value_columns[h] @ made
        out.append(x[b] + total if layer.residual else total)
    return torch.stack(out)


@pytest.mark.parametrize("coordinates", ["learned", "inputs", "knowledge"])
@pytest.mark.parametrize("readout", ["x+z", "x|z", "x"])
@pytest.mark.parametrize("value", ["identity", "linear", "mlp"])
def test_knowledge_attention_is_its_definition(coordinates, readout, value):
    torch.manual_seed(5)
    for kernel, residual, learned in ((Softmax(0.4), False, 2), (ReluSquared(0.3), True, 0), (Gaussian(2.0), False, 1)):
        layer = KnowledgeAttention(
            8, 2, knowledge=learned, kernel=kernel, coordinates=coordinates, readout=readout, value=value, hidden=6,
            residual=residual, **F64,
        )  # fmt: skip
        if layer.gamma is not None:
            nn.init.normal_(layer.gamma)
        x, z = torch.randn(2, 5, 8, **F64), torch.randn(2, 3, 8, **F64)
        for given, z_hidden, hidden, ignored, is_causal in (
            (z, None, None, None, False),
            (z[0], None, HIDDEN, None, True),
            (z, Z_HIDDEN, HIDDEN, IGNORED, False),
            (None, None, None, IGNORED, True),
        ):
            if coordinates == "knowledge" and given is None and not learned:
                continue
            call = {
                "key_padding_mask": hidden,
                "attn_mask": ignored,
                "is_causal": is_causal,
                "z_padding_mask": z_hidden,
            }
            out = layer(x, given, **call)
            wanted = looped(layer, x, given, hidden, z_hidden, ignored, is_causal)
            torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)


def test_hidden_knowledge_is_no_coordinate_either():
    layer = KnowledgeAttention(8, 2, kernel=Softmax(0.4), coordinates="knowledge", **F64)
    x, z = torch.randn(2, 5, 8, **F64), torch.randn(2, 3, 8, **F64)
    out = layer(x, z, z_padding_mask=Z_HIDDEN)
    for junk in (100.0, torch.nan):
        assert torch.equal(layer(x, z.masked_fill(Z_HIDDEN[..., None], junk), z_padding_mask=Z_HIDDEN), out)
    with pytest.raises(InvalidArgument, match="give z"):
        layer(x, z[:, :0])


@pytest.mark.parametrize("arity", [2, 3])
def test_pair_attention_is_proposition_4_1(arity):
    """rho and psi as networks, the sums over t written as loops."""
    layer = PairAttention(6, 4, arity=arity, hidden=5, **F64)
    x = torch.randn(1, 5, 6, **F64)
    y, functions = x[0] @ layer.rows.T, layer.functions
    for ignored in (None, IGNORED):
        keep = torch.ones(5, 5, dtype=torch.bool) if ignored is None else ~ignored
        wanted = torch.zeros(5, 5, **F64)
        for i, j in itertools.product(range(5), range(5)):
            if not keep[i, j]:
                continue
            pooled = torch.zeros(5, **F64)
            others = [t for t in range(5) if t not in (i, j) and keep[i, t]]
            if i == j:
                pooled = sum((functions.psi1(y[t], y[i]) for t in others), pooled)
                wanted[i, i] = functions.rho1(y[i], pooled)
            else:
                third = y[j] if arity == 3 else None
                pooled = sum((functions.psi2(y[t], y[i], third) for t in others), pooled)
                wanted[i, j] = functions.rho2(y[i], y[j], pooled, torch.ones(1, **F64))
        torch.testing.assert_close(layer.coefficients(x, attn_mask=ignored).x[0, 0], wanted, rtol=1e-10, atol=1e-10)


def test_pair_attention_shuts_out_what_is_hidden_and_survives_large_inputs():
    for form in ("mlp", "softmax"):
        layer = PairAttention(8, 4, form=form)
        x = torch.randn(2, 5, 8)
        wanted = layer(x, key_padding_mask=HIDDEN)
        junk = x.masked_fill(HIDDEN[..., None], torch.nan)
        assert torch.equal(layer(junk, key_padding_mask=HIDDEN)[1, :3], wanted[1, :3])
    large = 20 * torch.randn(2, 16, 8)
    weights = layer.coefficients(large).x
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 1, 16), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("queries", [5, 7])
def test_causal_and_a_mask_mean_and(queries):
    theirs = nn.MultiheadAttention(8, 2, batch_first=True, **F64)
    ours = Attention(8, 2, **F64)
    ours.load_state_dict(theirs.state_dict())
    query, key = torch.randn(2, queries, 8, **F64), torch.randn(2, 5, 8, **F64)
    future = ~torch.ones(queries, 5, dtype=torch.bool).tril()
    ignored = torch.rand(queries, 5) > 0.7
    ignored[:, 0] = False
    wanted, weights = theirs(query, key, key, attn_mask=future | ignored)
    for mask in (ignored, masks.dense(~ignored)):
        out, found = ours(query, key, key, attn_mask=mask, is_causal=True)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(found, weights)


def test_grouped_heads_are_repeated_heads():
    """Query heads 0, 1 share key head 0 and 2, 3 share key head 1, as in torch and Hugging Face."""
    grouped, full = Attention(16, 4, num_kv_heads=2, **F64), Attention(16, 4, **F64)
    query, key, value = grouped.in_proj_weight.detach().split(grouped._sizes)
    repeated = [part.unflatten(0, (2, 4)).repeat_interleave(2, dim=0).flatten(0, 1) for part in (key, value)]
    with torch.no_grad():
        full.in_proj_weight.copy_(torch.cat((query, *repeated)))
        full.out_proj.load_state_dict(grouped.out_proj.state_dict())
    x = torch.randn(2, 7, 16, **F64)
    for a, b in zip(grouped(x, is_causal=True), full(x, is_causal=True), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("norm_first", [True, False])
def test_blocks_and_encoders_pass_every_mask_on(norm_first):
    """Against torch with an attention mask and padding together, gradients included."""
    layers = [
        nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True, norm_first=norm_first, **F64) for _ in range(2)
    ]
    encoder = Encoder(8, 2, [Softmax()] * 2, 12, activation="relu", norm_first=norm_first, **F64)
    for ours, theirs in zip(encoder.layers, layers, strict=True):
        ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 8, **F64, requires_grad=True)
    wanted = x
    for layer in layers:
        wanted = layer(wanted, src_mask=IGNORED, src_key_padding_mask=HIDDEN)
    out = encoder(x, attn_mask=IGNORED, key_padding_mask=HIDDEN)
    torch.testing.assert_close(out, encoder.last_norm(wanted))
    probe = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad((y * probe).sum(), x)[0] for y in (out, encoder.last_norm(wanted)))
    torch.testing.assert_close(ours, theirs)
    causal = encoder(x, is_causal=True)
    torch.testing.assert_close(causal[:, :3], encoder(x[:, :3], is_causal=True))


def test_dropout_of_attention_acts_in_training_alone():
    layer = Attention(8, 2, dropout=0.5)
    x = torch.randn(2, 64, 8)
    one, other = layer(x, need_weights=False)[0], layer(x, need_weights=False)[0]
    assert not torch.equal(one, other)
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


@pytest.mark.parametrize("kernel", [Softmax(), Sigmoid()], ids=repr)
def test_serves_inside_torchs_own_encoder(kernel):
    """In eval mode without gradients, where torch would take a fast path that knows softmax alone."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer.self_attn = Attention(8, 2, kernel=kernel)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        fast = encoder(x, src_key_padding_mask=HIDDEN)
    torch.testing.assert_close(fast, encoder(x, src_key_padding_mask=HIDDEN))
    assert fast.isfinite().all()


def test_layers_under_autocast():
    x, z = torch.randn(2, 5, 8), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        for extra in ({}, {"add_bias_kv": True, "add_zero_attn": True}, {"kernel": Gaussian()}):
            assert Attention(8, 2, **extra)(x)[0].dtype == torch.bfloat16
        for coordinates in ("learned", "inputs", "knowledge"):
            for value in ("identity", "linear", "mlp"):
                layer = KnowledgeAttention(8, 2, coordinates=coordinates, value=value, readout="x|z")
                assert layer(x, z).isfinite().all()


def test_kernel_tensors_go_where_the_layer_goes():
    layer = Attention(8, 2, device="meta", kernel=Gaussian(nn.Parameter(torch.ones(2))))
    assert layer(torch.empty(1, 3, 8, device="meta"), need_weights=False)[0].device.type == "meta"
    assert layer.kernel_parameters.bandwidth.is_meta


def test_per_sample_gradients():
    layer = Attention(8, 2, kernel=Gaussian(nn.Parameter(torch.ones(2))), **F64)
    parameters = dict(layer.named_parameters())
    x = torch.randn(3, 5, 8, **F64)

    def loss(parameters, sample):
        out, _ = torch.func.functional_call(
            layer, parameters, (sample[None],), {"is_causal": True, "need_weights": False}
        )
        return out.square().sum()

    samples = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for n in range(3):
        wanted = torch.autograd.grad(loss(parameters, x[n]), list(parameters.values()), allow_unused=True)
        for (name, _), gradient in zip(parameters.items(), wanted, strict=True):
            if gradient is not None:
                torch.testing.assert_close(samples[name][n], gradient)


def test_a_learned_bandwidth_can_be_kept_positive():
    """As docs/layers.md says: softplus through torch's parametrisation, trained far below zero before it."""
    layer = Attention(8, 2, kernel=Gaussian(nn.Parameter(torch.ones(2))))
    nn.utils.parametrize.register_parametrization(layer.kernel_parameters, "bandwidth", nn.Softplus(), unsafe=True)
    optimizer = torch.optim.SGD(layer.kernel_parameters.parameters(), lr=1.0)
    for _ in range(5):
        optimizer.zero_grad()
        (10 * layer.kernel_parameters.bandwidth.sum()).backward()
        optimizer.step()
    assert (layer.kernel_parameters.bandwidth > 0).all()
    assert layer(torch.randn(1, 3, 8))[0].isfinite().all()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Attention(8, 2, dropout=2.0), r"dropout must be a number from 0 on, below 1; got 2.0"),
        (lambda: Attention(8, 2, dropout="x"), "dropout must be a number from 0"),
        (lambda: Attention(8, 2, impl="flash"), "impl must be one of auto, .* got 'flash'"),
        (lambda: Attention(8, 2, kdim=0), "kdim must be a whole number from 1 on, or None; got 0"),
        (lambda: Attention(8, 2, num_kv_heads="x"), "num_kv_heads must be a whole number from 1 on"),
        (lambda: Attention(8, 2, kernel=Gaussian(torch.ones(3))), "has 3 entries; expected 1 or num_heads = 2"),
        (
            lambda: Attention(8, 2, kernel=Gaussian(torch.ones(2, requires_grad=True).exp())),
            "computed from other tensors",
        ),
        (lambda: KnowledgeAttention(8, 0), "num_heads must be a whole number from 1 on"),
        (lambda: PairAttention(8, 0), "size must be a whole number from 1 on"),
        (lambda: Encoder(8, 2, (k for k in [Softmax()])), "kernels must be a list"),
        (lambda: Attention(8, 2)(torch.zeros(1, 5, 8), key_padding_mask=[True]), "must be a tensor .* got list"),
        (lambda: Attention(8, 2)(torch.zeros(1, 5, 8), attn_mask=torch.zeros(5, 5).long()), "True = ignore"),
        (lambda: Attention(8, 2)(torch.zeros(1, 2, 5, 8)), r"got \(1, 2, 5, 8\)"),
        (lambda: Attention(8, 2)(torch.zeros(1, 5, 8), torch.zeros(3, 5, 8)), r"share the batch; got \[1, 3, 3\]"),
        (
            lambda: KnowledgeAttention(8)(torch.zeros(2, 5, 8), key_padding_mask=HIDDEN[:, :1]),
            r"\(batch, keys\) = \(2, 5\)",
        ),
        (lambda: PairAttention(8)(torch.zeros(2, 5, 8), key_padding_mask=HIDDEN[0]), r"\(batch, keys\) = \(2, 5\)"),
        (lambda: KnowledgeAttention(8, 2, kernel=Sigmoid()).to_multihead(), "kernel=Softmax"),
        (lambda: KnowledgeAttention(8, 2, residual=True).to_multihead(), "residual=True"),
        (lambda: KnowledgeAttention(8, 2, knowledge=3).to_multihead(), "knowledge=3"),
        (
            lambda: KnowledgeAttention.from_multihead(nn.MultiheadAttention(8, 2, bias=False, add_zero_attn=True)),
            "add_zero_attn",
        ),
        (lambda: KnowledgeAttention.from_multihead(Attention(8, 2, bias=False)), "takes nn.MultiheadAttention"),
    ],
)
def test_more_bad_layers_are_refused(make, told):
    with pytest.raises(InvalidArgument, match=told):
        make()


def test_block_without_its_own_norm_is_told():
    with pytest.raises(InvalidArgument, match="norm must be"):
        Block(8, 2, norm="none")

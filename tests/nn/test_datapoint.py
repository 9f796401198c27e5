"""Attention between the rows of a table and between its columns, beside its equations written out in float64."""

import math

import pytest
import torch
from torch import nn

from heedful import Gaussian, InvalidArgument, Softmax, Unsupported, masks
from heedful.nn import ColumnAttention, DatapointAttention, DatapointBlock, authors_state

B, H, W, M, N = 2, 3, 21, 11, 13  # tables, heads, width, queries, rows
COLUMNS, E = 7, 3
AUTHORS = {"norm_kv": False, "scale": "width", "eps": 1e-12}
KINDS = {"default": {}, "authors": AUTHORS, "inducing": {"inducing": 5}, "set": {"residual": "query"}}


def standardised(x, gain, shift, eps):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + eps).sqrt() * gain + shift


def oracle(p, x, rows, *, heads, norm_kv=True, scale="head", residual="linear", eps=1e-5, hidden=None):
    """The block's equations one by one; p holds its parameters, `hidden` (.., m, n) is True where nothing may pass."""
    normal = standardised(x, p["norm1.weight"], p["norm1.bias"], eps)
    source = standardised(rows, p["norm1.weight"], p["norm1.bias"], eps) if norm_kv else rows
    query = normal @ p["query.weight"].T + p["query.bias"]
    key = source @ p["key.weight"].T + p["key.bias"]
    value = source @ p["value.weight"].T + p["value.bias"]
    width = x.shape[-1]
    tau = math.sqrt(width if scale == "width" else width / heads)
    mixed, weights = [], []
    for part in torch.arange(width).chunk(heads):
        score = query[..., part] @ key[..., part].mT / tau
        score = score if hidden is None else score.masked_fill(hidden, -math.inf)
        raised = (score - score.amax(-1, keepdim=True)).exp()
        weights.append(raised / raised.sum(-1, keepdim=True))
        mixed.append(weights[-1] @ value[..., part])
    added = torch.cat(mixed, -1) @ p["out.weight"].T + p["out.bias"]
    skips = {"identity": x, "query": query}
    if residual == "linear":
        skips["linear"] = x @ p["skip.weight"].T + p["skip.bias"]
    joined = skips[residual] + added
    inner = standardised(joined, p["norm2.weight"], p["norm2.bias"], eps) @ p["linear1.weight"].T + p["linear1.bias"]
    inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
    return joined + inner @ p["linear2.weight"].T + p["linear2.bias"], torch.stack(weights, 1)


def block(width=W, heads=H, **options):
    """In float64, its biases and gains away from where they start."""
    torch.manual_seed(3)
    layer = DatapointBlock(width, heads, dtype=torch.float64, **options).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer


def draw(*shape, seed=1, grad=False):
    torch.manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64).mul(1.7).add(0.3).requires_grad_(grad)


def stack(seed=5, dtype=torch.float64, **options):
    """Two layers between rows and two between columns."""
    torch.manual_seed(seed)
    pairs = ((DatapointAttention(COLUMNS, E, H, **options), ColumnAttention(E, H, **options)) for _ in range(2))
    return nn.Sequential(*(layer for pair in pairs for layer in pair)).to(dtype).eval()


@pytest.mark.parametrize("residual", ["linear", "identity", "query"])
@pytest.mark.parametrize("norm_kv", [True, False])
@pytest.mark.parametrize("scale", ["head", "width"])
def test_a_block_is_its_equations(scale, norm_kv, residual):
    options = {"scale": scale, "norm_kv": norm_kv, "residual": residual}
    layer = block(hidden=29, **options)
    x, rows = draw(B, M, W, grad=True), draw(B, N, W, seed=2, grad=True)
    named = dict(layer.named_parameters())
    for key in (None, rows):
        other = x if key is None else key
        wanted, weights = oracle(named, x, other, heads=H, **options)
        found = layer(x, key)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(layer.coefficients(x, key), weights, rtol=0, atol=1e-13)
        leaves = [x, *([] if key is None else [key]), *named.values()]
        above = draw(B, M, W, seed=4)
        gradients = [torch.autograd.grad(out, leaves, above) for out in (found, wanted)]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def test_one_block_by_hand():
    """Width 1, one head: the normalised item is 0, so queries, keys and values are their biases."""
    layer = DatapointBlock(1, 1, hidden=1, dtype=torch.float64).eval()
    numbers = {"value.bias": 3.0, "out.weight": 2.0, "out.bias": 0.5, "skip.weight": 4.0, "skip.bias": 0.25}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.fill_(numbers.get(name, 1.0))
        layer.norm1.bias.zero_()
        layer.norm2.bias.zero_()
    x = torch.tensor([[[5.0], [-2.0]]], dtype=torch.float64)
    gelu = 0.5 * (1 + math.erf(1 / math.sqrt(2)))
    # 4 x + .25 + (2 . 3 + .5), and GELU(1) + 1 of the network
    wanted = 4 * x + 6.75 + gelu + 1
    torch.testing.assert_close(layer(x), wanted, rtol=0, atol=1e-14)


def test_parameters_are_counted():
    def count(module):
        return sum(parameter.numel() for parameter in module.parameters())

    def formula(width):
        return 13 * width**2 + 14 * width

    assert count(DatapointBlock(W, H)) == formula(W)
    assert count(DatapointAttention(COLUMNS, E, H)) == formula(COLUMNS * E)
    assert count(ColumnAttention(E, H)) == formula(E)
    assert count(DatapointBlock(W, H, inducing=5)) == 2 * formula(W) + 5 * W
    assert formula(31 * 32) == 12_806_720, "breast cancer's block between rows"


# The authors' code: https://github.com/OATML/non-parametric-transformers, npt/model/npt_modules.py.
def authors_model(columns, width, seed=7):
    """Random weights of two layers under the names of the authors' checkpoints."""
    torch.manual_seed(seed)
    state = {}
    for place, size in ((1, columns * width), (3, width)):
        maps = {"fc_q": size, "fc_k": size, "fc_v": size, "fc_mix_heads": size, "fc_res": size, "rff.0": 4 * size}
        for name, rows in maps.items():
            state[f"enc.{place}.mab.{name}.weight"] = torch.randn(rows, size) / size**0.5
            state[f"enc.{place}.mab.{name}.bias"] = torch.randn(rows) / 5
        state[f"enc.{place}.mab.rff.3.weight"] = torch.randn(size, 4 * size) / size**0.5 / 2
        state[f"enc.{place}.mab.rff.3.bias"] = torch.randn(size) / 5
        for name in ("ln0", "ln1"):
            state[f"enc.{place}.mab.{name}.weight"] = 1 + torch.randn(size) / 5
            state[f"enc.{place}.mab.{name}.bias"] = torch.randn(size) / 5
    return {name: tensor.double() for name, tensor in state.items()}


def authors_forward(state, table):
    """Their forward: between rows, then between columns; keys and values of items as they are, scores by the root of the width."""
    rows, columns, width = table.shape
    for place in (1, 3):
        items = table.reshape(1, rows, columns * width) if place == 1 else table.reshape(rows, columns, width)
        p = {name.removeprefix(f"enc.{place}.mab."): x for name, x in state.items() if name.startswith(f"enc.{place}.")}
        size = items.shape[-1]
        normal = nn.functional.layer_norm(items, (size,), p["ln0.weight"], p["ln0.bias"], 1e-12)
        query = normal @ p["fc_q.weight"].T + p["fc_q.bias"]
        key, value = (items @ p[f"{name}.weight"].T + p[f"{name}.bias"] for name in ("fc_k", "fc_v"))
        heads = []
        for at in range(0, size, size // H):
            part = slice(at, at + size // H)
            weights = torch.softmax(query[..., part] @ key[..., part].mT / size**0.5, -1)
            heads.append(weights @ value[..., part])
        mixed = torch.cat(heads, -1) @ p["fc_mix_heads.weight"].T + p["fc_mix_heads.bias"]
        out = mixed + items @ p["fc_res.weight"].T + p["fc_res.bias"]
        inner = nn.functional.layer_norm(out, (size,), p["ln1.weight"], p["ln1.bias"], 1e-12)
        inner = nn.functional.gelu(inner @ p["rff.0.weight"].T + p["rff.0.bias"])
        table = (out + inner @ p["rff.3.weight"].T + p["rff.3.bias"]).reshape(rows, columns, width)
    return table


def test_the_authors_forward_from_their_parameters():
    state, table = authors_model(COLUMNS, E), draw(N, COLUMNS, E)
    found = {}
    for norm_kv in (False, True):
        options = AUTHORS | {"norm_kv": norm_kv}
        layers = DatapointAttention(COLUMNS, E, H, **options), ColumnAttention(E, H, **options)
        x = table[None]
        for layer, prefix in zip(layers, ("enc.1.", "enc.3."), strict=True):
            layer.double().eval().block.load_state_dict(authors_state(state, prefix))
            x = layer(x)
        found[norm_kv] = x[0]
    wanted = authors_forward(state, table)
    assert (found[False] - wanted).abs().max() < 1e-10
    assert (found[True] - wanted).abs().max() > 1e-3
    with pytest.raises(InvalidArgument, match=r"'enc.1.mab.fc_q.weight' is none of .* as 'enc.1.'"):
        authors_state(state, "enc.")
    named = {name.replace("rff.3", "rff.2"): tensor for name, tensor in state.items()}
    assert authors_state(named, "enc.3.").keys() == DatapointBlock(E, H).state_dict().keys()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_columns_are_laid_out_as_said(kind):
    """Between rows: one block over whole rows. Between columns: one block over each row's cells, row by row."""
    torch.manual_seed(0)
    between, within = DatapointAttention(COLUMNS, E, H, **KINDS[kind]), ColumnAttention(E, H, **KINDS[kind])
    table = draw(B, N, COLUMNS, E)
    between, within = between.double().eval(), within.double().eval()
    wanted = between.block(table.reshape(B, N, COLUMNS * E)).reshape(table.shape)
    torch.testing.assert_close(between(table), wanted, rtol=0, atol=1e-13)
    alone = torch.stack([torch.stack([within.block(row[None])[0] for row in one]) for one in table])
    torch.testing.assert_close(within(table), alone, rtol=0, atol=1e-12)
    assert within.coefficients(table).shape == (B, N, H, COLUMNS, COLUMNS)
    torch.testing.assert_close(
        within.coefficients(table)[1, 4], within.block.coefficients(table[1, 4][None])[0], rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_permutation_of_rows_permutes_the_output(kind, dtype):
    layers = stack(dtype=dtype, **KINDS[kind])
    table = draw(B, N, COLUMNS, E).to(dtype)
    with torch.no_grad():
        wanted = layers(table)
        for seed in range(5):
            order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
            found = layers(table[:, order])
            assert (found - wanted[:, order]).abs().max() <= (1e-10 if dtype == torch.float64 else 1e-5)
        columns = torch.arange(COLUMNS).roll(1)
        assert (layers(table[:, :, columns]) - wanted[:, :, columns]).abs().max() > 1e-2, (
            "columns have their own weights"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_twice_is_the_table(kind):
    layers, table = stack(**KINDS[kind]), draw(B, N, COLUMNS, E)
    with torch.no_grad():
        both = layers(torch.cat((table, table), dim=1))
        assert (both - layers(table).repeat(1, 2, 1, 1)).abs().max() <= 1e-10
        once = layers(torch.cat((table, table[:, :1]), dim=1))
        assert (once[:, :N] - layers(table)).abs().max() > 1e-4, "one row twice has twice the weight"


def cross(layers, table):
    """Largest entry of the derivative of row 4's output by another row's input, and by its own."""
    leaf = table.clone().requires_grad_()
    above = draw(COLUMNS, E, seed=9)
    (gradient,) = torch.autograd.grad((layers(leaf)[0, 4] * above).sum(), leaf)
    others = gradient.abs().amax((0, 2, 3))
    return others[torch.arange(N) != 4], others[4]


def test_rows_meet_by_the_values_alone():
    layers, table = stack(), draw(1, N, COLUMNS, E)
    others, own = cross(layers, table)
    assert others.min() > 0
    assert own > 0
    with torch.no_grad():
        for layer in layers:
            if isinstance(layer, DatapointAttention):
                layer.block.value.weight.zero_()
                layer.block.value.bias.zero_()
    others, own = cross(layers, table)
    assert others.max() == 0
    assert own > 0
    moved = table.clone()
    moved[:, 5:] = draw(1, N - 5, COLUMNS, E, seed=8)
    assert torch.equal(layers(moved)[:, :5], layers(table)[:, :5])
    # Without layers between rows at all, exactly nothing passes.
    others, _ = cross(nn.Sequential(layers[1], layers[3]), table)
    assert others.max() == 0


def test_one_row_attends_to_itself():
    layer, x = block(), draw(B, 1, W)
    p = dict(layer.named_parameters())
    normal = standardised(x, p["norm1.weight"], p["norm1.bias"], 1e-5)
    value = normal @ p["value.weight"].T + p["value.bias"]
    joined = x @ p["skip.weight"].T + p["skip.bias"] + value @ p["out.weight"].T + p["out.bias"]
    inner = layer.linear1(layer.norm2(joined))
    torch.testing.assert_close(layer(x), joined + layer.linear2(nn.functional.gelu(inner)), rtol=0, atol=1e-12)
    assert torch.equal(layer.coefficients(x), torch.ones(B, H, 1, 1, dtype=torch.float64))
    assert stack()(draw(1, 1, COLUMNS, E)).shape == (1, 1, COLUMNS, E)


@pytest.mark.parametrize("garbage", [1e30, math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_never_matters(kind, garbage):
    """Not to the other rows, nor to any gradient; whether rows attend to themselves or queries to them."""
    layer, x = block(**KINDS[kind]), draw(B, N, W)
    queries = draw(B, M, W, seed=6)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[:, 9:] = True
    spoiled = x.clone()
    spoiled[:, 9:] = garbage
    for asked in (None, queries):
        found = []
        for rows, hidden in ((x[:, :9], None), (spoiled, padding)):
            out = layer(rows, key_padding_mask=hidden)[:, :9] if asked is None else layer(asked, rows, hidden)
            found.append([out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    weights = layer.coefficients(queries, spoiled, padding)
    assert weights.shape == (B, H, M, N)
    assert (weights[..., 9:] == 0).all()
    torch.testing.assert_close(weights[..., :9], layer.coefficients(queries, x[:, :9]), rtol=0, atol=1e-12)


def test_rows_hidden_by_an_infinite_bias_change_nothing():
    layer, x = block(), draw(1, N, W)
    bias = torch.zeros(N, N, dtype=torch.float64)
    bias[:, 9:] = -math.inf
    torch.testing.assert_close(layer(x, attn_mask=bias)[:, :9], layer(x[:, :9]), rtol=0, atol=1e-12)
    hidden = torch.rand(N, N, generator=torch.Generator().manual_seed(0)) < 0.4
    hidden.fill_diagonal_(False)
    wanted, weights = oracle(dict(layer.named_parameters()), x, x, heads=H, hidden=hidden)
    for mask in (hidden, masks.dense(~hidden)):
        torch.testing.assert_close(layer(x, attn_mask=mask), wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(layer.coefficients(x, attn_mask=mask), weights, rtol=0, atol=1e-12)


def test_a_row_that_sees_nothing_gets_no_attention():
    layer, x = block(), draw(B, N, W)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1] = True
    p = dict(layer.named_parameters())
    joined = x @ p["skip.weight"].T + p["skip.bias"] + p["out.bias"]
    wanted = joined + layer.linear2(nn.functional.gelu(layer.linear1(layer.norm2(joined))))
    torch.testing.assert_close(layer(x, x, padding)[1], wanted[1], rtol=0, atol=1e-12)


def test_padded_columns_are_ignored():
    layer, table = ColumnAttention(E, H).double().eval(), draw(B, N, COLUMNS, E)
    padding = torch.zeros(B, COLUMNS, dtype=torch.bool)
    padding[1, 5:] = True
    spoiled = table.clone()
    spoiled[1, :, 5:] = math.nan
    out = layer(spoiled, padding)
    torch.testing.assert_close(out[0], layer(table)[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(out[1, :, :5], layer(table[:, :, :5])[1], rtol=0, atol=1e-13)
    assert (layer.coefficients(spoiled, padding)[1, ..., 5:] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_remembered_is_what_would_be_computed(kind):
    torch.manual_seed(0)
    layer = DatapointAttention(COLUMNS, E, H, **KINDS[kind]).double().eval()
    rows, queries = draw(B, N, COLUMNS, E), draw(B, M, COLUMNS, E, seed=2)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[0, 8:] = True
    for hidden in (None, padding):
        stored = layer.remember(rows, hidden)
        assert stored.key.shape == stored.value.shape == (B, H, 5 if kind == "inducing" else N, COLUMNS * E // H)
        wanted = layer(queries, rows, hidden)
        torch.testing.assert_close(layer(queries, remembered=stored), wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(layer(rows, rows, hidden)[1], layer(rows, key_padding_mask=hidden)[1])
        # Each query is answered as if it were alone, in any order.
        for one in (0, 6):
            alone = layer(queries[:, one : one + 1], remembered=stored)
            torch.testing.assert_close(alone, wanted[:, one : one + 1], rtol=0, atol=1e-12)
        order = torch.randperm(M)
        torch.testing.assert_close(layer(queries[:, order], remembered=stored), wanted[:, order], rtol=0, atol=1e-12)
    to_stored = layer.coefficients(queries, remembered=layer.remember(rows))
    assert to_stored.sum(-1).allclose(torch.ones(B, H, M, dtype=torch.float64))
    if kind != "inducing":
        torch.testing.assert_close(to_stored, layer.coefficients(queries, rows), rtol=0, atol=1e-13)


def test_inducing_rows_are_attended_to_through_a_block_of_their_own():
    layer, x, rows = block(inducing=5), draw(B, M, W), draw(B, N, W, seed=2)
    named = dict(layer.named_parameters())
    inner = {name.removeprefix("gather."): x for name, x in named.items() if name.startswith("gather.")}
    gathered, inward = oracle(inner, layer.rows.expand(B, -1, -1), rows, heads=H)
    wanted, outward = oracle(named, x, gathered, heads=H)
    torch.testing.assert_close(layer(x, rows), wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.coefficients(x, rows), outward @ inward, rtol=0, atol=1e-13)
    with pytest.raises(Unsupported, match=r"inducing=5 .* attn_mask cannot act; give key_padding_mask"):
        layer(x, attn_mask=torch.zeros(M, M, dtype=torch.bool))


def test_any_kernel_serves():
    layer, x = block(kernel=Gaussian(2.0)), draw(B, M, W)
    normal = layer.norm1(x)
    query, key = (part(normal).unflatten(-1, (H, -1)).transpose(1, 2) for part in (layer.query, layer.key))
    raised = (-torch.cdist(query, key).square() / 8).exp()
    torch.testing.assert_close(layer.coefficients(x), raised / raised.sum(-1, keepdim=True), rtol=0, atol=1e-10)
    learned = DatapointBlock(W, H, kernel=Softmax(nn.Parameter(torch.ones(H))), inducing=5)
    assert len({id(parameter) for parameter in learned.parameters()}) == len(list(learned.parameters()))
    learned(draw(B, M, W).float()).sum().backward()
    assert learned.kernel_parameters.scale.grad.abs().min() > 0
    assert learned.gather.kernel_parameters.scale.grad.abs().min() > 0


def test_dropout_acts_while_training_alone():
    layer, x = block(dropout=0.5), draw(B, M, W)
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))
    torch.manual_seed(0)
    layer = block(dropout=0.5, hidden=29, residual="identity").train()
    with torch.no_grad():
        layer.linear2.weight.zero_()
        layer.linear2.bias.zero_()
    # What attention adds is half zeros, its mean over draws what it adds without dropout.
    added = torch.stack([layer(x) - x for _ in range(500)])
    assert ((added == 0).double().mean() - 0.5).abs() < 0.01
    wanted = layer.eval()(x) - x
    assert ((added.mean(0) - wanted).abs() < 5 * added.std(0) / 500**0.5).all()


@pytest.mark.parametrize("kind", ["default", "inducing"])
def test_layers_compile_into_one_graph(kind):
    torch.compiler.reset()
    layers = stack(dtype=torch.float32, **KINDS[kind])
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[:, 9:] = True

    def run(table):
        return layers[1](layers[0](table, key_padding_mask=padding))

    table = draw(B, N, COLUMNS, E).float()
    backend = "aot_eager" if kind == "default" else "eager"  # tracing gradients costs seconds more
    found = []
    for call in (run, torch.compile(run, fullgraph=True, backend=backend)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call(table)
        gradients = torch.autograd.grad(out.square().mean(), list(layers[:2].parameters()))
        found.append([out, *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_wrong_calls_say_what_to_do():
    layer, x = block(), draw(B, N, W)
    table = DatapointAttention(COLUMNS, E, H).double()
    for call, message in (
        (lambda: DatapointBlock(W, H, scale="root"), "scale must be one of head, width; got 'root'"),
        (lambda: DatapointBlock(W, H, residual="none"), "residual must be one of linear, identity, query; got 'none'"),
        (lambda: DatapointBlock(W, 2), "embed_dim must be a multiple of num_heads"),
        (lambda: DatapointBlock(W, H, inducing=0), "inducing must be a whole number from 1 on, or None; got 0"),
        (lambda: DatapointBlock(W, H, eps=0), "eps must be a number above 0"),
        (lambda: DatapointBlock(W, H, dropout=1.0), "dropout"),
        (lambda: DatapointBlock(W, H, scale="width", kernel=Gaussian()), "has no scale"),
        (lambda: layer(x[0]), r"x must have shape \(batch, seq, 21\); got \(13, 21\)"),
        (lambda: layer(x, draw(B + 1, N, W)), "x and key share the batch"),
        (lambda: layer(x, key_padding_mask=torch.zeros(B, M, dtype=torch.bool)), r"got key_padding_mask of shape \(2, 11\)"),
        (lambda: layer(x, x, remembered=layer.remember(x)), "got key beside remembered"),
        (lambda: layer(x, remembered=block(heads=7).remember(x)), "with batch 2 and 3 heads"),
        (lambda: table(draw(B, N, E, COLUMNS)), r"cells must have shape \(batch, rows, 7, 3\); got \(2, 13, 3, 7\)"),
        (lambda: table(draw(B, N, COLUMNS, E), draw(B, N, COLUMNS * E)), r"key must have shape \(batch, rows, 7, 3\)"),
        (lambda: ColumnAttention(E, H)(draw(B, N, COLUMNS, E), torch.zeros(B, N)), r"\(batch, columns\) = \(2, 7\); got"),
        (lambda: DatapointAttention(0, E, H), "columns must be a whole number from 1 on"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=message):
            call()

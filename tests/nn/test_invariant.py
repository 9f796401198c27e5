"""Coefficients learned from inner products (Ma & Ying 2023, Prop. 3.2), against their formulas, turned, and broken on purpose."""

import pytest
import torch
from torch import nn

from heedful import InvalidArgument
from heedful.nn import GramCoefficients, InvariantCoefficients
from orthogonal import F64, D, K, N, deviation, drawn, settled


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def slow_invariant(layer, x, z, scalars, keep):
    """The docstring's formulas, pair by pair; one case."""
    n, c, d = x.shape
    rows = x if z is None else torch.cat((x, z))
    numbers = torch.zeros(len(rows), layer.scalars, **F64)
    if scalars is not None:
        numbers[:n] = scalars
    pairs = [(a, b) for a in range(c) for b in range(a, c)]
    r = [
        torch.cat((numbers[i], torch.stack([rows[i, a] @ rows[i, b] / d**0.5 for a, b in pairs])))
        for i in range(len(rows))
    ]
    names = torch.zeros(2, len(rows), layer.units, **F64)
    if layer.names is not None:
        names[:, n:] = layer.names
    act = {"silu": nn.functional.silu, "tanh": torch.tanh, "relu": torch.relu}[layer.activation]
    out, own_scalars = [], []
    for i in range(n):
        kappa = {}
        for j in [j for j in range(len(rows)) if keep[i, j]]:
            unit = torch.stack([
                layer.query_rows[u] @ r[i] + layer.key_rows[u] @ r[j] + names[0, j, u] + layer.bias[u]
                + (layer.query_mix[u] @ rows[i]) @ (layer.key_mix[u] @ rows[j]) / d**0.5
                for u in range(layer.units)
            ])  # fmt: skip
            unit = act(unit)
            for deeper in layer.deeper:
                unit = act(deeper(unit))
            kappa[j] = unit / int(keep[i].sum())
        pooled = torch.zeros(layer.units, 2, **F64)
        for j, unit in kappa.items():
            says = torch.stack([layer.value_rows[u] @ r[j] + names[1, j, u] for u in range(layer.units)])
            pooled += unit[:, None] * torch.stack((torch.ones_like(says), says), 1)
        parts = layer.own(torch.cat((r[i], pooled.flatten())))
        o = layer.out_channels
        own, gate, scalar = parts.split((o * c, layer.units, layer.out_scalars))
        vectors = own.view(o, c) @ x[i]
        for j, unit in kappa.items():
            for u in range(layer.units):
                vectors = vectors + layer.mix[:, u, None] * (1 + gate[u]) * unit[u] * (layer.value_mix[u] @ rows[j])
        out.append(vectors)
        own_scalars.append(scalar)
    return torch.stack(out), torch.stack(own_scalars)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("knowledge", [None, 0, 3])
def test_invariant_coefficients_are_their_formula(causal, depth, knowledge):
    layer = InvariantCoefficients(
        2, 1, units=3, depth=depth, out_channels=3, out_scalars=2, knowledge=knowledge or 0, activation="tanh", **F64
    )
    x, scalars = drawn(2, 5, 2, 3).requires_grad_(), drawn(2, 5, 1)
    z = None if knowledge is None else drawn(2, 3, 2, 3)
    seen = torch.ones(5, 5, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    keep = torch.cat((seen, torch.ones(5, 0 if z is None else 3, dtype=torch.bool)), 1)
    out = layer(x, z, scalars=scalars, is_causal=causal)
    wanted = [slow_invariant(layer, x[b], None if z is None else z[b], scalars[b], keep) for b in range(2)]
    torch.testing.assert_close(out.vectors, torch.stack([v for v, _ in wanted]), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(out.scalars, torch.stack([s for _, s in wanted]), rtol=1e-10, atol=1e-10)
    probe = drawn(*out.vectors.shape)
    leaves = [x, *(p for p in layer.parameters() if p.numel())]
    found = torch.autograd.grad((out.vectors * probe).sum(), leaves, retain_graph=True)
    slow = torch.autograd.grad((torch.stack([v for v, _ in wanted]) * probe).sum(), leaves)
    for a, b in zip(found, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    a, b = layer.coefficients(x, z, scalars=scalars, is_causal=causal)
    again = torch.einsum("bocij,bjcd->biod", a, x)
    again = again if b is None else again + torch.einsum("bocij,bjcd->biod", b, z)
    torch.testing.assert_close(again, out.vectors, rtol=1e-10, atol=1e-10)
    assert not causal or (a.triu(1) == 0).all()


@pytest.mark.parametrize("depth", [1, 2])
def test_invariant_coefficients_turn_with_every_space_and_renumber_with_tokens(depth):
    layer = settled(InvariantCoefficients(2, 1, units=3, depth=depth, out_scalars=1))
    for d in (1, 3, 8):
        x, z, scalars = drawn(2, N, 2, d), drawn(2, K, 2, d), drawn(2, N, 1)
        for causal in (False, True):

            def vectors(x, z, causal=causal, scalars=scalars):
                return layer(x, z, scalars=scalars, is_causal=causal).vectors

            error, control = deviation(vectors, x, z)
            assert error < 1e-10
            assert control > 1e-3 or d == 1
            order = torch.randperm(N)
            moved = vectors(x[:, order], z, scalars=scalars[:, order]) - vectors(x, z)[:, order]
            assert (float(moved.abs().max()) < 1e-10) is not causal


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_hidden_never_matters_to_invariant_coefficients(depth):
    layer = InvariantCoefficients(1, 1, units=3, depth=depth, **F64)
    x, z, scalars = drawn(2, N, 3), drawn(2, K, 3), drawn(2, N, 1)
    hidden, z_hidden = torch.arange(N).expand(2, -1) > 3, torch.arange(K).expand(2, -1) > 2
    wanted = layer(x[:, :4], z[:, :3], scalars=scalars[:, :4]).vectors
    for junk in (torch.nan, 1e30, -7.0):
        garbage = [
            part.masked_fill(mask[..., None], junk).requires_grad_()
            for part, mask in ((x, hidden), (z, z_hidden), (scalars, hidden))
        ]
        out = layer(
            garbage[0], garbage[1], scalars=garbage[2], key_padding_mask=hidden, z_padding_mask=z_hidden
        ).vectors
        torch.testing.assert_close(out[:, :4], wanted, rtol=1e-10, atol=1e-10)
        layer.zero_grad()
        out[:, :4].sum().backward()
        assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
    blind = layer(x, scalars=scalars, attn_mask=torch.ones(N, N, dtype=torch.bool)).vectors
    assert blind.isfinite().all()


def test_invariant_coefficients_compile_and_refuse():
    layer = InvariantCoefficients(1, 0, units=2, **F64)
    x = drawn(2, N, 3)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x).vectors, layer(x).vectors)
    for call, words in (
        (lambda: InvariantCoefficients(2)(x), r"x must have shape \(batch, rows, 2, d\)"),
        (lambda: InvariantCoefficients(1, 2)(x.float()), r"scalars must have shape \(2, 7, 2\)"),
        (lambda: layer(x, drawn(3, K, 3)), r"z must have shape \(2, k, 1, 3\)"),
        (lambda: InvariantCoefficients(knowledge=3)(x), "give z"),
        (lambda: InvariantCoefficients(activation="exp"), "activation must be one of"),
        (lambda: layer(x, z_padding_mask=torch.zeros(2, 1, dtype=torch.bool)), "give z"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            call()


@pytest.mark.parametrize("read", ["x", "z", "xz"])
def test_gram_coefficients_are_any_function_of_inner_products_from_one_length_to_another(read):
    layer = settled(GramCoefficients(3, K, outputs=2, hidden=8, read=read))
    x, z = drawn(4, 3, D), drawn(4, K, D)
    error, control = deviation(layer, x, z)
    assert error < 1e-10
    assert control > 1e-3
    a, b = layer.coefficients(x, z)
    torch.testing.assert_close(a @ x + b @ z, layer(x, z))
    assert layer(x, z).shape == (4, 2, D)
    rows = torch.cat((x, z), 1)
    gram = rows @ rows.mT / D**0.5
    inner = torch.cat([gram[:, i, i:3] for i in range(3)] + [gram[:, i, 3:] for i in range(3)] + [gram[:, i, i:] for i in range(3, 8)], 1)  # fmt: skip
    for part in layer.network[:-1]:
        inner = torch.relu(part(inner))
    joint = layer.network[-1](inner).view(4, 2, -1)
    torch.testing.assert_close(torch.cat([p for name, p in (("x", a), ("z", b)) if name in read], -1), joint)
    assert float((layer(x[:, [1, 0, 2]], z) - layer(x, z)).abs().max()) > 1e-3  # places matter
    with pytest.raises(InvalidArgument, match=r"x must have shape \(batch, 3, d\)"):
        layer(drawn(4, 4, D), z)
    with pytest.raises(InvalidArgument, match="leave z out"):
        GramCoefficients(3, **F64)(x, z)

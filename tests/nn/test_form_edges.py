"""Layers of the form at their edges: what is hidden, gradients, wrong arguments, and what no formula would show."""

import pytest
import torch

from heedful import Gaussian, HigherOrder, InvalidArgument, PerHead, Sigmoid, Softmax, masks
from heedful.nn import (
    Attention,
    Block,
    Encoder,
    GramCoefficients,
    InvariantCoefficients,
    Knowledge,
    KnowledgeAttention,
    PairAttention,
    Positions,
)

F64 = {"dtype": torch.float64}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_softmax_as_a_pair_function_has_the_gradients_of_softmax():
    """The largest score of a row is found twice, and may come out larger the second time by rounding."""
    for _ in range(40):
        layer = PairAttention(5, 4, form="softmax", **F64)
        x = torch.randn(1, 6, 5, **F64, requires_grad=True)
        y = x @ layer.rows.mT
        scores = (y @ layer.functions.query.mT) @ (y @ layer.functions.key.mT).mT / 2
        leaves = [x, layer.rows, layer.functions.query, layer.functions.key]
        found = torch.autograd.grad(layer(x).square().sum(), leaves)
        wanted = torch.autograd.grad((scores.softmax(-1) @ x).square().sum(), leaves)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


LAYERS = {
    "invariant": lambda: InvariantCoefficients(units=3),
    "invariant, deep": lambda: InvariantCoefficients(units=3, depth=2),
    "pair": lambda: PairAttention(4, 3),
    "pair, softmax": lambda: PairAttention(4, 3, form="softmax", readout="x|z"),
    "knowledge": lambda: KnowledgeAttention(4, knowledge=2, coordinates="knowledge", weight=True, readout="x|z"),
    "heads": lambda: KnowledgeAttention(4, 2, kernel=[Softmax(), Gaussian(2.0)]),
    "symmetric": lambda: KnowledgeAttention(4, kernel=Gaussian(2.0).symmetric(), readout="x"),
    "symmetric sigmoid": lambda: KnowledgeAttention(4, kernel=Sigmoid().symmetric(), readout="x"),
}


@pytest.mark.parametrize("mask", ["causal", "document"])
@pytest.mark.parametrize("name", LAYERS)
def test_later_tokens_and_other_documents_never_matter(name, mask):
    layer = LAYERS[name]()
    x = torch.randn(1, 6, 4)
    call = {"is_causal": True}
    if mask == "document":
        call = {"attn_mask": masks.document(torch.tensor([[0, 0, 0, 1, 1, 1]]))}

    def rows(x):
        out = layer(x, **call)
        return (out.vectors if name.startswith("invariant") else out)[:, :3]

    wanted = rows(x)
    for junk in (torch.nan, torch.inf, 1e30, 1e12):
        garbage = torch.cat((x[:, :3], torch.full_like(x[:, 3:], junk)), 1).requires_grad_()
        out = rows(garbage)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
        # Scores of rows that see each other's 1e30 overflow, and with them the gradients that meet in `attend` (docs/operator.md).
        if junk != 1e30 or name.startswith(("invariant", "pair")):
            assert torch.autograd.grad(out.sum(), garbage)[0][:, :3].isfinite().all()


def test_who_sees_a_number_that_is_not_finite_gives_nan():
    x = torch.randn(1, 6, 4)
    x[:, 4] = torch.nan
    for name in ("invariant, deep", "pair"):
        out = LAYERS[name]()(x, is_causal=True)
        out = out.vectors if name.startswith("invariant") else out
        assert out[:, :4].isfinite().all()
        assert out[:, 4:].isnan().all()


def test_padded_rows_keep_their_residual():
    x, hidden = torch.randn(1, 5, 4), torch.arange(5)[None] > 2
    layer = PairAttention(4, 3, residual=True)
    torch.testing.assert_close(
        layer(x, key_padding_mask=hidden) - PairAttention.forward(_bare(layer), x, key_padding_mask=hidden), x
    )


def _bare(layer):
    bare = PairAttention(4, 3)
    bare.load_state_dict(layer.state_dict())
    return bare


def test_lists_of_kernels_stand_in_blocks_and_compose():
    kernels = [Softmax(), Gaussian(2.0)]
    assert Block(8, 2, kernel=kernels).kernel == PerHead(tuple(kernels))
    assert Encoder(8, 2, [kernels, "softmax"]).kernels[0] == PerHead(tuple(kernels))
    assert Softmax() * PerHead(tuple(kernels)) == PerHead((Softmax() * Softmax(), Softmax() * Gaussian(2.0)))
    assert Softmax() + PerHead(tuple(kernels)) == PerHead((Softmax() + Softmax(), Softmax() + Gaussian(2.0)))
    one, other = Knowledge(kernel=kernels), Knowledge(kernel=tuple(kernels))
    assert one == other
    assert hash(one) == hash(other)
    assert Encoder(8, 2, [Knowledge(value="mlp", hidden=5)]).layers[0].self_attn.hidden == 5


def test_symmetric_kernels_compile_for_every_length():
    from heedful import attend

    run = torch.compile(
        lambda x: attend(x, x, x, kernel=Gaussian(2.0).symmetric()), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for n in (5, 7):
        x = torch.randn(1, 2, n, 3)
        torch.testing.assert_close(run(x), attend(x, x, x, kernel=Gaussian(2.0).symmetric()))


X, Z = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
REFUSED = [
    (lambda: InvariantCoefficients(depth=2)(X, attn_mask=torch.randn(5, 5)), "depth > 1 has no score to add to"),
    (lambda: InvariantCoefficients()(X, key_padding_mask=torch.zeros(2, 5)), "key_padding_mask must be boolean"),
    (lambda: InvariantCoefficients()(X, [1.0]), "z must be a tensor; got list"),
    (lambda: InvariantCoefficients(impl="foo"), "impl must be one of"),
    (lambda: GramCoefficients(5, 3)(X, Z[:, None]), r"z must have shape \(3, 8\) or \(2, 3, 8\); got \(2, 1, 3, 8\)"),
    (lambda: GramCoefficients(5, 3)(X, Z.double()), "z must have the dtype of x, torch.float32"),
    (lambda: PairAttention(8, 3, 2, knowledge="given")(X, torch.randn(2, 5, 3, 8)), r"for each head \(2, 2, 3, 8\)"),
    (lambda: KnowledgeAttention(8, knowledge=2, coordinates="knowledge", weight=True)(X, Z), "say given=k"),
    (lambda: KnowledgeAttention(8, kernel=Gaussian().symmetric(), readout="x|z"), "as many keys as queries"),
    (lambda: KnowledgeAttention(8, kernel=Gaussian().symmetric()), "as many keys as queries"),
    (lambda: KnowledgeAttention(8, 2, kernel=[Softmax()]), "got 1 kernels for num_heads = 2"),
    (lambda: Encoder(8, 2, [Knowledge()])(X, z_padding_mask=torch.zeros(2, 3, dtype=torch.bool)), "no z was given"),
    (lambda: Block(8, 2)(X, z_padding_mask=torch.zeros(2, 3, dtype=torch.bool)), "no z was given"),
    (lambda: Encoder(8, 2, [Knowledge(readout="x")])(X, z=Z), "no layer of this encoder reads z"),
    (lambda: Encoder(8, 2, [Knowledge()])(X, z=Z[..., :7]), r"z must have shape \(k, 8\)"),
    (lambda: HigherOrder(order=(2, 4), mix=((torch.eye(2),), torch.eye(2))), "got both"),
    (lambda: Positions(8)(X, start=-2), "start must be a whole number from 0 on"),
    (lambda: Attention(8, 2, kernel=[Softmax(), 3]), "the kernel of head 1 must be one kernel"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(InvalidArgument, match=words):
        call()


def test_nothing_at_all():
    assert PairAttention(8, 3, form="softmax")(X[:, :0]).shape == (2, 0, 8)
    assert InvariantCoefficients()(X[:, :0]).vectors.shape == (2, 0, 8)
    assert KnowledgeAttention(8)(X, Z[:, :0]).shape == X.shape

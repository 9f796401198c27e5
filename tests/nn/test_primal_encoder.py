"""Primal layers in blocks and encoders: chosen by name or as data, saved, refused, and their loss."""

import pytest
import torch

from heedful import FeatureMap, Gaussian, InvalidArgument, Softmax, Unsupported, masks
from heedful.nn import Attention, Block, Encoder, Primal, PrimalAttention, ksvd_loss

F64 = {"dtype": torch.float64}
PRIMALS = [
    Primal(),
    Primal(3, 2, "stride"),
    Primal(causal="prefix"),
    Primal(5, causal="cummean", feature_map="elu", track_loss=False),
    Primal(feature_map=FeatureMap("relu")),
    Primal(4, track_loss="kkt"),
]


def test_layers_by_name():
    encoder = Encoder(12, 3, ["softmax", "linear", "primal", "none", Gaussian(2.0), Primal(4)], max_len=20)
    assert encoder.kernels == [Softmax(), FeatureMap("elu"), Primal(), "none", Gaussian(2.0), Primal(4)]
    kinds = [type(layer.self_attn) for layer in encoder.layers]
    assert kinds == [Attention, Attention, PrimalAttention, type(None), Attention, PrimalAttention]
    assert encoder(torch.randn(2, 7, 12)).shape == (2, 7, 12)


@pytest.mark.parametrize("norm_first", [True, False])
def test_none_mixes_nothing(norm_first):
    block = Block(12, 3, kernel="none", norm_first=norm_first, **F64)
    x = torch.randn(2, 7, 12, **F64)
    torch.testing.assert_close(block(x, is_causal=True, attn_mask=masks.causal)[:, 3], block(x[:, 3:4])[:, 0])
    assert not any(name.startswith(("self_attn", "norm1")) for name in block.state_dict())
    wanted = x + block._network(block.norm2(x)) if norm_first else block.norm2(x + block._network(x))
    assert torch.equal(block(x), wanted)


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_block_is_what_it_says(norm_first):
    block = Block(12, 3, kernel=Primal(4), max_len=9, norm_first=norm_first, **F64)
    x = torch.randn(2, 7, 12, **F64)
    hidden = torch.arange(7).expand(2, -1) >= 5
    if norm_first:
        middle = x + block.self_attn(block.norm1(x), hidden)
        wanted = middle + block._network(block.norm2(middle))
    else:
        middle = block.norm1(x + block.self_attn(x, hidden))
        wanted = block.norm2(middle + block._network(middle))
    assert torch.equal(block(x, key_padding_mask=hidden), wanted)


@pytest.mark.parametrize("primal", PRIMALS, ids=repr)
def test_a_description_goes_through_json(primal, tmp_path):
    import json

    assert Primal.from_dict(json.loads(json.dumps(primal.to_dict()))) == primal
    assert hash(primal) == hash(Primal.from_dict(primal.to_dict()))
    encoder = Encoder(12, 3, ["softmax", primal, "none"], max_len=20, norm_first=False).eval()
    encoder.save_pretrained(tmp_path)
    again = Encoder.from_pretrained(tmp_path)
    assert again.kernels == encoder.kernels == [Softmax(), primal, "none"]
    assert again.max_len == 20
    x = torch.randn(2, 7, 12)
    assert torch.equal(again(x), encoder(x))
    layer = encoder.layers[1].self_attn
    layer.save_pretrained(tmp_path / "layer")
    alone = PrimalAttention.from_pretrained(tmp_path / "layer")
    assert alone.description == primal
    assert torch.equal(alone(x), layer(x))


def test_loss_of_a_model():
    encoder = Encoder(12, 3, ["primal", "softmax", Primal(4), Primal(5, track_loss=False)], max_len=20)
    with pytest.raises(InvalidArgument, match="no forward pass was run"):
        ksvd_loss(encoder)
    encoder(torch.randn(2, 7, 12))
    layers = [encoder.layers[at].self_attn for at in (0, 2)]
    for call in ({}, {"reduction": "batch"}, {"trace": "data"}, {"penalty": "kkt"}):
        found = ksvd_loss(encoder, **call)
        torch.testing.assert_close(found, sum(layer.ksvd_loss(**call) for layer in layers) / 2)
        assert found.shape == ()
    ksvd_loss(encoder).backward()
    assert layers[0].lam.grad.abs().sum() > 0
    assert encoder.layers[1].self_attn.in_proj_weight.grad is not None
    assert encoder.layers[3].self_attn.w_e.grad is None


def test_loss_without_primal_layers_is_zero():
    for model in (Encoder(12, 3, ["softmax", "none"]), torch.nn.Identity(), torch.nn.Linear(3, 3).to("meta")):
        loss = ksvd_loss(model)
        assert loss.shape == ()
        assert loss.dtype == torch.float32
        assert not loss.requires_grad
        assert loss.device == next((p.device for p in model.parameters()), torch.device("cpu"))
    assert ksvd_loss(torch.nn.Identity()).item() == 0.0


def test_causal_encoder():
    encoder = Encoder(12, 3, ["softmax", Primal(causal="prefix"), Primal(causal="cummean"), "none"], max_len=20, **F64)
    x = torch.randn(1, 9, 12, **F64, requires_grad=True)
    gradient = torch.autograd.grad(encoder(x, is_causal=True)[0, 4].square().sum(), x)[0][0]
    assert (gradient[5:] == 0).all()
    assert (gradient[:5].abs().amax(-1) > 0).all()


def test_padding_in_an_encoder():
    encoder = Encoder(12, 3, ["softmax", "primal", "linear", Primal(causal="prefix")], max_len=20, **F64)
    x = torch.randn(2, 9, 12, **F64)
    hidden = torch.arange(9).expand(2, -1) >= 6
    torch.testing.assert_close(encoder(x, key_padding_mask=hidden)[:, :6], encoder(x[:, :6]), rtol=1e-10, atol=1e-10)


def test_resizing_an_encoder(tmp_path):
    encoder = Encoder(12, 3, ["softmax", "primal", "none", Primal(causal="cummean")], max_len=20)
    assert encoder.resize_(30) is encoder
    assert encoder.layers[1].self_attn.w_e.shape == (3, 30, 20)
    encoder.eval().save_pretrained(tmp_path)
    again = Encoder.from_pretrained(tmp_path)
    assert again.max_len == again.layers[1].max_len == again.layers[0].max_len == 30
    x = torch.randn(2, 25, 12)
    assert torch.equal(again(x), encoder(x))


def test_an_encoder_compiles():
    torch.compiler.reset()
    encoder = Encoder(12, 3, ["softmax", "primal"], max_len=20)
    x = torch.randn(2, 9, 12)

    def loss(x):
        return encoder(x).square().mean() + ksvd_loss(encoder)

    torch.testing.assert_close(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), loss(x))


X = torch.zeros(2, 5, 12)


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: Encoder(12, 3, ["primal"]), InvalidArgument, "give max_len"),
        (lambda: Encoder(12, 3, "primal", max_len=9), InvalidArgument, "kernels must be a list"),
        (
            lambda: Encoder(12, 3, ["softmex"]),
            InvalidArgument,
            "one of 'softmax', 'linear', 'primal', 'none'; got 'softmex'",
        ),
        (lambda: Block(12, 3, kernel=3), InvalidArgument, "a layer is a kernel such as"),
        (lambda: Block(12, 3, kernel="primal", max_len=9)(X, masks.causal), Unsupported, "give key_padding_mask"),
        (
            lambda: Block(12, 3, kernel="primal", max_len=9)(X, is_causal=True),
            Unsupported,
            r"Primal\(causal='prefix'\)",
        ),
        (
            lambda: Block(12, 3, kernel="primal", max_len=9)(X, key_padding_mask=torch.zeros(2, 5)),
            InvalidArgument,
            "must be boolean",
        ),
        (lambda: Encoder(12, 3, ["softmax"]).resize_(-1), InvalidArgument, "max_len must be a whole number from 1 on"),
        (lambda: Block(12, 3).resize_(0), InvalidArgument, "max_len must be a whole number from 1 on"),
        (lambda: Block(12, 5, kernel="none"), InvalidArgument, "embed_dim must be a multiple of num_heads"),
        (
            lambda: Block(12, 3, dropout=1.5, kernel="none"),
            InvalidArgument,
            r"dropout must be a number from 0 on, below 1",
        ),
        (lambda: Block(12, 3, hidden=-1), InvalidArgument, "hidden must be a whole number from 0 on"),
        (
            lambda: Primal.from_dict({"feature_map": {"map": "elu"}}),
            InvalidArgument,
            "describes nothing that heedful knows",
        ),
    ],
)
def test_bad_layers_are_refused(make, error, told):
    with pytest.raises(error, match=told):
        make()

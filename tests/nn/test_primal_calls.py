"""PrimalAttention as it is called: compiled, without data, copied; results that show themselves, and calls that are refused."""

import warnings

import pytest
import torch

from heedful import InvalidArgument, Polynomial, Softmax, Unsupported
from heedful.nn import Primal, PrimalAttention
from heedful.ops import primal as ops
from primal_layers import EMBED, F64, HEADS, RANK, make

MODES = [{}, {"sampling": "stride"}, {"causal": "prefix"}, {"causal": "cummean"}]


def loss_of(layer, x, hidden):
    return layer(x, hidden).square().sum() + layer.ksvd_loss() + layer.ksvd_loss("batch")


@pytest.mark.parametrize(
    ("more", "dynamic"),
    [({}, False), ({"causal": "cummean"}, False), ({"causal": "prefix"}, False), ({"causal": "prefix"}, True)],
    ids=str,
)
def test_compiles_without_breaks(more, dynamic):
    torch.compiler.reset()
    layer = PrimalAttention(EMBED, HEADS, RANK, max_len=40, rank_multi=2, **more)
    x = torch.randn(2, 13, EMBED)
    hidden = torch.arange(13).expand(2, -1) >= torch.tensor([[13], [8]])
    wanted = torch.autograd.grad(loss_of(layer, x, hidden), list(layer.parameters()))
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for a, b in zip(torch.autograd.grad(compiled(layer, x, hidden), list(layer.parameters())), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("more", MODES)
@pytest.mark.parametrize("masked", [False, True])
def test_waits_for_no_device(more, masked):
    """A tensor without data cannot be read: a value that decided something on the host would raise."""
    layer = PrimalAttention(EMBED, HEADS, RANK, max_len=40, rank_multi=2, device="meta", **more)
    hidden = torch.ones(2, 13, dtype=torch.bool, device="meta") if masked else None
    assert loss_of(layer, torch.randn(2, 13, EMBED, device="meta"), hidden).shape == ()
    if layer.causal:
        assert layer.step(torch.randn(2, 13, EMBED, device="meta"), None, hidden).output.shape == (2, 13, EMBED)


def test_a_copy_leaves_the_graph_behind():
    import copy
    import pickle

    layer = make()
    layer(torch.randn(1, 5, EMBED, **F64))
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(again.w_e, layer.w_e)
        with pytest.raises(InvalidArgument, match="no forward pass was run"):
            again.ksvd_loss()
    assert layer.ksvd_loss().isfinite()


def test_dropout_acts_in_training_alone():
    layer = make(dropout=0.5)
    x = torch.randn(1, 5, EMBED, **F64)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_results_are_read_and_drawn():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="drawn where matplotlib is installed")
    layer, x = make(), torch.randn(1, 5, EMBED, **F64)
    for result, told in ((layer.scores(x), "5 tokens, 3 heads, 4 components"), (layer.to_dual(x), "residual up to")):
        assert told in repr(result)
        assert all(torch.tensor(value).shape for value in result.to_dict().values())
        assert result.plot().get_title()
    pyplot.close("all")
    with pytest.raises(InvalidArgument, match="rank 1"):
        PrimalAttention(4, 2, 1, max_len=3).scores(torch.randn(1, 3, 4)).plot()


X = torch.zeros(2, 5, EMBED, **F64)


@pytest.mark.parametrize(
    ("make_it", "error", "told"),
    [
        (lambda: PrimalAttention(12, 5, max_len=9), InvalidArgument, "multiple of num_heads"),
        (lambda: PrimalAttention(12, 3, 0, max_len=9), InvalidArgument, "rank must be a whole number from 1 on; got 0"),
        (lambda: PrimalAttention(12, 3), InvalidArgument, "give max_len"),
        (lambda: PrimalAttention(12, 3, max_len=0), InvalidArgument, "max_len must be a whole number from 1 on"),
        (
            lambda: PrimalAttention(12, 3, max_len=9, dropout=1.0),
            InvalidArgument,
            r"dropout must be a number from 0 on, below 1",
        ),
        (lambda: Primal(rank_multi=True), InvalidArgument, "rank_multi must be a whole number from 1 on"),
        (lambda: Primal(sampling="random"), InvalidArgument, "sampling must be one of segment_mean, stride"),
        (lambda: Primal(track_loss="j"), InvalidArgument, "track_loss must be one of True, False, kkt; got 'j'"),
        (lambda: Primal(weights="both"), InvalidArgument, "weights must be one of data, static, or None"),
        (lambda: Primal(causal=True), InvalidArgument, "causal must be one of False, cummean, prefix; got True"),
        (lambda: Primal(causal=0), InvalidArgument, "causal must be one of"),
        (lambda: Primal(causal="cummean", weights="data"), InvalidArgument, "causal='prefix' is the causal form"),
        (lambda: Primal(causal="prefix", weights="static"), InvalidArgument, "use causal='cummean'"),
        (lambda: Primal(feature_map="tanh"), InvalidArgument, "feature_map must be one of cosine"),
        (lambda: Primal(feature_map=Polynomial(1, scale=torch.ones(3))), InvalidArgument, "plain numbers"),
        (lambda: make(feature_map=Softmax()), InvalidArgument, "no finite features"),
        (lambda: Primal.from_dict({"rang": 3}), InvalidArgument, "description is a dict of its fields"),
        (lambda: make().ksvd_loss(), InvalidArgument, "no forward pass was run"),
        (lambda: make(track_loss=False).ksvd_loss(), InvalidArgument, "track_loss is False"),
        (lambda: make()(X[..., 1:]), InvalidArgument, r"x must have shape \(batch, seq, 15\)"),
        (lambda: make()(X, torch.zeros(2, 5)), InvalidArgument, "must be boolean"),
        (
            lambda: make()(X, torch.zeros(2, 4, dtype=torch.bool)),
            InvalidArgument,
            r"expected \(batch, seq\) = \(2, 5\)",
        ),
        (lambda: make().step(X), Unsupported, "sees the whole sequence"),
        (lambda: make(causal="prefix")(X.repeat(1, 2, 1)), InvalidArgument, "weights for max_len=8 positions; got 10"),
        (lambda: make(causal="prefix").kernel_matrix(X), Unsupported, "a kernel for every prefix"),
        (lambda: make(causal="prefix").kkt_residual(X), Unsupported, "a kernel for every prefix"),
        (lambda: make(causal="cummean").resize_(9), InvalidArgument, "nothing to resize"),
        (lambda: make().resize_(0), InvalidArgument, "max_len must be a whole number from 1 on"),
    ],
)
def test_bad_calls_are_refused(make_it, error, told):
    with pytest.raises(error, match=told):
        make_it()


def test_bad_losses_are_refused():
    layer = make(causal="prefix")
    layer(X)
    for more, told in (({"trace": "data"}, "use trace='param'"), ({"penalty": "kkt"}, "use causal=False")):
        with pytest.raises(Unsupported, match=told):
            layer.ksvd_loss(**more)
    for name in ("reduction", "trace", "penalty"):
        with pytest.raises(InvalidArgument, match=f"{name} must be one of .*; got 'nothing'"):
            layer.ksvd_loss(**{name: "nothing"})


def test_a_loss_has_the_whole_gradient_or_none():
    """A pass without gradients leaves parts of which half would reach the parameters: as in reentrant checkpointing."""
    from torch.utils.checkpoint import checkpoint

    layer = make()
    x = torch.randn(2, 7, EMBED, **F64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    wanted = torch.autograd.grad(loss_of(layer, x, None), leaves)
    again = checkpoint(layer, x, use_reentrant=False).square().sum() + layer.ksvd_loss() + layer.ksvd_loss("batch")
    for a, b in zip(torch.autograd.grad(again, leaves), wanted, strict=True):
        torch.testing.assert_close(a, b)
    checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(InvalidArgument, match="use_reentrant=False"):
        layer.ksvd_loss()
    value = [layer(x), layer.ksvd_loss().item()][1]
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            layer.train()(x)
            assert layer.ksvd_loss().item() == pytest.approx(value)
        loss = layer.eval().ksvd_loss()
        assert loss.item() == pytest.approx(value)
        assert not loss.requires_grad


def test_autocast_leaves_sample_kernel_and_dual_alone():
    """The linear map runs in bfloat16; what is made of its output is as exact as without autocast."""
    layer = PrimalAttention(EMBED, HEADS, RANK, max_len=8)
    x = torch.randn(2, 13, EMBED)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kernel, dual, scores = layer.kernel_matrix(x), layer.to_dual(x), layer.scores(x)
        sample = ops.sample(x, 8, "segment_mean")
    assert kernel.dtype == dual.h_r.dtype == torch.float32
    torch.testing.assert_close(kernel @ dual.h_r, scores.e, rtol=1e-4, atol=1e-5)
    assert torch.equal(sample, ops.sample(x, 8, "segment_mean"))


def test_a_length_is_no_constant_of_an_exported_layer():
    layer = PrimalAttention(EMBED, HEADS, RANK, max_len=8, sampling="stride").eval()
    shapes = ({1: torch.export.Dim("n", min=2, max=512)},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(layer, (torch.randn(2, 7, EMBED),), dynamic_shapes=shapes).module()
    x = torch.randn(2, 33, EMBED)
    torch.testing.assert_close(exported(x), layer(x))

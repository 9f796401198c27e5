"""`use` on some layers of a model: by number, by name, what it says it changed, and what would change nothing."""

import numpy as np
import pytest
import torch

from heedful import Gaussian, InvalidArgument, Sigmoid
from heedful.bridges.transformers import restore, use, used

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from bridged import check_close, inputs, made, result

SELF, CROSS = "layer.0.SelfAttention", "layer.1.EncDecAttention"


def test_layers_are_changed_alone():
    model, given = made("bert"), inputs("bert")
    eager = model(**given, output_hidden_states=True).hidden_states
    ours = use(model, Sigmoid(), layers=[1])(**given, output_hidden_states=True).hidden_states
    check_close(ours[1], eager[1])
    assert not torch.allclose(ours[2], eager[2])
    with pytest.raises(
        InvalidArgument,
        match=r"this BertModel has no layer 2; numbers count the layers of encoder.layer, .* replace 0, 1",
    ):
        use(model, layers=[2])
    assert used(model) == Sigmoid()


@pytest.mark.parametrize(
    ("layers", "changed"),
    [
        (None, "encoder.block.0 encoder.block.1 decoder.block.0 decoder.block.0x decoder.block.1 decoder.block.1x"),
        (1, "encoder.block.1 decoder.block.1 decoder.block.1x"),
        (np.arange(1), "encoder.block.0 decoder.block.0 decoder.block.0x"),
        (np.int64(1), "encoder.block.1 decoder.block.1 decoder.block.1x"),
        (range(1), "encoder.block.0 decoder.block.0 decoder.block.0x"),
        ("encoder", "encoder.block.0 encoder.block.1"),
        ("decoder.block.1", "decoder.block.1 decoder.block.1x"),
        (["*.EncDecAttention", "encoder.*.1.*"], "encoder.block.1 decoder.block.0x decoder.block.1x"),
        ((0, "decoder*Self*"), "encoder.block.0 decoder.block.0 decoder.block.0x decoder.block.1"),
    ],
)
def test_layers_by_number_and_by_name(layers, changed):
    model = made("t5")
    everything = use(model).changed
    placement = use(model, Sigmoid(), layers=layers)
    wanted = [f"{part[:-1]}.{CROSS}" if part.endswith("x") else f"{part}.{SELF}" for part in changed.split()]
    assert placement.changed == tuple(wanted)
    assert placement.left == tuple(name for name in everything if name not in wanted)
    assert [name for name, module in model.named_modules() if "_heedful" in vars(module)] == wanted
    assert (placement.model, placement.kernel, used(placement)) == (model, Sigmoid(), Sigmoid())


def test_layers_that_would_change_nothing_are_refused():
    model = made("bert")
    for layers, told in (
        ([2], "this BertModel has no layer 2"),
        ([-1], "this BertModel has no layer -1"),
        ([0, "decoder.*"], r"no attention in this BertModel matches 'decoder.\*'; .* encoder.layer.0.attention.self"),
        ("Encoder", "no attention in this BertModel matches 'Encoder'"),
        ("", "no attention in this BertModel matches ''"),
        ([], r"numbers of layers or patterns of names, one or more; got \[\]"),
        (1.0, "numbers of layers or patterns of names; got 1.0"),
        ([1, 1.0], "got 1.0"),
        ([True], "got True"),
        ([None], "got None"),
    ):
        with pytest.raises(InvalidArgument, match=told):
            use(model, Sigmoid(), layers=layers)
        assert used(model) is None
    assert model.config._attn_implementation == "eager"


def test_a_placement_stands_for_its_model():
    model, given = made("bert"), inputs("bert")
    expected = result(model, given)
    with use(model, Sigmoid(), layers=[1]) as inside:
        assert inside is model
        assert not torch.allclose(result(model, given), expected)
    assert used(model) is None
    assert torch.equal(result(model, given), expected)
    with pytest.raises(ZeroDivisionError), use(model, Sigmoid()):
        _ = 1 / 0
    assert used(model) is None
    placement = use(model, Sigmoid(), layers=[1])
    assert repr(placement) == "Placement(Sigmoid(bias=0.0) in BertModel: 1 of 2 attention modules)"
    assert str(placement).splitlines()[1:] == [
        "changed: encoder.layer.1.attention.self",
        "left:    encoder.layer.0.attention.self",
    ]
    assert placement.to_dict()["left"] == ["encoder.layer.0.attention.self"]
    assert placement.config is model.config
    assert use(placement, Gaussian(2.0)).model is model
    assert restore(placement) is model
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = placement.nothing_of_this_name

"""Hugging Face models with heedful kernels: Softmax equals eager attention, other kernels respect masks."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
import torch
from torch import nn

from bridged import (
    BATCH,
    DECODERS,
    MODELS,
    NO_TOKENS,
    SMALL,
    VOCABULARY,
    bert,
    check_close,
    gradients,
    hf,
    inputs,
    keep,
    made,
    result,
)  # fmt: skip
from heedful import (
    Gaussian,
    HigherOrder,
    InvalidArgument,
    MissingExtra,
    Polynomial,
    Sigmoid,
    Softmax,
    Unsupported,
    attend,
)
from heedful.bridges import transformers as bridge
from heedful.bridges.transformers import restore, use, used


@pytest.fixture(autouse=True)
def exact_eager(monkeypatch):
    """Eager attention takes its softmax in float32; here it stays in float64, so that tolerances can be tight."""
    softmax = nn.functional.softmax
    monkeypatch.setattr(nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim))


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


def test_names():
    assert bridge.__all__ == ["Placement", "restore", "use", "used"]
    assert all(callable(getattr(bridge, name)) for name in bridge.__all__)


@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_softmax_is_eager_in_values_and_gradients(name, side):
    model, given = made(name), inputs(name, side)
    expected, expected_grads = gradients(model, given)
    got, grads = gradients(use(model), given)
    check_close(got, expected)
    assert grads.keys() == expected_grads.keys()
    assert len(grads) > 10
    for parameter, grad in grads.items():
        check_close(grad, expected_grads[parameter])


@pytest.mark.parametrize("impl", ["reference", "stream", "auto"])
def test_every_implementation_agrees(name, impl):
    model, given = made(name), inputs(name)
    expected, expected_grads = gradients(model, given)
    got, grads = gradients(use(model, impl=impl), given)
    check_close(got, expected)
    check_close(grads, expected_grads)


@pytest.mark.parametrize("impl", ["stream", "auto"])
@pytest.mark.parametrize("kernel", [Gaussian(2.0), Sigmoid(bias=-1.0), HigherOrder()], ids=repr)
def test_every_implementation_agrees_on_other_kernels(kernel, impl):
    for name in ("llama", "t5"):
        model, given = made(name), inputs(name, "left")
        expected, expected_grads = gradients(use(model, kernel, impl="reference"), given)
        got, grads = gradients(use(model, kernel, impl=impl), given)
        check_close(got, expected)
        check_close(grads, expected_grads)


@pytest.mark.parametrize("former", ["eager", "sdpa"])
def test_the_former_implementation_does_not_matter(former):
    given = inputs("llama", "left")
    check_close(result(use(made("llama", former)), given), result(made("llama"), given))


@pytest.mark.parametrize("impl", ["reference", "stream", "auto"])
def test_weights_are_those_of_eager(name, impl):
    model, given = made(name), inputs(name)
    eager = model(**given, output_attentions=True)
    plain = result(use(model, impl=impl), given)
    ours = model(**given, output_attentions=True)
    assert torch.equal(result(model, {**given, "output_attentions": True}), plain)
    asked = [key for key in eager if "attentions" in key and eager[key]]
    assert asked
    # A padded query of a decoder may see no key at all: nothing here, a mean in eager attention.
    rows = given["attention_mask"][:, None, :, None] if name in DECODERS else 1
    for key in asked:
        assert len(ours[key]) == len(eager[key])
        for got, expected in zip(ours[key], eager[key], strict=True):
            check_close(got * rows, expected * rows)


def test_weights_are_written_out_only_when_asked_for(monkeypatch):
    model, given = use(made("bert")), inputs("bert")
    calls = []
    counted = attend.coefficients
    monkeypatch.setattr(attend, "coefficients", lambda *a, **k: (calls.append(1), counted(*a, **k))[1])
    assert model(**given).attentions is None
    assert not calls
    assert len(model(**given, output_attentions=True).attentions) == len(calls) == 2


def test_weights_asked_for_in_the_config():
    model = made("bert")
    model.config.output_attentions = True
    expected = model(**inputs("bert")).attentions
    check_close(use(model)(**inputs("bert")).attentions, expected)
    assert restore(model).config.output_attentions


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "t5"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_generation_is_that_of_eager(name, cache, side):
    given = {k: v for k, v in inputs(name, side).items() if k != "labels"}
    options = {
        "max_new_tokens": 7,
        "do_sample": False,
        "cache_implementation": cache,
        "return_dict_in_generate": True,
        "output_logits": True,
        "disable_compile": True,
    }
    model = made(name)
    expected = model.generate(**given, **options)
    got = use(model).generate(**given, **options)
    assert torch.equal(got.sequences, expected.sequences)
    check_close(got.logits, expected.logits)


def test_prefill_behind_a_cache_is_one_prefill():
    for kernel in (Softmax(), Gaussian(2.0), Sigmoid()):
        model, ids = use(made("llama"), kernel), inputs("llama")["input_ids"]
        first = model(ids[:, :5], use_cache=True)
        last = model(ids[:, 5:], past_key_values=first.past_key_values)
        check_close(torch.cat((first.logits, last.logits), 1), model(ids).logits)


def test_packed_sequences_do_not_see_each_other():
    model = use(made("llama"), Gaussian(2.0))
    ids = inputs("llama")["input_ids"][:1]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]])
    packed = model(ids, position_ids=positions, use_cache=False).logits
    check_close(packed, torch.cat((model(ids[:, :4]).logits, model(ids[:, 4:]).logits), 1))


def test_cross_attention_of_a_decoder():
    config = {"is_decoder": True, "add_cross_attention": True}
    torch.manual_seed(0)
    model = bert(**config, attn_implementation="eager").double().eval()
    given = inputs("bert") | {
        "encoder_hidden_states": torch.randn(BATCH, 7, 12, dtype=torch.float64),
        "encoder_attention_mask": keep("right")[:, 1:8],
        "output_attentions": True,
    }
    expected = model(**given)
    got = use(model)(**given)
    check_close(got.last_hidden_state, expected.last_hidden_state)
    check_close(got.cross_attentions, expected.cross_attentions)


def test_dropout_acts_in_training_alone():
    model, given = bert(attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0).double(), inputs("bert", "none")
    assert not torch.equal(result(use(model).train(), given), result(model, given))
    assert torch.equal(result(model.eval(), given), result(model, given))


@pytest.mark.parametrize("kernel", [Gaussian(2.0), Sigmoid(bias=-1.0), HigherOrder(Sigmoid())], ids=repr)
def test_another_kernel_changes_outputs_and_respects_masks(name, kernel):
    model, given = made(name), inputs(name)
    eager = result(model, given)
    ours = result(use(model, kernel), given)
    assert (ours - eager).abs().max() > 1e-4
    if name == "vit":
        return
    other = given["input_ids"].clone()
    other[given["attention_mask"] == 0] = 29
    check_close(result(model, given | {"input_ids": other}), ours)
    if name in DECODERS:
        other = given["input_ids"].clone()
        other[:, 6:] = 3
        later = result(model, given | {"input_ids": other})
        check_close(later[:, :6], ours[:, :6])
        assert not torch.allclose(later[:, 6:], ours[:, 6:])


def test_sliding_window_hides_what_is_far():
    model, given = use(made("mistral"), Gaussian(2.0)), inputs("mistral", "none")
    other = given["input_ids"].clone()
    other[:, 0] = 3
    changed = (result(model, {"input_ids": other}) != result(model, given)).any(-1).any(0)
    # Two layers with a window of 4 carry a token 6 places on.
    assert changed.tolist() == [True] * 7 + [False] * 4


def test_the_models_scaling_is_used_where_the_kernel_leaves_it_open():
    given = inputs("t5")
    check_close(result(use(made("t5"), Softmax(scale=1.0)), given), result(made("t5"), given))
    check_close(result(use(made("t5"), 0.5 * Softmax() + 0.5 * Softmax()), given), result(made("t5"), given))
    assert not torch.allclose(result(use(made("t5"), Softmax(scale=0.3)), given), result(made("t5"), given))


def test_position_bias_may_come_inside_the_mask():
    torch.manual_seed(0)
    module, bias = nn.Module(), torch.randn(1, 3, 5, 7)
    query, key = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    mask = torch.rand(2, 1, 5, 7) > 0.3
    lowest = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    module.is_causal = False
    apart = bridge._attention(module, query, key, key, mask, scaling=1.0, position_bias=bias)[0]
    for given in ({"attention_mask": lowest + bias}, {"attention_mask": lowest, "position_bias": bias}):
        torch.testing.assert_close(bridge._attention(module, query, key, key, scaling=1.0, **given)[0], apart)


def test_restore_brings_everything_back(name):
    for former in ("eager", "sdpa") if name != "splinter" else ("eager",):
        model, given = made(name, former), inputs(name)
        configs = [m.config for m in model.modules() if hasattr(m, "config")]
        before = [copy.deepcopy(vars(config)) for config in configs]
        modules, keys, expected = list(model.modules()), list(model.state_dict()), result(model, given)
        use(model, Gaussian(nn.Parameter(torch.ones(1, dtype=torch.float64))))
        use(model, Sigmoid(), layers=[1])
        assert used(model) == Sigmoid()
        assert restore(model) is model
        assert torch.equal(result(model, given), expected)
        assert used(model) is None
        assert [id(m) for m in model.modules()] == [id(m) for m in modules]
        assert list(model.state_dict()) == keys
        after = [m.config for m in model.modules() if hasattr(m, "config")]
        assert [id(c) for c in after] == [id(c) for c in configs]
        assert [vars(c) for c in after] == before
        assert not any("_heedful" in vars(m) for m in model.modules())


def test_restore_of_a_composite_model():
    text, vision = (
        {**SMALL, "num_attention_heads": 3},
        {**SMALL, "num_attention_heads": 3, "image_size": 6, "patch_size": 2},
    )
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=5)).double().eval()
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    given = {**inputs("bert"), **inputs("vit")}
    former = [c._attn_implementation for c in (model.config, model.config.text_config, model.config.vision_config)]
    expected = model(**given).logits_per_image
    check_close(use(model)(**given).logits_per_image, expected)
    assert not torch.allclose(use(model, Sigmoid())(**given).logits_per_image, expected)
    assert torch.equal(restore(model)(**given).logits_per_image, expected)
    assert former == [
        c._attn_implementation for c in (model.config, model.config.text_config, model.config.vision_config)
    ]


def test_restore_without_use_changes_nothing():
    model = made("bert")
    assert restore(model) is model
    assert used(model) is None


def test_learned_bandwidth_is_a_parameter_and_learns():
    model, given = made("bert"), inputs("bert")
    bandwidth = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    use(model, Gaussian(bandwidth))
    assert any(p is bandwidth for p in model.parameters())
    assert sum(p is bandwidth for _, p in model.named_parameters(remove_duplicate=False)) == 1
    assert [k for k in model.state_dict() if "heedful" in k] == ["heedful_kernel.bandwidth"]
    _, grads = gradients(model, given)
    assert (grads["heedful_kernel.bandwidth"] != 0).all()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = result(model, given)
    optimizer.step()
    assert not torch.equal(used(model).bandwidth, torch.tensor([1.0, 2.0, 3.0]))
    assert not torch.allclose(result(model, given), before)
    model.to(torch.float32)
    assert used(model).bandwidth.dtype == torch.float32
    assert result(model, given).dtype == torch.float32
    restore(model)
    assert not any(p is bandwidth for p in model.parameters())


def test_tensors_without_gradient_are_buffers():
    model = use(made("bert"), 0.5 * Sigmoid(bias=torch.full((3,), -1.0)))
    assert [n for n, _ in model.named_buffers() if "heedful" in n] == ["heedful_kernel.kernel_bias"]
    model.double()
    assert used(model).kernel.bias.dtype == torch.float64
    check_close(result(model, inputs("bert")), result(use(made("bert"), 0.5 * Sigmoid(bias=-1.0)), inputs("bert")))


def test_copies_stand_on_their_own():
    model, given = use(made("bert"), Gaussian(nn.Parameter(torch.ones(3, dtype=torch.float64)))), inputs("bert")
    expected = result(model, given)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert used(copied) == used(model)
        assert torch.equal(result(copied, given), expected)
        copied.heedful_kernel.bandwidth.data.fill_(0.3)
        assert not torch.allclose(result(copied, given), expected)
        restore(copied)
        check_close(result(copied, given), result(made("bert"), given))
    assert torch.equal(result(model, given), expected)


def test_a_saved_model_loads_as_it_was_before(tmp_path):
    model, given = use(made("bert"), Gaussian(2.0)), inputs("bert")
    model.save_pretrained(tmp_path)
    loaded = hf.BertModel.from_pretrained(tmp_path).double().eval()
    check_close(result(loaded, given), result(restore(model), given))


def test_a_model_that_shares_the_config_keeps_softmax():
    model, given = made("bert"), inputs("bert")
    expected = result(model, given)
    other = hf.BertModel(model.config).double()
    use(other, Sigmoid())
    check_close(result(model, given), expected)
    with pytest.raises(Unsupported, match="the BertConfig of this BertModel belongs to a model that uses a heedful"):
        use(model)
    restore(other)
    assert torch.equal(result(model, given), expected)


def test_a_part_of_a_model():
    model, given = made("t5"), inputs("t5")
    expected = result(model, given)
    use(model.encoder, Sigmoid())
    assert used(model.encoder) == Sigmoid()
    assert not torch.allclose(result(model, given), expected)
    check_close(result(use(model), given), expected)
    assert used(model.encoder) is None
    assert torch.equal(result(restore(model), given), expected)


def test_used_is_what_acts():
    model = use(made("bert"), Sigmoid())
    model.set_attn_implementation("sdpa")
    assert used(model) is None
    assert restore(model).config._attn_implementation == "eager"


def test_used_shows_in_the_models_repr():
    assert "Polynomial(degree=2, offset=0.0), impl='stream'" in repr(
        use(made("bert"), Polynomial(2), impl="stream").model
    )


def test_attention_free_and_hard_coded_models_are_refused():
    size = {"vocab_size": VOCABULARY, "hidden_size": 12}
    mamba = hf.MambaModel(hf.MambaConfig(**size, num_hidden_layers=1, state_size=3))
    falcon = hf.FalconModel(hf.FalconConfig(**size, num_hidden_layers=1, num_attention_heads=3))
    sparse = hf.LongT5Model(
        hf.LongT5Config(vocab_size=VOCABULARY, d_model=12, d_kv=5, d_ff=7, num_layers=1, num_heads=3)
    )
    told = {
        mamba: "MambaModel has no attention that can be replaced",
        falcon: "FalconModel computes its attention by itself",
        sparse: "LongT5Model computes part of its attention by itself, in LongT5",
    }
    for model, message in told.items():
        before = model.config._attn_implementation
        with pytest.raises(Unsupported, match=message):
            use(model)
        assert model.config._attn_implementation == before
        assert used(model) is None


def test_arguments_that_change_the_mathematics_are_refused():
    config = hf.Gemma2Config(**SMALL, num_attention_heads=3, num_key_value_heads=1, head_dim=4, **NO_TOKENS)
    model = use(hf.Gemma2Model(config).eval())
    with pytest.raises(Unsupported, match="Gemma2Attention passes softcap to its attention"):
        model(torch.tensor([[5, 7]]))
    config = hf.GptOssConfig(
        **SMALL,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=4,
        num_local_experts=2,
        num_experts_per_tok=1,
        **NO_TOKENS,
    )
    model = use(hf.GptOssModel(config).eval())
    with pytest.raises(Unsupported, match="GptOssAttention passes s_aux to its attention"):
        model(torch.tensor([[5, 7]]))
    model = use(made("llama"))
    with pytest.raises(Unsupported, match="LlamaAttention passes cu_seq_lens_q"):
        model(torch.tensor([[5, 7, 11]]), cu_seq_lens_q=torch.tensor([0, 1, 3]), use_cache=False)


def test_wrong_arguments_are_refused_before_anything_changes():
    model = made("bert")
    with pytest.raises(InvalidArgument, match="model must be a transformers PreTrainedModel; got Linear"):
        use(nn.Linear(2, 3))
    with pytest.raises(InvalidArgument, match="kernel must be a heedful kernel such as Softmax"):
        use(model, "gaussian")
    with pytest.raises(InvalidArgument, match=r"impl must be 'auto' or one of .*reference"):
        use(model, impl="fast")
    with pytest.raises(InvalidArgument, match="bandwidth is computed from other tensors"):
        use(model, Gaussian(torch.ones(3, requires_grad=True).exp()))
    assert model.config._attn_implementation == "eager"
    assert not hasattr(model, "heedful_kernel")


def test_an_implementation_that_cannot_serve_says_so():
    model = use(made("bert"), Sigmoid(), impl="sdpa")
    with pytest.raises(Unsupported, match="impl='sdpa' cannot serve"):
        model(**inputs("bert"))


def test_transformers_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'heedful\[hf\]'"):
        use(nn.Linear(2, 3))

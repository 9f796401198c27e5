"""A zoo of Hugging Face architectures, tiny and random: `use(Softmax())` and `observe` against what the models compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from heedful import Gaussian, InvalidArgument, Sigmoid, Unsupported
from heedful.bridges.transformers import restore, use, used
from heedful.lens import observe
from zoo import SINK, STREAMING, ZOO, given


def run(model: Any, inputs: dict[str, Tensor], implementation: str | None = None, **options: Any) -> Any:
    if implementation is not None:
        model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs, **options)


def main(output: Any, inputs: dict[str, Tensor]) -> Tensor:
    """What the model says, zero where a token is padding."""
    names = ("logits", "last_hidden_state", "logits_per_image", "embeddings")
    said = next(output[name] for name in names if name in output)
    kept = inputs.get("attention_mask")
    return said * kept[..., None] if kept is not None and kept.shape == said.shape[:2] and said.dim() == 3 else said


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def attentions(output: Any) -> Iterator[Tensor]:
    """All weights that a model returned, also in the outputs of its parts."""
    for name, value in output.items():
        if hasattr(value, "items"):
            yield from attentions(value)
        elif name.endswith("attentions"):
            yield from (one for one in value or () if one is not None)


def compare_weights(seen: Any, returned: list[Tensor]) -> None:
    """Each returned tensor is one record's, for queries that see anything."""
    records = [record.weights for record in seen]
    for weights in returned:
        alike = [
            ours
            for ours in records
            if ours.shape == weights.shape and torch.allclose(ours, weights * ours.any(-1, keepdim=True), atol=1e-5)
        ]
        assert alike, f"no record has these weights, {tuple(weights.shape)}"
        records = [ours for ours in records if ours is not alike[0]]


@pytest.mark.parametrize("name", ZOO)
def test_softmax_and_observe_are_what_the_model_computes(name):
    case = ZOO[name]
    model, inputs = case.build(), given(case.reads)
    eager, sdpa = (main(run(model, inputs, which), inputs) for which in ("eager", "sdpa"))
    # Most eager attention takes its softmax in float32.
    assert distance(sdpa, eager) < 1e-5
    placement = use(model)
    assert distance(main(run(model, inputs), inputs), sdpa) < 1e-10
    assert distance(main(run(use(model, Gaussian(1.3)), inputs), inputs), sdpa) > 1e-3
    assert len(placement.changed) + len(placement.left) >= 1
    restore(model)
    assert torch.equal(main(run(model, inputs), inputs), sdpa)

    seen = observe(model, inputs, keep=("weights",))
    assert (len(seen), seen.unseen) == (case.layers, ())
    # A layer that runs twice, as ALBERT's, has one name.
    assert {record.name for record in seen} <= set(placement.changed)
    returned = list(attentions(run(model, inputs, "eager", output_attentions=True)))
    assert returned
    compare_weights(seen, returned)
    again = observe(model, inputs, keep=("weights",))
    compare_weights(again, returned)
    assert [record.name for record in again] == [record.name for record in seen]


@pytest.mark.parametrize("name", ["paligemma", "colpali", "nemotron_asr_streaming"])
def test_where_eager_and_sdpa_disagree_use_follows_sdpa(name):
    """PaliGemma and ColPali without padding: eager sees all, SDPA is causal. Streaming Nemotron: eager hides what SDPA shows."""
    case = ZOO.get(name, STREAMING)
    model, inputs = case.build(), given(case.reads)
    if name != "nemotron_asr_streaming":
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    eager, sdpa = (main(run(model, inputs, which), inputs) for which in ("eager", "sdpa"))
    assert distance(eager, sdpa) > 0.1
    assert distance(main(run(use(model), inputs), inputs), sdpa) < 1e-10
    restore(model)
    for which in ("eager", "sdpa"):
        model.set_attn_implementation(which)
        assert len(observe(model, inputs)) == case.layers


def test_a_sink_is_recorded_with_its_share():
    """GraniteSWA returns weights before its sink takes a share, so they do not give its output; ours do."""
    model, inputs = SINK.build(), given("text")
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.normal_()
    returned = list(attentions(run(model, inputs, "eager", output_attentions=True)))
    seen = observe(model, inputs)
    assert len(seen) == len(returned) == 2
    for record, weights in zip(seen, returned, strict=True):
        ours = record.weights
        share = ours.sum(-1, keepdim=True)
        sees = share > 0
        assert share[sees].mean() < 0.95
        torch.testing.assert_close(torch.where(sees, ours / share, 0.0), weights * sees, atol=1e-5, rtol=0)
        values = record.values.repeat_interleave(2, dim=1)
        torch.testing.assert_close(ours @ values, record.outputs * sees, atol=1e-5, rtol=0)
    with pytest.raises(Unsupported, match="GraniteSWAAttention passes s_aux"):
        run(use(model), inputs)


def test_several_end_marks_are_all_special():
    model, inputs = ZOO["qwen3_asr"].build(), given("text")
    inputs["input_ids"][:, :3] = torch.tensor([2, 5, 7])
    assert observe(model, inputs).special[:, :3].tolist() == [[True, True, False]] * 2


@pytest.mark.parametrize(
    ("name", "text", "others"),
    [
        ("qwen3_5_moe", "model.language_model.layers.3.self_attn", "model.visual.blocks"),
        ("minicpm_ocr", "model.language_model.layers.3.self_attn", "model.vision_tower"),
    ],
)
def test_numbers_count_the_layers_of_the_text_model(name, text, others):
    model, inputs = ZOO[name].build(), given("text")
    before = main(run(model, inputs), inputs)
    with pytest.raises(InvalidArgument, match=r"0 means model.language_model.layers.0.linear_attn \(.*cannot replace"):
        use(model, Sigmoid(), layers=[0])
    with pytest.raises(InvalidArgument, match=rf"no layer 7; .* can replace 3\. Give others by name: {others}"):
        use(model, Sigmoid(), layers=[3, 7])
    assert used(model) is None
    assert torch.equal(main(run(model, inputs), inputs), before)
    placement = use(model, Sigmoid(), layers=[3])
    assert placement.changed == (text,)
    assert {f"model.language_model.layers.{at}.linear_attn" for at in range(3)} <= set(placement.left)
    assert any(left.startswith(others) for left in placement.left)
    assert distance(main(run(placement, inputs), inputs), before) > 1e-3
    seeing = use(model, Sigmoid(), layers=f"{others}.*")
    assert seeing.changed
    assert all(changed.startswith(others) for changed in seeing.changed)
    assert text in seeing.left


def test_numbers_of_models_of_several_parts():
    clip = use(ZOO["clip"].build(), layers=[0])
    assert clip.changed == ("text_model.encoder.layers.0.self_attn",)
    assert "vision_model.encoder.layers.0.self_attn" in clip.left
    assert use(ZOO["vit"].build(), layers=[1]).changed == ("layers.1.attention",)
    whisper = use(ZOO["whisper"].build(), layers=[1])
    assert whisper.changed == tuple(
        f"{side}.layers.1.{what}"
        for side, what in (("encoder", "self_attn"), ("decoder", "self_attn"), ("decoder", "encoder_attn"))
    )

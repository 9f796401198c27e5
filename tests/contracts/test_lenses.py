"""What every lens of a report does, by its being listed: the model stays as it was, and the section can be shown anywhere."""

import json
import random
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

import transformers as hf

import seeing
from answering import TEXT, gpt2, llama, masked, wordpiece
from heedful import Unsupported
from heedful.bridges import reading
from heedful.lens import Section, Subject, observe
from heedful.lens.sections import LENSES
from pages import Tree, result_of

LIMIT = 64
WIDEST = 100


def vit():
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 17}
    return hf.ViTModel(hf.ViTConfig(**sizes, image_size=6, patch_size=2)).eval()


def picture_in_text():
    return seeing.made("llava")[0]


MODELS = {
    "encoder": masked,
    "decoder": gpt2,
    "decoder of rotary positions": llama,
    "images": vit,
    "images in text": picture_in_text,
}
TEXTS = {"sentence": "the big cat sat on the red mat and it ran", "one token": "cat", "the model's limit": ""}


def state(model):
    """All that a caller could find changed."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "identities": {name: id(parameter) for name, parameter in model.named_parameters()},
        "gradients": {name: (one.requires_grad, one.grad is None) for name, one in model.named_parameters()},
        "training": [module.training for module in model.modules()],
        "hooks": [len(getattr(module, name)) for module in model.modules() for name in hooks],
        "forwards": ["forward" in vars(module) for module in model.modules()],
        "implementation": model.config._attn_implementation,
        "config": model.config.to_dict(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].copy(),
        "python": random.getstate(),
        "grad enabled": torch.is_grad_enabled(),
    }


def check_equal(one, other, place=""):
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for name, value in one.items():
            check_equal(value, other[name], f"{place} {name}")
    elif isinstance(one, torch.Tensor | np.ndarray):
        assert (one == other).all(), place
    else:
        assert one == other, place


@dataclass(frozen=True)
class Outcome:
    section: Section | None
    reason: str
    before: dict
    after: dict


@cache
def subject(model_name, text_name):
    torch.manual_seed(0)
    model = MODELS[model_name]()
    # Not all in one mode, so that a lens that sets all of them back to one is found out.
    next(iter(model.children())).train()
    if model_name == "images":
        inputs = {"pixel_values": torch.randn(1, 3, 6, 6)}
        return Subject(model, None, None, "", observe(model, inputs), inputs=inputs)
    if model_name == "images in text":
        inputs = {name: value[:1] for name, value in seeing.made("llava")[1].items()}
        return Subject(model, None, None, "", observe(model, inputs), inputs=inputs)
    tokenizer = wordpiece(LIMIT, marks=model_name == "encoder")
    text = TEXTS[text_name] or " ".join((TEXT.split() * 9)[: LIMIT - 2 * (model_name == "encoder")])
    inputs = reading.inputs_of(model, tokenizer, text)
    assert inputs["input_ids"].shape[1] == LIMIT or TEXTS[text_name]
    seen = observe(model, inputs, tokenizer=tokenizer)
    return Subject(model, tokenizer, None, text, seen, inputs=inputs, headed=model)


@cache
def outcome(lens, model_name, text_name):
    shown = subject(model_name, text_name)
    before, section, reason = state(shown.model), None, ""
    try:
        section = import_module(LENSES[lens]).section(shown)
    except Unsupported as error:
        reason = str(error)
    return Outcome(section, reason, before, state(shown.model))


READINGS = [(model, text) for model in MODELS for text in TEXTS if "images" not in model or text == "sentence"]
every = pytest.mark.parametrize(
    ("lens", "model", "text"), [(lens, *one) for lens in LENSES for one in READINGS], ids=lambda part: part
)


@every
def test_it_gives_a_section_or_a_reason_of_one_line(lens, model, text):
    found = outcome(lens, model, text)
    if found.section is None:
        assert found.reason.strip()
        assert "\n" not in found.reason
    else:
        assert isinstance(found.section, Section)
        assert found.section.title


@every
def test_the_model_is_left_as_it_was(lens, model, text):
    found = outcome(lens, model, text)
    check_equal(found.before, found.after)


@every
def test_the_section_is_shown_anywhere(lens, model, text):
    section = outcome(lens, model, text).section
    if section is None:
        pytest.skip("this lens does not apply, and says why")
    json.dumps(section.data, allow_nan=False)
    result = result_of(section)
    assert Tree(result.html()).open == []
    assert max(map(len, section.summary.splitlines()), default=0) <= WIDEST
    assert max(map(len, str(result).splitlines())) <= WIDEST


@pytest.mark.parametrize("lens", LENSES)
def test_it_applies_to_a_sentence(lens):
    """Each lens has some model that it says something of; one that refuses everything would pass the rest."""
    assert any(outcome(lens, model, "sentence").section for model in MODELS)

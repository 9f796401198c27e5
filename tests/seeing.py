"""Tiny models of pictures, sound and text, random, with inputs for each; weights are large, so that attention is far from uniform."""

from __future__ import annotations

import torch
import transformers as hf

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 19}
MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE, VIDEO = 36, 35
TEXT = {**SIZES, "vocab_size": 37, "initializer_range": 0.5}
GROUPED = {**TEXT, **MARKS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
VISION = {**SIZES, "image_size": 8, "patch_size": 4}


def words(length=7, shorter=5):
    """Two texts, the second padded."""
    ids = torch.randint(6, 33, (2, length), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "attention_mask": (torch.arange(length) < torch.tensor([[length], [shorter]])).long()}


def picture(side=8):
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(4))


def placeholders(count=4):
    """A text with so many tokens for a picture ahead of it."""
    own = words()
    ahead = {"input_ids": torch.full((2, count), IMAGE), "attention_mask": torch.ones(2, count, dtype=torch.long)}
    return {name: torch.cat((own[name][:, :2], ahead[name], own[name][:, 2:]), 1) for name in own}


def vilt():
    config = hf.ViltConfig(**TEXT, image_size=8, patch_size=4)
    return hf.ViltModel(config), {**words(), "pixel_values": picture(), "pixel_mask": torch.ones(2, 8, 8).long()}


def visual_bert():
    regions = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(5))
    seen = (torch.arange(5) < torch.tensor([[4], [5]])).long()
    model = hf.VisualBertModel(hf.VisualBertConfig(**TEXT, visual_embedding_dim=11))
    return model, {**words(), "visual_embeds": regions, "visual_attention_mask": seen}


def lxmert():
    sizes = {**TEXT, "l_layers": 1, "r_layers": 1, "x_layers": 2, "visual_feat_dim": 11}
    del sizes["num_hidden_layers"]
    source = torch.Generator().manual_seed(5)
    regions = {"visual_feats": torch.randn(2, 5, 11, generator=source), "visual_pos": torch.rand(2, 5, 4)}
    return hf.LxmertModel(hf.LxmertConfig(**sizes)), {**words(), **regions}


def blip():
    text = {**TEXT, **MARKS, "encoder_hidden_size": 24, "sep_token_id": 2}
    # Its own default would leave the picture all zeros.
    vision = {**VISION, "initializer_range": 0.5}
    model = hf.BlipForImageTextRetrieval(hf.BlipConfig(text_config=text, vision_config=vision))
    return model, {**words(), "pixel_values": picture()}


def llava(**more):
    config = hf.LlavaConfig(
        text_config={**GROUPED, "model_type": "llama"},
        vision_config={**VISION, "model_type": "clip_vision_model", "projection_dim": 24},
        image_token_id=IMAGE,
        vision_feature_layer=-1,
        **more,
    )
    return hf.LlavaForConditionalGeneration(config), {**placeholders(), "pixel_values": picture()}


def paligemma():
    vision = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
    config = hf.PaliGemmaConfig(
        text_config={**GROUPED, "model_type": "gemma"}, vision_config=vision, projection_dim=24, image_token_index=IMAGE
    )
    kinds = {"token_type_ids": torch.zeros(2, 11, dtype=torch.long)}
    return hf.PaliGemmaForConditionalGeneration(config), {**placeholders(), **kinds, "pixel_values": picture()}


def qwen2_vl():
    text = {**GROUPED, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 1e4}}
    vision = {"depth": 2, "embed_dim": 24, "hidden_size": 24, "num_heads": 2, "patch_size": 4, "mlp_ratio": 1}
    config = hf.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=34
    )
    patches = torch.randn(2 * 16, 3 * 2 * 16, generator=torch.Generator().manual_seed(5))
    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    inputs = placeholders() | {"pixel_values": patches, "image_grid_thw": grid}
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    return hf.Qwen2VLForConditionalGeneration(config), inputs


def whisper():
    sizes = {
        f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 3))
    }
    sizes |= {f"{side}_ffn_dim": 19 for side in ("encoder", "decoder")}
    config = hf.WhisperConfig(
        **MARKS, **sizes, vocab_size=37, d_model=24, num_mel_bins=8, max_source_positions=10, decoder_start_token_id=1,
        init_std=0.5, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    sound = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(5))
    return hf.WhisperForConditionalGeneration(config), {
        "input_features": sound,
        "decoder_input_ids": words()["input_ids"],
    }


JOINT = {"vilt": vilt, "visual_bert": visual_bert, "llava": llava, "paligemma": paligemma, "qwen2_vl": qwen2_vl}
APART = {"lxmert": lxmert, "blip": blip, "whisper": whisper}


def made(name, implementation=None):
    """A model and its inputs; what has no such implementation runs its own."""
    torch.manual_seed(0)
    model, inputs = (JOINT | APART)[name]()
    if implementation is not None and name not in ("vilt", "visual_bert", "lxmert", "blip"):
        model.set_attn_implementation(implementation)
    return model.eval(), inputs


def save_llava(folder):
    """A folder with a tiny LLaVA, its tokenizer and its processor."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[BOS]", "[EOS]", "[UNK]", "what", "is", "in", "the", "picture", "?"]
    vocabulary = {word: at for at, word in enumerate(words)} | {"<image>": IMAGE}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        **named,
        additional_special_tokens=["<image>"],
        extra_special_tokens={"image_token": "<image>"},
    )
    side = {"height": 16, "width": 16}
    # Where torchvision is absent; older versions of transformers have one class for both.
    seeing = getattr(hf, "CLIPImageProcessorPil", hf.CLIPImageProcessor)(
        size=side, crop_size=side, do_center_crop=False
    )
    hf.LlavaProcessor(
        seeing, tokenizer, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = hf.LlavaConfig(
        text_config={**GROUPED, "model_type": "llama"},
        vision_config={**VISION, "image_size": 16, "model_type": "clip_vision_model", "projection_dim": 24},
        image_token_id=IMAGE,
        vision_feature_layer=-1,
    )
    hf.LlavaForConditionalGeneration(config).save_pretrained(folder)
    return folder

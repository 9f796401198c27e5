"""Small models that answer, made on the spot: a WordPiece tokenizer, classifiers, language models, a recommender."""

from __future__ import annotations

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "mat",
    "house",
    "big",
    "small",
    "red",
    "blue",
    "good",
    "bad",
    "film",
    "very",
    "not",
    "and",
    "is",
    "was",
    "un",
    "##happy",
    "##s",
]
MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*MARKS, *WORDS, ".", ",", "!"]
TEXT = "the big cat sat on the red mat and the dog ran"


def wordpiece(limit=64, marks=True):
    """A tokenizer of a few words; without `[CLS]` and `[SEP]` for decoders."""
    inner = Tokenizer(models.WordPiece({word: at for at, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    named = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
    if marks:
        inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        named |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=limit, **named)


SIZES = {"vocab_size": len(VOCABULARY), "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
SIZES |= {"intermediate_size": 17, "max_position_embeddings": 64, "pad_token_id": 0}


def lively(model, seed=1):
    """Weights large enough for answers to hang on words."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data = torch.randn(parameter.shape, generator=generator) * (0.6 if "embed" in name else 0.35)
    return model.eval()


def classifier(seed=1, labels=3):
    named = dict(enumerate(("bad", "fair", "good")[:labels]))
    return lively(hf.BertForSequenceClassification(hf.BertConfig(**SIZES, num_labels=labels, id2label=named)), seed)


def masked(seed=1):
    return lively(hf.BertForMaskedLM(hf.BertConfig(**SIZES)), seed)


def gpt2(seed=1):
    sizes = {"vocab_size": len(VOCABULARY), "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64}
    return lively(hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)), seed)


def gpt2_classifier(seed=1, pad=None):
    """Without a padding token by default, as GPT-2 comes."""
    sizes = {"vocab_size": len(VOCABULARY), "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64, "num_labels": 3}
    marks = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": pad}
    return lively(hf.GPT2ForSequenceClassification(hf.GPT2Config(**sizes, **marks)), seed)


CAPITALS = "Madrid is the capital of Spain. Paris is the capital of France \U0001f600 and don't forget it."


def byte_level():
    """A tokenizer of bytes as GPT-2's: a space belongs to the word behind it, and one mark serves for all."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([CAPITALS, " Spain France Madrid Paris is the capital of"] * 4, trainer)
    marks = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|end|>")
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=64, **marks)


def byte_gpt2(seed=1):
    """A language model for `byte_level`."""
    sizes = {"vocab_size": 400, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64}
    return lively(hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)), seed)


def llama(seed=1, cls=hf.LlamaForCausalLM, **more):
    sizes = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    return lively(cls(hf.LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, **more)), seed)


class Bert4Rec(nn.Module):
    """Items 2..., 0 padding, 1 the mask; torch's own encoder."""

    def __init__(self, items=29, width=16, length=12, causal=False):
        super().__init__()
        self.items, self.places = nn.Embedding(items, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.causal = causal

    def forward(self, ids):
        x = self.items(ids) + self.places(torch.arange(ids.shape[1]) + self.places.num_embeddings - ids.shape[1])
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]) if self.causal else None
        seen = self.encoder(x, mask=mask, is_causal=self.causal, src_key_padding_mask=None if self.causal else ids == 0)
        return seen @ self.items.weight.T


def recommender(seed=1, **options):
    torch.manual_seed(seed)
    return lively(Bert4Rec(**options), seed)

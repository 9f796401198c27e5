"""A tiny BERT in a Hugging Face folder, with a tokenizer of twelve words."""

from pathlib import Path

import torch

TEXT = "the cat sat because it was tired ."
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *TEXT.split()]
LIMIT = 23


def save_bert(folder: Path) -> Path:
    import transformers as hf
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    words = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    hf.PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 17}
    # Far from zero, so that attention is not uniform.
    config = hf.BertConfig(vocab_size=len(WORDS), max_position_embeddings=LIMIT, initializer_range=1.0, **sizes)
    hf.BertModel(config).save_pretrained(folder)
    return folder

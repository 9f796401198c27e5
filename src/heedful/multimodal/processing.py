"""Pictures and texts as a `VisualParsingModel` takes them, saved beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from heedful._checks import check_number, check_whole
from heedful._errors import InvalidArgument, MissingExtra
from heedful.multimodal.model import VisualParsingConfig
from heedful.multimodal.worlds import MEAN, STD, VOCABULARY

try:
    from transformers import AutoProcessor, BatchFeature, PreTrainedTokenizerFast, ProcessorMixin
    from transformers.image_processing_utils import BaseImageProcessor

    # The package's own name for it asks for torchvision in some versions.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
except ImportError:
    raise MissingExtra("transformers", "hf") from None

__all__ = ["VisualParsingImageProcessor", "VisualParsingProcessor", "word_tokenizer"]


class VisualParsingImageProcessor(BaseImageProcessor):  # type: ignore[misc]
    """Pictures as `(B, 3, size, size)`, less a mean, over a deviation: arrays, tensors or what PIL opens; in 8 bits, or numbers of 0..1.

    `mean` and `std` are of the pictures that are learned from; those of the world `shapes` by default. About 0.45 and
    0.27 suit photographs.

    >>> VisualParsingImageProcessor(16)(np.zeros((20, 30, 3), dtype=np.uint8))["pixel_values"].shape
    torch.Size([1, 3, 16, 16])
    """

    model_input_names = ["pixel_values"]  # noqa: RUF012

    def __init__(self, size: int = 64, mean: float = MEAN, std: float = STD, **options: Any) -> None:
        super().__init__(**options)
        check_whole(size=size)
        check_number(0, std=std)
        self.size, self.mean, self.std = size, mean, std

    def __call__(self, images: Any, **options: Any) -> Any:
        return self.preprocess(images, **options)

    def preprocess(self, images: Any, return_tensors: Any = "pt", **_: Any) -> Any:
        """One picture, or several."""
        single = not isinstance(images, list | tuple) and (not hasattr(images, "ndim") or images.ndim < 4)
        pictures = torch.cat([self._read(image) for image in ([images] if single else images)])
        return BatchFeature({"pixel_values": pictures}, tensor_type=return_tensors)

    def _read(self, image: Any) -> Tensor:
        if hasattr(image, "convert"):  # PIL
            image = np.asarray(image.convert("RGB"))
        picture = torch.as_tensor(image)
        if picture.ndim == 2:
            picture = picture[None].expand(3, -1, -1)
        if picture.ndim != 3 or 3 not in (picture.shape[0], picture.shape[2]):
            raise InvalidArgument(f"a picture is (height, width, 3), (3, height, width) or (height, width); got shape {tuple(picture.shape)}")  # fmt: skip
        if picture.shape[0] != 3:
            picture = picture.permute(2, 0, 1)
        picture = picture.float() / 255 if picture.dtype == torch.uint8 else picture.float()
        low, high = (float(picture.min()), float(picture.max())) if picture.numel() else (0.0, 0.0)
        if not (low >= 0 and high <= 1):
            raise InvalidArgument(
                f"a picture holds numbers of 0..1, or whole numbers in 8 bits (uint8); got {picture.dtype} from {low:g} to {high:g}"
            )
        picture = picture[None]
        if picture.shape[2:] != (self.size, self.size):
            picture = functional.interpolate(picture, (self.size, self.size), mode="bilinear", antialias=True)
        return (picture - self.mean) / self.std


class VisualParsingProcessor(ProcessorMixin):  # type: ignore[misc]
    """Pictures and texts together: `processor(images=..., text=...)` is what the model takes; `save_pretrained` writes it beside the model.

    >>> processor = VisualParsingProcessor.of()
    >>> inputs = processor(images=np.zeros((64, 64, 3), dtype=np.uint8), text="a large blue circle in the top right")
    >>> {name: tuple(part.shape) for name, part in inputs.items()}
    {'pixel_values': (1, 3, 64, 64), 'input_ids': (1, 10), 'attention_mask': (1, 10)}
    """

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **options: Any) -> None:
        super().__init__(image_processor, tokenizer, **options)

    @classmethod
    def of(
        cls, words: Sequence[str] = VOCABULARY, size: int = 64, mean: float = MEAN, std: float = STD
    ) -> VisualParsingProcessor:
        """For texts of these words, split at blanks, and pictures of this size, mean and deviation."""
        return cls(VisualParsingImageProcessor(size, mean, std), word_tokenizer(words))

    def __call__(self, images: Any = None, text: Any = None, return_tensors: str = "pt", **options: Any) -> Any:
        if images is None and text is None:
            raise InvalidArgument("give images=, text= or both")
        parts: dict[str, Any] = {}
        if images is not None:
            parts |= self.image_processor(images, return_tensors=return_tensors)
        if text is not None:
            texts = [text] if isinstance(text, str) else list(text)
            options = {"padding": True, "return_token_type_ids": False} | options
            parts |= self.tokenizer(texts, return_tensors=return_tensors, **options)
        return BatchFeature(parts)


def word_tokenizer(words: Sequence[str] = VOCABULARY) -> Any:
    """A tokenizer of whole words, split at blanks, by their places in a list that begins with `[PAD] [CLS] [SEP] [MASK] [UNK]`.

    >>> word_tokenizer()("a ring")["input_ids"]
    [1, 5, 40, 2]
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    if tuple(words[:5]) != VOCABULARY[:5] or len(set(words)) != len(words):
        raise InvalidArgument(f"words must begin with {' '.join(VOCABULARY[:5])} and differ; got {list(words[:6])}")
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = dict(zip(("pad_token", "cls_token", "sep_token", "mask_token", "unk_token"), words[:5], strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


AutoImageProcessor.register(VisualParsingConfig, slow_image_processor_class=VisualParsingImageProcessor, exist_ok=True)
AutoProcessor.register(VisualParsingConfig, VisualParsingProcessor, exist_ok=True)

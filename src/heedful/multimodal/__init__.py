"""Pictures and texts: a small model that reads both by self-attention, how it is trained, and a world of pictures whose captions are known to be true."""

from typing import TYPE_CHECKING

from heedful._lazy import lazy

# Name -> the file it lives in; nothing is imported before it is used.
_HOMES = {
    **dict.fromkeys(("foil_accuracy", "pair_accuracy", "retrieval"), "judging"),
    **dict.fromkeys(("attention_mask_tokens", "mask_words", "random_mask_tokens"), "masking"),
    **dict.fromkeys(
        ("VisualParsingClassifier", "VisualParsingConfig", "VisualParsingModel", "VisualParsingOutput"), "model"
    ),
    **dict.fromkeys(("Collapse", "SceneCaptions", "VLPretrainer"), "pretraining"),
    **dict.fromkeys(("VisualParsingImageProcessor", "VisualParsingProcessor"), "processing"),
    **dict.fromkeys(("Captions", "Scenes", "Vocabulary", "pixel_values"), "scenes"),
    **dict.fromkeys(("Scene", "Shapes", "holds"), "worlds"),
}

__all__ = [
    "Captions",
    "Collapse",
    "Scene",
    "SceneCaptions",
    "Scenes",
    "Shapes",
    "VLPretrainer",
    "VisualParsingClassifier",
    "VisualParsingConfig",
    "VisualParsingImageProcessor",
    "VisualParsingModel",
    "VisualParsingOutput",
    "VisualParsingProcessor",
    "Vocabulary",
    "attention_mask_tokens",
    "foil_accuracy",
    "holds",
    "mask_words",
    "pair_accuracy",
    "pixel_values",
    "random_mask_tokens",
    "retrieval",
]

__getattr__, __dir__ = lazy(__name__, _HOMES)

if TYPE_CHECKING:
    from heedful.multimodal.judging import foil_accuracy, pair_accuracy, retrieval
    from heedful.multimodal.masking import attention_mask_tokens, mask_words, random_mask_tokens
    from heedful.multimodal.model import (
        VisualParsingClassifier,
        VisualParsingConfig,
        VisualParsingModel,
        VisualParsingOutput,
    )
    from heedful.multimodal.pretraining import Collapse, SceneCaptions, VLPretrainer
    from heedful.multimodal.processing import VisualParsingImageProcessor, VisualParsingProcessor
    from heedful.multimodal.scenes import Captions, Scenes, Vocabulary, pixel_values
    from heedful.multimodal.worlds import Scene, Shapes, holds

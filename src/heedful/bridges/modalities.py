"""Of what kind each token is: text, a patch of a picture, a stretch of sound; for the models of transformers and for our own.

Some models put all kinds into one sequence, where every layer may mix them (ViLT, VisualBERT, LLaVA, Qwen2-VL, PaliGemma). Others keep a
sequence for each, which meet in layers of cross-attention (LXMERT, BLIP, Whisper).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from heedful._errors import InvalidArgument, Unsupported

# What a config calls the tokens that stand for something other than text, and what they stand for.
PLACEHOLDERS = {f"{kind}_token_{end}": kind for kind in ("image", "video", "audio") for end in ("id", "index")}
# What an encoder reads, and of what kind that is; "source" and "target" where both sides are texts.
READ = {"pixel_values": "image", "input_features": "audio", "input_values": "audio"}
# Words in the names of modules that see or hear, before what they give meets the text.
TOWERS = re.compile(r"vision|visual|image|pixel|audio|speech|multi_modal_projector|connector|resampler")
CROSSING = re.compile(r"cross|encoder_attn|EncDecAttention")

# Kinds of queries and keys of a call, by the module's name, whether it is called crossing, and how often it was called before.
Sides = Callable[[str, bool, int], tuple[int, int] | None]


@dataclass(frozen=True)
class Modalities:
    """Which tokens are of which kind, for every call of attention in one run.

    Args:
        names: the kinds.
        ids: `[B, n]` numbers of kinds for the first tokens of the one sequence that holds all of them, -1 for a token that is left out; None
            where the model says them with its output, or has a sequence for each kind.
        rest: the kind of all tokens behind those.
        valid: `[B, m]`, False for padding, for as many tokens as it is known; None where the masks of calls say it.
        sides: of models with a sequence for each kind, the kinds of a call's queries and keys.
        towers: whether modules that see or hear, by their names, work on other sequences than the joint one.
    """

    names: tuple[str, ...]
    ids: Tensor | None = None
    rest: int | None = None
    valid: Tensor | None = None
    sides: Sides | None = None
    towers: bool = False
    _calls: Counter[str] = field(default_factory=Counter, repr=False)

    @property
    def is_joint(self) -> bool:
        """Whether one sequence holds all kinds."""
        return self.sides is None

    def of_sequence(self, length: int) -> Tensor | None:
        """`[B, length]`: the kinds of a sequence's tokens; None for one that is not the joint sequence."""
        if self.ids is None or length < self.ids.shape[1] or (length > self.ids.shape[1] and self.rest is None):
            return None
        return nn.functional.pad(self.ids, (0, length - self.ids.shape[1]), value=self.rest or 0)

    def is_mixed(self, name: str) -> bool:
        """Whether the module of this name may attend in the joint sequence: one that sees or hears does not."""
        return self.is_joint and not (self.towers and TOWERS.search(name))

    def of_call(self, name: str, cross: bool) -> tuple[int, int] | None:
        """The kinds of a call's queries and keys, in a model with a sequence for each kind; to be asked once for each call, in order."""
        turn, self._calls[name] = self._calls[name], self._calls[name] + 1
        return None if self.sides is None else self.sides(name, cross, turn)


def modalities_of(model: nn.Module, inputs: Mapping[str, Any]) -> Modalities:
    """The kinds of tokens of a model reading these inputs; an error names what to give where there is but one kind.

    A model of another family states its kinds itself: the names as `model.modalities`, and numbers `[B, n]` as `modality` in its output.

    >>> import torch
    >>> from transformers import VisualBertConfig, VisualBertModel
    >>> sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 17}
    >>> model = VisualBertModel(VisualBertConfig(**sizes, vocab_size=31, visual_embedding_dim=5))
    >>> inputs = {"input_ids": torch.tensor([[5, 7, 11]]), "visual_embeds": torch.randn(1, 2, 5)}
    >>> kinds = modalities_of(model, inputs)
    >>> kinds.names, kinds.of_sequence(5)
    (('text', 'image'), tensor([[0, 0, 0, 1, 1]]))
    """
    config = getattr(model, "config", None)
    kind = str(getattr(config, "model_type", ""))
    stated = getattr(model, "modalities", None)
    if isinstance(stated, tuple | list) and stated and all(isinstance(name, str) for name in stated):
        return Modalities(tuple(stated))
    ids = inputs.get("input_ids")
    if kind in ("vilt", "visual_bert"):
        return _one_after_the_other(kind, inputs)
    if kind == "lxmert":
        return Modalities(("text", "image"), sides=_lxmert)
    if kind == "blip" and isinstance(ids, Tensor):
        return Modalities(("text", "image"), sides=_blip(type(model).__name__))
    if getattr(config, "is_encoder_decoder", False):
        read = READ.get(getattr(model, "main_input_name", ""), "source")
        return Modalities(("target" if read == "source" else "text", read), sides=_encoder_decoder)
    marks = {name: mark for name in PLACEHOLDERS if isinstance(mark := getattr(config, name, None), int)}
    if isinstance(ids, Tensor) and kind not in ("mllama", "idefics"):
        kinds = {PLACEHOLDERS[name]: mark for name, mark in marks.items() if bool((ids == mark).any())}
        if kinds:
            numbers = torch.zeros_like(ids)
            for at, mark in enumerate(kinds.values(), 1):
                numbers[ids == mark] = at
            return Modalities(("text", *kinds), numbers.cpu(), valid=_mask(inputs, "attention_mask"), towers=True)
    if hasattr(config, "vision_config") and hasattr(config, "text_config") and isinstance(ids, Tensor):
        return Modalities(("text", "image"), sides=_crossing)
    segments = inputs.get("token_type_ids")
    if isinstance(segments, Tensor) and segments.dim() == 2 and len(numbers := segments.unique().tolist()) > 1:
        first = torch.stack([segments == number for number in numbers]).long().argmax(0)
        named = tuple(f"segment {number}" for number in numbers)
        return Modalities(named, first.cpu(), valid=_mask(inputs, "attention_mask"))
    raise Unsupported(
        f"{type(model).__name__} reads tokens of one kind here, as far as its config and inputs say; name groups of them (groups=...), or give "
        "the kind of each token (modality=...)"
    )


def kinds_said(output: Any) -> Tensor:
    """The numbers `[B, n]` that a model states with its output."""
    numbers = output.get("modality") if isinstance(output, Mapping) else getattr(output, "modality", None)
    if not isinstance(numbers, Tensor) or numbers.dim() not in (1, 2) or numbers.is_floating_point():
        raise InvalidArgument(
            "the model names its modalities, but its output has no modality: integers (batch, tokens), the kind of each token; give "
            "modality=... instead"
        )
    return numbers.detach().cpu()


def picture_of(model: nn.Module, inputs: Mapping[str, Any], count: int) -> tuple[int, int, Tensor | None] | None:
    """Rows and columns of the patches of the first picture, where tokens stand for them in the order of a page, and its pixels `[h, w]` from 0 to 1.

    None where the order is another (ViLT draws it, VisualBERT reads regions), or there are several pictures to a text.
    """
    if getattr(getattr(model, "config", None), "model_type", "") in ("vilt", "visual_bert", "lxmert"):
        return None
    grid, pixels = inputs.get("image_grid_thw"), inputs.get("pixel_values")
    if isinstance(grid, Tensor):
        frames, high, wide = grid[0].tolist()
        merged = round((frames * high * wide / max(1, count)) ** 0.5)
        return (high // merged, wide // merged, None) if merged and high * wide == count * merged**2 else None
    side = round(count**0.5)
    if side * side != count or not isinstance(pixels, Tensor) or pixels.dim() != 4 or not count:
        return None
    gray = pixels[0].detach().float().mean(0).cpu()
    low, high = float(gray.min()), float(gray.max())
    return side, side, (gray - low) / ((high - low) or 1.0)


def _mask(inputs: Mapping[str, Any], name: str) -> Tensor | None:
    mask = inputs.get(name)
    return mask.bool().cpu() if isinstance(mask, Tensor) and mask.dim() == 2 else None


def _one_after_the_other(kind: str, inputs: Mapping[str, Any]) -> Modalities:
    """First the text, then the picture, of a length that the layers show."""
    text = next((inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None), None)
    if text is None:
        raise Unsupported("the model was given no text (input_ids), so that there is one kind of tokens alone")
    ids = torch.zeros(text.shape[:2], dtype=torch.long)
    masks = [_mask(inputs, name) for name in ("attention_mask", "visual_attention_mask")]
    # Which patches of ViLT's are padding is known when they are drawn, and its masks say so.
    known = kind == "visual_bert" and all(mask is not None for mask in masks)
    valid = torch.cat([mask for mask in masks if mask is not None], 1) if known else None
    return Modalities(("text", "image"), ids, rest=1, valid=valid)


def _lxmert(name: str, cross: bool, turn: int) -> tuple[int, int] | None:
    """Each crossing layer is called twice: from language to vision, then back."""
    if ".visual_attention." in f".{name}.":
        return (0, 1) if turn % 2 == 0 else (1, 0)
    return (1, 1) if re.search(r"r_layers|visn_self_att", name) else (0, 0)


def _blip(model: str) -> Sides:
    def sides(name: str, cross: bool, turn: int) -> tuple[int, int] | None:
        if name.startswith("vision_model"):
            return 1, 1
        # The decoder of answers reads the question, which its encoder has joined with the picture.
        answers = model == "BlipForQuestionAnswering" and name.startswith("text_decoder")
        return (0, 1) if cross and not answers else (0, 0)

    return sides


def _encoder_decoder(name: str, cross: bool, turn: int) -> tuple[int, int] | None:
    if re.search(r"(^|\.)(decoder|text_decoder)(\.|$)", name):
        return (0, 1) if cross or CROSSING.search(name) else (0, 0)
    return 1, 1


def _crossing(name: str, cross: bool, turn: int) -> tuple[int, int] | None:
    if TOWERS.search(name):
        return 1, 1
    return (0, 1) if cross or CROSSING.search(name) else (0, 0)

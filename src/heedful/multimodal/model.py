"""A model of pictures and texts for transformers: image tokens by self-attention, then self-attention over both (Xue et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument, MissingExtra, Unsupported
from heedful.kernels import Softmax
from heedful.multimodal.network import PatchEncoder, Where, line_positions, patches, plane_positions, positions
from heedful.nn import Encoder

try:
    from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
    from transformers.utils import ModelOutput
except ImportError:
    raise MissingExtra("transformers", "hf") from None

__all__ = ["MODALITIES", "VisualParsingClassifier", "VisualParsingConfig", "VisualParsingModel", "VisualParsingOutput"]

MODALITIES = ("text", "image")
TARGETS = ("features", "ema", "pixels")


class VisualParsingConfig(PretrainedConfig):  # type: ignore[misc]
    """Sizes of a `VisualParsingModel`; the defaults are those that learn the world `shapes` in a minute.

    Args:
        vocab_size, text_length: words, and tokens of a text.
        hidden_size, num_attention_heads, num_hidden_layers: of the transformer over both modalities.
        image_size, patch_size, num_channels, vision_layers: of the transformer on patches, which has the same width and
            heads.
        image_tokens, vision_width: how many tokens, of how many numbers, the vision model gives; its own by default.
            Say them for another one (`vision=`).
        text_positions, image_positions: `"sincos"` learns positions from sines and cosines as large as the features,
            which relations need. `"small"` (0.02) and `"none"` are controls.
        mfr_target: what hidden image tokens are regressed to: `"features"` of the vision model, those of its running
            mean (`"ema"`), or `"pixels"` of the patch.
        special_token_ids: tokens that pre-training never hides.
        num_labels, images: of a `VisualParsingClassifier`: answers, and pictures (1 or 2) to a text.

    >>> VisualParsingConfig().image_tokens
    64
    """

    model_type = "visual_parsing"

    def __init__(
        self,
        vocab_size: int = 49,
        text_length: int = 24,
        hidden_size: int = 128,
        num_attention_heads: int = 4,
        num_hidden_layers: int = 4,
        image_size: int = 64,
        patch_size: int = 8,
        num_channels: int = 3,
        vision_layers: int = 3,
        image_tokens: int | None = None,
        vision_width: int | None = None,
        dropout: float = 0.0,
        text_positions: Where = "sincos",
        image_positions: Where = "sincos",
        mfr_target: str = "features",
        pad_token_id: int = 0,
        cls_token_id: int = 1,
        sep_token_id: int = 2,
        mask_token_id: int = 3,
        special_token_ids: Sequence[int] = (0, 1, 2, 3, 4),
        images: int = 1,
        **options: Any,
    ) -> None:
        check_whole(
            vocab_size=vocab_size, text_length=text_length, hidden_size=hidden_size, num_hidden_layers=num_hidden_layers,
            image_size=image_size, patch_size=patch_size, num_channels=num_channels, vision_layers=vision_layers,
        )  # fmt: skip
        check_whole(1, 2, images=images)
        check_choice(Where, text_positions=text_positions, image_positions=image_positions)
        check_choice(TARGETS, mfr_target=mfr_target)
        self.vocab_size, self.text_length = vocab_size, text_length
        self.hidden_size, self.num_attention_heads = hidden_size, num_attention_heads
        self.num_hidden_layers = num_hidden_layers
        self.image_size, self.patch_size, self.num_channels = image_size, patch_size, num_channels
        self.vision_layers, self.dropout = vision_layers, dropout
        self.image_tokens = (image_size // patch_size) ** 2 if image_tokens is None else image_tokens
        self.vision_width = hidden_size if vision_width is None else vision_width
        self.text_positions, self.image_positions, self.mfr_target = text_positions, image_positions, mfr_target
        self.cls_token_id, self.sep_token_id, self.mask_token_id = cls_token_id, sep_token_id, mask_token_id
        self.special_token_ids, self.images = list(special_token_ids), images
        super().__init__(pad_token_id=pad_token_id, **options)


@dataclass
class VisualParsingOutput(ModelOutput):  # type: ignore[misc]
    """What a `VisualParsingModel` gives; losses are None where nothing was asked for that they compare with.

    Attributes:
        loss: the sum of the losses that there are.
        last_hidden_state: `(B, text + image, hidden)`.
        itm_logits: `(B, 2)` whether text and picture belong together, of `[CLS]`.
        mlm_logits: `(B, text, vocabulary)`.
        image_features: `(B, image, vision width)`, before fusion.
        modality: `(B, text + image)`, 0 for text and 1 for the picture, places in `modalities`.
        valid: `(B, text + image)`, False at padding.
    """

    loss: Tensor | None = None
    last_hidden_state: Tensor | None = None
    itm_logits: Tensor | None = None
    mlm_logits: Tensor | None = None
    itm_loss: Tensor | None = None
    mlm_loss: Tensor | None = None
    mfr_loss: Tensor | None = None
    image_features: Tensor | None = None
    modality: Tensor | None = None
    valid: Tensor | None = None


class _Pretrained(PreTrainedModel):  # type: ignore[misc]
    config_class = VisualParsingConfig
    base_model_prefix = "parsing"
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = False

    def _init_weights(self, module: nn.Module) -> None:
        """Layers start by themselves; this is for those that a file lacks, as a new head."""
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.reset_parameters()


class VisualParsingModel(_Pretrained):
    r"""Text and picture in one sequence of self-attention, the picture's tokens by self-attention of their own before (Xue et al. 2021, section 3).

    With V the image tokens of the vision model and w the words,

    $$E_v = \mathrm{LN}(V W_v + b_v + P_v + t_v), \qquad E_w = \mathrm{LN}(\mathrm{Emb}(w) + P_w + t_w), \qquad H = \mathrm{Blocks}([E_w; E_v]).$$

    Positions P are as large as the features they are added to; where they are of size 0.02, relations between objects
    are not learned (`heedful reproduce vision-relations`). Three heads serve pre-training: words (MLM), whether both
    belong together (ITM), hidden image tokens (MFR).

    Args:
        config: sizes.
        vision: another vision model; a module from `pixel_values` to tokens `(B, config.image_tokens,
            config.vision_width)`, or to what has them as `last_hidden_state`. A folder does not keep it: give it to
            `from_pretrained` again.

    The paper starts from BERT and Swin; ours is made of `heedful.nn` and starts from nothing. The published code was
    never released.

    >>> model = VisualParsingModel(VisualParsingConfig(hidden_size=32, num_hidden_layers=2, vision_layers=1, patch_size=16)).eval()
    >>> words = torch.tensor([[1, 5, 27, 28, 36, 2]])
    >>> out = model(torch.rand(1, 3, 64, 64), words)
    >>> out.itm_logits.shape, out.mlm_logits.shape, out.modality[0].tolist()
    (torch.Size([1, 2]), torch.Size([1, 6, 49]), [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    """

    modalities = MODALITIES

    def __init__(self, config: VisualParsingConfig, vision: nn.Module | None = None) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.vision = vision if vision is not None else PatchEncoder(
            config.image_size, config.patch_size, config.num_channels, width, config.num_attention_heads,
            config.vision_layers, dropout=config.dropout, where=config.image_positions,
        )  # fmt: skip
        self.image_map = nn.Linear(config.vision_width, width)
        self.image_positions = positions(config.image_positions, _image_positions(config))
        self.words = nn.Embedding(config.vocab_size, width)
        self.text_positions = positions(config.text_positions, line_positions(config.text_length, width))
        self.kinds = nn.Parameter(0.02 * torch.randn(len(MODALITIES), width))
        self.hidden_token = nn.Parameter(0.02 * torch.randn(width))
        self.text_norm, self.image_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        layers = [Softmax()] * config.num_hidden_layers
        self.fusion = Encoder(width, config.num_attention_heads, layers, dropout=config.dropout)
        self.itm_head = nn.Linear(width, 2)
        self.mlm_head = nn.Linear(width, width)
        self.mlm_bias = nn.Parameter(torch.zeros(config.vocab_size))
        wanted = config.num_channels * config.patch_size**2 if config.mfr_target == "pixels" else config.vision_width
        self.mfr_head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, wanted))
        self.post_init()
        # The first prediction is the mean of normalised targets.
        for part in self.mfr_head[2].parameters():
            nn.init.zeros_(part)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.words = value

    def image_tokens(self, pixel_values: Tensor, attention: bool = False) -> Any:
        """V `(B, tokens, width)`; with `attention` also the vision model's last weights, averaged over heads, `(B, tokens, tokens)`."""
        if isinstance(self.vision, PatchEncoder):
            return self.vision(pixel_values, attention)
        if not attention:
            return _states(self.vision(pixel_values))
        try:
            out = self.vision(pixel_values, output_attentions=True)
            weights = out.attentions[-1].mean(1).detach()
        except (TypeError, AttributeError, IndexError):
            weights = None
        tokens = self.config.image_tokens
        if weights is None or weights.shape[1:] != (tokens, tokens):
            raise Unsupported(
                f"{type(self.vision).__name__} gives no weights between all {tokens} image tokens in its last layer; "
                "take mfr_mask='random', or a vision model with output_attentions and global attention there"
            )
        return _states(out), weights

    def fuse(
        self, image_tokens: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None, hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """H of the text and the picture `(B, text + image, hidden)`, and where there is padding; `hidden` `(B, image)` are image tokens not to be seen."""
        length = input_ids.shape[1]
        if length > self.config.text_length:
            raise InvalidArgument(
                f"texts have up to {self.config.text_length} tokens (config.text_length); got {length}"
            )
        if image_tokens.shape[1:] != (self.config.image_tokens, self.config.vision_width):
            raise InvalidArgument(
                f"the vision model gave {tuple(image_tokens.shape[1:])} numbers for a picture, the config says "
                f"{(self.config.image_tokens, self.config.vision_width)} (image_tokens, vision_width)"
            )
        image = self.image_map(image_tokens)
        if hidden is not None:
            image = torch.where(hidden[..., None], self.hidden_token.to(image.dtype), image)
        image = image + self.kinds[1]
        if self.image_positions is not None:
            image = image + self.image_positions
        text = self.words(input_ids) + self.kinds[0]
        if self.text_positions is not None:
            text = text + self.text_positions[:length]
        there = input_ids != self.config.pad_token_id if attention_mask is None else attention_mask.bool()
        padding = torch.cat((~there, there.new_zeros(image.shape[:2])), 1)
        x = torch.cat((self.text_norm(text), self.image_norm(image)), 1)
        return self.fusion(x, key_padding_mask=padding), padding

    def word_logits(self, states: Tensor) -> Tensor:
        """Scores of all words, `(..., vocabulary)`, of states of the text; the map is the embedding's own."""
        inner = functional.gelu(self.mlm_head(states))
        return functional.linear(inner, self.words.weight / self.config.hidden_size**0.5, self.mlm_bias)

    def targets(self, pixel_values: Tensor, image_tokens: Tensor) -> Tensor:
        """What hidden image tokens are regressed to, `(B, image, numbers)`, each of mean 0 and variance 1, without gradients."""
        if self.config.mfr_target == "pixels":
            image_tokens = patches(pixel_values, self.config.patch_size)
        return functional.layer_norm(image_tokens.detach().float(), image_tokens.shape[-1:])

    def mfr_loss(self, states: Tensor, targets: Tensor, hidden: Tensor) -> Tensor:
        """The mean, over hidden tokens, of the mean square of what their states of fusion miss; 1 for a prediction of 0."""
        missed = torch.where(hidden[..., None], self.mfr_head(states).float() - targets, 0.0)
        return missed.square().mean(-1).sum() / hidden.sum().clamp(min=1)

    def forward(
        self,
        pixel_values: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        matched: Tensor | None = None,
        mfr: Tensor | None = None,
        mfr_targets: Tensor | None = None,
        return_dict: bool | None = None,
        **_: Any,
    ) -> VisualParsingOutput:
        """One pass over texts and their pictures.

        Args:
            pixel_values: `(B, channels, size, size)`, of mean 0 and variance 1 or so: as the processor gives them.
            input_ids, attention_mask: `(B, text)`, the first of them `[CLS]`.
            labels: `(B, text)`, the words that were hidden, -100 elsewhere: for the loss of MLM.
            matched: `(B,)`, whether each text is of its picture: for the loss of ITM.
            mfr: `(B, image)` bool, image tokens to hide: for the loss of MFR; `mfr_targets` are other targets than the
                model's own.
        """
        features = self.image_tokens(pixel_values)
        states, padding = self.fuse(features, input_ids, attention_mask, mfr)
        length = input_ids.shape[1]
        itm, mlm = self.itm_head(states[:, 0]), self.word_logits(states[:, :length])
        losses: dict[str, Tensor] = {}
        if matched is not None:
            losses["itm_loss"] = functional.cross_entropy(itm.float(), matched.long())
        if labels is not None:
            losses["mlm_loss"] = words_loss(mlm, labels)
        if mfr is not None:
            wanted = self.targets(pixel_values, features) if mfr_targets is None else mfr_targets
            losses["mfr_loss"] = self.mfr_loss(states[:, length:], wanted, mfr)
        modality = (torch.arange(states.shape[1], device=states.device) >= length).long().expand(len(states), -1)
        return VisualParsingOutput(
            loss=torch.stack(list(losses.values())).sum() if losses else None,
            last_hidden_state=states,
            itm_logits=itm,
            mlm_logits=mlm,
            image_features=features,
            modality=modality,
            valid=~padding,
            **losses,
        )

    @torch.no_grad()
    def similarities(
        self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None, *, batch_size: int = 1024
    ) -> Tensor:
        """How well each picture and each text belong together, `(pictures, texts)`: the difference of the two logits of ITM; call it in eval mode."""
        check_whole(batch_size=batch_size)
        features = torch.cat([self.image_tokens(part) for part in pixel_values.split(batch_size)])
        rows, columns = len(features), len(input_ids)
        scores = []
        for pairs in torch.arange(rows * columns, device=features.device).split(batch_size):
            image, text = pairs // columns, pairs % columns
            mask = None if attention_mask is None else attention_mask[text]
            states, _ = self.fuse(features[image], input_ids[text], mask)
            scores.append(self.score(states))
        return torch.cat(scores).view(rows, columns)

    def score(self, states: Tensor) -> Tensor:
        """How well text and picture of these states belong together, `(B,)`."""
        logits = self.itm_head(states[:, 0]).float()
        return logits[:, 1] - logits[:, 0]


class VisualParsingClassifier(_Pretrained):
    """Answers from a list: two layers on the state of `[CLS]` of a `VisualParsingModel`.

    With `config.num_labels` the number of answers it answers questions; with 3 it tells whether a picture entails a
    text, contradicts it, or neither; with `config.images=2` `pixel_values` are `(B, 2, channels, size, size)` and it
    judges a text about two pictures, each of which is read with it.

    `VisualParsingClassifier.from_pretrained(folder, num_labels=24)` of a folder of a `VisualParsingModel` has its
    weights, and new ones for the answers.

    >>> config = VisualParsingConfig(hidden_size=32, num_hidden_layers=2, vision_layers=1, num_labels=3)
    >>> VisualParsingClassifier(config)(torch.rand(2, 3, 64, 64), torch.tensor([[1, 5, 2], [1, 6, 2]])).itm_logits.shape
    torch.Size([2, 3])
    """

    modalities = MODALITIES

    def __init__(self, config: VisualParsingConfig, vision: nn.Module | None = None) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.parsing = VisualParsingModel(config, vision)
        self.classifier = nn.Sequential(
            nn.Linear(config.images * width, width), nn.GELU(), nn.Linear(width, config.num_labels)
        )
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **_: Any,
    ) -> VisualParsingOutput:
        """Scores of the answers `(B, num_labels)` as `itm_logits`, and with `labels` `(B,)` the loss."""
        pictures = pixel_values.unbind(1) if self.config.images == 2 else (pixel_values,)
        passes = [self.parsing.fuse(self.parsing.image_tokens(each), input_ids, attention_mask) for each in pictures]
        logits = self.classifier(torch.cat([states[:, 0] for states, _ in passes], -1))
        loss = None if labels is None else functional.cross_entropy(logits.float(), labels)
        return VisualParsingOutput(loss=loss, last_hidden_state=passes[0][0], itm_logits=logits, valid=~passes[0][1])


def words_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of hidden words; 0 where none is hidden."""
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return losses / (labels != -100).sum().clamp(min=1)


def _states(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out.last_hidden_state


def _image_positions(config: VisualParsingConfig) -> Tensor:
    """Places in the plane where tokens fill a square, else on a line."""
    side = round(config.image_tokens**0.5)
    if side**2 == config.image_tokens:
        return plane_positions(side, side, config.hidden_size)
    return line_positions(config.image_tokens, config.hidden_size)


AutoConfig.register(VisualParsingConfig.model_type, VisualParsingConfig, exist_ok=True)
AutoModel.register(VisualParsingConfig, VisualParsingModel, exist_ok=True)

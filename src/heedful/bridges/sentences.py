"""Texts as vectors, by a Hugging Face folder as sentence-transformers saves them: mean or first token, of length 1."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from heedful._checks import check_choice, check_whole
from heedful._errors import CorruptModel, InvalidArgument, Unsupported
from heedful._progress import Progress, silent
from heedful.bridges.reading import DEMO, find_model, inputs_of, limit_of, load, title_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Sentences"]

POOLING = ("mean", "cls")
# What each kind of text may be called in a folder.
KINDS = {"query": ("query",), "document": ("document", "passage", "corpus")}
# How much of the weights is read to know them again: so many pieces, evenly spread, of so many bytes.
PIECES, PIECE = 64, 4096


class Sentences:
    r"""A model that maps a text to a vector: $v = m / \lVert m \rVert$, with $m$ the mean of the last layer's vectors over the text's tokens.

    A folder that sentence-transformers saved says itself what to do: `1_Pooling/config.json` whether $m$ is the mean or the first
    token's vector, `sentence_bert_config.json` how many tokens are read, `config_sentence_transformers.json` which words are put
    before a question or a document. In any other Hugging Face folder $m$ is the mean, padding
    left out. Differs from sentence-transformers: vectors have length 1 whether the folder asks for it or not, because they are
    compared by cosines; pooling of other kinds and further layers are refused rather than left out.

    Constructing is quick; weights are loaded when the first text is encoded.

    Args:
        model: a folder, a name in the local Hugging Face cache, or `"demo"` (all-MiniLM-L6-v2). Nothing is downloaded.
        device: `"auto"` is CUDA where there is one.
        dtype: what the layers compute in. `"auto"` is bfloat16 on processors that multiply it faster than float32, which moves cosines by
            about 1e-4; float32 elsewhere.

    Attributes:
        folder, name: where the model is and what it is called.
        pooling: `"mean"` or `"cls"`.
        prompts: what is put before a text, by its kind: `"query"` and `"document"`.
        digest: tells this model from others: a hash of its configuration and of samples of its weights.
        limit: how many tokens of a text are read, `dim`: the size of a vector; both load the model.

    >>> sentences = Sentences("demo")
    >>> water, sea, tax = sentences.encode(["Water is wet.", "The sea is full of water.", "Taxes are due in May."])
    >>> water.shape, bool(water @ sea > 0.4 > water @ tax)
    ((384,), True)
    """

    def __init__(
        self,
        model: str | Path = DEMO,
        *,
        device: str | torch.device = "auto",
        dtype: Literal["float32", "bfloat16", "auto"] = "float32",
    ) -> None:
        check_choice(("float32", "bfloat16", "auto"), dtype=dtype)
        self.folder = find_model(model)
        self.name = title_of(self.folder)
        self.device, self.dtype = device, dtype
        self.pooling, self._most = _pooling(self.folder), _limit(self.folder)
        self.prompts = _prompts(self.folder)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, pooling={self.pooling!r})"

    @cached_property
    def digest(self) -> str:
        """A hash of the configuration, the pooling, and the weights' sizes and samples of their bytes."""
        known = hashlib.sha256(f"{self.pooling} {self._most} {sorted(self.prompts.items())}".encode())
        known.update((self.folder / "config.json").read_bytes())
        for file in sorted(self.folder.glob("*.safetensors")):
            size = file.stat().st_size
            known.update(f"{file.name} {size}".encode())
            with file.open("rb") as weights:
                for piece in range(PIECES):
                    weights.seek(max(0, size - PIECE) * piece // (PIECES - 1))
                    known.update(weights.read(PIECE))
        return known.hexdigest()[:16]

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        from heedful._runtime import device_of

        place = device_of(self.device)
        model, tokenizer = load(self.folder)
        if getattr(model.config, "is_encoder_decoder", False):
            raise Unsupported(f"{self.name} is an encoder with a decoder; give a model that reads a text at once")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        return model.to(place, _dtype(self.dtype, place)), tokenizer

    def load(self) -> None:
        """Loads the weights, unless they are."""
        _ = self._loaded

    @property
    def limit(self) -> int:
        """How many tokens of a text are read."""
        limit = limit_of(*self._loaded)
        return min(self._most, limit) if self._most else limit

    @property
    def dim(self) -> int:
        """The size of a vector."""
        return int(self._loaded[0].config.hidden_size)

    def encode(
        self,
        texts: Sequence[str],
        *,
        kind: Literal["query", "document"] = "document",
        batch_size: int = 32,
        progress: Progress = silent,
    ) -> np.ndarray:
        """Vectors (n, dim) of n texts in float32, each of length 1; what goes beyond `limit` tokens is not read.

        `kind` matters to models that were trained with other words before a question than before what answers it. Texts of similar length are read together, so that little is padded; the order of the result is that of the texts.
        """
        import torch

        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise InvalidArgument("texts must be a list of strings; got something else")
        check_whole(batch_size=batch_size)
        check_choice(KINDS, kind=kind)
        texts = [self.prompts[kind] + text for text in texts]
        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        # The longest first: a batch that does not fit into memory is the first one.
        order = sorted(range(len(texts)), key=lambda at: -len(texts[at]))
        with torch.inference_mode():
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                vectors[batch] = self._vectors([texts[at] for at in batch]).cpu().numpy()
                progress(start + len(batch), len(order), "texts read")
        return vectors

    def _vectors(self, texts: list[str]) -> Tensor:
        from torch.nn.functional import normalize

        model, tokenizer = self._loaded
        inputs = inputs_of(model, tokenizer, texts, most=self.limit)
        hidden: Tensor = model(**inputs).last_hidden_state.float()  # [B, T, D]
        mask = inputs["attention_mask"]
        if self.pooling == "cls":
            # The first token that is no padding, on whichever side that is.
            return normalize(hidden[mask.new_tensor(range(len(mask))), mask.argmax(1)], dim=-1)
        weight = mask[..., None].to(hidden.dtype)
        return normalize((hidden * weight).sum(1) / weight.sum(1).clamp_min(1), dim=-1)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    import torch

    if name != "auto":
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    # torch says it under these names alone; where they are gone, float32 is right as well.
    asked = [getattr(torch.cpu, each, None) for each in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    fast = device.type == "cpu" and any(each() for each in asked if each is not None)
    return torch.bfloat16 if fast else torch.float32


def _json(file: Path) -> Any:
    """What a file of JSON holds, None where there is no file."""
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptModel(f"{file} is not valid JSON ({error}); copy it again") from None


def _pooling(folder: Path) -> str:
    modules = _json(folder / "modules.json") or []
    kinds = [str(each.get("type", "")).rsplit(".", 1)[-1] for each in modules if isinstance(each, dict)]
    further = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if further:
        raise Unsupported(
            f"{folder} has a layer {further[0]} behind its pooling, which is not read here; give a model without it"
        )
    place = next((str(each.get("path")) for each, kind in zip(modules, kinds, strict=True) if kind == "Pooling"), None)
    settings = _json(folder / (place or "1_Pooling") / "config.json") or {}
    chosen = settings.get("pooling_mode")
    chosen = "+".join(chosen) if isinstance(chosen, list) else chosen
    if chosen is None:
        # What older releases of sentence-transformers write: a truth value for each kind.
        names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
        on = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value]
        chosen = "+".join(names.get(key, key.removeprefix("pooling_mode_")) for key in on) or "mean"
    if chosen not in POOLING:
        raise Unsupported(f"{folder} pools by {chosen}; give a model that pools by mean or cls")
    return str(chosen)


def _prompts(folder: Path) -> dict[str, str]:
    settings = _json(folder / "config_sentence_transformers.json") or {}
    prompts = settings.get("prompts") or {}
    default = prompts.get(settings.get("default_prompt_name")) or ""
    return {
        kind: str(next((prompts[name] for name in names if prompts.get(name)), default))
        for kind, names in KINDS.items()
    }


def _limit(folder: Path) -> int | None:
    most = (_json(folder / "sentence_bert_config.json") or {}).get("max_seq_length")
    return int(most) if most else None

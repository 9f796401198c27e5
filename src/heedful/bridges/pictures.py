"""Models of pictures and text on this disk, and what they are called with: a folder, its processor, pictures, a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful._errors import CorruptModel, InvalidArgument, MissingExtra, Unsupported
from heedful.bridges.reading import find_model, load, quietly

if TYPE_CHECKING:
    from torch import Tensor


def load_seeing(folder: str | Path) -> tuple[Any, Any]:
    """A model that reads pictures and text, by the class it was saved with, and its processor; reads this disk alone.

    Refuses a folder whose model or processor takes no pictures.
    """
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "hf") from None
    folder = find_model(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = str(next(iter(config.get("architectures") or ()), ""))
    with quietly():
        try:
            processor = transformers.AutoProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        # Whatever a folder holds wrong, transformers raises it by a dozen classes.
        except Exception as error:
            raise CorruptModel(
                f"the processor in {folder} cannot be loaded: {' '.join(str(error).split())[:200]}; save it beside the model: "
                "processor.save_pretrained(folder)"
            ) from error
    if getattr(processor, "image_processor", None) is None:
        raise Unsupported(
            f"the model in {folder} reads no pictures ({name or config['model_type']}); leave --image out"
        )
    return load(folder, name if hasattr(transformers, name) else "AutoModel")[0], processor


def open_pictures(files: Sequence[str | Path]) -> list[Any]:
    """Pictures from files, in red, green and blue."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise MissingExtra("pillow", "plot") from None
    pictures = []
    for file in files:
        try:
            pictures.append(Image.open(Path(file).expanduser()).convert("RGB"))
        except UnidentifiedImageError:
            raise InvalidArgument(f"{file} is no picture that can be read; give a PNG or JPEG") from None
        except OSError as error:
            raise InvalidArgument(f"cannot read {file}: {error.strerror or error}; give another file") from None
    return pictures


def inputs_with(model: Any, processor: Any, text: str, pictures: Sequence[Any]) -> dict[str, Tensor]:
    """What a model is called with to read pictures and a text; marks for pictures are put ahead of a text that has none."""
    mark = getattr(processor, "image_token", None)
    if isinstance(mark, str) and mark not in text:
        if getattr(processor, "chat_template", None):
            content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
            text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        else:
            text = mark * len(pictures) + text
    try:
        with quietly():
            encoded = processor(images=list(pictures), text=text, return_tensors="pt")
    except (ValueError, TypeError, IndexError) as error:
        raise InvalidArgument(f"the processor cannot read this: {' '.join(str(error).split())[:200]}") from error
    return {name: value.to(model.device) for name, value in encoded.items() if hasattr(value, "to")}

"""Folders of `config.json` + `model.safetensors`: how everything here is saved, and loaded without unpickling."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful import __version__
from heedful._errors import CorruptModel, InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def write_folder(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes both files, each complete or not at all; `config.json` carries a checksum of both."""
    from safetensors.torch import save

    folder = located(folder)
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"cannot save to {folder}: a file of that name is there; give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    weights = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    signed = {**config, "heedful": __version__}
    text = json.dumps({**signed, "sha256": digest(signed, weights)}, indent=2)
    _replace(folder / WEIGHTS, weights)
    _replace(folder / CONFIG, text.encode())


def read_folder(folder: str | Path, *, expects: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads both files; anything missing, truncated or altered raises `CorruptModel` naming the file and what to do."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    folder = located(folder)
    if not folder.is_dir():
        raise CorruptModel(f"no saved folder at {folder}; give a folder that save_pretrained wrote")
    text, weights = (_read(folder / name) for name in (CONFIG, WEIGHTS))
    try:
        config = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{folder / CONFIG} is not valid JSON ({error}); save the model again") from None
    if not isinstance(config, dict) or expects not in config or not isinstance(config.get("sha256"), str):
        raise CorruptModel(
            f"{folder / CONFIG} does not describe a heedful {expects}: 'heedful', 'sha256' and '{expects}' expected"
        )
    if digest(config, weights) != config["sha256"]:
        raise CorruptModel(
            f"{CONFIG} or {WEIGHTS} in {folder} was truncated or altered: the checksum in {CONFIG} does not fit; "
            "copy both again, or save the model again"
        )
    try:
        return config, load(weights)
    except (SafetensorError, ValueError) as error:
        raise CorruptModel(
            f"{folder / WEIGHTS} cannot be read as safetensors ({error}); save the model again"
        ) from None


def digest(config: Mapping[str, Any], weights: bytes) -> str:
    """The checksum of a folder: of the weights and of everything else that config.json says."""
    rest = {name: value for name, value in config.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode() + b"\0" + weights).hexdigest()


def located(folder: str | Path) -> Path:
    if not str(folder):
        raise InvalidArgument("the folder's name is empty; give a folder")
    return Path(folder).expanduser()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CorruptModel(f"{path} is missing; copy it there, or save the model again") from None
    except OSError as error:
        raise CorruptModel(f"{path} cannot be read: {error.strerror}") from None


def _replace(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

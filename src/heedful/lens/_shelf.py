"""Records of attention on disk: one safetensors file per layer, one for the masks they share, and an index."""

from __future__ import annotations

import json
import os
import tempfile
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heedful._errors import CorruptModel, InvalidArgument
from heedful._pretrained import located

if TYPE_CHECKING:
    from heedful.lens._record import LayerRecord

INDEX, MASKS = "observation.json", "masks.safetensors"
SHARED = ("mask", "bias")


class Files(Mapping[str, Tensor]):
    """Tensors in safetensors files, each read when it is asked for: name -> (file, its name in there)."""

    def __init__(self, places: Mapping[str, tuple[Path, str]]) -> None:
        self._places = dict(places)

    def __getitem__(self, name: str) -> Tensor:
        file, inner = self._places[name]
        with _open(file) as tensors:
            found: Tensor = tensors.get_tensor(inner)
            return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class Shelf:
    """A folder being filled with records, one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._masks: list[Tensor] = []
        self._shared: dict[int, dict[str, str]] = {}

    @staticmethod
    @contextmanager
    def writing(folder: str | Path) -> Iterator[Shelf]:
        """A shelf that becomes this folder when all went well, and leaves nothing behind when it did not."""
        folder = located(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InvalidArgument(f"{folder} is there and not empty; give a new or empty folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
            yield Shelf(Path(beside))
            folder.mkdir(exist_ok=True)
            # The index last: a folder that has one is complete.
            for file in sorted(Path(beside).iterdir(), key=lambda file: file.name == INDEX):
                os.replace(file, folder / file.name)

    def put(self, record: LayerRecord) -> LayerRecord:
        """Writes a record; returns one that reads its tensors from there."""
        from safetensors.torch import save_file

        file = self._folder / _name(record.index)
        own = {name: record._tensors[name] for name in record._tensors if name not in SHARED}
        shared = {name: record._tensors[name] for name in SHARED if name in record._tensors}
        save_file(own, file)
        self._shared[record.index] = {name: self._number(mask) for name, mask in shared.items()}
        stored = Files({name: (file, name) for name in own})
        return replace(record, _tensors=ChainMap(shared, stored))  # type: ignore[arg-type]

    def remove(self, index: int) -> None:
        (self._folder / _name(index)).unlink()
        del self._shared[index]

    def close(self, told: dict[str, Any]) -> None:
        """Writes the masks, and the index that makes the folder whole."""
        from safetensors.torch import save_file

        save_file({str(at): mask for at, mask in enumerate(self._masks)}, self._folder / MASKS)
        shared = [self._shared[layer["index"]] for layer in told["layers"]]
        text = json.dumps({"format": 1, "shared": shared, **told}, indent=1)
        (self._folder / INDEX).write_text(text, encoding="utf-8")

    def _number(self, mask: Tensor) -> str:
        for at, known in enumerate(self._masks):
            if known is mask or (known.dtype == mask.dtype and torch.equal(known, mask)):
                return str(at)
        self._masks.append(mask)
        return str(len(self._masks) - 1)


def opened(folder: Path) -> tuple[dict[str, Any], list[Files]]:
    """What the index says, without its own entries, and each layer's tensors."""
    index = folder / INDEX
    try:
        told = json.loads(index.read_text(encoding="utf-8"))
        shared, layers = told.pop("shared"), told["layers"]
        if told.pop("format") != 1:
            raise CorruptModel(f"{index} was written by a newer heedful; open it with that one")
        stored = []
        for layer, masks in zip(layers, shared, strict=True):
            file = folder / _name(layer["index"])
            with _open(file) as tensors:
                own = {name: (file, name) for name in tensors.keys()}  # noqa: SIM118
            stored.append(Files(own | {name: (folder / MASKS, at) for name, at in masks.items()}))
        return told, stored
    except OSError as error:
        if isinstance(error, CorruptModel):
            raise
        raise CorruptModel(f"{index} cannot be read ({error.strerror}); give a folder that to_disk wrote") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptModel(f"{index} does not describe an observation ({error!r}); write it again") from None


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CorruptModel(f"{file} is missing or not whole ({error}); write the observation again") from None


def _name(index: int) -> str:
    return f"layer-{index:04d}.safetensors"

"""Records of attention on disk: one safetensors file per layer, one for each mask that layers share, and an index."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from heedful._errors import CorruptModel
from heedful._files import new_folder

if TYPE_CHECKING:
    from heedful.lens._record import LayerRecord

INDEX = "observation.json"
SHARED = ("mask", "bias")


@dataclass(frozen=True)
class Place:
    """A tensor in a safetensors file; `room` is a temporary folder that lives as long as anybody may read from it."""

    file: Path
    name: str
    room: Any = None

    def read(self) -> Tensor:
        with _open(self.file) as tensors:
            tensor: Tensor = tensors.get_tensor(self.name)
            return tensor


class Files(Mapping[str, Tensor]):
    """Tensors by name, of which those in files are read when they are asked for."""

    def __init__(self, places: Mapping[str, Tensor | Place]) -> None:
        self._places = dict(places)

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        return place.read() if isinstance(place, Place) else place

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def place(self, name: str) -> Tensor | Place:
        """The tensor, or where it lies."""
        return self._places[name]


class Shelf:
    """A folder being filled with records, one at a time."""

    def __init__(self, folder: Path, room: Any = None) -> None:
        self._folder, self._room = folder, room
        self._masks: dict[int, Place] = {}

    @staticmethod
    def temporary() -> Shelf:
        """A shelf that is gone when the last record on it is."""
        room = tempfile.TemporaryDirectory(prefix="heedful-")
        return Shelf(Path(room.name), room)

    @staticmethod
    @contextmanager
    def writing(folder: str | Path) -> Iterator[Shelf]:
        """A shelf that becomes this folder when all went well, and leaves nothing behind when it did not."""
        with new_folder(folder, last=INDEX) as beside:
            yield Shelf(beside)

    def put(self, record: LayerRecord) -> LayerRecord:
        """Writes a record; returns one that reads its tensors from there."""
        own = {name: record._tensors[name] for name in record._tensors if name not in SHARED}
        places: dict[str, Tensor | Place] = dict(self._save(_layer(record.index), own))
        for name, number in record._shared.items():
            places[name] = record._tensors.place(name) if isinstance(record._tensors, Files) else record._tensors[name]
            if self._room is None:
                # What is to last is all in this folder; a temporary shelf leaves masks where they are.
                places[name] = self._masks.get(number) or self.share(number, record._tensors[name])
        return replace(record, _tensors=Files(places))

    def share(self, number: int, mask: Tensor) -> Place:
        """Writes a mask that several layers may have."""
        self._masks[number] = self._save(_mask(number), {"mask": mask})["mask"]
        return self._masks[number]

    def _save(self, file: str, tensors: dict[str, Tensor]) -> dict[str, Place]:
        from safetensors.torch import save_file

        save_file(tensors, self._folder / file)
        os.chmod(self._folder / file, 0o644)
        return {name: Place(self._folder / file, name, self._room) for name in tensors}

    def remove(self, index: int) -> None:
        """Takes a record off the shelf."""
        (self._folder / _layer(index)).unlink()

    def close(self, description: dict[str, Any], records: list[LayerRecord]) -> None:
        """Writes the index that makes the folder whole."""
        shared = [dict(record._shared) for record in records]
        text = json.dumps({"format": 1, "shared": shared, **description}, indent=1)
        (self._folder / INDEX).write_text(text, encoding="utf-8")


def opened(folder: Path) -> tuple[dict[str, Any], list[dict[str, int]], list[Files]]:
    """What the index says, and of each layer the numbers of its masks and its tensors."""
    # A later chdir must not lose the files.
    folder = folder.absolute()
    index = folder / INDEX
    try:
        description = json.loads(index.read_text(encoding="utf-8"))
        shared = description.pop("shared")
        if description.pop("format") != 1:
            raise CorruptModel(f"{index} was written by a newer heedful; open it with that one")
        stored = []
        for layer, masks in zip(description["layers"], shared, strict=True):
            places = _checked(folder / _layer(layer["index"]), layer)
            stored.append(Files(places | {name: Place(folder / _mask(at), "mask") for name, at in masks.items()}))
        return description, shared, stored
    except OSError as error:
        if isinstance(error, CorruptModel):
            raise
        raise CorruptModel(f"{index} cannot be read ({error.strerror}); give a folder that to_disk wrote") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptModel(f"{index} does not describe an observation ({error!r}); write it again") from None


def _checked(file: Path, layer: dict[str, Any]) -> dict[str, Tensor | Place]:
    """The tensors of a layer, whose sizes must be those that the index tells."""
    sizes = {
        "queries": [layer["batch"], layer["heads"], layer["queries_len"]],
        "keys": [layer["batch"], layer["key_heads"], layer["keys_len"]],
        "outputs": [layer["batch"], layer["heads"], layer["queries_len"]],
        "weights": [layer["batch"], layer["heads"], layer["queries_len"]],
    }
    with _open(file) as tensors:
        names = list(tensors.keys())
        for name in names:
            shape = tensors.get_slice(name).get_shape()
            if shape[:3] != sizes.get(name, shape[:3]):
                raise CorruptModel(f"{file.parent / INDEX} and {file.name} disagree on {name}; write it again")
    return {name: Place(file, name) for name in names}


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CorruptModel(f"{file} is missing or not whole ({error}); write the observation again") from None


def _layer(index: int) -> str:
    return f"layer-{index:04d}.safetensors"


def _mask(number: int) -> str:
    return f"mask-{number:04d}.safetensors"

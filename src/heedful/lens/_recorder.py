"""Turns calls of attention into records, in memory up to a limit, then on disk."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heedful._errors import InvalidArgument
from heedful.bridges.calls import Memory
from heedful.bridges.watch import Watched
from heedful.lens._record import LayerRecord
from heedful.lens._shelf import SHARED, Files, Place, Shelf


@dataclass(frozen=True)
class Copies:
    """Copies of a call's tensors, its masks by number, and whether no query sees a later key."""

    tensors: dict[str, Tensor]
    shared: dict[str, tuple[int, Tensor | Place]]
    causal: bool


class Recorder:
    """Keeps the calls asked for, in memory up to a limit, then on disk."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[int] | None,
        keep: tuple[str, ...],
        memory: int,
        disk: str | Path | None,
    ) -> None:
        self._layers, self._keep, self._left, self._disk = layers, keep, memory, disk
        # What the last layers are is known only at the end.
        self._from_end = max((-at for at in layers or () if at < 0), default=0)
        # A model that reads one sequence and writes another.
        self._two_sided = getattr(getattr(model, "config", None), "is_encoder_decoder", False) or any(
            isinstance(module, nn.Transformer) for module in model.modules()
        )
        self._records: dict[int, LayerRecord] = {}
        self._shared = Memory()
        self._masks = self._count = 0
        self.callers: set[str] = set()
        self._closing = ExitStack()
        self._shelf: Shelf | None = None

    def __enter__(self) -> Recorder:
        if self._disk is not None:
            self._shelf = self._closing.enter_context(Shelf.writing(self._disk))
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._closing.__exit__(*error)

    @property
    def shelf(self) -> Shelf:
        """Where records go that are not held in memory."""
        if self._shelf is None:
            self._shelf = Shelf.temporary()
        return self._shelf

    def add(self, call: Watched) -> None:
        """Records a call, if it may be among those asked for."""
        index, self._count = self._count, self._count + 1
        self.callers.add(call.name)
        if self._layers is None or index in self._layers or self._from_end:
            record = self._record(index, call)
            own = {name: x for name, x in record._tensors.items() if name not in SHARED}
            self._records[index] = record if self._fits(*own.values()) else self.shelf.put(record)
        if self._layers is not None:
            self._drop(index - self._from_end)

    def _fits(self, *tensors: Tensor) -> bool:
        """Whether these may stay in memory, which they then take."""
        size = sum(x.nbytes for x in tensors)
        if self._disk is not None or size > self._left:
            return False
        self._left -= size
        return True

    def _drop(self, index: int) -> None:
        """Forgets a layer that has turned out not to be among the last."""
        if index in self._records and index not in (self._layers or ()):
            record = self._records.pop(index)
            if isinstance(record._tensors, dict):
                self._left += sum(x.nbytes for name, x in record._tensors.items() if name not in SHARED)
            else:
                self.shelf.remove(index)

    def finish(self) -> list[LayerRecord]:
        if self._layers is not None and self._count:
            wanted = {at + self._count if at < 0 else at for at in self._layers}
            if not wanted <= set(range(self._count)):
                raise InvalidArgument(
                    f"{'layer' if len(self._layers) == 1 else 'layers'} must be from -{self._count} to {self._count - 1}, for the model made {self._count} calls of attention; "
                    f"got layers={list(self._layers)}"
                )
            for index in [*self._records]:
                if index not in wanted:
                    self._layers = ()
                    self._drop(index)
        return [self._records[index] for index in sorted(self._records)]

    def copied(self, call: Watched) -> Copies:
        """What is to be kept of a call, taken at once."""
        weights = "weights" in self._keep
        sources = {
            "queries": call.query if "queries" in self._keep or (weights and call.weights is None) else None,
            "keys": call.key if "keys" in self._keep or (weights and call.weights is None) else None,
            "values": call.value if "values" in self._keep else None,
            "outputs": call.output if "outputs" in self._keep else None,
            "weights": call.weights if weights else None,
        }
        tensors = {name: _copy(x) for name, x in sources.items() if x is not None}
        masks = {"mask": call.mask, "bias": call.bias}
        shared = {name: self._shared.get(x, self._share) for name, x in masks.items() if x is not None}
        queries = call.output.shape[2]
        keys = queries if call.key is None else call.key.shape[2]
        return Copies(tensors, shared, call.causal or _hides_the_future(call.mask, queries, keys))

    def _record(self, index: int, call: Watched) -> LayerRecord:
        kept: Copies = call.kept
        own = kept.tensors
        if "inputs" in self._keep and call.inputs is not None:
            own = own | {"inputs": _copy(call.inputs)}
        places = {name: place for name, (_, place) in kept.shared.items()}
        held = all(isinstance(x, Tensor) for x in places.values())
        batch, heads, queries = call.output.shape[:3]
        if call.key is not None:
            key_heads, keys = call.key.shape[1:3]
        else:
            key_heads, keys = heads, queries if call.weights is None else call.weights.shape[-1]
        kernel = call.kernel
        if kernel is not None:
            kernel = kernel.with_tensors({name: x.detach().cpu() for name, x in kernel.tensors().items()})
        return LayerRecord(
            index=index,
            name=call.name,
            kind="cross" if call.cross else "self",
            side=self._side(call.name),
            batch=batch,
            heads=heads,
            key_heads=key_heads,
            queries_len=queries,
            keys_len=keys,
            causal=kept.causal,
            upper_left=call.causal,
            kernel=kernel,
            _keep=self._keep,
            _shared={name: number for name, (number, _) in kept.shared.items()},
            _tensors={**own, **places} if held else Files({**own, **places}),  # type: ignore[dict-item]
        )

    def _side(self, name: str) -> str:
        parts = name.lower().split(".")
        if any(word in part for part in parts for word in ("vision", "visual", "image", "pixel")):
            return "image"
        return "decoder" if self._two_sided and any("decoder" in part for part in parts) else "input"

    def _share(self, mask: Tensor) -> tuple[int, Tensor | Place]:
        """One copy of what layers share, its repeated axes at length one, with a number; in memory or on the shelf."""
        small, number = mask.detach(), self._masks
        for axis, (size, step) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
            small = small.narrow(axis, 0, 1) if step == 0 and size > 1 else small
        small = _copy(small)
        self._masks += 1
        return number, small if self._fits(small) else self.shelf.share(number, small)


def _copy(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True).contiguous()


def _hides_the_future(mask: Tensor | None, queries: int, keys: int) -> bool:
    if mask is None or queries != keys or queries == 1 or mask.shape[-2] != queries:
        return False
    return not bool((mask & ~torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()).any())

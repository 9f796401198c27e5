"""One way to record what attention did, whatever model it is in and whatever implementation it runs with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from heedful._errors import CorruptModel, InvalidArgument, Unsupported
from heedful._files import located
from heedful._result import plain
from heedful._text import quantity
from heedful.bridges.transformers import bare
from heedful.bridges.watch import Run, watch
from heedful.kernels import Kernel
from heedful.lens._inputs import read_inputs
from heedful.lens._record import LayerRecord, Tokens
from heedful.lens._recorder import Recorder
from heedful.lens._shelf import Shelf, opened

KEEP = ("weights", "queries", "keys", "values", "inputs", "outputs")


class Observation(Sequence[LayerRecord]):
    """What every attention layer did in one run, in the order of execution.

    Attributes:
        model: the class of the model.
        keep: what was kept of each layer.
        output: what the model returned; None after `from_disk`.
        unseen: modules called attention that ran in ways which cannot be recorded.
    """

    def __init__(
        self,
        records: Sequence[LayerRecord],
        sides: Mapping[str, Tokens],
        *,
        model: str,
        keep: tuple[str, ...],
        output: Any = None,
        unseen: Sequence[str] = (),
    ) -> None:
        self._records, self._sides = tuple(records), dict(sides)
        self.model, self.keep, self.output, self.unseen = model, keep, output, tuple(unseen)

    @overload
    def __getitem__(self, index: int) -> LayerRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[LayerRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> LayerRecord | tuple[LayerRecord, ...]:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    @property
    def tokens(self) -> tuple[tuple[str, ...], ...]:
        """Token strings, for each sequence of the batch; places in the sequence where there is no tokenizer."""
        return self._sides["input"].strings

    @property
    def special(self) -> Tensor:
        """`[B, n]`: True for `[CLS]`, `</s>` and the like."""
        return self._sides["input"].special

    @property
    def valid(self) -> Tensor:
        """`[B, n]`: False for padding."""
        return self._sides["input"].valid

    def query_tokens(self, record: LayerRecord) -> Tokens:
        """What the queries of a layer stand for; places where the model reads others than its tokens."""
        return self._labels(record.side, record.batch, record.queries_len)

    def key_tokens(self, record: LayerRecord) -> Tokens:
        """What the keys of a layer stand for: in cross-attention, what the encoder read."""
        return self._labels("input" if record.kind == "cross" else record.side, record.batch, record.keys_len)

    def _labels(self, side: str, batch: int, length: int) -> Tokens:
        # Keys may reach back to what a cache holds from before.
        for tokens in (self._sides.get(side), self._sides.get("cache") if side == "input" else None):
            if tokens is not None and tokens.valid.shape == (batch, length):
                return tokens
        return Tokens.unnamed(batch, length)

    def to_dict(self) -> dict[str, Any]:
        """Names, sizes and tokens, without the tensors; JSON types alone."""
        sides = {
            name: {"tokens": side.strings, "special": side.special, "valid": side.valid}
            for name, side in self._sides.items()
        }
        own = {"model": self.model, "keep": self.keep, "unseen": self.unseen, "sides": sides, "layers": self._records}
        return plain(own)

    def to_disk(self, folder: str | Path) -> Path:
        """Writes the observation to a new or empty folder: `observation.json` and safetensors, layers one at a time."""
        with Shelf.writing(folder) as shelf:
            for record in self:
                shelf.put(record)
            shelf.close(self.to_dict(), list(self))
        return located(folder)

    @staticmethod
    def from_disk(folder: str | Path) -> Observation:
        """Opens a folder that `to_disk` or `observe(..., disk=folder)` wrote; tensors are read when asked for."""
        description, shared, stored = opened(located(folder))
        try:
            keep = tuple(description["keep"])
            sides = {
                name: Tokens(
                    tuple(map(tuple, side["tokens"])), torch.tensor(side["special"]), torch.tensor(side["valid"])
                )
                for name, side in description["sides"].items()
            }
            records = [
                LayerRecord(
                    **{**layer, "kernel": layer["kernel"] and Kernel.from_dict(layer["kernel"])},
                    _keep=keep,
                    _shared=masks,
                    _tensors=tensors,
                )
                for layer, masks, tensors in zip(description["layers"], shared, stored, strict=True)
            ]
            return Observation(records, sides, model=description["model"], keep=keep, unseen=description["unseen"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptModel(f"{located(folder)} does not hold an observation ({error!r}); write it again") from None

    def _repr_html_(self) -> str:
        from heedful.report import Prose, Table
        from heedful.report.page import fragment

        rows = [[one.index, one.name, one.kind, one.heads, one.queries_len, one.keys_len] for one in self]
        table = Table(["layer", "module", "kind", "heads", "queries", "keys"], rows)
        return fragment([Prose(repr(self)), Prose(" ".join(self.tokens[0])), table])

    def __repr__(self) -> str:
        heads = sorted({record.heads for record in self})
        several = (
            f"{heads[0]}-{heads[-1]} heads" if len(heads) > 1 else quantity(heads[0], "head") if heads else "no heads"
        )
        batch, n = self.valid.shape
        return (
            f"Observation({self.model}, {quantity(len(self), 'layer')} of {several}, {batch} x {quantity(n, 'token')})"
        )


def observe(
    model: nn.Module,
    inputs: Any,
    layers: Sequence[int] | None = None,
    keep: Sequence[str] = KEEP,
    *,
    tokenizer: Any = None,
    disk: str | Path | None = None,
    memory: int = 2**30,
) -> Observation:
    r"""Runs a model once and records what each attention layer did: $A = \kappa(Q, K)$ and $A V$, head by head.

    Works for Hugging Face models that use the attention interface, `torch.nn.MultiheadAttention` and what is built from it,
    heedful's layers, and any module that calls `scaled_dot_product_attention` or `attend`. The model runs the implementation
    it has, its output is the same bit for bit, and it is left as it was found. Weights are there whatever the
    implementation: they are computed, when asked for, from the queries, keys and mask that were used.

    Args:
        model: any `torch.nn.Module`; run in the mode it is in, without gradients.
        inputs: a text or a list of texts (with `tokenizer`), a mapping that becomes keyword arguments, a tuple, or a tensor.
        layers: which calls to record, by their place in the order of execution; negative ones count from the end.
        keep: what to record of each: any of "weights", "queries", "keys", "values", "inputs", "outputs".
        tokenizer: of Hugging Face; names the tokens, and reads texts.
        disk: a new or empty folder to record to, one layer at a time; `Observation.from_disk` opens it again.
        memory: bytes that recorded tensors may take; what goes beyond is kept in a temporary folder.

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> seen = observe(layer, torch.randn(1, 5, 8))
    >>> seen
    Observation(TransformerEncoderLayer, 1 layer of 2 heads, 1 x 5 tokens)
    >>> seen[0].weights.sum(-1).allclose(torch.ones(1, 2, 5))
    True
    """
    keep = (keep,) if isinstance(keep, str) else tuple(keep)
    if not keep or not set(keep) <= set(KEEP):
        raise InvalidArgument(f"keep must name some of {', '.join(KEEP)}; got {keep!r}")
    model = bare(model)
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"observe: model must be a torch.nn.Module; got {type(model).__name__}")
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < 0:
        raise InvalidArgument(f"memory must be a number of bytes, 0 or more; got {memory!r}")
    layers = None if layers is None else _numbers(layers)
    args, named, sides = read_inputs(model, inputs, tokenizer)
    with Recorder(model, layers, keep, memory, disk) as recorder:
        with torch.no_grad(), watch(model, recorder.add, recorder.copied) as run:
            output = model(*args, **named)
        records = recorder.finish()
        unseen = _unseen(model, run, recorder.callers)
        if not records:
            which = f" (it ran {', '.join(name or type(model).__name__ for name in unseen[:3])})" if unseen else ""
            raise Unsupported(
                f"{type(model).__name__} made no call of attention that can be seen{which}; give a model that attends "
                "through transformers' attention interface, torch.nn, scaled_dot_product_attention or heedful. "
                "Some Hugging Face models do so with attn_implementation='sdpa' alone"
            )
        sides = _all_sides(records) | sides
        observation = Observation(records, sides, model=type(model).__name__, keep=keep, output=output, unseen=unseen)
        if disk is None:
            return observation
        recorder.shelf.close(observation.to_dict(), records)
    reopened = Observation.from_disk(disk)
    reopened.output = output
    return reopened


def _numbers(layers: Any) -> list[int]:
    try:
        numbers = [index(at) for at in layers]
    except TypeError:
        numbers = []
    if not numbers:
        raise InvalidArgument(f"layers must be integers, one or more; got {layers!r}")
    return numbers


def _all_sides(records: Sequence[LayerRecord]) -> dict[str, Tokens]:
    """Places, for every side of the model; what an encoder read shows in cross-attention too."""
    lengths = {record.side: (record.batch, record.queries_len) for record in reversed(records)}
    crossing = next((record for record in records if record.kind == "cross"), records[0])
    lengths.setdefault("input", (crossing.batch, crossing.keys_len))
    return {side: Tokens.unnamed(*sizes) for side, sizes in lengths.items()}


def _unseen(model: nn.Module, run: Run, callers: set[str]) -> list[str]:
    """Modules whose attention could not be told, and those called attention that neither attended nor hold one that did."""
    seen = [
        name
        for name, module in model.named_modules()
        if name in run.executed
        and "Attention" in type(module).__name__
        and not type(module).__name__.endswith("Output")
        and not any(
            caller == name or caller.startswith(f"{name}.") or name.startswith(f"{caller}.") for caller in callers
        )
    ]
    inner = [name for name in seen if not any(other.startswith(f"{name}.") for other in seen)]
    return sorted({*inner, *run.missed})

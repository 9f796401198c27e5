"""What a layer of an encoder is, as data: a kernel, a primal layer, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument
from heedful._savable import coded, decode, encode
from heedful.kernels import Cosine, FeatureMap, Kernel, Polynomial, Softmax, as_kernel
from heedful.nn._module import Activation, Module
from heedful.nn._values import Value
from heedful.ops.primal import TrackLoss

Sampling = Literal["segment_mean", "stride"]
Weights = Literal["data", "static"]
Causal = Literal[False, "cummean", "prefix"]
MapName = Literal["cosine", "elu", "relu", "identity", "random"]
Interaction = Literal["rotary", "bias", "decay", "bucket", "add", "concat", "concat_mlp", "residual"]
# Interactions in which features of times are joined with the events before the projections.
JOINED = ("add", "concat", "concat_mlp", "residual")

_MAPS: dict[str, Kernel] = {
    "cosine": Cosine(),
    "elu": FeatureMap("elu", normalize=False),
    "relu": FeatureMap("relu", normalize=False),
    "identity": Polynomial(1, scale=1.0),
    "random": FeatureMap("random", normalize=False),
}


def find_map(feature_map: MapName | Kernel) -> Kernel:
    """The kernel whose features a primal layer takes of queries and keys."""
    if isinstance(feature_map, str) and feature_map in _MAPS:
        return _MAPS[feature_map]
    if not isinstance(feature_map, Kernel):
        raise InvalidArgument(
            f"feature_map must be one of {', '.join(_MAPS)}, or a kernel with a finite feature map; got {feature_map!r:.100}"
        )
    if feature_map.tensors():
        raise InvalidArgument(f"feature_map takes a kernel of plain numbers; got {feature_map!r:.100}")
    return feature_map


class Description:
    """A layer as a frozen dataclass: it prints, compares, hashes and goes through JSON, as kernels do."""

    def arguments(self) -> dict[str, Any]:
        """The fields by name, as the layer takes them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description, from which `from_dict` makes an equal one."""
        return {name: encode(value) for name, value in self.arguments().items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        if not isinstance(data, dict) or not data.keys() <= {field.name for field in fields(cls)}:  # type: ignore[arg-type]
            what = "primal layer" if cls is Primal else f"{cls.__name__} layer"
            raise InvalidArgument(f"a {what}'s description is a dict of its fields; got {data!r:.200}")
        return cls(**{name: decode(value) for name, value in data.items()})

    @classmethod
    def of(cls, layer: Any) -> Self:
        """The description of a layer that has the fields as attributes, with what its kernels have learned."""
        return cls(**{field.name: getattr(layer, field.name) for field in fields(cls)})  # type: ignore[arg-type]


@coded("primal")
@dataclass(frozen=True)
class Primal(Description):
    """A layer of Primal-Attention as data.

    `Block` and `Encoder` take it where they take a kernel; the fields are arguments of `PrimalAttention`.

    >>> from heedful.nn import Encoder, Primal
    >>> Encoder(32, 4, kernels=["softmax", Primal(rank=8)], max_len=100).kernels[1]
    Primal(rank=8, rank_multi=10, sampling='segment_mean', weights='data', causal=False, feature_map='cosine', track_loss=True)
    """

    rank: int = 20
    rank_multi: int = 10
    sampling: Sampling = "segment_mean"
    weights: Weights | None = None
    causal: Causal = False
    feature_map: MapName | Kernel = "cosine"
    track_loss: TrackLoss = True

    def __post_init__(self) -> None:
        check_whole(rank=self.rank, rank_multi=self.rank_multi)
        check_choice(Sampling, sampling=self.sampling)
        check_choice(Weights, optional=True, weights=self.weights)
        check_choice(Causal, causal=self.causal)
        check_choice((True, False, "kkt"), track_loss=self.track_loss)
        if self.weights is None:
            object.__setattr__(self, "weights", "static" if self.causal == "cummean" else "data")
        if self.causal == "cummean" and self.weights == "data":
            raise InvalidArgument(
                "causal='cummean' takes weights='static': weights made of the data see the whole sequence; "
                "causal='prefix' is the causal form with weights='data'"
            )
        if self.causal == "prefix" and self.weights == "static":
            raise InvalidArgument(
                "causal='prefix' takes weights='data': static weights have no sum over the past; use causal='cummean'"
            )
        find_map(self.feature_map)


@coded("knowledge")
@dataclass(frozen=True)
class Knowledge(Description):
    """A layer of `KnowledgeAttention` as data, for `Block` and `Encoder`, which hand knowledge z on; fields are its arguments.

    >>> from heedful.nn import Encoder, Knowledge
    >>> import torch
    >>> encoder = Encoder(16, 2, kernels=[Knowledge(coordinates="inputs"), "softmax"])
    >>> out, z = encoder(torch.randn(3, 5, 16), z=torch.randn(4, 16))
    >>> out.shape, z.shape
    (torch.Size([3, 5, 16]), torch.Size([4, 16]))
    """

    knowledge: int = 0
    given: int | None = None
    own_knowledge: bool = False
    kernel: Kernel | Sequence[Kernel] | None = None
    knowledge_kernel: Kernel | Sequence[Kernel] | None = None
    coordinates: Literal["learned", "inputs", "knowledge"] = "learned"
    weight: bool = False
    readout: Literal["x+z", "x|z", "x"] = "x+z"
    value: Value = "linear"
    head_dim: int | None = None
    value_dim: int | None = None
    hidden: int | None = None
    activation: Activation = "gelu"

    def __post_init__(self) -> None:
        for name in ("kernel", "knowledge_kernel"):
            if isinstance(getattr(self, name), list | tuple):
                object.__setattr__(self, name, as_kernel(getattr(self, name)))


@coded("pairs")
@dataclass(frozen=True)
class Pairs(Description):
    """A layer of `PairAttention` as data, for `Block` and `Encoder`; fields are its arguments.

    >>> from heedful.nn import Encoder, Pairs
    >>> Encoder(16, 2, kernels=[Pairs(size=5)]).kernels[0].size
    5
    """

    size: int = 16
    form: Literal["mlp", "softmax"] = "mlp"
    arity: Literal[2, 3] = 2
    knowledge: Literal["learned", "given"] = "learned"
    readout: Literal["x", "x|z"] = "x"
    value: Value = "linear"
    value_dim: int | None = None
    activation: Activation = "gelu"
    hidden: int = 32
    max_length: int = 128


@coded("timed")
@dataclass(frozen=True)
class Timed(Description):
    """A layer of `TimeAttention` as data, for `Block` and `Encoder`, which hand times on; fields are its arguments.

    Every layer has a copy of `encoding`, a `TimeEncoding`, of its own.

    >>> from heedful.nn import Encoder, Timed
    >>> import torch
    >>> encoder = Encoder(16, 2, kernels=[Timed("rotary", rotate_values=True), Timed("bias")])
    >>> encoder(torch.randn(3, 5, 16), times=torch.rand(3, 5).cumsum(1), is_causal=True).shape
    torch.Size([3, 5, 16])
    """

    interaction: Interaction = "rotary"
    encoding: Module | None = None
    rotate_values: bool = False
    hidden: int | None = None
    depth: int = 1
    buckets: int = 32

    def __post_init__(self) -> None:
        check_choice(Interaction, interaction=self.interaction)

    @property
    def is_stationary(self) -> bool:
        """Whether a shift of all times changes nothing."""
        return self.interaction not in JOINED

    def arguments(self) -> dict[str, Any]:
        return {**super().arguments(), "encoding": deepcopy(self.encoding)}


LayerName = Literal["softmax", "linear", "primal", "none"]
Layer = Kernel | Sequence[Kernel] | Description | LayerName
"""What may stand for a layer: a kernel, a list with one for each head, a layer as data, or a name."""

_NAMED: dict[str, Kernel | Primal] = {"softmax": Softmax(), "linear": FeatureMap("elu"), "primal": Primal()}


def find_layer(layer: Any) -> Kernel | Description | Literal["none"]:
    """A layer by its name, or as it is."""
    if isinstance(layer, Kernel | Description):
        return layer
    if isinstance(layer, list | tuple):
        return as_kernel(layer)
    if layer == "none":
        return "none"
    if isinstance(layer, str) and layer in _NAMED:
        return _NAMED[layer]
    raise InvalidArgument(
        f"a layer is a kernel such as Softmax(), a list with one for each head, a Primal(), Knowledge(), Pairs() or Timed(), or one of 'softmax', 'linear', 'primal', 'none'; got {layer!r:.100}"
    )

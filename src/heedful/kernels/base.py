"""What every kernel shares: the class, its traits, its parameters, its algebra."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self, dataclass_transform

import torch
from torch import Tensor

from heedful._checks import is_number
from heedful._errors import InvalidArgument
from heedful._runtime import readable
from heedful._savable import Savable, coded, decode, encode, known
from heedful.kernels.forms import Balance, Division, Folded, FusedForm, Traits
from heedful.kernels.forms import Parameter as Parameter  # from here by everybody


@coded("kernel")
@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
class Kernel(Savable):
    """Turns a query and a key into a coefficient.

    A subclass is made a frozen dataclass by being defined; its annotated names are its parameters. One method is enough:

    - `score(query, key)`, with `activation(score)` where the coefficient is not the score itself, or
    - `coefficients(query, key)`, where the coefficient is not a function of one score.

    Both take `[..., heads, Q, D]` and `[..., heads, K, D]` and return `[..., heads, Q, K]`. The class needs no decorator and no
    `__init__`; a tensor among its parameters has shape `()` or heads (or 1) as its first axis.

    >>> import torch
    >>> from heedful import Kernel, attend
    >>> class Lorentz(Kernel):
    ...     width: float = 1.0
    ...     def coefficients(self, query, key):
    ...         return 1 / (1 + torch.cdist(query, key).square() / self.width**2)
    >>> x = torch.randn(1, 1, 5, 4)
    >>> attend(x, x, x, kernel=Lorentz(2.0).normalized()).shape
    torch.Size([1, 1, 5, 4])
    """

    _kind = "kernel"
    _names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if {"score", "activation", "coefficients"} & cls.__dict__.keys():
            # Another formula than the parent's: what the parent knew of faster forms holds no longer.
            cls._forget("fold", "features", "feature_size")
        # What is written inside the fused kernels is one formula exactly.
        cls._forget("fused_form", "fused_map", "is_plain_softmax")
        dataclass(frozen=True, eq=False, repr=False)(cls)
        cls._names = tuple(f.name for f in fields(cls))  # type: ignore[arg-type]
        if "type" in cls._names:
            raise InvalidArgument(f"{cls.__name__}: a parameter cannot be called 'type', which descriptions use")
        super().__init_subclass__(**kwargs)

    @classmethod
    def _forget(cls, *names: str) -> None:
        for name in names:
            if name not in cls.__dict__:
                setattr(cls, name, Kernel.__dict__[name])

    @property
    def traits(self) -> Traits:
        return Traits()

    def score(self, query: Tensor, key: Tensor) -> Tensor:
        """The number that `activation` turns into a coefficient, and to which a float mask is added."""
        raise InvalidArgument(f"{type(self).__name__} defines no score(query, key), which this needs")

    def activation(self, score: Tensor) -> Tensor:
        """The elementwise function from score to coefficient."""
        return score.exp() if self.traits.exponential else score

    def coefficients(self, query: Tensor, key: Tensor) -> Tensor:
        """The coefficient of every pair, before masks and before the division of rows."""
        return self.activation(self.score(query, key))

    def weights(self, query: Tensor, key: Tensor, keep: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Coefficients as `attend` uses them: zero where `keep` is False, rows divided as the traits say.

        `bias` is added to the score. A kernel without a score multiplies its coefficients by exp(bias), which for an
        exponential kernel is the same thing.
        """
        division = self.traits.division
        if not self.scored:
            coefficients = _hide(self._square(self.coefficients(query, key), query, key), keep)
            if bias is not None:
                coefficients = coefficients * _hide(bias, keep).exp()
            return _divide(coefficients, keep, division)
        score = self._square(self.score(query, key), query, key)
        if bias is not None:
            score = score + _hide(bias, keep)
        if self.traits.exponential and division == "sum":
            # The lowest float instead of -inf: a row without a key stays finite until all of it is hidden.
            return _hide(_hide(score, keep, torch.finfo(score.dtype).min).softmax(dim=-1), keep)
        # Hidden scores are zeroed first: an infinite activation there would turn its zero gradient into NaN.
        return _divide(_hide(self.activation(_hide(score, keep)), keep), keep, division)

    @property
    def scored(self) -> bool:
        """Whether coefficients are a function of one score, to which a float mask is added."""
        return type(self).coefficients is Kernel.coefficients

    @property
    def folds(self) -> bool:
        """Whether `fold` gives the score of an exponential kernel."""
        return self.traits.exponential and type(self).fold is not Kernel.fold

    def _square(self, pairs: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if pairs.shape[-2:] != (query.shape[-2], key.shape[-2]):
            raise InvalidArgument(
                f"{type(self).__name__} gave shape {tuple(pairs.shape)} for query {tuple(query.shape)} and key "
                f"{tuple(key.shape)}; expected (..., {query.shape[-2]}, {key.shape[-2]})"
            )
        return pairs

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor] | None:
        """Feature vectors `[..., Q, F]` and `[..., K, F]` whose inner product is the coefficient, where they are finite."""
        return None

    def feature_size(self, head_dim: int) -> int | None:
        """F, or None where there is no finite feature map."""
        return None

    def fold(self, query: Tensor, key: Tensor) -> Folded | None:
        """The score of an exponential kernel as softmax attention would compute it, where that is exact."""
        return None

    @property
    def is_plain_softmax(self) -> bool:
        """Whether `fold` leaves query and key as they are and adds no term: torch's own attention, by a pointer to the inputs."""
        return False

    @property
    def fused_form(self) -> FusedForm | None:
        """The kernel as one elementwise function of an inner product or a squared distance, where it is one.

        A subclass does not inherit it, nor `fused_map`.
        """
        return None

    @property
    def fused_map(self) -> Literal["elu", "relu"] | None:
        """The feature map as the fused kernels of linear attention apply it themselves, where they know it."""
        return None

    def steady_features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor] | None:
        """Features that do not depend on which other keys are there, so that they can be summed up over time."""
        return self.features(query, key)

    @property
    def of_pairs(self) -> Kernel:
        """The kernel that acts on pairs once a kernel of the whole sequence has moved the queries."""
        return self

    @property
    def moves(self) -> tuple[Kernel, ...]:
        """The kernels by which `move` attends, one after the other."""
        return ()

    def check(self, query: Tensor, key: Tensor) -> None:
        """Refuses queries and keys that this kernel does not fit, before any work."""

    def move(self, query: Tensor, key: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """The queries on which `of_pairs` acts; `attend` combines under the mask of the request."""
        return query

    @property
    def balances(self) -> tuple[Kernel, ...]:
        """The kernels whose rows `balance` sums up, one after the other."""
        return ()

    def balance(self, total: Callable[..., Tensor], sees: Tensor | None) -> Balance:
        """How rows and keys are weighed; `total(kernel, column)` sums rows `[..., Q, 1]`, `sees` tells which are not empty."""
        raise NotImplementedError

    def remoteness(self, vectors: Tensor) -> Tensor:
        """How far from the origin vectors are, by the size of their score with it: what rounding is judged by."""
        return self.score(vectors, torch.zeros_like(vectors[..., :1, :])).abs()

    def with_scale(self, scale: float | None) -> Kernel:
        """This kernel with the `scale` argument of `attend`; refuses where it has no scale or another one already."""
        if scale is None:
            return self
        if "scale" not in self._names:
            raise InvalidArgument(f"scale={scale!r} given, but {self!r} has no scale; set the kernel's own parameters")
        own = getattr(self, "scale")  # noqa: B009
        if own is not None:
            raise InvalidArgument(f"scale given twice: scale={scale!r} and kernel={self!r}; give one of them")
        return replace(self, scale=scale)  # type: ignore[type-var]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor parameter, by its dotted name; those of a tuple are counted from 0."""
        return _tensors_of(self._items())

    def leaves(self) -> Iterator[Kernel]:
        """The kernels that a composition is made of; of any other, itself."""
        parts = (value if isinstance(value, tuple) else (value,) for _, value in self._items())
        inner = [part for values in parts for part in values if isinstance(part, Kernel)]
        if not inner:
            yield self
        for kernel in inner:
            yield from kernel.leaves()

    def with_tensors(self, tensors: dict[str, Tensor]) -> Kernel:
        """The same kernel with these tensor parameters in place of its own."""
        if not tensors:
            return self
        return type(self)(**{name: _with_tensors(value, name, tensors) for name, value in self._items()})

    def __mul__(self, other: Kernel | Parameter) -> Kernel:
        from heedful.kernels._algebra import Product, Scaled
        from heedful.kernels.heads import PerHead

        if isinstance(other, PerHead):
            return PerHead(tuple([self * one for one in other.kernels]))
        return Product(self, other) if isinstance(other, Kernel) else Scaled(self, other)

    __rmul__ = __mul__

    def __add__(self, other: Kernel) -> Kernel:
        from heedful.kernels._algebra import Sum
        from heedful.kernels.heads import PerHead

        if isinstance(other, PerHead):
            return PerHead(tuple([self + one for one in other.kernels]))
        return Sum(self, other) if isinstance(other, Kernel) else NotImplemented

    def __radd__(self, other: int) -> Kernel:
        # So that sum(kernels) works, which starts from 0.
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def normalized(self) -> Kernel:
        """Each row of coefficients divided by its sum."""
        return self._divided("sum")

    def averaged(self) -> Kernel:
        """Each row of coefficients divided by the number of keys it may attend to."""
        return self._divided("count")

    def symmetric(self) -> Kernel:
        """Coefficients divided by the roots of both degrees, $D^{-1/2} K D^{-1/2}$, instead of rows by their sum: `Symmetric`."""
        from heedful.kernels.symmetric import Symmetric

        return Symmetric(self._undivided())

    def _undivided(self) -> Kernel:
        """The kernel before its rows are divided."""
        if self.traits.division is None:
            return self
        if "normalize" in self._names:
            return replace(self, normalize=False)  # type: ignore[type-var]
        raise InvalidArgument(f"rows of {self!r} are divided as part of its formula, so it has no degrees to divide by")

    def _divided(self, by: Division) -> Kernel:
        from heedful.kernels._algebra import Divided

        if self.traits.division == by:
            return self
        if by == "sum" and "normalize" in self._names:
            return replace(self, normalize=True)  # type: ignore[type-var]
        return Divided(self, by)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description, from which `from_dict` makes an equal kernel."""
        plain = {name: v.to_dict() if isinstance(v, Kernel) else encode(v) for name, v in self._items()}
        return {"type": type(self).__name__} | plain

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Kernel:
        if not isinstance(data, dict) or not isinstance(data.get("type"), str):
            raise InvalidArgument(f"a kernel's description is a dict with the entry 'type'; got {data!r:.200}")
        parameters = {name: _read(value) for name, value in data.items() if name != "type"}
        classes = known("kernel", data["type"])
        if not classes:
            raise InvalidArgument(
                f"unknown kernel {data['type']!r}; known: {', '.join(sorted({cls.__name__ for cls in known('kernel')}))}. "
                "A kernel of your own must be defined (imported) before it is loaded"
            )
        try:
            return classes[-1](**parameters)
        except TypeError as error:
            raise InvalidArgument(f"{data['type']} cannot be made from {parameters!r:.200}: {error}") from None

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @staticmethod
    def from_json(text: str) -> Kernel:
        try:
            return Kernel.from_dict(json.loads(text))
        except json.JSONDecodeError as error:
            raise InvalidArgument(f"a kernel's JSON does not parse: {error}") from None

    _described, _tensors_saved = to_dict, tensors

    @classmethod
    def _remade(cls, description: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        kernel = Kernel.from_dict(description)
        own = kernel.tensors()
        if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in own.items()}:
            raise InvalidArgument(f"config.json names the tensors {list(own)}, model.safetensors {list(tensors)}")
        return kernel.with_tensors({n: t.requires_grad_(own[n].requires_grad) for n, t in tensors.items()})  # type: ignore[return-value]

    def _items(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self._names]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{n}={_brief(v)}' for n, v in self._items() if v is not None)})"

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        assert isinstance(other, Kernel)
        return all(_equal(a, b) for (_, a), (_, b) in zip(self._items(), other._items(), strict=True))

    def __hash__(self) -> int:
        return hash((type(self), *(_key(value) for _, value in self._items())))


def per_head(parameter: Parameter, like: Tensor) -> Parameter:
    """A parameter in the dtype of `like`, shaped to act on `[..., heads, Q, K]` and `[..., heads, seq, dim]`."""
    if not isinstance(parameter, Tensor):
        return parameter
    parameter = parameter.to(like.dtype)
    return parameter[:, None, None] if parameter.dim() == 1 else parameter


def default_scale(scale: Parameter | None, query: Tensor) -> Parameter:
    return query.shape[-1] ** -0.5 if scale is None else per_head(scale, query)


def shifted(score: Tensor, offset: Parameter) -> Tensor:
    """score + offset, without a pass over the scores where there is nothing to add."""
    if not isinstance(offset, Tensor) and offset == 0:
        return score
    return score + per_head(offset, score)


def wide(x: Tensor) -> Tensor:
    """In the type sums are kept in: float64 as it is, anything else float32."""
    return x if x.dtype == torch.float64 else x.float()


def unit(x: Tensor) -> Tensor:
    """Vectors of length one; a zero vector stays zero, with zero gradient."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.where(length > 0, x / length.masked_fill(length == 0, 1.0), 0.0)


def minus_squared_distance(query: Tensor, key: Tensor, factor: Parameter) -> Tensor:
    """-factor ||q - k||^2 for every pair, by one matrix product of factor [2q, -q.q, -1] and [k, 1, k.k]."""
    ones_q, ones_k = torch.ones_like(query[..., :1]), torch.ones_like(key[..., :1])
    # Finite, so that a vector far away spoils no gradient of the pairs it is hidden from (0 x inf = NaN).
    most = torch.finfo(query.dtype).max / 16
    of_query, of_key = (x.square().sum(-1, keepdim=True).clamp_max(most) for x in (query, key))
    left = torch.cat((2 * query, -of_query, -ones_q), dim=-1) * factor
    right = torch.cat((key, ones_k, of_key), dim=-1)
    return (left @ right.mT).clamp_max(0)


def check_parameter(owner: Kernel, name: str, *, positive: bool = False, optional: bool = False) -> None:
    """Refuses what is neither a finite number nor a floating tensor with at most one axis, or is not positive."""
    if torch.compiler.is_compiling():
        return  # it was checked when it was made; a number that varies from graph to graph cannot be looked at
    value = getattr(owner, name)
    if value is None and optional:
        return
    if isinstance(value, Tensor):
        right = value.is_floating_point() and value.dim() <= 1
        if right and readable(value):
            right = bool((value.isfinite() & (value > 0 if positive else True)).all())
    else:
        right = is_number(value) and math.isfinite(value) and (value > 0 or not positive)
    if not right:
        wanted = f"{'a positive' if positive else 'a finite'} number or a floating tensor of shape () or (heads,)"
        raise InvalidArgument(f"{type(owner).__name__}: {name} must be {wanted}; got {_brief(value)}")


def divisor(total: Tensor) -> Tensor:
    """A row's sum to divide by: one where there is nothing, or so little that its inverse is infinite."""
    return total.masked_fill(total.abs() < torch.finfo(total.dtype).tiny, 1.0)


def _hide(values: Tensor, keep: Tensor | None, fill: float = 0.0) -> Tensor:
    return values if keep is None else values.masked_fill(~keep, fill)


def _divide(coefficients: Tensor, keep: Tensor | None, division: Division | None) -> Tensor:
    if division == "sum":
        return coefficients / divisor(coefficients.sum(dim=-1, keepdim=True))
    if division == "count":
        if keep is None:
            return coefficients / max(1, coefficients.shape[-1])
        seen = keep.expand(*keep.shape[:-1], coefficients.shape[-1])
        return coefficients / seen.sum(dim=-1, keepdim=True).clamp_min(1)
    return coefficients


def _tensors_of(items: Iterable[tuple[str, Any]]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, value in items:
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, Kernel):
            tensors |= {f"{name}.{inner}": tensor for inner, tensor in value.tensors().items()}
        elif isinstance(value, tuple):
            tensors |= _tensors_of([(f"{name}.{n}", part) for n, part in enumerate(value)])
    return tensors


def _with_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A parameter with what `tensors` has under its name or below it."""
    if isinstance(value, Kernel):
        return value.with_tensors({n[len(name) + 1 :]: t for n, t in tensors.items() if n.startswith(f"{name}.")})
    if isinstance(value, tuple):
        return tuple([_with_tensors(part, f"{name}.{n}", tensors) for n, part in enumerate(value)])
    return tensors.get(name, value)


def _read(value: Any) -> Any:
    if isinstance(value, dict) and "type" in value:
        return Kernel.from_dict(value)
    return tuple(_read(part) for part in value) if isinstance(value, list) else decode(value)


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        flat = value.detach().flatten()
        shown = ", ".join(f"{x:.4g}" for x in flat[:4].tolist()) if flat.device.type != "meta" else ""
        more = ", ..." if flat.numel() > 4 else ""
        return f"tensor({shown}{more}; shape={tuple(value.shape)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_brief, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b)))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b)


def _key(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_key, value))
    return (value.dtype, value.shape) if isinstance(value, Tensor) else value

"""The network: layers of coefficients that depend on inner products alone, and a head that answers in scalars or vectors."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument
from heedful.nn import InvariantCoefficients, Module

Group = Literal["O", "SO"]
Output = Literal["scalar", "vector"]
Translation = Literal["invariant", "equivariant"]


class EquivariantNetwork(Module):
    r"""Sets of points with vectors and scalars, to scalars that do not turn with space or vectors that do.

    Point i of a case has `vectors` vectors in d dimensions (its position first, where there is one) and `scalars` numbers. Vectors are
    mixed into `channels` of them, numbers into `width` of them, and `layers` times

    $$x_i \leftarrow x_i + A\,\hat x, \qquad s_i \leftarrow s_i + h(\hat x, s)$$

    with an `InvariantCoefficients` layer (Ma & Ying 2023, Prop. 3.2) and $\hat x$ the vectors divided by their root mean square over the
    case, whose logarithm is one of the scalars: a large case and a small one are alike but for that number.

    The symmetries hold for any weights: `group="O"` turns and mirrors; `"SO"` only turns, for which every layer may add the vector
    that is perpendicular to d - 1 of a point's own (the cross product in space), a mirrored case being another one; `translation`
    takes positions relative to their centre, and `"equivariant"` outcomes move along; with `permutation` points have no order,
    else each of `max_points` places has learned scalars of its own. Where points have no vectors, they are sets of scalars.

    With `per_point` every point has an answer, else the case; `outputs` scalars or vectors each. A vector answer is a combination of the
    vectors at hand: with translation, of those relative to the centre.

    >>> import torch
    >>> network = EquivariantNetwork(3, vectors=2, scalars=1, output="vector", per_point=True)
    >>> network(torch.randn(4, 5, 2, 3), torch.randn(4, 5, 1)).shape
    torch.Size([4, 5, 1, 3])
    """

    def __init__(
        self,
        dim: int,
        vectors: int = 1,
        scalars: int = 0,
        *,
        outputs: int = 1,
        output: Output = "scalar",
        per_point: bool = False,
        group: Group = "O",
        translation: Translation | None = None,
        permutation: bool = True,
        max_points: int | None = None,
        layers: int = 4,
        channels: int = 8,
        width: int = 32,
        units: int = 16,
        depth: int = 1,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_whole(dim=dim, outputs=outputs, layers=layers, channels=channels, width=width, units=units, depth=depth)
        check_whole(0, vectors=vectors, scalars=scalars)
        check_whole(optional=True, max_points=max_points)
        check_choice(Group, group=group)
        check_choice(Output, output=output)
        check_choice(Translation, optional=True, translation=translation)
        if not vectors and (output == "vector" or translation):
            raise InvalidArgument("a vector answer, or a translation, needs points that have vectors")
        if not permutation and max_points is None:
            raise InvalidArgument("permutation=False has scalars for each place: give max_points")
        self.dim, self.vectors, self.scalars, self.outputs, self.output = dim, vectors, scalars, outputs, output
        self.per_point, self.group, self.translation = per_point, group, translation
        self.permutation, self.max_points = permutation, max_points
        self.layers, self.channels, self.width, self.units, self.depth = layers, channels, width, units, depth
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        channels = channels if vectors else 0
        self.places = None if permutation else nn.Parameter(torch.randn(max_points or 0, width, **place))
        self.lift = nn.Linear(vectors, channels, bias=False, **place) if vectors else None
        self.embedding = nn.Linear(scalars + 1, width, **place)
        sizes: dict[str, Any] = {"units": units, "depth": depth, "hidden": 2 * width, "out_scalars": width}
        more = int(group == "SO" and vectors > 0)
        self.norms = nn.ModuleList(nn.LayerNorm(width, **place) for _ in range(layers + 1))
        self.coefficients = nn.ModuleList(
            InvariantCoefficients(channels + more, width, out_channels=channels, **sizes, **place)
            for _ in range(layers)
        )
        self.perpendicular = nn.ModuleList(
            nn.Linear(channels, max(dim - 1, 1), bias=False, **place) for _ in range(layers if more else 0)
        )
        count = outputs * channels if output == "vector" else outputs
        self.head = nn.Sequential(nn.Linear(width, 2 * width, **place), nn.SiLU(), nn.Linear(2 * width, count, **place))
        with torch.no_grad():
            for layer in self.coefficients:
                layer.mix.mul_(0.1)  # type: ignore[operator]

    def forward(self, vectors: Tensor, scalars: Tensor, padding: Tensor | None = None) -> Tensor:
        """Vectors `(B, n, vectors, d)`, scalars `(B, n, scalars)`, padding `(B, n)`, True where there is no point.

        Returns `(B, outputs)` or `(B, outputs, d)`, and with `per_point` one for each of n points behind the batch.
        """
        self._check(vectors, scalars, padding)
        there = torch.ones_like(scalars[..., :1].sum(-1, keepdim=True)) if padding is None else (~padding)[..., None]
        there = there.to(vectors.dtype)  # [B, n, 1]
        if padding is not None:
            vectors = vectors.masked_fill(padding[..., None, None], 0.0)
            scalars = scalars.masked_fill(padding[..., None], 0.0)
        centre = None
        if self.translation is not None:
            centre = _mean(vectors[:, :, 0], there)[:, None]
            first = (vectors[:, :, 0] - centre) * there
            vectors = torch.cat((first[:, :, None], vectors[:, :, 1:]), dim=2)
        x = vectors if self.lift is None else self.lift(vectors.mT).mT  # [B, n, C, d]
        size, x = self._sized(x, there)
        s = self.embedding(torch.cat((scalars, size.log().expand(*scalars.shape[:2], 1)), dim=-1))
        if self.places is not None:
            s = s + self.places[: s.shape[1]]
        for at, layer in enumerate(self.coefficients):
            _, unit = self._sized(x, there)
            if len(self.perpendicular):
                others = self.perpendicular[at](unit.mT).mT[:, :, : self.dim - 1]
                # A product of vectors that are nearly parallel at first; without its size it would be too small to learn from.
                _, across = self._sized(perpendicular(others)[:, :, None], there, 1e-4)
                unit = torch.cat((unit, across), dim=2)
            out = layer(unit, scalars=self.norms[at](s), key_padding_mask=padding)
            x, s = x + out.vectors, s + out.scalars
        answer = self.head(self.norms[-1](s))
        if self.output == "scalar":
            return answer if self.per_point else _mean(answer, there)
        answer = answer.unflatten(-1, (self.outputs, -1)) @ (x * size[..., None])  # [B, n, outputs, d]
        answer = answer if self.per_point else _mean(answer, there[..., None])
        if self.translation == "equivariant":
            assert centre is not None
            moved = (centre + first if self.per_point else centre)[:, :, None]
            answer = answer + (moved if self.per_point else moved[:, 0])
        return answer

    def _check(self, vectors: Tensor, scalars: Tensor, padding: Tensor | None) -> None:
        wanted = {"vectors": (vectors, (self.vectors, self.dim)), "scalars": (scalars, (self.scalars,))}
        for name, (tensor, shape) in wanted.items():
            if tensor.dim() != 2 + len(shape) or tensor.shape[2:] != shape or tensor.shape[:2] != vectors.shape[:2]:
                expected = ", ".join(str(size) for size in shape)
                raise InvalidArgument(f"{name} must have shape (batch, n, {expected}); got {tuple(tensor.shape)}")
        if padding is not None and padding.shape != vectors.shape[:2]:
            raise InvalidArgument(f"padding must have shape {tuple(vectors.shape[:2])}; got {tuple(padding.shape)}")
        if self.places is not None and vectors.shape[1] > len(self.places):
            raise InvalidArgument(f"there are places for max_points={self.max_points}; got {vectors.shape[1]} points")

    def _sized(self, x: Tensor, there: Tensor, least: float = 1e-12) -> tuple[Tensor, Tensor]:
        """The root mean square of all vectors of a case, `[B, 1, 1]`, and the vectors divided by it."""
        if not x.shape[2]:
            return x.new_ones(x.shape[0], 1, 1), x
        size = (_mean(x.square().mean(dim=(-2, -1))[..., None], there) + least).sqrt()[:, :, None]  # [B, 1, 1]
        return size, x / size[..., None]


def _mean(values: Tensor, there: Tensor) -> Tensor:
    """Over the points that are there, axis 1."""
    return (values * there).sum(dim=1) / there.sum(dim=1).clamp_min(1)


def perpendicular(vectors: Tensor) -> Tensor:
    r"""The vector perpendicular to d - 1 others in d dimensions, `[..., d - 1, d]` -> `[..., d]`: the cross product where d = 3.

    Its k-th entry is $(-1)^{k} \det$ of the others without their k-th column. Turning the others turns it; mirroring them mirrors it and
    changes its sign. In one dimension it is 1.

    >>> import torch
    >>> perpendicular(torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]))
    tensor([0., 0., 2.])
    """
    d = vectors.shape[-1]
    if vectors.shape[-2] != d - 1:
        raise InvalidArgument(
            f"there is one vector perpendicular to {d - 1} in {d} dimensions; got {vectors.shape[-2]}"
        )
    if d == 1:
        return vectors.new_ones(*vectors.shape[:-2], 1)
    if d == 3:
        return torch.linalg.cross(vectors[..., 0, :], vectors[..., 1, :])
    without = [torch.cat((vectors[..., :k], vectors[..., k + 1 :]), dim=-1) for k in range(d)]
    return torch.stack([(-1) ** k * torch.linalg.det(one) for k, one in enumerate(without)], dim=-1)

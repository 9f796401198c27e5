"""From black box to formula: which form of attention the coefficients of f have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful._plot import Axes, axes
from heedful._result import Result
from heedful._runtime import undisturbed
from heedful.lens.symmetry.callee import Callee, Function
from heedful.lens.symmetry.coefficients import recover

# A form is named when it explains this share of what the coefficients vary, on inputs it was not fitted to.
EXPLAINED = 0.999


@dataclass(frozen=True)
class Candidate(Result):
    """One form with its fitted numbers, and the share of variance it explains on fresh inputs."""

    form: str
    expression: str
    coordinates: str
    score: float
    parameters: int


@dataclass(frozen=True)
class Formula(Result):
    """Every candidate, best first; `residual` is the largest part of f that no coefficients explain."""

    name: str
    candidates: tuple[Candidate, ...]
    residual: float

    _also = ("identified",)

    @property
    def best(self) -> Candidate:
        """The simplest of those that explain f, or else the one that explains most."""
        return self.candidates[0]

    @property
    def identified(self) -> bool:
        """Whether f is a combination of its inputs, and a form explains its coefficients."""
        return self.residual < 1e-5 and self.best.score >= EXPLAINED

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        if self.residual >= 1e-5:
            return f"{self.name}: no attention, a share {self.residual:.2g} of it is outside the span of its inputs"
        if not self.identified:
            return f"{self.name}: none of the forms; {self.best.form} comes nearest (R2 = {self.best.score:.4f})"
        return f"{self.name}: {self.best.form}, {self.best.expression} on {self.best.coordinates} (R2 = {self.best.score:.6f})"

    def plot(self, ax: Axes | None = None) -> Axes:
        """How much each form explains."""
        ax = axes(ax)
        shown = self.candidates[:8][::-1]
        ax.barh([f"{one.form}, {one.coordinates}" for one in shown], [max(one.score, 0.0) for one in shown])
        ax.set(xlabel="R2 of the coefficients on fresh inputs", title=self.name, xlim=(0, 1))
        return ax

    def __str__(self) -> str:
        rows = [f"  {c.score:>9.5f}  {c.form:<24} {c.expression} on {c.coordinates}" for c in self.candidates[:6]]
        return "\n".join([self.verdict, "         R2  form", *rows])


class Coordinates(NamedTuple):
    """What pairs are compared by: inner products s `[n, m]`, squared norms of both sides, and s as linear features."""

    name: str
    features: Tensor
    query: Tensor | None
    key: Tensor | None


class Family(NamedTuple):
    """A link that makes coefficients linear in features, and its inverse; rows divided by their sum or not."""

    name: str
    expression: str
    link: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    normalised: bool
    kind: str


# Coefficients this small, relative to the largest, are rounding: nothing can be read off their logarithm.
TINY = 1e-7


def _as_it_is(a: Tensor) -> Tensor:
    return a


def _positive(a: Tensor) -> Tensor:
    """NaN where a coefficient is too small to tell."""
    return a.where(a > TINY * a.abs().max(), torch.nan)


FAMILIES = (
    Family("constant", "a + b [i = j]", _as_it_is, _as_it_is, False, "constant"),
    Family("linear attention", "a s_ij + b", _as_it_is, _as_it_is, False, "dot"),
    Family("cosine attention", "a cos_ij + b", _as_it_is, _as_it_is, False, "cosine"),
    Family("quadratic attention", "a s_ij^2 + b s_ij + c", _as_it_is, _as_it_is, False, "square"),
    Family("relu attention", "relu(a s_ij)", _positive, torch.relu, False, "dot only"),
    Family("exponential attention", "exp(a s_ij + b)", lambda a: _positive(a).log(), torch.exp, False, "dot"),
    Family("sigmoid attention", "sigmoid(a s_ij + b)", lambda a: _positive(a).logit(), torch.sigmoid, False, "dot"),
    Family(
        "Gaussian attention", "exp(-a |x_i - x_j|^2 + b)", lambda a: _positive(a).log(), torch.exp, False, "distance"
    ),
    Family("softmax attention", "softmax_j(a s_ij)", lambda a: _positive(a).log(), torch.exp, True, "dot"),
    Family(
        "normalised Gaussian", "softmax_j(-a |x_i - x_j|^2)", lambda a: _positive(a).log(), torch.exp, True, "distance"
    ),
)


def identify(
    f: Function, *, d: int, n: int = 3, k: int = 0, samples: int = 60, seed: int = 0, batched: bool | None = None
) -> Formula:
    r"""Names the form of attention that f computes, from its outputs alone.

    At random inputs the coefficients $C_{ij}$ on tokens (and on knowledge, where it is read) are recovered, see
    `recover_coefficients`. Each form is a link that makes them linear: $\log C_{ij} - \overline{\log C_{i\cdot}}$ is linear in
    $s_{ij}$ for softmax, say. It is fitted by least squares with $s_{ij}$ from the inputs ($x_i \cdot x_j$), from the
    knowledge ($Zx_i \cdot Zx_j$) or from a general bilinear form ($x_i^T M x_j$, learned queries and keys), with and without a
    residual term, and judged by $R^2$ of the coefficients themselves on inputs it was not fitted to.

    Args:
        d, n, k: n + k must be at most d, so that coefficients are unique.

    >>> import torch
    >>> scale = 0.7
    >>> found = identify(lambda x: x + torch.softmax(scale * x @ x.T, -1) @ x, d=6)
    >>> print(found.verdict)
    <lambda>: residual + softmax attention, [i = j] + softmax_j(0.7 s_ij) on inputs (R2 = 1.000000)
    """
    if n < 2 or n + k > d:
        raise InvalidArgument(f"coefficients are unique for n >= 2 and n + k <= d; got n = {n}, k = {k}, d = {d}")
    callee = Callee(f, batched=batched)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, n, d, generator=generator, dtype=torch.float64)
    z = torch.randn(k, d, generator=generator, dtype=torch.float64) if k else None
    with undisturbed(f):
        results = [recover(callee, rows, z) for rows in x]
    target = torch.stack([one.A for one in results])  # [S, n, n]
    if target.shape[-2] != n:
        raise InvalidArgument(f"{callee.name} returns {target.shape[-2]} rows for {n} tokens; one per token is needed")
    keys = x
    if z is not None:
        read = torch.stack([one.B for one in results if one.B is not None])
        # Knowledge that is only compared with gets no coefficient.
        if float(read.abs().max()) > 1e-9 * float(target.abs().max()):
            target, keys = torch.cat((target, read), -1), torch.cat((x, z.expand(samples, k, d)), 1)
    places = _coordinates(x, keys, z)
    eye = torch.eye(n, keys.shape[1], dtype=torch.float64)
    tried = [
        _fit(form, place, target - shift * eye, target, shift * eye)
        for form in FAMILIES
        for place in places
        for shift in (0.0, 1.0)
        if not (shift and form.kind == "constant") and not (form.kind == "constant" and place is not places[0])
    ]
    fitted = [one for one in tried if one is not None]
    # Forms that explain all but rounding explain equally well; among them the simplest is meant.
    least = max(100 * min(1 - one.score for one in fitted), 1e-9)
    ranked = sorted(fitted, key=lambda one: (max(1 - one.score, least), one.form != "constant", one.parameters))
    return Formula(callee.name, tuple(ranked), max(one.residual for one in results))


def _coordinates(x: Tensor, keys: Tensor, z: Tensor | None) -> list[Coordinates]:
    """The ways to compare, simplest first."""

    def inner(name: str, query: Tensor, key: Tensor) -> Coordinates:
        return Coordinates(name, (query @ key.mT)[..., None], query.square().sum(-1), key.square().sum(-1))

    places = [inner("inputs", x, keys)]
    if z is not None:
        places.append(inner("knowledge", x @ z.mT, keys @ z.mT))
    pairs = torch.einsum("sia,sjb->sijab", x, keys).flatten(-2)
    # More features than pairs to fit them to would explain anything.
    if 4 * pairs.shape[-1] <= pairs[..., 0].numel():
        places.append(Coordinates("learned queries and keys", pairs, None, None))
    return places


def _features(form: Family, place: Coordinates) -> Tensor | None:
    """What the linked coefficients are linear in, `[S, n, m, p]`; None where the form and the coordinates do not meet."""
    s = place.features
    one = torch.ones_like(s[..., :1])
    if form.kind == "constant":
        return torch.cat((one, torch.eye(*s.shape[1:3], dtype=s.dtype).expand(s.shape[:3])[..., None]), -1)
    if form.kind == "dot only":
        return s
    if form.kind == "dot":
        return torch.cat((s, one), -1)
    if place.query is None or place.key is None:
        return None
    query, key = place.query[..., :, None, None], place.key[..., None, :, None]
    if form.kind == "distance":
        return torch.cat((2 * s - query - key, one), -1)
    if form.kind == "cosine":
        return torch.cat((s / (query * key).sqrt(), one), -1)
    return torch.cat((s.square(), s, one), -1)


def _fit(form: Family, place: Coordinates, rest: Tensor, target: Tensor, shift: Tensor) -> Candidate | None:
    """Least squares on half of the inputs, R2 of the coefficients on the other half."""
    features = _features(form, place)
    linked = form.link(rest)
    if features is None:
        return None
    if form.link is not _as_it_is and float(rest.min()) < -TINY * float(rest.abs().max()):
        return None
    half = len(target) // 2
    inputs, wanted = features, linked
    if form.normalised:
        # Dividing a row by its sum adds a number to its logarithms.
        known = linked.isfinite()[..., None]
        seen = known.sum(-2, keepdim=True).clamp_min(1)
        inputs = features - (features * known).sum(-2, keepdim=True) / seen
        wanted = linked - linked.nanmean(-1, keepdim=True)
    rows, values = inputs[:half].flatten(0, -2), wanted[:half].flatten()
    usable = values.isfinite()
    if int(usable.sum()) < max(2 * rows.shape[-1], 0.2 * values.numel()):
        return None
    solved = torch.linalg.lstsq(rows[usable], values[usable, None], driver="gelsd").solution[:, 0]
    score = features[half:] @ solved
    coefficients = score.softmax(-1) if form.normalised else form.inverse(score)
    truth = target[half:]
    total = float((truth - truth.mean()).square().sum())
    error = float((coefficients + shift - truth).square().sum())
    if total < 1e-18 * truth.numel():
        total = max(float(truth.square().sum()), 1e-300)
    plain = not bool(shift.any())
    numbers = 1 if form.normalised or form.kind == "dot only" else features.shape[-1]
    count = (features.shape[-1] if place.query is None else numbers) + (not plain)
    return Candidate(
        form.name if plain else f"residual + {form.name}",
        ("" if plain else "[i = j] + ") + _written(form, place, solved),
        place.name,
        1 - error / total,
        count,
    )


def _written(form: Family, place: Coordinates, solved: Tensor) -> str:
    """The expression with its numbers, where they are few."""
    if place.query is None and form.kind != "constant":
        return form.expression.replace("a s_ij", "s_ij")
    text = form.expression
    least = 1e-6 * float(solved.abs().max())
    for letter, value in zip("abc", solved.tolist(), strict=False):
        number = f"{value if abs(value) > least else 0.0:.3g}"
        text = (
            text.replace(f"{letter} ", f"{number} ", 1)
            if f"{letter} " in text
            else text.replace(f"+ {letter}", f"+ {number}")
        )
    return text.replace("--", "").replace("+ -", "- ")

"""Turning the embedding of a model in place, its outputs unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import isqrt
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from heedful._errors import InvalidArgument, Unsupported
from heedful._plot import Axes, axes
from heedful._result import Result
from heedful.bridges.rotation import RotationPlan, llama_plan
from heedful.convert._probe import Probe, Turning, apart, measure, restored
from heedful.lens.symmetry.callee import Callee, Roles
from heedful.lens.symmetry.moves import haar
from heedful.lens.symmetry.roles import known_roles
from heedful.nn import Attention, Block, KnowledgeAttention


@dataclass(frozen=True)
class Outliers:
    """How far the largest activation of a token stands out before a layer, before and after: mean of max |h| / rms(h)."""

    layer: str
    before: float
    after: float


@dataclass(frozen=True)
class Rotation(Result):
    """What `rotate_` did. `change` and `outliers` are there if a probe was given.

    `checked` is how far outputs moved on random inputs; None where roles were given, or the model did not run.
    """

    model: str
    kind: str
    size: int
    moved: int
    absorbed: int
    untied: bool
    checked: float | None = None
    change: float | None = None
    outliers: tuple[Outliers, ...] = field(default=(), repr=False)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Outliers before each layer, before and after the rotation."""
        if not self.outliers:
            raise InvalidArgument("there is nothing to draw: rotate_(..., probe=inputs) measures activations")
        ax = axes(ax)
        for name in ("before", "after"):
            ax.plot([getattr(one, name) for one in self.outliers], "o-", label=name)
        ax.set(xlabel="layer", ylabel="max / rms of a token", title=f"Outliers before and after a {self.kind} rotation")
        ax.legend()
        return ax

    def __str__(self) -> str:
        lines = [
            f"{self.model}: embedding of size {self.size} turned ({self.kind}), {self.moved} tensors moved, "
            f"{self.absorbed} gains absorbed{', head untied from the embedding table' if self.untied else ''}"
        ]
        for where, change in (("random inputs", self.checked), ("the probe", self.change)):
            if change is not None:
                lines.append(f"  largest relative change of the outputs on {where}: {change:.2g}")
        if self.outliers:
            lines.append("  max / rms of a token   before  after")
            lines += [f"  {one.layer:<21}  {one.before:>6.2f}  {one.after:>5.2f}" for one in self.outliers]
        return "\n".join(lines)


def rotate_(
    model: nn.Module,
    rotation: Tensor | np.ndarray[Any, Any] | Literal["random", "hadamard"] = "random",
    *,
    roles: Roles | Literal["auto"] = "auto",
    probe: Any = None,
    seed: int = 0,
) -> Rotation:
    r"""Turns the embedding of a model in place: each parameter W that lives in it becomes $WQ^T$, $QW$ or $QWQ^T$.

    A language model computes the same logits afterwards; a layer computes $f(XQ^T) = f(X)\,Q^T$. The gain of an RMSNorm does not
    commute with Q: it is first multiplied into the weights that read it (as SliceGPT and QuaRot do), and a head that is
    tied to the embedding table gets its own weight for that. What can be known is checked first. Afterwards outputs on a few
    random inputs are compared: where they moved by more than rounding, every weight gets its old value back. A copy of the
    weights is kept for that until the end, on the CPU. A refusal changes nothing.

    Args:
        model: `nn.MultiheadAttention`, `nn.TransformerEncoderLayer` or our `Block` with RMSNorm, `KnowledgeAttention`, or a
            Hugging Face model of Llama's shape (Llama, Mistral, Qwen2). Others are refused, unless `roles` are given.
        rotation: an orthogonal Q `[d, d]`, `"random"` (Haar), or `"hadamard"` ($Q = H\,\mathrm{diag}(\pm1)/\sqrt d$ by the fast
            transform), which spreads outliers over all coordinates for quantisation.
        roles: parameter names or patterns -> role, as in `check_equivariance`; gains are then left alone, and outputs may
            move.
        probe: inputs for a language model (a tensor, or a dict of arguments): outputs are compared before and after, activations
            before each layer measured.

    >>> import torch
    >>> layer = torch.nn.MultiheadAttention(8, 2, dtype=torch.float64)
    >>> x, q = torch.randn(5, 8, dtype=torch.float64), torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]
    >>> before = layer(x, x, x)[0]
    >>> rotate_(layer, q).moved
    3
    >>> torch.allclose(layer(x @ q.T, x @ q.T, x @ q.T)[0], before @ q.T)
    True
    """
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model must be a torch module; got {kind}")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise Unsupported(f"{kind} has no weights yet (device meta); load them first")
    plan = _plan(model) if roles == "auto" else _given_plan(model, roles)
    how, turn = _turning(rotation, plan.size, seed)
    weights = dict(model.named_parameters(remove_duplicate=False))
    _check(kind, plan, weights)
    gains = _gains(kind, plan, weights)
    outputs, before = measure(model, probe, plan.layers)
    unseen = Probe(model, plan) if roles == "auto" else None
    with restored(model, plan, weights):
        untied = _absorb_gains(model, plan, gains, weights)
        moved = _move(plan, weights, turn)
        checked = None if unseen is None else unseen.change(turn)
        again, after = measure(model, probe, plan.layers)
    change = None
    if outputs is not None and again is not None:
        change = apart(again, turn(outputs) if unseen is not None and plan.turned else outputs)
    outliers = tuple(Outliers(name, before[name], after[name]) for name in plan.layers if name in before)
    return Rotation(kind, how, plan.size, moved, len(gains), untied, checked, change, outliers)


def hadamard(x: Tensor) -> Tensor:
    r"""$x H^T / \sqrt d$ along the last axis by the fast transform: $d \log d$ steps where d is a power of two.

    H is Sylvester's matrix for powers of two, times one of Paley's for d = m 2^k with m - 1 prime or m/2 - 1 prime (12, 20, 28,
    ...), which covers the sizes 384, 768, 896, 3584, 5120 of common models.

    >>> hadamard(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    size = x.shape[-1]
    base = _base(size)
    out = x.reshape(*x.shape[:-1], -1, base.shape[0]) @ base.to(x).mT
    half = out.shape[-2] // 2
    while half:
        pairs = out.reshape(*x.shape[:-1], -1, 2, half, base.shape[0])
        out = torch.stack((pairs.select(-3, 0) + pairs.select(-3, 1), pairs.select(-3, 0) - pairs.select(-3, 1)), -3)
        half //= 2
    return out.reshape(x.shape) / size**0.5


@cache
def _base(size: int) -> Tensor:
    """The Hadamard matrix that is left when powers of two are taken out of the size."""
    odd = size // (size & -size)
    if odd == 1:
        return torch.ones(1, 1)
    order = 4 * odd
    while size % order == 0:
        base = _paley(order)
        if base is not None:
            return base
        order *= 2
    raise Unsupported(
        f"no Hadamard matrix of size {size} is known here: sizes are powers of two times 1, 12, 20, 28 and the like; "
        'use rotation="random"'
    )


def _paley(order: int) -> Tensor | None:
    """Paley's matrix of this order, if there is one from a prime."""
    first, second = order - 1, order // 2 - 1
    if order % 4 == 0 and _prime(first):
        core = _conference(first, -1.0)
        return core + torch.eye(order)
    if order % 4 == 0 and second % 4 == 1 and _prime(second):
        core = _conference(second, 1.0)
        plus, minus = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
        return torch.kron(core, plus) + torch.kron(torch.eye(len(core)), minus)
    return None


def _conference(prime: int, corner: float) -> Tensor:
    """Zero diagonal, then quadratic residues of differences; symmetric for corner 1, skew for -1."""
    squares = {i * i % prime for i in range(1, prime)}
    signs = torch.tensor([0.0] + [1.0 if i in squares else -1.0 for i in range(1, prime)])
    at = torch.arange(prime)
    core = torch.zeros(prime + 1, prime + 1)
    core[0, 1:], core[1:, 0] = 1.0, corner
    core[1:, 1:] = signs[(at[:, None] - at) % prime]
    return core


def _prime(number: int) -> bool:
    return number > 2 and all(number % i for i in range(2, isqrt(number) + 1))


def _turning(rotation: Tensor | np.ndarray[Any, Any] | str, size: int, seed: int) -> tuple[str, Turning]:
    """The name of a rotation, and x -> x Q^T along the last axis."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(rotation, str):
        if rotation == "hadamard":
            signs = 2.0 * torch.randint(2, (size,), generator=generator) - 1.0
            _base(size)
            return rotation, lambda x: hadamard(x * signs.to(x))
        if rotation != "random":
            raise InvalidArgument(f"rotation must be a matrix, 'random' or 'hadamard'; got {rotation!r}")
        q, name = haar(size, generator), rotation
    else:
        if isinstance(rotation, np.ndarray) and rotation.dtype.kind in "fiu":
            rotation = torch.from_numpy(rotation.astype(np.float64))
        if not isinstance(rotation, Tensor) or rotation.is_complex():
            what = f"{type(rotation).__name__} {getattr(rotation, 'dtype', '')}".strip()
            raise InvalidArgument(
                f"rotation must be a matrix of real numbers, in torch or numpy, 'random' or 'hadamard'; got {what}"
            )
        q, name = rotation.detach().to(torch.float64), "given"
        if q.shape != (size, size):
            raise InvalidArgument(f"rotation of shape {tuple(q.shape)}, expected ({size}, {size}), the embedding's")
        off = float((q @ q.mT - torch.eye(size, dtype=q.dtype, device=q.device)).abs().max())
        if not off <= 1e-5:
            raise InvalidArgument(
                f"rotation is not orthogonal: Q Q^T is off the identity by {off:.2g}; use torch.linalg.qr"
            )
    return name, lambda x: x @ q.to(x.device).mT


def _plan(module: Any) -> RotationPlan:
    """How `rotate_` turns a known layer or a Llama-type model."""
    if isinstance(module, nn.TransformerEncoderLayer | Block):
        return _layer_plan(module)
    if isinstance(module, nn.MultiheadAttention | KnowledgeAttention):
        size = int(module.embed_dim)
        widths = getattr(module, "kdim", size), getattr(module, "vdim", size)
        if widths != (size, size):
            raise Unsupported(
                f"keys and values of size {widths} do not live in the embedding of size {size}; give roles"
            )
        needed = {"out_proj.weight": "cols"} if isinstance(module, nn.MultiheadAttention) else {}
        return RotationPlan(size, known_roles(module) | needed)
    return llama_plan(module)


def _layer_plan(layer: Any) -> RotationPlan:
    kind = type(layer).__name__
    if not isinstance(layer.self_attn, nn.MultiheadAttention | Attention):
        raise Unsupported(
            f"{kind} cannot be rotated: its attention is {layer.kernel!r}, and the rotation of a layer is known for kernels alone"
        )
    size = int(layer.self_attn.embed_dim)
    norms = {name: getattr(layer, name) for name in ("norm1", "norm2")}
    for name, norm in norms.items():
        if not isinstance(norm, nn.RMSNorm):
            raise Unsupported(
                f"{kind} cannot be rotated: {name} is {type(norm).__name__}, whose mean and gain single out directions; "
                "give it two norms, layer.norm1, layer.norm2 = nn.RMSNorm(d), nn.RMSNorm(d). In eval mode torch's fused layer "
                "knows LayerNorm alone and raises: torch.backends.mha.set_fastpath_enabled(False)"
            )
    reading = {"norm1": ("self_attn.in_proj_weight",), "norm2": ("linear1.weight",)}
    learned = [name for name, norm in norms.items() if norm.weight is not None]
    needed = {"linear1.weight": "rows", "linear2.weight": "cols", "self_attn.out_proj.weight": "cols"}
    roles = known_roles(layer) | needed
    if layer.norm_first and layer.self_attn.in_proj_weight is not None:
        return RotationPlan(size, roles, {f"{name}.weight": reading[name] for name in learned})
    why = "its output is also added to: set norm_first=True"
    return RotationPlan(size, roles, stuck={f"{name}.weight": why for name in learned})


def _given_plan(model: nn.Module, roles: Roles) -> RotationPlan:
    callee = Callee(model, roles=roles)
    own, shapes = callee.roles, callee.shapes
    sizes = {shapes[name][-2 if role == "cols" else -1] for name, role in own.items() if role != "fixed"}
    if len(sizes) != 1:
        raise InvalidArgument(f"roles must agree on one size of the embedding; got {sorted(sizes)}")
    return RotationPlan(sizes.pop(), dict(own))


def _check(kind: str, plan: RotationPlan, weights: Mapping[str, Tensor]) -> None:
    """Refuses whatever would go wrong halfway."""
    seen: dict[int, tuple[str, str]] = {}
    readers = [reader for reading in plan.gains.values() for reader in reading]
    for name, role in (dict.fromkeys((*plan.gains, *plan.stuck, *readers), "fixed") | plan.roles).items():
        weight = weights.get(name)
        if weight is None:
            raise Unsupported(f"{kind} cannot be rotated: {name} is no parameter; rotate before quantising")
        if weight.is_inference() and not torch.is_inference_mode_enabled():
            raise Unsupported(
                f"{name} was made under torch.inference_mode and cannot be changed; load the model outside it"
            )
        first, same = seen.setdefault(id(weight), (name, role))
        if same != role:
            raise Unsupported(f"{first} ({same}) and {name} ({role}) are the same tensor, which cannot move both ways")
        if role == "fixed":
            continue
        if not weight.is_floating_point():
            raise Unsupported(f"{name} is {weight.dtype}, which cannot be turned; rotate before quantising")
        wide = weight.shape[-1] == plan.size if role != "cols" else weight.shape[-2] == plan.size
        if not wide or (role == "both" and weight.shape[-2] != plan.size):
            raise InvalidArgument(
                f"{name} of shape {tuple(weight.shape)} cannot have the role {role!r} for d = {plan.size}"
            )
    for name, why in plan.stuck.items():
        gain = weights[name].detach()
        if not torch.equal(gain, gain[:1].expand_as(gain)):
            raise Unsupported(f"{kind} cannot be rotated: the gain {name} can be multiplied into no weight, {why}")


def _gains(kind: str, plan: RotationPlan, weights: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Each gain once, with one name for each weight that reads it, however many norms and layers share them."""
    gains: dict[int, tuple[str, dict[int, str]]] = {}
    through: dict[int, int] = {}
    for name, readers in plan.gains.items():
        gain = weights[name]
        _, reading = gains.setdefault(id(gain), (name, {}))
        for reader in readers:
            other = through.setdefault(id(weights[reader]), id(gain))
            if other != id(gain) and not all(_ones(weights[one]) for one in (name, gains[other][0])):
                raise Unsupported(
                    f"{kind} cannot be rotated: {reader} is read through two gains, {gains[other][0]} and {name}, and can be "
                    "multiplied by one alone; give each its own weight"
                )
            reading.setdefault(id(weights[reader]), reader)
    return {name: tuple(reading.values()) for name, reading in gains.values()}


def _ones(gain: Tensor) -> bool:
    return bool((gain == 1).all())


@torch.no_grad()
def _absorb_gains(
    model: Any, plan: RotationPlan, gains: Mapping[str, tuple[str, ...]], weights: dict[str, nn.Parameter]
) -> bool:
    """Multiplies gains into the weights that read them; returns whether a tied head got its own weight."""
    untied = False
    for name, readers in gains.items():
        gain = weights[name].double()
        # A gain of ones needs nothing, and leaves a tied head tied.
        if _ones(gain):
            continue
        for reader in readers:
            if plan.tied is not None and reader == f"{plan.tied}.weight":
                head = model.get_submodule(plan.tied)
                head.weight = weights[reader] = nn.Parameter(weights[reader].clone(), weights[reader].requires_grad)
                _forget_tie(model, reader)
                untied = True
            weights[reader].copy_(weights[reader].double() * gain)
        weights[name].fill_(1.0)
    return untied


def _forget_tie(model: Any, name: str) -> None:
    """Tells a Hugging Face model that this weight is its own, so that saving and loading keep it."""
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        model.config.tie_word_embeddings = False
    if name in (getattr(model, "all_tied_weights_keys", None) or {}):
        model.all_tied_weights_keys.pop(name)


@torch.no_grad()
def _move(plan: RotationPlan, weights: Mapping[str, nn.Parameter], turn: Turning) -> int:
    moved: set[int] = set()
    for name, role in plan.roles.items():
        weight = weights[name]
        if role == "fixed" or id(weight) in moved:
            continue
        wide = weight.double()
        if role in ("rows", "both", "bias"):
            wide = turn(wide)
        if role in ("cols", "both"):
            wide = turn(wide.mT).mT
        weight.copy_(wide)
        moved.add(id(weight))
    return len(moved)

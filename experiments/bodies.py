"""Charged particles in space: the N-body data of the E(n)-GNN literature, simulated here, and the models that are compared on it.

The system of Satorras et al. 2021 (*E(n) Equivariant Graph Neural Networks*, section 5.1), after Kipf et al. 2018: five particles of
charge ±1 with equal chances, positions standard normal, velocities of length 0.5 in a random direction, no walls, force

    F_i = Σ_{j ≠ i} q_i q_j (x_i - x_j) / |x_i - x_j|³,    each component of it cut to [-100, 100],

and steps `v += 0.001 F`, `x += 0.001 v`. The published files hold every 100th step, the first of them at index 0, so that frame 30 is
step 3100. From positions, velocities and charges at frame 30, the positions at frame 40 are asked for, 1000 steps later. These are the
constants of the published generator (github.com/vgsatorras/egnn, `n_body_system/dataset`), and its random numbers: the same draws from
the same seed, 10,000 simulations for training, 2,000 for validation, 2,000 for the test. So the data are the published ones, but for
rounding, which grows where particles come close. There distances are exact here, and expanded squares in the original.

The cut of the forces is by component, so where it acts it breaks the symmetry under rotations, slightly.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

PARTICLES, STEP, LARGEST_FORCE, SPEED = 5, 0.001, 100.0, 0.5
FIRST, LAST = 3100, 4100  # steps at frames 30 and 40
FRAMES, SEED = 49, 43
PUBLISHED = (10_000, 2_000, 2_000)  # training, validation, test
CHUNK = 500


class Bodies(NamedTuple):
    """Samples: position, velocity and wanted position `[S, n, 3]`, charge `[S, n]`."""

    position: Tensor
    velocity: Tensor
    charge: Tensor
    wanted: Tensor

    def rows(self, chosen: slice | Tensor) -> Bodies:
        return Bodies(*(part[chosen] for part in self))

    def to(self, device: str, dtype: torch.dtype) -> Bodies:
        return Bodies(*(part.to(device, dtype) for part in self))


def forces(position: Tensor, charge: Tensor) -> Tensor:
    """The uncut force on every particle, `[S, n, 3]` from `[S, n, 3]` and `[S, n]`."""
    return _forces(_coordinates(position), *_pairs(charge)).permute(2, 0, 1)


def moved(position: Tensor, velocity: Tensor, charge: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Position and velocity after so many steps."""
    pairs, product = _pairs(charge)
    x, v = _coordinates(position), _coordinates(velocity)
    for _ in range(steps):
        v.add_(_forces(x, pairs, product).clamp_(-LARGEST_FORCE, LARGEST_FORCE), alpha=STEP)
        x.add_(v, alpha=STEP)
    return x.permute(2, 0, 1).contiguous(), v.permute(2, 0, 1).contiguous()


def _coordinates(vectors: Tensor) -> Tensor:
    """A copy `[n, 3, S]`: long rows, one of each coordinate."""
    return vectors.permute(1, 2, 0).clone(memory_format=torch.contiguous_format)


def _pairs(charge: Tensor) -> tuple[Tensor, Tensor]:
    """Which pair has which particles, 1 and -1 `[pairs, n]`, and the product of its charges `[pairs, 1, S]`."""
    n = charge.shape[-1]
    i, j = torch.triu_indices(n, n, 1)
    return (torch.eye(n)[i] - torch.eye(n)[j]).to(charge), (charge[:, i] * charge[:, j]).mT[:, None].contiguous()


def _forces(x: Tensor, pairs: Tensor, product: Tensor) -> Tensor:
    apart = (pairs @ x.flatten(1)).unflatten(1, x.shape[1:])
    squared = apart.square().sum(1, keepdim=True)
    apart *= product / (squared * squared.sqrt())
    return (pairs.mT @ apart.flatten(1)).view_as(x)  # a force and its reaction


def beginning(count: int, generator: np.random.RandomState, n: int = PARTICLES) -> tuple[Tensor, Tensor, Tensor]:
    """Position, velocity and charge of `count` simulations at step 0, in float64, drawn as the published generator draws."""
    position, direction, charge = np.empty((count, n, 3)), np.empty((count, n, 3)), np.empty((count, n))
    for at in range(count):
        charge[at] = generator.choice([-1.0, 0.0, 1.0], size=n, p=[0.5, 0.0, 0.5])
        position[at] = generator.randn(3, n).T
        direction[at] = generator.randn(3, n).T
        generator.randn(2, FRAMES, 3, n)  # it draws noise of every frame, of variance 0
    velocity = SPEED * direction / np.linalg.norm(direction, axis=-1, keepdims=True)
    return torch.from_numpy(position), torch.from_numpy(velocity), torch.from_numpy(charge)


def simulated(count: int, generator: np.random.RandomState, first: int = FIRST, last: int = LAST) -> Bodies:
    """So many samples, in float64."""
    chunks = []
    for start in range(0, count, CHUNK):
        position, velocity, charge = beginning(min(CHUNK, count - start), generator)
        position, velocity = moved(position, velocity, charge, first)
        wanted, _ = moved(position, velocity, charge, last - first)
        chunks.append((position, velocity, charge, wanted))
    return Bodies(*map(torch.cat, zip(*chunks, strict=True)))


def samples(folder: Path, counts: tuple[int, ...] = PUBLISHED) -> list[Bodies]:
    """Parts of so many samples, drawn one after another, from their file in the folder, which is written where there is none."""
    file = folder / f"bodies-{'-'.join(map(str, counts))}.npz"
    if not file.is_file():
        whole = simulated(sum(counts), np.random.RandomState(SEED))
        part = file.with_suffix(".part.npz")
        np.savez(part, **{name: array.numpy() for name, array in whole._asdict().items()})
        part.replace(file)
    with np.load(file) as arrays:
        whole = Bodies(*(torch.from_numpy(arrays[name]) for name in Bodies._fields))
    return [Bodies(*parts) for parts in zip(*(array.split(counts) for array in whole), strict=True)]


def centred(position: Tensor) -> Tensor:
    return position - position.mean(-2, keepdim=True)


def silu(*sizes: int) -> list[nn.Module]:
    """Linear maps of these sizes with SiLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.SiLU()]
    return layers[:-1]


class EquivariantConvolution(nn.Module):
    """One layer of EGNN, eqs. 3, 5, 6 and 7: with the pair's attributes a_ij and r_ij = x_i - x_j,

        m_ij = φ_e(h_i, h_j, |r_ij|², a_ij),   x_i += mean_{j ≠ i} r_ij φ_x(m_ij) + φ_v(h_i) v_i,   h_i += φ_h(h_i, Σ_{j ≠ i} m_ij).

    As in the published code, v is the first layer's in every layer.
    """

    def __init__(self, width: int, attributes: int) -> None:
        super().__init__()
        self.first = nn.Linear(2 * width + 1 + attributes, width)
        self.message = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        last = nn.Linear(width, 1, bias=False)
        nn.init.xavier_uniform_(last.weight, gain=0.001)
        self.shift = nn.Sequential(nn.Linear(width, width), nn.SiLU(), last)
        self.drift = nn.Sequential(*silu(width, width, 1))
        self.node = nn.Sequential(*silu(2 * width, width, width))

    def forward(self, h: Tensor, x: Tensor, v: Tensor, attributes: Tensor) -> tuple[Tensor, Tensor]:
        n, width = h.shape[-2:]
        apart = x[:, :, None] - x[:, None]  # [B, n, n, 3]
        pair = torch.cat((apart.square().sum(-1, keepdim=True), attributes), -1)
        # The first linear map by parts: those of h_i and h_j once for each particle instead of each pair.
        of_i, of_j, of_pair = self.first.weight.split((width, width, pair.shape[-1]), 1)
        first = (h @ of_i.mT + self.first.bias)[:, :, None] + (h @ of_j.mT)[:, None] + pair @ of_pair.mT
        message = self.message(first)  # [B, n, n, width]
        x = x + (apart * self.shift(message)).sum(2) / (n - 1) + self.drift(h) * v
        others = (1 - torch.eye(n, dtype=h.dtype, device=h.device))[..., None]
        return h + self.node(torch.cat((h, (others * message).sum(2)), -1)), x


class EGNN(nn.Module):
    """The published network: h is the speed, a pair's attributes the product of charges and the squared distance at the beginning."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, width)
        self.layers = nn.ModuleList(EquivariantConvolution(width, 2) for _ in range(depth))

    def forward(self, position: Tensor, velocity: Tensor, charge: Tensor) -> Tensor:
        product = charge[:, :, None] * charge[:, None]
        squared = (position[:, :, None] - position[:, None]).square().sum(-1)
        attributes = torch.stack((product, squared), -1)
        h, x = self.embedding(velocity.norm(dim=-1, keepdim=True)), position
        for layer in self.layers:
            h, x = layer(h, x, velocity, attributes)
        return x


class Perceptron(nn.Module):
    """An MLP of everything in one row, for a fixed number of particles; knows no symmetry but that of the origin."""

    def __init__(self, width: int = 256, depth: int = 3, n: int = PARTICLES) -> None:
        super().__init__()
        self.layers = nn.Sequential(*silu(7 * n, *[width] * depth, 3 * n))

    def forward(self, position: Tensor, velocity: Tensor, charge: Tensor) -> Tensor:
        row = torch.cat((centred(position).flatten(1), velocity.flatten(1), charge), 1)
        return position + self.layers(row).view_as(position)


class PlainTransformer(nn.Module):
    """A pre-norm Transformer with a token for each particle: knows that particles may be exchanged, not that space may be turned."""

    def __init__(self, width: int = 64, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Linear(7, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.displacement = nn.Linear(width, 3)

    def forward(self, position: Tensor, velocity: Tensor, charge: Tensor) -> Tensor:
        tokens = torch.cat((centred(position), velocity, charge[..., None]), -1)
        return position + self.displacement(self.layers(self.embedding(tokens)))


def fitted_time(data: Bodies) -> float:
    """The t of `x + t v` that fits best."""
    return float(((data.wanted - data.position) * data.velocity).sum() / data.velocity.square().sum())

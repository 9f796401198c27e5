"""Charged particles in space: the N-body data of the E(n)-GNN literature, simulated here, and the models that are compared on it.

The system of Satorras et al. 2021 (*E(n) Equivariant Graph Neural Networks*, section 5.1), after Kipf et al. 2018: five particles of
charge ±1 with equal chances, positions standard normal, velocities of length 0.5 in a random direction, no walls, force

    F_i = Σ_{j ≠ i} q_i q_j (x_i - x_j) / |x_i - x_j|³,    each component of it cut to [-100, 100],

and steps `v += 0.001 F`, `x += 0.001 v`. The published files hold every 100th step, the first of them at index 0, so that frame 30 is
step 3100. From positions, velocities and charges at frame 30, the positions at frame 40 are asked for, 1000 steps later. These are the
constants of the published generator (github.com/vgsatorras/egnn, `n_body_system/dataset`). Two things differ: distances are taken from
differences of positions, not from the expanded square, which is inexact for close particles; and simulations are drawn in chunks, each
with a seed of its own, so that the data are the same however many processes drew them.

The cut of the forces is by component, so where it acts it breaks the symmetry under rotations, slightly.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from experiments.store import workers

PARTICLES, STEP, LARGEST_FORCE, SPEED = 5, 0.001, 100.0, 0.5
FIRST, LAST = 3100, 4100  # steps at frames 30 and 40
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
    """The uncut force on every particle `[..., n, 3]`."""
    n = position.shape[-2]
    i, j = torch.triu_indices(n, n, 1)
    # [pairs, n]: the difference of two positions, and, transposed, a force and its reaction
    pairs = (torch.eye(n)[i] - torch.eye(n)[j]).to(position)
    apart = pairs @ position
    squared = apart.square().sum(-1, keepdim=True)
    strength = (charge[..., i] * charge[..., j])[..., None]
    return pairs.mT @ (apart * (strength / (squared * squared.sqrt())))


def moved(position: Tensor, velocity: Tensor, charge: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Position and velocity after so many steps."""
    for _ in range(steps):
        velocity = velocity + STEP * forces(position, charge).clamp_(-LARGEST_FORCE, LARGEST_FORCE)
        position = position + STEP * velocity
    return position, velocity


def beginning(count: int, seed: int, n: int = PARTICLES) -> tuple[Tensor, Tensor, Tensor]:
    """Position, velocity and charge of `count` simulations at step 0, in float64."""
    generator = torch.Generator().manual_seed(seed)
    charge = 2.0 * torch.randint(2, (count, n), generator=generator).double() - 1.0
    position, direction = torch.randn(2, count, n, 3, generator=generator, dtype=torch.float64)
    return position, SPEED * nn.functional.normalize(direction, dim=-1), charge


def simulated(count: int, seed: int, first: int = FIRST, last: int = LAST) -> list[np.ndarray]:
    """One chunk of samples, as arrays: what a process can hand back."""
    position, velocity, charge = beginning(count, seed)
    position, velocity = moved(position, velocity, charge, first)
    wanted, _ = moved(position, velocity, charge, last - first)
    return [part.numpy() for part in Bodies(position, velocity, charge, wanted)]


def samples(folder: Path, count: int, seed: int, jobs: int = 1) -> Bodies:
    """So many samples in float64, simulated where the folder has no file of them."""
    file = folder / f"bodies-{count}-{seed}.npz"
    if not file.is_file():
        sizes = [min(CHUNK, count - start) for start in range(0, count, CHUNK)]
        seeds = [1_000 * seed + chunk for chunk in range(len(sizes))]
        if jobs == 1:
            chunks = list(map(simulated, sizes, seeds))
        else:
            with workers(min(jobs, len(sizes))) as pool:
                chunks = list(pool.map(simulated, sizes, seeds))
        whole = map(np.concatenate, zip(*chunks, strict=True))
        part = file.with_suffix(".part.npz")
        np.savez(part, **dict(zip(Bodies._fields, whole, strict=True)))
        part.replace(file)
    with np.load(file) as arrays:
        return Bodies(*(torch.from_numpy(arrays[name]) for name in Bodies._fields))


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

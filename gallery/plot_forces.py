"""Which law of force does attention learn? Coefficients of an equivariant layer beside Coulomb's law.

Charges $q_i = \\pm 1$ at $x_i$ push and pull one another by $F_i = \\sum_{j \\ne i} q_i q_j (x_i - x_j) / |x_i - x_j|^3$. That is a combination of
positions with coefficients that depend on distances and charges alone: $F = A X$ with $A_{ij} = -q_i q_j / |x_i - x_j|^3$, the form of Prop. 3.2 of
Ma & Ying (2023). `heedful.nn.InvariantCoefficients` is trained on positions, charges and forces of three particles in space, and then asked for
the coefficients it uses. It is given no distances.

Left: its coefficients of particle j in the force on i, for pairs it has never seen, beside the law. Right: the error of forces on new
samples that are turned and mirrored, and on samples of five particles, with the same weights.

Run `python gallery/plot_forces.py [picture.png]`. It takes about a minute, needs the extra plot and no network.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot
from torch import Tensor, nn

from heedful.nn import InvariantCoefficients

NEAREST, STEPS, BATCH = 0.6, 4000, 128


def sample(count: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Positions `[count, n, 3]` about their centre, no two nearer than NEAREST, charges `[count, n, 1]` and forces."""
    x = torch.empty(0, n, 3)
    while len(x) < count:
        drawn = 1.2 * torch.randn(4 * count, n, 3, generator=generator)
        far = torch.cdist(drawn, drawn) + 10 * torch.eye(n)
        x = torch.cat((x, drawn[far.amin((1, 2)) > NEAREST]))[:count]
    charge = 2.0 * torch.randint(2, (count, n, 1), generator=generator) - 1
    apart = x[:, :, None] - x[:, None]
    distance = apart.norm(dim=-1) + torch.eye(n)
    force = (charge * charge.mT / distance**3)[..., None] * apart
    return x - x.mean(1, keepdim=True), charge, force.sum(2)


def train(layer: nn.Module, generator: torch.Generator) -> None:
    optimizer = torch.optim.Adam(layer.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        x, charge, force = sample(BATCH, 3, generator)
        loss = nn.functional.mse_loss(layer(x, scalars=charge).vectors, force)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def relative_error(layer: nn.Module, n: int, turned: bool, generator: torch.Generator) -> float:
    x, charge, force = sample(2000, n, generator)
    if turned:
        turn = torch.linalg.qr(torch.randn(3, 3, generator=generator))[0]
        x, force = x @ turn, force @ turn
    # The layer takes means over the particles it sees; with other numbers of them the sum is what the law has.
    out = layer(x, scalars=charge).vectors * (n / 3)
    return float((out - force).norm() / force.norm())


def main(picture: Path) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    layer = InvariantCoefficients(1, 1, units=48, depth=3)
    train(layer, generator)
    x, charge, _ = sample(400, 3, generator)
    with torch.no_grad():
        learned = layer.coefficients(x, scalars=charge).x[:, 0, 0]
    # Positions sum to zero, so a constant added to a row changes nothing; the law's rows sum to zero.
    learned = learned - learned.mean(-1, keepdim=True)
    distance, sign = torch.cdist(x, x), (charge * charge.mT)
    off = ~torch.eye(3, dtype=torch.bool).expand_as(sign.bool())
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 1), layout="constrained")
    r = np.linspace(NEAREST, 4, 200)
    for kind, name, colour in ((1, "equal charges", "#c0392b"), (-1, "opposite charges", "#2471a3")):
        chosen = off & (sign == kind)
        left.scatter(distance[chosen], learned[chosen], s=5, alpha=0.35, color=colour, label=f"learned, {name}")
        left.plot(r, -kind / r**3, color=colour, linewidth=1.5, label=f"law, {-kind:+d}/r³")
    left.set(xlabel="distance of i and j", ylabel="coefficient of $x_j$ in the force on i", xlim=(0.5, 4), ylim=(-5, 5))
    left.legend(frameon=False, fontsize=8)
    cases = {"new": (3, False), "turned,\nmirrored": (3, True), "five\nparticles": (5, False)}
    errors = {name: relative_error(layer, n, turned, generator) for name, (n, turned) in cases.items()}
    right.bar(list(errors), list(errors.values()), color="#7f8c8d")
    right.set_ylabel("relative error of forces")
    for at, value in enumerate(errors.values()):
        right.text(at, value, f"{value:.2f}", ha="center", va="bottom", fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=150)
    print(
        f"{picture}: relative error of forces", {name.replace(chr(10), " "): round(e, 3) for name, e in errors.items()}
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "forces.png"))

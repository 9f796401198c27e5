"""Where does training send each token? Paths of points through a hundred epochs, with and without LayerNorm.

Three classes of tokens in the plane; a block of attention and a network must carry them to where a small classifier separates them. After each epoch
`heedful.lens.transport.TransportTracker` takes a snapshot of where every token is sent, without disturbing the training.

Above, the paths: small dots are tokens as they are read, large ones where the trained block sends them. Below, how near the movement so far is to the cheapest
one between the same two clouds (optimal transport), at every epoch. On the left each residual branch ends in a LayerNorm, as in the study that
asked whether attention learns optimal transport (Quadrio & Candelieri 2025): over two features it leaves two values of whatever it reads, so tokens are moved
in a few rigid groups, and a movement of rigid groups is optimal by itself. On the right it is left out. There optimality stays near 1 all the same, since
classes move as wholes. "Centred optimality" takes that out; it falls towards what a random pairing of tokens and ends has (the dotted line), and next to
no token ends where the cheapest plan would send it (matching).

Run `python gallery/plot_paths.py [picture.png]`. It takes half a minute, needs the extras transport and plot and no network.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from matplotlib import pyplot
from torch import Tensor, nn

import heedful
from heedful.lens.transport import TransportTracker, distinct_moves

INSTANCES, TOKENS, EPOCHS = 45, 20, 100
CENTRES = torch.tensor([[-2.5, 0.0], [2.5, 0.0], [0.0, 2.5]])


class Block(nn.Module):
    """x + attention, then + network; with `normed`, a LayerNorm at the end of both branches."""

    def __init__(self, normed: bool, heads: int = 10, width: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.inward, self.outward = nn.Linear(2, 3 * heads * width), nn.Linear(heads * width, 2)
        self.network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
        self.norm1, self.norm2 = (nn.LayerNorm(2) if normed else nn.Identity() for _ in range(2))

    def attended(self, x: Tensor) -> Tensor:
        q, k, v = self.inward(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + self.norm1(self.outward(heedful.attend(q, k, v).transpose(1, 2).flatten(2)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attended(x)
        return x + self.norm2(self.network(x))


def trained(normed: bool, x: Tensor, y: Tensor) -> tuple[TransportTracker, int]:
    """The snapshots of a training, and by how many different vectors attention moves tokens in the end."""
    torch.manual_seed(0)
    block, head = Block(normed), nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, len(CENTRES)))
    model = nn.Sequential(block, head)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    optimizer = torch.optim.RMSprop(model.parameters(), 0.01, alpha=0.9)
    with warnings.catch_warnings():
        # The tracker warns of a LayerNorm over two features, which is what is shown here.
        warnings.simplefilter("ignore")
        tracker = TransportTracker(model, block, x, y)
        attention = TransportTracker(block, Block.attended, x)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), y.repeat_interleave(TOKENS)).backward()
        optimizer.step()
        tracker.record()
    attention.record()
    return tracker, distinct_moves(*attention.trajectory)


def main(picture: Path) -> None:
    torch.manual_seed(0)
    y = torch.arange(INSTANCES) % len(CENTRES)
    x = CENTRES[y][:, None] + 2**0.5 * torch.randn(INSTANCES, TOKENS, 2)
    x = (x - x.mean((0, 1))) / x.std((0, 1))
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 9.5), height_ratios=(1.7, 1), layout="constrained")
    for (above, below), normed in zip(axes.T, (True, False), strict=True):
        tracker, moves = trained(normed, x, y)
        name = "with LayerNorm" if normed else "without LayerNorm"
        tracker.plot_paths(above, most=300).set_title(
            f"{name}: {INSTANCES * TOKENS} tokens, {moves} moves of attention"
        )
        tracker.plot(below)
        found = tracker.summary()
        below.axhline(found.centred_baseline, color="C1", lw=1, ls=":")
        below.annotate(
            "centred, random pairing",
            (EPOCHS, found.centred_baseline),
            xytext=(0, 3),
            textcoords="offset points",
            color="C1",
            fontsize="small",
            ha="right",
        )
        below.set(xlabel="epoch", xlim=(1, EPOCHS))
        print(f"{name}: {moves} moves")
        print(found)
    figure.savefig(picture, dpi=120)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))

"""What does a small model see? It learns from drawn scenes on the spot, and is asked which captions are true.

A `heedful.multimodal.VisualParsingModel` of 0.1 million parameters learns from the easy form of the world `shapes` (two
objects of four shapes and four colours) which captions belong to which picture. Left: pictures of the test, each with
its caption and three foils: another colour, another shape, another place. A bar is the model's score, green for the
true caption and red for foils; how often the green one is the longest, over all pictures, is in the title. Over each
picture lies what the patches are given by the words of the true caption, all layers and heads together: words find the
objects, not the ground. Right: how often true captions score above foils, by steps of training. Colours and places come
first; shapes take longer than this picture does.

Run `python gallery/plot_captions.py [picture.png]`. It takes a minute or two on a core, needs the extras hf, train and
plot and no network.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib import pyplot
from torch import Tensor

from heedful import lens
from heedful.multimodal import (
    SceneCaptions,
    Scenes,
    Shapes,
    VisualParsingConfig,
    VisualParsingModel,
    VLPretrainer,
    foil_accuracy,
    pixel_values,
)
from heedful.multimodal.worlds import VOCABULARY

STEPS, ROUNDS, TEST, SHOWN = 1000, 10, 300, 4
KINDS = ("colour", "shape", "location")
PLACES = (1, 0, 0, 0)  # captions of places alone


def text(row: Tensor) -> str:
    return " ".join(VOCABULARY[number] for number in row.tolist() if number > 2)


def looked_at(model: VisualParsingModel, images: Tensor, ids: Tensor) -> Tensor:
    """What words of the texts give to each patch, `(pictures, 4, 4)`, the mean over layers and heads; 1 is an even share."""
    maps = [layer.weights for layer in lens.observe(model, {"pixel_values": images, "input_ids": ids})]
    length = ids.shape[1]
    words = ((ids > 4) & (ids != VOCABULARY.index("a")))[:, None, :, None]
    given = [(layer[:, :, :length, length:] * words).sum((1, 2)) for layer in maps if layer.shape[-1] > 16]
    total = torch.stack(given).sum(0)
    return (16 * total / total.sum(1, keepdim=True)).view(-1, 4, 4)


def main(picture: Path) -> None:
    torch.manual_seed(0)
    world = Shapes("easy", seed=1)
    scenes = Scenes.of([world.things(i) for i in range(TEST)])
    pictures = torch.stack([torch.from_numpy(world.scene(i).pixels) for i in range(TEST)])
    images = pixel_values(pictures.permute(0, 3, 1, 2))
    model = VisualParsingModel(VisualParsingConfig(hidden_size=48, num_hidden_layers=2, vision_layers=1, patch_size=16))
    curves: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def after(done: int) -> None:
        found = foil_accuracy(
            model, images, scenes, kinds=KINDS, weights=dict.fromkeys(KINDS, PLACES), counts=(1, 4, 4), length=10
        )
        for kind in KINDS:
            curves[kind].append(found[kind])
        print(f"step {STEPS // ROUNDS * done}: " + ", ".join(f"{kind} {found[kind]:.2f}" for kind in KINDS))

    trainer = VLPretrainer(
        model, ("mlm", "itm"), steps=STEPS, batch_size=32, lr=2e-3, device="cpu", progress=False
    ).fit(SceneCaptions(preset="easy", weights=PLACES, length=10), rounds=ROUNDS, after=after)  # fmt: skip
    print(f"loss of matching {trainer.losses_['itm']:.2f}, spread of image tokens at least {trainer.spread_:.2f}")

    generator = torch.Generator().manual_seed(2)
    captions = scenes.captions(generator, PLACES)
    options = [captions, *(captions.foils(kind, generator, (1, 4, 4)) for kind in KINDS)]
    tokens = [each.tokens(length=10) for each in options]
    with torch.no_grad():
        scores = torch.stack([model.score(model.fuse(model.image_tokens(images), ids)[0]) for ids in tokens], 1)
    first = (scores.argmax(1) == 0).float().mean().item()
    print(f"the true caption scores highest of four in {100 * first:.0f} % of {TEST} pictures")

    seen = looked_at(model, images[:SHOWN], tokens[0][:SHOWN])
    figure = pyplot.figure(figsize=(15, 7), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(2.6, 1))
    left.suptitle(f"The true caption (green) scores highest in {100 * first:.0f} % of {TEST} pictures; guessing: 25 %")
    axes = left.subplots(3, SHOWN, height_ratios=(3, 3, 2), squeeze=False)
    for at in range(SHOWN):
        above, middle, below = axes[:, at]
        above.imshow(pictures[at].numpy())
        middle.imshow(pictures[at].mean(-1).numpy(), cmap="gray", vmin=0, vmax=1.5)
        shown = middle.imshow(
            seen[at].numpy(), extent=(-0.5, 63.5, 63.5, -0.5), cmap="inferno", alpha=0.6, vmin=0, vmax=4
        )
        for ax in (above, middle):
            ax.set(xticks=[], yticks=[])
        order = range(len(options))
        values = scores[at].tolist()
        below.barh(order, values, color=["tab:green", *["tab:red"] * len(KINDS)], alpha=0.35)
        low, high = min(*values, 0), max(*values, 0)
        for row in order:
            below.text(low, row, text(tokens[row][at]).removeprefix("a large "), va="center", fontsize=8)
        below.set(yticks=[], xlim=(low, high), xlabel="score" if at == 0 else None)
        below.invert_yaxis()
    axes[0, 0].set_ylabel("picture")
    axes[1, 0].set_ylabel("what words look at")
    figure.colorbar(shown, ax=axes[1, -1], label="1: an even share")
    ax = right.subplots()
    steps = [STEPS // ROUNDS * (at + 1) for at in range(len(curves[KINDS[0]]))]
    for kind in KINDS:
        ax.plot(steps, curves[kind], marker="o", markersize=3, label=kind)
    ax.axhline(0.5, color="gray", linestyle=":")
    ax.set(
        xlabel="steps of 32 pictures", ylabel="true caption above its foil", ylim=(0.4, 1.02), title="Foils of one kind"
    )
    ax.legend(frameon=False, loc="upper left")
    figure.savefig(picture, dpi=110)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "captions.png"))

"""Does the question look at the passage, and the text at the picture? Attention between kinds of tokens, beside even attention.

Top: MiniLM reads twelve questions, each with the passage that answers it and with passages that do not (`groups=` of `heedful.lens.flow`). The share of all
attention that goes between question and passage hardly depends on which passage it is; single heads know the difference. Bands are 95 % of the bootstrap
over pairs, the dashed line is what attention spread evenly over all words would give.

Bottom: a LLaVA of 0.1 million parameters learns, on the spot, to say in which of 16 places the red or the blue square of a picture is. Over three pictures stands
what each patch is given by the last word, "red" or "blue": first by the head with the largest share between text and picture, then by the head without
which most answers are lost. The first rests on patches where nothing is; the second, asked for red, finds the red square, and asked for blue looks anywhere else. Right, the check that shares alone cannot pass: each
head is zeroed in turn, and its share, against even attention, is set beside the accuracy that is lost. The correlation stands in the title.

Run `python gallery/plot_flow.py [picture.png]`. It takes about a minute on two cores, needs the extras hf, demo and plot and no network.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib import pyplot
from torch import Tensor
from transformers import LlavaConfig, LlavaForConditionalGeneration

from heedful.bridges.reading import demo_model_path, load
from heedful.lens.flows import Flow, causal_check, flow, received

PAIRS = (
    ("Why did the river flood the town?", "After three weeks of rain the river rose above its banks and flooded the lower streets of the town."),
    ("Who repaired the church organ?", "The organ of the church was repaired by a carpenter from the next village, who asked for no pay."),
    ("When does the last train leave?", "On weekdays the last train leaves at ten past eleven; on Sundays it leaves an hour earlier."),
    ("What do owls eat in winter?", "In winter, when insects are gone, owls hunt mice and small birds at the edge of the forest."),
    ("How is the cheese stored?", "The cheese is stored on wooden boards in a cool cellar and turned by hand every second day."),
    ("Where was the letter found?", "Behind a loose brick in the kitchen wall the workers found a letter that nobody had opened."),
    ("Which team won the final?", "The visitors scored twice in the last minutes and won the final against all expectations."),
    ("Why is the bridge closed?", "Engineers found cracks in two pillars, so the bridge is closed until they have been strengthened."),
    ("How many students passed the exam?", "Of forty students who sat the exam in June, thirty-one passed, more than in any year before."),
    ("What made the machine stop?", "A single worn belt made the machine stop, and the night shift had to wait for a new one."),
    ("Who painted the old portrait?", "Experts now believe that the portrait was painted by a pupil of the master, not by himself."),
    ("Where do the swallows go?", "At the end of summer the swallows gather on the wires and fly south across the sea."),
)  # fmt: skip
STEPS, BATCH = 700, 96
# Tokens: 0 to 15 are places, then the start, "where", "red", "blue", and what stands for a patch.
START, WHERE, RED, IMAGE = 16, 17, 18, 20


def passages() -> tuple[Flow, Flow]:
    """Questions with the passage that answers them, and with three others each."""
    model, tokenizer = load(demo_model_path())
    right = [{"question": question, "passage": passage} for question, passage in PAIRS]
    wrong = [
        {"question": question, "passage": PAIRS[(at + step) % len(PAIRS)][1]}
        for at, (question, _) in enumerate(PAIRS)
        for step in (1, 4, 7)
    ]
    return flow(model, groups=right, tokenizer=tokenizer), flow(model, groups=wrong, tokenizer=tokenizer)


def scenes(count: int, source: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Pictures with a red and a blue square, a question for one of them, and its place."""
    places = torch.rand(count, 16, generator=source).argsort(1)[:, :2]
    pixels = 0.1 * torch.randn(count, 3, 16, 16, generator=source)
    for colour, channel in ((0, 0), (1, 2)):
        row, column = places[:, colour] // 4, places[:, colour] % 4
        for dy in range(4):
            for dx in range(4):
                pixels[torch.arange(count), channel, 4 * row + dy, 4 * column + dx] += 1.0
    asked = torch.randint(2, (count,), generator=source)
    ahead = torch.full((count, 17), IMAGE)
    ahead[:, 0] = START
    ids = torch.cat((ahead, torch.full((count, 1), WHERE), (RED + asked)[:, None]), 1)
    return {"input_ids": ids, "pixel_values": pixels}, places.gather(1, asked[:, None])[:, 0]


def trained() -> LlavaForConditionalGeneration:
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96}
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            text_config={**sizes, "model_type": "llama", "num_hidden_layers": 3, "vocab_size": 21, "bos_token_id": START},
            vision_config={**sizes, "model_type": "clip_vision_model", "num_hidden_layers": 1, "image_size": 16, "patch_size": 4, "projection_dim": 48},
            image_token_id=IMAGE,
            vision_feature_layer=-1,
        )
    )  # fmt: skip
    source = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS)
    for step in range(STEPS):
        inputs, answers = scenes(BATCH, source)
        loss = torch.nn.functional.cross_entropy(model(**inputs).logits[:, -1, :16], answers)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    return model.eval()


def main(picture: Path) -> None:
    figure = pyplot.figure(figsize=(12, 8.4), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1.15, 1))
    right, wrong = passages()
    left, middle = upper.subplots(1, 2)
    layers = range(len(right.layers))
    for found, colour, label in ((right, "C1", "the passage that answers"), (wrong, "C0", "other passages")):
        low, high = zip(*(ends for ends in found.intervals if ends), strict=True)
        left.fill_between(layers, low, high, color=colour, alpha=0.2, lw=0)
        left.plot(layers, found.per_layer, "o-", color=colour, label=label)
    left.plot(layers, right.chance, "--", color="gray", label="even attention")
    left.set(xlabel="layer", ylabel="share of attention", ylim=(0, 0.6), title="Between question and passage")
    left.legend(frameon=False, loc="lower right")
    gains = torch.stack([a.imf.mean(0) - b.imf.mean(0) for a, b in zip(right.layers, wrong.layers, strict=True)])
    most = float(gains.abs().max())
    image = middle.imshow(gains, cmap="PuOr_r", vmin=-most, vmax=most, aspect="auto")
    upper.colorbar(image, ax=middle, label="right minus other passage")
    layer, head = divmod(int(gains.argmax()), gains.shape[1])
    middle.set(
        xlabel="head",
        ylabel="layer",
        title=f"Heads that know the difference: {layer}.{head} by {float(gains.max()):.2f}",
    )

    model = trained()
    inputs, answers = scenes(512, torch.Generator().manual_seed(2))

    @torch.no_grad()
    def accuracy(model: LlavaForConditionalGeneration) -> float:
        return float((model(**inputs).logits[:, -1, :16].argmax(1) == answers).float().mean())

    print(f"{sum(one.numel() for one in model.parameters()):,} parameters")
    checked = causal_check(model, inputs, score=accuracy, draws=50)
    print(flow(model, inputs))
    print(checked)
    heads = [
        (one.layer, one.head)
        for one in (max(checked.heads, key=lambda one: one.lift), max(checked.heads, key=lambda one: one.effect))
    ]
    some = {name: value[:3] for name, value in inputs.items()}
    given = received(model, some, heads, queries="word", modality=["before"] + ["image"] * 16 + ["before", "word"])
    pictures, right_side = lower.subfigures(1, 2, width_ratios=(1.1, 1))
    axes = pictures.subplots(2, 3)
    for row, words in enumerate(("largest share", "matters most")):
        for at, ax in enumerate(axes[row]):
            draw(ax, inputs["pixel_values"][at], given[row, at, 1:17])
            colour = "red" if int(inputs["input_ids"][at, -1]) == RED else "blue"
            ax.set_title(f"where {colour}" if row == 0 else "", fontsize="medium")
        axes[row][0].text(
            -1.2, 7.5, f"{words}:\nhead {heads[row][0]}.{heads[row][1]}", rotation=90, ha="right", va="center"
        )
    ax = right_side.subplots()
    checked.plot(ax)
    for one in checked.heads:
        if (one.layer, one.head) in heads:
            ax.annotate(
                f"head {one.layer}.{one.head}",
                (one.lift, one.effect),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
            )
    ax.set_ylabel("accuracy lost without the head")
    ax.margins(0.12)
    figure.savefig(picture, dpi=110)
    print(f"wrote {picture}")


def draw(ax: pyplot.Axes, pixels: Tensor, weights: Tensor) -> None:
    """A picture with what each of its 16 patches is given."""
    shown = pixels.permute(1, 2, 0)
    ax.imshow((shown - shown.min()) / (shown.max() - shown.min()))
    for place, weight in enumerate(weights.tolist()):
        x, y = 4 * (place % 4), 4 * (place // 4)
        ax.text(x + 1.5, y + 1.5, f"{weight:.2f}".lstrip("0"), color="white", ha="center", va="center", fontsize=7)
        ax.add_patch(pyplot.Rectangle((x - 0.5, y - 0.5), 4, 4, fill=False, ec="gold", lw=5 * weight))
    ax.axis("off")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))

"""The depth verdict in the report: this model's point against the law."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from heedful._errors import HeedfulError, Unsupported
from heedful._text import quantity
from heedful.lens.depth.auditor import Audit, audit, depth_words
from heedful.lens.depth.skipping import Usefulness, skip_layers
from heedful.report import Figure, Items, Mark, Prose, Section, Table
from heedful.report.charts import Axis, Band, Chart, Line, Point

if TYPE_CHECKING:
    from heedful.lens.sections import Subject

ENERGY = 0.99

# Tokens that are read anew for each layer that is left out.
TOKENS = 64
SAMPLE = 16_384

# (layers, width) drawn for comparison.
LANDMARKS = {"GPT-2": (12, 768), "GPT-2 XL": (48, 1600), "Llama-7B": (32, 4096), "GPT-3": (96, 12288)}


def embedding_rank(weight: Any, energy: float = ENERGY) -> int:
    r"""The number of singular directions that hold a share of a table's energy: least k with $\sum_{i \le k} \sigma_i^2 \ge
    0.99 \sum_i \sigma_i^2$.

    `weight` is `[rows, d]`; above 16,384 rows an even sample of them is taken.

    >>> import torch
    >>> embedding_rank(torch.randn(50, 3) @ torch.randn(3, 8))
    3
    """
    import torch

    rows = weight.detach()[:: max(1, -(-weight.shape[0] // SAMPLE))].float()
    square = torch.linalg.eigvalsh((rows.mT @ rows).double()).flip(0).clamp_min(0)
    reached = square.cumsum(0) >= energy * square.sum()
    return int(reached.int().argmax()) + 1


def section(subject: Subject) -> Section:
    """The verdict of `audit` on the subject's model, the effective rank of its embedding, and where it stands in a plot."""
    if getattr(subject.model, "config", None) is None:
        raise Unsupported("depth and width are read from a Hugging Face configuration, which this model has not")
    try:
        result = audit(subject.model)
    except HeedfulError as error:
        raise Unsupported(f"no depth verdict: {error}") from None
    rank, use = _measured_rank(subject.model), _use(subject)
    shape, optimum = result.shape, depth_words(result.depth_star, result.sigma)
    data = result.to_dict() | {"effective_embedding_rank": rank, "without_layer": use and use.to_dict()["layers"]}
    law = (
        f" by one of these laws: that of Levine et al. (2020) gives {optimum} for width {shape.width}; this {shape.part or 'model'} has "
        f"{shape.layers}. Within two standard errors there is no verdict, and near the optimum the loss hardly changes."
    )
    notes = [text.split(": ", 1)[1] for text in shape.words(result.law, result.flags)] + list(result.notes)
    terminal = [
        f"{_layers(result)} of width {shape.width}: {result.place[0]}",
        result.place[1],
        f"by {result.law.name} it is {result.verdict}: {optimum} for this width",
        *(f"extrapolated: {why}" for why in shape.outside(result.law)),
        *([f"99 % of the embedding's energy lies in {rank} of {shape.width} dimensions"] if rank else []),
    ]
    blocks = [
        *(Prose(_sentence(text), shown="page") for text in result.place),
        *(Prose(text, shown="terminal") for text in terminal),
        Prose([Mark(result.verdict.capitalize(), "strong"), law], shown="page"),
        Figure([chart(result)]),
        Table(["quantity", "value"], _facts(result, rank), shown="page"),
        *([Prose(_sentence(_least_and_most(use)))] if use else []),
        *([Items(notes, shown="page")] if notes else []),
    ]
    return Section("Depth and width", blocks, data, result=result, plain=_plain(result))


def _plain(result: Audit) -> str:
    """The section in one sentence."""
    depths = [layers for layers, _ in result.peers.values()]
    text = (
        f"The {result.shape.part or 'model'} has {quantity(result.shape.layers, 'layer')} of width {result.shape.width}"
    )
    if depths:
        least, most = min(depths), max(depths)
        text += f"; public models of its size have {least if least == most else f'{least} to {most}'}"
    if result.span is not None:
        text += f", and published rules for this width ask for {result.span[0]:.0f} to {result.span[1]:.0f}"
    return f"{text}."


def _use(subject: Subject) -> Usefulness | None:
    """Each layer left out in turn on the first tokens; None for a model that cannot run so."""
    inputs = subject.beginning(TOKENS)
    if not inputs:
        return None
    try:
        return skip_layers(subject.model, inputs)
    except HeedfulError:
        return None


def _least_and_most(use: Usefulness) -> str:
    least, most = (pick(use.layers, key=lambda one: one.change) for pick in (min, max))
    return (
        f"left out alone, layer {least.layer} changes the output least (by {least.change:.0%} of its norm), "
        f"layer {most.layer} most ({most.change:.0%})"
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _layers(result: Audit) -> str:
    """The layers that the verdict is on; of an encoder and a decoder, which."""
    part = result.shape.part
    return (f"the {part} alone, " if part else "") + quantity(result.shape.layers, "layer")


def _facts(result: Audit, rank: int | None) -> list[list[object]]:
    shape = result.shape
    inner = "equal to the width" if shape.inner == shape.width else f"against a width of {shape.width}"
    rows: list[list[object]] = [
        ["parameters", f"{result.params:,}"],
        ["in the layers' matrices", f"{shape.layer_params:,}"],
        ["heads x head size", f"{shape.heads} x {shape.head_dim}, {inner}"],
        ["shape for this budget", f"{result.budget_depth:.1f} layers of {result.budget_width:.0f}"],
    ]
    if rank:
        rows.append(["dimensions with 99 % of the embedding's energy", f"{rank} of {shape.width}"])
    rows += [[f"depth for this width by {name}", depth_words(depth)] for name, depth in result.rivals.items()]
    peers = ", ".join(f"{name} ({layers} x {width})" for name, (layers, width) in result.peers.items())
    return [*rows, ["public models of its size", peers]] if peers else rows


def _measured_rank(model: Any) -> int | None:
    """The effective rank of the input embedding; None where the model has no table."""
    try:
        table = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    weight = getattr(table, "weight", None)
    if weight is None or weight.dim() != 2 or weight.device.type == "meta":
        return None
    return embedding_rank(weight)


def chart(result: Audit) -> Chart:
    """Depth against width on a logarithmic axis: the law, its band of two standard errors, landmarks and this model."""
    law, shape = result.law, result.shape
    narrowest, widest = 2.0**6.5, 2.0**14.5
    widths = [width for width in (2.0 ** (6.5 + step / 10) for step in range(81)) if law.optimal_depth(width) > 0]
    tallest = max(100.0, shape.layers * 1.15)

    def curve(sign: float) -> list[tuple[float, float]]:
        return [(width, max(0.0, law.optimal_depth(width) + sign * law.band(width))) for width in widths]

    parts: list[Band | Line | Point] = [Band(curve(1), curve(-1)), Line(curve(0))]
    at = min(max(shape.width, narrowest), widest)
    for name, (layers, width) in LANDMARKS.items():
        # A name away from the law: to the left of a point above it, to the right of one below.
        if abs(math.log2(width / at)) > 0.3 or abs(layers - shape.layers) > tallest / 12:
            parts.append(Point(width, layers, name, left=layers > law.optimal_depth(width)))
    left = shape.layers > result.depth_star or at > 2**12.5
    parts.append(Point(at, shape.layers, "this model", left=left, strong=True))
    x = Axis(narrowest, widest, [(width, str(width)) for width in (128, 512, 2048, 8192)], "width", log=True)
    step = 20 if tallest <= 140 else 50
    y = Axis(0, tallest, [(depth, str(depth)) for depth in range(0, int(tallest) + 1, step)], "layers")
    return Chart(f"Depth against width: {result.name} is {result.verdict}", x, y, parts)

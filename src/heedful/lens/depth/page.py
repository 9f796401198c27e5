"""The depth verdict in the report: this model's point against the law."""

from __future__ import annotations

import math
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from heedful._errors import HeedfulError, Unsupported
from heedful._text import quantity
from heedful.lens.depth.auditor import Audit, audit, depth_words
from heedful.lens.depth.skipping import Usefulness, skip_layers

if TYPE_CHECKING:
    from heedful.lens.sections import Section, Subject

__all__ = ["embedding_rank", "section"]

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
    from heedful.lens.sections import Section, html_table

    config = getattr(subject.model, "config", None)
    if config is None:
        raise Unsupported("depth and width are read from a Hugging Face configuration, which this model has not")
    try:
        found = audit(subject.model)
    except HeedfulError as error:
        raise Unsupported(f"no depth verdict: {error}") from None
    rank = _measured_rank(subject.model)
    facts = _facts(found, rank)
    reasons = found.shape.outside(found.law)
    use = _use(subject)
    data = found.to_dict() | {"effective_embedding_rank": rank, "without_layer": use and use.to_dict()["layers"]}
    summary = "\n".join(
        [
            *wrap(f"{_layers(found)} of width {found.shape.width}: {found.place[0]}", 98, subsequent_indent="  "),
            *wrap(found.place[1], 98, subsequent_indent="  "),
            f"by {found.law.name} it is {found.verdict}: {depth_words(found.depth_star, found.sigma)} for this width",
            *(part for why in reasons for part in wrap(f"extrapolated: {why}", 98, subsequent_indent="  ")),
            *([f"99 % of the embedding's energy lies in {rank} of {found.shape.width} dimensions"] if rank else []),
            *([_told(use)] if use else []),
        ]
    )
    notes = "".join(f"<li>{escape(text.split(': ', 1)[1])}</li>" for text in found.shape.words(found.law, found.flags))
    notes += "".join(f"<li>{escape(note)}</li>" for note in found.notes)
    html = (
        "".join(f"<p>{escape(_sentence(text))}</p>" for text in found.place)
        + f"<p><strong>{escape(found.verdict.capitalize())}</strong> by one of these laws: that of Levine et al. (2020) gives "
        f"{depth_words(found.depth_star, found.sigma)} for width {found.shape.width}; this "
        f"{found.shape.part or 'model'} has {found.shape.layers}. Within two standard errors there is no verdict, and near the optimum the loss hardly changes.</p>"
        f"<figure>{svg(found)}</figure>{html_table(['quantity', 'value'], facts)}"
        + (f"<p>{escape(_told(use))}.</p>" if use else "")
        + (f"<ul>{notes}</ul>" if notes else "")
    )
    return Section("Depth and width", summary, data, html, result=found, plain=_plain(found))


def _plain(found: Audit) -> str:
    """The section in one sentence."""
    depths = [layers for layers, _ in found.peers.values()]
    told = f"The {found.shape.part or 'model'} has {quantity(found.shape.layers, 'layer')} of width {found.shape.width}"
    if depths:
        least, most = min(depths), max(depths)
        told += f"; public models of its size have {least if least == most else f'{least} to {most}'}"
    if found.span is not None:
        told += f", and published rules for this width ask for {found.span[0]:.0f} to {found.span[1]:.0f}"
    return f"{told}."


def _use(subject: Subject) -> Usefulness | None:
    """Each layer left out in turn on the first tokens; None for a model that cannot run so."""
    inputs = subject.beginning(TOKENS)
    if not inputs:
        return None
    try:
        return skip_layers(subject.model, inputs)
    except HeedfulError:
        return None


def _told(use: Usefulness) -> str:
    least, most = (pick(use.layers, key=lambda one: one.change) for pick in (min, max))
    return (
        f"left out alone, layer {least.layer} changes the output least (by {least.change:.0%} of its norm), "
        f"layer {most.layer} most ({most.change:.0%})"
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _layers(found: Audit) -> str:
    """The layers that the verdict is on; of an encoder and a decoder, which."""
    part = found.shape.part
    return (f"the {part} alone, " if part else "") + quantity(found.shape.layers, "layer")


def _facts(found: Audit, rank: int | None) -> list[list[object]]:
    shape = found.shape
    inner = "equal to the width" if shape.inner == shape.width else f"against a width of {shape.width}"
    rows: list[list[object]] = [
        ["parameters", f"{found.params:,}"],
        ["in the layers' matrices", f"{shape.layer_params:,}"],
        ["heads x head size", f"{shape.heads} x {shape.head_dim}, {inner}"],
        ["shape for this budget", f"{found.budget_depth:.1f} layers of {found.budget_width:.0f}"],
    ]
    if rank:
        rows.append(["dimensions with 99 % of the embedding's energy", f"{rank} of {shape.width}"])
    rows += [[f"depth for this width by {name}", depth_words(depth)] for name, depth in found.rivals.items()]
    peers = ", ".join(f"{name} ({layers} x {width})" for name, (layers, width) in found.peers.items())
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


def svg(found: Audit, size: tuple[int, int] = (640, 320)) -> str:
    """Depth against width on a logarithmic axis: the law, its band of two standard errors, landmarks and this model."""
    wide, high = size
    left, right, top, bottom = 48, 16, 26, 40
    widths = [2.0 ** (6.5 + step * 8 / 80) for step in range(81)]
    widths = [width for width in widths if found.law.optimal_depth(width) > 0]
    tallest = max(100.0, found.shape.layers * 1.15)

    def x(width: float) -> float:
        return left + (math.log2(width) - 6.5) / 8 * (wide - left - right)

    def y(depth: float) -> float:
        return top + (1 - max(depth, 0.0) / tallest) * (high - top - bottom)

    def path(sign: float) -> list[str]:
        depths = [found.law.optimal_depth(width) + sign * found.law.band(width) for width in widths]
        return [f"{x(w):.1f},{y(d):.1f}" for w, d in zip(widths, depths, strict=True)]

    parts = [
        f'<polygon points="{" ".join(path(1) + path(-1)[::-1])}" fill="var(--accent, #2b6cb0)" opacity="0.18"/>',
        f'<polyline points="{" ".join(path(0))}" fill="none" stroke="var(--accent, #2b6cb0)" stroke-width="2"/>',
    ]
    for width in (128, 512, 2048, 8192):
        parts.append(f'<path d="M{x(width):.1f} {high - bottom}v5" stroke="currentColor"/>')
        parts.append(_text(x(width), high - bottom + 18, str(width), "middle"))
    for depth in range(0, int(tallest) + 1, 20 if tallest <= 140 else 50):
        parts.append(f'<path d="M{left} {y(depth):.1f}H{wide - right}" stroke="currentColor" opacity="0.12"/>')
        parts.append(_text(left - 6, y(depth) + 4, str(depth), "end"))
    parts.append(_text((left + wide - right) / 2, high - 6, "width", "middle"))
    parts.append(_text(left - 6, 14, "layers", "end"))
    point = x(min(max(found.shape.width, 2**6.5), 2**14.5)), y(found.shape.layers)
    for name, (layers, width) in LANDMARKS.items():
        if math.dist(point, (x(width), y(layers))) > 20:
            parts.append(f'<circle cx="{x(width):.1f}" cy="{y(layers):.1f}" r="3" fill="currentColor" opacity="0.55"/>')
            parts.append(_beside(x(width), y(layers), name, layers > found.law.optimal_depth(width), 0.7))
    parts.append(
        f'<circle cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="6" fill="var(--accent, #2b6cb0)" stroke="currentColor" stroke-width="2"/>'
    )
    above = found.shape.layers > found.depth_star or point[0] > 0.8 * wide
    parts.append(_beside(*point, "this model", above, bold=True))
    label = f"Depth against width: {found.name} is {found.verdict}"
    head = f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="{escape(label)}" style="max-width:{wide}px;width:100%">'
    return head + "".join(parts) + "</svg>"


def _beside(x: float, y: float, text: str, left: bool, opacity: float = 1.0, bold: bool = False) -> str:
    """A label away from the law: to the left of a point above it, to the right of one below."""
    return _text(x - 11 if left else x + 11, y + 4, text, "end" if left else "start", opacity, bold)


def _text(x: float, y: float, text: str, anchor: str, opacity: float = 1.0, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="12" fill="currentColor" '
        f'opacity="{opacity:g}"{weight}>{escape(text)}</text>'
    )

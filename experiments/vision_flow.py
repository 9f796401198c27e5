"""Does self-attention among image tokens, before they meet the text, raise the attention between text and picture (Xue et al. 2021, their question and measure).

Inter-modality flow (`heedful.lens.flow`) is the share of attention that goes from text to picture or back, by layer of
fusion. Attention spread evenly over all tokens gives `chance`, lift is the share over that; M(text to picture) is what
text tokens give to the picture. The mean over 300 pictures of the test's seed, each with a true caption, and the
bootstrap interval of 95 % over pictures. The models are those that `vision-ablation` trained with its first seed, equal
in size and steps: image tokens by convolutions, by self-attention, and by self-attention with MFR by attention or at
random; then the one that `vision-pretrain` trained for longer, and one that learned nothing, the control. Models that
are not there are trained first.

Whether the measure says what matters is checked by zeroing heads: those with the largest lift, as many at random, and
each alone, by how far the mean accuracy over all six kinds of foils falls. The paper prints its flow as a curve without
numbers; its direction, more flow with self-attention, is what the bar asks for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from experiments import pictures, vision_ablation
from experiments.pictures import foils
from experiments.recipe import Bar, Block, Setting, Table
from experiments.vision_ablation import ATTENTION, CONVOLUTION, NONE, RANDOM
from heedful.lens.flows import causal_check, flow
from heedful.multimodal import VisualParsingConfig, VisualParsingModel

LONG, UNTRAINED = "transformer, MFR by attention, longer", "untrained"
MODELS = (UNTRAINED, CONVOLUTION, NONE, ATTENTION, RANDOM, LONG)


def _model(name: str, folder: Path, device: str, quick: bool) -> VisualParsingModel:
    """A trained model by its name; `folder` holds it."""
    if name == UNTRAINED:
        torch.manual_seed(0)
        return VisualParsingModel(VisualParsingConfig(**pictures.SMALL if quick else {})).to(device)
    vision = []
    if name == CONVOLUTION:
        config = VisualParsingConfig.from_pretrained(folder)
        vision = [pictures.ConvolutionalEncoder(config.hidden_size, patch=config.patch_size)]
    return VisualParsingModel.from_pretrained(folder, *vision).to(device)


def _run(name: str, folder: Path, device: str, quick: bool) -> dict[str, Any]:
    count = 12 if quick else 300
    images, scenes = pictures.pictures_asked(count, device)
    ids = scenes.captions(torch.Generator(device).manual_seed(4)).tokens()
    model = _model(name, folder, device, quick).eval()
    inputs = {"pixel_values": images, "input_ids": ids, "attention_mask": (ids != 0).long()}
    found = flow(model, inputs)

    def score(model: Any) -> float:
        return sum(foils(model, images, scenes).values()) / 6

    record: dict[str, Any] = {
        "flow": [round(value, 4) for value in found.per_layer],
        "chance": [round(value, 4) for value in found.chance],
        "lift": [round(value, 4) for value in found.lift],
        "intervals": [[round(end, 4) for end in ends] if ends else None for ends in found.intervals],
        "to picture": [round(value, 4) for value in found.direction("text", "image")],
        "to text": [round(value, 4) for value in found.direction("image", "text")],
        "score": round(score(model), 4),
    }
    if name != UNTRAINED and len(found.layers) * model.config.num_attention_heads > 2:
        checked = causal_check(model, inputs, score=score, draws=3 if quick else 20, count=1 if quick else 3)
        record["heads"] = {
            "count": checked.count, "top": round(checked.top, 4), "random": [round(one, 4) for one in checked.random],
            "correlation": round(checked.correlation, 4) if checked.correlation == checked.correlation else None,
            "p": round(checked.p, 4) if checked.p == checked.p else None, "verdict": checked.verdict,
        }  # fmt: skip
    return record


def run(setting: Setting) -> dict[str, Any]:
    beside = setting.work.parent / "vision-ablation"
    store = setting.store()
    folders = {UNTRAINED: setting.work, LONG: pictures.base(setting)}
    if not store.has(LONG):
        pictures.pretrained(setting)
    for arm in (CONVOLUTION, NONE, ATTENTION, RANDOM):
        folders[arm] = vision_ablation.folder(beside, f"{arm}{' quick' if setting.quick else ''}")
        if not store.has(arm) and not (folders[arm] / "model.safetensors").is_file():
            vision_ablation._run(arm, 0, None, str(beside), setting.device, setting.quick)
    parts = {name: (name, folders[name], setting.device, setting.quick) for name in MODELS}
    return {"quick": setting.quick, "parts": store.run(_run, parts)}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def tables(result: dict[str, Any]) -> list[Block]:
    parts = result["parts"]
    layers = range(len(next(iter(parts.values()))["flow"]))

    def shown(part: dict[str, Any], at: int) -> str:
        ends = part["intervals"][at]
        return f"{part['flow'][at]:.3f}" + (f" ({ends[0]:.3f} to {ends[1]:.3f})" if ends else "")

    rows = [
        (name, f"{part['chance'][0]:.3f}", *(shown(part, at) for at in layers), f"{_mean(part['lift']):.2f}", f"{100 * part['score']:.1f}")
        for name, part in parts.items()
    ]  # fmt: skip
    columns = (
        "flow between text and picture",
        "chance",
        *(f"layer {at}" for at in layers),
        "mean lift",
        "foils, percent",
    )
    ways = [
        (name, *(f"{part['to picture'][at]:.2f} / {part['to text'][at]:.2f}" for at in layers))
        for name, part in parts.items()
    ]
    heads = [
        (name, part["heads"]["count"], f"{100 * part['heads']['top']:.1f}", f"{100 * _mean(part['heads']['random']):.1f}",
         "" if part["heads"]["correlation"] is None else f"{part['heads']['correlation']:.2f}", "" if part["heads"]["p"] is None else f"{part['heads']['p']:.2g}", part["heads"]["verdict"])
        for name, part in parts.items() if "heads" in part
    ]  # fmt: skip
    blocks: list[Block] = [
        Table(columns, rows, control=UNTRAINED if UNTRAINED in parts else ""),
        "What text tokens give to the picture / what image tokens give to the text:",
        Table(("model", *(f"layer {at}" for at in layers)), ways),
    ]
    if heads:
        blocks += [
            "Points of accuracy lost where heads are zeroed, and Spearman's correlation of lift and loss over all heads:",
            Table(("model", "heads zeroed", "those of most lift", "at random", "correlation", "p", "verdict"), heads),
        ]
    if not result["quick"] and NONE in parts and CONVOLUTION in parts:
        gain = _mean(parts[NONE]["flow"]) - _mean(parts[CONVOLUTION]["flow"])
        blocks.append(Bar("flow, mean over layers: self-attention less convolutions", gain, 0.0, shown=".3f"))
    return blocks

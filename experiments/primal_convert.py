"""Softmax attention of MiniLM made primal: do sentence embeddings stay, and for how many layers?

`heedful.convert.primalize` on all-MiniLM-L6-v2 (6 layers, 12 heads of width 32), rank 32: queries and keys are the old layer's, all other
weights come from least squares on sentences out of the docstrings of installed packages, then each layer learns to give what the
old one gave (Adam on the whole layer, its network included). Agreement is the mean cosine of mean-pooled sentence embeddings with the
original's on 200 sentences from other files of scikit-learn. **The controls matter more than the figure**: "no mixing" is the same
procedure with `weights="static"`, where no token sees another in that layer; "token-wise map" is the best linear map of each token by
itself, not distilled; "no attention" leaves the layer's attention out and changes nothing else.

No published figure: nobody has converted a trained model so. Conversions are parts: a run that was stopped goes on. Up to four
run at once; on a GPU that pays where NVIDIA's MPS lets them share it (`nvidia-cuda-mps-control -d`).
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.recipe import Bar, Block, Setting, Table, hardware
from heedful import Unsupported, convert
from heedful.bridges import swap
from heedful.bridges.reading import demo_model_path, load
from heedful.convert.primal import latencies
from heedful.nn import Primal

CALIBRATION, HELD_OUT = 30_000, 200
STEPS, RANK, THRESHOLD, BAR = 6_000, 32, 0.9, 0.97

# Sentences and tokens of each, as many tokens as the model takes.
SHAPES = ((32, 32), (8, 128), (2, 512))

# Held-out sentences come from scikit-learn alone; one file in so many is theirs, and nothing else is read from it.
HELD_PACKAGE, EVERY = "sklearn", 8
PACKAGES = (HELD_PACKAGE, "scipy", "pandas", "torch", "matplotlib", "numpy", "transformers")


def sentences(file: Path) -> Iterator[str]:
    """Sentences of 6 to 40 words in the docstrings of a file."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        for part in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
            for one in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(part.split())):
                plain = sum(sign.isalpha() or sign in " ,." for sign in one) > 0.95 * len(one)
                if plain and 6 <= len(one.split()) <= 40 and one[0].isupper() and one[-1] in ".!?":
                    yield one


def texts(count: int) -> tuple[list[str], list[str]]:
    """Sentences to calibrate on and sentences held out, from different files; what is there of the packages decides."""

    def number(text: str) -> int:
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    learn: dict[str, None] = {}
    held: dict[str, None] = {}
    for package in PACKAGES:
        spec = find_spec(package)
        for place in (spec and spec.submodule_search_locations) or ():
            for file in sorted(Path(place).rglob("*.py")):
                if "test" in str(file.relative_to(place)):
                    continue
                ours = package == HELD_PACKAGE and number(str(file.relative_to(place))) % EVERY == 0
                (held if ours else learn).update(dict.fromkeys(sentences(file)))
    learn = {one: None for one in learn if one not in held}
    return sorted(learn, key=number)[:count], sorted(held, key=number)[:HELD_OUT]


def _texts(quick: bool, work: Path) -> tuple[list[str], list[str]]:
    """Read once: with this file along, another machine with other packages works on the same sentences."""
    if quick:
        learn, held = texts(300)
        return learn, held[:40]
    file = work / "texts.json"
    if not file.is_file():
        file.write_text(json.dumps(texts(CALIBRATION)))
    learn, held = json.loads(file.read_text())
    return learn, held


def replaced(model: Any, batches: list[Any], layer: int, change: Callable[[Tensor, Tensor], Tensor]) -> float:
    """The agreement of a model whose attention in one layer gives `change(output, keep)` instead of its output."""
    output_map = model.get_submodule(swap.find_sites(model)[layer].output)
    cosines: list[float] = []
    for batch in batches:
        keep = batch["attention_mask"].bool()
        before = convert.pool(model(**batch).last_hidden_state, keep, "mean")
        handle = output_map.register_forward_hook(lambda module, args, output, keep=keep: change(output, keep))
        after = convert.pool(model(**batch).last_hidden_state, keep, "mean")
        handle.remove()
        cosines += torch.cosine_similarity(before, after).tolist()
    return sum(cosines) / len(cosines)


def anatomy(model: Any, tokenizer: Any, learn: list[str], held: list[str]) -> dict[str, Any]:
    """What the last layer's attention writes: is it one vector per sentence, and of how many dimensions?"""
    batches = swap.read(held, tokenizer, 32, model.device)
    sites = swap.find_sites(model)
    seen = swap.recorded(model, sites[-1], swap.read(learn, tokenizer, 32, model.device))
    outputs = torch.cat([one.output[one.call.keep] for one in seen])
    mean = outputs.mean(dim=0)
    directions = torch.linalg.svd(outputs - mean, full_matrices=False).Vh

    def onto(count: int) -> Callable[[Tensor, Tensor], Tensor]:
        basis = directions[:count]
        return lambda output, keep: (output - mean) @ basis.mT @ basis + mean

    return {
        "no_attention": [
            replaced(model, batches, layer, lambda output, keep: 0.0 * output) for layer in range(len(sites))
        ],
        "sentence_mean": replaced(
            model, batches, -1, lambda output, keep: convert.pool(output, keep, "mean")[:, None].expand_as(output)
        ),
        "directions": {str(count): replaced(model, batches, -1, onto(count)) for count in (24, 96, 192)},
    }


def costs(model: Any, tokenizer: Any, learn: list[str], held: list[str]) -> list[dict[str, Any]]:
    """Seconds of the model and of one with all layers primal, by length of the input; what the weights are does not matter."""
    every = range(len(swap.find_sites(model)))
    primal = convert.primalize(model, learn, layers=every, rank=RANK, tokenizer=tokenizer, held_out=held).model
    times = []
    for batch, length in SHAPES:
        tokens = torch.arange(batch * length, device=model.device).view(batch, length) % model.config.vocab_size
        before, after = latencies((model, primal), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
        times.append({"batch": batch, "length": length, "before": before, "after": after})
    return times


def facts(result: convert.Primalized) -> dict[str, Any]:
    return {name: value for name, value in result.to_dict().items() if name != "cosines"}


def converted(what: str, layers: int, quick: bool, work: Path, device: str) -> dict[str, Any]:
    """One conversion of the last layers: by "least squares" alone, with "no mixing", or "primal" and distilled."""
    learn, held = _texts(quick, work)
    model, tokenizer = load(demo_model_path())
    count = len(swap.find_sites(model))
    steps = 10 if quick else STEPS
    options: dict[str, Any] = {"rank": RANK} if what != "no mixing" else {"form": Primal(RANK, weights="static")}
    if what != "least squares":
        options["distill"] = steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that static weights mix no tokens
        result = convert.primalize(
            model.to(device), learn, layers=range(count - layers, count), tokenizer=tokenizer, held_out=held, **options
        )
    return facts(result) | {"hardware": hardware(device), "torch": torch.__version__}


def run(setting: Setting) -> dict[str, Any]:
    """The last layer with and without distillation and without mixing, then the last two, three, ..."""
    learn, held = _texts(setting.quick, setting.work)
    setting.say(f"{len(learn)} sentences to calibrate on, {len(held)} held out")
    model, tokenizer = load(demo_model_path())
    model = model.to(setting.device)
    count = len(swap.find_sites(model))
    store = setting.store()

    def parts(*wanted: tuple[str, int], jobs: int) -> dict[tuple[str, int], Any]:
        named = {
            f"{what} {layers}": (what, layers, setting.quick, setting.work, setting.device) for what, layers in wanted
        }
        done = store.run(converted, named, jobs)
        return {key: done[name] for key, name in zip(wanted, named, strict=True) if name in done}

    # Beside one another; the last layer alone by itself, since its latency is told.
    jobs = min(4, setting.jobs)
    deeper = () if setting.quick else range(2, count + 1)
    more = [(what, layers) for layers in deeper for what in ("primal", "no mixing")]
    needed = [("least squares", 1), ("no mixing", 1)]
    finished = parts(*needed, *more, jobs=jobs) | parts(("primal", 1), jobs=1)
    if missing := [what for what in (*needed, ("primal", 1)) if what not in finished]:
        raise Unsupported(f"the time was over before {missing[0]} was done; run it again to go on")
    with torch.no_grad():
        anatomical = anatomy(model, tokenizer, learn[:2000], held)
        spent = costs(model, tokenizer, learn[:200], held[:32])
    return {
        "calibration": len(learn),
        "held_out": len(held),
        "steps": 10 if setting.quick else STEPS,
        "anatomy": anatomical,
        "costs": spent,
        "costs_on": hardware(setting.device),
        "threshold": THRESHOLD,
        "model_layers": count,
        "least_squares": finished["least squares", 1],
        "no_mixing": {str(layers): one for (what, layers), one in finished.items() if what == "no mixing"},
        "primal": {str(layers): one for (what, layers), one in sorted(finished.items()) if what == "primal"},
    }


def tables(result: dict[str, Any]) -> list[Block]:
    last, fitted, static = result["primal"]["1"], result["least_squares"], result["no_mixing"]["1"]
    control = "no mixing (static weights), distilled alike"
    instead = [
        ["primal, distilled", f"{last['agreement']:.4f} ({last['lowest']:.3f})"],
        [control, f"{static['agreement']:.4f} ({static['lowest']:.3f})"],
        ["primal, least squares alone", f"{fitted['agreement']:.4f} ({fitted['lowest']:.3f})"],
        ["token-wise map, least squares alone", f"{fitted['control']:.4f}"],
        ["no attention", f"{result['anatomy']['no_attention'][-1]:.4f}"],
    ]
    deeper: list[list[object]] = []
    blank = {"agreement": "", "lowest": "", "control": ""}
    for count in range(1, result["model_layers"] + 1):
        one, alike = (result[kind].get(str(count), blank) for kind in ("primal", "no_mixing"))
        cells = (one["agreement"], one["lowest"], alike["agreement"], alike["lowest"], one["control"])
        figures = [f"{cell:.4f}" if cell else "" for cell in cells]
        deeper.append([count, *(figures if any(figures) else ["not run", "", "", "", ""])])
    parts = result["anatomy"]
    each = ", ".join(f"{value:.3f}" for value in parts["no_attention"])
    spent = ", ".join(
        f"{one['batch']} x {one['length']} tokens {1e3 * one['before']:.1f} ms before, {1e3 * one['after']:.1f} after"
        for one in result["costs"]
    )
    kept = ", ".join(f"{count}: {value:.3f}" for count, value in parts["directions"].items())
    layers = ["agreement", "lowest", "no mixing, distilled alike", "its lowest", "token-wise maps"]
    return [
        f"Last layer, rank {RANK}, {result['calibration']:,} sentences, {result['steps']:,} steps; mean cosine on "
        f"{result['held_out']} held-out sentences (the lowest in brackets):",
        Table(["in place of the last layer's attention", "agreement"], instead, control=control),
        Table(["layers converted, from the last on", *layers], deeper),
        f"{_breaks(result)} The last layer alone, a batch of {last['batch'][0]} sentences of {last['batch'][1]} tokens, "
        f"{last['hardware']}: {1e3 * last['latency_before']:.1f} ms before, {1e3 * last['latency_after']:.1f} after. All layers, {result['costs_on']}: {spent}. Attention left out of one layer alone, "
        f"first to last: {each}. Of the last layer, its output averaged over each sentence: {parts['sentence_mean']:.3f}; cut to its "
        f"first principal directions: {kept}. Layers converted: {_places(result)}.",
        Bar("Agreement of the last layer", last["agreement"], BAR, shown=".4f"),
        "- Without any mixing in that layer the same procedure does as well."
        if static["agreement"] >= last["agreement"]
        else "",
    ]


def _breaks(result: dict[str, Any]) -> str:
    """How many layers keep the agreement at the threshold, as far as all fewer were looked at too."""
    level, kept = result["threshold"], 0
    while (one := result["primal"].get(str(kept + 1))) and one["agreement"] >= level:
        kept += 1
    words = f"{kept} layer{'' if kept == 1 else 's'} keep{'s' if kept == 1 else ''} the mean cosine at {level} or above"
    if one:
        return f"{words}, {kept + 1} do not."
    return (
        f"{words}, which is all of them." if kept == result["model_layers"] else f"{words}; {kept + 1} were not tried."
    )


def _places(result: dict[str, Any]) -> str:
    """Which conversions ran on what."""
    places: dict[str, list[str]] = {}
    for kind in ("primal", "no_mixing"):
        for count, one in result[kind].items():
            name = count if kind == "primal" else f"{count} without mixing"
            places.setdefault(f"{one['hardware']}, torch {one['torch']}", []).append(name)
    return "; ".join(f"{', '.join(names)} on {place}" for place, names in places.items())

"""Singular values of attention by layer: is Primal-Attention of lower rank, and against what? (Chen et al. 2023, figure 2)

c_1 is the first singular value's share of their sum, the first point of the paper's curve; effective rank is e to the
entropy of the shares; "90 %" is how many singular values hold 90 % of the sum. Means over heads and sequences. A softmax
matrix may have rank n; the primal kernel K_X has at most the rank of a head's width, and so has the cosine kernel of any
layer's queries and keys: **a sharper decay than softmax's is partly by construction**, so the cosine kernel of the same
layer stands beside each, and for primal layers the same network before training and trained without the KSVD loss (eta = 0).
The paper does not say which matrix stands for its primal layer; ours is K_X.

MiniLM (6 layers, 12 heads of width 32) reads eight topics of Python's own manual, 197 tokens each, as many as the paper's
ViT has. The networks are those of `primal-uea` (2 layers, 8 heads of width 8, rank 10) on JapaneseVowels, 30 epochs, three
seeds, read on 60 test series. Their KKT residual, zero if and only if the layer is a kernel SVD of what it reads, is given
too: it is what the loss is meant for.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments import series
from experiments.recipe import Block, Setting, Table
from heedful import lens
from heedful.nn import Primal, PrimalAttention, ksvd_loss

PRIMAL = Primal(10, rank_multi=5)
# name: what attends, eta, whether it is trained
NETWORKS: dict[str, tuple[list[Any], float, bool]] = {
    "softmax": (["softmax", "softmax"], 0.0, True),
    "primal, eta 0.1": ([PRIMAL, PRIMAL], 0.1, True),
    "primal, eta 0": ([PRIMAL, PRIMAL], 0.0, True),
    "primal, untrained": ([PRIMAL, PRIMAL], 0.0, False),
    "softmax+primal, eta 0.1": (["softmax", PRIMAL], 0.1, True),
    "softmax+primal, eta 0": (["softmax", PRIMAL], 0.0, True),
}
TOKENS, EPOCHS, CASES = 197, 30, 60
DATA = "JapaneseVowels"

# Read off the figure: DeiT-S/16 on ImageNet-1K, 197 tokens; layers, softmax's c_1, the hybrid's with primal in the last layer.
PAPER = [("0-3", 0.16, 0.16), ("4-7", 0.39, 0.44), ("11 (the last)", 0.77, 0.93)]

Row = dict[str, Any]


def summary(spectra: Iterable[lens.MatrixSpectrum]) -> list[Row]:
    """Means by layer and kind of matrix."""
    groups: dict[tuple[int, str], list[lens.MatrixSpectrum]] = {}
    for one in spectra:
        groups.setdefault((one.layer, one.name), []).append(one)
    return [
        {
            "layer": layer,
            "matrix": name,
            "matrices": len(group),
            "bound": statistics.fmean(one.bound for one in group),
            "c_1": statistics.fmean(one.cumulative()[0] for one in group),
            "effective_rank": statistics.fmean(one.effective_rank for one in group),
            "stable_rank": statistics.fmean(one.stable_rank for one in group),
            "rank_90": statistics.fmean(one.rank() for one in group),
            "rank_90_energy": statistics.fmean(one.rank(power=2) for one in group),
        }
        for (layer, name), group in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1] == "cosine"))
    ]


def of_minilm(texts: int) -> list[Row]:
    """Softmax and cosine kernel of every layer of the embedded model."""
    from pydoc_data.topics import topics

    from heedful.bridges.reading import demo_model_path, load

    model, tokenizer = load(demo_model_path())
    spectra: list[lens.MatrixSpectrum] = []
    read = 0
    for name in sorted(topics):
        ids = tokenizer(topics[name], truncation=True, max_length=TOKENS, return_tensors="pt")
        if ids["input_ids"].shape[1] == TOKENS and read < texts:
            spectra += lens.spectrum(model, dict(ids))
            read += 1
    return summary(spectra)


def of_network(folder: Path, name: str, seed: int, epochs: int, cases: int) -> Row:
    """Spectra, J^2 and KKT residual of one network on test series."""
    from heedful.series import SeriesClassifier

    torch.set_num_threads(1)
    layers, eta, trained = NETWORKS[name]
    train, test = series.load(folder, DATA)
    model = SeriesClassifier(
        layers, eta=eta, epochs=epochs, batch_size=16, validation_fraction=None, random_state=seed, device="cpu"
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "[0-9]+ of [0-9]+ series are longer")
        # Untrained: one epoch of steps too small to move a weight.
        model.set_params(**({} if trained else {"lr": 1e-30, "epochs": 1})).fit(train.X, train.y)
        accuracy = 100 * model.score(test.X, test.y)
        inputs = tuple(part[:cases] for part in model._tensors(model._read(test.X)))
    x, padding = inputs
    # One by one and without padding, whose queries attend too.
    ends = (~padding).sum(dim=1).tolist()
    spectra = [
        one
        for at, end in enumerate(ends)
        for one in lens.spectrum(model.network_, (x[at : at + 1, :end], padding[at : at + 1, :end]))
    ]
    return {
        "network": name,
        "seed": seed,
        "accuracy": accuracy,
        **certificates(model.network_, inputs),
        "rows": summary(spectra),
    }


@torch.no_grad()
def certificates(network: nn.Module, inputs: tuple[Tensor, ...]) -> Row:
    """Mean J^2 of the primal layers, and their KKT residuals."""
    residuals: list[float] = []

    def look(layer: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(layer, PrimalAttention)
        residuals.append(float(layer.kkt_residual(*args).mean()))

    primal = [part for part in network.modules() if isinstance(part, PrimalAttention)]
    hooks = [layer.register_forward_pre_hook(look) for layer in primal]
    network(*inputs)
    for hook in hooks:
        hook.remove()
    return {"j_squared": float(ksvd_loss(network)) if primal else None, "kkt": residuals}


def run(setting: Setting) -> dict[str, Any]:
    folder = setting.work / "data"
    series.prepare(folder)
    seeds, epochs, cases, texts = ((0,), 1, 5, 1) if setting.quick else ((0, 1, 2), EPOCHS, CASES, 8)
    parts = {f"{name} seed {seed}": (folder, name, seed, epochs, cases) for seed in seeds for name in NETWORKS}
    store = setting.store()
    minilm, networks = store.get("MiniLM", lambda: of_minilm(texts)), store.run(of_network, parts, setting.jobs)
    return {
        "quick": setting.quick,
        "minilm": {"texts": texts, "tokens": TOKENS, "rows": minilm},
        "networks": [networks[name] for name in parts],
    }


def tables(result: dict[str, Any]) -> list[Block]:
    minilm, networks = result["minilm"], result["networks"]
    by_name = {name: [one for one in networks if one["network"] == name] for name in NETWORKS}
    spectra = [
        [name, first["layer"], first["matrix"], *_figures([one["rows"][at] for one in own])]
        for name, own in by_name.items()
        for at, first in enumerate(own[0]["rows"])
    ]
    accuracies = []
    for name, own in by_name.items():
        objective = residuals = ""
        if own[0]["kkt"]:
            objective = f"{statistics.fmean(one['j_squared'] for one in own):.3g}"
            each = zip(*(one["kkt"] for one in own), strict=True)
            residuals = ", ".join(f"{statistics.fmean(at):.2f}" for at in each)
        accuracies.append([name, f"{statistics.fmean(one['accuracy'] for one in own):.1f}", objective, residuals])
    figures = ["layer", "matrix", "rank at most", "c_1", "effective rank", "90 % in"]
    return [
        f"MiniLM, {minilm['texts']} texts of {minilm['tokens']} tokens:",
        Table(figures, [[row["layer"], row["matrix"], *_figures([row])] for row in minilm["rows"]]),
        "The paper's figure, DeiT-S/16 on ImageNet-1K, 197 tokens, primal attention in the last layer of the second:",
        Table(["layers", "c_1, softmax", "c_1, softmax and primal last"], PAPER, paper="c_1, softmax and primal last"),
        f"{DATA}, mean over {len({one['seed'] for one in networks})} seeds:",
        Table(["network", *figures], spectra),
        Table(
            ["network", "test accuracy, %", "J²", "KKT residual by primal layer"],
            accuracies,
            control="primal, untrained",
        ),
        _reading(result),
    ]


def _figures(rows: list[Row]) -> list[str]:
    written = {"bound": ".4g", "c_1": ".2f", "effective_rank": ".1f", "rank_90": ".1f"}
    return [format(statistics.fmean(row[key] for row in rows), how) for key, how in written.items()]


def _reading(result: dict[str, Any]) -> str:
    """What the figures say, in words that follow them."""

    def last(network: str, matrix: str) -> list[float]:
        rows = [one["rows"] for one in result["networks"] if one["network"] == network]
        return [[row["effective_rank"] for row in one if row["matrix"] == matrix][-1] for one in rows]

    ranks = {name: last(name, "primal") for name in NETWORKS if name != "softmax"}
    softmax, cosine = (statistics.fmean(last("softmax", matrix)) for matrix in ("softmax", "cosine"))
    mean = {name: statistics.fmean(values) for name, values in ranks.items()}
    gaps = [one - other for one, other in zip(ranks["primal, eta 0.1"], ranks["primal, eta 0"], strict=True)]
    seeds = (
        "in every seed" if all(gap < 0 for gap in gaps) else "but not in every seed" if min(gaps) < 0 else "in no seed"
    )
    return (
        f"Effective rank of the last layer: softmax {softmax:.1f}, its cosine kernel {cosine:.1f}; primal {mean['primal, eta 0.1']:.1f} with the "
        f"KSVD loss, {mean['primal, eta 0']:.1f} without it, {mean['primal, untrained']:.1f} before any training. The loss changes it by "
        f"{statistics.fmean(gaps):+.2f} in the mean; it is lower with the loss {seeds}."
    )

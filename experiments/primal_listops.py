"""ListOps of the Long Range Arena with the two-layer model of Chen et al. 2023 (Primal-Attention), 5,000 steps.

Data: 96,000 / 2,000 / 2,000 samples of `experiments/listops.py`. Model and training as in the authors' code: width 64, two
heads, hidden 128, pre-norm, dropout 0.1, learned positions, mean pooling over 2,048 positions where padding counts as zero,
a head 64 -> 128 -> 10, AdamW at 1e-4, one linear cycle with 1,000 steps of warm-up, batches of 32, dev accuracy every 50
steps, test accuracy once, at the best dev step. (rank, eta): primal (20, 0.1), softmax + primal (30, 0.05), both with 10
rows per component and the loss of the batch. "none" leaves attention out.

Where ours differs: padding enters neither the sample nor the loss (there it enters both); bfloat16 in place of float16, with
scores and loss in float32 as there; three seeds in place of one; `primal` samples by stride as the authors do, `primal
(segment mean)` is our default and sees every token. 37 % is the plateau of all methods that learn the task at all, not a
solution; always answering the commonest label gives the floor that is printed. **The control that embarrasses the task**: a table of
counts that sees the first token alone, the outermost operation, and answers what is commonest under it.

Needs a GPU, some minutes of it: five models train at a time. `--seconds 300` starts no model later than that, and
what is there is printed; the next run continues, a model that was stopped from the last 250 steps it kept.
"""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments import listops
from experiments.recipe import Bar, Block, Setting, Table
from heedful.nn import Encoder, Primal, PrimalAttention, ksvd_loss

POSITIONS, WIDTH, HEADS, HIDDEN, DROPOUT = 2_048, 64, 2, 128, 0.1
KEPT_EVERY = 250


class Form(NamedTuple):
    """A model: what attends in its two layers, and the weight of the KSVD loss."""

    layers: tuple[Any, Any]
    eta: float = 0.0


def _primal(rank: int, sampling: Any = "stride") -> Primal:
    return Primal(rank, rank_multi=10, sampling=sampling)


FORMS = {
    "primal": Form((_primal(20), _primal(20)), 0.1),
    "primal (segment mean)": Form((_primal(20, "segment_mean"), _primal(20, "segment_mean")), 0.1),
    "softmax": Form(("softmax", "softmax")),
    "softmax+primal": Form(("softmax", _primal(30)), 0.05),
    "none": Form(("none", "none")),
}

# Chen et al. 2023, table of LRA: accuracy in %, and seconds for 1,000 steps with evaluation, on a GPU that is not named.
PAPER = {"primal": (37.3, 56.5), "softmax": (37.1, 194.5), "softmax+primal": (37.3, 113.4)}
BARS = {"primal": 36.0, "softmax": 36.0}


class Protocol(NamedTuple):
    steps: int = 5_000
    warmup: int = 1_000
    evaluate: int = 50
    batch: int = 32
    rate: float = 1e-4
    samples: tuple[int, int, int] = tuple(listops.SPLITS.values())  # type: ignore[assignment]


QUICK = Protocol(steps=4, warmup=1, evaluate=2, batch=2, samples=(16, 6, 6))


class Network(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(listops.SYMBOLS, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.encoder = Encoder(WIDTH, HEADS, form.layers, HIDDEN, DROPOUT, max_len=POSITIONS)
        self.head = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        """`[B, n]` and where it is padding -> logits `[B, 10]`."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        x = self.encoder(functional.dropout(x, DROPOUT, self.training), key_padding_mask=padding)
        # A batch that is cut to its longest sample has the mean it would have at full length.
        pooled = x.float().masked_fill(padding[..., None], 0.0).sum(dim=1) / POSITIONS
        return self.head(pooled)


class Split(NamedTuple):
    tokens: Tensor  # [S, n] bytes, on the device
    lengths: np.ndarray
    values: Tensor

    def batch(self, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, cut to the longest and filled up to a multiple of 64 for kernels that like it; padding; values."""
        longest = -(-int(self.lengths[rows].max()) // 64) * 64
        at = torch.from_numpy(rows).to(self.tokens.device, non_blocking=True)
        tokens = self.tokens[at, :longest].long()
        return tokens, tokens == 0, self.values[at]


def splits(data: listops.Listed, counts: tuple[int, ...], device: str) -> list[Split]:
    parts, first = [], 0
    for count in counts:
        tokens, lengths, values = data.padded(first, count, POSITIONS)
        parts.append(Split(torch.from_numpy(tokens).to(device), lengths, torch.from_numpy(values).long().to(device)))
        first += count
    return parts


def order(count: int, protocol: Protocol, seed: int) -> np.ndarray:
    """The samples of every step, `[steps, batch]`: pass after pass, each in an order of its own."""
    source = np.random.default_rng(seed)
    passes = math.ceil(protocol.steps * protocol.batch / count)
    every = np.concatenate([source.permutation(count) for _ in range(passes)])
    return every[: protocol.steps * protocol.batch].reshape(protocol.steps, protocol.batch)


@torch.no_grad()
def accuracy(network: Network, split: Split, device: str, size: int = 250) -> float:
    network.eval()
    primal = [part for part in network.modules() if isinstance(part, PrimalAttention)]
    for layer in primal:
        layer.track_loss = False
    right = torch.zeros((), device=device)
    # Neighbours in length, so that little padding is computed.
    sorted_rows = np.argsort(split.lengths, kind="stable")
    for start in range(0, len(sorted_rows), size):
        tokens, padding, values = split.batch(sorted_rows[start : start + size])
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            right += (network(tokens, padding).argmax(-1) == values).sum()
    for layer in primal:
        layer.track_loss = True
    network.train()
    return float(right) / len(sorted_rows)


class Run:
    """One training, which goes on from its checkpoint where there is one."""

    def __init__(self, name: str, seed: int, protocol: Protocol, device: str) -> None:
        torch.manual_seed(seed)
        self.name, self.seed, self.protocol, self.device, self.eta = name, seed, protocol, device, FORMS[name].eta
        self.network = Network(FORMS[name]).to(device)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), protocol.rate, (0.9, 0.999), 1e-6, 0.0, fused=device.startswith("cuda")
        )
        # As the authors call it: it also moves beta 1 between 0.85 and 0.95.
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer,
            protocol.rate,
            total_steps=protocol.steps,
            pct_start=protocol.warmup / protocol.steps,
            anneal_strategy="linear",
        )
        self.done, self.seconds, self.best, self.best_step = 0, 0.0, -1.0, 0
        self.curve: list[float] = []
        self.weights: dict[str, Tensor] = {}

    def step(self, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        tokens, padding, values = batch
        # Dropout depends on seed and step alone, so that a restart draws what it would have drawn.
        torch.manual_seed(1_000_003 * (self.seed + 1) + self.done)
        with torch.autocast(torch.device(self.device).type, torch.bfloat16):
            logits = self.network(tokens, padding)
        loss = functional.cross_entropy(logits.float(), values)
        if self.eta:
            loss = loss + self.eta * ksvd_loss(self.network, "batch")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.done += 1

    def look(self, dev: Split) -> None:
        share = accuracy(self.network, dev, self.device)
        self.curve.append(share)
        if share > self.best:
            self.best, self.best_step = share, self.done
            self.weights = {name: part.detach().clone() for name, part in self.network.state_dict().items()}

    def keep(self, file: Path) -> None:
        parts = {"network": self.network, "optimizer": self.optimizer, "schedule": self.schedule}
        state = {name: part.state_dict() for name, part in parts.items()}
        plain = {name: getattr(self, name) for name in ("done", "seconds", "best", "best_step", "curve", "weights")}
        new = file.with_suffix(".new")
        torch.save(state | plain, new)
        new.replace(file)

    def resume(self, file: Path) -> None:
        if file.is_file():
            state = torch.load(file, map_location=self.device, weights_only=True)
            for name in ("network", "optimizer", "schedule"):
                getattr(self, name).load_state_dict(state.pop(name))
            self.__dict__.update(state)


def train(name: str, seed: int, protocol: Protocol, folder: Path, device: str) -> dict[str, Any]:
    """Trains one model and tests it once; its checkpoint lies in the folder until it ends."""
    file = folder / f"{name}-{seed}.pt"
    data = listops.prepare(folder, sum(protocol.samples))
    learn, dev, test = splits(data, protocol.samples, device)
    run = Run(name, seed, protocol, device)
    run.resume(file)
    rows = order(len(learn.lengths), protocol, seed)
    began = time.perf_counter() - run.seconds
    while run.done < protocol.steps:
        run.step(learn.batch(rows[run.done]))
        if run.done % protocol.evaluate == 0:
            run.look(dev)
            run.seconds = time.perf_counter() - began
        if run.done % KEPT_EVERY == 0:
            run.keep(file)
    run.network.load_state_dict(run.weights)
    record = {
        "attention": name,
        "seed": seed,
        "test": 100 * accuracy(run.network, test, device),
        "dev": 100 * run.best,
        "best_step": run.best_step,
        "steps": run.done,
        "seconds": round(time.perf_counter() - began, 1),
        "parameters": sum(part.numel() for part in run.network.parameters()),
        "dev_curve": [round(100 * share, 1) for share in run.curve[9::10]],
    }
    file.unlink(missing_ok=True)
    return record


def cost(name: str, protocol: Protocol, folder: Path, device: str) -> dict[str, float | None]:
    """Seconds of 1,000 training steps with nothing else on the device, and the peak of memory beyond the data."""
    data = listops.prepare(folder, sum(protocol.samples))
    learn = splits(data, protocol.samples, device)[0]
    on_gpu = device.startswith("cuda")
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    run = Run(name, 0, protocol, device)
    rows = order(len(learn.lengths), protocol, 0)
    warm = min(20, protocol.steps // 4)
    began = 0.0
    for at in range(min(220, protocol.steps)):
        if at == warm:
            _wait(device)
            began = time.perf_counter()
        run.step(learn.batch(rows[at]))
    _wait(device)
    seconds = 1_000 * (time.perf_counter() - began) / (run.done - warm)
    peak = (torch.cuda.max_memory_allocated() - before) / 1e9 if on_gpu else None
    return {"seconds_per_1000_steps": seconds, "gigabytes": peak}


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def first_token(data: listops.Listed, counts: tuple[int, int, int]) -> dict[str, float]:
    """The control: the commonest value of the training samples that begin alike, accuracy in % on each split."""
    roots = data.tokens[np.concatenate(([0], data.ends[:-1]))]
    learn, _, _ = counts
    table = np.zeros((listops.SYMBOLS, 10), int)
    np.add.at(table, (roots[:learn], data.values[:learn]), 1)
    right = table.argmax(axis=1)[roots] == data.values
    cuts = np.cumsum((0, *counts))
    return {
        name: 100 * float(right[begin:end].mean())
        for name, begin, end in zip(("train", "dev", "test"), cuts, cuts[1:], strict=False)
    }


def run(setting: Setting) -> dict[str, Any]:
    protocol, seeds, folder = Protocol(), (0, 1, 2), setting.work
    if setting.quick:
        protocol, seeds, folder = QUICK, (0,), setting.work / "quick"
        folder.mkdir(exist_ok=True)
    data = listops.prepare(folder, sum(protocol.samples), say=setting.say)
    parts = {f"{name} seed {seed}": (name, seed, protocol, folder, setting.device) for seed in seeds for name in FORMS}
    store = setting.store()
    rows = store.run(train, parts, min(len(FORMS), setting.jobs))
    costs = {name: (name, protocol, folder, setting.device) for name in FORMS}
    named = {f"cost of {name}": part for name, part in costs.items()}
    spent = store.run(cost, named)
    tests = data.values[-protocol.samples[-1] :]
    return {
        "quick": setting.quick,
        "runs": [rows[name] for name in parts if name in rows],
        "wanted": len(parts),
        "costs": {name: spent[f"cost of {name}"] for name in FORMS if f"cost of {name}" in spent},
        "steps": protocol.steps,
        "samples": list(protocol.samples),
        "mean_length": float(np.diff(data.ends, prepend=0).mean()),
        "first_token": first_token(data, protocol.samples),
        "floor": 100 * np.bincount(tests, minlength=10).max() / len(tests),
    }


def tables(result: dict[str, Any]) -> list[Block]:
    means, rows = {}, []
    for name in FORMS:
        own = [row for row in result["runs"] if row["attention"] == name]
        if not own:
            continue
        test, dev = ([row[part] for row in own] for part in ("test", "dev"))
        means[name] = statistics.fmean(test)
        accuracy, seconds = PAPER.get(name, ("", ""))
        spent = result["costs"].get(name, {"seconds_per_1000_steps": None, "gigabytes": None})
        time, memory = (
            None if value is None else f"{value:.{digits}f}"
            for value, digits in zip(spent.values(), (1, 2), strict=True)
        )
        rows.append([name, _spread(test), _spread(dev), len(own), accuracy, time, seconds, memory])
    first, control = result["first_token"], "first token alone (a table of counts)"
    rows.append([control, f"{first['test']:.1f}", f"{first['dev']:.1f}", *[None] * 5])
    mixing = {name: value for name, value in means.items() if name != "none"}
    embarrassing = "none" in means and mixing and means["none"] >= max(mixing.values())
    tests, runs = result["samples"][-1], len(result["runs"])
    columns = ["attention", "test", "dev", "seeds", "paper", "s / 1,000 steps", "paper's", "GB"]
    return [
        "Test accuracy in %, mean (lowest-highest) over seeds, at the best of the dev steps; the paper's is one run. Times are of training steps alone.",
        Table(columns, rows, paper="paper", control=control),
        f"The table of counts is right on {first['train']:.1f} % of the training samples: so much follows from the outermost operation by "
        "itself, and no accuracy near it shows that a model has read further.\n"
        f"Always the commonest label: {result['floor']:.1f} % (the majority floor). {result['steps']:,} steps; "
        f"{', '.join(f'{count:,}' for count in result['samples'])} samples of {result['mean_length']:.0f} tokens on average. "
        "The paper's seconds hold evaluation, and softmax without a fused kernel and with recomputed gradients.",
        *(Bar(f"Accuracy of {name}, %", means[name], bar, shown=".1f") for name, bar in BARS.items() if name in means),
        f"- The network without any attention, {means['none']:.1f} %, is as good as every other."
        if embarrassing
        else "",
        f"- Of {tests:,} test samples, a share of 36 % has a standard error of {100 * math.sqrt(0.36 * 0.64 / tests):.1f} points.",
        f"- Incomplete: {runs} of {result['wanted']} trainings." if runs < result["wanted"] else "",
    ]


def _spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1f} ({min(values):.1f}-{max(values):.1f})"

"""Where charged particles will be: what the symmetry of space is worth, beside EGNN, an MLP and a Transformer that sees turned samples.

The task of Satorras et al. 2021 (*E(n) Equivariant Graph Neural Networks*, table 2): from positions, velocities and charges of five
particles the positions 1000 steps later, mean squared error on 2000 test samples (`bodies.py`: the simulator, its constants, the rivals).
Trained on 300, 1000 and 3000 samples (3000 is the published size), by AdamW in batches of 100 on a cosine schedule, for 2,500, 4,000 and
6,000 steps; the checkpoint is the best of 80 on 2000 validation samples, as is the learning rate of each model at each size, of 1e-3 and
3e-3; the weight decay is 0.01. Three seeds, each with training samples of its own, those of the first the published ones. Every model gives the displacement from the present position, sees
positions about their centre or differences of them, and gets the same steps; the Transformer sees every sample of every batch turned by a
random orthogonal matrix. The controls know no forces: "linear" is x + t v with t fitted to the training samples, "still" is x.

The published EGNN was trained for 300,000 steps at one rate; ours for 6,000 on a decaying rate, so that all models fit into some minutes.
A model whose best checkpoint is one of its last would go on to learn: the table says where it was.
Last, trained models are given turned, mirrored and shifted test samples, in float64: how far is the prediction from the turned one?

On a GPU each step is one CUDA graph, and all rates and seeds of a model and a size run beside one another in one process; on a CPU every
fit is a part of its own. `--seconds 480` starts no part later than that; the next run goes on.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.bodies import EGNN, PUBLISHED, Bodies, Perceptron, PlainTransformer, fitted_time, samples
from experiments.recipe import Bar, Block, Setting, Table
from experiments.symmetry import mean, rotations, shown
from heedful.geometry.network import EquivariantNetwork

OURS = "equivariant attention"


class EquivariantAttention(nn.Module):
    """`heedful.geometry.EquivariantNetwork` on positions, velocities and charges; its pair function has three hidden layers."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.network = EquivariantNetwork(
            3, vectors=2, scalars=1, output="vector", per_point=True, translation="equivariant",
            layers=layers, channels=4, width=width, units=width, depth=3,
        )  # fmt: skip

    def forward(self, position: Tensor, velocity: Tensor, charge: Tensor) -> Tensor:
        return self.network(torch.stack((position, velocity), 2), charge[..., None])[:, :, 0]


# model(position [B, n, 3], velocity [B, n, 3], charge [B, n]) -> position [B, n, 3]
MODELS: dict[str, Callable[[], nn.Module]] = {
    OURS: EquivariantAttention,
    "EGNN": EGNN,
    "augmented Transformer": PlainTransformer,
    "MLP": Perceptron,
}
AUGMENTED = {"augmented Transformer"}

STEPS = {3000: 6_000, 1000: 4_000, 300: 2_500}  # by training samples
RATES, SEEDS, BATCH, CHECKS = (1e-3, 3e-3), (0, 1, 2), 100, 80
ON_ONE_GPU = 4  # processes

# Satorras et al. 2021, table 2, trained on 3000 samples
PAPER = {"EGNN": 0.0071, "linear": 0.0819}


class Learner:
    """A model in training. A step takes nothing from outside and fetches nothing, so that a GPU can repeat it by itself."""

    WARM = 3  # steps before a CUDA graph is captured: allocations and the optimizer's state

    def __init__(
        self, model: nn.Module, data: Bodies, steps: int, rate: float, generator: torch.Generator, augment: bool
    ) -> None:
        device = data.position.device
        size = len(data.position)
        batch = min(BATCH, size)
        each = size // batch  # batches in an epoch
        epochs = torch.rand(-(-steps // each), size, generator=generator).argsort(1)
        self.order = epochs[:, : each * batch].reshape(-1, batch)[:steps].to(device)  # rows of every step
        if augment:
            self.pool = rotations(4096, data.position.shape[-1], generator).to(data.position)
            self.turns = torch.randint(len(self.pool), self.order.shape, generator=generator).to(device)
        self.model, self.data, self.steps, self.rate, self.augment = model, data, steps, rate, augment
        self.step_at = torch.zeros(1, dtype=torch.long, device=device)
        self.rate_at = torch.tensor(rate, device=device)
        cuda = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), self.rate_at, capturable=cuda, fused=True)
        self.stream = torch.cuda.Stream(device) if cuda else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.best = torch.full((), math.inf, device=device)
        self.best_at = torch.zeros_like(self.step_at)
        self.kept = {name: value.clone() for name, value in model.state_dict().items()}
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))  # for what is copied there

    def step(self) -> None:
        self.rate_at.copy_(self.rate * 0.5 * (1 + torch.cos(self.step_at * (math.pi / self.steps)))[0])
        position, velocity, charge, wanted = self.data.rows(self.order[self.step_at][0])
        if self.augment:
            turn = self.pool[self.turns[self.step_at][0]]
            position, velocity, wanted = position @ turn, velocity @ turn, wanted @ turn
        loss = nn.functional.mse_loss(self.model(position, velocity, charge), wanted)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step_at += 1

    def advance(self, at: int) -> None:
        """The step `at`; on a GPU in a stream of its own."""
        if self.stream is None:
            self.step()
            return
        if at == self.WARM:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.step()
        with torch.cuda.stream(self.stream):
            if self.graph is None:
                self.step()
            else:
                self.graph.replay()

    @torch.no_grad()
    def check(self, validation: Bodies) -> None:
        """Keeps the weights if they are the best so far."""
        with torch.cuda.stream(self.stream):
            error = squared_error(self.model, validation)
            better = error < self.best
            self.best = torch.where(better, error, self.best)
            self.best_at = torch.where(better, self.step_at, self.best_at)
            for name, value in self.model.state_dict().items():
                self.kept[name].copy_(torch.where(better, value, self.kept[name]))

    def finished(self) -> nn.Module:
        if self.stream is not None:
            self.stream.synchronize()
        self.model.load_state_dict(self.kept)
        return self.model.eval()


def squared_error(model: Callable[..., Tensor], data: Bodies) -> Tensor:
    return nn.functional.mse_loss(model(*data[:3]), data.wanted)


@torch.no_grad()
def deviation(model: nn.Module, data: Bodies) -> float:
    """How far predictions of turned and shifted samples are from turned and shifted predictions, by the largest displacement.

    Both a rotation and a rotation with a mirror are tried; in float64.
    """
    model, data = copy.deepcopy(model).double(), data.to(str(data.position.device), torch.float64)
    generator = torch.Generator().manual_seed(7)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))[0].to(data.position)
    shift = torch.randn(3, generator=generator).to(data.position)
    plain = model(*data[:3])
    errors = [
        model(data.position @ turned + shift, data.velocity @ turned, data.charge) - (plain @ turned + shift)
        for turned in (turn, -turn)
    ]
    return float(torch.stack(errors).abs().max() / (plain - data.position).abs().max())


def own(training: Bodies, seed: int, seeds: int, size: int) -> Bodies:
    """The training samples of one seed."""
    first = seed * (len(training.charge) // seeds)
    return training.rows(slice(first, first + size))


def fits(
    folder: Path,
    counts: tuple[int, ...],
    name: str,
    size: int,
    steps: int,
    chosen: list[tuple[float, int]],
    seeds: int,
    device: str,
) -> list[dict[str, Any]]:
    """Trains a model for each of some rates and seeds, beside one another, and tests each at its best checkpoint."""
    began = time.perf_counter()
    training, validation, test = (part.to(device, torch.float32) for part in samples(folder, counts))
    learners = []
    for rate, seed in chosen:
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(1000 * seed + size)
        data = own(training, seed, seeds, size)
        learners.append(Learner(MODELS[name]().to(device), data, steps, rate, generator, name in AUGMENTED))
    every = max(1, steps // CHECKS)
    for at in range(steps):
        if at % every == 0:
            for learner in learners:
                learner.check(validation)
        for learner in learners:
            learner.advance(at)
    rows = []
    for learner, (rate, seed) in zip(learners, chosen, strict=True):
        learner.check(validation)
        model = learner.finished()
        with torch.no_grad():
            error = float(squared_error(model, test))
        rows.append(
            {
                "model": name,
                "size": size,
                "rate": rate,
                "seed": seed,
                "validation": float(learner.best),
                "test": error,
                "best_step": int(learner.best_at),
                "deviation": deviation(model, test.rows(slice(100))),
            }
        )
    seconds = (time.perf_counter() - began) / len(rows)
    return [{**row, "seconds": round(seconds, 1)} for row in rows]


def run(setting: Setting) -> dict[str, Any]:
    cuda = setting.device.startswith("cuda")
    steps, rates, seeds, counts = STEPS, list(RATES), list(SEEDS), PUBLISHED
    if setting.quick:
        steps, rates, seeds, counts = {60: 20, 30: 10}, rates[:1], seeds[:1], (60, 40, 40)
    setting.say(f"simulating {sum(counts):,} systems, where there is no file of them")
    training, _, test = samples(setting.work, counts)
    pairs = [(rate, seed) for rate in rates for seed in seeds]
    # One GPU does many fits at once, one core a single one.
    groups = [pairs] if cuda else [[pair] for pair in pairs]
    parameters = {name: sum(each.numel() for each in make().parameters()) for name, make in MODELS.items()}
    parts = {
        f"{name} of {parameters[name]}, {size} samples, {steps[size]} steps, {' '.join(f'{rate:g}+{seed}' for rate, seed in group)}": (
            setting.work, counts, name, size, steps[size], group, len(seeds), setting.device,
        )
        for size in steps for group in groups for name in MODELS
    }  # fmt: skip
    done = setting.store().run(fits, parts, min(setting.jobs, ON_ONE_GPU) if cuda else setting.jobs)
    rows = [row for group in done.values() for row in group]

    def linear(size: int, seed: int) -> float:
        time = fitted_time(own(training, seed, len(seeds), size))
        return float(squared_error(lambda position, velocity, _: position + time * velocity, test))

    still = float(squared_error(lambda position, *_: position, test))
    errors: dict[str, dict[str, list[float]]] = {
        "linear": {str(size): [linear(size, seed) for seed in seeds] for size in steps},
        "still": {str(size): [still] for size in steps},
    }
    best: dict[str, dict[str, float]] = {}
    for name in MODELS:
        errors[name], best[name] = {}, {}
        for size in steps:
            of_rate = [
                [row for row in rows if (row["model"], row["size"], row["rate"]) == (name, size, rate)]
                for rate in rates
            ]
            # A rate is chosen where all of them are finished.
            if all(len(fits) == len(seeds) for fits in of_rate):
                chosen = min(of_rate, key=lambda fits: mean([row["validation"] for row in fits]))
                errors[name][str(size)] = [row["test"] for row in chosen]
                best[name][str(size)] = chosen[0]["rate"]
    return {
        "quick": setting.quick,
        "steps": {str(size): count for size, count in sorted(steps.items())},
        "parameters": parameters,
        "errors": errors,
        "rates": best,
        "deviation": {
            name: max((row["deviation"] for row in rows if row["model"] == name), default=None) for name in MODELS
        },
        "fits": rows,
        "wanted": len(MODELS) * len(steps) * len(pairs),
    }


def tables(result: dict[str, Any]) -> list[Block]:
    sizes, errors = list(result["steps"]), result["errors"]
    largest = sizes[-1]
    at_largest = {name: mean(of_size[largest]) for name, of_size in errors.items() if largest in of_size}
    published = "published, 3000"
    rows = [
        [name, *(shown(of_size[size], 4) if size in of_size else "" for size in sizes), PAPER.get(name)]
        for name, of_size in sorted(errors.items(), key=lambda item: at_largest.get(item[0], math.inf))
    ]

    def best_steps(name: str) -> list[int]:
        """Where the checkpoints of the chosen rate were taken, with most samples."""
        rate = result["rates"][name].get(largest)
        return sorted(
            row["best_step"]
            for row in result["fits"]
            if (row["model"], str(row["size"]), row["rate"]) == (name, largest, rate)
        )

    steps = result["steps"][largest]
    learning = [name for name in result["parameters"] if best_steps(name) and min(best_steps(name)) > 0.9 * steps]
    about = [
        [name, f"{count:,}", *(f"{result['rates'][name][size]:g}" if size in result["rates"][name] else "" for size in sizes),
         ", ".join(map(str, best_steps(name))), "" if result["deviation"][name] is None else f"{result['deviation'][name]:.1e}"]
        for name, count in result["parameters"].items()
    ]  # fmt: skip
    egnn, done = at_largest.get("EGNN"), len(result["fits"])
    return [
        "Mean squared error on test samples by training samples, mean (lowest-highest) over seeds.",
        Table(["model", *sizes, published], rows, paper=published, control="linear"),
        f"EGNN here has {egnn / PAPER['EGNN']:.2f} times the published error, after {result['steps'][largest]:,} steps instead of 300,000."
        if egnn and not result["quick"]
        else "",
        "The learning rate that validation chose, and how far predictions of turned test samples are from turned predictions:",
        Table(["model", "parameters", *(f"rate, {size}" for size in sizes), f"best of {steps:,} steps", "deviation when turned"], about),
        f"Still learning at its last steps in every seed, so that its figure is an upper bound: {', '.join(learning)}." if learning else "",
        _fewer(errors, sizes),
        Bar(f"{OURS}, its error by EGNN's at {largest} samples", _ratio(at_largest, OURS, "EGNN"), 1.1, False, ".3g"),
        Bar(f"augmented Transformer, its error by that of {OURS} at {largest} samples",
            _ratio(at_largest, "augmented Transformer", OURS), 3.0, shown=".3g"),
        Bar(f"{OURS}, deviation when turned", result["deviation"].get(OURS), 1e-10, False, ".1e"),
        f"- Incomplete: {done} of {result['wanted']} fits." if done < result["wanted"] else "",
    ]  # fmt: skip


def _fewer(errors: dict[str, dict[str, list[float]]], sizes: list[str]) -> str:
    """What the symmetry is worth with few samples, said plainly."""
    ahead = [
        f"with {size} samples {', '.join(better)}"
        for size in sizes
        if size in errors.get(OURS, {})
        and (
            better := [name for name, of in errors.items() if size in of and mean(of[size]) < mean(errors[OURS][size])]
        )
    ]
    return f"Below {OURS}: {'; '.join(ahead)}." if ahead else ""


def _ratio(errors: dict[str, float], above: str, below: str) -> float | None:
    return errors[above] / errors[below] if above in errors and below in errors else None

"""RMTPP and THP of easy-tpp 0.3.0 on a split of ours; a program of its own, for an environment that has easy-tpp and not heedful.

    python -m venv easy; easy/bin/pip install torch==2.13.0 easy-tpp==0.3.0
    easy/bin/python -m experiments.easytpp experiments/.work/NAME/easy-tpp

It reads every `*.npz` of the folder, which the recipes `time-stackoverflow` and `time-hawkes` write there, and writes `*.json` beside it; the
recipes show what they find. Their models, likelihood and optimizer; times are counted from each sequence's beginning, in mean gaps of the training sequences
(unscaled ones are far worse). Width and learning rate are the better of `SETTINGS` on the validation sequences, the epoch too.

`nll` is per event and of the original unit of time, `-log lambda_k(t_i) + integral of the total intensity since the event before`, to which the mean gap's
logarithm is added for the unit. Where sequences were watched from 0 to an end, the wait for the first event and the one behind the last count
too. The integral is the trapezoidal rule, with 20 points in training and 500 in the test. `type nll` and `known` are of the type at its known time,
`lambda_k / sum lambda`; `unknown` averages that over the waiting time's own density, by the same rule on 200 waits.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

MODELS = ("RMTPP", "THP")
SETTINGS = ((32, 1e-3), (64, 5e-3))  # width, learning rate
BATCH, EPOCHS, PATIENCE = 32, 100, 10
POINTS, FINE, WAITS = 20, 500, 200
PARTS = ("train", "validation", "test")


def export(split: Any, file: Path) -> None:
    """Writes a split where this program finds it."""
    arrays = {
        "kinds": np.array(len(split.test.names)),
        "end": np.array(np.nan if split.test.end is None else split.test.end),
    }
    for name, part in zip(PARTS, split, strict=True):
        arrays |= {f"{name}_types": part.types, f"{name}_times": part.times, f"{name}_starts": part.starts}
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(file, **arrays)


def results(file: Path) -> dict[str, Any]:
    """What was measured of a split so far, by model."""
    files = {name: file.with_name(f"{file.stem}, {name}.json") for name in MODELS}
    return {name: json.loads(one.read_text()) for name, one in files.items() if one.is_file()}


def sequences(held: Any, name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """(types, times from 0 on) of each sequence; one that was watched has an event of no type at 0 and at its end."""
    kinds, end = int(held["kinds"]), float(held["end"])
    types, times, starts = (held[f"{name}_{what}"] for what in ("types", "times", "starts"))
    result = []
    for begin, stop in pairwise(starts):
        own_types, own_times = types[begin:stop], times[begin:stop]
        if np.isnan(end):
            own_times = own_times - own_times[0]
        else:
            own_types, own_times = np.r_[kinds, own_types, kinds], np.r_[0.0, own_times, end]
        result.append((own_types, own_times))
    return result


def batches(
    data: list[tuple[np.ndarray, np.ndarray]], kinds: int, scale: float, random: Any = None
) -> Iterator[dict[str, Any]]:
    """Padded batches of sequences of about one length, as easy-tpp takes them; shuffled where there is a generator."""
    import torch

    order = np.argsort([len(times) for _, times in data], kind="stable")
    groups = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
    if random is not None:
        lengths = np.array([len(times) for _, times in data]) * random.uniform(0.9, 1.1, len(data))
        order = np.argsort(lengths)
        groups = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
        random.shuffle(groups)
    for group in groups:
        longest = max(len(data[at][1]) for at in group)
        types = np.full((len(group), longest), kinds)
        times, gaps, real = np.zeros((3, len(group), longest))
        for row, at in enumerate(group):
            own_types, own_times = data[at]
            size = len(own_times)
            types[row, :size], times[row, :size], real[row, :size] = own_types, own_times / scale, 1
            times[row, size:] = own_times[-1] / scale
            gaps[row, 1:size] = np.diff(own_times) / scale
        hidden = np.triu(np.ones((longest, longest), bool), 1) | (real[:, None] == 0)  # [B, n, n], True is not seen
        yield {
            "time_seqs": torch.tensor(times, dtype=torch.float32), "time_delta_seqs": torch.tensor(gaps, dtype=torch.float32),
            "type_seqs": torch.tensor(types), "seq_non_pad_mask": torch.tensor(real == 1), "attention_mask": torch.tensor(hidden),
        }  # fmt: skip


def made(name: str, kinds: int, width: int) -> Any:
    from easy_tpp.config_factory import ModelConfig
    from easy_tpp.model import RMTPP, THP

    config = ModelConfig(
        model_id=name, hidden_size=width, num_layers=2, num_heads=2, dropout_rate=0.0, use_mc_samples=False,
        loss_integral_num_sample_per_step=POINTS, num_event_types=kinds, num_event_types_pad=kinds + 1, event_pad_index=kinds,
        gpu=-1, training=True,
    )  # fmt: skip
    return {"RMTPP": RMTPP, "THP": THP}[name](config)


def likelihood(model: Any, data: Any, kinds: int, scale: float, points: int) -> float:
    """The mean of -log p(time, type) over events, in the original unit of time."""
    import torch

    model.loss_integral_num_sample_per_step = points
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches(data, kinds, scale):
            loss, _ = model.loglike_loss(**batch)
            total += float(loss)
            count += int((batch["type_seqs"][:, 1:] < kinds).sum())
    model.loss_integral_num_sample_per_step = POINTS
    return total / count + math.log(scale)


def of_types(model: Any, data: Any, kinds: int, scale: float) -> dict[str, dict[str, float]]:
    """Accuracy and -log p of the types, at their known times and, averaged over the wait, at unknown ones."""
    import torch

    # Gaps are scaled to mean 1; from a thousandth of it to where few are left.
    waits = torch.cat((torch.zeros(1), torch.logspace(-4, 2, WAITS - 1)))
    right, loss, count = {"known": 0, "unknown": 0}, {"known": 0.0, "unknown": 0.0}, 0
    with torch.no_grad():
        for batch in batches(data, kinds, scale):
            times, gaps, types, _, hidden = batch.values()
            wanted = types[:, 1:]
            asked = wanted < kinds
            inputs = (times[:, :-1], gaps[:, :-1], types[:, :-1])
            at = torch.cat((gaps[:, 1:, None], waits.expand(*wanted.shape, -1)), -1)  # [B, n, 1 + waits]
            rates = model.compute_intensities_at_sample_times(*inputs, at, attention_mask=hidden[:, :-1, :-1])[
                asked
            ].double()
            own = wanted[asked][:, None]
            count += len(own)
            shares = {"known": rates[:, 0]}
            curve = rates[:, 1:]  # [targets, waits, kinds]
            sums = curve.sum(-1)
            steps = waits.diff().double()
            passed = torch.nn.functional.pad((0.5 * (sums[:, 1:] + sums[:, :-1]) * steps).cumsum(1), (1, 0))
            density = curve * (-passed).exp()[..., None]
            shares["unknown"] = (0.5 * (density[:, 1:] + density[:, :-1]) * steps[:, None]).sum(1) + 1e-12
            for name, share in shares.items():
                right[name] += int((share.argmax(1) == own[:, 0]).sum())
                loss[name] -= float((share / share.sum(1, keepdim=True)).gather(1, own).log().sum())
    return {name: {"accuracy": right[name] / count, "nll": loss[name] / count} for name in right}


def trained(name: str, held: Any, width: int, rate: float, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """The model of its best epoch on the validation sequences."""
    import torch

    kinds = int(held["kinds"])
    train, validation = (sequences(held, part) for part in PARTS[:2])
    scale = float(np.mean(np.concatenate([np.diff(times) for _, times in train])))
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    model = made(name, kinds, width)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    best, kept, at, began = math.inf, None, 0, time.perf_counter()
    for epoch in range(1, EPOCHS + 1):
        model.train()
        for batch in batches(train, kinds, scale, random):
            loss, count = model.loglike_loss(**batch)
            optimizer.zero_grad()
            (loss / count).backward()
            optimizer.step()
        model.eval()
        value = likelihood(model, validation, kinds, scale, POINTS)
        if value < best:
            best, kept, at = value, copy.deepcopy(model.state_dict()), epoch
        if epoch - at >= PATIENCE:
            break
    model.load_state_dict(kept)
    seconds = time.perf_counter() - began
    return model, {
        "width": width, "rate": rate, "validation": best, "epoch": at, "epochs": epoch, "seconds": seconds, "scale": scale,
        "parameters": sum(part.numel() for part in model.parameters()),
    }  # fmt: skip


def measured(name: str, file: Path) -> dict[str, Any]:
    """The better of the settings, on the test sequences."""
    with np.load(file) as opened:
        held = {key: opened[key] for key in opened.files}
    kinds = int(held["kinds"])
    tried = [trained(name, held, width, rate) for width, rate in SETTINGS]
    model, about = min(tried, key=lambda one: one[1]["validation"])
    test, scale = sequences(held, "test"), about["scale"]
    row = {**about, "nll": likelihood(model, test, kinds, scale, FINE), "tried": [each for _, each in tried]}
    return row | (of_types(model, test, kinds, scale) if kinds > 1 else {})


def main(folder: Path) -> None:
    for file in sorted(folder.glob("*.npz")):
        for name in MODELS:
            out = file.with_name(f"{file.stem}, {name}.json")
            if not out.is_file():
                out.write_text(json.dumps(measured(name, file)) + "\n")
                print(out.name, out.read_text()[:300], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A training step of GPT-2-small with one attention or another, eager and compiled."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from benchmarks.lengths import KERNELS, TORCH, attention
from benchmarks.timing import Timing, interleaved, synchronize


@dataclass(frozen=True)
class Steps:
    tokens: int = 16_384
    lengths: tuple[int, ...] = (1024, 4096)
    layers: int = 12
    width: int = 768
    vocabulary: int = 50_304
    repeats: int = 7
    seconds: float = 600.0  # in which compiled steps are waited for
    compiled: tuple[str, ...] = (TORCH, "Softmax", "Sigmoid", "ReluSquared", "Gaussian")
    device: str = "cuda"
    at_once: int = 7  # compiled steps that take memory at one time

    @property
    def ways(self) -> list[tuple[str, int, tuple[str, ...], str | None]]:
        """Eager steps first; each way with its length, its contestants and the mode of `torch.compile`."""
        contestants = (TORCH, *KERNELS) if self.device == "cuda" else (TORCH, "Sigmoid")
        graphs = (TORCH, "Sigmoid") if self.compiled else ()
        found: list[tuple[str, int, tuple[str, ...], str | None]]
        found = [("eager", length, contestants, None) for length in self.lengths]
        found += [("compiled", length, self.compiled, "default") for length in self.lengths]
        return [*found, ("reduce-overhead", self.lengths[0], graphs, "reduce-overhead")]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.attention = heads, attention

    def forward(self, x: Tensor) -> Tensor:
        split = self.inward(self.first(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)  # [B, H, 3, n, D]
        x = x + self.outward(self.attention(*split.unbind(2)).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    def __init__(self, setting: Steps, length: int, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        wide, heads = setting.width, max(1, setting.width // 64)
        self.words, self.places = nn.Embedding(setting.vocabulary, wide), nn.Embedding(length, wide)
        self.blocks = nn.ModuleList(Block(wide, heads, attention) for _ in range(setting.layers))
        self.norm = nn.LayerNorm(wide)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.words.weight.T
        return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def stepping(setting: Steps, length: int, name: str, mode: str | None) -> Callable[[], Any]:
    """A training step; `mode` is that of `torch.compile`, None for eager."""
    torch.manual_seed(0)
    with torch.device(setting.device):
        model: Any = Gpt(setting, length, attention(name, True))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=setting.device == "cuda")
    run = model if mode is None else torch.compile(model, fullgraph=True, mode=mode)
    ids = torch.randint(setting.vocabulary, (max(1, setting.tokens // length), length), device=setting.device)

    def step() -> None:
        with torch.autocast(setting.device, torch.bfloat16):
            loss = run(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Runner:
    """A compiled step in a process of its own: several compile at a time, and each runs when it is asked to."""

    def __init__(self, job: tuple[Steps, int, str, str], slots: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, slots, job), daemon=True)
        self.process.start()
        self.slots = slots  # gone with its last user here, before theirs has begun
        self.fault: str | None = "no time was left"

    def wait(self, seconds: float) -> None:
        """Until it is compiled, so long at most; `fault` says why it is not."""
        if self.pipe.poll(max(0.0, seconds)):
            self.fault = "its process ended"
            with suppress(EOFError):
                self.fault = self.pipe.recv()
        if self.fault:
            self.end()

    def milliseconds(self) -> float:
        """Of one of several steps; not a number where its process ended, as `fault` says then."""
        with suppress(EOFError, OSError):
            self.pipe.send(True)
            return self.pipe.recv()
        self.fault = "its process ended"
        return float("nan")

    def end(self) -> None:
        self.process.kill()


TURN = 3  # steps of one contestant before the next has its turn


def _serve(pipe: Any, slots: Any, job: tuple[Steps, int, str, str]) -> None:
    setting = job[0]
    try:
        with slots:  # of memory
            step = stepping(*job)
            for _ in range(3):
                step()
            _release(setting.device)
    except Exception as fault:
        pipe.send(f"{type(fault).__name__}: {str(fault).splitlines()[0]}")
        return
    pipe.send(None)
    while pipe.recv():
        step()
        step()
        pipe.send(interleaved({"": lambda: [step() for _ in range(TURN)]}, 2, setting.device)[""].median / TURN)
        _release(setting.device)


def _release(device: str) -> None:
    synchronize(device)
    if device == "cuda":
        torch.cuda.empty_cache()


def missing(setting: Steps, rows: list[dict[str, Any]]) -> list[tuple[str, int, tuple[str, ...], str | None]]:
    """Ways of which `rows` have nothing yet."""
    known = {(row["way"], row["length"]) for row in rows}
    return [one for one in setting.ways if one[:2] not in known]


def runners(setting: Steps, rows: list[dict[str, Any]]) -> dict[tuple[str, int, str], Runner]:
    """All compiled steps that are to be timed, begun at once."""
    slots = multiprocessing.get_context("spawn").Semaphore(setting.at_once)
    ways = [(way, length, names, mode) for way, length, names, mode in missing(setting, rows) if mode]
    return {(way, n, name): Runner((setting, n, name, mode), slots) for way, n, names, mode in ways for name in names}


def timed(setting: Steps, compiled: dict[tuple[str, int, str], Runner], rows: list[dict[str, Any]]) -> Iterator[None]:
    """Adds tokens a second of ways that `rows` lack, contestants in turn. A compiled step that was not ready in time says so."""
    for way, length, names, mode in missing(setting, rows):
        if mode is None:
            runs = {name: stepping(setting, length, name, None) for name in names}
            for run in runs.values():
                for _ in range(3):
                    run()
            synchronize(setting.device)
            found = interleaved(runs, setting.repeats, setting.device)
            _release(setting.device)
        else:
            mine = {name: compiled[way, length, name] for name in names}
            ready = {name: one for name, one in mine.items() if not one.fault}
            times: dict[str, list[float]] = {name: [] for name in ready}
            for _ in range(setting.repeats):
                for name, one in ready.items():
                    if not one.fault:
                        times[name].append(one.milliseconds())
            found = {name: Timing.of(each, TURN) for name, each in times.items() if not mine[name].fault}
            for name, one in mine.items():
                one.end()
                if one.fault:
                    rows.append({"contestant": name, "way": way, "length": length, "skipped": one.fault})
                    print(rows[-1], file=sys.stderr, flush=True)
        tokens = max(1, setting.tokens // length) * length
        for name, timing in found.items():
            rate = round(1e3 * tokens / timing.median)
            rows.append(
                {"contestant": name, "way": way, "length": length, "milliseconds": asdict(timing), "tokens/s": rate}
            )
            print(rows[-1], file=sys.stderr, flush=True)
        yield

"""A training step of GPT-2-small with one attention or another, eager and compiled."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from benchmarks.lengths import KERNELS, TORCH, attention
from benchmarks.timing import interleaved, synchronize


@dataclass(frozen=True)
class Steps:
    tokens: int = 16_384
    lengths: tuple[int, ...] = (1024, 4096)
    layers: int = 12
    width: int = 768
    vocabulary: int = 50_304
    repeats: int = 11
    seconds: float = 600.0  # in which compiled steps are begun
    compiled: tuple[str, ...] = (TORCH, "Softmax", "Sigmoid", "ReluSquared", "Gaussian")
    device: str = "cuda"

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
    model: Any = Gpt(setting, length, attention(name, True)).to(setting.device)
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


def compile_ahead(setting: Steps) -> None:
    """Every compiled step once, several at a time in processes of their own: the compiler's cache then has them."""
    jobs = [(setting, length, name, mode) for _, length, names, mode in setting.ways if mode for name in names]
    with multiprocessing.get_context("spawn").Pool(6) as pool:
        for fault in pool.imap_unordered(_compiled, jobs):
            if fault:
                print(fault, file=sys.stderr, flush=True)


def _compiled(job: tuple[Steps, int, str, str]) -> str | None:
    try:
        step = stepping(*job)
        step()
        step()
    except Exception as fault:
        return f"{job[1:]}: {type(fault).__name__}: {str(fault).splitlines()[0]}"
    return None


def timed(setting: Steps) -> list[dict[str, Any]]:
    """Tokens a second. Compiled steps are begun while there is time, and who has none says so."""
    rows: list[dict[str, Any]] = []
    until = time.monotonic() + setting.seconds
    for way, length, names, mode in setting.ways:
        tokens = max(1, setting.tokens // length) * length
        runs = {}
        for name in names:
            if mode and time.monotonic() > until:
                rows.append({"contestant": name, "way": way, "length": length, "skipped": "no time was left"})
                continue
            if mode:
                torch._dynamo.reset()
            runs[name] = stepping(setting, length, name, mode)
            for _ in range(3):
                runs[name]()
            synchronize(setting.device)
        for name, found in (interleaved(runs, setting.repeats, setting.device) if runs else {}).items():
            rate = round(1e3 * tokens / found.median)
            rows.append(
                {"contestant": name, "way": way, "length": length, "milliseconds": asdict(found), "tokens/s": rate}
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows

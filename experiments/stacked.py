"""Many small language models of one shape trained at once: a leading axis holds learning rates and seeds."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from heedful._errors import InvalidArgument

__all__ = ["OutOfTime", "Protocol", "curves", "initial", "losses", "train"]


class OutOfTime(Exception):
    """The time that is left is too short for this shape."""


@dataclass(frozen=True)
class Protocol:
    """How the models of a crossover are trained: AdamW, warm-up, cosine to `final` of the rate, clipping per model.

    The defaults are those of the GPU recipe: 900 steps of 128 x 256 tokens.
    """

    vocabulary: int = 2000
    context: int = 256
    batch: int = 128
    steps: int = 900
    warmup: int = 50
    final: float = 0.05
    decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0

    def factors(self) -> list[float]:
        """The rate at each step, as a share of the highest."""
        rest = max(self.steps - self.warmup, 1)

        def factor(step: int) -> float:
            if step < self.warmup:
                return (step + 1) / self.warmup
            cosine = (1 + math.cos(math.pi * (step - self.warmup) / rest)) / 2
            return self.final + (1 - self.final) * cosine

        return [factor(step) for step in range(self.steps)]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def initial(layers: int, width: int, protocol: Protocol, seeds: Sequence[int]) -> dict[str, Tensor]:
    """Weights of one model per seed, stacked on axis -3; what writes to the stream is scaled by $1/\\sqrt{2L}$.

    Names and shapes: embedding `[R, V, d]`, position `[R, T, d]`, and with L in front qkv `[d, 3d]`, out `[d, d]`,
    up `[d, 4d]`, down `[4d, d]`.
    """
    d, shrink = width, 1 / math.sqrt(2 * layers)
    shapes = {
        "embedding": ((protocol.vocabulary, d), 0.02),
        "position": ((protocol.context, d), 0.02),
        "qkv": ((layers, d, 3 * d), d**-0.5),
        "out": ((layers, d, d), d**-0.5 * shrink),
        "up": ((layers, d, 4 * d), d**-0.5),
        "down": ((layers, 4 * d, d), (4 * d) ** -0.5 * shrink),
    }
    drawn: dict[str, list[Tensor]] = {name: [] for name in shapes}
    for seed in seeds:
        source = torch.Generator().manual_seed(seed)
        for name, (shape, std) in shapes.items():
            drawn[name].append(torch.randn(shape, generator=source) * std)
    return {name: torch.stack(parts, dim=-3) for name, parts in drawn.items()}


def losses(weights: dict[str, Tensor], tokens: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """The mean next-token loss `[R]` of each model on its tokens `[R, B, T + 1]`, in nats.

    A GPT-2 block with gain-free RMSNorm, no biases and tied embeddings; attention is causal.
    """
    runs, batch, length = tokens.shape[0], tokens.shape[1], tokens.shape[2] - 1
    cast = {name: weight.to(dtype) for name, weight in weights.items()}
    vocabulary, d = cast["embedding"].shape[-2:]
    # One table for all models: model r owns the rows from r V on.
    shift = torch.arange(runs, device=tokens.device)[:, None, None] * vocabulary
    words = F.embedding(tokens[..., :-1] + shift, cast["embedding"].flatten(0, 1))
    x = words + cast["position"][:, None, :length]
    x = _norm(x).view(runs, batch * length, d)
    layers = zip(*(cast[name].unbind(0) for name in ("qkv", "out", "up", "down")), strict=True)
    for qkv, out, up, down in layers:
        parts = torch.bmm(_norm(x), qkv).view(runs * batch, length, 3, heads, d // heads)
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))  # [R B, H, T, e]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + torch.bmm(mixed.transpose(1, 2).reshape(runs, batch * length, d), out)
        x = x + torch.bmm(F.gelu(torch.bmm(_norm(x), up), approximate="tanh"), down)
    logits = torch.bmm(_norm(x), cast["embedding"].transpose(1, 2))
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[..., 1:].flatten(), reduction="none")
    return loss.view(runs, -1).mean(dim=1)


def train(
    layers: int,
    width: int,
    heads: int,
    rates: Sequence[float],
    seeds: Sequence[int],
    tokens: Tensor,
    valid: Tensor,
    protocol: Protocol | None = None,
    *,
    device: str | torch.device = "cpu",
    seconds: float = math.inf,
    say: Callable[[str], None] = lambda text: None,
) -> list[list[float]]:
    """Validation loss by `[rate][seed]`; a model that diverged has infinite loss.

    Each seed draws its own weights and its own batches, the same for every rate. On a GPU the arithmetic is bfloat16 over
    float32 weights and the step is one CUDA graph. Raises `OutOfTime` after a few steps where all of them would take more
    than `seconds`.

    >>> import torch
    >>> text = torch.arange(400) % 7
    >>> quick = Protocol(vocabulary=7, context=8, batch=4, steps=30, warmup=5)
    >>> worse, better = train(1, 8, 2, [1e-5, 1e-1], [0], text, text, quick)
    >>> better[0] < worse[0] < 2.0
    True
    """
    protocol = protocol or Protocol()
    if width % heads:
        raise InvalidArgument(f"{heads} heads do not divide width {width}; give a divisor")
    if min(len(tokens), len(valid)) <= protocol.context:
        raise InvalidArgument(f"a text of {len(tokens)} tokens is shorter than the context {protocol.context}")
    device = torch.device(device)
    began = _now(device)
    copies = len(rates)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = {
        name: torch.cat([part] * copies, dim=-3).to(device).requires_grad_()
        for name, part in initial(layers, width, protocol, seeds).items()
    }
    top = torch.tensor([rate for rate in rates for _ in seeds], device=device)
    tokens, valid = tokens.to(device, torch.int32), valid.to(device, torch.int32)
    starts = torch.stack([_starts(len(tokens), protocol, seed) for seed in seeds], dim=1).to(device)  # [steps, S, B]
    step = _Step(weights, top, heads, dtype, protocol)
    for at in range(protocol.steps):
        step(_windows(tokens, starts[at], protocol.context).repeat(copies, 1, 1))
        if at == PROBE[0]:
            probed = _now(device)
        elif at == PROBE[1]:
            each = (_now(device) - probed) / (PROBE[1] - PROBE[0])
            need = _now(device) - began + 1.05 * each * (protocol.steps - at)
            say(f"{layers} x {width}: {len(top)} models, {1e3 * each:.1f} ms a step, {need:.0f} s")
            if need > seconds:
                raise OutOfTime(f"{layers} x {width} needs {need:.0f} s")
    del step
    final = evaluate(weights, valid, heads, dtype, protocol)
    return final.nan_to_num(nan=math.inf).view(copies, len(seeds)).tolist()


def curves(
    weights: dict[str, Tensor],
    heads: int,
    rates: Sequence[float],
    seeds: Sequence[int],
    tokens: Tensor,
    valid: Tensor,
    protocol: Protocol,
    steps: Sequence[int],
    *,
    device: str | torch.device = "cpu",
) -> list[list[float]]:
    """Validation losses `[step][model]` after some steps, of models that start from given weights, as `initial` shapes them.

    Model r has the rate `rates[r]` and the batches of `seeds[r]`. A model that diverged has infinite loss.
    """
    device = torch.device(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    own = {name: weight.to(device, torch.float32).clone().requires_grad_() for name, weight in weights.items()}
    tokens, valid = tokens.to(device, torch.int32), valid.to(device, torch.int32)
    starts = {seed: _starts(len(tokens), protocol, seed) for seed in set(seeds)}
    begins = torch.stack([starts[seed] for seed in seeds], dim=1).to(device)  # [steps, R, B]
    step = _Step(own, torch.tensor(list(rates), device=device), heads, dtype, protocol)
    found = []
    for at in range(protocol.steps + 1):
        if at in steps:
            found.append(evaluate(own, valid, heads, dtype, protocol).nan_to_num(nan=math.inf).tolist())
        if at < protocol.steps:
            step(_windows(tokens, begins[at], protocol.context))
    return found


# Steps between which time is taken, past the capture of the graph, to foretell that of all.
PROBE = (10, 20)


@torch.no_grad()
def evaluate(weights: dict[str, Tensor], valid: Tensor, heads: int, dtype: torch.dtype, protocol: Protocol) -> Tensor:
    """The loss `[R]` over the text in windows that do not overlap; the last, short one is left out."""
    runs = weights["embedding"].shape[0]
    starts = torch.arange(0, len(valid) - protocol.context, protocol.context, device=valid.device)
    total = torch.zeros(runs, dtype=torch.float64, device=valid.device)
    # Small batches would leave a GPU idle.
    for part in starts.split(max(protocol.batch, 128) if valid.is_cuda else protocol.batch):
        tokens = _windows(valid, part[None], protocol.context).expand(runs, -1, -1)
        with _backend(valid.device):
            total += losses(weights, tokens, heads, dtype).double() * len(part)
    return total / len(starts)


class _Step:
    """One AdamW step of every model, on a GPU as a CUDA graph."""

    def __init__(
        self, weights: dict[str, Tensor], top: Tensor, heads: int, dtype: torch.dtype, protocol: Protocol
    ) -> None:
        self.weights, self.heads, self.dtype, self.protocol = weights, heads, dtype, protocol
        device = top.device
        self.first = [torch.zeros_like(weight) for weight in weights.values()]
        self.second = [torch.zeros_like(weight) for weight in weights.values()]
        factors = torch.tensor(protocol.factors(), device=device)
        count = torch.arange(1, protocol.steps + 1, device=device, dtype=torch.float64)
        unbias = torch.stack([1 / (1 - beta**count) for beta in (protocol.beta1, protocol.beta2)], dim=1).float()
        # Per step: the rate of each model, then the two bias corrections.
        self.table = torch.cat([factors[:, None] * top, unbias], dim=1)
        self.now = torch.empty_like(self.table[0])
        self.tokens = torch.zeros(len(top), protocol.batch, protocol.context + 1, dtype=torch.int64, device=device)
        self.at = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.side: torch.cuda.Stream | None = None

    def __call__(self, tokens: Tensor) -> None:
        self.tokens.copy_(tokens)
        self.now.copy_(self.table[self.at])
        if not self.tokens.is_cuda:
            self._step()
        elif self.at < WARM:
            self._warm()
        else:
            self.graph = self.graph or self._captured()
            self.graph.replay()
        self.at += 1

    def _step(self) -> None:
        with _backend(self.tokens.device):
            total = losses(self.weights, self.tokens, self.heads, self.dtype).sum()
            grads = torch.autograd.grad(total, list(self.weights.values()))
        self._update(grads)

    @torch.no_grad()
    def _update(self, grads: Sequence[Tensor]) -> None:
        rates, (up1, up2) = self.now[:-2], self.now[-2:].unbind()
        p = self.protocol
        # The stack of models is axis -3 of every weight.
        norm = sum(grad.square().sum(dim=(-1, -2)).view(-1, len(rates)).sum(dim=0) for grad in grads)
        share = (p.clip / (torch.as_tensor(norm).sqrt() + 1e-6)).clamp(max=1.0)[:, None, None]
        rate = rates[:, None, None]
        for weight, grad, first, second in zip(self.weights.values(), grads, self.first, self.second, strict=True):
            grad = grad * share
            first.lerp_(grad, 1 - p.beta1)
            second.mul_(p.beta2).addcmul_(grad, grad, value=1 - p.beta2)
            weight.mul_(1 - rate * p.decay)
            weight.sub_(rate * (first * up1) / ((second * up2).sqrt_() + 1e-8))

    def _warm(self) -> None:
        """A step on a side stream, as capturing asks for."""
        self.side = self.side or torch.cuda.Stream()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self._step()
        torch.cuda.current_stream().wait_stream(self.side)

    def _captured(self) -> torch.cuda.CUDAGraph:
        """The step, recorded and not run."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph


# Steps before the graph is captured.
WARM = 3


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def _starts(length: int, protocol: Protocol, seed: int) -> Tensor:
    """Where the windows of each step begin, `[steps, B]`."""
    source = torch.Generator().manual_seed(seed + 1_000)
    return torch.randint(length - protocol.context, (protocol.steps, protocol.batch), generator=source)


def _windows(tokens: Tensor, starts: Tensor, context: int) -> Tensor:
    """Windows `[S, B, T + 1]` that begin at `[S, B]`."""
    return tokens[starts[..., None] + torch.arange(context + 1, device=tokens.device)].long()


def _backend(device: torch.device) -> Any:
    """On a GPU the kernels that a CUDA graph can hold; elsewhere torch's own choice."""
    if device.type == "cuda":
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
    return contextlib.nullcontext()

"""The kernel method: convolution features, a ridge for each kind of them, scores that are sums over segments and channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from heedful._progress import Progress, silent
from heedful.decomposition import KernelSVD
from heedful.series._ridge import ridge
from heedful.series._segments import BASIS, LANDMARKS, NARROW, WIDTH, SegmentKernel, inverse_scale
from heedful.series._views import KINDS, View, drawn, packed, unpacked, wholes

# How much the length of a series counts beside its features, and where its bumps lie, in standard deviations of its logarithm.
LENGTH = 0.1
BUMPS = torch.arange(-4.0, 4.5, 0.5, dtype=torch.float64)


@dataclass(frozen=True)
class Plan:
    """What the method is told: which kernels, how many segments and features, and the seed."""

    kernels: tuple[str, ...]
    segments: int
    features: int | None
    seed: int


@dataclass(frozen=True)
class Head:
    """A ridge: what it predicts of each case without it, (n, outputs), and what it adds to a machine's tensors."""

    unseen: Tensor
    offset: Tensor
    by_length: Tensor
    means: Tensor
    weights: dict[str, Tensor]


class Machine:
    r"""Scores $f(x) = b + \sum_{segments} \sum_{channels} e(x)$, outputs in columns.

    For each kind of convolutions there is a ridge on the features of whole series ("linear"), one on the kernel between segments
    ("softmax"), or both. They are averaged by weights that grow with their leave-one-out accuracy.
    """

    def __init__(self, views: list[View], segments: int, tensors: dict[str, Tensor]) -> None:
        self.views, self.segments, self.tensors = views, segments, tensors
        self.kernels: dict[str, SegmentKernel] = {}

    @classmethod
    def fit(
        cls,
        x: Tensor,
        lengths: Tensor,
        target: Tensor,
        weights: Tensor,
        plan: Plan,
        error: Callable[[Tensor], float],
        progress: Progress = silent,
    ) -> tuple[Machine, Tensor]:
        """The machine and what it predicts for each case without that case, (n, outputs); `error` judges such predictions."""
        views = drawn(x, lengths, tuple(KINDS), plan.features, plan.seed)
        machine = cls(views, plan.segments, {})
        done, total = 0, len(x) * len(views)

        def said(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total, "features")

        clock = machine._learn_lengths(lengths)
        heads = []
        for kind in KINDS:
            heads += machine._heads(kind, x, lengths, target, weights, clock, plan, said)
        machine._combine(heads, [error(head.unseen) for head in heads])
        shares = machine.tensors["shares"]
        unseen = sum(share * head.unseen for share, head in zip(shares, heads, strict=True))
        assert isinstance(unseen, Tensor)
        return machine, unseen

    def _heads(
        self,
        kind: str,
        x: Tensor,
        lengths: Tensor,
        target: Tensor,
        weights: Tensor,
        clock: Tensor,
        plan: Plan,
        said: Callable[[int], None],
    ) -> list[Head]:
        """The ridges of one kind of convolutions."""
        views = [view for view in self.views if view.kind == kind]
        soft = None
        if "softmax" in plan.kernels:
            soft = SegmentKernel(self.segments, WIDTH if len(x) <= BASIS else NARROW)
            tokens = soft.empty(len(x), x.device)
        features, means = [], []
        for place, view in enumerate(views):
            if soft is None:
                whole, mean = wholes(view, x, lengths, self.segments, said)
            else:
                parts = x.new_empty(len(x), self.segments, view.size)
                for rows, part in view.parts(x, lengths, self.segments):
                    parts[rows] = part
                    said(len(rows))
                soft.learn(view, parts, plan.seed + place)
                for rows in torch.arange(len(x), device=x.device).split(64):
                    soft.add(view, parts[rows], rows, tokens)
                whole, mean = parts.sum(1), parts.double().mean(0)
                del parts
            features.append(whole)
            means.append(mean)
        heads = []
        if "linear" in plan.kernels:
            scales = [
                inverse_scale(view, whole, whole.std(0, correction=0))
                for view, whole in zip(views, features, strict=True)
            ]
            for whole, scale in zip(features, scales, strict=True):
                whole.mul_(scale)
            z = torch.cat([*features, clock.to(x)], 1)
            features.clear()
            found = ridge(z, target, weights)
            sizes = [*(view.size for view in views), clock.shape[1]]
            *own, by_length = found.weight.split(sizes)
            own = [(weight * scale[:, None]).float() for weight, scale in zip(own, scales, strict=True)]
            added = sum(
                mean @ by_channels(view, weight.double()) for view, mean, weight in zip(views, means, own, strict=True)
            )
            assert isinstance(added, Tensor)
            added = added.unflatten(1, (x.shape[1], -1))
            names = {_name(view): weight for view, weight in zip(views, own, strict=True)}
            heads.append(Head(found.unseen, found.offset, by_length, added, names))
        if soft is not None:
            heads.append(self._soft(kind, soft, tokens, target, weights, clock, plan.seed, x.shape[1]))
        return heads

    def _soft(
        self,
        kind: str,
        soft: SegmentKernel,
        tokens: dict[int, Tensor],
        target: Tensor,
        weights: Tensor,
        clock: Tensor,
        seed: int,
        channels: int,
    ) -> Head:
        """A ridge on the kernel between segments; of more than `BASIS` series, with some of them (Nystrom)."""
        n = len(target)
        basis = np.arange(n)
        if n > BASIS:
            basis = np.sort(np.random.default_rng(seed).choice(n, LANDMARKS, replace=False))
        rows = torch.from_numpy(basis).to(clock.device)
        soft.keep(tokens, rows)
        parts = soft.parts(tokens)  # [n, S, basis]
        gram = parts.sum(1)
        svd = KernelSVD(kernel="precomputed").fit(gram[rows].cpu().numpy())
        alive = svd.singular_values_ > svd.singular_values_[0] * 1e-9
        lift = torch.from_numpy(svd.right_vectors_[:, alive] / np.sqrt(svd.singular_values_[alive])).to(gram)
        found = ridge(torch.cat((gram @ lift, clock), 1), target, weights)
        coefficients, by_length = found.weight.split([lift.shape[1], clock.shape[1]])
        self.kernels[kind] = soft
        weight = lift @ coefficients
        means = (parts.mean(0) @ weight / channels)[:, None].expand(-1, channels, -1)
        return Head(found.unseen, found.offset, by_length, means, {f"{kind}.softmax": weight})

    def _learn_lengths(self, lengths: Tensor) -> Tensor:
        """What the length of each series says, (n, bumps); no columns where all have one length."""
        own = lengths.double().log()
        spread = own.std(correction=0)
        if len(own) < 2 or float(spread) < 1e-9:
            return own.new_zeros(len(own), 0)
        self.tensors["length"] = torch.stack((own.mean(), spread, own.new_tensor(1.0)))
        bumps = self._bumps(lengths)
        self.tensors["length"][2] = (LENGTH / bumps.var(0, correction=0).sum().clamp(min=1e-12)).sqrt()
        return self._bumps(lengths)

    def _bumps(self, lengths: Tensor) -> Tensor:
        r"""Bumps $e^{-(u - c)^2}$ of the standardised logarithm u, whose products sum to about a Gaussian kernel."""
        if "length" not in self.tensors:
            return lengths.new_zeros(len(lengths), 0, dtype=torch.float64)
        mean, spread, size = self.tensors["length"]
        own = (lengths.double().log() - mean) / spread
        return size * torch.exp(-((own[:, None] - BUMPS.to(own)) ** 2))

    def _combine(self, heads: list[Head], errors: list[float]) -> None:
        """One weight for each feature: the heads' weights times their shares, which fall with the square of their errors."""
        inverse = torch.tensor(errors, dtype=torch.float64).clamp(min=1e-12) ** -2
        shares = (inverse / inverse.sum()).tolist()
        sums = {"offset": lambda head: head.offset, "means": lambda head: head.means}
        if "length" in self.tensors:
            sums["length.weight"] = lambda head: head.by_length
        for name, part in sums.items():
            self.tensors[name] = torch.stack([share * part(h) for share, h in zip(shares, heads, strict=True)]).sum(0)
        for share, head in zip(shares, heads, strict=True):
            self.tensors |= {f"weight.{name}": share * value for name, value in head.weights.items()}
        self.tensors["shares"] = torch.tensor(shares, dtype=torch.float64)

    def scaled(self, factor: float | np.ndarray, shift: float | np.ndarray = 0.0) -> None:
        """Multiplies the scores, or each output, and then adds to them."""
        ratio = torch.as_tensor(factor)
        for name, value in self.tensors.items():
            if name.startswith(("weight.", "means", "offset", "length.")):
                self.tensors[name] = (value * ratio.to(value)).to(value.dtype)
        self.tensors["offset"] = self.tensors["offset"] + torch.as_tensor(shift).to(self.tensors["offset"])

    def to(self, device: torch.device) -> Machine:
        """This machine where it is there, else a copy."""
        return self if self.tensors["offset"].device == device else Machine.of(self.state(), device)

    def scores(self, x: Tensor, lengths: Tensor) -> Tensor:
        """(n, outputs), in float64."""
        return self._summed(x, lengths, by_parts=False)

    def evidence(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """What each segment and channel adds, (n, segments, channels, outputs), and what is there without them, (n, outputs).

        Both together sum to the scores. A mean training series adds nothing; what the length says counts to the second. A feature's part is
        divided evenly among the channels that it reads, and of a softmax head among all.
        """
        means = self.tensors["means"]
        parts = self._summed(x, lengths, by_parts=True).unflatten(2, means.shape[1:])
        return parts - means, (self._constant(lengths) + means.sum((0, 1))).expand(len(x), -1)

    def _constant(self, lengths: Tensor) -> Tensor:
        bumps = self._bumps(lengths)
        own = self.tensors["offset"]
        return own + (bumps @ self.tensors["length.weight"].double() if bumps.shape[1] else bumps.new_zeros(()))

    def _summed(self, x: Tensor, lengths: Tensor, *, by_parts: bool) -> Tensor:
        segments, channels, outputs = self.tensors["means"].shape
        if by_parts:
            result = x.new_zeros(len(x), segments, channels * outputs, dtype=torch.float64)
        else:
            result = self._constant(lengths).expand(len(x), outputs).clone()
        tokens = {kind: kernel.empty(len(x), x.device) for kind, kernel in self.kernels.items()}
        for view in self.views:
            weight = self.tensors.get(f"weight.{_name(view)}")
            if weight is not None:
                weight = by_channels(view, weight.double()) if by_parts else weight.double()
            for rows, parts in view.parts(x, lengths, segments):
                if weight is not None:
                    result[rows] += (parts.double() if by_parts else parts.sum(1, dtype=torch.float64)) @ weight
                if view.kind in self.kernels:
                    self.kernels[view.kind].add(view, parts, rows, tokens[view.kind])
        for kind, kernel in self.kernels.items():
            coefficients = self.tensors[f"weight.{kind}.softmax"]
            for rows in torch.arange(len(x), device=x.device).split(256):
                added = kernel.parts({level: one[rows] for level, one in tokens[kind].items()}) @ coefficients
                result[rows] += added.repeat(1, 1, channels) / channels if by_parts else added.sum(1)
        return result

    def state(self) -> dict[str, Tensor]:
        kernels = {
            f"softmax.{kind}.{name}": value
            for kind, kernel in self.kernels.items()
            for name, value in kernel.tensors.items()
        }
        return packed(self.views) | kernels | {f"machine.{name}": value for name, value in self.tensors.items()}

    @classmethod
    def of(cls, state: dict[str, Tensor], device: torch.device | None = None) -> Machine:
        state = {name: value.to(device) for name, value in state.items()} if device is not None else state
        tensors = {name.removeprefix("machine."): value for name, value in state.items() if name.startswith("machine.")}
        segments = tensors["means"].shape[0]
        machine = cls(unpacked(state), segments, tensors)
        for kind in KINDS:
            prefix = f"softmax.{kind}."
            own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            if own:
                machine.kernels[kind] = SegmentKernel(segments, own["keys.1"].shape[2])
                machine.kernels[kind].tensors = own
        return machine


def _name(view: View) -> str:
    return f"{view.kind}{'-lagged' * view.lagged}"


def by_channels(view: View, weight: Tensor) -> Tensor:
    """(features, outputs) -> (features, channels x outputs): a feature's weight, divided among the channels that it reads."""
    reads = view.channels.to(weight)
    return (reads / reads.sum(1, keepdim=True))[:, :, None].mul(weight[:, None]).flatten(1)

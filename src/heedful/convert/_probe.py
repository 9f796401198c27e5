"""What a model makes of inputs before and after it is turned, and how it becomes what it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor, nn

from heedful._errors import Unsupported
from heedful._runtime import after_calls, before_calls, undisturbed
from heedful.bridges.rotation import RotationPlan
from heedful.lens.symmetry.callee import Callee

Turning = Callable[[Tensor], Tensor]

# Outputs may move by so many times what a change of the inputs in their last digit does, but by no more than half.
MARGIN, MOST = 10.0, 0.5

# Of the random input.
TOKENS = 8


@contextmanager
def restored(model: Any, plan: RotationPlan, weights: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Gives every weight its old value, and a head its tie, where what is done inside raises."""
    changing = {name for name, role in plan.roles.items() if role != "fixed"} | plan.gains.keys()
    old = {id(weights[name]): (weights[name], weights[name].detach().to("cpu", copy=True)) for name in changing}
    head = None if plan.tied is None else model.get_submodule(plan.tied)
    tied = None if head is None else head.weight
    config, keys = getattr(model, "config", None), dict(getattr(model, "all_tied_weights_keys", None) or {})
    ties = getattr(config, "tie_word_embeddings", None)
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for weight, value in old.values():
                weight.copy_(value)
        if head is not None and head.weight is not tied:
            head.weight = tied
            if ties is not None:
                config.tie_word_embeddings = ties  # type: ignore[union-attr]
            if keys:
                model.all_tied_weights_keys = keys
        raise


class Probe:
    """A few random tokens or vectors, and what the model makes of them before it is turned."""

    def __init__(self, model: nn.Module, plan: RotationPlan) -> None:
        self.model, self.plan = model, plan
        floating = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
        # Norms of Hugging Face compute in float32 whatever they are given.
        self.eps = max(torch.finfo(dtype).eps for dtype in (*floating, torch.float32))
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(TOKENS, plan.size, generator=generator, dtype=torch.float64)
        self.noise = 1 + self.eps * torch.randn(TOKENS, plan.size, generator=generator, dtype=torch.float64)
        self.ids = torch.randint(2**31, (1, TOKENS), generator=generator)
        self.before: Tensor | None = None
        self.rounding = nan
        why = "they are not finite"
        try:
            self.before, nearby = self._run(self.x), self._run(self.x * self.noise, self.noise)
            self.rounding = apart(nearby, self.before)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        if not isfinite(self.rounding):
            self.before = None
            warnings.warn(
                f"{type(model).__name__} was tried on random inputs, and its outputs were not compared: {why}",
                stacklevel=3,
            )

    def change(self, turn: Turning) -> float | None:
        """How far the outputs moved; raises where that is no rounding."""
        if self.before is None:
            return None
        turned = self.plan.turned
        change = apart(self._run(turn(self.x) if turned else self.x), turn(self.before) if turned else self.before)
        allowed = min(MARGIN * max(self.rounding, self.eps), MOST)
        if not change <= allowed:
            raise Unsupported(
                f"{type(self.model).__name__} cannot be rotated: its outputs would move by {change:.2g}, and rounding explains "
                f"{allowed:.2g}. Something in it does not turn with the parameters: a hook, a buffer, a part that is no usual "
                "one. All weights are as they were"
            )
        return change

    def _run(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        if self.plan.embedding is None:
            known = "z" in signature(self.model.forward).parameters and getattr(self.model, "reads_knowledge", True)
            with undisturbed(self.model):
                return Callee(self.model)(x, x[:3] if known else None)
        table = self.model.get_submodule(self.plan.embedding)

        def disturb(module: nn.Module, args: Any, named: Any, out: Tensor) -> Tensor:
            return out if noise is None else out * noise.to(out)

        with after_calls([table], disturb):
            ids = self.ids.to(table.weight.device) % len(table.weight)  # type: ignore[arg-type]
            out, _ = measure(self.model, ids, ())
        assert out is not None
        return out


def apart(after: Tensor, before: Tensor) -> float:
    return float((after - before).norm()) / max(float(before.norm()), 1e-300)


def measure(model: nn.Module, probe: Any, layers: tuple[str, ...]) -> tuple[Tensor | None, dict[str, float]]:
    """The output on the probe, and max / rms of what enters each layer."""
    if probe is None:
        return None, {}
    names = {model.get_submodule(name): name for name in layers}
    peaks: dict[str, float] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        h = (args[0] if args else named["hidden_states"]).double()
        peaks[names[module]] = float((h.abs().amax(-1) / h.square().mean(-1).sqrt().clamp_min(1e-30)).mean())

    with undisturbed(model), before_calls(names, keep):
        out = model(**probe) if isinstance(probe, Mapping) else model(probe)
    out = next(iter(out.values())) if isinstance(out, Mapping) else out[0] if isinstance(out, tuple) else out
    return out.double(), peaks

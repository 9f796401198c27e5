"""A verdict on a shape that somebody has: too deep, too shallow, or within the band."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful._errors import InvalidArgument
from heedful.bridges import configs
from heedful.lens.depth.known import CONFIGS
from heedful.lens.depth.law import LAWS, Law, find_law
from heedful.lens.depth.plans import notes
from heedful.lens.depth.shape import Shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Audit", "audit"]


@dataclass(frozen=True)
class Audit:
    """What the law says of a shape.

    `depth_star` is the depth for this width, `budget_depth` and `budget_width` the shape for this many parameters, `rivals`
    the depth for this width by each named law, `params` the count of the model itself where one was given.
    """

    name: str
    shape: Shape
    law: Law
    verdict: str
    depth_star: float
    sigma: float | None
    budget_depth: float
    budget_width: float
    flags: tuple[str, ...]
    notes: tuple[str, ...]
    rivals: dict[str, float]
    params: int
    exact: bool

    @property
    def sigmas(self) -> float | None:
        """How many standard errors the depth lies above (or below) the law."""
        return None if self.sigma is None else (self.shape.layers - self.depth_star) / self.sigma

    def to_dict(self) -> dict[str, Any]:
        star = {"depth_for_width": self.depth_star, "sigma_depth": self.sigma, "sigmas": self.sigmas}
        told = {"name": self.name, "law": self.law.name, "verdict": self.verdict, "shape": self.shape.to_dict()}
        budget = {"depth_for_budget": self.budget_depth, "width_for_budget": self.budget_width}
        more = {"flags": list(self.flags), "notes": list(self.notes), "rivals": self.rivals}
        return told | star | budget | more | {"params": self.params, "exact": self.exact}

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the law with its band and this model's point."""
        return self.law.plot(ax, [(self.name, self.shape.layers, self.shape.width)])

    def __str__(self) -> str:
        shape = self.shape
        band = "" if self.sigma is None else f" ± {self.sigma:.1f}"
        count = f"{self.params:,} parameters" + ("" if self.exact else " without norms and biases")
        lines = [
            f"{self.name}: {shape.layers} layers x {shape.width}, {self.verdict}",
            f"for width {shape.width} the law ({self.law.name}) says {self.depth_star:.1f}{band} layers",
            f"for {shape.executed_params:,} matrix parameters {self.budget_depth:.1f} layers of {self.budget_width:.0f}",
            f"{count}, {shape.layer_params:,} of them in the layers' matrices",
            "by other laws: " + ", ".join(f"{name} {depth:.1f}" for name, depth in self.rivals.items()),
        ]
        return "\n".join(lines + notes(self.flags, self.notes))


def audit(
    model: Any,
    *,
    vocab_rank: int | None = None,
    law: str | Law | Callable[[float], float] = "levine2020",
) -> Audit:
    r"""Whether a model is too deep or too shallow for its width.

    Compares the depth L with $L^*(d) = (\ln d - a) / b$ (Levine et al. 2020, section 5; see `DepthLaw`). Within two standard
    errors there is no verdict; near the optimum the loss hardly changes. Sizes are read from the configuration, parameters are
    counted from sizes, exactly for families in `bridges.configs.FAMILIES`. Nothing is downloaded.

    Args:
        model: a Hugging Face config, model or folder, a config.json, a dict, "48x1600", or a name from `known.CONFIGS`.
        vocab_rank: the rank of the embedding, where it was measured (Wies et al. 2021).
        law: as in `plan`.

    >>> audit("gpt2-xl").verdict, audit("gpt2").verdict, audit("28x768").verdict
    ('too deep for its width', 'too shallow for its width', 'within the band of the law')
    """
    rule = find_law(law)
    name, shape = _shape(model)
    flags = shape.flags(rule, vocab_rank)
    depth = rule.optimal_depth(shape.width)
    verdict = "within the band of the law"
    if "depth_inefficient" in flags:
        verdict = "too deep for its width"
    elif "width_inefficient" in flags:
        verdict = "too shallow for its width"
    elif depth <= 0:
        verdict = "too narrow for the law"
    budget_depth, budget_width = rule.solve(shape.executed_params, shape.kappa)
    params, exact = shape.params, shape.extra is not None
    if hasattr(model, "parameters") and callable(model.parameters):
        params, exact = sum(weight.numel() for weight in model.parameters()), True
    rivals = {one.name: one.optimal_depth(shape.width) for one in LAWS.values() if one.name != rule.name}
    sigma = rule.sigma_depth(max(depth, 0.0))
    found = (name, shape, rule, verdict, depth, sigma, budget_depth, budget_width, flags)
    return Audit(*found, _remarks(shape), rivals, params, exact)


def _remarks(shape: Shape) -> tuple[str, ...]:
    told = []
    if shape.stored_layers != shape.layers:
        told.append(f"{shape.layers} layers run on the weights of {shape.stored_layers}; depth counts what runs")
    if shape.cross_layers:
        told.append(f"depth adds up encoder and decoder, {shape.cross_layers} of the layers are the decoder's")
    if shape.experts:
        told.append(f"{shape.active_experts} of {shape.experts} experts run for a token; they alone count for the law")
    if shape.inner > shape.width:
        told.append(f"attention works in {shape.inner} dimensions, above the width {shape.width}: redundant")
    return tuple(told)


def _shape(model: Any) -> tuple[str, Shape]:
    if isinstance(model, Shape):
        return f"{model.layers}x{model.width}", model
    if isinstance(model, str):
        sizes = re.fullmatch(r"(\d+)\s*[x×]\s*(\d+)", model.strip())  # noqa: RUF001
        if sizes:
            layers, width = int(sizes[1]), int(sizes[2])
            # Heads do not enter the verdict; where 64 does not divide the width, one head does.
            return model, Shape(layers, width, width // 64 if width % 64 == 0 else 1)
        if model.lower() in CONFIGS:
            return model.lower(), Shape(**configs.sizes(CONFIGS[model.lower()]))
        if not Path(model).exists():
            raise InvalidArgument(
                f"{model!r} is no folder, config.json, 'LAYERSxWIDTH' or known name; names are not downloaded. "
                f"Known are {', '.join(CONFIGS)}"
            )
    config = configs.read(model)
    name = Path(model).name if isinstance(model, str | Path) else config.get("model_type") or type(model).__name__
    return str(name), Shape(**configs.sizes(config))

"""A verdict on a shape that somebody has: too deep, too shallow, or within the band."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful._errors import InvalidArgument
from heedful._plot import Axes
from heedful._result import Result
from heedful._text import quantity
from heedful.bridges import configs
from heedful.bridges.reading import DEMO, demo_model_path, title_of
from heedful.lens.depth.known import CONFIGS, PARAMS, peers
from heedful.lens.depth.law import LAWS, Law, find_law
from heedful.lens.depth.plans import folded, notes
from heedful.lens.depth.shape import LARGEST, Shape


@dataclass(frozen=True, repr=False)
class Audit(Result):
    """What the law says of a shape.

    `depth_star` is the depth for this width, nought or less where the law gives none; `budget_depth` and `budget_width` the
    shape for this many parameters, `rivals` the depth for this width by each other named law, `peers` public models of its
    size with layers and width, `params` the count of the model itself where one was given.
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
    peers: dict[str, tuple[int, int]]
    params: int
    exact: bool

    _also = ("place", "span", "sigmas")
    _not = ("law", "depth_star", "sigma", "budget_depth", "budget_width")

    @property
    def sigmas(self) -> float | None:
        """How many standard errors the depth lies above (or below) the law."""
        known = self.sigma is not None and self.depth_star > 0
        return (self.shape.layers - self.depth_star) / self.sigma if self.sigma and known else None

    @property
    def span(self) -> tuple[float, float] | None:
        """The least and the greatest depth for this width by the laws; None where none gives one."""
        depths = [depth for depth in (self.depth_star, *self.rivals.values()) if depth > 0]
        return (min(depths), max(depths)) if depths else None

    @property
    def place(self) -> tuple[str, ...]:
        """Where the model lies among public models of its size, and among the laws: the verdict of one law is read after that."""
        return self._among_models(), self._among_laws()

    def _among_models(self) -> str:
        if not self.peers:
            return "no public model of its size is listed"
        depths = [layers for layers, _ in self.peers.values()]
        counts = {
            "shallower": sum(one < self.shape.layers for one in depths),
            "as deep": depths.count(self.shape.layers),
        }
        counts["deeper"] = len(depths) - sum(counts.values())
        names = list(self.peers)
        least, most = (f"{self.peers[name][0]} layers ({name})" for name in (names[0], names[-1]))
        ends = least if depths[0] == depths[-1] else f"from {least} to {most}"
        places = ", ".join(f"{count} {how}" for how, count in counts.items() if count)
        return f"{quantity(len(depths), 'public model')} of its size, {ends}: {places}"

    def _among_laws(self) -> str:
        if self.span is None:
            return f"no law gives a depth for width {self.shape.width}"
        low, high = self.span
        layers = self.shape.layers
        where = "below" if layers < low - 0.5 else "above" if layers > high + 0.5 else "within"
        laws = {self.law.name: self.depth_star} | self.rivals
        each = ", ".join(f"{name} {f'{depth:.1f}' if depth > 0 else 'no depth'}" for name, depth in laws.items())
        span = f"{low:.1f} to {high:.1f} layers" if len(laws) > 1 else f"{low:.1f} layers"
        return f"rival laws for width {self.shape.width}: {span} ({each}); {layers} is {where} that span"

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {
            "law": self.law.name,
            "depth_for_width": self.depth_star if self.depth_star > 0 else None,
            "sigma_depth": self.sigma,
            "depth_for_budget": self.budget_depth,
            "width_for_budget": self.budget_width,
            "extrapolated": list(self.shape.outside(self.law)),
        }

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the law with its band and this model's point."""
        return self.law.plot(ax, [(self.name, self.shape.layers, self.shape.width)])

    def __str__(self) -> str:
        shape = self.shape
        rough = "" if self.exact else "about "
        lines = folded(
            f"{self.name}: {quantity(shape.layers, 'layer')} x {shape.width}",
            *self.place,
            f"verdict by {self.law.name} alone: {self.verdict}",
            f"for width {shape.width} the law ({self.law.name}) says {depth_words(self.depth_star, self.sigma)}",
            f"for {shape.executed_params:,} matrix parameters {self.budget_depth:.1f} layers of {self.budget_width:.0f}",
            f"{self.count}; {rough}{shape.layer_params:,} of them in the layers' matrices",
        )
        return "\n".join(lines + notes(*shape.words(self.law, self.flags), *self.notes))

    @property
    def count(self) -> str:
        """The parameters in words: an estimate is called one."""
        if self.exact:
            return f"{self.params:,} parameters"
        return f"about {self.params:,} parameters, estimated from its sizes"

    def __repr__(self) -> str:
        return f"Audit({self.name}, {self.shape.layers} x {self.shape.width}, {self.verdict})"


def depth_words(depth: float, sigma: float | None = None) -> str:
    """
    >>> depth_words(28.9, 0.87), depth_words(-90.8, 0.5)
    ('28.9 ± 0.9 layers', 'no depth')
    """
    band = "" if sigma is None else f" ± {sigma:.1f}"
    return f"{depth:.1f}{band} layers" if depth > 0 else "no depth"


def audit(
    model: Any,
    *,
    vocab_rank: int | None = None,
    law: str | Law | Callable[[float], float] = "levine2020",
) -> Audit:
    r"""Whether a model is too deep or too shallow for its width.

    Compares the depth L with $L^*(d) = (\ln d - a) / b$ (Levine et al. 2020, section 5; see `DepthLaw`). Within two standard
    errors there is no verdict; near the optimum the loss hardly changes. Sizes are read from the configuration. Parameters are
    counted in the model, or in one that transformers builds from the configuration without memory; where it cannot, or is not
    installed, they are estimated from the sizes and not `exact`. Nothing is downloaded.

    Args:
        model: a Hugging Face config, model or folder, a config.json, a dict, "48x1600", `demo`, or a name from `known.CONFIGS`.
        vocab_rank: the rank of the embedding, where it was measured (Wies et al. 2021).
        law: as in `plan`.

    >>> audit("gpt2-xl").verdict, audit("gpt2").verdict, audit("28x768").verdict
    ('too deep for its width', 'too shallow for its width', 'within the band of the law')
    """
    rule = find_law(law)
    name, shape, config = _shape(model)
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
    if _is_module(model):
        count = sum(weight.numel() for weight in model.parameters())
    else:
        count = PARAMS.get(name) if config is CONFIGS.get(name) else configs.count(config)
    params, exact = (shape.params, False) if count is None else (count, True)
    rivals = {one.name: one.optimal_depth(shape.width) for one in LAWS.values() if one.name != rule.name}
    sigma = rule.sigma_depth(max(depth, 0.0))
    law_says = (rule, verdict, depth, sigma, budget_depth, budget_width, flags)
    return Audit(name, shape, *law_says, _remarks(shape), rivals, peers(shape.executed_params), params, exact)


def _remarks(shape: Shape) -> tuple[str, ...]:
    remarks = []
    if shape.part:
        remarks.append(f"of an encoder and a decoder this is the {shape.part} alone")
    if shape.stored_layers != shape.layers:
        remarks.append(f"{shape.layers} layers run on the weights of {shape.stored_layers}; depth counts what runs")
    if shape.cross_layers == shape.layers:
        remarks.append("every layer attends to an encoder as well, which is not counted")
    elif shape.cross_layers:
        remarks.append(f"depth adds up encoder and decoder, {shape.cross_layers} of the layers are the decoder's")
    if shape.experts:
        remarks.append(
            f"{shape.active_experts} of {shape.experts} experts run for a token; they alone count for the law"
        )
    if shape.inner > shape.width:
        remarks.append(f"attention works in {shape.inner} dimensions, above the width {shape.width}: redundant")
    return tuple(remarks)


def _shape(model: Any) -> tuple[str, Shape, dict[str, Any]]:
    if isinstance(model, Shape):
        return f"{model.layers}x{model.width}", model, {}
    if model == DEMO:
        model = demo_model_path()
    if isinstance(model, str):
        sizes = re.fullmatch(r"(\d+)\s*[xX×*]\s*(\d+)", model.strip())  # noqa: RUF001
        if sizes:
            layers, width = int(sizes[1]), int(sizes[2])
            if not (1 <= layers <= LARGEST and 1 <= width <= LARGEST):
                raise InvalidArgument(
                    f"model must be LAYERSxWIDTH, each from 1 to {LARGEST}, as 48x1600; got {model!r:.60}"
                )
            # Heads do not enter the verdict; where 64 does not divide the width, one head does.
            return model, Shape(layers, width, width // 64 if width % 64 == 0 else 1), {}
        if model.lower() in CONFIGS:
            config = CONFIGS[model.lower()]
            return model.lower(), Shape(**configs.sizes(config)), config
        if not model.strip() or not Path(model).exists():
            raise InvalidArgument(
                f"{model!r} is no folder, config.json, 'LAYERSxWIDTH' or known name; names are not downloaded. "
                f"Known are {', '.join(CONFIGS)}"
            )
    config = configs.read(model)
    name = title_of(Path(model)) if isinstance(model, str | Path) else config.get("model_type")
    name = name if isinstance(name, str) and name else type(model).__name__
    shape = Shape(**configs.sizes(_as_built(model, config) if _is_module(model) else config))
    return f"{name} {shape.part}".strip(), shape, config


def _is_module(model: Any) -> bool:
    return callable(getattr(model, "parameters", None)) and callable(getattr(model, "named_modules", None))


def _as_built(model: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a module: its class, and of an encoder and a decoder the part that it is."""
    kind = type(model).__name__
    built = config | {"architectures": [kind]}
    if config.get("is_encoder_decoder") and not any("decoder" in name for name, _ in model.named_modules()):
        decodes = bool(config.get("is_decoder")) or "Decoder" in kind
        built |= {"is_encoder_decoder": False, "is_decoder": decodes}
    return built

"""heedful: self-attention to build with and to look into.

>>> import torch, heedful
>>> q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
>>> heedful.attend(q, k, v, kernel=heedful.Gaussian(2.0)).shape
torch.Size([1, 2, 5, 4])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from heedful._lazy import lazy

__version__ = "0.2.0"

# Name -> where it lives. Nothing is imported before it is used, so that `import heedful` and the command line stay light.
_HOMES = {
    "attend": "heedful._attend",
    "Plan": "heedful._attend",
    "HeedfulError": "heedful._errors",
    "InvalidArgument": "heedful._errors",
    "Unsupported": "heedful._errors",
    "CorruptModel": "heedful._errors",
    "MissingExtra": "heedful._errors",
    "LinearState": "heedful.ops",
    "explain": "heedful.lens.causes.explanation",
    "look": "heedful.lens.looking",
    "KernelSVD": "heedful.decomposition",
    **dict.fromkeys(
        (
            "Cosine",
            "Exponential",
            "FeatureMap",
            "Gaussian",
            "HigherOrder",
            "Kernel",
            "Laplace",
            "Matern",
            "PerHead",
            "Polynomial",
            "RationalQuadratic",
            "Relu",
            "ReluSquared",
            "Sigmoid",
            "Silu",
            "Softmax",
            "Tanh",
        ),
        "heedful.kernels",
    ),
    # The rooms, which are modules themselves.
    **dict.fromkeys(
        (
            "bridges",
            "convert",
            "corpus",
            "decomposition",
            "discovery",
            "events",
            "geometry",
            "kernels",
            "lens",
            "masks",
            "multimodal",
            "nn",
            "ops",
            "ranking",
            "series",
            "tables",
            "transport",
        ),
        "",
    ),
}

__all__ = [
    "CorruptModel",
    "Cosine",
    "Exponential",
    "FeatureMap",
    "Gaussian",
    "HeedfulError",
    "HigherOrder",
    "InvalidArgument",
    "Kernel",
    "KernelSVD",
    "Laplace",
    "LinearState",
    "Matern",
    "MissingExtra",
    "PerHead",
    "Plan",
    "Polynomial",
    "RationalQuadratic",
    "Relu",
    "ReluSquared",
    "Sigmoid",
    "Silu",
    "Softmax",
    "Tanh",
    "Unsupported",
    "attend",
    "bridges",
    "convert",
    "corpus",
    "decomposition",
    "discovery",
    "events",
    "explain",
    "geometry",
    "kernels",
    "lens",
    "look",
    "masks",
    "multimodal",
    "nn",
    "ops",
    "ranking",
    "series",
    "tables",
    "transport",
]


__getattr__, __dir__ = lazy(__name__, _HOMES)

if TYPE_CHECKING:
    from heedful import (
        bridges,
        convert,
        corpus,
        decomposition,
        discovery,
        events,
        geometry,
        kernels,
        lens,
        masks,
        multimodal,
        nn,
        ops,
        ranking,
        series,
        tables,
        transport,
    )
    from heedful._attend import Plan, attend
    from heedful._errors import CorruptModel, HeedfulError, InvalidArgument, MissingExtra, Unsupported
    from heedful.decomposition import KernelSVD
    from heedful.kernels import (
        Cosine,
        Exponential,
        FeatureMap,
        Gaussian,
        HigherOrder,
        Kernel,
        Laplace,
        Matern,
        PerHead,
        Polynomial,
        RationalQuadratic,
        Relu,
        ReluSquared,
        Sigmoid,
        Silu,
        Softmax,
        Tanh,
    )
    from heedful.lens.causes.explanation import explain
    from heedful.lens.looking import look
    from heedful.ops import LinearState

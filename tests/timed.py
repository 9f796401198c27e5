"""Layers of attention at times for tests, and times for them."""

import torch

from heedful.nn import TimeAttention

F64 = {"dtype": torch.float64}
INTERACTIONS = ["rotary", "rotate_values", "bias", "decay", "bucket", "add", "concat", "concat_mlp", "residual"]
INVARIANT = INTERACTIONS[:5]
B, H, N, M, E = 2, 3, 7, 5, 12


def made(name, embed_dim=E, heads=H, dtype=torch.float64, **options):
    """A layer with every parameter off its start."""
    torch.manual_seed(0)
    if name == "rotate_values":
        name, options = "rotary", {"rotate_values": True, **options}
    if name in ("concat_mlp", "residual"):
        options = {"hidden": 5, "depth": 2, **options}
    options = {"buckets": 6, **options} if name == "bucket" else options
    layer = TimeAttention(embed_dim, heads, name, dtype=dtype, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def moments(*shape):
    """Increasing times, some of them equal."""
    gaps = torch.rand(*shape, **F64) * 3
    gaps[..., 2] = 0
    return gaps.cumsum(-1)

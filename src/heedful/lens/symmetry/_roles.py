"""The roles of parameters that are known: attention layers of torch, of Hugging Face, and our own."""

from __future__ import annotations

from typing import Any

from torch import nn

from heedful._errors import Unsupported
from heedful.bridges.rotation import RotationPlan, attention_roles, llama_plan
from heedful.nn import Attention, Block, GaussianProcessAttention, KnowledgeAttention, PairAttention, PrimalAttention

# Parameters by the last part of their name; what is not named lives inside heads or hidden units and stays.
KNOWN: dict[type, dict[str, str]] = {
    nn.MultiheadAttention: {"out_proj.weight": "cols", "out_proj.bias": "bias"}
    | dict.fromkeys(("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"), "rows"),
    KnowledgeAttention: dict.fromkeys(("query_rows", "key_rows", "value_rows", "vectors"), "rows")
    | {"value_columns": "cols"},
    PairAttention: {"rows": "rows"},
}
KNOWN[Attention] = KNOWN[nn.MultiheadAttention]

# The two halves of a Transformer layer outside attention.
FEED_FORWARD = {"linear1.weight": "rows", "linear2.weight": "cols", "linear2.bias": "bias"}


def known_roles(module: Any) -> dict[str, str]:
    """Every parameter of a known layer, or of layers inside a known one, with its role.

    >>> from torch import nn
    >>> known_roles(nn.MultiheadAttention(4, 2))["out_proj.bias"]
    'bias'
    """
    if not isinstance(module, nn.Module):
        raise Unsupported(f"roles='auto' reads a module; {type(module).__name__} is none: pass its parameters as z")
    roles: dict[str, str] = {}
    for at, part in module.named_modules():
        before = f"{at}." if at else ""
        if isinstance(part, PrimalAttention | GaussianProcessAttention):
            raise Unsupported(
                f"{type(part).__name__} reads its input head by head, so turning the embedding is no symmetry of it; give "
                "roles={name: role} to try a transformation of your own"
            )
        table = next((KNOWN[kind] for kind in type(part).__mro__ if kind in KNOWN), None)
        if isinstance(part, nn.TransformerEncoderLayer | Block):
            table = FEED_FORWARD
        elif isinstance(part, nn.LayerNorm | nn.RMSNorm):
            table = {}
        elif table is None:
            table = attention_roles(part)
        if table is not None:
            own = [name for name, _ in part.named_parameters()]
            roles |= {f"{before}{name}": table.get(name, roles.get(f"{before}{name}", "fixed")) for name in own}
    unknown = [name for name, _ in module.named_parameters() if name not in roles]
    if unknown or not roles:
        what = f"the parameter {unknown[0]}" if unknown else "no parameters"
        raise Unsupported(f"roles='auto' does not know {type(module).__name__} with {what}; give roles={{name: role}}")
    return roles


def rotation_plan(module: Any) -> RotationPlan:
    """How `rotate_` turns a known layer or a Llama-type model."""
    if isinstance(module, nn.TransformerEncoderLayer | Block):
        return _layer_plan(module)
    if isinstance(module, nn.MultiheadAttention | KnowledgeAttention):
        size = int(module.embed_dim)
        widths = getattr(module, "kdim", size), getattr(module, "vdim", size)
        if widths != (size, size):
            raise Unsupported(
                f"keys and values of size {widths} do not live in the embedding of size {size}; give roles"
            )
        needed = {"out_proj.weight": "cols"} if isinstance(module, nn.MultiheadAttention) else {}
        return RotationPlan(size, known_roles(module) | needed)
    return llama_plan(module)


def _layer_plan(layer: Any) -> RotationPlan:
    kind = type(layer).__name__
    if not isinstance(layer.self_attn, nn.MultiheadAttention | Attention):
        raise Unsupported(
            f"{kind} cannot be rotated: its attention is {layer.kernel!r}, and the rotation of a layer is known for kernels alone"
        )
    size = int(layer.self_attn.embed_dim)
    norms = {name: getattr(layer, name) for name in ("norm1", "norm2")}
    for name, norm in norms.items():
        if not isinstance(norm, nn.RMSNorm):
            raise Unsupported(
                f"{kind} cannot be rotated: {name} is {type(norm).__name__}, whose mean and gain single out directions; "
                "give it two norms, layer.norm1, layer.norm2 = nn.RMSNorm(d), nn.RMSNorm(d). In eval mode torch's fused layer "
                "knows LayerNorm alone and raises: torch.backends.mha.set_fastpath_enabled(False)"
            )
    reading = {"norm1": ("self_attn.in_proj_weight",), "norm2": ("linear1.weight",)}
    learned = [name for name, norm in norms.items() if norm.weight is not None]
    needed = {"linear1.weight": "rows", "linear2.weight": "cols", "self_attn.out_proj.weight": "cols"}
    roles = known_roles(layer) | needed
    if layer.norm_first and layer.self_attn.in_proj_weight is not None:
        return RotationPlan(size, roles, {f"{name}.weight": reading[name] for name in learned})
    why = "its output is also added to: set norm_first=True"
    return RotationPlan(size, roles, stuck={f"{name}.weight": why for name in learned})

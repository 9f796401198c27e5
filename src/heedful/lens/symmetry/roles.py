"""The roles of parameters that are known: attention layers of torch, of Hugging Face, and our own."""

from __future__ import annotations

from typing import Any

from torch import nn

from heedful._errors import Unsupported
from heedful.bridges.structure import attention_roles
from heedful.nn import (
    Attention,
    Block,
    GaussianProcessAttention,
    GramCoefficients,
    InvariantCoefficients,
    KnowledgeAttention,
    PairAttention,
    PrimalAttention,
    TimeAttention,
)

# Parameters by the last part of their name; what is not named lives inside heads or hidden units and stays.
KNOWN: dict[type, dict[str, str]] = {
    nn.MultiheadAttention: {"out_proj.weight": "cols", "out_proj.bias": "bias"}
    | dict.fromkeys(("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"), "rows"),
    KnowledgeAttention: dict.fromkeys(
        ("query_rows", "key_rows", "knowledge_query_rows", "knowledge_key_rows", "value_rows", "vectors"), "rows"
    )
    | {"value_columns": "cols"},
    PairAttention: {"rows": "rows", "value_rows": "rows", "value_columns": "cols"},
    InvariantCoefficients: {},
    GramCoefficients: {},
}
KNOWN[Attention] = KNOWN[nn.MultiheadAttention]
KNOWN[TimeAttention] = KNOWN[Attention] | {"joining.time_map.weight": "cols"}

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
        if isinstance(part, TimeAttention) and part.interaction in ("concat", "concat_mlp", "residual"):
            raise Unsupported(
                f"interaction={part.interaction!r} joins features of time to the embedding, so turning the embedding alone is no "
                "symmetry of its maps; give roles={name: role} to try a transformation of your own"
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

"""Which parameters of Hugging Face models live in the embedding, and how each moves when the embedding turns.

Read off the modules, not off their names in a registry: what has Llama's shape (Llama, Mistral, Qwen2 and their kin) is
known by it, and a norm is believed to be RMSNorm after it was tried.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from heedful._errors import Unsupported


@dataclass(frozen=True)
class RotationPlan:
    """All that `rotate_` needs to know of a model.

    Attributes:
        size: of the embedding.
        roles: parameter -> `rows`, `cols`, `both`, `bias` or `fixed`. A name that is no parameter cannot be turned.
        gains: gain of a norm -> the weights that read what it scales, which take it over.
        stuck: gains that nothing can take over, with the reason; the model can be turned if they are all equal.
        tied: module whose weight is the embedding table itself, and must get its own when a gain goes into it.
        layers: modules before which activations are measured.
        embedding: module that looks tokens up; None where vectors go in.
        turned: whether vectors come out, which turn with the embedding.
    """

    size: int
    roles: dict[str, str]
    gains: dict[str, tuple[str, ...]] = field(default_factory=dict)
    stuck: dict[str, str] = field(default_factory=dict)
    tied: str | None = None
    layers: tuple[str, ...] = ()
    embedding: str | None = None
    turned: bool = True


def llama_plan(model: Any) -> RotationPlan:
    """How to turn the embedding of a Llama-type model; `Unsupported` with the reason where it cannot be turned."""
    kind = type(model).__name__
    body, prefix = (model.model, "model.") if hasattr(model, "model") else (model, "")
    for name, part in model.named_modules():
        if isinstance(part, nn.LayerNorm):
            raise Unsupported(
                f"{kind} cannot be rotated: {name} is a LayerNorm, whose mean and gain single out directions of the "
                "embedding. Models with RMSNorm can: Llama, Mistral, Qwen2"
            )
    missing = [part for part in ("embed_tokens", "layers", "norm") if not hasattr(body, part)]
    if missing:
        raise Unsupported(f"{kind} is not of Llama's shape: it has no {', '.join(missing)}; give roles={{name: role}}")
    _check_weight(kind, body.embed_tokens, f"{prefix}embed_tokens")
    size = int(body.embed_tokens.weight.shape[-1])
    roles = {f"{prefix}embed_tokens.weight": "rows"}
    gains: dict[str, tuple[str, ...]] = {}
    layers = []
    for at, layer in enumerate(body.layers):
        name = f"{prefix}layers.{at}"
        layers.append(name)
        inside = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
        for (part, reading), norm in zip(inside.items(), ("input_layernorm", "post_attention_layernorm"), strict=True):
            _check_parts(kind, layer, name, (part, norm))
            out = {"self_attn": "o_proj", "mlp": "down_proj"}[part]
            _check_parts(kind, getattr(layer, part), f"{name}.{part}", (*reading, out))
            _check_norm(kind, getattr(layer, norm), f"{name}.{norm}", size)
            for each in (*reading, out):
                _check_weight(kind, getattr(getattr(layer, part), each), f"{name}.{part}.{each}")
            for each in reading:
                roles |= {f"{name}.{part}.{each}.weight": "rows", f"{name}.{part}.{each}.bias": "fixed"}
            roles |= {f"{name}.{part}.{out}.weight": "cols", f"{name}.{part}.{out}.bias": "bias"}
            gains[f"{name}.{norm}.weight"] = tuple(f"{name}.{part}.{each}.weight" for each in reading)
        # Norms of queries and keys act inside heads, where nothing turns.
        roles |= {f"{name}.self_attn.{norm}.weight": "fixed" for norm in ("q_norm", "k_norm")}
    _check_norm(kind, body.norm, f"{prefix}norm", size)
    head = next((one for one in ("lm_head", "score") if getattr(model, one, None) is not None), None)
    stuck, tied = {}, None
    if head is None:
        stuck[f"{prefix}norm.weight"] = "nothing comes after it: rotate the model with its head"
    else:
        _check_weight(kind, getattr(model, head), head)
        if not isinstance(getattr(model, head), nn.Linear):
            raise Unsupported(
                f"{kind} cannot be rotated: {head} is {type(getattr(model, head)).__name__}, expected nn.Linear"
            )
        gains[f"{prefix}norm.weight"] = (f"{head}.weight",)
        roles |= {f"{head}.weight": "rows", f"{head}.bias": "fixed"}
        tied = head if getattr(model, head).weight is body.embed_tokens.weight else None
    roles |= dict.fromkeys((*gains, *stuck), "fixed")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    unknown = [name for name in names if name not in roles]
    if unknown:
        raise Unsupported(f"{kind} has {unknown[0]}, which Llama has not; it is not known how that moves: give roles")
    roles = {name: roles[name] for name in names}
    return RotationPlan(
        size, roles, gains, stuck, tied, tuple(layers), embedding=f"{prefix}embed_tokens", turned=head is None
    )


def _check_parts(kind: str, module: Any, name: str, parts: tuple[str, ...]) -> None:
    missing = [part for part in parts if not hasattr(module, part)]
    if missing:
        raise Unsupported(f"{kind} is not of Llama's shape: {name} has no {missing[0]}; give roles={{name: role}}")


def _check_weight(kind: str, module: Any, name: str) -> None:
    """Quantised layers hold whole numbers in buffers, which nothing here would turn."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or not weight.is_floating_point():
        got = f"a weight of {weight.dtype}" if isinstance(weight, Tensor) else "no weight"
        raise Unsupported(
            f"{kind} cannot be rotated: {name} ({type(module).__name__}) has {got}, expected a floating parameter; "
            "rotate before quantising"
        )


def _check_norm(kind: str, norm: Any, name: str, size: int) -> None:
    """Tries the norm: Gemma's, say, multiplies by 1 + weight, and would be absorbed wrongly."""
    if not isinstance(getattr(norm, "weight", None), nn.Parameter):
        raise Unsupported(f"{kind} cannot be rotated: {name} has no gain, so it is not known what it does; give roles")
    x = torch.linspace(-1.0, 2.0, size, device=norm.weight.device, dtype=norm.weight.dtype)[None, None]
    with torch.no_grad():
        got, wide = norm(x).double(), x.double()
    wanted = norm.weight.detach().double() * wide / wide.square().mean().sqrt()
    if not bool((got - wanted).norm() <= 0.02 * wanted.norm()):
        raise Unsupported(f"{kind} cannot be rotated: {name} is not gain * x / rms(x)")

"""Where a model that has not been trained yet is written to: its table of tokens, and the maps of one layer of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from heedful._errors import InvalidArgument, Unsupported
from heedful.bridges.structure import HEADS, OUTWARD, QUERIES_KEYS_VALUES, layers_of
from heedful.kernels import Softmax
from heedful.nn import Attention, Block

Role = Literal["query", "key", "value", "output"]
NORMS = ("ln_1", "input_layernorm", "norm1", "ln1", "layer_norm1", "attention_norm")
GROUPS = ("num_key_value_heads", "num_kv_heads")
# Norms of queries and keys inside of heads.
HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")


@dataclass(frozen=True)
class Piece:
    """A part of a parameter: rows (or columns, where it is stored the other way round) that belong to one role."""

    names: tuple[str, ...]  # of the weight, and of the bias where there is one
    weight: Tensor
    bias: Tensor | None
    rows: slice
    transposed: bool  # [in, out], as transformers' Conv1D has it


@dataclass(frozen=True)
class Start:
    """The parameters of a pre-norm model that its start is written to.

    Attributes:
        table, head: parameters `(tokens, size)` by name; the head's is the same where it is tied, None where there is none.
        norm: what the layer's input goes through.
        pieces: where each role of the layer's attention is stored.
        heads, key_heads, head_size: its sizes.
        scale: what products of queries and keys are multiplied by.
        unscored: why queries and keys cannot be set, empty where they can.
        notes: what the scores of this model have besides.
    """

    table: tuple[str, Tensor]
    head: tuple[str, Tensor] | None
    norm: nn.Module
    pieces: dict[Role, Piece]
    heads: int
    key_heads: int
    head_size: int
    scale: float = 1.0
    unscored: str = ""
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return int(self.table[1].shape[0])

    @property
    def size(self) -> int:
        return int(self.table[1].shape[1])

    @property
    def groups(self) -> int:
        """Heads that share a key."""
        return self.heads // self.key_heads

    @property
    def tied(self) -> bool:
        return self.head is not None and self.head[1] is self.table[1]

    def tables(self) -> list[Tensor]:
        """The table of tokens, and the head's where it has one of its own."""
        return [self.table[1]] if self.head is None or self.tied else [self.table[1], self.head[1]]

    def table_names(self) -> list[str]:
        return [self.table[0]] if self.head is None or self.tied else [self.table[0], self.head[0]]

    def normed(self) -> np.ndarray:
        """What the layer reads where each token stands alone, without its position: `(tokens, size)` in float64."""
        with torch.no_grad():
            return self.norm(self.table[1][None])[0].double().cpu().numpy()

    def head_table(self) -> np.ndarray:
        """Vectors whose products with the last hidden state are logits, `(tokens, size)`; the table itself without a head."""
        weight = self.table[1] if self.head is None else self.head[1]
        return weight.detach().double().cpu().numpy()

    def written(self, *roles: Role) -> list[str]:
        """Names of the parameters of some roles."""
        pieces = [self.pieces[role] for role in roles]
        return list(dict.fromkeys(name for piece in pieces for name in piece.names))

    def write(self, role: Role, maps: np.ndarray) -> None:
        """Sets one role to maps `(heads, head size, size)`, of keys and values for each that is shared, and its bias to zero."""
        piece = self.pieces[role]
        flat = torch.from_numpy(np.ascontiguousarray(maps.reshape(-1, maps.shape[-1]))).to(piece.weight)  # [heads D, d]
        outward = role == "output"
        with torch.no_grad():
            if outward:
                piece.weight.copy_(flat if piece.transposed else flat.T)
            elif piece.transposed:
                piece.weight[:, piece.rows] = flat.T
            else:
                piece.weight[piece.rows] = flat
            if piece.bias is not None:
                piece.bias[slice(None) if outward else piece.rows] = 0.0


def find_start(model: nn.Module, layer: int = 0) -> Start:
    """Where the start of a model is written to; refuses models that normalise behind their layers.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> start = find_start(GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=2, n_head=2)))
    >>> start.table[0], start.tied, start.pieces["key"].rows
    ('transformer.wte.weight', True, slice(8, 16, None))
    """
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model must be a torch module; got {kind}")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise Unsupported(f"{kind} has no weights yet (device meta); load them first")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    blocks = layers_of(model)
    if not blocks:
        raise Unsupported(f"{kind} has no list of layers that attend")
    if layer >= len(blocks):
        raise InvalidArgument(f"layer must be below {len(blocks)}, the layers of this {kind}; got {layer}")
    name, block = blocks[layer]
    norm = next((getattr(block, own) for own in NORMS if isinstance(getattr(block, own, None), nn.Module)), None)
    if norm is None or (isinstance(block, Block) and not block.norm_first):
        raise Unsupported(
            f"layer {name} of {kind} has no norm before its attention; warm starts are for models that normalise first, "
            "as GPT-2, Llama and heedful.nn.Encoder"
        )
    attention, own = _attention(name, block)
    pieces, heads, key_heads, size = _pieces(own, attention, names)
    table, head = _tables(model, pieces["query"], names)
    scale, unscored = _scale(own, attention, size)
    notes = _notes(model, attention)
    return Start(table, head, norm, pieces, heads, key_heads, size, scale, unscored, notes)


def _scale(own: str, attention: nn.Module, size: int) -> tuple[float, str]:
    """What products of queries and keys are multiplied by; or why scores are something else."""
    given: Any = attention
    if isinstance(attention, Attention):
        if not isinstance(attention.kernel, Softmax):
            return 1.0, f"{own} has the kernel {attention.kernel}, whose scores are no products"
        scale = attention.kernel.scale
        if isinstance(scale, Tensor) or scale == 0:
            return 1.0, f"{own} multiplies scores by {scale}; one number other than 0 is expected"
        return (size**-0.5 if scale is None else float(scale)), ""
    if any(isinstance(getattr(attention, name, None), nn.Module) for name in HEAD_NORMS):
        return 1.0, f"{own} normalises queries and keys, so their products cannot be associations"
    if isinstance(getattr(attention, "scaling", None), float):
        return given.scaling, ""
    if isinstance(getattr(attention, "scale_attn", None), float):
        return 1 / given.scale_attn, ""
    return 1.0, f"{own} does not say what its scores are multiplied by"


def _notes(model: nn.Module, attention: nn.Module) -> tuple[str, ...]:
    turned = any("rotary" in part for part, _ in model.named_modules()) or hasattr(attention, "rotary_dim")
    capped = getattr(attention, "attn_logit_softcapping", None)
    notes = []
    if turned:
        notes.append("rotary positions turn queries and keys: scores are as counted for the nearest tokens alone")
    if capped:
        notes.append(f"scores are bounded by {capped:g}: large ones are smaller than counted")
    return tuple(notes)


def _attention(name: str, block: nn.Module) -> tuple[nn.Module, str]:
    """The innermost module of a layer that has the maps of attention, and its name."""
    for own, part in block.named_modules():
        children = dict(part.named_children())
        known = any(set(maps) <= children.keys() for maps in QUERIES_KEYS_VALUES) or "c_attn" in children
        if known or isinstance(part, Attention):
            return part, f"{name}.{own}"
    raise Unsupported(f"layer {name} has no attention whose maps are known")


def _pieces(own: str, attention: nn.Module, names: dict[int, str]) -> tuple[dict[Role, Piece], int, int, int]:
    children: dict[str, Any] = dict(attention.named_children())
    output = next((children[part] for part in OUTWARD if part in children), None)
    if output is None:
        raise Unsupported(f"{own} has no output map of a known name")
    maps = next((maps for maps in QUERIES_KEYS_VALUES if set(maps) <= children.keys()), None)
    if isinstance(attention, Attention):
        if attention.in_proj_weight is None:
            raise Unsupported(f"{own} has keys or values of another size than its queries")
        heads, key_heads, size = attention.num_heads, attention.num_kv_heads, attention.head_dim
        weights = [(attention.in_proj_weight, attention.in_proj_bias)] * 3
    else:
        heads, key_heads, size = _sizes(own, attention)
        parts = [children["c_attn"]] * 3 if maps is None else [children[part] for part in maps]
        weights = [(part.weight, part.bias) for part in parts]
    packed = weights[0][0] is weights[1][0]
    if key_heads < 1 or heads % key_heads:
        raise Unsupported(
            f"{own} has {heads} heads of queries and {key_heads} of keys; the second must divide the first"
        )
    ends = np.cumsum([0, heads * size, key_heads * size, key_heads * size]).tolist()
    roles: tuple[Role, Role, Role] = ("query", "key", "value")
    pieces: dict[Role, Piece] = {}
    for place, (role, (weight, bias)) in enumerate(zip(roles, weights, strict=True)):
        rows = slice(ends[place], ends[place + 1]) if packed else slice(0, ends[place + 1] - ends[place])
        pieces[role] = Piece(_named(names, weight, bias), weight, bias, rows, "c_attn" in children)
    own_names = _named(names, output.weight, output.bias)
    turned = type(output).__name__ == "Conv1D"
    pieces["output"] = Piece(own_names, output.weight, output.bias, slice(None), turned)
    return pieces, heads, key_heads, size


def _named(names: dict[int, str], *parameters: Tensor | None) -> tuple[str, ...]:
    return tuple(names[id(parameter)] for parameter in parameters if parameter is not None)


def _sizes(own: str, attention: nn.Module) -> tuple[int, int, int]:
    """Heads, heads of keys, and the size of a head."""
    config: Any = getattr(attention, "config", None)
    homes = (attention, config)

    def first(names: tuple[str, ...]) -> int | None:
        found = (getattr(home, name, None) for home in homes for name in names)
        return next((value for value in found if isinstance(value, int)), None)

    heads = first((*HEADS, "n_head"))
    size = first(("head_dim",))
    if heads is None or size is None:
        raise Unsupported(f"{own} does not say how many heads it has, and of which size")
    return heads, first(GROUPS) or heads, size


def _tables(
    model: nn.Module, query: Piece, names: dict[int, str]
) -> tuple[tuple[str, Tensor], tuple[str, Tensor] | None]:
    """The table of tokens and the head over them."""
    width = query.weight.shape[0 if query.transposed else 1]
    whole: Any = model
    table = whole.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if table is None:
        tables = [part for part in model.modules() if isinstance(part, nn.Embedding) and part.embedding_dim == width]
        table = max(tables, key=lambda part: part.num_embeddings, default=None)
    if not isinstance(table, nn.Embedding) or table.embedding_dim != width:
        raise Unsupported(f"{type(model).__name__} has no table of tokens as wide as its layers ({width})")
    head = whole.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        over = (part for part in model.modules() if isinstance(part, nn.Linear))
        wanted = (table.num_embeddings, width)
        head = next((part for part in over if (part.out_features, part.in_features) == wanted), None)
    own = (names[id(table.weight)], table.weight)
    return own, None if head is None else (names[id(head.weight)], head.weight)

"""Where a model attends: its layers, the maps of queries, keys, values and outputs, and which of these places a caller means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import Parameter, signature, unwrap
from operator import index
from typing import Any

from torch import Tensor, nn

from heedful._errors import InvalidArgument, Unsupported
from heedful._runtime import before_calls

Layers = int | str | Sequence[int | str]

_REASON = "; heedful reaches attention that goes through transformers' AttentionInterface only"


def select(model: Any, layers: Layers | None) -> tuple[dict[str, nn.Module], list[str]]:
    """The modules to change, by name, and the names of all other attention; refuses what cannot be changed."""
    for part in model.modules():
        if hasattr(part, "_can_set_attn_implementation") and not part._can_set_attn_implementation():
            raise Unsupported(f"{type(part).__name__} computes its attention by itself{_REASON}")
    modules = dict(model.named_modules())
    sites = {name: module for name, module in modules.items() if _calls_interface(type(module))}
    if not sites:
        raise Unsupported(f"{type(model).__name__} has no attention that can be replaced{_REASON}")
    others = _others(modules, sites)
    chosen = {*sites, *others} if layers is None else _chosen(model, layers, modules, sites, others)
    own = (part for name in others if name in chosen for part in modules[name].modules())
    fixed = sorted({type(part).__name__ for part in own if _is_attention(part)})
    if fixed:
        raise Unsupported(
            f"{type(model).__name__} computes part of its attention by itself, in {', '.join(fixed)}{_REASON}. "
            "layers=[...] changes those layers alone that have none of it"
        )
    changed = {name: module for name, module in sites.items() if name in chosen}
    return changed, [name for name in modules if (name in sites or name in others) and name not in changed]


def _calls_interface(cls: type[nn.Module]) -> bool:
    code = getattr(unwrap(cls.forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _is_attention(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__


def _others(modules: dict[str, nn.Module], sites: Iterable[str]) -> list[str]:
    """Modules called attention that neither are, hold nor lie in one that calls the interface; outermost ones.

    One that has the name alone must have three parts, as queries, keys and values do: norms are named after attention too.
    """
    around = {parent for site in sites for parent in _parents(site)}
    names: list[str] = []
    for name, module in modules.items():
        called = _is_attention(module) or (re.search(r"(attn|attention)$", name) and len(list(module.children())) > 2)
        if called and name not in around and not {*sites, *names} & {*_parents(name)}:
            names.append(name)
    return names


def _parents(name: str) -> list[str]:
    """The name itself, and those of the modules it lies in, innermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)] + [""] * bool(name)


def _chosen(
    model: Any, layers: Layers, modules: dict[str, nn.Module], sites: dict[str, nn.Module], others: list[str]
) -> set[str]:
    entries = [layers] if isinstance(layers, str) or not isinstance(layers, Iterable) else list(layers)
    if not entries:
        raise InvalidArgument(f"layers must be numbers of layers or patterns of names, one or more; got {layers!r}")
    numbered = _numbered(model, modules, [*sites, *others])
    chosen: set[str] = set()
    for entry in entries:
        if isinstance(entry, str):
            matching = [
                name
                for name in (*sites, *others)
                if any(fnmatchcase(part, entry) for part in _parents(name) if part or not name)
            ]
        else:
            matching = [name for name, number in numbered.items() if number == _number(entry)]
        if not any(name in sites for name in matching):
            raise InvalidArgument(_nothing(entry, matching, modules, sites, numbered))
        chosen.update(matching)
    return chosen


def _number(entry: Any) -> int:
    try:
        if not isinstance(entry, bool):
            return index(entry)
    except TypeError:
        pass
    raise InvalidArgument(f"layers must be numbers of layers or patterns of names; got {entry!r}")


def _numbered(model: Any, modules: dict[str, nn.Module], names: Iterable[str]) -> dict[str, int]:
    """The layer each name lies in; where a model has a text part beside others, names of that part alone."""
    layer = {name: int(match[1]) for name in names if (match := re.search(r"(?:^|\.)(\d+)(?:\.|$)", name))}
    try:
        text = type(model.config.get_text_config())
    except ValueError:  # two of them: an encoder of texts and a decoder
        text = type(model.config.get_text_config(decoder=True))
    inside = {name: number for name, number in layer.items() if type(_config(modules, name)) is text}
    return inside or layer


def _config(modules: dict[str, nn.Module], name: str) -> Any:
    """The config of a module, or of the innermost one around it that has one."""
    around = (modules[part] for part in _parents(name))
    return next((part.config for part in around if hasattr(part, "config")), None)


def _nothing(
    entry: int | str,
    matching: list[str],
    modules: dict[str, nn.Module],
    sites: Iterable[str],
    numbered: dict[str, int],
) -> str:
    """Why an entry of `layers` changes nothing, and what to give instead."""
    name_of_model = type(modules[""]).__name__
    if matching:
        kinds = ", ".join(f"{name} ({type(modules[name]).__name__})" for name in matching[:3])
        why = f"layers: {entry!r} means {kinds}, which heedful cannot replace"
    elif isinstance(entry, str):
        why = f"layers: no attention in this {name_of_model} matches {entry!r}"
    else:
        why = f"layers: this {name_of_model} has no layer {entry!r}"
    named = [name for name in sites if name in numbered]
    if isinstance(entry, str) or not named:
        return f"{why}; attention that can be replaced: {_brief(list(sites))}"
    known = sorted({numbered[name] for name in named})
    where = f"{why}; numbers count the layers of {_brief(_stacks(named))}, of which it can replace {_brief(known, 8)}"
    outside = _stacks(name for name in sites if name not in numbered)
    return f"{where}. Give others by name: {_brief([f'{stack}.*' for stack in outside])}" if outside else where


def _stacks(names: Iterable[str]) -> list[str]:
    """What stands before the number of a layer, each once; a module outside of all layers as it is."""
    return list(dict.fromkeys(re.split(r"(?:^|\.)\d+(?:\.|$)", name, maxsplit=1)[0] or name for name in names))


def _brief(entries: Sequence[object], most: int = 4) -> str:
    more = f" and {len(entries) - most} more" if len(entries) > most else ""
    return ", ".join(map(str, entries[:most])) + more


# What projections are called by the models of transformers: into the heads, and out of them.
QUERIES_KEYS_VALUES = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
)
INWARD = {name for names in QUERIES_KEYS_VALUES for name in names} | {"c_attn"}
OUTWARD = ("o_proj", "out_proj", "out_lin", "dense", "o", "c_proj")
HEADS = ("num_attention_heads", "num_heads", "n_heads")


def attention_roles(module: nn.Module) -> dict[str, str] | None:
    """The roles of an attention module's parameters, or None where its projections are not recognised.

    `rows` for what goes into heads, `cols` and `bias` for what comes out, `fixed` for biases and norms inside heads. The
    weights of transformers' `Conv1D` (GPT-2) are the transpose of `Linear`'s.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> config = LlamaConfig(vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12)
    >>> attention_roles(LlamaModel(config).layers[0].self_attn)["o_proj.weight"]
    'cols'
    """
    roles: dict[str, str] = {}
    reads = False
    for name, part in module.named_children():
        if not isinstance(getattr(part, "weight", None), Tensor):
            continue
        transposed = type(part).__name__ == "Conv1D"
        if name in INWARD:
            reads = True
            roles[f"{name}.weight"] = "cols" if transposed else "rows"
            roles[f"{name}.bias"] = "fixed"
        elif name in OUTWARD:
            roles[f"{name}.weight"] = "rows" if transposed else "cols"
            roles[f"{name}.bias"] = "bias"
    names = [name for name, _ in module.named_parameters()]
    return {name: roles.get(name, "fixed") for name in names} if reads else None


@dataclass(frozen=True)
class Site:
    """A self-attention module by name: its maps, the linear map whose output a primal layer gives instead, its block."""

    name: str
    query: str
    key: str
    output: str
    block: str
    heads: int
    width: int

    @property
    def inside(self) -> bool:
        """Whether the output map is part of the module, as in ViT, or beside it, as in BERT."""
        return self.output.startswith(f"{self.name}.")


def find_sites(model: nn.Module) -> list[Site]:
    """Every self-attention of an encoder that a primal layer can replace, in the order of the model.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(vocab_size=31, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=17)
    >>> [site.name for site in find_sites(BertModel(config))]
    ['encoder.layer.0.attention.self', 'encoder.layer.1.attention.self']
    """
    config = getattr(model, "config", None)
    for flag in ("is_decoder", "is_encoder_decoder"):
        if getattr(config, flag, False):
            raise Unsupported(
                f"{type(model).__name__} is a decoder or has one ({flag}); give an encoder, as BertModel or ViTModel"
            )
    modules = dict(model.named_modules())
    candidates = [_site(name, module, modules) for name, module in modules.items()]
    sites = [site for site in candidates if site is not None]
    if not sites:
        raise Unsupported(
            f"{type(model).__name__} has no self-attention of a known structure: linear maps "
            f"{' or '.join('/'.join(names) for names in QUERIES_KEYS_VALUES)} of one width, and an output map; BERT, RoBERTa, "
            "DistilBERT, ViT, DeiT and their kin have it"
        )
    return sites


def _site(name: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> Site | None:
    children = {child: part for child, part in module.named_children() if isinstance(part, nn.Linear)}
    maps = next((names for names in QUERIES_KEYS_VALUES if set(names) <= set(children)), None)
    if maps is None:
        return None
    around = name.rpartition(".")[0]
    outputs = [f"{name}.{own}" for own in OUTWARD if own in children] + [f"{around}.output.dense"]
    output = next((place for place in outputs if isinstance(modules.get(place), nn.Linear)), None)
    width = children[maps[0]].in_features
    square = all((children[own].in_features, children[own].out_features) == (width, width) for own in maps)
    heads = next((getattr(module, own) for own in HEADS if isinstance(getattr(module, own, None), int)), None)
    heads = heads or getattr(getattr(module, "config", None), HEADS[0], None)
    # The layer is the innermost ancestor that stands in a list of layers.
    parts = name.split(".")
    block = next((".".join(parts[:at]) for at in range(len(parts) - 1, 0, -1) if parts[at - 1].isdigit()), None)
    if output is None or not square or not heads or block is None or width % heads:
        return None
    return Site(name, f"{name}.{maps[0]}", f"{name}.{maps[1]}", output, block, heads, width)


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Layers by name: elements of a `ModuleList` that all hold attention; lists inside of a layer are its own affair."""

    def holds_attention(block: nn.Module) -> bool:
        return any("attention" in type(part).__name__.lower() for part in block.modules())

    outer: tuple[str, ...] = ("\0",)
    layers: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not name.startswith(outer) and all(map(holds_attention, module)):
            outer += (f"{name}.",)
            layers += ((f"{name}.{at}", block) for at, block in enumerate(module))
    return layers


def positions_of(model: nn.Module) -> list[str]:
    """The modules by which a model knows positions."""
    names = []
    for name, module in model.named_modules():
        last = name.split(".")[-1]
        table = isinstance(module, nn.Embedding) and ("position" in last or last in ("wpe", "relative_attention_bias"))
        if table or "rotary" in last:
            names.append(name)
    return names


@dataclass(frozen=True)
class Call:
    """One attention module with the input and the arguments that the model gave it."""

    name: str
    module: nn.Module
    x: Tensor
    arguments: dict[str, Any]


def calls_of(model: Any, inputs: Mapping[str, Any], names: Sequence[str]) -> list[Call]:
    """What modules that attend to their own sequence are called with while a model reads one, in the order of the names."""
    modules = dict(model.named_modules())
    names_of = {modules[name]: name for name in names if name in modules}
    calls: dict[str, Call] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        call = _call(names_of[module], module, args, named)
        if call is not None:
            calls[call.name] = call

    with before_calls(names_of, keep):
        try:
            model(**inputs)
        except Exception as error:
            # An encoder-decoder, say, wants more than a text; what ran before is caught all the same.
            if not calls:
                raise Unsupported(f"{type(model).__name__} does not run on a text alone: {error}") from error
    return [calls[name] for name in dict.fromkeys(names) if name in calls]


def _call(name: str, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Call | None:
    """What an attention module was called with; None for cross-attention, and for more than one sequence."""
    known = signature(module.forward).bind(*args, **named).arguments
    for parameter in signature(module.forward).parameters.values():
        if parameter.kind is Parameter.VAR_KEYWORD:
            known |= known.pop(parameter.name, {})
    x = known.pop(next(iter(known)), None)
    if any(known.pop(other, x) is not x for other in ("key", "value")):
        return None
    # A cache would remember one trial in the next.
    known = {key: value for key, value in known.items() if "past_key" not in key and "cache" not in key}
    if not isinstance(x, Tensor) or x.dim() != 3 or len(x) != 1 or x.shape[1] < 2:
        return None
    return Call(name, module, x[0].detach().double().cpu(), known)


def block_of(name: str) -> str:
    """The layer that a module lies in: its name up to the last number.

    >>> block_of("model.decoder.layers.3.encoder_attn")
    'model.decoder.layers.3'
    """
    parts = name.split(".")
    return next((".".join(parts[:at]) for at in range(len(parts), 0, -1) if parts[at - 1].isdigit()), "")


def output_map(model: nn.Module, name: str) -> nn.Module:
    """The linear map behind the heads of the attention module of this name, inside of it or beside it.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(vocab_size=31, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=17)
    >>> output_map(BertModel(config), "encoder.layer.1.attention.self")
    Linear(in_features=12, out_features=12, bias=True)
    """
    modules = dict(model.named_modules())
    around = name.rpartition(".")[0]
    places = [*(".".join(filter(None, (name, own))) for own in (*OUTWARD, "proj")), f"{around}.output.dense"]
    found = next((modules[place] for place in places if isinstance(_weight(modules.get(place)), Tensor)), None)
    if found is None:
        raise Unsupported(
            f"{name or type(model).__name__} has no map of outputs that is known: one of {', '.join(OUTWARD)}, or output.dense beside it"
        )
    return found


def _weight(module: nn.Module | None) -> Any:
    return getattr(module, "weight", None)


def output_matrix(module: nn.Module) -> Tensor:
    """The matrix of a map of outputs, `[d, heads x size]`; that of transformers' `Conv1D` is stored transposed."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.mT if type(module).__name__ == "Conv1D" else weight

"""Where a Hugging Face model attends, and which of those places a caller means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from inspect import unwrap
from operator import index
from typing import Any

from torch import nn

from heedful._errors import InvalidArgument, Unsupported

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
    layer = {name: int(found[1]) for name in names if (found := re.search(r"(?:^|\.)(\d+)(?:\.|$)", name))}
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

"""Hugging Face models with a heedful kernel in place of their attention.

One call reaches every model whose attention goes through transformers' attention interface. It registers an attention
function together with a mask function, so padding, packing, sliding windows and caches mean what they meant before.

>>> from transformers import BertConfig, BertModel
>>> from heedful import Gaussian
>>> from heedful.bridges.transformers import restore, use, used
>>> config = BertConfig(vocab_size=31, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=17)
>>> model = BertModel(config).eval()
>>> use(model, Gaussian(2.0), layers=[1])
Placement(Gaussian(bandwidth=2.0, normalize=True) in BertModel: 1 of 2 attention modules)
>>> used(model)
Gaussian(bandwidth=2.0, normalize=True)
>>> used(restore(model)) is None
True
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from heedful import masks
from heedful._attend import attend
from heedful._errors import InvalidArgument, MissingExtra, Unsupported
from heedful._result import Result
from heedful.bridges.structure import Layers, select
from heedful.kernels import Kernel, Softmax
from heedful.nn import KernelParameters
from heedful.ops import IMPLEMENTATIONS

__all__ = ["Placement", "restore", "use", "used"]

Model = TypeVar("Model", bound=nn.Module)

# Two names: models that support SDPA may leave a plain causal mask out and say `is_causal`; the others always build it.
NAME, COMPLETE = "heedful", "heedful_complete"

# Arguments of attention functions that change what is computed, and that a kernel has no place for.
FOREIGN = ("softcap", "s_aux", "sinks", "indices", "block_indices", "block_table", "cache", "head_mask")


@dataclass(frozen=True, repr=False)
class Placement(Result, Generic[Model]):
    """What `use` did: a kernel in a model, the attention it changed and the attention it left.

    Calls and attributes go on to the model. As a context manager it gives the model and restores it at the end.

    Attributes:
        model: the model, changed in place.
        kernel: the kernel as it was given.
        changed: names of the modules that attend with it.
        left: names of all other attention in the model: softmax as before, or of another kind, as linear attention.
    """

    model: Model
    kernel: Kernel
    changed: tuple[str, ...]
    left: tuple[str, ...]

    _not = ("model",)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Without a model yet, as while it is unpickled, and for Python's own protocols there is nothing to go on to.
        if name.startswith("__") or "model" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.model, name)

    def __enter__(self) -> Model:
        return self.model

    def __exit__(self, *error: object) -> None:
        restore(self.model)

    def __repr__(self) -> str:
        count = f"{len(self.changed)} of {len(self.changed) + len(self.left)} attention modules"
        return f"Placement({self.kernel!r} in {type(self.model).__name__}: {count})"

    def __str__(self) -> str:
        left = f"\nleft:    {', '.join(self.left)}" if self.left else ""
        return f"{self!r}\nchanged: {', '.join(self.changed)}{left}"


def use(
    model: Model, kernel: Kernel | None = None, *, impl: str = "auto", layers: Layers | None = None
) -> Placement[Model]:
    r"""Puts a kernel into a Hugging Face model: its attention becomes $y_i = \sum_j \kappa(q_i, k_j)\, v_j$.

    Args:
        model: a `PreTrainedModel` whose attention goes through the attention interface; changed in place.
        kernel: `Softmax()` by default. A `scale` it leaves open is the model's own scaling. Its tensors become parameters
            (those that require grad) or buffers of `model.heedful_kernel`, so they are trained and moved with it. To keep a
            trained kernel, save it beside the model: `used(model).save_pretrained(folder)`.
        impl: as in `attend`.
        layers: the layers to change; the others keep softmax attention. A number is that of a layer of the text model where
            there is one beside others (a vision tower's layers have numbers too), and of encoder and decoder alike where one
            config describes both; it is the first number in a module's name. A string is a pattern (`fnmatch`) of a module's name or
            of one it lies in: `"vision_model.*"`, `"decoder.layers.3"`. An entry that would change nothing is refused.

    Returns:
        A `Placement` with the names of the modules that were `changed` and of the attention that was `left`; it can be called
        like the model. `restore` undoes the call, as does leaving `with use(...) as model:`; a second `use` replaces the first.

    `output_attentions=True` returns the coefficients that combine the values (before dropout), at the price of writing
    them out. A query that may attend to nothing, as a padded one, gives zeros where eager attention gives a mean.

    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from heedful import Gaussian
    >>> config = BertConfig(vocab_size=31, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=17)
    >>> model = BertModel(config)
    >>> use(model, Gaussian(torch.nn.Parameter(torch.ones(3))), layers="encoder.layer.0").changed
    ('encoder.layer.0.attention.self',)
    >>> [name for name, _ in model.named_parameters() if "heedful" in name]
    ['heedful_kernel.bandwidth']
    >>> model(torch.tensor([[5, 7, 11]])).last_hidden_state.shape
    torch.Size([1, 3, 12])
    """
    try:
        from transformers import PreTrainedModel
    except ImportError:
        raise MissingExtra("transformers", "hf") from None
    kernel = Softmax() if kernel is None else kernel
    model = bare(model)
    if not isinstance(model, PreTrainedModel):
        raise InvalidArgument(f"use: model must be a transformers PreTrainedModel; got {type(model).__name__}")
    if not isinstance(kernel, Kernel):
        raise InvalidArgument(f"use: kernel must be a heedful kernel such as Softmax(); got {kernel!r:.100}")
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        raise InvalidArgument(f"use: impl must be 'auto' or one of {', '.join(IMPLEMENTATIONS)}; got {impl!r}")
    changed, left = select(model, layers)
    held = _Held(kernel, impl)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    own = {id(config) for part in _holding(model) for config, _ in part.heedful_kernel.formerly}
    configs = list(_configs(parts))
    for config in configs:
        if config._attn_implementation_internal in (NAME, COMPLETE) and id(config) not in own:
            raise Unsupported(
                f"the {type(config).__name__} of this {type(model).__name__} belongs to a model that uses a heedful kernel "
                "already; restore that model first, or give this one a copy of the config"
            )
    restore(model)
    _register()
    held.formerly = [(config, config._attn_implementation_internal) for config in configs]
    for config in configs:
        config._attn_implementation_internal = NAME if all(part._supports_sdpa for part in parts) else COMPLETE
    for module in changed.values():
        # Not as an attribute: torch would list the kernel's parameters once per layer.
        module.__dict__["_heedful"] = held
    model.heedful_kernel = held
    return Placement(model, kernel, tuple(changed), tuple(left))


def restore(model: Model | Placement[Model]) -> Model:
    """Undoes `use`: every config and module as it was before, whatever number of times `use` was called.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(vocab_size=31, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=17)
    >>> model = BertModel(config)
    >>> before = model.config._attn_implementation
    >>> restore(use(model)).config._attn_implementation == before
    True
    """
    model = bare(model)
    for part in _holding(model):
        held = part.heedful_kernel
        for config, implementation in held.formerly:
            config._attn_implementation_internal = implementation
        for module in part.modules():
            if module.__dict__.get("_heedful") is held:
                del module.__dict__["_heedful"]
        del part.heedful_kernel
    return model


def used(model: nn.Module | Placement[Any]) -> Kernel | None:
    """The kernel this model attends with, its tensors as training has left them; None where `use` was not called on it.

    >>> from transformers import BertConfig, BertModel
    >>> from heedful import Sigmoid
    >>> config = BertConfig(vocab_size=31, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=17)
    >>> used(use(BertModel(config), Sigmoid(bias=-1.0)))
    Sigmoid(bias=-1.0)
    """
    held = getattr(bare(model), "heedful_kernel", None)
    if not isinstance(held, _Held):
        return None
    # set_attn_implementation called after `use` takes the kernel out of use.
    acts = all(config._attn_implementation_internal in (NAME, COMPLETE) for config, _ in held.formerly)
    return held.kernel if acts else None


class _Held(KernelParameters):
    """The kernel of a model, and what `restore` needs."""

    def __init__(self, kernel: Kernel, impl: str) -> None:
        super().__init__(kernel)
        self.impl = impl
        self.formerly: list[tuple[Any, str | None]] = []
        self.open_scales = list(_open_scales(kernel))

    def at(self, device: torch.device, scaling: float | None) -> Kernel:
        """The kernel with its tensors on this device, and the module's scaling where its own is open."""
        parameters: dict[str, Any] = {name: getattr(self, kept).to(device) for name, kept in self._names.items()}
        if scaling is not None:
            parameters |= dict.fromkeys(self.open_scales, scaling)
        return self._form.with_tensors(parameters)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, impl={self.impl!r}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A model unpickled in another process looks its attention up by name.
        _register()


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    AttentionInterface.register(COMPLETE, _attention_complete)
    AttentionMaskInterface.register(COMPLETE, _complete_mask)


def _attention(
    module: nn.Module,
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, G, K, D]
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers: `[B, Q, H, E]`, and the coefficients where they are asked for."""
    _refuse_foreign(module, attention_mask, kwargs)
    kernel = kernel_of(module, query.device, scaling)
    held = module.__dict__.get("_heedful")
    impl = "auto" if held is None else held.impl
    # As for SDPA: without a mask a module says itself whether it is causal, and a single query is the last one.
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[-2] > 1
    mask = masks.join_transformers(attention_mask, position_bias)
    rate = dropout if module.training else 0.0
    output = attend(query, key, value, mask, rate, causal, enable_gqa=True, kernel=kernel, impl=impl)
    weights = None
    if _asks_for_weights(module, kwargs):
        weights = attend.coefficients(query, key, mask, causal, enable_gqa=True, kernel=kernel)
    return output.transpose(1, 2).contiguous(), weights


def kernel_of(module: nn.Module, device: torch.device, scaling: float | None) -> Kernel:
    """The kernel that a module of a model in `use` attends with."""
    held = module.__dict__.get("_heedful")
    return Softmax(scale=scaling) if held is None else held.at(device, scaling)


def _attention_complete(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """For models written for eager attention, where no mask means that every query sees every key."""
    return _attention(*args, **{**kwargs, "is_causal": False})


def _complete_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    from transformers.masking_utils import sdpa_mask

    return cast("Tensor | None", sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False}))


def _refuse_foreign(module: nn.Module, mask: Tensor | None, options: dict[str, Any]) -> None:
    named = [name for name in FOREIGN if options.get(name) is not None]
    packed = options.get("cu_seq_lens_q")
    if mask is None and packed is not None and packed.numel() > 2:
        # Only flash attention reads these; elsewhere packed sequences show in the mask, made from position_ids.
        named.append("cu_seq_lens_q")
    if named:
        raise Unsupported(
            f"{type(module).__name__} passes {', '.join(named)} to its attention, which heedful's attend cannot honour; "
            "call heedful.bridges.transformers.restore(model), or use a model without it"
        )


def _asks_for_weights(module: nn.Module, options: dict[str, Any]) -> bool:
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        collected = None
    else:
        collected = _active_collector.get()
    flag = options.get("output_attentions")
    if flag is None and collected is None:
        return bool(getattr(getattr(module, "config", None), "output_attentions", False))
    return bool(flag) or any("attentions" in key for key in collected or ())


def bare(model: Model | Placement[Model]) -> Model:
    """The model itself, also where the result of `use` is given."""
    return model.model if isinstance(model, Placement) else model


def _holding(model: nn.Module) -> list[Any]:
    """The parts of a model that hold a kernel, inner ones first."""
    return [part for part in reversed(list(model.modules())) if isinstance(part._modules.get("heedful_kernel"), _Held)]


def _configs(parts: Sequence[Any]) -> Iterator[Any]:
    """Every config that these models read, each once."""
    seen: set[int] = set()
    waiting = [module.config for part in parts for module in part.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop()
        if id(config) not in seen and hasattr(config, "_attn_implementation_internal"):
            seen.add(id(config))
            waiting += [getattr(config, name, None) for name in config.sub_configs]
            yield config


def _open_scales(kernel: Kernel) -> Iterator[str]:
    """The dotted names of scales that are left to the caller."""
    for field in fields(kernel):  # type: ignore[arg-type]
        value = getattr(kernel, field.name)
        if isinstance(value, Kernel):
            yield from (f"{field.name}.{inner}" for inner in _open_scales(value))
        elif field.name == "scale" and value is None:
            yield field.name

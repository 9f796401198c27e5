"""What every layer shares: it saves and loads itself, and its kernel's tensors are its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from heedful import masks
from heedful._errors import CorruptModel, HeedfulError, InvalidArgument
from heedful._pretrained import Register, read_folder, write_folder
from heedful.kernels import Kernel, Softmax
from heedful.masks import Mask
from heedful.nn._describe import Primal
from heedful.ops import IMPLEMENTATIONS

_PLACE = ("self", "device", "dtype")


class Module(nn.Module):
    """A torch module whose constructor arguments are its attributes, so that it can be written down and made again."""

    _register: ClassVar[Register[Module]] = Register()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for known in Module._register.named(cls.__name__):
            if known.__module__.startswith("heedful.") and known.__module__ != cls.__module__:
                raise InvalidArgument(f"a layer {cls.__name__} exists in {known.__module__}; give yours another name")
        Module._register.add(cls)

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments as they are now, without device and dtype."""
        names = [name for name in inspect.signature(type(self).__init__).parameters if name not in _PLACE]
        missing = [name for name in names if not hasattr(self, name)]
        if missing:
            raise InvalidArgument(
                f"{type(self).__name__} keeps no attribute for its argument {missing[0]!r}; a layer that saves itself keeps "
                "every argument of its constructor under its name"
            )
        return {name: getattr(self, name) for name in names}

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes `config.json` (class and arguments) and `model.safetensors` (parameters and buffers) into a folder."""
        arguments = {name: to_plain(value) for name, value in self.arguments().items()}
        entry = Register.entry(type(self))
        write_folder(folder, {"module": {**entry, "arguments": arguments}}, self.state_dict())

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, device: torch.device | str | None = None) -> Self:
        """Makes the layer that `save_pretrained` wrote, in eval mode and in the dtype it was saved with."""
        config, tensors = read_folder(folder, expects="module")
        try:
            kind, arguments = config["module"]["type"], config["module"]["arguments"]
            if not isinstance(kind, str) or not isinstance(arguments, dict):
                raise TypeError
        except (TypeError, KeyError):
            raise CorruptModel(f"{folder}: config.json has no type and arguments of a module; save it again") from None
        made_by = Module._register.find(config["module"], cls)
        if made_by is None:
            raise CorruptModel(
                f"{folder}: unknown layer {kind!r}; known: {', '.join(Module._register.names())}. "
                "A layer of your own must be defined (imported) before it is loaded"
            )
        if not issubclass(made_by, cls):
            raise InvalidArgument(f"{folder} holds a {kind}, not a {cls.__name__}; call {kind}.from_pretrained")
        try:
            module = made_by(**{name: from_plain(value) for name, value in arguments.items()})
            module.load_state_dict(tensors, assign=True)
        except (HeedfulError, TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
            raise CorruptModel(f"{folder}: {kind} cannot be made from what was saved: {error}") from error
        module = module.to(device) if device is not None else module
        return module.eval()


class KernelParameters(nn.Module):
    """A kernel inside a module: tensors that require gradients become parameters, other tensors buffers."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._names = {name: name.replace(".", "_") for name in kernel.tensors()}
        for name, tensor in kernel.tensors().items():
            if not tensor.is_leaf:
                raise InvalidArgument(
                    f"the kernel's {name} is computed from other tensors, whose graph lasts one backward; "
                    "give a torch.nn.Parameter or a tensor of its own"
                )
            if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
                kept = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
                self.register_parameter(self._names[name], kept)
            else:
                self.register_buffer(self._names[name], tensor)
        self._form = kernel.with_tensors({name: t.detach().to("meta") for name, t in kernel.tensors().items()})

    @property
    def kernel(self) -> Kernel:
        """The kernel with its tensors as they are now."""
        return self._form.with_tensors({name: getattr(self, kept) for name, kept in self._names.items()})

    def extra_repr(self) -> str:
        return repr(self.kernel)


class KernelModule(Module):
    """A module with one kernel, found again as `module.kernel` with the tensors it has learned."""

    def __init__(self, kernel: Kernel | None, num_heads: int, dropout: float, impl: str, device: Any) -> None:
        super().__init__()
        if kernel is not None and not isinstance(kernel, Kernel):
            raise InvalidArgument(f"kernel must be a heedful kernel such as Softmax(); got {kernel!r:.100}")
        kernel = Softmax() if kernel is None else kernel
        for name, tensor in kernel.of_pairs.tensors().items():
            if tensor.dim() and tensor.shape[0] not in (1, num_heads):
                raise InvalidArgument(
                    f"the kernel's {name} has {tensor.shape[0]} entries; expected 1 or num_heads = {num_heads}"
                )
        check_dropout(dropout)
        if impl != "auto" and impl not in IMPLEMENTATIONS:
            raise InvalidArgument(f"impl must be 'auto' or one of {', '.join(IMPLEMENTATIONS)}; got {impl!r}")
        self.dropout, self.impl = dropout, impl
        self.kernel_parameters = KernelParameters(kernel).to(device)

    @property
    def kernel(self) -> Kernel:
        return self.kernel_parameters.kernel


def learned(*shape: int, device: Any, dtype: Any) -> nn.Parameter:
    """A parameter whose rows start with unit expected norm of their images: N(0, 1 / last axis)."""
    made = torch.randn(*shape, device=device, dtype=dtype) * shape[-1] ** -0.5
    return nn.Parameter(made)


def check_positive(**sizes: int | None) -> None:
    """Refuses a size that is given and is no positive integer."""
    for name, value in sizes.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidArgument(f"{name} must be a positive integer; got {value!r}")


def check_dropout(dropout: float) -> None:
    if not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
        raise InvalidArgument(f"dropout must lie in [0, 1); got {dropout!r}")


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int | None = None) -> None:
    check_positive(embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if embed_dim % num_heads:
        raise InvalidArgument(
            f"embed_dim must be a multiple of num_heads; got embed_dim={embed_dim}, num_heads={num_heads}"
        )
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise InvalidArgument(
            f"num_heads must be a multiple of num_kv_heads; got num_heads={num_heads}, num_kv_heads={num_kv_heads}"
        )


def check_input(name: str, x: Tensor, width: int) -> None:
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != width:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InvalidArgument(f"{name} must have shape (batch, seq, {width}); got {got}")


def layer_mask(
    batch: int,
    num_heads: int,
    queries: int,
    keys: int,
    attn_mask: Mask | Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
) -> Mask | None:
    """The masks of a layer's forward (True = ignore), their shapes checked, as one."""
    if key_padding_mask is not None:
        if not isinstance(key_padding_mask, Tensor):
            raise InvalidArgument(
                f"key_padding_mask must be a tensor (True = ignore); got {type(key_padding_mask).__name__}"
            )
        if key_padding_mask.shape != (batch, keys):
            raise InvalidArgument(
                f"got key_padding_mask of shape {tuple(key_padding_mask.shape)}, expected (batch, keys) = {(batch, keys)}"
            )
    if isinstance(attn_mask, Tensor):
        wanted = [(queries, keys), (batch * num_heads, queries, keys)]
        if tuple(attn_mask.shape) not in wanted:
            raise InvalidArgument(
                f"got attn_mask of shape {tuple(attn_mask.shape)}, expected (queries, keys) = {wanted[0]} "
                f"or (batch * heads, queries, keys) = {wanted[1]}"
            )
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise InvalidArgument(f"attn_mask must be boolean (True = ignore) or floating; got {attn_mask.dtype}")
    return masks.from_multihead(attn_mask, key_padding_mask, is_causal, num_heads=num_heads)


def to_plain(value: Any) -> Any:
    """An argument as JSON holds it."""
    if isinstance(value, Kernel):
        return {"kernel": value.to_dict()}
    if isinstance(value, Primal):
        return {"primal": value.to_dict()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_plain(part) for part in value]
    return value


def from_plain(value: Any) -> Any:
    """The argument that `to_plain` wrote."""
    if isinstance(value, dict) and "kernel" in value:
        return Kernel.from_dict(value["kernel"])
    if isinstance(value, dict) and "primal" in value:
        return Primal.from_dict(value["primal"])
    if isinstance(value, list):
        return [from_plain(part) for part in value]
    return value

"""What every layer shares: it saves and loads itself, and its kernel's tensors are its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from heedful import masks
from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful._savable import Savable, coded, decode, encode, entry_of, find
from heedful.kernels import Kernel, PerHead, as_kernel
from heedful.masks import Mask
from heedful.ops import IMPLEMENTATIONS

_PLACE = ("self", "device", "dtype")


@coded("layer")
class Module(Savable, nn.Module):
    """A torch module whose constructor arguments are its attributes, so that it can be written down and made again."""

    _kind = "module"
    _needs = ("arguments",)

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

    def _described(self) -> dict[str, Any]:
        return {**entry_of(type(self)), "arguments": {name: encode(value) for name, value in self.arguments().items()}}

    def to_dict(self) -> dict[str, Any]:
        """What the layer is, JSON-ready, without its tensors: how it is written down as an argument of another layer."""
        return self._described()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """A new layer of the kind that `to_dict` describes."""
        home = find(cls._kind, data) if isinstance(data, dict) and isinstance(data.get("type"), str) else None
        if home is None or not issubclass(home, cls) or not isinstance(data.get("arguments"), dict):
            raise InvalidArgument(f"a layer's description has its type and arguments; got {data!r:.200}")
        return home(**{name: decode(value) for name, value in data["arguments"].items()})

    def _tensors_saved(self) -> dict[str, Tensor]:
        return self.state_dict()

    @classmethod
    def _remade(cls, description: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        with torch.random.fork_rng([]):  # first weights are drawn, and replaced
            module = cls.from_dict(description)
        module.load_state_dict(tensors, assign=True)
        return module.eval()

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, device: torch.device | str | None = None) -> Self:
        """Makes the layer that `save_pretrained` wrote, in eval mode and in the dtype it was saved with."""
        module = super().from_pretrained(folder)
        return module if device is None else module.to(device)


class Coefficients(NamedTuple):
    """A on the tokens, `[B, heads, n, n]`, and B on the knowledge, `[B, heads, n, k]` (None where it is not read)."""

    x: Tensor
    z: Tensor | None


Activation = Literal["gelu", "relu", "silu", "tanh", "sigmoid", "identity"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": torch.clone,
}


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


def kernel_parameters(kernel: Kernel | Sequence[Kernel] | None, num_heads: int) -> KernelParameters:
    """A kernel, or a list with one for each head, checked for so many heads; `Softmax()` by default."""
    kernel = as_kernel(kernel)
    if isinstance(kernel, PerHead) and len(kernel.kernels) != num_heads:
        raise InvalidArgument(f"got {len(kernel.kernels)} kernels for num_heads = {num_heads}: give one for each head")
    for name, tensor in kernel.of_pairs.tensors().items():
        if tensor.dim() and tensor.shape[0] not in (1, num_heads):
            raise InvalidArgument(
                f"the kernel's {name} has {tensor.shape[0]} entries; expected 1 or num_heads = {num_heads}"
            )
    return KernelParameters(kernel)


class KernelModule(Module):
    """A module with one kernel, found again as `module.kernel` with the tensors it has learned."""

    def __init__(
        self, kernel: Kernel | Sequence[Kernel] | None, num_heads: int, dropout: float, impl: str, device: Any
    ) -> None:
        super().__init__()
        check_number(least=0, high=1, dropout=dropout)
        check_choice(("auto", *IMPLEMENTATIONS), impl=impl)
        self.dropout, self.impl = dropout, impl
        self.kernel_parameters = kernel_parameters(kernel, num_heads).to(device)

    @property
    def kernel(self) -> Kernel:
        return self.kernel_parameters.kernel


def learned(*shape: int, device: Any, dtype: Any) -> nn.Parameter:
    """A parameter whose rows start with unit expected norm of their images: N(0, 1 / last axis)."""
    return nn.Parameter(torch.randn(*shape, device=device, dtype=dtype) * max(1, shape[-1]) ** -0.5)


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int | None = None) -> None:
    check_whole(embed_dim=embed_dim, num_heads=num_heads)
    check_whole(optional=True, num_kv_heads=num_kv_heads)
    if embed_dim % num_heads:
        raise InvalidArgument(
            f"embed_dim must be a multiple of num_heads; got embed_dim={embed_dim}, num_heads={num_heads}"
        )
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise InvalidArgument(
            f"num_heads must be a multiple of num_kv_heads; got num_heads={num_heads}, num_kv_heads={num_kv_heads}"
        )


def check_knowledge(z: Tensor | None, x: Tensor, count: int | None = None, heads: int | None = None) -> Tensor:
    """Knowledge `(k, d)`, `(B, k, d)` or `(B, heads, k, d)` for tokens x `(B, n, d)`, checked; k = `count` where it is known."""
    batch, width, k = x.shape[0], x.shape[-1], "k" if count is None else count
    axes = (2, 3) if heads is None else (2, 3, 4)
    if (
        not isinstance(z, Tensor)
        or z.dim() not in axes
        or z.shape[-1] != width
        or (count is not None and z.shape[-2] != count)
        or (z.dim() > 2 and z.shape[0] not in (1, batch))
        or (z.dim() == 4 and z.shape[1] not in (1, heads))
    ):
        got = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
        each = "" if heads is None else f", or for each head ({batch}, {heads}, {k}, {width})"
        raise InvalidArgument(f"z must have shape ({k}, {width}) or ({batch}, {k}, {width}){each}; got {got}")
    if z.dtype != x.dtype:
        raise InvalidArgument(f"z must have the dtype of x, {x.dtype}; got {z.dtype}")
    return z


def check_padding(padding: Tensor | None, batch: int, k: int) -> None:
    """`z_padding_mask` `(B, k)`; True = ignore."""
    if padding is None:
        return
    if not isinstance(padding, Tensor) or padding.dtype != torch.bool:
        got = getattr(padding, "dtype", type(padding).__name__)
        raise InvalidArgument(f"z_padding_mask must be boolean (True = ignore); got {got}")
    if padding.shape != (batch, k):
        raise InvalidArgument(f"got z_padding_mask of shape {tuple(padding.shape)}, expected (batch, k) = {(batch, k)}")


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

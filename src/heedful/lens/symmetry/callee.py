"""Calling anything: functions of torch tensors or numpy arrays, and modules with their parameters moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from inspect import Parameter, signature
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heedful._errors import HeedfulError, InvalidArgument
from heedful.lens.symmetry.moves import ROLES, Move, Role, Turn

Function = Callable[..., Any]
Roles = Mapping[str, str]


class Callee:
    """f behind one face: float64 `[n, d]` (and `[k, d]`) in, float64 out.

    A module gets a batch axis of one, unless it or a part of it has `batch_first=False`; a plain function gets none;
    `batched` overrules. A function that cannot take tensors gets numpy arrays. Of a tuple the first entry counts.
    """

    def __init__(
        self,
        f: Function,
        *,
        roles: Roles | None = None,
        batched: bool | None = None,
        dtype: torch.dtype | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(f):
            raise InvalidArgument(f"f must be a function or a module; got {type(f).__name__}")
        self.f = f
        self.module = f if isinstance(f, nn.Module) else None
        self.name = getattr(f, "__name__", type(f).__name__)
        self.arguments = dict(arguments or {})
        wants = self.module is not None and all(getattr(m, "batch_first", True) for m in self.module.modules())
        self.batched = wants if batched is None else batched
        tensors = [] if self.module is None else [*self.module.parameters(), *self.module.buffers()]
        floating = [t for t in tensors if t.is_floating_point()]
        self.dtype = dtype or (floating[0].dtype if floating else torch.float64)
        self.device = tensors[0].device if tensors else torch.device("cpu")
        named = [] if self.module is None else self.module.named_parameters(remove_duplicate=False)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in named}
        self.roles = self._checked(roles or {})
        self._numpy = False
        self._probed = False
        self._thrice = False
        if self.module is not None:
            names = list(signature(self.module.forward).parameters)
            self._thrice = names[:3] == ["query", "key", "value"]
            # Buffers may be written to; the module's own must stay as they are.
            self._buffers = {name: b.detach().clone() for name, b in self.module.named_buffers()}

    def _checked(self, roles: Roles) -> dict[str, Role]:
        """Parameter name -> role, from names or patterns."""
        if roles and self.module is None:
            raise InvalidArgument("roles are of the parameters of a module; a function has none, pass them to it as z")
        names = list(self.shapes)
        valid: dict[str, Role] = {}
        for pattern, role in roles.items():
            if role not in ROLES:
                raise InvalidArgument(f"the role of {pattern} must be one of {', '.join(ROLES)}; got {role!r}")
            matched = [name for name in names if fnmatchcase(name, pattern)]
            if not matched:
                raise InvalidArgument(f"roles name {pattern!r}, but {self.name} has {', '.join(names) or 'none'}")
            valid |= dict.fromkeys(matched, role)
        return valid

    def check_width(self, d: int) -> None:
        """Refuses roles whose parameters are not d wide where they should be."""
        for name, role in self.roles.items():
            shape = self.shapes[name]
            last = role in ("rows", "both", "bias") and shape[-1:] != (d,)
            before = role in ("cols", "both") and shape[-2:-1] != (d,)
            if last or before:
                raise InvalidArgument(f"{name} of shape {shape} cannot have the role {role!r} for d = {d}")

    def __call__(self, x: Tensor, z: Tensor | None = None, moves: tuple[Move, ...] = ()) -> Tensor:
        """f(x, z), with the parameters moved by each of `moves` in turn."""
        try:
            return self._call(x, z, moves)
        except HeedfulError:
            raise
        except (Exception, SystemExit) as error:
            message = "; ".join([str(error), *getattr(error, "__notes__", ())])
            shapes = f"x of shape {tuple(x.shape)}" + ("" if z is None else f" and z of shape {tuple(z.shape)}")
            raise InvalidArgument(
                f"{self.name} raised {type(error).__name__} for {shapes}{' and a batch axis' * self.batched}: "
                f"{' '.join(message.split())[:300]}. Try batched={not self.batched}, or another n or d, or sampler=..."
            ) from error

    def _call(self, x: Tensor, z: Tensor | None, moves: tuple[Move, ...]) -> Tensor:
        vectors = [x] if z is None else [x, z]
        tensors = [t.to(self.device, self.dtype, copy=True) for t in vectors]
        tensors = [t[None] for t in tensors] if self.batched else tensors
        if self.module is not None:
            inputs = (tensors[0], tensors[-1], tensors[-1]) if self._thrice else tuple(tensors)
            named = self.arguments
            if z is not None and _by_name(self.module):
                inputs, named = inputs[:1], {**named, "z": inputs[1]}
            out = torch.func.functional_call(self.module, self._state(moves), inputs, named)
        elif self._numpy:
            out = self.f(*(t.numpy() for t in tensors), **self.arguments)
        else:
            try:
                out = self.f(*tensors, **self.arguments)
            except Exception as error:
                if self._probed:
                    raise
                try:
                    out = self.f(*(t.to("cpu", copy=True).numpy() for t in tensors), **self.arguments)
                except Exception as other:
                    # It takes neither; which of the two it was made for is not known, and tensors come first.
                    error.add_note(f"with numpy arrays {type(other).__name__}: {other}")
                    raise error from None
                self._numpy = True
        self._probed = True
        tensor = self._tensor(out)
        return tensor[0] if self.batched and tensor.shape[:1] == (1,) else tensor

    def _state(self, moves: tuple[Move, ...]) -> dict[str, Tensor]:
        assert self.module is not None
        state: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            value = parameter.detach()
            role = self.roles.get(name, "fixed")
            if role != "fixed" and moves:
                value = value.to("cpu", torch.float64)
                for move in moves:
                    assert isinstance(move, Turn)
                    value = move.parameter(value, role)
            state[name] = value.to(self.device, self.dtype) if value.is_floating_point() else value
        for name, buffer in self._buffers.items():
            state[name] = buffer.to(self.dtype) if buffer.is_floating_point() else buffer
        return state

    def _tensor(self, out: Any) -> Tensor:
        if isinstance(out, Mapping):
            out = next(iter(out.values()), None)
        while isinstance(out, tuple | list) and out:
            out = out[0]
        if not isinstance(out, Tensor):
            if not isinstance(out, Real) and not hasattr(out, "__array__"):
                raise InvalidArgument(
                    f"{self.name} must return a tensor, an array or a number; got {type(out).__name__}"
                )
            out = torch.from_numpy(np.array(out))
        if out.is_complex():
            raise InvalidArgument(f"{self.name} returns complex numbers; return real ones, as in torch.view_as_real")
        return out.detach().to("cpu", torch.float64)


def _by_name(module: nn.Module) -> bool:
    """Whether knowledge is given to a module as `z=` alone, as to our encoders."""
    known = signature(module.forward).parameters.get("z")
    return known is not None and known.kind is Parameter.KEYWORD_ONLY

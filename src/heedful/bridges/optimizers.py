"""Optimizers that torch has not: LAMB, Lookahead around any other, and Muon with AdamW for what is no matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument, Unsupported

__all__ = ["Lamb", "Lookahead", "MuonAdamW", "check_optimizer", "new_optimizer"]

Slow = Literal["initial", "first-sync"]


class _ByGroup(Optimizer):
    """An optimizer that moves one group of parameters after the other."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; `closure`, where given, computes the gradients and the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._move_group(group)
        return loss

    def _move_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lamb(_ByGroup):
    r"""LAMB (You et al. 2020, algorithm 2): Adam whose step in each tensor is as long as the tensor itself, times `lr`.

    $$m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad v \leftarrow \beta_2 v + (1 - \beta_2) g^2, \quad
    u = \frac{m}{\sqrt v + \epsilon} + \lambda p, \quad p \leftarrow p - \eta \frac{\min(|p|, c)}{|u|} u$$

    with $\eta$ `lr`, $\lambda$ `weight_decay` and c `max_norm`; the ratio of norms is 1 where either is 0. As in the code of
    Kossen et al. (2021), and unlike the paper's algorithm, m and v are not corrected for their start at 0: the ratio takes most of it away.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = Lamb([weight], lr=0.1)
    >>> weight.square().sum().backward()
    >>> optimizer.step()
    >>> [round(x, 3) for x in weight.tolist()]  # a step of length 0.1 x 5
    [2.646, 3.646]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        max_norm: float = 10.0,
    ) -> None:
        check_number(least=0, lr=lr, weight_decay=weight_decay)
        check_number(0, eps=eps, max_norm=max_norm)
        first, second = betas
        check_number(least=0, high=1, first_beta=first, second_beta=second)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "max_norm": max_norm}
        super().__init__(params, defaults)

    def _move_group(self, group: dict[str, Any]) -> None:
        for weight in group["params"]:
            if weight.grad is not None:
                self._move(weight, group)

    def _move(self, weight: Tensor, group: dict[str, Any]) -> None:
        gradient, state = weight.grad, self.state[weight]
        assert gradient is not None
        if gradient.is_sparse:
            raise Unsupported("Lamb takes no sparse gradients; torch.optim.SparseAdam does")
        if not state:
            state["mean"], state["square"] = torch.zeros_like(weight), torch.zeros_like(weight)
        first, second = group["betas"]
        mean = state["mean"].mul_(first).add_(gradient, alpha=1 - first)
        square = state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        update = mean / square.sqrt().add_(group["eps"])
        if group["weight_decay"]:
            update.add_(weight, alpha=group["weight_decay"])
        length, wanted = update.norm(), weight.norm().clamp_(max=group["max_norm"])
        # Compared on the device: a look at the numbers would wait for it, once for each tensor.
        ratio = torch.where((length > 0) & (wanted > 0), wanted / length, 1.0)
        weight.add_(update.mul_(ratio), alpha=-group["lr"])


class Lookahead(Optimizer):
    r"""Lookahead (Zhang et al. 2019, algorithm 1): every `every` steps of another optimizer its weights go back part of the way.

    $$\phi \leftarrow \phi + \alpha (\theta - \phi), \quad \theta \leftarrow \phi$$

    Args:
        optimizer: moves the weights $\theta$; its groups of parameters are shared, so that schedules act on it.
        slow: where $\phi$ starts: at the weights before the first step (`"initial"`, the paper), or at those of the first
            synchronisation, which is then none (`"first-sync"`, the code of Kossen et al. 2021).

    The weights between synchronisations are those of `optimizer`, also where they are measured. `state_dict` holds both.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = Lookahead(torch.optim.SGD([weight], lr=1.0), alpha=0.5, every=2)
    >>> for _ in range(2):
    ...     weight.grad = torch.ones(1)
    ...     optimizer.step()
    >>> weight.item()
    -1.0
    """

    def __init__(self, optimizer: Optimizer, alpha: float = 0.5, every: int = 6, slow: Slow = "initial") -> None:
        if not isinstance(optimizer, Optimizer):
            raise InvalidArgument(
                f"optimizer must be one of torch's, as Lamb(parameters); got {type(optimizer).__name__}"
            )
        check_number(0, most=1, alpha=alpha)
        check_whole(every=every)
        check_choice(Slow, slow=slow)
        self.optimizer, self.alpha, self.every, self.slow, self.count = optimizer, alpha, every, slow, 0
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters to both; those of the other optimizer are added at the start."""
        if any(param_group is group for group in self.optimizer.param_groups):
            super().add_param_group(param_group)
        else:
            self.optimizer.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer, and the synchronisation where it is due."""
        if self.count == 0 and self.slow == "initial":
            self._keep()
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            self._synchronise()
        return loss

    @property
    def _weights(self) -> list[Tensor]:
        return [weight for group in self.param_groups for weight in group["params"]]

    def _keep(self) -> None:
        for weight in self._weights:
            self.state[weight]["slow"] = weight.detach().clone()

    @torch.no_grad()
    def _synchronise(self) -> None:
        for weight in self._weights:
            slow = self.state[weight].get("slow")
            if slow is None:
                self.state[weight]["slow"] = weight.detach().clone()
            else:
                weight.copy_(slow.lerp_(weight, self.alpha))

    def state_dict(self) -> dict[str, Any]:
        """The slow weights, the number of steps, and the state of the optimizer within as `"fast"`."""
        return {**super().state_dict(), "count": self.count, "fast": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave."""
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        self.optimizer.load_state_dict(state_dict["fast"])
        self.count, self.param_groups = state_dict["count"], self.optimizer.param_groups


class MuonAdamW(_ByGroup):
    r"""Muon (Jordan et al. 2024) for matrices with 64 rows and columns at least, AdamW for all else.

    $$b \leftarrow \mu b + (1 - \mu) g, \qquad p \leftarrow (1 - \eta \lambda) p - 0.2 \sqrt{\max(r, c)}\, \eta\, \mathrm{orth}(\mu b + (1 - \mu) g)$$

    for a matrix $p$ of r rows and c columns, with $\eta$ `lr`, $\lambda$ `weight_decay` and $\mu$ `momentum`; orth brings all singular values near 1 by five steps of
    Newton and Schulz in bfloat16, and the factor gives updates the size of AdamW's, so that one `lr` serves both. Matrices of one shape are moved together: torch's `Muon` takes each by itself, and takes no vectors.

    >>> import torch
    >>> network = torch.nn.Linear(96, 64)
    >>> optimizer = MuonAdamW(network.parameters(), lr=0.1)
    >>> network(torch.ones(5, 96)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        check_number(least=0, lr=lr, weight_decay=weight_decay)
        check_number(0, eps=eps)
        first, second = betas
        check_number(least=0, high=1, first_beta=first, second_beta=second, momentum=momentum)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, defaults)

    def _move_group(self, group: dict[str, Any]) -> None:
        shapes: dict[Any, list[Tensor]] = {}
        others = []
        for weight in group["params"]:
            if weight.grad is None:
                continue
            if weight.grad.is_sparse:
                raise Unsupported("MuonAdamW takes no sparse gradients; torch.optim.SparseAdam does")
            if weight.ndim == 2 and min(weight.shape) >= LEAST:
                shapes.setdefault((weight.shape, weight.dtype, weight.device), []).append(weight)
            else:
                others.append(weight)
        for weights in shapes.values():
            self._turn(weights, group)
        if others:
            self._walk(others, group)

    def _turn(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Matrices of one shape."""
        momentum, lr, shape = group["momentum"], group["lr"], weights[0].shape
        for weight in weights:
            self.state[weight].setdefault("momentum", torch.zeros_like(weight))
        means = [self.state[weight]["momentum"] for weight in weights]
        gradients = [_gradient(weight) for weight in weights]
        torch._foreach_lerp_(means, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, means, momentum)
        update = orthogonal(torch.stack(list(ahead))).to(weights[0].dtype)
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_add_(weights, list(update.unbind(0)), alpha=-0.2 * max(shape) ** 0.5 * lr)

    def _walk(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """AdamW."""
        first, second = group["betas"]
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["mean"], state["square"] = torch.zeros_like(weight), torch.zeros_like(weight)
                state["step"] = 0
            state["step"] += 1
        gradients = [_gradient(weight) for weight in weights]
        means, squares = ([self.state[weight][name] for weight in weights] for name in ("mean", "square"))
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        steps = [self.state[weight]["step"] for weight in weights]
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [(1 - second**step) ** 0.5 for step in steps])
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(weights, means, roots, [-group["lr"] / (1 - first**step) for step in steps])


LEAST = 64
"""Rows and columns that a matrix has at least to be turned as one."""


def orthogonal(x: Tensor) -> Tensor:
    """The nearest orthogonal matrices to `(n, rows, columns)`, roughly: singular values come to lie between 0.7 and 1.2; in bfloat16."""
    tall = x.shape[1] > x.shape[2]
    x = (x.mT if tall else x).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (2.0315 * square @ square - 4.775 * square) @ x
    return x.mT if tall else x


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _lookahead_lamb(parameters: Iterable[Any], **options: Any) -> Optimizer:
    return Lookahead(Lamb(parameters, **options))


OWN: dict[str, Callable[..., Optimizer]] = {"Lamb": Lamb, "LookaheadLamb": _lookahead_lamb, "MuonAdamW": MuonAdamW}


def check_optimizer(name: Any) -> Callable[..., Optimizer]:
    """The optimizer of this name: a class of `torch.optim`, `"Lamb"`, `"LookaheadLamb"` (Lookahead around Lamb, as published), or `"MuonAdamW"`."""
    if isinstance(name, str) and name in OWN:
        return OWN[name]
    kind = getattr(torch.optim, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or kind is Optimizer:
        raise InvalidArgument(
            f"optimizer must name a class of torch.optim, as 'RAdam' or 'AdamW', or be one of {', '.join(OWN)}; got {name!r}"
        )
    return kind


def new_optimizer(name: str, parameters: Iterable[Any], *, lr: float, weight_decay: float = 0.0) -> Optimizer:
    """An optimizer by its name.

    >>> import torch
    >>> new_optimizer("LookaheadLamb", torch.nn.Linear(2, 3).parameters(), lr=0.1).every
    6
    """
    return check_optimizer(name)(parameters, lr=lr, weight_decay=weight_decay)

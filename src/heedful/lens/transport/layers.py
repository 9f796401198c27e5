"""How the tokens of a finished model move from layer to layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from heedful._errors import InvalidArgument, Unsupported
from heedful._runtime import after_calls, before_calls, undisturbed
from heedful.bridges.structure import layers_of
from heedful.bridges.transformers import bare
from heedful.lens._inputs import read_inputs
from heedful.lens._record import Tokens
from heedful.lens.transport.result import LayerMove, LayerTransport
from heedful.transport import transport_metrics

Array = NDArray[np.float64]

# Tokens farther out than so many times the median are left out: one of them would be all of a sum of squares.
MASSIVE = 10.0

# Orders in which moves are exchanged between tokens.
ORDERS = 3


def between_layers(
    model: nn.Module, inputs: Any, *, tokenizer: Any = None, massive: float | None = MASSIVE
) -> LayerTransport:
    r"""Follows the tokens of a text through the layers of a model: how far they move, how straight, and whether any could swap places.

    The trajectory $x_i^{(0)}, \dots, x_i^{(L)}$ of token i is what the first layer reads and what each layer returns (the residual stream).
    Each layer is one move, with the metrics of `heedful.transport.transport_metrics` (p = 2); the way through all layers has a
    straightness, $\sum_i |x_i^{(L)} - x_i^{(0)}| / \sum_i \sum_l |x_i^{(l+1)} - x_i^{(l)}|$.

    Few points in many dimensions are matched with themselves by almost any move, so optimality near 1 says nothing alone. Beside it stand
    that of a random pairing of the same two clouds, and that of the same moves exchanged at random between the tokens, $x_i + \Delta_{\pi(i)}$:
    where this is 1 too, the moves are merely short against the distances between tokens.

    Args:
        model: any `torch.nn.Module` whose layers are elements of a `ModuleList` and hold attention: models of transformers, torch's and
            heedful's encoders. Of an encoder and a decoder, the layers that run first. It is evaluated, and left as it was.
        inputs: as for `lens.observe`: a text or a list of texts (with `tokenizer`), a mapping, a tuple, a tensor. Padding is left out;
            tokens of several texts are one cloud.
        tokenizer: of Hugging Face; reads texts and names tokens.
        massive: tokens whose norm is more than so many times the median of their layer's, in any layer, are left out (the massive activations
            of Sun et al. 2024, often those of the first token); None keeps all.

    >>> import torch
    >>> from heedful.lens.transport import between_layers
    >>> _ = torch.manual_seed(0)
    >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    >>> found = between_layers(model, torch.randn(1, 11, 16))
    >>> found
    LayerTransport(TransformerEncoder, 3 layers, 11 tokens of 16 features)
    >>> [move.matching for move in found.moves]
    [1.0, 1.0, 1.0]
    """
    model = bare(model)
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model must be a torch.nn.Module; got {type(model).__name__}")
    args, named, sides = read_inputs(model, inputs, tokenizer)
    names, states = _states(model, args, named)
    return measure_layers(type(model).__name__, names, states, sides.get("input"), massive)


def _states(model: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[list[str], list[Tensor]]:
    """The layers that ran, in order, and the tokens before the first and behind each, `(batch, tokens, features)`."""
    layers = layers_of(model)
    if not layers:
        raise Unsupported(f"{type(model).__name__} has no list of layers that hold attention")
    names_of = {module: name for name, module in layers}
    stack = ""
    names: list[str] = []
    states: list[Tensor] = []

    def entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal stack
        if not states:
            stack = names_of[module].rpartition(".")[0]
            states.append(_tokens((*args, *kwargs.values()), module))

    def left(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if names_of[module].rpartition(".")[0] == stack:
            names.append(names_of[module])
            states.append(_tokens(output, module))

    with undisturbed(model), before_calls(names_of, entered), after_calls(names_of, left):
        model(*args, **named)
    if not names:
        raise Unsupported(f"{type(model).__name__} ran none of its layers on this input")
    shapes = list(dict.fromkeys(tuple(state.shape) for state in states))
    if len(shapes) > 1:
        raise Unsupported(
            f"the tokens of {type(model).__name__} change their number or width between layers ({shapes[0]}, {shapes[1]}); points can be "
            "followed between places of one shape alone"
        )
    return names, states


def _tokens(passed: Any, module: nn.Module) -> Tensor:
    """The tokens among what a layer reads or returns."""
    parts = (
        passed.values() if isinstance(passed, Mapping) else passed if isinstance(passed, tuple | list) else (passed,)
    )
    for part in parts:
        if isinstance(part, Tensor) and part.is_floating_point() and part.dim() == 3:
            # A model may write in place.
            return part.detach().to("cpu", torch.float64, copy=True)
    raise Unsupported(f"a layer ({type(module).__name__}) passes on no tensor (batch, tokens, features)")


def measure_layers(
    model: str, names: list[str], states: list[Tensor], tokens: Tokens | None, massive: float | None = MASSIVE
) -> LayerTransport:
    """What the moves between these states `(batch, tokens, features)` are; padding and massive tokens left out."""
    batch, length, _ = states[0].shape
    known = tokens if tokens is not None and tokens.valid.shape == (batch, length) else Tokens.unnamed(batch, length)
    trajectory = torch.stack(states)  # [L + 1, B, n, d]
    if not trajectory.isfinite().all():
        raise Unsupported(f"{model} has hidden states that are not finite on this input")
    points = trajectory[:, known.valid].numpy()  # [L + 1, N, d]
    labels = [name for row, valid in zip(known.strings, known.valid, strict=True) for name, kept in zip(row, valid.tolist(), strict=True) if kept]  # fmt: skip
    out = np.zeros(points.shape[1], dtype=bool)
    if massive is not None:
        norms = np.linalg.norm(points, axis=-1)
        out = (norms > massive * np.median(norms, axis=1, keepdims=True)).any(0)
    if (~out).sum() < 3:
        raise Unsupported(f"transport compares tokens, and needs three of them or more; there are {int((~out).sum())}")
    points = points[:, ~out]
    moves = tuple(_move(name, points[at], points[at + 1]) for at, name in enumerate(names))
    steps = np.linalg.norm(np.diff(points, axis=0), axis=-1)  # [L, N]
    straight = np.linalg.norm(points - points[0], axis=-1)  # [L + 1, N]
    return LayerTransport(
        model=model,
        moves=moves,
        whole=_move("", points[0], points[-1]),
        straightness=_share(straight[-1].sum(), steps.sum()),
        right_angles=_share(np.sqrt(np.square(steps).sum(0)).sum(), steps.sum()),
        travelled=tuple(np.concatenate(([0.0], steps.mean(1).cumsum())).tolist()),
        distance=tuple(straight.mean(1).tolist()),
        tokens=tuple(label for label, gone in zip(labels, out, strict=True) if not gone),
        left_out=tuple(label for label, gone in zip(labels, out, strict=True) if gone),
        trajectory=points,
    )


def _move(name: str, before: Array, after: Array) -> LayerMove:
    found = transport_metrics(np.stack((before, after)))
    assert found.centred_optimality is not None
    assert found.centred_baseline is not None
    assert found.baseline is not None
    move = after - before
    squares = np.square(move).sum()
    exchanged = [transport_metrics(np.stack((before, before + move[order]))) for order in _orders(len(move))]
    return LayerMove(
        name=name,
        length=float(np.median(np.linalg.norm(move, axis=1) / np.maximum(np.linalg.norm(before, axis=1), 1e-300))),
        common=_share(len(move) * np.square(move.mean(0)).sum(), squares),
        optimality=found.optimality,
        centred_optimality=found.centred_optimality,
        baseline=found.baseline,
        centred_baseline=found.centred_baseline,
        exchanged=float(np.mean([one.centred_optimality for one in exchanged])),
        matching=found.matching,
        exchanged_matching=float(np.mean([one.matching for one in exchanged])),
    )


def _orders(count: int) -> list[NDArray[np.intp]]:
    rng = np.random.default_rng(0)
    return [rng.permutation(count) for _ in range(ORDERS)]


def _share(part: Any, whole: Any) -> float:
    return float(part / whole) if whole > 0 else 1.0

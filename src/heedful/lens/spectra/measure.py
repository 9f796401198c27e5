"""Singular values of matrices, layers and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from heedful._errors import HeedfulError, InvalidArgument, Unsupported
from heedful._runtime import after_calls
from heedful.kernels import Cosine, FeatureMap
from heedful.lens._record import LayerRecord
from heedful.lens.observation import Observation, observe
from heedful.lens.spectra.result import MatrixSpectrum, Spectrum
from heedful.nn.primal_core import PrimalCore
from heedful.ops import ksvd

# Entries that are decomposed at once: 128 MiB of float64, and a few times that at work.
CELLS = 2**24

KEEP = ("weights", "queries", "keys")


def spectrum(
    source: Any,
    x: Any = None,
    *,
    power: int = 1,
    valid: Tensor | None = None,
    tokenizer: Any = None,
    layers: Sequence[int] | None = None,
) -> Spectrum:
    r"""The singular values of attention matrices, of every layer and head, and how many of them matter.

    $c_k = \sum_{i \le k} \sigma_i / \sum_i \sigma_i$, the normalised cumulative singular value, is what Chen et al. (2023, figure 2)
    draw; their text speaks of explained variance, which is `power=2`. A sharp rise means few directions. Beside the
    coefficients of a layer stands the cosine kernel $\Phi_q \Phi_k^T$ of the same queries and keys, whose rank the head's width
    bounds as it bounds that of a primal layer: only against it does a low rank say something of what was learned.

    Args:
        source: a matrix `[n, m]`, matrices `[heads, n, m]` or `[batch, heads, n, m]` (tensors or arrays), a list of such, one
            for each layer (as `attentions` of Hugging Face), or a mapping from names to any of these; an `Observation`; or a
            `torch.nn.Module` with its input x.
        x: what the module reads, as for `lens.observe`: a text, a list of texts, a mapping, a tuple, a tensor.
        power: 1 or 2, for the curve and the rank at 90 %; both are there whatever it is.
        valid: boolean `[batch, n]` for matrices `[batch, heads, n, n]`, False for padding, whose rows and columns are left out.
            Observations and modules know their own.
        tokenizer, layers: as for `lens.observe`.

    Names in the result are `"matrix"` or those given; of a layer its kernel's (`"softmax"`) and `"cosine"`; of a `PrimalAttention`
    `"primal"`, which is $K_X = \Phi_q F^T F \Phi_k^T$ (the paper does not say which matrix stands for its layer), and `"cosine"`, or
    `"features"` where its feature map is another. An ablation, such as the same model trained without the KSVD loss, goes
    `beside`. All is in float64.

    >>> import torch
    >>> from heedful import lens, nn
    >>> ranks = lens.spectrum(nn.Attention(32, 4), torch.randn(2, 19, 32))
    >>> ranks
    Spectrum(softmax, cosine: 16 matrices)
    >>> ranks.select("cosine", head=3).effective_rank < 8  # no more than the head's width
    True
    """
    if power not in (1, 2):
        raise InvalidArgument(f"power must be 1 (singular values) or 2 (their squares, energy); got {power!r}")
    if valid is not None and isinstance(source, nn.Module | Observation):
        raise InvalidArgument(
            "valid is for matrices; an observation, and a module with its mask in x, know their padding"
        )
    spectra: list[MatrixSpectrum] = []
    if isinstance(source, nn.Module):
        spectra = _of_module(source, x, tokenizer, layers)
    elif x is not None:
        raise InvalidArgument(f"x is what a module reads; {type(source).__name__} needs none")
    elif isinstance(source, Observation):
        for at in _chosen(layers, len(source)):
            spectra += of_record(source[at], source)
    else:
        named = source if isinstance(source, Mapping) else {"matrix": source}
        for name, matrices in named.items():
            by_layer = matrices if isinstance(matrices, list | tuple) else [matrices]
            for layer, matrix in enumerate(by_layer):
                spectra += _of_matrices(matrix, str(name), layer, valid)
    if not spectra:
        raise InvalidArgument(
            "there is no matrix to decompose; give at least one that has entries and is not all padding"
        )
    return Spectrum(tuple(spectra), power)


def of_record(record: LayerRecord, seen: Observation, heads: Sequence[int] | None = None) -> list[MatrixSpectrum]:
    """The coefficients of a recorded layer, and the cosine kernel of its queries and keys where these were recorded."""
    rows, columns = seen.query_tokens(record).valid, seen.key_tokens(record).valid
    chosen = list(range(record.heads)) if heads is None else list(heads)
    name = "weights" if record.kernel is None else type(record.kernel).__name__.lower()

    def weights(sequence: int) -> Tensor:
        return torch.cat([record.weights_of(slice(head, head + 1), sequence=sequence) for head in chosen])

    own = _by_sequence(weights, name, record.index, chosen, rows, columns)
    is_cosine = isinstance(record.kernel, Cosine) or record.kernel == FeatureMap("cosine")
    try:
        queries, keys = record.queries, record.keys
    except HeedfulError:
        return own
    groups = record.heads // record.key_heads

    def features(sequence: int) -> _Thin:
        pair = queries[sequence, chosen], keys[sequence, [head // groups for head in chosen]]
        return _Thin(*(nn.functional.normalize(one.double(), dim=-1) for one in pair))

    return own if is_cosine else own + _by_sequence(features, "cosine", record.index, chosen, rows, columns)


def _of_module(model: nn.Module, x: Any, tokenizer: Any, layers: Sequence[int] | None) -> list[MatrixSpectrum]:
    """Observed attention and primal layers of one run, numbered together in the order of execution."""
    if x is None:
        raise InvalidArgument(f"{type(model).__name__} needs an input: spectrum(model, x)")
    names = {module: name for name, module in model.named_modules()}
    if not any(isinstance(module, PrimalCore) for module in names):
        seen = observe(model, x, layers, KEEP, tokenizer=tokenizer)
        return [one for record in seen for one in of_record(record, seen)]
    order: list[str] = []
    calls: list[tuple[int, PrimalCore, Tensor, Tensor | None]] = []

    def ended(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(module, PrimalCore):
            inputs = dict(zip(("x", "key_padding_mask"), args, strict=False)) | kwargs
            calls.append((len(order), module, inputs["x"], inputs.get("key_padding_mask")))
        order.append(names[module])

    try:
        with after_calls(names, ended):
            seen = observe(model, x, None, KEEP, tokenizer=tokenizer)
        parts = [(place, of_record(record, seen)) for place, record in zip(_places(seen, order), seen, strict=True)]
    except Unsupported:
        # Where all attention is primal there is no call that observe can see.
        if not calls:
            raise
        parts = []
    parts += [(place, _of_primal(layer, tokens, padding)) for place, layer, tokens, padding in calls]
    parts.sort(key=lambda part: part[0])
    return [replace(one, layer=at) for at in _chosen(layers, len(parts)) for one in parts[at][1]]


def _chosen(layers: Sequence[int] | None, count: int) -> Sequence[int]:
    """Places of layers, each once; negative ones count from the end."""
    try:
        return range(count) if layers is None else sorted({range(count)[at] for at in layers})
    except (IndexError, TypeError):
        raise InvalidArgument(f"layers must be integers below {count}, the number of layers; got {layers!r}") from None


def _places(seen: Observation, order: list[str]) -> list[int]:
    """When the modules that attended ended, the same one perhaps several times."""
    ends = {name: iter([at for at, one in enumerate(order) if one == name]) for name in order}
    return [next(ends[record.name], len(order)) if record.name in ends else len(order) for record in seen]


@torch.no_grad()
def _of_primal(layer: PrimalCore, x: Tensor, padding: Tensor | None) -> list[MatrixSpectrum]:
    """K_X, and the kernel of the features alone, which has the same bound on its rank."""
    query, key, sample = layer.features(x, padding)
    valid = torch.ones(x.shape[:2], dtype=torch.bool) if padding is None else ~padding.cpu()
    heads = list(range(layer.num_heads))
    plain = "cosine" if layer.feature_map in ("cosine", Cosine(), FeatureMap("cosine")) else "features"

    def of(rows: Tensor | None) -> Callable[[int], _Thin]:
        return lambda at: _Thin(query[at], key[at], None if rows is None else rows[at])

    own = _by_sequence(of(sample), "primal", 0, heads, valid, valid)
    # Static weights have no sample: K_X is the kernel of the features.
    return own if sample is None else own + _by_sequence(of(None), plain, 0, heads, valid, valid)


def _of_matrices(matrix: Any, name: str, layer: int, valid: Tensor | None) -> list[MatrixSpectrum]:
    """A matrix, or matrices `[heads, n, m]` or `[batch, heads, n, m]`."""
    values = torch.from_numpy(matrix) if isinstance(matrix, np.ndarray) and matrix.dtype.kind in "biufc" else matrix
    if not isinstance(values, Tensor) or values.is_complex() or not 2 <= values.dim() <= 4:
        got = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, Tensor) else type(matrix).__name__
        raise InvalidArgument(
            f"{name} must be real matrices (n, m), (heads, n, m) or (batch, heads, n, m), a list with one for each layer, a "
            f"mapping, an Observation or a module; got {got}"
        )
    values = values.detach()[(None,) * (4 - values.dim())]
    batch, heads, n, m = values.shape
    if values.numel() == 0:
        raise InvalidArgument(f"{name} of shape {tuple(values.shape)} is empty; give matrices with rows and columns")
    rows, columns = (torch.ones(batch, size, dtype=torch.bool) for size in (n, m))
    if valid is not None:
        if not isinstance(valid, Tensor) or valid.dtype != torch.bool or valid.shape != (batch, n) or n != m:
            got = f"{valid.dtype} {tuple(valid.shape)}" if isinstance(valid, Tensor) else type(valid).__name__
            raise InvalidArgument(
                f"valid must be boolean of shape (batch, n) for square matrices (batch, heads, n, n); got {got} for "
                f"{(batch, heads, n, m)}"
            )
        rows = columns = valid.cpu()
    return _by_sequence(lambda sequence: values[sequence], name, layer, list(range(heads)), rows, columns)


class _Thin(NamedTuple):
    """A matrix Phi_q F^T F Phi_k^T by its factors, each `[heads, ., features]`."""

    query: Tensor
    key: Tensor
    sample: Tensor | None = None


def _by_sequence(
    read: Callable[[int], Tensor | _Thin],
    name: str,
    layer: int,
    heads: Sequence[int],
    rows: Tensor,
    columns: Tensor,
) -> list[MatrixSpectrum]:
    """The matrices `[heads, n, m]` of each sequence without its padding."""
    spectra = []
    for sequence in range(rows.shape[0]):
        at, to = rows[sequence].nonzero().flatten(), columns[sequence].nonzero().flatten()
        if len(at) == 0 or len(to) == 0:
            continue
        matrix = read(sequence)
        if isinstance(matrix, Tensor):
            values, bound = _values(matrix[:, at][:, :, to], name, layer, heads), min(len(at), len(to))
        else:
            query, key, sample = matrix.query[:, at], matrix.key[:, to], matrix.sample
            parts = [part.double() for part in (query, key, *(() if sample is None else (sample,)))]
            for part in parts:
                _check_finite(part, name, layer, heads)
            bound = min(size for part in parts for size in part.shape[1:])
            values = ksvd.ksvd(parts[0], parts[1], parts[2] if sample is not None else None).values
        for head, one in zip(heads, values.cpu().tolist(), strict=True):
            spectra.append(MatrixSpectrum(name, layer, head, sequence, len(at), len(to), bound, tuple(one[:bound])))
    return spectra


def _values(matrices: Tensor, name: str, layer: int, heads: Sequence[int]) -> Tensor:
    """Singular values of `[heads, n, m]`, many heads at once."""
    _check_finite(matrices, name, layer, heads)
    step = max(1, CELLS // matrices[0].numel())
    return torch.cat([torch.linalg.svdvals(part.double()) for part in matrices.split(step)])


def _check_finite(matrices: Tensor, name: str, layer: int, heads: Sequence[int]) -> None:
    wrong = ~matrices.isfinite().flatten(1).all(dim=1)
    if wrong.any():
        raise InvalidArgument(
            f"{name} of layer {layer}, head {heads[int(wrong.nonzero()[0])]} holds numbers that are not finite, which have no "
            "singular values; look for NaN or infinity in the model's weights or input"
        )

"""Inter-modality flow of a model, an observation, or maps of attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heedful._checks import check_choice, check_number
from heedful._errors import InvalidArgument, Unsupported
from heedful._runtime import undisturbed
from heedful.bridges.modalities import Modalities, kinds_said, modalities_of
from heedful.bridges.transformers import bare
from heedful.bridges.watch import Watched, watch
from heedful.lens._inputs import read_inputs
from heedful.lens._record import LayerRecord
from heedful.lens.flows._meter import Meter, Settings
from heedful.lens.flows.groups import grouped
from heedful.lens.flows.result import Crossing, Flow, LayerFlow
from heedful.lens.observation import Observation

MODES, STARTS, REDUCE, SPECIAL = (
    ("fraction", "flow", "norm"),
    ("uniform", "first", "last"),
    ("macro", "micro"),
    ("keep", "exclude"),
)
# How far rows of maps may be from summing to one: rounding of 32 and of 16 bit.
CLOSE, ROUNDED = 1e-3, 2e-2


def flow(
    source: Any,
    inputs: Any = None,
    *,
    modality: Any = None,
    names: Sequence[str] | None = None,
    groups: Any = None,
    tokenizer: Any = None,
    valid: Tensor | None = None,
    allowed: Tensor | None = None,
    special: str | None = None,
    mode: str = "fraction",
    reduce: str = "macro",
    rho: float = 0.0,
    start: str = "uniform",
) -> Flow:
    r"""How much attention goes from one kind of tokens to another, by layer and head: inter-modality flow (Xue et al. 2021).

    With $m_i$ the kind of token i, $IMF = \sum_{m_i \ne m_j} a_{ij} / \sum_{ij} a_{ij}$ over tokens that are no padding; padded keys are taken
    out and rows divided by what is left. Attention that is spread evenly over the keys a query may see gives `chance`; `lift` is IMF over that.
    No map of pairs is written: each layer's own kernel runs once more with columns of zeros and ones as values, so the sums are exact under
    eager attention, SDPA and fused kernels alike, in memory that grows with the number of tokens.

    Args:
        source: a model, with its inputs; an `Observation`, with `modality`; or maps `[B, H, N, N]` or `[B, N, N]`, one for each layer, with `modality`.
        inputs: as for `lens.observe`: a mapping, a text, a list of texts; or a list of mappings, whose samples are joined.
        modality: integers `[N]` or `[B, N]`, the kind of each token, or a list of names; -1 leaves a token out. Models of transformers that read
            pictures or sound, encoder-decoders, and models that state `modalities` are known by themselves.
        names: of the kinds.
        groups: of a text, instead of `modality`: a mapping from names to parts of it, as `{"question": ..., "context": ...}`. With no inputs the parts, one
            after the other, are the text. Messages (`[{"role": ..., "content": ...}]`) are grouped by role. A list of these is several samples.
        tokenizer: for texts and groups.
        valid: `[B, N]`, False for padding, where neither inputs nor masks say it.
        allowed: for maps, `[N, N]` or `[B, N, N]`, True where a query may see a key; by default the keys that some head gives weight to.
        special: `"keep"` counts `[CLS]` and the like with their kind; `"exclude"` leaves them out as queries and as keys. Groups exclude them, or keep them as a group `special`.
        mode: `"fraction"`; `"norm"` weighs $a_{ij}$ by $|v_j W_O|$, what the key hands over; `"flow"` follows $f^{l-1} = f^l \tilde A^l$ from the
            last layer down, with $\tilde A = (1 - \rho) \bar A + \rho I$, heads averaged.
        reduce: `"macro"`, the mean over heads, then over samples; `"micro"`, the ratio of all sums.
        rho, start: of `"flow"`: what stays with each token (0.5 is attention rollout), and what is read off at the end: `"uniform"`, all tokens
            alike, the `"first"` (`[CLS]`) or the `"last"` (what a decoder goes on from).

    Models with a sequence for each kind (LXMERT, BLIP, Whisper) attend across by construction; of these `crossings` says how much of the update of a
    token comes from the other kind. The paper's own code was never released, and its formula for the flow through layers could not be recovered:
    `"flow"` is ours.

    >>> import torch
    >>> even = torch.full((1, 2, 6, 6), 1 / 6)
    >>> found = flow([even], modality=["text"] * 4 + ["image"] * 2)
    >>> round(found.per_layer[0], 6), round(found.chance[0], 6), found.lift[0]  # 2 x 4 x 2 / 6^2
    (0.444444, 0.444444, 1.0)
    """
    check_choice(MODES, mode=mode)
    check_choice(REDUCE, reduce=reduce)
    check_choice(STARTS, start=start)
    check_choice(SPECIAL, optional=True, special=special)
    check_number(least=0, most=1, rho=rho)
    if groups is not None and modality is not None:
        raise InvalidArgument("groups and modality both say of what kind tokens are; give one of them")
    if mode != "flow" and (rho != 0 or start != "uniform"):
        given = "rho" if rho != 0 else "start"
        raise InvalidArgument(f"{given} goes with mode='flow'; give both, or leave {given} out")
    settings = Settings(mode, special or ("keep" if groups is None else "exclude"), rho, start)
    source = bare(source)
    if isinstance(source, nn.Module):
        if allowed is not None:
            raise InvalidArgument("allowed is for maps; a model's masks are known")
        if groups is not None:
            several = grouped(source, tokenizer, groups, inputs, settings.special)
            parts = [
                _of_model(source, one.inputs, None, settings, _given(one.ids, one.names, None), None, one.special)
                for one in several
            ]
        else:
            if inputs is None:
                raise InvalidArgument(f"{type(source).__name__} needs inputs: flow(model, inputs)")
            kinds = None if modality is None else _given(modality, names, None)
            parts = [_of_model(source, one, tokenizer, settings, kinds, valid) for one in batches_of(inputs)]
        return replace(_joined(parts), reduce=reduce, mode=mode)
    if modality is None:
        raise InvalidArgument(
            "maps and observations do not know of what kind tokens are; give modality=..., integers or names"
        )
    kinds = _given(modality, names, valid)
    meter = Meter(kinds, settings, None, source.special if isinstance(source, Observation) else None, valid)
    calls = [_recorded(one) for one in source] if isinstance(source, Observation) else _maps(source, allowed)
    for call in calls:
        meter.tell(replace(call, kept=meter.copy(call)))
    meter.finish()
    return replace(_result(meter), reduce=reduce, mode=mode)


def received(
    model: nn.Module, inputs: Any, heads: Sequence[tuple[int, int]], *, queries: str | None = None, modality: Any = None, names: Sequence[str] | None = None,
    tokenizer: Any = None,
) -> Tensor:  # fmt: skip
    r"""What every token is given by the queries of one kind: $\frac{1}{n_p} \sum_{m_i = p} a_{ij}$, for some heads: `[heads, B, N]`.

    One backward pass through the layer's own kernel for each head; no map of pairs is written.

    Args:
        model, inputs, modality, names, tokenizer: as for `flow`.
        heads: `(layer, head)`, layers counted as in `flow(...).layers`.
        queries: the kind; the first by default.

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> given = received(layer, torch.randn(1, 5, 8), [(0, 1)], modality=[0, 0, 0, 1, 1])
    >>> given.shape, round(float(given.sum()), 4)
    (torch.Size([1, 1, 5]), 1.0)
    """
    return received_by(model, inputs, heads, queries, modality, names, tokenizer)[0]


def received_by(
    model: nn.Module,
    inputs: Any,
    heads: Sequence[tuple[int, int]],
    queries: str | None = None,
    modality: Any = None,
    names: Sequence[str] | None = None,
    tokenizer: Any = None,
) -> tuple[Tensor, Tensor]:
    """What `received` gives, and the kinds of the tokens, `[B, N]`."""
    model = bare(model)
    args, named, _ = read_inputs(model, inputs, tokenizer, strings=False)
    kinds = modalities_of(model, named) if modality is None else _given(modality, names, None)
    meter = Meter(kinds, Settings(mode="flow"), model)
    with undisturbed(model), watch(model, meter.tell, meter.copy):
        output = model(*args, **named)
        if kinds.is_joint and kinds.ids is None:
            kinds = meter.kinds = _given(kinds_said(output), kinds.names, None)
        if queries is not None and queries not in kinds.names:
            raise InvalidArgument(f"there is no kind {queries!r}; the kinds are {', '.join(kinds.names)}")
        given = meter.received(heads, 0 if queries is None else kinds.names.index(queries))
    ids = kinds.of_sequence(given.shape[-1])
    assert ids is not None
    return given, ids.expand(given.shape[1], -1)


def _of_model(
    model: nn.Module,
    inputs: Any,
    tokenizer: Any,
    settings: Settings,
    kinds: Modalities | None,
    valid: Tensor | None,
    special: Tensor | None = None,
) -> Flow:
    args, named, sides = read_inputs(model, inputs, tokenizer, strings=False)
    kinds = modalities_of(model, named) if kinds is None else kinds
    marks = special if special is not None else sides["input"].special if "input" in sides else None
    own = (
        sides["input"].valid
        if kinds.valid is None and kinds.ids is not None and kinds.rest is None and "input" in sides
        else None
    )
    real = valid if valid is not None else own

    def run(later: bool) -> Meter | None:
        meter = Meter(kinds, settings, model, marks, real)
        with undisturbed(model), watch(model, meter.tell, meter.copy, later=later) as watched:
            output = model(*args, **named)
            said = kinds.is_joint and kinds.ids is None
            meter.finish(_given(kinds_said(output), kinds.names, None) if said else kinds)
        return meter if watched.agrees else None

    # Calls are looked at one by one, which waits for the device, only where one of them was not what it seemed.
    meter = run(later=True) or run(later=False)
    assert meter is not None
    return _result(meter, type(model).__name__)


def _result(meter: Meter, model: str = "") -> Flow:
    crossings = () if meter.kinds.is_joint else meter.crossings()
    if not meter.layers and not crossings:
        ids = meter.kinds.ids
        which = f" of {ids.shape[1]} tokens" if ids is not None else ""
        what = (
            f"no call of attention over the sequence{which}"
            if meter.kinds.is_joint
            else "no cross-attention that can be seen"
        )
        raise Unsupported(
            f"{model or 'the source'} has {what}; modality must say the kind of every token that the layers read"
            + (f" (seen: {', '.join(sorted(meter.other)[:3])})" if meter.other else "")
        )
    assert meter.counts is not None
    notes = []
    if meter.layers and int((meter.counts.sum(0) > 0).sum()) < 2:
        notes.append("One kind of tokens alone is there: nothing can go between kinds.")
    left = len(meter.other)
    if left and meter.layers:
        notes.append(
            "1 attention module reads another sequence, of one kind, and is left out."
            if left == 1
            else f"{left} attention modules read other sequences, of one kind each, and are left out."
        )
    return Flow(meter.kinds.names, meter.counts, tuple(meter.layers), crossings, notes=tuple(notes))


def _joined(parts: Sequence[Flow]) -> Flow:
    """Samples of several runs, one after the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for other in parts[1:]:
        if other.names != first.names or [one.name for one in other.layers] != [one.name for one in first.layers]:
            raise InvalidArgument(
                f"batches differ in kinds or layers: {', '.join(first.names)} and {', '.join(other.names)}; measure them apart"
            )
    layers = [
        LayerFlow(
            same[0].layer, same[0].name,
            torch.cat([one.sums for one in same]),
            torch.cat([one.uniform.expand(-1, max(part.uniform.shape[1] for part in same), -1, -1) for one in same]),
            torch.cat([one.outside for one in same]),
        )
        for same in zip(*(part.layers for part in parts), strict=True)
    ]  # fmt: skip
    crossings = [
        Crossing(same[0].layer, same[0].queries, same[0].keys, torch.cat([one.cross_share for one in same]))
        for same in zip(*(part.crossings for part in parts), strict=True)
    ]
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    return Flow(first.names, torch.cat([part.counts for part in parts]), tuple(layers), tuple(crossings), notes=notes)


def batches_of(inputs: Any) -> list[Any]:
    """What a model is called with, one after the other; a list of texts is one call."""
    if isinstance(inputs, Mapping | Tensor | tuple | str) or not isinstance(inputs, Iterable):
        return [inputs]
    several = list(inputs)
    return several if several and all(isinstance(one, Mapping | Tensor | tuple) for one in several) else [inputs]


def _given(modality: Any, names: Sequence[str] | None, valid: Tensor | None) -> Modalities:
    """Kinds as a user states them: integers, or a name for each token."""
    if isinstance(modality, np.ndarray):
        modality = modality.tolist()
    if isinstance(modality, list | tuple):
        rows = (
            [list(row) for row in modality] if modality and not isinstance(modality[0], str | int) else [list(modality)]
        )
        flat = [one for row in rows for one in row]
        if flat and all(isinstance(one, str) for one in flat):
            known = list(dict.fromkeys(flat)) if names is None else list(names)
            if not set(flat) <= set(known):
                raise InvalidArgument(
                    f"modality holds {sorted(set(flat) - set(known))[0]!r}, which is none of names {known}"
                )
            names, rows = known, [[known.index(one) for one in row] for row in rows]
        try:
            modality = torch.tensor(rows)
        except (TypeError, ValueError):
            modality = None
    if (
        not isinstance(modality, Tensor)
        or modality.is_floating_point()
        or modality.dim() not in (1, 2)
        or modality.numel() == 0
    ):
        got = f"{modality.dtype} {tuple(modality.shape)}" if isinstance(modality, Tensor) else type(modality).__name__
        raise InvalidArgument(f"modality must be integers (tokens,) or (batch, tokens), or a list of names; got {got}")
    ids = modality.long().cpu()
    ids = ids if ids.dim() == 2 else ids[None]
    count = int(ids.max()) + 1
    named = tuple(f"kind {at}" for at in range(count)) if names is None else tuple(map(str, names))
    if int(ids.min()) < -1 or count > len(named) or len(set(named)) < len(named):
        raise InvalidArgument(
            f"modality must hold numbers of the {len(named)} names, or -1 for a token that is left out; got {int(ids.min())} to {count - 1}"
        )
    return Modalities(named, ids, valid=valid)


def _recorded(record: LayerRecord) -> Watched:
    tensors = record._tensors
    empty = torch.empty(0).expand(record.batch, record.heads, record.queries_len, 0)
    if (record.kernel is None and "weights" not in tensors) or (record.kernel is not None and "queries" not in tensors):
        raise InvalidArgument("the observation holds no weights; observe(..., keep=('weights', ...)) keeps them")
    return Watched(
        record.name, tensors.get("queries"), tensors.get("keys"), None, empty, record.kernel, tensors.get("mask"), tensors.get("bias"),
        record.upper_left, tensors.get("weights"), cross=record.kind == "cross",
    )  # fmt: skip


def _maps(source: Any, allowed: Tensor | None) -> list[Watched]:
    """Maps of attention, one for each layer, as calls."""
    if source is None or (isinstance(source, list | tuple) and (not source or any(one is None for one in source))):
        raise InvalidArgument(
            "there are no attention maps: fused attention returns none; give the model and its inputs instead, flow(model, inputs), or load it "
            "with attn_implementation='eager'"
        )
    layers = source if isinstance(source, list | tuple) else [source]
    return [_map(one, at, allowed) for at, one in enumerate(layers)]


def _map(one: Any, at: int, allowed: Tensor | None) -> Watched:
    weights = torch.from_numpy(one) if isinstance(one, np.ndarray) else one
    if not isinstance(weights, Tensor) or not weights.is_floating_point() or weights.dim() not in (3, 4):
        got = f"{weights.dtype} {tuple(weights.shape)}" if isinstance(weights, Tensor) else type(one).__name__
        raise InvalidArgument(f"map {at} must be (batch, heads, tokens, tokens) or (batch, tokens, tokens); got {got}")
    weights = weights.detach() if weights.dim() == 4 else weights.detach()[:, None]
    if weights.shape[-1] != weights.shape[-2]:
        raise InvalidArgument(
            f"map {at} is {tuple(weights.shape)}, from one sequence to another: its kinds are a matter of construction. Give the model and its inputs, "
            "whose crossings say how much cross-attention adds"
        )
    total = weights.double().sum(-1)
    close = ROUNDED if weights.dtype.itemsize < 4 else CLOSE
    wrong = ~total.isfinite() | ((total - 1).abs() > close) & (total != 0) | (weights < 0).any(-1)
    if bool(wrong.any()):
        sample, head, query = wrong.nonzero()[0].tolist()
        raise InvalidArgument(
            f"map {at}, sample {sample}, head {head}, query {query} sums to {float(total[sample, head, query]):.4g}, not to 1; give weights after the "
            "softmax and before dropout: call model.eval()"
        )
    mask = None if allowed is None else allowed.bool()
    mask = mask[:, None] if mask is not None and mask.dim() == 3 else mask
    empty = weights.new_empty(0).expand(*weights.shape[:3], 0)
    return Watched(f"map {at}", None, None, None, empty, mask=mask, weights=weights)

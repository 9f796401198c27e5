"""Softmax attention of a pretrained encoder replaced by Primal-Attention."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful._progress import Progress, silent
from heedful._runtime import eval_mode
from heedful._savable import read_folder, remaking, write_folder
from heedful.bridges import swap
from heedful.bridges.structure import Site, find_sites
from heedful.bridges.swap import Recorded
from heedful.convert import least_squares
from heedful.convert.distilling import Distillation, Lesson, Pooling, distill_, pool
from heedful.convert.least_squares import Moments
from heedful.convert.result import BreakingPoint, LayerFit, Primalized
from heedful.nn import Primal, PrimalAttention

Batch = Mapping[str, Tensor]

# Without held-out data, one batch in so many of the calibration is held out.
HELD_OUT = 5

# Of each model, to time them; one more comes first to warm up.
CALLS = 7


def primalize(
    model: nn.Module,
    calibration: Sequence[str] | Sequence[Mapping[str, Tensor]],
    *,
    layers: Sequence[int] = (-1,),
    rank: int = 32,
    tokenizer: Any = None,
    held_out: Sequence[str] | Sequence[Mapping[str, Tensor]] | None = None,
    form: Primal | None = None,
    distill: int | Distillation = 0,
    pooling: Pooling = "mean",
    heads: int | None = None,
    ridge: float | None = None,
    batch_size: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> Primalized:
    r"""Replaces softmax self-attention in a pretrained encoder by Primal-Attention, fitted to what it replaces.

    For each layer, first to last: queries and keys are the old layer's; the other weights are found by exact least squares on
    the calibration data (`heedful.convert.least_squares.fit_`); with `distill` the layer then learns to give what the old one
    gave. The model is copied, and the copy changed.

    A primal layer has no values: token i gets $\sum_m \langle \phi_q(x_i), f_m \rangle w_m$, a similarity with each of n' samples of the
    layer's input times a vector that belongs to the sample's position. What other tokens *say* passes through these
    numbers alone. Where a layer copies content, as the last one of a sentence encoder does, least squares fails, and
    distillation lets the network behind the layer make up for it; `Primalized.control` tells how far no mixing at all goes.

    Args:
        model: of transformers, an encoder in the manner of BERT or ViT (see `heedful.bridges.swap`).
        calibration: texts, with `tokenizer`, or batches: mappings from the model's arguments to tensors.
        layers: which self-attentions, by their place; negative ones count from the end.
        rank: s of the primal layers.
        held_out: what errors and agreement are measured on; by default every fifth batch of the calibration is held out.
        form: the primal layer as data, in place of `rank`; by default `Primal(rank, rank_multi=1)`, n' = rank rows for a sequence.
        distill: steps for each layer, or a `Distillation`.
        pooling: what the embedding of a sequence is: the `"mean"` of its tokens, or the `"first"` one. The last layer is also taught
            by it.
        heads: of the primal layers; those of the model by default.
        ridge: relative to the mean square of features; by default the one that does best on a fifth of the calibration.
        progress: called with how much is done, how much there is, and what is under way.

    Distillation keeps the inputs and outputs of a layer for all calibration data in memory.

    >>> from transformers import BertConfig, BertModel
    >>> import torch
    >>> config = BertConfig(vocab_size=31, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=17)
    >>> batches = [{"input_ids": torch.randint(31, (4, 9))} for _ in range(10)]
    >>> made = primalize(BertModel(config), batches, rank=4)
    >>> [layer.name for layer in made.layers]
    ['encoder.layer.1.attention.self']
    """
    form = Primal(rank, rank_multi=1) if form is None else form
    how = distill if isinstance(distill, Distillation) else Distillation(distill)
    say = progress or silent
    check_choice(Pooling, pooling=pooling)
    check_number(0, ridge=ridge, optional=True)
    check_whole(batch_size=batch_size)
    if form.causal:
        raise InvalidArgument(f"an encoder sees the whole sequence; got {form!r}: leave causal out")
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model must be an encoder of transformers; got {type(model).__name__}")
    every = find_sites(model)
    chosen = _chosen(layers, len(every))
    device = next(model.parameters()).device
    learn = swap.read(model, calibration, tokenizer, batch_size)
    if held_out is None:
        held = learn[HELD_OUT // 2 :: HELD_OUT]
        learn = [batch for at, batch in enumerate(learn) if at % HELD_OUT != HELD_OUT // 2]
        if not learn or not held:
            raise InvalidArgument(
                "too few batches to hold some out; give more calibration data, a smaller batch_size, or held_out"
            )
    else:
        held = swap.read(model, held_out, tokenizer, batch_size)
    with torch.no_grad(), eval_mode(model), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        work = _Work(model, every, form, how, pooling, heads, ridge, seed, say)
        fits = tuple(work.convert(at, learn, held) for at in chosen)
        cosines = _cosines(model, work.student, held, pooling)
        control = _cosines(model, work.control, held, pooling)
        batch = held[len(held) // 2]
        before, after = latencies((model, work.student), batch)
        seen = next(swap.recorded(model, every[chosen[-1]], [batch])).call.inputs
    alone, size = sum(control) / len(control), (seen.shape[0], seen.shape[1])
    return Primalized(work.student, fits, tuple(cosines), alone, before, after, size, how.steps)


def breaking_point(
    model: nn.Module,
    calibration: Sequence[str] | Sequence[Mapping[str, Tensor]],
    *,
    threshold: float = 0.9,
    **options: Any,
) -> BreakingPoint:
    """Converts the last layer, the last two, and so on, until embeddings agree to less than the threshold.

    `options` are those of `primalize`, but for `layers`.
    """
    if not isinstance(threshold, int | float) or not -1 <= threshold <= 1:
        raise InvalidArgument(f"threshold must be a cosine, between -1 and 1; got {threshold!r}")
    count = len(find_sites(model))
    runs: list[Primalized] = []
    for converted in range(1, count + 1):
        runs.append(primalize(model, calibration, layers=range(count - converted, count), **options))
        if runs[-1].agreement < threshold:
            break
    return BreakingPoint(tuple(run.agreement for run in runs), threshold, tuple(runs))


def save(model: nn.Module | Primalized, folder: str | Path) -> None:
    """Writes a converted model to a folder: `config.json` (the model's and its primal layers') and `model.safetensors`.

    `save_pretrained` of transformers could not make the primal layers again. The tokenizer may be saved to the same folder.
    """
    model = model.model if isinstance(model, Primalized) else model
    write_folder(folder, {"primalized": swap.described(model)}, model.state_dict())


def load(folder: str | Path) -> nn.Module:
    """The converted model that `save` wrote, in eval mode; nothing is unpickled."""
    config, tensors = read_folder(folder, expects="primalized")
    with remaking(folder, "the model"):
        model = swap.rebuilt(config["primalized"])
        model.load_state_dict(tensors, assign=True)
    return model.eval()


class _TokenWise(nn.Module):
    """The control: a linear map of each token by itself."""

    def __init__(self, known: Moments, check: Moments, ridge: float | None, like: Tensor) -> None:
        super().__init__()
        ridge = least_squares.best(
            partial(least_squares.linear_map, known), lambda solution: check.error(*solution), ridge
        )
        matrix, bias = least_squares.linear_map(known if known is check else known + check, ridge)
        self.map = nn.Linear(*matrix.shape).to(like)
        self.map.weight.copy_(matrix.mT)
        self.map.bias.copy_(bias)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return self.map(x)


@dataclass
class _Work:
    """A model on its way: `student` has primal layers, `control` token-wise maps where those are."""

    teacher: nn.Module
    sites: list[Site]
    form: Primal
    how: Distillation
    pooling: Pooling
    heads: int | None
    ridge: float | None
    seed: int
    say: Progress

    def __post_init__(self) -> None:
        self.student, self.control = copy.deepcopy(self.teacher), copy.deepcopy(self.teacher)
        self.changed = False

    def convert(self, at: int, learn: Sequence[Batch], held: Sequence[Batch]) -> LayerFit:
        """Replaces one layer; those before it that shall be replaced must have been."""
        site, last = self.sites[at], at == len(self.sites) - 1
        old_map = self.teacher.get_submodule(site.output)
        assert isinstance(old_map, nn.Linear)
        # What is read of the last layer of a sentence encoder is the mean.
        pooled = 1.0 if last and self.pooling == "mean" else 0.0
        layer = self._new_layer(site, learn)
        ours, controls, lessons = self._gathered(at, learn, pooled, layer)
        self._fit_(layer, old_map.weight, *ours)
        plain = _TokenWise(*controls, self.ridge, old_map.weight)
        runs = list(self._runs(site, held))
        pairs = [(old, own.call, None if own.call.keep is None else ~own.call.keep) for old, own, _ in runs]
        fitted = _error((layer(call.inputs, padding), old.output, call.keep) for old, call, padding in pairs)
        alone = _error((plain(other.call.inputs), old.output, other.call.keep) for old, _, other in runs)
        swap.put(self.student, site, layer)
        swap.put(self.control, site, plain)
        self.changed = True
        block = self.student.get_submodule(site.block)
        moved = list((block if self.how.train == "layer" else layer).parameters())
        pooling = self.pooling if last else None
        distill_(block, moved, lessons, self.how, pooling, self.seed, self.say, f"layer {at}: distillation")
        missed = _error((own.result, old.result, old.call.keep) for old, own, _ in self._runs(site, held))
        return LayerFit(at, site.name, layer.num_heads, layer.rank, layer.w_e.shape[1], fitted, alone, missed)

    def _gathered(
        self, at: int, learn: Sequence[Batch], pooled: float, layer: PrimalAttention
    ) -> tuple[tuple[Moments, Moments], tuple[Moments, Moments], list[Lesson]]:
        """What least squares needs, for the primal layer and for the control, and what distillation needs.

        The first moments are learned from, the second choose the ridge; they are the same where there are few batches.
        """
        moments: dict[tuple[str, bool], Moments] = {}
        lessons = []
        for done, (old, own, other) in enumerate(self._runs(self.sites[at], learn)):
            self.say(done, len(learn), f"layer {at}: least squares")
            checks = done % HELD_OUT == HELD_OUT // 2
            features = {
                "primal": least_squares.features(layer, own.call.inputs, own.call.keep),
                "control": other.call.inputs,
            }
            for kind, part in features.items():
                one = least_squares.moments([(part, old.output, old.call.keep)], pooled)
                moments[kind, checks] = moments[kind, checks] + one if (kind, checks) in moments else one
            if self.how.steps:
                lessons.append(Lesson(own.args, own.kwargs, old.result, own.call.keep))
        ours, controls = ((moments[kind, False], moments.get((kind, True), moments[kind, False])) for kind in features)
        return ours, controls, lessons

    def _fit_(self, layer: PrimalAttention, output: Tensor, known: Moments, check: Moments) -> None:
        """Least squares, with the ridge that does best on data that were not learned from."""
        solve = partial(least_squares.solve, output=output, heads=layer.num_heads, rank=layer.rank)
        ridge = least_squares.best(
            lambda ridge: solve(known, ridge=ridge, sweeps=least_squares.FEW),
            lambda solution: check.error(solution.matrix, solution.bias),
            self.ridge,
        )
        least_squares.fit_(layer, known if known is check else known + check, output, ridge)

    def _new_layer(self, site: Site, learn: Sequence[Batch]) -> PrimalAttention:
        """A primal layer with the queries and keys of the one it replaces."""
        query, key = (self.teacher.get_submodule(name) for name in (site.query, site.key))
        assert isinstance(query, nn.Linear)
        assert isinstance(key, nn.Linear)
        longest = max(seen.call.inputs.shape[1] for seen in swap.recorded(self.teacher, site, learn[-1:]))
        heads = site.heads if self.heads is None else self.heads
        arguments = {**self.form.arguments(), "track_loss": False}
        layer = PrimalAttention(site.width, heads, max_len=longest, **arguments).to(query.weight).eval()
        layer.in_proj.weight.copy_(torch.cat((query.weight, key.weight)))
        for place, part in enumerate((query, key)):
            layer.in_proj.bias[place * site.width : (place + 1) * site.width] = 0.0 if part.bias is None else part.bias
        return layer

    def _runs(self, site: Site, batches: Sequence[Batch]) -> Iterator[tuple[Recorded, Recorded, Recorded]]:
        """What teacher, student and control did, which is the same until something is replaced."""
        if not self.changed:
            yield from ((seen, seen, seen) for seen in swap.recorded(self.teacher, site, batches))
            return
        models = (self.teacher, self.student, self.control)
        yield from zip(*(swap.recorded(model, site, batches) for model in models), strict=True)


def _error(parts: Iterable[tuple[Tensor, Tensor, Tensor | None]]) -> float:
    """||Y - D|| / ||D - mean D|| over tokens."""
    missed, squares, sums, count = 0.0, 0.0, torch.zeros(()), 0
    for output, wanted, keep in parts:
        output, wanted = (
            part.double().flatten(0, 1) if keep is None else part.double()[keep] for part in (output, wanted)
        )
        missed += float((output - wanted).square().sum())
        squares += float(wanted.square().sum())
        sums, count = sums + wanted.sum(dim=0), count + len(wanted)
    spread = squares - float(sums.square().sum()) / max(count, 1)
    return (missed / spread) ** 0.5 if spread > 0 else 0.0


def _cosines(teacher: nn.Module, student: nn.Module, batches: Sequence[Batch], pooling: Pooling) -> list[float]:
    cosines = []
    for batch in batches:
        mask = batch.get("attention_mask")
        keep = mask.bool() if mask is not None and mask.dim() == 2 else None
        one, two = (pool(swap.hidden(model(**batch)).double(), keep, pooling) for model in (teacher, student))
        cosines += cosine_similarity(one, two).tolist()
    return cosines


def latencies(models: Sequence[nn.Module], batch: Batch) -> list[float]:
    """Median seconds of a call of each, taken in turn so that what else the machine does meets all alike."""
    times: list[list[float]] = [[] for _ in models]
    for _ in range(CALLS + 1):
        for model, taken in zip(models, times, strict=True):
            start = perf_counter()
            result = swap.hidden(model(**batch))
            if result.is_cuda:
                torch.cuda.synchronize(result.device)
            taken.append(perf_counter() - start)
    return [median(taken[1:]) for taken in times]


def _chosen(layers: Sequence[int], count: int) -> list[int]:
    try:
        chosen = sorted({range(count)[at] for at in layers})
    except (TypeError, IndexError):
        chosen = []
    if not chosen:
        raise InvalidArgument(f"layers must be places among {count} self-attentions, as [-1]; got {layers!r}")
    return chosen

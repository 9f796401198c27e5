"""Pre-training of a `VisualParsingModel`: hidden words, whether text and picture belong together, hidden image tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import IterableDataset

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful._progress import bar
from heedful._runtime import device_of
from heedful.bridges.batches import mixed
from heedful.bridges.record import Hyperparameters, Training
from heedful.multimodal.masking import attention_mask_tokens, mask_words, random_mask_tokens
from heedful.multimodal.model import VisualParsingModel, words_loss
from heedful.multimodal.scenes import Captions, Scenes, Vocabulary, pixel_values
from heedful.multimodal.worlds import FOILS, PRESETS, SHAPES, Shapes

__all__ = ["Collapse", "SceneCaptions", "VLPretrainer"]

Mask = Literal["attention", "random"]
TASKS = ("mlm", "itm", "mfr")
# Below this spread of the image tokens they are nearly all the same.
COLLAPSED = 0.05
DECAY = 0.996
# Batches that are drawn at once: a GPU waits for the many small steps of one draw, however large it is.
AHEAD = {"cuda": 8}


class Collapse(UserWarning):
    """Image tokens became nearly constant: regression to one's own features is then solved by seeing nothing."""


class VLPretrainer:
    r"""Trains a `VisualParsingModel` on pictures with texts: $L = L_{mlm} + L_{itm} + L_{mfr}$ (Xue et al. 2021, section 3.3).

    Each picture is read once. Fusion runs over the whole text and each of its rivals, for ITM, and over the text and
    the picture with hidden tokens, for MLM and MFR.

    - **MLM**: words are chosen with `mlm_probability`, at least one.
    - **ITM**: the mean of two losses: 2-way cross-entropy of each text, true and false ones weighing the same, and
      cross-entropy of the true text among its rivals. The first alone is the paper's; the second learns relations in
      fewer steps.
    - **MFR**: `mfr_tokens` image tokens are hidden, one and those it attends to most (`mfr_mask="attention"`) or any
      (`"random"`), and regressed to `config.mfr_target`.

    The smallest spread of image tokens over a batch, the mean over features of their standard deviation, is kept in
    `spread_`; below 0.05 a `Collapse` warning is given.

    Args:
        model: trained in place.
        tasks: of `("mlm", "itm", "mfr")`.
        mfr_after: the share of steps before MFR begins; later is safer against collapse.
        steps, batch_size, lr, weight_decay, clip, warmup, optimizer: of training; lr above 1e-3 with
            `mfr_target="features"` has collapsed.
        device, precision, seed, progress: as everywhere.

    >>> from heedful.multimodal import VisualParsingConfig, VisualParsingModel
    >>> model = VisualParsingModel(VisualParsingConfig(hidden_size=32, num_hidden_layers=1, vision_layers=1, patch_size=16))
    >>> trainer = VLPretrainer(model, steps=3, batch_size=8, device="cpu", progress=False).fit(Shapes("easy", size=20))
    >>> len(trainer.training_.epochs), trainer.spread_ > 0.05
    (1, True)
    """

    def __init__(
        self,
        model: VisualParsingModel,
        tasks: Sequence[str] = TASKS,
        *,
        mfr_mask: Mask = "attention",
        mfr_tokens: int = 8,
        mfr_after: float = 0.0,
        mlm_probability: float = 0.3,
        weights: tuple[float, float, float] = (1.0, 1.0, 1.0),
        steps: int = 3000,
        batch_size: int = 256,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        clip: float | None = 1.0,
        warmup: float = 0.07,
        optimizer: str = "AdamW",
        seed: int = 0,
        device: str | torch.device = "auto",
        precision: Literal["auto", "float32", "bfloat16"] = "auto",
        progress: bool = True,
    ) -> None:
        if not isinstance(model, VisualParsingModel):
            raise InvalidArgument(f"model must be a VisualParsingModel; got {type(model).__name__}")
        unknown = [task for task in tasks if task not in TASKS]
        if unknown or not tasks or isinstance(tasks, str):
            raise InvalidArgument(f"tasks must be some of {', '.join(TASKS)}; got {tasks!r}")
        check_choice(Mask, mfr_mask=mfr_mask)
        check_whole(1, model.config.image_tokens if "mfr" in tasks else None, mfr_tokens=mfr_tokens)
        check_number(least=0, most=1, mfr_after=mfr_after, mlm_probability=mlm_probability)
        check_whole(steps=steps)
        self.model, self.tasks, self.mfr_mask, self.mfr_tokens = model, tuple(tasks), mfr_mask, mfr_tokens
        self.mfr_after, self.mlm_probability, self.weights = mfr_after, mlm_probability, weights
        self.steps, self.device, self.progress, self.seed = steps, device, progress, seed
        self._how: dict[str, Any] = {
            "batch_size": batch_size, "lr": lr, "optimizer": optimizer, "weight_decay": weight_decay, "clip": clip,
            "seed": seed, "schedule": "flat-cosine", "flat": 0.7, "warmup": warmup, "precision": precision,
        }  # fmt: skip

    def fit(
        self,
        data: Any,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        rounds: int = 1,
        after: Callable[[int], None] | None = None,
        checkpoint: Path | None = None,
    ) -> VLPretrainer:
        """Trains on a world, or on any Dataset.

        Args:
            data: a `Shapes` world, whose items are drawn on the device with noise, captions and foils that differ each
                time they are seen; `SceneCaptions`; or a Dataset whose batches, after `collate`, are `(pixel_values,
                input_ids)`: texts `(B, length)`, for which the text of the next picture in the batch is the rival, or
                `(B, 1 + rivals, length)`, the true one first; or those and a third tensor `(B, 1 + rivals)`, True at
                texts to be left out, as rivals that are true too.
            rounds: equal parts of the steps, after each of which `after(done)` is called and the checkpoint written; a
                Dataset's rounds are its epochs.
            checkpoint: as `train` takes it.
        """
        from heedful.bridges.training import train

        check_whole(1, self.steps, rounds=rounds)
        device = device_of(self.device)
        if isinstance(data, Shapes):
            data = SceneCaptions(Scenes.of([data.things(i) for i in range(len(data))]), preset=data.preset)
        batch = self._how["batch_size"]
        if isinstance(data, SceneCaptions):
            epochs = rounds
            data = data.stream(-(-self.steps // rounds) * batch, self.seed, device)
            collate = data.collate
        else:
            epochs = max(1, -(-self.steps * batch // len(data)))
        network = _Network(self)
        with bar(wanted=self.progress) as show:

            def move(done: int, total: int, what: str) -> None:
                show(done, total, what)
                if after is not None and done:
                    after(done)

            self.training_: Training = train(
                network,
                data,
                loss=lambda net, *parts: net(*parts),
                measure=lambda net, *parts: {"loss": net(*parts)[None]},
                hyperparameters=Hyperparameters(epochs=epochs, **self._how),
                device=device,
                collate=collate,
                progress=move,
                checkpoint=checkpoint,
            )
        self.spread_ = float(network.spread)
        self.losses_ = {name: float(value) for name, value in zip(TASKS, network.losses, strict=True)}
        if self.spread_ < COLLAPSED:
            warnings.warn(
                f"image tokens became nearly the same (spread {self.spread_:.3f}): the model sees nothing. Take lr <= 1e-3, "
                "mfr_after=0.2, or a config with mfr_target='ema' or 'pixels'",
                Collapse,
                stacklevel=2,
            )
        return self


class _Network(nn.Module):
    """The model with what its loss needs: a running mean of the vision model, and what is watched."""

    spread: Tensor
    losses: Tensor
    step: Tensor

    def __init__(self, how: VLPretrainer) -> None:
        super().__init__()
        self.model, self.how = how.model, how
        self.teacher = (
            deepcopy(how.model.vision).requires_grad_(False) if how.model.config.mfr_target == "ema" else None
        )
        self.register_buffer("spread", torch.tensor(torch.inf))
        # Running means of the losses, in the order of `TASKS`.
        self.register_buffer("losses", torch.full((3,), torch.nan))
        self.register_buffer("step", torch.tensor(0))

    def forward(self, pixel_values: Tensor, input_ids: Tensor, excluded: Tensor | None = None) -> Tensor:
        model, how = self.model, self.how
        mfr, mlm = "mfr" in how.tasks, "mlm" in how.tasks
        if input_ids.ndim == 2:
            input_ids = torch.stack((input_ids, input_ids.roll(1, 0)), 1)
        batch, texts, length = input_ids.shape
        attention = mfr and how.mfr_mask == "attention"
        seen = model.image_tokens(pixel_values, attention)
        features, weights = seen if attention else (seen, None)
        self._watch(features)
        rows = torch.arange(batch, device=features.device)
        rows = torch.cat((rows.repeat_interleave(texts), rows))
        words, labels = self._words(input_ids[:, 0])
        none = torch.zeros(batch, features.shape[1], dtype=torch.bool, device=features.device)
        hidden = self._hidden(weights, none) if mfr else none
        # Whole texts and hidden ones in one pass.
        parts = slice(None) if mfr or mlm else slice(batch * texts)
        ids = torch.cat((input_ids.flatten(0, 1), words))[parts]
        unseen = torch.cat((none.repeat_interleave(texts, 0), hidden))[parts] if mfr else None
        states, _ = model.fuse(features[rows[parts]], ids, hidden=unseen)
        whole, rest = states[: batch * texts], states[batch * texts :]
        losses = [features.new_zeros(())] * 3
        if mlm:
            losses[0] = words_loss(model.word_logits(rest[:, :length]), labels)
        if "itm" in how.tasks:
            losses[1] = match_loss(model.score(whole).view(batch, texts), excluded)
        if mfr:
            wanted = self._targets(pixel_values, features)
            begun = (self.step >= how.mfr_after * how.steps).float()
            losses[2] = begun * model.mfr_loss(rest[:, length:], wanted, hidden)
        self._keep(losses)
        return sum((weight * loss for weight, loss in zip(how.weights, losses, strict=True)), features.new_zeros(()))

    def _words(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        if "mlm" not in self.how.tasks:
            return ids, ids
        config = self.model.config
        return mask_words(
            ids,
            mask_id=config.mask_token_id,
            vocab_size=config.vocab_size,
            special=config.special_token_ids,
            probability=self.how.mlm_probability,
        )

    def _hidden(self, weights: Tensor | None, none: Tensor) -> Tensor:
        if weights is not None:
            return attention_mask_tokens(weights, self.how.mfr_tokens)
        return random_mask_tokens(len(none), none.shape[1], self.how.mfr_tokens, device=none.device)

    @torch.no_grad()
    def _targets(self, pixels: Tensor, features: Tensor) -> Tensor:
        if self.teacher is not None:
            if self.training:
                own: list[Tensor] = list(self.model.vision.parameters())
                means: list[Tensor] = list(self.teacher.parameters())
                torch._foreach_lerp_(means, own, 1 - DECAY)
            out = self.teacher(pixels)
            features = out if isinstance(out, Tensor) else out.last_hidden_state
        return self.model.targets(pixels, features)

    @torch.no_grad()
    def _watch(self, features: Tensor) -> None:
        spread = features.float().flatten(0, 1).std(0).mean()
        self.spread.copy_(torch.minimum(self.spread, spread))

    @torch.no_grad()
    def _keep(self, losses: list[Tensor]) -> None:
        now = torch.stack([loss.detach().float() for loss in losses])
        self.losses.copy_(torch.where(self.losses.isnan(), now, torch.lerp(self.losses, now, 0.02)))
        if self.training:
            self.step += 1


def match_loss(scores: Tensor, excluded: Tensor | None = None) -> Tensor:
    """ITM of scores `(B, texts)`, the true text first: both losses of `VLPretrainer`, averaged. `excluded` texts count in neither.

    >>> round(match_loss(torch.zeros(5, 2)).item(), 4)  # ln 2, the loss of guessing
    0.6931
    """
    there = torch.ones_like(scores, dtype=torch.bool) if excluded is None else ~excluded
    false = there[:, 1:].float()
    rivals = functional.softplus(scores[:, 1:]) * false
    each = (functional.softplus(-scores[:, 0]).mean() + rivals.sum() / false.sum().clamp(min=1)) / 2
    among = (scores.masked_fill(~there, -torch.inf).logsumexp(1) - scores[:, 0]).mean()
    return (each + among) / 2


class SceneCaptions:
    """Scenes with captions and their rivals, drawn anew each time they are seen.

    Three rivals stand beside each caption. Those of a relation are its inverse, its two objects exchanged, and half the
    time another picture's caption, else a wrong size, colour or shape; those of a place are two other places and the
    same third.

    Args:
        scenes: those to train on; None draws new ones for every batch.
        preset, objects, held_out: of new ones, as `Scenes.draw` takes them. Captions with a pair of `held_out` are left
            out among rivals too, so that nothing is learned of them.
        weights: of the kinds of captions, as `Scenes.captions` takes them.
        rivals: `"set"`, the three above, or `"one"`: half the time another picture's caption, else a foil of any kind.
        vocabulary, length: words by their numbers, and tokens of a text.
        glyphs: small pictures in place of shapes, as `Scenes.render` takes them.
        see: what the model takes of scenes, called with them and a generator; their pictures by default, as
            `pixel_values`.
    """

    def __init__(
        self,
        scenes: Scenes | None = None,
        *,
        preset: str = "full",
        objects: tuple[int, int] | None = None,
        held_out: Sequence[tuple[int, int]] = (),
        weights: Sequence[float] = (1, 1, 0, 0),
        vocabulary: Vocabulary | None = None,
        length: int = 16,
        glyphs: Tensor | None = None,
        rivals: Literal["set", "one"] = "set",
        see: Callable[[Scenes, torch.Generator], Tensor] | None = None,
    ) -> None:
        self.scenes, self.preset, self.objects, self.held_out = scenes, preset, objects, tuple(held_out)
        self.weights, self.length, self.glyphs, self.rivals_of = weights, length, glyphs, rivals
        self.vocabulary = vocabulary or Vocabulary()
        self.see = see or (lambda scenes, generator: pixel_values(scenes.render(generator, glyphs=self.glyphs)))

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many sizes, colours and shapes there are."""
        of = PRESETS[self.preset]
        own = self.vocabulary.shapes != SHAPES
        return of.sizes, of.colours, len(self.vocabulary.shapes) if own else of.shapes

    def stream(self, cases: int, seed: int, device: torch.device) -> SceneStream:
        """So many cases, on a device."""
        return SceneStream(self, cases, seed, device)

    def draw(self, count: int, generator: torch.Generator) -> Scenes:
        if self.scenes is not None:
            rows = torch.randint(len(self.scenes), (count,), generator=generator, device=generator.device)
            return self.scenes[rows]
        shapes = self.counts[2]
        return Scenes.draw(count, generator, preset=self.preset, objects=self.objects, held_out=self.held_out, shapes=shapes)  # fmt: skip

    def rivals(self, scenes: Scenes, captions: Captions, generator: torch.Generator) -> tuple[Captions, Tensor]:
        """The captions and the rivals of each, `(n, texts)` in a row, and which of them are no rivals: true, or about a pair that is held out."""
        count, device = len(captions), captions.numbers.device

        def share() -> Tensor:
            return torch.rand(count, generator=generator, device=device)

        attributes = [name for name, number in zip(("size", "colour", "shape"), self.counts, strict=True) if number > 1]
        which = _table(tuple(FOILS.index(name) for name in attributes), device)[(share() * len(attributes)).long()]
        place = FOILS.index("location")
        spatial = [torch.where(captions.located, place, FOILS.index(kind)) for kind in ("relation", "swap")]
        if self.rivals_of == "one":
            # One of an attribute's kinds or of those of places, all equally often.
            kinds = len(attributes) + torch.where(captions.located, 1, 2)
            other = torch.where(share() < 0.5, spatial[0], spatial[1])
            which = torch.where(share() * kinds < len(attributes), which, other)
        foil = captions.foils(which, generator, self.counts)
        last = Captions(torch.where((share() < 0.5)[:, None], captions.numbers.roll(1, 0), foil.numbers))
        parts = [] if self.rivals_of == "one" else [captions.foils(kind, generator, self.counts) for kind in spatial]
        every = torch.stack([captions.numbers, *(part.numbers for part in parts), last.numbers], 1)
        texts = every.shape[1]
        flat, rows = Captions(every.flatten(0, 1)), torch.arange(count, device=device).repeat_interleave(texts)
        away = flat.true(scenes[rows])
        if self.held_out:
            away |= flat.names(pairs_table(self.held_out, self.counts[1:], device))
        away = away.view(count, texts)
        away[:, 0] = False
        return flat, away

    def batch(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Pictures, texts `(count, 1 + rivals, length)`, and which of these to leave out."""
        scenes = self.draw(count, generator)
        captions = scenes.captions(generator, self.weights)
        texts, away = self.rivals(scenes, captions, generator)
        return (
            self.see(scenes, generator),
            texts.tokens(self.vocabulary, self.length).view(count, away.shape[1], -1),
            away,
        )


@cache
def _table(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers on a device, copied there once."""
    return torch.tensor(numbers, device=device)


@cache
def pairs_table(pairs: tuple[tuple[int, int], ...], sizes: tuple[int, int], device: torch.device) -> Tensor:
    """`(colours, shapes)`, True at these pairs."""
    table = torch.zeros(sizes, dtype=torch.bool)
    for colour, shape in pairs:
        table[colour, shape] = True
    return table.to(device)


class SceneStream(IterableDataset[int]):
    """Numbers of cases, which `collate` turns into batches of `SceneCaptions`."""

    def __init__(self, data: SceneCaptions, cases: int, seed: int, device: torch.device) -> None:
        self.data, self.cases, self.seed, self.epoch = data, cases, seed, 0
        self.generator = torch.Generator(device)
        self.ahead = AHEAD.get(device.type, 1)
        self.drawn: list[tuple[Tensor, ...]] = []
        if data.scenes is not None:
            parts = (data.scenes.things, data.scenes.there, data.scenes.jitter, data.scenes.background)
            data.scenes = Scenes(*(part.to(device) for part in parts))
        if data.glyphs is not None:
            data.glyphs = data.glyphs.to(device)

    def __len__(self) -> int:
        return self.cases

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.cases))

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.drawn = epoch, []

    def collate(self, cases: list[int]) -> tuple[Tensor, ...]:
        count = len(cases)
        if not self.drawn or len(self.drawn[-1][0]) != count:
            self.generator.manual_seed(mixed(self.seed, self.epoch, cases[0]))
            parts = self.data.batch(self.ahead * count, self.generator)
            self.drawn = list(zip(*(part.split(count) for part in parts), strict=True))[::-1]
        return self.drawn.pop()

"""How good a model of pictures and texts is: true captions beside foils, retrieval both ways, answers by the kind of the question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful._runtime import eval_mode
from heedful.multimodal.model import VisualParsingModel
from heedful.multimodal.scenes import Captions, Scenes, Vocabulary
from heedful.multimodal.worlds import FOILS

__all__ = ["foil_accuracy", "pair_accuracy", "retrieval"]

SPATIAL = ("relation", "swap", "location")


def pair_accuracy(right: Tensor, wrong: Tensor) -> float:
    """How often the true caption scores above its foil; a tie counts one half.

    >>> pair_accuracy(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0]))
    0.75
    """
    if right.shape != wrong.shape or not len(right):
        raise InvalidArgument(f"there must be as many true captions as foils, one or more; got {tuple(right.shape)} and {tuple(wrong.shape)}")  # fmt: skip
    return float(((right > wrong).double() + (right == wrong).double() / 2).mean())


@torch.no_grad()
def foil_accuracy(
    model: VisualParsingModel,
    pixel_values: Tensor,
    scenes: Scenes,
    *,
    kinds: Sequence[str] = FOILS,
    weights: Mapping[str, Sequence[float]] | None = None,
    about: Tensor | None = None,
    vocabulary: Vocabulary | None = None,
    counts: tuple[int, int, int] | None = None,
    length: int = 16,
    seed: int = 0,
    batch_size: int = 1024,
) -> dict[str, float]:
    """For each kind of `FOILS` how often a true caption of a scene scores above its foil.

    Captions are of relations for foils of `"relation"` and `"swap"`, of places for `"location"`, and of both for
    others; `weights` says otherwise. Foils that are true by accident do not count. `about`, `vocabulary`, `counts` and
    `length` are as `Scenes.captions`, `Captions.tokens` and `Captions.foils` take them.
    """
    device = pixel_values.device
    generator = torch.Generator(device).manual_seed(seed)
    found = {}
    with eval_mode(model):
        features = torch.cat([model.image_tokens(part) for part in pixel_values.split(batch_size)])
        for kind in kinds:
            usual = {"relation": (0, 1, 0, 0), "swap": (0, 1, 0, 0), "location": (1, 0, 0, 0)}.get(kind, (1, 1, 0, 0))
            captions = scenes.captions(generator, (weights or {}).get(kind, usual), about)
            foils = captions.foils(kind, generator, counts)
            fair = ~foils.true(scenes)
            scores = [
                _scores(model, features, texts, vocabulary, length, batch_size)[fair] for texts in (captions, foils)
            ]
            if fair.any():
                found[kind] = pair_accuracy(*scores)
    return found


def _scores(
    model: VisualParsingModel, features: Tensor, texts: Captions, vocabulary: Vocabulary | None, length: int, size: int
) -> Tensor:
    ids = texts.tokens(vocabulary, length)
    pairs = zip(features.split(size), ids.split(size), strict=True)
    return torch.cat([model.score(model.fuse(image, text)[0]) for image, text in pairs])


def retrieval(scores: Tensor, relevant: Tensor, at: Sequence[int] = (1, 5, 10)) -> dict[str, float]:
    """Recall at the first results, both ways, of scores `(pictures, texts)`: whether one of the first k is relevant, the mean over those that have one.

    >>> retrieval(torch.tensor([[2.0, 1.0], [3.0, 0.0]]), torch.eye(2).bool(), at=(1,))
    {'text to image R@1': 0.0, 'image to text R@1': 0.5}
    """
    if scores.shape != relevant.shape or scores.ndim != 2:
        raise InvalidArgument(f"scores and relevant must both be (pictures, texts); got {tuple(scores.shape)} and {tuple(relevant.shape)}")  # fmt: skip
    found = {}
    for name, values, good in (("text to image", scores.T, relevant.T), ("image to text", scores, relevant)):
        asked = good.any(1)
        order = values[asked].sort(dim=1, descending=True, stable=True).indices
        hits = good[asked].gather(1, order)
        for k in at:
            found[f"{name} R@{k}"] = float(hits[:, :k].any(1).double().mean())
    return found

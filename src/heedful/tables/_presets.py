"""Settings under one name: what a network of rows is made of, and how it is trained."""

from __future__ import annotations

from typing import Any

_PUBLISHED: dict[str, Any] = {
    "layers": 4,
    "embed_dim": 64,
    "num_heads": 8,
    "row_encoder": "flatten",
    "row_tokens": 4,
    "between_columns": True,
    "numbers": "linear",
    "linear": False,
    "start": 0.0,
    "votes": False,
    "residual": "linear",
    "norm_kv": True,
    "scale": "head",
    "eps": 1e-5,
    "expansion": 4,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "p_feature": 0.15,
    "p_target": 0.5,
    "noise": 0.1,
    "tradeoff": 1.0,
    "members": 1,
    "optimizer": "LookaheadLamb",
    "lr": 1e-3,
    "schedule": "flat-cosine",
    "flat": 0.7,
    "warmup": 0.0,
    "weight_decay": 0.0,
    "clip": None,
    "clip_value": 1.0,
    "epochs": 200,
    "patience": None,
}

PRESETS: dict[str, dict[str, Any]] = {
    # A small row vector instead of cells, a linear model and votes of stored rows, several members: seconds on a CPU.
    "fast": _PUBLISHED
    | {
        "layers": 2,
        "embed_dim": 16,
        "num_heads": 4,
        "row_encoder": "latent",
        "between_columns": False,
        "numbers": "periodic",
        "linear": True,
        "start": 0.3,
        "votes": True,
        "residual": "identity",
        "expansion": 2,
        "attention_dropout": 0.0,
        "noise": 0.0,
        "tradeoff": 0.2,
        "members": 5,
        "optimizer": "AdamW",
        "lr": 3e-3,
        "schedule": "cosine",
        "warmup": 0.05,
        "weight_decay": 1e-2,
        "clip": 3.0,
        "clip_value": None,
        "epochs": 20,
        "patience": 5,
    },
    # Cells and a few row tokens: the published layers at a hundredth of their parameters.
    "small": _PUBLISHED
    | {
        "layers": 3,
        "embed_dim": 32,
        "num_heads": 4,
        "row_encoder": "latent",
        "numbers": "periodic",
        "residual": "identity",
        "optimizer": "AdamW",
        "schedule": "cosine",
        "warmup": 0.05,
        "weight_decay": 1e-2,
        "clip": 1.0,
        "clip_value": None,
        "epochs": 60,
        "patience": 15,
    },
    # NPT-Base as the paper writes it, with labels of other rows to look at.
    "base": _PUBLISHED,
    # NPT as the authors' code runs it on small tables: keys and values not normalised, scores divided by the root of the whole width, no labels as inputs.
    "authors": _PUBLISHED | {"norm_kv": False, "scale": "width", "eps": 1e-12, "p_target": 1.0, "flat": 0.5},
}

# Where a preset trains otherwise for numbers than for classes: a number is to be met, not only its side of a boundary, so nothing is hidden or dropped, for longer.
NUMBERS: dict[str, dict[str, Any]] = {
    "fast": {"p_feature": 0.0, "dropout": 0.0, "lr": 6e-3, "epochs": 50, "patience": 10},
}

"""A stand-in for a model of sentences: words hashed to places of a vector, so that texts with the same words are near."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import numpy as np


class Words:
    """As `heedful.bridges.sentences.Sentences`, without a model; `read` is what it has encoded."""

    def __init__(self, dim=61):
        self.dim = dim
        self.name = f"bag of {dim}"
        self.digest = f"words{dim}"
        self.folder = Path("words")
        self.read = []

    def load(self):
        pass

    def encode(self, texts, *, kind="document", batch_size=32, progress=None):
        if kind == "document":
            self.read += texts
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for word in re.findall(r"\w+", text.lower()):
                vector[zlib.crc32(word.encode()) % self.dim] += 1
        if progress is not None:
            progress(len(texts), len(texts), "texts read")
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

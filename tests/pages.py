"""Reports without a model: observations made by hand, hostile tokens, a parser that insists on nested tags."""

from __future__ import annotations

from html.parser import HTMLParser

import torch

from heedful.lens import LookResult, ModelFacts, Section, Subject
from heedful.lens import maps as drawing
from heedful.lens._record import LayerRecord, Tokens
from heedful.lens.observation import Observation
from heedful.report import Prose

VOID = {"meta", "img", "br", "hr", "input", "link", "path", "rect", "circle", "line", "use", "polyline", "polygon"}
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    '"><img src=x onerror=alert(1)>',
    "'&amp;",
    "\u202eevil",
    "\x00\x1b[31m\n",
    "שלום",
    "👩🏽\u200d🚀",
    "x" * 200,
    "\ud800",
]


def observed(weights, tokens=None, *, kind="self", key_tokens=None, special=None, valid=None):
    """An observation of layers `[heads, Q, K]`, as if they were recorded."""
    q, k = weights[0].shape[-2:]
    tokens = tokens or [f"t{at}" for at in range(q)]

    def side(names, special=None, valid=None):
        none = torch.zeros(1, len(names), dtype=torch.bool)
        return Tokens(
            (tuple(names),),
            none if special is None else torch.tensor([special]),
            ~none if valid is None else torch.tensor([valid]),
        )

    records = [
        LayerRecord(
            at, f"layers.{at}.attention", kind, "decoder" if kind == "cross" else "input", 1, len(layer), len(layer), q, k,
            False, False, None, ("weights",), {}, {"weights": layer[None]},
        )
        for at, layer in enumerate(weights)
    ]  # fmt: skip
    sides = {"input": side(key_tokens or tokens, special, valid), "decoder": side(tokens)}
    return Observation(records, sides, model="Tiny", keep=("weights",))


def section_of(weights, tokens=None, **options) -> Section:
    return drawing.section(Subject(None, None, None, "text", observed(weights, tokens, **options)))


def result_of(made: Section, tokens=("a",), text="text") -> LookResult:
    facts = ModelFacts("/home/somebody/secret/tiny", "tiny", "Tiny", 2, 3, 1234, "float32", "sdpa")
    found = {"attention": made, "symmetry": "it needs <weights>", "depth": Section("Depth", [Prose("deep")])}
    return LookResult(facts, text, tuple(tokens), (False,) * len(tokens), 0, found)


def softmax(layers=2, heads=3, n=7, sharp=2.0):
    return [(sharp * torch.randn(heads, n, n)).softmax(-1) for _ in range(layers)]


class Tree(HTMLParser):
    """Every element with its attributes; raises where tags are not nested."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.found, self.text = [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} repeats an attribute"
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        here = self.open[-1] if self.open else ""
        self.text.setdefault(here, []).append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.found if name == tag]

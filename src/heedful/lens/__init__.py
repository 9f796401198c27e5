"""Lenses: reading what attention does inside a model somebody already has."""

from heedful.lens.attention import AttentionSummary, HeadSummary, TokenPair, summarize
from heedful.lens.report import LookResult, ModelFacts, look

__all__ = ["AttentionSummary", "HeadSummary", "LookResult", "ModelFacts", "TokenPair", "look", "summarize"]

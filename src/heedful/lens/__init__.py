"""Lenses: reading what attention does inside a model somebody already has."""

from heedful.lens.attention import AttentionSummary, HeadSummary, TokenPair, summarize

__all__ = ["AttentionSummary", "HeadSummary", "TokenPair", "summarize"]

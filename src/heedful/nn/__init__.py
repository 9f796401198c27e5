"""Layers that learn: attention with any kernel, with knowledge, in blocks and encoders."""

from heedful.nn._module import KernelParameters, Module
from heedful.nn.attention import Attention
from heedful.nn.block import Block
from heedful.nn.encoder import Encoder
from heedful.nn.knowledge import Coefficients, KnowledgeAttention
from heedful.nn.pair import PairAttention

__all__ = [
    "Attention",
    "Block",
    "Coefficients",
    "Encoder",
    "KernelParameters",
    "KnowledgeAttention",
    "Module",
    "PairAttention",
]

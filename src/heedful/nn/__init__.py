"""Layers that learn: attention with any kernel, with knowledge, in primal form, in blocks and encoders."""

from heedful.nn._describe import Primal
from heedful.nn._module import KernelParameters, Module
from heedful.nn._primal_results import PrimalDual, PrimalScores
from heedful.nn.attention import Attention
from heedful.nn.block import Block
from heedful.nn.encoder import Encoder
from heedful.nn.knowledge import Coefficients, KnowledgeAttention
from heedful.nn.pair import PairAttention
from heedful.nn.primal import PrimalAttention, PrimalState, PrimalStep
from heedful.nn.primal_core import ksvd_loss
from heedful.nn.uncertainty import GaussianProcessAttention, Marginal, Prediction, kl_loss, mc_predict

__all__ = [
    "Attention",
    "Block",
    "Coefficients",
    "Encoder",
    "GaussianProcessAttention",
    "KernelParameters",
    "KnowledgeAttention",
    "Marginal",
    "Module",
    "PairAttention",
    "Prediction",
    "Primal",
    "PrimalAttention",
    "PrimalDual",
    "PrimalScores",
    "PrimalState",
    "PrimalStep",
    "kl_loss",
    "ksvd_loss",
    "mc_predict",
]

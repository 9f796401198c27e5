"""Layers that learn: attention with any kernel, with knowledge, in primal form, in blocks and encoders."""

from heedful.nn._describe import Knowledge, Pairs, Primal, Timed
from heedful.nn._frequencies import as_period
from heedful.nn._module import Coefficients, KernelParameters, Module
from heedful.nn._primal_results import PrimalDual, PrimalScores
from heedful.nn._time_results import TimeSpectrum
from heedful.nn.attention import Attention
from heedful.nn.block import Block, Evolved
from heedful.nn.clocks import LinearTime, PositionTime, TGATTime, Time2Vec, time_encoding
from heedful.nn.datapoint import ColumnAttention, DatapointAttention
from heedful.nn.datapoint_block import DatapointBlock, Remembered, authors_state
from heedful.nn.encoder import Encoder
from heedful.nn.invariant import GramCoefficients, InvariantCoefficients, VectorsAndScalars
from heedful.nn.knowledge import KnowledgeAttention
from heedful.nn.mercer import MercerTime
from heedful.nn.pair import PairAttention, PairFunctions
from heedful.nn.positions import Positions
from heedful.nn.primal import PrimalAttention, PrimalState, PrimalStep
from heedful.nn.primal_core import ksvd_loss
from heedful.nn.time import BochnerTime, PeriodicTime, TimeEncoding
from heedful.nn.time_attention import TimeAttention
from heedful.nn.token import TokenAttention
from heedful.nn.uncertainty import GaussianProcessAttention, Marginal, Prediction, kl_loss, mc_predict

__all__ = [
    "Attention",
    "Block",
    "BochnerTime",
    "Coefficients",
    "ColumnAttention",
    "DatapointAttention",
    "DatapointBlock",
    "Encoder",
    "Evolved",
    "GaussianProcessAttention",
    "GramCoefficients",
    "InvariantCoefficients",
    "KernelParameters",
    "Knowledge",
    "KnowledgeAttention",
    "LinearTime",
    "Marginal",
    "MercerTime",
    "Module",
    "PairAttention",
    "PairFunctions",
    "Pairs",
    "PeriodicTime",
    "PositionTime",
    "Positions",
    "Prediction",
    "Primal",
    "PrimalAttention",
    "PrimalDual",
    "PrimalScores",
    "PrimalState",
    "PrimalStep",
    "Remembered",
    "TGATTime",
    "Time2Vec",
    "TimeAttention",
    "TimeEncoding",
    "TimeSpectrum",
    "Timed",
    "TokenAttention",
    "VectorsAndScalars",
    "as_period",
    "authors_state",
    "kl_loss",
    "ksvd_loss",
    "mc_predict",
    "time_encoding",
]

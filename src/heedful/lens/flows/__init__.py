"""How kinds of tokens attend to one another: text and picture, speech and text, question and context."""

from heedful.lens.flows.causal import CausalCheck, HeadEffect, causal_check
from heedful.lens.flows.measure import flow, received
from heedful.lens.flows.result import Crossing, Flow, HeadFlow, LayerFlow

__all__ = ["CausalCheck", "Crossing", "Flow", "HeadEffect", "HeadFlow", "LayerFlow", "causal_check", "flow", "received"]

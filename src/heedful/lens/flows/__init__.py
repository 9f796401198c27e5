"""How kinds of tokens attend to one another: text and picture, speech and text, question and context."""

from heedful.lens.flows.measure import flow
from heedful.lens.flows.result import Crossing, Flow, HeadFlow, LayerFlow

__all__ = ["Crossing", "Flow", "HeadFlow", "LayerFlow", "flow"]

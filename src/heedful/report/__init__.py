"""What people see: blocks that a lens is told in, and the terminal, the page and the pictures that are made of them."""

from heedful.report.blocks import *  # noqa: F403
from heedful.report.blocks import __all__ as __all__

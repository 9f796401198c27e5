"""Text that is installed with every Python: its handbook, and the docstrings of its library."""

from __future__ import annotations

import re
import sysconfig
from functools import lru_cache
from importlib import import_module
from pathlib import Path

DOCSTRING = re.compile(r'(?s)(?<![\w"])[rRuU]?"""(.*?)"""')
SOURCE = "Python's handbook and docstrings"


@lru_cache(maxsize=1)
def installed_texts() -> tuple[str, ...]:
    """The texts, about 400,000 tokens of technical English, in an order that the machine does not change."""
    topics = import_module("pydoc_data.topics").topics
    texts = [topics[name] for name in sorted(topics)]
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts += DOCSTRING.findall(file.read_text(encoding="utf-8", errors="ignore"))
    return tuple(text for text in texts if text.count(" ") > 3)

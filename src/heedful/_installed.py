"""Text that is installed here anyway: what comes with every Python, and everyday English where a package brings some."""

from __future__ import annotations

import re
import sysconfig
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

DOCSTRING = re.compile(r'(?s)(?<![\w"])[rRuU]?"""(.*?)"""')
SOURCE = "Python's handbook and docstrings"
# Where Debian's package wordnet-base lies.
WORDNET = Path("/usr/share/wordnet")


@lru_cache(maxsize=1)
def installed_texts() -> tuple[str, ...]:
    """Python's handbook and the docstrings of its library, in an order that the machine does not change.

    About 200,000 words of technical English.
    """
    topics = import_module("pydoc_data.topics").topics
    texts = [topics[name] for name in sorted(topics)]
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts += DOCSTRING.findall(file.read_text(encoding="utf-8", errors="ignore"))
    return tuple(text for text in texts if text.count(" ") > 3)


def everyday_texts() -> tuple[tuple[str, ...], str]:
    """English texts and what they are: definitions of WordNet, news that gensim carries, or else `installed_texts`."""
    definitions = _definitions()
    if definitions:
        return definitions, "WordNet's definitions"
    package = find_spec("gensim")
    news = (
        Path(package.origin).parent / "test" / "test_data" / "lee_background.cor"
        if package and package.origin
        else None
    )
    if news is not None and news.is_file():
        return tuple(news.read_text(encoding="utf-8", errors="replace").splitlines()), "news that gensim carries"
    return installed_texts(), SOURCE


def _definitions() -> tuple[str, ...]:
    lines = (
        line.partition(" | ")
        for file in sorted(WORDNET.glob("data.*"))
        for line in file.read_text(encoding="latin-1").splitlines()
    )
    return tuple(definition for _, _, definition in lines if definition)

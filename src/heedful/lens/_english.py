"""English words of the closed classes, which a list can hold."""

from __future__ import annotations

_ARTICLES = "a an the"
_PERSONAL = "he she it they him her them his hers its their theirs himself herself itself themselves"
_OTHER_PRONOUNS = "i you we me us my your our mine yours ours who whom whose which what this that these those"
_PREPOSITIONS = (
    "about above across after against along among around at before behind below between by down during except for from in into like near of "
    "off on onto out over past through till to toward towards under until up upon with within without"
)
_OTHERS = (
    "some any no not every each all both when where why how and or but nor so yet if because although though while since as than then there "
    "here am is are was were be been being do does did doing done have has had having can could may might must shall should will would "
    "too very just only also even still never always again don't doesn't didn't isn't aren't wasn't weren't can't couldn't won't wouldn't"
)

ARTICLES = frozenset(_ARTICLES.split())
PREPOSITIONS = frozenset(_PREPOSITIONS.split())
# Pronouns that stand for a word of the text.
PERSONAL = frozenset(_PERSONAL.split())
PRONOUNS = PERSONAL | frozenset(_OTHER_PRONOUNS.split())
PUNCTUATION = frozenset(".,;:!?")
# Every word that is no content word.
FUNCTION = ARTICLES | PREPOSITIONS | PRONOUNS | frozenset(_OTHERS.split())

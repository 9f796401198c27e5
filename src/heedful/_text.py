"""Numbers with their nouns, and text that is safe to print."""

from __future__ import annotations


def quantity(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun, singular for one.

    >>> quantity(1, "edge"), quantity(0, "edge"), quantity(1204, "matrix", "matrices")
    ('1 edge', '0 edges', '1,204 matrices')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def with_article(noun: str) -> str:
    """A noun with its article, by its first letter.

    >>> with_article("InContextClassifier"), with_article("SeriesClassifier")
    ('an InContextClassifier', 'a SeriesClassifier')
    """
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def short(count: int) -> str:
    """A large number in words.

    >>> short(22_713_216)
    '22.7 million'
    """
    for size, unit in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


def cut(text: str, most: int) -> str:
    """A text of so many signs at most.

    >>> cut("a long sentence", 9)
    'a long...'
    """
    return text if len(text) <= most else f"{text[: most - 3]}..."


def printable(text: str) -> str:
    """A text on one line, with nothing in it that does not print.

    >>> printable("a\\u202eb")
    'a\\\\u202eb'
    """
    # Joiners, which print nothing, are letters of Persian and Hindi, and hold emoji together.
    return "".join(sign if sign.isprintable() or sign in "\u200c\u200d" else repr(sign)[1:-1] for sign in text)

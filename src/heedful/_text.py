"""Numbers and the nouns behind them."""

__all__ = ["quantity"]


def quantity(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun, singular for one.

    >>> quantity(1, "edge"), quantity(0, "edge"), quantity(1204, "matrix", "matrices")
    ('1 edge', '0 edges', '1,204 matrices')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"

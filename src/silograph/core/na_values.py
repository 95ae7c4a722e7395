"""Declared missing values as one text, as the command line and run files have them."""

from typing import Any


def parse_na_values(value: Any) -> Any:
    """Return words and numbers as one text; other values as they are.

    >>> parse_na_values([-999, "unknown"])
    '-999,unknown'
    """
    if isinstance(value, list | tuple) and all(isinstance(v, str | int | float) for v in value):
        return ",".join(str(word) for word in value)
    return value


def na_words(text: str | None) -> list[str] | None:
    """Return the words of a parsed text; None for None."""
    return None if text is None else text.split(",")

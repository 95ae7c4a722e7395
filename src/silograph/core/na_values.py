"""Declared missing values: words and numbers, or one text as the command line has them."""

import json
from collections.abc import Iterable
from typing import Any


def parse_na_values(value: Any) -> Any:
    """Return words and numbers as one text, from which `na_words` makes them; else the value.

    >>> parse_na_values([-999, "unknown"]), parse_na_values(["no, thanks"])
    ('-999,unknown', '["no, thanks"]')
    """
    if not isinstance(value, list | tuple):
        return value
    if any(isinstance(v, bool) or not isinstance(v, str | int | float) for v in value):
        return value
    words = [str(word) for word in value]
    text = ",".join(words)
    return text if na_words(text) == words else json.dumps(words, ensure_ascii=False)


def na_words(values: str | Iterable[Any]) -> list[Any]:
    """Return the words of a text, with commas between them or as a JSON list; a list as it is.

    >>> na_words("-999,unknown"), na_words('["no, thanks"]'), na_words([-9])
    (['-999', 'unknown'], ['no, thanks'], [-9])
    """
    if not isinstance(values, str):
        return list(values)
    if values.startswith("["):
        try:
            words = json.loads(values)
        except ValueError:  # a word that begins so
            words = None
        if isinstance(words, list):
            return words
    return values.split(",")

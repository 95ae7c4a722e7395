"""Widths of hidden layers as users write them: one for all, or one for each."""

import re
from typing import Any

from pydantic_core import PydanticCustomError

from silograph.core.errors import ConfigError

LAYERS = 2  # with weights, where nothing says how many
HIDDEN = 128  # width of the hidden layers, likewise
MOST_LAYERS = 1000  # of a list of widths
MOST_DIGITS = 18


def parse_widths(value: Any) -> Any:
    """Return a number, the width of all hidden layers, or a text that has one for each.

    >>> parse_widths("64"), parse_widths([256, 128]), parse_widths("256, 128"), parse_widths([64])
    (64, '256,128', '256,128', '64,')
    """
    if value is None:
        return None
    if isinstance(value, list | tuple):
        value = ",".join(str(width) for width in value[: MOST_LAYERS + 1]) + "," * (len(value) == 1)
    if isinstance(value, int) and 1 <= value < 10**MOST_DIGITS:
        return value
    words = [word.strip() for word in str(value).split(",", MOST_LAYERS + 1)]
    one = len(words) == 1
    if len(words) > 1 and not words[-1]:  # a list of one ends with a comma
        words.pop()
    if len(words) > MOST_LAYERS or not all(
        re.fullmatch(rf"0*[1-9][0-9]{{0,{MOST_DIGITS - 1}}}", word) for word in words
    ):
        raise PydanticCustomError(
            "widths", "expected a width of 1 or more, or one for each hidden layer such as 256,128"
        )
    found = [int(word) for word in words]
    if one:
        return found[0]
    return ",".join(str(width) for width in found) + "," * (len(found) == 1)


def shortest(hidden: int | str | None) -> int | str:
    """Return hidden widths, written as one width where all are equal: that is the same model.

    >>> shortest("64,64"), shortest("64,"), shortest("64,32"), shortest(None)
    (64, 64, '64,32', 128)
    """
    if hidden is None:
        return HIDDEN
    widths = {hidden} if isinstance(hidden, int) else set(_listed(hidden))
    return widths.pop() if len(widths) == 1 else hidden


def num_layers(hidden: int | str | None, layers: int | None) -> int:
    """Return the number of layers with weights; a list of hidden widths has one less.

    Raises:
        ConfigError: both say it, and differ.
    """
    if hidden is None or isinstance(hidden, int):
        return LAYERS if layers is None else layers
    found = len(_listed(hidden)) + 1
    if layers is not None and layers != found:
        raise ConfigError(
            f"expected {found} layers with hidden={hidden}, got {layers}: leave layers out, or "
            "give one width for all"
        )
    return found


def hidden_widths(hidden: int | str | None, layers: int | None) -> tuple[int, ...]:
    """Return the width of every hidden layer.

    Raises:
        ConfigError: not as many as the layers need.
    """
    count, hidden = num_layers(hidden, layers), HIDDEN if hidden is None else hidden
    return (hidden,) * (count - 1) if isinstance(hidden, int) else _listed(hidden)


def _listed(hidden: str) -> tuple[int, ...]:
    return tuple(int(width) for width in hidden.split(",") if width)

"""The scale of a table of ratings as one text, as the command line and run files have it."""

import math
from typing import Any

from pydantic_core import PydanticCustomError


def parse_rating_scale(value: Any) -> str | None:
    """Return the least and the largest rating as a text; None for None.

    >>> parse_rating_scale("0.5, 5"), parse_rating_scale((1, 10))
    ('0.5,5.0', '1.0,10.0')
    """
    if value is None:
        return None
    words = value.split(",") if isinstance(value, str) else value
    try:
        low, high = map(float, words if isinstance(words, list | tuple) else ())
    except (TypeError, ValueError, OverflowError):
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise PydanticCustomError(
            "rating_scale", "expected the least and the largest rating, such as 0.5,5"
        )
    return f"{low!r},{high!r}"


def ends_of(scale: str | None) -> tuple[float, float] | None:
    """Return the least and the largest rating of a parsed text; None for None."""
    if scale is None:
        return None
    low, _, high = scale.partition(",")
    return float(low), float(high)

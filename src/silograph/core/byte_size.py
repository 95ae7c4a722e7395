"""Numbers of bytes as users write them."""

import re
from decimal import Decimal
from typing import Any

from pydantic_core import PydanticCustomError

UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(value: Any) -> Any:
    """Return the bytes that a text such as `10MB` says; what is no text is left as it is.

    >>> parse_bytes("10MB"), parse_bytes("1.5 kB"), parse_bytes(7)
    (10000000, 1500, 7)
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?(B|kB|MB|GB|)", value.strip())
    if found is None:
        raise PydanticCustomError(
            "bytes", "expected a number of bytes, or of kB, MB or GB such as 10MB"
        )
    return int(Decimal(found[1]) * UNITS[found[2]])  # decimal, so that 0.3 kB is 300

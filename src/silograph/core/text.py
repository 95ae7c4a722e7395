"""Text and values that others wrote, made safe to show."""

import math
import re

MOST_SHOWN = 120  # characters of a value


def printable(text: str) -> str:
    r"""Return a text as one line that cannot steer a terminal or look like another line.

    >>> printable("a\nb\x1b[2J")
    'a?b?[2J'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def shown(value: object) -> str:
    """Return a value as one short line for an error; it may be an array.

    >>> shown("metis"), len(shown([0] * 1000))
    ("'metis'", 123)
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def counted(number: int, noun: str) -> str:
    """Return a number of things in words; the noun's plural has an s more.

    >>> counted(1, "edge"), counted(2000, "such node")
    ('1 edge', '2,000 such nodes')
    """
    return f"{number:,} {noun if number == 1 else f'{noun}s'}"


def decimals(value: float, digits: int) -> str:
    """Return a number with so many decimals; with more where it would have one digit or none.

    >>> decimals(1234.567, 1), decimals(0.004321, 1), decimals(0.0, 1)
    ('1,234.6', '0.0043', '0.0')
    """
    if digits and 0 < abs(value) < 10**-digits:
        digits = 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{digits}f}"


def in_path(text: str) -> str:
    """Return a name as a part of a path: other than letters, digits and "._-", signs are "-".

    >>> in_path("../a b")
    'a-b'
    """
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "unnamed"

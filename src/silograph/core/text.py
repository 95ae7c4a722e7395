"""Text that others wrote, made safe to show."""

import re


def printable(text: str) -> str:
    r"""Return a text as one line that cannot steer a terminal or look like another line.

    >>> printable("a\nb\x1b[2J")
    'a?b?[2J'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def in_path(text: str) -> str:
    """Return a name as a part of a path: other than letters, digits and "._-", signs are "-".

    >>> in_path("../a b")
    'a-b'
    """
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "unnamed"

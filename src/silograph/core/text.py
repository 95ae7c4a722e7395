"""Text that others wrote, made safe to show."""


def printable(text: str) -> str:
    r"""Return a text as one line that cannot steer a terminal or look like another line.

    >>> printable("a\nb\x1b[2J")
    'a?b?[2J'
    """
    return "".join(c if c.isprintable() else "?" for c in text)

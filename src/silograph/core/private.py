"""Files that only their owner may read."""

import os


def opens_private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file as `open` does; where it is made only its owner may read it."""
    return os.open(path, flags, 0o600)

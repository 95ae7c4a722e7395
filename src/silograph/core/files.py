"""Files that are there whole or not at all, and files that only their owner may read."""

import os
from pathlib import Path


def opens_private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file as `open` does; where it is made only its owner may read it."""
    return os.open(path, flags, 0o600)


def write_atomic(path: Path, data: str | bytes, *, private: bool = False) -> None:
    """Write a file so that it is there whole or not at all, also after a crash.

    Args:
        path: of the file.
        data: that it holds; a text is written as UTF-8, line ends as they are.
        private: whether only its owner may read it.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb", opener=opens_private if private else None) as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise

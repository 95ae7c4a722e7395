"""A silo's own folder: for its owner only, and for one process at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from silograph.core.errors import ConfigError
from silograph.core.files import hold_folder


def make_private(folder: Path) -> None:
    """Make a folder that only its owner may enter; one that is there stays as it is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder, made if need be; the system lets go of it when this process dies.

    Raises:
        ConfigError: another process holds it, or it cannot be made.
    """
    try:
        make_private(folder)
        lock = hold_folder(folder)
    except OSError as error:
        raise ConfigError(f"expected to write {folder}, got: {error.strerror}") from None
    if lock is None:
        raise ConfigError(
            f"expected one process for the state in {folder}, got another that holds it: stop "
            "it first"
        )
    try:
        yield
    finally:
        os.close(lock)

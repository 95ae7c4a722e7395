"""An audit file on the disk: begun or continued, by one process."""

import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from silograph.core.errors import ConfigError
from silograph.core.text import counted
from silograph.federation.session.audit import MOST_FILE, Audit, full_file
from silograph.federation.session.audit_chain import read_audit


@contextmanager
def open_audit(path: Path | None, about: Mapping[str, str]) -> Iterator[tuple[Audit, str]]:
    """Continue an audit file, or begin it, and say how; no other process can meanwhile.

    Args:
        path: of the file; None only counts, and says nothing.
        about: facts of every agreement: the server, its authority, the policy's digest.

    Raises:
        ConfigError: the file cannot be written, is held by another process, or was changed.
    """
    if path is None:
        yield Audit(about=about), ""
        return
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"expected to write {path}, got: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):  # a pipe would never be read to its end
            raise ConfigError(f"expected a file at {path}, got something else")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"expected one process that writes {path}, got another one: stop it first"
            ) from None
        yield _continued(path, file, about)
    finally:
        os.close(file)


def _continued(path: Path, file: int, about: Mapping[str, str]) -> tuple[Audit, str]:
    """Return what goes on behind the last whole line, once what is torn behind it is cut off."""
    with os.fdopen(os.dup(file), "rb") as reader:
        reader.seek(0)
        found = read_audit(reader)
    broken, size = found.broken, os.fstat(file).st_size
    if broken is not None and broken.is_older:
        raise ConfigError(
            f"expected {path} as this version writes it, got {broken}: keep it, that version can "
            "check it, and move it away; the next start begins a new one"
        )
    if broken is not None and not broken.is_torn:
        raise ConfigError(
            f"expected {path} as this silo wrote it, got other contents in {broken}: keep it and "
            "move it away, the next start begins a new one (docs/federation.md)"
        )
    torn = 0 if broken is None else size - broken.whole
    if size - torn >= MOST_FILE:
        raise ConfigError(full_file(str(path)))
    if torn:
        os.ftruncate(file, size - torn)
    runs = {run.run: run for run in found.runs}
    audit = Audit(file, about, runs, found.head, size - torn)
    note = f"{path} has {counted(found.lines, 'line')}, each as it was written"
    if torn:
        audit.add("torn", {"line": found.lines + 1, "bytes": torn}, force=True)
        note += (
            f"; {counted(torn, 'byte')} of a line without an end were cut off, and a line says so"
        )
    return audit, note

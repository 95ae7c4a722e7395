"""Files that are there whole or not at all, that only their owner may read, and held folders."""

import csv
import fcntl
import io
import os
import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from silograph.core.errors import ConfigError, DataError, SilographError, mistake

SPECIAL_FILES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def opens_private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file as `open` does; where it is made only its owner may read it."""
    return os.open(path, flags, 0o600)


def describe_exposure(path: Path) -> str | None:
    """Return one line on a secret file or folder that other users can read; None if none can.

    A file that does not exist is not exposed.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    if not status.st_mode & 0o077:
        return None
    mode = "700" if stat.S_ISDIR(status.st_mode) else "600"
    return (
        f"other users can read {path} (mode {stat.S_IMODE(status.st_mode):03o}): "
        f"chmod {mode} {shlex.quote(str(path))}"
    )


def check_regular(
    path: str | os.PathLike[str],
    expected: str = "a regular file",
    error_type: type[SilographError] = DataError,
) -> None:
    """Raise an error for something at a path that is no regular file; nothing may be there.

    To open a FIFO would wait for its writer, and a device may never end. Links are followed.

    Args:
        path: to be opened.
        expected: what the file is, for the message.
        error_type: class of the error.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:  # whoever opens it says why it cannot be read
        return
    if not stat.S_ISREG(mode):
        kind = SPECIAL_FILES.get(stat.S_IFMT(mode), "something else")
        raise error_type(
            f"expected {expected} at {os.fspath(path)}, got {kind}: remove it, or put the file "
            "itself there",
            **mistake("wrong-format", path),
        )


def write_atomic(path: Path, data: str | bytes, *, private: bool = False) -> None:
    """Write a file so that it is there whole or not at all, also after a power failure.

    Args:
        path: of the file.
        data: that it holds; a text is written as UTF-8, line ends as they are. Half a surrogate
            pair, which JSON of others may have and UTF-8 has not, is written as its number.
        private: whether only its owner may read it.
    """
    partial = path.with_name(path.name + ".partial")
    with replacing(path, partial, private=private) as file:
        file.write(data.encode(errors="backslashreplace") if isinstance(data, str) else data)


@contextmanager
def replacing(
    path: Path, partial: Path, *, private: bool = False, synced: bool = True
) -> Iterator[IO[bytes]]:
    """Have a file written at `partial`, which is at `path` once the block has ended well.

    Args:
        path: of the file.
        partial: where it is until then, in the same folder; nothing is left of it.
        private: as for `write_atomic`.
        synced: whether it survives a power failure.
    """
    try:
        partial.unlink(missing_ok=True)  # a link there would be written through
        with open(partial, "xb", opener=opens_private if private else None) as file:
            yield file
            if synced:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if synced:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names of a folder's files on the disk; what the files hold is not synced by it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hold_folder(folder: Path) -> int | None:
    """Hold a folder until the descriptor that is returned is closed, or this process dies.

    The folder itself is locked: a lock on a file in it would be lost where the file is replaced.

    Returns:
        The descriptor; None where another process, or another descriptor, holds the folder.

    Raises:
        OSError: the folder cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


# --- Tables as CSV, whose names may come from anybody: from silos, or from data of others --------
#
# A spreadsheet runs a cell that begins with `=`, `+`, `-` or `@`, also behind a tab or a return.
# Such a name is written behind an apostrophe, as spreadsheets write text; numbers stay as they
# are.


_FORMULA = re.compile(r"'*[=+\-@\t\r]")


def to_cell(value: object) -> object:
    """Return a value as a cell has it.

    >>> to_cell("=1+1"), to_cell(-1), to_cell("-1.5"), to_cell("client_0")
    ("'=1+1", -1, '-1.5', 'client_0')
    """
    if isinstance(value, str) and _FORMULA.match(value) and not _is_number(value):
        return f"'{value}"
    return value


def from_cell(cell: str) -> str:
    """Return the name that a cell stands for; `to_cell` undone.

    >>> from_cell("'=1+1"), from_cell("'quoted'")
    ('=1+1', "'quoted'")
    """
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def check_new_file(out: Path) -> None:
    """Raise `ConfigError` for a file to write that exists, or whose folder does not."""
    if os.path.lexists(out):
        raise ConfigError(
            f"expected a file that does not exist yet, got {out}: choose another --out, nothing "
            "was overwritten",
            **mistake("existing-output", out),
        )
    if not out.parent.is_dir():
        raise ConfigError(
            f"expected an existing folder for --out, got {out.parent}",
            **mistake("unwritable-path", out.parent),
        )


def to_text(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV, names written so that no spreadsheet runs them."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    quoting_writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for row in rows:
        cells = [to_cell(value) for value in row]
        # Python 3.11 leaves a lone return unquoted, where readers see the end of a line.
        (quoting_writer if any("\r" in str(cell) for cell in cells) else writer).writerow(cells)
    return text.getvalue()

"""Contents of files: unpacked where gzip has packed them, and never more than memory can hold."""

import gzip
import io
import os
import zlib
from pathlib import Path

from silograph.core.errors import DataError, mistake, read_mistake

GZIP = b"\x1f\x8b"  # the first bytes of a gzip file
OTHER_KINDS = (  # files that are often renamed to .csv, by their first bytes
    (b"PAR1", "a Parquet file", "let its name end with .parquet"),
    (b"PK\x03\x04", "an archive or workbook", "save it as CSV"),
)
# Bytes of memory for each byte of text, the least that was measured: a table of features takes 12,
# a list of edges 25.
PER_BYTE = 10


def memory_left() -> int:
    """Return the bytes of memory that are free, or all where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = next(line.split() for line in lines if line.startswith("MemAvailable:"))
        return int(fields[1]) << 10
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def ending_of(path: Path) -> str:
    """Return the ending of a file's name in lower case, with `.gz` where that follows another.

    >>> ending_of(Path("a.b/Nodes.CSV.gz")), ending_of(Path("a.npz")), ending_of(Path("a.gz"))
    ('.csv.gz', '.npz', '.gz')
    """
    ending = path.suffix.lower()
    return path.with_suffix("").suffix.lower() + ending if ending == ".gz" else ending


def stem_of(path: Path) -> str:
    """Return a file's name without its ending, see `ending_of`."""
    return path.name[: len(path.name) - len(ending_of(path))]


def read_contents(path: Path, expected: str, per_byte: int = PER_BYTE) -> bytes:
    """Return the bytes of a file, unpacked if they are a gzip file, whatever its name.

    A few kilobytes can hold gigabytes, so unpacking stops at what memory can hold.

    Args:
        path: the file.
        expected: what it should be, for errors.
        per_byte: bytes of memory that its reader takes for each byte.

    Raises:
        DataError: the file is absent, damaged, or too large for the memory that is free.
    """
    most = memory_left() // per_byte
    try:
        size = path.stat().st_size
        is_pipe = path.exists() and not path.is_file() and not path.is_dir()
        if is_pipe:  # or a device: it would be waited for
            raise DataError(
                f"{path}: expected {expected}, got no file that can be read whole",
                **mistake("unreadable-file", path),
            )
        raw = path.read_bytes() if size <= most else b""
    except OSError as error:
        raise DataError(
            f"{path}: expected {expected}, got {error.strerror}", **read_mistake(error, path)
        ) from None
    if raw[:2] == GZIP:
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
                raw = file.read(most + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path}: expected {expected}, packed by gzip, got a damaged file ({error}): copy "
                "or pack it again",
                **mistake("damaged-file", path),
            ) from None
        size = len(raw)
    if size > most:
        got = "more once unpacked" if raw else f"{size:,}"
        raise DataError(
            f"{path}: expected {expected} of at most {most:,} bytes, as reading takes at least "
            f"{per_byte} bytes of memory for each, got {got}: use a machine with more memory, or "
            "smaller data",
            **mistake("too-large", path),
        )
    return raw


def read_text(
    path: Path, expected: str, per_byte: int = PER_BYTE, encoding: str = "utf-8-sig"
) -> str:
    """Return the text of a file, see `read_contents`.

    Args:
        path: the file.
        expected: what it is, for errors.
        per_byte: as there.
        encoding: of the text; UTF-8 may begin with a byte order mark, as spreadsheets write it.

    Raises:
        DataError: as there; a Parquet file, archive or workbook; an unknown encoding; or bytes that
            are none of it, named with their line.
    """
    raw = read_contents(path, expected, per_byte)
    for mark, kind, remedy in OTHER_KINDS:
        if raw.startswith(mark):
            raise DataError(
                f"{path}: expected {expected}, got {kind}: {remedy}",
                **mistake("wrong-format", path),
            )
    try:
        return raw.decode(encoding)
    except LookupError:
        raise DataError(f"expected the name of an encoding, got {encoding!r}") from None
    except UnicodeDecodeError as error:
        line, name = raw[: error.start].count(b"\n") + 1, encoding.removesuffix("-sig").upper()
        raise DataError(
            f"{path}, line {line}: expected text in {name}, got byte {raw[error.start]:#x}: "
            f"save the file as {name}",
            **mistake("wrong-format", path),
        ) from None

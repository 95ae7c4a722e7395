"""Folders of arrays on disk: written in blocks, there whole or not at all, read by mapping.

    manifest.json       what the arrays are of, with the dtype and shape of each
    NAME.npy            one plain array each

n: rows of a matrix.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from silograph.core.errors import DataError
from silograph.core.files import hold_folder

MANIFEST = "manifest.json"
COLUMN_BITS = 32  # of a 64-bit entry; the bits above hold the row
MOST_BUCKETS = 200  # files that are open at the same time; some systems allow 256
_PARTIAL = ".partial-"  # begins the name of a folder that is being made


def write_blocks(
    path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...], blocks: Iterator[np.ndarray]
) -> None:
    """Write one .npy file from blocks of rows that together have this shape."""
    header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    written = 0
    with path.open("xb") as file:
        np.lib.format.write_array_header_2_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype=dtype).data)
            written += len(block)
    assert written == shape[0]  # a header that lies would read as a damaged file


class Entries:
    """A set of entries (row, column) of a matrix, kept on disk in buckets of neighboring rows.

    An entry is one int64, row * 2^32 + column. Memory holds one bucket at a time. What was added
    last counts only when `settle` is through.
    """

    def __init__(self, folder: Path, num_rows: int, expected: int, bucket: int) -> None:
        """Make an empty set.

        Args:
            folder: an empty folder for the buckets.
            num_rows: n, below 2^31.
            expected: about how many entries there will be.
            bucket: about how many of them memory holds at a time.
        """
        count = min(max(-(-expected // bucket), 1), MOST_BUCKETS, num_rows)
        self._num_rows = num_rows
        self._rows = -(-num_rows // count)  # of a bucket
        count = -(-num_rows // self._rows)
        self._paths = [folder / f"{number:04d}" for number in range(count)]
        self._sizes = [0] * count  # of the sorted head of each file

    def __len__(self) -> int:
        """Return how many there are, as of `settle`."""
        return sum(self._sizes)

    def add(self, blocks: Iterator[np.ndarray]) -> None:
        """Add entries in blocks (k,) int64, any of which may be there already."""
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("ab")) for path in self._paths]
            for entries in blocks:
                bucket = ((entries >> COLUMN_BITS) // self._rows).astype(np.uint16)
                # 16 bits are sorted by radix, several times faster than by comparing entries.
                entries = entries[np.argsort(bucket, kind="stable")]
                ends = np.cumsum(np.bincount(bucket, minlength=len(files)))
                for file, part in zip(files, np.split(entries, ends[:-1]), strict=True):
                    file.write(part.data)

    def settle(self) -> Iterator[float]:
        """Sort what was added, drop what is there twice; yield the share that is done."""
        for number, path in enumerate(self._paths):
            self._sizes[number] = _settle(path, self._sizes[number])
            yield (number + 1) / len(self._paths)

    def take_rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield entries a row and their columns, bucket by bucket; the set is gone afterwards.

        Rows ascend, and so do the columns within a row.
        """
        for number, path in enumerate(self._paths):
            entries = np.fromfile(path, np.int64)
            path.unlink()
            first = number * self._rows
            rows = min(self._rows, self._num_rows - first)
            starts = np.arange(first, first + rows + 1) << COLUMN_BITS
            yield np.diff(np.searchsorted(entries, starts)), entries.astype(np.uint32)


def _settle(path: Path, head: int) -> int:
    """Sort a bucket whose first `head` entries are sorted, drop repeated ones, return the size."""
    entries = np.fromfile(path, np.int64)
    if len(entries) == head:
        return head
    entries[head:].sort()
    entries.sort(kind="stable")  # merges the two sorted runs
    entries = entries[np.diff(entries, prepend=-1) != 0]
    path.write_bytes(entries.data)
    return len(entries)


@contextmanager
def making(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that is `folder` afterwards, or gone where the block raises."""
    partial = folder.with_name(_PARTIAL + folder.name)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def alone(folder: Path, wait: Callable[[], None]) -> Iterator[None]:
    """Let no other process make anything in `folder`; `wait` is called if one does.

    What killed processes left behind is cleared away.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = hold_folder(folder)
    if handle is None:
        wait()
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        for partial in folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(partial)
        yield
    finally:
        os.close(handle)


def write_manifest(folder: Path, about: Mapping[str, Any]) -> None:
    """Write what the arrays in `folder` are of; adds the dtype and shape of each."""
    arrays = {}
    for path in sorted(folder.glob("*.npy")):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        arrays[path.stem] = [array.dtype.str, list(array.shape)]
    text = json.dumps({**about, "arrays": arrays}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_folder(
    folder: Path, names: Sequence[str], same: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Return arrays of a folder, mapped copy-on-write: nothing is read before it is used.

    Args:
        folder: made by `making` with `write_manifest`.
        names: of the arrays.
        same: entries of the manifest that must be as given.

    Raises:
        DataError: the folder is damaged, and has to be deleted.
    """
    try:
        about = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for key, value in same.items():
            if about[key] != value:
                raise ValueError(f"{key} {about[key]!r} instead of {value!r}")
        return {name: _mapped(folder, name, about["arrays"][name]) for name in names}
    # A foreign manifest surfaces as one of these, and numpy's reader raises the last two.
    except (KeyError, TypeError, AttributeError, OSError, ValueError, EOFError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(
            f"expected a whole graph in {folder}, got {reason}: delete the folder, and it is made "
            "again"
        ) from None


def _mapped(folder: Path, name: str, about: Sequence[Any]) -> np.ndarray:
    # Copy-on-write, for torch warns of arrays that it cannot write to.
    array: np.ndarray = np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False)
    if [array.dtype.str, list(array.shape)] != list(about):
        raise ValueError(f"{name}.npy of {array.dtype} {array.shape} instead of {about}")
    return array
